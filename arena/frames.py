"""What a run looks like at a moment, for whoever shows it: plain data from its figures.

Made once for all who look (terminal, dashboard, a watcher elsewhere), a few times a second however
much happens. A frame's keys are those of the report wherever both have the thing.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from arena.figures import IDLE_S, Figures, MatchFigures, label
from arena.replicas import shortened
from arena.report import result, unrated_matches
from arena.verdicts import verdict_now, verdict_of_run
from serving import SPANS_S, Bucket

SCHEMA_VERSION = 1
RECENT_RESULTS = 10
TELEMETRY_S = 300
"""Seconds of telemetry in a frame."""
_ENGINES_EVERY_S = 2.0
_JUDGED_EVERY_S = 1.0
_RATED_EVERY_S = 5.0
_AGENTS_AT_ONCE = 16
"""Agents whose percentiles are taken anew in one refresh; the others wait for their turn."""


class Overview:
    """Everything but the boards, kept fresh at a bounded cost."""

    def __init__(self, figures: Figures) -> None:
        self.figures = figures
        self.agents: dict[tuple[str, str], dict[str, Any]] = {}
        self.fleet: dict[str, Any] = {}
        self.engines: list[dict[str, Any]] = []
        self.verdict: dict[str, Any] | None = None
        self.unrated: frozenset[str] = frozenset()
        """Ids of finished matches that count in no rating."""
        self.is_over = False
        self._stale: dict[tuple[str, str], None] = {}
        """Agents to be taken anew, in the order in which they changed."""
        self._now = 0.0
        self._engines_at = self._judged_at = self._rated_at = float("-inf")
        self.refresh(figures.last_record, whole=True)

    def refresh(self, now: float, *, whole: bool = False) -> list[tuple[str, str]]:
        """Bring it up to run time `now`; returns the agents whose rows are new. `whole` takes all
        anew at whatever cost."""
        figures = self.figures
        self._now, self.is_over = now, False
        self.fleet = {
            **figures.fleet(now),
            "now_s": now,
            "recent_moves_per_s": figures.recent_moves_per_s(now),
        }
        self._stale.update(dict.fromkeys(sorted(figures.changed_agents)))
        figures.changed_agents.clear()
        fresh = list(islice(self._stale, None if whole else _AGENTS_AT_ONCE))
        for key in fresh:
            del self._stale[key]
            self.agents[key] = figures.agents[key].row()
        if whole or now - self._engines_at >= _ENGINES_EVERY_S:
            self._engines_at = now
            rows = (engine.row() for engine in figures.engines.values())
            self.engines = [{**row, "replicas": shortened(row["replicas"])} for row in rows]
        if whole or now - self._judged_at >= _JUDGED_EVERY_S:
            self._judged_at = now
            self.verdict = verdict_now(figures, now)
        if whole or now - self._rated_at >= _RATED_EVERY_S:
            self._rated_at = now
            self.unrated = frozenset(unrated_matches(figures))
        return fresh

    def end(self) -> None:
        """The run is over: what is said of it from now on is about the whole of it."""
        if not self.is_over:
            self.is_over = True
            self.verdict = verdict_of_run(self.figures)
            self.unrated = frozenset(unrated_matches(self.figures))
            self.fleet["recent_moves_per_s"] = None

    def frame(self, *, ended: bool = False) -> dict[str, Any]:
        """A full frame without boards."""
        return {
            "schema_version": SCHEMA_VERSION,
            "full": True,
            "ended": ended,
            "run": self.run(),
            "fleet": self.fleet,
            "verdict": self.verdict,
            "engines": self.engine_rows(),
            "agents": [self.agents[key] for key in sorted(self.agents)],
            "results": self.results(),
            "telemetry": {
                name: [bucket_data(bucket) for bucket in last(engine.buckets[SPANS_S[0]])]
                for name, engine in self.figures.engines.items()
            },
        }

    def run(self) -> dict[str, Any]:
        """What the run is; of this, `can_grow` alone changes."""
        figures = self.figures
        config, run = figures.config, figures.run
        return {
            "name": config["name"],
            "id": run.id,
            "created": run.created,
            "move_period_seconds": config["pace"]["move_period_seconds"],
            "slo_ms": config["slo"]["move_seconds"] * 1000,
            "can_grow": figures.can_grow,
            "max_plies": config["tournament"]["max_plies"] or None,
            "engines": {
                name: {
                    "kind": engine.settings["kind"],
                    "version": engine.version,
                    "max_concurrent": engine.settings["max_concurrent"],
                    "batch_limit": engine.batch_limit,
                    "max_batched_tokens": engine.hosted.get("max_batched_tokens"),
                }
                for name, engine in figures.engines.items()
            },
        }

    def engine_rows(self) -> list[dict[str, Any]]:
        """Each engine's figures with its last second; None where it is long over."""
        return [{**row, "now": self._last_second(row["name"])} for row in self.engines]

    def _last_second(self, engine: str) -> dict[str, Any] | None:
        last = self.figures.engines[engine].now
        return bucket_data(last) if last and self._now - last.at <= IDLE_S else None

    def results(self) -> list[dict[str, Any]]:
        """The last matches that ended, newest last."""
        figures = self.figures
        return [
            result(figures.matches[row.id], is_rated=row.id not in self.unrated)
            for row in figures.finished[-RECENT_RESULTS:]
        ]


def last(buckets: Sequence[Bucket]) -> Iterable[Bucket]:
    """The buckets that a frame shows."""
    return islice(buckets, max(len(buckets) - TELEMETRY_S, 0), None)


def bucket_data(bucket: Bucket) -> dict[str, Any]:
    """A bucket as a JSON object."""
    data = bucket._asdict()
    del data["engine"]
    return data


def board(match: MatchFigures, period_s: float) -> dict[str, Any]:
    """A match as a board shows it. A seat thinks from when it may move: its turn has come, and a
    period has passed since its last move was due (less or more by the pace's jitter)."""
    row, ply = match.row, match.last
    fen = ply.fen_after if ply else row.start_fen
    is_over = row.state == "finished"
    side = 1 - ply.side if ply else int(fen.split()[1:2] == ["b"])
    due = match.dues[side]
    asked = ply.done if ply else row.started
    if asked is not None and due is not None:
        asked = max(asked, due + period_s)
    return {
        "match": row.id,
        "number": row.number,
        "game": row.game,
        "label": label(row.game, row.ruleset),
        "ruleset": row.ruleset,
        "first": row.agent_first,
        "second": row.agent_second,
        "opening": row.opening,
        "state": row.state,
        "ply": match.plies,
        "fen": fen,
        "move": ply.move if ply else None,
        "notation": ply.notation if ply else None,
        "side": side,
        "clock_left_s": list(match.clocks),
        "thinking_since_s": asked if row.state == "running" else None,
        "winner": row.winner if is_over else None,
        "termination": row.termination if is_over else None,
        "detail": row.detail,
        "scores": None if row.score_first is None else [row.score_first, row.score_second],
    }
