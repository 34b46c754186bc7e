"""What was measured of engines, as figures that can be compared. Pure.

A cell is one way of asking: the open loop, or the closed loop with so many questions at once. Each
was measured once a repeat on each engine. A difference counts as one only where the engines' ranges
over the repeats do not meet.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal, NamedTuple

from arena.distribution import Summary, percentile, summary, weighted_summary
from serving import Reply
from serving.telemetry import time_to_first_token_s

SCHEMA_VERSION = 1
MIN_REPEATS = 3
"""With fewer nothing is said of a difference."""
LATE_START_MS = 10.0
"""An open loop whose median question left later than this measured our own machine."""
MANY_OVERLAPS = 0.02
"""Share of an open loop's questions that left before their match's last was answered."""
UNEVEN_PROMPTS = 0.1
"""Prompts whose mean length differs by more are told: the engines got to other plies."""

Loop = Literal["open", "closed"]


class Cell(NamedTuple):
    """One way of asking."""

    loop: Loop
    concurrency: int | None
    """Questions at once in the closed loop."""

    def __str__(self) -> str:
        return self.loop if self.concurrency is None else f"{self.loop} {self.concurrency}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one question; times are `time.monotonic()` seconds."""

    due: float
    """When it was to be sent: in the closed loop, when it was."""
    sent: float
    done: float
    reply: Reply | None
    fault: str | None
    """The kind of failure; None: a legal move."""
    overlaps: bool = False
    """The question before it in its match was not answered yet."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One cell in one repeat."""

    began: float
    ended: float
    """End of the window in which moves are counted; answers after it were waited for."""
    answers: tuple[Answer, ...]
    steps: Mapping[int, int]
    """Engine steps in the window by the number of requests in them; empty: it does not say."""

    @property
    def seconds(self) -> float:
        return max(self.ended - self.began, 1e-9)

    @property
    def moves(self) -> tuple[Answer, ...]:
        """Legal moves that were done within the window."""
        return tuple(a for a in self.answers if a.fault is None and a.done <= self.ended)


@dataclass(slots=True)
class EngineRecord:
    """One engine over all repeats."""

    name: str
    kind: str
    model: str | None
    max_concurrent: int
    settings: Mapping[str, Any]
    flags: Sequence[str] = ()
    """Its command line, or arguments, as it was last started."""
    version: str | None = None
    start_s: list[float] = field(default_factory=list)
    """Seconds until it was ready, each time that it was started."""
    restarts: int = 0
    """Times that it died or stalled and was started again while it was measured."""
    forgets: bool = True
    """Its prefix cache was empty at the start of every cell."""
    failures: list[str] = field(default_factory=list)
    """What kept cells from being measured."""
    cells: dict[Cell, list[Measurement | None]] = field(default_factory=dict)
    """A measurement a repeat; None: it could not be made."""
    greedy: Sequence[str | None] = ()
    """Answers to the sample at temperature 0; None: none came."""


# cells


def cell_row(
    record: EngineRecord, cell: Cell, *, slo_s: float, plies_per_game: float
) -> dict[str, Any]:
    """One cell of one engine: figures over all repeats, and each repeat's own."""
    runs = record.cells[cell]
    made = [run for run in runs if run is not None]
    answers = [answer for run in made for answer in run.answers]
    replies = [answer.reply for answer in answers if answer.reply is not None]
    rates = [None if run is None else len(run.moves) / run.seconds for run in runs]
    rate = _median(rates)
    told = [(r.usage.prompt, r.usage.cached) for r in replies if r.usage.cached is not None]
    steps: Counter[int] = Counter()
    for run in made:
        steps.update(run.steps)
    return {
        "engine": record.name,
        "version": record.version,
        "loop": cell.loop,
        "concurrency": cell.concurrency,
        "moves_per_s": rates,
        "games_per_h": None if rate is None else rate * 3600 / plies_per_game,
        "latency_ms": _milliseconds(answers, _latency),
        "ttft_ms": _milliseconds(answers, _ttft),
        "output_tokens_per_s": _median([_token_rate(run) for run in made]),
        "output_tokens_per_move": _mean(r.usage.completion for r in replies),
        "prompt_tokens_per_move": _mean(r.usage.prompt for r in replies),
        "uncached_prompt_tokens_per_move": _mean(prompt - cached for prompt, cached in told),
        "prefix_hit_rate": _share(sum(cached for _, cached in told), sum(p for p, _ in told)),
        "occupancy": weighted_summary(
            (requests / record.max_concurrent, number) for requests, number in steps.items()
        ),
        "in_flight": _median([_in_flight(run) for run in made]),
        "slo_attainment": _attainment(answers, slo_s),
        "offered": len(answers),
        "errors": dict(Counter(answer.fault for answer in answers if answer.fault is not None)),
        "overlapping": sum(answer.overlaps for answer in answers),
        "schedule_lag_ms": _milliseconds(answers, _lag),
        "repeats": [None if run is None else _repeat_row(run, slo_s) for run in runs],
    }


def _repeat_row(run: Measurement, slo_s: float) -> dict[str, Any]:
    latency = _milliseconds(run.answers, _latency)
    return {
        "seconds": run.seconds,
        "moves_per_s": len(run.moves) / run.seconds,
        "latency_p50_ms": latency["p50"],
        "latency_p95_ms": latency["p95"],
        "ttft_p50_ms": _milliseconds(run.answers, _ttft)["p50"],
        "slo_attainment": _attainment(run.answers, slo_s),
        "offered": len(run.answers),
    }


def _milliseconds(answers: Iterable[Answer], what: Callable[[Answer], float | None]) -> Summary:
    seconds = (what(answer) for answer in answers)
    return summary(None if value is None else value * 1000 for value in seconds)


def _latency(answer: Answer) -> float | None:
    """From when it was due; of what was answered by a legal move."""
    return answer.done - answer.due if answer.fault is None else None


def _ttft(answer: Answer) -> float | None:
    return None if answer.reply is None else time_to_first_token_s(answer.reply)


def _lag(answer: Answer) -> float:
    return answer.sent - answer.due


def _attainment(answers: Sequence[Answer], slo_s: float) -> float | None:
    """Legal moves within `slo_s` of their due times, of all that were offered."""
    in_time = sum(a.fault is None and a.done - a.due <= slo_s for a in answers)
    return _share(in_time, len(answers))


def _token_rate(run: Measurement) -> float:
    inside = (a.reply for a in run.answers if a.done <= run.ended)
    return sum(reply.usage.completion for reply in inside if reply is not None) / run.seconds


def _in_flight(run: Measurement) -> float:
    """Mean number of unanswered questions in the window, by adding up how long each was one."""
    spans = (min(a.done, run.ended) - min(a.sent, run.ended) for a in run.answers)
    return sum(spans) / run.seconds


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.fmean(known) if known else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


# between engines

METRICS: Mapping[Loop, Mapping[str, bool]] = {
    "closed": {"moves_per_s": True, "latency_p50_ms": False, "latency_p95_ms": False},
    "open": {"slo_attainment": True, "latency_p50_ms": False, "latency_p95_ms": False},
}
"""What is compared, and whether more is better. Moves a second of an open loop are those that were
asked for, as long as an engine keeps up."""


def differences(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each pair of engines in each cell: the ratio of their medians, and whether it is more than
    what the repeats differ by.

    `ratio_low` and `ratio_high` are the least and greatest ratio of any two of their repeats (None
    where one of the second engine's is 0). A difference is within the spread if the two ranges
    meet; that is None with fewer than three repeats.
    """
    rows = []
    for one, other in combinations(cells, 2):
        if (one["loop"], one["concurrency"]) == (other["loop"], other["concurrency"]):
            for metric, more_is_better in METRICS[one["loop"]].items():
                row = _difference(one, other, metric, more_is_better)
                rows += [] if row is None else [row]
    return rows


def _difference(
    one: Mapping[str, Any], other: Mapping[str, Any], metric: str, more_is_better: bool
) -> dict[str, Any] | None:
    mine, theirs = _values(one, metric), _values(other, metric)
    if not mine or not theirs:
        return None
    can_divide = min(theirs) > 0
    is_within = None
    if min(len(mine), len(theirs)) >= MIN_REPEATS:
        is_within = min(mine) <= max(theirs) and min(theirs) <= max(mine)
    better = one if (min(mine) > max(theirs)) == more_is_better else other
    return {
        "loop": one["loop"],
        "concurrency": one["concurrency"],
        "metric": metric,
        "engines": [one["engine"], other["engine"]],
        "ratio": statistics.median(mine) / statistics.median(theirs) if can_divide else None,
        "ratio_low": min(mine) / max(theirs) if can_divide else None,
        "ratio_high": max(mine) / min(theirs) if can_divide else None,
        "is_within_spread": is_within,
        "better": better["engine"] if is_within is False else None,
    }


def _values(cell: Mapping[str, Any], metric: str) -> list[float]:
    repeats = (repeat for repeat in cell["repeats"] if repeat is not None)
    return [repeat[metric] for repeat in repeats if repeat[metric] is not None]


def agreement(records: Sequence[EngineRecord]) -> dict[str, Any]:
    """How often engines answer alike when each takes its likeliest choice."""
    pairs = []
    for one, other in combinations(records, 2):
        both = [
            mine == theirs
            for mine, theirs in zip(one.greedy, other.greedy, strict=False)
            if mine is not None and theirs is not None
        ]
        pairs.append(
            {
                "engines": [one.name, other.name],
                "n": len(both),
                "equal": sum(both),
                "share": _share(sum(both), len(both)),
            }
        )
    return {"asked": max((len(record.greedy) for record in records), default=0), "pairs": pairs}


def unequal(
    records: Sequence[EngineRecord],
    knobs: Mapping[str, Mapping[str, Any]],
    cells: Sequence[Mapping[str, Any]],
    matches: int,
) -> list[dict[str, Any]]:
    """Everything in which the engines did not have the same: `{knob, values, note}`.

    `knobs` are each engine's values by name; an engine that has slots, and fewer than `matches` are
    played at once, is told beside them.
    """
    rows = []
    for knob in dict.fromkeys(knob for values in knobs.values() for knob in values):
        values = {record.name: knobs[record.name].get(knob) for record in records}
        if len(set(values.values())) > 1 and knob != "slots":
            rows.append({"knob": knob, "values": values, "note": ""})
    slots = {name: values["slots"] for name, values in knobs.items() if values.get("slots")}
    if any(number < matches for number in slots.values()):
        note = (
            f"{matches} matches are played at once in the open loop: with fewer slots they take "
            "each other's cached transcripts"
        )
        rows.append({"knob": "slots", "values": slots, "note": note})
    if not all(record.forgets for record in records):
        note = "where it was not emptied, a cell may find prompts of the cells before it"
        values = {record.name: record.forgets for record in records}
        rows.append(
            {"knob": "prefix cache emptied before each cell", "values": values, "note": note}
        )
    return rows + _uneven_prompts(cells)


def _uneven_prompts(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_cell: dict[Cell, dict[str, float]] = {}
    for row in cells:
        if row["loop"] == "closed" and row["prompt_tokens_per_move"] is not None:
            cell = Cell(row["loop"], row["concurrency"])
            by_cell.setdefault(cell, {})[row["engine"]] = round(row["prompt_tokens_per_move"], 1)
    return [
        {
            "knob": f"prompt tokens a move, {cell}",
            "values": values,
            "note": "a faster engine gets to later plies, whose prompts are longer",
        }
        for cell, values in by_cell.items()
        if max(values.values()) > min(values.values()) * (1 + UNEVEN_PROMPTS)
    ]


def notes(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know of single cells."""
    told = []
    for row in cells:
        if row["loop"] == "closed":
            continue
        where, lag = f"{row['engine']}, open loop", row["schedule_lag_ms"]["p50"]
        if lag is not None and lag > LATE_START_MS:
            told.append(
                f"{where}: the median question left {lag:.0f} ms after it was due, so this machine "
                "and not the engine was the limit"
            )
        if row["overlapping"] > MANY_OVERLAPS * row["offered"]:
            told.append(
                f"{where}: {row['overlapping']} of {row['offered']} questions left before their "
                "match's last was answered, as clocks demand; an engine with a cache a slot then "
                "computes a match in two"
            )
    return told


def spread(values: Sequence[float | None]) -> tuple[float, float, float] | None:
    """Median, least and greatest of the repeats that were measured; None of none."""
    known = sorted(value for value in values if value is not None)
    return (percentile(known, 0.5), known[0], known[-1]) if known else None
