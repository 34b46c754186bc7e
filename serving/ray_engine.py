"""Replicas of an engine on Ray, as one engine: a child process speaks to the cluster for us.

The child (`ray_host`) deploys the replicas on Ray Serve, and decides which one a match goes to. A
replica that ends or freezes fails what it was asked, and its matches go on at others while Ray
starts another; the child itself is started again as any engine's host is.
"""

import asyncio
import hashlib
import itertools
import json
import math
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from copy import copy
from dataclasses import asdict
from typing import Any

import structlog

from serving.config import EngineKind, EngineStart
from serving.engine import (
    EngineDead,
    EngineError,
    EngineLimits,
    EngineSnapshot,
    EngineStalled,
    EngineUnavailable,
    Prompt,
    Reply,
    Request,
    Template,
)
from serving.host_child import HostProcess, HostStart
from serving.host_keeper import HostKeeper
from serving.ray_config import (
    HOSTED,
    RayConfig,
    check_ray,
    installed_ray,
    own_token_environment,
    token_environment,
)
from serving.ray_wire import (
    VERSION,
    Fields,
    Look,
    RayStart,
    ReplicaPlan,
    error_of,
    prompt_fields,
    reply_of,
    request_fields,
    snapshot_of,
)
from serving.snapshots import SnapshotQueue

_ANSWER_S = 5.0
"""After the time by which the replica itself gives a request up."""
_LEAST_LOOK_S = 0.25
_LOOKS_PER_S = 200
"""At all replicas together, at most."""
_MORE_ASKED = 64
"""Calls that exchange, prime and reset, and what Ray counts before it hears of an end."""
_RESET_S = 10.0
_PRIME_S = 600.0
_CLOSE_S = 35.0
_SNAPSHOTS_KEPT = 16_384

log = structlog.get_logger(__name__)


class _Pending:
    """A request that no replica has answered yet."""

    __slots__ = ("admitted", "answer", "number", "request", "timer")

    def __init__(self, number: int, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.request = request
        self.admitted = time.monotonic()
        self.answer: asyncio.Future[Reply] = loop.create_future()
        self.timer: asyncio.TimerHandle | None = None

    def fail(self, error: EngineError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class RayEngine:
    """Replicas on Ray behind one name. While there is none, requests wait."""

    kind = "ray"

    host_command: Sequence[str] = (sys.executable, "-m", "serving.ray_host")
    """Starts the host; given the numbers of two inherited sockets."""

    def __init__(self, start: EngineStart, config: RayConfig) -> None:
        self.name = start.name
        self._settings = start
        self._config = config
        self._hosted = HOSTED[config.engine.kind].build(start, config.engine)
        """Never opened: what its template and limits are, the replicas' are."""
        self._keeper = HostKeeper(start, self._take, self._fail_all)
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._errands: dict[int, asyncio.Future[bool]] = {}
        self._replicas: frozenset[str] = frozenset()
        self._has_replicas = asyncio.Event()
        """Set while requests need not wait for a replica, or there will be none again."""
        self._known: frozenset[str] = frozenset()
        """Every replica that there was; of a local cluster since its host was started."""
        self._replaced = 0
        self._looks: dict[str, Look] = {}
        """The last at each replica, without its snapshots; of those that ended too."""
        self._left_alone: asyncio.TimerHandle | None = None
        self._is_deleted = asyncio.Event()
        self._queue = SnapshotQueue(_SNAPSHOTS_KEPT)
        self._heard = time.monotonic()
        """Something of the host, last."""
        self._watching: asyncio.Task[None] | None = None

    @property
    def version(self) -> str:
        """Of Ray, and of the engine that replicas host once they tell it."""
        return self._keeper.version or installed_ray() or "not installed"

    @property
    def template(self) -> Template:
        """Resolves the model on first use, which may block for long; `open` does it in a thread."""
        return self._hosted.template

    @property
    def limits(self) -> EngineLimits:
        config = self._config
        inner = self._hosted.limits
        return EngineLimits(
            config.context_tokens,
            config.max_concurrent,
            config.max_queued,
            inner.max_batched_tokens,
        )

    @property
    def restarts(self) -> int:
        """Of the host, of engines inside replicas, and of replicas that another took the place of;
        what Ray adds and takes away by itself counts as none."""
        inside = sum(look.restarts for look in self._looks.values())
        return self._keeper.restarts + inside + self._replaced

    @property
    def is_ready(self) -> bool:
        return self._keeper.is_ready and self._has_replicas.is_set()

    @property
    def nodes(self) -> dict[str, str]:
        """Where each replica runs: its machine's address in the cluster."""
        looks = ((replica, self._looks.get(replica)) for replica in sorted(self._replicas))
        return {replica: look.node if look else "" for replica, look in looks}

    @property
    def pgid(self) -> int | None:
        """The process group of the host and, of a local cluster, of all of Ray."""
        return self._keeper.host.pgid if self._keeper.host else None

    async def open(self) -> None:
        """Every replica ready; raises EngineDead."""
        await self._keeper.open(self._plan_start)
        self._watching = asyncio.create_task(self._watch_host())
        self._watching.add_done_callback(self._keeper.guard_ended)

    async def generate(self, request: Request) -> Reply:
        host = await self._serving_host()
        loop = asyncio.get_running_loop()
        pending = _Pending(next(self._numbers), request, loop)
        self._pending[pending.number] = pending
        host.link.send("ask", pending.number, request.match_id, request_fields(request))
        limit_s = self._most_s(request)
        pending.timer = loop.call_later(limit_s, self._give_up, host, pending, limit_s)
        try:
            return await pending.answer
        except asyncio.CancelledError:
            host.link.send("abort", pending.number)
            raise
        finally:
            self._pending.pop(pending.number, None)
            pending.timer.cancel()

    def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        """Those of all replicas, each with its name."""
        return self._queue.read()

    async def prime(self, prompt: Prompt) -> None:
        """On every replica."""
        if not await self._everywhere(_PRIME_S, "prime", prompt_fields(prompt)):
            raise EngineUnavailable(f"engine {self.name}: a replica could not compute the prompt")

    async def reset_prefix_cache(self) -> bool:
        """True only where every replica did."""
        return not self._pending and await self._everywhere(_RESET_S, "reset")

    async def close(self) -> None:
        """End the replicas and the host; of a local cluster all of it."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        host = self._keeper.live
        if host is not None and not self._config.is_local:
            await self._delete(host)
        self._expect_replicas()
        await self._keeper.close()
        self._has_replicas.set()
        self._queue.close()

    async def _delete(self, host: HostProcess) -> None:
        """Give the cluster back what was deployed; what stays ends with its lease."""
        host.link.send("close")
        deleted = asyncio.create_task(self._is_deleted.wait())
        either: set[asyncio.Future[Any]] = {deleted, host.link.failed}
        await asyncio.wait(either, timeout=_CLOSE_S, return_when=asyncio.FIRST_COMPLETED)
        deleted.cancel()
        if not self._is_deleted.is_set():
            log.warning("engine.not_deleted", engine=self.name, app=self._app)

    async def _watch_host(self) -> None:
        """A host that is frozen is of no more use: it tells something twice a second."""
        stall_s = self._settings.stall_seconds
        period = min(1.0, stall_s / 4)
        watched: HostProcess | None = None
        while True:
            woken = time.monotonic()
            await asyncio.sleep(period)
            now = time.monotonic()
            host = self._keeper.live
            if host is not watched or now - woken > period + 1.0:
                # one that was started just now, or this process itself was stopped
                watched, self._heard = host, now
            silent_s = now - self._heard
            if host is not None and silent_s > stall_s:
                why = f"its process that speaks to Ray told nothing for {silent_s:.1f} s"
                host.link.fail(EngineStalled(f"engine {self.name}: {why}"))

    async def _serving_host(self) -> HostProcess:
        while True:
            host = await self._keeper.ready_host()
            if self._has_replicas.is_set():
                return host
            await self._has_replicas.wait()

    async def _everywhere(self, limit_s: float, tag: str, *fields: Fields) -> bool:
        host = await self._serving_host()
        number = next(self._numbers)
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._errands[number] = done
        host.link.send(tag, number, *fields)
        try:
            async with asyncio.timeout(limit_s):
                return await done
        except TimeoutError:
            return False
        finally:
            self._errands.pop(number, None)

    def _plan_start(self) -> HostStart:
        """Blocks until the model's template is there too."""
        _ = self.template
        config, settings = self._config, self._settings
        look_seconds = max(_LEAST_LOOK_S, config.most_replicas / _LOOKS_PER_S)
        plan = ReplicaPlan(
            name=self.name,
            engine={
                "kind": config.engine.kind,
                **config.engine.model_dump(mode="json", exclude_unset=True),
            },
            stall_seconds=settings.stall_seconds,
            restart_limit=settings.restart_limit,
            look_seconds=look_seconds,
            lease_seconds=None if config.is_local else config.lease_seconds,
            start_seconds=config.start_seconds,
        )
        start = RayStart(
            address=config.address,
            app=self._app,
            replicas=config.replicas,
            max_replicas=config.max_replicas,
            cpus=config.cpus_per_replica,
            gpus=config.gpus,
            batch_limit=config.batch_limit,
            most_asked=config.engine.max_concurrent + config.engine.max_queued + _MORE_ASKED,
            silent_s=settings.stall_seconds + look_seconds,
            plan=asdict(plan),
        )
        return HostStart(
            name=self.name,
            log_dir=settings.log_dir,
            arguments=asdict(start),
            environment=_environment(config),
            warm_up_ids=(),
            limit_s=config.start_seconds,
            command=self.host_command,
        )

    @property
    def _app(self) -> str:
        """The same for every start of this engine in this run: replicas that an arena left which
        was killed are taken over."""
        table = self._config.model_dump_json()
        folder = str(self._settings.log_dir.resolve())
        run = json.dumps([socket.gethostname(), folder, self.name, table, VERSION])
        digest = hashlib.blake2b(run.encode(), digest_size=6).hexdigest()
        return f"boardfleet-{re.sub(r'[^A-Za-z0-9-]', '-', self.name)}-{digest}"

    def _most_s(self, request: Request) -> float:
        """Seconds in which a replica must have answered: its deadline begins when it leaves the
        replica's own queue, where others with deadlines of their own may be before it."""
        replica = self._config.engine
        ahead = math.ceil(replica.max_queued / replica.max_concurrent)
        return request.deadline_s * (1 + ahead) + _ANSWER_S

    def _give_up(self, host: HostProcess, pending: _Pending, limit_s: float) -> None:
        host.link.send("abort", pending.number)
        pending.fail(
            EngineStalled(
                f"engine {self.name}: {pending.request.id} was not answered in {limit_s:g} s"
            )
        )

    def _take(self, tag: str, fields: Fields) -> None:
        """One message from the host."""
        self._heard = time.monotonic()
        if tag == "reply":
            number, replica, reply = fields
            if (pending := self._pending.get(number)) is not None and not pending.answer.done():
                done = time.monotonic()
                pending.answer.set_result(reply_of(reply, replica, pending.admitted, done))
        elif tag == "error":
            number, kind, message = fields
            if (pending := self._pending.get(number)) is not None:
                pending.fail(error_of(kind, f"engine {self.name}: {message}"))
        elif tag == "look":
            self._keep(Look(*fields))
        elif tag == "replicas":
            self._see(frozenset(fields[0]))
        elif tag == "done" and (errand := self._errands.get(fields[0])) is not None:
            if not errand.done():
                errand.set_result(bool(fields[1]))
        elif tag == "closed":
            self._is_deleted.set()

    def _keep(self, look: Look) -> None:
        now = time.monotonic()
        self._looks[look.replica] = look._replace(snapshots=())
        self._queue.put(snapshot_of(one, look.replica, now) for one in look.snapshots)

    def _see(self, replicas: frozenset[str]) -> None:
        """Those that serve now."""
        gone, new = self._replicas - replicas, replicas - self._replicas
        self._replicas = replicas
        if gone or new:
            log.info(
                "engine.replicas",
                engine=self.name,
                gone=sorted(gone),
                new=sorted(new),
                serving=len(replicas),
            )
        known = self._known | replicas
        if self._config.max_replicas is None:
            self._replaced += max(0, len(known) - max(len(self._known), self._config.replicas))
        self._known = known
        if replicas:
            self._has_replicas.set()
            self._expect_replicas()
        else:
            self._has_replicas.clear()
            self._expect_replicas(self._config.start_seconds)

    def _expect_replicas(self, limit_s: float | None = None) -> None:
        """Until when there must be one again; None: there is, or nobody waits for one."""
        if self._left_alone is not None:
            self._left_alone.cancel()
            self._left_alone = None
        if limit_s is not None:
            loop = asyncio.get_running_loop()
            self._left_alone = loop.call_later(limit_s, self._end_alone, limit_s)

    def _end_alone(self, limit_s: float) -> None:
        """A host whose replicas do not come back is of no more use."""
        if (host := self._keeper.live) is not None:
            why = f"engine {self.name}: no replica came back in {limit_s:g} s"
            host.link.fail(EngineDead(why))

    def _fail_all(self, error: EngineError) -> None:
        """The host is of no more use, now or for good."""
        self._replicas = frozenset()
        if self._config.is_local:
            self._known = frozenset()
        self._has_replicas.clear()
        self._expect_replicas()
        if isinstance(error, EngineDead) and error.final:
            self._has_replicas.set()
        for pending in list(self._pending.values()):
            pending.fail(copy(error))
        for errand in self._errands.values():
            if not errand.done():
                errand.set_result(False)


def _environment(config: RayConfig) -> dict[str, str]:
    """Of the host, for Ray."""
    # each takes half of the processor time of a call; the host asks from one loop alone
    quick = {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
    if not config.is_outside:  # one who is not of the cluster may not reach its machines
        quick["RAY_SERVE_USE_GRPC_BY_DEFAULT"] = "1"
    if config.is_local:
        return {**quick, **own_token_environment(), "RAY_worker_niceness": "0"}
    # where Ray left the address of a cluster that runs: not in the host's own TMPDIR
    temporary = os.environ.get("RAY_TMPDIR", tempfile.gettempdir())
    return {**quick, **token_environment(), "RAY_TMPDIR": temporary}


RAY = EngineKind(RayConfig, check_ray, RayEngine)
