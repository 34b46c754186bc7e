"""The contract of engines over HTTP, against the fake server in every dialect: what they answer,
what they make of every misbehaviour, and whole runs while all of it happens."""

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
from blockbuster import BlockBuster

from agents import Fault, Interrupted
from agents.llm import LlmAgent, LlmSettings
from arena import cli
from arena.store import Records, read
from games import load_game
from serving import (
    EngineDead,
    EngineError,
    EngineStalled,
    EngineUnavailable,
    Finish,
    Reply,
    TokenPrompt,
)
from serving.fake_model import FakeConfig, FakeDialect, FakeFault, FaultKind
from serving.fake_server import FakeServer
from tests.agents.fakes import context, turn
from tests.serving.contract import (
    CHECKS,
    CHOICE_SETS,
    Subject,
    Tells,
    answered,
    newest,
    open_engine,
    served,
    until,
)

pytestmark = pytest.mark.usefixtures("model_directory")

FAST = 50.0
"""Seconds of the fake's model in one."""
LONG_REPLY = " ".join(["and"] * 300)
ALL_DURATIONS = frozenset({"queue_s", "prefill_s", "decode_s"})
COMPUTING = ALL_DURATIONS - {"queue_s"}


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of engine and the server it speaks to."""

    kind: str
    dialect: FakeDialect
    tells: Tells
    forgets: bool = False

    @property
    def name(self) -> str:
        is_own = self.kind == self.dialect or self.kind in ("vllm_server", "lmstudio")
        return self.kind if is_own else f"{self.kind}-{self.dialect}"

    @property
    def thinks_apart(self) -> bool:
        """Thinking has a field of its own, so that the answer is whole."""
        return self.kind not in ("vllm_server", "sglang", "llama_server")


CACHED = Tells(cached=True, version=False)
CASES = {
    case.name: case
    for case in (
        Case("vllm_server", "vllm", Tells(ALL_DURATIONS, True, True, True), forgets=True),
        Case("sglang", "sglang", Tells(ALL_DURATIONS, True, True, True), forgets=True),
        Case("llama_server", "llama_server", Tells(COMPUTING, True, True), forgets=True),
        Case("ollama", "ollama", Tells(COMPUTING)),
        Case("lmstudio", "openai", CACHED),
        Case("openai", "openai", CACHED),
        Case("openai", "vllm", CACHED),
        Case("openai", "sglang", CACHED),
        Case("openai", "llama_server", replace(CACHED, durations=COMPUTING)),
        Case("openai", "ollama", Tells(version=False)),
    )
}
OWN = [name for name, case in CASES.items() if case.name == case.kind]
"""One of each kind."""

every_case = pytest.mark.parametrize("name", CASES)
every_kind = pytest.mark.parametrize("name", OWN)


class Stage:
    """Servers and engines of one test, closed after it."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder = folder
        self._stack = stack

    async def server(self, name: str, *faults: FakeFault, **knobs: Any) -> FakeServer:
        knobs = {"slots": 4, "speed": FAST, "replies": (LONG_REPLY,), **knobs}
        config = FakeConfig(dialects=(CASES[name].dialect,), faults=faults, **knobs)
        return await self._stack.enter_async_context(FakeServer(config))

    async def engine(self, name: str, server: FakeServer, **knobs: Any) -> Subject:
        case = CASES[name]
        start = {key: knobs.pop(key) for key in ("stall_seconds", "restart_limit") if key in knobs}
        table: dict[str, Any] = {
            "kind": case.kind,
            "url": server.url,
            "served_model": server.config.model,
            "max_concurrent": server.config.slots,
            "max_queued": 100,
            "scrape_seconds": 0.05,
            **knobs,
        }
        engine = await self._stack.enter_async_context(open_engine(table, self._folder, **start))

        async def count_inside() -> int:
            return server.running + server.waiting

        return Subject(engine, case.tells, case.forgets, count_inside=count_inside)

    async def pair(self, name: str, *faults: FakeFault, **knobs: Any) -> tuple[FakeServer, Subject]:
        """A server and an engine that has probed it with question 0."""
        ours = ("stall_seconds", "restart_limit", "max_concurrent")
        engine_knobs = {key: knobs.pop(key) for key in ours if key in knobs}
        server = await self.server(name, *faults, **knobs)
        return server, await self.engine(name, server, **engine_knobs)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        yield Stage(tmp_path, stack)


# what it answers


@every_case
@pytest.mark.parametrize("check", CHECKS)
async def test_it_keeps_the_contract(name: str, check: str, stage: Stage) -> None:
    # an answer of 300 words takes 6 s
    is_slow = check in (
        "a deadline cuts a free answer",
        "cancelling frees the slot",
        "times are in order",
    )
    _, subject = await stage.pair(name, speed=1.0 if is_slow else FAST)
    await CHECKS[check](subject)


@every_case
async def test_the_first_token_is_the_first_of_the_answer(name: str, stage: Stage) -> None:
    """Neither the headers, nor an event without content, nor thinking is."""
    faults = [FakeFault(kind="role_only_first", at=(1,))]
    if CASES[name].thinks_apart:
        faults.append(FakeFault(kind="thinking", at=(2,)))
    server, subject = await stage.pair(name, *faults, speed=1.0, prefill_tokens_per_s=1000.0)
    for number in range(len(faults)):
        reply = await answered_alone(subject, number)
        thoughts = 4 if number else 0
        uncached = (reply.usage.prompt or 0) - (reply.usage.cached or 0)
        first_s = uncached / 1000 + (thoughts + 1) * 0.02
        assert reply.timings.first_token is not None
        if CASES[name].tells.cached:
            assert reply.timings.first_token - reply.timings.admitted >= first_s
        # one step a letter, and one that ends it
        assert reply.timings.done - reply.timings.first_token >= len(reply.text) * 0.02 * 0.9
    assert [seen.fault for seen in server.seen][1:] == [fault.kind for fault in faults]


async def answered_alone(subject: Subject, number: int) -> Reply:
    reply = await subject.engine.generate(subject.ask(lead=f"Alone {number}:"))
    assert reply.text in CHOICE_SETS[0]
    return reply


@every_kind
async def test_seeds_and_temperature_arrive(name: str, stage: Stage) -> None:
    server, subject = await stage.pair(name)
    for seed in (3, 4):
        await subject.engine.generate(subject.ask(seed=seed))
    bodies = [seen.body for seen in server.seen][1:]
    fields = [found for body in bodies for found in _named(body, ("seed", "sampling_seed"))]
    assert fields == [3, 4]
    assert [found for body in bodies for found in _named(body, ("temperature",))] == [1.0, 1.0]


THINKERS = [name for name in OWN if not CASES[name].thinks_apart]
"""Kinds that take token ids."""


@pytest.mark.parametrize("name", THINKERS)
async def test_a_thought_is_stopped_and_its_answer_constrained(name: str, stage: Stage) -> None:
    said = "Knights first.</think>\n\nMOVE: e2e4 and more"
    server, subject = await stage.pair(name, replies=(said,))
    told = context(games=(("chess", "standard"),))
    agent = LlmAgent("a", subject.engine, told, LlmSettings("think", think_tokens=40))
    position = load_game("chess").position(load_game("chess").openings("start", "standard")[0])
    decision = await agent.choose(turn(position, game="chess"))
    assert decision.move in position.legal_moves()
    thought, answer = decision.attempts
    assert thought.reply is not None
    assert answer.reply is not None
    assert (thought.reply.reasoning, thought.reply.finish) == ("Knights first.", Finish.STOP)
    assert (thought.reply.usage.prompt or 0) < (answer.reply.usage.prompt or 0)
    asked, then = [seen.body for seen in server.seen][-2:]
    assert _named(asked, ("stop",)) == [["</think>"]]
    assert _named(then, ("stop",)) == []
    ids = [_named(body, ("prompt", "input_ids"))[0] for body in (asked, then)]
    assert ids[1][: len(ids[0])] == ids[0]


@pytest.mark.parametrize("name", THINKERS)
async def test_a_thought_longer_than_its_bound_is_cut_and_is_no_fault(
    name: str, stage: Stage
) -> None:
    _, subject = await stage.pair(name)
    agent = LlmAgent("a", subject.engine, context(), LlmSettings("think", think_tokens=16))
    position = load_game("chess").position(load_game("chess").openings("start", "standard")[0])
    decision = await agent.choose(turn(position, game="chess"))
    thought, _ = decision.attempts
    assert thought.reply is not None
    assert (thought.fault, thought.reply.finish) == (None, Finish.LENGTH)
    assert thought.reply.usage.completion == 16
    assert thought.reply.reasoning == " ".join(["and"] * 16)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].thinks_apart])
async def test_thinking_told_apart_stands_in_the_reply(name: str, stage: Stage) -> None:
    _, subject = await stage.pair(name, FakeFault(kind="thinking", at=(1,)), replies=("e2e4",))
    reply = await subject.engine.generate(subject.ask(choices=None))
    assert (reply.text, reply.reasoning) == ("e2e4", "Let me see.")


def _named(body: Any, names: tuple[str, ...]) -> list[Any]:
    """Values of fields at any depth."""
    if not isinstance(body, dict):
        return []
    own = [value for key, value in body.items() if key in names]
    return own + [found for value in body.values() for found in _named(value, names)]


# time and places


@every_kind
async def test_time_in_the_servers_queue_is_nobodys(name: str, stage: Stage) -> None:
    """Its tokens come for most of its time, and still it was not its own that ran out."""
    server, other = await stage.pair(name, slots=1, speed=1.0)
    subject = await stage.engine(name, server)
    holding = asyncio.create_task(other.engine.generate(other.ask_for_long(1)))
    await until(lambda: server.running == 1)
    asking = asyncio.create_task(
        subject.engine.generate(subject.ask_for_long(2, deadline_s=1.6, max_tokens=200))
    )
    await until(lambda: server.waiting == 1)
    await asyncio.sleep(0.4 * 1.6)
    holding.cancel()
    await until(lambda: server.running == 1 and server.waiting == 0)
    with pytest.raises(EngineStalled, match=r"was not answered in 1\.6 s"):
        await asking
    # it was being answered, and is no more
    await until(lambda: server.totals.ended["abort"] == 2 and server.running == 0, 2.0)
    assert subject.engine.restarts == 0


@every_kind
async def test_time_in_which_the_server_stands_still_is_nobodys(name: str, stage: Stage) -> None:
    """Be it before the first token or after it, and though it goes on before the deadline."""
    freezes = (FakeFault(kind="freeze", at=(at,), seconds=0.9) for at in (2, 3))
    server, subject = await stage.pair(name, *freezes, speed=1.0)
    asking = asyncio.create_task(subject.engine.generate(subject.ask_for_long(deadline_s=1.8)))
    await until(lambda: server.running == 1)
    await asyncio.sleep(0.3)
    assert await answered(subject)
    with pytest.raises(EngineStalled, match=r"was not answered in 1\.8 s"):
        await asking
    with pytest.raises(EngineStalled, match=r"was not answered in 1\.8 s"):
        await subject.engine.generate(subject.ask_for_long(deadline_s=1.8))
    assert subject.engine.restarts == 0


@every_kind
async def test_a_constrained_answer_that_is_late_is_the_engines(name: str, stage: Stage) -> None:
    _, subject = await stage.pair(name, speed=1.0, decode_ms_per_token=120.0)
    with pytest.raises(EngineStalled, match=r"was not answered in 0\.4 s"):
        await subject.engine.generate(subject.ask(deadline_s=0.4))


@every_kind
async def test_cancelling_frees_slots_and_places_in_the_queue(name: str, stage: Stage) -> None:
    server, first = await stage.pair(name, slots=2, speed=1.0)
    second = await stage.engine(name, server)
    asking = [
        asyncio.create_task(one.engine.generate(one.ask_for_long(number)))
        for number, one in enumerate((first, first, second, second))
    ]
    await until(lambda: (server.running, server.waiting) == (2, 2))
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await until(lambda: (server.running, server.waiting) == (0, 0), 2.0)
    assert server.totals.ended["abort"] == 4
    await answered(first)
    await answered(second)


@every_kind
async def test_figures_are_true_of_the_server(name: str, stage: Stage) -> None:
    """Other people's requests too; a server that tells none has as many as we sent."""
    server, subject = await stage.pair(name, slots=2, speed=1.0)
    other = await stage.engine(name, server)
    asking = [
        asyncio.create_task(one.engine.generate(one.ask_for_long(number)))
        for number, one in enumerate((subject, subject, other, other))
    ]
    await until(lambda: (server.running, server.waiting) == (2, 2))
    waiting = 2 if subject.tells.figures else None
    await newest(subject, lambda seen: (seen.running, seen.waiting) == (2, waiting))
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await newest(subject, lambda seen: not seen.running and not seen.waiting)


@every_kind
async def test_what_was_computed_before_the_run_is_not_its(name: str, stage: Stage) -> None:
    server, first = await stage.pair(name)
    for number in range(3):
        await answered_alone(first, number)
    second = await stage.engine(name, server)
    seen = await newest(second, lambda seen: True)
    assert seen.prefix_queries in (0, None)
    assert seen.rejected == 0


@pytest.mark.parametrize("name", [name for name in OWN if CASES[name].forgets])
async def test_what_another_run_computed_after_forgetting_is_forgotten_too(
    name: str, stage: Stage
) -> None:
    """The server outlives its runs, and each of them begins to count anew."""
    server, first = await stage.pair(name)
    second = await stage.engine(name, server)
    for subject in (first, second):
        assert await subject.engine.reset_prefix_cache()
        assert (await answered(subject)).usage.cached in (0, 1)


@every_kind
async def test_closing_leaves_no_task_and_no_connection(name: str, stage: Stage) -> None:
    server = await stage.server(name, slots=2, speed=1.0)
    before = asyncio.all_tasks()
    subject = await stage.engine(name, server)
    await answered(subject)
    # each answer has its own, and it is closed; a look at the figures may be under way
    await until(lambda: _connections(server) == 0, 2.0)
    asking = [
        asyncio.create_task(subject.engine.generate(subject.ask_for_long(number)))
        for number in range(3)
    ]
    await until(lambda: server.running == 2)
    assert _connections(server) >= 4, "both ends are in this process"
    asking[0].cancel()
    await subject.engine.close()
    ends = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError, EngineDead, EngineDead]
    await until(lambda: _connections(server) == 0 and server.running == 0, 2.0)
    await until(lambda: asyncio.all_tasks() <= before, 2.0)


def _connections(server: FakeServer) -> int:
    port = int(server.url.rpartition(":")[2])
    ends = psutil.Process().net_connections("tcp")
    return sum(
        end.status == psutil.CONN_ESTABLISHED and port in (end.laddr.port, end.raddr.port)
        for end in ends
    )


# what goes wrong

OUTCOMES: dict[FaultKind, Fault | None] = {
    "queue_full_503": Fault.OVERLOADED,
    "queue_full_429": Fault.OVERLOADED,
    "queue_full_200": Fault.OVERLOADED,
    "too_long": Fault.REJECTED,
    "abort": Fault.TRANSPORT,
    "truncate": Fault.TRANSPORT,
    "reset": Fault.TRANSPORT,
    "slow_loris": Fault.STALLED,
    "malformed_sse": Fault.MALFORMED,
    "wrong_content_type": Fault.MALFORMED,
    "ignore_constraint": Fault.CONSTRAINT_IGNORED,
    "no_usage": None,
    "null_cached": None,
    "thinking": Fault.CONSTRAINT_IGNORED,
    "role_only_first": None,
    "freeze": Fault.STALLED,
    "crash": Fault.TRANSPORT,
    "keepalive_lie": None,
    "redirect": Fault.MALFORMED,
    "html_error": Fault.TRANSPORT,
    "loading_503": Fault.TRANSPORT,
    "late_cancel": None,
    "cut_short": Fault.CUT_SHORT,
}
"""What a player's attempt is called. None: it is a move. (No client leaves here: late_cancel has a
test of its own.)"""

SECONDS = {"freeze": 2.0, "crash": 0.2, "loading_503": 0.2}


@every_case
async def test_every_misbehaviour_is_the_fault_it_should_be(name: str, stage: Stage) -> None:
    assert OUTCOMES.keys() == set(get_args(FaultKind))
    expected = dict(OUTCOMES)
    if CASES[name].thinks_apart:
        expected["thinking"] = None
    faults = [
        FakeFault(kind=kind, at=(1 + 2 * number,), seconds=SECONDS.get(kind))
        for number, kind in enumerate(OUTCOMES)
    ]
    server, subject = await stage.pair(name, *faults, stall_seconds=1.0)
    agent = LlmAgent("tester", subject.engine, context(), LlmSettings())
    game = load_game("chess")
    shown = turn(game.position(game.openings("start", "standard")[0]), game="chess")
    await asyncio.to_thread(agent.context_need, "chess", "standard")
    found: dict[FaultKind, Fault | None] = {}
    for kind in OUTCOMES:
        try:
            decision = await agent.choose(shown)
        except Interrupted as interrupted:
            found[kind] = interrupted.attempts[-1].fault
        else:
            assert decision.move in shown.position.legal_moves()
            found[kind] = None
        if kind == "crash":
            # one cut connection does not say that nobody is there: the next question finds out
            with pytest.raises(Interrupted, match="no connection"):
                await agent.choose(shown)
        decision = await agent.choose(shown)
        assert decision.move is not None, f"after {kind} it answers again"
    assert found == expected
    assert [seen.fault for seen in server.seen][1::2] == list(OUTCOMES)


@every_case
async def test_a_free_answer_that_the_server_cuts_short_is_not_the_players(
    name: str, stage: Stage
) -> None:
    _, subject = await stage.pair(name, FakeFault(kind="cut_short", at=(1,)))
    with pytest.raises(EngineUnavailable, match=r"the engine cut the answer after 150 of 600"):
        await subject.engine.generate(subject.ask(choices=None))
    reply = await subject.engine.generate(subject.ask(choices=None, max_tokens=150))
    assert (reply.finish, reply.usage.completion) == (Finish.LENGTH, 150)


async def test_a_match_waits_for_its_ghost(stage: Stage) -> None:
    """llama.cpp sees late that a client has left. Another slot would have to compute all anew, and
    what was computed for the ghost is in the match's own."""
    ghost = FakeFault(kind="late_cancel", at=(1,), seconds=0.5)
    server, subject = await stage.pair("llama_server", ghost, speed=1.0)
    asking = asyncio.create_task(subject.engine.generate(subject.ask(choices=None)))
    await until(lambda: server.running == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    reply = await subject.engine.generate(subject.ask("e2e4"))
    assert reply.text in CHOICE_SETS[0]
    assert reply.usage.cached


@every_case
async def test_counts_that_are_not_told_are_unknown_or_ours(name: str, stage: Stage) -> None:
    """Ids can be counted here, messages cannot."""
    hidden = (FakeFault(kind="no_usage", at=(1,)), FakeFault(kind="null_cached", at=(2,)))
    _, subject = await stage.pair(name, *hidden)
    request = subject.ask()
    usage = (await subject.engine.generate(request)).usage
    ids = request.prompt.ids if isinstance(request.prompt, TokenPrompt) else None
    assert (usage.prompt, usage.cached) == (None if ids is None else len(ids), None)
    assert usage.completion >= 1
    told = (await answered(subject)).usage
    assert told.cached is None
    assert ((await answered(subject)).usage.cached is not None) is subject.tells.cached


@every_case
async def test_a_constraint_that_is_ignored_is_told_at_the_start(name: str, stage: Stage) -> None:
    with pytest.raises(EngineDead) as caught:
        await stage.pair(name, FakeFault(kind="ignore_constraint", at=(0,)))
    assert caught.value.final
    said = str(caught.value)
    assert said.startswith("engine main: the server does not obey ")
    assert "'and" in said
    assert "\n" not in said


@pytest.mark.parametrize("name", ["vllm_server", "sglang", "llama_server"])
async def test_a_server_smaller_than_configured_is_told_at_the_start(
    name: str, stage: Stage
) -> None:
    server = await stage.server(name, slots=2, context_tokens=1024)
    with pytest.raises(EngineDead, match=r"1024 tokens.*fewer than context_tokens = 2048"):
        await stage.engine(name, server)
    await stage.engine(name, server, context_tokens=1024)
    if name != "vllm_server":  # which does not tell how many it computes at once
        with pytest.raises(EngineDead, match=r"2 (slots|requests).*fewer than max_concurrent = 4"):
            await stage.engine(name, server, context_tokens=1024, max_concurrent=4)


@every_kind
async def test_a_start_outlives_what_a_moment_mends(name: str, stage: Stage) -> None:
    """The probe is question 0; priming asks the next ones."""
    kinds: tuple[FaultKind, ...] = ("queue_full_429", "reset", "queue_full_503", "truncate")
    faults = [FakeFault(kind=kind, at=(at,)) for kind, at in zip(kinds, (0, 1, 3, 4), strict=True)]
    server, subject = await stage.pair(name, *faults)
    assert len(server.seen) == 3
    await subject.engine.prime(subject.ask().prompt)
    assert len(server.seen) >= 6
    assert await answered(subject)


@every_kind
async def test_a_crashed_server_is_waited_for(name: str, stage: Stage) -> None:
    crash = FakeFault(kind="crash", at=(3,), seconds=0.5)
    server, subject = await stage.pair(name, crash, speed=1.0, stall_seconds=5.0)
    asking = [
        asyncio.create_task(subject.engine.generate(subject.ask_for_long(number)))
        for number in range(2)
    ]
    await until(lambda: server.running == 2)
    before = await newest(subject, lambda seen: seen.running == 2)
    with pytest.raises(EngineUnavailable):
        await subject.engine.generate(subject.ask())
    ends = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(end) for end in ends] == [EngineUnavailable] * 2
    # one cut connection does not say that nobody is there; the next question finds that out
    with pytest.raises(EngineUnavailable, match="no connection"):
        await subject.engine.generate(subject.ask())
    assert not subject.engine.is_ready
    reply = await answered(subject)
    assert (subject.engine.is_ready, subject.engine.restarts) == (True, 1)
    if subject.tells.cached:
        # our totals go on, although the server's own began anew
        assert before.prefix_queries is not None
        assert reply.usage.prompt is not None
        least = before.prefix_queries + reply.usage.prompt
        await newest(subject, lambda seen: (seen.prefix_queries or 0) >= least)


@every_kind
async def test_a_frozen_server_stalls_all_and_is_waited_for(name: str, stage: Stage) -> None:
    freeze = FakeFault(kind="freeze", at=(2,), seconds=1.5)
    server, subject = await stage.pair(name, freeze, speed=1.0, stall_seconds=0.5)
    long = asyncio.create_task(subject.engine.generate(subject.ask_for_long()))
    await until(lambda: server.running == 1)
    for asking in (asyncio.create_task(subject.engine.generate(subject.ask())), long):
        with pytest.raises(EngineStalled, match="nothing came for"):
            await asking
    assert not subject.engine.is_ready
    await answered(subject)
    assert (subject.engine.is_ready, subject.engine.restarts) == (True, 1)


@every_kind
async def test_a_server_that_stays_away_is_dead_for_good(name: str, stage: Stage) -> None:
    crash = FakeFault(kind="crash", at=(1,), seconds=60.0)
    _, subject = await stage.pair(name, crash, stall_seconds=0.2, restart_limit=1)
    ends = []
    for _ in range(4):
        with pytest.raises(EngineError) as caught:
            await subject.engine.generate(subject.ask())
        ends.append(caught.value)
    assert [type(end).kind for end in ends] == ["transport"] * 2 + ["engine_dead"] * 2
    assert isinstance(caught.value, EngineDead)
    assert caught.value.final


async def test_a_slow_answer_is_no_slow_loris(stage: Stage) -> None:
    """Whole events that come slower than `stall_seconds` would allow for silence."""
    _, subject = await stage.pair("openai", speed=1.0, decode_ms_per_token=200.0, stall_seconds=0.6)
    reply = await subject.engine.generate(subject.ask())
    assert reply.finish is Finish.STOP
    assert reply.timings.done - reply.timings.admitted > 0.6


@every_kind
async def test_a_match_with_a_cache_of_its_own_asks_one_thing_at_a_time(
    name: str, stage: Stage
) -> None:
    """A second slot would compute its transcript anew; where caches are shared nothing waits."""
    server, subject = await stage.pair(name, speed=1.0)
    asked = len(server.seen)
    first, second = (
        asyncio.create_task(subject.engine.generate(subject.ask_for_long())) for _ in range(2)
    )
    await until(lambda: server.running >= 1)
    if name == "llama_server":
        await asyncio.sleep(0.1)
        assert len(server.seen) == asked + 1
        other = asyncio.create_task(subject.engine.generate(subject.ask_for_long(1)))
        await until(lambda: server.running == 2)
        other.cancel()
        first.cancel()
        await until(lambda: len(server.seen) == asked + 3)
    await until(lambda: len(server.seen) >= asked + 2)
    first.cancel()
    second.cancel()
    await until(lambda: server.running == 0)


# whole runs

CONFIG = """
name = "contract"
seed = 11
[engines.main]
kind = "{kind}"
url = "{url}"
served_model = "fake"
max_concurrent = 4
max_queued = 4
context_tokens = 2048
scrape_seconds = 0.1
[[agents]]
name = "one"
kind = "llm"
engine = "main"
[[agents]]
name = "two"
kind = "llm"
engine = "main"
temperature = 0.5
[tournament]
games = ["chess", "janggi"]
pairs = 2
parallel_matches = 4
max_plies = 8
[pace]
move_period_seconds = 0
[faults]
stall_seconds = 0.8
restart_limit = 20
"""
QUIET = 8
"""Questions at the start of a run that must be answered: the probe, and two prompts for every
slot of a server whose slots share nothing."""


@pytest.fixture
def starts_are_logged(_loop_is_never_blocked: BlockBuster) -> None:
    """A start and the first answer without counts write a line of the run's log, on the loop."""
    for name in ("io.TextIOWrapper.write", "io.BufferedWriter.write"):
        write = _loop_is_never_blocked.functions[name]
        write.can_block_in("serving/http_engine.py", {"_begin", "_usage"})


def arena(*arguments: object) -> int:
    return cli.main([str(argument) for argument in (*arguments, "--view", "none")])


def play(config: Path, folder: Path) -> int:
    return arena("run", config, "--out", folder, "--dashboard", "off")


def games(records: Records) -> dict[str, list[str]]:
    """The moves of every match by its id."""
    moves: dict[str, list[str]] = {row.id: [] for row in records.matches}
    for ply in records.plies:
        moves[ply.match_id].append(ply.move)
    return moves


def assert_nobody_paid(records: Records) -> None:
    assert {row.state for row in records.matches} == {"finished"}
    assert {row.termination for row in records.matches} == {"ply_cap"}
    faults = {Fault(attempt.fault) for attempt in records.attempts if attempt.fault}
    assert all(fault.is_infrastructure for fault in faults)


def every_fault_but(*left_out: FaultKind, first: int) -> FakeConfig:
    """Each kind with a chance of 2 %, and none in the first questions from `first` on."""
    faults = tuple(
        FakeFault(kind=kind, probability=0.02, seconds=SECONDS.get(kind))
        for kind in get_args(FaultKind)
        if kind not in left_out
    )
    for seed in itertools.count():
        config = FakeConfig(faults=faults, seed=seed)
        if not any(config.fault(first + number) for number in range(QUIET)):
            return config
    raise AssertionError


@every_kind
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("starts_are_logged")
def test_a_run_with_every_fault_plays_the_games_of_one_without(name: str, tmp_path: Path) -> None:
    """A prompt that is refused as too long leaves its match for `resume`: that is the next test."""
    case = CASES[name]
    config = tmp_path / "contract.toml"
    calm = FakeConfig(dialects=(case.dialect,), slots=4, speed=FAST)
    with served(calm) as server:
        config.write_text(CONFIG.format(kind=case.kind, url=server.url))
        assert play(config, tmp_path / "calm") == 0
        disturbed = every_fault_but("too_long", first=len(server.seen))
        changes = {"faults": disturbed.faults, "seed": disturbed.seed}
        server.config = calm.model_copy(update=changes)
        code = play(config, tmp_path / "disturbed")
        first = read(tmp_path / "disturbed")
        # eight faults in a row leave a match for `resume`
        assert sum(row.state == "finished" for row in first.matches) >= 6
        assert code == (0 if all(row.state == "finished" for row in first.matches) else 1)
        server.config = calm
        assert arena("resume", tmp_path / "disturbed") == 0
    records = read(tmp_path / "disturbed")
    assert_nobody_paid(records)
    assert len(records.matches) == 8
    assert games(records) == games(read(tmp_path / "calm"))
    injected: Counter[str] = Counter(seen.fault for seen in server.seen if seen.fault)
    recorded = Counter(attempt.fault for attempt in records.attempts if attempt.fault)
    assert len(injected) >= 10
    assert recorded["overloaded"] == sum(injected[f"queue_full_{n}"] for n in (503, 429, 200))


@pytest.mark.parametrize("name", ["sglang", "openai"])
@pytest.mark.usefixtures("starts_are_logged")
def test_a_rejected_question_leaves_its_match_for_resume(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    config = tmp_path / "contract.toml"
    rejecting = FakeFault(kind="too_long", at=(20,))
    with served(
        FakeConfig(dialects=(case.dialect,), slots=4, speed=FAST, faults=(rejecting,))
    ) as server:
        config.write_text(CONFIG.format(kind=case.kind, url=server.url))
        assert play(config, tmp_path / "run") == 1
        left = [row for row in read(tmp_path / "run").matches if row.state != "finished"]
        assert [row.state for row in left] == ["suspended"]
        assert arena("resume", tmp_path / "run") == 0
    records = read(tmp_path / "run")
    assert_nobody_paid(records)
    assert [attempt.fault for attempt in records.attempts if attempt.fault] == ["rejected"]


def test_no_thread_of_a_served_fake_is_left() -> None:
    before: Callable[[], int] = threading.active_count
    count = before()
    with served(FakeConfig()) as server:
        assert server.running == 0
        assert before() == count + 1
    assert before() == count
