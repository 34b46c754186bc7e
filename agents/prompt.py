"""What a model is told: one text of rules a game, then the moves, which grow only at the end.

    system   rules of the game; the same bytes for every agent, mode and match of a rule set
    persona  the agent's own words
    lead     the form of the answer and, where it is not the usual one, the position to begin from
    moves    the game so far
    note     an offer of a draw, and after a failed try what was wrong with it; gone at the next ply

Nothing that changes stands before anything that stays, and no name, date, id or colour stands
before the moves, so both players of a match share one growing prefix. Everything here is pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agents.base import NO_CONCESSIONS, Concessions
from games import Game, Position, Start
from serving import PromptParts, Template

PROMPT_VERSION = 1
"""Grows with every change of a text below: records of different versions do not compare."""

Mode = Literal["constrained", "free", "think"]

COMPLAINT_BYTES = 480
"""Most UTF-8 bytes of a retry's complaint."""
QUOTED_BYTES = 160
"""Most UTF-8 bytes of the failed answer that a complaint quotes, from its end."""
COMPLAINT_TOKENS = 160
"""Tokens kept free for a complaint; plain English takes about a quarter of its bytes."""

_CHESS = """\
You are playing chess. The user lists the moves played so far, oldest first. White and Black take \
turns, White first unless a given position says otherwise, and you choose the next move. Play to \
win.

Write a move as the square it leaves and the square it reaches, files a-h and ranks 1-8 seen from \
White: e2e4. Promotion adds q, r, b or n: e7e8q. {castling}

Rules:
- Never leave your own king attacked. In check you must move the king, take the checking piece or \
block it. A pinned piece stays on its line.
- Castle only if that king and rook never moved, nothing stands between them, and the king is not \
in check, passes no attacked square and lands on none.
- Pawns go straight and take diagonally; two squares only from their first rank. En passant is \
legal only as the very next move.
- Pieces other than knights cannot jump.
- There is no pass. No legal move without check is a draw, as is the same position for the third \
time or fifty moves by each side without a capture or pawn move.

Before you answer, follow the moves to see where every piece stands now and what the last move \
attacks. Look for mate, then for pieces to win, and do not lose yours."""

_CASTLING = "Castling is the king's move: e1g1, e1c1, e8g8, e8c8."
_CASTLING_960 = (
    "This is Chess960: castling is written as the king's square and its own rook's square, such as "
    "e1h1, and brings both to where ordinary castling would."
)

_JANGGI = """\
You are playing janggi, Korean chess; it is not xiangqi. The user lists the moves played so far, \
oldest first. Cho and Han take turns, Cho first unless a given position says otherwise, and you \
choose the next move. Play to win.

The board has files a-i and ranks 1-10, always counted from Cho's side. Write a move as the square \
it leaves and the square it reaches: a4a5, i10i9. Write a pass as pass.

Start for Cho: chariots a1 i1, horses b1 h1, elephants c1 g1, guards d1 f1, general e2, cannons \
b3 h3, soldiers a4 c4 e4 g4 i4; Han the same on ranks 10, 9, 8, 7. A side may begin with horse and \
elephant swapped. FEN letters: R chariot, N horse, B elephant, A guard, K general, C cannon, P \
soldier; capitals are Cho.

- Palaces: d1-f3 and d8-f10, with diagonals from the corners to the centre. General and guards go \
one step along the lines and never leave.
- Chariot: any distance straight, also along palace diagonals.
- Cannon: straight, or corner to corner of a palace, over exactly one piece, to move as well as to \
take. It never jumps a cannon or takes one.
- Horse: one straight, then one diagonally outward. Elephant: one straight, then two diagonally \
outward. Any piece on the way blocks both. There is no river.
- Soldier: one step forward or sideways from the start, never back, no promotion; in the enemy \
palace also forward along diagonals.

Rules:
- Never leave your general attacked. Checkmate wins.
- You may pass on any turn unless in check. Two passes in a row end the game{by_points}.
{bikjang}{points}- The same position for the {nth} time, or {quiet} moves in a row without a \
capture, ends the game{by_points}. Checking for ever loses.{to_and_fro}

Before you answer, follow the moves to see where every piece stands now and what the last move \
attacks."""

_BIKJANG = """\
- Bikjang: when the generals face each other on a file with nothing between, the side to move must \
break it or pass, and that pass ends the game{by_points}.
"""
_NO_BIKJANG = "- The generals may face each other on an open file.\n"
_POINTS = """\
- Points: chariot 13, cannon 7, horse 5, elephant 3, guard 3, soldier 2, 72 a side, and 1.5 more \
for Han: with equal pieces Han wins 73.5 to 72. End the game only when you are ahead.
"""
_NO_POINTS = "- Worth: chariot 13, cannon 7, horse 5, elephant 3, guard 3, soldier 2.\n"
_TO_AND_FRO = " So does moving one piece to and fro five times in a row."

_GENERIC = """\
You are playing the board game {game}. The user lists the moves played so far, oldest first; the \
players take turns and you choose the next move. Play to win, by the rules. Before you answer, \
follow the moves to see how the board stands now."""

_LEADS: dict[str, str] = {
    "constrained": "Answer with the next move and nothing else.\n",
    "free": (
        "Think as briefly as you can. End your answer with the next move on a line of its own, in "
        "this form:\nMOVE: <move>\n"
    ),
    "think": ("Think as briefly as you can. Then answer with the next move and nothing else.\n"),
}


@dataclass(frozen=True, slots=True)
class _Told:
    """Of concessions, in one form of answer."""

    resignation: str
    draw_offers: str
    offered: str


_TOLD_FREE = _Told(
    "If you have no hope left you may write MOVE: resign\n",
    "With (=) behind the move you offer a draw: MOVE: <move> (=)\n",
    "You are offered a draw: write MOVE: draw to accept it, or play on with a move.",
)
_TOLD_CHOICE = _Told(
    "If you have no hope left you may answer resign instead.\n",
    "With (=) right behind it a move offers a draw.\n",
    "You are offered a draw: answer draw to accept it, or play on with a move.",
)


def _told(mode: Mode) -> _Told:
    return _TOLD_FREE if mode == "free" else _TOLD_CHOICE


def system_prompt(game: str, ruleset: str) -> str:
    """Our text of rules for a rule set of a game; a game that is not ours gets a general one."""
    if game == "chess":
        return _CHESS.format(castling=_CASTLING_960 if ruleset == "chess960" else _CASTLING)
    if game == "janggi":
        return _janggi(ruleset)
    return _GENERIC.format(game=game)


def _janggi(ruleset: str) -> str:
    is_modern = ruleset == "janggimodern"
    has_points = ruleset not in ("janggicasual", "janggitraditional")
    has_bikjang = ruleset in ("janggi", "janggitraditional")
    by_points = " on points" if has_points else " in a draw"
    return _JANGGI.format(
        by_points=by_points,
        bikjang=_BIKJANG.format(by_points=by_points) if has_bikjang else _NO_BIKJANG,
        points=_POINTS if has_points else _NO_POINTS,
        nth="fourth" if is_modern else "third",
        quiet=200 if is_modern else 100,
        to_and_fro=_TO_AND_FRO if is_modern else "",
    )


def lead(mode: Mode, from_fen: str | None, concessions: Concessions = NO_CONCESSIONS) -> str:
    """What opens the user message; `from_fen` is the position that the moves begin from, if it has
    to be told."""
    told = _LEADS[mode]
    if concessions.resignation:
        told += _told(mode).resignation
    if concessions.draw_offers:
        told += _told(mode).draw_offers
    if from_fen is None:
        return f"{told}Moves:"
    return f"{told}Position (FEN): {from_fen}\nMoves from it:"


def offered(mode: Mode) -> str:
    """The note after the moves when the opponent offers a draw."""
    return _told(mode).offered


def base_ply(ply: int, window: int) -> int:
    """The ply that a transcript of at most `window` moves begins from.

    0 until `ply` passes `window`; then it moves in steps of half a window, so that a prefix is
    thrown away rarely and at least half a window of history stays in view.
    """
    if window < 1:
        raise ValueError(f"a transcript cannot hold {window} moves")
    if ply <= window:
        return 0
    step = max(1, window // 2)
    return -(-(ply - window) // step) * step


def complaint(detail: str, answer: str) -> str:
    """The note after the moves when a free answer failed: what was wrong, and how it ended."""
    quoted = _last_bytes(" ".join(answer.split()).replace("<|", "< |"), QUOTED_BYTES)
    ended = f" It ended: {quoted}" if quoted else ""
    head = _first_bytes(f"Your answer was refused: {detail}", COMPLAINT_BYTES - QUOTED_BYTES - 96)
    return f"{head}{ended}\nGive another move. End with one line MOVE: <move>"


def _first_bytes(text: str, most: int) -> str:
    return text.encode()[:most].decode(errors="ignore")


def _last_bytes(text: str, most: int) -> str:
    return text.encode()[-most:].decode(errors="ignore")


@dataclass(frozen=True, slots=True)
class ContextNeed:
    """How a game fills a context, in tokens of one engine's template; worst cases throughout."""

    prefix_tokens: int
    """Everything but the moves, with a position to begin from."""
    move_tokens: int
    """The longest move."""
    answer_tokens: int
    """The longest answer, and in free mode a complaint."""
    context_tokens: int
    """What the engine holds."""
    thought_tokens: int = 0
    """The longest thought before the answer, and what opens and closes it."""

    @property
    def window(self) -> int:
        """Moves that fit; less than 1 where not even one does."""
        return (self.context_tokens - self.tokens(0)) // self.move_tokens

    def tokens(self, plies: int) -> int:
        """What a request after `plies` moves may need."""
        around = self.prefix_tokens + self.thought_tokens + self.answer_tokens
        return around + plies * self.move_tokens

    def refusal(self, max_plies: int | None) -> str | None:
        """None if a game of `max_plies` fits, or, without a cap, if it can be re-based; else one
        line with both numbers and the remedy."""
        plies = 8 if max_plies is None else max_plies
        if self.window >= plies:
            return None
        can_shorten = max_plies is not None and self.window > 0
        remedy = f", or lower max_plies to {self.window}" if can_shorten else ""
        thought = ""
        if self.thought_tokens:
            thought = f"{self.thought_tokens} for a thought, "
            remedy = f", or lower think_tokens{remedy}"
        return (
            f"a game of {plies} plies may need {self.tokens(plies)} tokens "
            f"({self.prefix_tokens} before the moves, {self.move_tokens} a move, {thought}"
            f"{self.answer_tokens} for the answer) and context_tokens is {self.context_tokens}: "
            f"raise context_tokens to {self.tokens(plies)}{remedy}"
        )


def longest_move_tokens(template: Template, parts: PromptParts, game: Game, start: Start) -> int:
    """Tokens of the costliest move, measured on the game's longest one and on the legal moves of a
    sample game. `parts` is any prompt without moves."""
    plain = template.count_tokens(parts)
    repeats = 8
    most = 1
    for text in {game.longest_move, *sample_moves(game.position(start), 40)}:
        filled = replace(parts, moves=(text,) * repeats)
        most = max(most, -(-(template.count_tokens(filled) - plain) // repeats))
    return most


def prefix_tokens(
    template: Template,
    parts: PromptParts,
    mode: Mode,
    start: Start,
    concessions: Concessions = NO_CONCESSIONS,
) -> int:
    """Tokens before the first move and after the last, with room for a position to begin from and
    for the note of an offer.

    A FEN of the middle game may be longer than that of `start`: it is counted twice.
    """
    note = offered(mode) if concessions.draw_offers else ""
    plain = replace(parts, lead=lead(mode, None, concessions), tail_note=note)
    with_fen = replace(plain, lead=lead(mode, start.fen, concessions))
    return 2 * template.count_tokens(with_fen) - template.count_tokens(plain)


def sample_game(position: Position, plies: int) -> tuple[str, ...]:
    """Moves of a game that only shows what moves look like: always the same one."""
    moves: list[str] = []
    for ply in range(plies):
        legal = position.legal_moves()
        if not legal or position.result() is not None:
            break
        moves.append(legal[(7 * ply + 3) % len(legal)])
        position = position.play(moves[-1])
    return tuple(moves)


def sample_moves(position: Position, plies: int) -> Sequence[str]:
    """Legal moves met along the sample game."""
    met = list(position.legal_moves())
    for move in sample_game(position, plies):
        position = position.play(move)
        met.extend(position.legal_moves())
    return met
