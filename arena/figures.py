"""A run in figures as its rows come: the one builder behind report, terminal, dashboard, metrics.

Latencies are in milliseconds. A move's latency runs from when it was due to when it was decided:
its parts are the wait in our own queue and the engine's, prefill and decode as the engine reports
them, and the harness, which is whatever is left; an agent's harness figures include the commit.
"""

import json
import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from agents import Fault
from arena.distribution import Distribution, Exact, Sketch, weighted_summary
from arena.replicas import Replicas
from arena.store import (
    BUCKETS_KEPT,
    AttemptRow,
    EventRow,
    MatchRow,
    PlyRow,
    Row,
    RunRow,
    SampleRow,
    StoreError,
)
from games import Termination
from serving import SPANS_S, Bucket, EngineConfig, parse_engine_config

IDLE_S = 5.0
"""After so many seconds without a bucket an engine has nothing in flight."""
RECENT_S = 10
"""Seconds over which the present rate of moves is taken."""
SCHEDULE_COMPLETE = "schedule_complete"
"""The event that no more matches will be added."""
FORMAT_EVENTS = ("bye", "tie_decided")
_EARLY_S = 0.01
"""A timer wakes a seat at most this much before it is due."""
_PARTS = ("latency", "queue", "prefill", "decode", "harness")


class MoveTimes:
    """One move's latency and where it went, milliseconds; None where it is not known."""

    __slots__ = ("decode", "harness", "lag", "latency", "prefill", "queue")

    def __init__(self, ply: PlyRow, attempts: Sequence[AttemptRow]) -> None:
        latency = max(ply.done - ply.due, 0.0)  # a timer may wake a seat a little early
        self.latency = latency * 1000
        self.lag: float | None = None
        self.harness: float | None = None
        """Without the commit, which the next move of the match tells."""
        self.queue = self.prefill = self.decode = None
        served = [a for a in attempts if a.submitted is not None]
        if served:
            self.queue = _total_ms([_waited_s(a) for a in served])
            self.prefill = _total_ms([a.prefill_s for a in served])
            self.decode = _total_ms([a.decode_s for a in served])
        # there was no reply to time, or a former process asked before this one's due time
        if len(served) < len(attempts) or (served and served[0].submitted < ply.due - _EARLY_S):  # type: ignore[operator]
            return
        if served:
            self.lag = max(served[0].submitted - ply.due, 0.0) * 1000  # type: ignore[operator]
        for a in served:
            latency -= a.done - a.submitted  # type: ignore[operator]
        self.harness = max(latency, 0.0) * 1000


def _waited_s(attempt: AttemptRow) -> float | None:
    """In our own queue and the engine's; None where the engine does not say."""
    if attempt.queue_s is None:
        return None
    assert attempt.submitted is not None
    assert attempt.admitted is not None
    return attempt.admitted - attempt.submitted + attempt.queue_s


def _total_ms(parts: Sequence[float | None]) -> float | None:
    total = 0.0
    for part in parts:
        if part is None:
            return None
        total += part
    return total * 1000


def commit_ms(ply: PlyRow, follower: PlyRow, starts: Iterable[float]) -> float:
    """From a move's choice to its being on disk, as the match's next move tells; 0 where a process
    started in between (`starts`, run times), for then nobody knows."""
    for at in starts:
        if ply.done <= at <= follower.ready:
            return 0.0
    return max(follower.ready - ply.done, 0.0) * 1000


class MatchFigures:
    """A match as it stands."""

    __slots__ = (
        *("agents", "attempts", "clocks", "counted", "dues", "fault", "harness", "last", "made"),
        "row",
    )

    def __init__(self, row: MatchRow) -> None:
        self.row = row
        self.made = [0, 0]
        """Plies of each side."""
        self.clocks: list[float | None] = [None, None]
        """Seconds left to each side, where there are clocks."""
        self.dues: list[float | None] = [None, None]
        """When each side's last move was due."""
        self.last: PlyRow | None = None
        self.attempts: list[AttemptRow] = []
        """Of plies that are not committed yet."""
        self.harness: float | None = None
        """The last move's, which lacks its commit."""
        self.counted = (-1, False, False)
        """The last ply whose tokens were counted, and whether prompt and uncached ones were."""
        self.agents: list[AgentFigures | None] = [None, None]
        self.fault: str | None = None
        """Of a match that was forfeited or lost on time: the failure that decided it."""

    def note(self, ply: PlyRow) -> None:
        """A move was made."""
        self.last = ply
        self.made[ply.side] += 1
        self.clocks[ply.side] = ply.clock_left_s
        self.dues[ply.side] = ply.due

    @property
    def plies(self) -> int:
        return self.made[0] + self.made[1]


class Tokens:
    """Tokens of replies, and the moves that they were spent on; all attempts of a move count."""

    __slots__ = ("output", "output_moves", "prompt", "prompt_moves", "uncached", "uncached_moves")

    def __init__(self) -> None:
        self.prompt = self.prompt_moves = 0
        """Of replies whose prompt is counted."""
        self.uncached = self.uncached_moves = 0
        """Of replies that say what the prefix cache held."""
        self.output = self.output_moves = 0

    @property
    def prompt_per_move(self) -> float | None:
        return ratio(self.prompt, self.prompt_moves)

    @property
    def uncached_per_move(self) -> float | None:
        return ratio(self.uncached, self.uncached_moves)

    @property
    def output_per_move(self) -> float | None:
        return ratio(self.output, self.output_moves)

    def add(self, other: "Tokens") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class AgentFigures:
    """An agent at one game."""

    def __init__(self, name: str, game: str, *, exact: bool) -> None:
        self.name, self.game = name, game
        self.key = (name, game)
        self.mode: str | None = None
        self.engine: str | None = None
        self.moves = 0
        self.times: dict[str, Distribution] = {
            part: Exact() if exact else Sketch() for part in _PARTS
        }
        self.faults: Counter[str] = Counter()
        self.tokens = Tokens()

    def row(self) -> dict[str, Any]:
        """Its row of the report."""
        return {
            "name": self.name,
            "game": self.game,
            "mode": self.mode,
            "engine": self.engine,
            "moves": self.moves,
            **{f"{part}_ms": times.summary() for part, times in self.times.items()},
            "faults": dict(self.faults),
            "prompt_tokens_per_move": self.tokens.prompt_per_move,
            "uncached_prompt_tokens_per_move": self.tokens.uncached_per_move,
            "output_tokens_per_move": self.tokens.output_per_move,
        }


class EngineFigures:
    """An engine as its steps and replies show it."""

    def __init__(self, name: str, settings: Mapping[str, Any], *, exact: bool) -> None:
        self.name, self.settings = name, settings
        config = _config(name, settings)
        self.batch_limit: int = config.batch_limit if config else settings["max_concurrent"]
        """Requests that one batch may hold."""
        self.is_replicated = config is not None and config.is_replicated
        self.hosted = _hosted(settings)
        """Settings of the engine that computes: itself, or what each of its replicas hosts."""
        self.replicas = Replicas(exact=exact)
        self.version: str | None = None
        self.restarts = 0
        self.tokens: dict[str, Tokens] = {}
        """By game."""
        self.prompt_tokens = self.cached_tokens = 0
        """Of replies that say both."""
        self.step_requests: Counter[float] = Counter()
        self.step_tokens: Counter[float] = Counter()
        self.kv_usage: Counter[float] = Counter()
        self.grown: dict[str, int] = {}
        """Growth of counters that start again at 0 with each process."""
        self._last: dict[tuple[str | None, str], int] = {}
        self._process = 0
        self.buckets: dict[float, deque[Bucket]] = {
            span_s: deque(maxlen=BUCKETS_KEPT) for span_s in SPANS_S
        }

    def add_sample(self, row: SampleRow, process: int) -> None:
        """`process`: how many have taken the run up by then; counters begin again with each."""
        for counts, value in (
            (self.step_requests, row.step_requests),
            (self.step_tokens, row.step_tokens),
            (self.kv_usage, None if row.kv_usage is None else round(row.kv_usage, 3)),
        ):
            if value is not None:
                counts[value] += row.steps
        if process != self._process:
            self._process = process
            self._last.clear()
        self.replicas.add_sample(row)
        for key in ("preemptions", "rejected"):
            now = getattr(row, key)
            if now is not None:
                before = self._last.get((row.replica, key), 0)
                growth = now - before if now >= before else now
                self.grown[key] = self.grown.get(key, 0) + growth
                self._last[row.replica, key] = now

    def add_bucket(self, bucket: Bucket) -> None:
        kept = self.buckets[bucket.span_s]
        if kept and kept[-1].at == bucket.at:
            kept[-1] = bucket
        else:
            kept.append(bucket)

    @property
    def now(self) -> Bucket | None:
        """The last second."""
        seconds = self.buckets[SPANS_S[0]]
        return seconds[-1] if seconds else None

    def all_tokens(self) -> Tokens:
        """Of all games together."""
        total = Tokens()
        for tokens in self.tokens.values():
            total.add(tokens)
        return total

    def row(self) -> dict[str, Any]:
        """Its row of the report."""
        limit = self.batch_limit
        uncached = {game: self.tokens[game].uncached_per_move for game in sorted(self.tokens)}
        return {
            "name": self.name,
            "kind": self.settings["kind"],
            "version": self.version,
            "step_requests": weighted_summary(self.step_requests.items()),
            "step_tokens": weighted_summary(self.step_tokens.items()),
            "occupancy": weighted_summary((r / limit, n) for r, n in self.step_requests.items()),
            "prefix_hit_rate": ratio(self.cached_tokens, self.prompt_tokens),
            "uncached_prompt_tokens_per_move": {
                game: mean for game, mean in uncached.items() if mean is not None
            },
            "output_tokens_per_move": self.all_tokens().output_per_move,
            "kv_usage": weighted_summary(self.kv_usage.items()),
            "preemptions": self.grown.get("preemptions"),
            "rejected": self.grown.get("rejected"),
            "restarts": self.restarts,
            "replicas": self.replicas.section(),
        }


def _config(name: str, settings: Mapping[str, Any]) -> EngineConfig | None:
    """None of an engine that this version cannot read."""
    try:
        return parse_engine_config(name, settings)
    except ValueError:
        return None


def _hosted(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    hosted = settings.get("engine")
    return hosted if settings["kind"] == "ray" and isinstance(hosted, Mapping) else settings


def _deciding_fault(row: MatchRow, attempts: Sequence[AttemptRow]) -> str | None:
    """The player's failure that lost it a match; `attempts` are those after the last move."""
    if row.termination != Termination.FORFEIT:
        return row.termination if row.termination == Termination.FLAG_FALL else None
    own = [a.fault for a in attempts if a.fault and not Fault(a.fault).is_infrastructure]
    return own[-1] if own else row.termination


class _Seats:
    """What the seats of matches that have ended made of the pace."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.worst: float | None = None

    def add(self, seconds: float, made: Sequence[int], period: float) -> None:
        self.seconds += seconds
        if seconds >= 2 * period:
            worst = min(made) / (seconds / period)
            self.worst = worst if self.worst is None else min(self.worst, worst)


class Figures:
    """A run's figures. `exact` keeps every latency; else memory grows with the number of matches
    alone, not of moves, and percentiles of latencies are right within 1.1 %."""

    def __init__(self, run: RunRow, matches: Iterable[MatchRow], *, exact: bool) -> None:
        """`matches` are those known now; what became of them, and others, come by `add`."""
        self.run = run
        self.config = _config_of(run)
        self.matches = {row.id: MatchFigures(row) for row in matches}
        self.active: dict[str, MatchFigures] = {}
        """Matches that are running or suspended."""
        self.agents: dict[tuple[str, str], AgentFigures] = {}
        self.engines = {
            name: EngineFigures(name, settings, exact=exact)
            for name, settings in self.config["engines"].items()
        }
        self.finished: list[MatchRow] = []
        """In the order in which they ended."""
        self.infrastructure_faults: Counter[str] = Counter()
        self.changed_matches: set[str] = set()
        self.changed_agents: set[tuple[str, str]] = set()
        """Since whoever shows them cleared these."""
        self.process: tuple[int, float] | None = None
        """Id of the process that took the run up last, and when it began (seconds since 1970)."""
        self.can_grow = _adds_matches(self.config)
        """Whether more matches may come than are known."""
        self.format_events: dict[str, list[dict[str, Any]]] = {kind: [] for kind in FORMAT_EVENTS}
        """By kind, in order: byes, and ties of a knock-out."""
        self.plies = 0
        self.last_record = 0.0
        """Run time of the last thing recorded."""
        self._exact = exact
        self._period: float = self.config["pace"]["move_period_seconds"]
        self._slo_ms: float = self.config["slo"]["move_seconds"] * 1000
        self.in_time = 0
        """Moves within the SLO."""
        self.lost = 0
        """Turns that ended in a forfeit: offered, and never a move."""
        self.schedule_lag: Distribution = Exact() if exact else Sketch()
        """From due to submitted, milliseconds."""
        self._starts: list[float] = []
        self._states = Counter(match.row.state for match in self.matches.values())
        self._first_start = math.inf
        self._last_end = 0.0
        self._ended_seats = _Seats()
        self._by_second: Counter[int] = Counter()
        self._take: dict[type[Row], Callable[[Any], None]] = {
            AttemptRow: self._add_attempt,
            PlyRow: self._add_ply,
            MatchRow: self._add_match,
            SampleRow: self._add_sample,
            EventRow: self._add_event,
            Bucket: self._add_bucket,
        }

    def add(self, rows: Iterable[Row]) -> None:
        """Count rows: a move's attempts come before it, a match's end after its last move."""
        take = self._take
        for row in rows:
            take[type(row)](row)

    def _add_sample(self, row: SampleRow) -> None:
        self.engines[row.engine].add_sample(row, bisect_right(self._starts, row.at))
        self._note(row.at)

    def _add_bucket(self, row: Bucket) -> None:
        self.engines[row.engine].add_bucket(row)

    def _note(self, at: float) -> None:
        if at > self.last_record:
            self.last_record = at

    def _add_event(self, row: EventRow) -> None:
        self._note(row.at)
        if row.kind == "process_start":
            self._starts.append(row.at)
            detail = json.loads(row.detail_json)
            self.process = None
            if "pid" in detail and "began" in detail:
                self.process = detail["pid"], detail["began"]
        elif row.kind == SCHEDULE_COMPLETE:
            self.can_grow = False
        elif row.kind in self.format_events:
            self.format_events[row.kind].append(json.loads(row.detail_json))
        elif row.kind in ("engine_ready", "engine_restarted"):
            detail = json.loads(row.detail_json)
            engine = self.engines[detail["engine"]]
            if row.kind == "engine_ready":
                engine.version = str(detail["version"])
            else:
                engine.restarts += 1

    def _add_match(self, row: MatchRow) -> None:
        match = self.matches.get(row.id)
        if match is None:
            match = self.matches[row.id] = MatchFigures(row)
        else:
            self._states[match.row.state] -= 1
        self._states[row.state] += 1
        match.row = row
        if row.state in ("running", "suspended"):
            self.active[row.id] = match
        else:
            self.active.pop(row.id, None)
        self.changed_matches.add(row.id)
        if row.started is not None:
            self._first_start = min(self._first_start, row.started)
            self._note(row.started)
        if row.state == "finished":
            match.fault = _deciding_fault(row, match.attempts)
            match.attempts.clear()  # a forfeit's
            self.finished.append(row)
            self._last_end = max(self._last_end, row.ended or 0.0)
            self.lost += row.termination in ("forfeit", "flag_fall")
            self._settle(match, 0.0)
            if self._period:
                self._ended_seats.add(self._running_seconds(row, 0.0), match.made, self._period)

    def _agent(self, match: MatchFigures, side: int) -> AgentFigures:
        """The agent on a side of a match, which has changed."""
        agent = match.agents[side]
        if agent is None:
            key = match.row.agents[side], label(match.row.game, match.row.ruleset)
            agent = self.agents.get(key)
            if agent is None:
                agent = self.agents[key] = AgentFigures(*key, exact=self._exact)
            match.agents[side] = agent
        self.changed_agents.add(agent.key)
        return agent

    def _add_attempt(self, row: AttemptRow) -> None:
        match = self.matches[row.match_id]
        if match.attempts and match.attempts[-1].ply != row.ply:
            match.attempts.clear()
        match.attempts.append(row)
        agent = self._agent(match, row.side)
        agent.mode, agent.engine = row.mode, row.engine
        if row.done is not None:
            self._note(row.done)
        if row.fault is not None:
            agent.faults[row.fault] += 1
            self.changed_matches.add(row.match_id)
            if Fault(row.fault).is_infrastructure:
                self.infrastructure_faults[row.fault] += 1
        if row.engine is not None and row.completion_tokens is not None:
            self._add_tokens(row, match, agent)
            self.engines[row.engine].replicas.add_attempt(row)

    def _add_tokens(self, row: AttemptRow, match: MatchFigures, agent: AgentFigures) -> None:
        assert row.engine is not None
        assert row.completion_tokens is not None
        engine = self.engines[row.engine]
        by_game = engine.tokens.get(agent.game)
        if by_game is None:
            by_game = engine.tokens[agent.game] = Tokens()
        ply, has_prompt, has_uncached = match.counted
        is_new = ply != row.ply
        if is_new:
            has_prompt = has_uncached = False
        uncached = None
        if row.prompt_tokens is not None and row.cached_tokens is not None:
            uncached = row.prompt_tokens - row.cached_tokens
            engine.prompt_tokens += row.prompt_tokens
            engine.cached_tokens += row.cached_tokens
        for tokens in (by_game, agent.tokens):
            if row.prompt_tokens is not None:
                tokens.prompt += row.prompt_tokens
                tokens.prompt_moves += not has_prompt
            if uncached is not None:
                tokens.uncached += uncached
                tokens.uncached_moves += not has_uncached
            tokens.output += row.completion_tokens
            tokens.output_moves += is_new
        match.counted = (
            row.ply,
            has_prompt or row.prompt_tokens is not None,
            has_uncached or uncached is not None,
        )

    def _add_ply(self, row: PlyRow) -> None:
        match = self.matches[row.match_id]
        attempts = [a for a in match.attempts if a.ply == row.ply]
        match.attempts.clear()
        if match.harness is not None:
            assert match.last is not None
            self._settle(match, commit_ms(match.last, row, self._starts))
        times = MoveTimes(row, attempts)
        agent = self._agent(match, row.side)
        if attempts and attempts[-1].engine is not None:
            self.engines[attempts[-1].engine].replicas.add_move(attempts, agent.key)
        agent.moves += 1
        agent.times["latency"].add(times.latency)
        if times.queue is not None:
            agent.times["queue"].add(times.queue)
        if times.prefill is not None:
            agent.times["prefill"].add(times.prefill)
        if times.decode is not None:
            agent.times["decode"].add(times.decode)
        if times.lag is not None:
            self.schedule_lag.add(times.lag)
        match.harness = times.harness
        match.note(row)
        self.plies += 1
        self.in_time += times.latency <= self._slo_ms
        self._by_second[int(row.done)] += 1
        self._note(row.done)
        self.changed_matches.add(row.match_id)

    def _settle(self, match: MatchFigures, commit_ms: float) -> None:
        """Count the last move's harness time, now that its commit is known."""
        if match.harness is not None:
            assert match.last is not None
            self._agent(match, match.last.side).times["harness"].add(match.harness + commit_ms)
            match.harness = None

    def settle(self) -> None:
        """Count every last move without its commit: no move will follow."""
        for match in self.matches.values():
            self._settle(match, 0.0)

    def _running_seconds(self, row: MatchRow, now: float) -> float:
        """Seconds that a match which was begun has been running, suspensions left out."""
        assert row.started is not None
        return max(_end(row, now) - row.started - row.suspended_s, 0.0)

    def fleet(self, now: float | None = None) -> dict[str, Any]:
        """The run as a whole at run time `now`; None: when the last thing was recorded."""
        at = self.last_record if now is None else now
        begun = [match for match in self.active.values() if match.row.started is not None]
        ends = [_end(match.row, at) for match in begun]
        elapsed = None
        if self._first_start < math.inf:
            elapsed = max(chain(ends, [self._last_end])) - self._first_start
        return {
            "matches": {
                state: self._states[state]
                for state in ("scheduled", "running", "suspended", "finished")
            },
            "plies": self.plies,
            "elapsed_s": elapsed,
            "moves_per_s": ratio(self.plies, elapsed),
            "games_per_h": ratio(len(self.finished) * 3600, elapsed),
            "slo_attainment": ratio(self.in_time, self.plies + self.lost),
            **self._attainment(begun, at),
            "schedule_lag_ms": self.schedule_lag.summary(),
            "infrastructure_faults": dict(self.infrastructure_faults),
        }

    def _attainment(self, begun: Sequence[MatchFigures], now: float) -> dict[str, float | None]:
        """Plies made of those that the pace allowed, in all and for the seat that fared worst."""
        if not self._period:
            return {"pace_attainment": None, "min_seat_attainment": None}
        seats = _Seats()
        seats.seconds, seats.worst = self._ended_seats.seconds, self._ended_seats.worst
        for match in begun:
            seats.add(self._running_seconds(match.row, now), match.made, self._period)
        allowed = seats.seconds / (self._period / 2)
        return {
            # a first move need not wait a period, which shows where games are short
            "pace_attainment": _at_most_1(ratio(self.plies, allowed)),
            "min_seat_attainment": _at_most_1(seats.worst),
        }

    def recent_moves_per_s(self, now: float) -> float | None:
        """Moves a second over the last whole seconds before run time `now`."""
        last = int(now)
        for second in [second for second in self._by_second if second < last - RECENT_S]:
            del self._by_second[second]
        since = max(last - RECENT_S, math.ceil(min(self._first_start, last)))
        moves = sum(count for second, count in self._by_second.items() if since <= second < last)
        return ratio(moves, last - since)


def _config_of(run: RunRow) -> dict[str, Any]:
    """The run's config; StoreError where it is not one that figures can be made with."""
    try:
        config: dict[str, Any] = json.loads(run.config_json)
        for section, key in (("pace", "move_period_seconds"), ("slo", "move_seconds")):
            float(config[section][key])
        for settings in config["engines"].values():
            int(settings["max_concurrent"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"run {run.id}: its config cannot be read ({error!r})") from None
    return config


def _adds_matches(config: Mapping[str, Any]) -> bool:
    """As RunConfig.can_grow; a run of old times has all its matches from the start."""
    asked = config.get("tournament", {})
    return "sprt" in config or asked.get("format") in ("swiss", "knockout", "ladder")


def _end(row: MatchRow, last_record: float) -> float:
    """When a match that was begun ended or was left; while it runs, the last thing recorded."""
    known = row.ended if row.ended is not None else row.suspended_at
    return last_record if known is None else known


def label(game: str, ruleset: str) -> str:
    """A game as tables name it: with its rule set where that is not the game's namesake."""
    return game if ruleset in (game, "standard") else f"{game}/{ruleset}"


def _at_most_1(share: float | None) -> float | None:
    return None if share is None else min(share, 1.0)


def ratio(top: float, bottom: float | None) -> float | None:
    """Their quotient; None without a divisor."""
    return top / bottom if bottom else None
