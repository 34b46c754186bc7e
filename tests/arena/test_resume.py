"""Going on with a run: what may have changed of its config, and what stands in the way."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from arena import cli
from arena import config as configs
from arena.config_diff import changes
from arena.store import Records, read
from tests.arena.test_run import games, outcomes, run, start, wait_for_plies, write_config
from tests.arena.test_store import read_only

__all__ = ["read_only"]


def arena(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def killed(folder: Path, plies: int = 10, **values: object) -> Path:
    """The folder of a run that was killed after so many plies."""
    config = write_config(folder, engine="latency_seconds = 0.02", **values)
    process = start(config, folder / "run")
    wait_for_plies(folder / "run", plies, process)
    process.kill()
    process.communicate()
    return folder / "run"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but those that readers of a WAL database make: an index, and a log of nothing."""
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    found.pop("run.db-shm", None)
    return {name: content for name, content in found.items() if content or name != "run.db-wal"}


def edit(folder: Path, before: str, after: str) -> None:
    path = folder / "config.toml"
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that an error is."""
    error = capsys.readouterr().err
    told = [line for line in error.splitlines() if line.startswith("arena: ")]
    assert len(told) == 1, error
    assert "Traceback" not in error
    return told[0]


def changes_told(records: Records) -> list[object]:
    return [json.loads(e.detail_json) for e in records.events if e.kind == "config_changed"]


def test_a_changed_config_that_would_change_the_games_is_shown_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = killed(tmp_path)
    edit(folder, "seed = 11", "seed = 12")
    edit(folder, "parallel_matches = 4", "parallel_matches = 2")
    before = contents(folder)
    capsys.readouterr()
    assert arena("resume", folder, "--view", "none") == 2
    line = said(capsys)
    assert "config.toml" in line
    assert "seed: 11 → 12;" in line
    assert "parallel_matches" not in line, "that one is harmless"
    assert contents(folder) == before
    edit(folder, "seed = 12", "seed = 11")
    wanted = "agents.1.temperature=0.5"
    assert arena("resume", folder, "--view", "none", "--set", wanted) == 2
    assert "agents.1.temperature: 1.0 → 0.5;" in said(capsys)
    edit(folder, "seed = 11", "seed = 11\nsed = 3")
    assert arena("resume", folder, "--view", "none") == 2
    assert 'did you mean "seed"' in said(capsys)


def test_harmless_changes_take_effect_and_are_recorded(tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", engine="latency_seconds = 0.02")
    (tmp_path / "b").mkdir()
    folder = killed(tmp_path / "b")
    edit(folder, "parallel_matches = 4", "parallel_matches = 2")
    wanted = "slo.move_seconds=3"
    assert arena("resume", folder, "--view", "none", "--set", wanted) == 0
    records = read(folder)
    assert games(records) == games(calm)
    assert outcomes(records) == outcomes(calm)
    told = {"slo.move_seconds": [1.0, 3.0], "tournament.parallel_matches": [4, 2]}
    assert changes_told(records) == [told]
    stored = configs.parse(json.loads(records.run.config_json))
    assert stored == configs.load(folder / "config.toml")
    assert stored.digest == records.run.config_digest
    assert (stored.slo.move_seconds, stored.tournament.parallel_matches) == (3.0, 2)
    assert arena("resume", folder, "--view", "none") == 0
    assert changes_told(read(folder)) == [told], "nothing changed since"


@pytest.mark.parametrize(
    ("override", "key", "is_harmless"),
    [
        ("tournament.parallel_matches=2", "tournament.parallel_matches", True),
        ("pace.move_period_seconds=2", "pace.move_period_seconds", True),
        ("pace.move_limit_seconds=2", "pace.move_limit_seconds", False),
        ("engines.main.max_queued=9", "engines.main.max_queued", True),
        ("engines.main.seed=9", "engines.main.seed", False),
        ("engines.other={kind='scripted'}", "engines.other.kind", False),
        ("slo.move_seconds=5", "slo.move_seconds", True),
        ("saturation.gap_seconds=5", "saturation.gap_seconds", False),
        ("tournament.max_plies=0", "tournament.max_plies", False),
        ("agents.0.persona=x", "agents.0.persona", False),
        ("adjudication.judge={command='x'}", "adjudication.judge.command", False),
        ("prompts.chess.system=x", "prompts.chess.system", False),
    ],
)
def test_a_key_is_harmless_where_it_has_no_say_in_a_move_or_a_rating(
    tmp_path: Path, override: str, key: str, is_harmless: bool
) -> None:
    config = configs.load(write_config(tmp_path))
    found = {change.key: change for change in changes(config, configs.changed(config, [override]))}
    assert found[key].is_harmless == is_harmless
    assert changes(config, configs.changed(config, [])) == ()


@pytest.mark.parametrize(
    ("override", "is_harmless"),
    [
        ("replicas=3", True),
        ("max_replicas=9", True),
        ("address='auto'", True),
        ("gpus_per_replica=0.5", True),
        ("cpus_per_replica=2", True),
        ("lease_seconds=90", True),
        ("engine.max_concurrent=4", True),
        ("engine.max_queued=4", True),
        ("engine.seed=9", False),
        ("engine.replies=['e2e4']", False),
    ],
)
def test_how_many_replicas_there_are_and_where_has_no_say_in_a_move(
    override: str, is_harmless: bool
) -> None:
    ray = {"kind": "ray", "engine": {"kind": "scripted"}}
    agents = [{"name": name, "kind": "llm", "engine": "main"} for name in ("one", "two")]
    told = {"name": "r", "engines": {"main": ray}, "agents": agents}
    config = configs.parse({**told, "tournament": {"games": ["chess"]}})
    (change,) = changes(config, configs.changed(config, [f"engines.main.{override}"]))
    assert change.key == f"engines.main.{override.partition('=')[0]}"
    assert change.is_harmless == is_harmless


def test_a_second_process_is_refused_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, engine="latency_seconds = 0.05", max_plies=100)
    folder = tmp_path / "run"
    process = start(config, folder)
    wait_for_plies(folder, 4, process)
    os.kill(process.pid, signal.SIGSTOP)  # so that what changes is not its doing
    before = contents(folder)
    try:
        for words in (("resume", folder), ("run", config, "--out", folder, "--replace")):
            assert arena(*words, "--view", "none") == 2
            assert "is being played by another process" in said(capsys)
        assert contents(folder) == before
    finally:
        process.kill()
        process.communicate()


def test_a_run_that_was_cut_short_or_is_another_s_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "a")
    whole = (tmp_path / "a" / "run" / "run.db").read_bytes()
    with closing(sqlite3.connect(tmp_path / "foreign.db")) as db:
        db.execute("CREATE TABLE notes(text TEXT)")
        db.execute("PRAGMA user_version = 2")
    with closing(sqlite3.connect(tmp_path / "a" / "run" / "run.db")) as db:
        db.execute("PRAGMA user_version = 99")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    found = {
        "truncated": whole[: len(whole) // 3],
        "header": whole[:100],
        "foreign": (tmp_path / "foreign.db").read_bytes(),
        "newer": (tmp_path / "a" / "run" / "run.db").read_bytes(),
        "empty": b"",
    }
    capsys.readouterr()
    for name, content in found.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "run.db").write_bytes(content)
        before = contents(folder)
        for command in ("resume", "report"):
            assert arena(command, folder) == 2, name
            assert "run.db" in said(capsys)
        assert contents(folder) == before, name


def test_a_run_that_cannot_be_written_to_is_refused_and_can_be_read(
    read_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(read_only)
    kept, seen = read_only / "kept" / "run", read_only / "seen" / "run"
    process = start(config, kept)
    wait_for_plies(kept, 4, process)
    process.send_signal(signal.SIGINT)
    process.communicate()
    before = contents(kept)
    assert arena("resume", seen, "--view", "none") == 2
    assert "cannot be written to" in said(capsys)
    assert arena("report", seen) == 0
    assert contents(kept) == before


LIMITED = """
import resource, signal, sys
from arena import cli
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed."""
    return killed(tmp_path_factory.mktemp("left"), plies=30)


@pytest.fixture
def halfway(left: Path, tmp_path: Path) -> Path:
    """A copy of it, to do with as one likes."""
    return Path(shutil.copytree(left, tmp_path / "run"))


def limited(size: int, *words: object) -> "subprocess.CompletedProcess[str]":
    """What `arena WORDS` does where no file may grow beyond `size` bytes."""
    return subprocess.run(
        [sys.executable, "-c", LIMITED, str(size), *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("size", [10, 1_000, 40_000])
def test_a_full_disk_at_a_resume_is_told_as_at_a_run(halfway: Path, size: int) -> None:
    folder, more = halfway, ("--set", "tournament.parallel_matches=2")
    done = limited(size, "resume", folder, "--view", "none", *more)
    assert done.returncode == 3, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("arena: ")]
    assert line.startswith(f"arena: {folder}/")
    assert "make room on its disk" in line
    assert "the run is kept, `arena resume" in line
    assert arena("resume", folder, "--view", "none", *more) == 0


def test_a_folder_that_nothing_fits_in_is_left_as_it_was(tmp_path: Path) -> None:
    config, folder = write_config(tmp_path), tmp_path / "runs" / "new"
    done = limited(10_000, "run", config, "--out", folder, "--view", "none")
    assert done.returncode == 2, done.stderr
    assert "make room on its disk" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["t.toml"]
    assert arena("run", config, "--out", folder, "--view", "none") == 0
    before = contents(folder)
    done = limited(10_000, "run", config, "--out", folder, "--replace", "--view", "none")
    assert done.returncode == 2, done.stderr
    assert contents(folder) == before


def test_a_log_that_is_no_file_is_named_and_nothing_is_written(
    halfway: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, config = halfway, write_config(tmp_path)
    (folder / "arena.log").unlink()
    (folder / "arena.log").mkdir()
    before = (folder / "run.db").read_bytes(), (folder / "run.db-wal").read_bytes()
    for words in (("resume", folder), ("run", config, "--out", folder, "--replace")):
        assert arena(*words, "--view", "none") == 2
        assert f"{folder / 'arena.log'}: is no file" in said(capsys)
    assert ((folder / "run.db").read_bytes(), (folder / "run.db-wal").read_bytes()) == before
    (folder / "arena.log").rmdir()
    assert arena("resume", folder, "--view", "none") == 0


UNFINISHED = (
    "(SELECT id FROM matches WHERE state != 'finished' AND id IN"
    " (SELECT match_id FROM plies GROUP BY 1 HAVING count(*) > 2) LIMIT 1)"
)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("UPDATE plies SET move = 'a1a8' WHERE ply = 1", " ply 1: move: a1a8; not legal; "),
        ("UPDATE plies SET fen_after = 'x' WHERE ply = 0", " ply 0: position: x; "),
        ("UPDATE plies SET side = 1 WHERE ply = 0", " ply 0: side: 1; 0; "),
        ("DELETE FROM plies WHERE ply = 0", " ply 0: order: ply 1; ply 0 is missing; "),
        (
            f"DELETE FROM plies WHERE match_id = {UNFINISHED} AND ply ="
            f" (SELECT max(ply) FROM plies WHERE match_id = {UNFINISHED})",
            "attempt: an answer; its move is missing; ",
        ),
        (f"UPDATE matches SET state = 'scheduled' WHERE id = {UNFINISHED}", ": state: "),
        ("UPDATE matches SET agent_first = 'nobody'", ": agent 'nobody' is not in the run's "),
        ("UPDATE matches SET game = 'go'", ": game 'go' by the rules "),
        ("UPDATE matches SET start_fen = 'x'", " cannot be replayed: "),
        (f"DELETE FROM matches WHERE id = {UNFINISHED}", "is not stored itself; "),
        ("UPDATE attempts SET fault = 'zz'", " cannot be replayed: "),
        ("UPDATE run SET config_json = '{'", "run.db: is damaged ("),
        ("UPDATE run SET config_json = '{}'", "its config cannot be read: "),
        ("DELETE FROM run", "holds 0 runs and not one"),
    ],
)
def test_a_run_that_is_not_sound_is_refused_and_left_alone(
    halfway: Path, capsys: pytest.CaptureFixture[str], change: str, told: str
) -> None:
    folder = halfway
    with closing(sqlite3.connect(folder / "run.db")) as db, db:
        assert db.execute(change).rowcount
    before = contents(folder)
    assert arena("resume", folder, "--view", "none") == 2
    assert told in said(capsys)
    assert contents(folder) == before


def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path: Path) -> None:
    """A file may not grow beyond a limit, which a write meets as it meets a full disk."""
    calm = run(tmp_path / "calm", max_plies=40)
    config = tmp_path / "calm" / "t.toml"
    folder = tmp_path / "run"
    done = limited(200_000, "run", config, "--out", folder, "--view", "none")
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "arena resume" in done.stderr
    committed = read(folder).plies
    assert 0 < len(committed) < len(calm.plies)
    assert arena("resume", folder, "--view", "none") == 0
    resumed = read(folder)
    assert set(committed) <= set(resumed.plies)
    assert games(resumed) == games(calm)
    assert outcomes(resumed) == outcomes(calm)
