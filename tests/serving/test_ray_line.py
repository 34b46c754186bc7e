"""The way to one replica: calls hold what came meanwhile, and nothing is lost or told twice."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serving.ray_line import ReplicaLine
from serving.ray_scaling import ByLoad, wanted
from serving.ray_wire import Fields, Heard, Look, one_line


class Puppet:
    """A replica whose calls end when they are told to, and what the line says of them."""

    def __init__(self) -> None:
        self.told: list[list[Fields]] = []
        self.tells: list[asyncio.Future[None]] = []
        self.heard: list[int] = []
        self.hears: list[asyncio.Future[Heard]] = []
        self.said: list[tuple[Any, ...]] = []
        self.hosts: set[str] = set()
        self.line = ReplicaLine(
            "r1",
            self.call,
            "host",
            silent_s=0.05,
            answered=lambda *fields: self.said.append(("answered", *fields)),
            looked=lambda look: self.said.append(("looked", look.replica)),
            silent=lambda: self.said.append(("silent",)),
            failed=lambda numbers, error: self.said.append(("failed", numbers, str(error))),
        )

    async def call(self, method: str, *arguments: Any) -> Any:
        host, argument = arguments
        self.hosts.add(host)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if method == "tell":
            self.told.append(argument)
            self.tells.append(future)
        else:
            assert method == "hear"
            self.heard.append(argument)
            self.hears.append(future)
        return await future

    def hear(self, last: int, *answers: Fields) -> None:
        self.hears[-1].set_result(Heard(last, answers, list(Look("r1", 0, True, "node", ()))))


async def turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


@pytest.fixture
async def puppet() -> AsyncIterator[Puppet]:
    made = Puppet()
    await turns()
    yield made
    made.line.close()
    await turns()


async def test_what_comes_while_a_call_is_under_way_goes_with_the_next(puppet: Puppet) -> None:
    puppet.line.say("ask", 1, ["a"])
    puppet.line.say("ask", 2, ["b"])
    await turns()
    assert puppet.told == [[["ask", 1, ["a"]], ["ask", 2, ["b"]]]]
    puppet.line.say("abort", 1)
    puppet.line.say("ask", 3, ["c"])
    await turns()
    assert len(puppet.told) == 1
    puppet.tells[0].set_result(None)
    await turns()
    assert puppet.told[1:] == [[["abort", 1], ["ask", 3, ["c"]]]]
    puppet.tells[1].set_result(None)
    await turns()
    puppet.line.say("ask", 4, ["d"])
    await turns()
    assert puppet.told[2:] == [[["ask", 4, ["d"]]]]
    assert puppet.hosts == {"host"}


async def test_answers_are_told_in_order_and_acknowledged_with_the_next_call(
    puppet: Puppet,
) -> None:
    assert puppet.heard == [0]
    puppet.hear(2, [7, ["text"], None], [5, None, ["overloaded", "full"]])
    await turns()
    assert puppet.said == [
        ("answered", 7, ["text"], None),
        ("answered", 5, None, ["overloaded", "full"]),
        ("looked", "r1"),
    ]
    assert puppet.heard == [0, 2]


async def test_questions_that_could_not_be_told_fail_and_later_ones_go_on(puppet: Puppet) -> None:
    puppet.line.say("ask", 1, [])
    puppet.line.say("abort", 9)
    await turns()
    puppet.line.say("ask", 2, [])
    puppet.tells[0].set_exception(RuntimeError("no way"))
    await turns()
    assert puppet.said == [("failed", [1], "no way")]
    assert puppet.told[1] == [["ask", 2, []]]


async def test_a_replica_that_tells_nothing_is_called_silent_until_it_speaks(
    puppet: Puppet,
) -> None:
    async with asyncio.timeout(5):
        while not puppet.said:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert puppet.said == [("silent",)]
    assert len(puppet.hears) == 1, "the same call is waited for"
    puppet.hear(0)
    await turns()
    assert puppet.said[1:] == [("looked", "r1")]


async def test_a_call_that_fails_is_made_again_with_the_same_last_answer(
    puppet: Puppet, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("serving.ray_line._PAUSE_S", 0.0)
    puppet.hear(3, [1, [], None])
    await turns()
    puppet.hears[-1].set_exception(ConnectionError("cut\nat length"))
    await turns()
    assert puppet.heard == [0, 3, 3]
    assert capfd.readouterr().err == "replica r1 was not heard: cut\n"


async def test_a_replica_to_which_every_call_fails_is_silent_too(
    puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call began the time anew, so what it had been asked was waited for."""
    monkeypatch.setattr("serving.ray_line._PAUSE_S", 0.005)
    async with asyncio.timeout(5):
        while not puppet.said:
            if not puppet.hears[-1].done():
                puppet.hears[-1].set_exception(ConnectionError("cut"))
            await asyncio.sleep(0.001)
    assert puppet.said == [("silent",)]
    assert len(puppet.hears) > 2


async def test_closing_cancels_what_is_under_way(puppet: Puppet) -> None:
    puppet.line.say("ask", 1, [])
    await turns()
    puppet.line.close()
    await turns()
    assert puppet.tells[0].cancelled()
    assert puppet.hears[0].cancelled()
    await asyncio.sleep(0.06)
    assert puppet.said == []


def test_an_error_in_one_line() -> None:
    assert one_line(ValueError("first\nsecond")) == "first"
    assert one_line(KeyError()) == "KeyError"


@pytest.mark.parametrize(
    ("loads", "running", "replicas"),
    [
        ([], 3, 3),
        ([0.0, 0.0], 2, 1),
        ([12.0], 1, 1),
        ([12.5], 1, 2),
        ([16.0, 16.0], 2, 3),
    ],
)
def test_replicas_follow_the_questions_under_way(
    loads: list[float], running: int, replicas: int
) -> None:
    assert wanted(loads, 16, running) == replicas


class Context:
    """Of Ray's what the policy reads."""

    current_num_replicas = 2

    def __init__(self, metrics: dict[str, dict[str, float]] | None) -> None:
        self.aggregated_metrics = metrics


def test_the_policy_reads_what_replicas_tell() -> None:
    policy = ByLoad(batch_limit=16)
    assert policy(Context({"questions": {"a": 16.0, "b": 16.0}})) == (3, {})
    assert policy(Context(None)) == (2, {})
