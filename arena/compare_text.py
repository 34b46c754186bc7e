"""A comparison in words and rows of text, the same for the terminal and the page. Pure."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from arena.compare_figures import Cell, spread

Row = Mapping[str, Any]

CELL_HEADINGS = (
    "asked",
    "engine",
    "moves/s (least–most)",
    "games/h",
    "p50 ms",
    "p95 ms",
    "p99 ms",
    "TTFT ms",
    "tok/s",
    "uncached/move",
    "out/move",
    "hits",
    "occupancy",
    "in time",
    "failures",
)
"""Of `cell_texts`; the third to the last but one are numbers."""

_METRICS = {
    "moves_per_s": "moves a second",
    "slo_attainment": "moves in time",
    "latency_p50_ms": "p50 latency",
    "latency_p95_ms": "p95 latency",
}


def cell_texts(row: Row) -> tuple[str, ...]:
    """One cell of one engine. TTFT is the median, occupancy the mean."""
    latency = row["latency_ms"]
    return (
        asked(row),
        row["engine"],
        rate_text(row["moves_per_s"]),
        number(row["games_per_h"]),
        *(_milliseconds(latency[key]) for key in ("p50", "p95", "p99")),
        _milliseconds(row["ttft_ms"]["p50"]),
        number(row["output_tokens_per_s"]),
        number(row["uncached_prompt_tokens_per_move"], 1),
        number(row["output_tokens_per_move"], 1),
        share(row["prefix_hit_rate"]),
        number(row["occupancy"]["mean"], 2),
        share(row["slo_attainment"]),
        ", ".join(f"{kind} {count}" for kind, count in row["errors"].items()) or "none",
    )


def asked(row: Row) -> str:
    """How the questions of a row came: "open", "closed 16"."""
    return str(Cell(row["loop"], row["concurrency"]))


def rate_text(rates: Sequence[float | None]) -> str:
    """Median of the repeats, least and most."""
    known = spread(rates)
    if known is None:
        return "n/a"
    median, least, most = known
    return f"{median:.1f} ({least:.1f}–{most:.1f})"


def difference_texts(rows: Sequence[Row]) -> list[str]:
    """A line for each that says something of its own: in the closed loop latency follows from moves
    a second."""
    return [
        difference_text(row)
        for row in rows
        if row["loop"] == "open" or row["metric"] == "moves_per_s"
    ]


def difference_text(row: Row) -> str:
    """One difference as a line."""
    one, other = row["engines"]
    ratio, low, high = (row[key] for key in ("ratio", "ratio_low", "ratio_high"))
    told = f"{asked(row)}, {_METRICS[row['metric']]}: {one} "
    if low is None:
        told += f"against none of {other}: "
    elif ratio is None:
        told += f"at least {low:.2f} × {other}, whose median is 0: "
    else:
        reach = f"at least {low:.2f}" if high is None else f"{low:.2f} to {high:.2f}"
        told += f"{ratio:.2f} × {other} ({reach} over the repeats): "
    if row["is_within_spread"] is None:
        return f"{told}too few repeats to tell it from chance"
    if row["is_within_spread"]:
        return f"{told}within the spread, no difference shown"
    return f"{told}{row['better']} is better"


def unequal_texts(rows: Sequence[Row]) -> list[str]:
    """A line for each inequality; knobs in which the engines have the same values share one."""
    knobs: dict[str, list[str]] = {}
    for row in rows:
        values = ", ".join(f"{name} {_value(value)}" for name, value in row["values"].items())
        told = values + (f" ({row['note']})" if row["note"] else "")
        knobs.setdefault(told, []).append(row["knob"])
    return [f"{', '.join(names)}: {told}" for told, names in knobs.items()]


def agreement_texts(agreement: Row) -> list[str]:
    """A line for each pair of engines."""
    return [_agreement_text(pair, agreement["asked"]) for pair in agreement["pairs"]]


def _agreement_text(pair: Row, asked: int) -> str:
    one, other = pair["engines"]
    if not pair["n"]:
        return f"{one} and {other}: none of the {asked} asked was answered by both"
    return (
        f"{one} and {other}: {pair['equal']} alike ({share(pair['share'])}) of {pair['n']} "
        f"answered by both, of {asked} asked"
    )


def engine_text(row: Row) -> str:
    """What an engine was."""
    starts = spread(row["start_s"])
    started = "never started" if starts is None else f"ready in {starts[0]:.1f} s"
    version = f" {row['version']}" if row["version"] else ""
    weights = f"; weights: {row['weights']}" if row["weights"] else ""
    dtype = f"; dtype: {row['dtype']}" if row["dtype"] else ""
    again = f", started again {row['restarts']} times" if row["restarts"] else ""
    return f"{row['name']}: {row['kind']}{version}{weights}{dtype}; {started}{again}"


def flags_texts(rows: Sequence[Row]) -> Iterator[str]:
    """The command line or the arguments of each engine that has any, as a line."""
    for row in rows:
        if row["flags"]:
            yield f"{row['name']}: {shlex.join(row['flags'])}"


def summary_text(result: Row) -> str:
    """What was asked of all of them."""
    work, options = result["workload"], result["options"]
    cut = "; interrupted, so only what was measured by then" if result["interrupted"] else ""
    return (
        f"workload {work['digest']} ({work['source']}): {work['items']:,} questions of "
        f"{work['matches']} matches; cells of {options['seconds']:g} s, {options['repeats']} "
        f"repeats; open loop of {work['parallel_matches']} matches, each seat every "
        f"{work['move_period_seconds']:g} s; in time is within {options['slo_seconds']:g} s{cut}"
    )


def number(value: float | None, digits: int = 0) -> str:
    return "n/a" if value is None else f"{value:,.{digits}f}"


def _milliseconds(value: float | None) -> str:
    return number(value, 0 if value is None or value >= 10 else 1)


def share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"


def _value(value: object) -> str:
    if value is None:
        return "its own choice"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
