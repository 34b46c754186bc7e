"""Whole runs on the scripted engine, through the command line as a person uses it."""

import asyncio
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import chess.pgn
import pytest

from arena import cli, replay
from arena.records import write_files
from arena.store import Records, read

CONFIG = """
name = "t"
seed = 11
[engines.main]
kind = "scripted"
max_concurrent = 4
{engine}
[[agents]]
name = "one"
kind = "llm"
engine = "main"
{agent}
[[agents]]
name = "two"
kind = "llm"
engine = "main"
{agent}
[tournament]
games = ["chess", "janggi"]
pairs = 2
parallel_matches = 4
max_plies = {max_plies}
[pace]
move_period_seconds = {period}
[faults]
stall_seconds = 0.2
restart_limit = 2
{more}
"""


def write_config(folder: Path, **values: Any) -> Path:
    defaults = {"engine": "", "agent": "", "max_plies": 20, "period": 0, "more": ""}
    path = folder / "t.toml"
    path.write_text(CONFIG.format(**{**defaults, **values}))
    return path


def arena(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def run(folder: Path, **values: Any) -> Records:
    """A run's records, played from a config with these values."""
    folder.mkdir()
    config = write_config(folder, **values)
    assert arena("run", config, "--out", folder / "run", "--view", "none") == 0
    return read(folder / "run")


def games(records: Records) -> dict[str, tuple[str, ...]]:
    """The moves of every match by its id."""
    moves: dict[str, list[str]] = {row.id: [] for row in records.matches}
    for ply in records.plies:
        moves[ply.match_id].append(ply.move)
    return {match: tuple(line) for match, line in moves.items()}


def outcomes(records: Records) -> dict[str, tuple[object, ...]]:
    return {row.id: (row.state, row.winner, row.termination) for row in records.matches}


def test_a_run_leaves_its_folder_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = run(tmp_path / "a")
    folder = tmp_path / "a" / "run"
    said = capsys.readouterr()
    assert "8 matches finished" in said.out
    assert "run folder" in said.err
    assert {row.state for row in records.matches} == {"finished"}
    names = {path.name for path in folder.iterdir()}
    assert {"run.db", "config.toml", "arena.log", "games.pgn", "games-janggi.txt"} <= names
    log = [json.loads(line) for line in (folder / "arena.log").read_text().splitlines()]
    assert sum(line["event"] == "match_finished" for line in log) == 8
    assert all(line["run"] == "t" for line in log)


def test_the_pgn_reads_back_to_the_games_in_the_store(tmp_path: Path) -> None:
    records = run(tmp_path / "a")
    text = (tmp_path / "a" / "run" / "games.pgn").read_text()
    handle, found = io.StringIO(text), {}
    while (game := chess.pgn.read_game(handle)) is not None:
        assert not game.errors
        found[game.headers["MatchId"]] = tuple(move.uci() for move in game.mainline_moves())
        assert all("tokens" in node.comment for node in game.mainline())
        assert all(node.emt() is not None for node in game.mainline())
    chess_ids = {row.id for row in records.matches if row.game == "chess"}
    assert found == {match: line for match, line in games(records).items() if match in chess_ids}


def test_tokens_that_an_engine_does_not_tell_are_no_zeros_in_the_pgn(tmp_path: Path) -> None:
    records = run(tmp_path / "a")
    attempts = tuple(
        row._replace(prompt_tokens=None, cached_tokens=None) for row in records.attempts
    )
    write_files(tmp_path, records._replace(attempts=attempts))
    game = chess.pgn.read_game(io.StringIO((tmp_path / "games.pgn").read_text()))
    assert game is not None
    assert all("tokens n/a prompt, n/a cached, " in node.comment for node in game.mainline())


def test_the_same_seed_throws_the_same_dice_and_another_does_not(tmp_path: Path) -> None:
    one = run(tmp_path / "a")
    same = run(tmp_path / "b", engine="latency_seconds = [0.0, 0.01]")
    assert games(one) == games(same)
    assert outcomes(one) == outcomes(same)
    assert len(set(games(one).values())) == len(games(one)), "no two games of a pair are alike"
    config = tmp_path / "a" / "t.toml"
    other = tmp_path / "c"
    assert arena("run", config, "--out", other, "--view", "none", "--set", "seed=12") == 0
    assert set(games(one).values()).isdisjoint(games(read(other)).values())


@pytest.mark.parametrize("fault", ["overload", "stall", "cut_short", "garbage", "die"])
def test_a_disturbed_run_plays_the_games_of_an_undisturbed_one(tmp_path: Path, fault: str) -> None:
    calm = run(tmp_path / "a", max_plies=10)
    disturbed = run(
        tmp_path / "b",
        max_plies=10,
        engine=f'faults = [{{kind = "{fault}", probability = 0.05}}]',
    )
    assert any(attempt.fault for attempt in disturbed.attempts)
    assert games(calm) == games(disturbed)
    assert outcomes(calm) == outcomes(disturbed)


def test_a_free_agent_that_never_says_a_move_forfeits_every_game(tmp_path: Path) -> None:
    records = run(
        tmp_path / "a", agent='mode = "free"', engine='replies = ["I resign myself to think."]'
    )
    assert {row.termination for row in records.matches} == {"forfeit"}
    assert {row.winner for row in records.matches} == {1}
    assert [a.fault for a in records.attempts if a.match_id == records.matches[0].id] == [
        "unparsable"
    ] * 3


def start(config: Path, folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "arena.cli", "run", str(config), "--out", str(folder)]
    return subprocess.Popen(
        [*command, "--view", "none"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def wait_for_plies(folder: Path, count: int, process: "subprocess.Popen[bytes]") -> None:
    limit = time.monotonic() + 30
    while not (folder / "run.db").exists() or len(read(folder).plies) < count:
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_run_killed_again_and_again_ends_as_one_that_was_not(tmp_path: Path) -> None:
    slow = {"engine": "latency_seconds = 0.02", "max_plies": 30}
    calm = run(tmp_path / "a", **slow)
    folder = tmp_path / "b"
    folder.mkdir()
    config = write_config(folder, **slow)
    process = start(config, folder / "run")
    wait_for_plies(folder / "run", 40, process)
    process.kill()
    _, _ = process.communicate()
    committed = read(folder / "run").plies
    assert arena("resume", folder / "run", "--view", "none") == 0
    resumed = read(folder / "run")
    assert set(committed) <= set(resumed.plies)
    assert replay.build(resumed)["differences"] == []
    assert games(resumed) == games(calm)
    assert outcomes(resumed) == outcomes(calm)
    done = [ply.done for ply in sorted(resumed.plies, key=lambda ply: (ply.match_id, ply.ply))]
    assert min(done) >= 0
    by_match: dict[str, float] = {}
    for ply in resumed.plies:
        assert ply.done >= by_match.get(ply.match_id, 0.0)
        by_match[ply.match_id] = ply.done


def test_two_resumes_keep_the_figures_true(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, engine="latency_seconds = 0.03", max_plies=60)
    folder = tmp_path / "run"
    process = start(config, folder)
    wait_for_plies(folder, 20, process)
    process.kill()
    process.communicate()
    resumed = subprocess.Popen(
        [sys.executable, "-m", "arena.cli", "resume", str(folder), "--view", "none"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_plies(folder, 60, resumed)
    resumed.kill()
    resumed.communicate()
    assert arena("resume", folder, "--view", "none") == 0
    capsys.readouterr()
    assert arena("report", folder, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    harness = [agent["harness_ms"]["max"] for agent in report["agents"]]
    assert max(harness) < 300, "the time between two processes is nobody's"
    for row in read(folder).matches:
        assert row.started is not None
        assert row.ended is not None
        assert 0 <= row.suspended_s < row.ended - row.started


def test_a_reader_of_stderr_that_leaves_ends_no_run(tmp_path: Path) -> None:
    config = write_config(tmp_path, engine="latency_seconds = 0.01")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "arena.cli", "run", str(config)),
            *("--out", str(tmp_path / "run"), "--view", "plain"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    process.stderr.readline()
    process.stderr.close()
    assert process.wait(timeout=30) == 0
    assert {row.state for row in read(tmp_path / "run").matches} == {"finished"}


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">/dev/full", "| head -1"])
def test_output_that_goes_nowhere_is_no_traceback(tmp_path: Path, closed: str) -> None:
    run(tmp_path / "a")
    command = f"{sys.executable} -m arena.cli report {tmp_path / 'a' / 'run'} {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == (1 if "full" in closed else 0)


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    config, folder = write_config(tmp_path), tmp_path / "a#b?c%20d 한"
    assert arena("run", config, "--out", folder, "--view", "none") == 0
    assert arena("report", folder) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, "t.toml"]


def test_an_interrupt_lets_the_plies_end_and_keeps_the_run(tmp_path: Path) -> None:
    config = write_config(tmp_path, engine="latency_seconds = 0.05", max_plies=200)
    process = start(config, tmp_path / "run")
    wait_for_plies(tmp_path / "run", 8, process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"arena resume" in said
    held = read(tmp_path / "run")
    assert {row.state for row in held.matches} <= {"suspended", "scheduled", "finished"}
    assert not [a for a in held.attempts if a.fault]
    assert len({(a.match_id, a.ply) for a in held.attempts}) == len(held.plies)


def test_an_engine_that_dies_for_good_ends_the_run_resumable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = f"{__name__.rpartition('.')[2]}:DyingEngine"
    config = write_config(tmp_path)
    config.write_text(config.read_text().replace('kind = "scripted"', f'kind = "{engine}"'))
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        code = arena("run", config, "--out", tmp_path / "run", "--view", "none")
    finally:
        sys.path.pop(0)
    assert code == 3
    assert "gone for good" in capsys.readouterr().err
    held = read(tmp_path / "run")
    assert {row.state for row in held.matches} <= {"suspended", "scheduled"}
    assert not [row for row in held.matches if row.winner is not None]


@pytest.mark.parametrize("engine", ["NeverEndingEngine", "BrokenTelemetryEngine"])
def test_an_own_engine_s_bad_telemetry_ends_no_run(tmp_path: Path, engine: str) -> None:
    kind = f"{__name__.rpartition('.')[2]}:{engine}"
    config = write_config(tmp_path)
    config.write_text(config.read_text().replace('kind = "scripted"', f'kind = "{kind}"'))
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        assert arena("run", config, "--out", tmp_path / "run", "--view", "none") == 0
    finally:
        sys.path.pop(0)


class DyingEngine:
    """A user's own engine: the scripted one until its tenth request."""

    lives = 10

    def __init__(self, config: dict[str, Any]) -> None:
        from serving import EngineDead
        from serving.config import EngineStart
        from serving.scripted import ScriptedConfig, ScriptedEngine

        self._asked = 0
        self._dead = EngineDead("gone for good", final=True)
        start = EngineStart("main", Path(), 1.0, 0)
        scripted = ScriptedConfig(max_concurrent=config["max_concurrent"])
        self._inner = ScriptedEngine(start, scripted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def generate(self, request: Any) -> Any:
        self._asked += 1
        if self._asked > self.lives:
            raise self._dead
        return await self._inner.generate(request)


class NeverEndingEngine(DyingEngine):
    """Its snapshots do not end when it is closed."""

    lives = 10_000

    async def snapshots(self) -> Any:
        await asyncio.Event().wait()
        yield


class BrokenTelemetryEngine(DyingEngine):
    """Its snapshots raise."""

    lives = 10_000

    def snapshots(self) -> Any:
        raise RuntimeError("no telemetry")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "{folder}/nowhere.toml"], "cannot be read"),
        (["run", "{config}", "--set", "tournament.pears=3"], 'did you mean "pairs"'),
        (["run", "{config}", "--set", "tournament.pairs=x"], "tournament.pairs: is 'x'"),
        (["run", "{config}", "--set", "engines.main.model=/nowhere/at-all"], "engines.main"),
        (["run", "{config}", "--set", "tournament.parallel_matches=5000"], None),
        (["run", "{config}", "--set", "engines.main.context_tokens=400"], "context_tokens"),
        (["run", "{config}", "--set", "tournament.max_plies=5000"], "raise context_tokens"),
        (["run", "{config}", "--set", "openings.book=none.epd"], "openings.book"),
        (["run", "{config}", "--out", "{config}"], "is a file"),
        (["run", "{config}", "--out", "{folder}"], "is not empty and holds no run"),
        (["run", "{config}", "--set", 'engines.main.kind="no_such:Engine"'], "PYTHONPATH"),
        (["run", "{config}", "--set", 'engines.main.kind="string:Formatter"'], "could not be made"),
        (["run", "{config}", "--set", 'tournament.games=["string:Formatter"]'], "lacks name"),
        (["run", "{config}", "--set", "tournament.pairs=100000000"], "a run takes at most"),
        (["run", "{config}", "--set", "engines.main.latency_seconds=inf"], "latency_seconds"),
        (["run", "{config}", "--set", "agents.0.kind=llmm"], "'llmm' is not known"),
        (["run", "{config}", "--set", "engines.main.kind=scriptd"], "'scriptd' is unknown"),
        (["run", "{config}", "--set", "openings.janggi_setups=none"], "'none' is no set-up"),
        (["run", "{config}", "--set", "tournament.pairs=true"], "pairs: is True"),
        (["resume", "{folder}"], "holds no run"),
        (["report", "{folder}/nowhere"], "holds no run"),
        (["validate", "{config}", "--set", "agents.0.engine=zzz"], 'no engine is named "zzz"'),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str | None,
) -> None:
    config = write_config(tmp_path)
    if said is None:
        more = "--set", "tournament.pairs=2000"
        arguments, said = [*arguments, *more], "max_concurrent 4 + max_queued"
    filled = [a.format(folder=tmp_path, config=config) for a in arguments]
    if filled[0] == "run" and "--out" not in filled:
        filled += ["--out", str(tmp_path / "run")]
    assert arena(*filled) == 2
    error = capsys.readouterr().err
    told = [line for line in error.splitlines() if line.startswith("arena: ")]
    assert len(told) == 1, error
    assert said in told[0]
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["t.toml"]


def test_a_run_folder_in_use_is_refused_and_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run(tmp_path / "a")
    config, folder = tmp_path / "a" / "t.toml", tmp_path / "a" / "run"
    assert arena("run", config, "--out", folder, "--view", "none") == 2
    assert "already holds a run" in capsys.readouterr().err
    assert read(folder) == before
    assert arena("run", config, "--out", folder, "--replace", "--view", "none") == 0
    assert games(read(folder)) == games(before)


REPORT_KEYS = {
    "schema_version",
    "matches",
    "plies",
    "elapsed_s",
    "moves_per_s",
    "games_per_h",
    "slo_attainment",
    "pace_attainment",
    "schedule_lag_ms",
    "results",
    "agents",
    "engines",
    "standings",
    "verdict",
}


def test_the_report_has_every_key_that_was_promised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "a", period=0.05)
    capsys.readouterr()
    assert arena("report", tmp_path / "a" / "run", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) >= REPORT_KEYS
    (engine,) = report["engines"]
    assert engine["uncached_prompt_tokens_per_move"].keys() == {"chess", "janggi"}
    assert 0 < report["pace_attainment"] < 1.2
    assert report["infrastructure_faults"] == {}


def test_validate_says_what_a_run_would_ask_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert arena("validate", write_config(tmp_path, period=1), "--json") == 0
    forecast = json.loads(capsys.readouterr().out)
    assert (forecast["matches"], forecast["requests_at_most"]) == (8, 160)
    assert forecast["seconds_at_pace"] == pytest.approx(22.0)
    assert [path.name for path in tmp_path.iterdir()] == ["t.toml"]
