"""Finished games as a reader wishes to see them: some, in an order, a page of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from arena.figures import MatchFigures, label
from arena.report import result
from arena.store import MatchRow

WINNERS = ("", "first", "second", "draw", "won", "lost")
"""By whom a game was won: a side, nobody, or the player wished for or the other."""
ORDERS = ("descending", "ascending")


class Wish(NamedTuple):
    """Which games, and in which order; an empty text wishes for nothing."""

    player: str = ""
    game: str = ""
    how: str = ""
    """A termination, or of a forfeit the failure behind it."""
    result: str = ""
    """One of WINNERS; `won` and `lost` are the player's."""
    sort: str = "ended"
    """A key of SORTS; games alike in it stand in the order of `ended`."""
    order: str = "descending"
    """One of ORDERS."""


def _how(match: MatchFigures) -> str:
    return match.fault or match.row.termination or ""


SORTS: Mapping[str, Callable[[MatchFigures], Any]] = {
    "ended": lambda match: 0,
    "players": lambda match: tuple(name.casefold() for name in match.row.agents),
    "result": lambda match: {0: 1.0, None: 0.5, 1: 0.0}[match.row.winner],
    "how": _how,
    "game": lambda match: label(match.row.game, match.row.ruleset),
    "plies": lambda match: match.plies,
}


def browse(matches: Sequence[MatchFigures], wish: Wish, offset: int, limit: int) -> dict[str, Any]:
    """A page of the games wished for, with how many there are of them, and what there is to wish
    for. `matches` are finished, in the order in which they ended."""
    is_any = wish[:4] == Wish()[:4]
    found = [match for match in matches if is_any or _fits(match.row, _how(match), wish)]
    kinds = {(row.game, row.ruleset) for row in (match.row for match in matches)}
    is_falling = wish.order == "descending"
    if is_falling:
        found.reverse()
    if wish.sort != "ended":
        found.sort(key=SORTS[wish.sort], reverse=is_falling)
    return {
        "total": len(found),
        "results": [result(match) for match in found[offset : offset + limit]],
        "players": sorted(
            {match.row.agent_first for match in matches}
            | {match.row.agent_second for match in matches}
        ),
        "games": sorted({label(*kind) for kind in kinds}),
        "hows": sorted({_how(match) for match in matches}),
    }


def _fits(row: MatchRow, how: str, wish: Wish) -> bool:
    return (
        (not wish.player or wish.player in row.agents)
        and (not wish.game or wish.game == label(row.game, row.ruleset))
        and (not wish.how or wish.how == how)
        and (not wish.result or wish.result in _results(row, wish.player))
    )


def _results(row: MatchRow, player: str) -> tuple[str, ...]:
    if row.winner is None:
        return ("draw",)
    side = ("first", "second")[row.winner]
    if player not in row.agents:
        return (side,)
    return side, "won" if row.agents[row.winner] == player else "lost"
