"""Every mistake in a config is one line that names the key and the remedy."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from agents import AGENT_KINDS
from arena.config import ConfigError, Section, load, openings_of, parse, reference
from arena.preflight import check
from arena.schedule import matches
from serving import ENGINE_KINDS, FakeConfig, SaturationConfig
from serving.fake_model import FakeFault
from serving.scripted import ScriptedFault

ROOT = Path(__file__).parents[2]
NUMBERS = {int, float, int | None, float | None}
SWITCHES = {bool, bool | None}
MODELS: list[type[BaseModel]] = [
    *(Section.__subclasses__()),
    *(kind.config for kind in AGENT_KINDS.values()),
    *(kind.config_class for kind in ENGINE_KINDS.values()),
    *(ScriptedFault, FakeConfig, FakeFault, SaturationConfig),
]


def data(**changes: Any) -> dict[str, Any]:
    """A config of two scripted players, with top-level keys replaced."""
    base: dict[str, Any] = {
        "name": "test",
        "seed": 7,
        "engines": {"main": {"kind": "scripted", "max_concurrent": 4, "max_queued": 4}},
        "agents": [
            {"name": "a", "kind": "llm", "engine": "main"},
            {"name": "b", "kind": "llm", "engine": "main"},
        ],
        "tournament": {"games": ["chess", "janggi"], "pairs": 2, "parallel_matches": 8},
    }
    return {**base, **changes}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_number_is_no_text_and_no_switch(model: type[BaseModel]) -> None:
    """`temperature = true` was 1, and `random_moves = "0.5"` a half."""
    for name, field in model.model_fields.items():
        wrong: list[Any] = []
        if field.annotation in NUMBERS:
            wrong = [True, "1"]
        elif field.annotation in SWITCHES:
            wrong = [1, "true"]
        for value in wrong:
            with pytest.raises(ValidationError) as seen:
                model.model_validate({name: value})
            # a knob that a kind lacks is refused by its table
            assert {error["loc"] for error in seen.value.errors()} & {(name,), ()}, name


def test_a_name_with_a_joiner_is_told_what_is_wrong() -> None:
    agents = [{"name": "👨\u200d👩", "kind": "random"}, {"name": "b", "kind": "random"}]
    with pytest.raises(ConfigError, match=r"agents\[0\]\.name: .*no joiners"):
        parse(data(agents=agents))


@pytest.mark.parametrize("latency", [True, "0.5", [0, "1"]])
def test_a_range_is_of_numbers(latency: object) -> None:
    engines = {"main": {"kind": "scripted", "latency_seconds": latency}}
    with pytest.raises(ConfigError, match=r"engines\.main\.latency_seconds"):
        parse(data(engines=engines))


def test_a_whole_number_is_a_number() -> None:
    agents = [
        {"name": "a", "kind": "llm", "engine": "main", "temperature": 1},
        {"name": "b", "kind": "uci", "command": "x", "random_moves": 1},
    ]
    made = parse(data(agents=agents))
    assert (made.agents[0].temperature, made.agents[1].random_moves) == (1.0, 1.0)


def test_a_player_of_one_game_alone_is_read_and_counted() -> None:
    table: dict[str, Any] = {
        "name": "x",
        "agents": [
            {"kind": "random", "name": "both"},
            {"kind": "greedy", "name": "too"},
            {"kind": "random", "name": "chess-only", "games": ["chess"]},
        ],
        "tournament": {"games": ["chess", "janggi/janggimodern"], "max_plies": 4},
    }
    specs = matches(parse(table))
    players = {
        game: {name for spec in specs if spec.game == game for name in spec.agents}
        for game in ("chess", "janggi")
    }
    assert players == {"chess": {"both", "too", "chess-only"}, "janggi": {"both", "too"}}
    assert len(specs) == 6 + 2
    for wrong, told in (
        (["go"], 'agents[2].games: "go" is not played; this run plays chess, janggi'),
        ([], "agents[2].games"),
    ):
        table["agents"][2]["games"] = wrong
        with pytest.raises(ConfigError) as seen:
            parse(table)
        assert told in str(seen.value)
    table["agents"] = table["agents"][:2]
    table["agents"][1]["games"] = ["chess"]
    with pytest.raises(ConfigError, match="janggi has fewer than two players"):
        parse(table)


def test_defaults_are_filled_in_and_the_resolved_copy_reads_back_to_the_same() -> None:
    config = parse(data())
    again = parse(tomllib.loads(config.to_toml()))
    assert again == config
    assert again.digest == config.digest
    assert config.pace.move_period_seconds == 1.0


def test_no_ply_cap_survives_the_round_trip() -> None:
    config = parse(data(tournament={"games": ["chess"], "max_plies": 0}))
    assert config.tournament.max_plies is None
    assert parse(tomllib.loads(config.to_toml())) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nmae": "x"}, r'nmae: unknown key; did you mean "name"\?'),
        ({"tournament": {"gmaes": ["chess"]}}, r'tournament\.gmaes: .*did you mean "games"\?'),
        ({"tournament": {"zzz": 1}}, r"tournament\.zzz: unknown key; known keys: .*max_plies"),
        ({"tournament": {"pairs": "two"}}, r"tournament\.pairs: is 'two'; .*integer"),
        ({"tournament": {"pairs": 0}}, r"tournament\.pairs: is 0; .*greater than"),
        ({"tournament": {"games": []}}, r"tournament\.games: "),
        ({"tournament": {"games": ["go"]}}, r"tournament\.games: .*go.*chess"),
        ({"tournament": {"games": ["janggi/xiangqi"]}}, r'tournament\.games: .*"xiangqi".*janggi'),
        ({"tournament": {"games": ["chess", "chess"]}}, r"chess/standard is named twice"),
        ({"tournament": {"games": ["janggi/janggi", "janggi"]}}, r"janggi/janggi is named twice"),
        ({"tournament": {"format": "arena"}}, r"tournament\.format: is 'arena'"),
        ({"name": "../../etc"}, r"name: is "),
        ({"seed": -1}, r"seed: is -1"),
        ({"pace": {"move_period_seconds": float("nan")}}, r"pace\.move_period_seconds: "),
        ({"agents": []}, r"agents: "),
        ({"agents": [{"name": "a", "kind": "random"}] * 2}, r'agents: two are named "a"'),
        ({"agents": ["a", "b"]}, r"agents\[0\]: is 'a'; write a table"),
        (
            {"agents": [{"name": "a", "kind": "llm", "engine": "x"}, *data()["agents"][1:]]},
            r'agents\[0\]\.engine: no engine is named "x"; engines: main',
        ),
        (
            {
                "agents": [
                    {"name": "a", "kind": "llm", "engine": "main", "tmp": 1},
                    *data()["agents"][1:],
                ]
            },
            r"agents\[0\]\.tmp: unknown key",
        ),
        (
            {"agents": [{"name": "a", "kind": "robot"}, *data()["agents"][1:]]},
            r"agents\[0\]\.kind: 'robot' is not known",
        ),
        (
            {
                "agents": [
                    {"name": "a", "kind": "llm", "engine": "main", "mode": "thinks"},
                    *data()["agents"][1:],
                ]
            },
            r"agents\[0\]\.mode: .*'think'",
        ),
        ({"engines": {"main": {"kind": "warp"}}}, r"engines\.main.*'warp'"),
        (
            {"engines": {"main": {"kind": "scripted", "max_concurent": 3}}},
            r'engines\.main\.max_concurent: unknown key; did you mean "max_concurrent"\?',
        ),
        (
            {"engines": {"main": {"kind": "scripted", "kv_cache_bytes": 3}}},
            r"engines\.main.*kv_cache_bytes",
        ),
        ({"prompts": {"go": {"system": "x"}}}, r"prompts\.go: .*chess, janggi"),
        ({"prompts": {"chess": {}}}, r"prompts\.chess: give either system or file"),
        ({"prompts": {"chess": {"file": "nowhere.txt"}}}, r"prompts\.chess\.file: nowhere\.txt"),
        (
            {"engines": {"main": {"kind": "scripted", "max_concurrent": 2, "max_queued": 1}}},
            r"parallel_matches: 8 matches at once.*max_concurrent 2 \+ max_queued 1 = 3",
        ),
    ],
)
def test_a_mistake_is_one_line_with_key_and_remedy(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse(data(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"api_key_env": "sk-SECRET1"}, "api_key_env: the name of an environment variable"),
        ({"url": "http://user:SECRET1@127.0.0.1:8099"}, "url: keys and parameters stand in no url"),
        ({"url": "http://127.0.0.1:8099?key=SECRET1"}, "url: keys and parameters stand in no url"),
        ({"url": "127.0.0.1:8099"}, "url: is '127.0.0.1:8099'; it does not begin with http://"),
    ],
)
def test_what_could_be_a_key_is_not_printed(knobs: dict[str, str], said: str) -> None:
    engine = {"kind": "openai", "url": "http://127.0.0.1:8099", **knobs}
    with pytest.raises(ConfigError) as caught:
        parse(data(engines={"main": engine}))
    assert str(caught.value).startswith(f"engines.main.{said}")
    assert "SECRET1" not in str(caught.value)


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        (["http://a", "http://user:SECRET1@b"], "urls.1: keys and parameters stand in no url"),
        ("http://user:SECRET1@b", "urls: input should be a valid tuple"),
        (["http://a", "b:8000"], "urls.1: is 'b:8000'; it does not begin with http://"),
    ],
)
def test_a_wrong_one_of_several_urls_is_named_and_no_key_printed(urls: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(data(engines={"main": {"kind": "vllm_server", "urls": urls}}))
    assert str(caught.value).startswith(f"engines.main.{said}")
    assert "SECRET1" not in str(caught.value)


def test_unknown_books_and_set_ups_are_named() -> None:
    config = parse(data(openings={"book": "nowhere.epd"}))
    _, game, ruleset = config.games()[0]
    with pytest.raises(ConfigError, match=r"openings\.book: .*nowhere\.epd"):
        openings_of(config, game, ruleset)
    config = parse(data(openings={"janggi_setups": ["HHEE/HEEH"]}))
    _, game, ruleset = config.games()[1]
    with pytest.raises(ConfigError, match="HHEE/HEEH"):
        openings_of(config, game, ruleset)


def test_set_ups_can_be_chosen_and_chess_keeps_its_book() -> None:
    config = parse(data(openings={"book": "start", "janggi_setups": ["HEEH/EHHE", "EHEH/HEHE"]}))
    (_, chess, standard), (_, janggi, ruleset) = config.games()
    assert len(openings_of(config, chess, standard)) == 1
    names = [start.name for start in openings_of(config, janggi, ruleset)]
    assert names == ["Cho HEEH, Han EHHE", "Cho EHEH, Han HEHE"]
    config = parse(data(openings={"janggi_setups": "all"}))
    assert len(openings_of(config, janggi, ruleset)) == 16


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read .*; name a TOML file"),
        (b"name = ", "is not TOML"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"", "missing"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_an_engine_s_file_is_found_from_the_config_on(tmp_path: Path) -> None:
    fish = {"kind": "uci", "name": "fish", "command": "./fish"}
    players = [{"kind": "random", "name": "dice"}, fish]
    judged = {"judge": {"command": ["bin/fish", "net"]}}
    stored = parse(data(agents=players, engines={}, adjudication=judged), tmp_path).to_data()
    assert stored["agents"][1]["command"] == f"{tmp_path}/fish"
    assert list(stored["adjudication"]["judge"]["command"]) == [f"{tmp_path}/bin/fish", "net"]
    assert parse(stored, tmp_path / "elsewhere").to_data() == stored


def test_tables_that_the_machine_cannot_hold_are_refused() -> None:
    fish = {"kind": "uci", "name": "fish", "command": "stockfish", "hash_mib": 65_536}
    players = [{"kind": "random", "name": "dice"}, {**fish, "processes": 256}]
    with pytest.raises(ConfigError, match=r"agents\[1\]\.hash_mib: .* come to 16,777,216 MiB"):
        check(parse(data(agents=players, engines={})))


def test_prompt_files_are_inlined(tmp_path: Path) -> None:
    (tmp_path / "rules.txt").write_text("Rules ♞")
    config = parse(data(prompts={"chess": {"file": "rules.txt"}}), tmp_path)
    assert config.prompts["chess"].system == "Rules ♞"
    assert config.prompts["chess"].file is None


@pytest.mark.parametrize("name", ["quickstart.toml", "fleet-gpu.toml"])
def test_overrides_reach_any_key(name: str) -> None:
    path = ROOT / "configs" / name
    engine = next(iter(load(path).engines))
    config = load(
        path,
        ["tournament.pairs=3", f"engines.{engine}.max_queued=999", "agents.0.name=zoe", "seed=5"],
    )
    assert config.tournament.pairs == 3
    assert config.engines[engine].max_queued == 999
    assert config.agents[0].name == "zoe"
    assert config.seed == 5


def test_agents_are_set_by_name() -> None:
    path = ROOT / "configs" / "quickstart.toml"
    name = load(path).agents[1].name
    assert load(path, [f"agents.{name}.persona=Bold."]).agents[1].model_dump()["persona"] == "Bold."
    with pytest.raises(ConfigError, match=f'or a name: .*"{name}"'):
        load(path, ["agents.nobody.persona=Bold."])


@pytest.mark.parametrize("override", ["pairs", "=3", "name.deeper=1", "agents.9.name=x"])
def test_a_bad_override_is_named(override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        load(ROOT / "configs" / "quickstart.toml", [override])


def test_the_reference_in_the_docs_is_what_the_program_says() -> None:
    held = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    assert held == reference(), "run `arena config reference > docs/reference/config.md`"
