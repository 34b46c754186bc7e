"""A run in figures, pure: records in, one report out. The JSON form is fixed by SCHEMA_VERSION.

Latencies are in milliseconds. A move's latency runs from when it was due to when it was decided:
its parts are the engine's queue, prefill and decode as the engine reports them, and the harness,
which is whatever is not the engine's nor a wait in our own queue, the commit included.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from agents import Fault
from arena.store import AttemptRow, MatchRow, PlyRow, Records

SCHEMA_VERSION = 1

Summary = dict[str, float | None]


def build(records: Records) -> dict[str, Any]:
    """The report of a run, finished or not; unknown figures are None."""
    config = json.loads(records.run.config_json)
    matches = {row.id: row for row in records.matches}
    played = moves(records)
    pace = _attainment(records, config["pace"]["move_period_seconds"])
    elapsed = _elapsed(records)
    finished = [row for row in records.matches if row.state == "finished"]
    plies = Counter(ply.match_id for ply in records.plies)
    states = [row.state for row in records.matches]
    offered = len(played) + _lost_moves(finished)
    slo_ms = config["slo"]["move_seconds"] * 1000
    return {
        "schema_version": SCHEMA_VERSION,
        "run": {"name": config["name"], "id": records.run.id, "created": records.run.created},
        "matches": {
            "scheduled": states.count("scheduled"),
            "running": states.count("running"),
            "suspended": states.count("suspended"),
            "finished": len(finished),
        },
        "plies": len(records.plies),
        "elapsed_s": elapsed,
        "moves_per_s": _ratio(len(records.plies), elapsed),
        "games_per_h": _ratio(len(finished) * 3600, elapsed),
        "slo_attainment": _ratio(sum(m["latency"] <= slo_ms for m in played), offered),
        **pace,
        "schedule_lag_ms": summary(m["lag"] for m in played if m["lag"] is not None),
        "results": [_result(row, plies[row.id]) for row in finished],
        "pairings": _pairings(finished),
        "agents": _agents(records, matches, played),
        "engines": [_engine(name, records, config) for name in config["engines"]],
        "standings": _standings(finished),
        "infrastructure_faults": _infrastructure(records.attempts),
        "verdict": None,
    }


def summary(values: Iterable[float | None]) -> Summary:
    """Mean, percentiles (linear interpolation between order statistics) and greatest value."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return dict.fromkeys(("mean", "p50", "p95", "p99", "max"))
    return {
        "mean": math.fsum(known) / len(known),
        "p50": percentile(known, 0.50),
        "p95": percentile(known, 0.95),
        "p99": percentile(known, 0.99),
        "max": known[-1],
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the ordered values lie, as numpy's default method."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def weighted_summary(pairs: Iterable[tuple[float, int]]) -> Summary:
    """`summary` of values that each stand for a number of equal ones."""
    known = sorted(pairs)
    total = sum(weight for _, weight in known)
    if not total:
        return summary(())
    mean = math.fsum(value * weight for value, weight in known) / total
    at = {share: _weighted_percentile(known, total * share) for share in (0.5, 0.95, 0.99)}
    return {"mean": mean, "p50": at[0.5], "p95": at[0.95], "p99": at[0.99], "max": known[-1][0]}


def _weighted_percentile(ordered: Sequence[tuple[float, int]], rank: float) -> float:
    seen = 0
    for value, weight in ordered:
        seen += weight
        if seen >= rank:
            return value
    return ordered[-1][0]


def label(game: str, ruleset: str) -> str:
    """A game as tables name it: with its rule set where that is not the game's namesake."""
    return game if ruleset in (game, "standard") else f"{game}/{ruleset}"


def _ratio(top: float, bottom: float | None) -> float | None:
    return top / bottom if bottom else None


def moves(records: Records) -> list[dict[str, Any]]:
    """Every committed move with its latency and where it went, milliseconds."""
    attempts: dict[tuple[str, int], list[AttemptRow]] = defaultdict(list)
    for attempt in records.attempts:
        attempts[attempt.match_id, attempt.ply].append(attempt)
    starts = [event.at for event in records.events if event.kind == "process_start"]
    played: list[dict[str, Any]] = []
    for index, ply in enumerate(records.plies):
        follower = records.plies[index + 1] if index + 1 < len(records.plies) else None
        same = follower is not None and follower.match_id == ply.match_id
        commit = follower.ready - ply.done if same and follower is not None else 0.0
        if follower is not None and any(ply.done <= at <= follower.ready for at in starts):
            commit = 0.0  # between two processes
        played.append(_move(ply, attempts.get((ply.match_id, ply.ply), []), max(commit, 0.0)))
    return played


def _move(ply: PlyRow, attempts: Sequence[AttemptRow], commit: float) -> dict[str, Any]:
    served = [a for a in attempts if a.submitted is not None]
    ours = engine = 0.0
    for a in served:
        assert a.submitted is not None
        assert a.admitted is not None
        assert a.done is not None
        ours += a.admitted - a.submitted
        engine += a.done - a.admitted
    disturbed = len(served) < len(attempts)
    latency = ply.done - ply.due
    return {
        "ply": ply,
        "latency": latency * 1000,
        "lag": (served[0].submitted - ply.due) * 1000 if served and not disturbed else None,  # type: ignore[operator]
        "queue": _total_ms([a.queue_s for a in served]),
        "prefill": _total_ms([a.prefill_s for a in served]),
        "decode": _total_ms([a.decode_s for a in served]),
        "harness": None if disturbed else (latency - engine - ours + commit) * 1000,
        "attempts": attempts,
    }


def _total_ms(parts: Sequence[float | None]) -> float | None:
    if not parts or None in parts:
        return None
    return math.fsum(part for part in parts if part is not None) * 1000


def _elapsed(records: Records) -> float | None:
    """Seconds from the first match's start to the end of the last one, or to the last record."""
    starts = [row.started for row in records.matches if row.started is not None]
    if not starts:
        return None
    last = _last_record(records)
    ends = [_end(row, last) for row in records.matches if row.started is not None]
    return max(ends) - min(starts)


def _end(row: MatchRow, last_record: float) -> float:
    """When a match that was begun ended or was left; while it runs, the last thing recorded."""
    known = row.ended if row.ended is not None else row.suspended_at
    return last_record if known is None else known


def _last_record(records: Records) -> float:
    times = [ply.done for ply in records.plies]
    times += [sample.at for sample in records.samples[-1:]]
    times += [event.at for event in records.events[-1:]]
    times += [row.started for row in records.matches if row.started is not None]
    return max(times, default=0.0)


def _lost_moves(finished: Sequence[MatchRow]) -> int:
    """Turns that ended in a forfeit: offered, and never a move."""
    return sum(row.termination in ("forfeit", "flag_fall") for row in finished)


def _attainment(records: Records, period: float) -> dict[str, float | None]:
    """Plies made of those that the pace allowed, in all and for the seat that fared worst."""
    if not period:
        return {"pace_attainment": None, "min_seat_attainment": None}
    made = Counter((ply.match_id, ply.side) for ply in records.plies)
    last = _last_record(records)
    seconds = {
        row.id: max(_end(row, last) - row.started - row.suspended_s, 0.0)
        for row in records.matches
        if row.started is not None
    }
    seats = [
        made[match_id, side] / (running / period)
        for match_id, running in seconds.items()
        for side in (0, 1)
        if running >= 2 * period
    ]
    allowed = math.fsum(seconds.values()) / (period / 2)
    return {
        "pace_attainment": _ratio(made.total(), allowed),
        "min_seat_attainment": min(seats, default=None),
    }


def _result(row: MatchRow, plies: int) -> dict[str, Any]:
    return {
        "match": row.id,
        "pair": row.pair_id,
        "game": label(row.game, row.ruleset),
        "first": row.agent_first,
        "second": row.agent_second,
        "opening": row.opening,
        "winner": None if row.winner is None else row.agents[row.winner],
        "termination": row.termination,
        "detail": row.detail,
        "scores": None if row.score_first is None else [row.score_first, row.score_second],
        "plies": plies,
    }


def _pairings(finished: Sequence[MatchRow]) -> list[dict[str, Any]]:
    """Wins, draws and losses of the first-named agent of each pairing."""
    table: dict[tuple[str, str, str], list[int]] = {}
    for row in finished:
        one, two = sorted(row.agents)
        counts = table.setdefault((label(row.game, row.ruleset), one, two), [0, 0, 0])
        winner = None if row.winner is None else row.agents[row.winner]
        counts[1 if winner is None else 0 if winner == one else 2] += 1
    return [
        {"game": game, "agent": one, "opponent": two, "wins": w, "draws": d, "losses": lost}
        for (game, one, two), (w, d, lost) in table.items()
    ]


def _agents(
    records: Records, matches: Mapping[str, MatchRow], played: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    faults: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    modes: dict[str, str | None] = {}
    for move in played:
        row = matches[move["ply"].match_id]
        name = row.agents[move["ply"].side]
        groups[name, label(row.game, row.ruleset)].append(move)
    for attempt in records.attempts:
        row = matches[attempt.match_id]
        name = row.agents[attempt.side]
        modes[name] = attempt.mode
        if attempt.fault is not None:
            faults[name, label(row.game, row.ruleset)][attempt.fault] += 1
    return [
        {
            "name": name,
            "game": game,
            "mode": modes.get(name),
            "moves": len(groups[name, game]),
            "latency_ms": summary(m["latency"] for m in groups[name, game]),
            "queue_ms": summary(m["queue"] for m in groups[name, game]),
            "prefill_ms": summary(m["prefill"] for m in groups[name, game]),
            "decode_ms": summary(m["decode"] for m in groups[name, game]),
            "harness_ms": summary(m["harness"] for m in groups[name, game]),
            "faults": dict(faults[name, game]),
        }
        for name, game in sorted(groups.keys() | faults.keys())
    ]


def _engine(name: str, records: Records, config: Mapping[str, Any]) -> dict[str, Any]:
    settings = config["engines"][name]
    samples = [row for row in records.samples if row.engine == name]
    served = [a for a in records.attempts if a.engine == name and a.prompt_tokens is not None]
    steps = [(s.step_requests, s.steps) for s in samples if s.step_requests is not None]
    occupancy = [(r / settings["max_concurrent"], n) for r, n in steps]
    return {
        "name": name,
        "kind": settings["kind"],
        "version": _version(name, records),
        "step_requests": weighted_summary((float(r), n) for r, n in steps),
        "step_tokens": weighted_summary(
            (float(s.step_tokens), s.steps) for s in samples if s.step_tokens is not None
        ),
        "occupancy": weighted_summary(occupancy),
        "prefix_hit_rate": _hit_rate(served),
        "uncached_prompt_tokens_per_move": _uncached_per_move(name, records),
        "output_tokens_per_move": _output_per_move(served),
        "kv_usage": weighted_summary(
            (s.kv_usage, s.steps) for s in samples if s.kv_usage is not None
        ),
        "preemptions": _total([s.preemptions for s in samples]),
        "rejected": _total([s.rejected for s in samples]),
        "restarts": sum(
            event.kind == "engine_restarted" and json.loads(event.detail_json)["engine"] == name
            for event in records.events
        ),
    }


def _version(name: str, records: Records) -> str | None:
    for event in reversed(records.events):
        if event.kind == "engine_ready":
            detail = json.loads(event.detail_json)
            if detail["engine"] == name:
                return str(detail["version"])
    return None


def _hit_rate(served: Sequence[AttemptRow]) -> float | None:
    known = [a for a in served if a.cached_tokens is not None]
    cached = sum(a.cached_tokens or 0 for a in known)
    return _ratio(cached, sum(a.prompt_tokens or 0 for a in known))


def _uncached_per_move(name: str, records: Records) -> dict[str, float | None]:
    """Mean over moves of the prompt tokens that the prefix cache did not hold, by game."""
    games = {row.id: label(row.game, row.ruleset) for row in records.matches}
    uncached: dict[str, int] = defaultdict(int)
    moved: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for a in records.attempts:
        if a.engine == name and a.prompt_tokens is not None and a.cached_tokens is not None:
            uncached[games[a.match_id]] += a.prompt_tokens - a.cached_tokens
            moved[games[a.match_id]].add((a.match_id, a.ply))
    return {game: uncached[game] / len(plies) for game, plies in sorted(moved.items())}


def _output_per_move(served: Sequence[AttemptRow]) -> float | None:
    """Tokens written for a move, all its attempts together."""
    known = [a for a in served if a.completion_tokens is not None]
    moved = {(a.match_id, a.ply) for a in known}
    return _ratio(sum(a.completion_tokens or 0 for a in known), len(moved))


def _total(counter: Sequence[int | None]) -> int | None:
    """The growth of a counter that starts again at 0 with each process."""
    known = [value for value in counter if value is not None]
    if not known:
        return None
    return known[0] + sum(now - before if now >= before else now for before, now in pairwise(known))


def _standings(finished: Sequence[MatchRow]) -> list[dict[str, Any]]:
    """Points per agent and game: 1 for a win, half for a draw. Ratings are not estimated here."""
    table: dict[tuple[str, str], list[int]] = {}
    for row in finished:
        for side, name in enumerate(row.agents):
            counts = table.setdefault((label(row.game, row.ruleset), name), [0, 0, 0])
            counts[1 if row.winner is None else 0 if row.winner == side else 2] += 1
    rows = [
        {
            "name": name,
            "game": game,
            "games": sum(counts),
            "wins": counts[0],
            "draws": counts[1],
            "losses": counts[2],
            "points": counts[0] + counts[1] / 2,
            "elo": None,
            "elo_error": None,
        }
        for (game, name), counts in table.items()
    ]
    return sorted(rows, key=lambda row: (row["game"], -float(str(row["points"])), row["name"]))


def _infrastructure(attempts: Sequence[AttemptRow]) -> dict[str, int]:
    """Faults that were no player's, by kind."""
    counts: dict[str, int] = defaultdict(int)
    for attempt in attempts:
        if attempt.fault is not None and Fault(attempt.fault).is_infrastructure:
            counts[attempt.fault] += 1
    return dict(counts)
