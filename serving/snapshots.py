"""Snapshots on their way from an engine to the one who reads them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable

from serving.engine import EngineSnapshot


class SnapshotQueue:
    """What was told and not read yet: of more than `kept`, the latest."""

    def __init__(self, kept: int = 4096) -> None:
        self._unread: deque[EngineSnapshot] = deque(maxlen=kept)
        self._changed = asyncio.Event()
        self._is_closed = False

    def put(self, snapshots: Iterable[EngineSnapshot]) -> None:
        self._unread.extend(snapshots)
        self._changed.set()

    def close(self) -> None:
        """No more will come."""
        self._is_closed = True
        self._changed.set()

    async def read(self) -> AsyncIterator[EngineSnapshot]:
        """As they come, until closed."""
        while True:
            while self._unread:
                yield self._unread.popleft()
            if self._is_closed:
                return
            self._changed.clear()
            await self._changed.wait()
