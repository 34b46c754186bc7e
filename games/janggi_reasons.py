"""Why a janggi move is against the rules, in words that help the player to find a legal one."""

from games.base import Side
from games.janggi_board import (
    BETWEEN,
    CANNON,
    CHARIOT,
    ELEPHANT,
    ELEPHANT_PATHS,
    GENERAL,
    GUARD,
    HAN,
    HORSE,
    HORSE_PATHS,
    PALACE_STEPS,
    PALACES,
    PIECE_NAMES,
    SOLDIER,
    SOLDIER_STEPS,
    SQUARE_NAMES,
    is_attacked,
    is_check,
    moved,
)
from games.janggi_board import general_square as general_of


def _on(board: bytes, square: int) -> str:
    return f"the {PIECE_NAMES[board[square] & 7]} on {SQUARE_NAMES[square]}"


def _why_not_palace(board: bytes, origin: int, target: int, side: Side) -> str | None:
    name = PIECE_NAMES[board[origin] & 7]
    if target not in PALACES[side]:
        return f"the {name} may not leave the palace"
    if target not in PALACE_STEPS[side][origin]:
        return f"the {name} on {SQUARE_NAMES[origin]} moves one step along the palace's lines"
    return None


def _why_not_soldier(origin: int, target: int, side: Side) -> str | None:
    if target in SOLDIER_STEPS[side][origin]:
        return None
    forward = 1 if side == 0 else -1
    if (target // 9 - origin // 9) * forward < 0:
        return "a soldier never moves backward"
    return (
        "a soldier moves one step forward or sideways, and diagonally forward only along a "
        "palace's lines"
    )


def _why_not_horse(board: bytes, origin: int, target: int) -> str | None:
    for leg, targets in HORSE_PATHS[origin]:
        if target in targets:
            if not board[leg]:
                return None
            return f"the horse's leg on {SQUARE_NAMES[leg]} is blocked by {_on(board, leg)}"
    return (
        f"the horse on {SQUARE_NAMES[origin]} cannot reach {SQUARE_NAMES[target]}: it moves one "
        "step straight, then one diagonally outward"
    )


def _why_not_elephant(board: bytes, origin: int, target: int) -> str | None:
    for leg, branches in ELEPHANT_PATHS[origin]:
        for second, end in branches:
            if end == target:
                blocker = leg if board[leg] else second if board[second] else None
                if blocker is None:
                    return None
                where = SQUARE_NAMES[blocker]
                return f"the elephant's path on {where} is blocked by {_on(board, blocker)}"
    return (
        f"the elephant on {SQUARE_NAMES[origin]} cannot reach {SQUARE_NAMES[target]}: it moves "
        "one step straight, then two diagonally outward"
    )


def _why_not_chariot(board: bytes, origin: int, target: int) -> str | None:
    path = BETWEEN[origin].get(target)
    if path is None:
        return (
            f"the chariot on {SQUARE_NAMES[origin]} cannot reach {SQUARE_NAMES[target]}: it moves "
            "along files, ranks and the palace's diagonals"
        )
    blocker = next((square for square in path if board[square]), None)
    return None if blocker is None else f"the chariot is blocked by {_on(board, blocker)}"


def _why_not_cannon(board: bytes, origin: int, target: int) -> str | None:
    path = BETWEEN[origin].get(target)
    if path is None:
        return (
            f"the cannon on {SQUARE_NAMES[origin]} cannot reach {SQUARE_NAMES[target]}: it jumps "
            "along files, ranks and the palace's diagonals"
        )
    screens = [square for square in path if board[square]]
    if board[target] & 7 == CANNON:
        return "a cannon may not capture a cannon"
    if len(screens) != 1:
        found = "none" if not screens else str(len(screens))
        return (
            "a cannon needs exactly one screen that is not a cannon to jump over, and there "
            f"{'are' if len(screens) > 1 else 'is'} {found} between {SQUARE_NAMES[origin]} and "
            f"{SQUARE_NAMES[target]}"
        )
    if board[screens[0]] & 7 == CANNON:
        return (
            "a cannon needs exactly one screen that is not a cannon, and the only piece between "
            f"is {_on(board, screens[0])}"
        )
    return None


def why_not_movement(board: bytes, origin: int, target: int, side: Side) -> str | None:
    """The rule of ownership or movement that forbids the move; None where it is a movement."""
    code = board[origin]
    if not code:
        return f"there is no piece on {SQUARE_NAMES[origin]}"
    if (code >= HAN) != (side == 1):
        return f"{_on(board, origin)} is your opponent's"
    if origin == target:
        return "a piece must leave its square; only the general's own square means a pass"
    kind = code & 7
    if board[target] and (board[target] >= HAN) == (side == 1):
        return f"{SQUARE_NAMES[target]} is taken by your own {PIECE_NAMES[board[target] & 7]}"
    if kind in (GENERAL, GUARD):
        return _why_not_palace(board, origin, target, side)
    if kind == SOLDIER:
        return _why_not_soldier(origin, target, side)
    by_kind = {
        HORSE: _why_not_horse,
        ELEPHANT: _why_not_elephant,
        CHARIOT: _why_not_chariot,
        CANNON: _why_not_cannon,
    }
    return by_kind[kind](board, origin, target)


def why_not_safe(board: bytes, origin: int, target: int, side: Side) -> str | None:
    """How a movement leaves the own general attacked; None where it does not."""
    after = moved(board, origin, target)
    if not is_check(after, side):
        return None
    king = general_of(board, side)
    if origin == king:
        return f"your general would be in check on {SQUARE_NAMES[target]}"
    if is_attacked(board, king, side):
        return f"your general on {SQUARE_NAMES[king]} is in check and this does not answer it"
    return f"your general on {SQUARE_NAMES[king]} would be in check"
