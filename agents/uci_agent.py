"""A UCI engine as a player: Stockfish, Fairy-Stockfish and their like, at chess and janggi.

A move follows from the position, the options and the run's dice alone: every search begins from a
clean state (`ucinewgame`), so it does not matter which process of the agent does it, what that one
did before, or whether the run was resumed. The engine is the player: its crash, its silence and its
illegal move are its own failures. Only a process that cannot be started is the infrastructure's.
"""

import asyncio
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog

from agents.base import AgentContext, Attempt, Decision, Fault, Interrupted, Turn
from agents.llm import stable_hash
from agents.uci import (
    START_LIMIT_S,
    UciError,
    UciIdentity,
    UciLate,
    UciMove,
    UciProcess,
    located,
)
from games import AmbiguousMove, IllegalMove, NotationError, Position
from serving import EngineUnavailable, Finish, Reply, Timings, Usage

log = structlog.get_logger()

_SQUARES = re.compile(r"([a-i]\d{1,2})([a-i]\d{1,2})")
_DICE_SIDES = 1 << 32


@dataclass(frozen=True, slots=True)
class UciSettings:
    """How a UCI engine is started and asked."""

    command: tuple[str, ...]
    """The program, by its file or its name, and its arguments."""
    go: str
    """The UCI command that begins a search."""
    options: Mapping[str, str]
    random_moves: float = 0.0
    """Share of moves drawn at random instead."""
    processes: int = 2
    """Searches at once; others wait, and waiting is not charged."""
    start_seconds: float = START_LIMIT_S
    """That a process has to start, and to get ready for a search."""


class UciAgent:
    """Plays with processes of one engine, in any number of matches at once."""

    def __init__(self, name: str, settings: UciSettings, context: AgentContext) -> None:
        self.name = name
        self._settings = settings
        self._context = context
        self._command: tuple[str, ...] = ()
        self._idle: list[UciProcess] = []
        self._permits = asyncio.Semaphore(settings.processes)

    async def open(self) -> None:
        """Starts one process; ValueError where it is no engine."""
        self._command = await asyncio.to_thread(located, self._settings.command)
        try:
            process = await self._start()
        except UciError as error:
            raise ValueError(f"command: {' '.join(self._settings.command)} {error}") from None
        self._idle.append(process)
        self._context.record_event(
            "uci_engine_ready", {"agent": self.name, "version": process.identity.name}
        )

    async def _start(self) -> UciProcess:
        settings = self._settings
        return await UciProcess.start(self._command, settings.options, settings.start_seconds)

    async def close(self) -> None:
        """Ends the processes."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(process.end() for process in idle))

    async def choose(self, turn: Turn) -> Decision:
        """A decision; raises Interrupted where no process can be started."""
        share = self._settings.random_moves
        drawn = drawn_move(turn.position, turn.match_id, self._context.run_seed, share)
        if drawn is not None:
            return Decision(drawn, None, ())
        tries = len(turn.made)
        request_id = f"{turn.match_id}/{turn.position.ply}/0/{tries}"
        submitted = time.monotonic()
        async with self._permits:
            try:
                process = self._idle.pop() if self._idle else await self._start()
            except UciError as error:
                told = f"{self.name} cannot be started: {error}"
                attempt = Attempt(0, None, Fault.TRANSPORT, told, request_id)
                raise Interrupted((attempt,)) from EngineUnavailable(told)
            return await self._search(process, turn, request_id, submitted)

    async def _search(
        self, process: UciProcess, turn: Turn, request_id: str, submitted: float
    ) -> Decision:
        limit = self._context.move_limit_seconds
        if turn.clock_left_s is not None:
            limit = min(limit, turn.clock_left_s)
        position, settings = turn.position, self._settings
        try:
            rules = rules_of(turn.game, position.start.ruleset, process.identity)
            await process.prepare(
                rules, position.start.fen, to_uci(position), settings.start_seconds
            )
            admitted = time.monotonic()  # its clock runs from here
            found = await process.search(settings.go, max(limit, 0.0))
        except UciError as error:
            await process.end()
            fault = Fault.FLAG_FALL if isinstance(error, UciLate) else Fault.ENGINE_CRASH
            log.warning("uci_engine_failed", agent=self.name, match=turn.match_id, why=str(error))
            return _failed(fault, str(error), request_id)
        except BaseException:
            with suppress(Exception):
                await process.end()
            raise
        self._idle.append(process)
        times = Timings(submitted, admitted, None, time.monotonic(), None, None, None)
        return _judge(
            found, position, Reply(found.move, Finish.STOP, _NO_TOKENS, times), request_id
        )


_NO_TOKENS = Usage(None, 0, None)


def _failed(fault: Fault, detail: str, request_id: str) -> Decision:
    return Decision(None, fault, (Attempt(0, None, fault, detail, request_id),))


def _judge(found: UciMove, position: Position, reply: Reply, request_id: str) -> Decision:
    """The engine's answer as a decision; a move that is not legal is its own failure."""
    move = from_uci(found.move, position)
    if move in position.legal_moves():
        attempt = Attempt(0, reply, None, found.info, request_id, found.eval_cp)
        return Decision(move, None, (attempt,))
    detail = f"it answered {found.move!r}: {_why_illegal(found.move, position)}"
    if not found.move:
        detail = 'its "bestmove" named no move'
    fault = Fault.ENGINE_ILLEGAL
    return Decision(None, fault, (Attempt(0, reply, fault, detail, request_id, found.eval_cp),))


def _why_illegal(answer: str, position: Position) -> str:
    try:
        return f"UCI writes {position.parse(answer)}"
    except (AmbiguousMove, IllegalMove, NotationError) as error:
        return str(error)


def drawn_move(position: Position, match_id: str, run_seed: int, share: float) -> str | None:
    """The move that a player draws by the run's dice in place of its engine's, which it does in
    `share` of all positions; None where the engine is asked."""
    dice = stable_hash(f"{run_seed}/{match_id}/{position.ply}/{position.side}/uci")
    if dice % _DICE_SIDES >= share * _DICE_SIDES:
        return None
    legal = position.legal_moves()
    return legal[(dice // _DICE_SIDES) % len(legal)]


def rules_of(game: str, ruleset: str, identity: UciIdentity) -> dict[str, str]:
    """The options that tell an engine which rules are played; ValueError where it cannot play
    them."""
    if game == "chess":
        rules = {"UCI_Variant": "chess"} if "chess" in identity.variants else {}
        if "uci_chess960" in identity.options:
            return {**rules, "UCI_Chess960": "true" if ruleset == "chess960" else "false"}
        if ruleset == "standard":
            return rules
    elif ruleset in identity.variants:
        return {"UCI_Variant": ruleset}
    raise ValueError(f"{identity.name} does not play {ruleset}")


def to_uci(position: Position) -> tuple[str, ...]:
    """The moves of a game as UCI has them: a pass is the general's step to its own square."""
    if "pass" not in position.moves:
        return position.moves
    generals = _generals(position.start.fen)
    side = 0 if position.start.fen.split()[1] == "w" else 1
    told = []
    for move in position.moves:
        if move == "pass":
            told.append(generals[side] * 2)
        else:
            told.append(move)
            squares = _SQUARES.fullmatch(move)
            if squares and squares[1] == generals[side]:
                generals[side] = squares[2]
        side = 1 - side
    return tuple(told)


def _generals(fen: str) -> list[str]:
    """The squares of both sides' kings or generals."""
    found = ["", ""]
    ranks = fen.split()[0].split("/")
    for number, rank in zip(range(len(ranks), 0, -1), ranks, strict=True):
        file = 0
        for letter in re.findall(r"\d+|[A-Za-z]", rank):
            if letter.isdigit():
                file += int(letter)
                continue
            if letter in "Kk":
                found[letter == "k"] = f"{chr(ord('a') + file)}{number}"
            file += 1
    return found


def from_uci(move: str, position: Position) -> str:
    """A UCI move of the side to move as the games write it: that of its general to its own square
    is a pass, no other piece's."""
    squares = _SQUARES.fullmatch(move)
    if squares is None or squares[1] != squares[2]:
        return move
    return "pass" if squares[1] == _generals(position.fen)[position.side] else move
