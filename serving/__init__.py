"""Engines: a prompt in, text and timings out. Knows no games and no agents."""

from serving.config import PACKAGED_MODEL, EngineConfig, EngineConfigError, EngineKind, EngineStart
from serving.engine import (
    ChatPrompt,
    Engine,
    EngineDead,
    EngineError,
    EngineLimits,
    EngineSnapshot,
    EngineStalled,
    EngineUnavailable,
    Finish,
    MalformedReply,
    Overloaded,
    Prompt,
    PromptParts,
    Reply,
    Request,
    RequestRejected,
    Sampling,
    Template,
    Timings,
    TokenPrompt,
    Usage,
)
from serving.limits import Limited
from serving.models import ResolvedModel, local_directory, resolve
from serving.process import end_survivors
from serving.registry import (
    ENGINE_KINDS,
    build_engine,
    check_engine,
    engine_kind,
    parse_engine_config,
)
from serving.scripted import ScriptedConfig, ScriptedEngine, ScriptedFault
from serving.template import ModelTemplate, TemplateError, load_template
from serving.vllm_config import VllmConfig
from serving.vllm_engine import VllmEngine

__all__ = [
    "ENGINE_KINDS",
    "PACKAGED_MODEL",
    "ChatPrompt",
    "Engine",
    "EngineConfig",
    "EngineConfigError",
    "EngineDead",
    "EngineError",
    "EngineKind",
    "EngineLimits",
    "EngineSnapshot",
    "EngineStalled",
    "EngineStart",
    "EngineUnavailable",
    "Finish",
    "Limited",
    "MalformedReply",
    "ModelTemplate",
    "Overloaded",
    "Prompt",
    "PromptParts",
    "Reply",
    "Request",
    "RequestRejected",
    "ResolvedModel",
    "Sampling",
    "ScriptedConfig",
    "ScriptedEngine",
    "ScriptedFault",
    "Template",
    "TemplateError",
    "Timings",
    "TokenPrompt",
    "Usage",
    "VllmConfig",
    "VllmEngine",
    "build_engine",
    "check_engine",
    "end_survivors",
    "engine_kind",
    "load_template",
    "local_directory",
    "parse_engine_config",
    "resolve",
]
