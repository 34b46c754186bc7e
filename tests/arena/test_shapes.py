"""Shapes of a request: what each asks for, and what is made of its answers."""

import asyncio
import html
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arena import config as configs
from arena import shapes, shapes_page, shapes_text, workload
from arena.compare_figures import Answer, Measurement
from arena.config import RunConfig
from arena.loops import Asker, fault_of
from arena.shapes import CHAT_TOKENS, LETTERS, LONG, SHAPES, SHORT, Cell
from arena.workload import Question, WorkItem, Workload
from games import load_game
from serving import (
    PACKAGED_MODEL,
    EngineConfigError,
    Finish,
    Limited,
    ModelTemplate,
    Overloaded,
    Reply,
    Request,
    Timings,
    Usage,
    load_template,
    resolve,
)
from tests.examples.own_engine import DiceEngine

GAMES = {"chess": 8, "janggi": 10}
"""And the ranks of their boards."""


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return configs.parse(
        {
            "name": "shapes",
            "seed": 3,
            "engines": {"main": {"kind": "scripted"}},
            "agents": [{"name": name, "kind": "llm", "engine": "main"} for name in "ab"],
            "tournament": {"games": list(GAMES), "pairs": 2, "max_plies": 30},
        }
    )


@pytest.fixture(scope="module")
def recorded(config: RunConfig) -> Workload:
    return workload.record(config)


@pytest.fixture(scope="module")
def fens(config: RunConfig, recorded: Workload) -> Mapping[tuple[str, int], str]:
    return shapes.fens(config, recorded)


@pytest.fixture(scope="module")
def template() -> ModelTemplate:
    try:
        return load_template(resolve(PACKAGED_MODEL).directory)
    except EngineConfigError as error:
        pytest.skip(str(error))


def game_of(item: WorkItem) -> str:
    return "janggi" if "janggi" in item.parts.system else "chess"


@pytest.fixture(scope="module")
def asked(
    recorded: Workload, fens: Mapping[tuple[str, int], str]
) -> Mapping[str, list[tuple[WorkItem, Question]]]:
    """Every item in every shape."""
    return {
        name: [
            (item, shape.question(item, fens[item.match_id, item.ply])) for item in recorded.items
        ]
        for name, shape in SHAPES.items()
    }


Asked = Mapping[str, list[tuple[WorkItem, Question]]]


# positions


def test_a_position_is_the_one_that_is_to_be_moved_in(
    recorded: Workload, fens: Mapping[tuple[str, int], str]
) -> None:
    """Read anew from its text, chess has the item's legal moves, and janggi's board its side."""
    for item in recorded.items:
        name, fen = game_of(item), fens[item.match_id, item.ply]
        assert fen.split()[0].count("/") == GAMES[name] - 1
        assert fen.split()[1] == "wb"[item.side]
        if name == "chess":
            game = load_game("chess")
            start = replace(game.openings("start", "standard")[0], fen=fen)
            assert game.position(start).legal_moves() == item.choices


# what is asked


def test_a_shape_tells_the_position_or_the_moves(
    asked: Asked, fens: Mapping[tuple[str, int], str]
) -> None:
    for name in "ABCDE":
        for item, question in asked[name]:
            assert f"Position (FEN): {fens[item.match_id, item.ply]}\n" in question.parts.lead
            assert question.parts.moves == ()
            assert question.parts.system == item.parts.system
    for name in ("F", "G", "default", "mixed"):
        assert all(question.parts == item.parts for item, question in asked[name])


def test_the_default_is_what_agents_ask(asked: Asked) -> None:
    for item, question in asked["default"]:
        assert question == workload.as_agents_ask(item)
        assert question.choices == item.choices
        assert question.max_tokens == max(map(len, item.choices)) + 1


def test_a_chat_writes_200_tokens_and_only_a_reads_no_cache(asked: Asked) -> None:
    for name in "AB":
        for _, question in asked[name]:
            assert question.choices is None
            assert question.max_tokens == question.sampling.min_tokens == CHAT_TOKENS == 200
    cached = {name: {q.use_prefix_cache for _, q in pairs} for name, pairs in asked.items()}
    assert cached == {name: {name != "A"} for name in SHAPES}
    assert [q.parts for _, q in asked["A"]] == [q.parts for _, q in asked["B"]]


def test_a_move_can_only_be_legal(asked: Asked) -> None:
    for item, question in asked["C"]:
        assert (question.choices, question.max_tokens) == (item.choices, item.max_tokens)
    for item, question in asked["F"]:
        # the longest move fits, and nothing after it
        assert question.choices == item.choices
        assert question.max_tokens == max(map(len, item.choices))


@pytest.mark.parametrize("name", ["D", "E", "G"])
def test_a_letter_is_one_token_of_as_many_as_there_are_moves(asked: Asked, name: str) -> None:
    for item, question in asked[name]:
        assert question.max_tokens == 1
        assert question.choices == tuple(LETTERS[: len(item.choices)])
        assert len(question.choices) == len(item.choices)


def test_a_list_has_every_legal_move_by_its_letter(asked: Asked) -> None:
    for item, question in asked["D"]:
        words = question.parts.tail_note.split()
        assert tuple(words[::2]) == question.choices
        assert tuple(words[1::2]) == item.choices


def test_mixed_lengths_are_mixed_as_they_are_said_to_be(asked: Asked) -> None:
    lengths = []
    for _, question in asked["mixed"]:
        assert question.choices is None
        assert question.max_tokens == question.sampling.min_tokens
        lengths.append(question.max_tokens)
    long = [length for length in lengths if length >= LONG[0]]
    assert all(SHORT[0] <= length <= SHORT[1] or length in range(64, 161) for length in lengths)
    assert 0.05 < len(long) / len(lengths) < 0.25
    assert (SHORT, LONG) == ((6, 32), (64, 160))


def test_what_primes_brings_the_prompt_and_writes_next_to_nothing(asked: Asked) -> None:
    for pairs in asked.values():
        for _, question in pairs:
            primer = shapes.priming(question)
            assert primer.parts == question.parts
            assert (primer.choices, primer.max_tokens, primer.sampling.min_tokens) == (None, 1, 0)


def test_an_engine_may_not_know_least_lengths(asked: Asked) -> None:
    for _, question in asked["A"]:
        freed = shapes.without_least(question)
        assert (freed.max_tokens, freed.sampling.min_tokens) == (CHAT_TOKENS, 0)
        assert freed.sampling.seed == question.sampling.seed


# tokens


def test_letters_are_tokens(template: ModelTemplate) -> None:
    assert len(LETTERS) == len(set(LETTERS)) == 62
    assert all(len(template.encode(letter)) == 1 for letter in LETTERS)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    for at, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return at
    return min(len(one), len(other))


def ids(template: ModelTemplate, question: Question) -> Sequence[int]:
    return template.render(question.parts).ids


def test_a_position_shares_the_rules_and_a_transcript_the_match(
    asked: Asked, template: ModelTemplate
) -> None:
    """Of two prompts in a row of a match: by position they part where it is told, though it is the
    same game; the transcript's parts only at what is new."""
    for name, is_growing in (("C", False), ("default", True)):
        by_match: dict[str, list[tuple[WorkItem, Question]]] = {}
        for item, question in asked[name]:
            by_match.setdefault(item.match_id, []).append((item, question))
        for match in by_match.values():
            for (_, before), (item, now) in itertools.pairwise(match):
                old, new = ids(template, before), ids(template, now)
                shared, rules = common(old, new), len(template.encode(item.parts.system))
                # what closes the prompt follows the moves
                assert len(old) - shared < 16 if is_growing else len(old) - shared > 8
                assert shared > rules
                uncached = len(new) - shared
                assert uncached < 24 if is_growing else 12 < uncached < 120


def test_a_listing_costs_what_it_lists(asked: Asked, template: ModelTemplate) -> None:
    for (item, by_list), (_, alone) in zip(asked["D"], asked["E"], strict=True):
        more = len(ids(template, by_list)) - len(ids(template, alone))
        assert more >= 4 * len(item.choices)


# what was measured


def answer(sent: float, done: float, fault: str | None = None, **usage: Any) -> Answer:
    timings = Timings(sent, sent, None, done, None, None, None)
    told = Usage(**{"prompt": 400, "completion": 5, "cached": 370, **usage})
    reply = Reply("e2e4", Finish.STOP, told, timings, 4.0)
    return Answer(sent, sent, done, reply if fault is None else None, fault)


def run(*answers: Answer, ended: float = 20.0) -> Measurement:
    return Measurement(10.0, ended, answers, {})


def test_a_cell_is_told_over_its_repeats() -> None:
    cell = Cell("default", 4, "continuous")
    runs = [run(answer(10, 11), answer(11, 13, cached=390)), run(answer(10, 12, "transport"))]
    row = shapes.cell_row(cell, runs)
    assert row["moves_per_s"] == pytest.approx([0.2, 0.0])
    assert (row["uncached"], row["output_tokens"], row["prompt_tokens"]) == (20, 5, 400)
    assert (row["p50_ms"], row["p95_ms"]) == pytest.approx((1500, 1950))
    assert (row["step_requests"], row["answers"]) == (4, 2)
    assert row["errors"] == {"transport": 1}
    assert shapes.cell_of(row) == cell


def test_an_answer_that_reaches_into_the_window_counts_in_part() -> None:
    half = answer(0, 20, completion=100)
    whole = answer(10, 20, completion=10)
    full = Measurement(10.0, 20.0, (half, whole), {}, begins_full=True)
    row = shapes.cell_row(Cell("mixed", 2, "continuous"), [full])
    assert row["output_tokens"] == pytest.approx((10 + 0.5 * 100) / 1.5)
    assert row["moves_per_s"] == pytest.approx([0.15])


def test_what_an_engine_does_not_say_is_unknown() -> None:
    row = shapes.cell_row(Cell("A", 4, "continuous"), [run(answer(10, 11, cached=None))])
    assert row["uncached"] is None


def rows(rates: Mapping[Cell, Sequence[float]], streams: int = 4) -> list[dict[str, Any]]:
    """Of all cells; those not told make one move a second."""
    made = [shapes.cell_row(cell, [run(answer(10, 11))] * 3) for cell in shapes.cells(streams)]
    for row in made:
        if row["shape"] in ("A", "B"):
            row["output_tokens"] = CHAT_TOKENS
        row["moves_per_s"] = list(rates.get(shapes.cell_of(row), (1.0, 1.0, 1.0)))
    return made


def test_cells_are_all_shapes_then_waves_then_one_stream() -> None:
    told = list(map(str, shapes.cells(16)))
    assert told[0] == "A, 16 streams"
    assert [name.partition(",")[0] for name in told[:9]] == list(SHAPES)
    assert told[9:] == [
        "default, 16 streams in waves",
        "mixed, 16 streams in waves",
        "default, one stream",
        "A, one stream",
    ]
    assert len(set(told)) == 13


def test_a_cell_that_is_not_what_its_name_says_is_told() -> None:
    told = rows({})  # windows of 10 s
    told[0]["uncached"] = told[0]["prompt_tokens"]
    told[-1]["uncached"] = None
    assert list(shapes.notes(told, 10.0)) == []
    (short,) = shapes.notes(told, 20.0)
    assert short.startswith("13 of 13 cells ran out of questions, the first after 10.00 of 20 s")
    told[0] |= {"uncached": 90.0, "output_tokens": 30.0}
    assert list(shapes.notes(told, 10.0)) == [
        "A, 4 streams: the prefix cache could not be turned off",
        "A, 4 streams: answers are of 30.0 tokens instead of 200",
    ]


def test_a_ratio_is_of_cells_of_the_same_repeat() -> None:
    """A machine that is ten times slower in one repeat changes no ratio."""
    full, first = Cell("default", 4, "continuous"), Cell("A", 4, "continuous")
    alone = Cell("default", 1, "continuous")
    found = shapes.ratios(
        rows({full: (60.0, 6.0, 90.0), first: (2.0, 0.2, 2.0), alone: (20.0, 1.5, 45.0)})
    )
    assert [(row["ratio"], row["least"], row["most"]) for row in found[:2]] == [
        (pytest.approx(30), pytest.approx(30), 45),
        (3, 2, 4),
    ]
    assert [(Cell(**row["cell"]), Cell(**row["to"])) for row in found] == [
        (full, first),
        (full, alone),
        (full, Cell("A", 1, "continuous")),
        (full, Cell("default", 4, "waves")),
        (Cell("mixed", 4, "continuous"), Cell("mixed", 4, "waves")),
    ]


# asking


class CountingEngine(DiceEngine):
    """Answers the n-th of what is inside after n turns of the loop, and notes how many were inside
    when each was asked."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__({"max_concurrent": 64, **config})
        self.requests: list[Request] = []
        self.inside: list[int] = []
        self._now = 0

    async def generate(self, request: Request) -> Reply:
        self._now += 1
        self.requests.append(request)
        self.inside.append(self._now)
        try:
            for _ in range(self._now):
                await asyncio.sleep(0)
            return await super().generate(request)
        finally:
            self._now -= 1


async def test_a_wave_waits_for_its_last_answer(recorded: Workload) -> None:
    engine = CountingEngine({})
    run = await Asker(Limited(engine), 5.0).waves(recorded.matches[:4], 4, 60.0)
    assert engine.inside == [1, 2, 3, 4] * 30
    plies = [request.id.split("/")[1] for request in engine.requests]
    assert plies == [str(ply) for ply in range(30) for _ in range(4)]
    assert len(run.answers) == 120
    assert all(answer.fault is None and answer.done <= run.ended for answer in run.answers)
    # with fewer matches than places in a wave none is whole
    alone = await Asker(Limited(CountingEngine({})), 5.0).waves(recorded.matches[:3], 4, 60.0)
    assert alone.answers == ()


async def test_waves_end_with_the_first_after_the_time(recorded: Workload) -> None:
    engine = CountingEngine({})
    run = await Asker(Limited(engine), 5.0).waves(recorded.matches, 4, 1e-9)
    assert len(run.answers) == len(engine.requests) == 4
    assert run.ended > run.began


class FullEngine(DiceEngine):
    """Refuses whatever it is asked."""

    async def generate(self, request: Request) -> Reply:
        raise Overloaded("the queue is full")


async def test_waves_that_are_refused_are_not_asked_at_once_again(recorded: Workload) -> None:
    run = await Asker(Limited(FullEngine({})), 5.0).waves(recorded.matches, 2, 0.2)
    assert {answer.fault for answer in run.answers} == {"overloaded"}
    assert 2 <= len(run.answers) <= 2 * 6


async def test_a_question_is_asked_as_its_shape_has_it(
    recorded: Workload, fens: Mapping[tuple[str, int], str]
) -> None:
    for name, shape in SHAPES.items():
        engine = CountingEngine({})

        def question(item: WorkItem, shape: shapes.Shape = shape) -> Question:
            return shape.question(item, fens[item.match_id, item.ply])

        asker = Asker(Limited(engine), 5.0, question)
        answered = await asker.closed_loop([recorded.matches[0][:4]], 1, 60.0)  # the first opens it
        assert [answer.fault for answer in answered.answers] == [None] * 3
        for item, request in zip(recorded.matches[0], engine.requests, strict=False):
            told = question(item)
            assert request.choices == told.choices, name
            assert request.max_tokens == told.max_tokens
            assert request.sampling == told.sampling
            assert request.use_prefix_cache is (name != "A")
            assert request.prompt == engine.template.render(told.parts)


@pytest.mark.parametrize(
    ("finish", "fault"),
    [(Finish.STOP, None), (Finish.LENGTH, None), (Finish.DEADLINE, "stalled")],
)
def test_a_free_answer_need_only_be_whole(finish: Finish, fault: str | None) -> None:
    replied = answer(0, 1).reply
    assert replied is not None
    assert fault_of(replace(replied, text="I would castle", finish=finish), None) == fault


# shown


@pytest.fixture
def result() -> dict[str, Any]:
    full, waves = Cell("default", 4, "continuous"), Cell("default", 4, "waves")
    made = rows({full: (60.0, 58.0, 61.0), waves: (40.0, 50.0, 45.0)})
    return {
        "schema_version": 1,
        "name": "<b>x",
        "engine": {
            "name": "main",
            "kind": "scripted",
            "version": "1",
            "model": "m",
            "max_concurrent": 4,
        },
        "streams": 4,
        "seconds": 10.0,
        "repeats": 3,
        "workload": {"digest": "d", "source": "random play, seed 3", "items": 9, "matches": 4},
        "cells": made,
        "ratios": shapes.ratios(made),
        "notes": ["a note"],
    }


def test_the_table_has_medians_and_ranges(result: dict[str, Any]) -> None:
    (table,) = shapes_text.tables(result)
    by_cell = {row[:2]: row for row in table.rows}
    assert len(by_cell) == 13
    assert by_cell["default", "4"][2:4] == ("60.0 (58.0–61.0)", "60.0")
    assert by_cell["default", "4 in waves"][2:4] == ("45.0 (40.0–50.0)", "45.0")
    assert by_cell["A", "1"][2:4] == ("1.00 (1.00–1.00)", "1.00")
    told = shapes_text.lines(result)
    assert told[0] == "default, 4 streams: 60.0 × A, 4 streams (58.0–61.0 over the repeats)"
    assert told[3] == (
        "default, 4 streams: 1.36 × default, 4 streams in waves (1.16–1.50 over the repeats)"
    )
    assert told[-1] == "a note"


def test_charts_draw_what_the_table_holds(result: dict[str, Any]) -> None:
    drawn = {chart["id"]: chart for chart in shapes_page.figures(result)}
    assert list(drawn) == ["shapes", "cost", "latency", "waves"]
    full, alone = drawn["shapes"]["data"]
    assert full["x"] == list(SHAPES)
    assert full["y"][full["x"].index("default")] == 60.0
    assert full["error_y"]["array"][full["x"].index("default")] == 1.0
    assert alone["x"] == ["default", "A"]
    waves, continuous = drawn["waves"]["data"]
    assert waves["x"] == continuous["x"] == ["default", "mixed"]
    assert (waves["y"], continuous["y"]) == ([45.0, 1.0], [60.0, 1.0])
    assert drawn["cost"]["data"][0]["y"] == [30.0] * 9


def test_the_page_shows_names_as_text(result: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "shapes.html"
    shapes_page.write(path, result)
    page = path.read_text()
    assert "<b>x" not in page.partition("<script")[0]
    assert "&lt;b&gt;x: shapes of a request" in page
    for shape in SHAPES.values():
        assert html.escape(shape.about) in page
