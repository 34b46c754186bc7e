"""A server that we launch: its program, its port, the wait until it answers, its end.

Nothing here speaks HTTP, and which servers there are is not known here either.
"""

import asyncio
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from serving.config import EngineConfigError
from serving.engine import EngineDead
from serving.engine_group import EngineFiles, EngineGroup, log_tail, spawn_group
from serving.process import find_program, guarded, last_error

SERVER_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL. llama-server with a stream in flight would take 30 s to end."""

_POLL_S = 0.1
_PROGRESS_S = 10.0
_ENDED_S = 1.0
_LAST_LINES = 50
"""Of a log, where the reason stands; servers complain of harmless things while they start."""
_SHOWN_LINES = 4
"""Of a log, in the error."""
_PORT_TAKEN = re.compile(r"address already in use|couldn't bind|port \S+ is in use", re.I)
_LLAMA_CPP_ERROR = re.compile(r"[\d.]+ E (.+)")
"""Of llama.cpp's log: time, level, function and message. The first one is the cause."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServerStart:
    """Everything that a start of a server needs."""

    name: str
    """Of the engine."""
    log_dir: Path
    argv: Sequence[str]
    """The program (a path, or a name on PATH) and its arguments; no keys, for all can read them."""
    env: Mapping[str, str]
    """Added to the arena's own environment, which goes without keys of servers."""
    limit_s: float
    """Seconds until it must answer."""


@dataclass(frozen=True, slots=True)
class ServerEnd:
    """How a server ended."""

    code: int
    """Its exit code; negative for the signal that killed it."""
    reason: str
    """The line of its log that says most."""
    last_lines: tuple[str, ...]
    """Of its log, without the reason."""
    is_port_taken: bool
    """Whether that is the reason: another start may be given another port."""

    def __str__(self) -> str:
        how = f"ended with code {self.code}" if self.code >= 0 else f"ended by signal {-self.code}"
        more = f"; last in its log: {' | '.join(self.last_lines)}" if self.last_lines else ""
        return f"{how}: {self.reason}{more}"


class ServerProcess:
    """A running server, or one that has ended; made by `start_server`."""

    def __init__(self, start: ServerStart, group: EngineGroup, log_start: int) -> None:
        self.start = start
        self._group = group
        self._log_start = log_start
        self.ended: asyncio.Future[ServerEnd] = asyncio.create_task(self._watch())
        """Done once the server's first process is gone; wait for it shielded."""

    @property
    def pid(self) -> int:
        return self._group.pgid

    @property
    def pgid(self) -> int:
        """Process group and session, led by the server itself."""
        return self._group.pgid

    @property
    def log_file(self) -> Path:
        return self._group.files.log

    async def output(self) -> str:
        """The last part of what this start wrote."""
        return await asyncio.to_thread(log_tail, self.log_file, self._log_start)

    async def end(self, *, grace_s: float = SERVER_GRACE_S) -> None:
        """Ask the whole group to end, kill it after `grace_s`, and return when none is left.

        Close connections to it first: servers wait for their clients.
        """
        await self._group.end(grace_s=grace_s)
        await asyncio.wait([self.ended], timeout=_ENDED_S)
        # nothing will end a server that the system cannot kill
        self.ended.cancel()

    async def _watch(self) -> ServerEnd:
        code = await self._group.wait()
        output = await self.output()
        reason = reason_of(output)
        # a line is cut, and the reason may be longer
        rest = tuple(line for line in last_lines(output) if reason[:100] not in line)
        return ServerEnd(code, reason, rest, _PORT_TAKEN.search(reason) is not None)


async def start_server(start: ServerStart) -> ServerProcess:
    """The process, started but not yet answering. Its output is added to `engine-NAME.log`.

    Raises EngineConfigError where the program is missing, EngineDead where it cannot be started.
    """
    program = needed_program(start.argv[0], "install it, or name its file in the engine's config")
    files = EngineFiles(start.name, start.log_dir)
    log_start = files.log.stat().st_size if files.log.exists() else 0
    try:
        group = await spawn_group(
            files,
            lambda lifeline: guarded(lifeline, (program, *start.argv[1:])),
            start.env,
        )
    except OSError as error:
        raise EngineDead(f"engine {start.name} cannot be started: {error}") from error
    return ServerProcess(start, group, log_start)


async def wait_until_answering(
    server: ServerProcess, answers: Callable[[], Awaitable[bool]]
) -> None:
    """Ask `answers` again and again until it says yes; progress goes to our log.

    Raises EngineDead with the server's own reason once it has ended, or is out of time. The server
    is not ended then.
    """
    start = server.start
    begun = told = time.monotonic()
    try:
        async with asyncio.timeout(start.limit_s) as limit:
            while not server.ended.done():
                # an answer counts only from a server that is there: the port may be another's
                if await answers() and not server.ended.done():
                    return
                await asyncio.wait([server.ended], timeout=_POLL_S)
                if (now := time.monotonic()) - told > _PROGRESS_S:
                    told = now
                    took, said = round(now - begun), last_lines(await server.output(), 1)
                    doing = said[0] if said else "nothing yet"
                    log.info("engine.starting", engine=start.name, seconds=took, doing=doing)
    except TimeoutError:
        if not limit.expired():
            raise
    if server.ended.done():
        what = f"did not start: it {server.ended.result()}"
    else:
        doing = " | ".join(last_lines(await server.output())) or "nothing"
        what = f"did not answer within {start.limit_s:g} s; last in its log: {doing}"
    raise EngineDead(f"engine {start.name} {what} (log: {server.log_file})")


def needed_program(program: str, remedy: str) -> str:
    """`find_program`'s; EngineConfigError with the `remedy` where there is none."""
    found = find_program(program)
    if found is None:
        raise EngineConfigError(f"{program}: {no_program(program)}: {remedy}")
    return found


def no_program(program: str) -> str:
    """Why it is none."""
    if "/" not in program:
        return "no such program on PATH"
    is_directory = Path(program).expanduser().is_dir()
    return "is a directory, not a program" if is_directory else "no such program"


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that was free a moment ago; another process may take it meanwhile."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def reason_of(output: str) -> str:
    """The line of a server's output that says best why it ended."""
    lines = [line.strip() for line in output.splitlines()[-_LAST_LINES:]]
    for line in lines:
        if _PORT_TAKEN.search(line):
            return line[:400]
    reason = last_error("\n".join(lines))
    if re.match(r"[\w.]*(?:Error|Exception): ", reason):
        return reason
    for line in lines:
        if found := _LLAMA_CPP_ERROR.match(line):
            return found[1][:400]
    return reason


def last_lines(output: str, most: int = _SHOWN_LINES) -> tuple[str, ...]:
    """The last lines of a server's output that are not empty, each cut to 200 characters."""
    lines = [line.strip()[:200] for line in output.splitlines() if line.strip()]
    return tuple(lines[-most:])
