"""The standings of a run as the page shows them: the report's tables, made anew as games end."""

import asyncio
import time
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from arena.contest_report import contest, sprt
from arena.dashboard.server import encode
from arena.figures import Figures
from arena.report import Asked, Ended, asked_of, ended_matches, result, rows_of, tables, unrated_of
from arena.store import MatchRow

LEAST_S = 5.0
"""Seconds between two makings at least."""
REST = 50
"""For each second that a making took, so many pass before the next: 2 % of a core at most."""


class Moment(NamedTuple):
    """What the standings at one moment are made of; nothing in it changes any more."""

    ended: list[Ended]
    unrated: list[dict[str, Any]]
    asked: Asked
    config: Mapping[str, Any]
    rows: list[MatchRow]
    contest: Mapping[str, Any]

    @classmethod
    def of(cls, figures: Figures) -> "Moment":
        ended = ended_matches(figures)
        unrated = [figures.matches[match.row.id] for match in ended if not match.is_rated]
        return cls(
            ended=ended,
            unrated=[
                {**result(match, is_rated=False), "number": match.row.number} for match in unrated
            ],
            asked=asked_of(figures),
            config=figures.config,
            rows=rows_of(figures),
            contest=deepcopy(contest(figures)),
        )

    def standings(self) -> dict[str, Any]:
        """The report's tables, the number of games they are of, and the unrated ones among these.
        Slow: see `report.tables`."""
        told: dict[str, Any] = _rounded(
            {
                **tables(self.ended, self.asked, self.contest),
                "sprt": sprt(self.config, self.rows, self.asked.null_names, unrated_of(self.ended)),
                "tournament": self.contest,
                "unrated": self.unrated,
            }
        )
        return {"games": len(self.ended), **told}


def _rounded(value: Any) -> Any:
    """A fit's digits beyond the fourth say nothing, and there may be thousands of numbers."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


class LiveStandings:
    """Standings of a run under way: made in a thread when somebody asks, more games have ended and
    enough time has passed; all who ask meanwhile get the same."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._lock = asyncio.Lock()  # one maker; the others find it made
        self._games = -1
        self._told = b""
        self._next_at = 0.0

    async def tell(self, known: int | None, *, is_over: bool) -> bytes | None:
        """As JSON; None to one who knows those of as many games. After the end of a run none are
        left out however soon it is asked."""
        async with self._lock:
            games = len(self._figures.finished)
            if games != self._games and (is_over or time.monotonic() >= self._next_at):
                moment = Moment.of(self._figures)
                began = time.monotonic()
                self._told, _ = await asyncio.to_thread(lambda: encode(moment.standings(), False))
                now = time.monotonic()
                self._games = games
                self._next_at = now + max(LEAST_S, REST * (now - began))
        return None if known == self._games else self._told
