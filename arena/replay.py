"""A run judged again from what it stored, and that told, pure: no engine is asked.

The matches follow from the config, every reply goes through the parser as it is now, every move
through the rules, clocks are charged what their tries took, and the ending and the ratings follow
from all that (`arena.match_replay`).
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, TypeVar

from agents import PARSER_VERSION, PROMPT_VERSION
from arena import provenance, report
from arena.config import ConfigError, RunConfig, parse
from arena.match_replay import Difference, MatchReplay, Setting, replay_match
from arena.store import AttemptRow, MatchRow, PlyRow, Records, StoreError, planned
from games.escaping import one_line

SCHEMA_VERSION = 1

_FOUNDATION = ("state", "order", "side", "move", "position", "attempt")
"""What must not differ where a match is to go on."""
_RowT = TypeVar("_RowT", PlyRow, AttemptRow)


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


def _setting(records: Records) -> Setting:
    try:
        config = parse(json.loads(records.run.config_json))
    except ConfigError as error:
        raise StoreError(f"run {records.run.id}: its config cannot be read: {error}") from None
    return Setting(
        config.tournament.max_plies,
        config.adjudication.rules,
        config.adjudication.judge is not None,
        config.tournament.concessions,
        config.clock.rules,
        config,
        {player.name: player for player in config.players},
    )


def _replays(
    records: Records, rows: Iterable[MatchRow], setting: Setting
) -> tuple[list[MatchReplay], set[str]]:
    """Those of `rows` that were begun, and the ids that plies and attempts have beside `rows`."""
    plies, attempts = _grouped(records.plies), _grouped(records.attempts)
    replays = []
    for row in rows:
        of_match = plies.pop(row.id, ()), attempts.pop(row.id, ())
        if row == planned(row) and not any(of_match):
            continue
        try:
            replays.append(replay_match(row, *of_match, setting))
        except ValueError as error:
            raise StoreError(f"match {row.id} cannot be replayed: {error}") from None
    return replays, plies.keys() | attempts.keys()


def _grouped(rows: Iterable[_RowT]) -> dict[str, list[_RowT]]:
    return {match: list(found) for match, found in groupby(rows, key=attrgetter("match_id"))}


def _ratings(records: Records, replays: Sequence[MatchReplay]) -> list[dict[str, Any]]:
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
