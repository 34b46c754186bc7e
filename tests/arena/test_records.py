"""Games and tables of a run are read back whole by others' readers, whatever stands in them."""

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import chess
import chess.engine
import chess.pgn
import pytest

from arena import cli, records, tables
from arena.output import Kind, write_all
from arena.store import AttemptRow, EventRow, MatchRow, Records, StoreError, read
from games import Start, load_game

FORMULA, QUOTED = "=HYPERLINK(A1)", 'a "b", c\\'
HEADERS = {
    *("Event", "Site", "Date", "Round", "White", "Black", "Result"),
    *("UTCDate", "UTCTime", "TimeControl", "Termination", "Ending", "Detail"),
    *("MatchId", "PairId", "RunId", "Game", "Opening", "PlyCount"),
}
CONFIG = """
name = "cup"
seed = 5
[engines.main]
kind = "scripted"
replies = ["MOVE: a1a1", "no\\n[%clk 0:00:01] move } [Event \\"x\\"]"]
[[agents]]
name = "=HYPERLINK(A1)"
kind = "random"
[[agents]]
name = 'a "b", c\\'
kind = "greedy"
[[agents]]
name = "model"
kind = "llm"
engine = "main"
mode = "free"
[tournament]
games = ["chess", "chess/chess960", "janggi"]
pairs = 1
max_plies = 30
[pace]
move_period_seconds = 0
[clock]
kind = "fischer"
base_seconds = 300
increment_seconds = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("records")
    (made / "t.toml").write_text(CONFIG)
    run = made / "run"
    assert cli.main(["run", str(made / "t.toml"), "--out", str(run), "--view", "none"]) == 0
    return run


@pytest.fixture(scope="module")
def held(folder: Path) -> Records:
    return read(folder)


def read_pgn(path: Path) -> Iterator[chess.pgn.Game]:
    with path.open(encoding="utf-8") as file:
        while (game := chess.pgn.read_game(file)) is not None:
            assert not game.errors
            yield game


def written(held: Records, folder: Path) -> dict[str, chess.pgn.Game]:
    """The PGN of these records, read back, by match."""
    records.write_pgn(folder / "f.pgn", held)
    return {game.headers["MatchId"]: game for game in read_pgn(folder / "f.pgn")}


def changed(held: Records, match: MatchRow, **changes: object) -> Records:
    """The records with one match changed."""
    rows = (row._replace(**changes) if row == match else row for row in held.matches)  # type: ignore[arg-type]
    return held._replace(matches=tuple(rows))


def test_every_stored_game_is_read_back(
    folder: Path, held: Records, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "games.pgn"
    assert cli.main(["report", str(folder), "--pgn", str(path)]) == 0
    assert capsys.readouterr().err == f"written: {path}\n"
    assert path.read_bytes() == (folder / "games.pgn").read_bytes()
    games = {game.headers["MatchId"]: game for game in read_pgn(path)}
    rows = {row.id: row for row in held.matches if row.game == "chess"}
    assert games.keys() == rows.keys()
    for match, game in games.items():
        plies = [ply for ply in held.plies if ply.match_id == match]
        row, headers = rows[match], game.headers
        assert set(headers) - {"FEN", "SetUp", "Variant"} == HEADERS
        assert [move.uci() for move in game.mainline_moves()] == [ply.move for ply in plies]
        assert [node.san() for node in game.mainline()] == [ply.notation for ply in plies]
        assert game.board().fen() == row.start_fen
        assert headers["White"] == row.agent_first.replace('"', "'").replace("\\", "/")
        assert headers["Event"] == "cup"
        assert re.fullmatch(r"20\d\d\.\d\d\.\d\d", headers["Date"])
        assert re.fullmatch(r"\d\d:\d\d:\d\d", headers["UTCTime"])
        assert headers["TimeControl"] == "300+2"
        assert headers["Ending"] == row.termination
        assert headers.get("Variant") == ("Chess960" if row.ruleset == "chess960" else None)
        assert ("FEN" in headers) == (row.start_fen != chess.STARTING_FEN)
        for node, ply in zip(game.mainline(), plies, strict=True):
            assert node.clock() == pytest.approx(ply.clock_left_s, abs=0.001)
            assert node.emt() == pytest.approx(max(ply.done - ply.due, 0), abs=0.001)


def test_the_games_of_a_pair_stand_together_and_rounds_tell_them(
    held: Records, tmp_path: Path
) -> None:
    """Whatever the order in which they were scheduled."""
    mixed = tuple(sorted(held.matches, key=lambda row: (row.number % 2, row.number)))
    pairs = list(dict.fromkeys(row.pair_id for row in mixed))
    games = written(held._replace(matches=mixed), tmp_path).values()
    assert [(game.headers["PairId"], game.headers["Round"]) for game in games] == [
        (pair, f"{number}.{game}")
        for number, pair in enumerate(pairs, 1)
        for game in (1, 2)
        if next(row for row in mixed if row.pair_id == pair).game == "chess"
    ]


def test_the_illegal_move_of_a_forfeit_is_in_the_last_comment(
    held: Records, tmp_path: Path
) -> None:
    games = written(held, tmp_path)
    lost = [row for row in held.matches if row.termination == "forfeit" and row.game == "chess"]
    assert lost
    for row in lost:
        game = games[row.id]
        assert game.headers["Termination"] == "rules infraction"
        said = game.end().comment
        plies = [ply for ply in held.plies if ply.match_id == row.id]
        last = [a for a in held.attempts if (a.match_id, a.ply) == (row.id, len(plies))]
        assert len(last) == 3
        assert "gave no legal move" in said
        for attempt in last:
            assert attempt.fault is not None
            assert attempt.fault in said
        assert said.count("a1a1") >= sum("a1a1" in (a.reply_text or "") for a in last)
        clocks = sum("[%clk" in word for word in said.split())
        assert clocks == (1 if plies else 0), "no words of a model pass for a clock"


@pytest.mark.parametrize(
    ("termination", "words"),
    [
        ("checkmate", "normal"),
        ("resignation", "normal"),
        ("flag_fall", "time forfeit"),
        ("ply_cap", "adjudication"),
        ("adjudicated_win", "adjudication"),
        (None, "unterminated"),
    ],
)
def test_endings_are_told_in_the_words_of_the_standard(
    held: Records, tmp_path: Path, termination: str | None, words: str
) -> None:
    match = held.matches[0]
    state = "suspended" if termination is None else "finished"
    rows = changed(held, match, termination=termination, state=state)
    game = written(rows, tmp_path)[match.id]
    assert game.headers["Termination"] == words
    assert game.headers["Ending"] == (termination or "suspended")
    assert (game.headers["Result"] == "*") == (termination is None)


def test_a_crash_of_an_engine_is_no_breach_of_the_rules(held: Records, tmp_path: Path) -> None:
    match = next(row for row in held.matches if row.termination == "forfeit")
    rows = held._replace(
        attempts=tuple(
            a._replace(fault="engine_crash") if a.match_id == match.id else a for a in held.attempts
        )
    )
    assert written(rows, tmp_path)[match.id].headers["Termination"] == "abandoned"


@pytest.mark.parametrize(
    ("centipawns", "ply", "score"),
    [
        (35, 0, chess.engine.Cp(35)),
        (35, 1, chess.engine.Cp(-35)),
        (99_997, 0, chess.engine.Mate(3)),
        (99_997, 1, chess.engine.Mate(-3)),
        (-99_998, 1, chess.engine.Mate(2)),
    ],
)
def test_scores_are_told_from_whites_side(
    held: Records, tmp_path: Path, centipawns: int, ply: int, score: chess.engine.Score
) -> None:
    match = next(row for row in held.matches if row.termination == "ply_cap")
    attempt = AttemptRow("r", match.id, ply, ply, 0, None, None, eval_cp=centipawns)
    rows = held._replace(attempts=(*held.attempts, attempt))
    node = list(written(rows, tmp_path)[match.id].mainline())[ply]
    told = node.eval()
    assert told is not None
    assert told.white() == score


def test_janggi_is_read_back_in_both_notations(folder: Path, held: Records) -> None:
    text = (folder / "games-janggi.txt").read_text(encoding="utf-8")
    found = {}
    for part in re.split(r"\n\n(?=\[Event )", text):
        head, body = part.split("\n\n")
        headers = dict(re.findall(r'^\[(\w+) "([^"]*)"\]$', head, re.MULTILINE))
        position = load_game("janggi").position(Start(headers["FEN"], headers["RuleSet"]))
        for line in body.splitlines():
            if match := re.match(r"\d+\. (\S+) (\S+)", line):
                assert position.parse(match[1]) == position.parse(match[2]) == match[1]
                position = position.play(match[1])
        found[headers["MatchId"]] = position.moves
    assert found == {
        row.id: tuple(ply.move for ply in held.plies if ply.match_id == row.id)
        for row in held.matches
        if row.game == "janggi"
    }


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, strict=True))


def test_tables_are_read_back_whole(folder: Path, held: Records, tmp_path: Path) -> None:
    out = tmp_path / "csv"
    assert cli.main(["report", str(folder), "--csv", str(out)]) == 0
    names = (
        *("attempts", "byes", "engines", "los", "matches", "null_pairings", "pairings", "plies"),
        *("ratings", "replicas", "results", "sprt", "standings", "ties"),
    )
    assert sorted(path.name for path in out.iterdir()) == [f"{name}.csv" for name in names]
    read_back = {name: read_csv(out / f"{name}.csv") for name in names}
    assert [row["id"] for row in read_back["matches"]] == [row.id for row in held.matches]
    assert [row["move"] for row in read_back["plies"]] == [ply.move for ply in held.plies]
    assert [float(row["done_s"]) for row in read_back["plies"]] == [ply.done for ply in held.plies]
    texts = [row.reply_text for row in held.attempts]
    assert any("\n" in (text or "") for text in texts)
    assert [row["reply_text"] for row in read_back["attempts"]] == texts
    assert {row["agent_first"] for row in read_back["matches"]} == {"'" + FORMULA, QUOTED, "model"}
    assert {row["name"] for row in read_back["standings"]} == {"'" + FORMULA, QUOTED, "model"}
    assert all(float(row["elo_low"]) < float(row["elo_high"]) for row in read_back["pairings"])
    assert read_back["engines"][0]["kind"] == "scripted"
    players = {(row["game"], row["name"]) for row in read_back["standings"]}
    assert {(row["game"], row["name"]) for row in read_back["ratings"]} == players
    assert {row["group"] for row in read_back["ratings"]} == {"1"}
    assert all(0 <= float(row["los"]) <= 1 for row in read_back["los"])
    assert [row["match"] for row in read_back["results"]] == [row.id for row in held.matches]
    assert {row["is_rated"] for row in read_back["results"]} == {"true"}
    assert b"\r\n" in (out / "matches.csv").read_bytes()
    # again over its own
    assert cli.main(["report", str(folder), "--csv", str(out)]) == 0


def test_what_a_format_says_is_in_tables(held: Records, tmp_path: Path) -> None:
    bye = {"game": "chess", "round": 1, "agent": "model", "points": 2.0}
    tie = {"game": "chess", "round": 1, "tie": 1, "agents": ["model", QUOTED], "by": "score"}
    tie |= {"points": [2.5, 1.5], "winner": "model"}
    config = json.loads(held.run.config_json) | {"sprt": {"elo0": 0, "elo1": 10}}
    config["tournament"]["null_pairing"] = "model"
    first = held.matches[0]
    alone = first._replace(id="x", agent_first="model", agent_second="model (null)")
    tables.write(
        tmp_path / "f",
        held._replace(
            run=held.run._replace(config_json=json.dumps(config)),
            matches=(*held.matches, alone),
            events=(
                EventRow(0.0, "bye", json.dumps(bye)),
                EventRow(0.0, "tie_decided", json.dumps(tie)),
            ),
        ),
    )
    read_back = {name: read_csv(tmp_path / "f" / f"{name}.csv") for name in ("byes", "ties")}
    assert read_back["byes"] == [{"game": "chess", "round": "1", "agent": "model", "points": "2.0"}]
    (told,) = read_back["ties"]
    assert (told["higher_seed"], told["higher_seed_points"]) == ("model", "2.5")
    assert (told["other"], told["other_points"], told["winner"]) == (QUOTED, "1.5", "model")
    assert all(float(row["upper"]) > 0 for row in read_csv(tmp_path / "f" / "sprt.csv"))
    (null,) = read_csv(tmp_path / "f" / "null_pairings.csv")
    assert (null["agent"], null["opponent"]) == ("model", "model (null)")


@pytest.mark.parametrize("begins", list("=+-@\t\r\n＝＋－＠"))
def test_no_text_is_a_formula(begins: str) -> None:
    rows = [{"name": f"{begins}cmd", "number": -1}]
    said = "".join(tables.text((), rows))
    (read_back,) = csv.DictReader(io.StringIO(said, newline=""), strict=True)
    assert read_back == {"name": f"'{begins}cmd", "number": "-1"}


def test_a_table_without_rows_has_its_header(held: Records, tmp_path: Path) -> None:
    tables.write(tmp_path / "d", held._replace(matches=(), plies=(), attempts=()))
    assert (tmp_path / "d" / "standings.csv").read_text() == "name,game,games\n"
    assert (tmp_path / "d" / "plies.csv").read_text().startswith("match_id,ply,side,move,")


def test_nothing_foreign_is_written_over(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = '[Event "Linares"]\n[Site "Linares"]\n\n1. e4 *\n'
    (tmp_path / "f.pgn").write_text(theirs)
    assert cli.main(["report", str(folder), "--pgn", str(tmp_path / "f.pgn")]) == 2
    assert "is no PGN file of ours" in capsys.readouterr().err
    assert (tmp_path / "f.pgn").read_text() == theirs
    out = tmp_path / "csv"
    out.mkdir()
    (out / "plies.csv").write_text("mine\n")
    assert cli.main(["report", str(folder), "--csv", str(out)]) == 2
    assert "plies.csv: is there, and is no such table of ours" in capsys.readouterr().err
    assert [path.read_text() for path in out.iterdir()] == ["mine\n"]
    assert cli.main(["report", str(folder), "--csv", str(tmp_path / "f.pgn")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_tables_are_written_all_or_not_at_all(tmp_path: Path) -> None:
    def broken() -> Iterator[str]:
        yield "a"
        raise OSError(28, "No space left on device")

    kind = Kind("table", b"a")
    files = {"one.csv": (kind, ["a,b"]), "two.csv": (kind, broken())}
    with pytest.raises(StoreError, match="No space left"):
        write_all(tmp_path / "new", files)
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "one.csv").write_text("a,old")
    files["two.csv"] = (kind, broken())
    with pytest.raises(StoreError, match="No space left"):
        write_all(tmp_path / "old", files)
    assert [path.read_text() for path in (tmp_path / "old").iterdir()] == ["a,old"]


def test_a_run_without_chess_has_no_pgn(held: Records, tmp_path: Path) -> None:
    rows = tuple(row for row in held.matches if row.game == "janggi")
    with pytest.raises(StoreError, match="no game that is written as PGN"):
        records.write_pgn(tmp_path / "f.pgn", held._replace(matches=rows))
    assert not (tmp_path / "f.pgn").exists()


def test_a_run_without_a_clock_tells_none(held: Records, tmp_path: Path) -> None:
    config = json.loads(held.run.config_json)
    del config["clock"]  # as before there were any
    plain = held._replace(run=held.run._replace(config_json=json.dumps(config)))
    for game in written(plain, tmp_path).values():
        assert "TimeControl" not in game.headers
