"""`[[agents]]` tables: one class a kind, and how each kind is built.

A new kind is one file and one line in `AGENT_KINDS`; a user's own is `kind = "module:Class"`.
"""

import difflib
import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from agents.base import Agent, AgentContext
from agents.baseline import GreedyAgent, RandomAgent
from agents.llm import LlmAgent, LlmSettings
from agents.parse import PARSER_VERSION
from agents.prompt import PROMPT_VERSION, Mode
from agents.uci import START_LIMIT_S, UciError, UciIdentity, identify, located
from agents.uci_agent import UciAgent, UciSettings, rules_of
from serving import Engine

_FREE_MAX_TOKENS = 256
_THINK_TOKENS = 256
_UCI_NODES = 10_000
_OWN_OPTIONS = {
    "threads": "threads",
    "hash": "hash_mib",
    "skill level": "skill_level",
    "uci_elo": "uci_elo",
    "uci_limitstrength": "uci_elo",
    "uci_variant": "the game",
    "uci_chess960": "the game",
}
"""UCI options, in lower case, that have a key of their own."""


class AgentConfig(BaseModel):
    """What every agent has."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: str = Field(
        description='What plays: llm, uci, random, greedy or your own "module:Class".'
    )
    name: str = Field(
        min_length=1,
        max_length=64,
        description="The player's name in schedules, tables and records: 1 to 64 printable "
        "characters (no joiners, as in some emoji), each name once.",
    )

    games: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="Games it plays, as `tournament.games` names them without their rule sets; "
        "unset: all. It is paired only with players of the same game.",
    )

    @field_validator("name")
    @classmethod
    def _is_printable(cls, name: str) -> str:
        if not name.isprintable() or name != name.strip():
            raise ValueError(
                "write printable characters (no joiners, as in some emoji) without space at "
                "either end"
            )
        return name

    def plays(self, game: str) -> bool:
        """Whether it plays a game of the run."""
        return self.games is None or game in self.games

    def anchored(self, folder: Path) -> Self:
        """With relative paths, which start in the config's `folder`, made absolute."""
        return self

    @property
    def identity(self) -> str:
        """Hex digest of this table without name and games, and of our prompt and parser: two agents
        on one engine with the same one are the same player under two names."""
        told = {
            **self.model_dump(mode="json", exclude={"name", "games"}),
            "versions": [PROMPT_VERSION, PARSER_VERSION],
        }
        text = json.dumps(told, sort_keys=True, ensure_ascii=False)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class LlmConfig(AgentConfig):
    """A language model on one of the run's engines."""

    kind: Literal["llm"] = Field(description="A language model on an engine.")
    engine: str = Field(description="The engine it asks, by its name under `[engines]`.")
    mode: Mode = Field(
        "constrained",
        description='"constrained": the engine may only answer with a legal move. "free": the '
        'model writes what it likes and its last line `MOVE: <move>` counts. "think": it reasons '
        "for `think_tokens` at most, then may only answer with a legal move; needs an engine that "
        "takes token ids (not openai, lmstudio, ollama).",
    )
    persona: str = Field(
        "",
        description="The agent's own words, after the rules that all share. Part of what it is: "
        "records tell apart the same model with another persona.",
    )
    temperature: float = Field(
        1.0, ge=0, strict=True, description="0 takes the likeliest token each time."
    )
    top_p: float = Field(
        1.0, gt=0, le=1, strict=True, description="Share of probability that tokens are drawn from."
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        strict=True,
        description=f"Tokens of one answer in free mode; unset: {_FREE_MAX_TOKENS}. A constrained "
        "answer is as long as the longest legal move.",
    )
    think_tokens: int | None = Field(
        None,
        ge=1,
        strict=True,
        description=f"Most tokens of one thought in think mode; unset: {_THINK_TOKENS}. A thought "
        "that is longer is ended there, which is no fault.",
    )

    @field_validator("max_tokens", "think_tokens")
    @classmethod
    def _is_for_its_mode(cls, value: int | None, info: ValidationInfo) -> int | None:
        mode = "free" if info.field_name == "max_tokens" else "think"
        if value is not None and info.data.get("mode", mode) != mode:
            raise ValueError(f'it is for mode = "{mode}"; take it out or change the mode')
        return value

    @property
    def settings(self) -> LlmSettings:
        return LlmSettings(
            self.mode,
            self.persona,
            self.temperature,
            self.top_p,
            self.max_tokens or _FREE_MAX_TOKENS,
            self.think_tokens or _THINK_TOKENS,
        )


class RandomConfig(AgentConfig):
    """Plays any legal move; needs no engine."""

    kind: Literal["random"] = Field(description="Any legal move, by dice that follow the seed.")


class GreedyConfig(AgentConfig):
    """Takes what it can see one ply ahead; needs no engine."""

    kind: Literal["greedy"] = Field(
        description="Mates in one, else wins the most material in one ply."
    )


class UciConfig(AgentConfig):
    """A UCI engine, such as Stockfish (chess) or Fairy-Stockfish (janggi too)."""

    kind: Literal["uci"] = Field(description="A UCI engine in a process of its own.")
    command: str | tuple[str, ...] = Field(
        description='Its program: a name on PATH, such as "stockfish", a file, such as '
        '"./stockfish", relative to the config, or a list with arguments.',
    )
    nodes: int | None = Field(
        None,
        ge=1,
        strict=True,
        description=f"Nodes of one search; unset, without `depth` and `move_time_seconds`: "
        f"{_UCI_NODES:,}. Moves are then the same in every run.",
    )
    depth: int | None = Field(None, ge=1, le=246, strict=True, description="Plies of one search.")
    move_time_seconds: float | None = Field(
        None,
        gt=0,
        le=3600,
        strict=True,
        description="Seconds of one search: as strong as the machine is idle, and no two runs are "
        "alike.",
    )
    skill_level: int | None = Field(
        None,
        strict=True,
        description="The engine's `Skill Level`. Engines draw weak moves by dice of their own: no "
        "two runs are alike. `random_moves` weakens by the run's dice.",
    )
    uci_elo: int | None = Field(
        None,
        strict=True,
        description="The engine's `UCI_Elo`, with `UCI_LimitStrength`. No two runs are alike, as "
        "with `skill_level`.",
    )
    random_moves: float = Field(
        0.0,
        ge=0,
        le=1,
        strict=True,
        description="Share of moves drawn at random, by dice that follow the seed: a weak anchor "
        "that plays the same in every run.",
    )
    threads: int = Field(
        1, ge=1, le=1024, strict=True, description="More than 1: no two runs are alike."
    )
    hash_mib: int = Field(
        16, ge=1, le=65_536, strict=True, description="Its hash table, emptied before each move."
    )
    processes: int = Field(
        2,
        ge=1,
        le=256,
        strict=True,
        description="Searches at once, each in a process; other matches wait, uncharged.",
    )
    start_seconds: float = Field(
        START_LIMIT_S,
        gt=0,
        le=3600,
        strict=True,
        description="That a process has to start, and to get ready for a search. Uncharged.",
    )
    options: Mapping[str, str | int | bool] = Field(
        default_factory=dict, description="Further UCI options by name."
    )

    @field_validator("command")
    @classmethod
    def _is_a_command(cls, command: str | tuple[str, ...]) -> str | tuple[str, ...]:
        words = (command,) if isinstance(command, str) else command
        if not words or not all(word.isprintable() for word in words) or not words[0].strip():
            raise ValueError('write a program such as "stockfish"')
        return command

    @field_validator("options")
    @classmethod
    def _are_printable(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        for name, value in options.items():
            if not f"{name}{value}".isprintable() or not name.strip() or " value " in name:
                raise ValueError(f"{name!r} = {value!r} cannot be told to an engine")
            if name.lower() in _OWN_OPTIONS:
                raise ValueError(f"{name} is set by {_OWN_OPTIONS[name.lower()]}; take it out")
        return options

    @model_validator(mode="after")
    def _has_one_limit(self) -> "UciConfig":
        given = [
            name
            for name in ("nodes", "depth", "move_time_seconds")
            if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: a search has one limit; take out {given[0]} or this")
        return self

    def anchored(self, folder: Path) -> Self:
        program, *rest = self.words
        if "/" not in program:
            return self
        program = str((folder / Path(program).expanduser()).absolute())
        return self.model_copy(update={"command": (program, *rest) if rest else program})

    @property
    def chancy_key(self) -> str | None:
        """The key by which no two runs are alike; None where moves follow the run's dice alone."""
        keys = {
            "skill_level": self.skill_level is not None,
            "uci_elo": self.uci_elo is not None,
            "move_time_seconds": self.move_time_seconds is not None,
            "threads": self.threads > 1,
        }
        return next((key for key, is_set in keys.items() if is_set), None)

    @property
    def go(self) -> str:
        """The UCI command that begins a search."""
        if self.depth is not None:
            return f"go depth {self.depth}"
        if self.move_time_seconds is not None:
            return f"go movetime {max(1, round(self.move_time_seconds * 1000))}"
        return f"go nodes {self.nodes or _UCI_NODES}"

    @property
    def words(self) -> tuple[str, ...]:
        """The program as it is named, and its arguments."""
        return (self.command,) if isinstance(self.command, str) else self.command

    def told_options(self) -> dict[str, tuple[str, str]]:
        """UCI options by name: the key that sets each, and its value."""
        told = {"Threads": ("threads", str(self.threads)), "Hash": ("hash_mib", str(self.hash_mib))}
        if self.skill_level is not None:
            told["Skill Level"] = "skill_level", str(self.skill_level)
        if self.uci_elo is not None:
            told["UCI_LimitStrength"] = "uci_elo", "true"
            told["UCI_Elo"] = "uci_elo", str(self.uci_elo)
        for name, value in self.options.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            told[name] = f"options.{name}", text
        return told


class OwnAgentConfig(AgentConfig):
    """A user's own class; keys beside `kind` and `name` are its own."""

    model_config = ConfigDict(extra="allow", frozen=True)

    kind: str = Field(pattern=r"^[^\s:]+:[^\s:]+$", description='Your own class, "module:Class".')

    @property
    def table(self) -> dict[str, Any]:
        """The table as it was written."""
        return self.model_dump(exclude_unset=True)


@dataclass(frozen=True, slots=True)
class AgentKind:
    """How one kind is read and built."""

    config: type[AgentConfig]
    build: Callable[[Any, Mapping[str, Engine], AgentContext], Agent]


def _build_llm(config: LlmConfig, engines: Mapping[str, Engine], context: AgentContext) -> Agent:
    engine = engines.get(config.engine)
    if engine is None:
        known = ", ".join(engines) or "none"
        raise ValueError(f'engine: no engine is named "{config.engine}"; engines: {known}')
    return LlmAgent(config.name, engine, context, config.settings)


def _build_uci(config: UciConfig, engines: Mapping[str, Engine], context: AgentContext) -> Agent:
    options = {name: value for name, (_, value) in config.told_options().items()}
    settings = UciSettings(
        config.words,
        config.go,
        options,
        config.random_moves,
        config.processes,
        config.start_seconds,
    )
    return UciAgent(config.name, settings, context)


AGENT_KINDS: dict[str, AgentKind] = {
    "llm": AgentKind(LlmConfig, _build_llm),
    "uci": AgentKind(UciConfig, _build_uci),
    "random": AgentKind(RandomConfig, lambda config, engines, context: RandomAgent(context)),
    "greedy": AgentKind(GreedyConfig, lambda config, engines, context: GreedyAgent(context)),
}


def parse_agent_config(data: Mapping[str, Any]) -> AgentConfig:
    """An `[[agents]]` table as its kind's config.

    Raises pydantic.ValidationError for a wrong key or value, and ValueError ("kind: ...", one
    line) for a kind that is not known.
    """
    if "kind" not in data:
        raise ValueError(f"kind: is missing; write one of {', '.join(AGENT_KINDS)}")
    kind = data["kind"]
    if isinstance(kind, str) and kind in AGENT_KINDS:
        return AGENT_KINDS[kind].config.model_validate(dict(data))
    if isinstance(kind, str) and ":" in kind:
        return OwnAgentConfig.model_validate(dict(data))
    near = difflib.get_close_matches(str(kind), AGENT_KINDS, n=1)
    hint = f'did you mean "{near[0]}"?' if near else f"known kinds: {', '.join(AGENT_KINDS)}"
    raise ValueError(f'kind: {kind!r} is not known; {hint} Your own is "module:Class"')


def check_agent(config: AgentConfig, games: Sequence[tuple[str, str]] = ()) -> None:
    """What can be known of an agent before the run has an engine: that a user's own class is there,
    that a UCI program has the options asked for and plays the `games` (name, rule set) it is to
    play. Blocks while a UCI program says what it is.

    Raises ValueError, one line with key and remedy.
    """
    if isinstance(config, OwnAgentConfig):
        _own_class(config.kind)
    elif isinstance(config, UciConfig):
        _check_uci(config, games)


def _check_uci(config: UciConfig, games: Sequence[tuple[str, str]]) -> None:
    command = located(config.words)
    try:
        identity = identify(command, config.start_seconds)
    except UciError as error:
        raise ValueError(f"command: {command[0]} {error}") from None
    for name, (key, value) in config.told_options().items():
        _check_option(identity, name, key, value)
    for game, ruleset in games:
        try:
            rules_of(game, ruleset, identity)
        except ValueError as error:
            other = [name for name, _ in games if name != game]
            remedy = f"write games = {json.dumps(sorted(set(other)))}, or " if other else ""
            raise ValueError(f"command: {error}; {remedy}name another engine") from None


def _check_option(identity: UciIdentity, name: str, key: str, value: str) -> None:
    option = identity.options.get(name.lower())
    if option is None:
        if key in ("threads", "hash_mib"):
            return  # an engine without it has one thread, or no table
        near = difflib.get_close_matches(name, [o.name for o in identity.options.values()], n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ValueError(f'{key}: {identity.name} has no option "{name}"{hint}')
    refusal = option.refusal(value)
    if refusal is not None:
        raise ValueError(f"{key}: is {value}; {refusal}")


def build_agent(config: AgentConfig, engines: Mapping[str, Engine], context: AgentContext) -> Agent:
    """The player that a config describes, not yet opened.

    Raises ValueError, one line with key and remedy, where its engine, class or program is missing.
    """
    games = tuple(game for game in context.games if config.plays(game[0]))
    context = replace(context, games=games)
    if isinstance(config, OwnAgentConfig):
        make = _own_class(config.kind)
        try:
            return cast("Agent", make(config.table, engines))
        # a user's own class raises what it likes
        except Exception as error:
            raise ValueError(
                f"kind: {config.kind} could not be made: {_one_line(error)}"
            ) from error
    return AGENT_KINDS[config.kind].build(config, engines, context)


def _own_class(kind: str) -> Callable[[dict[str, Any], Mapping[str, Engine]], object]:
    module, _, name = kind.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except AttributeError as error:
        raise ValueError(f"kind: module {module} has no {name}; write module:Class") from error
    except Exception as error:
        raise ValueError(
            f"kind: {kind} cannot be imported ({_one_line(error)}); is its folder on PYTHONPATH?"
        ) from error
    if not callable(found):
        raise ValueError(f"kind: {kind} is not a class; write module:Class")
    return cast("Callable[[dict[str, Any], Mapping[str, Engine]], object]", found)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
