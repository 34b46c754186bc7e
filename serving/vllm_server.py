"""vLLM behind its own HTTP server, `vllm serve`.

Prompts go to /v1/completions as token ids. The prefix cache is emptied by a salt of our own: every
request carries it, and one with another salt finds nothing that was cached before.
"""

import hashlib
import secrets
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import ValidationError, model_validator

from serving.config import EngineKind, EngineStart
from serving.dialect import (
    Call,
    Command,
    Dialect,
    Reading,
    Samples,
    Seen,
    check_choices,
    check_size,
    context_of,
    event,
    finish_of,
    model_of,
    object_of,
    part,
    read_usage,
    seconds_of,
    text_of,
)
from serving.engine import Engine, MalformedReply, Request, TokenPrompt
from serving.http_config import BatchKnobs, check_http
from serving.http_engine import ServerKind
from serving.http_replicas import build_http
from serving.models import check_model, resolve, shape_of
from serving.template import load_template
from serving.vllm_config import (
    VllmConfig,
    check_vllm,
    engine_args,
    engine_environment,
    installed_build,
)

_NOT_SERVED = ("disable_log_stats", "enable_logging_iteration_details")
"""Arguments of the embedded engine alone. The server's own figures need its statistics."""

_MODULE = "vllm.entrypoints.launchers.api_server.entry"
"""What `vllm serve` runs. The command itself asks for the metadata of a package named vllm, which
the build for CPUs has not."""


class VllmServerConfig(BatchKnobs):
    """vLLM's own HTTP server, launched for the run or running already."""

    taken_flags: ClassVar[dict[str, str]] = {
        "--model": "model",
        "--max-model-len": "context_tokens",
        "--max-num-seqs": "max_concurrent",
        "--max-num-batched-tokens": "max_batched_tokens",
        "--kv-cache-memory-bytes": "kv_cache_bytes",
        "--gpu-memory-utilization": "memory_fraction",
        "--kv-cache-dtype": "kv_dtype",
        "--enable-prefix-caching": "prefix_cache",
        "--no-enable-prefix-caching": "prefix_cache",
        "--block-size": "block_tokens",
        "--dtype": "dtype",
        "--served-model-name": "served_model",
        "--disable-log-stats": "",
    }

    kind: Literal["vllm_server"] = "vllm_server"

    @model_validator(mode="after")
    def _embedded_takes_it(self) -> "VllmServerConfig":
        try:
            self.embedded()
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
        return self

    def embedded(self) -> VllmConfig:
        """The same knobs for the embedded engine, whose checks and translation are shared."""
        return VllmConfig(
            model=self.model,
            context_tokens=self.context_tokens,
            max_concurrent=self.max_concurrent,
            device=self.device,
            max_batched_tokens=self.max_batched_tokens,
            kv_cache_bytes=self.kv_cache_bytes,
            memory_fraction=self.memory_fraction,
            kv_dtype=self.kv_dtype,
            prefix_cache=self.prefix_cache,
            block_tokens=self.block_tokens,
            dtype=self.dtype,
            threads=self.threads,
        )


class VllmDialect(Dialect):
    """/v1/completions with vLLM's own fields."""

    takes_ids = True
    constraint_field = "structured_outputs.choice"
    ready_path = "/health"
    about_paths = ("/version", "/v1/models")
    metrics_paths = ("/metrics",)

    def __init__(self, config: VllmServerConfig) -> None:
        self._model = config.request_model
        self._context_tokens = config.context_tokens
        self._salt = secrets.token_hex(8)
        """Another run's prompts in a server that outlives it are not found either."""
        self._forgotten = 0

    def call(self, request: Request, wire_id: str) -> Call:
        assert isinstance(request.prompt, TokenPrompt)
        draw = request.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(request.prompt.ids),
            "request_id": wire_id,
            "max_tokens": request.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            # a model's generation_config.json would set these
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "min_tokens": draw.min_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if draw.seed is not None:
            body["seed"] = draw.seed
        if request.stop:
            body["stop"] = list(request.stop)
        if (choices := check_choices(request)) is not None:
            body["structured_outputs"] = {"choice": list(choices)}
        if not request.use_prefix_cache:
            # of the id, which may be too long for a salt and hold what none may
            body["cache_salt"] = hashlib.blake2b(wire_id.encode(), digest_size=16).hexdigest()
        elif self._forgotten:
            body["cache_salt"] = f"{self._salt}-{self._forgotten}"
        return Call("/v1/completions", body)

    def read(self, data: str, reading: Reading) -> None:
        if data == "[DONE]":
            reading.is_done = True
            return
        content = event(data)
        choices = content.get("choices")
        if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
            raise MalformedReply("the answer has no choices")
        for choice in choices[:1]:
            reading.add(text_of(choice, "text"))
            if choice.get("finish_reason") is not None:
                reading.finish = finish_of(choice["finish_reason"])
        read_usage(content, reading)
        if durations := part(content, "metrics"):
            reading.queue_s = seconds_of(durations, "queue_time_ms", 1e-3)
            reading.prefill_s = seconds_of(durations, "time_to_first_token_ms", 1e-3)
            reading.decode_s = seconds_of(durations, "generation_time_ms", 1e-3)

    def forget(self) -> tuple[Call, ...]:
        self._forgotten += 1
        return ()

    def about(self, texts: Sequence[str]) -> str:
        tokens = context_of(texts[1], self._model)
        said = f"the server takes {tokens} tokens a request"
        check_size(tokens, said, "context_tokens", self._context_tokens, "--max-model-len")
        return text_of(object_of(texts[0]), "version") or "unknown"

    def model(self, texts: Sequence[str]) -> str:
        return model_of(texts[1], self._model)

    def seen(self, texts: Sequence[str]) -> Seen:
        samples = Samples.read(texts[0])
        # others wait for their grammar, not for room in the batch
        waiting = samples.total("vllm:num_requests_waiting_by_reason", label='"capacity"')
        if waiting is None:
            waiting = samples.total("vllm:num_requests_waiting")
        return Seen(
            running=samples.total("vllm:num_requests_running"),
            waiting=waiting,
            kv_usage=samples.most("vllm:kv_cache_usage_perc"),
            prefix_queries=samples.total("vllm:prefix_cache_queries_total"),
            prefix_hits=samples.total("vllm:prefix_cache_hits_total"),
            preemptions=samples.total("vllm:num_preemptions_total"),
        )


def command(config: VllmServerConfig, model_path: str, port: int) -> Command:
    """`vllm serve` with the embedded engine's arguments and environment."""
    build = installed_build()
    device = build.device if build else "cpu"
    embedded = config.embedded()
    arguments = engine_args(embedded, model_path, device, shape_of(config.model))
    arguments["served_model_name"] = config.request_model
    flags: list[str] = []
    for name, value in arguments.items():
        if name not in _NOT_SERVED:
            flags += _flag(name, value)
    argv = (
        *(sys.executable, "-m", _MODULE, "--host", "127.0.0.1", "--port", str(port)),
        *flags,
        "--enable-prompt-tokens-details",
        "--enable-per-request-metrics",
        "--disable-uvicorn-access-log",
        *config.extra_args,
    )
    return Command(argv, engine_environment(embedded, device))


def _flag(name: str, value: object) -> tuple[str, ...]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{flag}" if value else f"--no-{flag}",)
    return (f"--{flag}", str(value))


def check_vllm_server(config: VllmServerConfig) -> None:
    """Raises EngineConfigError for all that can be known before a start."""
    check_http(config)
    if config.is_launched:
        check_vllm(config.embedded())
    else:
        check_model(config.model)


def _server_kind(config: VllmServerConfig) -> ServerKind:
    def launch(port: int) -> Command:
        return command(config, str(resolve(config.model).directory), port)

    return ServerKind(
        VllmDialect(config),
        lambda: load_template(resolve(config.model).directory),
        launch if config.is_launched else None,
    )


def _build(start: EngineStart, config: VllmServerConfig) -> Engine:
    return build_http(start, config, _server_kind)


VLLM_SERVER = EngineKind(VllmServerConfig, check_vllm_server, _build)
