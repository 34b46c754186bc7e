"""Runs of an engine whose steps are known to the microsecond: rows as a store keeps them."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arena import config as configs
from arena.fleet import Matches, Work
from arena.store import AttemptRow, MatchRow, PlyRow, Row, RunRow, SampleRow, Store
from serving.batching import Job, Server, Trace, run_continuous
from serving.step_time import StepTime

TRUE = StepTime(base_s=0.02, per_token_s=0.001, per_request_s=0.002)
WORK = Work(((20, 5), (30, 5), (25, 4)), 1.0, overhead_s=0.004, commit_s=0.001)


def play(
    folder: Path,
    *,
    name: str = "seen",
    time: StepTime = TRUE,
    parallel: int = 4,
    matches: int = 8,
    plies: int = 20,
    period: float = 1.0,
    slots: int = 16,
    source: str = "per_step",
    stretch: float = 1.0,
    seed: int = 0,
    engine: Mapping[str, Any] | None = None,
    replicas: Sequence[str] = (),
) -> Path:
    """A run in `folder`, of which every move took `stretch` times as long as the engine did.

    `engine` is what else its config says of the engine, true or not. `replicas` are said, in turn,
    to have made the steps.
    """
    work = Work(WORK.shapes, period, WORK.overhead_s, WORK.commit_s, seed)
    asked = Matches(work, parallel, total=matches, plies=plies)
    trace = run_continuous(asked, Server(slots, time))
    rows, moves = _moves(trace, work, stretch)
    steps = _steps(trace, time, source)
    for number, row in enumerate(steps if replicas else ()):
        steps[number] = row._replace(replica=replicas[number % len(replicas)])
    config = _config(name, parallel, plies, period, slots)
    config["engines"]["main"].update(engine or {})
    run = RunRow(f"{name}-{seed}", "2026-01-01T00:00:00Z", json.dumps(config), "d", "{}")

    async def write() -> None:
        store = Store.create(folder, run, rows)
        await store.commit(*moves, *steps)
        await store.close()

    asyncio.run(write())
    return folder


def _config(name: str, parallel: int, plies: int, period: float, slots: int) -> dict[str, Any]:
    config = configs.parse(
        {
            "name": name,
            "engines": {
                "main": {"kind": "scripted", "max_concurrent": slots, "max_queued": parallel}
            },
            "agents": [{"name": each, "kind": "llm", "engine": "main"} for each in ("a", "b")],
            "tournament": {"games": ["chess"], "parallel_matches": parallel, "max_plies": plies},
            "pace": {"move_period_seconds": period},
        }
    )
    data: dict[str, Any] = json.loads(config.to_json())
    return data


def _moves(trace: Trace, work: Work, stretch: float) -> tuple[list[MatchRow], list[Row]]:
    by_match: dict[int, list[Job]] = defaultdict(list)
    for job in trace.jobs:
        by_match[job.owner.match.number].append(job)
    matches, rows = [], list[Row]()
    for number, jobs in by_match.items():
        ended = 0.0
        for ply, job in enumerate(sorted(jobs, key=lambda job: job.arrival)):
            assert job.started is not None
            assert job.done is not None
            key = f"m{number}", ply, ply % 2
            due = job.owner.due
            done = due + (job.done - due) * stretch
            ready = ended + work.commit_s if ply else due
            times = job.started - job.arrival, 0.0, job.done - job.started
            rows += [
                _attempt(key, job, times),
                PlyRow(*key, "e2e4", "e4", "fen", None, ready, due, done),
            ]
            ended = done
        first = jobs[0].owner.due
        matches.append(_match(number, min(first, *(job.owner.due for job in jobs)), ended))
    return sorted(matches, key=lambda row: row.number), rows


def _attempt(key: tuple[str, int, int], job: Job, times: tuple[float, float, float]) -> AttemptRow:
    match, ply, side = key
    return AttemptRow(
        f"{match}/{ply}/0/0",
        match,
        ply,
        side,
        0,
        "main",
        "constrained",
        "e2e4",
        "stop",
        prompt_tokens=400 + job.prompt,
        cached_tokens=400,
        completion_tokens=job.output,
        submitted=job.arrival,
        admitted=job.arrival,
        done=(job.done or 0.0) + 1e-6,
        queue_s=times[0],
        prefill_s=times[1],
        decode_s=times[2],
    )


def _match(number: int, started: float, ended: float) -> MatchRow:
    return MatchRow(
        id=f"m{number}",
        pair_id=f"p{number // 2}",
        game="chess",
        ruleset="standard",
        agent_first="a",
        agent_second="b",
        start_fen="fen w",
        opening="",
        state="finished",
        winner=None,
        termination="ply_cap",
        detail=None,
        score_first=None,
        score_second=None,
        started=started,
        ended=ended,
        suspended_at=None,
        suspended_s=0.0,
        number=number,
    )


def _steps(trace: Trace, time: StepTime, source: str) -> list[SampleRow]:
    """Each step gives all inside a token, and computes the prompts of those who came for it."""
    rows, now = list[SampleRow](), 0.0
    spans = sorted((job.started or 0.0, job.done or 0.0, max(job.prompt, 1)) for job in trace.jobs)
    while spans:
        now = max(now, spans[0][0])
        inside = [span for span in spans if span[0] <= now + 1e-9]
        requests = len(inside)
        tokens = sum(prompt if now - start < 1e-9 else 1 for start, _, prompt in inside)
        now += time.seconds(tokens, requests)
        rows.append(
            SampleRow("main", now, source, 1, None, requests, 0, requests, tokens, 0.1, 0, 0, 0, 0)
        )
        spans = [span for span in spans if span[1] > now + 1e-9]
    return rows
