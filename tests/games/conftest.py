"""pyffish as an oracle, in its own process."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("pyffish_worker.py")


@pytest.fixture(scope="session")
def ask_pyffish() -> Iterator[Callable[[str, str, str, Sequence[str]], Any]]:
    """Ask `look`, `describe` or `notations` about a variant, a FEN and the moves since."""
    if importlib.util.find_spec("pyffish") is None:
        pytest.skip("pyffish has no wheel for this platform")
    with subprocess.Popen(
        [sys.executable, str(WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        stdin, stdout = worker.stdin, worker.stdout

        def ask(question: str, variant: str, fen: str, moves: Sequence[str]) -> Any:
            asked = {"question": question, "variant": variant, "fen": fen, "moves": list(moves)}
            stdin.write(json.dumps(asked) + "\n")
            stdin.flush()
            answer = stdout.readline()
            if not answer:
                pytest.fail(f"pyffish ended its process on {asked}")
            return json.loads(answer)

        yield ask
        stdin.close()
