"""A server with no model, over HTTP: answers as vLLM, SGLang, llama.cpp, Ollama and OpenAI do.

    async with FakeServer(FakeConfig(dialects=("sglang",), slots=2)) as server:
        ... POST f"{server.url}/generate" ...
        assert server.running == 1

`FakeModel` says what is computed and how long it takes; here it is put on a clock and on the wire,
and misbehaves where it is told to.
"""

import asyncio
import itertools
import json
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, cast

from aiohttp import web

from serving.fake_model import (
    Ask,
    FakeConfig,
    FakeDialect,
    FakeFault,
    FakeModel,
    FaultKind,
    Job,
    QueueFull,
    Totals,
    choose,
    pieces_of,
)
from serving.fake_native import FORMS
from serving.fake_pages import (
    VERSIONS,
    metrics,
    models_page,
    props_page,
    server_info_page,
    slots_page,
    tags_page,
)
from serving.fake_wire import (
    MODEL_CHECKED,
    THOUGHTS,
    Answer,
    Event,
    Form,
    Question,
    Refused,
    compact,
    error_of,
    sglang_no_room,
    stopped,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_TURNS = 5
"""Of the event loop, until a connection that the listener has taken is one of the server's."""
_HTML_ERROR = "<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"


class Clock(Protocol):
    """The time of the model, in seconds."""

    def time(self) -> float: ...

    async def sleep_until(self, at: float) -> None: ...


class WallClock:
    """Real time from the first look on, `speed` times as fast."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._began = time.monotonic()

    def time(self) -> float:
        return (time.monotonic() - self._began) * self._speed

    async def sleep_until(self, at: float) -> None:
        await asyncio.sleep(max(0.0, at - self.time()) / self._speed)


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A question as it came."""

    number: int
    path: str
    headers: dict[str, str]
    body: Any
    """JSON, or bytes that are none."""
    fault: FaultKind | None


class FakeServer:
    """A server on a port of 127.0.0.1, or of another host, while it is entered."""

    def __init__(
        self,
        config: FakeConfig,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.seen: deque[SeenRequest] = deque(maxlen=10_000)
        """The last questions to the model as they came; looks at pages are not among them."""
        self._host = host
        self._port = port
        self._clock: Clock = clock or WallClock(config.speed)
        self._model = FakeModel(config)
        self._numbers = itertools.count()
        self._changed: dict[Job, asyncio.Event] = {}
        self._rids: dict[str, Job] = {}
        self._has_work = asyncio.Event()
        self._work_since = 0.0
        self._is_thawed = asyncio.Event()
        self._is_thawed.set()
        self._loading_until = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._site: web.TCPSite | None = None
        # a client that leaves ends its handler, which gives the slot back
        self._runner = web.AppRunner(
            self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    @property
    def running(self) -> int:
        """Requests in slots."""
        return self._model.running

    @property
    def waiting(self) -> int:
        return self._model.waiting

    @property
    def totals(self) -> Totals:
        """Counts since the start, or since the last crash."""
        return self._model.totals

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await self._listen()
        self._port = self._runner.addresses[0][1]
        self._spawn(self._compute())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._hang_up()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._runner.cleanup()

    async def _listen(self) -> None:
        self._site = web.TCPSite(self._runner, self._host, self._port, reuse_address=True)
        await self._site.start()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # computing

    async def _compute(self) -> None:
        """Steps one after the other, each due when the last one should have ended: what the event
        loop is late by is made up for."""
        due = self._clock.time()
        while True:
            await self._is_thawed.wait()
            model = self._model
            step = model.start_step(due)
            if step is None:
                self._has_work.clear()
                await self._has_work.wait()
                due = max(due, self._work_since)
                continue
            for job, _ in step.prompts:
                self._wake(job)
            due += step.seconds
            await self._clock.sleep_until(due)
            if not self._is_thawed.is_set():
                await self._is_thawed.wait()
                due = self._clock.time()
            for job in model.finish_step(step, due):
                self._wake(job)

    def _begin(self, form: Form, question: Question, fault: FaultKind | None) -> Job:
        texts = question.choices if fault != "ignore_constraint" else None
        seed = self.config.seed if question.seed is None else question.seed
        text = choose(texts or self.config.replies, question.ids, seed, question.temperature)
        room = min(question.max_tokens, self.config.context_tokens - len(question.ids))
        whole = pieces_of(text, by_character=texts is not None)
        if fault == "thinking":
            apart = form.thinks_apart
            whole = (*(THOUGHTS if apart else ("<think>", *THOUGHTS, "</think>")), *whole)
        if texts is None:
            whole = stopped(whole, question)
        if fault == "cut_short":
            room = min(room, len(whole) // 2)
        ask = Ask(
            ids=question.ids,
            pieces=whole[:room],
            ends="stop" if len(whole) <= room else "length",
            slot=question.slot,
            use_cache=question.use_cache,
            salt=question.salt,
        )
        job = self._model.submit(ask, self._clock.time())
        self._changed[job] = asyncio.Event()
        if question.rid is not None:
            self._rids[question.rid] = job
        if not self._has_work.is_set():
            self._work_since = job.submitted
            self._has_work.set()
        return job

    def _wake(self, job: Job) -> None:
        if job in self._changed:
            self._changed[job].set()

    async def change(self, job: Job) -> None:
        """Until the job has started, written or ended since the last look at it."""
        event = self._changed[job]
        event.clear()
        await event.wait()

    def end(self, job: Job) -> None:
        """Aborts the job, if it still runs or waits, and tells whoever waits for it."""
        self._model.cancel(job, self._clock.time())
        self._wake(job)

    # questions

    def _asked(self, form: Form) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            number = next(self._numbers)
            fault = self.config.fault(number)
            body = _parsed(await request.read())
            kind = fault.kind if fault else None
            headers = dict(request.headers)
            self.seen.append(SeenRequest(number, request.path, headers, body, kind))
            try:
                if fault and (instead := await self._misbehave(form, fault)):
                    return instead
                question = self._read(form, body)
                if kind == "queue_full_200":
                    raise _inside(form.full())
                job = self._begin(form, question, kind)
            except QueueFull:
                return await self._refuse(request, form, form.full(), body)
            except Refused as refused:
                return await self._refuse(request, form, refused, body)
            return await self._answer(request, form, question, job, number)

        return handle

    def _read(self, form: Form, body: Any) -> Question:
        if not isinstance(body, dict):
            raise form.bad("the body is no JSON object")
        try:
            question = form.read(body)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise form.bad(f"{type(error).__name__}: {error}") from error
        tokens, context = len(question.ids), self.config.context_tokens
        if question.model not in (None, self.config.model) and form.dialect in MODEL_CHECKED:
            raise form.no_model(question.model, self.config.model)
        if question.rid is not None and question.rid in self._rids:
            raise form.bad(f"Duplicate request ID detected: {question.rid}")
        if form.dialect == "sglang" and tokens + question.max_tokens > context > tokens:
            raise form.bad(sglang_no_room(tokens, question.max_tokens, context))
        if tokens < context:
            return question
        if not question.is_cut:
            raise form.too_long(tokens, context)
        return replace(question, ids=question.ids[-(context // 2) :])

    async def _refuse(
        self, request: web.Request, form: Form, refused: Refused, body: Any
    ) -> web.StreamResponse:
        is_streamed = isinstance(body, dict) and body.get("stream", form.streams_by_default)
        if not is_streamed or refused.events is None:
            return web.json_response(refused.body, status=refused.status)
        response = web.StreamResponse(headers={"Content-Type": form.media_type})
        await response.prepare(request)
        for event in refused.events:
            await response.write(form.frame(event))
        await response.write_eof(form.end_mark)
        return response

    async def _answer(
        self, request: web.Request, form: Form, question: Question, job: Job, number: int
    ) -> web.StreamResponse:
        fault, model = self.config.fault(number), self._model
        kind = fault.kind if fault else None
        answer = Answer(
            id=f"fake-{number}",
            model=self.config.model,
            created=int(time.time()),
            question=question,
            job=job,
            thoughts=len(THOUGHTS) if kind == "thinking" and form.thinks_apart else 0,
            hides_usage=kind == "no_usage",
            hides_cached=kind == "null_cached",
        )
        try:
            return await _Delivery(self, request, form, answer, fault).run()
        finally:
            if kind != "late_cancel":
                model.cancel(job, self._clock.time())
            del self._changed[job]
            if question.rid is not None and self._rids.get(question.rid) is job:
                del self._rids[question.rid]

    # what goes wrong

    async def _misbehave(self, form: Form, fault: FakeFault) -> web.Response | None:
        """What a fault answers instead of all else; None: it shows later, if at all."""
        match fault.kind:
            case "queue_full_503" | "queue_full_429":
                refused = form.full(int(fault.kind[-3:]))
                return web.json_response(refused.body, status=refused.status)
            case "too_long":
                raise form.too_long(self.config.context_tokens + 1, self.config.context_tokens)
            case "wrong_content_type":
                return web.Response(text="ok", content_type="text/plain")
            case "html_error":
                return web.Response(status=502, text=_HTML_ERROR, content_type="text/html")
            case "redirect":
                return web.Response(status=307, headers={"Location": "/elsewhere"})
            case "loading_503":
                self._loading_until = time.monotonic() + fault.lasts
                return _loading(form.dialect)
            case "freeze":
                self._is_thawed.clear()
                self._spawn(self._thaw(fault.lasts))
                await self._is_thawed.wait()
            case "crash":
                self._spawn(self._crash(fault.lasts))
                await _until_cancelled()
        return None

    async def _thaw(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._is_thawed.set()

    async def _crash(self, seconds: float) -> None:
        if self._site is None:
            return
        await self._hang_up()
        self._model = FakeModel(self.config)
        self._rids.clear()
        await asyncio.sleep(seconds)
        await self._listen()

    async def _hang_up(self) -> None:
        """Listen no more, and reset every connection."""
        site, self._site = self._site, None
        if site is not None:
            await site.stop()
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        self._reset_connections()

    def _reset_connections(self) -> None:
        server = self._runner.server
        for connection in list(server.connections) if server else ():
            if connection.transport is not None:
                _reset(connection.transport)

    # pages

    def _app(self) -> web.Application:
        @web.middleware
        async def gate(request: web.Request, handler: Handler) -> web.StreamResponse:
            first = self.config.dialects[0]
            await self._is_thawed.wait()
            if time.monotonic() < self._loading_until:
                return _loading(first)
            try:
                return await handler(request)
            except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
                return web.json_response(_not_found(first), status=404)
            except ConnectionResetError:
                return web.Response()  # to nobody: the client has left

        app = web.Application(middlewares=[gate], client_max_size=64 << 20)
        taken = set()
        for dialect in self.config.dialects:
            for method, path, handler in self._routes(dialect):
                if (method, path) not in taken:
                    taken.add((method, path))
                    app.router.add_route(method, path, handler)
        return app

    def _routes(self, dialect: FakeDialect) -> Iterator[tuple[str, str, Handler]]:
        for form in FORMS[dialect]:
            yield "POST", form.path, self._asked(form(dialect))
        yield "GET", "/v1/models", _json_page(lambda: models_page(dialect, self.config))
        if dialect in ("vllm", "sglang", "llama_server"):
            yield "GET", "/metrics", self._metrics
        match dialect:
            case "vllm":
                yield "GET", "/health", _empty
                yield "GET", "/ping", _empty
                yield "GET", "/version", _json_page(lambda: {"version": VERSIONS["vllm"]})
                reset = _json_page(lambda: {"success": self._model.forget()})
                yield "POST", "/reset_prefix_cache", reset
            case "sglang":
                for path in ("/health", "/health_generate"):
                    yield "GET", path, self._slow_health
                yield "GET", "/ready", _empty
                for path in ("/server_info", "/get_server_info"):
                    yield "GET", path, _json_page(lambda: server_info_page(self._model))
                yield "POST", "/abort_request", self._abort
                for method in ("GET", "POST"):
                    yield method, "/flush_cache", self._flush
            case "llama_server":
                yield "GET", "/health", _json_page(lambda: {"status": "ok"})
                yield "GET", "/props", _json_page(lambda: props_page(self.config))
                yield "GET", "/slots", self._slots
            case "ollama":
                yield "GET", "/api/version", _json_page(lambda: {"version": VERSIONS["ollama"]})
                yield "GET", "/api/tags", _json_page(lambda: tags_page(self.config))

    async def _metrics(self, _: web.Request) -> web.Response:
        """Those of every dialect that is served; the names do not overlap."""
        text = "".join(metrics(dialect, self._model) for dialect in self.config.dialects)
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def _slow_health(self, _: web.Request) -> web.Response:
        """SGLang asks itself for a token, and looks for it once a second."""
        await self._clock.sleep_until(self._clock.time() + 1.0)
        return web.Response()

    async def _abort(self, request: web.Request) -> web.Response:
        """Answers alike whether there was such a request or not."""
        body = _parsed(await request.read())
        is_all = body.get("abort_all") is True
        for rid, job in list(self._rids.items()):
            if is_all or rid == body.get("rid"):
                self.end(job)
        return web.Response()

    async def _flush(self, _: web.Request) -> web.Response:
        if self._model.forget():
            return web.Response(text="Cache flushed.\n")
        return web.Response(status=400, text="Flush cache failed.\n")

    async def _slots(self, request: web.Request) -> web.Response:
        if request.query.get("fail_on_no_slot") and self.running == self.config.slots:
            body = error_of("llama_server", 503, "no slot available", "unavailable_error")
            return web.json_response(body, status=503)
        return web.json_response(slots_page(self._model))


class _Delivery:
    """One answer on its way to the client, whole or in pieces, and what goes wrong on it."""

    def __init__(
        self,
        server: FakeServer,
        request: web.Request,
        form: Form,
        answer: Answer,
        fault: FakeFault | None,
    ) -> None:
        self._server = server
        self._request = request
        self._form = form
        self._answer = answer
        self._job = answer.job
        self._fault = fault
        self._kind = fault.kind if fault else None
        self._half = max(1, len(answer.job.ask.pieces) // 2)

    async def run(self) -> web.StreamResponse:
        if self._answer.question.is_streamed:
            response = await self._stream()
        else:
            response = await self._whole()
        if self._closes_after:
            await response.write_eof()
            assert self._request.transport is not None
            self._request.transport.close()
        return response

    @property
    def _closes_after(self) -> bool:
        """llama.cpp's streams end so, although it has promised to keep the connection."""
        is_llama = self._form.dialect == "llama_server" and self._answer.question.is_streamed
        return is_llama or self._kind == "keepalive_lie"

    async def _prepare(self, media_type: str, length: int | None = None) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": media_type})
        if self._closes_after:
            response.headers["Keep-Alive"] = "timeout=5, max=100"
        response.content_length = length
        await response.prepare(self._request)
        return response

    async def _stream(self) -> web.StreamResponse:
        is_early = self._kind == "role_only_first"
        if self._form.dialect == "llama_server" and not is_early:
            while self._job.started is None and self._job.ended is None:
                await self._server.change(self._job)
        response = await self._prepare(self._form.media_type)
        if self._kind == "slow_loris":
            await self._dribble(response)
        if is_early:
            await self._send(response, self._form.opening(self._answer))
        for index in range(len(self._job.ask.pieces)):
            await self._reach(index + 1)
            if self._job.written <= index:
                break
            if index == 0 and self._form.opens and not is_early:
                await self._send(response, self._form.opening(self._answer))
            await self._send(response, self._form.token(self._answer, index))
            if index + 1 == self._half:
                await self._halfway(response)
        await self._send(response, self._form.closing(self._answer))
        await response.write_eof(self._form.end_mark)
        return response

    async def _reach(self, written: int) -> None:
        """Until so many tokens are there, or the job has ended."""
        while self._job.written < written and self._job.ended is None:
            await self._server.change(self._job)

    async def _send(self, response: web.StreamResponse, events: list[Event]) -> None:
        data = b"".join(self._form.frame(event) for event in events)
        if data:
            await response.write(data)

    async def _halfway(self, response: web.StreamResponse) -> None:
        match self._kind:
            case "abort":
                self._server.end(self._job)
            case "malformed_sse":
                await response.write(self._form.frame({"text": "cut"}).replace(b"}", b""))
            case "truncate" | "reset":
                await self._break()

    async def _break(self) -> None:
        transport = self._request.transport
        assert transport is not None
        if self._kind == "reset":
            _reset(transport)
        else:
            transport.close()
        await _until_cancelled()

    async def _dribble(self, response: web.StreamResponse) -> None:
        assert self._fault is not None
        await response.write(self._form.frame({}).partition(b"{")[0] + b"{")
        while True:
            await asyncio.sleep(self._fault.lasts)
            await response.write(b" ")

    async def _whole(self) -> web.StreamResponse:
        if self._kind == "abort":
            await self._reach(self._half)
            self._server.end(self._job)
        await self._reach(len(self._job.ask.pieces))
        try:
            body, status = compact(self._form.whole(self._answer)), 200
        except Refused as refused:
            body, status = compact(refused.body), refused.status
        match self._kind:
            case "malformed_sse":
                body = body[: len(body) // 2]
            case "slow_loris":
                await self._dribble(await self._prepare("application/json", 1 << 40))
            case "truncate" | "reset":
                response = await self._prepare("application/json", len(body))
                await response.write(body[: len(body) // 2])
                await self._break()
        headers = {"Keep-Alive": "timeout=5, max=100"} if self._closes_after else {}
        whole = web.Response(
            body=body, status=status, content_type="application/json", headers=headers
        )
        await whole.prepare(self._request)
        return whole


def _parsed(raw: bytes) -> Any:
    """JSON, or the bytes that are none."""
    try:
        return json.loads(raw)
    except ValueError:
        return raw


def _inside(refused: Refused) -> Refused:
    """The refusal as an event of an answer that HTTP calls a success."""
    return Refused(200, refused.body, refused.events or (refused.body,))


def _loading(dialect: FakeDialect) -> web.Response:
    body = error_of(dialect, 503, "Loading model", "unavailable_error")
    return web.json_response(body, status=503)


def _not_found(dialect: FakeDialect) -> Event:
    if dialect in ("vllm", "sglang"):
        return {"detail": "Not Found"}
    return error_of(dialect, 404, "File Not Found", "not_found_error")


def _reset(transport: asyncio.BaseTransport) -> None:
    """Closes with a reset instead of the usual farewell."""
    descriptor = transport.get_extra_info("socket").fileno()
    if descriptor >= 0:
        # a second handle on it, since a loop's own may not be set
        with socket.socket(fileno=os.dup(descriptor)) as twin:
            twin.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # uvloop's transports are no subclass of it
    cast(asyncio.Transport, transport).abort()


async def _until_cancelled() -> None:
    await asyncio.Event().wait()


async def _empty(_: web.Request) -> web.Response:
    return web.Response()


def _json_page(content: Callable[[], Event]) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        return web.json_response(content())

    return handle


async def serve(config: FakeConfig, host: str, port: int, started: Callable[[str], None]) -> None:
    """Serves until it is cancelled; `started` is told the URL. Raises OSError for a port in use."""
    async with FakeServer(config, host=host, port=port) as server:
        started(server.url)
        await _until_cancelled()
