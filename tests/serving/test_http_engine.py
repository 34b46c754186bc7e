"""The HTTP engine against servers that say exactly what a test has them say, byte for byte."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from serving import (
    ChatPrompt,
    EngineConfigError,
    EngineDead,
    EngineError,
    EngineSnapshot,
    EngineStalled,
    EngineStart,
    EngineUnavailable,
    Finish,
    MalformedReply,
    Overloaded,
    Prompt,
    PromptParts,
    Request,
    RequestRejected,
    TokenPrompt,
    parse_engine_config,
)
from serving.dialect import Command, Dialect, Seen
from serving.engine import HasMetrics
from serving.fake_model import FakeConfig
from serving.fake_server import FakeServer
from serving.http_config import HttpEngineConfig
from serving.http_engine import HttpEngine, ServerKind
from serving.http_server import Server
from serving.llama_server import LlamaDialect, LlamaServerConfig
from serving.openai_chat import OllamaConfig, OllamaDialect, OpenAiDialect
from serving.process import group_members
from serving.sglang import SglangConfig, SglangDialect
from serving.vllm_server import VllmDialect, VllmServerConfig

pytestmark = pytest.mark.timeout(120)

MakeRequest = Callable[..., Request]
KINDS = ("vllm_server", "sglang", "llama_server", "openai", "ollama")
SSE = "Content-Type: text/event-stream; charset=utf-8"


# a server that says what it is told to


@dataclass
class Asked:
    """One request as it came, and the connection it came on."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def say(self, *pieces: str | bytes) -> None:
        for piece in pieces:
            self.writer.write(piece.encode() if isinstance(piece, str) else piece)
            await self.writer.drain()

    async def begin(self, *headers: str, status: str = "200 OK") -> None:
        """Headers of a chunked answer, with a Keep-Alive that is a lie."""
        lines = (f"HTTP/1.1 {status}", "Transfer-Encoding: chunked", "Keep-Alive: timeout=5, max=9")
        await self.say("\r\n".join((*lines, *headers)) + "\r\n\r\n")

    async def chunk(self, data: str | bytes) -> None:
        raw = data.encode() if isinstance(data, str) else data
        await self.say(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")

    async def end(self) -> None:
        await self.say("0\r\n\r\n")

    async def whole(
        self, body: str, kind: str = "application/json", status: str = "200 OK"
    ) -> None:
        raw = body.encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(raw)}\r\n\r\n"
        await self.say(head.encode() + raw)

    def reset(self) -> None:
        """The connection ends with RST, not FIN."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Until the client has closed its end."""
        while await self.reader.read(1024):
            pass


Handler = Callable[[Asked], Awaitable[None]]


class Told:
    """Listens on a free port. `answer` handles questions; pages are true by default."""

    def __init__(self, answer: Handler) -> None:
        self.answer = answer
        self.pages: dict[str, str] = {}
        self.silent: set[str] = set()
        """Paths that are never answered."""
        self.refused: dict[str, tuple[str, str]] = {}
        """Pages that it has not: status and body."""
        self.is_ready = True
        self.loading = '{"error":{"message":"Loading model"}}'
        self.asked: list[Asked] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def questions(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.path in QUESTIONS]

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.split("\r\n")
            method, path, _ = first.split(" ")
            fields = (line.partition(": ") for line in lines if line)
            headers = {name.lower(): value for name, _, value in fields}
            raw = await reader.readexactly(int(headers.get("content-length", 0)))
            body = json.loads(raw) if raw else {}
            asked = Asked(method, path, headers, body, reader, writer)
            self.asked.append(asked)
            await self._handle(asked)
        self._open.discard(writer)
        writer.close()

    async def _handle(self, asked: Asked) -> None:
        if asked.path in QUESTIONS:
            await self.answer(asked)
        elif asked.path in self.silent:
            await asked.gone()
        elif asked.path in self.pages:
            await asked.whole(self.pages[asked.path], "text/plain")
        elif asked.path in self.refused:
            status, body = self.refused[asked.path]
            await asked.whole(body, status=status)
        elif not self.is_ready:
            await asked.whole(self.loading, status="503 Unavailable")
        else:
            await asked.whole("{}")


# answers in each dialect

QUESTIONS = ("/v1/completions", "/generate", "/completion", "/v1/chat/completions", "/api/chat")
USAGE = '"usage":{"prompt_tokens":9,"completion_tokens":3}'


def messages(kind: str, text: str, finish: str = "stop") -> list[str]:
    """A whole answer in two pieces of text, each message framed."""
    half = len(text) // 2
    parts = (text[:half], text[half:])
    said = json.dumps
    if kind == "vllm_server":
        raw = [f'{{"choices":[{{"text":{said(part)}}}]}}' for part in parts]
        raw += [f'{{"choices":[{{"text":"","finish_reason":"{finish}"}}]}}']
        raw += [f'{{"choices":[],{USAGE}}}', "[DONE]"]
    elif kind == "sglang":
        told = '"prompt_tokens":9,"completion_tokens":3,"cached_tokens":4'
        raw = [f'{{"text":{said(parts[0])},"meta_info":{{{told},"finish_reason":null}}}}']
        end = f'{{"type":"{finish}"}}'
        raw += [f'{{"text":{said(text)},"meta_info":{{{told},"finish_reason":{end}}}}}', "[DONE]"]
    elif kind == "llama_server":
        raw = [f'{{"content":{said(part)},"stop":false}}' for part in parts]
        why = "eos" if finish == "stop" else "limit"
        raw += [f'{{"content":"","stop":true,"stop_type":"{why}","tokens_evaluated":9,'
                '"tokens_predicted":3,"timings":{"cache_n":4}}']  # fmt: skip
    elif kind == "openai":
        raw = ['{"choices":[{"delta":{"role":"assistant","content":""}}]}']
        raw += [f'{{"choices":[{{"delta":{{"content":{said(part)}}}}}]}}' for part in parts]
        raw += [f'{{"choices":[{{"delta":{{}},"finish_reason":"{finish}"}}]}}']
        raw += [f'{{"choices":[],{USAGE}}}', "[DONE]"]
    else:
        raw = [f'{{"message":{{"content":{said(part)}}},"done":false}}' for part in parts]
        raw += [f'{{"message":{{"content":""}},"done":true,"done_reason":"{finish}",'
                '"prompt_eval_count":9,"eval_count":3}']  # fmt: skip
    return [framed(kind, message) for message in raw]


def piece(kind: str, text: str) -> str:
    """The first message that brings half of the text."""
    return messages(kind, text)[1 if kind == "openai" else 0]


def framed(kind: str, message: str) -> str:
    return f"{message}\n" if kind == "ollama" else f"data: {message}\n\n"


def content_type(kind: str) -> str:
    return "Content-Type: application/x-ndjson" if kind == "ollama" else SSE


def chosen(asked: Asked) -> str:
    """The first of the choices that a question allows, as its constraint says."""
    body = asked.body
    if "structured_outputs" in body:
        return str(body["structured_outputs"]["choice"][0])
    if "regex" in body.get("sampling_params", {}):
        return str(body["sampling_params"]["regex"]).strip("()").split("|")[0]
    if "grammar" in body:
        return str(body["grammar"]).split('"')[1]
    if "format" in body:
        return json.dumps(body["format"]["enum"][0])
    if "response_format" in body:
        return json.dumps(body["response_format"]["json_schema"]["schema"]["enum"][0])
    return "I think so"


def obeying(kind: str) -> Handler:
    async def answer(asked: Asked) -> None:
        await asked.begin(content_type(kind))
        for message in messages(kind, chosen(asked)):
            await asked.chunk(message)
        await asked.end()

    return answer


class Letters:
    """A template without a model: a token a letter."""

    def __init__(self, *, takes_ids: bool) -> None:
        self._takes_ids = takes_ids

    def render(self, parts: PromptParts) -> Prompt:
        text = " ".join((parts.lead, *parts.moves))
        return (
            TokenPrompt(tuple(map(ord, text))) if self._takes_ids else ChatPrompt((("user", text),))
        )

    def count_tokens(self, parts: PromptParts) -> int:
        return len(" ".join((parts.lead, *parts.moves)))

    def check(self, parts: PromptParts) -> str | None:
        return None


def make_dialect(kind: str) -> Dialect:
    url = "http://127.0.0.1:1"
    if kind == "vllm_server":
        return VllmDialect(VllmServerConfig(url=url))
    if kind == "sglang":
        return SglangDialect(SglangConfig(url=url))
    if kind == "llama_server":
        return LlamaDialect(LlamaServerConfig(url=url, max_concurrent=2))
    if kind == "ollama":
        return OllamaDialect(OllamaConfig(url=url))
    return OpenAiDialect("gpt")


class Stage:
    """Servers and engines of one test, closed after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: list[Told] = []
        self.engines: list[HttpEngine] = []
        self.groups: list[int] = []

    async def server(self, kind: str = "vllm_server") -> Told:
        told = Told(obeying(kind))
        await told.start()
        self.told.append(told)
        return told

    async def open(
        self,
        kind: str,
        url: str | None,
        *,
        launch: Callable[[int], Command] | None = None,
        stall_seconds: float = 30.0,
        restarts: int = 1,
        **knobs: Any,
    ) -> HttpEngine:
        data = {"kind": kind, "url": url, "max_concurrent": 2, **knobs}
        config = parse_engine_config("main", {k: v for k, v in data.items() if v is not None})
        assert isinstance(config, HttpEngineConfig)
        dialect = make_dialect(kind)
        letters = Letters(takes_ids=dialect.takes_ids)
        start = EngineStart("main", self.folder, stall_seconds, restarts)
        engine = HttpEngine(start, config, ServerKind(dialect, lambda: letters, launch))
        self.engines.append(engine)
        await engine.open()
        return engine

    async def pair(self, kind: str, **knobs: Any) -> tuple[Told, HttpEngine]:
        """An obeying server and an engine that has probed it."""
        told = await self.server(kind)
        engine = await self.open(kind, told.url, **knobs)
        told.asked.clear()
        return told, engine

    async def close(self) -> None:
        for engine in self.engines:
            if engine.pgid is not None:
                self.groups.append(engine.pgid)
            await engine.close()
            await engine.close()
        for told in self.told:
            await told.stop()
        assert [group_members(group) for group in self.groups] == [[] for _ in self.groups]


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    await stage.close()


@pytest.fixture
def ask(make_request: MakeRequest) -> MakeRequest:
    """Requests as the kind's engine takes them."""

    def make(kind: str, number: int = 0, **changes: Any) -> Request:
        request = make_request(number, **changes)
        if make_dialect(kind).takes_ids:
            return request
        return replace(request, prompt=ChatPrompt((("user", "Moves:"),)))

    return make


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# answers


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer(kind: str, stage: Stage, ask: MakeRequest) -> None:
    told, engine = await stage.pair(kind)
    reply = await engine.generate(ask(kind))
    assert (reply.text, reply.finish) == ("e2e4", Finish.STOP)
    cached = 4 if kind in ("sglang", "llama_server") else None
    assert (reply.usage.prompt, reply.usage.completion, reply.usage.cached) == (9, 3, cached)
    times = reply.timings
    assert times.first_token is not None
    assert times.submitted == times.admitted <= times.first_token <= times.done
    (question,) = told.questions
    assert question.headers["x-session-id"] == "m"
    assert question.headers["accept-encoding"] == "identity"
    assert "authorization" not in question.headers
    # it makes llama.cpp go on writing for a client that has left
    assert "x-conversation-id" not in question.headers
    assert engine.kind == kind


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_in_crumbs(kind: str, stage: Stage, ask: MakeRequest) -> None:
    told, engine = await stage.pair(kind)

    async def crumbs(asked: Asked) -> None:
        await asked.begin(content_type(kind))
        for byte in "".join(messages(kind, chosen(asked))).encode():
            await asked.chunk(bytes([byte]))
        await asked.end()

    told.answer = crumbs
    assert (await engine.generate(ask(kind))).text == "e2e4"


async def test_the_first_token_is_the_first_content(stage: Stage, ask: MakeRequest) -> None:
    """Neither the role nor thinking is."""
    told, engine = await stage.pair("openai")
    go_on = asyncio.Event()

    async def answer(asked: Asked) -> None:
        first, *rest = messages("openai", "I think so")
        await asked.begin(SSE)
        await asked.chunk(first)
        await asked.chunk(framed("openai", '{"choices":[{"delta":{"reasoning_content":"Hm"}}]}'))
        await go_on.wait()
        for message in rest:
            await asked.chunk(message)
        await asked.end()

    told.answer = answer
    asking = asyncio.create_task(engine.generate(ask("openai", choices=None)))
    await until(lambda: any(stream.last_event for stream in engine._streams))
    went_on = asyncio.get_running_loop().time()
    go_on.set()
    reply = await asking
    assert reply.text == "I think so"
    assert reply.timings.first_token is not None
    assert reply.timings.first_token >= went_on


@pytest.mark.parametrize("kind", KINDS)
async def test_hundreds_of_questions_are_under_way_at_once(
    kind: str, stage: Stage, ask: MakeRequest
) -> None:
    """Client libraries like to stop at 100 connections, and to count the wait as the server's."""
    many = 250
    told, engine = await stage.pair(kind, max_concurrent=many)
    all_came = asyncio.Event()

    async def answer(asked: Asked) -> None:
        if len(told.questions) == many:
            all_came.set()
        await all_came.wait()
        await obeying(kind)(asked)

    told.answer = answer
    async with asyncio.timeout(30):
        questions = (ask(kind, n, match_id=f"m{n}") for n in range(many))
        replies = await asyncio.gather(*map(engine.generate, questions))
    assert {reply.text for reply in replies} == {"e2e4"}
    assert all("x-conversation-id" not in asked.headers for asked in told.asked)


async def test_an_answer_without_usage_is_counted_and_that_is_told_once(
    stage: Stage, ask: MakeRequest
) -> None:
    told, engine = await stage.pair("vllm_server")

    async def answer(asked: Asked) -> None:
        await asked.begin(SSE)
        for message in messages("vllm_server", "e2e4"):
            if "usage" not in message:
                await asked.chunk(message)
        await asked.end()

    told.answer = answer
    with structlog.testing.capture_logs() as logs:
        for number in range(2):
            reply = await engine.generate(ask("vllm_server", number))
            usage = reply.usage
            assert (usage.prompt, usage.completion, usage.cached) == (100, 2, None)
    assert [entry["event"] for entry in logs] == ["engine.tells_no_usage"]


async def test_a_server_that_closes_after_each_answer_is_asked_on_a_new_connection(
    stage: Stage, ask: MakeRequest
) -> None:
    """llama.cpp says Keep-Alive and closes: a pool of connections fails every other question."""
    _, engine = await stage.pair("llama_server", max_concurrent=2)
    for number in range(12):
        assert (await engine.generate(ask("llama_server", number))).text == "e2e4"


async def test_proxies_of_the_environment_are_left_alone(
    stage: Stage, ask: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    _, engine = await stage.pair("vllm_server")
    assert (await engine.generate(ask("vllm_server"))).text == "e2e4"


async def test_a_key_is_sent_and_never_told(
    stage: Stage, ask: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    told, engine = await stage.pair("openai", api_key_env="MY_KEY")

    async def quote(asked: Asked) -> None:
        key = asked.headers["authorization"]
        await asked.whole(f'{{"error":{{"message":"bad key {key}"}}}}', status="401 Unauthorized")

    told.answer = quote
    with pytest.raises(RequestRejected, match=r"bad key Bearer \*\*\*") as caught:
        await engine.generate(ask("openai"))
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize("kind", ["llama_server", "openai"])
async def test_a_key_that_a_starting_server_quotes_is_not_told(
    kind: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it polled for: it will not do a second later."""
    monkeypatch.setenv("MY_KEY", "sk-secret")
    told = await stage.server(kind)

    async def refuse(asked: Asked) -> None:
        key = asked.headers["authorization"]
        await asked.whole(f'{{"error":{{"message":"no such key: {key}"}}}}', status="401 No")

    monkeypatch.setattr(told, "_handle", refuse)
    with pytest.raises(EngineDead, match=r"refuses us: no such key: Bearer \*\*\* \(401\)"):
        await stage.open(kind, told.url, api_key_env="MY_KEY")
    assert len(told.asked) == 1


async def test_a_key_in_a_broken_answer_is_not_told(
    stage: Stage, ask: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    told, engine = await stage.pair("openai", api_key_env="MY_KEY", restarts=9, stall_seconds=0.2)
    for answer in (
        lambda asked: asked.say("HTTP/9 sk-secret\r\n\r\n"),
        saying("data: sk-secret\n\n"),
        saying('data: {"error":{"message":"sk-secret"}}\n\n'),
        refusing("200 OK", "sk-secret", "text/html"),
        refusing("503 Unavailable", "sk-secret", "text/html"),
    ):
        told.answer = answer
        with pytest.raises(EngineError) as caught:
            await engine.generate(ask("openai"))
        assert "***" in str(caught.value)
        assert "sk-secret" not in str(caught.value)
    # the last one makes it wait for the server, which says why it cannot be asked
    told.loading = '{"error":{"message":"sk-secret is not awake"}}'
    told.is_ready = False
    with pytest.raises(EngineDead, match=r"was not ready within 2 s: \*\*\* is not awake"):
        await engine.generate(ask("openai", 1))


async def test_a_prompt_of_the_other_kind_is_refused(stage: Stage, ask: MakeRequest) -> None:
    _, engine = await stage.pair("vllm_server")
    with pytest.raises(RequestRejected, match="as token ids"):
        await engine.generate(ask("openai"))
    _, engine = await stage.pair("openai")
    with pytest.raises(RequestRejected, match="as chat messages"):
        await engine.generate(ask("vllm_server"))


# faults

FULL = "The request queue is full."
FULL_IN_200 = {
    "vllm_server": '{"error":{"message":"The engine is currently busy and cannot accept new '
    'requests.","type":"Service Unavailable","param":null,"code":503}}',
    "sglang": '{"text":"","meta_info":{"finish_reason":{"type":"abort","status_code":503,'
    f'"message":"{FULL}"}}}}}}',
    "llama_server": '{"error":{"code":503,"message":"no slot available"}}',
    "openai": f'{{"error":{{"message":"{FULL}","type":"SERVICE_UNAVAILABLE","code":503}}}}',
    "ollama": '{"error":"server busy, please try again.  maximum pending requests exceeded"}',
}


def saying(*said: str, headers: str = SSE, status: str = "200 OK", is_cut: bool = False) -> Handler:
    async def answer(asked: Asked) -> None:
        await asked.begin(headers, status=status)
        for one in said:
            await asked.chunk(one)
        if not is_cut:
            await asked.end()

    return answer


def refusing(status: str, body: str, kind: str = "application/json") -> Handler:
    return lambda asked: asked.whole(body, kind, status)


async def resetting(asked: Asked) -> None:
    await asked.begin(SSE)
    await asked.chunk(messages("vllm_server", "e2e4")[0])
    asked.reset()


Fault = tuple[Callable[[str], Handler], type[EngineError], str]
FAULTS: dict[str, Fault] = {
    "queue full, 503": (
        lambda kind: refusing("503 Unavailable", f'{{"message":"{FULL}","code":503}}'),
        Overloaded,
        "queue is full",
    ),
    "queue full, 429": (
        lambda kind: refusing("429 Too Many Requests", "<h1>429</h1>", "text/html"),
        Overloaded,
        "429",
    ),
    "queue full, 200": (
        lambda kind: saying(framed(kind, FULL_IN_200[kind]), headers=content_type(kind)),
        Overloaded,
        "503|busy",
    ),
    "too long": (
        lambda kind: refusing("400 Bad Request", '{"error":{"message":"too long: 3001 tokens"}}'),
        RequestRejected,
        "3001 tokens",
    ),
    "truncated inside a chunk": (
        lambda kind: saying(
            *messages(kind, "e2e4")[:-1], headers=content_type(kind), is_cut=True
        ),
        EngineUnavailable,
        "truncated",
    ),
    "truncated by a clean end": (
        lambda kind: saying(*messages(kind, "e2e4")[:-1], headers=content_type(kind)),
        EngineUnavailable,
        "truncated",
    ),
    "nothing": (
        lambda kind: saying(headers=content_type(kind)),
        EngineUnavailable,
        "before its start",
    ),
    "malformed": (
        lambda kind: saying(framed(kind, '{"text":'), headers=content_type(kind)),
        MalformedReply,
        "no JSON",
    ),
    "HTML with 200": (
        lambda kind: refusing("200 OK", "<html>hello</html>", "text/html"),
        MalformedReply,
        "text/html.*<html>hello",
    ),
    "JSON with 200": (
        lambda kind: refusing("200 OK", '{"choices":[{"text":"e2e4"}]}'),
        MalformedReply,
        "application/json",
    ),
    "a redirect": (
        lambda kind: saying(headers="Location: http://example.com/", status="302 Found"),
        MalformedReply,
        "redirect",
    ),
    "no HTTP": (
        lambda kind: lambda asked: asked.say("220 mail.example.com ESMTP\r\n"),
        EngineUnavailable,
        "connection broke",
    ),
    "closed at once": (
        lambda kind: lambda asked: asked.say(""),
        EngineUnavailable,
        "connection broke",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault(kind: str, fault: str, stage: Stage, ask: MakeRequest) -> None:
    make_handler, error, said = FAULTS[fault]
    told, engine = await stage.pair(kind)
    told.answer = make_handler(kind)
    with pytest.raises(EngineError, match=said) as caught:
        await engine.generate(ask(kind))
    assert type(caught.value) is error
    assert str(caught.value).startswith("engine main: ")
    assert "\n" not in str(caught.value)
    told.answer = obeying(kind)
    assert (await engine.generate(ask(kind, 1))).text == "e2e4", "one answer's fault ends nothing"
    assert engine.restarts == 0


async def test_a_reset_connection_is_a_fault_of_one_answer(stage: Stage, ask: MakeRequest) -> None:
    told, engine = await stage.pair("vllm_server")
    told.answer = resetting
    with pytest.raises(EngineUnavailable, match=r"truncated|connection broke"):
        await engine.generate(ask("vllm_server"))
    assert engine.is_ready


async def test_refusals_are_counted(stage: Stage, ask: MakeRequest) -> None:
    told, engine = await stage.pair("openai", scrape_seconds=0.05)
    told.answer = refusing("429 Too Many Requests", "")
    for number in range(3):
        with pytest.raises(Overloaded):
            await engine.generate(ask("openai", number))
    seen = await newest(engine, lambda snapshot: snapshot.rejected == 3)
    assert seen.source == "sampled"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_ignores_the_constraint_is_refused_at_the_start(
    kind: str, stage: Stage
) -> None:
    told = await stage.server(kind)
    told.answer = saying(*messages(kind, "The capital of"), headers=content_type(kind))
    with pytest.raises(EngineDead, match=r"engine main: the server does not obey ") as caught:
        await stage.open(kind, told.url)
    assert caught.value.final
    assert make_dialect(kind).constraint_field in str(caught.value)
    assert "'The capital of'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["openai", "ollama"])
async def test_thoughts_that_leave_no_room_for_an_answer_are_told_at_the_start(
    kind: str, stage: Stage
) -> None:
    """It was said to ignore the constraint."""
    thought = {
        "openai": '{"choices":[{"delta":{"reasoning_content":"Hm"}}]}',
        "ollama": '{"message":{"content":"","thinking":"Hm"},"done":false}',
    }[kind]
    told = await stage.server(kind)
    told.answer = saying(
        framed(kind, thought), *messages(kind, "", finish="length"), headers=content_type(kind)
    )
    with pytest.raises(EngineDead, match=r"the model thinks first.*turn thinking off") as caught:
        await stage.open(kind, told.url)
    assert caught.value.final
    assert "obey" not in str(caught.value)


async def test_a_model_that_the_server_does_not_know_is_told_at_the_start(stage: Stage) -> None:
    told = await stage.server("ollama")
    told.answer = refusing("404 Not Found", '{"error":"model \'smollm2-135m\' not found"}')
    with pytest.raises(EngineDead, match=r"'smollm2-135m' not found \(404\): .* served_model$"):
        await stage.open("ollama", told.url)


@pytest.mark.parametrize("status", ["404 Not Found", "405 Not Allowed", "501 Not Implemented"])
async def test_a_server_of_another_kind_ends_a_start_at_once(status: str, stage: Stage) -> None:
    told = await stage.server("llama_server")
    told.refused["/health"] = (status, '{"detail":"Not there"}')
    said = rf"{told.url}/health: Not there \({status[:3]}\): is `kind` right, and the url without"
    with pytest.raises(EngineDead, match=said):
        await stage.open("llama_server", told.url)
    assert len(told.asked) == 1


async def test_a_question_that_has_no_page_names_it(stage: Stage) -> None:
    told = await stage.server("llama_server")
    told.answer = refusing("404 Not Found", '{"detail":"Not Found"}')
    said = rf"{told.url}/completion: Not Found \(404\): is `kind` right"
    with pytest.raises(EngineDead, match=said):
        await stage.open("llama_server", told.url)
    assert len(told.questions) == 1


async def test_a_known_server_whose_proxy_lost_it_is_waited_for(
    stage: Stage, ask: MakeRequest
) -> None:
    told, engine = await stage.pair("llama_server", restarts=5)
    await told.stop()
    with pytest.raises(EngineUnavailable):
        await engine.generate(ask("llama_server"))
    told.refused["/health"] = ("404 Not Found", "404 page not found")
    await told.start()
    told.asked.clear()
    await until(lambda: len(told.asked) > 1)
    told.refused.clear()
    assert (await engine.generate(ask("llama_server", 1))).text == "e2e4"


async def test_https_at_an_http_server_is_named(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.http_engine.URL_START_S", 0.3)
    async with FakeServer(FakeConfig(dialects=("llama_server",))) as server:
        url = server.url.replace("http:", "https:")
        with pytest.raises(EngineDead, match=r"does not speak https .*: is it http\?$"):
            await stage.open("llama_server", url)


# cancelling, deadlines, stalls


def hanging(kind: str, *said: str) -> Handler:
    """Says so much, then nothing until the client is gone."""

    async def answer(asked: Asked) -> None:
        await asked.begin(content_type(kind))
        for one in said:
            await asked.chunk(one)
        await asked.gone()

    return answer


def dripping(kind: str, part: str = "la ", period: float = 0.02, pause: float = 0.02) -> Handler:
    """A piece of text each period, without end; a pause after the first."""

    async def answer(asked: Asked) -> None:
        await asked.begin(content_type(kind))
        text = ""
        while not asked.reader.at_eof():
            wait_s = period if text else pause
            text += part
            said = text if kind == "sglang" else part
            await asked.chunk(piece(kind, said + said))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await asked.gone()

    return answer


@pytest.mark.parametrize("kind", KINDS)
async def test_cancelling_closes_the_connection_at_once(
    kind: str, stage: Stage, ask: MakeRequest
) -> None:
    told, engine = await stage.pair(kind)
    is_gone = asyncio.Event()

    async def answer(asked: Asked) -> None:
        await hanging(kind, piece(kind, "e2e4"))(asked)
        is_gone.set()

    told.answer = answer
    asking = asyncio.create_task(engine.generate(ask(kind)))
    await until(lambda: any(stream.last_event for stream in engine._streams))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    async with asyncio.timeout(5):
        await is_gone.wait()
    assert not engine._streams
    if kind == "sglang":
        await until(lambda: told.asked[-1].path == "/abort_request")
        assert told.asked[-1].body == {"rid": told.questions[0].body["rid"]}


async def test_a_match_keeps_its_slot_when_a_question_is_given_up(
    stage: Stage, ask: MakeRequest
) -> None:
    """Told none, llama.cpp would take the slot that begins most alike: another match's."""
    told, engine = await stage.pair("llama_server")
    told.answer = hanging("llama_server")
    asking = asyncio.create_task(engine.generate(ask("llama_server")))
    await until(lambda: told.questions)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    told.answer = obeying("llama_server")
    await engine.generate(ask("llama_server", match_id="other"))
    await engine.generate(ask("llama_server"))
    own, others, again = (question.body.get("id_slot") for question in told.questions)
    assert own == again
    assert {own, others} == {0, 1}


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_that_the_server_cut_short_is_not_the_players(
    kind: str, stage: Stage, ask: MakeRequest
) -> None:
    """It has told 3 tokens, and an end for want of more."""
    told, engine = await stage.pair(kind)
    told.answer = saying(*messages(kind, "I think", "length"), headers=content_type(kind))
    with pytest.raises(EngineUnavailable, match=r"engine main: .* after 3 of 6 tokens"):
        await engine.generate(ask(kind, choices=None))
    # its own budget
    reply = await engine.generate(ask(kind, choices=None, max_tokens=3))
    assert (reply.text, reply.finish) == ("I think", Finish.LENGTH)
    # which of the choices it is shows whether it is whole
    reply = await engine.generate(ask(kind))
    assert reply.finish is Finish.LENGTH
    assert "/abort_request" not in [asked.path for asked in told.asked]


async def test_a_question_that_ended_well_is_not_aborted(stage: Stage, ask: MakeRequest) -> None:
    told, engine = await stage.pair("sglang")
    for number in range(3):
        await engine.generate(ask("sglang", number))
    rids = {question.body["rid"] for question in told.questions}
    assert len(rids) == 3, "a live number twice is refused"
    assert "/abort_request" not in [asked.path for asked in told.asked]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_free_answer_cut_by_its_deadline_keeps_its_text(
    kind: str, stage: Stage, ask: MakeRequest
) -> None:
    told, engine = await stage.pair(kind)
    told.answer = dripping(kind)
    reply = await engine.generate(ask(kind, choices=None, deadline_s=1.0))
    assert reply.finish is Finish.DEADLINE
    assert reply.text.startswith("la la ")
    assert reply.usage.completion > 1


async def test_thinking_until_the_deadline_is_the_players_own(
    stage: Stage, ask: MakeRequest
) -> None:
    told, engine = await stage.pair("openai")

    async def think(asked: Asked) -> None:
        await asked.begin(SSE)
        while not asked.reader.at_eof():
            await asked.chunk(framed("openai", '{"choices":[{"delta":{"reasoning":"Hm"}}]}'))
            await asyncio.sleep(0.02)

    told.answer = think
    reply = await engine.generate(ask("openai", choices=None, deadline_s=1.0))
    assert (reply.finish, reply.text) == (Finish.DEADLINE, "")
    assert reply.timings.first_token is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case", ["constrained", "silent", "ended long ago", "waited in a queue", "stood still"]
)
async def test_a_deadline_is_the_engines_fault_otherwise(
    kind: str, case: str, stage: Stage, ask: MakeRequest
) -> None:
    told, engine = await stage.pair(kind)
    drip = dripping(kind)

    async def late(asked: Asked) -> None:
        await asyncio.sleep(0.4)
        await drip(asked)

    told.answer = {
        "constrained": drip,
        "silent": hanging(kind),
        "ended long ago": hanging(kind, piece(kind, "la la ")),
        "waited in a queue": late,
        "stood still": dripping(kind, pause=0.7),
    }[case]
    choices = ("e2e4",) if case == "constrained" else None
    with pytest.raises(EngineStalled, match=r"not answered in 1 s"):
        await engine.generate(ask(kind, choices=choices, deadline_s=1.0))
    assert engine.restarts == 0


async def test_bytes_that_mean_nothing_are_a_stall(stage: Stage, ask: MakeRequest) -> None:
    told, engine = await stage.pair("vllm_server", stall_seconds=0.4)
    loris = asyncio.create_task(engine.generate(ask("vllm_server")))

    async def answer(asked: Asked) -> None:
        if told.questions[0] is not asked:
            return await dripping("vllm_server")(asked)
        await asked.begin(SSE)
        while not asked.reader.at_eof():
            await asked.chunk("d")
            await asyncio.sleep(0.02)

    told.answer = answer
    # another answer's messages do not hide it
    other = asyncio.create_task(engine.generate(ask("vllm_server", 1, choices=None, deadline_s=2)))
    with pytest.raises(EngineStalled, match="bytes came but no line"):
        await loris
    assert not other.done()
    assert (engine.restarts, engine.is_ready) == (0, True)
    assert (await other).finish is Finish.DEADLINE


async def test_pings_are_no_slow_loris_and_no_progress(stage: Stage, ask: MakeRequest) -> None:
    """llama.cpp sends one a second, whatever its model does."""
    told, engine = await stage.pair("llama_server", stall_seconds=0.4, restarts=3)

    async def answer(asked: Asked) -> None:
        await asked.begin(SSE)
        while not asked.reader.at_eof():
            await asked.chunk(":\n\n")
            await asyncio.sleep(0.02)

    told.answer = answer
    with pytest.raises(EngineStalled, match="nothing came for"):
        await engine.generate(ask("llama_server"))


async def test_a_long_prompt_that_is_computed_is_no_stall(stage: Stage, ask: MakeRequest) -> None:
    """llama.cpp tells of each batch of it, in messages without text, as long as it is asked to."""
    told, engine = await stage.pair("llama_server", stall_seconds=0.4)

    async def answer(asked: Asked) -> None:
        assert asked.body["return_progress"] is True
        await asked.begin(SSE)
        for batch in range(8):
            progress = f'"prompt_progress":{{"total":4096,"cache":0,"processed":{512 * batch}}}'
            await asked.chunk(f'data: {{"content":"","stop":false,{progress}}}\n\n')
            await asyncio.sleep(0.1)
        for message in messages("llama_server", "e2e4"):
            await asked.chunk(message)
        await asked.end()

    told.answer = answer
    reply = await engine.generate(ask("llama_server"))
    assert reply.text == "e2e4"
    assert reply.usage.completion == 3
    assert reply.timings.first_token is not None
    assert reply.timings.first_token - reply.timings.admitted > 0.7


# the server fails and comes back


async def test_a_silent_server_is_a_stall_for_all_and_idle_is_none(
    stage: Stage, ask: MakeRequest
) -> None:
    told, engine = await stage.pair("vllm_server", stall_seconds=0.3)
    await asyncio.sleep(0.5)
    assert engine.is_ready
    told.answer = hanging("vllm_server")
    results = await asyncio.gather(
        *(engine.generate(ask("vllm_server", number)) for number in range(3)),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [EngineStalled] * 3
    assert "3 requests unanswered" in str(results[0])
    told.answer = obeying("vllm_server")
    assert (await engine.generate(ask("vllm_server", 4))).text == "e2e4"
    assert engine.restarts == 1


async def test_questions_wait_for_a_server_that_went_away(stage: Stage, ask: MakeRequest) -> None:
    told, engine = await stage.pair("vllm_server", stall_seconds=5)
    await told.stop()
    with pytest.raises(EngineUnavailable, match="no connection"):
        await engine.generate(ask("vllm_server"))
    assert not engine.is_ready
    waiting = asyncio.create_task(engine.generate(ask("vllm_server", 1)))
    told.is_ready = False
    await told.start()
    await until(lambda: len(told.asked) > 2)
    assert not waiting.done(), "it answers, but is loading"
    told.is_ready = True
    assert (await waiting).text == "e2e4"
    assert (engine.is_ready, engine.restarts) == (True, 1)


async def test_a_server_that_says_it_loads_is_waited_for(stage: Stage, ask: MakeRequest) -> None:
    told, engine = await stage.pair("llama_server", stall_seconds=5)
    told.answer = refusing("503 Unavailable", '{"error":{"message":"Loading model","code":503}}')
    told.is_ready = False
    with pytest.raises(EngineUnavailable, match="Loading model"):
        await engine.generate(ask("llama_server"))
    assert not engine.is_ready
    told.answer, told.is_ready = obeying("llama_server"), True
    assert (await engine.generate(ask("llama_server", 1))).text == "e2e4"


async def test_a_proxy_that_is_ready_with_no_server_behind_is_no_death(
    stage: Stage, ask: MakeRequest
) -> None:
    """More questions fail than there may be restarts, each at once."""
    told, engine = await stage.pair("vllm_server", restarts=1, stall_seconds=5)
    told.answer = refusing("503 Unavailable", "<h1>no server</h1>", "text/html")
    for number in range(4):
        with pytest.raises(EngineUnavailable, match="no server"):
            await engine.generate(ask("vllm_server", number))
    told.answer = obeying("vllm_server")
    assert (await engine.generate(ask("vllm_server", 4))).text == "e2e4"


async def test_a_server_that_comes_back_with_nonsense_is_asked_again(
    stage: Stage, ask: MakeRequest
) -> None:
    told, engine = await stage.pair("llama_server", restarts=5)
    await told.stop()
    with pytest.raises(EngineUnavailable):
        await engine.generate(ask("llama_server"))
    told.pages["/props"] = '{"build_info": 5}'
    await told.start()
    await until(lambda: any(asked.path == "/props" for asked in told.asked))
    del told.pages["/props"]
    assert (await engine.generate(ask("llama_server", 1))).text == "e2e4"
    assert engine.restarts == 1


MODELS = '{{"data":[{{"id":"m","root":"/models/{}","max_model_len":4096}}]}}'


@pytest.mark.parametrize("page", [MODELS.format("other"), "{}"])
async def test_a_server_that_comes_back_with_another_model_is_not_asked(
    stage: Stage, ask: MakeRequest, page: str
) -> None:
    """It went on with the games of the first, in its name."""
    told = await stage.server()
    told.pages["/v1/models"] = MODELS.format("one")
    engine = await stage.open("vllm_server", told.url, restarts=5)
    await told.stop()
    with pytest.raises(EngineUnavailable):
        await engine.generate(ask("vllm_server"))
    told.pages["/v1/models"] = page
    told.asked.clear()
    await told.start()
    waiting = asyncio.create_task(engine.generate(ask("vllm_server", 1)))
    await until(lambda: [asked.path for asked in told.asked].count("/v1/models") == 2)
    assert not engine.is_ready
    assert not told.questions
    told.pages["/v1/models"] = MODELS.format("one")
    assert (await waiting).text == "e2e4"
    assert engine.restarts == 1


async def test_a_server_that_stays_with_another_model_is_dead_and_says_why(
    stage: Stage, ask: MakeRequest
) -> None:
    told = await stage.server()
    told.pages["/v1/models"] = MODELS.format("one")
    engine = await stage.open("vllm_server", told.url, stall_seconds=0.2, restarts=1)
    await told.stop()
    with pytest.raises(EngineUnavailable):
        await engine.generate(ask("vllm_server"))
    told.pages["/v1/models"] = MODELS.format("other")
    await told.start()
    with pytest.raises(EngineDead, match=r"back with other with 4096 .* and served one") as caught:
        await engine.generate(ask("vllm_server", 1))
    assert caught.value.final


async def test_a_server_that_does_not_come_back_is_dead_for_good(
    stage: Stage, ask: MakeRequest
) -> None:
    told, engine = await stage.pair("vllm_server", stall_seconds=0.2, restarts=1)
    await told.stop()
    with pytest.raises(EngineUnavailable):
        await engine.generate(ask("vllm_server"))
    for number in (1, 2):
        with pytest.raises(
            EngineDead,
            match=r"did not answer within 0.4 s: no connection to 127\.0\.0\.1:\d+: Connection ref",
        ) as caught:
            await engine.generate(ask("vllm_server", number))
        assert caught.value.final


async def test_a_server_that_only_seems_to_come_back_is_dead_after_the_limit(
    stage: Stage, ask: MakeRequest
) -> None:
    told, engine = await stage.pair("vllm_server", stall_seconds=0.2, restarts=2)
    told.answer = hanging("vllm_server")
    results = []
    for number in range(4):
        with pytest.raises(EngineError) as caught:
            await engine.generate(ask("vllm_server", number))
        results.append(type(caught.value))
    assert results == [EngineStalled] * 3 + [EngineDead]
    assert engine.restarts == 2


async def test_nobody_at_the_url_is_told_at_the_start(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.http_engine.URL_START_S", 0.3)
    told = await stage.server()
    await told.stop()
    with pytest.raises(EngineDead, match=r"http://127.0.0.1:\d+ did not answer within 0.3 s"):
        await stage.open("vllm_server", told.url)


async def test_closing_ends_questions_and_what_waits(stage: Stage, ask: MakeRequest) -> None:
    told, engine = await stage.pair("vllm_server")
    told.answer = hanging("vllm_server")
    asking = asyncio.create_task(engine.generate(ask("vllm_server")))
    await until(lambda: told.questions)
    await engine.close()
    with pytest.raises(EngineDead, match="closed"):
        await asking
    with pytest.raises(EngineDead, match="closed"):
        await engine.generate(ask("vllm_server", 1))


async def test_a_server_that_is_not_heard_of_does_not_delay_the_end(
    stage: Stage, ask: MakeRequest
) -> None:
    told, engine = await stage.pair("llama_server")
    told.answer = hanging("llama_server")
    told.silent = {"/metrics", "/slots"}
    before = asyncio.all_tasks()
    asking = asyncio.create_task(engine.generate(ask("llama_server")))
    looking = asyncio.create_task(engine.metrics())
    await until(lambda: told.questions and told.asked[-1].path == "/metrics")
    async with asyncio.timeout(1.8):
        closing = asyncio.create_task(engine.close())
        await asyncio.wait([asking], timeout=0.5)
        assert asking.done()
        assert not closing.done()
        await closing
    assert isinstance(asking.exception(), EngineDead)
    assert await looking == ""
    assert await engine.metrics() == ""
    await until(lambda: asyncio.all_tasks() <= before)


# servers that we launch

SERVER = """
import http.server, json, os, signal, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"version":"9.9"}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "structured_outputs" not in body:
            os.kill(os.getpid(), getattr(signal, sys.argv[2]))
        choice = body["structured_outputs"]["choice"][0]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for message in (
            json.dumps({"choices": [{"text": choice, "finish_reason": "stop"}]}),
            "[DONE]",
        ):
            self.wfile.write(f"data: {message}\\n\\n".encode())

    def log_message(self, *arguments):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def launching(fate: str = "SIGKILL") -> Callable[[int], Command]:
    """A server that signals itself when it is asked without choices."""
    return lambda port: Command((sys.executable, "-c", SERVER, str(port), fate), {"A_FLAG": "1"})


async def test_a_launched_server_leaves_nothing(stage: Stage, ask: MakeRequest) -> None:
    engine = await stage.open("vllm_server", None, launch=launching())
    assert engine.version == "9.9"
    assert (await engine.generate(ask("vllm_server"))).text == "e2e4"
    assert engine.command is not None
    assert engine.command.argv[-1] == "SIGKILL"
    group = engine.pgid
    assert group is not None
    assert group_members(group)
    await engine.close()
    assert not group_members(group)
    assert not (stage.folder / "engine-main.pid").exists()


@pytest.mark.parametrize(("fate", "error"), [("SIGKILL", EngineDead), ("SIGSTOP", EngineStalled)])
async def test_a_launched_server_that_fails_is_started_again(
    fate: str, error: type[EngineError], stage: Stage, ask: MakeRequest
) -> None:
    engine = await stage.open(
        "vllm_server", None, launch=launching(fate), stall_seconds=1.0, restarts=1
    )
    first = engine.pgid
    assert first is not None
    with pytest.raises(EngineError) as caught:
        await engine.generate(ask("vllm_server", choices=None))
    assert type(caught.value) is error
    waiting = asyncio.create_task(engine.generate(ask("vllm_server", 1)))
    await asyncio.sleep(0)
    assert not engine.is_ready
    assert (await waiting).text == "e2e4"
    assert engine.restarts == 1
    assert engine.pgid != first
    assert not group_members(first)
    with pytest.raises(error):
        await engine.generate(ask("vllm_server", 2, choices=None))
    with pytest.raises(EngineDead, match=r"restarted 1 times") as final:
        await engine.generate(ask("vllm_server", 3))
    assert final.value.final


@pytest.mark.parametrize(
    "failure", [OSError(24, "Too many open files"), EngineConfigError("no such model")]
)
async def test_a_start_that_fails_is_one_of_the_restarts(
    failure: Exception, stage: Stage, ask: MakeRequest
) -> None:
    starts = 0

    def launch(port: int) -> Command:
        nonlocal starts
        starts += 1
        if starts in (2, 3):
            raise failure
        return launching()(port)

    engine = await stage.open("vllm_server", None, launch=launch, restarts=3)
    assert engine.pgid is not None
    os.killpg(engine.pgid, signal.SIGKILL)
    await until(lambda: engine.restarts == 3)
    assert (await engine.generate(ask("vllm_server"))).text == "e2e4"
    starts = 1
    assert engine.pgid is not None
    os.killpg(engine.pgid, signal.SIGKILL)
    await until(lambda: engine._final)
    with pytest.raises(EngineDead, match=r"^engine main: .*restarted 3 times"):
        await engine.generate(ask("vllm_server"))


async def test_a_launched_server_that_is_killed_while_idle_is_started_again(
    stage: Stage, ask: MakeRequest
) -> None:
    engine = await stage.open("vllm_server", None, launch=launching())
    assert engine.pgid is not None
    os.killpg(engine.pgid, signal.SIGKILL)
    await until(lambda: engine.restarts == 1)
    assert (await engine.generate(ask("vllm_server"))).text == "e2e4"


@pytest.mark.parametrize("after_s", [0.3, 1.5])
async def test_a_close_that_is_cancelled_leaves_nothing(after_s: float, stage: Stage) -> None:
    """Of a frozen server: nothing short of SIGKILL ends it."""
    engine = await stage.open("vllm_server", None, launch=launching(), scrape_seconds=60)
    group, client = engine.pgid, engine._client
    assert group is not None
    assert client is not None
    os.killpg(group, signal.SIGSTOP)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(after_s)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert closing.cancelled()
    assert group_members(group) == []
    assert client._session.closed


async def test_a_last_look_that_fails_leaves_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await stage.open("vllm_server", None, launch=launching())
    group = engine.pgid
    assert group is not None

    async def fail() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(engine, "_look", fail)
    with pytest.raises(OSError, match="Too many"):
        await engine.close()
    assert group_members(group) == []
    monkeypatch.undo()


async def test_a_server_that_does_not_start_says_why(stage: Stage) -> None:
    code = "import sys; sys.exit('error: no such model')"
    failing = Command((sys.executable, "-c", code), {})
    with pytest.raises(EngineDead, match="did not start: it ended with code 1: error: no such mod"):
        await stage.open("vllm_server", None, launch=lambda port: failing)


async def test_a_port_that_was_taken_meanwhile_is_another_try(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = await stage.server()
    taken.is_ready = False
    ports = iter([taken.port])
    free = sys.modules["serving.http_server"].free_port
    monkeypatch.setattr("serving.http_server.free_port", lambda: next(ports, None) or free())
    engine = await stage.open("vllm_server", None, launch=launching())
    assert engine.version == "9.9"


# telemetry, cache


async def newest(engine: HttpEngine, wanted: Callable[[EngineSnapshot], bool]) -> EngineSnapshot:
    async with asyncio.timeout(10):
        async for snapshot in engine.snapshots():
            if wanted(snapshot):
                return snapshot
    raise AssertionError("closed before")


def vllm_page(running: int, queries: int, hits: int) -> str:
    return (
        f'vllm:num_requests_running 1e0\nvllm:num_requests_running{{engine="1"}} {running - 1}\n'
        f"vllm:prefix_cache_queries_total {queries}\nvllm:prefix_cache_hits_total {hits}\n"
    )


async def test_a_servers_figures_are_sampled_from_where_they_were(stage: Stage) -> None:
    told = await stage.server("vllm_server")
    told.pages["/metrics"] = vllm_page(3, 1000, 500)
    engine = await stage.open("vllm_server", told.url, scrape_seconds=0.02)
    first = await newest(engine, lambda snapshot: True)
    assert (first.running, first.prefix_queries, first.prefix_hits) == (3, 0, 0)
    assert (first.source, first.step_requests, first.step_tokens) == ("sampled", None, None)
    told.pages["/metrics"] = vllm_page(4, 1010, 505)
    grown = await newest(engine, lambda snapshot: snapshot.prefix_queries == 10)
    assert (grown.running, grown.prefix_hits) == (4, 5)
    # restarted by somebody: its counters begin anew
    told.pages["/metrics"] = vllm_page(1, 7, 2)
    after = await newest(engine, lambda snapshot: snapshot.running == 1)
    assert (after.prefix_queries, after.prefix_hits) == (17, 7)
    del told.pages["/metrics"]
    assert isinstance(engine, HasMetrics)


@pytest.mark.parametrize(
    "page",
    [
        "vllm:num_requests_running 1e308\n" * 2,
        "vllm:prefix_cache_queries_total 1e308\n" * 2,
        "\0{[" * 99_999,
    ],
)
async def test_a_page_of_nonsense_ends_nothing(page: str, stage: Stage, ask: MakeRequest) -> None:
    told, engine = await stage.pair("vllm_server", scrape_seconds=0.02)
    told.pages["/metrics"] = page
    await until(lambda: [asked.path for asked in told.asked].count("/metrics") > 3)
    assert (await engine.generate(ask("vllm_server"))).text == "e2e4"


async def test_a_look_that_cannot_be_understood_ends_nothing(
    stage: Stage, ask: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, engine = await stage.pair("vllm_server", scrape_seconds=0.02)

    def fail(texts: Sequence[str]) -> Seen:
        raise RecursionError

    monkeypatch.setattr(engine._dialect, "seen", fail)
    await until(lambda: [asked.path for asked in told.asked].count("/metrics") > 3)
    assert (await engine.generate(ask("vllm_server"))).text == "e2e4"


async def test_a_look_at_a_server_that_is_gone_is_none_at_the_next(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its counters would be taken for those of the new one, which begin at zero."""
    told = await stage.server("vllm_server")
    told.pages["/metrics"] = vllm_page(1, 20_000, 0)
    engine = await stage.open("vllm_server", told.url, scrape_seconds=60)
    go_on = asyncio.Event()
    page = engine._page

    async def late(server: Server, path: str) -> str:
        text = await page(server, path)
        await go_on.wait()
        return text

    monkeypatch.setattr(engine, "_page", late)
    looking = asyncio.create_task(engine._look())
    await asyncio.sleep(0.1)
    engine._server = Server(told.url, None, None)
    engine._telemetry.began()
    go_on.set()
    await looking
    told.pages["/metrics"] = vllm_page(1, 50, 0)
    await engine._look()
    await newest(engine, lambda snapshot: snapshot.prefix_queries == 50)
    engine._server = None


async def test_a_servers_totals_begin_anew_when_it_does(stage: Stage, ask: MakeRequest) -> None:
    """Seen at once: a moment later they may be past where they were."""
    told = await stage.server("vllm_server")
    told.pages["/metrics"] = vllm_page(1, 1000, 500)
    engine = await stage.open("vllm_server", told.url, scrape_seconds=60)
    await told.stop()
    with pytest.raises(EngineUnavailable):
        await engine.generate(ask("vllm_server"))
    told.pages["/metrics"] = vllm_page(1, 100, 50)
    await told.start()
    await engine.generate(ask("vllm_server", 1))
    await newest(engine, lambda snapshot: snapshot.prefix_queries == 100)
    told.pages["/metrics"] = vllm_page(1, 1200, 600)
    await engine.close()
    last = await newest(engine, lambda snapshot: snapshot.prefix_queries == 1200)
    assert last.prefix_hits == 600


async def test_a_page_that_is_missing_once_is_a_gap(stage: Stage, ask: MakeRequest) -> None:
    told = await stage.server("vllm_server")
    told.pages["/metrics"] = vllm_page(3, 1000, 500)
    engine = await stage.open("vllm_server", told.url, scrape_seconds=0.02)
    await newest(engine, lambda snapshot: snapshot.running == 3)
    del told.pages["/metrics"]
    await asyncio.sleep(0.1)
    told.pages["/metrics"] = vllm_page(5, 1000, 500)
    await newest(engine, lambda snapshot: snapshot.running in (5, 0, None))
    await newest(engine, lambda snapshot: snapshot.running == 5)


async def test_metrics_are_the_servers_own_text(stage: Stage) -> None:
    told, engine = await stage.pair("vllm_server")
    told.pages["/metrics"] = "vllm:x 1\n"
    assert await asyncio.gather(*(engine.metrics() for _ in range(3))) == ["vllm:x 1\n"] * 3
    assert [asked.path for asked in told.asked] == ["/metrics"]
    await told.stop()
    assert await engine.metrics() == ""


async def test_a_page_that_is_not_to_be_looked_at_is_not(stage: Stage, ask: MakeRequest) -> None:
    """A router answers with that of one of its servers."""
    told = await stage.server("vllm_server")
    told.pages["/metrics"] = vllm_page(3, 1000, 500)
    engine = await stage.open("vllm_server", told.url, scrape=False, scrape_seconds=0.02)
    await engine.generate(ask("vllm_server"))
    seen = await newest(engine, lambda snapshot: snapshot.running == 0)
    assert (seen.kv_usage, seen.preemptions) == (None, None)
    assert await engine.metrics() == ""
    assert "/metrics" not in [asked.path for asked in told.asked]


@pytest.mark.parametrize("kind", ["openai", "vllm_server"])
async def test_a_server_without_figures_tells_what_its_answers_told(
    kind: str, stage: Stage, ask: MakeRequest
) -> None:
    """It has none, or a proxy before it keeps them."""
    told, engine = await stage.pair(kind, scrape_seconds=0.02)
    usage = '"prompt_tokens_details":{"cached_tokens":6},'

    async def answer(asked: Asked) -> None:
        said = [
            message.replace('"prompt_tokens":9,', f'"prompt_tokens":9,{usage}')
            for message in messages(kind, chosen(asked))
        ]
        await saying(*said)(asked)

    told.answer = answer
    await engine.generate(ask(kind))
    seen = await newest(engine, lambda snapshot: snapshot.prefix_queries == 9)
    assert (seen.running, seen.waiting, seen.prefix_hits) == (0, None, 6)
    # an answer that is cut tells nothing yet
    told.answer = dripping(kind)
    reply = await engine.generate(ask(kind, 1, choices=None, deadline_s=1.0))
    assert (reply.finish, reply.usage.prompt) == (
        Finish.DEADLINE,
        None if kind == "openai" else 100,
    )
    told.answer = answer
    await engine.generate(ask(kind, 2))
    seen = await newest(engine, lambda snapshot: snapshot.prefix_queries == 18)
    assert seen.prefix_hits == 12
    told.answer = obeying(kind)
    await engine.generate(ask(kind, 3))
    # this one did not tell its cached tokens: the share is not known any more
    await newest(engine, lambda snapshot: snapshot.prefix_hits is None)


async def test_a_llama_server_without_its_metrics_is_played_on(
    stage: Stage, ask: MakeRequest
) -> None:
    """One that runs already may lack --metrics and --slots."""
    told = await stage.server("llama_server")
    said = "This server does not support metrics endpoint. Start it with `--metrics`"
    error = {"error": {"code": 501, "message": said, "type": "not_supported_error"}}
    for path in ("/metrics", "/slots"):
        told.refused[path] = ("501 Not Implemented", json.dumps(error))
    engine = await stage.open("llama_server", told.url, scrape_seconds=0.02)
    assert (await engine.generate(ask("llama_server"))).text == "e2e4"
    # the probe's counts in none
    seen = await newest(engine, lambda snapshot: snapshot.prefix_queries == 9)
    assert (seen.running, seen.waiting, seen.kv_usage, seen.prefix_hits) == (0, None, None, 4)
    assert await engine.metrics() == ""


async def test_priming_counts_in_no_figure(stage: Stage, ask: MakeRequest) -> None:
    told = await stage.server("vllm_server")
    told.pages["/metrics"] = vllm_page(1, 1000, 500)
    engine = await stage.open("vllm_server", told.url, scrape_seconds=60)
    answer, refusals = told.answer, iter(range(1))

    async def compute(asked: Asked) -> None:
        told.pages["/metrics"] = vllm_page(1, 1300, 700)
        refuse = refusing("429 Too Many Requests", "")
        await (answer if next(refusals, None) is None else refuse)(asked)

    told.answer = compute
    await engine.prime(ask("vllm_server").prompt)
    told.pages["/metrics"] = vllm_page(2, 1310, 705)
    await engine.close()
    last = await newest(engine, lambda snapshot: snapshot.running == 2)
    assert (last.prefix_queries, last.prefix_hits, last.rejected) == (10, 5, 0)


NONSENSE = (
    ("200 OK", "data: {nonsense\n\n", "text/event-stream"),
    ("200 OK", "hello", "text/plain"),
    ("307 Temporary Redirect", "", "text/plain"),
)


@pytest.mark.parametrize("nonsense", NONSENSE)
async def test_nonsense_ends_a_probe_at_once_and_no_priming(
    nonsense: tuple[str, str, str], stage: Stage
) -> None:
    told, engine = await stage.pair("vllm_server")
    answer, first = told.answer, iter([refusing(*nonsense)])
    told.answer = lambda asked: next(first, answer)(asked)
    await engine.prime(TokenPrompt((1, 2, 3)))
    assert len(told.questions) == 2
    other = await stage.server("vllm_server")
    other.answer = refusing(*nonsense)
    with pytest.raises(EngineDead):
        await stage.open("vllm_server", other.url)
    assert len(other.questions) == 1


async def test_each_cache_is_primed(stage: Stage, ask: MakeRequest) -> None:
    """Slots of llama.cpp share nothing; two games get half of them each."""
    told, engine = await stage.pair("llama_server", max_concurrent=2)
    await engine.prime(TokenPrompt((1, 2, 3)))
    assert sorted(question.body["id_slot"] for question in told.questions) == [0, 1]
    await engine.prime(TokenPrompt((4, 5, 6)))
    assert len(told.questions) == 3
    await engine.reset_prefix_cache()
    told.asked.clear()
    await engine.prime(TokenPrompt((1, 2, 3)))
    assert len(told.questions) == 2
    # a server that was started again has empty ones
    await told.stop()
    with pytest.raises(EngineUnavailable):
        await engine.generate(ask("llama_server"))
    await told.start()
    told.asked.clear()
    await engine.prime(TokenPrompt((1, 2, 3)))
    assert len(told.questions) == 2
    told, engine = await stage.pair("vllm_server")
    await engine.prime(TokenPrompt((1, 2, 3)))
    assert len(told.questions) == 1


@pytest.mark.parametrize(
    ("kind", "path", "can"),
    [
        ("vllm_server", None, True),
        ("sglang", "/flush_cache", True),
        ("llama_server", "/completion", True),
        ("openai", None, False),
        ("ollama", None, False),
    ],
)
async def test_forgetting(
    kind: str, path: str | None, can: bool, stage: Stage, ask: MakeRequest
) -> None:
    told, engine = await stage.pair(kind)
    assert await engine.reset_prefix_cache() is can
    paths = [asked.path for asked in told.asked]
    assert paths == ([] if path is None else [path] * (2 if kind == "llama_server" else 1))
    told.answer = dripping(kind)
    asking = asyncio.create_task(engine.generate(ask(kind, choices=None, deadline_s=1)))
    await until(lambda: engine._streams)
    assert not await engine.reset_prefix_cache(), "while work is in flight"
    await asking


async def test_forgetting_that_the_server_refuses_is_told(stage: Stage) -> None:
    """SGLang refuses while anything of anybody runs."""
    told, engine = await stage.pair("sglang")
    told.is_ready = False
    assert not await engine.reset_prefix_cache()
