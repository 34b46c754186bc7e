"""One match, from wherever the store says it stands to its end.

`Match.play` never raises for a player or an engine. A player's failure becomes a result; the
infrastructure's suspends the match, with its clock stopped, until the engine answers again.
"""

import asyncio
import random
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import structlog

from agents import Agent, Attempt, Decision, Fault, Interrupted, Seat, Turn
from arena.adjudication import AdjudicationRules
from arena.clock import ClockRules, fell, spent_seconds
from arena.judging import Judge
from arena.pace import Pacer, SeatPace
from arena.progress import Progress
from arena.referee import agreed, ending, loss
from arena.schedule import MatchSpec
from arena.store import AttemptRow, MatchRow, PlyRow, Store, StoreError, storable
from games import Game, Position, Result, Side
from serving import EngineDead, EngineError, Overloaded, RequestRejected, is_recordable

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
    is_engine_ready: Callable[[], bool] = lambda: True
    """False while its engine is down: the match is suspended while it waits."""


@dataclass(frozen=True, slots=True)
class MatchRules:
    """What a run lays down for all its matches."""

    seed: int
    move_period_seconds: float
    agent_attempts: int
    max_plies: int | None
    clock: ClockRules | None = None
    adjudication: AdjudicationRules = field(default_factory=AdjudicationRules)
    draw_offers: bool = False


@dataclass(frozen=True, slots=True)
class Past:
    """What the store holds of a match: its row, its moves, the attempts of the ply under way."""

    row: MatchRow
    plies: Sequence[PlyRow] = ()
    attempts: Sequence[Attempt] = ()
    evals: Sequence[int | None] = ()
    """The score of each ply that adjudication goes by."""


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
        judge: Judge | None = None,
    ) -> None:
        self._spec, self._game, self._players = spec, game, players
        self._rules, self._store, self._pacer, self._progress = rules, store, pacer, progress
        self._judge = judge
        self._row = past.row
        self._made = tuple(past.attempts)
        self._num_rows = len(past.attempts)
        """Attempts of the ply under way that are recorded."""
        self._last_tries: list[AttemptRow] = []
        """Those that ended the match: they are committed with its result, or asked for again."""
        self.is_faulty = False
        """It ended by a UCI engine that is broken, or was left for a fault of the
        infrastructure."""
        self._past = past
        self._paces = tuple(
            SeatPace(rules.move_period_seconds, f"{rules.seed}/{spec.id}/{side}") for side in (0, 1)
        )
        self._dice = random.Random(f"{rules.seed}/{spec.id}")
        # matches that start together do not stay in step
        self._offset = self._dice.uniform(0, rules.move_period_seconds)
        self._ready = 0.0
        start_s = None if rules.clock is None else rules.clock.start_s
        self._clocks = [start_s, start_s]
        """Seconds that each side has left; None without a clock."""
        self._evals = list(past.evals)
        self._is_draw_offered = bool(past.plies and past.plies[-1].offers_draw)
        self._doing = f"game {spec.game}"
        """Whose code runs, for the report of what it raises."""
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
        except StoreError:
            raise
        # a bug in a user's own agent or game must not cost a player
        except Exception as error:  # noqa: BLE001
            self._log.error("match_broke", doing=self._doing, error=traceback.format_exc())
            return await self._leave(f"{self._doing} raised {error!r}")

    def _begin(self) -> None:
        now = self._store.clock.now()
        self._progress.has_begun = True
        if self._row.started is None:
            self._row = self._row._replace(started=now)
        self._run_again(now)
        self._position: Position = self._game.position(self._spec.start)
        for ply in self._past.plies:
            self._position = self._position.play(ply.move)
            self._clocks[ply.side] = ply.clock_left_s
        self._ready = time.monotonic()

    def _run_again(self, now: float) -> None:
        """Start the match's clock: what it was suspended for is known now."""
        since = self._row.suspended_at
        away = 0.0 if since is None else now - since
        suspended_s = self._row.suspended_s + away
        self._row = self._row._replace(suspended_at=None, suspended_s=suspended_s)
        self._mark("running")

    def _ending(self) -> Result | None:
        rules = self._rules
        return ending(self._game, self._position, rules.max_plies, rules.adjudication, self._evals)

    async def _ply(self, due: float) -> Result | None:
        """Play one ply; a result where the player ends the match instead."""
        position, side = self._position, self._position.side
        scoring = self._begin_to_score(position, due)
        try:
            decision, thought_s = await self._decide(Seat(self._spec.agents[side], side), due)
            done = time.monotonic()
            judge_cp = None if scoring is None else await scoring
        finally:
            if scoring is not None:
                scoring.cancel()
        self.is_faulty = decision.is_breakdown
        decision, left_s = self._on_the_clock(decision, thought_s)
        attempts = self._attempt_rows(decision.attempts)
        last = _last_words((*self._made, *decision.attempts))
        self._made, self._num_rows = (), 0
        if decision.move is None:
            self._last_tries = attempts
            if decision.accepts_draw:
                return agreed(self._game, position)
            assert decision.fault is not None
            return loss(self._game, position, decision.fault, last)
        self._doing = f"game {self._spec.game}"
        clock = self._store.clock
        after = position.play(decision.move)
        row = PlyRow(
            self._spec.id,
            position.ply,
            side,
            decision.move,
            position.notation(decision.move, self._game.record_notation),
            after.fen,
            left_s,
            clock.of(self._ready),
            clock.of(due),
            clock.of(done),
            decision.offers_draw,
            judge_cp,
        )
        await self._store.commit(row, *attempts)
        self._position, self._ready = after, time.monotonic()
        self._clocks[side] = left_s
        self._is_draw_offered = decision.offers_draw
        own_cp = decision.attempts[-1].eval_cp if decision.attempts else None
        self._evals.append(own_cp if self._judge is None else judge_cp)
        return None

    def _begin_to_score(self, position: Position, due: float) -> asyncio.Future[int | None] | None:
        """The judge looks at the position while the player does."""
        if self._judge is None:
            return None
        scoring = self._judge.score(self._spec.id, self._spec.game, position, due)
        return asyncio.ensure_future(scoring)

    def _on_the_clock(self, decision: Decision, thought_s: float) -> tuple[Decision, float | None]:
        """The decision, or the flag's fall in its place, and what is left after it."""
        rules, left_s = self._rules.clock, self._clocks[self._position.side]
        has_answer = decision.move is not None or decision.accepts_draw
        if rules is None or left_s is None or not has_answer:
            return decision, None
        tries = (*self._made, *decision.attempts)
        spent_s = spent_seconds(tries, thought_s)
        after_s = rules.after(left_s, spent_s)
        if after_s is not None:
            return decision, after_s
        why = fell(tries, spent_s, left_s)
        *earlier, last = decision.attempts or (Attempt(0, None, None),)
        late = replace(last, fault=Fault.FLAG_FALL, detail=why)
        return Decision(None, Fault.FLAG_FALL, (*earlier, late)), None

    async def _decide(self, seat: Seat, due: float) -> tuple[Decision, float]:
        """The agent's decision, asked again for as long as only the infrastructure fails, and the
        seconds that it took in the end."""
        player = self._players[seat.side]
        tries = refusals = 0
        while True:
            turn = Turn(
                self._spec.id,
                self._spec.game,
                self._position,
                seat,
                self._rules.agent_attempts,
                self._clocks[seat.side],
                due,
                self._made,
                self._is_draw_offered,
            )
            if not player.is_engine_ready():
                self._suspend("its engine is being started again")
            self._doing = f"agent {seat.agent}"
            asked = time.monotonic()
            try:
                decision = await player.agent.choose(turn)
            except EngineError as error:
                is_refusal = isinstance(error.__cause__ or error, Overloaded)
                tries, refusals = tries + (not is_refusal), refusals + is_refusal
                await self._interrupted(error, tries, tries + refusals)
            else:
                thought_s = time.monotonic() - asked
                self._check(decision, seat)
                if self._row.state == "suspended":
                    self._resumed()
                return decision, thought_s

    def _check(self, decision: object, seat: Seat) -> None:
        """What a user's own agent may get wrong is no fault of a player's."""
        if not isinstance(decision, Decision):
            raise _LeftForResume(f"agent {seat.agent} returned {decision!r}, which is no Decision")
        if any(a.reply is not None and not is_recordable(a.reply) for a in decision.attempts):
            raise _LeftForResume(f"agent {seat.agent} returned a reply without usable figures")
        if decision.offers_draw and not self._rules.draw_offers:
            raise _LeftForResume(
                f"agent {seat.agent} offered a draw, and tournament.draw_offers is false"
            )
        if decision.accepts_draw:
            if not self._is_draw_offered or decision.move is not None:
                raise _LeftForResume(
                    f"agent {seat.agent} accepted a draw that it was not offered, or with a move"
                )
        elif decision.move is None:
            if decision.fault is None or decision.fault.is_infrastructure:
                raise _LeftForResume(
                    f"agent {seat.agent} gave no move and no fault of its own ({decision.fault})"
                )
        elif decision.move not in self._position.legal_moves():
            raise _LeftForResume(
                f"agent {seat.agent} returned {decision.move!r}, which is not legal"
            )

    async def _interrupted(self, error: EngineError, tries: int, rounds: int) -> None:
        """Record an infrastructure fault, stop the match's clock, wait before the next try."""
        cause = error.__cause__ if isinstance(error.__cause__, EngineError) else error
        attempts = error.attempts if isinstance(error, Interrupted) else (self._bare(error),)
        self._made += attempts
        self._store.add(*self._attempt_rows(attempts))
        if not isinstance(cause, Overloaded):
            self._suspend(str(cause))
        if isinstance(cause, EngineDead) and cause.final:
            self._progress.engine_failure = str(cause)
            raise _LeftForResume(str(cause))
        if isinstance(cause, RequestRejected):
            raise _LeftForResume(str(cause))
        if tries >= MAX_TRIES:
            raise _LeftForResume(f"{tries} infrastructure faults in a row; the last: {cause}")
        wait = min(_LAST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(rounds - 1, 10))
        going_on = await self._pacer.until(time.monotonic() + wait * self._dice.uniform(0.5, 1.0))
        if not going_on:
            raise _LeftForResume("the run was stopped")

    def _bare(self, error: EngineError) -> Attempt:
        """The attempt that an engine's error stands for, where an agent passes it on as it is."""
        n = sum(a.is_own_failure for a in self._made)
        request_id = f"{self._spec.id}/{self._position.ply}/{n}/{len(self._made)}"
        return Attempt(n, None, Fault(error.kind), str(error), request_id)

    def _suspend(self, why: str) -> None:
        if self._row.state != "suspended":
            self._row = self._row._replace(suspended_at=self._store.clock.now())
            self._mark("suspended")
            self._store.event("match_suspended", {"match": self._spec.id, "why": why})
            self._log.info("match_suspended", why=why)

    def _resumed(self) -> None:
        before = self._row.suspended_s
        self._run_again(self._store.clock.now())
        away = self._row.suspended_s - before
        self._store.event("match_resumed", {"match": self._spec.id, "away_s": away})

    async def _finish(self, result: Result) -> MatchRow:
        first, second = result.scores or (None, None)
        self._row = self._row._replace(
            state="finished",
            winner=result.winner,
            termination=result.termination.value,
            detail=storable(result.detail),
            score_first=first,
            score_second=second,
            ended=self._store.clock.now(),
        )
        await self._store.commit(self._row, *self._last_tries)
        self._log.info(
            "match_finished",
            termination=self._row.termination,
            winner=self._row.winner,
            plies=self._position.ply,
        )
        return self._row

    async def _leave(self, why: str) -> MatchRow:
        """Leave the match unfinished, so that `resume` goes on from its last committed ply."""
        self.is_faulty = not self._pacer.is_stopping
        is_suspended = self._row.state == "suspended"
        since = self._row.suspended_at if is_suspended else self._store.clock.now()
        self._row = self._row._replace(state="suspended", detail=storable(why), suspended_at=since)
        await self._store.commit(self._row)
        tell = self._log.info if self._pacer.is_stopping else self._log.warning
        tell("match_left", why=why)
        return self._row

    def _mark(self, state: str) -> None:
        self._row = self._row._replace(state=state, detail=None)  # type: ignore[arg-type]
        self._store.add(self._row)

    def _attempt_rows(self, attempts: Sequence[Attempt]) -> list[AttemptRow]:
        side = self._position.side
        player = self._players[side]
        rows = []
        for attempt in attempts:
            rows.append(self._attempt_row(attempt, player, side))
            self._num_rows += 1
        return rows

    def _attempt_row(self, attempt: Attempt, player: Player, side: Side) -> AttemptRow:
        reply, of = attempt.reply, self._store.clock.of
        head = (
            attempt.request_id
            or f"{self._spec.id}/{self._position.ply}/{attempt.n}/{self._num_rows}",
            self._spec.id,
            self._position.ply,
            side,
            attempt.n,
            player.engine,
            player.mode,
        )
        fault = attempt.fault.value if attempt.fault else None
        if reply is None:
            detail = storable(attempt.detail)
            return AttemptRow(*head, fault=fault, detail=detail, eval_cp=attempt.eval_cp)
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
            storable(reply.replica or "") or None,
            attempt.eval_cp,
            storable(reply.reasoning) or None,
        )


def _last_words(attempts: Sequence[Attempt]) -> str:
    """What is wrong with the player's own last try of a ply, those before a resume included."""
    own = [a for a in attempts if a.is_own_failure]
    return own[-1].detail if own else ""
