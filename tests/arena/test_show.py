"""Showing a run: on by default, safe, and never at the run's cost."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from arena import config, runner
from arena.dashboard.exhibit import LiveExhibit
from arena.dashboard.guard import Binding
from arena.figures import Figures
from arena.report import build
from arena.show import Show, _taken_up
from arena.store import AttemptRow, MatchRow, read
from arena.terminal import SilentView
from tests.arena.test_run import arena, write_config


class Listener(SilentView):
    """Notes what is announced."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def announce(self, message: str) -> None:
        self.said.append(message)


def play(folder: Path, show: Show, **values: Any) -> runner.Outcome:
    loaded = config.load(write_config(folder, **values))
    return asyncio.run(runner.start(loaded, folder / "run", show, replace=False))


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "arena.log").read_text().splitlines()]


def test_the_dashboard_is_there_unless_it_is_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path)
    assert arena("run", path, "--out", tmp_path / "a", "--view", "plain") == 0
    assert re.search(r"^dashboard: http://127\.0\.0\.1:\d+/$", capsys.readouterr().err, re.M)
    off = ("--view", "plain", "--dashboard", "off")
    assert arena("run", path, "--out", tmp_path / "b", *off) == 0
    assert "dashboard: " not in capsys.readouterr().err


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:taken", "127.0.0.1:99999", "no-such-host.invalid:0", "http://x", "203.0.113.7:0"],
)
def test_an_address_that_cannot_be_had_is_one_line_and_nothing_is_written(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = address.replace("taken", str(other.getsockname()[1]))
        run = ("run", write_config(tmp_path), "--out", tmp_path / "run", "--view", "none")
        assert arena(*run, "--dashboard", address) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "dashboard" in said[0]
    assert not (tmp_path / "run").exists()


class BrokenView(SilentView):
    async def watch(self, read: Callable[[], Mapping[str, Any]]) -> None:
        read()
        raise RuntimeError("a bug in a view")


def test_a_view_that_breaks_ends_no_run(tmp_path: Path) -> None:
    assert play(tmp_path, Show(BrokenView())).ending == "finished"
    assert "a bug in a view" in str([e for e in log_of(tmp_path) if e["event"] == "show_lost"])


def test_figures_that_break_end_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = Figures.add

    def breaks(self: Figures, rows: Any) -> None:
        add(self, rows)
        if self.plies:
            raise RuntimeError("a bug in figures")

    monkeypatch.setattr(Figures, "add", breaks)
    listener = Listener()
    assert play(tmp_path, Show(listener)).ending == "finished"
    assert "a bug in figures" in str([e for e in log_of(tmp_path) if e["event"] == "show_lost"])
    monkeypatch.undo()
    assert build(read(tmp_path / "run"))["matches"]["finished"] == 8


def test_a_last_frame_that_breaks_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(self: LiveExhibit) -> None:
        raise RuntimeError("a bug in the exhibit")

    monkeypatch.setattr(LiveExhibit, "_make", breaks)
    binding = Binding("127.0.0.1", 0, None, is_chosen=True)
    assert play(tmp_path, Show(SilentView(), binding)).ending == "finished"
    assert (tmp_path / "run" / "games.pgn").exists()


def test_a_past_that_cannot_be_shown_keeps_no_run_from_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(self: Figures, *_: object, **__: object) -> None:
        raise RuntimeError("a bug in figures")

    monkeypatch.setattr(Figures, "__init__", breaks)
    assert play(tmp_path, Show(SilentView())).ending == "finished"
    monkeypatch.undo()
    assert build(read(tmp_path / "run"))["matches"]["finished"] == 8


def test_only_what_is_open_is_traced_again_after_a_resume(tmp_path: Path) -> None:
    """Old forfeits became new spans at every resume."""
    agent = 'mode = "free"\nmax_tokens = 8'
    engine = '[[engines.main.faults]]\nkind = "garbage"\nprobability = 1.0'
    play(tmp_path, Show(SilentView()), agent=agent, engine=engine)
    held = read(tmp_path / "run")
    assert all(row.termination == "forfeit" for row in held.matches)
    _, rows = _taken_up(tmp_path / "run")
    assert not [row for row in rows if isinstance(row, AttemptRow | MatchRow)]


@pytest.fixture
def collector() -> Iterator[tuple[str, list[str]]]:
    """A collector's address and the names of the spans it was sent."""
    names: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    names.extend(span.name for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", names
        server.shutdown()
        thread.join()


def test_spans_of_every_move_reach_a_collector(
    tmp_path: Path, collector: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, names = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    run = ("run", write_config(tmp_path), "--out", tmp_path / "run", "--view", "none")
    assert arena(*run, "--dashboard", "off", "--otel") == 0
    held = read(tmp_path / "run")
    assert sum(name.startswith("invoke_agent") for name in names) == len(held.plies)
    assert sum(name.startswith("chat") for name in names) == len(held.attempts)


def test_a_run_is_seen_over_http_while_it_is_played_and_goes_on_after_a_resume(
    tmp_path: Path,
) -> None:
    path = write_config(tmp_path, max_plies=200, period=0.4)
    command = [sys.executable, "-m", "arena.cli"]
    shown = ["--view", "plain", "--dashboard", "127.0.0.1:0"]

    def frame_of(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stderr is not None
        said = ""
        while "playing" not in said:
            said += process.stderr.readline()
        address = re.search(r"http://\S+", said)
        assert address is not None
        url = f"{address[0]}api/events?page=0"
        with urllib.request.urlopen(url, timeout=10) as stream:
            for line in stream:
                if line.startswith(b"data: "):
                    frame: dict[str, Any] = json.loads(line[6:])
                    if frame["fleet"]["plies"] >= 8:
                        return frame
        raise AssertionError("the stream ended")

    first = subprocess.Popen(
        [*command, "run", str(path), "--out", str(tmp_path / "run"), *shown],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    before = frame_of(first)
    assert before["fleet"]["matches"]["running"] == 4
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=30)
    assert first.returncode == 130
    held = len(read(tmp_path / "run").plies)
    second = subprocess.Popen(
        [*command, "resume", str(tmp_path / "run"), *shown],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    after = frame_of(second)
    assert after["fleet"]["plies"] >= held
    second.send_signal(signal.SIGINT)
    second.communicate(timeout=30)
