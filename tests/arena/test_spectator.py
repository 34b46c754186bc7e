"""`arena watch`: a run that another process plays, one that is over, one that was left."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from arena.store import read
from tests.arena.test_run import arena, run, write_config

COMMAND = [sys.executable, "-m", "arena.cli"]


def start(folder: Path, **values: Any) -> tuple[subprocess.Popen[str], str]:
    """A run under way in a process of its own, and the address of its dashboard."""
    path = write_config(folder, **values)
    process = subprocess.Popen(
        [*COMMAND, "run", str(path), "--out", str(folder / "run"), "--view", "plain"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    said = ""
    while "playing" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    address = re.search(r"http://\S+", said)
    assert address is not None
    return process, address[0]


def test_a_run_that_is_over_is_shown_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "a")
    capsys.readouterr()
    assert arena("watch", tmp_path / "a" / "run", "--view", "plain") == 0
    shown, standing = capsys.readouterr().err.splitlines()
    assert "8 finished, 0 running" in shown
    assert standing == "the run is over: 8 matches finished"


@pytest.mark.parametrize("by", ["folder", "address"])
def test_a_run_is_watched_to_its_end_from_another_process(by: str, tmp_path: Path) -> None:
    playing, address = start(tmp_path, max_plies=40, period=0.4)
    watched = str(tmp_path / "run") if by == "folder" else address
    done = subprocess.run(
        [*COMMAND, "watch", watched, "--view", "plain"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=50,
    )
    playing.communicate(timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith("the run is over")
    plies = len(read(tmp_path / "run").plies)
    assert f"8 finished, 0 running, 0 suspended, 0 to come · {plies} plies" in done.stderr


def test_a_run_that_was_left_says_how_to_go_on(tmp_path: Path) -> None:
    playing, _ = start(tmp_path, max_plies=200, period=0.4)
    playing.send_signal(signal.SIGKILL)
    playing.communicate()
    done = subprocess.run(
        [*COMMAND, "watch", str(tmp_path / "run"), "--view", "none"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0
    assert "8 matches are left" in done.stderr
    assert "arena resume" in done.stderr


def test_a_dashboard_can_be_served_of_a_folder(tmp_path: Path) -> None:
    run(tmp_path / "a")
    serving = subprocess.Popen(
        [*COMMAND, "watch", str(tmp_path / "a" / "run"), "--dashboard", "127.0.0.1:0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert serving.stderr is not None
    address = re.search(r"http://\S+", serving.stderr.readline())
    assert address is not None
    with urllib.request.urlopen(address[0] + "api/snapshot", timeout=10) as answer:
        frame = json.load(answer)
    assert frame["ended"]
    assert len(frame["boards"]) == 8
    with urllib.request.urlopen(address[0] + "api/events", timeout=10) as stream:
        assert stream.read().count(b"event: frame") == 1  # and it ends
    serving.send_signal(signal.SIGINT)
    serving.communicate(timeout=20)
    assert serving.returncode == 130


@pytest.mark.parametrize(
    ("watched", "told"),
    [
        ("no/such/run", "holds no run"),
        ("http://127.0.0.1:9/", "no dashboard answers"),
        ("ftp://127.0.0.1/", "is no address"),
        ("http://[::bad/", "is no address"),
    ],
)
def test_what_cannot_be_watched_is_one_line(
    watched: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert arena("watch", watched, "--view", "none") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert told in said


def test_a_token_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARENA_DASHBOARD_TOKEN", "a-token-of-some-length")
    playing, address = start(tmp_path, max_plies=200, period=0.4)
    assert address.endswith("?token=a-token-of-some-length")
    bare = address.partition("?")[0]
    done = subprocess.run(
        [*COMMAND, "watch", bare, "--view", "none"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "wants its token" in done.stderr
    seen = subprocess.Popen(
        [*COMMAND, "watch", address, "--view", "plain"], stderr=subprocess.PIPE, text=True
    )
    assert seen.stderr is not None
    assert "running" in seen.stderr.readline()
    for process in (seen, playing):
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
