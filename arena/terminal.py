"""What a person sees in a terminal: a run while it is played, and its summary. Home of rich.

The live views draw a *frame*: the full snapshot that the dashboard's page is drawn from too.
Names in it are hostile text: nothing here is markup, and no control character reaches a screen.
"""

import asyncio
import io
import math
import os
import re
import shutil
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from arena import plan_text, replica_bench_text, shapes_text, simulate_text, standings_text
from arena.compare_text import (
    CELL_HEADINGS,
    agreement_texts,
    cell_texts,
    difference_texts,
    engine_text,
    flags_texts,
    summary_text,
    unequal_texts,
)
from arena.replicas import shortened
from games.escaping import one_line, result_mark

REFRESH_S = 0.25
PLAIN_REFRESH_S = 5.0
_SILENT_S = 5.0

Frame = Mapping[str, Any]


class SilentView:
    """Shows nothing."""

    def announce(self, message: str) -> None:
        return None

    async def watch(self, read: Callable[[], Frame]) -> None:
        return None


class PlainView:
    """One line every few seconds, for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def announce(self, message: str) -> None:
        self._say(message)

    async def watch(self, read: Callable[[], Frame]) -> None:
        """Draw what `read` gives until cancelled, and once more then."""
        said = None
        try:
            while True:
                await asyncio.sleep(PLAIN_REFRESH_S)
                line = plain_line(read())
                if line != said:
                    self._say(said := line)
        finally:
            self._say(plain_line(read()))

    def _say(self, line: str) -> None:
        with suppress(OSError):  # nobody reads it any more; the run goes on
            print(line, file=self._out, flush=True)


class RichView:
    """A live panel as large as the terminal, redrawn four times a second however much happens."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._console = Console(file=out)
        self._drawn_at: tuple[int, int] | None = None

    def announce(self, message: str) -> None:
        with suppress(OSError):
            self._console.print(Text(message, style="dim"))

    async def watch(self, read: Callable[[], Frame]) -> None:
        """Draw what `read` gives until cancelled, and once more then."""
        # when the terminal is gone the run goes on
        with suppress(OSError), self._live() as live:
            try:
                while True:
                    self._draw(live, read())
                    await asyncio.sleep(REFRESH_S)
            finally:
                self._draw(live, read())

    def _live(self) -> Live:
        return Live(console=self._console, auto_refresh=False, vertical_overflow="crop")

    def _draw(self, live: Live, frame: Frame) -> None:
        with suppress(OSError):  # rich asks COLUMNS first, which a resized terminal does not change
            self._console.size = ConsoleDimensions(*os.get_terminal_size(self._out.fileno()))
        size = self._console.size
        if self._drawn_at not in (None, size):
            self._console.clear()  # the terminal has wrapped the last panel, who knows how
        self._drawn_at = size
        # a line is left for what comes after the panel
        live.update(panel(frame, size.width, size.height - 1), refresh=True)


def view_for(name: str) -> SilentView | PlainView | RichView:
    """The view on stderr called "auto", "rich", "plain" or "none"; auto is rich on a terminal."""
    out = sys.stderr
    if name == "auto":
        name = "rich" if out.isatty() else "plain"
    if name == "none":
        return SilentView()
    return RichView(out) if name == "rich" else PlainView(out)


def plain_line(frame: Frame) -> str:
    """The run in one line."""
    fleet = frame["fleet"]
    counts = {state: _number(count) for state, count in fleet["matches"].items()}
    more = " or more" if frame["run"].get("can_grow") else ""
    if fleet["elapsed_s"] is None:
        parts = [
            "not begun" if frame["ended"] else "starting",
            f"{counts['scheduled']}{more} to come",
        ]
    else:
        parts = [
            f"{_number(fleet['elapsed_s']):>6} s",
            f"{counts['finished']} finished, {counts['running']} running, "
            f"{counts['suspended']} suspended, {counts['scheduled']}{more} to come",
            f"{_number(fleet['plies'])} plies",
            f"{_number(_moves_per_s(fleet), 1)} moves/s",
        ]
    slowest = _slowest_first(frame["agents"])[:1]
    parts += [
        f"slowest {_cut(row['name'], 40)} p50 {_number(row['latency_ms']['p50'])} "
        f"p95 {_number(row['latency_ms']['p95'])} ms"
        for row in slowest
        if row["latency_ms"]["p95"] is not None
    ]
    parts += [
        f"{_cut(engine['name'], 40)}: {engine['now']['requests_mean']:.1f} requests a step"
        for engine in frame["engines"]
        if engine["now"] is not None and engine["now"]["requests_mean"] is not None
    ]
    parts += [f"{_cut(kind, 40)} {count}" for kind, count in _all_faults(frame).items()]
    parts += [
        f"slow replica: {_cut(row['replica'], 40)}"
        for engine in frame["engines"]
        for row in _replica_rows(engine)
        if row["is_straggler"] and not row["is_silent"]
    ]
    if frame["verdict"] is not None:
        parts.append(f"saturated: {_verdict_name(frame['verdict'])}")
    if (silence := _silence(frame)) is not None:
        parts.append(silence)
    return " · ".join(parts)


def panel(frame: Frame, width: int, height: int) -> ConsoleRenderable:
    """The live display of a full frame, at most `width` cells by `height` lines; in ASCII where the
    console can show no more."""
    return _Panel(frame, width, height)


@dataclass(frozen=True, slots=True)
class _Panel:
    frame: Frame
    width: int
    height: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = _lines(self.frame, min(self.width, options.max_width), self.height, console)
        text = Text("\n", no_wrap=True, overflow="crop").join(lines)
        for segment in console.render(text, options):
            yield _in_ascii(segment) if options.ascii_only else segment


_FULL, _EMPTY, _LEVELS = "█", "░", "▁▂▃▄▅▆▇█"
_ASCII = str.maketrans("▁▂▃▄▅▆▇█░·…→×", "_.:-=+*#.|~>x")


def _in_ascii(segment: Segment) -> Segment:
    """The segment with a question mark for each cell that ASCII cannot fill."""
    text = segment.text.translate(_ASCII)
    plain = "".join(c if c.isascii() else "?" * cell_len(c) for c in text)
    return Segment(plain, segment.style, segment.control)


_ROOMY_HEIGHT = 22
"""Lines from which on a blank one parts the sections."""


def _lines(frame: Frame, width: int, height: int, console: Console) -> list[Text]:
    gap = [Text()] if height >= _ROOMY_HEIGHT else []
    top = _stack(
        gap,
        _fleet_lines(frame, width, height // 4 + 1),
        _engine_lines(frame, width, max(height // 3, 3)),
        _verdict_lines(frame["verdict"], width, height // 4, console),
    )
    agents, results = frame["agents"], frame["results"]
    left = height - len(top) - 2 * len(gap)
    shown_results = _result_lines(results, width, max(left // 3, left - len(agents) - 1))
    shown_agents = _agent_lines(agents, width, left - len(shown_results))
    lines = _stack(gap, top, shown_agents, shown_results)[:height]
    for line in lines:
        line.rstrip()
        line.truncate(width, overflow="ellipsis")
    return lines


def _stack(gap: list[Text], *sections: list[Text]) -> list[Text]:
    lines: list[Text] = []
    for section in sections:
        lines += [*gap, *section] if lines and section else section
    return lines


def _moves_per_s(fleet: Mapping[str, Any]) -> float | None:
    """At present; of a run that is over, on the whole."""
    recent: float | None = fleet["recent_moves_per_s"]
    whole: float | None = fleet["moves_per_s"]
    return whole if recent is None else recent


def _silence(frame: Frame) -> str | None:
    """Said of a frame from afar that is no longer the present one."""
    silent_s = frame.get("silent_s", 0.0)
    return None if silent_s < _SILENT_S else f"NO WORD from the arena for {_duration(silent_s)}"


def _fleet_lines(frame: Frame, width: int, limit: int) -> list[Text]:
    run, fleet, counts = frame["run"], frame["fleet"], frame["fleet"]["matches"]
    finished, total = counts["finished"] or 0, sum(count or 0 for count in counts.values())
    matches = [
        Text(_cut(run["name"], width // 4), style="bold"),
        Text(("over, " if frame["ended"] else "") + _duration(fleet["elapsed_s"])),
        _bar(finished / total if total else 0.0, min(max(width // 5, 6), 30)),
        Text(f"{finished}/{total}{'+' if run.get('can_grow') else ''} matches"),
        Text(f"{_number(counts['running'])} running"),
        Text(f"{_number(counts['suspended'])} suspended"),
    ]
    pace = [
        f"moves/s {_number(_moves_per_s(fleet), 1)}",
        f"pace {_share(fleet['pace_attainment'])}",
        f"within {_number(run['slo_ms'])} ms {_share(fleet['slo_attainment'])}",
        f"plies {_number(fleet['plies'])}",
        f"games/h {_number(fleet['games_per_h'])}",
        f"worst seat {_share(fleet['min_seat_attainment'])}",
        f"schedule lag p95 {_number(fleet['schedule_lag_ms']['p95'])} ms",
    ]
    if (silence := _silence(frame)) is not None:
        pace.insert(0, silence)
    engines_own = Counter(fleet["infrastructure_faults"])
    room = width - len("agents' faults: ")
    lines = [
        *_flow(matches, width, "  ", 2),
        *_flow([Text(part) for part in pace], width, " · ", 2),
    ]
    for whose, faults in (
        ("agents' faults", _all_faults(frame) - engines_own),
        ("engine faults", engines_own),
    ):
        if faults:
            lines.append(Text(f"{whose}: {_faults(faults, room)}"))
    return lines[:limit]


def _engine_lines(frame: Frame, width: int, limit: int) -> list[Text]:
    engines, telemetry = frame["engines"], frame["telemetry"]
    fitting = limit // 2 if 2 * len(engines) <= limit else (limit - 1) // 2
    shown = engines[:fitting]
    names = max((cell_len(_cut(engine["name"], max(width // 6, 4))) for engine in shown), default=0)
    newest = max(
        (math.floor(buckets[-1]["at"]) for buckets in telemetry.values() if buckets), default=0
    )
    lines: list[Text] = []
    for engine in shown:
        buckets = telemetry.get(engine["name"], ())
        full = frame["run"]["engines"].get(engine["name"], {}).get("batch_limit")
        line = _occupancy(engine, full, names, width)
        spark = _sparkline(buckets, newest, full, width - cell_len(line.plain) - 1)
        line.append(f" {spark}", style="cyan")
        if spark and cell_len(line.plain) + len(" 60 s") <= width:
            line.append(" 60 s", style="dim")
        lines.append(line)
        facts = [Text(fact) for fact in _engine_facts(engine, buckets[-_RECENT:])]
        lines += [Text("  ").append(line) for line in _flow(facts, width - 2, " · ", 1)]
    if more := len(engines) - len(shown):
        lines.append(Text(f"+{more} more engine{'s' if more > 1 else ''}", style="dim"))
    for engine in shown:
        lines += _replica_lines(engine, width, limit - len(lines))
    return lines


def _replica_rows(engine: Frame) -> Sequence[Frame]:
    """Those of an engine that has several, stragglers first and silent ones last; of an arena of
    former times, none."""
    rows = (engine.get("replicas") or {}).get("rows", ())
    return sorted(rows, key=lambda row: (row["is_silent"], not row["is_straggler"]))


def _replica_lines(engine: Frame, width: int, limit: int) -> list[Text]:
    """The replicas of an engine that fit under their heading, or nothing if none does."""
    rows = _replica_rows(engine)
    if limit < 2 or not rows:
        return []
    shown = rows[: limit - 1]
    title = f"replicas of {_cut(engine['name'], max(width // 6, 4))}"
    if len(shown) < (count := engine["replicas"]["count"]):
        title = f"{len(shown)} of {count} {title}"
    marks = max(len(_straggler_mark(row)) for row in shown)
    fitting = (width - width // 3 - marks) // _REPLICA_CELL
    headings = _REPLICA_HEADINGS[: max(fitting, 0)]
    room = max(width - len(headings) * _REPLICA_CELL - marks - 1, 1)
    names = min(max(cell_len(title), *(cell_len(_safe(row["replica"])) for row in shown)), room)
    table = [(title, "", headings)]
    table += [(row["replica"], _straggler_mark(row), _replica_cells(row)) for row in shown]
    lines = []
    for name, mark, cells in table:
        text = _cut(name, names)
        figures = "".join(cell.rjust(_REPLICA_CELL) for cell in cells[: len(headings)])
        head = " " * (names - cell_len(text)) + (f" {mark:{marks}}" if marks else "")
        lines.append(Text(f"{text}{head}{figures}", style="bold yellow" if mark else ""))
    lines[0].stylize("bold")
    return lines


_REPLICA_CELL = 9
_REPLICA_HEADINGS = ("p50 ms", "p95 ms", "moves", "matches", "share", "hits")
"""What fits is shown, from the first on."""


def _replica_cells(row: Frame) -> tuple[str, ...]:
    return (
        _number(row["engine_ms"]["p50"]),
        _number(row["engine_ms"]["p95"]),
        _number(row["moves"]),
        _number(row["matches"]),
        _share(row["share"]),
        _share(row["prefix_hit_rate"]),
    )


def _straggler_mark(row: Frame) -> str:
    """Of a replica that lags behind: its median move against the others'."""
    return f"SLOW {row['median_ratio']:.1f}×" if row["is_straggler"] else ""


_RECENT = 10
"""Buckets in which the last known figure still counts as present."""


def _occupancy(engine: Frame, full: int | None, names: int, width: int) -> Text:
    """The name, and requests in a step as a bar and as a number."""
    name, now = _cut(engine["name"], names), engine["now"]
    requests = None if now is None else now["requests_mean"]
    number = "-" if requests is None else f"{requests:.1f}"
    return Text.assemble(
        (name, "bold"),
        " " * (names - cell_len(name) + 1),
        _bar((requests or 0.0) / full if full else 0.0, min(max(width // 6, 6), 20)),
        f" {number}/{full or '-'}".rjust(10),
        " requests a step" if width >= 72 else "",
    )


def _engine_facts(engine: Frame, recent: Sequence[Frame]) -> list[str]:
    """What fits is shown, from the first on."""
    ttft = _latest(recent, "ttft_p50_s")
    facts = [
        f"queue {_number(_latest(recent, 'waiting_mean'), 1)}",
        f"TTFT {_number(None if ttft is None else ttft * 1000)} ms",
        f"KV {_share(_latest(recent, 'kv_usage'))}",
    ]
    for what in ("preemptions", "rejected", "restarts"):
        if engine[what]:
            facts.append(f"{what} {_number(engine[what])}")
    return [
        *facts,
        f"tokens/step {_number(_latest(recent, 'tokens_mean'), 1)}",
        f"prefix hits {_share(engine['prefix_hit_rate'])}",
    ]


def _latest(buckets: Sequence[Frame], key: str) -> float | None:
    known = (bucket[key] for bucket in reversed(buckets) if bucket[key] is not None)
    return next(known, None)


def _sparkline(buckets: Sequence[Frame], newest: int, full: int | None, room: int) -> str:
    """Requests a step in the minute up to the second `newest`, in the most columns of equal time
    that fit. The highest level is `full`, or the greatest value shown where that is unknown; a
    column is blank where no step was."""
    columns = max((n for n in (60, 30, 20, 15, 12, 10, 6, 5) if n <= room), default=0)
    if not columns:
        return ""
    each = 60 // columns
    end = (newest // each + 1) * each  # so that a column keeps its seconds as it moves
    shown: list[list[float]] = [[] for _ in range(columns)]
    for bucket in buckets[-60:]:
        place = columns - 1 - (end - 1 - math.floor(bucket["at"])) // each
        if place >= 0 and bucket["requests_mean"] is not None:
            shown[place].append(bucket["requests_mean"])
    top = full or max((value for column in shown for value in column), default=0.0) or 1.0
    return "".join(_level(sum(column) / len(column) / top) if column else " " for column in shown)


def _level(share: float) -> str:
    return _LEVELS[min(max(math.ceil(share * len(_LEVELS)), 1), len(_LEVELS)) - 1]


def _verdict_lines(verdict: Frame | None, width: int, limit: int, console: Console) -> list[Text]:
    if verdict is None:
        return [Text("no sign of saturation", style="green")]
    found = Text.assemble(
        (f"saturated: {_verdict_name(verdict)}: ", "bold yellow"), _safe(verdict["detail"])
    )
    remedies = [
        Text.assemble(("try first: ", "bold"), _safe(f"{remedy['action']}: {remedy['effect']}"))
        for remedy in verdict["remedies"][:1]
    ]
    advice = [line for text in remedies for line in _wrap(text, width, max(limit // 2, 1), console)]
    return [*_wrap(found, width, max(limit - len(advice), 1), console), *advice]


def _verdict_name(verdict: Frame) -> str:
    patterns = {
        "steady": ", a steady rise (capacity is short)",
        "sawtooth": ", in bursts (a queue can absorb them)",
    }
    signal = _safe(verdict["signal"]).replace("_", " ")
    return f"{_cut(verdict['engine'], 24)}, {signal}{patterns.get(verdict['pattern'], '')}"


def _wrap(text: Text, width: int, limit: int, console: Console) -> list[Text]:
    """At most `limit` lines; an ellipsis ends them where there is more."""
    lines = list(text.wrap(console, width, overflow="fold"))
    if len(lines) > limit:
        lines = lines[:limit]
        lines[-1].rstrip()
        lines[-1].truncate(max(width - 1, 0))
        lines[-1].append("…")
    return lines


def _slowest_first(agents: Sequence[Frame]) -> list[Frame]:
    def p95(row: Frame) -> float:
        known: float | None = row["latency_ms"]["p95"]
        return -1.0 if known is None else known

    return sorted(agents, key=p95, reverse=True)


def _agent_lines(agents: Sequence[Frame], width: int, limit: int) -> list[Text]:
    """The slowest agents that fit under their heading, or nothing if none does."""
    if limit < 2:
        return []
    if not agents:
        return [Text("no moves yet", style="dim")]
    rows = [
        (
            _safe(row["name"]),
            _safe(row["game"]),
            _safe(row["mode"] or "-"),
            _number(row["latency_ms"]["p50"]),
            _number(row["latency_ms"]["p95"]),
            _number(row["moves"]),
            row["faults"],
        )
        for row in _slowest_first(agents)[: limit - 1]
    ]
    title = f"slowest of {len(agents)}" if len(agents) > len(rows) else "agents"
    games = min(max(cell_len(row[1]) for row in rows), width // 5, 19) if width >= 52 else 0
    modes = min(max(cell_len(row[2]) for row in rows), 11) if width >= 72 else 0
    between = 2 if width >= 72 else 1
    fixed = sum(part + between for part in (games, modes, 7, 7, 7) if part)
    spare = width - fixed - between
    names = min(max(cell_len(title), *(cell_len(row[0]) for row in rows)), max(spare - 7, 1))
    widths = (names, games, modes, 7, 7, 7, max(spare - names, 1))
    if cell_len(title) > names:
        title = "slowest"
    heading = (title, "game", "mode", "p50 ms", "p95 ms", "moves", "faults")
    lines = [Text(_row(heading, widths, between), style="bold")]
    for *cells, faults in rows:
        lines.append(Text(_row((*cells, _faults(faults, widths[-1])), widths, between)))
    return lines


_NUMBERS = (3, 4, 5)
"""Columns of an agent's row."""


def _row(cells: Sequence[str], widths: Sequence[int], between: int) -> str:
    """The cells beside each other, the numbers to the right; a column of no width is left out."""
    shown = []
    for place, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        if width:
            text = _cut(cell, width)
            room = " " * (width - cell_len(text))
            shown.append(room + text if place in _NUMBERS else text + room)
    return (" " * between).join(shown).rstrip()


def _result_lines(results: Sequence[Frame], width: int, limit: int) -> list[Text]:
    """The last results that fit under their heading, the newest at the bottom."""
    if limit < 2 or not results:
        return []
    room = max((width - 34) // 2, 6)
    lines = [Text("recent results", style="bold")]
    for row in results[1 - limit :]:
        winner = None if row["winner"] is None else int(row["winner"] != row["first"])
        players = (
            f"{_cut(row['first'], room)} {result_mark(True, winner)} {_cut(row['second'], room)}"
        )
        how = f"{_ending(row)}, {_number(row['plies'])} plies"
        lines.append(Text(f"{_cut(row['game'], 18)}  {players}  {how}"))
    return lines


def _all_faults(frame: Frame) -> Counter[str]:
    """Of every attempt, those that were an engine's included."""
    total: Counter[str] = Counter()
    for row in frame["agents"]:
        total.update(row["faults"])
    return total


def _faults(faults: Mapping[str, int], width: int) -> str:
    """Each kind with its count, the most frequent first; the sum where that does not fit."""
    ordered = sorted(faults.items(), key=lambda item: -item[1])
    text = ", ".join(f"{_safe(kind)} {count}" for kind, count in ordered)
    return text if cell_len(text) <= width else f"{sum(faults.values())}"


def _flow(parts: Sequence[Text], width: int, between: str, limit: int) -> list[Text]:
    """Whole parts beside one another on at most `limit` lines; those after them are left out."""
    lines: list[Text] = []
    for part in parts:
        if lines and cell_len(lines[-1].plain + between + part.plain) <= width:
            lines[-1].append(between).append(part)
        elif len(lines) < limit:
            lines.append(Text().append(part))
        else:
            break
    return lines


def _bar(share: float, width: int) -> Text:
    full = round(min(max(share, 0.0), 1.0) * width)
    return Text.assemble((_FULL * full, "cyan"), (_EMPTY * (width - full), "dim"))


def _duration(seconds: float | None) -> str:
    """Seconds up to two minutes, then h:mm:ss."""
    if seconds is None:
        return "not begun"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


_CROSS_TABLE_PLAYERS = 12
"""A wider cross-table fits no terminal."""
_FAILURE_CELLS = 60
_JOINERS = re.compile("[\ufe00-\ufe0f\U0001f3fb-\U0001f3ff\U000e0100-\U000e01ef]")
"""They change how wide the character before them is, and terminals disagree by how much."""


def _safe(text: str) -> str:
    """The text on one line, without control characters and with two marks on a letter at most."""
    kept, marks = [], 0
    for char in _JOINERS.sub("", one_line(unicodedata.normalize("NFC", text))):
        marks = marks + 1 if unicodedata.category(char) in ("Mn", "Me") else 0
        if marks <= 2:
            kept.append(char)
    return "".join(kept)


def _cut(text: str, width: int) -> str:
    """The text made safe, in at most `width` cells; an ellipsis ends it where there is more."""
    cut = Text(_safe(text))
    cut.truncate(width, overflow="ellipsis")
    return cut.plain


def print_report(report: Mapping[str, Any], out: TextIO) -> None:
    """The summary of a run as tables."""
    page, console = _page(out)
    counts = report["matches"]
    console.print(
        Text.assemble(
            (_safe(report["run"]["name"]), "bold"),
            f": {counts['finished']} matches finished, {counts['suspended']} suspended, "
            f"{counts['running']} running, {counts['scheduled']} not begun; "
            f"{report['plies']} plies in {_number(report['elapsed_s'])} s",
        )
    )
    _print_all(console, [_results_table(report["results"])])
    _print_standings(console, report)
    tables: list[Table | _Wide] = [
        *_cross_tables(report["standings"], report["pairings"]),
        _forfeits_table(report["standings"]),
        _pairings_table(report["pairings"]),
        _pairings_table(report["null_pairings"], "Null pairings: one player, the noise floor"),
        _sprt_table(report["sprt"]),
        _ties_table(report["tournament"]["ties"]),
        _agents_table(report["agents"]),
        _parts_table(report["agents"]),
        *(
            table
            for engine in report["engines"]
            for table in (_engine_table(engine), _replicas_table(engine))
        ),
        _fleet_table(report),
    ]
    _print_all(console, tables)
    if report["verdict"] is not None:
        console.print()
        for line in _verdict_report(report["verdict"]):
            console.print(line)
    out.write(page.getvalue())


_TWO = ("game", "agent", "opponent")
_FOLDED_AT = 18
"""A longer name may go on in the next line, rather than figures in another part of a table."""


class _Wide(NamedTuple):
    """A table for `_print_table`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[str]
    """Columns of numbers."""
    names: int
    """First columns, which each part begins with."""
    note: str = ""
    """A line below."""


def _print_all(console: Console, tables: Iterable[Table | _Wide]) -> None:
    """Those with rows, each after an empty line."""
    for table in tables:
        if isinstance(table, Table) and table.row_count:
            console.print()
            console.print(table)
        elif isinstance(table, _Wide) and table.rows:
            left = set(table.columns).difference(table.right)
            _print_table(
                *(console, table.title, table.columns, table.rows),
                left=left,
                names=table.names,
                folded_at=_FOLDED_AT,
            )
            if table.note:
                console.print(Text(table.note))


def _print_standings(console: Console, report: Mapping[str, Any]) -> None:
    """The table, and what must be known before believing it."""
    told = standings_text.table(report)
    right = set(told.columns).difference(("game", "agent"))
    _print_all(console, [_Wide(*told, right, len(standings_text.NAMES))])
    notes = (*standings_text.notes(report), *_cross_notes(report["standings"]))
    _print_lines(console, "What to know of the standings", notes)


def _verdict_report(verdict: Mapping[str, Any]) -> list[Text]:
    """What the engine suffers from and what to do about it, the cheapest first."""
    title = (f"Saturated: {_verdict_name(verdict)}: ", "bold")
    return [
        Text.assemble(title, _safe(verdict["detail"])),
        *(
            Text(_safe(f"{number}. {remedy['action']}: {remedy['effect']}"))
            for number, remedy in enumerate(verdict["remedies"], 1)
        ),
    ]


def _table(title: str, *columns: str, right: Collection[str] = ()) -> Table:
    heading = Text(_safe(title), style="table.title")
    table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        is_number = column in right
        table.add_column(
            column, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number
        )
    return table


def _results_table(results: Sequence[Mapping[str, Any]]) -> Table:
    shown = results[:20]
    title = "Results" if len(results) == len(shown) else f"Results (20 of {len(results)})"
    columns = ("game", "first", "second", "winner", "ended by", "plies")
    has_failures = any(row["fault"] for row in shown)
    table = _table(title, *columns, *(("failure",) if has_failures else ()), right=("plies",))
    for row in shown:
        table.add_row(
            Text(_safe(row["game"])),
            Text(_safe(row["first"])),
            Text(_safe(row["second"])),
            Text(_safe(row["winner"] or "draw")),
            Text(_ending(row)),
            str(row["plies"]),
            *((_failure_of(row),) if has_failures else ()),
        )
    return table


def _ending(row: Mapping[str, Any]) -> str:
    """How a match ended, and whether it is not rated."""
    how = _safe(row["termination"] or "").replace("_", " ")
    return how if row.get("is_rated", True) else f"{how} (not rated)"


def _failure_of(row: Mapping[str, Any]) -> Text:
    """How a result's loser failed at the protocol, its illegal move with it."""
    return Text(_cut(row["detail"], _FAILURE_CELLS) if row["fault"] else "")


def _cross_tables(
    standings: Sequence[Mapping[str, Any]], pairings: Sequence[Mapping[str, Any]]
) -> Iterator[Table]:
    """Who made how many points against whom, a table a game; none where it would be too wide."""
    names: dict[str, list[str]] = {}
    for row in standings:
        names.setdefault(row["game"], []).append(row["name"])
    for game, players in names.items():
        if 2 < len(players) <= _CROSS_TABLE_PLAYERS:
            numbers = tuple(str(number) for number in range(1, len(players) + 1))
            title = f"{game}: points/games"
            table = _table(title, "", "agent", *numbers, right=numbers)
            met = _met([row for row in pairings if row["game"] == game])
            for number, name in zip(numbers, players, strict=True):
                cells = ("" if name == other else met.get((name, other), "-") for other in players)
                table.add_row(number, Text(_safe(name)), *cells)
            yield table


def _cross_notes(standings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where the cross-table is that would be too wide here."""
    for game, players in Counter(row["game"] for row in standings).items():
        if players > _CROSS_TABLE_PLAYERS:
            yield (
                f"{game}: no cross-table here, for {players} players make it too wide; it is in "
                "the page of `arena report DIR --html F`."
            )


def _met(pairings: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """Points and games of the first-named against the second."""
    met = {}
    for row in pairings:
        games = row["wins"] + row["draws"] + row["losses"]
        points = row["wins"] + row["draws"] / 2
        met[row["agent"], row["opponent"]] = f"{points:g}/{games}"
        met[row["opponent"], row["agent"]] = f"{games - points:g}/{games}"
    return met


def _forfeits_table(standings: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("Games lost by a failure", "game", "agent", "games", "by", right=("games",))
    for row in standings:
        if row["forfeits"]:
            told = ", ".join(f"{kind} {count}" for kind, count in row["forfeits"].items())
            games = str(sum(row["forfeits"].values()))
            table.add_row(Text(_safe(row["game"])), Text(_safe(row["name"])), games, told)
    return table


def _sprt_table(tests: Sequence[Mapping[str, Any]]) -> _Wide:
    columns = (*_TWO, "pairs", "decision", "LLR", "bounds", "Elo", "95 %")
    rows = []
    for row in tests:
        elo = row["elo"]
        rows.append(
            (
                *(row["game"], row["agent"], row["opponent"]),
                str(row["pairs"]),
                standings_text.decision(row),
                f"{row['llr']:.2f}",
                f"{row['lower']:.2f} to {row['upper']:.2f}",
                "-" if elo is None else f"{round(elo['value']):+}",
                "-" if elo is None else standings_text.interval(elo),
            )
        )
    right = set(columns).difference((*_TWO, "decision"))
    return _Wide("SPRT", columns, rows, right, len(_TWO), standings_text.TEST_NOTE)


def _ties_table(ties: Sequence[Mapping[str, Any]]) -> _Wide:
    numbers = ("round", "tie", "points")
    columns = ("game", "round", "tie", "higher seed", "other", "points", "goes on", "by")
    rows = [
        (
            *(tie["game"], str(tie["round"]), str(tie["tie"]), *tie["agents"]),
            "{:g} : {:g}".format(*tie["points"]),
            tie["winner"],
            tie["by"].replace("_", " "),
        )
        for tie in sorted(ties, key=lambda tie: (tie["game"], tie["round"], tie["tie"]))
    ]
    return _Wide("Knock-out", columns, rows, numbers, names=5)


def _pairings_table(pairings: Sequence[Mapping[str, Any]], title: str = "Pairings") -> _Wide:
    counts = ("wins", "draws", "losses")
    numbers = (*counts, "Elo", "95 %", "LOS")
    rows = [
        (
            *(row["game"], row["agent"], row["opponent"]),
            *(str(row[count]) for count in counts),
            f"{round(row['elo']['value']):+}",
            standings_text.interval(row["elo"]),
            standings_text.likelihood(row["los"]),
        )
        for row in pairings
    ]
    return _Wide(title, (*_TWO, *numbers), rows, numbers, len(_TWO))


def _agents_table(agents: Sequence[Mapping[str, Any]]) -> Table:
    numbers = ("moves", "p50", "p95", "p99")
    columns = ("agent", "game", "mode", *numbers, "failures")
    table = _table("Agents: move latency from when it was due, ms", *columns, right=numbers)
    for row in agents:
        faults = ", ".join(f"{kind} {count}" for kind, count in row["faults"].items())
        table.add_row(
            Text(_safe(row["name"])),
            Text(_safe(row["game"])),
            Text(_safe(row["mode"] or "-")),
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
        table.add_row(Text(_safe(row["name"])), Text(_safe(row["game"])), *medians)
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
            ", ".join(f"{_safe(game)} {_number(n, 1)}" for game, n in uncached.items()) or "n/a",
        ),
        ("output tokens a move", _number(engine["output_tokens_per_move"], 1)),
        ("KV cache in use (mean, p95, max)", _spread(engine["kv_usage"], 3)),
        (
            "preemptions, rejected, restarts",
            ", ".join(_number(engine[key]) for key in ("preemptions", "rejected", "restarts")),
        ),
    ):
        table.add_row(name, Text(value))
    return table


def _replicas_table(engine: Mapping[str, Any]) -> _Wide:
    """Without rows for an engine that has not several."""
    columns = ("replica", "matches", "share", "moves", "p50", "p95", "hits", "step", "faults", "")
    told = shortened(engine["replicas"]) or {"rows": ()}
    rows = [
        (
            row["replica"],
            _number(row["matches"]),
            _share(row["share"]),
            _number(row["moves"]),
            _number(row["engine_ms"]["p50"], 1),
            _number(row["engine_ms"]["p95"], 1),
            _share(row["prefix_hit_rate"]),
            _number(row["step_requests"]["mean"], 1),
            ", ".join(f"{kind} {count}" for kind, count in row["faults"].items()) or "none",
            _straggler_mark(row),
        )
        for row in told["rows"]
    ]
    title = f"Replicas of {engine['name']}: engine time of a move, ms"
    return _Wide(title, columns, rows, columns[1:-2], 1, _replicas_note(told) if rows else "")


def _replicas_note(told: Mapping[str, Any]) -> str:
    moved = told["matches_moved"]
    verb = "match was" if moved == 1 else "matches were"
    note = f"{moved or 'No'} {verb} answered by more than one replica."
    if left_out := told["count"] - len(told["rows"]):
        note = f"And {left_out} more, which --json and --csv tell. {note}"
    if not any(row["is_straggler"] for row in told["rows"]):
        return note
    return (
        f"{note} SLOW: its p50 of like moves (of one agent at one game) is more than "
        f"{told['straggler_ratio']:g} times the median of the other replicas', each of "
        f"{told['straggler_moves']} moves or more."
    )


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
        elif isinstance(inner, list) and not any(isinstance(item, Mapping) for item in inner):
            lines.append(f"{indent}{key}: {', '.join(map(str, inner)) or 'none'}")
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


_GAP = 3
"""Between columns of a table."""
_WIDTH = 120
"""Where there is no terminal."""
_SPEED = ("asked", "engine", *CELL_HEADINGS[2:8], "in time", "failures")
_COST = ("asked", "engine", *CELL_HEADINGS[8:13])
"""Columns of a comparison: how fast, and by what."""


def print_compare(result: Mapping[str, Any], out: TextIO) -> None:
    """A comparison of engines as tables and lines."""
    page, console = _page(out)
    console.print(Text.assemble((_safe(result["name"]), "bold"), ": ", summary_text(result)))
    failures = [text for engine in result["engines"] for text in engine["failures"]]
    rows = list(map(cell_texts, result["cells"]))
    _print_lines(console, "Engines", map(engine_text, result["engines"]))
    _print_lines(console, "What kept cells from being measured", failures)
    _print_lines(console, "Not equal", unequal_texts(result["unequal"]))
    _print_lines(console, "Notes", result["notes"])
    for title, columns in (("How fast", _SPEED), ("By what", _COST)):
        picked = [CELL_HEADINGS.index(column) for column in columns]
        told = [[row[place] for place in picked] for row in rows]
        _print_table(console, title, columns, told, left=("asked", "engine", "failures"), names=2)
    _print_lines(console, "Differences", difference_texts(result["differences"]))
    _print_lines(console, "Greedy answers alike", agreement_texts(result["agreement"]))
    _print_lines(console, "Command lines and arguments", flags_texts(result["engines"]))
    out.write(page.getvalue())


def _page(out: TextIO) -> tuple[io.StringIO, Console]:
    """What is to be written to `out` at once, and what prints to it as if it were `out`."""
    page = io.StringIO()  # rich would end the process where a pipe breaks
    is_terminal = out.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else _WIDTH
    return page, Console(file=page, highlight=False, width=width, force_terminal=is_terminal)


def _print_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[str] = (),
    names: int = 1,
    folded_at: int | None = None,
) -> None:
    """A table after an empty line; in parts where it is wider than the console, each beginning with
    the first `names` columns: no figure is ever cut. Texts in columns `left` may be folded at
    `folded_at` cells."""
    widths = [max(map(cell_len, texts)) + _GAP for texts in zip(columns, *rows, strict=True)]
    if folded_at is not None:
        most = folded_at + _GAP
        widths = [min(w, most) if c in left else w for c, w in zip(columns, widths, strict=True)]
    first, parts = list(range(names)), list[list[int]]()
    for place in range(names, len(columns)):
        if not parts or sum(widths[n] for n in (*parts[-1], place)) > console.width:
            parts.append(first.copy())
        parts[-1].append(place)
    for number, part in enumerate(parts):
        right = [columns[n] for n in part if columns[n] not in left]
        table = _table("" if number else title, *(columns[n] for n in part), right=right)
        for row in rows:
            table.add_row(*(Text(_safe(row[n])) for n in part))
        console.print()
        console.print(table)


def print_plan(plan: Mapping[str, Any], out: TextIO) -> None:
    """A plan as tables and lines, and the TOML to paste."""
    page, console = _page(out)
    console.print(Text(_safe(plan_text.title(plan)), style="bold"))
    known = _table("", "", "")
    known.show_header = False
    for name, value in plan_text.facts(plan):
        known.add_row(name, Text(_safe(value)))
    console.print(known)
    _print_lines(console, "Warnings", plan["warnings"])
    _print_lines(console, "Notes", plan["notes"])
    _print_lines(console, "Advice", plan_text.advice(plan))
    console.print()
    console.print(Text(plan["toml"].rstrip()))
    _print_lines(console, "Rent or buy", plan_text.rent_lines(plan))
    steps = f"Decode steps, {plan_text.step_note(plan)}" if plan["roofline"] else ""
    for title, headings, rows in (
        ("", plan_text.RENT_HEADINGS, plan_text.rent_rows(plan)),
        ("Agents by the tokens of each", plan_text.CONTEXT_HEADINGS, plan_text.context_rows(plan)),
        ("Agents by the unit of allocation", plan_text.UNIT_HEADINGS, plan_text.unit_rows(plan)),
        (steps, plan_text.STEP_HEADINGS, plan_text.step_rows(plan)),
    ):
        if rows:
            _print_table(console, title, headings, rows)
    out.write(page.getvalue())


def _print_lines(console: Console, title: str, lines: Iterable[str]) -> None:
    """A title and its lines; nothing where there are none."""
    shown = list(map(_safe, lines))
    if shown:
        console.print()
        console.print(Text(title, style="bold"))
        for line in shown:
            console.print(Text(line))


def print_simulation(result: Mapping[str, Any], out: TextIO) -> None:
    """A simulation as tables and lines."""
    title, summary = simulate_text.title(result), simulate_text.summary_text(result)
    sections = {"What it says": simulate_text.lines(result)}
    _print_tables(title, summary, simulate_text.tables(result), sections, out)


def print_shapes(result: Mapping[str, Any], out: TextIO) -> None:
    """A bench of shapes as a table and lines."""
    title, summary = shapes_text.title(result), shapes_text.summary_text(result)
    sections = {
        "What it says": shapes_text.lines(result),
        "Shapes": shapes_text.shape_lines(),
    }
    _print_tables(title, summary, shapes_text.tables(result), sections, out)


def print_replicas(result: Mapping[str, Any], out: TextIO) -> None:
    """A bench of replicas as tables and lines."""
    title, summary = replica_bench_text.TITLE, replica_bench_text.summary_text(result)
    sections = {"What it says": replica_bench_text.lines(result)}
    _print_tables(title, summary, replica_bench_text.tables(result), sections, out)


def _print_tables(
    title: str,
    summary: str,
    tables: Iterable[simulate_text.Table],
    sections: Mapping[str, Iterable[str]],
    out: TextIO,
) -> None:
    page, console = _page(out)
    console.print(Text.assemble((_safe(title), "bold"), ": ", _safe(summary)))
    for told in tables:
        _print_table(console, told.title, told.columns, told.rows, left=told.columns[:1])
    for heading, lines in sections.items():
        _print_lines(console, heading, lines)
    out.write(page.getvalue())
