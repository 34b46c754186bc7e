"""Whose an answer is that is not whole."""

from itertools import count, takewhile

import pytest

from serving.budget import used_its_time

TOKEN_S = 0.05


def tokens(begin: float, end: float) -> list[float]:
    """When a message came, one for each token."""
    return list(takewhile(lambda at: at < end, (begin + n * TOKEN_S for n in count())))


@pytest.mark.parametrize("deadline_s", [1.0, 4.0, 30.0])
@pytest.mark.parametrize(
    ("begun", "pauses", "is_own"),
    [
        (0.0, (), True),
        (0.04, (), True),
        (0.4, (), False),
        # an engine that stands still, be it before the first token, amid the answer or at its end
        (0.0, ((0.0, 0.6),), False),
        (0.0, ((0.2, 0.8),), False),
        (0.0, ((0.4, 1.0),), False),
        (0.2, ((0.3, 0.7), (0.75, 0.95)), False),
    ],
)
def test_a_deadline_is_the_players_where_its_answer_was_computed_all_the_time(
    deadline_s: float, begun: float, pauses: tuple[tuple[float, float], ...], is_own: bool
) -> None:
    """Times are in parts of the deadline."""
    heard = [
        at
        for at in tokens(begun * deadline_s, deadline_s)
        if not any(since < at / deadline_s < until for since, until in pauses)
    ]
    assert used_its_time(begun * deadline_s, heard, deadline_s, deadline_s) is is_own


def test_steps_that_take_half_a_second_are_no_pause() -> None:
    assert used_its_time(0.1, [0.5 * n for n in range(1, 60)], 30.0, 30.0)


def test_what_is_heard_after_the_deadline_counts_for_nothing() -> None:
    assert not used_its_time(0.0, [0.5, 3.5, 3.6], 2.0, 2.0)
