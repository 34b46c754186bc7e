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


def named_tests(text: str) -> list[tuple[str, str]]:
    """Files and tests that a document names as `file::test`."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)


def rows(text: str) -> list[list[str]]:
    """The cells of the rows of its tables that answer a request."""
    lines = [line for line in text.splitlines() if line.startswith("|") and "https://" in line]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_named_tests_exist(file: Path) -> None:
    missing = [
        f"{where}::{name}"
        for where, name in named_tests(file.read_text(encoding="utf-8"))
        if not (ROOT / where).exists()
        or not re.search(rf"^(?:async )?def {name}\(", (ROOT / where).read_text(), re.MULTILINE)
    ]
    assert missing == []


def test_every_request_is_answered_by_a_test_or_said_to_be_open() -> None:
    answers = rows((ROOT / "docs/requests.md").read_text(encoding="utf-8"))
    assert len(answers) > 40
    for _, answer, tests in answers:
        assert "not done" in answer or named_tests(tests), answer
