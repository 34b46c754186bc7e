"""An agent of one's own: plays a favourite square when it can, else asks an engine.

[[agents]]
kind = "own_agent:FavouriteAgent"
name = "centre-first"
favourites = ["b2", "a1"]
engine = "dice"
"""

from collections.abc import Mapping
from typing import Any

from agents import Attempt, Decision, Turn
from serving import Engine, PromptParts, Request, Sampling


class FavouriteAgent:
    """Made with its table of the config and the run's engines by name."""

    def __init__(self, config: dict[str, Any], engines: Mapping[str, Engine]) -> None:
        self._favourites = tuple(config["favourites"])
        self._engine = engines[config["engine"]]

    async def open(self) -> None:
        """Nothing to get ready."""

    async def choose(self, turn: Turn) -> Decision:
        """Engine errors pass through: they are not the player's."""
        legal = turn.position.legal_moves()
        for move in self._favourites:
            if move in legal:
                return Decision(move, None, ())
        parts = PromptParts("Choose a square.", "", "Moves:", turn.position.moves)
        request = Request(
            id=f"{turn.match_id}/{turn.position.ply}/0/{len(turn.made)}",
            match_id=turn.match_id,
            prompt=self._engine.template.render(parts),
            choices=legal,
            max_tokens=8,
            sampling=Sampling(seed=turn.position.ply),
            deadline_s=10.0,
        )
        reply = await self._engine.generate(request)
        return Decision(reply.text, None, (Attempt(0, reply, None, "", request.id),))

    async def close(self) -> None:
        """Nothing to give back."""
