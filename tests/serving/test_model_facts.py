"""What a model's files tell of it, whole or damaged: config.json, safetensors and GGUF headers."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from serving import EngineConfigError
from serving.capacity import KvShape, plain_shape
from serving.gguf_header import read_header
from serving.model_facts import facts_of
from serving.model_shapes import cache_of, cache_of_gguf, estimated_parameters
from serving.models import packaged_gguf

LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128_256,
}
"""Llama-3.1-8B's, as far as it counts."""
ONE = 2 * 8 * 128


def settings(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}


# config.json


def test_a_gqa_model_and_its_parameters_to_the_last() -> None:
    assert cache_of(LLAMA).shape == plain_shape(32, 8, 128)
    assert estimated_parameters(LLAMA) == 8_030_261_248


def test_heads_are_kv_heads_where_none_are_named() -> None:
    assert cache_of(settings(num_key_value_heads=None)).shape == plain_shape(32, 32, 128)
    assert cache_of(settings(head_dim=256)).shape == plain_shape(32, 8, 256)
    assert cache_of({"text_config": LLAMA}).shape == plain_shape(32, 8, 128)


def test_mla() -> None:
    found = cache_of(settings(num_hidden_layers=61, kv_lora_rank=512, qk_rope_head_dim=64))
    assert found.shape == KvShape(61 * 576, is_latent=True)


@pytest.mark.parametrize(
    ("changes", "full", "windowed"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 16}, 16, 16),
        ({"sliding_window_pattern": 8}, 4, 28),
        ({"model_type": "gemma2"}, 16, 16),
        ({"model_type": "mistral"}, 0, 32),
    ],
)
def test_sliding_windows(changes: Mapping[str, Any], full: int, windowed: int) -> None:
    found = cache_of(settings(sliding_window=4096, **changes))
    assert found.shape == KvShape(full * ONE, windowed * ONE, 4096)
    assert "the engine's own figure counts" in found.notes[0]


def test_a_window_that_is_off_or_of_unknown_layers() -> None:
    off = cache_of(settings(sliding_window=4096, use_sliding_window=False))
    assert (off.shape, off.notes) == (plain_shape(32, 8, 128), ())
    unknown = cache_of(settings(sliding_window=4096, model_type="new"))
    assert unknown.shape == plain_shape(32, 8, 128)
    assert "only the engine knows" in unknown.notes[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8},
        {"full_attention_interval": 4},
        {"layers_block_type": ["mamba"] * 24 + ["attention"] * 8},
        {"hybrid_override_pattern": "MM-*" * 8},
        {"attn_layer_period": 4, "attn_layer_offset": 1},
        {"attn_layer_indices": list(range(8))},
    ],
)
def test_hybrid_models_keep_tokens_in_some_layers(changes: Mapping[str, Any]) -> None:
    found = cache_of(settings(**changes))
    assert found.shape == KvShape(8 * ONE, is_hybrid=True)
    assert "only the engine can tell" in found.notes[0]
    assert estimated_parameters(settings(**changes)) is None


def test_a_model_without_attention_has_no_cache() -> None:
    with pytest.raises(ValueError, match="no layer of the model attends"):
        cache_of(settings(layer_types=["mamba"] * 32))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers: is missing"),
        ({"num_attention_heads": 0}, "num_attention_heads: is 0, not a whole number from 1"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: is 1000000000000, not"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers: is 32, not"),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"max_position_embeddings": -1}, "max_position_embeddings: is -1, not"),
    ],
)
def test_a_config_that_lacks_fields_is_told_in_one_line(
    tmp_path: Path, changes: Mapping[str, Any], told: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings(**changes)))
    with pytest.raises(EngineConfigError, match=told) as caught:
        facts_of(str(tmp_path / "config.json"))
    assert "\n" not in str(caught.value)


def test_a_config_alone_counts_a_dense_models_weights(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    found = facts_of(str(file))
    assert (found.parameters, found.weights_bytes) == (8_030_261_248, 2 * 8_030_261_248)
    assert found.context_tokens == 131_072
    assert "as of a dense model" in found.notes[-1]
    file.write_text(json.dumps(settings(quantization_config={"quant_method": "awq", "bits": 4})))
    assert facts_of(str(file)).weights_bytes == 8_030_261_248 * 9 // 16
    file.write_text(json.dumps(settings(num_experts=64)))
    assert facts_of(str(file)).weights_bytes is None


# safetensors


def safetensors(**tensors: tuple[str, int]) -> bytes:
    """A file of tensors by type and bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (kind, size) in tensors.items():
        header[name] = {"dtype": kind, "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_a_directorys_tensors_are_counted(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(safetensors(a=("BF16", 64), b=("F32", 64)))
    found = facts_of(str(directory))
    assert (found.weights_bytes, found.parameters) == (128, 48)


def test_only_the_files_of_the_index_count(directory: Path) -> None:
    for name in ("one", "two", "consolidated"):
        (directory / f"{name}.safetensors").write_bytes(safetensors(a=("BF16", 64)))
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert facts_of(str(directory)).weights_bytes == 128


def test_packed_weights_are_bytes_of_which_the_config_tells_the_number(directory: Path) -> None:
    told = settings(quantization_config={"quant_method": "gptq", "bits": 4})
    (directory / "config.json").write_text(json.dumps(told))
    (directory / "model.safetensors").write_bytes(safetensors(a=("I32", 180)))
    found = facts_of(str(directory))
    assert (found.weights_bytes, found.parameters) == (180, 320)


@pytest.mark.parametrize("kept", [0, 4, 40, -10])
def test_a_cut_safetensors_file_is_named(directory: Path, kept: int) -> None:
    whole = safetensors(a=("BF16", 64))
    (directory / "model.safetensors").write_bytes(whole[:kept])
    with pytest.raises(EngineConfigError, match=r"model\.safetensors .*get it again"):
        facts_of(str(directory))


# GGUF


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(metadata: Mapping[str, Any], tensors: int = 1) -> bytes:
    """A file of one 16-bit tensor of 8 values each."""
    entries = b""
    for key, value in metadata.items():
        entries += text(key)
        if isinstance(value, str):
            entries += struct.pack("<I", 8) + text(value)
        elif isinstance(value, list):
            entries += struct.pack("<IIQ", 9, 4, len(value))
            entries += struct.pack(f"<{len(value)}I", *value)
        else:
            entries += struct.pack("<II", 4, value)
    told = b"".join(text(f"t{n}") + struct.pack("<IQIQ", 1, 8, 1, 16 * n) for n in range(tensors))
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(metadata))
    return head + entries + told + bytes(16 * tensors)


TINY: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.embedding_length": 256,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 512,
}


def test_the_packaged_gguf() -> None:
    header = read_header(packaged_gguf())
    assert (header.parameters, header.weights_bytes) == (134_515_008, 96_576_768)
    assert cache_of_gguf(header.metadata).shape == plain_shape(30, 3, 64)
    assert header.metadata["tokenizer.ggml.tokens"] is None, "a vocabulary is passed over"


def test_a_gguf_as_it_is_and_as_a_copy_in_16_bits() -> None:
    assert facts_of("smollm2-135m", as_gguf=True).weights_bytes == 96_576_768
    assert facts_of(str(packaged_gguf())).weights_bytes == 2 * 134_515_008


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, plain_shape(4, 2, 32)),
        ({"llama.attention.head_count_kv": [2, 0, 2, 0]}, KvShape(2 * 2 * 64, is_hybrid=True)),
        (
            {"llama.attention.key_length": 64, "llama.attention.value_length": 16},
            KvShape(4 * 2 * 80),
        ),
        (
            {"llama.attention.sliding_window": 128, "llama.attention.sliding_window_pattern": 2},
            KvShape(2 * 2 * 64, 2 * 2 * 64, 128),
        ),
        (
            {"llama.attention.kv_lora_rank": 32, "llama.rope.dimension_count": 8},
            KvShape(4 * 40, is_latent=True),
        ),
    ],
)
def test_shapes_by_a_gguf_header(
    tmp_path: Path, changes: Mapping[str, Any], shape: KvShape
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf({**TINY, **changes}))
    found = facts_of(str(file), as_gguf=True)
    assert found.shape == shape
    assert (found.parameters, found.weights_bytes, found.context_tokens) == (8, 16, 512)


def test_a_file_of_several_does_not_tell_its_weights(tmp_path: Path) -> None:
    file = tmp_path / "m-00001-of-00002.gguf"
    file.write_bytes(gguf({**TINY, "split.count": 2}))
    found = facts_of(str(file))
    assert found.weights_bytes is None
    assert "give --parameters" in found.notes[-1]


def test_a_gguf_cut_anywhere_is_refused_in_one_line(tmp_path: Path) -> None:
    whole = gguf(TINY, tensors=2)
    file = tmp_path / "m.gguf"
    for kept in range(4, len(whole) - 64, 7):
        file.write_bytes(whole[:kept])
        with pytest.raises(EngineConfigError, match="cut short") as caught:
            facts_of(str(file))
        assert "\n" not in str(caught.value)


def test_tensors_that_do_not_end_inside_the_file(tmp_path: Path) -> None:
    head = gguf(TINY)
    grown = head.replace(struct.pack("<IQI", 1, 8, 1), struct.pack("<IQI", 1, 1 << 40, 1))
    (tmp_path / "m.gguf").write_bytes(grown)
    with pytest.raises(EngineConfigError, match="its tensors do not end inside it"):
        facts_of(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"PK..", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "GGUF version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "is damaged: its header counts"),
        (gguf({"general.architecture": "llama"}), "llama.block_count: is missing"),
        (gguf({"other": 1}), "general.architecture: is missing"),
        (gguf({**TINY, "llama.attention.head_count": 0}), "head_count: is 0, not"),
    ],
)
def test_a_damaged_gguf_is_told_in_one_line(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(EngineConfigError, match=told):
        facts_of(str(tmp_path / "m.gguf"))


def test_a_model_that_is_not_here_is_told_with_the_remedies(tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match=r"not on this machine: name its config\.json"):
        facts_of("owner/no-such-model-here")
    with pytest.raises(EngineConfigError, match="no such file"):
        facts_of(str(tmp_path / "none.gguf"))


def test_a_hub_model_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    entry = tmp_path / "models--owner--name"
    snapshot = entry / "snapshots/abc"
    snapshot.mkdir(parents=True)
    (entry / "refs").mkdir()
    (entry / "refs/main").write_text("abc")
    (snapshot / "config.json").write_text(json.dumps(LLAMA))
    (snapshot / "model.safetensors").write_bytes(safetensors(a=("BF16", 64)))
    found = facts_of("owner/name")
    assert (found.shape, found.weights_bytes) == (plain_shape(32, 8, 128), 64)
