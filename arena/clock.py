"""What a player may take for its moves, pure: seconds left before a move to seconds left after it.

One number is a side's whole state, and is stored with each ply, so a resumed match goes on with the
clock it had. A move that takes exactly what was left is in time.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from agents import Attempt, charged_seconds

ClockKind = Literal["move", "fischer", "byoyomi"]
_ROUNDING_S = 1e-6
"""Stored times are differences of large numbers."""

_ROUNDING = 1e-9
"""Of a sum of decimal fractions, in periods."""


@dataclass(frozen=True, slots=True)
class ClockRules:
    """A time control; all times in seconds."""

    kind: ClockKind
    base_s: float
    """Of each move, or of the game."""
    increment_s: float = 0.0
    """Fischer: given after each move in time."""
    byoyomi_s: float = 0.0
    """One period: when the base is used up, a move that fits in one costs nothing."""
    periods: int = 1

    @property
    def start_s(self) -> float:
        """What a side has for its first move: in byoyomi, base and all periods."""
        return self.base_s + self._reserve_s

    @property
    def _reserve_s(self) -> float:
        return self.byoyomi_s * self.periods if self.kind == "byoyomi" else 0.0

    def after(self, left_s: float, spent_s: float) -> float | None:
        """What is left after a move that took `spent_s`; None where the flag fell."""
        if spent_s > left_s:
            return None
        if self.kind == "move":
            return self.base_s
        if self.kind == "fischer":
            return left_s - spent_s + self.increment_s
        base = left_s - self._reserve_s
        if spent_s <= base:
            return left_s - spent_s
        # periods that are begun stay whole until they are overrun
        periods = self.periods if base > 0 else round(left_s / self.byoyomi_s)
        used = (spent_s - max(base, 0.0)) / self.byoyomi_s
        overrun = min(max(math.ceil(used - _ROUNDING) - 1, 0), periods - 1)
        return (periods - overrun) * self.byoyomi_s

    def in_words(self) -> str:
        """As PGN's TimeControl tag has it, where it has a form: `300+2`, `*30` (a move); byoyomi as
        `300+3x10`, for which there is none."""
        if self.kind == "move":
            return f"*{self.base_s:g}"
        if self.kind == "fischer":
            return f"{self.base_s:g}+{self.increment_s:g}"
        return f"{self.base_s:g}+{self.periods}x{self.byoyomi_s:g}"


def spent_seconds(attempts: Iterable[Attempt], thought_s: float) -> float:
    """What a ply costs its player: all tries that were its own, as engines report them; of a player
    without replies, `thought_s`, the time that it took. Tries that the infrastructure cut off, and
    its queues, are free."""
    replies = [try_.reply for try_ in _own(attempts) if try_.reply is not None]
    if not replies:
        return thought_s
    return sum(charged_seconds(reply.timings) for reply in replies)


def _own(attempts: Iterable[Attempt]) -> list[Attempt]:
    return [a for a in attempts if a.fault is None or a.is_own_failure]


def could_leave(
    rules: ClockRules, left_s: float, attempts: Iterable[Attempt], after_s: float
) -> bool:
    """Whether a ply with these tries can have left `after_s` of `left_s`, seconds. What a player
    without replies took is not known: it can have taken anything that it had."""
    tries = list(attempts)
    if all(try_.reply is None for try_ in _own(tries)):
        least, most = rules.after(left_s, left_s), rules.after(left_s, 0.0)
        if least is None or most is None:
            return False
        return least - _ROUNDING_S <= after_s <= most + _ROUNDING_S
    spent_s = spent_seconds(tries, 0.0)
    may_be = (rules.after(left_s, spent_s + by) for by in (0.0, -_ROUNDING_S, _ROUNDING_S))
    return any(after is not None and abs(after - after_s) <= 2 * _ROUNDING_S for after in may_be)


def could_fall(left_s: float, attempts: Iterable[Attempt]) -> bool:
    """Whether these tries used up what was left, seconds."""
    return spent_seconds(attempts, 0.0) >= left_s - _ROUNDING_S


def fell(attempts: Iterable[Attempt], spent_s: float, left_s: float) -> str:
    """Why a flag fell, in words: the time taken, its parts where they are known, what was left."""
    own = _own(attempts)
    times = [try_.reply.timings for try_ in own if try_.reply is not None]
    parts = ""
    if times and all(t.prefill_s is not None and t.decode_s is not None for t in times):
        prefill = sum(t.prefill_s or 0.0 for t in times)
        decode = sum(t.decode_s or 0.0 for t in times)
        parts = f" ({prefill:.2f} s prefill, {decode:.2f} s decode)"
    num_tries = sum(not try_.is_thought for try_ in own if try_.reply is not None)
    tries = f" in {num_tries} tries" if num_tries > 1 else ""
    return f"its move took {spent_s:.2f} s{tries}{parts}, and {left_s:.2f} s were left"
