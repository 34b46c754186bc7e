"""Record files: read back whole, whatever stands in names and comments."""

import io
import re

import chess.pgn
import pytest

from games import GAMES, GameRecord, Position, Start, load_game

HOSTILE = [
    'a "quoted" \\ name',
    "two\nlines\r\nand\x00more",
    '} 1. e4 {"]\n[Event "other"]',
    "% not a comment\n; nor this",
    "[%clk 0:00:01] $1 (1. d4) *",
    "긴 이름 🙂",
    " ".join(["long"] * 60),
    "",
]


def played(name: str, plies: int) -> Position:
    game = load_game(name)
    position = game.position(game.openings("start", game.rulesets[0])[0])
    for number in range(plies):
        legal = position.legal_moves()
        position = position.play(legal[(7 * number + 3) % len(legal)])
    return position


def record_of(position: Position, words: str, *, is_finished: bool = True) -> GameRecord:
    return GameRecord(
        start=position.start,
        moves=position.moves,
        is_finished=is_finished,
        winner=0,
        headers={"Event": words, "First": words, "Second": "two", "Game": "x", "Detail": words},
        comments=tuple(words for _ in position.moves),
    )


@pytest.mark.parametrize("words", HOSTILE)
def test_a_chess_record_is_read_back(words: str) -> None:
    position = played("chess", 30)
    text = load_game("chess").record(record_of(position, words))
    handle = io.StringIO(f"{text}\n\n{text}\n")
    for _ in range(2):
        game = chess.pgn.read_game(handle)
        assert game is not None
        assert not game.errors
        assert tuple(move.uci() for move in game.mainline_moves()) == position.moves
        assert game.headers["Result"] == "1-0"
        assert game.headers["Black"] == "two"
        assert game.headers["White"] == game.headers["Detail"]
        assert not any(node.variations[1:] for node in game.mainline())
        spoken = [node.comment.split() for node in game.mainline()]
        assert (
            spoken == [words.replace("{", "(").replace("}", ")").replace("\x00", " ").split()] * 30
        )
    assert chess.pgn.read_game(handle) is None


def test_a_chess_record_keeps_its_start() -> None:
    game = load_game("chess")
    start = game.openings("builtin", "chess960")[3]
    position = game.position(start)
    position = position.play(position.legal_moves()[0])
    read = chess.pgn.read_game(io.StringIO(game.record(record_of(position, "w"))))
    assert read is not None
    assert read.board().fen() == start.fen
    assert read.board().chess960
    assert [move.uci() for move in read.mainline_moves()] == list(position.moves)


@pytest.mark.parametrize("words", HOSTILE)
def test_a_janggi_record_is_read_back(words: str) -> None:
    position = played("janggi", 30)
    text = load_game("janggi").record(record_of(position, words))
    head, body = text.split("\n\n")
    headers = dict(re.findall(r'^\[(\w+) "([^"]*)"\]$', head, re.MULTILINE))
    assert len(headers) == len(head.splitlines())
    assert headers["Han"] == "two"
    replayed = load_game("janggi").position(Start(headers["FEN"], headers["RuleSet"]))
    *lines, result = body.splitlines()
    assert result == "1-0"
    for line in lines:
        match = re.fullmatch(r"(\d+)\. (\S+) (\S+)(?: \{([^{}]*)\})?", line)
        assert match is not None
        assert int(match[1]) == replayed.ply + 1
        assert replayed.parse(match[2]) == replayed.parse(match[3]) == match[2]
        replayed = replayed.play(match[2])
    assert replayed.moves == position.moves


@pytest.mark.parametrize("name", GAMES)
def test_a_record_of_an_unfinished_game(name: str) -> None:
    position = played(name, 3)
    text = load_game(name).record(record_of(position, "w", is_finished=False))
    assert text.rstrip().endswith("*")
    drawn = GameRecord(position.start, position.moves, True, None, {}, ("", "", ""))
    assert load_game(name).record(drawn).rstrip().endswith("1/2-1/2")
