"""How an engine's throughput grows with replicas on Ray, and what the way to one costs a move.

    the arena's own limit: engines that answer at once, embedded, then as the most replicas asked
    for each number of replicas
        start a cluster → so many matches for each replica → warm up → a window for each repeat
    two players in turns, one on an embedded engine, one on replicas: the same load, move by move

Every run is played as `arena run` plays it, records on disk included. The engines have no model and
a fixed latency, so that what does not grow is ours or Ray's. A cluster takes longer to start than
a window lasts, so the repeats of one number of replicas are windows of one run.
"""

import asyncio
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arena import config as configs
from arena import preflight, report, runner, store, tournament
from arena.config import ConfigError, RunConfig
from arena.distribution import summary
from arena.pace import Pacer
from arena.progress import Progress
from arena.store import AttemptRow, PlyRow, Records, RunRow, Store
from arena.tournament import EnginesFailed
from serving import EngineError

SCHEMA_VERSION = 1
MOST_REPLICAS = 64
MOST_MATCHES = 1024
"""At once."""
MOST_SECONDS = 600.0
MOST_REPEATS = 20
LATENCIES_S = (0.001, 60.0)

LEAST_LINEAR = 0.9
"""Of so many times one replica's throughput."""
LOADED_SHARE = 0.9
"""Of the arena's limit; what would need more cannot grow in proportion."""
MOST_ADDED_MS = 10.0
"""At the 95th percentile, on the way to a replica and back."""

OVERHEAD_REPLICAS = 2
OVERHEAD_MATCHES = 4
OVERHEAD_LATENCY_S = 0.02

_WARM_S = 1.0
_MAX_PLIES = 200
_SHORT_GAME = 40
"""Plies; games of random moves are longer on average."""
_FASTEST = 20_000.0
"""Plies a second that no arena of ours plays."""
_ENGINE, _EMBEDDED = "main", "embedded"

Table = dict[str, Any]
"""An engine of a config."""


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """How to measure."""

    replicas: tuple[int, ...] = (1, 2, 4, 8)
    matches_per_replica: int = 8
    """At once; each waits for an answer nearly all the time."""
    latency: float = 0.5
    """Seconds that every answer takes."""
    seconds: float = 5.0
    """Of one window."""
    repeats: int = 3

    @property
    def windows_s(self) -> float:
        return self.seconds * self.repeats

    def ideal(self, replicas: int) -> float:
        """Moves a second, were answers all that takes time."""
        return replicas * self.matches_per_replica / self.latency


def on_ray(replicas: int, hosted: Table) -> Table:
    """Replicas of an engine on a cluster of this machine alone."""
    return {"kind": "ray", "address": "local", "replicas": replicas, "engine": hosted}


def scripted(at_once: int, latency: float) -> Table:
    """An engine with no model that takes so many questions at once."""
    return {
        "kind": "scripted",
        "latency_seconds": latency,
        "max_concurrent": at_once,
        "max_queued": at_once,
    }


async def measure(
    options: ReplicaOptions,
    *,
    replicated: Callable[[int, Table], Table] = on_ray,
    announce: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """CONTRACTS' `bench replicas` object; `replicated` makes replicas of an engine.

    ConfigError before an engine starts, EngineError where one fails or no move came.
    """
    _check(options)
    bench = _Bench(options, replicated, announce)
    await asyncio.to_thread(bench.check)
    limit = await bench.limit()
    most = LOADED_SHARE * min(limit.values())
    cells: list[dict[str, Any]] = []
    for replicas in options.replicas:
        row = await bench.cell(replicas)
        cells.append({**row, **judged(row, (cells or [row])[0], most)})
    return {
        "schema_version": SCHEMA_VERSION,
        "matches_per_replica": options.matches_per_replica,
        "latency_s": options.latency,
        "seconds": options.seconds,
        "repeats": options.repeats,
        "cells": cells,
        "limit": limit,
        "overhead_ms": await bench.overhead(),
    }


def judged(row: Mapping[str, Any], one: Mapping[str, Any], most: float) -> dict[str, Any]:
    """How a cell compares with that of one replica; `most` moves a second are within the arena's
    limit, and of a cell that would need more nothing is asked."""
    linear = statistics.median(row["moves_per_s"]) / (
        row["replicas"] * statistics.median(one["moves_per_s"])
    )
    is_beyond = row["ideal_moves_per_s"] > most
    is_within = None if is_beyond else linear >= LEAST_LINEAR
    return {"linear": linear, "is_beyond_limit": is_beyond, "is_within": is_within}


def all_within(result: Mapping[str, Any]) -> bool:
    """Whether all that lies within the arena's limit grew in proportion, and the way is short."""
    told = [*(row["is_within"] for row in result["cells"]), result["overhead_ms"]["is_within"]]
    return False not in told


def _check(options: ReplicaOptions) -> None:
    replicas, each = options.replicas, options.matches_per_replica
    if list(replicas) != sorted(set(replicas)) or replicas[:1] != (1,):
        raise ConfigError("--replicas: give 1, by which others are measured, and then greater ones")
    if replicas[-1] > MOST_REPLICAS:
        raise ConfigError(f"--replicas: give at most {MOST_REPLICAS}")
    if not 1 <= each <= MOST_MATCHES // replicas[-1]:
        raise ConfigError(
            f"--matches-per-replica: give 1 to {MOST_MATCHES // replicas[-1]} with "
            f"{replicas[-1]} replicas"
        )
    least, most = LATENCIES_S
    if not least <= options.latency <= most:
        raise ConfigError(f"--latency: give {least:g} to {most:g} seconds")
    if not 1 <= options.repeats <= MOST_REPEATS:
        raise ConfigError(f"--repeats: give 1 to {MOST_REPEATS}")
    if not 1 <= options.seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds: give 1 to {MOST_SECONDS:g}")
    if options.seconds < options.latency:
        raise ConfigError(
            f"--seconds: no move would come in {options.seconds:g}; give --latency or more"
        )


class _Bench:
    """The runs that are to be played."""

    def __init__(
        self,
        options: ReplicaOptions,
        replicated: Callable[[int, Table], Table],
        announce: Callable[[str], None],
    ) -> None:
        self._options, self._replicated, self._announce = options, replicated, announce

    def check(self) -> None:
        """ConfigError where the greatest run cannot be played. Blocks."""
        preflight.check(self._fleet(self._options.replicas[-1], self._options.latency))

    async def limit(self) -> dict[str, float]:
        """The greatest moves a second of a window, with engines that answer at once."""
        most = self._options.replicas[-1]
        at_once = most * self._options.matches_per_replica
        embedded = _config({_ENGINE: scripted(at_once, 0.0)}, at_once, self._plies(_FASTEST))
        limit = {}
        for key, told, config in (
            ("embedded_moves_per_s", "an embedded engine that answers", embedded),
            ("ray_moves_per_s", f"{counted(most)} that answer", self._fleet(most, 0.0)),
        ):
            played = await self._play(config)
            limit[key] = max(played.rates)
            self._announce(f"limit of {told} at once: {limit[key]:,.0f} moves/s")
        return limit

    async def cell(self, replicas: int) -> dict[str, Any]:
        """So many replicas with a fixed latency."""
        options = self._options
        played = await self._play(self._fleet(replicas, options.latency))
        placed = report.figures_of(played.records).engines[_ENGINE].replicas
        ideal = options.ideal(replicas)
        told = statistics.median(played.rates)
        self._announce(f"{counted(replicas)}: {told:,.1f} moves/s of {ideal:,.1f}")
        section = placed.section()
        return {
            "replicas": replicas,
            "matches": replicas * options.matches_per_replica,
            "ideal_moves_per_s": ideal,
            "moves_per_s": played.rates,
            "matches_moved": placed.matches_moved,
            "share_max": max(row["share"] for row in section["rows"]) if section else 1.0,
        }

    async def overhead(self) -> dict[str, Any]:
        """What a move takes besides the engine's own durations, milliseconds: on replicas, and on
        an embedded engine whose player moves in turn with theirs."""
        at_once, latency = OVERHEAD_MATCHES, OVERHEAD_LATENCY_S
        engines = {
            _EMBEDDED: scripted(at_once, latency),
            _ENGINE: self._replicated(OVERHEAD_REPLICAS, scripted(at_once, latency)),
        }
        played = await self._play(_config(engines, at_once, self._plies(at_once / latency)))
        ray, embedded = (summary(played.outside_ms(name)) for name in (_ENGINE, _EMBEDDED))
        if ray["p95"] is None or embedded["p95"] is None:
            raise EngineError(f"no move came in {self._options.seconds:g} s; give more --seconds")
        added = ray["p95"] - embedded["p95"]
        self._announce(f"the way to a replica and back: {added:.1f} ms more at p95")
        return {
            "ray": ray,
            "embedded": embedded,
            "p95_added": added,
            "is_within": added <= MOST_ADDED_MS,
        }

    def _fleet(self, replicas: int, latency: float) -> RunConfig:
        each = self._options.matches_per_replica
        at_once = replicas * each
        plies = self._plies(at_once / latency if latency else _FASTEST)
        return _config(
            {_ENGINE: self._replicated(replicas, scripted(each, latency))}, at_once, plies
        )

    def _plies(self, per_s: float) -> float:
        """That all windows take at most."""
        return min(per_s, _FASTEST) * (_WARM_S + self._options.windows_s)

    async def _play(self, config: RunConfig) -> "_Played":
        options = self._options
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            played = await _play(config, Path(folder) / "run", options.seconds, options.repeats)
        if not all(played.rates):
            raise EngineError(f"no move came in {options.seconds:g} s; give more --seconds")
        return played


def _config(engines: Mapping[str, Table], at_once: int, plies: float) -> RunConfig:
    """Two players at chess, one on each engine or both on the only one, that play at least so many
    plies, `at_once` matches at once and without a pause."""
    pairs = at_once + math.ceil(plies / _SHORT_GAME / 2)
    names = list(engines)
    return configs.parse(
        {
            "name": "replicas",
            "seed": 1,
            "engines": engines,
            "agents": [
                {"name": name, "kind": "llm", "engine": engine, "mode": "constrained"}
                for name, engine in (("one", names[0]), ("two", names[-1]))
            ],
            "tournament": {
                "games": ["chess"],
                "pairs": pairs,
                "parallel_matches": at_once,
                "max_plies": _MAX_PLIES,
            },
            "pace": {"move_period_seconds": 0.0},
        }
    )


@dataclass(frozen=True, slots=True)
class _Played:
    """What came of a run."""

    records: Records
    began: float
    """Of the first window, on the run's clock."""
    ended: float
    """Of the last one."""
    rates: list[float]
    """Moves a second of each window."""

    def outside_ms(self, engine: str) -> list[float]:
        """Of the engine's moves, from admission to the answer without its own durations."""
        return [
            outside_s * 1000
            for row in self.records.attempts
            if row.engine == engine and (outside_s := self._outside_s(row)) is not None
        ]

    def _outside_s(self, row: AttemptRow) -> float | None:
        if row.fault is not None or row.admitted is None or row.done is None:
            return None
        if not self.began <= row.admitted <= row.done <= self.ended:
            return None
        own = (row.queue_s, row.prefill_s, row.decode_s)
        return row.done - row.admitted - sum(seconds or 0.0 for seconds in own)


async def _play(config: RunConfig, folder: Path, seconds: float, windows: int) -> _Played:
    """Play until so many windows of `seconds` have passed since the engines were ready."""
    plan = tournament.new_plan(config)
    rows = [plan.pasts[spec.id].row for spec in plan.specs]
    opened = Store.create(folder, RunRow("bench", "", config.to_json(), config.digest, "{}"), rows)
    pacer, began = Pacer(), 0.0

    def count_from_now(_: object) -> None:
        nonlocal began
        began = opened.clock.now() + _WARM_S
        asyncio.get_running_loop().call_later(_WARM_S + seconds * windows, pacer.stop)

    try:
        with runner.logging_to(folder, config.name):
            await tournament.run(
                plan, opened, pacer, Progress(), announce=lambda _: None, opened=count_from_now
            )
    except EnginesFailed as error:
        raise EngineError(str(error)) from error
    finally:
        await opened.close()
    records = store.read(folder)
    _check_undisturbed(records)
    edges = [began + number * seconds for number in range(windows + 1)]
    rates = [moves_in(records.plies, edge, edge + seconds) / seconds for edge in edges[:-1]]
    return _Played(records, began, edges[-1], rates)


def _check_undisturbed(records: Records) -> None:
    """EngineError where an engine was lost meanwhile: the figures would be of less than asked."""
    if any(event.kind == "engine_restarted" for event in records.events):
        raise EngineError("a replica ended while it was measured; try again")


def counted(replicas: int) -> str:
    """So many replicas, in words."""
    return f"{replicas} replica" if replicas == 1 else f"{replicas} replicas"


def moves_in(plies: Iterable[PlyRow], start: float, end: float) -> float:
    """Moves between two times, each counted by the share of its time, due to done, that lies there:
    matches whose answers come in step would make whole moves jump by a batch."""
    return math.fsum(_overlap(row, start, end) for row in plies)


def _overlap(row: PlyRow, start: float, end: float) -> float:
    took = row.done - row.due
    if took <= 0:
        return float(start <= row.done < end)
    return max(0.0, min(row.done, end) - max(row.due, start)) / took
