"""A comparison as one self-contained HTML file. Names in it are text, whatever they hold."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from arena import chart_page
from arena.chart_page import (
    COLOURS,
    SYMBOLS,
    charts,
    layout,
    lines,
    logarithmic,
    paragraph,
    section,
    shown_name,
    table,
    text,
)
from arena.compare_figures import spread
from arena.compare_text import (
    CELL_HEADINGS,
    agreement_texts,
    asked,
    cell_texts,
    difference_texts,
    engine_text,
    share,
    summary_text,
    unequal_texts,
)

Row = Mapping[str, Any]


_STYLE = """
.cells td:nth-child(n+3):not(:last-child), .cells th:nth-child(n+3):not(:last-child)
{ text-align: right; white-space: nowrap; }
"""


def write(path: Path, result: Row) -> None:
    """Write the page of a comparison, as `output.write` does. StoreError if it cannot be."""
    chart_page.write(path, page(result))


def page(result: Row) -> str:
    """The HTML; StoreError where plotly is not installed."""
    return chart_page.document(_title(result), _body(result), figures(result["cells"]), _STYLE)


# what is written


def _body(result: Row) -> tuple[str, ...]:
    engines = [engine_text(row) for row in result["engines"]]
    failures = [told for row in result["engines"] for told in row["failures"]]
    return (
        paragraph(f"{result['name']}: {summary_text(result)}; {_machine(result)}"),
        section("Engines", lines(engines)),
        section("What kept cells from being measured", lines(failures)),
        section("Not equal", lines(unequal_texts(result["unequal"])), "panel warning"),
        section("Notes", lines(result["notes"])),
        section("Charts", charts(figures(result["cells"]))),
        section("Cells", _cells(result["cells"])),
        section("Differences", lines(difference_texts(result["differences"]))),
        section("Greedy answers alike", _agreement(result)),
        section("Command lines and arguments", _flags(result["engines"])),
    )


def _title(result: Row) -> str:
    return f"Engines compared: {', '.join(row['name'] for row in result['engines'])}"


def _machine(result: Row) -> str:
    machine = result["machine"]
    return f"{machine['processors']} processors, {machine['system']}"


def _cells(cells: Sequence[Row]) -> str:
    return table("cells", CELL_HEADINGS, map(cell_texts, cells))


def _agreement(result: Row) -> str:
    """A matrix, and the counts behind it."""
    pairs = result["agreement"]["pairs"]
    if not pairs:
        return ""
    names = [row["name"] for row in result["engines"]]
    told = {frozenset(pair["engines"]): f"{share(pair['share'])} of {pair['n']}" for pair in pairs}
    rows = [
        (name, *("" if name == other else told[frozenset((name, other))] for other in names))
        for name in names
    ]
    return table("figures", ("", *names), rows) + lines(agreement_texts(result["agreement"]))


def _flags(engines: Sequence[Row]) -> str:
    return "".join(
        f"<details><summary>{text(row['name'])}</summary><pre>"
        + text("\n".join(row["flags"]) or json.dumps(row["settings"], indent=2))
        + "</pre></details>"
        for row in engines
    )


# what is drawn


def figures(cells: Sequence[Row]) -> list[dict[str, Any]]:
    """The charts as plotly takes them, each with an id, a title and a note."""
    engines = list(dict.fromkeys(row["engine"] for row in cells))
    closed = [row for row in cells if row["loop"] == "closed"]
    ways = list(dict.fromkeys(map(asked, cells)))
    numbers = list(dict.fromkeys(str(row["concurrency"]) for row in closed))
    silent = [
        name
        for name in engines
        if not any(row["engine"] == name and row["occupancy"]["mean"] is not None for row in cells)
    ]
    return [
        {
            "id": "throughput",
            "title": "Moves a second, closed loop",
            "note": "Median of the repeats; bars reach from the least to the most.",
            "data": _each(engines, closed, _throughput),
            "layout": _layout("questions at once", numbers, "moves/s", rangemode="tozero"),
        },
        {
            "id": "latency",
            "title": "Latency of a move, ms",
            "note": "Full marks p50, with lines up to p99; open circles p95. None where so many "
            "questions got no legal move.",
            "data": _each(engines, cells, _latency) + _each(engines, cells, _latency_p95),
            "layout": {
                "scattermode": "group",
                **_layout("", ways, "ms", **logarithmic(_latencies(cells))),
            },
        },
        {
            "id": "occupancy",
            "title": "Requests in a step ÷ the batch limit",
            "note": f"Mean. Not told by {', '.join(silent)}." if silent else "Mean.",
            "data": _each(engines, cells, _occupancy),
            "layout": {"scattermode": "group", **_layout("", ways, "", range=[0, 1.05])},
        },
        {
            "id": "attainment",
            "title": "Moves in time, of all that were offered",
            "note": "Late, refused and illegal ones are misses.",
            "data": _each(engines, cells, _in_time),
            "layout": {
                "scattermode": "group",
                **_layout("", ways, "", range=[0, 1.05], tickformat=".0%"),
            },
        },
    ]


def _each(
    engines: Sequence[str],
    cells: Sequence[Row],
    trace: Callable[[Sequence[Row]], dict[str, Any]],
) -> list[dict[str, Any]]:
    """A trace an engine, in its colour and with its mark; none of one with nothing to draw, beside
    whose place the others would stand."""
    traces = []
    for place, name in enumerate(engines):
        colour = COLOURS[place % len(COLOURS)]
        drawn = trace([row for row in cells if row["engine"] == name])
        if all(value is None for value in drawn["y"]):
            continue
        marker = {
            "color": colour,
            "size": 9,
            "symbol": SYMBOLS[place % len(SYMBOLS)],
            **drawn.pop("marker", {}),
        }
        shown = shown_name(name)
        traces.append(
            {
                "name": shown,
                "legendgroup": shown,
                "offsetgroup": str(place),
                "mode": "markers",
                "line": {"color": colour},
                **drawn,
                "marker": marker,
            }
        )
    return traces


def _throughput(rows: Sequence[Row]) -> dict[str, Any]:
    known = [(row, found) for row in rows if (found := spread(row["moves_per_s"])) is not None]
    return {
        "mode": "lines+markers",
        "x": [str(row["concurrency"]) for row, _ in known],
        "y": [median for _, (median, _, _) in known],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [most - median for _, (median, _, most) in known],
            "arrayminus": [median - least for _, (median, least, _) in known],
        },
    }


def _latency(rows: Sequence[Row]) -> dict[str, Any]:
    known = [row for row in rows if row["latency_ms"]["p50"] is not None]
    p99 = [row["latency_ms"]["p99"] for row in known]
    p50 = [row["latency_ms"]["p50"] for row in known]
    reach = [0 if most is None else most - usual for most, usual in zip(p99, p50, strict=True)]
    return {
        "x": list(map(asked, known)),
        "y": p50,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": reach,
            "arrayminus": [0] * len(reach),
        },
    }


def _latency_p95(rows: Sequence[Row]) -> dict[str, Any]:
    known = [row for row in rows if row["latency_ms"]["p95"] is not None]
    return {
        "x": list(map(asked, known)),
        "y": [row["latency_ms"]["p95"] for row in known],
        "marker": {"symbol": "circle-open"},
        "showlegend": False,
    }


def _occupancy(rows: Sequence[Row]) -> dict[str, Any]:
    return {"x": list(map(asked, rows)), "y": [row["occupancy"]["mean"] for row in rows]}


def _in_time(rows: Sequence[Row]) -> dict[str, Any]:
    return {"x": list(map(asked, rows)), "y": [row["slo_attainment"] for row in rows]}


def _latencies(cells: Sequence[Row]) -> Iterator[float | None]:
    return (row["latency_ms"][key] for row in cells for key in ("p50", "p95", "p99"))


def _layout(across: str, order: Sequence[str], up: str, **more: Any) -> dict[str, Any]:
    axis = {"type": "category", "categoryarray": order, "range": [-0.5, len(order) - 0.5]}
    return {"showlegend": True, **layout(across, up, xaxis=axis, **more)}
