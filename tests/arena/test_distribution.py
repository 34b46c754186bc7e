"""Values in five numbers, exactly and from a sketch."""

import json
import math
import statistics
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arena.distribution import (
    ORIGIN_MS,
    PER_OCTAVE,
    Exact,
    Sketch,
    edge_ms,
    percentile,
    summary,
    weighted_summary,
)

MILLISECONDS = st.floats(1e-4, 1e7)
"""From a tenth of a microsecond to three hours."""
MANY = st.lists(MILLISECONDS, min_size=1, max_size=200)


def sketch(values: Iterable[float]) -> Sketch:
    made = Sketch()
    for value in values:
        made.add(value)
    return made


def nearest_rank(values: Iterable[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[-(-len(ordered) * percent // 100) - 1]


def state(one: Sketch) -> tuple[dict[int, int], int, float]:
    return dict(one.bins), one.count, one.greatest


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60))
def test_percentiles_interpolate_as_statistics_does(values: list[int]) -> None:
    ordered = sorted(float(v) for v in values)
    if len(ordered) > 1:
        cuts = statistics.quantiles(ordered, n=100, method="inclusive")
        assert percentile(ordered, 0.95) == pytest.approx(cuts[94])
    assert summary(ordered)["max"] == ordered[-1]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=20))
def test_a_weighted_mean_is_the_mean_of_the_repeated_values(pairs: list[tuple[int, int]]) -> None:
    repeated = [value for value, weight in pairs for _ in range(weight)]
    weighted = weighted_summary((float(v), w) for v, w in pairs)
    assert weighted["mean"] == pytest.approx(sum(repeated) / len(repeated))
    assert weighted["max"] == max(repeated)
    assert weighted["p95"] == nearest_rank(repeated, 95)


@given(MANY)
@example([3.0] * 20 + [7.0])
@example([1e-4])
def test_a_sketch_s_percentiles_are_right_within_1_2_percent(values: list[float]) -> None:
    told = sketch(values).summary()
    for percent in (50, 95, 99):
        exact = percentile(sorted(values), percent / 100)
        assert told[f"p{percent}"] == pytest.approx(exact, rel=0.012)
    assert told["max"] == max(values)
    assert told["mean"] == pytest.approx(math.fsum(values) / len(values), rel=1e-12)


@given(MANY)
def test_a_sketch_s_percentiles_are_in_order_and_never_above_the_greatest(
    values: list[float],
) -> None:
    told = sketch(values).summary()
    ordered = [told["p50"], told["p95"], told["p99"], told["max"]]
    assert ordered == sorted(ordered, key=lambda value: value or 0.0)


@given(st.lists(st.floats(-1e6, 1e7), min_size=1, max_size=50))
def test_zero_and_less_count_as_next_to_nothing(values: list[float]) -> None:
    """A clock's rounding makes a harness time a little less than 0."""
    made = sketch(values)
    told = made.summary()
    assert told["mean"] == pytest.approx(math.fsum(values) / len(values), rel=1e-9, abs=1e-9)
    assert told["max"] == max(0.0, *values)
    assert within(made, -20) == sum(value <= edge_ms(-20 * PER_OCTAVE) for value in values)
    json.dumps(told, allow_nan=False)


@given(MANY, MANY)
def test_merged_sketches_are_the_sketch_of_all_values(one: list[float], two: list[float]) -> None:
    merged, other = sketch(one), sketch(two)
    merged.merge(other)
    whole = sketch([*one, *two])
    assert state(merged) == state(whole)
    assert merged.total == pytest.approx(whole.total)
    assert state(other) == state(sketch(two))


def within(made: Sketch, octaves: int) -> int:
    """Values of at most 10 ms x 2^octaves: a bin of Prometheus' histograms."""
    return sum(count for number, count in made.bins.items() if number <= octaves * PER_OCTAVE)


EDGES = st.integers(-12, 17).map(lambda octaves: ORIGIN_MS * 2.0**octaves)


@given(
    st.lists(
        EDGES
        | MILLISECONDS
        | st.tuples(EDGES, st.sampled_from((1 - 1e-9, 1 + 1e-9))).map(math.prod)
    ),
    st.integers(-12, 17),
)
def test_values_up_to_an_octave_s_edge_are_counted_exactly(
    values: list[float], octaves: int
) -> None:
    assert within(sketch(values), octaves) == sum(v <= ORIGIN_MS * 2.0**octaves for v in values)


@given(MANY, st.sampled_from((1, 2, 4, 8, 16, 32)))
def test_a_histogram_holds_every_value_between_its_edges(
    values: list[float], bins_per_octave: int
) -> None:
    edges, counts = sketch(values).histogram(bins_per_octave)
    assert len(edges) == len(counts) + 1
    assert edges == sorted(edges)
    assert sum(counts) == len(values)
    assert counts[0] > 0
    assert counts[-1] > 0
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        sure = sum(low * (1 + 1e-9) < value <= high * (1 - 1e-9) for value in values)
        perhaps = sum(low * (1 - 1e-9) <= value <= high * (1 + 1e-9) for value in values)
        assert sure <= count <= perhaps


def test_nothing_is_unknown() -> None:
    nothing = dict.fromkeys(("mean", "p50", "p95", "p99", "max"))
    assert Sketch().summary() == Exact().summary() == weighted_summary([]) == nothing
    assert Sketch().histogram() == ([], [])


def test_a_sketch_does_not_grow_with_its_values() -> None:
    made = sketch(1.0 + n % 1000 for n in range(50_000))
    assert made.count == 50_000
    assert len(made.bins) <= 10 * PER_OCTAVE + 1


@given(MANY)
def test_exact_values_make_the_same_sketch(values: list[float]) -> None:
    exact = Exact()
    for value in values:
        exact.add(value)
    assert exact.summary() == summary(values)
    assert state(exact.sketch()) == state(sketch(values))
    own = sketch(values)
    assert own.sketch() is own
