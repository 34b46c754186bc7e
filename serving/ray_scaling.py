"""How many replicas Ray Serve keeps, by the questions that they have under way. Pure.

Ray counts calls, and with us a call carries many questions; so each replica tells their number.
"""

import math
from typing import Any

LOAD = "questions"
"""The metric's name."""

POLICY_PATH = "serving.ray_scaling:ByLoad"

BUSY_SHARE = 0.75
"""Of a replica's batch: with more under way on average, there should be one replica more."""


def wanted(loads: list[float], batch_limit: int, running: int) -> int:
    """Replicas for so much under way at each; as many as there are while none has told."""
    if not loads:
        return running
    return max(1, math.ceil(sum(loads) / (BUSY_SHARE * batch_limit)))


class ByLoad:
    """A policy of Ray Serve: called by its controller again and again."""

    def __init__(self, batch_limit: int) -> None:
        self._batch_limit = batch_limit

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        loads = (context.aggregated_metrics or {}).get(LOAD, {})
        running = int(context.current_num_replicas)
        return wanted(list(loads.values()), self._batch_limit, running), {}
