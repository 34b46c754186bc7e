"""What the shape of a request is worth on a real engine, everything else being the same.

    start the engine
    for each repeat
        for each cell, shuffled: forget prefixes → prime → so many streams, each asking again once
        it is answered (in waves: once all are) → drain

Every cell of a repeat asks for the moves of the same games side by side, so a ratio of two of them
is not of two workloads, and a machine that slows down slows all cells alike.
"""

import asyncio
import itertools
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from arena import shapes
from arena.compare_figures import Measurement
from arena.config import ConfigError, RunConfig
from arena.loops import WARM_PLIES, Asker
from arena.overload import prepare
from arena.shapes import SHAPES, Cell
from arena.workload import Question, WorkItem, Workload
from serving import (
    Engine,
    EngineError,
    Limited,
    Request,
    RequestRejected,
    Sampling,
    local_directory,
)

MOST_SECONDS = 600.0
MOST_REPEATS = 20
DEADLINE_S = 600.0
"""For one question: a long answer among many takes minutes on a small machine."""


@dataclass(frozen=True, slots=True)
class ShapeOptions:
    """How to measure."""

    streams: int = 16
    seconds: float = 10.0
    """Of one cell; questions that were asked in it are waited for."""
    repeats: int = 3


async def measure(
    config: RunConfig,
    name: str | None,
    *,
    logs: Path,
    announce: Callable[[str], None] = lambda line: None,
    **how: Any,
) -> dict[str, Any]:
    """Every cell on an engine of the config (None: its first); CONTRACTS' `bench shape` object.

    ConfigError before the engine starts, or where its context is too short; EngineError where a
    cell cannot be measured.
    """
    options = ShapeOptions(**how)
    name = _engine_name(config, name)
    _check(config, name, options)
    engine, workload = await asyncio.to_thread(prepare, config, name, logs)
    fens = shapes.fens(config, workload)
    model = getattr(config.engine(name), "model", None)
    is_here = model is not None and ":" not in engine.kind and local_directory(model) is not None
    if is_here:
        await asyncio.to_thread(_check_context, engine, workload, fens)
    try:
        announce(f"starting engine {name} ({engine.kind})")
        await engine.open()
        if not is_here:
            await asyncio.to_thread(_check_context, engine, workload, fens)
        trial = _Trial(engine, workload, fens, options, announce)
        rows = await trial.run()
        told = {
            "name": name,
            "kind": engine.kind,
            "version": engine.version,
            "model": model,
            "max_concurrent": engine.limits.max_concurrent,
        }
    finally:
        await engine.close()
    return {
        "schema_version": shapes.SCHEMA_VERSION,
        "name": config.name,
        "engine": told,
        "machine": {"processors": os.cpu_count(), "system": platform.platform()},
        "streams": options.streams,
        "seconds": options.seconds,
        "repeats": len(rows[0]["moves_per_s"]),
        "workload": {
            "digest": workload.digest,
            "source": workload.source,
            "items": len(workload.items),
            "matches": len(workload.matches),
        },
        "cells": rows,
        "ratios": shapes.ratios(rows),
        "notes": trial.notes(rows),
    }


def _engine_name(config: RunConfig, name: str | None) -> str:
    if name is None:
        if not config.engines:
            raise ConfigError("engines: there is none to measure; add [engines.main]")
        return next(iter(config.engines))
    config.asked_engine(name)
    return name


def _check(config: RunConfig, name: str, options: ShapeOptions) -> None:
    if not 1 <= options.seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds: give 1 to {MOST_SECONDS:g}")
    if not 1 <= options.repeats <= MOST_REPEATS:
        raise ConfigError(f"--repeats: give 1 to {MOST_REPEATS}")
    inside = config.engine(name).max_concurrent
    if not 2 <= options.streams <= inside:
        raise ConfigError(
            f"--streams: is {options.streams}; give 2 to {inside}, which is "
            f"engines.{name}.max_concurrent, or raise that"
        )


def _check_context(engine: Engine, workload: Workload, fens: Mapping[tuple[str, int], str]) -> None:
    """Every shape of every question, which leaves their texts in the template's cache."""
    limit = engine.limits.context_tokens
    for name, shape in SHAPES.items():
        questions = (shape.question(item, fens[item.match_id, item.ply]) for item in workload.items)
        most = max(engine.template.count_tokens(q.parts) + q.max_tokens for q in questions)
        if most > limit:
            raise ConfigError(
                f"engines.{engine.name}.context_tokens: is {limit}, and a question of shape {name} "
                f"takes {most} tokens; raise it, or lower tournament.max_plies"
            )


class _Trial:
    """One engine that is open."""

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        fens: Mapping[tuple[str, int], str],
        options: ShapeOptions,
        announce: Callable[[str], None],
    ) -> None:
        self._engine, self._workload, self._fens = engine, workload, fens
        self._options, self._announce = options, announce
        self._forgets = True
        self._takes_least = True
        self._ended_by: EngineError | None = None

    async def run(self) -> list[dict[str, Any]]:
        """All cells, a row each, of the repeats until one fails; EngineError if the first does."""
        self._takes_least = await self._can_be_told_a_least_length()
        known = shapes.cells(self._options.streams)
        repeats: list[dict[Cell, Measurement]] = []
        for number in range(self._options.repeats):
            try:
                repeats.append(await self._repeat(number, known))
            except EngineError as error:
                if not repeats:
                    raise
                self._ended_by = error
                break
        return [shapes.cell_row(cell, [repeat[cell] for repeat in repeats]) for cell in known]

    async def _repeat(self, number: int, cells: Sequence[Cell]) -> dict[Cell, Measurement]:
        order = list(cells)
        Random(f"shape/{self._workload.digest}/{number}").shuffle(order)
        runs = {}
        for cell in order:
            runs[cell] = await self._measure(cell, number)
            told = f"{runs[cell].moves_per_s:.2f} moves/s"
            self._announce(f"repeat {number + 1} of {self._options.repeats}, {cell}: {told}")
        return runs

    async def _can_be_told_a_least_length(self) -> bool:
        item = self._workload.items[0]
        prompt, sampling = self._engine.template.render(item.parts), Sampling(min_tokens=1)
        request = Request("shape/0/0/0", "shape", prompt, None, 1, sampling, DEADLINE_S)
        try:
            await self._engine.generate(request)
        except RequestRejected:
            return False
        return True

    def _question(self, shape: str) -> Callable[[WorkItem], Question]:
        make = SHAPES[shape].question

        def question(item: WorkItem) -> Question:
            made = make(item, self._fens[item.match_id, item.ply])
            return made if self._takes_least else shapes.without_least(made)

        return question

    async def _measure(self, cell: Cell, repeat: int) -> Measurement:
        options, streams = self._options, cell.streams
        limited, question = Limited(self._engine), self._question(cell.shape)
        asker = Asker(limited, DEADLINE_S, question)
        matches = self._workload.matches
        first, restarts = repeat * len(matches) // options.repeats, self._engine.restarts
        matches = matches[first:] + matches[:first]
        self._forgets &= await asker.forget()
        if question(matches[0][0]).use_prefix_cache:
            prime = Asker(limited, DEADLINE_S, lambda item: shapes.priming(question(item)))
            await prime.warm(matches[: options.streams])
        begun = [match[WARM_PLIES:] for match in matches[: options.streams]]
        asked = [*begun, *matches[options.streams :]]
        if streams == 1:  # a plain loop over the same matches
            asked = [tuple(itertools.chain.from_iterable(zip(*begun, strict=False)))]
        ask = asker.waves if cell.submission == "waves" else asker.closed_loop
        run = await ask(asked, streams, options.seconds)
        if asker.dead is not None:
            raise asker.dead
        if self._engine.restarts > restarts:
            raise EngineError(f"{cell}: the engine died or stalled, and was started again")
        if not run.moves_per_s:
            faults = ", ".join(sorted({a.fault for a in run.answers if a.fault is not None}))
            raise EngineError(
                f"{cell}: no question was answered ({faults or 'there was none left'})"
            )
        return run

    def notes(self, rows: list[dict[str, Any]]) -> list[str]:
        """What a reader must know."""
        told = []
        if self._ended_by is not None:
            done = len(rows[0]["moves_per_s"])
            told.append(f"ended after {done} of {self._options.repeats} repeats: {self._ended_by}")
        if not self._forgets:
            told.append("the prefix cache was not emptied before each cell")
        if not self._takes_least:
            told.append(
                "this kind of server cannot be told a least length: free answers end where the "
                "model likes"
            )
        return [*told, *shapes.notes(rows, self._options.seconds)]
