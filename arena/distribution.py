"""Values in five numbers: exactly, or from a sketch whose size does not grow with a run."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

Summary = dict[str, float | None]
"""`{mean, p50, p95, p99, max}`; all None of no values."""

PER_OCTAVE = 32
"""Sketch bins from a value to its double: neighbours differ by 2.2 %."""
ORIGIN_MS = 10.0
"""A bin's edge, and so are its doubles (OpenTelemetry's 0.01 s x 2 series) and its halves."""
_LEAST = -20 * PER_OCTAVE
_LEAST_MS = ORIGIN_MS / 2**20


class Distribution(Protocol):
    """Values that add up to a summary."""

    def add(self, value: float) -> None: ...
    def summary(self) -> Summary: ...
    def sketch(self) -> "Sketch": ...


class Exact:
    """Keeps every value."""

    def __init__(self) -> None:
        self._values: list[float] = []

    def add(self, value: float) -> None:
        self._values.append(value)

    def summary(self) -> Summary:
        return summary(self._values)

    def sketch(self) -> "Sketch":
        made = Sketch()
        for value in self._values:
            made.add(value)
        return made


class Sketch:
    """Counts values in bins that grow by 2^(1/32): percentiles are right within 1.1 %, mean and
    greatest value exactly. Values are milliseconds; those below 10 ns count as 10 ns."""

    __slots__ = ("bins", "count", "greatest", "total")

    def __init__(self) -> None:
        self.bins: Counter[int] = Counter()
        """By number: bin n holds values over 10 ms x 2^((n-1)/32) up to 10 ms x 2^(n/32)."""
        self.count = 0
        self.total = 0.0
        self.greatest = 0.0

    def add(self, value: float) -> None:
        number = _LEAST
        if value > _LEAST_MS:
            number = math.ceil(math.log2(value / ORIGIN_MS) * PER_OCTAVE)
        bins = self.bins
        bins[number] = bins.get(number, 0) + 1
        self.count += 1
        self.total += value
        if value > self.greatest:
            self.greatest = value

    def merge(self, other: "Sketch") -> None:
        self.bins.update(other.bins)
        self.count += other.count
        self.total += other.total
        self.greatest = max(self.greatest, other.greatest)

    def sketch(self) -> "Sketch":
        return self

    def summary(self) -> Summary:
        if not self.count:
            return summary(())
        ordered = sorted(self.bins.items())
        at = {share: self._percentile(ordered, share) for share in (0.5, 0.95, 0.99)}
        mean = self.total / self.count
        return {
            "mean": mean,
            "p50": at[0.5],
            "p95": at[0.95],
            "p99": at[0.99],
            "max": self.greatest,
        }

    def _percentile(self, ordered: Sequence[tuple[int, int]], share: float) -> float:
        """Between the order statistics around it, as `percentile` has it."""
        place = share * (self.count - 1)
        below = self._value(ordered, math.floor(place))
        above = self._value(ordered, math.ceil(place))
        return below + (above - below) * (place - math.floor(place))

    def _value(self, ordered: Sequence[tuple[int, int]], index: int) -> float:
        """About the value at a place of the ordered values."""
        for number, count in ordered:
            index -= count
            if index < 0:
                return min(edge_ms(number - 0.5), self.greatest)
        return self.greatest

    def histogram(self, bins_per_octave: int = 8) -> tuple[list[float], list[int]]:
        """Edges in milliseconds and the counts between them (one fewer); both empty of nothing."""
        step = PER_OCTAVE // bins_per_octave
        wide: Counter[int] = Counter()
        for number, count in self.bins.items():
            wide[-(-number // step)] += count
        if not wide:
            return [], []
        first, last = min(wide), max(wide)
        edges = [edge_ms(number * step) for number in range(first - 1, last + 1)]
        return edges, [wide[number] for number in range(first, last + 1)]


def edge_ms(number: float) -> float:
    """The upper edge of a sketch's bin, milliseconds."""
    return ORIGIN_MS * math.exp2(number / PER_OCTAVE)


def summary(values: Iterable[float | None]) -> Summary:
    """Mean, percentiles (linear interpolation between order statistics) and greatest value."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return dict.fromkeys(("mean", "p50", "p95", "p99", "max"))
    return {
        "mean": math.fsum(known) / len(known),
        "p50": percentile(known, 0.50),
        "p95": percentile(known, 0.95),
        "p99": percentile(known, 0.99),
        "max": known[-1],
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the ordered values lie, as numpy's default method."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def weighted_summary(pairs: Iterable[tuple[float, float]]) -> Summary:
    """`summary` of values that each stand for a number of equal ones, but for percentiles: they are
    the value at the nearest rank, not between two, as a number of requests in a step is whole."""
    known = sorted(pairs)
    total = sum(weight for _, weight in known)
    if not total:
        return summary(())
    mean = math.fsum(value * weight for value, weight in known) / total
    at = {share: _weighted_percentile(known, total * share) for share in (0.5, 0.95, 0.99)}
    return {"mean": mean, "p50": at[0.5], "p95": at[0.95], "p99": at[0.99], "max": known[-1][0]}


def _weighted_percentile(ordered: Sequence[tuple[float, float]], rank: float) -> float:
    seen = 0.0
    for value, weight in ordered:
        seen += weight
        if seen >= rank:
            return value
    return ordered[-1][0]
