"""Ending games that are decided, by what a judge or the players themselves think of them, pure.

The rules are those of fastchess (`-draw`, `-resign` with `twosided`): a draw where for so many
moves neither side sees an advantage, a win where for so many moves both agree who is lost. Without
a judge only players that tell a score (UCI engines) can be judged so; a ply without one breaks the
row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from games import Result, Side, Termination


@dataclass(frozen=True, slots=True)
class AdjudicationRules:
    """When a game is ended; centipawns, from the mover's side."""

    draw_score_cp: int | None = None
    """None: no draws by score."""
    draw_moves: int = 8
    """Moves by each side in a row within the score."""
    draw_from_ply: int = 80
    resign_score_cp: int | None = None
    """None: no wins by score."""
    resign_moves: int = 4


def adjudicate(
    rules: AdjudicationRules, evals: Sequence[int | None], first: Side, names: Sequence[str]
) -> Result | None:
    """The result that the scores of a game's plies lead to, None while there is none.

    `evals` has one score a ply, in order, from its mover's side, None where there is none; `first`
    made ply 0;
    `names` are the sides'.
    """
    if rules.draw_score_cp is not None and len(evals) >= rules.draw_from_ply:
        row = _last(evals, 2 * rules.draw_moves)
        if row and all(abs(score) <= rules.draw_score_cp for score in row):
            detail = (
                f"for {rules.draw_moves} moves neither side saw more than "
                f"{rules.draw_score_cp} centipawns"
            )
            return Result(None, Termination.ADJUDICATED_DRAW, None, detail)
    if rules.resign_score_cp is not None:
        row = _last(evals, 2 * rules.resign_moves)
        for parity in (0, 1) if row else ():
            worst, best = row[parity::2], row[1 - parity :: 2]
            limit = rules.resign_score_cp
            if all(score <= -limit for score in worst) and all(score >= limit for score in best):
                # the row ends with the last ply, and its parity counts from the row's beginning
                ply = len(evals) - len(row) + parity
                loser: Side = first if ply % 2 == 0 else _other(first)
                detail = (
                    f"for {rules.resign_moves} moves both sides saw {names[loser]} lost by "
                    f"{limit} centipawns or more"
                )
                return Result(_other(loser), Termination.ADJUDICATED_WIN, None, detail)
    return None


def _last(evals: Sequence[int | None], number: int) -> list[int]:
    """The last scores, or none of them where one is missing."""
    row = [score for score in evals[-number:] if score is not None]
    return row if len(row) == number else []


def _other(side: Side) -> Side:
    return 1 if side == 0 else 0
