"""Static and continuous batching: small cases by hand, and what must always hold."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.batching import (
    Arrivals,
    ClosedLoop,
    Job,
    Lengths,
    QueueCap,
    Server,
    Trace,
    burst_times,
    parse_lengths,
    poisson_times,
    run_continuous,
    run_static,
)
from serving.step_time import StepTime, simple

SECOND = simple(1.0)
"""A token a second, however many requests there are."""
RUNS = (run_static, run_continuous)

jobs_strategy = st.lists(
    st.tuples(st.floats(0, 50), st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=40
)


def jobs(*outputs: int, at: float = 0.0, prompt: int = 0) -> list[Job]:
    return [Job(at, prompt, output) for output in outputs]


def spans(trace: Trace) -> list[tuple[float | None, float | None, float | None]]:
    return [(job.started, job.finished, job.done) for job in trace.jobs]


def test_a_static_batch_is_as_long_as_its_longest_and_then_the_next_begins() -> None:
    trace = run_static(Arrivals(jobs(1, 4, 2, 2)), Server(2, SECOND))
    assert spans(trace) == [(0, 1, 4), (0, 4, 4), (4, 6, 6), (4, 6, 6)]
    assert trace.makespan_s == 6
    assert trace.idle_share == pytest.approx(1 - 9 / 12)
    assert (trace.steps, trace.step_requests, trace.step_tokens) == (6, 12, 12)


def test_a_continuous_batch_fills_each_slot_as_it_is_freed() -> None:
    trace = run_continuous(Arrivals(jobs(1, 4, 2, 2)), Server(2, SECOND))
    assert spans(trace) == [(0, 1, 1), (0, 4, 4), (1, 3, 3), (3, 5, 5)]
    assert [job.slot for job in trace.jobs] == [0, 1, 0, 0]
    assert trace.idle_share == pytest.approx(1 - 9 / 10)
    assert (trace.steps, trace.step_requests) == (5, 9)


def test_a_static_batch_uses_the_mean_length_of_the_longest() -> None:
    """The known formula for the use of slots: mean(L) / E[longest of a batch]."""
    slots, longest = 4, 100
    expected_max = sum(1 - ((k - 1) / longest) ** slots for k in range(1, longest + 1))
    outputs = Lengths(((100.0, 1, longest),)).draw(20_000, Random(5))
    trace = run_static(Arrivals(jobs(*outputs)), Server(slots, SECOND))
    assert trace.idle_share is not None
    assert 1 - trace.idle_share == pytest.approx((longest + 1) / 2 / expected_max, rel=0.01)


def test_a_static_batch_waits_until_it_is_full_and_a_continuous_one_does_not() -> None:
    def source() -> Arrivals:
        return Arrivals([Job(0.0, 0, 2), Job(5.0, 0, 2), Job(9.0, 0, 2)])

    assert run_static(source(), Server(2, SECOND)).waits_s == [5, 0, 0]
    assert run_continuous(source(), Server(2, SECOND)).waits_s == [0, 0, 0]


def test_one_that_comes_within_a_step_joins_the_next() -> None:
    trace = run_continuous(Arrivals([Job(0.0, 0, 3), Job(0.5, 0, 1)]), Server(2, SECOND))
    assert spans(trace) == [(0, 3, 3), (1, 2, 2)]


def test_a_prompt_lengthens_the_step_that_computes_it_for_all_in_it() -> None:
    server = Server(2, simple(1.0, prompt_token_s=0.1))
    trace = run_continuous(Arrivals([*jobs(3), Job(0.5, 11, 1)]), server)
    assert spans(trace) == [(0, 4, 4), (1, 3, 3)]


def test_a_long_prompt_is_computed_in_pieces() -> None:
    server = Server(2, StepTime(0.0, 1.0, 0.0), step_tokens=4)
    trace = run_continuous(Arrivals([Job(0.0, 1, 4), Job(0.5, 7, 1)]), server)
    # 1, then 1 + 3 of 7, 1 + 3, 1 + 1
    assert spans(trace) == [(0, 11, 11), (1, 11, 11)]
    assert trace.step_tokens == 1 + 4 + 4 + 2
    assert trace.step_requests == 1 + 2 + 2 + 2


def test_the_prompts_of_a_static_batch_are_computed_in_pieces_too() -> None:
    server = Server(2, StepTime(0.0, 1.0, 0.0), step_tokens=4)
    trace = run_static(Arrivals([Job(0.0, 3, 1), Job(0.0, 7, 2)]), server)
    # 4, 4 and 2, then the second token of both
    assert spans(trace) == [(0, 10, 12), (0, 12, 12)]
    assert (trace.steps, trace.step_requests, trace.step_tokens) == (4, 8, 12)


def test_a_step_that_grows_with_the_batch() -> None:
    server = Server(4, simple(1.0, growth=0.5))
    assert run_continuous(Arrivals(jobs(2, 2, 2)), server).makespan_s == 4
    assert run_static(Arrivals(jobs(2, 2, 2)), server).makespan_s == 4


def test_whoever_finds_the_queue_full_is_refused() -> None:
    for run in RUNS:
        trace = run(Arrivals(jobs(2, 2, 2, 2, 2)), Server(1, SECOND), QueueCap(2))
        assert [job.is_refused for job in trace.jobs] == [False, False, False, True, True]
        assert len(trace.answered) == 3
        assert trace.makespan_s == 6


def test_a_closed_loop_asks_again_when_answered() -> None:
    for run in RUNS:
        trace = run(ClosedLoop(jobs(2, 2, 2, 2), clients=2), Server(4, SECOND))
        assert [job.arrival for job in trace.jobs] == [0, 0, 2, 2]
        assert trace.waits_s == [0, 0, 0, 0]


def test_clients_think_before_they_ask_again() -> None:
    loop = ClosedLoop(jobs(*[1] * 2000), clients=1, think_s=3.0)
    assert run_continuous(loop, Server(1, SECOND)).makespan_s == pytest.approx(8000, rel=0.05)


def test_a_closed_loop_ends_in_time() -> None:
    loop = ClosedLoop(jobs(*[1] * 100), clients=1, until_s=4.5)
    assert len(run_continuous(loop, Server(1, SECOND)).jobs) == 5


def test_the_timeline_adds_up() -> None:
    trace = run_continuous(Arrivals(jobs(1, 4, 2, 2)), Server(2, SECOND))
    assert trace.busy_slots(5) == [2, 2, 2, 2, 1]
    assert trace.waiting(5) == [2, 1, 1, 0, 0]


@settings(deadline=None)
@given(jobs_strategy, st.integers(1, 6), st.booleans())
def test_nobody_is_lost_nor_two_in_a_slot(
    asked: list[tuple[float, int, int]], slots: int, is_bounded: bool
) -> None:
    time = StepTime(0.5, 0.01, 0.02)
    server = Server(slots, time, step_tokens=max(slots, 8) if is_bounded else None)
    for run in RUNS:
        trace = run(Arrivals(Job(*one) for one in asked), server)
        assert len(trace.answered) == len(asked)
        taken: dict[int, float] = {}
        for job in sorted(trace.jobs, key=lambda job: job.started or 0.0):
            assert job.started is not None
            assert job.finished is not None
            assert job.done is not None
            assert job.arrival <= job.started < job.finished <= job.done
            assert 0 <= job.slot < slots
            assert taken.get(job.slot, 0.0) <= job.started + 1e-9
            taken[job.slot] = job.done
        computed = sum(max(job.prompt, 1) + job.output - 1 for job in trace.jobs)
        assert trace.step_tokens >= computed
        if run is run_continuous:
            assert trace.step_tokens == computed
        if server.step_tokens is not None:
            assert trace.step_tokens <= trace.steps * server.step_tokens
        taken_s = sum((job.finished or 0.0) - (job.started or 0.0) for job in trace.jobs)
        part_s = trace.makespan_s / 7
        assert sum(trace.busy_slots(7)) * part_s == pytest.approx(taken_s)
        assert sum(trace.waiting(7)) * part_s == pytest.approx(sum(trace.waits_s), abs=1e-9)
        assert trace.idle_share is not None
        assert -1e-9 <= trace.idle_share < 1


@settings(deadline=None)
@given(jobs_strategy)
def test_the_first_to_come_is_the_first_to_be_taken(asked: list[tuple[float, int, int]]) -> None:
    for run in RUNS:
        trace = run(Arrivals(Job(*one) for one in asked), Server(3, SECOND))
        started = [job.started or 0.0 for job in trace.jobs]
        assert started == sorted(started)


def test_the_spread_is_gone_through_in_its_order_from_a_place_of_the_seed() -> None:
    time = StepTime(1.0, 0.0, 0.0, spread=(1.0, 1.0, 4.0))
    for run in RUNS:
        ends = {}
        for seed in range(20):
            trace = run(Arrivals(jobs(1, 1, 1)), Server(1, time, seed=seed))
            again = run(Arrivals(jobs(1, 1, 1)), Server(1, time, seed=seed))
            assert spans(trace) == spans(again)
            ends[tuple(job.done for job in trace.jobs)] = seed
        assert set(ends) == {(1, 2, 6), (1, 5, 6), (4, 5, 6)}


def test_both_ways_take_as_long_where_batching_is_the_same() -> None:
    time = StepTime(1.0, 0.25, 0.5, spread=(1.0, 3.0, 0.5, 2.0))
    static, continuous = (
        run(Arrivals(jobs(9, 9, 9, prompt=5)), Server(3, time, seed=4)) for run in RUNS
    )
    assert spans(static) == spans(continuous)


SPREAD = (1.0, 0.5, 2.0, 1.0)


def step_by_step(
    asked: Sequence[tuple[int, int, int]], slots: int, time: StepTime, first: int
) -> list[tuple[float, float]]:
    """When each starts and ends, the spread begun at `first`: the same without a short cut."""
    waiting = sorted(enumerate(asked), key=lambda one: one[1][0])
    inside: list[list[int]] = []
    told = [(0.0, 0.0)] * len(asked)
    now, steps = 0.0, first
    while waiting or inside:
        if not inside:
            now = max(now, waiting[0][1][0] / 8)
        while waiting and len(inside) < slots and waiting[0][1][0] / 8 <= now:
            number, (_, prompt, output) = waiting.pop(0)
            inside.append([number, max(prompt, 1), output])
            told[number] = (now, 0.0)
        tokens = sum(prompt for _, prompt, _ in inside)
        now += time.seconds(tokens, len(inside)) * SPREAD[steps % len(SPREAD)]
        steps += 1
        inside = [[number, 1, left - 1] for number, _, left in inside]
        for number, _, left in inside:
            if not left:
                told[number] = (told[number][0], now)
        inside = [one for one in inside if one[2]]
    return told


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 30), st.integers(1, 40)),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 6),
    st.integers(0, 9),
)
def test_steps_gone_through_at_once_are_the_same_steps(
    asked: list[tuple[int, int, int]], slots: int, seed: int
) -> None:
    """Times are sums of binary fractions, so that who comes just as a step ends is no chance."""
    time = StepTime(0.5, 0.25, 0.125, SPREAD)
    made = [Job(at / 8, prompt, output) for at, prompt, output in asked]
    run_continuous(Arrivals(made), Server(slots, time, seed=seed))
    told = [(job.started, job.finished) for job in made]
    assert told in [step_by_step(asked, slots, time, first) for first in range(len(SPREAD))]


class Counting(StepTime):
    """How often it was asked."""

    __slots__ = ()
    asked = 0

    def seconds(self, tokens: int, requests: int) -> float:
        Counting.asked += 1
        return super().seconds(tokens, requests)


def test_the_work_is_that_of_the_requests_and_not_of_their_tokens() -> None:
    """60,000 answers of 207 tokens, one at a time, took a minute."""
    for run in RUNS:
        Counting.asked = 0
        arrivals = [Job(number * 1e6, 0, 10_000_000) for number in range(50)]
        trace = run(Arrivals(arrivals), Server(3, Counting(1.0, 0.0, 0.0)))
        assert trace.step_tokens >= 500_000_000
        assert Counting.asked < 10 * len(trace.jobs)


def test_arrivals_come_at_their_rate() -> None:
    times = poisson_times(20_000, 12.0, Random(1))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(20_000 / 12, rel=0.03)
    assert burst_times(5, 4.0, 2) == [0, 0, 0.5, 0.5, 1.0]


@pytest.mark.parametrize(
    ("slots", "time", "step_tokens", "told"),
    [
        (0, SECOND, None, "slots: 0"),
        (8, SECOND, 7, "step_tokens: 7"),
        (1, StepTime(0.0, 0.0, 0.0), None, "takes no time"),
    ],
)
def test_a_server_that_cannot_be(
    slots: int, time: StepTime, step_tokens: int | None, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        Server(slots, time, step_tokens)


# lengths


def test_lengths_are_described() -> None:
    assert parse_lengths("150") == Lengths(((100.0, 150, 150),))
    assert parse_lengths("40-200").mean == 120
    mixed = parse_lengths("mixed")
    assert mixed == parse_lengths("85%:40-200, 15%:400-1000")
    assert mixed.mean == pytest.approx(207)
    drawn = mixed.draw(20_000, Random(1))
    assert sum(n >= 400 for n in drawn) / 20_000 == pytest.approx(0.15, abs=0.01)
    assert sum(drawn) / 20_000 == pytest.approx(207, rel=0.02)
    assert all(40 <= n <= 200 or 400 <= n <= 1000 for n in drawn)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "0",
        "5-4",
        "1-99999999",
        "50%:1-2",
        "50%:1,60%:2",
        "1-2,3-4",
        "0%:1,100%:2",
        "9" * 99,
    ],
)
def test_lengths_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"give|weights"):
        parse_lengths(text)
