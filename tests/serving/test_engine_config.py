"""Engine tables of a config: what is accepted, and what is refused with a remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from serving import (
    ENGINE_KINDS,
    EngineConfigError,
    Limited,
    ScriptedConfig,
    VllmConfig,
    build_engine,
    check_engine,
    parse_engine_config,
)
from serving.config import cpu_dtype
from serving.http_config import BatchKnobs, replica_name
from serving.models import ModelShape
from serving.vllm_config import (
    VllmBuild,
    engine_args,
    engine_environment,
    vllm_argument_names,
)

SHAPE = ModelShape(context_tokens=8192, kv_bytes_per_token=23_040)


def test_a_table_becomes_the_config_of_its_kind() -> None:
    config = parse_engine_config("main", {"kind": "vllm", "max_queued": 3})
    assert isinstance(config, VllmConfig)
    assert (config.model, config.max_queued) == ("smollm2-135m", 3)
    assert isinstance(parse_engine_config("s", {"kind": "scripted"}), ScriptedConfig)


def test_every_field_of_every_kind_is_described() -> None:
    for kind in ENGINE_KINDS.values():
        for name, field in kind.config_class.model_fields.items():
            assert field.description or name == "kind", name


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"kind": "vllm", "modle": "x"}, "modle"),
        ({"kind": "vllm", "max_concurrent": "many"}, "max_concurrent"),
        ({"kind": "vllm", "max_concurrent": 0}, "max_concurrent"),
        ({"kind": "vllm", "kv_cache_bytes": "1GiB", "memory_fraction": 0.5}, "give one of them"),
        ({"kind": "vllm", "extra_args": {"max_num_seqs": 4}}, "use max_concurrent"),
        ({"kind": "vllm", "extra_args": {"disable_log_stats": False}}, "telemetry needs it"),
        ({"kind": "scripted", "kv_cache_bytes": 5}, "'scripted' computes nothing"),
        ({"kind": "scripted", "latency_seconds": [2, 1]}, "low <= high"),
        ({"kind": "scripted", "faults": [{"kind": "explode"}]}, "faults"),
    ],
)
def test_wrong_values_are_named(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        parse_engine_config("main", data)


URLS = ["http://a:8000", "https://b"]


@pytest.mark.parametrize("kind", ["vllm_server", "sglang"])
def test_several_urls_are_running_servers_with_an_even_share_each(kind: str) -> None:
    data = {"kind": kind, "urls": URLS, "max_concurrent": 5}
    config = parse_engine_config("main", data)
    assert isinstance(config, BatchKnobs)
    assert (config.is_launched, config.max_concurrent, config.batch_limit) == (False, 5, 3)
    assert parse_engine_config("main", config.model_dump(exclude_none=True)) == config
    one = config.at("https://b")
    assert (one.url, one.urls, one.max_concurrent, one.batch_limit) == ("https://b", None, 3, 3)
    single = parse_engine_config("main", {**data, "urls": URLS[:1]})
    assert single.batch_limit == 5


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"url": "http://c"}, "url and urls: give one of them"),
        ({"urls": []}, "at least 1 item"),
        ({"urls": ["http://a", "http://A:80/"]}, "urls: a:80 stands there 2 times; name each"),
        ({"urls": ["http://a", "a:80"]}, "it does not begin with http://"),
        ({"urls": ["http://key@a"]}, "keys and parameters stand in no url: see api_key_env"),
        ({"memory_fraction": 0.5}, "memory_fraction: is the server's own with url; leave it out"),
        ({"kind": "llama_server"}, "urls\n  Extra inputs are not permitted"),
    ],
)
def test_urls_that_cannot_be_meant_are_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        parse_engine_config("main", {"kind": "vllm_server", "urls": URLS, **data})


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://a:8000", "a:8000"),
        ("http://Host", "host:80"),
        ("https://host", "host:443"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("https://gate/one", "gate:443/one"),
    ],
)
def test_a_replica_is_named_by_where_its_server_is(url: str, name: str) -> None:
    assert replica_name(url) == name


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "engines.main.kind is missing"),
        ({"kind": "vlm"}, "use one of .*scripted.*vllm"),
        ({"kind": "llama-server"}, 'did you mean "llama_server"'),
        ({"kind": "OLLAMA"}, 'did you mean "ollama"'),
    ],
)
def test_a_wrong_kind_is_named(data: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineConfigError, match=said):
        parse_engine_config("main", data)


@pytest.mark.parametrize("kind", ["nowhere:Engine", "json:NoSuchClass", "json:", ":x"])
def test_an_own_class_that_cannot_be_had_is_named(kind: str) -> None:
    with pytest.raises(EngineConfigError, match=r"^engines.main: kind .* cannot be imported"):
        check_engine("main", parse_engine_config("main", {"kind": kind}))


def test_an_own_class_is_built_with_its_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    config = parse_engine_config("mine", {"kind": "own_engine:DiceEngine", "max_concurrent": 3})
    check_engine("mine", config)
    engine = build_engine("mine", config, log_dir=tmp_path, stall_seconds=1, restart_limit=0)
    assert isinstance(engine, Limited)
    assert (engine.name, engine.limits.max_concurrent) == ("mine", 3)


def a_model(folder: Path, **changes: Any) -> dict[str, Any]:
    """A model directory that only lacks what `changes` take away (None) or replace."""
    settings = {
        "max_position_embeddings": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
    }
    files = {
        "config.json": json.dumps(settings),
        "model.safetensors": "weights",
        "tokenizer.json": "{}",
    } | changes
    folder.mkdir()
    for name, content in files.items():
        if content is not None:
            (folder / name).write_text(content)
    return {"kind": "vllm", "model": str(folder)}


@pytest.fixture
def _cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.vllm_config.installed_build", lambda: VllmBuild("0.32.0", "cpu"))


@pytest.mark.usefixtures("_cpu_build")
@pytest.mark.parametrize(
    ("changes", "knobs", "said"),
    [
        ({"config.json": None}, {}, "has no config.json"),
        ({"config.json": "{"}, {}, "config.json' cannot be read"),
        ({"model.safetensors": None}, {}, "has no weights"),
        ({"tokenizer.json": None}, {}, "has no tokenizer.json"),
        ({}, {"context_tokens": 2048}, "context_tokens = 2048 is more than the 1024"),
        ({}, {"context_tokens": 512}, "tokenizer.json"),
        ({}, {"block_tokens": 16}, "block_tokens = 16.*multiples of 32"),
        ({}, {"device": "cuda"}, r"built for cpu.*\[gpu\]"),
    ],
)
def test_a_model_directory_is_checked_before_a_start(
    tmp_path: Path, changes: dict[str, Any], knobs: dict[str, Any], said: str
) -> None:
    data = a_model(tmp_path / "model", **changes) | knobs
    with pytest.raises(EngineConfigError, match=said) as caught:
        check_engine("main", parse_engine_config("main", data))
    assert str(caught.value).startswith("engines.main: ")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("_cpu_build")
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("/no/such/model", "no such directory"),
        ("nothing", "no such directory"),
        ("./model.gguf", "no such file"),
        ("someone/some-model-nobody-has", "HF_HUB_OFFLINE"),
    ],
)
def test_a_missing_model_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, said: str
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(EngineConfigError, match=said):
        check_engine("main", parse_engine_config("main", {"kind": "vllm", "model": model}))


def test_vllm_that_is_not_installed_is_named_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.vllm_config.installed_build", lambda: None)
    with pytest.raises(EngineConfigError, match="vllm is not installed: `make setup`"):
        check_engine("main", parse_engine_config("main", {"kind": "vllm"}))


@pytest.mark.usefixtures("_cpu_build")
def test_an_argument_that_vllm_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "serving.vllm_config.vllm_argument_names", lambda: frozenset({"max_logprobs"})
    )
    data = {"kind": "vllm", "extra_args": {"max_logprob": 3}}
    with pytest.raises(EngineConfigError, match=r"extra_args.max_logprob: .*no such argument"):
        check_engine("main", parse_engine_config("main", data))


@pytest.mark.usefixtures("_cpu_build", "bfloat16_cpu")
def test_a_cache_too_small_for_one_context_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serving.vllm_config.check_model", lambda model: None)
    monkeypatch.setattr("serving.vllm_config.shape_of", lambda model: SHAPE)
    data = {"kind": "vllm", "kv_cache_bytes": "1KiB"}
    with pytest.raises(EngineConfigError, match=r"kv_cache_bytes = 1,024 .*at least 47,185,920"):
        check_engine("main", parse_engine_config("main", data))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float33"}, "dtype"),
        ({"seed": -1}, "seed"),
        ({"max_batched_tokens": 4, "max_concurrent": 8}, "max_batched_tokens: 4 a step"),
    ],
)
def test_what_vllm_would_refuse_is_refused_before_a_start(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        parse_engine_config("main", {"kind": "vllm", **changes})


def test_the_installed_vllm_takes_every_argument_we_name() -> None:
    known = vllm_argument_names()
    if not known:
        pytest.skip("vllm is not installed")
    assert {"model", "enable_log_requests", "max_num_queued_reqs"} <= known
    full = VllmConfig(max_batched_tokens=512, kv_dtype="fp8", dtype="float16", block_tokens=16)
    for device in ("cpu", "cuda"):
        assert engine_args(full, "somewhere", device).keys() <= known


@pytest.mark.parametrize(
    ("info", "dtype"),
    [
        ("flags\t: fpu sse2 avx2 avx512f avx512_bf16\n", "bfloat16"),
        ("flags\t: fpu avx512f amx_bf16 amx_tile\n", "bfloat16"),
        ("Features\t: fp asimd bf16 i8mm\n", "bfloat16"),
        ("flags\t: fpu sse2 avx2 fma\n", "float32"),
        (None, "float32"),
    ],
)
def test_a_cpu_computes_in_the_type_that_it_multiplies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, info: str | None, dtype: str
) -> None:
    place = tmp_path / "cpuinfo"
    if info is not None:
        place.write_text(info)
    monkeypatch.setattr("serving.config.CPU_INFO", place)
    assert cpu_dtype() == dtype
    assert engine_args(VllmConfig(), "m", "cpu")["dtype"] == dtype
    assert engine_args(VllmConfig(dtype="float16"), "m", "cpu")["dtype"] == "float16"
    assert "dtype" not in engine_args(VllmConfig(), "m", "cuda")


def test_a_cache_of_float32_holds_as_many_tokens() -> None:
    small = VllmConfig(dtype="float32", max_concurrent=4)
    assert engine_args(small, "m", "cpu", SHAPE)["kv_cache_memory_bytes"] == 46_080 * 2048 * 5
    large = VllmConfig(dtype="float32", max_concurrent=64)
    assert engine_args(large, "m", "cpu", SHAPE)["kv_cache_memory_bytes"] == 1 << 30


@pytest.mark.usefixtures("bfloat16_cpu")
def test_a_cpu_gets_blocks_that_its_attention_can_read_and_a_sized_cache() -> None:
    arguments = engine_args(VllmConfig(max_concurrent=4), "m", "cpu", SHAPE)
    assert arguments["block_size"] == 32
    assert arguments["enforce_eager"] is True
    assert arguments["kv_cache_memory_bytes"] == 23_040 * 2048 * 5
    assert "gpu_memory_utilization" not in arguments
    assert arguments["enable_logging_iteration_details"] is True
    many = engine_args(VllmConfig(max_concurrent=64), "m", "cpu", SHAPE)
    assert many["kv_cache_memory_bytes"] == 512 << 20
    long = engine_args(VllmConfig(context_tokens=8192), "m", "cpu", ModelShape(8192, 131_072))
    assert long["kv_cache_memory_bytes"] == 2 * 8192 * 131_072


@pytest.mark.parametrize(
    ("given", "chunked", "batched"),
    [
        ({}, False, 2048),
        ({"context_tokens": 4096}, False, 4096),
        ({"context_tokens": 512, "max_concurrent": 600}, False, 600),
        ({"context_tokens": 1024, "max_batched_tokens": 1024}, False, 1024),
        ({"context_tokens": 1024, "max_batched_tokens": 512}, None, 512),
    ],
)
def test_a_cpu_computes_prompts_whole_where_a_step_holds_one(
    given: dict[str, int], chunked: bool | None, batched: int
) -> None:
    """vLLM 0.32 ends there when a seeded prompt is computed in parts."""
    arguments = engine_args(VllmConfig.model_validate(given), "m", "cpu", SHAPE)
    assert arguments.get("enable_chunked_prefill") is chunked
    assert arguments["max_num_batched_tokens"] == batched
    assert "enable_chunked_prefill" not in engine_args(VllmConfig(), "m", "cuda")


def test_a_gpu_gets_vllms_own_defaults_and_a_share_of_its_memory() -> None:
    arguments = engine_args(VllmConfig(), "m", "cuda")
    assert arguments["gpu_memory_utilization"] == 0.9
    assert arguments["enforce_eager"] is False
    assert not arguments.keys() & {"block_size", "dtype", "kv_cache_memory_bytes"}
    sized = engine_args(VllmConfig.model_validate({"kv_cache_bytes": "2GiB"}), "m", "cuda")
    assert sized["kv_cache_memory_bytes"] == 2 << 30
    assert "gpu_memory_utilization" not in sized


def test_the_environment_keeps_a_small_machine_responsive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serving.vllm_config.cpu_count", lambda: 2)
    environment = engine_environment(VllmConfig(), "cpu")
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert engine_environment(VllmConfig(threads=6), "cpu")["OMP_NUM_THREADS"] == "6"
    on_gpu = engine_environment(VllmConfig(), "cuda")
    assert "OMP_NUM_THREADS" not in on_gpu
    assert (on_gpu["HF_HUB_OFFLINE"], on_gpu["TRANSFORMERS_OFFLINE"]) == ("1", "1")
