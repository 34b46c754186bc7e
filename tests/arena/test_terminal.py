"""What a person sees: whole at 80 columns, hostile names as text, nothing faked."""

import io
from dataclasses import replace

from rich.console import Console

from arena.progress import EngineProgress, ProgressView
from arena.report import build
from arena.terminal import panel, plain_line, print_report, print_tree
from serving import EngineSnapshot
from tests.arena.test_report import a_match, records

HOSTILE = "[red]x[/red][/]"
"""Names are printable by the config's own check; markup is theirs to use."""


def view(**changes: object) -> ProgressView:
    engine = EngineProgress(
        EngineSnapshot(0.0, "per_step", kv_usage=0.25, prefix_queries=100, prefix_hits=95)
    )
    engine.steps.extend([2, 4])
    base = ProgressView(
        61.0, 1, 4, 1, 2, 345, 7.5, 3, {"illegal": 2}, (0.1, 0.3), (a_match(),), {"main": engine}
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def shown(changes: ProgressView, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(panel(changes))
    return out.getvalue()


def test_the_live_view_fits_80_by_24_and_names_what_matters() -> None:
    text = shown(view(results=(a_match(),) * 5))
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for part in ("2/8 matches", "4 running", "345", "7.5/s", "illegal 2", "3.0 requests", "95.0%"):
        assert part in text


def test_a_run_that_has_shown_nothing_yet_shows_no_figures() -> None:
    text = shown(view(latencies_s=(), engines={"main": EngineProgress()}, faults={}, results=()))
    assert "0 ms" not in text
    assert "none" in text


def test_the_plain_line_is_one_line() -> None:
    line = plain_line(view())
    assert "\n" not in line
    assert "2 finished, 4 running, 1 suspended, 1 waiting" in line
    assert "p50 200 p95 290 ms" in line


def test_names_are_text_whatever_they_hold() -> None:
    held = records()
    row = a_match(agent_first=HOSTILE, winner=0)
    report = build(held.__class__(held.run, (row,), *[getattr(held, n) for n in REST]))
    out = io.StringIO()
    print_report(report, out)
    assert HOSTILE in out.getvalue()
    assert HOSTILE in shown(view(results=(row,)))


REST = ("plies", "attempts", "samples", "events")


def test_unknown_figures_are_said_to_be_unknown() -> None:
    held = records()
    waiting = a_match(state="scheduled", winner=None, started=None, ended=None, termination=None)
    out = io.StringIO()
    print_report(build(held.__class__(held.run, (waiting,), (), (), (), ())), out)
    assert "n/a" in out.getvalue()
    assert "0 matches finished" in out.getvalue()


def test_a_tree_of_figures_names_every_leaf() -> None:
    out = io.StringIO()
    print_tree({"a": {"b": 1.5, "c": None}, "cells": [{"seats": 2}]}, out)
    assert out.getvalue().splitlines() == ["a:", "  b: 1.500", "  c: n/a", "cells 1:", "  seats: 2"]
