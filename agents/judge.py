"""What a reply of a language model comes to, pure: judged when it comes, and by a replay again.

An answer that stands is text: a canonical legal move, with OFFER behind it where a draw is offered
with it, or ACCEPT.
"""

from agents.base import NO_CONCESSIONS, Attempt, Concessions, Decision, Fault
from agents.parse import ACCEPT, ENDLESS_THOUGHT, OFFER, RESIGN, RESIGNED, Failure, read_move
from games import Position
from serving import Finish

_OUT_OF_TIME = "it was still being written when the time for the move was over"


def choices_of(
    position: Position, concessions: Concessions, is_draw_offered: bool
) -> tuple[str, ...]:
    """All that a constrained answer may be."""
    moves = position.legal_moves()
    if concessions == NO_CONCESSIONS:
        return moves
    choices = list(moves)
    if concessions.draw_offers:
        choices += [move + OFFER for move in moves]
        choices += [ACCEPT] if is_draw_offered else []
    if concessions.resignation:
        choices.append(RESIGN)
    return tuple(dict.fromkeys(choices))


def longest_choice(longest_move: str, concessions: Concessions) -> int:
    """UTF-8 bytes of the longest constrained answer in a game of such moves."""
    offer = OFFER if concessions.draw_offers else ""
    resign = RESIGN if concessions.resignation else ""
    return max(len((longest_move + offer).encode()), len(resign))


def judge_free(
    text: str,
    finish: Finish,
    position: Position,
    reasoning: str = "",
    *,
    concessions: Concessions = NO_CONCESSIONS,
    is_draw_offered: bool = False,
) -> str | Failure:
    """The answer that a free reply gives, or the agent's fault; `reasoning` is what the engine told
    apart from it."""
    if finish is Finish.DEADLINE:
        return Failure(Fault.FLAG_FALL, _OUT_OF_TIME)
    is_cut = finish is Finish.LENGTH
    if is_cut and reasoning and not text.strip():
        return Failure(Fault.TRUNCATED, ENDLESS_THOUGHT)
    return read_move(
        text, position, is_cut=is_cut, concessions=concessions, is_draw_offered=is_draw_offered
    )


def judge_thought(finish: Finish) -> Failure | None:
    """The agent's fault where its time ran out; a thought cut at its bound is none."""
    return Failure(Fault.FLAG_FALL, _OUT_OF_TIME) if finish is Finish.DEADLINE else None


def judge_choice(
    text: str,
    finish: Finish,
    position: Position,
    concessions: Concessions = NO_CONCESSIONS,
    is_draw_offered: bool = False,
) -> str | Failure:
    """The answer that a constrained reply is, or the failure: the agent's where it resigned, else
    the infrastructure's."""
    choices = choices_of(position, concessions, is_draw_offered)
    if text in choices:
        if text == RESIGN and text not in position.legal_moves():
            return Failure(Fault.RESIGNED, RESIGNED)
        return text
    if finish is Finish.DEADLINE:
        detail = f"the time limit passed before the answer was whole: {text[:80]!r}"
        return Failure(Fault.STALLED, detail)
    if any(choice.startswith(text) for choice in choices):
        return Failure(Fault.CUT_SHORT, f"the engine ended the answer inside a move: {text!r}")
    detail = f"the engine answered what was no choice: {text[:80]!r}"
    return Failure(Fault.CONSTRAINT_IGNORED, detail)


def decided(answer: str, position: Position, attempts: tuple[Attempt, ...]) -> Decision:
    """The decision that an answer is; a legal move is one, whatever it looks like."""
    if answer in position.legal_moves():
        return Decision(answer, None, attempts)
    if answer == ACCEPT:
        return Decision(None, None, attempts, accepts_draw=True)
    return Decision(answer.removesuffix(OFFER), None, attempts, offers_draw=True)
