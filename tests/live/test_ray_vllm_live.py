"""Two replicas of real vLLM on real Ray against one engine: as many cache hits, no match moves."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from arena.store import read
from tests.arena.test_grafana import names_of, names_of_replicas, queried_names
from tests.live.runs import Run

CONFIGS = Path(__file__).parents[2] / "configs"

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None or importlib.util.find_spec("vllm") is None,
        reason="Ray or vLLM is not installed (extras ray, and cpu or gpu)",
    ),
]


def played(config: str, folder: Path) -> tuple[dict[str, Any], set[str]]:
    """The report of a run of a config that ships, whose engine is `main`, and the names of the
    metrics that were scraped meanwhile."""
    run = Run(folder, CONFIGS / config)
    try:
        scraped = {name for text in run.scrapes(1.0) for name in names_of(text)}
        code, said = run.ended()
    finally:
        run.kill()
    assert code == 0, said
    report_json = [sys.executable, "-m", "arena.cli", "report", str(folder), "--json"]
    told = subprocess.run(report_json, capture_output=True, check=True, timeout=60)
    report: dict[str, Any] = json.loads(told.stdout)
    return report, scraped


def test_the_quickstart_on_two_replicas(tmp_path: Path) -> None:
    one, scraped_of_one = played("quickstart.toml", tmp_path / "one")
    two, scraped_of_two = played("replicas.toml", tmp_path / "two")
    assert two["matches"]["finished"] == one["matches"]["finished"] == 8
    assert not {row.fault for row in read(tmp_path / "two").attempts} - {None}
    (single,), (engine,) = one["engines"], two["engines"]
    assert engine["prefix_hit_rate"] == pytest.approx(single["prefix_hit_rate"], abs=0.02)
    assert names_of_replicas(scraped_of_one) == set()
    assert names_of_replicas(scraped_of_two) == names_of_replicas(queried_names())
    replicas = engine["replicas"]
    assert replicas["matches_moved"] == 0
    assert sorted(row["matches"] for row in replicas["rows"]) in ([4, 4], [3, 5])
    for row in replicas["rows"]:
        assert row["prefix_hit_rate"] > 0.9
        assert row["step_requests"]["max"] > 1, "each batches its own matches"
