"""A run judged again comes out as it is stored, until the parser, the rules or a reply change."""

import json
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import agents.judge
from agents import Failure, Fault
from agents.parse import read_move
from arena import cli, replay
from arena.store import read
from games import Position

CONFIG = """
name = "t"
seed = 5
[engines.main]
kind = "scripted"
replies = ["MOVE: g1f3", "MOVE: f3g1", "MOVE: g8f6", "MOVE: f6g8", "MOVE: pass", "MOVE: a1a1", "no"]
faults = [{kind = "cut_short", probability = 0.05}]
[[agents]]
name = "free"
kind = "llm"
engine = "main"
mode = "free"
[[agents]]
name = "bound"
kind = "llm"
engine = "main"
[[agents]]
name = "dice"
kind = "random"
[[agents]]
name = "thinker"
kind = "llm"
engine = "main"
mode = "think"
think_tokens = 8
[tournament]
games = ["chess", "janggi"]
pairs = 1
max_plies = 12
[pace]
move_period_seconds = 0
"""
Reader = Callable[..., str | Failure]


def play(folder: Path) -> Path:
    """The run of the config that stands in a folder."""
    run = folder / "run"
    assert cli.main(["run", str(folder / "t.toml"), "--out", str(run), "--view", "none"]) == 0
    return run


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    (folder / "t.toml").write_text(CONFIG)
    return play(folder)


@pytest.fixture
def run(played: Path, tmp_path: Path) -> Path:
    """A copy to be tampered with."""
    return Path(shutil.copytree(played, tmp_path / "run"))


def tamper(run: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        assert db.execute(statement, values).rowcount == 1


def replayed(run: Path) -> dict[str, Any]:
    return replay.build(read(run))


def test_a_run_of_all_modes_comes_out_the_same(
    played: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = read(played)
    before = (played / "run.db").read_bytes()
    assert {a.mode for a in held.attempts} == {"free", "constrained", "think"}
    assert "cut_short" in {a.fault for a in held.attempts}
    assert {row.termination for row in held.matches} >= {"forfeit", "ply_cap"}
    assert cli.main(["replay", str(played)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "same"
    assert (played / "run.db").read_bytes() == before
    result = replayed(played)
    replies = [a for a in held.attempts if a.reply_text is not None]
    assert result["replies_judged"] == len(replies) > 50
    assert result["attempts_trusted"] == 0
    assert (result["matches"], result["plies"]) == (len(held.matches), len(held.plies))


def test_a_new_parser_shows_exactly_the_plies_that_it_would_change(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A parser that takes any text for the first legal move: what failed then is legal now."""

    def lenient(text: str, position: Position, *, is_cut: bool, **_: object) -> str | Failure:
        found = read_move(text, position, is_cut=is_cut)
        failed = isinstance(found, Failure) and found.fault is Fault.ILLEGAL
        return position.legal_moves()[0] if failed else found

    monkeypatch.setattr(agents.judge, "read_move", lenient)
    held = read(run)
    illegal = {a.request_id: a for a in held.attempts if a.fault == Fault.ILLEGAL}
    assert illegal
    result = replayed(run)
    found = [row for row in result["differences"] if row["what"] == "reply"]
    assert {row["attempt"] for row in found} == set(illegal)
    assert all(row["stored"].startswith("illegal (") for row in found)
    assert {(row["match"], row["ply"]) for row in found} == {
        (a.match_id, a.ply) for a in illegal.values()
    }
    assert result["departures"] == [
        {"match": match.id, "ply": min(a.ply for a in illegal.values() if a.match_id == match.id)}
        for match in held.matches
        if any(a.match_id == match.id for a in illegal.values())
    ]
    assert cli.main(["replay", str(run)]) == 1
    said = capsys.readouterr().out
    assert said.count("the game might have gone otherwise") == len(result["departures"])
    assert said.splitlines()[-1] == f"{len(illegal)} differences"


@pytest.fixture(scope="module")
def conceded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which draws were offered, declined and accepted, and games resigned."""
    folder = tmp_path_factory.mktemp("conceded")
    said = '["MOVE: g1f3 (=)", "MOVE: f3g1", "MOVE: g8f6(=)", "MOVE: f6g8", "MOVE: draw"]'
    text = re.sub(r"replies = .*", f"replies = {said}", CONFIG).replace("pairs = 1", "pairs = 4")
    text = text.replace("[pace]", "draw_offers = true\nresignation = true\n[pace]")
    (folder / "t.toml").write_text(text.replace("max_plies = 12", "max_plies = 60"))
    return play(folder)


def test_draws_by_agreement_and_resignations_come_out_the_same(conceded: Path) -> None:
    held = read(conceded)
    ended = {row.termination for row in held.matches}
    assert ended >= {"draw_agreed", "resignation"}
    assert all(row.winner is None for row in held.matches if row.termination == "draw_agreed")
    last_by = {ply.match_id: ply for ply in held.plies}
    agreed = [row for row in held.matches if row.termination == "draw_agreed"]
    assert all(last_by[row.id].offers_draw for row in agreed)
    assert any(
        ply.offers_draw and ply.ply < last_by[ply.match_id].ply for ply in held.plies
    )  # declined
    assert {a.mode for a in held.attempts if a.reply_text == "draw"} >= {"constrained"}
    assert any(a.mode == "free" and "MOVE: draw" in (a.reply_text or "") for a in held.attempts)
    result = replayed(conceded)
    assert result["is_same"], result["differences"][:3]


def test_an_offer_that_was_taken_out_is_found(conceded: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(conceded, tmp_path / "run"))
    held = read(run)
    row = next(row for row in held.matches if row.termination == "draw_agreed")
    last = max(ply.ply for ply in held.plies if ply.match_id == row.id)
    tamper(run, "UPDATE plies SET offers_draw = 0 WHERE match_id = ? AND ply = ?", row.id, last)
    whats = {found["what"] for found in replayed(run)["differences"]}
    assert "reply" in whats


def test_a_draw_that_no_reply_agreed_to_is_found(run: Path) -> None:
    row = next(row for row in read(run).matches if row.termination == "ply_cap")
    cut = "UPDATE matches SET termination = 'draw_agreed', winner = NULL WHERE id = ?"
    tamper(run, cut, row.id)
    assert [found["what"] for found in replayed(run)["differences"]] == ["result"]


def test_a_reply_that_was_changed_is_found(run: Path) -> None:
    held = read(run)
    victim = next(a for a in held.attempts if a.mode == "free" and a.fault is None)
    tamper(
        run,
        "UPDATE attempts SET reply_text = 'I pass the turn' WHERE request_id = ?",
        victim.request_id,
    )
    move = next(p.move for p in held.plies if (p.match_id, p.ply) == (victim.match_id, victim.ply))
    (found,) = replayed(run)["differences"]
    assert (found["match"], found["ply"]) == (victim.match_id, victim.ply)
    assert (found["attempt"], found["stored"]) == (victim.request_id, move)
    assert found["now"].startswith("unparsable")


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("fen_after", "8/8/8/8/8/8/8/8 w - - 0 1", "position"),
        ("notation", "Qh5#", "notation"),
        ("side", 1, "side"),
        ("move", "e2e5", "move"),
    ],
)
def test_a_ply_that_was_changed_is_found(run: Path, column: str, value: object, what: str) -> None:
    match = next(row for row in read(run).matches if "dice" in row.agents and row.game == "chess")
    tamper(run, f"UPDATE plies SET {column} = ? WHERE match_id = ? AND ply = 0", value, match.id)
    found = [row for row in replayed(run)["differences"] if row["what"] == what]
    assert [(row["match"], row["ply"], row["stored"]) for row in found] == [
        (match.id, 0, str(value))
    ]


def test_a_ply_that_is_missing_is_found(run: Path) -> None:
    match = next(row for row in read(run).matches if row.termination == "ply_cap")
    tamper(run, "DELETE FROM plies WHERE match_id = ? AND ply = 3", match.id)
    (found,) = [row for row in replayed(run)["differences"] if row["match"] == match.id]
    assert (found["ply"], found["what"]) == (3, "order")


@pytest.mark.parametrize("termination", ["ply_cap", "forfeit"])
def test_a_result_that_was_changed_is_found_with_the_ratings_that_follow(
    run: Path, termination: str
) -> None:
    match = next(row for row in read(run).matches if row.termination == termination)
    winner = 0 if match.winner != 0 else 1
    tamper(run, "UPDATE matches SET winner = ? WHERE id = ?", winner, match.id)
    result = replayed(run)
    (found,) = result["differences"]
    assert (found["match"], found["what"]) == (match.id, "result")
    assert found["stored"].startswith(f"won by side {winner}")
    changed = {row["name"] for row in result["ratings"] if row["game"] == match.game}
    assert changed >= set(match.agents)
    assert any("points, Elo" in line for line in replay.lines(result))


ONE = "(SELECT id FROM matches WHERE agent_first = 'dice' AND termination = 'ply_cap' LIMIT 1)"
CUT = f"DELETE FROM plies WHERE ply >= 6 AND match_id = {ONE}"
ENDED = f"UPDATE matches SET winner = 1, detail = 'x', termination = '%s' WHERE id = {ONE}"


@pytest.mark.parametrize(
    ("statements", "what"),
    [
        ((CUT, ENDED % "checkmate"), "result"),
        ((CUT, ENDED % "flag_fall"), "result"),
        ((CUT, ENDED % "forfeit"), "result"),
        ((CUT, ENDED % "adjudicated_win"), "result"),
        ((ENDED % "no_such_ending",), "result"),
        ((f"DELETE FROM plies WHERE match_id = {ONE}",), "result"),
        ((f"UPDATE matches SET state = 'suspended' WHERE id = {ONE}",), "result"),
        ((f"UPDATE matches SET state = 'scheduled' WHERE id = {ONE}",), "state"),
        (
            (
                "UPDATE matches SET (agent_first, agent_second) = (agent_second, agent_first)"
                f" WHERE id = {ONE}",
            ),
            "match",
        ),
        ((f"UPDATE matches SET number = 99 WHERE id = {ONE}",), "match"),
        ((f"DELETE FROM matches WHERE id = {ONE}",), "match"),
        (
            (
                f"DELETE FROM attempts WHERE match_id = {ONE}",
                f"DELETE FROM plies WHERE match_id = {ONE}",
                f"DELETE FROM matches WHERE id = {ONE}",
            ),
            "match",
        ),
        (("DELETE FROM attempts WHERE fault IS NULL AND mode = 'constrained'",), "answer"),
        (("DELETE FROM attempts WHERE fault IS NOT NULL AND mode = 'free'",), "result"),
        (("DELETE FROM attempts WHERE n = 1 AND fault IS NOT NULL AND mode = 'free'",), "result"),
        (("UPDATE attempts SET reply_text = NULL WHERE fault IS NULL",), "answer"),
        (("UPDATE attempts SET reply_text = NULL WHERE fault = 'illegal'",), "reply"),
        (("UPDATE attempts SET mode = 'x'",), "mode"),
        (("UPDATE attempts SET side = 1 - side",), "side"),
        (("UPDATE attempts SET ply = ply + 100 WHERE ply = 3",), "attempt"),
        (("UPDATE plies SET offers_draw = 1 WHERE ply = 3",), "answer"),
        (("UPDATE plies SET clock_left_s = 5",), "clock"),
    ],
)
def test_what_was_made_up_is_found(run: Path, statements: tuple[str, ...], what: str) -> None:
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        for statement in statements:
            assert db.execute(statement).rowcount or "attempts" in statement
    assert what in {found["what"] for found in replayed(run)["differences"]}


CLOCK = """
[clock]
kind = "fischer"
base_seconds = 30
increment_seconds = 0.5
"""


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("timed")
    (folder / "t.toml").write_text(CONFIG + CLOCK)
    return play(folder)


def test_clocks_follow_from_the_tries(timed: Path) -> None:
    held = read(timed)
    assert all(ply.clock_left_s is not None for ply in held.plies)
    assert replayed(timed)["differences"] == []


@pytest.mark.parametrize(
    "change",
    [
        "plies SET clock_left_s = -5 WHERE ply = 3",
        "plies SET clock_left_s = clock_left_s + 1000",
        "plies SET clock_left_s = clock_left_s - 0.01 WHERE ply = 2",
        "plies SET clock_left_s = NULL WHERE ply = 2",
        "attempts SET decode_s = decode_s + 3 WHERE ply = 2",
        "attempts SET decode_s = NULL, done = done + 3 WHERE ply = 2",
    ],
)
def test_a_clock_that_was_changed_is_found(timed: Path, tmp_path: Path, change: str) -> None:
    run = Path(shutil.copytree(timed, tmp_path / "run"))
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        assert db.execute(f"UPDATE {change}").rowcount
    result = replayed(run)
    assert "clock" in {found["what"] for found in result["differences"]}
    if "1000" in change:
        kinds = {"dice": 0, "free": 0, "bound": 0, "thinker": 0}
        held = {row.id: row for row in read(run).matches}
        for found in result["differences"]:
            kinds[held[found["match"]].agents[found["ply"] % 2]] += 1
        assert all(kinds.values()), "also of who is asked nothing"


def test_a_flag_s_fall_needs_the_time_that_it_took(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(
        'name = "t"\n[engines.main]\nkind = "scripted"\nlatency_seconds = 0.03\n'
        '[[agents]]\nname = "bound"\nkind = "llm"\nengine = "main"\n'
        '[[agents]]\nname = "dice"\nkind = "random"\n'
        "[tournament]\npairs = 2\n[pace]\nmove_period_seconds = 0\n"
        '[clock]\nkind = "fischer"\nbase_seconds = 0.1\n'
    )
    run = play(tmp_path)
    held = read(run)
    fallen = {row.id for row in held.matches if row.termination == "flag_fall"}
    assert fallen
    assert replayed(run)["differences"] == []
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        db.execute("UPDATE attempts SET prefill_s = 0, decode_s = 0 WHERE fault = 'flag_fall'")
    assert {row["match"] for row in replayed(run)["differences"]} == fallen


def test_a_book_that_is_gone_is_told(tmp_path: Path) -> None:
    book = tmp_path / "b.epd"
    book.write_text("rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq -\n")
    text = CONFIG.replace('games = ["chess", "janggi"]', "").replace('"free"\nkind', '"x"\nkind')
    (tmp_path / "t.toml").write_text(text + f'[openings]\nbook = "{book}"\n')
    run = play(tmp_path)
    assert replayed(run)["schedule"] is None
    book.unlink()
    result = replayed(run)
    assert result["is_same"]
    assert "openings.book" in result["schedule"]
    assert any("openings.book" in line for line in replay.lines(result))
    tamper(run, "UPDATE matches SET agent_first = 'nobody' WHERE id = ?", read(run).matches[0].id)
    assert "agent 'nobody'" in {row["stored"] for row in replayed(run)["differences"]}
    book.write_text("rnbqkbnr/pppppppp/8/8/3P4/8/PPP1PPPP/RNBQKBNR b KQkq -\n")
    assert "match" in {row["what"] for row in replayed(run)["differences"]}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("run SET config_json = '{'", "run.db: is damaged ("),
        ("run SET config_json = '[]'", "run.db: is damaged (run.config_json is no object)"),
        ("run SET config_json = '{}'", "its config cannot be read: "),
        ("run SET versions_json = ''", "run.db: is damaged ("),
        ("events SET detail_json = '{'", "run.db: is damaged ("),
        ("matches SET winner = 7", "run.db: is damaged (matches.winner is 7)"),
        ("attempts SET side = 7", "run.db: is damaged (attempts.side is 7)"),
        ("matches SET game = 'go'", "cannot be replayed: "),
        ("attempts SET fault = 'zz'", "cannot be replayed: "),
    ],
)
def test_a_damaged_store_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], change: str, told: str
) -> None:
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        db.execute(f"UPDATE {change}")
    assert cli.main(["replay", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


@pytest.mark.parametrize("number", [0, 2])
def test_a_store_of_no_run_or_two_says_so(
    run: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        if number:
            db.execute("INSERT INTO run SELECT 'x', created, '{}', '', '{}' FROM run")
        else:
            db.execute("DELETE FROM run")
    for command in ("replay", "report", "resume"):
        assert cli.main([command, str(run)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"holds {number} runs and not one" in line


def test_a_game_that_was_over_is_found_to_be_followed_by_moves(run: Path) -> None:
    """A lower ply cap in the stored config ends games before their last plies."""
    held = read(run)
    config = json.loads(held.run.config_json)
    config["tournament"]["max_plies"] = 10
    tamper(run, "UPDATE run SET config_json = ?", json.dumps(config))
    found = [row for row in replayed(run)["differences"] if row["what"] == "result"]
    longer = {ply.match_id for ply in held.plies if ply.ply == 10}
    at = {row["match"]: row["ply"] for row in found if row["ply"] is not None}
    assert at == dict.fromkeys(longer, 10)


def test_older_versions_are_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tamper(run, "UPDATE run SET versions_json = ?", json.dumps({"parser": 0}))
    assert cli.main(["replay", str(run)]) == 0
    said = capsys.readouterr().out
    assert "parser: 0 then, " in said
    assert "chess: unknown then, " in said


def test_json_and_no_run(played: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(played), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema_version"], told["is_same"], told["differences"]) == (1, True, [])
    assert cli.main(["replay", str(tmp_path / "none")]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_what_this_version_does_not_know_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    match = read(run).matches[0]
    tamper(run, "UPDATE matches SET start_fen = 'nothing' WHERE id = ?", match.id)
    assert cli.main(["replay", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"arena: match {match.id} cannot be replayed: bad ")


@pytest.mark.parametrize(
    ("game", "answer", "move", "other"),
    [("chess", "g1f3", "g1f3", "a1a8"), ("janggi", "e2e2", "pass", "a1a1")],
)
def test_a_uci_engine_s_answers_are_judged_again(
    game: str, answer: str, move: str, other: str, tmp_path: Path
) -> None:
    """A legal answer, then an illegal one; what it draws by the run's dice leaves no reply."""
    fake = Path(__file__).parents[1] / "agents" / "fake_uci.py"
    command = [sys.executable, str(fake), "fairy", answer, "a1a8"]
    (tmp_path / "t.toml").write_text(
        'name = "t"\n[[agents]]\nname = "fish"\nkind = "uci"\n'
        f"command = {json.dumps(command)}\n"
        '[[agents]]\nname = "dice"\nkind = "random"\n'
        f'[tournament]\ngames = ["{game}"]\npairs = 1\nparallel_matches = 1\n'
        '[pace]\nmove_period_seconds = 0\n[openings]\nbook = "start"\n[faults]\nprobe = false\n'
    )
    run = play(tmp_path)
    held = read(run)
    assert [a.fault for a in held.attempts][:2] == [None, "engine_illegal"]
    result = replayed(run)
    assert result["is_same"]
    assert result["replies_judged"] == sum(a.reply_text is not None for a in held.attempts)
    first = held.attempts[0].request_id
    tamper(run, "UPDATE attempts SET reply_text = ? WHERE request_id = ?", other, first)
    (found,) = replayed(run)["differences"]
    assert (found["attempt"], found["stored"]) == (first, move)
    assert found["now"].startswith("engine_illegal")
    tamper(run, "UPDATE attempts SET reply_text = NULL WHERE request_id = ?", first)
    (found,) = replayed(run)["differences"]
    assert (found["what"], found["stored"]) == ("answer", move)


def test_moves_that_a_uci_player_draws_are_drawn_again(tmp_path: Path) -> None:
    fake = Path(__file__).parents[1] / "agents" / "fake_uci.py"
    command = [sys.executable, str(fake), "fine"]
    (tmp_path / "t.toml").write_text(
        'name = "t"\n[[agents]]\nname = "fish"\nkind = "uci"\nrandom_moves = 1.0\n'
        f"command = {json.dumps(command)}\n"
        '[[agents]]\nname = "dice"\nkind = "random"\n'
        "[tournament]\npairs = 1\nmax_plies = 6\n[pace]\nmove_period_seconds = 0\n"
        '[openings]\nbook = "start"\n[faults]\nprobe = false\n'
    )
    run = play(tmp_path)
    assert replayed(run)["is_same"]
    held = read(run)
    match = next(row for row in held.matches if row.agent_first == "fish")
    first = next(ply for ply in held.plies if (ply.match_id, ply.ply) == (match.id, 0))
    other = "a2a3" if first.move != "a2a3" else "h2h3"
    tamper(run, "UPDATE plies SET move = ? WHERE match_id = ? AND ply = 0", other, match.id)
    assert "answer" in {found["what"] for found in replayed(run)["differences"]}
