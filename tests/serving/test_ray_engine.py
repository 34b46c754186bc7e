"""The engine of replicas around its host: faults, restarts, deadlines. The host has no Ray here."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import structlog

from serving import (
    EngineDead,
    EngineError,
    EngineStalled,
    EngineStart,
    EngineUnavailable,
    Finish,
    MalformedReply,
    ModelTemplate,
    Overloaded,
    Request,
    RequestRejected,
    Sampling,
    ScriptedConfig,
    TokenPrompt,
)
from serving.process import group_members
from serving.ray_config import RayConfig
from serving.ray_engine import RayEngine
from serving.ray_wire import VERSION
from tests.serving.hosted import launching

pytestmark = pytest.mark.timeout(240)

MakeRequest = Callable[..., Request]
Launch = Callable[..., "asyncio.Future[RayEngine]"]
FAKE = str(Path(__file__).with_name("fake_ray_host.py"))
ELSEWHERE = "10.0.0.1:6379"


def config_of(**knobs: object) -> RayConfig:
    return RayConfig.model_validate({"engine": ScriptedConfig(max_queued=3), **knobs})


@pytest.fixture
async def launch(template: ModelTemplate, tmp_path: Path) -> AsyncIterator[Launch]:
    """Opens engines over a fake host; closes them and sees that nothing is left."""
    del template

    def make(*, restarts: int = 1, stall: float = 30.0, **knobs: object) -> RayEngine:
        return RayEngine(EngineStart("main", tmp_path, stall, restarts), config_of(**knobs))

    async with launching(FAKE, tmp_path, make) as launch:
        yield launch


async def read_until(log_dir: Path, words: str) -> None:
    log = log_dir / "engine-main.log"
    async with asyncio.timeout(10):
        while words not in log.read_text():  # noqa: ASYNC110  # another process writes
            await asyncio.sleep(0.01)


async def test_a_reply_carries_the_replicas_name_and_figures(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("answer")
    assert engine.version == "9.9, ray 0.0"
    assert engine.is_ready
    reply = await engine.generate(make_request())
    assert (reply.text, reply.finish, reply.replica) == ("e2e4", Finish.STOP, "r1")
    assert (reply.usage.prompt, reply.usage.completion, reply.usage.cached) == (100, 5, 32)
    timings = reply.timings
    assert (timings.queue_s, timings.prefill_s, timings.decode_s) == (0.25, 0.5, 0.75)
    assert timings.submitted == timings.admitted
    assert timings.first_token == timings.done > timings.admitted
    assert reply.step_requests_mean == 2.0
    assert (await engine.generate(make_request(1))).replica == "r2"
    assert not engine._pending


async def test_a_host_that_tells_nothing_is_ended_and_another_takes_its_place(
    launch: Launch, make_request: MakeRequest, tmp_path: Path
) -> None:
    """A frozen one was waited for until each request's deadline, and never replaced."""
    engine = await launch(f"freeze_once:{tmp_path / 'marker'}", stall=0.5)
    frozen = engine.pgid
    with pytest.raises(EngineStalled, match="process that speaks to Ray told nothing for"):
        await engine.generate(make_request())
    assert (await engine.generate(make_request(1))).text == "e2e4"
    assert engine.pgid != frozen
    assert engine.restarts == 1


async def test_a_host_that_only_has_nothing_to_do_is_left_alone(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("answer", stall=0.5)
    await asyncio.sleep(1.2)
    assert (await engine.generate(make_request())).text == "e2e4"
    assert engine.restarts == 0


def test_a_queue_before_the_deadline_is_waited_for() -> None:
    """A question that had waited at its replica was given up while it was being answered."""
    hosted = ScriptedConfig(max_concurrent=2, max_queued=5)
    engine = RayEngine(EngineStart("main", Path(), 30.0, 1), config_of(engine=hosted))
    request = Request("m/0/0/0", "m", TokenPrompt((1,)), None, 8, Sampling(), 10.0)
    assert engine._most_s(request) == (1 + 3) * 10.0 + 5.0


def test_two_engines_of_one_run_are_deployed_apart(tmp_path: Path) -> None:
    """Names that differ in a letter which Ray does not take had one deployment between them."""
    names = ("a_b", "a.b", "a-b")
    engines = [RayEngine(EngineStart(name, tmp_path, 30.0, 1), config_of()) for name in names]
    assert len({engine._app for engine in engines}) == 3


def test_replicas_that_speak_otherwise_are_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = RayEngine(EngineStart("main", tmp_path, 30.0, 1), config_of())
    before = engine._app
    assert engine._app == before
    monkeypatch.setattr("serving.ray_engine.VERSION", VERSION + 1)
    assert engine._app != before


async def test_limits_are_those_of_all_replicas_together(launch: Launch) -> None:
    engine = await launch("answer", replicas=3)
    limits = engine.limits
    assert (limits.context_tokens, limits.max_concurrent, limits.max_queued) == (2048, 48, 9)


async def test_snapshots_carry_names_and_end_at_close(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("answer")
    for number in range(3):
        await engine.generate(make_request(number))
    await engine.close()
    seen = [snapshot async for snapshot in engine.snapshots()]
    assert [(one.replica, one.prefix_queries) for one in seen] == [
        ("r1", 100),
        ("r2", 200),
        ("r1", 300),
    ]
    assert {(one.source, one.step_requests, one.step_tokens) for one in seen} == {
        ("per_step", 2, 7)
    }


async def test_nodes_are_those_of_replicas_that_serve(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("lose_one")
    assert engine.nodes == {"r1": "", "r2": ""}, "none was looked at yet"
    with pytest.raises(EngineDead):
        await engine.generate(make_request(0))
    await engine.generate(make_request(1))
    assert engine.nodes == {"r2": "10.0.0.2"}


async def test_errors_are_mapped_and_none_is_final(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("refuse")
    kinds: list[type[EngineError]] = []
    for number in range(7):
        with pytest.raises(EngineError, match=r"engine main: replica r1: .*on purpose") as caught:
            await engine.generate(make_request(number))
        kinds.append(type(caught.value))
        assert not getattr(caught.value, "final", False)
    assert kinds == [
        Overloaded,
        RequestRejected,
        EngineUnavailable,
        MalformedReply,
        EngineStalled,
        EngineDead,
        EngineUnavailable,
    ]
    assert engine.restarts == 0


async def test_matches_of_a_replica_that_ends_go_on_at_another(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("lose_one")
    with pytest.raises(EngineDead, match="replica r1 ended") as caught:
        await engine.generate(make_request(0))
    assert not caught.value.final
    assert (await engine.generate(make_request(1))).replica == "r2"
    assert (engine.is_ready, engine.restarts) == (True, 0), "none has taken its place"
    await engine.generate(make_request(2))
    assert engine.restarts == 1
    assert list(engine.nodes) == ["r2", "r3"]


async def test_replicas_that_ray_takes_away_again_are_no_restarts(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("lose_one", max_replicas=4)
    with pytest.raises(EngineDead):
        await engine.generate(make_request(0))
    for number in (1, 2):
        await engine.generate(make_request(number))
    assert engine.restarts == 0


async def test_requests_wait_while_there_is_no_replica(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("lonely")
    kept = asyncio.create_task(engine.generate(make_request(0)))
    await asyncio.sleep(0)
    with pytest.raises(EngineDead, match="replica r2 ended"):
        await engine.generate(make_request(1))
    assert not engine.is_ready
    waiting = asyncio.create_task(engine.generate(make_request(2)))
    await asyncio.sleep(0)
    assert len(engine._pending) == 1, "only the first is at the host"
    kept.cancel()
    reply = await waiting
    assert (reply.text, reply.replica, engine.is_ready) == ("e2e4", "r3", True)
    assert engine.restarts == 1


async def test_a_host_whose_replicas_do_not_come_back_is_started_again(
    launch: Launch, make_request: MakeRequest, tmp_path: Path
) -> None:
    engine = await launch(f"lonely_once:{tmp_path / 'lonely'}", start_seconds=60.0)
    first_group = engine.pgid
    assert first_group is not None
    with pytest.raises(EngineDead, match="replica r2 ended"):
        await engine.generate(make_request(0))
    waiting = asyncio.create_task(engine.generate(make_request(1)))
    alone = engine._left_alone
    assert alone is not None
    assert 0 < alone.when() - asyncio.get_running_loop().time() <= 60
    with structlog.testing.capture_logs() as logs:
        engine._end_alone(60.0)
        assert (await waiting).replica == "r1"
    failed = [entry["reason"] for entry in logs if entry["event"] == "engine.failed"]
    assert failed == ["engine main: no replica came back in 60 s"]
    assert engine.restarts == 1, "the host, with all of its replicas"
    assert alone.cancelled(), "it was of the first host"
    assert group_members(first_group) == []


async def test_replicas_lost_before_the_host_was_ready_are_waited_for_no_longer() -> None:
    """The time began to run only where the host was ready, so the wait had no end."""
    engine = RayEngine(EngineStart("main", Path(), 30.0, 1), config_of())
    engine._take("replicas", [["r1"]])
    engine._take("replicas", [[]])
    alone = engine._left_alone
    assert alone is not None
    await engine.close()
    assert alone.cancelled()


async def test_death_of_the_host_fails_what_is_in_flight_and_the_next_start_goes_on(
    launch: Launch, make_request: MakeRequest, tmp_path: Path
) -> None:
    engine = await launch(f"die_once:{tmp_path / 'died'}")
    first_group = engine.pgid
    assert first_group is not None
    ready = [engine.is_ready]
    with pytest.raises(EngineDead) as caught:
        await engine.generate(make_request(0))
    assert not caught.value.final
    ready.append(engine.is_ready)
    assert (await engine.generate(make_request(1))).text == "e2e4"
    ready.append(engine.is_ready)
    assert ready == [True, False, True]
    assert engine.restarts == 1
    assert group_members(first_group) == []
    apps = [line for line in (tmp_path / "engine-main.log").read_text().splitlines() if line]
    assert len(apps) == 2
    assert len(set(apps)) == 1, "what was deployed is taken over by its name"


async def test_after_the_last_restart_death_is_final(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("die", restarts=1)
    ends: list[bool] = []
    for number in range(4):
        with pytest.raises(EngineDead) as caught:
            await engine.generate(make_request(number))
        ends.append(caught.value.final)
    assert ends == [False, False, True, True]
    assert engine.restarts == 1
    assert engine.is_ready, "nothing is being started any more"


async def test_a_host_that_does_not_start_says_why(launch: Launch) -> None:
    with pytest.raises(EngineDead, match="did not start: RuntimeError: no node has 7 G") as caught:
        await launch("crash")
    assert caught.value.final
    assert "engine-main.log" in str(caught.value)


async def test_cancelling_aborts_at_the_host(
    launch: Launch, make_request: MakeRequest, tmp_path: Path
) -> None:
    engine = await launch("hang")
    asking = asyncio.create_task(engine.generate(make_request()))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await read_until(tmp_path, "aborted 1")
    assert not engine._pending


async def test_a_deadline_that_no_replica_keeps_is_a_stall(
    launch: Launch, make_request: MakeRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.ray_engine._ANSWER_S", 0.01)
    engine = await launch("hang")
    # the replica's queue of 3 is shorter than its batch: one deadline to wait there, one to answer
    with pytest.raises(EngineStalled, match=r"m/0/0/0 was not answered in 0\.03 s"):
        await engine.generate(make_request(deadline_s=0.01))
    await read_until(tmp_path, "aborted 1")
    assert engine.restarts == 0


@pytest.mark.parametrize(("behaviour", "is_done"), [("answer", True), ("half", False)])
async def test_prompts_are_primed_and_forgotten_on_every_replica_or_not_at_all(
    launch: Launch, behaviour: str, is_done: bool
) -> None:
    engine = await launch(behaviour)
    assert await engine.reset_prefix_cache() is is_done
    if is_done:
        await engine.prime(TokenPrompt((1, 2)))
    else:
        with pytest.raises(EngineUnavailable, match="could not compute"):
            await engine.prime(TokenPrompt((1, 2)))
    assert not engine._errands


async def test_errands_that_the_host_does_not_answer_have_an_end(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.ray_engine._RESET_S", 0.01)
    engine = await launch("silent")
    assert not await engine.reset_prefix_cache()
    assert not engine._errands


async def test_nothing_is_forgotten_with_work_in_flight(
    launch: Launch, make_request: MakeRequest
) -> None:
    engine = await launch("hang")
    asking = asyncio.create_task(engine.generate(make_request()))
    await asyncio.sleep(0)
    assert not await engine.reset_prefix_cache()
    asking.cancel()


async def test_a_replica_whose_engine_is_started_again_counts_once(
    launch: Launch, make_request: MakeRequest
) -> None:
    """It is away meanwhile, and was counted as one that ended besides."""
    engine = await launch("restarting")
    for number in range(3):
        await engine.generate(make_request(number))
    assert engine.restarts == 3 + 2, "as r1 and r2 told last"


async def test_what_was_deployed_elsewhere_is_deleted_and_counts_as_no_loss(
    launch: Launch, make_request: MakeRequest, tmp_path: Path
) -> None:
    engine = await launch("answer", address=ELSEWHERE)
    await engine.generate(make_request())
    with structlog.testing.capture_logs() as logs:
        await engine.close()
    assert "asked to delete" in (tmp_path / "engine-main.log").read_text()
    assert not [entry for entry in logs if entry["log_level"] == "warning"]
    assert engine.restarts == 0


async def test_a_local_cluster_ends_with_the_run_without_a_word(
    launch: Launch, tmp_path: Path
) -> None:
    engine = await launch("silent")
    await engine.close()
    assert "asked to delete" not in (tmp_path / "engine-main.log").read_text()


@pytest.mark.parametrize(("behaviour", "limit_s"), [("silent", 0.05), ("die_at_close", 1e6)])
async def test_a_host_that_never_says_it_deleted_holds_no_close_up(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, behaviour: str, limit_s: float
) -> None:
    monkeypatch.setattr("serving.ray_engine._CLOSE_S", limit_s)
    engine = await launch(behaviour, address=ELSEWHERE)
    with structlog.testing.capture_logs() as logs:
        await engine.close()
    warnings = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert "engine.not_deleted" in warnings


async def test_a_closed_engine_says_so(launch: Launch, make_request: MakeRequest) -> None:
    engine = await launch("hang")
    asking = asyncio.create_task(engine.generate(make_request()))
    await asyncio.sleep(0)
    await engine.close()
    for request in (asking, engine.generate(make_request(1))):
        with pytest.raises(EngineDead, match="closed") as caught:
            await request
        assert caught.value.final
