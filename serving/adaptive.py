"""How many requests may be unfinished at once so that each is answered within its SLO.

Whatever is let in shares the engine, so by Little's law an answer takes `unfinished / rate` seconds
where `rate` answers come a second, and no more than `rate * slo_s` unfinished requests can be in
time. The cap aims at `SAFETY` of that and follows the rate as it is measured: once an engine slows
down, a cap that was right before misses every deadline. It

    doubles, or grows by one    once as many were answered as it holds, it having been full, all of
                                them in time, and fast enough to leave room for that many
    falls to rate * slo_s       when the rate that was measured allows clearly less
      * SAFETY
    is cut to `CUT` of itself   when the engine refuses a request, or one misses its SLO; those let
                                in before the last fall tell nothing new and are passed over

Pure: every time is handed in, by one clock in seconds that never runs backwards.
"""

from dataclasses import dataclass
from enum import StrEnum

SAFETY = 0.6
"""Share of `rate * slo_s` that is let in; the rest is for answers that take longer than most."""
CUT = 0.7

_WINDOW_S = 1.0
_FEW_ANSWERS = 10
"""A window with fewer goes on for as long as the SLO, where that is longer."""
_SLACK = 0.85
"""A measured rate lowers the cap only below this share of it: a second's noise is no news."""
_NEWEST = 0.5
"""Weight of the newest window in the rate."""
_NEWEST_ANSWER = 0.1
"""Weight of the newest answer in the seconds that the engine itself takes."""


class Why(StrEnum):
    """Why a cap changed."""

    DOUBLED = "full and in time, with room for twice as many"
    GREW = "full and in time, with room for one more"
    RATE = "the measured service rate allows fewer"
    MISSED = "a request missed the SLO"
    REFUSED = "the engine refused a request"


@dataclass(frozen=True, slots=True)
class CapChange:
    """One change of a cap."""

    at: float
    cap: int
    """From now on."""
    why: Why
    rate: float | None
    """Answers a second as last measured; None before the first measurement."""


class AdaptiveCap:
    """A cap on unfinished requests, from `least` (where it begins) to `most`.

    Whoever lets requests in calls `admit` for each, and `ended` once for each that it let in.
    """

    def __init__(self, slo_s: float, *, least: int = 1, most: int) -> None:
        if not 1 <= least <= most or slo_s <= 0:
            raise ValueError(f"need 1 <= least <= most and slo_s > 0: {least}, {most}, {slo_s}")
        self.slo_s = slo_s
        self.cap = least
        self.history: list[CapChange] = []
        self.rate: float | None = None
        """Answers a second that the engine gives while it is kept busy; None: not known yet."""
        self.service_s = 0.0
        """What an answer takes once the engine has the request, on the average of late."""
        self._least = least
        self._most = most
        self._unfinished = 0
        self._seen: float | None = None
        """Until when time has been counted."""
        self._was_busy = False
        """Whether the engine had enough to do, at last, for its answers to tell how fast it is.
        Those of one batch come at one time, and all of them are its work."""
        self._changed = self._lowered = float("-inf")
        self._begin_round()
        self._begin_window()

    def admit(self, at: float) -> bool:
        """Whether one more is let in; if so it counts as unfinished until it `ended`."""
        self._count_time(at)
        is_taken = self._unfinished < self.cap
        self._unfinished += is_taken
        self._was_full |= self._unfinished >= self.cap
        return is_taken

    def served(self, seconds: float) -> None:
        """The engine took so long for an answer, from being handed the request."""
        weight = _NEWEST_ANSWER if self.service_s else 1.0
        self.service_s += weight * (seconds - self.service_s)

    def refused(self, at: float, admitted: float) -> None:
        """The engine refused one that was let in at `admitted`, for want of room."""
        self._cut(at, admitted, Why.REFUSED)

    def ended(self, at: float, admitted: float, *, is_answered: bool) -> None:
        """One that was let in at `admitted` is finished, however it ended. One that took longer
        than the SLO missed it, whether it was answered or given up."""
        self._count_time(at)
        self._answers += is_answered and self._was_busy
        self._unfinished -= 1
        if at - admitted > self.slo_s:
            self._cut(at, admitted, Why.MISSED)
        elif is_answered:
            self._count_in_time(at, admitted)

    def can_be_in_time(self, at: float, admitted: float, ahead: int) -> bool:
        """Whether one that waits behind `ahead` answers can still be answered within the SLO, by
        what is known of the engine."""
        wait_s = 0.0
        if ahead and self.rate is not None:
            wait_s = ahead / self.rate if self.rate else float("inf")
        return at - admitted + wait_s + self.service_s <= self.slo_s

    def _begin_round(self) -> None:
        self._was_full = False
        self._in_time = 0
        self._in_time_s = 0.0

    def _begin_window(self) -> None:
        self._window_s = 0.0
        self._busy_s = 0.0
        self._answers = 0

    def _count_time(self, at: float) -> None:
        passed = 0.0 if self._seen is None else at - self._seen
        self._seen = at
        if passed:
            self._was_busy = self._unfinished * 2 >= self.cap
        self._window_s += passed
        self._busy_s += passed * self._was_busy
        limit_s = _WINDOW_S if self._answers >= _FEW_ANSWERS else max(_WINDOW_S, self.slo_s)
        if self._window_s >= limit_s:
            if self._busy_s >= self._window_s / 2:
                self._measured(at, self._answers / self._busy_s)
            self._begin_window()

    def _measured(self, at: float, rate: float) -> None:
        self.rate = rate if self.rate is None else self.rate + _NEWEST * (rate - self.rate)
        allowed = int(self.rate * self.slo_s * SAFETY)
        if allowed < self.cap * _SLACK:
            self._change(at, allowed, Why.RATE)

    def _count_in_time(self, at: float, admitted: float) -> None:
        """An answer in time; it counts towards growth if it was let in under the cap of now."""
        if admitted < self._changed:
            return
        self._in_time += 1
        self._in_time_s += at - admitted
        if self._in_time < self.cap:
            return
        mean_s, goal_s = self._in_time_s / self._in_time, self.slo_s * SAFETY
        if self._was_full and mean_s * 2 <= goal_s:
            self._change(at, self.cap * 2, Why.DOUBLED)
        elif self._was_full and mean_s * (self.cap + 1) <= goal_s * self.cap:
            self._change(at, self.cap + 1, Why.GREW)
        self._begin_round()

    def _cut(self, at: float, admitted: float, why: Why) -> None:
        self._begin_round()
        if admitted >= self._lowered:
            self._change(at, int(self.cap * CUT), why)

    def _change(self, at: float, cap: int, why: Why) -> None:
        cap = min(max(cap, self._least), self._most)
        if cap < self.cap:
            self._lowered = at
        if cap != self.cap:
            self.cap, self._changed = cap, at
            self.history.append(CapChange(at, cap, why, self.rate))
            self._begin_round()
