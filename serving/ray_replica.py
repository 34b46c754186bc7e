"""One replica: the very engine that runs embedded, in an actor of Ray Serve.

Runs wherever Ray puts it. It holds that engine behind its own concurrency limit and bounded queue,
so that more than it can take is refused at once; nothing waits in a queue of Ray's.
"""

import asyncio
import shutil
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import ray
from ray import serve

from serving.config import EngineConfigError, EngineStart
from serving.engine import EngineDead, EngineError, EngineSnapshot, EngineUnavailable
from serving.limits import Limited
from serving.process import SCRATCH_PREFIX
from serving.ray_config import HOSTED
from serving.ray_line import MOST_CALLS
from serving.ray_scaling import LOAD
from serving.ray_wire import (
    Fields,
    Heard,
    Look,
    ReplicaPlan,
    prompt_of,
    reply_fields,
    request_of,
    snapshot_fields,
)

_SNAPSHOTS_KEPT = 4096
_LEASE_LOOKS = 10
"""Looks at the clock in one lease."""


class Replica:
    """Answers the host that deployed it, or one that takes its place."""

    # Ray Serve awaits this
    async def __init__(self, plan: ReplicaPlan) -> None:  # type: ignore[misc]
        context = serve.get_replica_context()
        self._app, self._name = context.app_name, context.replica_id.unique_id
        folder = f"{SCRATCH_PREFIX}{self._app}-{self._name}"
        self._log_dir = Path(tempfile.gettempdir()) / folder
        self._node = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._look_seconds = plan.look_seconds
        self._lease_seconds = plan.lease_seconds
        self._leased_until = time.monotonic() + plan.start_seconds
        self._host = ""
        """Who asks."""
        self._asked: dict[int, asyncio.Task[None]] = {}
        """Questions under way, by the host's number."""
        self._answers: dict[int, Fields] = {}
        """By the same number: those that the host is not known to have."""
        self._untold: list[int] = []
        """Of these, the numbers of those that no call has brought yet."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        """Calls that wait for an answer, the longest first."""
        self._dead: EngineDead | None = None
        self._unread: deque[EngineSnapshot] = deque(maxlen=_SNAPSHOTS_KEPT)
        self._engine = await self._opened(plan)
        self._tasks = [asyncio.create_task(self._read_snapshots())]
        if plan.lease_seconds is not None:
            self._tasks.append(asyncio.create_task(self._end_with_lease(plan.lease_seconds)))

    async def exchange(self, host: str, messages: list[Fields], is_again: bool) -> Heard:
        """Take what the host says; then tell answers, as soon as there is one, after a while none.

        `is_again`: what earlier calls brought may be lost; whatever the host is not known to have
        is told once more. Renews the lease.
        """
        self._talk_to(host)
        if self._lease_seconds is not None:
            self._leased_until = time.monotonic() + self._lease_seconds
        for tag, number, *fields in messages:
            if tag == "ask":
                self._asked[number] = asyncio.create_task(self._answer(number, *fields))
            elif tag == "got":
                self._answers.pop(number, None)
            elif (task := self._asked.pop(number, None)) is not None:
                task.cancel()
        if is_again:
            self._untold = list(self._answers)
        if not self._untold:
            await self._wait()
        answers: list[Fields] = []
        if host == self._host:
            answers = [self._answers[number] for number in self._untold if number in self._answers]
            self._untold.clear()
        return Heard(answers, list(self._look()))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray Serve, for `ByLoad`."""
        return {LOAD: float(len(self._asked))}

    async def prime(self, prompt: Fields) -> bool:
        """Compute a prompt ahead; False where the engine could not."""
        try:
            await self._engine.prime(prompt_of(prompt))
        except EngineError as error:
            self._told(error)
            return False
        return True

    async def reset(self) -> bool:
        """Forget cached prefixes."""
        return await self._engine.reset_prefix_cache()

    async def version(self) -> str:
        """Of the engine."""
        return self._engine.version

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica whose engine is dead for good."""
        if self._dead is not None:
            raise self._dead

    async def close(self) -> None:
        """End the engine. Its log goes with it: only one that fails leaves it there."""
        for task in (*self._tasks, *self._asked.values()):
            task.cancel()
        await self._engine.close()
        await asyncio.to_thread(shutil.rmtree, self._log_dir, ignore_errors=True)

    __del__ = close
    """So does Ray Serve call what it awaits when it ends a replica."""

    async def _opened(self, plan: ReplicaPlan) -> Limited:
        kind = HOSTED[plan.engine["kind"]]
        start = EngineStart(plan.name, self._log_dir, plan.stall_seconds, plan.restart_limit)
        try:
            config = kind.config_class.model_validate(plan.engine)
            await asyncio.to_thread(kind.check, config)
            engine = Limited(kind.build(start, config))
            await engine.open()
        except (EngineConfigError, EngineDead) as error:
            raise ReplicaError(f"on {self._node}: {error}") from error
        return engine

    def _talk_to(self, host: str) -> None:
        """Whatever another host asked, nobody waits for any more."""
        if host == self._host:
            return
        for task in self._asked.values():
            task.cancel()
        self._asked.clear()
        self._answers.clear()
        self._untold.clear()
        while self._waiting:
            self._end_wait()
        self._host = host

    async def _wait(self) -> None:
        """For an answer, or a while; no longer once so many calls wait that no more would come."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        if len(self._waiting) >= MOST_CALLS:
            self._end_wait()
        try:
            await asyncio.wait((waiter,), timeout=self._look_seconds)
        except asyncio.CancelledError:
            if waiter.done() and self._untold:
                self._end_wait()  # another call must bring what this one would have brought
            raise
        finally:
            if not waiter.done():
                self._waiting.remove(waiter)

    def _end_wait(self) -> None:
        """The call that waits longest waits no more."""
        if self._waiting:
            self._waiting.popleft().set_result(None)

    async def _answer(self, number: int, request: Fields) -> None:
        reply = failure = None
        try:
            reply = reply_fields(await self._engine.generate(request_of(request)))
        except EngineError as error:
            failure = self._told(error)
        # a request of another version, a fault of ours: who asked must hear of it at once
        except Exception as error:  # noqa: BLE001
            failure = [EngineUnavailable.kind, f"{type(error).__name__}: {error}"]
        self._asked.pop(number, None)
        self._answers[number] = [number, reply, failure]
        self._untold.append(number)
        if len(self._untold) == 1:
            self._end_wait()

    def _look(self) -> Look:
        now = time.monotonic()
        snapshots = [snapshot_fields(snapshot, now) for snapshot in self._unread]
        self._unread.clear()
        engine = self._engine
        # one that is dead for good keeps nobody waiting, but is no place for a match
        is_ready = engine.is_ready and self._dead is None
        return Look(self._name, engine.restarts, is_ready, self._node, snapshots)

    def _told(self, error: EngineError) -> Fields:
        if isinstance(error, EngineDead) and error.final:
            self._dead = error
        return [error.kind, str(error)]

    async def _read_snapshots(self) -> None:
        async for snapshot in self._engine.snapshots():
            self._unread.append(snapshot)

    async def _end_with_lease(self, lease_seconds: float) -> None:
        """Give the cluster back what an arena left there that is gone."""
        period = lease_seconds / _LEASE_LOOKS
        woken = time.monotonic()
        while True:
            await asyncio.sleep(period)
            now = time.monotonic()
            # this process was stopped: whoever asked meanwhile was not heard
            self._leased_until += max(0.0, now - woken - period)
            woken = now
            if now > self._leased_until:
                await asyncio.to_thread(serve.delete, self._app, _blocking=False)
                self._leased_until = time.monotonic() + lease_seconds


class ReplicaError(RuntimeError):
    """An engine that did not open, and on which machine."""


def deployment(options: dict[str, Any], plan: ReplicaPlan) -> Any:
    """What Ray Serve deploys."""
    deployed: Any = serve.deployment(Replica, name="engine", **options)
    return deployed.bind(plan)
