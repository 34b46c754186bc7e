"""How servers say it: requests read, answers and errors written. Pure.

Every shape is a real server's: vLLM 0.32, SGLang 0.5.23 and llama.cpp b11549 as recorded in
tests/data/wire, OpenAI's and Ollama's from their API documentation; less what nobody reads, such as
all settings in the last event of llama.cpp's streams. Here stand what all endpoints share and
OpenAI's own, which most servers have; native endpoints are in `fake_native`.
"""

import json
import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from serving.fake_constraints import (
    ConstraintError,
    Texts,
    from_grammar,
    from_regex,
    from_response_format,
    from_schema,
    from_vllm,
)
from serving.fake_model import FakeDialect, Ids, Job, pieces_of, text_ids

Event = dict[str, Any]

CONSTRAINT_HINT = "the fake server takes alternatives written out, and nothing else"
MODEL_CHECKED = ("vllm", "ollama")
"""Servers that refuse a name that is not their model's; others take any."""
_SALT = re.compile(r"[^@/\\\0]{1,128}")
THOUGHTS = ("Let", " me", " see", ".")


class Refused(Exception):
    """A request that is not computed. With `events`, a streamed request is answered 200 all the
    same, and they say it."""

    def __init__(self, status: int, body: Event, events: tuple[Event, ...] | None = None) -> None:
        super().__init__(f"{status} {body}")
        self.status = status
        self.body = body
        self.events = events


@dataclass(frozen=True, slots=True)
class Question:
    """A request as its endpoint reads it."""

    ids: Ids
    choices: Texts | None
    """The only texts allowed; None: free."""
    max_tokens: int
    temperature: float
    seed: int | None
    is_streamed: bool
    model: str | None = None
    """The name asked for."""
    wants_usage: bool = True
    rid: str | None = None
    slot: int | None = None
    use_cache: bool = True
    salt: str = ""
    """Of the prefix cache."""
    is_cut: bool = False
    """Whether a prompt over the context loses its beginning, and is not refused."""
    stop: tuple[str, ...] = ()
    """Texts that end a free answer."""
    keeps_stop: bool = False
    """Whether they stand at its end; else they are none of it."""
    fields: tuple[str, ...] = ()
    """llama.cpp: the only fields wanted in the last event; none: all."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a form needs to write an answer: `job` tells how far it is."""

    id: str
    model: str
    created: int
    question: Question
    job: Job
    thoughts: int = 0
    """Leading tokens that are reasoning."""
    hides_usage: bool = False
    hides_cached: bool = False

    @property
    def pieces(self) -> tuple[str, ...]:
        return self.job.ask.pieces[: self.job.written]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def cached(self) -> int | None:
        return None if self.hides_cached else self.job.cached

    def is_last(self, index: int) -> bool:
        return index == len(self.job.ask.pieces) - 1


class Form:
    """One endpoint of one server: its requests, its answers whole and in pieces."""

    path: ClassVar[str]
    media_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    end_mark: ClassVar[bytes] = b"data: [DONE]\n\n"
    streams_by_default: ClassVar[bool] = False
    opens: ClassVar[bool] = False
    """Whether an event without content comes before the first token."""
    thinks_apart: ClassVar[bool] = False
    """Whether reasoning has a field of its own."""

    def __init__(self, dialect: FakeDialect) -> None:
        self.dialect = dialect

    def read(self, body: Mapping[str, Any]) -> Question:
        """Raises Refused."""
        raise NotImplementedError

    def opening(self, answer: Answer) -> list[Event]:
        """Before the first token; no content."""
        raise NotImplementedError

    def token(self, answer: Answer, index: int) -> list[Event]:
        raise NotImplementedError

    def closing(self, answer: Answer) -> list[Event]:
        """After the last token, or where an aborted answer stops."""
        raise NotImplementedError

    def whole(self, answer: Answer) -> Event:
        raise NotImplementedError

    def frame(self, event: Event) -> bytes:
        return b"data: " + compact(event) + b"\n\n"

    def full(self, status: int | None = None) -> Refused:
        """The queue is full; `status` other than the dialect's own."""
        raise NotImplementedError

    def too_long(self, tokens: int, context: int) -> Refused:
        raise NotImplementedError

    def bad(self, message: str) -> Refused:
        """Not a request."""
        raise NotImplementedError

    def no_model(self, asked: str, model: str) -> Refused:
        """A model of another name was asked for."""
        raise NotImplementedError

    def unfit(self, message: str) -> Refused:
        """Not a constraint."""
        return self.bad(message)

    def choices(self, read: Callable[[], Texts | None]) -> Texts | None:
        try:
            return read()
        except (ConstraintError, TypeError, AttributeError, ValueError) as error:
            raise self.unfit(f"{error} ({CONSTRAINT_HINT})") from error


def compact(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def chat_ids(messages: Any) -> Ids:
    """Made-up ids of a conversation; one message more only appends."""
    return text_ids(
        "".join(f"<{message['role']}>{message['content']}</>" for message in messages)
        + "<assistant>"
    )


def stop_texts(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Under `stop`: none, one, or a list."""
    stop = options.get("stop") or ()
    return (stop,) if isinstance(stop, str) else tuple(map(str, stop))


def stopped(pieces: tuple[str, ...], question: Question) -> tuple[str, ...]:
    """The tokens of a free answer as far as the first of the question's stop texts."""
    for stop in question.stop:
        before, found, _ = "".join(pieces).partition(stop)
        if found:
            kept = before + stop if question.keeps_stop else before
            pieces = pieces_of(kept, by_character=False)
    return pieces


def prompt_ids(prompt: Any) -> Ids:
    return text_ids(prompt) if isinstance(prompt, str) else array("q", prompt)


# ---------------------------------------------------------------- errors


def error_of(dialect: FakeDialect, status: int, message: str, kind: str, **more: Any) -> Event:
    """An error body as the dialect's OpenAI endpoints have it."""
    match dialect:
        case "vllm":
            return {
                "error": {"message": message, "type": kind, "param": None, "code": status} | more
            }
        case "sglang":
            flat = {"object": "error", "message": message, "type": kind, "param": None}
            return flat | {"code": status}
        case "llama_server":
            return {"error": {"code": status, "message": message, "type": kind} | more}
        case "ollama":
            return {"error": message}
        case "openai":
            return {"error": {"message": message, "type": kind, "param": None, "code": None} | more}


class OpenAiForm(Form):
    """The errors of endpoints that follow OpenAI's."""

    def full(self, status: int | None = None) -> Refused:
        match self.dialect:
            case "vllm":
                text = (
                    "The engine is currently busy and cannot accept new requests. "
                    "Please try again later or on a different instance."
                )
                return self._refused(status or 503, text, "Service Unavailable")
            case "sglang":
                code = status or 503
                text = "The request queue is full."
                event = {"error": error_of("sglang", code, text, "SERVICE_UNAVAILABLE")}
                return Refused(code, error_of("sglang", code, text, str(code)), (event,))
            case "llama_server":
                return self._refused(status or 503, "no slot available", "unavailable_error")
            case "ollama":
                return self._refused(
                    status or 503,
                    "server busy, please try again.  maximum pending requests exceeded",
                    "",
                )
            case "openai":
                return self._refused(
                    status or 429, "Rate limit reached", "requests", code="rate_limit_exceeded"
                )

    def too_long(self, tokens: int, context: int) -> Refused:
        match self.dialect:
            case "vllm":
                text = (
                    f"This model's maximum context length is {context} tokens. However, your "
                    f"prompt contains {tokens} input tokens, which exceeds this limit even without "
                    "any output tokens. Please reduce the length of the input prompt. "
                    f"(parameter=input_tokens, value={tokens})"
                )
                return self._refused(400, text, "BadRequestError", param="input_tokens")
            case "sglang":
                return self._refused(400, sglang_too_long(tokens, context), "BadRequestError")
            case "llama_server":
                text = (
                    f"request ({tokens} tokens) exceeds the available context size "
                    f"({context} tokens), try increasing it"
                )
                numbers = {"n_prompt_tokens": tokens, "n_ctx": context}
                return self._refused(400, text, "exceed_context_size_error", **numbers)
            case "ollama":
                return self._refused(400, "the input length exceeds the context length", "")
            case "openai":
                text = (
                    f"This model's maximum context length is {context} tokens. However, your "
                    f"messages resulted in {tokens} tokens. Please reduce the length of the "
                    "messages."
                )
                more = {"param": "messages", "code": "context_length_exceeded"}
                return self._refused(400, text, "invalid_request_error", **more)

    def unfit(self, message: str) -> Refused:
        """vLLM finds out once it has begun to answer a stream."""
        if self.dialect == "llama_server":
            message = f"Failed to initialize samplers: failed to parse grammar: {message}"
        refused = self.bad(message)
        return Refused(400, refused.body, (refused.body,) if self.dialect == "vllm" else None)

    def no_model(self, asked: str, model: str) -> Refused:
        if self.dialect == "ollama":
            return self._refused(404, f"model '{asked}' not found", "")
        text = f"The model `{asked}` does not exist. Valid aliases: {model}."
        return self._refused(404, text, "NotFoundError", param="model")

    def bad(self, message: str) -> Refused:
        kinds = {"vllm": "BadRequestError", "sglang": "BadRequestError"}
        return self._refused(400, message, kinds.get(self.dialect, "invalid_request_error"))

    def _refused(self, status: int, message: str, kind: str, **more: Any) -> Refused:
        return Refused(status, error_of(self.dialect, status, message, kind, **more))


def sglang_too_long(tokens: int, context: int) -> str:
    return (
        f"The input ({tokens} tokens) is longer than the model's context length ({context} tokens)."
    )


def sglang_no_room(tokens: int, max_tokens: int, context: int) -> str:
    """Other servers let an answer end where the context does."""
    return (
        f"Requested token count exceeds the model's maximum context length of {context} tokens. "
        f"You requested a total of {tokens + max_tokens} tokens: {tokens} tokens from the input "
        f"messages and {max_tokens} tokens for the completion."
    )


# ---------------------------------------------------------------- OpenAI's endpoints


def usage_of(dialect: FakeDialect, answer: Answer) -> Event:
    job = answer.job
    prompt, written = len(job.ask.ids), job.written
    details = None if answer.cached is None else {"cached_tokens": answer.cached}
    if dialect == "llama_server":
        details = details or {}
        counts = {"completion_tokens": written, "prompt_tokens": prompt}
        return counts | {"total_tokens": prompt + written, "prompt_tokens_details": details}
    counts = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + written,
        "completion_tokens": written,
    }
    if dialect == "ollama":
        return counts
    if dialect == "sglang":
        counts["reasoning_tokens"] = min(answer.thoughts, written)
    return counts | {"prompt_tokens_details": details}


def timings_of(answer: Answer) -> Event:
    """llama.cpp's; the time in its queue is not in them."""
    job = answer.job
    fresh = len(job.ask.ids) - job.cached
    prompt_ms, predicted_ms = job.prefill_s * 1000, job.decode_s * 1000
    steps = max(1, job.written - 1)
    return {
        "cache_n": job.cached,
        "prompt_n": fresh,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_token_ms": prompt_ms / fresh,
        "prompt_per_second": 1000 * fresh / prompt_ms if prompt_ms else 0.0,
        "predicted_n": job.written,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_token_ms": predicted_ms / steps,
        "predicted_per_second": 1000 * steps / predicted_ms if predicted_ms else 0.0,
    }


def durations_of(dialect: FakeDialect, answer: Answer) -> Event:
    """Fields of a whole answer, and of a stream's last chunk."""
    job = answer.job
    if dialect == "llama_server":
        return {"timings": timings_of(answer)}
    if dialect == "vllm":
        inference_s = job.prefill_s + job.decode_s
        metrics = {
            "time_to_first_token_ms": job.prefill_s * 1000,
            "generation_time_ms": job.decode_s * 1000,
            "queue_time_ms": job.queue_s * 1000,
            "mean_itl_ms": job.decode_s * 1000 / (job.written - 1) if job.written > 1 else None,
            "tokens_per_second": job.written / inference_s if inference_s else None,
        }
        return {"metrics": metrics}
    return {}


def openai_choices(dialect: FakeDialect, body: Mapping[str, Any]) -> Texts | None:
    """The constraint of an OpenAI endpoint. What a server does not know it ignores in silence."""
    match dialect:
        case "vllm" if body.get("structured_outputs") is not None:
            return from_vllm(body["structured_outputs"])
        case "sglang" if body.get("regex") is not None:
            return from_regex(body["regex"])
        case "sglang" if body.get("ebnf") is not None:
            return from_grammar(body["ebnf"])
        case "llama_server" if body.get("grammar"):
            return from_grammar(body["grammar"])
        case "llama_server" if body.get("json_schema") is not None:
            return from_schema(body["json_schema"])
    return from_response_format(body.get("response_format"))


class ChunkForm(OpenAiForm):
    """Chunks with `choices`: what chat and text completions share."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    default_tokens: ClassVar[int]

    def read(self, body: Mapping[str, Any]) -> Question:
        options = body.get("stream_options") or {}
        if self.dialect == "vllm" and not _SALT.fullmatch(body.get("cache_salt") or "0"):
            raise self.bad(
                "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', "
                "'/', '\\\\', or NUL. (parameter=cache_salt)"
            )
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        temperature = body.get("temperature")
        return Question(
            ids=self._ids(body),
            choices=self.choices(lambda: openai_choices(self.dialect, body)),
            max_tokens=self.default_tokens if limit is None else max(1, int(limit)),
            temperature=1.0 if temperature is None else float(temperature),
            seed=body.get("seed"),
            is_streamed=bool(body.get("stream")),
            model=body.get("model"),
            wants_usage=bool(options.get("include_usage")),
            rid=body.get("rid") if self.dialect == "sglang" else None,
            slot=body.get("id_slot") if self.dialect == "llama_server" else None,
            use_cache=bool(body.get("cache_prompt", True)),
            salt=str(body.get("cache_salt" if self.dialect == "vllm" else "extra_key") or ""),
            stop=stop_texts(body),
        )

    def _ids(self, body: Mapping[str, Any]) -> Ids:
        raise NotImplementedError

    def chunk(self, answer: Answer, choices: list[Event], **more: Any) -> Event:
        head = {"id": answer.id, "object": self.chunk_kind, "created": answer.created}
        return head | {"model": answer.model, "choices": choices} | more

    def tail(self, answer: Answer) -> list[Event]:
        """The chunk of counts after the finish, where it was asked for."""
        if not answer.question.wants_usage or answer.hides_usage:
            return []
        usage = usage_of(self.dialect, answer)
        return [self.chunk(answer, [], usage=usage, **durations_of(self.dialect, answer))]

    def whole(self, answer: Answer) -> Event:
        choice = {"index": 0, **self.whole_content(answer), "finish_reason": answer.job.ended}
        body = self.chunk(answer, [choice]) | {"object": self.kind}
        if not answer.hides_usage:
            body["usage"] = usage_of(self.dialect, answer)
        return body | durations_of(self.dialect, answer)

    def whole_content(self, answer: Answer) -> Event:
        raise NotImplementedError


class ChatForm(ChunkForm):
    """/v1/chat/completions."""

    path = "/v1/chat/completions"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    default_tokens = 1 << 30
    opens = True
    thinks_apart = True

    def _ids(self, body: Mapping[str, Any]) -> Ids:
        messages = body.get("messages")
        if not messages:
            raise self.bad("'messages' is required")
        return chat_ids(messages)

    @property
    def thought_field(self) -> str:
        """vLLM renamed it, Ollama follows neither."""
        return "reasoning" if self.dialect in ("vllm", "ollama") else "reasoning_content"

    def opening(self, answer: Answer) -> list[Event]:
        empty = None if self.dialect == "llama_server" else ""
        return [self._delta(answer, {"role": "assistant", "content": empty})]

    def token(self, answer: Answer, index: int) -> list[Event]:
        piece = answer.job.ask.pieces[index]
        ends_here = self.dialect == "vllm" and answer.is_last(index)
        if not piece and not ends_here:
            return []
        field = self.thought_field if index < answer.thoughts else "content"
        finish = answer.job.ask.ends if ends_here else None
        return [self._delta(answer, {field: piece}, finish)]

    def closing(self, answer: Answer) -> list[Event]:
        if self.dialect == "vllm" and answer.job.ended != "abort":
            return self.tail(answer)
        more = {}
        if self.dialect == "llama_server" and not answer.question.wants_usage:
            more = {"timings": timings_of(answer)}
        last = self._delta(answer, {}, answer.job.ended) | more
        return [last, *self.tail(answer)]

    def _delta(self, answer: Answer, delta: Event, finish: str | None = None) -> Event:
        if self.dialect == "sglang":
            delta = {"reasoning_content": None} | delta
        return self.chunk(answer, [{"index": 0, "delta": delta, "finish_reason": finish}])

    def whole_content(self, answer: Answer) -> Event:
        text = "".join(answer.pieces[answer.thoughts :])
        message: Event = {"role": "assistant", "content": text}
        if answer.thoughts or self.dialect in ("vllm", "sglang"):
            thoughts = "".join(answer.pieces[: answer.thoughts])
            message[self.thought_field] = thoughts or None
        return {"message": message}


class CompletionForm(ChunkForm):
    """/v1/completions."""

    path = "/v1/completions"
    kind = chunk_kind = "text_completion"
    default_tokens = 16

    def _ids(self, body: Mapping[str, Any]) -> Ids:
        if not body.get("prompt"):
            raise self.bad("'prompt' is required")
        return prompt_ids(body["prompt"])

    def opening(self, answer: Answer) -> list[Event]:
        return [self._text(answer, "")]

    def token(self, answer: Answer, index: int) -> list[Event]:
        piece = answer.job.ask.pieces[index]
        ends_here = self.dialect != "llama_server" and answer.is_last(index)
        if not piece and not ends_here:
            return []
        return [self._text(answer, piece, answer.job.ask.ends if ends_here else None)]

    def closing(self, answer: Answer) -> list[Event]:
        if self.dialect == "llama_server":
            more = {"timings": timings_of(answer)}
            if not answer.hides_usage:
                more["usage"] = usage_of(self.dialect, answer)
            return [self._text(answer, "", answer.job.ended) | more]
        cut = [self._text(answer, "", "abort")] if answer.job.ended == "abort" else []
        return cut + self.tail(answer)

    def _text(self, answer: Answer, text: str, finish: str | None = None) -> Event:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return self.chunk(answer, [choice])

    def whole_content(self, answer: Answer) -> Event:
        return {"text": answer.text, "logprobs": None}
