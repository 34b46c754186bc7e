"""A simulated engine under open-loop load, in virtual time: minutes of it pass in a moment."""

import asyncio
import heapq
import itertools
import math
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from serving import (
    EngineLimits,
    EngineSnapshot,
    Finish,
    Limited,
    ModelTemplate,
    Overloaded,
    Prompt,
    Reply,
    Request,
    Sampling,
    Timings,
    TokenPrompt,
    Usage,
)

SLO_S = 1.0
T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Instead of waiting, lets as much virtual time pass."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("nothing will ever happen: every task waits for another")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time passes only when there is nothing else to do, and then at once."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def now() -> float:
    return asyncio.get_running_loop().time()


class SharedEngine:
    """Computes `tokens_per_s`, shared evenly by all requests inside; a request is `max_tokens`."""

    name = "shared"
    kind = "simulated"
    version = "1"
    restarts = 0
    is_ready = True

    def __init__(self, tokens_per_s: float, limits: EngineLimits) -> None:
        self.limits = limits
        self._tokens_per_s = tokens_per_s
        self._each = 0.0
        """Tokens that a request has been given that was inside from the beginning."""
        self._counted_to = 0.0
        self._inside: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._next: asyncio.TimerHandle | None = None

    @property
    def template(self) -> ModelTemplate:
        raise NotImplementedError

    @property
    def num_inside(self) -> int:
        return len(self._inside)

    def set_speed(self, tokens_per_s: float) -> None:
        self._advance()
        self._tokens_per_s = tokens_per_s
        self._plan()

    async def open(self) -> None: ...

    async def generate(self, request: Request) -> Reply:
        admitted = now()
        self._advance()
        done = asyncio.get_running_loop().create_future()
        entry = (self._each + request.max_tokens, next(self._numbers), done)
        heapq.heappush(self._inside, entry)
        self._plan()
        await done
        timings = Timings(admitted, admitted, None, now(), None, None, None)
        return Reply("e2e4", Finish.STOP, Usage(1, request.max_tokens, None), timings)

    def _advance(self) -> None:
        if self._inside:
            passed = now() - self._counted_to
            self._each += passed * self._tokens_per_s / len(self._inside)
        self._counted_to = now()

    def _plan(self) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next = None
        if self._inside and self._tokens_per_s:
            left = self._inside[0][0] - self._each
            delay = max(left, 0.0) * len(self._inside) / self._tokens_per_s
            self._next = asyncio.get_running_loop().call_later(delay, self._finish_first)

    def _finish_first(self) -> None:
        self._advance()
        self._each, _, done = heapq.heappop(self._inside)
        done.set_result(None)
        self._plan()

    async def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        yield EngineSnapshot(at=now(), source="sampled")

    async def prime(self, prompt: Prompt) -> None: ...

    async def reset_prefix_cache(self) -> bool:
        return True

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """One request of a load: when it was offered, when it was answered (None: refused)."""

    offered: float
    answered: float | None

    @property
    def is_in_time(self) -> bool:
        return self.answered is not None and self.answered - self.offered <= SLO_S


def in_time_per_s(outcomes: Sequence[Outcome], begin: float, end: float) -> float:
    """Answers in time that came from `begin` to `end`, a second."""
    came = [one for one in outcomes if begin <= (one.answered or math.nan) < end]
    return sum(one.is_in_time for one in came) / (end - begin)


async def offer(
    engine: Limited,
    per_s: float,
    seconds: float,
    *,
    seed: int,
    tokens: tuple[int, int] = (4, 6),
    at: dict[float, Callable[[], None]] | None = None,
) -> list[Outcome]:
    """An open loop: Poisson arrivals, whatever becomes of them; `at` is called at its times.

    A request is `tokens[0]` to `tokens[1]` tokens, evenly drawn. Returns when all have ended.
    """
    dice = Random(seed)
    outcomes: list[Outcome] = []

    async def ask(number: int) -> None:
        begun = now()
        size = dice.randint(*tokens)
        request = Request(
            f"m/{number}/0/0", "m", TokenPrompt((1,)), None, size, Sampling(), deadline_s=30.0
        )
        try:
            await engine.generate(request)
        except Overloaded:
            outcomes.append(Outcome(begun, None))
        else:
            outcomes.append(Outcome(begun, now()))

    loop = asyncio.get_running_loop()
    for when, call in (at or {}).items():
        loop.call_at(when, call)
    async with asyncio.TaskGroup() as group:
        end = now() + seconds
        for number in itertools.count():
            await asyncio.sleep(dice.expovariate(per_s))
            if now() >= end:
                break
            group.create_task(ask(number))
    return outcomes
