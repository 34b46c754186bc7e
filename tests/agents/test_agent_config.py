"""`[[agents]]` tables: what is read, what is refused and in which words."""

from typing import Any

import pytest
from pydantic import ValidationError

from agents import (
    AGENT_KINDS,
    AgentConfig,
    GreedyAgent,
    LlmAgent,
    LlmConfig,
    OwnAgentConfig,
    RandomAgent,
    UciAgent,
    build_agent,
    check_agent,
    parse_agent_config,
)
from tests.agents.fakes import ScriptEngine, context

LLM: dict[str, Any] = {"kind": "llm", "name": "smol", "engine": "main"}


def llm(**changes: object) -> LlmConfig:
    config = parse_agent_config({**LLM, **changes})
    assert isinstance(config, LlmConfig)
    return config


def test_defaults() -> None:
    config = llm()
    assert (config.mode, config.persona, config.temperature, config.top_p) == (
        "constrained",
        "",
        1.0,
        1.0,
    )
    assert llm(mode="free").settings.max_tokens == 256
    assert llm(mode="free", max_tokens=40).settings.max_tokens == 40


def test_a_resolved_config_reads_back() -> None:
    for config in (llm(), llm(mode="free", persona="bold"), parse_agent_config(
        {"kind": "own_agent:FavouriteAgent", "name": "own", "favourites": ["b2"]}
    )):  # fmt: skip
        assert parse_agent_config(config.model_dump(exclude_none=True)) == config


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"mode": "wild"}, "mode", "'constrained', 'free' or 'think'"),
        ({"mode": "think", "max_tokens": 9}, "max_tokens", 'it is for mode = "free"'),
        ({"mode": "free", "think_tokens": 9}, "think_tokens", 'it is for mode = "think"'),
        ({"mode": "think", "think_tokens": 0}, "think_tokens", "greater than or equal to 1"),
        ({"temprature": 1.0}, "temprature", "Extra inputs"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": 10}, "max_tokens", 'it is for mode = "free"'),
        ({"name": ""}, "name", "at least 1"),
        ({"name": "x" * 65}, "name", "at most 64"),
        ({"name": "a\nb"}, "name", "printable"),
        ({"name": " a"}, "name", "without space"),
        ({"engine": 3}, "engine", "string"),
    ],
)
def test_refuses(changes: dict[str, object], key: str, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        llm(**changes)
    first = caught.value.errors()[0]
    assert first["loc"] == (key,)
    assert words in first["msg"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"name": "x"}, "kind: is missing"),
        ({"kind": "gredy", "name": "x"}, 'did you mean "greedy"?'),
        ({"kind": "alphazero", "name": "x"}, "known kinds: llm, uci, random, greedy"),
        ({"kind": 3, "name": "x"}, "kind: 3 is not known"),
        ({"kind": "no module:", "name": "x"}, "should match pattern"),
    ],
)
def test_refuses_a_kind(data: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        parse_agent_config(data)


def test_every_field_is_described() -> None:
    for kind in AGENT_KINDS.values():
        assert all(field.description for field in kind.config.model_fields.values())


def test_identity_is_all_that_may_change_play() -> None:
    same = llm().identity
    assert llm(name="twin").identity == same
    others: list[AgentConfig] = [
        llm(mode="free"),
        llm(persona="bold"),
        llm(temperature=0.5),
        llm(top_p=0.5),
        llm(engine="other"),
        parse_agent_config({"kind": "random", "name": "smol"}),
        parse_agent_config({"kind": "own_agent:FavouriteAgent", "name": "smol", "favourites": []}),
        parse_agent_config({"kind": "own_agent:FavouriteAgent", "name": "smol", "favourites": [1]}),
    ]
    assert len({same, *(config.identity for config in others)}) == len(others) + 1


def test_builds_each_kind() -> None:
    engines = {"main": ScriptEngine()}
    kinds = {"llm": LlmAgent, "random": RandomAgent, "greedy": GreedyAgent, "uci": UciAgent}
    assert set(kinds) == set(AGENT_KINDS)
    for kind, built in kinds.items():
        data = LLM if kind == "llm" else {"kind": kind, "name": "x"}
        data |= {"command": "stockfish"} if kind == "uci" else {}
        assert isinstance(build_agent(parse_agent_config(data), engines, context()), built)


def test_a_missing_engine_is_named() -> None:
    with pytest.raises(ValueError, match='engine: no engine is named "main"; engines: fast'):
        build_agent(llm(), {"fast": ScriptEngine()}, context())


@pytest.mark.parametrize(
    ("kind", "extra", "words"),
    [
        ("no_such_module:X", {}, "cannot be imported"),
        ("own_agent:Missing", {}, "module own_agent has no Missing"),
        ("own_agent:__name__", {}, "is not a class"),
        ("own_agent:FavouriteAgent", {"favourites": []}, "could not be made: KeyError: 'engine'"),
    ],
)
def test_an_own_class_that_cannot_be_made_is_one_line(
    kind: str, extra: dict[str, object], words: str
) -> None:
    config = parse_agent_config({"kind": kind, "name": "own", **extra})
    assert isinstance(config, OwnAgentConfig)
    with pytest.raises(ValueError, match=words) as caught:
        build_agent(config, {}, context())
    assert "\n" not in str(caught.value)


def test_an_own_class_is_looked_for_before_any_engine_exists() -> None:
    check_agent(llm())
    check_agent(parse_agent_config({"kind": "own_agent:FavouriteAgent", "name": "own"}))
    with pytest.raises(ValueError, match="cannot be imported"):
        check_agent(parse_agent_config({"kind": "no_such_module:X", "name": "own"}))
