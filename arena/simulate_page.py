"""A simulation as one self-contained HTML file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arena import chart_page, simulate_text
from arena.chart_page import COLOURS, SYMBOLS, layout

Row = Mapping[str, Any]


def write(path: Path, result: Row) -> None:
    """Write the page of a simulation, as `output.write` does. StoreError if it cannot be."""
    chart_page.write(path, page(result))


def page(result: Row) -> str:
    """The HTML; StoreError where plotly is not installed."""
    return chart_page.told(
        simulate_text.title(result),
        simulate_text.summary_text(result),
        simulate_text.lines(result),
        simulate_text.tables(result),
        figures(result),
    )


def figures(result: Row) -> list[dict[str, Any]]:
    """The charts as plotly takes them, each with an id, a title and a note."""
    return _FIGURES[result["kind"]](result)


def _batching(result: Row) -> list[dict[str, Any]]:
    ways = simulate_text.WAYS["batching"]
    last = max(one["finished"] for way in ways for one in result[way]["first_requests"])
    slots = [_slots(place, way, result[way], last) for place, way in enumerate(ways)]
    return [
        {
            "id": "busy",
            "title": "Slots that work",
            "note": f"Of {result['slots']}, from the beginning to the last answer.",
            "data": [
                _over_time(place, way, result[way], "busy_slots") for place, way in enumerate(ways)
            ],
            "layout": layout("s", "slots", xaxis={}, rangemode="tozero"),
        },
        {
            "id": "waiting",
            "title": "Requests that wait",
            "note": "The same requests at the same times.",
            "data": [
                _over_time(place, way, result[way], "waiting") for place, way in enumerate(ways)
            ],
            "layout": layout("s", "requests", xaxis={}, rangemode="tozero"),
        },
        *slots,
    ]


def _slots(place: int, way: str, row: Row, last_s: float) -> dict[str, Any]:
    """`last_s`: end of the axis, so that both ways are drawn to one scale."""
    first = row["first_requests"]
    return {
        "id": f"slots-{way}",
        "title": f"Slots of {way} batching",
        "note": f"A bar is a request, from its first token to its last; the first {len(first)}.",
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "y": [one["slot"] for one in first],
                "base": [one["started"] for one in first],
                "x": [one["finished"] - one["started"] for one in first],
                "marker": {
                    "color": COLOURS[place],
                    "line": {"width": 1, "color": "rgba(128,128,128,0.9)"},
                },
                "showlegend": False,
            }
        ],
        "layout": {
            "barmode": "overlay",
            **layout(
                "s",
                "slot",
                xaxis={"range": [0, last_s]},
                dtick=max(1, 1 + _most(first, "slot") // 16),
            ),
        },
    }


def _most(rows: list[Row], key: str) -> int:
    return max((int(row[key]) for row in rows), default=0)


def _over_time(place: int, name: str, row: Row, key: str) -> dict[str, Any]:
    """A level for each part of the time, the last one to its end."""
    part_s, levels = row["timeline"]["part_s"], row["timeline"][key]
    return {
        "name": name,
        "mode": "lines",
        "line": {"shape": "hv", "color": COLOURS[place], "dash": ("solid", "dot")[place]},
        "x": [number * part_s for number in range(len(levels) + 1)],
        "y": [*levels, *levels[-1:]],
    }


def _paging(result: Row) -> list[dict[str, Any]]:
    units = [f"{row['unit']:,}" for row in result["units"]]

    def bars(id_: str, title: str, up: str, values: list[float], **axis: Any) -> dict[str, Any]:
        return {
            "id": id_,
            "title": title,
            "note": "By the unit of reservation, tokens.",
            "data": [{"type": "bar", "x": units, "y": values, "marker": {"color": COLOURS[0]}}],
            "layout": layout("unit", up, xaxis={"type": "category"}, **axis),
        }

    wasted = [row["wasted_share"] for row in result["units"]]
    fit = [row["fit"] for row in result["units"]]
    return [
        bars("wasted", "Reserved and never used", "", wasted, range=[0, 1], tickformat=".0%"),
        bars("fit", "Requests that fit at once", "requests", fit, rangemode="tozero"),
    ]


def _overload(result: Row) -> list[dict[str, Any]]:
    ways = simulate_text.WAYS["overload"]
    halves = ("in_time_per_s", "second_half_in_time_per_s")
    return [
        {
            "id": "waiting",
            "title": "Moves that wait",
            "note": "Until the last was answered.",
            "data": [
                _over_time(place, way, result[way], "waiting") for place, way in enumerate(ways)
            ],
            "layout": layout("s", "moves", xaxis={}, rangemode="tozero"),
        },
        {
            "id": "in-time",
            "title": "Moves in time, a second",
            "note": f"Within {result['slo_seconds']:g} s of when they were due.",
            "data": [
                {
                    "type": "bar",
                    "name": way,
                    "x": ["all of it", "second half"],
                    "y": [result[way][key] for key in halves],
                    "marker": {"color": COLOURS[place]},
                }
                for place, way in enumerate(ways)
            ],
            "layout": layout("", "moves/s", xaxis={"type": "category"}, rangemode="tozero"),
        },
    ]


def _fleet(result: Row) -> list[dict[str, Any]]:
    curve = result["curve"]

    def drawn(id_: str, title: str, up: str, keys: tuple[str, ...]) -> dict[str, Any]:
        return {
            "id": id_,
            "title": title,
            "note": "One GPU with so many matches.",
            "data": [
                {
                    "name": key.removesuffix("_ms"),
                    "mode": "lines+markers",
                    "x": [row["matches"] for row in curve],
                    "y": [row[key] for row in curve],
                    "line": {"color": COLOURS[place]},
                    "marker": {"color": COLOURS[place], "symbol": SYMBOLS[place]},
                    "showlegend": len(keys) > 1,
                }
                for place, key in enumerate(keys)
            ],
            "layout": layout("matches a GPU", up, xaxis={}, rangemode="tozero"),
        }

    return [
        drawn("latency", "Latency of a move, ms", "ms", ("p50_ms", "p95_ms")),
        drawn("rate", "Moves a second", "moves/s", ("moves_per_s",)),
        drawn("batch", "Requests in a step", "requests", ("step_requests",)),
    ]


def _against(result: Row) -> list[dict[str, Any]]:
    rows = result["against"]

    def drawn(key: str, title: str, up: str) -> dict[str, Any]:
        return {
            "id": key.replace("_", "-"),
            "title": title,
            "note": "Of each run, as forecast and as it was.",
            "data": [
                {
                    "type": "bar",
                    "name": name,
                    "x": [row["run"] for row in rows],
                    "y": [row[name][key] for row in rows],
                    "marker": {"color": COLOURS[place]},
                }
                for place, name in enumerate(("predicted", "measured"))
            ],
            "layout": layout("", up, xaxis={"type": "category"}, rangemode="tozero"),
        }

    return [
        drawn("moves_per_s", "Moves a second", "moves/s"),
        drawn("p95_ms", "p95 of a move, ms", "ms"),
    ]


_FIGURES = {
    "batching": _batching,
    "paging": _paging,
    "overload": _overload,
    "fleet": _fleet,
    "against": _against,
}
