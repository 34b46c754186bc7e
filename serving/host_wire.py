"""How the arena and an engine's host speak: lines of JSON over one socket.

A line is a list of messages, each a list that begins with its tag. Only durations cross, never
times. Every host knows these; what else is said is its own (`vllm_wire`, `ray_wire`).

    arena → host                                   host → arena
    start  arguments, warm-up ids                  ready  version
                                                   dead   message           (the host ends)
"""

import json
from collections.abc import Iterable, Sequence
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
