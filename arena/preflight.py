"""All that can be known before an engine starts, and what a run will ask for."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents import AgentContext, LlmAgent, LlmConfig, build_agent, check_agent
from arena import schedule
from arena.config import ConfigError, RunConfig
from arena.schedule import MatchSpec
from serving import (
    Engine,
    LlamaServerConfig,
    VllmConfig,
    build_engine,
    check_engine,
    local_directory,
)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run will ask for at most: games may end before the ply cap."""

    matches: int
    requests: int | None
    """None without a ply cap."""
    seconds: float | None
    """If every seat keeps the pace; None without a cap or a pace."""
    notes: tuple[str, ...]
    """What could not be checked, and why."""


def check(config: RunConfig) -> tuple[tuple[MatchSpec, ...], Forecast]:
    """The matches of a run and its forecast; ConfigError (one line) if it cannot be played."""
    specs = schedule.matches(config)
    for name in config.used_engines():
        check_start(config, name)
    _check_memory(config)
    for index in range(len(config.agents)):
        _check_agent(config, index)
    notes = (*_slot_notes(config), *_check_contexts_at_rest(config))
    return specs, _forecast(config, len(specs), notes)


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
        engines[name] = build_engine(
            name,
            engine_config,
            log_dir=Path(),
            stall_seconds=config.faults.stall_seconds,
            restart_limit=config.faults.restart_limit,
        )
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


def _is_hub_id(model: str) -> bool:
    return model.count("/") == 1 and not model.endswith(".gguf") and not Path(model).exists()


def _check_agent(config: RunConfig, index: int) -> None:
    agent = config.agents[index]
    games = [(game.name, game.ruleset) for game in config.games() if agent.plays(game.name)]
    try:
        check_agent(agent, games)
    except ValueError as error:
        raise ConfigError(f"agents[{index}].{error}") from None


def _forecast(config: RunConfig, matches: int, notes: Sequence[str]) -> Forecast:
    plies = config.tournament.max_plies
    if plies is None:
        return Forecast(matches, None, None, tuple(notes))
    askers = [agent for agent in config.agents if isinstance(agent, LlmConfig)]
    tries = config.faults.agent_attempts if any(a.mode == "free" for a in askers) else 1
    period = config.pace.move_period_seconds
    rounds = math.ceil(matches / config.tournament.parallel_matches)
    seconds = rounds * (plies + 1) * period / 2 + period if period else None
    return Forecast(matches, matches * plies * tries, seconds, tuple(notes))
