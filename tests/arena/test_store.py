"""What is committed is there after any death; what is not is absent; one process per run."""

import asyncio
import json
import math
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena.figures import Figures
from arena.follow import Follower
from arena.report import build, report
from arena.store import (
    BUCKETS_KEPT,
    SCHEMA_VERSION,
    AttemptRow,
    EventRow,
    MatchRow,
    PlyRow,
    Records,
    Row,
    RunRow,
    SampleRow,
    Store,
    StoreError,
    read,
    storable,
)
from serving import SPANS_S
from tests.arena import random_runs
from tests.arena.random_runs import bucket, commits, random_run

RUN = RunRow("r1", "2026-01-01T00:00:00Z", '{"name": "r"}', "d", "{}")


def match_row(name: str = "m1", number: int = 0) -> MatchRow:
    return MatchRow(
        id=name,
        pair_id="p1",
        game="chess",
        ruleset="standard",
        agent_first="a",
        agent_second="b",
        start_fen="fen",
        opening="",
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
        number=number,
    )


def ply_row(ply: int, match: str = "m1") -> PlyRow:
    return PlyRow(match, ply, ply % 2, "e2e4", "e4", "fen", None, 0.1, 0.2, 0.3 + ply)


def attempt_row(ply: int) -> AttemptRow:
    return AttemptRow(
        request_id=f"m1/{ply}/0/0",
        match_id="m1",
        ply=ply,
        side=ply % 2,
        n=0,
        engine="main",
        mode="free",
        reply_text='quote " brace } newline \n tab \t \x01 한 ♞ 😀',
        finish="stop",
        fault=None,
        detail="",
        prompt_tokens=10,
        cached_tokens=None,
        completion_tokens=3,
        submitted=0.1 + 0.2,
        admitted=1 / 3,
        first_token=None,
        done=2 / 3,
        queue_s=1e-9,
        prefill_s=0.0,
        decode_s=123456.789,
        step_requests_mean=2.5,
        replica=None,
    )


async def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run", RUN, [match_row()])
    sample = SampleRow("main", 1.0, "per_step", 1, None, 1, 0, 4, 40, 0.5, 100, 90, 0, 0)
    running = match_row()._replace(state="running", started=0.25)
    store.add(sample, running)
    await store.commit(ply_row(0), attempt_row(0))
    store.event("note", {"quote": 'a "b"', "한": 1})
    await store.close()

    held = read(tmp_path / "run")
    assert held.run == RUN
    assert held.matches == (running,)
    assert held.plies == (ply_row(0),)
    assert held.samples == (sample,)
    assert [event.kind for event in held.events] == ["process_start", "note"]
    assert json.loads(held.events[1].detail_json) == {"quote": 'a "b"', "한": 1}


async def test_hostile_text_and_floats_survive_exactly(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run", RUN, [match_row()])
    await store.commit(attempt_row(0))
    await store.close()
    assert read(tmp_path / "run").attempts == (attempt_row(0),)


def test_text_that_sqlite_cannot_hold_is_marked() -> None:
    assert storable("a\x00b\ud800c") == "a\ufffdb\ufffd\ufffd\ufffdc"
    assert storable("한 ♞ 😀") == "한 ♞ 😀"


async def test_a_commit_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run", RUN, [match_row()])
    for ply in range(5):
        await store.commit(ply_row(ply))
        assert len(read(tmp_path / "run").plies) == ply + 1
    await store.close()


async def test_many_commits_at_once_share_transactions_and_all_return(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run", RUN, [match_row(f"m{n}", n) for n in range(200)])
    await asyncio.gather(*(store.commit(ply_row(0, f"m{n}")) for n in range(200)))
    await store.close()
    assert len(read(tmp_path / "run").plies) == 200


SECOND = """
import asyncio, sys
from pathlib import Path
from arena.store import Store

async def main():
    Store.resume(Path(sys.argv[1]))

asyncio.run(main())
"""


async def test_a_second_process_is_refused_while_the_run_is_played(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run", RUN, [match_row()])
    second = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SECOND, str(tmp_path / "run"), stderr=subprocess.PIPE
    )
    _, said = await second.communicate()
    assert b"is being played by another process" in said
    await store.close()


async def test_a_run_folder_is_not_overwritten_unless_told(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run", RUN, [match_row()])
    await store.commit(ply_row(0))
    await store.close()
    with pytest.raises(StoreError, match="already holds a run"):
        Store.create(tmp_path / "run", RUN, [])
    assert len(read(tmp_path / "run").plies) == 1
    again = Store.create(tmp_path / "run", RUN, [match_row()], replace=True)
    await again.close()
    assert read(tmp_path / "run").plies == ()


async def test_replace_does_not_take_a_folder_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(StoreError, match="holds no run"):
        Store.create(tmp_path, RUN, [], replace=True)
    assert (tmp_path / "precious.txt").read_text() == "mine"


async def test_the_time_axis_goes_on_after_a_resume(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run", RUN, [match_row()])
    await store.commit(ply_row(1000))
    await store.close()
    resumed = Store.resume(tmp_path / "run")
    assert resumed.clock.now() >= ply_row(1000).done
    await resumed.close()
    starts = [e for e in read(tmp_path / "run").events if e.kind == "process_start"]
    assert [json.loads(e.detail_json)["offset_s"] >= 1000 for e in starts] == [False, True]


async def as_of_version(folder: Path, version: int, *rows: Row) -> None:
    """A run that holds rows, and says that this version wrote it; 1 had no telemetry, 2 no
    scores."""
    store = Store.create(folder, RUN, [match_row()])
    await store.commit(*rows)
    await store.close()
    with closing(sqlite3.connect(folder / "run.db")) as db:
        if version == 1:
            db.executescript(
                "DROP TABLE telemetry; DROP INDEX matches_by_state; DROP INDEX matches_by_end;"
            )
        if version in (1, 2):
            db.execute("ALTER TABLE attempts DROP COLUMN eval_cp")
        if version in (1, 2, 3):
            db.execute("ALTER TABLE attempts DROP COLUMN reasoning")
        if version in (1, 2, 3, 4):
            db.execute("ALTER TABLE plies DROP COLUMN offers_draw")
            db.execute("ALTER TABLE plies DROP COLUMN judge_cp")
        db.execute(f"PRAGMA user_version = {version}")


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1])
async def test_another_schema_is_refused_with_both_numbers(tmp_path: Path, version: int) -> None:
    await as_of_version(tmp_path / "run", version)
    for use in (read, Store.resume, Follower):
        with pytest.raises(
            StoreError, match=f"schema {version}, this program reads 1 to {SCHEMA_VERSION}"
        ):
            use(tmp_path / "run")


async def test_a_run_of_version_1_is_read_as_it_is_and_resumed_with_telemetry(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    await as_of_version(folder, 1, ply_row(0), attempt_row(0))
    before = (folder / "run.db").read_bytes()
    held = read(folder)
    assert (held.plies, held.attempts, held.buckets) == ((ply_row(0),), (attempt_row(0),), ())
    assert (folder / "run.db").read_bytes() == before
    resumed = Store.resume(folder)
    await resumed.commit(bucket("main", 1.0, 5.0), ply_row(1))
    await resumed.close()
    again = Store.resume(folder)  # which has nothing to migrate
    await again.close()
    held = read(folder)
    assert (held.plies, held.buckets) == ((ply_row(0), ply_row(1)), (bucket("main", 1.0, 5.0),))
    with closing(sqlite3.connect(folder / "run.db")) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


async def test_what_a_process_killed_at_its_start_left_is_no_run_and_in_nobody_s_way(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("run.lock", "run.db.partial", "run.db.partial-journal", "run.db.partial-wal"):
        (folder / name).write_bytes(b"half of something")
    await Store.create(folder, RUN, []).close()
    assert read(folder).run == RUN
    assert not list(folder.glob("run.db.partial*"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    with pytest.raises(StoreError, match="is not empty and holds no run"):
        Store.create(tmp_path / "other", RUN, [])


async def test_a_migrated_run_has_the_tables_of_a_new_one(tmp_path: Path) -> None:
    schemas = []
    for version in range(1, SCHEMA_VERSION + 1):
        folder = tmp_path / str(version)
        await as_of_version(folder, version)
        await Store.resume(folder).close()
        with closing(sqlite3.connect(folder / "run.db")) as db:
            schemas.append(set(db.execute("SELECT type, name, sql FROM sqlite_master")))
    assert all(schema == schemas[-1] for schema in schemas)


async def test_telemetry_of_a_long_run_is_bounded_and_a_day_stays_chartable(
    tmp_path: Path,
) -> None:
    store = Store.create(tmp_path / "run", RUN, [])
    day = 86_400
    for engine in ("main", "side"):
        for span_s in SPANS_S:
            begins = range(0, day, int(span_s))
            await store.commit(*(bucket(engine, span_s, float(at)) for at in begins))
    await store.commit(bucket("side", 10.0, 0.0, 3))  # late, and out of what is kept: no harm
    await store.close()
    kept = Counter((b.engine, b.span_s) for b in read(tmp_path / "run").buckets)
    for engine in ("main", "side"):
        assert kept[engine, 1.0] == kept[engine, 10.0] - (engine == "side") == BUCKETS_KEPT + 1
        assert kept[engine, 100.0] == day / 100
        assert kept[engine, 1000.0] == math.ceil(day / 1000)


async def test_a_bucket_that_grew_replaces_itself(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run", RUN, [])
    await store.commit(bucket("main", 10.0, 20.0, 1), bucket("main", 10.0, 20.0, 2))
    await store.commit(bucket("main", 10.0, 20.0, 3), bucket("main", 1.0, 20.0, 1))
    await store.close()
    assert read(tmp_path / "run").buckets == (
        bucket("main", 1.0, 20.0, 1),
        bucket("main", 10.0, 20.0, 3),
    )


async def test_a_tap_tells_what_was_committed_since_it_was_made(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run", RUN, [match_row()])
    await store.commit(ply_row(0))
    one = store.tap()
    assert one.take() == []
    over = match_row()._replace(state="finished", ended=2.0)
    seen = bucket("main", 1.0, 0.0)
    await store.commit(over, ply_row(1), seen, EventRow(1.0, "x", "{}"), attempt_row(1))
    two = store.tap()
    await store.commit(ply_row(2), attempt_row(2))
    # a move's attempts before it, and a match's end after its moves
    first = [EventRow(1.0, "x", "{}"), attempt_row(1), ply_row(1), over, seen]
    assert one.take() == [*first, attempt_row(2), ply_row(2)]
    assert one.take() == []
    assert two.take() == [attempt_row(2), ply_row(2)]
    await store.close()


async def test_what_is_not_committed_is_not_told(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run", RUN, [match_row()])
    await store.commit(ply_row(0))
    tap = store.tap()
    with pytest.raises(StoreError, match="UNIQUE"):
        await store.commit(attempt_row(0), ply_row(0))
    assert tap.take() == []
    with pytest.raises(StoreError):
        await store.close()


@given(st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_what_was_held_and_what_a_tap_tells_after_it_are_the_whole(seed: int) -> None:
    """As `_play` does it: nothing is missing between the two, and nothing is in both."""

    async def main(folder: Path) -> tuple[list[Row], Records]:
        run, rng = random_run(seed), random.Random(seed)
        batches = list(commits(run, rng))
        before = rng.randrange(len(batches))
        store = Store.create(folder, random_runs.RUN, run.matches)
        for rows in batches[:before]:
            store.add(*rows)
        tap = store.tap()
        await store.commit()
        tap.take()
        rows = list(read(folder).rows())
        for batch in batches[before:]:
            await store.commit(*batch)
        await store.close()
        return rows + tap.take(), read(folder)

    with tempfile.TemporaryDirectory() as folder:
        rows, held = asyncio.run(main(Path(folder) / "run"))
    figures = Figures(held.run, held.matches, exact=True)
    figures.add(rows)
    figures.settle()
    one, two = report(figures), build(held)
    assert one.pop("pace_attainment") == pytest.approx(two.pop("pace_attainment"), rel=1e-12)
    assert one == two


@pytest.mark.parametrize("content", [b"", b"not a database at all, but long enough to look"])
def test_what_is_no_run_is_named(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(StoreError, match="holds no run"):
        read(tmp_path)
    (tmp_path / "run.db").write_bytes(content)
    with pytest.raises(StoreError, match=r"run\.db"):
        read(tmp_path)


async def test_a_failed_write_is_raised_to_who_waits_and_who_comes_after(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run", RUN, [match_row()])
    await store.commit(ply_row(0))
    with pytest.raises(StoreError, match="UNIQUE"):
        await store.commit(ply_row(0))
    with pytest.raises(StoreError):
        store.add(EventRow(0.0, "x", "{}"))
    with pytest.raises(StoreError):
        await store.close()


WRITER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_store import RUN, match_row, ply_row
from arena.store import Store

async def main():
    store = Store.create(Path(sys.argv[1]), RUN, [match_row()])
    for ply in range(100_000):
        await store.commit(ply_row(ply))
        print(ply, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("after", [0, 1, 37, 400])
def test_a_process_killed_at_any_moment_leaves_every_committed_ply(
    tmp_path: Path, after: int
) -> None:
    folder = tmp_path / "run"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    seen = -1
    for line in writer.stdout:
        seen = int(line)
        if seen >= after:
            writer.send_signal(signal.SIGKILL)
            break
    rest = writer.stdout.read().split("\n")
    writer.stdout.close()
    writer.wait()
    seen = max([seen, *(int(line) for line in rest if line.isdecimal())])
    plies = [row.ply for row in read(folder).plies]
    assert plies == list(range(len(plies)))
    assert len(plies) > seen


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder, and a place where it can be seen and not written to, by this machine's leave."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "seen").mkdir()
    place = str(tmp_path / "seen")
    commands = (
        ["mount", "--bind", str(tmp_path / "kept"), place],
        ["mount", "-o", "remount,bind,ro", place],
    )
    mounted = [subprocess.run(c, capture_output=True, check=False).returncode for c in commands]
    try:
        if any(mounted):
            pytest.skip("nothing can be mounted here")
        yield tmp_path
    finally:
        if not mounted[0]:
            subprocess.run(["umount", place], check=True)


async def test_a_run_on_a_read_only_medium_is_read(read_only: Path) -> None:
    """SQLite cannot make the files there that it shares such a database by."""
    store = Store.create(read_only / "kept", RUN, [])
    await store.close()
    assert not (read_only / "kept" / "run.db-wal").exists()
    assert read(read_only / "seen").run == RUN
