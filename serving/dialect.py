"""The seam between the HTTP engine and a kind of server: pure translation, both ways.

Request → Call           what is sent, always as a stream
data → Reading           one message of the answer after the other
status, body → error     an answer that is none
metrics → Seen           what the server tells of itself
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from serving.config import EngineConfigError
from serving.engine import (
    EngineError,
    EngineUnavailable,
    Finish,
    MalformedReply,
    Overloaded,
    Request,
    RequestRejected,
)


@dataclass(frozen=True, slots=True)
class Call:
    """One POST."""

    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Command:
    """How a server is started."""

    argv: tuple[str, ...]
    """Program and arguments; no keys."""
    env: Mapping[str, str]
    """Added to the arena's own environment, which goes without keys of servers."""
    version: str | None = None
    """Of the program, for servers that cannot tell it themselves."""


@dataclass(slots=True)
class Reading:
    """What is known of one answer while it streams. None: not said, or not yet."""

    text: str = ""
    finish: Finish | None = None
    prompt: int | None = None
    """Tokens of the prompt, cached ones too."""
    completion: int | None = None
    cached: int | None = None
    queue_s: float | None = None
    """The server's own durations."""
    prefill_s: float | None = None
    decode_s: float | None = None
    pieces: int = 0
    """Messages that brought text of the answer. Thinking is none of it."""
    thought: str = ""
    """Thinking that was told apart from the answer."""
    is_done: bool = False
    """The server's mark of the end was seen: the answer is whole."""

    @property
    def has_content(self) -> bool:
        """Whether any text of the answer has come."""
        return self.pieces > 0

    @property
    def has_thought(self) -> bool:
        """Whether any such thinking has come."""
        return bool(self.thought)

    @property
    def has_begun(self) -> bool:
        """Whether any of its tokens has come."""
        return self.has_content or self.has_thought

    def add(self, text: str) -> None:
        """Take one more piece of the answer."""
        if text:
            self.text += text
            self.pieces += 1


@dataclass(frozen=True, slots=True)
class Seen:
    """A server's own figures at one look. Totals are since its start. None: it cannot say."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """Share of the KV cache, 0 to 1."""
    prefix_queries: int | None = None
    """Prompt tokens looked up in the prefix cache, total."""
    prefix_hits: int | None = None
    preemptions: int | None = None


class Dialect(Protocol):
    """One kind of server. Subclass it: what is not overridden is what most servers do."""

    takes_ids: ClassVar[bool]
    """It takes a TokenPrompt, else a ChatPrompt."""
    framing: ClassVar[Literal["events", "lines"]] = "events"
    """How an answer is cut into messages: server-sent events, or a JSON object a line."""
    constraint_field: ClassVar[str]
    """Of the request, for messages about a server that ignores it."""
    starts_with_headers: ClassVar[bool] = False
    """Headers of an answer come when its computation begins, not when it is queued."""
    ready_path: ClassVar[str]
    """GET answers 200 once it can be asked."""
    about_paths: ClassVar[tuple[str, ...]] = ()
    """GET tells what `about` reads."""
    metrics_paths: ClassVar[tuple[str, ...]] = ()
    """GET tells what `seen` reads; the first is in Prometheus' text format."""
    caches: int = 1
    """Prefix caches that share nothing."""

    def call(self, request: Request, wire_id: str) -> Call:
        """The question, with the choices in the server's own dialect.

        Raises RequestRejected for what the server could not be told.
        """
        ...

    def read(self, data: str, reading: Reading) -> None:
        """Take one message of an answer; raises EngineError where it tells a failure, and
        MalformedReply for nonsense."""
        ...

    def answer(self, request: Request, reading: Reading) -> str:
        """The text of an answer that is whole."""
        del request
        return reading.text

    def ended(self, wire_id: str) -> None:
        """That question is answered or given up."""
        del wire_id

    def abort(self, wire_id: str) -> Call | None:
        """How a question is given up beyond closing its connection."""
        del wire_id
        return None

    def refused(self, status: int, body: str) -> EngineError:
        """What an answer with another status than 200 means."""
        return fault_of(Complaint.read(body), status)

    def forget(self) -> tuple[Call, ...] | None:
        """Calls that empty the prefix cache once each has answered 200; None: it cannot be done."""
        return None

    def about(self, texts: Sequence[str]) -> str:
        """The server's version, out of the answers to `about_paths`, in their order; empty for one
        missing.

        Raises EngineConfigError where it is not what the configuration says.
        """
        del texts
        return "unknown"

    def model(self, texts: Sequence[str]) -> str:
        """What the answers to `about_paths` tell of the model: the same for servers that serve the
        same. Empty: they do not tell."""
        del texts
        return ""

    def seen(self, texts: Sequence[str]) -> Seen:
        """Figures out of the answers to `metrics_paths`, in their order; empty for one missing."""
        del texts
        return Seen()


@dataclass(frozen=True, slots=True)
class Complaint:
    """What a server says is wrong."""

    message: str
    type: str = ""
    code: int | None = None
    """A status of HTTP; others say nothing that is known."""

    @classmethod
    def read(cls, body: str) -> "Complaint":
        """Out of a body in any of the shapes in use; plain text or HTML stands as it is."""
        if content := object_of(body):
            return cls.of(content)
        text = re.sub(r"<[^>]*>", " ", body)
        return cls(one_line(text) or "an empty answer")

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Complaint":
        """Out of `{"error": {…}}`, `{"error": "…"}`, `{"message": …}` or `{"detail": …}`."""
        inner = content.get("error", content)
        if not isinstance(inner, dict):
            return cls(one_line(str(inner)))
        said = inner.get("message", inner.get("detail", inner))
        code = str(inner.get("code"))
        return cls(
            one_line(said if isinstance(said, str) else json.dumps(said)),
            str(inner.get("type") or ""),
            int(code) if _STATUS.fullmatch(code) else None,
        )


_STATUS = re.compile(r"[1-5][0-9]{2}")
_QUEUE_FULL = re.compile(
    r"queue is full|server busy|currently busy|at capacity|overloaded|rate.?limit|backlog limit|"
    r"too many (?:concurrent )?requests|pending requests exceeded|no slot available",
    re.IGNORECASE,
)


_TOO_LONG = re.compile(r"context (?:the overflows|length|size|window)", re.IGNORECASE)
"""Of LM Studio, inside an answer."""


def fault_of(complaint: Complaint, status: int | None = None) -> EngineError:
    """The error of ours that a complaint is; `status` of HTTP unless it came inside an answer."""
    code = status if status not in (None, 200) else complaint.code
    said = f"{complaint.message} ({code})" if code is not None else complaint.message
    is_full = _QUEUE_FULL.search(f"{complaint.message} {complaint.type}") is not None
    if code == 429 or (is_full and (code is None or code >= 500)):
        return Overloaded(said)
    if code is not None and 300 <= code < 400:
        return MalformedReply(f"a redirect, which is not followed: {said}")
    if code is not None and 400 <= code < 500 and code != 408:
        return RequestRejected(said)
    if code is None and _TOO_LONG.search(complaint.message):
        return RequestRejected(said)
    return EngineUnavailable(said)


def event(data: str) -> dict[str, Any]:
    """One message as a JSON object; raises MalformedReply, or what its `error` means."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise MalformedReply(f"no JSON in the answer: {one_line(data, 120)!r}") from None
    if not isinstance(content, dict):
        raise MalformedReply(f"no object in the answer: {one_line(data, 120)!r}")
    if content.get("error"):
        raise fault_of(Complaint.of(content))
    return content


def object_of(body: str) -> dict[str, Any]:
    """A body as a JSON object; empty where it is none."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def part(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object under `name`, empty where it is missing or null; raises MalformedReply."""
    value = content.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedReply(f"{name} is no object: {one_line(str(value), 80)!r}")
    return value


def text_of(content: Mapping[str, Any], name: str) -> str:
    """The text under `name`, empty where it is missing or null; raises MalformedReply."""
    value = content.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise MalformedReply(f"{name} is no text: {one_line(str(value), 80)!r}")
    return value


_MOST = 2**53
"""Of a count or a duration, whatever its unit; more is none."""


def count_of(content: Mapping[str, Any], name: str) -> int | None:
    """The count under `name`; None where it is missing, null or none."""
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= _MOST else None


def seconds_of(content: Mapping[str, Any], name: str, scale: float = 1.0) -> float | None:
    """The duration under `name` in seconds, `scale` of them a unit; None as for `count_of`."""
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value * scale if 0 <= value <= _MOST else None


def context_of(models: str, name: str) -> int | None:
    """Tokens of one request by an answer of /v1/models: the named model's, or where no other name
    is there, the server's. None: not told."""
    told = [count_of(card, "max_model_len") for card in _cards(models, name)]
    return max((tokens for tokens in told if tokens is not None), default=None)


def model_of(models: str, name: str) -> str:
    """What an answer of /v1/models tells of the named model: the last part of where its weights are
    from, which may be in another folder elsewhere, and the tokens of a request."""
    roots = {
        str(card["root"]).rstrip("/").rpartition("/")[2]
        for card in _cards(models, name)
        if card.get("root")
    }
    tokens = context_of(models, name)
    parts = [one_line(root, 80) for root in sorted(roots)]
    return " ".join(parts + ([f"with {tokens} tokens a request"] if tokens is not None else []))


def _cards(models: str, name: str) -> list[dict[str, Any]]:
    """The named model's, or where no other name is there, the server's."""
    data = object_of(models).get("data")
    cards = [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []
    return [card for card in cards if card.get("id") == name] or cards


def check_size(told: int | None, said: str, knob: str, wanted: int, flag: str) -> None:
    """Raises EngineConfigError where a server, as `said` of it, has less than is `wanted`."""
    if told is not None and told < wanted:
        remedy = f"lower it, or start the server with more ({flag})"
        raise EngineConfigError(f"{said}, fewer than {knob} = {wanted}: {remedy}")


FINISHES: Mapping[str, Finish] = {
    "stop": Finish.STOP,
    "repetition": Finish.STOP,
    "length": Finish.LENGTH,
}


def finish_of(reason: object) -> Finish:
    """By OpenAI's names; raises for an answer that the server gave up, and for unknown ones."""
    if isinstance(reason, str) and reason in FINISHES:
        return FINISHES[reason]
    if reason in ("abort", "error"):
        raise EngineUnavailable(f"the server gave the request up ({reason})")
    raise MalformedReply(f"the answer ended with {one_line(str(reason), 80)!r}")


def read_usage(content: Mapping[str, Any], reading: Reading) -> None:
    """OpenAI's `usage` where there is one."""
    usage = part(content, "usage")
    if usage:
        reading.prompt = count_of(usage, "prompt_tokens")
        reading.completion = count_of(usage, "completion_tokens")
        reading.cached = count_of(part(usage, "prompt_tokens_details"), "cached_tokens")


def check_choices(request: Request) -> tuple[str, ...] | None:
    """The request's choices; raises RequestRejected for none at all and for an empty one, which
    grammars take for leave to say nothing."""
    if request.choices is not None and not all(request.choices or ("",)):
        raise RequestRejected("choices: there are none, or one is empty")
    return request.choices


def refuse_min_tokens(request: Request) -> None:
    """For servers that cannot be told a least length."""
    if request.sampling.min_tokens:
        raise RequestRejected("min_tokens: this kind of server cannot be told a least length")


def one_line(text: str, most: int = 300) -> str:
    """Without line ends and control characters, cut to `most` characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:most]


# metrics


@dataclass(slots=True)
class Samples:
    """Values of a page in Prometheus' text format, by name, over all their labels."""

    values: dict[str, list[tuple[str, float]]] = field(default_factory=dict)

    _LINE: ClassVar[re.Pattern[str]] = re.compile(
        r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$"
    )

    @classmethod
    def read(cls, text: str) -> "Samples":
        """Every line that is a sample; others are left out."""
        samples = cls()
        for line in text.splitlines():
            found = cls._LINE.match(line)
            if found is None:
                continue
            try:
                value = float(found[3])
            except ValueError:
                continue
            if math.isfinite(value):
                samples.values.setdefault(found[1], []).append((found[2] or "", value))
        return samples

    def total(self, *names: str, label: str = "") -> int | None:
        """The sum of the named ones whose labels contain `label`; None where there is none, or it
        is beyond all numbers."""
        found = self._found(names, label)
        total = sum(found)
        return round(total) if found and math.isfinite(total) else None

    def most(self, *names: str) -> float | None:
        """The greatest of the named ones; None where there is none."""
        return max(self._found(names, ""), default=None)

    def _found(self, names: Sequence[str], label: str) -> list[float]:
        return [
            value
            for name in names
            for labels, value in self.values.get(name, ())
            if label in labels
        ]
