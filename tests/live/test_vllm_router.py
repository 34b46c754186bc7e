"""The real vllm-router in front of two fake servers, started as docs/guides/fleet.md says: where
matches go, what a dead server costs, and what is refused."""

import asyncio
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from arena.store import read
from serving import Overloaded, Reply
from serving.engine_group import end_group
from tests.serving.contract import until
from tests.serving.proxies import free_ports, is_listening, until_it_holds
from tests.serving.test_proxied_engines import (
    RUN,
    SLOTS,
    Front,
    Place,
    check_nobody_was_charged,
    engine_at,
    run_beside,
)

pytestmark = [pytest.mark.live, pytest.mark.slow]

FLAGS = (
    *("--policy", "consistent_hash", "--disable-retries", "--disable-circuit-breaker"),
    *("--health-check-interval-secs", "1"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
    *("--max-concurrent-requests", "32", "--queue-size", "0"),
)
NARROW = ("--max-concurrent-requests", "4")


@asynccontextmanager
async def router(*servers: int, folder: Path, more: Sequence[str] = ()) -> AsyncIterator[str]:
    """The URL of a router in front of these ports; its whole process group is ended."""
    if importlib.util.find_spec("vllm_router") is None:
        reason = "vllm-router is not installed: make setup"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    port, metrics_port = free_ports(2)
    urls = [f"http://127.0.0.1:{server}" for server in servers]
    words = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, *FLAGS, *more]
    words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    with (folder / "router.log").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vllm_router.launch_router", *words),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while not await is_listening(port):
            assert process.returncode is None, (folder / "router.log").read_text()
            await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        await end_group(process.pid)
        await process.wait()


@asynccontextmanager
async def behind(folder: Path, *more: str) -> AsyncIterator[tuple[str, Place, Place]]:
    """The router's URL, and the two places with their servers."""
    ports = free_ports(2)
    async with (
        Place("vllm", ports[0]) as one,
        Place("vllm", ports[1]) as two,
        router(*ports, folder=folder, more=more) as url,
    ):
        yield url, one, two


@asynccontextmanager
async def played(folder: Path, *more: str) -> AsyncIterator[Front]:
    """An engine that plays through the router."""
    async with (
        behind(folder, *more) as (url, one, two),
        engine_at(url, "vllm_server", folder, scrape=False) as subject,
    ):
        yield Front(subject, one, two)
        one.gate.open()
        two.gate.open()


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with played(tmp_path) as front:
        yield front


async def test_a_run_keeps_each_match_at_one_server_and_outlives_one(tmp_path: Path) -> None:
    text = RUN.replace("max_concurrent", "scrape = false\nmax_concurrent")
    async with (
        behind(tmp_path) as (url, one, two),
        run_beside(text.format(url=url), tmp_path) as folder,
    ):
        await until(lambda: one.games and two.games, 30.0)
        moved = one.games
        assert not moved & two.games
        await one.stop()
        await until(lambda: moved & two.games, 30.0)
        await one.start()
    records = read(folder)
    check_nobody_was_charged(records)
    assert any(attempt.fault for attempt in records.attempts), "what was cut is told"


async def test_matches_stay_and_both_servers_have_some(front: Front) -> None:
    names = [f"match-{number}" for number in range(20)]
    for _ in range(4):
        await asyncio.gather(*map(front.ask, names))
    of_one, of_two = front.one.matches, front.two.matches
    assert min(len(of_one), len(of_two)) >= 3
    assert not of_one.keys() & of_two.keys()
    assert set((of_one + of_two).values()) == {4}


async def test_a_server_that_is_gone_is_replaced_until_it_is_back(front: Front) -> None:
    """Up to the next look at /health its matches get an error, which is the infrastructure's."""
    moved = await front.match_at(front.one)
    await front.one.stop()
    faults = await front.ask_until(front.two, moved)
    assert all("error sending request" in str(fault) for fault in faults)
    await front.one.start()
    assert not await front.ask_until(front.one, moved)
    assert (front.subject.engine.is_ready, front.subject.engine.restarts) == (True, 0)


async def test_most_of_a_burst_is_overloaded_at_once(tmp_path: Path) -> None:
    """While no answer comes: one that waited would wait for ever. How many pass is no cap: a
    request counts until its answer begins, and the count shrinks with time."""
    async with played(tmp_path, *NARROW) as front:
        front.one.gate.shut()
        front.two.gate.shut()
        tasks = [front.asking(f"match-{number}") for number in range(SLOTS)]
        await until(lambda: sum(task.done() for task in tasks) >= SLOTS // 2)
        front.one.gate.open()
        front.two.gate.open()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        counts = Counter(map(type, ends))
        assert counts.keys() == {Reply, Overloaded}
        assert counts[Reply] >= 4
        assert (front.subject.engine.is_ready, front.subject.engine.restarts) == (True, 0)


async def test_a_cancelled_question_ends_at_its_server_with_a_later_token(front: Front) -> None:
    """Not before: the router sees that its client has gone when it has something for it."""
    match_id = await front.match_at(front.one)
    question = replace(front.subject.ask_for_long(), match_id=match_id)
    front.one.gate.shut()
    asking = asyncio.create_task(front.subject.engine.generate(question))
    await until(lambda: front.one.has_unfinished(1))
    asking.cancel()

    async def is_aborted_after_a_step() -> bool:
        front.one.gate.open()
        await asyncio.sleep(0)
        front.one.gate.shut()
        return front.one.server.totals.ended["abort"] == 1

    await until_it_holds(is_aborted_after_a_step)


async def test_its_metrics_page_is_of_one_server_and_is_not_looked_at(front: Front) -> None:
    """Those of one would be taken for all: only what the answers tell is shown."""
    match_id = await front.match_at(front.one)
    assert not await front.subject.engine.metrics()
    prompt = (await front.ask(match_id)).usage.prompt
    async for snapshot in front.subject.engine.snapshots():
        assert snapshot.kv_usage is None
        if snapshot.prefix_queries:
            assert snapshot.prefix_queries >= (prompt or 0)
            break
