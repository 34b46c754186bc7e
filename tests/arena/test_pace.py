"""Due times never run ahead of the pace, and waiting seats can be woken."""

import asyncio
import time

from hypothesis import given
from hypothesis import strategies as st

from arena.pace import JITTER, Pacer, SeatPace


@given(st.lists(st.floats(0.0, 3.0), min_size=2, max_size=50), st.floats(0.1, 5.0))
def test_due_is_never_before_the_turn_nor_within_a_period_of_the_last(
    waits: list[float], period: float
) -> None:
    pace = SeatPace(period, "seed")
    ready, last = 10.0, None
    for wait in waits:
        due = pace.due(ready)
        assert due >= ready
        if last is None:
            assert due == ready
        else:
            assert due - last >= period * (1 - JITTER) - 1e-9
            assert due == ready or due - last <= period * (1 + JITTER) + 1e-9
        last = due
        ready = due + wait


def test_seats_do_not_keep_one_beat() -> None:
    paces = [SeatPace(1.0, f"seat {n}") for n in range(50)]
    assert {pace.due(0.0) for pace in paces} == {0.0}
    assert len({pace.due(0.0) for pace in paces}) == 50


def test_no_pace_is_due_at_once() -> None:
    pace = SeatPace(0.0, "seed")
    assert [pace.due(1.0), pace.due(1.5)] == [1.0, 1.5]


async def test_stopping_wakes_every_sleeper_and_lets_none_wait_again() -> None:
    pacer = Pacer()
    far = time.monotonic() + 3600
    sleepers = [asyncio.ensure_future(pacer.until(far)) for _ in range(10)]
    await asyncio.sleep(0)
    pacer.stop()
    assert await asyncio.gather(*sleepers) == [False] * 10
    assert await pacer.until(far) is False


async def test_a_due_time_in_the_past_does_not_wait() -> None:
    assert await Pacer().until(time.monotonic() - 1) is True
