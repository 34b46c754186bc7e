"""What fits into an engine's memory, and what a step of it takes: arithmetic alone, no I/O. Pure.

A cached token costs 2 (key and value) x layers x KV heads x head size x bytes a value. Sliding
windows keep the last tokens only; MLA keeps one latent vector a layer. Step times are a roofline
(Williams, Waterman, Patterson 2009) at the shares of a device's peaks that are named below: an
estimate, and to be shown as one.

Sizes are bytes, times seconds; "GiB" is 2^30. Numbers that no machine has raise ValueError.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

MOST_BYTES = 1 << 60
MOST_TOKENS = 1 << 40
"""Beyond these a number is a slip of the hand."""

BITS = {
    "fp32": Fraction(32),
    "fp16": Fraction(16),
    "bf16": Fraction(16),
    "fp8": Fraction(8),
    "q8": Fraction(17, 2),
    "q6": Fraction(105, 16),
    "q5": Fraction(11, 2),
    "q4": Fraction(9, 2),
}
"""Bits a value, scales included: q8 and q4 are llama.cpp's q8_0 and q4_0, 32 values and a scale of
16 bits; q5 is q5_0, q6 is q6_K (210 bytes for 256 values)."""

_ALIASES = {
    "float32": "fp32",
    "float": "fp32",
    "f32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
    "bfloat16": "bf16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "q8_0": "q8",
    "q6_k": "q6",
    "q5_0": "q5",
    "q4_0": "q4",
}

COMPUTE_SHARE = 0.45
"""Of a device's peak FLOPs that a full batch reaches: assumed."""
BANDWIDTH_SHARE = 0.7
"""Of a device's peak bandwidth that a decode step reaches: assumed."""
HYBRID_BLOCK_TOKENS = 528
"""At least so large does vLLM make a block of attention where other layers keep a state of fixed
size, so that both fill pages of one size."""


def dtype_of(name: str) -> str:
    """The key of BITS that a spelling means; ValueError names the known ones."""
    lower = name.lower()
    known = _ALIASES.get(lower, lower)
    if known not in BITS:
        raise ValueError(f"{name!r} is not known; use one of {', '.join(BITS)}")
    return known


def weights_bytes(parameters: int, dtype: str, unquantised: int = 0) -> int:
    """Bytes of so many weights of a type, `unquantised` of which have 16 bits where the type has
    fewer; a mixed quantisation differs by its mix."""
    bits = BITS[dtype_of(dtype)]
    wide = min(unquantised, parameters)
    return math.ceil(((parameters - wide) * bits + wide * max(bits, Fraction(16))) / 8)


def round_up(tokens: int, unit: int) -> int:
    """Tokens that are taken for so many where they come in whole units."""
    return -(-tokens // unit) * unit


# the cache


@dataclass(frozen=True, slots=True)
class KvShape:
    """Of one model, what its KV cache holds. Values are numbers, whatever their type."""

    values: int
    """A token, in the layers that keep every token."""
    window_values: int = 0
    """A token, in the layers that keep the last `window_tokens` only."""
    window_tokens: int = 0
    is_latent: bool = False
    """MLA: a vector that stands for keys and values alike."""
    is_hybrid: bool = False
    """Other layers keep a state of fixed size a sequence, which only the engine can tell."""
    kv_heads: int | None = None
    """Of a layer, the fewest; of MLA one. None: not known, and as many as devices."""

    def __post_init__(self) -> None:
        if self.values < 0 or self.window_values < 0 or self.values + self.window_values < 1:
            raise ValueError("a KV cache has layers, KV heads and a head size of 1 or more")
        if self.window_values and self.window_tokens < 1:
            raise ValueError("a sliding window has 1 token or more")

    def bytes_per_token(self, dtype: str = "fp16") -> int:
        """Of a token that every layer still keeps."""
        return _bytes(self.values + self.window_values, dtype)

    def share_kept(self, tokens: int) -> float:
        """Of the values of so many tokens, those that no window has dropped: what a step reads."""
        kept = tokens * self.values + min(tokens, self.window_tokens) * self.window_values
        return kept / (max(1, tokens) * (self.values + self.window_values))

    def copies(self, devices: int) -> Fraction:
        """Times that devices which share a model (tensor parallelism) keep a token: each has a KV
        head of its own at least."""
        heads = self.kv_heads or devices
        return Fraction(devices * math.ceil(heads / devices), heads)

    def sequence_bytes(self, tokens: int, unit: int, dtype: str = "fp16") -> int:
        """Of one sequence in whole units. A window keeps what it reaches back to, in as many units
        as it may touch; what an engine keeps beside it while it reads a prompt is its own."""
        full = round_up(tokens, unit) * self.values
        window = min(round_up(tokens, unit), round_up(self.window_tokens, unit) + unit)
        return _bytes(full + window * self.window_values, dtype)


def plain_shape(layers: int, kv_heads: int, head_size: int) -> KvShape:
    """Of a model whose layers all keep every token: GQA, or MHA where all heads are KV heads."""
    for name, value in (("layers", layers), ("KV heads", kv_heads), ("head size", head_size)):
        if not 1 <= value <= 1 << 20:
            raise ValueError(f"{name}: {value} is none; give 1 or more, as the model has it")
    return KvShape(2 * layers * kv_heads * head_size, kv_heads=kv_heads)


def _bytes(values: int, dtype: str) -> int:
    return math.ceil(values * BITS[dtype_of(dtype)] / 8)


def fitting(
    pool_bytes: int, shape: KvShape, tokens: int, shared_tokens: int, unit: int, dtype: str = "fp16"
) -> int:
    """Sequences of so many tokens in a cache of so many bytes.

    They begin with `shared_tokens` alike, kept once, as far as whole units hold them; the token to
    be computed is never shared. 0 shared tokens: each keeps all of its own. A sliding window shares
    nothing here: what is shared falls out of it.
    """
    once = min(shared_tokens, tokens - 1) // unit * unit
    own = shape.sequence_bytes(tokens, unit, dtype) - _bytes(once * shape.values, dtype)
    return max(0, (pool_bytes - _bytes(once * shape.values, dtype)) // own)


def pool_tokens(pool_bytes: int, shape: KvShape, unit: int, dtype: str = "fp16") -> int:
    """Tokens that a cache holds in whole units, as if no window ended."""
    return pool_bytes // (unit * shape.bytes_per_token(dtype)) * unit


def vllm_tokens(pool_bytes: int, shape: KvShape, unit: int, context: int, dtype: str) -> int:
    """`kv_cache_size_tokens` as vLLM 0.32 tells it, for a model without windows: whole contexts
    that its blocks hold, times the context (v1/core/kv_cache_utils.get_kv_cache_capacity)."""
    blocks = pool_bytes // (unit * shape.bytes_per_token(dtype))
    return int(blocks / -(-context // unit) * context)


# steps


@dataclass(frozen=True, slots=True)
class Model:
    """What a plan knows of a model. None: unknown."""

    name: str
    shape: KvShape
    context_tokens: int | None = None
    parameters: int | None = None
    active_parameters: int | None = None
    """That a token passes, where experts are chosen; else all of them."""
    weights_bytes: int | None = None
    source: str = ""
    """Where these come from, in words."""
    notes: tuple[str, ...] = ()
    """What is estimated, or only an engine knows."""
    weights_dtype: str | None = None
    """Key of BITS that most weights are stored in."""
    is_quantised: bool = False
    """Stored in fewer bits than computed with: an engine's `dtype` does not change their size."""
    unquantised: int = 0
    """Weights that a quantisation leaves at 16 bits: embeddings and head."""
    attention_heads: int | None = None

    @property
    def computing_parameters(self) -> int | None:
        return self.active_parameters or self.parameters


@dataclass(frozen=True, slots=True)
class Device:
    """What computes: peaks of its data sheet."""

    name: str
    flops: float
    """A second, dense, at 16 bits with sums in 32."""
    bytes_per_s: float
    memory_bytes: int | None = None


_GIB = 1 << 30
DEVICES = {
    device.name: device
    for device in (
        Device("rtx3090", 71e12, 936e9, 24 * _GIB),
        Device("rtx4090", 165e12, 1008e9, 24 * _GIB),
        Device("rtx5090", 210e12, 1792e9, 32 * _GIB),
        Device("a6000", 155e12, 768e9, 48 * _GIB),
        Device("l4", 121e12, 300e9, 24 * _GIB),
        Device("l40s", 362e12, 864e9, 48 * _GIB),
        Device("a100", 312e12, 2039e9, 80 * _GIB),
        Device("h100", 989e12, 3350e9, 80 * _GIB),
        Device("h200", 989e12, 4800e9, 141 * _GIB),
    )
}
"""Peaks by their makers' data sheets."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """What steps of a model take on a device: an estimate, for a step is the longer of its
    arithmetic and its memory traffic."""

    parameters: int
    """That a token passes."""
    weights_bytes: int
    kv_bytes_per_token: float
    device: Device
    total_parameters: int
    shape: KvShape

    def compute_s(self, tokens: float) -> float:
        """2 FLOPs a parameter and token."""
        return 2 * self.parameters * tokens / (self.device.flops * COMPUTE_SHARE)

    def memory_s(self, batch: int, context_tokens: int) -> float:
        """Weights once a step, of experts as many as a batch may choose, and every KV once that no
        window has dropped."""
        share = min(1.0, batch * self.parameters / self.total_parameters)
        kept = context_tokens * self.shape.share_kept(context_tokens)
        moved = self.weights_bytes * share + batch * kept * self.kv_bytes_per_token
        return moved / (self.device.bytes_per_s * BANDWIDTH_SHARE)

    def step_s(self, batch: int, context_tokens: int) -> float:
        """One token for each of a batch, of sequences that long."""
        return max(self.compute_s(batch), self.memory_s(batch, context_tokens))

    def is_memory_bound(self, batch: int, context_tokens: int) -> bool:
        return self.memory_s(batch, context_tokens) > self.compute_s(batch)

    def ridge(self, context_tokens: int) -> int | None:
        """The smallest batch whose steps are bound by arithmetic; None: reading the KV costs more
        than computing with it at every batch."""
        batch, most = 1, 1 << 16
        while batch < most and self.is_memory_bound(batch, context_tokens):
            batch *= 2
        if batch >= most:
            return None
        low, high = batch // 2, batch
        while high - low > 1:
            middle = (low + high) // 2
            if self.is_memory_bound(middle, context_tokens):
                low = middle
            else:
                high = middle
        return high

    def answer_s(self, context_tokens: int, uncached: float, output: float, batch: int) -> float:
        """One request, seen by who waits for it in a batch that all compute their prompts too."""
        step = self.step_s(batch, context_tokens)
        return batch * self.compute_s(uncached) + output * step

    def requests_per_s(
        self, context_tokens: int, uncached: float, output: float, batch: int
    ) -> float:
        """Of a batch that is always full."""
        return batch / self.answer_s(context_tokens, uncached, output, batch)


def roofline_of(
    model: Model, kv_bytes_per_token: int, device: Device, copies: float = 1
) -> Roofline | None:
    """None where the model's parameters or the bytes of its weights are not known. `copies`: times
    that the devices, as one, keep and read a token."""
    if model.computing_parameters is None or model.weights_bytes is None:
        return None
    return Roofline(
        model.computing_parameters,
        model.weights_bytes,
        kv_bytes_per_token * copies,
        device,
        model.parameters or model.computing_parameters,
        model.shape,
    )


def agents_in_time(requests_per_s: float, period_s: float) -> int | None:
    """Agents that each ask once a period (Little's law). None: they have no pace, and any number
    gets its share."""
    return math.floor(min(requests_per_s * period_s, 1e12)) if period_s > 0 else None
