"""One start of an engine's processes: a session of their own, its log, its record, its end."""

import asyncio
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from serving.process import (
    SCRATCH_PREFIX,
    TERMINATE_GRACE_S,
    group_members,
    kill_group,
    signal_group,
    write_record,
)

_POLL_S = 0.05
_REAP_LIMIT_S = 5.0
_GUARD_END_S = 3.0
_LOG_TAIL_BYTES = 64_000
_SERVER_KEYS = frozenset({"LLAMA_API_KEY", "LLAMA_ARG_API_KEY_FILE", "VLLM_API_KEY"})
"""Of the arena's environment, meant for servers elsewhere: one that we launch would ask us for
them."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EngineFiles:
    """Where an engine's log and its record for a later run stand."""

    name: str
    """Of the engine; characters that a file's name should not have are replaced."""
    log_dir: Path

    @property
    def log(self) -> Path:
        return self.log_dir / f"engine-{self._file_name}.log"

    @property
    def record(self) -> Path:
        return self.log_dir / f"engine-{self._file_name}.pid"

    @property
    def _file_name(self) -> str:
        return re.sub(r"[^\w.-]", "_", self.name)


class EngineGroup:
    """The processes of one start; made by `spawn_group`."""

    def __init__(
        self,
        files: EngineFiles,
        process: asyncio.subprocess.Process,
        lifeline: socket.socket,
        scratch: Path,
    ) -> None:
        self.files = files
        self._process = process
        self._lifeline = lifeline
        self._scratch = scratch

    @property
    def pgid(self) -> int:
        """Process group and session, led by the process that was started."""
        return self._process.pid

    async def wait(self) -> int:
        """The leader's exit code once it ended; negative for the signal that killed it."""
        return await self._process.wait()

    async def end(self, *, grace_s: float = TERMINATE_GRACE_S) -> None:
        """End every process of the group and its guard; returns when none is left.

        One that the system cannot kill (stuck in a driver) is left, with its record on disk.
        """
        await end_group(self.pgid, grace_s=grace_s)
        is_gone = await self._is_reaped()
        with suppress(OSError, TimeoutError):
            self._lifeline.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(_GUARD_END_S):
                await asyncio.get_running_loop().sock_recv(self._lifeline, 1)
        self._lifeline.close()
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)
        if is_gone:
            self.files.record.unlink(missing_ok=True)

    async def _is_reaped(self) -> bool:
        try:
            async with asyncio.timeout(_REAP_LIMIT_S):
                await self._process.wait()
        except TimeoutError:
            log.warning("engine.not_ended", engine=self.files.name, pid=self.pgid)
            return False
        return True


async def end_group(pgid: int, *, grace_s: float = TERMINATE_GRACE_S) -> None:
    """End every process of a group: ask, wait `grace_s`, kill, and wait until none is left."""
    if grace_s:
        signal_group(pgid, signal.SIGTERM)
        limit = time.monotonic() + grace_s
        while time.monotonic() < limit and await asyncio.to_thread(_is_populated, pgid):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
    await asyncio.to_thread(kill_group, pgid)


def _is_populated(pgid: int) -> bool:
    return bool(group_members(pgid))


async def spawn_group(
    files: EngineFiles,
    command: Callable[[int], Sequence[str]],
    environment: Mapping[str, str],
    inherited: Sequence[int] = (),
) -> EngineGroup:
    """Start a session whose output goes to the log; raises OSError.

    Its environment is the arena's without keys of servers, and `environment`.
    `command` is given the number of the lifeline, on which the process calls `guard_group`.
    `inherited` are further descriptors that it keeps.
    """
    files.log_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX))
    # sockets and rendezvous files of killed processes would stay for ever
    temporary = {"TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": str(scratch)}
    ours = {name: value for name, value in os.environ.items() if name not in _SERVER_KEYS}
    lifeline, theirs = socket.socketpair()
    lifeline.setblocking(False)
    try:
        with theirs, files.log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**ours, **temporary, **environment},
                pass_fds=(*inherited, theirs.fileno()),
                start_new_session=True,
            )
    except BaseException:
        lifeline.close()
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    write_record(files.record, process.pid, scratch)
    return EngineGroup(files, process, lifeline, scratch)


def log_tail(log_file: Path, since: int = 0) -> str:
    """The last part of a log, from byte `since` at the earliest; empty where there is none."""
    try:
        with log_file.open("rb") as output:
            output.seek(max(since, log_file.stat().st_size - _LOG_TAIL_BYTES))
            return output.read().decode("utf-8", "replace")
    except OSError:
        return ""
