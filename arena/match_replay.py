"""One match judged again from what is stored of it, pure: parser, referee, clocks and ending.

How long a try took stands, for time cannot be judged again; so do the answers and failures of a
user's own agents, and the moves and the times of players that are asked nothing.

Where a reply is now read otherwise the game might have gone otherwise from there. Its later replies
are still judged, each in the position in which it was given, so a change of the parser shows every
ply that it would change; the match's result stands as it is stored.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from agents import (
    ACCEPT,
    OFFER,
    THOUGHT,
    AgentConfig,
    Attempt,
    Concessions,
    Failure,
    Fault,
    LlmConfig,
    OwnAgentConfig,
    UciConfig,
    drawn_move,
    from_uci,
    judge_choice,
    judge_free,
    judge_thought,
)
from arena.adjudication import AdjudicationRules
from arena.clock import ClockRules, could_fall, could_leave
from arena.config import RunConfig
from arena.referee import agreed, ending, loss
from arena.store import AttemptRow, MatchRow, PlyRow, storable
from arena.tournament import attempt_of
from games import Game, Position, Result, Side, Start, Termination, load_game
from games.escaping import one_line
from serving import Finish

_A_THOUGHT = "a thought"
_NO_REPLY = "no reply is stored"
_JUDGED = (
    Fault.ILLEGAL,
    Fault.AMBIGUOUS,
    Fault.UNPARSABLE,
    Fault.EMPTY,
    Fault.TRUNCATED,
    Fault.RESIGNED,
    Fault.ENGINE_ILLEGAL,
)
"""Faults that are found in a reply."""
_LOSSES = (Termination.FORFEIT, Termination.FLAG_FALL, Termination.RESIGNATION)
"""Endings by a player's failure."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is stored one way and comes out another way now."""

    match: str
    ply: int | None
    """None of the match itself and its result."""
    attempt: str | None
    """The request id, where it is a reply that is read otherwise."""
    what: str
    """match, state, attempt (a try that belongs nowhere), order, side, move, notation, position,
    answer (of a move that no reply gave), reply, mode, clock or result."""
    stored: str
    now: str


@dataclass(slots=True)
class MatchReplay:
    """A match as it comes out now."""

    row: MatchRow
    differences: list[Difference] = field(default_factory=list)
    num_judged: int = 0
    """Replies that were judged again."""
    num_trusted: int = 0
    """Attempts that cannot be."""
    departs_at: int | None = None
    """The first ply from which the game might have gone otherwise."""

    def differ(self, ply: int | None, what: str, stored: object, now: object) -> None:
        """Note a difference; None of either is "nothing"."""
        self.differences.append(
            Difference(self.row.id, ply, None, what, _words(stored), _words(now))
        )

    def depart(self, ply: int) -> None:
        """Note that the game might have gone otherwise from this ply on; the first note stands."""
        if self.departs_at is None:
            self.departs_at = ply


class _Asked(NamedTuple):
    """What a player was shown."""

    position: Position
    is_draw_offered: bool


@dataclass(frozen=True, slots=True)
class Setting:
    """What of the run's config bears on a game."""

    max_plies: int | None
    adjudication: AdjudicationRules
    has_judge: bool
    """Its scores count in adjudication, else the players' own."""
    concessions: Concessions
    clock: ClockRules | None
    config: RunConfig
    players: Mapping[str, AgentConfig]
    """By name; a match may hold others only where its store is damaged."""

    def player(self, row: MatchRow, side: Side) -> AgentConfig | None:
        """None of one whom the config does not know."""
        return self.players.get(row.agents[side])


def replay_match(
    row: MatchRow, plies: Sequence[PlyRow], attempts: Sequence[AttemptRow], setting: Setting
) -> MatchReplay:
    """A match from its start, as far as its stored moves can be followed. ValueError where what is
    stored cannot be judged at all, as a position that is none."""
    replay = MatchReplay(row)
    if row.state == "scheduled":
        replay.differ(None, "state", "scheduled", "it was begun")
    by_ply: dict[int, list[AttemptRow]] = {}
    for attempt in attempts:
        by_ply.setdefault(attempt.ply, []).append(attempt)
    for number in by_ply:
        if not 0 <= number <= len(plies):
            replay.differ(number, "attempt", "a try", "the moves before it are missing")
    game = load_game(row.game)
    position = game.position(Start(row.start_fen, row.ruleset, row.opening))
    start_s = None if setting.clock is None else setting.clock.start_s
    clocks = [start_s, start_s]
    evals: list[int | None] = []
    is_over = is_offered = False
    for number, ply in enumerate(plies):
        over = ending(game, position, setting.max_plies, setting.adjudication, evals)
        if over is not None and not is_over:
            is_over = True
            replay.differ(number, "result", "the game goes on", over.detail)
            replay.depart(number)
        made = by_ply.get(number, [])
        answer = ply.move + (OFFER if ply.offers_draw else "")
        asked = _Asked(position, is_offered)
        _judge_all(replay, number, made, asked, setting, answer)
        _check_answered(replay, number, made, asked, setting, ply)
        _check_clock(replay, number, ply, made, clocks, position.side, setting)
        after = _follow(replay, number, ply, game, position)
        if after is None:
            replay.depart(number)
            return replay
        position, is_offered = after, bool(ply.offers_draw)
        own_cp = made[-1].eval_cp if made else None
        evals.append(ply.judge_cp if setting.has_judge else own_cp)
    asked = _Asked(position, is_offered)
    last = by_ply.get(len(plies), [])
    over = ending(game, position, setting.max_plies, setting.adjudication, evals)
    has_agreed = over is None and row.termination == Termination.DRAW_AGREED
    _judge_all(replay, len(plies), last, asked, setting, ACCEPT if has_agreed else None)
    if over is None:
        _check_answered(replay, len(plies), last, asked, setting, None)
    elif last:
        replay.differ(len(plies), "attempt", "a try", "the game was over")
    if row.state != "finished":
        if (row.winner, row.termination) != (None, None):
            replay.differ(None, "result", _result(row), "the match is not finished")
    elif replay.departs_at is None:
        _end(replay, over or _ended(replay, game, asked, setting, last, clocks))
    return replay


def _check_answered(
    replay: MatchReplay,
    number: int,
    made: Sequence[AttemptRow],
    asked: _Asked,
    setting: Setting,
    ply: PlyRow | None,
) -> None:
    """That a move, or the draw that is accepted in place of one, has the answer that its player's
    kind gives, and no other; of a user's own agent there is nothing to say."""
    row, position = replay.row, asked.position
    player = setting.player(row, position.side)
    if player is None or isinstance(player, OwnAgentConfig):
        return
    drawn = None
    if isinstance(player, UciConfig):
        drawn = drawn_move(position, row.id, setting.config.seed, player.random_moves)
    if ply is not None and drawn not in (None, ply.move):
        replay.differ(number, "answer", ply.move, f"{drawn} is drawn by the run's dice")
    if ply is not None and ply.offers_draw and not isinstance(player, LlmConfig):
        replay.differ(number, "answer", ply.move + OFFER, f"{player.kind} offers no draw")
    is_asked = isinstance(player, LlmConfig | UciConfig) and drawn is None
    has_agreed = isinstance(player, LlmConfig) and row.termination == Termination.DRAW_AGREED
    wanted = int(is_asked and (ply is not None or has_agreed))
    answers = sum(
        attempt.fault is None
        and attempt.reply_text is not None
        and not attempt.request_id.endswith(THOUGHT)
        for attempt in made
    )
    if ply is None and answers > wanted:
        replay.differ(number, "attempt", "an answer", "its move is missing")
    elif answers != wanted:
        stored = "a draw accepted" if ply is None else ply.move
        replay.differ(number, "answer", stored, f"{answers} replies that gave an answer")


def _check_clock(
    replay: MatchReplay,
    number: int,
    ply: PlyRow,
    made: Sequence[AttemptRow],
    clocks: list[float | None],
    side: Side,
    setting: Setting,
) -> None:
    """That what a ply left follows from its side's clock before it and its tries."""
    left_s, after_s, rules = clocks[side], ply.clock_left_s, setting.clock
    clocks[side] = after_s
    if rules is None or left_s is None or after_s is None:
        if rules is not None and after_s is None:
            replay.differ(number, "clock", None, "there is a clock")
        elif rules is None and after_s is not None:
            replay.differ(number, "clock", f"{after_s:g} s left", "there is no clock")
        return
    if not could_leave(rules, left_s, map(attempt_of, made), after_s):
        told = f"{left_s:g} s before it, and its tries do not leave that"
        replay.differ(number, "clock", f"{after_s:g} s left", told)


def _follow(
    replay: MatchReplay, number: int, ply: PlyRow, game: Game, position: Position
) -> Position | None:
    """The position after a stored ply; None where it cannot be played."""
    if ply.ply != number:
        replay.differ(number, "order", f"ply {ply.ply}", f"ply {number} is missing")
        return None
    if ply.side != position.side:
        replay.differ(number, "side", ply.side, position.side)
    if ply.move not in position.legal_moves():
        replay.differ(number, "move", ply.move, "not legal")
        return None
    notation = position.notation(ply.move, game.record_notation)
    if ply.notation != notation:
        replay.differ(number, "notation", ply.notation, notation)
    after = position.play(ply.move)
    if ply.fen_after != after.fen:
        replay.differ(number, "position", ply.fen_after, after.fen)
    return after


def _judge_all(
    replay: MatchReplay,
    number: int,
    attempts: Sequence[AttemptRow],
    asked: _Asked,
    setting: Setting,
    answer: str | None,
) -> None:
    """Judge all attempts of a ply; `answer` is the one that counted, None where the match ended by
    a failure."""
    player = setting.player(replay.row, asked.position.side)
    for attempt in attempts:
        _check_asked(replay, number, attempt, asked.position.side, player)
        outcome = _judge(attempt, asked, player, setting.concessions)
        stored = _stored(attempt, answer)
        if outcome is None:
            replay.num_trusted += 1
            outcome = stored
        else:
            replay.num_judged += 1
        if outcome != stored:
            replay.differences.append(
                Difference(
                    attempt.match_id,
                    number,
                    attempt.request_id,
                    "reply",
                    _words(stored),
                    _words(outcome),
                )
            )
            replay.depart(number)


def _check_asked(
    replay: MatchReplay, number: int, attempt: AttemptRow, side: Side, player: AgentConfig | None
) -> None:
    """That an attempt is of the side to move, and was asked as its player asks."""
    if attempt.side != side:
        replay.differ(number, "side", attempt.side, side)
    asked = (player.engine, player.mode) if isinstance(player, LlmConfig) else (None, None)
    if player is not None and (attempt.engine, attempt.mode) != asked:
        stored, now = (f"{mode} on {engine}" for engine, mode in (attempt[5:7], asked))
        replay.differ(number, "mode", stored, now)


def _judge(
    attempt: AttemptRow, asked: _Asked, player: AgentConfig | None, concessions: Concessions
) -> str | Failure | None:
    """The answer or the failure that a stored reply comes to now; None where it is not for the text
    to say."""
    text, (position, is_draw_offered) = attempt.reply_text, asked
    mode = player.mode if isinstance(player, LlmConfig) else None
    is_uci = isinstance(player, UciConfig)
    if text is None:
        return _NO_REPLY if (mode or is_uci) and attempt.fault in _JUDGED else None
    finish = Finish(attempt.finish or Finish.STOP)
    if attempt.fault == Fault.FLAG_FALL and finish is not Finish.DEADLINE:
        return None
    if attempt.request_id.endswith(THOUGHT):
        return judge_thought(finish) or _A_THOUGHT
    if mode in ("constrained", "think"):
        outcome = judge_choice(text, finish, position, concessions, is_draw_offered)
    elif mode == "free":
        outcome = judge_free(
            text,
            finish,
            position,
            attempt.reasoning or "",
            concessions=concessions,
            is_draw_offered=is_draw_offered,
        )
    elif is_uci:
        move = from_uci(text, position)
        legal = move in position.legal_moves()
        outcome = move if legal else Failure(Fault.ENGINE_ILLEGAL, attempt.detail)
    else:
        return None
    if isinstance(outcome, Failure):
        # as the store holds the words
        return replace(outcome, detail=storable(outcome.detail))
    return outcome


def _stored(attempt: AttemptRow, answer: str | None) -> str | Failure | None:
    """What an attempt came to as it is stored; `answer` is its ply's."""
    if attempt.fault is not None:
        return Failure(Fault(attempt.fault), attempt.detail)
    return _A_THOUGHT if attempt.request_id.endswith(THOUGHT) else answer


def _ended(
    replay: MatchReplay,
    game: Game,
    asked: _Asked,
    setting: Setting,
    tries: Sequence[AttemptRow],
    clocks: Sequence[float | None],
) -> Result | None:
    """How the player to move ended a match that neither the rules nor the arena did; None where
    nothing that is stored says so."""
    row, position = replay.row, asked.position
    player = setting.player(row, position.side)
    if row.termination == Termination.DRAW_AGREED:
        may_agree = player is None or isinstance(player, OwnAgentConfig | LlmConfig)
        return agreed(game, position) if asked.is_draw_offered and may_agree else None
    if row.termination not in _LOSSES:
        return None
    if player is None or isinstance(player, OwnAgentConfig):
        replay.num_trusted += 1
        result = loss(game, position, Fault.FLAG_FALL, "")
        return replace(result, termination=Termination(row.termination), detail=row.detail or "")
    failed = [try_ for try_ in map(attempt_of, tries) if try_.is_own_failure]
    last = failed[-1] if failed else None
    said = "" if last is None else last.detail
    if row.termination == Termination.FLAG_FALL:
        has_fallen = _has_fallen(player, failed, clocks[position.side], setting)
        return loss(game, position, Fault.FLAG_FALL, said) if has_fallen else None
    if last is None or last.fault is None:
        return None
    is_free = isinstance(player, LlmConfig) and player.mode == "free"
    if is_free and last.fault is not Fault.RESIGNED:
        budget = setting.config.faults.agent_attempts
        if len(failed) < budget:
            return None
    return loss(game, position, last.fault, said)


def _has_fallen(
    player: AgentConfig, failed: Sequence[Attempt], left_s: float | None, setting: Setting
) -> bool:
    """Whether a flag can have fallen as far as the stored tries, all of them failed, say."""
    last = failed[-1] if failed else None
    if last is None or last.fault is not Fault.FLAG_FALL:  # the time was over between two tries
        limit_s = min(
            setting.config.pace.move_limit_seconds, math.inf if left_s is None else left_s
        )
        return isinstance(player, LlmConfig) and could_fall(limit_s, failed)
    if last.reply is None:  # in silence, or by the clock of a player that is asked nothing
        return not isinstance(player, LlmConfig) and (
            left_s is not None or isinstance(player, UciConfig)
        )
    if last.reply.finish is Finish.DEADLINE:
        return True
    return left_s is not None and could_fall(left_s, failed)


def _end(replay: MatchReplay, result: Result | None) -> None:
    """Compare the result of a match whose every reply came out as it is stored."""
    row = replay.row
    if result is None:
        is_draw = row.termination == Termination.DRAW_AGREED
        now = "no draw was offered" if is_draw else "nothing that is stored ended the game so"
        replay.differ(None, "result", _result(row), now)
        return
    first, second = result.scores or (None, None)
    now_row = row._replace(
        winner=result.winner,
        termination=result.termination.value,
        detail=storable(result.detail),
        score_first=first,
        score_second=second,
    )
    if now_row != row:
        replay.differ(None, "result", _result(row), _result(now_row))
        replay.row = now_row


def _result(row: MatchRow) -> str:
    won = "drawn" if row.winner is None else f"won by side {row.winner}"
    points = "" if row.score_first is None else f" {row.score_first:g}-{row.score_second:g}"
    return f"{won}{points}, {row.termination}: {row.detail}"


def _words(value: object) -> str:
    if isinstance(value, Failure):
        return one_line(f"{value.fault.value} ({value.detail})")
    return "nothing" if value is None else one_line(str(value))
