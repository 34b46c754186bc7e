"""The KV cache that an engine of a config will make, before it is started.

What each engine does with its knobs is in its own module; here it becomes bytes, tokens and units.
"""

from dataclasses import dataclass
from typing import Any, Literal

from serving.capacity import (
    HYBRID_BLOCK_TOKENS,
    Model,
    dtype_of,
    pool_tokens,
    vllm_tokens,
)
from serving.config import EngineConfig, EngineConfigError
from serving.llama_server import LlamaServerConfig
from serving.models import ModelShape, is_float32
from serving.sglang import SglangConfig
from serving.sglang import dtype_of as sglang_dtype
from serving.sglang import pool_tokens as sglang_pool_tokens
from serving.vllm_config import (
    GPU_MEMORY_FRACTION,
    VllmConfig,
    engine_args,
    installed_build,
)
from serving.vllm_server import VllmServerConfig

GPU_BLOCK_TOKENS = 16
"""vLLM's block on a GPU, where none is named."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What one device gives to a model and its cache."""

    total_bytes: int
    reserve_bytes: int
    """For neither weights nor cache: the runtime, activations, other programs."""
    fraction: float | None = None
    """Share that the engine may take; None: the engine's own choice."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A KV cache."""

    kv_bytes: int
    tokens: int
    """As the engine itself counts them."""
    unit_tokens: int
    """Tokens are reserved in whole units of so many."""
    kv_dtype: str
    reuse: Literal["blocks", "slots", "none"]
    """What of a prompt need not be computed again: whole blocks, which sequences share; what the
    sequence's own slot holds; nothing."""
    unusable_units: int
    """vLLM's block 0 stands for nothing."""
    source: str
    """What its size follows from, in words."""

    @property
    def shares_prefix(self) -> bool:
        """Whether sequences keep what they begin with alike once."""
        return self.reuse == "blocks"


@dataclass(frozen=True, slots=True)
class PoolAsk:
    """What is said beside the engine's config; None: the engine's own."""

    memory: Memory | None = None
    kv_dtype: str | None = None
    unit_tokens: int | None = None


def pool_of(config: EngineConfig | None, model: Model, ask: PoolAsk) -> Pool:
    """The cache of an engine, or of none in particular.

    Raises EngineConfigError where its size follows from nothing that is known, or where the weights
    leave no room for it.
    """
    if isinstance(config, VllmServerConfig):
        config = config.embedded()
    if isinstance(config, VllmConfig):
        return _vllm(config, model, ask)
    if isinstance(config, LlamaServerConfig):
        return _llama(config, model, ask)
    if isinstance(config, SglangConfig):
        return _sglang(config, model, ask)
    dtype = _dtype(ask.kv_dtype or getattr(config, "kv_dtype", None))
    unit = ask.unit_tokens or getattr(config, "block_tokens", None) or 1
    return _in_memory(model, ask, dtype, unit, 1.0)


def _dtype(name: str | None, weights: str | None = None) -> str:
    """The cache's type: where none is named that of the weights, the model's own 16 bits."""
    if name is None or name == "auto":
        return "fp32" if is_float32(weights) else "fp16"
    try:
        return dtype_of(name)
    except ValueError as error:
        raise EngineConfigError(f"kv_dtype: {error}; or name another by --kv-dtype") from None


def _reuse(prefix_cache: bool) -> Literal["blocks", "none"]:
    return "blocks" if prefix_cache else "none"


def _in_memory(
    model: Model, ask: PoolAsk, dtype: str, unit: int, fraction: float, *, devices: int = 1
) -> Pool:
    """What a device has left beside weights and reserve."""
    memory = ask.memory
    if memory is None:
        raise EngineConfigError(
            "--memory: is missing, and nothing else says how large the KV cache is; give what the "
            "device has, such as 24GiB"
        )
    if model.weights_bytes is None:
        raise EngineConfigError(
            f"model {model.name!r}: how large its weights are is not known: give --parameters and "
            "--weights, or --weights-bytes"
        )
    fraction = memory.fraction or fraction
    given = int(memory.total_bytes * fraction) * devices
    reserve = memory.reserve_bytes * devices
    left = given - model.weights_bytes - reserve
    if left <= 0:
        raise EngineConfigError(
            f"--memory: {given / 2**30:.2f} GiB for the engine do not hold the weights "
            f"({model.weights_bytes / 2**30:.2f} GiB) and a reserve of "
            f"{reserve / 2**30:.2f} GiB: give more, or smaller weights by --weights"
        )
    source = f"{fraction:.0%} of the memory, less weights and reserve"
    return Pool(left, pool_tokens(left, model.shape, unit, dtype), unit, dtype, "blocks", 0, source)


def _vllm(config: VllmConfig, model: Model, ask: PoolAsk) -> Pool:
    build = installed_build()
    device = config.device if config.device != "auto" else build.device if build else "cuda"
    if ask.memory is not None and config.device == "auto":
        device = "cuda"
    shape = ModelShape(model.context_tokens, model.shape.bytes_per_token())
    arguments: dict[str, Any] = engine_args(config, config.model, device, shape)
    dtype = _dtype(ask.kv_dtype or config.kv_dtype, arguments.get("dtype"))
    unit = ask.unit_tokens or arguments.get("block_size") or GPU_BLOCK_TOKENS
    if model.shape.is_hybrid:
        unit = max(unit, HYBRID_BLOCK_TOKENS)
    size = arguments.get("kv_cache_memory_bytes")
    if size is None:
        fraction = config.memory_fraction or GPU_MEMORY_FRACTION
        parted = _in_memory(model, ask, dtype, unit, fraction, devices=config.tensor_parallel)
        size, source = parted.kv_bytes, parted.source
    else:
        size *= config.tensor_parallel
        source = "kv_cache_bytes" if config.kv_cache_bytes else "max_concurrent and context_tokens"
    tokens = vllm_tokens(size, model.shape, unit, config.context_tokens, dtype)
    return Pool(size, tokens, unit, dtype, _reuse(config.prefix_cache), 1, source)


def _llama(config: LlamaServerConfig, model: Model, ask: PoolAsk) -> Pool:
    """A slot is a sequence and its unit at once; slots share nothing."""
    dtype, unit = _dtype(ask.kv_dtype or config.kv_dtype), config.slot_tokens
    if ask.memory is not None:
        found = _in_memory(model, ask, dtype, unit, 1.0)
        return Pool(found.kv_bytes, found.tokens, unit, dtype, "slots", 0, found.source)
    size = config.slots * model.shape.sequence_bytes(unit, unit, dtype)
    source = "max_concurrent slots of context_tokens"
    return Pool(size, config.slots * unit, unit, dtype, "slots", 0, source)


def _sglang(config: SglangConfig, model: Model, ask: PoolAsk) -> Pool:
    dtype = _dtype(ask.kv_dtype or config.kv_dtype, sglang_dtype(config))
    unit = ask.unit_tokens or config.block_tokens or 1
    shape = ModelShape(model.context_tokens, model.shape.bytes_per_token())
    reuse = _reuse(config.prefix_cache)
    told = sglang_pool_tokens(config, shape)
    if told is None or (ask.memory is not None and config.kv_cache_bytes is None):
        found = _in_memory(model, ask, dtype, unit, config.memory_fraction or GPU_MEMORY_FRACTION)
        return Pool(found.kv_bytes, found.tokens, unit, dtype, reuse, 0, found.source)
    tokens = told // unit * unit
    size = tokens * model.shape.bytes_per_token(dtype)
    source = "kv_cache_bytes" if config.kv_cache_bytes else "max_concurrent and context_tokens"
    return Pool(size, tokens, unit, dtype, reuse, 0, source)
