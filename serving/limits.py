"""A cap on requests inside an engine and a bounded queue before it that refuses at once."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

from serving.engine import (
    Engine,
    EngineLimits,
    EngineSnapshot,
    Overloaded,
    Prompt,
    Reply,
    Request,
    Template,
    Timings,
)


class Limited:
    """An engine that lets `max_concurrent` requests through and queues `max_queued` in order.

    Stamps `submitted`; a request refused here counts in the snapshots' `rejected`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._limits = engine.limits
        self._free = self._limits.max_concurrent
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._rejected = 0

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

    async def open(self) -> None:
        await self._engine.open()

    async def generate(self, request: Request) -> Reply:
        submitted = time.monotonic()
        if self._free:
            self._free -= 1
        else:
            await self._wait_for_permit()
        try:
            reply = await self._engine.generate(request)
        finally:
            self._release()
        return _with_submitted(reply, submitted)

    async def _wait_for_permit(self) -> None:
        if len(self._waiting) >= self._limits.max_queued:
            self._rejected += 1
            raise Overloaded(
                f"engine {self.name}: {self._limits.max_concurrent} requests inside and "
                f"{self._limits.max_queued} waiting"
            )
        permit = asyncio.get_running_loop().create_future()
        self._waiting.append(permit)
        try:
            await permit
        except asyncio.CancelledError:
            if permit.cancelled():
                with suppress(ValueError):  # already passed over
                    self._waiting.remove(permit)
            else:
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            permit = self._waiting.popleft()
            if not permit.done():
                permit.set_result(None)
                return
        self._free += 1

    async def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        async for snapshot in self._engine.snapshots():
            yield replace(snapshot, rejected=(snapshot.rejected or 0) + self._rejected)

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
        reply.text, reply.finish, reply.usage, timings, reply.step_requests_mean, reply.replica
    )
