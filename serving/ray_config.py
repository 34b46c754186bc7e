"""Replicas of an engine on Ray: their knobs. Nothing here imports ray: that takes seconds."""

import importlib.metadata
import importlib.util
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from serving.config import EngineConfig, EngineConfigError, EngineKind, cpu_count
from serving.models import check_model
from serving.scripted import SCRIPTED, ScriptedConfig
from serving.vllm_config import VllmConfig, installed_build
from serving.vllm_engine import VLLM

LOCAL = "local"
"""A cluster of this machine alone, started for the run."""

CLUSTER_ADDRESSES = '"auto", "host:6379" or "ray://host:10001"'
"""How one is written that runs already."""

HOSTED: dict[str, EngineKind] = {"vllm": VLLM, "scripted": SCRIPTED}
"""Kinds that a replica can hold: the very ones that run without Ray."""

RAY_FITS = (2, 60)
"""The release whose request router ours is made for; later ones of the same year may do."""

DEFAULT_REPLICAS = 2
MOST_REPLICAS = 4096

MOST_PORT = 65_535

_TOKEN_FILE = Path("~/.ray/auth_token")


def _is_table_of_a_hosted_kind(engine: object) -> object:
    if isinstance(engine, EngineConfig):
        return engine
    if not isinstance(engine, Mapping):
        raise ValueError('write a table of keys, such as {kind = "vllm"}')
    if "kind" not in engine:
        raise ValueError('kind: is missing; say for example kind = "vllm"')
    kind = engine["kind"]
    if not isinstance(kind, str) or kind not in HOSTED:
        known = " or ".join(sorted(HOSTED))
        raise ValueError(f"kind: a replica hosts no {kind!r}; use {known}")
    return engine


HostedConfig = Annotated[
    Annotated[VllmConfig | ScriptedConfig, Field(discriminator="kind")],
    BeforeValidator(_is_table_of_a_hosted_kind),
]
_HOSTED_CONFIG: TypeAdapter[VllmConfig | ScriptedConfig] = TypeAdapter(HostedConfig)


def is_cluster_address(address: str) -> bool:
    """Whether a cluster that runs already can have this address (`CLUSTER_ADDRESSES`)."""
    found = re.fullmatch(r"(?:ray://)?[\w.-]+:(\d{1,5})", address)
    return address == "auto" or (found is not None and int(found[1]) <= MOST_PORT)


class RayConfig(EngineConfig):
    """Replicas of one engine on a Ray cluster; every match stays at the replica that caches it."""

    lacking: ClassVar[dict[str, str]] = {
        knob: f"hosts another: put it into its table, as engine.{knob}"
        for knob in (
            "model",
            "device",
            "max_batched_tokens",
            "kv_cache_bytes",
            "memory_fraction",
            "kv_dtype",
            "prefix_cache",
            "block_tokens",
            "dtype",
            "threads",
            "tensor_parallel",
        )
    }

    kind: Literal["ray"] = "ray"
    engine: HostedConfig = Field(
        description="What every replica hosts: a table like one of `engines`, of kind vllm or "
        "scripted. Its `max_concurrent` and `max_queued` are one replica's.",
    )
    address: str = Field(
        default=LOCAL,
        description="local: a cluster of this machine, started for the run. auto: the one that "
        "this machine belongs to. host:port: the same by its head. ray://host:10001: one that it "
        "does not belong to.",
    )
    replicas: int = Field(
        default=DEFAULT_REPLICAS,
        ge=1,
        le=MOST_REPLICAS,
        strict=True,
        description="Engines; with max_replicas the fewest.",
    )
    max_replicas: int | None = Field(
        default=None,
        ge=1,
        le=MOST_REPLICAS,
        strict=True,
        description="Ray adds replicas up to so many while they are busy, and takes them away "
        "again; omitted: there are always `replicas`.",
    )
    gpus_per_replica: float | None = Field(
        default=None,
        ge=0,
        strict=True,
        description="GPUs that Ray sets aside for each; omitted: tensor_parallel where vLLM's "
        "build is for CUDA, else 0.",
    )
    cpus_per_replica: float = Field(
        default=1,
        ge=0,
        strict=True,
        description="Processors that Ray sets aside for each.",
    )
    lease_seconds: float = Field(
        default=60.0,
        ge=5,
        strict=True,
        description="On a cluster that outlives the run: replicas that no arena has asked for so "
        "long end themselves; before they are asked first, after start_seconds.",
    )
    start_seconds: float = Field(
        default=900.0,
        gt=0,
        strict=True,
        description="Until every replica must be ready.",
    )

    @model_validator(mode="before")
    @classmethod
    def _sizes_follow_the_replicas(cls, data: Any) -> Any:
        """What is not said of all replicas together is what they are together."""
        if not isinstance(data, dict):
            return data
        try:
            engine = _HOSTED_CONFIG.validate_python(data.get("engine"))
        except ValidationError:
            return data  # told below, where it stands
        count = data.get("max_replicas") or data.get("replicas", DEFAULT_REPLICAS)
        sizes = {"context_tokens": engine.context_tokens}
        if isinstance(count, int) and count > 0:
            sizes["max_concurrent"] = engine.max_concurrent * count
            sizes["max_queued"] = engine.max_queued * count
        return {**sizes, **data, "engine": engine}

    @field_validator("address")
    @classmethod
    def _is_address(cls, address: str) -> str:
        if address != LOCAL and not is_cluster_address(address):
            raise ValueError(
                f'write "{LOCAL}", {CLUSTER_ADDRESSES}; keys and paths stand in no address'
            )
        return address

    @model_validator(mode="after")
    def _fits_together(self) -> "RayConfig":
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"max_replicas: {self.max_replicas} are fewer than replicas = {self.replicas}"
            )
        if self.context_tokens != self.engine.context_tokens:
            raise ValueError(
                f"context_tokens: is the hosted engine's, which has {self.engine.context_tokens}; "
                "say it as engine.context_tokens"
            )
        if self.engine.adaptive:
            raise ValueError("engine.adaptive: belongs beside `replicas`, for it is one queue")
        return self

    @property
    def batch_limit(self) -> int:
        return min(self.max_concurrent, self.engine.max_concurrent)

    @property
    def computing(self) -> EngineConfig:
        return self.engine

    @property
    def is_replicated(self) -> bool:
        return True

    def with_queue(self, max_queued: int) -> Self:
        engine = self.engine.with_queue(max_queued)
        return self.model_copy(update={"max_queued": max_queued, "engine": engine})

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.replicas

    @property
    def model(self) -> str:
        """Of the engine that is hosted."""
        return self.engine.model

    @property
    def is_local(self) -> bool:
        return self.address == LOCAL

    @property
    def is_outside(self) -> bool:
        """Whether the arena's machine is none of the cluster's."""
        return self.address.startswith("ray://")

    @property
    def gpus(self) -> float:
        """That Ray sets aside for each replica."""
        if self.gpus_per_replica is not None:
            return self.gpus_per_replica
        build = installed_build()
        if not isinstance(self.engine, VllmConfig) or build is None or build.device == "cpu":
            return 0
        return float(self.engine.tensor_parallel)


def check_ray(config: RayConfig) -> None:
    """Raises EngineConfigError for all that can be known before a start."""
    version = installed_ray()
    if version is None:
        raise EngineConfigError(
            'kind = "ray" needs Ray, which is not installed: pip install "boardfleet[ray]"'
        )
    if not has_router(version):
        wanted = ".".join(map(str, RAY_FITS))
        raise EngineConfigError(
            f"Ray {version} is installed, and its request router came with {wanted}: pip install "
            '--upgrade "boardfleet[ray]"'
        )
    if config.is_local:
        _check_here(config)
    else:
        check_model(config.model)


def _check_here(config: RayConfig) -> None:
    """The replicas are to run on this machine."""
    try:
        HOSTED[config.engine.kind].check(config.engine)
    except EngineConfigError as error:
        raise EngineConfigError(f"engine: {error}") from error
    cores = cpu_count()
    if isinstance(config.engine, VllmConfig) and config.most_replicas > cores and not config.gpus:
        raise EngineConfigError(
            f"replicas: {config.most_replicas} engines on the {cores} processors of this machine "
            'would fight over them: give fewer, or another address than "local"'
        )


def installed_ray() -> str | None:
    """The version of Ray in this environment, if it can serve; None where it cannot."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("starlette") is None:
        return None
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return None


def has_router(version: str) -> bool:
    """Whether that release of Ray has the request router that ours is made for."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= RAY_FITS


def token_environment() -> dict[str, str]:
    """For a process that joins a cluster: `ray start` asks for tokens where it finds one, but Ray
    shows its own only if it is told to. Whoever set RAY_AUTH_MODE is left alone."""
    if "RAY_AUTH_MODE" in os.environ:
        return {}
    is_named = not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}.isdisjoint(os.environ)
    return {"RAY_AUTH_MODE": "token"} if is_named or _TOKEN_FILE.expanduser().exists() else {}


def own_token_environment() -> dict[str, str]:
    """For a process that starts a cluster of its own: a token that stands in no file, unless
    whoever set RAY_AUTH_MODE wants none."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
