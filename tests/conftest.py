"""For every test: a call of ours that blocks the event loop fails it."""

from collections.abc import Iterator

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
