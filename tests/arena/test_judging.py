"""A judge ends games of players that tell no score; when it fails it costs nobody anything."""

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import chess.pgn
import pytest

from arena import cli, replay
from arena.store import Records, read
from serving import find_program
from tests.arena.test_run import arena

FAKE = Path(__file__).parents[1] / "agents/fake_uci.py"
CONFIG = """
name = "judged"
seed = 3
[[agents]]
name = "dice"
kind = "random"
[[agents]]
name = "greedy"
kind = "greedy"
[tournament]
games = {games}
pairs = 2
max_plies = 60
[pace]
move_period_seconds = 0
[adjudication]
resign_score_cp = 500
resign_moves = 2
[adjudication.judge]
{judge}
"""
STOCKFISH = 'command = "stockfish"\nnodes = 300\ngames = ["chess"]'


def run_of(folder: Path, judge: str, games: str = '["chess"]', *more: str) -> int:
    """In a process of its own: a failing engine is logged at once, from the loop."""
    folder.mkdir(exist_ok=True)
    config = folder / "t.toml"
    config.write_text(CONFIG.format(games=games, judge=judge))
    out = folder / "run"
    command = ["run", str(config), "--out", str(out), "--view", "none", *more]
    return subprocess.run([sys.executable, "-m", "arena.cli", *command], check=False).returncode


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_program("stockfish") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("install stockfish")
        pytest.skip("no stockfish here (apt-get install stockfish)")
    folder = tmp_path_factory.mktemp("judged")
    assert run_of(folder, STOCKFISH, '["chess", "janggi"]') == 0
    return folder / "run"


def ended(held: Records, game: str) -> set[str | None]:
    return {row.termination for row in held.matches if row.game == game}


def test_a_lost_game_is_ended_where_the_players_tell_no_score(judged: Path) -> None:
    held = read(judged)
    assert "adjudicated_win" in ended(held, "chess")
    assert "adjudicated_win" not in ended(held, "janggi")  # the judge does not play it
    for row in held.matches:
        plies = [ply for ply in held.plies if ply.match_id == row.id]
        if row.game == "janggi":
            assert {ply.judge_cp for ply in plies} == {None}
            continue
        assert all(ply.judge_cp is not None for ply in plies)
        if row.termination == "adjudicated_win":
            for ply in plies[-4:]:
                assert ply.judge_cp is not None
                assert (ply.judge_cp >= 500) is (ply.side == row.winner)
                assert abs(ply.judge_cp) >= 500
    assert replay.build(held)["is_same"]


def test_the_judge_s_scores_stand_in_the_pgn(judged: Path) -> None:
    with (judged / "games.pgn").open() as file:
        game = chess.pgn.read_game(file)
    assert game is not None
    nodes = list(game.mainline())
    assert all(node.eval() is not None for node in nodes)


def test_a_resumed_game_goes_on_with_the_judge_s_scores(judged: Path, tmp_path: Path) -> None:
    before = read(judged)
    row = next(row for row in before.matches if row.termination == "adjudicated_win")
    last = max(ply.ply for ply in before.plies if ply.match_id == row.id)
    run = Path(shutil.copytree(judged, tmp_path / "run"))
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        db.execute("DELETE FROM plies WHERE match_id = ? AND ply = ?", (row.id, last))
        db.execute(
            "UPDATE matches SET state = 'suspended', winner = NULL, termination = NULL, "
            "ended = NULL WHERE id = ?",
            (row.id,),
        )
    assert arena("resume", run, "--view", "none") == 0
    again = next(found for found in read(run).matches if found.id == row.id)
    assert (again.winner, again.termination, again.detail) == (
        row.winner,
        row.termination,
        row.detail,
    )


def test_a_judge_that_crashes_costs_nobody_a_game(tmp_path: Path) -> None:
    judge = f'command = ["{sys.executable}", "{FAKE}", "crash"]'
    assert run_of(tmp_path, judge, '["chess"]', "--set", "tournament.max_plies=6") == 0
    held = read(tmp_path / "run")
    assert ended(held, "chess") == {"ply_cap"}
    assert {ply.judge_cp for ply in held.plies} == {None}


@pytest.mark.parametrize(
    ("judge", "told"),
    [
        ('command = "no-such-engine"', "adjudication.judge.command"),
        ('command = "stockfish"\nuci_elo = 1500', "adjudication.judge.uci_elo"),
        ('command = "stockfish"\nnodes = 0', "adjudication.judge.nodes"),
        ('command = "stockfish"\ngames = ["janggi"]', "adjudication.judge.games"),
        (f'command = ["{sys.executable}", "{FAKE}", "fine"]\nnoodles = 1', "judge.noodles"),
    ],
)
def test_a_bad_judge_is_refused_before_anything_is_written(
    tmp_path: Path, judge: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "t.toml"
    config.write_text(CONFIG.format(games='["chess"]', judge=judge))
    assert cli.main(["run", str(config), "--out", str(tmp_path / "run"), "--view", "none"]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()
