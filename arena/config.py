"""The whole run in one frozen tree, read from TOML. Every mistake is one line: key and remedy."""

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import tomli_w
from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from agents import (
    AGENT_KINDS,
    AgentConfig,
    Concessions,
    LlmConfig,
    UciConfig,
    parse_agent_config,
)
from arena.adjudication import AdjudicationRules
from arena.clock import ClockRules
from arena.sprt import LEAST_GAP, LEAST_RATE, Model, Sprt, furthest
from games import Game, Start, load_game, split_game
from serving import (
    ENGINE_KINDS,
    EngineConfig,
    FakeConfig,
    SaturationConfig,
    parse_engine_config,
)

MAX_MATCHES = 200_000
FURTHEST_ANCHOR = 4000
"""Elo; between anchors 10,000 apart a game's chances round to 0, and ratings may not be found."""


_T = TypeVar("_T")


class ConfigError(ValueError):
    """A config that cannot be run; the message is one line that names the key and the remedy."""


def _is_set(section: BaseModel, key: str) -> bool:
    """Whether a key has another value than its default."""
    return bool(getattr(section, key) != type(section).model_fields[key].default)


class Section(BaseModel):
    """A table of the config: immutable, and strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PromptSection(Section):
    """`[prompts.GAME]`: the system prompt that every agent of a game shares."""

    system: str | None = Field(None, description="The prompt's text.")
    file: str | None = Field(
        None, description="A file that holds it; relative to the config. Inlined when read."
    )


_Elo = Annotated[float, Field(strict=True, ge=-FURTHEST_ANCHOR, le=FURTHEST_ANCHOR)]
_Anchor = Annotated[
    Annotated[_Elo, Tag("elo")]
    | Annotated[Mapping[str, _Elo], Field(min_length=1), Tag("by_game")],
    Discriminator(lambda value: "by_game" if isinstance(value, Mapping) else "elo"),
]


class TournamentSection(Section):
    """`[tournament]`: who plays whom at what."""

    format: Literal["round_robin", "gauntlet", "swiss", "knockout", "sprt", "ladder"] = Field(
        "round_robin",
        description='"round_robin": every agent meets every other. "gauntlet": the challengers '
        'meet all others. "swiss": rounds of players with like points. "knockout": who loses a '
        'tie is out. "sprt": two agents until `[sprt]` decides. "ladder": each agent meets the '
        "anchor nearest to its rating so far. Each game is a tournament of its own.",
    )
    games: tuple[str, ...] = Field(
        ("chess",),
        min_length=1,
        description='Games, each with an optional rule set: "chess", "janggi/janggimodern", '
        '"module:Class".',
    )
    pairs: int = Field(
        1,
        ge=1,
        strict=True,
        description="Pairs per pairing and game; of a ladder per agent. A pair is two matches on "
        "one opening with the sides swapped.",
    )
    challengers: tuple[str, ...] | None = Field(
        None, min_length=1, description="A gauntlet's; unset: the first agent."
    )
    rounds: int | None = Field(
        None,
        ge=1,
        strict=True,
        description="Of a Swiss tournament; unset: as many as a knock-out would have.",
    )
    sudden_death_pairs: int = Field(
        4,
        ge=0,
        strict=True,
        description="More pairs, one by one, for a knock-out's tie that is level, until one leads; "
        "after them the higher seed goes on. Seeds are the order of the agents.",
    )
    anchors: Mapping[str, _Anchor] = Field(
        default_factory=dict,
        description="Agents whose ratings are held fixed, in Elo; a ladder is played against them. "
        f"Within ±{FURTHEST_ANCHOR}. One number for all games, or one by game, "
        "`{chess = 800, janggi = 600}`: no anchor at a game that is left out.",
    )
    null_pairing: bool | str = Field(
        False,
        description="An agent that also meets itself under a second name, as often as a pairing "
        "is played: the noise floor. true: the first agent.",
    )
    parallel_matches: int = Field(
        8,
        ge=1,
        strict=True,
        description="Matches played at once: two seats each, one request in flight each.",
    )
    draw_offers: bool = Field(
        False,
        strict=True,
        description="Language models may offer a draw with a move, as `(=)` behind it, and accept "
        "one with `draw`. Other players decline; your own class may do both.",
    )
    resignation: bool = Field(
        False,
        strict=True,
        description="Language models are told that they may resign, and constrained ones may "
        "answer `resign`. A free answer `MOVE: resign` counts either way.",
    )
    max_plies: int | None = Field(
        200,
        ge=1,
        strict=True,
        description="Plies until the arena ends a game: chess drawn, janggi on points. 0: no cap.",
    )

    @property
    def concessions(self) -> Concessions:
        return Concessions(self.draw_offers, self.resignation)

    @field_validator("null_pairing", mode="before")
    @classmethod
    def _is_a_name(cls, value: object) -> object:
        if not isinstance(value, bool | str):
            raise ValueError("write true, false or an agent's name")
        return value

    @field_validator("max_plies", mode="before")
    @classmethod
    def _zero_is_no_cap(cls, value: object) -> object:
        return None if value == 0 and not isinstance(value, bool) else value


class SprtSection(Section):
    """`[sprt]`: a pairing ends as soon as it is decided whether the first-named agent is `elo1`
    better than the other rather than `elo0`. For the formats sprt, round_robin and gauntlet."""

    elo0: float = Field(
        strict=True, description="Elo by which it is better where the test rejects."
    )
    elo1: float = Field(
        strict=True, description="Elo by which it is better where the test accepts."
    )
    alpha: float = Field(
        0.05, ge=LEAST_RATE, lt=1, strict=True, description="Chance to accept where elo0 is true."
    )
    beta: float = Field(
        0.05, ge=LEAST_RATE, lt=1, strict=True, description="Chance to reject where elo1 is true."
    )
    model: Literal["logistic", "normalized", "bayeselo"] = Field(
        "logistic",
        description=f'What elo0 and elo1 are. "logistic" (within ±{furthest("logistic"):g}) and '
        f'"normalized" (within ±{furthest("normalized"):g}) test by pairs, "bayeselo" (within '
        f"±{furthest('bayes_elo'):g}) by single games.",
    )
    max_pairs: int = Field(
        1000, ge=1, strict=True, description="Pairs of a pairing at most, in place of `pairs`."
    )

    @property
    def test(self) -> Sprt:
        return Sprt(self.elo0, self.elo1, self.alpha, self.beta, self._model)

    @property
    def _model(self) -> Model:
        return "bayes_elo" if self.model == "bayeselo" else self.model

    @model_validator(mode="after")
    def _makes_a_test(self) -> "SprtSection":
        if not self.elo1 - self.elo0 >= LEAST_GAP:
            raise ValueError(
                f"elo1: must be {LEAST_GAP} or more above elo0, which is {self.elo0:g}"
            )
        most = furthest(self._model)
        for key in ("elo0", "elo1"):
            if abs(getattr(self, key)) > most:
                raise ValueError(f"{key}: {self.model} Elo lies within ±{most:g}; give less")
        if not self.alpha + self.beta < 1:
            raise ValueError("beta: alpha and beta must add up to less than 1")
        return self


class PaceSection(Section):
    """`[pace]`: how often a seat moves."""

    move_period_seconds: float = Field(
        1.0,
        ge=0,
        le=86_400,
        strict=True,
        description="Seconds between the due times of one seat's moves, with 10 % jitter of its "
        "own. 0: as fast as it can.",
    )
    move_limit_seconds: float = Field(
        30.0,
        gt=0,
        le=86_400,
        strict=True,
        description="Seconds after admission until a request is given up.",
    )


class ClockSection(Section):
    """`[clock]`: time that players have, beside the pace. Without it only `move_limit_seconds`
    bounds a move."""

    kind: Literal["none", "move", "fischer", "byoyomi"] = Field(
        "none",
        description='"move": so long for each move. "fischer": a base and an increment after each '
        'move. "byoyomi": a base, then periods; a move that fits in one costs nothing. An LLM is '
        "charged the engine's prefill and decode of all its tries, never a queue or a fault of "
        "the infrastructure.",
    )
    base_seconds: float = Field(
        60.0, gt=0, le=864_000, strict=True, description="Of a move, or of a side for the game."
    )
    increment_seconds: float = Field(0.0, ge=0, le=86_400, strict=True, description="Fischer's.")
    byoyomi_seconds: float = Field(
        10.0, gt=0, le=86_400, strict=True, description="One period of byoyomi."
    )
    byoyomi_periods: int = Field(1, ge=1, le=1000, strict=True, description="Periods of byoyomi.")

    @property
    def rules(self) -> ClockRules | None:
        """None without a clock."""
        if self.kind == "none":
            return None
        return ClockRules(
            self.kind,
            self.base_seconds,
            self.increment_seconds,
            self.byoyomi_seconds,
            self.byoyomi_periods,
        )

    @model_validator(mode="after")
    def _has_no_idle_key(self) -> "ClockSection":
        used = {
            "none": set(),
            "move": {"base_seconds"},
            "fischer": {"base_seconds", "increment_seconds"},
            "byoyomi": {"base_seconds", "byoyomi_seconds", "byoyomi_periods"},
        }[self.kind]
        idle = [
            name
            for name in type(self).model_fields
            if name != "kind" and name not in used and _is_set(self, name)
        ]
        if idle:
            raise ValueError(f'{idle[0]}: does nothing with kind = "{self.kind}"; take it out')
        return self


class AdjudicationSection(Section):
    """`[adjudication]`: ending decided games by score: a judge's, or else what the players
    themselves tell, as UCI engines do. Both sides' scores must agree."""

    judge: UciConfig | None = Field(
        None,
        description="A UCI engine that scores each position, such as "
        '`{command = "stockfish", nodes = 20000}`, with the keys of an agent of kind "uci"; '
        "`games` limits it. Its scores stand in the PGN too. Unset: the players' own scores.",
    )

    draw_score_cp: int | None = Field(
        None, ge=0, strict=True, description="Most centipawns of a drawn game; unset: never."
    )
    draw_moves: int = Field(8, ge=1, strict=True, description="Moves by each side in a row.")
    draw_from_ply: int = Field(80, ge=0, strict=True, description="No draw before this ply.")
    resign_score_cp: int | None = Field(
        None, ge=1, strict=True, description="Least centipawns of a lost game; unset: never."
    )
    resign_moves: int = Field(4, ge=1, strict=True, description="Moves by each side in a row.")

    @field_validator("judge", mode="before")
    @classmethod
    def _is_a_uci_engine(cls, judge: object) -> object:
        named = {"kind": "uci", "name": "judge"}
        return {**named, **judge} if isinstance(judge, Mapping) else judge

    @field_validator("judge")
    @classmethod
    def _is_at_its_best(cls, judge: UciConfig | None) -> UciConfig | None:
        for key in ("skill_level", "uci_elo", "random_moves"):
            if judge is not None and _is_set(judge, key):
                raise ValueError(f"{key}: weakens an engine that is to judge; take it out")
        return judge

    @property
    def rules(self) -> AdjudicationRules:
        return AdjudicationRules(**self.model_dump(exclude={"judge"}))


class FaultsSection(Section):
    """`[faults]`: what failures are borne."""

    agent_attempts: int = Field(
        3,
        ge=1,
        strict=True,
        description="Tries an agent has for one move in free mode before it forfeits.",
    )
    stall_seconds: float = Field(
        30.0,
        gt=0,
        strict=True,
        description="Seconds without an engine step, with work unfinished, until the engine is "
        "called stalled and restarted (before its first step: 120 at least).",
    )
    restart_limit: int = Field(
        3, ge=0, strict=True, description="Restarts of one engine in one run."
    )
    probe: bool = Field(
        True,
        strict=True,
        description="Ask every player that is not built in for one move before the first game; the "
        "run is not begun where one cannot answer.",
    )
    max_fault_share: float = Field(
        0.5,
        gt=0,
        le=1,
        strict=True,
        description="The run stops, resumable, once more than this share of the last 50 games, 10 "
        "at least, ended by a UCI engine's crash, its silence or its illegal move, or were left "
        "for a fault of the infrastructure. 1: never.",
    )


class OpeningsSection(Section):
    """`[openings]`: where games begin. The two matches of a pair share one."""

    book: str = Field(
        "builtin",
        min_length=1,
        description='"builtin", "start" (the usual start alone), or an EPD or PGN file; relative '
        "to the config. It is chess's book where janggi_setups is given.",
    )
    janggi_setups: str | tuple[str, ...] | None = Field(
        None,
        description='Janggi set-ups: "all" 16, or a list such as ["HEEH/HEHE"] (Cho\'s, then '
        "Han's, each from its own left). Without it janggi follows `book`.",
    )
    order: Literal["shuffled", "book"] = Field(
        "shuffled", description='"shuffled" by dice, or as they stand in the book.'
    )
    seed: int | None = Field(
        None, ge=0, lt=2**63, strict=True, description="Of the shuffling; unset: the run's."
    )
    start: int = Field(
        0, ge=0, strict=True, description="Openings of that order to begin after; 0: the first."
    )
    plies: int | None = Field(
        None, ge=1, strict=True, description="Where a PGN book's games are cut; unset: their ends."
    )


class SloSection(Section):
    """`[slo]`: what counts as in time."""

    move_seconds: float = Field(
        1.0,
        gt=0,
        strict=True,
        description="A move is in time if it is done this long after it was due.",
    )


class RunConfig(Section):
    """One run."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Names the run and its folder: letters, digits, `.`, `_`, `-`.",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        strict=True,
        description="Schedule, jitter and dice all follow from it.",
    )
    prompts: Mapping[str, PromptSection] = Field(
        default_factory=dict, description="Shared system prompts by game; ours where absent."
    )
    engines: Mapping[str, Any] = Field(
        default_factory=dict, description="Engines by name; the keys depend on `kind`."
    )
    agents: tuple[Any, ...] = Field(
        min_length=2, description="The players; the keys depend on `kind`."
    )
    tournament: TournamentSection = TournamentSection()
    sprt: SprtSection | None = Field(None, description="Early stop; see `[sprt]`.")
    pace: PaceSection = PaceSection()
    clock: ClockSection = ClockSection()
    adjudication: AdjudicationSection = AdjudicationSection()
    faults: FaultsSection = FaultsSection()
    openings: OpeningsSection = OpeningsSection()
    slo: SloSection = SloSection()
    saturation: SaturationConfig = SaturationConfig()

    @property
    def digest(self) -> str:
        """Hex digest of the resolved config: two runs with the same digest asked for the same."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_data(self) -> dict[str, Any]:
        """Plain data without unset values; reading it gives the same config."""
        data = self.model_dump(mode="json", exclude_none=True)
        data["engines"] = {
            name: engine.model_dump(mode="json", exclude_none=True)
            for name, engine in self.engines.items()
        }
        data["agents"] = [agent.model_dump(mode="json", exclude_none=True) for agent in self.agents]
        if self.tournament.max_plies is None:
            data["tournament"]["max_plies"] = 0
        if self.sprt is not None:
            del data["tournament"]["pairs"]
        return data

    def to_json(self) -> str:
        return json.dumps(self.to_data(), sort_keys=True)

    def to_toml(self) -> str:
        return tomli_w.dumps(self.to_data())

    def engine(self, name: str) -> EngineConfig:
        engine: EngineConfig = self.engines[name]
        return engine

    def asked_engine(self, name: str) -> EngineConfig:
        """The engine that a command line names by `--engine`; ConfigError where there is none."""
        if name not in self.engines:
            known = ", ".join(self.engines) or "none; add [engines.main]"
            raise ConfigError(f"--engine {name}: no engine is named so; engines: {known}")
        return self.engine(name)

    def used_engines(self) -> tuple[str, ...]:
        """Names of the engines that some agent asks (a user's own agent may ask any)."""
        names = {agent.engine for agent in self.agents if isinstance(agent, LlmConfig)}
        own = any(":" in agent.kind for agent in self.agents)
        return tuple(name for name in self.engines if own or name in names)

    def games(self) -> tuple["GameChoice", ...]:
        """The games of the tournament; ConfigError for one that is not known."""
        return tuple(game_of(text) for text in self.tournament.games)

    @property
    def null_agent(self) -> str | None:
        """Who also meets itself."""
        asked = self.tournament.null_pairing
        return asked if isinstance(asked, str) else None

    @property
    def players(self) -> tuple[AgentConfig, ...]:
        """The agents, and the second name of the one that also meets itself."""
        agents: tuple[AgentConfig, ...] = self.agents
        twins = (agent for agent in agents if agent.name == self.null_agent)
        return agents + tuple(
            agent.model_copy(update={"name": null_name(agent.name)}) for agent in twins
        )

    def entrants(self, game: str) -> tuple[str, ...]:
        """Names of the agents that play a game, in order."""
        return tuple(agent.name for agent in self.agents if agent.plays(game))

    def anchors(self, game: str) -> dict[str, float]:
        """Elo of the anchors among the entrants of a game."""
        anchors = anchors_at(self.tournament.anchors, game)
        return {name: elo for name, elo in anchors.items() if name in self.entrants(game)}

    @property
    def challengers(self) -> tuple[str, ...]:
        """A gauntlet's."""
        return self.tournament.challengers or (self.agents[0].name,)

    def rounds(self, game: str) -> int:
        """Of a Swiss tournament."""
        return self.tournament.rounds or (len(self.entrants(game)) - 1).bit_length()

    @property
    def pairs_a_pairing(self) -> int:
        """At most."""
        return self.tournament.pairs if self.sprt is None else self.sprt.max_pairs

    @property
    def can_grow(self) -> bool:
        """Whether matches are added as results come in."""
        return self.sprt is not None or self.tournament.format in ("swiss", "knockout", "ladder")

    @property
    def most_matches(self) -> int:
        """Matches that the run may come to."""
        return 2 * sum(self._most_pairs(choice.name) for choice in self.games())

    def _most_pairs(self, game: str) -> int:
        asked, names = self.tournament, self.entrants(game)
        count, pairs = len(names), self.pairs_a_pairing
        null = pairs if self.null_agent in names else 0
        if asked.format == "gauntlet":
            challengers = sum(name in self.challengers for name in names)
            return challengers * (count - challengers) * pairs + null
        if asked.format == "swiss":
            return self.rounds(game) * (count // 2) * pairs + null
        if asked.format == "knockout":
            return (count - 1) * (pairs + asked.sudden_death_pairs) + null
        if asked.format == "ladder":
            return (count - len(self.anchors(game))) * pairs + null
        return count * (count - 1) // 2 * pairs + null


def anchors_at(
    anchors: Mapping[str, float | Mapping[str, float]], game: str
) -> Mapping[str, float]:
    """Of `tournament.anchors`, those that hold at a game, without its rule set."""
    told = {
        name: elo.get(game) if isinstance(elo, Mapping) else elo for name, elo in anchors.items()
    }
    return {name: elo for name, elo in told.items() if elo is not None}


def null_name(agent: str) -> str:
    """An agent's second name, under which it meets itself."""
    return f"{agent} (null)"


class GameChoice(NamedTuple):
    """A game as the tournament plays it."""

    name: str
    """As the config names it: "chess", "module:Class"."""
    game: Game
    ruleset: str


def game_of(text: str) -> GameChoice:
    """A game of the config and its rule set; ConfigError for one that is not known."""
    try:
        name, ruleset = split_game(text)
        game = load_game(name)
    except ValueError as error:
        raise ConfigError(f"tournament.games: {error}") from None
    if ruleset is not None and ruleset not in game.rulesets:
        raise ConfigError(
            f'tournament.games: {name} has no rule set "{ruleset}"; it has '
            + ", ".join(game.rulesets)
        )
    return GameChoice(name, game, ruleset or game.rulesets[0])


def openings_of(config: RunConfig, game: Game, ruleset: str) -> tuple[Start, ...]:
    """The starts that a game of this run draws from; ConfigError where the book cannot serve."""
    book, setups = config.openings.book, config.openings.janggi_setups
    by_setup = game.name == "janggi" and setups is not None
    plies = None if by_setup else config.openings.plies
    cut = {} if plies is None else {"plies": plies}
    try:
        starts = game.openings("builtin" if by_setup else book, ruleset, **cut)
    except (ValueError, OSError, TypeError) as error:
        told = getattr(error, "strerror", None) or str(error)
        hint = '; give janggi its own by janggi_setups = "all"' if game.name == "janggi" else ""
        where = "openings.book" if told.startswith(book) else f"openings.book: {book}"
        raise ConfigError(f"{where}: {told}{hint}") from None
    if not by_setup or setups == "all" or setups is None:
        return starts
    setups = (setups,) if isinstance(setups, str) else setups
    by_name = {start.name: start for start in starts}
    wanted = ["Cho {}, Han {}".format(*[*setup.split("/"), ""][:2]) for setup in setups]
    again = _repeated(setups)
    if again is not None:
        raise ConfigError(f"openings.janggi_setups: {again} is named twice; name it once")
    missing = [
        setup
        for setup, name in zip(setups, wanted, strict=True)
        if name not in by_name or setup.count("/") != 1
    ]
    if missing or not wanted:
        raise ConfigError(
            f"openings.janggi_setups: {(missing or ['nothing'])[0]!r} is no set-up; "
            'write "HEEH/HEHE": four letters each of HEEH, EHHE, HEHE, EHEH, or "all"'
        )
    return tuple(by_name[name] for name in wanted)


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config in a TOML file, with `key=value` overrides; ConfigError says what is wrong."""
    data = _read_toml(path, overrides)
    try:
        return parse(data, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def changed(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The config with `key=value` overrides; ConfigError says what is wrong."""
    data = config.to_data()
    for override in overrides:
        _override(data, override)
    return parse(data)


def load_fake_server(path: Path | None, overrides: Sequence[str]) -> FakeConfig:
    """The fake server's config; ConfigError says what is wrong."""
    data = {} if path is None else _read_toml(path, ())
    for override in overrides:
        _override(data, override)
    try:
        return FakeConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, "")) from None


def _read_toml(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a TOML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; name a TOML file") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{str(path)!r}: cannot be read ({error}); name a TOML file") from None
    for override in overrides:
        _override(data, override)
    return data


def parse(data: Mapping[str, Any], folder: Path = Path()) -> RunConfig:
    """A config from plain data; `folder` is where its relative paths start."""
    data = dict(data)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, "")) from None
    engines = {}
    for name, value in config.engines.items():
        table = _table(value, f"engines.{name}")
        try:
            engines[name] = parse_engine_config(name, table)
        except ValidationError as error:
            raise ConfigError(_explain(error, f"engines.{name}.")) from None
        except ValueError as error:
            told = str(error).removeprefix(f"engines.{name}.")
            raise ConfigError(f"engines.{name}.{told}") from None
    agents = []
    for index, value in enumerate(config.agents):
        where = f"agents[{index}]"
        table = _table(value, where)
        try:
            agents.append(parse_agent_config(table).anchored(folder))
        except ValidationError as error:
            raise ConfigError(_explain(error, f"{where}.")) from None
        except ValueError as error:
            raise ConfigError(f"{where}.{error}") from None
    config = config.model_copy(
        update={
            "engines": engines,
            "agents": tuple(agents),
            "prompts": _inline_prompts(config.prompts, folder),
            "adjudication": _anchor_judge(config.adjudication, folder),
            "openings": _anchor_book(config.openings, folder),
        }
    )
    if config.tournament.null_pairing is True:
        named = config.tournament.model_copy(update={"null_pairing": agents[0].name})
        config = config.model_copy(update={"tournament": named})
    _check(config)
    return config


def _table(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: is {value!r}; write a table of keys")
    return dict(value)


def _override(data: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: write key=value, such as tournament.pairs=4")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    *parents, last = key.strip().split(".")
    here: Any = data
    for name in parents:
        here = _child(here, name, text)
    if isinstance(here, list):
        here[_place(here, last, text)] = parsed
    elif isinstance(here, dict):
        here[last] = parsed
    else:
        raise ConfigError(f"--set {text}: {'.'.join(parents)} is not a table")


def _child(here: object, name: str, text: str) -> object:
    if isinstance(here, list):
        return here[_place(here, name, text)]
    if not isinstance(here, dict):
        raise ConfigError(f"--set {text}: nothing to set under {name}")
    return here.setdefault(name, {})


def _place(here: Sequence[object], name: str, text: str) -> int:
    """Where in a list: by number, or a table by its `name`."""
    if name.isdecimal() and int(name) < len(here):
        return int(name)
    names = [one.get("name") if isinstance(one, dict) else None for one in here]
    if name in names:
        return names.index(name)
    known = ", ".join(f'"{one}"' for one in names if one is not None)
    raise ConfigError(
        f"--set {text}: there is no {name}; write a number from 0 to {len(here) - 1}"
        + (f" or a name: {known}" if known else "")
    )


def _explain(error: ValidationError, prefix: str) -> str:
    """One line for the first mistake pydantic found."""
    first = error.errors()[0]
    loc = _untagged(first["loc"])
    where = prefix + ".".join(str(part) for part in loc)
    where = where.rstrip(".") or "config"
    if first["type"] == "extra_forbidden":
        known = _known_keys(error, first["loc"], prefix)
        if not known:
            return f"{where}: unknown key; `arena config reference` lists the known ones"
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f'did you mean "{near[0]}"?' if near else f"known keys: {', '.join(known)}"
        return f"{where}: unknown key; {hint}"
    if first["type"] == "missing":
        return f"{where}: is missing; add it"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and isinstance(first["input"], Mapping):
        return f"{where}.{message}"  # between keys: the message names its own
    message = f"{message[0].lower()}{message[1:]}"
    if _may_hold_a_key(loc, first["input"]):
        return f"{where}: {message}"
    return f"{where}: is {_short(first['input'])}; {message}"


def _untagged(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Where a mistake is, without what pydantic adds for the branch of a union."""
    if loc[:2] == ("tournament", "anchors"):
        return (*loc[:3], *loc[4:])
    if loc[:1] == ("engine",):  # that another hosts
        return (*loc[:1], *loc[2:])
    return loc


def _may_hold_a_key(loc: tuple[int | str, ...], value: object) -> bool:
    """Whether a wrong value could be a server's key, or have one in it, and is not to be shown."""
    is_url = not {"url", "urls", "address"}.isdisjoint(loc)
    return loc[-1:] == ("api_key_env",) or (is_url and not {"@", "?", "#"}.isdisjoint(str(value)))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_SECTIONS: dict[str, type[BaseModel]] = {
    "tournament": TournamentSection,
    "sprt": SprtSection,
    "pace": PaceSection,
    "clock": ClockSection,
    "adjudication": AdjudicationSection,
    "faults": FaultsSection,
    "openings": OpeningsSection,
    "slo": SloSection,
    "saturation": SaturationConfig,
    "prompts": PromptSection,
}


def _known_keys(error: ValidationError, loc: tuple[int | str, ...], prefix: str) -> list[str]:
    """Beside the unknown one; none where the table is not known."""
    if prefix and loc[:1] == ("engine",) and len(loc) == 3:
        model: type[BaseModel] = ENGINE_KINDS[str(loc[1])].config_class
    elif prefix and len(loc) > 1:
        return []
    elif len(loc) > 1:
        model = _SECTIONS.get(str(loc[0]), RunConfig)
    else:
        kinds = {kind.__name__: kind for kind in _known_kinds()}
        model = kinds.get(error.title, RunConfig)
    return sorted(model.model_fields)


def _known_kinds() -> tuple[type[BaseModel], ...]:
    """The config classes of every engine and agent kind."""
    engines = [kind.config_class for kind in ENGINE_KINDS.values()]
    agents = [kind.config for kind in AGENT_KINDS.values()]
    return (*engines, *agents, FakeConfig)


def _inline_prompts(prompts: Mapping[str, PromptSection], folder: Path) -> dict[str, PromptSection]:
    inlined = {}
    for game, section in prompts.items():
        if (section.system is None) == (section.file is None):
            raise ConfigError(f"prompts.{game}: give either system or file")
        text = section.system
        if section.file is not None:
            try:
                text = (folder / section.file).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise ConfigError(
                    f"prompts.{game}.file: {section.file} cannot be read ({reason})"
                ) from None
        inlined[game] = PromptSection(system=text)
    return inlined


def _anchor_judge(adjudication: AdjudicationSection, folder: Path) -> AdjudicationSection:
    if adjudication.judge is None:
        return adjudication
    return adjudication.model_copy(update={"judge": adjudication.judge.anchored(folder)})


def _anchor_book(openings: OpeningsSection, folder: Path) -> OpeningsSection:
    if openings.book in ("builtin", "start"):
        return openings
    return openings.model_copy(update={"book": str((folder / openings.book).resolve())})


def _check(config: RunConfig) -> None:
    """What must hold between sections."""
    names = [agent.name for agent in config.agents]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f'agents: two are named "{min(twice)}"; give each its own name')
    choices = config.games()
    played = [(choice.name, choice.ruleset) for choice in choices]
    again = _repeated(played)
    if again is not None:
        raise ConfigError(
            f"tournament.games: {'/'.join(again)} is named twice; raise pairs to play it more"
        )
    games = [choice.game.name for choice in choices]
    for game in config.prompts:
        if game not in games:
            raise ConfigError(
                f"prompts.{game}: this run plays {', '.join(games)}; name one of them"
            )
    for index, agent in enumerate(config.agents):
        if isinstance(agent, LlmConfig) and agent.engine not in config.engines:
            known = ", ".join(config.engines) or "none; add [engines.main]"
            raise ConfigError(
                f'agents[{index}].engine: no engine is named "{agent.engine}"; engines: {known}'
            )
    _check_players(config, [choice.name for choice in choices])
    _check_format(config)
    _check_openings(config.openings, games)
    _check_adjudication(config.adjudication)
    if config.most_matches > MAX_MATCHES:
        key = "tournament.pairs" if config.sprt is None else "sprt.max_pairs"
        raise ConfigError(
            f"{key}: makes {config.most_matches:,} matches; a run takes at most {MAX_MATCHES:,}"
        )
    _check_queues(config)


def _repeated(values: Sequence[_T]) -> _T | None:
    """The first that is there twice; None where none is."""
    return next((value for value in values if values.count(value) > 1), None)


def _check_openings(asked: OpeningsSection, games: Sequence[str]) -> None:
    if asked.plies is not None and not asked.book.lower().endswith(".pgn"):
        raise ConfigError(
            f"openings.plies: cuts the games of a PGN book, and openings.book is "
            f'"{asked.book}"; take it out'
        )
    if asked.janggi_setups is not None and "janggi" not in games:
        raise ConfigError(
            f"openings.janggi_setups: does nothing at {', '.join(games)}; take it out"
        )
    if asked.seed is not None and asked.order == "book":
        raise ConfigError('openings.seed: does nothing with order = "book"; take it out')


def _check_adjudication(asked: AdjudicationSection) -> None:
    for key, needed in (
        ("draw_moves", "draw_score_cp"),
        ("draw_from_ply", "draw_score_cp"),
        ("resign_moves", "resign_score_cp"),
    ):
        if _is_set(asked, key) and getattr(asked, needed) is None:
            raise ConfigError(f"adjudication.{key}: does nothing without {needed}; give that too")


def _check_queues(config: RunConfig) -> None:
    matches = min(config.tournament.parallel_matches, config.most_matches)
    for name in config.used_engines():
        engine = config.engine(name)
        room = engine.max_concurrent + engine.max_queued
        if matches > room:
            raise ConfigError(
                f"tournament.parallel_matches: {matches} matches at once, but engines.{name} takes "
                f"max_concurrent {engine.max_concurrent} + max_queued {engine.max_queued} = {room} "
                "requests; raise max_queued or play fewer at once"
            )


def _check_format(config: RunConfig) -> None:
    """What a format needs is there, and nothing is asked of it that it has no use for."""
    asked, names = config.tournament, [agent.name for agent in config.agents]
    named = {"challengers": asked.challengers or (), "anchors": asked.anchors}
    if isinstance(asked.null_pairing, str):
        named["null_pairing"] = (asked.null_pairing,)
    for key, known in named.items():
        strange = next((name for name in known if name not in names), None)
        if strange is not None:
            raise ConfigError(
                f'tournament.{key}: no agent is named "{strange}"; agents: {", ".join(names)}'
            )
    games = [choice.name for choice in config.games()]
    for name, elo in asked.anchors.items():
        by_game = elo if isinstance(elo, Mapping) else {}
        strange = next((game for game in by_game if game not in games), None)
        if strange is not None:
            raise ConfigError(
                f'tournament.anchors.{name}: "{strange}" is not played; this run plays '
                + ", ".join(games)
            )
    again = _repeated(asked.challengers or ())
    if again is not None:
        raise ConfigError(f'tournament.challengers: "{again}" is named twice; name it once')
    if config.null_agent is not None and null_name(config.null_agent) in names:
        raise ConfigError(
            f'tournament.null_pairing: its second name is "{null_name(config.null_agent)}", which '
            "an agent has; rename that"
        )
    _check_idle_keys(asked)
    _check_test(config)
    for game in games:
        entrants = config.entrants(game)
        fixed, ones = {
            "gauntlet": ("challengers", config.challengers),
            "ladder": ("anchors", config.anchors(game)),
        }.get(asked.format, ("", entrants[:1]))
        num_fixed = sum(name in ones for name in entrants)
        if not 0 < num_fixed < len(entrants):
            raise ConfigError(
                f"tournament.{fixed}: at {game} {num_fixed} of {len(entrants)} players are named; "
                "name at least one, and not all"
            )


def _check_idle_keys(asked: TournamentSection) -> None:
    for key, format_ in (
        ("challengers", "gauntlet"),
        ("rounds", "swiss"),
        ("sudden_death_pairs", "knockout"),
    ):
        if _is_set(asked, key) and asked.format != format_:
            raise ConfigError(
                f'tournament.{key}: does nothing with format = "{asked.format}"; take it out'
            )


def _check_test(config: RunConfig) -> None:
    asked = config.tournament
    if asked.format == "sprt":
        if config.sprt is None:
            raise ConfigError("sprt: is missing; add [sprt] with elo0 and elo1")
        if len(config.agents) != 2:
            raise ConfigError(
                f'agents: format = "sprt" is between two, not {len(config.agents)}; use '
                '"round_robin" with [sprt] for more'
            )
    if config.sprt is None:
        return
    if asked.format not in ("sprt", "round_robin", "gauntlet"):
        raise ConfigError(
            f'sprt: does nothing with format = "{asked.format}"; take it out, or choose sprt, '
            "round_robin or gauntlet"
        )
    if "pairs" in asked.model_fields_set:
        raise ConfigError("tournament.pairs: does nothing with [sprt]; set sprt.max_pairs instead")


def _num_players(config: RunConfig, game: str) -> int:
    return len(config.entrants(game))


def _check_players(config: RunConfig, games: Sequence[str]) -> None:
    """Every game has two players, and every player a game."""
    for index, agent in enumerate(config.agents):
        named = agent.games or ()
        again = next((game for game in named if named.count(game) > 1), None)
        if again is not None:
            raise ConfigError(f'agents[{index}].games: "{again}" is named twice; name it once')
        strange = next((game for game in named if game not in games), None)
        if strange is not None:
            raise ConfigError(
                f'agents[{index}].games: "{strange}" is not played; this run plays '
                + ", ".join(games)
            )
    for game in games:
        if _num_players(config, game) < 2:
            raise ConfigError(
                f"tournament.games: {game} has fewer than two players; see the agents' `games`"
            )


_BYTES = re.compile(r"\d*\.?\d+(e\+?\d{1,2})?")
_SIZE = re.compile(r"\d*\.?\d+\s*([kmgtpe]i?)?b?", re.IGNORECASE)


def byte_size(option: str, text: str) -> int:
    """Bytes of a size such as "24GiB" or 8e9; ConfigError naming the option."""
    bare = text.strip()
    try:
        if _BYTES.fullmatch(bare):
            return int(float(bare))
        if _SIZE.fullmatch(bare):
            return int(TypeAdapter(ByteSize).validate_python(bare))
    except (ValidationError, OverflowError):
        pass
    raise ConfigError(f"{option}: {text[:200]!r} is no size; write it like 24GiB")


def engine_fragment(config: RunConfig | None, name: str | None, knobs: Mapping[str, int]) -> str:
    """Knobs of an engine as TOML to paste; `name` is of one that has a table in `config`."""
    if config is None or name is None:
        return tomli_w.dumps({"engines": {name or "main": dict(knobs)}})
    engine = config.engine(name)
    table = dict(knobs) if engine.computing is engine else {"engine": dict(knobs)}
    toml = tomli_w.dumps({"engines": {name: table}})
    return f"# in place of the lines of these names\n{toml}"


def reference() -> str:
    """The config reference, generated from the models: every section, key, type and default."""
    blocks = [
        "# Config reference\n\nGenerated by `arena config reference`; a test keeps it true. "
        "Unknown keys are errors.",
        _describe("Top level", RunConfig),
        _describe("`[prompts.GAME]`", PromptSection),
    ]
    for name, kind in ENGINE_KINDS.items():
        blocks.append(_describe(f'`[engines.NAME]` with `kind = "{name}"`', kind.config_class))
    for name, agent_kind in AGENT_KINDS.items():
        blocks.append(_describe(f'`[[agents]]` with `kind = "{name}"`', agent_kind.config))
    for name, section in _SECTIONS.items():
        if name != "prompts":
            blocks.append(_describe(f"`[{name}]`", section))
    return "\n\n".join(blocks) + "\n"


def _describe(title: str, model: type[BaseModel]) -> str:
    lines = [f"## {title}", "", "| key | default | meaning |", "|---|---|---|"]
    refused = model.lacking if issubclass(model, EngineConfig) else {}
    for name, field in model.model_fields.items():
        if isinstance(field.default, BaseModel) or name in refused:
            continue
        default = (
            "required"
            if field.is_required()
            else _default_text(field.get_default(call_default_factory=True))
        )
        meaning = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{name}` | {default} | {meaning} |")
    return "\n".join(lines)


def _default_text(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, tuple | list):
        value = list(value)
    return f"`{json.dumps(value, ensure_ascii=False, default=str)}`"
