"""Server-sent events and lines of JSON out of bytes as they come, in pieces of any size. Pure.

The event stream format: https://html.spec.whatwg.org/multipage/server-sent-events.html, section
"Parsing an event stream".
"""

import codecs
from collections.abc import Iterator

from serving.engine import MalformedReply

MAX_LINE = 1 << 20
"""Characters of one line; more is no answer of a language model."""

MAX_EVENT = 4 * MAX_LINE
"""Characters of one event of several lines."""


class EventDecoder:
    """The `data` of server-sent events. Comments, names, ids and retry times are left out, and an
    event that its empty line did not end is never given."""

    def __init__(self) -> None:
        self._lines = _Lines()
        self._data: list[str] = []
        self._size = 0

    @property
    def lines_ended(self) -> int:
        """Lines so far, those that mean nothing too."""
        return self._lines.ended

    def feed(self, piece: bytes) -> Iterator[str]:
        """The data of every event that `piece` ends, its lines joined by a newline; raises
        MalformedReply."""
        for line in self._lines.feed(piece):
            if line:
                self._add(line)
            elif self._data:
                yield "\n".join(self._data)
                self._data, self._size = [], 0

    def _add(self, line: str) -> None:
        field, _, value = line.partition(":")
        if field == "data":
            self._size += len(value)
            if self._size > MAX_EVENT:
                raise MalformedReply(f"one event has more than {MAX_EVENT} characters")
            self._data.append(value.removeprefix(" "))


class LineDecoder:
    """One message a line (NDJSON); empty lines are left out."""

    def __init__(self) -> None:
        self._lines = _Lines()

    @property
    def lines_ended(self) -> int:
        """Lines so far, empty ones too."""
        return self._lines.ended

    def feed(self, piece: bytes) -> Iterator[str]:
        """The lines that `piece` ends; raises MalformedReply."""
        return (line for line in self._lines.feed(piece) if line.strip())


class _Lines:
    """Lines of UTF-8 that end with CR, LF or CRLF; a byte order mark at the start is none of it."""

    def __init__(self) -> None:
        self._text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._parts: list[str] = []
        self._size = 0
        self._is_first = True
        self.ended = 0
        self._after_cr = False

    def feed(self, piece: bytes) -> Iterator[str]:
        text = self._text.decode(piece)
        if self._is_first and text:
            text = text.removeprefix("\ufeff")
            self._is_first = False
        if self._after_cr and text:
            text = text.removeprefix("\n")
            self._after_cr = False
        if text.endswith("\r"):
            self._after_cr = True
        *ended, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for line in ended:
            self._keep(line)
            self.ended += 1
            yield "".join(self._parts)
            self._parts, self._size = [], 0
        self._keep(rest)

    def _keep(self, part: str) -> None:
        self._size += len(part)
        if self._size > MAX_LINE:
            raise MalformedReply(f"one line has more than {MAX_LINE} characters")
        if part:
            self._parts.append(part)
