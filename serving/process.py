"""Process groups of engines: every engine leads a session of its own, and none outlives the arena.

Three things see to that: `kill_group` when an engine is closed or restarted, `guard_group` when the
arena's process vanishes, and a record on disk (`end_survivors`) when even the guard was killed.

Run by its path (`guarded`), this file turns into a program under a guard, which need not know of
any of this. The guard stays as long as the program, so nothing large is imported here.
"""

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

TERMINATE_GRACE_S = 1.5
"""Between asking a group to end and killing it."""

TRACKER_LIMIT_S = 2.0
"""Python's resource trackers have so long to remove what killed processes left."""

SCRATCH_PREFIX = "boardfleet-engine-"
"""Of directories for an engine's temporary files, which are removed with it."""

GAMES_FOLDERS = ("/usr/games", "/usr/local/games", "/opt/homebrew/bin")
"""Where systems keep games; not always on PATH."""

NOT_RUN = 127
"""Exit code where a program cannot be run, as a shell's."""

_GUARD_GRACE_S = 1.0
_KILL_LIMIT_S = 30.0

_POLL_S = 0.05
_UNINFORMATIVE = ("Engine core initialization failed", "See root cause", "cancelled")
_START_TOLERANCE_S = 2.0


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """A group leader's identity: its number alone may be another process by now."""

    pgid: int
    started: float
    """Seconds since the epoch, as the system counts it."""
    scratch: Path
    """Its directory of temporary files."""


def group_members(pgid: int) -> list[int]:
    """Live processes of the session that a group leads, for some make groups of their own there;
    those that ended and were not collected do not count."""
    return [process.pid for process in _members(pgid)]


def _members(pgid: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(process.pid) == pgid and not _has_ended(process):
                yield process


def _has_ended(process: psutil.Process) -> bool:
    # the first thread is a zombie while others still give back ports and memory
    is_zombie = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return is_zombie and process.num_threads() <= 1


def signal_group(pgid: int, number: signal.Signals) -> None:
    """Signal a group; nothing happens where it is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def kill_step(pgid: int, elapsed_s: float) -> bool:
    """One step towards a group without members; True once there are none.

    Kills all but Python's resource trackers, which then remove the shared memory that the others
    left, and end by themselves; after `TRACKER_LIMIT_S` they are killed too.
    """
    members = list(_members(pgid))
    trackers = [process for process in members if _is_tracker(process)]
    # first: a stopped group whose leader dies gets SIGHUP, which a tracker does not survive
    for process in trackers:
        _signal(process.pid, signal.SIGCONT if elapsed_s < TRACKER_LIMIT_S else signal.SIGKILL)
    for process in members:
        if process not in trackers:
            _signal(process.pid, signal.SIGKILL)
    return not members


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def kill_group(pgid: int) -> None:
    """Kill every process of a group and block until none is left.

    One that the system cannot kill (stuck in a driver) is left after `_KILL_LIMIT_S`.
    """
    begun = time.monotonic()
    while not kill_step(pgid, elapsed := time.monotonic() - begun) and elapsed < _KILL_LIMIT_S:
        time.sleep(_POLL_S)


def guard_group(lifeline: int, scratch: str | None = None) -> None:
    """Fork a guard that ends the caller's process group when the other end of `lifeline` closes,
    and then removes the directory `scratch`.

    `lifeline` is a socket's descriptor; the guard alone keeps it, so the other end sees the guard
    go. Call this before any thread is started. The guard has its own session: it works while the
    group is stopped, busy or half killed. It is no child of the caller, for there are servers that
    kill all their children.
    """
    pgid = os.getpgrp()
    if between := os.fork():
        os.close(lifeline)
        os.waitpid(between, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.dup2(lifeline, 0)
    os.closerange(1, 1024)
    with suppress(OSError):
        while os.read(0, 1):
            pass
    signal_group(pgid, signal.SIGTERM)
    limit = time.monotonic() + _GUARD_GRACE_S
    while time.monotonic() < limit and group_members(pgid):
        time.sleep(_POLL_S)
    kill_group(pgid)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


def find_program(name: str) -> str | None:
    """The absolute path of a program: a file, if there is a slash in its name, or found on PATH or
    where systems keep games; None where there is none."""
    # Path would take the "./" away that keeps PATH out
    found = shutil.which(os.path.expanduser(name))
    if found is None and "/" not in name:
        found = shutil.which(name, path=":".join(GAMES_FOLDERS))
    return None if found is None else str(Path(found).absolute())


def guarded(lifeline: int, command: Sequence[str]) -> tuple[str, ...]:
    """The command line that becomes `command`, its program by an absolute path, under a guard.

    Start it as the leader of a session, with the descriptor `lifeline` and no others to keep: any
    other is closed, for uvloop leaks copies of a child's pipes into it, and an end that is held
    twice is never seen to close.
    """
    return (sys.executable, "-P", __file__, str(lifeline), "--", *command)


def main(arguments: Sequence[str]) -> int:
    """Does not return where the program can be run."""
    lifeline, _, program, *rest = arguments
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number != int(lifeline):
            with suppress(OSError):  # the listing's own is closed already
                os.close(number)
    guard_group(int(lifeline), os.environ.get("TMPDIR"))
    try:
        os.execv(program, [program, *rest])
    except OSError as error:
        sys.stderr.write(f"{program} cannot be run: {error.strerror}\n")
        return NOT_RUN


def write_record(file: Path, pid: int, scratch: Path) -> None:
    """Record a group leader and its directory of temporary files for `end_survivors`."""
    content = {
        "pgid": pid,
        "started": psutil.Process(pid).create_time(),
        "scratch": str(scratch),
    }
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(content), encoding="utf-8")
    beside.replace(file)


def end_survivors(log_dir: Path) -> list[int]:
    """Kill the engine groups that a former arena left in `log_dir`'s records; their numbers.

    Blocks until they are gone. Records and temporary files are removed; a record that names another
    process by now ends nothing.
    """
    ended = []
    for file in sorted(log_dir.glob("engine-*.pid")):
        record = _read_record(file)
        if record is not None:
            if _is_alive(record):
                ended.append(record.pgid)
                kill_group(record.pgid)
            if record.scratch.name.startswith(SCRATCH_PREFIX):
                shutil.rmtree(record.scratch, ignore_errors=True)
        file.unlink(missing_ok=True)
    return ended


def _read_record(file: Path) -> ProcessRecord | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return ProcessRecord(
            int(content["pgid"]), float(content["started"]), Path(content["scratch"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_alive(record: ProcessRecord) -> bool:
    members = list(_members(record.pgid))
    for process in members:
        if process.pid == record.pgid:
            with suppress(psutil.Error):
                return abs(process.create_time() - record.started) < _START_TOLERANCE_S
    # the leader is gone; its number is not given away while its group lives
    return any(_started_after(process, record) for process in members)


def _started_after(process: psutil.Process, record: ProcessRecord) -> bool:
    try:
        in_session = os.getsid(process.pid) == record.pgid
        return in_session and process.create_time() > record.started - _START_TOLERANCE_S
    except (psutil.Error, ProcessLookupError):
        return False


def last_error(output: str) -> str:
    """The last line of a process's output that names an error, without what stands before the name;
    else its last line. An error in brackets is a remark: a server went on without something."""
    lines = [line for line in output.splitlines() if line.strip()]
    for line in reversed(lines):
        found = re.search(r"(?<![\w.(])([\w.]*(?:Error|Exception): .+)", line)
        if found and not any(words in line for words in _UNINFORMATIVE):
            return found[1][:400]
    return lines[-1][:400] if lines else "it wrote nothing"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
