"""One round's pairings of a Swiss tournament, pure.

A round is a perfect matching of least weight, as Olafsson made it ("Weighted Matching in Chess
Tournaments", Journal of the Operational Research Society 41, 1990): first as few rematches as can
be, then opponents as close in points as can be, then within a score group its top half against its
bottom half, as in FIDE's Dutch system. A pair has both colours, so colours need no allotment.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

from scipy.optimize import LinearConstraint, milp
from scipy.sparse import csr_array

Two = tuple[str, str]


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
    player first. `met` counts the rounds in which two have met."""
    edges = list(combinations(range(len(ranked)), 2))
    rematches = [met.get(frozenset((ranked[a], ranked[b])), 0) for a, b in edges]
    least = _matching(len(ranked), edges, rematches, None)
    bound = sum(rematches[edge] for edge in least)
    costs = _costs(ranked, points, edges)
    chosen = _matching(len(ranked), edges, costs, (rematches, bound))
    return [(ranked[a], ranked[b]) for a, b in (edges[edge] for edge in chosen)]


def _costs(
    ranked: Sequence[str], points: Mapping[str, float], edges: Sequence[tuple[int, int]]
) -> list[int]:
    """Whole numbers: no sum of what is within score groups outweighs half a point between them."""
    group_of = {
        name: [n for n, other in enumerate(ranked) if points[other] == points[name]]
        for name in ranked
    }
    most = len(ranked) ** 2
    costs = []
    for a, b in edges:
        gap = round(2 * abs(points[ranked[a]] - points[ranked[b]]))
        half = len(group_of[ranked[a]]) // 2 or 1
        costs.append(gap * gap * most if gap else abs(b - a - half))
    return costs


def _matching(
    players: int,
    edges: Sequence[tuple[int, int]],
    costs: Sequence[int],
    bounded: tuple[Sequence[int], int] | None,
) -> list[int]:
    """The edges of a perfect matching of least cost, by integer programming; `bounded`: weights of
    edges and what they may add up to."""
    columns = [n for n, edge in enumerate(edges) for _ in edge]
    rows = [player for edge in edges for player in edge]
    ends = csr_array(([1.0] * len(rows), (rows, columns)), shape=(players, len(edges)))
    constraints = [LinearConstraint(ends, 1, 1)]
    if bounded is not None:
        constraints.append(LinearConstraint([bounded[0]], 0, bounded[1]))
    found = milp(
        costs, integrality=1, bounds=(0, 1), constraints=constraints, options={"mip_rel_gap": 0.0}
    )
    if found.x is None:
        raise ArithmeticError(f"no pairings were found: {found.message}")
    return [n for n, share in enumerate(found.x) if share > 0.5]
