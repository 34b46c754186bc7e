"""`arena bench replicas` without Ray: what it counts, says and refuses, and a whole one."""

import asyncio
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arena import cli, replica_bench, terminal
from arena.replica_bench import ReplicaOptions, Table, all_within, judged, measure, moves_in
from arena.store import PlyRow
from serving import EngineError, Reply, Request, ScriptedConfig
from serving.config import EngineStart
from serving.scripted import ScriptedEngine

FAR_S = 0.012
"""Of the time until an answer, on the way."""


class FarEngine(ScriptedEngine):
    """Replicas that take turns with matches; what they say of their own time leaves the way out."""

    def __init__(self, config: dict[str, Any]) -> None:
        limits = {key: config[key] for key in ("max_concurrent", "max_queued")}
        hosted = ScriptedConfig.model_validate({**config["hosted"], **limits})
        super().__init__(EngineStart(config["name"], Path(), 30.0, 0), hosted)
        self._num_replicas = config["replicas"]
        self._places: dict[str, int] = {}

    async def generate(self, request: Request) -> Reply:
        reply = await super().generate(request)
        place = self._places.setdefault(request.match_id, len(self._places) % self._num_replicas)
        times = reply.timings
        own = replace(times, decode_s=max(0.0, times.done - times.admitted - FAR_S))
        return replace(reply, timings=own, replica=f"replica-{place}")


class LostEngine(FarEngine):
    """One that is said to have lost a replica once it answered."""

    async def generate(self, request: Request) -> Reply:
        reply = await super().generate(request)
        self.restarts = 1
        return reply


def far(replicas: int, hosted: Table, name: str = "FarEngine") -> Table:
    at_once = replicas * hosted["max_concurrent"]
    return {
        "kind": f"tests.arena.test_replica_bench:{name}",
        "replicas": replicas,
        "hosted": hosted,
        "max_concurrent": at_once,
        "max_queued": at_once,
    }


@pytest.fixture
def _is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_bench, "_WARM_S", 0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("_is_warm")
def test_every_cell_is_measured() -> None:
    said: list[str] = []
    options = ReplicaOptions((1, 3), matches_per_replica=2, latency=0.1, seconds=1.0, repeats=2)
    result = asyncio.run(measure(options, replicated=far, announce=said.append))
    assert [line.partition(":")[0] for line in said] == [
        "limit of an embedded engine that answers at once",
        "limit of 3 replicas that answer at once",
        "1 replica",
        "3 replicas",
        "the way to a replica and back",
    ]
    assert (result["schema_version"], result["repeats"]) == (1, 2)
    assert result["limit"].keys() == {"embedded_moves_per_s", "ray_moves_per_s"}
    one, three = result["cells"]
    assert (one["replicas"], one["matches"], one["ideal_moves_per_s"]) == (1, 2, 20)
    assert (three["replicas"], three["matches"]) == (3, 6)
    for row in (one, three):
        assert len(row["moves_per_s"]) == 2
        # no more than the engine's latency allows
        assert all(0 < rate <= row["ideal_moves_per_s"] * 1.001 for rate in row["moves_per_s"])
        assert row["matches_moved"] == 0
        assert max(row["moves_per_s"]) < min(result["limit"].values())
    assert one["linear"] == one["share_max"] == 1.0
    assert three["share_max"] == pytest.approx(1 / 3, abs=0.1)
    spent = result["overhead_ms"]
    assert spent["embedded"]["max"] == pytest.approx(0, abs=1e-6)
    assert spent["ray"]["p50"] == pytest.approx(FAR_S * 1000)
    assert spent["p95_added"] == pytest.approx(FAR_S * 1000)
    assert not spent["is_within"]
    assert not all_within(result)


@pytest.mark.usefixtures("_is_warm")
def test_a_replica_that_is_lost_leaves_no_figure() -> None:
    options = ReplicaOptions((1,), matches_per_replica=1, latency=0.1, seconds=1.0, repeats=1)
    with pytest.raises(EngineError, match="a replica ended while it was measured"):
        asyncio.run(measure(options, replicated=lambda n, hosted: far(n, hosted, "LostEngine")))


def move(match_id: str, due: float, done: float) -> PlyRow:
    return PlyRow(match_id, 0, 0, "e2e4", "e4", "", None, due, due, done)


def test_moves_count_by_their_time_in_the_window() -> None:
    moves = [
        move("before", 0.0, 1.0),
        move("a quarter", 0.25, 1.25),
        move("whole", 1.2, 1.8),
        move("half", 1.5, 2.5),
        move("after", 2.0, 3.0),
        move("at once", 1.0, 1.0),
        move("at once, after", 2.0, 2.0),
    ]
    assert moves_in(moves, 1.0, 2.0) == pytest.approx(0.25 + 1 + 0.5 + 1)


def test_windows_side_by_side_count_every_move_once() -> None:
    moves = [move("m", at * 0.3, at * 0.3 + 0.3) for at in range(20)]
    windows = [moves_in(moves, start, start + 1.5) for start in (0.0, 1.5, 3.0, 4.5)]
    assert windows == pytest.approx([5, 5, 5, 5])


@pytest.mark.parametrize(
    ("rates", "ideal", "most", "told"),
    [
        ([36.0, 40.0, 38.0], 40.0, 90.0, (0.95, False, True)),
        ([35.0, 35.0, 35.0], 40.0, 90.0, (0.875, False, False)),
        ([35.0, 35.0, 35.0], 40.0, 39.0, (0.875, True, None)),
    ],
)
def test_a_cell_is_judged_by_one_replica_and_the_limit(
    rates: list[float], ideal: float, most: float, told: tuple[object, ...]
) -> None:
    one = {"replicas": 1, "moves_per_s": [9.0, 10.0, 30.0]}
    row = {"replicas": 4, "moves_per_s": rates, "ideal_moves_per_s": ideal}
    assert tuple(judged(row, one, most).values()) == told


def cell(replicas: int, rates: list[float], linear: float, is_within: bool | None) -> Table:
    return {
        "replicas": replicas,
        "matches": replicas * 8,
        "ideal_moves_per_s": replicas * 16.0,
        "moves_per_s": rates,
        "linear": linear,
        "is_beyond_limit": is_within is None,
        "is_within": is_within,
        "matches_moved": 0,
        "share_max": 1.1 / replicas if replicas > 1 else 1.0,
    }


def spent(p95: float) -> Table:
    return {"mean": p95 / 2, "p50": p95 / 2, "p95": p95, "p99": 2 * p95, "max": 3 * p95}


RESULT: Table = {
    "schema_version": 1,
    "matches_per_replica": 8,
    "latency_s": 0.5,
    "seconds": 5.0,
    "repeats": 3,
    "cells": [
        cell(1, [15.5, 15.7, 15.4], 1.0, True),
        cell(2, [27.0, 27.5, 27.4], 0.88, False),
        cell(128, [1002.0, 1000.5, 1003.0], 0.51, None),
    ],
    "limit": {"embedded_moves_per_s": 4168.2, "ray_moves_per_s": 1043.8},
    "overhead_ms": {
        "ray": spent(8.25),
        "embedded": spent(0.0),
        "p95_added": 8.25,
        "is_within": True,
    },
}

GOLDEN = Path(__file__).parent / "screens" / "bench_replicas.txt"


def test_the_tables_are_as_they_were_looked_at() -> None:
    out = io.StringIO()
    terminal.print_replicas(RESULT, out)
    told = "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
    assert told == GOLDEN.read_text(encoding="utf-8")


def test_what_is_beyond_the_limit_fails_nothing() -> None:
    assert not all_within(RESULT)
    cells = [row for row in RESULT["cells"] if row["replicas"] != 2]
    assert all_within({**RESULT, "cells": cells})
    slow = {**RESULT["overhead_ms"], "is_within": False}
    assert not all_within({**RESULT, "cells": cells, "overhead_ms": slow})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--replicas", "2,4"), "--replicas: give 1, by which others are measured"),
        (("--replicas", "1,4,2"), "and then greater ones"),
        (("--replicas", "1,1"), "and then greater ones"),
        (("--replicas", "1,65"), "--replicas: give at most 64"),
        (("--matches-per-replica", "0"), "--matches-per-replica: give 1 to 128 with 8 replicas"),
        (("--matches-per-replica", "129"), "--matches-per-replica: give 1 to 128"),
        (("--latency", "0"), "--latency: give 0.001 to 60 seconds"),
        (("--latency", "nan"), "--latency: give 0.001 to 60 seconds"),
        (("--repeats", "0"), "--repeats: give 1 to 20"),
        (("--seconds", "inf"), "--seconds: give 1 to 600"),
        (("--latency", "9"), "--seconds: no move would come in 5; give --latency or more"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "replicas", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("arena: ")
    assert told in line


@pytest.mark.parametrize("counts", ["1,,2", "one", "1.5", ""])
def test_counts_are_whole_numbers(counts: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "replicas", "--replicas", counts])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--replicas: {counts!r} is no list such as 1,2,4,8" in line


def test_ray_must_be_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.ray_config.installed_ray", lambda: None)
    assert cli.main(["bench", "replicas"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'pip install "boardfleet[ray]"' in line
