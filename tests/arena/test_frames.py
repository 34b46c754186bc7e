"""A run at a moment: what changed is taken anew, at a bounded cost, and all of it is JSON."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena import frames, verdicts
from arena.figures import Figures, MatchFigures
from arena.frames import RECENT_RESULTS, TELEMETRY_S, Overview, board, bucket_data
from arena.replicas import MOST_SHOWN
from arena.report import build
from arena.store import AttemptRow, MatchRow, PlyRow, RunRow, SampleRow
from serving import SPANS_S, Bucket
from tests.arena.random_runs import (
    CONFIG,
    RUN,
    bucket,
    commits,
    random_run,
    records,
    scheduled,
    tapped,
)

CHESS = ("chess", "standard")


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_a_frame_says_what_the_report_says(seed: int) -> None:
    run, rng = random_run(seed), random.Random(seed)
    figures = Figures(RUN, run.matches, exact=True)
    overview = Overview(figures)
    for rows in tapped(commits(run, rng)):
        figures.add(rows)
        if rng.random() < 0.3:
            overview.refresh(figures.last_record)
    figures.settle()
    overview.refresh(figures.last_record, whole=True)
    frame, told = overview.frame(), build(records(run))
    pace = frame["fleet"].pop("pace_attainment")
    assert pace == pytest.approx(told.pop("pace_attainment"), rel=1e-12)
    assert frame["agents"] == told["agents"]
    assert frame["fleet"].items() >= {key: told[key] for key in ("matches", "plies")}.items()
    for key in set(frame["fleet"]) & set(told):
        assert frame["fleet"][key] == told[key]
    for row, other in zip(frame["engines"], told["engines"], strict=True):
        row.pop("now")
        assert row == other
    results = {result["match"]: result for result in told["results"]}
    assert frame["results"] == [results[result["match"]] for result in frame["results"]]
    assert len(frame["results"]) == min(RECENT_RESULTS, len(results))
    assert json.loads(json.dumps(frame, allow_nan=False))["full"] is True


def watched(num_agents: int) -> tuple[Figures, list[MatchRow]]:
    """Figures of one match for each two agents."""
    names = [f"a{number:03}" for number in range(num_agents)]
    agents = [{"name": name, "kind": "llm", "engine": "main"} for name in names]
    config = {**CONFIG, "agents": agents}
    rows = [
        scheduled(n, (names[2 * n], names[2 * n + 1]), CHESS)._replace(id=f"m{n}")
        for n in range(num_agents // 2)
    ]
    figures = Figures(RUN._replace(config_json=json.dumps(config)), rows, exact=False)
    figures.add(row._replace(state="running", started=0.0) for row in rows)
    return figures, rows


def move(match: str, number: int, at: float) -> PlyRow:
    return PlyRow(match, number, number % 2, "e2e4", "e4", "fen b", None, at, at, at + 0.1)


def test_a_look_takes_few_agents_anew_and_all_have_their_turn() -> None:
    figures, rows = watched(100)
    overview = Overview(figures)
    seen: dict[str, int] = {}
    for look in range(20):
        figures.add(move(row.id, look, 1.0 + look) for row in rows)
        fresh = overview.refresh(1.0 + look)
        assert len(fresh) <= 16
        for name, _ in fresh:
            seen[name] = seen.get(name, 0) + 1
    assert len(seen) == 100
    assert min(seen.values()) >= 2
    fresh = overview.refresh(30.0, whole=True)
    assert overview.refresh(30.0, whole=True) == []
    for row in overview.frame()["agents"]:
        assert row == figures.agents[row["name"], "chess"].row()


RAY = {"kind": "ray", "replicas": 3, "max_concurrent": 24, "max_queued": 24}
RAY |= {"engine": {"kind": "scripted", "max_concurrent": 8, "context_tokens": 1024}}


def of_engine(settings: dict[str, Any]) -> Figures:
    run = RUN._replace(config_json=json.dumps({**CONFIG, "engines": {"main": settings}}))
    return Figures(run, [], exact=False)


def test_a_batch_is_of_one_replica_and_its_limit_too() -> None:
    figures = of_engine(RAY)
    figures.add(
        [SampleRow("main", 1.0, "per_step", 1, "r1", *[None] * 9)._replace(step_requests=6)]
    )
    overview = Overview(figures)
    overview.refresh(1.0, whole=True)
    frame = overview.frame()
    limits = frame["run"]["engines"]["main"]
    assert (limits["max_concurrent"], limits["batch_limit"]) == (24, 8)
    assert frame["engines"][0]["occupancy"]["max"] == pytest.approx(6 / 8)
    assert frame["engines"][0]["replicas"] is None, "one is nothing to compare"


def test_an_engine_s_config_that_no_version_reads_has_its_places_for_a_batch() -> None:
    assert of_engine({"kind": "of old", "max_concurrent": 5}).engines["main"].batch_limit == 5


def test_a_saturated_engine_of_replicas_is_advised_by_what_they_host() -> None:
    """It has no `context_tokens` of its own."""
    figures = of_engine(RAY)
    full: dict[str, Any] = {
        "in_flight": 48.0,
        "waiting_mean": 24.0,
        "waiting_share": 1.0,
        "replies": 5,
        "steps": 9,
    }
    figures.add(bucket("main", 1.0, float(at))._replace(**full) for at in range(60))
    figures.add(SampleRow("main", 1.0, "per_step", 1, name, *[None] * 9) for name in ("a", "b"))
    overview = Overview(figures)
    overview.refresh(60.0, whole=True)
    assert overview.verdict is not None
    assert overview.verdict["remedies"][-1]["action"] == "add a GPU: one replica more"


def test_replicas_make_a_frame_no_larger_than_boards_do_however_many_they_were() -> None:
    figures = of_engine(RAY)
    samples = (SampleRow("main", 1.0, "per_step", 1, f"r{n:07}", *[None] * 9) for n in range(999))
    figures.add(sample._replace(step_requests=7) for sample in samples)
    overview = Overview(figures)
    overview.refresh(1.0, whole=True)
    (row,) = overview.engine_rows()
    assert (len(row["replicas"]["rows"]), row["replicas"]["count"]) == (MOST_SHOWN, 999)
    assert len(json.dumps(row)) < MOST_SHOWN * 500


def test_a_frame_holds_the_last_five_minutes() -> None:
    figures, _ = watched(2)
    figures.add(bucket("main", 1.0, float(second)) for second in range(1000))
    overview = Overview(figures)
    frame = overview.frame()
    assert [b["at"] for b in frame["telemetry"]["main"]] == [
        1000.0 - TELEMETRY_S + n for n in range(TELEMETRY_S)
    ]
    assert frame["telemetry"]["side"] == []


def test_a_bucket_s_json_has_its_keys_but_the_engine() -> None:
    made = bucket("main", 10.0, 20.0, 3)
    assert bucket_data(made) == {
        key: getattr(made, key) for key in Bucket._fields if key != "engine"
    }
    assert made.engine == "main"


def test_the_last_second_of_an_engine_that_has_nothing_to_do_is_not_now() -> None:
    figures, _ = watched(2)
    figures.add([bucket("main", 1.0, 100.0, 7)])
    overview = Overview(figures)

    def now(at: float) -> Any:
        overview.refresh(at)
        return overview.engine_rows()[0]["now"]

    assert now(101.6)["offered"] == 7
    assert now(105.0)["offered"] == 7
    assert now(105.1) is None
    figures.add([bucket("main", 1.0, 200.0, 8)])
    assert now(201.5)["offered"] == 8


def test_results_are_the_last_to_end_newest_last() -> None:
    figures, rows = watched(40)
    ended = [row._replace(state="finished", started=0.0, ended=1.0) for row in reversed(rows)]
    figures.add(ended)
    told = [result["match"] for result in Overview(figures).results()]
    assert told == [row.id for row in ended[-RECENT_RESULTS:]]


def overloaded(second: int) -> list[Bucket]:
    """A second in which requests wait all the time."""
    made = bucket("main", 1.0, float(second), 20)
    waits = {"waiting_mean": 9.0, "waiting_max": 12, "waiting_share": 1.0, "in_flight": 30.0}
    return [made._replace(steps=50, requests_mean=8.0, replies=20, **waits)]  # type: ignore[arg-type]


def test_a_verdict_is_given_while_it_holds_and_taken_back() -> None:
    figures, _ = watched(2)
    overview = Overview(figures)
    verdict_at: dict[int, Any] = {}
    for second in range(60):
        figures.add(overloaded(second))
        overview.refresh(second + 1.5)
        verdict_at[second] = overview.verdict
    assert verdict_at[1] is None
    assert verdict_at[59]["signal"] == "queueing"
    assert json.loads(json.dumps(verdict_at[59]))["engine"] == "main"
    calm = {"steps": 50, "waiting_mean": 0.0, "waiting_max": 0, "waiting_share": 0.0}
    for second in range(60, 120):
        figures.add([bucket("main", 1.0, float(second), 2)._replace(**calm)])  # type: ignore[arg-type]
        overview.refresh(second + 1.5)
    assert overview.verdict is None


def test_a_run_is_judged_by_the_finest_telemetry_that_reaches_to_its_beginning() -> None:
    figures, _ = watched(2)
    engine = figures.engines["main"]
    for second in range(5000):
        figures.add([bucket("main", 1.0, float(second))])
        figures.add(bucket("main", s, second // s * s) for s in SPANS_S[1:])
        if second == 3000:
            assert {b.span_s for b in verdicts.whole_run(engine)} == {1.0}
    assert {b.span_s for b in verdicts.whole_run(engine)} == {10.0}
    assert verdicts.whole_run(engine)[0].at == 0.0
    assert list(verdicts.whole_run(figures.engines["side"])) == []


def test_a_run_with_pauses_is_judged_from_its_beginning_too() -> None:
    """Idle seconds have no bucket, so a full hour holds fewer than are kept."""
    figures, _ = watched(2)
    engine = figures.engines["main"]
    for second in (s for s in range(5000) if s % 7):
        figures.add(bucket("main", s, second // s * s) for s in SPANS_S)
    while engine.buckets[1.0][0].at < 5000 - 3600:  # as the store drops them
        engine.buckets[1.0].popleft()
    assert len(engine.buckets[1.0]) < 3600
    assert verdicts.whole_run(engine)[0].at == 0.0
    assert {b.span_s for b in verdicts.whole_run(engine)} == {10.0}


def a_board(row: MatchRow, *plies: PlyRow) -> dict[str, Any]:
    figures = Figures(RUN, [row], exact=False)
    figures.add([*plies, row])
    return board(figures.matches[row.id], 1.0)


def test_a_board_before_its_first_move() -> None:
    row = scheduled(0, ("ann", "bob"), ("janggi", "janggimodern"))
    told = a_board(row._replace(start_fen="4k4/9 b - - 0 1"))
    assert (told["state"], told["ply"], told["side"]) == ("scheduled", 0, 1)
    assert told["fen"] == "4k4/9 b - - 0 1"
    assert told["label"] == "janggi/janggimodern"
    unknown = ("move", "notation", "thinking_since_s", "winner", "termination", "scores")
    assert {key: told[key] for key in unknown} == dict.fromkeys(unknown)
    begun = a_board(row._replace(state="running", started=3.0))
    assert begun["thinking_since_s"] == 3.0
    assert begun["side"] == 0


def test_a_board_of_a_running_a_suspended_and_a_finished_match() -> None:
    row = scheduled(0, ("ann", "bob"), CHESS)._replace(state="running", started=0.0)
    plies = [move(row.id, 0, 1.0)._replace(clock_left_s=9.5), move(row.id, 1, 2.0)]
    told = a_board(row, *plies)
    assert (told["ply"], told["side"], told["move"]) == (2, 0, "e2e4")
    assert told["thinking_since_s"] == pytest.approx(2.1)
    assert told["clock_left_s"] == [9.5, None]
    left = a_board(row._replace(state="suspended", suspended_at=3.0, detail="why"), *plies)
    assert (left["thinking_since_s"], left["detail"]) == (None, "why")
    over = row._replace(
        state="finished",
        winner=0,
        termination="points",
        ended=4.0,
        score_first=0.0,
        score_second=1.5,
    )
    told = a_board(over, *plies)
    assert (told["winner"], told["termination"], told["scores"]) == (0, "points", [0.0, 1.5])
    assert told["thinking_since_s"] is None


def test_a_board_does_not_change_with_the_run() -> None:
    """A frame is kept for whoever comes late: it must hold values, not the match's own lists."""
    row = scheduled(0, ("ann", "bob"), CHESS)._replace(state="running", started=0.0)
    match = MatchFigures(row)
    before = json.dumps(told := board(match, 1.0))
    match.clocks[0] = 5.0
    assert json.dumps(told) == before


def test_an_agent_s_name_and_a_detail_are_told_as_they_are() -> None:
    hostile = "<script>'\"&\u202e\x00 각"
    row = scheduled(0, (hostile, "bob"), CHESS)._replace(detail=hostile, state="suspended")
    told = json.loads(json.dumps(a_board(row)))
    assert (told["first"], told["detail"]) == (hostile, hostile)


def test_a_run_without_engines_or_moves_has_a_frame() -> None:
    config = {**CONFIG, "engines": {}, "agents": []}
    run = RunRow("r", "2026", json.dumps(config), "d", "{}")
    overview = Overview(Figures(run, [], exact=False))
    assert overview.refresh(5.0) == []
    frame = overview.frame(ended=True)
    assert (frame["engines"], frame["agents"], frame["telemetry"]) == ([], [], {})
    assert frame["ended"] is True
    assert frame["verdict"] is None
    json.dumps(frame, allow_nan=False)


def test_an_attempt_alone_is_enough_for_an_agent_s_row() -> None:
    figures, rows = watched(2)
    head = ("r0", rows[0].id, 0, 0, 0, "main", "free")
    figures.add([AttemptRow(*head, fault="illegal")])
    overview = Overview(figures)
    (row,) = overview.frame()["agents"]
    assert (row["name"], row["moves"], row["faults"]) == ("a000", 0, {"illegal": 1})
    assert overview.frame()["schema_version"] == frames.SCHEMA_VERSION
