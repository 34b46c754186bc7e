"""What stands before the weights in a GGUF file: what the model is, and each tensor's size.

By the specification in ggml's docs/gguf.md, versions 2 and 3, little-endian. Nothing of the weights
is read.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_MOST_ENTRIES = 1 << 20
"""Of keys, tensors or a list: more stand in no model's header."""
_MOST_WEIGHTS = 1 << 50
_LISTS_KEPT = 4096
"""Longer lists are vocabularies, and passed over."""
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}

_BLOCKS: dict[int, tuple[int, int]] = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),  # IQ2_XS
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    24: (1, 1),  # I8
    26: (1, 4),  # I32
    29: (256, 56),  # IQ1_M
    30: (1, 2),  # BF16
    34: (256, 54),  # TQ1_0
    35: (256, 66),  # TQ2_0
    39: (32, 17),  # MXFP4
}
"""Values of a block and bytes of a block, by ggml's number of the type."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A model as its file tells it."""

    metadata: dict[str, Any]
    """Numbers, texts and short lists by key."""
    parameters: int
    weights_bytes: int | None
    """None: a tensor has a type that is not known here."""


def read_header(file: Path) -> GgufHeader:
    """The header of a file; ValueError (one line) where it is none or cut short, OSError."""
    with file.open("rb") as stream:
        reader = _Reader(stream, file.stat().st_size)
        if reader.take(4) != b"GGUF":
            raise ValueError("is not a GGUF file")
        version = reader.number("<I")
        if version not in (2, 3):
            raise ValueError(f"has GGUF version {version}; 2 and 3 are read, little-endian")
        num_tensors, num_keys = reader.count(), reader.count()
        metadata = {}
        for _ in range(num_keys):
            key = reader.text()
            metadata[key] = reader.value(reader.number("<I"))
        parameters, size = 0, 0
        is_known = True
        for _ in range(num_tensors):
            values, kind = reader.tensor()
            parameters += values
            is_known = is_known and kind in _BLOCKS
            size += _tensor_bytes(values, kind)
    if parameters > _MOST_WEIGHTS:
        raise ValueError("is damaged: its tensors hold more weights than any model has")
    if is_known and size > file.stat().st_size:
        raise ValueError("is cut short: its tensors do not end inside it")
    return GgufHeader(metadata, parameters, size if is_known else None)


def _tensor_bytes(values: int, kind: int) -> int:
    block, size = _BLOCKS.get(kind, (1, 0))
    return values // block * size


class _Reader:
    """Takes values off a file that may end anywhere."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream = stream
        self._size = size

    def take(self, count: int) -> bytes:
        taken = self._stream.read(count) if count <= self._size else b""
        if len(taken) < count:
            raise ValueError("is cut short inside its header: get the file again")
        return taken

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self) -> int:
        found: int = self.number("<Q")
        if found > _MOST_ENTRIES:
            raise ValueError(f"is damaged: its header counts {found:,} entries")
        return found

    def text(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """A value; None for a list too long to be kept."""
        if kind == _ARRAY:
            return self._list()
        if kind == _STRING:
            return self.text()
        if kind not in _NUMBERS:
            raise ValueError(f"is damaged: its header has a value of type {kind}")
        return self.number(_NUMBERS[kind])

    def _list(self) -> list[Any] | None:
        kind, count = self.number("<I"), self.count()
        if kind == _ARRAY:
            raise ValueError("is damaged: its header has a list of lists")
        if kind in _NUMBERS and count > _LISTS_KEPT:
            self.take(count * struct.calcsize(_NUMBERS[kind]))
            return None
        values = [self.value(kind) for _ in range(count)]
        return values if count <= _LISTS_KEPT else None

    def tensor(self) -> tuple[int, int]:
        """Number of values, and their type."""
        self.text()
        dimensions = self.number("<I")
        if not 1 <= dimensions <= 8:
            raise ValueError(f"is damaged: a tensor has {dimensions} dimensions")
        values = 1
        for _ in range(dimensions):
            values *= self.number("<Q")
        kind: int = self.number("<I")
        self.number("<Q")
        return values, kind
