"""Replicas of an engine side by side, by hand and in a run through the command line."""

import csv
import json
import pickle
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from arena import cli, tournament
from arena.replicas import (
    MOST_SHOWN,
    SILENT_S,
    STRAGGLER_MOVES,
    STRAGGLER_RATIO,
    Replicas,
    shortened,
)
from arena.store import AttemptRow, Records, SampleRow, read
from tests.arena.replicated_engine import CACHED, CONFIG, DECODE_S, UNCACHED


def an_attempt(replica: str | None, match: str = "m1", **changes: Any) -> AttemptRow:
    """Answered within half a second of being let in, of which 0.3 s were the engine's own."""
    head = ("id", match, 0, 0, 0, "main", "free")
    values = {"admitted": 1.0, "done": 1.5, "prefill_s": 0.1, "decode_s": 0.2, **changes}
    return AttemptRow(*head, replica=replica, **values)


def a_sample(replica: str | None, requests: int | None, steps: int = 1) -> SampleRow:
    nothing = SampleRow("main", 1.0, "per_step", steps, replica, *[None] * 9)
    return nothing._replace(step_requests=requests)


def move(replicas: Replicas, *attempts: AttemptRow, agent: str = "one") -> None:
    for attempt in attempts:
        replicas.add_attempt(attempt)
    replicas.add_move(attempts, (agent, "chess"))


def section(replicas: Replicas) -> dict[str, Any]:
    told = replicas.section()
    assert told is not None
    json.dumps(told, allow_nan=False)
    return told


def rows(replicas: Replicas) -> dict[str, dict[str, Any]]:
    return {row["replica"]: row for row in section(replicas)["rows"]}


@pytest.mark.parametrize("names", [(), (None, None), ("a",), ("a", None, "a")])
def test_fewer_than_two_replicas_are_not_compared(names: Iterable[str | None]) -> None:
    replicas = Replicas(exact=True)
    for name in names:
        move(replicas, an_attempt(name))
        replicas.add_sample(a_sample(name, 1))
    assert replicas.section() is None


def test_what_each_replica_answered_is_counted() -> None:
    replicas = Replicas(exact=True)
    move(replicas, an_attempt("a", prompt_tokens=100, cached_tokens=80))
    move(replicas, an_attempt("a", prompt_tokens=100, cached_tokens=None))
    move(replicas, an_attempt("a", "m2", fault="illegal"), an_attempt("a", "m2"))
    move(replicas, an_attempt("b", "m3", prompt_tokens=50, cached_tokens=0))
    for sample in (a_sample("a", 4, steps=3), a_sample("a", None), a_sample("b", 2)):
        replicas.add_sample(sample)
    a, b = rows(replicas)["a"], rows(replicas)["b"]
    assert (a["matches"], a["moves"], a["faults"]) == (2, 3, {"illegal": 1})
    assert (b["matches"], b["moves"], b["faults"]) == (1, 1, {})
    assert (a["share"], b["share"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert (a["prefix_hit_rate"], b["prefix_hit_rate"]) == (pytest.approx(0.8), 0)
    assert (a["step_requests"]["mean"], b["step_requests"]["max"]) == (4, 2)
    assert section(replicas)["matches_moved"] == 0


def test_a_replica_that_only_told_of_itself_is_one_of_them() -> None:
    replicas = Replicas(exact=False)
    replicas.add_attempt(an_attempt("busy"))
    replicas.add_sample(a_sample("idle", 0))
    idle = rows(replicas)["idle"]
    assert (idle["matches"], idle["share"], idle["moves"]) == (0, 0, 0)
    assert idle["prefix_hit_rate"] is idle["engine_ms"]["p50"] is idle["median_ratio"] is None


def test_a_match_that_moves_is_counted_once_wherever_it_was_and_as_moved_once() -> None:
    replicas = Replicas(exact=True)
    for name in "abcabc":
        replicas.add_attempt(an_attempt(name))
    replicas.add_attempt(an_attempt("a", "m2"))
    assert {name: row["matches"] for name, row in rows(replicas).items()} == {
        "a": 2,
        "b": 1,
        "c": 1,
    }
    assert rows(replicas)["b"]["share"] == pytest.approx(1 / 2)
    assert section(replicas)["matches_moved"] == 1


def test_a_move_is_its_last_answerer_s_with_the_time_that_it_took_there() -> None:
    replicas = Replicas(exact=True)
    illegal = an_attempt("a", fault="illegal", decode_s=50.0)
    move(replicas, illegal, an_attempt("b", fault="illegal"), an_attempt("b", decode_s=0.4))
    assert rows(replicas)["a"]["moves"] == 0
    assert rows(replicas)["b"]["engine_ms"]["max"] == pytest.approx(100 + 200 + 100 + 400)


def test_where_an_engine_tells_no_times_they_are_taken_from_admission_to_the_answer() -> None:
    replicas = Replicas(exact=True)
    move(replicas, an_attempt("a", prefill_s=None))
    move(replicas, an_attempt("b", decode_s=None, admitted=None))
    assert rows(replicas)["a"]["engine_ms"]["p50"] == pytest.approx(500)
    assert (rows(replicas)["b"]["moves"], rows(replicas)["b"]["engine_ms"]["p50"]) == (1, None)


def of_times(times_s: dict[str, float], moves: int = STRAGGLER_MOVES) -> Replicas:
    """Replicas that took so long for each of their moves."""
    replicas = Replicas(exact=True)
    for name, seconds in times_s.items():
        for _ in range(moves):
            move(replicas, an_attempt(name, f"at {name}", prefill_s=0.0, decode_s=seconds))
    return replicas


def stragglers(replicas: Replicas) -> list[str]:
    return [name for name, row in rows(replicas).items() if row["is_straggler"]]


def test_a_straggler_is_named_with_its_numbers() -> None:
    replicas = of_times({"a": 0.10, "b": 0.12, "c": 0.11, "d": 0.22})
    assert stragglers(replicas) == ["d"]
    assert rows(replicas)["d"]["median_ratio"] == pytest.approx(2.0)
    assert rows(replicas)["a"]["median_ratio"] == pytest.approx(0.10 / 0.12)
    told = section(replicas)
    assert (told["straggler_ratio"], told["straggler_moves"]) == (STRAGGLER_RATIO, STRAGGLER_MOVES)


def test_of_two_replicas_the_slow_one_is_the_straggler() -> None:
    assert stragglers(of_times({"a": 1.0, "b": 0.5})) == ["a"]


def test_several_may_lag_behind() -> None:
    assert stragglers(of_times({"a": 1.0, "b": 1.0, "c": 3.0, "d": 4.0, "e": 1.0})) == ["c", "d"]


def test_half_as_much_again_is_no_straggler_yet() -> None:
    assert stragglers(of_times({"a": 1.5, "b": 1.0})) == []


def test_few_moves_judge_nobody_and_nobody_is_judged_by_them() -> None:
    assert stragglers(of_times({"a": 1.0, "b": 0.5}, STRAGGLER_MOVES - 1)) == []
    replicas = of_times({"a": 1.0, "b": 0.9})
    move(replicas, an_attempt("new", decode_s=0.0))
    assert stragglers(replicas) == []
    assert rows(replicas)["new"]["median_ratio"] is None


def test_a_few_long_thoughts_make_no_straggler() -> None:
    replicas = of_times({"a": 1.0, "b": 1.0})
    for _ in range(STRAGGLER_MOVES - 1):
        move(replicas, an_attempt("a", decode_s=60.0))
    assert stragglers(replicas) == []


def test_players_that_take_their_time_make_no_straggler() -> None:
    """Of two kinds of moves the median jumped from one to the other by a single move more."""
    replicas = Replicas(exact=True)
    for name, thoughts in (("a", 101), ("b", 99)):
        for number in range(200):
            is_thought = number < thoughts
            seconds, agent = (2.0, "thinks") if is_thought else (0.05, "answers")
            move(replicas, an_attempt(name, prefill_s=0.0, decode_s=seconds), agent=agent)
    assert rows(replicas)["a"]["engine_ms"]["p50"] > 10 * rows(replicas)["b"]["engine_ms"]["p50"]
    ratios = [row["median_ratio"] for row in rows(replicas).values()]
    assert ratios == [pytest.approx(1.0)] * 2
    assert stragglers(replicas) == []


def test_a_replica_that_is_slow_for_every_player_lags_behind_by_the_mean_of_its_moves() -> None:
    replicas = Replicas(exact=True)
    for name, slowness in (("a", (2.0, 4.0)), ("b", (1.0, 1.0)), ("c", (1.0, 1.0))):
        for agent, times, moves in zip(("one", "two"), slowness, (30, 90), strict=True):
            for _ in range(moves):
                move(replicas, an_attempt(name, prefill_s=0.0, decode_s=times), agent=agent)
    assert stragglers(replicas) == ["a"]
    assert rows(replicas)["a"]["median_ratio"] == pytest.approx((30 * 2.0 + 90 * 4.0) / 120)


def test_a_replica_that_answers_no_more_is_silent() -> None:
    replicas = Replicas(exact=True)
    for name, done in (("ended", 10.0), ("a", 69.0), ("b", 70.0 + SILENT_S), ("a", 80.0)):
        move(replicas, an_attempt(name, admitted=done - 1.0, done=done))
    replicas.add_sample(a_sample("idle", 0))
    told = {name: row["is_silent"] for name, row in rows(replicas).items()}
    assert told == {"ended": True, "a": False, "b": False, "idle": True}


def test_of_many_replicas_those_are_shown_that_tell_most() -> None:
    """Each start of a replica may have a name of its own: a run with many had as many rows."""
    replicas = Replicas(exact=False)
    for number in range(2 * MOST_SHOWN):
        move(replicas, an_attempt(f"old{number:03}", done=10.0))
    for name in ("new", "newer", "newest"):
        move(replicas, an_attempt(name, admitted=999.0, done=1000.0))
    told = section(replicas)
    shown = shortened(told)
    assert shown is not None
    names = [row["replica"] for row in shown["rows"]]
    assert len(names) == MOST_SHOWN
    assert names == sorted(names)
    assert {"new", "newer", "newest"} < set(names)
    assert shown["count"] == told["count"] == len(told["rows"]) == 2 * MOST_SHOWN + 3
    assert shortened(None) is None


def test_times_of_nothing_are_not_divided_by() -> None:
    told = rows(of_times({"a": 1.0, "b": 0.0}))
    assert told["a"]["median_ratio"] is None
    assert told["b"]["median_ratio"] == 0


def test_no_memory_is_kept_of_a_move() -> None:
    replicas = Replicas(exact=False)
    sizes = []
    for _ in range(3):
        for number in range(2000):
            name, match = f"r{number % 4}", f"m{number % 40}"
            move(replicas, an_attempt(name, match, decode_s=number / 1000, fault="illegal"))
            replicas.add_sample(a_sample(name, number % 8))
        sizes.append(len(pickle.dumps(replicas)))
    assert sizes[2] - sizes[0] < 200  # counts grew, and no collection


# A run through the command line.

NAMES = ("k3v9x2ab", "q7m1z0cd", "10.0.0.7:8000")
DENSE, SPARSER = 20, 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on three replicas, whose steps are thinned early."""
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "run.toml").write_text(CONFIG.format(engine="", max_plies=30, period=0))
    shown = ["--view", "none", "--dashboard", "off"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tournament, "DENSE_SAMPLES", DENSE)
        patch.setattr(tournament, "SPARSER", SPARSER)
        assert (
            cli.main(["run", str(folder / "run.toml"), "--out", str(folder / "run"), *shown]) == 0
        )
    return folder / "run"


@pytest.fixture(scope="module")
def held(folder: Path) -> Records:
    return read(folder)


def test_the_store_tells_which_replica_answered(held: Records) -> None:
    assert {row.replica for row in held.attempts} == set(NAMES)
    assert {row.replica for row in held.samples} == set(NAMES)


def test_steps_of_each_replica_are_thinned_by_themselves(held: Records) -> None:
    """They share what an engine alone has."""
    dense = DENSE // len(NAMES)
    answered = Counter(row.replica for row in held.attempts)
    for name in NAMES:
        steps = [row.steps for row in held.samples if row.replica == name]
        assert steps[: dense + 1] == [1] * dense + [SPARSER]
        assert 0 <= answered[name] - sum(steps) < SPARSER**2


def test_replicas_that_come_and_go_leave_hardly_more_steps_than_one_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each name had 20,000 steps stored one by one, however many names there were."""
    monkeypatch.setattr(tournament, "DENSE_SAMPLES", 200)

    def stored(names: int) -> list[int]:
        thinning = tournament.Thinning()
        told = (thinning.next(f"r{step * names // 8000}") for step in range(8000))
        return [steps for steps in told if steps]

    alone, many = stored(1), stored(20)
    assert sum(alone) == 8000
    assert 7000 < sum(many) <= 8000
    assert len(many) < 3 * len(alone)


def test_growth_of_several_replicas_adds_up(held: Records) -> None:
    """Totals of one were taken for those of another, and counted as if they had begun again."""
    seconds = [bucket for bucket in held.buckets if bucket.span_s == 1.0]
    steps = sum(bucket.steps for bucket in seconds)
    assert steps >= len(held.attempts)
    looked_up = sum(bucket.prefix_queries or 0 for bucket in seconds)
    assert looked_up == steps * (CACHED + UNCACHED)


def test_a_report_tells_replicas_and_the_straggler(
    folder: Path, held: Records, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(folder), "--json"]) == 0
    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    told = {row["replica"]: row for row in engine["replicas"]["rows"]}
    assert sum(row["moves"] for row in told.values()) == len(held.plies)
    assert [told[name]["matches"] for name in NAMES] == [5, 4, 4]  # one came from the last
    assert engine["replicas"]["matches_moved"] == 1
    assert [told[name]["is_straggler"] for name in NAMES] == [False, False, True]
    assert told[NAMES[2]]["median_ratio"] == pytest.approx(3.0)
    assert told[NAMES[0]]["engine_ms"]["p95"] == pytest.approx(1000 * DECODE_S)
    assert told[NAMES[0]]["prefix_hit_rate"] == pytest.approx(CACHED / (CACHED + UNCACHED))
    assert told[NAMES[1]]["step_requests"]["mean"] == 1


def test_the_report_shows_a_table_of_replicas(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "Replicas of main" in text
    (slow,) = (line for line in text.splitlines() if "SLOW 3.0×" in line)
    assert NAMES[2] in slow
    assert "1 match was answered by more than one replica." in text


def test_replicas_are_a_table_of_their_own(folder: Path, tmp_path: Path) -> None:
    assert cli.main(["report", str(folder), "--csv", str(tmp_path / "csv")]) == 0
    with (tmp_path / "csv/replicas.csv").open(encoding="utf-8", newline="") as file:
        told = list(csv.DictReader(file))
    assert [row["replica"] for row in told] == sorted(NAMES)
    assert {row["engine"] for row in told} == {"main"}
    assert [row["is_straggler"] for row in told] == ["true", "false", "false"]
    engines = (tmp_path / "csv/engines.csv").read_text(encoding="utf-8")
    assert "replica" not in engines.splitlines()[0]


def test_the_page_holds_the_replicas(folder: Path, tmp_path: Path) -> None:
    assert cli.main(["report", str(folder), "--html", str(tmp_path / "page.html")]) == 0
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    _, _, rest = html.partition('id="embedded">')
    frame = json.loads(rest.partition("</script>")[0])["frame"]
    (engine,) = frame["engines"]
    assert [row["replica"] for row in engine["replicas"]["rows"]] == sorted(NAMES)
