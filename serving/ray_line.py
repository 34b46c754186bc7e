"""The host's way to one replica. A call to it costs the same for one question as for many, and each
brings answers back; so there are few calls, and what comes while all of them are under way goes
with the next.

    host                                                     replica
    questions, cancels, and which answers came, in order  →
                                                          ←  answers since, and how it is

A call waits there until there is an answer, for a while at most. So one that brings a question may
come back with the answer to an earlier one, and its own comes with a later call: that is one call a
move. Once as many wait as there may be, the first comes back, or no question could be told.

Answers are kept there until a later call says that they came.
"""

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Protocol

from serving.ray_wire import Fields, Heard, Look, one_line

MOST_CALLS = 4
"""To one replica, under way at once."""
_PAUSE_S = 0.25
"""After a call that failed, until the next: Ray's word of a replica's end comes by itself."""


class Exchange(Protocol):
    """Calls `Replica.exchange`; cancelling passes on to it."""

    async def __call__(self, host: str, messages: list[Fields], is_again: bool) -> Any: ...


class ReplicaLine:
    """Asks one replica, until closed. What happens is told by callbacks."""

    def __init__(
        self,
        name: str,
        exchange: Exchange,
        host: str,
        *,
        silent_s: float,
        answered: Callable[[int, Fields | None, Fields | None], None],
        looked: Callable[[Look], None],
        silent: Callable[[], None],
        failed: Callable[[list[int], BaseException], None],
    ) -> None:
        """`host` is the same for all lines of one host and for no other; `silent` is called when
        the replica tells nothing for `silent_s`, be it that no call comes back or that every one
        fails, `failed` with questions that could not be told."""
        self._name = name
        self._exchange = exchange
        self._host = host
        self._silent_s = silent_s
        self._answered = answered
        self._looked = looked
        self._silent = silent
        self._failed = failed
        self._is_closed = False
        self._outbox: list[Fields] = []
        self._is_again = False
        """A call failed, and with it maybe answers."""
        self._loop = asyncio.get_running_loop()
        self._silence = self._loop.call_later(silent_s, silent)
        self._calls: set[asyncio.Task[None]] = set()
        self._call_soon()

    def say(self, *message: Any) -> None:
        """["ask", number, Request fields] or ["abort", number]. A cancel may arrive before its
        question; that is then answered, and nobody hears of it."""
        self._outbox.append(list(message))
        self._call_soon()

    def close(self) -> None:
        self._silence.cancel()
        self._is_closed = True
        for call in self._calls:
            call.cancel()

    def _call_soon(self) -> None:
        """At the end of this turn of the loop: the first takes all that is said in it."""
        self._loop.call_soon(self._call_now)

    def _call_now(self) -> None:
        if self._is_closed or len(self._calls) >= MOST_CALLS:
            return
        if self._outbox or not self._calls:
            messages, self._outbox = self._outbox, []
            call = self._loop.create_task(self._talk(messages))
            self._calls.add(call)
            call.add_done_callback(self._ended)

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._call_soon()

    async def _talk(self, messages: list[Fields]) -> None:
        is_again, self._is_again = self._is_again, False
        try:
            heard = Heard(*await self._exchange(self._host, messages, is_again))
        # whatever Ray raises, those who asked must hear of it
        except Exception as error:  # noqa: BLE001
            self._lose(messages, error)
            await asyncio.sleep(_PAUSE_S)
            return
        self._silence.cancel()
        self._silence = self._loop.call_later(self._silent_s, self._silent)
        for number, reply, failure in heard.answers:
            self._outbox.append(["got", number])
            self._answered(number, reply, failure)
        self._looked(Look(*heard.look))

    def _lose(self, messages: list[Fields], error: BaseException) -> None:
        """It is not known whether they came."""
        sys.stderr.write(f"replica {self._name} was not heard: {one_line(error)}\n")
        self._is_again = True
        asked = [number for tag, number, *_ in messages if tag == "ask"]
        rest = [message for message in messages if message[0] != "ask"]
        self._outbox = [*rest, *(["abort", number] for number in asked), *self._outbox]
        self._failed(asked, error)
