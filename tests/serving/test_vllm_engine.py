"""The engine around its host: faults, restarts, deadlines. The host here has no vLLM in it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import structlog

from serving import (
    EngineDead,
    EngineError,
    EngineSnapshot,
    EngineStalled,
    EngineStart,
    EngineUnavailable,
    Finish,
    ModelTemplate,
    Overloaded,
    Request,
    RequestRejected,
    VllmConfig,
    VllmEngine,
)
from serving.engine import HasMetrics
from serving.process import group_members
from serving.vllm_engine import _Telemetry
from serving.vllm_wire import Step
from tests.serving.hosted import launching

pytestmark = pytest.mark.timeout(240)

MakeRequest = Callable[..., Request]
Launch = Callable[..., "asyncio.Future[VllmEngine]"]
FAKE = str(Path(__file__).with_name("fake_host.py"))


@pytest.fixture
async def launch(template: ModelTemplate, tmp_path: Path) -> AsyncIterator[Launch]:
    """Opens engines over a fake host; closes them and sees that nothing is left."""
    del template

    def make(*, stall_seconds: float = 30.0, restarts: int = 1) -> VllmEngine:
        return VllmEngine(EngineStart("main", tmp_path, stall_seconds, restarts), VllmConfig())

    async with launching(FAKE, tmp_path, make) as launch:
        yield launch


async def test_a_reply_carries_the_engines_figures(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("answer")
    assert engine.version == "9.9"
    reply = await engine.generate(make_request())
    assert (reply.text, reply.finish) == ("e2e4", Finish.STOP)
    assert (reply.usage.prompt, reply.usage.completion, reply.usage.cached) == (100, 5, 32)
    timings = reply.timings
    assert (timings.queue_s, timings.prefill_s, timings.decode_s) == (0.25, 0.5, 0.75)
    assert timings.submitted == timings.admitted <= timings.done
    assert timings.first_token is None
    assert reply.step_requests_mean == 2.0
    streamed = await engine.generate(make_request(stream=True))
    assert streamed.timings.first_token is not None
    assert await engine.reset_prefix_cache()


async def test_metrics_are_the_hosts_and_callers_at_one_time_share_a_question(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("answer")
    assert isinstance(engine, HasMetrics)
    first = await asyncio.gather(*(engine.metrics() for _ in range(3)))
    assert first == ["n 1\n"] * 3
    assert await engine.metrics() == "n 2\n"
    await engine.generate(make_request())
    await engine.close()
    assert await engine.metrics() == ""


async def test_metrics_are_empty_where_the_host_does_not_answer(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.vllm_engine._METRICS_S", 0.05)
    engine = await launch("hang")
    assert await engine.metrics() == ""
    assert not engine._scraped


async def test_metrics_are_empty_at_once_when_the_host_ends_or_is_down(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.vllm_engine._METRICS_S", 60.0)
    engine = await launch("die", restarts=0)
    assert await engine.metrics() == ""
    assert await engine.metrics() == ""


async def test_a_cancelled_scrape_leaves_the_others_theirs(launch: Launch) -> None:
    engine = await launch("answer")
    scrapes = [asyncio.create_task(engine.metrics()) for _ in range(2)]
    await asyncio.sleep(0)
    scrapes[0].cancel()
    assert await scrapes[1] == "n 1\n"


async def test_snapshots_are_per_step_with_running_totals_and_end_at_close(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("answer")
    for number in range(3):
        await engine.generate(make_request(number))
    await engine.close()
    seen: list[EngineSnapshot] = [snapshot async for snapshot in engine.snapshots()]
    assert [one.prefix_queries for one in seen] == [100, 200, 300]
    assert [one.prefix_hits for one in seen] == [64, 128, 192]
    assert {(one.source, one.step_requests, one.step_tokens) for one in seen} == {
        ("per_step", 2, 7)
    }


async def test_steps_read_in_one_turn_keep_their_order_and_none_is_lost_at_the_close() -> None:
    telemetry = _Telemetry()

    async def collect() -> list[EngineSnapshot]:
        return [snapshot async for snapshot in telemetry.snapshots()]

    collecting = asyncio.create_task(collect())
    await asyncio.sleep(0)
    for ages in ((0.08, 0.01), (0.1, 0.05, 0.0)):
        telemetry.add(50.0, [Step(age, 2, 7, 2, 1, 0.25, 100, 64, 0) for age in ages])
    telemetry.close()
    seen = await collecting
    assert [one.at for one in seen] == [49.92, 49.99, 49.99, 49.99, 50.0]
    assert seen[-1].prefix_queries == 500


async def test_death_fails_what_is_in_flight_and_the_next_start_goes_on(
    launch: Launch, make_request: MakeRequest, tmp_path: Path
) -> None:
    engine = await launch(f"die_once:{tmp_path / 'died'}")
    first_group = engine.pgid
    ready = [engine.is_ready]
    with pytest.raises(EngineDead) as caught:
        await engine.generate(make_request(0))
    assert not caught.value.final
    ready.append(engine.is_ready)
    reply = await engine.generate(make_request(1))
    assert reply.text == "e2e4"
    ready.append(engine.is_ready)
    assert ready == [True, False, True]
    assert engine.restarts == 1
    assert first_group is not None
    assert group_members(first_group) == []


@pytest.mark.parametrize("behaviour", ["die", "dead"])
async def test_after_the_last_restart_death_is_final(
    launch: Launch, make_request: MakeRequest, behaviour: str
) -> None:
    engine = await launch(behaviour, restarts=1)
    ends: list[bool] = []
    assert engine.is_ready
    for number in range(4):
        with pytest.raises(EngineDead) as caught:
            await engine.generate(make_request(number))
        ends.append(caught.value.final)
    assert ends == [False, False, True, True]
    assert engine.restarts == 1
    assert engine.is_ready, "nothing is being started any more"


async def test_a_host_that_does_not_start_says_why(launch: Launch) -> None:
    with pytest.raises(
        EngineDead, match="did not start: RuntimeError: no memory for 7 b"
    ) as caught:
        await launch("crash")
    assert caught.value.final
    assert "engine-main.log" in str(caught.value)


async def test_silence_with_work_unfinished_is_a_stall(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("hang", stall_seconds=0.3)
    await asyncio.sleep(0.5)
    assert engine.restarts == 0, "idle is no stall"
    results = await asyncio.gather(
        *(engine.generate(make_request(number)) for number in range(3)), return_exceptions=True
    )
    assert [type(result) for result in results] == [EngineStalled] * 3
    assert "3 requests unfinished" in str(results[0])


@pytest.mark.parametrize("target", ["group", "host"])
async def test_a_stopped_process_is_a_stall(
    launch: Launch, make_request: MakeRequest, target: str
) -> None:
    engine = await launch("drip", stall_seconds=0.5)
    assert engine.pgid is not None
    asking = asyncio.create_task(engine.generate(make_request()))
    await asyncio.sleep(0.7)
    assert not asking.done()
    (os.killpg if target == "group" else os.kill)(engine.pgid, signal.SIGSTOP)
    with pytest.raises(EngineStalled):
        await asking


async def test_a_free_answer_cut_by_its_deadline_keeps_its_text(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("drip")
    reply = await engine.generate(make_request(choices=None, deadline_s=1.0))
    assert (reply.text, reply.finish, reply.usage.completion) == ("I thi", Finish.DEADLINE, 3)


async def test_time_in_the_engines_own_queue_costs_no_player_the_game(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("drip:0.4")
    with pytest.raises(EngineStalled, match=r"not answered in 1 s"):
        await engine.generate(make_request(choices=None, deadline_s=1.0))
    assert engine.restarts == 0


async def test_an_answer_that_the_engine_cut_short_costs_no_player_the_game(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("cut_short")
    with pytest.raises(EngineUnavailable, match=r"engine main: .* after 3 of 6 tokens"):
        await engine.generate(make_request(choices=None))
    reply = await engine.generate(make_request(choices=None, max_tokens=3))
    assert (reply.text, reply.finish) == ("MOVE:", Finish.LENGTH)


@pytest.mark.parametrize(
    ("behaviour", "choices"),
    [("drip", ("e2e4",)), ("freeze", None), ("freeze", ("e2e4",)), ("pause:0.7", None)],
)
async def test_a_deadline_is_the_engines_fault_otherwise(
    launch: Launch, make_request: MakeRequest, behaviour: str, choices: tuple[str, ...] | None
) -> None:
    engine = await launch(behaviour)
    with pytest.raises(EngineStalled, match=r"not answered in 1 s"):
        await engine.generate(make_request(choices=choices, deadline_s=1.0))
    assert engine.restarts == 0


async def test_a_deadline_that_the_host_ignores_is_a_stall(
    launch: Launch, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.vllm_engine._EXPIRE_S", 0.1)
    engine = await launch("hang")
    with pytest.raises(EngineStalled):
        await engine.generate(make_request(deadline_s=0.1))


async def test_errors_are_mapped(launch: Launch, make_request: MakeRequest) -> None:
    engine = await launch("refuse")
    kinds: list[type[EngineError]] = []
    for number in range(3):
        with pytest.raises(EngineError, match="on purpose") as caught:
            await engine.generate(make_request(number))
        kinds.append(type(caught.value))
    assert kinds == [Overloaded, RequestRejected, EngineUnavailable]


async def test_cancelling_aborts_in_the_engine(
    launch: Launch, make_request: MakeRequest, tmp_path: Path
) -> None:
    engine = await launch("hang")
    asking = asyncio.create_task(engine.generate(make_request()))
    await asyncio.sleep(0.1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    log = tmp_path / "engine-main.log"
    async with asyncio.timeout(5):
        while "aborted 1" not in log.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert not engine._pending


async def test_closing_while_it_starts_leaves_nothing(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("die", restarts=5)
    with pytest.raises(EngineDead):
        await engine.generate(make_request())
    waiting = asyncio.create_task(engine.generate(make_request(1)))
    await asyncio.sleep(0.05)
    await engine.close()
    with pytest.raises(EngineDead, match="closed"):
        await waiting


async def test_a_process_that_cannot_be_ended_does_not_hold_the_close_up(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await launch("answer")
    host = engine._keeper.host
    assert host is not None
    monkeypatch.setattr("serving.engine_group._REAP_LIMIT_S", 0.01)
    monkeypatch.setattr(host._group._process, "wait", asyncio.Event().wait)
    with structlog.testing.capture_logs() as logs:
        await engine.close()
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == [
        "engine.not_ended"
    ]
    record = tmp_path / "engine-main.pid"
    assert record.exists(), "a later run may end it"
    record.unlink()
