"""When something happened, by the clock on the wall."""

import json
import time
from datetime import datetime

from arena.store import EventRow, RunClock


class WallTime:
    """Wall-clock times on the run's axis.

    The `process_start` events give them to a second. In the process that plays the run its own
    clock does better: its time is taken once, so that spans keep their order and lengths.
    """

    def __init__(self, created: str, clock: RunClock | None = None) -> None:
        self._zeros = [(0.0, datetime.fromisoformat(created).timestamp())]
        """From which run time on, and the wall time of the axis's zero, in seconds."""
        self._own_from = float("inf") if clock is None else clock.start
        if clock is not None:
            self._zeros.append((clock.start, time.time() - clock.now()))

    def note_start(self, event: EventRow) -> None:
        """Take a `process_start` event in."""
        detail = json.loads(event.detail_json)
        offset = float(detail["offset_s"])
        if offset < self._own_from:
            zero = datetime.fromisoformat(detail["wall"]).timestamp() - offset
            self._zeros.append((offset, zero))
            self._zeros.sort()

    def seconds(self, run_s: float) -> float:
        """Seconds since 1970 of a time of the run."""
        zero = next(zero for since, zero in reversed(self._zeros) if since <= max(run_s, 0.0))
        return zero + run_s

    def ns(self, run_s: float) -> int:
        """Nanoseconds since 1970 of a time of the run."""
        return round(self.seconds(run_s) * 1e9)
