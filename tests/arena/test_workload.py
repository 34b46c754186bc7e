"""A workload asks what a tournament asks, is the same in every process, and survives its file."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agents import Turn, build_agent
from agents.base import Seat
from arena import config as configs
from arena import preflight, schedule, workload
from arena.config import ConfigError, RunConfig
from arena.store import StoreError
from arena.workload import Workload
from games import load_game
from serving import Request
from tests.agents.fakes import ScriptEngine
from tests.arena.test_run import games, run

CONFIG: dict[str, Any] = {
    "name": "t",
    "seed": 3,
    "engines": {"main": {"kind": "scripted", "max_concurrent": 4}},
    "agents": [
        {"name": "one", "kind": "llm", "engine": "main", "persona": "Attack.\u2028Now."},
        {"name": "two", "kind": "llm", "engine": "main", "temperature": 0.5, "top_p": 0.9},
    ],
    "tournament": {
        "games": ["chess", "janggi"],
        "pairs": 2,
        "parallel_matches": 3,
        "max_plies": 12,
    },
}


def config(**changes: Any) -> RunConfig:
    return configs.parse({**CONFIG, **changes})


@pytest.fixture(scope="module")
def recorded() -> Workload:
    return workload.record(config())


def first_choice(request: Request) -> str:
    assert request.choices is not None
    return request.choices[0]


async def test_its_questions_are_those_of_the_agents(recorded: Workload) -> None:
    """Prompts, choices, token limits and dice, to the last token."""
    setup = config()
    specs = {spec.id: spec for spec in schedule.matches(setup)}
    engine = ScriptEngine([first_choice] * len(recorded.items))
    agents = {
        agent.name: build_agent(agent, {"main": engine}, preflight.agent_context(setup))
        for agent in setup.agents
    }
    for item in recorded.items:
        spec = specs[item.match_id]
        position = load_game(spec.game).position(spec.start)
        for move in item.parts.moves:
            position = position.play(move)
        seat = Seat(spec.agents[item.side], item.side)
        turn = Turn(spec.id, spec.game, position, seat, 1, None, 0.0)
        await agents[seat.agent].choose(turn)
        asked = engine.requests[-1]
        assert asked.prompt == engine.template.render(item.parts)
        assert (asked.choices, asked.max_tokens) == (item.choices, item.max_tokens)
        assert asked.sampling == item.sampling
        assert (position.ply, position.side) == (item.ply, item.side)


def test_every_match_is_there_to_its_end(recorded: Workload) -> None:
    setup = config()
    assert len(recorded.matches) == len(schedule.matches(setup)) == 8
    for match in recorded.matches:
        assert [item.ply for item in match] == list(range(12))
        for before, after in pairwise(match):
            assert after.parts.moves[:-1] == before.parts.moves
            assert after.parts.moves[-1] in before.choices


def test_a_part_of_it_has_as_much_of_each_game(recorded: Workload) -> None:
    by_id = {spec.id: spec.game for spec in schedule.matches(config())}
    played = [by_id[match[0].match_id] for match in recorded.matches]
    assert sorted(played[:2]) == sorted(played[6:]) == ["chess", "janggi"]


def test_seats_keep_the_pace(recorded: Workload) -> None:
    for match in recorded.matches:
        for before, after in pairwise(match):
            assert after.arrival_s >= before.arrival_s
        for seat in (match[::2], match[1::2]):
            gaps = [after.arrival_s - before.arrival_s for before, after in pairwise(seat)]
            assert min(gaps) >= 0.9 - 1e-6
            assert sum(gaps) / len(gaps) < 1.15
        assert match[1].arrival_s - match[0].arrival_s == pytest.approx(0.5, abs=1e-5)


def test_no_more_matches_are_played_at_once_than_the_tournament_plays(recorded: Workload) -> None:
    spans = [(match[0].arrival_s, match[-1].arrival_s) for match in recorded.matches]
    at_once = [sum(begun <= at <= ended for begun, ended in spans) for at, _ in spans]
    assert max(at_once) == recorded.parallel_matches == 3
    first = [begun for begun, _ in spans[:3]]
    assert all(0 <= begun <= 1 for begun in first)
    assert len(set(first)) == 3
    assert [item.arrival_s for item in recorded.items] == sorted(
        item.arrival_s for item in recorded.items
    )


def test_of_more_places_than_matches_only_as_many_are_used() -> None:
    wide = {**CONFIG["tournament"], "parallel_matches": 20}
    engines = {"main": {**CONFIG["engines"]["main"], "max_queued": 64}}
    made = workload.record(config(tournament=wide, engines=engines))
    assert made.parallel_matches == 8


def test_its_file_holds_all_of_it(recorded: Workload, tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    workload.save(path, recorded)
    read = workload.load(path)
    assert read == recorded
    assert read.digest == recorded.digest
    assert [file.name for file in tmp_path.iterdir()] == ["w.jsonl"]


def test_it_is_the_same_in_every_process(recorded: Workload, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    code = (
        "import json; from arena import config, workload; "
        "print(workload.record(config.parse(json.load(open('config.json')))).digest)"
    )
    for seed in ("1", "2"):
        root = Path(workload.__file__).parents[1]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            check=True,
        )
        assert done.stdout.strip() == recorded.digest


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 4},
        {"agents": [CONFIG["agents"][0], {**CONFIG["agents"][1], "temperature": 0.6}]},
        {"pace": {"move_period_seconds": 2.0}},
        {"prompts": {"chess": {"system": "Play."}}},
        {"openings": {"book": "start"}},
    ],
    ids=lambda changes: "".join(changes),
)
def test_what_is_asked_otherwise_has_another_digest(
    recorded: Workload, changes: dict[str, Any]
) -> None:
    assert workload.record(config(**changes)).digest != recorded.digest


def test_the_digest_tells_a_changed_question(recorded: Workload) -> None:
    last = recorded.items[-1]
    other = replace(last, choices=last.choices[1:])
    changed = replace(recorded, items=(*recorded.items[:-1], other))
    assert changed.digest != recorded.digest
    assert replace(recorded, source="elsewhere").digest == recorded.digest


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda lines: lines[:-1], "its digest does not fit"),
        (lambda lines: [*lines[:-1], lines[-1].replace("choices", "choises")], "is damaged"),
        (lambda lines: [*lines[:-1], lines[-1][:40]], "is damaged"),
        (lambda lines: [*lines[:5], *lines[6:], lines[5]], "its digest does not fit"),
        (lambda lines: lines[:1], "is damaged"),
        (
            lambda lines: [line.replace('_matches":3', '_matches":1e999') for line in lines],
            "is damaged",
        ),
        (lambda lines: [*lines[:-1], "[" * 200_000], "is damaged"),
        (lambda lines: ["[" * 200_000], "is no workload"),
        (lambda lines: [lines[0].replace(":1,", ":2,", 1), *lines[1:]], "has version 2"),
        (lambda lines: ["{}", *lines[1:]], "is no workload"),
        (lambda lines: ["name = 'a config'"], "is no workload"),
        (lambda lines: [], "is no workload"),
    ],
)
def test_a_damaged_file_is_one_line(
    recorded: Workload, tmp_path: Path, damage: Any, told: str
) -> None:
    path = tmp_path / "w.jsonl"
    workload.save(path, recorded)
    lines = path.read_text().splitlines()
    path.write_text("".join(f"{line}\n" for line in damage(lines)))
    with pytest.raises(ConfigError) as error:
        workload.load(path)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_text_or_not_there_is_one_line(
    recorded: Workload, tmp_path: Path
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is no workload"):
        workload.load(tmp_path / "binary")
    with pytest.raises(ConfigError, match="cannot be read"):
        workload.load(tmp_path / "missing.jsonl")
    with pytest.raises(StoreError, match="cannot be written"):
        workload.save(tmp_path / "missing" / "w.jsonl", recorded)


def test_a_pipe_is_no_workload(tmp_path: Path) -> None:
    """One that nobody writes to was waited for."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe: is no regular file"):
        workload.load(tmp_path / "pipe")


def test_a_run_is_asked_again_as_it_was_played(tmp_path: Path) -> None:
    records = run(tmp_path / "a", max_plies=6, period=0.01, agent="temperature = 0.25")
    made = workload.load(tmp_path / "a" / "run")
    assert made.source == f"run {records.run.id}"
    assert len(made.items) == len(records.plies)
    assert {item.sampling.temperature for item in made.items} == {0.25}
    for match in made.matches:
        moves = games(records)[match[0].match_id]
        assert [item.parts.moves for item in match] == [moves[:ply] for ply in range(len(moves))]
        assert all(move in item.choices for move, item in zip(moves, match, strict=True))
    tried = {row.request_id for row in records.attempts}
    assert {f"{item.match_id}/{item.ply}/0/0" for item in made.items} == tried


def test_only_what_a_language_model_was_asked_is_taken(tmp_path: Path) -> None:
    more = "[[agents]]\nname = 'dice'\nkind = 'random'"
    records = run(tmp_path / "a", max_plies=4, period=0.01, more=more)
    made = workload.load(tmp_path / "a" / "run")
    players = {row.id: row.agents for row in records.matches}
    asked = {(ply.match_id, ply.ply) for ply in records.plies}
    assert {(item.match_id, item.ply) for item in made.items} == {
        (match, ply) for match, ply in asked if players[match][ply % 2] != "dice"
    }


def test_a_folder_without_a_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no run"):
        workload.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pace": {"move_period_seconds": 0}}, "pace.move_period_seconds: is 0"),
        (
            {"agents": [{**agent, "mode": "free"} for agent in CONFIG["agents"]]},
            "agents: none is of kind",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        workload.record(config(**changes))
