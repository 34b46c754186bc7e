"""Settings of a model, as config.json or a GGUF header has them, to what sizes it. Pure.

ValueError, one line with the key, where they lack what is needed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.capacity import BITS, MOST_TOKENS, KvShape, dtype_of, plain_shape

Settings = Mapping[str, Any]

_WINDOWED = "sliding_attention", "chunked_attention"
_ATTENDING = "full_attention", "attention", "hybrid", "*"
"""Kinds of layers by their names in config.json; those of other names keep no tokens."""

_PERIODS = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma3n": 5,
    "cohere2": 4,
    "gpt-oss": 2,
    "gpt_oss": 2,
}
"""The last layer of so many keeps all tokens, the others slide: known by the model's kind alone to
transformers and llama.cpp."""

_UNKNOWN_WINDOW = (
    "a sliding window is named, and which layers use it only the engine knows: all are counted as "
    "keeping every token"
)
_WINDOW = (
    "how many tokens fit beside sliding windows depends on how the engine parts its cache: the "
    "engine's own figure counts"
)
_STATE = (
    "some layers keep a state of fixed size for each sequence, which only the engine can tell: it "
    "is not counted"
)
_OLD_LATENT = "a GGUF file of before 2025-05 has MLA's keys and values kept whole, many times this"


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """What a model keeps, and what of it has to be said."""

    shape: KvShape
    notes: tuple[str, ...] = ()


def context_of(settings: Settings) -> int | None:
    """Tokens that the model was made for; ValueError where they are absurd."""
    context = text_settings(settings).get("max_position_embeddings")
    return None if context is None else _number(context, "max_position_embeddings", MOST_TOKENS)


def text_settings(settings: Settings) -> Settings:
    """Of the language model within a model of several senses."""
    inner = settings.get("text_config", settings)
    return inner if isinstance(inner, Mapping) else settings


def cache_of(settings: Settings) -> CacheFacts:
    """By a config.json."""
    text = text_settings(settings)
    layers = _wanted(text, "num_hidden_layers")
    if text.get("kv_lora_rank"):
        size = _wanted(text, "kv_lora_rank") + _wanted(text, "qk_rope_head_dim")
        return CacheFacts(KvShape(layers * size, is_latent=True))
    heads = _wanted(text, "num_attention_heads")
    kv_heads = _wanted(text, "num_key_value_heads") if text.get("num_key_value_heads") else heads
    if text.get("head_dim"):
        head_size = _wanted(text, "head_dim")
    else:
        head_size = _wanted(text, "hidden_size") // heads
    one = plain_shape(1, kv_heads, head_size).values
    kinds = _kinds(text, layers)
    full = sum(kind in _ATTENDING for kind in kinds)
    windowed = sum(kind in _WINDOWED for kind in kinds)
    window = text.get("sliding_window") or text.get("attention_chunk_size")
    notes = []
    if windowed and not window:
        raise ValueError("sliding_window: is missing, and layer_types names layers that slide")
    if windowed:
        notes.append(_WINDOW)
    elif window and text.get("use_sliding_window") is not False and "layer_types" not in text:
        notes.append(_UNKNOWN_WINDOW)
    is_hybrid = full + windowed < layers or "hybrid" in kinds
    if not full + windowed:
        raise ValueError("no layer of the model attends, so it has no KV cache to plan")
    if is_hybrid:
        notes.append(_STATE)
    shape = KvShape(
        full * one,
        windowed * one,
        _number(window, "sliding_window", MOST_TOKENS) if windowed else 0,
        is_hybrid=is_hybrid,
    )
    return CacheFacts(shape, tuple(notes))


def _kinds(text: Settings, layers: int) -> Sequence[str]:
    """The kind of each layer, by whichever key of config.json tells it."""
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        told = text.get(key)
        if isinstance(told, Sequence) and len(told) >= layers:
            return tuple(str(kind) for kind in told[:layers])
    for key, other in (
        ("full_attention_interval", "linear_attention"),
        ("sliding_window_pattern", "sliding_attention"),
    ):
        if text.get(key):
            return _every(layers, _wanted(text, key), other)
    if text.get("attn_layer_period"):
        period, offset = _wanted(text, "attn_layer_period"), text.get("attn_layer_offset", 0)
        return ["attention" if n % period == offset else "mamba" for n in range(layers)]
    if isinstance(attending := text.get("attn_layer_indices"), Sequence):
        return ["attention" if n in attending else "mamba" for n in range(layers)]
    if text.get("sliding_window") and text.get("model_type") in _PERIODS:
        return _every(layers, _PERIODS[text["model_type"]], "sliding_attention")
    if text.get("model_type") == "mistral" and text.get("sliding_window"):
        return ["sliding_attention"] * layers
    return ["full_attention"] * layers


def _every(layers: int, period: int, other: str) -> list[str]:
    """Layers of which the last of each period attends to everything."""
    return ["full_attention" if n % period == period - 1 else other for n in range(layers)]


def cache_of_gguf(metadata: Settings) -> CacheFacts:
    """By a GGUF header's metadata (keys of llama.cpp's gguf-py/gguf/constants.py)."""
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str):
        raise ValueError("general.architecture: is missing")

    def get(key: str) -> Any:
        return metadata.get(f"{kind}.{key}")

    layers = _number(get("block_count"), f"{kind}.block_count")
    if get("attention.kv_lora_rank"):
        size = _number(get("attention.kv_lora_rank"), "attention.kv_lora_rank")
        size += _number(get("rope.dimension_count"), f"{kind}.rope.dimension_count")
        return CacheFacts(KvShape(layers * size, is_latent=True), (_OLD_LATENT,))
    heads = _per_layer(get("attention.head_count"), layers, f"{kind}.attention.head_count")
    kv_heads = heads
    if get("attention.head_count_kv") is not None:
        name = f"{kind}.attention.head_count_kv"
        kv_heads = _per_layer(get("attention.head_count_kv"), layers, name)
    key_size = get("attention.key_length")
    if key_size is None:
        width = _number(get("embedding_length"), f"{kind}.embedding_length")
        key_size = width // max(heads)
    value_size = get("attention.value_length") or key_size
    size = _number(key_size, "attention.key_length") + _number(value_size, "attention.value_length")
    slides = _sliding(kind, get, layers)
    full = sum(count * size for count, slide in zip(kv_heads, slides, strict=True) if not slide)
    windowed = sum(count * size for count, slide in zip(kv_heads, slides, strict=True) if slide)
    is_hybrid = 0 in kv_heads or get("ssm.state_size") is not None
    window = get("attention.sliding_window")
    notes: list[str] = []
    if windowed:
        notes.append(_WINDOW)
    elif window:
        notes.append(_UNKNOWN_WINDOW)
    if is_hybrid:
        notes.append(_STATE)
    shape = KvShape(full, windowed, window if windowed else 0, is_hybrid=is_hybrid)
    return CacheFacts(shape, tuple(notes))


def _sliding(kind: str, get: Callable[[str], Any], layers: int) -> Sequence[bool]:
    if not get("attention.sliding_window"):
        return [False] * layers
    told = get("attention.sliding_window_pattern")
    if isinstance(told, list) and len(told) == layers:
        return [bool(slides) for slides in told]
    period = told if isinstance(told, int) and told > 0 else _PERIODS.get(kind)
    if period is None:
        return [False] * layers
    return [kind != "full_attention" for kind in _every(layers, period, "sliding_attention")]


def _per_layer(told: object, layers: int, name: str) -> list[int]:
    """A number for all layers, or one for each of them; a layer that does not attend has 0."""
    if isinstance(told, list):
        if len(told) != layers or not all(isinstance(n, int) and 0 <= n < 1 << 20 for n in told):
            raise ValueError(f"{name}: is no number for each of {layers} layers")
        return told
    return [_number(told, name)] * layers


# weights


def estimated_parameters(settings: Settings) -> int | None:
    """Of a dense decoder in Llama's form: embeddings, four projections of attention, three of the
    gated feed-forward, norms. None for what is built otherwise."""
    text = text_settings(settings)
    if text.get("kv_lora_rank") or any("expert" in key for key in text):
        return None
    try:
        if cache_of(settings).shape.is_hybrid:
            return None
        layers, width = _wanted(text, "num_hidden_layers"), _wanted(text, "hidden_size")
        heads, inner = _wanted(text, "num_attention_heads"), _wanted(text, "intermediate_size")
        words = _wanted(text, "vocab_size")
    except ValueError:
        return None
    kv_heads = text.get("num_key_value_heads") or heads
    head_size = text.get("head_dim") or width // heads
    attention = 2 * width * head_size * (heads + kv_heads)
    each = attention + 3 * width * inner + 2 * width
    is_tied = text.get("tie_word_embeddings", settings.get("tie_word_embeddings", False))
    return words * width * (1 if is_tied else 2) + layers * each + width


def weights_dtype(settings: Settings) -> str | None:
    """The type of the weights, a key of BITS; None where it is not told or not known here."""
    told = settings.get("quantization_config")
    if isinstance(told, Mapping):
        if told.get("quant_method") == "fp8":
            return "fp8"
        return {4: "q4", 8: "q8"}.get(told.get("bits", 0))
    keys = ("dtype", "torch_dtype")
    names = [
        part[key] for part in (settings, text_settings(settings)) for key in keys if key in part
    ]
    try:
        return dtype_of(str(names[0])) if names else None
    except ValueError:
        return None


def parameters_of(weights_bytes: int, dtype: str) -> int:
    """Weights of a type that fill so many bytes, about."""
    return round(weights_bytes * 8 / BITS[dtype])


def _wanted(settings: Settings, key: str) -> int:
    return _number(settings.get(key), key)


def _number(value: object, name: str, most: int = 1 << 24) -> int:
    if value is None:
        raise ValueError(f"{name}: is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{name}: is {str(value)[:40]}, not a whole number from 1 to {most:,}")
    return value
