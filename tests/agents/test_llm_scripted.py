"""The LLM agent on the packaged model's own tokenizer and template, by the scripted engine."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from agents import Agent, AgentContext, Fault, Interrupted, build_agent, parse_agent_config
from agents.llm import LlmAgent
from serving import (
    PACKAGED_MODEL,
    Engine,
    EngineConfigError,
    ModelTemplate,
    PromptParts,
    build_engine,
    check_engine,
    load_template,
    parse_engine_config,
    resolve,
)
from tests.agents.fakes import context, turn
from tests.agents.test_llm_games import GAMES, usual

pytestmark = pytest.mark.timeout(300)  # the first run on a machine converts the model


@pytest.fixture(scope="module")
def template() -> ModelTemplate:
    """The packaged model's, where it is installed."""
    try:
        check_engine("main", parse_engine_config("main", {"kind": "scripted"}))
    except EngineConfigError as error:
        pytest.skip(str(error))
    return load_template(resolve(PACKAGED_MODEL).directory)


def scripted(tmp_path: Path, **table: object) -> Engine:
    config = parse_engine_config("main", {"kind": "scripted", **table})
    return build_engine("main", config, log_dir=tmp_path, stall_seconds=30.0, restart_limit=0)


def agent_on(engine: Engine, told: AgentContext | None = None, **table: object) -> Agent:
    config = parse_agent_config({"kind": "llm", "name": "a", "engine": "main", **table})
    return build_agent(config, {"main": engine}, told or context())


@pytest.mark.parametrize(("game", "ruleset"), GAMES)
async def test_prompts_fit_the_budget(
    game: str, ruleset: str, template: ModelTemplate, tmp_path: Path
) -> None:
    engine = scripted(tmp_path, context_tokens=2048)
    await engine.open()
    agent = agent_on(engine)
    assert isinstance(agent, LlmAgent)
    need = agent.context_need(game, ruleset)
    assert need.move_tokens == {"chess": 5, "janggi": 6}[game]
    assert need.prefix_tokens <= {"chess": 460, "janggi": 780}[game]
    assert need.refusal(200) is None
    await engine.close()


@pytest.mark.parametrize("game", ["chess", "janggi"])
@pytest.mark.parametrize("mode", ["constrained", "free"])
async def test_token_ids_grow_only_at_the_end(
    game: str, mode: str, template: ModelTemplate, tmp_path: Path
) -> None:
    legal_replies = {"replies": ["MOVE: pass"]} if mode == "free" else {}
    engine = scripted(tmp_path, **legal_replies)
    await engine.open()
    position = usual(game)
    told = context(games=((game, position.start.ruleset),))
    agents = [agent_on(engine, told, mode=mode) for _ in range(2)]
    for agent in agents:
        await agent.open()
    rendered = recorded(engine)
    while position.result() is None and position.ply < 30:
        asked = turn(position, game=game, budget=1)
        move = (await agents[position.ply % 2].choose(asked)).move
        legal = position.legal_moves()
        position = position.play(move or legal[position.ply % len(legal)])
    ids = [list(template.render(parts).ids) for parts in rendered]
    tail = common_tail(ids[0], ids[1])
    for before, after in pairwise(ids):
        body = before[: len(before) - tail]
        assert after[: len(body)] == body
        assert len(after) - len(before) <= 6
    assert template.check(rendered[-1]) is None
    await engine.close()


def recorded(engine: Engine) -> list[PromptParts]:
    """What the engine's template is asked to render from now on."""
    kept: list[PromptParts] = []
    render = engine.template.render

    def recording(parts: PromptParts) -> object:
        kept.append(parts)
        return render(parts)

    engine.template.render = recording  # type: ignore[method-assign, assignment]
    return kept


def common_tail(one: Sequence[int], other: Sequence[int]) -> int:
    length = 0
    while one[-1 - length] == other[-1 - length]:
        length += 1
    return length


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("cut_short", Fault.CUT_SHORT),
        ("empty", Fault.CUT_SHORT),
        ("garbage", Fault.CONSTRAINT_IGNORED),
        ("illegal", Fault.CONSTRAINT_IGNORED),
        ("overload", Fault.OVERLOADED),
        ("reject", Fault.REJECTED),
        ("die", Fault.ENGINE_DEAD),
    ],
)
async def test_misbehaviour_interrupts_and_the_next_try_has_the_same_dice(
    kind: str, fault: Fault, template: ModelTemplate, tmp_path: Path
) -> None:
    moves = []
    for faults in ([], [{"kind": kind, "at": [0]}]):
        engine = scripted(tmp_path, faults=faults)
        await engine.open()
        agent, shown = agent_on(engine), turn(usual("chess"), game="chess")
        if faults:
            with pytest.raises(Interrupted) as caught:
                await agent.choose(shown)
            assert [a.fault for a in caught.value.attempts] == [fault]
            shown = turn(usual("chess"), game="chess", made=caught.value.attempts)
        moves.append((await agent.choose(shown)).move)
        await engine.close()
    assert moves[0] == moves[1]


async def test_a_free_agent_that_says_nonsense_forfeits(
    template: ModelTemplate, tmp_path: Path
) -> None:
    engine = scripted(tmp_path, replies=["I like the sea."])
    await engine.open()
    decision = await agent_on(engine, mode="free").choose(turn(usual("chess"), game="chess"))
    assert (decision.move, decision.fault) == (None, Fault.UNPARSABLE)
    assert len(decision.attempts) == 3
    await engine.close()
