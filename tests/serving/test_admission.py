"""What admission is for: an engine that is asked for more than it can do still answers in time."""

import pytest

from serving import EngineLimits, Limited
from serving.adaptive import SAFETY, CapChange
from tests.serving.simulated import (
    SLO_S,
    Outcome,
    SharedEngine,
    in_time_per_s,
    in_virtual_time,
    now,
    offer,
)

TOKENS_PER_S = 500.0
CAPACITY = TOKENS_PER_S / 5
"""Answers a second: a request is 4 to 6 tokens."""
SECONDS = 12
INSIDE = 16
SEEDS = (1, 2, 3)
DEEP = 10_000
FIXED = int(CAPACITY * SLO_S * SAFETY) - INSIDE
"""A queue that is just short enough for this capacity."""


def overload(
    seed: int,
    *,
    adaptive: bool,
    max_queued: int = DEEP,
    seconds: float = SECONDS,
    slows_at: float | None = None,
) -> tuple[list[Outcome], list[CapChange]]:
    """At twice the capacity; from `slows_at` on the engine is half as fast."""

    async def run() -> tuple[list[Outcome], list[CapChange]]:
        engine = SharedEngine(TOKENS_PER_S, EngineLimits(2048, INSIDE, max_queued))
        limited = Limited(engine, slo_s=SLO_S if adaptive else None, clock=now)
        slow = {} if slows_at is None else {slows_at: lambda: engine.set_speed(TOKENS_PER_S / 2)}
        outcomes = await offer(limited, 2 * CAPACITY, seconds, seed=seed, at=slow)
        assert engine.num_inside == 0
        return outcomes, list(limited.admission_history)

    return in_virtual_time(run())


@pytest.mark.parametrize("seed", SEEDS)
def test_at_twice_the_capacity_admission_turns_collapse_into_service(seed: int) -> None:
    without, _ = overload(seed, adaptive=False)
    admitted, _ = overload(seed, adaptive=True)
    assert len(admitted) == len(without)
    assert all(one.answered for one in without), "nothing is refused, all of it is late"
    ratio = in_time_per_s(admitted, 0, SECONDS) / in_time_per_s(without, 0, SECONDS)
    assert ratio >= 5
    half = SECONDS / 2
    assert in_time_per_s(admitted, half, SECONDS) >= 0.7 * CAPACITY
    assert in_time_per_s(without, half, SECONDS) <= 0.01 * CAPACITY


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cap_follows_an_engine_that_slows_down_and_a_fixed_one_misses(seed: int) -> None:
    slows_at, seconds = 8.0, 20.0
    adaptive, history = overload(seed, adaptive=True, seconds=seconds, slows_at=slows_at)
    fixed, _ = overload(seed, adaptive=False, max_queued=FIXED, seconds=seconds, slows_at=slows_at)
    for outcomes in (adaptive, fixed):
        assert in_time_per_s(outcomes, 2, slows_at) >= 0.9 * CAPACITY, "both are right at first"
    from_then_on = (slows_at + 3, seconds)
    assert in_time_per_s(adaptive, *from_then_on) >= 0.7 * CAPACITY / 2
    assert in_time_per_s(fixed, *from_then_on) <= 0.01 * CAPACITY
    caps_then = [change.cap for change in history if change.at <= slows_at + 3]
    assert caps_then[-1] <= CAPACITY / 2 * SLO_S
    assert min(change.cap for change in history if change.at > slows_at) >= 20, "no collapse"


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_admitted_is_answered_in_time_and_the_rest_is_refused_at_once(seed: int) -> None:
    outcomes, _ = overload(seed, adaptive=True)
    answered = [one for one in outcomes if one.answered is not None]
    assert sum(one.is_in_time for one in answered) >= 0.99 * len(answered)


def test_an_engine_that_stops_is_found_again_once_it_goes_on() -> None:
    async def run() -> list[Outcome]:
        engine = SharedEngine(TOKENS_PER_S, EngineLimits(2048, INSIDE, DEEP))
        limited = Limited(engine, slo_s=SLO_S, clock=now)
        stops = {5.0: lambda: engine.set_speed(0.0), 10.0: lambda: engine.set_speed(TOKENS_PER_S)}
        return await offer(limited, 2 * CAPACITY, 20, seed=1, at=stops)

    outcomes = in_virtual_time(run())
    assert in_time_per_s(outcomes, 5.5, 10) == 0
    assert in_time_per_s(outcomes, 11, 20) >= 0.9 * CAPACITY
    late = [one for one in outcomes if one.answered is not None and not one.is_in_time]
    assert len(late) <= INSIDE, "those inside when it stopped; whoever waited was refused"


def test_below_capacity_hardly_anything_is_refused() -> None:
    async def run() -> list[Outcome]:
        engine = SharedEngine(TOKENS_PER_S, EngineLimits(2048, INSIDE, DEEP))
        limited = Limited(engine, slo_s=SLO_S, clock=now)
        return await offer(limited, CAPACITY / 2, 60, seed=1)

    outcomes = in_virtual_time(run())
    assert sum(one.is_in_time for one in outcomes) >= 0.99 * len(outcomes)
