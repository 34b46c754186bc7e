"""A run as one self-contained HTML file: the dashboard's own page with its data inside.

Everything stands in the file, and a policy in it lets nothing run but the two scripts whose digests
it names: names and replies in the data are text, whatever they hold.
"""

import base64
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arena import output
from arena.dashboard.browse import catalogue
from arena.dashboard.exhibit import drawings
from arena.dashboard.league import Moment
from arena.dashboard.server import STATIC, plotly_version, read_plotly
from arena.details import match_detail
from arena.figures import Figures
from arena.follow import MatchRecords
from arena.frames import Overview, bucket_data
from arena.output import HTML_PAGE
from arena.report import figures_of
from arena.store import AttemptRow, MatchRow, PlyRow, Records, StoreError

MOST_PLIES = 60_000
"""Games are put in from the first on until they have so many moves together: some 25 MB."""

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=function |async function |class |const |let )", re.MULTILINE)


def write(path: Path, records: Records) -> None:
    """Write the page of a run to `path`, as `output.write` does. StoreError if it cannot be."""
    output.write(path, HTML_PAGE, [page(records)])


def page(records: Records) -> str:
    """The HTML of a run's page; StoreError where plotly is not installed."""
    charts, script = charts_script(), _script()
    data = embeddable(embedded(records))
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    for old, new in (
        (
            '<meta charset="utf-8">',
            '<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy(charts, script)}">',
        ),
        ('<link rel="stylesheet" href="static/style.css">', f"<style>\n{style}</style>"),
        ('<script src="plotly.js" defer></script>\n', ""),
        (
            '<script type="module" src="static/main.js"></script>',
            f'<script type="application/json" id="embedded">{data}</script>\n'
            f'<script>{charts}</script>\n<script type="module">{script}</script>',
        ),
    ):
        before, found, after = html.partition(old)
        assert found, f"index.html lacks {old}"
        html = before + new + after
    return html


def charts_script() -> str:
    """Plotly's script; StoreError where it is not installed or cannot stand inside a page."""
    plotly = None if plotly_version() is None else read_plotly()
    if plotly is None:
        raise StoreError("plotly's package is missing; `arena doctor` says what to mend")
    script = plotly.body.decode()
    if "</script" in script.lower():
        raise StoreError("this version of plotly cannot stand inside a page; install another")
    return script


def policy(*scripts: str) -> str:
    """The content security policy of a page in which nothing runs but these scripts."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in scripts)
    named = " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {named}; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def embeddable(value: Any) -> str:
    """JSON that cannot end the element which holds it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _script() -> str:
    """The page's modules as one, each after those that it imports."""
    texts: dict[str, str] = {}
    for name in _in_order("main.js", []):
        text = (STATIC / name).read_text(encoding="utf-8")
        texts[name] = _EXPORT.sub("", _IMPORT.sub("", text))
    script = "\n".join(texts.values())
    assert "</script" not in script.lower()
    return script


def _in_order(name: str, seen: list[str]) -> Iterator[str]:
    if name in seen:
        return
    seen.append(name)
    text = (STATIC / name).read_text(encoding="utf-8")
    for needed in _IMPORT.findall(text):
        yield from _in_order(needed, seen)
    yield name


@dataclass
class _Moves:
    plies: list[PlyRow] = field(default_factory=list)
    attempts: list[AttemptRow] = field(default_factory=list)


def embedded(records: Records) -> dict[str, Any]:
    """What the page shows, as its StaticSource takes it."""
    figures = figures_of(records)
    overview = Overview(figures)
    overview.end()
    told, left_out = _told_matches(figures)
    notes = []
    if left_out:
        notes.append(
            f"The first {len(told)} games can be stepped through here; {left_out} more are in the "
            "run's folder alone."
        )
    return {
        "frame": {
            **overview.frame(ended=True),
            "seq": 0,
            "boards": [],
            "gone": [],
        },
        "games": drawings({row.game for row in records.matches}),
        "details": _details(records, told, figures.config),
        "histograms": [
            {"agent": name, "game": game, "edges_ms": edges, "counts": counts}
            for (name, game), agent in figures.agents.items()
            for edges, counts in [agent.times["latency"].sketch().histogram()]
        ],
        "telemetry": {
            name: {
                f"{span_s:g}": [bucket_data(bucket) for bucket in buckets]
                for span_s, buckets in engine.buckets.items()
                if buckets
            }
            for name, engine in figures.engines.items()
        },
        "results": catalogue(
            [figures.matches[row.id] for row in figures.finished], overview.unrated
        ),
        "standings": Moment.of(figures).standings(),
        "notes": notes,
    }


def _told_matches(figures: Figures) -> tuple[dict[str, MatchRow], int]:
    """The begun matches that fit into a page, and how many do not."""
    begun = [m for m in figures.matches.values() if m.row.started is not None]
    told: dict[str, MatchRow] = {}
    plies = 0
    for match in sorted(begun, key=lambda match: match.row.number):
        plies += match.plies
        if plies > MOST_PLIES and told:
            break
        told[match.row.id] = match.row
    return told, len(begun) - len(told)


def _details(
    records: Records, told: Mapping[str, MatchRow], config: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    slo_ms = config["slo"]["move_seconds"] * 1000
    period_s = config["pace"]["move_period_seconds"]
    moves: dict[str, _Moves] = defaultdict(_Moves)
    for ply in records.plies:
        if ply.match_id in told:
            moves[ply.match_id].plies.append(ply)
    for attempt in records.attempts:
        if attempt.match_id in told:
            moves[attempt.match_id].attempts.append(attempt)
    return {
        match_id: match_detail(
            MatchRecords(row, tuple(of.plies), tuple(of.attempts)), slo_ms, period_s
        )
        for match_id, row in told.items()
        for of in [moves[match_id]]
    }
