"""A run followed while it is written: everything once, in an order that figures take."""

import asyncio
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena import watch
from arena.figures import Figures
from arena.follow import Follower, read_match
from arena.report import build, report
from arena.store import (
    AttemptRow,
    EventRow,
    MatchRow,
    PlyRow,
    Records,
    Row,
    SampleRow,
    Store,
    StoreError,
    read,
)
from arena.watch import FolderFeed, Watch
from serving import Bucket
from tests.arena.random_runs import RUN, RandomRun, bucket, commits, random_run, scheduled

ONE = scheduled(0, ("ann", "bob"), ("chess", "standard"))


def begin(folder: Path, run: RandomRun) -> Store:
    """A store without events of its own, to whose clock rows of any time may come."""
    return Store.create(folder, RUN, run.matches)


async def followed(run: RandomRun, rng: random.Random, folder: Path) -> tuple[list[Row], Records]:
    """What a follower told of a run while a store wrote it, and what the store held in the end."""
    store = begin(folder, run)
    await store.commit()
    told: list[Row] = []
    follower = None
    for rows in commits(run, rng):
        await store.commit(*rows)
        if follower is None and rng.random() < 0.2:
            follower = Follower(folder)
        if follower is not None and rng.random() < 0.4:
            told += follower.read()
    await store.close()
    with closing(follower or Follower(folder)) as last:
        told += last.read()
        quiet = last.read()
    assert all(isinstance(row, Bucket) for row in quiet)  # the last of each span is told again
    assert set(quiet) <= set(told)
    return told, read(folder)


def of(kind: type[Row], rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if type(row) is kind]


def last_ones(rows: Iterable[Row]) -> tuple[dict[str, Row], dict[tuple[object, ...], Row]]:
    """The last version of each match and of each bucket."""
    matches: dict[str, Row] = {}
    buckets: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if isinstance(row, MatchRow):
            matches[row.id] = row
        elif isinstance(row, Bucket):
            buckets[row[:3]] = row
    return matches, buckets


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_what_is_told_is_what_the_store_holds(seed: int) -> None:
    rng, run = random.Random(seed), random_run(seed)
    with tempfile.TemporaryDirectory() as folder:
        told, held = asyncio.run(followed(run, rng, Path(folder) / "run"))
    rows = list(held.rows())
    for kind in (PlyRow, AttemptRow, SampleRow, EventRow):
        assert Counter(of(kind, told)) == Counter(of(kind, rows))
    assert last_ones(told) == last_ones(rows)
    figures = Figures(held.run, run.matches, exact=True)
    figures.add(told)
    figures.settle()
    one, two = report(figures), build(held)
    assert one.pop("pace_attainment") == pytest.approx(two.pop("pace_attainment"), rel=1e-12)
    assert one == two


@given(st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_a_match_is_told_again_only_when_it_changed(seed: int) -> None:
    rng, run = random.Random(seed), random_run(seed)
    with tempfile.TemporaryDirectory() as folder:
        told, _ = asyncio.run(followed(run, rng, Path(folder) / "run"))
    versions = of(MatchRow, told)
    assert len(versions) == len(set(versions))


async def test_moves_come_after_their_attempts_and_before_the_end_of_their_match(
    tmp_path: Path,
) -> None:
    store = begin(tmp_path / "run", RandomRun((ONE,)))
    await store.commit()
    with closing(Follower(tmp_path / "run")) as follower:
        assert follower.matches == (ONE,)
        follower.read()
        over = ONE._replace(state="finished", started=1.0, ended=2.0)
        attempt = AttemptRow(f"{ONE.id}/0/0/0", ONE.id, 0, 0, 0, "main", "free")
        ply = PlyRow(ONE.id, 0, 0, "e2e4", "e4", "fen", None, 1.0, 1.0, 1.5)
        await store.commit(over, ply, attempt, EventRow(1.0, "x", "{}"))
        assert follower.read() == [EventRow(1.0, "x", "{}"), attempt, ply, over]
        assert follower.read() == []
    await store.close()


async def test_a_match_that_ended_between_two_looks_is_told_with_its_moves(tmp_path: Path) -> None:
    matches = tuple(scheduled(n, ("ann", "bob"), ("chess", "standard")) for n in range(30))
    store = begin(tmp_path / "run", RandomRun(matches))
    await store.commit()
    with closing(Follower(tmp_path / "run")) as follower:
        follower.read()
        for number, row in enumerate(matches):
            at = 100.0 * number
            ply = PlyRow(row.id, 0, 0, "e2e4", "e4", "fen", None, at, at, at + 1)
            over = row._replace(state="finished", started=at, ended=at + 2)
            await store.commit(ply, over)
            assert [r for r in follower.read() if not isinstance(r, EventRow)] == [ply, over]
    await store.close()


async def test_a_match_that_reaches_the_disk_after_one_that_ended_later_is_told(
    tmp_path: Path,
) -> None:
    early = ONE._replace(id="early", number=1, state="finished", started=1.0, ended=15.0)
    late = ONE._replace(state="finished", started=1.0, ended=20.0)
    unbegun = early._replace(state="scheduled", started=None, ended=None)
    store = begin(tmp_path / "run", RandomRun((ONE, unbegun)))
    await store.commit()
    with closing(Follower(tmp_path / "run")) as follower:
        follower.read()
        for row in (late, early):
            await store.commit(row)
            assert follower.read() == [row]
    await store.close()


async def test_buckets_that_grow_are_told_again_and_others_once(tmp_path: Path) -> None:
    store = begin(tmp_path / "run", RandomRun((ONE,)))
    with closing(Follower(tmp_path / "run")) as follower:
        for second in range(25):
            await store.commit(
                bucket("main", 1.0, float(second), 1),
                bucket("main", 10.0, second // 10 * 10.0, second),
            )
            told = [row for row in follower.read() if isinstance(row, Bucket)]
            fine = [row.at for row in told if row.span_s == 1.0]
            assert fine == [float(second - 1), float(second)][-min(second + 1, 2) :]
            assert told[-1] == bucket("main", 10.0, second // 10 * 10.0, second)
    await store.close()


async def test_buckets_of_a_resumed_run_come_after_those_of_the_first_process(
    tmp_path: Path,
) -> None:
    """Telemetry went on while nothing else did: a kill then made the axis begin before its end, so
    that the next process wrote over what was there."""
    store = begin(tmp_path / "run", RandomRun((ONE,)))
    await store.commit(*(bucket("main", 1.0, 100.0 + second) for second in range(5)))
    await store.close()
    resumed = Store.resume(tmp_path / "run")
    assert resumed.clock.start == 104.0
    with closing(Follower(tmp_path / "run")) as follower:
        follower.read()
        later = bucket("main", 1.0, resumed.clock.now())
        await resumed.commit(later)
        assert later in follower.read()
    await resumed.close()


async def test_a_run_of_a_version_without_telemetry_is_followed(tmp_path: Path) -> None:
    store = begin(tmp_path / "run", RandomRun((ONE,)))
    await store.close()
    with closing(sqlite3.connect(tmp_path / "run" / "run.db")) as db:
        db.execute("DROP TABLE telemetry")
        db.execute("PRAGMA user_version = 1")
    with closing(Follower(tmp_path / "run")) as follower:
        assert [type(row) for row in follower.read()] == [EventRow, MatchRow]


async def test_a_folder_that_goes_away_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no run"):
        Follower(tmp_path)
    store = begin(tmp_path / "run", RandomRun((ONE,)))
    await store.close()
    with closing(Follower(tmp_path / "run")) as follower:
        with closing(sqlite3.connect(tmp_path / "run" / "run.db")) as db:
            db.execute("DROP TABLE plies")
        with pytest.raises(StoreError, match="cannot be read"):
            follower.read()


async def test_the_work_of_a_look_does_not_grow_with_the_matches_that_are_over(
    tmp_path: Path,
) -> None:
    """Counted in SQLite's own steps: a scan of every match four times a second costs a core."""
    spent = []
    for many in (100, 4000):
        folder = tmp_path / str(many)
        over = [
            scheduled(n, ("ann", "bob"), ("chess", "standard"))._replace(
                id=f"m{n}", state="finished", started=1.0, ended=2.0 + 100 * n
            )
            for n in range(many)
        ]
        store = begin(folder, RandomRun((*over,)))
        await store.close()
        with closing(Follower(folder)) as follower:
            follower.read()
            spent.append(steps(follower))
    assert spent[1] < 3 * spent[0]


def steps(follower: Follower) -> int:
    """Virtual machine steps of a read."""
    count = 0

    def tick() -> int:
        nonlocal count
        count += 1
        return 0

    follower._db.set_progress_handler(tick, 1)
    follower.read()
    follower._db.set_progress_handler(None, 1)
    return count


class Clock:
    def __init__(self) -> None:
        self.now = 500.0

    def monotonic(self) -> float:
        return self.now


def feed_of(*rows: Row) -> FolderFeed:
    """A feed of a run of two matches, of which these rows have been read. It reads no folder."""
    figures = Figures(RUN, [ONE, ONE._replace(id="two", number=1)], exact=False)
    figures.add(rows)
    return FolderFeed(Path("nowhere"), None, figures)  # type: ignore[arg-type]


def started_by(pid: int, began: float | None = None) -> EventRow:
    if began is None:
        began = psutil.Process(pid).create_time() if psutil.pid_exists(pid) else 0.0
    return EventRow(1.0, "process_start", json.dumps({"pid": pid, "began": began}))


OVER = ONE._replace(state="finished", started=2.0, ended=8.0)


def test_a_run_is_being_played_between_two_matches_and_before_the_first() -> None:
    """A watcher left while the engine was starting, for no match was running."""
    here = os.getpid()
    assert feed_of(started_by(here)).is_played()
    assert feed_of(started_by(here), OVER).is_played()
    assert not feed_of(started_by(here), OVER, OVER._replace(id="two", number=1)).is_played()
    assert not feed_of(OVER).is_played()


def test_a_run_whose_process_is_gone_is_not_being_played() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert not feed_of(started_by(gone.pid)).is_played()


def test_a_number_that_another_process_bears_by_now_plays_nothing() -> None:
    """In a container the arena's small number recurs, as the watcher's own even."""
    assert not feed_of(started_by(os.getpid(), began=1_700_000_000.0)).is_played()


def test_run_time_goes_on_from_the_last_record_while_the_run_is_played(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    last = EventRow(8.0, "x", "{}")
    played, left = feed_of(started_by(os.getpid()), last), feed_of(last)
    assert (played.now(), left.now()) == (8.0, 8.0)
    clock.now += 3.0
    assert (played.now(), left.now()) == (11.0, 8.0)


async def test_a_watch_of_a_folder_tells_rows_and_fresh_agents(tmp_path: Path) -> None:
    store = begin(tmp_path / "run", RandomRun((ONE,)))
    await store.commit()
    with closing(Follower(tmp_path / "run")) as follower:
        figures = Figures(follower.run, follower.matches, exact=False)
        seen = Watch(FolderFeed(tmp_path / "run", follower, figures), figures)
        rows: list[Row] = []
        fresh: list[tuple[str, str]] = []
        seen.row_listeners.append(rows.extend)
        seen.listeners.append(lambda _, agents: fresh.extend(agents))
        await seen.look()
        ply = PlyRow(ONE.id, 0, 0, "e2e4", "e4", "fen", None, 1.0, 1.0, 1.5)
        await store.commit(ONE._replace(state="running", started=1.0), ply)
        await seen.look()
        assert [type(row) for row in rows] == [EventRow, MatchRow, PlyRow, MatchRow]
        assert fresh == [("ann", "chess")]
        assert seen.frame()["fleet"]["plies"] == 1
    await store.close()


async def test_a_match_is_read_whole(tmp_path: Path) -> None:
    run = random_run(11, num_steps=200)
    store = begin(tmp_path / "run", run)
    for given_ in run.given:
        await store.commit(*given_.rows)
    await store.close()
    held = read(tmp_path / "run")
    for row in held.matches:
        one = read_match(tmp_path / "run", row.id)
        assert one is not None
        assert one.match == row
        assert one.plies == tuple(p for p in held.plies if p.match_id == row.id)
        assert one.attempts == tuple(a for a in held.attempts if a.match_id == row.id)
    assert read_match(tmp_path / "run", "nobody's") is None
    with pytest.raises(StoreError, match="cannot be read"):
        read_match(tmp_path / "elsewhere", ONE.id)


async def test_closing_waits_for_a_read_under_way(tmp_path: Path) -> None:
    """SQLite crashed the process where Ctrl-C closed a connection that a thread was reading."""
    await begin(tmp_path / "run", random_run(11)).close()
    follower = Follower(tmp_path / "run")
    inside, go_on = threading.Event(), threading.Event()

    def read_slowly(statement: str) -> None:
        if "plies" in statement:
            inside.set()
            assert go_on.wait(20)

    follower._db.set_trace_callback(read_slowly)
    reading = threading.Thread(target=follower.read)
    reading.start()
    assert inside.wait(20)
    ending = threading.Thread(target=follower.close)
    ending.start()
    ending.join(0.2)
    assert ending.is_alive()
    go_on.set()
    reading.join(20)
    ending.join(20)
    with pytest.raises(StoreError):
        follower.read()
