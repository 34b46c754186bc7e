"""One server, requests that arrive, and two ways to batch them, in virtual time. Pure and seeded.

    static       waits until every slot has a request, or no more can come; computes them together,
                 and answers all of them when the longest is done
    continuous   before each step takes whoever waits into the free slots; each request leaves, and
                 frees its slot, with its own last token (iteration-level scheduling: Orca, OSDI
                 2022; vLLM's and SGLang's)

A step gives every request in it one token; a request's first step computes its prompt as well, in
pieces where a step's tokens are bounded. What a step takes is a `StepTime`. Steps between which
nobody comes, joins or leaves are gone through at once, so a simulation's work is that of its
requests, however many tokens they write.
"""

import heapq
import itertools
import math
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from serving.step_time import StepTime

MOST_TOKENS = 10_000_000
"""Of one request, in a description of lengths."""


@dataclass(eq=False, slots=True)
class Job:
    """A request and what became of it. Times are seconds of the simulation; None: not yet."""

    arrival: float
    prompt: int
    """Prompt tokens to compute, those found in a prefix cache left out."""
    output: int
    """Tokens to write, at least 1."""
    owner: Any = None
    """Whose it is, for the source that made it."""
    slot: int = -1
    started: float | None = None
    """In a slot from here on; `started - arrival` is its wait."""
    finished: float | None = None
    """Its last token was computed."""
    done: float | None = None
    """It was answered, in a static batch with all the others, or refused."""
    is_refused: bool = False


class Source(Protocol):
    """Where requests come from."""

    def next_at(self) -> float | None:
        """When the next one arrives; None: none will, unless one ends first."""
        ...

    def take(self) -> Job:
        """The next one."""
        ...

    def ended(self, job: Job, at: float) -> None:
        """One was answered, or refused."""
        ...


class Gate(Protocol):
    """Who is let in."""

    def admits(self, job: Job, waiting: int, free: int) -> bool:
        """Whether one that arrives may wait; so many wait already, and so many slots are free."""
        ...

    def is_late(self, job: Job, at: float) -> bool:
        """Whether one that waits is refused now."""
        ...

    def ended(self, job: Job, at: float) -> None:
        """One that was let in was answered, or refused while it waited."""
        ...


class QueueCap:
    """So many may wait for a slot; None: any number."""

    def __init__(self, max_queued: int | None) -> None:
        self._most = math.inf if max_queued is None else max_queued

    def admits(self, job: Job, waiting: int, free: int) -> bool:
        return waiting < self._most + free

    def is_late(self, job: Job, at: float) -> bool:
        return False

    def ended(self, job: Job, at: float) -> None: ...


@dataclass(frozen=True)
class Server:
    """What computes the requests."""

    slots: int
    """Requests in a step at most."""
    step_time: StepTime
    step_tokens: int | None = None
    """Tokens in a step at most: longer prompts are computed in pieces, in a static batch those of
    all its requests one behind the other. At least `slots`. None: any number."""
    seed: int = 0
    """Where in the step time's spread it begins."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots: {self.slots}; give 1 or more")
        if self.step_tokens is not None and self.step_tokens < self.slots:
            raise ValueError(
                f"step_tokens: {self.step_tokens} are fewer than the {self.slots} slots, each of "
                "which writes one; give more"
            )
        if self.step_time.seconds(1, 1) <= 0:
            raise ValueError("a step of one request takes no time; give more")


@dataclass(frozen=True, slots=True)
class Trace:
    """What a server did."""

    jobs: tuple[Job, ...]
    """In order of arrival, refused ones too."""
    slots: int
    steps: int = 0
    step_requests: int = 0
    """Sum over the steps."""
    step_tokens: int = 0

    @property
    def answered(self) -> tuple[Job, ...]:
        return tuple(job for job in self.jobs if not job.is_refused)

    @property
    def makespan_s(self) -> float:
        """From 0 until the last was answered."""
        return max((job.done or 0.0 for job in self.answered), default=0.0)

    @property
    def waits_s(self) -> list[float]:
        """From arrival into a slot, of those answered."""
        return [job.started - job.arrival for job in self.jobs if job.started is not None]

    @property
    def idle_share(self) -> float | None:
        """Of the slots' time, in which nobody's token was computed."""
        if not (all_s := self.slots * self.makespan_s):
            return None
        return 1 - math.fsum(end - start for start, end in self._taken()) / all_s

    def busy_slots(self, parts: int) -> list[float]:
        """The mean number of slots that worked in each of so many equal parts of the makespan."""
        return _load(self._taken(), self.makespan_s, parts)

    def waiting(self, parts: int) -> list[float]:
        """The mean number of requests that waited, likewise."""
        waits = ((job.arrival, job.started) for job in self.jobs if job.started is not None)
        return _load(waits, self.makespan_s, parts)

    def _taken(self) -> Iterator[tuple[float, float]]:
        for job in self.jobs:
            if job.started is not None and job.finished is not None:
                yield job.started, job.finished


def _load(spans: Iterable[tuple[float, float]], total_s: float, parts: int) -> list[float]:
    """How many spans hold in each part of `total_s`, on the average."""
    loads, later = [0.0] * parts, [0] * (parts + 1)
    if not total_s:
        return loads
    for span in spans:
        for at, change in zip(span, (1, -1), strict=True):
            place = at / total_s * parts
            part = min(int(place), parts - 1)
            loads[part] += change * (part + 1 - place)
            later[part + 1] += change
    whole = itertools.accumulate(later)
    return [max(load + before, 0.0) for load, before in zip(loads, whole, strict=False)]


# the two ways


def run_static(source: Source, server: Server, gate: Gate | None = None) -> Trace:
    """Everything the source has, batch after batch."""
    return _Static(source, server, gate or QueueCap(None)).run()


def run_continuous(source: Source, server: Server, gate: Gate | None = None) -> Trace:
    """Everything the source has, step after step."""
    return _Continuous(source, server, gate or QueueCap(None)).run()


class _Line:
    """Who arrived and waits."""

    def __init__(self, source: Source, gate: Gate) -> None:
        self.source, self.gate = source, gate
        self.jobs: list[Job] = []
        self.waiting: deque[Job] = deque()

    def let_in(self, until: float, free: int) -> None:
        """Take those who arrive up to `until`, at a server with so many free slots."""
        source = self.source
        while (at := source.next_at()) is not None and at <= until:
            job = source.take()
            self.jobs.append(job)
            if self.gate.admits(job, len(self.waiting), free):
                self.waiting.append(job)
            else:
                job.is_refused, job.done = True, at
                source.ended(job, at)

    def refuse_late(self, at: float) -> None:
        """Refuse those in front that the gate no longer lets wait."""
        while self.waiting and self.gate.is_late(self.waiting[0], at):
            job = self.waiting.popleft()
            job.is_refused, job.done = True, at
            self.end(job, at)

    def end(self, job: Job, at: float) -> None:
        self.gate.ended(job, at)
        self.source.ended(job, at)


class _Pace:
    """What a server's steps take: by the line, times its spread, which begins at a place that the
    seed names and is gone through again and again."""

    def __init__(self, server: Server) -> None:
        spread = server.step_time.spread or (1.0,)
        first = Random(f"steps/{server.seed}").randrange(len(spread))
        turned = (*spread[first:], *spread[:first])
        self._sums = (0.0, *itertools.accumulate(turned))
        self._steps = 0
        self._passed = 0.0
        """Sum of the spread over these steps."""

    def take(self, step_s: float, steps: int) -> float:
        """The seconds of the next so many steps, of `step_s` each by the line."""
        before = self._passed
        self._steps += steps
        whole, part = divmod(self._steps, len(self._sums) - 1)
        self._passed = whole * self._sums[-1] + self._sums[part]
        return step_s * (self._passed - before)

    def steps_in(self, step_s: float, seconds: float) -> int:
        """The fewest steps from here on that take so long."""
        whole, left = divmod(self._passed + seconds / step_s, self._sums[-1])
        return int(whole) * (len(self._sums) - 1) + bisect_left(self._sums, left) - self._steps


class _Static:
    def __init__(self, source: Source, server: Server, gate: Gate) -> None:
        self._line = _Line(source, gate)
        self._server = server
        self._pace = _Pace(server)
        self._steps = self._step_requests = self._step_tokens = 0

    def run(self) -> Trace:
        now = 0.0
        while batch := self._gather(now):
            now = self._compute(batch, max(now, max(job.arrival for job in batch)))
        sums = self._steps, self._step_requests, self._step_tokens
        return Trace(tuple(self._line.jobs), self._server.slots, *sums)

    def _gather(self, now: float) -> list[Job]:
        line, slots = self._line, self._server.slots
        line.let_in(now, slots)
        while len(line.waiting) < slots and (at := line.source.next_at()) is not None:
            line.let_in(at, slots)
        return [line.waiting.popleft() for _ in range(min(slots, len(line.waiting)))]

    def _compute(self, batch: Sequence[Job], start: float) -> float:
        """All of a batch; when it is answered."""
        requests, prompts = len(batch), sum(max(job.prompt, 1) for job in batch)
        whole, rest = divmod(prompts - 1, self._server.step_tokens or prompts)
        now = start + self._take(self._server.step_tokens or 0, requests, whole)
        now += self._take(rest + 1, requests, 1)
        written = 1
        for job in sorted(batch, key=lambda job: job.output):
            now += self._take(requests, requests, job.output - written)
            written, job.finished = job.output, now
        for slot, job in enumerate(batch):
            job.slot, job.started, job.done = slot, start, now
        self._line.let_in(now, 0)
        for job in batch:
            self._line.end(job, now)
        return now

    def _take(self, tokens: int, requests: int, steps: int) -> float:
        """The seconds of so many steps that are alike."""
        self._steps += steps
        self._step_requests += requests * steps
        self._step_tokens += tokens * steps
        return self._pace.take(self._server.step_time.seconds(tokens, requests), steps)


class _Continuous:
    def __init__(self, source: Source, server: Server, gate: Gate) -> None:
        self._line = _Line(source, gate)
        self._server = server
        self._pace = _Pace(server)
        self._is_patient = isinstance(gate, QueueCap)
        """Nobody who waits is refused."""
        self._now = 0.0
        self._free = list(range(server.slots))
        self._writing = 0
        """Requests past their first step."""
        self._ends: list[tuple[int, int, Job]] = []
        """A heap by the number of the step that is their last, and in the order of joining."""
        self._joined = itertools.count()
        self._piece: tuple[Job, int] | None = None
        """One in a slot whose prompt is not computed to its end, and the tokens left."""
        self._steps = self._step_requests = self._step_tokens = 0

    def run(self) -> Trace:
        line = self._line
        while True:
            line.let_in(self._now, len(self._free))
            line.refuse_late(self._now)
            joining, tokens = self._join()
            if joining:
                self._go(1, tokens + self._writing, self._writing + joining)
            elif self._writing:
                self._go(self._uneventful(), self._writing, self._writing)
            elif (at := line.source.next_at()) is not None:
                self._now = max(self._now, at)
            else:
                break
        sums = self._steps, self._step_requests, self._step_tokens
        return Trace(tuple(line.jobs), self._server.slots, *sums)

    def _join(self) -> tuple[int, int]:
        """Take those who wait into free slots; how many compute prompts now, of how many tokens."""
        limit = self._server.step_tokens
        room = math.inf if limit is None else limit - self._writing
        joining = tokens = 0
        while room > 0 and (self._piece is not None or (self._free and self._line.waiting)):
            job, left = self._piece or self._place(self._line.waiting.popleft())
            taken = int(min(left, room))
            joining, tokens, room = joining + 1, tokens + taken, room - taken
            self._piece = (job, left - taken) if taken < left else None
            if self._piece is None:
                end = self._steps + job.output
                heapq.heappush(self._ends, (end, next(self._joined), job))
        return joining, tokens

    def _place(self, job: Job) -> tuple[Job, int]:
        job.slot, job.started = heapq.heappop(self._free), self._now
        return job, max(job.prompt, 1)

    def _uneventful(self) -> int:
        """Steps until one of those who write leaves, or somebody joins or may be refused."""
        steps = self._ends[0][0] - self._steps
        if self._free or not self._is_patient:
            if self._line.waiting:
                return 1
            if (at := self._line.source.next_at()) is not None:
                step_s = self._server.step_time.seconds(self._writing, self._writing)
                steps = min(steps, max(self._pace.steps_in(step_s, at - self._now), 1))
        return steps

    def _go(self, steps: int, tokens: int, requests: int) -> None:
        """So many steps that are alike."""
        self._now += self._pace.take(self._server.step_time.seconds(tokens, requests), steps)
        self._steps += steps
        self._step_requests += requests * steps
        self._step_tokens += tokens * steps
        self._line.let_in(self._now, len(self._free))
        self._writing = requests - (self._piece is not None)
        while self._ends and self._ends[0][0] == self._steps:
            job = heapq.heappop(self._ends)[2]
            job.finished = job.done = self._now
            self._writing -= 1
            heapq.heappush(self._free, job.slot)
            self._line.end(job, self._now)


# where requests come from


class Arrivals:
    """Requests that come at given times, whatever becomes of those before."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._left = deque(sorted(jobs, key=lambda job: job.arrival))

    def next_at(self) -> float | None:
        return self._left[0].arrival if self._left else None

    def take(self) -> Job:
        return self._left.popleft()

    def ended(self, job: Job, at: float) -> None: ...


class ClosedLoop:
    """Clients who each ask again `think_s` after an answer, or a refusal, while requests are left
    and until `until_s`.

    `think_s` is the mean of an exponential distribution; 0: at once. `pause_s` comes after each
    answer too, and is always as long.
    """

    def __init__(
        self,
        jobs: Iterable[Job],
        clients: int,
        think_s: float = 0.0,
        *,
        pause_s: float = 0.0,
        until_s: float = math.inf,
        seed: int = 0,
    ) -> None:
        self._left = iter(jobs)
        self._dice = Random(f"clients/{seed}")
        self._think_s, self._pause_s, self._until_s = think_s, pause_s, until_s
        self._numbers = itertools.count()
        self._next: list[tuple[float, int, Job]] = []
        for _ in range(clients):
            self._ask(0.0)

    def next_at(self) -> float | None:
        return self._next[0][0] if self._next else None

    def take(self) -> Job:
        return heapq.heappop(self._next)[2]

    def ended(self, job: Job, at: float) -> None:
        self._ask(at + self._pause_s)

    def _ask(self, at: float) -> None:
        at += self._dice.expovariate(1 / self._think_s) if self._think_s else 0.0
        if at <= self._until_s and (job := next(self._left, None)) is not None:
            job.arrival = at
            heapq.heappush(self._next, (at, next(self._numbers), job))


def poisson_times(count: int, rate: float, dice: Random) -> list[float]:
    """Times of so many arrivals at `rate` a second that know nothing of each other."""
    return list(itertools.accumulate(dice.expovariate(rate) for _ in range(count)))


def burst_times(count: int, rate: float, burst: int) -> list[float]:
    """The same number a second on the average, `burst` of them at once, the first at 0."""
    return [number // burst * burst / rate for number in range(count)]


# how long requests are


_PART = re.compile(r"(?:(\d{1,9}(?:\.\d{1,9})?)%:)?(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens, drawn evenly from one of several ranges."""

    parts: tuple[tuple[float, int, int], ...]
    """Weight, least and most of each range."""

    @property
    def mean(self) -> float:
        total = math.fsum(weight for weight, _, _ in self.parts)
        return math.fsum(w * (low + high) / 2 for w, low, high in self.parts) / total

    def draw(self, count: int, dice: Random) -> list[int]:
        """So many of them."""
        weights = [weight for weight, _, _ in self.parts]
        ranges = dice.choices(self.parts, weights, k=count)
        return [dice.randint(low, high) for _, low, high in ranges]


def parse_lengths(text: str) -> Lengths:
    """`150`, `40-200`, or `85%:40-200,15%:400-1000`, or the name of one in `NAMED_LENGTHS`.

    Raises ValueError, one line.
    """
    parts = []
    told = NAMED_LENGTHS.get(text, text).split(",")
    for part in told:
        found = _PART.fullmatch(part.strip())
        if found is None or (found[1] is None and len(told) > 1):
            raise ValueError(
                f"{text!r} is no description of lengths; give 150, 40-200, "
                f"85%:40-200,15%:400-1000, or one of {', '.join(NAMED_LENGTHS)}"
            )
        low = int(found[2])
        high = int(found[3]) if found[3] else low
        weight = float(found[1] or 100)
        if not 1 <= low <= high <= MOST_TOKENS or weight <= 0:
            raise ValueError(
                f"{part}: give a weight over 0, and 1 to {MOST_TOKENS} tokens, the least first"
            )
        parts.append((weight, low, high))
    if abs(math.fsum(weight for weight, _, _ in parts) - 100) > 1e-6:
        raise ValueError(f"{text!r}: its weights are not 100 % together")
    return Lengths(tuple(parts))


NAMED_LENGTHS = {
    "mixed": "85%:40-200,15%:400-1000",
    "talks": "86%:40-450,14%:1500-3600",
}
"""mixed: most answers short, some long. talks: most talks short, some of some thousand tokens."""
