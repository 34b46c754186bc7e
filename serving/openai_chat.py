"""Servers that take chat messages: any with OpenAI's /v1/chat/completions, LM Studio, Ollama.

A choice is asked for as a JSON schema, so the answer comes in the quotes of a JSON string.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from serving.chat_template import MessagesTemplate
from serving.config import EngineConfigError, EngineKind, EngineStart
from serving.dialect import (
    Call,
    Command,
    Dialect,
    Reading,
    check_choices,
    count_of,
    event,
    finish_of,
    object_of,
    part,
    read_usage,
    refuse_min_tokens,
    seconds_of,
    text_of,
)
from serving.engine import ChatPrompt, EngineUnavailable, MalformedReply, Request
from serving.http_config import HttpEngineConfig, ServerUrl, check_http
from serving.http_engine import HttpEngine, ServerKind
from serving.server_process import no_program

_BEFORE_JSON = 32
"""llama.cpp's chat endpoint lets a model open a code fence first, with white space, and hides it
from the answer; counted it is all the same."""

_SEED_MASK = 2**31 - 1
"""Several servers keep 32 bits with a sign, and JavaScript's none above 53."""

_OWN_FIELDS = (
    "model",
    "messages",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "seed",
    "temperature",
    "top_p",
    "response_format",
)
"""Of a request, or another name for one of them."""

_SERVERS_OWN = dict.fromkeys(
    (
        "max_batched_tokens",
        "kv_cache_bytes",
        "memory_fraction",
        "kv_dtype",
        "prefix_cache",
        "block_tokens",
        "dtype",
        "threads",
        "start_seconds",
        "extra_args",
    ),
    "runs already and has no such field in its protocol; set it where the server is started",
)


class ChatConfig(HttpEngineConfig):
    """What OpenAI's chat protocol can be told."""

    lacking: ClassVar[dict[str, str]] = _SERVERS_OWN
    takes_ids: ClassVar[bool] = False

    extra_body: dict[str, Any] = Field(
        default_factory=dict,
        description="Further fields of every request, such as chat_template_kwargs = "
        "{enable_thinking = false} for servers that document it.",
    )

    @field_validator("extra_body")
    @classmethod
    def _is_none_of_ours(cls, extra: dict[str, Any]) -> dict[str, Any]:
        for name in _OWN_FIELDS:
            if name in extra:
                raise ValueError(f"{name}: is set for each request; leave it out")
        return extra


class OpenAiConfig(ChatConfig):
    """Any server with OpenAI's chat protocol."""

    kind: Literal["openai"] = "openai"

    @model_validator(mode="after")
    def _has_a_server(self) -> "OpenAiConfig":
        if self.url is None:
            raise ValueError("url: is needed; an engine of this kind is not launched")
        return self


class LmStudioConfig(ChatConfig):
    """LM Studio's local server, started from its window or by `lms server start`."""

    kind: Literal["lmstudio"] = "lmstudio"
    url: ServerUrl | None = Field(
        default="http://127.0.0.1:1234", description="Of the running server."
    )


class OllamaConfig(HttpEngineConfig):
    """Ollama, running already or launched with models that it has pulled before."""

    lacking: ClassVar[dict[str, str]] = {
        "max_batched_tokens": "has no such setting; leave it out",
        "kv_cache_bytes": "sizes its cache by context_tokens and max_concurrent; leave it out",
        "memory_fraction": "sizes its cache by context_tokens and max_concurrent; leave it out",
        "prefix_cache": "keeps each slot's cache and cannot be told not to; leave it out",
        "block_tokens": "caches whole slots, not blocks; leave it out",
        "dtype": "computes in the type of the model's file; pull another tag",
        "extra_args": "takes no further arguments; it is set up by environment variables",
    }
    launch_only: ClassVar[frozenset[str]] = HttpEngineConfig.launch_only | {"binary", "kv_dtype"}
    takes_ids: ClassVar[bool] = False

    kind: Literal["ollama"] = "ollama"
    binary: str = Field(default="ollama", description="Ollama's file, or its name on PATH.")
    kv_dtype: Literal["f16", "q8_0", "q4_0"] | None = Field(
        default=None, description="Type of cached values; omitted: f16."
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description="Threads that compute; omitted: Ollama's own choice.",
    )


class OpenAiDialect(Dialect):
    """/v1/chat/completions with no field beyond OpenAI's own but `extra_body`."""

    takes_ids = False
    constraint_field = "response_format.json_schema"
    ready_path = "/v1/models"

    def __init__(self, model: str, extra_body: Mapping[str, Any] | None = None) -> None:
        self._model = model
        self._extra = dict(extra_body or {})

    def call(self, request: Request, wire_id: str) -> Call:
        refuse_min_tokens(request)
        choices = check_choices(request)
        draw = request.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "messages": _messages(request),
            "max_tokens": request.max_tokens + _json_room(choices),
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if draw.seed is not None:
            body["seed"] = draw.seed & _SEED_MASK
        if choices is not None:
            schema = {"name": "choice", "strict": True, "schema": _schema(choices)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return Call("/v1/chat/completions", {**body, **self._extra})

    def read(self, data: str, reading: Reading) -> None:
        if data == "[DONE]":
            reading.is_done = True
            return
        content = event(data)
        choices = content.get("choices", [])
        if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
            raise MalformedReply("the answer has no choices")
        for choice in choices[:1]:
            told = part(choice, "delta")
            reading.add(text_of(told, "content"))
            # thinking, by two names, is no part of the answer
            reading.thought += str(told.get("reasoning_content") or told.get("reasoning") or "")
            if choice.get("finish_reason") is not None:
                reading.finish = finish_of(choice["finish_reason"])
        read_usage(content, reading)
        if durations := part(content, "timings"):
            # of servers that are llama.cpp inside
            reading.prefill_s = seconds_of(durations, "prompt_ms", 1e-3)
            reading.decode_s = seconds_of(durations, "predicted_ms", 1e-3)

    def answer(self, request: Request, reading: Reading) -> str:
        return unwrapped(reading.text) if request.choices is not None else reading.text


class OllamaDialect(Dialect):
    """Ollama's native /api/chat: its own `format`, context and durations.

    https://github.com/ollama/ollama/blob/main/docs/api.md
    """

    takes_ids = False
    framing = "lines"
    constraint_field = "format"
    ready_path = "/api/version"
    about_paths = ("/api/version",)

    def __init__(self, config: OllamaConfig) -> None:
        self._config = config

    def call(self, request: Request, wire_id: str) -> Call:
        refuse_min_tokens(request)
        choices = check_choices(request)
        draw = request.sampling
        options: dict[str, Any] = {
            "num_ctx": self._config.context_tokens,
            "num_predict": request.max_tokens + _json_room(choices),
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            # its own defaults are others
            "top_k": 0,
            "min_p": 0.0,
            "repeat_penalty": 1.0,
        }
        if draw.seed is not None:
            options["seed"] = draw.seed & _SEED_MASK
        if self._config.threads is not None:
            options["num_thread"] = self._config.threads
        body: dict[str, Any] = {
            "model": self._config.request_model,
            "messages": _messages(request),
            "options": options,
            "stream": True,
            "think": False,
            # a prompt that is too long is to be refused, not cut
            "truncate": False,
            "shift": False,
        }
        if choices is not None:
            body["format"] = _schema(choices)
        return Call("/api/chat", body)

    def read(self, data: str, reading: Reading) -> None:
        content = event(data)
        told = part(content, "message")
        reading.add(text_of(told, "content"))
        reading.thought += str(told.get("thinking") or "")
        if content.get("done") is not True:
            return
        reason = content.get("done_reason", "stop")
        if reason == "load":
            raise EngineUnavailable("the server only loaded the model")
        reading.finish = finish_of(reason)
        reading.prompt = count_of(content, "prompt_eval_count")
        reading.completion = count_of(content, "eval_count")
        reading.prefill_s = seconds_of(content, "prompt_eval_duration", 1e-9)
        reading.decode_s = seconds_of(content, "eval_duration", 1e-9)
        reading.is_done = True

    def answer(self, request: Request, reading: Reading) -> str:
        return unwrapped(reading.text) if request.choices is not None else reading.text

    def about(self, texts: Sequence[str]) -> str:
        return text_of(object_of(texts[0]), "version") or "unknown"


def unwrapped(text: str) -> str:
    """The string that a JSON text is; one that is none, or was cut, stands as far as it came."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return text.lstrip().removeprefix('"')
    return content if isinstance(content, str) else text


def _json_room(choices: Sequence[str] | None) -> int:
    """Bytes, and so tokens at most, that a choice needs besides as a JSON string: its quotes,
    whatever a server may escape, and what may come before it."""
    if choices is None:
        return 0
    return _BEFORE_JSON + max(len(json.dumps(one)) - len(one.encode()) for one in choices)


def _schema(choices: Sequence[str]) -> dict[str, Any]:
    return {"type": "string", "enum": list(choices)}


def _messages(request: Request) -> list[dict[str, str]]:
    assert isinstance(request.prompt, ChatPrompt)
    return [{"role": role, "content": content} for role, content in request.prompt.messages]


def ollama_command(config: OllamaConfig, port: int) -> Command:
    """`ollama serve`; its settings are environment variables."""
    environment = {
        "OLLAMA_HOST": f"127.0.0.1:{port}",
        "OLLAMA_NUM_PARALLEL": str(config.max_concurrent),
        "OLLAMA_CONTEXT_LENGTH": str(config.context_tokens),
        "OLLAMA_MAX_LOADED_MODELS": "1",
        "OLLAMA_KEEP_ALIVE": "-1",
    }
    if config.kv_dtype is not None:
        # which it heeds with flash attention alone
        environment |= {"OLLAMA_KV_CACHE_TYPE": config.kv_dtype, "OLLAMA_FLASH_ATTENTION": "1"}
    return Command((config.binary, "serve"), environment)


def check_ollama(config: OllamaConfig) -> None:
    """Raises EngineConfigError for all that can be known before a start."""
    check_http(config)
    if config.is_launched and shutil.which(config.binary) is None:
        raise EngineConfigError(
            f"{config.binary}: {no_program(config.binary)}: install Ollama from "
            "https://ollama.com, or name a running server by url"
        )


def _build_openai(start: EngineStart, config: OpenAiConfig) -> HttpEngine:
    dialect = OpenAiDialect(config.request_model, config.extra_body)
    return HttpEngine(start, config, ServerKind(dialect, lambda: MessagesTemplate(config.model)))


def _build_lmstudio(start: EngineStart, config: LmStudioConfig) -> HttpEngine:
    dialect = OpenAiDialect(config.request_model, config.extra_body)
    return HttpEngine(start, config, ServerKind(dialect, lambda: MessagesTemplate(config.model)))


def _build_ollama(start: EngineStart, config: OllamaConfig) -> HttpEngine:
    def launch(port: int) -> Command:
        return ollama_command(config, port)

    kind = ServerKind(
        OllamaDialect(config),
        lambda: MessagesTemplate(config.model),
        launch if config.is_launched else None,
    )
    return HttpEngine(start, config, kind)


OPENAI = EngineKind(OpenAiConfig, check_http, _build_openai)
LMSTUDIO = EngineKind(LmStudioConfig, check_http, _build_lmstudio)
OLLAMA = EngineKind(OllamaConfig, check_ollama, _build_ollama)
