"""`Position.parse`: what it reads, and what it says when it refuses."""

import pytest

from games import AmbiguousMove, IllegalMove, NotationError, Position, Start, load_game

CHESS_START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
JANGGI_START = "rnba1abnr/4k4/1c5c1/p1p1p1p1p/9/9/P1P1P1P1P/1C5C1/4K4/RNBA1ABNR w - - 0 1"


def chess(fen: str = CHESS_START, ruleset: str = "standard") -> Position:
    return load_game("chess").position(Start(fen, ruleset))


def janggi(fen: str = JANGGI_START, *moves: str, ruleset: str = "janggi") -> Position:
    position = load_game("janggi").position(Start(fen, ruleset))
    for move in moves:
        position = position.play(position.parse(move))
    return position


def reason(position: Position, text: str) -> str:
    with pytest.raises(IllegalMove) as caught:
        position.parse(text)
    assert position.fen in str(caught.value)
    assert caught.value.reason in str(caught.value)
    return caught.value.reason


@pytest.mark.parametrize(
    "text",
    [
        *("e4", "e2e4", "E4", "E2E4", "e2-e4", "e2 e4", "e2→e4", "1. e4", "1.e4!", "12... e4"),
        *("`e4`", "**e4**", '"e4"', "e4.", " e4 ", "e4!?", "e4+", "♙e4", "e2–e4"),
    ],
)
def test_ways_to_write_a_pawn_move(text: str) -> None:
    assert chess().parse(text) == "e2e4"


@pytest.mark.parametrize("text", ["Nf3", "nf3", "NF3", "♘f3", "♞f3", "Ng1f3", "Nf3+", "N-f3"])
def test_ways_to_write_a_knight_move(text: str) -> None:
    assert chess().parse(text) == "g1f3"


@pytest.mark.parametrize("text", ["e8=Q", "e8Q", "e8q", "e8(Q)", "e8/Q", "e7e8q", "e7e8Q", "E8=Q"])
def test_ways_to_promote(text: str) -> None:
    assert chess("8/4P3/8/8/8/2k5/8/4K3 w - - 0 1").parse(text) == "e7e8q"


@pytest.mark.parametrize("text", ["O-O", "0-0", "o-o", "O–O", "O-O+", "e1g1", "e1h1", "1. O-O!"])
def test_ways_to_castle(text: str) -> None:
    assert chess("r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1").parse(text) == "e1g1"


@pytest.mark.parametrize("text", ["exf6", "exf6 e.p.", "exf6ep", "ef6", "e5f6"])
def test_ways_to_capture_in_passing(text: str) -> None:
    fen = "rnbqkbnr/ppp1p1pp/8/3pPp2/8/8/PPPP1PPP/RNBQKBNR w KQkq f6 0 3"
    assert chess(fen).parse(text) == "e5f6"


@pytest.mark.parametrize(
    "text",
    ["", " ", "hello", "--", "0000", "@@@@", "Z0", "pass", "e44", "x", "BXC4", "e2e4e5", "1.", "♔"],
)
def test_what_is_no_chess_move(text: str) -> None:
    with pytest.raises(NotationError):
        chess().parse(text)


def test_a_bishop_and_a_b_pawn_are_not_confused() -> None:
    position = chess("4k3/8/8/8/2r5/1P1B4/8/4K3 w - - 0 1")
    assert position.parse("bxc4") == "b3c4"
    assert position.parse("Bxc4") == "d3c4"
    with pytest.raises(NotationError):
        position.parse("BXC4")


@pytest.mark.parametrize(
    ("fen", "text", "said"),
    [
        (CHESS_START, "e4e5", "there is no piece on e4"),
        (CHESS_START, "e7e5", "the pawn on e7 is your opponent's"),
        (CHESS_START, "b1d2", "d2 is taken by your own pawn"),
        (CHESS_START, "Nd5", "no knight of yours can reach d5"),
        (CHESS_START, "g1e5", "the knight on g1 cannot reach e5"),
        (CHESS_START, "f1c4", "the bishop is blocked by the pawn on e2"),
        (CHESS_START, "e2d3", "there is nothing for the pawn to capture on d3"),
        (CHESS_START, "e2e5", "the pawn on e2 cannot reach e5"),
        (CHESS_START, "O-O", "castling is blocked by the piece on f1"),
        (CHESS_START, "e1g1", "castling is blocked by the piece on f1"),
        (CHESS_START, "e2e4q", "only a pawn that reaches the last rank promotes"),
        (CHESS_START, "a1a1", "a piece must leave its square"),
        (
            "4k3/8/8/8/4p3/4P3/8/4K3 w - - 0 1",
            "e4",
            "the pawn on e3 is blocked by the pawn on e4",
        ),
        (
            "4k3/8/8/8/8/4P3/8/4K3 w - - 0 1",
            "e5",
            "the pawn on e3 has left its first square and moves one step",
        ),
        ("4k3/8/8/8/8/4P3/8/4K3 w - - 0 1", "d4", "you have no pawn on the d-file"),
        ("4k3/8/8/8/8/4P3/8/4K3 w - - 0 1", "Qd4", "you have no such queen"),
        ("8/4P3/8/8/8/2k5/8/4K3 w - - 0 1", "e8", "the pawn on e7 must name a promotion piece"),
        ("8/4P3/8/8/8/2k5/8/4K3 w - - 0 1", "e7e8", "the pawn on e7 must name a promotion"),
        ("8/4P3/8/8/8/2k5/8/4K3 w - - 0 1", "e8=K", "a pawn promotes to q, r, b or n"),
        ("4k3/8/8/8/8/8/4r3/4K2R w K - 0 1", "O-O", "not castle while your king is in check"),
        ("4k3/8/8/8/8/8/4r3/4K2R w K - 0 1", "Rh2", "your king is in check and this move does"),
        ("4k3/4r3/8/8/8/8/4N3/4K2R w K - 0 1", "Nc3", "the knight on e2 is pinned"),
        ("4k3/4r3/8/8/8/8/4N3/4K2R w K - 0 1", "O-O-O", "no right to castle on the queen's side"),
        ("4k3/8/8/8/8/5r2/8/4K2R w K - 0 1", "O-O", "would cross or reach an attacked square"),
        ("4k3/8/8/8/8/5r2/8/4K2R w K - 0 1", "Kf1", "your king would be in check on f1"),
        ("7k/5Q2/6K1/8/8/8/8/8 b - - 0 1", "Kh7", "the game is over"),
    ],
)
def test_why_a_chess_move_is_illegal(fen: str, text: str, said: str) -> None:
    assert said in reason(chess(fen), text)


def test_chess960_castling_is_the_king_onto_the_rook() -> None:
    position = chess("4k3/8/8/8/8/8/8/1R2KR2 w KQ - 0 1", "chess960")
    assert position.parse("O-O") == position.parse("e1f1") == "e1f1"
    assert position.parse("O-O-O") == "e1b1"
    assert "as the king onto the rook" in reason(position, "e1g1")


def test_an_ambiguous_chess_move_names_its_candidates() -> None:
    with pytest.raises(AmbiguousMove) as caught:
        chess("1k6/8/8/8/8/4K3/8/R6R w - - 0 1").parse("Rd1")
    assert sorted(caught.value.candidates) == ["a1d1", "h1d1"]


@pytest.mark.parametrize(
    "text",
    [
        *("b1c3", "b1-c3", "b1 c3", "b1–c3", "b1xc3", "1. b1c3", "`b1c3`", "b1c3!"),
        *(
            "02마83",
            "02 마 83",
            "02馬83",
            "02마83장군",
            "H02-83",
            "h02-83",
            "N02-83",
            "Hc3",
            "Hb1-c3",
        ),
    ],
)
def test_ways_to_write_a_horse_move(text: str) -> None:
    assert janggi().parse(text) == "b1c3"


@pytest.mark.parametrize(
    "text",
    [
        *("pass", "Pass.", "PASS", "한수쉼", "한수 쉼", "e2e2", "e2-e2"),
        *("95궁95", "95왕95", "95초95", "95楚95", "K95-95"),
    ],
)
def test_ways_to_pass(text: str) -> None:
    assert janggi().parse(text) == "pass"


def test_other_korean_names() -> None:
    position = janggi()
    assert (
        position.parse("75졸65") == position.parse("75병65") == position.parse("P75-65") == "e4e5"
    )
    assert position.parse("01차91") == position.parse("R01-91") == "a1a2"
    assert position.parse("95왕85") == position.parse("K95-85") == "e2e3"
    assert position.parse("04사94") == position.parse("A04-94") == "d1d2"
    taken = janggi("4k4/9/9/9/p8/P8/9/9/9/3K5 w - - 0 1")
    assert taken.parse("P61x51") == taken.parse("61졸51") == "a5a6"
    tenth = janggi(JANGGI_START, "a4b4", "a7b7", "b1c3")
    assert tenth.parse("11차21") == "a10a9"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "zzzz",
        "0000",
        "--",
        "A1A2",
        "A1-A2",
        "02마00",
        "a0a1",
        "a11a1",
        "j1j2",
        "e4",
        "마83",
        "99",
    ],
)
def test_what_is_no_janggi_move(text: str) -> None:
    with pytest.raises(NotationError):
        janggi().parse(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("e5e6", "there is no piece on e5"),
        ("e7e6", "the soldier on e7 is your opponent's"),
        ("a1a4", "a4 is taken by your own soldier"),
        ("a1a10", "the chariot is blocked by the soldier on a4"),
        ("a1b2", "it moves along files, ranks and the palace's diagonals"),
        ("b1d2", "the horse's leg on c1 is blocked by the elephant on c1"),
        ("b1e5", "the horse on b1 cannot reach e5"),
        ("c1f3", "the elephant's path on d1 is blocked by the guard on d1"),
        ("c1d5", "the elephant on c1 cannot reach d5"),
        ("b3b5", "exactly one screen that is not a cannon to jump over, and there is none"),
        ("b3b8", "a cannon may not capture a cannon"),
        ("b3c5", "the cannon on b3 cannot reach c5"),
        ("e4e3", "a soldier never moves backward"),
        ("e4d5", "a soldier moves one step forward or sideways"),
        ("e2c2", "the general may not leave the palace"),
        ("d1e3", "the guard on d1 moves one step along the palace's lines"),
        ("a1a1", "only the general's own square means a pass"),
        ("02상83", "on b1 stands the horse, not the elephant"),
        ("Hd5", "no horse of yours can go to d5"),
        ("Ke5", "the general may not leave the palace"),
    ],
)
def test_why_a_janggi_move_is_illegal(text: str, said: str) -> None:
    assert said in reason(janggi(), text)


@pytest.mark.parametrize(
    ("fen", "text", "said"),
    [
        (
            "3k5/9/9/4c4/4C4/9/9/9/9/4K4 w - - 0 1",
            "e6e8",
            "and the only piece between is the cannon on e7",
        ),
        (
            "3k5/4p4/9/4p4/4C4/9/9/9/9/4K4 w - - 0 1",
            "e6e10",
            "and there are 2 between e6 and e10",
        ),
        ("4k4/4R4/9/9/9/9/9/9/9/3K5 b - - 0 1", "pass", "may not pass while your general is in"),
        ("4k4/4R4/9/9/9/9/9/9/9/3K5 b - - 0 1", "e10d10", "general would be in check on d10"),
        ("3kr4/9/9/9/9/9/9/4R4/4K4/9 w - - 0 1", "e3d3", "your general on e2 would be in check"),
        (
            "3kr4/9/9/9/9/9/9/9/4K4/R8 w - - 0 1",
            "a1a2",
            "your general on e2 is in check and this does not answer it",
        ),
    ],
)
def test_why_a_janggi_move_is_illegal_here(fen: str, text: str, said: str) -> None:
    assert said in reason(janggi(fen), text)


def test_facing_generals_must_be_answered() -> None:
    position = janggi(JANGGI_START, "e4d4", "e7d7")
    assert "you must answer the facing generals" in reason(position, "a1a2")
    assert janggi(JANGGI_START, "e4d4", "e7d7", ruleset="janggimodern").parse("a1a2") == "a1a2"


def test_nothing_is_legal_after_two_passes() -> None:
    assert reason(janggi(JANGGI_START, "pass", "pass"), "a1a2") == "the game is over"


def test_an_ambiguous_janggi_move_names_its_candidates() -> None:
    with pytest.raises(AmbiguousMove) as caught:
        janggi().parse("Pd4")
    assert caught.value.candidates == ("c4d4", "e4d4")
    assert janggi().parse("Pcd4") == "c4d4"
