"""What every engine over HTTP owes: checks that run against the fake and against real servers.

A `Subject` is an open engine with what its server is able to tell; a check is a function of one. A
fake server on a thread of its own, for whole runs, stands here too.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from serving import (
    EngineSnapshot,
    Finish,
    Limited,
    PromptParts,
    Reply,
    Request,
    RequestRejected,
    Sampling,
    TokenPrompt,
    build_engine,
    check_engine,
    parse_engine_config,
)
from serving.fake_model import FakeConfig
from serving.fake_server import FakeServer

SYSTEM = " ".join(f"Rule {n}: a piece moves as it always moved." for n in range(12))
CHOICE_SETS = (
    ("e2e4", "d2d4", "g1f3"),
    ("a10b10", "a1a2", "pass"),
    ("cast", "castle", "castles"),
    ("O-O", "O-O-O", "e8=Q#", "Nf3+"),
    ("(a|b)", "a.b*", "[x]{2}", "^$"),
    ('"a" "b"', "c\\d\\e", "it's"),
    ("e2e4", "e2e4(=)", "draw", "resign"),
    ("한나라 장군", "초나라 멍군"),
    tuple(a + b for a in ("e2", "d2", "g1", "b1") for b in ("e4", "d4", "f3", "c3", "a10")),
)
LONG_TASK = "Write a list of 500 animals, one a line.\n1. Cat\n2. Dog\n3. Cat\n4. Dog\n5. Cat\n6."
"""The packaged model goes on with it for a thousand tokens."""


@dataclass(frozen=True, slots=True)
class Tells:
    """What a server says of an answer and of itself."""

    durations: frozenset[str] = frozenset()
    """Of `queue_s`, `prefill_s` and `decode_s`."""
    cached: bool = False
    figures: bool = False
    """Running and waiting requests."""
    preemptions: bool = False
    version: bool = True


@dataclass(frozen=True, slots=True)
class Subject:
    """An open engine, and what can be asked of it."""

    engine: Limited
    tells: Tells
    forgets: bool = False
    """Its prefix cache can be emptied."""
    heeds_seeds: bool = True
    many: int = 100
    """Questions at once."""
    deadline_s: float = 1.0
    """Of an answer that takes longer."""
    slowness: float = 1.0
    """Seconds that the engine may take to notice something."""
    count_inside: Callable[[], Awaitable[int]] | None = None
    """Requests inside the server, running or waiting, for an engine whose own figures are only what
    it has sent; omitted: as its figures say."""

    @property
    def takes_ids(self) -> bool:
        return isinstance(self.engine.template.render(PromptParts("", "", "", ())), TokenPrompt)

    def ask(
        self,
        *moves: str,
        choices: tuple[str, ...] | None = CHOICE_SETS[0],
        match_id: str = "m",
        seed: int = 1,
        lead: str = "Moves:",
        **changes: Any,
    ) -> Request:
        most = 600 if choices is None else max(len(one.encode()) for one in choices) + 1
        request = Request(
            id=f"{match_id}/{len(moves)}/0/0",
            match_id=match_id,
            prompt=self.engine.template.render(PromptParts(SYSTEM, "", lead, moves)),
            choices=choices,
            max_tokens=most,
            sampling=Sampling(seed=seed),
            deadline_s=120.0,
        )
        return replace(request, **changes)

    def ask_for_long(self, number: int = 0, **changes: Any) -> Request:
        """A question whose answer takes longer than `deadline_s`."""
        request = self.ask(choices=None, match_id=f"long-{number}", lead=LONG_TASK, **changes)
        return replace(request, sampling=Sampling(temperature=0.0))


async def until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def told_inside(subject: Subject) -> int:
    """Requests inside the server by its own figures, from now on."""
    begun = time.monotonic()
    seen = await newest(subject, lambda seen: seen.at > begun)
    return (seen.running or 0) + (seen.waiting or 0)


async def newest(subject: Subject, wanted: Callable[[EngineSnapshot], bool]) -> EngineSnapshot:
    """The first snapshot from now on that is wanted; those before it are checked too."""
    # of the engine itself: the limit in front adds its own queue
    snapshots = subject.engine.inner.snapshots()
    assert isinstance(snapshots, AsyncGenerator)
    async with asyncio.timeout(15), aclosing(snapshots):
        async for snapshot in snapshots:
            check_sampled(snapshot, subject.tells)
            if wanted(snapshot):
                seen: EngineSnapshot = snapshot
                return seen
    raise AssertionError("the engine was closed")


def check_sampled(snapshot: EngineSnapshot, tells: Tells) -> None:
    """A sample claims nothing that only each step could tell, and nothing that is not told."""
    assert snapshot.source == "sampled"
    assert (snapshot.step_requests, snapshot.step_tokens, snapshot.replica) == (None, None, None)
    assert snapshot.at <= time.monotonic()
    assert snapshot.running is not None
    assert (snapshot.waiting is not None) is tells.figures
    assert (snapshot.preemptions is not None) is tells.preemptions
    assert snapshot.kv_usage is None or 0 <= snapshot.kv_usage <= 1


# checks


async def check_choices_are_obeyed(subject: Subject) -> None:
    """Every answer of many at once is one of its choices."""

    async def one(number: int) -> tuple[str, bool]:
        choices = CHOICE_SETS[number % len(CHOICE_SETS)]
        match_id, seed = f"m{number % 10}", number
        moves = ("e2e4", "e7e5")[: number % 3]
        reply = await subject.engine.generate(
            subject.ask(*moves, choices=choices, match_id=match_id, seed=seed)
        )
        return reply.text, reply.text in choices

    answers = await asyncio.gather(*map(one, range(subject.many)))
    strays = [text for text, is_choice in answers if not is_choice]
    assert not strays, strays


async def check_usage_is_told(subject: Subject) -> None:
    request = subject.ask("e2e4")
    usage = (await subject.engine.generate(request)).usage
    if isinstance(request.prompt, TokenPrompt):
        assert usage.prompt == len(request.prompt.ids)
    assert usage.prompt is not None
    assert usage.prompt > 100
    # as JSON a choice takes some more
    around = 0 if subject.takes_ids else 40
    assert 1 <= usage.completion <= request.max_tokens + around
    assert (usage.cached is not None) is subject.tells.cached
    assert usage.cached is None or 0 <= usage.cached < usage.prompt


async def check_times_are_in_order(subject: Subject) -> None:
    begun = time.monotonic()
    reply = await subject.engine.generate(subject.ask_for_long(max_tokens=12))
    times = reply.timings
    assert times.first_token is not None
    assert begun <= times.submitted <= times.admitted < times.first_token < times.done
    assert times.done <= time.monotonic()
    durations = {
        name: value
        for name in ("queue_s", "prefill_s", "decode_s")
        if (value := getattr(times, name)) is not None
    }
    assert durations.keys() == subject.tells.durations
    assert all(value >= 0 for value in durations.values())
    # rounded to milliseconds by some
    assert sum(durations.values()) <= times.done - times.admitted + 0.01
    assert reply.step_requests_mean is None


async def check_seeds_are_heeded(subject: Subject) -> None:
    if not subject.heeds_seeds:
        pytest.skip("this server does not heed seeds")

    async def answers(*seeds: int) -> list[str]:
        asked = (subject.ask(choices=CHOICE_SETS[-1], seed=seed) for seed in seeds)
        return [(await subject.engine.generate(request)).text for request in asked]

    await answers(1)  # from now on its prompt is cached each time
    first = await answers(*range(8))
    assert await answers(*range(8)) == first
    assert len(set(first)) > 1


async def check_a_deadline_cuts_a_free_answer(subject: Subject) -> None:
    # what is cached takes no time, which a server that tells no queue could have spent in it
    await subject.engine.generate(subject.ask_for_long(max_tokens=1))
    request = subject.ask_for_long(deadline_s=subject.deadline_s)
    reply = await subject.engine.generate(request)
    assert reply.finish is Finish.DEADLINE
    assert reply.text
    took = reply.timings.done - reply.timings.admitted
    assert subject.deadline_s <= took < subject.deadline_s + subject.slowness


async def check_cancelling_frees_the_slot(subject: Subject) -> None:
    asking = asyncio.create_task(subject.engine.generate(subject.ask_for_long()))
    await _until_inside(subject, 1, 15.0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await _until_inside(subject, 0, 1.0 + subject.slowness)


async def _until_inside(subject: Subject, wanted: int, limit_s: float) -> None:
    """Until so many requests are inside the server."""
    count = subject.count_inside or partial(told_inside, subject)
    async with asyncio.timeout(limit_s):
        while await count() != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def check_a_primed_prompt_is_found_again(subject: Subject) -> None:
    if not subject.tells.cached:
        pytest.skip("this server does not tell its cached tokens")
    first = subject.ask(lead="Primed moves:")
    await subject.engine.prime(first.prompt)
    reply = await subject.engine.generate(subject.ask("e2e4", lead="Primed moves:", match_id="p"))
    assert reply.usage.prompt is not None
    assert reply.usage.cached is not None
    # all but the last, unfinished block, the prompt's tail and the move
    assert reply.usage.cached >= reply.usage.prompt - 64


async def check_the_cache_can_be_emptied(subject: Subject) -> None:
    request = subject.ask("e2e4", lead="To forget:")
    await subject.engine.generate(request)
    assert await subject.engine.reset_prefix_cache() is subject.forgets
    if subject.forgets:
        usage = (await subject.engine.generate(request)).usage
        assert usage.cached in (0, 1), "llama.cpp's slot may keep a first token"
        assert (await subject.engine.generate(request)).usage.cached not in (0, 1)


async def check_the_cache_can_be_left_out(subject: Subject) -> None:
    if not subject.forgets:
        pytest.skip("this server has no field for it")
    request = subject.ask("d2d4", lead="Without a cache:")
    await subject.engine.generate(request)
    usage = (await subject.engine.generate(replace(request, use_prefix_cache=False))).usage
    assert usage.cached == 0


async def check_too_long_is_rejected(subject: Subject) -> None:
    long = subject.ask(lead="word " * 5 * subject.engine.limits.context_tokens)
    with pytest.raises(RequestRejected) as caught:
        await subject.engine.generate(long)
    assert str(caught.value).startswith(f"engine {subject.engine.name}: ")
    assert "\n" not in str(caught.value)
    assert await answered(subject)


async def check_figures_are_of_our_questions(subject: Subject) -> None:
    """Prompt tokens looked up and found since the last look, exactly."""
    if not (subject.tells.figures and subject.tells.cached):
        pytest.skip("this server has no such figures")
    begun = time.monotonic()
    before = await newest(subject, lambda seen: seen.at > begun and seen.running == 0)
    assert before.prefix_queries is not None
    assert before.prefix_hits is not None
    replies = [
        await subject.engine.generate(subject.ask(*("a2a4", "a7a5")[:n], match_id=f"f{n}"))
        for n in range(3)
    ]
    queries = before.prefix_queries + sum(reply.usage.prompt or 0 for reply in replies)
    hits = before.prefix_hits + sum(reply.usage.cached or 0 for reply in replies)
    await newest(subject, lambda seen: (seen.prefix_queries, seen.prefix_hits) == (queries, hits))


async def check_version_is_told(subject: Subject) -> None:
    assert (subject.engine.version != "unknown") is subject.tells.version


Check = Callable[[Subject], Awaitable[None]]
CHECKS: dict[str, Check] = {
    "choices are obeyed": check_choices_are_obeyed,
    "usage is told": check_usage_is_told,
    "times are in order": check_times_are_in_order,
    "seeds are heeded": check_seeds_are_heeded,
    "a deadline cuts a free answer": check_a_deadline_cuts_a_free_answer,
    "cancelling frees the slot": check_cancelling_frees_the_slot,
    "a primed prompt is found again": check_a_primed_prompt_is_found_again,
    "the cache can be emptied": check_the_cache_can_be_emptied,
    "the cache can be left out": check_the_cache_can_be_left_out,
    "too long is rejected": check_too_long_is_rejected,
    "figures are of our questions": check_figures_are_of_our_questions,
    "version is told": check_version_is_told,
}


async def answered(subject: Subject) -> Reply:
    """A question that any server in order answers."""
    reply = await subject.engine.generate(subject.ask())
    assert reply.text in CHOICE_SETS[0]
    return reply


# engines and servers


@asynccontextmanager
async def open_engine(
    table: dict[str, Any],
    log_dir: Path,
    *,
    stall_seconds: float = 30.0,
    restart_limit: int = 3,
) -> AsyncIterator[Limited]:
    """The engine of a config's table, as a run opens and closes it."""
    config = parse_engine_config("main", table)
    check_engine("main", config)
    engine = build_engine(
        "main", config, log_dir=log_dir, stall_seconds=stall_seconds, restart_limit=restart_limit
    )
    await engine.open()
    try:
        yield engine
    finally:
        await engine.close()


@contextmanager
def served(config: FakeConfig) -> Iterator[FakeServer]:
    """A fake server on a thread of its own, for a run that has its own loop."""
    server = FakeServer(config)
    is_up, loops = threading.Event(), list[asyncio.AbstractEventLoop]()
    stop = asyncio.Event()

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with server:
            is_up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert is_up.wait(10)
        yield server
    finally:
        with contextlib.suppress(IndexError):
            loops[0].call_soon_threadsafe(stop.set)
        thread.join(10)
