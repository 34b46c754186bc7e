"""The arithmetic of what fits: the reference text's own figures, exact, and what must always hold.

GB are GiB there, and k is 1,000.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.capacity import (
    DEVICES,
    KvShape,
    Model,
    Roofline,
    agents_in_time,
    dtype_of,
    fitting,
    plain_shape,
    pool_tokens,
    roofline_of,
    round_up,
    vllm_tokens,
    weights_bytes,
)

GIB, MIB = 1 << 30, 1 << 20
GQA_8B = plain_shape(32, 8, 128)
MHA = plain_shape(32, 32, 128)
LLAMA_8B = Model("8b", GQA_8B, 8192, 8_030_000_000, weights_bytes=16_060_000_000)


# the reference text's vectors


def test_a_dense_8b_model_with_gqa() -> None:
    assert GQA_8B.bytes_per_token("fp16") == 131_072
    assert GQA_8B.sequence_bytes(2048, 1) == 256 * MIB
    assert GQA_8B.sequence_bytes(2000, 1) == 250 * MIB
    assert round(10 * GQA_8B.sequence_bytes(2048, 1) / GIB, 1) == 2.5


@pytest.mark.parametrize(
    ("tokens", "gib", "eight_gib", "in_80"),
    [
        (1000, 0.49, 3.90625, 131),
        (4000, 1.95, 15.625, 32),
        (8000, 3.91, 31.25, 16),
        (32_000, 15.63, 125, 4),
        (128_000, 62.5, 500, 1),
    ],
)
def test_32_layers_of_32_heads(tokens: int, gib: float, eight_gib: float, in_80: int) -> None:
    assert MHA.bytes_per_token() == 512 * 1024
    # the text rounds half up, as 1.953125 and 15.625 show
    assert MHA.sequence_bytes(tokens, 1) / GIB == pytest.approx(gib, abs=0.00501)
    for conversations, taken_gib in ((8, eight_gib), (32, 4 * eight_gib)):
        taken = int(taken_gib * GIB)
        assert fitting(taken, MHA, tokens, 0, 1) == conversations
        assert fitting(taken - 1, MHA, tokens, 0, 1) == conversations - 1
    assert fitting((80 - 16) * GIB, MHA, tokens, 0, 1) == in_80


@pytest.mark.parametrize(
    ("shared", "tokens", "agents"), [(320, 387, 5145), (0, 387, 1029), (0, 2048, 201)]
)
def test_54_gigabytes_left_for_an_8b_model(shared: int, tokens: int, agents: int) -> None:
    """Shared counted once, not shared, and 2,048 tokens reserved for each."""
    pool = 54_000_000_000
    assert pool // GQA_8B.bytes_per_token() == 411_987
    assert fitting(pool, GQA_8B, tokens, shared, 16) == agents


@pytest.mark.parametrize(
    ("memory_gib", "parameters", "layers", "least", "most"),
    [
        (8, 8.03e9, 32, 1, 3),
        (24, 8.03e9, 32, 10, 30),
        (24, 32.76e9, 64, 3, 8),
        (48, 70.6e9, 80, 5, 15),
    ],
)
def test_a_light_chat_is_comfortable(
    memory_gib: int, parameters: float, layers: int, least: int, most: int
) -> None:
    """Assumed: weights at 4.5 bits (q4_0), the whole card less 2 GiB, and 5,120 tokens of 16 bits
    kept for each; 8 KV heads of 128."""
    pool = (memory_gib - 2) * GIB - weights_bytes(round(parameters), "q4")
    assert least <= fitting(pool, plain_shape(layers, 8, 128), 5120, 0, 16) <= most


# types


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("fp32", 262_144), ("fp16", 131_072), ("bf16", 131_072), ("fp8", 65_536)],
)
def test_bytes_by_type(dtype: str, size: int) -> None:
    assert GQA_8B.bytes_per_token(dtype) == size


def test_quantised_types_count_their_scales() -> None:
    """32 values and a scale of 2 bytes: 34 and 18 bytes a block."""
    blocks = 2 * 32 * 8 * 128 // 32
    assert GQA_8B.bytes_per_token("q8") == 34 * blocks
    assert GQA_8B.bytes_per_token("q4_0") == 18 * blocks
    assert weights_bytes(32_000, "q4") == 18_000
    assert weights_bytes(256, "q6_K") == 210


def test_a_quantisation_leaves_some_weights_wide() -> None:
    assert weights_bytes(32_000, "q4", 16_000) == 9_000 + 32_000
    assert weights_bytes(32_000, "fp32", 16_000) == 4 * 32_000
    assert weights_bytes(10, "fp8", 99) == 20


def test_an_unknown_type_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'turboquant' is not known; use one of fp32, fp16"):
        dtype_of("turboquant")
    assert dtype_of("FP8_E4M3") == "fp8"


# shapes


def test_mla_keeps_one_latent_a_layer() -> None:
    """DeepSeek-V3: 61 layers of 512 + 64 values; heads kept whole would take 57 times that."""
    latent = KvShape(61 * (512 + 64), is_latent=True)
    assert latent.bytes_per_token() == 70_272
    assert plain_shape(61, 128, 128).bytes_per_token() / latent.bytes_per_token() > 56


def test_a_window_keeps_its_last_tokens_only() -> None:
    one = plain_shape(1, 8, 128).values
    shape = KvShape(4 * one, 20 * one, 1024)
    assert shape.bytes_per_token() == 24 * one * 2
    short, long = shape.sequence_bytes(512, 16), shape.sequence_bytes(8192, 16)
    assert short == 512 * 24 * one * 2
    # the window may begin inside a block, and then touches one more
    assert long == (8192 * 4 + (1024 + 16) * 20) * one * 2
    assert fitting(10 * long, shape, 8192, 0, 16) == 10


@pytest.mark.parametrize(
    ("kv_heads", "devices", "copies"),
    [(8, 1, 1), (8, 8, 1), (8, 16, 2), (1, 8, 8), (2, 3, 1.5), (None, 8, 1)],
)
def test_devices_beyond_the_kv_heads_keep_tokens_again(
    kv_heads: int | None, devices: int, copies: float
) -> None:
    assert float(KvShape(64, kv_heads=kv_heads).copies(devices)) == copies


@pytest.mark.parametrize("bad", [(0, 8, 128), (32, 0, 128), (32, 8, 0), (32, -1, 128)])
def test_a_shape_without_heads_is_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="give 1 or more"):
        plain_shape(*bad)


def test_an_absurd_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="layers: 99999999 is none"):
        plain_shape(99_999_999, 8, 128)
    with pytest.raises(ValueError, match="1 or more"):
        KvShape(0)
    with pytest.raises(ValueError, match="window"):
        KvShape(1, 1, 0)


# what must always hold

POOLS = st.integers(0, 1 << 40)
TOKENS = st.integers(1, 100_000)
UNITS = st.sampled_from([1, 16, 32, 256, 1024])
WINDOWED = KvShape(4096, 20_480, 1024)


@given(POOLS, TOKENS, TOKENS, UNITS, st.sampled_from([GQA_8B, MHA, WINDOWED]))
def test_what_fits_fits_and_one_more_does_not(
    pool: int, tokens: int, shared: int, unit: int, shape: KvShape
) -> None:
    shared = min(shared, tokens)
    agents = fitting(pool, shape, tokens, shared, unit)
    once = min(shared, tokens - 1) // unit * unit * shape.values * 2
    own = shape.sequence_bytes(tokens, unit) - once
    assert own > 0
    if agents:
        assert once + agents * own <= pool
    assert once + (agents + 1) * own > pool


@given(POOLS, TOKENS, TOKENS, UNITS)
def test_sharing_never_costs_a_second_agent(pool: int, tokens: int, shared: int, unit: int) -> None:
    alone = fitting(pool, GQA_8B, tokens, 0, unit)
    assert fitting(pool, GQA_8B, tokens, min(shared, tokens), unit) >= alone


def test_a_prefix_shorter_than_a_block_is_not_shared() -> None:
    assert fitting(GIB, GQA_8B, 400, 100, 128) == fitting(GIB, GQA_8B, 400, 0, 128)
    assert fitting(GIB, GQA_8B, 400, 128, 128) > fitting(GIB, GQA_8B, 400, 0, 128)


def test_units_round_up() -> None:
    assert [round_up(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]


# as engines count


def test_vllm_counts_whole_blocks_and_whole_contexts() -> None:
    """The first figure was told by vLLM itself: 2 layers, 2 KV heads of 32, 64 MiB."""
    small = plain_shape(2, 2, 32)
    assert vllm_tokens(64 * MIB, small, 32, 1024, "bf16") == 131_072
    assert pool_tokens(64 * MIB, small, 32) == 131_072
    # a context of 1,000 takes 32 blocks of 32, the last of them in part
    assert vllm_tokens(64 * MIB, small, 32, 1000, "bf16") == 128_000


# steps


def test_the_roofline_of_an_8b_model_on_an_h100() -> None:
    """About 956 moves/s of 25 uncached and 4 written tokens, at the share of peak FLOPs that is
    assumed here."""
    roof = roofline_of(LLAMA_8B, 131_072, DEVICES["h100"])
    assert roof is not None
    rate = roof.requests_per_s(400, 25, 4, 256)
    assert rate == pytest.approx(956, rel=0.1)
    assert agents_in_time(rate, 1.0) == int(rate)
    assert agents_in_time(rate, 0.0) is None


def test_decoding_is_bound_by_memory_until_the_ridge() -> None:
    size, total = 16_000_000_000, 8_000_000_000
    roof = Roofline(total, size, 131_072, DEVICES["h100"], total, GQA_8B)
    assert roof.step_s(1, 1000) == roof.memory_s(1, 1000)
    ridge = roof.ridge(100)
    assert ridge is not None
    assert roof.is_memory_bound(ridge - 1, 100)
    assert not roof.is_memory_bound(ridge, 100)
    # each of them reads 13 GB of its own: no batch is large enough
    assert roof.ridge(100_000) is None


def test_experts_are_read_as_far_as_a_batch_chooses_them() -> None:
    size, total, h100 = 60_000_000_000, 30_000_000_000, DEVICES["h100"]
    sparse = Roofline(total // 10, size, 100_000, h100, total, GQA_8B)
    dense = Roofline(total, size, 100_000, h100, total, GQA_8B)
    assert sparse.memory_s(1, 0) == pytest.approx(dense.memory_s(1, 0) / 10)
    assert sparse.memory_s(10, 0) == pytest.approx(dense.memory_s(10, 0))


def test_a_step_reads_what_windows_have_kept() -> None:
    """Half of the layers keep the last 1,000 tokens."""
    h100, windowed = DEVICES["h100"], KvShape(1, 1, 1000)
    plain = Roofline(1, 1, 1000, h100, 1, GQA_8B)
    roof = Roofline(1, 1, 1000, h100, 1, windowed)
    assert roof.memory_s(8, 500) == plain.memory_s(8, 500)
    assert roof.memory_s(8, 10_000) == pytest.approx(plain.memory_s(8, 5500))


def test_devices_that_keep_a_token_twice_read_it_twice() -> None:
    once, twice = (roofline_of(LLAMA_8B, 131_072, DEVICES["h100"], n) for n in (1, 2))
    assert once is not None
    assert twice is not None
    assert twice.memory_s(8, 1000) == pytest.approx(once.memory_s(16, 1000), rel=0.1)
    assert twice.kv_bytes_per_token == 2 * once.kv_bytes_per_token


def test_no_roofline_without_parameters() -> None:
    assert roofline_of(Model("m", GQA_8B), 131_072, DEVICES["h100"]) is None
