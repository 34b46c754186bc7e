"""How long an engine's step takes, by what is computed in it. Pure.

    seconds = base_s + per_token_s × tokens + per_request_s × requests

`tokens` are those computed in the step, prompt and output; `requests` those that took part. What is
known of an engine is a least-squares fit over its own steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple


class Step(NamedTuple):
    """One step as it was measured."""

    seconds: float
    tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """The seconds of a step."""

    base_s: float
    per_token_s: float
    per_request_s: float
    spread: tuple[float, ...] = ()
    """What steps took ÷ what the line says, in the order in which they came: a machine that is
    disturbed is so for a while. Empty: exactly what the line says."""

    def seconds(self, tokens: int, requests: int) -> float:
        """By the line, without the spread."""
        return self.base_s + self.per_token_s * tokens + self.per_request_s * requests


def simple(token_s: float, *, growth: float = 0.0, prompt_token_s: float = 0.0) -> StepTime:
    """A step of one request takes `token_s`, each further request adds the share `growth` of that,
    and each prompt token beyond a request's first `prompt_token_s`."""
    return StepTime(token_s * (1 - growth), prompt_token_s, token_s * growth - prompt_token_s)


def fit(steps: Sequence[Step]) -> StepTime:
    """The line nearest to the steps (least squares, no coefficient below 0) and their spread.

    Where tokens and requests always go together, the one that explains more has all of it. Raises
    ValueError without a step that took time.
    """
    total = math.fsum(step.seconds for step in steps)
    if not total > 0:
        raise ValueError("no step took any time")
    columns = ([1.0] * len(steps), [s.tokens for s in steps], [s.requests for s in steps])
    best, least = (0.0, 0.0, 0.0), math.inf
    for size in (3, 2, 1):
        for chosen in combinations(range(3), size):
            solved = _solve(chosen, columns, [step.seconds for step in steps])
            if solved is None or min(solved) < 0:
                continue
            error = math.fsum((_line(solved, step) - step.seconds) ** 2 for step in steps)
            if error < least * (1 - 1e-9):
                best, least = solved, error
    return StepTime(*best, tuple(step.seconds / _line(best, step) for step in steps))


def _line(coefficients: tuple[float, float, float], step: Step) -> float:
    base, per_token, per_request = coefficients
    return base + per_token * step.tokens + per_request * step.requests


def _solve(
    chosen: tuple[int, ...], columns: Sequence[Sequence[float]], seconds: Sequence[float]
) -> tuple[float, float, float] | None:
    """The coefficients of the chosen columns by the normal equations, the others 0; None where the
    columns say the same."""
    size = len(chosen)
    norms = [math.sqrt(_product(columns[at], columns[at])) for at in chosen]
    if not all(norms):
        return None
    units = [[x / norm for x in columns[at]] for at, norm in zip(chosen, norms, strict=True)]
    rows = [[_product(a, b) for b in (*units, seconds)] for a in units]
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(rows[row][at]))
        rows[at], rows[pivot] = rows[pivot], rows[at]
        if abs(rows[at][at]) < 1e-9:
            return None
        for row in range(size):
            if row != at:
                factor = rows[row][at] / rows[at][at]
                rows[row] = [x - factor * y for x, y in zip(rows[row], rows[at], strict=True)]
    found = [0.0, 0.0, 0.0]
    for at, column in enumerate(chosen):
        found[column] = rows[at][size] / rows[at][at] / norms[at]
    return found[0], found[1], found[2]


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(one, other, strict=True))
