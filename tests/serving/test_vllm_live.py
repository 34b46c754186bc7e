"""The real vLLM, with the packaged model on this machine: one engine for the whole module."""

import asyncio
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from serving import (
    Engine,
    EngineDead,
    EngineSnapshot,
    EngineStalled,
    Finish,
    Limited,
    PromptParts,
    Reply,
    Request,
    RequestRejected,
    Sampling,
    TokenPrompt,
    VllmEngine,
    build_engine,
    check_engine,
    parse_engine_config,
)
from serving.process import group_members

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.usefixtures("model_directory"),
]

IN_MODULE_LOOP = pytest.mark.asyncio(loop_scope="module")
SYSTEM = " ".join(f"Rule {n}: a piece moves as it always moved." for n in range(20))
MOVES = tuple(a + b for a in ("e2", "d2", "g1", "b1") for b in ("e4", "d4", "f3", "c3", "a10"))
TABLE = {"kind": "vllm", "max_concurrent": 8, "max_queued": 8, "context_tokens": 1024}
DRIVER = """
import asyncio, json, sys
from pathlib import Path
from serving import build_engine, parse_engine_config

async def main():
    config = parse_engine_config("main", json.loads(sys.argv[1]))
    engine = build_engine(
        "main", config, log_dir=Path(sys.argv[2]), stall_seconds=30, restart_limit=0
    )
    await engine.open()

if __name__ == "__main__":
    asyncio.run(main())
"""


def request(
    engine: Engine,
    moves: tuple[str, ...],
    *,
    match_id: str = "m",
    choices: tuple[str, ...] | None = MOVES,
    max_tokens: int = 8,
    deadline_s: float = 60.0,
    ids: tuple[int, ...] | None = None,
) -> Request:
    prompt = engine.template.render(PromptParts(SYSTEM, "", "Moves:", moves))
    return Request(
        id=f"{match_id}/{len(moves)}/0/0",
        match_id=match_id,
        prompt=TokenPrompt(ids) if ids is not None else prompt,
        choices=choices,
        max_tokens=max_tokens,
        sampling=Sampling(seed=len(moves)),
        deadline_s=deadline_s,
    )


def started_processes(log_dir: Path) -> tuple[int, list[int]]:
    """The group of the engine whose record stands in `log_dir`, and its members."""
    pgid = int(json.loads((log_dir / "engine-main.pid").read_text())["pgid"])
    return pgid, group_members(pgid)


def test_kill_9_of_the_arena_while_vllm_starts_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, json.dumps(TABLE), str(tmp_path)]
    with subprocess.Popen(command) as arena:
        begun = time.monotonic()
        members: list[int] = []
        while len(members) < 3:  # the host, vLLM's resource tracker, vLLM's engine process
            assert time.monotonic() - begun < 120
            assert arena.poll() is None
            time.sleep(0.2)
            if (tmp_path / "engine-main.pid").exists():
                pgid, members = started_processes(tmp_path)
        arena.kill()
        killed = time.monotonic()
        while group_members(pgid):
            assert time.monotonic() - killed < 5.0, group_members(pgid)
            time.sleep(0.1)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Limited]:
    config = parse_engine_config("main", TABLE)
    check_engine("main", config)
    built = build_engine(
        "main",
        config,
        log_dir=tmp_path_factory.mktemp("run"),
        stall_seconds=6.0,
        restart_limit=1,
    )
    assert isinstance(built, Limited)
    with pytest.MonkeyPatch.context() as environment:
        # with it prometheus_client would give the figures of every process that uses it
        environment.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path_factory.mktemp("prometheus")))
        await built.open()
    yield built
    pgid = embedded(built).pgid
    begun = time.monotonic()
    await built.close()
    assert time.monotonic() - begun < 5.0
    assert pgid is None or group_members(pgid) == []


def embedded(engine: Limited) -> VllmEngine:
    assert isinstance(engine.inner, VllmEngine)
    return engine.inner


async def play(engine: Limited, match_id: str, plies: int) -> list[Reply]:
    replies: list[Reply] = []
    for _ in range(plies):
        moves = tuple(reply.text for reply in replies)
        replies.append(await engine.generate(request(engine, moves, match_id=match_id)))
    return replies


@IN_MODULE_LOOP
async def test_constrained_answers_are_obeyed_and_prefixes_are_shared(engine: Limited) -> None:
    assert await engine.reset_prefix_cache()
    await engine.generate(request(engine, ()))
    games = await asyncio.gather(*(play(engine, f"m{n}", 5) for n in range(4)))
    replies = [reply for game in games for reply in game]
    assert {reply.text for reply in replies} <= set(MOVES)
    assert {reply.finish for reply in replies} == {Finish.STOP}
    uncached = [(reply.usage.prompt or 0) - (reply.usage.cached or 0) for reply in replies]
    assert max(uncached) <= 1 + 32 + 12
    assert all(reply.usage.completion <= 7 for reply in replies)
    for reply in replies:
        timings = reply.timings
        assert timings.queue_s is not None
        assert timings.prefill_s is not None
        assert timings.decode_s is not None
        inside = timings.queue_s + timings.prefill_s + timings.decode_s
        assert 0 < inside <= timings.done - timings.admitted
        assert timings.submitted <= timings.admitted
    together = [reply.step_requests_mean for reply in replies if reply.step_requests_mean]
    assert len(together) == len(replies)
    assert max(together) > 1.5


@IN_MODULE_LOOP
async def test_steps_are_reported_with_occupancy_and_totals(engine: Limited) -> None:
    seen: list[EngineSnapshot] = []

    async def collect() -> None:
        async for snapshot in engine.snapshots():
            seen.append(snapshot)

    collecting = asyncio.create_task(collect())
    await asyncio.gather(*(play(engine, f"s{n}", 2) for n in range(4)))
    await asyncio.sleep(0.3)
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)
    assert {snapshot.source for snapshot in seen} == {"per_step"}
    assert max(snapshot.step_requests or 0 for snapshot in seen) >= 3
    assert all((snapshot.step_tokens or 0) >= (snapshot.step_requests or 0) for snapshot in seen)
    queries = [snapshot.prefix_queries or 0 for snapshot in seen]
    assert queries == sorted(queries)
    assert queries[-1] > 1000
    ats = [snapshot.at for snapshot in seen]
    assert max(ats) <= time.monotonic()
    assert 0 < max(snapshot.kv_usage or 0 for snapshot in seen) <= 1


@IN_MODULE_LOOP
async def test_vllms_own_metrics_count_the_requests_asked(
    engine: Limited, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = samples(await engine.metrics())
    await asyncio.gather(*(play(engine, f"p{n}", 3) for n in range(4)))
    begun = time.monotonic()
    text = await engine.metrics()
    assert time.monotonic() - begun < 1.0
    after = samples(text)
    grown = {name: round(value - before.get(name, 0.0)) for name, value in after.items()}
    assert grown["vllm:time_to_first_token_seconds_count"] == 12
    assert grown["vllm:e2e_request_latency_seconds_count"] == 12
    assert grown["vllm:request_queue_time_seconds_count"] == 12
    assert grown["vllm:request_success_total"] == 12
    assert grown["vllm:generation_tokens_total"] >= 12
    assert grown["vllm:prefix_cache_queries_total"] >= grown["vllm:prefix_cache_hits_total"] > 0
    assert after["vllm:num_requests_running"] == 0, "vLLM counts when a step's requests have left"
    assert all(name.startswith("vllm:") for name in after)
    assert "# TYPE vllm:time_to_first_token_seconds histogram" in text
    assert list((tmp_path_factory.getbasetemp() / "prometheus0").iterdir()) == []


def samples(text: str) -> dict[str, float]:
    """Sums by name over all labels of a scrape in Prometheus' text format."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


@IN_MODULE_LOOP
async def test_the_same_seed_draws_the_same_move(engine: Limited) -> None:
    replies = await asyncio.gather(
        *(engine.generate(request(engine, ("e2e4",), match_id=f"d{n}")) for n in range(3))
    )
    assert len({reply.text for reply in replies}) == 1


@IN_MODULE_LOOP
async def test_more_new_prompts_at_once_than_a_step_takes_end_no_engine(engine: Limited) -> None:
    """As when a run with long matches is resumed. Computed in parts, a seeded one once did."""
    dice = random.Random(1)
    asked = [
        request(
            engine,
            (),
            match_id=f"long-{number}",
            ids=tuple(dice.randrange(1000, 40_000) for _ in range(900)),
        )
        for number in range(4)
    ]
    replies = await asyncio.gather(*map(engine.generate, asked))
    assert all(reply.text in MOVES for reply in replies)
    assert engine.restarts == 0


@IN_MODULE_LOOP
async def test_a_prompt_beyond_the_context_is_rejected(engine: Limited) -> None:
    rng = random.Random(0)
    ids = tuple(rng.randrange(10, 40_000) for _ in range(1200))
    with pytest.raises(RequestRejected, match="1024"):
        await engine.generate(request(engine, (), ids=ids))


@IN_MODULE_LOOP
async def test_a_free_answer_is_cut_at_its_deadline_with_its_text(engine: Limited) -> None:
    asked = request(engine, (), choices=None, max_tokens=700, deadline_s=2.0)
    reply = await engine.generate(asked)
    assert reply.finish in (Finish.DEADLINE, Finish.STOP)
    assert reply.usage.completion > 0
    assert reply.text


@IN_MODULE_LOOP
async def test_cancelling_aborts_in_the_engine(engine: Limited) -> None:
    asking = asyncio.create_task(
        engine.generate(request(engine, ("e2e4",), choices=None, max_tokens=700))
    )
    await asyncio.sleep(0.7)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    # vLLM refuses a reset while anything is unfinished
    async with asyncio.timeout(5):
        while not await engine.reset_prefix_cache():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@IN_MODULE_LOOP
async def test_a_killed_worker_costs_the_requests_in_flight_and_a_restart(engine: Limited) -> None:
    pgid = embedded(engine).pgid
    assert pgid is not None
    asking = [asyncio.create_task(play(engine, f"k{n}", 50)) for n in range(2)]
    await asyncio.sleep(0.5)
    os.kill(worker_of(pgid).pid, signal.SIGKILL)
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDead, EngineDead]
    assert not any(result.final for result in results if isinstance(result, EngineDead))
    (reply,) = await play(engine, "after", 1)
    assert reply.text in MOVES
    assert engine.restarts == 1
    assert group_members(pgid) == []


@IN_MODULE_LOOP
async def test_a_frozen_engine_process_is_called_stalled(engine: Limited) -> None:
    """Only vLLM's own process stops; the host that speaks to us goes on."""
    pgid = embedded(engine).pgid
    assert pgid is not None
    asking = asyncio.create_task(play(engine, "f", 200))
    await asyncio.sleep(0.5)
    os.kill(engine_core_of(pgid).pid, signal.SIGSTOP)
    with pytest.raises(EngineStalled, match="no step for"):
        await asking
    # the restart limit is used up
    with pytest.raises(EngineDead) as caught:
        await engine.generate(request(engine, ()))
    assert caught.value.final
    assert group_members(pgid) == []


def engine_core_of(pgid: int) -> psutil.Process:
    return next(process for process in psutil.Process(pgid).children() if is_vllm(process))


def worker_of(pgid: int) -> psutil.Process:
    """vLLM's worker, or its engine process where that computes itself."""
    core = engine_core_of(pgid)
    return next((process for process in core.children() if is_vllm(process)), core)


def is_vllm(process: psutil.Process) -> bool:
    return process.memory_info().rss > 200 << 20
