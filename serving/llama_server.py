"""llama.cpp's HTTP server: prompts as token ids to its native /completion.

A slot there is concurrency and cache at once, and slots share nothing. So each match keeps a slot,
whose cache then holds its transcript, and no more requests are sent than there are slots: what
waits inside that server cannot be taken back.
"""

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from serving.config import PACKAGED_MODEL, EngineConfigError, EngineKind, EngineStart, cpu_count
from serving.dialect import (
    Call,
    Command,
    Dialect,
    Reading,
    Samples,
    Seen,
    check_choices,
    check_size,
    count_of,
    event,
    object_of,
    one_line,
    part,
    refuse_min_tokens,
    seconds_of,
    text_of,
)
from serving.engine import Finish, MalformedReply, Request, TokenPrompt
from serving.http_config import HttpEngineConfig, check_http
from serving.http_engine import HttpEngine, ServerKind
from serving.llama_flags import parse
from serving.llama_package import REMEDY, is_installed
from serving.models import check_model, packaged_gguf, resolve
from serving.server_process import no_program
from serving.template import load_template

SLOT_ROUNDING = 256
"""llama.cpp rounds the context of one slot up to this."""

BATCH_TOKENS = 512
"""A batch cannot be interrupted: a cancelled prompt costs what is left of one."""

_PACKAGED = (sys.executable, "-m", "serving.llama_child")

_HTTP_THREADS = 64
"""At least. Each connection holds one; with fewer the server answers nobody for seconds."""

_SEEDS = 2**32 - 1
"""Seeds have 32 bits, and the greatest means any."""

_FINAL_FIELDS = [
    "content",
    "stop",
    "stop_type",
    "tokens_evaluated",
    "tokens_predicted",
    "timings",
]
"""Of the last message, which would else repeat the prompt and all settings."""

_FINISHES = {"eos": Finish.STOP, "word": Finish.STOP, "limit": Finish.LENGTH}


class LlamaServerConfig(HttpEngineConfig):
    """llama.cpp's own HTTP server, launched for the run or running already.

    `max_concurrent` is its number of slots. With more matches at once than slots, matches take each
    other's cached transcripts.
    """

    lacking: ClassVar[dict[str, str]] = {
        "block_tokens": "caches whole slots, not blocks; leave it out",
        "kv_cache_bytes": "sizes its cache by max_concurrent and context_tokens; leave it out",
        "memory_fraction": "sizes its cache by max_concurrent and context_tokens; leave it out",
        "dtype": "computes in the type of the GGUF file; choose another file",
        "prefix_cache": "keeps each slot's cache and cannot be told not to; leave it out",
    }
    launch_only: ClassVar[frozenset[str]] = HttpEngineConfig.launch_only | {
        "binary",
        "max_batched_tokens",
        "kv_dtype",
        "threads",
    }
    taken_flags: ClassVar[dict[str, str]] = {
        "-m": "model",
        "--model": "model",
        "-np": "max_concurrent",
        "--parallel": "max_concurrent",
        "-c": "context_tokens",
        "--ctx-size": "context_tokens",
        "-b": "max_batched_tokens",
        "--batch-size": "max_batched_tokens",
        "-ub": "max_batched_tokens",
        "--ubatch-size": "max_batched_tokens",
        "-ctk": "kv_dtype",
        "--cache-type-k": "kv_dtype",
        "-ctv": "kv_dtype",
        "--cache-type-v": "kv_dtype",
        "-t": "threads",
        "--threads": "threads",
    }

    kind: Literal["llama_server"] = "llama_server"
    scrape_seconds: float = Field(
        default=3.0,
        gt=0,
        le=3600,
        strict=True,
        description="Between looks at the server's metrics; frequent ones keep it from noticing "
        "that a client has left.",
    )
    binary: str | None = Field(
        default=None,
        description="llama-server's file; omitted: the one on PATH, else the package xllamacpp.",
    )
    max_batched_tokens: int | None = Field(
        default=None, ge=1, strict=True, description=f"Tokens per step; omitted: {BATCH_TOKENS}."
    )
    kv_dtype: str | None = Field(
        default=None, description="Type of cached values, such as q8_0; omitted: f16."
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description="Threads that compute; omitted: half of the processors, at least one.",
    )

    @property
    def slots(self) -> int:
        """Matches that keep their cached transcript; warn of more at once."""
        return self.max_concurrent

    @property
    def slot_tokens(self) -> int:
        """Context of one slot, rounded as llama.cpp does."""
        return -(-self.context_tokens // SLOT_ROUNDING) * SLOT_ROUNDING


class SlotTable:
    """Which match has which slot. A slot that is asked is never given to another question."""

    def __init__(self, slots: int) -> None:
        self._slots = {number: _Slot() for number in range(slots)}
        """The one that was idle longest comes first."""
        self._asked: dict[str, int] = {}

    def take(self, match_id: str, wire_id: str, ids: Sequence[int]) -> int | None:
        """The match's own slot; else the one that begins most like `ids` of those that no match
        has; else the one idle longest. It becomes the match's own. None: all are asked.

        A question of no match takes the one idle longest, rather one that no match has.
        """
        asked = set(self._asked.values())
        idle = [number for number in self._slots if number not in asked]
        if not idle:
            return None
        number = self._choose(match_id, ids, idle)
        self._slots.pop(number)
        self._slots[number] = _Slot(match_id, ids)
        self._asked[wire_id] = number
        return number

    def _choose(self, match_id: str, ids: Sequence[int], idle: list[int]) -> int:
        own = [number for number in idle if match_id and self._slots[number].owner == match_id]
        if own:
            return own[0]
        free = [number for number in idle if not self._slots[number].owner]
        if not free or not match_id:
            return (free or idle)[0]
        return max(free, key=lambda number: _common(self._slots[number].ids, ids))

    def release(self, wire_id: str) -> None:
        """That question is over."""
        self._asked.pop(wire_id, None)


@dataclass(frozen=True, slots=True)
class _Slot:
    owner: str = ""
    """A match; empty for none."""
    ids: Sequence[int] = ()
    """Of its last prompt."""


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Equal ids at the start."""
    pairs = zip(left, right, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(left))


class LlamaDialect(Dialect):
    """The native /completion."""

    takes_ids = True
    constraint_field = "grammar"
    starts_with_headers = True
    ready_path = "/health"
    about_paths = ("/props",)
    metrics_paths = ("/metrics", "/slots")

    def __init__(self, config: LlamaServerConfig) -> None:
        self._config = config
        self._table = SlotTable(config.slots)
        self.caches = config.slots

    def call(self, request: Request, wire_id: str) -> Call:
        assert isinstance(request.prompt, TokenPrompt)
        refuse_min_tokens(request)
        choices = check_choices(request)
        draw = request.sampling
        body: dict[str, Any] = {
            "prompt": list(request.prompt.ids),
            "n_predict": request.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            # its own defaults are others
            "top_k": 0,
            "min_p": 0.0,
            "repeat_penalty": 1.0,
            "cache_prompt": request.use_prefix_cache,
            "stream": True,
            # a message for each batch of the prompt: a long one is no stall
            "return_progress": True,
            "response_fields": _FINAL_FIELDS,
        }
        if draw.seed is not None:
            body["seed"] = draw.seed % _SEEDS
        if request.stop:
            body["stop"] = list(request.stop)
        if choices is not None:
            body["grammar"] = grammar_of(choices)
        slot = self._table.take(request.match_id, wire_id, request.prompt.ids)
        if slot is not None:
            body["id_slot"] = slot
        return Call("/completion", body)

    def ended(self, wire_id: str) -> None:
        self._table.release(wire_id)

    def read(self, data: str, reading: Reading) -> None:
        content = event(data)
        reading.add(text_of(content, "content"))
        if content.get("stop") is not True:
            return
        reason = text_of(content, "stop_type")
        if reason not in _FINISHES:
            raise MalformedReply(f"the answer ended with {reason!r}")
        reading.finish = _FINISHES[reason]
        told = part(content, "timings")
        reading.cached = count_of(told, "cache_n")
        reading.prompt = count_of(content, "tokens_evaluated")
        reading.completion = count_of(content, "tokens_predicted")
        reading.prefill_s = seconds_of(told, "prompt_ms", 1e-3)
        reading.decode_s = seconds_of(told, "predicted_ms", 1e-3)
        reading.is_done = True

    def forget(self) -> tuple[Call, ...]:
        """One other token in each slot: what was cached there is overwritten."""
        body = {"prompt": [0], "n_predict": 1, "cache_prompt": False, "stream": False}
        return tuple(
            Call("/completion", {**body, "id_slot": slot}) for slot in range(self._config.slots)
        )

    def about(self, texts: Sequence[str]) -> str:
        told, config = object_of(texts[0]), self._config
        slots = count_of(told, "total_slots")
        said = f"the server has {slots} slots"
        check_size(slots, said, "max_concurrent", config.slots, "-np")
        tokens = count_of(part(told, "default_generation_settings"), "n_ctx")
        said = f"a slot of the server holds {tokens} tokens"
        check_size(tokens, said, "context_tokens", config.context_tokens, "-c")
        return text_of(told, "build_info") or "unknown"

    def seen(self, texts: Sequence[str]) -> Seen:
        samples = Samples.read(texts[0])
        computed = samples.total("llamacpp:prompt_tokens_total")
        cached = samples.total("llamacpp:prompt_tokens_cached_total")
        queries = None if computed is None or cached is None else computed + cached
        return Seen(
            running=samples.total("llamacpp:requests_processing"),
            waiting=samples.total("llamacpp:requests_deferred"),
            kv_usage=slots_usage(texts[1]),
            prefix_queries=queries,
            prefix_hits=cached,
        )


def slots_usage(text: str) -> float | None:
    """Share of all slots' contexts that holds a prompt, by an answer of /slots; None: not told."""
    try:
        slots = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(slots, list) or not all(isinstance(slot, dict) for slot in slots):
        return None
    room = sum(count_of(slot, "n_ctx") or 0 for slot in slots)
    # one that was never used tells no tokens
    held = sum(count_of(slot, "n_prompt_tokens") or 0 for slot in slots)
    return min(held, room) / room if room else None


def grammar_of(choices: Sequence[str]) -> str:
    """A GBNF grammar whose only sentences are the choices, none of them empty."""
    return "root ::= " + " | ".join(f'"{_escaped(choice)}"' for choice in choices)


def _escaped(text: str) -> str:
    return "".join(
        f"\\{c}" if c in '"\\' else c if c.isprintable() else f"\\U{ord(c):08X}" for c in text
    )


def program_of(config: LlamaServerConfig) -> tuple[tuple[str, ...], str | None] | None:
    """Words that start the server, and its version where it cannot tell it; None: not here."""
    binary = config.binary or shutil.which("llama-server")
    if binary is not None:
        return (binary,), None
    if not is_installed():
        return None
    version = importlib.metadata.version("xllamacpp")
    return _PACKAGED, f"xllamacpp {version}"


def command(config: LlamaServerConfig, gguf: Path, port: int) -> Command:
    """llama-server, or the same server out of xllamacpp."""
    program, version = program_of(config) or (("llama-server",), None)
    batch = str(config.max_batched_tokens or BATCH_TOKENS)
    argv = [
        *program,
        *("-m", str(gguf), "-a", config.request_model),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("-np", str(config.slots), "-c", str(config.slots * config.slot_tokens)),
        *("-b", batch, "-ub", batch),
        *("-t", str(config.threads or max(1, cpu_count() // 2))),
        *("--threads-http", str(max(_HTTP_THREADS, 2 * config.slots + 16))),
        # by default 8 GiB of memory
        *("--cache-ram", "0"),
        # its end waits for one with a stream in flight
        *("--sse-ping-interval", "1"),
        *("--metrics", "--slots", "--no-ui"),
    ]
    if config.kv_dtype is not None:
        argv += ("-ctk", config.kv_dtype, "-ctv", config.kv_dtype)
    # spinning threads collapse when another process holds a core
    environment = {"OMP_WAIT_POLICY": "passive"}
    return Command((*argv, *config.extra_args), environment, version)


def gguf_of(model: str) -> Path:
    """The model's GGUF file; raises EngineConfigError where it has none."""
    if model == PACKAGED_MODEL:
        return packaged_gguf()
    path = Path(model).expanduser()
    if path.suffix != ".gguf":
        raise EngineConfigError(
            f"model {model!r}: a launched llama-server takes a .gguf file or "
            f'"{PACKAGED_MODEL}"; convert the model, or name a running server by url'
        )
    return path.resolve()


def check_llama_server(config: LlamaServerConfig) -> None:
    """Raises EngineConfigError for all that can be known before a start."""
    check_http(config)
    if config.is_launched:
        gguf_of(config.model)
        if config.binary is not None and shutil.which(config.binary) is None:
            raise EngineConfigError(f"binary = {config.binary!r}: {no_program(config.binary)}")
        _check_program(config)
    check_model(config.model)


def _check_program(config: LlamaServerConfig) -> None:
    found = program_of(config)
    if found is None:
        raise EngineConfigError(f"llama.cpp's server is not here: {REMEDY}")
    if found[0] == _PACKAGED:
        try:
            parse(list(command(config, gguf_of(config.model), 0).argv[len(_PACKAGED) :]))
        except ValueError as error:
            raise EngineConfigError(
                f"the server out of xllamacpp cannot be started so: {one_line(str(error))}: "
                "leave it out, or name a llama-server as binary"
            ) from error


def _build(start: EngineStart, config: LlamaServerConfig) -> HttpEngine:
    def launch(port: int) -> Command:
        return command(config, gguf_of(config.model), port)

    kind = ServerKind(
        LlamaDialect(config),
        lambda: load_template(resolve(config.model).directory),
        launch if config.is_launched else None,
    )
    return HttpEngine(start, config, kind)


LLAMA_SERVER = EngineKind(LlamaServerConfig, check_llama_server, _build)
