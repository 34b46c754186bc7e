"""The bench of replicas in words and rows of text. Pure."""

from collections.abc import Mapping
from typing import Any

from arena.compare_text import number
from arena.replica_bench import LEAST_LINEAR, LOADED_SHARE, MOST_ADDED_MS, counted
from arena.shapes_text import figure, rate_text
from arena.simulate_text import Table

Row = Mapping[str, Any]

TITLE = "replicas on Ray"


def summary_text(result: Row) -> str:
    """What was measured."""
    return (
        f"engines with no model that answer in {result['latency_s']:g} s, "
        f"{result['matches_per_replica']} matches for each at once; windows of "
        f"{result['seconds']:g} s, {result['repeats']} repeats"
    )


def tables(result: Row) -> tuple[Table, ...]:
    """Throughput by replicas, medians of the repeats with the least and the most; and what the way
    to a replica costs."""
    columns = (
        *("replicas", "matches", "ideal", "moves/s (least–most)", "linear"),
        *("moved", "most at one", "verdict"),
    )
    rows = tuple(map(_cell_texts, result["cells"]))
    spent = result["overhead_ms"]
    ways = ((name, spent[name]) for name in ("embedded", "ray"))
    cost = tuple(
        (way, *(number(told[key], 2) for key in ("p50", "p95", "p99"))) for way, told in ways
    )
    return (
        Table("Moves a second", columns, rows),
        Table("A move outside the engine", ("engine", "p50 ms", "p95 ms", "p99 ms"), cost),
    )


def _cell_texts(row: Row) -> tuple[str, ...]:
    return (
        str(row["replicas"]),
        str(row["matches"]),
        figure(row["ideal_moves_per_s"]),
        rate_text(row["moves_per_s"]),
        f"{row['linear']:.2f}",
        str(row["matches_moved"]),
        f"{row['share_max']:.0%}",
        _verdict(row["is_within"]),
    )


def _verdict(is_within: bool | None) -> str:
    return {True: "ok", False: "too few", None: "beyond the limit"}[is_within]


def lines(result: Row) -> list[str]:
    """What it comes to."""
    limit, spent = result["limit"], result["overhead_ms"]
    most = result["cells"][-1]["replicas"]
    added = f"{spent['p95_added']:.1f} ms at p95"
    is_kept = "within" if spent["is_within"] else "over"
    return [
        "linear: moves/s ÷ (replicas × those of one); moved: matches that more than one replica "
        "answered; most at one: of the matches, at the replica that had most",
        f"the arena's own limit: {limit['embedded_moves_per_s']:,.0f} moves/s with an embedded "
        f"engine that answers at once, {limit['ray_moves_per_s']:,.0f} through {counted(most)}",
        f"of a cell that needs more than {LOADED_SHARE:.0%} of it nothing is asked, of others at "
        f"least {LEAST_LINEAR:.0%} of linear",
        f"the way to a replica and back adds {added}, {is_kept} {MOST_ADDED_MS:g} ms",
    ]
