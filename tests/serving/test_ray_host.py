"""The Ray host by itself: where questions go, and what becomes of those that no replica answers."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from serving import ray_presence
from serving.host_wire import decode
from serving.ray_line import MOST_CALLS
from serving.ray_wire import Fields, Heard, Look, RayStart

ray_host = pytest.importorskip("serving.ray_host", reason="Ray is not installed (ray extra)")

SILENT_S = 0.5


class Call:
    """A call to a replica, as Ray's response is awaited and cancelled."""

    def __init__(self, replica: str, method: str, arguments: tuple[Any, ...]) -> None:
        self.replica, self.method, self.arguments = replica, method, arguments
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def __await__(self) -> Iterator[Any]:
        return self.answer.__await__()

    def cancel(self) -> None:
        self.answer.cancel()


class Handle:
    """Replicas whose calls end when they are told to."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def options(self, method_name: str, session_id: str) -> SimpleNamespace:
        def remote(*arguments: Any) -> Call:
            call = Call(session_id, method_name, arguments)
            self.calls.append(call)
            if len(self._waiting(session_id)) == MOST_CALLS:
                self.hear(session_id)
            return call

        return SimpleNamespace(remote=remote)

    def told(self, replica: str) -> list[Fields]:
        """All questions and cancels."""
        messages = [message for call in self._at(replica) for message in call.arguments[1]]
        return [message for message in messages if message[0] != "got"]

    def hear(self, replica: str, *answers: Fields, is_ready: bool = True) -> None:
        """The call that waits longest comes back."""
        look = Look(replica, 0, is_ready, "node", ())
        self._waiting(replica)[0].answer.set_result(Heard(answers, list(look)))

    def _waiting(self, replica: str) -> list[Call]:
        return [call for call in self._at(replica) if not call.answer.done()]

    def _at(self, replica: str) -> list[Call]:
        return [call for call in self.calls if (call.replica, call.method) == (replica, "exchange")]


class Writer:
    """The host's end of the arena's socket."""

    def __init__(self) -> None:
        self.messages: list[list[Any]] = []

    def is_closing(self) -> bool:
        return False

    def write(self, line: bytes) -> None:
        self.messages += decode(line)

    def said(self, tag: str) -> list[list[Any]]:
        return [fields for said, *fields in self.messages if said == tag]


class Around:
    """A host with all that it speaks to."""

    def __init__(self) -> None:
        self.handle, self.writer = Handle(), Writer()
        start = RayStart("auto", "app", 2, None, 1, 0, 16, 64, SILENT_S, {})
        self.host = ray_host.Host(start, self.handle, 2, self.writer)

    async def see(self, *replicas: str) -> None:
        ray_presence.tell(frozenset(replicas))
        await turns()

    async def ask(self, number: int, match_id: str = "m") -> str:
        """The replica that is told of it."""
        self.host._take("ask", [number, match_id, []])
        await turns()
        (found,) = (name for name in ("r1", "r2") if ["ask", number, []] in self.handle.told(name))
        return found

    def in_flight(self, match_id: str = "m") -> int:
        places = self.host._affinity._places
        return places[match_id].in_flight if match_id in places else 0


async def turns() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


@pytest.fixture
async def around(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Around]:
    monkeypatch.setattr(ray_presence, "_watchers", [])
    monkeypatch.setattr(ray_presence, "_present", frozenset())
    made = Around()
    await made.see("r1", "r2")
    yield made
    await made.see()


async def test_without_a_replica_a_question_fails_at_once(around: Around) -> None:
    await around.see()
    around.host._take("ask", [1, "m", []])
    await turns()
    assert around.writer.said("error") == [[1, "engine_dead", "no replica is running"]]


async def test_a_match_stays_and_its_question_ends_however_it_ends(around: Around) -> None:
    home = await around.ask(1)
    assert around.in_flight() == 1
    around.handle.hear(home, [1, ["text"], None])
    await turns()
    assert around.writer.said("reply") == [[1, home, ["text"]]]
    assert around.in_flight() == 0
    assert await around.ask(2) == home
    around.handle.hear(home, [2, None, ["overloaded", "full"]])
    await turns()
    assert around.writer.said("error") == [[2, "overloaded", f"replica {home}: full"]]
    assert around.in_flight() == 0
    assert await around.ask(3) == home
    around.host._take("abort", [3])
    await turns()
    assert around.handle.told(home)[-1] == ["abort", 3]
    assert around.in_flight() == 0


async def test_an_answer_that_comes_twice_or_too_late_is_told_once(around: Around) -> None:
    home = await around.ask(1)
    for _ in range(2):
        around.handle.hear(home, [1, ["text"], None])
        await turns()
    assert len(around.writer.said("reply")) == 1


async def test_what_a_replica_was_asked_fails_with_it_and_goes_on_elsewhere(
    around: Around,
) -> None:
    home = await around.ask(1)
    other = {"r1": "r2", "r2": "r1"}[home]
    await around.see(other)
    assert around.writer.said("error") == [[1, "engine_dead", f"replica {home} ended"]]
    assert around.writer.said("replicas")[-1] == [[other]]
    assert await around.ask(2) == other


async def test_a_replica_whose_engine_is_not_ready_is_no_place(around: Around) -> None:
    home = await around.ask(1)
    around.handle.hear(home, [1, None, ["engine_dead", "it ended"]], is_ready=False)
    await turns()
    other = await around.ask(2)
    assert other != home
    around.handle.hear(home)
    await turns()
    assert await around.ask(3) == home, "its matches return"


async def test_a_frozen_replica_is_told_to_give_up_what_was_asked_again_elsewhere(
    around: Around,
) -> None:
    """Once it went on it answered all that, while its matches came back and found it full."""
    home = await around.ask(1)
    async with asyncio.timeout(5):
        while not around.writer.said("error"):
            around.handle.hear({"r1": "r2", "r2": "r1"}[home])
            await asyncio.sleep(SILENT_S / 5)
    (failed,) = around.writer.said("error")
    assert failed[:2] == [1, "stalled"]
    assert await around.ask(2) != home
    assert around.handle.told(home) == [["ask", 1, []], ["abort", 1]]


@pytest.mark.parametrize(("errand", "is_done"), [("prime", True), ("reset", False)])
async def test_an_errand_does_not_wait_for_a_replica_that_left(
    around: Around, errand: str, is_done: bool
) -> None:
    """Ray goes on looking for it, so that a run which was to begin waited for ten minutes."""
    around.host._take(errand, [5])
    await turns()
    calls = {call.replica: call for call in around.handle.calls if call.method == errand}
    assert sorted(calls) == ["r1", "r2"]
    calls["r1"].answer.set_result(True)
    await turns()
    assert around.writer.said("done") == []
    await around.see("r1")
    assert around.writer.said("done") == [[5, is_done]]
    assert calls["r2"].answer.cancelled()
    assert not around.host._calls


@pytest.mark.parametrize(("answer", "is_done"), [(True, True), (False, False)])
async def test_an_errand_is_done_where_every_replica_did_it(
    around: Around, answer: bool, is_done: bool
) -> None:
    around.host._take("prime", [5])
    await turns()
    first, second = (call for call in around.handle.calls if call.method == "prime")
    first.answer.set_result(True)
    second.answer.set_result(answer)
    await turns()
    assert around.writer.said("done") == [[5, is_done]]


@pytest.mark.parametrize(("is_closing", "is_told"), [(False, True), (True, False)])
async def test_what_somebody_deleted_ends_the_host(
    around: Around, monkeypatch: pytest.MonkeyPatch, is_closing: bool, is_told: bool
) -> None:
    """The arena waited `start_seconds` for replicas that nobody would bring back."""
    monkeypatch.setattr(ray_host, "_CLUSTER_PERIOD_S", 0.0)
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications={"other": 1}))
    monkeypatch.setattr("ray.serve.delete", lambda app: None)
    await around.see()
    if is_closing:
        around.host._take("close", [])
    watching = asyncio.create_task(around.host._watch_cluster())
    await asyncio.sleep(0.1)
    watching.cancel()
    dead = around.writer.said("dead")
    assert bool(dead) is is_told
    assert all(why == ["app was deleted from the cluster"] for why in dead)
