"""When too many games end by what is no play, pure: a run stops before it is worthless."""

from collections import deque

WINDOW, LEAST = 50, 10
"""Games judged by, and as few as any judgement takes."""


class FaultShare:
    """The share of the last games that a broken engine or the infrastructure ended."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._last: deque[bool] = deque(maxlen=WINDOW)

    def note(self, is_faulty: bool) -> str | None:
        """Count a game; why the run is to stop, if it is."""
        self._last.append(is_faulty)
        faulty, games = sum(self._last), len(self._last)
        if games < LEAST or faulty <= self._most * games:
            return None
        return (
            f"{faulty} of the last {games} games ended by a UCI engine's crash, silence or illegal "
            "move, or were left for a fault of the infrastructure, more than "
            f"faults.max_fault_share = {self._most:g}"
        )
