"""Whether the matches that a run holds are those that its config makes, pure."""

import json
from collections.abc import Iterator
from typing import NamedTuple

from arena.config import RunConfig
from arena.figures import SCHEDULE_COMPLETE
from arena.schedule import MatchSpec, Schedule
from arena.store import MatchRow, Records, planned
from arena.tournament import first_score, row_of


class Strange(NamedTuple):
    """Something of a match that does not follow from the config."""

    match: str
    stored: str
    made: str


def foreign(config: RunConfig, row: MatchRow) -> str | None:
    """What of a match the config does not know, in words; None where it knows all."""
    names = {player.name for player in config.players}
    for name in row.agents:
        if name not in names:
            return f"agent {name!r}"
    if (row.game, row.ruleset) not in {(game.name, game.ruleset) for game in config.games()}:
        return f"game {row.game!r} by the rules {row.ruleset!r}"
    return None


def strange(config: RunConfig, records: Records) -> Iterator[Strange]:
    """Matches that are stored and not made, or made otherwise, or made and not stored.

    Raises ConfigError where the openings cannot be read.
    """
    made = {spec.id: spec for spec in _due(_at_its_widest(config, records), records)}
    for row in records.matches:
        spec = made.get(row.id)
        if spec is None:
            yield Strange(row.id, "a match", "no such match is made by the config")
            continue
        now = row_of(spec)
        for name, stored, value in zip(row._fields, planned(row), now, strict=True):
            if stored != value:
                yield Strange(row.id, f"{name} {stored}", f"{name} {value}")
    is_complete = any(event.kind == SCHEDULE_COMPLETE for event in records.events)
    if is_complete or not config.can_grow:
        known = {row.id for row in records.matches}
        for spec in _due(config, records):
            if spec.id not in known:
                yield Strange(spec.id, "no match", f"{' - '.join(spec.agents)} is made")


def _due(config: RunConfig, records: Records) -> list[MatchSpec]:
    scores = {row.id: first_score(row) for row in records.matches if row.state == "finished"}
    return Schedule(config, scores).due()


def _at_its_widest(config: RunConfig, records: Records) -> RunConfig:
    """The config with the most tables that the run has had: so many pairs an SPRT is ahead."""
    key = "tournament.parallel_matches"
    changes = [
        json.loads(event.detail_json) for event in records.events if event.kind == "config_changed"
    ]
    tables = [number for change in changes for number in change.get(key, ())]
    most = max([config.tournament.parallel_matches, *tables])
    widest = config.tournament.model_copy(update={"parallel_matches": most})
    return config.model_copy(update={"tournament": widest})
