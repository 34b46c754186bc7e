"""`arena simulate overload` and `fleet`: the arena's own workload on engines that are not here.

What a step takes is assumed, and called so, or fitted to the steps of real runs; `--against` then
holds the same fit to other runs, which took no part in it.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arena import fleet as fleets
from arena import overload as overloads
from arena import store
from arena.calibration import Calibration, Settings, Speed, judged, measured, settings_of
from arena.config import ConfigError
from arena.distribution import percentile, weighted_summary
from arena.fleet import Gpus, Routing, Work
from arena.simulate import (
    SCHEMA_VERSION,
    TIMELINE_PARTS,
    calibrated,
    refuse_beside_run,
    refuse_engine,
    step_row,
    within,
)
from serving.batching import Server
from serving.step_time import StepTime

MOST_MOVES = 3_000_000
"""That one command may simulate, about: a minute or two."""
MOST_GPUS = 1_000_000
MOST_SEATS = 10_000_000
MOST_MATCHES_PER_GPU = 20_000
FORECASTS = 5
"""Simulations of one run, each with dice of its own; the medians are told."""
SIZING_RUNS = 20
"""Simulations of a GPU until a fleet is sized, about."""
CURVE = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
"""Loads of a GPU that are shown, of the mean one."""

ASSUMED = StepTime(base_s=6.0e-3, per_token_s=36e-6, per_request_s=20e-6)
"""A model of 8 billion parameters in bf16 on an H100, by its data sheet: 16.1 GB of weights read a
step at 80 % of 3.35 TB/s; 2 × 8.03e9 FLOPs a token at 45 % of 989 TFLOP/s; 400 tokens × 131,072 B
of KV cache read a request."""
ASSUMED_SHAPE = (26, 5)
"""Of a move: what the append-only prompt and the constrained answer leave to compute."""
ASSUMED_SLOTS = 256


@dataclass(frozen=True)
class EngineOptions:
    """Where an engine's figures come from: runs, or what is given, else what is assumed."""

    from_run: Sequence[Path] = ()
    engine: str | None = None
    slots: int | None = None
    step_ms: float | None = None
    token_us: float | None = None
    request_us: float | None = None
    uncached_tokens: int | None = None
    output_tokens: int | None = None
    slo_seconds: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class OverloadOptions:
    """How an engine is overloaded."""

    load: float = 2.0
    seconds: float = 30.0


@dataclass(frozen=True)
class FleetOptions:
    """A fleet, and the runs that the fit is held to."""

    seats: int = 100_000
    gpus: int | None = None
    routing: Routing = "hash"
    period_seconds: float | None = None
    seconds: float = 10.0
    sample: int = 16
    against: Sequence[Path] = ()


@dataclass(frozen=True)
class _Engine:
    """What is simulated."""

    work: Work
    server: Server
    slo_s: float
    row: dict[str, Any]
    """Where its figures come from, as JSON."""
    seen: Calibration | None


def _engine(options: EngineOptions, period_s: float | None = None) -> _Engine:
    within("--slots", options.slots, 1, 100_000)
    within("--slo-seconds", options.slo_seconds, 0.001, 3600)
    return _seen(options, period_s) if options.from_run else _assumed(options, period_s)


def _seen(options: EngineOptions, period_s: float | None) -> _Engine:
    given = "step_ms", "token_us", "request_us", "uncached_tokens", "output_tokens"
    refuse_beside_run(options, *given)
    seen = calibrated(options.from_run, options.engine)
    settings = seen.settings
    if options.slots is not None:
        settings = replace(settings, max_concurrent=options.slots)
    row = {
        "source": "runs",
        "runs": list(seen.runs),
        "engine": seen.engine,
        "engine_kind": seen.kind,
        "steps": seen.steps,
        "stalls_left_out": seen.stalls,
        "step": step_row(seen.step_time),
        "uncached_tokens": statistics.fmean(uncached for uncached, _ in seen.shapes),
        "output_tokens": statistics.fmean(output for _, output in seen.shapes),
        "overhead_ms": seen.overhead_s * 1e3,
        "commit_ms": seen.commit_s * 1e3,
    }
    work, server = seen.work(options.seed, period_s), _server(seen, settings, options.seed)
    return _Engine(work, server, options.slo_seconds or settings.slo_s, row, seen)


def _server(seen: Calibration, settings: Settings, seed: int) -> Server:
    try:
        return seen.server(settings, seed)
    except ValueError as error:
        raise ConfigError(f"--slots: the run's engine cannot be so ({error})") from None


def _assumed(options: EngineOptions, period_s: float | None) -> _Engine:
    within("--step-ms", options.step_ms, 0, 1e5)
    within("--token-us", options.token_us, 0, 1e8)
    within("--request-us", options.request_us, 0, 1e8)
    within("--uncached-tokens", options.uncached_tokens, 1, 1_000_000)
    within("--output-tokens", options.output_tokens, 1, 100_000)
    refuse_engine(options.engine)
    step_time = StepTime(
        ASSUMED.base_s if options.step_ms is None else options.step_ms / 1e3,
        ASSUMED.per_token_s if options.token_us is None else options.token_us / 1e6,
        ASSUMED.per_request_s if options.request_us is None else options.request_us / 1e6,
    )
    shape = options.uncached_tokens or ASSUMED_SHAPE[0], options.output_tokens or ASSUMED_SHAPE[1]
    row = {
        "source": "assumed",
        "step": step_row(step_time),
        "uncached_tokens": shape[0],
        "output_tokens": shape[1],
        "overhead_ms": 0.0,
        "commit_ms": 0.0,
    }
    try:
        server = Server(options.slots or ASSUMED_SLOTS, step_time, None, options.seed)
    except ValueError as error:
        raise ConfigError(f"--step-ms: {error}") from None
    work = Work((shape,), 1.0 if period_s is None else period_s, seed=options.seed)
    return _Engine(work, server, options.slo_seconds or 1.0, row, None)


# overload


def overload(options: OverloadOptions, of: EngineOptions) -> dict[str, Any]:
    """More moves than an engine can make, behind a plain queue and behind the adaptive cap: `arena
    bench admission` in virtual time, with the same figures. ConfigError, StoreError."""
    if not 1 < options.load <= overloads.MOST_LOAD:
        most = overloads.MOST_LOAD
        raise ConfigError(f"--load: give more than 1, up to {most:g} times the capacity")
    within("--seconds", options.seconds, 1, 3600)
    engine = _engine(of)
    _check_moves("--seconds", 3 * options.load * options.seconds * _most_per_s(engine))
    per_s = fleets.capacity(engine.work, engine.server, options.seconds)
    if not per_s:
        raise ConfigError(f"--seconds: no move came in {options.seconds:g} s; give more")
    ways = {way: _way(way, engine, per_s, options) for way in overloads.WAYS}
    queue, admission = (ways[way]["in_time_per_s"] for way in overloads.WAYS)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "overload",
        "calibration": engine.row,
        "slots": engine.server.slots,
        "slo_seconds": engine.slo_s,
        "load": options.load,
        "seconds": options.seconds,
        "seed": of.seed,
        "capacity": per_s,
        "gain": admission / queue if queue else None,
        **ways,
    }


def _way(way: str, engine: _Engine, per_s: float, options: OverloadOptions) -> dict[str, Any]:
    gate = fleets.Admission(engine.slo_s, overloads.DEEP) if way == "admission" else None
    asked_per_s, seconds = options.load * per_s, options.seconds
    trace = fleets.overload(engine.work, engine.server, asked_per_s, seconds, gate)
    run = fleets.measured(trace, engine.work, seconds)
    return {
        **overloads.figures(run, engine.slo_s, seconds, per_s),
        "drained_s": trace.makespan_s,
        "caps": [] if gate is None else [change.cap for change in gate.cap.history],
        "timeline": {
            "part_s": trace.makespan_s / TIMELINE_PARTS,
            "waiting": trace.waiting(TIMELINE_PARTS),
        },
    }


def _most_per_s(engine: _Engine) -> float:
    """A bound on the moves a second of an engine: every step full, and no prompt to compute."""
    server = engine.server
    steps_per_s = 1 / server.step_time.seconds(server.slots, server.slots)
    output = statistics.fmean(output for _, output in engine.work.shapes)
    return server.slots * steps_per_s / output


def _check_moves(option: str, moves: float) -> None:
    if moves > MOST_MOVES:
        raise ConfigError(
            f"{option}: some {moves:,.0f} moves would have to be simulated, and {MOST_MOVES:,} are "
            "the most; give less of it"
        )


# a fleet


def fleet(options: FleetOptions, of: EngineOptions) -> dict[str, Any]:
    """So many seats on so many GPUs, or on as few as keep up; and the runs of `against` as they
    would have been forecast. ConfigError, StoreError."""
    _check_fleet(options, of)
    engine = _engine(of, options.period_seconds)
    if not engine.work.period_s:
        raise ConfigError("--period-seconds: the run's seats had no pace; give one")
    gpus = Gpus(engine.work, engine.server, options.seconds)
    count = _sized(options, engine, gpus) if options.gpus is None else options.gpus
    loads = fleets.route(options.seats // 2, count, options.routing, of.seed)
    mean, fullest = statistics.fmean(loads), max(loads)
    if fullest > MOST_MATCHES_PER_GPU:
        raise ConfigError(
            f"--gpus: {fullest} matches on one of {count}; {MOST_MATCHES_PER_GPU:,} are the most "
            "that is simulated, give more GPUs"
        )
    _check_moves(
        "--seconds", _moves_of(fullest, options, engine) * (options.sample + len(CURVE) + 1)
    )
    runs = gpus.fleet(loads, options.sample)
    latencies = [(x * 1000, count) for run, count in runs for x in run.latencies_s]
    made = sum(run.moves_per_s * count for run, count in runs)
    curve = sorted({max(1, round(mean * part)) for part in CURVE})
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "fleet",
        "calibration": engine.row,
        "seats": options.seats,
        "gpus": count,
        "is_sized": options.gpus is None,
        "gpus_simulated": len(runs),
        "slots": engine.server.slots,
        "routing": options.routing,
        "period_seconds": engine.work.period_s,
        "slo_seconds": engine.slo_s,
        "seconds": options.seconds,
        "seed": of.seed,
        "matches_per_gpu": {"min": min(loads), "mean": mean, "max": fullest},
        "moves_per_s": made,
        "pace_attainment": min(made / (options.seats / engine.work.period_s), 1.0),
        "slo_attainment": fleets.share_within(runs, engine.slo_s),
        "latency_ms": weighted_summary(latencies),
        "fullest": _gpu_row(gpus.run(fullest)),
        "curve": [_gpu_row(gpus.run(load)) for load in curve],
        "against": [_held_to(folder, engine, of.seed) for folder in options.against],
    }


def _check_fleet(options: FleetOptions, of: EngineOptions) -> None:
    within("--seats", options.seats, 2, MOST_SEATS)
    if options.seats % 2:
        raise ConfigError(f"--seats: {options.seats}; a match has two seats, give an even number")
    within("--gpus", options.gpus, 1, MOST_GPUS)
    within("--period-seconds", options.period_seconds, 0.01, 3600)
    within("--seconds", options.seconds, 1, 3600)
    within("--sample", options.sample, 1, 1000)
    if options.against and not of.from_run:
        raise ConfigError("--against: needs --from-run, whose engine is to be forecast")


def _sized(options: FleetOptions, engine: _Engine, gpus: Gpus) -> int:
    matches = options.seats // 2
    try_most = min(matches, MOST_MATCHES_PER_GPU)
    _check_moves("--seconds", SIZING_RUNS * _most_per_s(engine) * options.seconds)
    needed = fleets.gpus_needed(
        gpus,
        matches,
        engine.slo_s,
        options.routing,
        sample=options.sample,
        per_gpu=try_most,
        most=MOST_GPUS,
    )
    if needed is None:
        raise ConfigError(
            f"--slo-seconds: {engine.slo_s:g} s cannot be kept for {options.seats} seats with up "
            f"to {MOST_GPUS:,} GPUs; give more seconds, or name --gpus"
        )
    return needed


def _moves_of(matches: int, options: FleetOptions, engine: _Engine) -> float:
    """About so many moves are simulated for a GPU with so many matches."""
    period_s = engine.work.period_s
    asked = 2 * matches / period_s
    return min(asked, _most_per_s(engine)) * (options.seconds + fleets.WARM_UP_PERIODS * period_s)


def _gpu_row(run: fleets.GpuRun) -> dict[str, Any]:
    ordered = sorted(run.latencies_s)
    return {
        "matches": run.matches,
        "moves_per_s": run.moves_per_s,
        "p50_ms": percentile(ordered, 0.5) * 1000 if ordered else None,
        "p95_ms": percentile(ordered, 0.95) * 1000 if ordered else None,
        "step_requests": run.step_requests,
    }


# runs that were not calibrated from


def _held_to(folder: Path, engine: _Engine, seed: int) -> dict[str, Any]:
    """A run as its config and the calibration foretell it, and as it was."""
    seen = engine.seen
    assert seen is not None
    records = store.read(folder)
    if records.run.id in seen.runs:
        raise ConfigError(f"--against: {folder} is a run of --from-run; name one that is not")
    told, settings = measured(records), settings_of(records, seen.engine)
    plies = settings.max_plies or max(round(seen.plies), 1)
    _check_moves("--against", FORECASTS * settings.matches * plies)
    forecasts = [
        fleets.forecast(
            seen.work(seed + number, settings.period_s),
            _server(seen, settings, seed + number),
            total=settings.matches,
            parallel=settings.parallel,
            plies=plies,
        )
        for number in range(FORECASTS)
    ]
    rate = statistics.median(one.moves_per_s for one in forecasts)
    p95_s = statistics.median(percentile(sorted(one.latencies_s), 0.95) for one in forecasts)
    return {
        "run": records.run.id,
        "matches": settings.matches,
        "parallel_matches": settings.parallel,
        "max_concurrent": settings.max_concurrent,
        "period_seconds": settings.period_s,
        "moves": len(records.plies),
        **judged(Speed(rate, p95_s), told),
    }


def all_within(rows: Iterable[dict[str, Any]]) -> bool:
    """Whether every forecast of `against` is near enough to what was measured."""
    return all(row["is_within"] for row in rows)
