"""The LLM agent on a scripted engine: what it asks, what it makes of the answers."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from agents import Attempt, Decision, Fault, Interrupted, LlmAgent, LlmSettings
from agents.llm import charged_seconds, sampling_seed
from serving import (
    EngineDead,
    EngineError,
    EngineStalled,
    EngineUnavailable,
    Finish,
    MalformedReply,
    Overloaded,
    RequestRejected,
    Timings,
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


def constrained(*answers: Answer) -> tuple[LlmAgent, ScriptEngine]:
    engine = ScriptEngine(answers)
    return LlmAgent("tester", engine, context(), LlmSettings()), engine


def free(*answers: Answer, max_tokens: int = 256) -> tuple[LlmAgent, ScriptEngine]:
    engine = ScriptEngine(answers)
    return LlmAgent("tester", engine, context(), LlmSettings("free", max_tokens=max_tokens)), engine


def last_prompt(engine: ScriptEngine) -> str:
    return CharTemplate.text(engine.template.rendered[-1])


# constrained mode


async def test_constrained_asks_for_a_legal_move() -> None:
    agent, engine = constrained("b2")
    decision = await agent.choose(turn(grid("a1")))
    assert (decision.move, decision.fault) == ("b2", None)
    (request,) = engine.requests
    assert request.choices == grid("a1").legal_moves()
    assert request.max_tokens == 3
    assert request.id == "m1/1/0/0"
    assert request.match_id == "m1"
    assert request.deadline_s == 30.0
    assert not request.stream
    assert decision.attempts[0].request_id == request.id


async def test_a_reply_that_equals_a_choice_is_whole_whatever_finish_says() -> None:
    for finish in Finish:
        agent, _ = constrained(reply("b2", finish))
        assert (await agent.choose(turn())).move == "b2"


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (reply("b", Finish.LENGTH), Fault.CUT_SHORT),
        (reply("", Finish.STOP), Fault.CUT_SHORT),
        (reply("e2e4"), Fault.CONSTRAINT_IGNORED),
        (reply("b2 "), Fault.CONSTRAINT_IGNORED),
        (reply("a1"), Fault.CONSTRAINT_IGNORED),
        (reply("b", Finish.DEADLINE), Fault.STALLED),
    ],
)
async def test_what_else_an_engine_answers_is_its_own_failure(answer: Answer, fault: Fault) -> None:
    agent, engine = constrained(answer)
    with pytest.raises(Interrupted) as caught:
        await agent.choose(turn(grid("a1")))
    (attempt,) = caught.value.attempts
    assert attempt.fault is fault
    assert attempt.fault.is_infrastructure
    assert attempt.reply is answer
    assert attempt.request_id == engine.requests[0].id
    assert str(caught.value) == attempt.detail


class OddError(EngineError):
    kind = "odd"


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (Overloaded("full"), Fault.OVERLOADED),
        (RequestRejected("too long"), Fault.REJECTED),
        (EngineUnavailable("cut"), Fault.TRANSPORT),
        (MalformedReply("nonsense"), Fault.MALFORMED),
        (EngineStalled("no step"), Fault.STALLED),
        (EngineDead("gone"), Fault.ENGINE_DEAD),
        (OddError(""), Fault.TRANSPORT),
    ],
)
@pytest.mark.parametrize("make", [constrained, free])
async def test_engine_errors_interrupt(
    error: EngineError, fault: Fault, make: Callable[..., tuple[LlmAgent, ScriptEngine]]
) -> None:
    agent, engine = make(error)
    with pytest.raises(Interrupted) as caught:
        await agent.choose(turn())
    assert caught.value.__cause__ is error
    assert caught.value.attempts[-1].fault is fault
    assert caught.value.attempts[-1].request_id == engine.requests[0].id


async def test_a_retry_after_the_infrastructure_keeps_the_dice_and_counts_the_try() -> None:
    agent, engine = constrained(EngineStalled("x"), Overloaded("y"), "b2")
    made: tuple[Attempt, ...] = ()
    for _ in range(2):
        with pytest.raises(Interrupted) as caught:
            await agent.choose(turn(made=made))
        made += caught.value.attempts
    decision = await agent.choose(turn(made=made))
    assert [r.id for r in engine.requests] == ["m1/0/0/0", "m1/0/0/1", "m1/0/0/2"]
    assert len({r.sampling.seed for r in engine.requests}) == 1
    assert [a.n for a in decision.attempts] == [0]


async def test_one_agent_plays_many_matches_and_both_sides() -> None:
    agent, engine = constrained("b2", "a1", "b2")
    await agent.choose(turn(match_id="m1"))
    await agent.choose(turn(grid("b2"), match_id="m1"))
    await agent.choose(turn(match_id="m2"))
    assert len({r.sampling.seed for r in engine.requests}) == 3
    first, second, third = engine.template.rendered[-3:]
    assert first == third
    assert replace(second, moves=()) == first


# prompts


async def test_prompts_grow_only_at_the_end_and_are_the_same_for_all_agents() -> None:
    template = CharTemplate()
    engine = ScriptEngine(["c3"] * 4, template=template)
    agents = [LlmAgent(name, engine, context(), LlmSettings(persona="")) for name in ("one", "two")]
    moves = ("a1", "b2", "c1")
    for ply in range(4):
        await agents[ply % 2].choose(turn(grid(*moves[:ply])))
    texts = [CharTemplate.text(parts) for parts in template.rendered[-4:]]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter.removesuffix("|"))
    for told in ("one", "two", "m1", "Side", " X", " O"):
        assert told not in texts[-1]


async def test_system_text_is_the_same_in_every_mode_and_persona() -> None:
    prompts = []
    for settings in (LlmSettings(), LlmSettings("free"), LlmSettings(persona="You are bold.")):
        engine = ScriptEngine(["MOVE: b2" if settings.mode == "free" else "b2"])
        await LlmAgent("a", engine, context(), settings).choose(turn())
        prompts.append(engine.template.rendered[-1])
    assert len({p.system for p in prompts}) == 1
    assert prompts[2].persona == "You are bold."
    assert prompts[0].lead == prompts[2].lead != prompts[1].lead


async def test_the_runs_own_prompt_replaces_ours() -> None:
    engine = ScriptEngine(["b2"])
    told = context(prompts={"noughts-and-crosses": "Three in a row wins."})
    await LlmAgent("a", engine, told, LlmSettings()).choose(turn())
    assert engine.template.rendered[-1].system == "Three in a row wins."


async def test_an_unusual_start_is_told() -> None:
    agent, engine = constrained("b2")
    await agent.choose(turn(grid(fen="x.o...... x")))
    assert "x.o...... x" in last_prompt(engine)


async def test_a_game_longer_than_the_context_is_rebased() -> None:
    roomy, _ = constrained()
    need = roomy.context_need(OWN_GAME, "standard")
    engine = ScriptEngine(["c3"] * 9, context_tokens=need.tokens(4))
    events: list[tuple[str, object]] = []
    told = context(record_event=lambda kind, detail: events.append((kind, detail)))
    agent = LlmAgent("tester", engine, told, LlmSettings())
    assert agent.context_need(OWN_GAME, "standard").window == 4
    moves = ("a1", "b1", "c1", "a2", "c2", "b2", "a3")
    for ply in range(len(moves) + 1):
        position = grid(*moves[:ply])
        await agent.choose(turn(position))
        parts = engine.template.rendered[-1]
        assert len(parts.moves) <= 4
        assert engine.template.count_tokens(parts) + 3 <= engine.limits.context_tokens
        base = ply - len(parts.moves)
        assert (grid(*moves[:base]).fen in parts.lead) == (base > 0)
        assert parts.moves == position.moves[base:]
    told_of = [detail for kind, detail in events if kind == "prompt_rebased"]
    assert {d["base_ply"] for d in told_of if isinstance(d, dict)} == {2, 4}
    assert len(told_of) == 3  # from each side at base 2, from one at base 4


async def test_a_broken_template_is_named_once_for_an_engine_and_a_game() -> None:
    template = CharTemplate(broken="token 3 is 'x', not 'y'")
    engine = ScriptEngine(template=template)
    told = context(games=((OWN_GAME, "standard"),))
    with capture_logs() as logs:
        for name in ("one", "two"):
            await LlmAgent(name, engine, told, LlmSettings()).open()
    (line,) = logs
    assert line["log_level"] == "warning"
    assert line["detail"] == "token 3 is 'x', not 'y'"
    assert (line["engine"], line["game"]) == ("main", OWN_GAME)
    assert template.num_checks == 1


# free mode


async def test_free_asks_openly_and_reads_the_last_line() -> None:
    agent, engine = free("The centre.\nMOVE: b2")
    decision = await agent.choose(turn())
    assert decision.move == "b2"
    (request,) = engine.requests
    assert request.choices is None
    assert request.max_tokens == 256
    assert request.stream
    assert "MOVE: <move>" in last_prompt(engine)


async def test_free_is_told_the_rule_and_asked_again() -> None:
    agent, engine = free("MOVE: b2", "hm", "MOVE: a1")
    decision = await agent.choose(turn(grid("b2")))
    assert decision.move == "a1"
    assert [a.fault for a in decision.attempts] == [Fault.ILLEGAL, Fault.UNPARSABLE, None]
    assert [a.n for a in decision.attempts] == [0, 1, 2]
    assert [r.id for r in engine.requests] == ["m1/1/0/0", "m1/1/1/0", "m1/1/2/0"]
    assert len({r.sampling.seed for r in engine.requests}) == 3
    plain, first, second = [p for p in engine.template.rendered if p.moves == ("b2",)][-3:]
    assert plain.tail_note == ""
    assert "b2 is taken" in first.tail_note
    assert "no line MOVE:" in second.tail_note
    assert "It ended: hm" in second.tail_note
    assert replace(first, tail_note="") == plain


async def test_free_forfeits_after_its_budget_with_the_last_fault() -> None:
    agent, _ = free("MOVE: z9", "", reply("Well, I", Finish.LENGTH))
    decision = await agent.choose(turn())
    assert decision.move is None
    assert [a.fault for a in decision.attempts] == [
        Fault.UNPARSABLE,
        Fault.EMPTY,
        Fault.TRUNCATED,
    ]
    assert decision.fault is Fault.TRUNCATED


async def test_infrastructure_does_not_use_up_the_budget() -> None:
    agent, engine = free("nothing", EngineStalled("x"), "nothing", EngineStalled("y"), "MOVE: b2")
    made: tuple[Attempt, ...] = ()
    for _ in range(2):
        with pytest.raises(Interrupted) as caught:
            await agent.choose(turn(made=made))
        made += caught.value.attempts
    decision = await agent.choose(turn(made=made))
    assert [r.id for r in engine.requests] == [
        "m1/0/0/0",
        "m1/0/1/0",
        "m1/0/1/1",
        "m1/0/2/0",
        "m1/0/2/1",
    ]
    assert decision == Decision("b2", None, decision.attempts)
    assert [a.n for a in decision.attempts] == [2]
    assert "no line MOVE:" in engine.template.rendered[-1].tail_note


async def test_a_budget_that_was_used_up_before_a_crash_still_decides() -> None:
    agent, engine = free()
    made = tuple(Attempt(n, reply("x"), Fault.UNPARSABLE, "no") for n in range(3))
    assert await agent.choose(turn(made=made)) == Decision(None, Fault.UNPARSABLE, ())
    assert not engine.requests


async def test_free_running_out_of_time_loses_on_time() -> None:
    agent, _ = free(reply("I am still", Finish.DEADLINE))
    decision = await agent.choose(turn())
    assert (decision.move, decision.fault) == (None, Fault.FLAG_FALL)
    assert len(decision.attempts) == 1


async def test_tries_share_the_time_of_the_move() -> None:
    agent, engine = free(reply("hm", seconds=4.0), reply("hm", seconds=7.0))
    decision = await agent.choose(turn(clock_left_s=10.0))
    assert [r.deadline_s for r in engine.requests] == [10.0, 6.0]
    assert (decision.move, decision.fault) == (None, Fault.FLAG_FALL)


async def test_resigning_ends_it() -> None:
    agent, engine = free("MOVE: resign", "MOVE: b2")
    decision = await agent.choose(turn())
    assert (decision.move, decision.fault) == (None, Fault.RESIGNED)
    assert len(engine.requests) == 1


async def test_a_complaint_that_does_not_fit_is_shortened_then_left_out() -> None:
    probe, probing = free("MOVE: z9 " + "x" * 200, "MOVE: b2")
    await probe.choose(turn())
    noted = CharTemplate.text(probing.template.rendered[-1])
    plain = len(noted) - len(probing.template.rendered[-1].tail_note) - 1
    for room, has_quote, has_note in ((len(noted), True, True), (len(noted) - 1, False, True),
                                      (plain, False, False)):  # fmt: skip
        engine = ScriptEngine(["MOVE: z9 " + "x" * 200, "MOVE: b2"], context_tokens=room + 256)
        await LlmAgent("t", engine, context(), LlmSettings("free")).choose(turn())
        note = engine.template.rendered[-1].tail_note
        assert ("It ended" in note) == has_quote
        assert bool(note) == has_note


# dice and clocks


def test_dice_depend_on_run_match_side_ply_and_try() -> None:
    seeds = {
        sampling_seed(*key)
        for key in ((7, "m", 0, 1, 0), (8, "m", 0, 1, 0), (7, "n", 0, 1, 0), (7, "m", 1, 1, 0),
                    (7, "m", 0, 2, 0), (7, "m", 0, 1, 1))
    }  # fmt: skip
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_dice_are_the_same_everywhere() -> None:
    assert sampling_seed(7, "m1", 0, 12, 0) == 6673494883208409172


def test_a_clock_pays_for_prefill_and_decode_alone() -> None:
    reported = Timings(0.0, 1.0, None, 9.0, 3.0, 0.25, 0.5)
    assert charged_seconds(reported) == 0.75
    assert charged_seconds(Timings(0.0, 1.0, None, 9.0, None, None, None)) == 8.0
