"""Whether a run's engines are saturated, judged from its own telemetry and config."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from arena.figures import IDLE_S, EngineFigures, Figures
from serving import (
    SPANS_S,
    Bucket,
    EngineFacts,
    SaturationConfig,
    Verdict,
    assess,
    review,
)

_WATCHED = 300
"""Last seconds that a verdict on the present is given from."""

_Rule = Callable[[Sequence[Bucket], EngineFacts, SaturationConfig], Verdict | None]


def verdict_now(figures: Figures, now: float) -> dict[str, Any] | None:
    """The engine that has been saturated the longest at run time `now`, as JSON; None: none is."""

    def last_seconds(engine: EngineFigures) -> Sequence[Bucket]:
        if engine.now is None or now - engine.now.at > IDLE_S:
            return ()  # nothing is in flight any more
        kept = engine.buckets[SPANS_S[0]]
        return list(islice(kept, max(len(kept) - _WATCHED, 0), None))

    return _first(figures, assess, last_seconds)


def verdict_of_run(figures: Figures) -> dict[str, Any] | None:
    """The first engine that was saturated in the run so far, as JSON; None: none was."""
    return _first(figures, review, whole_run)


def saturated_engines(figures: Figures) -> set[str]:
    """Names of the engines that were saturated in the run so far."""
    config = _config(figures)
    return {
        name
        for name, engine in figures.engines.items()
        if review(whole_run(engine), _facts(figures, engine), config) is not None
    }


def whole_run(engine: EngineFigures) -> Sequence[Bucket]:
    """The finest telemetry that still reaches back to the run's beginning."""
    coarsest = engine.buckets[SPANS_S[-1]]
    for span_s in SPANS_S:
        kept = engine.buckets[span_s]
        # what is dropped goes by age; the coarsest bucket began with the finest one in it
        if kept and coarsest and kept[0].at < coarsest[0].at + span_s:
            return list(kept)
    return list(coarsest)


def _first(
    figures: Figures, rule: _Rule, buckets: Callable[[EngineFigures], Sequence[Bucket]]
) -> dict[str, Any] | None:
    config = _config(figures)
    verdicts = [
        verdict
        for engine in figures.engines.values()
        if (verdict := rule(buckets(engine), _facts(figures, engine), config)) is not None
    ]
    return asdict(min(verdicts, key=lambda verdict: verdict.since_s)) if verdicts else None


def _config(figures: Figures) -> SaturationConfig:
    known = figures.config.get("saturation", {})
    return SaturationConfig(**{k: known[k] for k in SaturationConfig.model_fields if k in known})


def _facts(figures: Figures, engine: EngineFigures) -> EngineFacts:
    settings, hosted = engine.settings, engine.hosted
    askers = [agent for agent in figures.config["agents"] if agent.get("engine") == engine.name]
    tokens = engine.all_tokens()
    return EngineFacts(
        name=engine.name,
        kind=settings["kind"],
        max_concurrent=settings["max_concurrent"],
        max_queued=settings["max_queued"],
        context_tokens=hosted["context_tokens"],
        kv_dtype=hosted.get("kv_dtype"),
        prompt_tokens_per_move=tokens.prompt_per_move,
        uncached_tokens_per_move=tokens.uncached_per_move,
        output_tokens_per_move=tokens.output_per_move,
        block_tokens=hosted.get("block_tokens"),
        is_constrained=all(agent.get("mode") == "constrained" for agent in askers),
        parallel_matches=figures.config["tournament"]["parallel_matches"],
        has_replicas=engine.is_replicated,
    )
