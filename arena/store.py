"""One SQLite database per run: what is committed is never lost, what is not never counts.

A run folder holds `run.db` (this), `run.lock` and files generated from it. One process writes a run
at a time (`flock`). Rows go to one writer thread, which commits everything that has gathered since
its last commit in one transaction (group commit, `synchronous=FULL`): a ply counts when its commit
returns. Each kind of row crosses into SQLite as one JSON array per commit, because every statement
hands the interpreter lock back and forth once.

Times are seconds since the run began. Each start of a process writes a `process_start` event with
the wall time and the offset at which its clock goes on.
"""

import asyncio
import errno
import fcntl
import heapq
import json
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import psutil

from serving import Bucket

LOCK_FILE = "run.lock"
_PARTIAL = "run.db.partial"
SCHEMA_VERSION = 5
"""1 lacked `telemetry` and the indexes of `matches`, 2 lacked `attempts.eval_cp`, 3
`attempts.reasoning`, 4 `plies.offers_draw` and `judge_cp`."""
BUCKETS_KEPT = 3600
"""Of each span of an engine's telemetry; older ones are charted by a coarser span."""

MatchState = Literal["scheduled", "running", "suspended", "finished"]

_SCHEMA = """
CREATE TABLE run(
    id TEXT PRIMARY KEY, created TEXT NOT NULL, config_json TEXT NOT NULL,
    config_digest TEXT NOT NULL, versions_json TEXT NOT NULL) STRICT;
CREATE TABLE matches(
    id TEXT PRIMARY KEY, pair_id TEXT NOT NULL, game TEXT NOT NULL, ruleset TEXT NOT NULL,
    agent_first TEXT NOT NULL, agent_second TEXT NOT NULL, start_fen TEXT NOT NULL,
    opening TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('scheduled', 'running', 'suspended', 'finished')),
    winner INTEGER, termination TEXT, detail TEXT, score_first REAL, score_second REAL,
    started REAL, ended REAL, suspended_at REAL, suspended_s REAL NOT NULL DEFAULT 0,
    number INTEGER NOT NULL) STRICT;
CREATE TABLE plies(
    match_id TEXT NOT NULL REFERENCES matches(id), ply INTEGER NOT NULL, side INTEGER NOT NULL,
    move TEXT NOT NULL, notation TEXT NOT NULL, fen_after TEXT NOT NULL, clock_left_s REAL,
    ready REAL NOT NULL, due REAL NOT NULL,
    done REAL NOT NULL, offers_draw INTEGER, judge_cp INTEGER,
    PRIMARY KEY (match_id, ply)) STRICT, WITHOUT ROWID;
CREATE TABLE attempts(
    request_id TEXT PRIMARY KEY, match_id TEXT NOT NULL REFERENCES matches(id),
    ply INTEGER NOT NULL, side INTEGER NOT NULL, n INTEGER NOT NULL, engine TEXT, mode TEXT,
    reply_text TEXT, finish TEXT, fault TEXT, detail TEXT NOT NULL, prompt_tokens INTEGER,
    cached_tokens INTEGER, completion_tokens INTEGER, submitted REAL, admitted REAL,
    first_token REAL, done REAL, queue_s REAL, prefill_s REAL, decode_s REAL,
    step_requests_mean REAL, replica TEXT, eval_cp INTEGER, reasoning TEXT) STRICT;
CREATE INDEX attempts_by_ply ON attempts(match_id, ply);
CREATE TABLE engine_samples(
    engine TEXT NOT NULL, at REAL NOT NULL, source TEXT NOT NULL, steps INTEGER NOT NULL,
    replica TEXT, running INTEGER, waiting INTEGER, step_requests INTEGER, step_tokens INTEGER,
    kv_usage REAL, prefix_queries INTEGER, prefix_hits INTEGER, preemptions INTEGER,
    rejected INTEGER) STRICT;
CREATE TABLE events(at REAL NOT NULL, kind TEXT NOT NULL, detail_json TEXT NOT NULL) STRICT;
"""

_TELEMETRY_SCHEMA = f"""
CREATE INDEX matches_by_state ON matches(state);
CREATE INDEX matches_by_end ON matches(ended);
CREATE TABLE telemetry(
    engine TEXT NOT NULL, span_s REAL NOT NULL, at REAL NOT NULL, steps INTEGER NOT NULL,
    requests_mean REAL, requests_p50 REAL, requests_p95 REAL, requests_max REAL,
    tokens_mean REAL, tokens_p50 REAL, tokens_p95 REAL, tokens_max REAL,
    in_flight REAL NOT NULL, waiting_mean REAL, waiting_max REAL, waiting_share REAL,
    kv_usage REAL, prefix_queries INTEGER, prefix_hits INTEGER, preemptions INTEGER,
    rejected INTEGER NOT NULL, offered INTEGER NOT NULL, replies INTEGER NOT NULL,
    ttft_mean_s REAL, ttft_p50_s REAL, ttft_p95_s REAL, stream_tokens_per_s REAL,
    prompt_tokens INTEGER, cached_tokens INTEGER, completion_tokens INTEGER NOT NULL,
    PRIMARY KEY (engine, span_s, at)) STRICT, WITHOUT ROWID;
CREATE TRIGGER telemetry_is_bounded AFTER INSERT ON telemetry BEGIN
    DELETE FROM telemetry WHERE engine = NEW.engine AND span_s = NEW.span_s
        AND at < NEW.at - {BUCKETS_KEPT} * NEW.span_s;
END;
"""


class StoreError(Exception):
    """A run folder cannot be used; the message is one line that names it and the remedy."""


class WriteError(StoreError):
    """The run can be written no more, as on a full disk; what was committed stays."""


class MatchRow(NamedTuple):
    """A match as it stands. `number` is its place in the schedule."""

    id: str
    pair_id: str
    game: str
    ruleset: str
    agent_first: str
    agent_second: str
    start_fen: str
    opening: str
    state: MatchState
    winner: int | None
    termination: str | None
    detail: str | None
    score_first: float | None
    score_second: float | None
    started: float | None
    ended: float | None
    suspended_at: float | None
    """Since when it has not been running, while it is suspended."""
    suspended_s: float
    """Seconds it has been suspended, apart from now."""
    number: int

    @property
    def agents(self) -> tuple[str, str]:
        """Names of the agents of side 0 and side 1."""
        return self.agent_first, self.agent_second


def planned(row: MatchRow) -> MatchRow:
    """A match as it stood before it was begun."""
    return row._replace(
        state="scheduled",
        winner=None,
        termination=None,
        detail=None,
        score_first=None,
        score_second=None,
        started=None,
        ended=None,
        suspended_at=None,
        suspended_s=0.0,
    )


class PlyRow(NamedTuple):
    """A move that counts. `ready`: the opponent's was committed; `done`: this one was chosen."""

    match_id: str
    ply: int
    side: int
    move: str
    notation: str
    fen_after: str
    clock_left_s: float | None
    ready: float
    due: float
    done: float
    offers_draw: bool | None = None
    """None in a run of a version that knew no offers."""
    judge_cp: int | None = None
    """What the run's judge thinks of the position before it, in centipawns from the mover's
    side."""


class AttemptRow(NamedTuple):
    """One question to an engine and what came of it; without a reply, only the fault is known."""

    request_id: str
    match_id: str
    ply: int
    side: int
    n: int
    engine: str | None
    mode: str | None
    reply_text: str | None = None
    finish: str | None = None
    fault: str | None = None
    detail: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    submitted: float | None = None
    admitted: float | None = None
    first_token: float | None = None
    done: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    step_requests_mean: float | None = None
    replica: str | None = None
    eval_cp: int | None = None
    """The player's own view of its position (agents.Attempt)."""
    reasoning: str | None = None
    """What was thought, where that is known apart from the answer. A thought that was asked for
    alone has an id that ends in `/think` and an empty `reply_text`."""


class SampleRow(NamedTuple):
    """An engine's snapshot, standing for `steps` of them; where it is several replicas, one's.
    Counters are totals since the process that plays the run opened the engine."""

    engine: str
    at: float
    source: str
    steps: int
    replica: str | None
    running: int | None
    waiting: int | None
    step_requests: int | None
    step_tokens: int | None
    kv_usage: float | None
    prefix_queries: int | None
    prefix_hits: int | None
    preemptions: int | None
    rejected: int | None


class EventRow(NamedTuple):
    """Something that happened to the run: an engine died, a match was suspended."""

    at: float
    kind: str
    detail_json: str


class RunRow(NamedTuple):
    """What the run is: its config and the versions that played it."""

    id: str
    created: str
    config_json: str
    config_digest: str
    versions_json: str


_T = TypeVar("_T", bound=NamedTuple)

Row = RunRow | MatchRow | PlyRow | AttemptRow | SampleRow | EventRow | Bucket

_TABLES: dict[type[NamedTuple], str] = {
    RunRow: "run",
    MatchRow: "matches",
    PlyRow: "plies",
    AttemptRow: "attempts",
    SampleRow: "engine_samples",
    EventRow: "events",
    Bucket: "telemetry",
}


def _insert(row: type[Row]) -> str:
    names = row._fields
    picked = ", ".join(f"value ->> {index}" for index in range(len(names)))
    verb = "INSERT" if row is PlyRow else "INSERT OR REPLACE"
    return f"{verb} INTO {_TABLES[row]}({', '.join(names)}) SELECT {picked} FROM json_each(?)"


_INSERTS: dict[type[Row], str] = {row: _insert(row) for row in get_args(Row)}


def storable(text: str) -> str:
    """Text as SQLite can hold it: NUL and lone surrogates become U+FFFD, all else stays."""
    return (
        text.replace("\0", "\N{REPLACEMENT CHARACTER}")
        .encode("utf-8", "surrogatepass")
        .decode("utf-8", "replace")
    )


class Tap:
    """What a store has committed, in order, for whoever shows a run while it is played."""

    def __init__(self) -> None:
        self._batches: deque[dict[type[Row], list[Row]]] = deque()
        self._is_open = True

    def put(self, batch: dict[type[Row], list[Row]]) -> None:
        if self._is_open:
            self._batches.append(batch)

    def close(self) -> None:
        """Keep nothing any more."""
        self._is_open = False
        self._batches.clear()

    def take(self) -> list[Row]:
        """The rows since the last call; of one commit a move's attempts come before the move."""
        rows: list[Row] = []
        while self._batches:
            batch = self._batches.popleft()
            for kind in (EventRow, AttemptRow, PlyRow, MatchRow, SampleRow, Bucket):
                rows += batch.get(kind, ())
        return rows


class RunClock:
    """The run's time axis: seconds since it began, going on where a former process stopped."""

    def __init__(self, offset: float = 0.0) -> None:
        self.start = offset
        """Run time at which this process took the run up."""
        self._zero = time.monotonic() - offset

    def of(self, monotonic: float) -> float:
        """Run time of a `time.monotonic()` reading, in seconds."""
        return monotonic - self._zero

    def now(self) -> float:
        return time.monotonic() - self._zero


class Store:
    """The writer of one run. Use from one event loop."""

    def __init__(self, folder: Path, lock: int, clock: RunClock) -> None:
        self.folder = folder
        self.clock = clock
        self._lock = lock
        self._rows: dict[type[Row], list[Row]] = {}
        self._taps: tuple[Tap, ...] = ()
        self._waiters: list[asyncio.Future[None]] = []
        self._writing: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="store", daemon=True)
        self._thread.start()

    @classmethod
    def create(
        cls, folder: Path, run: RunRow, matches: Iterable[MatchRow], *, replace: bool = False
    ) -> "Store":
        """Begin a run in `folder`; StoreError if it holds one and `replace` is not set."""
        check_free(folder, replace=replace)
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{folder}: cannot be made ({error.strerror})") from None
        had_lock = (folder / LOCK_FILE).exists()
        lock = _lock(folder)
        try:
            cls._lay(folder, run, matches)
        except (sqlite3.Error, OSError) as error:
            _remove_partial(folder)
            if not had_lock:
                (folder / LOCK_FILE).unlink(missing_ok=True)
            os.close(lock)
            with suppress(OSError):  # another run is being begun beside it
                for path in missing:
                    path.rmdir()
            raise StoreError(
                f"{folder}: a run cannot be written there ({error}){remedy(error)}"
            ) from None
        store = cls(folder, lock, RunClock())
        store._note_start()
        return store

    @staticmethod
    def _lay(folder: Path, run: RunRow, matches: Iterable[MatchRow]) -> None:
        """Write a new database beside its place, and move it there whole."""
        partial = folder / _PARTIAL
        _remove_partial(folder)  # of a process that was killed
        with closing(sqlite3.connect(partial, isolation_level=None)) as db:
            db.executescript(_SCHEMA + _TELEMETRY_SCHEMA)
            db.execute("BEGIN")
            db.execute("INSERT INTO run VALUES (?, ?, ?, ?, ?)", run)
            rows = json.dumps(list(matches))
            db.execute(_INSERTS[MatchRow], (rows,))
            db.execute("COMMIT")
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            db.execute("PRAGMA journal_mode = WAL")
        for name in ("run.db-wal", "run.db-shm"):  # of a run that is replaced
            (folder / name).unlink(missing_ok=True)
        os.replace(partial, folder / "run.db")

    @classmethod
    def resume(
        cls, folder: Path, check: Callable[["Records"], object] = lambda records: None
    ) -> "Store":
        """Go on with the run in `folder`; StoreError if there is none or another process has it.

        `check` is shown what the run holds before anything is written; what it raises is raised,
        and the run let go.
        """
        check_run(folder)
        lock = _lock(folder)
        try:
            check(read(folder))
        except BaseException:
            os.close(lock)
            raise
        with _taking_up(folder, lock) as db:
            _migrate(db)
            (last,) = db.execute(
                "SELECT max(coalesce((SELECT max(done) FROM plies), 0),"
                " coalesce((SELECT max(done) FROM attempts), 0),"
                " coalesce((SELECT max(ended) FROM matches), 0),"
                " coalesce((SELECT max(started) FROM matches), 0),"
                " coalesce((SELECT max(at) FROM engine_samples), 0),"
                " coalesce((SELECT max(at) FROM telemetry), 0),"
                " coalesce((SELECT max(at) FROM events), 0))"
            ).fetchone()
        store = cls(folder, lock, RunClock(offset=last))
        store._note_start()
        return store

    def _note_start(self) -> None:
        wall = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        process = psutil.Process()
        self.event(
            "process_start",
            {
                "wall": wall,
                "offset_s": self.clock.now(),
                "pid": process.pid,
                "began": process.create_time(),
            },
        )

    def sign(self) -> None:
        """Say in the lock's file which process this is, for those who want it to stop."""
        process = psutil.Process()
        signature = json.dumps({"pid": process.pid, "began": process.create_time()})
        self._write_lock(signature.encode())

    def _write_lock(self, content: bytes) -> None:
        with suppress(OSError):  # a full disk: the run goes on unsigned, as long as it can
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, content, 0)

    def tap(self) -> Tap:
        """A view of everything committed from now on."""
        tap = Tap()
        self._taps += (tap,)
        return tap

    def add(self, *rows: Row) -> None:
        """Hand rows to the writer; they are on disk some milliseconds later."""
        self._hand_over(rows, None)

    def commit(self, *rows: Row) -> asyncio.Future[None]:
        """Hand rows to the writer; the future is done once they and all before them are on disk."""
        done = self._loop.create_future()
        self._hand_over(rows, done)
        return done

    def _hand_over(self, rows: Sequence[Row], waiter: asyncio.Future[None] | None) -> None:
        with self._wake:
            if self._failure is not None:
                raise _lost(self.folder, self._failure) from self._failure
            if self._closing:
                raise StoreError(f"{self.folder / 'run.db'}: is closed")
            for row in rows:
                kind = type(row)
                self._rows.setdefault(kind, []).append(row)
            if waiter is not None:
                self._waiters.append(waiter)
            self._wake.notify()

    def event(self, kind: str, detail: Mapping[str, Any]) -> None:
        """Write a line of the run's event log."""
        self.add(EventRow(self.clock.now(), kind, json.dumps(detail, default=str)))

    async def close(self) -> None:
        """Write what is pending, then let go of the run."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        self._write_lock(b"")
        os.close(self._lock)
        if self._failure is not None:
            raise _lost(self.folder, self._failure) from self._failure

    def _write(self) -> None:
        try:
            with closing(_connect(self.folder)) as db:
                while self._write_batch(db):
                    pass
        except BaseException as error:  # noqa: BLE001 - reported at the next add, commit or close
            self._fail(error)

    def _write_batch(self, db: sqlite3.Connection) -> bool:
        """Commit what has gathered; False when the store is closed and nothing is left."""
        with self._wake:
            while not (self._rows or self._waiters or self._closing):
                self._wake.wait()
            rows, self._rows = self._rows, {}
            waiters, self._waiters = self._waiters, []
            self._writing = waiters
        if rows:
            db.execute("BEGIN IMMEDIATE")
            for kind, values in rows.items():
                db.execute(_INSERTS[kind], (json.dumps(values),))
            db.execute("COMMIT")
            for tap in self._taps:
                tap.put(rows)
        if waiters:
            self._loop.call_soon_threadsafe(_resolve, waiters)
        return bool(rows or waiters or not self._closing)

    def _fail(self, error: BaseException) -> None:
        with self._wake:
            self._failure = error
            waiters, self._waiters = self._writing + self._waiters, []
        if waiters:
            self._loop.call_soon_threadsafe(_reject, waiters, self.folder, error)


def _resolve(waiters: Sequence[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def _reject(waiters: Sequence[asyncio.Future[None]], folder: Path, reason: BaseException) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(_lost(folder, reason))


def _lost(folder: Path, reason: BaseException) -> WriteError:
    return WriteError(f"{folder / 'run.db'}: {reason}{remedy(reason)}")


def remedy(error: BaseException) -> str:
    """What to do about a write that failed, to be put behind its message."""
    return "; make room on its disk" if _is_full(error) else ""


def _is_full(error: BaseException) -> bool:
    """Whether there was no room for what was to be written; SQLite may call that an I/O error."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError) and error.errno in full


def _lock(folder: Path) -> int:
    """Hold the run: the file descriptor keeps the lock until it is closed or the process ends."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written to ({error.strerror})") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StoreError(
            f"{folder} is being played by another process; wait for it or stop it"
        ) from None
    return descriptor


def _connect(folder: Path) -> sqlite3.Connection:
    db = sqlite3.connect(folder / "run.db", isolation_level=None, timeout=10)
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA foreign_keys = OFF")  # the one writer keeps them; checking costs every ply
    return db


@contextmanager
def _taking_up(folder: Path, lock: int) -> Iterator[sqlite3.Connection]:
    """The database of a run to go on with; StoreError, and the run let go, where it cannot be."""
    try:
        with closing(_connect(folder)) as db:
            yield db
    except sqlite3.Error as error:
        os.close(lock)
        kind = WriteError if _is_full(error) else StoreError
        raise kind(f"{folder / 'run.db'}: cannot be taken up ({error}){remedy(error)}") from None


def _migrate(db: sqlite3.Connection) -> None:
    """Bring an older run's tables up to date; the caller holds the run."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    steps = (
        _TELEMETRY_SCHEMA,
        "ALTER TABLE attempts ADD COLUMN eval_cp INTEGER;",
        "ALTER TABLE attempts ADD COLUMN reasoning TEXT;",
        "ALTER TABLE plies ADD COLUMN offers_draw INTEGER;"
        "ALTER TABLE plies ADD COLUMN judge_cp INTEGER;",
    )[version - 1 :]
    if steps:
        db.executescript(
            f"BEGIN; {' '.join(steps)} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )


def open_read_only(path: Path, *, check_same_thread: bool = True) -> sqlite3.Connection:
    """A connection that can write nothing, to a run on a read-only medium too.

    There SQLite cannot make the files that it shares a WAL database by; one that was left whole
    needs none.
    """
    uri = path.resolve().as_uri()
    db = sqlite3.connect(uri + "?mode=ro", uri=True, check_same_thread=check_same_thread)
    try:
        db.execute("PRAGMA schema_version").fetchone()
    except sqlite3.OperationalError:
        db.close()
        if path.with_name(path.name + "-wal").exists():
            raise
        db = sqlite3.connect(
            uri + "?mode=ro&immutable=1", uri=True, check_same_thread=check_same_thread
        )
    return db


def _remove_partial(folder: Path) -> None:
    """What was laid of a database that is not whole, SQLite's own files beside it too."""
    for path in folder.glob(f"{_PARTIAL}*"):
        path.unlink(missing_ok=True)


def check_free(folder: Path, *, replace: bool) -> None:
    """StoreError if `folder` is no place for a new run."""
    try:
        is_file = folder.exists() and not folder.is_dir()
        has_run = (folder / "run.db").exists()
    except (OSError, ValueError) as error:
        raise StoreError(f"{str(folder)[:80]}: is no usable folder ({error})") from None
    if is_file:
        raise StoreError(f"{folder} is a file; name a folder for the run")
    if has_run and not replace:
        raise StoreError(
            f"{folder} already holds a run; `arena resume {folder}` goes on with it, "
            "--replace starts it anew, --out names another folder"
        )
    try:
        is_foreign = (
            folder.is_dir()
            and not (folder / "run.db").exists()
            and not all(
                path.name == LOCK_FILE or path.name.startswith(_PARTIAL)
                for path in folder.iterdir()
            )
        )
    except OSError as error:
        raise StoreError(f"{folder}: cannot be read ({error.strerror})") from None
    if is_foreign:
        raise StoreError(f"{folder} is not empty and holds no run; name another folder")


def check_run(folder: Path) -> None:
    """StoreError unless `folder` holds a run that this version can read."""
    path = folder / "run.db"
    if not path.is_file():
        raise StoreError(f"{folder}: holds no run (no run.db); name the folder of a run")
    try:
        with closing(open_read_only(path)) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            db.execute("SELECT 1 FROM run").fetchone()
    except sqlite3.Error as error:
        if _is_full(error):
            raise _lost(folder, error) from None
        raise StoreError(f"{path}: is not a run's database ({error})") from None
    if not 1 <= version <= SCHEMA_VERSION:
        raise StoreError(
            f"{path}: has schema {version}, this program reads 1 to {SCHEMA_VERSION}; "
            "use the version that wrote it"
        )


class Records(NamedTuple):
    """Everything a run holds, read at once."""

    run: RunRow
    matches: tuple[MatchRow, ...]
    plies: tuple[PlyRow, ...]
    attempts: tuple[AttemptRow, ...]
    samples: tuple[SampleRow, ...]
    events: tuple[EventRow, ...]
    buckets: tuple[Bucket, ...] = ()

    def rows(self) -> Iterator[Row]:
        """All rows but the run's own, as they might have come: a move's attempts before it, what
        became of a match after its moves, and matches in the order in which they ended."""
        by_move: tuple[Iterable[AttemptRow | PlyRow], ...] = (self.attempts, self.plies)
        moves = heapq.merge(*by_move, key=_place)
        matches = sorted(self.matches, key=lambda row: row.ended or 0.0)
        return chain(self.events, moves, matches, self.samples, self.buckets)


def _place(row: AttemptRow | PlyRow) -> tuple[str, int, bool]:
    return row.match_id, row.ply, isinstance(row, PlyRow)


def read_run(folder: Path) -> RunRow:
    """What a run is, without what was played."""
    check_run(folder)
    try:
        with closing(open_read_only(folder / "run.db")) as db:
            return _run_of(db)
    except (sqlite3.Error, ValueError) as error:
        raise _damaged(folder, error) from None


def read(folder: Path) -> Records:
    """All records of a run, consistent with each other, also while it is being played."""
    check_run(folder)
    try:
        with closing(open_read_only(folder / "run.db")) as db:
            db.execute("BEGIN")
            _check_values(db)
            return Records(
                _run_of(db),
                select(db, MatchRow, "number"),
                select(db, PlyRow, "match_id, ply"),
                select(db, AttemptRow, "match_id, ply, rowid"),
                select(db, SampleRow, "rowid"),
                select(db, EventRow, "at, rowid"),
                select(db, Bucket, "engine, span_s, at") if has_telemetry(db) else (),
            )
    except (sqlite3.Error, ValueError) as error:
        raise _damaged(folder, error) from None


def _run_of(db: sqlite3.Connection) -> RunRow:
    """The run's row; ValueError unless there is one, whole."""
    runs = select(db, RunRow, "id")
    if len(runs) != 1:
        raise ValueError(f"it holds {len(runs)} runs and not one")
    for name in ("config_json", "versions_json"):
        if not isinstance(json.loads(getattr(runs[0], name)), dict):
            raise ValueError(f"run.{name} is no object")
    return runs[0]


def _check_values(db: sqlite3.Connection) -> None:
    """ValueError where a value stands for nothing."""
    for table, name in (("matches", "winner"), ("plies", "side"), ("attempts", "side")):
        wrong = f"SELECT {name} FROM {table} WHERE {name} NOT IN (0, 1) LIMIT 1"
        for (value,) in db.execute(wrong):
            raise ValueError(f"{table}.{name} is {value}")
    # JSON of ours may hold NaN, which SQLite does not know
    for (text,) in db.execute("SELECT detail_json FROM events WHERE NOT json_valid(detail_json)"):
        json.loads(text)


def _damaged(folder: Path, error: Exception) -> StoreError:
    if _is_full(error):
        return _lost(folder, error)
    return StoreError(
        f"{folder / 'run.db'}: is damaged ({error}); `sqlite3 run.db .recover` may save it"
    )


def has_telemetry(db: sqlite3.Connection) -> bool:
    """Whether the run was written, or taken up, by a version that keeps it."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    return bool(version >= 2)


def select(
    db: sqlite3.Connection,
    row: type[_T],
    order: str,
    where: str = "1",
    values: Sequence[object] = (),
) -> tuple[_T, ...]:
    """Rows of one kind; `order` and `where` are SQL of ours, `values` anybody's. What an older run
    has no column for is unknown."""
    table = _TABLES[row]
    held = {name for (name,) in db.execute("SELECT name FROM pragma_table_info(?)", (table,))}
    names = ", ".join(name if name in held else "NULL" for name in row._fields)
    rows = db.execute(f"SELECT {names} FROM {table} WHERE {where} ORDER BY {order}", values)
    return tuple(map(row._make, rows))
