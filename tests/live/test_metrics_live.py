"""A real run on real vLLM, scraped over HTTP as Prometheus does it, while it is played."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.arena.test_grafana import names_of, names_of_replicas, queried_names
from tests.live.runs import Run

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
def run(tmp_path: Path) -> Iterator[Run]:
    config = tmp_path / "metrics.toml"
    config.write_text(CONFIG)
    run = Run(tmp_path / "run", config)
    yield run
    run.kill()


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


def test_everything_the_dashboard_queries_is_scraped_from_a_run_on_vllm(run: Run) -> None:
    wanted = queried_names()
    wanted -= names_of_replicas(wanted)
    missing, complete = wanted, ""
    before: dict[str, float] = {}
    last = ""
    for text in run.scrapes(0.2):
        last = text
        left = wanted - names_of(text)
        if len(left) < len(missing):
            missing, complete = left, text
        now = totals(text)
        assert {name for name, value in before.items() if now.get(name, -1.0) < value} == set()
        before = now
    code, said = run.ended()
    assert code == 0, said
    assert missing == set()
    assert any(name.startswith("vllm:") for name in wanted)

    assert total(complete, "arena_batch_occupancy_requests_sum") > 0
    assert total(complete, "vllm:time_to_first_token_seconds_count") > 0
    served = total(complete, "arena_move_decode_seconds_count")
    assert 0 < served <= total(complete, "vllm:request_success_total")
    held = run.records()
    assert 0 < total(last, "arena_moves_total") <= len(held.plies)
    assert total(last, "arena_prompt_tokens_total") <= sum(
        attempt.prompt_tokens or 0 for attempt in held.attempts
    )
