"""How boards and pieces look: SVG markup that a page puts together and colours.

A unit is the side of a square, or the distance between two lines. The markup has no script, no
style and no id; presentation attributes give shapes, and a page gives colours to these classes:

    light dark          squares of chess, and the coordinates that stand on the other kind
    board-ground        the janggi board
    board-line          its lines: strokes
    coordinate          files and ranks
    cho han             janggi pieces of a side, made of
      piece-body          the octagon: fill and stroke
      piece-ring          a second outline that Han alone has: stroke
      piece-label         character or letter: fill
    white black         chess pieces, which bring their colours; on dark squares black shows by its
      piece-halo          light rim

Sides must differ without colour too: fill Cho's bodies darkly with light labels, Han's the other
way round.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from xml.etree import ElementTree


@dataclass(frozen=True, slots=True)
class Drawing:
    """A game's board and pieces; `dataclasses.asdict` gives its JSON form.

    Put `board` into a viewBox of `width` by `height`, then every piece of a FEN at
    (`left` + file, `top` + row), both counted from 0 at file a of the top rank.
    """

    width: float
    """Of the board with its margins, in units; so is all that follows."""
    height: float
    board: str
    """The empty board, a `<g>`."""
    files: str
    """File letters from left to right."""
    ranks: int
    """Number of ranks; rank 1 is at the bottom."""
    left: float
    """Where the centre of file a is, be it a square or a point."""
    top: float
    """Where the centre of the top rank is."""
    pieces: Mapping[str, Mapping[str, str]]
    """Label style -> FEN letter -> a `<g>` centred on 0,0, within half a unit of it."""
    labels: tuple[str, ...]
    """Label styles; the first is the default."""


CHESS_FILES = "abcdefgh"
_FIGURE_SIZE = 45
"""Side of the square that python-chess draws a piece on."""


def chess_drawing(figures: Mapping[str, str]) -> Drawing:
    """The chess board with `figures`: FEN letter -> SVG on a square of 45 by 45."""
    pieces = {letter: _chess_piece(letter, markup) for letter, markup in figures.items()}
    return Drawing(
        width=8,
        height=8,
        board=_chess_board(),
        files=CHESS_FILES,
        ranks=8,
        left=0.5,
        top=0.5,
        pieces={"figures": pieces},
        labels=("figures",),
    )


def _chess_board() -> str:
    dark = "".join(
        f"M{file} {row}h1v1h-1z" for row in range(8) for file in range(8) if (file + row) % 2
    )
    ranks = [
        _coordinate(str(8 - row), 0.09, row + 0.22, 0.18, _on_square(row + 1)) for row in range(8)
    ]
    letters = [
        _coordinate(letter, file + 0.92, 7.95, 0.18, _on_square(file))
        for file, letter in enumerate(CHESS_FILES)
    ]
    return (
        '<g><rect class="light" width="8" height="8"/>'
        f'<path class="dark" d="{dark}"/>{"".join(ranks + letters)}</g>'
    )


def _on_square(distance: int) -> str:
    """Classes of a coordinate in a square so many squares away from a1, which is dark."""
    return "coordinate dark" if distance % 2 else "coordinate light"


def _coordinate(text: str, x: float, y: float, size: float, classes: str) -> str:
    """`text` centred on `x`, its base line at `y`."""
    return (
        f'<text class="{classes}" x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="middle">'
        f"{text}</text>"
    )


def _chess_piece(letter: str, markup: str) -> str:
    figure = _without_styles(markup)
    side, halo = ("white", "") if letter.isupper() else ("black", _halo(figure))
    half = _FIGURE_SIZE / 2
    return (
        f'<g class="{side}" transform="scale({1 / _FIGURE_SIZE:.5f}) translate(-{half} -{half})">'
        f"{halo}{figure}</g>"
    )


def _without_styles(markup: str) -> str:
    """The same picture with attributes for styles, which a page's policy may block."""
    root = ElementTree.fromstring(markup)
    for element in root.iter():
        for name in ("id", "class"):
            element.attrib.pop(name, None)
        for declaration in element.attrib.pop("style", "").split(";"):
            name, colon, value = declaration.partition(":")
            if colon:
                element.set(name.strip(), value.strip())
    return ElementTree.tostring(root, encoding="unicode")


def _halo(figure: str) -> str:
    """The figure's silhouette in white, a little larger."""
    white = re.sub(r'"#[0-9a-f]+"', '"#fff"', figure)
    wide = re.sub(r'stroke-width="1.5"', 'stroke-width="4"', white)
    return f'<g class="piece-halo" opacity="0.6">{wide}</g>'


JANGGI_FILES = "abcdefghi"
_JANGGI_RANKS = 10
_LEFT, _TOP, _RIGHT, _BOTTOM = 0.9, 0.6, 0.6, 0.9
"""Margins: half a piece, and room for coordinates on the left and below."""
_MARKED_ROWS = {2: (1, 7), 3: (0, 2, 4, 6, 8), 6: (0, 2, 4, 6, 8), 7: (1, 7)}
"""Row from the top -> files of the points of cannons and soldiers."""

_JANGGI_LABELS = {
    "hanja": {"KARCNBP": "楚士車包馬象卒", "karcnbp": "漢士車包馬象兵"},
    "hangul": {"KARCNBP": "초사차포마상졸", "karcnbp": "한사차포마상병"},
    "letters": {"KARCNBP": "KARCHEP", "karcnbp": "KARCHEP"},
}
"""Label style -> FEN letters of a side -> a label for each."""
_SAME_LETTERS = {"H": "N", "E": "B", "h": "n", "e": "b"}
"""A FEN may write horse and elephant in either way."""
_HALF_WIDTHS = {"K": 0.47, "R": 0.4, "C": 0.4, "N": 0.4, "B": 0.4, "A": 0.32, "P": 0.32}
_LABEL_HEIGHTS = {"hanja": 1.2, "hangul": 1.2, "letters": 1.5}
"""Size of the font in half widths of the piece."""


def janggi_drawing() -> Drawing:
    """The janggi board, Cho below, with octagonal pieces in three sizes.

    Labels are outlines of glyphs, so no font is needed; `janggi_glyphs.json` says whose.
    """
    drawn = json.loads(files("games").joinpath("janggi_glyphs.json").read_text(encoding="utf-8"))
    glyphs, em = drawn["glyphs"], drawn["units_per_em"]
    pieces: dict[str, dict[str, str]] = {}
    for style, sides in _JANGGI_LABELS.items():
        of_style = {
            letter: _janggi_piece(letter, glyphs[label], _LABEL_HEIGHTS[style] / em)
            for letters, labels in sides.items()
            for letter, label in zip(letters, labels, strict=True)
        }
        pieces[style] = of_style | {also: of_style[as_] for also, as_ in _SAME_LETTERS.items()}
    width = _LEFT + len(JANGGI_FILES) - 1 + _RIGHT
    height = _TOP + _JANGGI_RANKS - 1 + _BOTTOM
    return Drawing(
        width=width,
        height=height,
        board=_janggi_board(width, height),
        files=JANGGI_FILES,
        ranks=_JANGGI_RANKS,
        left=_LEFT,
        top=_TOP,
        pieces=pieces,
        labels=tuple(pieces),
    )


def _janggi_piece(letter: str, glyph: str, label_scale: float) -> str:
    """`label_scale` is the size of a glyph's unit in half widths of the piece."""
    half = _HALF_WIDTHS[letter.upper()]
    side, ring = ("cho", "") if letter.isupper() else ("han", _octagon(half - 0.07, "ring", 0.025))
    return (
        f'<g class="{side}">{_octagon(half - 0.02, "body", 0.04)}{ring}'
        f'<path class="piece-label" transform="scale({half * label_scale:.3g})" d="{glyph}"/></g>'
    )


def _octagon(half: float, part: str, stroke: float) -> str:
    """With sides at `half` from the centre, which the stroke goes along."""
    far, near = f"{half:.3g}", f"{half * math.tan(math.pi / 8):.3g}"
    return (
        f'<path class="piece-{part}" fill="none" stroke-width="{stroke}" d="M-{near} -{far}H{near}'
        f'L{far} -{near}V{near}L{near} {far}H-{near}L-{far} {near}V-{near}z"/>'
    )


def _janggi_board(width: float, height: float) -> str:
    ranks = [
        _coordinate(str(_JANGGI_RANKS - row), 0.22, _TOP + row + 0.1, 0.28, "coordinate")
        for row in range(_JANGGI_RANKS)
    ]
    letters = [
        _coordinate(letter, _LEFT + file, height - 0.13, 0.28, "coordinate")
        for file, letter in enumerate(JANGGI_FILES)
    ]
    return (
        f'<g><rect class="board-ground" width="{width:g}" height="{height:g}"/>'
        f'<path class="board-line" fill="none" stroke-width="0.03" stroke-linecap="square"'
        f' transform="translate({_LEFT} {_TOP})" d="{"".join(_janggi_lines())}"/>'
        f"{''.join(ranks + letters)}</g>"
    )


def _janggi_lines() -> Iterator[str]:
    """Path data with file a of the top rank at 0,0: ranks, files, palaces, marked points."""
    yield from (f"M0 {row}h8" for row in range(_JANGGI_RANKS))
    yield from (f"M{file} 0v9" for file in range(len(JANGGI_FILES)))
    yield from (f"M3 {row}l2 2m0 -2l-2 2" for row in (0, 7))
    for row, marked in _MARKED_ROWS.items():
        yield from (f"M{file - 0.1:g} {row - 0.1:g}l.2 .2m0 -.2l-.2 .2" for file in marked)
