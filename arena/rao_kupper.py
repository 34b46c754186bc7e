"""Rao and Kupper's ratings of a whole field, pure: a draw has a chance of its own."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import expit, log_expit

from arena.bradley_terry import logistic
from arena.field import Design, Field, Game, Matrix, has_maximum, inverse, maximum


def rao_kupper(
    games: Iterable[Game],
    anchors: Mapping[str, float] | None = None,
    *,
    has_advantage: bool = True,
) -> Field:
    """Ratings by maximum likelihood where draws have a chance of their own.

    With x the difference in Elo and the advantage, a win has the chance 1/(1 + 10^((d − x)/400)), a
    loss 1/(1 + 10^((d + x)/400)), and a draw the rest; d is fitted too (Rao and Kupper, JASA 62,
    1967; BayesElo, whose printed ratings are these times 4y/(1 + y)², y = 10^(−d/400)). Where no
    finite maximum exists, half a win, half a draw and half a loss are added for each two that met,
    with each of them first that was. Errors, anchors and what is raised as in `logistic`.
    """
    played = list(games)
    if all(game.score != 0.5 for game in played):
        return replace(logistic(played, anchors, has_advantage=has_advantage), draw_elo=0.0)
    design = Design.of(played, anchors or {}, has_advantage)
    wins, losses, drawn = (design.scores == score for score in (1, 0, 0.5))
    results = _Results(
        design.free_rows, design.offsets, *(design.total(each) for each in (~losses, ~wins, drawn))
    )
    is_penalised = not has_maximum(results.ordered())
    fitted = results.penalised() if is_penalised else results
    at = maximum(fitted.value, fitted.slope, np.zeros(design.basis.shape[1] + 1))
    free = np.append(at[:-1], _draw_logit(at[-1]))
    fisher = inverse(fitted.information(free))
    rows, offsets = design.free_rows[design.row_of], design.offsets[design.row_of]
    single = _Results(rows, offsets, ~losses, ~wins, drawn)
    sandwich = design.sandwich(fisher, single.gradients(free))
    return design.field(free, fisher, sandwich, draw=True, is_penalised=is_penalised)


def _draw_logit(u: float) -> float:
    """d in logits from u = log(e^(2d) − 1), which is free to be any number."""
    return float(np.logaddexp(0.0, u)) / 2


@dataclass(frozen=True, slots=True)
class _Results:
    """Results as Rao and Kupper's likelihood takes them: since a draw's chance is
    win · loss · (e^(2d) − 1), it counts as a win, as a loss, and once for the factor."""

    rows: Matrix
    offsets: Matrix
    unlost: Matrix
    """How many wins and draws each row has."""
    unwon: Matrix
    draws: Matrix

    def penalised(self) -> "_Results":
        """With half a win, half a draw and half a loss more of each row."""
        more = self.unlost + 1, self.unwon + 1, self.draws + 0.5
        return _Results(self.rows, self.offsets, *more)

    def ordered(self) -> Matrix:
        """Rows of the ratings and d that a rising likelihood must not lower."""
        draws = np.ones((len(self.rows), 1))
        above, below = np.hstack([self.rows, draws]), np.hstack([-self.rows, draws])
        has_win, has_loss = self.unlost > self.draws, self.unwon > self.draws
        drawn = self.draws > 0
        return np.vstack([-below[has_win], -above[has_loss], above[drawn], below[drawn]])

    def _misses(self, free: Matrix) -> tuple[Matrix, Matrix]:
        """Chances of no win and of no loss."""
        logits = self.offsets + self.rows @ free[:-1]
        return np.asarray(expit(free[-1] - logits)), np.asarray(expit(free[-1] + logits))

    def gradients(self, free: Matrix) -> Matrix:
        """Of each result's log-likelihood by the ratings and d."""
        no_win, no_loss = self._misses(free)
        up, down = self.unlost * no_win, self.unwon * no_loss
        by_draw = self.draws * 2 / -math.expm1(-2 * free[-1]) - up - down
        return np.column_stack([self.rows * (up - down)[:, None], by_draw])

    def value(self, at: Matrix) -> float:
        """The log-likelihood at ratings and u."""
        logits, draw = self.offsets + self.rows @ at[:-1], _draw_logit(at[-1])
        won, lost = log_expit(logits - draw), log_expit(-logits - draw)
        return float(self.unlost @ won + self.unwon @ lost + self.draws.sum() * at[-1])

    def slope(self, at: Matrix) -> Matrix:
        """The likelihood's, by the ratings and u."""
        no_win, no_loss = self._misses(np.append(at[:-1], _draw_logit(at[-1])))
        up, down = self.unlost * no_win, self.unwon * no_loss
        by_u = self.draws.sum() - (up + down).sum() * expit(at[-1]) / 2
        return np.append(self.rows.T @ (up - down), by_u)

    def information(self, free: Matrix) -> Matrix:
        """Observed: the negative Hessian by the ratings and d."""
        no_win, no_loss = self._misses(free)
        total = np.zeros((len(free), len(free)))
        ones = np.ones((len(self.rows), 1))
        for rows, weights in (
            (np.hstack([self.rows, -ones]), self.unlost * no_win * (1 - no_win)),
            (np.hstack([-self.rows, -ones]), self.unwon * no_loss * (1 - no_loss)),
        ):
            total += (rows.T * weights) @ rows
        total[-1, -1] += self.draws.sum() / math.sinh(free[-1]) ** 2
        return total
