"""A run judged again from what it stored, pure: parser, referee and ratings, and no engine.

The matches follow from the config, every reply goes through the parser as it is now, every move
through the rules, clocks are charged what their tries took, and the ending and the ratings follow
from all that. How long a try took stands, for time cannot be judged again; so do the answers and
failures of a user's own agents, and the moves and the times of players that are asked nothing.

Where a reply is now read otherwise the game might have gone otherwise from there. Its later replies
are still judged, each in the position in which it was given, so a change of the parser shows every
ply that it would change; the match's result stands as it is stored.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from agents import (
    ACCEPT,
    OFFER,
    PARSER_VERSION,
    PROMPT_VERSION,
    THOUGHT,
    AgentConfig,
    Attempt,
    Concessions,
    Failure,
    Fault,
    LlmConfig,
    UciConfig,
    drawn_move,
    from_uci,
    judge_choice,
    judge_free,
    judge_thought,
)
from arena import provenance, report
from arena.adjudication import AdjudicationRules
from arena.clock import ClockRules, could_fall, could_leave
from arena.config import ConfigError, RunConfig, parse
from arena.referee import agreed, ending, loss
from arena.store import AttemptRow, MatchRow, PlyRow, Records, StoreError, planned, storable
from arena.tournament import attempt_of
from games import Game, Position, Result, Side, Start, Termination, load_game
from games.escaping import one_line
from serving import Finish

SCHEMA_VERSION = 1

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
_FOUNDATION = ("state", "order", "side", "move", "position", "attempt")
"""What must not differ where a match is to go on."""
_RowT = TypeVar("_RowT", PlyRow, AttemptRow)


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
class _Replay:
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
        self.differences.append(
            Difference(self.row.id, ply, None, what, _words(stored), _words(now))
        )

    def depart(self, ply: int) -> None:
        if self.departs_at is None:
            self.departs_at = ply


class _Asked(NamedTuple):
    """What a player was shown."""

    position: Position
    is_draw_offered: bool


@dataclass(frozen=True, slots=True)
class _Setting:
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
        return self.players.get(row.agents[side])


def build(records: Records) -> dict[str, Any]:
    """What comes out now, and each difference from what is stored. Raises StoreError for a run
    whose config or game cannot be loaded, or that holds what this version does not know."""
    setting = _setting(records)
    found: defaultdict[str, list[Difference]] = defaultdict(list)
    schedule = None
    try:
        for match, stored, now in provenance.strange(setting.config, records):
            found[match].append(_of_match(match, stored, now))
    except ConfigError as error:
        schedule = str(error)
        for row in records.matches:
            unknown = provenance.foreign(setting.config, row)
            if unknown is not None:
                found[row.id].append(_of_match(row.id, unknown, "the config has none such"))
    replays, orphans = _replays(records, records.matches, setting)
    for one in replays:
        found[one.row.id] += one.differences
    for match in orphans:
        found[match].append(_of_match(match, "plies or attempts", "no such match is stored"))
    differences = list(map(asdict, chain.from_iterable(found.values())))
    ratings = _ratings(records, replays)
    return {
        "schema_version": SCHEMA_VERSION,
        "run": records.run.id,
        "is_same": not differences,
        "matches": sum(one.row.state != "scheduled" for one in replays),
        "schedule": schedule,
        "plies": len(records.plies),
        "replies_judged": sum(one.num_judged for one in replays),
        "attempts_trusted": sum(one.num_trusted for one in replays),
        "versions": _versions(records),
        "differences": differences,
        "departures": [
            {"match": one.row.id, "ply": one.departs_at}
            for one in replays
            if one.departs_at is not None
        ],
        "ratings": ratings,
    }


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """A replay in words, a line each."""
    yield (
        f"{result['matches']} matches, {result['plies']} plies, "
        f"{result['replies_judged']} replies judged again, "
        f"{result['attempts_trusted']} attempts taken as they are stored"
    )
    if result["schedule"] is not None:
        yield (
            f"matches are taken as they are stored, for the schedule cannot be made again: "
            f"{result['schedule']}"
        )
    for version in result["versions"]:
        yield f"{version['name']}: {version['stored']} then, {version['now']} now"
    departures = {entry["match"]: entry["ply"] for entry in result["departures"]}
    for match, found in groupby(result["differences"], key=lambda row: row["match"]):
        for row in found:
            where = "" if row["ply"] is None else f" ply {row['ply']}"
            tried = "" if row["attempt"] is None else f" ({row['attempt']})"
            yield f"{match}{where}{tried}: {row['what']}: {row['stored']}; now {row['now']}"
        if match in departures:
            yield (
                f"{match}: from ply {departures[match]} the game might have gone otherwise; its "
                "result stands as it is stored"
            )
    for row in result["ratings"]:
        yield (
            f"{row['game']} {one_line(row['name'])}: {row['stored']['points']:g} points, "
            f"Elo {_elo(row['stored'])}; now {row['now']['points']:g} points, Elo "
            f"{_elo(row['now'])}"
        )
    count = len(result["differences"])
    yield "same" if result["is_same"] else f"{count} difference{'' if count == 1 else 's'}"


def _elo(row: Mapping[str, Any]) -> str:
    return "-" if row["elo"] is None else f"{row['elo']:.0f}"


def check_resumable(config: RunConfig, records: Records) -> None:
    """Raises StoreError, which names match and ply, where a match that is to go on cannot, as its
    stored moves do not follow from each other or are of what the config does not know."""
    setting = _setting(records)
    for row in records.matches:
        unknown = provenance.foreign(config, row)
        if unknown is not None:
            raise _unsound(row.id, f"{unknown} is not in the run's config")
    to_go = tuple(row for row in records.matches if row.state != "finished")
    replays, orphans = _replays(records, to_go, setting)
    known = {row.id for row in records.matches}
    for match in orphans:
        if match not in known:
            raise _unsound(match, "it has plies or attempts and is not stored itself")
    for found in chain.from_iterable(one.differences for one in replays):
        if found.what in _FOUNDATION:
            where = found.match if found.ply is None else f"{found.match} ply {found.ply}"
            raise _unsound(where, f"{found.what}: {found.stored}; {found.now}")


def _unsound(where: str, why: str) -> StoreError:
    return StoreError(
        f"match {where}: {one_line(why)}; the run's database was damaged or changed, and nothing "
        "goes on from there: put a copy of run.db back, or begin a new run"
    )


def _setting(records: Records) -> _Setting:
    try:
        config = parse(json.loads(records.run.config_json))
    except ConfigError as error:
        raise StoreError(f"run {records.run.id}: its config cannot be read: {error}") from None
    return _Setting(
        config.tournament.max_plies,
        config.adjudication.rules,
        config.adjudication.judge is not None,
        config.tournament.concessions,
        config.clock.rules,
        config,
        {player.name: player for player in config.players},
    )


def _replays(
    records: Records, rows: Iterable[MatchRow], setting: _Setting
) -> tuple[list[_Replay], set[str]]:
    """Those of `rows` that were begun, and the ids that plies and attempts have beside `rows`."""
    plies, attempts = _grouped(records.plies), _grouped(records.attempts)
    replays = []
    for row in rows:
        of_match = plies.pop(row.id, ()), attempts.pop(row.id, ())
        if row == planned(row) and not any(of_match):
            continue
        try:
            replays.append(_replay(row, *of_match, setting))
        except ValueError as error:
            raise StoreError(f"match {row.id} cannot be replayed: {error}") from None
    return replays, plies.keys() | attempts.keys()


def _grouped(rows: Iterable[_RowT]) -> dict[str, list[_RowT]]:
    return {match: list(found) for match, found in groupby(rows, key=attrgetter("match_id"))}


def _replay(
    row: MatchRow, plies: Sequence[PlyRow], attempts: Sequence[AttemptRow], setting: _Setting
) -> _Replay:
    """A match from its start, as far as its stored moves can be followed."""
    replay = _Replay(row)
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
    replay: _Replay,
    number: int,
    made: Sequence[AttemptRow],
    asked: _Asked,
    setting: _Setting,
    ply: PlyRow | None,
) -> None:
    """That a move, or the draw that is accepted in place of one, has the answer that its player's
    kind gives, and no other; of a user's own agent there is nothing to say."""
    row, position = replay.row, asked.position
    player = setting.player(row, position.side)
    if player is None or _is_own(player):
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


def _is_own(player: AgentConfig) -> bool:
    return ":" in player.kind


def _check_clock(
    replay: _Replay,
    number: int,
    ply: PlyRow,
    made: Sequence[AttemptRow],
    clocks: list[float | None],
    side: Side,
    setting: _Setting,
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
    replay: _Replay, number: int, ply: PlyRow, game: Game, position: Position
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
    replay: _Replay,
    number: int,
    attempts: Sequence[AttemptRow],
    asked: _Asked,
    setting: _Setting,
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
    replay: _Replay, number: int, attempt: AttemptRow, side: Side, player: AgentConfig | None
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
        move = from_uci(text)
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
    replay: _Replay,
    game: Game,
    asked: _Asked,
    setting: _Setting,
    tries: Sequence[AttemptRow],
    clocks: Sequence[float | None],
) -> Result | None:
    """How the player to move ended a match that neither the rules nor the arena did; None where
    nothing that is stored says so."""
    row, position = replay.row, asked.position
    player = setting.player(row, position.side)
    if row.termination == Termination.DRAW_AGREED:
        may_agree = player is None or _is_own(player) or isinstance(player, LlmConfig)
        return agreed(game, position) if asked.is_draw_offered and may_agree else None
    if row.termination not in _LOSSES:
        return None
    if player is None or _is_own(player):
        replay.num_trusted += 1
        result = loss(game, position, Fault.FLAG_FALL, "")
        return replace(result, termination=Termination(row.termination), detail=row.detail or "")
    failed = [try_ for try_ in map(attempt_of, tries) if _is_own_failure(try_)]
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


def _is_own_failure(attempt: Attempt) -> bool:
    return attempt.fault is not None and not attempt.fault.is_infrastructure


def _has_fallen(
    player: AgentConfig, failed: Sequence[Attempt], left_s: float | None, setting: _Setting
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


def _end(replay: _Replay, result: Result | None) -> None:
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


def _ratings(records: Records, replays: Sequence[_Replay]) -> list[dict[str, Any]]:
    """Standings that come out otherwise; they follow from the results, so none where those hold."""
    now = {replay.row.id: replay.row for replay in replays}
    matches = tuple(now.get(row.id, row) for row in records.matches)
    if matches == records.matches:
        return []
    stored_rows, now_rows = (
        {(row["game"], row["name"]): row for row in report.build(held)["standings"]}
        for held in (records, records._replace(matches=matches))
    )
    return [
        {"game": key[0], "name": key[1], "stored": stored_rows[key], "now": now_rows[key]}
        for key in stored_rows
        if stored_rows[key] != now_rows[key]
    ]


def _versions(records: Records) -> list[dict[str, Any]]:
    """What judges, then and now; all are told, for a change explains a difference."""
    stored = json.loads(records.run.versions_json)
    now: dict[str, object] = {"parser": PARSER_VERSION, "prompt": PROMPT_VERSION}
    now |= {name: metadata.version(name) for name in ("boardfleet", "chess")}
    return [
        {"name": name, "stored": stored.get(name, "unknown"), "now": version}
        for name, version in now.items()
    ]


def _of_match(match: str, stored: str, now: str) -> Difference:
    return Difference(match, None, None, "match", one_line(stored), one_line(now))


def _words(value: object) -> str:
    if isinstance(value, Failure):
        return one_line(f"{value.fault.value} ({value.detail})")
    return "nothing" if value is None else one_line(str(value))
