"""The limit around an engine: order, refusal, and permits that survive cancellation."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from serving import (
    EngineLimits,
    EngineSnapshot,
    EngineStalled,
    Finish,
    Limited,
    ModelTemplate,
    Overloaded,
    Prompt,
    Reply,
    Request,
    Timings,
    Usage,
)

MakeRequest = Callable[..., Request]


class GatedEngine:
    """Answers a request when the test opens its gate."""

    name = "gated"
    kind = "test"
    version = "1"
    restarts = 0
    limits = EngineLimits(context_tokens=100, max_concurrent=2, max_queued=2)

    def __init__(self) -> None:
        self.is_ready = True
        self.gates: dict[str, asyncio.Future[None]] = {}
        self.order: list[str] = []

    @property
    def template(self) -> ModelTemplate:
        raise NotImplementedError

    async def open(self) -> None: ...

    async def generate(self, request: Request) -> Reply:
        gate = self.gates[request.id] = asyncio.get_running_loop().create_future()
        self.order.append(request.id)
        await gate
        timings = Timings(5.0, 5.0, None, 6.0, None, None, None)
        return Reply("e2e4", Finish.STOP, Usage(1, 1, None), timings)

    async def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        yield EngineSnapshot(at=0.0, source="sampled")
        yield EngineSnapshot(at=1.0, source="sampled", waiting=5, rejected=4)

    async def prime(self, prompt: Prompt) -> None: ...

    async def reset_prefix_cache(self) -> bool:
        return True

    async def close(self) -> None: ...


class MeasuredEngine(GatedEngine):
    """Has metrics of its own."""

    async def metrics(self) -> str:
        return "vllm:num_requests_running 2.0\n"


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_pass_in_order_and_the_one_too_many_is_refused(
    make_request: MakeRequest,
) -> None:
    engine = GatedEngine()
    limited = Limited(engine)
    tasks = [asyncio.create_task(limited.generate(make_request(n))) for n in range(4)]
    await turn()
    assert engine.order == ["m/0/0/0", "m/1/0/0"]
    with pytest.raises(Overloaded, match="2 requests inside and 2 waiting"):
        await limited.generate(make_request(4))
    engine.gates["m/1/0/0"].set_result(None)
    await turn()
    assert engine.order == ["m/0/0/0", "m/1/0/0", "m/2/0/0"]
    engine.gates["m/0/0/0"].set_result(None)
    await turn()
    engine.gates["m/2/0/0"].set_result(None)
    engine.gates["m/3/0/0"].set_result(None)
    replies = await asyncio.gather(*tasks)
    assert [reply.text for reply in replies] == ["e2e4"] * 4
    assert all(reply.timings.submitted != 5.0 for reply in replies)
    assert all(reply.timings.admitted == 5.0 for reply in replies)


async def test_a_cancelled_waiter_gives_its_place_up(make_request: MakeRequest) -> None:
    engine = GatedEngine()
    limited = Limited(engine)
    tasks = [asyncio.create_task(limited.generate(make_request(n))) for n in range(4)]
    await turn()
    tasks[2].cancel()
    engine.gates["m/0/0/0"].set_result(None)
    await turn()
    assert engine.order[-1] == "m/3/0/0"
    assert tasks[2].cancelled()
    for name in ("m/1/0/0", "m/3/0/0"):
        engine.gates[name].set_result(None)
    await asyncio.gather(tasks[1], tasks[3])
    await both_permits_are_free(limited, engine, make_request)


async def test_a_permit_handed_to_a_waiter_that_is_cancelled_at_once_is_not_lost(
    make_request: MakeRequest,
) -> None:
    engine = GatedEngine()
    limited = Limited(engine)
    tasks = [asyncio.create_task(limited.generate(make_request(n))) for n in range(3)]
    await turn()
    engine.gates["m/0/0/0"].set_result(None)
    await asyncio.sleep(0)
    tasks[2].cancel()
    await turn()
    engine.gates["m/1/0/0"].set_result(None)
    await asyncio.gather(tasks[0], tasks[1])
    await asyncio.gather(tasks[2], return_exceptions=True)
    await both_permits_are_free(limited, engine, make_request)


async def test_an_engine_error_frees_the_permit(make_request: MakeRequest) -> None:
    engine = GatedEngine()
    limited = Limited(engine)
    task = asyncio.create_task(limited.generate(make_request(0)))
    await turn()
    engine.gates["m/0/0/0"].set_exception(EngineStalled("frozen"))
    with pytest.raises(EngineStalled):
        await task
    await both_permits_are_free(limited, engine, make_request)


async def test_refusals_and_the_own_queue_are_folded_into_snapshots(
    make_request: MakeRequest,
) -> None:
    engine = GatedEngine()
    limited = Limited(engine)
    tasks = [asyncio.create_task(limited.generate(make_request(n))) for n in range(4)]
    await turn()
    for _ in range(3):
        with pytest.raises(Overloaded):
            await limited.generate(make_request(9))
    seen = [(one.waiting, one.rejected) async for one in limited.snapshots()]
    assert seen == [(2, 3), (7, 7)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_metrics_are_the_engines_and_empty_where_it_has_none() -> None:
    assert await Limited(MeasuredEngine()).metrics() == "vllm:num_requests_running 2.0\n"
    assert await Limited(GatedEngine()).metrics() == ""


async def test_readiness_is_the_engines_and_unsaid_counts_as_ready() -> None:
    engine = GatedEngine()
    limited = Limited(engine)
    said = [limited.is_ready]
    engine.is_ready = False
    said.append(limited.is_ready)
    del engine.is_ready
    said.append(limited.is_ready)
    assert said == [True, False, True]


async def both_permits_are_free(
    limited: Limited, engine: GatedEngine, make_request: MakeRequest
) -> None:
    tasks = [asyncio.create_task(limited.generate(make_request(n))) for n in (20, 21)]
    await turn()
    assert engine.order[-2:] == ["m/20/0/0", "m/21/0/0"]
    for name in engine.order[-2:]:
        engine.gates[name].set_result(None)
    await asyncio.gather(*tasks)
