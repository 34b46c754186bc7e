"""Two players against each other, pure: from counts of results to Elo, normalised Elo and LOS.

Counts are bins from the worst result to the best: three of single games, (losses, draws, wins), or
five of pairs, (LL, LD, WL + DD, WD, WW), a pair being one opening played with sides swapped. Bins
may hold fractions. Every interval is one of 95 %.

Two ways to an interval. With 30 games or pairs and more, and where it stays inside (0, 1), it is
the normal one of the score, carried over to Elo: what fastchess prints (elo_wdl.cpp,
elo_pentanomial.cpp), which is infinite or undefined on clean sweeps, on draws alone and after
1-1-0. There, and with fewer games, it is the equal-tailed interval of the exact posterior of the
score under Jeffreys' prior, Dirichlet(1/2, ..., 1/2) over the bins: always finite, and with two
bins the interval that Brown, Cai and DasGupta recommend for small samples ("Interval Estimation for
a Binomial Proportion", Statistical Science 16, 2001). A profile likelihood would leave a sweep open
at one end.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import betainc, expit, logit, ndtr, ndtri

Z95 = 1.959963984540054
"""The normal distribution's 97.5 % point."""
ELO_PER_LOGIT = 400 / math.log(10)
NELO_PER_T = 800 / math.log(10)
"""Normalised Elo of a score that lies one standard deviation of a game above 1/2."""
SMALL = 30
"""With fewer games or pairs than these the normal interval is not used."""
_FURTHEST = 60.0
"""Logits within which every quantile of a score is looked for."""
_FIRST, _LAST = -35.0, 40.0
"""Logarithms of t between which Gil-Pelaez' integrand is not 0 to rounding."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with the ends of its 95 % interval, which need not be symmetric."""

    value: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Half the interval's width: the symmetric ± that match runners print."""
        return (self.high - self.low) / 2


class PairCounts(NamedTuple):
    """Pairs by the results of the player in question, in any order within the pair."""

    ll: int = 0
    ld: int = 0
    wl: int = 0
    dd: int = 0
    wd: int = 0
    ww: int = 0

    @property
    def bins(self) -> tuple[int, int, int, int, int]:
        """By points of the pair: WL and DD are both one point."""
        return self.ll, self.ld, self.wl + self.dd, self.wd, self.ww


@dataclass(frozen=True, slots=True)
class Pairwise:
    """What counts say of the player whose results they are."""

    units: float
    """Games of three bins, pairs of five."""
    score: float
    """Points per game, 0 to 1."""
    elo: Estimate
    """On the logistic scale; where intervals are Jeffreys', the posterior's median, so that 2-0 is
    never rated below 1½-½."""
    nelo: Estimate | None
    """None where intervals are Jeffreys': its normal one would not hold the truth there."""
    los: float
    """Likelihood of superiority: the chance that the true score is above 1/2."""
    is_normal: bool
    """Whether the intervals and LOS are the normal ones; else they are Jeffreys'."""


_PAIRS = {(0, 0): "ll", (0, 1): "ld", (0, 2): "wl", (1, 1): "dd", (1, 2): "wd", (2, 2): "ww"}


def pair_counts(pairs: Iterable[tuple[float, float]]) -> PairCounts:
    """Count pairs, each given as one player's two scores of 0, 1/2 or 1 (fastchess,
    scoreboard_test.cpp). ValueError on any other score."""
    counts = dict.fromkeys(PairCounts._fields, 0)
    for pair in pairs:
        low, high = sorted(score * 2 for score in pair)
        if (low, high) not in _PAIRS:
            raise ValueError(f"a pair's scores are 0, 0.5 or 1 each, not {pair}")
        counts[_PAIRS[int(low), int(high)]] += 1
    return PairCounts(**counts)


def elo(score: float) -> float:
    """Elo of a score strictly between 0 and 1: 400·log10(s/(1 − s)). ValueError elsewhere."""
    if not 0 < score < 1:
        raise ValueError(f"no finite Elo gives a score of {score}")
    return 400 * math.log10(score / (1 - score))


def expected_score(elo: float) -> float:
    """The score that a difference in Elo leads one to expect: 1/(1 + 10^(−elo/400))."""
    return float(expit(elo / ELO_PER_LOGIT))


def values_of(bins: Sequence[float]) -> NDArray[np.float64]:
    """The points per game of each bin. ValueError unless there are three or five bins with
    something in them."""
    if len(bins) not in (3, 5):
        raise ValueError(f"three bins of games or five of pairs, not {len(bins)}")
    if min(bins) < 0 or not sum(bins) > 0 or not math.isfinite(sum(bins)):
        raise ValueError(f"counts are finite, none negative and not all zero: {list(bins)}")
    return np.linspace(0, 1, len(bins))


def moments(bins: Sequence[float]) -> tuple[float, float]:
    """Mean and variance (per game or pair) of the points per game."""
    values = values_of(bins)
    shares = np.asarray(bins, float) / sum(bins)
    mean = float(shares @ values)
    return mean, float(shares @ (values - mean) ** 2)


def has_normal_score(bins: Sequence[float]) -> bool:
    """Whether the score's normal interval holds: there are results enough and it lies in (0, 1)."""
    mean, variance = moments(bins)
    units = sum(bins)
    reach = Z95 * math.sqrt(variance / units)
    is_alike = variance < 1e-12  # all results, but for rounding
    return units >= SMALL and not is_alike and reach < min(mean, 1 - mean)


def pairwise(bins: Sequence[float]) -> Pairwise:
    """Score, Elo, normalised Elo and LOS of counts; ValueError where nothing was counted.

    Elo, error and LOS: fastchess's elo_wdl.cpp and elo_pentanomial.cpp, or the posterior's (see the
    top of this file). Normalised Elo is (s − 1/2)/σ·800/ln 10 with σ the standard deviation of a
    game, taken as √2 times that of a pair's mean (Van den Bergh, "Normalized Elo").
    """
    return _pairwise(tuple(bins))


@lru_cache(4096)
def _pairwise(bins: tuple[float, ...]) -> Pairwise:
    mean, variance = moments(bins)
    units = sum(bins)
    is_normal = has_normal_score(bins)
    if is_normal:
        error = math.sqrt(variance / units)
        low, high = elo(mean - Z95 * error), elo(mean + Z95 * error)
        los = float(ndtr((mean - 0.5) / error))
    else:
        low, high = _quantile(bins, 0.025), _quantile(bins, 0.975)
        los = chance_above(0.5, bins)
    return Pairwise(
        units=units,
        score=mean,
        elo=Estimate(elo(mean) if is_normal else _quantile(bins, 0.5), low, high),
        nelo=_nelo(bins) if is_normal else None,
        los=los,
        is_normal=is_normal,
    )


def _nelo(bins: Sequence[float]) -> Estimate:
    mean, variance = moments(bins)
    games_per_unit = 1 if len(bins) == 3 else 2
    deviation = math.sqrt(variance * games_per_unit)
    value = (mean - 0.5) / deviation * NELO_PER_T
    error = Z95 * NELO_PER_T / math.sqrt(sum(bins) * games_per_unit)
    return Estimate(value, value - error, value + error)


def chance_above(score: float, bins: Sequence[float]) -> float:
    """The posterior chance that the true score lies above `score`, from Jeffreys' prior.

    Shares of a Dirichlet distribution are gamma variables over their sum, so the mean score exceeds
    s where Σ (a_i − s)·G_i > 0; the chance of that is Gil-Pelaez' integral over the characteristic
    function Π (1 − i·t·(a_i − s))^−α_i (Biometrika 38, 1951).
    """
    return _chance_positive(values_of(bins) - score, np.asarray(bins, float) + 0.5)


def _chance_positive(distances: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    steps = distances / math.sqrt(weights @ distances**2)
    # over the logarithm of t the integrand is analytic and falls off at both ends, so that the
    # trapezoidal rule is exact to rounding once it follows the oscillation, which is √Σα fast
    number = int((_LAST - _FIRST) / min(0.05, 0.6 / math.sqrt(weights.sum())))
    logs = np.linspace(_FIRST, _LAST, number)
    times = np.outer(steps, np.exp(logs))
    size = np.exp(-(weights[:, None] * np.log1p(times**2)).sum(axis=0) / 2)
    phase = (weights[:, None] * np.arctan(times)).sum(axis=0)
    area = float(np.trapezoid(size * np.sin(phase), logs))
    return min(max(0.5 + area / math.pi, 0.0), 1.0)


def _quantile(bins: Sequence[float], share: float) -> float:
    """Elo of the score below which the true one lies with a chance of `share`."""
    values = values_of(bins)
    weights = np.asarray(bins, float) + 0.5

    def excess(at: float) -> float:
        # a_i − s without the rounding of 1 − s near 1
        distances = values * expit(-at) - (1 - values) * expit(at)
        return 1 - share - _chance_positive(distances, weights)

    # it is about where the normal distribution has it
    total = weights.sum()
    mean = weights @ values / total
    deviation = math.sqrt(weights @ (values - mean) ** 2 / total / (total + 1)) / (mean - mean**2)
    near = logit(mean) + ndtri(share) * deviation
    try:
        found = brentq(excess, near - deviation, near + deviation, xtol=1e-9)
    except ValueError:
        found = brentq(excess, -_FURTHEST, _FURTHEST, xtol=1e-9)
    return float(found) * ELO_PER_LOGIT


def decisive_los(wins: float, losses: float) -> float:
    """LOS from decisive games alone, normal: ½ + ½·erf((W − L)/√(2(W + L))) (cutechess, elo.cpp);
    1/2 where there are none."""
    if not wins + losses:
        return 0.5
    return float(ndtr((wins - losses) / math.sqrt(wins + losses)))


def exact_los(wins: float, losses: float) -> float:
    """LOS from decisive games alone, exact from a flat prior: P(Beta(W + 1, L + 1) > 1/2). For few
    games, where the normal one overstates."""
    return float(betainc(losses + 1, wins + 1, 0.5))
