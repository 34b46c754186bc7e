"""The bench of shapes as one self-contained HTML file. Names in it are text, whatever they hold."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from arena import chart_page, shapes_text
from arena.chart_page import (
    COLOURS,
    SYMBOLS,
    layout,
    lines,
    logarithmic,
    section,
)
from arena.compare_figures import spread
from arena.shapes import cell_of

Row = Mapping[str, Any]


def write(path: Path, result: Row) -> None:
    """Write the page of a bench, as `output.write` does. StoreError if it cannot be."""
    chart_page.write(path, page(result))


def page(result: Row) -> str:
    """The HTML; StoreError where plotly is not installed."""
    return chart_page.told(
        shapes_text.title(result),
        shapes_text.summary_text(result),
        shapes_text.lines(result),
        shapes_text.tables(result),
        figures(result),
        section("Shapes", lines(shapes_text.shape_lines())),
    )


def figures(result: Row) -> list[dict[str, Any]]:
    """The charts as plotly takes them, each with an id, a title and a note."""
    cells = result["cells"]
    full = [
        row
        for row in cells
        if row["streams"] == result["streams"] and row["submission"] == "continuous"
    ]
    waves = [row for row in cells if row["submission"] == "waves"]
    partners = [row for row in full if row["shape"] in {waved["shape"] for waved in waves}]
    alone = [row for row in cells if row["streams"] == 1]
    return [
        {
            "id": "shapes",
            "title": "Moves a second, by shape",
            "note": f"{result['streams']} streams, and one. Medians of the repeats; lines reach "
            "from the least to the most.",
            "data": [
                _marks(0, _rates(0, f"{result['streams']} streams", full)),
                _marks(1, _rates(1, "one stream", alone)),
            ],
            "layout": _layout("moves/s", **logarithmic(_all_rates((*full, *alone)))),
        },
        {
            "id": "cost",
            "title": "Tokens that a move costs",
            "note": "Prompt tokens to compute and tokens to write, means.",
            "data": [
                _bars(2, "uncached prompt", full, "uncached"),
                _bars(3, "written", full, "output_tokens"),
            ],
            "layout": _layout("tokens"),
        },
        {
            "id": "latency",
            "title": "Latency of a move, ms",
            "note": f"{result['streams']} streams.",
            "data": [
                _marks(0, _bars(0, "p50", full, "p50_ms")),
                _marks(1, _bars(4, "p95", full, "p95_ms")),
            ],
            "layout": _layout(
                "ms", **logarithmic(row[key] for row in full for key in ("p50_ms", "p95_ms"))
            ),
        },
        {
            "id": "waves",
            "title": "Static waves against continuous submission",
            "note": "Moves a second. A wave is as slow as its longest answer; equal answers lose "
            "little.",
            "data": [_rates(1, "waves", waves), _rates(0, "continuous", partners)],
            "layout": _layout("moves/s", rangemode="tozero"),
        },
    ]


def _all_rates(rows: Sequence[Row]) -> Iterator[float]:
    return (rate for row in rows for rate in row["moves_per_s"])


def _rates(place: int, name: str, rows: Sequence[Row]) -> dict[str, Any]:
    known = [found for row in rows if (found := spread(row["moves_per_s"])) is not None]
    return {
        **_bars(place, name, rows, "moves_per_s"),
        "y": [median for median, _, _ in known],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [most - median for median, _, most in known],
            "arrayminus": [median - least for median, least, _ in known],
        },
    }


def _bars(place: int, name: str, rows: Sequence[Row], key: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": name,
        "x": [cell_of(row).shape for row in rows],
        "y": [row[key] for row in rows],
        "marker": {"color": COLOURS[place]},
    }


def _marks(place: int, bars: dict[str, Any]) -> dict[str, Any]:
    """The same as marks: on a logarithmic axis the length of a bar says nothing."""
    marker = {**bars["marker"], "symbol": SYMBOLS[place], "size": 10}
    return {**bars, "type": "scatter", "mode": "markers", "marker": marker}


def _layout(up: str, **more: Any) -> dict[str, Any]:
    return layout("", up, xaxis={"type": "category"}, **more)
