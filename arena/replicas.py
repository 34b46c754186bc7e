"""An engine's replicas side by side: what each answered, how fast, and which lags behind. Pure.

A move belongs to the replica that gave its last answer. Its engine time is what that replica
computed for it: prefill and decode of all its attempts there, or the time from admission to the
answer where those are not told.

A replica lags behind, a *straggler*, when its median engine time of a move is more than
STRAGGLER_RATIO times the median of the other replicas' medians, where these are taken of the moves
of one agent at one game, and the ratios of all these together are weighted by its moves. Only
replicas with STRAGGLER_MOVES such moves are judged and compared with: medians, because a few long
thoughts say nothing of a machine; of like moves, because a player that thinks takes many times as
long as one that does not, and the median of both jumps from one to the other; of the others alone,
because with two replicas a slow one would raise what it is measured by; and half as much again,
because replicas of one kind differ by far less as matches are spread over them.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agents import charged_seconds
from arena.distribution import Distribution, Exact, Sketch, weighted_summary
from arena.store import AttemptRow, SampleRow
from serving import Timings

STRAGGLER_RATIO = 1.5
STRAGGLER_MOVES = 30

SILENT_S = 60.0
"""A replica that answered nothing in so long before the engine's last answer is silent: it has no
match, or has ended."""
MOST_SHOWN = 64
"""Rows where a run is looked at; each replica that is started again may have a name of its own."""

Maker = tuple[str, str]
"""An agent and a game, whose moves are alike."""


class ReplicaFigures:
    """One replica of an engine."""

    __slots__ = (
        *("alike_ms", "cached_tokens", "engine_ms", "faults", "last", "matches", "moves", "name"),
        *("place", "prompt_tokens", "step_requests", "timed"),
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
        self.alike_ms: defaultdict[Maker, Distribution] = defaultdict(Exact if exact else Sketch)
        """The same by who made it."""
        self.timed: Counter[Maker] = Counter()
        """Moves in these."""
        self.last = -math.inf
        """When it answered last."""
        self.faults: Counter[str] = Counter()
        """Of its answers; a question that it never answered names no replica."""
        self.prompt_tokens = self.cached_tokens = 0
        """Of replies that say both."""
        self.step_requests: Counter[float] = Counter()

    @property
    def prefix_hit_rate(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


class Replicas:
    """An engine's replicas. Memory grows with the number of matches, and of replicas times agents;
    with that of moves only where `exact` keeps every time."""

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
        if row.done is not None:
            replica.last = max(replica.last, row.done)
        if row.fault is not None:
            replica.faults[row.fault] += 1
        if row.prompt_tokens is not None and row.cached_tokens is not None:
            replica.prompt_tokens += row.prompt_tokens
            replica.cached_tokens += row.cached_tokens

    def add_move(self, attempts: Sequence[AttemptRow], maker: Maker) -> None:
        """Count a move by its attempts, the last of which a replica answered."""
        name = attempts[-1].replica
        if name is None:
            return
        replica = self._of(name)
        replica.moves += 1
        times = [engine_s(row) for row in attempts if row.replica == name]
        known = [seconds for seconds in times if seconds is not None]
        if len(known) == len(times):
            took = sum(known) * 1000
            replica.engine_ms.add(took)
            replica.alike_ms[maker].add(took)
            replica.timed[maker] += 1

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
        ratios = _ratios(replicas)
        matches = len(self._places)
        silent_at = max(replica.last for replica in replicas) - SILENT_S
        return {
            "count": len(replicas),
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
                    "engine_ms": replica.engine_ms.summary(),
                    "median_ratio": ratios.get(replica.name),
                    "is_straggler": ratios.get(replica.name, 0.0) > STRAGGLER_RATIO,
                    "is_silent": replica.last < silent_at,
                    "faults": dict(replica.faults),
                }
                for replica in replicas
            ],
        }


def shortened(section: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A section with MOST_SHOWN rows at most: those that are not silent go before the others, then
    stragglers, then those that made most moves."""
    if section is None:
        return None
    order = sorted(
        section["rows"], key=lambda row: (row["is_silent"], not row["is_straggler"], -row["moves"])
    )
    rows = sorted(order[:MOST_SHOWN], key=lambda row: str(row["replica"]))
    return {**section, "rows": rows}


def engine_s(row: AttemptRow) -> float | None:
    """Seconds that an engine spent on an attempt, as they are charged to a clock. None: it was not
    answered."""
    at, done = row.admitted, row.done
    if at is None or done is None:
        return None
    return charged_seconds(Timings(at, at, None, done, row.queue_s, row.prefill_s, row.decode_s))


def _ratios(replicas: Iterable[ReplicaFigures]) -> dict[str, float]:
    """Each judged replica's median over the median of the others' medians, the mean over makers of
    moves, weighted by its moves."""
    judged: defaultdict[Maker, list[tuple[float, ReplicaFigures]]] = defaultdict(list)
    for replica in replicas:
        for maker, moves in replica.timed.items():
            median = replica.alike_ms[maker].summary()["p50"]
            if moves >= STRAGGLER_MOVES and median is not None:
                judged[maker].append((median, replica))
    told: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for maker, alike in judged.items():
        alike.sort(key=lambda each: each[0])
        medians = [median for median, _ in alike]
        for place, (median, replica) in enumerate(alike):
            if len(alike) > 1 and (usual := _median_without(place, medians)) > 0:
                told[replica.name].append((median / usual, replica.timed[maker]))
    return {
        name: math.fsum(ratio * moves for ratio, moves in each) / sum(moves for _, moves in each)
        for name, each in told.items()
    }


def _median_without(place: int, ordered: Sequence[float]) -> float:
    """The median of all ordered values, at least two, but for the one at the place."""
    upper = (len(ordered) - 1) // 2
    lower = upper if len(ordered) % 2 == 0 else upper - 1
    return (ordered[lower + (lower >= place)] + ordered[upper + (upper >= place)]) / 2
