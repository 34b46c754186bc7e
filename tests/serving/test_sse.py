"""Server-sent events: the same events however the bytes are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engine import MalformedReply
from serving.sse import MAX_LINE, EventDecoder, LineDecoder


def events(decoder: EventDecoder | LineDecoder, *pieces: bytes) -> list[str]:
    return [event for piece in pieces for event in decoder.feed(piece)]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\n", ["a"]),
        (b"data:a\n\n", ["a"]),
        (b"data:  a\n\n", [" a"]),
        (b"data: a\ndata: b\n\n", ["a\nb"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        (b"data: a\r\rdata: b\r\r", ["a", "b"]),
        (b"\xef\xbb\xbfdata: a\n\n", ["a"]),
        (b": ping\n\n:\n\ndata: a\n\n", ["a"]),
        (b"id: 7\nretry: 10\nevent: message\ndata: a\n\n", ["a"]),
        (b"data\n\n", [""]),
        (b"\n\n\ndata: a\n\n\n\n", ["a"]),
        (b"data: a\n", []),
        (b"data: a", []),
        (b"database: a\n\n", []),
        ("data: 장기\u2028 \n\n".encode(), ["장기\u2028 "]),
    ],
)
def test_an_event_stream(stream: bytes, expected: list[str]) -> None:
    assert events(EventDecoder(), stream) == expected
    assert events(EventDecoder(), *(bytes([byte]) for byte in stream)) == expected


@given(
    st.lists(st.text(alphabet=st.characters(exclude_characters="\r\n", codec="utf-8"))),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(min_value=1, max_value=9), min_size=1),
)
def test_any_cut_gives_the_same_events(texts: list[str], end: str, sizes: list[int]) -> None:
    stream = "".join(f"data: {text}{end}{end}" for text in texts).encode()
    pieces: list[bytes] = []
    at = 0
    while at < len(stream):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(stream[at : at + size])
        at += size
    assert events(EventDecoder(), *pieces) == texts


def test_bytes_that_are_no_text_do_not_end_the_stream() -> None:
    assert events(EventDecoder(), b"data: \xff\xfe\n\n") == ["\ufffd\ufffd"]


def test_a_line_without_end_is_refused_before_it_fills_the_memory() -> None:
    decoder = EventDecoder()
    with pytest.raises(MalformedReply, match="one line has more than"):
        events(decoder, b"data: ", *[b"x" * 65_536] * (MAX_LINE // 65_536))


def test_an_event_without_end_is_refused() -> None:
    with pytest.raises(MalformedReply, match="one event has more than"):
        events(EventDecoder(), *[b"data: " + b"x" * 100_000 + b"\n"] * 50)


def test_lines_of_json() -> None:
    assert events(LineDecoder(), b'{"a":', b"1}\n\n", b'{"b":2}\r\n{"c"') == ['{"a":1}', '{"b":2}']
