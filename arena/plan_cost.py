"""Rent or buy, with the hours that past runs kept an engine busy."""

import json
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
    week = None if ask.runs is None else week_of(ask.runs)
    hours = ask.hours_per_week
    if hours is None and week is not None:
        hours = week.hours
    try:
        prices = Prices(ask.price, ask.running_per_hour)
        offers = [
            {
                "rent_per_hour": rent,
                "break_even_hours": (even := break_even_hours(prices, rent)),
                "months": months_to(even, hours),
            }
            for rent in ask.rents
        ]
    except ValueError as error:
        raise ConfigError(f"--price, --running, --rent: {error}") from None
    return {
        "price": ask.price,
        "running_per_hour": ask.running_per_hour,
        "is_illustration": ask.price == CARD_PRICE and ask.rents == RENTS_PER_HOUR,
        "offers": offers,
        "hours_per_week": hours,
        "measured_days": None if week is None or ask.hours_per_week is not None else week.days,
        "rent_wins": list(RENT_WINS),
        "buy_wins": list(BUY_WINS),
    }


def week_of(folder: Path) -> Week:
    """Use of an engine in the last recorded week of a run, or of a folder of runs.

    StoreError where there is none, or nothing was asked in it.
    """
    if (folder / "run.db").exists():
        runs = [folder]
    else:
        runs = sorted(path.parent for path in folder.glob("*/run.db"))
    if not runs:
        raise StoreError(f"{folder}: holds no run; name a run's folder, or a folder of runs")
    week = last_week(span for run in runs for span in _spans(run))
    if week is None:
        raise StoreError(f"{folder}: no engine was asked in its runs; name others")
    return week


def _spans(run: Path) -> list[tuple[float, float]]:
    """When requests were in an engine, in seconds since 1970."""
    records = store.read(run)
    starts = [_start(event) for event in records.events if event.kind == "process_start"]
    spans = []
    for row in records.attempts:
        if row.engine is None or row.admitted is None or row.done is None:
            continue
        shift = max((s for s in starts if s[0] <= row.admitted), default=None)
        if shift is not None:
            spans.append((row.admitted + shift[1], row.done + shift[1]))
    return spans


def _start(event: EventRow) -> tuple[float, float]:
    """From which run time on a process played, and seconds from run time to wall time."""
    detail = json.loads(event.detail_json)
    wall = datetime.strptime(detail["wall"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    return detail["offset_s"], wall - detail["offset_s"]
