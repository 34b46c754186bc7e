"""A game of one's own, noughts and crosses, for `games = ["own_game:NoughtsAndCrosses"]`.

A move is a square, files a-c and ranks 1-3: `b2`. A FEN here is the nine squares from a1 to c3
(`x`, `o` or `.`) and the side to move.
"""

from dataclasses import dataclass, field

from games import (
    GameRecord,
    IllegalMove,
    NotationError,
    NotationStyle,
    Result,
    Side,
    Start,
    Termination,
)

SQUARES = tuple(file + rank for rank in "123" for file in "abc")
LINES = tuple(
    tuple(SQUARES.index(square) for square in line.split())
    for line in (
        "a1 b1 c1", "a2 b2 c2", "a3 b3 c3",
        "a1 a2 a3", "b1 b2 b3", "c1 c2 c3",
        "a1 b2 c3", "a3 b2 c1",
    )
)  # fmt: skip
EMPTY = "......... x"


@dataclass(frozen=True, slots=True)
class Grid:
    """A position: where it began, the moves since, and the squares that follow from both."""

    start: Start
    cells: str
    side: Side
    moves: tuple[str, ...] = field(default=())

    @property
    def ply(self) -> int:
        return len(self.moves)

    @property
    def fen(self) -> str:
        return f"{self.cells} {'xo'[self.side]}"

    @property
    def in_check(self) -> bool:
        return False

    def legal_moves(self) -> tuple[str, ...]:
        if self._has_line():
            return ()
        return tuple(s for s, cell in zip(SQUARES, self.cells, strict=True) if cell == ".")

    def parse(self, text: str) -> str:
        move = text.strip().lower()
        if move not in SQUARES:
            raise NotationError(f"{text!r} is not a square from a1 to c3")
        if move not in self.legal_moves():
            raise IllegalMove(f"{move} in {self.fen}", f"{move} is taken")
        return move

    def play(self, move: str) -> "Grid":
        at = SQUARES.index(move)
        cells = self.cells[:at] + "xo"[self.side] + self.cells[at + 1 :]
        return Grid(self.start, cells, 0 if self.side else 1, (*self.moves, move))

    def result(self) -> Result | None:
        if self._has_line():
            winner: Side = 0 if self.side else 1
            return Result(winner, Termination.CHECKMATE, None, f"{'XO'[winner]} has three in line")
        if "." not in self.cells:
            return Result(None, Termination.STALEMATE, None, "the grid is full")
        return None

    def notation(self, move: str, style: NotationStyle) -> str:
        if style != "uci":
            raise ValueError(f"noughts and crosses has no {style} notation")
        return move

    def scores(self) -> tuple[float, float] | None:
        return None

    def material(self, side: Side) -> float:
        return float(self.cells.count("xo"[side]))

    def _has_line(self) -> bool:
        cells = self.cells
        return any(cells[a] == cells[b] == cells[c] != "." for a, b, c in LINES)


class NoughtsAndCrosses:
    """The rules, made with no arguments."""

    name = "noughts-and-crosses"
    rulesets = ("standard",)
    side_names = ("X", "O")
    longest_move = "a1"
    record_notation: NotationStyle = "uci"
    record_file = "games-noughts.txt"

    def position(self, start: Start) -> Grid:
        cells, _, side = start.fen.partition(" ")
        if start.ruleset not in self.rulesets:
            raise ValueError(f"no rule set {start.ruleset!r}; it has standard")
        if len(cells) != 9 or set(cells) - set("xo.") or side not in ("x", "o"):
            raise ValueError(f"{start.fen!r} is not nine of x o . and the side to move")
        return Grid(start, cells, 0 if side == "x" else 1)

    def openings(self, book: str, ruleset: str, *, plies: int | None = None) -> tuple[Start, ...]:
        """Its one start; `plies` is of books of games."""
        if book not in ("start", "builtin"):
            raise ValueError(f"no book {book!r}; write start")
        return (Start(EMPTY, ruleset),)

    def record(self, record: GameRecord) -> str:
        headers = "".join(f"{name}: {value!r}\n" for name, value in record.headers.items())
        return f"{headers}{record.start.fen}\n{' '.join(record.moves)}\n"

    def adjudicate_ply_cap(self, position: object) -> Result:
        return Result(None, Termination.PLY_CAP, None, "the ply cap was reached")
