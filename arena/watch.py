"""The one loop that looks at a run: reads what is new, keeps its overview, tells who shows it.

It looks four times a second however much happens, and never at single events.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from arena.figures import Figures
from arena.follow import Follower
from arena.frames import Overview
from arena.store import Row, RunClock, Tap

PERIOD_S = 0.25
_SAME_START_S = 2.0
"""Another process may bear the number by now; it began at another time."""


class Feed(Protocol):
    """Where a run's rows come from."""

    async def read(self) -> Sequence[Row]:
        """The rows that are new, in an order that `Figures.add` takes."""
        ...

    def now(self) -> float:
        """Run time, seconds."""
        ...


class StoreFeed:
    """A run that this process plays."""

    def __init__(self, tap: Tap, clock: RunClock) -> None:
        self._tap, self._clock = tap, clock

    async def read(self) -> Sequence[Row]:
        return self._tap.take()

    def now(self) -> float:
        return self._clock.now()


class FolderFeed:
    """A run that another process may be playing. Its time is that of the last record, and goes on
    from there while it is being played."""

    def __init__(self, folder: Path, follower: Follower, figures: Figures) -> None:
        self.folder = folder
        self._follower, self._figures = follower, figures
        self._seen = 0.0
        self._seen_at = time.monotonic()

    async def read(self) -> Sequence[Row]:
        return await asyncio.to_thread(self._follower.read)

    def now(self) -> float:
        if self._figures.last_record > self._seen:
            self._seen, self._seen_at = self._figures.last_record, time.monotonic()
        if not self.is_played():
            return self._seen
        return self._seen + time.monotonic() - self._seen_at

    def is_played(self) -> bool:
        """Whether the process that took the run up last is still there."""
        figures = self._figures
        is_all_in = len(figures.finished) == len(figures.matches) and not figures.can_grow
        if figures.process is None or is_all_in:
            return False
        pid, began = figures.process
        try:
            return abs(psutil.Process(pid).create_time() - began) < _SAME_START_S
        except psutil.Error:
            return False


Listener = Callable[[float, Sequence[tuple[str, str]]], None]
"""Takes the run time and the agents whose rows are new."""


class Watch:
    """Keeps the overview of a run."""

    def __init__(self, feed: Feed, figures: Figures) -> None:
        self.feed, self.figures = feed, figures
        self.overview = Overview(figures)
        self.row_listeners: list[Callable[[Sequence[Row]], None]] = []
        self.listeners: list[Listener] = []

    async def look(self, *, whole: bool = False) -> None:
        """Read what is new and tell the listeners; `whole` refreshes every figure."""
        rows = await self.feed.read()
        self.figures.add(rows)
        for take in self.row_listeners:
            take(rows)
        now = self.feed.now()
        is_settled = self.overview.is_over and not rows
        fresh = [] if is_settled else self.overview.refresh(now, whole=whole)
        for listener in self.listeners:
            listener(now, fresh)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(PERIOD_S)

    def frame(self) -> dict[str, Any]:
        """The run at the last look, without boards."""
        return self.overview.frame()
