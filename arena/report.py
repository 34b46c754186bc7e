"""The report of a run, finished or not, as one JSON object fixed by SCHEMA_VERSION."""

from collections.abc import Sequence
from typing import Any

from arena.figures import Figures, label
from arena.store import MatchRow, Records
from arena.verdicts import verdict_of_run

SCHEMA_VERSION = 1


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
    run = figures.run
    return {
        "schema_version": SCHEMA_VERSION,
        "run": {"name": figures.config["name"], "id": run.id, "created": run.created},
        **figures.fleet(),
        "results": [result(row, figures.matches[row.id].plies) for row in finished],
        "pairings": _pairings(finished),
        "agents": [figures.agents[key].row() for key in sorted(figures.agents)],
        "engines": [engine.row() for engine in figures.engines.values()],
        "standings": _standings(finished),
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


def _pairings(finished: Sequence[MatchRow]) -> list[dict[str, Any]]:
    """Wins, draws and losses of the first-named agent of each pairing."""
    table: dict[tuple[str, str, str], list[int]] = {}
    for row in finished:
        one, two = sorted(row.agents)
        counts = table.setdefault((label(row.game, row.ruleset), one, two), [0, 0, 0])
        winner = None if row.winner is None else row.agents[row.winner]
        counts[1 if winner is None else 0 if winner == one else 2] += 1
    return [
        {"game": game, "agent": one, "opponent": two, "wins": w, "draws": d, "losses": lost}
        for (game, one, two), (w, d, lost) in table.items()
    ]


def _standings(finished: Sequence[MatchRow]) -> list[dict[str, Any]]:
    """Points per agent and game: 1 for a win, half for a draw. Ratings are not estimated here."""
    table: dict[tuple[str, str], list[int]] = {}
    for row in finished:
        for side, name in enumerate(row.agents):
            counts = table.setdefault((label(row.game, row.ruleset), name), [0, 0, 0])
            counts[1 if row.winner is None else 0 if row.winner == side else 2] += 1
    rows = [
        {
            "name": name,
            "game": game,
            "games": sum(counts),
            "wins": counts[0],
            "draws": counts[1],
            "losses": counts[2],
            "points": counts[0] + counts[1] / 2,
            "elo": None,
            "elo_error": None,
        }
        for (game, name), counts in table.items()
    ]
    return sorted(rows, key=lambda row: (row["game"], -float(str(row["points"])), row["name"]))
