"""One start of an engine's host: its process, its two sockets, its end."""

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from serving.engine import EngineDead, EngineError
from serving.engine_group import EngineFiles, EngineGroup, log_tail, spawn_group
from serving.host_wire import Outbox, decode
from serving.process import TERMINATE_GRACE_S, last_error


@dataclass(frozen=True, slots=True)
class HostStart:
    """Everything that a start of the host needs."""

    name: str
    log_dir: Path
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    warm_up_ids: Sequence[int]
    limit_s: float
    """Seconds until it must be ready."""
    command: Sequence[str]
    """Is given the numbers of its two sockets."""

    @property
    def files(self) -> EngineFiles:
        return EngineFiles(self.name, self.log_dir)


class HostLink(asyncio.Protocol):
    """The arena's end of the socket; messages of one turn of the loop leave as one line."""

    def __init__(self, take: Callable[[str, list[Any]], None]) -> None:
        self._take = take
        self._transport: asyncio.Transport | None = None
        self._outbox = Outbox(self._write)
        self._rest = b""
        self.failed: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        """Done with the reason once this start of the engine is of no more use."""

    def fail(self, error: EngineError) -> None:
        """Give up this start; the first reason stands."""
        if not self.failed.done():
            self.failed.set_result(error)

    def send(self, *message: Any) -> None:
        self._outbox.put(*message)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no asyncio.Transport
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                messages = decode(line)
            except ValueError as error:
                self.fail(EngineDead(f"the engine's host said nonsense: {error}"))
                return
            for tag, *fields in messages:
                if tag == "dead":
                    self.fail(EngineDead(str(fields[0])))
                else:
                    self._take(tag, fields)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(EngineDead("the engine's host process ended"))

    def _write(self, line: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(line)


class HostProcess:
    """A running host, ready or on its way."""

    def __init__(self, group: EngineGroup, link: HostLink) -> None:
        self._group = group
        self.link = link

    @property
    def pgid(self) -> int:
        """Process group and session, led by the host itself."""
        return self._group.pgid

    async def end(self, *, grace_s: float = TERMINATE_GRACE_S) -> None:
        """End the host, the processes it started and the guard; returns when none is left.

        One that the system cannot kill (stuck in a driver) is left, with its record on disk.
        """
        self.link.close()
        await self._group.end(grace_s=grace_s)


async def spawn(start: HostStart, take: Callable[[str, list[Any]], None]) -> HostProcess:
    """Start the host's process; `take` is called with every message from it but `dead`."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    _, link = await loop.create_unix_connection(lambda: HostLink(take), sock=ours)
    try:
        with theirs:
            channel = theirs.fileno()
            group = await spawn_group(
                start.files,
                lambda lifeline: (*start.command, str(channel), str(lifeline)),
                start.environment,
                (channel,),
            )
    except BaseException:
        link.close()
        raise
    link.send("start", start.arguments, list(start.warm_up_ids))
    return HostProcess(group, link)


async def wait_until_ready(
    host: HostProcess, ready: "asyncio.Future[str]", start: HostStart
) -> str:
    """The engine's version; raises EngineDead with the reason from the log."""
    failed = host.link.failed
    either: set[asyncio.Future[Any]] = {ready, failed}
    await asyncio.wait(either, timeout=start.limit_s, return_when=asyncio.FIRST_COMPLETED)
    if ready.done() and not failed.done():
        return ready.result()
    said = last_error(await asyncio.to_thread(log_tail, start.files.log))
    if failed.done():
        what = f"did not start: {said}"
    else:
        what = f"was not ready after {start.limit_s:g} s: {said}"
    raise EngineDead(f"engine {start.name} {what} (log: {start.files.log})")
