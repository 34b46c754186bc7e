"""The live state of a run: counters that matches and engines bump, read a few times a second."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from agents import Decision
from arena.store import MatchRow, PlyRow
from serving import EngineSnapshot

RECENT_RESULTS = 5
_WINDOW_S = 10.0
_LATENCIES = 1000


@dataclass(slots=True)
class EngineProgress:
    """An engine as last seen. Occupancy is over the last steps that the window holds."""

    last: EngineSnapshot | None = None
    restarts: int = 0
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=200))

    @property
    def step_requests_mean(self) -> float | None:
        return sum(self.steps) / len(self.steps) if self.steps else None

    @property
    def prefix_hit_rate(self) -> float | None:
        if self.last is None or not self.last.prefix_queries or self.last.prefix_hits is None:
            return None
        return self.last.prefix_hits / self.last.prefix_queries


@dataclass(frozen=True, slots=True)
class ProgressView:
    """The live state at one moment. Latencies are of the last moves, in seconds."""

    elapsed_s: float
    scheduled: int
    running: int
    suspended: int
    finished: int
    plies: int
    plies_per_s: float
    late: int
    faults: Mapping[str, int]
    latencies_s: tuple[float, ...]
    results: tuple[MatchRow, ...]
    engines: Mapping[str, EngineProgress]


class Progress:
    """Counters of a run. Methods are called by matches as things happen; `view` reads them."""

    def __init__(self, total: int, finished: int, slo_seconds: float) -> None:
        self._began = time.monotonic()
        self._slo_seconds = slo_seconds
        self._total, self._finished = total, finished
        self._running = self._suspended = self._left = self._plies = self._late = 0
        self._faults: dict[str, int] = {}
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)
        self._results: deque[MatchRow] = deque(maxlen=RECENT_RESULTS)
        self._marks: deque[tuple[float, int]] = deque()
        self.engines: dict[str, EngineProgress] = {}
        self.has_begun = False
        """A match has begun: engines and agents are ready."""
        self.engine_failure: str | None = None
        """Why an engine will not answer again in this run, once one will not."""

    @property
    def plies(self) -> int:
        return self._plies

    def match_began(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._began = time.monotonic()
            self._marks.append((self._began, self._plies))
        self._running += 1

    def match_suspended(self) -> None:
        self._suspended += 1

    def match_resumed(self) -> None:
        self._suspended -= 1

    def match_finished(self, row: MatchRow) -> None:
        self._running -= 1
        self._finished += 1
        self._results.append(row)

    def match_left(self, *, was_suspended: bool) -> None:
        self._suspended -= was_suspended
        self._running -= 1
        self._left += 1

    def ply_committed(self, row: PlyRow, decision: Decision) -> None:
        latency = row.done - row.due
        self._plies += 1
        self._latencies.append(latency)
        self._late += latency > self._slo_seconds
        if len(decision.attempts) > 1:
            self._count_faults(decision)

    def forfeited(self, decision: Decision) -> None:
        self._count_faults(decision)

    def fault(self, kind: str) -> None:
        self._faults[kind] = self._faults.get(kind, 0) + 1

    def engine_stepped(self, engine: str, snapshot: EngineSnapshot, restarts: int) -> None:
        seen = self.engines.setdefault(engine, EngineProgress())
        seen.last, seen.restarts = snapshot, restarts
        if snapshot.step_requests is not None:
            seen.steps.append(snapshot.step_requests)

    def _count_faults(self, decision: Decision) -> None:
        for attempt in decision.attempts:
            if attempt.fault is not None:
                self.fault(attempt.fault.value)

    def view(self) -> ProgressView:
        """The state now; call it at most a few times a second."""
        now = time.monotonic()
        if self.has_begun:
            self._marks.append((now, self._plies))
        while len(self._marks) > 2 and now - self._marks[0][0] > _WINDOW_S:
            self._marks.popleft()
        then, plies = self._marks[0] if self._marks else (now, 0)
        rate = (self._plies - plies) / (now - then) if now > then else 0.0
        waiting = self._total - self._running - self._finished - self._left
        return ProgressView(
            now - self._began if self.has_begun else 0.0,
            waiting,
            self._running - self._suspended,
            self._suspended + self._left,
            self._finished,
            self._plies,
            rate,
            self._late,
            dict(self._faults),
            tuple(self._latencies),
            tuple(self._results),
            self.engines,
        )
