"""A run judged again from what it stored, pure: parser, referee and ratings, and no engine.

Every reply goes through the parser as it is now, every move through the rules, and the ending and
the ratings follow from both. What a clock decided stands, for time cannot be judged again; so do
the answers of a user's own agents and whatever else left no reply.

Where a reply is now read otherwise the game might have gone otherwise from there. Its later replies
are still judged, each in the position in which it was given, so a change of the parser shows every
ply that it would change; the match's result stands as it is stored.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from agents import (
    ACCEPT,
    OFFER,
    PARSER_VERSION,
    PROMPT_VERSION,
    THOUGHT,
    Concessions,
    Failure,
    Fault,
    from_uci,
    judge_choice,
    judge_free,
    judge_thought,
)
from arena import report
from arena.adjudication import AdjudicationRules
from arena.config import AdjudicationSection, null_name
from arena.referee import agreed, ending, loss
from arena.store import AttemptRow, MatchRow, PlyRow, Records, StoreError, storable
from games import Game, Position, Start, Termination, load_game
from games.escaping import one_line
from serving import Finish

SCHEMA_VERSION = 1

_A_THOUGHT = "a thought"
_RowT = TypeVar("_RowT", PlyRow, AttemptRow)


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is stored one way and comes out another way now."""

    match: str
    ply: int | None
    """None of a match's result."""
    attempt: str | None
    """The request id, where it is a reply that is read otherwise."""
    what: str
    """reply, order, side, move, notation, position or result."""
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
    kinds: Mapping[str, str]
    """Of agents, by name."""
    concessions: Concessions


def build(records: Records) -> dict[str, Any]:
    """What comes out now, and each difference from what is stored. Raises StoreError for a run
    whose game cannot be loaded, or that holds what this version does not know."""
    setting = _setting(records)
    plies = _grouped(records.plies)
    attempts = _grouped(records.attempts)
    replays = []
    for row in records.matches:
        if row.state != "scheduled":
            of_match = plies.get(row.id, ()), attempts.get(row.id, ())
            try:
                replays.append(_replay(row, *of_match, setting))
            except ValueError as error:
                raise StoreError(f"match {row.id} cannot be replayed: {error}") from None
    differences = [asdict(found) for one in replays for found in one.differences]
    ratings = _ratings(records, replays)
    return {
        "schema_version": SCHEMA_VERSION,
        "run": records.run.id,
        "is_same": not differences,
        "matches": len(replays),
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


def _setting(records: Records) -> _Setting:
    config = json.loads(records.run.config_json)
    return _Setting(
        config["tournament"].get("max_plies"),
        AdjudicationSection(**config.get("adjudication", {})).rules,
        {
            name: agent["kind"]
            for agent in config["agents"]
            for name in (agent["name"], null_name(agent["name"]))
        },
        Concessions(
            *(config["tournament"].get(key, False) for key in ("draw_offers", "resignation"))
        ),
    )


def _grouped(rows: Iterable[_RowT]) -> dict[str, list[_RowT]]:
    return {match: list(found) for match, found in groupby(rows, key=attrgetter("match_id"))}


def _replay(
    row: MatchRow, plies: Sequence[PlyRow], attempts: Sequence[AttemptRow], setting: _Setting
) -> _Replay:
    """A match from its start, as far as its stored moves can be followed."""
    replay = _Replay(row)
    by_ply: dict[int, list[AttemptRow]] = {}
    for attempt in attempts:
        by_ply.setdefault(attempt.ply, []).append(attempt)
    game = load_game(row.game)
    position = game.position(Start(row.start_fen, row.ruleset, row.opening))
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
        _judge_all(replay, number, made, _Asked(position, is_offered), setting, answer)
        after = _follow(replay, number, ply, game, position)
        if after is None:
            replay.depart(number)
            return replay
        position, is_offered = after, bool(ply.offers_draw)
        evals.append(made[-1].eval_cp if made else None)
    last = by_ply.get(len(plies), [])
    asked = _Asked(position, is_offered)
    closing = ACCEPT if row.termination == Termination.DRAW_AGREED else None
    faults = _judge_all(replay, len(plies), last, asked, setting, closing)
    if row.state == "finished" and replay.departs_at is None:
        _end(replay, game, asked, setting, evals, faults)
    return replay


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
) -> list[Failure]:
    """Judge all attempts of a ply; returned are the player's own failures, as they come out now.

    `answer` is the one that counted, None where the match ended by a failure.
    """
    failed: list[Failure] = []
    for attempt in attempts:
        kind = setting.kinds.get(replay.row.agents[attempt.side], "")
        outcome = _judge(attempt, asked, kind, setting.concessions)
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
        if isinstance(stored, Failure) and not stored.fault.is_infrastructure:
            failed.append(stored)
    return failed


def _judge(
    attempt: AttemptRow, asked: _Asked, kind: str, concessions: Concessions
) -> str | Failure | None:
    """The answer or the failure that a stored reply comes to now; None where it is not for the text
    to say."""
    text, (position, is_draw_offered) = attempt.reply_text, asked
    if text is None:
        return None
    finish = Finish(attempt.finish or Finish.STOP)
    if attempt.fault == Fault.FLAG_FALL and finish is not Finish.DEADLINE:
        return None
    if attempt.request_id.endswith(THOUGHT):
        return judge_thought(finish) or _A_THOUGHT
    if attempt.mode in ("constrained", "think"):
        outcome = judge_choice(text, finish, position, concessions, is_draw_offered)
    elif attempt.mode == "free":
        outcome = judge_free(
            text,
            finish,
            position,
            attempt.reasoning or "",
            concessions=concessions,
            is_draw_offered=is_draw_offered,
        )
    elif kind == "uci":
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


def _end(
    replay: _Replay,
    game: Game,
    asked: _Asked,
    setting: _Setting,
    evals: Sequence[int | None],
    faults: Sequence[Failure],
) -> None:
    """Recompute the result of a match whose every reply came out as it is stored."""
    row, position = replay.row, asked.position
    result = ending(game, position, setting.max_plies, setting.adjudication, evals)
    if result is None and row.termination == Termination.DRAW_AGREED and asked.is_draw_offered:
        result = agreed(game, position)
    if result is None:
        last = faults[-1] if faults else None
        fault = None if last is None else last.fault
        if row.termination == Fault.FLAG_FALL:
            fault = Fault.FLAG_FALL  # the move's time may be over between two tries
        if row.termination == Termination.DRAW_AGREED:
            replay.differ(None, "result", _result(row), "no draw was offered")
            return
        if fault is None:
            replay.num_trusted += 1
            return
        result = loss(game, position, fault, last.detail if last is not None else "")
    first, second = result.scores or (None, None)
    now = row._replace(
        winner=result.winner,
        termination=result.termination.value,
        detail=storable(result.detail),
        score_first=first,
        score_second=second,
    )
    if now != row:
        replay.differ(None, "result", _result(row), _result(now))
        replay.row = now


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


def _words(value: object) -> str:
    if isinstance(value, Failure):
        return one_line(f"{value.fault.value} ({value.detail})")
    return "nothing" if value is None else one_line(str(value))
