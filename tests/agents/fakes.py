"""An engine that is a script of replies and errors, and a template that counts characters."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace

from agents import AgentContext, Attempt, Seat, Turn
from games import Position, Start
from serving import (
    EngineLimits,
    EngineSnapshot,
    Finish,
    Prompt,
    PromptParts,
    Reply,
    Request,
    Timings,
    TokenPrompt,
    Usage,
)
from tests.examples.own_game import EMPTY, Grid, NoughtsAndCrosses

OWN_GAME = "own_game:NoughtsAndCrosses"

Answer = str | Reply | Exception | Callable[[Request], str]


class CharTemplate:
    """One token a character. `broken` is what `check` says."""

    def __init__(self, broken: str | None = None) -> None:
        self.broken = broken
        self.rendered: list[PromptParts] = []
        self.num_checks = 0

    def render(self, parts: PromptParts) -> TokenPrompt:
        self.rendered.append(parts)
        return TokenPrompt(tuple(map(ord, self.text(parts))))

    def count_tokens(self, parts: PromptParts) -> int:
        return len(self.text(parts))

    def check(self, parts: PromptParts) -> str | None:
        self.num_checks += 1
        return self.broken

    @staticmethod
    def text(parts: PromptParts) -> str:
        moves = "".join(f" {move}" for move in parts.moves)
        note = f"\n{parts.tail_note}" if parts.tail_note else ""
        return f"{parts.system}|{parts.persona}|{parts.lead}{moves}{note}|"


class ScriptEngine:
    """Answers from a script, in order, and keeps every request."""

    kind = "script"
    version = "1"
    restarts = 0
    is_ready = True

    def __init__(
        self,
        answers: Iterable[Answer] = (),
        *,
        context_tokens: int = 4096,
        template: CharTemplate | None = None,
        name: str = "main",
    ) -> None:
        self.name = name
        self.template = template or CharTemplate()
        self.limits = EngineLimits(context_tokens, max_concurrent=8, max_queued=8)
        self.requests: list[Request] = []
        self.primed: list[Prompt] = []
        self._answers = iter(answers)

    async def open(self) -> None:
        """Nothing to start."""

    async def generate(self, request: Request) -> Reply:
        self.requests.append(request)
        await asyncio.sleep(0)
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Reply):
            return answer
        return reply(answer if isinstance(answer, str) else answer(request))

    async def snapshots(self) -> AsyncIterator[EngineSnapshot]:
        return
        yield

    async def prime(self, prompt: Prompt) -> None:
        self.primed.append(prompt)

    async def reset_prefix_cache(self) -> bool:
        return False

    async def close(self) -> None:
        """Nothing to stop."""


def reply(text: str, finish: Finish = Finish.STOP, *, seconds: float = 0.1) -> Reply:
    """A reply that cost a clock `seconds`."""
    timings = Timings(0.0, 0.0, None, 5.0, 0.0, 0.0, seconds)
    return Reply(text, finish, Usage(10, 2, None), timings)


def context(**changes: object) -> AgentContext:
    return replace(AgentContext(run_seed=7, move_limit_seconds=30.0), **changes)  # type: ignore[arg-type]


def grid(*moves: str, fen: str = EMPTY) -> Grid:
    position = NoughtsAndCrosses().position(Start(fen, "standard"))
    for move in moves:
        position = position.play(move)
    return position


def turn(
    position: Position | None = None,
    *,
    game: str = OWN_GAME,
    budget: int = 3,
    clock_left_s: float | None = None,
    made: tuple[Attempt, ...] = (),
    match_id: str = "m1",
) -> Turn:
    shown: Position = grid() if position is None else position
    seat = Seat("tester", shown.side)
    return Turn(match_id, game, shown, seat, budget, clock_left_s, 0.0, made)
