"""The arena's own workload on paper: fitted to runs, held to runs, routed, overloaded."""

import json
import shutil
import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from arena import simulate_page, simulate_text
from arena.calibration import calibrate, measured
from arena.fleet import (
    Admission,
    GpuRun,
    Gpus,
    Matches,
    Work,
    gpus_needed,
    latency_s,
    overload,
    route,
    share_within,
    stand_ins,
)
from arena.simulate_fleet import EngineOptions, FleetOptions, OverloadOptions, fleet
from arena.simulate_fleet import overload as simulate_overload
from arena.store import StoreError, read
from serving.batching import Server, run_continuous
from serving.step_time import StepTime
from tests.arena.simulated_runs import TRUE, WORK, play
from tests.arena.test_run import arena


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to calibrate from."""
    return play(tmp_path_factory.mktemp("seen"))


# calibration


def test_a_run_tells_its_engines_step_time_and_its_moves(seen: Path) -> None:
    found = calibrate([read(seen)])
    assert found.engine == "main"
    assert found.step_time.base_s == pytest.approx(TRUE.base_s, rel=1e-6)
    assert found.step_time.per_token_s == pytest.approx(TRUE.per_token_s, rel=1e-6)
    assert found.step_time.per_request_s == pytest.approx(TRUE.per_request_s, rel=1e-6)
    assert set(found.shapes) == set(WORK.shapes)
    assert len(found.shapes) == 8 * 20
    assert set(found.held_tokens) == {400 + prompt + output for prompt, output in WORK.shapes}
    assert found.overhead_s == pytest.approx(WORK.overhead_s)
    assert found.commit_s == pytest.approx(WORK.commit_s)
    assert found.plies == 20
    assert (found.settings.max_concurrent, found.settings.parallel) == (16, 4)


def test_time_in_which_nothing_was_asked_is_no_step(tmp_path: Path) -> None:
    """With one slow seat the engine idles most of the time."""
    alone = play(tmp_path, parallel=1, matches=2, plies=40)
    assert calibrate([read(alone)]).step_time.seconds(1, 1) == pytest.approx(TRUE.seconds(1, 1))


def test_a_stall_is_left_out_and_told(seen: Path) -> None:
    """The machine stood still for half a minute within a step."""
    records = read(seen)
    samples = sorted(records.samples, key=lambda row: row.at)
    before = next(
        row.at
        for row, after in pairwise(samples)
        if row.at > 5 and after.at - row.at < 0.1 and row.step_requests and row.step_requests > 2
    )

    def later(at: float | None) -> float:
        return (at or 0.0) + 30 * ((at or 0.0) > before + 1e-9)

    found = calibrate(
        [
            records._replace(
                samples=tuple(row._replace(at=later(row.at)) for row in samples),
                attempts=tuple(
                    row._replace(admitted=later(row.admitted), done=later(row.done))
                    for row in records.attempts
                ),
            )
        ]
    )
    assert found.stalls == 1
    assert found.step_time.base_s == pytest.approx(TRUE.base_s, rel=1e-6)


def test_several_runs_are_one_sample(seen: Path, tmp_path: Path) -> None:
    again = play(tmp_path, seed=1, parallel=8)
    both = calibrate([read(seen), read(again)])
    assert both.runs == ("seen-0", "seen-1")
    assert both.steps > calibrate([read(seen)]).steps
    assert both.step_time.base_s == pytest.approx(TRUE.base_s, rel=1e-6)


def test_an_engine_that_tells_no_steps_cannot_be_calibrated_from(tmp_path: Path) -> None:
    sampled = play(tmp_path, source="sampled")
    with pytest.raises(StoreError, match=r'0 engine steps of main .* kind = "vllm"'):
        calibrate([read(sampled)])


def test_an_engine_that_the_run_does_not_have(seen: Path) -> None:
    with pytest.raises(StoreError, match="--engine side: run seen-0 has no such engine"):
        calibrate([read(seen)], "side")


def altered(run: Path, folder: Path, *statements: str) -> Path:
    """A copy of a run, after some SQL."""
    shutil.copytree(run, folder)
    with closing(sqlite3.connect(folder / "run.db")) as db, db:
        for statement in statements:
            db.execute(statement)
    return folder


CONFIG = "UPDATE run SET config_json = json_set(config_json, '$.{}', {})"
ANOTHER_ID = "UPDATE run SET id = 'another'"
SECOND_ENGINE = (
    "UPDATE attempts SET engine = 'side' WHERE side = 1",
    CONFIG.format("engines.side", "json_extract(config_json, '$.engines.main')"),
)
HALF_PLAYED = (
    "UPDATE matches SET state = 'running', ended = NULL WHERE id IN ('m6', 'm7')",
    "DELETE FROM plies WHERE match_id IN ('m6', 'm7') AND ply > 5",
    "DELETE FROM attempts WHERE match_id IN ('m6', 'm7') AND ply > 5",
)


def test_of_two_engines_one_is_named_and_its_moves_alone_are_drawn(
    seen: Path, tmp_path: Path
) -> None:
    two = altered(
        seen,
        tmp_path / "two",
        *SECOND_ENGINE,
        "UPDATE attempts SET completion_tokens = 77 WHERE side = 1",
    )
    with pytest.raises(StoreError, match="its moves came from main, side; name one with --engine"):
        calibrate([read(two)])
    found = calibrate([read(two)], "main")
    assert len(found.shapes) == 8 * 10
    assert set(found.shapes) == set(WORK.shapes)


def test_the_same_run_counts_once(seen: Path, tmp_path: Path) -> None:
    copy = altered(seen, tmp_path / "copy")
    with pytest.raises(StoreError, match="--from-run: run seen-0 is given 2 times"):
        calibrate([read(seen), read(copy)])


def test_matches_that_were_not_played_to_their_end_are_told(
    seen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = altered(seen, tmp_path / "half", *HALF_PLAYED)
    found = calibrate([read(half)])
    assert (found.finished, found.matches, found.plies) == (6, 8, 20)
    assert against("--from-run", half) == 0
    assert "(2 of 8 matches not played to their end)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("statements", "told"),
    [
        ((CONFIG.format("engines", "json('{}')"),), "do not go together (KeyError('main'))"),
        ((CONFIG.format("engines.main.max_concurrent", 0),), "max_concurrent is 0"),
        ((CONFIG.format("engines.main.max_concurrent", "1e12"),), "max_concurrent is 1"),
        ((CONFIG.format("engines.main.max_batched_tokens", "'x'"),), "max_batched_tokens is 'x'"),
        ((CONFIG.format("engines.main.max_batched_tokens", 4),), "max_batched_tokens is 4, and 16"),
        ((CONFIG.format("tournament.parallel_matches", 0),), "parallel_matches is 0"),
        ((CONFIG.format("tournament", "json('[]')"),), "do not go together (AttributeError"),
        ((CONFIG.format("pace.move_period_seconds", -1),), "move_period_seconds is -1"),
        ((CONFIG.format("slo.move_seconds", 0),), "move_seconds is 0"),
        (("UPDATE run SET config_json = '[]'",), "run.config_json is no object"),
        (("UPDATE attempts SET admitted = NULL",), "do not go together (AssertionError"),
    ],
)
@pytest.mark.parametrize("way", ["fleet", "overload", "against"])
def test_a_run_of_another_hand_is_one_line(
    seen: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    way: str,
    statements: tuple[str, ...],
    told: str,
) -> None:
    bad = altered(seen, tmp_path / "bad", *statements, ANOTHER_ID)
    if way == "against":
        asked: tuple[object, ...] = ("fleet", "--from-run", seen, "--against", bad)
    else:
        asked = (way, "--from-run", bad)
    assert arena("simulate", *asked) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith(("arena: run another: ", f"arena: {bad}/run.db: "))
    assert told in line


@pytest.mark.parametrize("way", ["fleet", "overload"])
def test_tokens_that_no_move_has_are_refused(
    seen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    bad = altered(seen, tmp_path / "bad", "UPDATE attempts SET completion_tokens = 1000000000")
    assert arena("simulate", way, "--from-run", bad) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "run seen-0: a move of 1,000,000,000 tokens was never made" in line


# held to other runs


def against(*arguments: object) -> int:
    return arena("simulate", "fleet", "--seats", 8, "--gpus", 1, "--seconds", 2, *arguments)


def test_runs_of_other_configs_are_forecast(
    seen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer seats, many more seats, and no pace behind four slots."""
    held = (
        play(tmp_path / "few", name="few", parallel=2, seed=5),
        play(tmp_path / "many", name="many", parallel=16, matches=32, seed=6),
        play(tmp_path / "none", name="none", period=0, slots=4, parallel=8, seed=7),
    )
    told = [argument for folder in held for argument in ("--against", folder)]
    assert against("--from-run", seen, *told, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["against"]
    assert [row["run"] for row in rows] == ["few-5", "many-6", "none-7"]
    assert [row["max_concurrent"] for row in rows] == [16, 16, 4]
    for row, folder in zip(rows, held, strict=True):
        was = measured(read(folder))
        assert row["measured"] == {"moves_per_s": was.moves_per_s, "p95_ms": was.p95_s * 1000}
        assert abs(row["error"]["moves_per_s"]) < 0.08
        assert abs(row["error"]["p95_ms"]) < 0.12
        assert row["is_within"]


def test_a_run_that_went_otherwise_is_told_and_fails_the_check(
    seen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = play(tmp_path / "slow", name="slow", stretch=2.0, seed=5)
    assert against("--from-run", seen, "--against", slow) == 1
    printed = capsys.readouterr().out
    assert "0 of 1 forecasts are within 30 % in both figures" in printed
    assert "slow-5" in printed


def test_runs_are_forecast_where_no_fleet_can_be_sized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine too slow for a move a second, as on a CPU; only the verdict is asked for."""
    slow = StepTime(0.09, 0.0046, 0.0)
    one = play(tmp_path / "one", name="one", time=slow)
    other = play(tmp_path / "other", name="other", time=slow, seed=1)
    asked = ("simulate", "fleet", "--from-run", one, "--against", other)
    assert arena(*asked, "--seats", 1000) == 2
    capsys.readouterr()
    assert arena(*asked, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["kind"] == "against"
    assert "gpus" not in result
    assert [row["run"] for row in result["against"]] == ["other-1"]
    (table,) = simulate_text.tables(result)
    assert table.rows[0][0] == "other-1"
    rate = simulate_page.figures(result)[0]
    assert [bars["y"] for bars in rate["data"]] == [
        [result["against"][0][way]["moves_per_s"]] for way in ("predicted", "measured")
    ]
    assert "other-1" in simulate_page.page(result)


@pytest.mark.parametrize("option", ["--slots", "--slo-seconds"])
def test_what_only_a_fleet_has_is_not_taken_for_a_forecast(
    seen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    held = play(tmp_path / "held", name="held", seed=1)
    asked = ("simulate", "fleet", "--from-run", seen, "--against", held, option, 4)
    assert arena(*asked) == 2
    assert f"{option}: is a fleet's" in capsys.readouterr().err
    assert arena(*asked, "--gpus", 1, "--seats", 8) == 0


@pytest.mark.parametrize(
    ("statements", "told"),
    [
        (HALF_PLAYED, "6 of its 8 matches were played to their end; finish it with `arena resume`"),
        (SECOND_ENGINE, "its moves came from main, side, and main alone is forecast"),
        (
            ("UPDATE attempts SET engine = NULL WHERE side = 1",),
            "its moves came from main, no engine, and main alone is forecast",
        ),
    ],
)
def test_a_run_is_forecast_whole_and_of_one_engine(
    seen: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    statements: tuple[str, ...],
    told: str,
) -> None:
    run = altered(seen, tmp_path / "run", *statements, ANOTHER_ID)
    assert arena("simulate", "fleet", "--from-run", seen, "--against", run) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_run_is_held_once(seen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = play(tmp_path / "held", name="held", seed=1)
    assert against("--from-run", seen, "--against", held, "--against", held) == 2
    assert "is given twice" in capsys.readouterr().err


def test_a_run_is_not_held_to_itself(seen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert against("--from-run", seen, "--against", seen) == 2
    assert "is a run of --from-run" in capsys.readouterr().err


# a fleet


def test_seats_move_once_a_period_on_an_engine_that_is_fast() -> None:
    work = Work(((1, 1),), 1.0)
    source = Matches(work, 50, until_s=20.0)
    trace = run_continuous(source, Server(100, StepTime(1e-4, 0.0, 0.0)))
    assert len(trace.jobs) == pytest.approx(50 * 2 * 20, rel=0.05)
    assert max(map(latency_s, trace.jobs)) <= 2e-4 + 1e-9


def test_both_seats_of_a_match_take_turns() -> None:
    trace = run_continuous(Matches(WORK, 3, total=3, plies=9), Server(8, TRUE))
    assert len(trace.jobs) == 27
    for number in range(3):
        jobs = [job for job in trace.jobs if job.owner.match.number == number]
        for before, job in pairwise(jobs):
            assert job.owner.due >= (before.done or 0.0) + WORK.commit_s


@pytest.mark.parametrize("routing", ["hash", "bounded", "even"])
def test_every_match_is_routed_to_one_gpu(routing: Any) -> None:
    loads = route(10_000, 300, routing, seed=1)
    assert (len(loads), sum(loads)) == (300, 10_000)
    most = {"hash": 70, "bounded": 37, "even": 34}[routing]
    assert max(loads) <= most
    assert loads == route(10_000, 300, routing, seed=1)


def test_a_hash_is_as_uneven_as_chance_makes_it() -> None:
    loads = route(100_000, 1000, "hash", seed=3)
    variance = sum((load - 100) ** 2 for load in loads) / 1000
    assert variance == pytest.approx(100, rel=0.15)


def test_the_fleet_that_is_found_keeps_up_and_a_smaller_one_does_not() -> None:
    work, server = Work(((26, 5),), 1.0), Server(64, StepTime(5e-3, 2e-4, 1e-4))
    gpus = Gpus(work, server, 5.0)
    found = gpus_needed(gpus, 2000, 1.0, "even", sample=4, per_gpu=2000, most=1000)
    assert found is not None
    for number, is_enough in ((found, True), (found * 9 // 10, False)):
        runs = gpus.fleet(stand_ins(route(2000, number, "even", 0), 4))
        assert gpus.keeps_up(runs, 1.0) is is_enough


def test_thousands_of_gpus_are_sized(capsys: pytest.CaptureFixture[str]) -> None:
    assert arena("simulate", "fleet", "--seats", 1_600_000, "--seconds", 3, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["calibration"]["source"] == "assumed"
    assert result["gpus"] > 1000
    assert result["gpus_simulated"] <= 16
    assert result["slo_attainment"] >= 0.95
    assert result["pace_attainment"] >= 0.95
    assert result["moves_per_s"] >= 0.95 * 1_600_000
    each = result["matches_per_gpu"]
    assert each["min"] < each["mean"] == 800_000 / result["gpus"] < each["max"]
    assert result["fullest"]["matches"] == each["max"]
    rates = [row["moves_per_s"] for row in result["curve"]]
    assert rates[0] < rates[1] < rates[2]


@pytest.mark.parametrize(
    ("seats", "gpus", "routing", "sample"),
    [
        (2, 1000, "hash", 16),
        (100, 1000, "hash", 16),
        (1000, 1000, "even", 16),
        (2000, 1000, "hash", 16),
        (1000, 400, "hash", 2),
        (10_000, 1000, "bounded", 3),
    ],
)
def test_no_match_is_lost_or_invented(seats: int, gpus: int, routing: Any, sample: int) -> None:
    loads = route(seats // 2, gpus, routing, seed=0)
    stands = stand_ins(loads, sample)
    assert len(stands) <= sample
    assert set(stands) <= set(loads)
    assert sum(stands.values()) == pytest.approx(gpus)
    assert sum(load * count for load, count in stands.items()) == pytest.approx(seats / 2)
    result = fleet(
        FleetOptions(seats=seats, gpus=gpus, routing=routing, sample=sample, seconds=5.0),
        EngineOptions(),
    )
    assert result["moves_per_s"] == pytest.approx(seats, rel=0.01)
    assert result["pace_attainment"] == pytest.approx(result["moves_per_s"] / seats)
    assert result["latency_ms"]["p95"] is not None
    assert result["slo_attainment"] == 1


def test_a_light_gpu_counts_by_its_moves_and_not_by_how_long_it_was_simulated() -> None:
    light = GpuRun(1, 2.0, [0.1] * 1000, 500.0, 1.0)
    full = GpuRun(99, 198.0, [5.0] * 990, 5.0, 9.0)
    assert share_within([(light, 1), (full, 1)], 1.0) == pytest.approx(2 / 200)


def test_the_least_number_of_gpus_is_told_as_about_so_many(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert arena("simulate", "fleet", "--seats", 2000, "--seconds", 1) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "(about the fewest that keep 95 % of the moves in time" in printed
    assert "moves some % with the seed" in printed


def test_one_gpu_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert arena("simulate", "fleet", "--seats", 2, "--gpus", 1) == 0
    printed = capsys.readouterr().out
    assert "on 1 GPU;" in printed
    assert arena("simulate", "fleet", "--seats", 200, "--gpus", 100, "--routing", "even") == 0
    assert "1 GPU was simulated" in capsys.readouterr().out


@pytest.mark.parametrize("output_tokens", [100, 500])
def test_a_pace_that_cannot_be_kept_is_not_blamed_on_the_slo(
    capsys: pytest.CaptureFixture[str], output_tokens: int
) -> None:
    """However many GPUs: a seat waits for its opponent's whole answer."""
    asked = (
        *("simulate", "fleet", "--seats", 200, "--seconds", 1),
        *("--slo-seconds", 60, "--output-tokens", output_tokens),
    )
    assert arena(*asked) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("arena: --period-seconds: a move every 1 s cannot be kept")
    assert "--slo-seconds" not in line
    needed = float(line.partition("a match needs ")[2].partition(" s ")[0])
    assert needed == pytest.approx(2 * output_tokens * 0.00606, rel=0.02)
    assert arena(*asked, "--period-seconds", needed * 1.1) == 0


def test_the_work_counts_gpus_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    """The one GPU makes 4,600 moves; a thousand like it would be too many."""
    asked = ("simulate", "fleet", "--seats", 200, "--gpus", 1, "--sample", 1000)
    assert arena(*asked, "--seconds", 20) == 0
    assert arena(*asked, "--seconds", 3600) == 2
    assert "--seconds: some " in capsys.readouterr().err


def test_tokens_without_end_take_no_time_to_simulate_or_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fast = ("--step-ms", 0, "--token-us", 0.001, "--request-us", 0, "--output-tokens", 100_000)
    assert arena("simulate", "fleet", "--gpus", 1, "--seats", 100, *fast) == 0
    capsys.readouterr()
    assert arena("simulate", "overload", *fast) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "steps would have to be simulated" in line


def test_the_same_seed_is_the_same_fleet() -> None:
    options = FleetOptions(seats=2000, seconds=2.0, gpus=3)
    one, same = (fleet(options, EngineOptions(seed=4)) for _ in range(2))
    assert one == same
    assert one != fleet(options, EngineOptions(seed=5))


# overload


def test_admission_serves_what_a_queue_without_end_serves_nobody_of() -> None:
    result = simulate_overload(OverloadOptions(seconds=12.0), EngineOptions(slots=64))
    queue, admission = result["queue"], result["admission"]
    assert queue["errors"] == {}
    assert queue["answered"] == queue["offered"]
    assert queue["second_half_in_time_per_s"] == 0
    assert queue["drained_s"] == pytest.approx(24, rel=0.05)
    assert admission["second_half_of_capacity"] > 0.9
    assert admission["latency_ms"]["p95"] < 1000
    assert admission["offered"] == admission["answered"] + admission["errors"]["overloaded"]
    assert result["gain"] > 5
    assert admission["caps"]


@pytest.mark.parametrize("seconds", [1.0, 1.7, 5.0, 30.0])
@pytest.mark.parametrize(("step_ms", "output"), [(10, 5), (100, 6), (700, 9)])
def test_the_capacity_is_the_closed_forms(seconds: float, step_ms: float, output: int) -> None:
    """10 slots, each a move in so many steps, also where the time ends within one."""
    engine = EngineOptions(
        slots=10, step_ms=step_ms, token_us=0, request_us=0, output_tokens=output
    )
    result = simulate_overload(OverloadOptions(seconds=seconds), engine)
    assert result["capacity"] == pytest.approx(10_000 / step_ms / output)


def test_an_overload_within_the_slo_tells_no_share_of_the_capacity(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nobody is late: all that was asked for comes in time, some of it after the asking ended."""
    assert arena("simulate", "overload", "--seconds", 2, "--slo-seconds", 3600) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "200.0%" not in printed
    assert "the queue grows to 2 s, too little beside 3600 s" in printed


def test_an_overload_without_a_move_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ("--slots", 1, "--step-ms", 3000, "--output-tokens", 100)
    assert arena("simulate", "overload", "--seconds", 1, *slow) == 2
    assert "--seconds: no move would be asked in 1 s" in capsys.readouterr().err


def test_one_that_waits_in_vain_is_refused_before_its_time_is_up() -> None:
    work, server = Work(((1, 5),), 1.0), Server(4, StepTime(0.02, 0.0, 0.0))
    trace = overload(work, server, 100.0, 10.0, Admission(1.0, 1000))
    for job in trace.jobs:
        assert job.done is not None
        if job.is_refused:
            assert job.done - job.arrival <= 1.0


# refusals


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("fleet", "--seats", 3), "--seats: 3; a match has two seats"),
        (("fleet", "--seats", 0), "--seats: 0; give 2 to"),
        (("fleet", "--gpus", 0), "--gpus: 0; give 1 to"),
        (("fleet", "--seconds", "nan"), "--seconds: nan; give 1 to"),
        (("fleet", "--period-seconds", 0), "--period-seconds: 0; give"),
        (("fleet", "--step-ms", 0, "--token-us", 0, "--request-us", 0), "takes no time"),
        (("fleet", "--step-ms", 3000), "--slo-seconds: 1 s cannot be kept"),
        (("fleet", "--step-ms", 3000), "--period-seconds: a move every 1 s cannot be kept"),
        (("fleet", "--step-ms", 90, "--slots", 1, "--seats", 200), "--seats: 200, routed by hash"),
        (("fleet", "--sample", 1), "--sample: 1; give 2 to"),
        (("fleet", "--from-run", "{seen}", "--from-run", "{seen}"), "is given 2 times"),
        (("fleet", "--seats", 200000, "--gpus", 1), "--gpus: 100000 matches on one of 1"),
        (("fleet", "--gpus", 40, "--seconds", 3600), "moves would have to be simulated"),
        (
            ("fleet", "--step-ms", 0, "--request-us", 0, "--token-us", "1e-310", "--seconds", 3600),
            "moves would have to be simulated",
        ),
        (("fleet", "--against", "x"), "--against: needs --from-run"),
        (("fleet", "--from-run", "{none}"), "holds no run"),
        (("fleet", "--from-run", "{seen}", "--step-ms", 1), "--step-ms: --from-run brings"),
        (("fleet", "--engine", "x"), "--engine: names an engine of a run"),
        (("fleet", "--html", "{none}/x.html"), "cannot be written"),
        (("overload", "--load", 1), "--load: give more than 1"),
        (("overload", "--load", "nan"), "--load: give more than 1"),
        (("overload", "--seconds", 3600, "--step-ms", 0), "moves would have to be simulated"),
        (("overload", "--slots", 0), "--slots: 0; give 1 to"),
        (("overload", "--slo-seconds", -1), "--slo-seconds: -1; give"),
        (("overload", "--output-tokens", 0), "--output-tokens: 0; give 1 to"),
    ],
)
def test_bad_input_is_one_line(
    seen: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[object, ...],
    told: str,
) -> None:
    filled = [str(one).format(seen=seen, none=tmp_path / "none") for one in arguments]
    assert arena("simulate", *filled) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("arena: ")
    assert told in line


def test_a_run_without_a_pace_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paceless = play(tmp_path / "run", period=0)
    assert against("--from-run", paceless) == 2
    assert "--period-seconds: the run's seats had no pace" in capsys.readouterr().err
    assert against("--from-run", paceless, "--period-seconds", 1) == 0


def test_a_run_whose_config_says_nothing_of_its_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = play(tmp_path / "run")
    with closing(sqlite3.connect(folder / "run.db")) as db, db:
        db.execute("UPDATE run SET config_json = json_remove(config_json, '$.tournament')")
    assert against("--from-run", folder) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "does not tell the load of engine main" in line
