"""A run in a process of its own, driven as a person drives it: by commands and by signals."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from arena.store import Records, read
from serving.process import group_members
from serving.server_process import free_port


@dataclass
class Run:
    """A run under way; its engine is `main`."""

    folder: Path
    config: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Besides ours."""
    process: subprocess.Popen[str] | None = None

    def start(self, *more: str) -> None:
        """`more`: options of `arena run`."""
        self.arena("run", str(self.config), "--out", str(self.folder), *more)

    def scrapes(self, period_s: float) -> Iterator[str]:
        """Start it, and until it ends get its metrics again and again, as Prometheus gets them."""
        address = f"127.0.0.1:{free_port()}"
        self.start("--dashboard", address)
        assert self.process is not None
        while self.process.poll() is None:
            if (text := scrape(f"http://{address}/metrics")) is not None:
                yield text
            time.sleep(period_s)

    def resume(self) -> None:
        self.arena("resume", str(self.folder))

    def arena(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "arena.cli", *arguments, "--view", "none"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment},
        )

    def kill(self) -> None:
        """With signal 9; returns once it is gone."""
        if self.process is not None:
            self.process.kill()
            with self.process:  # closes its pipe and waits for it
                pass

    def ended(self, limit_s: float = 300.0) -> tuple[int, str]:
        """Exit code and stderr, once it has ended."""
        assert self.process is not None
        _, said = self.process.communicate(timeout=limit_s)
        return self.process.returncode, said

    def records(self) -> Records:
        return read(self.folder)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [json.loads(row.detail_json) for row in self.records().events if row.kind == kind]

    def num_plies(self) -> int:
        if not (self.folder / "run.db").exists():
            return 0
        return len(self.records().plies)

    def until(self, what: str, holds: Callable[[], bool], limit_s: float = 120.0) -> None:
        """Wait for something that the run does by itself."""
        assert self.process is not None
        limit = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < limit, f"waited {limit_s:g} s for {what}"
            if self.process.poll() is not None:
                pytest.fail(f"{what}: arena ended with {self.ended()}")
            time.sleep(0.05)

    def until_plies(self, more: int) -> int:
        """Wait for that many more plies; the number there are then."""
        wanted = self.num_plies() + more
        self.until(f"{more} more plies", lambda: self.num_plies() >= wanted)
        return self.num_plies()

    def engine_group(self) -> int:
        """That the engine's host leads, with all of its processes."""
        record = json.loads((self.folder / "engine-main.pid").read_text())
        return int(record["pgid"])

    def engine_processes(self) -> list[psutil.Process]:
        return [psutil.Process(pid) for pid in group_members(self.engine_group())]


def scrape(url: str) -> str | None:
    """None: nobody listens, not yet or no longer."""
    try:
        answer = urllib.request.urlopen(url, timeout=5)
    except OSError:
        return None
    with answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())
