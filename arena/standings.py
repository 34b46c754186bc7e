"""Standings of a tournament, pure: from what came of each game to rates, pairings and ratings.

A forfeit (an illegal move, no answer, a flag that fell) is a failure at the protocol, not at the
game. So three things are kept apart: the protocol score says how many games a player saw through,
ratings of skill leave forfeited games out, and ratings of the result count them as the losses that
they are in the table. Games that were not rated count nowhere.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from scipy.special import betaincinv

from arena.bradley_terry import anchor_fit, logistic
from arena.field import Field, Game
from arena.pairwise import Estimate, PairCounts, Pairwise, pair_counts, pairwise


class Outcome(NamedTuple):
    """What came of one finished game."""

    first: str
    second: str
    score: float
    """The first player's: 0, 1/2 or 1."""
    pair: str
    """Id that the two games with one opening and sides swapped share."""
    is_forfeit: bool = False
    """Whether the loser lost by an illegal move, silence or time, not by the game's rules."""
    is_rated: bool = True


@dataclass(frozen=True, slots=True)
class Pairing:
    """Two players against each other; all is said of `one`."""

    one: str
    two: str
    wins: int
    draws: int
    losses: int
    pairs: PairCounts
    """Of pairs with both games in."""
    by_games: Pairwise
    by_pairs: Pairwise | None
    """None while no pair is complete."""

    @property
    def best(self) -> Pairwise:
        """By pairs where nine in ten games are in complete ones: games of a pair depend on each
        other. Else by games, which leaves none out."""
        if self.by_pairs is None or self.by_pairs.units * 2 < self.by_games.units * 0.9:
            return self.by_games
        return self.by_pairs


@dataclass(frozen=True, slots=True)
class Standings:
    """A tournament's statistics."""

    protocol: Mapping[str, Estimate]
    """Share of a player's games that it did not forfeit, for each player with a rated game."""
    results: Field
    """Ratings by all rated games."""
    skill: Field
    """Ratings without forfeits."""
    pairings: tuple[Pairing, ...]
    """See `pairings`."""
    anchor_fit: float | None
    """See `bradley_terry.anchor_fit`, by all rated games; None too where that is not found."""


def standings(
    outcomes: Iterable[Outcome],
    anchors: Mapping[str, float] | None = None,
    order: Sequence[str] = (),
) -> Standings:
    """Statistics of one tournament of one game; `anchors` are ratings in Elo that are held fixed,
    `order` is that of `pairings`. Ratings that cannot be found are left out, with the reason
    (`Field.failure`).

    ValueError on a score other than 0, 1/2 and 1, a draw by forfeit, or a player against itself.
    """
    rated = [outcome for outcome in outcomes if outcome.is_rated]
    for outcome in rated:
        if outcome.is_forfeit and outcome.score == 0.5:
            raise ValueError(f"a forfeit has a loser: {outcome}")
    skilled = [outcome for outcome in rated if not outcome.is_forfeit]
    return Standings(
        protocol=protocol_scores(rated),
        results=_field(rated, anchors),
        skill=_field(skilled, anchors),
        pairings=tuple(pairings(rated, order)),
        anchor_fit=_anchor_fit(rated, anchors or {}),
    )


def _field(outcomes: Sequence[Outcome], anchors: Mapping[str, float] | None) -> Field:
    try:
        return logistic(_games(outcomes), anchors)
    except ArithmeticError as error:
        return Field.unrated(str(error))


def _anchor_fit(outcomes: Sequence[Outcome], anchors: Mapping[str, float]) -> float | None:
    try:
        return anchor_fit(_games(outcomes), anchors)
    except ArithmeticError:
        return None


def _games(outcomes: Iterable[Outcome]) -> Iterator[Game]:
    return (Game(*outcome[:4]) for outcome in outcomes)


def protocol_scores(outcomes: Sequence[Outcome]) -> dict[str, Estimate]:
    """Share of each player's rated games that it did not forfeit, with Jeffreys' 95 % interval
    (Brown, Cai and DasGupta, 2001: the quantiles of Beta(kept + ½, forfeited + ½), but 0 and 1
    where none or all was kept)."""
    kept: defaultdict[str, list[bool]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.is_rated:
            kept[outcome.first].append(not (outcome.is_forfeit and outcome.score == 0))
            kept[outcome.second].append(not (outcome.is_forfeit and outcome.score == 1))
    return {name: _share(sum(kept[name]), len(kept[name])) for name in sorted(kept)}


def _share(part: int, whole: int) -> Estimate:
    a, b = part + 0.5, whole - part + 0.5
    low = 0.0 if part == 0 else float(betaincinv(a, b, 0.025))
    high = 1.0 if part == whole else float(betaincinv(a, b, 0.975))
    return Estimate(part / whole, low, high)


def pairings(outcomes: Sequence[Outcome], order: Sequence[str] = ()) -> Iterator[Pairing]:
    """Each two that met, `one` being the first of them in `order`, or else in the alphabet; unrated
    games are left out."""
    met: defaultdict[frozenset[str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.is_rated:
            met[frozenset(outcome[:2])].append(outcome)
    names = {name for both in met for name in both}
    others = sorted(names.difference(order))
    for one, two in combinations([*(name for name in order if name in names), *others], 2):
        if frozenset((one, two)) in met:
            yield _pairing(one, two, met[frozenset((one, two))])


def _pairing(one: str, two: str, outcomes: Sequence[Outcome]) -> Pairing:
    by_pair: defaultdict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        score = outcome.score if outcome.first == one else 1 - outcome.score
        by_pair[outcome.pair].append(score)
    scores = [score for pair in by_pair.values() for score in pair]
    wins, draws, losses = (scores.count(score) for score in (1, 0.5, 0))
    pairs = pair_counts((pair[0], pair[1]) for pair in by_pair.values() if len(pair) == 2)
    return Pairing(
        one=one,
        two=two,
        wins=wins,
        draws=draws,
        losses=losses,
        pairs=pairs,
        by_games=pairwise((losses, draws, wins)),
        by_pairs=pairwise(pairs.bins) if any(pairs) else None,
    )
