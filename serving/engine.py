"""The seam to an inference engine: frozen values, the error tree, the protocol.

    EngineError
    ├── Overloaded          our bounded queue or the engine's refused the request at once
    ├── RequestRejected     the engine will never take this request (too long, bad grammar)
    ├── EngineUnavailable   transport: the connection broke or answered nonsense
    ├── EngineStalled       no step completes while work is unfinished
    └── EngineDead          the engine's process is gone; `final` once restarts are used up

Every one is the infrastructure's failure and never costs a player a game. `CancelledError` is none
of them and always passes.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal, Protocol, runtime_checkable


class EngineError(Exception):
    """An infrastructure failure. `kind` is its name in records (CONTRACTS, faults)."""

    kind: ClassVar[str] = "transport"


class Overloaded(EngineError):
    """Refused at once because the queue is full; ask again later."""

    kind = "overloaded"


class RequestRejected(EngineError):
    """The engine will not take this request however often it is asked; the message says why."""

    kind = "rejected"


class EngineUnavailable(EngineError):
    """The connection to the engine failed or was cut."""

    kind = "transport"


class MalformedReply(EngineUnavailable):
    """The engine answered something that is not a reply."""

    kind = "malformed"


class EngineStalled(EngineError):
    """No engine step completed in time while work was unfinished."""

    kind = "stalled"


class EngineDead(EngineError):
    """The engine's process ended."""

    kind = "engine_dead"

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final
        """True once the restart limit is used up: nothing will answer in this run any more."""


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What a prompt says, from the most to the least shared."""

    system: str
    """The same bytes for every agent and mode of a game."""
    persona: str
    """After the shared rules; empty for none."""
    lead: str
    """Opens the user message; constant within a match."""
    moves: tuple[str, ...]
    """The game so far; grows only at the end."""
    tail_note: str = ""
    """A retry's complaint, after the moves; dropped at the next ply."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as token ids."""

    ids: Sequence[int]
    """Not to be changed by anyone who is handed it."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt as chat messages `(role, content)`, for engines that do not take ids."""

    messages: tuple[tuple[str, str], ...]


Prompt = TokenPrompt | ChatPrompt


class Template(Protocol):
    """Turns parts into a prompt for one engine's model."""

    def render(self, parts: PromptParts) -> Prompt:
        """The prompt; one more move only adds its ids before the tail."""
        ...

    def count_tokens(self, parts: PromptParts) -> int:
        """Tokens in the rendered prompt."""
        ...

    def check(self, parts: PromptParts) -> str | None:
        """None if this template's own rendering of `parts` and of `parts` less the last move grows
        only at the end; else one sentence that names the first differing token."""
        ...


@runtime_checkable
class ThinkingTemplate(Protocol):
    """A template that can leave a prompt open for reasoning and close it by force; none of chat
    messages can."""

    think_end: str
    """What the model writes after its last thought."""

    def open_thought(self, parts: PromptParts) -> Prompt:
        """The prompt with a thought begun; one more move only adds its ids before the tail."""
        ...

    def close_thought(self, parts: PromptParts, thought: str, max_tokens: int) -> Prompt:
        """The ids of `open_thought`, then at most `max_tokens` of the thought, then its end: what
        follows is the answer."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One question to an engine."""

    id: str
    """`match/ply/attempt/try`, unique within a run."""
    match_id: str
    """Requests of a match share a growing prefix: routing and slots follow it."""
    prompt: Prompt
    choices: tuple[str, ...] | None
    """The only texts the engine may answer with; None leaves it free."""
    max_tokens: int
    sampling: Sampling
    deadline_s: float
    """Seconds from admission until the request is given up (a duration, not a time)."""
    stream: bool = False
    use_prefix_cache: bool = True
    stop: tuple[str, ...] = ()
    """Texts that end a free answer. An engine may leave them at its end, or write on: whoever asks
    cuts there. Engines that take chat messages are not told."""


class Finish(StrEnum):
    """Why an engine stopped writing."""

    STOP = "stop"
    LENGTH = "length"
    DEADLINE = "deadline"
    """`deadline_s` passed while this request's own tokens were being computed; text is partial."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt: int | None
    """None where neither the engine says it nor we can count it."""
    completion: int
    cached: int | None
    """Prompt tokens served from the prefix cache; None where the engine does not say."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Points on the arena's `time.monotonic()` clock, in seconds, and the engine's durations.

    The two kinds are never subtracted from each other.
    """

    submitted: float
    """Handed to our limiter."""
    admitted: float
    """Let through to the engine."""
    first_token: float | None
    """First content token seen by us; None where only the whole reply is delivered."""
    done: float
    queue_s: float | None
    """In the engine's own queue."""
    prefill_s: float | None
    decode_s: float | None


@dataclass(frozen=True, slots=True)
class Reply:
    """An engine's answer."""

    text: str
    finish: Finish
    usage: Usage
    timings: Timings
    step_requests_mean: float | None = None
    """Mean number of requests in the batch over the steps this request took part in."""
    replica: str | None = None
    reasoning: str = ""
    """What was thought, where that is told apart from the answer."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine at one step ("per_step") or at one scrape ("sampled"). None: it cannot say."""

    at: float
    """`time.monotonic()` seconds of the arena's process."""
    source: Literal["per_step", "sampled"]
    running: int | None = None
    """Requests inside the engine and not waiting."""
    waiting: int | None = None
    """Requests in the engine's own queue for want of room; behind `Limited` those in our queue
    before it as well. One whose grammar is still being compiled does not count."""
    step_requests: int | None = None
    """Requests computed in this step."""
    step_tokens: int | None = None
    """Tokens computed in this step, prompt and output."""
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    prefix_queries: int | None = None
    """Prompt tokens looked up in the prefix cache, total since the engine was opened."""
    prefix_hits: int | None = None
    """Of these, found. Totals survive a restart of the engine."""
    preemptions: int | None = None
    """Total since the engine was opened."""
    rejected: int | None = None
    """Requests refused by the engine's or our own queue, total since the engine was opened."""
    replica: str | None = None


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine takes."""

    context_tokens: int
    """Prompt and output together."""
    max_concurrent: int
    """Requests inside the engine at once."""
    max_queued: int
    """Requests that may wait in our queue before it; one more is `Overloaded`."""
    max_batched_tokens: int | None = None
    """Tokens per step; None: the engine's own default."""


class Engine(Protocol):
    """An inference engine, embedded or served. Wrappers are engines around an engine."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def template(self) -> Template: ...
    @property
    def limits(self) -> EngineLimits: ...
    @property
    def restarts(self) -> int:
        """Times the engine was started again after it died or stalled."""
        ...

    @property
    def is_ready(self) -> bool:
        """False while the engine is down and being started again: requests wait, and matches that
        ask are suspended."""
        ...

    async def open(self) -> None:
        """Start and be ready for `generate`; raises EngineDead or EngineUnavailable."""
        ...

    async def generate(self, request: Request) -> Reply:
        """The reply; raises EngineError. Cancelling the caller aborts the request in the engine."""
        ...

    def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        """Telemetry as it comes, until the engine is closed. One consumer."""
        ...

    async def prime(self, prompt: Prompt) -> None:
        """Compute a prompt now, so that later ones that begin alike find it in the prefix cache.

        It belongs to no match and counts in none of a run's figures. Raises EngineError.
        """
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False where the engine cannot or work is in flight."""
        ...

    async def close(self) -> None:
        """Stop and wait until no process of the engine is left."""
        ...


@runtime_checkable
class HasMetrics(Protocol):
    """An engine with metrics of its own beside the snapshots."""

    async def metrics(self) -> str:
        """Prometheus' text format, under the engine's own names; empty while it cannot say."""
        ...
