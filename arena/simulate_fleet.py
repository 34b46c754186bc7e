"""`arena simulate overload` and `fleet`: the arena's own workload on engines that are not here.

What a step takes is assumed, and called so, or fitted to the steps of real runs; `--against` then
holds the same fit to other runs, which took no part in it.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arena import fleet as fleets
from arena import overload as overloads
from arena import store
from arena.calibration import (
    Calibration,
    Speed,
    check_whole,
    judged,
    measured,
    settings_of,
)
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
MOST_STEPS = 30_000_000
"""That one command may simulate, about, the steps those that are gone through one by one: a minute
or two."""
MOST_GPUS = 1_000_000
MOST_SEATS = 10_000_000
SEATS = 100_000
"""What is not given."""
MOST_MATCHES_PER_GPU = 20_000
FORECASTS = 5
"""Simulations of one run, each with dice of its own; the medians are told."""
SIZING_RUNS = 100
"""Simulations of a GPU until a fleet is sized, about the most."""
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
    """A fleet, and the runs that the fit is held to; with these and nothing else, no fleet."""

    seats: int | None = None
    gpus: int | None = None
    routing: Routing = "hash"
    period_seconds: float | None = None
    seconds: float = 10.0
    sample: int = 16
    against: Sequence[Path] = ()

    @property
    def asks_for_a_fleet(self) -> bool:
        """Whether one is told, and not only what the runs of `against` were."""
        return not self.against or replace(self, against=()) != FleetOptions()


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
        "matches": seen.matches,
        "finished": seen.finished,
        "step": step_row(seen.step_time),
        "uncached_tokens": statistics.fmean(uncached for uncached, _ in seen.shapes),
        "output_tokens": statistics.fmean(output for _, output in seen.shapes),
        "overhead_ms": seen.overhead_s * 1e3,
        "commit_ms": seen.commit_s * 1e3,
    }
    try:
        server = seen.server(settings, options.seed)
    except ValueError as error:
        raise ConfigError(f"--slots: the run's engine cannot be so ({error})") from None
    work = seen.work(options.seed, period_s)
    return _Engine(work, server, options.slo_seconds or settings.slo_s, row, seen)


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
    _check_overload(engine, options)
    per_s = fleets.capacity(engine.work, engine.server, options.seconds)
    if options.load * per_s * options.seconds < 1:
        raise ConfigError(
            f"--seconds: no move would be asked in {options.seconds:g} s, of an engine that makes "
            f"{per_s:.3g} a second; give more"
        )
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
    told = overloads.figures(run, engine.slo_s, seconds, per_s)
    if engine.slo_s > _longest_wait_s(options) / 2:
        told["second_half_of_capacity"] = None
    return {
        **told,
        "drained_s": trace.makespan_s,
        "caps": [] if gate is None else [change.cap for change in gate.cap.history],
        "timeline": {
            "part_s": trace.makespan_s / TIMELINE_PARTS,
            "waiting": trace.waiting(TIMELINE_PARTS),
        },
    }


def _longest_wait_s(options: OverloadOptions) -> float:
    """In a queue, at the end; half of that, after half the time."""
    return (options.load - 1) * options.seconds


def _most_per_s(engine: _Engine) -> float:
    """A bound on the moves a second of an engine: every step full."""
    server, shapes = engine.server, engine.work.shapes
    prompt = statistics.fmean(uncached for uncached, _ in shapes)
    output = statistics.fmean(output for _, output in shapes)
    time, slots = server.step_time, server.slots
    first_s, next_s = time.seconds(round(slots * prompt), slots), time.seconds(slots, slots)
    return slots / (first_s + (output - 1) * next_s)


def _check_overload(engine: _Engine, options: OverloadOptions) -> None:
    """Of a full engine until it is warm and for the time asked, and of both ways."""
    warm_s = fleets.warm_s(engine.work, engine.server)
    seconds = (1 + 2 * options.load) * options.seconds + 4 * warm_s
    _check_size("--seconds", engine, seconds * _most_per_s(engine), seconds, is_watched=True)


def _check_size(
    option: str, engine: _Engine, moves: float, seconds: float, *, is_watched: bool = False
) -> None:
    """ConfigError where so many moves in so many seconds are too much to simulate. `is_watched`:
    whoever waits is looked at after each step."""
    server, shapes = engine.server, engine.work.shapes
    one_by_one = statistics.fmean(output for _, output in shapes) if is_watched else 0.0
    if server.step_tokens is not None:  # prompts in pieces of at least so many tokens
        piece = server.step_tokens - server.slots + 1
        one_by_one += statistics.fmean(uncached for uncached, _ in shapes) / piece
    steps = min(moves * one_by_one, seconds / server.step_time.seconds(1, 1))
    for what, amount, most in (("moves", moves, MOST_MOVES), ("steps", steps, MOST_STEPS)):
        if amount > most:
            raise ConfigError(
                f"{option}: some {amount:,.0f} {what} would have to be simulated, and {most:,} are "
                "the most; give less of it, or an engine with longer steps"
            )


# a fleet


def fleet(options: FleetOptions, of: EngineOptions) -> dict[str, Any]:
    """So many seats on so many GPUs, or on about as few as keep up; and the runs of `against` as
    they would have been forecast, which are all where nothing else is asked. ConfigError,
    StoreError."""
    _check_fleet(options, of)
    engine = _engine(of, options.period_seconds)
    told = {
        "schema_version": SCHEMA_VERSION,
        "kind": "fleet" if options.asks_for_a_fleet else "against",
        "calibration": engine.row,
        "seed": of.seed,
        "against": _held(options.against, engine, of.seed),
    }
    return {**told, **_fleet(options, engine)} if options.asks_for_a_fleet else told


def _check_fleet(options: FleetOptions, of: EngineOptions) -> None:
    within("--seats", options.seats, 2, MOST_SEATS)
    if options.seats is not None and options.seats % 2:
        raise ConfigError(f"--seats: {options.seats}; a match has two seats, give an even number")
    within("--gpus", options.gpus, 1, MOST_GPUS)
    within("--period-seconds", options.period_seconds, 0.01, 3600)
    within("--seconds", options.seconds, 1, 3600)
    within("--sample", options.sample, 2, 1000)
    if options.against and not of.from_run:
        raise ConfigError("--against: needs --from-run, whose engine is to be forecast")
    if not options.asks_for_a_fleet:
        for option, value in (("--slots", of.slots), ("--slo-seconds", of.slo_seconds)):
            if value is not None:
                raise ConfigError(
                    f"{option}: is a fleet's, and --against has each run's own; leave it out, or "
                    "give --seats"
                )


def _fleet(options: FleetOptions, engine: _Engine) -> dict[str, Any]:
    if not engine.work.period_s:
        raise ConfigError("--period-seconds: the run's seats had no pace; give one")
    seats, seed = options.seats or SEATS, engine.work.seed
    gpus = Gpus(engine.work, engine.server, options.seconds)
    count = options.gpus or _sized(seats, options, engine, gpus)
    loads = fleets.route(seats // 2, count, options.routing, seed)
    mean, fullest = statistics.fmean(loads), max(loads)
    if fullest > MOST_MATCHES_PER_GPU:
        raise ConfigError(
            f"--gpus: {fullest} matches on one of {count}; {MOST_MATCHES_PER_GPU:,} are the most "
            "that is simulated, give more GPUs"
        )
    stands = fleets.stand_ins(loads, options.sample)
    curve = sorted({max(1, round(mean * part)) for part in CURVE})
    _check_gpus(engine, gpus, {*stands, *curve})
    runs = gpus.fleet(stands)
    return {
        "seats": seats,
        "gpus": count,
        "is_sized": options.gpus is None,
        "gpus_simulated": len(runs),
        "slots": engine.server.slots,
        "routing": options.routing,
        "period_seconds": engine.work.period_s,
        "slo_seconds": engine.slo_s,
        "seconds": options.seconds,
        "matches_per_gpu": {"min": min(loads), "mean": mean, "max": fullest},
        "moves_per_s": fleets.moves_per_s(runs),
        "pace_attainment": gpus.pace_share(runs),
        "slo_attainment": fleets.share_within(runs, engine.slo_s),
        "latency_ms": weighted_summary((x * 1000, n) for x, n in fleets.latencies_s(runs)),
        "fullest": _gpu_row(gpus.run(fullest)),
        "curve": [_gpu_row(gpus.run(load)) for load in curve],
    }


def _sized(seats: int, options: FleetOptions, engine: _Engine, gpus: Gpus) -> int:
    matches = seats // 2
    full = min(matches, 2 * _most_per_s(engine) * engine.work.period_s)
    _check_gpus(engine, gpus, [math.ceil(full)] * SIZING_RUNS)
    needed = fleets.gpus_needed(
        gpus,
        matches,
        engine.slo_s,
        options.routing,
        sample=options.sample,
        per_gpu=min(matches, MOST_MATCHES_PER_GPU),
        most=MOST_GPUS,
    )
    if needed is None:
        raise ConfigError(_why_not(seats, options, engine, gpus))
    return needed


def _why_not(seats: int, options: FleetOptions, engine: _Engine, gpus: Gpus) -> str:
    """No number of GPUs keeps up: what does not, and the option that mends it."""
    alone, period_s = gpus.run(1), engine.work.period_s
    told = []
    if fleets.share_within([(alone, 1)], engine.slo_s) < fleets.ENOUGH:
        p95_s = percentile(sorted(alone.latencies_s), 0.95)
        told.append(
            f"--slo-seconds: {engine.slo_s:g} s cannot be kept, with one match on a GPU p95 is "
            f"{p95_s:.3g} s; give more"
        )
    if gpus.pace_share([(alone, 1)]) < fleets.ENOUGH:
        told.append(
            f"--period-seconds: a move every {period_s:g} s cannot be kept, as a seat waits for "
            f"its opponent: alone on a GPU a match needs {2 / alone.moves_per_s:.3g} s for one of "
            "each; give more"
        )
    if not told:
        told.append(
            f"--seats: {seats:,}, routed by {options.routing}, keep up on none of the numbers of "
            f"GPUs tried, up to {MOST_GPUS:,}; give fewer, name --gpus, or --routing even"
        )
    return "; ".join(told)


def _check_gpus(engine: _Engine, gpus: Gpus, loads: Iterable[int]) -> None:
    """ConfigError where GPUs with so many matches each are too much to simulate, all together."""
    period_s, most_per_s = engine.work.period_s, _most_per_s(engine)
    warm_s = fleets.warm_s(engine.work, engine.server)
    moves = seconds = 0.0
    for matches in loads:
        due_s = sum(gpus.seconds_of(matches))
        left_s = matches / most_per_s  # until those that were due by then are answered
        moves += min(2 * matches / period_s * due_s, most_per_s * due_s + matches)
        seconds += due_s + left_s + warm_s
    _check_size("--seconds", engine, moves, seconds)


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


def _held(folders: Sequence[Path], engine: _Engine, seed: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for folder in folders:
        row = _held_to(folder, engine, seed)
        if any(row["run"] == other["run"] for other in rows):
            raise ConfigError(f"--against: {folder} is given twice; give it once")
        rows.append(row)
    return rows


def _held_to(folder: Path, engine: _Engine, seed: int) -> dict[str, Any]:
    """A run as its config and the calibration foretell it, and as it was."""
    seen = engine.seen
    assert seen is not None
    records = store.read(folder)
    if records.run.id in seen.runs:
        raise ConfigError(f"--against: {folder} is a run of --from-run; name one that is not")
    settings, told = settings_of(records, seen.engine), measured(records)
    check_whole(records, seen.engine)
    plies = settings.max_plies or max(round(seen.plies), 1)
    moves = FORECASTS * settings.matches * plies
    _check_size("--against", replace(engine, server=seen.server(settings)), moves, math.inf)
    forecasts = [
        fleets.forecast(
            seen.work(seed + number, settings.period_s),
            seen.server(settings, seed + number),
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
