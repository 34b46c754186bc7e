"""What an agent is: shown a turn, it decides. A player's failure is data; an engine's is raised."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from games import Position, Side
from serving import EngineError, Reply


class Fault(StrEnum):
    """Every way an attempt can fail (closed: records outlive the program)."""

    # the agent's: data, and may cost the game
    ILLEGAL = "illegal"
    AMBIGUOUS = "ambiguous"
    UNPARSABLE = "unparsable"
    EMPTY = "empty"
    TRUNCATED = "truncated"
    FLAG_FALL = "flag_fall"
    RESIGNED = "resigned"
    ENGINE_CRASH = "engine_crash"  # a UCI engine's: it is the player
    ENGINE_ILLEGAL = "engine_illegal"
    # the infrastructure's: never cost a player a game
    OVERLOADED = "overloaded"
    TRANSPORT = "transport"
    STALLED = "stalled"
    ENGINE_DEAD = "engine_dead"
    REJECTED = "rejected"
    MALFORMED = "malformed"
    CUT_SHORT = "cut_short"
    CONSTRAINT_IGNORED = "constraint_ignored"
    CANCELLED = "cancelled"

    @property
    def is_infrastructure(self) -> bool:
        """True where no player is to blame."""
        return self in _INFRASTRUCTURE


_INFRASTRUCTURE = frozenset(
    {
        Fault.OVERLOADED,
        Fault.TRANSPORT,
        Fault.STALLED,
        Fault.ENGINE_DEAD,
        Fault.REJECTED,
        Fault.MALFORMED,
        Fault.CUT_SHORT,
        Fault.CONSTRAINT_IGNORED,
        Fault.CANCELLED,
    }
)


THOUGHT = "/think"
"""Ends the request id of an attempt that asks for reasoning alone."""


@dataclass(frozen=True, slots=True)
class Seat:
    """An agent on one side of one match."""

    agent: str
    side: Side


@dataclass(frozen=True, slots=True)
class Attempt:
    """One question put to an engine for a ply, and what came of it."""

    n: int
    """The agent's tries of this ply, from 0. A retry after an infrastructure fault keeps it."""
    reply: Reply | None
    fault: Fault | None
    """None: this attempt gave the move, or a thought."""
    detail: str = ""
    """What is wrong, in words that may be shown to the agent."""
    request_id: str = ""
    eval_cp: int | None = None
    """What the player itself thinks of its position, in centipawns from its own side; a mate in n
    is 100,000 - n, against it -100,000 + n. None where it does not say."""

    @property
    def is_own_failure(self) -> bool:
        """Whether it failed, and by the player's fault."""
        return self.fault is not None and not self.fault.is_infrastructure

    @property
    def is_thought(self) -> bool:
        """Whether it asked for reasoning and not for a move; without a fault there is an answer to
        come. Its text is `reply.reasoning`."""
        return self.request_id.endswith(THOUGHT)


@dataclass(frozen=True, slots=True)
class Concessions:
    """What a tournament lets its players say beside a move."""

    draw_offers: bool = False
    """A move may come with an offer of a draw, which stands until the opponent's next move."""
    resignation: bool = False
    """Players are told that they may resign."""


NO_CONCESSIONS = Concessions()


@dataclass(frozen=True, slots=True)
class Turn:
    """What an agent is shown."""

    match_id: str
    game: str
    position: Position
    seat: Seat
    attempt_budget: int
    clock_left_s: float | None
    due: float
    """When the move was wanted, `time.monotonic()` seconds."""
    made: tuple[Attempt, ...] = ()
    """Attempts of this ply that an infrastructure fault cut off; `choose` goes on after them."""
    is_draw_offered: bool = False
    """The opponent's last move came with an offer of a draw."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A legal move, or None with the fault that decided or the draw that is accepted."""

    move: str | None
    fault: Fault | None
    attempts: tuple[Attempt, ...]
    """Every attempt made by this call, without those of `Turn.made`."""
    offers_draw: bool = False
    """The move comes with an offer, where `AgentContext.concessions` has them."""
    accepts_draw: bool = False
    """In place of a move, where `Turn.is_draw_offered`."""

    @property
    def is_breakdown(self) -> bool:
        """Whether an engine that is broken decided, and no play: a UCI engine's crash, its illegal
        move, or a flag that fell in silence."""
        if self.fault is Fault.FLAG_FALL:
            return bool(self.attempts) and self.attempts[-1].reply is None
        return self.fault in (Fault.ENGINE_CRASH, Fault.ENGINE_ILLEGAL)


class Interrupted(EngineError):
    """An infrastructure fault in the middle of a ply, with the attempts made by this call.

    The last attempt holds the fault; `__cause__` is the engine's error where there is one.
    """

    def __init__(self, attempts: tuple[Attempt, ...]) -> None:
        super().__init__(attempts[-1].detail)
        self.attempts = attempts


class Agent(Protocol):
    """A named player."""

    async def open(self) -> None:
        """Get ready; raises EngineError, or ValueError where it cannot play as configured."""
        ...

    async def choose(self, turn: Turn) -> Decision:
        """A decision. Raises EngineError for infrastructure; never anything else."""
        ...

    async def close(self) -> None: ...


def _ignore(kind: str, detail: Mapping[str, Any]) -> None:
    return None


@dataclass(frozen=True, slots=True)
class AgentContext:
    """What a run tells every agent it builds."""

    run_seed: int
    move_limit_seconds: float
    prompts: Mapping[str, str] = field(default_factory=dict)
    """The shared system prompt by game; a game that is absent has ours."""
    record_event: Callable[[str, Mapping[str, Any]], None] = _ignore
    """Writes a line of the run's event log: kind, details."""
    concessions: Concessions = NO_CONCESSIONS
    games: tuple[tuple[str, str], ...] = ()
    """Games of the run as `Turn.game` names them, with their rule sets: `open` checks these."""
    memo: dict[tuple[str, ...], int] = field(default_factory=dict, compare=False)
    """What one agent measured for all of the run: (what, engine, game, rule set) to a number."""
