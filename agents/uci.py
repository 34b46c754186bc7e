"""A client of the Universal Chess Interface: an engine's process, asked for one move at a time.

Text in, text out, without a board of its own, because python-chess's client cannot carry janggi:
squares of ranks to 10 and the pass. The protocol is that of Stefan Meyer-Kahlen (UCI, April 2006),
with `UCI_Variant` as Fairy-Stockfish has it.

An engine is a player, so what goes wrong once it has started is told apart by how: it crashed, or
it was late. A process that did either is not asked again.
"""

import asyncio
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from serving import kill_group

START_LIMIT_S = 30.0
"""From starting a process to its `uciok`; a machine under load is slow to start programs."""
MATE_CP = 100_000
"""A mate in n moves counts as this many centipawns less n."""
_LINE_LIMIT = 1 << 20
_FOLDERS = ("/usr/games", "/usr/local/games", "/opt/homebrew/bin")
"""Where systems put chess engines, though not every PATH names them."""
_SCORE = re.compile(r"\bscore (cp|mate) (-?\d+)")
_NUMBERS = {name: re.compile(rf"\b{name} (\d+)") for name in ("depth", "nodes")}
_OPTION = re.compile(r"option name (?P<name>.+?) type (?P<type>\w+)(?P<rest>.*)")


class UciError(Exception):
    """An engine did not do its part; the message says what was seen."""


class UciCrashed(UciError):
    """Its process ended, or what it writes is no UCI."""


class UciLate(UciError):
    """It was silent for longer than it had."""


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
        return cls(name or "an engine without a name", options)


def _option(name: str, kind: str, rest: str) -> UciOption:
    low, high = (re.search(rf"\b{end} (-?\d+)", rest) for end in ("min", "max"))
    values = tuple(value.strip() for value in re.split(r"\bvar ", rest)[1:])
    return UciOption(
        name, kind, int(low[1]) if low else None, int(high[1]) if high else None, values
    )


@dataclass(frozen=True, slots=True)
class UciMove:
    """An engine's answer."""

    move: str
    """As it wrote it."""
    eval_cp: int | None
    """Its last score in centipawns, from its own side; mates as MATE_CP less their moves."""
    info: str
    """Depth and nodes in words; empty where it told neither."""


def find_program(name: str) -> str | None:
    """The absolute path of an engine's program: a file, or found on PATH or where systems keep
    games; None where there is none."""
    found = shutil.which(str(Path(name).expanduser()))
    if found is None and "/" not in name:
        found = shutil.which(name, path=":".join(_FOLDERS))
    return None if found is None else str(Path(found).absolute())


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


def identify(command: Sequence[str]) -> UciIdentity:
    """Start a program, hear what it says of itself, end it. Blocks; UciError where it is no UCI
    engine."""
    try:
        done = subprocess.run(
            command,
            input="uci\nquit\n",
            capture_output=True,
            timeout=START_LIMIT_S,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise UciCrashed(f"cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise UciLate(f'did not answer "uci" within {START_LIMIT_S:g} s') from None
    lines = done.stdout.splitlines()
    if "uciok" not in (line.strip() for line in lines):
        seen = (done.stderr or done.stdout).strip().splitlines()
        told = f"; it wrote: {seen[-1][:200]}" if seen else ""
        raise UciCrashed(f'did not answer "uci" with "uciok"{told}')
    return UciIdentity.read(lines)


class UciProcess:
    """A running engine; made by `start`, for one search at a time.

    It leads a process group of its own, and a guard ends the group when the arena is gone.
    """

    def __init__(self, process: asyncio.subprocess.Process, lifeline: socket.socket) -> None:
        self._process = process
        self._lifeline = lifeline
        self._rules: Mapping[str, str] = {}
        self.identity = UciIdentity("", {})

    @classmethod
    async def start(cls, command: Sequence[str], options: Mapping[str, str]) -> "UciProcess":
        """A process that has said `uciok` and been told its options; raises UciError."""
        lifeline, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "serving.server_child",
                    str(theirs.fileno()),
                    "--",
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    limit=_LINE_LIMIT,
                )
        except OSError as error:
            lifeline.close()
            raise UciCrashed(f"cannot be started: {error.strerror}") from None
        except BaseException:
            lifeline.close()
            raise
        engine = cls(process, lifeline)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await engine._greet(options)
        except TimeoutError:
            await engine.end()
            raise UciLate(f"was not ready within {START_LIMIT_S:g} s") from None
        except BaseException:
            await engine.end()
            raise
        return engine

    async def _greet(self, options: Mapping[str, str]) -> None:
        await self._tell("uci")
        lines = []
        while (line := await self._hear()) != "uciok":
            lines.append(line)
        self.identity = UciIdentity.read(lines)
        await self._set(options)
        await self._until_ready()

    async def _set(self, options: Mapping[str, str]) -> None:
        await self._tell(*(f"setoption name {name} value {to}" for name, to in options.items()))

    async def search(
        self,
        rules: Mapping[str, str],
        start_fen: str,
        moves: Sequence[str],
        go: str,
        limit_s: float,
    ) -> UciMove:
        """The engine's move, from a clean state: what it searched before does not count.

        `rules` are the options that name the rules of the game; `go` is a UCI command. Raises
        UciCrashed, or UciLate after `limit_s` seconds; the process is of no use then.
        """
        try:
            async with asyncio.timeout(limit_s):
                if rules != self._rules:
                    await self._set(rules)
                    self._rules = rules
                await self._tell("ucinewgame")
                await self._until_ready()
                played = " moves " + " ".join(moves) if moves else ""
                await self._tell(f"position fen {start_fen}{played}", go)
                return await self._answer()
        except TimeoutError:
            raise UciLate(f"it gave no move within {limit_s:.1f} s") from None

    async def _answer(self) -> UciMove:
        score, seen = None, ""
        while not (line := await self._hear()).startswith("bestmove"):
            if line.startswith("info ") and " score " in line:
                score, seen = line, line
        told = line.split()
        numbers = (pattern.search(seen) for pattern in _NUMBERS.values())
        words = [found[0] for found in numbers if found]
        return UciMove(told[1] if len(told) > 1 else "", _centipawns(score), " ".join(words))

    async def end(self) -> None:
        """End the process and all that it started."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.to_thread(kill_group, self._process.pid)
        await self._process.wait()
        self._lifeline.close()

    async def _tell(self, *lines: str) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.writelines(f"{line}\n".encode() for line in lines)
            await stdin.drain()
        except OSError:
            raise await self._crashed() from None

    async def _until_ready(self) -> None:
        await self._tell("isready")
        while await self._hear() != "readyok":
            pass

    async def _hear(self) -> str:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            line = await stdout.readline()
        except ValueError:
            raise UciCrashed(f"it wrote a line of over {_LINE_LIMIT:,} bytes") from None
        if not line.endswith(b"\n"):
            raise await self._crashed()
        return line.decode("utf-8", "replace").strip()

    async def _crashed(self) -> UciCrashed:
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._process.wait()
        code = self._process.returncode
        if code is None:
            return UciCrashed("it closed its output")
        how = f"code {code}" if code >= 0 else f"signal {-code}"
        return UciCrashed(f"its process ended with {how}")


def _centipawns(line: str | None) -> int | None:
    found = _SCORE.search(line) if line else None
    if found is None:
        return None
    number = int(found[2])
    if found[1] == "cp":
        return max(-MATE_CP, min(MATE_CP, number))
    return MATE_CP - number if number > 0 else -MATE_CP - number
