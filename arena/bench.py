"""What the arena itself costs, measured through its own public path.

games      legal moves and play of every ply of seeded random games; pyffish beside them
overhead   the whole path of a ply on one core: agents, template, store on disk, telemetry; the
           scripted engine answers at once
pace       many seats that move once a second on a scripted engine of 100 to 300 ms
dashboard  overhead's chess, without and with a dashboard that a client follows, in turn

Each cell of the last three is a process of its own, so that none warms or fattens the next.
"""

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from arena import config as configs
from arena import preflight, report, runner, store, tournament
from arena.config import RunConfig
from arena.dashboard.guard import Binding
from arena.distribution import Sketch, summary
from arena.pace import Pacer
from arena.progress import Progress
from arena.show import Show, showing
from arena.store import RunRow, Store
from arena.terminal import SilentView
from games import Game, Position, Start, load_game

SCHEMA_VERSION = 1
GAMES = ("chess", "janggi")
NUM_GAMES = 100
DASHBOARD_PAIRS = 3
PACED_S = 20.0
_CLIENT = """
import os, sys, urllib.request
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, set(range(os.cpu_count())) - os.sched_getaffinity(0) or {0})
with urllib.request.urlopen(sys.argv[1] + "api/events?page=0") as stream:
    for line in stream:
        if line.startswith(b"data: "):
            print("frame", flush=True)
"""
"""Reads a dashboard's frames until the run is over, on another core than the arena's."""
_ORACLE_PLIES = 2000
_LAG_SAMPLE_S = 0.05


def games() -> dict[str, Any]:
    """Medians over every ply of 100 seeded random games, microseconds; the oracle's too."""
    return {"schema_version": SCHEMA_VERSION, "games": {name: _time_game(name) for name in GAMES}}


def _time_game(name: str) -> dict[str, float | None]:
    game = load_game(name)
    starts = game.openings("builtin", game.rulesets[0])
    legal_us: list[float] = []
    play_us: list[float] = []
    lines: list[tuple[Start, list[str]]] = []
    for number in range(NUM_GAMES):
        start = starts[number % len(starts)]
        dice = random.Random(f"bench/{name}/{number}")
        moves = _time_moves(game.position(start), dice, legal_us, play_us)
        lines.append((start, moves))
    return {
        "legal_moves_us": statistics.median(legal_us),
        "play_us": statistics.median(play_us),
        "oracle_legal_moves_us": _time_oracle(game, lines),
        "plies": len(legal_us),
    }


def _time_moves(
    position: Position, dice: random.Random, legal_us: list[float], play_us: list[float]
) -> list[str]:
    moves: list[str] = []
    while len(moves) < 200:
        began = time.perf_counter()
        legal = position.legal_moves()
        legal_us.append((time.perf_counter() - began) * 1e6)
        if position.result() is not None:
            break
        moves.append(dice.choice(legal))
        began = time.perf_counter()
        position = position.play(moves[-1])
        play_us.append((time.perf_counter() - began) * 1e6)
    return moves


def _time_oracle(game: Game, lines: Sequence[tuple[Start, list[str]]]) -> float | None:
    """Median of pyffish's legal_moves on the same positions, from the start as its API wants it."""
    times: list[float] = []
    for start, moves in lines:
        position = game.position(start)
        spoken = []
        for move in moves:
            spoken.append(_oracle_move(position, move))
            position = position.play(move)
        task = {
            "variant": game.name,
            "fen": start.fen,
            "lines": [spoken[:ply] for ply in range(len(spoken))],
        }
        done = subprocess.run(
            [sys.executable, "-m", "arena.oracle"],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            return None
        times += json.loads(done.stdout)
        if len(times) >= _ORACLE_PLIES:
            break
    return statistics.median(times)


def _oracle_move(position: Position, move: str) -> str:
    """pyffish writes a pass as the general's own square."""
    if move != "pass":
        return move
    general = "K" if position.side == 0 else "k"
    for row, text in enumerate(position.fen.split()[0].split("/")):
        file = 0
        for letter in text:
            if letter == general:
                square = f"{'abcdefghi'[file]}{10 - row}"
                return square + square
            file += int(letter) if letter.isdecimal() else 1
    raise AssertionError("a position has both generals")


def overhead() -> dict[str, Any]:
    """Plies a second of the whole path, on one core, 64 matches at once."""
    cells = {name: _cell("overhead", name) for name in GAMES}
    return {
        "schema_version": SCHEMA_VERSION,
        "games": {
            name: {key: cell[key] for key in ("plies_per_s", "cpu_ms_per_ply", "plies")}
            for name, cell in cells.items()
        },
        "rss_mib": max(cell["rss_mib"] for cell in cells.values()),
        "pinned_to_one_core": all(cell["pinned"] for cell in cells.values()),
    }


def pace(seats: Sequence[int], seconds: float) -> dict[str, Any]:
    """Schedule lag and what of the pace was kept, for each number of seats."""
    cells = [_cell("pace", str(number), str(seconds)) for number in seats]
    return {"schema_version": SCHEMA_VERSION, "cells": cells}


def dashboard() -> dict[str, Any]:
    """What a dashboard that a client follows costs the arena, by pairs of cells without and with
    it: `paced`, 128 seats on 64 boards at two moves a second a board, in shares of one core; and
    `flat_out`, the same boards as fast as one core goes, in plies a second.

    `cost` is the median over pairs of the share of a core that it takes at that pace, which is the
    share of the arena's greatest plies a second; `cost_flat_out` that of plies lost at full speed.
    """
    paced, flat_out = [], []
    for _ in range(DASHBOARD_PAIRS):
        cells = [_cell("paced", "chess", *shown) for shown in ([], ["dashboard"])]
        paced.append({"off": cells[0], "on": cells[1]})
        cells = [_cell("overhead", "chess", *shown) for shown in ([], ["dashboard"])]
        flat_out.append({"off": cells[0]["plies_per_s"], "on": cells[1]["plies_per_s"]})
    return {
        "schema_version": SCHEMA_VERSION,
        "paced": paced,
        "flat_out": flat_out,
        "cost": statistics.median(p["on"]["cpu_share"] - p["off"]["cpu_share"] for p in paced),
        "cost_flat_out": statistics.median(1 - pair["on"] / pair["off"] for pair in flat_out),
    }


def _cell(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "arena.bench", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    cell: dict[str, Any] = json.loads(done.stdout)
    return cell


def _overhead_cell(game: str, *, is_shown: bool) -> dict[str, Any]:
    pinned = _pin()
    config = _config(
        [game], pairs=64, parallel=64, max_plies=100, period=0.0, latency=0.0, name="overhead"
    )
    with tempfile.TemporaryDirectory() as folder:
        played = runner.run_loop(_play(config, Path(folder), None, is_shown=is_shown))
        wall, cpu, plies, rss, _, frames = played
    return {
        "frames": frames,
        "plies_per_s": plies / wall,
        "cpu_ms_per_ply": cpu / plies * 1000,
        "plies": plies,
        "rss_mib": rss,
        "pinned": pinned,
    }


def _paced_cell(game: str, *, is_shown: bool) -> dict[str, Any]:
    """64 boards at two moves a second each, pinned to one core."""
    _pin()
    config = _config(
        [game], pairs=32, parallel=64, max_plies=200, period=1.0, latency=0.1, name="paced"
    )
    with tempfile.TemporaryDirectory() as folder:
        played = runner.run_loop(_play(config, Path(folder), PACED_S, is_shown=is_shown))
    return {
        "cpu_share": played.cpu_s / played.wall_s,
        "plies_per_s": played.plies / played.wall_s,
        "loop_lag_ms": summary(played.lags_ms),
        "frames": played.frames,
    }


def _pin() -> bool:
    """Hold this process to one core; False where the system cannot."""
    if not hasattr(os, "sched_setaffinity"):
        return False
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    return True


def _pace_cell(seats: int, seconds: float) -> dict[str, Any]:
    matches = seats // 2
    config = _config(
        list(GAMES),
        pairs=-(-matches // (2 * len(GAMES))),
        parallel=matches,
        max_plies=200,
        period=1.0,
        latency=[0.1, 0.3],
        name="pace",
    )
    with tempfile.TemporaryDirectory() as folder:
        played = runner.run_loop(_play(config, Path(folder), seconds, is_shown=False))
        _, _, _, rss, lags, _ = played
        held = store.read(Path(folder) / "run")
    figures = report.figures_of(held)
    built = report.report(figures)
    harness = Sketch()
    for agent in figures.agents.values():
        harness.merge(agent.times["harness"].sketch())
    return {
        "seats": seats,
        "schedule_lag_ms": built["schedule_lag_ms"],
        "harness_ms": harness.summary(),
        "loop_lag_ms": summary(lags),
        "pace_attainment": built["pace_attainment"],
        "min_seat_attainment": built["min_seat_attainment"],
        "rss_mib": rss,
    }


def _config(
    game_names: list[str],
    *,
    pairs: int,
    parallel: int,
    max_plies: int,
    period: float,
    latency: float | list[float],
    name: str,
) -> RunConfig:
    return configs.parse(
        {
            "name": name,
            "seed": 1,
            "engines": {
                "main": {
                    "kind": "scripted",
                    "latency_seconds": latency,
                    "max_concurrent": parallel,
                    "max_queued": parallel,
                }
            },
            "agents": [
                {"name": side, "kind": "llm", "engine": "main", "mode": "constrained"}
                for side in ("one", "two")
            ],
            "tournament": {
                "games": game_names,
                "pairs": pairs,
                "parallel_matches": parallel,
                "max_plies": max_plies,
            },
            "pace": {"move_period_seconds": period},
        }
    )


class _Played(NamedTuple):
    """What one cell saw."""

    wall_s: float
    cpu_s: float
    plies: int
    rss_mib: float
    """This process's peak."""
    lags_ms: list[float]
    """How late the loop woke a sleeper."""
    frames: int | None
    """Frames that the dashboard's client was sent."""


async def _play(
    config: RunConfig, folder: Path, seconds: float | None, *, is_shown: bool
) -> _Played:
    preflight.check(config)
    plan = tournament.new_plan(config)
    rows = [plan.pasts[spec.id].row for spec in plan.specs]
    run = RunRow("bench", "", config.to_json(), config.digest, "{}")
    opened = Store.create(folder / "run", run, rows)
    pacer = Pacer()
    lags: list[float] = []
    peak = [0.0]
    async with AsyncExitStack() as stack:
        client = await _follow(opened, stack) if is_shown else None
        began, cpu = time.perf_counter(), time.process_time()
        watching = asyncio.create_task(_watch(lags, peak))
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, pacer.stop)
        with runner.logging_to(opened.folder, config.name):
            await tournament.run(
                plan, opened, pacer, Progress(), announce=lambda _: None, opened=lambda _: None
            )
        await opened.close()
        watching.cancel()
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    frames = None
    if client is not None:
        told, _ = await client.communicate()
        frames = len(told.split())
    plies = len(store.read(opened.folder).plies)
    return _Played(wall, cpu, plies, peak[0], lags, frames)


async def _follow(opened: Store, stack: AsyncExitStack) -> asyncio.subprocess.Process:
    """Show the run on a dashboard, with a client that reads every frame until the run is over."""
    told: list[str] = []
    binding = Binding("127.0.0.1", 0, None, is_chosen=True)
    view = _Listener(told)
    await stack.enter_async_context(showing(Show(view, binding), opened))
    url = told[-1].removeprefix("dashboard: ")
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CLIENT, url, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout is not None
    await client.stdout.readline()
    return client


class _Listener(SilentView):
    """Notes what is announced."""

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def announce(self, message: str) -> None:
        self._told.append(message)


async def _watch(lags: list[float], peak: list[float]) -> None:
    """How late the loop wakes a sleeper, and the process's resident memory."""
    process = psutil.Process()
    while True:
        due = time.perf_counter() + _LAG_SAMPLE_S
        await asyncio.sleep(_LAG_SAMPLE_S)
        lags.append(max(time.perf_counter() - due, 0.0) * 1000)
        peak[0] = max(peak[0], process.memory_info().rss / 2**20)


def _main(arguments: Sequence[str]) -> int:
    kind, first, *rest = arguments
    if kind == "overhead":
        cell = _overhead_cell(first, is_shown=bool(rest))
    elif kind == "paced":
        cell = _paced_cell(first, is_shown=bool(rest))
    else:
        cell = _pace_cell(int(first), float(rest[0]))
    sys.stdout.write(json.dumps(cell))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
