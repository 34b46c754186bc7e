"""The report of a run, finished or not, as one JSON object fixed by SCHEMA_VERSION."""

from collections.abc import Mapping, Sequence
from typing import Any

from arena.field import Field
from arena.figures import Figures, label
from arena.pairwise import Estimate
from arena.standings import Outcome, Standings, standings
from arena.store import MatchRow, Records
from arena.verdicts import saturated_engines, verdict_of_run
from games import Termination

SCHEMA_VERSION = 1
FORFEITS = (Termination.FORFEIT, Termination.FLAG_FALL)
"""Terminations that are failures at the protocol, not at the game."""


def build(records: Records) -> dict[str, Any]:
    """The report of a run as its store holds it; unknown figures are None."""
    return report(figures_of(records))


def figures_of(records: Records) -> Figures:
    """Exact figures of all that a run holds."""
    figures = Figures(records.run, records.matches, exact=True)
    figures.add(records.rows())
    figures.settle()
    return figures


def report(figures: Figures) -> dict[str, Any]:
    """The report of figures."""
    finished = sorted(figures.finished, key=lambda row: row.number)
    unrated = unrated_matches(figures)
    by_game = {
        game: standings(outcome(row, is_rated=row.id not in unrated) for row in rows)
        for game, rows in _by_game(finished).items()
    }
    run = figures.run
    return {
        "schema_version": SCHEMA_VERSION,
        "run": {"name": figures.config["name"], "id": run.id, "created": run.created},
        **figures.fleet(),
        "results": [
            {**result(row, figures.matches[row.id].plies), "is_rated": row.id not in unrated}
            for row in finished
        ],
        "pairings": [row for game in by_game.items() for row in _pairings(*game)],
        "agents": [figures.agents[key].row() for key in sorted(figures.agents)],
        "engines": [engine.row() for engine in figures.engines.values()],
        "standings": _standings(finished, by_game),
        "ratings": [_ratings(*game) for game in by_game.items()],
        "verdict": verdict_of_run(figures),
    }


def result(row: MatchRow, plies: int) -> dict[str, Any]:
    """A finished match in one row."""
    return {
        "match": row.id,
        "pair": row.pair_id,
        "game": label(row.game, row.ruleset),
        "first": row.agent_first,
        "second": row.agent_second,
        "opening": row.opening,
        "winner": None if row.winner is None else row.agents[row.winner],
        "termination": row.termination,
        "detail": row.detail,
        "scores": None if row.score_first is None else [row.score_first, row.score_second],
        "plies": plies,
    }


def unrated_matches(figures: Figures) -> set[str]:
    """Ids of finished matches that say nothing of their players: a flag that fell while the engine
    behind it was saturated."""
    fallen = [row for row in figures.finished if row.termination == Termination.FLAG_FALL]
    if not fallen:
        return set()
    saturated = saturated_engines(figures)
    engines = {agent["name"]: agent.get("engine") for agent in figures.config["agents"]}
    return {
        row.id
        for row in fallen
        if row.winner is not None and engines.get(row.agents[1 - row.winner]) in saturated
    }


def outcome(row: MatchRow, *, is_rated: bool = True) -> Outcome:
    """What came of a finished match, as the ratings take it."""
    is_forfeit = row.termination in FORFEITS and row.winner is not None
    score = 0.5 if row.winner is None else 1.0 - row.winner
    return Outcome(*row.agents, score, row.pair_id, is_forfeit, is_rated)


def _by_game(finished: Sequence[MatchRow]) -> dict[str, list[MatchRow]]:
    rows: dict[str, list[MatchRow]] = {}
    for row in finished:
        rows.setdefault(label(row.game, row.ruleset), []).append(row)
    return rows


def _pairings(game: str, rated: Standings) -> list[dict[str, Any]]:
    """Each two that met: wins, draws, losses and Elo of the first-named, forfeits counted."""
    return [
        {
            "game": game,
            "agent": pairing.one,
            "opponent": pairing.two,
            "wins": pairing.wins,
            "draws": pairing.draws,
            "losses": pairing.losses,
            "pairs": pairing.pairs._asdict(),
            "elo": _estimate(pairing.best.elo),
            "nelo": _estimate(pairing.best.nelo),
            "los": pairing.best.los,
        }
        for pairing in rated.pairings
    ]


def _estimate(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def _ratings(game: str, rated: Standings) -> dict[str, Any]:
    """What a game's ratings are worth: who can be compared, and with what certainty."""
    field = rated.results
    return {
        "game": game,
        "advantage_elo": field.advantage,
        "groups": [list(group) for group in field.groups],
        "is_penalised": field.is_penalised,
        "names": list(field.ratings),
        "los": field.los_matrix(),
    }


def _elo(field: Field, name: str, key: str) -> dict[str, float | None]:
    """A rating and its error; None of a player without a game that counts."""
    if name not in field.ratings:
        return {key: None, f"{key}_error": None}
    return {key: field.ratings[name], f"{key}_error": field.error(name)}


def _standings(
    finished: Sequence[MatchRow], by_game: Mapping[str, Standings]
) -> list[dict[str, Any]]:
    """Points per agent and game, 1 for a win and half for a draw, with ratings: `elo` counts
    forfeits as losses, `skill_elo` leaves them out, and `protocol_score` is the share of games not
    forfeited. Unrated games count in the points alone. Means are 0 in each group of `ratings`;
    errors are half of 95 % intervals."""
    table: dict[tuple[str, str], list[int]] = {}
    for row in finished:
        for side, name in enumerate(row.agents):
            counts = table.setdefault((label(row.game, row.ruleset), name), [0, 0, 0])
            counts[1 if row.winner is None else 0 if row.winner == side else 2] += 1
    rows = []
    for (game, name), counts in table.items():
        rated = by_game[game]
        protocol = rated.protocol.get(name)
        rows.append(
            {
                "name": name,
                "game": game,
                "games": sum(counts),
                "wins": counts[0],
                "draws": counts[1],
                "losses": counts[2],
                "points": counts[0] + counts[1] / 2,
                **_elo(rated.results, name, "elo"),
                **_elo(rated.skill, name, "skill_elo"),
                "protocol_score": None if protocol is None else _estimate(protocol),
            }
        )
    return sorted(rows, key=lambda row: (row["game"], -float(str(row["points"])), row["name"]))
