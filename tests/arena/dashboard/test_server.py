"""The dashboard over real connections: answers, streams, refusals, and its end."""

import asyncio
import gzip
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import uvloop
from structlog.testing import capture_logs
from yarl import URL

from arena.dashboard import server
from arena.dashboard.browse import Wish
from arena.dashboard.guard import HEADERS, Binding, cookie_name
from arena.dashboard.server import Dashboard, DashboardError, Exhibit, Limits

TOKEN = "a-token-of-sixteen-or-more"
LOCAL = Binding("127.0.0.1", 0, None, is_chosen=True)
LOCKED = Binding("127.0.0.1", 0, TOKEN, is_chosen=True)
HOSTILE = "a/b %2F .. <script>alert(1)</script> 각\0\n"
LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
"""The arena runs on uvloop; transports differ where clients stall and leave."""

MOST = 64 * 1024 * 1024

Run = Callable[[Coroutine[Any, Any, None]], None]


class Script:
    """An exhibit whose frames are pushed by the test; the last `kept` stay known."""

    epoch = "an-epoch"

    def __init__(self, kept: int = 100) -> None:
        self.ended = False
        self.asked: list[object] = []
        self.hanging: asyncio.Event | None = None
        self._kept = kept
        self._frames: list[tuple[int, bytes]] = []
        self._news = asyncio.Event()
        self._seq = 10

    def push(self, size: int = 0, *, ended: bool = False) -> int:
        self._seq += 1
        self._frames.append((self._seq, self._frame(full=False, size=size)))
        self._frames = self._frames[-self._kept :]
        self.ended = ended
        self._news.set()
        self._news = asyncio.Event()
        return self._seq

    def nearest(self, page: int) -> int:
        return page

    def full(self, page: int) -> tuple[int, bytes]:
        self.asked.append(("full", page))
        return self._seq, self._frame(full=True)

    def since(self, page: int, seq: int) -> list[tuple[int, bytes]] | None:
        if not self._seq - len(self._frames) <= seq <= self._seq:
            return None
        return [frame for frame in self._frames if frame[0] > seq]

    async def changed(self, seq: int) -> None:
        while seq >= self._seq and not self.ended:
            await self._news.wait()

    async def match(self, match_id: str) -> dict[str, Any] | None:
        self.asked.append(match_id)
        if self.hanging is not None:
            self.hanging.set()
            await asyncio.Event().wait()
        return {"match": match_id} if match_id == HOSTILE else None

    async def results(self, offset: int, limit: int, wish: Wish) -> dict[str, Any]:
        self.asked.append(wish)
        return {"total": offset + limit, "results": []}

    async def standings(self, known: int | None) -> bytes | None:
        return None if known == 7 else b'{"games":7}'

    async def telemetry(self, engine: str, span: int) -> dict[str, Any] | None:
        return {"span_s": span, "buckets": []} if engine == "main" else None

    def histogram(self, agent: str, game: str) -> dict[str, Any] | None:
        return {"edges_ms": [0, 1], "counts": [1]} if (agent, game) == (HOSTILE, "chess") else None

    def games(self) -> dict[str, Any]:
        return {
            "chess": {"drawing": None, "side_names": ["half a \ud800", "흑"], "pad": "x" * 5000}
        }

    async def metrics(self) -> str:
        return "arena_plies_total 1\n"

    def _frame(self, *, full: bool, size: int = 0) -> bytes:
        frame = {"seq": self._seq, "full": full, "pad": "x" * size}
        return json.dumps(frame, separators=(",", ":")).encode()


@pytest.fixture(scope="session")
def static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("site")
    folder = root / "static"
    (folder / "deep").mkdir(parents=True)
    page = '<!doctype html><title>t</title><script src="plotly.js" defer></script>\n'
    (folder / "index.html").write_text(page)
    (folder / "main.js").write_text("export const x = 1;\n" * 200)
    (folder / "big.js").write_text("x" * 60_000)
    (folder / "deep" / "style.css").write_text("p {}\n")
    (folder / "notes.py").write_text("secret = 1\n")
    (root / "outside.js").write_text("secret\n")
    return folder


@pytest.fixture
def serve(static: Path) -> "Serve":
    return Serve(static)


class Serve:
    """Opens dashboards on free ports, and clients of them."""

    def __init__(self, static: Path) -> None:
        self._static = static

    @asynccontextmanager
    async def __call__(
        self, exhibit: Exhibit, binding: Binding = LOCAL, limits: Limits | None = None
    ) -> AsyncIterator["Client"]:
        dashboard = Dashboard(exhibit, binding, static=self._static, limits=limits)
        async with dashboard, aiohttp.ClientSession() as session:
            yield Client(dashboard, session)


class Client:
    def __init__(self, dashboard: Dashboard, session: aiohttp.ClientSession) -> None:
        self.dashboard = dashboard
        self.session = session
        self.base = dashboard.url.partition("?")[0]
        self.port = URL(self.base).port or 0

    def get(self, path: str, **options: Any) -> Any:
        return self.request("GET", path, **options)

    def request(self, method: str, path: str, **options: Any) -> Any:
        url = URL(self.base + path.removeprefix("/"), encoded=True)
        return self.session.request(method, url, allow_redirects=False, **options)

    async def text(self, path: str, status: int = 200, **options: Any) -> str:
        async with self.get(path, **options) as response:
            assert response.status == status
            body: str = await response.text()
            return body

    async def json(self, path: str) -> Any:
        return json.loads(await self.text(path))

    async def raw(self, request: str) -> "Raw":
        """The answer to bytes of one's own; `HOST` in them is the right host."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request.replace("HOST", f"127.0.0.1:{self.port}").encode("latin-1"))
        answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        status_line, *lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        return Raw(int(status_line.split()[1]), headers, body.decode())

    async def path(self, path: str, host: str = "HOST") -> "Raw":
        return await self.raw(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")


class Raw:
    def __init__(self, status: int, headers: dict[str, str], body: str) -> None:
        self.status = status
        self.headers = headers
        self.body = body


class Events:
    """The blocks of an event stream, in order."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content

    async def block(self) -> str:
        return (await self._content.readuntil(b"\n\n", max_size=MOST)).decode().strip()

    async def frame(self) -> tuple[str, dict[str, Any]]:
        """The next frame's id and data; pings and the retry time are passed over."""
        while True:
            fields = dict(line.split(": ", 1) for line in (await self.block()).splitlines())
            if fields.get("event") == "frame":
                return fields["id"], json.loads(fields["data"])

    async def rest(self) -> bytes:
        return await self._content.read()


def assert_guarded(headers: Mapping[str, str]) -> None:
    assert {name: headers.get(name) for name in HEADERS} == dict(HEADERS)


def resume(seq: int) -> dict[str, str]:
    return {"Last-Event-ID": f"{Script.epoch}-{seq}"}


@contextmanager
def listener() -> Iterator[socket.socket]:
    """Somebody else's, on a port that was free."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken


@contextmanager
def deaf(port: int, path: str, times: int = 1) -> Iterator[socket.socket]:
    """A client that asks and does not read the answer."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(5)
        client.connect(("127.0.0.1", port))
        request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
        client.sendall(request.encode() * times)
        yield client


def is_served(client: "Client", stalled: socket.socket) -> bool:
    """Whether the server's side of a connection is open."""
    theirs = stalled.getsockname()
    return any(
        connection.laddr.port == client.port and connection.raddr == theirs
        for connection in psutil.Process().net_connections("tcp")
    )


async def until_dropped(client: "Client", stalled: socket.socket) -> None:
    """Others are served meanwhile. The first of them comes after it: it has been accepted."""
    await client.json("/api/games")
    while is_served(client, stalled):
        await client.json("/api/games")


def received(stalled: socket.socket) -> int:
    """How many bytes had been sent to a client before it was dropped."""
    total = 0
    with suppress(ConnectionResetError):
        while piece := stalled.recv(1_000_000):
            total += len(piece)
    return total


# Answers.


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 200),
        ("/static/main.js", 200),
        ("/static/no.js", 404),
        ("/plotly.js", 200),
        ("/metrics", 200),
        ("/api/games", 200),
        ("/api/snapshot", 200),
        ("/api/snapshot?page=x", 400),
        ("/api/matches", 200),
        ("/api/matches/no", 404),
        ("/api/histogram", 400),
        ("/api/telemetry?engine=no&span=1", 404),
        ("/api/telemetry?engine=main&span=2", 400),
        ("/api/nothing", 404),
        ("/nothing", 404),
    ],
)
async def test_every_answer_has_the_headers_and_head_is_get_without_a_body(
    serve: Serve, path: str, status: int
) -> None:
    async with serve(Script()) as client:
        async with client.get(path) as got:
            body = await got.read()
        async with client.request("HEAD", path) as head:
            assert await head.read() == b""
        assert (got.status, head.status) == (status, status)
        assert_guarded(got.headers)
        assert_guarded(head.headers)
        assert head.headers["Content-Length"] == got.headers["Content-Length"]
        if status != 200:
            assert got.content_type == "text/plain"
            assert re.fullmatch(rb"[^\n<>]+\n", body)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
async def test_other_methods_are_refused(serve: Serve, method: str) -> None:
    async with serve(Script()) as client:
        for path in ("/", "/api/matches", "/nothing"):
            async with client.request(method, path, data=b"x=1") as response:
                assert response.status == 405
                assert response.headers["Allow"] == "GET, HEAD"
                assert_guarded(response.headers)


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        ("GET /" + "x" * 9000 + " HTTP/1.1\r\nHost: HOST\r\n\r\n", 400),
        ("GET /\0<script> HTTP/1.1\r\nHost: HOST\r\n\r\n", 400),
        ("<script> / HTTP/1.1\r\nHost: HOST\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\n\r\n", 400),
        ("GET / HTTP/1.0\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: HOST\r\nHost: HOST\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: <script>\r\nConnection: close\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: HOST, evil.example\r\nConnection: close\r\n\r\n", 400),
        ("GET http://HOST/ HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n", 400),
        ("GET http://evil.example/ HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\nHost: localhost:1\r\nConnection: close\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\nHost: x\r\nX-Forwarded-Host: HOST\r\nConnection: close\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\nHost: HOST\r\nExpect: <script>\r\nConnection: close\r\n\r\n", 417),
        ("CONNECT HOST HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n", 400),
    ],
)
async def test_tricks_with_raw_requests_are_refused_in_one_line(
    serve: Serve, request_text: str, status: int
) -> None:
    async with serve(Script()) as client:
        with capture_logs() as logs:
            answer = await client.raw(request_text)
    assert answer.status == status
    assert_guarded(answer.headers)
    assert re.fullmatch(r"[^\n<>]+\n", answer.body)
    assert "evil" not in answer.body
    assert logs == []


async def test_own_names_are_answered(serve: Serve) -> None:
    async with serve(Script()) as client:
        for name in ("127.0.0.1", "localhost", "LocalHost", "[::1]"):
            assert (await client.path("/metrics", f"{name}:{client.port}")).status == 200


async def test_ipv6_loopback_is_served(serve: Serve) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    async with serve(Script(), Binding("::1", 0, None, is_chosen=True)) as client:
        assert client.base == f"http://[::1]:{client.port}/"
        assert await client.json("/api/matches") == {"total": 50, "results": []}


@pytest.mark.parametrize(
    ("headers", "path", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, "/api/games", 403),
        ({"Sec-Fetch-Site": "cross-site"}, "/%61pi/games", 403),
        ({"Sec-Fetch-Site": "cross-site"}, "/api/events", 403),
        ({"Sec-Fetch-Site": "cross-site"}, "/", 200),
        ({"Origin": "http://evil.example"}, "/api/games", 403),
        ({"Origin": "null"}, "/api/matches/x", 403),
        ({"Sec-Fetch-Site": "same-origin"}, "/api/games", 200),
    ],
)
async def test_other_sites_get_no_data(
    serve: Serve, headers: dict[str, str], path: str, status: int
) -> None:
    async with serve(Script()) as client, client.get(path, headers=headers) as response:
        assert response.status == status
        assert "Access-Control-Allow-Origin" not in response.headers
        assert_guarded(response.headers)


async def test_a_failing_exhibit_is_an_internal_error_in_the_log(serve: Serve) -> None:
    class Broken(Script):
        async def metrics(self) -> str:
            raise RuntimeError("a secret")

    async with serve(Broken()) as client:
        with capture_logs() as logs:
            assert await client.text("/metrics?token=hidden", 500) == "internal error\n"
        assert await client.text("/api/games")
    assert [(entry["log_level"], entry["path"]) for entry in logs] == [("error", "/metrics")]
    assert "a secret" in logs[0]["error"]


async def test_numbers_that_are_not_numbers_are_an_internal_error(serve: Serve) -> None:
    class Broken(Script):
        def games(self) -> dict[str, Any]:
            return {"mean": float("nan")}

    async with serve(Broken()) as client:
        with capture_logs() as logs:
            await client.text("/api/games", 500)
    assert len(logs) == 1


# Data.


async def test_ids_arrive_as_they_were_sent(serve: Serve) -> None:
    exhibit = Script()
    ids = [
        "a/b",
        "..",
        "../../etc/passwd",
        "%2F",
        "<script>",
        "\0",
        "각",
        "x" * 2000,
        "{id}",
        "a?b#c",
    ]
    async with serve(exhibit) as client:
        for match_id in ids:
            coded = "".join(f"%{byte:02x}" for byte in match_id.encode())
            answer = await client.path(f"/api/matches/{coded}")
            assert (answer.status, answer.body) == (404, "no such match\n")
        assert (await client.path("/api/matches/../up")).status == 404
        coded = "".join(f"%{byte:02x}" for byte in HOSTILE.encode())
        assert await client.json(f"/api/matches/{coded}") == {"match": HOSTILE}
        histogram = await client.json(f"/api/histogram?agent={coded}&game=chess")
    assert histogram == {"edges_ms": [0, 1], "counts": [1]}
    assert exhibit.asked == [*ids, "../up", HOSTILE]


async def test_json_survives_half_characters_and_is_compressed(serve: Serve) -> None:
    async with serve(Script()) as client, client.get("/api/games") as response:
        assert response.headers["Content-Encoding"] == "gzip"
        assert response.headers["Cache-Control"] == "no-store"
        assert int(response.headers["Content-Length"]) < 1000
        assert await response.json() == Script().games()


async def test_gzip_is_only_for_those_who_take_it(serve: Serve) -> None:
    async with serve(Script()) as client:
        for refused in ("identity", "gzip;q=0", "br", ""):
            options = {"headers": {"Accept-Encoding": refused}}
            for path in ("/api/games", "/static/main.js"):
                async with client.get(path, **options) as response:
                    assert "Content-Encoding" not in response.headers
                    assert response.headers["Vary"] == "Accept-Encoding"
        async with client.get("/metrics", headers={"Accept-Encoding": "gzip"}) as response:
            assert "Content-Encoding" not in response.headers


async def test_games_are_asked_for_as_the_reader_wishes(serve: Serve) -> None:
    exhibit = Script()
    async with serve(exhibit) as client:
        await client.json("/api/matches?player=a%26b&result=won&sort=plies&order=ascending&how=")
        await client.json("/api/matches")
    wished = Wish(player="a&b", result="won", sort="plies", order="ascending")
    assert exhibit.asked == [wished, Wish()]


async def test_standings_that_are_known_are_not_sent_again(serve: Serve) -> None:
    async with serve(Script()) as client:
        assert await client.json("/api/standings") == {"games": 7}
        assert await client.json("/api/standings?known=6") == {"games": 7}
        assert await client.text("/api/standings?known=7", 204) == ""


async def test_queries_are_checked(serve: Serve) -> None:
    async with serve(Script()) as client:
        assert await client.json("/api/matches?offset=7&limit=500") == {"total": 507, "results": []}
        assert await client.json("/api/telemetry?engine=main&span=1000") == {
            "span_s": 1000,
            "buckets": [],
        }
        for query in (
            "offset=-1",
            "limit=501",
            "limit=",
            "offset=1e3",
            "offset=٣",
            "limit=" + "9" * 99,
        ):
            assert "a whole number" in await client.text(
                f"/api/matches?{URL(f'?{query}').raw_query_string}", 400
            )
        for query, told in (
            ("result=half", "result: one of first, second, draw, won, lost\n"),
            ("sort=", "sort: one of ended, players, result, how, game, plies\n"),
            ("order=up", "order: one of descending, ascending\n"),
        ):
            assert await client.text(f"/api/matches?{query}", 400) == told
        assert "a whole number" in await client.text("/api/standings?known=-1", 400)
        assert await client.text("/api/telemetry?span=1", 400) == "engine: missing\n"
        assert await client.text("/api/histogram?agent=a", 400) == "game: missing\n"


async def test_a_snapshot_is_the_exhibits_full_frame(serve: Serve) -> None:
    exhibit = Script()
    async with serve(exhibit) as client:
        assert (await client.json("/api/snapshot?page=3"))["full"] is True
    assert exhibit.asked == [("full", 3)]


async def test_metrics_are_prometheus_text(serve: Serve) -> None:
    async with serve(Script()) as client, client.get("/metrics") as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert await response.text() == "arena_plies_total 1\n"


# Files.


async def test_known_files_are_served_and_revalidated(serve: Serve, static: Path) -> None:
    async with serve(Script()) as client:
        async with client.get("/static/main.js") as response:
            assert response.headers["Content-Type"] == "text/javascript; charset=utf-8"
            assert response.headers["Cache-Control"] == "no-cache"
            assert response.headers["Content-Encoding"] == "gzip"
            assert await response.text() == (static / "main.js").read_text()
            tag = response.headers["ETag"]
        async with client.get("/static/main.js", headers={"If-None-Match": tag}) as response:
            assert response.status == 304
            assert await response.read() == b""
            assert_guarded(response.headers)
        assert await client.text("/static/deep/style.css") == "p {}\n"
        page = await client.text("/")
        assert f'src="plotly.js?v={server.plotly_version()}"' in page


@pytest.mark.parametrize(
    "name",
    [
        "notes.py",
        "../outside.js",
        "%2e%2e%2foutside.js",
        "..%5Coutside.js",
        "deep/../main.js",
        "deep",
        "/etc/passwd",
        "%2Fetc%2Fpasswd",
        "main.js%00",
        "MAIN.JS",
    ],
)
async def test_nothing_else_is_served(serve: Serve, name: str) -> None:
    async with serve(Script()) as client:
        answer = await client.path(f"/static/{name}")
    assert (answer.status, answer.body) == (404, "404: Not Found\n")


async def test_a_missing_page_is_not_found(tmp_path: Path) -> None:
    async with Serve(tmp_path / "none")(Script()) as client:
        await client.text("/", 404)


async def test_plotly_comes_from_its_package_compressed_and_cached(serve: Serve) -> None:
    version = server.plotly_version()
    async with serve(Script()) as client:
        async with client.get(f"/plotly.js?v={version}", auto_decompress=False) as response:
            assert response.headers["Cache-Control"] == "max-age=31536000, immutable"
            assert response.headers["Content-Type"] == "text/javascript; charset=utf-8"
            packed = await response.read()
            tag = response.headers["ETag"]
        for path in ("/plotly.js", "/plotly.js?v=0"):
            async with client.get(path, headers={"If-None-Match": tag}) as response:
                assert response.status == 304
                assert response.headers["Cache-Control"] == "no-cache"
        async with client.get("/plotly.js", headers={"Accept-Encoding": "identity"}) as response:
            plain = await response.read()
    assert b"plotly.js v" in plain[:200]
    assert gzip.decompress(packed) == plain
    assert len(packed) < len(plain) / 2


def test_plotly_itself_is_not_imported() -> None:
    code = (
        "import sys; from arena.dashboard import server; asset = server.read_plotly();"
        "print(len(asset.body) > 1_000_000, 'plotly' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True False\n", done.stderr


# Tokens.


@pytest.mark.parametrize(
    "path", ["/", "/static/main.js", "/plotly.js", "/metrics", "/api/events", "/nothing"]
)
async def test_every_path_needs_the_token(serve: Serve, path: str) -> None:
    wrong: list[dict[str, str]] = [
        {},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": TOKEN},
        {"Cookie": "arena-token-1=" + TOKEN},
        {"Cookie": '=;;\\"<script>'},
    ]
    async with serve(Script(), LOCKED) as client:
        for headers in wrong:
            async with client.get(path, headers=headers) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert_guarded(response.headers)
                assert len((await response.text()).splitlines()) == 1
        assert (await client.path(path, "evil.example")).status == 421


async def test_a_bearer_token_is_let_in(serve: Serve) -> None:
    async with serve(Script(), LOCKED) as client:
        assert await client.text("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})


async def test_the_printed_address_hands_out_a_cookie_and_hides_the_token(serve: Serve) -> None:
    async with serve(Script(), LOCKED) as client:
        assert client.dashboard.url == f"{client.base}?token={TOKEN}"
        async with client.get(f"/?token={TOKEN}") as response:
            assert response.status == 303
            assert response.headers["Location"] == "/"
            assert response.headers["Cache-Control"] == "no-store"
            cookie = response.headers["Set-Cookie"]
            assert_guarded(response.headers)
        name = cookie_name(client.port)
        assert cookie == f"{name}={TOKEN}; HttpOnly; Path=/; SameSite=Strict"
        headers = {"Cookie": f"other=1; {name}={TOKEN}"}
        assert "<title>" in await client.text("/", headers=headers)
        assert await client.text("/metrics", headers=headers)
        assert "<title>" in await client.text("/?token=old-one", headers=headers)


@pytest.mark.parametrize(
    "path",
    ["/?token=wrong", "/?token=", "/?token=%EF%BF", f"/metrics?token={TOKEN}", f"/?TOKEN={TOKEN}"],
)
async def test_a_token_in_the_address_is_for_the_page_alone(serve: Serve, path: str) -> None:
    async with serve(Script(), LOCKED) as client, client.get(path) as response:
        assert response.status == 401
        assert "Set-Cookie" not in response.headers


# Frames.


async def test_a_stream_begins_with_a_full_frame_and_goes_on_with_deltas(serve: Serve) -> None:
    exhibit = Script()
    async with serve(exhibit) as client, client.get("/api/events?page=2") as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert "Content-Encoding" not in response.headers
        assert_guarded(response.headers)
        events = Events(response)
        assert await events.block() == "retry: 2000"
        assert await events.frame() == ("an-epoch-10", {"seq": 10, "full": True, "pad": ""})
        exhibit.push()
        exhibit.push()
        assert [(await events.frame())[0] for _ in range(2)] == ["an-epoch-11", "an-epoch-12"]
        exhibit.push(ended=True)
        assert await events.frame() == ("an-epoch-13", {"seq": 13, "full": False, "pad": ""})
        assert await events.rest() == b""
    assert exhibit.asked == [("full", 2)]


async def test_a_client_that_comes_back_gets_exactly_what_it_missed(serve: Serve) -> None:
    exhibit = Script()
    for _ in range(60):
        exhibit.push()
    async with (
        serve(exhibit) as client,
        client.get("/api/events", headers=resume(12)) as response,
    ):
        events = Events(response)
        missed = [await events.frame() for _ in range(58)]
        exhibit.push()
        following = await events.frame()
    assert [frame["seq"] for _, frame in missed] == list(range(13, 71))
    assert not any(frame["full"] for _, frame in [*missed, following])
    assert following[0] == "an-epoch-71"


@pytest.mark.parametrize(
    "last",
    ["other-12", "an-epoch-", "an-epoch-x", "12", "an-epoch-1", "an-epoch-99", "an-epoch--12", "٣",
     "an-epoch-" + "9" * 500, "<script>"],
)  # fmt: skip
async def test_an_unknown_id_gets_a_full_frame(serve: Serve, last: str) -> None:
    exhibit = Script(kept=3)
    for _ in range(5):
        exhibit.push()
    async with (
        serve(exhibit) as client,
        client.get("/api/events", headers={"Last-Event-ID": last}) as response,
    ):
        identity, frame = await Events(response).frame()
    assert (identity, frame["full"]) == ("an-epoch-15", True)


async def test_an_ended_run_is_shown_once(serve: Serve) -> None:
    exhibit = Script()
    last = exhibit.push(ended=True)
    async with serve(exhibit) as client:
        async with client.get("/api/events") as response:
            events = Events(response)
            assert (await events.frame())[0] == f"an-epoch-{last}"
            assert await events.rest() == b""
        async with client.get("/api/events", headers=resume(last)) as response:
            assert response.status == 204
            assert_guarded(response.headers)
        async with client.get("/api/events", headers=resume(last - 1)) as response:
            assert (await Events(response).frame())[0] == f"an-epoch-{last}"


async def test_a_quiet_stream_is_kept_alive(serve: Serve) -> None:
    async with (
        serve(Script(), limits=Limits(ping_s=0.01)) as client,
        client.get("/api/events") as response,
    ):
        events = Events(response)
        await events.frame()
        assert [await events.block() for _ in range(3)] == [": ping"] * 3


async def test_a_client_far_behind_skips_to_a_full_frame(serve: Serve) -> None:
    exhibit = Script()
    async with (
        serve(exhibit, limits=Limits(behind=3)) as client,
        client.get("/api/events") as response,
    ):
        events = Events(response)
        await events.frame()
        for _ in range(4):
            exhibit.push()
        assert await events.frame() == ("an-epoch-14", {"seq": 14, "full": True, "pad": ""})


async def test_a_frame_of_another_page_neither_shows_nor_hogs_the_loop(serve: Serve) -> None:
    class OtherPage(Script):
        def since(self, page: int, seq: int) -> list[tuple[int, bytes]] | None:
            return []

    exhibit = OtherPage()
    async with serve(exhibit) as client, client.get("/api/events") as response:
        await Events(response).frame()
        exhibit.push()
        assert await client.json("/api/games")


async def test_streams_are_limited_and_given_back(serve: Serve) -> None:
    async with (
        serve(Script(), limits=Limits(streams=2)) as client,
        client.get("/api/events"),
    ):
        leaver = await client.get("/api/events")
        assert await client.text("/api/events", 503) == "all 2 streams are in use\n"
        async with client.request("HEAD", "/api/events") as response:
            assert response.status == 200
        leaver.close()
        status = 503
        while status == 503:
            async with client.get("/api/events") as response:
                status = response.status
        assert status == 200


async def test_a_stream_whose_exhibit_fails_is_cut(serve: Serve) -> None:
    class Broken(Script):
        async def changed(self, seq: int) -> None:
            raise RuntimeError("no more")

    with capture_logs() as logs:
        async with serve(Broken()) as client, client.get("/api/events") as response:
            await Events(response).frame()
            with pytest.raises(aiohttp.ClientError):
                await response.content.read()
    assert [entry["event"] for entry in logs] == ["dashboard_failed"]


@LOOPS
def test_a_client_that_reads_no_more_is_dropped_and_disturbs_nobody(serve: Serve, run: Run) -> None:
    async def scenario() -> None:
        exhibit = Script()
        async with serve(exhibit, limits=Limits(stall_s=0.3)) as client:
            with deaf(client.port, "/api/events") as stalled:
                async with client.get("/api/events") as response:
                    events = Events(response)
                    await events.frame()
                    for _ in range(8):
                        exhibit.push(1_000_000)
                        assert (await events.frame())[1]["full"] is False
                await until_dropped(client, stalled)
                assert 0 < received(stalled) < 8_000_000

    run(scenario())


@LOOPS
def test_a_big_file_is_not_held_for_a_client_that_does_not_read(serve: Serve, run: Run) -> None:
    async def scenario() -> None:
        async with serve(Script(), limits=Limits(stall_s=0.2)) as client:
            with deaf(client.port, "/plotly.js") as stalled:
                await client.text("/plotly.js")
                await until_dropped(client, stalled)
                assert 0 < received(stalled) < 4_800_000

    run(scenario())


@LOOPS
def test_a_client_that_asks_on_and_does_not_read_is_dropped(serve: Serve, run: Run) -> None:
    async def scenario() -> None:
        async with serve(Script(), limits=Limits(stall_s=0.2)) as client:
            with deaf(client.port, "/static/big.js", times=200) as stalled:
                await until_dropped(client, stalled)
                assert 0 < received(stalled) < 12_000_000

    run(scenario())


# Its end.


@LOOPS
def test_closing_ends_a_stream_that_waits(serve: Serve, run: Run) -> None:
    async def scenario() -> None:
        async with serve(Script(), limits=Limits(close_s=30)) as client:
            response = await client.get("/api/events")
            events = Events(response)
            await events.frame()
            began = time.monotonic()
            await client.dashboard.close()
            assert time.monotonic() - began < 5
            assert await events.rest() == b""

    run(scenario())


@LOOPS
def test_closing_ends_streams_after_their_last_frame(serve: Serve, run: Run) -> None:
    async def scenario() -> None:
        exhibit = Script()
        async with serve(exhibit, limits=Limits(close_s=30)) as client:
            responses = [await client.get("/api/events") for _ in range(8)]
            streams = [Events(response) for response in responses]
            for events in streams:
                await events.frame()
            exhibit.push()
            began = time.monotonic()
            await client.dashboard.close()
            assert time.monotonic() - began < 5
            for events in streams:
                assert (await events.frame())[0] == "an-epoch-11"
                assert await events.rest() == b""
            with pytest.raises(aiohttp.ClientConnectionError):
                await client.get("/api/games")
            await client.dashboard.close()

    run(scenario())


@LOOPS
def test_closing_is_bounded_whatever_clients_and_exhibit_do(serve: Serve, run: Run) -> None:
    async def scenario() -> None:
        exhibit = Script()
        exhibit.hanging = asyncio.Event()
        async with serve(exhibit, limits=Limits(close_s=0.6)) as client:
            waiting = asyncio.ensure_future(client.text("/api/matches/x"))
            await exhibit.hanging.wait()
            await client.text("/plotly.js")
            with deaf(client.port, "/api/events") as one, deaf(client.port, "/plotly.js") as two:
                async with client.get("/api/events") as response:
                    await Events(response).frame()
                    exhibit.push(20_000_000)
                    began = time.monotonic()
                    await client.dashboard.close()
                    assert time.monotonic() - began < 2
                await asyncio.to_thread(bool)  # a turn of the loop
                assert not is_served(client, one)
                assert not is_served(client, two)
            with pytest.raises(aiohttp.ClientError):
                await waiting

    run(scenario())


# Addresses.


async def test_the_default_address_gives_way_to_a_free_one(serve: Serve) -> None:
    with listener() as taken:
        port = taken.getsockname()[1]
        async with serve(Script(), Binding("127.0.0.1", port, None, is_chosen=False)) as client:
            assert client.port != port
            assert await client.json("/api/games")


async def test_a_chosen_port_that_is_taken_is_an_error(serve: Serve) -> None:
    with listener() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DashboardError) as caught:
            async with serve(Script(), Binding("127.0.0.1", port, None, is_chosen=True)):
                pass
    assert str(caught.value) == (
        f"dashboard: 127.0.0.1:{port} is taken; name another with --dashboard HOST:PORT, "
        "or --dashboard off"
    )


async def test_an_address_of_another_machine_is_an_error(serve: Serve) -> None:
    with pytest.raises(DashboardError, match="no address of this machine"):
        async with serve(Script(), Binding("192.0.2.1", 0, TOKEN, is_chosen=True)):
            pass
