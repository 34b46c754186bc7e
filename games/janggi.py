"""Janggi (Korean chess), from descriptions of the rules: the Korean association's Tokyo branch and
notation (third revision), Wikipedia, janggi.pl and the PyChess guide.

The side to move may pass unless in check. Facing generals (bikjang) must be parted at once, or
accepted with a pass, which ends the game. Rule sets differ in bikjang, points and repetition.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType

from games.base import (
    AmbiguousMove,
    GameRecord,
    IllegalMove,
    NotationStyle,
    Position,
    Result,
    Side,
    Start,
    Termination,
)
from games.drawing import Drawing, janggi_drawing
from games.escaping import comment_text, header_value, result_mark
from games.janggi_board import (
    GENERAL,
    GUARD,
    HAN,
    MOVE_SQUARES,
    MOVE_TEXTS,
    PIECE_NAMES,
    SQUARE_NAMES,
    are_generals_facing,
    general_square,
    is_bare,
    is_check,
    legal_moves,
    moved,
    placement,
    points,
    read_fen,
)
from games.janggi_notation import PASS, Spoken, korean, read_move, short
from games.janggi_reasons import why_not_movement, why_not_safe

SIDE_NAMES = ("Cho", "Han")
HAN_BONUS = 1.5
"""Han's points for moving second: 73.5 against 72 at the start, so points never tie."""


@dataclass(frozen=True, slots=True)
class RuleSet:
    """What tells one janggi from another."""

    name: str
    has_bikjang: bool
    """Facing generals must be parted or accepted."""
    has_points: bool
    """Ends without mate are decided on points; otherwise they are draws."""
    no_capture_plies: int
    """So many plies without a capture end the game."""
    repetitions: int
    """So many occurrences of a position end the game."""
    forbids_shuffle: bool
    """Five plies of one piece to and fro lose the game for its mover."""


RULESETS: Mapping[str, RuleSet] = MappingProxyType(
    {
        rules.name: rules
        for rules in (
            RuleSet("janggi", True, True, 100, 3, False),
            RuleSet("janggimodern", False, True, 200, 4, True),
            RuleSet("janggicasual", False, False, 100, 3, False),
            RuleSet("janggitraditional", True, False, 100, 3, False),
        )
    }
)

_SETUP_WINGS = {
    "HEEH": ("NB", "BN"),
    "EHHE": ("BN", "NB"),
    "HEHE": ("NB", "NB"),
    "EHEH": ("BN", "BN"),
}
SETUPS = tuple(_SETUP_WINGS)
"""Orders of horse (H) and elephant (E) from a player's own left to right."""


def setup_fen(cho: str, han: str) -> str:
    """The start with these orders; Han sits opposite, so its own left is file i."""
    left, right = _SETUP_WINGS[cho]
    cho_rank = f"R{left}A1A{right}R"
    left, right = _SETUP_WINGS[han]
    han_rank = f"R{left}A1A{right}R"[::-1].lower()
    middle = "4k4/1c5c1/p1p1p1p1p/9/9/P1P1P1P1P/1C5C1/4K4"
    return f"{han_rank}/{middle}/{cho_rank} w - - 0 1"


START_FEN = setup_fen("HEEH", "HEEH")


def scores_of(board: bytes) -> tuple[float, float]:
    """Cho's points and Han's, with Han's 1.5."""
    return float(points(board, 0)), points(board, 1) + HAN_BONUS


class JanggiPosition:
    """A position with its history; see `games.base.Position`.

    `legal_moves()` is empty after mate, two passes and an accepted bikjang. After the ends that
    history or material brings (repetition, plies without capture, bare generals) it still lists
    the moves that the board allows.
    """

    __slots__ = (
        "_boards",
        "_fen",
        "_fullmove",
        "_halfmoves",
        "_legal",
        "_result",
        "_rules",
        "moves",
        "side",
        "start",
    )

    def __init__(
        self,
        start: Start,
        rules: RuleSet,
        moves: tuple[str, ...],
        side: Side,
        boards: tuple[bytes, ...],
        halfmoves: int,
        fullmove: int,
    ) -> None:
        self.start = start
        self.moves = moves
        self.side: Side = side
        self._rules = rules
        self._boards = boards  # since the last capture, the present one last
        self._halfmoves = halfmoves
        self._fullmove = fullmove
        self._legal: tuple[str, ...] | None = None
        self._fen = ""
        self._result: Result | bool | None = False  # False: not judged yet

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, JanggiPosition):
            return NotImplemented
        return self.start == other.start and self.moves == other.moves

    def __hash__(self) -> int:
        return hash((self.start, self.moves))

    def __repr__(self) -> str:
        return f"<janggi position {self.fen!r}>"

    @property
    def ply(self) -> int:
        return len(self.moves)

    @property
    def fen(self) -> str:
        """Horse and elephant are N and B, as other janggi programs write them."""
        if not self._fen:
            side = "b" if self.side else "w"
            where = placement(self._boards[-1])
            self._fen = f"{where} {side} - - {self._halfmoves} {self._fullmove}"
        return self._fen

    @property
    def in_check(self) -> bool:
        return is_check(self._boards[-1], self.side)

    @property
    def is_bikjang(self) -> bool:
        """Whether the generals face each other under rules where that must be answered."""
        return self._rules.has_bikjang and are_generals_facing(self._boards[-1])

    def legal_moves(self) -> tuple[str, ...]:
        if self._legal is None:
            self._legal = self._find_legal_moves()
        return self._legal

    def _find_legal_moves(self) -> tuple[str, ...]:
        if self._passed_out() is not None:
            return ()
        board = self._boards[-1]
        moves = legal_moves(board, self.side)
        if self.is_bikjang:
            moves = [move for move in moves if self._parts_generals(*MOVE_SQUARES[move])]
            moves.append(PASS)
        elif not is_check(board, self.side):
            moves.append(PASS)
        return tuple(moves)

    def _parts_generals(self, origin: int, target: int) -> bool:
        return not are_generals_facing(moved(self._boards[-1], origin, target))

    def _passed_out(self) -> Termination | None:
        """The end that the last move brought if it was a pass."""
        moves = self.moves
        if not moves or moves[-1] != PASS:
            return None
        if self.is_bikjang:  # a pass leaves the board as it was
            return Termination.BIKJANG
        return Termination.DOUBLE_PASS if len(moves) > 1 and moves[-2] == PASS else None

    def play(self, move: str) -> "JanggiPosition":
        side: Side = 0 if self.side else 1
        board = self._boards[-1]
        boards, halfmoves = self._boards, self._halfmoves + 1
        if move == PASS:
            boards = (*boards, board)
        else:
            origin, target = MOVE_SQUARES[move]
            after = bytes(moved(board, origin, target))
            if board[target]:
                boards, halfmoves = (after,), 0
            else:
                boards = (*boards, after)
        return JanggiPosition(
            self.start,
            self._rules,
            (*self.moves, move),
            side,
            boards,
            halfmoves,
            self._fullmove + self.side,
        )

    def scores(self) -> tuple[float, float]:
        return scores_of(self._boards[-1])

    def material(self, side: Side) -> float:
        return float(points(self._boards[-1], side))

    def result(self) -> Result | None:
        if isinstance(self._result, bool):
            self._result = self._judge()
        return self._result

    def _judge(self) -> Result | None:
        passed_out = self._passed_out()
        if passed_out is Termination.BIKJANG:
            return self._settle(passed_out, "the facing generals were accepted")
        if passed_out is Termination.DOUBLE_PASS:
            return self._settle(passed_out, "both sides passed")
        if not self.legal_moves():
            return self._won_by(self._opponent, Termination.CHECKMATE, "by checkmate")
        if self._halfmoves >= self._rules.no_capture_plies:
            why = f"{self._halfmoves} plies passed without a capture"
            return self._settle(Termination.NO_CAPTURE, why)
        if self._rules.forbids_shuffle and self._is_shuffle():
            why = "because the opponent moved one piece to and fro"
            return self._won_by(self.side, Termination.MOVE_REPETITION, why)
        if self._boards[-1::-2].count(self._boards[-1]) >= self._rules.repetitions:
            return self._judge_repetition()
        if is_bare(self._boards[-1]):
            return self._settle(Termination.BARE_GENERALS, "only generals and guards are left")
        return None

    @property
    def _opponent(self) -> Side:
        return 0 if self.side else 1

    def _won_by(self, winner: Side, termination: Termination, why: str) -> Result:
        return Result(winner, termination, self.scores(), f"{SIDE_NAMES[winner]} wins {why}")

    def _settle(self, termination: Termination, why: str) -> Result:
        """On points where the rule set counts them, else a draw."""
        return (
            settle_on_points(self, termination, why)
            if self._rules.has_points
            else Result(None, termination, self.scores(), f"Draw: {why}")
        )

    def _judge_repetition(self) -> Result:
        """A side that gave check with its every move since the first occurrence loses."""
        boards, needed = self._boards, self._rules.repetitions
        same = [n for n in range(len(boards) - 1, -1, -2) if boards[n] == boards[-1]]
        first = same[needed - 1]
        side, opponent = self.side, self._opponent
        by_opponent = all(is_check(board, side) for board in boards[first::2])
        by_side = all(is_check(board, opponent) for board in boards[first + 1 :: 2])
        if by_opponent != by_side:
            winner = side if by_opponent else opponent
            why = "because the opponent gave perpetual check"
            return self._won_by(winner, Termination.PERPETUAL_CHECK, why)
        why = f"the position occurred {needed} times"
        return self._settle(Termination.REPETITION, why)

    def _is_shuffle(self) -> bool:
        """Whether the side that just moved brought a piece to one point for the third time by
        moving nothing else than it to and fro between two points.

        One pass directly before the last move does not save it. General and guards are exempt,
        and so is a series with a capture or with a move out of check in it.
        """
        own = self.moves[-1::-2][:6]
        plies = 9
        if len(own) > 1 and own[1] == PASS:
            own, plies = (own[0], *own[2:]), 11
        if len(own) < 5 or len(self._boards) <= plies or PASS in own[:5]:
            return False
        origin, target = MOVE_SQUARES[own[0]]
        back = MOVE_TEXTS[target][origin]
        if own[:4] != (own[0], back, own[0], back) or MOVE_SQUARES[own[4]][1] != target:
            return False
        if self._boards[-1][target] & 7 in (GENERAL, GUARD):
            return False
        before = self._boards[-2 : -2 - plies : -2]
        return not any(is_check(board, self._opponent) for board in before)

    def notation(self, move: str, style: NotationStyle) -> str:
        """ "uci" writes a pass as the general's own square, "korean" as 95궁95."""
        board = self._boards[-1]
        if style not in ("uci", "san", "korean"):
            raise ValueError(f"janggi has no notation {style!r}")
        if move == PASS:
            king = general_square(board, self.side)
            if style == "korean":
                return korean(GENERAL, self.side, king, king)
            return MOVE_TEXTS[king][king] if style == "uci" else PASS
        if style == "uci":
            return move
        origin, target = MOVE_SQUARES[move]
        if style == "korean":
            return korean(board[origin] & 7, self.side, origin, target)
        return self._short_notation(origin, target)

    def _short_notation(self, origin: int, target: int) -> str:
        board, name = self._boards[-1], SQUARE_NAMES[target]
        rivals = [
            MOVE_SQUARES[move][0]
            for move in self.legal_moves()
            if move.endswith(name) and move != PASS and MOVE_SQUARES[move][1] == target
        ]
        rivals = [r for r in rivals if r != origin and board[r] == board[origin]]
        text = short(board[origin] & 7, origin, target, board[target] != 0, rivals)
        after = self.play(MOVE_TEXTS[origin][target])
        if not after.in_check:
            return text
        return text + ("+" if after.legal_moves() else "#")

    def parse(self, text: str) -> str:
        if text in self.legal_moves():
            return text
        spoken = read_move(text)
        if spoken is None:
            return self._legal_or_reason(PASS, text)
        if spoken.origin is None:
            return self._parse_short(spoken, text)
        origin, target = spoken.origin, spoken.target
        board = self._boards[-1]
        if spoken.kind is not None and board[origin] and board[origin] & 7 != spoken.kind:
            found, said = PIECE_NAMES[board[origin] & 7], PIECE_NAMES[spoken.kind]
            where = SQUARE_NAMES[origin]
            raise self._illegal(text, f"on {where} stands the {found}, not the {said}")
        if origin == target == general_square(board, self.side):
            return self._legal_or_reason(PASS, text)
        return self._legal_or_reason(MOVE_TEXTS[origin][target], text)

    def _parse_short(self, spoken: Spoken, text: str) -> str:
        board, code = self._boards[-1], (spoken.kind or 0) + HAN * self.side
        origins = [
            square
            for square in range(90)
            if board[square] == code
            and spoken.file in (None, square % 9)
            and spoken.rank in (None, square // 9)
        ]
        name = PIECE_NAMES[spoken.kind or 0]
        if not origins:
            raise self._illegal(text, f"you have no such {name}")
        texts = [MOVE_TEXTS[origin][spoken.target] for origin in origins]
        fitting = tuple(move for move in texts if move in self.legal_moves())
        if len(fitting) > 1:
            choices = " or ".join(fitting)
            raise AmbiguousMove(f"{text[:60]!r} fits {choices} in {self.fen}", fitting)
        if fitting:
            return fitting[0]
        if len(texts) == 1:
            return self._legal_or_reason(texts[0], text)
        raise self._illegal(text, f"no {name} of yours can go to {SQUARE_NAMES[spoken.target]}")

    def _legal_or_reason(self, move: str, text: str) -> str:
        if move in self.legal_moves():
            return move
        raise self._illegal(text, self._why_illegal(move))

    def _illegal(self, text: str, reason: str) -> IllegalMove:
        return IllegalMove(f"illegal move {text[:60]!r} in {self.fen}: {reason}", reason)

    def _why_illegal(self, move: str) -> str:
        board, side = self._boards[-1], self.side
        if self._passed_out() is not None:
            return "the game is over"
        if move == PASS:
            return "you may not pass while your general is in check"
        origin, target = (
            MOVE_SQUARES[move] if move in MOVE_SQUARES else (_own_square(move), _own_square(move))
        )
        reason = why_not_movement(board, origin, target, side)
        reason = reason or why_not_safe(board, origin, target, side)
        return reason or (
            "you must answer the facing generals: move your general off the file, put a piece in "
            "between, or pass, which ends the game"
        )


def _own_square(move: str) -> int:
    return SQUARE_NAMES.index(move[: len(move) // 2])


def settle_on_points(position: JanggiPosition, termination: Termination, why: str) -> Result:
    """The side with more points wins; Han's half point leaves no tie."""
    cho, han = scores = position.scores()
    winner: Side = 0 if cho > han else 1
    detail = f"{SIDE_NAMES[winner]} wins on points, Cho {cho:g} to Han {han:g}: {why}"
    return Result(winner, termination, scores, detail)


class Janggi:
    """The game of janggi; see `games.base.Game`."""

    name = "janggi"
    rulesets = tuple(RULESETS)
    side_names = SIDE_NAMES
    longest_move = "a10b10"
    record_notation: NotationStyle = "korean"
    record_file = "games-janggi.txt"

    @cached_property
    def drawing(self) -> Drawing:
        return janggi_drawing()

    def position(self, start: Start) -> JanggiPosition:
        rules = RULESETS.get(start.ruleset)
        if rules is None:
            known = ", ".join(RULESETS)
            raise ValueError(f"janggi has no rule set {start.ruleset!r}; it has {known}")
        try:
            board, side, halfmoves, fullmove = read_fen(start.fen)
        except ValueError as error:
            raise ValueError(f"bad janggi FEN {start.fen[:120]!r}: {error}") from None
        return JanggiPosition(start, rules, (), side, (board,), halfmoves, fullmove)

    def openings(self, book: str, ruleset: str, *, plies: int | None = None) -> tuple[Start, ...]:
        """ "builtin" is the 16 set-ups, Cho's order first; a file holds one FEN a line."""
        if plies is not None:
            raise ValueError("janggi reads no book of games, so there is nothing to cut by `plies`")
        if ruleset not in RULESETS:
            known = ", ".join(RULESETS)
            raise ValueError(f"janggi has no rule set {ruleset!r}; it has {known}")
        if book == "start":
            return (Start(START_FEN, ruleset),)
        if book == "builtin":
            return tuple(
                Start(setup_fen(cho, han), ruleset, f"Cho {cho}, Han {han}")
                for cho in SETUPS
                for han in SETUPS
            )
        return self._read_book(Path(book), ruleset)

    def _read_book(self, path: Path, ruleset: str) -> tuple[Start, ...]:
        """FENs, one a line, each perhaps followed by `;` and a name; `#` starts a comment."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not text in UTF-8") from None
        starts: list[Start] = []
        seen: dict[str, int] = {}
        for number, line in enumerate(lines, 1):
            fen, _, name = line.partition(";")
            if not fen.strip() or fen.lstrip().startswith("#"):
                continue
            label = name.strip() or f"{path.stem} {len(starts) + 1}"
            start = Start(" ".join(fen.split()), ruleset, label)
            try:
                position = self.position(start)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            key = re.sub(r" \d+ \d+$", "", position.fen)
            if key in seen:
                raise ValueError(f"{path}, line {number}: same position as line {seen[key]}")
            if position.result() is not None:
                raise ValueError(f"{path}, line {number}: the game is already over there")
            seen[key] = number
            starts.append(start)
        if not starts:
            raise ValueError(f"{path} holds no opening")
        return tuple(starts)

    def record(self, record: GameRecord) -> str:
        """Header lines, the start FEN among them, then `12. b1c3 02마83 {comment}` for every ply,
        the closing words in braces and the result, Cho's points first."""
        names = {"First": "Cho", "Second": "Han"}
        headers = {names.get(name, name): value for name, value in record.headers.items()}
        headers |= {"RuleSet": record.start.ruleset, "FEN": record.start.fen}
        lines = [f'[{name} "{header_value(value)}"]' for name, value in headers.items()]
        lines.append("")
        position = self.position(record.start)
        for move, comment in zip_longest(record.moves, record.comments, fillvalue=""):
            line = f"{position.ply + 1}. {move} {position.notation(move, 'korean')}"
            said = comment_text(comment)
            lines.append(f"{line} {{{said}}}" if said else line)
            position = position.play(move)
        if closing := comment_text(record.closing):
            lines.append(f"{{{closing}}}")
        lines.append(result_mark(record.is_finished, record.winner))
        return "\n".join(lines)

    def adjudicate_ply_cap(self, position: Position) -> Result:
        """On points, whatever the rule set."""
        if not isinstance(position, JanggiPosition):
            raise TypeError(f"not a janggi position: {position!r}")
        return settle_on_points(position, Termination.PLY_CAP, "the game reached its ply cap")
