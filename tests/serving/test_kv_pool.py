"""The KV cache of each kind of engine, before it starts: on a CPU, a GPU and several of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving import EngineConfigError
from serving.capacity import KvShape, Model, plain_shape
from serving.kv_pool import (
    SGLANG_MEMORY_FRACTION,
    Memory,
    Pool,
    PoolAsk,
    loaded_dtype,
    pool_of,
)
from serving.llama_server import LlamaServerConfig
from serving.sglang import SglangConfig
from serving.vllm_config import VllmConfig
from serving.vllm_server import VllmServerConfig

GIB = 1 << 30
LLAMA_70B = Model(
    "70b",
    plain_shape(80, 8, 128),
    8192,
    70_553_706_496,
    weights_bytes=141_107_412_992,
    weights_dtype="bf16",
    attention_heads=64,
)
LLAMA_8B = replace(
    LLAMA_70B, shape=plain_shape(32, 8, 128), weights_bytes=16 * GIB, attention_heads=32
)
DEEPSEEK = Model(
    "dsv3",
    KvShape(61 * 576, is_latent=True, kv_heads=1),
    163_840,
    671_000_000_000,
    weights_bytes=671_000_000_000,
    weights_dtype="fp8",
    is_quantised=True,
    attention_heads=128,
)
H100, H200 = Memory(80 * GIB, 2 * GIB), Memory(141 * GIB, 2 * GIB)


@pytest.fixture
def float32_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that does not multiply bfloat16."""
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx2\n")
    monkeypatch.setattr("serving.config.CPU_INFO", tmp_path / "cpuinfo")


def vllm(model: Model, memory: Memory | None, **knobs: Any) -> Pool:
    return pool_of(VllmConfig(device="cuda", **knobs), model, PoolAsk(memory))


# tensor parallelism


@pytest.mark.parametrize(("devices", "copies"), [(1, 1), (4, 1), (8, 1), (16, 2), (32, 4)])
def test_gpus_beyond_the_kv_heads_keep_the_same_tokens_again(devices: int, copies: int) -> None:
    memory = replace(H100, total_bytes=8 * 80 * GIB // devices + 16 * GIB)
    pool = vllm(LLAMA_8B, memory, tensor_parallel=devices, context_tokens=4096)
    left = devices * (int(0.9 * memory.total_bytes) - 2 * GIB) - 16 * GIB
    assert pool.copies == copies
    assert pool.kv_bytes == left // copies
    assert pool.tokens == pytest.approx(left // copies // 131_072, rel=0.001)


def test_a_70b_model_on_16_gpus_holds_half_of_what_they_have() -> None:
    pool = vllm(LLAMA_70B, H100, tensor_parallel=16, context_tokens=4096)
    left = 16 * (int(0.9 * 80 * GIB) - 2 * GIB) - 141_107_412_992
    assert pool.tokens == pytest.approx(left / 2 / 327_680, rel=0.001)


def test_every_gpu_keeps_the_whole_latent_of_mla() -> None:
    pool = vllm(DEEPSEEK, H200, tensor_parallel=8, context_tokens=4096)
    left = 8 * (int(0.9 * 141 * GIB) - 2 * GIB) - 671_000_000_000
    assert pool.copies == 8
    assert pool.tokens == pytest.approx(left / 8 / 70_272, rel=0.001)
    assert pool.tokens == pytest.approx(5_718_960 / 8, rel=0.001)
    given = vllm(DEEPSEEK, None, tensor_parallel=8, kv_cache_bytes=GIB, context_tokens=4096)
    assert given.kv_bytes == GIB


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        (3, "tensor_parallel = 3 does not divide the 64 attention heads"),
        (128, "tensor_parallel = 128 does not divide the 64 attention heads"),
    ],
)
def test_gpus_that_cannot_part_the_heads_are_refused(devices: int, told: str) -> None:
    with pytest.raises(EngineConfigError, match=told):
        vllm(LLAMA_70B, H100, tensor_parallel=devices)


def test_gpus_that_cannot_part_the_kv_heads_are_refused() -> None:
    model = replace(LLAMA_70B, attention_heads=48)
    with pytest.raises(EngineConfigError, match="neither a part nor a multiple of the 8 KV heads"):
        vllm(model, H100, tensor_parallel=12)
    unknown = replace(LLAMA_70B, attention_heads=None)
    with pytest.raises(EngineConfigError, match="neither a part nor a multiple"):
        vllm(unknown, H100, tensor_parallel=3)


# SGLang


@pytest.mark.usefixtures("float32_cpu")
def test_sglang_for_a_gpu_is_not_planned_with_this_cpus_type() -> None:
    config = SglangConfig(context_tokens=4096)
    pool = pool_of(config, LLAMA_8B, PoolAsk(H100))
    assert pool.kv_dtype == "bf16"
    # what is not its share is the reserve
    left = int(SGLANG_MEMORY_FRACTION * 80 * GIB) - 16 * GIB
    assert pool.tokens == left // 131_072
    assert pool.source == "85% of the memory, less weights"


def test_a_reserve_of_more_than_sglang_leaves_is_taken_from_its_share() -> None:
    memory = Memory(80 * GIB, 20 * GIB, fraction=0.9)
    pool = pool_of(SglangConfig(), LLAMA_8B, PoolAsk(memory))
    assert pool.kv_bytes == pytest.approx((80 - 20 - 16) * GIB, abs=2)


@pytest.mark.usefixtures("float32_cpu")
def test_sglang_on_this_cpu_keeps_what_it_computes_in() -> None:
    config = SglangConfig(device="cpu", context_tokens=1024, max_concurrent=4)
    pool = pool_of(config, LLAMA_8B, PoolAsk())
    assert (pool.kv_dtype, pool.kv_bytes) == ("fp32", pool.tokens * 262_144)


# memory that the config gives


def test_a_cache_that_the_memory_does_not_hold_is_refused() -> None:
    with pytest.raises(EngineConfigError, match=r"do not hold the KV cache .*lower kv_cache_bytes"):
        vllm(LLAMA_8B, H100, kv_cache_bytes="400GiB", tensor_parallel=8)
    fits = vllm(LLAMA_8B, H100, kv_cache_bytes="60GiB", tensor_parallel=8, context_tokens=4096)
    assert fits.kv_bytes == 8 * 60 * GIB
    with pytest.raises(EngineConfigError, match="do not hold the KV cache"):
        pool_of(SglangConfig(kv_cache_bytes="70GiB"), LLAMA_8B, PoolAsk(H100))
    with pytest.raises(EngineConfigError, match="do not hold the KV cache"):
        pool_of(VllmConfig(device="cpu"), LLAMA_8B, PoolAsk(Memory(16 * GIB, 0)))


# types


def test_a_cache_has_the_type_that_is_computed_in() -> None:
    kept = pool_of(VllmConfig(device="cuda"), LLAMA_8B, PoolAsk(H100))
    assert kept.kv_dtype == "bf16"
    wide = pool_of(VllmConfig(device="cuda", dtype="float32"), LLAMA_8B, PoolAsk(H100))
    assert wide.kv_dtype == "fp32"
    assert pool_of(None, replace(LLAMA_8B, weights_dtype=None), PoolAsk(H100)).kv_dtype == "fp16"
    assert pool_of(LlamaServerConfig(), LLAMA_8B, PoolAsk()).kv_dtype == "fp16"


@pytest.mark.usefixtures("float32_cpu")
def test_weights_are_loaded_in_the_type_that_is_computed_in() -> None:
    cpu, gpu = VllmConfig(device="cpu"), VllmConfig(device="cuda")
    assert loaded_dtype(cpu, LLAMA_8B, has_memory=False) == "fp32"
    assert loaded_dtype(VllmServerConfig(device="cpu"), LLAMA_8B, has_memory=False) == "fp32"
    assert loaded_dtype(SglangConfig(device="cpu"), LLAMA_8B, has_memory=False) == "fp32"
    assert loaded_dtype(gpu, LLAMA_8B, has_memory=True) is None
    assert loaded_dtype(SglangConfig(), LLAMA_8B, has_memory=True) is None
    half = VllmConfig(device="cuda", dtype="half")
    assert loaded_dtype(half, LLAMA_8B, has_memory=True) == "fp16"
    assert loaded_dtype(LlamaServerConfig(), LLAMA_8B, has_memory=True) is None


@pytest.mark.usefixtures("float32_cpu")
def test_quantised_weights_stay_as_they_are_stored() -> None:
    half = VllmConfig(device="cuda", dtype="half")
    assert loaded_dtype(half, DEEPSEEK, has_memory=True) is None
    assert loaded_dtype(VllmConfig(device="cpu"), DEEPSEEK, has_memory=False) is None


# what the engine does with a pool


def test_each_kind_reuses_in_its_own_way() -> None:
    ask = PoolAsk(H100)
    told = [
        pool_of(config, LLAMA_8B, ask)
        for config in (
            VllmConfig(device="cuda"),
            VllmConfig(device="cuda", prefix_cache=False),
            LlamaServerConfig(context_tokens=1000),
            SglangConfig(block_tokens=64),
            None,
        )
    ]
    assert [(pool.reuse, pool.unit_tokens, pool.unusable_units) for pool in told] == [
        ("blocks", 16, 1),
        ("none", 16, 1),
        ("slots", 1024, 0),
        ("blocks", 64, 0),
        ("blocks", 1, 0),
    ]


def test_without_any_size_the_memory_is_asked_for() -> None:
    with pytest.raises(EngineConfigError, match="--memory: is missing"):
        pool_of(VllmConfig(device="cuda"), LLAMA_8B, PoolAsk())
    with pytest.raises(EngineConfigError, match="how large its weights are is not known"):
        pool_of(None, replace(LLAMA_8B, weights_bytes=None), PoolAsk(H100))
