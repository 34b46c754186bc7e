"""What real vLLM runs are said to be: healthy, short of memory, overloaded; and how full it was."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from arena.store import read

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (cpu or gpu extra)"
    ),
]

CONFIG = """
name = "{name}"
seed = 3
[engines.main]
kind = "vllm"
model = "smollm2-135m"
context_tokens = 800
max_queued = 64
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
games = ["chess"]
pairs = {pairs}
parallel_matches = 64
max_plies = {plies}
[pace]
move_period_seconds = {period}
[faults]
agent_attempts = 1
"""


def play(folder: Path, **values: object) -> dict[str, Any]:
    """The report of a run to its end."""
    config = folder / "run.toml"
    config.write_text(CONFIG.format(**{"engine": "", "agent": "", **values}))
    arena = [sys.executable, "-m", "arena.cli"]
    shown = ["--view", "none", "--dashboard", "off"]
    done = subprocess.run(
        [*arena, "run", str(config), "--out", str(folder / "run"), *shown],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = subprocess.run(
        [*arena, "report", str(folder / "run"), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(told.stdout)
    return report


def test_a_healthy_run_says_nothing_and_its_occupancy_is_what_was_in_the_step(
    tmp_path: Path,
) -> None:
    report = play(
        tmp_path, name="healthy", engine="max_concurrent = 8", pairs=2, plies=28, period=1.0
    )
    assert report["verdict"] is None
    held = read(tmp_path / "run")
    # vLLM's own gauge reads 0 at the last step of every move; the batch is never empty in a step
    assert all(row.step_requests for row in held.samples if row.step_requests is not None)
    seconds = [b for b in held.buckets if b.span_s == 1.0 and b.replies]
    # on a slow machine a step may have ended in the second before its replies
    known = [b.requests_mean for b in seconds if b.requests_mean is not None]
    assert len(known) >= 10
    assert min(known) >= 1
    assert sum(b.replies for b in seconds) == len(held.plies)


def test_overload_is_called_queueing(tmp_path: Path) -> None:
    """16 matches that never pause, on an engine that takes 2 at once."""
    report = play(
        tmp_path, name="overload", engine="max_concurrent = 2", pairs=8, plies=12, period=0.0
    )
    verdict = report["verdict"]
    assert (verdict["engine"], verdict["signal"]) == ("main", "queueing")
    assert any("max_concurrent" in remedy["action"] for remedy in verdict["remedies"])


def test_preemption_is_called_memory_pressure(tmp_path: Path) -> None:
    """8 matches write long answers into a cache of 26 blocks."""
    report = play(
        tmp_path,
        name="memory",
        engine="max_concurrent = 8\n[engines.main.extra_args]\nnum_gpu_blocks_override = 26",
        agent='mode = "free"\nmax_tokens = 120',
        pairs=4,
        plies=6,
        period=0.0,
    )
    verdict = report["verdict"]
    assert verdict["signal"] == "preemption"
    assert "memory" in verdict["detail"]
    assert report["engines"][0]["preemptions"] > 0
