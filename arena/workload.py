"""The work that engines are compared on: one frozen list of questions, whatever is answered.

Each question is a ply of a recorded game, so the moves before it are the game's and never the
engine's own. Games come from seeded random play, which needs no engine, or from a run's database.
Arrival times are made of a config's pace in either case: in a run a move is due only once the one
before it was answered, so its times hold how fast that run's engine was.

A workload file is JSON lines, UTF-8: a header with the version, the digest and the texts that
prompts begin with, then a question a line. A file whose digest does not fit was cut off or changed
and is refused. The prompts in it are text: each engine's own template makes ids of them.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from agents import LlmConfig, choices_of, sampling_seed, system_prompt
from agents.prompt import lead
from arena import config as configs
from arena import output, schedule, store
from arena.config import ConfigError, RunConfig
from arena.output import Kind
from arena.pace import SeatPace
from arena.schedule import MatchSpec
from arena.store import Records
from games import Game, Position, Side, Start, load_game
from serving import PromptParts, Sampling

VERSION = 1
"""Of the file."""
FILE = Kind("workload", b'{"boardfleet_workload":')


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One question, as a constrained agent asks it."""

    match_id: str
    ply: int
    side: Side
    parts: PromptParts
    choices: tuple[str, ...]
    """Every legal move."""
    sampling: Sampling
    arrival_s: float
    """When the open loop sends it, seconds after its start."""

    @property
    def max_tokens(self) -> int:
        """UTF-8 bytes of the longest choice and one: no tokenisation of it takes more."""
        return max(len(choice.encode()) for choice in self.choices) + 1


@dataclass(frozen=True, slots=True)
class Question:
    """What an engine is asked for a work item."""

    parts: PromptParts
    choices: tuple[str, ...] | None
    """The only answers there are; None: the engine writes what it likes."""
    max_tokens: int
    sampling: Sampling
    use_prefix_cache: bool = True


def as_agents_ask(item: WorkItem) -> Question:
    """The question of a constrained agent."""
    return Question(item.parts, item.choices, item.max_tokens, item.sampling)


@dataclass(frozen=True)
class Workload:
    """Questions in the order of their arrival."""

    source: str
    """Where the games come from, in words."""
    move_period_seconds: float
    """Between the questions of one seat in the open loop."""
    parallel_matches: int
    """Matches that are played at once in the open loop."""
    items: tuple[WorkItem, ...]

    @cached_property
    def matches(self) -> tuple[tuple[WorkItem, ...], ...]:
        """The questions of each match by ply; matches by their first arrival."""
        found: dict[str, list[WorkItem]] = {}
        for item in self.items:
            found.setdefault(item.match_id, []).append(item)
        return tuple(map(tuple, found.values()))

    @cached_property
    def digest(self) -> str:
        """Hex digest of all that engines are asked and when; the source's name is no part of it."""
        told = hashlib.sha256()
        for line in _lines(self):
            told.update(line.encode() + b"\n")
        return told.hexdigest()[:16]


# recording


def record(config: RunConfig) -> Workload:
    """A workload of seeded random games between the config's agents.

    ConfigError where no agent is a constrained language model, or the config has no pace.
    """
    _check(config)
    games = {spec: _random_game(config, spec) for spec in schedule.matches(config)}
    return _workload(config, f"random play, seed {config.seed}", games)


def of_run(folder: Path) -> Workload:
    """A workload of the games in a run's folder, asked as that run's config asks, at its pace.

    Plies of agents that are no constrained language models are left out. StoreError where there is
    no run, ConfigError where nothing of it can be asked.
    """
    records = store.read(folder)
    try:
        config = configs.parse(json.loads(records.run.config_json))
    except ConfigError as error:
        raise ConfigError(f"{folder}: its config cannot be read: {error}") from None
    try:
        _check(config)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    return _workload(config, f"run {records.run.id}", _played(records))


def _check(config: RunConfig) -> None:
    if not any(map(_is_asked, config.agents)):
        raise ConfigError(
            'agents: none is of kind "llm" in mode "constrained", and only those are compared; add '
            "one"
        )
    if not config.pace.move_period_seconds:
        raise ConfigError(
            "pace.move_period_seconds: is 0, and the open loop sends each seat's moves at a pace; "
            "give one, such as 1.0"
        )


def _is_asked(agent: object) -> bool:
    return isinstance(agent, LlmConfig) and agent.mode == "constrained"


def _alternating(specs: Iterable[MatchSpec]) -> Iterator[MatchSpec]:
    """Matches of the games in turn, so that a part of a workload has as much of each."""
    by_game: dict[tuple[str, str], list[MatchSpec]] = {}
    for spec in specs:
        by_game.setdefault((spec.game, spec.ruleset), []).append(spec)
    return (spec for spec in chain(*zip_longest(*by_game.values())) if spec is not None)


def _random_game(config: RunConfig, spec: MatchSpec) -> tuple[str, ...]:
    dice = random.Random(f"workload/{config.seed}/{spec.id}")
    position = load_game(spec.game).position(spec.start)
    while position.result() is None and position.ply != config.tournament.max_plies:
        position = position.play(dice.choice(position.legal_moves()))
    return position.moves


def _played(records: Records) -> dict[MatchSpec, tuple[str, ...]]:
    moves: dict[str, list[str]] = {}
    for ply in records.plies:
        moves.setdefault(ply.match_id, []).append(ply.move)
    games = {}
    for row in records.matches:
        start = Start(row.start_fen, row.ruleset, row.opening)
        spec = MatchSpec(row.id, row.pair_id, row.game, row.ruleset, row.agents, start)
        games[spec] = tuple(moves.get(row.id, ()))
    return games


def _workload(
    config: RunConfig, source: str, games: Mapping[MatchSpec, tuple[str, ...]]
) -> Workload:
    """Matches as the tournament would play them with an engine that answers at once: so many at a
    time, the next in a place when the last there has ended."""
    period, places = config.pace.move_period_seconds, config.tournament.parallel_matches
    free_at = [0.0] * places
    items: list[WorkItem] = []
    for spec in _alternating(spec for spec, moves in games.items() if moves):
        moves = games[spec]
        place = min(range(places), key=free_at.__getitem__)
        dice = random.Random(f"workload/{config.seed}/{spec.id}/start")
        arrivals = _arrivals(config, spec, free_at[place] + dice.uniform(0, period), len(moves))
        items += _items(config, spec, moves, arrivals)
        free_at[place] = arrivals[-1]
    if not items:
        raise ConfigError(f"{source}: holds no move of a constrained language model")
    items.sort(key=lambda item: item.arrival_s)
    used = min(places, len({item.match_id for item in items}))
    return Workload(source, period, used, tuple(items))


def _arrivals(config: RunConfig, spec: MatchSpec, start_s: float, plies: int) -> list[float]:
    """Due times of a match's plies, each seat on its own pace, the second to move half a period
    after the first. A ply never comes before the one that it follows."""
    period = config.pace.move_period_seconds
    paces = [SeatPace(period, f"{config.seed}/{spec.id}/{side}") for side in (0, 1)]
    arrivals: list[float] = []
    ready = start_s
    for ply in range(plies):
        if ply == 1:
            ready += period / 2
        ready = paces[ply % 2].due(ready)
        arrivals.append(round(ready, 6))
    return arrivals


def _items(
    config: RunConfig, spec: MatchSpec, moves: Sequence[str], arrivals: Sequence[float]
) -> Iterator[WorkItem]:
    agents = {agent.name: agent for agent in config.agents}
    game = load_game(spec.game)
    position: Position = game.position(spec.start)
    for move, arrival_s in zip(moves, arrivals, strict=True):
        agent = agents[spec.agents[position.side]]
        if _is_asked(agent):
            seed = sampling_seed(config.seed, spec.id, position.side, position.ply, 0)
            yield WorkItem(
                spec.id,
                position.ply,
                position.side,
                _parts(config, spec, game, agent, position),
                choices_of(position, config.tournament.concessions, False),
                Sampling(agent.temperature, agent.top_p, seed),
                arrival_s,
            )
        position = position.play(move)


def _parts(
    config: RunConfig, spec: MatchSpec, game: Game, agent: LlmConfig, position: Position
) -> PromptParts:
    """As the agent tells it; a game that outgrows a context is not begun anew from a position."""
    prompts = config.prompts.get(game.name)
    system = (prompts.system if prompts else None) or system_prompt(game.name, spec.ruleset)
    usual = game.openings("start", spec.ruleset)[0]
    fen = None if spec.start.fen == usual.fen else spec.start.fen
    return PromptParts(
        system, agent.persona, lead(agent.mode, fen, config.tournament.concessions), position.moves
    )


# files


def save(path: Path, workload: Workload) -> None:
    """Write a workload, as `output.write` does; StoreError where it cannot be."""
    header = {"boardfleet_workload": VERSION, "digest": workload.digest, "source": workload.source}
    output.write(path, FILE, (line + "\n" for line in chain([_json(header)], _lines(workload))))


def load(path: Path) -> Workload:
    """The workload in a file, or of the run in a folder.

    ConfigError or StoreError, one line: what is wrong with it.
    """
    try:
        if path.is_dir():
            return of_run(path)
        if path.exists() and not path.is_file():  # a pipe may never end
            raise ConfigError(f"{path}: is no regular file; name a workload or a run's folder")
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); name a workload file or a run's folder"
        ) from None
    except UnicodeDecodeError:
        lines = []
    header = _object(lines[0]) if lines else {}
    version = header.get("boardfleet_workload")
    if version is None:
        raise ConfigError(f"{path}: is no workload; name one, or the folder of a run")
    if version != VERSION:
        raise ConfigError(f"{path}: has version {version}, this program reads {VERSION}")
    try:
        workload = _workload_of(str(header["source"]), lines[1:])
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: is damaged ({type(error).__name__}: {error})") from None
    if not workload.items or workload.digest != header.get("digest"):
        raise ConfigError(f"{path}: is not what was saved: its digest does not fit")
    return workload


def _lines(workload: Workload) -> Iterator[str]:
    """All but the header: the load with the texts that prompts begin with, then the questions."""
    heads = dict.fromkeys((i.parts.system, i.parts.persona, i.parts.lead) for i in workload.items)
    places = {head: place for place, head in enumerate(heads)}
    yield _json(
        {
            "move_period_seconds": workload.move_period_seconds,
            "parallel_matches": workload.parallel_matches,
            "heads": list(heads),
        }
    )
    for item in workload.items:
        parts, draw = item.parts, item.sampling
        yield _json(
            {
                "match": item.match_id,
                "ply": item.ply,
                "side": item.side,
                "head": places[parts.system, parts.persona, parts.lead],
                "moves": parts.moves,
                "choices": item.choices,
                "temperature": draw.temperature,
                "top_p": draw.top_p,
                "seed": draw.seed,
                "arrival_s": item.arrival_s,
            }
        )


def _workload_of(source: str, lines: Sequence[str]) -> Workload:
    load, *questions = map(_object, lines)
    heads = [
        PromptParts(str(system), str(persona), str(opening), ())
        for system, persona, opening in load["heads"]
    ]
    items = tuple(
        WorkItem(
            str(row["match"]),
            int(row["ply"]),
            1 if row["side"] else 0,
            replace(heads[row["head"]], moves=tuple(row["moves"])),
            tuple(row["choices"]),
            Sampling(float(row["temperature"]), float(row["top_p"]), row["seed"]),
            float(row["arrival_s"]),
        )
        for row in questions
    )
    period, matches = float(load["move_period_seconds"]), int(load["parallel_matches"])
    return Workload(source, period, matches, items)


def _object(line: str) -> Mapping[str, Any]:
    """A line's object; empty where it holds none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _json(value: Any) -> str:
    # ASCII: a user's own texts may hold what ends a line for some readers
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)
