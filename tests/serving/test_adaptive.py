"""The adaptive cap: when it grows, when it falls, and what it makes nothing of."""

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.adaptive import CUT, SAFETY, AdaptiveCap, CapChange, Why


class Line:
    """An engine that answers one after the other, `rate` a second, and callers who fill the cap."""

    def __init__(self, cap: AdaptiveCap) -> None:
        self.cap = cap
        self.now = 0.0
        self.inside: deque[float] = deque()

    def fill(self) -> None:
        while self.cap.admit(self.now):
            self.inside.append(self.now)

    def answer(self) -> None:
        self.cap.served(self.now - self.inside[0])
        self.cap.ended(self.now, self.inside.popleft(), is_answered=True)

    def work(self, rate: float, seconds: float) -> None:
        """Everybody keeps asking."""
        end = self.now + seconds
        while self.now < end:
            self.fill()
            self.now += 1 / rate
            self.answer()
        self.fill()

    def work_one_by_one(self, period_s: float, answer_s: float, seconds: float) -> None:
        """One asks every `period_s`, alone."""
        end = self.now + seconds
        while self.now < end:
            assert self.cap.admit(self.now)
            self.inside.append(self.now)
            self.now += answer_s
            self.answer()
            self.now += period_s - answer_s

    def drain(self) -> None:
        while self.inside:
            self.answer()


def whys(changes: list[CapChange]) -> list[Why]:
    return [change.why for change in changes]


def grown(most: int = 1000) -> Line:
    """At its aim for an engine of 100 answers a second, full."""
    line = Line(AdaptiveCap(1.0, most=most))
    line.work(100, 10)
    return line


def test_it_begins_at_the_least_and_takes_no_more_than_it_holds() -> None:
    cap = AdaptiveCap(1.0, least=3, most=9)
    assert [cap.admit(0.0) for _ in range(5)] == [True, True, True, False, False]
    cap.ended(0.1, 0.0, is_answered=False)
    assert [cap.admit(0.1) for _ in range(2)] == [True, False]


def test_slow_start_doubles_from_one_and_is_at_its_aim_in_a_second() -> None:
    line = Line(AdaptiveCap(1.0, most=1000))
    line.work(100, 1.0)
    assert [one.cap for one in line.cap.history[:5]] == [2, 4, 8, 16, 32]
    assert set(whys(line.cap.history[:5])) == {Why.DOUBLED}
    assert line.cap.cap >= 32


def test_the_cap_settles_at_the_rate_times_the_slo_times_the_safety() -> None:
    line = grown()
    assert line.cap.rate == pytest.approx(100, rel=0.05)
    assert line.cap.cap == pytest.approx(100 * SAFETY, abs=5)
    before = len(line.cap.history)
    line.work(100, 60)
    assert len(line.cap.history) - before < 10
    assert line.cap.cap == pytest.approx(100 * SAFETY, abs=5)


def test_past_half_of_its_aim_it_grows_by_one() -> None:
    line = grown()
    before, changes = line.cap.cap, len(line.cap.history)
    line.work(150, 4)
    news = line.cap.history[changes:]
    assert set(whys(news)) == {Why.GREW}
    assert [one.cap for one in news] == list(range(before + 1, before + 1 + len(news)))
    assert len(news) >= 3


def test_it_does_not_grow_unless_it_was_full() -> None:
    line = Line(AdaptiveCap(1.0, least=4, most=1000))
    line.work_one_by_one(0.02, 0.01, 10)
    assert line.cap.cap == 4
    assert line.cap.history == []


def test_a_miss_cuts_once_however_many_of_its_time_miss_as_well() -> None:
    line = grown()
    before = line.cap.cap
    for late_s in (1.1, 1.2, 1.3, 1.1):
        line.cap.ended(line.now, line.now - late_s, is_answered=True)
    change = line.cap.history[-1]
    assert (change.at, change.cap, change.why) == (line.now, int(before * CUT), Why.MISSED)
    assert line.cap.cap == change.cap


def test_a_request_given_up_after_the_slo_is_a_miss_too() -> None:
    """Callers that hang up at their own limit leave no late answer behind."""
    line = grown()
    before = line.cap.cap
    line.cap.ended(line.now, line.now - 1.1, is_answered=False)
    assert (line.cap.cap, line.cap.history[-1].why) == (int(before * CUT), Why.MISSED)


def test_an_end_without_an_answer_within_the_slo_says_nothing() -> None:
    line = grown()
    before = list(line.cap.history)
    while line.inside:
        line.cap.ended(line.now, line.inside.popleft(), is_answered=False)
    assert line.cap.history == before


def test_a_refusal_by_the_engine_cuts_and_those_of_its_time_no_further() -> None:
    line = grown()
    before = line.cap.cap
    for submitted in tuple(line.inside)[:5]:
        line.cap.refused(line.now, submitted)
    assert line.cap.cap == int(before * CUT)
    assert line.cap.history[-1].why is Why.REFUSED
    line.now += 0.01
    for _ in range(before):
        line.answer()
    line.fill()
    line.cap.refused(line.now, line.now)
    assert line.cap.cap == int(int(before * CUT) * CUT)


def test_it_follows_a_rate_that_halves_within_three_seconds() -> None:
    line = grown()
    line.work(50, 3)
    assert line.cap.cap <= 50
    line.work(50, 3)
    assert line.cap.cap == pytest.approx(50 * SAFETY, abs=6)
    assert Why.RATE in whys(line.cap.history)


def test_it_doubles_again_for_an_engine_that_became_faster() -> None:
    line = grown()
    changes = len(line.cap.history)
    line.work(1000, 2)
    assert line.cap.cap >= 240
    line.work(1000, 3)
    assert line.cap.rate == pytest.approx(1000, rel=0.1)
    assert whys(line.cap.history[changes : changes + 2]) == [Why.DOUBLED] * 2


def test_an_outage_takes_it_down_and_it_is_back_in_two_seconds() -> None:
    line = grown()
    for _ in range(8):
        line.now += 1.0
        line.fill()
    assert line.cap.cap <= 2
    line.drain()
    line.work(100, 2)
    assert line.cap.cap >= 32


def test_the_rate_of_an_engine_with_little_to_do_is_not_its_speed() -> None:
    line = grown()
    cap, rate = line.cap.cap, line.cap.rate
    while line.inside:
        line.now += 0.01
        line.answer()
    line.work_one_by_one(0.2, 0.01, 30)
    line.fill()
    assert line.cap.cap == cap
    assert line.cap.rate == pytest.approx(rate, rel=0.01)


def test_answers_of_idle_moments_are_left_out_of_the_rate() -> None:
    """Between bursts, one asks after the other, alone, and is answered in 10 ms."""
    line = grown()
    for _ in range(10):
        while len(line.inside) > 1:
            line.now += 0.01
            line.answer()
        line.work_one_by_one(0.01, 0.01, 0.4)
        line.work(100, 0.8)
    assert line.cap.rate == pytest.approx(100, rel=0.1)


def test_answers_that_come_in_batches_all_count() -> None:
    """An engine whose requests of a step are finished at once: 8 every 0.1 s."""
    line = Line(AdaptiveCap(1.0, least=8, most=8))
    for _ in range(50):
        line.fill()
        line.now += 0.1
        line.drain()
    assert line.cap.rate == pytest.approx(80, rel=0.02)


def test_an_engine_slower_than_a_window_is_measured_over_the_slo() -> None:
    """An answer every 2 s, and somebody asks every half second."""
    line = Line(AdaptiveCap(20.0, least=2, most=100))
    caps = []
    for half_second in range(400):
        line.fill()
        if half_second % 4 == 3:
            line.answer()
        line.now += 0.5
        caps.append(line.cap.cap)
    assert line.cap.rate == pytest.approx(0.5, rel=0.05)
    assert set(caps[100:]) <= {5, 6, 7}


def test_the_bounds_hold() -> None:
    line = Line(AdaptiveCap(1.0, least=5, most=20))
    line.work(100, 5)
    assert line.cap.cap == 20
    for _ in range(20):
        line.now += 2.0
        line.drain()
        line.fill()
    assert line.cap.cap == 5


def test_whether_a_waiting_request_can_be_in_time() -> None:
    cap = AdaptiveCap(1.0, most=100)
    assert cap.can_be_in_time(0.9, 0.0, ahead=50), "nothing is known of the engine"
    assert not cap.can_be_in_time(1.1, 0.0, ahead=0)
    line = grown()
    now, service_s = line.now, line.cap.service_s
    assert service_s == pytest.approx(0.6, abs=0.1)
    assert line.cap.can_be_in_time(now, now, ahead=20)
    assert not line.cap.can_be_in_time(now, now - 0.3, ahead=20)
    assert not line.cap.can_be_in_time(now, now, ahead=60)


@pytest.mark.parametrize(("slo_s", "least", "most"), [(0.0, 1, 2), (1.0, 0, 2), (1.0, 3, 2)])
def test_bounds_without_meaning_are_refused(slo_s: float, least: int, most: int) -> None:
    with pytest.raises(ValueError, match="least"):
        AdaptiveCap(slo_s, least=least, most=most)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "answered", "failed", "refused"]),
        st.floats(0, 3, allow_nan=False),
    ),
    max_size=200,
)


@given(STEPS, st.integers(1, 5), st.integers(0, 50))
def test_whatever_happens_it_stays_in_its_bounds_and_the_history_tells_every_change(
    steps: list[tuple[str, float]], least: int, more: int
) -> None:
    cap = AdaptiveCap(1.0, least=least, most=least + more)
    inside: list[float] = []
    now = 0.0
    for what, passed in steps:
        now += passed
        if what == "admit":
            had_room = len(inside) < cap.cap
            if is_taken := cap.admit(now):
                inside.append(now)
            assert is_taken <= had_room
        elif inside:
            submitted = inside.pop(0)
            if what == "refused":
                cap.refused(now, submitted)
            cap.ended(now, submitted, is_answered=what == "answered")
        assert least <= cap.cap <= least + more
    times = [change.at for change in cap.history]
    assert times == sorted(times)
    caps = [least, *(change.cap for change in cap.history)]
    assert all(one != other for one, other in pairwise(caps))
    assert caps[-1] == cap.cap
