"""An engine behind HTTP: a server that runs already, or one that is launched for the run.

What a kind of server says is its `Dialect`'s; what is the same for all of them is here: one
connection a stream, time to the first token, deadlines, cancelling, faults, restarts, the watchdog,
and telemetry that is sampled.
"""

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import structlog

from serving.budget import cut_short, used_its_time
from serving.config import EngineConfigError, EngineStart
from serving.dialect import Call, Command, Dialect, one_line
from serving.engine import (
    ChatPrompt,
    EngineDead,
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
    Template,
    Timings,
    TokenPrompt,
    Usage,
)
from serving.http_client import LOOK_S, HttpClient, Stream, Unreachable
from serving.http_config import URL_START_S, HttpEngineConfig, api_key
from serving.http_server import Server, launch, reach
from serving.http_telemetry import SampledTelemetry
from serving.template import TemplateError

PROBE_CHOICES = ("e2e4", "d7d5")
_PROBE = PromptParts("Answer questions in English.", "", "What is the capital of France?", ())
"""Nobody answers this with one of the choices who is not made to."""

_FORGET_S = 10.0
_LAST_LOOK_S = 1.0
_RETRY_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0
_START_PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0)
_DEATH_S = 0.5
"""A connection that a dying server cuts is seen this long before its end."""
_PATIENCE = 4
"""Times `stall_seconds` until the first answer of a start, which may take long."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServerKind:
    """What a kind of server brings to the engine."""

    dialect: Dialect
    template: Callable[[], Template]
    """Blocks, the first time on a machine for long."""
    launch: Callable[[int], Command] | None = None
    """How it is started on a port; blocks likewise. None: it runs at the config's url."""


class HttpEngine:
    """A server of one kind. Dead or stalled, one that we launched is started again up to a limit;
    one at a url is waited for.

    Requests in flight at that moment end with the error; later ones wait for the server.
    """

    def __init__(self, start: EngineStart, config: HttpEngineConfig, kind: ServerKind) -> None:
        self.name = start.name
        self.kind = config.kind
        self.version = "unknown"
        self.model = ""
        """What the server tells of its model; empty where it does not."""
        self.restarts = 0
        self.command: Command | None = None
        """How the server was last started; None for one at a url."""
        self._settings = start
        self._config = config
        self._dialect = kind.dialect
        self._make_template = kind.template
        self._launch = kind.launch
        self._run = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._streams: set[Stream] = set()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Of the matches with a question under way; `_turn_of`."""
        self._client: HttpClient | None = None
        self._server: Server | None = None
        self._serving = asyncio.Event()
        """Set while requests need not wait: the server is ready, or there will be none again."""
        self._final: EngineDead | None = None
        self._down_since: float | None = None
        """When a server at a url failed first since it last answered."""
        self._fruitless = 0
        """Tries to reach it since then."""
        self._primed = 0
        """Prompts, since the caches were last empty."""
        self._last_progress = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._errands: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[str] | None = None
        self._warned_of_usage = False
        self._has_thought = False
        """In some answer so far, apart from it."""
        self._telemetry = SampledTelemetry()

    @cached_property
    def template(self) -> Template:
        """Resolves the model on first use, which may block for long; `open` does it in a thread."""
        return self._make_template()

    @property
    def limits(self) -> EngineLimits:
        config = self._config
        return EngineLimits(
            config.context_tokens,
            config.max_concurrent,
            config.max_queued,
            getattr(config, "max_batched_tokens", None),
        )

    @property
    def is_ready(self) -> bool:
        if self._final is not None:
            return True
        return self._server is not None and not self._server.failed.done()

    @property
    def pgid(self) -> int | None:
        """The process group of the launched server, while there is one."""
        process = self._server.process if self._server else None
        return process.pgid if process else None

    async def open(self) -> None:
        """Ready to generate, and seen to obey a constraint; raises EngineDead."""
        try:
            key = api_key(self._config)
            # counting, since some templates read their tokenizer for the first count alone
            await asyncio.to_thread(lambda: self.template.count_tokens(_PROBE))
            self._client = HttpClient(self._dialect, key)
            await self._begin()
            self._keep_running(self._supervise())
            self._keep_running(self._watch_progress())
            await self._probe()
            await self._count_from_here()
            self._keep_running(self._scrape())
        except (EngineError, EngineConfigError, TemplateError) as error:
            await self._close(EngineDead(str(error), final=True))
            raise EngineDead(str(error), final=True) from error
        except BaseException:
            await self.close()
            raise

    async def generate(self, request: Request) -> Reply:
        wanted = TokenPrompt if self._dialect.takes_ids else ChatPrompt
        if not isinstance(request.prompt, wanted):
            takes = "token ids" if self._dialect.takes_ids else "chat messages"
            raise RequestRejected(f"engine {self.name} takes prompts as {takes}")
        async with self._turn_of(request.match_id):
            return await self._ask(request)

    async def _ask(self, request: Request) -> Reply:
        server = await self._ready_server()
        stream = Stream(request, f"{self._run}-{next(self._numbers)}-{request.id}")
        if not self._streams:
            self._last_progress = stream.admitted
        self._streams.add(stream)
        is_refused = False
        try:
            return await self._answered(server, stream)
        except EngineError as error:
            is_refused = isinstance(error, Overloaded | RequestRejected)
            if request.match_id:
                self._telemetry.rejected += isinstance(error, Overloaded)
            raise self._named(error) from error.__cause__
        finally:
            self._streams.discard(stream)
            self._has_thought = self._has_thought or stream.reading.has_thought
            self._last_progress = max(self._last_progress, stream.last_event or 0.0)
            self._dialect.ended(stream.wire_id)
            if not is_refused and not stream.reading.is_done:
                self._abort(server, stream)

    def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        return self._telemetry.snapshots()

    async def prime(self, prompt: Prompt) -> None:
        """Of a server's caches that share nothing, the first prompt goes to all, the second to
        half, the third to a third."""
        await self._ready_server()
        self._primed += 1
        copies = max(1, self._dialect.caches // self._primed)
        limit_s = self._config.start_seconds
        primers = [
            Request(f"prime-{n}", "", prompt, None, 1, Sampling(), limit_s) for n in range(copies)
        ]
        await asyncio.gather(*(self._ask_patiently(one, is_proven=True) for one in primers))
        if not self._streams:
            await self._count_from_here()

    async def reset_prefix_cache(self) -> bool:
        if self._streams:
            return False
        server = await self._ready_server()
        self._primed = 0
        calls = self._dialect.forget()
        if calls is None:
            return False
        try:
            async with asyncio.timeout(_FORGET_S):
                return all(await asyncio.gather(*(self._does(server, call) for call in calls)))
        except (TimeoutError, EngineUnavailable):
            return False

    async def metrics(self) -> str:
        """The server's own metrics in Prometheus' text format, counted since its start.

        Empty where it has none or is not to be asked, is down, or does not answer in 2 s. Callers
        at one time share one question.
        """
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._first_page())
        return await asyncio.shield(self._looking)

    async def close(self) -> None:
        """End the launched server and wait until none of its processes is left."""
        await self._close(EngineDead(f"engine {self.name} was closed", final=True))

    # one question

    def _turn_of(self, match_id: str) -> AbstractAsyncContextManager[object]:
        """Of a match's questions at one time. Where each match has a cache of its own, a second one
        would compute the whole transcript in another, at the cost of everybody."""
        if not match_id or self._dialect.caches == 1:
            return contextlib.nullcontext()
        return self._turns.setdefault(match_id, asyncio.Lock())

    async def _answered(self, server: Server, stream: Stream) -> Reply:
        """The reply; the connection is closed before it is back, however it ends."""
        assert self._client is not None
        try:
            async with asyncio.timeout(stream.request.deadline_s) as stream.limit:
                await self._client.exchange(server.url, stream)
        except TimeoutError:
            if stream.failure is not None:
                raise copy(stream.failure) from None
            return self._late_reply(stream)
        except EngineUnavailable as error:
            if isinstance(error, MalformedReply):
                raise
            raise await self._meaning(server, stream, error) from error.__cause__
        except (Overloaded, RequestRejected):
            self._last_progress = time.monotonic()
            raise
        server.has_answered = True
        self._down_since = None
        return self._reply(stream, Finish.STOP)

    async def _meaning(
        self, server: Server, stream: Stream, error: EngineUnavailable
    ) -> EngineError:
        """What a broken connection means: often that the server is gone."""
        if stream.failure is not None:
            return copy(stream.failure)
        if server.process is not None:
            await asyncio.wait([server.failed], timeout=_DEATH_S)
            if server.failed.done():
                return copy(server.failed.result())
        elif isinstance(error, Unreachable):
            server.fail(self._named(error))
        return error

    def _abort(self, server: Server, stream: Stream) -> None:
        """The connection is closed already; tell a server that wants to be told besides."""
        call = self._dialect.abort(stream.wire_id)
        if call is not None and self._final is None:
            errand = asyncio.create_task(self._send(server, call, stream.request.match_id))
            self._errands.add(errand)
            errand.add_done_callback(self._errands.discard)

    async def _send(self, server: Server, call: Call, match_id: str) -> None:
        with contextlib.suppress(TimeoutError, EngineUnavailable):
            async with asyncio.timeout(LOOK_S):
                await self._does(server, call, match_id)

    async def _does(self, server: Server, call: Call, match_id: str = "") -> bool:
        assert self._client is not None
        return await self._client.does(server.url, call, match_id)

    def _reply(self, stream: Stream, otherwise: Finish) -> Reply:
        reading, request = stream.reading, stream.request
        timings = Timings(
            submitted=stream.admitted,
            admitted=stream.admitted,
            first_token=stream.first_token,
            done=time.monotonic(),
            queue_s=reading.queue_s,
            prefill_s=reading.prefill_s,
            decode_s=reading.decode_s,
        )
        text = self._dialect.answer(request, reading) if reading.is_done else reading.text
        usage = self._usage(stream)
        if reading.is_done and request.match_id:
            self._telemetry.answered(usage)
        if (why := cut_short(request, reading.finish, reading.completion)) is not None:
            raise EngineUnavailable(why)
        finish = reading.finish or otherwise
        return Reply(text, finish, usage, timings, reasoning=reading.thought)

    def _usage(self, stream: Stream) -> Usage:
        """As the server tells; what it does not tell is counted here, and that is told once. Of
        messages that only the server has counted the tokens are unknown."""
        reading, prompt = stream.reading, stream.request.prompt
        is_told = reading.prompt is not None and reading.completion is not None
        if not is_told and reading.is_done and not self._warned_of_usage:
            self._warned_of_usage = True
            log.warning("engine.tells_no_usage", engine=self.name, counted="pieces of the answer")
        told = reading.prompt
        if told is None and isinstance(prompt, TokenPrompt):
            told = len(prompt.ids)
        completion = reading.pieces if reading.completion is None else reading.completion
        return Usage(told, completion, reading.cached)

    def _late_reply(self, stream: Stream) -> Reply:
        """What there is at the deadline, where the time was the player's own; else raises."""
        if self._was_computing(stream):
            return self._reply(stream, Finish.DEADLINE)
        raise EngineStalled(
            f"{stream.request.id} was not answered in {stream.request.deadline_s:g} s"
        )

    def _was_computing(self, stream: Stream) -> bool:
        """True if an unconstrained request ran into its deadline while its tokens came.

        Its own time must have used the deadline up: what it waited in the server costs nobody.
        Where that is not known, its own time is from its first token on.
        """
        request = stream.request
        if request.choices is not None or stream.begun is None:
            return False
        queue_s = stream.reading.queue_s
        if queue_s is None and self._dialect.starts_with_headers and stream.headers_at is not None:
            queue_s = stream.headers_at - stream.admitted
        begun = stream.begun if queue_s is None else stream.admitted + queue_s
        ended = stream.admitted + request.deadline_s
        return used_its_time(begun, stream.events, ended, request.deadline_s)

    # the server

    async def _begin(self) -> None:
        """A server that answers, or EngineDead; leaves no process behind when it fails."""
        begun = time.monotonic()
        client, config = self._client, self._config
        assert client is not None
        if self._launch is None:
            server = await reach(client, self.name, config.url or "", URL_START_S)
        else:
            server = await launch(client, self._settings, self._launch, config.start_seconds)
        try:
            await self._take(server)
        except BaseException:
            await server.end(at_once=True)
            raise
        took = round(time.monotonic() - begun, 1)
        log.info("engine.ready", engine=self.name, version=self.version, seconds=took)

    async def _take(self, server: Server) -> None:
        """Serve by it from now on; raises EngineDead where it is not what the config says."""
        self.version = await self._about(server)
        if server.process is not None:
            self._telemetry.began()
        self.command = server.command
        self._primed = 0
        self._server = server
        self._last_progress = time.monotonic()
        self._serving.set()

    async def _page(self, server: Server, path: str) -> str:
        assert self._client is not None
        return await self._client.page(server.url + path)

    async def _about(self, server: Server) -> str:
        """The server's version; raises EngineDead where it is not what the config says, and
        EngineUnavailable where it is not what it was: another model would play on in its name."""
        known = server.command.version if server.command else None
        texts = [await self._page(server, path) for path in self._dialect.about_paths]
        try:
            told = self._dialect.about(texts)
        except EngineConfigError as error:
            raise EngineDead(f"engine {self.name}: {error}") from error
        model = self._dialect.model(texts)
        if self.model and model != self.model:
            raise EngineUnavailable(
                f"the server is back with {model or 'a model that it does not name'}, and served "
                f"{self.model} before: start it with the same model and length"
            )
        self.model = model
        return known or told

    async def _probe(self) -> None:
        """A constrained question; raises EngineDead where no choice comes, and says why."""
        template = self.template
        most = max(len(choice.encode()) for choice in PROBE_CHOICES) + 1
        limit_s = self._config.start_seconds
        prompt = await asyncio.to_thread(template.render, _PROBE)
        reply = await self._ask_patiently(
            Request("probe", "", prompt, PROBE_CHOICES, most, Sampling(temperature=0), limit_s)
        )
        if self._has_thought and not reply.text:
            raise EngineDead(
                f"engine {self.name}: the model thinks first, and its thoughts used up the tokens "
                "of the answer: turn thinking off where the server is started, or by extra_body "
                "where the kind has it"
            )
        if reply.text not in PROBE_CHOICES:
            raise EngineDead(
                f"engine {self.name}: the server does not obey {self._dialect.constraint_field}: "
                f"made to choose of {' and '.join(PROBE_CHOICES)}, it answered "
                f"{one_line(reply.text, 60)!r}"
            )

    async def _ask_patiently(self, request: Request, *, is_proven: bool = False) -> Reply:
        """A question of a start, which a refusal, a cut or a crash is not to end, nor nonsense
        from a server that `is_proven`: asked again, with longer and longer pauses."""
        for pause_s in _START_PAUSES_S:
            try:
                return await self.generate(request)
            except RequestRejected:
                raise
            except EngineError as error:
                if isinstance(error, MalformedReply) and not is_proven:
                    raise
                if isinstance(error, EngineDead) and error.final:
                    raise
                log.warning("engine.asked_again", engine=self.name, kind=error.kind, why=str(error))
            await asyncio.sleep(pause_s)
        return await self.generate(request)

    # failures

    async def _supervise(self) -> None:
        """Until closed: when the server fails, start another or wait for it."""
        while self._server is not None:
            server = self._server
            error = await asyncio.shield(server.failed)
            log.warning("engine.failed", engine=self.name, kind=error.kind, reason=str(error))
            self._serving.clear()
            if server.process is not None or isinstance(error, EngineStalled):
                self._fail_streams(error)
            await server.end(at_once=True)
            self._server = None
            await (self._restart(error) if self._launch else self._wait_for(error))

    async def _restart(self, error: EngineError) -> None:
        """Another start, or after as many as are allowed the final error for every request."""
        limit = self._settings.restart_limit
        while self.restarts < limit:
            self.restarts += 1
            try:
                await self._begin()
            except (EngineError, EngineConfigError, OSError) as again:
                error = self._named(EngineDead(str(again)))
                await asyncio.sleep(_RETRY_PAUSE_S)
            else:
                return
        self._give_up(EngineDead(f"{error} (restarted {limit} times)", final=True))

    async def _wait_for(self, error: EngineError) -> None:
        """Until the server at the url answers again.

        What it is given is `restart_limit` tries and `restart_limit` + 1 times `stall_seconds`,
        both used up without an answer in between. Pauses grow: a proxy may say that it is ready and
        have no server behind it.
        """
        client, settings = self._client, self._settings
        assert client is not None
        limit_s = (settings.restart_limit + 1) * settings.stall_seconds
        if self._down_since is None:
            self._down_since, self._fruitless = time.monotonic(), 0
        give_up_at = self._down_since + limit_s
        while self._fruitless < settings.restart_limit or time.monotonic() < give_up_at:
            if self._fruitless:
                pause_s = min(_RETRY_PAUSE_S * 2**self._fruitless, _LONGEST_PAUSE_S)
                await asyncio.sleep(pause_s)
            self._fruitless += 1
            try:
                url = self._config.url or ""
                await self._take(await reach(client, self.name, url, limit_s, is_known=True))
            except EngineDead as dead:
                return self._give_up(EngineDead(str(dead), final=True))
            except EngineError as again:
                error = self._named(again)
                continue
            self.restarts += 1
            log.info(
                "engine.ready",
                engine=self.name,
                version=self.version,
                reconnected=self.restarts,
            )
            # before its counters, which may have begun anew, are past where they were
            return await self._look()
        self._give_up(EngineDead(f"{error} (tried {self._fruitless} times)", final=True))

    def _give_up(self, final: EngineDead) -> None:
        self._final = final
        log.error("engine.dead", engine=self.name, reason=str(final))
        self._serving.set()

    async def _watch_progress(self) -> None:
        """Call the server stalled when questions are unanswered and nothing comes for too long, and
        one answer when its bytes mean nothing for too long."""
        stall_s = self._settings.stall_seconds
        period = min(1.0, stall_s / 4)
        woken = time.monotonic()
        while True:
            await asyncio.sleep(period)
            now = time.monotonic()
            overslept = now - woken - period
            woken = now
            if overslept > 1.0:
                # this process itself was stopped: the server may have gone on unheard
                self._last_progress += overslept
                continue
            self._check_server(now, stall_s)
            for stream in list(self._streams):
                if (silent_s := stream.dribbling_s(now)) > stall_s:
                    stream.fail(EngineStalled(f"bytes came but no line for {silent_s:.1f} s"))

    def _check_server(self, now: float, stall_s: float) -> None:
        server = self._server
        if server is None or not self._streams:
            return
        events = (stream.last_event or 0.0 for stream in self._streams)
        silent_s = now - max(self._last_progress, *events)
        if silent_s > stall_s * (1 if server.has_answered else _PATIENCE):
            server.fail(
                EngineStalled(
                    f"engine {self.name}: nothing came for {silent_s:.1f} s with "
                    f"{len(self._streams)} requests unanswered"
                )
            )

    async def _ready_server(self) -> Server:
        while True:
            await self._serving.wait()
            if self._final is not None:
                raise copy(self._final)
            if self._server is not None and not self._server.failed.done():
                return self._server
            # failed; the supervisor, about to run, opens the way again
            self._serving.clear()

    def _named(self, error: EngineError) -> EngineError:
        """With the engine's name."""
        text, prefix = str(error), f"engine {self.name}"
        named = copy(error)
        named.args = (text if text.startswith(prefix) else f"{prefix}: {text}",)
        return named

    def _fail_streams(self, error: EngineError) -> None:
        for stream in list(self._streams):
            stream.fail(error)

    def _keep_running(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._guard_ended)
        self._tasks.append(task)

    def _guard_ended(self, task: asyncio.Task[None]) -> None:
        """Without supervisor, watchdog and telemetry nothing can be trusted: say so."""
        if not task.cancelled() and (cause := task.exception()) is not None:
            self._final = EngineDead(f"engine {self.name}: {cause!r}", final=True)
            self._fail_streams(self._final)
            self._serving.set()

    async def _close(self, final: EngineDead) -> None:
        """Whatever fails here, or if this is cancelled, the launched server is ended."""
        self._final = self._final or final
        self._fail_streams(final)
        self._serving.set()
        tasks, self._tasks = [*self._tasks, *self._errands], []
        for task in tasks:
            task.cancel()
        async with AsyncExitStack() as stack:
            stack.callback(self._telemetry.close)
            stack.push_async_callback(self._end_server)
            # first: servers wait for their clients before they end
            stack.push_async_callback(self._end_client)
            await asyncio.gather(*tasks, return_exceptions=True)
            if tasks:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_LOOK_S):
                        await self._look()

    async def _end_client(self) -> None:
        if self._client is not None:
            await asyncio.sleep(0)
            await self._client.close()
        if self._looking is not None:
            await asyncio.wait([self._looking])

    async def _end_server(self) -> None:
        if self._server is None:
            return
        server, self._server = self._server, None
        try:
            await server.end()
        except asyncio.CancelledError:
            await server.end(at_once=True)
            raise

    # telemetry

    async def _scrape(self) -> None:
        while True:
            await asyncio.sleep(self._config.scrape_seconds)
            await self._look()

    async def _look(self) -> None:
        """One snapshot, while there is a server. Raises for nothing that a page may hold."""
        server = self._server
        if server is None:
            return
        pages = (self._figures(server, path) for path in self._dialect.metrics_paths)
        texts = await asyncio.gather(*pages)
        if server is not self._server:
            return
        try:
            seen = self._dialect.seen(texts)
        except Exception as error:  # noqa: BLE001
            # lost telemetry is to end no engine
            log.warning("engine.not_understood", engine=self.name, why=repr(error))
        else:
            self._telemetry.add(seen, len(self._streams))

    async def _count_from_here(self) -> None:
        """What the server has counted so far is none of the run's."""
        self._telemetry.forget()
        await self._look()

    async def _first_page(self) -> str:
        paths: Sequence[str] = self._dialect.metrics_paths
        if self._server is None or self._final is not None or not paths:
            return ""
        return await self._figures(self._server, paths[0])

    async def _figures(self, server: Server, path: str) -> str:
        return await self._page(server, path) if self._config.scrape else ""
