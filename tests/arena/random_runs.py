"""Random runs that could have been played, as rows in the order in which a store commits them."""

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from agents import Fault
from arena.store import (
    AttemptRow,
    EventRow,
    MatchRow,
    PlyRow,
    Records,
    Row,
    RunRow,
    SampleRow,
    Tap,
)
from serving import SPANS_S, Bucket

ENGINES = ("main", "side")
AGENTS = {"ann": "main", "bob": "main", "eve": "side", "dice": None}
"""Each agent's engine."""
MODES = {"ann": "constrained", "bob": "free", "eve": "free", "dice": None}
CONFIG = {
    "name": "random",
    "pace": {"move_period_seconds": 1.0},
    "slo": {"move_seconds": 1.0},
    "engines": {
        name: {"kind": "scripted", "max_concurrent": 8, "max_queued": 8, "context_tokens": 2048}
        for name in ENGINES
    },
    "agents": [
        {"name": name, "kind": "llm", "engine": engine, "mode": MODES[name]}
        for name, engine in AGENTS.items()
    ],
    "tournament": {"parallel_matches": 4, "max_plies": 40},
}
RUN = RunRow("r", "2026-01-01T00:00:00Z", json.dumps(CONFIG), "d", "{}")
REPLICAS = ("k3v9x2ab", "q7m1z0cd", "10.0.0.7:8000")
"""Of the engine `side`."""
GAMES = (("chess", "standard"), ("janggi", "janggi"), ("janggi", "janggimodern"))
AGENT_FAULTS = (Fault.ILLEGAL, Fault.UNPARSABLE, Fault.EMPTY)
ENGINE_FAULTS = (Fault.OVERLOADED, Fault.ENGINE_DEAD, Fault.CUT_SHORT)


def scheduled(number: int, agents: tuple[str, str], game: tuple[str, str]) -> MatchRow:
    """A match that has not begun; ids are in another order than numbers."""
    return MatchRow(
        id=f"{number * 7 % 10}/m{number}",
        pair_id=f"p{number // 2}",
        game=game[0],
        ruleset=game[1],
        agent_first=agents[0],
        agent_second=agents[1],
        start_fen="fen w",
        opening="",
        state="scheduled",
        winner=None,
        termination=None,
        detail=None,
        score_first=None,
        score_second=None,
        started=None,
        ended=None,
        suspended_at=None,
        suspended_s=0.0,
        number=number,
    )


def bucket(engine: str, span_s: float, at: float, requests: int = 0) -> Bucket:
    """Telemetry of so many requests."""
    known = {"engine": engine, "span_s": span_s, "at": at, "offered": requests}
    counts = ("steps", "rejected", "replies", "completion_tokens")
    values = {**dict.fromkeys(Bucket._fields), **dict.fromkeys(counts, 0), "in_flight": 0.5}
    return Bucket(**{**values, **known})  # type: ignore[arg-type]


@dataclass
class HandOver:
    """Rows that a match or an engine gives to the store at once."""

    rows: list[Row]
    awaited_by: str | None = None
    """The match that does nothing more until they are on disk."""


@dataclass
class Table:
    """A match under way."""

    row: MatchRow
    ply: int = 0
    tries: int = 0
    """Attempts at the ply under way."""
    ready: float = 0.0


@dataclass
class RandomRun:
    """What was handed over, in order."""

    matches: tuple[MatchRow, ...]
    given: list[HandOver] = field(default_factory=list)


class Player:
    """Makes a random run; times go up by thousandths of a second to seconds."""

    def __init__(self, seed: int, num_matches: int, num_steps: int) -> None:
        self.rng = random.Random(seed)
        self.at = 0.0
        pairs = [self.rng.sample(sorted(AGENTS), 2) for _ in range(num_matches)]
        self.run = RandomRun(
            tuple(
                scheduled(number, (one, two), self.rng.choice(GAMES))
                for number, (one, two) in enumerate(pairs)
            )
        )
        self.waiting = list(self.run.matches)
        self.tables: list[Table] = []
        self.counters = {name: Counter[str]() for name in ENGINES}
        self.buckets: dict[tuple[str, float], Bucket] = {}
        self._start()
        for _ in range(num_steps):
            self._step()

    def _give(self, *rows: Row, awaited_by: str | None = None) -> None:
        self.run.given.append(HandOver(list(rows), awaited_by))

    def _pass(self, most: float) -> float:
        """Let time pass."""
        self.at = round(self.at + self.rng.uniform(0.001, most), 3)
        return self.at

    def _event(self, kind: str, **detail: object) -> None:
        self._give(EventRow(self._pass(0.01), kind, json.dumps(detail)))

    def _start(self) -> None:
        """A process takes the run up: what it finds running was cut off."""
        began = self._pass(0.1)
        self._event("process_start", pid=1)
        for table in self.tables:
            if table.row.state == "running":
                self._mark(table, state="suspended", suspended_at=began)
        for name in ENGINES:
            self.counters[name].clear()
            self._event("engine_ready", engine=name, version=f"v{self.at:.0f}")

    def _step(self) -> None:
        rng = self.rng
        table = rng.choice(self.tables) if self.tables else None
        drawn = rng.random()
        if drawn < 0.02:
            self._start()
        elif drawn < 0.2:
            self._see(rng.choice(ENGINES))
        elif drawn < 0.25:
            self._event("engine_restarted", engine=rng.choice(ENGINES))
        elif drawn < 0.4 and self.waiting:
            self._begin(self.waiting.pop(rng.randrange(len(self.waiting))))
        elif table is None:
            self._pass(2.0)
        elif table.row.state == "suspended":
            since = table.row.suspended_at
            assert since is not None
            away = table.row.suspended_s + self._pass(1.0) - since
            self._mark(table, state="running", suspended_at=None, suspended_s=away)
            table.ready = self.at
        elif drawn < 0.5:
            self._interrupt(table)
        elif drawn < 0.55:
            self._mark(table, state="suspended", detail="left", suspended_at=self._pass(0.1))
        elif drawn < 0.6:
            self._finish(table)
        else:
            self._move(table)

    def _begin(self, row: MatchRow) -> None:
        table = Table(row)
        self.tables.append(table)
        self._mark(table, state="running", started=self._pass(0.5))
        table.ready = self.at

    def _mark(self, table: Table, **changes: object) -> None:
        table.row = table.row._replace(**changes)  # type: ignore[arg-type]
        self._give(table.row)

    def _attempt(self, table: Table, fault: Fault | None) -> AttemptRow:
        row, rng = table.row, self.rng
        side = table.ply % 2
        engine = AGENTS[row.agents[side]]
        request_id = f"{row.id}/{table.ply}/0/{table.tries}"
        table.tries += 1
        mode = MODES[row.agents[side]]
        head = (request_id, row.id, table.ply, side, 0, engine, mode)
        if fault in (Fault.OVERLOADED, Fault.ENGINE_DEAD):
            return AttemptRow(*head, fault=fault.value)
        submitted, admitted, done = self._pass(0.2), self._pass(0.1), self._pass(1.0)
        says = rng.random() < 0.8
        prompt = rng.randrange(1, 500)
        return AttemptRow(
            *head,
            reply_text="e2e4",
            finish="stop",
            fault=None if fault is None else fault.value,
            prompt_tokens=prompt,
            cached_tokens=rng.randrange(prompt) if says else None,
            completion_tokens=rng.randrange(9),
            submitted=submitted,
            admitted=admitted,
            done=done,
            queue_s=rng.random() if says else None,
            prefill_s=rng.random() if says else None,
            decode_s=rng.random() if says else None,
            replica=REPLICAS[(row.number + table.ply // 4) % 3] if engine == "side" else None,
        )

    def _asks(self, table: Table) -> bool:
        return AGENTS[table.row.agents[table.ply % 2]] is not None

    def _interrupt(self, table: Table) -> None:
        if not self._asks(table):
            return
        fault = self.rng.choice(ENGINE_FAULTS)
        self._give(self._attempt(table, fault))
        if fault is not Fault.OVERLOADED:
            self._mark(table, state="suspended", suspended_at=self._pass(0.01))
            self._event("match_suspended", match=table.row.id)

    def _move(self, table: Table) -> None:
        due = max(table.ready, self._pass(0.3))
        attempts: list[AttemptRow] = []
        if self._asks(table):
            faults = [self.rng.choice(AGENT_FAULTS) for _ in range(self.rng.randrange(3))]
            attempts = [self._attempt(table, fault) for fault in (*faults, None)]
        done = self._pass(0.05)
        side = table.ply % 2
        fen = f"fen{table.ply} {'bw'[side]}"
        ply = PlyRow(table.row.id, table.ply, side, "e2e4", "e4", fen, None, table.ready, due, done)
        self._give(ply, *attempts, awaited_by=table.row.id)
        table.ply, table.tries, table.ready = table.ply + 1, 0, self._pass(0.02)

    def _finish(self, table: Table) -> None:
        loser = table.ply % 2
        how: dict[str, object] = {"termination": "draw", "winner": None}
        if self.rng.random() < 0.5 and self._asks(table):
            self._give(*[self._attempt(table, fault) for fault in AGENT_FAULTS])
            how = {"termination": "forfeit", "winner": 1 - loser}
        self.tables.remove(table)
        self._mark(table, state="finished", ended=self._pass(0.01), detail="over", **how)
        self.run.given[-1].awaited_by = table.row.id

    def _see(self, engine: str) -> None:
        counts = self.counters[engine]
        for key in ("preemptions", "rejected", "queries"):
            counts[key] += self.rng.randrange(3)
        running, waiting, requests, tokens = (self.rng.randrange(1, 9) for _ in range(4))
        sample = SampleRow(
            engine,
            self._pass(0.5),
            "per_step",
            self.rng.choice((1, 10)),
            REPLICAS[running % 3] if engine == "side" else None,
            running,
            waiting,
            requests,
            tokens,
            self.rng.random(),
            counts["queries"],
            0,
            counts["preemptions"],
            counts["rejected"],
        )
        self._give(sample)
        second = float(int(self.at))
        known = self.buckets.get((engine, 1.0))
        if known is None or known.at < second:
            self._give(*self._close(engine, second))

    def _close(self, engine: str, second: float) -> Iterator[Bucket]:
        requests = self.rng.randrange(9)
        for span_s in SPANS_S:
            at = second // span_s * span_s
            known = self.buckets.get((engine, span_s))
            before = known.offered if known is not None and known.at == at else 0
            made = bucket(engine, span_s, at, before + requests)
            self.buckets[engine, span_s] = made
            yield made


def random_run(seed: int, num_matches: int = 6, num_steps: int = 80) -> RandomRun:
    """The same run for the same arguments."""
    return Player(seed, num_matches, num_steps).run


def commits(run: RandomRun, rng: random.Random) -> Iterator[list[Row]]:
    """Group commits: hand-overs that gathered, none of a match that waits for one of them."""
    gathered: list[Row] = []
    waiting: set[str] = set()
    for given in run.given:
        must_wait = bool(waiting & set(map(match_of, given.rows)))
        if must_wait or any(map(is_start, given.rows)) or rng.random() < 0.5:
            yield gathered
            gathered, waiting = [], set()
        gathered += given.rows
        if given.awaited_by is not None:
            waiting.add(given.awaited_by)
    yield gathered


def is_start(row: Row) -> bool:
    return isinstance(row, EventRow) and row.kind == "process_start"


def match_of(row: Row) -> str:
    """Id of the match that a row is of; empty where it is of none."""
    if isinstance(row, MatchRow):
        return row.id
    return row.match_id if isinstance(row, PlyRow | AttemptRow) else ""


def tapped(batches: Iterable[Sequence[Row]]) -> Iterator[list[Row]]:
    """What a store's tap tells of commits, one by one."""
    tap = Tap()
    for batch in batches:
        by_kind: dict[type[Row], list[Row]] = {}
        for row in batch:
            by_kind.setdefault(type(row), []).append(row)
        tap.put(by_kind)
        yield tap.take()


def records(run: RandomRun) -> Records:
    """What the store holds in the end."""
    rows = [row for given in run.given for row in given.rows]
    matches = {row.id: row for row in run.matches}
    matches.update((row.id, row) for row in rows if isinstance(row, MatchRow))
    plies = [row for row in rows if isinstance(row, PlyRow)]
    attempts = [row for row in rows if isinstance(row, AttemptRow)]
    kept = {(b.engine, b.span_s, b.at): b for b in rows if isinstance(b, Bucket)}
    return Records(
        RUN,
        tuple(sorted(matches.values(), key=lambda row: row.number)),
        tuple(sorted(plies, key=lambda row: (row.match_id, row.ply))),
        tuple(sorted(attempts, key=lambda row: (row.match_id, row.ply))),
        tuple(row for row in rows if isinstance(row, SampleRow)),
        tuple(sorted((row for row in rows if isinstance(row, EventRow)), key=lambda row: row.at)),
        tuple(kept[key] for key in sorted(kept)),
    )
