"""The benches run through the product's own path and print what was promised of them."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from arena import bench, cli
from tests.arena.test_compare_cli import BINARY, LAUNCHED
from tests.serving.test_fake_server_cli import IN_BACKGROUND

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert cli.main(["bench", *arguments, "--json"]) == 0
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def test_games(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "NUM_GAMES", 2)
    games = printed(capsys, "games")["games"]
    assert isinstance(games, dict)
    assert games.keys() == {"chess", "janggi"}
    for figures in games.values():
        assert 0 < figures["legal_moves_us"] < 10_000
        assert 0 < figures["play_us"] < 10_000


def test_overhead(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "GAMES", ("janggi",))
    result = printed(capsys, "overhead")
    games = result["games"]
    assert isinstance(games, dict)
    assert games["janggi"]["plies"] > 5000
    assert games["janggi"]["plies_per_s"] > 0
    assert games["janggi"]["cpu_ms_per_ply"] > 0


def test_pace(capsys: pytest.CaptureFixture[str]) -> None:
    cells = printed(capsys, "pace", "--seats", "20", "--seconds", "4")["cells"]
    assert isinstance(cells, list)
    (cell,) = cells
    assert cell["seats"] == 20
    assert 0.5 < cell["pace_attainment"] < 1.5
    for name in ("schedule_lag_ms", "harness_ms", "loop_lag_ms"):
        assert cell[name].keys() == {"mean", "p50", "p95", "p99", "max"}


@pytest.mark.parametrize("seats", ["3", "0"])
def test_seats_come_in_pairs(capsys: pytest.CaptureFixture[str], seats: str) -> None:
    assert cli.main(["bench", "pace", "--seats", seats]) == 2
    assert "give even numbers" in capsys.readouterr().err


OVERLOADED = """
name = "overloaded"
[engines.main]
kind = "scripted"
latency_seconds = [0.05, 0.05]
max_concurrent = 4
[[agents]]
name = "one"
kind = "llm"
engine = "main"
[[agents]]
name = "two"
kind = "llm"
engine = "main"
[tournament]
games = ["chess"]
pairs = 2
parallel_matches = 4
max_plies = 8
[pace]
move_period_seconds = 1.0
[slo]
move_seconds = 0.3
"""


def test_admission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "overloaded.toml"
    config.write_text(OVERLOADED)
    command = ("admission", str(config), "--engine", "main", "--seconds", "2", "--repeats", "2")
    result = printed(capsys, *command)
    rows = result["repeats"]
    assert isinstance(rows, list)
    assert len(rows) == 2
    for row in rows:
        queue, admission = row["queue"], row["admission"]
        assert queue["offered"] == admission["offered"] == int(2 * row["capacity"] * 2)
        for way in (queue, admission):
            assert way["answered"] + sum(way["errors"].values()) == way["offered"]
        assert queue["errors"] == {}, "a plain queue refuses nobody"
        assert admission["errors"].keys() == {"overloaded"}
        assert not queue["caps"]
        assert admission["caps"]
        assert row["gain"] == admission["in_time_per_s"] / queue["in_time_per_s"]


def test_a_signal_ends_admission_in_the_background_and_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM was passed on as SIGINT, which a shell lets background commands ignore."""
    binary, config = tmp_path / "server", tmp_path / "overloaded.toml"
    binary.write_text(BINARY)
    binary.chmod(0o755)
    config.write_text(OVERLOADED + LAUNCHED.format(binary=binary))
    command = [sys.executable, "-m", "arena.cli", "bench", "admission", str(config)]
    with subprocess.Popen(
        [*IN_BACKGROUND, *command, "--engine", "served", "--seconds", "1", "--repeats", "20"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        while "capacity" not in (line := process.stderr.readline()):
            assert line
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGTERM)
        out, told = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert told.splitlines()[-1] == "arena: interrupted"
    assert not [child for child in children if child.is_running()]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--engine", "other"), "no engine is named so; engines: main"),
        (("--engine", "main", "--load", "1"), "--load: give more than 1"),
        (("--engine", "main", "--repeats", "0"), "--repeats: give 1 to 20"),
        (("--engine", "main", "--seconds", "nan"), "--seconds: give 1 to 600"),
        (
            ("--engine", "main", "--set", "engines.main.max_concurrent=5"),
            "5 questions at once need as many matches, and the config has 4",
        ),
    ],
)
def test_admission_says_what_cannot_be_measured(
    options: tuple[str, ...], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "overloaded.toml"
    config.write_text(OVERLOADED)
    assert cli.main(["bench", "admission", str(config), *options]) == 2
    assert line in capsys.readouterr().err


def test_admission_of_an_engine_that_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "overloaded.toml"
    silent = OVERLOADED.replace('"scripted"', '"openai"\nurl = "http://127.0.0.1:9"\nmodel = "any"')
    config.write_text(silent.replace("latency_seconds = [0.05, 0.05]\n", ""))
    command = ["bench", "admission", str(config), "--engine", "main"]
    assert cli.main(command) == 3
    assert "did not answer within" in capsys.readouterr().err
