"""Every rule on series that set it off, and on harmless ones that look like it."""

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from serving.remedies import EngineFacts
from serving.saturation import (
    SIGNALS,
    SaturationConfig,
    Verdict,
    assess,
    is_rising,
    review,
    t_quantile,
)
from serving.telemetry import Bucket

CONFIG = SaturationConfig()
FACTS = EngineFacts(
    name="main",
    kind="vllm",
    max_concurrent=16,
    max_queued=64,
    context_tokens=2048,
    kv_dtype=None,
    prompt_tokens_per_move=400.0,
    uncached_tokens_per_move=25.0,
    output_tokens_per_move=5.0,
    block_tokens=32,
    is_constrained=True,
    parallel_matches=32,
)
HEALTHY = Bucket(
    engine="main",
    span_s=1.0,
    at=0.0,
    steps=20,
    requests_mean=4.0,
    requests_p50=4.0,
    requests_p95=6.0,
    requests_max=7.0,
    tokens_mean=40.0,
    tokens_p50=30.0,
    tokens_p95=90.0,
    tokens_max=120.0,
    in_flight=5.0,
    waiting_mean=0.0,
    waiting_max=0.0,
    waiting_share=0.0,
    kv_usage=0.3,
    prefix_queries=6400,
    prefix_hits=6000,
    preemptions=0,
    rejected=0,
    offered=16,
    replies=16,
    ttft_mean_s=0.3,
    ttft_p50_s=0.3,
    ttft_p95_s=0.35,
    stream_tokens_per_s=40.0,
    prompt_tokens=6400,
    cached_tokens=6000,
    completion_tokens=80,
)
FULL_QUEUE: dict[str, Any] = {
    "waiting_share": 1.0,
    "waiting_mean": 12.0,
    "waiting_max": 15.0,
    "in_flight": 28.0,
}
ENGINE_SAYS = [
    "waiting_share",
    "waiting_mean",
    "waiting_max",
    "kv_usage",
    "preemptions",
    "ttft_p50_s",
    "stream_tokens_per_s",
]

Level = Callable[[float], Any]


def seconds(count: int, *, begin: float = 0.0, span_s: float = 1.0, **levels: Any) -> list[Bucket]:
    """`count` healthy buckets, but for the given figures: values, or functions of the seconds since
    `begin`."""
    made = []
    for number in range(count):
        since = number * span_s
        figures = {k: v(since) if callable(v) else v for k, v in levels.items()}
        made.append(HEALTHY._replace(span_s=span_s, at=begin + since, **figures))
    return made


def followed_by(buckets: list[Bucket], count: int, **levels: Any) -> list[Bucket]:
    return buckets + seconds(count, begin=buckets[-1].at + buckets[-1].span_s, **levels)


def line(first: float, last: float, over_s: float) -> Level:
    return lambda since: first + (last - first) * since / over_s


def now(buckets: Sequence[Bucket], facts: EngineFacts = FACTS) -> Verdict | None:
    return assess(buckets, facts, CONFIG)


def said(buckets: Sequence[Bucket], facts: EngineFacts = FACTS) -> Verdict:
    verdict = assess(buckets, facts, CONFIG)
    assert verdict is not None
    return verdict


def of_run(buckets: Sequence[Bucket], facts: EngineFacts = FACTS) -> Verdict:
    verdict = review(buckets, facts, CONFIG)
    assert verdict is not None
    return verdict


def alarms(buckets: Sequence[Bucket], facts: EngineFacts = FACTS) -> list[tuple[float, Verdict]]:
    """Every second of the series at which somebody who watches it would be alarmed."""
    heard = [
        (buckets[end - 1].at, verdict)
        for end in range(1, len(buckets) + 1)
        if (verdict := assess(buckets[:end], facts, CONFIG)) is not None
    ]
    if not heard:
        assert review(buckets, facts, CONFIG) is None
    return heard


# No alarm


def test_a_healthy_run_says_nothing() -> None:
    assert alarms(seconds(200)) == []


def test_matches_that_begin_one_after_another_are_no_alarm() -> None:
    buckets = seconds(
        16, in_flight=line(0.3, 5, 16), ttft_p50_s=line(0.05, 0.3, 16), replies=line(1, 16, 16)
    )
    assert alarms(followed_by(buckets, 100)) == []


def test_a_minute_of_growing_load_that_is_served_is_no_alarm() -> None:
    """In flight and time to first token rise surely, and so do the answers."""
    buckets = seconds(
        60,
        in_flight=line(1, 14, 60),
        ttft_p50_s=line(0.1, 0.5, 60),
        replies=lambda since: 3 + int(since / 2),
    )
    assert alarms(followed_by(buckets, 60, in_flight=14.0, ttft_p50_s=0.5, replies=32)) == []


def test_a_cold_engine_whose_first_step_takes_long_is_no_alarm() -> None:
    buckets = seconds(36, steps=0, replies=0, in_flight=16.0, waiting_share=None, ttft_p50_s=None)
    buckets = followed_by(buckets, 9, **FULL_QUEUE | {"ttft_p50_s": line(30, 1, 9)})
    assert alarms(followed_by(buckets, 60)) == []


def test_a_single_burst_is_no_alarm() -> None:
    buckets = followed_by(seconds(60), 7, **FULL_QUEUE, ttft_p50_s=2.0)
    assert alarms(followed_by(buckets, 60)) == []


@pytest.mark.parametrize("seed", range(10))
def test_noise_without_a_trend_is_no_alarm(seed: int) -> None:
    dice = random.Random(seed)
    buckets = seconds(
        150,
        ttft_p50_s=lambda _: dice.lognormvariate(-1, 0.5),
        in_flight=lambda _: dice.gammavariate(4, 1.5),
        replies=lambda _: dice.randint(8, 24),
        waiting_share=lambda _: dice.choice((0.0, 0.0, 0.2, 0.9)),
        stream_tokens_per_s=lambda _: dice.gauss(40, 4),
    )
    assert alarms(buckets) == []


def test_a_sure_but_tiny_slope_is_no_alarm() -> None:
    buckets = seconds(120, ttft_p50_s=line(0.3, 0.31, 120), in_flight=line(5, 5.2, 120))
    assert is_rising([(b.at, b.in_flight) for b in buckets], 0.95)
    assert alarms(buckets) == []


def test_a_rise_of_what_nobody_feels_is_no_alarm() -> None:
    buckets = seconds(60, ttft_p50_s=line(0.02, 0.2, 60), in_flight=line(1, 9, 60))
    assert alarms(buckets) == []


@pytest.mark.parametrize("alone", ["ttft_p50_s", "in_flight"])
def test_one_of_the_two_rising_is_no_alarm(alone: str) -> None:
    rising: dict[str, Any] = {alone: line(0.3, 12, 100)}
    assert alarms(seconds(100, **rising)) == []


def test_an_idle_engine_is_no_alarm() -> None:
    idle: dict[str, Any] = {
        "steps": 0,
        "replies": 0,
        "offered": 0,
        "in_flight": 0.0,
        "waiting_share": None,
    }
    assert now([]) is None
    assert alarms(seconds(60, **idle)) == []
    assert alarms(followed_by(followed_by(seconds(30), 30, **idle), 30)) == []


def test_idle_seconds_without_a_bucket_had_nothing_waiting() -> None:
    """Two seconds of three are less than 80 % of the time."""
    sparse = [bucket for bucket in seconds(120, **FULL_QUEUE) if bucket.at % 3]
    assert alarms(sparse) == []


def test_an_engine_that_is_down_is_not_saturated() -> None:
    busy = seconds(40, **FULL_QUEUE)
    assert now(busy) is not None
    silent = {"steps": 0, "replies": 0, "waiting_share": None, "ttft_p50_s": None}
    down = followed_by(busy, 26, **silent, in_flight=28.0)
    assert now(down) is None
    back = followed_by(down, 9, **FULL_QUEUE | {"ttft_p50_s": line(26, 1, 9)})
    assert now(back) is None
    assert now(followed_by(back, 60)) is None


def test_a_very_short_run_says_nothing() -> None:
    assert alarms(seconds(19, **FULL_QUEUE)) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_paced_fleet_within_capacity_says_nothing(seed: int) -> None:
    """16 matches ask for 16 moves a second; the engine could answer some 50."""
    assert alarms(played(matches=16, period_s=1.0, seed=seed)) == []


# The rules


def test_queueing() -> None:
    buckets = followed_by(seconds(60), 15, **FULL_QUEUE, replies=30)
    assert said(buckets) == replace(
        said(buckets),
        engine="main",
        signal="queueing",
        pattern=None,
        since_s=60.0,
        detail="requests waited in 100 % of samples for 15 s, 12 at a time (most 15), "
        "while 30/s were answered",
    )


@pytest.mark.parametrize(("share", "fires"), [(0.79, False), (0.8, True)])
def test_queueing_takes_four_fifths_of_the_samples(share: float, fires: bool) -> None:
    assert (now(followed_by(seconds(30), 10, waiting_share=share)) is not None) is fires


def test_queueing_takes_ten_seconds() -> None:
    heard = alarms(followed_by(seconds(60), 30, **FULL_QUEUE))
    assert heard[0][0] == 67.0, "two of the last ten seconds may be free of it"
    assert heard[-1][1].since_s == 60.0


def test_a_long_step_leaves_waiting_what_waited() -> None:
    """Steps of three seconds: two seconds of three see none end."""
    buckets = [
        bucket._replace(steps=0, replies=0, waiting_share=None) if bucket.at % 3 else bucket
        for bucket in seconds(60, **FULL_QUEUE)
    ]
    assert said(buckets).signal == "queueing"


def test_queueing_for_want_of_memory_says_so() -> None:
    verdict = said(followed_by(seconds(60), 15, **FULL_QUEUE, kv_usage=0.97))
    assert verdict.signal == "queueing"
    assert verdict.detail.endswith("memory pressure: the KV cache is 97 % full")
    assert [remedy.action.split()[0] for remedy in verdict.remedies] == [
        "cap",
        "admit",
        "quantise",
        "add",
    ]


def test_preemption() -> None:
    buckets = followed_by(seconds(50), 5, preemptions=2, kv_usage=0.99)
    buckets = followed_by(buckets, 5)
    verdict = said(buckets)
    assert (verdict.signal, verdict.pattern, verdict.since_s) == ("preemption", None, 50.0)
    assert verdict.detail == (
        "memory pressure: 10 preemptions within 10 s, the KV cache up to 99 % full"
    )
    assert now(followed_by(buckets, 24)) is not None
    assert now(followed_by(buckets, 25)) is None


def test_a_cache_that_is_full_at_once_needs_no_warm_up() -> None:
    verdict = said(seconds(3, preemptions=1, kv_usage=None))
    assert verdict.detail == "memory pressure: 3 preemptions within 3 s"


def test_preemption_is_named_before_the_queue_it_makes() -> None:
    buckets = followed_by(seconds(30), 30, **FULL_QUEUE, preemptions=1)
    assert said(buckets).signal == "preemption"


def test_ttft_rising() -> None:
    buckets = seconds(40)
    rising = followed_by(buckets, 30, ttft_p50_s=line(0.3, 3.3, 30), in_flight=line(5, 35, 30))
    verdict = said(rising)
    assert (verdict.signal, verdict.pattern, verdict.since_s) == ("ttft_rising", "steady", 40.0)
    assert verdict.detail == (
        "time to first token rose from 750 ms to 2750 ms and requests in flight from 9.5 to 30 "
        "within 30 s, while 16/s were answered"
    )


def test_a_slow_rise_is_seen_over_all_there_is() -> None:
    """Too little within half a minute, clear within two."""
    buckets = seconds(130, ttft_p50_s=line(0.5, 1.5, 130), in_flight=line(8, 24, 130))
    heard = alarms(buckets)
    assert {verdict.signal for _, verdict in heard} == {"ttft_rising"}
    assert 30 < heard[0][0] < 110


def test_slow_streams() -> None:
    half = seconds(40, in_flight=8.0, stream_tokens_per_s=40.0)
    verdict = said(followed_by(half, 20, in_flight=16.0, stream_tokens_per_s=24.0))
    assert (verdict.signal, verdict.pattern, verdict.since_s) == ("slow_streams", None, 50.0)
    assert verdict.detail == (
        "with 16 requests in the engine a stream ran at 24 tokens/s, 60 % of the 40 at half that "
        "load"
    )


@pytest.mark.parametrize(
    ("half_load", "load", "rate"),
    [
        (8.0, 16.0, 28.0),  # seven tenths are not less than seven tenths
        (5.0, 10.0, 10.0),  # the batch is not full
        (14.0, 16.0, 10.0),  # half the load was never seen
    ],
)
def test_streams_that_are_not_slow(half_load: float, load: float, rate: float) -> None:
    half = seconds(40, in_flight=half_load)
    assert now(followed_by(half, 20, in_flight=load, stream_tokens_per_s=rate)) is None


def test_rejections() -> None:
    buckets = followed_by(seconds(60), 10, rejected=1, offered=20)
    verdict = said(buckets)
    assert (verdict.signal, verdict.since_s) == ("rejections", 60.0)
    assert verdict.detail == (
        "10 of 200 requests (5.0 %) were refused within 10 s, while 16/s were answered"
    )


@pytest.mark.parametrize(("offered", "fires"), [(200, False), (199, True)])
def test_rejections_take_more_than_a_hundredth(offered: int, fires: bool) -> None:
    buckets = seconds(40, offered=0)
    buckets[-1] = buckets[-1]._replace(offered=offered, rejected=2)
    assert (now(buckets) is not None) is fires


def test_one_rejection_is_chance() -> None:
    buckets = seconds(40, offered=1)
    buckets[-1] = buckets[-1]._replace(rejected=1)
    assert now(buckets) is None


def test_a_fleet_beyond_capacity_queues() -> None:
    heard = alarms(played(matches=64, period_s=0.5, seed=1))
    assert {verdict.signal for _, verdict in heard} == {"queueing"}
    assert heard[-1][1].pattern == "steady"
    assert heard[-1][0] - heard[0][0] > 60


# One-token moves and silent engines


def test_one_token_moves_have_no_stream_and_queue_all_the_same() -> None:
    buckets = seconds(40, **FULL_QUEUE, stream_tokens_per_s=None)
    assert said(buckets).signal == "queueing"


def test_an_engine_that_says_little_is_judged_by_what_is_seen_of_it() -> None:
    silent: dict[str, Any] = dict.fromkeys(ENGINE_SAYS)
    assert alarms(seconds(60, **silent | {"in_flight": 40.0})) == []
    silent["ttft_p50_s"] = line(0.5, 5, 60)
    verdict = said(seconds(60, **silent, in_flight=line(5, 50, 60)))
    assert (verdict.signal, verdict.pattern) == ("ttft_rising", "steady")
    assert "parallel_matches" in verdict.remedies[0].action
    assert "only a run shows" in verdict.remedies[0].effect


# Steady or sawtooth


def tooth(buckets: list[Bucket], waiting: int, free: int) -> list[Bucket]:
    return followed_by(followed_by(buckets, waiting, **FULL_QUEUE), free)


def test_bursts_that_drain_are_a_sawtooth() -> None:
    buckets = seconds(20)
    for _ in range(3):
        buckets = tooth(buckets, waiting=15, free=6)
    verdict = said(followed_by(buckets, 12, **FULL_QUEUE))
    assert (verdict.signal, verdict.pattern) == ("queueing", "sawtooth")
    assert [(r.action, r.effect) for r in verdict.remedies] == [
        (
            "nothing has to change: max_queued = 64 holds the bursts",
            "a burst of 15 waiting is answered in about 938 ms by itself",
        )
    ]


def test_bursts_that_are_refused_need_a_longer_queue() -> None:
    buckets = seconds(20)
    for _ in range(3):
        buckets = tooth(buckets, waiting=15, free=6)
    buckets = followed_by(buckets, 12, **FULL_QUEUE, rejected=4)
    verdict = said(buckets, replace(FACTS, max_queued=12))
    assert verdict.remedies[0].action == "let bursts wait: max_queued 12 → 24"


def test_idle_seconds_without_a_bucket_are_a_drain() -> None:
    buckets = seconds(20)
    for begin in (20, 40, 60, 80):
        buckets += seconds(14, begin=begin, **FULL_QUEUE)
    assert said(buckets).pattern == "sawtooth"


def test_a_queue_that_never_empties_is_steady() -> None:
    """Rising, or level because every match already waits."""
    assert said(seconds(45, **FULL_QUEUE | {"waiting_mean": line(1, 40, 45)})).pattern == "steady"
    assert said(seconds(45, **FULL_QUEUE)).pattern == "steady"


def test_the_first_seconds_of_a_queue_may_be_either() -> None:
    assert said(followed_by(seconds(30), 20, **FULL_QUEUE)).pattern is None


def test_a_queue_that_outlasts_its_bursts_is_steady() -> None:
    buckets = tooth(tooth(seconds(12), waiting=12, free=4), waiting=12, free=4)
    assert said(followed_by(buckets, 24, **FULL_QUEUE)).pattern == "sawtooth"
    assert said(followed_by(buckets, 31, **FULL_QUEUE)).pattern == "steady"


# Spans


@pytest.mark.parametrize("span_s", [10.0, 100.0, 1000.0])
def test_coarser_spans_are_judged_by_their_seconds(span_s: float) -> None:
    healthy = seconds(30, span_s=span_s, replies=int(16 * span_s), offered=int(16 * span_s))
    assert now(healthy) is None
    busy = healthy[-1]._replace(at=healthy[-1].at + span_s, **FULL_QUEUE)
    verdict = said([*healthy, busy])
    assert (verdict.signal, verdict.since_s) == ("queueing", 30 * span_s)
    assert verdict.detail.startswith(f"requests waited in 100 % of samples for {span_s:.0f} s")
    assert "while 16/s were answered" in verdict.detail


def test_a_trend_of_hours_is_seen_at_coarser_spans() -> None:
    over = 40 * 100.0
    ttft, in_flight = line(0.5, 5, over), line(5, 50, over)
    verdict = said(seconds(40, span_s=100.0, ttft_p50_s=ttft, in_flight=in_flight, replies=1600))
    assert verdict.signal == "ttft_rising"
    assert "while 16/s were answered" in verdict.detail


# What vLLM did on two CPU cores


def recorded(name: str, **facts: Any) -> tuple[list[Bucket], EngineFacts]:
    """Seconds of a real run (vLLM 0.32, the packaged model), and what was known of its engine."""
    lines = (Path(__file__).parent / "saturation" / f"{name}.jsonl").read_text().splitlines()
    buckets = [HEALTHY._replace(**json.loads(text)) for text in lines]
    return buckets, replace(FACTS, **facts)


def test_vllm_with_room_says_nothing() -> None:
    """4 matches, each asking once a second; 8 places."""
    buckets, facts = recorded("healthy", max_concurrent=8, parallel_matches=4)
    assert alarms(buckets, facts) == []


def test_vllm_overloaded_queues() -> None:
    """16 matches that ask without a pause; 4 places."""
    buckets, facts = recorded("overload", max_concurrent=4, parallel_matches=16)
    heard = alarms(buckets, facts)
    assert heard[0][0] == 19.0, "ten seconds of warm-up and ten of waiting"
    assert {verdict.signal for _, verdict in heard} == {"queueing"}
    verdict = of_run(buckets, facts)
    assert (verdict.signal, verdict.pattern) == ("queueing", "steady")
    assert [remedy.action for remedy in verdict.remedies[:2]] == [
        "admit less: parallel_matches 16 → 4",
        "a larger batch: max_concurrent 4 → 16, for the KV cache is only 10 % full",
    ]


def test_vllm_with_a_tiny_cache_says_memory_pressure() -> None:
    """8 matches that write 120 tokens a move; 26 blocks of KV cache in all."""
    buckets, facts = recorded("memory", max_concurrent=8, parallel_matches=8)
    heard = alarms(buckets, facts)
    assert {verdict.signal for _, verdict in heard} == {"preemption"}
    assert heard[0][0] < 5
    verdict = of_run(buckets, facts)
    assert verdict.detail.startswith("memory pressure: ")
    assert "max_concurrent 8 → 5" in verdict.remedies[1].action


# A whole run


def test_the_run_names_the_first_signal_and_how_long_any_held() -> None:
    buckets = followed_by(seconds(100), 40, **FULL_QUEUE)
    buckets = followed_by(followed_by(buckets, 40), 20, rejected=2)
    verdict = of_run(buckets)
    assert (verdict.signal, verdict.pattern, verdict.since_s) == ("queueing", "steady", 100.0)
    assert verdict.detail == (
        "requests waited in 100 % of samples for 10 s, 12 at a time (most 15), while 16/s were "
        "answered; first at 100 s, and for 30 % of the run some signal held (queueing 20 %, "
        "rejections 10 %)"
    )


def test_memory_that_ran_short_later_has_its_remedies_too() -> None:
    buckets = followed_by(seconds(30), 60, **FULL_QUEUE)
    verdict = of_run(followed_by(buckets, 60, **FULL_QUEUE, preemptions=1))
    assert verdict.signal == "queueing"
    assert {"cap", "quantise"} <= {remedy.action.split()[0] for remedy in verdict.remedies}


def test_a_long_run_is_reviewed_in_its_own_spans() -> None:
    day = seconds(500, span_s=100.0, replies=1600, offered=1600)
    assert review(day, FACTS, CONFIG) is None
    day[200:300] = seconds(100, begin=20_000, span_s=100.0, **FULL_QUEUE)
    assert of_run(day).since_s == 20_000.0
    assert "for 20 % of the run" in of_run(day).detail


# Remedies


def effects(verdict: Verdict) -> dict[str, str]:
    """Effects by the first word of what is to be done."""
    return {remedy.action.split()[0]: remedy.effect for remedy in verdict.remedies}


def test_remedies_come_cheapest_first_each_with_its_effect() -> None:
    facts = replace(
        FACTS, uncached_tokens_per_move=300.0, output_tokens_per_move=180.0, is_constrained=False
    )
    verdict = said(seconds(60, **FULL_QUEUE, replies=30), facts)
    assert [(remedy.action, remedy.effect) for remedy in verdict.remedies] == [
        (
            "mend the prompt layout: nothing that changes between moves before the list of moves",
            "uncached prompt 300 → about 26 tokens a move: about 2.3× the moves a second",
        ),
        (
            'constrain the answer to the legal moves (mode = "constrained")',
            "output 180 → 5 tokens a move: about 1.6× the moves a second",
        ),
        (
            "admit less: parallel_matches 32 → 18",
            "about 400 ms less wait for a move at the same 30/s",
        ),
        (
            "a larger batch: max_concurrent 16 → 32, for the KV cache is only 30 % full",
            "no request waits for a place in the batch; each step takes longer, by how much only a "
            "run shows",
        ),
        (
            "add a GPU: a second engine, matches split between the two",
            "up to 2× the moves a second and 2× the KV cache, since matches do not depend on each "
            "other",
        ),
    ]


def test_constrained_answers_are_predicted_by_the_cost_of_a_move() -> None:
    facts = replace(FACTS, output_tokens_per_move=180.0, is_constrained=False)
    verdict = said(seconds(60, **FULL_QUEUE), facts)
    assert effects(verdict)["constrain"] == (
        "output 180 → 5 tokens a move: about 6.8× the moves a second"
    )


def test_what_is_done_already_is_not_advised() -> None:
    verdict = said(seconds(60, **FULL_QUEUE, kv_usage=0.95), replace(FACTS, kv_dtype="fp8_e5m2"))
    assert effects(verdict).keys() == {"cap", "admit", "add"}


def test_short_free_answers_gain_nothing_by_a_constraint() -> None:
    verdict = said(seconds(60, **FULL_QUEUE), replace(FACTS, is_constrained=False))
    assert "constrain" not in effects(verdict)


def test_a_prompt_that_no_cache_holds_asks_for_the_cache() -> None:
    verdict = said(seconds(60, **FULL_QUEUE), replace(FACTS, uncached_tokens_per_move=400.0))
    assert verdict.remedies[0].action.startswith("turn the prefix cache on")


def test_unknown_facts_are_said_in_words() -> None:
    facts = replace(
        FACTS,
        prompt_tokens_per_move=None,
        uncached_tokens_per_move=None,
        output_tokens_per_move=180.0,
        is_constrained=False,
    )
    verdict = said(seconds(60, **FULL_QUEUE, preemptions=1), facts)
    assert "how many it holds is not reported" in effects(verdict)["cap"]
    assert effects(verdict)["constrain"].endswith("computed beside it are not reported")
    nothing = replace(facts, output_tokens_per_move=None)
    assert effects(said(seconds(60, **FULL_QUEUE), nothing))["constrain"] == (
        "about 5 output tokens a move"
    )


def test_memory_pressure_asks_for_what_eases_memory() -> None:
    verdict = said(seconds(40, preemptions=1, kv_usage=1.0, in_flight=12.0, waiting_mean=2.0))
    assert [remedy.action for remedy in verdict.remedies] == [
        "cap the context: shorter games (max_plies) or a smaller context_tokens",
        "fewer active sequences: max_concurrent 16 → 9, or extra_args.watermark = 0.05",
        'quantise the KV cache (kv_dtype = "fp8" or another 8-bit type the engine has)',
        "add a GPU: a second engine, matches split between the two",
    ]
    assert effects(verdict)["cap"].startswith("a request holds about 405 tokens of KV cache now")
    single = said(seconds(40, preemptions=1), replace(FACTS, max_concurrent=1, kv_dtype="float32"))
    assert "fewer" not in effects(single)
    assert effects(single)["quantise"].startswith("about 4×")


def test_a_larger_batch_on_ray_is_the_replicas_too() -> None:
    verdict = said(seconds(60, **FULL_QUEUE, kv_usage=0.3), replace(FACTS, kind="ray"))
    assert any(
        "16 → 32, engine.max_concurrent in step with it" in r.action for r in verdict.remedies
    )


def test_of_an_engine_of_replicas_one_more_is_advised() -> None:
    verdict = said(seconds(60, **FULL_QUEUE), replace(FACTS, has_replicas=True))
    assert verdict.remedies[-1].action == "add a GPU: one replica more"
    assert "as one replica brings now" in verdict.remedies[-1].effect


def test_slow_streams_are_traded_for_a_smaller_batch() -> None:
    half = seconds(40, in_flight=8.0, stream_tokens_per_s=40.0)
    verdict = said(followed_by(half, 20, in_flight=16.0, stream_tokens_per_s=24.0))
    remedy = verdict.remedies[0]
    assert remedy.action == "fewer active sequences: max_concurrent 16 → 8"
    assert remedy.effect == (
        "a stream at 40 tokens/s instead of 24, and 17 % fewer tokens a second in all"
    )
    verdict = said(followed_by(half, 20, in_flight=16.0, stream_tokens_per_s=16.0))
    assert verdict.remedies[0].effect.endswith("and 25 % more tokens a second in all")


def test_refused_matches_are_not_begun() -> None:
    buckets = followed_by(
        seconds(60, waiting_mean=None), 10, rejected=5, offered=20, waiting_mean=None
    )
    assert said(buckets).remedies[0].action == "admit less: parallel_matches 32 → 24"


# Statistics


@pytest.mark.parametrize(
    ("share", "freedom", "value"),
    [
        (0.975, 3, 3.182),
        (0.975, 10, 2.228),
        (0.975, 18, 2.101),
        (0.975, 28, 2.048),
        (0.975, 60, 2.000),
        (0.975, 120, 1.980),
        (0.95, 10, 1.812),
        (0.995, 30, 2.750),
    ],
)
def test_t_quantiles_are_those_of_the_tables(share: float, freedom: int, value: float) -> None:
    assert t_quantile(share, freedom) == pytest.approx(value, rel=0.01 if freedom < 10 else 3e-4)


def test_a_slope_is_sure_by_students_t() -> None:
    """Slope 0.3, residuals +-1: t = 0.3 sqrt(n^3 / 12) roughly, so sure from ten points or so."""
    points = [(float(x), 0.3 * x + (-1.0) ** x) for x in range(20)]
    assert is_rising(points, 0.95)
    assert not is_rising(points[:6], 0.95)
    assert not is_rising([(x, -y) for x, y in points], 0.95)
    assert not is_rising([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], 0.95)
    assert not is_rising(points[:2], 0.95)


def test_a_confidence_of_95_is_wrong_one_time_in_forty() -> None:
    dice = random.Random(3)
    noise = [[(float(x), dice.gauss(0, 1)) for x in range(20)] for _ in range(4000)]
    wrong = sum(is_rising(points, 0.95) for points in noise)
    assert 0.018 < wrong / 4000 < 0.033


# What always holds

FIGURES = st.fixed_dictionaries(
    {
        "steps": st.integers(0, 50),
        "in_flight": st.floats(0, 200),
        "replies": st.integers(0, 100),
        "offered": st.integers(0, 100),
        "rejected": st.integers(0, 20),
        "waiting_mean": st.none() | st.floats(0, 100),
        "waiting_max": st.none() | st.floats(0, 200),
        "waiting_share": st.none() | st.floats(0, 1),
        "kv_usage": st.none() | st.floats(0, 1),
        "preemptions": st.none() | st.integers(0, 3),
        "ttft_p50_s": st.none() | st.floats(0, 100),
        "stream_tokens_per_s": st.none() | st.floats(0, 1000),
    }
)


@st.composite
def runs(draw: st.DrawFn) -> list[Bucket]:
    """Stretches of like seconds, with gaps between them."""
    span_s = draw(st.sampled_from([1.0, 10.0, 100.0, 1000.0]))
    buckets: list[Bucket] = []
    at = draw(st.floats(0, 1e5))
    for _ in range(draw(st.integers(0, 6))):
        figures = draw(FIGURES)
        stretch = seconds(draw(st.integers(1, 40)), begin=at, span_s=span_s, **figures)
        buckets += stretch
        at = stretch[-1].at + span_s + draw(st.sampled_from([0.0, 0.0, 3.0, 60.0]))
    return buckets


KNOWN = st.none() | st.floats(0, 1e6)
ANY_FACTS = st.builds(
    EngineFacts,
    name=st.just("main"),
    kind=st.sampled_from(["vllm", "scripted", "own:Engine"]),
    max_concurrent=st.integers(1, 1024),
    max_queued=st.integers(0, 4096),
    context_tokens=st.integers(64, 131_072),
    kv_dtype=st.sampled_from([None, "auto", "fp8", "float32"]),
    prompt_tokens_per_move=KNOWN,
    uncached_tokens_per_move=KNOWN,
    output_tokens_per_move=KNOWN,
    block_tokens=st.none() | st.integers(1, 256),
    is_constrained=st.booleans(),
    parallel_matches=st.integers(1, 1024),
)


@settings(max_examples=150, deadline=None)
@given(runs(), ANY_FACTS)
def test_every_run_gets_a_whole_verdict_or_none(buckets: list[Bucket], facts: EngineFacts) -> None:
    for rule in (assess, review):
        verdict = rule(buckets, facts, CONFIG)
        if verdict is not None:
            assert verdict.signal in SIGNALS
            assert verdict.remedies
            assert all(remedy.action and remedy.effect for remedy in verdict.remedies)
            assert buckets[0].at <= verdict.since_s <= buckets[-1].at
            assert "nan" not in repr(verdict)
            assert "inf " not in repr(verdict)


@settings(max_examples=100, deadline=None)
@given(st.lists(FIGURES, max_size=40), st.data())
def test_buckets_in_any_order_raise_nothing(
    figures: list[dict[str, Any]], data: st.DataObject
) -> None:
    spans = st.sampled_from([1.0, 10.0, 1000.0])
    buckets = [
        HEALTHY._replace(at=data.draw(st.floats(0, 1e6)), span_s=data.draw(spans), **each)
        for each in figures
    ]
    for rule in (assess, review):
        verdict = rule(buckets, FACTS, CONFIG)
        assert verdict is None or verdict.remedies


@settings(max_examples=150, deadline=None)
@given(runs(), st.sets(st.sampled_from(ENGINE_SAYS), min_size=1))
def test_an_engine_that_says_less_is_never_alarming_for_it(
    buckets: list[Bucket], unsaid: set[str]
) -> None:
    nothing: dict[str, Any] = dict.fromkeys(unsaid)
    silent = [bucket._replace(**nothing) for bucket in buckets]
    for rule in (assess, review):
        if rule(buckets, FACTS, CONFIG) is None:
            assert rule(silent, FACTS, CONFIG) is None


def test_the_verdict_of_a_second_costs_less_than_two_milliseconds() -> None:
    buckets = played(matches=64, period_s=0.5, seed=1)
    taken = []
    for _ in range(10):
        begun = time.process_time()
        said(buckets)
        taken.append(time.process_time() - begun)
    assert min(taken) < 0.002


def test_thresholds_are_checked() -> None:
    with pytest.raises(ValidationError):
        SaturationConfig(waiting_share=1.5)
    with pytest.raises(ValidationError):
        SaturationConfig.model_validate({"waiting_shares": 0.5})
    assert all(field.description for field in SaturationConfig.model_fields.values())


def test_a_threshold_of_ones_own_counts() -> None:
    buckets = followed_by(seconds(30), 10, waiting_share=0.6)
    assert now(buckets) is None
    assert assess(buckets, FACTS, SaturationConfig(waiting_share=0.5)) is not None


# A fleet in small: matches that ask when they are due, and an engine that answers in batches


class Step(NamedTuple):
    end: float
    requests: int
    waiting: int


class Answer(NamedTuple):
    asked: float
    first: float
    done: float


PLACES = 16
STEPS_A_MOVE = 5


def played(*, matches: int, period_s: float, seed: int) -> list[Bucket]:
    """100 seconds of it. A step takes 30 ms and 2 ms a request; a match asks when its last move is
    answered, and not before `period_s` has passed since it asked for that."""
    dice = random.Random(seed)
    due = [dice.uniform(0, 2.0) for _ in range(matches)]
    queue: list[int] = []
    batch: dict[int, list[float]] = {}
    """The ends of the steps that a match's move has had."""
    steps: list[Step] = []
    answers: list[Answer] = []
    clock = 0.0
    while clock < 100:
        queue += [
            m for m, at in enumerate(due) if at <= clock and m not in queue and m not in batch
        ]
        while queue and len(batch) < PLACES:
            batch[queue.pop(0)] = []
        if not batch:
            clock = min(due)
            continue
        clock += 0.03 + 0.002 * len(batch)
        steps.append(Step(clock, len(batch), len(queue)))
        for match, ends in list(batch.items()):
            ends.append(clock)
            if len(ends) == STEPS_A_MOVE:
                answers.append(Answer(due[match], ends[0], clock))
                due[match] = max(clock, due[match] + period_s * dice.uniform(0.9, 1.1))
                del batch[match]
    return in_seconds(steps, answers)


def in_seconds(steps: Sequence[Step], answers: Sequence[Answer]) -> list[Bucket]:
    buckets = []
    for second in range(100):
        stepped = [step for step in steps if int(step.end) == second]
        answered = [answer for answer in answers if int(answer.done) == second]
        if not stepped:
            continue
        waiting = [step.waiting for step in stepped]
        rates = [(STEPS_A_MOVE - 1) / (a.done - a.first) for a in answered]
        ttft = [a.first - a.asked for a in answered]
        buckets.append(
            HEALTHY._replace(
                at=float(second),
                steps=len(stepped),
                in_flight=statistics.fmean(s.requests + s.waiting for s in stepped),
                waiting_mean=statistics.fmean(waiting),
                waiting_max=max(waiting),
                waiting_share=sum(n > 0 for n in waiting) / len(waiting),
                replies=len(answered),
                ttft_p50_s=statistics.median(ttft) if ttft else None,
                stream_tokens_per_s=statistics.median(rates) if rates else None,
            )
        )
    return buckets
