"""One question to a server over HTTP, and looks at its pages. Every failure is an error of ours."""

import asyncio
import contextlib
import json
import os
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from serving.dialect import Call, Dialect, Reading, one_line
from serving.engine import EngineError, EngineUnavailable, MalformedReply, Request
from serving.sse import EventDecoder, LineDecoder

LOOK_S = 2.0
"""A page must be there within this."""

_CONNECT_S = 10.0
_BODY_READ = 64_000
_NO_ENTRY = (401, 403)
_NO_PAGE = (404, 405, 501)
_IS_IT_THIS_KIND = "is `kind` right, and the url without a path?"
_CONTENT_TYPES = {
    "events": ("text/event-stream",),
    "lines": ("application/x-ndjson", "application/ndjson", "application/jsonl"),
}


class Unreachable(EngineUnavailable):
    """No server can be asked there now."""


class Stream:
    """A question that is not answered yet. Times are of `time.monotonic()`."""

    __slots__ = (
        "admitted",
        "begun",
        "events",
        "failure",
        "first_token",
        "headers_at",
        "last_line",
        "last_piece",
        "limit",
        "reading",
        "request",
        "wire_id",
    )

    def __init__(self, request: Request, wire_id: str) -> None:
        self.request = request
        self.wire_id = wire_id
        self.reading = Reading()
        self.admitted = time.monotonic()
        self.headers_at: float | None = None
        self.begun: float | None = None
        """Its first token came, be it of thinking."""
        self.first_token: float | None = None
        """Of the answer."""
        self.last_piece: float | None = None
        """Bytes came."""
        self.last_line: float | None = None
        """Bytes came that ended a line, be it a ping."""
        self.events: list[float] = []
        """When messages of the answer came."""
        self.failure: EngineError | None = None
        self.limit: asyncio.Timeout | None = None
        """The deadline, for as long as the question is out."""

    @property
    def last_event(self) -> float | None:
        return self.events[-1] if self.events else None

    def fail(self, error: EngineError) -> None:
        """End it now; the first reason stands."""
        if self.failure is None and self.limit is not None and not self.limit.expired():
            self.failure = error
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                self.limit.reschedule(asyncio.get_running_loop().time())

    def dribbling_s(self, now: float) -> float:
        """Seconds in which bytes came that did not end a line; 0 where none came."""
        if self.headers_at is None or self.last_piece is None:
            return 0.0
        since = self.headers_at if self.last_line is None else self.last_line
        return now - since if self.last_piece > since else 0.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a server can be asked, and if not, why."""

    is_ready: bool
    why: str = ""
    status: int | None = None
    """Of its answer; None where none came."""

    @property
    def is_refused(self) -> bool:
        """It wants a key, or another one: no waiting mends that."""
        return self.status in _NO_ENTRY

    @property
    def is_of_another_kind(self) -> bool:
        """It has no such page."""
        return self.status in _NO_PAGE


class HttpClient:
    """Speaks one dialect. Make and close it inside an event loop.

    Each request has a connection of its own, since servers close them after a stream although they
    say Keep-Alive. No proxies of the environment, no cookies, no redirects, no compression, and no
    time limit for an answer: that is the caller's. No error says the key, which servers like to
    quote.
    """

    def __init__(self, dialect: Dialect, key: str | None) -> None:
        self._dialect = dialect
        self._key = key
        headers = {"Accept-Encoding": "identity", "User-Agent": "boardfleet"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            trust_env=False,
        )

    async def close(self) -> None:
        """Every connection is cut."""
        await self._session.close()

    async def exchange(self, url: str, stream: Stream) -> None:
        """Ask, and read the answer to its end into `stream`. Cancelling cuts the connection.

        Raises EngineError; Unreachable where there is nobody to ask.
        """
        request = stream.request
        call = self._dialect.call(request, stream.wire_id)
        async with self._post(url, call, request.match_id) as response:
            stream.headers_at = time.monotonic()
            await self._check(response)
            await self._read(response, stream)
        if not stream.reading.is_done:
            raise EngineUnavailable(_truncated(stream))
        if stream.reading.finish is None:
            raise MalformedReply("the answer does not say why it ended")

    async def does(self, url: str, call: Call, match_id: str = "") -> bool:
        """Whether a call that is no question, but may be about one of a match, is answered with
        200; raises EngineUnavailable."""
        async with self._post(url, call, match_id) as response:
            return response.status == 200

    async def readiness(self, url: str) -> Readiness:
        """Whether the server says that it can be asked."""
        try:
            async with asyncio.timeout(LOOK_S), self._get(url + self._dialect.ready_path) as got:
                if got.status == 200:
                    return Readiness(True, status=200)
                error = self._dialect.refused(got.status, await _body_start(got))
                why = self._without_key(str(error))
                if got.status in _NO_PAGE:
                    why = f"{got.url}: {why}: {_IS_IT_THIS_KIND}"
                return Readiness(False, why, got.status)
        except EngineUnavailable as error:
            return Readiness(False, str(error))
        except TimeoutError:
            return Readiness(False, f"no answer in {LOOK_S:g} s")

    async def page(self, url: str) -> str:
        """A page of the server; empty where it cannot be had."""
        try:
            async with asyncio.timeout(LOOK_S), self._get(url) as response:
                return await response.text(errors="replace") if response.status == 200 else ""
        except (EngineUnavailable, TimeoutError):
            return ""

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        """Raises for an answer that is no stream of messages."""
        if response.status != 200:
            error = self._dialect.refused(response.status, await _body_start(response))
            if response.status in _NO_PAGE:
                error.args = (_nothing_there(response, str(error)),)
            if type(error) is EngineUnavailable and response.status in (502, 503, 504):
                raise Unreachable(str(error))
            raise error
        wanted = _CONTENT_TYPES[self._dialect.framing]
        if response.content_type not in wanted:
            start = one_line(await _body_start(response), 120)
            raise MalformedReply(
                f"the answer is {response.content_type}, not {wanted[0]}, and begins {start!r}"
            )

    async def _read(self, response: aiohttp.ClientResponse, stream: Stream) -> None:
        decoder = EventDecoder() if self._dialect.framing == "events" else LineDecoder()
        try:
            async for piece in response.content.iter_any():
                stream.last_piece = time.monotonic()
                before = decoder.lines_ended
                for data in decoder.feed(piece):
                    stream.events.append(time.monotonic())
                    self._dialect.read(data, stream.reading)
                    if stream.begun is None and stream.reading.has_begun:
                        stream.begun = stream.last_event
                    if stream.first_token is None and stream.reading.has_content:
                        stream.first_token = stream.last_event
                    if stream.reading.is_done:
                        return
                if decoder.lines_ended > before:
                    stream.last_line = stream.last_piece
        except aiohttp.ClientPayloadError as error:
            raise EngineUnavailable(_truncated(stream)) from error

    @asynccontextmanager
    async def _post(
        self, url: str, call: Call, match_id: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        body = json.dumps(call.body, ensure_ascii=False, separators=(",", ":")).encode()
        headers = {"Content-Type": "application/json"}
        if match_id:
            # what routes by it keeps a match at one replica, where its transcript is cached
            headers["X-Session-ID"] = match_id
        async with self._errors_of_ours():
            response = await self._session.post(
                url + call.path, data=body, headers=headers, allow_redirects=False
            )
            try:
                yield response
            finally:
                # not given back: a server that still writes must see at once that we are gone
                response.close()

    @asynccontextmanager
    async def _get(self, url: str) -> AsyncIterator[aiohttp.ClientResponse]:
        async with (
            self._errors_of_ours(),
            self._session.get(url, allow_redirects=False) as response,
        ):
            yield response

    @asynccontextmanager
    async def _errors_of_ours(self) -> AsyncIterator[None]:
        try:
            yield
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(_no_connection(error)) from error
        except aiohttp.ClientError as error:
            said = one_line(self._without_key(f"{type(error).__name__} {error}"))
            raise EngineUnavailable(f"the connection broke: {said}") from error
        except EngineError as error:
            error.args = (self._without_key(str(error)),)
            raise

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


async def _body_start(response: aiohttp.ClientResponse) -> str:
    """The start of a body that is no answer."""
    body = b""
    with contextlib.suppress(aiohttp.ClientError):
        while len(body) < _BODY_READ and (piece := await response.content.readany()):
            body += piece
    return body.decode("utf-8", "replace")


def _nothing_there(response: aiohttp.ClientResponse, said: str) -> str:
    """What to do about a question that has no answer there: no such page, or no such model."""
    if response.status == 404 and "model" in said.lower():
        return f"{said}: give the name by which the server knows it as served_model"
    return f"{response.url}: {said}: {_IS_IT_THIS_KIND}"


def _no_connection(error: aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError) -> str:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection: {error}"
    cause = error.os_error
    if isinstance(cause, ssl.SSLCertVerificationError):
        why = f"its certificate is not trusted ({cause.verify_message})"
    elif isinstance(cause, ssl.SSLError):
        why = f"it does not speak https ({one_line(cause.reason or str(cause))}): is it http?"
    elif cause.errno is not None and cause.errno > 0:
        why = os.strerror(cause.errno)
    else:  # of a name that is not found
        why = one_line(cause.strerror or str(cause))
    return f"no connection to {error.host}:{error.port}: {why}"


def _truncated(stream: Stream) -> str:
    got = f"after {stream.reading.pieces} pieces" if stream.reading.pieces else "before its start"
    return f"the answer is truncated: its connection ended {got}"
