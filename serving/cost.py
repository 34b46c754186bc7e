"""Rent or buy: when a card has paid for itself, and how long that takes at the hours it is used.

Prices are the caller's, in one currency. Pure. Negative or endless numbers raise ValueError.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

WEEKS_PER_MONTH = 365.25 / 12 / 7
WEEK_S = 7 * 86_400.0

CARD_PRICE = 500.0
RENTS_PER_HOUR = (0.5, 1.0, 2.0)
POWER_PER_HOUR = 0.05
"""Illustrations, not quotations: a used 24 GB card at a few hundred dollars, one rented at $0.50 to
$2 an hour, a third of a kilowatt at 15 cents a kWh. Give your own."""

RENT_WINS = ("bursts: hours that are not used cost nothing", "80 GB models and more, at once")
BUY_WINS = (
    "privacy: no prompt leaves the house",
    "latency: no network, no queue of others",
    "no rate limits",
)
"""What each side wins by beside the price."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What a card costs to own."""

    price: float
    running_per_hour: float
    """Power and hosting while it is used."""

    def __post_init__(self) -> None:
        for name, value in (("price", self.price), ("running cost", self.running_per_hour)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}: {value:g} is none; give 0 or more")


def break_even_hours(prices: Prices, rent_per_hour: float) -> float | None:
    """Hours of use after which buying is the cheaper: price / (rent - running cost). None: never,
    for an hour of one's own costs as much as a rented one."""
    if not 0 < rent_per_hour < math.inf:
        raise ValueError(f"rent: {rent_per_hour:g} an hour is none; give more than 0")
    saved = rent_per_hour - prices.running_per_hour
    return prices.price / saved if saved > 0 else None


def months_to(hours: float | None, hours_per_week: float | None) -> float | None:
    """Months until so many hours are used; None where there is no such day, or no week known."""
    if hours is None or not hours_per_week:
        return None
    return hours / (hours_per_week * WEEKS_PER_MONTH)


@dataclass(frozen=True, slots=True)
class Week:
    """The last seven days of what was recorded."""

    hours: float
    """In which at least one request was in an engine."""
    days: float
    """That the records reach back, at most 7."""

    @property
    def is_whole(self) -> bool:
        return self.days >= 6.99


def last_week(spans: Iterable[tuple[float, float]]) -> Week | None:
    """Of spans of use, in seconds of any one clock; spans that overlap count once. None: no spans.

    The week ends with the last span, not now: a card that has idled since is not seen to idle.
    """
    ordered = sorted((start, end) for start, end in spans if end > start)
    if not ordered:
        return None
    last = max(end for _, end in ordered)
    since = last - WEEK_S
    used, reached = 0.0, since
    for start, end in ordered:
        begin = max(start, reached)
        if end > begin:
            used += end - begin
            reached = end
    days = min(last - ordered[0][0], WEEK_S) / 86_400
    return Week(used / 3600, days)
