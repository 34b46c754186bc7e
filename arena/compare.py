"""Engines compared on the same work: one workload is replayed on each, one engine at a time.

    for each repeat
        for each engine, shuffled, and the next time in the reverse
            start it, ask it the greedy sample
            for each cell, shuffled: forget prefixes → prime, settle → measure → drain
            end it

Repeats are spread over the whole time, so that a machine that slows down slows all engines alike.
In the open loop questions leave when they are due, answered or not, as clocks do not wait; in the
closed loop so many workers each take whole matches, ply by ply. The matches that begin a cell, or
are under way where it begins, ask their questions before it uncounted (prime, settle), so that an
engine with one cache and one with a cache a slot are prepared alike. An engine that fails is a row
with its failures, and the others go on.
"""

import asyncio
import contextlib
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from arena import compare_figures as figures
from arena import output
from arena import workload as workloads
from arena.compare_figures import Cell, EngineRecord, Measurement
from arena.config import ConfigError, RunConfig
from arena.loops import WARM_PLIES, Asker
from arena.preflight import check_start
from arena.workload import WorkItem, Workload
from serving import (
    PACKAGED_MODEL,
    EngineConfig,
    EngineConfigError,
    EngineError,
    Limited,
    VllmConfig,
    build_engine,
    local_directory,
)
from serving.config import cpu_dtype
from serving.dialect import Command
from serving.http_config import HttpEngineConfig
from serving.models import packaged_gguf, shape_of
from serving.openai_chat import ChatConfig
from serving.ray_config import RayConfig
from serving.vllm_config import engine_args, installed_build

CONCURRENCIES = 1, 4, 16
LEAST_SECONDS, MOST_SECONDS = 0.1, 3600
MOST_REPEATS = 100
GREEDY_MATCHES, GREEDY_PLIES = 4, 10
"""The sample of questions that engines' greedy answers are compared on."""
GREEDY_CELLS = 3
"""The sample takes at most as long as so many cells."""
READY_S = 600.0
"""To forget prefixes and to warm up; an engine may be starting again meanwhile."""


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """How to compare."""

    log_dir: Path
    """Where the engines' logs and process records stand; made if it is not there."""
    seconds: float = 10.0
    """Of one cell."""
    repeats: int = 3
    concurrencies: tuple[int, ...] | None = None
    """Closed loops; None: those of `CONCURRENCIES` that the workload has matches for."""
    workload: Path | None = None
    """A workload's file or a run's folder; None: recorded from the config."""
    save_workload: Path | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be measured, checked."""

    config: RunConfig
    names: tuple[str, ...]
    options: CompareOptions
    workload: Workload
    cells: tuple[Cell, ...]
    sample: tuple[WorkItem, ...]
    """Questions for greedy answers."""

    def order(self, repeat: int) -> tuple[str, ...]:
        """The engines, shuffled, and in the next repeat in the reverse: none always follows the
        same one."""
        names = list(self.names)
        random.Random(f"order/{self.workload.digest}/{repeat // 2}").shuffle(names)
        return tuple(reversed(names) if repeat % 2 else names)

    def shuffled_cells(self, repeat: int) -> list[Cell]:
        """The same for every engine."""
        cells = list(self.cells)
        random.Random(f"compare/{self.workload.digest}/{repeat}").shuffle(cells)
        return cells

    def matches(self, repeat: int, cell: Cell) -> tuple[tuple[WorkItem, ...], ...]:
        """Those of a closed loop, from others on in each cell and repeat; the same for every
        engine."""
        matches = self.workload.matches
        number = repeat * len(self.cells) + self.cells.index(cell)
        first = number * len(matches) // (self.options.repeats * len(self.cells))
        return matches[first:] + matches[:first]

    @property
    def steady_s(self) -> tuple[float, float]:
        """Of the workload's times, from when to when all places are taken by matches that have
        asked their first questions."""
        ends = sorted(match[-1].arrival_s for match in self.workload.matches)
        begin = WARM_PLIES * self.workload.move_period_seconds
        return begin, ends[-self.workload.parallel_matches :][0]

    def stretch(self, repeat: int) -> tuple[list[list[WorkItem]], list[WorkItem]]:
        """What the open loop asks in a repeat, from another place of the workload on in each: of
        every match under way there its last questions before, uncounted, and all from there on,
        with times that begin at 0. The same for every engine."""
        first, last = self.steady_s
        room = max(0.0, last - first - self.options.seconds)
        begin = first + room * repeat / self.options.repeats
        before = [
            [item for item in match if item.arrival_s < begin][-WARM_PLIES:]
            for match in self.workload.matches
            if match[-1].arrival_s >= begin
        ]
        items = self.workload.items
        coming = [replace(i, arrival_s=i.arrival_s - begin) for i in items if i.arrival_s >= begin]
        return before, coming

    def build(self, name: str) -> Limited:
        return build_engine(
            name,
            self.config.engine(name),
            log_dir=self.options.log_dir,
            stall_seconds=self.config.faults.stall_seconds,
            restart_limit=self.config.faults.restart_limit,
        )


def prepare(config: RunConfig, names: Sequence[str], options: CompareOptions) -> Job:
    """Everything that can be checked before an engine starts; records or reads the workload.

    ConfigError or StoreError, one line with key and remedy. No names: every engine of the config.
    """
    _check_options(options)
    chosen = tuple(names) or tuple(config.engines)
    _check_engines(config, chosen)
    if options.workload is None:
        workload = workloads.record(config)
    else:
        workload = workloads.load(options.workload)
    cells = (Cell("open", None), *(Cell("closed", n) for n in _concurrencies(options, workload)))
    job = Job(config, chosen, options, workload, cells, _sample(workload))
    _check_contexts(job)
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--logs: {options.log_dir} cannot be a folder of logs ({error.strerror}); name another"
        ) from None
    if options.save_workload is not None:
        workloads.save(options.save_workload, workload)
    return job


def _concurrencies(options: CompareOptions, workload: Workload) -> Sequence[int]:
    most = len(workload.matches)
    if options.concurrencies is None:
        return [number for number in CONCURRENCIES if number <= most]
    for number in options.concurrencies:
        if number > most:
            raise ConfigError(
                f"--concurrency: {number} questions at once need as many matches, and the "
                f"workload has {most}; raise tournament.pairs or ask for less"
            )
    return options.concurrencies


def _sample(workload: Workload) -> tuple[WorkItem, ...]:
    """Some questions of each of a few matches, in order, so that they share what is cached."""
    dice = random.Random(f"sample/{workload.digest}")
    matches = workload.matches
    chosen = dice.sample(matches, min(GREEDY_MATCHES, len(matches)))
    return tuple(
        item
        for match in chosen
        for item in match[:: max(1, len(match) // GREEDY_PLIES)][:GREEDY_PLIES]
    )


def _check_options(options: CompareOptions) -> None:
    if not LEAST_SECONDS <= options.seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds: give {LEAST_SECONDS} to {MOST_SECONDS}")
    if not 1 <= options.repeats <= MOST_REPEATS:
        raise ConfigError(f"--repeats: give 1 to {MOST_REPEATS}")
    counts = options.concurrencies or ()
    if any(number < 1 for number in counts) or len(set(counts)) < len(counts):
        raise ConfigError("--concurrency: give numbers from 1 on, each once")
    if options.save_workload is not None:
        output.check(options.save_workload, workloads.FILE)


def _check_engines(config: RunConfig, names: Sequence[str]) -> None:
    for name in names:
        config.asked_engine(name)
        if names.count(name) > 1:
            raise ConfigError(f"--engine {name}: is named twice")
        check_start(config, name)
    if not names:
        raise ConfigError("engines: there is none to compare; add [engines.main]")


def _check_contexts(job: Job) -> None:
    """Of models whose files are here already."""
    for name in job.names:
        settings = job.config.engine(name)
        model = getattr(settings, "model", None)
        if model is None or ":" in settings.kind or local_directory(model) is None:
            continue
        refusal = context_refusal(job.build(name), job.workload)
        if refusal is not None:
            raise ConfigError(f"engines.{name}.context_tokens: {refusal}")


def context_refusal(engine: Limited, workload: Workload) -> str | None:
    """None if the longest question fits the engine's context, else one line with both numbers."""
    most = max(
        engine.template.count_tokens(match[-1].parts) + match[-1].max_tokens
        for match in workload.matches
    )
    if most <= engine.limits.context_tokens:
        return None
    return (
        f"is {engine.limits.context_tokens}, and the longest question takes {most} tokens; raise "
        "it, or lower tournament.max_plies"
    )


async def run(
    config: RunConfig,
    names: Sequence[str],
    options: CompareOptions,
    *,
    announce: Callable[[str], None] = lambda line: None,
    stop: asyncio.Event | None = None,
) -> dict[str, Any]:
    """Compare the engines of these names (none: all of the config); CONTRACTS' `compare` object.

    `announce` is told in a line what goes on. Once `stop` is set nothing more is measured, and the
    result is of what was. Raises ConfigError or StoreError before any engine starts. Whatever ends
    it, no process of an engine is left.
    """
    job = await asyncio.to_thread(prepare, config, names, options)
    for text in _plan_texts(job):
        announce(text)
    records = {name: _new_record(job, name) for name in job.names}
    async with asyncio.TaskGroup() as group:
        measuring = group.create_task(_measure_all(job, records, announce))
        stopping = group.create_task((stop or asyncio.Event()).wait())
        await asyncio.wait({measuring, stopping}, return_when=asyncio.FIRST_COMPLETED)
        measuring.cancel()
        stopping.cancel()
    return _result(job, list(records.values()), is_cut_short=measuring.cancelled())


def _plan_texts(job: Job) -> Iterator[str]:
    matches, options = len(job.workload.matches), job.options
    least_s = len(job.cells) * options.seconds * options.repeats * len(job.names)
    yield (
        f"{len(job.workload.items)} questions of {matches} matches, {len(job.cells)} cells of "
        f"{options.seconds:g} s, {options.repeats} repeats, engines {', '.join(job.names)}: takes "
        f"about {_duration(least_s)} at least, and what engines take to start and to get ready"
    )
    left_out = [str(number) for number in CONCURRENCIES if number > matches]
    if options.concurrencies is None and left_out:
        yield (
            f"closed {', '.join(left_out)} left out: the workload has {matches} matches; raise "
            "tournament.pairs"
        )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


async def _measure_all(
    job: Job, records: Mapping[str, EngineRecord], announce: Callable[[str], None]
) -> None:
    for repeat in range(job.options.repeats):
        for name in job.order(repeat):
            trial = _Trial(job, records[name], repeat, announce)
            await trial.run()


def _new_record(job: Job, name: str) -> EngineRecord:
    settings = job.config.engine(name)
    record = EngineRecord(
        name,
        settings.kind,
        getattr(settings, "model", None),
        settings.batch_limit,
        settings.model_dump(mode="json", exclude_none=True),
    )
    record.cells = {cell: [None] * job.options.repeats for cell in job.cells}
    return record


class _Trial:
    """One engine in one repeat: from its start to its end."""

    def __init__(
        self, job: Job, record: EngineRecord, repeat: int, announce: Callable[[str], None]
    ) -> None:
        self._job, self._record, self._repeat = job, record, repeat
        self._where = f"repeat {repeat + 1} of {job.options.repeats}, {record.name}"
        self._announce = announce

    async def run(self) -> None:
        """Measure what can be; what cannot is told in the record. Raises nothing for an engine."""
        record = self._record
        try:
            if self._repeat == 0 or (record.start_s and not record.is_refused):
                await self._serve()
        # a user's own engine raises what it likes, and one engine must not end the others
        except Exception as error:  # noqa: BLE001
            self._failed(error)

    def _failed(self, error: Exception, cell: Cell | None = None) -> None:
        where = self._where if cell is None else f"{self._where}, {cell}"
        self._record.failures.append(f"{where}: {str(error) or repr(error)}")
        self._announce(self._record.failures[-1])

    async def _serve(self) -> None:
        record, job = self._record, self._job
        self._announce(f"{self._where}: starting")
        engine = await asyncio.to_thread(job.build, record.name)
        try:
            begun = time.monotonic()
            await engine.open()
            record.start_s.append(time.monotonic() - begun)
            record.version = engine.version
            record.flags = flags_of(engine, job.config.engine(record.name))
            refusal = await asyncio.to_thread(context_refusal, engine, job.workload)
            if refusal is not None:
                record.is_refused = True
                raise ConfigError(f"engines.{record.name}.context_tokens: {refusal}")
            await self._measure(Asker(engine, job.config.pace.move_limit_seconds))
        finally:
            record.restarts += engine.restarts
            await engine.close()

    async def _measure(self, asker: Asker) -> None:
        record, job = self._record, self._job
        watching = asyncio.create_task(asker.watch())
        try:
            # at every start, so that the first cell of each meets an engine that has worked
            await self._get_ready(asker, ())
            texts = await asker.greedy(job.sample, GREEDY_CELLS * job.options.seconds)
            if not any(record.greedy):
                record.greedy = texts
            for cell in job.shuffled_cells(self._repeat):
                if asker.dead is None:
                    await self._try_cell(asker, cell)
            if asker.dead is not None:
                raise asker.dead
        finally:
            watching.cancel()

    async def _try_cell(self, asker: Asker, cell: Cell) -> None:
        try:
            run = await self._measure_cell(asker, cell)
        except (EngineError, TimeoutError, ConfigError) as error:
            if error is not asker.dead:  # which is told once, of all cells
                self._failed(error, cell)
        else:
            self._record.cells[cell][self._repeat] = run
            self._tell(cell, run)

    async def _measure_cell(self, asker: Asker, cell: Cell) -> Measurement:
        job, seconds = self._job, self._job.options.seconds
        restarts = asker.restarts
        if cell.concurrency is None:
            before, items = job.stretch(self._repeat)
            failed = await self._get_ready(asker, before)
            run = await asker.open_loop(items, seconds)
        else:
            matches = job.matches(self._repeat, cell)
            first, rest = matches[: cell.concurrency], matches[cell.concurrency :]
            failed = await self._get_ready(asker, first)
            begun = [match[WARM_PLIES:] for match in first]
            run = await asker.closed_loop([*begun, *rest], cell.concurrency, seconds)
        if not run.answers:
            raise ConfigError(
                "no question was left to be counted; raise tournament.pairs or --seconds"
            )
        return replace(run, warm_failed=failed, restarts=asker.restarts - restarts)

    async def _get_ready(self, asker: Asker, matches: Sequence[Sequence[WorkItem]]) -> int:
        """Prefixes forgotten, and the matches' first questions asked; how many of those got no
        legal move. Raises what ended the engine for good."""
        try:
            async with asyncio.timeout(READY_S):
                self._record.forgets &= await asker.forget()
                failed = await asker.warm(matches)
        except TimeoutError:
            raise TimeoutError(f"was not ready within {READY_S:g} s") from None
        if asker.dead is not None:
            raise asker.dead
        return failed

    def _tell(self, cell: Cell, run: Measurement) -> None:
        failed = sum(answer.fault is not None for answer in run.answers)
        told = f"{self._where}, {cell}: {run.moves_per_s:.1f} moves/s"
        self._announce(told + (f", {failed} of {len(run.answers)} failed" if failed else ""))


# what is told of the engines


@runtime_checkable
class HasCommand(Protocol):
    """An engine that knows how its server was last started."""

    command: Command | None


def flags_of(engine: Limited, settings: EngineConfig) -> list[str]:
    """The command line that started the engine, or the embedded engine's arguments; empty where
    neither is known."""
    if isinstance(settings, VllmConfig):
        build = installed_build()
        if build is None:
            return []
        shape = shape_of(settings.model)
        arguments = engine_args(settings, settings.model, build.device, shape)
        return [f"{name}={value}" for name, value in arguments.items()]
    command = engine.inner.command if isinstance(engine.inner, HasCommand) else None
    if command is None:
        return []
    return [*(f"{name}={value}" for name, value in command.env.items()), *command.argv]


_NO_KNOBS = frozenset(
    {
        "kind",
        "url",
        "urls",
        "api_key_env",
        "model",
        "served_model",
        "start_seconds",
        "scrape",
        "scrape_seconds",
        "slo_seconds",
    }
)
"""Settings that change nothing of an engine's work, or are told as something else."""


def knobs_of(settings: EngineConfig) -> dict[str, Any]:
    """Every setting that must be the same for engines to be compared.

    None where an engine was left to its own choice or has no such knob, `AS_SERVED` where only who
    started a running server knows it.
    """
    if isinstance(settings, RayConfig):
        return _knobs_of_replicas(settings)
    common = {knob: getattr(settings, knob) for knob in EngineConfig.model_fields}
    said = settings.model_dump(mode="json", exclude_defaults=True)
    knobs = common | said | dict.fromkeys(sorted(_launched_elsewhere(settings)), figures.AS_SERVED)
    return {
        **{knob: value for knob, value in knobs.items() if knob not in _NO_KNOBS},
        "slo_seconds": settings.slo_seconds if settings.adaptive else None,
        "weights": _weights(settings),
        "dtype": _dtype(settings),
        "slots": getattr(settings, "slots", None),
    }


def _knobs_of_replicas(settings: RayConfig) -> dict[str, Any]:
    """Those of the engine that computes, with what the replicas take together."""
    together = {knob: getattr(settings, knob) for knob in ("max_concurrent", "max_queued")}
    return {
        **knobs_of(settings.engine),
        **together,
        "adaptive": settings.adaptive,
        "slo_seconds": settings.slo_seconds if settings.adaptive else None,
        "replicas": settings.replicas,
        "max_replicas": settings.max_replicas,
    }


def _launched_elsewhere(settings: EngineConfig) -> frozenset[str]:
    """Knobs that a running server was started with; none of an engine that is started here."""
    if not isinstance(settings, HttpEngineConfig) or settings.is_launched:
        return frozenset()
    # of these protocols no server says such things
    more = settings.lacking if isinstance(settings, ChatConfig) else ()
    return settings.launch_only.union(more)


def _dtype(settings: EngineConfig) -> str | None:
    """The type of the weights that an engine computes with; None of one that has no such knob."""
    if "dtype" in _launched_elsewhere(settings):
        return figures.AS_SERVED
    if "dtype" in settings.lacking:
        return settings.lacking["dtype"].partition(";")[0]
    if not hasattr(settings, "dtype"):
        return None
    return settings.dtype or f"{cpu_dtype()} on a CPU, else the model's"


def _weights(settings: EngineConfig) -> str | None:
    """The file that weights come from, and whether it is computed with as it is."""
    model: str | None = getattr(settings, "model", None)
    if model is None:
        return None
    if isinstance(settings, HttpEngineConfig) and not settings.is_launched:
        return f"{model}, {figures.AS_SERVED}"
    is_packaged = model == PACKAGED_MODEL
    if not is_packaged and not model.endswith(".gguf"):
        return model
    name = Path(model).name
    if is_packaged:
        with contextlib.suppress(EngineConfigError):
            name = packaged_gguf().name
    return name if "dtype" in settings.lacking else f"{name}, dequantised"


def _result(job: Job, records: Sequence[EngineRecord], *, is_cut_short: bool) -> dict[str, Any]:
    workload, options, config = job.workload, job.options, job.config
    plies = len(workload.items) / len(workload.matches)
    cells = [
        figures.cell_row(record, cell, slo_s=config.slo.move_seconds, plies_per_game=plies)
        for cell in job.cells
        for record in records
    ]
    knobs = {record.name: knobs_of(config.engine(record.name)) for record in records}
    return {
        "schema_version": figures.SCHEMA_VERSION,
        "name": config.name,
        "interrupted": is_cut_short,
        "machine": {"processors": os.cpu_count(), "system": platform.platform()},
        "options": {
            "seconds": options.seconds,
            "repeats": options.repeats,
            "concurrencies": [cell.concurrency for cell in job.cells if cell.loop == "closed"],
            "slo_seconds": config.slo.move_seconds,
            "move_limit_seconds": config.pace.move_limit_seconds,
        },
        "workload": {
            "digest": workload.digest,
            "source": workload.source,
            "items": len(workload.items),
            "matches": len(workload.matches),
            "parallel_matches": workload.parallel_matches,
            "move_period_seconds": workload.move_period_seconds,
        },
        "engines": [_engine_row(record, knobs[record.name]) for record in records],
        "cells": cells,
        "differences": figures.differences(cells),
        "unequal": figures.unequal(records, knobs, cells, workload.parallel_matches),
        "agreement": figures.agreement(records),
        "notes": [*_load_notes(job), *figures.notes(cells, options.seconds)],
    }


def _load_notes(job: Job) -> list[str]:
    """Whether the open loop is a steady load."""
    first, last = job.steady_s
    if last - first >= job.options.seconds:
        return []
    return [
        f"the open loop: the workload keeps {job.workload.parallel_matches} matches under way for "
        f"{max(0.0, last - first):.1f} s, and a cell takes {job.options.seconds:g}, so every "
        "repeat asks the same, and less at its end; raise tournament.pairs"
    ]


def _engine_row(record: EngineRecord, knobs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": record.name,
        "kind": record.kind,
        "version": record.version,
        "model": record.model,
        "weights": knobs["weights"],
        "dtype": knobs["dtype"],
        "start_s": record.start_s,
        "restarts": record.restarts,
        "flags": list(record.flags),
        "settings": dict(record.settings),
        "failures": record.failures,
    }
