"""Reserved and wasted: the figures of 20,000 requests, to the token."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.batching import NAMED_LENGTHS, parse_lengths
from serving.paging import Reservation, reserve

REQUESTS, LIMIT, USED = 20_000, 4096, 11_336_014
RESERVED = {4096: 81_920_000, 1024: 26_132_480, 256: 13_992_448, 64: 11_958_528, 16: 11_486_464}
WASTED = {4096: 86.2, 1024: 56.6, 256: 19.0, 64: 5.2, 16: 1.3}
"""Percent."""
FIT = {4096: 30, 1024: 94, 256: 175, 64: 205, 16: 213}
MEMORY_TOKENS = (60 << 30) // (1 << 19)
"""60 GB at 0.5 MB a token."""


def evenly(total: int, count: int) -> list[int]:
    """Whole numbers that sum to `total`."""
    return [total * (at + 1) // count - total * at // count for at in range(count)]


def lengths_with_the_totals() -> list[int]:
    """Lengths of which every total above is true: a length less one is a number with a digit for
    each unit, and each total says what one digit sums to."""
    units = sorted(RESERVED, reverse=True)
    counts = [RESERVED[unit] // unit - REQUESTS for unit in units] + [USED - REQUESTS]
    sizes = [*units, 1]
    digits = []
    for place in range(1, len(sizes)):
        factor = sizes[place - 1] // sizes[place]
        digits.append(evenly(counts[place] - counts[place - 1] * factor, REQUESTS))
    return [
        1 + sum(digit * size for digit, size in zip(each, sizes[1:], strict=True))
        for each in zip(*digits, strict=True)
    ]


@pytest.mark.parametrize("unit", RESERVED)
def test_the_totals_are_exact(unit: int) -> None:
    lengths = lengths_with_the_totals()
    assert (len(lengths), sum(lengths), max(lengths) <= LIMIT) == (REQUESTS, USED, True)
    row = reserve(lengths, unit)
    assert row == Reservation(unit, REQUESTS, USED, RESERVED[unit])
    assert round(row.wasted_share * 100, 1) == WASTED[unit]
    assert row.fit(MEMORY_TOKENS) == FIT[unit]


def test_the_shipped_lengths_come_within_a_percent_of_all_totals() -> None:
    lengths = parse_lengths("talks").draw(REQUESTS, Random("lengths/0"))
    assert sum(lengths) == pytest.approx(USED, rel=0.01)
    for unit, total in RESERVED.items():
        assert reserve(lengths, unit).reserved == pytest.approx(total, rel=0.01)


def test_and_not_by_luck_with_one_seed() -> None:
    """The distribution's own mean, over many draws, is as near."""
    talks = parse_lengths(NAMED_LENGTHS["talks"])
    lengths = talks.draw(REQUESTS * 20, Random("many"))
    assert sum(lengths) / 20 == pytest.approx(USED, rel=0.01)
    for unit, total in RESERVED.items():
        assert reserve(lengths, unit).reserved / 20 == pytest.approx(total, rel=0.01)
    assert talks.mean == pytest.approx(USED / REQUESTS, rel=0.01)


@given(st.lists(st.integers(1, 5000), min_size=1), st.integers(1, 5000))
def test_less_is_wasted_than_a_unit_a_request(lengths: list[int], unit: int) -> None:
    row = reserve(lengths, unit)
    assert row.used <= row.reserved < row.used + unit * len(lengths)
    assert row.reserved % unit == 0
    assert reserve(lengths, 1).wasted_share == 0


@pytest.mark.parametrize(("lengths", "unit"), [([], 16), ([0], 16), ([5], 0)])
def test_nothing_to_reserve_is_refused(lengths: list[int], unit: int) -> None:
    with pytest.raises(ValueError, match="give"):
        reserve(lengths, unit)
