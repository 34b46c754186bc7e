"""What one engine of a config will be asked, in tokens: measured on its own template, no engine
started."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from agents import AgentContext, LlmAgent, LlmConfig, system_prompt
from agents.prompt import lead
from arena import config as configs
from arena import preflight
from arena.config import ConfigError, GameChoice, RunConfig
from serving import (
    PACKAGED_MODEL,
    Engine,
    EngineConfig,
    PromptParts,
    Template,
    TokenPrompt,
    build_engine,
    local_directory,
)
from serving.kv_pool import Pool
from serving.remedies import CONSTRAINED_OUTPUT_TOKENS, MOVE_AND_TAIL_TOKENS


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of an engine. None: not known."""

    context_tokens: int
    """That one sequence may hold, prompt and answer."""
    shared_tokens: int
    """That all sequences begin with alike."""
    uncached_tokens: float
    """Prompt tokens of one request that are computed."""
    output_tokens: float
    streams: int | None
    """Requests at once, at most: one a match."""
    sequences: int | None
    """Kept transcripts: one a match where both of its sides are told the same, else two."""
    agents: int | None
    """Seats, each of which asks once a period."""
    period_s: float
    """Between the questions of one agent; 0: none waits."""
    source: str
    """Where the tokens of a sequence come from, in words."""
    request_source: str
    """Where those of a request and its pace come from."""


def uncached_tokens(pool: Pool, context_tokens: int) -> float:
    """Prompt tokens that a move costs in an append-only layout: the move, the template's tail, and
    half a block where whole blocks are reused; where nothing is, a whole prompt at its longest."""
    if pool.reuse == "none":
        return context_tokens
    return MOVE_AND_TAIL_TOKENS + (pool.unit_tokens / 2 if pool.reuse == "blocks" else 0.0)


def askers_of(config: RunConfig, name: str) -> list[LlmConfig]:
    """The language models that ask an engine; of one that none asks all of them, as `arena compare`
    does. ConfigError where there are none."""
    models = [agent for agent in config.agents if isinstance(agent, LlmConfig)]
    if not models:
        raise ConfigError(f"engines.{name}: no agent is a language model that could ask it")
    return [model for model in models if model.engine == name] or models


def demand_of(config: RunConfig, name: str) -> dict[str, Any]:
    """How much is asked of an engine at once, how often and for what, by fields of Workload."""
    askers = askers_of(config, name)
    matches = min(config.tournament.parallel_matches, config.most_matches)
    both_ask = len(askers) == len(config.agents)
    is_told_alike = len({(asker.mode, asker.persona) for asker in askers}) == 1
    written = [_written(asker) for asker in askers]
    return {
        "streams": matches,
        "sequences": matches * (2 if both_ask and not is_told_alike else 1),
        "agents": matches * (2 if both_ask else 1),
        "period_s": config.pace.move_period_seconds,
        "output_tokens": max(written),
    }


def _written(asker: LlmConfig) -> int:
    """Output tokens of a move, at most."""
    if asker.mode == "free":
        return asker.settings.max_tokens
    thought = asker.settings.think_tokens if asker.mode == "think" else 0
    return thought + CONSTRAINED_OUTPUT_TOKENS


def tokens_of(config: RunConfig, name: str, settings: EngineConfig) -> dict[str, Any]:
    """What the costliest game takes of the context of an engine with these settings, by fields of
    Workload. ConfigError where its model's tokenizer is not on this machine: none is fetched.
    """
    askers = askers_of(config, name)
    _check_is_here(name, settings)
    engine = build_engine(
        name,
        settings,
        log_dir=Path(),
        stall_seconds=config.faults.stall_seconds,
        restart_limit=config.faults.restart_limit,
    )
    context = preflight.agent_context(config)
    plies = config.tournament.max_plies
    try:
        needs = {
            choice: max(_need(asker, engine, context, choice, plies) for asker in askers)
            for choice in config.games()
        }
        choice = max(needs, key=needs.__getitem__)
        shared = _shared_tokens(engine.template, config, choice, askers)
    except ValueError as error:
        raise ConfigError(
            f"engines.{name}: what it is asked cannot be counted ({error}): give --context-tokens "
            "and --shared-tokens"
        ) from None
    return {
        "context_tokens": min(needs[choice], engine.limits.context_tokens),
        "shared_tokens": shared,
        "source": f"{choice.name} of the config, counted on the model's own template",
    }


def _check_is_here(name: str, settings: EngineConfig) -> None:
    """Nothing is downloaded for a plan; a GGUF file that is here may be converted."""
    model = getattr(settings, "model", None)
    if model is None or ":" in settings.kind:
        return
    is_gguf = model == PACKAGED_MODEL or model.endswith(".gguf")
    if not is_gguf and local_directory(model) is None:
        raise ConfigError(
            f"engines.{name}: the tokenizer of {model!r} is not on this machine, so what is "
            "asked of it cannot be counted: give --context-tokens and --shared-tokens"
        )


def _need(
    asker: LlmConfig, engine: Engine, context: AgentContext, choice: GameChoice, plies: int | None
) -> int:
    """Tokens of the longest game; without a cap of plies a game fills the context."""
    agent = LlmAgent(asker.name, engine, context, asker.settings)
    need = agent.context_need(choice.name, choice.ruleset)
    return need.context_tokens if plies is None else need.tokens(plies)


def _shared_tokens(
    template: Template, config: RunConfig, choice: GameChoice, askers: Sequence[LlmConfig]
) -> int:
    """What prompts of all agents begin with alike, from any start."""
    game, ruleset = choice.game, choice.ruleset
    section = config.prompts.get(game.name)
    system = (section.system if section else None) or system_prompt(game.name, ruleset)
    starts = configs.openings_of(config, game, ruleset)
    usual = game.openings("start", ruleset)[0]
    fens = {None if start.fen == usual.fen else start.fen for start in starts}
    prompts = [
        template.render(
            PromptParts(
                system, asker.persona, lead(asker.mode, fen, config.tournament.concessions), moves
            )
        )
        for asker in askers
        for fen in fens
        for moves in ((), (game.longest_move,))
    ]
    ids = [prompt.ids for prompt in prompts if isinstance(prompt, TokenPrompt)]
    if not ids:
        raise ValueError("the server takes chat messages, whose tokens only it counts")
    first, last = min(map(list, ids)), max(map(list, ids))
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return sum(1 for _ in alike)
