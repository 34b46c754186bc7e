"""Records of tournaments that were never played, for pages with many players."""

import json
import math
import random
from collections.abc import Iterable, Sequence
from itertools import combinations

from agents import Fault
from arena.store import AttemptRow, MatchRow, Records, RunRow

CONFIG = {
    "name": "never-played",
    "pace": {"move_period_seconds": 1.0},
    "slo": {"move_seconds": 1.0},
    "engines": {
        "main": {"kind": "scripted", "max_concurrent": 8, "max_queued": 8, "context_tokens": 2048}
    },
    "tournament": {"parallel_matches": 4, "max_plies": 40},
}


def tournament(
    names: Sequence[str], pairs: int = 1, *, seed: int = 1, links: Iterable[tuple[str, str]] = ()
) -> Records:
    """`pairs` pairs of chess between each two, or each two in `links`, the first-named being the
    better by far; every tenth game is forfeited by an illegal move."""
    dice = random.Random(seed)
    matches: list[MatchRow] = []
    attempts: list[AttemptRow] = []
    for one, two in links or combinations(names, 2):
        ahead = 6 * (names.index(two) - names.index(one)) / len(names)
        for number in range(pairs):
            for first, second, edge in ((one, two, ahead), (two, one, -ahead)):
                chance = 1 / (1 + math.exp(-edge - 0.2))
                winner = None if dice.random() < 0.25 else int(dice.random() > chance)
                row = _match(len(matches), f"{one}/{two}/{number}", first, second, winner)
                if winner is not None and dice.random() < 0.1:
                    row = row._replace(termination="forfeit", detail="White played e2e5, illegal")
                    attempts.append(_illegal(row))
                matches.append(row)
    agents = [{"name": name, "kind": "llm", "engine": "main", "mode": "free"} for name in names]
    run = RunRow("r", "2026-01-01T00:00:00Z", json.dumps({**CONFIG, "agents": agents}), "d", "{}")
    return Records(run, tuple(matches), (), tuple(attempts), (), ())


def _match(number: int, pair: str, first: str, second: str, winner: int | None) -> MatchRow:
    return MatchRow(
        id=f"m{number}",
        pair_id=pair,
        game="chess",
        ruleset="standard",
        agent_first=first,
        agent_second=second,
        start_fen="rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1",
        opening="",
        state="finished",
        winner=winner,
        termination="ply_cap" if winner is None else "checkmate",
        detail="White wins by checkmate",
        score_first=None,
        score_second=None,
        started=float(number),
        ended=number + 1.0,
        suspended_at=None,
        suspended_s=0.0,
        number=number,
    )


def _illegal(row: MatchRow) -> AttemptRow:
    assert row.winner is not None
    return AttemptRow(
        request_id=f"{row.id}/0/0/0",
        match_id=row.id,
        ply=0,
        side=1 - row.winner,
        n=0,
        engine="main",
        mode="free",
        reply_text="e2e5",
        finish="stop",
        fault=Fault.ILLEGAL,
        detail="e2e5 is not legal",
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=1,
        submitted=row.started,
        admitted=row.started,
        first_token=None,
        done=row.ended,
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
        step_requests_mean=1.0,
        replica=None,
    )
