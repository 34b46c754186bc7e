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
        "engines": _Table(("name", "kind", "version"), figures["engines"]),
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
