"""`[[agents]]` tables: one class a kind, and how each kind is built.

A new kind is one file and one line in `AGENT_KINDS`; a user's own is `kind = "module:Class"`.
"""

import difflib
import hashlib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from agents.base import Agent, AgentContext
from agents.baseline import GreedyAgent, RandomAgent
from agents.llm import LlmAgent, LlmSettings
from agents.parse import PARSER_VERSION
from agents.prompt import PROMPT_VERSION
from serving import Engine

_FREE_MAX_TOKENS = 256


class AgentConfig(BaseModel):
    """What every agent has."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: str = Field(description='What plays: llm, random, greedy or your own "module:Class".')
    name: str = Field(
        min_length=1,
        max_length=64,
        description="The player's name in schedules, tables and records: 1 to 64 printable "
        "characters, each name once.",
    )

    @field_validator("name")
    @classmethod
    def _is_printable(cls, name: str) -> str:
        if not name.isprintable() or name != name.strip():
            raise ValueError("write printable characters without space at either end")
        return name

    @property
    def identity(self) -> str:
        """Hex digest of this table without the name, and of our prompt and parser: two agents on
        one engine with the same one are the same player under two names."""
        told = {
            **self.model_dump(mode="json", exclude={"name"}),
            "versions": [PROMPT_VERSION, PARSER_VERSION],
        }
        text = json.dumps(told, sort_keys=True, ensure_ascii=False)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class LlmConfig(AgentConfig):
    """A language model on one of the run's engines."""

    kind: Literal["llm"] = Field(description="A language model on an engine.")
    engine: str = Field(description="The engine it asks, by its name under `[engines]`.")
    mode: Literal["constrained", "free"] = Field(
        "constrained",
        description='"constrained": the engine may only answer with a legal move. "free": the '
        "model writes what it likes and its last line `MOVE: <move>` counts.",
    )
    persona: str = Field(
        "",
        description="The agent's own words, after the rules that all share. Part of what it is: "
        "records tell apart the same model with another persona.",
    )
    temperature: float = Field(1.0, ge=0, description="0 takes the likeliest token each time.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Share of probability that tokens are drawn from."
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description=f"Tokens of one answer in free mode; unset: {_FREE_MAX_TOKENS}. A constrained "
        "answer is as long as the longest legal move.",
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _is_available(cls, mode: object) -> object:
        if mode == "think":
            raise ValueError('mode = "think" is not available yet; write "constrained" or "free"')
        return mode

    @field_validator("max_tokens")
    @classmethod
    def _is_for_free_mode(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("mode") == "constrained":
            raise ValueError('it is for mode = "free"; take it out or change the mode')
        return value

    @property
    def settings(self) -> LlmSettings:
        return LlmSettings(
            self.mode,
            self.persona,
            self.temperature,
            self.top_p,
            self.max_tokens or _FREE_MAX_TOKENS,
        )


class RandomConfig(AgentConfig):
    """Plays any legal move; needs no engine."""

    kind: Literal["random"] = Field(description="Any legal move, by dice that follow the seed.")


class GreedyConfig(AgentConfig):
    """Takes what it can see one ply ahead; needs no engine."""

    kind: Literal["greedy"] = Field(
        description="Mates in one, else wins the most material in one ply."
    )


class OwnAgentConfig(AgentConfig):
    """A user's own class; keys beside `kind` and `name` are its own."""

    model_config = ConfigDict(extra="allow", frozen=True)

    kind: str = Field(pattern=r"^[^\s:]+:[^\s:]+$", description='Your own class, "module:Class".')

    @property
    def table(self) -> dict[str, Any]:
        """The table as it was written."""
        return self.model_dump()


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


AGENT_KINDS: dict[str, AgentKind] = {
    "llm": AgentKind(LlmConfig, _build_llm),
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


def check_agent(config: AgentConfig) -> None:
    """What can be known of an agent before an engine exists: that a user's own class is there.

    Raises ValueError, one line with key and remedy; makes nothing.
    """
    if isinstance(config, OwnAgentConfig):
        _own_class(config.kind)


def build_agent(config: AgentConfig, engines: Mapping[str, Engine], context: AgentContext) -> Agent:
    """The player that a config describes, not yet opened.

    Raises ValueError, one line with key and remedy, where its engine or its class is missing.
    """
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
