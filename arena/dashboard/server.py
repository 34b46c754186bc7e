"""The dashboard's HTTP server: the page, its data as JSON, live frames, metrics."""

import asyncio
import errno
import gzip
import hashlib
import importlib.metadata
import json
import re
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from aiohttp import web

from arena.dashboard import guard
from arena.dashboard.browse import ORDERS, SORTS, WINNERS, Wish
from arena.dashboard.guard import Binding

STATIC = Path(__file__).with_name("static")
CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
"""Files of other kinds are not served."""
JSON_TYPE = "application/json"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REVALIDATE = "no-cache"
FOREVER = "max-age=31536000, immutable"

PIECE = 64 * 1024
"""Bytes handed to a connection at once."""
SMALL = 1024
"""Bytes that are not worth compressing."""
SPANS_S = ("1", "10", "100", "1000")
PAGES = 1_000_000
RESULTS = 500
OFFSETS = 999_999_999
PAUSE_S = 0.1

RETRY = b"retry: 2000\n\n"
PING = b": ping\n\n"


class DashboardError(Exception):
    """The dashboard cannot be served where it was asked for: one line, with the remedy."""


class Exhibit(Protocol):
    """What the dashboard shows. JSON bytes are on one line; what is returned does not change
    afterwards, for it is written out in a thread."""

    @property
    def epoch(self) -> str:
        """New for each process; letters, digits and dashes."""

    @property
    def ended(self) -> bool:
        """The last frame has been made."""

    def nearest(self, page: int) -> int:
        """The page to show where `page` was asked for: itself, or the last one there is."""

    def full(self, page: int) -> tuple[int, bytes]:
        """The newest sequence number, and the JSON of a full frame of a page that there is."""

    def since(self, page: int, seq: int) -> list[tuple[int, bytes]] | None:
        """Delta frames after `seq`, oldest first; None when `seq` is unknown or too old."""

    async def changed(self, seq: int) -> None:
        """Returns when there is a frame after `seq` or the run has ended."""

    async def match(self, match_id: str) -> dict[str, Any] | None: ...

    async def results(self, offset: int, limit: int, wish: Wish) -> dict[str, Any]: ...

    async def standings(self, known: int | None) -> bytes | None:
        """JSON; None: nothing but those of `known` games, which the caller has."""

    async def telemetry(self, engine: str, span: int) -> dict[str, Any] | None: ...

    def histogram(self, agent: str, game: str) -> dict[str, Any] | None: ...

    def games(self) -> dict[str, Any]: ...

    async def metrics(self) -> str:
        """Prometheus text."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may cost."""

    streams: int = 64
    ping_s: float = 15.0
    stall_s: float = 10.0
    """How long a client may take nothing of an answer before it is dropped."""
    behind: int = 25
    """Frames that a client may lag; further back it skips to a full one."""
    close_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Asset:
    """A file as it is served."""

    body: bytes
    gzipped: bytes
    content_type: str
    digest: str

    @classmethod
    def of(cls, body: bytes, content_type: str) -> Self:
        digest = hashlib.sha256(body).hexdigest()[:32]
        return cls(body, gzip.compress(body, mtime=0), content_type, digest)


class Dashboard:
    """Serves an exhibit from `start()` to `close()`, or in an `async with`."""

    def __init__(
        self,
        exhibit: Exhibit,
        binding: Binding,
        *,
        static: Path = STATIC,
        limits: Limits | None = None,
    ) -> None:
        self._exhibit = exhibit
        self._binding = binding
        self._static = static
        self._limits = limits or Limits()
        self._assets: Mapping[str, Asset] = {}
        self._plotly: Asset | None = None
        self._plotly_version: str | None = None
        self._plotly_lock = asyncio.Lock()  # one reader; the others find it read
        self._runner: guard.Runner | None = None
        self._port = 0
        self._num_streams = 0
        self._pauses: set[asyncio.Timeout] = set()
        self._is_closing = False

    @property
    def url(self) -> str:
        """Where a browser opens it, with the token if there is one; once it is started."""
        query = "" if self._binding.token is None else f"?token={self._binding.token}"
        return f"http://{guard.address_text(self._binding.host, self._port)}/{query}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Raises DashboardError when the address cannot be had."""
        self._plotly_version = await asyncio.to_thread(plotly_version)
        self._assets = await asyncio.to_thread(read_assets, self._static, self._plotly_version)
        app = web.Application(middlewares=guard.middlewares(self._binding))
        app.on_response_prepare.append(guard.add_headers)
        app.router.add_get("/", self._page)
        app.router.add_get("/static/{name:.+}", self._file)
        app.router.add_get("/plotly.js", self._charts)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/api/events", self._events)
        app.router.add_get("/api/snapshot", self._snapshot)
        app.router.add_get("/api/games", self._games)
        app.router.add_get("/api/matches", self._results)
        app.router.add_get("/api/matches/{id:(?s:.+)}", self._match)
        app.router.add_get("/api/standings", self._standings)
        app.router.add_get("/api/histogram", self._histogram)
        app.router.add_get("/api/telemetry", self._telemetry)
        # A connection's end is waited for twice: for its handler, then for itself.
        runner = guard.Runner(app, shutdown_timeout=self._limits.close_s / 3)
        await runner.setup()
        try:
            self._port = await _listen(runner, self._binding)
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner

    async def close(self) -> None:
        """Ends every stream after its last frame, and all else, within `Limits.close_s`."""
        runner, self._runner = self._runner, None
        if runner is None or runner.server is None:
            return
        self._is_closing = True
        for pause in self._pauses:
            if not pause.expired():
                pause.reschedule(asyncio.get_running_loop().time())
        transports = [connection.transport for connection in runner.server.connections]
        try:
            async with asyncio.timeout(self._limits.close_s):
                await runner.cleanup()
        except TimeoutError:
            pass
        finally:
            for transport in transports:
                if transport is not None and transport.get_write_buffer_size():
                    transport.abort()  # it would wait for a client that reads no more

    # Files.

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return await self._send_asset(request, self._assets.get("index.html"), REVALIDATE)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        asset = self._assets.get(request.match_info["name"])
        return await self._send_asset(request, asset, REVALIDATE)

    async def _charts(self, request: web.Request) -> web.StreamResponse:
        async with self._plotly_lock:
            if self._plotly is None and self._plotly_version is not None:
                self._plotly = await asyncio.to_thread(read_plotly)
        is_versioned = request.query.get("v") == self._plotly_version
        return await self._send_asset(
            request, self._plotly, FOREVER if is_versioned else REVALIDATE
        )

    async def _send_asset(
        self, request: web.Request, asset: Asset | None, cache: str
    ) -> web.StreamResponse:
        if asset is None:
            raise web.HTTPNotFound
        # Weak: the same file, whether compressed or not.
        headers = {
            "ETag": f'W/"{asset.digest}"',
            "Cache-Control": cache,
            "Vary": "Accept-Encoding",
        }
        if any(tag.value in (asset.digest, "*") for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        headers["Content-Type"] = asset.content_type
        if not takes_gzip(request.headers.get("Accept-Encoding", "")):
            return await self._send(request, asset.body, headers)
        return await self._send(request, asset.gzipped, {**headers, "Content-Encoding": "gzip"})

    # Data.

    async def _snapshot(self, request: web.Request) -> web.StreamResponse:
        _, frame = self._exhibit.full(self._exhibit.nearest(whole(request, "page", 0, PAGES)))
        return await self._send_json(request, frame)

    async def _games(self, request: web.Request) -> web.StreamResponse:
        return await self._send_json(request, self._exhibit.games())

    async def _results(self, request: web.Request) -> web.StreamResponse:
        offset, limit = whole(request, "offset", 0, OFFSETS), whole(request, "limit", 50, RESULTS)
        wish = Wish(**{name: request.query[name] for name in Wish._fields if name in request.query})
        for name, known in (("result", WINNERS), ("sort", SORTS), ("order", ORDERS)):
            if getattr(wish, name) not in known:
                raise web.HTTPBadRequest(text=f"{name}: one of {', '.join(filter(None, known))}")
        return await self._send_json(request, await self._exhibit.results(offset, limit, wish))

    async def _standings(self, request: web.Request) -> web.StreamResponse:
        known = whole(request, "known", 0, OFFSETS) if "known" in request.query else None
        found = await self._exhibit.standings(known)
        if found is None:
            return web.Response(status=204, headers={"Cache-Control": "no-store"})
        return await self._send_json(request, found)

    async def _match(self, request: web.Request) -> web.StreamResponse:
        found = await self._exhibit.match(request.match_info["id"])
        return await self._send_found(request, found, "no such match")

    async def _histogram(self, request: web.Request) -> web.StreamResponse:
        found = self._exhibit.histogram(given(request, "agent"), given(request, "game"))
        return await self._send_found(request, found, "no such agent in this game")

    async def _telemetry(self, request: web.Request) -> web.StreamResponse:
        span = request.query.get("span", "1")
        if span not in SPANS_S:
            raise web.HTTPBadRequest(text=f"span: one of {', '.join(SPANS_S)} (seconds)")
        found = await self._exhibit.telemetry(given(request, "engine"), int(span))
        return await self._send_found(request, found, "no such engine")

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        body = (await self._exhibit.metrics()).encode()
        headers = {"Content-Type": METRICS_TYPE, "Cache-Control": "no-store"}
        return await self._send(request, body, headers)

    async def _send_found(
        self, request: web.Request, found: dict[str, Any] | None, otherwise: str
    ) -> web.StreamResponse:
        if found is None:
            raise web.HTTPNotFound(text=otherwise)
        return await self._send_json(request, found)

    async def _send_json(
        self, request: web.Request, value: dict[str, Any] | bytes
    ) -> web.StreamResponse:
        """Send an object, or JSON as it is."""
        headers = {
            "Content-Type": JSON_TYPE,
            "Cache-Control": "no-store",
            "Vary": "Accept-Encoding",
        }
        may_zip = takes_gzip(request.headers.get("Accept-Encoding", ""))
        body, is_zipped = await asyncio.to_thread(encode, value, may_zip)
        if is_zipped:
            headers["Content-Encoding"] = "gzip"
        return await self._send(request, body, headers)

    # Frames.

    async def _events(self, request: web.Request) -> web.StreamResponse:
        page = whole(request, "page", 0, PAGES)
        seq = seen(request.headers.get("Last-Event-ID", ""), self._exhibit.epoch)
        if seq is not None and self._exhibit.ended and self._exhibit.since(page, seq) == []:
            return web.Response(status=204, headers={"Cache-Control": "no-store"})
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )
        if request.method == "HEAD":
            return response
        if self._num_streams >= self._limits.streams:
            return guard.plain(503, f"all {self._limits.streams} streams are in use")
        self._num_streams += 1
        try:
            return await self._deliver(request, response, self._frames(page, seq))
        finally:
            self._num_streams -= 1

    async def _frames(self, page: int, seq: int | None) -> AsyncGenerator[bytes, None]:
        """Events after `seq` (None: from a full frame) to the end of the run or the closing of the
        dashboard, with pings in between."""
        yield RETRY
        frames = None if seq is None else self._exhibit.since(page, seq)
        seq = seq or 0
        while True:
            if frames is None:
                page = self._exhibit.nearest(page)
                frames = [self._exhibit.full(page)]
            if frames:
                seq = frames[-1][0]
                yield b"".join(self._event(*frame) for frame in frames)
            elif self._exhibit.ended or self._is_closing:
                return
            elif not await self._has_news(page, seq):
                yield PING
            frames = self._exhibit.since(page, seq)
            if frames is not None and len(frames) > self._limits.behind:
                frames = None

    async def _has_news(self, page: int, seq: int) -> bool:
        """Waits; False when a ping is due instead. The closing of the dashboard ends the wait."""
        pause = asyncio.timeout(self._limits.ping_s)
        try:
            async with pause:
                self._pauses.add(pause)
                await self._exhibit.changed(seq)
                if self._exhibit.since(page, seq) == [] and not self._exhibit.ended:
                    await asyncio.sleep(PAUSE_S)  # a frame that other pages have: no busy loop
        except TimeoutError:
            return self._is_closing
        finally:
            self._pauses.discard(pause)
        return True

    def _event(self, seq: int, frame: bytes) -> bytes:
        return b"id: %b-%d\nevent: frame\ndata: %b\n\n" % (self._exhibit.epoch.encode(), seq, frame)

    # Sending.

    async def _send(
        self, request: web.Request, body: bytes, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers)
        response.content_length = len(body)
        return await self._deliver(request, response, _whole_body(request, body))

    async def _deliver(
        self,
        request: web.Request,
        response: web.StreamResponse,
        chunks: AsyncGenerator[bytes, None],
    ) -> web.StreamResponse:
        """Send what `chunks` yields, no faster than it is taken. A client that has left, or takes
        nothing for `Limits.stall_s`, ends it without an error."""
        try:
            await response.prepare(request)
        except ConnectionError:
            return response
        async with aclosing(chunks):
            async for chunk in chunks:
                for start in range(0, len(chunk), PIECE):
                    if not await self._take(request, response, chunk[start : start + PIECE]):
                        return response
        await self._take(request, response, b"")
        return response

    async def _take(self, request: web.Request, response: web.StreamResponse, piece: bytes) -> bool:
        """Whether the client goes on taking."""
        try:
            async with asyncio.timeout(self._limits.stall_s):
                if piece:
                    await response.write(piece)
                await request.writer.drain()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            return False
        except ConnectionError:
            return False
        return True


async def _whole_body(request: web.Request, body: bytes) -> AsyncGenerator[bytes, None]:
    if request.method != "HEAD":
        yield body


async def _listen(runner: guard.Runner, binding: Binding) -> int:
    """The port that is listened on. Raises DashboardError."""
    ports = [binding.port] if binding.is_chosen else [binding.port, 0]
    for port in ports:
        site = web.TCPSite(runner, binding.host, port)
        try:
            await site.start()
        except OSError as error:
            failure = error
            if error.errno != errno.EADDRINUSE:
                break
        else:
            return site.port
    raise DashboardError(_remedy(failure, binding)) from failure


async def check_address(binding: Binding) -> None:
    """Raises DashboardError when the address cannot be had now. For an address of ours only what a
    free port does not mend is checked."""
    loop = asyncio.get_running_loop()
    port = binding.port if binding.is_chosen else 0
    try:
        server = await loop.create_server(asyncio.Protocol, binding.host, port)
    except OSError as error:
        raise DashboardError(_remedy(error, binding)) from error
    server.close()
    await server.wait_closed()


def _remedy(error: OSError, binding: Binding) -> str:
    where = guard.address_text(binding.host, binding.port)
    remedy = "name another with --dashboard HOST:PORT, or --dashboard off"
    if error.errno == errno.EADDRINUSE:
        return f"dashboard: {where} is taken; {remedy}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"dashboard: {where} may not be used by this user; {remedy}"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"dashboard: {binding.host} is no address of this machine; {remedy}"
    return f"dashboard: {where} cannot be listened on ({error.strerror or error}); {remedy}"


def read_assets(folder: Path, version: str | None) -> dict[str, Asset]:
    """The files under a folder, by their path in it with slashes. Plotly's version stands in the
    page's link to it, so that browsers keep the file until the next version."""
    assets = {}
    for file in sorted(folder.rglob("*")):
        content_type = CONTENT_TYPES.get(file.suffix)
        if content_type is None or not file.is_file():
            continue
        body = file.read_bytes()
        if file.suffix == ".html" and version is not None:
            body = body.replace(b'src="plotly.js"', f'src="plotly.js?v={version}"'.encode())
        assets[file.relative_to(folder).as_posix()] = Asset.of(body, content_type)
    return assets


def plotly_version() -> str | None:
    """None where plotly is not installed."""
    try:
        return importlib.metadata.version("plotly")
    except importlib.metadata.PackageNotFoundError:
        return None


def read_plotly() -> Asset | None:
    """Plotly's JavaScript as its package ships it; the package itself, slow to import, is not
    loaded."""
    package = importlib.metadata.distribution("plotly")
    file = Path(str(package.locate_file("plotly/package_data/plotly.min.js")))
    return Asset.of(file.read_bytes(), CONTENT_TYPES[".js"]) if file.is_file() else None


def encode(value: dict[str, Any] | bytes, may_zip: bool) -> tuple[bytes, bool]:
    """JSON, and whether it is compressed. ASCII, for the text of a model may hold half a
    character."""
    if isinstance(value, bytes):
        body = value
    else:
        body = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
    if not may_zip or len(body) < SMALL:
        return body, False
    return gzip.compress(body, compresslevel=5, mtime=0), True


def takes_gzip(accept_encoding: str) -> bool:
    for part in accept_encoding.lower().split(","):
        coding, _, weight = part.partition(";")
        if coding.strip() == "gzip":
            return re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", weight) is None
    return False


def seen(last_event_id: str, epoch: str) -> int | None:
    """The sequence number in an id of this epoch; None for any other text."""
    theirs, _, seq = last_event_id.rpartition("-")
    is_number = seq.isascii() and seq.isdigit() and len(seq) <= 15
    return int(seq) if theirs == epoch and is_number else None


def whole(request: web.Request, name: str, default: int, most: int) -> int:
    """A whole number of the query, from 0 to `most`."""
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 15 and int(text) <= most):
        raise web.HTTPBadRequest(text=f"{name}: a whole number from 0 to {most}")
    return int(text)


def given(request: web.Request, name: str) -> str:
    """A text of the query that must be there."""
    text = request.query.get(name)
    if text is None:
        raise web.HTTPBadRequest(text=f"{name}: missing")
    return text
