"""Formats of a tournament, pure: each says which pairs are due, from what came of earlier ones.

A contest is one format over one field of players. It knows its pairs by their *place*, a number
that depends on what the pair is and never on when it came up: so a run that was stopped and resumed
has the numbers of one that was not. Whatever it says depends on results alone, not on the order in
which they come in.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from arena import swiss
from arena.bradley_terry import logistic
from arena.early_stop import EarlyStop
from arena.field import Game
from arena.sprt import Sprt

Two = tuple[str, str]
Scores = tuple[float, float]
"""Of a pair's first-named player: in the game with its own side first, and in the other."""


class Due(NamedTuple):
    """A pair to be played."""

    place: int
    game: int
    """Number of the game among the tournament's."""
    names: Two
    turn: int
    """From 0; which opening and dice: two pairs of the same names have different ones."""


class Event(NamedTuple):
    """Something that the format decided without a game: a bye, a tie that stayed level."""

    kind: str
    detail: Mapping[str, Any]


class Contest(Protocol):
    """See the top of this file."""

    def due(self) -> Iterator[Due]:
        """The pairs that have become due since the last call."""
        ...

    def note(self, place: int, scores: Scores) -> None:
        """Both games of a pair are in."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether more pairs may become due than were told."""
        ...

    @property
    def events(self) -> Sequence[Event]:
        """All so far, in order."""
        ...


class Meeting(NamedTuple):
    """Two who are to meet at a game."""

    game: int
    names: Two
    is_null: bool = False
    """Whether they are one player under two names, which nothing is tested of."""


class Fixed:
    """Meetings known from the start, interleaved: each has its first pair before any its second.

    With a test, a meeting is over once that decides. Then pair k is due unless one of its first
    k − `ahead` + 1 pairs was decisive: `ahead` pairs are under way at a time, and those that were
    due by the decision are played, not counted in it.
    """

    def __init__(
        self, meetings: Sequence[Meeting], pairs: int, test: Sprt | None = None, ahead: int = 1
    ) -> None:
        self._meetings, self._pairs, self._ahead = meetings, pairs, ahead
        self._tests = None if test is None else [EarlyStop(test) for _ in meetings]
        self._told = [0] * len(meetings)
        self.events: list[Event] = []

    def due(self) -> Iterator[Due]:
        limits = self._limits()
        if limits == self._told:
            return
        for index in range(min(self._told, default=0), max(limits, default=0)):
            for at, (game, names, _) in enumerate(self._meetings):
                if self._told[at] <= index < limits[at]:
                    yield Due(index * len(self._meetings) + at, game, names, index)
        self._told = limits

    def _limits(self) -> list[int]:
        """How many pairs of each meeting are due in all."""
        if self._tests is None:
            return [self._pairs] * len(self._meetings)
        limits = []
        for test in self._tests:
            undecided = test.pairs - (test.state != "continue")
            limits.append(min(undecided + self._ahead, self._pairs))
        for at, meeting in enumerate(self._meetings):
            if meeting.is_null:
                limits[at] = max(
                    limit
                    for limit, other in zip(limits, self._meetings, strict=True)
                    if other.game == meeting.game and not other.is_null
                )
        return limits

    def note(self, place: int, scores: Scores) -> None:
        index, at = divmod(place, len(self._meetings))
        if self._tests is not None and not self._meetings[at].is_null:
            self._tests[at].note(index, scores)

    @property
    def is_open(self) -> bool:
        if self._tests is None:
            return False
        return any(
            test.state == "continue" and told < self._pairs
            for test, told, meeting in zip(self._tests, self._told, self._meetings, strict=True)
            if not meeting.is_null
        )


class Swiss:
    """Rounds in which players of like points meet (see `arena.swiss`)."""

    def __init__(self, game: int, players: Sequence[str], rounds: int, pairs: int) -> None:
        self._game, self._players, self._rounds, self._pairs = game, players, rounds, pairs
        self._points = dict.fromkeys(players, 0.0)
        self._met: defaultdict[frozenset[str], int] = defaultdict(int)
        self._byes: list[str] = []
        self._round = -1
        """The one under way, from 0."""
        self._meetings: list[Two] = []
        self._left = 0
        """Pairs of the round that are not in."""
        self.events: list[Event] = []

    @property
    def _per_round(self) -> int:
        return len(self._players) // 2 * self._pairs

    def due(self) -> Iterator[Due]:
        if self._left or not self.is_open:
            return
        self._round += 1
        self._meetings = self._paired()
        self._left = self._per_round
        first, index = self._round * self._per_round, self._round * self._pairs
        for pair in range(self._pairs):
            for at, names in enumerate(self._meetings):
                place = first + pair * len(self._meetings) + at
                yield Due(place, self._game, names, index + pair)

    def _paired(self) -> list[Two]:
        """The round's meetings; who sits out gets its points."""
        seeds = {name: n for n, name in enumerate(self._players)}
        ranked = sorted(self._players, key=lambda name: (-self._points[name], seeds[name]))
        bye = swiss.bye_of(ranked, self._byes)
        if bye is not None:
            ranked.remove(bye)
        meetings = swiss.pairings(ranked, self._points, self._met)
        for names in meetings:
            self._met[frozenset(names)] += 1
        if bye is not None:
            self._byes.append(bye)
            points = 2.0 * self._pairs
            self._points[bye] += points
            told = {"game": self._game, "round": self._round + 1, "agent": bye, "points": points}
            self.events.append(Event("bye", told))
        return meetings

    def note(self, place: int, scores: Scores) -> None:
        within = place - self._round * self._per_round
        one, two = self._meetings[within % len(self._meetings)]
        self._points[one] += sum(scores)
        self._points[two] += 2 - sum(scores)
        self._left -= 1

    @property
    def is_open(self) -> bool:
        return self._round + 1 < self._rounds


@dataclass(slots=True)
class _Tie:
    """Two players of whom one goes on."""

    names: Two
    """The higher seed first."""
    told: int = 0
    """Pairs that were due so far."""
    played: int = 0
    points: float = 0.0
    """The first-named player's."""

    @property
    def is_level(self) -> bool:
        return self.points == self.played


class Knockout:
    """Who loses a tie is out. Players are seeded in order, and the highest seeds have byes."""

    def __init__(self, game: int, players: Sequence[str], pairs: int, sudden_death: int) -> None:
        self._game, self._pairs, self._sudden_death = game, pairs, sudden_death
        self._seeds = {name: n for n, name in enumerate(players)}
        self._size = 1 << (len(players) - 1).bit_length()
        seeded: list[str | None] = [*players, *[None] * (self._size - len(players))]
        self._slots: list[list[str | None]] = [[seeded[seed] for seed in _bracket(self._size)]]
        """Of each round, two slots a tie; None is not known yet, or a bye in the first round."""
        while len(self._slots[-1]) > 1:
            self._slots.append([None] * (len(self._slots[-1]) // 2))
        self._ties: dict[tuple[int, int], _Tie] = {}
        """By round and number."""
        self.events: list[Event] = []
        for at in range(self._size // 2):
            names = self._slots[0][2 * at : 2 * at + 2]
            if None in names:
                self._slots[1][at] = names[0] or names[1]
                told = {"game": game, "round": 1, "agent": self._slots[1][at], "points": 0.0}
                self.events.append(Event("bye", told))

    def due(self) -> Iterator[Due]:
        for round_, slots in enumerate(self._slots[:-1]):
            for at in range(len(slots) // 2):
                one, two = slots[2 * at : 2 * at + 2]
                if one is not None and two is not None:
                    yield from self._due_of(round_, at, (one, two))

    def _due_of(self, round_: int, at: int, names: Two) -> Iterator[Due]:
        if (round_, at) not in self._ties:
            higher, lower = sorted(names, key=self._seeds.__getitem__)
            self._ties[round_, at] = _Tie((higher, lower))
        tie = self._ties[round_, at]
        limit = self._pairs
        if tie.played >= self._pairs and tie.is_level:
            limit = min(tie.played + 1, self._longest)
        for index in range(tie.told, limit):
            yield Due(self._place(round_, at, index), self._game, tie.names, index)
        tie.told = max(tie.told, limit)

    @property
    def _longest(self) -> int:
        """Pairs of a tie at most."""
        return self._pairs + self._sudden_death

    def _place(self, round_: int, at: int, index: int) -> int:
        before = self._size - (self._size >> round_)
        return before * self._longest + index * (self._size >> (round_ + 1)) + at

    def note(self, place: int, scores: Scores) -> None:
        round_, at = self._tie_at(place)
        tie = self._ties[round_, at]
        tie.played += 1
        tie.points += sum(scores)
        if tie.played < tie.told or (tie.is_level and tie.played < self._longest):
            return
        winner = tie.names[0 if tie.points >= tie.played else 1]
        by = (
            "higher_seed"
            if tie.is_level
            else "score"
            if tie.played == self._pairs
            else "sudden_death"
        )
        self._slots[round_ + 1][at] = winner
        told = {
            "game": self._game,
            "round": round_ + 1,
            "tie": at + 1,
            "agents": list(tie.names),
            "points": [tie.points, 2 * tie.played - tie.points],
            "winner": winner,
            "by": by,
        }
        self.events.append(Event("tie_decided", told))

    def _tie_at(self, place: int) -> tuple[int, int]:
        for round_ in range(len(self._slots) - 1):
            ties = self._size >> (round_ + 1)
            if place < ties * self._longest:
                return round_, place % ties
            place -= ties * self._longest
        raise KeyError(place)

    @property
    def is_open(self) -> bool:
        return self._slots[-1][0] is None


def _bracket(size: int) -> list[int]:
    """Seeds in the order of their slots: the first two can meet in the last round alone."""
    order = [0]
    while len(order) < size:
        order = [seed for high in order for seed in (high, 2 * len(order) - 1 - high)]
    return order


class Ladder:
    """Each player, a pair at a time, against the anchor whose rating is nearest to its own so far;
    at the start, and where its results give no rating, to the anchors' mean. Of two as near it
    meets the lower-rated."""

    def __init__(
        self, game: int, players: Sequence[str], anchors: Mapping[str, float], pairs: int
    ) -> None:
        self._game, self._players, self._pairs = game, players, pairs
        self._anchors = dict(sorted(anchors.items(), key=lambda anchor: anchor[1]))
        self._met: dict[str, list[str]] = {name: [] for name in players}
        """Anchors met or being met, in order."""
        self._games: dict[str, list[Game]] = {name: [] for name in players}
        self._is_playing = dict.fromkeys(players, False)
        self.events: list[Event] = []

    def due(self) -> Iterator[Due]:
        for at, name in enumerate(self._players):
            index = len(self._met[name])
            if self._is_playing[name] or index == self._pairs:
                continue
            anchor = self._nearest(name)
            self._met[name].append(anchor)
            self._is_playing[name] = True
            yield Due(index * len(self._players) + at, self._game, (name, anchor), index)

    def _nearest(self, name: str) -> str:
        rating = sum(self._anchors.values()) / len(self._anchors)
        if self._games[name]:
            with suppress(ArithmeticError):
                rating = logistic(self._games[name], self._anchors).ratings[name]
        return min(self._anchors, key=lambda anchor: abs(self._anchors[anchor] - rating))

    def note(self, place: int, scores: Scores) -> None:
        index, at = divmod(place, len(self._players))
        name = self._players[at]
        anchor, cluster = self._met[name][index], str(index)
        self._games[name] += [
            Game(name, anchor, scores[0], cluster),
            Game(anchor, name, 1 - scores[1], cluster),
        ]
        self._is_playing[name] = False

    @property
    def is_open(self) -> bool:
        return any(len(met) < self._pairs for met in self._met.values())
