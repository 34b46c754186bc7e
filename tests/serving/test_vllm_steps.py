"""Batch occupancy from vLLM's per-iteration details."""

from types import SimpleNamespace
from typing import Any

import pytest

from serving.host_wire import decode, encode
from serving.vllm_steps import StepTap
from serving.vllm_wire import Ask


def scheduler(ctx: tuple[int, int], gen: tuple[int, int], **changes: Any) -> SimpleNamespace:
    details = SimpleNamespace(
        num_ctx_requests=ctx[0],
        num_ctx_tokens=ctx[1],
        num_generation_requests=gen[0],
        num_generation_tokens=gen[1],
        is_dummy=changes.pop("is_dummy", False),
    )
    values: dict[str, Any] = {
        "iteration_details": details,
        "prefix_cache_stats": SimpleNamespace(queries=90, hits=64),
        "num_running_reqs": 0,
        "num_waiting_reqs": 1,
        "num_skipped_waiting_reqs": 2,
        "kv_cache_usage": 0.5,
    }
    return SimpleNamespace(**(values | changes))


def iteration(*finished: tuple[str, int], preempted: int = 0) -> SimpleNamespace:
    ended = [
        SimpleNamespace(request_id=name, num_generation_tokens=tokens) for name, tokens in finished
    ]
    return SimpleNamespace(num_preempted_reqs=preempted, finished_requests=ended)


def test_a_step_counts_requests_and_tokens_where_vllms_gauge_shows_none() -> None:
    tap = StepTap()
    tap.add(scheduler((2, 60), (3, 3)), iteration(preempted=1))
    (step,) = tap.take()
    assert (step.requests, step.tokens, step.running, step.waiting) == (5, 63, 5, 1)
    assert (step.prefix_queries, step.prefix_hits, step.preemptions) == (90, 64, 1)
    assert 0 <= step.age_s < 1
    assert tap.take() == []


def test_a_requests_mean_is_over_the_steps_that_gave_it_tokens() -> None:
    tap = StepTap()
    for requests in (9, 1, 2, 3):
        tap.add(scheduler((0, 0), (requests, requests)), iteration())
    tap.add(scheduler((0, 0), (4, 4)), iteration(("7", 4), ("8", 1)))
    assert tap.step_requests_mean == {"7": (1 + 2 + 3 + 4) / 4, "8": 4.0}


@pytest.mark.parametrize(
    "stats",
    [
        (None, None),
        (None, iteration()),
        (scheduler((0, 0), (0, 0), is_dummy=True), None),
        (scheduler((0, 0), (0, 0), iteration_details=None), iteration()),
    ],
)
def test_what_is_no_step_is_not_counted(stats: tuple[Any, Any]) -> None:
    tap = StepTap()
    tap.add(*stats)
    assert tap.take() == []


def test_a_step_without_the_optional_statistics_counts_zero() -> None:
    tap = StepTap()
    tap.add(scheduler((1, 5), (0, 0), prefix_cache_stats=None), None)
    (step,) = tap.take()
    assert (step.prefix_queries, step.prefix_hits, step.preemptions) == (0, 0, 0)


def test_messages_survive_the_wire() -> None:
    ask = Ask(3, (1, 2), ("e2e4", "장\n"), 6, 1.0, 0.9, None, 0, True, False)
    line = encode([["ask", *ask], ["reset"]])
    assert line.count(b"\n") == 1
    (tag, *fields), reset = decode(line)
    assert (tag, reset) == ("ask", ["reset"])
    assert Ask(*fields) == ask._replace(ids=[1, 2], choices=["e2e4", "장\n"], stop=[])
    with pytest.raises(ValueError, match="not a list"):
        decode(b'{"a": 1}')
