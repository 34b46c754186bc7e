"""The bench of shapes in words and rows of text, the same for the terminal and the page. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from arena.compare_figures import spread
from arena.compare_text import number
from arena.shapes import SHAPES, Cell, ratio
from arena.simulate_text import Table

Row = Mapping[str, Any]

FREE = "free answers count as moves whatever they say"


def title(result: Row) -> str:
    engine = result["engine"]
    return f"{result['name']}: shapes of a request, engine {engine['name']}"


def summary_text(result: Row) -> str:
    """What was asked of what."""
    engine, work = result["engine"], result["workload"]
    version = f" {engine['version']}" if engine["version"] else ""
    model = f", {engine['model']}" if engine["model"] else ""
    return (
        f"{engine['kind']}{version}{model}; {result['streams']} streams; cells of "
        f"{result['seconds']:g} s, {result['repeats']} repeats, cells in turns; workload "
        f"{work['digest']} ({work['source']}); {FREE}"
    )


def shape_lines() -> list[str]:
    """What each shape is."""
    return [f"{shape.name}: {shape.about}" for shape in SHAPES.values()]


def tables(result: Row) -> tuple[Table, ...]:
    """Every cell: medians of the repeats in moves a second, with the least and the most."""
    first = result["cells"][0]
    columns = (
        "shape",
        "streams",
        "moves/s (least–most)",
        "× A",
        "p50 ms",
        "p95 ms",
        "uncached",
        "written",
        "in a step",
        "failures",
    )
    rows = tuple(_cell_texts(row, ratio(row, first)["ratio"]) for row in result["cells"])
    return (Table("A move, by how it is asked for", columns, rows),)


def _cell_texts(row: Row, by_a: float) -> tuple[str, ...]:
    waves = " in waves" if row["submission"] == "waves" else ""
    return (
        row["shape"],
        f"{row['streams']}{waves}",
        rate_text(row["moves_per_s"]),
        figure(by_a),
        number(row["p50_ms"]),
        number(row["p95_ms"]),
        number(row["uncached"]),
        number(row["output_tokens"], 1),
        number(row["step_requests"], 1),
        ", ".join(f"{kind} {count}" for kind, count in row["errors"].items()) or "none",
    )


def rate_text(rates: Sequence[float]) -> str:
    known = spread(rates)
    assert known is not None
    median, least, most = map(figure, known)
    return f"{median} ({least}–{most})"


def figure(value: float) -> str:
    """In three digits."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def lines(result: Row) -> list[str]:
    """What it comes to, and what a reader must know."""
    told = [
        f"{Cell(**row['cell'])}: {figure(row['ratio'])} × {Cell(**row['to'])} "
        f"({figure(row['least'])}–{figure(row['most'])} over the repeats)"
        for row in result["ratios"]
    ]
    return told + list(result["notes"])
