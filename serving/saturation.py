"""Whether an engine is saturated, why, and what to do about it, cheapest first. Pure.

Five signs, each a rule of its own over `Bucket`s (`SIGNALS`, a cause before what it causes):

    preemption     sequences lost their place in the KV cache: memory is short
    queueing       requests waited nearly all the time
    ttft_rising    time to first token and requests in flight climb, and no more is answered
    slow_streams   a full batch slows every stream more than half a batch does
    rejections     requests are refused

What an engine does not report counts as no sign: a rule that lacks its figures stays silent.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from serving.remedies import (
    EngineFacts,
    Load,
    Remedy,
    count_text,
    milliseconds,
    number,
    percent,
    remedies,
    seconds_text,
)
from serving.telemetry import Bucket

Pattern = Literal["steady", "sawtooth"]

LOOKBACK_BUCKETS = 120
"""The rules look at this many of the last buckets; older ones serve only as half load to compare
with."""

_DRAINED_S = 1.0
"""A queue that is empty for less has not drained."""


class SaturationConfig(BaseModel):
    """`[saturation]`: when an engine is called saturated."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    warmup_seconds: float = Field(
        default=10.0,
        ge=0,
        strict=True,
        description="Seconds after an engine's first step, or its first after it was down, in "
        "which nothing but preemption counts: matches begin, and first steps are slow.",
    )
    gap_seconds: float = Field(
        default=10.0,
        gt=0,
        strict=True,
        description="Seconds without a step while requests are in flight from which the engine "
        "counts as down; fewer are one long step.",
    )
    window_seconds: float = Field(
        default=10.0,
        gt=0,
        le=100,
        strict=True,
        description="Seconds over which waiting, refusals and the rate of streams are judged.",
    )
    waiting_share: float = Field(
        default=0.8,
        gt=0,
        le=1,
        strict=True,
        description="queueing: share of the samples in the window at which requests waited.",
    )
    trend_seconds: float = Field(
        default=30.0,
        gt=0,
        le=100,
        strict=True,
        description="ttft_rising: seconds over which a trend is looked for, besides all there is; "
        "a queue not empty for as long is steady.",
    )
    trend_samples: int = Field(
        default=20,
        ge=9,
        le=100,
        strict=True,
        description="ttft_rising: least number of buckets for a trend.",
    )
    trend_confidence: float = Field(
        default=0.95,
        gt=0.5,
        lt=1,
        strict=True,
        description="ttft_rising: two-sided confidence with which both slopes must be above 0 "
        "(GuideLLM's rule: 0.95).",
    )
    trend_rise: float = Field(
        default=0.5,
        gt=0,
        strict=True,
        description="ttft_rising: least relative rise of both, last third against first; as much "
        "more answered is more load, not less capacity.",
    )
    trend_spread: float = Field(
        default=0.2,
        ge=0,
        le=0.5,
        strict=True,
        description="ttft_rising: least share of the rise in each half of the window, so that a "
        "short burst is no trend.",
    )
    ttft_floor_seconds: float = Field(
        default=0.25,
        ge=0,
        strict=True,
        description="ttft_rising: a time to first token below this is no worry however it rose "
        "(a quarter of a move a second).",
    )
    preemption_seconds: float = Field(
        default=30.0,
        gt=0,
        le=100,
        strict=True,
        description="preemption: seconds for which one preemption counts as pressure.",
    )
    kv_pressure: float = Field(
        default=0.9,
        gt=0,
        le=1,
        strict=True,
        description="Share of the KV cache in use from which waiting is memory's fault.",
    )
    stream_share: float = Field(
        default=0.7,
        gt=0,
        lt=1,
        strict=True,
        description="slow_streams: tokens a second of a stream, against those at half the load.",
    )
    stream_samples: int = Field(
        default=5,
        ge=1,
        strict=True,
        description="slow_streams: least number of buckets now and at half load.",
    )
    full_batch_share: float = Field(
        default=0.75,
        gt=0,
        le=1,
        strict=True,
        description="slow_streams: share of the largest possible batch from which it is full.",
    )
    rejection_share: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        strict=True,
        description="rejections: share of the requests handed in; more refused is an alarm.",
    )
    rejections: int = Field(
        default=2,
        ge=1,
        strict=True,
        description="rejections: least number refused; one may be chance.",
    )
    drains: int = Field(
        default=2,
        ge=1,
        strict=True,
        description="Times a queue must have emptied again to be called a sawtooth.",
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """An engine is saturated."""

    engine: str
    signal: str
    """One of `SIGNALS`."""
    pattern: Pattern | None
    """`steady`: capacity is short. `sawtooth`: bursts that a queue absorbs. None: unknown."""
    detail: str
    """One sentence with the signal's numbers."""
    since_s: float
    """Run time, seconds, from which the signal has held."""
    remedies: tuple[Remedy, ...]
    """Cheapest first; never empty."""


def assess(
    buckets: Sequence[Bucket], facts: EngineFacts, config: SaturationConfig
) -> Verdict | None:
    """Whether the engine is saturated at the end of the last bucket; None: no sign of it.

    Takes one engine's buckets of one span in order of time, `LOOKBACK_BUCKETS` or more of them.
    Of several signals that hold, the first in `SIGNALS` is named.
    """
    scene = _scene(buckets, _StreamRates(buckets, facts, config), facts, config)
    findings = _findings(scene)
    return _verdict(findings[0], scene) if findings else None


def review(
    buckets: Sequence[Bucket], facts: EngineFacts, config: SaturationConfig
) -> Verdict | None:
    """The first signal to fire in a whole run, with when it began and for what share of the run it
    and others held; None if none ever did.

    The run is judged as `assess` would have done, once a window; but a stream's rate at half load
    is taken from the whole run.
    """
    rates = _StreamRates(buckets, facts, config)

    def scene_at(end: int) -> _Scene:
        return _scene(buckets[max(0, end - LOOKBACK_BUCKETS) : end], rates, facts, config)

    moments = [
        _Moment(end, seconds, _findings(scene_at(end)))
        for end, seconds in _stops(buckets, config.window_seconds)
    ]
    first = next((moment for moment in moments if moment.findings), None)
    if first is None:
        return None
    finding = first.findings[0]
    shares = _shares_held(moments)
    return _verdict(
        finding._replace(
            pattern=_usual_pattern(finding.signal, moments),
            detail=f"{finding.detail}; {_over_the_run(finding, moments, shares)}",
        ),
        scene_at(first.end),
        shares,
    )


class _Moment(NamedTuple):
    """A stop at which a run was judged."""

    end: int
    """Buckets so far."""
    seconds: float
    """Since the last stop."""
    findings: "list[_Finding]"


def _stops(buckets: Sequence[Bucket], window_seconds: float) -> Iterable[tuple[int, float]]:
    """Where to stop and judge: how many buckets there are so far, and the seconds since the last
    stop."""
    since_s = 0.0
    for end, bucket in enumerate(buckets, start=1):
        since_s += bucket.span_s
        if since_s >= window_seconds or end == len(buckets):
            yield end, since_s
            since_s = 0.0


def _shares_held(moments: Sequence[_Moment]) -> dict[str, float]:
    """By signal that ever held, for what share of the run it did."""
    held = dict.fromkeys(SIGNALS, 0.0)
    for moment in moments:
        for finding in moment.findings:
            held[finding.signal] += moment.seconds
    total = math.fsum(moment.seconds for moment in moments)
    return {signal: seconds / total for signal, seconds in held.items() if seconds}


def _usual_pattern(signal: str, moments: Sequence[_Moment]) -> Pattern | None:
    """What a signal was most of the time, of that in which it could be told."""
    seen = Counter(
        finding.pattern
        for moment in moments
        for finding in moment.findings
        if finding.signal == signal and finding.pattern is not None
    )
    return seen.most_common(1)[0][0] if seen else None


# What is looked at


@dataclass(frozen=True, slots=True)
class _Scene:
    """The engine up to one moment."""

    running: Sequence[Bucket]
    """The last buckets since it was last started."""
    warm: Sequence[Bucket]
    """Of these, those after the warm-up."""
    load: Load
    facts: EngineFacts
    config: SaturationConfig


class _StreamRates:
    """Tokens a second of a stream by the engine's load, from a run's own buckets."""

    def __init__(
        self, buckets: Sequence[Bucket], facts: EngineFacts, config: SaturationConfig
    ) -> None:
        self._least = config.stream_samples
        self._points = [
            (min(bucket.in_flight, facts.max_concurrent), bucket.stream_tokens_per_s)
            for bucket in buckets
            if bucket.stream_tokens_per_s is not None
        ]
        self._known: dict[float, float | None] = {}

    def at(self, load: float) -> float | None:
        """The median at that load, give or take a fifth; None where too little is known."""
        load = round(load, 1)
        if load not in self._known:
            rates = [rate for at, rate in self._points if 0.8 * load <= at <= 1.2 * load]
            enough = len(rates) >= self._least
            self._known[load] = statistics.median(rates) if enough else None
        return self._known[load]


def _scene(
    buckets: Sequence[Bucket], rates: _StreamRates, facts: EngineFacts, config: SaturationConfig
) -> _Scene:
    running = _running(buckets[-LOOKBACK_BUCKETS:], config)
    first = next((bucket.at for bucket in running if _is_alive(bucket)), math.inf)
    warm = [bucket for bucket in running if bucket.at >= first + config.warmup_seconds]
    return _Scene(running, warm, _load(running, warm, rates, facts, config), facts, config)


def _is_alive(bucket: Bucket) -> bool:
    return bucket.steps > 0 or bucket.replies > 0


def _end(bucket: Bucket) -> float:
    return bucket.at + bucket.span_s


def _running(buckets: Sequence[Bucket], config: SaturationConfig) -> Sequence[Bucket]:
    """The buckets since the engine last began to work: empty while it is down.

    It is down when no step ends for `gap_seconds` while requests are in flight. Seconds without a
    bucket had nothing in flight; so many that a trend would not span them are a start afresh.
    """
    start, silent_s, seen_to = 0, 0.0, -math.inf
    for index, bucket in enumerate(buckets):
        if bucket.at - seen_to > config.trend_seconds:
            start, silent_s = index, 0.0
        if not _is_alive(bucket) and bucket.in_flight > 0:
            silent_s += bucket.span_s
        else:
            if silent_s > config.gap_seconds:
                start = index
            silent_s = 0.0
        seen_to = _end(bucket)
    return [] if silent_s > config.gap_seconds else buckets[start:]


def _last(buckets: Sequence[Bucket], seconds: float, least: int = 1) -> Sequence[Bucket]:
    """The buckets that end within the last `seconds`, and `least` of them if there are as many."""
    if not buckets:
        return buckets
    begin = _end(buckets[-1]) - seconds
    count = sum(bucket.at >= begin for bucket in buckets)
    return buckets[-max(count, least) :]


def _load(
    running: Sequence[Bucket],
    warm: Sequence[Bucket],
    rates: _StreamRates,
    facts: EngineFacts,
    config: SaturationConfig,
) -> Load:
    window = _last(running, config.window_seconds)
    seconds = math.fsum(bucket.span_s for bucket in window) or 1.0
    in_flight = math.fsum(bucket.in_flight * bucket.span_s for bucket in window) / seconds
    waiting = [bucket.waiting_mean for bucket in window if bucket.waiting_mean is not None]
    streams = [
        bucket.stream_tokens_per_s
        for bucket in _last(warm, config.window_seconds, config.stream_samples)
        if bucket.stream_tokens_per_s is not None
    ]
    batch = min(in_flight, facts.max_concurrent)
    largest = min(facts.max_concurrent, facts.parallel_matches)
    is_full = batch >= config.full_batch_share * largest
    is_known = is_full and len(streams) >= config.stream_samples
    return Load(
        replies_per_s=sum(bucket.replies for bucket in window) / seconds,
        in_flight=in_flight,
        waiting=statistics.fmean(waiting) if waiting else None,
        waiting_max=_greatest(bucket.waiting_max for bucket in window),
        kv_usage=_greatest(bucket.kv_usage for bucket in window),
        offered=sum(bucket.offered for bucket in window),
        rejected=sum(bucket.rejected for bucket in window),
        stream_rate=statistics.median(streams) if is_known else None,
        half_load_rate=rates.at(batch / 2),
        batch=batch,
    )


def _greatest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


# The rules


class _Finding(NamedTuple):
    """A signal that holds."""

    signal: str
    since_s: float
    detail: str
    pattern: Pattern | None = None


def _preemption(scene: _Scene) -> _Finding | None:
    """Any preemption: its sequence is computed again from the start. Cold engines are not spared,
    for a cache that is full is full."""
    config = scene.config
    hit = [bucket for bucket in scene.running if bucket.preemptions]
    if not hit or _end(scene.running[-1]) - _end(hit[-1]) >= config.preemption_seconds:
        return None
    since = hit[-1].at
    for bucket in reversed(hit):
        if since - bucket.at > config.preemption_seconds:
            break
        since = bucket.at
    count = sum(bucket.preemptions or 0 for bucket in hit if bucket.at >= since)
    usage = _greatest(bucket.kv_usage for bucket in scene.running if bucket.at >= since)
    kv = "" if usage is None else f", the KV cache up to {percent(usage)} full"
    within = seconds_text(_end(scene.running[-1]) - since)
    detail = f"memory pressure: {count_text(count, 'preemption')} within {within}{kv}"
    return _Finding("preemption", since, detail)


def _queueing(scene: _Scene) -> _Finding | None:
    """Requests waited at `waiting_share` of the samples of the whole window. A second in which no
    step ended is as the one before; one that was idle, or that says nothing, had none waiting."""
    config, warm = scene.config, scene.warm
    if not warm or _end(warm[-1]) - warm[0].at < config.window_seconds:
        return None
    waited = [s * bucket.span_s for s, bucket in zip(_waiting_shares(warm), warm, strict=True)]
    window = len(_last(warm, config.window_seconds))
    share = math.fsum(waited[-window:]) / _covered(warm[-window:], config.window_seconds)
    if share < config.waiting_share:
        return None
    since, total = warm[-window].at, math.fsum(waited[-window:])
    for bucket, seconds in zip(warm[-window - 1 :: -1], waited[-window - 1 :: -1], strict=True):
        total += seconds
        if total / (_end(warm[-1]) - bucket.at) < config.waiting_share:
            break
        since = bucket.at if seconds else since
    load = scene.load
    depth = "" if load.waiting is None else f", {number(load.waiting)} at a time"
    most = "" if load.waiting_max is None else f" (most {number(load.waiting_max)})"
    kv = "; memory pressure: the KV cache is " + percent(load.kv_usage or 0.0) + " full"
    detail = (
        f"requests waited in {percent(share)} of samples for {seconds_text(_end(warm[-1]) - since)}"
        f"{depth}{most}, while {number(load.replies_per_s)}/s were answered"
        f"{kv if _is_memory_short(load, config) else ''}"
    )
    return _Finding("queueing", since, detail, _pattern(warm, config))


def _waiting_shares(buckets: Sequence[Bucket]) -> list[float]:
    shares: list[float] = []
    share = 0.0
    for bucket in buckets:
        if bucket.waiting_share is not None:
            share = bucket.waiting_share
        elif _is_alive(bucket) or bucket.in_flight <= 0:
            share = 0.0
        shares.append(share)
    return shares


def _covered(window: Sequence[Bucket], seconds: float) -> float:
    """Seconds of the window, idle ones without a bucket among them."""
    return max(seconds, math.fsum(bucket.span_s for bucket in window))


def _ttft_rising(scene: _Scene) -> _Finding | None:
    """Time to first token and requests in flight both rise, surely and by much, and answers do not.

    Where more is answered in step, matches are beginning: more load, not less capacity. The median
    of a bucket is one point, since requests of a second are not independent.
    """
    config = scene.config
    windows = (_last(scene.warm, config.trend_seconds, config.trend_samples), scene.warm)
    for window in windows:
        ttft = _rise([(b.at, b.ttft_p50_s) for b in window if b.ttft_p50_s is not None], config)
        in_flight = _rise([(bucket.at, bucket.in_flight) for bucket in window], config)
        if ttft is None or in_flight is None or ttft.last < config.ttft_floor_seconds:
            continue
        answers = [bucket.replies / bucket.span_s for bucket in window]
        before, _, after = _thirds(answers)
        if after >= before * (1 + config.trend_rise):
            continue
        detail = (
            f"time to first token rose from {milliseconds(ttft.first)} to "
            f"{milliseconds(ttft.last)} and requests in flight from {number(in_flight.first)} "
            f"to {number(in_flight.last)} within {seconds_text(_end(window[-1]) - window[0].at)}, "
            f"while {number(after)}/s were answered"
        )
        pattern = _pattern(scene.warm, config) or "steady"
        return _Finding("ttft_rising", window[0].at, detail, pattern)
    return None


class _Rise(NamedTuple):
    first: float
    """Median of the first third."""
    last: float


def _rise(points: Sequence[tuple[float, float]], config: SaturationConfig) -> _Rise | None:
    """The rise of a series, if it is sure, large, and spread over all of it."""
    if len(points) < config.trend_samples:
        return None
    first, middle, last = _thirds([y for _, y in points])
    least = config.trend_spread * (last - first)
    if last <= first or last < first * (1 + config.trend_rise):
        return None
    if middle - first < least or last - middle < least:
        return None
    return _Rise(first, last) if is_rising(points, config.trend_confidence) else None


def _thirds(values: Sequence[float]) -> tuple[float, float, float]:
    """The medians of the first, middle and last third: one short burst moves none of them."""
    third = len(values) // 3
    middle = values[third : len(values) - third]
    return (
        statistics.median(values[:third]),
        statistics.median(middle),
        statistics.median(values[-third:]),
    )


def is_rising(points: Sequence[tuple[float, float]], confidence: float) -> bool:
    """Whether the least-squares slope of `(x, y)` points is above 0 at that two-sided confidence.

    Student's t on the slope: slope > t(1 - (1 - confidence) / 2, n - 2) x its standard error
    sqrt(residual sum of squares / (n - 2) / sum of (x - mean)^2). False for fewer than 3 points.
    """
    count = len(points)
    if count < 3:
        return False
    mean_x = math.fsum(x for x, _ in points) / count
    mean_y = math.fsum(y for _, y in points) / count
    xx = math.fsum((x - mean_x) ** 2 for x, _ in points)
    xy = math.fsum((x - mean_x) * (y - mean_y) for x, y in points)
    yy = math.fsum((y - mean_y) ** 2 for _, y in points)
    if xx <= 0 or xy <= 0:
        return False
    residual = max(yy - xy * xy / xx, 0.0)
    error = math.sqrt(residual / (count - 2) / xx)
    return xy / xx > t_quantile(1 - (1 - confidence) / 2, count - 2) * error


def t_quantile(share: float, freedom: int) -> float:
    """Student's t quantile by Abramowitz and Stegun's expansion 26.7.5: within 1 % of the tables
    from 3 degrees of freedom on, within 0.01 % from 10."""
    z = statistics.NormalDist().inv_cdf(share)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def _slow_streams(scene: _Scene) -> _Finding | None:
    """In a full batch a stream runs at less than `stream_share` of its rate at half the load: twice
    the streams bring less than twice 0.7 the tokens, so the batch has outgrown the engine."""
    load, config = scene.load, scene.config
    window = _last(scene.warm, config.window_seconds, config.stream_samples)
    if load.stream_rate is None or load.half_load_rate is None or not window:
        return None
    if load.stream_rate >= config.stream_share * load.half_load_rate:
        return None
    detail = (
        f"with {number(load.batch)} requests in the engine a stream ran at "
        f"{number(load.stream_rate)} tokens/s, {percent(load.stream_rate / load.half_load_rate)} "
        f"of the {number(load.half_load_rate)} at half that load"
    )
    return _Finding("slow_streams", window[0].at, detail)


def _rejections(scene: _Scene) -> _Finding | None:
    """More than `rejection_share` of what was handed in is refused."""
    config = scene.config
    window = _last(scene.warm, config.window_seconds)
    offered = sum(bucket.offered for bucket in window)
    refused = [(bucket.at, bucket.rejected) for bucket in window if bucket.rejected]
    count = sum(rejected for _, rejected in refused)
    if count < config.rejections or count <= config.rejection_share * offered:
        return None
    share = f" ({percent(count / offered)})" if offered >= count else ""
    detail = (
        f"{count} of {count_text(offered, 'request')}{share} were refused within "
        f"{seconds_text(_end(window[-1]) - window[0].at)}, while "
        f"{number(scene.load.replies_per_s)}/s were answered"
    )
    return _Finding("rejections", refused[0][0], detail, _pattern(scene.warm, config))


_RULES: dict[str, Callable[[_Scene], _Finding | None]] = {
    "preemption": _preemption,
    "queueing": _queueing,
    "ttft_rising": _ttft_rising,
    "slow_streams": _slow_streams,
    "rejections": _rejections,
}
SIGNALS = tuple(_RULES)
"""In the order in which they are named: memory that is short makes requests wait, waiting lengthens
the time to first token, and a full queue refuses."""


def _findings(scene: _Scene) -> list[_Finding]:
    if not scene.running:
        return []
    return [finding for rule in _RULES.values() if (finding := rule(scene)) is not None]


def _pattern(warm: Sequence[Bucket], config: SaturationConfig) -> Pattern | None:
    """Steady or sawtooth, by how often the queue emptied; None if it is too early to tell.

    A queue that empties again and again has served all that it was given: over a whole cycle there
    is capacity enough, and bursts need room to wait. One that has not emptied for `trend_seconds`,
    and for twice as long as any burst before, is not going to: as long as it rises, and also where
    it stays level because every match already waits.
    """
    if all(bucket.waiting_share is None for bucket in warm):
        return None
    bursts: list[float] = []
    begun: float | None = None
    seen_to = warm[0].at
    for bucket, share in zip(warm, _waiting_shares(warm), strict=True):
        if begun is not None and bucket.at - seen_to >= _DRAINED_S:
            bursts.append(seen_to - begun)
            begun = None
        if share > 0 and begun is None:
            begun = bucket.at
        seen_to = _end(bucket)
        if begun is not None and (1 - share) * bucket.span_s >= _DRAINED_S:
            bursts.append(seen_to - begun)
            begun = None
    lasted = 0.0 if begun is None else seen_to - begun
    if len(bursts) >= config.drains and lasted <= 2 * max(bursts):
        return "sawtooth"
    return "steady" if lasted >= config.trend_seconds else None


# The words


def _verdict(finding: _Finding, scene: _Scene, shares: Iterable[str] = ()) -> Verdict:
    """`shares`: other signals that held at some time of the run."""
    facts, load, pressure = scene.facts, scene.load, scene.config.kv_pressure
    is_memory = "preemption" in (finding.signal, *shares) or _is_memory_short(load, scene.config)
    to_do = remedies(
        finding.signal,
        facts,
        load,
        kv_pressure=pressure,
        is_memory=is_memory,
        is_burst=finding.pattern == "sawtooth",
    )
    return Verdict(
        facts.name, finding.signal, finding.pattern, finding.detail, finding.since_s, to_do
    )


def _over_the_run(
    finding: _Finding, moments: Sequence[_Moment], shares: Mapping[str, float]
) -> str:
    total = math.fsum(moment.seconds for moment in moments)
    held = math.fsum(moment.seconds for moment in moments if moment.findings)
    each = ", ".join(f"{signal} {percent(share)}" for signal, share in shares.items())
    return (
        f"first at {seconds_text(finding.since_s)}, and for {percent(held / total)} of the run "
        f"some signal held ({each})"
    )


def _is_memory_short(load: Load, config: SaturationConfig) -> bool:
    return load.kv_usage is not None and load.kv_usage >= config.kv_pressure
