"""The report of a run, finished or not, as one JSON object fixed by SCHEMA_VERSION."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from arena.bradley_terry import MISFIT
from arena.config import anchors_at, null_name
from arena.contest_report import contest, sprt
from arena.field import Field
from arena.figures import Figures, MatchFigures, label
from arena.pairwise import Estimate
from arena.placing import GameScore, Order, TieBreaks, order_of, placed, tie_breaks
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
    told = contest(figures)
    made = tables(ended, asked, told)
    run = figures.run
    return {
        "schema_version": SCHEMA_VERSION,
        "run": {"name": figures.config["name"], "id": run.id, "created": run.created},
        **figures.fleet(),
        "results": [
            result(figures.matches[match.row.id], is_rated=match.is_rated) for match in ended
        ],
        "pairings": made["pairings"],
        "agents": [figures.agents[key].row() for key in sorted(figures.agents)],
        "engines": [engine.row() for engine in figures.engines.values()],
        "standings": made["standings"],
        "ratings": made["ratings"],
        "null_pairings": made["null_pairings"],
        "sprt": sprt(figures.config, rows_of(figures), asked.null_names, unrated_of(ended)),
        "tournament": told,
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
    """What the config asks of ratings and standings."""

    names: Sequence[str] = ()
    """In the order in which two of them are named: a gauntlet's challengers first, as in its
    schedule, then as the agents stand in the config."""
    anchors: Mapping[str, float | Mapping[str, float]] = MappingProxyType({})
    """As in the config: see `config.anchors_at`."""
    null_names: frozenset[str] = frozenset()
    """An agent's second name, whose games are the noise floor and rate nobody."""
    order: Order = "points"
    games_per_round: int = 2
    """Of each two who meet in a round of a Swiss tournament."""


def asked_of(figures: Figures) -> Asked:
    """What the run's config asks of ratings and standings."""
    asked = figures.config.get("tournament", {})
    null = asked.get("null_pairing")
    agents = [agent["name"] for agent in figures.config["agents"]]
    return Asked(
        names=list(dict.fromkeys([*asked.get("challengers", ()), *agents])),
        anchors=asked.get("anchors", {}),
        null_names=frozenset([null_name(null)] if null else ()),
        order=order_of(figures.config),
        games_per_round=2 * asked.get("pairs", 1),
    )


def ended_matches(figures: Figures) -> list[Ended]:
    """The finished matches by number."""
    unrated = unrated_matches(figures)
    rows = sorted(figures.finished, key=lambda row: row.number)
    return [Ended(row, figures.matches[row.id].fault, row.id not in unrated) for row in rows]


def unrated_of(ended: Iterable[Ended]) -> frozenset[str]:
    """Ids of those that are not rated."""
    return frozenset(match.row.id for match in ended if not match.is_rated)


def tables(ended: Sequence[Ended], asked: Asked, contest: Mapping[str, Any]) -> dict[str, Any]:
    """`pairings`, `standings`, `ratings` and `null_pairings` of the report, whose `tournament` is
    `contest`. Pure, for any thread: 64 players and 4,000 games take a CPU two to three seconds."""
    null = [match for match in ended if not asked.null_names.isdisjoint(match.row.agents)]
    met_itself = {match.row.id for match in null}
    ended = [match for match in ended if match.row.id not in met_itself]
    by_game = {
        game: standings(
            map(_outcome, matches), anchors_at(asked.anchors, matches[0].row.game), asked.names
        )
        for game, matches in _by_game(ended).items()
    }
    return {
        "pairings": [
            row for game, rated in by_game.items() for row in _pairings(game, rated.pairings)
        ],
        "standings": [
            row
            for game, matches in sorted(_by_game(ended).items())
            for row in _standings(game, matches, by_game[game], asked, contest)
        ],
        "ratings": [_ratings(*game) for game in by_game.items()],
        "null_pairings": [
            row
            for game, matches in _by_game(null).items()
            for row in _pairings(game, pairings(list(map(_outcome, matches)), asked.names))
        ],
    }


def result(match: MatchFigures, *, is_rated: bool) -> dict[str, Any]:
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
        "is_rated": is_rated,
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
            "nelo": _known(pairing.best.nelo),
            "los": pairing.best.los,
        }
        for pairing in met
    ]


def _estimate(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def _known(estimate: Estimate | None) -> dict[str, float] | None:
    return None if estimate is None else _estimate(estimate)


def _ratings(game: str, rated: Standings) -> dict[str, Any]:
    """What a game's ratings are worth: who can be compared, and with what certainty; why there are
    none (`failure`); and how well they fit the anchors (`bradley_terry.anchor_fit`)."""
    field = rated.results
    return {
        "game": game,
        "advantage_elo": field.advantage,
        "advantage_error": field.advantage_error,
        "groups": [list(group) for group in field.groups],
        "skill_groups": [list(group) for group in rated.skill.groups],
        "is_penalised": field.is_penalised,
        "failure": field.failure or rated.skill.failure,
        "anchor_fit": None
        if rated.anchor_fit is None
        else {"chance": rated.anchor_fit, "is_credible": rated.anchor_fit >= MISFIT},
        "names": list(field.ratings),
        "los": field.los_matrix(),
    }


def _elo(field: Field, name: str, key: str) -> dict[str, float | None]:
    """A rating and its error; None of a player without a game that counts."""
    if name not in field.ratings:
        return {key: None, f"{key}_error": None}
    return {key: field.ratings[name], f"{key}_error": field.error(name)}


def _forfeits(ended: Sequence[Ended]) -> Mapping[str, Counter[str]]:
    """How often each agent lost by a failure at the protocol: by name, then by failure."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for row, fault, _ in ended:
        if fault is not None and row.winner is not None:
            found[row.agents[1 - row.winner]][fault] += 1
    return found


def _standings(
    game: str,
    ended: Sequence[Ended],
    rated: Standings,
    asked: Asked,
    contest: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Points per agent of one game, 1 for a win and half for a draw, with ratings: `elo` counts
    forfeits as losses, `skill_elo` leaves them out, and `protocol_score` is the share of games not
    forfeited. Unrated games count in the points alone. Means are 0 in each group of `ratings`;
    errors are half of 95 % intervals. In the order of `placing.placed`; `bye_points` are no part
    of `points`, and tie-breaks are None but in a Swiss tournament."""
    table: dict[str, list[int]] = {}
    for row, _, _ in ended:
        for side, name in enumerate(row.agents):
            counts = table.setdefault(name, [0, 0, 0])
            counts[1 if row.winner is None else 0 if row.winner == side else 2] += 1
    byes, ties = (
        [told for told in contest[kind] if told["game"] == game] for kind in ("byes", "ties")
    )
    bye_points: Counter[str] = Counter()
    for bye in byes:
        bye_points[bye["agent"]] += bye["points"]
    breaks = _tie_breaks(ended, table, bye_points, byes, asked)
    forfeits = _forfeits(ended)
    rows = []
    for name, (wins, draws, losses) in table.items():
        protocol = rated.protocol.get(name)
        rows.append(
            {
                "name": name,
                "game": game,
                "games": wins + draws + losses,
                "wins": wins,
                "draws": draws,
                "losses": losses,
                "points": wins + draws / 2,
                "bye_points": float(bye_points[name]),
                **{key: getattr(breaks.get(name), key, None) for key in TieBreaks._fields},
                "forfeits": dict(forfeits.get(name, {})),
                **_elo(rated.results, name, "elo"),
                **_elo(rated.skill, name, "skill_elo"),
                "protocol_score": _known(protocol),
            }
        )
    return placed(rows, asked.order, byes, ties, rated.results.groups)


def _tie_breaks(
    ended: Sequence[Ended],
    table: Mapping[str, Sequence[int]],
    bye_points: Mapping[str, float],
    byes: Sequence[Mapping[str, Any]],
    asked: Asked,
) -> Mapping[str, TieBreaks]:
    """Of a Swiss tournament's players; of no other's."""
    if asked.order != "swiss":
        return {}
    names = {*table, *bye_points}
    totals = {
        name: wins + draws / 2 + bye_points.get(name, 0.0)
        for name in names
        for wins, draws, _ in [table.get(name, (0, 0, 0))]
    }
    games = (GameScore(row.agents, outcome(row).score) for row, _, _ in ended)
    return tie_breaks(totals, games, [bye["agent"] for bye in byes], asked.games_per_round)
