"""All that can be known before an engine starts, and what a run will ask for."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from agents import (
    AgentConfig,
    AgentContext,
    LlmAgent,
    LlmConfig,
    UciConfig,
    build_agent,
    cannot_think,
    check_agent,
)
from arena import schedule
from arena.config import ConfigError, RunConfig
from serving import (
    Engine,
    LlamaServerConfig,
    ThinkingTemplate,
    VllmConfig,
    build_engine,
    check_engine,
    local_directory,
)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run will ask for at most: games may end before the ply cap."""

    matches: int
    """Of a format that adds matches, the most that there may be."""
    requests: int | None
    """None without a ply cap."""
    seconds: float | None
    """If every seat keeps the pace; None without a cap or a pace."""
    notes: tuple[str, ...]
    """What could not be checked, and why."""


def check(config: RunConfig) -> Forecast:
    """What a run comes to; ConfigError (one line) if it cannot be played."""
    begun_with = len(schedule.matches(config))
    for name in config.used_engines():
        check_start(config, name)
    _check_memory(config)
    _check_hash_tables(config)
    for index in range(len(config.agents)):
        _check_agent(config, index)
        _check_thinker(config, index)
    _check_judge(config)
    notes = (
        *_growth_notes(config, begun_with),
        *_game_notes(config),
        *_slot_notes(config),
        *_chance_notes(config),
        *_check_contexts_at_rest(config),
    )
    return _forecast(config, config.most_matches, notes)


def check_start(config: RunConfig, name: str) -> None:
    """ConfigError for all that can be known of an engine before it starts. Blocks."""
    try:
        check_engine(name, config.engine(name))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def agent_context(config: RunConfig, **more: Any) -> AgentContext:
    """What every agent of the run is told."""
    return AgentContext(
        run_seed=config.seed,
        move_limit_seconds=config.pace.move_limit_seconds,
        prompts={game: section.system or "" for game, section in config.prompts.items()},
        concessions=config.tournament.concessions,
        games=tuple((choice.name, choice.ruleset) for choice in config.games()),
        **more,
    )


def check_contexts(config: RunConfig, agents: Mapping[str, object]) -> None:
    """ConfigError unless every LLM agent's longest game fits its engine's context."""
    for index, settings in enumerate(config.agents):
        agent = agents.get(settings.name)
        if not isinstance(agent, LlmAgent):
            continue
        for name, game, ruleset in config.games():
            if not settings.plays(name):
                continue
            need = agent.context_need(name, ruleset)
            refusal = need.refusal(config.tournament.max_plies)
            if refusal is not None:
                raise ConfigError(
                    f"engines.{settings.engine}.context_tokens: agents[{index}] at {game.name}: "
                    f"{refusal}"
                )


def _check_contexts_at_rest(config: RunConfig) -> tuple[str, ...]:
    """Check what fits, with the models that are on this machine; notes name the others."""
    engines: dict[str, Engine] = {}
    notes = []
    for name in config.used_engines():
        engine_config = config.engine(name)
        model = getattr(engine_config, "model", None)
        if model is None or ":" in engine_config.kind:
            continue
        if local_directory(model) is None and _is_hub_id(model):
            notes.append(
                f"engines.{name}: {model} is not on this machine yet, so whether the longest game "
                "fits context_tokens is checked once it is"
            )
            continue
        engines[name] = _at_rest(config, name)
    context = agent_context(config)
    try:
        agents = {
            agent.name: build_agent(agent, engines, context)
            for agent in config.agents
            if isinstance(agent, LlmConfig) and agent.engine in engines
        }
        check_contexts(config, agents)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return tuple(notes)


def _check_memory(config: RunConfig) -> None:
    """Two embedded engines would each take the memory that one may have."""
    embedded = {
        name: engine
        for name in config.used_engines()
        if isinstance(engine := config.engine(name), VllmConfig)
    }
    for name, engine in embedded.items():
        if len(embedded) > 1 and engine.kv_cache_bytes is None:
            raise ConfigError(
                f"engines.{name}.kv_cache_bytes: is missing; with {len(embedded)} embedded engines "
                'say how much each may take, such as "1GiB"'
            )


def _check_hash_tables(config: RunConfig) -> None:
    """UCI engines fill their tables, so that what is promised must be there."""
    engines: dict[str, AgentConfig | None] = {
        f"agents[{index}]": agent for index, agent in enumerate(config.agents)
    }
    engines["adjudication.judge"] = config.adjudication.judge
    sizes = {
        where: engine.hash_mib * engine.processes
        for where, engine in engines.items()
        if isinstance(engine, UciConfig)
    }
    asked, there = sum(sizes.values()), psutil.virtual_memory().total >> 20
    if asked > there:
        raise ConfigError(
            f"{max(sizes, key=sizes.__getitem__)}.hash_mib: the tables of all UCI processes "
            f"(hash_mib x processes) come to {asked:,} MiB, and this machine has {there:,} MiB; "
            "lower it"
        )


def _slot_notes(config: RunConfig) -> Iterator[str]:
    """llama.cpp keeps a match's transcript in a slot of its own, and slots share nothing."""
    matches = config.tournament.parallel_matches
    for name in config.used_engines():
        engine = config.engine(name)
        if isinstance(engine, LlamaServerConfig) and engine.slots < matches:
            yield (
                f"engines.{name}.max_concurrent: {engine.slots} slots for {matches} matches at "
                "once, so matches take each other's cache; as many slots as matches cost memory "
                "and win prefix hits"
            )


def _growth_notes(config: RunConfig, begun_with: int) -> Iterator[str]:
    if config.can_grow:
        yield (
            f"tournament.format: {config.tournament.format} begins with {begun_with} matches and "
            f"adds others as results come in, {config.most_matches} in all at most"
        )


def _game_notes(config: RunConfig) -> Iterator[str]:
    """Who is left out of a game's pairings."""
    for choice in config.games():
        out = [agent.name for agent in config.agents if not agent.plays(choice.name)]
        if out:
            yield f"tournament.games: at {choice.name} without {', '.join(out)}, by their `games`"


def _chance_notes(config: RunConfig) -> Iterator[str]:
    for index, agent in enumerate(config.agents):
        if isinstance(agent, UciConfig) and agent.chancy_key is not None:
            yield f"agents[{index}].{agent.chancy_key}: no two runs of {agent.name} are alike"


def _is_hub_id(model: str) -> bool:
    return model.count("/") == 1 and not model.endswith(".gguf") and not Path(model).exists()


def _check_agent(config: RunConfig, index: int) -> None:
    agent = config.agents[index]
    games = [(game.name, game.ruleset) for game in config.games() if agent.plays(game.name)]
    try:
        check_agent(agent, games)
    except ValueError as error:
        raise ConfigError(f"agents[{index}].{error}") from None


def _check_judge(config: RunConfig) -> None:
    judge = config.adjudication.judge
    if judge is None:
        return
    games = [(game.name, game.ruleset) for game in config.games() if judge.plays(game.name)]
    if not games:
        raise ConfigError("adjudication.judge.games: none of them is played; take it out")
    try:
        check_agent(judge, games)
    except ValueError as error:
        raise ConfigError(f"adjudication.judge.{error}") from None


def _check_thinker(config: RunConfig, index: int) -> None:
    agent = config.agents[index]
    if not isinstance(agent, LlmConfig) or agent.mode != "think":
        return
    engine = config.engine(agent.engine)
    can_think = engine.takes_ids
    if ":" in engine.kind:
        template = _at_rest(config, agent.engine).template
        can_think = isinstance(template, ThinkingTemplate)
    if not can_think:
        raise ConfigError(f"agents[{index}].{cannot_think(agent.engine)}")


def _at_rest(config: RunConfig, name: str) -> Engine:
    """An engine that is not to be started."""
    return build_engine(
        name,
        config.engine(name),
        log_dir=Path(),
        stall_seconds=config.faults.stall_seconds,
        restart_limit=config.faults.restart_limit,
    )


def _forecast(config: RunConfig, matches: int, notes: Sequence[str]) -> Forecast:
    plies = config.tournament.max_plies
    if plies is None:
        return Forecast(matches, None, None, tuple(notes))
    # a thought is a question of its own
    most = {"constrained": 1, "think": 2, "free": config.faults.agent_attempts}
    tries = {
        agent.name: most[agent.mode] if isinstance(agent, LlmConfig) else 0
        for agent in config.players
    }
    if config.can_grow:
        seats = [sorted(tries.values(), reverse=True)[:2]] * matches
    else:
        seats = [[tries[name] for name in spec.agents] for spec in schedule.matches(config)]
    requests = sum(-(-plies // 2) * first + plies // 2 * second for first, second in seats)
    period = config.pace.move_period_seconds
    rounds = math.ceil(matches / config.tournament.parallel_matches)
    seconds = rounds * (plies + 1) * period / 2 + period if period else None
    return Forecast(matches, requests, seconds, tuple(notes))
