"""An engine's replicas side by side: what each answered, how fast, and which lags behind. Pure.

A move belongs to the replica that gave its last answer. Its engine time is what that replica
computed for it: prefill and decode of all its attempts there, or the time from admission to the
answer where those are not told.

A replica lags behind, a *straggler*, when its median engine time of a move is more than
STRAGGLER_RATIO times the median of the other replicas' medians. Only replicas with STRAGGLER_MOVES
moves are judged and compared with: medians, because a few long thoughts say nothing of a machine;
of the others alone, because with two replicas a slow one would raise what it is measured by; and
half as much again, because replicas of one kind differ by far less as matches are spread over them.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from arena.distribution import Distribution, Exact, Sketch, weighted_summary
from arena.store import AttemptRow, SampleRow

STRAGGLER_RATIO = 1.5
STRAGGLER_MOVES = 30


class ReplicaFigures:
    """One replica of an engine."""

    __slots__ = (
        *("cached_tokens", "engine_ms", "faults", "matches", "moves", "name", "place"),
        *("prompt_tokens", "step_requests"),
    )

    def __init__(self, name: str, *, exact: bool) -> None:
        self.name = name
        self.place = frozenset((name,))
        """Of a match that is here and was nowhere else."""
        self.matches = 0
        """Of which it answered something."""
        self.moves = 0
        self.engine_ms: Distribution = Exact() if exact else Sketch()
        """Engine time of a move."""
        self.faults: Counter[str] = Counter()
        """Of its answers; a question that it never answered names no replica."""
        self.prompt_tokens = self.cached_tokens = 0
        """Of replies that say both."""
        self.step_requests: Counter[float] = Counter()

    @property
    def prefix_hit_rate(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


class Replicas:
    """An engine's replicas. Memory grows with the number of replicas and matches; with that of
    moves only where `exact` keeps every time."""

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._by_name: dict[str, ReplicaFigures] = {}
        self._places: dict[str, frozenset[str]] = {}
        """Replicas that answered something, by match."""
        self.matches_moved = 0
        """Matches that were answered by more than one replica."""

    @property
    def known(self) -> Sequence[ReplicaFigures]:
        """Those that answered or told something, by name; empty where there are fewer than two, for
        then nothing can be compared."""
        named = sorted(self._by_name.items())
        return [figures for _, figures in named] if len(named) > 1 else []

    def add_attempt(self, row: AttemptRow) -> None:
        """Count an answer; nothing is counted of one that names no replica."""
        if row.replica is None:
            return
        replica = self._of(row.replica)
        self._place(row.match_id, replica)
        if row.fault is not None:
            replica.faults[row.fault] += 1
        if row.prompt_tokens is not None and row.cached_tokens is not None:
            replica.prompt_tokens += row.prompt_tokens
            replica.cached_tokens += row.cached_tokens

    def add_move(self, attempts: Sequence[AttemptRow]) -> None:
        """Count a move by its attempts, the last of which a replica answered."""
        name = attempts[-1].replica
        if name is None:
            return
        replica = self._of(name)
        replica.moves += 1
        times = [engine_s(row) for row in attempts if row.replica == name]
        known = [seconds for seconds in times if seconds is not None]
        if len(known) == len(times):
            replica.engine_ms.add(sum(known) * 1000)

    def add_sample(self, row: SampleRow) -> None:
        """Count a step; nothing is counted of one that names no replica."""
        if row.replica is not None:
            replica = self._of(row.replica)
            if row.step_requests is not None:
                replica.step_requests[row.step_requests] += row.steps

    def _of(self, name: str) -> ReplicaFigures:
        replica = self._by_name.get(name)
        if replica is None:
            replica = self._by_name[name] = ReplicaFigures(name, exact=self._exact)
        return replica

    def _place(self, match_id: str, replica: ReplicaFigures) -> None:
        held = self._places.get(match_id)
        if held is None:
            self._places[match_id] = replica.place
        elif replica.name in held:
            return
        else:
            self._places[match_id] = held | replica.place
            self.matches_moved += len(held) == 1
        replica.matches += 1

    def section(self) -> dict[str, Any] | None:
        """What a report tells of them; None where there are fewer than two."""
        replicas = self.known
        if not replicas:
            return None
        times = {replica.name: replica.engine_ms.summary() for replica in replicas}
        judged = {r.name: times[r.name]["p50"] for r in replicas if r.moves >= STRAGGLER_MOVES}
        ratios = _ratios({name: at for name, at in judged.items() if at is not None})
        matches = len(self._places)
        return {
            "matches_moved": self.matches_moved,
            "straggler_ratio": STRAGGLER_RATIO,
            "straggler_moves": STRAGGLER_MOVES,
            "rows": [
                {
                    "replica": replica.name,
                    "matches": replica.matches,
                    "share": replica.matches / matches if matches else None,
                    "moves": replica.moves,
                    "prefix_hit_rate": replica.prefix_hit_rate,
                    "step_requests": weighted_summary(replica.step_requests.items()),
                    "engine_ms": times[replica.name],
                    "median_ratio": ratios.get(replica.name),
                    "is_straggler": ratios.get(replica.name, 0.0) > STRAGGLER_RATIO,
                    "faults": dict(replica.faults),
                }
                for replica in replicas
            ],
        }


def engine_s(row: AttemptRow) -> float | None:
    """Seconds that an engine spent on an attempt, as they are charged to a clock: prefill and
    decode, or admitted to done where the engine does not tell both. None: neither is known."""
    if row.prefill_s is not None and row.decode_s is not None:
        return row.prefill_s + row.decode_s
    if row.admitted is None or row.done is None:
        return None
    return row.done - row.admitted


def _ratios(medians: Mapping[str, float]) -> dict[str, float]:
    """Each replica's median over the median of the others' medians."""
    ratios = {}
    for name, median in medians.items():
        others = [other for one, other in medians.items() if one != name]
        if others and (usual := statistics.median(others)) > 0:
            ratios[name] = median / usual
    return ratios
