"""A result with charts as one self-contained HTML file. Names are text, whatever they hold."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from arena import output
from arena.dashboard.server import STATIC
from arena.output import HTML_PAGE
from arena.page import charts_script, embeddable, policy

Figure = Mapping[str, Any]
"""What plotly draws: `id`, `title`, `note`, `data` and `layout`."""

COLOURS = ("#3b82c4", "#d9822b", "#2f9e6e", "#b5539c", "#8a8f98", "#c7a008")
"""Of traces, in order and then again; legible on light and on dark."""
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
.figures td:nth-child(n+2), .figures th:nth-child(n+2) { text-align: right; white-space: nowrap; }
.lines { padding-left: 18px; }
.lines li { margin: 3px 0; overflow-wrap: anywhere; }
.warning { border-left: 3px solid var(--mark); background: var(--warn-soft); }
pre { padding: 8px 10px; overflow: auto; background: var(--raised); font: 12px/1.5 var(--mono); }
"""


def check(path: Path) -> None:
    """Raise the StoreError of `write`, as far as it can be known before there is a result."""
    output.check(path, HTML_PAGE)
    charts_script()


def write(path: Path, page: str) -> None:
    """Write a page, as `output.write` does. StoreError if it cannot be."""
    output.write(path, HTML_PAGE, [page])


def document(title: str, body: Sequence[str], figures: Sequence[Figure], style: str = "") -> str:
    """The HTML; `body` is markup, `style` further rules. StoreError where plotly is not installed.

    Every figure needs its place in the body, which `charts` makes.
    """
    script = charts_script()
    rules = (STATIC / "style.css").read_text(encoding="utf-8") + _STYLE + style
    inside = "\n".join(body)
    return (
        '<!doctype html>\n<!-- Boardfleet -->\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(script, _SCRIPT)}">\n'
        f"<title>{text(title)}</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<style>\n{rules}</style>\n</head>\n'
        '<body>\n<header><div class="brand"><span class="product">Boardfleet</span> '
        f'<h1 class="name">{text(title)}</h1></div></header>\n<main>\n{inside}\n</main>\n'
        f'<script type="application/json" id="figures">{embeddable(figures)}</script>\n'
        f"<script>{script}</script>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def text(plain: str) -> str:
    """Plain text as markup."""
    return html.escape(plain)


def shown_name(plain: str) -> str:
    """Plain text as a name that plotly draws: it reads some markup, and no entity of a quotation
    mark."""
    return html.escape(plain, quote=False)


def paragraph(plain: str) -> str:
    return f'<p class="muted">{text(plain)}</p>'


def section(title: str, content: str, kind: str = "") -> str:
    """Nothing where there is nothing to tell."""
    if not content:
        return ""
    return f'<section><h2>{title}</h2><div class="{kind}">{content}</div></section>'


def lines(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{text(line)}</li>" for line in texts)
    return f'<ul class="lines">{items}</ul>' if items else ""


def table(kind: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of the class `kind`: "figures" puts all but the first column to the right."""
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def charts(figures: Sequence[Figure]) -> str:
    """The places that figures are drawn in."""
    return (
        '<div class="charts">'
        + "".join(
            f'<figure class="figure"><figcaption><span class="figure-title">{text(drawn["title"])}'
            f'</span></figcaption><div class="plot" id="{drawn["id"]}"></div>'
            f"{paragraph(drawn['note'])}</figure>"
            for drawn in figures
        )
        + "</div>"
    )


def told(
    title: str,
    summary: str,
    said: Sequence[str],
    tables: Iterable[tuple[str, Sequence[str], Sequence[Sequence[str]]]],
    drawn: Sequence[Figure],
    *more: str,
) -> str:
    """The HTML of a result: what it is, what it says, its charts, its tables by title, columns and
    rows, and sections beside. StoreError where plotly is not installed."""
    body = (
        paragraph(summary),
        section("What it says", lines(said)),
        section("Charts", charts(drawn)),
        *(section(name, table("figures", columns, rows)) for name, columns, rows in tables),
        *more,
    )
    return document(title, body, drawn)


def logarithmic(values: Iterable[float | None]) -> dict[str, Any]:
    """A logarithmic axis around what is shown on it, marked with plain numbers."""
    shown = [value for value in values if value is not None and value > 0]
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


def layout(across: str, up: str, *, xaxis: Mapping[str, Any], **yaxis: Any) -> dict[str, Any]:
    """Titles of both axes, and what else there is to say of each."""
    return {
        "margin": {"l": 56, "r": 12, "t": 8, "b": 44},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "xaxis": {"title": {"text": across}, **xaxis},
        "yaxis": {"title": {"text": up}, **yaxis},
    }
