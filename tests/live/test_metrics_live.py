"""A real run on real vLLM, scraped over HTTP as Prometheus does it, while it is played."""

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from arena.store import read
from serving.server_process import free_port
from tests.arena.test_grafana import names_of, names_of_replicas, queried_names
from tests.live.scrapes import scrape

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (cpu or gpu extra)"
    ),
]

CONFIG = """
name = "metrics"
seed = 3
[engines.main]
kind = "vllm"
model = "smollm2-135m"
max_concurrent = 4
max_batched_tokens = 512
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
parallel_matches = 2
max_plies = 6
[pace]
move_period_seconds = 0.3
"""
"""Two matches end while two others are played."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, str]]:
    """A run's process, its folder and the address of its metrics."""
    config, folder, port = tmp_path / "metrics.toml", tmp_path / "run", free_port()
    config.write_text(CONFIG)
    address = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "arena.cli", "run", str(config), "--out", str(folder)]
    process = subprocess.Popen(
        [*command, "--view", "none", "--dashboard", address],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process, folder, f"http://{address}/metrics"
    if process.poll() is None:
        process.kill()
        process.communicate()


def totals(text: str) -> dict[str, float]:
    """Our counters and histograms by name and labels."""
    return {
        f"{sample.name}{sample.labels}": sample.value
        for family in text_string_to_metric_families(text)
        if family.type in ("counter", "histogram") and family.name.startswith("arena_")
        for sample in family.samples
    }


def total(text: str, name: str) -> float:
    """The sum of a metric over all labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )


def test_everything_the_dashboard_queries_is_scraped_from_a_run_on_vllm(
    run: tuple[subprocess.Popen[str], Path, str],
) -> None:
    process, folder, url = run
    wanted = queried_names()
    wanted -= names_of_replicas(wanted)
    missing, complete = wanted, ""
    before: dict[str, float] = {}
    last = ""
    while process.poll() is None:
        text = scrape(url)
        if text is not None:
            last = text
            left = wanted - names_of(text)
            if len(left) < len(missing):
                missing, complete = left, text
            now = totals(text)
            assert {name for name, value in before.items() if now.get(name, -1.0) < value} == set()
            before = now
        time.sleep(0.2)
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert missing == set()
    assert any(name.startswith("vllm:") for name in wanted)

    assert total(complete, "arena_batch_occupancy_requests_sum") > 0
    assert total(complete, "vllm:time_to_first_token_seconds_count") > 0
    served = total(complete, "arena_move_decode_seconds_count")
    assert 0 < served <= total(complete, "vllm:request_success_total")
    held = read(folder)
    assert 0 < total(last, "arena_moves_total") <= len(held.plies)
    assert total(last, "arena_prompt_tokens_total") <= sum(
        attempt.prompt_tokens or 0 for attempt in held.attempts
    )
