"""Two replicas of real vLLM on real Ray against one engine: as many cache hits, no match moves."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from arena.store import read

CONFIGS = Path(__file__).parents[2] / "configs"

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None or importlib.util.find_spec("vllm") is None,
        reason="Ray or vLLM is not installed (extras ray, and cpu or gpu)",
    ),
]


def played(config: str, folder: Path) -> dict[str, Any]:
    """The report of a run of a config that ships; its engine is `main`."""
    arena = [sys.executable, "-m", "arena.cli"]
    path = str(CONFIGS / config)
    run = subprocess.run(
        [*arena, "run", path, "--out", str(folder), "--view", "none", "--dashboard", "off"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    told = subprocess.run(
        [*arena, "report", str(folder), "--json"], capture_output=True, check=True, timeout=60
    )
    report: dict[str, Any] = json.loads(told.stdout)
    return report


def test_the_quickstart_on_two_replicas(tmp_path: Path) -> None:
    one = played("quickstart.toml", tmp_path / "one")
    two = played("replicas.toml", tmp_path / "two")
    assert two["matches"]["finished"] == one["matches"]["finished"] == 8
    assert not {row.fault for row in read(tmp_path / "two").attempts} - {None}
    (single,), (engine,) = one["engines"], two["engines"]
    assert engine["prefix_hit_rate"] == pytest.approx(single["prefix_hit_rate"], abs=0.02)
    replicas = engine["replicas"]
    assert replicas["matches_moved"] == 0
    assert sorted(row["matches"] for row in replicas["rows"]) in ([4, 4], [3, 5])
    for row in replicas["rows"]:
        assert row["prefix_hit_rate"] > 0.9
        assert row["step_requests"]["max"] > 1, "each batches its own matches"
