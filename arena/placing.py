"""Who stands where, pure: in the order of a tournament's own format.

A Swiss tournament goes by points with those of byes, then by Buchholz, then by Sonneborn-Berger
(FIDE Handbook C.07); a knock-out by the rounds survived; formats in which players do not have
equally many games against equal opponents by Elo; the others by points.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Order = Literal["points", "elo", "swiss", "knockout"]
Row = dict[str, Any]


class TieBreaks(NamedTuple):
    """See `tie_breaks`."""

    buchholz: float
    sonneborn_berger: float


class GameScore(NamedTuple):
    """A finished game."""

    names: tuple[str, str]
    score: float
    """The first-named player's: 0, 1/2 or 1."""


def order_of(config: Mapping[str, Any]) -> Order:
    """By what the standings of a run are ordered."""
    format_ = config.get("tournament", {}).get("format", "round_robin")
    is_stopped_early = format_ == "round_robin" and config.get("sprt") is not None
    if is_stopped_early or format_ in ("gauntlet", "ladder"):
        return "elo"
    orders: dict[str, Order] = {"swiss": "swiss", "knockout": "knockout"}
    return orders.get(format_, "points")


def tie_breaks(
    totals: Mapping[str, float],
    games: Iterable[GameScore],
    byes: Iterable[str],
    games_per_round: int,
) -> dict[str, TieBreaks]:
    """Of each in `totals`, its points with those of byes. Buchholz: its opponents' points, once for
    each round. Sonneborn-Berger: the same, each times the share of the round's points that it made.
    A bye counts as a round won against somebody with as many points as it has itself (FIDE C.07,
    16.4)."""
    buchholz: defaultdict[str, float] = defaultdict(float)
    sonneborn: defaultdict[str, float] = defaultdict(float)
    for (one, two), score in games:
        for name, other, made in ((one, two, score), (two, one, 1 - score)):
            buchholz[name] += totals[other] / games_per_round
            sonneborn[name] += totals[other] * made / games_per_round
    for name in byes:
        buchholz[name] += totals[name]
        sonneborn[name] += totals[name]
    return {name: TieBreaks(buchholz[name], sonneborn[name]) for name in totals}


def placed(
    rows: Sequence[Row],
    order: Order,
    byes: Sequence[Mapping[str, Any]],
    ties: Sequence[Mapping[str, Any]],
    groups: Sequence[Sequence[str]],
) -> list[Row]:
    """Rows of one game's standings in order, each with `place`: from 1, shared where nothing tells
    two apart, by Elo within a group of `groups` alone, and None of a player without the rating.
    They gain `rounds_won` in a knock-out: ties won, and byes."""
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    lost = {name for tie in ties for name in tie["agents"] if name != tie["winner"]}
    won = Counter([tie["winner"] for tie in ties] + [bye["agent"] for bye in byes])

    def key(row: Row) -> tuple[float, ...]:
        name, points = row["name"], row["points"] + row["bye_points"]
        if order == "elo":
            elo = row["elo"]
            at = group_of.get(name, len(groups))
            return (len(groups), 0.0) if elo is None else (at, -round(elo, 3))
        if order == "knockout":
            return (-won[name], name in lost)
        if order == "swiss":
            return (-points, *(-round(row[key], 6) for key in TieBreaks._fields))
        return (-points,)

    keys = {row["name"]: key(row) for row in rows}
    ranked = sorted(rows, key=lambda row: (keys[row["name"]], -row["points"], row["name"]))
    told = []
    for row in ranked:
        mine = keys[row["name"]]
        rivals = [each for each in keys.values() if order != "elo" or each[0] == mine[0]]
        place = 1 + sum(each < mine for each in rivals)
        told.append(
            {
                "place": None if order == "elo" and row["elo"] is None else place,
                **row,
                "rounds_won": won[row["name"]] if order == "knockout" else None,
            }
        )
    return told


def knockout_winner(players: Iterable[str], ties: Sequence[Mapping[str, Any]]) -> str | None:
    """Who won a knock-out of so many; None while it is played. Each tie but one's winner is out."""
    if not ties or len(ties) < len(set(players)) - 1:
        return None
    winner: str = max(ties, key=lambda tie: tie["round"])["winner"]
    return winner
