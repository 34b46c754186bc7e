"""A run as CSV, one file a table (RFC 4180, UTF-8, a header row); times and units are in the names.

An empty field is what is not known. A text that a spreadsheet would take for a formula begins with
an apostrophe, which is not part of it (OWASP, "CSV Injection").
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from arena import output, report
from arena.output import Kind
from arena.store import AttemptRow, MatchRow, PlyRow, Records

_FORMULA = tuple("=+-@\t\r\n＝＋－＠")
_TIMES = (
    *("started", "ended", "suspended_at", "ready", "due", "done"),
    *("submitted", "admitted", "first_token"),
)
"""Columns of the store in seconds since the run began."""


class _Table(NamedTuple):
    first: tuple[str, ...]
    """Its first columns, which it has without rows too."""
    rows: Iterable[Mapping[str, Any]]


def write(folder: Path, records: Records) -> None:
    """Write all tables into a folder, as `output.write_all` does. StoreError if they cannot be."""
    files = {
        f"{name}.csv": (_kind(table.first[:5]), text(table.first, table.rows))
        for name, table in _tables(records).items()
    }
    output.write_all(folder, files)


def text(first: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Rows as CSV, piece by piece. Mappings in a row become columns of their own (`elo_low`); the
    columns are `first`, then all that occur, in order."""
    flat = [dict(_flat(row)) for row in rows]
    columns = list(dict.fromkeys((*first, *(name for row in flat for name in row))))
    line = io.StringIO(newline="")
    writer = csv.writer(line)
    lines: tuple[Sequence[object], ...] = (
        columns,
        *([_field(row.get(name)) for name in columns] for row in flat),
    )
    for fields in lines:
        writer.writerow(fields)
        yield line.getvalue()
        line.seek(0)
        line.truncate()


def _tables(records: Records) -> dict[str, _Table]:
    """All of a run but its telemetry and events."""
    figures = report.build(records)
    return {
        "matches": _Table(_columns(MatchRow), map(_stored, records.matches)),
        "plies": _Table(_columns(PlyRow), map(_stored, records.plies)),
        "attempts": _Table(_columns(AttemptRow), map(_stored, records.attempts)),
        "standings": _Table(("name", "game", "games"), figures["standings"]),
        "pairings": _Table(("game", "agent", "opponent"), figures["pairings"]),
        "engines": _Table(("name", "kind", "version"), map(_of_engine, figures["engines"])),
        "replicas": _Table(("engine", "replica", "matches"), _replicas(figures["engines"])),
        "results": _Table(("match", "pair", "game"), map(_of_result, figures["results"])),
        "null_pairings": _Table(("game", "agent", "opponent"), figures["null_pairings"]),
        "sprt": _Table(("game", "agent", "opponent"), figures["sprt"]),
        "ratings": _Table(("game", "name", "group"), _ratings(figures["ratings"])),
        "los": _Table(("game", "agent", "opponent", "los"), _likelihoods(figures["ratings"])),
        "byes": _Table(("game", "round", "agent", "points"), figures["tournament"]["byes"]),
        "ties": _Table(("game", "round", "tie"), map(_of_tie, figures["tournament"]["ties"])),
    }


def _of_engine(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "replicas"}


def _replicas(engines: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row a replica; none of an engine without several."""
    for engine in engines:
        for row in (engine["replicas"] or {"rows": ()})["rows"]:
            yield {"engine": engine["name"], **row}


def _ratings(told: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row a player with what is said of its game's ratings; groups are numbered from 1. Where no
    ratings were found there is one row a game, without a name."""
    for game in told:
        common = {key: value for key, value in game.items() if not isinstance(value, list)}
        for name in game["names"] or [None]:
            groups = {
                key: next((n for n, group in enumerate(game[of], 1) if name in group), None)
                for key, of in (("group", "groups"), ("skill_group", "skill_groups"))
            }
            yield {"game": game["game"], "name": name, **groups, **common}


def _likelihoods(told: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each player over each other."""
    for game in told:
        for one, chances in zip(game["names"], game["los"], strict=True):
            for two, chance in zip(game["names"], chances, strict=True):
                if one != two:
                    yield {"game": game["game"], "agent": one, "opponent": two, "los": chance}


def _of_result(row: Mapping[str, Any]) -> dict[str, Any]:
    first, second = row["scores"] or (None, None)
    told = {key: value for key, value in row.items() if key != "scores"}
    return {**told, "score_first": first, "score_second": second}


def _of_tie(row: Mapping[str, Any]) -> dict[str, Any]:
    told = {key: value for key, value in row.items() if key not in ("agents", "points")}
    sides = zip(("higher_seed", "other"), row["agents"], row["points"], strict=True)
    return told | {
        key: value
        for side, name, points in sides
        for key, value in ((side, name), (f"{side}_points", points))
    }


def _kind(first: Sequence[str]) -> Kind:
    return Kind("such table of ours", ",".join(first).encode())


def _columns(row: type[MatchRow] | type[PlyRow] | type[AttemptRow]) -> tuple[str, ...]:
    return tuple(f"{name}_s" if name in _TIMES else name for name in row._fields)


def _stored(row: MatchRow | PlyRow | AttemptRow) -> dict[str, Any]:
    return dict(zip(_columns(type(row)), row, strict=True))


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}_")
        else:
            yield prefix + name, value


def _field(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.startswith(_FORMULA):
        return "'" + value
    return value
