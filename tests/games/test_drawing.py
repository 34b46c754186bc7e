"""How the games are drawn: every piece is there, the markup is harmless, things stand in place."""

import dataclasses
import json
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from games import GAMES, Drawing, Drawn, Game
from games.janggi_board import FEN_LETTERS

LETTERS = {"chess": set("KQRBNPkqrbnp"), "janggi": {*FEN_LETTERS, *"HEhe"} - {"."}}
SIDES = {"chess": ("white", "black"), "janggi": ("cho", "han")}
TAGS = {"g", "path", "circle", "rect", "text"}
ATTRIBUTES = {
    *("class", "d", "transform", "cx", "cy", "r", "x", "y", "width", "height"),
    *("fill", "fill-rule", "opacity", "font-size", "text-anchor"),
    *("stroke", "stroke-width", "stroke-linecap", "stroke-linejoin"),
}


def drawing_of(game: str) -> Drawing:
    drawn = GAMES[game]
    assert isinstance(drawn, Drawn)
    return drawn.drawing


def markup_of(drawing: Drawing) -> list[str]:
    return [drawing.board, *(piece for set_ in drawing.pieces.values() for piece in set_.values())]


def usual_placement(game: Game) -> list[str]:
    """Rows of the start position from the top, a letter or a dot for each square."""
    start = game.openings("start", game.rulesets[0])[0]
    rows = start.fen.split()[0].split("/")
    return [re.sub(r"\d", lambda empty: "." * int(empty[0]), row) for row in rows]


def part(piece: str, name: str) -> ElementTree.Element | None:
    return ElementTree.fromstring(piece).find(f"path[@class='piece-{name}']")


def half_width(piece: str) -> float:
    """From the centre to the outside of the octagon's stroke."""
    body = part(piece, "body")
    assert body is not None
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", body.attrib["d"])]
    assert max(numbers) == -min(numbers)
    return round(max(numbers) + float(body.attrib["stroke-width"]) / 2, 3)


def segments(path: str) -> set[frozenset[tuple[float, float]]]:
    """Ends of the straight lines of a path made of M, m, l, h and v."""
    x = y = 0.0
    found = set()
    for command, text in re.findall(r"([A-Za-z])([^A-Za-z]*)", path):
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", text)]
        old = (round(x, 3), round(y, 3))
        match command:
            case "M":
                x, y = numbers
            case "m" | "l":
                x, y = x + numbers[0], y + numbers[1]
            case "h":
                x += numbers[0]
            case "v":
                y += numbers[0]
            case _:
                pytest.fail(f"unexpected command {command}")
        if command not in "Mm":
            found.add(frozenset({old, (round(x, 3), round(y, 3))}))
    return found


def line(x: float, y: float, to_x: float, to_y: float) -> frozenset[tuple[float, float]]:
    return frozenset({(x, y), (to_x, to_y)})


@pytest.fixture(scope="module")
def janggi_lines() -> set[frozenset[tuple[float, float]]]:
    """With file a of the top rank at 0,0."""
    drawing = drawing_of("janggi")
    lines = ElementTree.fromstring(drawing.board).find("path[@class='board-line']")
    assert lines is not None
    assert lines.attrib["transform"] == f"translate({drawing.left} {drawing.top})"
    return segments(lines.attrib["d"])


@pytest.mark.parametrize("name", LETTERS)
def test_every_fen_letter_has_a_piece_in_every_label_style(name: str) -> None:
    drawing = drawing_of(name)
    assert tuple(drawing.pieces) == drawing.labels
    for pieces in drawing.pieces.values():
        assert set(pieces) == LETTERS[name]
        for letter, piece in pieces.items():
            side = SIDES[name][letter.islower()]
            assert ElementTree.fromstring(piece).attrib["class"] == side


def test_the_label_styles() -> None:
    assert drawing_of("chess").labels == ("figures",)
    assert drawing_of("janggi").labels == ("hanja", "hangul", "letters")


@pytest.mark.parametrize("name", LETTERS)
def test_the_markup_is_plain(name: str) -> None:
    """A strict content security policy blocks scripts and styles; ids would be there many times."""
    for markup in markup_of(drawing_of(name)):
        root = ElementTree.fromstring(markup)
        assert root.tag == "g"
        assert {element.tag for element in root.iter()} <= TAGS
        assert {key for element in root.iter() for key in element.attrib} <= ATTRIBUTES


@pytest.mark.parametrize("name", LETTERS)
def test_the_board_has_no_colours(name: str) -> None:
    board = ElementTree.fromstring(drawing_of(name).board)
    assert {element.get("fill") for element in board.iter()} <= {None, "none"}
    assert {element.get("stroke") for element in board.iter()} == {None}


@pytest.mark.parametrize(("name", "most"), [("chess", 20_000), ("janggi", 40_000)])
def test_the_json_form_is_small(name: str, most: int) -> None:
    drawing = drawing_of(name)
    text = json.dumps(dataclasses.asdict(drawing), ensure_ascii=False)
    assert len(text.encode()) < most
    assert json.loads(text)["pieces"] == drawing.pieces


@pytest.mark.parametrize("name", LETTERS)
def test_the_start_position_stands_on_the_board(name: str) -> None:
    drawing = drawing_of(name)
    rows = usual_placement(GAMES[name])
    assert len(rows) == drawing.ranks
    assert {len(row) for row in rows} == {len(drawing.files)}
    assert {letter for row in rows for letter in row} - {"."} <= LETTERS[name]
    far_x = drawing.left + len(drawing.files) - 1
    far_y = drawing.top + drawing.ranks - 1
    assert min(drawing.left, drawing.top, drawing.width - far_x, drawing.height - far_y) >= 0.5


@pytest.mark.parametrize("name", LETTERS)
def test_coordinates_are_beside_their_files_and_ranks(name: str) -> None:
    drawing = drawing_of(name)
    texts = ElementTree.fromstring(drawing.board).findall("text")
    at = {text.text: (float(text.attrib["x"]), float(text.attrib["y"])) for text in texts}
    assert len(at) == len(texts) == len(drawing.files) + drawing.ranks
    for file, letter in enumerate(drawing.files):
        assert abs(at[letter][0] - drawing.left - file) < 0.5
    for rank in range(1, drawing.ranks + 1):
        assert abs(at[str(rank)][1] - drawing.top - (drawing.ranks - rank)) < 0.5
    assert {y for x, y in (at[letter] for letter in drawing.files)} == {at["a"][1]}
    assert 0 < at["1"][0] < drawing.left < drawing.height - 0.5 < at["a"][1] < drawing.height


def test_a1_is_dark() -> None:
    dark = ElementTree.fromstring(drawing_of("chess").board).find("path[@class='dark']")
    assert dark is not None
    corners = set(re.findall(r"M(\d) (\d)", dark.attrib["d"]))
    assert len(corners) == 32
    assert ("0", "7") in corners
    assert ("7", "7") not in corners


def test_a_chess_coordinate_stands_on_the_other_kind_of_square() -> None:
    texts = ElementTree.fromstring(drawing_of("chess").board).findall("text")
    kinds = {text.text: text.attrib["class"].removeprefix("coordinate ") for text in texts}
    assert (kinds["a"], kinds["h"], kinds["1"], kinds["8"]) == ("light", "dark", "light", "dark")
    assert all(kinds[one] != kinds[next_] for one, next_ in pairwise("abcdefgh"))


def test_black_chess_pieces_alone_have_a_halo() -> None:
    pieces = drawing_of("chess").pieces["figures"]
    assert {letter for letter, piece in pieces.items() if "piece-halo" in piece} == set("kqrbnp")


def test_the_eye_of_the_knight_keeps_its_colour() -> None:
    """python-chess gives it, and the knight alone, in style attributes."""
    assert 'fill="#ececec"' in drawing_of("chess").pieces["figures"]["n"]


def test_janggi_pieces_have_three_sizes() -> None:
    for pieces in drawing_of("janggi").pieces.values():
        sizes = {letter: half_width(piece) for letter, piece in pieces.items()}
        assert {sizes[letter] for letter in "Kk"} == {0.47}
        assert {sizes[letter] for letter in "RCNBHErcnbhe"} == {0.4}
        assert {sizes[letter] for letter in "APap"} == {0.32}


def test_han_has_a_second_outline() -> None:
    for pieces in drawing_of("janggi").pieces.values():
        rings = {letter for letter, piece in pieces.items() if part(piece, "ring") is not None}
        assert rings == set("karcnbphe")


def test_a_side_s_janggi_labels_differ() -> None:
    for pieces in drawing_of("janggi").pieces.values():
        for kinds in ("KARCNBP", "karcnbp"):
            labels = {
                label.attrib["d"]
                for kind in kinds
                if (label := part(pieces[kind], "label")) is not None
            }
            assert len(labels) == 7


def test_general_and_soldier_are_named_after_their_side() -> None:
    for style, pieces in drawing_of("janggi").pieces.items():
        labels = {letter: part(piece, "label") for letter, piece in pieces.items()}
        shapes = {
            letter: label.attrib["d"] for letter, label in labels.items() if label is not None
        }
        same = {letter for letter in "KARCNBP" if shapes[letter] == shapes[letter.lower()]}
        assert same == set("KARCNBP" if style == "letters" else "ARCNB")


def test_the_janggi_board_has_its_lines_and_no_river(
    janggi_lines: set[frozenset[tuple[float, float]]],
) -> None:
    assert {line(0, row, 8, row) for row in range(10)} <= janggi_lines
    assert {line(file, 0, file, 9) for file in range(9)} <= janggi_lines


def test_both_palaces_have_their_diagonals(
    janggi_lines: set[frozenset[tuple[float, float]]],
) -> None:
    long = {
        ends
        for ends in janggi_lines
        for (x, y), (to_x, to_y) in [tuple(ends)]
        if abs(x - to_x) == abs(y - to_y) == 2
    }
    assert long == {line(3, 0, 5, 2), line(5, 0, 3, 2), line(3, 7, 5, 9), line(5, 7, 3, 9)}


def test_points_of_cannons_and_soldiers_are_marked(
    janggi_lines: set[frozenset[tuple[float, float]]],
) -> None:
    centres = sorted(
        ((x + to_x) / 2, (y + to_y) / 2)
        for (x, y), (to_x, to_y) in map(tuple, janggi_lines)
        if abs(x - to_x) < 1 and abs(y - to_y) < 1
    )
    rows = usual_placement(GAMES["janggi"])
    marked = [
        (file, y) for y, row in enumerate(rows) for file, piece in enumerate(row) if piece in "PpCc"
    ]
    assert centres == sorted(marked * 2)


def test_a_drawing_is_made_once() -> None:
    for game in GAMES:
        assert drawing_of(game) is drawing_of(game)
