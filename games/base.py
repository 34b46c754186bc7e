"""What a game is to the rest of the program: positions as values, one door from text to move.

    GameError (ValueError)
    ├── NotationError       the text is not a move in any accepted notation
    ├── IllegalMove         it names a move, and a rule forbids it (`reason` says which, in words)
    └── AmbiguousMove       it fits several legal moves (`candidates`)

All three are the player's failure, never the infrastructure's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, runtime_checkable

from games.drawing import Drawing

Side = Literal[0, 1]
"""0 moves first (White, Cho), 1 second (Black, Han)."""

NotationStyle = Literal["uci", "san", "korean"]


class GameError(ValueError):
    """Text from a player that does not lead to exactly one legal move."""


class NotationError(GameError):
    """The text is not a move in any notation that the game accepts."""


class IllegalMove(GameError):
    """The text names a move that a rule forbids; `reason` says which rule, in words."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class AmbiguousMove(GameError):
    """The text fits more than one legal move; `candidates` are those moves in canonical text."""

    def __init__(self, message: str, candidates: tuple[str, ...]) -> None:
        super().__init__(message)
        self.candidates = candidates


class Termination(StrEnum):
    """Every way a match of any game can end. Closed: records outlive the program."""

    # chess
    CHECKMATE = "checkmate"  # janggi too
    STALEMATE = "stalemate"
    INSUFFICIENT_MATERIAL = "insufficient_material"
    THREEFOLD_REPETITION = "threefold_repetition"
    FIFTY_MOVES = "fifty_moves"
    # janggi; where the rule set counts points the winner is on points, else the game is drawn
    BIKJANG = "bikjang"
    DOUBLE_PASS = "double_pass"
    REPETITION = "repetition"
    MOVE_REPETITION = "move_repetition"  # janggimodern: the same to-and-fro move, the mover loses
    PERPETUAL_CHECK = "perpetual_check"  # the checker loses
    NO_CAPTURE = "no_capture"
    BARE_GENERALS = "bare_generals"  # nobody can mate any more
    # the arena's
    PLY_CAP = "ply_cap"
    FORFEIT = "forfeit"  # the agent's own failures used up its budget; `detail` names the last
    FLAG_FALL = "flag_fall"
    RESIGNATION = "resignation"
    DRAW_AGREED = "draw_agreed"  # one player offered it and the other accepted
    ADJUDICATED_DRAW = "adjudicated_draw"  # by the players' own scores, where the config asks
    ADJUDICATED_WIN = "adjudicated_win"


@dataclass(frozen=True, slots=True)
class Result:
    """How a game ended."""

    winner: Side | None
    """The side that won; None is a draw."""
    termination: Termination
    scores: tuple[float, float] | None
    """Points of side 0 and side 1 in games that count them, whether or not they decided."""
    detail: str
    """One human sentence."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a game begins."""

    fen: str
    ruleset: str
    name: str = ""
    """A label of the opening or set-up for records; empty is the usual start."""


@dataclass(frozen=True, slots=True)
class GameRecord:
    """A played game as a game writes it to its record file."""

    start: Start
    moves: tuple[str, ...]
    """Canonical text."""
    is_finished: bool
    winner: Side | None
    """Of a finished game; None is a draw."""
    headers: Mapping[str, str]
    """In order. "First" and "Second" name the players; a game may rename these two (PGN has White
    and Black). Values are hostile text: a game escapes them."""
    comments: tuple[str, ...]
    """One a move, for those that have one; empty text for none. Hostile text too."""
    closing: str = ""
    """Said after the last move: how it ended, and the illegal move of a forfeit. Hostile too."""


class Position(Protocol):
    """An immutable position with its whole history: start, rule set and moves played.

    A FEN alone loses repetition, the previous pass and bikjang, so history is part of the value.
    """

    @property
    def start(self) -> Start: ...
    @property
    def moves(self) -> tuple[str, ...]:
        """Moves played since `start`, canonical text."""
        ...

    @property
    def side(self) -> Side:
        """The side to move. Need not be `ply % 2`: a start may have side 1 to move."""
        ...

    @property
    def ply(self) -> int:
        """Number of moves played since `start`."""
        ...

    @property
    def fen(self) -> str: ...
    @property
    def in_check(self) -> bool: ...

    def legal_moves(self) -> tuple[str, ...]:
        """Every legal move, canonical text, fixed order; empty only when `result()` is set."""
        ...

    def parse(self, text: str) -> str:
        """The canonical legal move that `text` names.

        Raises NotationError, IllegalMove or AmbiguousMove. Never guesses.
        """
        ...

    def play(self, move: str) -> "Position":
        """The position after `move`, unchecked: it must come from `legal_moves()` or `parse()`."""
        ...

    def result(self) -> Result | None:
        """The result by the rules, or None while the game goes on."""
        ...

    def notation(self, move: str, style: NotationStyle) -> str:
        """A legal move in another notation; ValueError for a style that the game lacks."""
        ...

    def scores(self) -> tuple[float, float] | None:
        """Points of both sides where the game counts points, else None."""
        ...

    def material(self, side: Side) -> float:
        """The side's material in the game's usual piece values (for baselines and displays)."""
        ...


class Game(Protocol):
    """The rules of one game: where positions come from."""

    @property
    def name(self) -> str: ...
    @property
    def rulesets(self) -> tuple[str, ...]:
        """Names of the rule sets; the first is the default."""
        ...

    @property
    def side_names(self) -> tuple[str, str]: ...
    @property
    def longest_move(self) -> str:
        """A canonical move of the greatest length, for worst-case token counts."""
        ...

    @property
    def record_notation(self) -> NotationStyle:
        """The notation stored beside the canonical move in records."""
        ...

    def position(self, start: Start) -> Position:
        """The position at `start`; ValueError names what is wrong with a bad FEN or rule set."""
        ...

    def openings(self, book: str, ruleset: str, *, plies: int | None = None) -> tuple[Start, ...]:
        """Starts of a book: "start" (the usual one alone), "builtin", or a path the game can read.

        `plies` is given only where a user asks for a book of games to be cut after so many moves.
        ValueError or OSError where the book is unknown or unreadable, or where an opening has ended
        or has repeated a position three times.
        """
        ...

    @property
    def record_file(self) -> str:
        """Name of the file that holds a run's games: "games.pgn", "games-janggi.txt"."""
        ...

    def record(self, record: GameRecord) -> str:
        """The record file's text for one game. Chess: PGN by python-chess's exporter, which it
        also reads back; janggi: header lines `[Name "value"]`, the start FEN, then a line a move
        with ply number, canonical move, Korean notation and the comment, and a result line."""
        ...

    def adjudicate_ply_cap(self, position: Position) -> Result:
        """The arena's decision when the ply cap ends an unfinished game."""
        ...


@runtime_checkable
class Drawn(Protocol):
    """A game whose positions can be drawn; those of others are shown as FEN."""

    @property
    def drawing(self) -> Drawing: ...
