"""Engines on the same work: what is faster is called so, and nothing else is."""

import asyncio
import base64
import hashlib
import io
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from arena import compare, compare_page, loops, workload
from arena import compare_figures as figures
from arena import config as configs
from arena.compare import CompareOptions
from arena.compare_figures import Answer, Cell, EngineRecord, Measurement
from arena.compare_text import agreement_texts, difference_texts
from arena.config import ConfigError, RunConfig
from arena.loops import Asker
from arena.store import StoreError
from arena.terminal import print_compare
from arena.workload import WorkItem
from serving import (
    EngineDead,
    Finish,
    Limited,
    Reply,
    Request,
    Timings,
    TokenPrompt,
    Usage,
)
from tests.arena.doomed_engines import (
    DoomedEngine,
    NotingEngine,
    RefusingEngine,
    SilentEngine,
    UnstartableEngine,
)
from tests.examples.own_engine import DiceEngine

OWN = "tests.arena.doomed_engines"
HOSTILE = "</script><b>x"
FAST = {"kind": "scripted", "latency_seconds": 0.01, "max_concurrent": 4}
OPEN = Cell("open", None)
SLOW = {"kind": "scripted", "latency_seconds": 0.1, "max_concurrent": 4}


def config(engines: dict[str, Any], **changes: Any) -> RunConfig:
    first = next(iter(engines), "main")
    return configs.parse(
        {
            "name": "compared",
            "seed": 3,
            "engines": engines,
            "agents": [{"name": name, "kind": "llm", "engine": first} for name in ("a", "b")],
            "tournament": {
                "games": ["chess", "janggi"],
                "pairs": 2,
                "parallel_matches": 2,
                "max_plies": 30,
            },
            "pace": {"move_period_seconds": 0.2, "move_limit_seconds": 5.0},
            **changes,
        }
    )


def options(folder: Path, **changes: Any) -> CompareOptions:
    return replace(CompareOptions(folder, seconds=0.35, repeats=1, concurrencies=(1,)), **changes)


@dataclass
class Compared:
    result: dict[str, Any]
    told: list[str]

    def cell(self, engine: str, loop: str) -> dict[str, Any]:
        (cell,) = [
            row for row in self.result["cells"] if (row["engine"], row["loop"]) == (engine, loop)
        ]
        return dict(cell)

    def difference(self, one: str, other: str, metric: str) -> dict[str, Any]:
        (found,) = [
            row
            for row in self.result["differences"]
            if row["engines"] == [one, other]
            and row["metric"] == metric
            and row["loop"] == ("open" if metric == "slo_attainment" else "closed")
        ]
        return dict(found)


def compared(engines: dict[str, Any], folder: Path, **changes: Any) -> Compared:
    told: list[str] = []
    running = compare.run(config(engines), (), options(folder, **changes), announce=told.append)
    return Compared(asyncio.run(running), told)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """Three repeats of a fast engine and of two that are the same."""
    engines = {"fast": FAST, "slow": SLOW, "twin": SLOW}
    return compared(engines, tmp_path_factory.mktemp("healthy"), repeats=3)


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """Two repeats of engines of which most fail."""
    UnstartableEngine.starts = 0
    engines = {
        "good": FAST,
        "refuses": {**FAST, "faults": [{"kind": "overload", "probability": 0.4}]},
        "garbles": {
            **FAST,
            "faults": [
                {"kind": "cut_short", "probability": 0.3},
                {"kind": "garbage", "probability": 0.3},
            ],
        },
        "doomed": {"kind": f"{OWN}:DoomedEngine", "lives": 60, "max_concurrent": 8},
        "rude": {"kind": f"{OWN}:RudeEngine"},
        "absent": {"kind": f"{OWN}:UnstartableEngine"},
    }
    return compared(engines, tmp_path_factory.mktemp("troubled"), repeats=2, seconds=0.25)


# what is said of engines


def test_the_faster_one_is_called_faster(healthy: Compared) -> None:
    for other in ("slow", "twin"):
        found = healthy.difference("fast", other, "moves_per_s")
        assert found["better"] == "fast"
        assert found["is_within_spread"] is False
        assert 2 < found["ratio_low"] <= found["ratio"] <= found["ratio_high"]
        assert healthy.difference("fast", other, "latency_p50_ms")["better"] == "fast"


def test_equal_ones_are_about_equal(healthy: Compared) -> None:
    """Three repeats of each come out apart one time in ten, so nothing is said of that here."""
    found = healthy.difference("slow", "twin", "moves_per_s")
    assert found["ratio"] == pytest.approx(1, abs=0.1)


def test_engines_that_keep_up_are_equal_in_the_open_loop(healthy: Compared) -> None:
    assert healthy.difference("fast", "slow", "slo_attainment")["is_within_spread"] is True
    cells = [healthy.cell(name, "open") for name in ("fast", "slow", "twin")]
    assert {cell["slo_attainment"] for cell in cells} == {1.0}
    assert len({cell["offered"] for cell in cells}) == 1


def test_every_cell_has_its_repeats_and_figures(healthy: Compared) -> None:
    cells = healthy.result["cells"]
    assert [(c["engine"], c["loop"], c["concurrency"]) for c in cells] == [
        (engine, *cell)
        for cell in (("open", None), ("closed", 1))
        for engine in ("fast", "slow", "twin")
    ]
    for cell in cells:
        assert len(cell["moves_per_s"]) == len(cell["repeats"]) == 3
        assert all(rate > 0 for rate in cell["moves_per_s"])
        assert cell["latency_ms"].keys() == {"mean", "p50", "p95", "p99", "max"}
        assert cell["latency_ms"]["p50"] >= (10 if cell["engine"] == "fast" else 100)
        assert cell["errors"] == {}
        assert 0 < cell["uncached_prompt_tokens_per_move"] < 100
        assert 0.8 < cell["prefix_hit_rate"] < 1
        assert cell["version"] == "1"
        assert cell["occupancy"]["mean"] is None
    closed = healthy.cell("slow", "closed")
    assert closed["in_flight"] == pytest.approx(1, abs=0.15)
    assert closed["games_per_h"] == pytest.approx(
        sorted(closed["moves_per_s"])[1] * 3600 / 30, rel=1e-6
    )


def test_no_engine_always_follows_the_same_one(healthy: Compared, tmp_path: Path) -> None:
    job = compare.prepare(config({"fast": FAST, "slow": SLOW, "twin": SLOW}), (), options(tmp_path))
    orders = [job.order(repeat) for repeat in range(20)]
    for one, other in zip(orders[::2], orders[1::2], strict=True):
        assert other == one[::-1]
    assert all(Counter(order) == Counter(job.names) for order in orders)
    assert len(set(orders)) > 2
    starts = [line.split(", ")[1][:4] for line in healthy.told if line.endswith("starting")]
    assert starts == [name for order in orders[:3] for name in order]


def test_equal_engines_have_nothing_unequal_but_what_makes_them_slow(healthy: Compared) -> None:
    knobs = [row["knob"] for row in healthy.result["unequal"] if "prompt tokens" not in row["knob"]]
    assert knobs == ["latency_seconds"]


def test_the_result_is_one_json_object(healthy: Compared, troubled: Compared) -> None:
    for result in (healthy.result, troubled.result):
        assert json.loads(json.dumps(result, allow_nan=False)) == result
        assert result["schema_version"] == 1
        assert result["workload"]["items"] == 240


# failures


def test_refusals_are_counted_as_misses(troubled: Compared) -> None:
    for loop in ("open", "closed"):
        cell = troubled.cell("refuses", loop)
        assert cell["errors"].keys() == {"overloaded"}
        assert cell["slo_attainment"] == pytest.approx(
            1 - cell["errors"]["overloaded"] / cell["offered"]
        )


def test_answers_that_are_no_moves_are_counted_by_their_kind(troubled: Compared) -> None:
    kinds: Counter[str] = Counter()
    for loop in ("open", "closed"):
        kinds.update(troubled.cell("garbles", loop)["errors"])
    assert kinds.keys() == {"cut_short", "constraint_ignored"}


def test_one_that_dies_for_good_is_a_row_with_errors(troubled: Compared) -> None:
    rows = [troubled.cell("doomed", loop) for loop in ("open", "closed")]
    errors: Counter[str] = Counter()
    for row in rows:
        errors.update(row["errors"])
    assert errors["engine_dead"] > 0
    (engine,) = [row for row in troubled.result["engines"] if row["name"] == "doomed"]
    assert len(engine["start_s"]) == 2
    assert all("the power is off" in text for text in engine["failures"])
    assert len(engine["failures"]) == 2


@pytest.mark.parametrize("concurrencies", [(), (4,)])
def test_one_that_dies_before_a_cell_is_not_measured_in_it(
    tmp_path: Path, concurrencies: tuple[int, ...]
) -> None:
    """It was a row of 0 moves a second."""
    engines = {"doomed": {"kind": f"{OWN}:DoomedEngine", "lives": 41, "max_concurrent": 8}}
    found = compared(engines, tmp_path, concurrencies=concurrencies)
    rates = [cell["moves_per_s"] for cell in found.result["cells"]]
    assert rates == [[None]] * (1 + len(concurrencies))
    assert found.result["engines"][0]["failures"] == ["repeat 1 of 1, doomed: the power is off"]


def test_a_cell_that_has_no_question_left_is_not_measured(tmp_path: Path) -> None:
    """It was a row of 0 moves a second without a failure."""
    games = {"games": ["chess"], "pairs": 2, "parallel_matches": 2, "max_plies": 2}
    told: list[str] = []
    setup = config({"one": FAST}, tournament=games)
    asked = options(tmp_path, concurrencies=(4,))
    result = asyncio.run(compare.run(setup, (), asked, announce=told.append))
    (row,) = [row for row in result["cells"] if row["loop"] == "closed"]
    assert row["moves_per_s"] == [None]
    (failure,) = [text for text in result["engines"][0]["failures"] if "closed 4" in text]
    assert failure == (
        "repeat 1 of 1, one, closed 4: no question was left to be counted; raise tournament.pairs "
        "or --seconds"
    )
    assert failure in told


def test_a_restart_is_told_of_its_cell(tmp_path: Path) -> None:
    engines = {"one": {"kind": f"{OWN}:RestartedEngine", "lives": 60}}
    result = compared(engines, tmp_path, concurrencies=(4,)).result
    (cell,) = [row for row in result["cells"] if row["restarts"]]
    where = "one, open" if cell["loop"] == "open" else "one, closed 4"
    assert f"{where}: was started again 1 times, which its figures hold" in result["notes"]
    assert result["engines"][0]["restarts"] == 1


def test_one_that_raises_anything_is_a_row_with_errors(troubled: Compared) -> None:
    assert troubled.cell("rude", "closed")["errors"].keys() == {"transport"}
    assert troubled.cell("rude", "closed")["moves_per_s"] == [0, 0]


def test_one_that_cannot_start_is_told_and_not_tried_again(troubled: Compared) -> None:
    (engine,) = [row for row in troubled.result["engines"] if row["name"] == "absent"]
    assert engine["failures"] == ["repeat 1 of 2, absent: no such device"]
    assert engine["version"] is None
    assert UnstartableEngine.starts == 1
    for loop in ("open", "closed"):
        assert troubled.cell("absent", loop)["moves_per_s"] == [None, None]
        assert troubled.cell("absent", loop)["slo_attainment"] is None


def test_the_others_are_measured_all_the_same(troubled: Compared) -> None:
    for loop in ("open", "closed"):
        cell = troubled.cell("good", loop)
        assert cell["errors"] == {}
        assert all(rate > 0 for rate in cell["moves_per_s"])


def test_too_few_repeats_tell_no_difference(troubled: Compared) -> None:
    assert troubled.result["differences"]
    for row in troubled.result["differences"]:
        assert (row["is_within_spread"], row["better"]) == (None, None)


# agreement


def test_one_that_computes_something_else_is_seen(tmp_path: Path) -> None:
    engines = {"one": FAST, "same": FAST, "other": {"kind": "tests.examples.own_engine:DiceEngine"}}
    result = compared(engines, tmp_path, seconds=0.2).result
    shares = {tuple(pair["engines"]): pair for pair in result["agreement"]["pairs"]}
    assert result["agreement"]["asked"] == 40
    assert shares["one", "same"]["share"] == 1.0
    assert shares["one", "same"]["n"] == shares["one", "other"]["n"] > 10
    assert shares["one", "other"]["share"] < 0.5
    (row,) = [row for row in result["cells"] if (row["engine"], row["loop"]) == ("other", "open")]
    # it tells no times and no cached tokens
    assert row["ttft_ms"]["p50"] is None
    assert row["uncached_prompt_tokens_per_move"] is None
    assert row["prefix_hit_rate"] is None
    forgotten = [row for row in result["unequal"] if row["knob"].startswith("prefix cache emptied")]
    assert forgotten[0]["values"] == {"one": True, "same": True, "other": False}


def test_an_answer_that_is_no_move_is_no_agreement(tmp_path: Path) -> None:
    """Illegal answers went out of the count, so 4 of 40 alike were 100 %."""
    garbage = {**FAST, "faults": [{"kind": "garbage", "probability": 0.9}]}
    result = compared({"one": FAST, "other": garbage}, tmp_path, seconds=0.2).result
    (pair,) = result["agreement"]["pairs"]
    assert pair["n"] > 10
    assert pair["share"] < 0.5
    (told,) = agreement_texts(result["agreement"])
    assert told == (
        f"one and other: {pair['equal']} alike ({pair['share']:.1%}) of {pair['n']} answered by "
        "both, of 40 asked"
    )


# asking


class TimedEngine(DiceEngine):
    """Answers after `seconds`, and notes who asks what and when."""

    def __init__(self, seconds: float, max_concurrent: int = 64) -> None:
        super().__init__({"max_concurrent": max_concurrent})
        self.seconds = seconds
        self.asked: list[Request] = []
        self.inside = self.most_inside = 0

    async def generate(self, request: Request) -> Reply:
        self.asked.append(request)
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        await asyncio.sleep(self.seconds)
        self.inside -= 1
        return await super().generate(request)


@pytest.fixture(scope="module")
def items() -> tuple[WorkItem, ...]:
    return workload.record(config({"main": FAST})).items


def by_match(items: Sequence[WorkItem]) -> list[tuple[WorkItem, ...]]:
    found: dict[str, list[WorkItem]] = {}
    for item in items:
        found.setdefault(item.match_id, []).append(item)
    return list(map(tuple, found.values()))


async def test_the_open_loop_does_not_wait_for_answers(items: Sequence[WorkItem]) -> None:
    engine = TimedEngine(0.5)
    run = await Asker(Limited(engine), 5.0).open_loop(items, 0.8)
    expected = [item for item in items if item.arrival_s <= 0.8]
    assert [a.due - run.began for a in run.answers] == pytest.approx(
        [item.arrival_s for item in expected], abs=1e-9
    )
    sent = [request.id.split("/")[:2] for request in engine.asked]
    assert sent == [[item.match_id, str(item.ply)] for item in expected]
    assert all(0 <= a.sent - a.due < 0.3 for a in run.answers)
    first = {match[0].match_id for match in by_match(expected)}
    assert sum(a.overlaps for a in run.answers) == len(expected) - len(first)
    assert run.ended - run.began == pytest.approx(0.8)
    # those in flight at the end are waited for, and are no moves of the window
    assert all(a.fault is None for a in run.answers)
    assert 0 < run.moves_per_s * run.seconds < len(run.answers)


async def test_latency_runs_from_when_a_question_was_due(items: Sequence[WorkItem]) -> None:
    """A loop that is held up sends late, and that counts."""
    asker = Asker(Limited(TimedEngine(0.0)), 5.0)
    running = asyncio.ensure_future(asker.open_loop(items, 0.5))
    await asyncio.sleep(0.1)
    until = asyncio.get_running_loop().time() + 0.3
    while asyncio.get_running_loop().time() < until:
        pass
    run = await running
    cell = figures.cell_row(record_of([run]), OPEN, slo_s=0.1, plies_per_game=30)
    assert cell["schedule_lag_ms"]["max"] > 100
    assert cell["latency_ms"]["max"] > cell["schedule_lag_ms"]["max"]
    assert cell["slo_attainment"] < 1


async def test_the_closed_loop_asks_so_many_at_once_and_whole_matches(
    items: Sequence[WorkItem],
) -> None:
    engine = TimedEngine(0.01)
    matches = by_match(items)
    run = await Asker(Limited(engine), 5.0).closed_loop(matches, 3, 0.5)
    assert engine.most_inside == 3
    asked: dict[str, list[int]] = {}
    for request in engine.asked:
        asked.setdefault(request.match_id, []).append(int(request.id.split("/")[1]))
    assert list(asked)[:3] == [match[0].match_id for match in matches[:3]]
    assert all(plies == list(range(len(plies))) for plies in asked.values())
    unfinished = [plies for plies in asked.values() if len(plies) < 30]
    assert len(unfinished) <= 3
    # all but what was answered until every worker had been
    assert len(engine.asked) - 6 < len(run.answers) <= len(engine.asked) - 3
    assert all(a.sent < run.ended for a in run.answers)
    assert all(a.done > run.began for a in run.answers)
    assert run.begins_full
    assert run.seconds == pytest.approx(0.5)
    assert run.moves_per_s == pytest.approx(3 / 0.011, rel=0.2)


async def test_a_window_opens_once_every_worker_was_answered(items: Sequence[WorkItem]) -> None:
    """They begin all at once, so the first of them do not wait as long as those that follow."""
    engine = Limited(TimedEngine(0.02, max_concurrent=1))
    begun = time.monotonic()
    run = await Asker(engine, 5.0).closed_loop(by_match(items), 4, 0.4)
    assert run.began - begun == pytest.approx(0.08, abs=0.03)
    # three that are under way and were asked before it, and one that is asked then
    assert sum(a.sent < run.began for a in run.answers) == 3
    assert run.moves_per_s <= 1 / 0.02
    assert figures.cell_row(record_of([run]), OPEN, slo_s=1, plies_per_game=1)["in_flight"] == (
        pytest.approx(4, abs=0.2)
    )


async def test_one_that_dies_before_a_window_opens_is_not_measured(
    items: Sequence[WorkItem],
) -> None:
    asker = Asker(Limited(DoomedEngine({"max_concurrent": 8})), 5.0)
    with pytest.raises(EngineDead, match="the power is off"):
        await asker.closed_loop(by_match(items), 4, 0.3)


async def test_the_closed_loop_ends_when_a_worker_finds_no_match(
    items: Sequence[WorkItem],
) -> None:
    matches = by_match(items)[:2]
    engine = TimedEngine(0.0)
    run = await Asker(Limited(engine), 5.0).closed_loop(matches, 2, 60.0)
    assert run.seconds < 5
    assert len(engine.asked) == 60


@pytest.mark.parametrize("loop", ["open", "closed"])
async def test_questions_that_are_never_answered_are_given_up(
    items: Sequence[WorkItem], loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "GRACE_S", 0.1)
    asker = Asker(Limited(SilentEngine({"max_concurrent": 64})), 0.2)
    if loop == "open":
        asking = asker.open_loop(items, 0.3)
    else:
        asking = asker.closed_loop(by_match(items), 2, 0.3)
    run = await asyncio.wait_for(asking, 5)
    assert {a.fault for a in run.answers} == {"stalled"}
    assert len(run.answers) >= 2
    assert run.moves_per_s == 0
    matches = {item.match_id for item in items[: len(run.answers)]}
    overlaps = len(run.answers) - len(matches) if loop == "open" else 0
    assert sum(a.overlaps for a in run.answers) == overlaps


async def test_questions_to_an_engine_that_is_gone_are_told_as_that(
    items: Sequence[WorkItem], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "GRACE_S", 0.1)
    engine = SilentEngine({"max_concurrent": 64})
    asking = asyncio.ensure_future(Asker(Limited(engine), 0.2).open_loop(items, 0.3))
    await asyncio.sleep(0.1)
    engine.is_ready = False
    assert {a.fault for a in (await asking).answers} == {"engine_dead"}


async def test_an_engine_that_refuses_is_not_asked_as_fast_as_it_refuses(
    items: Sequence[WorkItem],
) -> None:
    run = await Asker(Limited(RefusingEngine({})), 5.0).closed_loop(by_match(items), 2, 0.3)
    assert {a.fault for a in run.answers} == {"overloaded"}
    assert 2 <= len(run.answers) <= 2 * (0.3 / loops.PAUSE_S + 1)


async def test_what_was_given_up_before_a_cell_is_none_of_its_questions(
    items: Sequence[WorkItem],
) -> None:
    engine = TimedEngine(60.0)
    asker = Asker(Limited(engine), 5.0)
    matches = by_match(items)[:1]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asker.warm(matches)
    engine.seconds = 0.0
    run = await asker.closed_loop(matches, 1, 9.0)
    assert len(run.answers) == 29
    assert {a.fault for a in run.answers} == {None}


def test_a_cell_goes_on_after_what_was_asked_before_it(tmp_path: Path) -> None:
    """Each of its questions is new to a cache that was emptied; and each start asks the sample."""
    NotingEngine.notes.clear()
    engines = {"one": {"kind": f"{OWN}:NotingEngine"}}
    compared(engines, tmp_path, concurrencies=(1, 3), seconds=0.2, repeats=2)
    phases: list[list[str]] = []
    for note in NotingEngine.notes:
        if note == "forget":
            phases.append([])
        else:
            phases[-1].append(note.rsplit("/", 2)[0])
    assert len(phases) == 8
    for greedy, *cells in (phases[:4], phases[4:]):
        assert len(greedy) == 40
        assert all(len(cell) == len(set(cell)) > 0 for cell in cells)  # the last one has the rest


async def test_questions_before_a_cell_are_not_counted(items: Sequence[WorkItem]) -> None:
    engine = TimedEngine(0.0)
    asker = Asker(Limited(engine), 5.0)
    matches = by_match(items)
    assert await asker.warm(matches[:2]) == 0
    warm = [(request.match_id, request.id.split("/")[1]) for request in engine.asked]
    assert warm == [(match[0].match_id, ply) for ply in ("0", "1") for match in matches[:2]]
    await asker.closed_loop([match[loops.WARM_PLIES :] for match in matches[:2]], 2, 9.0)
    ids = [request.id for request in engine.asked]
    assert len(set(ids)) == len(ids) == 60


async def test_a_warm_up_that_fails_is_counted(items: Sequence[WorkItem]) -> None:
    asker = Asker(Limited(RefusingEngine({})), 5.0)
    assert await asker.warm(by_match(items)[:3]) == 6


async def test_a_busy_engine_is_given_time_to_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "FORGET_PAUSE_S", 0.0)
    engine = TimedEngine(0.0)
    asker = Asker(Limited(engine), 5.0)
    answers = iter([False, True, False, False, True, *[False] * 9])

    async def forget() -> bool:
        return next(answers)

    monkeypatch.setattr(engine, "reset_prefix_cache", forget)
    # it never could; it can; it can after two more tries; it is busy for too long
    assert [await asker.forget() for _ in range(4)] == [False, True, True, False]


async def test_greedy_answers_are_asked_one_by_one(items: Sequence[WorkItem]) -> None:
    engine = TimedEngine(0.001)
    texts = await Asker(Limited(engine), 5.0).greedy(items[:10], 60.0)
    assert engine.most_inside == 1
    assert all(text in item.choices for text, item in zip(texts, items, strict=False))
    assert {request.sampling.temperature for request in engine.asked} == {0.0}
    assert await Asker(Limited(engine), 5.0).greedy(items[:3], -1.0) == [None] * 3


def test_one_template_makes_the_same_prompts_on_two_engines(tmp_path: Path) -> None:
    job = compare.prepare(config({"one": FAST, "two": SLOW}), (), options(tmp_path))
    one, two = (job.build(name).template for name in job.names)
    for item in job.workload.items:
        mine, theirs = one.render(item.parts), two.render(item.parts)
        assert isinstance(mine, TokenPrompt)
        assert isinstance(theirs, TokenPrompt)
        assert mine.ids is not theirs.ids
        assert list(mine.ids) == list(theirs.ids)


def test_each_cell_and_repeat_begins_with_other_matches(tmp_path: Path) -> None:
    chosen = options(tmp_path, repeats=2, concurrencies=(1, 2))
    job = compare.prepare(config({"one": FAST}), (), chosen)
    closed = [cell for cell in job.cells if cell.loop == "closed"]
    first = [job.matches(repeat, cell)[0][0].match_id for repeat in (0, 1) for cell in closed]
    assert len(set(first)) == 4
    for repeat in (0, 1):
        for cell in closed:
            assert set(job.matches(repeat, cell)) == set(job.workload.matches)
    assert Counter(job.shuffled_cells(0)) == Counter(job.cells)


def test_each_open_loop_begins_elsewhere_with_its_matches_under_way(tmp_path: Path) -> None:
    job = compare.prepare(config({"one": FAST}), (), options(tmp_path, repeats=3))
    arrivals = {(item.match_id, item.ply): item.arrival_s for item in job.workload.items}
    begins = []
    for repeat in range(3):
        before, coming = job.stretch(repeat)
        (begin,) = {round(arrivals[i.match_id, i.ply] - i.arrival_s, 6) for i in coming}
        begins.append(begin)
        assert len(coming) == sum(at >= begin for at in arrivals.values())
        for match in filter(None, before):
            (after, *_) = [item.ply for item in coming if item.match_id == match[0].match_id]
            assert [item.ply for item in match] == list(range(after))[-loops.WARM_PLIES :]
        # from there on as many are under way as are played at once, to the end of the cell
        for at in (0.0, 0.35):
            known = {item.match_id for match in before for item in match}
            known |= {item.match_id for item in coming if item.arrival_s <= at}
            assert len(known & {i.match_id for i in coming if i.arrival_s >= at}) >= 2
    assert begins == sorted(set(begins))
    assert begins[0] == pytest.approx(0.4)


def test_a_workload_that_is_too_short_for_a_steady_load_is_told(tmp_path: Path) -> None:
    games = {"games": ["chess"], "pairs": 1, "parallel_matches": 2, "max_plies": 6}
    asked = options(tmp_path)
    result = asyncio.run(compare.run(config({"one": FAST}, tournament=games), (), asked))
    told = [text for text in result["notes"] if text.startswith("the open loop: ")]
    assert len(told) == 1
    assert "keeps 2 matches under way for 0." in told[0]


def test_a_saved_workload_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    saved = compare.prepare(config({"one": FAST}), (), options(tmp_path, save_workload=path))
    other = config({"one": FAST}, seed=99, pace={"move_period_seconds": 0})
    assert compare.prepare(other, (), options(tmp_path, workload=path)).workload == saved.workload


# refusals


@pytest.mark.parametrize(
    ("names", "changes", "told"),
    [
        (("three",), {}, "--engine three: no engine is named so; engines: one, two"),
        (("one", "one"), {}, "--engine one: is named twice"),
        ((), {"seconds": 1e-9}, "--seconds: give 0.1 to 3600"),
        ((), {"repeats": 0}, "--repeats: give 1 to 100"),
        ((), {"concurrencies": (0,)}, "--concurrency: give numbers from 1 on"),
        ((), {"concurrencies": (2, 2)}, "--concurrency: give numbers from 1 on"),
        ((), {"concurrencies": (9,)}, "--concurrency: 9 questions at once need as many matches"),
        ((), {"workload": Path("missing.jsonl")}, "missing.jsonl: cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    tmp_path: Path, names: Sequence[str], changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as error:
        compare.prepare(config({"one": FAST, "two": SLOW}), names, options(tmp_path, **changes))
    assert str(error.value).startswith(told)
    assert "\n" not in str(error.value)


def test_a_context_that_is_too_small_is_refused_with_both_numbers(tmp_path: Path) -> None:
    small = {**FAST, "context_tokens": 256}
    with pytest.raises(ConfigError, match=r"engines\.two\.context_tokens: is 256, and .* takes \d"):
        compare.prepare(config({"one": FAST, "two": small}), (), options(tmp_path))


def test_an_engine_that_cannot_be_is_refused(tmp_path: Path) -> None:
    engines = {"one": FAST, "two": {"kind": f"{OWN}:NoSuchEngine"}}
    with pytest.raises(ConfigError, match=r"engines\.two: .*NoSuchEngine"):
        compare.prepare(config(engines), (), options(tmp_path))


def test_the_config_that_ships_compares_engines_with_equal_limits() -> None:
    shipped = configs.load(Path(compare.__file__).parents[1] / "configs" / "compare.toml")
    knobs = {name: compare.knobs_of(shipped.engine(name)) for name in shipped.engines}
    rows = {row["knob"]: row for row in unequal_of(knobs, matches=8)}
    main = {name: values for name, values in knobs.items() if name != "llama_server_2_slots"}
    for knob in ("max_concurrent", "max_queued", "context_tokens"):
        assert len({values[knob] for values in main.values()}) == 1
    assert rows["slots"]["values"]["llama_server_2_slots"] == 2
    assert rows["weights"]["values"]["llama_server"].endswith("Q4_1.gguf")
    assert rows["weights"]["values"]["vllm"].endswith("Q4_1.gguf, dequantised")
    assert "GGUF" in rows["dtype"]["values"]["llama_server"]


# figures


def reply(text: str = "e2e4", *, cached: int | None = 90) -> Reply:
    return Reply(text, Finish.STOP, Usage(100, 5, cached), Timings(0, 0, 0.1, 1, None, None, None))


def answer(due: float, done: float, fault: str | None = None, **more: Any) -> Answer:
    made = Answer(due, due, done, None if fault else reply(), fault)
    return replace(made, **more)


def measured(*answers: Answer, seconds: float = 10.0) -> Measurement:
    return Measurement(0.0, seconds, answers, {2: 3, 4: 1})


def record_of(runs: Sequence[Measurement | None]) -> EngineRecord:
    record = EngineRecord("one", "scripted", None, 4, {})
    record.cells = {OPEN: list(runs)}
    return record


def test_a_cell_in_figures() -> None:
    run = measured(
        answer(0.0, 0.5),
        answer(1.0, 3.0, sent=1.25),
        answer(2.0, 2.1, "overloaded"),
        answer(9.5, 10.2),
    )
    row = figures.cell_row(record_of([run, None]), OPEN, slo_s=1.0, plies_per_game=40)
    assert row["moves_per_s"] == [0.2, None]
    assert row["games_per_h"] == pytest.approx(0.2 * 3600 / 40)
    assert row["slo_attainment"] == 0.5
    assert row["offered"] == 4
    assert row["errors"] == {"overloaded": 1}
    assert row["latency_ms"]["max"] == 2000
    # 500, 700, 2000 and one that never came
    assert row["latency_ms"]["mean"] == pytest.approx(3200 / 3)
    assert row["latency_ms"]["p50"] == pytest.approx(1350)
    assert row["latency_ms"]["p95"] is None
    assert row["ttft_ms"]["p50"] == pytest.approx(100)
    assert row["schedule_lag_ms"]["max"] == 250
    assert row["uncached_prompt_tokens_per_move"] == 10
    assert row["prefix_hit_rate"] == 0.9
    assert row["output_tokens_per_s"] == 1.0
    assert row["occupancy"]["mean"] == pytest.approx((2 * 3 + 4) / 4 / 4)
    assert row["in_flight"] == pytest.approx((0.5 + 1.75 + 0.1 + 0.5) / 10)
    assert row["repeats"][1] is None


def test_prompts_that_nobody_counted_are_in_no_figure() -> None:
    untold = replace(reply(), usage=Usage(None, 5, 90))
    run = measured(answer(0.0, 0.5), answer(1.0, 1.5, reply=untold))
    row = figures.cell_row(record_of([run]), OPEN, slo_s=1.0, plies_per_game=40)
    assert (row["prompt_tokens_per_move"], row["uncached_prompt_tokens_per_move"]) == (100, 10)


@pytest.mark.parametrize(
    ("done", "faults", "median_s"),
    [
        ((1, 2, 3), 0, 2.0),
        ((1, 2), 1, 2.0),
        ((1, 2), 2, None),
        ((1, 2, 3), 2, 3.0),
        ((1,), 0, 1.0),
        ((), 1, None),
        ((), 0, None),
    ],
)
def test_a_percentile_is_of_all_that_were_offered(
    done: Sequence[float], faults: int, median_s: float | None
) -> None:
    refused = [answer(0.0, 0.001, "overloaded")] * faults
    run = measured(*(answer(0.0, at) for at in done), *refused)
    row = figures.cell_row(record_of([run]), OPEN, slo_s=9.0, plies_per_game=1)
    assert row["latency_ms"]["p50"] == (None if median_s is None else pytest.approx(median_s * 1e3))
    assert row["latency_ms"]["max"] == (max(done) * 1000 if done else None)


def test_one_that_refuses_most_is_not_called_faster() -> None:
    """Of its answers alone it was, as those came in 20 ms."""
    refused = [answer(0.0, 0.001, "overloaded")] * 40
    refuser = measured(*(answer(0.0, 0.02) for _ in range(10)), *refused)
    honest = measured(*(answer(0.0, 0.05) for _ in range(50)))
    cells = []
    for name, run in (("refuser", refuser), ("honest", honest)):
        record = replace(record_of([run] * 3), name=name)
        cells.append(figures.cell_row(record, OPEN, slo_s=1.0, plies_per_game=1))
    (row,) = figures.differences(cells)
    assert (row["metric"], row["better"]) == ("slo_attainment", "honest")
    (note,) = figures.notes(cells, 10.0)
    assert note.startswith("refuser, open: 120 of 150 questions got no legal move, so percentiles")


def in_step(took: float, seconds: float, workers: int = 16) -> Measurement:
    """A closed loop of an engine that answers all workers at once."""
    rounds = [number * took for number in range(1, int(seconds / took) + 2)]
    answers = [answer(at, at + took) for at in rounds for _ in range(workers)]
    return Measurement(took, took + seconds, tuple(answers), {}, begins_full=True)


def in_turn(rate: float, seconds: float, workers: int = 16) -> Measurement:
    """A closed loop of an engine that answers one at a time."""
    whole = workers / rate
    first = [number / rate for number in range(1, workers)]
    later = [whole + number / rate for number in range(int(seconds * rate) + 1)]
    answers = [answer(at, at + whole) for at in first + later]
    return Measurement(whole, whole + seconds, tuple(answers), {}, begins_full=True)


@pytest.mark.parametrize("took", [0.099, 0.1, 0.101, 0.7])
def test_moves_a_second_do_not_jump_by_a_batch(took: float) -> None:
    """2 % apart were 10 %."""
    assert in_step(took, 1.0).moves_per_s == pytest.approx(16 / took)


def test_moves_a_second_are_the_same_of_a_batch_and_of_a_queue() -> None:
    assert in_turn(160.0, 1.0).moves_per_s == pytest.approx(160, rel=0.01)
    assert in_step(0.1, 1.0).moves_per_s == pytest.approx(160)


def test_a_queue_that_only_grows_tells_no_more_than_was_answered() -> None:
    """An open loop at twice the capacity."""
    asked = [answer(number / 20, number / 10 + 0.1) for number in range(200)]
    assert measured(*asked).moves_per_s == pytest.approx(10, rel=0.02)


def cell_of(engine: str, rates: Sequence[float], tokens: float = 100.0) -> dict[str, Any]:
    repeats = [
        {
            "seconds": 10.0,
            "moves_per_s": rate,
            "latency_p50_ms": 1000 / rate if rate else None,
            "latency_p95_ms": None,
        }
        for rate in rates
    ]
    return {
        "engine": engine,
        "loop": "closed",
        "concurrency": 4,
        "repeats": repeats,
        "prompt_tokens_per_move": tokens,
        "schedule_lag_ms": {"p50": 0.0},
        "latency_ms": {"p99": None},
        "offered": 100,
        "errors": {},
        "overlapping": 0,
        "warm_up_failed": 0,
        "restarts": 0,
    }


@pytest.mark.parametrize(
    ("mine", "theirs", "within", "better"),
    [
        ((10, 11, 12), (20, 21, 22), False, "two"),
        ((20, 21, 22), (10, 11, 12), False, "one"),
        ((10, 11, 12), (12, 13, 14), True, None),
        ((10, 11, 30), (12, 13, 14), True, None),
        ((10, 10, 10), (10, 10, 10), True, None),
        ((10, 11), (20, 21, 22), None, None),
    ],
)
def test_a_difference_is_one_where_the_ranges_do_not_meet(
    mine: Sequence[float], theirs: Sequence[float], within: bool | None, better: str | None
) -> None:
    rows = figures.differences([cell_of("one", mine), cell_of("two", theirs)])
    by_metric = {row["metric"]: row for row in rows}
    assert by_metric.keys() == {"moves_per_s", "latency_p50_ms"}
    for row in by_metric.values():
        assert (row["is_within_spread"], row["better"]) == (within, better)
    rate = by_metric["moves_per_s"]
    assert rate["ratio"] == median(mine) / median(theirs)
    assert rate["ratio_low"] == min(mine) / max(theirs)
    assert rate["ratio_high"] == max(mine) / min(theirs)


def test_a_figure_that_a_repeat_lacks_is_not_compared() -> None:
    cells = [cell_of("one", (5, 6, 7)), cell_of("two", (0, 4, 5, 6))]
    assert cells[1]["repeats"][0]["latency_p50_ms"] is None
    assert [row["metric"] for row in figures.differences(cells)] == ["moves_per_s"]
    cells[1]["repeats"][0] = None
    assert len(figures.differences(cells)) == 2


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ((2, 4, 5), "1.50 × two (1.00 to 3.50 over the repeats): within the spread, no difference"),
        ((0, 4, 4.5), "1.50 × two (at least 1.11 over the repeats): one is better"),
        ((0, 0, 4), "at least 1.25 × two, whose median is 0: one is better"),
        ((0, 0, 0), "against none of two: one is better"),
    ],
)
def test_a_repeat_of_none_takes_no_more_from_a_ratio_than_it_must(
    theirs: Sequence[float], told: str
) -> None:
    """One of three was told as none at all."""
    rows = figures.differences([cell_of("one", (5, 6, 7)), cell_of("two", theirs)])
    (text,) = [text for text in difference_texts(rows) if "moves a second" in text]
    assert text.startswith(f"closed 4, moves a second: one {told}")


def unequal_of(
    knobs: dict[str, dict[str, Any]],
    *,
    matches: int,
    cells: Sequence[dict[str, Any]] = (),
    forgets: Callable[[str], bool] = lambda name: True,
) -> list[dict[str, Any]]:
    records = [EngineRecord(name, "k", None, 4, {}, forgets=forgets(name)) for name in knobs]
    return figures.unequal(records, knobs, cells, matches)


def test_knobs_that_differ_are_told_with_every_engine_s_value() -> None:
    knobs = {"one": {"max_concurrent": 4, "dtype": "a"}, "two": {"max_concurrent": 8, "dtype": "a"}}
    assert unequal_of(knobs, matches=8) == [
        {"knob": "max_concurrent", "values": {"one": 4, "two": 8}, "note": ""}
    ]


def test_fewer_slots_than_matches_are_told() -> None:
    knobs: dict[str, dict[str, Any]] = {"one": {"slots": None}, "two": {"slots": 16}}
    assert unequal_of(knobs, matches=16) == []
    (row,) = unequal_of(knobs, matches=17)
    assert row["values"] == {"two": 16}
    assert "17 matches" in row["note"]


def test_prompts_of_other_lengths_are_told() -> None:
    cells = [cell_of("one", (1,), 100.0), cell_of("two", (1,), 109.0)]
    assert unequal_of({"one": {}, "two": {}}, matches=1, cells=cells) == []
    cells[1]["prompt_tokens_per_move"] = 112.0
    (row,) = unequal_of({"one": {}, "two": {}}, matches=1, cells=cells)
    assert row["knob"] == "prompt tokens a move, closed 4"


def test_an_open_loop_that_lags_or_overlaps_is_told() -> None:
    on_time = {**cell_of("one", (1,)), "loop": "open"}
    assert figures.notes([on_time, cell_of("two", (1,))], 10.0) == []
    (late,) = figures.notes([{**on_time, "schedule_lag_ms": {"p50": 25.0}}], 10.0)
    assert late.startswith("one, open loop: the median question left 25 ms after")
    (overlapping,) = figures.notes([{**on_time, "overlapping": 12}], 10.0)
    assert overlapping.startswith("one, open loop: 12 of 100 questions left before")


def test_what_a_cell_is_short_of_is_told() -> None:
    cell = cell_of("one", (1, 2, 3))
    assert figures.notes([cell], 11.0) == []
    assert figures.notes([cell], 12.0) == [
        "one, closed 4: ran out of questions after 10.00 s of 12, which is all that its figures "
        "are of; raise tournament.pairs"
    ]
    assert figures.notes([{**cell, "warm_up_failed": 3, "restarts": 2}], 10.0) == [
        "one, closed 4: 3 questions of the warm-up got no legal move, so it began with less in "
        "the cache",
        "one, closed 4: was started again 2 times, which its figures hold",
    ]


@pytest.mark.parametrize(
    ("text", "finish", "fault"),
    [
        ("e2e4", Finish.STOP, None),
        ("e2e4", Finish.LENGTH, None),
        ("e2", Finish.LENGTH, "cut_short"),
        ("", Finish.STOP, "cut_short"),
        ("I resign", Finish.STOP, "constraint_ignored"),
        ("e2", Finish.DEADLINE, "stalled"),
    ],
)
def test_what_is_wrong_with_an_answer(text: str, finish: Finish, fault: str | None) -> None:
    assert loops.fault_of(replace(reply(text), finish=finish), ("e2e4", "d2d4")) == fault


# shown


def renamed(result: dict[str, Any]) -> dict[str, Any]:
    """The result with an engine of a hostile name."""
    text = json.dumps(result).replace('"fast"', json.dumps(HOSTILE))
    return dict(json.loads(text))


def test_the_page_runs_nothing_but_its_own_scripts(healthy: Compared) -> None:
    page = compare_page.page(renamed(healthy.result))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert "default-src 'none'" in policy[1]
    assert not re.search(r"script-src[^;]*unsafe", policy[1])
    outside = re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)
    assert HOSTILE not in outside
    assert "&lt;/script&gt;&lt;b&gt;x" in outside
    assert not re.search(r"(src|href)=", outside)


def test_the_page_draws_every_engine(healthy: Compared) -> None:
    page = compare_page.page(renamed(healthy.result))
    found = re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    drawn = {figure["id"]: figure for figure in json.loads(found[1])}
    assert drawn.keys() == {"throughput", "latency", "occupancy", "attainment"}
    for name, figure in drawn.items():
        assert f'id="{name}"' in page
        names = {trace["name"] for trace in figure["data"]}
        # plotly reads markup in names, so it is given entities
        all_names = {"&lt;/script&gt;&lt;b&gt;x", "slow", "twin"}
        assert names == (set() if name == "occupancy" else all_names)
    (trace, *_) = drawn["throughput"]["data"]
    rates = sorted(healthy.cell("fast", "closed")["moves_per_s"])
    assert trace["x"] == ["1"]
    assert trace["y"] == [rates[1]]
    assert trace["error_y"]["array"] == [rates[2] - rates[1]]
    assert trace["error_y"]["arrayminus"] == [rates[1] - rates[0]]


def chart(result: dict[str, Any], name: str) -> dict[str, Any]:
    (drawn,) = [drawn for drawn in compare_page.figures(result["cells"]) if drawn["id"] == name]
    return drawn


def test_only_engines_with_something_to_draw_take_room_in_a_chart(healthy: Compared) -> None:
    """One engine's marks stood beside the place of an engine that tells no steps."""
    result = json.loads(json.dumps(healthy.result))
    for row in result["cells"]:
        if row["engine"] == "slow":
            row["occupancy"]["mean"] = 0.5
    drawn = chart(result, "occupancy")
    (trace,) = drawn["data"]
    assert trace["name"] == "slow"
    assert drawn["layout"]["showlegend"] is True
    assert drawn["layout"]["xaxis"]["categoryarray"] == trace["x"]


@pytest.mark.parametrize(
    ("fastest", "slowest", "marks"),
    [
        (5.1, 5.4, ["5", "10"]),
        (1000.0, 1000.0, ["500", "1,000", "2,000"]),
        (999.9999999999999, 999.9999999999999, ["500", "1,000"]),
        (12.0, 1500.0, ["10", "20", "50", "100", "200", "500", "1,000", "2,000"]),
        (9e5, 1.5e6, ["500,000", "1,000,000", "2,000,000"]),
        (0.02, 90_000.0, ["0.01", "0.1", "1", "10", "100", "1,000", "10,000", "100,000"]),
    ],
)
def test_latencies_can_be_read_off(
    healthy: Compared, fastest: float, slowest: float, marks: list[str]
) -> None:
    """The axis was marked 2, 5, 1000, 2, 5."""
    result = json.loads(json.dumps(healthy.result))
    for row in result["cells"]:
        row["latency_ms"] = {"p50": fastest, "p95": None, "p99": slowest}
    axis = chart(result, "latency")["layout"]["yaxis"]
    assert axis["ticktext"] == marks
    first, last = axis["range"]
    assert first < math.log10(axis["tickvals"][0]) < math.log10(axis["tickvals"][-1]) < last


def test_the_page_says_of_how_many_answers_engines_agree(healthy: Compared) -> None:
    page = compare_page.page(healthy.result)
    for pair in healthy.result["agreement"]["pairs"]:
        assert f"<td>{pair['share']:.1%} of {pair['n']}</td>" in page


def test_the_page_tells_what_failed(troubled: Compared) -> None:
    page = compare_page.page(troubled.result)
    assert "repeat 1 of 2, absent: no such device" in page
    assert "too few repeats" in page
    assert "Not equal" in page


def test_a_page_that_cannot_be_written_is_one_line(healthy: Compared, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be written"):
        compare_page.write(tmp_path / "missing" / "page.html", healthy.result)
    compare_page.write(tmp_path / "page.html", healthy.result)
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_the_terminal_shows_the_same(healthy: Compared, troubled: Compared) -> None:
    out = io.StringIO()
    print_compare(renamed(healthy.result), out)
    text = out.getvalue()
    assert "within the spread, no difference shown" in text
    assert f"{HOSTILE} is better" in text
    assert "n/a" in text
    out = io.StringIO()
    print_compare(troubled.result, out)
    assert "What kept cells from being measured" in out.getvalue()
    assert "overloaded" in out.getvalue()


def test_the_sample_takes_matches_in_order(tmp_path: Path) -> None:
    """So that one question finds the last one's prompt in the cache."""
    job = compare.prepare(config({"one": FAST}), (), options(tmp_path))
    assert len(job.sample) == 40
    for before, after in pairwise(job.sample):
        assert before.match_id != after.match_id or before.ply < after.ply
    assert len({item.match_id for item in job.sample}) == 4
    assert max(item.ply for item in job.sample) >= 25
