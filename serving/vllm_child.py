"""One start of the vLLM host: its process, its two sockets, its end."""

import asyncio
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import structlog

from serving.engine import EngineDead, EngineError
from serving.process import (
    SCRATCH_PREFIX,
    TERMINATE_GRACE_S,
    end_group,
    last_error,
    write_record,
)
from serving.vllm_wire import decode, encode

_REAP_LIMIT_S = 5.0
_GUARD_END_S = 3.0
_LOG_TAIL_BYTES = 64_000

log = structlog.get_logger(__name__)


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
    def log_file(self) -> Path:
        return self.log_dir / f"engine-{self._file_name}.log"

    @property
    def record_file(self) -> Path:
        return self.log_dir / f"engine-{self._file_name}.pid"

    @property
    def _file_name(self) -> str:
        return re.sub(r"[^\w.-]", "_", self.name)


class HostLink(asyncio.Protocol):
    """The arena's end of the socket; messages of one turn of the loop leave as one line."""

    def __init__(self, take: Callable[[str, list[Any]], None]) -> None:
        self._take = take
        self._transport: asyncio.Transport | None = None
        self._outbox: list[Sequence[Any]] = []
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[EngineError] = self._loop.create_future()
        """Done with the reason once this start of the engine is of no more use."""

    def fail(self, error: EngineError) -> None:
        """Give up this start; the first reason stands."""
        if not self.failed.done():
            self.failed.set_result(error)

    def send(self, *message: Any) -> None:
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

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

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(messages))


class HostProcess:
    """A running host, ready or on its way."""

    def __init__(
        self,
        start: HostStart,
        process: asyncio.subprocess.Process,
        link: HostLink,
        lifeline: socket.socket,
        scratch: Path,
    ) -> None:
        self._start = start
        self._scratch = scratch
        self._process = process
        self._lifeline = lifeline
        self.link = link

    @property
    def pgid(self) -> int:
        """Process group and session, led by the host itself."""
        return self._process.pid

    async def end(self, *, grace_s: float = TERMINATE_GRACE_S) -> None:
        """End the host, vLLM's processes and the guard; returns when none is left.

        One that the system cannot kill (stuck in a driver) is left, with its record on disk.
        """
        self.link.close()
        await end_group(self.pgid, grace_s=grace_s)
        is_gone = await self._is_reaped()
        with suppress(OSError, TimeoutError):
            self._lifeline.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(_GUARD_END_S):
                await asyncio.get_running_loop().sock_recv(self._lifeline, 1)
        self._lifeline.close()
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)
        if is_gone:
            self._start.record_file.unlink(missing_ok=True)

    async def _is_reaped(self) -> bool:
        try:
            async with asyncio.timeout(_REAP_LIMIT_S):
                await self._process.wait()
        except TimeoutError:
            log.warning("engine.not_ended", engine=self._start.name, pid=self.pgid)
            return False
        return True


async def spawn(start: HostStart, take: Callable[[str, list[Any]], None]) -> HostProcess:
    """Start the host's process; `take` is called with every message from it but `dead`."""
    start.log_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX))
    # sockets and rendezvous files of killed processes would stay for ever
    temporary = {"TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": str(scratch)}
    ours, theirs = socket.socketpair()
    lifeline, their_lifeline = socket.socketpair()
    ours.setblocking(False)
    lifeline.setblocking(False)
    loop = asyncio.get_running_loop()
    _, link = await loop.create_unix_connection(lambda: HostLink(take), sock=ours)
    try:
        with theirs, their_lifeline, start.log_file.open("ab") as log:
            descriptors = (theirs.fileno(), their_lifeline.fileno())
            process = await asyncio.create_subprocess_exec(
                *start.command,
                *map(str, descriptors),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **temporary, **start.environment},
                pass_fds=descriptors,
                start_new_session=True,
            )
    except BaseException:
        link.close()
        lifeline.close()
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    host = HostProcess(start, process, link, lifeline, scratch)
    write_record(start.record_file, process.pid, scratch)
    link.send("start", start.arguments, list(start.warm_up_ids))
    return host


async def wait_until_ready(
    host: HostProcess, ready: "asyncio.Future[str]", start: HostStart
) -> str:
    """vLLM's version; raises EngineDead with the reason from the log."""
    failed = host.link.failed
    either: set[asyncio.Future[Any]] = {ready, failed}
    await asyncio.wait(either, timeout=start.limit_s, return_when=asyncio.FIRST_COMPLETED)
    if ready.done() and not failed.done():
        return ready.result()
    if failed.done():
        what = f"did not start: {last_error(await asyncio.to_thread(log_tail, start.log_file))}"
    else:
        what = f"was not ready after {start.limit_s:g} s"
    raise EngineDead(f"engine {start.name} {what} (log: {start.log_file})")


def log_tail(log_file: Path) -> str:
    """The last part of a log; empty where there is none."""
    try:
        with log_file.open("rb") as log:
            log.seek(max(0, log_file.stat().st_size - _LOG_TAIL_BYTES))
            return log.read().decode("utf-8", "replace")
    except OSError:
        return ""
