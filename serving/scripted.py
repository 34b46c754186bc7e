"""An engine with no model: a real tokenizer, seeded answers, named misbehaviours.

It ships in the package and is reached by the public path (`kind = "scripted"`), so tests and
rehearsals of large runs use what real runs use.
"""

import asyncio
import itertools
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from functools import cached_property
from random import Random
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, model_validator

from serving.config import (
    PACKAGED_MODEL,
    EngineConfig,
    EngineConfigError,
    EngineKind,
    EngineStart,
)
from serving.engine import (
    EngineDead,
    EngineLimits,
    EngineSnapshot,
    EngineStalled,
    Finish,
    Overloaded,
    Prompt,
    Reply,
    Request,
    RequestRejected,
    Timings,
    TokenPrompt,
    Usage,
)
from serving.models import check_model, resolve
from serving.template import Ids, ModelTemplate, TemplateError, load_template

SNAPSHOT_PERIOD_S = 0.2

Misbehaviour = Literal[
    "overload", "die", "stall", "reject", "cut_short", "garbage", "empty", "illegal", "slow"
]
"""overload: refused at once. die: every request in flight ends with EngineDead, then the engine is
back. stall: hangs for `stall_seconds`, then EngineStalled. reject: RequestRejected. cut_short: half
the answer, finish "length". garbage: text that holds no move. empty: no text. illegal: a move-like
text that was not offered. slow: ten times the latency, at least `slow_seconds`."""

_ILLEGAL = "a1a1"
_GARBAGE = "I would rather not say."


class ScriptedFault(BaseModel):
    """One misbehaviour, at given requests or with a probability."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Misbehaviour = Field(description="What goes wrong.")
    at: tuple[StrictInt, ...] = Field(
        default=(), description="Requests, counted from 0 as they reach the engine."
    )
    probability: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        strict=True,
        description="Chance per request, from its own seed.",
    )


class ScriptedConfig(EngineConfig):
    """An engine with no model, for tests and rehearsals."""

    lacking: ClassVar[dict[str, str]] = {
        knob: "computes nothing, so this has no meaning"
        for knob in (
            "max_batched_tokens",
            "kv_cache_bytes",
            "memory_fraction",
            "kv_dtype",
            "dtype",
        )
    }

    kind: Literal["scripted"] = "scripted"
    model: str = Field(
        default=PACKAGED_MODEL, description="Whose tokenizer and chat template are used."
    )
    latency_seconds: StrictFloat | tuple[StrictFloat, StrictFloat] = Field(
        default=0.0, description="Per request: fixed, or [low, high] drawn evenly; 0 for none."
    )
    tokens_per_reply: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        strict=True,
        description="Tokens said to be written; omitted: one a character and one.",
    )
    replies: tuple[str, ...] = Field(
        default=(),
        description="What a free answer or a thought says, taken in turn by the request's seed and "
        "cut after as many characters as it may have tokens.",
    )
    prefix_cache: bool = Field(
        default=True, strict=True, description="Report cached prompt tokens."
    )
    block_tokens: int = Field(
        default=32, ge=1, strict=True, description="Whole blocks count as cached."
    )
    faults: tuple[ScriptedFault, ...] = Field(
        default=(), description="Misbehaviours; the first that applies to a request is taken."
    )
    slow_seconds: float = Field(
        default=1.0, ge=0.0, strict=True, description="The least latency of `slow`."
    )
    seed: int = Field(
        default=0, strict=True, description="Of latencies and of requests without a seed."
    )

    @model_validator(mode="after")
    def _latency_is_a_range(self) -> "ScriptedConfig":
        low, high = self.latency_range
        if not 0 <= low <= high:
            raise ValueError(f"latency_seconds: need 0 <= low <= high, got {low} and {high}")
        return self

    @property
    def latency_range(self) -> tuple[float, float]:
        latency = self.latency_seconds
        return latency if isinstance(latency, tuple) else (latency, latency)


class PrefixModel:
    """Which prompt tokens a prefix cache would have held, in whole blocks.

    Keeps the last prompt of each match and one prompt per head; a stand-in for a cache without
    eviction, cheap enough to run beside thousands of requests a second.
    """

    HEAD: ClassVar[int] = 64
    """Prompts that agree in so many tokens are compared as sharing a head."""

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._by_match: dict[str, Ids] = {}
        self._by_head: dict[bytes, Ids] = {}

    def cached(self, match_id: str, ids: Ids) -> int:
        """Tokens of `ids` found, never all of them; then remembers `ids`."""
        before = self._by_match.get(match_id)
        if before is None:
            before = self._by_head.setdefault(ids[: self.HEAD].tobytes(), ids)
            if before is ids:
                before = ids[:0]
        if len(self._by_match) >= 8192 and match_id not in self._by_match:
            self._by_match.pop(next(iter(self._by_match)))
        self._by_match[match_id] = ids
        shared = _common_prefix(before, ids, self._block)
        return min(shared, (len(ids) - 1) // self._block * self._block)

    def forget(self) -> None:
        """As after a reset of the cache."""
        self._by_match.clear()
        self._by_head.clear()


class ScriptedEngine:
    """Answers by the request's seed alone, so that a run is the same however it is timed."""

    kind = "scripted"
    version = "1"
    restarts = 0
    is_ready = True

    def __init__(self, start: EngineStart, config: ScriptedConfig) -> None:
        self.name = start.name
        self._config = config
        self._stall_seconds = start.stall_seconds
        self._low, self._high = config.latency_range
        self._latencies = Random(config.seed)
        self._numbers = itertools.count()
        self._prefixes = PrefixModel(config.block_tokens)
        self._running = 0
        self._overloaded = 0
        self._queries = 0
        self._hits = 0
        self._sleepers: set[asyncio.Future[None]] = set()
        self._closed = asyncio.Event()

    @cached_property
    def template(self) -> ModelTemplate:
        return load_template(resolve(self._config.model).directory)

    @property
    def limits(self) -> EngineLimits:
        config = self._config
        return EngineLimits(config.context_tokens, config.max_concurrent, config.max_queued)

    async def open(self) -> None:
        try:
            await asyncio.to_thread(lambda: self.template)
        except (EngineConfigError, TemplateError) as error:
            raise EngineDead(str(error), final=True) from error

    async def generate(self, request: Request) -> Reply:
        admitted = time.monotonic()
        number = next(self._numbers)
        fault = self._fault(number, request) if self._config.faults else None
        self._refuse(request, fault)
        self._running += 1
        try:
            await self._pass_time(request, fault)
        finally:
            self._running -= 1
        return self._reply(request, fault, number, admitted)

    async def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        """Every `SNAPSHOT_PERIOD_S`, and one last after the close, with the final totals."""
        while True:
            is_last = self._closed.is_set()
            yield EngineSnapshot(
                at=time.monotonic(),
                source="sampled",
                running=self._running,
                waiting=0,
                prefix_queries=self._queries,
                prefix_hits=self._hits,
                rejected=self._overloaded,
            )
            if is_last:
                return
            try:
                async with asyncio.timeout(SNAPSHOT_PERIOD_S):
                    await self._closed.wait()
            except TimeoutError:
                continue

    async def prime(self, prompt: Prompt) -> None:
        if self._config.prefix_cache and isinstance(prompt, TokenPrompt):
            self._prefixes.cached("", _as_array(prompt.ids))

    async def reset_prefix_cache(self) -> bool:
        if self._running:
            return False
        self._prefixes.forget()
        return True

    async def close(self) -> None:
        self._closed.set()
        self._wake_all(EngineDead(f"engine {self.name} was closed", final=True))

    def _fault(self, number: int, request: Request) -> Misbehaviour | None:
        for at, fault in enumerate(self._config.faults):
            if number in fault.at:
                return fault.kind
            if fault.probability:
                dice = Random(f"{self._config.seed}/{at}/{request.id}")
                if dice.random() < fault.probability:
                    return fault.kind
        return None

    def _refuse(self, request: Request, fault: Misbehaviour | None) -> None:
        if self._closed.is_set():
            raise EngineDead(f"engine {self.name} is closed", final=True)
        if fault == "overload":
            self._overloaded += 1
            raise Overloaded(f"engine {self.name}: scripted overload at {request.id}")
        if fault == "reject":
            raise RequestRejected(f"engine {self.name}: scripted refusal of {request.id}")
        if fault == "die":
            dead = EngineDead(f"engine {self.name}: scripted death at {request.id}")
            self._wake_all(dead)
            raise dead
        if isinstance(request.prompt, TokenPrompt):
            tokens = len(request.prompt.ids) + 1
            if tokens > self._config.context_tokens:
                raise RequestRejected(
                    f"prompt of {tokens - 1} tokens and an answer do not fit context_tokens = "
                    f"{self._config.context_tokens}"
                )

    async def _pass_time(self, request: Request, fault: Misbehaviour | None) -> None:
        if fault == "stall":
            await self._sleep(self._stall_seconds)
            raise EngineStalled(f"engine {self.name}: scripted stall at {request.id}")
        delay = self._low
        if self._high > self._low:
            delay = self._latencies.uniform(self._low, self._high)
        if fault == "slow":
            delay = max(10 * delay, self._config.slow_seconds)
        if delay > request.deadline_s:
            await self._sleep(request.deadline_s)
            raise EngineStalled(f"engine {self.name}: no answer in {request.deadline_s:g} s")
        if delay:
            await self._sleep(delay)
        else:
            await asyncio.sleep(0)

    async def _sleep(self, seconds: float) -> None:
        """Sleep that `die` and `close` end with their error."""
        loop = asyncio.get_running_loop()
        sleeper: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(seconds, _wake, sleeper)
        self._sleepers.add(sleeper)
        try:
            await sleeper
        finally:
            timer.cancel()
            self._sleepers.discard(sleeper)

    def _wake_all(self, error: EngineDead) -> None:
        for sleeper in self._sleepers:
            if not sleeper.done():
                sleeper.set_exception(error)

    def _reply(
        self, request: Request, fault: Misbehaviour | None, number: int, admitted: float
    ) -> Reply:
        seed = request.sampling.seed
        if seed is None:
            seed = self._config.seed + number
        text = self._text(request, seed)
        finish = Finish.STOP
        if request.choices is None and len(text) > request.max_tokens:
            text, finish = text[: request.max_tokens], Finish.LENGTH
        if fault == "cut_short":
            text, finish = text[: len(text) // 2], Finish.LENGTH
        elif fault == "garbage":
            text = _GARBAGE
        elif fault == "empty":
            text = ""
        elif fault == "illegal":
            text = _ILLEGAL if request.choices else f"MOVE: {_ILLEGAL}"
        done = time.monotonic()
        usage = self._usage(request, text)
        took = done - admitted
        timings = Timings(admitted, admitted, None, done, 0.0, 0.0, took)
        return Reply(text, finish, usage, timings)

    def _text(self, request: Request, seed: int) -> str:
        if request.choices:
            return request.choices[_scramble(seed) % len(request.choices)]
        text = "I have no opinion.\nMOVE: pass"
        if self._config.replies:
            text = self._config.replies[_scramble(seed) % len(self._config.replies)]
        for stop in request.stop:
            text = text.partition(stop)[0]
        return text

    def _usage(self, request: Request, text: str) -> Usage:
        completion = self._config.tokens_per_reply or len(text) + 1
        prompt = request.prompt
        if not isinstance(prompt, TokenPrompt):
            return Usage(sum(len(content) for _, content in prompt.messages), completion, None)
        tokens = len(prompt.ids)
        cached = 0
        if self._config.prefix_cache and request.use_prefix_cache:
            cached = self._prefixes.cached(request.match_id, _as_array(prompt.ids))
        self._queries += tokens
        self._hits += cached
        return Usage(tokens, completion, cached)


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)


def _scramble(seed: int) -> int:
    """Neighbouring seeds far apart (the finaliser of SplitMix64)."""
    mixed = (seed + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ (mixed >> 31)


def _as_array(ids: Sequence[int]) -> Ids:
    return ids if isinstance(ids, array) else array("i", ids)


def _common_prefix(left: Ids, right: Ids, block: int) -> int:
    """Equal tokens at the start, in whole blocks, by halving."""
    low, high = 0, min(len(left), len(right)) // block
    if left[: high * block] == right[: high * block]:
        return high * block
    while low < high:
        middle = (low + high + 1) // 2
        if left[: middle * block] == right[: middle * block]:
            low = middle
        else:
            high = middle - 1
    return low * block


def _check(config: ScriptedConfig) -> None:
    check_model(config.model)


SCRIPTED = EngineKind(ScriptedConfig, _check, ScriptedEngine)
