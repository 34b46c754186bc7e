"""Settings of a model, as config.json or a GGUF header has them, to what sizes it. Pure.

ValueError, one line with the key, where they lack what is needed or no model has such.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.capacity import BITS, MOST_TOKENS, KvShape, dtype_of
from serving.checked import Fields

Settings = Mapping[str, Any]

_WINDOWED = "sliding_attention", "chunked_attention"
_ATTENDING = "full_attention", "attention", "hybrid", "*"
"""Kinds of layers by their names in config.json; those of other names keep no tokens."""

_PERIODS = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma3n": 5,
    "gemma3n_text": 5,
    "cohere2": 4,
    "gpt-oss": 2,
    "gpt_oss": 2,
}
"""The last layer of so many keeps all tokens, the others slide: known by the model's kind alone to
transformers and llama.cpp."""

_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "vocab_size": 256_000}
_GEMMA3 = {
    **_GEMMA,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "vocab_size": 262_208,
}
_LEFT_OUT: dict[str, Settings] = {
    "gemma": {**_GEMMA, "max_position_embeddings": 8192},
    "gemma2": {
        **_GEMMA,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
    },
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma3n_text": {
        **_GEMMA,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "num_kv_shared_layers": 15,
        "sliding_window": 512,
        "vocab_size": 262_400,
    },
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True},
    "falcon": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128},
}
"""What a kind's config.json leaves out where it is the kind's own default in transformers, as far
as it is not that of others too."""

_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
"""One count by its names, as vLLM looks for it."""

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

_MOST_LAYERS, _MOST_HEADS = 1 << 14, 1 << 20
"""More have no models."""


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """What a model keeps, and what of it has to be said."""

    shape: KvShape
    notes: tuple[str, ...] = ()
    attention_heads: int | None = None
    """Of a layer, all of them. None: not told."""


def text_settings(settings: Settings) -> Settings:
    """Of the language model within a model of several senses, with what its kind leaves out."""
    outer = Fields(settings)
    inner = settings if outer.inner("text_config") is None else settings["text_config"]
    kind = Fields(inner).word("model_type") or outer.word("model_type") or ""
    told = {key: value for key, value in inner.items() if value is not None}
    return {"model_type": kind, **_LEFT_OUT.get(kind, {}), **told}


def context_of(settings: Settings) -> int | None:
    """Tokens that the model was made for; ValueError where they are absurd."""
    return Fields(text_settings(settings)).number("max_position_embeddings", most=MOST_TOKENS)


def has_experts(settings: Settings) -> bool:
    """Whether a model chooses among experts, by its config.json or GGUF metadata."""
    return any(
        "expert" in key and isinstance(value, int) and value > 1 for key, value in settings.items()
    )


def cache_of(settings: Settings) -> CacheFacts:
    """By a config.json."""
    text = Fields(text_settings(settings))
    layers = text.wanted("num_hidden_layers", most=_MOST_LAYERS)
    rank = text.number("kv_lora_rank", least=0)
    if rank:
        size = rank + text.wanted("qk_rope_head_dim")
        heads, kv_heads = text.number("num_attention_heads"), [1] * layers
    else:
        heads = text.wanted("num_attention_heads")
        kv_heads, size = _kv_heads(text, layers, heads), 2 * _head_size(text, heads)
    # those that read what an earlier layer kept are the last
    keeping = layers - (text.number("num_kv_shared_layers", least=0, most=layers - 1) or 0)
    kinds = _kinds(text, layers)[:keeping]
    window = _window(text)
    if not window and any(kind in _WINDOWED for kind in kinds):
        raise ValueError("sliding_window: is missing, and layer_types names layers that slide")
    is_parted = text.value("layer_types") or not text.is_set("use_sliding_window", default=True)
    return _facts(
        [n if kind in _ATTENDING else 0 for n, kind in zip(kv_heads, kinds, strict=False)],
        [n if kind in _WINDOWED else 0 for n, kind in zip(kv_heads, kinds, strict=False)],
        size,
        0 if is_parted and not any(kind in _WINDOWED for kind in kinds) else window,
        heads,
        is_latent=bool(rank),
        is_hybrid="hybrid" in kinds or not all(kind in _ATTENDING + _WINDOWED for kind in kinds),
    )


def _facts(
    full: Sequence[int],
    windowed: Sequence[int],
    size: int,
    window: int,
    heads: int | None,
    *,
    is_latent: bool,
    is_hybrid: bool,
) -> CacheFacts:
    """By the KV heads of each layer, where it keeps every token and where it slides, and the values
    of a head."""
    counts = [sum(both) for both in zip(full, windowed, strict=True)]
    if not any(counts):
        raise ValueError("no layer of the model attends, so it has no KV cache to plan")
    notes = []
    if any(windowed):
        notes.append(_WINDOW)
    elif window:
        notes.append(_UNKNOWN_WINDOW)
    if is_hybrid:
        notes.append(_STATE)
    shape = KvShape(
        sum(full) * size,
        sum(windowed) * size,
        window if any(windowed) else 0,
        is_latent=is_latent,
        is_hybrid=is_hybrid,
        kv_heads=min(filter(None, counts)),
    )
    return CacheFacts(shape, tuple(notes), heads)


def _head_size(text: Fields, heads: int) -> int:
    return text.number("head_dim") or _part(text.wanted("hidden_size"), heads)


def _part(width: int, heads: int) -> int:
    """Of a layer's width, what one of its heads has."""
    if heads > width:
        raise ValueError(f"attention heads: are {heads}, more than the layer's width of {width}")
    return width // heads


def _kv_heads(text: Fields, layers: int, heads: int) -> list[int]:
    """Of each layer; 0: it does not attend."""
    if blocks := text.inners("block_configs", layers):
        return [_block_heads(block, heads) for block in blocks]
    if each := text.numbers("num_key_value_heads_per_layer", layers, most=heads):
        return each
    if text.is_set("multi_query") and not text.is_set("new_decoder_architecture"):
        return [1] * layers
    told = (text.number(key, most=heads) for key in _KV_HEADS)
    return [next((count for count in told if count is not None), heads)] * layers


def _block_heads(block: Fields, heads: int) -> int:
    """Of a layer that has a table of its own (Nemotron)."""
    attention = block.inner("attention")
    if attention is None:
        raise ValueError("block_configs: a layer has no table `attention`")
    if attention.is_set("no_op") or attention.is_set("replace_with_linear"):
        return 0
    count = attention.number("num_key_value_heads", most=heads)
    return count or heads // attention.wanted("n_heads_in_group", most=heads)


def _window(text: Fields) -> int:
    """Tokens of a sliding window; 0: none is named."""
    told = (
        text.number(key, least=0, most=MOST_TOKENS)
        for key in ("sliding_window", "attention_chunk_size")
    )
    return next((tokens for tokens in told if tokens), 0)


def _kinds(text: Fields, layers: int) -> Sequence[str]:
    """The kind of each layer, by whichever key of config.json tells it."""
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if told := text.words(key, layers):
            return told
    for key, other in (
        ("full_attention_interval", "linear_attention"),
        ("sliding_window_pattern", "sliding_attention"),
    ):
        if period := text.number(key):
            return _every(layers, period, other)
    if period := text.number("attn_layer_period"):
        offset = text.number("attn_layer_offset", least=0) or 0
        return ["attention" if n % period == offset else "mamba" for n in range(layers)]
    if (attending := text.numbers("attn_layer_indices", most=layers - 1)) is not None:
        return ["attention" if n in attending else "mamba" for n in range(layers)]
    if types := text.numbers("attn_type_list", layers, most=1):
        return ["attention" if kind else "linear_attention" for kind in types]
    kind = text.word("model_type") or ""
    if kind in _PERIODS and _window(text):
        return _every(layers, _PERIODS[kind], "sliding_attention")
    if kind == "mistral" and _window(text):
        return ["sliding_attention"] * layers
    return ["full_attention"] * layers


def _every(layers: int, period: int, other: str) -> list[str]:
    """Layers of which the last of each period attends to everything."""
    return ["full_attention" if n % period == period - 1 else other for n in range(layers)]


def cache_of_gguf(metadata: Settings) -> CacheFacts:
    """By a GGUF header's metadata (keys of llama.cpp's gguf-py/gguf/constants.py)."""
    kind = architecture_of(metadata)
    told = Fields(metadata, f"{kind}.")
    layers = told.wanted("block_count", most=_MOST_LAYERS)
    heads = _per_layer(told, "attention.head_count", layers)
    if heads is None or not any(heads):
        raise ValueError(f"{kind}.attention.head_count: is missing, or no layer has any")
    if rank := told.number("attention.kv_lora_rank", least=0):
        size = rank + told.wanted("rope.dimension_count")
        shape = KvShape(layers * size, is_latent=True, kv_heads=1)
        return CacheFacts(shape, (_OLD_LATENT,), max(heads))
    kv_heads = _per_layer(told, "attention.head_count_kv", layers) or heads
    key_size = told.number("attention.key_length") or _part(
        told.wanted("embedding_length"), max(heads)
    )
    size = key_size + (told.number("attention.value_length") or key_size)
    slides = _sliding(told, kind, layers)
    if interval := told.number("full_attention_interval"):
        parted = _every(layers, interval, "linear_attention")
        kv_heads = [
            n if part in _ATTENDING else 0 for n, part in zip(kv_heads, parted, strict=True)
        ]
    return _facts(
        [0 if slide else count for count, slide in zip(kv_heads, slides, strict=True)],
        [count if slide else 0 for count, slide in zip(kv_heads, slides, strict=True)],
        size,
        told.number("attention.sliding_window", least=0, most=MOST_TOKENS) or 0,
        max(heads),
        is_latent=False,
        # a layer of this kind without heads keeps nothing
        is_hybrid=bool(told.number("ssm.state_size", least=0))
        or (0 in kv_heads and kind != "deci"),
    )


def architecture_of(metadata: Settings) -> str:
    """What begins the keys of a GGUF header."""
    kind = Fields(metadata).word("general.architecture")
    if kind is None:
        raise ValueError("general.architecture: is missing")
    if not re.fullmatch(r"[\w.-]{1,64}", kind):
        raise ValueError(f"general.architecture: is {kind[:40]!r}, not a name")
    return kind


def _sliding(told: Fields, kind: str, layers: int) -> Sequence[bool]:
    """Whether each layer slides."""
    if not told.number("attention.sliding_window", least=0, most=MOST_TOKENS):
        return [False] * layers
    key = "attention.sliding_window_pattern"
    if isinstance(told.value(key), list):
        return [bool(slides) for slides in told.numbers(key, layers, most=1) or ()]
    period = told.number(key) or _PERIODS.get(kind)
    if period is None:
        return [False] * layers
    return [kind in _WINDOWED for kind in _every(layers, period, "sliding_attention")]


def _per_layer(told: Fields, key: str, layers: int) -> list[int] | None:
    """A number for all layers, or one for each, 0 where it does not attend; None: absent."""
    if isinstance(told.value(key), list):
        return told.numbers(key, layers, most=_MOST_HEADS)
    count = told.number(key, most=_MOST_HEADS)
    return None if count is None else [count] * layers


# weights


def estimated_parameters(settings: Settings) -> int | None:
    """Of a dense decoder in Llama's form: embeddings, four projections of attention, three of the
    gated feed-forward, norms. None for what is built otherwise."""
    text = Fields(text_settings(settings))
    if has_experts(text_settings(settings)) or text.value("block_configs"):
        return None
    try:
        shape = cache_of(settings).shape
        layers, width = text.wanted("num_hidden_layers"), text.wanted("hidden_size")
        heads, inner = text.wanted("num_attention_heads"), text.wanted("intermediate_size")
        kv_heads, head_size = _kv_heads(text, layers, heads)[0], _head_size(text, heads)
        outside = embedding_parameters(settings)
    except ValueError:
        return None
    if shape.is_latent or shape.is_hybrid or not outside:
        return None
    attention = 2 * width * head_size * (heads + kv_heads)
    return outside + layers * (attention + 3 * width * inner + 2 * width) + width


def embedding_parameters(settings: Settings) -> int:
    """Of the embeddings and, where it is another, the head, which quantisations leave at 16 bits;
    0 where they are not told."""
    text = Fields(text_settings(settings))
    width, words = text.number("hidden_size"), text.number("vocab_size")
    is_tied = text.is_set(
        "tie_word_embeddings", default=Fields(settings).is_set("tie_word_embeddings")
    )
    return (width or 0) * (words or 0) * (1 if is_tied else 2)


def is_quantised(settings: Settings) -> bool:
    """Whether the weights are stored in fewer bits than they are computed with."""
    return _quantisation(settings) is not None


def _quantisation(settings: Settings) -> Fields | None:
    key = "quantization_config"
    return Fields(settings).inner(key) or Fields(text_settings(settings)).inner(key)


def weights_dtype(settings: Settings) -> str | None:
    """The type that the weights are stored in, a key of BITS; None where it is not told or not
    known here."""
    told = _quantisation(settings)
    if told is not None:
        return _quantised_dtype(told)
    outer, text = Fields(settings), Fields(text_settings(settings))
    names = (part.word(key) for part in (outer, text) for key in ("dtype", "torch_dtype"))
    try:
        return dtype_of(next(filter(None, names), ""))
    except ValueError:
        return None


def _quantised_dtype(told: Fields) -> str | None:
    """By the names and bits of quantisations that transformers and vLLM read."""
    method = told.word("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8"
    if method == "mxfp4":
        return "q4"
    if method == "modelopt":
        return {"FP8": "fp8", "NVFP4": "q4"}.get(told.word("quant_algo") or "")
    if method == "bitsandbytes":
        is_8_bits = told.is_set("load_in_8bit")
        return "q8" if is_8_bits else "q4" if told.is_set("load_in_4bit") else None
    if method == "compressed-tensors":
        return _compressed_dtype(told)
    return {4: "q4", 8: "q8"}.get(told.number("bits", most=64) or 0)


def _compressed_dtype(told: Fields) -> str | None:
    """Of compressed-tensors: the first group's weights."""
    groups = told.value("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return None
    group = Fields(groups).inner(next(iter(groups)))
    weights = group and group.inner("weights")
    if weights is None:
        return None
    bits, kind = weights.number("num_bits", most=64), weights.word("type")
    return "fp8" if (bits, kind) == (8, "float") else {4: "q4", 8: "q8"}.get(bits or 0)


def parameters_of(weights_bytes: int, dtype: str, unquantised: int = 0) -> int:
    """Weights of a type that fill so many bytes, about; `unquantised` of them have 16 bits."""
    wide = min(unquantised, weights_bytes // 2)
    return wide + round((weights_bytes - 2 * wide) * 8 / BITS[dtype])


def nearest_dtype(weights_bytes: int, parameters: int) -> str:
    """The type that weights are stored in on average, about."""
    bits = weights_bytes * 8 / parameters
    return min(BITS, key=lambda dtype: abs(BITS[dtype] - bits))
