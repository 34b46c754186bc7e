"""The report of a run, finished or not, as one JSON object fixed by SCHEMA_VERSION."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from arena.config import null_name
from arena.contest_report import contest, sprt
from arena.field import Field
from arena.figures import Figures, MatchFigures, label
from arena.pairwise import Estimate
from arena.standings import Outcome, Pairing, Standings, pairings, standings
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
    ended = ended_matches(figures)
    asked = asked_of(figures)
    made = tables(ended, asked)
    run = figures.run
    return {
        "schema_version": SCHEMA_VERSION,
        "run": {"name": figures.config["name"], "id": run.id, "created": run.created},
        **figures.fleet(),
        "results": [
            {**result(figures.matches[match.row.id]), "is_rated": match.is_rated} for match in ended
        ],
        "pairings": made["pairings"],
        "agents": [figures.agents[key].row() for key in sorted(figures.agents)],
        "engines": [engine.row() for engine in figures.engines.values()],
        "standings": made["standings"],
        "ratings": made["ratings"],
        "null_pairings": made["null_pairings"],
        "sprt": sprt(figures.config, rows_of(figures), asked.null_names),
        "tournament": contest(figures),
        "verdict": verdict_of_run(figures),
    }


def rows_of(figures: Figures) -> list[MatchRow]:
    """All matches of a run as they stand."""
    return [match.row for match in figures.matches.values()]


class Ended(NamedTuple):
    """A finished match as the tables take it."""

    row: MatchRow
    fault: str | None
    """The failure at the protocol that decided it."""
    is_rated: bool


class Asked(NamedTuple):
    """What the config asks of ratings."""

    anchors: Mapping[str, float] = MappingProxyType({})
    null_names: frozenset[str] = frozenset()
    """An agent's second name, whose games are the noise floor and rate nobody."""


def asked_of(figures: Figures) -> Asked:
    """What the run's config asks of ratings."""
    asked = figures.config.get("tournament", {})
    null = asked.get("null_pairing")
    return Asked(asked.get("anchors", {}), frozenset([null_name(null)] if null else ()))


def ended_matches(figures: Figures) -> list[Ended]:
    """The finished matches by number."""
    unrated = unrated_matches(figures)
    rows = sorted(figures.finished, key=lambda row: row.number)
    return [Ended(row, figures.matches[row.id].fault, row.id not in unrated) for row in rows]


def tables(ended: Sequence[Ended], asked: Asked) -> dict[str, Any]:
    """`pairings`, `standings`, `ratings` and `null_pairings` of the report. Pure, for any thread:
    64 players and 4,000 games take a CPU two to three seconds."""
    null = [match for match in ended if not asked.null_names.isdisjoint(match.row.agents)]
    met_itself = {match.row.id for match in null}
    ended = [match for match in ended if match.row.id not in met_itself]
    by_game = {
        game: standings(map(_outcome, matches), asked.anchors)
        for game, matches in _by_game(ended).items()
    }
    return {
        "pairings": [
            row for game, rated in by_game.items() for row in _pairings(game, rated.pairings)
        ],
        "standings": _standings(ended, by_game),
        "ratings": [_ratings(*game) for game in by_game.items()],
        "null_pairings": [
            row
            for game, matches in _by_game(null).items()
            for row in _pairings(game, pairings(list(map(_outcome, matches))))
        ],
    }


def result(match: MatchFigures) -> dict[str, Any]:
    """A finished match in one row."""
    row = match.row
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
        "plies": match.plies,
        "fault": match.fault,
    }


def unrated_matches(figures: Figures) -> set[str]:
    """Ids of finished matches that say nothing of their players: a flag that fell while the engine
    behind it was saturated."""
    fallen = [row for row in figures.finished if row.termination == Termination.FLAG_FALL]
    if not fallen:
        return set()
    saturated = saturated_engines(figures)
    engines = {agent["name"]: agent.get("engine") for agent in figures.config["agents"]}
    engines |= {null_name(name): engine for name, engine in engines.items()}
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


def _by_game(ended: Sequence[Ended]) -> dict[str, list[Ended]]:
    matches: dict[str, list[Ended]] = {}
    for match in ended:
        matches.setdefault(label(match.row.game, match.row.ruleset), []).append(match)
    return matches


def _outcome(match: Ended) -> Outcome:
    return outcome(match.row, is_rated=match.is_rated)


def _pairings(game: str, met: Iterable[Pairing]) -> list[dict[str, Any]]:
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
        for pairing in met
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
        "skill_groups": [list(group) for group in rated.skill.groups],
        "is_penalised": field.is_penalised,
        "names": list(field.ratings),
        "los": field.los_matrix(),
    }


def _elo(field: Field, name: str, key: str) -> dict[str, float | None]:
    """A rating and its error; None of a player without a game that counts."""
    if name not in field.ratings:
        return {key: None, f"{key}_error": None}
    return {key: field.ratings[name], f"{key}_error": field.error(name)}


def _forfeits(ended: Sequence[Ended]) -> Mapping[tuple[str, str], Counter[str]]:
    """How often each agent lost by a failure at the protocol: by game and name, then by failure."""
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row, fault, _ in ended:
        if fault is not None and row.winner is not None:
            found[label(row.game, row.ruleset), row.agents[1 - row.winner]][fault] += 1
    return found


def _standings(ended: Sequence[Ended], by_game: Mapping[str, Standings]) -> list[dict[str, Any]]:
    """Points per agent and game, 1 for a win and half for a draw, with ratings: `elo` counts
    forfeits as losses, `skill_elo` leaves them out, and `protocol_score` is the share of games not
    forfeited. Unrated games count in the points alone. Means are 0 in each group of `ratings`;
    errors are half of 95 % intervals."""
    table: dict[tuple[str, str], list[int]] = {}
    for row, _, _ in ended:
        for side, name in enumerate(row.agents):
            counts = table.setdefault((label(row.game, row.ruleset), name), [0, 0, 0])
            counts[1 if row.winner is None else 0 if row.winner == side else 2] += 1
    forfeits = _forfeits(ended)
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
                "forfeits": dict(forfeits.get((game, name), {})),
                **_elo(rated.results, name, "elo"),
                **_elo(rated.skill, name, "skill_elo"),
                "protocol_score": None if protocol is None else _estimate(protocol),
            }
        )
    return sorted(rows, key=lambda row: (row["game"], -float(str(row["points"])), row["name"]))
