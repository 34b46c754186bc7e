"""The same moves asked for in other shapes of request, and figures of what that made. Pure.

Only A reads no prefix cache. A letter stands for a token that a model was taught as a move: what it
costs does not depend on which one it is. Free answers count as moves whatever they say.
"""

import math
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, NamedTuple

from agents.prompt import Mode, lead
from arena import schedule
from arena.compare_figures import SHORT_WINDOW, Measurement, spread
from arena.config import RunConfig
from arena.distribution import summary
from arena.workload import Question, WorkItem, Workload, as_agents_ask
from games import load_game
from serving import PromptParts, Usage

SCHEMA_VERSION = 1
CHAT_TOKENS = 200
"""Of an answer that thinks aloud."""
LETTERS = string.ascii_letters + string.digits
"""Each is a token of its own in byte-level vocabularies, and none begins another."""
LONG_SHARE = 0.15
SHORT, LONG = (6, 32), (64, 160)
"""Tokens of mixed answers: 85 % of 40 to 200 and 15 % of 400 to 1,000, made 6.25 times shorter."""
DEFAULT = "default"

Submission = Literal["continuous", "waves"]


# what is asked


@dataclass(frozen=True, slots=True)
class Shape:
    """One way to ask for a move."""

    name: str
    about: str
    question: Callable[[WorkItem, str], Question]
    """For an item and its position, as FEN."""


def _written(item: WorkItem, parts: PromptParts, tokens: int) -> Question:
    """A free answer of exactly so many tokens."""
    return Question(parts, None, tokens, replace(item.sampling, min_tokens=tokens))


def _position(item: WorkItem, fen: str, mode: Mode = "constrained") -> PromptParts:
    return replace(item.parts, lead=lead(mode, fen), moves=())


def _letter(item: WorkItem, parts: PromptParts) -> Question:
    """One token; of more legal moves than there are letters the first are offered."""
    letters = tuple(LETTERS[: len(item.choices)])
    return Question(parts, letters, 1, item.sampling)


def _chat(item: WorkItem, fen: str) -> Question:
    return _written(item, _position(item, fen, "free"), CHAT_TOKENS)


def _chat_uncached(item: WorkItem, fen: str) -> Question:
    return replace(_chat(item, fen), use_prefix_cache=False)


def _move(item: WorkItem, fen: str) -> Question:
    return replace(as_agents_ask(item), parts=_position(item, fen))


def _letter_of_list(item: WorkItem, fen: str) -> Question:
    offered = zip(LETTERS, item.choices, strict=False)
    listed = " ".join(f"{letter} {move}" for letter, move in offered)
    return _letter(item, replace(_position(item, fen), tail_note=listed))


def _letter_by_position(item: WorkItem, fen: str) -> Question:
    return _letter(item, _position(item, fen))


def _move_without_end(item: WorkItem, _: str) -> Question:
    question = as_agents_ask(item)
    return replace(question, max_tokens=question.max_tokens - 1)


def _letter_by_moves(item: WorkItem, _: str) -> Question:
    return _letter(item, item.parts)


def _as_agents_ask(item: WorkItem, _: str) -> Question:
    return as_agents_ask(item)


def _mixed(item: WorkItem, _: str) -> Question:
    dice = Random(f"shape/{item.match_id}/{item.ply}")
    return _written(
        item, item.parts, dice.randint(*(LONG if dice.random() < LONG_SHARE else SHORT))
    )


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(
            "A",
            f"a chat: the position as FEN, {CHAT_TOKENS} tokens of free text, no prefix cache",
            _chat_uncached,
        ),
        Shape("B", "A with the prefix cache", _chat),
        Shape("C", "the position as FEN, an answer that can only be a legal move", _move),
        Shape("D", "FEN and a list of the legal moves by letter, one letter", _letter_of_list),
        Shape("E", "FEN, one letter", _letter_by_position),
        Shape("F", "as default, with no room for an end after the longest move", _move_without_end),
        Shape(
            "G", "the moves so far, which grow only at the end, and one letter", _letter_by_moves
        ),
        Shape(
            DEFAULT,
            "as this arena's agents ask: the moves so far, an answer that can only be a legal move",
            _as_agents_ask,
        ),
        Shape(
            "mixed",
            "the moves so far, free text of mixed lengths: 85 % "
            f"{SHORT[0]}–{SHORT[1]} tokens, 15 % {LONG[0]}–{LONG[1]}",
            _mixed,
        ),
    )
}


def fens(config: RunConfig, workload: Workload) -> dict[tuple[str, int], str]:
    """The position of every item of a workload that was recorded from this config, by match and
    ply."""
    specs = {spec.id: spec for spec in schedule.matches(config)}
    found = {}
    for match in workload.matches:
        spec = specs[match[0].match_id]
        position = load_game(spec.game).position(spec.start)
        found[spec.id, 0] = position.fen
        for move in match[-1].parts.moves:
            position = position.play(move)
            found[spec.id, position.ply] = position.fen
    return found


def priming(question: Question) -> Question:
    """That brings the question's prompt into the cache, and no more."""
    sampling = replace(question.sampling, min_tokens=0)
    return replace(question, choices=None, max_tokens=1, sampling=sampling)


def without_least(question: Question) -> Question:
    """For an engine that cannot be told a least length."""
    return replace(question, sampling=replace(question.sampling, min_tokens=0))


# what was measured


class Cell(NamedTuple):
    """A shape, asked by so many streams."""

    shape: str
    streams: int
    submission: Submission
    """continuous: a stream asks again as soon as it is answered. waves: when all are."""

    def __str__(self) -> str:
        streams = "one stream" if self.streams == 1 else f"{self.streams} streams"
        return f"{self.shape}, {streams}{' in waves' if self.submission == 'waves' else ''}"


def cells(streams: int) -> tuple[Cell, ...]:
    """All of them; the first is what the others are measured by."""
    return (
        *(Cell(shape, streams, "continuous") for shape in SHAPES),
        *(Cell(shape, streams, "waves") for shape in (DEFAULT, "mixed")),
        *(Cell(shape, 1, "continuous") for shape in (DEFAULT, "A")),
    )


def cell_row(cell: Cell, runs: Sequence[Measurement]) -> dict[str, Any]:
    """One cell over its repeats. Tokens are means an answer; None: the engine does not say."""
    answers = [answer for run in runs for answer in run.answers]
    good = [answer for answer in answers if answer.fault is None]
    replies = [
        (answer.reply, run.share(answer))
        for run in runs
        for answer in run.answers
        if answer.fault is None and answer.reply is not None
    ]
    took = summary((answer.done - answer.sent) * 1000 for answer in good)
    return {
        "shape": cell.shape,
        "streams": cell.streams,
        "submission": cell.submission,
        "moves_per_s": [run.moves_per_s for run in runs],
        "seconds": [run.seconds for run in runs],
        "prompt_tokens": _mean((reply.usage.prompt, share) for reply, share in replies),
        "uncached": _mean((_uncached(reply.usage), share) for reply, share in replies),
        "output_tokens": _mean((reply.usage.completion, share) for reply, share in replies),
        "p50_ms": took["p50"],
        "p95_ms": took["p95"],
        "step_requests": _mean((reply.step_requests_mean, share) for reply, share in replies),
        "answers": len(good),
        "errors": dict(Counter(answer.fault for answer in answers if answer.fault is not None)),
    }


def _uncached(usage: Usage) -> int | None:
    if usage.prompt is None or usage.cached is None:
        return None
    return usage.prompt - usage.cached


def _mean(values: Iterable[tuple[float | None, float]]) -> float | None:
    """Of those known, each by the share that counts: else long answers, of which more reach into a
    window from outside, would count too much."""
    known = [(value, share) for value, share in values if value is not None and share]
    if not known:
        return None
    return math.fsum(value * share for value, share in known) / math.fsum(s for _, s in known)


def notes(rows: Sequence[Mapping[str, Any]], seconds: float) -> Iterator[str]:
    """What a reader must know of cells that were to last so many seconds each."""
    short = [row for row in rows if min(row["seconds"]) < SHORT_WINDOW * seconds]
    if short:
        short.sort(key=lambda row: min(row["seconds"]))
        least = min(short[0]["seconds"])
        yield (
            f"{len(short)} of {len(rows)} cells ran out of questions, the first after {least:.2f} "
            f"of {seconds:g} s ({cell_of(short[0])}), which is all that its figures are of; raise "
            "tournament.pairs or tournament.max_plies"
        )
    for row in rows:
        if row["shape"] == "A" and row["uncached"] not in (None, row["prompt_tokens"]):
            yield f"{cell_of(row)}: the prefix cache could not be turned off"
        written = row["output_tokens"]
        if row["shape"] in ("A", "B") and written not in (None, CHAT_TOKENS):
            yield f"{cell_of(row)}: answers are of {written:.1f} tokens instead of {CHAT_TOKENS}"


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a shape, streams at once and continuous submission are worth."""
    by_cell = {cell_of(row): row for row in rows}
    streams = next(iter(by_cell)).streams
    return [
        {
            "cell": one._asdict(),
            "to": other._asdict(),
            **ratio(by_cell[one], by_cell[other]),
        }
        for one, other in _compared(streams)
    ]


def _compared(streams: int) -> Iterator[tuple[Cell, Cell]]:
    full = Cell(DEFAULT, streams, "continuous")
    yield full, Cell("A", streams, "continuous")
    yield full, Cell(DEFAULT, 1, "continuous")
    yield full, Cell("A", 1, "continuous")
    for shape in (DEFAULT, "mixed"):
        yield Cell(shape, streams, "continuous"), Cell(shape, streams, "waves")


def cell_of(row: Mapping[str, Any]) -> Cell:
    return Cell(row["shape"], row["streams"], row["submission"])


def ratio(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """Of two cells' moves a second: each repeat's own, of which median, least and greatest."""
    pairs = zip(one["moves_per_s"], other["moves_per_s"], strict=True)
    known = spread([mine / theirs for mine, theirs in pairs])
    assert known is not None
    return dict(zip(("ratio", "least", "most"), known, strict=True))
