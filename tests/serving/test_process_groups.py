"""No engine process outlives the arena: guard, end, and the record for a later run."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from serving import end_survivors
from serving.engine_group import end_group
from serving.process import SCRATCH_PREFIX, group_members, last_error, write_record

STUBBORN = (
    "import signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "subprocess.Popen(['sleep', '1000'])\n"
    "print('up', flush=True)\n"
    "time.sleep(1000)\n"
)
DRIVER = """
import asyncio, sys
from pathlib import Path
from serving import EngineStart, VllmConfig, VllmEngine

async def main():
    engine = VllmEngine(EngineStart("main", Path(sys.argv[1]), 30.0, 0), VllmConfig())
    engine.host_command = (sys.executable, *sys.argv[3:])
    await engine.open()
    report = Path(sys.argv[2])
    report.with_suffix(".new").write_text(str(engine.pgid))
    report.with_suffix(".new").rename(report)
    await asyncio.sleep(1000)

asyncio.run(main())
"""
FAKE = str(Path(__file__).with_name("fake_host.py"))


def stubborn() -> "subprocess.Popen[str]":
    """Leads a group of two, one of which ignores SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.stdout.close()
    return process


def wait_until_gone(pgid: int, seconds: float) -> float:
    """Seconds until no member was left."""
    begun = time.monotonic()
    while group_members(pgid):
        assert time.monotonic() - begun < seconds, group_members(pgid)
        time.sleep(0.05)
    return time.monotonic() - begun


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_group_that_will_not_end_is_killed(stopped: bool) -> None:
    process = await asyncio.to_thread(stubborn)
    assert len(group_members(process.pid)) == 2
    if stopped:
        os.killpg(process.pid, signal.SIGSTOP)
    await end_group(process.pid, grace_s=0.2)
    assert group_members(process.pid) == []
    assert process.wait() == -signal.SIGKILL
    await end_group(process.pid)


def test_survivors_are_ended_and_their_records_removed(tmp_path: Path) -> None:
    process = stubborn()
    scratch = tmp_path / f"{SCRATCH_PREFIX}1"
    scratch.mkdir()
    write_record(tmp_path / "engine-main.pid", process.pid, scratch)
    assert end_survivors(tmp_path) == [process.pid]
    assert group_members(process.pid) == []
    process.wait()
    assert end_survivors(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_survivors_without_their_leader_are_ended(tmp_path: Path) -> None:
    process = stubborn()
    scratch = tmp_path / f"{SCRATCH_PREFIX}1"
    scratch.mkdir()
    write_record(tmp_path / "engine-main.pid", process.pid, scratch)
    process.kill()
    process.wait()
    assert len(group_members(process.pid)) == 1
    assert end_survivors(tmp_path) == [process.pid]
    assert group_members(process.pid) == []
    assert not scratch.exists()


def test_another_process_of_that_number_is_spared(tmp_path: Path) -> None:
    process = stubborn()
    try:
        record = {"pgid": process.pid, "started": time.time() - 3600, "scratch": "keep"}
        (tmp_path / "engine-main.pid").write_text(json.dumps(record))
        (tmp_path / "engine-torn.pid").write_text("{")
        assert end_survivors(tmp_path) == []
        assert len(group_members(process.pid)) == 2
        assert list(tmp_path.iterdir()) == []
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("template")
@pytest.mark.parametrize("behaviour", ["answer", "host killed too"])
def test_kill_9_of_the_arena_leaves_no_engine_process(tmp_path: Path, behaviour: str) -> None:
    report = tmp_path / "pgid"
    command = [sys.executable, "-c", DRIVER, str(tmp_path), str(report), FAKE, "answer"]
    with subprocess.Popen(command) as arena:
        pgid = read_number(report)
        assert len(group_members(pgid)) == 2
        if behaviour == "host killed too":
            os.kill(arena.pid, signal.SIGSTOP)
            os.kill(pgid, signal.SIGKILL)
        arena.kill()
        arena.wait()
        assert wait_until_gone(pgid, 5.0) < 5.0


SHARER = (
    "import time\n"
    "from multiprocessing.shared_memory import SharedMemory\n"
    "memory = SharedMemory(create=True, size=4096)\n"
    "print(memory.name, flush=True)\n"
    "time.sleep(1000)\n"
)


@pytest.mark.parametrize("stopped", [False, True])
async def test_shared_memory_of_a_killed_group_is_removed(stopped: bool) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SHARER, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    name = (await process.stdout.readline()).decode().strip()
    assert len(group_members(process.pid)) == 2
    if stopped:
        os.killpg(process.pid, signal.SIGSTOP)
    await end_group(process.pid, grace_s=0)
    assert group_members(process.pid) == []
    with pytest.raises(FileNotFoundError):
        SharedMemory(name)
    await process.wait()


def read_number(file: Path) -> int:
    """The number in `file`, once it is there."""
    begun = time.monotonic()
    while not file.exists():
        assert time.monotonic() - begun < 60
        time.sleep(0.05)
    return int(file.read_text())


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("", "it wrote nothing"),
        ("bye\n\n", "bye"),
        ("(Worker) ERROR x.py:3 MemoryError: no room\nlater\n", "MemoryError: no room"),
        (
            "ValueError: 9 blocks are too few\nRuntimeError: Engine core initialization failed.\n",
            "ValueError: 9 blocks are too few",
        ),
        ("a.b.HubError: no such model\n", "a.b.HubError: no such model"),
        ("no /v1/responses (ImportError: no harmony)\nready\n", "ready"),
    ],
)
def test_the_reason_is_found_in_a_processs_output(output: str, line: str) -> None:
    assert last_error(output) == line
