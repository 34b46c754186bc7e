"""A real vLLM run tells enough to be simulated, and the simulation gives it back."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from arena.calibration import calibrate, measured
from arena.fleet import forecast
from arena.store import read

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (cpu or gpu extra)"
    ),
]

CONFIG = """
name = "seen"
seed = 3
[engines.main]
kind = "vllm"
model = "smollm2-135m"
context_tokens = 800
max_concurrent = 8
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
pairs = 3
parallel_matches = 6
max_plies = 24
"""


def test_what_is_fitted_to_a_run_gives_the_run_back(tmp_path: Path) -> None:
    """Both sides are the same minute of the same machine, so its speed does not matter."""
    config, folder = tmp_path / "run.toml", tmp_path / "run"
    config.write_text(CONFIG)
    arena = [sys.executable, "-m", "arena.cli"]
    shown = ["--view", "none", "--dashboard", "off"]
    subprocess.run([*arena, "run", str(config), "--out", str(folder), *shown], check=True)

    records = read(folder)
    seen = calibrate([records])
    assert seen.kind == "vllm"
    assert seen.steps >= 100
    told = forecast(
        seen.work(),
        seen.server(seen.settings),
        total=seen.settings.matches,
        parallel=seen.settings.parallel,
        plies=24,
    )
    assert told.moves_per_s == pytest.approx(measured(records).moves_per_s, rel=0.3)

    asked = ["simulate", "fleet", "--from-run", str(folder), "--seats", "100", "--gpus", "10"]
    done = subprocess.run([*arena, *asked, "--json"], capture_output=True, text=True, check=True)
    row = json.loads(done.stdout)["calibration"]
    assert row["source"] == "runs"
    assert 15 < row["uncached_tokens"] < 60
    assert 4 < row["output_tokens"] < 7
