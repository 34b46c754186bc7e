"""The way to one replica: calls hold what came meanwhile, and nothing is lost or told twice."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serving.ray_line import MOST_CALLS, ReplicaLine
from serving.ray_scaling import ByLoad, wanted
from serving.ray_wire import Fields, Heard, Look, one_line


class Exchange:
    """One call to the replica, which ends when it is told to."""

    def __init__(self, messages: list[Fields], is_again: bool) -> None:
        self.messages, self.is_again = messages, is_again
        self.ended: asyncio.Future[Heard] = asyncio.get_running_loop().create_future()

    def end(self, *answers: Fields) -> None:
        self.ended.set_result(Heard(answers, list(Look("r1", 0, True, "node", ()))))

    def fail(self, error: Exception) -> None:
        self.ended.set_exception(error)


class Puppet:
    """A replica, and what the line says of it."""

    def __init__(self) -> None:
        self.calls: list[Exchange] = []
        self.said: list[tuple[Any, ...]] = []
        self.hosts: set[str] = set()
        self.line = ReplicaLine(
            "r1",
            self.exchange,
            "host",
            silent_s=0.05,
            answered=lambda *fields: self.said.append(("answered", *fields)),
            looked=lambda look: self.said.append(("looked", look.replica)),
            silent=lambda: self.said.append(("silent",)),
            failed=lambda numbers, error: self.said.append(("failed", numbers, str(error))),
        )

    async def exchange(self, host: str, messages: list[Fields], is_again: bool) -> Any:
        self.hosts.add(host)
        self.calls.append(Exchange(messages, is_again))
        return await self.calls[-1].ended

    @property
    def told(self) -> list[list[Fields]]:
        return [call.messages for call in self.calls]


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


async def test_a_call_is_always_under_way_and_a_question_goes_with_one_of_its_own(
    puppet: Puppet,
) -> None:
    assert puppet.told == [[]]
    puppet.line.say("ask", 1, ["a"])
    puppet.line.say("ask", 2, ["b"])
    await turns()
    assert puppet.told == [[], [["ask", 1, ["a"]], ["ask", 2, ["b"]]]]
    puppet.calls[0].end([1, ["text"], None])
    await turns()
    assert puppet.told[2:] == [[["got", 1]]], "this one waits for answers; a call came back"
    assert puppet.hosts == {"host"}


async def test_what_comes_while_all_calls_are_under_way_goes_with_the_next(puppet: Puppet) -> None:
    for number in range(1, MOST_CALLS):
        puppet.line.say("ask", number, [])
        await turns()
    puppet.line.say("ask", 8, [])
    puppet.line.say("abort", 1)
    puppet.line.say("ask", 9, [])
    await turns()
    assert len(puppet.calls) == MOST_CALLS
    puppet.calls[0].end()
    await turns()
    assert puppet.told[MOST_CALLS:] == [[["ask", 8, []], ["abort", 1], ["ask", 9, []]]]


async def test_answers_are_told_in_order_and_acknowledged_with_the_next_call(
    puppet: Puppet,
) -> None:
    puppet.calls[0].end([7, ["text"], None], [5, None, ["overloaded", "full"]])
    await turns()
    assert puppet.said == [
        ("answered", 7, ["text"], None),
        ("answered", 5, None, ["overloaded", "full"]),
        ("looked", "r1"),
    ]
    assert puppet.told[1:] == [[["got", 7], ["got", 5]]]


async def test_questions_of_a_call_that_fails_fail_and_the_rest_of_it_is_told_again(
    puppet: Puppet, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is not known whether they came: the replica shall not answer what nobody waits for."""
    puppet.line.say("ask", 1, [])
    puppet.line.say("abort", 9)
    await turns()
    puppet.calls[1].fail(RuntimeError("no way\nat length"))
    await turns()
    assert puppet.said == [("failed", [1], "no way\nat length")]
    assert capfd.readouterr().err == "replica r1 was not heard: no way\n"
    assert len(puppet.calls) == 2
    puppet.line.say("ask", 2, [])
    await turns()
    assert puppet.told[2] == [["abort", 9], ["abort", 1], ["ask", 2, []]]


async def test_after_a_call_that_failed_answers_are_told_again(
    puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.ray_line._PAUSE_S", 0.0)
    puppet.calls[0].end([3, [], None])
    await turns()
    assert puppet.told[1] == [["got", 3]]
    puppet.calls[1].fail(ConnectionError("cut"))
    await turns()
    assert puppet.told[2] == [["got", 3]]
    assert [call.is_again for call in puppet.calls] == [False, False, True]
    puppet.calls[2].end()
    await turns()
    assert (puppet.told[3], puppet.calls[3].is_again) == ([], False)


async def test_a_replica_that_tells_nothing_is_called_silent_until_it_speaks(
    puppet: Puppet,
) -> None:
    async with asyncio.timeout(5):
        while not puppet.said:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert puppet.said == [("silent",)]
    assert len(puppet.calls) == 1, "the same call is waited for"
    puppet.calls[0].end()
    await turns()
    assert puppet.said[1:] == [("looked", "r1")]


async def test_a_replica_to_which_every_call_fails_is_silent_too(
    puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call began the time anew, so what it had been asked was waited for."""
    monkeypatch.setattr("serving.ray_line._PAUSE_S", 0.005)
    async with asyncio.timeout(5):
        while ("silent",) not in puppet.said:
            if not puppet.calls[-1].ended.done():
                puppet.calls[-1].fail(ConnectionError("cut"))
            await asyncio.sleep(0.001)
    assert len(puppet.calls) > 2


async def test_closing_cancels_what_is_under_way(puppet: Puppet) -> None:
    puppet.line.say("ask", 1, [])
    await turns()
    puppet.line.say("ask", 2, [])
    puppet.line.close()
    await turns()
    assert [call.ended.cancelled() for call in puppet.calls] == [True, True]
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
