"""An engine of one's own: answers with a choice drawn by the request's seed.

[engines.dice]
kind = "own_engine:DiceEngine"
max_concurrent = 4
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any

from serving import (
    ChatPrompt,
    EngineLimits,
    EngineSnapshot,
    Finish,
    Prompt,
    PromptParts,
    Reply,
    Request,
    Timings,
    Usage,
)


class ChatTemplate:
    """Prompts as chat messages; a word is counted as a token."""

    def render(self, parts: PromptParts) -> ChatPrompt:
        system = f"{parts.system}\n\n{parts.persona}".strip()
        user = " ".join((parts.lead, *parts.moves))
        if parts.tail_note:
            user = f"{user}\n{parts.tail_note}"
        return ChatPrompt((("system", system), ("user", user)))

    def count_tokens(self, parts: PromptParts) -> int:
        return sum(len(content.split()) for _, content in self.render(parts).messages)

    def check(self, parts: PromptParts) -> str | None:
        return None


class DiceEngine:
    """Made with its table of the config."""

    kind = "own_engine:DiceEngine"
    version = "1"
    restarts = 0
    is_ready = True

    def __init__(self, config: dict[str, Any]) -> None:
        self.name = str(config.get("name", "dice"))
        self.template = ChatTemplate()
        self.limits = EngineLimits(
            context_tokens=int(config.get("context_tokens", 4096)),
            max_concurrent=int(config.get("max_concurrent", 16)),
            max_queued=int(config.get("max_queued", 64)),
        )
        self.prompts: list[ChatPrompt] = []
        self._closed = asyncio.Event()

    async def open(self) -> None:
        """Nothing to start."""

    async def generate(self, request: Request) -> Reply:
        assert isinstance(request.prompt, ChatPrompt)
        self.prompts.append(request.prompt)
        began = time.monotonic()
        await asyncio.sleep(0)
        dice = random.Random(request.sampling.seed)
        text = dice.choice(request.choices) if request.choices else "I see no move.\nMOVE: b2"
        words = sum(len(content.split()) for _, content in request.prompt.messages)
        timings = Timings(began, began, None, time.monotonic(), None, None, None)
        return Reply(text, Finish.STOP, Usage(words, len(text.split()), None), timings)

    async def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        """What it cannot measure it does not report."""
        yield EngineSnapshot(time.monotonic(), "sampled", waiting=0)
        await self._closed.wait()

    async def prime(self, prompt: Prompt) -> None: ...

    async def reset_prefix_cache(self) -> bool:
        return False

    async def close(self) -> None:
        self._closed.set()
