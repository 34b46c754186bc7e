"""One round's pairings of a Swiss tournament, pure.

A round is a perfect matching of least weight, as Olafsson made it ("Weighted Matching in Chess
Tournaments", Journal of the Operational Research Society 41, 1990): first as few rematches as can
be, then opponents as close in points as can be, then within a score group its top half against its
bottom half, as in FIDE's Dutch system. A pair has both colours, so colours need no allotment.

Each player's likeliest opponents alone are weighed at first, and all only where these cannot be
paired without a needless rematch.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import csr_array

Two = tuple[str, str]
Square = NDArray[np.int64]
"""Of each player with each, best-ranked first."""

LIKELIEST = 8
"""Opponents of a player that are weighed at first: those of least cost and those next in rank."""


def bye_of(ranked: Sequence[str], byes: Collection[str]) -> str | None:
    """Who sits out of an odd number: the last in rank with the fewest byes (FIDE C.04.1, 3)."""
    if len(ranked) % 2 == 0:
        return None
    had = list(byes)
    return min(reversed(ranked), key=had.count)


def pairings(
    ranked: Sequence[str], points: Mapping[str, float], met: Mapping[frozenset[str], int]
) -> list[Two]:
    """The pairings of an even number of players, best-ranked first, each with its better-ranked
    player first. `met` counts the rounds in which two have met. 500 players take a CPU a second or
    less, but tens of seconds where nearly everybody has met everybody."""
    if not ranked:
        return []
    had = np.array([points[name] for name in ranked])
    costs, rematches = _costs(had), _rematches(ranked, met)
    fewest = rematches[np.triu_indices(len(ranked), 1)].min()
    is_new = rematches == fewest
    likely = _likely(np.where(is_new, costs, costs.max() + 1))
    found = _matching(likely & is_new, costs, had) or _matching(is_new, costs, had)
    if found is None:
        everyone = np.ones_like(likely)
        least = _matching(everyone, rematches, had)
        assert least is not None
        bound = sum(int(rematches[two]) for two in least)
        found = _matching(everyone, costs, had, (rematches, bound))
    if found is None:
        raise ArithmeticError("no pairings were found")
    return [(ranked[a], ranked[b]) for a, b in found]


def _costs(points: NDArray[np.float64]) -> Square:
    """Whole numbers: no sum of what is within score groups outweighs half a point between them."""
    rank = np.arange(len(points))
    gap = np.rint(2 * np.abs(points[:, None] - points)).astype(np.int64)
    half = np.maximum((gap == 0).sum(axis=1) // 2, 1)
    within = np.abs(np.abs(rank[:, None] - rank) - half[:, None])
    return np.where(gap > 0, gap * gap * len(points) ** 2, within)


def _rematches(ranked: Sequence[str], met: Mapping[frozenset[str], int]) -> Square:
    at = {name: n for n, name in enumerate(ranked)}
    times = np.zeros((len(ranked), len(ranked)), np.int64)
    for two, rounds in met.items():
        if two <= at.keys():
            a, b = (at[name] for name in two)
            times[a, b] = times[b, a] = rounds
    return times


def _likely(costs: Square) -> NDArray[np.bool_]:
    rank = np.arange(len(costs))
    likely = np.abs(rank[:, None] - rank) <= LIKELIEST
    np.put_along_axis(likely, np.argsort(costs, axis=1, kind="stable")[:, :LIKELIEST], True, axis=1)
    return likely | likely.T


def _matching(
    may_meet: NDArray[np.bool_],
    costs: Square,
    points: NDArray[np.float64],
    bounded: tuple[Square, int] | None = None,
) -> list[tuple[int, int]] | None:
    """A perfect matching of least cost among those who may meet, by integer programming; None where
    there is none. `bounded`: weights, and what they may add up to."""
    one, two = np.nonzero(np.triu(may_meet, 1))
    if not len(one):
        return None
    edges = np.arange(len(one))
    ends = np.concatenate([one, two]), np.concatenate([edges, edges])
    each = csr_array((np.ones(2 * len(edges)), ends), shape=(len(points), len(edges)))
    constraints = [LinearConstraint(each, 1, 1), *_odd_groups(points, one, two)]
    if bounded is not None:
        weights, most = bounded
        constraints.append(LinearConstraint(weights[one, two], 0, most))
    found = milp(
        costs[one, two],
        integrality=1,
        bounds=(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    chosen = found.x > 0.5
    return list(zip(one[chosen].tolist(), two[chosen].tolist(), strict=True))


def _odd_groups(
    points: NDArray[np.float64], one: NDArray[np.intp], two: NDArray[np.intp]
) -> list[LinearConstraint]:
    """Of score groups side by side that hold an odd number of players, one must leave: implied by
    a matching (Edmonds, 1965), but the solver is slow without being told."""
    borders = [0, *(np.flatnonzero(np.diff(points)) + 1), len(points)]
    leaving = [
        ((low <= one) & (one < high)) != ((low <= two) & (two < high))
        for n, low in enumerate(borders)
        for high in borders[n + 1 :]
        if (high - low) % 2
    ]
    return [LinearConstraint(np.array(leaving, float), 1, np.inf)] if leaving else []
