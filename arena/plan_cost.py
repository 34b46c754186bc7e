"""Rent or buy, with the hours that past runs kept an engine busy."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arena import store
from arena.config import ConfigError
from arena.store import EventRow, StoreError
from serving.cost import (
    BUY_WINS,
    CARD_PRICE,
    POWER_PER_HOUR,
    RENT_WINS,
    RENTS_PER_HOUR,
    Prices,
    Week,
    break_even_hours,
    last_week,
    months_to,
)


@dataclass(frozen=True, slots=True)
class CostAsk:
    """Prices and hours, in one currency."""

    price: float = CARD_PRICE
    rents: tuple[float, ...] = RENTS_PER_HOUR
    running_per_hour: float = POWER_PER_HOUR
    hours_per_week: float | None = None
    runs: Path | None = None


def rent_or_buy(ask: CostAsk) -> dict[str, Any]:
    """Hours and months to break even at each rent; ConfigError for a price that is none."""
    runs = None if ask.runs is None else runs_of(ask.runs)
    week, hours = None, ask.hours_per_week
    if runs is not None and hours is None:
        week, hours = runs.week, runs.week.hours
    is_whole = week is None or week.is_whole
    try:
        prices = Prices(ask.price, ask.running_per_hour)
        offers = [
            {
                "rent_per_hour": rent,
                "break_even_hours": (even := break_even_hours(prices, rent)),
                "months": months_to(even, hours) if is_whole else None,
            }
            for rent in ask.rents
        ]
    except ValueError as error:
        raise ConfigError(f"--price, --running, --rent: {error}") from None
    return {
        "price": ask.price,
        "running_per_hour": ask.running_per_hour,
        "illustrations": list(_illustrations(ask)),
        "offers": offers,
        "hours_per_week": hours,
        "measured_days": None if week is None else week.days,
        "is_whole_week": None if week is None else week.is_whole,
        "runs_left_out": [] if runs is None else list(runs.left_out),
        "rent_wins": list(RENT_WINS),
        "buy_wins": list(BUY_WINS),
    }


def _illustrations(ask: CostAsk) -> Iterator[str]:
    """What of the prices is nobody's own."""
    if ask.price == CARD_PRICE:
        yield "the price"
    if ask.rents == RENTS_PER_HOUR:
        yield "the rents"
    if ask.running_per_hour == POWER_PER_HOUR:
        yield "the cost to run"


@dataclass(frozen=True, slots=True)
class UsedWeek:
    """Use of an engine in the last recorded week of runs."""

    week: Week
    left_out: tuple[str, ...]
    """Runs that cannot be read, and why."""


def runs_of(folder: Path) -> UsedWeek:
    """Of a run, or of a folder of runs; of those, what cannot be read is left out and named.

    StoreError where there is none that can, or nothing was asked in them.
    """
    spans: list[tuple[float, float]] = []
    left_out: list[str] = []
    runs = _runs(folder)
    for run in runs:
        try:
            spans += _spans(run)
        except StoreError as error:
            left_out.append(str(error))
    if len(left_out) == len(runs):
        raise StoreError(left_out[0])
    week = last_week(spans)
    if week is None:
        raise StoreError(f"{folder}: no engine was asked in its runs; name others")
    return UsedWeek(week, tuple(left_out))


def _runs(folder: Path) -> list[Path]:
    try:
        if (folder / "run.db").exists():
            return [folder]
        runs = sorted(path.parent for path in folder.glob("*/run.db"))
    except OSError as error:
        raise StoreError(f"--runs: {str(folder)[:200]} cannot be read ({error.strerror})") from None
    if not runs:
        raise StoreError(f"{folder}: holds no run; name a run's folder, or a folder of runs")
    return runs


_MOST_RUN_S = 10 * 366 * 86_400.0
"""Ten years: a run's clock reads less."""


def _spans(run: Path) -> list[tuple[float, float]]:
    """When requests were in an engine, in seconds since 1970."""
    records = store.read(run)
    try:
        starts = [_start(event) for event in records.events if event.kind == "process_start"]
        spans = []
        for row in records.attempts:
            if row.engine is None or row.admitted is None or row.done is None:
                continue
            if not 0 <= row.admitted <= row.done <= _MOST_RUN_S:
                raise ValueError("a request's times are none")
            shift = max((s for s in starts if s[0] <= row.admitted), default=None)
            if shift is not None:
                spans.append((row.admitted + shift[1], row.done + shift[1]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(
            f"{run / 'run.db'}: its times cannot be read ({type(error).__name__}: {error})"
        ) from None
    return spans


def _start(event: EventRow) -> tuple[float, float]:
    """From which run time on a process played, and seconds from run time to wall time."""
    detail = json.loads(event.detail_json)
    wall = datetime.strptime(detail["wall"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    offset = detail["offset_s"]
    if not 0 <= offset <= _MOST_RUN_S:
        raise ValueError("a process's start is none")
    return offset, wall - offset
