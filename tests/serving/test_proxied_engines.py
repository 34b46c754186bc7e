"""Engines over HTTP as they play through the proxy files of `configs/proxy`: the real client, the
real proxy, and two fake servers behind it."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
from aiohttp import web

from agents import Fault
from arena.store import Records, read
from serving import EngineUnavailable, Overloaded, Reply
from serving.fake_model import FakeConfig, FakeDialect
from serving.fake_server import Clock, FakeServer, WallClock
from tests.serving.contract import Subject, Tells, open_engine, until
from tests.serving.proxies import CAP, COMMANDS, free_ports, running, until_it_holds

pytestmark = pytest.mark.usefixtures("model_directory")

DIALECTS: dict[str, FakeDialect] = {"vllm_server": "vllm", "sglang": "sglang"}
SLOTS = 3 * CAP
MOVES = tuple(f"{file}2{file}{rank}" for rank in range(3, 9) for file in "abcdefgh")


class Gate:
    """A clock that stands still while it is shut, and else is as late as anybody waits for."""

    def __init__(self) -> None:
        self._now = 0.0
        self._opened = asyncio.Event()
        self._opened.set()

    def time(self) -> float:
        return self._now

    async def sleep_until(self, at: float) -> None:
        await asyncio.sleep(0)
        await self._opened.wait()
        self._now = max(self._now, at)

    def shut(self) -> None:
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()


class WatchedServer(FakeServer):
    """Keeps what a `FakeServer` does not, and crashes when it is told to."""

    def __init__(self, config: FakeConfig, *, port: int, clock: Clock) -> None:
        super().__init__(config, port=port, clock=clock)
        self.given_up: list[str] = []
        """Requests that it was told to abort."""
        self.num_slow_looks = 0
        """At SGLang's /health, answered."""

    async def crash(self) -> None:
        """For good; every connection is reset."""
        self._spawn(self._crash(3600.0))
        await until(lambda: self._site is None)

    async def _abort(self, request: web.Request) -> web.Response:
        self.given_up.append(json.loads(await request.read())["rid"])
        return await super()._abort(request)

    async def _slow_health(self, request: web.Request) -> web.Response:
        looked = await super()._slow_health(request)
        self.num_slow_looks += 1
        return looked


class Place:
    """Where a server is while it is entered, and at times is not. What comes back there remembers
    nothing."""

    def __init__(self, dialect: FakeDialect, port: int, clock: Clock | None = None) -> None:
        self.gate = Gate()
        self._config = FakeConfig(dialects=(dialect,), slots=SLOTS)
        self._port = port
        self._clock = clock or self.gate
        self._stack = AsyncExitStack()
        self.server = self._new()

    def _new(self) -> WatchedServer:
        return WatchedServer(self._config, port=self._port, clock=self._clock)

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.server)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def stop(self) -> None:
        await self.server.crash()

    async def start(self) -> None:
        self.server = await self._stack.enter_async_context(self._new())

    def has_unfinished(self, count: int) -> bool:
        return self.server.running + self.server.waiting == count

    @property
    def matches(self) -> Counter[str]:
        """Questions since the last start, by match."""
        names = (
            value
            for seen in self.server.seen
            for name, value in seen.headers.items()
            if name.lower() == "x-session-id"
        )
        return Counter(names)

    @property
    def games(self) -> set[str]:
        """Matches of a run since the last start: without the moves that probe its players."""
        return {match for match in self.matches if not match.startswith("probe-")}


@dataclass(frozen=True, slots=True)
class Front:
    """An engine that plays through a proxy, and the two places behind it."""

    subject: Subject
    one: Place
    two: Place

    async def ask(self, match_id: str, *moves: str) -> Reply:
        return await self.subject.engine.generate(self.subject.ask(*moves, match_id=match_id))

    def asking(self, match_id: str) -> asyncio.Task[Reply]:
        return asyncio.create_task(self.ask(match_id))

    async def is_asked(self, place: Place, match_id: str) -> bool:
        """Whether a question of this match is answered, and by this place."""
        before = place.matches[match_id]
        await self.ask(match_id)
        return place.matches[match_id] > before

    async def ask_until(self, place: Place, match_id: str) -> list[EngineUnavailable]:
        """Until this place answers the match; the faults up to then."""
        faults = []

        async def is_there() -> bool:
            try:
                return await self.is_asked(place, match_id)
            except EngineUnavailable as error:
                faults.append(error)
                return False

        await until_it_holds(is_there)
        return faults

    async def match_at(self, place: Place) -> str:
        for number in range(100):
            if await self.is_asked(place, f"match-{number}"):
                return f"match-{number}"
        raise AssertionError("all of 100 matches are the other's")


@asynccontextmanager
async def behind(
    proxy: str, dialect: FakeDialect, clock: Clock | None = None
) -> AsyncIterator[tuple[str, Place, Place]]:
    """The proxy's URL, and the two places with their servers."""
    ports = free_ports(2)
    async with (
        Place(dialect, ports[0], clock) as one,
        Place(dialect, ports[1], clock) as two,
        running(proxy, *ports) as url,
    ):
        yield url, one, two


@asynccontextmanager
async def engine_at(url: str, kind: str, folder: Path, **knobs: Any) -> AsyncIterator[Subject]:
    table = {"kind": kind, "url": url, "served_model": "fake", "max_concurrent": SLOTS, **knobs}
    async with open_engine(table, folder) as engine:
        yield Subject(engine, Tells())


@pytest.fixture(params=DIALECTS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=COMMANDS)
async def front(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> AsyncIterator[Front]:
    async with (
        behind(request.param, DIALECTS[kind]) as (url, one, two),
        engine_at(url, kind, tmp_path) as subject,
    ):
        yield Front(subject, one, two)
        one.gate.open()
        two.gate.open()


async def test_a_match_finds_its_prefix_as_without_the_proxy(
    front: Front, kind: str, tmp_path: Path
) -> None:
    """Only the prompt that all begin with is computed once more."""
    direct = FakeServer(FakeConfig(dialects=(DIALECTS[kind],), slots=SLOTS), clock=Gate())
    async with direct, engine_at(direct.url, kind, tmp_path) as subject:
        expected = await cached_tokens(subject)
    found = await cached_tokens(front.subject)
    others = [ply for match, ply in expected if found[match, ply] != expected[match, ply]]
    assert others == [0]
    of_one, of_two = front.one.matches, front.two.matches
    assert of_one
    assert of_two
    assert not of_one.keys() & of_two.keys()
    assert set((of_one + of_two).values()) == {4}


async def cached_tokens(subject: Subject) -> dict[tuple[str, int], int | None]:
    """Of six matches with games of their own, a ply of all before the next ply of any."""
    found = {}
    for ply in range(4):
        for number in range(6):
            match_id = f"game-{number}"
            moves = (MOVES[number:] + MOVES[:number])[: 12 * ply]
            reply = await subject.engine.generate(subject.ask(*moves, match_id=match_id))
            found[match_id, ply] = reply.usage.cached
    return found


async def test_of_a_burst_the_cap_is_answered_and_the_rest_overloaded_at_once(
    front: Front,
) -> None:
    """No answer comes until all of the rest have ended: one that waited would wait for ever."""
    crowded, free = await front.match_at(front.one), await front.match_at(front.two)
    front.one.gate.shut()
    tasks = [front.asking(crowded) for _ in range(CAP + 20)]
    await until(lambda: sum(task.done() for task in tasks) == 20)
    await until(partial(front.one.has_unfinished, CAP))
    assert await front.is_asked(front.two, free)
    front.one.gate.open()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert Counter(map(type, ends)) == {Reply: CAP, Overloaded: 20}
    assert (front.subject.engine.is_ready, front.subject.engine.restarts) == (True, 0)
    assert await front.is_asked(front.one, crowded)


async def test_a_cancelled_question_ends_at_its_server(front: Front, kind: str) -> None:
    """SGLang is told besides, and only the one that had the question."""
    places = (front.one, front.two)
    given_up = []
    for place in places:
        match_id = await front.match_at(place)
        place.gate.shut()
        asking = front.asking(match_id)
        await until(partial(place.has_unfinished, 1))
        asking.cancel()
        await until(partial(place.has_unfinished, 0))
        assert place.server.totals.ended["abort"] == 1
        place.gate.open()
        given_up.append([place.server.seen[-1].body["rid"]] if kind == "sglang" else [])
    await until(lambda: [place.server.given_up for place in places] == given_up)


@pytest.mark.parametrize("number", [0, 1])
async def test_matches_of_a_server_that_is_gone_go_on_at_the_other(
    front: Front, number: int
) -> None:
    """Readiness is asked without a match, so the same server always answers that."""
    gone, other = ((front.one, front.two), (front.two, front.one))[number]
    moved, staying = await front.match_at(gone), await front.match_at(other)
    gone.gate.shut()
    other.gate.shut()
    cut, held = front.asking(moved), front.asking(staying)
    await until(lambda: gone.has_unfinished(1) and other.has_unfinished(1))
    await gone.stop()
    with pytest.raises(EngineUnavailable):
        await cut
    other.gate.open()
    assert await held, "those of the other never notice"
    faults = await front.ask_until(other, moved)
    assert len(faults) <= 1, "the proxy knows by the first"
    gone.gate.open()
    await gone.start()
    assert not await front.ask_until(gone, moved)
    assert front.subject.engine.is_ready


async def test_with_no_server_left_questions_fail_at_once_and_wait_for_one(front: Front) -> None:
    match_id = await front.match_at(front.one)
    front.one.gate.shut()
    cut = front.asking(match_id)
    await until(partial(front.one.has_unfinished, 1))
    await front.one.stop()
    await front.two.stop()
    for asking in (cut, front.asking(match_id)):
        with pytest.raises(EngineUnavailable):
            await asking
    assert not front.subject.engine.is_ready
    waiting = front.asking(match_id)
    await front.two.start()
    assert await waiting
    assert (front.subject.engine.is_ready, front.subject.engine.restarts) == (True, 1)


async def test_a_health_that_takes_its_time_is_no_server_down(tmp_path: Path) -> None:
    """SGLang answers /health after a second; HAProxy asks it and takes silence for death."""
    async with (
        behind("haproxy.cfg", "sglang", WallClock(1.0)) as (url, one, two),
        engine_at(url, "sglang", tmp_path) as subject,
    ):
        front = Front(subject, one, two)
        homes = [(place, await front.match_at(place)) for place in (one, two)]
        await until(lambda: min(one.server.num_slow_looks, two.server.num_slow_looks) >= 4)
        for place, match_id in homes:
            assert await front.is_asked(place, match_id)


RUN = """
name = "proxied"
seed = 5
[engines.main]
kind = "vllm_server"
url = "{url}"
served_model = "fake"
max_concurrent = 32
[[agents]]
name = "one"
kind = "llm"
engine = "main"
[[agents]]
name = "two"
kind = "llm"
engine = "main"
temperature = 0.5
[tournament]
games = ["chess", "janggi"]
pairs = 2
parallel_matches = 8
max_plies = 12
[pace]
move_period_seconds = 0
"""


@asynccontextmanager
async def run_beside(text: str, parent: Path) -> AsyncIterator[Path]:
    """The folder of a run in a process of its own, which must end well."""
    config, folder = parent / "run.toml", parent / "run"
    config.write_text(text)
    words = ("run", config, "--out", folder, "--view", "none", "--dashboard", "off")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "arena.cli", *map(str, words)), stderr=asyncio.subprocess.PIPE
    )
    try:
        yield folder
        _, told = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, told.decode()


def check_nobody_was_charged(records: Records) -> None:
    """Every match was played to its end, and whatever went wrong was no player's."""
    assert [row.termination for row in records.matches] == ["ply_cap"] * 8
    faults = [Fault(attempt.fault) for attempt in records.attempts if attempt.fault]
    assert all(fault.is_infrastructure for fault in faults)


@pytest.mark.parametrize("proxy", COMMANDS)
async def test_a_run_outlives_one_of_its_servers_and_costs_nobody_a_game(
    proxy: str, tmp_path: Path
) -> None:
    async with (
        behind(proxy, "vllm") as (url, one, two),
        run_beside(RUN.format(url=url), tmp_path) as folder,
    ):
        await until(lambda: one.games and two.games, 30.0)
        moved = one.games
        await one.stop()
        await until(lambda: moved & two.games, 30.0)
        await one.start()
    check_nobody_was_charged(read(folder))
