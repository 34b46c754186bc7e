"""A UCI engine that scores every position of a run, so that games of players that tell no score can
be ended when they are decided."""

import structlog

from agents import AgentContext, Seat, Turn, UciConfig, build_agent
from games import Position
from serving import EngineError

log = structlog.get_logger()


class Judge:
    """Scores positions beside the players: it takes none of their time and has no say in a move."""

    def __init__(self, config: UciConfig, context: AgentContext) -> None:
        self._config = config
        self._agent = build_agent(config, {}, context)

    async def open(self) -> None:
        """Starts the engine; ValueError where it cannot play what it is to judge."""
        await self._agent.open()

    async def close(self) -> None:
        """Ends its processes."""
        await self._agent.close()

    async def score(self, match_id: str, game: str, position: Position, due: float) -> int | None:
        """Centipawns from the mover's side, as in `Attempt.eval_cp`; None where the engine gave
        none, which is nobody's failure."""
        if not self._config.plays(game):
            return None
        seat = Seat(self._config.name, position.side)
        turn = Turn(match_id, game, position, seat, 1, None, due)
        try:
            decision = await self._agent.choose(turn)
        except EngineError as error:
            log.warning("judge_failed", match=match_id, ply=position.ply, why=str(error))
            return None
        return decision.attempts[-1].eval_cp if decision.attempts else None
