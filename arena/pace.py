"""When a seat's next move is due, and waiting for it. There is no global tick."""

import asyncio
import random
import time

JITTER = 0.1
"""A period varies by this share either way, so that seats do not fall in step."""


class SeatPace:
    """One seat's due times: never before it is its turn, nor within a period of its last one."""

    def __init__(self, period_seconds: float, seed: str) -> None:
        self._period = period_seconds
        self._random = random.Random(seed)
        self._next = 0.0

    def due(self, ready: float) -> float:
        """When the move is due whose turn began at `ready` (`time.monotonic()` seconds)."""
        due = max(ready, self._next)
        self._next = due + self._period * self._random.uniform(1 - JITTER, 1 + JITTER)
        return due


class Pacer:
    """Lets seats wait for their due times, and wakes them all when the run is stopping."""

    def __init__(self) -> None:
        self.is_stopping = False
        self.is_finishing = False
        """No other match begins; those that are being played go on to their end."""
        self._sleepers: set[asyncio.Future[None]] = set()

    async def until(self, due: float) -> bool:
        """Wait until `due`; False as soon as the run is stopping."""
        delay = due - time.monotonic()
        if delay > 0 and not self.is_stopping:
            loop = asyncio.get_running_loop()
            sleeper = loop.create_future()
            timer = loop.call_later(delay, _wake, sleeper)
            self._sleepers.add(sleeper)
            try:
                await sleeper
            finally:
                timer.cancel()
                self._sleepers.discard(sleeper)
        return not self.is_stopping

    def stop(self) -> None:
        """No seat begins another move; those that wait return at once."""
        self.is_stopping = True
        for sleeper in self._sleepers:
            _wake(sleeper)


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
