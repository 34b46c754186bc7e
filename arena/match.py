"""One match, from wherever the store says it stands to its end.

`Match.play` never raises for a player or an engine. A player's failure becomes a result; the
infrastructure's suspends the match, with its clock stopped, until the engine answers again.
"""

import random
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from agents import Agent, Attempt, Decision, Fault, Interrupted, Seat, Turn
from arena.pace import Pacer, SeatPace
from arena.progress import Progress
from arena.schedule import MatchSpec
from arena.store import AttemptRow, MatchRow, PlyRow, Store, storable
from games import Game, Position, Result, Side, Termination
from serving import EngineDead, EngineError, Overloaded, RequestRejected

log = structlog.get_logger()

MAX_TRIES = 8
"""Infrastructure faults in a row, overload apart, after which a match is left for `resume`."""
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.05, 2.0


@dataclass(frozen=True, slots=True)
class Player:
    """An agent with what its records say of it."""

    name: str
    agent: Agent
    engine: str | None
    mode: str | None


@dataclass(frozen=True, slots=True)
class MatchRules:
    """What a run lays down for all its matches."""

    seed: int
    move_period_seconds: float
    agent_attempts: int
    max_plies: int | None


@dataclass(frozen=True, slots=True)
class Past:
    """What the store holds of a match: its row, its moves, the attempts of the ply under way."""

    row: MatchRow
    plies: Sequence[PlyRow] = ()
    attempts: Sequence[Attempt] = ()


class _LeftForResume(Exception):
    """The match cannot go on in this process; the message says why."""


class Match:
    """A match being played."""

    def __init__(
        self,
        spec: MatchSpec,
        game: Game,
        players: tuple[Player, Player],
        rules: MatchRules,
        store: Store,
        pacer: Pacer,
        progress: Progress,
        past: Past,
    ) -> None:
        self._spec, self._game, self._players = spec, game, players
        self._rules, self._store, self._pacer, self._progress = rules, store, pacer, progress
        self._row = past.row
        self._made = tuple(past.attempts)
        self._past = past
        self._paces = tuple(
            SeatPace(rules.move_period_seconds, f"{rules.seed}/{spec.id}/{side}") for side in (0, 1)
        )
        self._dice = random.Random(f"{rules.seed}/{spec.id}")
        # matches that start together do not stay in step
        self._offset = self._dice.uniform(0, rules.move_period_seconds)
        self._ready = 0.0
        self._log = log.bind(match=spec.id)

    async def play(self) -> MatchRow:
        """The match's row when it ended, or when it was left unfinished."""
        try:
            if not await self._pacer.until(time.monotonic() + self._offset):
                return self._row
            self._begin()
            while (result := self._ending()) is None:
                due = self._paces[self._position.side].due(self._ready)
                if not await self._pacer.until(due):
                    return await self._leave("the run was stopped")
                result = await self._ply(due)
                if result is not None:
                    break
            return await self._finish(result)
        except _LeftForResume as reason:
            return await self._leave(str(reason))

    def _begin(self) -> None:
        now, plies = self._store.clock.now(), self._past.plies
        position = self._game.position(self._spec.start)
        for ply in plies:
            position = position.play(ply.move)
        self._position: Position = position
        if self._row.started is None:
            self._row = self._row._replace(started=now)
        else:
            away = now - (plies[-1].done if plies else self._row.started)
            self._row = self._row._replace(suspended_s=self._row.suspended_s + away)
        self._mark("running")
        self._ready = time.monotonic()
        self._progress.match_began()

    def _ending(self) -> Result | None:
        result = self._position.result()
        if result is None and self._position.ply == self._rules.max_plies:
            result = self._game.adjudicate_ply_cap(self._position)
        return result

    async def _ply(self, due: float) -> Result | None:
        """Play one ply; a result where the player's failure ends the match."""
        position, seat = self._position, Seat(self._names[self._position.side], self._position.side)
        decision = await self._decide(seat, due)
        done = time.monotonic()
        attempts = self._attempt_rows(decision.attempts)
        self._made = ()
        if decision.move is None:
            self._store.add(*attempts)
            self._progress.forfeited(decision)
            return _loss(position, decision, self._game)
        if decision.move not in position.legal_moves():
            raise _LeftForResume(
                f"agent {seat.agent} returned {decision.move!r}, which is not legal"
            )
        clock = self._store.clock
        after = position.play(decision.move)
        row = PlyRow(
            self._spec.id,
            position.ply,
            position.side,
            decision.move,
            position.notation(decision.move, self._game.record_notation),
            after.fen,
            None,
            clock.of(self._ready),
            clock.of(due),
            clock.of(done),
        )
        await self._store.commit(row, *attempts)
        self._position, self._ready = after, time.monotonic()
        self._progress.ply_committed(row, decision)
        return None

    async def _decide(self, seat: Seat, due: float) -> Decision:
        """The agent's decision, asked again for as long as only the infrastructure fails."""
        tries = 0
        while True:
            turn = Turn(
                self._spec.id,
                self._spec.game,
                self._position,
                seat,
                self._rules.agent_attempts,
                None,
                due,
                self._made,
            )
            try:
                decision = await self._players[seat.side].agent.choose(turn)
            except EngineError as error:
                tries += not isinstance(error.__cause__ or error, Overloaded)
                await self._interrupted(error, tries)
            except Exception as error:  # a bug in an agent must not cost a player the game
                self._log.error("agent_raised", agent=seat.agent, error=traceback.format_exc())
                raise _LeftForResume(f"agent {seat.agent} raised {error!r}") from error
            else:
                if self._row.state == "suspended":
                    self._resumed()
                return decision

    async def _interrupted(self, error: EngineError, tries: int) -> None:
        """Record an infrastructure fault, stop the match's clock, wait before the next try."""
        cause = error.__cause__ if isinstance(error.__cause__, EngineError) else error
        if isinstance(error, Interrupted):
            self._made += error.attempts
            self._store.add(*self._attempt_rows(error.attempts))
            for attempt in error.attempts:
                self._progress.fault(attempt.fault or cause.kind)
        else:
            self._progress.fault(cause.kind)
        overloaded = isinstance(cause, Overloaded)
        if not overloaded:
            self._suspend(str(cause))
        if isinstance(cause, EngineDead) and cause.final:
            self._progress.engine_failure = str(cause)
            raise _LeftForResume(str(cause))
        if isinstance(cause, RequestRejected):
            raise _LeftForResume(str(cause))
        if tries >= MAX_TRIES:
            raise _LeftForResume(f"{tries} infrastructure faults in a row; the last: {cause}")
        wait = min(_LAST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(tries, 10))
        going_on = await self._pacer.until(time.monotonic() + wait * self._dice.uniform(0.5, 1.0))
        if not going_on:
            raise _LeftForResume("the run was stopped")

    def _suspend(self, why: str) -> None:
        if self._row.state != "suspended":
            self._suspended_at = self._store.clock.now()
            self._mark("suspended")
            self._store.event("match_suspended", {"match": self._spec.id, "why": why})
            self._progress.match_suspended()
            self._log.info("match_suspended", why=why)

    def _resumed(self) -> None:
        away = self._store.clock.now() - self._suspended_at
        self._row = self._row._replace(suspended_s=self._row.suspended_s + away)
        self._mark("running")
        self._store.event("match_resumed", {"match": self._spec.id, "away_s": away})
        self._progress.match_resumed()

    async def _finish(self, result: Result) -> MatchRow:
        first, second = result.scores or (None, None)
        self._row = self._row._replace(
            state="finished",
            winner=result.winner,
            termination=result.termination.value,
            detail=result.detail,
            score_first=first,
            score_second=second,
            ended=self._store.clock.now(),
        )
        await self._store.commit(self._row)
        self._progress.match_finished(self._row)
        self._log.info(
            "match_finished",
            termination=self._row.termination,
            winner=self._row.winner,
            plies=self._position.ply,
        )
        return self._row

    async def _leave(self, why: str) -> MatchRow:
        """Leave the match unfinished, so that `resume` goes on from its last committed ply."""
        self._row = self._row._replace(state="suspended", detail=why)
        await self._store.commit(self._row)
        self._progress.match_left()
        tell = self._log.info if self._pacer.is_stopping else self._log.warning
        tell("match_left", why=why, ply=self._position.ply)
        return self._row

    def _mark(self, state: str) -> None:
        self._row = self._row._replace(state=state, detail=None)  # type: ignore[arg-type]
        self._store.add(self._row)

    @property
    def _names(self) -> tuple[str, str]:
        return self._spec.agents

    def _attempt_rows(self, attempts: Sequence[Attempt]) -> list[AttemptRow]:
        side = self._position.side
        player = self._players[side]
        return [self._attempt_row(attempt, player, side) for attempt in attempts]

    def _attempt_row(self, attempt: Attempt, player: Player, side: Side) -> AttemptRow:
        reply, of = attempt.reply, self._store.clock.of
        head = (
            attempt.request_id or f"{self._spec.id}/{self._position.ply}/{attempt.n}/0",
            self._spec.id,
            self._position.ply,
            side,
            attempt.n,
            player.engine,
            player.mode,
        )
        fault = attempt.fault.value if attempt.fault else None
        if reply is None:
            return AttemptRow(*head, None, None, fault, storable(attempt.detail), *(None,) * 12)
        times = reply.timings
        return AttemptRow(
            *head,
            storable(reply.text),
            reply.finish.value,
            fault,
            storable(attempt.detail),
            reply.usage.prompt,
            reply.usage.cached,
            reply.usage.completion,
            of(times.submitted),
            of(times.admitted),
            None if times.first_token is None else of(times.first_token),
            of(times.done),
            times.queue_s,
            times.prefill_s,
            times.decode_s,
            reply.step_requests_mean,
            reply.replica,
        )


_ENDINGS = {
    Fault.FLAG_FALL: (Termination.FLAG_FALL, "ran out of time"),
    Fault.RESIGNED: (Termination.RESIGNATION, "resigned"),
}


def _loss(position: Position, decision: Decision, game: Game) -> Result:
    """The result where the side to move has no move to show."""
    loser = position.side
    winner: Side = 1 if loser == 0 else 0
    fault = decision.fault
    assert fault is not None
    last = decision.attempts[-1].detail if decision.attempts else ""
    termination, said = _ENDINGS.get(
        fault, (Termination.FORFEIT, f"gave no legal move ({fault.value})")
    )
    detail = f"{game.side_names[loser]} {said}" + (f": {last}" if last else "")
    return Result(winner, termination, position.scores(), detail)
