"""A run read while another process may be playing it: what is new, and one match whole."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from arena.store import (
    AttemptRow,
    EventRow,
    MatchRow,
    PlyRow,
    Records,
    Row,
    RunRow,
    SampleRow,
    StoreError,
    check_run,
    has_telemetry,
    open_read_only,
    planned,
    select,
)
from serving import SPANS_S, Bucket

_T = TypeVar("_T", bound=NamedTuple)

_LATE_S = 10.0
"""Matches may reach the disk in another order than they ended, by less than this."""


class Follower:
    """Tells what a run's folder holds beyond what it told before; of any thread, one at a time."""

    def __init__(self, folder: Path) -> None:
        """StoreError if `folder` holds no readable run."""
        check_run(folder)
        self._path = folder / "run.db"
        self._db = open_read_only(self._path, check_same_thread=False)
        self._db.isolation_level = None
        self._alone = threading.Lock()
        with self._snapshot():
            (self.run,) = select(self._db, RunRow, "id")
            self.matches = select(self._db, MatchRow, "number")
            """As they stand when following begins; `read` tells them too."""
        self._told: dict[str, MatchRow] = {}
        self._open: set[str] = set()
        """Of these, the running and suspended."""
        self._plies = {row.id: 0 for row in self.matches}
        self._rowids = dict.fromkeys(("attempts", "engine_samples", "events"), 0)
        self._last_end = 0.0
        self._last_added = 0
        """Row id of matches; a new one's is higher than all before."""
        self._buckets: dict[tuple[str, float], float] = {}

    def close(self) -> None:
        """Waits for a read under way: SQLite crashes where a connection in use is closed."""
        with self._alone:
            self._db.close()

    def read(self) -> list[Row]:
        """The rows that were not told before: a match that was added first, a move's attempts
        before it, and what became of a match after its moves. StoreError if they cannot be read."""
        with self._alone, self._snapshot():
            changed = self._changed_matches()
            fresh = [row for row in changed if row.id not in self._plies]
            self._plies |= {row.id: 0 for row in fresh}
            records = Records(
                self.run,
                tuple(changed),
                tuple(self._new_plies(changed)),
                self._beyond(AttemptRow, "attempts", "match_id, ply, rowid"),
                self._beyond(SampleRow, "engine_samples", "rowid"),
                self._beyond(EventRow, "events", "at, rowid"),
                tuple(self._new_buckets()),
            )
        return [*map(planned, fresh), *records.rows()]

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: cannot be read ({error})") from None

    def _changed_matches(self) -> list[MatchRow]:
        if not self._told:
            rows = select(self._db, MatchRow, "number")
        else:
            rows = select(
                self._db,
                MatchRow,
                "number",
                "state IN ('running', 'suspended') OR ended >= ? OR rowid > ?",
                (self._last_end - _LATE_S, self._last_added),
            )
        (added,) = self._db.execute("SELECT max(rowid) FROM matches").fetchone()
        self._last_added = added or 0
        self._last_end = max((row.ended or 0.0 for row in rows), default=self._last_end)
        changed = [row for row in rows if self._told.get(row.id) != row]
        for row in changed:
            self._told[row.id] = row
            if row.state in ("running", "suspended"):
                self._open.add(row.id)
            else:
                self._open.discard(row.id)
        return changed

    def _new_plies(self, changed: list[MatchRow]) -> Iterator[PlyRow]:
        """In the order of their matches' ids."""
        for match_id in sorted(self._open | {row.id for row in changed}):
            known = self._plies[match_id]
            rows = select(self._db, PlyRow, "ply", "match_id = ? AND ply >= ?", (match_id, known))
            self._plies[match_id] = known + len(rows)
            yield from rows

    def _beyond(self, row: type[_T], table: str, order: str) -> tuple[_T, ...]:
        (last,) = self._db.execute(f"SELECT max(rowid) FROM {table}").fetchone()
        known, self._rowids[table] = self._rowids[table], last or 0
        return select(self._db, row, order, "rowid > ?", (known,))

    def _new_buckets(self) -> Iterator[Bucket]:
        """Of each engine and span the last one told, which may have grown, and all after it."""
        if not has_telemetry(self._db):
            return
        engines = [name for (name,) in self._db.execute("SELECT DISTINCT engine FROM telemetry")]
        for key in ((engine, span_s) for engine in engines for span_s in SPANS_S):
            known = self._buckets.get(key, -1.0)
            where = "engine = ? AND span_s = ? AND at >= ?"
            rows = select(self._db, Bucket, "at", where, (*key, known))
            if rows:
                self._buckets[key] = rows[-1].at
            yield from rows


class MatchRecords(NamedTuple):
    """Everything a run holds of one match."""

    match: MatchRow
    plies: tuple[PlyRow, ...]
    attempts: tuple[AttemptRow, ...]


def read_match(folder: Path, match_id: str) -> MatchRecords | None:
    """One match of a run, None if there is none of that id; StoreError if it cannot be read."""
    path = folder / "run.db"
    try:
        with closing(open_read_only(path)) as db:
            db.execute("BEGIN")
            rows = select(db, MatchRow, "id", "id = ?", (match_id,))
            if not rows:
                return None
            of_match = "match_id = ?"
            return MatchRecords(
                rows[0],
                select(db, PlyRow, "ply", of_match, (match_id,)),
                select(db, AttemptRow, "ply, rowid", of_match, (match_id,)),
            )
    except (sqlite3.Error, ValueError) as error:
        raise StoreError(f"{path}: cannot be read ({error})") from None
