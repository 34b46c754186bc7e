"""What a tournament's format says beside the ratings, pure: tests, byes, ties of a knock-out."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from arena.config import SprtSection, null_name
from arena.early_stop import EarlyStop
from arena.figures import Figures, label
from arena.pairwise import Estimate
from arena.placing import knockout_winner, order_of
from arena.sprt import FURTHEST_ELO, Sprt
from arena.store import MatchRow


def contest(figures: Figures) -> dict[str, Any]:
    """The report's `tournament`: the format, by what standings are ordered, whether matches may yet
    be added, who sat out and with how many points, how ties were decided, and who won knock-outs
    that are over."""
    byes, ties = figures.format_events["bye"], figures.format_events["tie_decided"]
    return {
        "format": figures.config.get("tournament", {}).get("format", "round_robin"),
        "order": order_of(figures.config),
        "can_grow": figures.can_grow,
        "byes": byes,
        "ties": ties,
        "winners": _winners(figures, byes, ties),
    }


def _winners(
    figures: Figures, byes: Iterable[Mapping[str, Any]], ties: Iterable[Mapping[str, Any]]
) -> list[dict[str, str]]:
    """Of each game, by the matches there are: those of its first round are there from the start."""
    if order_of(figures.config) != "knockout":
        return []
    players: defaultdict[str, set[str]] = defaultdict(set)
    null = figures.config["tournament"].get("null_pairing")
    for match in figures.matches.values():
        if not null or null_name(null) not in match.row.agents:
            players[label(match.row.game, match.row.ruleset)].update(match.row.agents)
    for bye in byes:
        players[bye["game"]].add(bye["agent"])
    found = (
        (game, knockout_winner(names, [tie for tie in ties if tie["game"] == game]))
        for game, names in sorted(players.items())
    )
    return [{"game": game, "agent": winner} for game, winner in found if winner is not None]


def sprt(
    config: Mapping[str, Any],
    rows: Iterable[MatchRow],
    left_out: frozenset[str],
    unrated: Collection[str],
) -> list[dict[str, Any]]:
    """The report's `sprt`: each pairing's test by its complete pairs in the order of the schedule,
    of the agent named first; `elo` is free of the stop's bias, and its ends are None where there is
    no bound. Agents `left_out` are not tested.

    Pairs with a game of `unrated` (ids) are left out, and counted in `unrated_pairs`. The run
    itself cannot know them, for what saturated an engine shows afterwards: it goes by all pairs,
    and `run_decision` is what these say. None of a stored test whose bounds are refused today.
    """
    asked = config.get("sprt")
    if asked is None:
        return []
    try:
        section = SprtSection(**asked)
    except ValueError:
        return []
    return [
        _row(section, game, names, pairs, unrated)
        for (game, names), pairs in _by_pairing(rows).items()
        if left_out.isdisjoint(names)
    ]


_Pairs = list[list[MatchRow]]


def _by_pairing(rows: Iterable[MatchRow]) -> Mapping[tuple[str, tuple[str, str]], _Pairs]:
    """Pairs in the order of the schedule, each with its first-named agent's first game first."""
    pairs: dict[str, list[MatchRow]] = {}
    for row in sorted(rows, key=lambda row: row.number):
        pairs.setdefault(row.pair_id, []).append(row)
    found: dict[tuple[str, tuple[str, str]], _Pairs] = {}
    for both in pairs.values():
        first = both[0]
        found.setdefault((label(first.game, first.ruleset), first.agents), []).append(both)
    return found


def _is_complete(pair: list[MatchRow]) -> bool:
    return len(pair) == 2 and all(row.state == "finished" for row in pair)


def _number_complete(pairs: _Pairs) -> int:
    return sum(map(_is_complete, pairs))


def _tested(test: Sprt, pairs: _Pairs) -> EarlyStop:
    stop = EarlyStop(test)
    for index, both in enumerate(pairs):
        if _is_complete(both):
            one, two = (0.5 if row.winner is None else 1.0 - row.winner for row in both)
            stop.note(index, (one, 1 - two))
    return stop


def _row(
    asked: SprtSection, game: str, names: tuple[str, str], pairs: _Pairs, unrated: Collection[str]
) -> dict[str, Any]:
    test = asked.test
    rated = [both for both in pairs if not any(row.id in unrated for row in both)]
    stop = _tested(test, rated)
    low, high = stop.test.bounds
    found = stop.estimate()
    return {
        "game": game,
        "agent": names[0],
        "opponent": names[1],
        "elo0": stop.test.elo0,
        "elo1": stop.test.elo1,
        "pairs": stop.pairs,
        "llr": stop.llr,
        "lower": low,
        "upper": high,
        "decision": stop.state,
        "is_exhausted": stop.state == "continue" and _number_complete(pairs) >= asked.max_pairs,
        "unrated_pairs": len(pairs) - len(rated),
        "run_decision": _tested(test, pairs).state if len(rated) < len(pairs) else stop.state,
        "elo": None if found is None else _bounded(found.elo),
    }


def _bounded(elo: Estimate) -> dict[str, float | None]:
    """Ends are None where there is no bound."""
    low, high = (None if abs(end) >= FURTHEST_ELO else end for end in (elo.low, elo.high))
    return {"value": elo.value, "low": low, "high": high}
