"""A cap on requests inside an engine and a bounded queue before it that refuses at once."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from serving.adaptive import AdaptiveCap, CapChange
from serving.engine import (
    Engine,
    EngineLimits,
    EngineSnapshot,
    HasMetrics,
    MalformedReply,
    Overloaded,
    Prompt,
    Reply,
    Request,
    Template,
    Timings,
)
from serving.telemetry import Meter


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    permit: asyncio.Future[None]
    submitted: float


class Limited:
    """An engine that lets `max_concurrent` requests through and queues `max_queued` in order.

    With `slo_s` it takes only as many as are answered within so many seconds of asking: an
    `AdaptiveCap` bounds those unfinished, waiting ones included, and one that waits is refused as
    soon as it cannot be in time any more. Whoever finds no room is refused without waiting.

    Stamps `submitted`; in its snapshots `waiting` and `rejected` count this queue's too. Where
    snapshots are of several replicas each request that waits here is in the `waiting` of all, and
    each that was refused here in the `rejected` of one, so that those add up. `clock` runs as the
    event loop's does.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        slo_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._limits = engine.limits
        self._clock = clock
        self._free = self._limits.max_concurrent
        self._waiting: deque[_Waiter] = deque()
        self._rejected = 0
        self._told_rejected = 0
        """Of these, those that a snapshot told so far."""
        self._told_by: Counter[str | None] = Counter()
        """The same by the replica whose snapshot told them first."""
        most = self._limits.max_concurrent + self._limits.max_queued
        self._cap = None if slo_s is None else AdaptiveCap(slo_s, most=most)
        self._rate: float | None = None
        """The rate by which those that wait were last looked through."""
        self.meter = Meter(engine.name)
        """Counts what passes here; whoever keeps its buckets begins it."""

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def kind(self) -> str:
        return self._engine.kind

    @property
    def version(self) -> str:
        return self._engine.version

    @property
    def template(self) -> Template:
        return self._engine.template

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def restarts(self) -> int:
        return self._engine.restarts

    @property
    def is_ready(self) -> bool:
        """As the engine says; a user's own that does not say counts as ready."""
        return bool(getattr(self._engine, "is_ready", True))

    @property
    def inner(self) -> Engine:
        """The engine behind the limit."""
        return self._engine

    @property
    def admission_history(self) -> Sequence[CapChange]:
        """Every change of the adaptive cap so far, oldest first; times are the clock's. Empty
        without one."""
        return () if self._cap is None else self._cap.history

    async def open(self) -> None:
        await self._engine.open()

    async def generate(self, request: Request) -> Reply:
        submitted = self._clock()
        self.meter.offered(submitted)
        try:
            reply = _with_submitted(await self._admitted(request, submitted), submitted)
            if not is_recordable(reply):
                raise MalformedReply(f"engine {self.name}: its reply tells no usable figures")
        except BaseException as error:
            self.meter.failed(self._clock(), refused=isinstance(error, Overloaded))
            raise
        self.meter.answered(self._clock(), reply)
        return reply

    async def _admitted(self, request: Request, submitted: float) -> Reply:
        cap = self._cap
        if cap is None:
            return await self._permitted(request, submitted)
        if not cap.admit(submitted):
            self._rejected += 1
            raise Overloaded(
                f"engine {self.name}: {cap.cap} requests unfinished, as many as it is held to "
                f"answer within {cap.slo_s:g} s"
            )
        is_answered = False
        try:
            reply = await self._permitted(request, submitted)
            is_answered = True
            return reply
        finally:
            cap.ended(self._clock(), submitted, is_answered=is_answered)
            self._refuse_late(cap)

    async def _permitted(self, request: Request, submitted: float) -> Reply:
        if self._free:
            self._free -= 1
        else:
            await self._wait_for_permit(submitted)
        try:
            entered = self._clock()
            reply = await self._engine.generate(request)
            if self._cap is not None:
                self._cap.served(self._clock() - entered)
            return reply
        except Overloaded:
            if self._cap is not None:
                self._cap.refused(self._clock(), submitted)
            raise
        finally:
            self._release()

    async def _wait_for_permit(self, submitted: float) -> None:
        if len(self._waiting) >= self._limits.max_queued:
            self._rejected += 1
            raise Overloaded(
                f"engine {self.name}: {self._limits.max_concurrent} requests inside and "
                f"{self._limits.max_queued} waiting"
            )
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop.create_future(), submitted)
        self._waiting.append(waiter)
        last_call = None
        if self._cap is not None:
            left_s = self._cap.slo_s - self._cap.service_s
            last_call = loop.call_later(left_s, self._refuse, waiter)
        try:
            await waiter.permit
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise
        finally:
            if last_call is not None:
                last_call.cancel()

    def _give_up(self, waiter: _Waiter) -> None:
        """Its caller was cancelled, maybe after its permit was handed over or refused."""
        permit = waiter.permit
        if permit.cancelled():
            with suppress(ValueError):  # already passed over
                self._waiting.remove(waiter)
        elif permit.exception() is None:
            self._release()

    def _release(self) -> None:
        while self._waiting:
            permit = self._waiting.popleft().permit
            if not permit.done():
                permit.set_result(None)
                return
        self._free += 1

    def _refuse(self, waiter: _Waiter) -> None:
        if not waiter.permit.done():
            self._waiting.remove(waiter)
            self._rejected += 1
            waiter.permit.set_exception(
                Overloaded(f"engine {self.name}: its answer would come too late")
            )

    def _refuse_late(self, cap: AdaptiveCap) -> None:
        """Refuse whoever waits in vain by the rate, if that was measured anew."""
        if cap.rate == self._rate:
            return
        self._rate = cap.rate
        now, ahead = self._clock(), 1
        for waiter in tuple(self._waiting):
            if cap.can_be_in_time(now, waiter.submitted, ahead):
                ahead += 1
            else:
                self._refuse(waiter)

    async def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        async for snapshot in self._engine.snapshots():
            told, queued = _recordable(snapshot), len(self._waiting)
            self._told_by[told.replica] += self._rejected - self._told_rejected
            self._told_rejected = self._rejected
            seen = replace(
                told,
                waiting=(told.waiting or 0) + queued,
                rejected=(told.rejected or 0) + self._told_by[told.replica],
            )
            self.meter.stepped(seen, queued)
            yield seen

    async def metrics(self) -> str:
        """The engine's own metrics; empty for one that has none."""
        return await self._engine.metrics() if isinstance(self._engine, HasMetrics) else ""

    async def prime(self, prompt: Prompt) -> None:
        await self._engine.prime(prompt)

    async def reset_prefix_cache(self) -> bool:
        return await self._engine.reset_prefix_cache()

    async def close(self) -> None:
        await self._engine.close()


def _with_submitted(reply: Reply, submitted: float) -> Reply:
    at = reply.timings
    timings = Timings(
        submitted, at.admitted, at.first_token, at.done, at.queue_s, at.prefill_s, at.decode_s
    )
    return Reply(
        reply.text,
        reply.finish,
        reply.usage,
        timings,
        reply.step_requests_mean,
        reply.replica,
        reply.reasoning,
    )


_MOST = 2**53
"""Greatest figure that is kept: what is above it, infinite or no number is nonsense, and would end
the run at the store."""
_COUNTS = (
    "running",
    "waiting",
    "step_requests",
    "step_tokens",
    "prefix_queries",
    "prefix_hits",
    "preemptions",
    "rejected",
)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= _MOST


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= _MOST


def is_recordable(reply: Reply) -> bool:
    """Whether its figures are numbers that records can hold: no NaN, no fractions of tokens; and
    its replica has a name, if any."""
    times, usage = reply.timings, reply.usage
    counts = [usage.completion, *(n for n in (usage.prompt, usage.cached) if n is not None)]
    may_be_unknown = (
        times.first_token,
        times.queue_s,
        times.prefill_s,
        times.decode_s,
        reply.step_requests_mean,
    )
    known = [value for value in may_be_unknown if value is not None]
    numbers = (times.admitted, times.done, *known)
    is_named = isinstance(reply.replica, str | None)
    return is_named and all(map(_is_count, counts)) and all(map(_is_number, numbers))


def _recordable(snapshot: EngineSnapshot) -> EngineSnapshot:
    """Without what a user's own engine cannot mean: such a figure is unknown, and a time that is
    none or is yet to come is now."""
    now = time.monotonic()
    unusable: dict[str, None] = {
        name: None
        for name in _COUNTS
        if (value := getattr(snapshot, name)) is not None and not _is_count(value)
    }
    if snapshot.kv_usage is not None and not _is_number(snapshot.kv_usage):
        unusable["kv_usage"] = None
    name: object = snapshot.replica
    if not isinstance(name, str | None):
        unusable["replica"] = None
    at = min(snapshot.at, now) if _is_number(snapshot.at) else now
    if not unusable and at == snapshot.at:
        return snapshot
    return replace(snapshot, at=at, **unusable)  # type: ignore[arg-type]
