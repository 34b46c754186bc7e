"""The HTML of a run: self-contained, whole, and hostile text stays text."""

import base64
import hashlib
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from arena import page
from arena.report import build
from arena.store import Records, read
from tests.arena.test_run import arena, run

HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("page") / "a"
    run(made, more=f"[[agents]]\nname = '{HOSTILE}'\nkind = 'random'")
    return made / "run"


@pytest.fixture(scope="module")
def records(folder: Path) -> Records:
    return read(folder)


@pytest.fixture(scope="module")
def html(folder: Path) -> str:
    assert arena("report", folder, "--html", folder / "page.html") == 0
    return (folder / "page.html").read_text(encoding="utf-8")


def embedded(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="embedded">(.*?)</script>', html, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_nothing_is_fetched(html: str) -> None:
    outside = re.sub(r"<script.*?</script>|<style.*?</style>", "", html, flags=re.S)
    assert not re.search(r"(src|href)=[\"'](?!#|data:)", outside)
    assert "@import" not in html


def test_the_policy_names_exactly_the_scripts_that_are_there(html: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    scripts = re.findall(r'<script(?: type="module")?>(.*?)</script>', html, re.S)
    assert len(scripts) == 2
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert "default-src 'none'" in policy[1]
    assert "unsafe-eval" not in policy[1]
    assert not re.search(r"script-src[^;]*unsafe-inline", policy[1])


def test_every_match_is_there_with_its_moves(html: str, records: Records) -> None:
    data = embedded(html)
    moves = {
        match: [ply["move"] for ply in detail["plies"]] for match, detail in data["details"].items()
    }
    stored: dict[str, list[str]] = {row.id: [] for row in records.matches}
    for ply in records.plies:
        stored[ply.match_id].append(ply.move)
    assert moves == stored
    assert any(HOSTILE in (d["first"], d["second"]) for d in data["details"].values())


def test_its_figures_are_the_report_s(html: str, records: Records) -> None:
    frame, report = embedded(html)["frame"], build(records)
    assert frame["agents"] == json.loads(json.dumps(report["agents"]))
    for key in ("plies", "elapsed_s", "moves_per_s", "slo_attainment", "matches"):
        assert frame["fleet"][key] == report[key]
    assert frame["verdict"] == report["verdict"]


def test_more_games_than_fit_are_left_out_and_that_is_said(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "MOST_PLIES", 50)
    data = page.embedded(records)
    assert 0 < len(data["details"]) < len(records.matches)
    assert f"{len(records.matches) - len(data['details'])} more" in data["notes"][0]
    assert data["results"]["total"] == len(records.matches)


def test_a_place_that_cannot_be_written_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert arena("report", folder, "--html", tmp_path / "no" / "page.html") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "cannot be written" in said
    assert arena("report", folder, "--html", tmp_path) == 2
    assert list(tmp_path.iterdir()) == []


def test_only_a_page_of_this_kind_is_written_over(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slip of the hand wrote a page over a run's database."""
    kept = (folder / "run.db").read_bytes()
    assert arena("report", folder, "--html", folder / "run.db") == 2
    assert "is no page of ours" in capsys.readouterr().err
    assert (folder / "run.db").read_bytes() == kept
    linked = tmp_path / "linked.html"
    linked.symlink_to(tmp_path / "real.html")
    for _ in range(2):
        assert arena("report", folder, "--html", linked) == 0
    assert linked.is_symlink()
    assert (tmp_path / "real.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["linked.html", "real.html"]


def test_a_pipe_is_written_to_and_stays_one(records: Records, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    told: list[str] = []
    reading = threading.Thread(target=lambda: told.append(pipe.read_text(encoding="utf-8")))
    reading.start()
    page.write(pipe, records)
    reading.join(timeout=30)
    assert told[0].startswith("<!doctype html>")
    assert pipe.is_fifo()
