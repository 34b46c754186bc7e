"""Tables of engines that Ray replicates: what they mean together, and what is refused and how."""

import importlib.metadata
import importlib.util
import tomllib
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from arena import cli, config
from serving import (
    EngineConfigError,
    EngineKind,
    ScriptedConfig,
    VllmConfig,
    VllmEngine,
    check_engine,
    parse_engine_config,
)
from serving.ray_config import (
    HOSTED,
    RayConfig,
    check_ray,
    installed_ray,
    is_cluster_address,
    own_token_environment,
    token_environment,
)
from serving.vllm_config import VllmBuild

SCRIPTED: dict[str, Any] = {"kind": "scripted", "max_concurrent": 5, "max_queued": 7}
VLLM: dict[str, Any] = {"kind": "vllm"}

PLAYERS = """
[[agents]]
name = "llm"
kind = "llm"
engine = "main"
[[agents]]
name = "other"
kind = "random"
"""


def ray(**knobs: Any) -> RayConfig:
    parsed = parse_engine_config("main", {"kind": "ray", "engine": SCRIPTED, **knobs})
    assert isinstance(parsed, RayConfig)
    return parsed


def run_with(table: str) -> str:
    return f'name = "fleet"\n[engines.main]\nkind = "ray"\n{table}\n{PLAYERS}'


def test_defaults() -> None:
    parsed = ray()
    assert (parsed.address, parsed.is_local) == ("local", True)
    assert (parsed.replicas, parsed.max_replicas, parsed.most_replicas) == (2, None, 2)
    assert (parsed.cpus_per_replica, parsed.gpus_per_replica, parsed.gpus) == (1, None, 0)
    assert (parsed.lease_seconds, parsed.start_seconds) == (60.0, 900.0)
    assert parsed.engine == ScriptedConfig(max_concurrent=5, max_queued=7)
    assert parsed.model == "smollm2-135m"


@pytest.mark.parametrize(
    ("knobs", "replicas"), [({}, 2), ({"replicas": 3}, 3), ({"replicas": 2, "max_replicas": 4}, 4)]
)
def test_what_is_not_said_of_all_is_what_they_are_together(
    knobs: dict[str, int], replicas: int
) -> None:
    parsed = ray(**knobs, engine={**SCRIPTED, "context_tokens": 512})
    assert parsed.context_tokens == 512
    assert (parsed.max_concurrent, parsed.max_queued) == (5 * replicas, 7 * replicas)
    assert (parsed.batch_limit, parsed.most_replicas) == (5, replicas)


def test_sizes_follow_defaults_of_the_hosted_engine_and_one_that_is_made_already() -> None:
    assert (ray(engine=VLLM).max_concurrent, ray(engine=VLLM).max_queued) == (32, 128)
    made = RayConfig(engine=ScriptedConfig(max_concurrent=3, context_tokens=128), replicas=4)
    assert (made.max_concurrent, made.context_tokens) == (12, 128)


def test_what_is_said_of_all_stands() -> None:
    parsed = ray(max_concurrent=6, max_queued=0, adaptive=True, slo_seconds=2.5)
    assert (parsed.max_concurrent, parsed.max_queued, parsed.batch_limit) == (6, 0, 5)
    assert (parsed.adaptive, parsed.slo_seconds, parsed.engine.adaptive) == (True, 2.5, False)


def test_every_key_is_read() -> None:
    knobs = {
        "address": "ray://head:10001",
        "replicas": 3,
        "max_replicas": 6,
        "gpus_per_replica": 0.5,
        "cpus_per_replica": 2.5,
        "lease_seconds": 30.0,
        "start_seconds": 60.0,
    }
    parsed = ray(**knobs)
    assert {key: getattr(parsed, key) for key in knobs} == knobs
    assert (parsed.gpus, parsed.is_local) == (0.5, False)


def test_replicas_of_a_cuda_build_take_the_gpus_of_one_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = {**VLLM, "tensor_parallel": 4}
    for build, gpus in ((VllmBuild("0.32.0", "cuda"), 4.0), (VllmBuild("0.32.0", "cpu"), 0)):
        monkeypatch.setattr("serving.ray_config.installed_build", lambda found=build: found)
        assert ray(engine=engine).gpus == gpus
        assert ray(engine=engine, gpus_per_replica=1.0).gpus == 1.0
        assert ray().gpus == 0
    monkeypatch.setattr("serving.ray_config.installed_build", lambda: None)
    assert ray(engine=engine).gpus == 0


@pytest.mark.parametrize("address", ["local", "auto", "head:6379", "10.0.0.7:6379", "ray://h-1:1"])
def test_addresses(address: str) -> None:
    assert ray(address=address).address == address
    assert is_cluster_address(address) == (address != "local")


@pytest.mark.parametrize(
    "address",
    ["", "head", "http://head:6379", "me:key@head:6379", "head:6379/x", "h:99999", "ray://head"],
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValidationError, match='write "local", "auto", "host:6379" or "ray://host'):
        ray(address=address)


def test_a_dump_reads_as_the_same() -> None:
    parsed = ray(replicas=3, max_replicas=5, engine={**SCRIPTED, "latency_seconds": [0.5, 1.0]})
    for dump in (parsed.model_dump(), parsed.model_dump(exclude_none=True)):
        assert RayConfig.model_validate(dump) == parsed
    assert RayConfig.model_validate_json(parsed.model_dump_json()) == parsed


@pytest.mark.parametrize(
    "table",
    [
        'engine = {kind = "scripted", max_concurrent = 3, latency_seconds = [0.5, 1.0]}',
        'engine = {kind = "vllm", kv_cache_bytes = "512MiB"}\nreplicas = 3\nmax_replicas = 4\n'
        'gpus_per_replica = 0.5\naddress = "head:6379"',
    ],
)
def test_the_config_that_a_run_keeps_reads_as_the_same(table: str) -> None:
    first = config.parse(tomllib.loads(run_with(table)))
    again = config.parse(tomllib.loads(first.to_toml()))
    assert again.engine("main") == first.engine("main")
    assert again.digest == first.digest


REFUSED = [
    ("", "engine: is missing; add it"),
    (
        'engine = "scripted"',
        "engine: is 'scripted'; write a table of keys, such as {kind = \"vllm\"}",
    ),
    ("engine = {max_queued = 3}", 'engine.kind: is missing; say for example kind = "vllm"'),
    (
        'engine = {kind = "foo"}',
        "engine.kind: a replica hosts no 'foo'; use scripted or vllm",
    ),
    (
        'engine = {kind = ["vllm"]}',
        "engine.kind: a replica hosts no ['vllm']; use scripted or vllm",
    ),
    (
        'engine = {kind = "ray", engine = {kind = "vllm"}}',
        "engine.kind: a replica hosts no 'ray'; use scripted or vllm",
    ),
    (
        'engine = {kind = "openai", url = "http://me:key@there"}',
        "engine.kind: a replica hosts no 'openai'; use scripted or vllm",
    ),
    (
        'engine = {kind = "scripted", max_qeued = 3}',
        'engine.max_qeued: unknown key; did you mean "max_queued"?',
    ),
    (
        'engine = {kind = "vllm", dtpye = "half"}',
        'engine.dtpye: unknown key; did you mean "dtype"?',
    ),
    (
        'engine = {kind = "scripted", faults = [{kind = "die", when = 3}]}',
        "engine.faults.0.when: unknown key; `arena config reference` lists the known ones",
    ),
    (
        'engine = {kind = "scripted", max_queued = "x"}',
        "engine.max_queued: is 'x'; input should be a valid integer",
    ),
    (
        'engine = {kind = "scripted", context_tokens = 3}',
        "engine.context_tokens: is 3; input should be greater than or equal to 64",
    ),
    (
        'engine = {kind = "scripted", kv_cache_bytes = 5}',
        "engine.kv_cache_bytes: an engine of kind 'scripted' computes nothing, so this has no "
        "meaning",
    ),
    (
        'engine = {kind = "scripted", adaptive = true}',
        "engine.adaptive: belongs beside `replicas`, for it is one queue",
    ),
    (
        'engine = {kind = "scripted"}\nreplicsa = 3',
        'replicsa: unknown key; did you mean "replicas"?',
    ),
    (
        'engine = {kind = "scripted"}\nreplicas = 0',
        "replicas: is 0; input should be greater than or equal to 1",
    ),
    (
        'engine = {kind = "scripted"}\nreplicas = "two"',
        "replicas: is 'two'; input should be a valid integer",
    ),
    (
        'engine = {kind = "scripted"}\nreplicas = 3\nmax_replicas = 2',
        "max_replicas: 2 are fewer than replicas = 3",
    ),
    (
        'engine = {kind = "scripted"}\nlease_seconds = 1',
        "lease_seconds: is 1; input should be greater than or equal to 5",
    ),
    (
        'engine = {kind = "scripted"}\ncontext_tokens = 100',
        "context_tokens: is the hosted engine's, which has 2048; say it as engine.context_tokens",
    ),
    (
        'engine = {kind = "scripted"}\nmodel = "m"',
        "model: an engine of kind 'ray' hosts another: put it into its table, as engine.model",
    ),
    (
        'engine = {kind = "scripted"}\naddress = "me:key@head:6379"',
        'address: write "local", "auto", "host:6379" or "ray://host:10001"; keys and paths stand '
        "in no address",
    ),
]


@pytest.mark.parametrize(("table", "told"), REFUSED)
def test_a_mistake_is_one_line_that_names_its_place(table: str, told: str) -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.parse(tomllib.loads(run_with(table)))
    assert str(caught.value) == f"engines.main.{told}"


@pytest.mark.parametrize("knob", sorted(RayConfig.lacking))
def test_knobs_of_the_hosted_engine_are_refused_beside_it(knob: str) -> None:
    assert knob in VllmConfig.model_fields
    with pytest.raises(ValidationError, match=f"put it into its table, as engine.{knob}"):
        ray(**{knob: 1})


def test_the_command_line_says_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(run_with('engine = {kind = "foo"}'))
    assert cli.main(["validate", str(file)]) == 2
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    assert line.startswith("arena: ")
    assert line.endswith("engines.main.engine.kind: a replica hosts no 'foo'; use scripted or vllm")
    assert told.out == ""


def test_what_can_be_known_before_a_start_is_said_so_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.ray_config.installed_ray", lambda: None)
    file = tmp_path / "fleet.toml"
    file.write_text(run_with('engine = {kind = "scripted"}'))
    assert cli.main(["validate", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("arena: engines.main: ")
    assert line.endswith('pip install "boardfleet[ray]"')


@pytest.fixture
def with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.ray_config.installed_ray", lambda: "2.60.0")


def without_module(missing: str) -> Callable[[str], ModuleSpec | None]:
    find = importlib.util.find_spec
    anything = find("json")
    return lambda name: None if name == missing else anything


@pytest.mark.parametrize("missing", ["ray", "starlette"])
def test_ray_that_cannot_serve_is_not_installed(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"2.60.0 of {name}")
    monkeypatch.setattr(importlib.util, "find_spec", without_module("nothing"))
    assert installed_ray() == "2.60.0 of ray"
    monkeypatch.setattr(importlib.util, "find_spec", without_module(missing))
    assert installed_ray() is None
    with pytest.raises(EngineConfigError, match=r'not installed: pip install "boardfleet\[ray\]"'):
        check_ray(ray())


@pytest.mark.parametrize("version", ["2.9.3", "2.59.1", "1.13.0"])
def test_ray_without_the_router_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.ray_config.installed_ray", lambda: version)
    with pytest.raises(EngineConfigError, match=f"Ray {version} is installed, .* with 2.60: pip "):
        check_ray(ray())


@pytest.mark.usefixtures("with_ray")
@pytest.mark.parametrize("version", ["2.60.0", "2.61.0rc1", "3.0.0.dev0"])
def test_releases_that_have_it(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.ray_config.installed_ray", lambda: version)
    check_ray(ray(address="auto"))


@pytest.mark.usefixtures("with_ray")
def test_more_engines_than_processors_are_refused_here_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serving.ray_config.cpu_count", lambda: 2)
    monkeypatch.setattr("serving.ray_config.installed_build", lambda: VllmBuild("0.32.0", "cpu"))
    unchecked = EngineKind(VllmConfig, lambda _: None, VllmEngine)
    monkeypatch.setitem(HOSTED, "vllm", unchecked)
    check_ray(ray(engine=VLLM, replicas=2))
    for knobs in ({"replicas": 3}, {"replicas": 1, "max_replicas": 3}):
        with pytest.raises(EngineConfigError, match="replicas: 3 engines on the 2 processors"):
            check_ray(ray(engine=VLLM, **knobs))
        check_ray(ray(engine=VLLM, address="auto", **knobs))
        check_ray(ray(engine=VLLM, gpus_per_replica=0.25, **knobs))
        check_ray(ray(**knobs))


@pytest.mark.usefixtures("with_ray")
def test_what_the_hosted_engine_refuses_here_is_told_as_its_own() -> None:
    lacking = {"kind": "scripted", "model": "no-such-model"}
    with pytest.raises(EngineConfigError, match=r"^engines\.main: engine: .*no-such-model"):
        check_engine("main", ray(engine=lacking))
    with pytest.raises(EngineConfigError, match=r"^engines\.main: model.*no-such-model"):
        check_engine("main", ray(engine=lacking, address="auto"))


# tokens


@pytest.fixture
def no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Ray would keep one; there is none, and the environment names none."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "auth_token"
    monkeypatch.setattr("serving.ray_config._TOKEN_FILE", file)
    return file


def test_a_token_is_shown_where_there_is_one(
    no_token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert token_environment() == {}
    no_token.write_text("secret")
    assert token_environment() == {"RAY_AUTH_MODE": "token"}
    no_token.unlink()
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/elsewhere")
    assert token_environment() == {"RAY_AUTH_MODE": "token"}


@pytest.mark.usefixtures("no_token")
def test_a_cluster_of_ours_has_a_token_of_its_own() -> None:
    one, other = own_token_environment(), own_token_environment()
    assert one["RAY_AUTH_MODE"] == "token"
    assert len(one["RAY_AUTH_TOKEN"]) == 64
    assert one["RAY_AUTH_TOKEN"] != other["RAY_AUTH_TOKEN"]


def test_a_mode_of_the_environment_is_no_reason_to_share_a_token(
    no_token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_token.write_text("secret")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert len(own_token_environment()["RAY_AUTH_TOKEN"]) == 64


def test_whoever_chose_a_mode_is_left_alone(
    no_token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_token.write_text("secret")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert token_environment() == own_token_environment() == {}
