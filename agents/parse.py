"""Reads a free answer: the last line `MOVE: <move>`, and nothing else in it.

What stands after the label goes to the game's own door (`Position.parse`) as it is, less
decoration that cannot change its meaning. There is no guess: text without such a line is no
answer, and a line that a token limit may have cut in the middle of a move is none either
(`a1b1` may have been going to be `a1b10`).
"""

import re
from dataclasses import dataclass

from agents.base import NO_CONCESSIONS, Concessions, Fault
from games import AmbiguousMove, GameError, IllegalMove, Position

PARSER_VERSION = 1
"""Grows with every change of what is read: stored replies may be read again by a newer one."""

_LABEL = re.compile(r"^[\s>*_`#-]*MOVE[\s*_`]*[:：](.*)$", re.IGNORECASE)
_CUT_LABEL = re.compile(r"^[\s>*_`#-]*M(?:O(?:V(?:E[\s*_`]*)?)?)?$", re.IGNORECASE)
_DECORATION = " \t*_`\"'“”‘’<>[]()"
_MOVE_NUMBER = re.compile(r"^\d+\s*\.(?:\s*\.\.|…)?\s*(?=\S)")
_OFFERED = re.compile(r"[\s*_`\"']*\(\s*=\s*\)[\s*_`\"'.]*$")
_THINKING_ENDS = "</think>"
_THINKING_BEGINS = "<think>"

RESIGN = "resign"
ACCEPT = "draw"
OFFER = "(=)"
"""Behind a move: a draw is offered with it (FIDE Laws of Chess, appendix C.12)."""
RESIGNED = "the agent resigned"
NO_OFFER = f"there is no offer of a draw to accept; to offer one, write {OFFER} behind a move"
ENDLESS_THOUGHT = "the thinking used up all its tokens and came to no answer; think less"


@dataclass(frozen=True, slots=True)
class Answer:
    """What stood on the last answer line, without decoration."""

    text: str
    offers_draw: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an answer gives no move: the agent's fault, and words that may be shown to it."""

    fault: Fault
    detail: str


def read_answer(text: str, *, is_cut: bool, may_offer: bool = False) -> Answer | Failure:
    """The last answer in `text`; `is_cut` says that a token limit ended it, `may_offer` that an
    offer of a draw is read too.

    Failure is EMPTY, UNPARSABLE or TRUNCATED.
    """
    if not text.strip():
        return _missing(Fault.EMPTY, "it was empty", is_cut)
    before, ended, after = text.rpartition(_THINKING_ENDS)
    spoken = after if ended else before + after
    if _THINKING_BEGINS in spoken:
        if is_cut:
            return Failure(Fault.TRUNCATED, ENDLESS_THOUGHT)
        return Failure(Fault.UNPARSABLE, "the thinking never ended")
    lines = spoken.splitlines()
    if is_cut and lines and not spoken.endswith(("\n", "\r")):
        last = lines.pop()
        if _LABEL.match(last) or _CUT_LABEL.match(last):
            return Failure(Fault.TRUNCATED, "it was cut off inside the answer line; be brief")
    for line in reversed(lines):
        found = _LABEL.match(line)
        if found:
            said = found.group(1)
            bare = _OFFERED.sub("", said) if may_offer else said
            answer = _bare(bare)
            if answer:
                return Answer(answer, bare != said)
            return Failure(Fault.UNPARSABLE, "nothing stands after MOVE:")
    return _missing(Fault.UNPARSABLE, "it has no line MOVE: <move>", is_cut)


def read_move(
    text: str,
    position: Position,
    *,
    is_cut: bool,
    concessions: Concessions = NO_CONCESSIONS,
    is_draw_offered: bool = False,
) -> str | Failure:
    """The canonical legal move that a free answer names, with OFFER behind it where a draw is
    offered too, or ACCEPT where one is accepted; else why it names none.

    `MOVE: resign` is the failure RESIGNED, whether or not players are told of it.
    """
    answer = read_answer(text, is_cut=is_cut, may_offer=concessions.draw_offers)
    if isinstance(answer, Failure):
        return answer
    if answer.text.lower() == RESIGN:
        return Failure(Fault.RESIGNED, RESIGNED)
    if concessions.draw_offers and answer.text.lower() == ACCEPT:
        if is_draw_offered:
            return ACCEPT
        return Failure(Fault.UNPARSABLE, NO_OFFER)
    try:
        move = position.parse(answer.text)
        return move + OFFER if answer.offers_draw else move
    except IllegalMove as error:
        return Failure(Fault.ILLEGAL, f"{answer.text} is illegal: {error.reason}")
    except AmbiguousMove as error:
        named = ", ".join(error.candidates)
        return Failure(Fault.AMBIGUOUS, f"{answer.text} may mean {named}")
    except GameError as error:
        return Failure(Fault.UNPARSABLE, f"{answer.text} is not a move: {error}")


def _bare(text: str) -> str:
    text = text.strip(_DECORATION).rstrip(".").rstrip(_DECORATION)
    return _MOVE_NUMBER.sub("", text).strip()


def _missing(fault: Fault, detail: str, is_cut: bool) -> Failure:
    if is_cut:
        return Failure(Fault.TRUNCATED, "it was cut off before a line MOVE: <move>; be brief")
    return Failure(fault, detail)
