"""Bradley and Terry's ratings of a whole field, pure: a draw is half a win.

The first player's expected score is 1/(1 + 10^−((r_first − r_second + advantage)/400)), r in Elo
(Bradley and Terry, Biometrika 39, 1952; with a home advantage Davidson and Beaver, Biometrics 33,
1977), as in Ordo.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.linalg import pinv
from scipy.special import expit, gammaincc, log_expit

from arena.field import Design, Field, Game, Matrix, has_maximum, inverse, maximum

MISFIT = 0.001
"""Anchors do not fit games of a smaller chance than this (see `anchor_fit`)."""


def logistic(
    games: Iterable[Game],
    anchors: Mapping[str, float] | None = None,
    *,
    has_advantage: bool = True,
) -> Field:
    """Ratings in which every player's expected points are those obtained; a draw is half a win.

    Where that has no finite solution, as after a clean sweep, all games of the fit are penalised by
    Jeffreys' prior, which has one (Firth, Biometrika 80, 1993; Heinze and Schemper, Statistics in
    Medicine 21, 2002): of 10-0 it makes 10½-½, with an advantage to be found 5½-½ as either side.

    Errors are the sandwich's, by pair; the model's own overstate where there are draws, and know
    nothing of pairs. After a penalty, with fewer than CLUSTERS_PER_PARAMETER pairs a parameter, or
    where a player made the same of all its pairs (or two of theirs), the sandwich has too little to
    go by, and each player's error is the larger of the two.

    `anchors` are ratings held fixed, in Elo; those of players who did not play are ignored.
    ValueError on a score other than 0, 1/2 and 1 or a player against itself; ArithmeticError where
    the ratings cannot be found, as with anchors so far apart that a game's chances round to 0.
    """
    design = Design.of(games, anchors or {}, has_advantage)
    if not design.basis.shape[1]:
        nothing = np.zeros((0, 0))
        return design.field(np.zeros(0), nothing, nothing, draw=False, is_penalised=False)
    likelihood, free, is_penalised = _fit(design)
    fisher = inverse(likelihood.information(free))
    misses = design.scores - likelihood.chances(free)[design.row_of]
    sandwich = design.sandwich(fisher, likelihood.rows[design.row_of] * misses[:, None])
    return design.field(free, fisher, sandwich, draw=False, is_penalised=is_penalised)


def anchor_fit(games: Iterable[Game], anchors: Mapping[str, float]) -> float | None:
    """The chance of games that go against the anchors as much as these or more, were the anchors'
    ratings right; None where games link no two anchors.

    By the likelihood ratio to ratings without anchors (Wilks, Annals of Mathematical Statistics 9,
    1938), in which the games of a pair count as one. Raises as `logistic`.
    """
    played = list(games)
    if len(anchors) < 2:
        return None
    held, loose = (Design.of(played, fixed, has_advantage=True) for fixed in (anchors, {}))
    number = loose.basis.shape[1] - held.basis.shape[1]
    if not number:
        return None
    likelihood, free, _ = _fit(held)
    looser, at, _ = _fit(loose)
    gain = max(looser.value(at) - likelihood.value(free), 0.0)
    pairs = len({game.cluster for game in played})
    return float(gammaincc(number / 2, gain * pairs / len(played)))


def _fit(design: Design) -> tuple["_Likelihood", Matrix, bool]:
    """The free parameters of highest likelihood, and whether it had to be penalised."""
    rows = design.free_rows
    likelihood = _Likelihood(
        rows, design.offsets, design.total(np.ones(len(design.scores))), design.total(design.scores)
    )
    start = np.zeros(rows.shape[1])
    if not len(start):
        return likelihood, start, False
    least, most = design.extremes()
    if has_maximum(np.vstack([rows[most > 0], -rows[least < 1]])):
        return likelihood, maximum(likelihood.value, likelihood.slope, start), False
    found = maximum(likelihood.penalised_value, likelihood.penalised_slope, start)
    return likelihood, found, True


@dataclass(frozen=True, slots=True)
class _Likelihood:
    """Of free parameters, for rows that each stand for so many games and points."""

    rows: Matrix
    offsets: Matrix
    games: Matrix
    points: Matrix

    def chances(self, free: Matrix) -> Matrix:
        """The first player's expected score, by row."""
        return np.asarray(expit(self.offsets + self.rows @ free))

    def value(self, free: Matrix) -> float:
        logits = self.offsets + self.rows @ free
        won = self.points @ log_expit(logits)
        return float(won + (self.games - self.points) @ log_expit(-logits))

    def slope(self, free: Matrix) -> Matrix:
        return np.asarray(self.rows.T @ (self.points - self.games * self.chances(free)))

    def information(self, free: Matrix) -> Matrix:
        """Fisher's."""
        return np.asarray((self.rows.T * self._variances(free)) @ self.rows)

    def penalised_value(self, free: Matrix) -> float:
        """With Jeffreys' prior, the root of the information's determinant."""
        return self.value(free) + float(np.linalg.slogdet(self.information(free))[1]) / 2

    def penalised_slope(self, free: Matrix) -> Matrix:
        """Firth's: each game counts for half its leverage more of either result."""
        inverse = pinv(self.information(free))
        leverage = np.einsum("ij,jk,ik->i", self.rows, inverse, self.rows)
        more = leverage * self._variances(free) * (0.5 - self.chances(free))
        return np.asarray(self.slope(free) + self.rows.T @ more)

    def _variances(self, free: Matrix) -> Matrix:
        p = self.chances(free)
        return np.asarray(self.games * p * (1 - p))
