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
from serving.adaptive import Why
from tests.serving.simulated import in_virtual_time, now

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
        self.is_full = False
        self.gates: dict[str, asyncio.Future[None]] = {}
        self.order: list[str] = []

    @property
    def template(self) -> ModelTemplate:
        raise NotImplementedError

    async def open(self) -> None: ...

    async def generate(self, request: Request) -> Reply:
        if self.is_full:
            raise Overloaded("full of others' requests")
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


class TwinEngine(GatedEngine):
    """Two replicas in turn, each of which refused what it refused."""

    async def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        for at, (replica, rejected) in enumerate((("a", 1), ("b", 0), ("a", 1), ("b", 2))):
            yield EngineSnapshot(
                float(at), "sampled", waiting=0, rejected=rejected, replica=replica
            )


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


async def test_each_refusal_is_in_the_total_of_one_replica(make_request: MakeRequest) -> None:
    """Ours were in the totals of all, and counted once for each."""
    limited = Limited(TwinEngine())
    tasks = [asyncio.create_task(limited.generate(make_request(n))) for n in range(4)]
    await turn()
    told: dict[str | None, int | None] = {}
    async for one in limited.snapshots():
        assert is_refused_at_once(limited, make_request(9))
        assert one.waiting == 2
        told[one.replica] = one.rejected
    # refused while the first three were told, and not told yet after the fourth
    assert told == {"a": 1 + 1, "b": 2 + 2}
    await end(*tasks)


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


async def test_whoever_finds_the_queue_full_is_refused_without_a_turn_of_the_loop(
    make_request: MakeRequest,
) -> None:
    limited = Limited(GatedEngine())
    tasks = [asyncio.create_task(limited.generate(make_request(n))) for n in range(4)]
    await turn()
    assert is_refused_at_once(limited, make_request(4))
    await end(*tasks)


async def test_whoever_exceeds_the_adaptive_cap_is_refused_without_a_turn_of_the_loop(
    make_request: MakeRequest,
) -> None:
    limited = Limited(GatedEngine(), slo_s=60.0)
    task = asyncio.create_task(limited.generate(make_request(0)))
    await turn()
    with pytest.raises(Overloaded, match=r"gated: 1 requests unfinished, .* within 60 s"):
        await limited.generate(make_request(1))
    assert is_refused_at_once(limited, make_request(2))
    assert [one.rejected async for one in limited.snapshots()] == [2, 6]
    await end(task)
    assert limited.admission_history == [], "nothing was answered, so nothing is known"


def test_the_adaptive_cap_grows_by_answers_and_falls_by_the_engines_refusal(
    make_request: MakeRequest,
) -> None:
    async def play() -> None:
        limited, engine = await warm(make_request)
        assert [change.cap for change in limited.admission_history] == [2, 4]
        engine.is_full = True
        with pytest.raises(Overloaded, match="full of others"):
            await limited.generate(make_request(100))
        fall = limited.admission_history[-1]
        assert (fall.at, fall.cap, fall.why) == (now(), 2, Why.REFUSED)

    in_virtual_time(play())


def test_one_that_waits_is_refused_as_soon_as_it_cannot_be_in_time(
    make_request: MakeRequest,
) -> None:
    """The engine hangs, and an answer takes 0.2 s: after 0.8 s of waiting it is in vain."""

    async def play() -> None:
        limited, engine = await warm(make_request)
        begun = now()
        tasks = [asyncio.create_task(limited.generate(make_request(100 + n))) for n in range(4)]
        for waiting in tasks[2:]:
            with pytest.raises(Overloaded, match="too late"):
                await waiting
        assert now() - begun == pytest.approx(0.8)
        assert engine.order[-2:] == ["m/100/0/0", "m/101/0/0"]
        assert [(one.waiting, one.rejected) async for one in limited.snapshots()] == [
            (0, 2),
            (5, 6),
        ]
        await end(*tasks)
        await both_permits_are_free(limited, engine, make_request)

    in_virtual_time(play())


def test_one_that_waits_is_refused_when_the_rate_is_found_to_have_fallen(
    make_request: MakeRequest,
) -> None:
    """An answer that comes after 0.7 s ends a second of few answers: whoever is next goes in, and
    the one behind, who could wait for another 0.1 s, is refused there and then."""

    async def play() -> None:
        limited, engine = await warm(make_request)
        tasks = [asyncio.create_task(limited.generate(make_request(100 + n))) for n in range(4)]
        await asyncio.sleep(0.7)
        assert not tasks[3].done()
        engine.gates["m/100/0/0"].set_result(None)
        answered = now()
        with pytest.raises(Overloaded, match="too late"):
            await tasks[3]
        assert now() == answered
        assert engine.order[-1] == "m/102/0/0"
        await end(*tasks)

    in_virtual_time(play())


def test_a_waiter_that_is_cancelled_as_it_is_refused_frees_no_permit_of_others(
    make_request: MakeRequest,
) -> None:
    async def play() -> None:
        limited, engine = await warm(make_request)
        tasks = [asyncio.create_task(limited.generate(make_request(100 + n))) for n in range(3)]
        await turn()
        asyncio.get_running_loop().call_later(0.8 + 1e-12, tasks[2].cancel)
        await asyncio.wait([tasks[2]])
        assert tasks[2].cancelled()
        assert [one.rejected async for one in limited.snapshots()] == [1, 5], "and refused"
        late = asyncio.create_task(limited.generate(make_request(103)))
        await turn()
        assert engine.order[-1] == "m/101/0/0", "two are inside, as many as may be"
        await end(*tasks, late)

    in_virtual_time(play())


async def warm(make_request: MakeRequest) -> tuple[Limited, GatedEngine]:
    """Held to 1 s, with a cap of 4 unfinished requests after 1.4 s of answers that took 0.2 s."""
    engine = GatedEngine()
    limited = Limited(engine, slo_s=1.0, clock=now)
    numbers = iter(range(100))
    for together in (1, 2, 2, 2, 2, 2, 2):
        asked = [make_request(next(numbers)) for _ in range(together)]
        tasks = [asyncio.create_task(limited.generate(one)) for one in asked]
        await asyncio.sleep(0.2)
        for one in asked:
            engine.gates[one.id].set_result(None)
        await asyncio.gather(*tasks)
    return limited, engine


def is_refused_at_once(limited: Limited, request: Request) -> bool:
    """Whether the call raises before it first hands the loop over."""
    with pytest.raises(Overloaded):
        limited.generate(request).send(None)
    return True


async def end(*tasks: asyncio.Task[Reply]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def both_permits_are_free(
    limited: Limited, engine: GatedEngine, make_request: MakeRequest
) -> None:
    tasks = [asyncio.create_task(limited.generate(make_request(n))) for n in (20, 21)]
    await turn()
    assert engine.order[-2:] == ["m/20/0/0", "m/21/0/0"]
    for name in engine.order[-2:]:
        engine.gates[name].set_result(None)
    await asyncio.gather(*tasks)
