"""A run for Prometheus: its figures as they stand at a scrape, beside the engines' own metrics.

Nothing is counted per event: a scrape is made from `Figures`. Labels are games, modes, engines,
their replicas and kinds, never an agent or a match, so that the number of series does not grow with
a run. Times are seconds. What is not known is absent, and what has not happened yet is 0. Counters
and histograms are totals of the whole run, what was played before it was resumed included.
"""

import asyncio
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, product
from typing import Any, Literal, NamedTuple

import structlog
from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families

from agents import Fault
from arena.distribution import ORIGIN_MS, PER_OCTAVE, Sketch
from arena.figures import IDLE_S, AgentFigures, EngineFigures, Figures, label
from arena.store import storable
from games import Termination
from serving import HasMetrics
from serving.saturation import SIGNALS

log = structlog.get_logger()

ENGINE_S = 3.0
"""Longest wait for an engine's own metrics."""
LAG_PERIOD_S = 0.1
NONE = "none"
"""Label of agents that ask no engine."""

_LATENCY = range(14)
"""Buckets by the octaves that they end at: 0.01 s x 2^k up to 81.92, OpenTelemetry's."""
_PART = range(-4, 14)
"""The same from 0.000625 s on: what is short where a move is fast."""
_LAG = range(-4, 10)
_REQUESTS = range(11)
_TOKENS = range(17)

Kind = Literal["counter", "gauge", "histogram"]


class Definition(NamedTuple):
    """A metric of ours."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    meaning: str
    """With its unit; the HELP text."""


class Buckets(NamedTuple):
    """A histogram: upper edges with the number of values up to them, all values last."""

    counts: Sequence[tuple[str, float]]
    total: float


class Reading(NamedTuple):
    """A value of a metric; None: it is not known."""

    name: str
    labels: tuple[str, ...]
    value: float | Buckets | None


_OF_ENGINE = ("engine",)
_OF_REPLICA = ("engine", "replica")
_OF_PART = ("game", "engine")
_OF_MODE = ("game", "mode")

DEFINITIONS = (
    Definition(
        "arena_info", "gauge", ("name", "version"), "The run's name and Boardfleet's version; 1."
    ),
    Definition(
        "arena_engine_info",
        "gauge",
        ("engine", "kind", "version"),
        "An engine's kind and version, once it has been ready; 1.",
    ),
    Definition("arena_matches", "gauge", ("state",), "Matches of the run in each state."),
    Definition(
        "arena_matches_finished_total",
        "counter",
        ("game", "termination"),
        "Matches that ended, by how they ended.",
    ),
    Definition("arena_moves_total", "counter", _OF_MODE, "Moves committed."),
    Definition(
        "arena_moves_due_total",
        "counter",
        (),
        "Moves that fell due: those made, and those that never came and cost the match (a "
        "resignation is neither).",
    ),
    Definition(
        "arena_moves_in_time_total",
        "counter",
        (),
        "Moves made within the SLO's seconds of falling due.",
    ),
    Definition(
        "arena_moves_in_time_ratio",
        "gauge",
        (),
        "SLO attainment of the whole run: moves in time of moves due, 0 to 1.",
    ),
    Definition(
        "arena_pace_attainment_ratio",
        "gauge",
        (),
        "Moves made of those that the pace allowed while matches ran, 0 to 1.",
    ),
    Definition(
        "arena_seat_attainment_min_ratio",
        "gauge",
        (),
        "The pace attainment of the seat that fared worst, 0 to 1.",
    ),
    Definition(
        "arena_move_latency_seconds",
        "histogram",
        _OF_PART,
        "From when a move fell due until it was decided, seconds.",
    ),
    Definition(
        "arena_move_queue_seconds",
        "histogram",
        _OF_PART,
        "Of a move: waiting, in our own queue and the engine's, all attempts together, seconds.",
    ),
    Definition(
        "arena_move_prefill_seconds",
        "histogram",
        _OF_PART,
        "Of a move: the engine computes the prompt, all attempts together, seconds.",
    ),
    Definition(
        "arena_move_decode_seconds",
        "histogram",
        _OF_PART,
        "Of a move: the engine writes the answer, all attempts together, seconds.",
    ),
    Definition(
        "arena_move_harness_seconds",
        "histogram",
        _OF_PART,
        "Of a move: neither in the engine nor in our queue before it; prompt, parser, commit, "
        "seconds.",
    ),
    Definition(
        "arena_schedule_lag_seconds",
        "histogram",
        (),
        "From when a move fell due until its first question was handed in, seconds.",
    ),
    Definition(
        "arena_event_loop_lag_seconds",
        "histogram",
        (),
        "How late a sleep of 0.1 s wakes on the event loop of the arena, seconds.",
    ),
    Definition(
        "arena_illegal_moves_total",
        "counter",
        _OF_MODE,
        "Answers that were moves, but not legal ones; each is an attempt.",
    ),
    Definition(
        "arena_flag_falls_total",
        "counter",
        ("game",),
        "Matches lost because the time for a move or a clock ran out.",
    ),
    Definition(
        "arena_faults_total",
        "counter",
        ("kind", "blame"),
        "Attempts that failed, by kind and by whose fault it was (agent, infrastructure).",
    ),
    Definition(
        "arena_batch_occupancy_requests",
        "histogram",
        _OF_ENGINE,
        "Requests computed in an engine step: the batch as it really was.",
    ),
    Definition(
        "arena_batch_tokens",
        "histogram",
        _OF_ENGINE,
        "Tokens computed in an engine step, prompt and output.",
    ),
    Definition(
        "arena_batch_limit_requests",
        "gauge",
        _OF_ENGINE,
        "Most requests in a step: max_concurrent, or a replica's part of it.",
    ),
    Definition(
        "arena_concurrency_limit_requests",
        "gauge",
        _OF_ENGINE,
        "Most requests inside the engine at once, in all its replicas together (max_concurrent).",
    ),
    Definition(
        "arena_batch_limit_tokens",
        "gauge",
        _OF_ENGINE,
        "Most tokens in a step (max_batched_tokens), where the config sets it.",
    ),
    Definition(
        "arena_requests_in_flight",
        "gauge",
        _OF_ENGINE,
        "Requests handed in and not answered yet, mean of the last second, our queue included.",
    ),
    Definition(
        "arena_requests_waiting",
        "gauge",
        _OF_ENGINE,
        "Requests waiting in our queue or in the engine's (of all replicas), mean of the last "
        "second's steps.",
    ),
    Definition(
        "arena_saturated",
        "gauge",
        ("engine", "signal"),
        "1 while the saturation verdict names this engine and signal, else 0.",
    ),
    Definition(
        "arena_rejected_total",
        "counter",
        ("engine", "reason"),
        "Requests refused: overloaded (a queue was full), rejected (never to be taken).",
    ),
    Definition(
        "arena_engine_restarts_total",
        "counter",
        _OF_ENGINE,
        "Times an engine was started again after it died or stalled.",
    ),
    Definition(
        "arena_kv_usage_ratio",
        "gauge",
        _OF_ENGINE,
        "KV cache in use, greatest of the last second and of all replicas, 0 to 1; absent while "
        "nothing is asked.",
    ),
    Definition(
        "arena_preemptions_total",
        "counter",
        _OF_ENGINE,
        "Requests thrown out of the KV cache for want of room, to be computed again.",
    ),
    Definition(
        "arena_prefix_cache_queries_total",
        "counter",
        _OF_ENGINE,
        "Prompt tokens of replies that say how many were cached.",
    ),
    Definition(
        "arena_prefix_cache_hits_total",
        "counter",
        _OF_ENGINE,
        "Of these, the tokens found in the prefix cache.",
    ),
    Definition(
        "arena_prefix_hit_ratio",
        "gauge",
        _OF_ENGINE,
        "Prefix cache hits of queries, the whole run's tokens, 0 to 1.",
    ),
    Definition(
        "arena_prompt_tokens_total", "counter", _OF_PART, "Prompt tokens, cached ones included."
    ),
    Definition(
        "arena_uncached_prompt_tokens_total",
        "counter",
        _OF_PART,
        "Prompt tokens that had to be computed.",
    ),
    Definition(
        "arena_completion_tokens_total", "counter", _OF_PART, "Tokens written by the engine."
    ),
    Definition(
        "arena_matches_moved_total",
        "counter",
        _OF_ENGINE,
        "Matches that were answered by more than one replica.",
    ),
    Definition(
        "arena_replica_matches",
        "gauge",
        _OF_REPLICA,
        "Matches of the whole run in which a replica answered something.",
    ),
    Definition(
        "arena_replica_moves_total",
        "counter",
        _OF_REPLICA,
        "Moves whose last answer was a replica's.",
    ),
    Definition(
        "arena_replica_engine_seconds_total",
        "counter",
        _OF_REPLICA,
        "What a replica computed for these moves: prefill and decode, or admitted to answered "
        "where it tells neither; seconds.",
    ),
    Definition(
        "arena_replica_prefix_hit_ratio",
        "gauge",
        _OF_REPLICA,
        "Prefix cache hits of queries at a replica, the whole run's tokens, 0 to 1.",
    ),
    Definition(
        "arena_replica_straggler",
        "gauge",
        _OF_REPLICA,
        "1 while a replica answers whose median move takes more than 1.5 times the other "
        "replicas', else 0.",
    ),
)
_BY_NAME = {definition.name: definition for definition in DEFINITIONS}
_PARTS = ("latency", "queue", "prefill", "decode", "harness")


class LoopLag:
    """How late the event loop wakes who sleeps on it."""

    def __init__(self) -> None:
        self.sketch = Sketch()
        """Milliseconds."""

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.monotonic() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self.sketch.add(max(time.monotonic() - due, 0.0) * 1000)


class _Seat(NamedTuple):
    """What an agent's moves are labelled with."""

    mode: str
    engine: str


class _RunCollector:
    """Families made from figures; a collector of prometheus_client."""

    def __init__(
        self,
        figures: Figures,
        lag: LoopLag | None,
        verdict: Callable[[], Mapping[str, Any] | None],
        now: Callable[[], float],
    ) -> None:
        self._figures, self._lag, self._verdict, self._now = figures, lag, verdict, now
        config = figures.config
        self._version = str(json.loads(figures.run.versions_json).get("boardfleet", ""))
        self._seats = {
            agent["name"]: _seat(agent, figures.engines) for agent in config.get("agents", ())
        }
        self._played = sorted(
            {
                (name, label(match.row.game, match.row.ruleset))
                for match in figures.matches.values()
                for name in match.row.agents
            }
        )
        self._ended: Counter[tuple[str, ...]] = Counter()
        self._num_ended = 0

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Any] = {}
        for name, labels, value in chain(self._fleet(), self._agents(), self._all_engines()):
            if value is None:
                continue
            if name not in families:
                families[name] = _family(_BY_NAME[name])
            texts = [storable(text) for text in labels]
            if isinstance(value, Buckets):
                families[name].add_metric(texts, value.counts, value.total)
            else:
                families[name].add_metric(texts, value)
        yield from families.values()

    def _fleet(self) -> Iterator[Reading]:
        figures = self._figures
        fleet = figures.fleet(self._now())
        yield Reading("arena_info", (figures.config["name"], self._version), 1)
        for state, count in fleet["matches"].items():
            yield Reading("arena_matches", (state,), count)
        yield from self._endings()
        yield Reading("arena_moves_due_total", (), figures.plies + figures.lost)
        yield Reading("arena_moves_in_time_total", (), figures.in_time)
        for name, key in (
            ("arena_moves_in_time_ratio", "slo_attainment"),
            ("arena_pace_attainment_ratio", "pace_attainment"),
            ("arena_seat_attainment_min_ratio", "min_seat_attainment"),
        ):
            yield Reading(name, (), fleet[key])
        lags = _seconds([figures.schedule_lag.sketch()], _LAG)
        yield Reading("arena_schedule_lag_seconds", (), lags)
        if self._lag is not None:
            wakes = _seconds([self._lag.sketch], _LAG)
            yield Reading("arena_event_loop_lag_seconds", (), wakes)

    def _endings(self) -> Iterator[Reading]:
        finished = self._figures.finished
        for row in islice(finished, self._num_ended, None):
            self._ended[label(row.game, row.ruleset), row.termination or NONE] += 1
        self._num_ended = len(finished)
        falls = dict.fromkeys(sorted({game for _, game in self._played}), 0)
        for (game, termination), count in self._ended.items():
            yield Reading("arena_matches_finished_total", (game, termination), count)
            if termination == Termination.FLAG_FALL:
                falls[game] = count
        for game, count in falls.items():
            yield Reading("arena_flag_falls_total", (game,), count)

    def _seat(self, agent: str) -> _Seat:
        return self._seats.get(agent, _Seat(NONE, NONE))

    def _agents(self) -> Iterator[Reading]:
        moves: Counter[tuple[str, ...]] = Counter()
        illegal: Counter[tuple[str, ...]] = Counter()
        for name, game in self._played:
            moves[game, self._seat(name).mode] = illegal[game, self._seat(name).mode] = 0
        faults: Counter[str] = Counter(dict.fromkeys(Fault, 0))
        times: dict[tuple[str, str], list[AgentFigures]] = {}
        for agent in self._figures.agents.values():
            mode, engine = self._seat(agent.name)
            moves[agent.game, mode] += agent.moves
            illegal[agent.game, mode] += agent.faults[Fault.ILLEGAL]
            illegal[agent.game, mode] += agent.faults[Fault.ENGINE_ILLEGAL]
            faults.update(agent.faults)
            times.setdefault((agent.game, engine), []).append(agent)
        for labels, count in moves.items():
            yield Reading("arena_moves_total", labels, count)
        for labels, count in illegal.items():
            yield Reading("arena_illegal_moves_total", labels, count)
        for kind, count in faults.items():
            blame = "infrastructure" if Fault(kind).is_infrastructure else "agent"
            yield Reading("arena_faults_total", (Fault(kind).value, blame), count)
        for (labels, group), part in product(times.items(), _PARTS):
            sketches = [agent.times[part].sketch() for agent in group]
            octaves = _LATENCY if part == "latency" else _PART
            yield Reading(f"arena_move_{part}_seconds", labels, _seconds(sketches, octaves))

    def _all_engines(self) -> Iterator[Reading]:
        verdict = self._verdict() or {}
        refused: Counter[str] = Counter()
        for agent in self._figures.agents.values():
            refused[self._seat(agent.name).engine] += agent.faults[Fault.REJECTED]
        for name, engine in self._figures.engines.items():
            for signal in SIGNALS:
                holds = (verdict.get("engine"), verdict.get("signal")) == (name, signal)
                yield Reading("arena_saturated", (name, signal), int(holds))
            yield Reading("arena_rejected_total", (name, "rejected"), refused[name])
            yield from self._now_of(engine)
            yield from _totals(engine)
            yield from _replicas(engine)

    def _now_of(self, engine: EngineFigures) -> Iterator[Reading]:
        """What the last second says of now."""
        second = engine.now
        if second is None:
            return
        labels = (engine.name,)
        if not self._figures.active or self._now() - second.at > IDLE_S:
            yield Reading("arena_requests_in_flight", labels, 0)
            yield Reading("arena_requests_waiting", labels, 0)
        else:
            yield Reading("arena_requests_in_flight", labels, second.in_flight)
            yield Reading("arena_requests_waiting", labels, second.waiting_mean)
            yield Reading("arena_kv_usage_ratio", labels, second.kv_usage)


def _seat(agent: Mapping[str, Any], engines: Container[str]) -> _Seat:
    """Labels by an agent's table; a user's own class may mean anything by its keys."""
    mode, engine = agent.get("mode"), agent.get("engine")
    return _Seat(
        mode if isinstance(mode, str) else NONE,
        engine if isinstance(engine, str) and engine in engines else NONE,
    )


def _totals(engine: EngineFigures) -> Iterator[Reading]:
    """What an engine is, and what it has done so far."""
    settings, labels = engine.settings, (engine.name,)
    if engine.version is not None:
        about = (engine.name, settings["kind"], engine.version)
        yield Reading("arena_engine_info", about, 1)
    requests = _steps(engine.step_requests, _REQUESTS)
    tokens = _steps(engine.step_tokens, _TOKENS)
    yield Reading("arena_batch_occupancy_requests", labels, requests)
    yield Reading("arena_batch_tokens", labels, tokens)
    yield Reading("arena_batch_limit_requests", labels, engine.batch_limit)
    yield Reading("arena_concurrency_limit_requests", labels, settings["max_concurrent"])
    yield Reading("arena_batch_limit_tokens", labels, engine.hosted.get("max_batched_tokens"))
    overloaded = engine.grown.get("rejected")
    yield Reading("arena_rejected_total", (engine.name, "overloaded"), overloaded)
    yield Reading("arena_engine_restarts_total", labels, engine.restarts)
    yield Reading("arena_preemptions_total", labels, engine.grown.get("preemptions"))
    if engine.prompt_tokens:
        hits, queries = engine.cached_tokens, engine.prompt_tokens
        yield Reading("arena_prefix_cache_queries_total", labels, queries)
        yield Reading("arena_prefix_cache_hits_total", labels, hits)
        yield Reading("arena_prefix_hit_ratio", labels, hits / queries)
    for game, spent in engine.tokens.items():
        for name, count, moves in (
            ("arena_prompt_tokens_total", spent.prompt, spent.prompt_moves),
            ("arena_uncached_prompt_tokens_total", spent.uncached, spent.uncached_moves),
            ("arena_completion_tokens_total", spent.output, spent.output_moves),
        ):
            yield Reading(name, (game, engine.name), count if moves else None)


def _replicas(engine: EngineFigures) -> Iterator[Reading]:
    """What each replica has done so far; nothing of an engine without several."""
    section = engine.replicas.section()
    if section is None:
        return
    yield Reading("arena_matches_moved_total", (engine.name,), section["matches_moved"])
    for row in section["rows"]:
        labels = engine.name, row["replica"]
        yield Reading("arena_replica_matches", labels, row["matches"])
        yield Reading("arena_replica_moves_total", labels, row["moves"])
        yield Reading("arena_replica_prefix_hit_ratio", labels, row["prefix_hit_rate"])
        lags = row["is_straggler"] and not row["is_silent"]
        yield Reading("arena_replica_straggler", labels, int(lags))
    for replica in engine.replicas.known:
        seconds = replica.engine_ms.sketch().total / 1000
        yield Reading("arena_replica_engine_seconds_total", (engine.name, replica.name), seconds)


def _seconds(sketches: Iterable[Sketch], octaves: range) -> Buckets | None:
    """Sketches of milliseconds as one, with buckets up to 0.01 s x 2^k; None of no values."""
    within: defaultdict[int, int] = defaultdict(int)  # half the time of a Counter
    total_ms = 0.0
    for sketch in sketches:
        total_ms += sketch.total
        for number, count in sketch.bins.items():
            within[-(-number // PER_OCTAVE)] += count
    return _buckets(within, ORIGIN_MS / 1000, octaves, total_ms / 1000)


def _steps(values: Mapping[float, int], octaves: range) -> Buckets | None:
    """Values of engine steps, with buckets up to 2^k; None of no steps."""
    within: defaultdict[int, int] = defaultdict(int)
    for value, steps in values.items():
        within[math.ceil(math.log2(value)) if value > 1 else 0] += steps
    total = math.fsum(value * steps for value, steps in values.items())
    return _buckets(within, 1, octaves, total)


def _buckets(
    within: Mapping[int, int], unit: float, octaves: range, total: float
) -> Buckets | None:
    """`within[k]`: how many values lie over unit x 2^(k-1) up to unit x 2^k."""
    if not within:
        return None
    seen = sum(count for octave, count in within.items() if octave < octaves.start)
    counts: list[tuple[str, float]] = []
    for octave in octaves:
        seen += within.get(octave, 0)
        counts.append((f"{unit * math.exp2(octave):.6g}", seen))
    return Buckets([*counts, ("+Inf", sum(within.values()))], total)


def _family(of: Definition) -> Metric:
    if of.kind == "histogram":
        return HistogramMetricFamily(of.name, of.meaning, labels=of.labels)
    kind = CounterMetricFamily if of.kind == "counter" else GaugeMetricFamily
    return kind(of.name, of.meaning, labels=of.labels)


class Metrics:
    """What a scrape of a run answers."""

    def __init__(
        self,
        figures: Figures,
        lag: LoopLag | None,
        *,
        verdict: Callable[[], Mapping[str, Any] | None],
        now: Callable[[], float],
    ) -> None:
        """`lag`: of this process's loop, where it plays the run. `verdict`: on saturation, with
        keys `engine` and `signal`; None: there is none. `now`: run time, seconds."""
        self._ours = _RunCollector(figures, lag, verdict, now)
        self._engines: Mapping[str, HasMetrics] = {}

    def attach(self, engines: Mapping[str, HasMetrics]) -> None:
        """Add the metrics of engines to every scrape from now on."""
        self._engines = dict(engines)

    async def text(self) -> str:
        """Prometheus' text format, ours and then the engines' own.

        One engine's text stands as it is. Those of several have the same names: their samples are
        told apart by a label `arena_engine`. An engine that gives nothing readable in 3 s is left
        out.
        """
        theirs = await _ask(self._engines)
        if len(self._engines) > 1:
            # some 10 ms an engine
            told = (await asyncio.to_thread(generate_latest, _Labelled(theirs))).decode()
        else:
            told = await asyncio.to_thread(_readable, theirs)
        return generate_latest(self._ours).decode() + told


async def _ask(engines: Mapping[str, HasMetrics]) -> dict[str, str]:
    """What each engine says of itself, by name."""
    if not engines:
        return {}
    tasks = {name: asyncio.ensure_future(_said(name, of)) for name, of in engines.items()}
    try:
        await asyncio.wait(tasks.values(), timeout=ENGINE_S)
    finally:
        for task in tasks.values():
            task.cancel()
    ended = {name: task for name, task in tasks.items() if task.done() and not task.cancelled()}
    return {name: task.result() for name, task in ended.items()}


async def _said(name: str, engine: HasMetrics) -> str:
    try:
        text = storable(await engine.metrics())
        return text if not text or text.endswith("\n") else text + "\n"
    # a user's own engine raises and returns what it likes; the rest of a scrape must not suffer
    except Exception as error:  # noqa: BLE001
        log.info("engine_metrics_lost", engine=name, error=repr(error))
        return ""


def _readable(texts: Mapping[str, str]) -> str:
    """As they stand, those that Prometheus can read: one that it cannot would cost it the rest."""
    return "".join(text for name, text in texts.items() if _families(name, text))


class _Labelled:
    """The metrics of several engines as one, by their texts; a collector of prometheus_client."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        families: dict[tuple[str, str], Metric] = {}
        for engine, text in self._texts.items():
            for told in _families(engine, text):
                key = told.name, told.type
                family = families.setdefault(key, Metric(told.name, told.documentation, told.type))
                family.samples += [
                    sample._replace(labels={**sample.labels, "arena_engine": engine})
                    for sample in told.samples
                ]
        yield from families.values()


def _families(engine: str, text: str) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(text))
    # whatever the parser trips over, in a user's own engine's text
    except Exception as error:  # noqa: BLE001
        log.info("engine_metrics_unreadable", engine=engine, error=repr(error))
        return []
