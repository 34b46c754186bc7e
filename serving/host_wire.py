"""How the arena and an engine's host speak: lines of JSON over one socket.

A line is a list of messages, each a list that begins with its tag. Only durations cross, never
times. Every host knows these; what else is said is its own (`vllm_wire`, `ray_wire`).

    arena → host                                   host → arena
    start  arguments, warm-up ids                  ready  version
                                                   dead   message           (the host ends)
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

LONGEST_LINE = 1 << 28
"""Bytes; a full batch of long prompts stays far below."""


def encode(messages: Iterable[Sequence[Any]]) -> bytes:
    """One line holding the messages."""
    return json.dumps(list(messages), separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> list[list[Any]]:
    """The messages of one line; ValueError where it is not one."""
    messages = json.loads(line)
    if not isinstance(messages, list):
        raise ValueError("not a list of messages")
    return messages


class Outbox:
    """Messages of one turn of the loop leave as one line, at its end."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._messages: list[Sequence[Any]] = []
        self._loop = asyncio.get_running_loop()

    def put(self, *message: Any) -> None:
        if not self._messages:
            self._loop.call_soon(self.flush)
        self._messages.append(message)

    def flush(self) -> None:
        """Let them leave now."""
        messages, self._messages = self._messages, []
        if messages:
            self._write(encode(messages))
