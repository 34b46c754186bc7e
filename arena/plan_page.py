"""A plan as one self-contained HTML file. Names in it are text, whatever they hold."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arena import chart_page, plan_text
from arena.chart_page import (
    COLOURS,
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

Row = Mapping[str, Any]

_GIB = 1 << 30
_STYLE = ".facts td:nth-child(2) { white-space: normal; overflow-wrap: anywhere; }\n"


def write(path: Path, plan: Row) -> None:
    """Write the page of a plan, as `output.write` does. StoreError if it cannot be."""
    chart_page.write(path, page(plan))


def page(plan: Row) -> str:
    """The HTML; StoreError where plotly is not installed."""
    return chart_page.document(plan_text.title(plan), _body(plan), figures(plan), _STYLE)


def _body(plan: Row) -> tuple[str, ...]:
    steps = plan_text.step_rows(plan)
    return (
        section("What it comes to", table("facts", ("", ""), plan_text.facts(plan))),
        section("Warnings", lines(plan["warnings"]), "panel warning"),
        section("Notes", lines(plan["notes"])),
        section("Charts", charts(figures(plan))),
        section("Suggested", lines(plan_text.advice(plan)) + f"<pre>{text(plan['toml'])}</pre>"),
        section(
            "Agents by the tokens that each holds",
            table("figures", plan_text.CONTEXT_HEADINGS, plan_text.context_rows(plan)),
        ),
        section(
            "Agents by the unit of allocation",
            table("figures", plan_text.UNIT_HEADINGS, plan_text.unit_rows(plan)),
        ),
        section(
            "Decode steps",
            paragraph(plan_text.step_note(plan)) + table("figures", plan_text.STEP_HEADINGS, steps)
            if steps
            else "",
        ),
        section(
            "Rent or buy",
            lines(plan_text.rent_lines(plan))
            + table("figures", plan_text.RENT_HEADINGS, plan_text.rent_rows(plan)),
        ),
    )


def figures(plan: Row) -> list[dict[str, Any]]:
    """The charts as plotly takes them, each with an id, a title and a note."""
    drawn = [_agents(plan), _memory(plan)]
    if plan["roofline"] is not None:
        drawn.append(_steps(plan))
    return drawn


def _agents(plan: Row) -> dict[str, Any]:
    rows = plan["by_context"]
    traces = [
        {
            "name": name,
            "mode": "lines+markers",
            "x": [row["context_tokens"] for row in rows if row[key]],
            "y": [row[key] for row in rows if row[key]],
            "line": {"color": colour},
        }
        for key, name, colour in (
            ("shared", "sharing the prefix", COLOURS[0]),
            ("unshared", "each its own", COLOURS[1]),
        )
    ]
    agents = plan["compute"]["agents"]
    if agents:
        ends = [rows[0]["context_tokens"], rows[-1]["context_tokens"]]
        traces.append(
            {
                "name": f"computed in time ({plan['compute']['source']})",
                "mode": "lines",
                "x": ends,
                "y": [agents, agents],
                "line": {"color": COLOURS[2], "dash": "dash"},
            }
        )
    return {
        "id": "agents",
        "title": "Agents that fit, by the tokens that each holds",
        "note": f"The workload's own: {plan['workload']['context_tokens']:,} tokens.",
        "data": traces,
        "layout": layout(
            "tokens each",
            "agents",
            xaxis=logarithmic(row["context_tokens"] for row in rows),
            **logarithmic([agents, *(row[key] for row in rows for key in ("shared", "unshared"))]),
        ),
    }


def _memory(plan: Row) -> dict[str, Any]:
    """The device's memory by what takes it; without one, the weights beside the cache."""
    memory, total = plan["memory"], plan["memory"]["total_bytes"]
    known = {
        "weights": plan["weights_bytes"] or 0,
        "KV cache": round(memory["kv_bytes"] * memory["kv_copies"]),
    }
    if total is not None:
        left = max(0, total - sum(known.values()))
        known["reserve"] = min(memory["reserve_bytes"], left)
        known["left to others"] = left - known["reserve"]
    return {
        "id": "memory",
        "title": "Memory, GiB",
        "note": "The device's is not given." if total is None else "Of the device.",
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "name": f"{name}, {plan_text.size(taken)}",
                "x": [taken / _GIB],
                "y": [shown_name(plan["model"]["name"])],
                "marker": {"color": COLOURS[place]},
                "width": 0.5,
            }
            for place, (name, taken) in enumerate(known.items())
        ],
        "layout": {"barmode": "stack", **layout("GiB", "", xaxis={}, type="category")},
    }


def _steps(plan: Row) -> dict[str, Any]:
    steps = plan["roofline"]["steps"]
    return {
        "id": "roofline",
        "title": "Decoding: tokens a second by batch",
        "note": plan_text.step_note(plan),
        "data": [
            {
                "name": name,
                "mode": "lines+markers",
                "x": [row["batch"] for row in rows],
                "y": [row["tokens_per_s"] for row in rows],
                "line": {"color": colour},
            }
            for name, rows, colour in (
                ("fits", [row for row in steps if row["fits"]], COLOURS[0]),
                ("does not fit", [row for row in steps if not row["fits"]], COLOURS[4]),
            )
            if rows
        ],
        "layout": layout(
            "batch",
            "tokens/s",
            xaxis=logarithmic(row["batch"] for row in steps),
            **logarithmic(row["tokens_per_s"] for row in steps),
        ),
    }
