"""SGLang's HTTP server: prompts as token ids to its native /generate.

Its chat endpoint takes no ids, and it answers 200 there with free text to a constraint that it does
not know; /generate refuses unknown sampling fields.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from serving.config import EngineConfigError, EngineKind, EngineStart, cpu_count, cpu_dtype
from serving.dialect import (
    Call,
    Command,
    Complaint,
    Dialect,
    Reading,
    Samples,
    Seen,
    check_choices,
    check_size,
    context_of,
    count_of,
    event,
    fault_of,
    finish_of,
    model_of,
    object_of,
    part,
    seconds_of,
    text_of,
)
from serving.engine import (
    Engine,
    EngineError,
    EngineUnavailable,
    MalformedReply,
    Request,
    TokenPrompt,
)
from serving.http_config import BatchKnobs, check_http
from serving.http_engine import ServerKind
from serving.http_replicas import build_http
from serving.models import ModelShape, check_model, cpu_kv_bytes, resolve, shape_of
from serving.sglang_cpu import CPU_ENVIRONMENT, REMEDY, sglang_python
from serving.template import load_template


class SglangConfig(BatchKnobs):
    """SGLang's HTTP server, launched for the run or running already."""

    launch_only: ClassVar[frozenset[str]] = BatchKnobs.launch_only | {"python"}
    taken_flags: ClassVar[dict[str, str]] = {
        "--model-path": "model",
        "--model": "model",
        "--context-length": "context_tokens",
        "--max-running-requests": "max_concurrent",
        "--max-prefill-tokens": "max_batched_tokens",
        "--chunked-prefill-size": "max_batched_tokens",
        "--max-total-tokens": "kv_cache_bytes",
        "--mem-fraction-static": "memory_fraction",
        "--kv-cache-dtype": "kv_dtype",
        "--disable-radix-cache": "prefix_cache",
        "--page-size": "block_tokens",
        "--dtype": "dtype",
        "--device": "device",
        "--served-model-name": "served_model",
        # deltas would be read as whole texts
        "--incremental-streaming-output": "",
        "--enable-metrics": "",
        "--enable-cache-report": "",
    }

    kind: Literal["sglang"] = "sglang"
    python: str | None = Field(
        default=None,
        description="Python of the environment that holds SGLang; omitted: the one that "
        "`make engines` made.",
    )


class SglangDialect(Dialect):
    """The native /generate, whose messages each hold the whole text so far."""

    takes_ids = True
    constraint_field = "sampling_params.regex"
    ready_path = "/ready"
    about_paths = ("/server_info", "/v1/models")
    metrics_paths = ("/metrics",)

    def __init__(self, config: SglangConfig) -> None:
        self._config = config

    def call(self, request: Request, wire_id: str) -> Call:
        assert isinstance(request.prompt, TokenPrompt)
        draw = request.sampling
        sampling: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            # a model's generation_config.json would set these
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": draw.min_tokens,
        }
        if draw.seed is not None:
            # heeded by servers with --enable-deterministic-inference alone
            sampling["sampling_seed"] = draw.seed
        if request.stop:
            # trimmed, the last message would take back what those before it told
            sampling |= {"stop": list(request.stop), "no_stop_trim": True}
        if (choices := check_choices(request)) is not None:
            sampling["regex"] = f"({'|'.join(map(re.escape, choices))})"
        body: dict[str, Any] = {
            "rid": wire_id,
            "input_ids": list(request.prompt.ids),
            "sampling_params": sampling,
            "stream": True,
        }
        if not request.use_prefix_cache:
            body["extra_key"] = wire_id
        return Call("/generate", body)

    def read(self, data: str, reading: Reading) -> None:
        if data == "[DONE]":
            reading.is_done = True
            return
        content = event(data)
        told = part(content, "meta_info")
        self._read_text(text_of(content, "text"), reading)
        reading.prompt = count_of(told, "prompt_tokens")
        reading.completion = count_of(told, "completion_tokens")
        reading.cached = count_of(told, "cached_tokens")
        self._read_durations(told, reading)
        if reason := part(told, "finish_reason"):
            if reason.get("type") == "abort":
                raise _aborted(reason)
            reading.finish = finish_of(reason.get("type"))

    def _read_text(self, text: str, reading: Reading) -> None:
        # half a character may stand at the end until its other half is there
        before = reading.text.rstrip("\ufffd")
        if not text.startswith(before):
            raise MalformedReply(
                "a message does not repeat the text so far: the server must run without "
                "--incremental-streaming-output"
            )
        if len(text) > len(reading.text):
            reading.pieces += 1
        reading.text = text

    def _read_durations(self, told: Mapping[str, Any], reading: Reading) -> None:
        reading.queue_s = seconds_of(told, "queue_time")
        first_s = seconds_of(told, "first_token_latency")
        if first_s is not None and reading.queue_s is not None:
            # from its arrival there to the first token
            reading.prefill_s = max(0.0, first_s - reading.queue_s)
            whole_s = seconds_of(told, "e2e_latency")
            if whole_s is not None:
                reading.decode_s = max(0.0, whole_s - first_s)

    def abort(self, wire_id: str) -> Call:
        return Call("/abort_request", {"rid": wire_id})

    def forget(self) -> tuple[Call, ...]:
        return (Call("/flush_cache", {}),)

    def about(self, texts: Sequence[str]) -> str:
        told, config = object_of(texts[0]), self._config
        most = _running_at_most(told)
        said = f"the server computes {most} requests at once"
        check_size(most, said, "max_concurrent", config.max_concurrent, "--max-running-requests")
        tokens = context_of(texts[1], config.request_model)
        said = f"the server takes {tokens} tokens a request"
        check_size(tokens, said, "context_tokens", config.context_tokens, "--context-length")
        return text_of(told, "version") or "unknown"

    def model(self, texts: Sequence[str]) -> str:
        return model_of(texts[1], self._config.request_model)

    def seen(self, texts: Sequence[str]) -> Seen:
        samples = Samples.read(texts[0])
        retracted = samples.total("sglang:num_retracted_requests_total")
        running = samples.total("sglang:num_running_reqs")
        if retracted is None and running is not None:
            # not shown until the first retraction
            retracted = 0
        return Seen(
            running=running,
            waiting=samples.total("sglang:num_queue_reqs"),
            kv_usage=samples.most("sglang:token_usage"),
            prefix_queries=samples.total("sglang:prompt_tokens_total"),
            prefix_hits=samples.total("sglang:cached_tokens_total"),
            preemptions=retracted,
        )


def _running_at_most(told: Mapping[str, Any]) -> int | None:
    """Requests at once of all replicas together, by /server_info; None: not told."""
    states = told.get("internal_states")
    replicas = [one for one in states if isinstance(one, dict)] if isinstance(states, list) else []
    shares = [count_of(one, "effective_max_running_requests_per_dp") for one in replicas]
    known = [share for share in shares if share is not None]
    return sum(known) if known else count_of(told, "max_running_requests")


def _aborted(reason: Mapping[str, Any]) -> EngineError:
    """An answer that ended with `abort`: refused by a full queue, or given up."""
    complaint = Complaint(
        text_of(reason, "message") or "aborted", "", count_of(reason, "status_code")
    )
    if complaint.code is None:
        return EngineUnavailable(f"the server gave the request up: {complaint.message}")
    return fault_of(complaint)


def is_on_cpu(config: SglangConfig) -> bool:
    """Whether a launched SGLang computes on the CPU."""
    if config.device == "auto":
        return not any(Path("/dev").glob("nvidia[0-9]*"))
    return config.device == "cpu"


def python_of(config: SglangConfig) -> str | None:
    """Python of the environment that holds SGLang, if there is one."""
    if config.python is not None:
        return config.python
    installed = sglang_python()
    if installed is not None:
        return str(installed)
    return None if is_on_cpu(config) else sys.executable


def command(config: SglangConfig, model_path: str, shape: ModelShape | None, port: int) -> Command:
    """SGLang's launch_server; on a CPU with what it needs to run there."""
    on_cpu = is_on_cpu(config)
    flags: dict[str, object] = {
        "model-path": model_path,
        "served-model-name": config.request_model,
        "host": "127.0.0.1",
        "port": port,
        "context-length": config.context_tokens,
        "max-running-requests": config.max_concurrent,
        "max-total-tokens": pool_tokens(config, shape),
        "mem-fraction-static": config.memory_fraction,
        "max-prefill-tokens": config.max_batched_tokens,
        "chunked-prefill-size": config.max_batched_tokens,
        "page-size": config.block_tokens,
        "kv-cache-dtype": config.kv_dtype,
        "dtype": dtype_of(config),
        # its figures else stand still for 40 steps
        "decode-log-interval": 1,
        "load-snapshot-publish-interval": 1,
        "log-level-http": "warning",
    }
    if on_cpu:
        flags |= {"device": "cpu", "attention-backend": "torch_native"}
    words = [
        word
        for name, value in flags.items()
        if value is not None
        for word in (f"--{name}", str(value))
    ]
    words += ["--enable-metrics", "--enable-cache-report"]
    if not config.prefix_cache:
        words.append("--disable-radix-cache")
    if on_cpu:
        words.append("--sleep-on-idle")
    program = python_of(config) or "python"
    argv = (program, "-m", "sglang.launch_server", *words, *config.extra_args)
    return Command(argv, environment(config))


def environment(config: SglangConfig) -> dict[str, str]:
    """Variables of the server's process. The model's directory is on this machine by then."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if is_on_cpu(config):
        threads = config.threads or max(1, cpu_count() // 2)
        cores = f"0-{threads - 1}" if threads > 1 else "0"
        variables |= CPU_ENVIRONMENT
        # more threads than cores spin at barriers for seconds
        variables |= {"OMP_NUM_THREADS": str(threads), "SGLANG_CPU_OMP_THREADS_BIND": cores}
    return variables


def pool_tokens(config: SglangConfig, shape: ModelShape | None) -> int | None:
    """Tokens of the KV pool by `kv_cache_bytes`; on a CPU it must be said: every request's whole
    context where `cpu_kv_bytes` hold it, two contexts at least. None: SGLang's own choice."""
    dtype = dtype_of(config)
    per_token = shape.token_bytes(dtype) if shape else None
    if config.kv_cache_bytes is not None:
        return int(config.kv_cache_bytes) // per_token if per_token else None
    if not is_on_cpu(config) or config.memory_fraction is not None:
        return None
    whole = config.context_tokens * (config.max_concurrent + 1)
    if per_token is None:
        return whole
    return min(whole, max(cpu_kv_bytes(dtype) // per_token, 2 * config.context_tokens))


def dtype_of(config: SglangConfig) -> str | None:
    """The type of the weights; None: the model's own."""
    return config.dtype or (cpu_dtype() if is_on_cpu(config) else None)


def check_sglang(config: SglangConfig) -> None:
    """Raises EngineConfigError for all that can be known before a start."""
    check_http(config)
    check_model(config.model)
    if not config.is_launched:
        return
    program = python_of(config)
    if program is None:
        raise EngineConfigError(f"sglang is not installed: {REMEDY}")
    if config.python is not None and not Path(config.python).expanduser().is_file():
        raise EngineConfigError(f"python = {config.python!r}: no such file")
    if not is_on_cpu(config) and config.threads is not None:
        raise EngineConfigError("threads: is for a CPU; leave it out")
    shape = shape_of(config.model)
    if shape and shape.context_tokens and config.context_tokens > shape.context_tokens:
        raise EngineConfigError(
            f"context_tokens = {config.context_tokens} is more than the "
            f"{shape.context_tokens} that model {config.model!r} was made for: lower it"
        )
    if config.kv_cache_bytes is not None:
        if shape is None or shape.kv_bytes_per_token is None:
            raise EngineConfigError(
                "kv_cache_bytes: SGLang takes tokens, and how many bytes one takes is not known "
                f"for model {config.model!r}: use memory_fraction"
            )
        tokens = pool_tokens(config, shape) or 0
        if tokens < config.context_tokens:
            raise EngineConfigError(
                f"kv_cache_bytes = {int(config.kv_cache_bytes):,} holds {tokens} tokens, and one "
                f"context has {config.context_tokens}: raise it"
            )


def _server_kind(config: SglangConfig) -> ServerKind:
    def launch(port: int) -> Command:
        directory = resolve(config.model).directory
        return command(config, str(directory), shape_of(config.model), port)

    return ServerKind(
        SglangDialect(config),
        lambda: load_template(resolve(config.model).directory),
        launch if config.is_launched else None,
    )


def _build(start: EngineStart, config: SglangConfig) -> Engine:
    return build_http(start, config, _server_kind)


SGLANG = EngineKind(SglangConfig, check_sglang, _build)
