"""What a person sees in a terminal: a run while it is played, and its summary. Home of rich."""

import asyncio
import io
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from arena.progress import Progress, ProgressView
from arena.report import label, percentile
from arena.store import MatchRow

REFRESH_S = 0.25
PLAIN_REFRESH_S = 5.0


class SilentView:
    """Shows nothing."""

    def announce(self, message: str) -> None:
        return None

    async def watch(self, progress: Progress) -> None:
        return None


class PlainView:
    """One line every few seconds, for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def announce(self, message: str) -> None:
        self._say(message)

    async def watch(self, progress: Progress) -> None:
        try:
            while True:
                await asyncio.sleep(PLAIN_REFRESH_S)
                self._say(plain_line(progress.view()))
        finally:
            self._say(plain_line(progress.view()))

    def _say(self, line: str) -> None:
        with suppress(OSError):  # nobody reads it any more; the run goes on
            print(line, file=self._out, flush=True)


class RichView:
    """A live table, redrawn four times a second however much happens."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out)

    def announce(self, message: str) -> None:
        with suppress(OSError):
            self._console.print(Text(message, style="dim"))

    async def watch(self, progress: Progress) -> None:
        # when the terminal is gone the run goes on
        with suppress(OSError), Live(console=self._console, auto_refresh=False) as live:
            try:
                while True:
                    live.update(panel(progress.view()), refresh=True)
                    await asyncio.sleep(REFRESH_S)
            finally:
                live.update(panel(progress.view()), refresh=True)


def view_for(name: str) -> SilentView | PlainView | RichView:
    """The view on stderr called "auto", "rich", "plain" or "none"; auto is rich on a terminal."""
    out = sys.stderr
    if name == "auto":
        name = "rich" if out.isatty() else "plain"
    if name == "none":
        return SilentView()
    return RichView(out) if name == "rich" else PlainView(out)


def plain_line(view: ProgressView) -> str:
    """The run in one line."""
    parts = [
        f"{view.elapsed_s:6.0f} s",
        f"{view.finished} finished, {view.running} running, {view.suspended} suspended, "
        f"{view.scheduled} waiting",
        f"{view.plies} plies",
        f"{view.plies_per_s:.1f} moves/s",
    ]
    if view.latencies_s:
        parts.append("p50 {:.0f} p95 {:.0f} ms".format(*_latencies(view)))
    for name, engine in view.engines.items():
        if engine.step_requests_mean is not None:
            parts.append(f"{name}: {engine.step_requests_mean:.1f} requests a step")
    parts += [f"{kind} {count}" for kind, count in view.faults.items()]
    return " · ".join(parts)


def _latencies(view: ProgressView) -> tuple[float, float]:
    ordered = sorted(view.latencies_s)
    return percentile(ordered, 0.5) * 1000, percentile(ordered, 0.95) * 1000


def panel(view: ProgressView) -> RenderableType:
    """The live display."""
    total = view.scheduled + view.running + view.suspended + view.finished
    head = Table.grid(padding=(0, 2), expand=False)
    head.add_row(
        Text(f"{view.elapsed_s:.0f} s", style="bold"),
        ProgressBar(total=max(total, 1), completed=view.finished, width=20),
        f"{view.finished}/{total} matches",
        f"{view.running} running",
        f"{view.suspended} suspended",
    )
    facts = Table.grid(padding=(0, 2))
    latency = "p50 {:.0f} ms  p95 {:.0f} ms".format(*_latencies(view)) if view.latencies_s else "-"
    facts.add_row("moves", f"{view.plies}  ({view.plies_per_s:.1f}/s)", "latency", latency)
    faults = ", ".join(f"{kind} {count}" for kind, count in view.faults.items()) or "none"
    facts.add_row("late", str(view.late), "faults", faults)
    for name, engine in view.engines.items():
        facts.add_row(Text(name, style="bold"), *_engine_cells(engine))
    rows: list[RenderableType] = [head, facts]
    rows += [Text(_result_line(row), style="dim", no_wrap=True) for row in view.results]
    return Group(*rows)


def _engine_cells(engine: Any) -> tuple[str, str, str]:
    mean, last, hit = engine.step_requests_mean, engine.last, engine.prefix_hit_rate
    batch = "-" if mean is None else f"{mean:.1f} requests a step"
    kv = "" if last is None or last.kv_usage is None else f"  KV {last.kv_usage:.0%}"
    return batch, "prefix hits", ("-" if hit is None else f"{hit:.1%}") + kv


def _result_line(row: MatchRow) -> str:
    names = row.agents
    outcome = "draw" if row.winner is None else f"{names[row.winner]} won"
    how = (row.termination or "").replace("_", " ")
    return f"{label(row.game, row.ruleset)}: {names[0]} v {names[1]}: {outcome}, {how}"


def print_report(report: Mapping[str, Any], out: TextIO) -> None:
    """The summary of a run as tables."""
    page = io.StringIO()  # rich would end the process where a pipe breaks
    is_terminal = out.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else 120
    console = Console(file=page, highlight=False, width=width, force_terminal=is_terminal)
    counts = report["matches"]
    console.print(
        Text.assemble(
            (report["run"]["name"], "bold"),
            f": {counts['finished']} matches finished, {counts['suspended']} suspended, "
            f"{counts['running']} running, {counts['scheduled']} not begun; "
            f"{report['plies']} plies in {_number(report['elapsed_s'])} s",
        )
    )
    for table in (
        _results_table(report["results"]),
        _pairings_table(report["pairings"]),
        _agents_table(report["agents"]),
        _parts_table(report["agents"]),
        *(_engine_table(engine) for engine in report["engines"]),
        _fleet_table(report),
    ):
        if table.row_count:
            console.print()
            console.print(table)
    out.write(page.getvalue())


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        is_number = column in right
        table.add_column(
            column, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number
        )
    return table


def _results_table(results: Sequence[Mapping[str, Any]]) -> Table:
    shown = results[:20]
    title = "Results" if len(results) == len(shown) else f"Results (20 of {len(results)})"
    table = _table(
        title, "game", "first", "second", "winner", "ended by", "plies", right=("plies",)
    )
    for row in shown:
        table.add_row(
            row["game"],
            Text(row["first"]),
            Text(row["second"]),
            Text(row["winner"] or "draw"),
            row["termination"].replace("_", " "),
            str(row["plies"]),
        )
    return table


def _pairings_table(pairings: Sequence[Mapping[str, Any]]) -> Table:
    counts = ("wins", "draws", "losses")
    table = _table("Pairings", "game", "agent", "opponent", *counts, right=counts)
    for row in pairings:
        table.add_row(
            row["game"],
            Text(row["agent"]),
            Text(row["opponent"]),
            *(str(row[count]) for count in counts),
        )
    return table


def _agents_table(agents: Sequence[Mapping[str, Any]]) -> Table:
    numbers = ("moves", "p50", "p95", "p99")
    columns = ("agent", "game", "mode", *numbers, "failures")
    table = _table("Agents: move latency from when it was due, ms", *columns, right=numbers)
    for row in agents:
        faults = ", ".join(f"{kind} {count}" for kind, count in row["faults"].items())
        table.add_row(
            Text(row["name"]),
            row["game"],
            row["mode"] or "-",
            str(row["moves"]),
            *(_number(row["latency_ms"][key]) for key in ("p50", "p95", "p99")),
            faults or "none",
        )
    return table


def _parts_table(agents: Sequence[Mapping[str, Any]]) -> Table:
    parts = ("queue", "prefill", "decode", "harness")
    table = _table(
        "Where it goes: medians, ms (harness with the commit)", "agent", "game", *parts, right=parts
    )
    for row in agents:
        medians = (_number(row[f"{part}_ms"]["p50"], 1) for part in parts)
        table.add_row(Text(row["name"]), row["game"], *medians)
    return table


def _engine_table(engine: Mapping[str, Any]) -> Table:
    table = _table(f"Engine {engine['name']} ({engine['kind']} {engine['version'] or ''})", "", "")
    table.show_header = False
    uncached = engine["uncached_prompt_tokens_per_move"]
    for name, value in (
        ("requests a step (mean, p95, max)", _spread(engine["step_requests"], 2)),
        ("occupancy of the batch (mean, p95, max)", _spread(engine["occupancy"], 2)),
        ("tokens a step (mean, p95, max)", _spread(engine["step_tokens"], 1)),
        ("prefix hit rate", _number(engine["prefix_hit_rate"], 3)),
        (
            "uncached prompt tokens a move",
            ", ".join(f"{game} {_number(value, 1)}" for game, value in uncached.items()) or "n/a",
        ),
        ("output tokens a move", _number(engine["output_tokens_per_move"], 1)),
        ("KV cache in use (mean, p95, max)", _spread(engine["kv_usage"], 3)),
        (
            "preemptions, rejected, restarts",
            ", ".join(_number(engine[key]) for key in ("preemptions", "rejected", "restarts")),
        ),
    ):
        table.add_row(name, value)
    return table


def _fleet_table(report: Mapping[str, Any]) -> Table:
    table = _table("Fleet", "", "")
    table.show_header = False
    lag = report["schedule_lag_ms"]
    faults = report["infrastructure_faults"]
    for name, value in (
        ("moves a second", _number(report["moves_per_s"], 1)),
        ("games an hour", _number(report["games_per_h"])),
        ("moves in time", _share(report["slo_attainment"])),
        (
            "pace kept, and by the worst seat",
            f"{_share(report['pace_attainment'])}, {_share(report['min_seat_attainment'])}",
        ),
        ("schedule lag p50, p99 ms", f"{_number(lag['p50'], 1)}, {_number(lag['p99'], 1)}"),
        (
            "infrastructure failures",
            ", ".join(f"{kind} {count}" for kind, count in faults.items()) or "none",
        ),
    ):
        table.add_row(name, value)
    return table


def _number(value: float | None, digits: int = 0) -> str:
    return "n/a" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"


def _spread(summary: Mapping[str, float | None], digits: int) -> str:
    if summary["mean"] is None:
        return "n/a"
    return ", ".join(_number(summary[key], digits) for key in ("mean", "p95", "max"))


def print_tree(value: Mapping[str, Any], out: TextIO) -> None:
    """Nested figures as indented lines."""
    for line in _tree_lines(value):
        print(line, file=out)


def _tree_lines(value: Mapping[str, Any], indent: str = "") -> list[str]:
    lines = []
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            lines += [f"{indent}{key}:", *_tree_lines(inner, indent + "  ")]
        elif isinstance(inner, list):
            for number, item in enumerate(inner):
                lines += [f"{indent}{key} {number + 1}:", *_tree_lines(item, indent + "  ")]
        else:
            shown = f"{inner:,.3f}" if isinstance(inner, float) else inner
            lines.append(f"{indent}{key}: {'n/a' if inner is None else shown}")
    return lines


def let_go_of_stdout() -> None:
    """The reader of our output has left: Python must not complain when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
