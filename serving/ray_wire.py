"""What the arena, the Ray host and the replicas say to each other. Pure.

Values cross as lists of JSON's own types, made and read here alone; the host passes them on as they
are. Clocks differ between machines, so only durations cross: a time is told as its age.

    arena → host                                     host → arena
    ask    number, match id, Request fields          reply  number, replica, Reply fields
    abort  number          (nothing comes back)      error  number, kind, message
    prime  number, Prompt fields                     done   number, is done everywhere?
    reset  number                                    look   Look fields, of each again and again
    close  (deletes what was deployed)               replicas  names of those that serve
                                                     closed
                                                     alive  (again and again)

Between host and replica the same fields go, by `ray_line`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

from serving.engine import (
    ChatPrompt,
    EngineDead,
    EngineError,
    EngineSnapshot,
    EngineStalled,
    EngineUnavailable,
    Finish,
    MalformedReply,
    Overloaded,
    Prompt,
    Reply,
    Request,
    RequestRejected,
    Sampling,
    Timings,
    TokenPrompt,
    Usage,
)

Fields = list[Any]

VERSION = 1
"""Of what a host and its replicas say to each other: those of another are not taken over."""

_TOLD = attrgetter(
    *(one.name for one in fields(EngineSnapshot) if one.name not in ("at", "replica"))
)
"""Of a snapshot, in the order of its fields: all between its time and its replica."""

_ERRORS: dict[str, type[EngineError]] = {
    error.kind: error
    for error in (
        Overloaded,
        RequestRejected,
        EngineUnavailable,
        MalformedReply,
        EngineStalled,
        EngineDead,
    )
}


class Heard(NamedTuple):
    """What a replica says when it is called."""

    answers: Sequence[Fields]
    """Not told before: [number, Reply fields, None] or [number, None, [kind, message]]."""
    look: Fields
    """`Look` fields."""


class Look(NamedTuple):
    """One replica as it was when it answered a call."""

    replica: str
    restarts: int
    """Of its engine, since the replica was started."""
    is_ready: bool
    node: str
    """The address of its machine in the cluster."""
    snapshots: Sequence[Fields]
    """What the engine told since the last look, oldest first."""


@dataclass(frozen=True, slots=True)
class RayStart:
    """What the host needs to find the cluster and to deploy on it."""

    address: str
    app: str
    """Name of what is deployed; one that is there already under it is taken over."""
    replicas: int
    max_replicas: int | None
    cpus: float
    gpus: float
    batch_limit: int
    most_asked: int
    """Calls that Ray lets into a replica at once: more than ever come, for our own queues are the
    ones that refuse."""
    silent_s: float
    """A replica that answers no look for so long is frozen: it is asked nothing until it does."""
    plan: dict[str, Any]
    """`ReplicaPlan` fields."""

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.replicas


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """Everything that a replica needs to open its engine, on whatever machine it stands."""

    name: str
    """Of the engine in the run's config."""
    engine: dict[str, Any]
    """The hosted engine's table."""
    stall_seconds: float
    restart_limit: int
    look_seconds: float
    """A replica that has nothing to say says so after so long."""
    lease_seconds: float | None
    """None: the cluster ends with the run."""
    start_seconds: float
    """Instead of the lease, until the first host asks: it does once all replicas are there."""


def prompt_fields(prompt: Prompt) -> Fields:
    """A prompt as JSON's types."""
    if isinstance(prompt, TokenPrompt):
        return ["ids", list(prompt.ids)]
    return ["messages", [list(message) for message in prompt.messages]]


def prompt_of(fields: Fields) -> Prompt:
    """The prompt; ValueError where the fields are none."""
    tag, content = fields
    if tag == "ids":
        return TokenPrompt(content)
    if tag == "messages":
        return ChatPrompt(tuple((role, text) for role, text in content))
    raise ValueError(f"unknown prompt {tag!r}")


def request_fields(request: Request) -> Fields:
    """A request as JSON's types."""
    draw = request.sampling
    return [
        request.id,
        request.match_id,
        prompt_fields(request.prompt),
        request.choices,
        request.max_tokens,
        [draw.temperature, draw.top_p, draw.seed, draw.min_tokens],
        request.deadline_s,
        request.stream,
        request.use_prefix_cache,
        request.stop,
    ]


def request_of(fields: Fields) -> Request:
    """The request."""
    identity, match_id, prompt, choices, max_tokens, draw, deadline_s, stream, caches, stop = fields
    return Request(
        id=identity,
        match_id=match_id,
        prompt=prompt_of(prompt),
        choices=None if choices is None else tuple(choices),
        max_tokens=max_tokens,
        sampling=Sampling(*draw),
        deadline_s=deadline_s,
        stream=stream,
        use_prefix_cache=caches,
        stop=tuple(stop),
    )


def reply_fields(reply: Reply) -> Fields:
    """A reply as JSON's types. Of its times only what passed from its first token to its end, and
    what it waited before it was admitted, which counts as time in the engine's queue."""
    times, usage = reply.timings, reply.usage
    waited_s = times.admitted - times.submitted
    return [
        reply.text,
        reply.finish.value,
        [usage.prompt, usage.completion, usage.cached],
        None if times.first_token is None else times.done - times.first_token,
        [_plus(times.queue_s, waited_s), times.prefill_s, times.decode_s],
        reply.step_requests_mean,
        reply.reasoning,
    ]


def _plus(told_s: float | None, waited_s: float) -> float | None:
    return None if told_s is None else told_s + waited_s


def reply_of(fields: Fields, replica: str, admitted: float, done: float) -> Reply:
    """The reply on the clock of `admitted` and `done`, seconds. What the way to the replica and
    back took lies between these and the engine's own durations."""
    text, finish, usage, since_first_s, durations, step_requests_mean, reasoning = fields
    first = None if since_first_s is None else max(admitted, done - since_first_s)
    return Reply(
        text,
        Finish(finish),
        Usage(*usage),
        Timings(admitted, admitted, first, done, *durations),
        step_requests_mean,
        replica,
        reasoning,
    )


def error_of(kind: str, message: str) -> EngineError:
    """The failure of one replica, which is never the end of all: it is not final."""
    return _ERRORS.get(kind, EngineUnavailable)(message)


def snapshot_fields(snapshot: EngineSnapshot, now: float) -> Fields:
    """A snapshot as JSON's types, its time as its age at `now`."""
    return [now - snapshot.at, *_TOLD(snapshot)]


def snapshot_of(fields: Fields, replica: str, now: float) -> EngineSnapshot:
    """The snapshot on the clock of `now`."""
    age_s, *told = fields
    return replace(EngineSnapshot(now - max(0.0, age_s), *told), replica=replica)


def one_line(error: BaseException) -> str:
    """The error's text, of many lines the first."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
