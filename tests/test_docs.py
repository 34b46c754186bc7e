"""Links and pictures in the documents lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_relative_links_lead_to_files(file: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", file.read_text(encoding="utf-8"))
    missing = [
        target
        for target in targets
        if "://" not in target and not (file.parent / target).resolve().exists()
    ]
    assert missing == []


def test_there_are_documents() -> None:
    assert ROOT / "README.md" in DOCUMENTS
