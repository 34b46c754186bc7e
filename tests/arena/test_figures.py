"""A run's figures row by row: the same as of all rows at once, whatever way they came."""

import json
import random
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents import Fault
from arena.distribution import Exact
from arena.figures import Figures
from arena.report import build, report
from arena.store import BUCKETS_KEPT, AttemptRow, MatchRow, PlyRow, Row, SampleRow
from tests.arena.random_runs import (
    RUN,
    bucket,
    commits,
    random_run,
    records,
    scheduled,
    tapped,
)

SEEDS = st.integers(0, 2**32)


def streamed(seed: int, *, exact: bool) -> Figures:
    """The figures of a random run, read in instalments while it is played."""
    run, rng = random_run(seed), random.Random(seed)
    figures = Figures(RUN, run.matches, exact=exact)
    read: list[Row] = []
    for rows in tapped(commits(run, rng)):
        read += rows
        if rng.random() < 0.3:
            figures.add(read)
            figures.fleet(), figures.recent_moves_per_s(figures.last_record)
            read = []
    figures.add(read)
    return figures


@given(SEEDS)
@settings(max_examples=150, deadline=None)
def test_a_report_made_row_by_row_is_the_report_of_the_records(seed: int) -> None:
    figures = streamed(seed, exact=True)
    figures.settle()
    one, two = report(figures), build(records(random_run(seed)))
    # a sum of seconds, in another order
    assert one.pop("pace_attainment") == pytest.approx(two.pop("pace_attainment"), rel=1e-12)
    assert one == two
    json.dumps(one, allow_nan=False)


def replica_rows(engine: dict[str, Any]) -> list[dict[str, Any]]:
    return engine["replicas"]["rows"] if engine["replicas"] else []


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_bounded_figures_differ_only_in_percentiles_and_by_little(seed: int) -> None:
    figures = streamed(seed, exact=False)
    figures.settle()
    bounded, exact = report(figures), build(records(random_run(seed)))
    for row, other in zip(bounded["agents"], exact["agents"], strict=True):
        assert row["moves"] == other["moves"]
        for part in ("latency_ms", "queue_ms", "prefill_ms", "decode_ms"):
            assert row[part]["mean"] == pytest.approx(other[part]["mean"])
            assert row[part]["max"] == other[part]["max"]
    for engine, other in zip(bounded["engines"], exact["engines"], strict=True):
        for one, two in zip(replica_rows(engine), replica_rows(other), strict=True):
            assert one.pop("engine_ms")["mean"] == pytest.approx(two.pop("engine_ms")["mean"])
        assert engine == other
    assert bounded["standings"] == exact["standings"]
    assert bounded["slo_attainment"] == exact["slo_attainment"]


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_states_and_active_matches_are_those_of_the_last_rows(seed: int) -> None:
    figures = streamed(seed, exact=False)
    held = records(random_run(seed))
    states = [row.state for row in held.matches]
    told = figures.fleet()["matches"]
    assert told == {state: states.count(state) for state in told}
    assert set(figures.active) == {
        row.id for row in held.matches if row.state in ("running", "suspended")
    }
    assert [row.ended for row in figures.finished] == sorted(
        row.ended for row in held.matches if row.ended is not None
    )
    assert {row.id for row in held.matches} == set(figures.matches)


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_matches_of_records_come_in_the_order_in_which_they_ended(seed: int) -> None:
    """A dashboard opened on a resumed run showed the last of the schedule as the last results."""
    held = records(random_run(seed))
    figures = Figures(RUN, held.matches, exact=False)
    figures.add(held.rows())
    ended = [row.ended for row in figures.finished]
    assert ended == sorted(row.ended for row in held.matches if row.ended is not None)


def running(**changes: Any) -> MatchRow:
    row = scheduled(0, ("ann", "bob"), ("chess", "standard"))
    return row._replace(**{"state": "running", "started": 10.0, **changes})


def ply(number: int, *, ready: float, due: float, done: float) -> PlyRow:
    return PlyRow(running().id, number, number % 2, "e2e4", "e4", "fen b", None, ready, due, done)


def attempt(number: int, tries: int = 0, **changes: Any) -> AttemptRow:
    row = running()
    head = (f"{row.id}/{number}/0/{tries}", row.id, number, number % 2, 0, "main", "free")
    return AttemptRow(*head, **changes)


def figures_of_one(*rows: Row, exact: bool = True) -> Figures:
    figures = Figures(RUN, [running(state="scheduled", started=None)], exact=exact)
    figures.add([running(), *rows])
    return figures


def test_a_forfeit_counts_its_turn_as_offered_and_its_attempts_as_faults() -> None:
    lost = running(state="finished", termination="forfeit", winner=0, ended=13.0)
    figures = figures_of_one(
        ply(0, ready=10.0, due=10.0, done=10.5),
        *(attempt(1, n, fault="illegal", reply_text="x" * 1000) for n in range(3)),
        lost,
    )
    assert figures.fleet()["slo_attainment"] == pytest.approx(0.5)
    assert figures.agents["bob", "chess"].faults == {"illegal": 3}
    assert figures.agents["bob", "chess"].moves == 0
    assert figures.matches[lost.id].plies == 1


def test_attempts_of_a_forfeit_are_not_kept() -> None:
    lost = running(state="finished", termination="forfeit", winner=0, ended=13.0)
    figures = figures_of_one(*(attempt(0, n, fault="illegal") for n in range(3)), lost)
    assert figures.matches[lost.id].attempts == []


def test_the_harness_of_a_match_s_last_move_counts_without_a_commit() -> None:
    over = running(state="finished", termination="draw", ended=11.0)
    figures = figures_of_one(
        ply(0, ready=10.0, due=10.0, done=10.2),
        ply(1, ready=10.25, due=10.25, done=10.3),
        over,
    )
    harness = {
        name: agent.times["harness"].summary() for (name, _), agent in figures.agents.items()
    }
    assert harness["ann"]["max"] == pytest.approx(250)  # 200 to the choice, 50 for the commit
    assert harness["bob"]["max"] == pytest.approx(50)


def test_the_harness_of_a_running_match_is_counted_once_however_often_it_is_settled() -> None:
    figures = figures_of_one(ply(0, ready=10.0, due=10.0, done=10.2))
    agent = figures.agents["ann", "chess"]
    assert agent.times["harness"].summary()["max"] is None
    figures.settle()
    figures.settle()
    figures.add([ply(1, ready=10.25, due=10.25, done=10.3)])
    assert agent.times["harness"].sketch().count == 1


def test_an_attempt_without_a_reply_leaves_the_move_s_parts_unknown() -> None:
    figures = figures_of_one(
        attempt(0, 0, fault="engine_dead"),
        attempt(0, 1, submitted=10.1, admitted=10.1, done=10.2),
        ply(0, ready=10.0, due=10.0, done=10.2),
    )
    figures.settle()
    row = figures.agents["ann", "chess"].row()
    assert row["harness_ms"]["max"] is None
    assert row["latency_ms"]["max"] == pytest.approx(200)
    assert figures.fleet()["schedule_lag_ms"]["max"] is None
    assert figures.fleet()["infrastructure_faults"] == {"engine_dead": 1}


def test_an_engine_that_reports_nothing_is_unknown_not_zero() -> None:
    nothing = SampleRow("main", 10.0, "sampled", 1, *[None] * 10)
    figures = figures_of_one(
        nothing,
        attempt(0, submitted=10.0, admitted=10.0, done=10.2, reply_text="e2e4"),
        ply(0, ready=10.0, due=10.0, done=10.2),
    )
    engine = figures.engines["main"].row()
    unknown = ("preemptions", "rejected", "prefix_hit_rate", "output_tokens_per_move", "version")
    assert [engine[key] for key in unknown] == [None] * 5
    assert engine["step_requests"]["mean"] is engine["kv_usage"]["max"] is None
    agent = figures.agents["ann", "chess"].row()
    assert agent["queue_ms"]["p50"] is agent["prompt_tokens_per_move"] is None
    json.dumps(report(figures), allow_nan=False)


def test_counters_that_begin_again_go_on_growing() -> None:
    def sample(at: float, preemptions: int | None) -> SampleRow:
        row = SampleRow("main", at, "per_step", 1, *[None] * 10)
        return row._replace(preemptions=preemptions)

    figures = figures_of_one(*(sample(1.0 + n, p) for n, p in enumerate((3, None, 5, 0, 2, 1))))
    assert figures.engines["main"].row()["preemptions"] == 5 + 2 + 1


def test_seats_count_only_once_two_periods_have_run() -> None:
    figures = figures_of_one(ply(0, ready=10.0, due=10.0, done=10.2))
    assert figures.fleet(11.9)["min_seat_attainment"] is None
    assert figures.fleet(12.0)["min_seat_attainment"] == 0.0
    assert figures.fleet(12.0)["pace_attainment"] == pytest.approx(1 / 4)


def test_a_suspended_match_s_time_stands_still() -> None:
    left = running(state="suspended", suspended_at=14.0)
    figures = figures_of_one(ply(0, ready=10.0, due=10.0, done=10.2), left)
    assert figures.fleet(1000.0)["pace_attainment"] == pytest.approx(1 / 8)
    assert figures.fleet(1000.0)["elapsed_s"] == pytest.approx(4.0)


def test_the_recent_rate_is_of_whole_seconds_since_the_first_match() -> None:
    made = [0.2, 0.9, 1.1, 2.0, 2.5, 2.99, 3.1]
    rows = [ply(n, ready=9.0, due=9.0, done=10.0 + s) for n, s in enumerate(made)]
    figures = figures_of_one(*rows)
    assert figures.recent_moves_per_s(10.5) is None
    assert figures.recent_moves_per_s(12.7) == pytest.approx(3 / 2)
    assert figures.recent_moves_per_s(13.5) == pytest.approx(6 / 3)
    assert figures.recent_moves_per_s(22.0) == pytest.approx(4 / 10)
    assert figures.recent_moves_per_s(40.0) == 0.0


def test_the_recent_rate_keeps_no_second_that_it_needs_no_more() -> None:
    figures = figures_of_one()
    for second in range(5000):
        figures.add([ply(second, ready=10.0, due=10.0, done=10.5 + second)])
        figures.recent_moves_per_s(11.0 + second)
    assert len(figures._by_second) <= 12


def test_a_bucket_that_grew_replaces_itself_and_old_ones_go() -> None:
    figures = figures_of_one()
    engine = figures.engines["main"]
    for second in range(BUCKETS_KEPT + 50):
        figures.add([bucket("main", 1.0, float(second), second)])
        figures.add([bucket("main", 10.0, second // 10 * 10.0, second)])
    assert len(engine.buckets[1.0]) == BUCKETS_KEPT
    assert [b.at for b in engine.buckets[1.0]] == [50.0 + n for n in range(BUCKETS_KEPT)]
    assert [b.at for b in engine.buckets[10.0]] == [10.0 * n for n in range(365)]
    assert engine.buckets[10.0][3].offered == 39
    assert engine.now == bucket("main", 1.0, BUCKETS_KEPT + 49.0, BUCKETS_KEPT + 49)


def test_bounded_figures_keep_no_move() -> None:
    run = random_run(7, num_matches=40, num_steps=800)
    figures = Figures(RUN, run.matches, exact=False)
    figures.add(chain.from_iterable(tapped(commits(run, random.Random(0)))))
    assert figures.plies > 50
    for agent in figures.agents.values():
        assert not any(isinstance(times, Exact) for times in agent.times.values())
    assert all(not match.attempts for match in figures.matches.values() if match.row.ended)


@pytest.mark.parametrize("fault", list(Fault))
def test_every_fault_is_counted_for_its_agent_and_the_infrastructure_s_apart(fault: Fault) -> None:
    figures = figures_of_one(attempt(0, fault=fault.value))
    assert figures.agents["ann", "chess"].faults == {fault.value: 1}
    assert bool(figures.infrastructure_faults) == fault.is_infrastructure
    assert figures.changed_agents == {("ann", "chess")}


def test_tokens_of_all_attempts_of_a_move_count_for_one_move() -> None:
    spent = {"prompt_tokens": 100, "cached_tokens": 60, "completion_tokens": 5}
    figures = figures_of_one(
        attempt(0, 0, fault="illegal", **spent),
        attempt(0, 1, **spent),
        ply(0, ready=10.0, due=10.0, done=10.2),
        attempt(1, 0, prompt_tokens=120, completion_tokens=5),
    )
    ann, bob = (figures.agents[name, "chess"].row() for name in ("ann", "bob"))
    assert ann["prompt_tokens_per_move"] == 200
    assert ann["uncached_prompt_tokens_per_move"] == 80
    assert bob["uncached_prompt_tokens_per_move"] is None  # the engine did not say
    engine = figures.engines["main"].row()
    assert engine["uncached_prompt_tokens_per_move"] == {"chess": 80}
    assert engine["output_tokens_per_move"] == pytest.approx(15 / 2)
    assert engine["prefix_hit_rate"] == pytest.approx(120 / 200)


def test_a_prompt_that_nobody_counted_is_in_no_figure() -> None:
    figures = figures_of_one(
        attempt(0, 0, fault="illegal", completion_tokens=5),
        attempt(0, 1, prompt_tokens=100, cached_tokens=60, completion_tokens=5),
        ply(0, ready=10.0, due=10.0, done=10.2),
        attempt(1, 0, completion_tokens=7),
    )
    ann, bob = (figures.agents[name, "chess"].row() for name in ("ann", "bob"))
    assert (ann["prompt_tokens_per_move"], ann["output_tokens_per_move"]) == (100, 10)
    assert (bob["prompt_tokens_per_move"], bob["output_tokens_per_move"]) == (None, 7)
    engine = figures.engines["main"].row()
    assert engine["uncached_prompt_tokens_per_move"] == {"chess": 40}
    assert engine["prefix_hit_rate"] == 0.6
