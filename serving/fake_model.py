"""A served engine with no model, as arithmetic: slots, a queue, steps that cost time, a cache.

Pure: it is told the time and keeps none. `FakeServer` drives it on a clock; a test may drive it on
numbers:

    while step := model.start_step(now):
        now += step.seconds
        model.finish_step(step, now)

One step computes a piece of each new prompt and one token of every running answer (continuous
batching), and takes

    decode_ms_per_token × (1 + (load_factor − 1) × (requests − 1) ÷ (slots − 1))
        + prompt tokens computed ÷ prefill_tokens_per_s

which is llm-d-inference-sim's time factor under load, and linear in tokens and requests as real
engines are. Alone, a request of n prompt tokens, c of them cached, has its first token after
(n − c) ÷ prefill_tokens_per_s + decode_ms_per_token, and one more every decode_ms_per_token.
"""

import re
import zlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StrictInt

Ids: TypeAlias = "array[int]"

FakeDialect = Literal["vllm", "sglang", "llama_server", "ollama", "openai"]
DIALECTS: tuple[FakeDialect, ...] = ("vllm", "sglang", "llama_server", "ollama", "openai")

FaultKind = Literal[
    "queue_full_503",
    "queue_full_429",
    "queue_full_200",
    "too_long",
    "abort",
    "truncate",
    "reset",
    "slow_loris",
    "malformed_sse",
    "wrong_content_type",
    "ignore_constraint",
    "no_usage",
    "null_cached",
    "thinking",
    "role_only_first",
    "freeze",
    "crash",
    "keepalive_lie",
    "redirect",
    "html_error",
    "loading_503",
    "late_cancel",
    "cut_short",
]
"""queue_full_503, _429, _200: refused for want of room; _200 says so in the stream, as an event of
the dialect's own form. too_long: refused as a prompt over the context. abort: half the answer, then
the dialect's own word for an aborted request. truncate, reset: half the answer, then the connection
is closed in good order, or reset. slow_loris: bytes that never make an event, one each `seconds`.
malformed_sse: an event that is no JSON after half the answer. wrong_content_type: 200, text/plain.
ignore_constraint: 200 and free text. no_usage: token counts left out. null_cached: cached tokens
unknown. thinking: reasoning before the answer, apart from it in chat forms and inside `<think>`
elsewhere; it takes time and tokens as answers do. role_only_first: an event without content long
before the first token. freeze: for `seconds` nothing is computed or answered, though connections
are accepted. crash: every connection is reset and the listener closed for `seconds`; what comes
back remembers nothing. keepalive_lie: promises to keep the connection and closes it (what llama.cpp
does after every stream). redirect: 307. html_error: a proxy's 502 page. loading_503: 503 for
`seconds`, health included. late_cancel: a client's leaving is not noticed, and its slot stays taken
to the end (llama.cpp's queued and prefilling requests). cut_short: half the answer, and then the
dialect's word for one that ran out of tokens (a context or a cache too small for it)."""

FAULT_SECONDS: dict[str, float] = {
    "freeze": 3600.0,
    "crash": 1.0,
    "loading_503": 1.0,
    "slow_loris": 0.05,
}


class FakeFault(BaseModel):
    """One misbehaviour, at given requests or with a probability."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: FaultKind = Field(description="What goes wrong.")
    at: tuple[StrictInt, ...] = Field(
        default=(), description="Questions to the model, counted from 0 as they reach the server."
    )
    probability: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        strict=True,
        description="Chance per question, from its own seed.",
    )
    seconds: float | None = Field(
        default=None,
        gt=0.0,
        strict=True,
        description="How long, by the real clock; omitted: the kind's own.",
    )

    @property
    def lasts(self) -> float:
        return FAULT_SECONDS.get(self.kind, 0.0) if self.seconds is None else self.seconds


class FakeConfig(BaseModel):
    """A server with no model, for tests and rehearsals."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str = Field(default="fake", description="The name it gives its model.")
    dialects: tuple[FakeDialect, ...] = Field(
        default=DIALECTS,
        min_length=1,
        description="Servers it answers as; a path that several have is the first one's.",
    )
    slots: int = Field(default=8, ge=1, strict=True, description="Requests computed at once.")
    queue: int | None = Field(
        default=None,
        ge=0,
        strict=True,
        description="Requests that may wait for a slot; omitted: any number.",
    )
    context_tokens: int = Field(
        default=2048, ge=16, strict=True, description="Prompt and answer, per request."
    )
    prefill_tokens_per_s: float = Field(
        default=2000.0, gt=0.0, strict=True, description="Prompt tokens."
    )
    decode_ms_per_token: float = Field(
        default=20.0,
        ge=0.0,
        strict=True,
        description="One step of one request that computes no prompt.",
    )
    load_factor: float = Field(
        default=2.0,
        ge=1.0,
        strict=True,
        description="How much longer a step takes with every slot in use.",
    )
    step_tokens: int = Field(
        default=2048,
        ge=1,
        strict=True,
        description="Tokens of a step; a longer prompt is computed in pieces.",
    )
    cache: Literal["shared", "per_slot", "none"] | None = Field(
        default=None,
        description="Prefixes found again: in whole blocks by all requests, or per slot by the "
        "token; omitted: as the first of `dialects` does.",
    )
    block_tokens: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description="Tokens of a block of a shared cache; omitted: 1 for SGLang, else 16.",
    )
    replies: tuple[str, ...] = Field(
        default=("I would develop a knight and castle soon.",),
        min_length=1,
        description="What a free answer says, chosen by prompt and seed.",
    )
    seed: int = Field(
        default=0, strict=True, description="Of faults, and of questions without a seed."
    )
    speed: float = Field(
        default=1.0, gt=0.0, strict=True, description="Seconds of the model per real second."
    )
    faults: tuple[FakeFault, ...] = Field(
        default=(), description="Misbehaviours; the first that applies to a question is taken."
    )

    def fault(self, number: int) -> FakeFault | None:
        """What goes wrong with question `number`; the same in every process."""
        for at, fault in enumerate(self.faults):
            if number in fault.at:
                return fault
            if fault.probability:
                dice = Random(f"{self.seed}/{at}/{number}")
                if dice.random() < fault.probability:
                    return fault
        return None

    @property
    def caching(self) -> Literal["shared", "per_slot", "none"]:
        if self.cache is not None:
            return self.cache
        return "per_slot" if self.dialects[0] in ("llama_server", "ollama") else "shared"

    @property
    def block(self) -> int:
        if self.block_tokens is not None:
            return self.block_tokens
        return 1 if self.dialects[0] == "sglang" else 16

    @property
    def counts_running(self) -> bool:
        """Whether the limit is on waiting and running requests together, as vLLM's is. SGLang's is
        on waiting ones alone, and is looked at before the next step: a burst may be refused while
        slots are free."""
        return self.dialects[0] == "vllm"


class QueueFull(Exception):
    """One request more than `queue` allows."""


End = Literal["stop", "length", "abort"]


def text_ids(text: str) -> Ids:
    """Made-up token ids, about four characters each; text appended only appends ids, except to the
    last one."""
    return array("q", (zlib.crc32(p.encode()) >> 8 for p in re.findall(r"\w{1,4}|\W", text)))


def choose(texts: Sequence[str], ids: Ids, seed: int, temperature: float) -> str:
    """One of `texts`, by prompt and seed; by the prompt alone at temperature 0."""
    dice = Random(f"{zlib.crc32(ids.tobytes())}/{seed if temperature > 0 else 'greedy'}")
    return dice.choice(texts)


def pieces_of(text: str, *, by_character: bool) -> tuple[str, ...]:
    """The tokens of an answer that is written to its end: a small model's one a character under a
    grammar, else words, and the end token, which has no text."""
    return (*(text if by_character else re.findall(r"\s*\S+|\s+", text)), "")


@dataclass(frozen=True, slots=True)
class Ask:
    """What the model is to do."""

    ids: Ids
    pieces: tuple[str, ...]
    """The text of each token that will be written; at least one."""
    ends: End = "stop"
    slot: int | None = None
    """The slot it must run in; one that does not exist means any."""
    use_cache: bool = True
    salt: str = ""
    """Prompts share a cache only where it is equal."""


@dataclass(eq=False, slots=True)
class Job:
    """A request inside the model. Times are those the model was told; None: not yet."""

    ask: Ask
    submitted: float
    slot: int | None = None
    cached: int = 0
    computed: int = 0
    """Prompt tokens in place, cached ones included."""
    written: int = 0
    started: float | None = None
    first: float | None = None
    done: float | None = None
    ended: End | None = None

    @property
    def is_prefilled(self) -> bool:
        return self.computed == len(self.ask.ids)

    @property
    def queue_s(self) -> float:
        return 0.0 if self.started is None else max(0.0, self.started - self.submitted)

    @property
    def prefill_s(self) -> float:
        """From its slot to its first token."""
        return 0.0 if self.started is None or self.first is None else self.first - self.started

    @property
    def decode_s(self) -> float:
        return 0.0 if self.first is None or self.done is None else self.done - self.first


@dataclass(slots=True)
class Totals:
    """Counts since the model began."""

    ended: dict[End, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
    refused: int = 0
    looked_up: int = 0
    """Prompt tokens of requests that got a slot."""
    found: int = 0
    """Of these, cached."""
    computed: int = 0
    """Prompt tokens of requests whose prompt is in place, cached ones left out."""
    written: int = 0
    ended_prompt: int = 0
    ended_found: int = 0
    ended_written: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0
    step_requests: int = 0
    """Sum over steps of the requests in them."""
    longest: int = 0
    """Tokens of the longest prompt with its answer."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the batch, begun and not yet finished."""

    seconds: float
    prompts: tuple[tuple[Job, int], ...]
    """Prompt tokens computed, by request."""
    writers: tuple[Job, ...]
    """Who has one token more at the end."""
    requests: int

    @property
    def tokens(self) -> int:
        """Prompt tokens, and one for each answer that was already being written."""
        fresh = sum(1 for job, _ in self.prompts if job in self.writers)
        return sum(count for _, count in self.prompts) + len(self.writers) - fresh


class FakeModel:
    """Slots, the queue before them and the prefix cache."""

    def __init__(self, config: FakeConfig) -> None:
        self.config = config
        self.totals = Totals()
        self._waiting: deque[Job] = deque()
        self._slots: list[Job | None] = [None] * config.slots
        self._order: list[Job] = []
        self._held: list[Ids] = [array("q")] * config.slots
        self._tokens: list[int] = [0] * config.slots
        self._used_at: list[int] = [0] * config.slots
        self._admitted = 0
        self._blocks: OrderedDict[int, None] = OrderedDict()

    @property
    def running(self) -> int:
        return len(self._order)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def slots(self) -> tuple[tuple[Job | None, int], ...]:
        """Per slot, the job that runs there and the tokens that its last one left, 0 for none."""
        return tuple(zip(self._slots, self._tokens, strict=True))

    @property
    def capacity_tokens(self) -> int:
        return self.config.slots * self.config.context_tokens

    @property
    def used_tokens(self) -> int:
        """Held by running requests."""
        return sum(job.computed + job.written for job in self._order)

    def submit(self, ask: Ask, now: float) -> Job:
        """Into the queue; slots are filled when the next step starts. Raises QueueFull."""
        if self._is_full():
            self.totals.refused += 1
            raise QueueFull
        job = Job(ask, now)
        self._waiting.append(job)
        return job

    def _is_full(self) -> bool:
        limit = self.config.queue
        if limit is None:
            return False
        if self.config.counts_running:
            return self.running + self.waiting >= limit + self.config.slots
        return self.waiting >= limit

    def cancel(self, job: Job, now: float) -> None:
        """Ends the job as aborted and frees its slot at once; nothing if it has ended."""
        if job.ended is not None:
            return
        if job.started is None:
            self._waiting.remove(job)
        self._end(job, "abort", now)

    def forget(self) -> bool:
        """Empties the prefix cache; False while anything runs or waits."""
        if self._order or self._waiting:
            return False
        self._blocks.clear()
        self._held = [array("q")] * self.config.slots
        return True

    def start_step(self, now: float) -> Step | None:
        """Fills free slots in order of arrival and begins a step; None with nothing to do. At most
        one step at a time."""
        self._admit(now)
        if not self._order:
            return None
        writing = [job for job in self._order if job.is_prefilled]
        room = max(1, self.config.step_tokens - len(writing))
        prompts: list[tuple[Job, int]] = []
        for job in self._order:
            if room and not job.is_prefilled:
                count = min(room, len(job.ask.ids) - job.computed)
                prompts.append((job, count))
                room -= count
                if job.computed + count == len(job.ask.ids):
                    writing.append(job)
        requests = len({*map(id, writing), *(id(job) for job, _ in prompts)})
        computed = sum(count for _, count in prompts)
        seconds = self.step_seconds(computed, requests)
        return Step(seconds, tuple(prompts), tuple(writing), requests)

    def step_seconds(self, prompt_tokens: int, requests: int) -> float:
        """What a step takes (see the head of this file)."""
        config = self.config
        share = (requests - 1) / (config.slots - 1) if config.slots > 1 else 0.0
        load = 1 + (config.load_factor - 1) * share
        decode = config.decode_ms_per_token / 1000 * load
        return decode + prompt_tokens / config.prefill_tokens_per_s

    def finish_step(self, step: Step, now: float) -> list[Job]:
        """Hands out what the step computed; the requests that have something new. Those that ended
        meanwhile get nothing."""
        self.totals.steps += 1
        self.totals.step_requests += step.requests
        for job, count in step.prompts:
            if job.ended is None:
                job.computed += count
                if job.is_prefilled:
                    self.totals.computed += len(job.ask.ids) - job.cached
        changed = [job for job in step.writers if job.ended is None]
        for job in changed:
            self._write(job, now)
        return changed

    def _write(self, job: Job, now: float) -> None:
        job.written += 1
        self.totals.written += 1
        if job.first is None:
            job.first = now
            self.totals.prefill_s += job.prefill_s
        if job.written == len(job.ask.pieces):
            self._end(job, job.ask.ends, now)

    def _end(self, job: Job, end: End, now: float) -> None:
        job.ended, job.done = end, now
        if job.slot is not None:
            self._slots[job.slot] = None
            self._tokens[job.slot] = job.computed + job.written
            self._order.remove(job)
        totals = self.totals
        totals.ended[end] += 1
        totals.ended_prompt += job.computed
        totals.ended_found += job.cached
        totals.ended_written += job.written
        totals.decode_s += job.decode_s
        totals.longest = max(totals.longest, job.computed + job.written)

    def _admit(self, now: float) -> None:
        for job in list(self._waiting):
            if self.running == self.config.slots:
                return
            slot = self._slot_for(job.ask)
            if slot is None:
                continue
            self._waiting.remove(job)
            job.slot, job.started = slot, now
            job.cached = job.computed = self._found(job.ask, slot)
            self.totals.looked_up += len(job.ask.ids)
            self.totals.found += job.cached
            self._slots[slot] = job
            self._order.append(job)
            self._admitted += 1
            self._used_at[slot] = self._admitted

    def _slot_for(self, ask: Ask) -> int | None:
        """llama.cpp's choice: the one asked for; else the one whose last prompt shares most with
        this one, if that is over a tenth of it; else the least recently used."""
        free = [slot for slot, job in enumerate(self._slots) if job is None]
        if ask.slot is not None and 0 <= ask.slot < len(self._slots):
            return ask.slot if ask.slot in free else None
        if self.config.caching == "per_slot" and ask.use_cache:
            shared, _, best = max((_common(self._held[at], ask.ids), -at, at) for at in free)
            if shared > len(ask.ids) / 10:
                return best
        return min(free, key=lambda at: self._used_at[at])

    def _found(self, ask: Ask, slot: int) -> int:
        """Prompt tokens cached, never all of them; the prompt is remembered at once, so that
        requests of the same step share it."""
        most = len(ask.ids) - 1
        if self.config.caching == "per_slot":
            shared = _common(self._held[slot], ask.ids) if ask.use_cache else 0
            self._held[slot] = ask.ids
            return min(shared, most)
        if self.config.caching == "none" or not ask.use_cache:
            return 0
        return self._found_in_blocks(ask, most)

    def _found_in_blocks(self, ask: Ask, most: int) -> int:
        ids, size = ask.ids, self.config.block
        key, found, is_hit = zlib.crc32(ask.salt.encode()), 0, True
        for start in range(0, len(ids) - size + 1, size):
            key = hash((key, ids[start : start + size].tobytes()))
            is_hit = is_hit and key in self._blocks
            found += size * is_hit
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > max(1, self.capacity_tokens // size):
            self._blocks.popitem(last=False)
        return min(found, most // size * size)


def _common(left: Ids, right: Ids) -> int:
    """Equal ids at the start."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
