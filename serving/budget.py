"""Whether an answer that is not whole used up its player's own budget, of time or of tokens. Pure.

What an engine's queue, a pause of it or its limits took is nobody's.
"""

from collections.abc import Iterable
from itertools import pairwise

from serving.engine import Finish, Request

_PAUSE_S = 1.0
"""An engine at work is heard of at least this often."""

_SLACK = 0.05
_SLACK_S = 0.25


def used_its_time(begun: float, heard: Iterable[float], ended: float, deadline_s: float) -> bool:
    """True if the answer was computed for all of `deadline_s`, but for a little.

    `begun` is when its computation began, `ended` when the deadline passed, and `heard` when the
    engine was seen at work, in order, on one clock. Of a pause between two of these only the first
    second counts, and no more than a quarter of the deadline: after that the engine stood still.
    """
    quarter_s = deadline_s / 4
    pause_s = min(_PAUSE_S, quarter_s)
    slack_s = min(max(_SLACK_S, _SLACK * deadline_s), quarter_s)
    times = [begun, *(at for at in heard if at > begun), ended]
    own_s = sum(min(later - earlier, pause_s) for earlier, later in pairwise(times))
    return own_s >= deadline_s - slack_s


def cut_short(request: Request, finish: Finish | None, completion: int | None) -> str | None:
    """Words for a free answer that the engine cut before its `max_tokens`, as where a context or a
    cache is too small for it; None for any other. `completion` None: the engine does not tell."""
    if request.choices is not None or finish is not Finish.LENGTH or completion is None:
        return None
    if completion >= request.max_tokens:
        return None
    return f"the engine cut the answer after {completion} of {request.max_tokens} tokens"
