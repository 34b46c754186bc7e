"""A player that stops before its last moves until a test lets it go on."""

import asyncio
from collections.abc import Mapping
from typing import Any

from agents import Decision, Turn
from serving import Engine


class HeldAgent:
    """Plays the first legal move; from ply `hold_at` on it first waits until nobody listens on
    `gate`, a port of this machine, any more."""

    def __init__(self, config: dict[str, Any], engines: Mapping[str, Engine]) -> None:
        self._gate = config["gate"]
        self._hold_at = config["hold_at"]

    async def open(self) -> None:
        """Nothing to get ready."""

    async def choose(self, turn: Turn) -> Decision:
        if turn.position.ply >= self._hold_at:
            await self._wait()
        return Decision(turn.position.legal_moves()[0], None, ())

    async def close(self) -> None:
        """Nothing to give back."""

    async def _wait(self) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._gate)
            try:
                await reader.read()
            finally:
                writer.close()
        except ConnectionError:
            return
