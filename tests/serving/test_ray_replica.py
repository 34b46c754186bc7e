"""A replica by itself, in this process: what it answers, keeps, and gives up."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving import Request
from serving.ray_line import MOST_CALLS
from serving.ray_wire import Fields, Heard, Look, ReplicaPlan, reply_of, request_fields

ray_replica = pytest.importorskip("serving.ray_replica", reason="Ray is not installed (ray extra)")

Make = Callable[..., Coroutine[Any, Any, Any]]


class Held(ray_replica.Replica):  # type: ignore[misc,name-defined]
    """One that Python may collect: only Ray Serve awaits its `__del__`."""

    def __del__(self) -> None:
        return None


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    context = SimpleNamespace(app_name="app", replica_id=SimpleNamespace(unique_id="r1"))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.7")
    made: list[Any] = []

    async def start(
        lease_seconds: float | None = None,
        start_seconds: float = 0.0,
        look_seconds: float = 0.01,
        **engine: Any,
    ) -> Any:
        table = {"kind": "scripted", "max_concurrent": 2, "max_queued": 1, **engine}
        plan = ReplicaPlan("main", table, 5.0, 0, look_seconds, lease_seconds, start_seconds)
        replica = Held.__new__(Held)
        initialize: Any = Held.__init__
        await initialize(replica, plan)
        made.append(replica)
        return replica

    yield start
    for replica in made:
        await replica.close()


async def exchanged(
    replica: Any, *messages: Fields, host: str = "h", is_again: bool = False
) -> Heard:
    return Heard(*await replica.exchange(host, list(messages), is_again))


async def all_answers(replica: Any, number: int, *messages: Fields) -> dict[int, tuple[Any, Any]]:
    answers: dict[int, tuple[Any, Any]] = {}
    async with asyncio.timeout(10):
        while len(answers) < number:
            told = (await exchanged(replica, *messages)).answers
            answers |= {n: (reply, failure) for n, reply, failure in told}
            messages = tuple(["got", n] for n, *_ in told)
    return answers


async def test_it_answers_what_it_was_told(
    make: Make, make_request: Callable[..., Request]
) -> None:
    replica = await make()
    answers = await all_answers(replica, 1, ["ask", 4, request_fields(make_request())])
    fields, failure = answers[4]
    assert failure is None
    reply = reply_of(fields, "r1", 1.0, 2.0)
    assert reply.text in ("e2e4", "d2d4", "g1f3")
    assert reply.replica == "r1"
    assert await replica.version() == "1"


async def test_answers_stay_until_it_is_told_that_they_came(
    make: Make, make_request: Callable[..., Request]
) -> None:
    replica = await make()
    asks = [["ask", number, request_fields(make_request(number))] for number in range(3)]
    lost: dict[int, Fields] = {}
    told = await exchanged(replica, *asks)
    async with asyncio.timeout(5):
        while len(lost := lost | {answer[0]: answer for answer in told.answers}) < 3:
            told = await exchanged(replica)
    assert (await exchanged(replica)).answers == [], "once is enough while every call comes back"
    again = await exchanged(replica, is_again=True)
    assert sorted(again.answers) == sorted(lost.values())
    partly = await exchanged(replica, ["got", 0], ["got", 2], is_again=True)
    assert partly.answers == [lost[1]]
    assert (await exchanged(replica, ["got", 1], is_again=True)).answers == []


async def test_the_call_that_waits_longest_brings_the_answer(
    make: Make, make_request: Callable[..., Request]
) -> None:
    replica = await make(look_seconds=5.0, latency_seconds=0.02)
    first = asyncio.create_task(exchanged(replica))
    await asyncio.sleep(0)
    second = asyncio.create_task(exchanged(replica, ["ask", 1, request_fields(make_request())]))
    async with asyncio.timeout(2):
        assert [answer[0] for answer in (await first).answers] == [1]
    assert not second.done()
    second.cancel()


async def test_of_as_many_calls_as_may_be_the_first_comes_back_empty(make: Make) -> None:
    """Else no question could be told until an answer came."""
    replica = await make(look_seconds=5.0)
    calls = [asyncio.create_task(exchanged(replica)) for _ in range(MOST_CALLS)]
    await asyncio.sleep(0.05)
    assert [call.done() for call in calls] == [True, *[False] * (MOST_CALLS - 1)]
    assert calls[0].result().answers == []
    for call in calls:
        call.cancel()


async def test_a_call_cancelled_as_it_would_bring_an_answer_leaves_it_to_another(
    make: Make, make_request: Callable[..., Request]
) -> None:
    replica = await make(look_seconds=5.0)
    calls = [asyncio.create_task(exchanged(replica)) for _ in range(2)]
    await asyncio.sleep(0)
    await replica._answer(1, request_fields(make_request()))
    calls[0].cancel()
    async with asyncio.timeout(2):
        assert [answer[0] for answer in (await calls[1]).answers] == [1]
    assert calls[0].cancelled()


async def test_more_than_it_takes_is_refused_at_once(
    make: Make, make_request: Callable[..., Request]
) -> None:
    replica = await make(latency_seconds=0.2)
    asks = [["ask", number, request_fields(make_request(number))] for number in range(5)]
    answers = await all_answers(replica, 5, *asks)
    kinds = [failure[0] for _, failure in answers.values() if failure is not None]
    assert kinds == ["overloaded"] * 2


async def test_a_question_given_up_leaves_the_engine(
    make: Make, make_request: Callable[..., Request]
) -> None:
    replica = await make(latency_seconds=30.0)
    await exchanged(replica, ["ask", 1, request_fields(make_request())])
    assert replica.record_autoscaling_stats() == {"questions": 1.0}
    told = await exchanged(replica, ["abort", 1], ["abort", 7])
    assert replica.record_autoscaling_stats() == {"questions": 0.0}
    assert told.answers == []


async def test_another_host_begins_anew(make: Make, make_request: Callable[..., Request]) -> None:
    replica = await make(latency_seconds=0.05, look_seconds=5.0)
    asks = [["ask", number, request_fields(make_request(number))] for number in range(2)]
    await exchanged(replica, *asks)
    left = asyncio.create_task(exchanged(replica, ["ask", 9, request_fields(make_request())]))
    more = asyncio.create_task(exchanged(replica, is_again=True))
    await asyncio.sleep(0.01)
    assert more.result().answers, "not known to have come"
    asked = ["ask", 1, request_fields(make_request())]
    told = await exchanged(replica, asked, host="next")
    assert [number for number, *_ in told.answers] == [1], "of its own questions"
    assert left.result().answers == [], "a call of a host before it brings nothing"
    assert replica.record_autoscaling_stats() == {"questions": 0.0}


async def test_nothing_of_it_stays_on_its_machine(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    replica = await make()
    replica._log_dir.mkdir()
    (replica._log_dir / "engine-main.log").write_text("ready\n")
    await replica.close()
    assert os.listdir(tmp_path) == []


async def test_it_says_how_it_is(make: Make) -> None:
    replica = await make()
    snapshots: list[Any] = []
    async with asyncio.timeout(5):
        while not snapshots:
            look = Look(*(await exchanged(replica)).look)
            snapshots += look.snapshots
    assert look[:4] == ("r1", 0, True, "10.0.0.7")
    assert await replica.reset()
    assert await replica.prime(["ids", [1, 2, 3]])
    await replica.check_health()


async def test_an_engine_dead_for_good_is_told_to_ray(
    make: Make, make_request: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await make()
    await replica._engine.close()
    answers = await all_answers(replica, 1, ["ask", 1, request_fields(make_request())])
    assert answers[1][1][0] == "engine_dead"
    with pytest.raises(Exception, match="is closed"):
        await replica.check_health()


@pytest.fixture
async def deleted(monkeypatch: pytest.MonkeyPatch) -> "asyncio.Queue[tuple[str, bool]]":
    """What Ray is asked to delete."""
    told: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def delete(app: str, _blocking: bool) -> None:
        loop.call_soon_threadsafe(told.put_nowait, (app, _blocking))

    monkeypatch.setattr("ray.serve.delete", delete)
    return told


async def test_a_lease_that_nobody_renews_deletes_what_was_deployed(
    make: Make, deleted: "asyncio.Queue[tuple[str, bool]]"
) -> None:
    replica = await make(lease_seconds=0.2)
    for _ in range(20):
        await exchanged(replica)
        await asyncio.sleep(0.01)
    assert deleted.empty()
    async with asyncio.timeout(5):
        assert await deleted.get() == ("app", False)


async def test_a_replica_that_waits_for_the_others_to_open_keeps_what_was_deployed(
    make: Make, deleted: "asyncio.Queue[tuple[str, bool]]"
) -> None:
    """Nobody asks before all are there, which may take longer than a lease: it deleted them all."""
    replica = await make(lease_seconds=0.05, start_seconds=60.0)
    await asyncio.sleep(0.2)
    assert deleted.empty()
    await exchanged(replica)
    async with asyncio.timeout(5):
        assert await deleted.get() == ("app", False), "from then on the lease counts"


async def test_a_replica_that_was_frozen_for_a_lease_deletes_nothing(
    make: Make, deleted: "asyncio.Queue[tuple[str, bool]]"
) -> None:
    """It found its lease run out before it could hear who asked, and deleted the live run's."""
    replica = await make(lease_seconds=0.3)
    await exchanged(replica)
    await asyncio.sleep(0.05)
    time.sleep(0.5)  # noqa: ASYNC251  # as long as it is stopped
    await asyncio.sleep(0.05)
    await exchanged(replica)
    await asyncio.sleep(0.05)
    assert deleted.empty()


async def test_an_engine_dead_for_good_is_no_place_for_a_match(
    make: Make, make_request: Callable[..., Request]
) -> None:
    """It was asked again at once, until Ray had replaced it."""
    replica = await make()
    assert Look(*(await exchanged(replica)).look).is_ready
    await replica._engine.close()
    ask: list[Fields] = [["ask", 1, request_fields(make_request())]]
    async with asyncio.timeout(5):
        while not (told := await exchanged(replica, *ask)).answers:
            ask = []
    assert not Look(*told.look).is_ready


async def test_a_question_that_it_cannot_read_is_answered_at_once(make: Make) -> None:
    """Nobody heard of it before its deadline, and it counted as under way for ever."""
    replica = await make()
    answers = await all_answers(replica, 1, ["ask", 3, ["of another version"]])
    assert answers[3][1][0] == "transport"
    assert "ValueError" in answers[3][1][1]
    assert replica.record_autoscaling_stats() == {"questions": 0.0}


async def test_what_waits_in_its_queue_is_told_as_waiting(
    make: Make, make_request: Callable[..., Request]
) -> None:
    """It was taken for the harness's own time."""
    replica = await make(max_concurrent=1, latency_seconds=0.1)
    asks = [["ask", number, request_fields(make_request(number))] for number in range(2)]
    answers = await all_answers(replica, 2, *asks)
    waits = [reply_of(reply, "r1", 0.0, 1.0).timings.queue_s for reply, _ in answers.values()]
    assert waits[0] == pytest.approx(0.0, abs=0.05)
    assert waits[1] == pytest.approx(0.1, abs=0.05)


async def test_an_engine_that_does_not_open_says_where_and_why(make: Make) -> None:
    with pytest.raises(ray_replica.ReplicaError, match=r"on 10.0.0.7: .*no-such-model"):
        await make(model="/no-such-model")
