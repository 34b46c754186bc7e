"""Whole runs on real servers that die, freeze and come back: matches are suspended and resumed, no
ply is lost, nobody pays, and no server that we started outlives us.

Driven as a person drives it: by the command line and by signals.
"""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from arena.store import PlyRow
from serving.llama_package import is_installed
from serving.models import packaged_gguf
from serving.process import group_members
from serving.server_process import free_port
from serving.sglang_cpu import REMEDY, sglang_python
from tests.live.runs import Run
from tests.live.test_faults_live import assert_nobody_paid

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(600)]

needs_llama = pytest.mark.skipif(not is_installed(), reason="xllamacpp is not installed")
needs_sglang = pytest.mark.skipif(
    sglang_python() is None, reason=f"SGLang is not installed: {REMEDY}"
)
QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.toml"
CONFIG = """
name = "servers"
seed = 3
[prompts.chess]
system = "You play chess. Answer with your move."
[engines.main]
kind = "llama_server"
max_concurrent = 4
context_tokens = 1024
{server}
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
max_plies = {max_plies}
[pace]
move_period_seconds = 0.3
[faults]
stall_seconds = {stall}
restart_limit = 5
"""


class OwnServer:
    """A llama.cpp that is not the arena's, on one port for as long as the test lasts."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.end()
        flags = ("-c", "4096", "-np", "4", "-t", "1", "-b", "512", "-ub", "512")
        more = ("--cache-ram", "0", "--threads-http", "64", "--sse-ping-interval", "1")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "serving.llama_child", "-m", str(packaged_gguf())),
                    *("--port", str(self.port), "--metrics", "--slots", "--no-ui"),
                    *(*flags, *more),
                ],
                env={**os.environ, "OMP_WAIT_POLICY": "passive"},
                stdout=log,
                stderr=log,
            )
        limit = time.monotonic() + 60
        while not self.is_healthy():
            assert time.monotonic() < limit
            assert self._process.poll() is None
            time.sleep(0.1)

    def is_healthy(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(20)
            self._process = None


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    """Runs of a test; whatever is left of them is ended after it."""
    started: list[Run] = []
    yield started
    for run in started:
        if run.process is not None and run.process.poll() is None:
            run.process.kill()
            run.process.communicate()
        with suppress(OSError, ValueError, ProcessLookupError):
            os.killpg(run.engine_group(), signal.SIGKILL)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[OwnServer]:
    server = OwnServer(tmp_path / "own-server.log")
    server.start()
    yield server
    server.end()


def make_run(folder: Path, *, max_plies: int, stall: float, url: str | None = None) -> Run:
    config = folder / "servers.toml"
    server = "" if url is None else f'url = "{url}"\nscrape_seconds = 1.0'
    config.write_text(CONFIG.format(server=server, max_plies=max_plies, stall=stall))
    return Run(folder / "run", config)


def start(run: Run, *more: str) -> None:
    run.arena("run", str(run.config), "--out", str(run.folder), "--dashboard", "off", *more)


def lines(plies: list[PlyRow]) -> dict[str, list[str]]:
    """Moves of every match, without a gap."""
    found: dict[str, list[str]] = {}
    for ply in sorted(plies, key=lambda ply: (ply.match_id, ply.ply)):
        line = found.setdefault(ply.match_id, [])
        assert ply.ply == len(line), "no ply is missing, and none is there twice"
        line.append(ply.move)
    return found


class Blows:
    """What is done to the server of a run, and what the run must make of it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before: list[list[PlyRow]] = []

    def strike(self, what: str, blow: Callable[[], None]) -> None:
        """A blow that suspends matches; the cure is to come."""
        self._run.until_plies(6)
        suspended = len(self._run.events("match_suspended"))
        self._before.append(list(self._run.records().plies))
        blow()
        self._run.until(
            f"matches to be suspended ({what})",
            lambda: len(self._run.events("match_suspended")) > suspended,
            60,
        )

    def goes_on(self) -> None:
        """More plies than were under way."""
        self._run.until_plies(6)

    def assert_cost_nothing(self) -> None:
        held = self._run.records()
        assert_nobody_paid(self._run)
        for before in self._before:
            assert set(before) <= set(held.plies)
        lines(list(held.plies))
        suspensions = Counter(event["match"] for event in self._run.events("match_suspended"))
        resumptions = Counter(event["match"] for event in self._run.events("match_resumed"))
        assert suspensions == resumptions
        assert suspensions.total() >= len(self._before)


def kill_arena(run: Run) -> None:
    assert run.process is not None
    run.process.kill()
    run.process.communicate()


def gone(left: Callable[[], list[int]]) -> bool:
    """Whether they are within 5 s."""
    limit = time.monotonic() + 5
    while left() and time.monotonic() < limit:
        time.sleep(0.05)
    return not left()


def family(leader: int) -> set[int]:
    """Processes that a server started, whatever their group, and itself."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(leader)
        return {leader, *(child.pid for child in process.children(recursive=True))}
    return set()


# the same config on other engines


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("llama_server", marks=needs_llama),
        pytest.param("sglang", marks=needs_sglang),
    ],
)
def test_the_quickstart_on_another_engine(kind: str, tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path / "run", QUICKSTART)
    runs.append(run)
    # each of llama.cpp's slots computes the rules of the game by itself
    shorter = ("tournament.max_plies=8", "tournament.pairs=1", "engines.main.max_concurrent=4")
    changes = (f"engines.main.kind={kind}", *shorter)
    start(run, *(word for change in changes for word in ("--set", change)))
    run.until("a ply", lambda: run.num_plies() > 0, 200)
    group = run.engine_group()
    assert group_members(group)
    code, said = run.ended()
    assert code == 0, said
    assert group_members(group) == []
    held = run.records()
    assert [row.state for row in held.matches] == ["finished"] * 4
    assert {row.termination for row in held.matches} == {"ply_cap"}
    assert [attempt.fault for attempt in held.attempts if attempt.fault] == []
    assert {len(line) for line in lines(list(held.plies)).values()} == {8}
    (ready,) = run.events("engine_ready")
    assert ready["kind"] == kind
    assert ready["version"] != "unknown"
    log = (run.folder / "engine-main.log").read_text()
    assert log.strip()


# servers that fail


@needs_llama
def test_a_launched_server_killed_and_frozen(tmp_path: Path, runs: list[Run]) -> None:
    run = make_run(tmp_path, max_plies=18, stall=3.0)
    runs.append(run)
    start(run)
    blows = Blows(run)
    groups = []

    def signal_server(number: signal.Signals) -> None:
        groups.append(run.engine_group())
        os.killpg(groups[-1], number)

    blows.strike("kill -9", lambda: signal_server(signal.SIGKILL))
    blows.goes_on()
    blows.strike("SIGSTOP", lambda: signal_server(signal.SIGSTOP))
    blows.goes_on()
    groups.append(run.engine_group())
    code, said = run.ended()
    assert code == 0, said
    assert len(set(groups)) == 3, "each start has a group of its own"
    assert [group_members(group) for group in groups] == [[], [], []]
    blows.assert_cost_nothing()
    assert [event["restarts"] for event in run.events("engine_restarted")] == [1, 2]
    faults = Counter(attempt.fault for attempt in run.records().attempts if attempt.fault)
    assert faults.keys() == {"engine_dead", "stalled"}


@needs_llama
def test_a_server_of_somebody_else_killed_frozen_and_restarted(
    tmp_path: Path, runs: list[Run], own_server: OwnServer
) -> None:
    run = make_run(tmp_path, max_plies=20, stall=3.0, url=own_server.url)
    runs.append(run)
    start(run)
    blows = Blows(run)

    blows.strike("kill -9", own_server.end)
    own_server.start()
    blows.goes_on()
    blows.strike("SIGSTOP", lambda: own_server.send(signal.SIGSTOP))
    own_server.send(signal.SIGCONT)
    blows.goes_on()
    blows.strike("a restart", lambda: own_server.end(signal.SIGTERM))
    own_server.start()
    blows.goes_on()
    code, said = run.ended()
    assert code == 0, said
    blows.assert_cost_nothing()
    assert len(run.events("engine_restarted")) >= 3
    faults = {attempt.fault for attempt in run.records().attempts if attempt.fault}
    assert faults == {"transport", "stalled"}
    assert own_server.is_healthy(), "it is not ours to end"


@needs_llama
def test_kill_9_of_the_arena_leaves_no_server_and_resume_goes_on(
    tmp_path: Path, runs: list[Run]
) -> None:
    run = make_run(tmp_path, max_plies=10, stall=10.0)
    runs.append(run)
    start(run)
    run.until_plies(6)
    group = run.engine_group()
    assert group_members(group)
    before = list(run.records().plies)
    kill_arena(run)
    assert gone(lambda: group_members(group))
    run.arena("resume", str(run.folder), "--dashboard", "off")
    code, said = run.ended()
    assert code == 0, said
    assert set(before) <= set(run.records().plies)
    lines(list(run.records().plies))
    assert_nobody_paid(run)


@needs_sglang
def test_kill_9_of_the_arena_leaves_none_of_sglangs_processes(
    tmp_path: Path, runs: list[Run]
) -> None:
    """They are four, and it is killed while they start."""
    run = Run(tmp_path / "run", QUICKSTART)
    runs.append(run)
    start(run, "--set", "engines.main.kind=sglang")
    record = run.folder / "engine-main.pid"
    run.until("a server", record.exists)
    leader = run.engine_group()
    seen: set[int] = set()

    def has_all() -> bool:
        seen.update(family(leader))
        return len(seen) >= 4

    run.until("its processes", has_all)
    kill_arena(run)
    assert gone(lambda: [pid for pid in seen if psutil.pid_exists(pid)])
