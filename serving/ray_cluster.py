"""A Ray cluster to work on: one that runs already, or one of this machine while we live."""

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# read when ray is imported: it would tell its makers
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray

from serving.process import last_error
from serving.ray_wire import one_line

_REACH_S = 5.0
_PAUSE_S = 1.0
_LONGEST_REASON = 300
_LOCAL_TRIES_S = 60.0
"""On a busy machine Ray's own agent may come too late, and its raylet ends; then it is tried again.
"""
_OBJECT_STORE_BYTES = 128 << 20
"""Of a cluster of ours; values that cross are small."""
_LONGEST_TEMP_DIR = 40
"""Letters; Ray's sockets stand below it, and a socket's path has at most 107 on Linux."""


def join(address: str, patience_s: float = 0.0) -> None:
    """Join the cluster at "auto", "host:port" or "ray://host:port", which may be away for
    `patience_s`; raises ConnectionError where there is none, and what Ray raises where its versions
    differ. Never starts one."""
    try:
        _try_for(patience_s, lambda: _join(address), (OSError,))
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address}: {told(error)[:_LONGEST_REASON]}"
        ) from error


def start_here(cpus: int) -> None:
    """A cluster of this machine, heard on loopback alone, that sets so many processors aside. Its
    files stand in TMPDIR, its processes in our session. Raises RuntimeError."""
    scratch = os.environ.get("TMPDIR", "")

    def start() -> None:
        # without an address Ray would look for a cluster in RAY_ADDRESS and in its files
        ray.init(
            "local",
            num_cpus=cpus,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=scratch if len(scratch) <= _LONGEST_TEMP_DIR else None,
        )

    _try_for(_LOCAL_TRIES_S, start, (RuntimeError,))


def _join(address: str) -> None:
    if address == "auto":
        address = _started_here()
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host:
        # Ray itself would try for minutes
        socket.create_connection((host, int(port)), _REACH_S).close()
    ray.init(address, log_to_driver=False)


def _started_here() -> str:
    """Of the cluster that `ray start` started on this machine. Ray itself would look through the
    processes too, and might take one that belongs to another run and ends with it."""
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    file = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), "ray", "ray_current_cluster")
    try:
        return file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise ConnectionError(
            f"`ray start` has left no {file}; start a cluster, or give host:port"
        ) from None


def told(error: BaseException) -> str:
    """In one line; of another process's traceback the last."""
    text = str(error)
    return last_error(text) if "Traceback" in text else " ".join(text.split()) or repr(error)


def _try_for(
    seconds: float, work: Callable[[], None], expected: tuple[type[Exception], ...]
) -> None:
    limit = time.monotonic() + seconds
    while True:
        try:
            return work()
        except expected as error:
            ray.shutdown()
            if time.monotonic() > limit:
                raise
            sys.stderr.write(f"Ray is tried again: {one_line(error)}\n")
            time.sleep(_PAUSE_S)
