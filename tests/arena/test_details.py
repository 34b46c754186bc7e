"""One match whole, as the page opens it."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena.details import match_detail
from arena.figures import Figures
from arena.follow import MatchRecords
from arena.frames import board
from arena.store import AttemptRow, PlyRow, Records
from tests.arena.random_runs import RUN, random_run, records, scheduled

MATCH = scheduled(0, ("ann", "bob"), ("chess", "standard"))._replace(state="running", started=9.0)


def of_match(held: Records, match_id: str) -> MatchRecords:
    return MatchRecords(
        next(row for row in held.matches if row.id == match_id),
        tuple(row for row in held.plies if row.match_id == match_id),
        tuple(row for row in held.attempts if row.match_id == match_id),
    )


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_a_match_has_its_board_all_its_moves_and_every_attempt_once(seed: int) -> None:
    held = records(random_run(seed))
    figures = Figures(RUN, held.matches, exact=True)
    figures.add(held.rows())
    for row in held.matches:
        of_this = of_match(held, row.id)
        told = match_detail(of_this, 1000.0, 1.0)
        shown = board(figures.matches[row.id], 1.0)
        assert {key: told[key] for key in shown} == shown
        assert [ply["ply"] for ply in told["plies"]] == list(range(len(of_this.plies)))
        attempts = [a for ply in told["plies"] for a in ply["attempts"]] + told["pending"]
        assert [a["prompt_tokens"] for a in attempts] == [a.prompt_tokens for a in of_this.attempts]
        json.dumps(told, allow_nan=False)


@given(st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_the_moves_times_are_those_of_the_report(seed: int) -> None:
    held = records(random_run(seed))
    figures = Figures(RUN, held.matches, exact=True)
    figures.add(held.rows())
    figures.settle()
    times: dict[tuple[str, str, str], list[float]] = {}
    for row in held.matches:
        for ply in match_detail(of_match(held, row.id), 1000.0, 1.0)["plies"]:
            for part in ("latency", "queue", "prefill", "decode"):
                value = ply[f"{part}_ms"]
                game = "janggi/janggimodern" if row.ruleset == "janggimodern" else row.game
                if value is not None:
                    times.setdefault((row.agents[ply["side"]], game, part), []).append(value)
    for (name, game), agent in figures.agents.items():
        for part, distribution in agent.times.items():
            if part == "harness":  # an agent's has the commits in it
                continue
            values = times.get((name, game, part), [])
            assert (distribution.sketch().count, distribution.summary()["max"]) == (
                len(values),
                max(values, default=None),
            )


def ply(number: int, ready: float, due: float, done: float) -> PlyRow:
    return PlyRow(
        MATCH.id, number, number % 2, "e2e4", "e4", f"fen{number}", None, ready, due, done
    )


def attempt(number: int, tries: int, **changes: object) -> AttemptRow:
    head = (f"{MATCH.id}/{number}/0/{tries}", MATCH.id, number, number % 2, tries, "main", "free")
    return AttemptRow(*head, **changes)  # type: ignore[arg-type]


def test_a_late_move_is_marked_by_the_slo() -> None:
    plies = (ply(0, 10.0, 10.0, 10.5), ply(1, 10.5, 10.5, 11.0))
    told = match_detail(MatchRecords(MATCH, plies, ()), 500.0, 1.0)
    assert [p["late"] for p in told["plies"]] == [False, False]
    told = match_detail(MatchRecords(MATCH, plies, ()), 499.0, 1.0)
    assert [p["late"] for p in told["plies"]] == [True, True]


def test_attempts_beyond_the_last_move_are_pending() -> None:
    plies = (ply(0, 10.0, 10.0, 10.5),)
    attempts = (
        attempt(0, 0),
        attempt(1, 0, fault="illegal", detail="no", reply_text="MOVE: a9"),
        attempt(1, 1, fault="engine_dead"),
    )
    told = match_detail(MatchRecords(MATCH, plies, attempts), 1000.0, 1.0)
    assert [a["fault"] for a in told["pending"]] == ["illegal", "engine_dead"]
    assert told["pending"][0] == {
        "n": 0,
        "is_thought": False,
        "mode": "free",
        "fault": "illegal",
        "detail": "no",
        "reply_text": "MOVE: a9",
        "reasoning": None,
        "finish": None,
        "prompt_tokens": None,
        "cached_tokens": None,
        "completion_tokens": None,
    }
    assert len(told["plies"][0]["attempts"]) == 1


def test_a_match_that_has_not_begun_is_a_board_without_moves() -> None:
    waiting = MATCH._replace(state="scheduled", started=None)
    told = match_detail(MatchRecords(waiting, (), ()), 1000.0, 1.0)
    assert (told["plies"], told["pending"], told["ply"]) == ([], [], 0)
    assert told["fen"] == told["start_fen"] == MATCH.start_fen


def test_the_parts_of_a_move_add_up_to_its_time() -> None:
    """The commit, which the next move's turn waits for, is no part of it."""
    plies = (ply(0, 10.0, 10.0, 10.5), ply(1, 10.9, 10.9, 11.0))
    asked = attempt(
        0, 0, submitted=10.1, admitted=10.2, done=10.45, queue_s=0.05, prefill_s=0.1, decode_s=0.1
    )
    told = match_detail(MatchRecords(MATCH, plies, (asked,)), 1000.0, 1.0)["plies"][0]
    parts = [told[f"{part}_ms"] for part in ("queue", "prefill", "decode", "harness")]
    assert [round(part) for part in parts] == [150, 100, 100, 150]
    assert sum(parts) == pytest.approx(told["latency_ms"])


def test_the_same_rows_in_another_order_of_tries_stay_in_theirs() -> None:
    tries = [attempt(0, n, completion_tokens=n) for n in range(5)]
    random.Random(0).shuffle(tries)
    told = match_detail(MatchRecords(MATCH, (ply(0, 1.0, 1.0, 2.0),), tuple(tries)), 1000.0, 1.0)
    assert [a["n"] for a in told["plies"][0]["attempts"]] == [a.n for a in tries]
