"""A client of the Universal Chess Interface: an engine's process, asked for one move at a time.

Text in, text out, without a board of its own, because python-chess's client cannot carry janggi:
squares of ranks to 10 and the pass. The protocol is that of Stefan Meyer-Kahlen (UCI, April 2006),
with `UCI_Variant` as Fairy-Stockfish has it.

An engine is a player, so what goes wrong once it has started is told apart by how: it crashed, or
it was late. A process that did either is not asked again. What it writes is kept in bounds: it may
write anything, without end.
"""

import asyncio
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from serving import find_program, guarded, kill_group

START_LIMIT_S = 30.0
"""From starting a process until it is ready; a machine under load is slow to start programs."""
MATE_CP = 100_000
"""A mate in n moves counts as this many centipawns less n."""
TEXT_LIMIT = 100
"""Characters that are kept of a move, a name or a remark of an engine's."""
_LINE_LIMIT = 1 << 20
_GREETING_LIMIT = 1 << 20
"""Bytes from `uci` to `uciok`."""
_COMPLAINT_LIMIT = 4000
"""Bytes kept of the last that it wrote to stderr."""
_COMPLAINT_LINES = 3
_END_LIMIT_S = 5.0
_SCORE = re.compile(r"\bscore (cp|mate) (-?\d{1,9})\b")
_FURTHER_LINE = re.compile(r"\bmultipv (?!1\b)\d")
"""Of the best moves' lines, with the option MultiPV, all but that of the move that is played."""
_NUMBERS = {name: re.compile(rf"\b{name} \d{{1,18}}\b") for name in ("depth", "nodes")}
_OPTION = re.compile(r"option name (?P<name>.+?) type (?P<type>\w+)(?P<rest>.*)")


class UciError(Exception):
    """An engine did not do its part; the message says what was seen."""


class UciCrashed(UciError):
    """Its process ended, what it writes is no UCI, or it does not get ready."""


class UciLate(UciError):
    """A search took longer than it had."""


@dataclass(frozen=True, slots=True)
class UciOption:
    """An option that an engine offers."""

    name: str
    kind: str
    """check, spin, combo, button or string."""
    low: int | None
    high: int | None
    values: tuple[str, ...]
    """Of a combo."""

    def refusal(self, value: str) -> str | None:
        """Why a value is none of this option's; None where it is."""
        if self.kind == "spin":
            bounds = f"write a whole number from {self.low} to {self.high}"
            if not re.fullmatch(r"-?\d+", value):
                return bounds
            is_in = (self.low is None or int(value) >= self.low) and (
                self.high is None or int(value) <= self.high
            )
            return None if is_in else bounds
        if self.kind == "check":
            return None if value in ("true", "false") else "write true or false"
        if self.kind == "combo" and value not in self.values:
            return f"it knows {', '.join(self.values[:40])}"
        return None


@dataclass(frozen=True, slots=True)
class UciIdentity:
    """What an engine says of itself."""

    name: str
    options: Mapping[str, UciOption]
    """By lower-case name: UCI does not tell capitals apart."""

    @property
    def variants(self) -> tuple[str, ...]:
        """That it plays besides standard chess, by `UCI_Variant`."""
        option = self.options.get("uci_variant")
        return option.values if option else ()

    @classmethod
    def read(cls, lines: Sequence[str]) -> "UciIdentity":
        """From the lines between `uci` and `uciok`."""
        name, options = "", {}
        for line in lines:
            if line.startswith("id name "):
                name = line.removeprefix("id name ").strip()
            elif found := _OPTION.match(line):
                option = _option(found["name"], found["type"], found["rest"])
                options[option.name.lower()] = option
        return cls(name[:TEXT_LIMIT] or "an engine without a name", options)


def _option(name: str, kind: str, rest: str) -> UciOption:
    low, high = (re.search(rf"\b{end} (-?\d{{1,18}})\b", rest) for end in ("min", "max"))
    values = tuple(value.strip() for value in re.split(r"\bvar ", rest)[1:])
    return UciOption(
        name, kind, int(low[1]) if low else None, int(high[1]) if high else None, values
    )


@dataclass(frozen=True, slots=True)
class UciMove:
    """An engine's answer."""

    move: str
    """As it wrote it, its first TEXT_LIMIT characters; empty where it named none."""
    eval_cp: int | None
    """Its last score in centipawns, from its own side; mates as MATE_CP less their moves."""
    info: str
    """Depth and nodes in words; empty where it told neither."""


def located(command: Sequence[str]) -> tuple[str, ...]:
    """A command with its program by an absolute path; ValueError with the remedy where there is
    none."""
    name, *rest = command
    program = find_program(name)
    if program is None:
        raise ValueError(
            f"command: {name}: no such program; install it (Debian: apt-get install stockfish "
            "fairy-stockfish), or name its file"
        )
    return program, *rest


def identify(command: Sequence[str], limit_s: float = START_LIMIT_S) -> UciIdentity:
    """Start a program, hear what it says of itself, end it and all that it started. Blocks, outside
    of any event loop; UciError where it is no UCI engine or not ready within `limit_s` seconds."""

    async def ask() -> UciIdentity:
        process = await UciProcess.start(command, {}, limit_s)
        await process.end()
        return process.identity

    return asyncio.run(ask())


class _Pipes(asyncio.SubprocessProtocol):
    """What a process writes, and that it ended. asyncio's own protocol would wait for the pipes,
    which a process that has left the group may hold."""

    def __init__(self) -> None:
        self.output = asyncio.StreamReader(limit=_LINE_LIMIT)
        self.complaint = b""
        """The last bytes of its stderr."""
        self.has_ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        pipe = cast("asyncio.SubprocessTransport", transport).get_pipe_transport(1)
        self.output.set_transport(cast("asyncio.Transport", pipe))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 1:
            self.output.feed_data(data)
        else:
            self.complaint = (self.complaint + data)[-_COMPLAINT_LIMIT:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self.output.feed_eof()

    def process_exited(self) -> None:
        self.has_ended.set()


class UciProcess:
    """A running engine; made by `start`, for one search at a time.

    It leads a process group of its own, and a guard ends the group when the arena is gone.
    """

    def __init__(
        self, process: asyncio.SubprocessTransport, pipes: _Pipes, lifeline: socket.socket
    ) -> None:
        self._process = process
        self._pipes = pipes
        self._lifeline = lifeline
        self._rules: Mapping[str, str] = {}
        self.identity = UciIdentity("", {})

    @classmethod
    async def start(
        cls, command: Sequence[str], options: Mapping[str, str], limit_s: float = START_LIMIT_S
    ) -> "UciProcess":
        """A process that has said `uciok`, been told its options and is ready, all within `limit_s`
        seconds; raises UciError."""
        lifeline, theirs = socket.socketpair()
        try:
            with theirs:
                process, pipes = await asyncio.get_running_loop().subprocess_exec(
                    _Pipes,
                    *guarded(theirs.fileno(), command),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except OSError as error:
            lifeline.close()
            raise UciCrashed(f"cannot be started: {error.strerror}") from None
        except BaseException:
            lifeline.close()
            raise
        engine = cls(process, pipes, lifeline)
        try:
            await engine._greet(options, limit_s)
        except BaseException:
            await engine.end()
            raise
        return engine

    async def _greet(self, options: Mapping[str, str], limit_s: float) -> None:
        failure = 'did not answer "uci" with "uciok"'
        try:
            async with asyncio.timeout(limit_s):
                self._tell("uci")
                self.identity = UciIdentity.read(await self._greeting())
                failure = "did not get ready"
                self._set(options)
                await self._until_ready()
        except TimeoutError:
            raise UciLate(f"{failure} within {limit_s:g} s{self._complaint()}") from None
        except UciCrashed as error:
            raise UciCrashed(f"{failure}: {error}") from None

    async def _greeting(self) -> list[str]:
        lines: list[str] = []
        size = 0
        while (line := await self._hear()) != "uciok":
            lines.append(line)
            size += len(line) + 1
            if size > _GREETING_LIMIT:
                raise UciCrashed(f"it wrote over {_GREETING_LIMIT:,} bytes of something else")
        return lines

    def _set(self, options: Mapping[str, str]) -> None:
        self._tell(*(f"setoption name {name} value {to}" for name, to in options.items()))

    async def prepare(
        self,
        rules: Mapping[str, str],
        start_fen: str,
        moves: Sequence[str],
        limit_s: float = START_LIMIT_S,
    ) -> None:
        """Have the engine forget what it searched before, and tell it a position.

        `rules` are the options that name the rules of the game. Raises UciCrashed, also where it is
        not ready after `limit_s` seconds; the process is of no use then.
        """
        try:
            async with asyncio.timeout(limit_s):
                if rules != self._rules:
                    self._set(rules)
                    self._rules = rules
                self._tell("ucinewgame")
                await self._until_ready()
        except TimeoutError:
            told = f'it did not answer "isready" within {limit_s:g} s{self._complaint()}'
            raise UciCrashed(told) from None
        played = " moves " + " ".join(moves) if moves else ""
        self._tell(f"position fen {start_fen}{played}")

    async def search(self, go: str, limit_s: float) -> UciMove:
        """The engine's move in the position that it was told by `prepare`; `go` is a UCI command.

        Raises UciCrashed, or UciLate after `limit_s` seconds; the process is of no use then.
        """
        try:
            async with asyncio.timeout(limit_s):
                self._tell(go)
                return await self._answer()
        except TimeoutError:
            raise UciLate(f"it gave no move within {limit_s:.1f} s") from None

    async def _answer(self) -> UciMove:
        score, seen = None, ""
        while not (line := await self._hear()).startswith("bestmove"):
            is_score = line.startswith("info ") and " score " in line
            if is_score and not _FURTHER_LINE.search(line):
                score, seen = line, line
        told = line.split()
        numbers = (pattern.search(seen) for pattern in _NUMBERS.values())
        words = [found[0] for found in numbers if found]
        move = told[1][:TEXT_LIMIT] if len(told) > 1 else ""
        return UciMove(move, _centipawns(score), " ".join(words))

    async def end(self) -> None:
        """End the process and all of its group."""
        await asyncio.to_thread(kill_group, self._process.get_pid())
        with suppress(TimeoutError):  # nothing ends one that the system cannot kill
            async with asyncio.timeout(_END_LIMIT_S):
                await self._pipes.has_ended.wait()
        self._process.close()
        self._lifeline.close()

    def _tell(self, *lines: str) -> None:
        """That it is gone is seen where it is heard."""
        stdin = cast("asyncio.WriteTransport", self._process.get_pipe_transport(0))
        if not stdin.is_closing():
            stdin.write("".join(f"{line}\n" for line in lines).encode())

    async def _until_ready(self) -> None:
        self._tell("isready")
        while await self._hear() != "readyok":
            pass

    async def _hear(self) -> str:
        try:
            line = await self._pipes.output.readline()
        except ValueError:
            raise UciCrashed(f"it wrote a line of over {_LINE_LIMIT:,} bytes") from None
        if not line.endswith(b"\n"):
            raise await self._crashed()
        return line.decode("utf-8", "replace").strip()

    async def _crashed(self) -> UciCrashed:
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._pipes.has_ended.wait()
        code = self._process.get_returncode()
        if code is None:
            return UciCrashed(f"it closed its output{self._complaint()}")
        how = f"code {code}" if code >= 0 else f"signal {-code}"
        return UciCrashed(f"its process ended with {how}{self._complaint()}")

    def _complaint(self) -> str:
        """The last lines of its stderr, printable, as the end of a sentence."""
        text = self._pipes.complaint.decode("utf-8", "replace")
        lines = "".join(c if c.isprintable() else "\n" for c in text).splitlines()
        told = [line.strip()[:TEXT_LIMIT] for line in lines if line.strip()]
        return f"; it wrote: {' | '.join(told[-_COMPLAINT_LINES:])}" if told else ""


def _centipawns(line: str | None) -> int | None:
    found = _SCORE.search(line) if line else None
    if found is None:
        return None
    number = int(found[2])
    if found[1] == "cp":
        return max(-MATE_CP, min(MATE_CP, number))
    return MATE_CP - number if number > 0 else -MATE_CP - number
