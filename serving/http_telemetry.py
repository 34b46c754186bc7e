"""What is sampled of a server: snapshots with totals that begin when the engine is opened."""

import time
from collections.abc import AsyncIterator

from serving.dialect import Seen
from serving.engine import EngineSnapshot, Usage
from serving.snapshots import SnapshotQueue


class _Total:
    """Grows with a server's counter, over its restarts; what it counted before is not ours."""

    def __init__(self) -> None:
        self.value: int | None = None
        self._last: int | None = None

    def begin(self, *, at_zero: bool) -> None:
        """The counter begins anew: at zero, or wherever it is found."""
        self._last = 0 if at_zero else None

    def add(self, counter: int | None) -> None:
        if counter is None:
            return
        if self._last is None:
            self._last = counter
        # a counter that fell began anew
        grown = counter - self._last if counter >= self._last else counter
        self.value = (self.value or 0) + grown
        self._last = counter


class SampledTelemetry:
    """Snapshots of a server as it is looked at now and then.

    As long as a server tells no figures of its own, having none or behind a proxy, they tell what
    its answers told: requests inside it, and prompt tokens cached, if every whole answer says so.
    """

    def __init__(self) -> None:
        self.rejected = 0
        self._has_figures = False
        """The server told some."""
        self._queries = _Total()
        self._hits = _Total()
        self._preemptions = _Total()
        self._totals = (self._queries, self._hits, self._preemptions)
        self._told_queries = self._told_hits = 0
        self._is_told = True
        """By every answer so far."""
        self._queue = SnapshotQueue()

    def began(self) -> None:
        """We launched a server: it counts from zero."""
        for total in self._totals:
            total.begin(at_zero=True)

    def forget(self) -> None:
        """What the server counts up to the next look is none of the run's."""
        for total in self._totals:
            total.begin(at_zero=False)

    def answered(self, usage: Usage) -> None:
        """Take what one whole answer told."""
        if usage.prompt is None or usage.cached is None:
            self._is_told = False
        else:
            self._told_queries += usage.prompt
            self._told_hits += usage.cached

    def add(self, seen: Seen, in_flight: int) -> None:
        """Take one look, with so many requests of ours unanswered.

        A server that told figures before and tells none now could not be asked: no snapshot.
        """
        if seen.running is not None:
            self._has_figures = True
        elif self._has_figures:
            return
        self._queries.add(seen.prefix_queries)
        self._hits.add(seen.prefix_hits)
        self._preemptions.add(seen.preemptions)
        queries, hits = self._queries.value, self._hits.value
        if not self._has_figures and self._is_told:
            queries, hits = self._told_queries, self._told_hits
        snapshot = EngineSnapshot(
            at=time.monotonic(),
            source="sampled",
            running=seen.running if self._has_figures else in_flight,
            waiting=seen.waiting,
            kv_usage=seen.kv_usage,
            prefix_queries=queries,
            prefix_hits=hits,
            preemptions=self._preemptions.value,
            rejected=self.rejected,
        )
        self._queue.put((snapshot,))

    def close(self) -> None:
        """No more will come."""
        self._queue.close()

    def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        """As they come, until closed."""
        return self._queue.read()
