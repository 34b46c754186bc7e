"""The proxy files of `configs/proxy`, each run for real in front of two servers that stream."""

import asyncio
import io
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import ClientPayloadError, ClientResponse, ClientSession, TCPConnector, web

from tests.serving.proxies import (
    CAP,
    COMMANDS,
    PROXIES,
    binary,
    free_ports,
    running,
    shared_folder,
    until_it_holds,
)

ASK = "/v1/completions"
OF_ONE_SERVER = (
    "/metrics",
    "/slots",
    "/props",
    "/server_info",
    "/reset_prefix_cache",
    "/flush_cache",
)


@dataclass
class Backend:
    """A server of streams: one event at once, as many more as asked for, each when the test lets
    it, and the last after `go` where a stream is to be held."""

    name: str
    port: int
    go: asyncio.Event = field(default_factory=asyncio.Event)
    event: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    num_streams: int = 0
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    _runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        for path in ("/health", *OF_ONE_SERVER):
            app.router.add_route("*", path, self._say_name)
        app.router.add_post("/v1/length", self._length)
        app.router.add_post("/v1/full", self._full)
        app.router.add_post("/v1/pieces", self._pieces)
        app.router.add_post(ASK, self._stream)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    async def _say_name(self, _: web.Request) -> web.Response:
        return web.Response(text=self.name)

    async def _length(self, request: web.Request) -> web.Response:
        return web.json_response({"length": len(await request.read())})

    async def _full(self, request: web.Request) -> web.Response:
        return web.json_response({"error": self.name}, status=429)

    async def _pieces(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = 3
        await response.prepare(request)
        for piece in (b"a", b"b", b"c"):
            await self.event.acquire()
            await response.write(piece)
        return response

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.num_streams += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await response.write(f'data: {{"from": "{self.name}"}}\n\n'.encode())
            for number in range(asked["events"]):
                await self.event.acquire()
                await response.write(f'data: {{"number": {number}}}\n\n'.encode())
            if asked["hold"]:
                await self.go.wait()
            await response.write(b"data: [DONE]\n\n")
        except asyncio.CancelledError:
            self.hung_up.set()
            raise
        finally:
            self.num_streams -= 1
        return response


@dataclass(frozen=True)
class Front:
    """A proxy with its two servers behind, and a client before it."""

    url: str
    one: Backend
    two: Backend
    client: ClientSession

    @asynccontextmanager
    async def ask(
        self, session: str, *, events: int = 0, hold: bool = False
    ) -> AsyncIterator[ClientResponse]:
        headers = {"X-Session-ID": session}
        body = {"events": events, "hold": hold}
        async with self.client.post(self.url + ASK, json=body, headers=headers) as response:
            yield response

    async def status(self, session: str) -> int:
        async with self.ask(session) as response:
            await response.read()
            return response.status

    async def server_of(self, session: str) -> str:
        async with self.ask(session) as response:
            assert response.status == 200, await response.text()
            name = (await next_event(response))["from"]
            assert (await response.content.read()).strip() == b"data: [DONE]"
            return str(name)

    async def session_at(self, backend: Backend) -> str:
        """A match that is this server's."""
        for number in range(100):
            if await self.server_of(f"match-{number}") == backend.name:
                return f"match-{number}"
        raise AssertionError(f"none of 100 matches is {backend.name}'s")


async def next_event(response: ClientResponse) -> dict[str, Any]:
    line = await response.content.readline()
    assert await response.content.readline() == b"\n"
    event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return event


@pytest.fixture(params=COMMANDS)
async def front(request: pytest.FixtureRequest) -> AsyncIterator[Front]:
    ports = free_ports(2)
    async with AsyncExitStack() as stack:
        backends = Backend("one", ports[0]), Backend("two", ports[1])
        for backend in backends:
            await backend.start()
            stack.push_async_callback(backend.stop)
        url = await stack.enter_async_context(running(request.param, *ports))
        connector = TCPConnector(limit=0, force_close=True)
        client = await stack.enter_async_context(ClientSession(connector=connector))
        yield Front(url, *backends, client)
        for backend in backends:
            backend.go.set()


async def test_a_match_stays_at_its_server_and_matches_are_split(front: Front) -> None:
    sessions = [f"{number:08x}" for number in range(200)]
    homes = {session: await front.server_of(session) for session in sessions}
    shares = Counter(homes.values())
    assert set(shares) == {"one", "two"}
    assert min(shares.values()) >= 60, "a fair coin falls so in all but one of a hundred million"
    for session in sessions[:50]:
        assert await front.server_of(session) == homes[session]


async def test_one_too_many_is_refused_at_once_and_the_other_server_is_free(front: Front) -> None:
    """The streams end only when the test says so: one that waited would wait for ever."""
    crowded, free = await front.session_at(front.one), await front.session_at(front.two)
    async with AsyncExitStack() as stack:
        for _ in range(CAP):
            response = await stack.enter_async_context(front.ask(crowded, hold=True))
            assert await next_event(response) == {"from": "one"}
        for _ in range(20):
            async with front.ask(crowded) as refused:
                assert refused.status == 429
                assert refused.content_type == "application/json"
                assert (await refused.json())["error"]["type"] == "overloaded"
        assert front.one.num_streams == CAP
        assert await front.server_of(free) == "two"
        front.one.go.set()

    async def is_served() -> bool:
        return await front.status(crowded) == 200

    await until_it_holds(is_served)


async def test_of_a_burst_the_cap_is_served_and_the_rest_refused(front: Front) -> None:
    session = await front.session_at(front.two)
    statuses: list[int] = []

    async def ask() -> None:
        async with front.ask(session, hold=True) as response:
            statuses.append(response.status)
            await response.read()

    tasks = [asyncio.create_task(ask()) for _ in range(5 * CAP)]

    async def are_all_told() -> bool:
        return len(statuses) == len(tasks)

    await until_it_holds(are_all_told)
    assert Counter(statuses) == {200: CAP, 429: 4 * CAP}
    front.two.go.set()
    await asyncio.gather(*tasks)


@pytest.mark.timeout(15)
async def test_every_event_is_passed_on_as_it_comes(front: Front) -> None:
    """Each is only sent once the one before it was received. A proxy that collects what it passes
    on never sends some; HAProxy sends each after 200 ms unless told otherwise, 20 s for these."""
    session = await front.session_at(front.one)
    async with front.ask(session, events=100) as response:
        assert response.content_type == "text/event-stream"
        assert await next_event(response) == {"from": "one"}
        for number in range(100):
            front.one.event.release()
            assert await next_event(response) == {"number": number}
        assert await response.content.read() == b"data: [DONE]\n\n"


async def test_pieces_of_a_body_of_known_length_are_passed_on_as_they_come(front: Front) -> None:
    """nginx would pass on what is not chunked once it fills a buffer."""
    async with front.client.post(f"{front.url}/v1/pieces") as response:
        for piece in (b"a", b"b", b"c"):
            front.one.event.release()
            front.two.event.release()
            assert await response.content.readexactly(1) == piece


async def test_hanging_up_ends_the_request_at_the_server(front: Front) -> None:
    session = await front.session_at(front.one)
    async with front.ask(session, hold=True) as response:
        await next_event(response)
    await front.one.hung_up.wait()


async def test_a_server_that_is_down_is_replaced_and_taken_back(front: Front) -> None:
    session = await front.session_at(front.one)
    meanwhile: set[int] = set()

    async def is_at(name: str) -> bool:
        async with front.ask(session) as response:
            meanwhile.add(response.status)
            return response.status == 200 and (await next_event(response))["from"] == name

    await front.one.stop()
    await until_it_holds(lambda: is_at("two"))
    await front.two.stop()
    for _ in range(5):
        assert await front.status(session) in {502, 503}
    await front.two.start()
    await until_it_holds(lambda: is_at("two"))
    await front.one.start()
    await until_it_holds(lambda: is_at("one"))
    assert meanwhile <= {200, 502, 503}


async def test_a_server_that_dies_in_mid_stream_cuts_the_stream(front: Front) -> None:
    """It must not look whole, nor be asked a second time."""
    session = await front.session_at(front.one)
    async with front.ask(session, hold=True) as response:
        await next_event(response)
        await front.one.stop()
        with pytest.raises(ClientPayloadError):
            await response.content.read()
    assert front.two.num_streams == 0


async def test_a_servers_own_refusal_passes_as_it_is(front: Front) -> None:
    async with front.client.post(f"{front.url}/v1/full") as response:
        assert response.status == 429
        assert (await response.json())["error"] in {"one", "two"}


async def test_long_prompts_pass(front: Front) -> None:
    body = b"1234, " * 500_000
    async with front.client.post(f"{front.url}/v1/length", data=io.BytesIO(body)) as response:
        assert await response.json() == {"length": len(body)}


async def test_what_speaks_of_one_server_is_not_passed_on_but_readiness_is(front: Front) -> None:
    for path in OF_ONE_SERVER:
        for method in ("GET", "POST"):
            async with front.client.request(method, front.url + path) as response:
                assert response.status == 404
                assert "servers themselves" in (await response.json())["error"]["message"]
    async with front.client.get(f"{front.url}/health") as response:
        assert await response.text() in {"one", "two"}


@pytest.mark.parametrize("name", COMMANDS)
async def test_the_file_as_it_stands_is_accepted_without_a_warning(name: str) -> None:
    check = {"nginx.conf": "-t", "haproxy.cfg": "-c"}[name]
    with shared_folder() as folder:
        command = [*COMMANDS[name](PROXIES / name, folder), check]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()
    assert b"warn" not in told.lower(), told.decode()


def test_a_missing_proxy_skips_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install"):
        binary("no-such-proxy")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt-get install"):
        binary("no-such-proxy")
