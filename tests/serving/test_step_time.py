"""What a step takes: the line, its fit, and what it leaves."""

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.step_time import Step, StepTime, fit, simple

coefficients = st.floats(1e-6, 1.0)


def steps_of(time: StepTime, seed: int = 1, count: int = 300) -> list[Step]:
    """Steps of so many requests, some of which compute a prompt."""
    dice = Random(seed)
    steps = []
    for _ in range(count):
        requests = dice.randint(1, 16)
        tokens = requests + dice.choice((0, 0, 25, 180))
        steps.append(Step(time.seconds(tokens, requests), tokens, requests))
    return steps


@settings(deadline=None)
@given(coefficients, coefficients, coefficients)
def test_a_line_is_found_again(base_s: float, per_token_s: float, per_request_s: float) -> None:
    found = fit(steps_of(StepTime(base_s, per_token_s, per_request_s)))
    assert found.base_s == pytest.approx(base_s, rel=1e-3, abs=1e-7)
    assert found.per_token_s == pytest.approx(per_token_s, rel=1e-3, abs=1e-7)
    assert found.per_request_s == pytest.approx(per_request_s, rel=1e-3, abs=1e-7)
    assert len(found.spread) == 300
    assert all(ratio == pytest.approx(1.0, abs=1e-3) for ratio in found.spread)


def test_noise_becomes_the_spread_in_its_order_and_keeps_the_sum() -> None:
    dice = Random(2)
    true = StepTime(0.02, 0.001, 0.002)
    noisy = [
        s._replace(seconds=s.seconds * dice.uniform(0.7, 1.3)) for s in steps_of(true, 3, 4000)
    ]
    found = fit(noisy)
    assert found.seconds(40, 8) == pytest.approx(true.seconds(40, 8), rel=0.02)
    assert math.fsum(found.seconds(s.tokens, s.requests) for s in noisy) == pytest.approx(
        math.fsum(s.seconds for s in noisy)
    )
    for ratio, step in zip(found.spread, noisy, strict=True):
        assert ratio * found.seconds(step.tokens, step.requests) == pytest.approx(step.seconds)


def test_no_coefficient_is_negative() -> None:
    """More requests seem to make steps shorter: that is chance, and no engine does it."""
    steps = [Step(0.1 - 0.001 * n + 0.0005 * t, t, n) for n in range(1, 9) for t in (n, n + 90)]
    found = fit(steps)
    assert min(found.base_s, found.per_token_s, found.per_request_s) >= 0
    assert found.per_request_s == 0


def test_tokens_and_requests_that_always_go_together_are_not_told_apart() -> None:
    found = fit([Step(0.01 + 0.002 * n, n, n) for n in range(1, 20)])
    assert found.seconds(30, 30) == pytest.approx(0.07)


def test_steps_that_are_all_alike_are_all_base() -> None:
    found = fit([Step(0.02, 4, 4)] * 60)
    assert found.seconds(4, 4) == pytest.approx(0.02)


@pytest.mark.parametrize("steps", [[], [Step(0.0, 1, 1)]])
def test_steps_that_took_no_time_are_refused(steps: list[Step]) -> None:
    with pytest.raises(ValueError, match="no step took any time"):
        fit(steps)


def test_a_simple_step_time() -> None:
    time = simple(0.008, growth=0.5, prompt_token_s=0.001)
    assert time.seconds(1, 1) == pytest.approx(0.008)
    assert time.seconds(3, 3) == pytest.approx(0.016)
    assert time.seconds(101, 1) == pytest.approx(0.108)
    assert time.seconds(2 + 100, 3) == pytest.approx(0.016 + 0.099)
