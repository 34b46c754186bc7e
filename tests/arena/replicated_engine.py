"""An engine of one's own that is several replicas, and tells which of them answered."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from serving import EngineSnapshot, Reply, Request, Usage
from tests.examples.own_engine import DiceEngine

CONFIG = """
name = "replicas"
seed = 3
[engines.main]
kind = "tests.arena.replicated_engine:ReplicatedEngine"
max_concurrent = 12
{engine}
[[agents]]
name = "one"
kind = "llm"
engine = "main"
[[agents]]
name = "two"
kind = "llm"
engine = "main"
[tournament]
games = ["chess"]
pairs = 6
parallel_matches = 12
max_plies = {max_plies}
[pace]
move_period_seconds = {period}
"""
"""A run on it; `engine` is more of its table."""

DECODE_S = 0.01
CACHED, UNCACHED = 90, 10


class ReplicatedEngine(DiceEngine):
    """A match stays at the replica that it came to first, but for the first one that has asked
    `moved_after` times, which goes on at the next replica. The replica named last tells thrice the
    time of the others. Nothing is really computed."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._names: list[str] = config.get("replicas", ["k3v9x2ab", "q7m1z0cd", "10.0.0.7:8000"])
        self._moved_after = int(config.get("moved_after", 10))
        self._places: dict[str, int] = {}
        self._asked: Counter[str] = Counter()
        self._moved: str | None = None
        self._computed: Counter[str] = Counter()
        self._steps: asyncio.Queue[EngineSnapshot] = asyncio.Queue()

    def _replica(self, match_id: str) -> str:
        place = self._places.setdefault(match_id, len(self._places))
        self._asked[match_id] += 1
        if self._moved is None and self._asked[match_id] > self._moved_after:
            self._moved = match_id
        return self._names[(place + (match_id == self._moved)) % len(self._names)]

    async def generate(self, request: Request) -> Reply:
        reply = await super().generate(request)
        name = self._replica(request.match_id)
        slowness = 3 if name == self._names[-1] else 1
        self._computed[name] += CACHED + UNCACHED
        self._steps.put_nowait(self._snapshot(name))
        times = replace(reply.timings, queue_s=0.0, prefill_s=0.0, decode_s=DECODE_S * slowness)
        usage = Usage(CACHED + UNCACHED, reply.usage.completion, CACHED)
        return replace(reply, timings=times, usage=usage, replica=name)

    def _snapshot(self, name: str) -> EngineSnapshot:
        return EngineSnapshot(
            time.monotonic(),
            "per_step",
            step_requests=1,
            step_tokens=UNCACHED,
            waiting=0,
            kv_usage=0.25,
            prefix_queries=self._computed[name],
            preemptions=0,
            rejected=0,
            replica=name,
        )

    async def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        while not (self._closed.is_set() and self._steps.empty()):
            yield await self._steps.get()
