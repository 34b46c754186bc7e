"""All matches of a run: opens engines and agents, plays under one task group, records it all."""

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog

from agents import Attempt, Fault, LlmConfig, build_agent
from arena.config import ConfigError, RunConfig
from arena.match import Match, MatchRules, Past, Player
from arena.pace import Pacer
from arena.preflight import agent_context, check_contexts
from arena.progress import Progress
from arena.schedule import MatchSpec
from arena.store import AttemptRow, MatchRow, PlyRow, Records, SampleRow, Store, StoreError
from games import Start, load_game
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
up to 2,000,000 each 100th: a stored step stands for so many, and a long run's stay bounded."""
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

    @property
    def unfinished(self) -> tuple[MatchSpec, ...]:
        return tuple(s for s in self.specs if self.pasts[s.id].row.state != "finished")


def new_plan(config: RunConfig, specs: Sequence[MatchSpec]) -> Plan:
    """A plan in which nothing has been played."""
    rows = {spec.id: Past(_row(spec, number)) for number, spec in enumerate(specs)}
    return Plan(config, tuple(specs), rows)


def resumed_plan(config: RunConfig, records: Records) -> Plan:
    """The plan of a run as its store holds it: by identity, never by counting."""
    plies: dict[str, list[PlyRow]] = {row.id: [] for row in records.matches}
    for ply in records.plies:
        plies[ply.match_id].append(ply)
    attempts: dict[str, list[Attempt]] = {row.id: [] for row in records.matches}
    for attempt in records.attempts:
        if attempt.ply == len(plies[attempt.match_id]):
            attempts[attempt.match_id].append(_attempt(attempt))
    evals = {(a.match_id, a.ply): a.eval_cp for a in records.attempts if a.fault is None}
    pasts = {
        row.id: Past(
            row,
            plies[row.id],
            attempts[row.id],
            [evals.get((row.id, ply.ply)) for ply in plies[row.id]],
        )
        for row in records.matches
    }
    return Plan(config, tuple(_spec(row) for row in records.matches), pasts)


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
        matches = _matches(plan, players, store, pacer, progress)
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
            with _calm_collector():
                async with asyncio.TaskGroup() as tables:
                    for _ in range(min(config.tournament.parallel_matches, len(plan.specs))):
                        tables.create_task(_play_in_turn(matches, pacer, progress))
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


async def _play_in_turn(matches: Iterator[Match], pacer: Pacer, progress: Progress) -> None:
    """One permit: the next match when the last has ended."""
    for match in matches:
        if pacer.is_stopping:
            return
        await match.play()
        if progress.engine_failure is not None:
            pacer.stop()


def _matches(
    plan: Plan,
    players: Mapping[str, Player],
    store: Store,
    pacer: Pacer,
    progress: Progress,
) -> Iterator[Match]:
    config = plan.config
    rules = MatchRules(
        config.seed,
        config.pace.move_period_seconds,
        config.faults.agent_attempts,
        config.tournament.max_plies,
        config.clock.rules,
        config.adjudication.rules,
    )
    games = {spec.game: load_game(spec.game) for spec in plan.specs}
    return (
        Match(
            spec,
            games[spec.game],
            (players[spec.agents[0]], players[spec.agents[1]]),
            rules,
            store,
            pacer,
            progress,
            plan.pasts[spec.id],
        )
        for spec in plan.unfinished
    )


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
    for agent_config in config.agents:
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


def _readiness(engine: Engine) -> Callable[[], bool]:
    return lambda: engine.is_ready


async def _record_engine(name: str, engine: Engine, store: Store, progress: Progress) -> None:
    """Store an engine's steps as they come, and its restarts as events.

    What it computed before the first match is no part of the run's figures.
    """
    steps = restarts = 0
    every = 1

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
            if steps == DENSE_SAMPLES * every:
                every *= SPARSER
            steps += 1
            if steps % every == 0:
                store.add(_sample(name, snapshot, store, every))
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
        snapshot.replica,
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


def _row(spec: MatchSpec, number: int) -> MatchRow:
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
        number=number,
    )


def _spec(row: MatchRow) -> MatchSpec:
    start = Start(row.start_fen, row.ruleset, row.opening)
    names = row.agents
    return MatchSpec(row.id, row.pair_id, row.game, row.ruleset, names, start)


def _attempt(row: AttemptRow) -> Attempt:
    reply = None
    if row.reply_text is not None:
        usage = Usage(row.prompt_tokens, row.completion_tokens or 0, row.cached_tokens)
        submitted, admitted, done = row.submitted or 0.0, row.admitted or 0.0, row.done or 0.0
        times = Timings(
            submitted, admitted, row.first_token, done, row.queue_s, row.prefill_s, row.decode_s
        )
        reply = Reply(row.reply_text, Finish(row.finish or Finish.STOP), usage, times)
    fault = Fault(row.fault) if row.fault else None
    return Attempt(row.n, reply, fault, row.detail, row.request_id, row.eval_cp)
