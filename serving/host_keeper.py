"""Keeps an engine's host running: starts it, and starts it again up to a limit when it fails."""

import asyncio
import time
from collections.abc import Callable
from copy import copy
from typing import Any

import structlog

from serving.config import EngineConfigError, EngineStart
from serving.engine import EngineDead, EngineError
from serving.host_child import HostProcess, HostStart, spawn, wait_until_ready
from serving.template import TemplateError

log = structlog.get_logger(__name__)


class HostKeeper:
    """The host of one engine over all its starts.

    `take` is called with every message from it but `ready` and `dead`; `failed` with the reason,
    each time a start of it is of no more use, and then for good.
    """

    def __init__(
        self,
        settings: EngineStart,
        take: Callable[[str, list[Any]], None],
        failed: Callable[[EngineError], None],
    ) -> None:
        self.restarts = 0
        self.version = ""
        """Of the engine, as its host last told it."""
        self.host: HostProcess | None = None
        """While one runs, or has failed and is about to be ended."""
        self._settings = settings
        self._take = take
        self._failed = failed
        self._serving = asyncio.Event()
        """Set while requests need not wait: the host is ready, or there will be none again."""
        self._final: EngineDead | None = None
        self._ready: asyncio.Future[str] | None = None
        self._supervision: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """False while requests have to wait for a host."""
        return self._final is not None or self.live is not None

    @property
    def live(self) -> HostProcess | None:
        """The host, if it has not failed."""
        is_live = self.host is not None and not self.host.link.failed.done()
        return self.host if is_live else None

    async def open(self, plan: Callable[[], HostStart]) -> None:
        """A ready host, and one that takes its place whenever it fails; raises EngineDead, and then
        none will serve. `plan` says how it is started, and may block."""
        try:
            start = await asyncio.to_thread(plan)
            await self._start_host(start)
        except (EngineDead, EngineConfigError, TemplateError) as error:
            final = EngineDead(str(error), final=True)
            self.give_up(final)
            raise final from error
        self._supervision = asyncio.create_task(self._supervise(start))
        self._supervision.add_done_callback(self.guard_ended)

    async def ready_host(self) -> HostProcess:
        """Waits for it; raises EngineDead where there will be none again."""
        while True:
            await self._serving.wait()
            if self._final is not None:
                raise copy(self._final)
            if self.live is not None:
                return self.live
            # failed; the supervisor, about to run, opens the way again
            self._serving.clear()

    def give_up(self, error: EngineDead) -> None:
        """No host will serve any more; the first reason stands."""
        self._final = self._final or error
        self._failed(self._final)
        self._serving.set()

    def guard_ended(self, task: asyncio.Task[None]) -> None:
        """Without a task that watches over the host nothing would ever answer: say so."""
        if not task.cancelled() and (cause := task.exception()) is not None:
            self.give_up(EngineDead(f"engine {self._settings.name}: {cause!r}", final=True))

    async def close(self) -> None:
        """End every process of the host and wait until none is left."""
        closed = EngineDead(f"engine {self._settings.name} was closed", final=True)
        self._final = self._final or closed
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        self.give_up(closed)
        if self.host is not None:
            host, self.host = self.host, None
            await host.end()

    async def _start_host(self, start: HostStart) -> None:
        """A ready host, or EngineDead; leaves no process behind when it fails."""
        self._ready = asyncio.get_running_loop().create_future()
        begun = time.monotonic()
        try:
            host = await spawn(start, self._heard)
        except OSError as error:
            raise EngineDead(f"engine {start.name} cannot be started: {error}") from error
        try:
            self.version = await wait_until_ready(host, self._ready, start)
        except BaseException:
            await host.end()
            raise
        self.host = host
        self._serving.set()
        took = round(time.monotonic() - begun, 1)
        log.info("engine.ready", engine=start.name, version=self.version, seconds=took)

    def _heard(self, tag: str, fields: list[Any]) -> None:
        if tag != "ready":
            self._take(tag, fields)
        elif self._ready is not None and not self._ready.done():
            self._ready.set_result(str(fields[0]))

    async def _supervise(self, start: HostStart) -> None:
        """Until closed: when a start of the host fails, end it and start another."""
        while self.host is not None:
            error = await asyncio.shield(self.host.link.failed)
            log.warning("engine.failed", engine=start.name, kind=error.kind, reason=str(error))
            self._serving.clear()
            self._failed(error)
            await self.host.end(grace_s=0)
            self.host = None
            await self._restart(start, error)

    async def _restart(self, start: HostStart, error: EngineError) -> None:
        """A new host, or the final error for every request from now on."""
        limit = self._settings.restart_limit
        while self.restarts < limit:
            self.restarts += 1
            try:
                await self._start_host(start)
            except EngineDead as again:
                error = again
            else:
                return
        final = EngineDead(f"{error} (restarted {limit} times)", final=True)
        log.error("engine.dead", engine=start.name, reason=str(final))
        self.give_up(final)
