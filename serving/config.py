"""What every engine's configuration has in common, and what a kind of engine is."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from serving.engine import Engine

PACKAGED_MODEL = "smollm2-135m"
"""The model that needs no download hub: its weights come inside a Python package."""


class EngineConfigError(ValueError):
    """An engine that cannot be started as configured. One line: what is wrong, and the remedy."""


class EngineConfig(BaseModel):
    """Knobs that mean the same for every engine; a kind that lacks one refuses it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    lacking: ClassVar[dict[str, str]] = {}
    """Knobs of other kinds that this kind has not, each with the reason."""
    takes_ids: ClassVar[bool] = True
    """Prompts are token ids, which can be continued, and no chat messages. A user's own kind says
    it by its template."""

    kind: str = Field(description="The kind of engine.")
    context_tokens: int = Field(
        default=2048,
        ge=64,
        strict=True,
        description="Tokens of prompt and answer together, per request.",
    )
    max_concurrent: int = Field(
        default=16,
        ge=1,
        strict=True,
        description="Requests inside the engine at once: the largest batch.",
    )
    max_queued: int = Field(
        default=64,
        ge=0,
        strict=True,
        description="Requests that may wait before the engine; one more is refused at once.",
    )
    adaptive: bool = Field(
        default=False,
        strict=True,
        description="Take only as many requests as are answered within `slo_seconds`, by the rate "
        "as it is measured; refuse others at once.",
    )
    slo_seconds: float = Field(
        default=1.0,
        gt=0,
        le=86_400,
        strict=True,
        description="With `adaptive`: seconds from asking to the answer.",
    )

    @property
    def batch_limit(self) -> int:
        """Requests that one batch may hold: where there are replicas, of one of them."""
        return self.max_concurrent

    @property
    def computing(self) -> "EngineConfig":
        """Of what computes: this engine, or what each of its replicas hosts."""
        return self

    @property
    def is_replicated(self) -> bool:
        """Whether it is replicas, to which another can be added."""
        return False

    def with_queue(self, max_queued: int) -> Self:
        """The same engine with another bounded queue."""
        return self.model_copy(update={"max_queued": max_queued})

    @model_validator(mode="before")
    @classmethod
    def _refuse_lacking(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for knob, reason in cls.lacking.items():
                if knob in data:
                    raise ValueError(f"{knob}: an engine of kind {data.get('kind')!r} {reason}")
        return data


@dataclass(frozen=True, slots=True)
class EngineStart:
    """What a run tells an engine it builds."""

    name: str
    log_dir: Path
    """Existing or to be made; logs and process records of engines stand here."""
    stall_seconds: float
    restart_limit: int


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One kind of engine: how it is configured, checked and built."""

    config_class: type[EngineConfig]
    check: Callable[[Any], None]
    """Takes the config; raises EngineConfigError for all that can be known before a start."""
    build: Callable[[EngineStart, Any], Engine]
    """Takes the config; starts nothing."""


CpuDtype = Literal["bfloat16", "float32"]

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Of x86 and Arm processors that multiply bfloat16 themselves, as /proc/cpuinfo has them."""
CPU_INFO = Path("/proc/cpuinfo")


def cpu_dtype() -> CpuDtype:
    """What models compute with on this machine's processor.

    One that cannot multiply bfloat16 itself is several times as fast with float32.
    """
    try:
        known = set(CPU_INFO.read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return "float32"
    return "bfloat16" if known & BF16_FLAGS else "float32"


def cpu_count() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
