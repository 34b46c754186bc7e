"""What was measured of engines, as figures that can be compared. Pure.

A cell is one way of asking: the open loop, or the closed loop with so many questions at once. Each
was measured once a repeat on each engine. A difference counts as one only where the engines' ranges
over the repeats do not meet. A question that got no legal move counts as one that was never
answered, so an engine that refuses is not the faster for it.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
SHORT_WINDOW = 0.9
"""A cell that was measured for a smaller share of its time is told."""
UNEVEN_PROMPTS = 0.1
"""Prompts of a closed loop whose mean length differs by more are told."""
AS_SERVED = "as the server has it"
"""The value of a knob, or its end, that only who started a running server knows."""

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
    warm_failed: int = 0
    """Questions of its warm-up that got no legal move."""
    restarts: int = 0
    """Times that the engine was started again, from its warm-up on."""
    begins_full: bool = False
    """As many questions were under way when the window began as when it ended."""

    @property
    def seconds(self) -> float:
        return max(self.ended - self.began, 1e-9)

    @property
    def moves_per_s(self) -> float:
        """Legal moves that count as the window's, a second."""
        return sum(self.share(a) for a in self.answers if a.fault is None) / self.seconds

    def share(self, answer: Answer) -> float:
        """How much of an answer counts as the window's, 0 to 1.

        Of a window that begins full, the share of its time that lies inside: counted whole, answers
        that come in step would jump by a batch. Of any other, 1 if it was done inside: shares would
        count what waits in a queue that only grows.
        """
        took = answer.done - answer.sent
        if self.begins_full and took > 0:
            return self.inside_s(answer) / took
        return float(answer.done <= self.ended)

    def inside_s(self, answer: Answer) -> float:
        """How long it was under way within the window."""
        return max(0.0, min(answer.done, self.ended) - max(answer.sent, self.began))


@dataclass(slots=True)
class EngineRecord:
    """One engine over all repeats."""

    name: str
    kind: str
    model: str | None
    batch_limit: int
    """Requests that one batch may hold."""
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
    is_refused: bool = False
    """It started and cannot be asked this workload: it is not started again."""
    failures: list[str] = field(default_factory=list)
    """What kept cells from being measured."""
    cells: dict[Cell, list[Measurement | None]] = field(default_factory=dict)
    """A measurement a repeat; None: it was not made."""
    greedy: Sequence[str | None] = ()
    """Answers to the sample at temperature 0, legal or not; None: none came."""


# cells


def cell_row(
    record: EngineRecord, cell: Cell, *, slo_s: float, plies_per_game: float
) -> dict[str, Any]:
    """One cell of one engine: figures over all repeats, and each repeat's own."""
    runs = record.cells[cell]
    made = [run for run in runs if run is not None]
    answers = [answer for run in made for answer in run.answers]
    replies = [answer.reply for answer in answers if answer.reply is not None]
    rates = [None if run is None else run.moves_per_s for run in runs]
    rate = median(rates)
    prompts = [r.usage.prompt for r in replies if r.usage.prompt is not None]
    told = [
        (r.usage.prompt, r.usage.cached)
        for r in replies
        if r.usage.prompt is not None and r.usage.cached is not None
    ]
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
        "latency_ms": _latencies(answers),
        "ttft_ms": _milliseconds(answers, _ttft),
        "output_tokens_per_s": median([_token_rate(run) for run in made]),
        "output_tokens_per_move": _mean(r.usage.completion for r in replies),
        "prompt_tokens_per_move": _mean(prompts),
        "uncached_prompt_tokens_per_move": _mean(prompt - cached for prompt, cached in told),
        "prefix_hit_rate": _share(sum(cached for _, cached in told), sum(p for p, _ in told)),
        "occupancy": weighted_summary(
            (requests / record.batch_limit, number) for requests, number in steps.items()
        ),
        "in_flight": median([_in_flight(run) for run in made]),
        "slo_attainment": _attainment(answers, slo_s),
        "offered": len(answers),
        "errors": dict(Counter(answer.fault for answer in answers if answer.fault is not None)),
        "overlapping": sum(answer.overlaps for answer in answers),
        "warm_up_failed": sum(run.warm_failed for run in made),
        "restarts": sum(run.restarts for run in made),
        "schedule_lag_ms": _milliseconds(answers, _lag),
        "repeats": [None if run is None else _repeat_row(run, slo_s) for run in runs],
    }


def _repeat_row(run: Measurement, slo_s: float) -> dict[str, Any]:
    latency = _latencies(run.answers)
    return {
        "seconds": run.seconds,
        "moves_per_s": run.moves_per_s,
        "latency_p50_ms": latency["p50"],
        "latency_p95_ms": latency["p95"],
        "ttft_p50_ms": _milliseconds(run.answers, _ttft)["p50"],
        "slo_attainment": _attainment(run.answers, slo_s),
        "offered": len(run.answers),
    }


def _milliseconds(answers: Iterable[Answer], what: Callable[[Answer], float | None]) -> Summary:
    seconds = (what(answer) for answer in answers)
    return summary(None if value is None else value * 1000 for value in seconds)


def _latencies(answers: Sequence[Answer]) -> Summary:
    """Milliseconds from when each was due. Mean and max are of the legal moves; percentiles of all
    that were offered, and None where they fall among those that got none."""
    known = sorted((a.done - a.due) * 1000 for a in answers if a.fault is None)
    missing = len(answers) - len(known)
    made = summary(known)
    for name, share in (("p50", 0.50), ("p95", 0.95), ("p99", 0.99)):
        is_known = math.ceil(share * (len(answers) - 1)) < len(known)
        made[name] = percentile(known + known[-1:] * missing, share) if is_known else None
    return made


def _ttft(answer: Answer) -> float | None:
    return None if answer.reply is None else time_to_first_token_s(answer.reply)


def _lag(answer: Answer) -> float:
    return answer.sent - answer.due


def _attainment(answers: Sequence[Answer], slo_s: float) -> float | None:
    """Legal moves within `slo_s` of their due times, of all that were offered."""
    in_time = sum(a.fault is None and a.done - a.due <= slo_s for a in answers)
    return _share(in_time, len(answers))


def _token_rate(run: Measurement) -> float:
    """Counted as moves are, illegal answers too."""
    told = (run.share(a) * a.reply.usage.completion for a in run.answers if a.reply is not None)
    return sum(told) / run.seconds


def _in_flight(run: Measurement) -> float:
    """Mean number of unanswered questions in the window, by adding up how long each was one."""
    return sum(map(run.inside_s, run.answers)) / run.seconds


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.fmean(known) if known else None


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None of none."""
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

    `ratio_low` and `ratio_high` are the least and greatest ratio of any two of their repeats; a
    ratio is None where it would divide by 0. A difference is within the spread if the two ranges
    meet; that is None with fewer than three repeats. There is no row where a repeat has no figure,
    as a percentile that falls among questions that got no legal move.
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
    is_within = None
    if min(len(mine), len(theirs)) >= MIN_REPEATS:
        is_within = min(mine) <= max(theirs) and min(theirs) <= max(mine)
    better = one if (min(mine) > max(theirs)) == more_is_better else other
    return {
        "loop": one["loop"],
        "concurrency": one["concurrency"],
        "metric": metric,
        "engines": [one["engine"], other["engine"]],
        "ratio": _ratio(statistics.median(mine), statistics.median(theirs)),
        "ratio_low": _ratio(min(mine), max(theirs)),
        "ratio_high": _ratio(max(mine), min(theirs)),
        "is_within_spread": is_within,
        "better": better["engine"] if is_within is False else None,
    }


def _values(cell: Mapping[str, Any], metric: str) -> list[float]:
    """Of the repeats that were measured; of none where one of them has no figure."""
    values = [repeat[metric] for repeat in cell["repeats"] if repeat is not None]
    return [] if None in values else values


def _ratio(one: float, other: float) -> float | None:
    return one / other if other > 0 else None


def agreement(records: Sequence[EngineRecord]) -> dict[str, Any]:
    """How often engines answer alike when each takes its likeliest choice, of the questions that
    both answered. A text that is no legal move is an answer too."""
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
    """Everything in which the engines did not have the same, or nobody knows: `{knob, values,
    note}`.

    `knobs` are each engine's values by name; `matches` are played at once in the open loop.
    """
    rows = []
    for knob in dict.fromkeys(knob for values in knobs.values() for knob in values):
        values = {record.name: knobs[record.name].get(knob) for record in records}
        if knob != "slots" and not _are_equal(list(values.values())):
            rows.append({"knob": knob, "values": values, "note": ""})
    rows += _few_slots(knobs, cells, matches)
    if not all(record.forgets for record in records):
        note = "where it was not emptied, a cell may find prompts of the cells before it"
        values = {record.name: record.forgets for record in records}
        rows.append(
            {"knob": "prefix cache emptied before each cell", "values": values, "note": note}
        )
    return rows + _uneven_prompts(cells)


def _are_equal(values: Sequence[object]) -> bool:
    """What is not known is equal to nothing; one engine alone has nothing to be equal to."""
    return len(values) < 2 or all(
        value == values[0] and not str(value).endswith(AS_SERVED) for value in values
    )


def _few_slots(
    knobs: Mapping[str, Mapping[str, Any]], cells: Sequence[Mapping[str, Any]], matches: int
) -> list[dict[str, Any]]:
    """Where matches share slots, which a closed loop of *n* questions does with fewer than *n*."""
    at_once = {f"open of {matches} matches": matches}
    at_once |= {f"closed {row['concurrency']}": row["concurrency"] for row in _closed(cells)}
    slots = {name: values["slots"] for name, values in knobs.items() if values.get("slots")}
    crowded = {
        name: ", ".join(cell for cell, most in at_once.items() if most > number)
        for name, number in slots.items()
    }
    told = "; ".join(f"{name} in {where}" for name, where in crowded.items() if where)
    if not told:
        return []
    note = f"matches that share slots take each other's cached transcripts: {told}"
    return [{"knob": "slots", "values": slots, "note": note}]


def _uneven_prompts(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The open loop asks every engine the same, so a difference there is one of the prompts; the
    closed loop goes as far as an engine gets."""
    same = _prompt_tokens(row for row in cells if row["loop"] == "open" and _is_complete(row))
    rows = []
    if len(set(same.values())) > 1:
        rows.append(_prompts_row("open", same, "the same questions: other templates or tokenizers"))
    by_number: dict[int, list[Mapping[str, Any]]] = {}
    for row in _closed(cells):
        by_number.setdefault(row["concurrency"], []).append(row)
    for number, group in by_number.items():
        tokens = _prompt_tokens(group)
        if tokens and max(tokens.values()) > min(tokens.values()) * (1 + UNEVEN_PROMPTS):
            are_alike = same.keys() >= tokens.keys() and len({same[name] for name in tokens}) == 1
            note = "a faster engine gets to later plies, whose prompts are longer"
            rows.append(_prompts_row(f"closed {number}", tokens, note if are_alike else ""))
    return rows


def _closed(cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in cells if row["loop"] == "closed"]


def _is_complete(row: Mapping[str, Any]) -> bool:
    """Whether every question of every repeat was answered."""
    return not row["errors"] and None not in row["repeats"]


def _prompt_tokens(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each engine that tells it."""
    return {
        row["engine"]: round(row["prompt_tokens_per_move"], 1)
        for row in rows
        if row["prompt_tokens_per_move"] is not None
    }


def _prompts_row(where: str, tokens: Mapping[str, float], note: str) -> dict[str, Any]:
    return {"knob": f"prompt tokens a move, {where}", "values": tokens, "note": note}


def notes(cells: Sequence[Mapping[str, Any]], seconds: float) -> list[str]:
    """What a reader must know of single cells, each of which was to take so many seconds."""
    told: list[str] = []
    for row in cells:
        told += _cell_notes(row, seconds)
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
                "match's last was answered, as clocks demand; in an engine with a cache a slot "
                "such a question waits for the one before"
            )
    return told


def _cell_notes(row: Mapping[str, Any], seconds: float) -> Iterator[str]:
    """Of any loop."""
    where = f"{row['engine']}, {Cell(row['loop'], row['concurrency'])}"
    measured = [repeat for repeat in row["repeats"] if repeat is not None]
    window = median(repeat["seconds"] for repeat in measured)
    if window is not None and window < SHORT_WINDOW * seconds:
        yield (
            f"{where}: ran out of questions after {window:.2f} s of {seconds:g}, which is all that "
            "its figures are of; raise tournament.pairs"
        )
    failed, tails = sum(row["errors"].values()), [repeat["latency_p95_ms"] for repeat in measured]
    if failed and None in (row["latency_ms"]["p99"], *tails):
        yield (
            f"{where}: {failed} of {row['offered']} questions got no legal move, so percentiles of "
            "latency that fall among them are n/a and not compared"
        )
    if row["warm_up_failed"]:
        yield (
            f"{where}: {row['warm_up_failed']} questions of the warm-up got no legal move, so it "
            "began with less in the cache"
        )
    if row["restarts"]:
        yield f"{where}: was started again {row['restarts']} times, which its figures hold"


def spread(values: Sequence[float | None]) -> tuple[float, float, float] | None:
    """Median, least and greatest of the repeats that were measured; None of none."""
    known = sorted(value for value in values if value is not None)
    return (percentile(known, 0.5), known[0], known[-1]) if known else None
