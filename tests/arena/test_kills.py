"""Whole runs, killed at 50 random moments: nothing that was committed is lost, nothing is doubled,
and what they end with is what a run that nobody disturbed ends with, bit for bit."""

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chess.pgn
import pytest

from arena import cli, replay
from arena.report import build
from arena.store import AttemptRow, MatchRow, Records, Row, Store, open_read_only, read

NUM_KILLS = 50
LIMIT_S = 30.0
SIGNALS = (signal.SIGKILL,) * 4 + (signal.SIGTERM, signal.SIGINT)

CONFIG = """
name = "kills"
seed = {seed}
[engines.main]
kind = "scripted"
max_concurrent = 4
latency_seconds = [0.001, 0.01]
faults = [
    {{kind = "garbage", probability = 0.15}},
    {{kind = "illegal", probability = 0.1}},
    {{kind = "overload", probability = 0.05}},
]
replies = ["MOVE: e2e4", "MOVE: e7e5", "MOVE: g1f3", "MOVE: b10c8", "MOVE: a4a5", "MOVE: a7a6"]
{agents}
[tournament]
games = ["chess", "janggi"]
parallel_matches = 4
max_plies = 12
{tournament}
[pace]
move_period_seconds = 0
[faults]
agent_attempts = 4
{more}
"""

AGENTS = {
    "free": 'kind = "llm"\nengine = "main"\nmode = "free"',
    "constrained": 'kind = "llm"\nengine = "main"',
    "random": 'kind = "random"',
    "greedy": 'kind = "greedy"',
}

FISCHER = """
[clock]
kind = "fischer"
base_seconds = 300
increment_seconds = 1
"""

SPRT = """
[sprt]
elo0 = -400
elo1 = 0
alpha = 0.2
beta = 0.2
max_pairs = 12
"""

NURSERY = """
import os, sys, traceback
from arena import cli, commands  # imported once, inherited by every process of a run

for line in sys.stdin:
    output, *arguments = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if child == 0:
        end = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for number, to in ((0, null), (1, end), (2, end)):
            os.dup2(to, number)
        code = 99
        try:
            code = cli.main(arguments)
        except KeyboardInterrupt:  # before there is a command to end
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""
"""Starts a process of a run a line, without importing the arena anew each time."""


class Nursery:
    """Processes of runs, one at a time."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, *arguments: object) -> int:
        """The id of a process that does `arena ARGUMENTS`."""
        assert self._process.stdin is not None
        line = "\t".join(map(str, (self.output, *arguments)))
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return int(self._line())

    def ended(self) -> int:
        """The exit code of the process started last, once it has ended; minus a signal."""
        return int(self._line())

    def close(self) -> None:
        self._process.communicate(timeout=LIMIT_S)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the nursery ended"
        return line


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery") / "output.txt")
    yield nursery
    nursery.close()


@dataclass(frozen=True, slots=True)
class Moment:
    """When a process is killed: so long after so many plies have been added since its start."""

    plies: int
    seconds: float


def moments(dice: random.Random) -> Moment:
    """While it starts or takes a run up, while it plays, or near the end."""
    kind = dice.choice(("start", "play", "play", "end"))
    if kind == "start":
        return Moment(0, dice.uniform(0.0, 0.6))
    if kind == "play":
        return Moment(dice.randint(1, 60), dice.uniform(0.0, 0.05))
    return Moment(dice.randint(100, 250), dice.uniform(0.0, 0.3))


def held_in(folder: Path) -> Records | None:
    """What a reader sees; None before the database stands in its place."""
    return read(folder) if (folder / "run.db").exists() else None


def wait_for(folder: Path, moment: Moment, pid: int) -> None:
    """Until the moment, or the end of the process that was to be killed then."""
    wanted = moment.plies + num_plies(folder)[0]
    limit = time.monotonic() + LIMIT_S
    while moment.plies and not is_over(pid):
        plies, unfinished = num_plies(folder)
        if plies >= wanted or unfinished == 0:  # its records are being written
            break
        assert time.monotonic() < limit
        time.sleep(0.01)
    time.sleep(moment.seconds)


def num_plies(folder: Path) -> tuple[int, int | None]:
    """Plies that are committed, and matches that are not over."""
    if not (folder / "run.db").exists():
        return 0, None
    with closing(open_read_only(folder / "run.db")) as db:
        (plies,) = db.execute("SELECT count(*) FROM plies").fetchone()
        (left,) = db.execute("SELECT count(*) FROM matches WHERE state != 'finished'").fetchone()
    return plies, left


def is_over(pid: int) -> bool:
    """Also of a process that has ended and was not waited for, or was."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except OSError:
        return True


def result_of(records: Records) -> dict[str, Any]:
    """What a run comes to, without times."""
    report = json.loads(json.dumps(build(records)))
    told: dict[str, Any] = {
        key: report[key] for key in ("results", "pairings", "standings", "ratings", "matches")
    }
    told["moves"] = [(ply.match_id, ply.ply, ply.move, ply.fen_after) for ply in records.plies]
    told["tries"] = [
        (row.match_id, row.ply, row.n, row.fault, row.reply_text)
        for row in records.attempts
        if row.fault != "overloaded"
    ]
    return told


def check_records(folder: Path, records: Records) -> None:
    """The games in the files are the matches in the store."""
    with io.StringIO((folder / "games.pgn").read_text()) as file:
        games = list(iter(lambda: chess.pgn.read_game(file), None))
    begun = {row.id for row in records.matches if row.state != "scheduled"}
    of_chess = {row.id for row in records.matches if row.game == "chess"}
    told = Counter(game.headers["MatchId"] for game in games if game is not None)
    assert told == Counter(begun & of_chess)
    text = (folder / "games-janggi.txt").read_text()
    assert Counter(re.findall(r'^\[MatchId "(.+)"\]$', text, re.MULTILINE)) == Counter(
        begun - of_chess
    )


def check_pairs(records: Records, planned: Records) -> None:
    """Matches, pairs and their openings are some of those that an undisturbed run has."""

    def plan(held: Records) -> list[tuple[object, ...]]:
        return [
            (row.number, row.id, row.pair_id, row.agents, row.opening, row.start_fen)
            for row in held.matches
        ]

    assert set(plan(records)) <= set(plan(planned))
    assert set(Counter(row.pair_id for row in records.matches).values()) == {2}


def killed_run(
    nursery: Nursery, config: Path, folder: Path, dice: random.Random, most: int, calm: Records
) -> list[int]:
    """Play a run, killing each of its processes until `most` were; the signals that ended one."""
    used: list[int] = []
    arguments: tuple[object, ...] = ("run", config, "--out", folder)
    seen: Records | None = None
    while True:
        pid = nursery.start(*arguments, "--view", "none")
        number = None
        if len(used) < most:
            number = dice.choice(SIGNALS)
            wait_for(folder, moments(dice), pid)
            before = held_in(folder)
            seen = before or seen
            if not is_over(pid):
                os.kill(pid, number)
        code = nursery.ended()
        held = held_in(folder)
        if held is not None:
            check_pairs(held, calm)
            if seen is not None:
                assert set(seen.plies) <= set(held.plies)
                assert set(seen.attempts) <= set(held.attempts)
            arguments = ("resume", folder)
        elif number is not None:
            arguments = ("run", config, "--out", folder)
        if code == 0:
            return used
        assert number is not None, nursery.output.read_text()[-2000:]
        assert code in (-number, 130), nursery.output.read_text()[-2000:]
        used.append(number)


@dataclass(frozen=True, slots=True)
class Case:
    """A tournament that is killed."""

    agents: tuple[str, ...] = tuple(AGENTS)
    tournament: str = ""
    more: str = ""

    def config(self, seed: int) -> str:
        tables = (f'[[agents]]\nname = "{name}"\n{AGENTS[name]}' for name in self.agents)
        return CONFIG.format(
            seed=seed, agents="\n".join(tables), tournament=self.tournament, more=self.more
        )


CASES = {
    "round robin": Case(),
    "fischer": Case(more=FISCHER),
    "swiss": Case(tournament='format = "swiss"\nrounds = 3'),
    "knockout": Case(tournament='format = "knockout"\nsudden_death_pairs = 1'),
    "sprt": Case(("constrained", "greedy"), 'format = "sprt"', SPRT),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CASES)
def test_a_run_killed_at_random_moments_ends_as_one_that_was_not(
    tmp_path: Path, nursery: Nursery, name: str
) -> None:
    dice = random.Random(f"kills/{name}")
    config, calm_folder = tmp_path / "t.toml", tmp_path / "calm"
    config.write_text(CASES[name].config(seed=5))
    nursery.start("run", config, "--out", calm_folder, "--view", "none")
    assert nursery.ended() == 0, nursery.output.read_text()
    calm = read(calm_folder)
    check_records(calm_folder, calm)
    assert {row.termination for row in calm.matches} >= {"ply_cap"}
    kills: list[int] = []
    while len(kills) < NUM_KILLS // len(CASES):
        folder = Path(tempfile.mkdtemp(dir=tmp_path)) / "run"
        left = NUM_KILLS // len(CASES) - len(kills)
        kills += killed_run(nursery, config, folder, dice, left, calm)
        records = read(folder)
        assert result_of(records) == result_of(calm)
        assert replay.build(records)["differences"] == []
        check_records(folder, records)


def test_what_lost_a_game_is_committed_with_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed between the two would ask a player again who has lost."""
    batches: list[tuple[Row, ...]] = []
    hand_over = Store._hand_over

    def noted(store: Store, rows: Sequence[Row], waiter: Any) -> None:
        batches.append(tuple(rows))
        hand_over(store, rows, waiter)

    monkeypatch.setattr(Store, "_hand_over", noted)
    config, folder = tmp_path / "t.toml", tmp_path / "run"
    config.write_text(Case().config(seed=5))
    assert cli.main(["run", str(config), "--out", str(folder), "--view", "none"]) == 0
    lost = {row.id for row in read(folder).matches if row.termination == "forfeit"}
    ends = {row.id: batch for batch in batches for row in batch if isinstance(row, MatchRow)}
    assert lost
    for match in lost:
        tries = [row.fault for row in ends[match] if isinstance(row, AttemptRow)]
        assert len([fault for fault in tries if fault != "overloaded"]) >= 1
    with_tries = {
        row.match_id
        for batch in batches
        for row in batch
        if isinstance(row, AttemptRow) and row.n == 3 and row.fault is not None
    }
    assert with_tries <= lost
