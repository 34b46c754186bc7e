"""Think mode: a bounded thought, closed by force, then a legal move."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from agents import Attempt, Fault, Interrupted, LlmAgent, LlmSettings
from agents.judge import judge_free
from arena import cli, preflight
from arena import config as configs
from arena.clock import fell, spent_seconds
from arena.store import AttemptRow, Records, read
from arena.tournament import resumed_plan
from serving import (
    EngineStalled,
    EngineUnavailable,
    Finish,
    PromptParts,
    Request,
    ThinkingTemplate,
    TokenPrompt,
)
from tests.agents.fakes import (
    OWN_GAME,
    Answer,
    CharTemplate,
    ScriptEngine,
    context,
    grid,
    reply,
    turn,
)
from tests.arena.test_run import start, wait_for_plies


class OpenTemplate(CharTemplate):
    """One token a character, thoughts in brackets."""

    think_end = "]"

    def open_thought(self, parts: PromptParts) -> TokenPrompt:
        return TokenPrompt((*self.render(parts).ids, ord("[")))

    def close_thought(self, parts: PromptParts, thought: str, max_tokens: int) -> TokenPrompt:
        said = map(ord, thought[:max_tokens])
        return TokenPrompt((*self.open_thought(parts).ids, *said, ord("]")))


def thinker(*answers: Answer, think_tokens: int = 64) -> tuple[LlmAgent, ScriptEngine]:
    engine = ScriptEngine(answers, template=OpenTemplate())
    settings = LlmSettings("think", think_tokens=think_tokens)
    return LlmAgent("tester", engine, context(), settings), engine


def told(request: Request) -> str:
    assert isinstance(request.prompt, TokenPrompt)
    return "".join(map(chr, request.prompt.ids))


# one move


async def test_a_thought_is_asked_for_and_then_a_move_after_it() -> None:
    agent, engine = thinker("The centre is free.", "b2")
    decision = await agent.choose(turn(grid("a1")))
    assert (decision.move, decision.fault) == ("b2", None)
    first, second = engine.requests
    assert (first.id, second.id) == ("m1/1/0/0/think", "m1/1/0/0")
    assert (first.choices, second.choices) == (None, grid("a1").legal_moves())
    assert (first.max_tokens, second.max_tokens) == (64, 3)
    assert (first.stop, second.stop) == (("]",), ())
    assert told(second) == f"{told(first)}The centre is free.]"
    thought, answer = decision.attempts
    assert (thought.is_thought, answer.is_thought) == (True, False)
    assert thought.reply is not None
    assert (thought.reply.text, thought.reply.reasoning) == ("", "The centre is free.")
    assert (thought.fault, thought.reply.usage.completion) == (None, 2)


async def test_both_questions_have_dice_of_their_own_that_a_next_run_throws_again() -> None:
    runs = []
    for _ in range(2):
        agent, engine = thinker("Hm.", "b2")
        await agent.choose(turn())
        runs.append([request.sampling.seed for request in engine.requests])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


async def test_a_thought_that_ends_at_its_bound_is_no_fault() -> None:
    agent, engine = thinker(reply("Take the", Finish.LENGTH), "b2")
    decision = await agent.choose(turn())
    assert (decision.move, decision.fault) == ("b2", None)
    assert told(engine.requests[1]).endswith("[Take the]")


async def test_what_an_engine_writes_after_the_thought_is_no_part_of_it() -> None:
    agent, engine = thinker("Corner.\n]\n\nMOVE: c3] a1", "b2")
    assert (await agent.choose(turn())).move == "b2"
    assert told(engine.requests[1]).endswith("[Corner.]")


async def test_an_empty_thought_is_one() -> None:
    agent, engine = thinker("]", "b2")
    assert (await agent.choose(turn())).move == "b2"
    assert told(engine.requests[1]) == told(engine.requests[0]) + "]"


async def test_the_next_ply_does_not_hold_the_thought() -> None:
    agent, engine = thinker("Corner.", "a1", "Centre.", "b2")
    await agent.choose(turn())
    await agent.choose(turn(grid("a1")))
    thoughts = [told(request) for request in engine.requests[::2]]
    assert thoughts[1].startswith(thoughts[0].removesuffix("|["))
    assert "Corner" not in thoughts[1]


async def test_what_is_computed_at_the_start_opens_the_thought_too() -> None:
    engine = ScriptEngine(template=OpenTemplate())
    shown = context(games=((OWN_GAME, "standard"),))
    await LlmAgent("tester", engine, shown, LlmSettings("think")).open()
    (primed,) = engine.primed
    assert isinstance(primed, TokenPrompt)
    assert primed.ids[-1] == ord("[")


# time


async def test_time_that_runs_out_in_a_thought_is_the_players_own() -> None:
    agent, engine = thinker(reply("On and on", Finish.DEADLINE))
    decision = await agent.choose(turn(clock_left_s=4.0))
    assert (decision.move, decision.fault) == (None, Fault.FLAG_FALL)
    (request,) = engine.requests
    assert request.deadline_s == 4.0
    (attempt,) = decision.attempts
    assert attempt.reply is not None
    assert (attempt.fault, attempt.reply.reasoning) == (Fault.FLAG_FALL, "On and on")


async def test_a_clock_pays_for_the_thought_and_the_answer() -> None:
    agent, _ = thinker(reply("Hm.", seconds=2.0), reply("b2", seconds=0.5))
    decision = await agent.choose(turn(clock_left_s=9.0))
    assert spent_seconds(decision.attempts, 0.0) == 2.5
    assert fell(decision.attempts, 2.5, 1.0).startswith("its move took 2.50 s (0.00 s prefill")


async def test_a_clock_that_is_empty_asks_nothing() -> None:
    agent, engine = thinker()
    decision = await agent.choose(turn(clock_left_s=0.0))
    assert (decision.fault, engine.requests) == (Fault.FLAG_FALL, [])


# failures of the infrastructure


async def interrupted(agent: LlmAgent, made: tuple[Attempt, ...] = ()) -> tuple[Attempt, ...]:
    with pytest.raises(Interrupted) as caught:
        await agent.choose(turn(made=made))
    return made + caught.value.attempts


async def test_a_thought_that_was_cut_off_is_asked_for_again_with_the_same_dice() -> None:
    agent, engine = thinker(EngineStalled("x"), "Hm.", "b2")
    made = await interrupted(agent)
    assert [(a.request_id, a.fault) for a in made] == [("m1/0/0/0/think", Fault.STALLED)]
    decision = await agent.choose(turn(made=made))
    assert decision.move == "b2"
    ids = [request.id for request in engine.requests]
    assert ids == ["m1/0/0/0/think", "m1/0/0/1/think", "m1/0/0/1"]
    assert engine.requests[0].sampling == engine.requests[1].sampling


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (EngineUnavailable("cut"), Fault.TRANSPORT),
        (reply("b", Finish.LENGTH), Fault.CUT_SHORT),
        (reply("no move"), Fault.CONSTRAINT_IGNORED),
        (reply("b", Finish.DEADLINE), Fault.STALLED),
    ],
)
async def test_a_thought_is_kept_when_its_answer_is_cut_off(answer: Answer, fault: Fault) -> None:
    agent, engine = thinker("Hm.", answer, "b2")
    made = await interrupted(agent)
    assert [a.fault for a in made] == [None, fault]
    decision = await agent.choose(turn(made=made))
    assert decision.move == "b2"
    assert [a.is_thought for a in decision.attempts] == [False]
    ids = [request.id for request in engine.requests]
    assert ids == ["m1/0/0/0/think", "m1/0/0/0", "m1/0/0/1"]
    again, first = engine.requests[2], engine.requests[1]
    assert (again.prompt, again.sampling) == (first.prompt, first.sampling)


# context and engines


def test_the_context_holds_the_thought() -> None:
    agent, engine = thinker(think_tokens=100)
    need = agent.context_need(OWN_GAME, "standard")
    assert need.thought_tokens == 100 + len("[]")
    plain = LlmAgent("plain", engine, context(), LlmSettings()).context_need(OWN_GAME, "standard")
    assert need.answer_tokens == plain.answer_tokens
    small = replace(need, context_tokens=need.tokens(3))
    assert small.window == 3
    refusal = small.refusal(4)
    assert refusal is not None
    assert "102 for a thought" in refusal
    assert f"raise context_tokens to {need.tokens(4)}, or lower think_tokens" in refusal


async def test_a_template_that_cannot_be_continued_is_refused() -> None:
    shown = context(games=((OWN_GAME, "standard"),))
    agent = LlmAgent("tester", ScriptEngine(), shown, LlmSettings("think"))
    with pytest.raises(ValueError, match=r'^mode: "think" needs an engine .* "main" does not'):
        await agent.open()


def a_run(engine: dict[str, Any], **agent: Any) -> dict[str, Any]:
    asked = {"kind": "llm", "engine": "main", "mode": "think", **agent}
    return {
        "name": "think",
        "engines": {"main": engine},
        "agents": [{"name": name, **asked} for name in ("one", "two")],
        "tournament": {"games": ["chess"], "pairs": 1, "parallel_matches": 2, "max_plies": 8},
        "pace": {"move_period_seconds": 0.0},
    }


@pytest.mark.parametrize(
    "engine",
    [
        {"kind": "openai", "url": "http://127.0.0.1:9", "model": "m"},
        {"kind": "lmstudio", "model": "m"},
        {"kind": "ollama", "url": "http://127.0.0.1:9", "model": "m"},
        {"kind": "own_engine:DiceEngine"},
    ],
    ids=lambda engine: engine["kind"],
)
def test_engines_of_chat_messages_are_refused_at_load(engine: dict[str, Any]) -> None:
    config = configs.parse(a_run(engine))
    with pytest.raises(configs.ConfigError, match=r'^agents\[0\]\.mode: "think" needs') as caught:
        preflight.check(config)
    assert "\n" not in str(caught.value)
    assert '"constrained"' in str(caught.value)


def test_a_thought_that_does_not_fit_is_refused_at_load() -> None:
    config = configs.parse(a_run({"kind": "scripted"}, think_tokens=4000))
    with pytest.raises(configs.ConfigError, match=r"40\d\d for a thought.*context_tokens is 2048"):
        preflight.check(config)


def test_a_thought_is_a_question_of_the_forecast() -> None:
    forecast = preflight.check(configs.parse(a_run({"kind": "scripted"})))
    assert forecast.requests == 2 * 8 * 2


# whole runs


REPLIES = ["I see.", "Let me see what is free." * 20, "Take it.</think>\n\nMOVE: e2e4", ""]


def play(folder: Path, capsys: pytest.CaptureFixture[str], **engine: Any) -> Records:
    """A run on the scripted engine, by the command line."""
    table = {"kind": "scripted", "replies": REPLIES, **engine}
    folder.mkdir()
    (folder / "t.toml").write_text(tomli_w.dumps(a_run(table, think_tokens=48)))
    out = folder / "run"
    assert cli.main(["run", str(folder / "t.toml"), "--out", str(out), "--view", "none"]) == 0
    capsys.readouterr()
    return read(out)


def moves(records: Records) -> list[tuple[str, int, str]]:
    return [(ply.match_id, ply.ply, ply.move) for ply in records.plies]


def by_ply(records: Records) -> dict[tuple[str, int], list[AttemptRow]]:
    found: dict[tuple[str, int], list[AttemptRow]] = {}
    for row in records.attempts:
        found.setdefault((row.match_id, row.ply), []).append(row)
    return found


def test_a_run_keeps_each_thought_beside_its_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = play(tmp_path / "a", capsys)
    assert {row.state for row in records.matches} == {"finished"}
    of_plies = by_ply(records)
    for ply in records.plies:
        thought, answer = of_plies[ply.match_id, ply.ply]
        assert thought.request_id == f"{answer.request_id}/think"
        assert (thought.mode, thought.reply_text, answer.reasoning) == ("think", "", None)
        assert (thought.fault, answer.fault, answer.reply_text) == (None, None, ply.move)
        assert len(thought.reasoning or "") <= 48
    thoughts = {row.reasoning for row in records.attempts if row.reply_text == ""}
    assert thoughts == {"I see.", REPLIES[1][:48].rstrip(), "Take it.", None}
    cut = [row.finish for row in records.attempts if row.reasoning == REPLIES[1][:48].rstrip()]
    assert set(cut) == {"length"}


def test_figures_count_both_questions_of_a_move(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = play(tmp_path / "a", capsys)
    assert cli.main(["report", str(tmp_path / "a" / "run"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    written = sum(row.completion_tokens or 0 for row in records.attempts)
    per_move = report["engines"][0]["output_tokens_per_move"]
    assert per_move == pytest.approx(written / len(records.plies), rel=1e-3)
    assert sum(agent["moves"] for agent in report["agents"]) == len(records.plies)


def test_the_answer_and_the_next_ply_find_their_prefix_in_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = play(tmp_path / "a", capsys, block_tokens=1)
    for rows in by_ply(records).values():
        thought, answer = rows
        assert answer.cached_tokens is not None
        assert thought.prompt_tokens is not None
        assert answer.cached_tokens >= thought.prompt_tokens
    first = {row.match_id: row for row in reversed(records.attempts)}
    assert len(first) == 2
    plies = [row for row in records.attempts if row.reply_text == ""]
    for earlier, later in pairwise(sorted(plies, key=lambda row: (row.match_id, row.ply))):
        if earlier.match_id == later.match_id:
            assert (later.cached_tokens or 0) >= (earlier.prompt_tokens or 0) - 16


@pytest.mark.parametrize("fault", ["overload", "die", "garbage", "empty"])
def test_a_disturbed_run_plays_the_games_of_an_undisturbed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    calm = play(tmp_path / "a", capsys)
    faults = [{"kind": fault, "probability": 0.2}]
    disturbed = play(tmp_path / "b", capsys, faults=faults)
    assert any(row.fault for row in disturbed.attempts)
    assert moves(calm) == moves(disturbed)


def test_a_run_killed_while_models_think_ends_as_one_that_was_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {"latency_seconds": 0.05}
    calm = play(tmp_path / "a", capsys, **slow)
    process = start(tmp_path / "a" / "t.toml", tmp_path / "b")
    wait_for_plies(tmp_path / "b", 3, process)
    process.kill()
    process.communicate()
    assert cli.main(["resume", str(tmp_path / "b"), "--view", "none"]) == 0
    resumed = read(tmp_path / "b")
    assert moves(resumed) == moves(calm)
    kept = {row.request_id: row.reasoning for row in resumed.attempts}
    assert kept == {row.request_id: row.reasoning for row in calm.attempts}


def test_a_stored_thought_is_kept_by_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = play(tmp_path / "a", capsys)
    last = records.plies[-1]
    thought, answer = by_ply(records)[last.match_id, last.ply]
    cut = answer._replace(reply_text=None, fault="engine_dead", detail="gone")
    held = records._replace(
        plies=records.plies[:-1],
        attempts=tuple(cut if row is answer else row for row in records.attempts),
    )
    config = configs.parse(a_run({"kind": "scripted"}))
    past = resumed_plan(config, held).pasts[last.match_id]
    made, failed = past.attempts
    assert (made.is_thought, made.fault, failed.fault) == (True, None, Fault.ENGINE_DEAD)
    assert made.reply is not None
    assert made.reply.reasoning == (thought.reasoning or "")


# free mode


NOTHING = "the thinking used up all its tokens and came to no answer; think less"


@pytest.mark.parametrize(
    ("text", "finish", "reasoning", "said"),
    [
        ("", Finish.LENGTH, "Let me see", (Fault.TRUNCATED, NOTHING)),
        (" \n", Finish.LENGTH, "Let me see", (Fault.TRUNCATED, NOTHING)),
        ("<think>Let me see", Finish.LENGTH, "", (Fault.TRUNCATED, NOTHING)),
        ("", Finish.STOP, "Let me see", (Fault.EMPTY, "it was empty")),
        ("MOVE: b2", Finish.STOP, "MOVE: a1 is better", "b2"),
        ("<think>MOVE: a1</think>\nMOVE: b2", Finish.STOP, "", "b2"),
        ("a</think>MOVE: a1</think>\nMOVE: b2", Finish.STOP, "", "b2"),
    ],
)
def test_a_free_move_is_read_after_the_thinking(
    text: str, finish: Finish, reasoning: str, said: object
) -> None:
    judged = judge_free(text, finish, grid(), reasoning)
    assert (judged if isinstance(judged, str) else (judged.fault, judged.detail)) == said


async def test_reasoning_told_apart_does_not_reach_the_complaint_but_the_record() -> None:
    thought = replace(reply("", Finish.LENGTH), reasoning="I wonder about a1")
    engine = ScriptEngine([thought, "MOVE: b2"])
    agent = LlmAgent("tester", engine, context(), LlmSettings("free"))
    decision = await agent.choose(turn())
    assert decision.move == "b2"
    failed = decision.attempts[0]
    assert (failed.fault, failed.detail) == (Fault.TRUNCATED, NOTHING)
    assert failed.reply is not None
    assert failed.reply.reasoning == "I wonder about a1"
    note = engine.template.rendered[-1].tail_note
    assert "think less" in note
    assert "wonder" not in note


def test_a_template_of_chat_messages_is_no_thinking_one() -> None:
    assert isinstance(OpenTemplate(), ThinkingTemplate)
    assert not isinstance(CharTemplate(), ThinkingTemplate)
