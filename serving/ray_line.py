"""The host's way to one replica. A call to it costs the same for one question as for many, so what
comes while a call is under way goes with the next.

    host                                           replica
    tell  questions and cancels, in order    →
    hear  the last answer that came          →     waits for an answer, or a while
                                             ←     answers since, and how it is

Answers are kept there until a later `hear` says that they came.
"""

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Protocol

from serving.ray_wire import Fields, Heard, Look, one_line

_PAUSE_S = 0.25
"""After a call that failed, until the next: Ray's word of a replica's end comes by itself."""


class Call(Protocol):
    """Calls a method of the replica; cancelling passes on to it."""

    async def __call__(self, method: str, *arguments: Any) -> Any: ...


class ReplicaLine:
    """Asks one replica, until closed. What happens is told by callbacks."""

    def __init__(
        self,
        name: str,
        call: Call,
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
        self._call = call
        self._host = host
        self._silent_s = silent_s
        self._answered = answered
        self._looked = looked
        self._silent = silent
        self._failed = failed
        self._outbox: list[Fields] = []
        self._loop = asyncio.get_running_loop()
        self._telling: asyncio.Task[None] | None = None
        self._silence = self._loop.call_later(silent_s, silent)
        self._hearing = self._loop.create_task(self._hear())

    def say(self, *message: Any) -> None:
        """["ask", number, Request fields] or ["abort", number]."""
        self._outbox.append(list(message))
        if self._telling is None:
            self._telling = self._loop.create_task(self._tell())

    def close(self) -> None:
        self._silence.cancel()
        self._hearing.cancel()
        if self._telling is not None:
            self._telling.cancel()

    async def _tell(self) -> None:
        while self._outbox:
            messages, self._outbox = self._outbox, []
            try:
                await self._call("tell", self._host, messages)
            # whatever Ray raises, those who asked must hear of it
            except Exception as error:  # noqa: BLE001
                self._failed([number for tag, number, *_ in messages if tag == "ask"], error)
        self._telling = None

    async def _hear(self) -> None:
        last = 0
        while True:
            try:
                heard = Heard(*await self._call("hear", self._host, last))
            except Exception as error:  # noqa: BLE001  # it ends, or Ray is in trouble: ask again
                sys.stderr.write(f"replica {self._name} was not heard: {one_line(error)}\n")
                await asyncio.sleep(_PAUSE_S)
                continue
            self._silence.cancel()
            self._silence = self._loop.call_later(self._silent_s, self._silent)
            last = heard.last
            for number, reply, failure in heard.answers:
                self._answered(number, reply, failure)
            self._looked(Look(*heard.look))
