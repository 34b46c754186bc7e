"""Standings for the page: whose games they are of, and how often they are made."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from arena.dashboard import league
from arena.dashboard.league import LiveStandings, Moment
from arena.figures import Figures
from arena.report import report, tables
from tests.arena.random_runs import RUN, random_run


class Clock:
    """What the standings take for `time.monotonic`; making them takes `cost`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cost = 0.0
        self.made = 0
        self.threads: set[int] = set()

    def monotonic(self) -> float:
        return self.now

    def tables(self, *given: Any) -> dict[str, Any]:
        self.now += self.cost
        self.made += 1
        self.threads.add(threading.get_ident())
        return tables(*given)


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(league, "time", clock)
        patch.setattr(league, "tables", clock.tables)
        yield clock


def a_run(num_matches: int = 12) -> Figures:
    """Figures of a run in which some games have ended."""
    run = random_run(3, num_matches=num_matches, num_steps=1500)
    figures = Figures(RUN, run.matches, exact=False)
    figures.add(row for given in run.given for row in given.rows)
    assert len(figures.finished) > 3
    return figures


async def told(standings: LiveStandings, known: int | None = None, *, is_over: bool = False) -> Any:
    answer = await standings.tell(known, is_over=is_over)
    return None if answer is None else json.loads(answer)


def test_they_are_the_report_s_tables() -> None:
    figures = a_run()
    data, whole = Moment.of(figures).standings(), report(figures)
    assert data["games"] == len(whole["results"])
    for table in ("standings", "pairings", "ratings"):
        assert len(data[table]) == len(whole[table])
    for row, exact in zip(data["standings"], whole["standings"], strict=True):
        assert row["name"] == exact["name"]
        assert row["forfeits"] == exact["forfeits"]
        assert row["elo"] == pytest.approx(exact["elo"], abs=1e-4)
    assert [m["match"] for m in data["unrated"]] == [
        m["match"] for m in whole["results"] if not m["is_rated"]
    ]


async def test_they_are_made_off_the_loop_and_again_only_when_a_game_has_ended(
    clock: Clock,
) -> None:
    figures = a_run()
    standings = LiveStandings(figures)
    first = await told(standings)
    assert first["games"] == len(figures.finished)
    clock.now += 1000
    assert await told(standings) == first
    assert await told(standings, first["games"]) is None
    assert clock.made == 1
    assert threading.get_ident() not in clock.threads
    figures.finished.pop()
    assert (await told(standings, first["games"]))["games"] == first["games"] - 1
    assert clock.made == 2


async def test_all_who_ask_at_once_get_one_making(clock: Clock) -> None:
    standings = LiveStandings(a_run())
    answers = await asyncio.gather(*(told(standings) for _ in range(5)))
    assert clock.made == 1
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize(("cost", "rest"), [(0.01, 5.0), (2.0, 100.0)])
async def test_dear_ones_are_made_seldom(clock: Clock, cost: float, rest: float) -> None:
    figures = a_run()
    standings = LiveStandings(figures)
    clock.cost = cost
    old = await told(standings)
    figures.finished.pop()
    clock.now += rest - 0.1
    assert await told(standings) == old
    assert clock.made == 1
    clock.now += 0.2
    assert await told(standings) != old


async def test_the_last_game_of_a_run_is_not_waited_for(clock: Clock) -> None:
    figures = a_run()
    standings = LiveStandings(figures)
    clock.cost = 60.0
    old = await told(standings)
    figures.finished.pop()
    assert (await told(standings))["games"] == old["games"]
    assert (await told(standings, is_over=True))["games"] == old["games"] - 1
