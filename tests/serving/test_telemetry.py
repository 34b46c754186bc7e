"""An engine second by second: what goes in comes out once, in every span."""

import asyncio
import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving import (
    SPANS_S,
    Bucket,
    EngineSnapshot,
    EngineUnavailable,
    Finish,
    Limited,
    MalformedReply,
    Meter,
    Overloaded,
    Reply,
    Request,
    Timings,
    Usage,
    telemetry,
)
from serving.telemetry import time_to_first_token_s
from tests.serving.conftest import MakeRequest
from tests.serving.test_limits import GatedEngine

COUNTERS = ("prefix_queries", "prefix_hits", "preemptions")


class Clock:
    """What the meter takes for `time.monotonic`."""

    def __init__(self, now: float) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now


@contextmanager
def a_meter(begun: float = 0.0) -> Iterator[tuple[Meter, Clock]]:
    """A meter that began at run time `begun`; the clock's zero is elsewhere."""
    clock = Clock(1000.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(telemetry, "time", clock)
        meter = Meter("main")
        meter.begin(lambda at: at - 1000.0 + begun)
        yield meter, clock


def a_reply(at: float, **changes: Any) -> Reply:
    """Handed in half a second before `at`; 11 tokens in a fifth of a second."""
    values = {"queue_s": 0.05, "prefill_s": 0.1, "decode_s": 0.2, "first_token": None, **changes}
    usage = Usage(values.pop("prompt", 100), values.pop("completion", 11), values.pop("cached", 60))
    timings = Timings(submitted=at - 0.5, admitted=at - 0.4, done=at, **values)
    return Reply("e2e4", Finish.STOP, usage, timings)


def a_step(at: float, **changes: Any) -> EngineSnapshot:
    values = {"step_requests": 2, "step_tokens": 50, "waiting": 0, "kv_usage": 0.5, **changes}
    return EngineSnapshot(at=at, source="per_step", **values)


def latest(buckets: list[Bucket]) -> dict[tuple[float, float], Bucket]:
    """The last version of each bucket, as whoever keeps them has it."""
    return {(bucket.span_s, bucket.at): bucket for bucket in buckets}


def seconds(bucket: Bucket, ended: float) -> float:
    """How long a bucket of a run that ended then is."""
    end = (bucket.at // bucket.span_s + 1) * bucket.span_s
    return min(end, ended) - bucket.at


def ranked(values: list[float], share: Fraction) -> float | None:
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * share) - 1] if ordered else None


@dataclass
class Truth:
    """What was done to a meter, counted on the side."""

    totals: Counter[str] = field(default_factory=Counter)
    in_flight_s: float = 0.0
    requests: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By the second of the run, as are the others."""
    tokens: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    ttft: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    ended: float = 0.0


def played(seed: int, begun: float, steps: int) -> tuple[list[Bucket], Truth]:
    """Random work on a meter. Times are whole 64ths, so that sums are exact and seconds end in the
    midst of things; steps are told up to half a second late."""
    rng, truth, told = random.Random(seed), Truth(), []
    last = Counter[str]()
    with a_meter(begun) as (meter, clock):
        in_flight = 0
        for _ in range(steps):
            gap = rng.choice((0, 0, 1, 7, 30, 64, rng.randrange(64 * rng.choice((2, 40))))) / 64
            truth.in_flight_s += in_flight * gap
            clock.now += gap
            now = clock.now - 1000.0 + begun
            drawn = rng.random()
            if drawn < 0.3:
                meter.offered(clock.now)
                in_flight += 1
                truth.totals["offered"] += 1
            elif drawn < 0.6 and in_flight:
                in_flight -= 1
                if rng.random() < 0.3:
                    refused = rng.random() < 0.5
                    meter.failed(clock.now, refused=refused)
                    truth.totals["rejected"] += refused
                else:
                    ttft = rng.randrange(100, 1000) / 1000
                    first = clock.now - 0.5 + ttft
                    reply = a_reply(clock.now, first_token=first, completion=rng.randrange(9))
                    meter.answered(clock.now, reply)
                    truth.totals["replies"] += 1
                    truth.totals["completion_tokens"] += reply.usage.completion
                    truth.ttft[math.floor(now)].append(ttft)
            elif drawn < 0.9:
                late = min(rng.randrange(33) / 64, now - begun)
                last.update({key: rng.randrange(4) for key in COUNTERS})
                step = a_step(
                    clock.now - late,
                    step_requests=rng.randrange(9),
                    step_tokens=rng.randrange(999),
                    **last,
                )
                meter.stepped(step)
                truth.totals["steps"] += 1
                second = math.floor(now - late)
                truth.requests[second].append(float(step.step_requests or 0))
                truth.tokens[second].append(float(step.step_tokens or 0))
            else:
                told += meter.buckets()
        told += meter.buckets(final=True)
        truth.ended = clock.now - 1000.0 + begun
        truth.totals.update(last)
    return told, truth


SEEDS = st.integers(0, 2**32)
BEGUN = st.integers(0, 2000 * 64).map(lambda number: number / 64)


@given(SEEDS, BEGUN)
@settings(max_examples=150, deadline=None)
@example(0, 0.0)
@example(0, 995.5)
def test_whatever_is_done_is_in_each_span_once(seed: int, begun: float) -> None:
    told, truth = played(seed, begun, 60)
    kept = latest(told)
    for span_s in SPANS_S:
        buckets = [bucket for (span, _), bucket in kept.items() if span == span_s]
        sums = Counter[str]()
        for key in ("offered", "replies", "rejected", "steps", "completion_tokens", *COUNTERS):
            sums[key] = sum(getattr(bucket, key) or 0 for bucket in buckets)
        assert +sums == +truth.totals
        in_flight_s = sum(bucket.in_flight * seconds(bucket, truth.ended) for bucket in buckets)
        assert in_flight_s == pytest.approx(truth.in_flight_s, abs=1e-6)


@given(SEEDS, BEGUN)
@settings(max_examples=100, deadline=None)
def test_percentiles_of_a_span_are_those_of_all_its_values(seed: int, begun: float) -> None:
    told, truth = played(seed, begun, 60)
    for (span_s, at), bucket in latest(told).items():
        here = range(math.floor(at), math.floor(at // span_s + 1) * int(span_s))
        for name, by_second in (("requests", truth.requests), ("tokens", truth.tokens)):
            values = [value for second in here for value in by_second.get(second, ())]
            figures = [getattr(bucket, f"{name}_{what}") for what in ("p50", "p95", "max", "mean")]
            if not values:
                assert figures == [None] * 4
                continue
            assert figures[0] == ranked(values, Fraction(1, 2))
            assert figures[1] == ranked(values, Fraction(19, 20))
            assert figures[2] == max(values)
            assert figures[3] == pytest.approx(math.fsum(values) / len(values))
        ttft = [value for second in here for value in truth.ttft.get(second, ())]
        assert bucket.ttft_p50_s == (pytest.approx(ranked(ttft, Fraction(1, 2))) if ttft else None)
        assert bucket.ttft_p95_s == (
            pytest.approx(ranked(ttft, Fraction(19, 20))) if ttft else None
        )


@given(SEEDS, BEGUN)
@settings(max_examples=50, deadline=None)
def test_buckets_come_in_order_and_fine_ones_once(seed: int, begun: float) -> None:
    told, truth = played(seed, begun, 60)
    for span_s in SPANS_S:
        begins = [bucket.at for bucket in told if bucket.span_s == span_s]
        assert begins == sorted(begins)
        assert all(at >= begun for at in begins)
        assert all(at % span_s == 0 or at == begun for at in begins)
    fine = [bucket.at for bucket in told if bucket.span_s == 1.0]
    assert len(fine) == len(set(fine))
    assert all(at <= truth.ended for at in fine)


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_every_bucket_is_plain_json(seed: int) -> None:
    told, _ = played(seed, 0.0, 60)
    json.dumps([bucket._asdict() for bucket in told], allow_nan=False)


def test_a_second_is_told_half_a_second_after_its_end() -> None:
    with a_meter() as (meter, clock):
        meter.offered(clock.now)
        clock.now += 1.49
        assert meter.buckets() == []
        clock.now += 0.02
        told = latest(meter.buckets())
        assert set(told) == {(span_s, 0.0) for span_s in SPANS_S}
        assert told[1.0, 0.0].in_flight == pytest.approx(1.0)
        assert meter.buckets() == []


def test_a_step_told_too_late_counts_in_the_first_open_second() -> None:
    with a_meter() as (meter, clock):
        meter.offered(clock.now)
        clock.now += 5.6
        told = meter.buckets()
        meter.stepped(a_step(1001.5))
        clock.now += 1.0
        told += meter.buckets()
    kept = latest(told)
    assert [kept[1.0, float(second)].steps for second in range(6)] == [0, 0, 0, 0, 0, 1]
    assert kept[10.0, 0.0].steps == 1


def test_seconds_in_which_nothing_happened_have_no_bucket_but_count_in_coarser_ones() -> None:
    with a_meter() as (meter, clock):
        meter.offered(clock.now)
        clock.now += 1.0
        meter.answered(clock.now, a_reply(clock.now))
        clock.now += 11.0
        meter.offered(clock.now)
        clock.now += 2.0
        told = meter.buckets()
    kept = latest(told)
    assert sorted(at for span_s, at in kept if span_s == 1.0) == [0.0, 1.0, 12.0]
    assert kept[1.0, 1.0].replies == 1  # the reply came with the second's first moment
    # a request for one second of ten, and, of the ten seconds of which three have passed, for one
    assert kept[10.0, 0.0].in_flight == pytest.approx(0.1)
    assert kept[10.0, 10.0].in_flight == pytest.approx(1 / 3)
    assert kept[100.0, 0.0].in_flight == pytest.approx(2 / 13)


def test_a_reply_at_the_very_end_of_a_second_is_not_lost() -> None:
    with a_meter() as (meter, clock):
        meter.offered(clock.now)
        clock.now += 3.0
        meter.answered(clock.now, a_reply(clock.now))
        clock.now += 60.0
        kept = latest(meter.buckets())
    assert [kept[1.0, float(second)].replies for second in range(4)] == [0, 0, 0, 1]
    assert kept[1.0, 3.0].in_flight == 0.0


def test_requests_handed_in_before_it_began_are_in_flight_but_not_offered() -> None:
    clock = Clock(50.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(telemetry, "time", clock)
        meter = Meter("main")
        assert meter.buckets() == meter.buckets(final=True) == []
        meter.offered(40.0)
        meter.stepped(a_step(41.0, preemptions=7, prefix_queries=100))
        meter.begin(lambda at: at - 50.0)
        clock.now = 51.0
        meter.stepped(a_step(50.5, preemptions=9, prefix_queries=150))
        meter.answered(51.0, a_reply(51.0))
        (first, *_) = meter.buckets(final=True)
    assert first.in_flight == pytest.approx(1.0)
    assert (first.offered, first.preemptions, first.prefix_queries) == (0, 2, 50)


def test_a_process_that_begins_within_a_span_has_a_bucket_of_its_own() -> None:
    """What the former process told of the same ten seconds is not replaced."""
    with a_meter(begun=15.25) as (meter, clock):
        meter.offered(clock.now)
        clock.now += 0.75
        meter.failed(clock.now, refused=False)
        clock.now += 1.0
        kept = latest(meter.buckets())
    assert set(kept) == {(span_s, 15.25) for span_s in SPANS_S}
    assert kept[1.0, 15.25].in_flight == pytest.approx(1.0)
    assert kept[10.0, 15.25].in_flight == pytest.approx(1.0)


def test_counters_that_begin_again_go_on_growing() -> None:
    with a_meter() as (meter, clock):
        for total in (3, None, 5, 2, 4):
            meter.stepped(a_step(clock.now, preemptions=total))
        clock.now += 2.0
        kept = latest(meter.buckets())
    assert kept[1.0, 0.0].preemptions == 3 + 2 + 2 + 2


def test_totals_of_several_replicas_grow_by_themselves() -> None:
    """Each total of one was taken for that of an engine that had begun again."""
    told = (("a", 100), ("b", 7), ("a", 110), ("b", 9), (None, 1), ("a", 4), ("b", 9))
    with a_meter() as (meter, clock):
        for replica, total in told:
            meter.stepped(a_step(clock.now, replica=replica, preemptions=total))
        clock.now += 2.0
        kept = latest(meter.buckets())
    assert kept[1.0, 0.0].preemptions == 110 + 9 + 1 + 4
    assert kept[1.0, 0.0].steps == 7


def test_those_who_wait_at_all_replicas_and_before_them_are_waiting() -> None:
    with a_meter() as (meter, clock):
        meter.stepped(a_step(clock.now, replica="a", waiting=4), queued=1)  # 3 there
        meter.stepped(a_step(clock.now, replica="b", waiting=2), queued=2)  # none there
        meter.stepped(a_step(clock.now, replica="b", waiting=5))  # 5 there
        meter.stepped(a_step(clock.now, replica="a", waiting=0))
        clock.now += 2.0
        told = latest(meter.buckets())[1.0, 0.0]
    assert told.waiting_mean == pytest.approx(((3 + 1) + (3 + 2) + (3 + 5) + 5) / 4)
    assert (told.waiting_max, told.waiting_share) == (8, 1)


def test_nobody_waits_at_a_replica_that_fell_silent() -> None:
    with a_meter() as (meter, clock):
        meter.stepped(a_step(clock.now, replica="gone", waiting=9))
        clock.now += 9.0
        meter.stepped(a_step(clock.now, replica="there", waiting=1))
        clock.now += 1.0
        meter.stepped(a_step(clock.now, replica="there", waiting=1))
        clock.now += 2.0
        kept = latest(meter.buckets())
    assert [kept[1.0, at].waiting_max for at in (0.0, 9.0, 10.0)] == [9, 10, 1]


def test_the_fullest_replica_s_cache_is_the_engine_s() -> None:
    with a_meter() as (meter, clock):
        for replica, usage in (("a", 0.9), ("b", 0.2)):
            meter.stepped(a_step(clock.now, replica=replica, kv_usage=usage))
        clock.now += 2.0
        kept = latest(meter.buckets())
    assert kept[1.0, 0.0].kv_usage == pytest.approx(0.9)


def test_an_engine_that_says_nothing_is_unknown_not_zero() -> None:
    with a_meter() as (meter, clock):
        meter.offered(clock.now)
        meter.stepped(EngineSnapshot(at=clock.now, source="sampled"))
        clock.now += 0.5
        silent = {"queue_s": None, "prefill_s": None, "decode_s": None, "cached": None}
        meter.answered(clock.now, a_reply(clock.now, **silent))
        clock.now += 2.0
        told = latest(meter.buckets())[1.0, 0.0]
    unknown = [
        name
        for name in Bucket._fields
        if name.startswith(("requests", "tokens", "waiting", "ttft"))
    ]
    unknown += [*COUNTERS, "kv_usage", "cached_tokens", "stream_tokens_per_s"]
    assert {name: getattr(told, name) for name in unknown} == dict.fromkeys(unknown)
    assert (told.steps, told.offered, told.replies, told.rejected) == (1, 1, 1, 0)
    assert (told.prompt_tokens, told.completion_tokens) == (100, 11)


def test_prompts_that_nobody_counted_are_unknown() -> None:
    with a_meter() as (meter, clock):
        meter.answered(clock.now, a_reply(clock.now, prompt=None, cached=None))
        clock.now += 2.0
        told = latest(meter.buckets())[1.0, 0.0]
    assert (told.prompt_tokens, told.cached_tokens, told.completion_tokens) == (None, None, 11)


def test_a_stream_of_one_token_or_of_no_time_has_no_rate() -> None:
    with a_meter() as (meter, clock):
        for changes in ({"completion": 1}, {"decode_s": 0.0}, {"decode_s": 5e-324}):
            meter.answered(clock.now, a_reply(clock.now, **changes))
        clock.now += 2.0
        assert latest(meter.buckets())[1.0, 0.0].stream_tokens_per_s is None
        meter.answered(clock.now, a_reply(clock.now))
        clock.now += 2.0
        assert latest(meter.buckets())[1.0, 2.0].stream_tokens_per_s == pytest.approx(50.0)


def test_waiting_is_judged_by_the_steps_that_tell_it() -> None:
    with a_meter() as (meter, clock):
        for waiting in (None, 0, 0, 3, 5):
            meter.stepped(a_step(clock.now, waiting=waiting))
        clock.now += 2.0
        told = latest(meter.buckets())[1.0, 0.0]
    assert told.steps == 5
    assert (told.waiting_mean, told.waiting_max, told.waiting_share) == (2.0, 5, 0.5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"first_token": 9.7}, 0.2),
        ({"first_token": None}, 0.1 + 0.05 + 0.1),
        ({"first_token": None, "queue_s": None}, None),
        ({"first_token": None, "prefill_s": None}, None),
    ],
)
def test_time_to_first_token(changes: dict[str, Any], expected: float | None) -> None:
    told = time_to_first_token_s(a_reply(10.0, **changes))
    assert told == (None if expected is None else pytest.approx(expected))


def test_an_hour_asleep_costs_a_walk_and_no_memory() -> None:
    with a_meter() as (meter, clock):
        clock.now += 3600.0
        assert meter.buckets() == []
        assert meter._seconds == {}


def test_few_values_differ_however_many_requests_there_are() -> None:
    with a_meter() as (meter, clock):
        rng = random.Random(1)
        for _ in range(20_000):
            first = clock.now - 0.5 + rng.random()
            meter.answered(clock.now, a_reply(clock.now, first_token=first, decode_s=rng.random()))
        clock.now += 2.0
        meter.buckets()
        tally = meter._spans[-1].tally
    assert tally.ttft.total() == 20_000
    assert len(tally.ttft) < 3000
    assert len(tally.rates) < 5000


# Behind the limit.


class OwnEngine(GatedEngine):
    """A user's own engine, which says what it likes."""

    def __init__(self, reply: Reply, *seen: EngineSnapshot) -> None:
        super().__init__()
        self._reply, self._seen = reply, seen

    async def generate(self, request: Request) -> Reply:
        return self._reply

    async def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        for snapshot in self._seen:
            yield snapshot


def final(limited: Limited) -> Bucket:
    """All that was counted."""
    return limited.meter.buckets(final=True)[-1]


NONSENSE = [math.nan, math.inf, -math.inf, 10**30, "many"]


@pytest.mark.parametrize("value", [*NONSENSE, -1, 2.5], ids=str)
@pytest.mark.parametrize("key", ["running", "step_requests", "step_tokens", *COUNTERS])
async def test_a_count_that_no_record_can_hold_is_unknown(key: str, value: Any) -> None:
    """It ended the run: the store's writer fails on what is no number."""
    at = time.monotonic()
    limited = Limited(OwnEngine(a_reply(at), replace(a_step(at), **{key: value})))
    limited.meter.begin(lambda now: now - at)
    (seen,) = [snapshot async for snapshot in limited.snapshots()]
    assert getattr(seen, key) is None
    assert seen.kv_usage == 0.5
    json.dumps(final(limited), allow_nan=False)


@pytest.mark.parametrize("value", NONSENSE, ids=str)
@pytest.mark.parametrize("key", ["kv_usage", "waiting", "rejected"])
async def test_a_level_that_no_record_can_hold_is_unknown(key: str, value: Any) -> None:
    at = time.monotonic()
    limited = Limited(OwnEngine(a_reply(at), replace(a_step(at), **{key: value})))
    limited.meter.begin(lambda now: now - at)
    (seen,) = [snapshot async for snapshot in limited.snapshots()]
    assert getattr(seen, key) == (None if key == "kv_usage" else 0)
    json.dumps(final(limited), allow_nan=False)


@pytest.mark.parametrize("at", [math.nan, math.inf, 1e12, "noon"], ids=str)
async def test_a_snapshot_from_the_future_is_from_now(at: Any) -> None:
    """`time.time()` where `time.monotonic()` is asked for moved a run's end to the next century."""
    before = time.monotonic()
    limited = Limited(OwnEngine(a_reply(before), a_step(at)))
    limited.meter.begin(lambda now: now - before)
    (seen,) = [snapshot async for snapshot in limited.snapshots()]
    assert before <= seen.at <= time.monotonic()
    assert final(limited).steps == 1


@pytest.mark.parametrize("value", NONSENSE, ids=str)
@pytest.mark.parametrize(
    "key", ["admitted", "done", "first_token", "queue_s", "prefill_s", "decode_s"]
)
async def test_a_reply_whose_times_are_none_is_malformed(
    key: str, value: Any, make_request: MakeRequest
) -> None:
    good = a_reply(time.monotonic())
    bad = replace(good, timings=replace(good.timings, **{key: value}))
    limited = Limited(OwnEngine(bad))
    limited.meter.begin(lambda now: now - good.timings.done)
    with pytest.raises(MalformedReply, match="no usable figures"):
        await limited.generate(make_request(1))
    told = final(limited)
    assert (told.offered, told.replies) == (1, 0)


@pytest.mark.parametrize("value", [*NONSENSE, None, 2.5, -1], ids=str)
@pytest.mark.parametrize("key", ["prompt", "completion", "cached"])
async def test_a_reply_whose_tokens_are_no_count_is_malformed(
    key: str, value: Any, make_request: MakeRequest
) -> None:
    good = a_reply(time.monotonic())
    limited = Limited(OwnEngine(replace(good, usage=replace(good.usage, **{key: value}))))
    if value is None and key != "completion":
        assert getattr((await limited.generate(make_request(1))).usage, key) is None
        return
    with pytest.raises(EngineUnavailable):
        await limited.generate(make_request(1))


@pytest.mark.parametrize("name", [5, ["a"], b"a"], ids=str)
async def test_a_replica_whose_name_is_no_text_has_none(
    name: Any, make_request: MakeRequest
) -> None:
    at = time.monotonic()
    engine = OwnEngine(replace(a_reply(at), replica=name), a_step(at, replica=name))
    limited = Limited(engine)
    (seen,) = [snapshot async for snapshot in limited.snapshots()]
    assert seen.replica is None
    with pytest.raises(MalformedReply):
        await limited.generate(make_request(1))


async def test_whatever_becomes_of_a_request_it_is_in_flight_no_more(
    make_request: MakeRequest,
) -> None:
    engine = GatedEngine()
    limited = Limited(engine)
    limited.meter.begin(lambda now: now)
    tasks = [asyncio.create_task(limited.generate(make_request(n))) for n in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await limited.generate(make_request(9))
    assert limited.meter._in_flight == 4
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert limited.meter._in_flight == 0
    told = limited.meter.buckets(final=True)
    assert sum(b.rejected for b in told if b.span_s == 1.0) == 1
    assert sum(b.offered for b in told if b.span_s == 1.0) == 5
