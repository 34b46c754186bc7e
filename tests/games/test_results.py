"""How games end: each end once, its neighbour that goes on, and which comes first."""

from games import Position, Result, Start, Termination, load_game

CHESS_START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
JANGGI_START = "rnba1abnr/4k4/1c5c1/p1p1p1p1p/9/9/P1P1P1P1P/1C5C1/4K4/RNBA1ABNR w - - 0 1"
KNIGHTS = ["g1f3", "g8f6", "f3g1", "f6g8"]


def play(name: str, ruleset: str, fen: str, moves: list[str]) -> Position:
    position = load_game(name).position(Start(fen, ruleset))
    for move in moves:
        position = position.play(position.parse(move))
    return position


def end(name: str, ruleset: str, fen: str, moves: list[str]) -> Result:
    """The result after `moves`, which must not come earlier."""
    before = play(name, ruleset, fen, moves[:-1])
    assert not moves or before.result() is None
    result = play(name, ruleset, fen, moves).result()
    assert result is not None
    return result


def test_threefold_repetition_ends_chess_when_it_occurs() -> None:
    result = end("chess", "standard", CHESS_START, KNIGHTS * 2)
    assert result.termination is Termination.THREEFOLD_REPETITION
    assert result.winner is None
    assert result.scores is None


def test_castling_rights_are_part_of_a_chess_position() -> None:
    fen = "r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1"
    rooks = ["h1h2", "h8h7", "h2h1", "h7h8"]
    assert play("chess", "standard", fen, rooks * 2).result() is None
    assert end("chess", "standard", fen, [*rooks * 2, "h1h2", "h8h7"]).termination is (
        Termination.THREEFOLD_REPETITION
    )


def test_an_en_passant_square_without_a_capture_is_not_part_of_a_chess_position() -> None:
    after = ["g8f6", "g1f3", "f6g8", "f3g1"]
    result = end("chess", "standard", CHESS_START, ["e2e4", *after, *after])
    assert result.termination is Termination.THREEFOLD_REPETITION


def test_a_pawn_move_forgets_repetitions() -> None:
    position = play("chess", "standard", CHESS_START, [*KNIGHTS, "e2e4", "e7e5", *KNIGHTS])
    assert position.result() is None


def test_fifty_moves_end_chess() -> None:
    fen = "8/8/8/3k4/8/3K4/3R4/8 w - - 99 100"
    result = end("chess", "standard", fen, ["d2d1"])
    assert result.termination is Termination.FIFTY_MOVES


def test_checkmate_comes_before_fifty_moves() -> None:
    result = end("chess", "standard", "7k/8/6K1/8/8/8/8/R7 w - - 99 120", ["a1a8"])
    assert result.termination is Termination.CHECKMATE
    assert result.winner == 0
    assert result.detail == "White wins by checkmate"


def test_stalemate_is_a_draw() -> None:
    position = play("chess", "standard", "7k/5Q2/6K1/8/8/8/8/8 b - - 0 1", [])
    result = position.result()
    assert result is not None
    assert result.termination is Termination.STALEMATE
    assert position.legal_moves() == ()


def test_bare_kings_are_a_draw() -> None:
    result = play("chess", "standard", "8/8/8/3k4/3Q4/8/8/K7 b - - 0 1", ["d5d4"]).result()
    assert result is not None
    assert result.termination is Termination.INSUFFICIENT_MATERIAL


def test_janggi_mate() -> None:
    result = end("janggi", "janggi", "3k5/9/9/9/9/9/9/9/R3R4/4K4 w - - 0 1", ["a2d2"])
    assert result == Result(0, Termination.CHECKMATE, (26.0, 1.5), "Cho wins by checkmate")


def test_two_passes_by_rule_set() -> None:
    for ruleset, winner in (
        ("janggi", 1),
        ("janggimodern", 1),
        ("janggicasual", None),
        ("janggitraditional", None),
    ):
        result = end("janggi", ruleset, JANGGI_START, ["pass", "pass"])
        assert result.termination is Termination.DOUBLE_PASS
        assert (result.winner, result.scores) == (winner, (72.0, 73.5))


def test_accepted_bikjang_by_rule_set() -> None:
    moves = ["e4d4", "e7d7", "pass"]
    accepted = end("janggi", "janggi", JANGGI_START, moves)
    assert (accepted.termination, accepted.winner) == (Termination.BIKJANG, 1)
    drawn = end("janggi", "janggitraditional", JANGGI_START, moves)
    assert (drawn.termination, drawn.winner) == (Termination.BIKJANG, None)
    for ruleset in ("janggimodern", "janggicasual"):
        assert play("janggi", ruleset, JANGGI_START, moves).result() is None


def test_a_pass_may_open_nothing_and_end_nothing() -> None:
    position = play("janggi", "janggi", JANGGI_START, ["pass", "a7a6", "pass"])
    assert position.result() is None
    assert "pass" in position.legal_moves()


def test_repetition_by_rule_set() -> None:
    moves = ["e2e3", "e9e8", "e3e2", "e8e9"]
    for ruleset, times, winner in (
        ("janggi", 2, 1),
        ("janggimodern", 3, 1),
        ("janggicasual", 2, None),
        ("janggitraditional", 2, None),
    ):
        result = end("janggi", ruleset, JANGGI_START, moves * times)
        assert (result.termination, result.winner) == (Termination.REPETITION, winner)


def test_no_capture_by_rule_set() -> None:
    for ruleset, limit, winner in (
        ("janggi", 100, 1),
        ("janggimodern", 200, 1),
        ("janggicasual", 100, None),
        ("janggitraditional", 100, None),
    ):
        fen = JANGGI_START.replace(" 0 1", f" {limit - 1} 60")
        result = end("janggi", ruleset, fen, ["a4a5"])
        assert (result.termination, result.winner) == (Termination.NO_CAPTURE, winner)


def test_janggi_mate_comes_before_no_capture() -> None:
    result = end("janggi", "janggi", "3k5/9/9/9/9/9/9/9/R3R4/4K4 w - - 99 60", ["a2d2"])
    assert result.termination is Termination.CHECKMATE


def test_perpetual_check_loses() -> None:
    fen = "4k4/9/9/9/9/9/9/9/R8/5K3 w - - 0 1"
    moves = ["a2e2", "e10d10", "e2d2", "d10e10", "d2e2", "e10d10", "e2d2", "d10e10", "d2e2"]
    result = end("janggi", "janggi", fen, moves)
    assert (result.termination, result.winner) == (Termination.PERPETUAL_CHECK, 1)


def test_perpetual_check_by_both_is_a_repetition() -> None:
    fen = "4c2n1/3k1c3/5b3/9/9/9/9/4RR2n/4K4/4B4 w - - 0 1"
    cycle = ["e3d3", "d9e9", "d3e3", "e9d9"]
    result = end("janggi", "janggi", fen, cycle * 2)
    assert (result.termination, result.winner) == (Termination.REPETITION, 0)


def test_moving_to_and_fro_loses_in_janggimodern_alone() -> None:
    han = ["a7b7", "b10c8", "h10g8", "i7h7", "c7d7", "g7f7"]
    cho = ["a1a2", "a2a1", "a1a2", "a2a1", "a1a2"]
    moves = [move for pair in zip(cho, han, strict=False) for move in pair][:9]
    result = end("janggi", "janggimodern", JANGGI_START, moves)
    assert (result.termination, result.winner) == (Termination.MOVE_REPETITION, 1)
    assert play("janggi", "janggi", JANGGI_START, moves).result() is None
    late_pass = [*moves[:8], "pass", han[4], "a1a2"]
    assert end("janggi", "janggimodern", JANGGI_START, late_pass).winner == 1
    general = ["e2e3", "e3e2", "e2e3", "e3e2", "e2e3"]
    shuffled = [move for pair in zip(general, han, strict=False) for move in pair]
    assert play("janggi", "janggimodern", JANGGI_START, shuffled).result() is None


def test_bare_generals_by_rule_set() -> None:
    fen = "4k4/9/9/9/9/9/9/3p5/3KA4/9 w - - 0 1"
    for ruleset, winner in (("janggi", 0), ("janggimodern", 0), ("janggicasual", None)):
        result = end("janggi", ruleset, fen, ["d2d3"])
        assert (result.termination, result.winner) == (Termination.BARE_GENERALS, winner)
        assert result.scores == (3.0, 1.5)


def test_the_ply_cap() -> None:
    chess = load_game("chess")
    result = chess.adjudicate_ply_cap(play("chess", "standard", CHESS_START, ["e2e4"]))
    assert (result.winner, result.termination) == (None, Termination.PLY_CAP)
    janggi = load_game("janggi")
    for ruleset in janggi.rulesets:
        result = janggi.adjudicate_ply_cap(play("janggi", ruleset, JANGGI_START, ["a4a5"]))
        assert (result.winner, result.termination) == (1, Termination.PLY_CAP)
        assert result.scores == (72.0, 73.5)


def test_material() -> None:
    assert play("chess", "standard", CHESS_START, []).material(0) == 39.0
    assert play("janggi", "janggi", JANGGI_START, []).material(1) == 72.0


def test_a_start_may_have_the_second_side_to_move() -> None:
    position = play("janggi", "janggi", JANGGI_START.replace(" w ", " b "), ["a7a6"])
    assert (position.side, position.ply) == (0, 1)
    assert position.fen.endswith(" w - - 1 2")
    position = play("chess", "standard", CHESS_START.replace(" w ", " b "), [])
    assert position.side == 1
