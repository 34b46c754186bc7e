"""Asking the process that plays a run to stop: it is found by the lock that it holds."""

import fcntl
import json
import signal
from pathlib import Path
from typing import Literal

import psutil

from arena.store import LOCK_FILE, StoreError, check_run

After = Literal["games", "plies"]

SIGNALS: dict[After, signal.Signals] = {"games": signal.SIGUSR1, "plies": signal.SIGINT}
"""What asks for each; the second SIGINT stops a run at once."""
_CLOCK_TOLERANCE_S = 2.0


def stop(folder: Path, after: After) -> int:
    """Ask the process that plays the run in `folder` to end after its current games or plies; its
    id. StoreError where none plays it."""
    check_run(folder)
    process = _holder(folder)
    try:
        process.send_signal(SIGNALS[after])
    except psutil.NoSuchProcess:
        raise _not_played(folder) from None
    except psutil.AccessDenied:
        raise StoreError(f"{folder}: is played by another user's process {process.pid}") from None
    return process.pid


def _holder(folder: Path) -> psutil.Process:
    """The process that holds the run's lock: the one that signed it, still alive."""
    try:
        with (folder / LOCK_FILE).open("rb") as lock:
            if not _is_held(lock.fileno()):
                raise _not_played(folder)
            text = lock.read()
    except OSError as error:
        raise StoreError(f"{folder / LOCK_FILE}: cannot be read ({error.strerror})") from None
    try:
        signature = json.loads(text)
        process = psutil.Process(signature["pid"])
        is_same = abs(process.create_time() - signature["began"]) < _CLOCK_TOLERANCE_S
    except (ValueError, TypeError, KeyError, psutil.NoSuchProcess):
        is_same = False
    if not is_same:
        raise StoreError(
            f"{folder}: the process that has it is only starting, ending, or on another machine; "
            "try again, or stop it there"
        )
    return process


def _is_held(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(lock, fcntl.LOCK_UN)
    return False


def _not_played(folder: Path) -> StoreError:
    return StoreError(f"{folder}: no process plays it; `arena resume {folder}` would")
