"""What to do about a saturated engine, cheapest first, each with its predicted effect. Pure.

Cost of a move is about its uncached prompt tokens + its output tokens; waits follow Little's law.
Where no honest number is known, the effect is said in words.
"""

import math
from dataclasses import dataclass

CONSTRAINED_OUTPUT_TOKENS = 5
"""Output tokens of a constrained move: 5.0 to 5.3 measured at chess and janggi."""
MOVE_AND_TAIL_TOKENS = 10
"""Prompt tokens that an append-only layout adds for a move: the move and the template's tail. Half
a cache block comes on top, since hits are whole blocks."""
USUAL_BLOCK_TOKENS = 32
"""On a CPU; 16 on a GPU, where an unknown block is so predicted to bring less than it may."""
_EIGHT_BITS = ("fp8", "int8", "nvfp4", "turboquant", "q8", "q4", "q5")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What remedies are computed from. None: unknown."""

    name: str
    kind: str
    max_concurrent: int
    """Of all replicas together, where there are several."""
    max_queued: int
    context_tokens: int
    kv_dtype: str | None
    """As configured; None is the model's own, 16 bits a value."""
    prompt_tokens_per_move: float | None
    uncached_tokens_per_move: float | None
    """Prompt tokens that the prefix cache did not hold."""
    output_tokens_per_move: float | None
    block_tokens: int | None
    """Tokens of a block of the KV cache."""
    is_constrained: bool
    """Every agent of the engine may answer with legal moves only."""
    parallel_matches: int
    has_replicas: bool = False
    """A request is computed by one of several, which share the load."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to do."""

    action: str
    effect: str
    """What it is predicted to change, as a number where an honest one is known."""


@dataclass(frozen=True, slots=True)
class Load:
    """Means over the last window."""

    replies_per_s: float
    in_flight: float
    waiting: float | None
    waiting_max: float | None
    kv_usage: float | None
    """The greatest."""
    offered: int
    rejected: int
    stream_rate: float | None
    """Tokens a second of a stream in a full batch; None where the batch is not full."""
    half_load_rate: float | None
    """The same at half the load."""
    batch: float
    """Requests in flight that may be in the engine: at most `max_concurrent`."""


def remedies(
    signal: str,
    facts: EngineFacts,
    load: Load,
    *,
    kv_pressure: float,
    is_memory: bool,
    is_burst: bool,
) -> tuple[Remedy, ...]:
    """What fits the signal and the facts, cheapest first; never empty.

    `kv_pressure` is the share of the KV cache that counts as full. `is_memory`: the cache is short.
    `is_burst`: the queue empties by itself, so no more capacity is needed.
    """
    is_waiting = signal in ("queueing", "ttft_rising", "rejections")
    candidates = [_cap_context(facts) if is_memory else _mend_layout(facts), _constrain(facts)]
    if is_burst:
        candidates.append(_absorb_bursts(facts, load))
    else:
        candidates += [
            _admit_less(facts, load) if is_waiting else None,
            _resize_batch(signal, facts, load, kv_pressure, is_memory),
            _quantise_cache(facts) if is_memory else None,
            _add_replica() if facts.has_replicas else _add_engine(),
        ]
    return tuple(remedy for remedy in candidates if remedy is not None)


def _cap_context(facts: EngineFacts) -> Remedy:
    prompt, output = facts.prompt_tokens_per_move, facts.output_tokens_per_move
    if prompt is None:
        effect = "each request holds fewer tokens of KV cache; how many it holds is not reported"
    else:
        held = prompt + (output or 0.0)
        effect = (
            f"a request holds about {number(held)} tokens of KV cache now (at most "
            f"{facts.context_tokens}); half of that lets about 2× as many stay in memory"
        )
    return Remedy("cap the context: shorter games (max_plies) or a smaller context_tokens", effect)


def _mend_layout(facts: EngineFacts) -> Remedy | None:
    """Cost per move is about uncached prompt tokens + output tokens. An append-only prompt leaves
    one move, the template's tail and half a block uncached."""
    uncached, output = facts.uncached_tokens_per_move, facts.output_tokens_per_move
    reachable = MOVE_AND_TAIL_TOKENS + (facts.block_tokens or USUAL_BLOCK_TOKENS) / 2
    if uncached is None or uncached < 1.5 * reachable:
        return None
    action = "mend the prompt layout: nothing that changes between moves before the list of moves"
    if facts.prompt_tokens_per_move and uncached >= 0.9 * facts.prompt_tokens_per_move:
        action = "turn the prefix cache on (prefix_cache = true), or " + action
    change = f"uncached prompt {number(uncached)} → about {number(reachable)} tokens a move"
    if output is None:
        return Remedy(action, f"{change}; the moves a second it brings depend on the output")
    return Remedy(action, f"{change}: {_times((uncached + output) / (reachable + output))}")


def _constrain(facts: EngineFacts) -> Remedy | None:
    uncached, output = facts.uncached_tokens_per_move, facts.output_tokens_per_move
    if facts.is_constrained or (output is not None and output < 1.5 * CONSTRAINED_OUTPUT_TOKENS):
        return None
    action = 'constrain the answer to the legal moves (mode = "constrained")'
    if output is None:
        return Remedy(action, f"about {CONSTRAINED_OUTPUT_TOKENS} output tokens a move")
    change = f"output {number(output)} → {CONSTRAINED_OUTPUT_TOKENS} tokens a move"
    if uncached is None:
        return Remedy(action, f"{change}; the prompt tokens computed beside it are not reported")
    factor = (uncached + output) / (uncached + CONSTRAINED_OUTPUT_TOKENS)
    return Remedy(action, f"{change}: {_times(factor)}")


def _absorb_bursts(facts: EngineFacts, load: Load) -> Remedy:
    peak = math.ceil(load.waiting_max or 0)
    if load.rejected or peak > facts.max_queued:
        wanted = max(2 * facts.max_queued, peak, facts.parallel_matches - facts.max_concurrent)
        action = f"let bursts wait: max_queued {facts.max_queued} → {max(wanted, 1)}"
    else:
        action = f"nothing has to change: max_queued = {facts.max_queued} holds the bursts"
    if not peak or not load.replies_per_s:
        return Remedy(action, "the queue empties by itself; no capacity is missing")
    drained = seconds_text(peak / load.replies_per_s)
    return Remedy(action, f"a burst of {peak} waiting is answered in about {drained} by itself")


def _admit_less(facts: EngineFacts, load: Load) -> Remedy | None:
    """Little's law: the wait is what waits over what is answered a second, and falls to nothing
    when no more matches play than the engine holds."""
    matches = facts.parallel_matches
    if matches <= 1:
        return None
    if load.waiting and load.in_flight and load.replies_per_s:
        held = max(load.in_flight - load.waiting, 0.0) / load.in_flight
        wait = seconds_text(load.waiting / load.replies_per_s)
        effect = f"about {wait} less wait for a move at the same {number(load.replies_per_s)}/s"
    elif load.rejected and load.offered:
        held = max(load.offered - load.rejected, 0) / load.offered
        effect = "about as much is asked for as is answered, and next to nothing is refused"
    else:
        return Remedy(
            f"admit less: fewer than {matches} parallel_matches",
            "a shorter wait for each move at about the same moves a second; by how much only a "
            "run shows",
        )
    # one request a match at most: fewer matches than places would leave places empty
    fewer = min(max(round(matches * held), facts.max_concurrent), matches - 1)
    return Remedy(f"admit less: parallel_matches {matches} → {fewer}", effect)


def _resize_batch(
    signal: str, facts: EngineFacts, load: Load, kv_pressure: float, is_memory: bool
) -> Remedy | None:
    if signal == "slow_streams":
        return _halve_batch(facts, load)
    if signal == "preemption":
        return _fit_batch(facts, load, kv_pressure)
    if is_memory or load.kv_usage is None or load.batch < 0.9 * facts.max_concurrent:
        return None
    room = facts.max_concurrent * kv_pressure / max(load.kv_usage, 0.01)
    wider = min(facts.parallel_matches, math.floor(room))
    if wider <= facts.max_concurrent:
        return None
    hosted = ", engine.max_concurrent in step with it" if facts.kind == "ray" else ""
    return Remedy(
        f"a larger batch: max_concurrent {facts.max_concurrent} → {wider}{hosted}, for the KV "
        f"cache is only {percent(load.kv_usage)} full",
        "no request waits for a place in the batch; each step takes longer, by how much only a "
        "run shows",
    )


def _halve_batch(facts: EngineFacts, load: Load) -> Remedy | None:
    """Both rates are the run's own."""
    if load.stream_rate is None or load.half_load_rate is None or load.batch < 2:
        return None
    change = 0.5 * load.half_load_rate / load.stream_rate - 1
    return Remedy(
        f"fewer active sequences: max_concurrent {facts.max_concurrent} → "
        f"{math.floor(load.batch / 2)}",
        f"a stream at {number(load.half_load_rate)} tokens/s instead of "
        f"{number(load.stream_rate)}, and {percent(abs(change))} "
        f"{'more' if change > 0 else 'fewer'} tokens a second in all",
    )


def _fit_batch(facts: EngineFacts, load: Load, kv_pressure: float) -> Remedy | None:
    """As many as leave a tenth of the cache free, if each holds as much as now."""
    if facts.max_concurrent == 1:
        return None
    held = min(max(load.in_flight - (load.waiting or 0.0), 1.0), facts.max_concurrent)
    usage = max(load.kv_usage or 1.0, kv_pressure)
    fewer = max(1, min(math.floor(0.9 * held / usage), facts.max_concurrent - 1))
    action = f"fewer active sequences: max_concurrent {facts.max_concurrent} → {fewer}"
    effect = "about a tenth of the KV cache stays free, and no sequence is computed twice"
    if facts.kind == "vllm":
        action += ", or extra_args.watermark = 0.05"
        effect += " (the watermark: 1065 → 187 preemptions and 5 % more tokens/s where vLLM's "
        effect += "authors measured it)"
    return Remedy(action, effect)


def _quantise_cache(facts: EngineFacts) -> Remedy | None:
    dtype = (facts.kv_dtype or "").lower()
    if dtype.startswith(_EIGHT_BITS):
        return None
    factor = 4 if dtype in ("float", "float32") else 2
    return Remedy(
        'quantise the KV cache (kv_dtype = "fp8" or another 8-bit type the engine has)',
        f"about {factor}× the tokens in the same memory; check that the moves stay as good",
    )


def _add_engine() -> Remedy:
    return Remedy(
        "add a GPU: a second engine, matches split between the two",
        "up to 2× the moves a second and 2× the KV cache, since matches do not depend on each "
        "other",
    )


def _add_replica() -> Remedy:
    return Remedy(
        "add a GPU: one replica more",
        "up to as many more moves a second, and as much more KV cache, as one replica brings now",
    )


def _times(factor: float) -> str:
    return f"about {number(factor)}× the moves a second"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 or value == round(value) else f"{value:.1f}"


def count_text(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def seconds_text(seconds: float) -> str:
    return f"{number(seconds)} s" if seconds >= 1 else milliseconds(seconds)


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
