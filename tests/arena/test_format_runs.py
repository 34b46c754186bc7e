"""Whole runs of every format: killed once and resumed they are those that nobody disturbed."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from arena import cli, replay, report
from arena.config import load
from arena.figures import Figures
from arena.follow import Follower
from arena.store import Records, read

CONFIG = """
name = "f"
seed = 4
{agents}
[tournament]
games = ["chess", "janggi"]
parallel_matches = 3
max_plies = 24
{tournament}
[pace]
move_period_seconds = 0
{more}
"""
SPRT = "[sprt]\nelo0 = 0\nelo1 = 300\nalpha = 0.3\nbeta = 0.3\nmax_pairs = 6\n"
FORMATS: dict[str, dict[str, Any]] = {
    "round_robin": {"players": 3, "tournament": "null_pairing = true"},
    "gauntlet": {"players": 4},
    "swiss": {"players": 5, "tournament": "rounds = 3"},
    "knockout": {"players": 5, "tournament": "sudden_death_pairs = 2"},
    "sprt": {"players": 2, "more": SPRT},
    "ladder": {"players": 4, "tournament": "pairs = 3\nanchors = { a0 = 0, a1 = 100 }"},
}


def written(folder: Path, format_: str) -> Path:
    asked = {"tournament": "", "more": "", **FORMATS[format_]}
    kinds = ["random", "greedy"] * 3
    agents = "".join(
        f'[[agents]]\nname = "a{n}"\nkind = "{kinds[n]}"\n' for n in range(asked["players"])
    )
    path = folder / f"{format_}.toml"
    lines = f'format = "{format_}"\n{asked["tournament"]}'
    path.write_text(CONFIG.format(agents=agents, tournament=lines, more=asked["more"]))
    return path


def arena(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def outcomes(records: Records) -> dict[str, tuple[object, ...]]:
    return {
        row.id: (row.state, row.number, row.agents, row.winner, row.termination)
        for row in records.matches
    }


def moves(records: Records) -> list[tuple[str, int, str]]:
    return sorted((ply.match_id, ply.ply, ply.move) for ply in records.plies)


def tables(records: Records) -> dict[str, Any]:
    made = report.build(records)
    keys = ("standings", "pairings", "ratings", "null_pairings", "sprt")
    told = made["tournament"]
    ties = sorted(map(str, told["ties"]))
    return {
        **{key: made[key] for key in keys},
        "byes": sorted(map(str, told["byes"])),
        "ties": ties,
        "can_grow": told["can_grow"],
    }


def killed_in_the_middle(config: Path, folder: Path, least: int) -> None:
    """`kill -9` as soon as so many matches are finished and others are not."""
    command = [sys.executable, "-m", "arena.cli", "run", config, "--out", folder]
    process = subprocess.Popen(
        [*map(str, command), "--view", "none", "--set", "pace.move_period_seconds=0.004"],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until and process.poll() is None:
            with (
                contextlib.suppress(sqlite3.Error),
                contextlib.closing(
                    sqlite3.connect(f"file:{folder / 'run.db'}?mode=ro", uri=True)
                ) as db,
            ):
                states = dict(db.execute("SELECT state, count(*) FROM matches GROUP BY 1"))
                if states.get("finished", 0) >= least:
                    break
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("format_", FORMATS)
def test_a_killed_and_resumed_run_is_the_undisturbed_one(format_: str, tmp_path: Path) -> None:
    config = written(tmp_path, format_)
    assert arena("run", config, "--out", tmp_path / "whole", "--view", "none") == 0
    whole = read(tmp_path / "whole")
    most = load(config).most_matches
    assert {row.state for row in whole.matches} == {"finished"}
    assert replay.build(whole)["differences"] == []
    assert len(whole.matches) <= most

    killed_in_the_middle(config, tmp_path / "cut", least=5)
    cut = read(tmp_path / "cut")
    assert any(row.state != "finished" for row in cut.matches)
    assert arena("resume", tmp_path / "cut", "--view", "none") == 0
    resumed = read(tmp_path / "cut")
    assert replay.build(resumed)["differences"] == []
    assert outcomes(resumed) == outcomes(whole)
    assert moves(resumed) == moves(whole)
    assert tables(resumed) == tables(whole)
    assert tables(whole)["can_grow"] is False
    told = [(e.kind, e.detail_json) for e in resumed.events if e.kind in ("bye", "tie_decided")]
    assert len(told) == len(set(told))


def test_a_test_that_goes_on_at_fewer_tables_is_replayed_as_it_was(tmp_path: Path) -> None:
    """How many pairs are ahead of the decision follows from the tables at that time."""
    config, folder = written(tmp_path, "sprt"), tmp_path / "run"
    config.write_text(config.read_text().replace("parallel_matches = 3", "parallel_matches = 12"))
    killed_in_the_middle(config, folder, least=1)
    fewer = ("--set", "tournament.parallel_matches=1")
    assert arena("resume", folder, "--view", "none", *fewer) == 0
    held = read(folder)
    assert any(event.kind == "config_changed" for event in held.events)
    assert replay.build(held)["differences"] == []


def test_a_run_that_grows_is_followed_by_whoever_watches_it(tmp_path: Path) -> None:
    config = written(tmp_path, "knockout")
    killed_in_the_middle(config, tmp_path / "run", least=1)
    follower = Follower(tmp_path / "run")
    with contextlib.closing(follower):
        figures = Figures(follower.run, follower.matches, exact=True)
        figures.add(follower.read())
        known, could_grow = set(figures.matches), figures.can_grow
        assert arena("resume", tmp_path / "run", "--view", "none") == 0
        figures.add(follower.read())
    assert (could_grow, figures.can_grow) == (True, False)
    held = read(tmp_path / "run")
    assert known < {row.id for row in held.matches}
    assert {key: match.row for key, match in figures.matches.items()} == {
        row.id: row for row in held.matches
    }
    assert figures.fleet()["matches"]["finished"] == len(held.matches)
    assert figures.plies == len(held.plies)


def test_a_killed_run_that_may_grow_is_watched_as_unfinished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path, "knockout")
    killed_in_the_middle(config, tmp_path / "run", least=1)
    assert arena("watch", tmp_path / "run", "--view", "plain") == 0
    said = capsys.readouterr().err
    assert " or more to come" in said
    assert "matches or more are left; `arena resume" in said
    assert arena("resume", tmp_path / "run", "--view", "plain") == 0
    capsys.readouterr()
    assert arena("watch", tmp_path / "run", "--view", "plain") == 0
    said = capsys.readouterr().err
    assert "or more" not in said
    assert "the run is over" in said


def test_a_run_whose_book_was_changed_is_not_resumed_with_another_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = tmp_path / "book.pgn"
    book.write_text("1. e4 e5 *\n\n1. d4 d5 *\n")
    path = written(tmp_path, "knockout")
    text = path.read_text().replace('["chess", "janggi"]', '["chess"]')
    path.write_text(f'{text}[openings]\nbook = "book.pgn"\norder = "book"\n')
    killed_in_the_middle(path, tmp_path / "run", least=1)
    before = outcomes(read(tmp_path / "run"))
    book.write_text("1. c4 e5 *\n\n1. d4 d5 *\n")
    capsys.readouterr()
    assert arena("resume", tmp_path / "run", "--view", "none") == 2
    assert "makes other matches of its config" in capsys.readouterr().err
    assert outcomes(read(tmp_path / "run")).keys() == before.keys()
    book.write_text("1. e4 e5 *\n\n1. d4 d5 *\n")
    assert arena("resume", tmp_path / "run", "--view", "none") == 0


def test_validate_tells_the_most_that_there_may_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert arena("validate", written(tmp_path, "swiss")) == 0
    said = capsys.readouterr().out
    assert "f: at most 24 matches" in said
    assert "swiss begins with 8 matches" in said
    assert arena("validate", written(tmp_path, "round_robin"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["matches"] == 2 * (3 + 1) * 2


def test_the_report_tells_the_test_and_keeps_the_noise_floor_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert arena("run", written(tmp_path, "sprt"), "--out", tmp_path / "s", "--view", "none") == 0
    assert "SPRT" in capsys.readouterr().out
    made = report.build(read(tmp_path / "s"))
    by_game = {row["game"]: row for row in made["sprt"]}
    assert set(by_game) == {"chess", "janggi"}
    for row in by_game.values():
        assert (row["agent"], row["opponent"]) == ("a0", "a1")
        is_decided = not row["lower"] < row["llr"] < row["upper"]
        assert (row["decision"] != "continue") == is_decided
        assert row["elo"]["low"] <= row["elo"]["value"] <= row["elo"]["high"]
        assert is_decided or row["pairs"] == 6
    # random and greedy are far apart at janggi: it stops before its bound
    assert by_game["janggi"]["decision"] != "continue"
    assert by_game["janggi"]["pairs"] < 6

    path = written(tmp_path, "round_robin")
    assert arena("run", path, "--out", tmp_path / "r", "--view", "none") == 0
    said = capsys.readouterr().out
    made = report.build(read(tmp_path / "r"))
    assert "Null pairings" in said
    assert {row["name"] for row in made["standings"]} == {"a0", "a1", "a2"}
    assert all("a0 (null)" not in row["names"] for row in made["ratings"])
    assert [(row["agent"], row["opponent"]) for row in made["null_pairings"]] == [
        ("a0", "a0 (null)")
    ] * 2


def test_anchors_hold_ratings_in_every_format(tmp_path: Path) -> None:
    path = written(tmp_path, "ladder")
    assert arena("run", path, "--out", tmp_path / "l", "--view", "none") == 0
    rows = {
        (row["game"], row["name"]): row for row in report.build(read(tmp_path / "l"))["standings"]
    }
    for game in ("chess", "janggi"):
        for name, elo in (("a0", 0), ("a1", 100)):
            if (game, name) in rows:
                assert rows[game, name]["elo"] == pytest.approx(elo)
                assert rows[game, name]["elo_error"] == pytest.approx(0)
        assert rows[game, "a2"]["elo_error"] > 0
