"""The embedded vLLM engine: a child process, a watchdog over it, and restarts."""

import asyncio
import itertools
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import Any

from serving.budget import cut_short, used_its_time
from serving.config import EngineKind, EngineStart
from serving.engine import (
    EngineError,
    EngineLimits,
    EngineSnapshot,
    EngineStalled,
    EngineUnavailable,
    Finish,
    MalformedReply,
    Overloaded,
    Prompt,
    PromptParts,
    Reply,
    Request,
    RequestRejected,
    Sampling,
    Timings,
    TokenPrompt,
    Usage,
)
from serving.host_child import HostProcess, HostStart
from serving.host_keeper import HostKeeper
from serving.models import ResolvedModel, resolve, shape_of
from serving.snapshots import SnapshotQueue
from serving.template import ModelTemplate, load_template
from serving.vllm_config import (
    VllmConfig,
    check_vllm,
    engine_args,
    engine_environment,
    installed_build,
)
from serving.vllm_wire import Answer, Ask, Step

START_LIMIT_S = {"cpu": 300.0, "cuda": 900.0}
"""A cold start with its first step takes minutes on a busy machine, and where a GPU's graphs are
captured for a large model; a process that ends before is noticed at once."""

_EXPIRE_S = 5.0
_RESET_S = 10.0
_METRICS_S = 2.0
_FINISHES = {"stop": Finish.STOP, "repetition": Finish.STOP, "length": Finish.LENGTH}


class _Pending:
    """A request that the host has not answered yet."""

    __slots__ = ("admitted", "answer", "expired", "first_token", "number", "request", "timer")

    def __init__(self, number: int, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.request = request
        self.admitted = time.monotonic()
        self.answer: asyncio.Future[Answer] = loop.create_future()
        self.first_token: float | None = None
        self.expired = False
        self.timer: asyncio.TimerHandle | None = None

    def fail(self, error: EngineError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class VllmEngine:
    """vLLM in a child process of ours. Dead or stalled, it is started again up to a limit.

    Requests in flight at that moment end with the error; later ones wait for the new start.
    """

    kind = "vllm"

    host_command: Sequence[str] = (sys.executable, "-m", "serving.vllm_host")
    """Starts the host; given the numbers of two inherited sockets."""

    def __init__(self, start: EngineStart, config: VllmConfig) -> None:
        self.name = start.name
        build = installed_build()
        self._installed = build.version if build else "not installed"
        self._device = build.device if build else "cpu"
        self._settings = start
        self._config = config
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        """In the order in which they were admitted."""
        self._steps_at: deque[float] = deque()
        """When steps were heard of since the oldest of these was admitted."""
        self._keeper = HostKeeper(start, self._take, self._fail_pending)
        self._resetting: asyncio.Future[bool] | None = None
        self._scraping: asyncio.Task[str] | None = None
        self._scraped: dict[int, asyncio.Future[str]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._last_progress = time.monotonic()
        self._telemetry = _Telemetry()

    @property
    def version(self) -> str:
        return self._keeper.version or self._installed

    @property
    def restarts(self) -> int:
        return self._keeper.restarts

    @cached_property
    def _model(self) -> ResolvedModel:
        return resolve(self._config.model)

    @cached_property
    def template(self) -> ModelTemplate:
        """Resolves the model on first use, which may block for long; `open` does it in a thread."""
        return load_template(self._model.directory)

    @property
    def limits(self) -> EngineLimits:
        config = self._config
        return EngineLimits(
            config.context_tokens,
            config.max_concurrent,
            config.max_queued,
            config.max_batched_tokens,
        )

    @property
    def is_ready(self) -> bool:
        return self._keeper.is_ready

    @property
    def pgid(self) -> int | None:
        """The process group of the engine's processes, while it has one."""
        return self._keeper.host.pgid if self._keeper.host else None

    async def open(self) -> None:
        """Ready to generate, the first step behind it; raises EngineDead."""
        await self._keeper.open(self._plan_start)
        self._watching = asyncio.create_task(self._watch_progress())
        self._watching.add_done_callback(self._keeper.guard_ended)

    async def generate(self, request: Request) -> Reply:
        if not isinstance(request.prompt, TokenPrompt):
            raise RequestRejected(f"engine {self.name} takes prompts as token ids")
        host = await self._keeper.ready_host()
        pending = self._ask(host, request)
        try:
            return self._reply(pending, await pending.answer)
        except asyncio.CancelledError:
            host.link.send("abort", pending.number)
            raise
        finally:
            self._pending.pop(pending.number, None)
            if pending.timer is not None:
                pending.timer.cancel()

    def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        return self._telemetry.snapshots()

    async def prime(self, prompt: Prompt) -> None:
        limit_s = START_LIMIT_S[self._device]
        await self.generate(Request("prime", "", prompt, None, 1, Sampling(), limit_s))

    async def reset_prefix_cache(self) -> bool:
        if self._pending:
            return False
        host = await self._keeper.ready_host()
        self._resetting = asyncio.get_running_loop().create_future()
        host.link.send("reset")
        try:
            async with asyncio.timeout(_RESET_S):
                return await self._resetting
        except TimeoutError:
            return False

    async def metrics(self) -> str:
        """vLLM's own metrics in Prometheus' text format, counted since this start of the engine.

        Empty while the engine is down or does not answer in 2 s. Callers at one time share one
        question.
        """
        if self._scraping is None or self._scraping.done():
            self._scraping = asyncio.create_task(self._scrape())
        return await asyncio.shield(self._scraping)

    async def close(self) -> None:
        """End every process of the engine and wait until none is left."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._keeper.close()
        self._telemetry.close()

    async def _scrape(self) -> str:
        host = self._keeper.live
        if host is None:
            return ""
        number = next(self._numbers)
        text = self._scraped[number] = asyncio.get_running_loop().create_future()
        host.link.send("metrics", number)
        either: set[asyncio.Future[Any]] = {text, host.link.failed}
        await asyncio.wait(either, timeout=_METRICS_S, return_when=asyncio.FIRST_COMPLETED)
        self._scraped.pop(number, None)
        return text.result() if text.done() else ""

    def _plan_start(self) -> HostStart:
        model, config = self._model, self._config
        warm_up = PromptParts("Warm up.", "", "Moves:", ("e2e4",))
        return HostStart(
            name=self.name,
            log_dir=self._settings.log_dir,
            arguments=engine_args(
                config, str(model.directory), self._device, shape_of(config.model)
            ),
            environment=engine_environment(config, self._device),
            warm_up_ids=list(self.template.render(warm_up).ids),
            limit_s=START_LIMIT_S[self._device],
            command=self.host_command,
        )

    async def _watch_progress(self) -> None:
        """Call the engine stalled when work is unfinished and no step completes for too long."""
        stall_s = self._settings.stall_seconds
        period = min(1.0, stall_s / 4)
        woken = time.monotonic()
        while True:
            await asyncio.sleep(period)
            now = time.monotonic()
            overslept = now - woken - period
            woken = now
            if overslept > 1.0:
                # this process itself was stopped: the engine may have gone on unheard
                self._last_progress += overslept
            silent_s = now - self._last_progress
            if self._pending and self._keeper.host is not None and silent_s > stall_s:
                self._keeper.host.link.fail(
                    EngineStalled(
                        f"engine {self.name}: no step for {silent_s:.1f} s with "
                        f"{len(self._pending)} requests unfinished"
                    )
                )

    def _ask(self, host: HostProcess, request: Request) -> _Pending:
        loop = asyncio.get_running_loop()
        pending = _Pending(next(self._numbers), request, loop)
        if not self._pending:
            self._last_progress = pending.admitted
        self._pending[pending.number] = pending
        draw = request.sampling
        ask = Ask(
            number=pending.number,
            ids=list(request.prompt.ids) if isinstance(request.prompt, TokenPrompt) else [],
            choices=request.choices,
            max_tokens=request.max_tokens,
            temperature=draw.temperature,
            top_p=draw.top_p,
            seed=draw.seed,
            min_tokens=draw.min_tokens,
            use_prefix_cache=request.use_prefix_cache,
            stream=request.stream,
            stop=request.stop,
        )
        host.link.send("ask", *ask)
        pending.timer = loop.call_later(request.deadline_s, self._expire, host, pending)
        return pending

    def _expire(self, host: HostProcess, pending: _Pending) -> None:
        """Ask for what there is; a host that does not even answer that is stalled."""
        pending.expired = True
        host.link.send("expire", pending.number)
        loop = asyncio.get_running_loop()
        pending.timer = loop.call_later(_EXPIRE_S, self._give_up, host, pending)

    def _give_up(self, host: HostProcess, pending: _Pending) -> None:
        host.link.send("abort", pending.number)
        pending.fail(self._late(pending.request))

    def _late(self, request: Request) -> EngineStalled:
        return EngineStalled(
            f"engine {self.name}: {request.id} was not answered in {request.deadline_s:g} s"
        )

    def _take(self, tag: str, fields: list[Any]) -> None:
        """One message from the host."""
        now = time.monotonic()
        if tag == "steps":
            self._last_progress = now
            self._keep_step(now)
            self._telemetry.add(now, [Step(*step) for step in fields])
        elif tag == "reply":
            answer = Answer(*fields)
            pending = self._pending.get(answer.number)
            if answer.finish != "abort":
                self._last_progress = now
            if pending is not None and not pending.answer.done():
                pending.answer.set_result(answer)
        elif tag == "first":
            pending = self._pending.get(fields[0])
            if pending is not None:
                pending.first_token = now
        elif tag == "error":
            number, kind, message = fields
            pending = self._pending.get(number)
            if pending is not None:
                pending.fail(self._error(kind, message))
        elif tag == "reset" and self._resetting is not None and not self._resetting.done():
            self._resetting.set_result(bool(fields[0]))
        elif tag == "metrics" and (text := self._scraped.pop(fields[0], None)) is not None:
            text.set_result(str(fields[1]))

    def _error(self, kind: str, message: str) -> EngineError:
        text = f"engine {self.name}: {message}"
        if kind == "overloaded":
            self._telemetry.rejected += 1
            return Overloaded(text)
        return RequestRejected(text) if kind == "rejected" else EngineUnavailable(text)

    def _keep_step(self, at: float) -> None:
        self._steps_at.append(at)
        oldest = next(iter(self._pending.values()), None)
        since = at if oldest is None else oldest.admitted
        while self._steps_at and self._steps_at[0] < since:
            self._steps_at.popleft()

    def _reply(self, pending: _Pending, answer: Answer) -> Reply:
        done = time.monotonic()
        finish = _FINISHES.get(answer.finish)
        if finish is None and pending.expired and self._was_computing(pending, answer):
            finish = Finish.DEADLINE
        if finish is None:
            if pending.expired:
                raise self._late(pending.request)
            raise MalformedReply(f"engine {self.name} ended a request with {answer.finish!r}")
        timings = Timings(
            submitted=pending.admitted,
            admitted=pending.admitted,
            first_token=pending.first_token,
            done=done,
            queue_s=answer.queue_s,
            prefill_s=answer.prefill_s,
            decode_s=answer.decode_s,
        )
        if (why := cut_short(pending.request, finish, answer.completion)) is not None:
            raise EngineUnavailable(f"engine {self.name}: {why}")
        usage = Usage(answer.prompt, answer.completion, answer.cached)
        return Reply(answer.text, finish, usage, timings, answer.step_requests_mean)

    def _was_computing(self, pending: _Pending, answer: Answer) -> bool:
        """True if an unconstrained request ran into its deadline while the engine worked on it.

        Its own time must have used the deadline up: what it spent in the engine's queue costs
        nobody, but for the wait for the step under way, which every request has.
        """
        request = pending.request
        if request.choices is not None or not answer.completion or answer.queue_s is None:
            return False
        begun = pending.admitted + answer.queue_s
        ended = pending.admitted + request.deadline_s
        return used_its_time(begun, self._steps_at, ended, request.deadline_s)

    def _fail_pending(self, error: EngineError) -> None:
        for pending in list(self._pending.values()):
            pending.fail(copy(error))


class _Telemetry:
    """Snapshots of engine steps with totals that go on over restarts."""

    def __init__(self) -> None:
        self.rejected = 0
        self._queries = 0
        self._hits = 0
        self._preemptions = 0
        self._last_at = 0.0
        self._queue = SnapshotQueue()

    def add(self, now: float, steps: list[Step]) -> None:
        self._queue.put(self._snapshots(now, steps))

    def _snapshots(self, now: float, steps: list[Step]) -> Iterator[EngineSnapshot]:
        for step in steps:
            # ages hold for the time of sending; of two batches read at once the first seems newer
            self._last_at = max(self._last_at, now - step.age_s)
            self._queries += step.prefix_queries
            self._hits += step.prefix_hits
            self._preemptions += step.preemptions
            yield EngineSnapshot(
                at=self._last_at,
                source="per_step",
                running=step.running,
                waiting=step.waiting,
                step_requests=step.requests,
                step_tokens=step.tokens,
                kv_usage=step.kv_usage,
                prefix_queries=self._queries,
                prefix_hits=self._hits,
                preemptions=self._preemptions,
                rejected=self.rejected,
            )

    def close(self) -> None:
        self._queue.close()

    def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        return self._queue.read()


VLLM = EngineKind(VllmConfig, check_vllm, VllmEngine)
