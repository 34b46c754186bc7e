"""What a tournament's format says beside the ratings, pure: tests, byes, ties of a knock-out."""

from collections.abc import Iterable, Mapping
from typing import Any

from arena.config import SprtSection
from arena.early_stop import EarlyStop
from arena.figures import Figures, label
from arena.store import MatchRow


def contest(figures: Figures) -> dict[str, Any]:
    """The report's `tournament`: the format, whether matches may yet be added, who sat out and with
    how many points, and how ties were decided."""
    return {
        "format": figures.config.get("tournament", {}).get("format", "round_robin"),
        "can_grow": figures.can_grow,
        "byes": figures.format_events["bye"],
        "ties": figures.format_events["tie_decided"],
    }


def sprt(
    config: Mapping[str, Any], rows: Iterable[MatchRow], left_out: frozenset[str]
) -> list[dict[str, Any]]:
    """The report's `sprt`: each pairing's test by its complete pairs in the order of the schedule,
    of the agent named first; `elo` is free of the stop's bias. Agents `left_out` are not tested."""
    asked = config.get("sprt")
    if asked is None:
        return []
    test = SprtSection(**asked).test
    return [
        _row(EarlyStop(test), game, names, pairs)
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


def _row(stop: EarlyStop, game: str, names: tuple[str, str], pairs: _Pairs) -> dict[str, Any]:
    for index, both in enumerate(pairs):
        if len(both) == 2 and all(row.state == "finished" for row in both):
            one, two = (0.5 if row.winner is None else 1.0 - row.winner for row in both)
            stop.note(index, (one, 1 - two))
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
        "elo": None
        if found is None
        else {"value": found.elo.value, "low": found.elo.low, "high": found.elo.high},
    }
