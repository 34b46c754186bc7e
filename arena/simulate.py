"""`arena simulate batching` and `paging`: what both are worth, in virtual time.

Nothing is started. One JSON object a kind; the same options and seed give the same object on every
machine. Where a real run is named, its steps and moves stand in for what would be given.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

from arena import store
from arena.calibration import Calibration, calibrate
from arena.config import ConfigError, byte_size
from arena.distribution import percentile, summary
from serving.batching import (
    Arrivals,
    ClosedLoop,
    Job,
    Lengths,
    QueueCap,
    Server,
    Source,
    Trace,
    burst_times,
    parse_lengths,
    poisson_times,
    run_continuous,
    run_static,
)
from serving.paging import reserve
from serving.step_time import StepTime, simple

SCHEMA_VERSION = 1
ArrivalKind = Literal["poisson", "burst", "closed"]
ARRIVALS: tuple[ArrivalKind, ...] = get_args(ArrivalKind)

MOST_WORK = 2_000_000
"""Steps of batching that one command may simulate one by one, about: most of a minute."""
MOST_UNITS = 50_000_000
"""Requests times units of one `paging`, likewise."""
UNITS = (1024, 256, 64, 16)
TIMELINE_PARTS = 60
SHOWN_REQUESTS = 200
"""Of a timeline by slot."""
TOKEN_MS, SLOTS, LENGTHS = 8.0, 8, "mixed"
HELD = "talks"
RATE, BURST, CLIENTS, BLOCK_TOKENS = 12.0, 32, 16, 16
"""What is not given."""


@dataclass(frozen=True)
class BatchingOptions:
    requests: int = 600
    slots: int | None = None
    token_ms: float | None = None
    growth: float | None = None
    prompt_token_ms: float | None = None
    arrivals: ArrivalKind = "poisson"
    rate: float | None = None
    burst: int | None = None
    clients: int | None = None
    think_seconds: float | None = None
    lengths: str | None = None
    prompt_tokens: int | None = None
    shared_tokens: int | None = None
    block_tokens: int | None = None
    prefix_cache: bool = True
    max_queued: int | None = None
    seed: int = 0
    seeds: int = 1
    from_run: Sequence[Path] = ()
    engine: str | None = None


@dataclass(frozen=True)
class PagingOptions:
    requests: int = 20_000
    limit: int = 4096
    lengths: str | None = None
    units: Sequence[int] | None = None
    """None: `UNITS`, as far as they are below the limit."""
    memory: str = "60GiB"
    kv_bytes_per_token: int = 524_288
    seed: int = 0
    from_run: Sequence[Path] = ()
    engine: str | None = None


# batching


def batching(options: BatchingOptions) -> dict[str, Any]:
    """Static against continuous batching of the same requests; ConfigError, StoreError."""
    _check_batching(options)
    world = _BatchingWorld(options)
    seeds = range(options.seed, options.seed + options.seeds)
    told: dict[str, Any] = {}
    for way, run in (("static", run_static), ("continuous", run_continuous)):
        traces = (run(world.source(seed), world.server(seed), world.gate()) for seed in seeds)
        first = next(traces)
        figures = _batch_figures(first)
        bands = [figures, *map(_batch_figures, traces)]
        told[way] = {**figures, "band": _bands(bands), **_timeline(first)}
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "batching",
        "requests": options.requests,
        **world.row(),
        "max_queued": options.max_queued,
        "seed": options.seed,
        "seeds": options.seeds,
        **told,
    }


def _check_batching(options: BatchingOptions) -> None:
    within("--requests", options.requests, 1, 1_000_000)
    within("--slots", options.slots, 1, 100_000)
    within("--token-ms", options.token_ms, 1e-6, 1e6)
    within("--growth", options.growth, 0, 1)
    within("--prompt-token-ms", options.prompt_token_ms, 0, 1e6)
    within("--rate", options.rate, 1e-6, 1e9)
    within("--burst", options.burst, 1, 1_000_000)
    within("--clients", options.clients, 1, 100_000)
    within("--think-seconds", options.think_seconds, 0, 1e6)
    within("--prompt-tokens", options.prompt_tokens, 0, 10_000_000)
    within("--shared-tokens", options.shared_tokens, 0, 10_000_000)
    within("--block-tokens", options.block_tokens, 1, 1_000_000)
    within("--max-queued", options.max_queued, 0, 1_000_000)
    within("--seeds", options.seeds, 1, 1000)
    if options.from_run:
        refuse_beside_run(options, *_OF_THE_RUN)
        if not options.prefix_cache:
            raise ConfigError("--no-prefix-cache: --from-run brings the run's own; leave one out")
    for name, kinds in _OF_ARRIVALS.items():
        if getattr(options, name) is not None and options.arrivals not in kinds:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option}: is for --arrivals {' or '.join(kinds)}; leave it out")
    _check_prompts(options)


def _check_prompts(options: BatchingOptions) -> None:
    """ConfigError where an option of prompts would do nothing."""
    caches = options.block_tokens is not None or not options.prefix_cache
    for option, is_given, needed, has in (
        ("--prompt-tokens", options.prompt_tokens, "--prompt-token-ms", options.prompt_token_ms),
        ("--prompt-token-ms", options.prompt_token_ms, "--prompt-tokens", options.prompt_tokens),
        ("--shared-tokens", options.shared_tokens, "--prompt-tokens", options.prompt_tokens),
    ):
        if is_given is not None and has is None:
            raise ConfigError(f"{option}: does nothing without {needed}; give that too")
    if caches and options.shared_tokens is None:
        option = "--no-prefix-cache" if options.block_tokens is None else "--block-tokens"
        raise ConfigError(f"{option}: does nothing without --shared-tokens; give that too")
    if options.block_tokens is not None and not options.prefix_cache:
        raise ConfigError("--block-tokens: does nothing with --no-prefix-cache; leave one out")
    if (options.shared_tokens or 0) > (options.prompt_tokens or 0):
        raise ConfigError(
            f"--shared-tokens: {options.shared_tokens} are more than the {options.prompt_tokens} "
            "of --prompt-tokens; give fewer, or longer prompts"
        )


_OF_THE_RUN = (
    "token_ms",
    "growth",
    "prompt_token_ms",
    "lengths",
    "prompt_tokens",
    "shared_tokens",
    "block_tokens",
)
_OF_ARRIVALS: dict[str, tuple[ArrivalKind, ...]] = {
    "rate": ("poisson", "burst"),
    "burst": ("burst",),
    "clients": ("closed",),
    "think_seconds": ("closed",),
}


class _BatchingWorld:
    """What is asked, of what."""

    def __init__(self, options: BatchingOptions) -> None:
        self._options = options
        self._lengths: Lengths | None = None
        self._seen: Calibration | None = None
        prompt: float = options.prompt_tokens or 0
        if options.from_run:
            self._seen = calibrated(options.from_run, options.engine)
            self._server = _server_of(self._seen, options.slots)
            prompt = statistics.fmean(prompt for prompt, _ in self._seen.shapes)
        else:
            refuse_engine(options.engine)
            self._lengths = _lengths(options.lengths or LENGTHS)
            step_time = simple(
                (options.token_ms or TOKEN_MS) / 1000,
                growth=options.growth or 0.0,
                prompt_token_s=(options.prompt_token_ms or 0.0) / 1000,
            )
            self._server = Server(options.slots or SLOTS, step_time)
        self._rate, self._burst = options.rate or RATE, options.burst or BURST
        self._clients, self._think_s = options.clients or CLIENTS, options.think_seconds or 0.0
        self._check_work(prompt)
        room = self._server.slots + (math.inf if options.max_queued is None else options.max_queued)
        if options.arrivals == "closed" and not self._think_s and self._clients > room:
            raise ConfigError(
                "--think-seconds: clients who are refused and ask again at once do nothing else; "
                "give some, or --max-queued that has room for all of them"
            )

    def _check_work(self, prompt: float) -> None:
        requests, seeds = self._options.requests, self._options.seeds
        pieces = prompt / (self._server.step_tokens or math.inf)
        if (most := int(MOST_WORK / (4 + pieces))) < requests * seeds:
            each = "" if seeds == 1 else f" with each of {seeds:,} seeds"
            raise ConfigError(
                f"--requests: {requests:,}{each} are too much to simulate; {most:,} in all are the "
                "most, give fewer"
            )

    def row(self) -> dict[str, Any]:
        """All of it, as JSON; None where an option plays no part."""
        options, seen = self._options, self._seen
        is_closed = options.arrivals == "closed"
        caches = options.shared_tokens is not None and options.prefix_cache
        return {
            **_source_row(seen),
            "slots": self._server.slots,
            "step_tokens": self._server.step_tokens,
            "arrivals": options.arrivals,
            "rate": None if is_closed else self._rate,
            "burst": self._burst if options.arrivals == "burst" else None,
            "clients": self._clients if is_closed else None,
            "think_seconds": self._think_s if is_closed else None,
            "lengths": (options.lengths or LENGTHS) if seen is None else "as in the run",
            "prompt_tokens": options.prompt_tokens,
            "shared_tokens": options.shared_tokens,
            "prefix_cache": options.prefix_cache if options.shared_tokens is not None else None,
            "block_tokens": (options.block_tokens or BLOCK_TOKENS) if caches else None,
            "token_ms": (options.token_ms or TOKEN_MS) if seen is None else None,
            "growth": (options.growth or 0.0) if seen is None else None,
            "prompt_token_ms": options.prompt_token_ms,
            "step": step_row(self._server.step_time),
        }

    def server(self, seed: int) -> Server:
        """The engine, from another place in what its steps took."""
        return replace(self._server, seed=seed)

    def gate(self) -> QueueCap:
        return QueueCap(self._options.max_queued)

    def source(self, seed: int) -> Source:
        """The requests by one seed, the same for both ways."""
        options = self._options
        count = options.requests
        if options.arrivals == "closed":
            jobs = self._jobs([0.0] * count, seed)
            return ClosedLoop(jobs, self._clients, self._think_s, seed=seed)
        if options.arrivals == "burst":
            times = burst_times(count, self._rate, self._burst)
        else:
            times = poisson_times(count, self._rate, Random(f"arrivals/{seed}"))
        return Arrivals(self._jobs(times, seed))

    def _jobs(self, times: Sequence[float], seed: int) -> list[Job]:
        dice = Random(f"lengths/{seed}")
        if self._seen is not None:
            return [Job(at, *dice.choice(self._seen.shapes)) for at in times]
        assert self._lengths is not None
        outputs = self._lengths.draw(len(times), dice)
        prompts = [self._prompt(number) for number in range(len(times))]
        return list(map(Job, times, prompts, outputs))

    def _prompt(self, number: int) -> int:
        """Tokens to compute: whole blocks of what is shared are found, but by the first, and never
        the last token, whose output is needed."""
        options = self._options
        prompt, block = options.prompt_tokens or 0, options.block_tokens or BLOCK_TOKENS
        if not prompt or not options.prefix_cache or number == 0:
            return prompt
        return prompt - min(options.shared_tokens or 0, prompt - 1) // block * block


def _server_of(seen: Calibration, slots: int | None) -> Server:
    """The engine of the runs, with other slots where they are given."""
    settings = seen.settings
    if slots is not None:
        settings = replace(settings, max_concurrent=slots)
    try:
        return seen.server(settings)
    except ValueError as error:
        option = "--from-run" if slots is None else "--slots"
        raise ConfigError(f"{option}: the run's engine cannot be so ({error})") from None


def _batch_figures(trace: Trace) -> dict[str, Any]:
    answered = trace.answered
    return {
        "wait_s": summary(trace.waits_s),
        "latency_s": summary((job.done or 0.0) - job.arrival for job in answered),
        "makespan_s": trace.makespan_s,
        "requests_per_s": len(answered) / trace.makespan_s if answered else 0.0,
        "idle_share": trace.idle_share,
        "step_requests": trace.step_requests / trace.steps if trace.steps else None,
        "refused": len(trace.jobs) - len(answered),
    }


def _bands(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """From the 2.5th to the 97.5th percentile over the seeds; None of one seed."""
    if len(rows) < 2:
        return None
    return {
        "wait_s": {
            key: _band(row["wait_s"][key] for row in rows) for key in ("mean", "p95", "max")
        },
        **{
            key: _band(row[key] for row in rows)
            for key in ("makespan_s", "requests_per_s", "idle_share")
        },
    }


def _band(values: Iterable[float | None]) -> list[float] | None:
    known = sorted(value for value in values if value is not None)
    return [percentile(known, 0.025), percentile(known, 0.975)] if known else None


def _timeline(trace: Trace) -> dict[str, Any]:
    """As JSON; a request is `finished` with its last token, and `done` when it is answered, in a
    static batch with all the others."""
    shown = trace.answered[:SHOWN_REQUESTS]
    return {
        "timeline": {
            "part_s": trace.makespan_s / TIMELINE_PARTS,
            "busy_slots": trace.busy_slots(TIMELINE_PARTS),
            "waiting": trace.waiting(TIMELINE_PARTS),
        },
        "first_requests": [
            {
                "slot": job.slot,
                "arrival": job.arrival,
                "started": job.started,
                "finished": job.finished,
                "done": job.done,
            }
            for job in shown
        ],
    }


# paging


def paging(options: PagingOptions) -> dict[str, Any]:
    """What each unit of reservation wastes, and how many fit; ConfigError, StoreError."""
    within("--requests", options.requests, 1, 2_000_000)
    within("--limit", options.limit, 1, 10_000_000)
    within("--kv-bytes-per-token", options.kv_bytes_per_token, 1, 1 << 40)
    units = options.units
    if units is None:
        units = [unit for unit in UNITS if unit < options.limit]
    for unit in units:
        within("--units", unit, 1, options.limit)
    if options.requests * len(units) > MOST_UNITS:
        raise ConfigError(
            f"--units: {len(units):,} of them for {options.requests:,} requests are too "
            "much to count; give fewer of either"
        )
    memory = byte_size("--memory", options.memory)
    within("--memory", memory, options.kv_bytes_per_token, 1 << 60)
    memory_tokens = memory // options.kv_bytes_per_token
    seen: Calibration | None = None
    if options.from_run:
        refuse_beside_run(options, "lengths")
        seen = calibrated(options.from_run, options.engine)
        dice = Random(f"lengths/{options.seed}")
        lengths = dice.choices(seen.held_tokens, k=options.requests)
        told = "as in the run"
    else:
        refuse_engine(options.engine)
        told = options.lengths or HELD
        lengths = _lengths(told).draw(options.requests, Random(f"lengths/{options.seed}"))
    if max(lengths) > options.limit:
        raise ConfigError(
            f"--limit: {options.limit} tokens are fewer than the longest request's {max(lengths)}; "
            "raise it, or give shorter --lengths"
        )
    rows = [reserve(lengths, unit) for unit in dict.fromkeys((options.limit, *units))]
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "paging",
        "requests": options.requests,
        **_source_row(seen),
        "lengths": told,
        "limit": options.limit,
        "used": rows[0].used,
        "memory_bytes": memory,
        "kv_bytes_per_token": options.kv_bytes_per_token,
        "memory_tokens": memory_tokens,
        "seed": options.seed,
        "units": [
            {
                "unit": row.unit,
                "reserved": row.reserved,
                "wasted_share": row.wasted_share,
                "fit": row.fit(memory_tokens),
            }
            for row in rows
        ],
    }


# options


def within(option: str, value: float | None, least: float, most: float) -> None:
    """ConfigError unless a value that is given is a number from `least` to `most`."""
    if value is not None and not least <= value <= most:
        told = f"{value:g}" if isinstance(value, float) else str(value)
        raise ConfigError(f"{option}: {told}; give {least:g} to {most:g}")


def refuse_beside_run(options: Any, *names: str) -> None:
    """ConfigError where one of the options is given whose part the run plays."""
    for name in names:
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')}: --from-run brings the run's own; leave one out"
            )


def refuse_engine(engine: str | None) -> None:
    """ConfigError where an engine is named and no run."""
    if engine is not None:
        raise ConfigError("--engine: names an engine of a run; give --from-run too")


def calibrated(folders: Sequence[Path], engine: str | None) -> Calibration:
    """What the runs in the folders tell of an engine; StoreError."""
    return calibrate([store.read(folder) for folder in folders], engine)


def _source_row(seen: Calibration | None) -> dict[str, Any]:
    """Which engine of which runs, as JSON."""
    if seen is None:
        return {"runs": [], "engine": None}
    return {"runs": list(seen.runs), "engine": seen.engine}


def step_row(step_time: StepTime) -> dict[str, float]:
    """A step's seconds as JSON."""
    return {
        "base_ms": step_time.base_s * 1e3,
        "per_token_us": step_time.per_token_s * 1e6,
        "per_request_us": step_time.per_request_s * 1e6,
    }


def _lengths(text: str) -> Lengths:
    try:
        return parse_lengths(text)
    except ValueError as error:
        raise ConfigError(f"--lengths: {error}") from None
