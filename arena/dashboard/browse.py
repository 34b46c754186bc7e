"""Finished games as a reader wishes to see them: some, in an order, a page of them.

What a game fits and where it stands in an order is said here alone: a report's page, which has no
arena to ask, has it beside each game (`facets`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from arena.figures import MatchFigures, label
from arena.report import result

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

    @property
    def facets(self) -> list[str]:
        """What a game must have to be wished for; see `facets`."""
        whose = f" {self.player}" if self.result in ("won", "lost") else ""
        wished = (*zip(self._fields, self[:3], strict=False), ("result", self.result + whose))
        return [f"{key} {value}" for key, value in wished if value]


def _how(match: MatchFigures) -> str:
    return match.fault or match.row.termination or ""


SORTS: Mapping[str, Callable[[MatchFigures], Any]] = {
    "ended": lambda match: 0,
    "players": lambda match: "\n".join(name.casefold() for name in match.row.agents),
    "result": lambda match: {0: 1.0, None: 0.5, 1: 0.0}[match.row.winner],
    "how": _how,
    "game": lambda match: label(match.row.game, match.row.ruleset),
    "plies": lambda match: match.plies,
}


def facets(match: MatchFigures) -> list[str]:
    """What a finished game can be found by: each a key of a Wish and its value; of `won` and `lost`
    with the player."""
    row = match.row
    names = [f"player {name}" for name in row.agents]
    said = [*names, f"game {label(row.game, row.ruleset)}", f"how {_how(match)}"]
    if row.winner is None:
        return [*said, "result draw"]
    winner, loser = row.agents[row.winner], row.agents[1 - row.winner]
    side = ("first", "second")[row.winner]
    return [*said, f"result {side}", f"result won {winner}", f"result lost {loser}"]


def browse(
    matches: Sequence[MatchFigures],
    unrated: Collection[str],
    wish: Wish,
    offset: int,
    limit: int,
) -> dict[str, Any]:
    """A page of the games wished for, with how many there are of them, and what there is to wish
    for. `matches` are finished, in the order in which they ended; `unrated` are ids."""
    wanted = wish.facets
    found = [m for m in matches if not wanted or not set(wanted).difference(facets(m))]
    kinds = {(row.game, row.ruleset) for row in (match.row for match in matches)}
    is_falling = wish.order == "descending"
    if is_falling:
        found.reverse()
    if wish.sort != "ended":
        found.sort(key=SORTS[wish.sort], reverse=is_falling)
    page = found[offset : offset + limit]
    return {
        "total": len(found),
        "results": [result(match, is_rated=match.row.id not in unrated) for match in page],
        "players": sorted(
            {match.row.agent_first for match in matches}
            | {match.row.agent_second for match in matches}
        ),
        "games": sorted({label(*kind) for kind in kinds}),
        "hows": sorted({_how(match) for match in matches}),
    }


def catalogue(matches: Sequence[MatchFigures], unrated: Collection[str]) -> dict[str, Any]:
    """All finished games, each with its facets and its value in each order, and what there is to
    wish for: `browse` for who cannot ask."""
    everything = browse(matches, unrated, Wish(order="ascending"), 0, len(matches))
    return {
        **everything,
        "results": [
            {**told, "facets": facets(match), "sort": {key: of(match) for key, of in SORTS.items()}}
            for told, match in zip(everything["results"], matches, strict=True)
        ],
    }
