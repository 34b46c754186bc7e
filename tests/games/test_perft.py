"""Move counts: chess from published suites, janggi from Fairy-Stockfish's suite and the set-ups.

Chess: https://www.chessprogramming.org/Perft_Results and .../Chess960_Perft_Results. Janggi: the
start and the two others from https://github.com/fairy-stockfish/Fairy-Stockfish/blob/master/tests/perft.sh;
the 16 set-ups computed with pyffish 0.0.90 and Fairy-Stockfish 11.1, which agree.
"""

import pytest

from games import Position, Start, load_game
from games.janggi import SETUPS, setup_fen


def perft(position: Position, depth: int) -> int:
    moves = position.legal_moves()
    if depth == 1:
        return len(moves)
    return sum(perft(position.play(move), depth - 1) for move in moves)


CHESS = [
    ("start", "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1", 8902, 197281),
    (
        "kiwipete",
        "r3k2r/p1ppqpb1/bn2pnp1/3PN3/1p2P3/2N2Q1p/PPPBBPPP/R3K2R w KQkq - 0 1",
        97862,
        4085603,
    ),
    ("position 3", "8/2p5/3p4/KP5r/1R3p1k/8/4P1P1/8 w - - 0 1", 2812, 43238),
    (
        "position 4",
        "r3k2r/Pppp1ppp/1b3nbN/nP6/BBP1P3/q4N2/Pp1P2PP/R2Q1RK1 w kq - 0 1",
        9467,
        422333,
    ),
    ("position 5", "rnbq1k1r/pp1Pbppp/2p5/8/2B5/8/PPP1NnPP/RNBQK2R w KQ - 1 8", 62379, 2103487),
    (
        "position 6",
        "r4rk1/1pp1qppp/p1np1n2/2b1p1B1/2B1P1b1/P1NP1N2/1PP1QPPP/R4RK1 w - - 0 10",
        89890,
        3894594,
    ),
]
CHESS960 = [
    ("bqnb1rkr/pp3ppp/3ppn2/2p5/5P2/P2P4/NPP1P1PP/BQ1BNRKR w HFhf - 2 9", 12189, 326672),
    ("2nnrbkr/p1qppppp/8/1ppb4/6PP/3PP3/PPP2P2/BQNNRBKR w HEhe - 1 9", 18002, 667366),
]
DEPTH_3 = {"HEEH": 33000, "EHHE": 33336, "HEHE": 33168, "EHEH": 33168}
DEPTH_4 = {
    "HEEH": (1065277, 1076353, 1070815, 1070815),
    "EHHE": (1076739, 1087883, 1082311, 1082311),
    "HEHE": (1071008, 1082118, 1076567, 1076559),
    "EHEH": (1071008, 1082118, 1076559, 1076567),
}
FROM_FENS = [
    ("1n1kaabn1/cr2N4/5C1c1/p1pNp3p/9/9/P1PbP1P1P/3r1p3/4A4/R1BA1KB1R b - - 0 1", 76763),
    ("1Pbcka3/3nNn1c1/N2CaC3/1pB6/9/9/5P3/9/4K4/9 w - - 0 23", 151202),
]
OTHER_RULES = [
    ("janggicasual", "HEEH", "HEEH", 33316, 1083563),
    ("janggicasual", "EHHE", "EHHE", None, 1104143),
    ("janggicasual", "HEHE", "HEHE", None, 1093816),
    ("janggicasual", "EHEH", "EHEH", None, 1093816),
    ("janggimodern", "HEEH", "HEEH", None, 1083563),
    ("janggitraditional", "HEEH", "HEEH", None, 1065277),
]


@pytest.mark.parametrize(("name", "fen", "depth_3", "depth_4"), CHESS, ids=lambda v: str(v)[:10])
@pytest.mark.timeout(120)
def test_chess(name: str, fen: str, depth_3: int, depth_4: int) -> None:
    assert perft(load_game("chess").position(Start(fen, "standard")), 3) == depth_3


@pytest.mark.perft
@pytest.mark.parametrize(("name", "fen", "depth_3", "depth_4"), CHESS, ids=lambda v: str(v)[:10])
@pytest.mark.timeout(600)
def test_chess_depth_4(name: str, fen: str, depth_3: int, depth_4: int) -> None:
    assert perft(load_game("chess").position(Start(fen, "standard")), 4) == depth_4


@pytest.mark.parametrize(("fen", "depth_3", "depth_4"), CHESS960)
def test_chess960(fen: str, depth_3: int, depth_4: int) -> None:
    assert perft(load_game("chess").position(Start(fen, "chess960")), 3) == depth_3


@pytest.mark.perft
@pytest.mark.parametrize(("fen", "depth_3", "depth_4"), CHESS960)
@pytest.mark.timeout(600)
def test_chess960_depth_4(fen: str, depth_3: int, depth_4: int) -> None:
    assert perft(load_game("chess").position(Start(fen, "chess960")), 4) == depth_4


@pytest.mark.parametrize("han", SETUPS)
@pytest.mark.parametrize("cho", SETUPS)
def test_janggi_setups(cho: str, han: str) -> None:
    position = load_game("janggi").position(Start(setup_fen(cho, han), "janggi"))
    assert [perft(position, depth) for depth in (1, 2, 3)] == [32, 1024, DEPTH_3[cho]]


@pytest.mark.perft
@pytest.mark.parametrize("han", SETUPS)
@pytest.mark.parametrize("cho", SETUPS)
@pytest.mark.timeout(600)
def test_janggi_setups_depth_4(cho: str, han: str) -> None:
    position = load_game("janggi").position(Start(setup_fen(cho, han), "janggi"))
    assert perft(position, 4) == DEPTH_4[cho][SETUPS.index(han)]


@pytest.mark.perft
@pytest.mark.parametrize(("fen", "depth_4"), FROM_FENS)
@pytest.mark.timeout(600)
def test_janggi_positions_depth_4(fen: str, depth_4: int) -> None:
    assert perft(load_game("janggi").position(Start(fen, "janggi")), 4) == depth_4


@pytest.mark.perft
@pytest.mark.parametrize(("rules", "cho", "han", "depth_3", "depth_4"), OTHER_RULES)
@pytest.mark.timeout(600)
def test_janggi_other_rules_depth_4(
    rules: str, cho: str, han: str, depth_3: int | None, depth_4: int
) -> None:
    position = load_game("janggi").position(Start(setup_fen(cho, han), rules))
    if depth_3 is not None:
        assert perft(position, 3) == depth_3
    assert perft(position, 4) == depth_4
