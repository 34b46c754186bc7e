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
from serving.ray_wire import Heard, Look, ReplicaPlan, reply_of, request_fields

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
        lease_seconds: float | None = None, start_seconds: float = 0.0, **engine: Any
    ) -> Any:
        table = {"kind": "scripted", "max_concurrent": 2, "max_queued": 1, **engine}
        plan = ReplicaPlan("main", table, 5.0, 0, 0.01, lease_seconds, start_seconds)
        replica = Held.__new__(Held)
        initialize: Any = Held.__init__
        await initialize(replica, plan)
        made.append(replica)
        return replica

    yield start
    for replica in made:
        await replica.close()


async def heard(replica: Any, host: str = "h", last: int = 0) -> Heard:
    return Heard(*await replica.hear(host, last))


async def all_answers(replica: Any, number: int) -> dict[int, tuple[Any, Any]]:
    answers: dict[int, tuple[Any, Any]] = {}
    last = 0
    async with asyncio.timeout(10):
        while len(answers) < number:
            told = await heard(replica, last=last)
            last = told.last
            answers |= {n: (reply, failure) for n, reply, failure in told.answers}
    return answers


async def test_it_answers_what_it_was_told(
    make: Make, make_request: Callable[..., Request]
) -> None:
    replica = await make()
    await replica.tell("h", [["ask", 4, request_fields(make_request())]])
    answers = await all_answers(replica, 1)
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
    await replica.tell("h", asks)
    await all_answers(replica, 3)
    lost = await heard(replica)
    again = await heard(replica)
    assert sorted(again.answers) == sorted(lost.answers)
    assert again.last == 3
    partly = await heard(replica, last=2)
    assert (partly.last, len(partly.answers)) == (3, 1)
    assert (await heard(replica, last=3)).answers == []


async def test_more_than_it_takes_is_refused_at_once(
    make: Make, make_request: Callable[..., Request]
) -> None:
    replica = await make(latency_seconds=0.2)
    asks = [["ask", number, request_fields(make_request(number))] for number in range(5)]
    await replica.tell("h", asks)
    answers = await all_answers(replica, 5)
    kinds = [failure[0] for _, failure in answers.values() if failure is not None]
    assert kinds == ["overloaded"] * 2


async def test_a_question_given_up_leaves_the_engine(
    make: Make, make_request: Callable[..., Request]
) -> None:
    replica = await make(latency_seconds=30.0)
    await replica.tell("h", [["ask", 1, request_fields(make_request())]])
    await asyncio.sleep(0.02)
    assert replica.record_autoscaling_stats() == {"questions": 1.0}
    await replica.tell("h", [["abort", 1], ["abort", 7]])
    await asyncio.sleep(0.02)
    assert replica.record_autoscaling_stats() == {"questions": 0.0}
    assert (await heard(replica)).answers == []


async def test_another_host_begins_anew(make: Make, make_request: Callable[..., Request]) -> None:
    replica = await make(latency_seconds=0.05)
    asks = [["ask", number, request_fields(make_request(number))] for number in range(2)]
    await replica.tell("h", asks)
    await all_answers(replica, 2)
    await replica.tell("h", [["ask", 9, request_fields(make_request())]])
    told = await heard(replica, host="next")
    assert (told.last, told.answers) == (0, [])
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
            look = Look(*(await heard(replica)).look)
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
    await replica.tell("h", [["ask", 1, request_fields(make_request())]])
    answers = await all_answers(replica, 1)
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
        await heard(replica)
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
    await heard(replica)
    async with asyncio.timeout(5):
        assert await deleted.get() == ("app", False), "from then on the lease counts"


async def test_a_replica_that_was_frozen_for_a_lease_deletes_nothing(
    make: Make, deleted: "asyncio.Queue[tuple[str, bool]]"
) -> None:
    """It found its lease run out before it could hear who asked, and deleted the live run's."""
    replica = await make(lease_seconds=0.3)
    await heard(replica)
    await asyncio.sleep(0.05)
    time.sleep(0.5)  # noqa: ASYNC251  # as long as it is stopped
    await asyncio.sleep(0.05)
    await heard(replica)
    await asyncio.sleep(0.05)
    assert deleted.empty()


async def test_an_engine_dead_for_good_is_no_place_for_a_match(
    make: Make, make_request: Callable[..., Request]
) -> None:
    """It was asked again at once, until Ray had replaced it."""
    replica = await make()
    assert Look(*(await heard(replica)).look).is_ready
    await replica._engine.close()
    await replica.tell("h", [["ask", 1, request_fields(make_request())]])
    async with asyncio.timeout(5):
        while not (told := await heard(replica)).answers:
            pass
    assert not Look(*told.look).is_ready


async def test_a_question_that_it_cannot_read_is_answered_at_once(make: Make) -> None:
    """Nobody heard of it before its deadline, and it counted as under way for ever."""
    replica = await make()
    await replica.tell("h", [["ask", 3, ["of another version"]]])
    answers = await all_answers(replica, 1)
    assert answers[3][1][0] == "transport"
    assert "ValueError" in answers[3][1][1]
    assert replica.record_autoscaling_stats() == {"questions": 0.0}


async def test_what_waits_in_its_queue_is_told_as_waiting(
    make: Make, make_request: Callable[..., Request]
) -> None:
    """It was taken for the harness's own time."""
    replica = await make(max_concurrent=1, latency_seconds=0.1)
    asks = [["ask", number, request_fields(make_request(number))] for number in range(2)]
    await replica.tell("h", asks)
    answers = await all_answers(replica, 2)
    waits = [reply_of(reply, "r1", 0.0, 1.0).timings.queue_s for reply, _ in answers.values()]
    assert waits[0] == pytest.approx(0.0, abs=0.05)
    assert waits[1] == pytest.approx(0.1, abs=0.05)


async def test_an_engine_that_does_not_open_says_where_and_why(make: Make) -> None:
    with pytest.raises(ray_replica.ReplicaError, match=r"on 10.0.0.7: .*no-such-model"):
        await make(model="/no-such-model")
