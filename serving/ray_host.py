"""The process that speaks to Ray for the arena: `python -m serving.ray_host SOCKET LIFELINE`.

Both arguments are inherited file descriptors. It deploys the replicas, decides which of them a
match goes to, looks at each again and again, and ends with the arena. A cluster of this machine
alone is started by it and ends with it.
"""

import os
import sys

from serving.process import guard_group

if __name__ == "__main__":
    # before ray is imported: that takes seconds, starts threads, and the arena may die meanwhile
    guard_group(int(sys.argv[2]), os.environ.get("TMPDIR"))
import asyncio
import math
import secrets
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
import uvloop
from ray import serve
from ray.exceptions import RayActorError

from serving import ray_presence
from serving.affinity import Affinity
from serving.engine import EngineDead, EngineStalled, EngineUnavailable
from serving.host_wire import LONGEST_LINE, Outbox, decode
from serving.ray_cluster import join, start_here
from serving.ray_config import LOCAL
from serving.ray_deploy import deploy
from serving.ray_line import ReplicaLine
from serving.ray_wire import Fields, Look, RayStart, one_line

BEAT_S = 0.5
_CONNECT_S = 30.0
"""A head that is started again is away for less."""
_EVERYWHERE_S = 600.0
_DELETE_S = 30.0
_CLUSTER_PERIOD_S = 5.0
_CLUSTER_ANSWER_S = 20.0


@dataclass(eq=False, slots=True)
class _Ask:
    """A question that its replica has not answered yet."""

    match_id: str
    replica: str


class Host:
    """Serves one arena over one socket until either side ends."""

    def __init__(
        self, start: RayStart, handle: Any, fewest: int, writer: asyncio.StreamWriter
    ) -> None:
        """`fewest`: replicas that must be there before it serves."""
        self._start = start
        self._handle = handle
        self._fewest = fewest
        self._writer = writer
        self._name = secrets.token_hex(4)
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(self._write)
        self._affinity = Affinity()
        self._lines: dict[str, ReplicaLine] = {}
        """To every replica that Ray runs."""
        self._absent: frozenset[str] = frozenset()
        """Those among them that tell nothing, or whose engine is being started again."""
        self._asks: dict[int, _Ask] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._calls: dict[asyncio.Task[Any], str] = {}
        """Of these to replicas, each with whom it asks."""
        self._complete = asyncio.Event()
        """Set once there were as many replicas as must be."""
        self._is_closing = False
        ray_presence.watch(self._heard_of)

    async def first_replicas(self) -> str:
        """Waits until they are there; the version of their engine."""
        self._run(self._watch_cluster())
        # Ray makes the router, which is told of the replicas, for the first question
        version = str(await self._handle.options(method_name="version").remote())
        await self._complete.wait()
        return version

    def beat(self) -> None:
        """Tell the arena again and again that this process is not frozen."""
        self.send("alive")
        self._loop.call_later(BEAT_S, self.beat)

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Answer until the arena closes its end."""
        while line := await reader.readline():
            for tag, *fields in decode(line):
                self._take(tag, fields)

    def send(self, *message: Any) -> None:
        """Put a message into the line that leaves at the end of this turn of the loop."""
        self._outbox.put(*message)

    def _write(self, line: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(line)

    def _take(self, tag: str, fields: list[Any]) -> None:
        if tag == "ask":
            self._ask(*fields)
        elif tag == "abort":
            (number,) = fields
            if (ask := self._ended(number)) is not None and ask.replica in self._lines:
                self._lines[ask.replica].say("abort", number)
        elif tag in ("prime", "reset"):
            number, *arguments = fields
            self._run(self._everywhere(number, tag, arguments))
        elif tag == "close":
            self._is_closing = True
            self._run(self._delete())
        else:
            raise ValueError(f"unknown message {tag!r}")

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    # questions

    def _ask(self, number: int, match_id: str, request: Fields) -> None:
        replica = self._affinity.begin(match_id, time.monotonic())
        if replica is None:
            self.send("error", number, EngineDead.kind, "no replica is running")
            return
        self._asks[number] = _Ask(match_id, replica)
        self._lines[replica].say("ask", number, request)

    def _ended(self, number: int) -> _Ask | None:
        """The question, now that nobody waits for an answer; None where nobody did."""
        ask = self._asks.pop(number, None)
        if ask is not None:
            self._affinity.end(ask.match_id, time.monotonic())
        return ask

    def _answered(self, number: int, reply: Fields | None, failure: Fields | None) -> None:
        if (ask := self._ended(number)) is None:
            return
        if failure is None:
            self.send("reply", number, ask.replica, reply)
        else:
            kind, why = failure
            self.send("error", number, kind, f"replica {ask.replica}: {why}")

    def _fail(self, numbers: Iterable[int], kind: str, why: str) -> None:
        """Questions that will not be answered: their matches ask again."""
        for number in list(numbers):
            if self._ended(number) is not None:
                self.send("error", number, kind, why)

    def _at(self, replica: str) -> list[int]:
        return [number for number, ask in self._asks.items() if ask.replica == replica]

    # replicas

    def _heard_of(self, replicas: frozenset[str]) -> None:
        """Ray's word of all replicas that there are; comes from its own thread."""
        self._loop.call_soon_threadsafe(self._see, replicas)

    def _see(self, replicas: frozenset[str]) -> None:
        for replica in self._lines.keys() - replicas:
            self._lines.pop(replica).close()
            self._absent -= {replica}
            self._fail(self._at(replica), EngineDead.kind, f"replica {replica} ended")
        for replica in sorted(replicas - self._lines.keys()):
            self._lines[replica] = self._line(replica)
        if len(replicas) >= self._fewest:
            self._complete.set()
        self._tell()

    def _line(self, replica: str) -> ReplicaLine:
        exchange = self._method(replica, "exchange")

        def looked(look: Look) -> None:
            self._set_absent(replica, not look.is_ready)
            self.send("look", *look)

        def silent() -> None:
            self._set_absent(replica, True)
            why = f"replica {replica} told nothing for {self._start.silent_s:g} s"
            asked = self._at(replica)
            self._fail(asked, EngineStalled.kind, why)
            # once it goes on, it shall not answer what nobody waits for
            for number in asked:
                self._lines[replica].say("abort", number)

        def failed(numbers: list[int], error: BaseException) -> None:
            ended = isinstance(error, RayActorError)
            kind = EngineDead.kind if ended else EngineUnavailable.kind
            self._fail(numbers, kind, f"replica {replica}: {one_line(error)}")

        return ReplicaLine(
            replica,
            exchange,
            self._name,
            silent_s=self._start.silent_s,
            answered=self._answered,
            looked=looked,
            silent=silent,
            failed=failed,
        )

    @property
    def _serving(self) -> frozenset[str]:
        return frozenset(self._lines) - self._absent

    def _set_absent(self, replica: str, is_absent: bool) -> None:
        if is_absent != (replica in self._absent):
            self._absent ^= {replica}
            self._tell()

    def _tell(self) -> None:
        for call, replica in self._calls.items():
            if replica not in self._serving:
                call.cancel()
        self._affinity.update(self._serving)
        self.send("replicas", sorted(self._serving))

    def _method(self, replica: str, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Of one replica; cancelling passes on to it."""
        method = self._handle.options(method_name=name, session_id=replica)

        async def call(*arguments: Any) -> Any:
            response = method.remote(*arguments)
            try:
                return await response
            except asyncio.CancelledError:
                response.cancel()
                raise

        return call

    # all of them

    async def _everywhere(self, number: int, method: str, arguments: Fields) -> None:
        calls = {
            self._loop.create_task(self._method(replica, method)(*arguments)): replica
            for replica in self._serving
        }
        self._calls |= calls
        done: Sequence[Any] = [False] * len(calls)
        with suppress(TimeoutError):
            async with asyncio.timeout(_EVERYWHERE_S):
                done = await asyncio.gather(*calls, return_exceptions=True)
        for call in calls:
            del self._calls[call]
        # one that left has computed nothing; what it has cached it may bring back
        told = zip(done, calls.values(), strict=True)
        counted = [one for one, name in told if method != "prime" or name in self._serving]
        self.send("done", number, bool(counted) and all(one is True for one in counted))

    async def _delete(self) -> None:
        try:
            async with asyncio.timeout(_DELETE_S):
                await asyncio.to_thread(serve.delete, self._start.app)
        # whatever Ray raises: the arena says that something may be left
        except Exception as error:  # noqa: BLE001
            sys.stderr.write(f"{self._start.app} was not deleted: {one_line(error)}\n")
        else:
            self.send("closed")

    async def _watch_cluster(self) -> None:
        """Ray does not say that its head is gone, and who asks it waits for ever; nor does it bring
        back what somebody deleted."""
        while not self._is_closing:
            await asyncio.sleep(_CLUSTER_PERIOD_S)
            if self._serving or self._is_closing:
                continue
            try:
                async with asyncio.timeout(_CLUSTER_ANSWER_S):
                    status = await asyncio.to_thread(serve.status)
            # whatever Ray raises, it is of no more use to this process
            except Exception as error:  # noqa: BLE001
                self.send("dead", f"the cluster does not answer: {one_line(error)}")
            else:
                if self._start.app not in status.applications and not self._is_closing:
                    self.send("dead", f"{self._start.app} was deleted from the cluster")


async def main(descriptor: int) -> None:
    """Deploy as the arena's first line says, tell it, and serve."""
    channel = socket.socket(fileno=descriptor)
    reader, writer = await asyncio.open_connection(sock=channel, limit=LONGEST_LINE)
    (message,) = decode(await reader.readline())
    start = RayStart(**message[1])
    if start.address == LOCAL:
        start_here(max(os.cpu_count() or 1, math.ceil(start.most_replicas * start.cpus)))
    else:
        join(start.address, _CONNECT_S)
    # told to end while it deploys, it still gives the cluster back what it asked for
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    host = Host(start, *deploy(start), writer)
    version = await host.first_replicas()
    host.beat()
    host.send("ready", f"{ray.__version__}, {start.plan['engine']['kind']} {version}")
    serving = asyncio.create_task(host.serve(reader))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    with suppress(asyncio.CancelledError):
        await serving


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
