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
    HasMetrics,
    MalformedReply,
    Overloaded,
    Prompt,
    PromptParts,
    Reply,
    Request,
    RequestRejected,
    Sampling,
    Template,
    ThinkingTemplate,
    Timings,
    TokenPrompt,
    Usage,
)
from serving.fake_model import FakeConfig
from serving.limits import Limited, is_recordable
from serving.llama_server import LlamaServerConfig
from serving.models import ResolvedModel, local_directory, resolve
from serving.process import end_survivors, find_program, guarded, kill_group
from serving.registry import (
    ENGINE_KINDS,
    build_engine,
    check_engine,
    engine_kind,
    parse_engine_config,
)
from serving.remedies import EngineFacts, Remedy
from serving.saturation import (
    SaturationConfig,
    Verdict,
    assess,
    review,
)
from serving.scripted import ScriptedConfig, ScriptedEngine, ScriptedFault
from serving.telemetry import SPANS_S, Bucket, Meter
from serving.template import ModelTemplate, TemplateError, load_template
from serving.vllm_config import VllmConfig
from serving.vllm_engine import VllmEngine

__all__ = [
    "ENGINE_KINDS",
    "PACKAGED_MODEL",
    "SPANS_S",
    "Bucket",
    "ChatPrompt",
    "Engine",
    "EngineConfig",
    "EngineConfigError",
    "EngineDead",
    "EngineError",
    "EngineFacts",
    "EngineKind",
    "EngineLimits",
    "EngineSnapshot",
    "EngineStalled",
    "EngineStart",
    "EngineUnavailable",
    "FakeConfig",
    "Finish",
    "HasMetrics",
    "Limited",
    "LlamaServerConfig",
    "MalformedReply",
    "Meter",
    "ModelTemplate",
    "Overloaded",
    "Prompt",
    "PromptParts",
    "Remedy",
    "Reply",
    "Request",
    "RequestRejected",
    "ResolvedModel",
    "Sampling",
    "SaturationConfig",
    "ScriptedConfig",
    "ScriptedEngine",
    "ScriptedFault",
    "Template",
    "TemplateError",
    "ThinkingTemplate",
    "Timings",
    "TokenPrompt",
    "Usage",
    "Verdict",
    "VllmConfig",
    "VllmEngine",
    "assess",
    "build_engine",
    "check_engine",
    "end_survivors",
    "engine_kind",
    "find_program",
    "guarded",
    "is_recordable",
    "kill_group",
    "load_template",
    "local_directory",
    "parse_engine_config",
    "resolve",
    "review",
]
