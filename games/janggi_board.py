"""Janggi on the board: tables of lines, attacks, legal moves, FEN. No history and no rule sets.

A board is 90 bytes, a1 = 0, b1 = 1, ... i10 = 89; a byte is a piece code or 0. Cho's codes are
1 to 7, Han's the same plus 8. Rules are written from the sources named in the research notes:
palace lines, cannon screens, lame horse and elephant.
"""

import re
from functools import lru_cache

from games.base import Side

Board = bytes | bytearray

FILES, RANKS = 9, 10
GENERAL, GUARD, HORSE, ELEPHANT, CHARIOT, CANNON, SOLDIER = range(1, 8)
HAN = 8
"""Added to a piece's kind for the second side."""

PIECE_NAMES = ("", "general", "guard", "horse", "elephant", "chariot", "cannon", "soldier")
POINTS = (0, 0, 3, 5, 3, 13, 7, 2)
"""Tournament points by kind of piece; 72 a side at the start."""

FEN_LETTERS = ".KANBRCP.kanbrcp"
_FEN_CODES = {letter: code for code, letter in enumerate(FEN_LETTERS) if letter != "."} | {
    "H": HORSE,
    "E": ELEPHANT,
    "h": HORSE + HAN,
    "e": ELEPHANT + HAN,
}
_MOST_PIECES = 16

SQUARE_NAMES = tuple(f"{'abcdefghi'[square % 9]}{square // 9 + 1}" for square in range(90))
SQUARES = {name: square for square, name in enumerate(SQUARE_NAMES)}
MOVE_TEXTS = tuple(tuple(origin + target for target in SQUARE_NAMES) for origin in SQUARE_NAMES)
"""Canonical text by origin and target square."""
MOVE_SQUARES = {
    text: (origin, target)
    for origin, row in enumerate(MOVE_TEXTS)
    for target, text in enumerate(row)
    if origin != target
}

ORTHOGONAL = ((0, 1), (1, 0), (0, -1), (-1, 0))


def square_at(file: int, rank: int) -> int | None:
    """The square of zero-based file and rank, or None beyond the board's edge."""
    return rank * 9 + file if 0 <= file < FILES and 0 <= rank < RANKS else None


def _palace(first_rank: int) -> frozenset[int]:
    return frozenset((first_rank + up) * 9 + file for up in range(3) for file in (3, 4, 5))


PALACES = (_palace(0), _palace(7))
_CENTRES = (13, 76)  # e2 and e9
_CORNERS = {square for centre in _CENTRES for square in (centre - 10, centre - 8, centre + 8)} | {
    centre + 10 for centre in _CENTRES
}


def _straight_rays(square: int) -> list[tuple[int, ...]]:
    rays = []
    for file_step, rank_step in ORTHOGONAL:
        ray = []
        file, rank = square % 9 + file_step, square // 9 + rank_step
        while (target := square_at(file, rank)) is not None:
            ray.append(target)
            file, rank = file + file_step, rank + rank_step
        if ray:
            rays.append(tuple(ray))
    return rays


def _palace_rays(square: int) -> list[tuple[int, ...]]:
    """The drawn diagonals through the palace's centre, seen from `square`."""
    if square in _CENTRES:
        return [(square + step,) for step in (-10, -8, 8, 10)]
    if square in _CORNERS:
        centre = next(centre for centre in _CENTRES if abs(centre - square) in (8, 10))
        return [(centre, 2 * centre - square)]
    return []


RAYS = tuple(tuple(_straight_rays(square) + _palace_rays(square)) for square in range(90))
"""Lines of the chariot and the cannon, nearest square first, palace diagonals among them."""


def _palace_steps(square: int, side: Side) -> tuple[int, ...]:
    palace = PALACES[side]
    return tuple(ray[0] for ray in RAYS[square] if ray[0] in palace) if square in palace else ()


def _soldier_steps(square: int, side: Side) -> tuple[int, ...]:
    backward = range(-10, -7) if side == 0 else range(8, 11)
    return tuple(ray[0] for ray in RAYS[square] if ray[0] - square not in backward)


PALACE_STEPS = tuple(tuple(_palace_steps(s, side) for s in range(90)) for side in (0, 1))
SOLDIER_STEPS = tuple(tuple(_soldier_steps(s, side) for s in range(90)) for side in (0, 1))


def _horse_paths(square: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """(leg, targets): one step straight onto the leg, then one diagonally outward."""
    paths = []
    file, rank = square % 9, square // 9
    for ahead, up in ORTHOGONAL:
        leg = square_at(file + ahead, rank + up)
        ends = (square_at(file + 2 * ahead + s * up, rank + 2 * up + s * ahead) for s in (1, -1))
        targets = tuple(end for end in ends if end is not None)
        if leg is not None and targets:
            paths.append((leg, targets))
    return tuple(paths)


def _elephant_paths(square: int) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
    """(leg, ((second leg, target), ...)): one step straight, then two diagonally outward."""
    paths = []
    file, rank = square % 9, square // 9
    for ahead, up in ORTHOGONAL:
        leg = square_at(file + ahead, rank + up)
        branches = []
        for s in (1, -1):
            second = square_at(file + 2 * ahead + s * up, rank + 2 * up + s * ahead)
            target = square_at(file + 3 * ahead + 2 * s * up, rank + 3 * up + 2 * s * ahead)
            if second is not None and target is not None:
                branches.append((second, target))
        if leg is not None and branches:
            paths.append((leg, tuple(branches)))
    return tuple(paths)


HORSE_PATHS = tuple(_horse_paths(square) for square in range(90))
ELEPHANT_PATHS = tuple(_elephant_paths(square) for square in range(90))

BETWEEN: tuple[dict[int, tuple[int, ...]], ...] = tuple(
    {target: ray[:n] for ray in RAYS[square] for n, target in enumerate(ray)}
    for square in range(90)
)
"""For a square: every square on a line with it, and the squares in between."""


def _jumpers_onto() -> tuple[tuple[dict[int, int], ...], tuple[dict[int, tuple[int, int]], ...]]:
    """By attacked square: origin -> leg of horses, origin -> both legs of elephants."""
    horses: tuple[dict[int, int], ...] = tuple({} for _ in range(90))
    elephants: tuple[dict[int, tuple[int, int]], ...] = tuple({} for _ in range(90))
    for origin in range(90):
        for leg, targets in HORSE_PATHS[origin]:
            for target in targets:
                horses[target][origin] = leg
        for leg, branches in ELEPHANT_PATHS[origin]:
            for second, target in branches:
                elephants[target][origin] = (leg, second)
    return horses, elephants


HORSES_ONTO, ELEPHANTS_ONTO = _jumpers_onto()
SOLDIERS_ONTO = tuple(
    tuple(
        frozenset(origin for origin in range(90) if target in SOLDIER_STEPS[side][origin])
        for target in range(90)
    )
    for side in (0, 1)
)
_HORSE_LIST = tuple(tuple(onto.items()) for onto in HORSES_ONTO)
_ELEPHANT_LIST = tuple((*((o, a, b) for o, (a, b) in onto.items()),) for onto in ELEPHANTS_ONTO)
_SOLDIER_LIST = tuple(tuple(tuple(sorted(onto)) for onto in side) for side in SOLDIERS_ONTO)

_MAY_LAND = (
    tuple(code == 0 or code >= HAN for code in range(16)),
    tuple(code < HAN for code in range(16)),
)
"""By side and code on the target: free or the opponent's."""
_CANNON_MAY_LAND = tuple(
    tuple(allowed and code & 7 != CANNON for code, allowed in enumerate(row)) for row in _MAY_LAND
)


def general_square(board: Board, side: Side) -> int:
    return board.index(GENERAL + HAN * side)


def is_attacked(board: Board, square: int, side: Side) -> bool:
    """Whether the opponent of `side` could capture on `square`, a square of `side`'s palace."""
    foe = HAN - HAN * side
    chariot, cannon = CHARIOT + foe, CANNON + foe
    for ray in RAYS[square]:
        is_screened = False
        for target in ray:
            code = board[target]
            if code:
                if is_screened:
                    if code == cannon:
                        return True
                    break
                if code == chariot:
                    return True
                if code & 7 == CANNON:
                    break
                is_screened = True
    horse, elephant, soldier = HORSE + foe, ELEPHANT + foe, SOLDIER + foe
    for origin, leg in _HORSE_LIST[square]:
        if board[origin] == horse and not board[leg]:
            return True
    for origin, leg, second in _ELEPHANT_LIST[square]:
        if board[origin] == elephant and not board[leg] and not board[second]:
            return True
    return any(board[origin] == soldier for origin in _SOLDIER_LIST[1 - side][square])


def is_check(board: Board, side: Side) -> bool:
    """Whether `side`'s general is attacked."""
    return is_attacked(board, general_square(board, side), side)


def are_generals_facing(board: Board) -> bool:
    """Bikjang: both generals on one file with nothing in between."""
    cho, han = board.index(GENERAL), board.index(GENERAL + HAN)
    return cho % 9 == han % 9 and not any(board[cho + 9 : han : 9])


def moved(board: Board, origin: int, target: int) -> bytearray:
    """A copy of the board with one piece moved, unchecked."""
    after = bytearray(board)
    after[target] = after[origin]
    after[origin] = 0
    return after


def _targets(board: Board, origin: int, side: Side) -> list[int]:
    """Where the piece on `origin` can go by its own movement, check left aside."""
    kind = board[origin] & 7
    may_land = _MAY_LAND[side]
    if kind == SOLDIER:
        return [t for t in SOLDIER_STEPS[side][origin] if may_land[board[t]]]
    if kind == CHARIOT:
        return _chariot_targets(board, origin, may_land)
    if kind == CANNON:
        return _cannon_targets(board, origin, _CANNON_MAY_LAND[side])
    if kind == HORSE:
        return [
            target
            for leg, targets in HORSE_PATHS[origin]
            if not board[leg]
            for target in targets
            if may_land[board[target]]
        ]
    if kind == ELEPHANT:
        return [
            target
            for leg, branches in ELEPHANT_PATHS[origin]
            if not board[leg]
            for second, target in branches
            if not board[second] and may_land[board[target]]
        ]
    return [t for t in PALACE_STEPS[side][origin] if may_land[board[t]]]


def _chariot_targets(board: Board, origin: int, may_land: tuple[bool, ...]) -> list[int]:
    targets = []
    for ray in RAYS[origin]:
        for target in ray:
            code = board[target]
            if code:
                if may_land[code]:
                    targets.append(target)
                break
            targets.append(target)
    return targets


def _cannon_targets(board: Board, origin: int, may_land: tuple[bool, ...]) -> list[int]:
    targets = []
    for ray in RAYS[origin]:
        squares = iter(ray)
        for screen in squares:
            if board[screen]:
                if board[screen] & 7 != CANNON:
                    for target in squares:
                        code = board[target]
                        if code:
                            if may_land[code]:
                                targets.append(target)
                            break
                        targets.append(target)
                break
    return targets


def _watch(
    board: Board, king: int, side: Side, foes: list[int]
) -> tuple[set[int], set[int], list[tuple[set[int], int]]]:
    """What must be looked at twice before a move is called legal.

    Returns origins whose departure may expose the general; targets that may become a cannon's
    screen; and for every piece giving check the targets that can end it and the screen whose
    departure can (or -1).
    """
    leaving: set[int] = set()
    landing: set[int] = set()
    checks: list[tuple[set[int], int]] = []
    between, horses, elephants = BETWEEN[king], HORSES_ONTO[king], ELEPHANTS_ONTO[king]
    soldiers = SOLDIERS_ONTO[1 - side][king]
    for origin in foes:
        kind = board[origin] & 7
        if kind >= CHARIOT:
            if kind == SOLDIER:
                if origin in soldiers:
                    checks.append(({origin}, -1))
                continue
            path = between.get(origin)
            if path is None:
                continue
            pieces = [square for square in path if board[square]]
            if kind == CHARIOT:
                if not pieces:
                    checks.append(({origin, *path}, -1))
                elif len(pieces) == 1:
                    leaving.add(pieces[0])
            elif not pieces:
                landing.update(path)
            elif len(pieces) == 1:
                if board[pieces[0]] & 7 == CANNON:
                    landing.add(pieces[0])
                else:
                    checks.append(({origin, *path}, pieces[0]))
            elif len(pieces) == 2:
                leaving.update(pieces)
        else:
            legs: tuple[int, ...] | None = None
            if kind == HORSE and origin in horses:
                legs = (horses[origin],)
            elif kind == ELEPHANT:
                legs = elephants.get(origin)
            if legs is not None:
                blocked = [leg for leg in legs if board[leg]]
                if not blocked:
                    checks.append(({origin, *legs}, -1))
                elif len(blocked) == 1:
                    leaving.add(blocked[0])
    return leaving, landing, checks


def legal_moves(board: Board, side: Side) -> list[str]:
    """Moves that do not leave the own general attacked, by origin square; passing left aside."""
    if side:
        own = [square for square, code in enumerate(board) if code > HAN]
        foes = [square for square, code in enumerate(board) if HAN > code > GUARD]
    else:
        own = [square for square, code in enumerate(board) if HAN > code > 0]
        foes = [square for square, code in enumerate(board) if code > HAN + GUARD]
    king = general_square(board, side)
    leaving, landing, checks = _watch(board, king, side, foes)
    moves: list[str] = []
    for origin in own:
        texts = MOVE_TEXTS[origin]
        targets = _targets(board, origin, side)
        if origin == king:
            for target in targets:
                if not is_attacked(moved(board, origin, target), target, side):
                    moves.append(texts[target])
        elif checks:
            answers, screen = checks[0]
            for target in targets:
                if (target in answers or origin == screen) and not is_attacked(
                    moved(board, origin, target), king, side
                ):
                    moves.append(texts[target])
        elif origin in leaving:
            for target in targets:
                if not is_attacked(moved(board, origin, target), king, side):
                    moves.append(texts[target])
        elif landing:
            for target in targets:
                if target not in landing or not is_attacked(
                    moved(board, origin, target), king, side
                ):
                    moves.append(texts[target])
        else:
            moves += [texts[target] for target in targets]
    return moves


def points(board: Board, side: Side) -> int:
    """Points of the pieces of one side, Han's 1.5 for moving second left aside."""
    return sum(POINTS[kind] * board.count(kind + HAN * side) for kind in range(GUARD, SOLDIER + 1))


_GENERALS_AND_GUARDS = bytes((0, GENERAL, GUARD, GENERAL + HAN, GUARD + HAN))


def is_bare(board: Board) -> bool:
    """Whether only generals and guards are left, so that nobody can give mate."""
    return not board.translate(None, _GENERALS_AND_GUARDS)


@lru_cache(maxsize=65536)
def _rank_fen(rank: bytes) -> str:
    letters = "".join(FEN_LETTERS[code] for code in rank)
    return re.sub(r"\.+", lambda run: str(len(run.group())), letters)


def placement(board: bytes) -> str:
    """The first field of a FEN."""
    return "/".join([_rank_fen(board[start : start + 9]) for start in range(81, -1, -9)])


def _read_rank(text: str, name: int) -> list[int]:
    codes: list[int] = []
    previous_is_digit = False
    for letter in text:
        if letter in "123456789":
            if previous_is_digit:
                raise ValueError(f"two numbers in a row in rank {name} ({text!r})")
            codes += [0] * int(letter)
        elif letter in _FEN_CODES:
            codes.append(_FEN_CODES[letter])
        else:
            raise ValueError(f"{letter!r} in rank {name} is no piece")
        previous_is_digit = letter in "123456789"
    if len(codes) != FILES:
        raise ValueError(f"rank {name} ({text!r}) has {len(codes)} squares, not 9")
    return codes


def _check_pieces(board: bytes) -> None:
    for side in (0, 1):
        owner = ("Cho", "Han")[side]
        generals = board.count(GENERAL + HAN * side)
        if generals != 1:
            raise ValueError(f"{owner} must have exactly one general, not {generals}")
        pieces = sum(board.count(kind + HAN * side) for kind in range(GENERAL, SOLDIER + 1))
        if pieces > _MOST_PIECES:
            raise ValueError(f"{owner} has {pieces} pieces, more than {_MOST_PIECES}")
        for square, code in enumerate(board):
            at_home = code - HAN * side in (GENERAL, GUARD)
            if at_home and square not in PALACES[side]:
                name = PIECE_NAMES[code & 7]
                raise ValueError(f"{owner}'s {name} on {SQUARE_NAMES[square]} is not in its palace")


def _read_counters(fields: list[str]) -> tuple[int, int]:
    """Half-move clock and move number from what follows the side; dashes may be missing."""
    dashes = 0
    while dashes < min(2, len(fields)) and fields[dashes] == "-":
        dashes += 1
    numbers = fields[dashes:]
    if len(numbers) > 2 or not all(re.fullmatch(r"[0-9]{1,6}", number) for number in numbers):
        raise ValueError(f"the counters are not two numbers: {' '.join(fields)!r}")
    halfmoves = int(numbers[0]) if numbers else 0
    fullmove = int(numbers[1]) if len(numbers) == 2 else 1
    return halfmoves, max(fullmove, 1)


def read_fen(fen: str) -> tuple[bytes, Side, int, int]:
    """Board, side to move, plies without capture, move number.

    Letters N and B or H and E name horse and elephant; the two dashes and the counters may be
    missing. Raises ValueError naming what is wrong: shape, letters, numbers of generals and of
    pieces, a general or guard outside its palace, or a general that could be captured at once.
    """
    fields = fen.split()
    if not 2 <= len(fields) <= 6:
        raise ValueError(f"a FEN has 2 to 6 fields, not {len(fields)}")
    ranks = fields[0].split("/")
    if len(ranks) != RANKS:
        raise ValueError(f"a janggi FEN has 10 ranks, not {len(ranks)}")
    codes: list[int] = []
    for rank, text in zip(range(1, RANKS + 1), reversed(ranks), strict=True):
        codes += _read_rank(text, rank)
    board = bytes(codes)
    _check_pieces(board)
    if fields[1] not in ("w", "b"):
        raise ValueError(f"the side to move is 'w' (Cho) or 'b' (Han), not {fields[1]!r}")
    side: Side = 0 if fields[1] == "w" else 1
    halfmoves, fullmove = _read_counters(fields[2:])
    if is_check(board, 0 if side else 1):
        mover, other = ("Cho", "Han") if side == 0 else ("Han", "Cho")
        raise ValueError(f"{mover} is to move and could capture {other}'s general")
    return board, side, halfmoves, fullmove
