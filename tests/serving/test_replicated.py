"""Several engines as one: where requests go, what one that is down or lost costs, and whole runs at
several urls."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arena import cli
from arena.store import Records, read
from serving import (
    EngineDead,
    EngineError,
    EngineLimits,
    EngineSnapshot,
    EngineUnavailable,
    Finish,
    Limited,
    ModelTemplate,
    Overloaded,
    Prompt,
    Reply,
    Request,
    Timings,
    TokenPrompt,
    Usage,
)
from serving.affinity import Affinity
from serving.fake_model import FakeConfig
from serving.fake_server import FakeServer
from serving.http_config import replica_name
from serving.replicated import Replicated
from tests.serving.contract import Subject, Tells, open_engine, served, until
from tests.serving.proxies import free_ports
from tests.serving.test_proxied_engines import RUN, Place, check_nobody_was_charged, run_beside

MakeRequest = Callable[..., Request]
MATCHES = [f"match-{number}" for number in range(12)]


class Puppet:
    """An engine that does what the test tells it to."""

    kind = "test"
    limits = EngineLimits(context_tokens=100, max_concurrent=2, max_queued=1)

    def __init__(self, name: str) -> None:
        self.name = f"main at {name}"
        self.version = "1"
        self.model = "one model"
        self.restarts = 0
        self.is_ready = True
        self.is_open = False
        self.fails_to_open: EngineError | None = None
        self.failure: EngineError | None = None
        self.forgets = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.inside: list[str] = []
        self.asked: Counter[str] = Counter()
        self.cancelled: list[str] = []
        self.primed: list[Prompt] = []
        self.told: asyncio.Queue[EngineSnapshot | None] = asyncio.Queue()

    @property
    def template(self) -> ModelTemplate:
        raise NotImplementedError

    async def open(self) -> None:
        self.is_open = True
        if self.fails_to_open is not None:
            raise self.fails_to_open

    async def generate(self, request: Request) -> Reply:
        self.asked[request.match_id] += 1
        self.inside.append(request.match_id)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.match_id)
            raise
        finally:
            self.inside.remove(request.match_id)
        if self.failure is not None:
            raise self.failure
        timings = Timings(5.0, 5.0, None, 6.0, None, None, None)
        return Reply("e2e4", Finish.STOP, Usage(1, 1, None), timings)

    async def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        while (snapshot := await self.told.get()) is not None:
            yield snapshot

    async def prime(self, prompt: Prompt) -> None:
        self.primed.append(prompt)

    async def reset_prefix_cache(self) -> bool:
        return self.forgets

    async def close(self) -> None:
        self.is_open = False
        self.told.put_nowait(None)


class Fleet:
    """Two puppets as one engine, and requests to it."""

    def __init__(self, make: MakeRequest) -> None:
        self.one, self.two = self.puppets = Puppet("one:1"), Puppet("two:2")
        limits = EngineLimits(context_tokens=100, max_concurrent=4, max_queued=8)
        self.engine = Replicated("main", limits, {"one:1": self.one, "two:2": self.two})
        self._make = make

    async def ask(self, match_id: str) -> Reply:
        return await self.engine.generate(self._make(match_id=match_id))

    def asking(self, match_id: str) -> asyncio.Task[Reply]:
        return asyncio.create_task(self.ask(match_id))

    async def homes(self) -> dict[str, str | None]:
        """The replica of each match."""
        return {match: (await self.ask(match)).replica for match in MATCHES}


@pytest.fixture
async def fleet(make_request: MakeRequest) -> Fleet:
    return Fleet(make_request)


def of(homes: dict[str, str | None], replica: str) -> list[str]:
    return [match for match, home in homes.items() if home == replica]


async def turn() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


# where requests go


async def test_a_match_stays_at_one_replica_and_each_has_its_share(fleet: Fleet) -> None:
    homes = await fleet.homes()
    for _ in range(3):
        assert await fleet.homes() == homes
    assert 4 <= len(of(homes, "one:1")) <= 8
    assert set(fleet.one.asked) == set(of(homes, "one:1"))
    assert set(fleet.two.asked) == set(of(homes, "two:2"))


async def test_matches_of_a_replica_that_is_down_move_and_return_with_it(fleet: Fleet) -> None:
    await fleet.homes()
    fleet.one.is_ready = False
    assert fleet.engine.is_ready
    assert set((await fleet.homes()).values()) == {"two:2"}
    fleet.one.is_ready = True
    after = await fleet.homes()
    assert of(after, "one:1")
    for match in of(after, "one:1"):
        assert Affinity(["one:1", "two:2"]).begin(match, 0.0) == "one:1"


async def test_what_a_replica_cannot_take_is_refused_at_once_though_another_has_room(
    fleet: Fleet,
) -> None:
    """Two inside and one waiting are its own limits."""
    crowded, *_ = of(await fleet.homes(), "one:1")
    free, *_ = of(await fleet.homes(), "two:2")
    fleet.one.gate.clear()
    held = [fleet.asking(crowded) for _ in range(3)]
    await turn()
    assert len(fleet.one.inside) == 2
    with pytest.raises(Overloaded, match=r"main at one:1: 2 requests inside and 1 waiting"):
        await fleet.ask(crowded)
    assert (await fleet.ask(free)).replica == "two:2"
    fleet.one.gate.set()
    assert [(await one).replica for one in held] == ["one:1"] * 3


async def test_one_that_waited_before_a_replica_goes_to_another_when_it_is_down(
    fleet: Fleet,
) -> None:
    match, *_ = of(await fleet.homes(), "one:1")
    fleet.one.gate.clear()
    inside = [fleet.asking(match) for _ in range(2)]
    waiting = fleet.asking(match)
    await turn()
    assert not waiting.done()
    fleet.one.is_ready, fleet.one.failure = False, EngineUnavailable("cut")
    fleet.one.gate.set()
    for asking in inside:
        with pytest.raises(EngineUnavailable, match="cut"):
            await asking
    assert (await waiting).replica == "two:2"


async def test_with_no_replica_ready_requests_wait_for_the_first(fleet: Fleet) -> None:
    fleet.one.is_ready = fleet.two.is_ready = False
    assert not fleet.engine.is_ready
    asking = [fleet.asking(match) for match in MATCHES[:2]]
    await turn()
    assert not any(one.done() for one in asking)
    fleet.two.is_ready = True
    assert [(await one).replica for one in asking] == ["two:2"] * 2


async def test_cancelling_passes_to_the_replica_and_frees_its_place(fleet: Fleet) -> None:
    match, *_ = of(await fleet.homes(), "one:1")
    fleet.one.gate.clear()
    held = [fleet.asking(match) for _ in range(3)]
    await turn()
    held[0].cancel()
    await turn()
    assert held[0].cancelled()
    assert fleet.one.cancelled == [match]
    assert len(fleet.one.inside) == 2, "the one that waited is inside"
    fleet.one.gate.set()
    assert [(await one).replica for one in held[1:]] == ["one:1"] * 2


# loss


async def test_a_replica_lost_for_good_is_no_end_until_the_last_one_is(fleet: Fleet) -> None:
    homes = await fleet.homes()
    (match, *_), (other, *_) = of(homes, "one:1"), of(homes, "two:2")
    fleet.one.failure = EngineDead("engine main at one:1: gone", final=True)
    with pytest.raises(EngineDead, match="main at one:1: gone") as caught:
        await fleet.ask(match)
    assert not caught.value.final, "asked again, it is answered"
    assert set((await fleet.homes()).values()) == {"two:2"}
    assert fleet.engine.is_ready
    fleet.two.failure = EngineDead("engine main at two:2: gone", final=True)
    with pytest.raises(EngineDead) as caught:
        await fleet.ask(other)
    assert not caught.value.final
    with pytest.raises(EngineDead, match=r"^engine main: no replica is left: .*gone") as caught:
        await fleet.ask(other)
    assert caught.value.final
    assert fleet.engine.is_ready, "nobody waits for it"


async def test_an_error_that_is_not_final_is_passed_on_as_it_is(fleet: Fleet) -> None:
    match, *_ = of(await fleet.homes(), "one:1")
    fleet.one.failure = EngineDead("restarting")
    with pytest.raises(EngineDead, match="restarting"):
        await fleet.ask(match)
    fleet.one.failure = None
    assert (await fleet.ask(match)).replica == "one:1"


# opening and closing


async def test_all_are_opened_and_closed(fleet: Fleet) -> None:
    await fleet.engine.open()
    assert [one.is_open for one in fleet.puppets] == [True, True]
    await fleet.engine.close()
    assert [one.is_open for one in fleet.puppets] == [False, False]


@pytest.mark.parametrize("said", ["no connection", "engine main at two:2: no connection"])
async def test_a_replica_that_does_not_open_is_named_and_none_stays_open(
    fleet: Fleet, said: str
) -> None:
    fleet.two.fails_to_open = EngineUnavailable(said)
    with pytest.raises(EngineDead) as caught:
        await fleet.engine.open()
    assert str(caught.value) == "engine main at two:2: no connection"
    assert caught.value.final
    assert [one.is_open for one in fleet.puppets] == [False, False]


async def test_replicas_of_different_models_are_refused(fleet: Fleet) -> None:
    fleet.two.model = "another"
    with pytest.raises(EngineDead, match="one:1 serves one model, and two:2 another: start all"):
        await fleet.engine.open()
    assert [one.is_open for one in fleet.puppets] == [False, False]


async def test_one_that_does_not_tell_its_model_is_taken_at_its_word(fleet: Fleet) -> None:
    fleet.two.model = ""
    await fleet.engine.open()
    await fleet.engine.close()


# what it tells


async def test_it_tells_of_all_together(fleet: Fleet) -> None:
    assert (fleet.engine.name, fleet.engine.kind, fleet.engine.version) == ("main", "test", "1")
    fleet.two.version = "2"
    fleet.one.restarts, fleet.two.restarts = 1, 3
    assert (fleet.engine.version, fleet.engine.restarts) == ("1 + 2", 4)


async def test_snapshots_of_all_come_in_one_stream_until_the_last_is_closed(fleet: Fleet) -> None:
    stream = fleet.engine.snapshots()
    blank = EngineSnapshot(at=0.0, source="sampled")
    for number, puppet in [(1, fleet.one), (2, fleet.two), (3, fleet.one)]:
        puppet.told.put_nowait(replace(blank, running=number))
        seen = await anext(stream)
        assert (seen.running, seen.replica) == (number, puppet.name.removeprefix("main at "))
    await fleet.one.close()
    fleet.two.told.put_nowait(blank)
    assert (await anext(stream)).replica == "two:2"
    await fleet.two.close()
    assert [snapshot async for snapshot in stream] == []


async def test_a_queue_before_a_replica_is_in_its_snapshots(fleet: Fleet) -> None:
    crowded, *_ = of(await fleet.homes(), "one:1")
    fleet.one.gate.clear()
    held = [fleet.asking(crowded) for _ in range(3)]
    await turn()
    with pytest.raises(Overloaded):
        await fleet.ask(crowded)
    stream = fleet.engine.snapshots()
    fleet.one.told.put_nowait(EngineSnapshot(at=0.0, source="sampled", running=2))
    seen = await anext(stream)
    assert (seen.running, seen.waiting, seen.rejected) == (2, 1, 1)
    fleet.one.gate.set()
    await asyncio.gather(*held)
    await fleet.engine.close()
    assert [snapshot async for snapshot in stream] == []


async def test_prompts_are_primed_wherever_somebody_is(fleet: Fleet) -> None:
    prompt = TokenPrompt((1, 2, 3))
    await fleet.engine.prime(prompt)
    fleet.two.is_ready = False
    await fleet.engine.prime(prompt)
    assert [len(one.primed) for one in fleet.puppets] == [2, 1]


async def test_prefixes_are_forgotten_once_every_replica_did(fleet: Fleet) -> None:
    assert await fleet.engine.reset_prefix_cache()
    fleet.two.forgets = False
    assert not await fleet.engine.reset_prefix_cache()
    fleet.two.forgets, fleet.two.is_ready = True, False
    assert not await fleet.engine.reset_prefix_cache(), "one that is down still holds them"


# at urls


@asynccontextmanager
async def at_urls(
    folder: Path, kind: str = "vllm_server", **knobs: Any
) -> AsyncIterator[tuple[Limited, Place, Place]]:
    """An engine of this kind at two servers, which is looked at often."""
    dialect = "sglang" if kind == "sglang" else "vllm"
    ports = free_ports(2)
    table = {
        "kind": kind,
        "urls": [f"http://127.0.0.1:{port}" for port in ports],
        "served_model": "fake",
        "max_concurrent": 4,
        "scrape_seconds": 0.05,
        **knobs,
    }
    async with AsyncExitStack() as stack:
        one, two = [
            await stack.enter_async_context(Place(dialect, port))  # type: ignore[arg-type]
            for port in ports
        ]
        yield await stack.enter_async_context(open_engine(table, folder)), one, two


async def homes_of(engine: Limited) -> dict[str, str | None]:
    subject = Subject(engine, Tells())
    replies = [await engine.generate(subject.ask(match_id=match)) for match in MATCHES]
    return {match: reply.replica for match, reply in zip(MATCHES, replies, strict=True)}


@pytest.mark.usefixtures("model_directory")
@pytest.mark.parametrize("kind", ["vllm_server", "sglang"])
async def test_each_url_is_a_replica(tmp_path: Path, kind: str) -> None:
    async with at_urls(tmp_path, kind, max_concurrent=5) as (engine, one, two):
        homes = await homes_of(engine)
        names = {replica_name(place.server.url): place for place in (one, two)}
        for name, place in names.items():
            assert of(homes, name) == list(place.matches)
            assert len(place.matches) >= 4
        assert engine.limits.max_concurrent == 5
        seen: dict[str | None, int] = {}
        async for snapshot in engine.snapshots():
            seen[snapshot.replica] = max(
                snapshot.prefix_queries or 0, seen.get(snapshot.replica, 0)
            )
            if seen.keys() == names.keys() and min(seen.values()) > 0:
                break
        assert not await engine.metrics()


@pytest.mark.usefixtures("model_directory")
async def test_a_server_that_is_gone_is_replaced_until_it_is_back(tmp_path: Path) -> None:
    async with at_urls(tmp_path) as (engine, one, two):
        subject = Subject(engine, Tells())
        name, other = replica_name(one.server.url), replica_name(two.server.url)
        at_home = of(await homes_of(engine), name)
        again = subject.ask(match_id=at_home[0])
        one.gate.shut()
        cut = asyncio.create_task(engine.generate(again))
        await until(lambda: one.has_unfinished(1))
        await one.stop()
        for asking, said in ((cut, "truncated"), (engine.generate(again), "no connection")):
            with pytest.raises(EngineUnavailable, match=f"main at {name}: .*{said}"):
                await asking
        assert set((await homes_of(engine)).values()) == {other}
        assert engine.is_ready
        one.gate.open()
        await one.start()
        await until(lambda: engine.restarts == 1)
        back = of(await homes_of(engine), name)
        assert back
        assert back == list(one.matches)


@pytest.mark.usefixtures("model_directory")
async def test_half_a_fleet_is_not_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.http_engine.URL_START_S", 0.1)
    (port,) = free_ports(1)
    async with FakeServer(FakeConfig(dialects=("vllm",))) as server:
        urls = [server.url, f"http://127.0.0.1:{port}"]
        table = {"kind": "vllm_server", "urls": urls, "served_model": "fake"}
        with pytest.raises(EngineDead) as caught:
            async with open_engine(table, tmp_path):
                raise AssertionError("half a fleet")
    assert str(caught.value).startswith(f"engine main at 127.0.0.1:{port}: {urls[1]} did not")
    assert "\n" not in str(caught.value)
    assert caught.value.final


@pytest.mark.usefixtures("model_directory")
async def test_servers_with_different_models_are_refused(tmp_path: Path) -> None:
    """Both take what is asked for; a match that moved would be played by another."""
    async with (
        FakeServer(FakeConfig(dialects=("vllm",))) as one,
        FakeServer(FakeConfig(dialects=("vllm",), context_tokens=4096)) as two,
    ):
        table = {"kind": "vllm_server", "urls": [one.url, two.url], "served_model": "fake"}
        with pytest.raises(EngineDead, match=r"with 2048 tokens a request, and .* with 4096"):
            async with open_engine(table, tmp_path):
                raise AssertionError("two models")


def played(folder: Path, *urls: str) -> Records:
    """A whole run at these urls."""
    config = folder.with_suffix(".toml")
    config.write_text(at(*urls))
    words = ("run", config, "--out", folder, "--view", "none", "--dashboard", "off")
    assert cli.main([*map(str, words)]) == 0
    return read(folder)


def at(*urls: str) -> str:
    """The config of a run at these urls."""
    return RUN.replace('url = "{url}"', f"urls = {json.dumps(urls)}")


@pytest.mark.usefixtures("model_directory")
def test_the_games_are_those_of_one_server_and_records_name_the_replica(tmp_path: Path) -> None:
    config = FakeConfig(dialects=("vllm",), slots=16, speed=50.0)
    with served(config) as one, served(config) as two:
        alone = played(tmp_path / "alone", one.url)
        together = played(tmp_path / "together", one.url, two.url)
        names = {replica_name(one.url), replica_name(two.url)}
    assert moves(together) == moves(alone)
    assert len(moves(alone)) == 8
    of_match: dict[str, set[str | None]] = {}
    for attempt in together.attempts:
        assert attempt.fault is None
        of_match.setdefault(attempt.match_id, set()).add(attempt.replica)
    assert all(len(replicas) == 1 for replicas in of_match.values())
    assert set().union(*of_match.values()) == names


def moves(records: Records) -> dict[str, list[str]]:
    played: dict[str, list[str]] = {}
    for ply in records.plies:
        played.setdefault(ply.match_id, []).append(ply.move)
    return played


@pytest.mark.usefixtures("model_directory")
async def test_a_run_outlives_one_of_its_servers_and_costs_nobody_a_game(tmp_path: Path) -> None:
    ports = free_ports(2)
    async with Place("vllm", ports[0]) as one, Place("vllm", ports[1]) as two:
        text = at(one.server.url, two.server.url)
        async with run_beside(text, tmp_path) as folder:
            await until(lambda: one.games and two.games, 30.0)
            moved = one.games
            await one.stop()
            await until(lambda: moved & two.games, 30.0)
            await one.start()
    check_nobody_was_charged(read(folder))
