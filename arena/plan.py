"""`arena plan`: what fits, what binds first and what it costs, before anything starts.

Gathers what is known of a model, a device, a config and past runs, and lays the arithmetic of
`serving.capacity` and `serving.cost` on it. An estimate is called one.
"""

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from arena import config as configs
from arena.config import ConfigError, RunConfig
from arena.plan_advice import (
    LARGEST_BATCH,
    Goal,
    Limits,
    Suggestion,
    engine_advice,
    goal_texts,
    length_unit,
    suggest,
    warnings,
)
from arena.plan_cost import CostAsk, rent_or_buy
from arena.plan_speed import Estimate, Speed, measured
from arena.plan_workload import Workload, demand_of, tokens_of, uncached_tokens
from serving import EngineConfig, EngineConfigError
from serving.capacity import (
    BITS,
    DEVICES,
    MOST_BYTES,
    MOST_TOKENS,
    Device,
    Model,
    Roofline,
    agents_in_time,
    dtype_of,
    fitting,
    plain_shape,
    roofline_of,
    weights_bytes,
)
from serving.kv_pool import Memory, Pool, PoolAsk, loaded_dtype, pool_of
from serving.model_facts import facts_of
from serving.remedies import CONSTRAINED_OUTPUT_TOKENS
from serving.sglang import SglangConfig
from serving.vllm_config import VllmConfig
from serving.vllm_server import VllmServerConfig

SCHEMA_VERSION = 1
RESERVE_BYTES = 2 << 30
"""Of a device's memory, for its runtime and for activations: assumed."""
DEFAULT_CONTEXT = 4096
"""Tokens of a sequence where neither a config nor the command line says it."""
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
UNITS = (1, 16, 32, 64, 128, 256, 1024)
KV_DTYPES = ("fp32", "fp16", "bf16", "fp8", "q8", "q4")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Prompting:
    """What the command line says of the work; None: the config's, or not known."""

    context_tokens: int | None = None
    shared_tokens: int | None = None
    uncached_tokens: float | None = None
    output_tokens: float | None = None
    agents: int | None = None
    period_s: float | None = None


@dataclass(frozen=True, slots=True)
class ModelAsk:
    """The model as the command line gives it."""

    name: str | None = None
    layers: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    parameters: float | None = None
    active_parameters: float | None = None
    weights_dtype: str | None = None
    weights_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceAsk:
    """The device as the command line gives it."""

    name: str | None = None
    memory_bytes: int | None = None
    memory_fraction: float | None = None
    reserve_bytes: int | None = None
    tflops: float | None = None
    gbytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class PlanAsk:
    """All that `arena plan` is asked."""

    config: RunConfig | None = None
    engine: str | None = None
    model: ModelAsk = ModelAsk()
    device: DeviceAsk = DeviceAsk()
    prompting: Prompting = Prompting()
    cost: CostAsk = field(default_factory=CostAsk)
    kv_dtype: str | None = None
    unit_tokens: int | None = None
    bench: Path | None = None
    goal: Goal = "throughput"


def ask_of(config: RunConfig | None, parsed: argparse.Namespace) -> PlanAsk:
    """What the command line asks; ConfigError for a size that is none."""

    def size(option: str) -> int | None:
        text = getattr(parsed, option.removeprefix("--").replace("-", "_"))
        return None if text is None else configs.byte_size(option, text)

    cost = CostAsk()
    return PlanAsk(
        config,
        parsed.engine,
        ModelAsk(
            parsed.model,
            parsed.layers,
            parsed.kv_heads,
            parsed.head_size,
            parsed.parameters,
            parsed.active_parameters,
            parsed.weights,
            size("--weights-bytes"),
        ),
        DeviceAsk(
            parsed.device,
            size("--memory"),
            parsed.memory_fraction,
            size("--reserve"),
            parsed.tflops,
            parsed.bandwidth,
        ),
        Prompting(
            parsed.context_tokens,
            parsed.shared_tokens,
            parsed.uncached_tokens,
            parsed.output_tokens,
            parsed.agents,
            parsed.period,
        ),
        CostAsk(
            cost.price if parsed.price is None else parsed.price,
            cost.rents if parsed.rent is None else tuple(parsed.rent),
            cost.running_per_hour if parsed.running is None else parsed.running,
            parsed.hours_per_week,
            parsed.runs,
        ),
        parsed.kv_dtype,
        parsed.unit_tokens,
        parsed.bench,
        parsed.goal,
    )


def build(ask: PlanAsk) -> dict[str, Any]:
    """The plan as JSON has it, all its numbers finite. ConfigError or StoreError, one line, where
    it cannot be made."""
    try:
        plan = _build(ask)
    except (EngineConfigError, OverflowError) as error:
        raise ConfigError(str(error)) from None
    endless = next(_endless(plan), None)
    if endless is not None:
        raise ConfigError(f"{endless}: is beyond all measure with these numbers; check them")
    return plan


def _endless(told: object, name: str = "plan") -> Iterator[str]:
    """Names of numbers that JSON has no word for."""
    if isinstance(told, dict):
        for key, value in told.items():
            yield from _endless(value, key)
    elif isinstance(told, list | tuple):
        for value in told:
            yield from _endless(value, name)
    elif isinstance(told, float) and not math.isfinite(told):
        yield name


@dataclass(frozen=True, slots=True)
class _Known:
    """What a plan is made from."""

    engine: str | None
    settings: EngineConfig | None
    """Of the engine, with what the command line says instead."""
    model: Model
    memory: Memory | None
    devices: int
    device: Device | None
    pool: Pool
    workload: Workload


def _build(ask: PlanAsk) -> dict[str, Any]:
    _check_numbers(ask)
    known = _known(ask)
    model, pool, workload = known.model, known.pool, known.workload
    per_token = model.shape.bytes_per_token(pool.kv_dtype)
    shared, unshared = _fit(known), _fit(known, is_alone=True)
    if max(shared, unshared) < 1:
        raise ConfigError(
            f"memory: a KV cache of {pool.kv_bytes / 2**30:.2f} GiB holds no sequence of "
            f"{workload.context_tokens:,} tokens at {per_token:,} bytes each: give more --memory, "
            "fewer --context-tokens, or a smaller --kv-dtype"
        )
    roof = None
    if known.device is not None:
        roof = roofline_of(model, per_token, known.device, pool.copies)
    speed = _speed(ask, model, workload, roof)
    compute = _compute(speed, workload, shared)
    limits = Limits(
        shared,
        unshared,
        None if roof is None else roof.ridge(workload.context_tokens),
        None if speed is None else speed.rate,
        ask.config.slo.move_seconds if ask.config else 1.0,
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "name": ask.config.name if ask.config else model.name,
        "engine": known.engine,
        "goal": ask.goal,
        "model": _model_data(model),
        **_sizes(model, pool),
        "memory": _memory_data(known),
        "workload": asdict(workload),
        "agents_fit": {
            "shared": _agents(workload, shared),
            "unshared": _agents(workload, unshared),
        },
        "by_context": _by_context(known),
        "by_unit": _by_unit(known),
        "compute": compute,
        "roofline": _roofline(roof, workload, shared),
        "binding": _binding(workload, shared, compute),
        **_advice(ask, known, limits),
        "warnings": list(warnings(workload, pool, model, shared, compute["agents"])),
        "notes": _notes(ask, known, roof),
        "rent_or_buy": rent_or_buy(ask.cost),
    }


def _known(ask: PlanAsk) -> _Known:
    name = _engine_name(ask)
    settings = None if name is None or ask.config is None else _settings(ask, ask.config, name)
    devices: int = getattr(settings, "tensor_parallel", 1)
    device = _device(ask.device, devices)
    memory = _memory(ask.device, device)
    model = _model(ask.model, settings, memory)
    pool = pool_of(settings, model, PoolAsk(memory, ask.kv_dtype, ask.unit_tokens))
    workload = _workload(ask, name, settings, pool)
    return _Known(name, settings, model, memory, devices, device, pool, workload)


def _settings(ask: PlanAsk, config: RunConfig, name: str) -> EngineConfig:
    """An engine's, with the model and the device that the command line names instead."""
    settings = config.engine(name).computing
    told: dict[str, Any] = {}
    if ask.model.name is not None and hasattr(settings, "model"):
        told["model"] = ask.model.name
    if ask.device.name is not None and hasattr(settings, "device"):
        told["device"] = "cuda"  # as all that are known by name
    return settings.model_copy(update=told)


def _advice(ask: PlanAsk, known: _Known, limits: Limits) -> dict[str, Any]:
    suggestion = suggest(ask.goal, known.workload, limits, known.model, known.pool)
    texts = list(goal_texts(ask.goal, known.workload, limits, suggestion))
    pasted = _pasted_pool(ask, known, suggestion)
    if pasted.kv_bytes != known.pool.kv_bytes:
        if hasattr(known.settings, "kv_cache_bytes"):
            size = int(known.pool.kv_bytes * known.pool.copies) // known.devices
            suggestion = replace(suggestion, kv_cache_bytes=size)
        else:
            texts.append(f"with these knobs the cache holds {pasted.tokens:,} tokens, in slots")
    knobs = {key: value for key, value in asdict(suggestion).items() if value is not None}
    kinds, reason = engine_advice(known.workload, limits, suggestion)
    return {
        "suggest": knobs,
        "toml": configs.engine_fragment(ask.config, known.engine, knobs),
        "goal_advice": texts,
        "engine_advice": {"kinds": list(kinds), "reason": reason},
    }


def _pasted_pool(ask: PlanAsk, known: _Known, suggestion: Suggestion) -> Pool:
    """The cache that the engine would make of the suggested knobs alone."""
    if known.settings is None:
        return known.pool
    knobs = {
        "max_concurrent": suggestion.max_concurrent,
        "context_tokens": suggestion.context_tokens,
    }
    pasted = known.settings.model_copy(update=knobs)
    return pool_of(pasted, known.model, PoolAsk(known.memory, ask.kv_dtype, ask.unit_tokens))


def _notes(ask: PlanAsk, known: _Known, roof: Roofline | None) -> list[str]:
    notes = list(known.model.notes)
    config = None if known.engine is None or ask.config is None else ask.config.engine(known.engine)
    if config is not None and config.is_replicated:
        notes.append("all of it is of one replica, and of its share of the agents")
    if known.device is not None and roof is None:
        notes.append("how fast it computes needs the number of its weights: give --parameters")
    return notes


# what is known


_RANGES = (
    ("--layers", "model", "layers", 1, 1 << 20),
    ("--kv-heads", "model", "kv_heads", 1, 1 << 20),
    ("--head-size", "model", "head_size", 1, 1 << 20),
    ("--parameters", "model", "parameters", 1, 1e15),
    ("--active-parameters", "model", "active_parameters", 1, 1e15),
    ("--weights-bytes", "model", "weights_bytes", 1, MOST_BYTES),
    ("--memory", "device", "memory_bytes", 1, MOST_BYTES),
    ("--memory-fraction", "device", "memory_fraction", 0.001, 1),
    ("--reserve", "device", "reserve_bytes", 0, MOST_BYTES),
    ("--tflops", "device", "tflops", 0.001, 1e9),
    ("--bandwidth", "device", "gbytes_per_s", 0.001, 1e9),
    ("--context-tokens", "prompting", "context_tokens", 1, MOST_TOKENS),
    ("--shared-tokens", "prompting", "shared_tokens", 0, MOST_TOKENS),
    ("--uncached-tokens", "prompting", "uncached_tokens", 0, 1e9),
    ("--output-tokens", "prompting", "output_tokens", 1, 1e9),
    ("--agents", "prompting", "agents", 1, 1e12),
    ("--period", "prompting", "period_s", 0, 1e9),
    ("--price", "cost", "price", 0, 1e12),
    ("--running", "cost", "running_per_hour", 0, 1e9),
    ("--hours-per-week", "cost", "hours_per_week", 0.01, 168),
)
"""Option, where its number is kept, the least and the most that it may be."""
_SHORTEST_PERIOD_S = 0.001


def _check_numbers(ask: PlanAsk) -> None:
    numbers: list[tuple[str, float | None, float, float]] = [
        (option, getattr(getattr(ask, part), name), least, most)
        for option, part, name, least, most in _RANGES
    ]
    numbers.append(("--unit-tokens", ask.unit_tokens, 1, MOST_TOKENS))
    numbers += [("--rent", rent, 0.0001, 1e9) for rent in ask.cost.rents]
    for option, value, least, most in numbers:
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{option}: is {str(value)[:24]}; give {least:.10g} to {most:.10g}")
    for option, dtype in (("--kv-dtype", ask.kv_dtype), ("--weights", ask.model.weights_dtype)):
        if dtype is not None:
            try:
                dtype_of(dtype)
            except ValueError as error:
                raise ConfigError(f"{option}: {error}") from None


def _engine_name(ask: PlanAsk) -> str | None:
    if ask.config is None:
        if ask.engine is not None:
            raise ConfigError("--engine: names an engine of a config; give the config too")
        return None
    used = ask.config.used_engines()
    if ask.engine is not None:
        ask.config.asked_engine(ask.engine)
        return ask.engine
    if len(used) != 1:
        told = f"these are asked: {', '.join(used)}" if used else "no agent asks one"
        raise ConfigError(f"--engine: is missing, and {told}; name the one to plan for")
    return used[0]


def _model(ask: ModelAsk, settings: EngineConfig | None, memory: Memory | None) -> Model:
    name = ask.name or getattr(settings, "model", None)
    given = (ask.layers, ask.kv_heads, ask.head_size)
    if any(value is not None for value in given):
        if ask.layers is None or ask.kv_heads is None or ask.head_size is None:
            raise ConfigError("--layers, --kv-heads and --head-size: give all three, or none")
        shape = plain_shape(ask.layers, ask.kv_heads, ask.head_size)
        model = Model(name or "given shape", shape, source="the command line")
    elif name is None:
        raise ConfigError(
            "--model: is missing; name one, or give --layers, --kv-heads and --head-size"
        )
    else:
        copies = isinstance(settings, VllmConfig | VllmServerConfig | SglangConfig)
        model = facts_of(name, as_gguf=not copies)
    model = replace(model, notes=tuple(_unanswered(model.notes, ask)))
    return _with_weights(model, ask, settings, memory)


def _unanswered(notes: Iterable[str], ask: ModelAsk) -> Iterator[str]:
    """Notes that ask for no option that is given."""
    given = [
        option
        for option, value in (
            ("--parameters", ask.parameters),
            ("--active-parameters", ask.active_parameters),
            ("--weights", ask.weights_dtype or ask.weights_bytes),
        )
        if value is not None
    ]
    return (note for note in notes if not any(option in note for option in given))


def _with_weights(
    model: Model, ask: ModelAsk, settings: EngineConfig | None, memory: Memory | None
) -> Model:
    """With what the command line says of the weights. What is not quantised an engine keeps in the
    type that it computes in."""
    if ask.parameters is not None:
        model = replace(model, parameters=round(ask.parameters))
    if ask.active_parameters is not None:
        model = replace(model, active_parameters=round(ask.active_parameters))
        if model.parameters is not None and round(ask.active_parameters) > model.parameters:
            raise ConfigError("--active-parameters: is more than there are parameters")
    if ask.weights_bytes is not None:
        return replace(model, weights_bytes=ask.weights_bytes)
    if ask.weights_dtype is not None:
        if model.parameters is None:
            raise ConfigError(
                "--weights: how many weights there are is not known; give --parameters"
            )
        return replace(model, weights_bytes=weights_bytes(model.parameters, ask.weights_dtype))
    loaded = loaded_dtype(settings, model, has_memory=memory is not None)
    if model.parameters is None or (ask.parameters is None and loaded is None):
        return model
    dtype = loaded or model.weights_dtype
    if dtype is None and model.is_quantised:
        if model.weights_bytes is None:
            raise ConfigError("--weights: is missing, and how they are quantised is not known here")
        return model
    dtype = dtype or "fp16"
    return replace(model, weights_bytes=weights_bytes(model.parameters, dtype, model.unquantised))


def _device(ask: DeviceAsk, count: int) -> Device | None:
    """What computes: so many devices as one, as if talking to each other cost nothing. None:
    nothing is known of how fast."""
    known = None
    if ask.name is not None:
        known = DEVICES.get(ask.name.lower())
        if known is None:
            raise ConfigError(
                f"--device: {ask.name!r} is not known; use one of {', '.join(DEVICES)}, or give "
                "--tflops and --bandwidth"
            )
    flops = ask.tflops * 1e12 if ask.tflops is not None else known.flops if known else None
    moved = known.bytes_per_s if known else None
    if ask.gbytes_per_s is not None:
        moved = ask.gbytes_per_s * 1e9
    if flops is None and moved is None:
        return None
    if flops is None or moved is None:
        raise ConfigError("--tflops and --bandwidth: give both, of the device's data sheet")
    name = known.name if known else "given device"
    return Device(
        name if count == 1 else f"{count} of {name}",
        count * flops,
        count * moved,
        known.memory_bytes if known else None,
    )


def _memory(ask: DeviceAsk, device: Device | None) -> Memory | None:
    total = ask.memory_bytes or (device.memory_bytes if device else None)
    if total is None:
        return None
    reserve = RESERVE_BYTES if ask.reserve_bytes is None else ask.reserve_bytes
    return Memory(total, reserve, ask.memory_fraction)


def _workload(
    ask: PlanAsk, name: str | None, settings: EngineConfig | None, pool: Pool
) -> Workload:
    """The config's, with what the command line says instead."""
    said = {key: value for key, value in asdict(ask.prompting).items() if value is not None}
    told: dict[str, Any] = {"source": "the command line and defaults"}
    if ask.config is not None and name is not None and settings is not None:
        told |= demand_of(ask.config, name)
        if "context_tokens" not in said:
            told |= tokens_of(ask.config, name, settings)
            if "shared_tokens" in said:
                told["source"] += ", and --shared-tokens"
    told |= said
    if "agents" in said:
        told |= {"streams": said["agents"], "sequences": said["agents"]}
    workload = replace(
        Workload(
            context_tokens=DEFAULT_CONTEXT,
            shared_tokens=0,
            uncached_tokens=uncached_tokens(pool, told.get("context_tokens", DEFAULT_CONTEXT)),
            output_tokens=CONSTRAINED_OUTPUT_TOKENS,
            streams=None,
            sequences=None,
            agents=None,
            period_s=1.0,
            source="",
            request_source=_request_source(said, has_config=ask.config is not None),
        ),
        **told,
    )
    if workload.shared_tokens >= workload.context_tokens:
        raise ConfigError(
            f"--shared-tokens: {workload.shared_tokens:,} leave nothing of its own to a sequence "
            f"of {workload.context_tokens:,} tokens; give fewer, or more --context-tokens"
        )
    if 0 < workload.period_s < _SHORTEST_PERIOD_S:
        raise ConfigError(
            f"--period: is {workload.period_s:.10g}; give {_SHORTEST_PERIOD_S} or more, or 0 for "
            "agents that have no pace"
        )
    return workload


def _request_source(said: dict[str, Any], *, has_config: bool) -> str:
    """Where the tokens and the pace of a request come from; a move's are assumed where nothing says
    what is asked."""
    options = ("uncached_tokens", "output_tokens", "period_s")
    unsaid = [name for name in options if name not in said]
    if not unsaid:
        return "the command line"
    if has_config:
        also = "" if len(unsaid) == len(options) else ", and the command line"
        return f"a move of the config's games{also}"
    flags = {name: f"--{name.removesuffix('_s').replace('_', '-')}" for name in unsaid}
    return f"assumed, as of a chess move: give {', '.join(flags.values())}"


# what fits


def _fit(
    known: _Known,
    *,
    tokens: int | None = None,
    unit: int | None = None,
    is_alone: bool = False,
) -> int:
    """Sequences that fit, of the workload where nothing else is said. `is_alone`: none shares."""
    pool, shape, work = known.pool, known.model.shape, known.workload
    unit = unit or pool.unit_tokens
    length = tokens or work.context_tokens
    once = 0 if is_alone or not pool.shares_prefix else work.shared_tokens
    unusable = pool.unusable_units * unit * shape.bytes_per_token(pool.kv_dtype)
    usable = max(0, pool.kv_bytes - unusable)
    return fitting(usable, shape, length, min(once, length), unit, pool.kv_dtype)


def _agents(workload: Workload, transcripts: int) -> int:
    """Whose so many transcripts are: two agents' each where both sides of a match are told the
    same."""
    if not (workload.agents and workload.sequences):
        return transcripts
    return transcripts * workload.agents // workload.sequences


def _by_context(known: _Known) -> list[dict[str, int | None]]:
    """Agents by the tokens that each holds; None: no more than what they share."""
    most = known.model.context_tokens or CONTEXTS[-1]
    unit, once = length_unit(known.pool), known.workload.shared_tokens
    return [
        {
            "context_tokens": tokens,
            "shared": None
            if tokens <= once
            else _agents(known.workload, _fit(known, tokens=tokens, unit=unit)),
            "unshared": _agents(
                known.workload, _fit(known, tokens=tokens, unit=unit, is_alone=True)
            ),
        }
        for tokens in sorted({*(n for n in CONTEXTS if n <= most), known.workload.context_tokens})
    ]


def _by_unit(known: _Known) -> list[dict[str, int]]:
    """Agents by the unit of allocation; the last reserves the longest sequence at once."""
    longest = max(known.model.context_tokens or 0, known.workload.context_tokens)
    return [
        {
            "unit_tokens": unit,
            "shared": _agents(known.workload, _fit(known, unit=unit)),
            "unshared": _agents(known.workload, _fit(known, unit=unit, is_alone=True)),
        }
        for unit in sorted({*UNITS, known.pool.unit_tokens, longest})
    ]


# how fast


def _speed(ask: PlanAsk, model: Model, workload: Workload, roof: Roofline | None) -> Speed | None:
    """Measured by `arena bench shape`, else estimated; None: nothing is known."""
    if ask.bench is not None:
        return measured(ask.bench, model.name)
    return None if roof is None else Estimate(roof, workload)


def _compute(speed: Speed | None, workload: Workload, fit: int) -> dict[str, Any]:
    """Requests a second of the fullest batches that fit."""
    batch = max(1, min(fit, LARGEST_BATCH))
    rate = None if speed is None else speed.rate(batch)
    return {
        "source": None if speed is None else speed.source,
        "requests_per_s": rate,
        "agents": None if rate is None else agents_in_time(rate, workload.period_s),
        "assumptions": [] if speed is None else speed.assumptions(batch),
    }


def _roofline(roof: Roofline | None, workload: Workload, fit: int) -> dict[str, Any] | None:
    """Decode steps by batch."""
    if roof is None:
        return None
    context = workload.context_tokens
    ridge = roof.ridge(context)
    batches = sorted({*BATCHES, *([fit] if 0 < fit <= 4 * BATCHES[-1] else [])})
    return {
        "device": roof.device.name,
        "ridge_batch": ridge,
        "steps": [
            {
                "batch": batch,
                "step_ms": 1000 * (step := roof.step_s(batch, context)),
                "tokens_per_s": batch / step,
                "stream_tokens_per_s": 1 / step,
                "bound": "memory" if roof.is_memory_bound(batch, context) else "compute",
                "fits": batch <= fit,
            }
            for batch in batches
        ],
    }


def _binding(workload: Workload, fit: int, compute: dict[str, Any]) -> str | None:
    """What runs out first as agents are added: "kv" or "compute"; None: not known. Agents without
    a pace never ask for more than is computed."""
    if compute["requests_per_s"] is None:
        return None
    in_time = compute["agents"]
    return "kv" if in_time is None or _agents(workload, fit) <= in_time else "compute"


# what it is told with


def _model_data(model: Model) -> dict[str, Any]:
    shape = model.shape
    return {
        "name": model.name,
        "source": model.source,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "context_tokens": model.context_tokens,
        "window_tokens": shape.window_tokens or None,
        "is_latent": shape.is_latent,
        "is_hybrid": shape.is_hybrid,
    }


def _sizes(model: Model, pool: Pool) -> dict[str, Any]:
    """Of a cached token and of the weights, as they are and by type."""
    by_dtype = None
    if model.parameters is not None:
        by_dtype = {dtype: weights_bytes(model.parameters, dtype) for dtype in BITS}
    return {
        "kv_dtype": pool.kv_dtype,
        "kv_bytes_per_token": model.shape.bytes_per_token(pool.kv_dtype),
        "kv_bytes_by_dtype": {dtype: model.shape.bytes_per_token(dtype) for dtype in KV_DTYPES},
        "weights_bytes": model.weights_bytes,
        "weights_bytes_by_dtype": by_dtype,
    }


def _memory_data(known: _Known) -> dict[str, Any]:
    """Of all devices together."""
    memory, pool = known.memory, known.pool
    return {
        "total_bytes": None if memory is None else memory.total_bytes * known.devices,
        "reserve_bytes": None if memory is None else memory.reserve_bytes * known.devices,
        "kv_bytes": pool.kv_bytes,
        "kv_copies": pool.copies,
        "kv_tokens": pool.tokens,
        "unit_tokens": pool.unit_tokens,
        "reuse": pool.reuse,
        "source": pool.source,
    }
