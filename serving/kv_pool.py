"""The KV cache that an engine of a config will make, before it is started.

What each engine does with its knobs is in its own module; here it becomes bytes, tokens and units.
"""

from dataclasses import dataclass, replace
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
from serving.models import ModelShape
from serving.sglang import SglangConfig
from serving.sglang import dtype_of as sglang_dtype
from serving.sglang import pool_tokens as sglang_pool_tokens
from serving.vllm_config import (
    GPU_MEMORY_FRACTION,
    VllmConfig,
    engine_args,
    installed_build,
)
from serving.vllm_config import dtype_of as vllm_dtype
from serving.vllm_server import VllmServerConfig

GPU_BLOCK_TOKENS = 16
"""vLLM's block on a GPU, where none is named."""
SGLANG_MEMORY_FRACTION = 0.85
"""Of a GPU of 80 GB, about what SGLang takes where none is named; of small ones it takes less."""


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
    """Of what is cached, each token counted once."""
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
    copies: float = 1.0
    """Times that its devices keep a token: more than once where they are more than KV heads. They
    hold `copies * kv_bytes` of it."""

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
    dtype = _dtype(ask.kv_dtype or getattr(config, "kv_dtype", None), model)
    unit = ask.unit_tokens or getattr(config, "block_tokens", None) or 1
    return _in_memory(model, ask, dtype, unit)


def loaded_dtype(config: EngineConfig | None, model: Model, *, has_memory: bool) -> str | None:
    """The type, a key of BITS, in which an engine keeps a model's weights that are not quantised:
    it converts them to what it computes in. None: as its files have them.

    `has_memory`: a device's memory is given, as in PoolAsk.
    """
    if model.is_quantised:
        return None
    computed = _computing_dtype(config, has_memory=has_memory)
    return None if computed in (None, "auto") else dtype_of(computed)


def _computing_dtype(config: EngineConfig | None, *, has_memory: bool) -> str | None:
    """As engines spell it; None: the model's own."""
    if isinstance(config, VllmServerConfig):
        config = config.embedded()
    if isinstance(config, VllmConfig):
        return vllm_dtype(config, _vllm_device(config, has_memory=has_memory))
    if isinstance(config, SglangConfig):
        return sglang_dtype(_placed(config, has_memory=has_memory))
    return None


def _vllm_device(config: VllmConfig, *, has_memory: bool) -> Literal["cpu", "cuda"]:
    """What is meant where the config does not say: a given memory is a GPU's."""
    if config.device != "auto":
        return config.device
    build = installed_build()
    return "cuda" if has_memory or build is None else build.device


def _placed(config: SglangConfig, *, has_memory: bool) -> SglangConfig:
    """As above: with its device."""
    is_given = has_memory and config.device == "auto"
    return config.model_copy(update={"device": "cuda"}) if is_given else config


def _dtype(name: str | None, model: Model, computed: str | None = None) -> str:
    """The cache's type: where none is named that which is computed in, else the model's own 16
    bits."""
    if name is None or name == "auto":
        if computed in (None, "auto"):
            return "bf16" if model.weights_dtype == "bf16" else "fp16"
        name = computed
    try:
        return dtype_of(name)
    except ValueError as error:
        raise EngineConfigError(f"kv_dtype: {error}; or name another by --kv-dtype") from None


def _reuse(prefix_cache: bool) -> Literal["blocks", "none"]:
    return "blocks" if prefix_cache else "none"


def _in_memory(
    model: Model,
    ask: PoolAsk,
    dtype: str,
    unit: int,
    fraction: float = 1.0,
    *,
    devices: int = 1,
    is_reserve_inside: bool = True,
) -> Pool:
    """What devices have left beside weights and reserve. `is_reserve_inside`: the share that the
    engine takes is for the reserve too, and not for weights and cache alone."""
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
    given = int(memory.total_bytes * fraction)
    reserve = memory.reserve_bytes
    if not is_reserve_inside:
        reserve = max(0, reserve - (memory.total_bytes - given))
    given, reserve = given * devices, reserve * devices
    left = given - model.weights_bytes - reserve
    if left <= 0:
        raise EngineConfigError(
            f"--memory: {given / 2**30:.2f} GiB for the engine do not hold the weights "
            f"({model.weights_bytes / 2**30:.2f} GiB) and a reserve of "
            f"{reserve / 2**30:.2f} GiB: give more, or smaller weights by --weights"
        )
    less = "weights and reserve" if reserve else "weights"
    source = f"{fraction:.0%} of the memory, less {less}"
    copies = model.shape.copies(devices)
    size = int(left / copies)
    tokens = pool_tokens(size, model.shape, unit, dtype)
    return Pool(size, tokens, unit, dtype, "blocks", 0, source, float(copies))


def _check_memory(size: int, model: Model, ask: PoolAsk, devices: int = 1) -> None:
    """Raises EngineConfigError where a cache of a size that the config gives has no room."""
    if ask.memory is None:
        return
    total = ask.memory.total_bytes * devices
    weights = model.weights_bytes or 0
    if size + weights > total:
        raise EngineConfigError(
            f"--memory: {total / 2**30:.2f} GiB do not hold the KV cache that the config asks for "
            f"({size / 2**30:.2f} GiB) beside the weights ({weights / 2**30:.2f} GiB): lower "
            "kv_cache_bytes, or max_concurrent or context_tokens where it is not given"
        )


def _check_parts(model: Model, devices: int) -> None:
    """Raises EngineConfigError where tensor parallelism cannot part the heads, as vLLM does."""
    heads, kv_heads = model.attention_heads, model.shape.kv_heads
    if heads and heads % devices:
        raise EngineConfigError(
            f"tensor_parallel = {devices} does not divide the {heads} attention heads of model "
            f"{model.name!r}: give one that does"
        )
    if kv_heads and kv_heads % devices and devices % kv_heads:
        raise EngineConfigError(
            f"tensor_parallel = {devices} is neither a part nor a multiple of the {kv_heads} KV "
            f"heads of model {model.name!r}: give one that is"
        )


def _vllm(config: VllmConfig, model: Model, ask: PoolAsk) -> Pool:
    devices = config.tensor_parallel
    _check_parts(model, devices)
    device = _vllm_device(config, has_memory=ask.memory is not None)
    shape = ModelShape(model.context_tokens, model.shape.bytes_per_token())
    arguments: dict[str, Any] = engine_args(config, config.model, device, shape)
    dtype = _dtype(ask.kv_dtype or config.kv_dtype, model, arguments.get("dtype"))
    unit = ask.unit_tokens or arguments.get("block_size") or GPU_BLOCK_TOKENS
    if model.shape.is_hybrid:
        unit = max(unit, HYBRID_BLOCK_TOKENS)
    size = arguments.get("kv_cache_memory_bytes")
    if size is None:
        fraction = config.memory_fraction or GPU_MEMORY_FRACTION
        pool = _in_memory(model, ask, dtype, unit, fraction, devices=devices)
    else:
        _check_memory(size * devices, model, ask, devices)
        copies = model.shape.copies(devices)
        source = "kv_cache_bytes" if config.kv_cache_bytes else "max_concurrent and context_tokens"
        once = int(size * devices / copies)
        pool = Pool(once, 0, unit, dtype, "blocks", 0, source, float(copies))
    tokens = vllm_tokens(pool.kv_bytes, model.shape, unit, config.context_tokens, dtype)
    return replace(pool, tokens=tokens, reuse=_reuse(config.prefix_cache), unusable_units=1)


def _llama(config: LlamaServerConfig, model: Model, ask: PoolAsk) -> Pool:
    """A slot is a sequence and its unit at once; slots share nothing."""
    dtype, unit = _dtype(ask.kv_dtype or config.kv_dtype or "fp16", model), config.slot_tokens
    if ask.memory is not None:
        return replace(_in_memory(model, ask, dtype, unit), reuse="slots")
    size = config.slots * model.shape.sequence_bytes(unit, unit, dtype)
    source = "max_concurrent slots of context_tokens"
    return Pool(size, config.slots * unit, unit, dtype, "slots", 0, source)


def _sglang(config: SglangConfig, model: Model, ask: PoolAsk) -> Pool:
    config = _placed(config, has_memory=ask.memory is not None)
    dtype = _dtype(ask.kv_dtype or config.kv_dtype, model, sglang_dtype(config))
    unit = ask.unit_tokens or config.block_tokens or 1
    shape = ModelShape(model.context_tokens, model.shape.bytes_per_token())
    told = sglang_pool_tokens(config, shape)
    if told is None:
        fraction = config.memory_fraction or SGLANG_MEMORY_FRACTION
        pool = _in_memory(model, ask, dtype, unit, fraction, is_reserve_inside=False)
    else:
        tokens = told // unit * unit
        size = tokens * model.shape.bytes_per_token(dtype)
        _check_memory(size, model, ask)
        source = "kv_cache_bytes" if config.kv_cache_bytes else "max_concurrent and context_tokens"
        pool = Pool(size, tokens, unit, dtype, "blocks", 0, source)
    return replace(pool, reuse=_reuse(config.prefix_cache))
