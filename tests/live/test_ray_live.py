"""Replicas on real Ray: deaths of every part, and what each costs. Runs are driven by the command
line and by signals, and hold the same dice as one on the engine alone that nobody disturbed."""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from arena.store import Records
from serving.process import group_members
from tests.live.ray_cluster import LOOPBACK, RayCluster
from tests.live.runs import Run

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed (ray extra)"
    ),
]

SCRIPTED = """
kind = "scripted"
latency_seconds = 0.1
max_concurrent = 16
"""

CONFIG = """
name = "replicas"
seed = 11
[engines.main]
{engine}
[[agents]]
name = "one"
kind = "llm"
engine = "main"
[[agents]]
name = "two"
kind = "llm"
engine = "main"
temperature = 0.5
[tournament]
games = ["chess", "janggi"]
pairs = {pairs}
parallel_matches = 12
max_plies = {max_plies}
[pace]
move_period_seconds = 0.0
[faults]
stall_seconds = 5.0
"""

NUM_KILLS = 20


def ray_engine(address: str, replicas: int, lease_seconds: float = 20.0) -> str:
    return f"""
kind = "ray"
address = "{address}"
replicas = {replicas}
lease_seconds = {lease_seconds}
[engines.main.engine]
{SCRIPTED}
"""


def make(folder: Path, engine: str, *, pairs: int = 3, max_plies: int = 60) -> Run:
    folder.mkdir()
    config = folder / "replicas.toml"
    config.write_text(CONFIG.format(engine=engine, pairs=pairs, max_plies=max_plies))
    return Run(folder / "run", config, LOOPBACK)


def replicas_in(session: int) -> list[psutil.Process]:
    """Replicas that are up or coming up."""
    found = []
    for pid in group_members(session):
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if "ServeReplica" in " ".join(process.cmdline()):
                found.append(process)
    return found


def games_of(held: Records) -> dict[str, tuple[object, ...]]:
    """Of every match its moves and its result."""
    moves: dict[str, list[str]] = {}
    for ply in held.plies:
        moves.setdefault(ply.match_id, []).append(ply.move)
    return {
        row.id: (row.state, row.winner, row.termination, *moves[row.id]) for row in held.matches
    }


def homes_of(held: Records) -> dict[str, list[str]]:
    """Of every match the replicas that answered it, one after another."""
    homes: dict[str, list[str]] = {}
    for attempt in sorted(held.attempts, key=lambda attempt: attempt.submitted or 0.0):
        if attempt.replica is not None:
            known = homes.setdefault(attempt.match_id, [])
            if known[-1:] != [attempt.replica]:
                known.append(attempt.replica)
    return homes


def assert_undisturbed(run: Run, calm: Records) -> None:
    """As if nothing had happened: the same moves and results, and nobody was charged."""
    assert games_of(run.records()) == games_of(calm)
    faults = {attempt.fault for attempt in run.records().attempts if attempt.fault}
    assert faults <= {"engine_dead", "stalled", "transport", "overloaded", "cancelled"}


def hit_rate(held: Records, last: int) -> float:
    """Of the last so many answers, by the replicas' own count."""
    answered = sorted((a for a in held.attempts if a.done is not None), key=lambda a: a.done or 0)
    known = [(a.prompt_tokens or 0, a.cached_tokens or 0) for a in answered[-last:]]
    prompts, cached = map(sum, zip(*known, strict=True))
    return cached / prompts


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Records]:
    """Records of a run on one engine without Ray, by pairs and plies."""
    made: dict[tuple[int, int], Records] = {}

    def records(pairs: int, max_plies: int) -> Records:
        if (pairs, max_plies) not in made:
            folder = tmp_path_factory.mktemp("calm") / "one"
            quick = SCRIPTED.replace("0.1", "0.0")
            run = make(folder, quick, pairs=pairs, max_plies=max_plies)
            run.start()
            code, said = run.ended()
            assert code == 0, said
            made[pairs, max_plies] = run.records()
        return made[pairs, max_plies]

    return records


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster(3) as started:
        yield started


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def start(engine: str, **sizes: int) -> Run:
        made.append(make(tmp_path / f"run-{len(made)}", engine, **sizes))
        return made[-1]

    yield start
    for run in made:
        run.kill()


def test_a_replica_killed_and_one_frozen(
    make_run: Callable[..., Run], calm: Callable[[int, int], Records]
) -> None:
    run = make_run(ray_engine("local", 3))
    run.start()
    run.until_plies(100)
    session = run.engine_group()
    killed, frozen, *_ = replicas_in(session)
    killed.kill()
    run.until("it to be missed", lambda: bool(run.events("match_suspended")))
    run.until_plies(100)
    frozen.send_signal(signal.SIGSTOP)
    code, said = run.ended()
    assert code == 0, said
    assert_undisturbed(run, calm(3, 60))
    assert group_members(session) == []
    homes = homes_of(run.records())
    assert len({home for visited in homes.values() for home in visited}) >= 4
    stayed = [visited for visited in homes.values() if len(visited) == 1]
    assert stayed, "matches of the third replica have no reason to move"
    assert hit_rate(run.records(), 200) > 0.9


def test_kill_9_of_the_host_and_then_of_the_arena(
    make_run: Callable[..., Run], calm: Callable[[int, int], Records]
) -> None:
    run = make_run(ray_engine("local", 2))
    run.start()
    run.until_plies(50)
    first = run.engine_group()
    os.kill(first, signal.SIGKILL)
    run.until_plies(50)
    assert run.engine_group() != first
    assert group_members(first) == []
    second = run.engine_group()
    run.kill()
    limit = time.monotonic() + 10
    while group_members(second) and time.monotonic() < limit:
        time.sleep(0.1)
    assert group_members(second) == []
    run.resume()
    code, said = run.ended()
    assert code == 0, said
    assert_undisturbed(run, calm(3, 60))


def test_twenty_replicas_or_nodes_killed_at_random(
    cluster: RayCluster, make_run: Callable[..., Run], calm: Callable[[int, int], Records]
) -> None:
    run = make_run(ray_engine(cluster.address, 3), pairs=12, max_plies=100)
    run.start()
    run.until_plies(50)
    dice = random.Random(20)
    for _ in range(NUM_KILLS):
        if dice.random() < 0.25:
            cluster.tell("remove")
            cluster.tell("add")
        else:
            run.until("a replica to kill", lambda: bool(replicas_in(cluster.session)))
            dice.choice(replicas_in(cluster.session)).kill()
        run.until_plies(dice.randrange(20, 150))
    code, said = run.ended()
    assert code == 0, said
    assert_undisturbed(run, calm(12, 100))


def test_an_arena_killed_leaves_its_replicas_to_the_next_or_to_nobody(
    cluster: RayCluster, make_run: Callable[..., Run], calm: Callable[[int, int], Records]
) -> None:
    run = make_run(ray_engine(cluster.address, 2))
    run.start()
    run.until_plies(50)
    before = {process.pid for process in replicas_in(cluster.session)}
    run.kill()
    run.resume()
    run.until_plies(50)
    assert {process.pid for process in replicas_in(cluster.session)} == before
    run.kill()
    limit = time.monotonic() + 60
    while replicas_in(cluster.session):
        assert time.monotonic() < limit, "replicas outlive their lease"
        time.sleep(0.5)
    run.resume()
    code, said = run.ended()
    assert code == 0, said
    assert_undisturbed(run, calm(3, 60))
    assert not replicas_in(cluster.session)


def test_replicas_are_taken_over_though_one_has_no_node_to_come_back_to(
    cluster: RayCluster, make_run: Callable[..., Run], calm: Callable[[int, int], Records]
) -> None:
    engine = ray_engine(cluster.address, 3).replace("replicas", "cpus_per_replica = 2\nreplicas")
    run = make_run(engine, pairs=12, max_plies=100)
    run.start()
    run.until_plies(50)
    cluster.tell("remove")
    run.until("its replica to end", lambda: len(replicas_in(cluster.session)) == 2)
    run.until_plies(50)
    before = {process.pid for process in replicas_in(cluster.session)}
    assert len(before) == 2
    run.kill()
    run.resume()
    run.until_plies(50)
    assert {process.pid for process in replicas_in(cluster.session)} == before
    cluster.tell("add")
    code, said = run.ended()
    assert code == 0, said
    assert_undisturbed(run, calm(12, 100))


def test_a_cluster_that_the_arena_does_not_belong_to(
    cluster: RayCluster, make_run: Callable[..., Run], calm: Callable[[int, int], Records]
) -> None:
    run = make_run(ray_engine(cluster.client_address, 2))
    run.start()
    run.until_plies(50)
    replicas_in(cluster.session)[0].kill()
    code, said = run.ended()
    assert code == 0, said
    assert_undisturbed(run, calm(3, 60))
    assert not replicas_in(cluster.session)


APPLICATIONS = """
import sys, time
import ray
from ray import serve
ray.init(sys.argv[1], log_to_driver=False)
limit = time.monotonic() + 60
while serve.status().applications and time.monotonic() < limit:
    time.sleep(0.5)
print({name: str(one.status) for name, one in serve.status().applications.items()})
"""


def test_replicas_that_no_machine_can_hold_are_told_and_not_left_waiting(
    cluster: RayCluster, make_run: Callable[..., Run]
) -> None:
    knobs = "\ngpus_per_replica = 3.0\nstart_seconds = 25.0\n[engines.main.engine]"
    engine = ray_engine(cluster.address, 2).replace("[engines.main.engine]", knobs)
    run = make_run(engine)
    run.start()
    code, said = run.ended()
    assert code == 3
    assert "waiting for 2 replicas, which ask for 1 processors and 3 GPUs each" in said
    assert "0 of 0 GPUs free" in said
    asked = subprocess.run(
        [sys.executable, "-c", APPLICATIONS, cluster.address],
        capture_output=True,
        text=True,
        env={**os.environ, **LOOPBACK},
        timeout=120,
        check=True,
    )
    assert asked.stdout.splitlines()[-1] == "{}"


def test_a_head_that_dies_with_its_cluster_and_comes_back(
    cluster: RayCluster, make_run: Callable[..., Run], calm: Callable[[int, int], Records]
) -> None:
    run = make_run(ray_engine(cluster.address, 2))
    run.start()
    run.until_plies(50)
    cluster.tell("restart")
    code, said = run.ended()
    assert code == 0, said
    assert_undisturbed(run, calm(3, 60))


DELETE = """
import sys
from ray import serve
from serving.ray_cluster import join
join(sys.argv[1])
for app in serve.status().applications:
    serve.delete(app)
"""


def test_a_replica_frozen_beyond_its_lease_and_all_deleted_by_somebody(
    cluster: RayCluster, make_run: Callable[..., Run], calm: Callable[[int, int], Records]
) -> None:
    run = make_run(ray_engine(cluster.address, 2, lease_seconds=5.0), pairs=12, max_plies=100)
    run.start()
    run.until_plies(50)
    host = run.engine_group()
    before = {process.pid for process in replicas_in(cluster.session)}
    frozen, *_ = replicas_in(cluster.session)
    frozen.suspend()
    run.until("it to be missed", lambda: bool(run.events("match_suspended")))
    time.sleep(2.0)
    frozen.resume()
    run.until_plies(100)
    assert {process.pid for process in replicas_in(cluster.session)} == before
    assert run.engine_group() == host
    arguments = [sys.executable, "-c", DELETE, cluster.address]
    subprocess.run(arguments, check=True, timeout=120, env={**os.environ, **LOOPBACK})
    code, said = run.ended()
    assert code == 0, said
    assert run.events("engine_restarted")
    assert_undisturbed(run, calm(12, 100))
