"""Players without a model, for a floor under the others' results."""

import asyncio
from typing import NamedTuple

from agents.base import AgentContext, Decision, Turn
from agents.llm import stable_hash
from games import Position, Side

_MOVES_BETWEEN_YIELDS = 8
"""The greedy player looks one ply ahead on the arena's own loop and lets others run this often."""


class RandomAgent:
    """Any legal move, each as likely as the next; the same in every run of the same seed."""

    def __init__(self, context: AgentContext) -> None:
        self._seed = context.run_seed

    async def open(self) -> None:
        """Nothing to get ready."""

    async def choose(self, turn: Turn) -> Decision:
        legal = turn.position.legal_moves()
        return Decision(legal[_dice(self._seed, turn, "") % len(legal)], None, ())

    async def close(self) -> None:
        """Nothing to give back."""


class GreedyAgent:
    """Looks one ply ahead: a move that wins at once, else the best balance of material.

    A move that loses at once (a pass that ends the game on worse points) comes last. Ties fall by
    dice that are the same in every run of the same seed.
    """

    def __init__(self, context: AgentContext) -> None:
        self._seed = context.run_seed

    async def open(self) -> None:
        """Nothing to get ready."""

    async def choose(self, turn: Turn) -> Decision:
        me = turn.position.side
        best: tuple[_Worth, str] | None = None
        for index, move in enumerate(turn.position.legal_moves()):
            if index % _MOVES_BETWEEN_YIELDS == _MOVES_BETWEEN_YIELDS - 1:
                await asyncio.sleep(0)
            outcome, balance = _look(turn.position.play(move), me)
            worth = _Worth(outcome, balance, _dice(self._seed, turn, move))
            if best is None or worth > best[0]:
                best = worth, move
        assert best is not None, "asked for a move in a finished game"
        return Decision(best[1], None, ())

    async def close(self) -> None:
        """Nothing to give back."""


class _Worth(NamedTuple):
    """Compared from left to right."""

    outcome: int
    balance: float
    dice: int


def _look(after: Position, me: Side) -> tuple[int, float]:
    """Win 1, loss -1, else 0; and the material of `me` less the other side's."""
    other: Side = 1 if me == 0 else 0
    result = after.result()
    outcome = 0
    if result is not None and result.winner is not None:
        outcome = 1 if result.winner == me else -1
    return outcome, after.material(me) - after.material(other)


def _dice(seed: int, turn: Turn, salt: str) -> int:
    return stable_hash(f"{seed}/{turn.match_id}/{turn.position.ply}/{salt}")
