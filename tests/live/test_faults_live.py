"""Deaths of every part of a real run on real vLLM: nothing committed is lost, nobody pays for it.

One run per test, driven as a person drives it: by the command line and by signals.
"""

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from serving.process import group_members
from tests.live.runs import Run

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(700),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (cpu or gpu extra)"
    ),
]

CONFIG = """
name = "faults"
seed = 3
[engines.main]
kind = "vllm"
model = "smollm2-135m"
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
games = ["chess", "janggi"]
parallel_matches = 4
max_plies = {max_plies}
[pace]
move_period_seconds = {period}
[faults]
stall_seconds = {stall}
restart_limit = 2
"""


def make_run(folder: Path, *, max_plies: int, stall: float = 30.0, period: float = 0.3) -> Run:
    config = folder / "faults.toml"
    config.write_text(CONFIG.format(max_plies=max_plies, stall=stall, period=period))
    return Run(folder / "run", config)


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.kill()
        with suppress(OSError, ValueError, ProcessLookupError):
            os.killpg(run.engine_group(), signal.SIGKILL)


def assert_nobody_paid(run: Run) -> None:
    """Every match ended by the rules or the ply cap, and no attempt failed by a player."""
    held = run.records()
    assert {row.state for row in held.matches} == {"finished"}
    assert not {row.termination for row in held.matches} & {"forfeit", "flag_fall", "resignation"}
    player_faults = {"illegal", "ambiguous", "unparsable", "empty", "truncated", "flag_fall"}
    assert not player_faults & {a.fault for a in held.attempts}


def test_arena_killed_then_worker_killed_then_finished(tmp_path: Path, runs: list[Run]) -> None:
    run = make_run(tmp_path, max_plies=24)
    runs.append(run)
    run.start()
    run.until_plies(8)
    group = run.engine_group()
    assert run.process is not None
    before = run.records().plies
    run.process.send_signal(signal.SIGKILL)
    run.process.communicate()
    limit = time.monotonic() + 5
    while group_members(group) and time.monotonic() < limit:
        time.sleep(0.05)
    assert group_members(group) == []
    committed = run.records().plies
    assert set(before) <= set(committed)

    run.resume()
    run.until_plies(8)
    workers = [p for p in run.engine_processes() if p.pid != run.engine_group()]
    assert workers, "vLLM's own processes stand in the group"
    max(workers, key=lambda process: process.memory_info().rss).kill()
    code, said = run.ended()
    assert code == 0, said
    assert set(committed) <= set(run.records().plies)
    assert [e["restarts"] for e in run.events("engine_restarted")] == [1]
    assert run.events("match_suspended")
    assert_nobody_paid(run)


def test_frozen_engine_then_interrupts(tmp_path: Path, runs: list[Run]) -> None:
    run = make_run(tmp_path, max_plies=200, stall=4.0)
    runs.append(run)
    run.start()
    run.until_plies(8)
    os.killpg(run.engine_group(), signal.SIGSTOP)
    run.until("the engine to be called stalled", lambda: bool(run.events("match_suspended")), 30)
    plies = run.until_plies(8)
    faults = {a.fault for a in run.records().attempts if a.fault}
    assert faults == {"stalled"}
    assert [e["restarts"] for e in run.events("engine_restarted")] == [1]

    group = run.engine_group()
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    code, said = run.ended()
    assert code == 130, said
    assert "arena resume" in said
    assert group_members(group) == []
    assert {row.state for row in run.records().matches} <= {"suspended", "scheduled", "finished"}
    after_first = run.num_plies()
    assert after_first >= plies

    run.resume()
    run.until_plies(4)
    group = run.engine_group()
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)
    code, said = run.ended(20)
    assert code == 130, said
    assert group_members(group) == []
    assert run.num_plies() >= after_first + 4
