"""One whole game of each kind, replayed line by line from its file."""

from pathlib import Path

import pytest

from games import Position, Start, load_game

FOLDER = Path(__file__).parents[1] / "data/games"


def shown(position: Position) -> str:
    scores = position.scores()
    points = "none" if scores is None else f"{scores[0]:g}-{scores[1]:g}"
    check = "check" if position.in_check else "-"
    return f"{position.fen} | {len(position.legal_moves())} | {check} | {points}"


@pytest.mark.parametrize("name", ["chess", "janggi"])
def test_a_whole_game(name: str) -> None:
    game = load_game(name)
    text = (FOLDER / f"playthrough_{name}.txt").read_text(encoding="utf-8")
    head, body, end = text.removesuffix("\n").split("\n\n")
    fields = dict(
        line.split(": ", 1) for line in head.splitlines() if line[0].islower() and ": " in line
    )
    position: Position = game.position(Start(fields["start"], fields["ruleset"]))
    for line in body.splitlines():
        assert position.result() is None
        number, move, notation, after = line.split(" | ", 3)
        assert position.parse(move) == position.parse(notation) == move
        assert position.notation(move, game.record_notation) == notation
        position = position.play(move)
        assert f"{position.ply} | {shown(position)}" == f"{number} | {after}"
    result = position.result()
    assert result is not None
    assert f"result: {result.winner} | {result.termination} | {result.detail}" == end
