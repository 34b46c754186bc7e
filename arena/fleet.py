"""The arena's own workload on paper: matches of two seats that move once a period. Pure and seeded.

    Matches     a source of requests: matches side by side, paced as `arena.pace` does it
    forecast    one run, to its end
    Gpus        many engines, matches routed to them and staying there
    overload    more than an engine can do, behind a plain queue and behind the adaptive cap

A GPU knows nothing of the others once its matches are routed to it, so those with equally many are
alike but for chance: of thousands only some are simulated, and one between two of them in load
counts as a part of each, so that all matches are counted.
"""

import heapq
import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, NamedTuple, get_args

from arena.compare_figures import Answer, Measurement
from arena.pace import SeatPace
from serving.adaptive import AdaptiveCap
from serving.batching import (
    Arrivals,
    ClosedLoop,
    Gate,
    Job,
    QueueCap,
    Server,
    Trace,
    run_continuous,
)

Routing = Literal["hash", "bounded", "even"]
"""hash: by a hash of the match id. bounded: the same, but a GPU that has `BOUND` times the mean
hands a match to the next (consistent hashing with bounded loads, SODA 2018). even: least loaded,
as `serving.affinity` keeps it."""
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
BOUND = 1.1
WARM_UP_PERIODS = 3
"""Of a simulated GPU's matches, before anything is counted."""
ENOUGH = 0.95
"""Share of the moves in time, and of the pace kept, from which a fleet keeps up."""
LEAST_MOVES = 1000
"""That a GPU's pace allows in the time simulated, which is longer where its matches are few."""
MOST_TRIES = 60
"""Until a number of GPUs is found."""


@dataclass(frozen=True)
class Work:
    """What the seats of a match ask for."""

    shapes: tuple[tuple[int, int], ...]
    """Prompt tokens not in the prefix cache, and output tokens, of moves; each equally likely."""
    period_s: float
    """A seat moves so often at most."""
    overhead_s: float = 0.0
    """Of a move, outside the engine."""
    commit_s: float = 0.0
    """From a move until the other side's turn begins."""
    seed: int = 0


class Moved(NamedTuple):
    """Whose a request is."""

    match: "_Match"
    due: float


@dataclass(eq=False, slots=True)
class _Match:
    number: int
    paces: tuple[SeatPace, SeatPace]
    ply: int = 0


class Matches:
    """So many matches at once; as one ends the next begins.

    `total` None: there is no end of them. `plies` None: nor of a match. No move is due after
    `until_s`.
    """

    def __init__(
        self,
        work: Work,
        parallel: int,
        *,
        total: int | None = None,
        plies: int | None = None,
        until_s: float = math.inf,
    ) -> None:
        self._work = work
        self._plies, self._until_s = plies, until_s
        self._dice = Random(f"moves/{work.seed}")
        self._matches = iter(range(total)) if total is not None else itertools.count()
        self._numbers = itertools.count()
        self._next: list[tuple[float, int, Job]] = []
        for _ in range(parallel):
            self._begin(0.0)

    def next_at(self) -> float | None:
        return self._next[0][0] if self._next else None

    def take(self) -> Job:
        return heapq.heappop(self._next)[2]

    def ended(self, job: Job, at: float) -> None:
        match: _Match = job.owner.match
        match.ply += 1
        if match.ply == self._plies:
            self._begin(at)
        else:
            self._ask(match, at + self._work.commit_s)

    def _begin(self, at: float) -> None:
        if (number := next(self._matches, None)) is None:
            return
        period_s = self._work.period_s
        first, second = (
            SeatPace(period_s, f"{self._work.seed}/{number}/{side}") for side in (0, 1)
        )
        # as `arena.match` does, so that matches do not fall in step
        self._ask(_Match(number, (first, second)), at + self._dice.uniform(0, period_s))

    def _ask(self, match: _Match, ready: float) -> None:
        due = match.paces[match.ply % 2].due(ready)
        if due <= self._until_s:
            shape = self._dice.choice(self._work.shapes)
            job = Job(due + self._work.overhead_s, *shape, owner=Moved(match, due))
            heapq.heappush(self._next, (job.arrival, next(self._numbers), job))


def latency_s(job: Job) -> float:
    """From when an answered move was due."""
    assert job.done is not None
    due: float = job.owner.due
    return job.done - due


# one run


class Forecast(NamedTuple):
    """A run as it is expected."""

    moves_per_s: float
    latencies_s: list[float]


def forecast(work: Work, server: Server, *, total: int, parallel: int, plies: int) -> Forecast:
    """`total` matches of `plies` moves each, `parallel` at once, to the end of the last."""
    source = Matches(work, min(parallel, total), total=total, plies=plies)
    trace = run_continuous(source, server)
    began = min(job.owner.due for job in trace.jobs)
    return Forecast(len(trace.jobs) / (trace.makespan_s - began), list(map(latency_s, trace.jobs)))


# many GPUs


class GpuRun(NamedTuple):
    """One GPU while its matches move."""

    matches: int
    moves_per_s: float
    latencies_s: list[float]
    """Of the moves due after the warm-up."""
    seconds: float
    """Simulated after the warm-up."""
    step_requests: float
    """Mean requests in a step."""


Runs = Sequence[tuple[GpuRun, float]]
"""GPUs that were simulated, and how many each stands for."""


class Gpus:
    """GPUs of one kind with one workload; each number of matches is simulated once."""

    def __init__(self, work: Work, server: Server, seconds: float) -> None:
        """Each is simulated for so many seconds, or for `LEAST_MOVES`."""
        self._work, self._server, self._seconds = work, server, seconds
        self._runs: dict[int, GpuRun] = {}

    @property
    def seed(self) -> int:
        return self._work.seed

    def run(self, matches: int) -> GpuRun:
        """A GPU with so many matches."""
        if matches not in self._runs:
            self._runs[matches] = self._simulate(matches)
        return self._runs[matches]

    def seconds_of(self, matches: int) -> tuple[float, float]:
        """Simulated of a GPU with so many matches: until it is warm, and from then on."""
        period_s = self._work.period_s
        least_s = LEAST_MOVES * period_s / 2 / max(matches, 1)
        return WARM_UP_PERIODS * period_s, max(self._seconds, least_s)

    def _simulate(self, matches: int) -> GpuRun:
        warm_s, seconds = self.seconds_of(matches)
        until_s = warm_s + seconds
        work = replace(self._work, seed=self.seed * 1_000_003 + matches)
        server = replace(self._server, seed=work.seed)
        trace = run_continuous(Matches(work, matches, until_s=until_s), server)
        made = sum(warm_s < (job.done or 0.0) <= until_s for job in trace.jobs)
        latencies = [latency_s(job) for job in trace.jobs if job.owner.due >= warm_s]
        return GpuRun(
            matches,
            made / seconds,
            latencies,
            seconds,
            trace.step_requests / trace.steps if trace.steps else 0.0,
        )

    def pace_share(self, runs: Runs) -> float:
        """Moves made, of those that the pace allows."""
        allowed_per_s = sum(run.matches * count for run, count in runs) * 2 / self._work.period_s
        return moves_per_s(runs) / allowed_per_s

    def keeps_up(self, runs: Runs, limit_s: float) -> bool:
        """Whether `ENOUGH` of the moves are within the limit, and of those that the pace allows
        made."""
        return share_within(runs, limit_s) >= ENOUGH and self.pace_share(runs) >= ENOUGH

    def _is_enough(self, matches: int, limit_s: float) -> bool:
        return self.keeps_up([(self.run(matches), 1)], limit_s)

    def most_matches(self, limit_s: float, most: int) -> int:
        """Matches with which a GPU keeps up, up to `most`; 0: not even with one."""
        low, high = 0, 1
        while high <= most and self._is_enough(high, limit_s):
            low, high = high, high * 2
        high = min(high, most + 1)
        while high - low > max(1, low // 100):
            middle = (low + high) // 2
            if self._is_enough(middle, limit_s):
                low = middle
            else:
                high = middle
        return low

    def fleet(self, stands: Mapping[int, float]) -> Runs:
        """GPUs by their matches, and how many each stands for."""
        return [(self.run(load), count) for load, count in sorted(stands.items())]


def stand_ins(loads: Sequence[int], sample: int) -> dict[int, float]:
    """Of GPUs with so many matches each, at most `sample` (2 or more) loads from the least to the
    most, and how many GPUs each stands for: as many GPUs and matches as there are, together."""
    ordered = sorted(loads)
    last = len(ordered) - 1
    picked = sorted({ordered[place * last // (sample - 1)] for place in range(sample)})
    stands = dict.fromkeys(picked, 0.0)
    for load, count in Counter(ordered).items():
        above = bisect_right(picked, load)
        low, high = picked[above - 1], picked[min(above, len(picked) - 1)]
        share = (load - low) / (high - low) if load > low else 0.0
        stands[low] += count * (1 - share)
        stands[high] += count * share
    return stands


def route(matches: int, gpus: int, routing: Routing, seed: int) -> list[int]:
    """How many matches each GPU gets."""
    if routing == "even":
        return [matches * (gpu + 1) // gpus - matches * gpu // gpus for gpu in range(gpus)]
    dice = Random(f"routing/{seed}")
    loads = [0] * gpus
    limit = math.ceil(matches / gpus * BOUND) if routing == "bounded" else matches
    for _ in range(matches):
        gpu = int(dice.random() * gpus)
        while loads[gpu] >= limit:
            gpu = (gpu + 1) % gpus
        loads[gpu] += 1
    return loads


def moves_per_s(runs: Runs) -> float:
    """Of a fleet."""
    return math.fsum(run.moves_per_s * count for run, count in runs)


def latencies_s(runs: Runs) -> Iterable[tuple[float, float]]:
    """Of a fleet's moves, and how many a second of it each stands for."""
    for run, count in runs:
        for latency in run.latencies_s:
            yield latency, count / run.seconds


def share_within(runs: Runs, limit_s: float) -> float:
    """Of all moves of a fleet, those within the limit."""
    within = moves = 0.0
    for latency, weight in latencies_s(runs):
        moves += weight
        within += weight * (latency <= limit_s)
    return within / moves if moves else 0.0


def gpus_needed(
    fleet: Gpus,
    matches: int,
    limit_s: float,
    routing: Routing,
    *,
    sample: int,
    per_gpu: int,
    most: int,
) -> int | None:
    """About the fewest GPUs that keep up, each with about `per_gpu` matches at most: by steps of
    2 %, and chance is in it. None where one match is too much for a GPU, or `most` GPUs are too
    few."""
    each = fleet.most_matches(limit_s, per_gpu)
    gpus = math.ceil(matches / each) if each else most + 1
    for _ in range(MOST_TRIES):
        if gpus > most:
            return None
        runs = fleet.fleet(stand_ins(route(matches, gpus, routing, fleet.seed), sample))
        if fleet.keeps_up(runs, limit_s):
            return gpus
        gpus += math.ceil(gpus / 50)
    return None


# more than an engine can do


class Admission:
    """The adaptive cap that stands before a real engine (`serving.limits`)."""

    def __init__(self, slo_s: float, most: int) -> None:
        self.cap = AdaptiveCap(slo_s, most=most)

    def admits(self, job: Job, waiting: int, free: int) -> bool:
        return self.cap.admit(job.arrival)

    def is_late(self, job: Job, at: float) -> bool:
        return not self.cap.can_be_in_time(at, job.arrival, 0)

    def ended(self, job: Job, at: float) -> None:
        if job.started is not None:
            self.cap.served(at - job.started)
        self.cap.ended(at, job.arrival, is_answered=not job.is_refused)


def warm_s(work: Work, server: Server) -> float:
    """About the longest that a full engine takes for its first moves, all at once."""
    longest = max(output for _, output in work.shapes)
    prompts = server.slots * max(prompt for prompt, _ in work.shapes)
    time, slots = server.step_time, server.slots
    return time.seconds(prompts, slots) + (longest - 1) * time.seconds(slots, slots)


def capacity(work: Work, server: Server, seconds: float) -> float:
    """Moves a second of a full engine: a closed loop with as many clients as slots, `seconds` from
    when it is warm. A move counts by the share of its time in them, as in `arena bench admission`.
    """
    began = warm_s(work, server)
    ended = began + seconds
    dice = Random(f"capacity/{work.seed}")
    jobs = (Job(0.0, *dice.choice(work.shapes)) for _ in itertools.count())
    trace = run_continuous(ClosedLoop(jobs, server.slots, until_s=ended), server)
    return Measurement(began, ended, answers_of(trace), {}, begins_full=True).moves_per_s


def answers_of(trace: Trace, overhead_s: float = 0.0) -> tuple[Answer, ...]:
    """What came of requests that nobody refuses, `overhead_s` later each, as a loop tells it."""
    return tuple(
        Answer(job.arrival, job.arrival, (job.done or 0.0) + overhead_s, None, None)
        for job in trace.jobs
    )


def overload(
    work: Work, server: Server, per_s: float, seconds: float, gate: Gate | None = None
) -> Trace:
    """Moves that are due `per_s` a second, evenly, whatever becomes of those before, as `arena
    bench admission` asks them; no gate: a queue without end."""
    dice = Random(f"overload/{work.seed}")
    jobs = (
        Job(number / per_s + work.overhead_s, *dice.choice(work.shapes))
        for number in range(int(per_s * seconds))
    )
    return run_continuous(Arrivals(jobs), server, gate or QueueCap(None))


def measured(trace: Trace, work: Work, seconds: float) -> Measurement:
    """An overload as the loops of a real engine tell it, so that both are judged alike."""
    answers = tuple(
        Answer(
            job.arrival - work.overhead_s,
            job.arrival,
            job.done or 0.0,
            None,
            "overloaded" if job.is_refused else None,
        )
        for job in trace.jobs
    )
    return Measurement(0.0, seconds, answers, {})
