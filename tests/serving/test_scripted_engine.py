"""The scripted engine: the same answers however it is timed, and each misbehaviour."""

import asyncio
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving import (
    EngineDead,
    EngineSnapshot,
    EngineStalled,
    EngineStart,
    Finish,
    ModelTemplate,
    Overloaded,
    Request,
    RequestRejected,
    ScriptedConfig,
    ScriptedEngine,
    build_engine,
    parse_engine_config,
)
from serving.scripted import PrefixModel

MakeRequest = Callable[..., Request]


def scripted(stall_seconds: float = 0.01, **knobs: Any) -> ScriptedEngine:
    start = EngineStart("s", Path("unused"), stall_seconds, restart_limit=0)
    return ScriptedEngine(start, ScriptedConfig.model_validate(knobs))


async def test_the_seed_alone_decides_the_answer(make_request: MakeRequest) -> None:
    choices = tuple(f"a{n}b{n}" for n in range(1, 9))
    requests = [make_request(n, seed=n, choices=choices) for n in range(40)]
    engine = scripted()
    forwards = [(await engine.generate(request)).text for request in requests]
    hurried = scripted(latency_seconds=[0.0, 0.002])
    replies = await asyncio.gather(*(hurried.generate(request) for request in reversed(requests)))
    assert [reply.text for reply in reversed(replies)] == forwards
    assert len(set(forwards)) > 4
    assert set(forwards) <= set(choices)


async def test_no_latency_yields_to_the_loop(make_request: MakeRequest) -> None:
    engine, seen = scripted(), []

    async def ask(name: str) -> None:
        for _ in range(3):
            await engine.generate(make_request())
            seen.append(name)

    await asyncio.gather(ask("a"), ask("b"))
    assert seen == ["a", "b", "a", "b", "a", "b"]


async def test_latency_is_drawn_within_its_range(make_request: MakeRequest) -> None:
    engine = scripted(latency_seconds=[0.004, 0.008])
    replies = await asyncio.gather(*(engine.generate(make_request(n)) for n in range(20)))
    took = [reply.timings.done - reply.timings.admitted for reply in replies]
    assert min(took) >= 0.004
    assert max(took) - min(took) > 0.001


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("overload", Overloaded),
        ("reject", RequestRejected),
        ("stall", EngineStalled),
        ("die", EngineDead),
    ],
)
async def test_an_infrastructure_fault_is_raised_at_its_request(
    make_request: MakeRequest, fault: str, error: type[Exception]
) -> None:
    engine = scripted(faults=[{"kind": fault, "at": [1]}])
    await engine.generate(make_request(0))
    with pytest.raises(error):
        await engine.generate(make_request(1))
    assert (await engine.generate(make_request(2))).finish == Finish.STOP


async def test_death_takes_every_request_in_flight(make_request: MakeRequest) -> None:
    engine = scripted(latency_seconds=60.0, faults=[{"kind": "die", "at": [2]}])
    waiting = [asyncio.create_task(engine.generate(make_request(n))) for n in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(EngineDead):
        await engine.generate(make_request(2))
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDead, EngineDead]


@pytest.mark.parametrize(
    ("fault", "text", "finish"),
    [
        ("cut_short", "e2", Finish.LENGTH),
        ("garbage", "I would rather not say.", Finish.STOP),
        ("empty", "", Finish.STOP),
        ("illegal", "a1a1", Finish.STOP),
    ],
)
async def test_a_bad_answer_is_given(
    make_request: MakeRequest, fault: str, text: str, finish: Finish
) -> None:
    engine = scripted(faults=[{"kind": fault, "probability": 1.0}])
    reply = await engine.generate(make_request(choices=("e2e4",)))
    assert (reply.text, reply.finish) == (text, finish)


async def test_slow_is_ten_times_the_latency(make_request: MakeRequest) -> None:
    engine = scripted(latency_seconds=0.002, slow_seconds=0, faults=[{"kind": "slow", "at": [0]}])
    begun = time.monotonic()
    await engine.generate(make_request())
    assert time.monotonic() - begun >= 0.02


async def test_chance_is_a_function_of_the_request(make_request: MakeRequest) -> None:
    async def refused() -> list[int]:
        engine = scripted(faults=[{"kind": "overload", "probability": 0.3}])
        numbers = []
        for n in range(60):
            try:
                await engine.generate(make_request(n))
            except Overloaded:
                numbers.append(n)
        return numbers

    first = await refused()
    assert first == await refused()
    assert 5 < len(first) < 35


async def test_a_free_answer_is_one_of_the_replies(make_request: MakeRequest) -> None:
    engine = scripted(replies=["MOVE: e2e4", "I think.\nMOVE: d2d4"])
    asked = [make_request(n, seed=n, choices=None, max_tokens=64) for n in range(20)]
    texts = {(await engine.generate(one)).text for one in asked}
    assert texts == {"MOVE: e2e4", "I think.\nMOVE: d2d4"}


async def test_a_free_answer_ends_at_its_bound_or_before_a_stop(make_request: MakeRequest) -> None:
    engine = scripted(replies=["Knights first.</think>\nMOVE: e2e4"])
    cut = await engine.generate(make_request(0, choices=None, max_tokens=7))
    assert (cut.text, cut.finish) == ("Knights", Finish.LENGTH)
    asked = make_request(1, choices=None, max_tokens=64)
    stopped = await engine.generate(replace(asked, stop=("</think>",)))
    assert (stopped.text, stopped.finish) == ("Knights first.", Finish.STOP)


async def test_the_deadline_passes_as_a_stall(make_request: MakeRequest) -> None:
    with pytest.raises(EngineStalled, match=r"in 0.005 s"):
        await scripted(latency_seconds=60.0).generate(make_request(deadline_s=0.005))


async def test_a_prompt_beyond_the_context_is_rejected(make_request: MakeRequest) -> None:
    with pytest.raises(RequestRejected, match="context_tokens = 64"):
        await scripted(context_tokens=64).generate(make_request())


async def test_cancelling_leaves_nothing_behind(make_request: MakeRequest) -> None:
    engine = scripted(latency_seconds=60.0)
    task = asyncio.create_task(engine.generate(make_request()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (engine._running, len(engine._sleepers)) == (0, 0)


async def test_usage_counts_whole_shared_blocks(make_request: MakeRequest) -> None:
    engine = scripted()
    ids = tuple(range(100))
    first = await engine.generate(make_request(ids=ids))
    grown = await engine.generate(make_request(ids=(*ids, 7, 7, 7)))
    other = await engine.generate(make_request(ids=(*ids[:70], 9, 9), match_id="other"))
    assert [reply.usage.cached for reply in (first, grown, other)] == [0, 96, 64]
    assert first.usage.prompt == 100
    assert first.usage.completion == 5
    assert await engine.reset_prefix_cache()
    assert (await engine.generate(make_request(ids=ids))).usage.cached == 0


def test_a_prompt_is_never_wholly_cached() -> None:
    model = PrefixModel(32)
    ids = array("i", range(64))
    assert [model.cached("m", ids) for _ in range(2)] == [0, 32]


async def test_snapshots_are_labelled_as_samples_and_end_at_close(
    make_request: MakeRequest,
) -> None:
    engine = scripted()
    await engine.generate(make_request())
    seen: list[EngineSnapshot] = []

    async def collect() -> None:
        async for snapshot in engine.snapshots():
            seen.append(snapshot)
            await engine.close()

    await asyncio.wait_for(collect(), 1.0)
    assert {(one.source, one.step_requests, one.prefix_queries) for one in seen} == {
        ("sampled", None, 100)
    }
    with pytest.raises(EngineDead):
        await engine.generate(make_request())


async def test_the_last_snapshot_counts_the_last_rejections(make_request: MakeRequest) -> None:
    engine = scripted(faults=[{"kind": "overload", "at": [0]}])
    assert engine.is_ready
    snapshots = engine.snapshots()
    first = await anext(snapshots)
    with pytest.raises(Overloaded):
        await engine.generate(make_request())
    await engine.close()
    rest = [snapshot async for snapshot in snapshots]
    assert [first.rejected, *(one.rejected for one in rest)] == [0, 1]


@pytest.mark.timeout(240)
async def test_it_renders_with_the_real_tokenizer(template: ModelTemplate, tmp_path: Path) -> None:
    config = parse_engine_config("s", {"kind": "scripted"})
    engine = build_engine("s", config, log_dir=tmp_path, stall_seconds=1, restart_limit=0)
    await engine.open()
    assert isinstance(engine.template, ModelTemplate)
    assert engine.template.vocabulary_size == template.vocabulary_size
    await engine.close()
