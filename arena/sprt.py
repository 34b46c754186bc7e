"""Sequential probability ratio tests of a match, pure.

The question is whether a player is `elo1` better than the other rather than `elo0`. Bins are those
of `arena.pairwise`: (losses, draws, wins) of games, or (LL, LD, WL + DD, WD, WW) of pairs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, fixed_point
from scipy.special import log_ndtr, ndtr

from arena.pairwise import (
    NELO_PER_T,
    Estimate,
    expected_score,
    has_normal_score,
    moments,
    pairwise,
    values_of,
)

Model = Literal["logistic", "normalized", "bayes_elo", "cutechess"]
"""What the bounds are: Elo; normalised Elo; BayesElo as fastchess tests it, and as cutechess does,
whose bounds are Elo near 0 and are brought to BayesElo by the draws."""
State = Literal["accept", "reject", "continue"]
"""Of H1, that the player is `elo1` better, against H0, that it is `elo0` better."""

_EMPTY_BIN = 1e-3
"""What an empty bin counts as (fastchess and fishtest)."""
FURTHEST_ELO = 2000.0
"""Bounds lie within ± this; so does an estimate after a stop."""
FURTHEST_NELO = 200.0
"""The same of normalised Elo: from 231 on some counts of pairs have no solution."""
LEAST_GAP = 0.01
"""Elo between the bounds, at least."""
LEAST_RATE = 1e-6
"""Of errors."""


def furthest(model: Model) -> float:
    """How far from 0 a model's bounds may lie."""
    return FURTHEST_NELO if model == "normalized" else FURTHEST_ELO


@dataclass(frozen=True, slots=True)
class Sprt:
    """A test with its bounds and error rates.

    ValueError where they make none: `elo1` lies LEAST_GAP above `elo0` at least and both within
    ±`furthest(model)`; `alpha` and `beta` are LEAST_RATE at least and add up to less than 1.
    """

    elo0: float
    elo1: float
    alpha: float = 0.05
    """Chance to accept `elo1` where `elo0` is true."""
    beta: float = 0.05
    """Chance to reject `elo1` where it is true."""
    model: Model = "logistic"

    def __post_init__(self) -> None:
        if not self.elo1 - self.elo0 >= LEAST_GAP:
            raise ValueError(
                f"elo0 is below elo1 by {LEAST_GAP} or more, not {self.elo0} and {self.elo1}"
            )
        most = furthest(self.model)
        if not (-most <= self.elo0 and self.elo1 <= most):
            raise ValueError(
                f"{self.model} bounds lie within ±{most:g}, not {self.elo0} and {self.elo1}"
            )
        if not (min(self.alpha, self.beta) >= LEAST_RATE and self.alpha + self.beta < 1):
            raise ValueError(
                f"alpha and beta are {LEAST_RATE} or more and add up to less than 1: "
                f"{self.alpha}, {self.beta}"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """Log-likelihood ratios at which the test rejects and accepts: Wald's ln(β/(1−α)) and
        ln((1−β)/α)."""
        return math.log(self.beta / (1 - self.alpha)), math.log((1 - self.beta) / self.alpha)

    def llr(self, bins: Sequence[float]) -> float:
        """The (generalised) log-likelihood ratio of `elo1` over `elo0`; 0 of no games.

        ValueError for five bins in a BayesElo model, which knows single games alone, and for counts
        of which cutechess's model makes nothing: draws so many that its bounds are no Elo.
        """
        if self.model in ("bayes_elo", "cutechess") and len(bins) != 3:
            raise ValueError(f"{self.model} takes three bins of games, not {len(bins)}")
        if not sum(bins):
            return 0.0
        if self.model == "cutechess":
            return _cutechess_llr(bins, self.elo0, self.elo1)
        counts = _filled(bins)
        values, shares = values_of(bins), counts / counts.sum()
        if self.model == "normalized":
            one, zero = (
                _shares_of_t(values, shares, _t_value(nelo, len(bins)))
                for nelo in (self.elo1, self.elo0)
            )
        else:
            one, zero = (
                _shares_of_mean(values, shares, self._score(elo, shares))
                for elo in (self.elo1, self.elo0)
            )
        return float(counts @ np.log(one / zero))

    def _score(self, elo: float, shares: NDArray[np.float64]) -> float:
        if self.model == "logistic":
            return expected_score(elo)
        win, loss = _bayes_elo_chances(elo, _draw_elo(shares))
        return win + (1 - win - loss) / 2

    def state(self, bins: Sequence[float]) -> State:
        """Where the test stands."""
        low, high = self.bounds
        llr = self.llr(bins)
        return "accept" if llr >= high else "reject" if llr <= low else "continue"

    def estimate(self, bins: Sequence[float]) -> "Stopped":
        """Elo after a stop (or at this point), as free of the stop's bias as it can be had.

        The LLR is taken as Brownian motion between the bounds; the estimate is the Elo of which the
        outcome would have been worse half of the time, the interval's ends where it would have been
        so 97.5 % and 2.5 % of the time (Siegmund, "Estimation following sequential tests",
        Biometrika 65, 1978; Van den Bergh, fishtest's sprt.py). Worse is rejected sooner, accepted
        later, rejected instead of accepted. Of the logistic and the normalised model; ValueError
        for the others, and where nothing was counted. Where `arena.pairwise` leaves the normal
        interval, its posterior: a few steps are no Brownian motion, and a posterior knows no stop.
        """
        if self.model not in ("logistic", "normalized"):
            raise ValueError(f"no estimate after a stop in the model {self.model}")
        if not has_normal_score(bins):
            found = pairwise(bins)
            return Stopped(found.elo, found.los)
        walk = _Walk.of(self, bins)

        def at(share: float) -> float:
            ends = [walk.chance_of_worse(end) for end in (-FURTHEST_ELO, FURTHEST_ELO)]
            if ends[0] <= share:
                return -FURTHEST_ELO
            if ends[1] >= share:
                return FURTHEST_ELO
            return float(
                brentq(lambda elo: walk.chance_of_worse(elo) - share, -FURTHEST_ELO, FURTHEST_ELO)
            )

        return Stopped(Estimate(at(0.5), at(0.975), at(0.025)), walk.chance_of_worse(0.0))


@dataclass(frozen=True, slots=True)
class Stopped:
    """What a stopped test says."""

    elo: Estimate
    """Logistic Elo, median-unbiased; an end at ±FURTHEST_ELO is no bound."""
    los: float


def _filled(bins: Sequence[float]) -> NDArray[np.float64]:
    values_of(bins)
    counts = np.asarray(bins, float)
    return np.where(counts == 0, _EMPTY_BIN, counts)


def _tilted(distances: NDArray[np.float64], shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """The likeliest shares under which the mean of `distances` is 0: p_i/(1 + x·d_i), with x the
    root of Σ p_i·d_i/(1 + x·d_i) (Van den Bergh, "support_MLE_multinomial", proposition 1.1)."""
    # the root is sought from the pole on its side, which it all but touches after a sweep
    edge = distances.min() if shares @ distances > 0 else distances.max()
    pole = -1 / edge
    at_pole = np.where(distances == edge, 0.0, 1 + pole * distances)

    def mean(step: float) -> float:
        return float(np.sum(shares * distances / (at_pole - step * pole * distances)))

    step = brentq(mean, 1e-20, 1.0, xtol=1e-30, rtol=1e-14)
    return np.asarray(shares / (at_pole - step * pole * distances))


def _shares_of_mean(
    values: NDArray[np.float64], shares: NDArray[np.float64], score: float
) -> NDArray[np.float64]:
    return _tilted(values - score, shares)


def _t_value(nelo: float, bins: int) -> float:
    return nelo / NELO_PER_T * (1 if bins == 3 else math.sqrt(2))


def _shares_of_t(
    values: NDArray[np.float64], shares: NDArray[np.float64], t: float
) -> NDArray[np.float64]:
    """The likeliest shares with (mean − 1/2)/deviation = t: a fixed point of tilts (Van den Bergh,
    "normalized_elo_practical", section 4.1)."""

    def tilted(mean_deviation: NDArray[np.float64]) -> NDArray[np.float64]:
        mean, deviation = mean_deviation
        bend = 1 + ((mean - values) / deviation) ** 2
        return _tilted(values - 0.5 - t * deviation * bend / 2, shares)

    def step(mean_deviation: NDArray[np.float64]) -> NDArray[np.float64]:
        now = tilted(mean_deviation)
        mean = now @ values
        return np.array([mean, math.sqrt(now @ (values - mean) ** 2)])

    even = np.array([values.mean(), values.std()])
    return tilted(fixed_point(step, even, xtol=1e-10, maxiter=200, method="iteration"))


def _draw_elo(shares: NDArray[np.float64]) -> float:
    loss, _, win = shares
    return 200 * math.log10((1 - loss) / loss * (1 - win) / win)


def _bayes_elo_chances(bayes_elo: float, draw_elo: float) -> tuple[float, float]:
    """Chances of a win and of a loss (BayesElo's model)."""
    return expected_score(bayes_elo - draw_elo), expected_score(-bayes_elo - draw_elo)


def _cutechess_llr(bins: Sequence[float], elo0: float, elo1: float) -> float:
    """cutechess's sprt.cpp: half a game more in each bin, and the bounds over 4x/(1 + x)², where
    x = 10^(−draw_elo/400)."""
    values_of(bins)
    counts = np.asarray(bins, float) + 0.5
    draw_elo = _draw_elo(counts / counts.sum())
    x = 10 ** (-draw_elo / 400)
    scale = 4 * x / (1 + x) ** 2
    chances = []
    for elo in (elo1, elo0):
        win, loss = _bayes_elo_chances(elo / scale, draw_elo)
        chances.append([loss, 1 - win - loss, win])
    if np.min(chances) <= 0:
        raise ValueError(f"cutechess's bounds {elo0} and {elo1} have no chances for {list(bins)}")
    one, zero = np.log(chances)
    return float(counts @ (one - zero))


@dataclass(frozen=True, slots=True)
class _Walk:
    """The LLR as Brownian motion, and where it got to (Van den Bergh, "GSPRT_approximation")."""

    bounds: tuple[float, float]
    variance: float
    """Of a game's or a pair's points, as seen: held fixed, so that more Elo is always better."""
    scores: tuple[float, float]
    """Of elo0 and elo1."""
    time: float
    """Games or pairs played, or until the bound was met."""
    llr: float
    """At that time, within the bounds."""

    @classmethod
    def of(cls, test: Sprt, bins: Sequence[float]) -> "_Walk":
        mean, variance = moments(bins)
        if test.model == "logistic":
            zero, one = expected_score(test.elo0), expected_score(test.elo1)
        else:
            deviation = math.sqrt(variance)
            zero, one = (
                0.5 + _t_value(nelo, len(bins)) * deviation for nelo in (test.elo0, test.elo1)
            )
        slope = (mean - (zero + one) / 2) * (one - zero) / variance
        units = float(sum(bins))
        low, high = test.bounds
        llr = min(max(slope * units, low), high)
        time = units if llr == slope * units else llr / slope
        return cls((low, high), variance, (zero, one), time, llr)

    def chance_of_worse(self, elo: float) -> float:
        """The chance of a worse outcome than this one, were `elo` the true difference."""
        zero, one = self.scores
        drift = (expected_score(elo) - (zero + one) / 2) * (one - zero) / self.variance
        spread = (one - zero) ** 2 / self.variance
        low, high = self.bounds
        if spread * self.time < 0.01 * (high - low) ** 2:
            return _worse_early(drift, spread, self.time, self.llr, low, high)
        return _worse(drift, spread, self.time, self.llr, low, high)


def _worse(drift: float, spread: float, time: float, llr: float, low: float, high: float) -> float:
    """Chance that Brownian motion from 0, absorbed at `low` and `high`, is absorbed at `low` before
    `time` or is left of `llr` then: that it ever ends at `low`, and a series of the eigenfunctions
    sin(nπ(y − low)/width) for those still under way."""
    width = high - low
    pull = drift / spread
    n = np.arange(1, 2 + int(width / math.pi * math.sqrt(160 / (spread * time))))
    rates = n * math.pi / width
    decay = np.exp(pull * llr - (drift**2 / spread + rates**2 * spread) * time / 2)
    angles = rates * (llr - low)
    waves = pull * np.sin(angles) - rates * np.cos(angles)
    series = decay * np.sin(-rates * low) * 2 / width * waves / (pull**2 + rates**2)
    return _ends_low(pull, low, high) + float(series.sum())


def _ends_low(pull: float, low: float, high: float) -> float:
    """The gambler's ruin, written so that nothing overflows."""
    if abs(pull) < 1e-9:
        return high / (high - low)
    if pull < 0:
        return math.expm1(2 * pull * high) / math.expm1(2 * pull * (high - low))
    share = math.expm1(-2 * pull * high) / math.expm1(-2 * pull * (high - low))
    return math.exp(2 * pull * low) * share


def _worse_early(
    drift: float, spread: float, time: float, llr: float, low: float, high: float
) -> float:
    """The same early on, when at most one bound can have been met: one reflection at each
    (Siegmund, "Sequential Analysis", 1985, chapter III)."""
    pull, deviation = drift / spread, math.sqrt(spread * time)
    path = llr - drift * time
    at_low = math.exp(2 * pull * low + log_ndtr((2 * low - path) / deviation))
    at_high = math.exp(2 * pull * high + log_ndtr((path - 2 * high) / deviation))
    return float(ndtr(path / deviation)) + at_low - at_high
