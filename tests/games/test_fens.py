"""What a start position must be."""

import pytest

from games import Start, load_game

PALACES = "4k4/9/9/9/9/9/9/9/9/3K5"


@pytest.mark.parametrize(
    ("fen", "said"),
    [
        ("", "a FEN has 2 to 6 fields, not 0"),
        (PALACES, "a FEN has 2 to 6 fields, not 1"),
        (f"{PALACES} w - - 0 1 7", "a FEN has 2 to 6 fields, not 7"),
        ("4k4/9/9/9/9/9/9/9/3K5 w - - 0 1", "10 ranks, not 9"),
        ("4k3/9/9/9/9/9/9/9/9/3K5 w - - 0 1", "rank 10 ('4k3') has 8 squares, not 9"),
        ("4k22/9/9/9/9/9/9/9/9/3K5 w - - 0 1", "two numbers in a row in rank 10"),
        ("4k4/9/9/9/9/9/9/9/9/3K4q w - - 0 1", "'q' in rank 1 is no piece"),
        ("4k4/9/9/9/9/9/9/9/9/9 w - - 0 1", "Cho must have exactly one general, not 0"),
        ("3kk4/9/9/9/9/9/9/9/9/3K5 w - - 0 1", "Han must have exactly one general, not 2"),
        ("k8/9/9/9/9/9/9/9/9/3K5 w - - 0 1", "Han's general on a10 is not in its palace"),
        ("4k4/9/9/9/9/9/9/9/A8/3K5 w - - 0 1", "Cho's guard on a2 is not in its palace"),
        ("4k4/9/9/9/9/9/PPPPPPPPP/PPPPPPPP1/9/3K5 w - - 0 1", "Cho has 18 pieces, more than 16"),
        (f"{PALACES} x - - 0 1", "the side to move is 'w' (Cho) or 'b' (Han), not 'x'"),
        (f"{PALACES} w - - -1 1", "the counters are not two numbers"),
        (f"{PALACES} w KQ - 0 1", "the counters are not two numbers"),
        ("4k4/9/9/9/9/9/9/9/4R4/3K5 w - - 0 1", "Cho is to move and could capture Han's general"),
        ("4k4/9/9/9/9/9/9/9/3r5/3K5 b - - 0 1", "Han is to move and could capture Cho's general"),
    ],
)
def test_a_bad_janggi_fen(fen: str, said: str) -> None:
    with pytest.raises(ValueError, match="bad janggi FEN") as caught:
        load_game("janggi").position(Start(fen, "janggi"))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("w - - 7 12", "w - - 7 12"),
        ("w 7 12", "w - - 7 12"),
        ("w", "w - - 0 1"),
        ("b - -", "b - - 0 1"),
        ("w - - 0 0", "w - - 0 1"),
    ],
)
def test_the_tail_of_a_janggi_fen_may_be_short(given: str, read: str) -> None:
    position = load_game("janggi").position(Start(f"4k4/9/4P4/9/9/9/9/9/9/3K5 {given}", "janggi"))
    assert position.fen == f"4k4/9/4P4/9/9/9/9/9/9/3K5 {read}"


@pytest.mark.parametrize(
    ("fen", "said"),
    [
        ("8/8/8/8/8/8/8/4K3 w - - 0 1", "no black king"),
        ("4k3/8/8/8/8/8/8/8 w - - 0 1", "no white king"),
        ("4k3/8/8/8/8/8/8/K3K3 w - - 0 1", "too many kings"),
        ("4k2P/8/8/8/8/8/8/4K3 w - - 0 1", "pawns on backrank"),
        ("4k3/8/8/8/8/8/4R3/4K3 w - - 0 1", "opposite check"),
        ("4k3/8/8/8/8/8/8/4K3 w KQ - 0 1", "bad castling rights"),
        ("1r2kr2/8/8/8/8/8/8/1R2KR2 w FBfb - 0 1", "bad castling rights"),
        ("4k3/8/8/8/8/8/8/4K3 x - - 0 1", "turn part"),
        ("blah", "bad chess FEN 'blah'"),
    ],
)
def test_a_bad_chess_fen(fen: str, said: str) -> None:
    with pytest.raises(ValueError, match="bad chess FEN") as caught:
        load_game("chess").position(Start(fen, "standard"))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_chess960_fen_needs_its_rule_set() -> None:
    fen = "1r2kr2/8/8/8/8/8/8/1R2KR2 w FBfb - 0 1"
    position = load_game("chess").position(Start(fen, "chess960"))
    assert position.fen == "1r2kr2/8/8/8/8/8/8/1R2KR2 w KQkq - 0 1"
    assert "e1b1" in position.legal_moves()
