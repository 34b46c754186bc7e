"""What was changed in a run's config since the run began, pure, and whether it may be."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from arena.config import RunConfig

HARMLESS = (
    "tournament.parallel_matches",
    "pace.move_period_seconds",
    "faults.stall_seconds",
    "faults.restart_limit",
    "faults.probe",
    "faults.max_fault_share",
    "agents.*.processes",
    "agents.*.start_seconds",
    "adjudication.judge.processes",
    "adjudication.judge.start_seconds",
    "engines.*.max_concurrent",
    "engines.*.max_queued",
    "engines.*.url",
    "engines.*.urls",
    "engines.*.api_key_env",
    "engines.*.scrape",
    "engines.*.address",
    "engines.*.replicas",
    "engines.*.max_replicas",
    "engines.*.gpus_per_replica",
    "engines.*.cpus_per_replica",
    "engines.*.lease_seconds",
    "engines.*.engine.max_concurrent",
    "engines.*.engine.max_queued",
    "slo.*",
)
"""Keys that say how fast a run is played, where its engines are found, or what is in time; none has
a say in a move, a result or a rating. `*` stands for one name."""

_HARMLESS = re.compile(
    "|".join(re.escape(key).replace(r"\*", r"[^.]+") for key in HARMLESS), re.ASCII
)
_UNSET = object()
_SHOWN, _MOST_TOLD = 60, 5


class Change(NamedTuple):
    """A key whose value is another now; None where it is not set."""

    key: str
    stored: Any
    edited: Any

    @property
    def is_harmless(self) -> bool:
        """Whether the games and the ratings of a run stay what they were."""
        return _HARMLESS.fullmatch(self.key) is not None

    def __str__(self) -> str:
        return f"{self.key}: {_text(self.stored)} → {_text(self.edited)}"


def changes(stored: RunConfig, edited: RunConfig) -> tuple[Change, ...]:
    """Every key that differs, in the order of their names."""
    before, after = (dict(_leaves(config.to_data())) for config in (stored, edited))
    return tuple(
        Change(key, before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key, _UNSET) != after.get(key, _UNSET)
    )


def told(changes: Sequence[str]) -> str:
    """The first changes in a line, and how many more there are."""
    more = len(changes) - _MOST_TOLD
    return "; ".join(changes[:_MOST_TOLD]) + (f"; and {more} more" if more > 0 else "")


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Values by dotted keys, as `--set` writes them. A list of plain values is one value."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, Sequence) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{key}.{index}")
    else:
        yield key, value


def _text(value: object) -> str:
    text = "unset" if value is None else repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
