"""Two replicas of real vLLM on real Ray against one engine: as many cache hits, no match moves."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from arena.store import read
from serving.server_process import free_port
from tests.arena.test_grafana import names_of, names_of_replicas, queried_names
from tests.live.scrapes import scrape

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
    arena = [sys.executable, "-m", "arena.cli"]
    path, address = str(CONFIGS / config), f"127.0.0.1:{free_port()}"
    scraped: set[str] = set()
    with subprocess.Popen(
        [*arena, "run", path, "--out", str(folder), "--view", "none", "--dashboard", address],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        try:
            while run.poll() is None:
                scraped |= names_of(scrape(f"http://{address}/metrics") or "")
                time.sleep(1.0)
            _, said = run.communicate()
        finally:
            run.kill()
    assert run.returncode == 0, said
    told = subprocess.run(
        [*arena, "report", str(folder), "--json"], capture_output=True, check=True, timeout=60
    )
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
