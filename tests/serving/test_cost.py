"""Rent or buy: the reference text's range, no break-even said plainly, hours as they were used."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.cost import (
    CARD_PRICE,
    POWER_PER_HOUR,
    RENTS_PER_HOUR,
    WEEK_S,
    Prices,
    break_even_hours,
    last_week,
    months_to,
)

HOUR, DAY = 3600.0, 86_400.0


def test_hours_are_price_over_what_an_hour_saves() -> None:
    assert break_even_hours(Prices(600, 0.1), 0.6) == pytest.approx(1200)


def test_the_illustration_breaks_even_near_300_to_1000_hours() -> None:
    prices = Prices(CARD_PRICE, POWER_PER_HOUR)
    hours = [break_even_hours(prices, rent) for rent in RENTS_PER_HOUR]
    assert hours == sorted(hours, key=lambda value: -(value or 0))
    assert [round(value or 0) for value in hours] == [1111, 526, 256]


@pytest.mark.parametrize("rent", [0.05, 0.1])
def test_no_break_even_where_an_own_hour_costs_as_much(rent: float) -> None:
    assert break_even_hours(Prices(500, 0.1), rent) is None
    assert months_to(None, 10) is None


def test_months_follow_from_the_hours_of_a_week() -> None:
    assert months_to(1000, 23) == pytest.approx(10, rel=0.001)
    assert months_to(1000, None) is None
    assert months_to(1000, 0) is None


@pytest.mark.parametrize(
    ("price", "running", "rent"),
    [(-1, 0, 1), (1, -1, 1), (math.inf, 0, 1), (math.nan, 0, 1), (1, 0, 0), (1, 0, math.nan)],
)
def test_prices_that_are_none_are_refused(price: float, running: float, rent: float) -> None:
    with pytest.raises(ValueError, match="is none; give"):
        break_even_hours(Prices(price, running), rent)


def test_requests_at_once_are_one_hour_of_use() -> None:
    week = last_week([(0, HOUR), (0, HOUR), (HOUR / 2, 2 * HOUR), (DAY, DAY + HOUR)])
    assert week is not None
    assert week.hours == 3
    assert week.days == pytest.approx(25 / 24)
    assert not week.is_whole


def test_what_lies_before_the_last_week_does_not_count() -> None:
    week = last_week([(0, 5 * HOUR), (WEEK_S, WEEK_S + HOUR)])
    assert week is not None
    # the first four hours still reach into it
    assert week.hours == 5
    assert week.days == 7
    assert week.is_whole


def test_no_spans_make_no_week() -> None:
    assert last_week([]) is None
    assert last_week([(5, 5)]) is None


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e5)), min_size=1))
def test_no_week_has_more_hours_than_it_is_long(spans: list[tuple[float, float]]) -> None:
    week = last_week((start, start + length) for start, length in spans)
    if week is not None:
        assert 0 <= week.hours <= week.days * 24 + 1e-6
