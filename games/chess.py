"""Chess by python-chess, whose one home in this program is this file.

Threefold repetition and fifty moves end the game when they occur, as claims that were made.
"""

import io
import re
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from itertools import zip_longest
from pathlib import Path

import chess
import chess.pgn
import chess.svg

from games.base import (
    AmbiguousMove,
    GameRecord,
    IllegalMove,
    NotationError,
    NotationStyle,
    Position,
    Result,
    Side,
    Start,
    Termination,
)
from games.drawing import Drawing, chess_drawing
from games.escaping import comment_text, header_value, result_mark

SIDE_NAMES = ("White", "Black")
RULESETS = ("standard", "chess960")

_SQUARES = chess.SQUARE_NAMES
_MOVE_TEXTS = tuple(tuple(origin + target for target in _SQUARES) for origin in _SQUARES)
_PROMOTIONS = {chess.QUEEN: "q", chess.ROOK: "r", chess.BISHOP: "b", chess.KNIGHT: "n"}
_MOVES = {
    text: chess.Move(origin, target)
    for origin, row in enumerate(_MOVE_TEXTS)
    for target, text in enumerate(row)
    if origin != target
} | {
    _MOVE_TEXTS[origin][target] + letter: chess.Move(origin, target, promotion=piece)
    for piece, letter in _PROMOTIONS.items()
    for origin_rank, target_rank in ((6, 7), (1, 0))
    for origin in range(8 * origin_rank, 8 * origin_rank + 8)
    for target in range(8 * target_rank, 8 * target_rank + 8)
}
_VALUES = ((chess.PAWN, 1), (chess.KNIGHT, 3), (chess.BISHOP, 3), (chess.ROOK, 5), (chess.QUEEN, 9))

_Key = tuple[int, int, int, int, int, int, int, int, bool, int, int | None]

_FIGURINES = {"♔♚": "K", "♕♛": "Q", "♖♜": "R", "♗♝": "B", "♘♞": "N", "♙♟": ""}
_LOOKALIKES = str.maketrans(
    dict.fromkeys("‐‑‒–—―−－→", "-")
    | {"×": "x", "\u00a0": " ", "\ufe0e": "", "\ufe0f": ""}
    | {figure: letter for figures, letter in _FIGURINES.items() for figure in figures}
)
_NUMBER_BEFORE = re.compile(r"\d{1,3}\s*(?:\.{1,3}|…)\s*")
_DECORATION = re.compile(r"(?:\s*(?:[+#!?]+|(?<=\d)\s*e\.?\s?p\.?)|\.)+$")
_BRACKETED_PROMOTION = re.compile(r"[(/]([A-Za-z])\)?$")
_NULLS = frozenset({"--", "z0", "0000", "@@@@", "null", "pass", "(none)"})
_TWO_SQUARES = re.compile(r"([a-h][1-8])\s*[-x:]?\s*([a-h][1-8])(?:=?([a-zA-Z]))?")
_SAN = re.compile(r"([NBKRQ])?([a-h])?([1-8])?[-x]?([a-h][1-8])(?:=?([a-zA-Z]))?")
_CASTLING = re.compile(r"[oO0]-[oO0](-[oO0])?")
_HINT = "write a move such as e2e4, e7e8q, Nf3 or O-O"


@lru_cache(maxsize=65536)
def _rank_fen(rank: bytes) -> str:
    return re.sub(r"\.+", lambda run: str(len(run.group())), rank.decode())


def _placement(board: chess.Board) -> str:
    cells = bytearray(b"." * 64)
    black = board.occupied_co[chess.BLACK]
    for mask, code in (
        (board.pawns, 80),
        (board.knights, 78),
        (board.bishops, 66),
        (board.rooks, 82),
        (board.queens, 81),
        (board.kings, 75),
    ):
        for square in chess.scan_forward(mask & ~black):
            cells[square] = code
        for square in chess.scan_forward(mask & black):
            cells[square] = code + 32
    return "/".join([_rank_fen(bytes(cells[start : start + 8])) for start in range(56, -1, -8)])


def _repetition_key(board: chess.Board) -> _Key:
    """Equal for positions that count as the same; en passant only where it is legal."""
    has_en_passant = board.ep_square is not None and board.has_legal_en_passant()
    return (
        board.pawns,
        board.knights,
        board.bishops,
        board.rooks,
        board.queens,
        board.kings,
        board.occupied_co[chess.WHITE],
        board.occupied_co[chess.BLACK],
        board.turn,
        board.clean_castling_rights(),
        board.ep_square if has_en_passant else None,
    )


def _plain(text: str) -> str:
    """The text without look-alike characters, move number and marks that say nothing."""
    plain = text.translate(_LOOKALIKES).strip().strip("`*_\"'").strip()
    if match := _NUMBER_BEFORE.match(plain):
        plain = plain[match.end() :]
    plain = _DECORATION.sub("", plain)
    return _BRACKETED_PROMOTION.sub(r"=\1", plain).strip()


class ChessPosition:
    """A position with its history; see `games.base.Position`.

    `legal_moves()` is empty after mate and stalemate; after a draw by material, repetition or
    fifty moves it still lists what the board allows.
    """

    __slots__ = ("_board", "_fen", "_keys", "_legal", "_result", "moves", "side", "start")

    def __init__(
        self, start: Start, moves: tuple[str, ...], board: chess.Board, keys: tuple[_Key, ...]
    ) -> None:
        self.start = start
        self.moves = moves
        self.side: Side = 0 if board.turn else 1
        self._board = board
        self._keys = keys  # since the last irreversible move, the present one last
        self._legal: tuple[str, ...] | None = None
        self._fen = ""
        self._result: Result | bool | None = False  # False: not judged yet

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChessPosition):
            return NotImplemented
        return self.start == other.start and self.moves == other.moves

    def __hash__(self) -> int:
        return hash((self.start, self.moves))

    def __repr__(self) -> str:
        return f"<chess position {self.fen!r}>"

    @property
    def ply(self) -> int:
        return len(self.moves)

    @property
    def fen(self) -> str:
        """X-FEN; the en-passant square is named only where the capture is legal."""
        if not self._fen:
            board = self._board
            en_passant = self._keys[-1][-1]
            fields = (
                _placement(board),
                "w" if board.turn else "b",
                board.castling_xfen() if board.castling_rights else "-",
                "-" if en_passant is None else _SQUARES[en_passant],
                str(board.halfmove_clock),
                str(board.fullmove_number),
            )
            self._fen = " ".join(fields)
        return self._fen

    @property
    def in_check(self) -> bool:
        return self._board.is_check()

    def legal_moves(self) -> tuple[str, ...]:
        if self._legal is None:
            self._legal = tuple(
                [
                    _MOVE_TEXTS[move.from_square][move.to_square]
                    if move.promotion is None
                    else _MOVE_TEXTS[move.from_square][move.to_square] + _PROMOTIONS[move.promotion]
                    for move in self._board.generate_legal_moves()
                ]
            )
        return self._legal

    def play(self, move: str) -> "ChessPosition":
        board = self._board.copy(stack=False)
        board.push(_MOVES[move])
        key = _repetition_key(board)
        keys = (*self._keys, key) if board.halfmove_clock else (key,)
        return ChessPosition(self.start, (*self.moves, move), board, keys)

    def scores(self) -> None:
        """Chess counts no points."""

    def material(self, side: Side) -> float:
        """Pawn 1, knight and bishop 3, rook 5, queen 9."""
        color = side == 0
        return float(sum(value * len(self._board.pieces(piece, color)) for piece, value in _VALUES))

    def result(self) -> Result | None:
        if isinstance(self._result, bool):
            self._result = self._judge()
        return self._result

    def _judge(self) -> Result | None:
        board = self._board
        if not self.legal_moves():
            if not board.is_check():
                detail = f"Draw: {SIDE_NAMES[self.side]} has no legal move"
                return Result(None, Termination.STALEMATE, None, detail)
            winner: Side = 0 if self.side else 1
            detail = f"{SIDE_NAMES[winner]} wins by checkmate"
            return Result(winner, Termination.CHECKMATE, None, detail)
        if board.is_insufficient_material():
            detail = "Draw: nobody has the material to give mate"
            return Result(None, Termination.INSUFFICIENT_MATERIAL, None, detail)
        if len(self._keys) > 8 and self._keys[-1::-2].count(self._keys[-1]) >= 3:
            detail = "Draw: the position occurred three times"
            return Result(None, Termination.THREEFOLD_REPETITION, None, detail)
        if board.halfmove_clock >= 100:
            detail = "Draw: fifty moves without a capture or a pawn move"
            return Result(None, Termination.FIFTY_MOVES, None, detail)
        return None

    def notation(self, move: str, style: NotationStyle) -> str:
        if style == "uci":
            return move
        if style == "san":
            return self._board.san(_MOVES[move])
        raise ValueError(f"chess has no notation {style!r}")

    def parse(self, text: str) -> str:
        if text in self.legal_moves():
            return text
        plain = _plain(text)
        if plain.lower() in _NULLS:
            raise NotationError(f"{text[:60]!r} is no move: chess has no pass; {_HINT}")
        for reading in (plain, *_refolded(plain)):
            if match := _CASTLING.fullmatch(reading):
                return self._parse_castling(match[1] is None, text)
            if match := _TWO_SQUARES.fullmatch(reading):
                return self._parse_two_squares(match, text)
            if match := _SAN.fullmatch(reading):
                return self._parse_san(match, text)
        raise NotationError(f"{text[:60]!r} is not a chess move: {_HINT}")

    def _canonical(self, move: chess.Move) -> str:
        return self._board.uci(move)

    def _illegal(self, text: str, reason: str) -> IllegalMove:
        return IllegalMove(f"illegal move {text[:60]!r} in {self.fen}: {reason}", reason)

    def _parse_castling(self, is_kingside: bool, text: str) -> str:
        try:
            return self._canonical(self._board.parse_san("O-O" if is_kingside else "O-O-O"))
        except ValueError:
            raise self._illegal(text, _why_not_castling(self._board, is_kingside)) from None

    def _parse_two_squares(self, match: re.Match[str], text: str) -> str:
        origin, target = chess.parse_square(match[1]), chess.parse_square(match[2])
        promotion = (match[3] or "").lower()
        if promotion not in ("", "q", "r", "b", "n"):
            raise self._illegal(text, "a pawn promotes to q, r, b or n")
        try:
            move = self._board.parse_uci(match[1] + match[2] + promotion)
        except ValueError:
            reason = _why_illegal(self._board, origin, target, promotion)
            raise self._illegal(text, reason) from None
        return self._canonical(move)

    def _parse_san(self, match: re.Match[str], text: str) -> str:
        board, target = self._board, chess.parse_square(match[4])
        promotion = (match[5] or "").lower()
        if promotion not in ("", "q", "r", "b", "n"):
            raise self._illegal(text, "a pawn promotes to q, r, b or n")
        shown = f"{match[1] or ''}{match[2] or ''}{match[3] or ''}{match[4]}"
        try:
            return self._canonical(
                board.parse_san(f"{shown}={promotion.upper()}" if promotion else shown)
            )
        except chess.AmbiguousMoveError:
            fitting = self._fitting(match, target)
            choices = " or ".join(fitting)
            message = f"{text[:60]!r} fits {choices} in {self.fen}"
            raise AmbiguousMove(message, fitting) from None
        except ValueError:
            reason = _why_no_san(board, match, target, promotion)
            raise self._illegal(text, reason) from None

    def _fitting(self, match: re.Match[str], target: int) -> tuple[str, ...]:
        origins = _origins(self._board, match)
        return tuple(
            text
            for text in self.legal_moves()
            if _MOVES[text].to_square == target and _MOVES[text].from_square in origins
        )


def _refolded(plain: str) -> list[str]:
    """Other cases of the letters that leave the meaning as it is; `b` may be a file or a bishop
    and is left alone."""
    lower = plain.lower()
    if re.fullmatch(r"[nrqk][a-h]?[1-8]?[-x]?[a-h][1-8]", lower):
        reading = lower[0].upper() + lower[1:]
        return [reading] if reading != plain else []
    is_pawn_move = re.fullmatch(r"b[1-8](?:=?[nbrq])?", lower) is not None
    is_san = not lower.startswith("b") and _SAN.fullmatch(lower) is not None
    if lower != plain and (is_pawn_move or is_san or _TWO_SQUARES.fullmatch(lower)):
        return [lower]
    return []


def _origins(board: chess.Board, match: re.Match[str]) -> list[int]:
    """Squares of the mover's pieces that a SAN names; a pawn without a file moves straight."""
    piece = chess.PAWN if match[1] is None else chess.PIECE_SYMBOLS.index(match[1].lower())
    file = match[2] if match[1] or match[2] else match[4][0]
    return [
        square
        for square in board.pieces(piece, board.turn)
        if file in (None, _SQUARES[square][0]) and match[3] in (None, _SQUARES[square][1])
    ]


def _why_no_san(board: chess.Board, match: re.Match[str], target: int, promotion: str) -> str:
    name = chess.PIECE_NAMES[
        chess.PAWN if match[1] is None else chess.PIECE_SYMBOLS.index(match[1].lower())
    ]
    assert name is not None
    origins = _origins(board, match)
    if not origins:
        if name == "pawn":
            file = match[2] or match[4][0]
            return f"you have no pawn on the {file}-file that could move to {match[4]}"
        return f"you have no such {name}"
    if len(origins) == 1:
        return _why_illegal(board, origins[0], target, promotion)
    reasons = {origin: _why_not_movement(board, origin, target) for origin in origins}
    movers = [origin for origin, reason in reasons.items() if reason is None]
    if movers:
        return _why_illegal(board, movers[0], target, promotion)
    return f"no {name} of yours can reach {_SQUARES[target]}"


def _why_illegal(board: chess.Board, origin: int, target: int, promotion: str) -> str:
    """The rule that forbids the move, in words; the move must be illegal."""
    if not any(board.generate_legal_moves()):
        return "the game is over"
    piece = board.piece_at(origin)
    if piece is None:
        return f"there is no piece on {_SQUARES[origin]}"
    if piece.color != board.turn:
        return f"the {_name(piece)} on {_SQUARES[origin]} is your opponent's"
    if piece.piece_type == chess.KING and _is_castling_shape(board, origin, target):
        is_kingside = chess.square_file(target) > chess.square_file(origin)
        if board.chess960 and _is_castling_legal(board, is_kingside):
            return "in Chess960 castling is written O-O or O-O-O, or as the king onto the rook"
        return _why_not_castling(board, is_kingside)
    reason = _why_not_movement(board, origin, target)
    if reason is not None:
        return reason
    is_last_rank = piece.piece_type == chess.PAWN and chess.square_rank(target) in (0, 7)
    if is_last_rank and not promotion:
        example = f"{_SQUARES[origin]}{_SQUARES[target]}q"
        return f"the pawn on {_SQUARES[origin]} must name a promotion piece, as in {example}"
    if promotion and not is_last_rank:
        return "only a pawn that reaches the last rank promotes"
    if piece.piece_type == chess.KING:
        return f"your king would be in check on {_SQUARES[target]}"
    if board.is_check():
        return "your king is in check and this move does not answer it"
    return f"your king would be in check: the {_name(piece)} on {_SQUARES[origin]} is pinned"


def _name(piece: chess.Piece) -> str:
    return chess.piece_name(piece.piece_type)


def _is_castling_shape(board: chess.Board, origin: int, target: int) -> bool:
    """King two files along its own rank, or onto an own rook."""
    if chess.square_rank(origin) != chess.square_rank(target):
        return False
    if board.piece_at(target) == chess.Piece(chess.ROOK, board.turn):
        return True
    is_home = origin in (chess.E1, chess.E8)
    return is_home and abs(chess.square_file(origin) - chess.square_file(target)) == 2


def _is_castling_legal(board: chess.Board, is_kingside: bool) -> bool:
    return any(
        board.is_kingside_castling(move) == is_kingside for move in board.generate_castling_moves()
    )


def _why_not_castling(board: chess.Board, is_kingside: bool) -> str:
    has_right = (
        board.has_kingside_castling_rights(board.turn)
        if is_kingside
        else board.has_queenside_castling_rights(board.turn)
    )
    if not has_right:
        wing = "king's" if is_kingside else "queen's"
        return f"you have no right to castle on the {wing} side any more"
    if board.is_check():
        return "you may not castle while your king is in check"
    rank = board.king(board.turn) or 0
    rooks = board.castling_rights & chess.BB_RANKS[chess.square_rank(rank)]
    rook = chess.msb(rooks) if is_kingside else chess.lsb(rooks)
    between = chess.SquareSet.between(rank, rook) & board.occupied
    if between:
        return f"castling is blocked by the piece on {_SQUARES[next(iter(between))]}"
    return "your king would cross or reach an attacked square, or a piece stands in the way"


def _why_not_movement(board: chess.Board, origin: int, target: int) -> str | None:
    """The rule of movement that forbids it, check left aside; None where it moves so."""
    piece = board.piece_at(origin)
    assert piece is not None
    if origin == target:
        return "a piece must leave its square"
    landing = board.piece_at(target)
    where, name = _SQUARES[target], _name(piece)
    if landing is not None and landing.color == piece.color:
        return f"{where} is taken by your own {_name(landing)}"
    if piece.piece_type == chess.PAWN:
        return _why_not_pawn(board, origin, target)
    if target in board.attacks(origin):
        return None
    if piece.piece_type in (chess.BISHOP, chess.ROOK, chess.QUEEN):
        empty = chess.BaseBoard(None)
        empty.set_piece_at(origin, piece)
        if target in empty.attacks(origin):
            between = chess.SquareSet.between(origin, target) & board.occupied
            blocker = min(between, key=lambda square: chess.square_distance(origin, square))
            in_the_way = board.piece_at(blocker)
            assert in_the_way is not None
            return f"the {name} is blocked by the {_name(in_the_way)} on {_SQUARES[blocker]}"
    return f"the {name} on {_SQUARES[origin]} cannot reach {where}"


def _why_not_pawn(board: chess.Board, origin: int, target: int) -> str | None:
    where, forward = _SQUARES[origin], 1 if board.turn else -1
    files = abs(chess.square_file(target) - chess.square_file(origin))
    ranks = (chess.square_rank(target) - chess.square_rank(origin)) * forward
    if files == 0 and ranks in (1, 2):
        if ranks == 2 and chess.square_rank(origin) != (1 if board.turn else 6):
            return f"the pawn on {where} has left its first square and moves one step"
        path = (origin + 8 * forward, target) if ranks == 2 else (target,)
        for square in path:
            blocker = board.piece_at(square)
            if blocker is not None:
                on = _SQUARES[square]
                return f"the pawn on {where} is blocked by the {_name(blocker)} on {on}"
        return None
    if files == 1 and ranks == 1:
        if board.piece_at(target) is None and target != board.ep_square:
            return f"there is nothing for the pawn to capture on {_SQUARES[target]}"
        return None
    return f"the pawn on {where} cannot reach {_SQUARES[target]}"


_OPENINGS = (
    ("Ruy Lopez", "e4 e5 Nf3 Nc6 Bb5 a6 Ba4 Nf6"),
    ("Italian Game", "e4 e5 Nf3 Nc6 Bc4 Bc5 c3 Nf6"),
    ("Four Knights Game", "e4 e5 Nf3 Nc6 Nc3 Nf6"),
    ("Petrov Defence", "e4 e5 Nf3 Nf6 Nxe5 d6 Nf3 Nxe4"),
    ("Sicilian Najdorf", "e4 c5 Nf3 d6 d4 cxd4 Nxd4 Nf6 Nc3 a6"),
    ("Sicilian Sveshnikov", "e4 c5 Nf3 Nc6 d4 cxd4 Nxd4 Nf6 Nc3 e5"),
    ("French Defence", "e4 e6 d4 d5 Nc3 Nf6"),
    ("Caro-Kann Defence", "e4 c6 d4 d5 Nc3 dxe4 Nxe4 Bf5"),
    ("Scandinavian Defence", "e4 d5 exd5 Qxd5 Nc3 Qa5"),
    ("Queen's Gambit Declined", "d4 d5 c4 e6 Nc3 Nf6"),
    ("Queen's Gambit Accepted", "d4 d5 c4 dxc4 e3 e6 Bxc4 Nf6"),
    ("Slav Defence", "d4 d5 c4 c6 Nf3 Nf6"),
    ("Nimzo-Indian Defence", "d4 Nf6 c4 e6 Nc3 Bb4"),
    ("King's Indian Defence", "d4 Nf6 c4 g6 Nc3 Bg7 e4 d6"),
    ("English Opening", "c4 e5 Nc3 Nf6"),
    ("London System", "d4 d5 Bf4 Nf6 e3 c5"),
)
_CHESS960_NUMBERS = tuple(range(30, 960, 60))


def _builtin_starts(ruleset: str) -> tuple[Start, ...]:
    if ruleset == "chess960":
        return tuple(
            Start(chess.Board.from_chess960_pos(number).fen(), ruleset, f"Chess960 {number}")
            for number in _CHESS960_NUMBERS
        )
    starts = []
    for name, line in _OPENINGS:
        board = chess.Board()
        for san in line.split():
            board.push_san(san)
        starts.append(Start(board.fen(), ruleset, name))
    return tuple(starts)


def _read_epd(text: str, is_chess960: bool) -> list[tuple[int, str, str]]:
    """(line, FEN, name) of every position of an EPD or FEN file."""
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields or line.lstrip().startswith("#"):
            continue
        name = ""
        try:
            if len(fields) == 6 and fields[4].isdigit() and fields[5].isdigit():
                board = chess.Board(line.strip(), chess960=is_chess960)
            else:
                board, operations = chess.Board.from_epd(line, chess960=is_chess960)
                name = str(operations.get("id", ""))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        entries.append((number, board.fen(), name))
    return entries


_Reader = Callable[[str, bool], list[tuple[int, str, str]]]


class _QuietBuilder(chess.pgn.GameBuilder[chess.pgn.Game]):
    """Keeps errors for the caller and logs nothing."""

    def handle_error(self, error: Exception) -> None:
        self.game.errors.append(error)


def _read_pgn(text: str, is_chess960: bool, plies: int | None = None) -> list[tuple[int, str, str]]:
    """(line, FEN, name) of the mainline position of every game after `plies`, or at its end."""
    entries: list[tuple[int, str, str]] = []
    handle = io.StringIO(text)
    while True:
        offset = handle.tell()
        offset += len(text[offset:]) - len(text[offset:].lstrip())
        number = text.count("\n", 0, offset) + 1
        game = chess.pgn.read_game(handle, Visitor=_QuietBuilder)
        if game is None:
            return entries
        if game.errors:
            raise ValueError(f"line {number}: {game.errors[0]}")
        node: chess.pgn.GameNode = game
        while node.variations and (plies is None or node.ply() - game.ply() < plies):
            node = node.variations[0]
        board = node.board()
        if board.chess960 and not is_chess960:
            raise ValueError(f"line {number}: a Chess960 game needs the rule set chess960")
        if not game.variations and "FEN" not in game.headers:
            raise ValueError(f"line {number}: the game has no moves")
        if board.is_repetition(3):
            raise ValueError(f"line {number}: the position there has occurred three times")
        name = game.headers.get("Opening") or game.headers.get("Event", "")
        entries.append((number, board.fen(), "" if name == "?" else name))


class Chess:
    """The game of chess; see `games.base.Game`."""

    name = "chess"
    rulesets = RULESETS
    side_names = SIDE_NAMES
    longest_move = "e7e8q"
    record_notation: NotationStyle = "san"
    record_file = "games.pgn"

    @cached_property
    def drawing(self) -> Drawing:
        """With python-chess's figures: by Colin M. L. Burnett, under the GFDL, BSD and GPL."""
        return chess_drawing(chess.svg.PIECES)

    def position(self, start: Start) -> ChessPosition:
        self._check_ruleset(start.ruleset)
        shown = f"bad chess FEN {start.fen[:120]!r}"
        try:
            board = chess.Board(start.fen, chess960=start.ruleset == "chess960")
        except ValueError as error:
            raise ValueError(f"{shown}: {error}") from None
        status = board.status()
        if status != chess.STATUS_VALID:
            flaws = [
                flag.name.lower().replace("_", " ")
                for flag in chess.Status
                if flag & status and flag.name
            ]
            raise ValueError(f"{shown}: {', '.join(flaws)}")
        return ChessPosition(start, (), board, (_repetition_key(board),))

    def _check_ruleset(self, ruleset: str) -> None:
        if ruleset not in RULESETS:
            known = ", ".join(RULESETS)
            raise ValueError(f"chess has no rule set {ruleset!r}; it has {known}")

    def openings(self, book: str, ruleset: str, *, plies: int | None = None) -> tuple[Start, ...]:
        """ "builtin" is 16 short openings, or 16 starts of Chess960; a file is EPD or PGN, whose
        games are cut after `plies`; those that are alike then count once."""
        self._check_ruleset(ruleset)
        if book == "start":
            return (Start(chess.STARTING_FEN, ruleset),)
        if book == "builtin":
            return _builtin_starts(ruleset)
        return self._read_book(Path(book), ruleset, plies)

    def _read_book(self, path: Path, ruleset: str, plies: int | None) -> tuple[Start, ...]:
        readers: dict[str, _Reader] = {
            ".pgn": partial(_read_pgn, plies=plies),
            ".epd": _read_epd,
            ".fen": _read_epd,
            ".txt": _read_epd,
        }
        reader = readers.get(path.suffix.lower())
        if reader is None:
            raise ValueError(f"{path}: a chess book is named .epd, .fen, .txt or .pgn")
        try:
            entries = reader(path.read_text(encoding="utf-8-sig"), ruleset == "chess960")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not text in UTF-8") from None
        except ValueError as error:
            raise ValueError(f"{path}, {error}") from None
        starts: list[Start] = []
        seen: dict[tuple[str, ...], int] = {}
        for number, fen, name in entries:
            start = Start(fen, ruleset, name or f"{path.stem} {len(starts) + 1}")
            try:
                position = self.position(start)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            key = tuple(position.fen.split()[:4])
            if key in seen and plies is not None:
                continue  # games that part later
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
        """PGN by python-chess's exporter; a quote or backslash in a header becomes ' or /."""
        board = chess.Board(record.start.fen, chess960=record.start.ruleset == "chess960")
        game = chess.pgn.Game()
        names = {"First": "White", "Second": "Black"}
        for name, value in record.headers.items():
            game.headers[names.get(name, name)] = header_value(value)
        game.headers["Result"] = result_mark(record.is_finished, record.winner)
        game.setup(board)
        node: chess.pgn.GameNode = game
        for move, comment in zip_longest(record.moves, record.comments, fillvalue=""):
            node = node.add_variation(_MOVES[move], comment=comment_text(comment))
        node.comment = " ".join(filter(None, (node.comment, comment_text(record.closing))))
        return str(game)

    def adjudicate_ply_cap(self, position: Position) -> Result:
        """A draw, whatever the material."""
        detail = f"Draw: the game reached its ply cap after {position.ply} plies"
        return Result(None, Termination.PLY_CAP, None, detail)
