"""An engine over time: what was asked, answered and computed, second by second.

A `Meter` turns single requests and steps into `Bucket`s of 1, 10, 100 and 1,000 seconds. Every
coarser bucket is made from all the values of its finer ones, so its percentiles are its own and
none is an average of averages; whoever keeps them may drop old fine ones and still chart a day.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from serving.engine import EngineSnapshot, Reply

SPANS_S = (1.0, 10.0, 100.0, 1000.0)

_GRACE_S = 0.5
"""Steps are told this much late at most; a second is closed after it."""
_SILENT_S = 10.0
"""What waited at a replica that has told nothing for so long waits there no more."""


class Bucket(NamedTuple):
    """One engine over `span_s` seconds of the run. None: the engine does not say, or there was
    nothing to say it of. Seconds in which nothing was seen nor in flight have no bucket.

    Where an engine is several replicas a step is a step of one of them, and its requests and tokens
    are one batch's; all else is of all replicas together."""

    engine: str
    span_s: float
    at: float
    """Run time at which it begins, seconds: a multiple of its span, but for the first of a process
    that begins within one."""
    steps: int
    """Engine steps (or scrapes) seen."""
    requests_mean: float | None
    """Requests computed in a step: the true occupancy of the batch."""
    requests_p50: float | None
    requests_p95: float | None
    requests_max: float | None
    tokens_mean: float | None
    """Tokens computed in a step, prompt and output."""
    tokens_p50: float | None
    tokens_p95: float | None
    tokens_max: float | None
    in_flight: float
    """Mean number of requests handed in and not answered yet, our own queue included."""
    waiting_mean: float | None
    """Requests waiting at a step, in the engine's queue or in ours: in the queues of all replicas,
    as each told last, and in ours before them."""
    waiting_max: float | None
    waiting_share: float | None
    """Share of the steps at which some request waited."""
    kv_usage: float | None
    """Greatest share of the KV cache in use, of any replica's."""
    prefix_queries: int | None
    prefix_hits: int | None
    preemptions: int | None
    rejected: int
    """Requests refused."""
    offered: int
    """Requests handed in, refused ones included."""
    replies: int
    ttft_mean_s: float | None
    """From handing in to the first token: our queue, the engine's, the prompt's computation."""
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    stream_tokens_per_s: float | None
    """Median over replies of at least two tokens of (tokens - 1) / decode seconds."""
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int


class _Tally:
    """What a bucket is made from. Values are counted, so that tallies add up."""

    def __init__(self) -> None:
        self.steps = 0
        self.requests: Counter[float] = Counter()
        self.tokens: Counter[float] = Counter()
        self.waiting: Counter[float] = Counter()
        self.ttft: Counter[float] = Counter()
        self.rates: Counter[float] = Counter()
        self.in_flight_s = 0.0
        self.kv_usage: float | None = None
        self.totals: Counter[str] = Counter()

    def add(self, other: "_Tally") -> None:
        self.steps += other.steps
        self.requests.update(other.requests)
        for tokens, count in other.tokens.items():
            self.tokens[_three_digits(tokens)] += count
        self.waiting.update(other.waiting)
        self.ttft.update(other.ttft)
        self.rates.update(other.rates)
        self.in_flight_s += other.in_flight_s
        if other.kv_usage is not None:
            self.kv_usage = max(self.kv_usage or 0.0, other.kv_usage)
        self.totals.update(other.totals)

    @property
    def is_empty(self) -> bool:
        return not (self.steps or self.in_flight_s or any(self.totals.values()))

    def bucket(self, engine: str, span_s: float, at: float, seconds: float) -> Bucket:
        """The bucket of `seconds` (at most `span_s`) that begins at `at`."""
        totals = self.totals
        waited = self.waiting.total()
        return Bucket(
            engine,
            span_s,
            at,
            self.steps,
            *_spread(self.requests),
            _greatest(self.requests),
            *_spread(self.tokens),
            _greatest(self.tokens),
            self.in_flight_s / seconds,
            _mean(self.waiting),
            _greatest(self.waiting),
            1 - self.waiting[0] / waited if waited else None,
            self.kv_usage,
            totals.get("prefix_queries"),
            totals.get("prefix_hits"),
            totals.get("preemptions"),
            totals["rejected"],
            totals["offered"],
            totals["replies"],
            *_spread(self.ttft),
            _rank(sorted(self.rates.items()), 0.5),
            totals.get("prompt_tokens"),
            totals.get("cached_tokens"),
            totals["completion_tokens"],
        )


def _mean(values: Counter[float]) -> float | None:
    total = values.total()
    return math.fsum(value * count for value, count in values.items()) / total if total else None


def _rank(ordered: Sequence[tuple[float, int]], share: float) -> float | None:
    """The least value that at least `share` of all values do not exceed (nearest rank)."""
    wanted = sum(count for _, count in ordered) * share
    for value, count in ordered:
        wanted -= count
        if wanted <= 0:
            return value
    return None


def _spread(
    values: Counter[float],
) -> tuple[float | None, float | None, float | None]:
    ordered = sorted(values.items())
    return _mean(values), _rank(ordered, 0.5), _rank(ordered, 0.95)


def _greatest(values: Counter[float]) -> float | None:
    return max(values) if values else None


class _Span:
    """The bucket of one span that is being filled."""

    def __init__(self, span_s: float) -> None:
        self.span_s = span_s
        self.at = 0.0
        self.number = -1
        self.tally = _Tally()

    def bucket(self, engine: str, until: float) -> Bucket:
        """It as it stands at run time `until`, or at its end if that comes first."""
        seconds = _seconds(self.at, (self.number + 1) * self.span_s, until)
        return self.tally.bucket(engine, self.span_s, self.at, seconds)


class Meter:
    """Counts one engine's work. Methods take `time.monotonic()` readings; nothing is counted but
    the requests in flight until `begin`."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._clock: Callable[[float], float] | None = None
        self._begun = 0.0
        self._in_flight = 0
        self._counted_to = 0.0
        self._closed_to = 0
        self._seconds: dict[int, _Tally] = {}
        self._spans = [_Span(span_s) for span_s in SPANS_S[1:]]
        self._last: dict[tuple[str | None, str], int] = {}
        """Totals by replica and name, as told last."""
        self._waiting: dict[str | None, tuple[float, int]] = {}
        """By replica, the one that told last at the end: when that was, and how many requests
        waited there."""
        self._waiting_in_all = 0

    def begin(self, clock: Callable[[float], float]) -> None:
        """Count from now on; `clock` turns a monotonic reading into run time, seconds."""
        self._clock = clock
        self._begun = self._counted_to = clock(time.monotonic())
        self._closed_to = math.floor(self._begun)

    def offered(self, at: float) -> None:
        """A request was handed in."""
        if self._clock is not None:
            self._second(self._flow(at)).totals["offered"] += 1
        self._in_flight += 1

    def answered(self, at: float, reply: Reply) -> None:
        """A request was answered."""
        if self._clock is not None:
            tally = self._second(self._flow(at))
            _add_reply(tally, reply)
        self._in_flight -= 1

    def failed(self, at: float, *, refused: bool) -> None:
        """A request ended without an answer."""
        if self._clock is not None:
            self._second(self._flow(at)).totals["rejected"] += refused
        self._in_flight -= 1

    def stepped(self, snapshot: EngineSnapshot, queued: int = 0) -> None:
        """The engine, or one of its replicas, was seen. `queued`: of those `waiting` in the
        snapshot, the requests in our own queue."""
        growth = {}
        for name in ("prefix_queries", "prefix_hits", "preemptions"):
            if (total := getattr(snapshot, name)) is not None:
                key = snapshot.replica, name
                before = self._last.get(key, 0)
                growth[name] = total - before if total >= before else total
                self._last[key] = total
        if self._clock is None:
            return
        tally = self._second(self._clock(snapshot.at))
        tally.steps += 1
        if snapshot.step_requests is not None:
            tally.requests[snapshot.step_requests] += 1
        if snapshot.step_tokens is not None:
            tally.tokens[snapshot.step_tokens] += 1
        if snapshot.waiting is not None:
            here = snapshot.waiting - queued
            tally.waiting[queued + self._waiting_at_replicas(snapshot, here)] += 1
        if snapshot.kv_usage is not None:
            tally.kv_usage = max(tally.kv_usage or 0.0, snapshot.kv_usage)
        for name, value in growth.items():
            tally.totals[name] += value

    def _waiting_at_replicas(self, snapshot: EngineSnapshot, here: int) -> int:
        """Requests that wait at the replica of the snapshot (`here`) and at the others."""
        waiting = self._waiting
        self._waiting_in_all += here - waiting.pop(snapshot.replica, (0.0, 0))[1]
        waiting[snapshot.replica] = snapshot.at, here
        while snapshot.at - waiting[first := next(iter(waiting))][0] >= _SILENT_S:
            self._waiting_in_all -= waiting.pop(first)[1]
        return self._waiting_in_all

    def buckets(self, *, final: bool = False) -> list[Bucket]:
        """What has closed since the last call: every second that has ended, and the coarser buckets
        that it falls into as they stand (a later one with the same `span_s` and `at` replaces it).

        `final` closes what is open too.
        """
        if self._clock is None:
            return []
        now = self._clock(time.monotonic())
        self._flow_to(now)
        self._closed_to = max(self._closed_to, math.floor(now if final else now - _GRACE_S) + final)
        closed: list[Bucket] = []
        for second in sorted(number for number in self._seconds if number < self._closed_to):
            tally = self._seconds.pop(second)
            if not tally.is_empty:
                closed += self._close(second, tally, now)
        if final:
            closed += [span.bucket(self._engine, now) for span in self._spans if span.number >= 0]
        return closed

    def _close(self, second: int, tally: _Tally, now: float) -> list[Bucket]:
        at = max(float(second), self._begun)
        closed = [tally.bucket(self._engine, 1.0, at, _seconds(at, second + 1.0, now))]
        for span in self._spans:
            number = int(second // span.span_s)
            if number != span.number:
                if span.number >= 0:  # with the idle seconds at its end
                    closed.append(span.bucket(self._engine, now))
                span.number, span.tally = number, _Tally()
                span.at = max(number * span.span_s, self._begun)
            span.tally.add(tally)
            closed.append(span.bucket(self._engine, min(second + 1.0, now)))
        return closed

    def _second(self, at: float) -> _Tally:
        """The tally of the second of `at`; a late word goes to the first that is not closed."""
        number = max(math.floor(at), self._closed_to)
        tally = self._seconds.get(number)
        if tally is None:
            tally = self._seconds[number] = _Tally()
        return tally

    def _flow(self, at: float) -> float:
        """Count the requests in flight up to `at`; returns its run time."""
        assert self._clock is not None
        now = self._clock(at)
        self._flow_to(now)
        return now

    def _flow_to(self, now: float) -> None:
        while self._counted_to < now:
            second = math.floor(self._counted_to)
            until = min(now, second + 1.0)
            if self._in_flight:
                self._second(second).in_flight_s += self._in_flight * (until - self._counted_to)
            self._counted_to = until


def _seconds(begun: float, ended: float, now: float) -> float:
    """Seconds that a bucket covers so far; never 0."""
    return max(min(ended, now) - begun, 1e-3)


def _add_reply(tally: _Tally, reply: Reply) -> None:
    times, usage, totals = reply.timings, reply.usage, tally.totals
    totals["replies"] += 1
    totals["completion_tokens"] += usage.completion
    if usage.prompt is not None:
        totals["prompt_tokens"] += usage.prompt
    if usage.cached is not None:
        totals["cached_tokens"] += usage.cached
    if (ttft := time_to_first_token_s(reply)) is not None:
        tally.ttft[_three_digits(ttft)] += 1
    if times.decode_s is not None and times.decode_s > 1e-6 and usage.completion >= 2:
        tally.rates[_three_digits((usage.completion - 1) / times.decode_s)] += 1


def _three_digits(value: float) -> float:
    """So that few values differ, however many there are: each second counts them anew."""
    return float(f"{value:.3g}")


def time_to_first_token_s(reply: Reply) -> float | None:
    """Seconds from handing a request in to its first token: as seen by us where tokens come one by
    one, else our own queue plus the engine's queue and prefill as it reports them."""
    times = reply.timings
    if times.first_token is not None:
        return times.first_token - times.submitted
    if times.queue_s is None or times.prefill_s is None:
        return None
    return times.admitted - times.submitted + times.queue_s + times.prefill_s
