"""An engine of one's own that computes in steps, and tells each."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from serving import EngineSnapshot, Reply, Request, Timings, Usage
from serving.step_time import StepTime
from tests.examples.own_engine import DiceEngine

TIME = StepTime(base_s=0.004, per_token_s=0.0001, per_request_s=0.0005)
UNCACHED, OUTPUT = 10, 3


@dataclass(eq=False)
class _Asked:
    begun: float = 0.0
    first: float = 0.0
    written: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)


class SteppingEngine(DiceEngine):
    """Continuous batching, in real time."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._batch: list[_Asked] = []
        self._steps: asyncio.Queue[EngineSnapshot] = asyncio.Queue()
        self._work: asyncio.Task[None] | None = None

    async def generate(self, request: Request) -> Reply:
        admitted = time.monotonic()
        text = (await super().generate(request)).text
        asked = _Asked()
        self._batch.append(asked)
        if self._work is None:
            self._work = asyncio.create_task(self._compute())
        await asked.done.wait()
        now = time.monotonic()
        queue_s, prefill_s = asked.begun - admitted, asked.first - asked.begun
        timings = Timings(admitted, admitted, None, now, queue_s, prefill_s, now - asked.first)
        usage = Usage(400 + UNCACHED, OUTPUT, 400)
        return Reply(text, (await super().generate(request)).finish, usage, timings)

    async def _compute(self) -> None:
        while batch := list(self._batch):
            tokens = sum(1 if asked.written else UNCACHED for asked in batch)
            began = time.monotonic()
            await asyncio.sleep(TIME.seconds(tokens, len(batch)))
            now = time.monotonic()
            self._steps.put_nowait(
                EngineSnapshot(
                    now, "per_step", len(batch), 0, step_requests=len(batch), step_tokens=tokens
                )
            )
            for asked in batch:
                asked.begun = asked.begun or began
                asked.first = asked.first or now
                asked.written += 1
                if asked.written == OUTPUT:
                    self._batch.remove(asked)
                    asked.done.set()
        self._work = None

    async def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        while True:
            yield await self._steps.get()
