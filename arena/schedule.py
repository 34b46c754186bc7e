"""Who plays whom, pure: a config in, matches with ids derived from their content out."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from arena.config import GameChoice, RunConfig, openings_of
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


def matches(config: RunConfig) -> tuple[MatchSpec, ...]:
    """The matches of a run in the order they start.

    The unit is the pair: one opening, sides swapped, both matches next to each other. Pairings and
    games are interleaved, so that drift of the machine hits all alike.
    """
    specs: list[MatchSpec] = []
    games = [(choice.name, choice.ruleset, _shuffled(config, choice)) for choice in config.games()]
    for index in range(config.tournament.pairs):
        for first, second in combinations(config.agents, 2):
            for game, ruleset, starts in games:
                if first.plays(game) and second.plays(game):
                    start = starts[index % len(starts)]
                    names = first.name, second.name
                    specs += pair(config.seed, game, ruleset, names, index, start)
    return tuple(specs)


def pair(
    seed: int, game: str, ruleset: str, names: tuple[str, str], index: int, start: Start
) -> tuple[MatchSpec, MatchSpec]:
    """The two matches of a pair: the same opening, sides swapped."""
    pair_id = _id("p", seed, game, ruleset, *names, index, start.fen)
    one, two = (
        MatchSpec(_id("m", pair_id, side), pair_id, game, ruleset, order, start)
        for side, order in enumerate((names, names[::-1]))
    )
    return one, two


def _shuffled(config: RunConfig, choice: GameChoice) -> Sequence[Start]:
    starts = list(openings_of(config, choice.game, choice.ruleset))
    dice = random.Random(f"openings/{config.seed}/{choice.name}/{choice.ruleset}")
    dice.shuffle(starts)
    return starts


def _id(kind: str, *parts: object) -> str:
    text = "\x1f".join(str(part) for part in parts)
    return kind + hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
