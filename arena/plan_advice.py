"""What a plan suggests, warns of and advises, from its own numbers. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from arena.plan_workload import Workload
from serving.capacity import Model, round_up
from serving.kv_pool import Pool

Goal = Literal["latency", "throughput"]

ALONE = 2
"""Requests at once up to which each is answered about as soon as one alone."""
LARGEST_BATCH = 1024
"""vLLM's own most, on its largest GPUs."""
QUEUE_SAFETY = 0.6
"""Share of what a device can do in time that may wait, for its speed drifts."""
_FEW, _LEISURELY_PER_S = 8, 2.0
"""Streams at once, and requests a second, that a few people make at leisure."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Knobs of `[engines.NAME]`."""

    max_concurrent: int
    context_tokens: int
    max_queued: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a plan. None: unknown."""

    fit: int
    """Sequences that the KV cache holds, of the workload's length and sharing."""
    ridge: int | None
    """The batch from which on arithmetic binds, and more of it adds nothing."""
    requests_per_s: float | None
    """Of full batches."""
    slo_s: float


def suggest(goal: Goal, workload: Workload, limits: Limits, model: Model, pool: Pool) -> Suggestion:
    """For one person's latency one or two at once; for a fleet the fullest batch that fits."""
    streams = workload.streams
    if goal == "latency":
        concurrent = min(ALONE, limits.fit, streams or ALONE)
    else:
        bounds = (limits.fit, streams, limits.ridge, LARGEST_BATCH)
        concurrent = min(bound for bound in bounds if bound is not None)
    if streams is not None:
        queued = max(0, streams - concurrent)
    elif limits.requests_per_s is not None:
        in_time = math.floor(limits.requests_per_s * limits.slo_s * QUEUE_SAFETY)
        queued = max(0, in_time - concurrent)
    else:
        queued = concurrent
    unit = 1 if pool.reuse == "slots" else pool.unit_tokens
    context = round_up(workload.context_tokens, unit)
    return Suggestion(concurrent, max(64, min(context, model.context_tokens or context)), queued)


def goal_texts(goal: Goal, suggestion: Suggestion, limits: Limits) -> Iterator[str]:
    """Why the knobs are as suggested."""
    if goal == "latency":
        yield (
            f"latency for one person: at most {suggestion.max_concurrent} at once, so that no "
            "answer shares its steps with a crowd; the device idles most of the time"
        )
        return
    yield (
        f"throughput for a fleet: full batches of {suggestion.max_concurrent}; each answer takes "
        "longer than one alone, and far more are given a second"
    )
    if limits.ridge is not None and suggestion.max_concurrent == limits.ridge < limits.fit:
        yield (
            f"memory would hold {limits.fit:,}; from a batch of {limits.ridge} on a step is bound "
            "by arithmetic, and a larger one only makes each wait"
        )


def engine_advice(goal: Goal, workload: Workload, fit: int) -> tuple[tuple[str, ...], str]:
    """Which kinds of engine suit the workload, and why."""
    streams = workload.streams or (fit if goal == "throughput" else 1)
    rate = _demand_per_s(workload)
    pace = "" if rate is None else f", {rate:,.1f} requests a second"
    if streams <= ALONE:
        return ("ollama", "lmstudio"), (
            f"{streams} at once{pace}: one household, where easy set-up counts and there is no "
            "batch to fill"
        )
    shared = workload.shared_tokens
    if streams <= _FEW and rate is not None and rate <= _LEISURELY_PER_S:
        return ("llama_server",), (
            f"{streams} at once{pace}: a few people at leisure; a slot each keeps "
            f"{workload.context_tokens:,} tokens ready"
        )
    why = f"{streams:,} at once{pace}: real traffic, which batches that fill by themselves carry"
    if shared:
        why += (
            f"; {shared:,} shared tokens are kept and computed once, where slots would hold them "
            f"{streams:,} times ({streams * shared:,} tokens)"
        )
    return ("vllm", "sglang"), why


def _demand_per_s(workload: Workload) -> float | None:
    """What all agents ask a second if every answer comes in time; None: no pace."""
    if workload.agents is None or not workload.period_s:
        return None
    return workload.agents / workload.period_s


def warnings(
    workload: Workload, pool: Pool, model: Model, fit: int, compute_agents: int | None
) -> Iterator[str]:
    """What will not go as the figures suggest."""
    unit, shared = pool.unit_tokens, workload.shared_tokens
    if pool.shares_prefix and unit > 1 and shared and unit >= shared:
        yield (
            f"prefix caching cannot work: only whole blocks are reused, and one of {unit:,} tokens "
            f"is not smaller than the shared prefix of {shared:,}; choose a smaller block_tokens"
        )
    if model.shape.is_hybrid and pool.shares_prefix:
        yield (
            "hybrid attention: vLLM makes blocks of 528 tokens or more to match the layers that "
            "keep a state, so a shorter shared prefix is never reused; its log tells the size"
        )
    if not pool.shares_prefix:
        yield "the cache shares no prefix between sequences: each keeps all of its own"
    if model.context_tokens is not None and workload.context_tokens > model.context_tokens:
        yield (
            f"sequences of {workload.context_tokens:,} tokens are longer than the "
            f"{model.context_tokens:,} that the model was made for"
        )
    if workload.sequences is not None and workload.sequences > fit:
        yield (
            f"{workload.sequences:,} transcripts are asked for and {fit:,} fit: the others lose "
            "their cache between moves and are computed anew"
        )
    if (
        compute_agents is not None
        and workload.agents is not None
        and workload.agents > compute_agents
    ):
        yield (
            f"{workload.agents:,} agents every {workload.period_s:g} s ask for more than is "
            f"computed in time: {compute_agents:,} can be served at that pace"
        )
