"""What admission is worth on a real engine: more is asked than it can do, without and with it.

    start the engine
    for each repeat
        its capacity: a closed loop with max_concurrent questions at once
        `load` times that in the open loop, behind a plain queue and behind the adaptive cap, each
        first in turn: forget prefixes → ask every match's first questions → measure from their
        next ones on → drain

Both ways are asked the same questions at the same times, which are evenly spaced. A move counts as
in time if it came within the SLO of when its question was due.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from arena import workload as workloads
from arena.compare_figures import Answer, Measurement, median
from arena.config import ConfigError, RunConfig
from arena.distribution import summary
from arena.loops import WARM_PLIES, Asker
from arena.preflight import check_start
from arena.workload import WorkItem, Workload
from serving import Engine, EngineError, Limited, build_engine

SCHEMA_VERSION = 1
MOST_SECONDS = 600.0
MOST_REPEATS = 20
MOST_LOAD = 10.0
DEEP = 100_000
"""A queue that refuses nobody."""
WAYS = ("queue", "admission")
"""A plain queue, and the adaptive cap."""
_DRAIN_S = 10.0
"""Beyond what an engine with the measured capacity needs to answer all that was asked."""


async def measure(
    config: RunConfig,
    name: str,
    *,
    logs: Path,
    seconds: float,
    repeats: int,
    load: float,
    announce: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """`repeats` pairs of open loops of `seconds` at `load` times the capacity of an engine of the
    config, whose log stands in the folder `logs`; one JSON object, rates in moves a second.

    ConfigError before the engine starts, EngineError where it cannot be measured.
    """
    _check(config, name, seconds, repeats, load)
    engine, workload = await asyncio.to_thread(prepare, config, name, logs)
    try:
        announce(f"starting engine {name} ({engine.kind})")
        await engine.open()
        trial = _Trial(engine, workload, config.slo.move_seconds, seconds, load, announce)
        rows = [await trial.pair(number) for number in range(repeats)]
        told = {"name": name, "kind": engine.kind, "version": engine.version}
    finally:
        await engine.close()
    return {
        "schema_version": SCHEMA_VERSION,
        "engine": told,
        "slo_seconds": config.slo.move_seconds,
        "load": load,
        "seconds": seconds,
        "gain": median([row["gain"] for row in rows]),
        "second_half_of_capacity": {
            way: median([row[way]["second_half_of_capacity"] for row in rows]) for way in WAYS
        },
        "repeats": rows,
    }


def _check(config: RunConfig, name: str, seconds: float, repeats: int, load: float) -> None:
    if not 1 <= seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds: give 1 to {MOST_SECONDS:g}")
    if not 1 <= repeats <= MOST_REPEATS:
        raise ConfigError(f"--repeats: give 1 to {MOST_REPEATS}")
    if not 1 < load <= MOST_LOAD:
        raise ConfigError(f"--load: give more than 1, up to {MOST_LOAD:g} times the capacity")
    config.asked_engine(name)


def prepare(config: RunConfig, name: str, logs: Path) -> tuple[Engine, Workload]:
    """The engine, not started, without a limit before it and with room for all that is ever asked;
    and what to ask. Blocks."""
    check_start(config, name)
    settings = config.engine(name)
    workload = workloads.record(config)
    inside = settings.max_concurrent
    if not any(len(match) > WARM_PLIES for match in workload.matches):
        raise ConfigError(f"tournament.max_plies: matches must be longer than {WARM_PLIES} plies")
    if len(workload.matches) < inside:
        raise ConfigError(
            f"engines.{name}.max_concurrent: {inside} questions at once need as many matches, and "
            f"the config has {len(workload.matches)}; raise tournament.pairs"
        )
    limited = build_engine(
        name,
        settings.with_queue(DEEP),
        log_dir=logs,
        stall_seconds=config.faults.stall_seconds,
        restart_limit=config.faults.restart_limit,
    )
    return limited.inner, workload


class _Trial:
    """One engine that is open."""

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        slo_s: float,
        seconds: float,
        load: float,
        announce: Callable[[str], None],
    ) -> None:
        self._engine, self._workload, self._slo_s = engine, workload, slo_s
        self._seconds, self._load, self._announce = seconds, load, announce
        self._begun = [match[WARM_PLIES:] for match in workload.matches]
        """What is left of the matches once their first questions were asked."""

    async def pair(self, number: int) -> dict[str, Any]:
        """The capacity, and both ways in turn; raises EngineDead."""
        capacity = await self._capacity()
        self._announce(f"repeat {number + 1}: capacity {capacity:.1f} moves/s")
        row: dict[str, Any] = {"capacity": capacity}
        ways = WAYS if number % 2 == 0 else WAYS[::-1]
        for way in ways:
            row[way] = await self._overloaded(way, capacity)
            told = row[way]["in_time_per_s"]
            self._announce(f"repeat {number + 1}: {way}: {told:.1f} moves/s in time")
        queue, admission = (row[way]["in_time_per_s"] for way in WAYS)
        return {**row, "gain": admission / queue if queue else None}

    async def _capacity(self) -> float:
        """Of all matches in turn, as the open loop asks: with fewer caches than matches, that is
        what costs."""
        asker = await self._ready(Limited(self._engine))
        inside = self._engine.limits.max_concurrent
        in_turn = ([item] for item in _endless(self._begun))
        run = await asker.closed_loop(in_turn, inside, self._seconds)
        _raise_if_dead(asker)
        if not run.moves_per_s:
            raise EngineError(f"no move came in {self._seconds:g} s; give more --seconds")
        return run.moves_per_s

    async def _overloaded(self, way: str, capacity: float) -> dict[str, Any]:
        limited = Limited(self._engine, slo_s=self._slo_s if way == "admission" else None)
        await self._ready(Limited(self._engine))
        asker = Asker(limited, self._load * self._seconds + _DRAIN_S)
        items = evenly_spaced(self._begun, self._load * capacity, self._seconds)
        run = await asker.open_loop(items, self._seconds)
        _raise_if_dead(asker)
        caps = [change.cap for change in limited.admission_history]
        return {**figures(run, self._slo_s, self._seconds, capacity), "caps": caps}

    async def _ready(self, limited: Limited) -> Asker:
        asker = Asker(limited, self._seconds + _DRAIN_S)
        await asker.forget()
        await asker.warm(self._workload.matches)
        _raise_if_dead(asker)
        return asker


def _raise_if_dead(asker: Asker) -> None:
    if asker.dead is not None:
        raise asker.dead


def evenly_spaced(
    matches: Sequence[Sequence[WorkItem]], per_s: float, seconds: float
) -> list[WorkItem]:
    """`per_s` questions a second from 0 on, of all matches in turn, ply by ply; matches that are
    asked again go by another name."""
    asked = zip(range(int(per_s * seconds)), _endless(matches), strict=False)
    return [replace(item, arrival_s=number / per_s) for number, item in asked]


def _endless(matches: Sequence[Sequence[WorkItem]]) -> Iterator[WorkItem]:
    for again in itertools.count():
        for plies in itertools.zip_longest(*matches):
            for item in plies:
                if item is not None:
                    yield replace(item, match_id=f"{item.match_id}/{again}") if again else item


def figures(run: Measurement, slo_s: float, seconds: float, capacity: float) -> dict[str, Any]:
    """What came in time of an open loop of `seconds`; rates in moves a second."""
    in_time = [a for a in run.answers if a.fault is None and a.done - a.due <= slo_s]
    half = run.began + seconds / 2
    late_per_s = sum(a.due >= half for a in in_time) / (seconds / 2)
    took = summary((a.done - a.due) * 1000 for a in run.answers if a.fault is None)
    return {
        "offered": len(run.answers),
        "answered": sum(a.fault is None for a in run.answers),
        "errors": dict(Counter(a.fault for a in run.answers if a.fault is not None)),
        "in_time_per_s": len(in_time) / seconds,
        "second_half_in_time_per_s": late_per_s,
        "second_half_of_capacity": late_per_s / capacity,
        "latency_ms": took,
        "refusal_ms": summary(_refusals_ms(run.answers)),
    }


def _refusals_ms(answers: Sequence[Answer]) -> list[float]:
    """How long it took to refuse; one that had waited in our queue counts in full."""
    return [(a.done - a.sent) * 1000 for a in answers if a.fault == "overloaded"]
