"""What a plan suggests, warns of and advises, from its own numbers. Pure."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from arena.plan_workload import Workload
from serving.capacity import HYBRID_BLOCK_TOKENS, Model, round_up
from serving.kv_pool import Pool

Goal = Literal["latency", "throughput"]

ALONE = 2
"""Requests at once up to which each is answered about as soon as one alone."""
LARGEST_BATCH = 1024
"""vLLM's own most, on its largest GPUs."""
QUEUE_SAFETY = 0.6
"""Share of what a device can do in time that may wait, for its speed drifts."""
_FEW, _LEISURELY_PER_S = 8, 2.0
"""Requests in an engine at a time, and a second, that a few people make at leisure."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Knobs of `[engines.NAME]`."""

    max_concurrent: int
    context_tokens: int
    max_queued: int
    kv_cache_bytes: int | None = None
    """Where the engine would else make another cache of the knobs above than was planned."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a plan. None: unknown."""

    fit: int
    """Sequences that the KV cache holds, of the workload's length and sharing."""
    unshared: int
    """The same where each keeps all of its own."""
    ridge: int | None
    """The batch from which on arithmetic binds, and more of it adds nothing."""
    rate: Callable[[int], float] | None
    """Requests a second while so many are always in the engine."""
    slo_s: float


def length_unit(pool: Pool) -> int:
    """Tokens in whole units of which a sequence may be long: a slot is as long as its sequence."""
    return 1 if pool.reuse == "slots" else pool.unit_tokens


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
    elif limits.rate is not None:
        in_time = math.floor(limits.rate(concurrent) * limits.slo_s * QUEUE_SAFETY)
        queued = max(0, in_time - concurrent)
    else:
        queued = concurrent
    context = round_up(workload.context_tokens, length_unit(pool))
    return Suggestion(concurrent, max(64, min(context, model.context_tokens or context)), queued)


def goal_texts(
    goal: Goal, workload: Workload, limits: Limits, suggestion: Suggestion
) -> Iterator[str]:
    """Why the knobs are as suggested."""
    concurrent = suggestion.max_concurrent
    if goal == "latency":
        yield (
            f"latency for one person: at most {concurrent} at once, so that no answer shares its "
            "steps with a crowd"
        )
        if suggestion.max_queued and workload.streams:
            yield (
                f"{workload.streams:,} may ask at once, and {suggestion.max_queued:,} of them wait "
                "for their turn: --goal throughput answers more of them together"
            )
        return
    if concurrent == 1:
        yield (
            "throughput: one request at a time is all that is asked or fits, so there is no batch "
            "to fill"
        )
        return
    yield (
        f"throughput for a fleet: batches of up to {concurrent:,}; each answer takes longer than "
        "one alone, and more are given a second"
    )
    if limits.ridge is not None and concurrent == limits.ridge < limits.fit:
        yield (
            f"memory would hold {limits.fit:,}; from a batch of {limits.ridge} on a step is bound "
            "by arithmetic, and a larger one only makes each wait"
        )


def engine_advice(
    workload: Workload, limits: Limits, suggestion: Suggestion
) -> tuple[tuple[str, ...], str]:
    """Which kinds of engine suit the workload, and why."""
    streams = workload.streams or suggestion.max_concurrent
    demand = _demand_per_s(workload)
    pace = ""
    if demand is not None:
        pace = f", {demand:,.1f} requests a second" if demand >= 0.1 else ", one request at times"
    if streams <= ALONE:
        return ("ollama", "lmstudio"), (
            f"up to {streams} at once{pace}: one household, where easy set-up counts and there is "
            "no batch to fill"
        )
    if demand is not None and demand <= _LEISURELY_PER_S and _busy(streams, demand, limits) <= _FEW:
        return ("llama_server",), (
            f"{streams:,} ask{pace}: people at leisure; {_slots(streams, limits)} "
            f"{workload.context_tokens:,} tokens ready"
        )
    why = (
        f"up to {streams:,} at once{pace}: real traffic, which batches that fill by themselves "
        "carry"
    )
    if workload.shared_tokens:
        kept = min(streams, suggestion.max_concurrent)
        why += (
            f"; {workload.shared_tokens:,} shared tokens are kept and computed once, where slots "
            f"would hold them {kept:,} times ({kept * workload.shared_tokens:,} tokens)"
        )
    return ("vllm", "sglang"), why


def _slots(streams: int, limits: Limits) -> str:
    if streams <= limits.unshared:
        return "a slot each keeps"
    return f"they take turns at the {limits.unshared:,} slots that fit, which keep"


def _busy(streams: int, demand: float, limits: Limits) -> int:
    """The least batch that answers what is asked a second (Little's law); all that may ask at once
    where none does. 0: how fast it computes is not known."""
    if limits.rate is None:
        return 0
    batches = range(1, min(streams, _FEW) + 1)
    return next((batch for batch in batches if limits.rate(batch) >= demand), streams)


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
    if pool.shares_prefix and 0 < shared < unit:
        remedy = "" if model.shape.is_hybrid else "; choose a smaller block_tokens"
        yield (
            f"prefix caching cannot work: only whole blocks are reused, and one of {unit:,} tokens "
            f"is longer than the shared prefix of {shared:,}{remedy}"
        )
    if model.shape.is_hybrid and pool.shares_prefix:
        least = HYBRID_BLOCK_TOKENS
        planned = "its log tells the size" if unit >= least else f"--unit-tokens {least} plans them"
        yield (
            f"hybrid attention: vLLM makes blocks of {least} tokens or more to match the layers "
            f"that keep a state, and reuses no shorter prefix; {planned}"
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
