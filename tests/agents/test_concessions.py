"""Offers of a draw and resignation: asked for, said, read; nothing of them where they are off."""

from dataclasses import replace

import pytest

from agents import (
    ACCEPT,
    OFFER,
    Answer,
    Concessions,
    Failure,
    Fault,
    LlmAgent,
    LlmSettings,
    Turn,
    choices_of,
    judge_choice,
    read_answer,
    read_move,
)
from agents.prompt import Mode, lead
from games import Start, load_game
from serving import Finish, TokenPrompt
from tests.agents.fakes import CharTemplate, ScriptEngine, context, grid, turn

BOTH = Concessions(draw_offers=True, resignation=True)
OFFERS = Concessions(draw_offers=True)


def player(
    *answers: str, mode: Mode = "constrained", concessions: Concessions = BOTH
) -> tuple[LlmAgent, ScriptEngine]:
    engine = ScriptEngine(answers)
    return LlmAgent("t", engine, context(concessions=concessions), LlmSettings(mode)), engine


def offered() -> Turn:
    return replace(turn(), is_draw_offered=True)


def text_of(prompt: object) -> str:
    assert isinstance(prompt, TokenPrompt)
    return "".join(map(chr, prompt.ids))


@pytest.mark.parametrize("mode", ["constrained", "free", "think"])
def test_what_is_off_is_not_told(mode: Mode) -> None:
    off, offers, both = lead(mode, None), lead(mode, None, OFFERS), lead(mode, None, BOTH)
    assert "resign" not in off
    assert "draw" not in off
    assert "draw" in offers
    assert "resign" not in offers
    assert "draw" in both
    assert "resign" in both
    assert {text.splitlines()[-1] for text in (off, offers, both)} == {"Moves:"}


def test_a_constrained_answer_may_be_no_more_than_is_allowed() -> None:
    moves = grid().legal_moves()
    assert choices_of(grid(), Concessions(), False) == moves
    with_offers = {*moves, *(move + OFFER for move in moves)}
    assert set(choices_of(grid(), OFFERS, False)) == with_offers
    assert set(choices_of(grid(), OFFERS, True)) == {*with_offers, ACCEPT}
    assert set(choices_of(grid(), BOTH, False)) == {*with_offers, "resign"}
    only = Concessions(resignation=True)
    assert set(choices_of(grid(), only, False)) == {*moves, "resign"}


async def test_a_constrained_player_offers_with_a_move() -> None:
    agent, engine = player("b2(=)", concessions=OFFERS)
    decision = await agent.choose(turn())
    assert (decision.move, decision.offers_draw, decision.accepts_draw) == ("b2", True, False)
    request = engine.requests[0]
    assert request.choices == choices_of(grid(), OFFERS, False)
    assert request.max_tokens == len("b2(=)") + 1
    assert "offered" not in text_of(request.prompt)


async def test_a_constrained_player_is_told_of_an_offer_and_accepts_it() -> None:
    agent, engine = player("draw")
    decision = await agent.choose(offered())
    assert (decision.move, decision.fault, decision.accepts_draw) == (None, None, True)
    assert decision.attempts[-1].fault is None
    assert text_of(engine.requests[0].prompt).endswith(
        "You are offered a draw: answer draw to accept it, or play on with a move.|"
    )


async def test_a_move_declines() -> None:
    agent, _ = player("b2")
    decision = await agent.choose(offered())
    assert (decision.move, decision.offers_draw, decision.accepts_draw) == ("b2", False, False)


@pytest.mark.parametrize(("mode", "said"), [("constrained", "resign"), ("free", "MOVE: Resign.")])
async def test_resigning_is_the_player_s_own_and_is_asked_once(mode: Mode, said: str) -> None:
    agent, engine = player(said, mode=mode)
    decision = await agent.choose(turn())
    assert (decision.move, decision.fault) == (None, Fault.RESIGNED)
    assert decision.attempts[-1].fault is Fault.RESIGNED
    assert len(engine.requests) == 1


def test_a_constrained_resignation_that_is_not_allowed_is_the_engine_s_failure() -> None:
    judged = judge_choice("resign", Finish.STOP, grid(), OFFERS)
    assert isinstance(judged, Failure)
    assert judged.fault is Fault.CONSTRAINT_IGNORED


@pytest.mark.parametrize(
    "said",
    ["MOVE: b2 (=)", "MOVE: b2(=)", "**MOVE: b2 (=)**", "MOVE: `b2` ( = ).", "MOVE: 1. b2 (=)"],
)
def test_an_offer_is_read_behind_a_move(said: str) -> None:
    assert read_answer(said, is_cut=False, may_offer=True) == Answer("b2", offers_draw=True)
    assert read_move(said, grid(), is_cut=False, concessions=OFFERS) == "b2(=)"
    without = read_move(said, grid(), is_cut=False)
    assert isinstance(without, Failure)
    assert without.fault is Fault.UNPARSABLE


async def test_a_free_player_that_accepts_what_nobody_offered_is_told_so() -> None:
    agent, engine = player("MOVE: draw", "MOVE: b2 (=)", mode="free")
    decision = await agent.choose(turn())
    assert (decision.move, decision.offers_draw) == ("b2", True)
    assert decision.attempts[0].fault is Fault.UNPARSABLE
    assert "there is no offer of a draw to accept" in text_of(engine.requests[1].prompt)


async def test_a_retry_is_told_of_the_offer_too() -> None:
    agent, engine = player("MOVE: z9", "MOVE: draw", mode="free")
    decision = await agent.choose(offered())
    assert decision.accepts_draw
    first, second = (text_of(request.prompt) for request in engine.requests)
    assert "write MOVE: draw to accept it" in first
    assert "write MOVE: draw to accept it" in second
    assert "Your answer was refused" in second


async def test_the_offer_comes_after_all_that_stays() -> None:
    agent, engine = player("b2", "b2")
    await agent.choose(turn())
    await agent.choose(offered())
    plain, noted = (text_of(request.prompt) for request in engine.requests)
    assert noted.startswith(plain.removesuffix("|"))


def test_the_longest_answer_and_the_note_count_in_the_context() -> None:
    template = CharTemplate()
    game = ("own_game:NoughtsAndCrosses", "standard")

    def need(concessions: Concessions) -> int:
        told = context(concessions=concessions, games=(game,))
        engine = ScriptEngine(template=template)
        return LlmAgent("t", engine, told, LlmSettings()).context_need(*game).tokens(0)

    grown = len(lead("constrained", None, OFFERS)) - len(lead("constrained", None))
    note = "\nYou are offered a draw: answer draw to accept it, or play on with a move."
    assert need(OFFERS) - need(Concessions()) == grown + len(note) + len(OFFER)


def test_a_move_of_a_game_is_a_move_whatever_it_looks_like() -> None:
    """A user's own game may have a move `resign`."""
    chess = load_game("chess")
    position = chess.position(Start(chess.openings("start", "standard")[0].fen, "standard"))

    class Odd:
        def legal_moves(self) -> tuple[str, ...]:
            return ("resign", *position.legal_moves())

    assert judge_choice("resign", Finish.STOP, Odd(), BOTH) == "resign"  # type: ignore[arg-type]
