"""Clocks: the sums of each kind, the boundary, and what a ply is charged."""

import math
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents import Attempt, Fault
from arena.clock import ClockRules, could_fall, could_leave, fell, spent_seconds
from arena.config import ConfigError, parse
from serving import Finish, Reply, Timings, Usage

SECONDS = st.floats(0, 1000, allow_nan=False).map(lambda s: round(s, 3))
RULES = st.one_of(
    st.builds(ClockRules, st.just("move"), st.floats(0.1, 600)),
    st.builds(ClockRules, st.just("fischer"), st.floats(0.1, 600), st.floats(0, 30)),
    st.builds(
        ClockRules,
        st.just("byoyomi"),
        st.integers(1, 600).map(float),
        st.just(0.0),
        st.integers(1, 60).map(float),
        st.integers(1, 10),
    ),
)


def test_a_move_has_its_time_each_time() -> None:
    rules = ClockRules("move", 10.0)
    assert rules.start_s == 10.0
    assert rules.after(10.0, 10.0) == 10.0
    assert rules.after(10.0, 10.001) is None


def test_fischer_adds_after_each_move_in_time() -> None:
    rules = ClockRules("fischer", 60.0, 2.0)
    assert rules.after(60.0, 5.0) == 57.0
    assert rules.after(57.0, 57.0) == 2.0
    assert rules.after(2.0, 2.5) is None


@pytest.mark.parametrize(
    ("left_s", "spent_s", "after_s"),
    [
        (90.0, 0.0, 90.0),  # 60 of base and three periods of 10
        (90.0, 60.0, 30.0),  # the base exactly
        (90.0, 65.0, 30.0),  # into the first period, which stays whole
        (90.0, 70.0, 30.0),
        (90.0, 70.5, 20.0),  # overran one
        (90.0, 90.0, 10.0),
        (90.0, 90.1, None),
        (30.0, 9.9, 30.0),
        (30.0, 10.1, 20.0),
        (30.0, 20.1, 10.0),
        (10.0, 10.0, 10.0),
        (10.0, 10.1, None),
    ],
)
def test_byoyomi(left_s: float, spent_s: float, after_s: float | None) -> None:
    assert ClockRules("byoyomi", 60.0, 0.0, 10.0, 3).after(left_s, spent_s) == after_s


@pytest.mark.parametrize(
    ("left_s", "spent_s", "after_s"),
    [(0.8, 0.8, 0.1), (0.1 + 0.2, 0.1 + 0.2, 0.1), (0.8, 0.6, 0.3)],
)
def test_no_period_is_lost_to_rounding(left_s: float, spent_s: float, after_s: float) -> None:
    after = ClockRules("byoyomi", 0.5, 0.0, 0.1, 3).after(left_s, spent_s)
    assert after == pytest.approx(after_s)


def moves(rules: ClockRules, spent: Iterable[float]) -> Iterator[tuple[float, float, float | None]]:
    """What a side has before each move, what that takes, and what is left, until the flag falls."""
    left: float | None = rules.start_s
    for seconds in spent:
        assert left is not None
        after = rules.after(left, seconds)
        yield left, seconds, after
        if after is None:
            return
        left = after


@given(RULES, st.lists(SECONDS, max_size=30))
def test_a_clock_is_never_below_nothing_and_never_grows_but_by_increments(
    rules: ClockRules, spent: list[float]
) -> None:
    for left, seconds, after in moves(rules, spent):
        if after is None:
            assert seconds > left
            return
        assert after >= 0
        assert seconds <= left
        most = rules.base_s if rules.kind == "move" else left + rules.increment_s
        assert after <= most + 1e-9


@given(st.floats(1, 600), st.floats(0, 30), st.lists(st.floats(0, 20), max_size=30))
def test_fischers_sum(base_s: float, increment_s: float, spent: list[float]) -> None:
    rules = ClockRules("fischer", base_s, increment_s)
    for done, (_, _, left) in enumerate(moves(rules, spent), start=1):
        if left is None:
            return
        assert math.isclose(left, base_s + done * increment_s - sum(spent[:done]), abs_tol=1e-6)


def attempt(fault: Fault | None = None, *, prefill_s: float | None = 1.0) -> Attempt:
    decode_s = None if prefill_s is None else 0.5
    times = Timings(0.0, 4.0, None, 10.0, 3.0, prefill_s, decode_s)
    return Attempt(0, Reply("e2e4", Finish.STOP, Usage(5, 5, 0), times), fault, "")


def test_a_ply_is_charged_its_own_tries_as_the_engine_reports_them() -> None:
    tries = [attempt(Fault.ILLEGAL), attempt(Fault.CUT_SHORT), attempt()]
    assert spent_seconds(tries, 99.0) == 3.0
    assert spent_seconds([attempt(prefill_s=None)], 99.0) == 6.0  # admitted to done
    assert spent_seconds([Attempt(0, None, Fault.OVERLOADED), attempt()], 99.0) == 1.5
    assert spent_seconds([], 0.25) == 0.25
    assert spent_seconds([Attempt(0, None, Fault.TRANSPORT)], 0.25) == 0.25
    own = [Attempt(0, None, Fault.ILLEGAL), Attempt(1, None, None)]  # without replies
    assert spent_seconds(own, 0.25) == 0.25


def of_seconds(spent_s: float) -> Attempt:
    """A try that an engine's clock counts so, as a store gives it back."""
    times = Timings(1e6 + 0.1, 1e6 + 0.2, None, 1e6 + 0.2 + spent_s, None, None, None)
    return Attempt(0, Reply("e2e4", Finish.STOP, Usage(5, 5, 0), times), None)


@given(RULES, st.lists(SECONDS, max_size=30))
def test_what_tries_left_is_what_they_could_leave_and_more_or_less_is_not(
    rules: ClockRules, spent: list[float]
) -> None:
    for left, seconds, after in moves(rules, spent):
        if after is None:
            assert could_fall(left, [of_seconds(seconds)])
            return
        assert could_leave(rules, left, [of_seconds(seconds)], after)
        assert could_leave(rules, left, [], after)
        assert not could_leave(rules, left, [of_seconds(seconds)], after + 0.01)
        assert not could_leave(rules, left, [of_seconds(seconds)], after - 0.01)
        assert not could_leave(rules, left, [], -0.01)
        assert not could_leave(rules, left, [], left + max(rules.base_s, rules.increment_s) + 0.01)


def test_a_fallen_flag_says_why() -> None:
    tries = [attempt(Fault.ILLEGAL), attempt(Fault.CUT_SHORT), attempt()]
    assert fell(tries, 3.0, 2.0) == (
        "its move took 3.00 s in 2 tries (2.00 s prefill, 1.00 s decode), and 2.00 s were left"
    )
    assert fell([], 3.0, 2.0) == "its move took 3.00 s, and 2.00 s were left"


def test_the_tag_of_a_pgn() -> None:
    assert ClockRules("move", 30.0).in_words() == "*30"
    assert ClockRules("fischer", 300.0, 2.0).in_words() == "300+2"
    assert ClockRules("byoyomi", 300.0, 0.0, 10.0, 3).in_words() == "300+3x10"


PLAYERS = {"name": "x", "agents": [{"kind": "random", "name": n} for n in "ab"]}


def test_the_config_makes_the_rules() -> None:
    assert parse(PLAYERS).clock.rules is None
    clock = {"kind": "byoyomi", "base_seconds": 60, "byoyomi_seconds": 5, "byoyomi_periods": 3}
    assert parse({**PLAYERS, "clock": clock}).clock.rules == ClockRules(
        "byoyomi", 60.0, 0.0, 5.0, 3
    )


@pytest.mark.parametrize(
    ("clock", "told"),
    [
        ({"kind": "fisher"}, "clock.kind"),
        ({"kind": "move", "base_seconds": 0}, "clock.base_seconds"),
        ({"kind": "move", "increment_seconds": 2}, "clock.increment_seconds: does nothing"),
        ({"base_seconds": 10}, 'clock.base_seconds: does nothing with kind = "none"'),
        ({"kind": "byoyomi", "byoyomi_periods": 0}, "clock.byoyomi_periods"),
    ],
)
def test_a_wrong_clock_is_one_line(clock: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as seen:
        parse({**PLAYERS, "clock": clock})
    assert told in str(seen.value)
    assert "\n" not in str(seen.value)
