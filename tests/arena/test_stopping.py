"""A run that is asked to end after its games; a player that cannot answer; too many crashes."""

import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockBuster

from agents import Attempt, Decision, Fault, Turn
from arena import cli
from arena.fault_share import LEAST, WINDOW, FaultShare
from arena.store import read
from serving import EngineUnavailable
from tests.agents.fakes import reply
from tests.arena.test_run import games, outcomes, run, start, wait_for_plies, write_config

OWN = """
name = "own"
seed = 3
[[agents]]
name = "mine"
kind = "tests.arena.test_stopping:{agent}"
[[agents]]
name = "random"
kind = "random"
[tournament]
pairs = {pairs}
max_plies = 6
parallel_matches = 1
[pace]
move_period_seconds = 0
"""


def arena(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def told_of(folder: Path, kind: str) -> list[Any]:
    return [json.loads(event.detail_json) for event in read(folder).events if event.kind == kind]


class Silent:
    """An own player that no question reaches."""

    def __init__(self, config: dict[str, Any], engines: Any) -> None:
        self.asked = 0

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def choose(self, turn: Turn) -> Decision:
        raise EngineUnavailable("the line is dead")


class Answering(Silent):
    """Answers after an engine that drops the first question, and remembers nothing."""

    async def choose(self, turn: Turn) -> Decision:
        self.asked += 1
        if self.asked == 1:
            raise EngineUnavailable("not yet")
        return Decision(turn.position.legal_moves()[0], None, ())


def failed(fault: Fault, why: str) -> Decision:
    """A try without a reply, which decided."""
    return Decision(None, fault, (Attempt(0, None, fault, why),))


class Crashing(Answering):
    """Answers the probe, and crashes in every game."""

    async def choose(self, turn: Turn) -> Decision:
        if turn.match_id.startswith("probe-"):
            return Decision(turn.position.legal_moves()[0], None, ())
        return failed(Fault.ENGINE_CRASH, "it is gone")


class Broken(Crashing):
    """Crashes when it is probed."""

    async def choose(self, turn: Turn) -> Decision:
        return failed(Fault.ENGINE_CRASH, "it is gone")


class Mute(Answering):
    """Lets its time pass without a word."""

    async def choose(self, turn: Turn) -> Decision:
        return failed(Fault.FLAG_FALL, "it gave no move")


class Wrong(Answering):
    """Answers what is no move."""

    async def choose(self, turn: Turn) -> Decision:
        return failed(Fault.ENGINE_ILLEGAL, "it answered '(none)'")


def own(folder: Path, agent: type, pairs: int = 1) -> Path:
    path = folder / "own.toml"
    path.write_text(OWN.format(agent=agent.__name__, pairs=pairs))
    return path


@pytest.mark.parametrize("way", ["signal", "command"])
def test_games_that_are_played_end_and_no_other_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    values = {"engine": "latency_seconds = 0.02", "max_plies": 20}
    calm = run(tmp_path / "calm", **values)
    folder = tmp_path / "run"
    config = write_config(tmp_path, **values)
    config.write_text(config.read_text().replace("parallel_matches = 4", "parallel_matches = 2"))
    process = start(config, folder)
    wait_for_plies(folder, 4, process)
    if way == "signal":
        process.send_signal(signal.SIGUSR1)
    else:
        assert arena("stop", folder) == 0
        assert f"process {process.pid} ends after its current games" in capsys.readouterr().err
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"6 matches to go" in said
    assert Counter(row.state for row in read(folder).matches) == {"finished": 2, "scheduled": 6}
    assert told_of(folder, "finishing") == [{}]
    config.unlink()
    assert arena("resume", folder, "--set", "tournament.parallel_matches=4", "--view", "none") == 0
    assert games(read(folder)) == games(calm)
    assert outcomes(read(folder)) == outcomes(calm)


def test_asked_in_its_last_games_a_run_ends_as_finished(tmp_path: Path) -> None:
    config = write_config(tmp_path, engine="latency_seconds = 0.02")
    config.write_text(config.read_text().replace("parallel_matches = 4", "parallel_matches = 8"))
    process = start(config, tmp_path / "run")
    wait_for_plies(tmp_path / "run", 20, process)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_plies_alone_may_be_let_end(tmp_path: Path) -> None:
    config = write_config(tmp_path, engine="latency_seconds = 0.02", max_plies=100)
    process = start(config, tmp_path / "run")
    wait_for_plies(tmp_path / "run", 20, process)
    assert arena("stop", tmp_path / "run", "--after", "plies") == 0
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert {row.state for row in read(tmp_path / "run").matches} >= {"suspended"}


def test_no_process_is_signalled_that_does_not_play_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, engine="latency_seconds = 0.02", max_plies=100)
    folder = tmp_path / "run"
    process = start(config, folder)
    wait_for_plies(folder, 4, process)
    process.kill()
    process.communicate()
    signature = json.loads((folder / "run.lock").read_text())
    assert signature["pid"] == process.pid
    assert arena("stop", folder) == 2
    assert "no process plays it" in capsys.readouterr().err
    assert arena("resume", folder, "--set", "tournament.parallel_matches=1", "--view", "none") == 0
    assert (folder / "run.lock").read_text() == ""
    assert arena("stop", folder) == 2
    assert arena("stop", tmp_path) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_player_that_cannot_answer_is_named_before_anything_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    config = own(tmp_path, Silent)
    assert arena("run", config, "--out", folder, "--view", "none") == 3
    said = capsys.readouterr().err
    assert "agent mine cannot answer: the line is dead" in said
    assert "arena resume" in said
    held = read(folder)
    assert {row.state for row in held.matches} == {"scheduled"}
    assert held.attempts == ()
    for agent, told in ((Broken, "it is gone"), (Mute, "it gave no move"), (Wrong, "'(none)'")):
        own(tmp_path, agent)
        assert arena("run", config, "--out", folder, "--replace", "--view", "none") == 3
        said = capsys.readouterr().err
        assert "agent mine cannot answer: " in said
        assert told in said
    without = ["--replace", "--set", "faults.probe=false"]
    assert arena("run", config, "--out", folder, *without, "--view", "none") == 0
    assert {row.termination for row in read(folder).matches} == {"forfeit"}


def test_what_a_probe_asks_is_an_event_and_in_no_figure(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert arena("run", own(tmp_path, Answering), "--out", folder, "--view", "none") == 0
    (probed,) = told_of(folder, "agent_probed")
    assert (probed["agent"], probed["fault"]) == ("mine", None)
    assert probed["seconds"] >= 0
    assert not [row for row in read(folder).attempts if "probe" in row.request_id]


@pytest.mark.parametrize("agent", [Crashing, Mute, Wrong])
def test_a_run_of_crashes_stops_and_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], agent: type
) -> None:
    folder = tmp_path / "run"
    without = ["--set", "faults.probe=false", "--out", folder, "--view", "none"]
    assert arena("run", own(tmp_path, agent, 10), *without) == 3
    assert f"{LEAST} of the last {LEAST} games ended by" in capsys.readouterr().err
    assert sum(row.state == "finished" for row in read(folder).matches) == LEAST
    more = ["--set", "faults.max_fault_share=1"]
    assert arena("resume", folder, *more, "--view", "none") == 0


@pytest.fixture
def faults_are_logged(_loop_is_never_blocked: BlockBuster) -> None:
    """An engine's fault writes a line of the run's log, on the loop."""
    for name in ("io.TextIOWrapper.write", "io.BufferedWriter.write"):
        write = _loop_is_never_blocked.functions[name]
        write.can_block_in("agents/uci_agent.py", {"_search"})


@pytest.mark.usefixtures("faults_are_logged")
def test_a_silent_engine_is_found_by_the_probe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All its games were lost on time, and the run was called done."""
    fake = Path(__file__).parents[1] / "agents/fake_uci.py"
    config = own(tmp_path, Silent)
    uci = f'kind = "uci"\ncommand = {json.dumps([sys.executable, str(fake), "hang"])}'
    config.write_text(
        config.read_text()
        .replace('kind = "tests.arena.test_stopping:Silent"', uci)
        .replace("[pace]", "[pace]\nmove_limit_seconds = 0.3")
    )
    assert arena("run", config, "--out", tmp_path / "run", "--view", "none") == 3
    said = capsys.readouterr().err
    assert "agent mine cannot answer: it gave no move within 0.3 s" in said


def test_a_flag_that_falls_on_an_answer_is_play() -> None:
    late = Attempt(0, reply("e2e4"), Fault.FLAG_FALL)
    assert not Decision(None, Fault.FLAG_FALL, (late,)).is_breakdown
    assert not Decision(None, Fault.FLAG_FALL, ()).is_breakdown


def test_a_share_is_judged_by_the_last_games_alone() -> None:
    share = FaultShare(0.5)
    assert [share.note(True) is None for _ in range(LEAST)] == [True] * (LEAST - 1) + [False]
    share = FaultShare(0.5)
    for number in range(10 * WINDOW):
        assert share.note(number % 2 == 1) is None
    assert share.note(True) is not None, "26 of the last 50"
    never = FaultShare(1.0)
    assert not any(never.note(True) for _ in range(WINDOW))
