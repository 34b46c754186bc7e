"""`arena compare` as a person uses it: what is printed, written and refused, and how it ends."""

import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from arena import compare_page
from arena.compare_text import asked
from arena.store import StoreError
from arena.terminal import print_compare
from arena.workload import load
from tests.arena.test_run import arena
from tests.serving.test_fake_server_cli import IN_BACKGROUND

CONFIG = """
name = "compared"
seed = 3
[engines.one]
kind = "scripted"
latency_seconds = 0.005
max_concurrent = 4
[engines.two]
kind = "scripted"
latency_seconds = 0.005
max_concurrent = 4
[[agents]]
name = "a"
kind = "llm"
engine = "one"
[[agents]]
name = "b"
kind = "llm"
engine = "one"
[tournament]
games = ["chess", "janggi"]
parallel_matches = 2
max_plies = 12
[pace]
move_period_seconds = 0.1
"""
SHORT = "--seconds", "0.2", "--repeats", "1", "--concurrency", "1", "2"
CELLS = [(cell, engine) for cell in ("open", "closed 1", "closed 2") for engine in ("one", "two")]

LAUNCHED = """
[engines.served]
kind = "llama_server"
binary = "{binary}"
max_concurrent = 4
"""
BINARY = f"""#!/bin/sh
while [ "$1" != --port ]; do shift; done
exec {sys.executable} -m arena.cli fake-server --port "$2" \\
    --set 'dialects=["llama_server"]' --set slots=4 --set speed=100
"""
"""Stands for llama-server."""


def write_config(folder: Path, more: str = "") -> Path:
    path = folder / "c.toml"
    path.write_text(CONFIG + more)
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@dataclass(frozen=True)
class Compared:
    """One comparison, its workload saved."""

    result: dict[str, Any]
    progress: list[str]
    saved: Path


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    folder = tmp_path_factory.mktemp("compared")
    saved = folder / "w.jsonl"
    command = [sys.executable, "-m", "arena.cli", "compare", str(write_config(folder)), *SHORT]
    done = subprocess.run(
        [*command, "--save-workload", str(saved), "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert names_in(folder) == ["c.toml", "w.jsonl"]
    return Compared(json.loads(done.stdout), done.stderr.splitlines(), saved)


def test_stdout_is_one_object_and_stderr_tells_what_goes_on(compared: Compared) -> None:
    result = compared.result
    assert (result["schema_version"], result["name"]) == (1, "compared")
    assert [(asked(row), row["engine"]) for row in result["cells"]] == CELLS
    for row in result["cells"]:
        assert row["errors"] == {}
        assert min(row["moves_per_s"]) > 0
    assert [engine["failures"] for engine in result["engines"]] == [[], []]
    (pair,) = result["agreement"]["pairs"]
    assert pair["equal"] == pair["n"] > 0
    begun, *progress = compared.progress
    assert begun.startswith("48 questions of 4 matches, 3 cells of 0.2 s, 1 repeats")
    assert "about 1 s at least" in begun
    assert len(progress) == 2 * (1 + 3)


def rows_of(table: str) -> list[list[str]]:
    """The cells of the tables in a text, of which each row begins with how it was asked."""
    lines = [re.split(r" {2,}", line.strip()) for line in table.splitlines()]
    return [line for line in lines if len(line) > 2 and re.fullmatch(r"open|closed \d", line[0])]


def test_the_table_is_the_object_in_words(
    compared: Compared, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two comparisons measure two speeds, so the object's own table has the form of the other's."""
    folder = compared.saved.parent
    assert arena("compare", folder / "c.toml", *SHORT, "--workload", compared.saved) == 0
    printed = capsys.readouterr().out
    out = io.StringIO()
    print_compare(compared.result, out)
    assert printed.partition(";")[0] == out.getvalue().partition(";")[0]
    assert [(row[0], row[1]) for row in rows_of(printed)] == CELLS * 2
    assert [len(row) for row in rows_of(printed)] == [len(row) for row in rows_of(out.getvalue())]
    for row, told in zip(compared.result["cells"], rows_of(out.getvalue()), strict=False):
        (rate,) = row["moves_per_s"]
        assert told[2] == f"{rate:.1f} ({rate:.1f}–{rate:.1f})"
        assert told[-2:] == [f"{row['slo_attainment']:.1%}", "none"]


def test_a_saved_workload_is_asked_again(
    compared: Compared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again.jsonl"
    saying = ("--workload", compared.saved, "--save-workload", again, "--json")
    other = ("--engine", "two", "--set", "seed=99")
    assert arena("compare", write_config(tmp_path), *SHORT, *other, *saying) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["workload"] == compared.result["workload"]
    assert [engine["name"] for engine in result["engines"]] == ["two"]
    assert again.read_bytes() == compared.saved.read_bytes()
    assert load(again).digest == result["workload"]["digest"]


def test_a_page_is_written_and_written_over(
    compared: Compared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, page = write_config(tmp_path), tmp_path / "page.html"
    for _ in range(2):
        assert arena("compare", config, *SHORT, "--html", page) == 0
        said = capsys.readouterr()
        assert [(row[0], row[1]) for row in rows_of(said.out)] == CELLS * 2
        assert said.err.splitlines()[-1] == f"written: {page}"
        html = page.read_text(encoding="utf-8")
        assert html.startswith("<!doctype html>")
        assert html.endswith("</html>\n")
        assert compared.result["workload"]["digest"] in html
        assert names_in(tmp_path) == ["c.toml", "page.html"]


def test_a_page_that_cannot_be_written_costs_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of measurement went with a full disk."""

    def write(path: Path, result: dict[str, Any]) -> None:
        raise StoreError(f"{path}: cannot be written (No space left on device)")

    monkeypatch.setattr(compare_page, "write", write)
    page = tmp_path / "page.html"
    assert arena("compare", write_config(tmp_path), *SHORT, "--html", page) == 2
    said = capsys.readouterr()
    assert [(row[0], row[1]) for row in rows_of(said.out)] == CELLS * 2
    assert said.err.splitlines()[-1].startswith(f"arena: {page}: cannot be written")


def test_an_engine_that_cannot_start_is_told_and_the_others_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = '[engines.absent]\nkind = "tests.arena.doomed_engines:UnstartableEngine"'
    assert arena("compare", write_config(tmp_path, absent), *SHORT, "--json") == 3
    result = json.loads(capsys.readouterr().out)
    failures = {engine["name"]: engine["failures"] for engine in result["engines"]}
    assert failures == {
        "one": [],
        "two": [],
        "absent": ["repeat 1 of 1, absent: no such device"],
    }
    for row in result["cells"]:
        assert (row["moves_per_s"] == [None]) is (row["engine"] == "absent")


def test_concurrencies_that_are_given_one_by_one_are_all_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one alone was."""
    given = ("--concurrency", "1", "--concurrency", "3", "2")
    short = ("--seconds", "0.2", "--repeats", "1", "--engine", "one", "--json")
    assert arena("compare", write_config(tmp_path), *short, *given) == 0
    assert json.loads(capsys.readouterr().out)["options"]["concurrencies"] == [1, 3, 2]


def test_closed_loops_that_nobody_asked_for_are_left_out_of_a_small_workload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default was refused as if it had been given."""
    short = ("--seconds", "0.2", "--repeats", "1", "--engine", "one", "--json")
    assert arena("compare", write_config(tmp_path), *short) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["options"]["concurrencies"] == [1, 4]
    assert said.err.splitlines()[1] == (
        "closed 16 left out: the workload has 4 matches; raise tournament.pairs"
    )


@pytest.mark.parametrize("kept", [True, False])
def test_logs_are_kept_where_a_failure_names_them(tmp_path: Path, kept: bool) -> None:
    """The log that an error pointed to was deleted with it."""
    binary, temporary = tmp_path / "server", tmp_path / "tmp"
    binary.write_text("#!/bin/sh\necho no such device >&2\nexit 1\n" if kept else BINARY)
    binary.chmod(0o755)
    temporary.mkdir()
    config = write_config(tmp_path, LAUNCHED.format(binary=binary))
    done = subprocess.run(
        [sys.executable, "-m", "arena.cli", "compare", str(config), *SHORT, "--engine", "served"],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == (3 if kept else 0), done.stderr
    if kept:
        (logs,) = temporary.iterdir()
        assert done.stderr.splitlines()[-1] == f"kept: the engines' logs in {logs}"
        assert "no such device" in (logs / "engine-served.log").read_text()
    else:
        assert names_in(temporary) == []


def test_a_folder_with_no_log_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    absent = '[engines.absent]\nkind = "tests.arena.doomed_engines:UnstartableEngine"'
    config = write_config(tmp_path, absent)
    assert arena("compare", config, *SHORT, "--engine", "absent") == 3
    assert names_in(tmp_path) == ["c.toml"]
    assert "kept" not in capsys.readouterr().err


# refusals


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("{folder}/nowhere.toml",), "cannot be read"),
        (("{config}", "--set", "engines.one.max_concurent=2"), 'did you mean "max_concurrent"'),
        (("{config}", "--engine", "three"), "--engine three: no engine is named so"),
        (("{config}", "--engine", "one", "--engine", "one"), "--engine one: is named twice"),
        (("{config}", "--seconds", "0"), "--seconds: give 0.1 to 3600"),
        (("{config}", "--seconds", "nan"), "--seconds: give 0.1 to 3600"),
        (("{config}", "--repeats", "0"), "--repeats: give 1 to 100"),
        (("{config}", "--concurrency", "0"), "--concurrency: give numbers from 1 on"),
        (("{config}", "--concurrency", "5"), "--concurrency: 5 questions at once need"),
        (("{config}", "--set", "pace.move_period_seconds=0"), "pace.move_period_seconds: is 0"),
        (("{config}", "--set", "engines.two.context_tokens=256"), "engines.two.context_tokens"),
        (("{config}", "--workload", "{folder}/none.jsonl"), "none.jsonl: cannot be read"),
        (("{config}", "--workload", "{config}"), "c.toml: is no workload"),
        (("{config}", "--workload", "{folder}"), "holds no run"),
        (("{config}", "--save-workload", "{folder}"), "cannot be written (Is a directory)"),
        (("{config}", "--save-workload", "{folder}/none/w"), "cannot be written (No such file"),
        (("{config}", "--save-workload", "{config}"), "c.toml: is there, and is no workload"),
        (("{config}", "--save-workload", ""), "cannot be written (Is a directory)"),
        (("{config}", "--html", "{folder}"), "cannot be written (Is a directory)"),
        (("{config}", "--html", "{folder}/none/p.html"), "cannot be written (No such file"),
        (("{config}", "--html", "{config}"), "c.toml: is there, and is no page of ours"),
        (("{config}", "--html", "a\0b"), "is no file to write to"),
        (("{config}", "--logs", "{config}"), "--logs: {config} cannot be a folder of logs"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    """A page's place was looked at after the last engine, so an hour could end in one line."""
    config = write_config(tmp_path)
    filled = [argument.format(folder=tmp_path, config=config) for argument in arguments]
    short = () if "--concurrency" in filled else ("--concurrency", "1")
    assert arena("compare", *filled, *short) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("arena: ")
    assert told.format(config=config) in line
    assert names_in(tmp_path) == ["c.toml"]
    assert config.read_text() == CONFIG


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "the following arguments are required: config"),
        (("c.toml", "--seconds", "x"), "argument --seconds: invalid float value: 'x'"),
        (("c.toml", "--repeats", "1.5"), "argument --repeats: invalid int value: '1.5'"),
        (("c.toml", "--concurrency"), "argument --concurrency: expected at least one argument"),
        (("c.toml", "--json", "--html", "p"), "not allowed with argument --json"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        arena("compare", *arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_pipe_is_written_to_and_stays_one(compared: Compared, tmp_path: Path) -> None:
    """Saving to a device put a file in its place."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reading = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reading.start()
    saved = ("--save-workload", pipe, "--workload", compared.saved)
    assert arena("compare", write_config(tmp_path), *SHORT, *saved) == 0
    reading.join()
    assert got == [compared.saved.read_bytes()]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert names_in(tmp_path) == ["c.toml", "pipe"]


# interrupted


@pytest.mark.parametrize(
    ("number", "until", "by"),
    [
        (signal.SIGINT, "moves/s", ()),
        (signal.SIGTERM, "moves/s", IN_BACKGROUND),
        (signal.SIGINT, "starting", ()),
    ],
)
def test_a_signal_ends_it_with_what_was_measured_and_leaves_nothing(
    number: signal.Signals, until: str, by: tuple[str, ...], tmp_path: Path
) -> None:
    """Hours of measurement were thrown away."""
    binary, temporary = tmp_path / "server", tmp_path / "tmp"
    binary.write_text(BINARY)
    binary.chmod(0o755)
    temporary.mkdir()
    config = write_config(tmp_path, LAUNCHED.format(binary=binary))
    before = names_in(tmp_path)
    process = subprocess.Popen(
        [
            *(*by, sys.executable, "-m", "arena.cli", "compare", str(config)),
            *("--engine", "served", "--seconds", "0.2", "--repeats", "100", "--concurrency", "1"),
            "--json",
        ],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = ""
    while until not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    children = psutil.Process(process.pid).children(recursive=True)
    assert names_in(temporary) != []
    commands = [child.cmdline() for child in children]
    process.send_signal(number)
    out, told = process.communicate(timeout=30)
    assert process.returncode == 130
    if until == "starting":
        assert out == ""
    else:
        assert any("fake-server" in command for command in commands)
        result = json.loads(out)
        assert result["interrupted"] is True
        rates = [rate for row in result["cells"] for rate in row["moves_per_s"]]
        assert len(rates) == 200
        assert 0 < sum(rate is not None for rate in rates) < 200
    assert told.splitlines()[-1] == "arena: interrupted"
    assert "Traceback" not in told
    assert not [child for child in children if child.is_running()]
    assert names_in(tmp_path) == before
    assert names_in(temporary) == []
