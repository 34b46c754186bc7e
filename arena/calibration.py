"""What real runs tell of their engine: how long steps take, what moves ask for. Pure.

A step's time is the interval between its record and the one before, where some request was inside
the engine for all of it; else the engine may have had nothing to do. Only steps that were each
recorded count (a long run thins them out).
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from arena.distribution import percentile
from arena.figures import Figures
from arena.fleet import Work
from arena.report import figures_of
from arena.store import AttemptRow, PlyRow, Records, StoreError
from serving.batching import MOST_TOKENS, Server
from serving.step_time import Step, StepTime, fit

LEAST_STEPS = 50
TOLERANCE = 0.3
"""How far a forecast may be from what was measured."""
MOST_SLOTS = 100_000
MOST_PERIOD_S = 86_400.0
MOST_SLO_S = 1e9
"""Of the config of a run that is simulated."""
STALL = 20
"""A step that takes so many times the median is a stall of the machine, and left out."""


@dataclass(frozen=True)
class Calibration:
    """An engine as some runs saw it."""

    runs: tuple[str, ...]
    engine: str
    kind: str
    step_time: StepTime
    steps: int
    stalls: int
    """Steps left out."""
    shapes: tuple[tuple[int, int], ...]
    """Uncached prompt tokens and output tokens of each move asked for."""
    held_tokens: tuple[int, ...]
    """Prompt and output of each, which is what it holds of the KV cache in the end."""
    overhead_s: float
    """Mean of a move's time outside the engine, from when it was due."""
    commit_s: float
    plies: float
    """Of a match, on the average; of those played to their end, where there are any."""
    matches: int
    finished: int
    """Matches of the runs, and those of them that were played to their end."""
    settings: "Settings"
    """Of the first run."""

    def work(self, seed: int = 0, period_s: float | None = None) -> Work:
        """What the seats ask for, every `period_s` or as in the run."""
        period_s = self.settings.period_s if period_s is None else period_s
        return Work(self.shapes, period_s, self.overhead_s, self.commit_s, seed)

    def server(self, settings: "Settings", seed: int = 0) -> Server:
        """The engine with the batch that `settings` give it."""
        return Server(settings.max_concurrent, self.step_time, settings.step_tokens, seed)


@dataclass(frozen=True)
class Settings:
    """What a run's config says of its load."""

    max_concurrent: int
    step_tokens: int | None
    period_s: float
    matches: int
    parallel: int
    max_plies: int | None
    slo_s: float


class Speed(NamedTuple):
    """What is forecast, and measured."""

    moves_per_s: float
    p95_s: float
    """From when a move was due."""


def judged(forecast: Speed, told: Speed) -> dict[str, Any]:
    """Both, and how far off the forecast is, as JSON."""
    errors = {
        "moves_per_s": forecast.moves_per_s / told.moves_per_s - 1,
        "p95_ms": forecast.p95_s / told.p95_s - 1,
    }
    return {
        "predicted": {"moves_per_s": forecast.moves_per_s, "p95_ms": forecast.p95_s * 1000},
        "measured": {"moves_per_s": told.moves_per_s, "p95_ms": told.p95_s * 1000},
        "error": errors,
        "is_within": all(abs(error) <= TOLERANCE for error in errors.values()),
    }


def calibrate(runs: Sequence[Records], engine: str | None = None) -> Calibration:
    """An engine, by name or the only one, from all its steps and moves in the runs.

    StoreError, one line, where they do not tell, or one is given twice.
    """
    (again, times), *_ = Counter(records.run.id for records in runs).most_common(1)
    if times > 1:
        raise StoreError(f"--from-run: run {again} is given {times} times; give it once")
    with readable(*runs):
        return _calibrated(runs, engine)


@contextmanager
def readable(*runs: Records) -> Iterator[None]:
    """StoreError for whatever a config or rows that the arena did not write so raise."""
    try:
        yield
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        ids = ", ".join(records.run.id for records in runs)
        raise StoreError(
            f"run {ids}: its config and its records do not go together ({error!r}); name a run as "
            "it was played"
        ) from None


def _calibrated(runs: Sequence[Records], engine: str | None) -> Calibration:
    seen = [_Seen(records, engine) for records in runs]
    names = {of.engine for of in seen}
    if len(names) > 1:
        raise StoreError(f"--engine: the runs have engines {', '.join(sorted(names))}; name one")
    name = seen[0].engine
    steps = [step for of in seen for step in of.steps()]
    if len(steps) < LEAST_STEPS:
        raise StoreError(
            f"run {seen[0].figures.run.id}: {len(steps)} engine steps of {name} are recorded one "
            f"by one, and {LEAST_STEPS} are needed; calibrate from a longer run of an engine that "
            'tells each step, as kind = "vllm" does'
        )
    kept = without_stalls(steps)
    matches = [match for of in seen for match in of.figures.matches.values()]
    finished = [match for match in matches if match.row.state == "finished"]
    attempts = [row for of in seen for row in of.answered() if row.cached_tokens is not None]
    shapes = tuple(_shape(row) for row in attempts)
    if not shapes:
        raise StoreError(
            f"run {seen[0].figures.run.id}: {name} does not tell cached prompt tokens; calibrate "
            "from a run of an engine that does"
        )
    if (tokens := max(map(max, shapes))) > MOST_TOKENS:
        ids = ", ".join(records.run.id for records in runs)
        raise StoreError(
            f"run {ids}: a move of {tokens:,} tokens was never made; name a run as it was played"
        )
    return Calibration(
        tuple(of.figures.run.id for of in seen),
        name,
        seen[0].config["kind"],
        fit(kept),
        len(kept),
        len(steps) - len(kept),
        shapes,
        tuple((row.prompt_tokens or 0) + (row.completion_tokens or 0) for row in attempts),
        _mean(overhead for of in seen for overhead in of.overheads()),
        _mean(commit for of in seen for commit in of.commits()),
        _mean(match.plies for match in finished or matches if match.plies),
        len(matches),
        len(finished),
        settings_of(runs[0], name),
    )


def busy_steps(
    steps: Iterable[tuple[float, int, int]], inside: Iterable[tuple[float, float]]
) -> Iterator[Step]:
    """The steps that began when the one before ended, from when each ended, its tokens and its
    requests; `inside` is from when until when each request was in the engine."""
    waiting, latest = deque(sorted(inside)), -math.inf
    for (before, _, _), (at, tokens, requests) in pairwise(sorted(steps)):
        while waiting and waiting[0][0] <= before:
            latest = max(latest, waiting.popleft()[1])
        if latest >= at > before:
            yield Step(at - before, tokens, requests)


def without_stalls(steps: Sequence[Step]) -> list[Step]:
    """Those that took no more than `STALL` times the median; at least one."""
    median = statistics.median(step.seconds for step in steps)
    return [step for step in steps if step.seconds <= STALL * median]


def settings_of(records: Records, engine: str) -> Settings:
    """What the run's config says; StoreError where it does not, or has no such engine."""
    with readable(records):
        figures = figures_of(records)
    config = figures.config
    try:
        of, tournament = config["engines"][engine], config["tournament"]
        slots = _number("max_concurrent", of["max_concurrent"], 1, MOST_SLOTS)
        step_tokens = figures.engines[engine].hosted.get("max_batched_tokens")
        plies = tournament.get("max_plies")
        if step_tokens is not None:
            step_tokens = int(_number("max_batched_tokens", step_tokens, slots, MOST_TOKENS))
        return Settings(
            int(slots),
            step_tokens,
            _number("move_period_seconds", config["pace"]["move_period_seconds"], 0, MOST_PERIOD_S),
            len(records.matches),
            int(_number("parallel_matches", tournament["parallel_matches"], 1, math.inf)),
            int(_number("max_plies", plies, 1, math.inf)) if plies else None,
            _number("move_seconds", config["slo"]["move_seconds"], 1e-6, MOST_SLO_S),
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StoreError(
            f"run {records.run.id}: its config does not tell the load of engine {engine} ({error})"
        ) from None


def _number(key: str, value: Any, least: float, most: float) -> float:
    """ValueError unless it is one in these bounds."""
    if not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{key} is {value!r}, and {least:g} to {most:g} can be simulated")
    return float(value)


def measured(records: Records) -> Speed:
    """What a run was, as `arena report` has it; StoreError without a move."""
    with readable(records):
        rate = figures_of(records).fleet()["moves_per_s"]
        latencies = sorted(ply.done - ply.due for ply in records.plies)
        if not rate or not 0 < (p95_s := percentile(latencies, 0.95)) < math.inf:
            raise StoreError(f"run {records.run.id}: no move was made; name a run that was played")
        return Speed(rate, p95_s)


def check_whole(records: Records, engine: str) -> None:
    """StoreError unless all of its matches were played to their end, on this engine alone."""
    run, matches = records.run.id, records.matches
    finished = sum(row.state == "finished" for row in matches)
    if finished < len(matches):
        raise StoreError(
            f"run {run}: {finished} of its {len(matches)} matches were played to their end; finish "
            "it with `arena resume`, or name another"
        )
    asked = {(row.match_id, row.ply): row.engine for row in records.attempts}
    by = {asked.get((ply.match_id, ply.ply)) or "no engine" for ply in records.plies}
    if by - {engine}:
        raise StoreError(
            f"run {run}: its moves came from {', '.join(sorted(by))}, and {engine} alone is "
            "forecast; name a run of which all sides used it"
        )


def _shape(row: AttemptRow) -> tuple[int, int]:
    uncached = (row.prompt_tokens or 0) - (row.cached_tokens or 0)
    return max(uncached, 1), max(row.completion_tokens or 0, 1)


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return math.fsum(known) / len(known) if known else 0.0


class _Seen:
    """One run, looked at for one engine."""

    def __init__(self, records: Records, engine: str | None) -> None:
        self._records = records
        self.figures: Figures = figures_of(records)
        used = sorted({row.engine for row in records.attempts if row.engine is not None})
        if engine is None and len(used) != 1:
            raise StoreError(
                f"run {records.run.id}: its moves came from {', '.join(used) or 'no engine'}; "
                + ("name one with --engine" if used else "calibrate from a run with an engine")
            )
        self.engine: str = used[0] if engine is None else engine
        if self.engine not in self.figures.config["engines"]:
            raise StoreError(f"--engine {self.engine}: run {records.run.id} has no such engine")
        self.config: dict[str, Any] = self.figures.config["engines"][self.engine]
        if self.figures.engines[self.engine].replicas.known:
            raise StoreError(
                f"run {records.run.id}: engine {self.engine} was several replicas, whose steps "
                "overlap; calibrate from a run on one"
            )

    def answered(self) -> Iterator[AttemptRow]:
        """Its questions that were answered."""
        for row in self._records.attempts:
            if row.engine == self.engine and row.done is not None and row.admitted is not None:
                yield row

    def steps(self) -> Iterator[Step]:
        steps = [
            (row.at, row.step_tokens, row.step_requests)
            for row in self._records.samples
            if row.engine == self.engine and row.source == "per_step" and row.steps == 1
            if row.step_tokens and row.step_requests
        ]
        inside = [(row.admitted or 0.0, row.done or 0.0) for row in self.answered()]
        return busy_steps(steps, inside)

    def overheads(self) -> Iterator[float]:
        """Of moves that took one question: what is left of their time without the engine's and the
        wait in our queue before it."""
        asked: dict[tuple[str, int], list[AttemptRow]] = {}
        for row in self._records.attempts:
            asked.setdefault((row.match_id, row.ply), []).append(row)
        for ply in self._records.plies:
            rows = asked.get((ply.match_id, ply.ply), ())
            if len(rows) == 1 and rows[0].engine == self.engine:
                row = rows[0]
                parts = row.queue_s, row.prefill_s, row.decode_s, row.submitted, row.admitted
                if None not in parts:
                    queue, prefill, decode, submitted, admitted = (part or 0.0 for part in parts)
                    inside = queue + prefill + decode + admitted - submitted
                    yield max(ply.done - ply.due - inside, 0.0)

    def commits(self) -> Iterator[float]:
        """From each move until the other side's turn began."""
        plies: Sequence[PlyRow] = self._records.plies
        for before, ply in pairwise(plies):
            if ply.match_id == before.match_id and ply.ply == before.ply + 1:
                yield max(ply.ready - before.done, 0.0)
