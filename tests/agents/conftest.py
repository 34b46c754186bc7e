"""What tests of agents share."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def _examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder with own classes is on the path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
