"""Who plays whom, pure: config and results in, matches with ids derived from their content out."""

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import ceil

from arena.config import ConfigError, GameChoice, RunConfig, null_name, openings_of
from arena.figures import label
from arena.formats import Contest, Event, Fixed, Knockout, Ladder, Meeting, Swiss
from games import Start


@dataclass(frozen=True, slots=True)
class MatchSpec:
    """One match to be played."""

    id: str
    pair_id: str
    game: str
    """As the config names it, without the rule set."""
    ruleset: str
    agents: tuple[str, str]
    """Names of the agents of side 0 and side 1."""
    start: Start
    number: int = 0
    """Its place in the schedule; the two matches of a pair are next to each other."""


class Schedule:
    """The matches of a run, as far as they are known by the results so far.

    The unit is the pair: one opening, sides swapped, both matches next to each other, dice of their
    own. Pairings and games are interleaved, so that drift of the machine hits all alike. What is
    played, and its number, follows from the config and the results alone, not from their order.
    """

    def __init__(self, config: RunConfig, scores: Mapping[str, float] | None = None) -> None:
        """`scores` are of the first players of matches that are finished already, by id.

        ConfigError where openings cannot serve.
        """
        self._known = scores or {}
        self._seed = config.seed
        self._games = config.games()
        self._openings = [_ordered(config, choice) for choice in self._games]
        self._contests = list(_contests(config))
        self._matches: dict[str, tuple[int, int, int]] = {}
        """Contest, place in it and side of the pair's first-named, by id."""
        self._scores: dict[tuple[int, int], list[float | None]] = {}
        self._told_events = [0] * len(self._contests)

    def due(self) -> list[MatchSpec]:
        """The matches that have become due since the last call, in the order of their numbers;
        those that were finished already are among them."""
        specs: list[MatchSpec] = []
        while fresh := self._fresh():
            specs += fresh
            for spec in fresh:
                if spec.id in self._known:
                    self.note(spec.id, self._known[spec.id])
        return sorted(specs, key=lambda spec: spec.number)

    def _fresh(self) -> list[MatchSpec]:
        specs: list[MatchSpec] = []
        for at, contest in enumerate(self._contests):
            for place, game, names, turn in contest.due():
                choice, starts = self._games[game], self._openings[game]
                start = starts[turn % len(starts)]
                number = 2 * (place * len(self._contests) + at)
                both = pair(
                    self._seed, choice.name, choice.ruleset, names, turn, start, number=number
                )
                self._scores[at, place] = [None, None]
                for side, spec in enumerate(both):
                    self._matches[spec.id] = at, place, side
                specs += both
        return specs

    def note(self, match_id: str, score: float) -> None:
        """A match that was due is finished: its first player's score. Others are not looked at."""
        if match_id not in self._matches:
            return
        at, place, side = self._matches[match_id]
        scores = self._scores[at, place]
        is_new = scores[side] is None
        scores[side] = score if side == 0 else 1 - score
        one, two = scores
        if is_new and one is not None and two is not None:
            self._contests[at].note(place, (one, two))

    def events(self) -> list[Event]:
        """What formats decided without a game since the last call; games by their names."""
        fresh = []
        for at, contest in enumerate(self._contests):
            for kind, detail in contest.events[self._told_events[at] :]:
                choice = self._games[detail["game"]]
                told = {**detail, "game": label(choice.name, choice.ruleset)}
                fresh.append(Event(kind, told))
            self._told_events[at] = len(contest.events)
        return fresh

    @property
    def is_open(self) -> bool:
        """Whether more matches may become due than were told."""
        return any(contest.is_open for contest in self._contests)


def matches(config: RunConfig) -> tuple[MatchSpec, ...]:
    """The matches that a run begins with, in the order they start; all, where none are added."""
    return tuple(Schedule(config).due())


def _contests(config: RunConfig) -> Iterator[Contest]:
    """One contest of all meetings, or one each game where rounds follow from results."""
    asked, pairs = config.tournament, config.pairs_a_pairing
    games = [(number, config.entrants(choice.name)) for number, choice in enumerate(config.games())]
    null = list(_null_meetings(config, games))
    if asked.format in ("round_robin", "gauntlet", "sprt"):
        yield _fixed(config, [*_meetings(config, games), *null])
        return
    for game, names in games:
        if asked.format == "swiss":
            rounds = config.rounds(config.games()[game].name)
            yield Swiss(game, names, rounds, pairs)
        elif asked.format == "knockout":
            yield Knockout(game, names, pairs, asked.sudden_death_pairs)
        else:
            anchors = config.anchors(config.games()[game].name)
            players = [name for name in names if name not in anchors]
            yield Ladder(game, players, anchors, pairs)
    if null:
        yield Fixed(null, pairs)


def _fixed(config: RunConfig, meetings: Sequence[Meeting]) -> Fixed:
    pairs = config.pairs_a_pairing
    if config.sprt is None:
        return Fixed(meetings, pairs)
    # so many keep all tables busy, and one more lets them wait for a long game
    ahead = ceil(config.tournament.parallel_matches / 2 / len(meetings)) + 1
    return Fixed(meetings, pairs, config.sprt.test, ahead)


def _meetings(config: RunConfig, games: Iterable[tuple[int, Sequence[str]]]) -> Iterator[Meeting]:
    players = dict(games)
    names = [agent.name for agent in config.agents]
    ones = config.challengers
    pairings = (
        ((one, two) for one, two in product(ones, names) if two not in ones)
        if config.tournament.format == "gauntlet"
        else combinations(names, 2)
    )
    for one, two in pairings:
        for game, entrants in players.items():
            if one in entrants and two in entrants:
                yield Meeting(game, (one, two))


def _null_meetings(
    config: RunConfig, games: Iterable[tuple[int, Sequence[str]]]
) -> Iterator[Meeting]:
    name = config.null_agent
    for game, entrants in games:
        if name is not None and name in entrants:
            yield Meeting(game, (name, null_name(name)), is_null=True)


def pair(
    seed: int,
    game: str,
    ruleset: str,
    names: tuple[str, str],
    index: int,
    start: Start,
    *,
    number: int = 0,
) -> tuple[MatchSpec, MatchSpec]:
    """The two matches of a pair: the same opening, sides swapped."""
    pair_id = _id("p", seed, game, ruleset, *names, index, start.fen)
    one, two = (
        MatchSpec(_id("m", pair_id, side), pair_id, game, ruleset, order, start, number + side)
        for side, order in enumerate((names, names[::-1]))
    )
    return one, two


def _ordered(config: RunConfig, choice: GameChoice) -> Sequence[Start]:
    """The openings of a game in the order in which pairs take them."""
    asked = config.openings
    starts = list(openings_of(config, choice.game, choice.ruleset))
    if asked.start >= len(starts):
        raise ConfigError(
            f"openings.start: is {asked.start}, and {choice.name} has {len(starts)} openings; "
            "begin after fewer"
        )
    if asked.order == "shuffled":
        seed = config.seed if asked.seed is None else asked.seed
        random.Random(f"openings/{seed}/{choice.name}/{choice.ruleset}").shuffle(starts)
    return [*starts[asked.start :], *starts[: asked.start]]


def _id(kind: str, *parts: object) -> str:
    text = "\x1f".join(str(part) for part in parts)
    return kind + hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
