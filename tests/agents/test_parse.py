"""Free answers: a folder of odd replies, each with what must be read in it."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents import Answer, Failure, Fault, read_answer, read_move
from games import load_game
from tests.agents.fakes import grid

REPLIES = Path(__file__).parent.parent / "data" / "replies"


@dataclass(frozen=True)
class Golden:
    head: dict[str, str]
    text: str

    @property
    def is_cut(self) -> bool:
        return self.head["finish"] == "length"


def golden(path: Path) -> Golden:
    head, _, text = path.read_bytes().decode().partition("\n---\n")
    fields = dict(line.split(":", 1) for line in head.splitlines())
    return Golden({key: value.strip() for key, value in fields.items()}, text)


GOLDENS = {path.stem: golden(path) for path in sorted(REPLIES.glob("*.txt"))}
AT_THE_DOOR = {name: g for name, g in GOLDENS.items() if "game" in g.head}


@pytest.mark.parametrize("name", GOLDENS)
def test_reads_what_the_reply_says(name: str) -> None:
    case = GOLDENS[name]
    read = read_answer(case.text, is_cut=case.is_cut)
    if "fault" in case.head:
        assert isinstance(read, Failure)
        assert read.fault is Fault(case.head["fault"])
        assert read.detail
    else:
        assert read == Answer(case.head["answer"])


@pytest.mark.parametrize("name", AT_THE_DOOR)
def test_the_games_door_decides(name: str) -> None:
    case = AT_THE_DOOR[name]
    game = load_game(case.head["game"])
    position = game.position(game.openings("start", game.rulesets[0])[0])
    for move in case.head["moves"].split():
        position = position.play(move)
    read = read_move(case.text, position, is_cut=case.is_cut)
    if "move" in case.head:
        assert read == case.head["move"]
        assert read in position.legal_moves()
    else:
        assert isinstance(read, Failure)
        assert read.fault is Fault(case.head["door"])


def test_illegal_move_is_told_with_the_rule() -> None:
    read = read_move("MOVE: b2", grid("b2"), is_cut=False)
    assert read == Failure(Fault.ILLEGAL, "b2 is illegal: b2 is taken")


@given(st.text(), st.booleans())
def test_never_raises_and_never_guesses(text: str, is_cut: bool) -> None:
    read = read_move(text, grid(), is_cut=is_cut)
    if isinstance(read, str):
        assert "move" in text.lower()
        assert read in text.lower()


@given(st.sampled_from(grid().legal_moves()), st.text(alphabet="abc ,.\n*"))
def test_a_whole_last_line_is_always_read(move: str, before: str) -> None:
    assert read_move(f"{before}\nMOVE: {move}", grid(), is_cut=False) == move


@given(st.integers(0, 40))
def test_a_cut_answer_is_never_a_shorter_move(length: int) -> None:
    whole = "I go there.\nMOVE: a10b10\n"
    read = read_answer(whole[:length], is_cut=True)
    if length >= len(whole):
        assert read == Answer("a10b10")
    else:
        assert isinstance(read, Failure)
        assert read.fault is Fault.TRUNCATED
