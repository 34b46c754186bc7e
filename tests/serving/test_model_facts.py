"""What a model's files tell of it, whole or damaged: config.json, safetensors and GGUF headers."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from serving import EngineConfigError
from serving.capacity import KvShape, plain_shape
from serving.gguf_header import read_header
from serving.model_facts import facts_of
from serving.model_shapes import cache_of, cache_of_gguf, context_of, estimated_parameters
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
    assert found.shape == KvShape(61 * 576, is_latent=True, kv_heads=1)


@pytest.mark.parametrize(
    ("changes", "full", "windowed"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 16}, 16, 16),
        ({"sliding_window_pattern": 8}, 4, 28),
        ({"model_type": "gemma2", "head_dim": 128}, 16, 16),
        ({"model_type": "mistral"}, 0, 32),
    ],
)
def test_sliding_windows(changes: Mapping[str, Any], full: int, windowed: int) -> None:
    found = cache_of(settings(sliding_window=4096, **changes))
    assert found.shape == KvShape(full * ONE, windowed * ONE, 4096, kv_heads=8)
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
        {"attn_type_list": [0, 0, 0, 1] * 8},
    ],
)
def test_hybrid_models_keep_tokens_in_some_layers(changes: Mapping[str, Any]) -> None:
    found = cache_of(settings(**changes))
    assert found.shape == KvShape(8 * ONE, is_hybrid=True, kv_heads=8)
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
        ({"num_hidden_layers": "32"}, "num_hidden_layers: is '32', not"),
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
    outside = 2 * 128_256 * 4096
    quantised = facts_of(str(file))
    assert quantised.weights_bytes == (8_030_261_248 - outside) * 9 // 16 + 2 * outside
    assert "embeddings and head at 16 bits" in quantised.notes[-1]
    file.write_text(json.dumps(settings(num_experts=64)))
    assert facts_of(str(file)).weights_bytes is None


GEMMA3_12B = {
    "hidden_size": 3840,
    "intermediate_size": 15_360,
    "model_type": "gemma3_text",
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "sliding_window": 1024,
}
"""What its config.json tells of the language model."""
GROUPED = {"attention": {"n_heads_in_group": 8, "no_op": False}}
COMPRESSED = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}
GEMMA2_9B = {
    "hidden_size": 3584,
    "intermediate_size": 14_336,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "vocab_size": 256_000,
}


def test_a_gemma_leaves_out_what_is_usual_of_its_kind() -> None:
    told = {"model_type": "gemma3", "text_config": GEMMA3_12B}
    one = 2 * 8 * 256
    assert cache_of(told).shape == KvShape(8 * one, 40 * one, 1024, kv_heads=8)
    assert context_of(told) == 131_072
    # 11.77 and 9.24 billion by their weights, of which the norms are not all counted
    assert estimated_parameters(told) == pytest.approx(11.766e9, rel=0.001)
    assert estimated_parameters(GEMMA2_9B) == pytest.approx(9_241_705_984, rel=0.001)
    least = {"model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
    found = cache_of({"text_config": least})
    assert (found.shape.bytes_per_token(), found.attention_heads) == (139_264, 8)


def test_the_last_layers_may_read_what_an_earlier_one_kept() -> None:
    kinds = ["sliding_attention", "full_attention"] * 16
    found = cache_of(settings(layer_types=kinds, sliding_window=64, num_kv_shared_layers=12))
    assert found.shape == KvShape(10 * ONE, 10 * ONE, 64, kv_heads=8)


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({"multi_query": True, "model_type": "falcon"}, plain_shape(32, 1, 128)),
        (
            {"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 4},
            plain_shape(32, 4, 128),
        ),
        (
            {"block_configs": [GROUPED] * 32},
            plain_shape(32, 4, 128),
        ),
        (
            {"block_configs": [*[GROUPED] * 31, {"attention": {"no_op": True}}]},
            KvShape(31 * 2 * 4 * 128, kv_heads=4),
        ),
        (
            {"num_key_value_heads_per_layer": [1, 2] * 16},
            KvShape(16 * 3 * 2 * 128, kv_heads=1),
        ),
    ],
)
def test_kv_heads_that_are_told_otherwise(changes: Mapping[str, Any], shape: KvShape) -> None:
    assert cache_of(settings(num_key_value_heads=None, **changes)).shape == shape


@pytest.mark.parametrize(
    ("quantised", "dtype"),
    [
        ({"quant_method": "awq", "bits": 4}, "q4"),
        ({"quant_method": "gptq", "bits": 8}, "q8"),
        ({"quant_method": "gptq", "bits": 3}, None),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "q4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "q4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "q8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "compressed-tensors", **COMPRESSED}, "fp8"),
        ({"quant_method": "compressed-tensors"}, None),
        ({"quant_method": "new"}, None),
    ],
)
def test_quantisations(tmp_path: Path, quantised: Mapping[str, Any], dtype: str | None) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings(quantization_config=quantised)))
    found = facts_of(str(file))
    assert (found.weights_dtype, found.is_quantised) == (dtype, True)
    assert (found.weights_bytes is None) == (dtype is None)
    assert any("quantised is not known" in note for note in found.notes) == (dtype is None)


VALUES = [0, -1, "x", "32", 1.5, 32.0, [], {}, [1], True, 10**30, math.nan, "a\nb"]
KEYS = [
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "max_position_embeddings",
    "quantization_config",
    "text_config",
    "layer_types",
    "full_attention_interval",
    "sliding_window_pattern",
    "attn_layer_period",
    "attn_layer_indices",
    "attn_type_list",
    "block_configs",
    "kv_lora_rank",
    "sliding_window",
    "model_type",
    "use_sliding_window",
    "num_kv_shared_layers",
    "multi_query",
]
MEANT = {
    ("quantization_config", "{}"),
    ("kv_lora_rank", "0"),
    ("sliding_window", "0"),
    ("attn_layer_indices", "[1]"),
    ("use_sliding_window", "True"),
    ("num_kv_shared_layers", "0"),
    ("multi_query", "True"),
    ("model_type", "'x'"),
    ("model_type", "'32'"),
    ("model_type", "'a\\nb'"),
}
"""Values that a config.json may have."""


@pytest.mark.parametrize("key", KEYS)
def test_a_value_of_no_sense_is_refused_in_one_line(tmp_path: Path, key: str) -> None:
    file = tmp_path / "config.json"
    for value in VALUES:
        if (key, repr(value)) in MEANT:
            continue
        file.write_text(json.dumps(settings(**{key: value})))
        with pytest.raises(EngineConfigError) as caught:
            facts_of(str(file))
        assert key in str(caught.value) or value in ([], {}), value
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[" * 100_000, "is nested too deep"),
        ('{"a":' * 100_000, "is nested too deep"),
        ('{"num_hidden_layers": ' + "9" * 5000 + "}", "is no JSON"),
        ("[]", "is no JSON object"),
        ("{", "is no JSON"),
        (json.dumps(settings(quantization_config={"bits": [4]})), "quantization_config.bits: is a"),
    ],
)
def test_a_config_of_another_form_is_refused_in_one_line(
    tmp_path: Path, content: str, told: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(EngineConfigError, match=told) as caught:
        facts_of(str(tmp_path / "config.json"))
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


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
    quantised = {"quant_method": "gptq", "bits": 4}
    told = settings(quantization_config=quantised, vocab_size=None)
    (directory / "config.json").write_text(json.dumps(told))
    (directory / "model.safetensors").write_bytes(safetensors(a=("I32", 180)))
    found = facts_of(str(directory))
    assert (found.weights_bytes, found.parameters) == (180, 320)
    assert (found.weights_dtype, found.is_quantised) == ("q4", True)


@pytest.mark.parametrize("kept", [0, 4, 40, -10])
def test_a_cut_safetensors_file_is_named(directory: Path, kept: int) -> None:
    whole = safetensors(a=("BF16", 64))
    (directory / "model.safetensors").write_bytes(whole[:kept])
    with pytest.raises(EngineConfigError, match=r"model\.safetensors .*get it again"):
        facts_of(str(directory))


@pytest.mark.parametrize("offsets", ["[64, 0]", "[-64, -1]", "[0, Infinity]", "[0.5, 9]", "[0]"])
def test_offsets_that_no_tensor_has(directory: Path, offsets: str) -> None:
    header = f'{{"a": {{"dtype": "BF16", "data_offsets": {offsets}}}}}'.encode()
    content = struct.pack("<Q", len(header)) + header + bytes(64)
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(EngineConfigError, match="has no header of tensors: get it again"):
        facts_of(str(directory))


def test_a_header_that_is_nested_too_deep(directory: Path) -> None:
    header = b'{"a":' + b"[" * 100_000
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(EngineConfigError, match="has no header of tensors"):
        facts_of(str(directory))


@pytest.mark.parametrize(
    ("weight_map", "told"),
    [
        ({"a": "gone.safetensors"}, r"gone\.safetensors cannot be read \(No such file"),
        ({"a": "../../model.safetensors"}, "no weight_map of files beside it"),
        ({"a": 5}, "no weight_map of files beside it"),
        (["a"], "no weight_map of files beside it"),
    ],
)
def test_an_index_of_files_that_are_not_there(
    directory: Path, weight_map: object, told: str
) -> None:
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(EngineConfigError, match=told) as caught:
        facts_of(str(directory))
    assert "Errno" not in str(caught.value)


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


ONE_TENSOR = struct.pack("<IQI", 1, 8, 1)
HUGE_TENSOR = struct.pack("<IQQQI", 3, 1 << 60, 1 << 60, 1 << 60, 99)
"""Of a type that nobody knows."""
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
    kept = facts_of("smollm2-135m", as_gguf=True)
    assert (kept.weights_bytes, kept.weights_dtype) == (96_576_768, "q5")
    copied = facts_of(str(packaged_gguf()))
    assert (copied.weights_bytes, copied.weights_dtype) == (2 * 134_515_008, "fp16")
    assert (kept.is_quantised, copied.is_quantised) == (True, False)


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, plain_shape(4, 2, 32)),
        (
            {"llama.attention.head_count_kv": [2, 0, 2, 0]},
            KvShape(2 * 2 * 64, is_hybrid=True, kv_heads=2),
        ),
        (
            {"llama.attention.key_length": 64, "llama.attention.value_length": 16},
            KvShape(4 * 2 * 80, kv_heads=2),
        ),
        (
            {"llama.attention.sliding_window": 128, "llama.attention.sliding_window_pattern": 2},
            KvShape(2 * 2 * 64, 2 * 2 * 64, 128, kv_heads=2),
        ),
        (
            {"llama.full_attention_interval": 4, "llama.ssm.state_size": 128},
            KvShape(2 * 64, is_hybrid=True, kv_heads=2),
        ),
        (
            {"llama.attention.kv_lora_rank": 32, "llama.rope.dimension_count": 8},
            KvShape(4 * 40, is_latent=True, kv_heads=1),
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
        (gguf({**TINY, "llama.attention.head_count": [0] * 4}), "or no layer has any"),
        (gguf({**TINY, "llama.attention.head_count": 999}), "more than the layer's width of 256"),
        (gguf({**TINY, "llama.attention.sliding_window": "x"}), "sliding_window: is 'x', not"),
        (gguf({**TINY, "llama.attention.sliding_window": [1]}), "window: is a list of 1, not"),
        (gguf({**TINY, "split.count": "two"}), "split.count: is 'two', not"),
        (gguf({"general.architecture": "a\nb"}), r"architecture: is 'a\\nb', not a name"),
        (gguf(TINY, tensors=0), "holds no weights"),
        (gguf(TINY).replace(ONE_TENSOR, HUGE_TENSOR), "more weights than any model has"),
    ],
)
def test_a_damaged_gguf_is_told_in_one_line(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(EngineConfigError, match=told) as caught:
        facts_of(str(tmp_path / "m.gguf"))
    assert "\n" not in str(caught.value)


def test_a_model_that_is_not_here_is_told_with_the_remedies(tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match=r"not on this machine: name its config\.json"):
        facts_of("owner/no-such-model-here")
    for name in ("none.gguf", "none.json"):
        with pytest.raises(EngineConfigError, match="no such file"):
            facts_of(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("x" * 5000, "cannot be read: File name too long"),
        ("~nobody-of-this-name/x.gguf", "no such home directory"),
        ("a\0b", "not on this machine"),
    ],
)
def test_a_name_that_no_file_can_have_is_told_in_one_line(name: str, told: str) -> None:
    with pytest.raises(EngineConfigError, match=told) as caught:
        facts_of(name)
    assert len(str(caught.value)) < 300


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
