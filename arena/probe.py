"""One move asked of every player before the first game, so that a run that cannot be played is not
begun. What is answered is recorded as an event and enters no figure."""

import asyncio
import time
from collections.abc import Mapping, Sequence

from agents import Decision, Seat, Turn
from arena.match import Player
from arena.schedule import MatchSpec
from arena.store import Store
from games import load_game
from serving import EngineDead, EngineError

TRIES = 3
"""An engine that has just started may refuse or drop a request."""
_BETWEEN_S = 0.5


class ProbeError(Exception):
    """A player cannot answer; the message names it and says why."""


async def probe(players: Mapping[str, Player], specs: Sequence[MatchSpec], store: Store) -> None:
    """Have each player choose a move in the first position of its first game among `specs`.

    A bad answer is the player's own and passes, but for a UCI engine's illegal move; ProbeError
    where there is none to be had.
    """
    first = {name: spec for spec in reversed(specs) for name in spec.agents}
    asked = [(player, first[name]) for name, player in players.items() if name in first]
    for failure in await asyncio.gather(*(_failure(*who, store) for who in asked)):
        if failure is not None:
            raise ProbeError(
                f"{failure}; no game was begun (faults.probe = false begins without asking)"
            )


async def _failure(player: Player, spec: MatchSpec, store: Store) -> str | None:
    """Why a player has no answer, if so."""
    begun = time.monotonic()
    try:
        decision = await _answer(player, spec)
    except EngineError as error:
        return f"agent {player.name} cannot answer: {error}"
    # a user's own agent raises what it likes
    except Exception as error:  # noqa: BLE001
        return f"agent {player.name} cannot answer: it raised {error!r}"
    took_s = time.monotonic() - begun
    fault = None if decision.fault is None else decision.fault.value
    store.event("agent_probed", {"agent": player.name, "seconds": took_s, "fault": fault})
    if decision.is_breakdown:
        told = decision.attempts[-1].detail if decision.attempts else fault
        return f"agent {player.name} cannot answer: {told}"
    return None


async def _answer(player: Player, spec: MatchSpec) -> Decision:
    seat = Seat(player.name, 0)
    position = load_game(spec.game).position(spec.start)
    name = f"probe-{player.name}"
    for tries in range(TRIES):
        turn = Turn(name, spec.game, position, seat, 1, None, time.monotonic())
        try:
            return await player.agent.choose(turn)
        except EngineError as error:
            is_final = isinstance(error, EngineDead) and error.final
            if is_final or tries == TRIES - 1:
                raise
        await asyncio.sleep(_BETWEEN_S)
    raise AssertionError("unreachable")
