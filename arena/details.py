"""One match whole: its moves, where each one's time went, and every attempt. Pure."""

from collections.abc import Sequence
from typing import Any

from agents import THOUGHT
from arena.figures import MatchFigures, MoveTimes
from arena.follow import MatchRecords
from arena.frames import board
from arena.store import AttemptRow


def match_detail(records: MatchRecords, slo_ms: float, period_s: float) -> dict[str, Any]:
    """The board of a match with its plies, and the attempts at the ply under way."""
    match = MatchFigures(records.match)
    by_ply: dict[int, list[AttemptRow]] = {}
    for attempt in records.attempts:
        by_ply.setdefault(attempt.ply, []).append(attempt)
    plies = []
    for ply in records.plies:
        match.note(ply)
        attempts = by_ply.pop(ply.ply, [])
        times = MoveTimes(ply, attempts)
        plies.append(
            {
                "ply": ply.ply,
                "side": ply.side,
                "move": ply.move,
                "notation": ply.notation,
                "fen": ply.fen_after,
                "offers_draw": bool(ply.offers_draw),
                "latency_ms": times.latency,
                "queue_ms": times.queue,
                "prefill_ms": times.prefill,
                "decode_ms": times.decode,
                "harness_ms": times.harness,
                "late": times.latency > slo_ms,
                "attempts": _attempts(attempts),
            }
        )
    pending = [attempt for ply in sorted(by_ply) for attempt in by_ply[ply]]
    return {
        **board(match, period_s),
        "start_fen": records.match.start_fen,
        "plies": plies,
        "pending": _attempts(pending),
    }


def _attempts(rows: Sequence[AttemptRow]) -> list[dict[str, Any]]:
    return [
        {
            "n": row.n,
            "is_thought": row.request_id.endswith(THOUGHT),
            "mode": row.mode,
            "fault": row.fault,
            "detail": row.detail,
            "reply_text": row.reply_text,
            "reasoning": row.reasoning,
            "finish": row.finish,
            "prompt_tokens": row.prompt_tokens,
            "cached_tokens": row.cached_tokens,
            "completion_tokens": row.completion_tokens,
        }
        for row in rows
    ]
