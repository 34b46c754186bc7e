"""What the models of a whole field share, pure: its games as a linear design, and its ratings.

Ratings and errors are in Elo; ratings are known up to a constant, which anchors fix, or else their
mean is 0.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag, eigh, helmert
from scipy.optimize import linprog, minimize, root
from scipy.sparse.csgraph import connected_components
from scipy.special import ndtr

from arena.pairwise import ELO_PER_LOGIT, Z95, Estimate

Matrix = NDArray[np.float64]

CLUSTERS_PER_PARAMETER = 10
"""With fewer pairs than these for each rating fitted, the larger of the two errors is taken."""
_NO_SCATTER = 1e-9
"""A variance by the sandwich below this share of the model's is 0 but for rounding."""


class Game(NamedTuple):
    """A game that counts, from the first player's side."""

    first: str
    second: str
    score: float
    """The first player's: 0, 1/2 or 1."""
    cluster: str
    """Games of one pair, which share an opening, share this; their errors are not independent."""


@dataclass(frozen=True, slots=True)
class Field:
    """Ratings of all who played, in Elo."""

    ratings: Mapping[str, float]
    """By name, in alphabetical order."""
    groups: tuple[tuple[str, ...], ...]
    """Players that games link, anchors counting as linked; nothing is known across groups, each of
    which has a mean of its own, or anchors."""
    advantage: float | None
    """Of moving first; None where it was not fitted or the games cannot tell it."""
    advantage_error: float | None
    """Half the width of its 95 % interval."""
    draw_elo: float | None
    """Rao and Kupper's: half the width of the band of draws. None in the logistic model."""
    is_penalised: bool
    """Whether the likelihood alone has no finite maximum, so that a penalty made these ratings."""
    fisher: Matrix
    """Covariance by the model, Elo², of the ratings in order and then of the other parameters."""
    sandwich: Matrix
    """The same from how the pairs in fact scattered: H⁻¹·M·H⁻¹ (Huber; White)."""
    covariance: Matrix
    """The one of the two to use (see `logistic`)."""
    failure: str | None = None
    """Why there are no ratings; None where there are, or nobody played."""

    @classmethod
    def unrated(cls, failure: str) -> "Field":
        """Without ratings."""
        nothing = np.zeros((0, 0))
        return cls({}, (), None, None, None, False, nothing, nothing, nothing, failure)

    def error(self, name: str) -> float:
        """Half the width of the rating's 95 % interval; 0 of an anchor. KeyError for one who did
        not play."""
        at = self._at(name)
        return Z95 * _root(self.covariance[at, at])

    def difference(self, one: str, two: str) -> Estimate | None:
        """By how much `one` is rated above `two`; None where they cannot be compared."""
        variance = self._variance(one, two)
        if variance is None:
            return None
        value = self.ratings[one] - self.ratings[two]
        reach = Z95 * _root(variance)
        return Estimate(value, value - reach, value + reach)

    def los(self, one: str, two: str) -> float | None:
        """The chance that `one` is better than `two`; None where they cannot be compared, and
        between two anchors."""
        variance = self._variance(one, two)
        if not variance:
            return None
        return float(ndtr((self.ratings[one] - self.ratings[two]) / _root(variance)))

    def los_matrix(self) -> list[list[float | None]]:
        """`los` of each over each, in the order of the ratings."""
        return [[self.los(one, two) for two in self.ratings] for one in self.ratings]

    def _variance(self, one: str, two: str) -> float | None:
        i, j = self._at(one), self._at(two)
        if i == j or not any({one, two} <= set(group) for group in self.groups):
            return None
        both = self.covariance
        return max(float(both[i, i] + both[j, j] - 2 * both[i, j]), 0.0)

    def _at(self, name: str) -> int:
        return dict(zip(self.ratings, range(len(self.ratings)), strict=True))[name]


def _root(variance: float) -> float:
    return math.sqrt(max(float(variance), 0.0))


@dataclass(frozen=True, slots=True)
class Design:
    """How free parameters, in logits, make ratings and logits of games.

    Every player's rating and then the advantage are `start` (Elo) and `basis @ free`.
    """

    names: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    rows: Matrix
    """For each two that met, with one of them first: 1 for it, −1 for the other, 1 for the
    advantage."""
    row_of: NDArray[np.intp]
    """Of each game."""
    scores: Matrix
    clusters: NDArray[np.intp]
    start: Matrix
    basis: Matrix
    has_advantage: bool

    @classmethod
    def of(
        cls, games: Iterable[Game], anchors: Mapping[str, float], has_advantage: bool
    ) -> "Design":
        played = list(games)
        for game in played:
            if game.score not in (0, 0.5, 1) or game.first == game.second:
                raise ValueError(f"two players and a score of 0, 0.5 or 1, not {game}")
        names = tuple(sorted({name for game in played for name in game[:2]}))
        at = {name: i for i, name in enumerate(names)}
        met = {game[:2]: 0 for game in played}
        rows = np.zeros((len(met), len(names) + 1))
        for row, (first, second) in enumerate(met):
            met[first, second] = row
            rows[row, [at[first], at[second], -1]] = 1, -1, 1
        fixed = {name: elo for name, elo in anchors.items() if name in at}
        groups = _groups(names, rows, fixed)
        start = np.zeros(len(names) + 1)
        for group in groups:
            held = [fixed[name] for name in group if name in fixed]
            for name in group if held else ():
                start[at[name]] = fixed.get(name, sum(held) / len(held))
        free = _free(names, groups, fixed)
        both = block_diag(free, [[1.0]])
        basis = np.vstack([free, np.zeros((1, free.shape[1]))])
        gram = rows.T @ rows
        # where the same one always moved first, the advantage is part of the difference
        is_told = _rank(both.T @ gram @ both) > _rank(basis.T @ gram @ basis)
        return cls(
            names=names,
            groups=groups,
            rows=rows,
            row_of=np.array([met[game[:2]] for game in played], np.intp),
            scores=np.array([game.score for game in played], float),
            clusters=np.unique([game.cluster for game in played], return_inverse=True)[1],
            start=start,
            basis=both if has_advantage and is_told else basis,
            has_advantage=has_advantage and is_told,
        )

    @property
    def free_rows(self) -> Matrix:
        return np.asarray(self.rows @ self.basis)

    @property
    def offsets(self) -> Matrix:
        """Of the rows' logits, by anchors."""
        return np.asarray(self.rows @ self.start) / ELO_PER_LOGIT

    def has_scatter(self, fisher: Matrix, sandwich: Matrix) -> bool:
        """Whether there are pairs enough, and pairs that differ enough, to tell by the sandwich of
        free parameters how results scatter: for each player, and for each difference."""
        free = self.basis.shape[1] - self.has_advantage
        pairs = int(self.clusters.max(initial=-1)) + 1
        if not free or pairs < CLUSTERS_PER_PARAMETER * len(fisher):
            return False
        least = eigh(sandwich[:free, :free], fisher[:free, :free], eigvals_only=True)[0]
        return bool(least > _NO_SCATTER) and self._differs_by_pair()

    def _differs_by_pair(self) -> bool:
        """Whether no player made the same of all its pairs."""
        sides = self.rows[:, :-1]
        both = (sides.argmax(axis=1)[self.row_of], sides.argmin(axis=1)[self.row_of])
        players = np.concatenate(both)
        at = np.tile(self.clusters, 2) * len(self.names) + players
        pairs, of_pair = np.unique(at, return_inverse=True)
        points = np.bincount(of_pair, np.concatenate([self.scores, 1 - self.scores]))
        shares = points / np.bincount(of_pair)
        least, most = np.ones(len(self.names)), np.zeros(len(self.names))
        np.minimum.at(least, pairs % len(self.names), shares)
        np.maximum.at(most, pairs % len(self.names), shares)
        return bool(np.all(least < most))

    def extremes(self) -> tuple[Matrix, Matrix]:
        """The first player's lowest and highest score of each row."""
        least, most = np.ones(len(self.rows)), np.zeros(len(self.rows))
        np.minimum.at(least, self.row_of, self.scores)
        np.maximum.at(most, self.row_of, self.scores)
        return least, most

    def total(self, of_games: Matrix) -> Matrix:
        """A number of each game, added up by row."""
        return np.asarray(np.bincount(self.row_of, of_games, len(self.rows)), float)

    def field(
        self, free: Matrix, fisher: Matrix, sandwich: Matrix, *, draw: bool, is_penalised: bool
    ) -> Field:
        """The field at free parameters (the draw parameter last) with covariances of theirs."""
        basis = block_diag(self.basis, [[1.0]]) if draw else self.basis
        start = np.append(self.start, 0.0) if draw else self.start
        whole = start + basis @ free * ELO_PER_LOGIT
        covariances = [basis @ each @ basis.T * ELO_PER_LOGIT**2 for each in (fisher, sandwich)]
        if is_penalised or not self.has_scatter(fisher, sandwich):
            larger = np.sqrt(_spread(covariances[1]) / _spread(covariances[0]))
            stretch = np.maximum(larger, 1.0)
            used = covariances[0] * np.outer(stretch, stretch)
        else:
            used = covariances[1]
        players = len(self.names)
        return Field(
            ratings=dict(zip(self.names, whole.tolist()[:players], strict=True)),
            groups=self.groups,
            advantage=float(whole[players]) if self.has_advantage else None,
            advantage_error=self._advantage_error(used, covariances[0]),
            draw_elo=float(whole[-1]) if draw else None,
            is_penalised=is_penalised,
            fisher=covariances[0],
            sandwich=covariances[1],
            covariance=used,
        )

    def _advantage_error(self, used: Matrix, fisher: Matrix) -> float | None:
        """By the covariance in use; by the larger of it and the model's where those who moved first
        made the same of every pair, as where each pair has one winner: no scatter is seen then."""
        if not self.has_advantage:
            return None
        at = len(self.names)
        shares = np.bincount(self.clusters, self.scores) / np.bincount(self.clusters)
        has_scatter = shares.min() < shares.max()
        return Z95 * _root(used[at, at] if has_scatter else max(used[at, at], fisher[at, at]))

    def sandwich(self, inverse: Matrix, scores: Matrix) -> Matrix:
        """`inverse` around the scatter of the games' scores (gradients), added up by pair."""
        sums = np.zeros((int(self.clusters.max()) + 1, scores.shape[1]))
        np.add.at(sums, self.clusters, scores)
        return np.asarray(inverse @ (sums.T @ sums) @ inverse)


def _spread(covariance: Matrix) -> Matrix:
    """Variances, with a crumb in place of an anchor's 0."""
    return np.maximum(np.diag(covariance), 1e-9)


def _rank(gram: Matrix) -> int:
    return int(np.linalg.matrix_rank(gram, hermitian=True)) if gram.size else 0


def _groups(
    names: Sequence[str], rows: Matrix, anchors: Mapping[str, float]
) -> tuple[tuple[str, ...], ...]:
    links = np.abs(rows[:, :-1].T @ rows[:, :-1])
    fixed = [i for i, name in enumerate(names) if name in anchors]
    links[np.ix_(fixed, fixed)] = 1
    number, labels = connected_components(links, directed=False)
    return tuple(
        tuple(name for name, label in zip(names, labels, strict=True) if label == group)
        for group in range(number)
    )


def _free(
    names: Sequence[str], groups: Sequence[Sequence[str]], anchors: Mapping[str, float]
) -> Matrix:
    """Directions in which ratings move: mean 0 in a group without anchors, else all but them."""
    columns = [np.zeros((len(names), 0))]
    for group in groups:
        at = [names.index(name) for name in group]
        moving = [i for i in at if names[i] not in anchors]
        block = np.zeros((len(names), len(moving) - (len(moving) == len(at))))
        if len(moving) == len(at):
            block[at] = helmert(len(at)).T
        else:
            block[moving] = np.eye(len(moving))
        columns.append(block)
    return np.hstack(columns)


def has_maximum(kept: Matrix) -> bool:
    """Whether every direction that raises the logit of one `kept` row lowers another's: then, and
    only then, a likelihood of such rows, of full rank, has a finite maximum (Albert and Anderson,
    Biometrika 71, 1984; found by linear programming as Konis did, 2007)."""
    rows = np.unique(kept, axis=0)
    found = linprog(-rows.sum(axis=0), A_ub=-rows, b_ub=np.zeros(len(rows)), bounds=(-1, 1))
    return bool(found.fun > -1e-7)


def inverse(information: Matrix) -> Matrix:
    """A covariance; ArithmeticError where the games tell so little that there is none."""
    try:
        found = np.asarray(np.linalg.inv(information))
        np.linalg.cholesky(found)  # raises where rounding left no covariance
        return found
    except np.linalg.LinAlgError:
        raise ArithmeticError("the ratings have no errors: the games tell too little") from None


def maximum(
    value: Callable[[Matrix], float], slope: Callable[[Matrix], Matrix], start: Matrix
) -> Matrix:
    """Where a log-likelihood is highest: close to it by BFGS, then to rounding as a root of its
    slope. ArithmeticError where that is not reached."""
    near = minimize(lambda at: -value(at), start, jac=lambda at: -slope(at), options={"gtol": 1e-3})
    found = root(slope, near.x, tol=1e-13)
    if not np.abs(slope(found.x)).max(initial=0.0) < 1e-5:
        raise ArithmeticError(f"the ratings were not found: {found.message}")
    return np.asarray(found.x)
