"""Janggi's collected cases; `difference` in the data says where our spelling or rule differs."""

import json
from pathlib import Path
from typing import Any

import pytest

from games import NotationError, Start, Termination, load_game
from games.janggi import JanggiPosition

FILE = Path(__file__).parents[1] / "data/games/janggi_cases.json"
CASES: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
RESULTS = {0: "cho", 1: "han", None: "draw"}


def of(*questions: str) -> list[Any]:
    cases = [case for case in CASES if case["question"] in questions]
    assert cases
    return [pytest.param(case, id=case["id"]) for case in cases]


def position_of(case: dict[str, Any]) -> JanggiPosition:
    position = load_game("janggi").position(
        Start(case.get("our_fen", case["fen"]), case["variant"])
    )
    for move in case["moves"]:
        position = position.play(position.parse(move))
    assert isinstance(position, JanggiPosition)
    return position


def legal_of(case: dict[str, Any]) -> list[str]:
    position = position_of(case)
    return sorted(position.notation(move, "uci") for move in position.legal_moves())


def perft(position: JanggiPosition, depth: int) -> int:
    moves = position.legal_moves()
    if depth == 1:
        return len(moves)
    return sum(perft(position.play(move), depth - 1) for move in moves)


def test_every_question_is_asked_somewhere() -> None:
    asked = {
        *("legal_moves_contains", "legal_moves_not_contains", "legal_moves_equals", "legal_count"),
        *("result", "perft", "fen_after", "fen_must_be_rejected", "insufficient", "check"),
        *("move_list_rejected", "must_not_crash", "san", "san_janggi"),
    }
    assert {case["question"] for case in CASES} == asked


@pytest.mark.parametrize("case", of("legal_moves_contains"))
def test_a_legal_move(case: dict[str, Any]) -> None:
    assert case["expected"] in legal_of(case)


@pytest.mark.parametrize("case", of("legal_moves_not_contains"))
def test_an_illegal_move(case: dict[str, Any]) -> None:
    assert case["expected"] not in legal_of(case)


@pytest.mark.parametrize("case", of("legal_moves_equals"))
def test_all_legal_moves(case: dict[str, Any]) -> None:
    assert legal_of(case) == sorted(case["expected"])


@pytest.mark.parametrize("case", of("legal_count"))
def test_the_number_of_legal_moves(case: dict[str, Any]) -> None:
    assert len(legal_of(case)) == case["expected"]


@pytest.mark.parametrize("case", of("result"))
def test_a_result(case: dict[str, Any]) -> None:
    result = position_of(case).result()
    assert ("ongoing" if result is None else RESULTS[result.winner]) == case["expected"]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case["id"], marks=[pytest.mark.perft] if case["arg"] > 3 else [])
        for case in CASES
        if case["question"] == "perft"
    ],
)
@pytest.mark.timeout(600)
def test_perft(case: dict[str, Any]) -> None:
    assert perft(position_of(case), case["arg"]) == case["expected"]


@pytest.mark.parametrize("case", of("fen_after"))
def test_a_fen(case: dict[str, Any]) -> None:
    assert position_of(case).fen == case["expected"]


@pytest.mark.parametrize("case", of("fen_must_be_rejected"))
def test_a_bad_fen(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="bad janggi FEN"):
        position_of(case)


@pytest.mark.parametrize("case", [case for case in CASES if "our_fen" in case])
def test_a_general_that_can_be_taken_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="could capture Han's general"):
        load_game("janggi").position(Start(case["fen"], case["variant"]))


@pytest.mark.parametrize("case", of("insufficient"))
def test_bare_generals_end_the_game_on_points(case: dict[str, Any]) -> None:
    result = position_of(case).result()
    assert result is not None
    assert result.termination is Termination.BARE_GENERALS
    assert result.winner == (0 if case["id"] == "rule-guards-only" else 1)


@pytest.mark.parametrize("case", of("check"))
def test_check(case: dict[str, Any]) -> None:
    assert position_of(case).in_check == case["expected"]


@pytest.mark.parametrize("case", of("move_list_rejected"))
def test_text_that_is_no_move(case: dict[str, Any]) -> None:
    with pytest.raises(NotationError):
        position_of(case)


@pytest.mark.parametrize("case", of("must_not_crash"))
def test_a_move_that_is_not_text(case: dict[str, Any]) -> None:
    with pytest.raises((TypeError, AttributeError)):
        position_of(case)


@pytest.mark.parametrize("case", of("san"))
def test_short_notation(case: dict[str, Any]) -> None:
    assert position_of(case).notation(case["arg"], "san") == case["expected"]


@pytest.mark.parametrize("case", of("san_janggi"))
def test_the_letter_form_is_read(case: dict[str, Any]) -> None:
    position = position_of(case)
    assert position.parse(case["expected"]) == case["arg"]
    assert position.notation(case["arg"], "korean") == "02마83"
