"""Janggi moves as text: coordinates, the association's numbers in Korean or letters, short forms.

The association counts rows 1 to 9 and 0 from Han's edge and columns 1 to 9 from Cho's left, row
first: e2 is 95, a10 is 11, i1 is 09. A full move names origin, piece and target: 02마83.
"""

import re
from dataclasses import dataclass

from games.base import NotationError, Side
from games.janggi_board import (
    CANNON,
    CHARIOT,
    ELEPHANT,
    GENERAL,
    GUARD,
    HORSE,
    SOLDIER,
    SQUARE_NAMES,
    SQUARES,
)

PASS = "pass"
SQUARE_NUMBERS = tuple(f"{(10 - square // 9) % 10}{square % 9 + 1}" for square in range(90))
_NUMBERED = {number: square for square, number in enumerate(SQUARE_NUMBERS)}

KOREAN_NAMES = (
    ("", "궁", "사", "마", "상", "차", "포", "졸"),
    ("", "궁", "사", "마", "상", "차", "포", "병"),
)
LETTERS = "?KAHERCP"
_KINDS = {
    GENERAL: "궁왕장초한楚漢將K",
    GUARD: "사士A",
    HORSE: "마馬HN",
    ELEPHANT: "상象EB",
    CHARIOT: "차車R",
    CANNON: "포包C",
    SOLDIER: "졸병卒兵P",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
_HANGUL = "".join(name for name in _KIND_OF if name not in "KAHNEBRCP")

_DASHES = str.maketrans(dict.fromkeys("‐‑‒–—―−－~→", "-") | {"×": "x", "\u00a0": " "})
_PASSES = frozenset({"pass", "한수쉼", "한수쉬기", "쉼"})
_SUFFIX = r"(?:장군|멍군|외통|[+#!?.])*"
_SQUARE = r"([a-i])(10|[1-9])"
_COORDINATES = re.compile(rf"{_SQUARE}\s*[-x:]?\s*{_SQUARE}{_SUFFIX}")
_KOREAN = re.compile(rf"(\d\d)\s*([{_HANGUL}])\s*[-x]?\s*(\d\d){_SUFFIX}")
_LETTERED = re.compile(rf"([KAHNEBRCP])\s*(\d\d)\s*[-x]?\s*(\d\d){_SUFFIX}", re.IGNORECASE)
_SHORT = re.compile(rf"([KAHNEBRCP])([a-i])?(10|[1-9])?[-x]?{_SQUARE}{_SUFFIX}")
_NUMBER_BEFORE = re.compile(r"\d{1,4}\s*(?:\.{1,3}|…)\s*")
_HINT = "write two squares such as a4a5 or b1c3, or pass"


@dataclass(frozen=True, slots=True)
class Spoken:
    """What a text says about a move; None where it does not say."""

    target: int
    kind: int | None = None
    file: int | None = None
    rank: int | None = None

    @property
    def origin(self) -> int | None:
        """The origin square where the text names it whole."""
        if self.file is None or self.rank is None:
            return None
        return self.rank * 9 + self.file


def _spoken(origin: int, target: int, kind: int | None = None) -> Spoken:
    return Spoken(target, kind, origin % 9, origin // 9)


def _numbered_square(number: str, text: str) -> int:
    if number not in _NUMBERED:
        raise NotationError(f"{number} in {text!r} is no point: row 1-9 or 0, then column 1-9")
    return _NUMBERED[number]


def read_move(text: str) -> Spoken | None:
    """What `text` says, or None for a pass. Raises NotationError.

    Accepts a10b10 with or without a separator, 02마83 (also Hanja), H02-83, Hc3 and its longer
    forms, a leading move number, and marks of check or praise at the end.
    """
    plain = text.translate(_DASHES).strip().strip("`*\"'").strip()
    plain = _NUMBER_BEFORE.sub("", plain, count=1) if _NUMBER_BEFORE.match(plain) else plain
    if re.sub(r"[\s.!]", "", plain).lower() in _PASSES:
        return None
    if match := _COORDINATES.fullmatch(plain):
        origin, target = SQUARES[match[1] + match[2]], SQUARES[match[3] + match[4]]
        return _spoken(origin, target)
    if match := _KOREAN.fullmatch(plain):
        origin, target = _numbered_square(match[1], text), _numbered_square(match[3], text)
        return _spoken(origin, target, _KIND_OF[match[2]])
    if match := _LETTERED.fullmatch(plain):
        origin, target = _numbered_square(match[2], text), _numbered_square(match[3], text)
        return _spoken(origin, target, _KIND_OF[match[1].upper()])
    if match := _SHORT.fullmatch(plain):
        file = None if match[2] is None else ord(match[2]) - ord("a")
        rank = None if match[3] is None else int(match[3]) - 1
        return Spoken(SQUARES[match[4] + match[5]], _KIND_OF[match[1]], file, rank)
    if _COORDINATES.fullmatch(plain.lower()):
        raise NotationError(f"{text[:60]!r} has capital files: write {plain.lower()}")
    raise NotationError(f"{text[:60]!r} is not a janggi move: {_HINT}")


def korean(kind: int, side: Side, origin: int, target: int) -> str:
    """The association's notation, such as 02마83."""
    return SQUARE_NUMBERS[origin] + KOREAN_NAMES[side][kind] + SQUARE_NUMBERS[target]


def short(kind: int, origin: int, target: int, is_capture: bool, rivals: list[int]) -> str:
    """Letter and target, such as Hc3 or Pcb4, told apart from `rivals`: other origins of the
    same kind that may go there."""
    name, shown = SQUARE_NAMES[origin], ""
    if rivals:
        if all(rival % 9 != origin % 9 for rival in rivals):
            shown = name[0]
        elif all(rival // 9 != origin // 9 for rival in rivals):
            shown = name[1:]
        else:
            shown = name
    return LETTERS[kind] + shown + ("x" if is_capture else "") + SQUARE_NAMES[target]
