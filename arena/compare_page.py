"""A comparison as one self-contained HTML file. Names in it are text, whatever they hold."""

import html
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from arena import output
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
from arena.dashboard.server import STATIC
from arena.output import HTML_PAGE
from arena.page import charts_script, embeddable, policy

Row = Mapping[str, Any]

COLOURS = ("#3b82c4", "#d9822b", "#2f9e6e", "#b5539c", "#8a8f98", "#c7a008")
"""Of engines, in order and then again; legible on light and on dark."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")

_DECADES_OF_STEPS = 4
"""A logarithmic axis of more is marked at the powers of ten alone."""
_MARGIN = 1.2
"""Times which it reaches beyond its first and last mark."""

_SCRIPT = """
const figures = JSON.parse(document.getElementById("figures").textContent);
function draw() {
  const style = getComputedStyle(document.body);
  for (const { id, data, layout } of figures) {
    const axis = { gridcolor: "rgba(128,128,128,0.25)", zeroline: false, automargin: true };
    Plotly.react(id, data, {
      ...layout,
      xaxis: { ...axis, ...layout.xaxis },
      yaxis: { ...axis, ...layout.yaxis },
      font: { family: style.fontFamily, size: 12, color: style.color },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
    }, { displayModeBar: false, responsive: true });
  }
}
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
"""

_STYLE = """
header { padding: 10px 20px; }
h1 { font-size: 14px; }
main { max-width: 1400px; }
main > p { margin-top: 16px; }
section { margin-top: 24px; }
h2 { margin-bottom: 8px; }
.plot { height: 320px; }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); }
table { width: auto; border-collapse: collapse; }
th, td { padding: 4px 8px; border-bottom: 1px solid var(--rule); text-align: left; }
th { color: var(--muted); font-weight: 600; white-space: nowrap; }
.cells td:nth-child(n+3):not(:last-child), .cells th:nth-child(n+3):not(:last-child),
.matrix td:nth-child(n+2), .matrix th:nth-child(n+2) { text-align: right; white-space: nowrap; }
.lines { padding-left: 18px; }
.lines li { margin: 3px 0; overflow-wrap: anywhere; }
.unequal { border-left: 3px solid var(--mark); background: var(--warn-soft); }
pre { padding: 8px 10px; overflow: auto; background: var(--raised); font: 12px/1.5 var(--mono); }
"""


def check(path: Path) -> None:
    """Raise the StoreError of `write`, as far as it can be known before there is a result."""
    output.check(path, HTML_PAGE)
    charts_script()


def write(path: Path, result: Row) -> None:
    """Write the page of a comparison, as `output.write` does. StoreError if it cannot be."""
    output.write(path, HTML_PAGE, [page(result)])


def page(result: Row) -> str:
    """The HTML; StoreError where plotly is not installed."""
    charts = charts_script()
    style = (STATIC / "style.css").read_text(encoding="utf-8") + _STYLE
    drawn = embeddable(figures(result["cells"]))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(charts, _SCRIPT)}">\n'
        f"<title>{_text(_title(result))}</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<style>\n{style}</style>\n</head>\n'
        f"<body>\n{_body(result)}\n"
        f'<script type="application/json" id="figures">{drawn}</script>\n'
        f"<script>{charts}</script>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


# what is written


def _body(result: Row) -> str:
    engines = [engine_text(row) for row in result["engines"]]
    failures = [text for row in result["engines"] for text in row["failures"]]
    return "\n".join(
        (
            '<header><div class="brand"><span class="product">Boardfleet</span> '
            f'<h1 class="name">{_text(_title(result))}</h1></div></header>',
            f'<main>\n<p class="muted">{_text(result["name"])}: {_text(summary_text(result))}; '
            f"{_machine(result)}</p>",
            _section("Engines", _lines(engines)),
            _section("What kept cells from being measured", _lines(failures)),
            _section("Not equal", _lines(unequal_texts(result["unequal"])), "panel unequal"),
            _section("Notes", _lines(result["notes"])),
            _section("Charts", _charts(result["cells"])),
            _section("Cells", _cells(result["cells"])),
            _section("Differences", _lines(difference_texts(result["differences"]))),
            _section("Greedy answers alike", _agreement(result)),
            _section("Command lines and arguments", _flags(result["engines"])),
            "</main>",
        )
    )


def _title(result: Row) -> str:
    return f"Engines compared: {', '.join(row['name'] for row in result['engines'])}"


def _machine(result: Row) -> str:
    machine = result["machine"]
    return _text(f"{machine['processors']} processors, {machine['system']}")


def _section(title: str, content: str, kind: str = "") -> str:
    """Nothing where there is nothing to tell."""
    if not content:
        return ""
    return f'<section><h2>{title}</h2><div class="{kind}">{content}</div></section>'


def _lines(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(text)}</li>" for text in texts)
    return f'<ul class="lines">{items}</ul>' if items else ""


def _table(kind: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_text(text)}</th>' for text in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(text)}</td>" for text in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cells(cells: Sequence[Row]) -> str:
    return _table("cells", CELL_HEADINGS, map(cell_texts, cells))


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
    return _table("matrix", ("", *names), rows) + _lines(agreement_texts(result["agreement"]))


def _flags(engines: Sequence[Row]) -> str:
    return "".join(
        f"<details><summary>{_text(row['name'])}</summary><pre>"
        + _text("\n".join(row["flags"]) or json.dumps(row["settings"], indent=2))
        + "</pre></details>"
        for row in engines
    )


def _charts(cells: Sequence[Row]) -> str:
    return (
        '<div class="charts">'
        + "".join(
            f'<figure class="figure"><figcaption><span class="figure-title">{_text(drawn["title"])}'
            f'</span></figcaption><div class="plot" id="{drawn["id"]}"></div>'
            f'<p class="muted">{_text(drawn["note"])}</p></figure>'
            for drawn in figures(cells)
        )
        + "</div>"
    )


def _text(text: str) -> str:
    return html.escape(text)


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
            "layout": {"scattermode": "group", **_layout("", ways, "ms", **_log_axis(cells))},
        },
        {
            "id": "occupancy",
            "title": "Requests in a step ÷ max_concurrent",
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
        # plotly reads some markup in names, and no entity of a quotation mark
        shown = html.escape(name, quote=False)
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


def _log_axis(cells: Sequence[Row]) -> dict[str, Any]:
    """A logarithmic axis around all latencies in ms, marked with plain numbers."""
    shown = [
        value
        for row in cells
        for key in ("p50", "p95", "p99")
        if (value := row["latency_ms"][key]) is not None and value > 0
    ]
    if not shown:
        return {"type": "log"}
    least, most = min(shown), max(shown)
    powers = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 2)
    steps = (1,) if most / least > 10**_DECADES_OF_STEPS else (1, 2, 5)
    marks = [float(f"{step}e{power}") for power in powers for step in steps]
    low = max(mark for mark in marks if mark < least)
    high = min(mark for mark in marks if mark > most)
    ticks = [mark for mark in marks if low <= mark <= high]
    return {
        "type": "log",
        "tickvals": ticks,
        "ticktext": [f"{tick:,.0f}" if tick >= 1 else f"{tick:g}" for tick in ticks],
        "range": [math.log10(low / _MARGIN), math.log10(high * _MARGIN)],
    }


def _layout(across: str, order: Sequence[str], up: str, **more: Any) -> dict[str, Any]:
    return {
        "margin": {"l": 56, "r": 12, "t": 8, "b": 44},
        "showlegend": True,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "xaxis": {
            "type": "category",
            "categoryarray": order,
            "range": [-0.5, len(order) - 0.5],
            "title": {"text": across},
        },
        "yaxis": {"title": {"text": up}, **more},
    }
