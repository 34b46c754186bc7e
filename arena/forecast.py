"""Whether a simulated engine is the real one: cells that calibrate and cells held out, in turns.

    start the engine
    for each round, in another order each time
        forget prefixes → ask first questions → a cell of some seconds → drain
    fit a step's time to the steps of the calibrating cells alone, a light and a full load; simulate
    the others; set what was forecast of each against what was measured

A machine that drifts does so for all cells of a round alike, which whole runs one after the other
do not achieve.
"""

import asyncio
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from arena.calibration import Speed, busy_steps, judged, without_stalls
from arena.compare_figures import Answer, Measurement
from arena.config import ConfigError, RunConfig
from arena.distribution import percentile
from arena.fleet import answers_of
from arena.loops import WARM_PLIES, Asker
from arena.overload import evenly_spaced, prepare
from arena.simulate import step_row
from arena.workload import Workload
from serving import Engine, EngineConfig, EngineError, Limited, Reply
from serving.batching import Arrivals, ClosedLoop, Job, Server, run_continuous
from serving.step_time import Step, fit

SCHEMA_VERSION = 1
MOST_SECONDS = 600.0
MOST_ROUNDS = 100
LEAST_CONCURRENT = 8
OPEN_LOAD = 0.5
"""Of what the full load was answered a second so far."""
SIMULATED_ROUNDS = 10
"""For each real one, with dice of its own."""
_DRAIN_S = 30.0
TELLING = frozenset({"vllm"})
"""Kinds that tell each step; a user's own may."""
_REMEDY = 'name one that does, as kind = "vllm" is'


@dataclass
class _Cell:
    """One way of asking, over the rounds."""

    name: str
    clients: int | None
    """Of a closed loop; None: the open loop."""
    runs: list[Measurement] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """Of an open loop, questions a second."""

    @property
    def answers(self) -> list[Answer]:
        return [answer for run in self.runs for answer in run.answers if answer.fault is None]

    def speed(self) -> Speed:
        """As it was measured; EngineError without an answer."""
        took = sorted(answer.done - answer.due for answer in self.answers)
        seconds = math.fsum(run.seconds for run in self.runs)
        moves = math.fsum(run.moves_per_s * run.seconds for run in self.runs)
        if not moves:
            raise EngineError(f"{self.name}: no move came; give more --seconds")
        return Speed(moves / seconds, percentile(took, 0.95))


@dataclass(frozen=True)
class _Seen:
    """What the calibrating cells tell."""

    steps: list[Step]
    shapes: tuple[tuple[int, int], ...]
    overhead_s: float


async def measure(
    config: RunConfig,
    name: str,
    *,
    logs: Path,
    seconds: float,
    rounds: int,
    announce: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Forecasts of an engine of the config and what it then did, as one JSON object; its log stands
    in the folder `logs`. ConfigError before it starts, EngineError where it cannot be measured."""
    if not 1 <= seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds: give 1 to {MOST_SECONDS:g}")
    if not 1 <= rounds <= MOST_ROUNDS:
        raise ConfigError(f"--rounds: give 1 to {MOST_ROUNDS}")
    slots = config.asked_engine(name).max_concurrent
    if slots < LEAST_CONCURRENT:
        raise ConfigError(
            f"engines.{name}.max_concurrent: {slots} leave no room for other loads than one; give "
            f"{LEAST_CONCURRENT} or more"
        )
    if ":" not in (kind := config.engine(name).kind) and kind not in TELLING:
        raise ConfigError(f"--engine {name}: {kind} does not tell each step; {_REMEDY}")
    engine, workload = await asyncio.to_thread(prepare, config, name, logs)
    try:
        announce(f"starting engine {name} ({engine.kind})")
        await engine.open()
        trial = _Trial(engine, workload, seconds, announce)
        await trial.run(rounds)
        told = {"name": name, "kind": engine.kind, "version": engine.version}
    finally:
        await engine.close()
    return {
        "schema_version": SCHEMA_VERSION,
        "engine": told,
        "seconds": seconds,
        "rounds": rounds,
        **_judge(trial, config.engine(name), seconds),
    }


def _closed(clients: int) -> _Cell:
    return _Cell(f"closed {clients}", clients)


class _Trial:
    """One engine that is open."""

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        seconds: float,
        announce: Callable[[str], None],
    ) -> None:
        self._workload, self._seconds, self._announce = workload, seconds, announce
        self._begun = [match[WARM_PLIES:] for match in workload.matches]
        """Without what warms up, which would be found whole."""
        self._limited = Limited(engine)
        slots = engine.limits.max_concurrent
        self._full = _closed(slots)
        self.calibrating = (_closed(slots // 8), self._full)
        self.held = (_closed(slots // 4), _closed(slots // 2), _Cell("open", None))
        self.steps: list[tuple[float, int, int]] = []

    async def run(self, rounds: int) -> None:
        """All cells, so many times; raises EngineDead."""
        watching = asyncio.create_task(self._watch())
        try:
            for number in range(rounds):
                cells = [*self.calibrating, *self.held]
                if number:  # the open loop's rate is known from then on
                    Random(f"forecast/{number}").shuffle(cells)
                for cell in cells:
                    await self._measure(cell)
                rate = self._full.speed().moves_per_s
                self._announce(f"round {number + 1} of {rounds}: {rate:.1f} moves/s at full load")
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        async for seen in self._limited.snapshots():
            if seen.source == "per_step" and seen.step_tokens and seen.step_requests:
                self.steps.append((seen.at, seen.step_tokens, seen.step_requests))

    async def _measure(self, cell: _Cell) -> None:
        asker = Asker(self._limited, self._seconds + _DRAIN_S)
        await asker.forget()
        await asker.warm(self._workload.matches[: cell.clients])
        if cell.clients is None:
            rate = OPEN_LOAD * self._full.speed().moves_per_s
            cell.rates.append(rate)
            items = evenly_spaced(self._begun, rate, self._seconds)
            if len(items) < 2:
                raise EngineError(f"{rate:.2f} moves/s are too few to tell; give more --seconds")
            cell.runs.append(await asker.open_loop(items, self._seconds))
        else:
            cell.runs.append(await asker.closed_loop(self._begun, cell.clients, self._seconds))
        if asker.dead is not None:
            raise asker.dead


def _judge(trial: _Trial, settings: EngineConfig, seconds: float) -> dict[str, Any]:
    seen = _calibrated(trial.calibrating, trial.steps)
    step_time, most = fit(without_stalls(seen.steps)), getattr(settings, "max_batched_tokens", None)
    server = Server(settings.max_concurrent, step_time, most)
    rows = [
        {
            "cell": cell.name,
            **judged(_forecast(cell, seen, server, seconds), cell.speed()),
            "rounds": [run.moves_per_s for run in cell.runs],
            "answers": len(cell.answers),
        }
        for cell in trial.held
    ]
    return {
        "calibrated_on": {
            "cells": [cell.name for cell in trial.calibrating],
            "steps": len(seen.steps),
            "step": step_row(server.step_time),
            "uncached_tokens": statistics.fmean(uncached for uncached, _ in seen.shapes),
            "output_tokens": statistics.fmean(output for _, output in seen.shapes),
            "overhead_ms": seen.overhead_s * 1000,
        },
        "cells": rows,
    }


def _calibrated(cells: Sequence[_Cell], steps: Sequence[tuple[float, int, int]]) -> _Seen:
    answers = [answer for cell in cells for answer in cell.answers]
    replies = [(answer, answer.reply) for answer in answers if answer.reply is not None]
    busy: list[Step] = []
    for run in sorted((run for cell in cells for run in cell.runs), key=lambda run: run.began):
        inside = [(a.reply.timings.admitted, a.done) for a in run.answers if a.reply is not None]
        if inside:
            last = max(done for _, done in inside)
            busy += busy_steps((step for step in steps if run.began <= step[0] <= last), inside)
    shapes = tuple(
        (max(reply.usage.prompt - reply.usage.cached, 1), max(reply.usage.completion, 1))
        for _, reply in replies
        if reply.usage.prompt is not None and reply.usage.cached is not None
    )
    if not busy or not shapes:
        raise EngineError(
            f"the engine does not tell each step and what of a prompt was cached; {_REMEDY}"
        )
    outside = [_outside_s(answer, reply) for answer, reply in replies]
    known = [seconds for seconds in outside if seconds is not None]
    return _Seen(busy, shapes, statistics.fmean(known) if known else 0.0)


def _outside_s(answer: Answer, reply: Reply) -> float | None:
    """What is left of an answer's time without the engine's own; None: it does not say."""
    times = reply.timings
    if times.queue_s is None or times.prefill_s is None or times.decode_s is None:
        return None
    inside = times.queue_s + times.prefill_s + times.decode_s
    return max(answer.done - answer.sent - (times.admitted - times.submitted) - inside, 0.0)


def _forecast(cell: _Cell, seen: _Seen, server: Server, seconds: float) -> Speed:
    """The same cell as often as it was measured, and `SIMULATED_ROUNDS` times that."""
    runs = [
        _simulated(cell, seen, replace(server, seed=seed), seconds)
        for seed in range(len(cell.runs) * SIMULATED_ROUNDS)
    ]
    return _Cell(cell.name, cell.clients, runs).speed()


def _simulated(cell: _Cell, seen: _Seen, server: Server, seconds: float) -> Measurement:
    """One cell in virtual time, its window as `arena.loops` has it."""
    dice = Random(f"forecast/{cell.name}/{server.seed}")
    if cell.clients is None:
        rate = cell.rates[server.seed % len(cell.rates)]
        times = [number / rate for number in range(int(rate * seconds))]
        arrivals = Arrivals([Job(at, *dice.choice(seen.shapes)) for at in times])
        answers = answers_of(run_continuous(arrivals, server), seen.overhead_s)
        return Measurement(0.0, min(seconds, times[-1]), answers, {})
    until_s = 2 * seconds
    while True:
        jobs = (Job(0.0, *dice.choice(seen.shapes)) for _ in itertools.count())
        loop = ClosedLoop(jobs, cell.clients, until_s=until_s, pause_s=seen.overhead_s)
        answers = answers_of(run_continuous(loop, server), seen.overhead_s)
        began = max(answer.done for answer in answers[: cell.clients])
        if until_s >= began + seconds:
            counted = tuple(answer for answer in answers if answer.done > began)
            return Measurement(began, began + seconds, counted, {}, begins_full=True)
        until_s = 2 * (began + seconds)
