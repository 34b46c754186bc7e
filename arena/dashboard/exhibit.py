"""What the dashboard shows: frames of a run for each page of boards, and details on request."""

import asyncio
import json
import math
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

import structlog

from arena.dashboard.browse import Wish, browse
from arena.dashboard.league import LiveStandings
from arena.details import match_detail
from arena.figures import Figures, MatchFigures
from arena.follow import read_match
from arena.frames import SCHEMA_VERSION, Overview, board, bucket_data, last
from arena.store import StoreError
from games import Drawn, load_game
from serving import SPANS_S

log = structlog.get_logger()

BOARDS_A_PAGE = 64
FRAME_S = 0.5
"""Seconds between frames at least."""
_FRAMES_KEPT = 120
_ENDED_SHOWN_S = 10.0
"""How long a board stays once its match has ended."""
_INTEREST_S = 30.0
"""A page that nobody has asked for so long gets no more frames."""


class _Page:
    """The frames of one page of boards since somebody asked for it."""

    def __init__(self, seq: int) -> None:
        self.base = seq
        """Frames after this one are all here."""
        self.frames: deque[tuple[int, bytes]] = deque()
        self.shown: set[str] = set()
        """Matches that everybody has who looks: in the last frame and all full ones made since."""
        self.told: set[str] = set()
        """Matches that somebody has."""
        self.asked_at = time.monotonic()

    def add(self, seq: int, frame: bytes) -> None:
        self.frames.append((seq, frame))
        if len(self.frames) > _FRAMES_KEPT:
            self.base, _ = self.frames.popleft()


class LiveExhibit:
    """Frames of a run, made twice a second while somebody looks; one making for all who look."""

    def __init__(
        self, overview: Overview, folder: Path, metrics: Callable[[], Awaitable[str]]
    ) -> None:
        self.epoch = secrets.token_hex(4)
        self.ended = False
        self._metrics = metrics
        self._overview = overview
        self._figures: Figures = overview.figures
        self._period_s: float = self._figures.config["pace"]["move_period_seconds"]
        self._folder = folder
        self._standings = LiveStandings(self._figures)
        self._seq = 0
        self._made_at = 0.0
        self._now = 0.0
        self._pages: dict[int, _Page] = {}
        self._num_pages = 1
        self._changed = asyncio.Event()
        self._agents: set[tuple[str, str]] = set()
        self._matches: set[str] = set()
        self._num_results = 0
        self._can_grow = self._figures.can_grow
        self._buckets_at: dict[str, float] = {}

    def look(self, now: float, agents: Sequence[tuple[str, str]]) -> None:
        """Take note of run time `now` and of the agents whose rows are new."""
        self._now = now
        self._agents.update(agents)
        self._matches |= self._figures.changed_matches
        self._figures.changed_matches.clear()
        if time.monotonic() - self._made_at >= FRAME_S:
            self._make()

    def end(self) -> None:
        """The run is over: make the last frame, and let everybody go who waits for another."""
        self.ended = True
        self._overview.end()
        self._make()

    @property
    def is_watched(self) -> bool:
        """Somebody has asked for frames of late."""
        return bool(self._pages)

    def _make(self) -> None:
        self._made_at = time.monotonic()
        shown = self._shown()
        for number in [n for n, page in self._pages.items() if self._is_of_no_use(n, page)]:
            del self._pages[number]
        self._seq += 1
        if self._pages:
            core = self._delta()
            for number, page in self._pages.items():
                page.add(self._seq, _json({**core, **self._boards_of(number, page, shown)}))
        else:
            self._new_buckets()  # whoever comes has them in a full frame
        self._agents.clear()
        self._matches.clear()
        self._changed.set()
        self._changed = asyncio.Event()

    def _is_of_no_use(self, number: int, page: _Page) -> bool:
        return number >= self._num_pages or self._made_at - page.asked_at > _INTEREST_S

    def _delta(self) -> dict[str, Any]:
        overview = self._overview
        delta: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "seq": self._seq,
            "full": False,
            "ended": self.ended,
            "fleet": overview.fleet,
            "verdict": overview.verdict,
            "engines": overview.engine_rows(),
            "agents": [overview.agents[key] for key in sorted(self._agents)],
            "telemetry": self._new_buckets(),
        }
        if len(self._figures.finished) != self._num_results:
            self._num_results = len(self._figures.finished)
            delta["results"] = overview.results()
        if self._figures.can_grow != self._can_grow:
            self._can_grow = self._figures.can_grow
            delta["run"] = overview.run()
        return delta

    def _new_buckets(self) -> dict[str, list[dict[str, Any]]]:
        new = {}
        for name, engine in self._figures.engines.items():
            known = self._buckets_at.get(name, -1.0)
            buckets = [b for b in last(engine.buckets[SPANS_S[0]]) if b.at > known]
            if buckets:
                self._buckets_at[name] = buckets[-1].at
                new[name] = [bucket_data(bucket) for bucket in buckets]
        return new

    def _shown(self) -> list[MatchFigures]:
        """Matches that have a board: running, suspended, or ended a moment ago; when none is under
        way, those that ended last."""
        figures = self._figures
        ended = [
            figures.matches[row.id]
            for row in takewhile(
                lambda row: self._now - (row.ended or 0.0) <= _ENDED_SHOWN_S,
                reversed(figures.finished),
            )
        ]
        shown = [*figures.active.values(), *ended]
        if not shown:
            shown = [figures.matches[row.id] for row in figures.finished[-BOARDS_A_PAGE:]]
        self._num_pages = max(math.ceil(len(shown) / BOARDS_A_PAGE), 1)
        return sorted(shown, key=lambda match: match.row.number)

    def _boards_of(self, number: int, page: _Page, shown: Sequence[MatchFigures]) -> dict[str, Any]:
        """What changed on a page, and its place among the pages."""
        here = shown[number * BOARDS_A_PAGE : (number + 1) * BOARDS_A_PAGE]
        ids = {match.row.id for match in here}
        new = [m for m in here if m.row.id in self._matches or m.row.id not in page.shown]
        gone = sorted(page.told - ids)
        page.shown = page.told = ids
        boards = [board(match, self._period_s) for match in new]
        return {"boards": boards, "gone": gone, **self._place(number, shown)}

    def nearest(self, page: int) -> int:
        """The page that stands for `page`: itself, or the last one there is."""
        self._shown()
        return min(page, self._num_pages - 1)

    def full(self, page: int) -> tuple[int, bytes]:
        """Number and JSON of a frame that holds everything of a page that there is."""
        shown = self._shown()
        here = shown[page * BOARDS_A_PAGE : (page + 1) * BOARDS_A_PAGE]
        kept = self._pages.setdefault(page, _Page(self._seq))
        kept.asked_at = time.monotonic()
        ids = {match.row.id for match in here}
        kept.shown, kept.told = kept.shown & ids, kept.told | ids
        frame = {
            **self._overview.frame(ended=self.ended),
            "seq": self._seq,
            "boards": [board(match, self._period_s) for match in here],
            "gone": [],
            **self._place(page, shown),
        }
        return self._seq, _json(frame)

    def since(self, page: int, seq: int) -> list[tuple[int, bytes]] | None:
        """The frames of a page after `seq`; None: they are not known here."""
        kept = self._pages.get(page)
        if kept is None or not kept.base <= seq <= self._seq:
            return None
        kept.asked_at = time.monotonic()
        return [frame for frame in kept.frames if frame[0] > seq]

    def _place(self, number: int, shown: Sequence[MatchFigures]) -> dict[str, Any]:
        return {"pages": {"page": number, "pages": self._num_pages, "boards": len(shown)}}

    async def changed(self, seq: int) -> None:
        """Return once there is a frame after `seq`, or the run has ended."""
        while self._seq <= seq and not self.ended:
            await self._changed.wait()

    async def match(self, match_id: str) -> dict[str, Any] | None:
        """A match with its moves; None: there is none of that id."""
        try:
            records = await asyncio.to_thread(read_match, self._folder, match_id)
        except StoreError as error:  # its folder was taken away, say
            log.warning("match_lost", match=match_id, error=str(error))
            return None
        if records is None:
            return None
        slo_ms = self._figures.config["slo"]["move_seconds"] * 1000
        return match_detail(records, slo_ms, self._period_s)

    async def results(self, offset: int, limit: int, wish: Wish) -> dict[str, Any]:
        """Matches that ended, as `browse` has them."""
        figures = self._figures
        ended = [figures.matches[row.id] for row in figures.finished]
        unrated = self._overview.unrated
        return await asyncio.to_thread(browse, ended, unrated, wish, offset, limit)

    async def standings(self, known: int | None) -> bytes | None:
        """Tables of the matches that ended, as JSON; None to one who knows those of as many."""
        return await self._standings.tell(known, is_over=self.ended)

    async def telemetry(self, engine: str, span: int) -> dict[str, Any] | None:
        """An engine's buckets of one span; None: there are none of that."""
        known = self._figures.engines.get(engine)
        if known is None or float(span) not in known.buckets:
            return None
        kept = list(known.buckets[float(span)])
        buckets = await asyncio.to_thread(lambda: [bucket_data(bucket) for bucket in kept])
        return {"span_s": span, "buckets": buckets}

    def histogram(self, agent: str, game: str) -> dict[str, Any] | None:
        """An agent's move latencies at a game; None: there is no such agent."""
        known = self._figures.agents.get((agent, game))
        if known is None:
            return None
        edges, counts = known.times["latency"].sketch().histogram()
        return {"edges_ms": edges, "counts": counts}

    async def metrics(self) -> str:
        """Prometheus text."""
        return await self._metrics()

    def games(self) -> dict[str, Any]:
        """How each game of the run is drawn."""
        return drawings({match.row.game for match in self._figures.matches.values()})


def drawings(games: set[str]) -> dict[str, Any]:
    """Drawing and side names of games, as JSON; a game that cannot be loaded has no drawing."""
    return {name: _drawing(name) for name in sorted(games)}


def _drawing(name: str) -> dict[str, Any]:
    try:
        game = load_game(name)
        drawing = asdict(game.drawing) if isinstance(game, Drawn) else None
        return {"drawing": drawing, "side_names": list(game.side_names)}
    # a user's own game raises what it likes, or is not on this process's path
    except Exception as error:  # noqa: BLE001
        log.warning("game_not_drawn", game=name, error=repr(error))
        return {"drawing": None, "side_names": ["first", "second"]}


def _json(frame: dict[str, Any]) -> bytes:
    return json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
