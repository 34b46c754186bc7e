"""`arena bench replicas` on real Ray, as a person starts and ends it. No timing is asserted."""

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil
import pytest

from tests.serving.test_fake_server_cli import IN_BACKGROUND

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed (ray extra)"
    ),
]

TINY = (
    *("--replicas", "1,2", "--matches-per-replica", "2", "--latency", "0.1"),
    *("--seconds", "1", "--repeats", "1", "--json"),
)


@contextmanager
def bench(*before: str) -> Iterator[subprocess.Popen[str]]:
    command = [*before, sys.executable, "-m", "arena.cli", "bench", "replicas", *TINY]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_one_and_two_replicas_are_measured() -> None:
    with bench() as process:
        out, told = process.communicate()
    assert process.returncode in (0, 1), told
    result = json.loads(out)
    assert [(row["replicas"], row["matches"]) for row in result["cells"]] == [(1, 2), (2, 4)]
    for row in result["cells"]:
        (rate,) = row["moves_per_s"]
        assert 0 < rate < row["ideal_moves_per_s"]
        assert row["matches_moved"] == 0
    assert result["cells"][1]["share_max"] < 1
    assert 0 < result["limit"]["ray_moves_per_s"] < result["limit"]["embedded_moves_per_s"]
    spent = result["overhead_ms"]
    assert spent["ray"]["p50"] > spent["embedded"]["p95"] == pytest.approx(0, abs=1e-6)
    assert spent["p95_added"] == spent["ray"]["p95"] - spent["embedded"]["p95"]


def test_a_signal_ends_it_and_leaves_nothing() -> None:
    with bench(*IN_BACKGROUND) as process:
        assert process.stderr is not None
        assert "an embedded engine" in process.stderr.readline()
        arena = psutil.Process(process.pid)
        while not is_raylet_among(children := arena.children(recursive=True)):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        out, told = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert told.splitlines()[-1] == "arena: interrupted"
    _, left = psutil.wait_procs(children, timeout=10)
    assert not left


def is_raylet_among(processes: Sequence[psutil.Process]) -> bool:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if "raylet" in process.name():
                return True
    return False
