"""Opening books, built in and read from files."""

from pathlib import Path

import chess
import pytest

from games import GAMES, Start, load_game

CHESS_START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
JANGGI_START = "rnba1abnr/4k4/1c5c1/p1p1p1p1p/9/9/P1P1P1P1P/1C5C1/4K4/RNBA1ABNR w - - 0 1"


@pytest.mark.parametrize(
    ("name", "ruleset"), [(name, rules) for name, game in GAMES.items() for rules in game.rulesets]
)
def test_builtin_starts_are_16_playable_positions(name: str, ruleset: str) -> None:
    game = load_game(name)
    starts = game.openings("builtin", ruleset)
    assert len({start.fen for start in starts}) == 16
    assert len({start.name for start in starts}) == 16
    for start in starts:
        position = game.position(start)
        assert start.ruleset == ruleset
        assert position.result() is None
        assert position.fen == start.fen
        assert not position.in_check
        assert abs(position.material(0) - position.material(1)) <= 1


def test_the_usual_starts() -> None:
    (start,) = load_game("chess").openings("start", "standard")
    assert (start.fen, start.name) == (CHESS_START, "")
    (start,) = load_game("janggi").openings("start", "janggi")
    assert (start.fen, start.name) == (JANGGI_START, "")


def test_setups_are_named_from_each_players_own_left() -> None:
    starts = {start.name: start.fen for start in load_game("janggi").openings("builtin", "janggi")}
    assert starts["Cho HEEH, Han HEEH"] == JANGGI_START
    fen = starts["Cho EHHE, Han HEHE"]
    assert fen.startswith("rbna1abnr/")
    assert "/RBNA1ANBR " in fen


def test_chess960_starts_have_castling_rights_and_are_chess960() -> None:
    for start in load_game("chess").openings("builtin", "chess960"):
        assert chess.Board(start.fen, chess960=True).chess960_pos() is not None


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_an_epd_book(tmp_path: Path) -> None:
    text = (
        "# our lines\n"
        'rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - id "King pawn";\n'
        "\n"
        "rnbqkbnr/pppppppp/8/8/3P4/8/PPP1PPPP/RNBQKBNR b KQkq - 0 1\n"
    )
    book = write(tmp_path / "book.epd", text)
    first, second = load_game("chess").openings(book, "standard")
    assert first.name == "King pawn"
    assert second.name == "book 2"
    assert second.fen == "rnbqkbnr/pppppppp/8/8/3P4/8/PPP1PPPP/RNBQKBNR b KQkq - 0 1"


def test_a_pgn_book_starts_after_the_last_move(tmp_path: Path) -> None:
    text = '[Event "a"]\n[Opening "Réti"]\n\n1. Nf3 d5 *\n\n[Event "?"]\n\n1. e4 (1. d4 d5) c5 *\n'
    reti, sicilian = load_game("chess").openings(write(tmp_path / "b.pgn", text), "standard")
    assert reti.name == "Réti"
    assert reti.fen.split()[0] == "rnbqkbnr/ppp1pppp/8/3p4/8/5N2/PPPPPPPP/RNBQKB1R"
    assert sicilian.fen.split()[0] == "rnbqkbnr/pp1ppppp/8/2p5/4P3/8/PPPP1PPP/RNBQKBNR"
    assert sicilian.name == "b 2"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("b.epd", "", "holds no opening"),
        ("b.epd", "\nhello\n", "line 2: "),
        ("b.epd", f"{CHESS_START}\n{CHESS_START}", "line 2: same position as line 1"),
        ("b.epd", "7k/5Q2/6K1/8/8/8/8/8 b - - 0 1", "line 1: the game is already over there"),
        ("b.epd", "k7/8/8/8/8/8/8/8 w - - 0 1", "line 1: bad chess FEN"),
        ("b.pgn", '[Event "a"]\n\n1. e4 *\n\n[Event "b"]\n\n1. e5 *\n', "line 5: illegal san"),
        ("b.pgn", '[Event "a"]\n\n1. e4 *\n\n[Event "b"]\n\n1. e4 *\n', "line 5: same position"),
        ("b.pgn", '[Event "a"]\n\n1. f3 e5 2. g4 Qh4# 0-1\n', "line 1: the game is already over"),
        (
            "b.pgn",
            "1. Nf3 Nf6 2. Ng1 Ng8 3. Nf3 Nf6 4. Ng1 Ng8 *\n",
            "line 1: the position there has occurred three times",
        ),
        ("b.pgn", "hello\n", "line 1: the game has no moves"),
        ("b.bin", "x", "a chess book is named"),
    ],
)
def test_a_bad_chess_book(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(ValueError, match="b\\.") as caught:
        load_game("chess").openings(write(tmp_path / name, text), "standard")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_janggi_book(tmp_path: Path) -> None:
    text = f"# set-ups\n{JANGGI_START}\n\n4k4/9/9/9/9/p8/9/9/P8/3K5 w - - 0 1 ; soldiers\n"
    first, second = load_game("janggi").openings(write(tmp_path / "j.txt", text), "janggicasual")
    assert (first.fen, first.name, first.ruleset) == (JANGGI_START, "j 1", "janggicasual")
    assert second.name == "soldiers"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no opening"),
        ("\nhello\n", "line 2: bad janggi FEN 'hello'"),
        (f"{JANGGI_START}\n{JANGGI_START[:-3]}5 9", "line 2: same position as line 1"),
        ("4k4/9/9/9/9/9/9/9/9/3K5 w - - 0 1", "line 1: the game is already over there"),
    ],
)
def test_a_bad_janggi_book(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        load_game("janggi").openings(write(tmp_path / "j.txt", text), "janggi")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", GAMES)
def test_a_book_that_is_not_there(name: str, tmp_path: Path) -> None:
    game = load_game(name)
    with pytest.raises(FileNotFoundError):
        game.openings(str(tmp_path / "gone.epd"), game.rulesets[0])
    binary = tmp_path / "binary.epd"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not text in UTF-8"):
        game.openings(str(binary), game.rulesets[0])


REPEATED = "1. Nf3 Nf6 2. Ng1 Ng8 3. Nf3 Nf6 4. Ng1 Ng8"


def test_a_pgn_book_is_cut_after_so_many_plies(tmp_path: Path) -> None:
    games = f'[Opening "Long"]\n\n1. e4 c5 2. Nf3 d6 *\n\n{REPEATED} *\n\n1. e4 c5 2. Nf3 e6 *\n'
    book = write(tmp_path / "b.pgn", games)
    long, _ = load_game("chess").openings(book, "standard", plies=3)  # alike ones count once
    assert long.fen.startswith("rnbqkbnr/pp1ppppp/8/2p5/4P3/5N2/PPPP1PPP/RNBQKB1R b")
    whole, _ = load_game("chess").openings(
        write(tmp_path / "c.pgn", "1. e4 *\n\n1. d4 *"), "standard", plies=9
    )
    assert whole.fen.split()[1] == "b"


def test_janggi_has_no_book_of_games_to_cut(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="plies"):
        load_game("janggi").openings(str(tmp_path / "j.txt"), "janggi", plies=4)


@pytest.mark.parametrize(
    ("name", "ruleset"), [("chess", "standard"), ("chess", "chess960"), ("janggi", "janggi")]
)
def test_the_builtin_openings_are_balanced(name: str, ruleset: str) -> None:
    """Material is equal, the first side is to move, and neither side has many more moves than the
    other: 13 more of about 40 at most, where a bishop has just been let out."""
    game = load_game(name)
    for start in game.openings("builtin", ruleset):
        position = game.position(start)
        assert position.material(0) == position.material(1), start.name
        assert position.side == 0
        assert not position.in_check
        placement, side, *rest = start.fen.split()
        flipped = " ".join((placement, {"w": "b"}[side], *rest))
        other = game.position(Start(flipped, ruleset))
        moves = len(position.legal_moves()), len(other.legal_moves())
        assert abs(moves[0] - moves[1]) <= 13, (start.name, moves)
