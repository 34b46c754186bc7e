"""When a pairing has been played enough, pure: a sequential test over its complete pairs.

Pairs count in the order of the schedule, whatever the order in which they end. So the decision
depends on the results alone: not on which game was the shorter one, nor on a stop and a resume.
"""

from collections.abc import Sequence

from arena.pairwise import PairCounts, pair_counts
from arena.sprt import Sprt, State, Stopped


class EarlyStop:
    """One pairing's test; all is said of its first-named player."""

    def __init__(self, test: Sprt) -> None:
        self.test = test
        self.state: State = "continue"
        self.llr = 0.0
        self.counts = PairCounts()
        """Of the pairs that decided; later ones are left out."""
        self._games = [0, 0, 0]
        self._ahead: dict[int, tuple[float, float]] = {}
        """Pairs that wait for an earlier one."""

    @property
    def pairs(self) -> int:
        """Number of pairs that count."""
        return sum(self.counts)

    @property
    def bins(self) -> Sequence[int]:
        """What the test takes: five of pairs, but of games in BayesElo's model."""
        return self._games if self.test.model == "bayes_elo" else self.counts.bins

    def note(self, index: int, scores: tuple[float, float]) -> None:
        """Both games of pair `index`, from 0, are in: the first-named player's scores."""
        self._ahead[index] = scores
        while self.state == "continue" and self.pairs in self._ahead:
            pair = self._ahead.pop(self.pairs)
            self.counts = PairCounts(
                *(a + b for a, b in zip(self.counts, pair_counts([pair]), strict=True))
            )
            for score in pair:
                self._games[int(score * 2)] += 1
            self.llr = self.test.llr(self.bins)
            self.state = self.test.state(self.bins)

    def estimate(self) -> Stopped | None:
        """Elo without the stop's bias; None where there is none (see `Sprt.estimate`)."""
        if not self.pairs or self.test.model == "bayes_elo":
            return None
        return self.test.estimate(self.bins)
