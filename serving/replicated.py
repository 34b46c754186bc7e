"""Several engines of one model as one: each match stays where its transcript is cached.

    Limited             all replicas together: max_concurrent, then a bounded queue
    └── Replicated      places the request by its match (`Affinity`)
        └── Limited     what one batch of the replica takes, then a bounded queue
            └── _Replica → the engine

Which replica a request goes to is asked when it comes, and again if the replica went down while it
waited before it. One that was under way ends with the replica's error, and whoever asks again is
sent elsewhere. A replica that is back takes the matches that prefer it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import structlog

from serving.affinity import Affinity
from serving.engine import (
    Engine,
    EngineDead,
    EngineError,
    EngineLimits,
    EngineSnapshot,
    EngineUnavailable,
    Prompt,
    Reply,
    Request,
    Template,
)
from serving.limits import Limited

POLL_S = 0.1
"""While no replica is ready, between looks for one: an engine does not tell when it is back."""

T = TypeVar("T")
log = structlog.get_logger(__name__)


@runtime_checkable
class TellsModel(Protocol):
    """An engine whose server says which model it serves."""

    model: str
    """The same for servers that serve the same; empty where the server does not say."""


class _Down(EngineUnavailable):
    """Not sent: the replica was not ready when its turn came."""


class _Replica:
    """One of the engines; replies and snapshots name it."""

    def __init__(self, replica: str, engine: Engine) -> None:
        self.engine = engine
        self.final: EngineDead | None = None
        """Why it will never answer again."""
        self._replica = replica

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def kind(self) -> str:
        return self.engine.kind

    @property
    def version(self) -> str:
        return self.engine.version

    @property
    def template(self) -> Template:
        return self.engine.template

    @property
    def limits(self) -> EngineLimits:
        return self.engine.limits

    @property
    def restarts(self) -> int:
        return self.engine.restarts

    @property
    def is_ready(self) -> bool:
        return self.final is None and self.engine.is_ready

    async def open(self) -> None:
        try:
            await self.engine.open()
        except EngineError as error:
            said = str(error)
            told = said if self._replica in said else f"engine {self.name}: {said}"
            raise EngineDead(told, final=True) from error

    async def generate(self, request: Request) -> Reply:
        if not self.is_ready:
            raise _Down(f"engine {self.name} is down")
        try:
            reply = await self.engine.generate(request)
        except EngineDead as error:
            if not error.final:
                raise
            self.final = error
            log.error("engine.replica_lost", engine=self.name, why=str(error))
            raise EngineDead(str(error)) from error
        return replace(reply, replica=self._replica)

    async def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        async for snapshot in self.engine.snapshots():
            yield replace(snapshot, replica=self._replica)

    async def prime(self, prompt: Prompt) -> None:
        await self.engine.prime(prompt)

    async def reset_prefix_cache(self) -> bool:
        return await self.engine.reset_prefix_cache()

    async def close(self) -> None:
        await self.engine.close()


class Replicated:
    """Engines of the same model behind one name. All must open; during a run it goes on with those
    that are left, and is dead once none is.

    Each replica lets `max_concurrent` of its own limits in and queues its own `max_queued`; the
    request that finds no room there is `Overloaded` at once, whatever room others have, since its
    prefix is in none of theirs. It has no `metrics`: a family of Prometheus' text format may stand
    on a page once, and every replica has the same.
    """

    def __init__(
        self,
        name: str,
        limits: EngineLimits,
        replicas: Mapping[str, Engine],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limits` are of all together; `replicas` by the name that records have, at least one."""
        self.name = name
        self.limits = limits
        self._replicas = {name: _Replica(name, engine) for name, engine in replicas.items()}
        self._limited = {name: Limited(one) for name, one in self._replicas.items()}
        self._affinity = Affinity()
        self._clock = clock

    @property
    def kind(self) -> str:
        return self._first.kind

    @property
    def version(self) -> str:
        """Of all, where they differ one after the other."""
        return " + ".join(sorted({one.version for one in self._replicas.values()}))

    @property
    def template(self) -> Template:
        return self._first.template

    @property
    def restarts(self) -> int:
        return sum(one.restarts for one in self._replicas.values())

    @property
    def is_ready(self) -> bool:
        """One of them is; or none will be, and nobody waits."""
        return bool(self._ready()) or self._is_lost

    async def open(self) -> None:
        """Open all at once; raises EngineDead for the first that fails, or where they do not serve
        the same model, and none stays open then."""
        try:
            async with asyncio.TaskGroup() as group:
                for one in self._replicas.values():
                    group.create_task(one.open())
            self._check_alike()
        except BaseException as error:
            await self.close()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from error
            raise

    async def generate(self, request: Request) -> Reply:
        while True:
            name = await self._place(request.match_id)
            try:
                return await self._limited[name].generate(request)
            except _Down:
                continue
            finally:
                self._affinity.end(request.match_id, self._clock())

    async def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        """Of all replicas as they come, until the last is closed."""
        streams = [one.snapshots() for one in self._limited.values()]
        coming = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
        try:
            while coming:
                done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    stream = coming.pop(task)
                    try:
                        snapshot = task.result()
                    except StopAsyncIteration:
                        continue
                    coming[asyncio.ensure_future(anext(stream))] = stream
                    yield snapshot
        finally:
            for task in coming:
                task.cancel()
            await asyncio.gather(*coming, return_exceptions=True)

    async def prime(self, prompt: Prompt) -> None:
        """At every replica that is ready: none has what another computed."""
        ready = await self._some_ready()
        await _all(self._replicas[name].prime(prompt) for name in ready)

    async def reset_prefix_cache(self) -> bool:
        """True if every replica that is not lost did; False at once where one is down."""
        left = [one for one in self._replicas.values() if one.final is None]
        if not all(one.is_ready for one in left):
            return False
        return all(await _all(one.reset_prefix_cache() for one in left))

    async def close(self) -> None:
        await _all(one.close() for one in self._replicas.values())

    @property
    def _first(self) -> _Replica:
        return next(iter(self._replicas.values()))

    @property
    def _is_lost(self) -> bool:
        return all(one.final is not None for one in self._replicas.values())

    def _ready(self) -> frozenset[str]:
        return frozenset(name for name, one in self._replicas.items() if one.is_ready)

    async def _some_ready(self) -> frozenset[str]:
        """Those that are ready, as soon as there are any; raises EngineDead once none is left."""
        while not (ready := self._ready()):
            if self._is_lost:
                last = copy(next(one.final for one in self._replicas.values() if one.final))
                last.args = (f"engine {self.name}: no replica is left: {last}",)
                raise last
            await asyncio.sleep(POLL_S)
        return ready

    async def _place(self, match_id: str) -> str:
        ready = await self._some_ready()
        if ready != self._affinity.replicas:
            self._affinity.update(ready)
        name = self._affinity.begin(match_id, self._clock())
        assert name is not None
        return name

    def _check_alike(self) -> None:
        """Raises EngineDead where two servers say that they serve something different."""
        told: dict[str, str] = {}
        for name, one in self._replicas.items():
            if isinstance(one.engine, TellsModel) and one.engine.model:
                told.setdefault(one.engine.model, name)
        if len(told) > 1:
            (model, at), (other, elsewhere) = list(told.items())[:2]
            raise EngineDead(
                f"engine {self.name}: {at} serves {model}, and {elsewhere} {other}: start all "
                "servers with the same model and length",
                final=True,
            )


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results once every one has ended; raises the first one's error."""
    results: list[T] = []
    for ended in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended
        results.append(ended)
    return results
