"""What stands on a board of the page, and what its FEN says."""

import re
from typing import NamedTuple

from playwright.sync_api import Locator

from games import Drawing, load_game

READ = """
board => {
  const uses = [...board.querySelectorAll(":scope > g > use")];
  const marks = [...board.querySelectorAll(".mark")];
  const shown = marks.filter((mark) => mark.style.display !== "none");
  return {
    pieces: uses.map((use) => [use.getAttribute("href"), use.style.transform]),
    marks: shown.map((mark) => [mark.x.baseVal.value + 0.5, mark.y.baseVal.value + 0.5]),
  };
}
"""


class Square(NamedTuple):
    """Counted from 0 at the top left."""

    file: int
    row: int


class Picture(NamedTuple):
    """A board as it is drawn."""

    pieces: dict[Square, str]
    """FEN letters."""
    marks: tuple[Square, ...]
    """From and to of the last move."""


def drawing(game: str) -> Drawing:
    found = getattr(load_game(game), "drawing", None)
    assert isinstance(found, Drawing)
    return found


def picture_of(board: Locator, game: str) -> Picture:
    """Read all at once, so that a move in between does not matter."""
    plan, read = drawing(game), board.evaluate(READ)

    def square(x: float, y: float) -> Square:
        return Square(round(x - plan.left), round(y - plan.top))

    pieces = {}
    for href, transform in read["pieces"]:
        found = re.fullmatch(r"translate\(([\d.]+)px, ([\d.]+)px\)", transform)
        assert found, transform
        pieces[square(float(found[1]), float(found[2]))] = chr(int(href.rpartition("-")[2]))
    assert len(pieces) == len(read["pieces"]), "two pieces on one square"
    return Picture(pieces, tuple(square(*mark) for mark in read["marks"]))


def pieces_of(fen: str) -> dict[Square, str]:
    pieces = {}
    for row, text in enumerate(fen.split()[0].split("/")):
        file = 0
        for token in text:
            if token.isdigit():
                file += int(token)
            else:
                pieces[Square(file, row)] = token
                file += 1
    return pieces
