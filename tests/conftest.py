"""For every test: a call of ours that blocks the event loop fails it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

# asserts that stand outside test files are told in full too
pytest.register_assert_rewrite("tests.serving.contract")

EVERY_PLY = [
    "agents",
    "arena.pace",
    "serving.adaptive",
    "serving.limits",
    "serving.scripted",
    "serving.template",
]
"""What runs for every ply. Starts, ends and faults may write a line of a log."""


@pytest.fixture(autouse=True)
def _loop_is_never_blocked() -> Iterator[BlockBuster]:
    with blockbuster_ctx(EVERY_PLY) as blockbuster:
        yield blockbuster


@pytest.fixture
def bfloat16_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that multiplies bfloat16 itself."""
    info = tmp_path / "cpuinfo"
    info.write_text("flags\t\t: fpu avx512f avx512_bf16 avx512_vnni\n")
    monkeypatch.setattr("serving.config.CPU_INFO", info)
