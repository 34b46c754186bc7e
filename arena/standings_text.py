"""The standings of a report as cells and words, for a terminal."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

MOST_NAMED = 8
"""Names or groups in a note."""

Report = Mapping[str, Any]
Row = Mapping[str, Any]

ORDERS = {
    "points": "points",
    "elo": "Elo",
    "swiss": "points with byes, Buchholz, Sonneborn-Berger (S-B)",
    "knockout": "rounds won",
}
NAMES = ("game", "#", "agent")
"""First columns of the table."""


class Standings(NamedTuple):
    """The table; its first columns are NAMES."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def table(report: Report) -> Standings:
    """The standings of all games, with the columns that say something."""
    groups = {told["game"]: told["groups"] for told in report["ratings"]}
    rows = report["standings"]

    def group(row: Row) -> str | None:
        numbered = enumerate(groups[row["game"]], 1)
        found = (number for number, names in numbered if row["name"] in names)
        return _optional(next(found, None)) if len(groups[row["game"]]) > 1 else None

    columns: dict[str, Callable[[Row], str | None]] = {
        "game": lambda row: row["game"],
        "#": lambda row: "-" if row["place"] is None else str(row["place"]),
        "agent": lambda row: row["name"],
        "games": lambda row: str(row["games"]),
        "points": lambda row: f"{row['points'] + row['bye_points']:g}",
        "of byes": lambda row: f"{row['bye_points']:g}" if row["bye_points"] else None,
        "Buchholz": lambda row: _optional(row["buchholz"]),
        "S-B": lambda row: _optional(row["sonneborn_berger"]),
        "rounds won": lambda row: _optional(row["rounds_won"]),
        "Elo": lambda row: rating(row["elo"], row["elo_error"]),
        "skill": lambda row: rating(row["skill_elo"], row["skill_elo_error"]),
        "protocol": lambda row: _protocol(row["protocol_score"]),
        "group": group,
    }
    cells = {heading: [value(row) for row in rows] for heading, value in columns.items()}
    told = {heading: each for heading, each in cells.items() if any(each)}
    by = ORDERS[report["tournament"]["order"]]
    return Standings(
        title=f"Standings by {by}. Ratings ± 95 %; skill: without forfeits; protocol: games not "
        "forfeited",
        columns=list(told),
        rows=[[cell or "" for cell in row] for row in zip(*told.values(), strict=True)],
    )


def rating(value: float | None, error: float | None) -> str:
    """A rating with half of its interval."""
    return "-" if value is None else f"{round(value)} ± {error:.0f}"


def likelihood(chance: float) -> str:
    """A likelihood, which is never certain."""
    return ">99.9%" if chance >= 0.9995 else "<0.1%" if chance < 0.0005 else f"{chance:.1%}"


def _protocol(score: Mapping[str, float] | None) -> str:
    """All and none are said of nothing else."""
    if score is None:
        return "-"
    share = score["value"]
    return ">99%" if 0.995 <= share < 1 else "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def _optional(value: float | None) -> str | None:
    return None if value is None else f"{round(value, 2):g}"


def interval(elo: Row) -> str:
    """The ends of an interval; None is no bound."""
    low = "no lower bound" if elo["low"] is None else f"{round(elo['low']):+}"
    high = "no upper bound" if elo["high"] is None else f"{round(elo['high']):+}"
    return f"{low} to {high}"


def decision(test: Row) -> str:
    """What a test by SPRT says."""
    if test["decision"] == "continue":
        return "undecided: max_pairs reached" if test["is_exhausted"] else "open"
    if test["decision"] == "accept":
        return f"H1 accepted (elo1 {test['elo1']:g})"
    return f"H0 accepted (elo0 {test['elo0']:g})"


TEST_NOTE = (
    "Elo of a test: of the pairs up to its decision and, from 30 on, free of the bias that an "
    "early stop brings. Elo of a pairing: of all its games, with that bias."
)


def notes(report: Report) -> Iterator[str]:
    """What a reader must know before believing the numbers."""
    for winner in report["tournament"]["winners"]:
        yield f"{winner['game']}: {winner['agent']} won the knock-out."
    for told in report["ratings"]:
        game = told["game"]
        unrated = [row for row in report["results"] if row["game"] == game and not row["is_rated"]]
        rows = [row for row in report["standings"] if row["game"] == game]
        for note in (*_ratings_notes(told), *_zero_notes(rows), *_unrated_notes(unrated)):
            yield f"{game}: {note}"
    yield from _fit_notes(report["ratings"])
    yield from _test_notes(report["sprt"])


def _ratings_notes(told: Row) -> Iterator[str]:
    groups, skill_groups = told["groups"], told["skill_groups"]
    if len(groups) > 1:
        yield f"no games link these {_groups(groups)}"
    if len(skill_groups) > 1 and skill_groups != groups:
        yield f"without forfeited games none link, as to skill, these {_groups(skill_groups)}"
    if told["is_penalised"]:
        yield (
            "these results alone would put ratings at infinity: somebody won or lost everything, "
            "or did with one side of the board; a penalty "
            "keeps them finite. Of two players alone, go by their pairing."
        )
    if told["advantage_elo"] is not None:
        worth = f"{round(told['advantage_elo']):+} ± {told['advantage_error']:.0f}"
        yield f"moving first is worth {worth} Elo (95 %)."


def _fit_notes(ratings: Sequence[Row]) -> Iterator[str]:
    """What a reader must know before believing the ratings."""
    for rated in ratings:
        if rated["failure"] is not None:
            yield f"{rated['game']}: some or all ratings are missing: {rated['failure']}."
        if rated["anchor_fit"] is not None and not rated["anchor_fit"]["is_credible"]:
            yield (
                f"{rated['game']}: the anchors do not fit the games (a chance below 0.1 %); "
                "ratings that hang on them mean nothing."
            )


def _test_notes(tests: Sequence[Row]) -> Iterator[str]:
    """What unrated games did to a test."""
    for test in tests:
        if test["unrated_pairs"]:
            told = (
                f"{test['game']}: the test of {test['agent']} v {test['opponent']} leaves out "
                f"{test['unrated_pairs']} pairs with a game that is not rated"
            )
            if test["run_decision"] != test["decision"]:
                says = decision({**test, "decision": test["run_decision"]})
                told += f"; the run went by all pairs, which say: {says}"
            yield f"{told}."


def _zero_notes(rows: Sequence[Row]) -> Iterator[str]:
    """Elo and skill have one zero where the same players have both, or anchors hold them."""
    skills = [row["skill_elo"] for row in rows if row["skill_elo"] is not None]
    without = [row["name"] for row in rows if row["skill_elo"] is None and row["elo"] is not None]
    if without and skills and abs(sum(skills)) < 0.01 * len(skills):
        yield (
            f"no skill rating, for want of a game without a forfeit: {_listed(without, ', ')}. "
            "Skill is 0 at the mean of the others, so it is not to be compared with Elo."
        )


def _groups(groups: Sequence[Sequence[str]]) -> str:
    named = (f"{number}. {_listed(group, ', ')}" for number, group in enumerate(groups, 1))
    told = _listed(list(named), "; ")
    return f"{len(groups)} groups, so ratings compare within a group only: {told}."


def _unrated_notes(unrated: Sequence[Row]) -> Iterator[str]:
    if unrated:
        games = _listed([f"{row['first']} v {row['second']}" for row in unrated], ", ")
        yield (
            f"{len(unrated)} {'game is' if len(unrated) == 1 else 'games are'} not rated, for the "
            "engine was saturated when the flag fell, and counted in points alone, not in the "
            f"cross-table, pairings, tests and ratings: {games}."
        )


def _listed(texts: Iterable[str], between: str) -> str:
    all_ = list(texts)
    more = len(all_) - MOST_NAMED
    return between.join(all_[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
