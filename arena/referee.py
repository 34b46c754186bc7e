"""When a game is over and how, pure: what a match does as it is played, and `replay` again."""

from collections.abc import Sequence

from agents import Fault
from arena.adjudication import AdjudicationRules, adjudicate
from games import Game, Position, Result, Side, Termination

_ENDINGS = {
    Fault.FLAG_FALL: (Termination.FLAG_FALL, "ran out of time"),
    Fault.RESIGNED: (Termination.RESIGNATION, "resigned"),
}


def ending(
    game: Game,
    position: Position,
    max_plies: int | None,
    rules: AdjudicationRules,
    evals: Sequence[int | None],
) -> Result | None:
    """The result in a position, None while the game goes on: by the game's rules first, then by the
    ply cap, then by the players' own scores, of which `evals` has one a ply."""
    result = position.result()
    if result is None and position.ply == max_plies:
        result = game.adjudicate_ply_cap(position)
    if result is None:
        first = position.side if position.ply % 2 == 0 else other(position.side)
        result = adjudicate(rules, evals, first, game.side_names)
    return result


def loss(game: Game, position: Position, fault: Fault, last: str) -> Result:
    """The result where the side to move has no move to show; `last` says in words what was wrong
    with its last try."""
    loser = position.side
    termination, said = _ENDINGS.get(
        fault, (Termination.FORFEIT, f"gave no legal move ({fault.value})")
    )
    detail = f"{game.side_names[loser]} {said}" + (f": {last}" if last else "")
    return Result(other(loser), termination, position.scores(), detail)


def agreed(game: Game, position: Position) -> Result:
    """The result where the side to move accepts the draw that it is offered."""
    detail = f"{game.side_names[position.side]} accepted the draw that was offered"
    return Result(None, Termination.DRAW_AGREED, position.scores(), detail)


def other(side: Side) -> Side:
    return 1 if side == 0 else 0
