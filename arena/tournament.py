"""All matches of a run: opens engines and agents, plays under one task group, records it all."""

import asyncio
import contextlib
import gc
import heapq
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog

from agents import Attempt, Fault, LlmConfig, build_agent
from arena.config import ConfigError, RunConfig
from arena.fault_share import FaultShare
from arena.figures import SCHEDULE_COMPLETE
from arena.formats import Event
from arena.judging import Judge
from arena.match import Match, MatchRules, Past, Player
from arena.pace import Pacer
from arena.preflight import agent_context, check_contexts
from arena.probe import ProbeError, probe
from arena.progress import Progress
from arena.schedule import MatchSpec, Schedule
from arena.store import (
    AttemptRow,
    MatchRow,
    PlyRow,
    Records,
    SampleRow,
    Store,
    StoreError,
    storable,
)
from games import Start
from serving import (
    Engine,
    EngineError,
    EngineSnapshot,
    Finish,
    Limited,
    Reply,
    Timings,
    Usage,
    build_engine,
    end_survivors,
)

log = structlog.get_logger()

DENSE_SAMPLES = 20_000
SPARSER = 10
"""The first 20,000 engine steps are stored one by one, of those up to 200,000 each 10th, of those
up to 2,000,000 each 100th: a stored step stands for so many, and a long run's stay bounded. The
steps of each replica are counted by themselves, and replicas share these numbers, those that have
ended too."""
_METER_PERIOD_S = 1.0
_LAST_SNAPSHOTS_S = 2.0
"""A user's own engine may not end its snapshots when it is closed."""


class EnginesFailed(Exception):
    """An engine could not be started, or died for good; the run is kept and resumable."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be played and what has been: every match with its past."""

    config: RunConfig
    specs: tuple[MatchSpec, ...]
    pasts: Mapping[str, Past]
    schedule: Schedule | None
    """It has been told all results in `pasts`, and `specs` has all that it made due of them. None
    where `specs` are all there will be."""
    new_rows: tuple[MatchRow, ...] = ()
    """Matches that the store does not hold yet."""
    held_events: frozenset[tuple[str, str]] = frozenset()
    """Kinds and details of events that the store holds."""

    @property
    def unfinished(self) -> tuple[MatchSpec, ...]:
        return tuple(s for s in self.specs if self.pasts[s.id].row.state != "finished")


def new_plan(config: RunConfig) -> Plan:
    """A plan in which nothing has been played."""
    schedule = Schedule(config)
    specs = schedule.due()
    pasts = {spec.id: Past(row_of(spec)) for spec in specs}
    return Plan(config, tuple(specs), pasts, schedule if config.can_grow else None)


def resumed_plan(config: RunConfig, records: Records) -> Plan:
    """The plan of a run as its store holds it: by identity, never by counting.

    Raises StoreError where a format that adds matches would not have made those that are held, and
    ConfigError where its openings cannot be read.
    """
    plies: dict[str, list[PlyRow]] = {row.id: [] for row in records.matches}
    for ply in records.plies:
        plies[ply.match_id].append(ply)
    attempts: dict[str, list[Attempt]] = {row.id: [] for row in records.matches}
    for attempt in records.attempts:
        if attempt.ply == len(plies[attempt.match_id]):
            attempts[attempt.match_id].append(attempt_of(attempt))
    evals = {(a.match_id, a.ply): a.eval_cp for a in records.attempts if a.fault is None}
    pasts = {
        row.id: Past(
            row,
            plies[row.id],
            attempts[row.id],
            [
                evals.get((row.id, ply.ply)) if config.adjudication.judge is None else ply.judge_cp
                for ply in plies[row.id]
            ],
        )
        for row in records.matches
    }
    specs = list(map(_spec, records.matches))
    if not config.can_grow:
        return Plan(config, tuple(specs), pasts, None)
    schedule, missing = _gone_on(config, records)
    new_rows = tuple(map(row_of, missing))
    pasts |= {row.id: Past(row) for row in new_rows}
    specs = sorted([*specs, *missing], key=lambda spec: spec.number)
    held = frozenset((event.kind, event.detail_json) for event in records.events)
    return Plan(config, tuple(specs), pasts, schedule, new_rows, held)


def _gone_on(config: RunConfig, records: Records) -> tuple[Schedule, list[MatchSpec]]:
    """The schedule of a run by its results, and matches that were due and are not stored."""
    scores = {row.id: first_score(row) for row in records.matches if row.state == "finished"}
    schedule = Schedule(config, scores)
    known, taken = {row.id for row in records.matches}, {row.number for row in records.matches}
    missing = [spec for spec in schedule.due() if spec.id not in known]
    if any(spec.number in taken for spec in missing):
        raise StoreError(
            f"run {records.run.id}: this version, or a book that was changed, makes other matches "
            "of its config; resume it with the version and the book that it began with"
        )
    return schedule, missing


async def run(
    plan: Plan,
    store: Store,
    pacer: Pacer,
    progress: Progress,
    *,
    announce: Callable[[str], None],
    opened: Callable[[Mapping[str, Limited]], None],
) -> None:
    """Play every unfinished match of the plan; `announce` is told in a line what goes on, and
    `opened` the engines once they are ready.

    Raises EnginesFailed if an engine cannot start or is gone for good. Whatever ends it, what was
    committed stays, and no process of an engine is left.
    """
    config = plan.config
    async with AsyncExitStack() as stack:
        engines = await _open_engines(plan, store, stack, announce)
        if engines:
            announce("computing what all prompts begin with")
        players = await _open_players(config, engines, store, stack)
        judge = await _open_judge(config, stack)
        make = _maker(plan, players, store, pacer, progress, judge)
        supply = _Supply(plan, store, pacer, make)
        if config.faults.probe:
            await _probe(plan, players, store)
        opened(engines)
        announce(f"playing {len(plan.unfinished)} matches")
        for engine in engines.values():
            engine.meter.begin(store.clock.of)
        async with asyncio.TaskGroup() as group:
            recorders = [
                group.create_task(_record_engine(name, engine, store, progress))
                for name, engine in engines.items()
            ]
            metering = group.create_task(_record_telemetry(engines.values(), store))
            fault_share = FaultShare(config.faults.max_fault_share)
            with _calm_collector():
                async with asyncio.TaskGroup() as tables:
                    for _ in range(min(config.tournament.parallel_matches, config.most_matches)):
                        tables.create_task(_play_in_turn(supply, pacer, progress, fault_share))
            for engine in engines.values():
                await engine.close()  # ends the snapshots, the last step included
            if recorders:
                _, late = await asyncio.wait(recorders, timeout=_LAST_SNAPSHOTS_S)
                for recorder in late:
                    recorder.cancel()
            metering.cancel()
            for engine in engines.values():
                _store_buckets(engine, store, final=True)
    if progress.engine_failure is not None:
        raise EnginesFailed(progress.engine_failure)


@contextlib.contextmanager
def _calm_collector() -> Iterator[None]:
    """Keep Python's cycle collector from stopping the loop.

    A ply makes no cycles, but each collection walks every young object of every match: some 40 ms
    at thousands of seats. So it runs rarely while matches are played.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


class _Supply:
    """The matches to play, lowest number first, and those that results bring."""

    def __init__(
        self, plan: Plan, store: Store, pacer: Pacer, make: Callable[[MatchSpec, Past], Match]
    ) -> None:
        self._schedule, self._store, self._pacer = plan.schedule, store, pacer
        self._make = make
        self._held_events = plan.held_events
        self._waiting = [(spec.number, spec.id, spec) for spec in plan.unfinished]
        self._pasts = dict(plan.pasts)
        self._at_play = 0
        self._changed = asyncio.Condition()
        """Held while the schedule is changed, which takes the results one by one."""
        self._is_complete = False
        self._note_events()

    async def next(self) -> Match | None:
        """The next match, waited for while one that is being played may bring it; None: there is
        none, or the run is stopping."""
        async with self._changed:
            while not self._waiting and self._at_play and not self._pacer.is_stopping:
                await self._changed.wait()
            if self._pacer.is_stopping or self._pacer.is_finishing or not self._waiting:
                return None
            _, _, spec = heapq.heappop(self._waiting)
            self._at_play += 1
            return self._make(spec, self._pasts[spec.id])

    async def note(self, row: MatchRow) -> None:
        """A match was played, to its end or not."""
        async with self._changed:
            if row.state == "finished" and self._schedule is not None:
                # tests, ratings and pairings of large fields take tens of milliseconds
                await self._add(await asyncio.to_thread(_due_after, self._schedule, row))
                self._note_events()
            self._at_play -= 1
            self._changed.notify_all()

    async def _add(self, due: Sequence[MatchSpec]) -> None:
        specs = [spec for spec in due if spec.id not in self._pasts]
        if not specs:
            return
        rows = list(map(row_of, specs))
        await self._store.commit(*rows)  # before any of their moves
        for spec, row in zip(specs, rows, strict=True):
            self._pasts[spec.id] = Past(row)
            heapq.heappush(self._waiting, (spec.number, spec.id, spec))

    def _note_events(self) -> None:
        if self._schedule is None:
            return
        events = self._schedule.events()
        if not self._schedule.is_open and not self._is_complete:
            self._is_complete = True
            events.append(Event(SCHEDULE_COMPLETE, {}))
        for kind, detail in events:
            if (kind, json.dumps(detail, default=str)) not in self._held_events:
                self._store.event(kind, detail)


def _due_after(schedule: Schedule, row: MatchRow) -> list[MatchSpec]:
    schedule.note(row.id, first_score(row))
    return schedule.due()


async def _play_in_turn(
    supply: _Supply, pacer: Pacer, progress: Progress, fault_share: FaultShare
) -> None:
    """One permit: the next match when the last has ended."""
    while (match := await supply.next()) is not None:
        await supply.note(await match.play())
        too_many = fault_share.note(match.is_faulty)
        progress.engine_failure = progress.engine_failure or too_many
        if progress.engine_failure is not None:
            pacer.stop()


def _maker(
    plan: Plan,
    players: Mapping[str, Player],
    store: Store,
    pacer: Pacer,
    progress: Progress,
    judge: Judge | None,
) -> Callable[[MatchSpec, Past], Match]:
    config = plan.config
    rules = MatchRules(
        config.seed,
        config.pace.move_period_seconds,
        config.faults.agent_attempts,
        config.tournament.max_plies,
        config.clock.rules,
        config.adjudication.rules,
        config.tournament.draw_offers,
    )
    games = {choice.name: choice.game for choice in config.games()}

    def make(spec: MatchSpec, past: Past) -> Match:
        both = players[spec.agents[0]], players[spec.agents[1]]
        return Match(spec, games[spec.game], both, rules, store, pacer, progress, past, judge)

    return make


async def _open_engines(
    plan: Plan, store: Store, stack: AsyncExitStack, announce: Callable[[str], None]
) -> dict[str, Limited]:
    """The engines that some agent uses, started side by side."""
    config = plan.config
    for survivor in await asyncio.to_thread(end_survivors, store.folder):
        store.event("survivor_ended", {"process_group": survivor})
    engines: dict[str, Limited] = {}
    for name in config.used_engines():
        try:
            engine = build_engine(
                name,
                config.engine(name),
                log_dir=store.folder,
                stall_seconds=config.faults.stall_seconds,
                restart_limit=config.faults.restart_limit,
            )
        except Exception as error:  # a user's own class raises what it likes
            raise EnginesFailed(f"engines.{name}: could not be made: {error!r}") from error
        stack.push_async_callback(engine.close)
        announce(f"starting engine {name} ({engine.kind})")
        engines[name] = engine
    try:
        async with asyncio.TaskGroup() as group:
            for engine in engines.values():
                group.create_task(engine.open())
    except* Exception as failed:  # a model that cannot be had, a user's own engine
        raise EnginesFailed(str(failed.exceptions[0]) or repr(failed.exceptions[0])) from failed
    for name, engine in engines.items():
        detail = {"engine": name, "kind": engine.kind, "version": engine.version}
        store.event("engine_ready", detail)
        log.info("engine_ready", **detail)
    return engines


async def _open_players(
    config: RunConfig, engines: Mapping[str, Engine], store: Store, stack: AsyncExitStack
) -> dict[str, Player]:
    context = agent_context(config, record_event=store.event)
    players = {}
    for agent_config in config.players:
        try:
            agent = build_agent(agent_config, engines, context)
            stack.push_async_callback(agent.close)
            await agent.open()
        except (EngineError, ValueError) as error:
            raise EnginesFailed(f"agent {agent_config.name}: {error}") from error
        engine, mode = (
            (agent_config.engine, agent_config.mode)
            if isinstance(agent_config, LlmConfig)
            else (None, None)
        )
        ready = _readiness(engines[engine]) if engine is not None else lambda: True
        players[agent_config.name] = Player(agent_config.name, agent, engine, mode, ready)
    try:
        check_contexts(config, {name: player.agent for name, player in players.items()})
    except ConfigError as error:
        raise EnginesFailed(str(error)) from None
    return players


async def _open_judge(config: RunConfig, stack: AsyncExitStack) -> Judge | None:
    asked = config.adjudication.judge
    if asked is None:
        return None
    judge = Judge(asked, agent_context(config))
    stack.push_async_callback(judge.close)
    try:
        await judge.open()
    except ValueError as error:
        raise EnginesFailed(f"adjudication.judge.{error}") from None
    return judge


async def _probe(plan: Plan, players: Mapping[str, Player], store: Store) -> None:
    """Ask players whose answers come from elsewhere; the faults of a scripted engine are counted by
    requests, and it can always be had."""
    config = plan.config
    scripted = {name for name, engine in config.engines.items() if engine.kind == "scripted"}
    asked = {
        agent.name: players[agent.name]
        for agent in config.players
        if agent.kind not in ("random", "greedy") and getattr(agent, "engine", "") not in scripted
    }
    try:
        await probe(asked, plan.unfinished, store)
    except ProbeError as error:
        raise EnginesFailed(str(error)) from error


def _readiness(engine: Engine) -> Callable[[], bool]:
    return lambda: engine.is_ready


class Thinning:
    """Which snapshots of an engine are stored."""

    def __init__(self) -> None:
        self._replicas: defaultdict[str | None, _Thinned] = defaultdict(_Thinned)

    def next(self, replica: str | None) -> int:
        """How many snapshots of the replica the next one stands for; 0: it is not stored."""
        thinned = self._replicas[replica]
        dense = max(DENSE_SAMPLES // len(self._replicas), 1)
        if thinned.seen >= dense * thinned.every:
            thinned.every *= SPARSER
        thinned.seen += 1
        thinned.left_out += 1
        if thinned.left_out < thinned.every:
            return 0
        thinned.left_out = 0
        return thinned.every


class _Thinned:
    """How far the snapshots of one replica are thinned."""

    def __init__(self) -> None:
        self.seen = 0
        self.left_out = 0
        """Since the last that was stored."""
        self.every = 1


async def _record_engine(name: str, engine: Engine, store: Store, progress: Progress) -> None:
    """Store an engine's steps as they come, and its restarts as events.

    What it computed before the first match is no part of the run's figures.
    """
    restarts = 0
    thinning = Thinning()

    def note_restarts() -> None:
        nonlocal restarts
        while restarts < engine.restarts:
            restarts += 1
            store.event("engine_restarted", {"engine": name, "restarts": restarts})

    try:
        async for snapshot in engine.snapshots():
            note_restarts()
            if not progress.has_begun:
                continue
            if steps := thinning.next(snapshot.replica):
                store.add(_sample(name, snapshot, store, steps))
    except StoreError:
        raise
    # a user's own engine raises what it likes; lost telemetry must not end the run
    except Exception as error:  # noqa: BLE001
        log.warning("snapshots_lost", engine=name, error=repr(error))
    note_restarts()


async def _record_telemetry(engines: Iterable[Limited], store: Store) -> None:
    """Store what the engines' meters have closed, once a second."""
    told = dict.fromkeys(engines, 0)
    while True:
        await asyncio.sleep(_METER_PERIOD_S)
        for engine in told:
            _store_buckets(engine, store)
            changes = engine.admission_history
            for change in changes[told[engine] :]:
                store.event(
                    "admission_cap",
                    {
                        "engine": engine.name,
                        "at": store.clock.of(change.at),
                        "cap": change.cap,
                        "why": change.why,
                        "rate": change.rate,
                    },
                )
            told[engine] = len(changes)


def _store_buckets(engine: Limited, store: Store, *, final: bool = False) -> None:
    try:
        buckets = engine.meter.buckets(final=final)
    # as of steps: lost telemetry must not end the run
    except Exception as error:  # noqa: BLE001
        log.warning("telemetry_lost", engine=engine.name, error=repr(error))
    else:
        store.add(*buckets)


def _sample(name: str, snapshot: EngineSnapshot, store: Store, steps: int) -> SampleRow:
    return SampleRow(
        name,
        store.clock.of(snapshot.at),
        snapshot.source,
        steps,
        storable(snapshot.replica or "") or None,
        snapshot.running,
        snapshot.waiting,
        snapshot.step_requests,
        snapshot.step_tokens,
        snapshot.kv_usage,
        snapshot.prefix_queries,
        snapshot.prefix_hits,
        snapshot.preemptions,
        snapshot.rejected,
    )


def first_score(row: MatchRow) -> float:
    """The first player's points of a finished match."""
    return 0.5 if row.winner is None else 1.0 - row.winner


def row_of(spec: MatchSpec) -> MatchRow:
    """A match as it stands before it is begun."""
    return MatchRow(
        id=spec.id,
        pair_id=spec.pair_id,
        game=spec.game,
        ruleset=spec.ruleset,
        agent_first=spec.agents[0],
        agent_second=spec.agents[1],
        start_fen=spec.start.fen,
        opening=spec.start.name,
        state="scheduled",
        winner=None,
        termination=None,
        detail=None,
        score_first=None,
        score_second=None,
        started=None,
        ended=None,
        suspended_at=None,
        suspended_s=0.0,
        number=spec.number,
    )


def _spec(row: MatchRow) -> MatchSpec:
    start = Start(row.start_fen, row.ruleset, row.opening)
    names = row.agents
    return MatchSpec(row.id, row.pair_id, row.game, row.ruleset, names, start, row.number)


def attempt_of(row: AttemptRow) -> Attempt:
    """An attempt as it was made; ValueError where its fault or finish is not known."""
    reply = None
    if row.reply_text is not None:
        usage = Usage(row.prompt_tokens, row.completion_tokens or 0, row.cached_tokens)
        submitted, admitted, done = row.submitted or 0.0, row.admitted or 0.0, row.done or 0.0
        times = Timings(
            submitted, admitted, row.first_token, done, row.queue_s, row.prefill_s, row.decode_s
        )
        finish, thought = Finish(row.finish or Finish.STOP), row.reasoning or ""
        reply = Reply(row.reply_text, finish, usage, times, reasoning=thought)
    fault = Fault(row.fault) if row.fault else None
    return Attempt(row.n, reply, fault, row.detail, row.request_id, row.eval_cp)
