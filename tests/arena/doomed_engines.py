"""Engines of one's own: some fail in the ways that a comparison must survive, one takes notes."""

import asyncio
from typing import Any, ClassVar

from serving import EngineDead, Overloaded, Reply, Request
from tests.examples.own_engine import DiceEngine


class DoomedEngine(DiceEngine):
    """Is gone for good after `lives` answers."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._lives = int(config.get("lives", 0))

    async def generate(self, request: Request) -> Reply:
        if len(self.prompts) >= self._lives:
            raise EngineDead("the power is off", final=True)
        await asyncio.sleep(0.005)
        return await super().generate(request)


class RestartedEngine(DiceEngine):
    """Is started again once, after `lives` answers."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._lives = int(config.get("lives", 0))

    async def generate(self, request: Request) -> Reply:
        await asyncio.sleep(0.005)
        self.restarts = int(len(self.prompts) >= self._lives)
        return await super().generate(request)


class UnstartableEngine(DiceEngine):
    """Never starts."""

    starts: ClassVar[int] = 0

    async def open(self) -> None:
        type(self).starts += 1
        raise EngineDead("no such device", final=True)


class SilentEngine(DiceEngine):
    """Takes questions and answers none, whatever their deadline."""

    async def generate(self, request: Request) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError


class RefusingEngine(DiceEngine):
    """Is always full."""

    async def generate(self, request: Request) -> Reply:
        raise Overloaded("the queue is full")


class RudeEngine(DiceEngine):
    """Raises what no engine may."""

    async def generate(self, request: Request) -> Reply:
        raise KeyError("oops")


class NotingEngine(DiceEngine):
    """Notes the ids of what it was asked, and where it was told to forget."""

    notes: ClassVar[list[str]] = []

    async def generate(self, request: Request) -> Reply:
        self.notes.append(request.id)
        await asyncio.sleep(0.005)
        return await super().generate(request)

    async def reset_prefix_cache(self) -> bool:
        self.notes.append("forget")
        return True
