"""Chess's collected cases. `ours` stands where a case asserts python-chess's own default, and
`difference` says how this program differs."""

import json
from pathlib import Path
from typing import Any

import pytest

from games import GameError, IllegalMove, NotationError, Position, Start, Termination, load_game

FILE = Path(__file__).parents[1] / "data/games/chess_cases.json"
CASES: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
MARKS = {0: "1-0", 1: "0-1", None: "1/2-1/2"}
READ = ("parse_san", "parse_uci", "harness_parse", "from_uci_is_legal")
READ_NULL = ("parse_san_legal", "parse_uci_legal")
ENDS = ("outcome", "outcome_claim")
SINGLE = {
    *("san", "fen", "insufficient", "is_repetition3_after_fen"),
    *("legal_contains", "fen_raises", "push_accepts_illegal"),
}


def of(*questions: str) -> list[Any]:
    cases = [case for case in CASES if case["question"] in questions]
    assert cases
    return [pytest.param(case, id=case["id"]) for case in cases]


def position_of(case: dict[str, Any]) -> Position:
    ruleset = "chess960" if case["variant"] == "chess960" else "standard"
    position = load_game("chess").position(Start(case.get("our_fen", case["fen"]), ruleset))
    for move in case["moves"]:
        position = position.play(position.parse(move))
    return position


def expected_of(case: dict[str, Any]) -> Any:
    return case.get("ours", case["expected"])


def test_every_question_is_asked_somewhere() -> None:
    assert {case["question"] for case in CASES} == {*READ, *READ_NULL, *ENDS, *SINGLE}


@pytest.mark.parametrize("case", of(*READ))
def test_the_door(case: dict[str, Any]) -> None:
    position = position_of(case)
    if expected_of(case) is None:
        with pytest.raises(GameError):
            position.parse(case["arg"])
    else:
        assert position.parse(case["arg"]) == expected_of(case)


@pytest.mark.parametrize("case", of(*READ_NULL))
def test_a_null_move_is_no_notation(case: dict[str, Any]) -> None:
    with pytest.raises(NotationError):
        position_of(case).parse(case["arg"])


@pytest.mark.parametrize("case", of(*ENDS))
def test_an_end(case: dict[str, Any]) -> None:
    result = position_of(case).result()
    assert ("*" if result is None else MARKS[result.winner]) == expected_of(case)


@pytest.mark.parametrize("case", of("insufficient"))
def test_insufficient_material(case: dict[str, Any]) -> None:
    result = position_of(case).result()
    assert result is not None
    assert result.termination is Termination.INSUFFICIENT_MATERIAL


@pytest.mark.parametrize("case", of("san"))
def test_san(case: dict[str, Any]) -> None:
    assert position_of(case).notation(case["arg"], "san") == case["expected"]


@pytest.mark.parametrize("case", of("fen"))
def test_fen(case: dict[str, Any]) -> None:
    assert position_of(case).fen == expected_of(case)


@pytest.mark.parametrize("case", of("is_repetition3_after_fen"))
def test_repetition_is_lost_by_a_fen(case: dict[str, Any]) -> None:
    position = position_of(case)
    assert position.result() is not None
    rebuilt = load_game("chess").position(Start(position.fen, "standard"))
    assert rebuilt.result() is None


@pytest.mark.parametrize("case", of("legal_contains"))
def test_a_legal_move(case: dict[str, Any]) -> None:
    assert case["expected"] in position_of(case).legal_moves()


@pytest.mark.parametrize("case", of("fen_raises"))
def test_a_bad_fen(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="bad chess FEN"):
        position_of(case)


@pytest.mark.parametrize("case", [case for case in CASES if "our_fen" in case])
def test_a_king_that_can_be_taken_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="opposite check"):
        load_game("chess").position(Start(case["fen"], "standard"))


@pytest.mark.parametrize("case", of("push_accepts_illegal"))
def test_play_is_unchecked_and_the_door_is_not(case: dict[str, Any]) -> None:
    position = position_of(case)
    assert position.play(case["arg"]).ply == 1
    with pytest.raises(IllegalMove):
        position.parse(case["arg"])
