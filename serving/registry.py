"""Engines by `kind`: the one place that knows every kind."""

import difflib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from serving.config import EngineConfig, EngineConfigError, EngineKind, EngineStart
from serving.engine import Engine
from serving.limits import Limited
from serving.llama_server import LLAMA_SERVER
from serving.openai_chat import LMSTUDIO, OLLAMA, OPENAI
from serving.ray_engine import RAY
from serving.scripted import SCRIPTED
from serving.sglang import SGLANG
from serving.vllm_engine import VLLM
from serving.vllm_server import VLLM_SERVER

ENGINE_KINDS: dict[str, EngineKind] = {
    "vllm": VLLM,
    "ray": RAY,
    "vllm_server": VLLM_SERVER,
    "llama_server": LLAMA_SERVER,
    "sglang": SGLANG,
    "ollama": OLLAMA,
    "lmstudio": LMSTUDIO,
    "openai": OPENAI,
    "scripted": SCRIPTED,
}
"""Every built-in kind. A new one is its own file and one line here."""


class OwnEngineConfig(EngineConfig):
    """A user's own engine, `kind = "module:Class"`, with whatever keys its class reads."""

    model_config = ConfigDict(extra="allow", frozen=True)

    kind: str = Field(description='"module:Class", called as Class(config) with this table.')


def engine_kind(kind: str) -> EngineKind:
    """The kind of that name; raises EngineConfigError naming the known ones."""
    if ":" in kind:
        return _OWN
    if kind not in ENGINE_KINDS:
        known = ", ".join(sorted(ENGINE_KINDS))
        near = difflib.get_close_matches(kind.lower(), ENGINE_KINDS, n=1, cutoff=0.7)
        hint = f'did you mean "{near[0]}"? Else ' if near else ""
        raise EngineConfigError(
            f'kind: {kind!r} is unknown; {hint}use one of {known}, or your own as "module:Class"'
        )
    return ENGINE_KINDS[kind]


def parse_engine_config(name: str, data: Mapping[str, Any]) -> EngineConfig:
    """The checked configuration of one `[engines.<name>]` table.

    Raises pydantic.ValidationError for wrong keys and values, EngineConfigError for a missing or
    unknown kind.
    """
    kind = data.get("kind")
    if not isinstance(kind, str):
        raise EngineConfigError(f'engines.{name}.kind is missing: say for example kind = "vllm"')
    return engine_kind(kind).config_class.model_validate(dict(data))


def check_engine(name: str, config: EngineConfig) -> None:
    """Raises EngineConfigError (one line) for all that can be known before the engine starts."""
    try:
        engine_kind(config.kind).check(config)
    except EngineConfigError as error:
        raise EngineConfigError(f"engines.{name}: {error}") from error


def build_engine(
    name: str, config: EngineConfig, *, log_dir: Path, stall_seconds: float, restart_limit: int
) -> Limited:
    """The engine, not started, behind its concurrency limit and bounded queue."""
    start = EngineStart(name, log_dir, stall_seconds, restart_limit)
    engine = engine_kind(config.kind).build(start, config)
    return Limited(engine, slo_s=config.slo_seconds if config.adaptive else None)


def _own_class(config: OwnEngineConfig) -> Any:
    module_name, _, class_name = config.kind.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    # a user's own module raises what it likes
    except Exception as error:
        raise EngineConfigError(
            f"kind {config.kind!r} cannot be imported ({_one_line(error)}); is its folder on "
            "PYTHONPATH?"
        ) from error


def _check_own(config: OwnEngineConfig) -> None:
    """Makes one, so that what its constructor refuses is known before anything is written."""
    try:
        engine = _own_class(config)({"name": "check", **config.model_dump()})
    except EngineConfigError:
        raise
    except Exception as error:
        raise EngineConfigError(
            f"kind {config.kind!r} could not be made: {_one_line(error)}"
        ) from error
    missing = [name for name in _MEMBERS if not hasattr(engine, name)]
    if missing:
        raise EngineConfigError(f"kind {config.kind!r} lacks {', '.join(missing)}")


_MEMBERS = (
    "name",
    "kind",
    "version",
    "template",
    "limits",
    "restarts",
    "open",
    "generate",
    "snapshots",
    "prime",
    "close",
)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _build_own(start: EngineStart, config: OwnEngineConfig) -> Engine:
    engine: Engine = _own_class(config)({"name": start.name, **config.model_dump()})
    return engine


_OWN = EngineKind(OwnEngineConfig, _check_own, _build_own)
