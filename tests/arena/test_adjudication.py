"""Games are ended by score only where both players told one, and agree long enough."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena.adjudication import AdjudicationRules, adjudicate
from games import Result, Side, Termination

NAMES = ("White", "Black")
DRAW = AdjudicationRules(draw_score_cp=10, draw_moves=2, draw_from_ply=6)
WIN = AdjudicationRules(resign_score_cp=500, resign_moves=2)


def judged(rules: AdjudicationRules, evals: Sequence[int | None], first: Side = 0) -> Result | None:
    return adjudicate(rules, evals, first, NAMES)


@pytest.mark.parametrize(
    ("evals", "is_drawn"),
    [
        ([0, 0, 5, -10, 10, 3], True),
        ([900, -900, 5, -10, 10, 3], True),
        ([0, 0, 0, 0, 0], False),  # too early
        ([0, 0, 0, 11, 0, 0], False),
        ([0, 0, 0, None, 0, 0], False),
    ],
)
def test_a_draw(evals: list[int | None], is_drawn: bool) -> None:
    found = judged(DRAW, evals)
    assert (found is not None) == is_drawn
    if found is not None:
        assert (found.winner, found.termination) == (None, Termination.ADJUDICATED_DRAW)
        assert "for 2 moves neither side saw more than 10 centipawns" in found.detail


@pytest.mark.parametrize(
    ("evals", "first", "winner"),
    [
        ([600, -600, 700, -500], 0, 0),
        ([-600, 600, -700, 500], 0, 1),
        ([0, 600, -600, 700, -500], 0, 1),  # the row begins with Black
        ([600, -600, 700, -500], 1, 1),  # Black moved first
        ([600, -600, 700, -499], 0, None),
        ([600, -600, 499, -600], 0, None),
        ([600, 600, 600, 600], 0, None),  # both think they win
        ([-600, -600, -600, -600], 0, None),
        ([600, None, 700, -500], 0, None),
        ([700, -500], 0, None),
    ],
)
def test_a_win_needs_both(evals: list[int | None], first: Side, winner: Side | None) -> None:
    found = judged(WIN, evals, first)
    if winner is None:
        assert found is None
    else:
        assert found is not None
        assert (found.winner, found.termination) == (winner, Termination.ADJUDICATED_WIN)
        assert NAMES[1 - winner] in found.detail


@given(st.lists(st.none() | st.integers(-1000, 1000), max_size=20))
def test_nothing_is_judged_unless_it_is_asked_for(evals: list[int | None]) -> None:
    assert judged(AdjudicationRules(), evals) is None


@given(st.lists(st.integers(-1000, 1000), min_size=4, max_size=20))
def test_the_other_side_first_turns_the_result(evals: list[int]) -> None:
    one, two = (judged(WIN, evals, first) for first in (0, 1))
    assert (one is None) == (two is None)
    if one is not None and two is not None:
        assert one.winner != two.winner
