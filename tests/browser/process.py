"""An arena as a person starts it: a process that says where its dashboard is."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ARENA = (sys.executable, "-m", "arena.cli")

SCRIPT = "<script>window.hacked=1</script>"
IMAGE = """"><img src=x onerror='window.hacked=1'>"""

HOSTILE = f"""
name = "hostile"
seed = 5
[engines.main]
kind = "scripted"
max_concurrent = 4
context_tokens = 4096
latency_seconds = [0.01, 0.1]
replies = ['''{IMAGE}{SCRIPT}
MOVE: pass''', '''{SCRIPT} I cannot.
MOVE: x{SCRIPT}''']
[[agents]]
kind = "llm"
name = "{SCRIPT}"
engine = "main"
[[agents]]
kind = "random"
name = "dice"
[[agents]]
kind = "llm"
mode = "free"
name = '''{IMAGE}'''
engine = "main"
[tournament]
games = ["chess", "janggi"]
parallel_matches = 12
max_plies = {{max_plies}}
[pace]
move_period_seconds = {{period}}
"""
"""Two players whose names and answers are markup, at both games. In free mode the model loses
every game of chess at once, for it only ever passes or talks."""

HELD = """
name = "held"
[[agents]]
kind = "tests.browser.held:HeldAgent"
name = "held"
gate = {gate}
hold_at = 4
[[agents]]
kind = "random"
name = "dice"
[tournament]
games = ["janggi"]
max_plies = 8
[pace]
move_period_seconds = 0
"""
"""Two matches that stop before their end until nobody listens on the gate any more."""


@dataclass(frozen=True)
class Arena:
    """A run that is being played."""

    process: subprocess.Popen[str]
    folder: Path
    url: str
    """The dashboard's address, with the token if there is one."""


@contextlib.contextmanager
def playing(
    folder: Path,
    config: str,
    address: str = "127.0.0.1:0",
    environ: Mapping[str, str] | None = None,
) -> Iterator[Arena]:
    """A run from a config's text, interrupted at the end if it is not over by then."""
    (folder / "config.toml").write_text(config)
    command = [*ARENA, "run", str(folder / "config.toml"), "--out", str(folder / "run")]
    process = subprocess.Popen(
        [*command, "--view", "plain", "--dashboard", address],
        cwd=ROOT,
        env={**os.environ, **(environ or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield Arena(process, folder / "run", _address(process))
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:  # a test that failed may have left it waiting
                process.kill()
                raise


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    said = ""
    while (found := re.search(r"^dashboard: (http://\S+)$", said, re.M)) is None:
        line = process.stderr.readline()
        assert line, f"the arena ended: {said}"
        said += line
    return found[1]


def run_arena(*arguments: object) -> None:
    """One `arena` command from its start to its end."""
    command = [*ARENA, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
