"""What a reply of a language model comes to, pure: judged when it comes, and by a replay again."""

from agents.base import Fault
from agents.parse import ENDLESS_THOUGHT, Failure, read_move
from games import Position
from serving import Finish

_OUT_OF_TIME = "it was still being written when the time for the move was over"


def judge_free(text: str, finish: Finish, position: Position, reasoning: str = "") -> str | Failure:
    """The canonical legal move of a free answer, or the agent's fault; `reasoning` is what the
    engine told apart from the answer."""
    if finish is Finish.DEADLINE:
        return Failure(Fault.FLAG_FALL, _OUT_OF_TIME)
    if finish is Finish.LENGTH and reasoning and not text.strip():
        return Failure(Fault.TRUNCATED, ENDLESS_THOUGHT)
    return read_move(text, position, is_cut=finish is Finish.LENGTH)


def judge_thought(finish: Finish) -> Failure | None:
    """The agent's fault where its time ran out; a thought cut at its bound is none."""
    return Failure(Fault.FLAG_FALL, _OUT_OF_TIME) if finish is Finish.DEADLINE else None


def judge_choice(text: str, finish: Finish, choices: tuple[str, ...]) -> str | Failure:
    """The choice that a constrained answer is, or the infrastructure's fault."""
    if text in choices:
        return text
    if finish is Finish.DEADLINE:
        detail = f"the time limit passed before the answer was whole: {text[:80]!r}"
        return Failure(Fault.STALLED, detail)
    if any(choice.startswith(text) for choice in choices):
        return Failure(Fault.CUT_SHORT, f"the engine ended the answer inside a move: {text!r}")
    detail = f"the engine answered what was no choice: {text[:80]!r}"
    return Failure(Fault.CONSTRAINT_IGNORED, detail)
