"""`arena bench shape` as a person uses it, on engines with no model: no timing is asserted."""

import json
import re
from pathlib import Path

import pytest

from arena.shapes import SHAPES
from serving import Reply, Request, RequestRejected
from tests.arena.test_run import arena
from tests.examples.own_engine import DiceEngine

CONFIG = """
name = "shapes"
seed = 3
[engines.first]
kind = "scripted"
latency_seconds = 0.002
max_concurrent = 4
[engines.own]
kind = "tests.arena.test_shape_bench:PlainEngine"
max_concurrent = 4
[engines.restarting]
kind = "tests.arena.test_shape_bench:RestartingEngine"
max_concurrent = 4
[engines.dying]
kind = "tests.arena.doomed_engines:DoomedEngine"
lives = 40
max_concurrent = 4
[engines.full]
kind = "scripted"
max_concurrent = 4
[[engines.full.faults]]
kind = "overload"
probability = 1.0
[[agents]]
name = "a"
kind = "llm"
engine = "first"
[[agents]]
name = "b"
kind = "llm"
engine = "first"
[tournament]
games = ["chess", "janggi"]
pairs = 1
parallel_matches = 2
max_plies = 24
"""
SHORT = ("--streams", 3, "--seconds", 1)
CELLS = [
    *((name, 3, "continuous") for name in SHAPES),
    *((name, 3, "waves") for name in ("default", "mixed")),
    *((name, 1, "continuous") for name in ("default", "A")),
]


class PlainEngine(DiceEngine):
    """Cannot be told a least length, and has no cache to be emptied."""

    async def generate(self, request: Request) -> Reply:
        if request.sampling.min_tokens:
            raise RequestRejected("min_tokens: no")
        return await super().generate(request)


class RestartingEngine(DiceEngine):
    """Is said to have been started again at every 20th question."""

    async def generate(self, request: Request) -> Reply:
        self.restarts = len(self.prompts) // 20
        return await super().generate(request)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "s.toml"
    path.write_text(CONFIG)
    return path


def test_every_cell_is_measured_in_every_repeat(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert arena("bench", "shape", config, *SHORT, "--repeats", 2, "--json") == 0
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert (result["schema_version"], result["streams"], result["repeats"]) == (1, 3, 2)
    assert result["engine"]["name"] == "first"
    # its matches are short and it writes what it likes
    assert [note.partition(",")[0].partition(" cells")[0] for note in result["notes"]] == [
        "13 of 13",
        "A",
        "B",
        "A",
    ]
    rows = {(row["shape"], row["streams"], row["submission"]): row for row in result["cells"]}
    assert list(rows) == CELLS
    for row in rows.values():
        assert len(row["moves_per_s"]) == 2
        assert min(row["moves_per_s"]) > 0
        assert row["errors"] == {}
        assert row["p95_ms"] >= row["p50_ms"] > 0
    uncached = {name: rows[name, 3, "continuous"]["uncached"] for name in SHAPES}
    # as the engine's model of a prefix cache has it
    assert uncached["A"] == rows["A", 3, "continuous"]["prompt_tokens"]
    assert uncached["A"] > uncached["D"] > uncached["E"] > uncached["default"]
    # cells of the first repeat, then of the second, each in an order of its own
    told = re.findall(r"^repeat (\d) of 2, (.*): [\d.]+ moves/s$", said.err, re.M)
    assert [repeat for repeat, _ in told] == ["1"] * 13 + ["2"] * 13
    one, other = [name for _, name in told[:13]], [name for _, name in told[13:]]
    assert sorted(one) == sorted(other)
    assert one != other

    # and it is what a plan takes for measured
    path = tmp_path / "bench.json"
    path.write_text(said.out)
    assert (
        arena("plan", config, "--engine", "first", "--memory", "8GiB", "--bench", path, "--json")
        == 0
    )
    compute = json.loads(capsys.readouterr().out)["compute"]
    assert compute["source"] == "measured"
    medians = [sum(row["moves_per_s"]) / 2 for key, row in rows.items() if key[0] == "default"]
    assert compute["requests_per_s"] == pytest.approx(max(medians))


def test_the_table_says_what_it_comes_to(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert arena("bench", "shape", config, *SHORT, "--repeats", 1, "--engine", "own") == 0
    shown = capsys.readouterr().out
    for shape in SHAPES.values():
        assert f"{shape.name}: {shape.about}" in shown
    assert re.search(r"^ A +3 +[\d,.]+ \([\d,.]+–[\d,.]+\) +1\.00 ", shown, re.M)
    assert re.search(r"^ default +3 in waves ", shown, re.M)
    assert re.search(r"^default, 3 streams: [\d.]+ × A, 3 streams \(", shown, re.M)
    assert "cannot be told a least length" in shown
    assert "the prefix cache was not emptied before each cell" in shown


def test_a_page_is_written(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "shapes.html"
    assert arena("bench", "shape", config, *SHORT, "--repeats", 1, "--html", page) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith(f"written: {page}\n")
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("dying", "arena: the power is off"),
        ("full", "arena: engine full: scripted overload"),
    ],
)
def test_an_engine_that_fails_ends_the_bench(
    config: Path, capsys: pytest.CaptureFixture[str], engine: str, told: str
) -> None:
    assert arena("bench", "shape", config, *SHORT, "--engine", engine) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[-1].startswith(told)


def test_repeats_before_an_engine_died_are_kept(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--engine", "dying", "--set", "engines.dying.lives=1500", "--repeats", 3, "--json")
    assert arena("bench", "shape", config, *SHORT, *asked) == 3
    result = json.loads(capsys.readouterr().out)
    assert result["repeats"] == 1
    assert {len(row["moves_per_s"]) for row in result["cells"]} == {1}
    assert result["notes"][0] == "ended after 1 of 3 repeats: the power is off"


def test_a_cell_in_which_the_engine_died_is_no_figure(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--engine", "restarting")
    assert arena("bench", "shape", config, *SHORT, *asked) == 3
    assert "the engine died or stalled, and was started again" in capsys.readouterr().err


def test_a_cell_without_an_answer_ends_the_bench(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # all questions after what warms up
    faults = 'engines.first.faults=[{kind="garbage", probability=1.0}]'
    assert arena("bench", "shape", config, *SHORT, "--set", faults) == 3
    assert "no question was answered (constraint_ignored)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--engine", "other"), "--engine other: no engine is named so; engines: first, own"),
        (("--seconds", "nan"), "--seconds: give 1 to 600"),
        (("--repeats", 0), "--repeats: give 1 to 20"),
        (("--streams", 1), "--streams: is 1; give 2 to 4, which is engines.first.max_concurrent"),
        (("--streams", 5), "--streams: is 5; give 2 to 4"),
        (
            ("--streams", 4, "--set", "tournament.games=['chess']"),
            "4 questions at once need as many matches, and the config has 2",
        ),
        (
            ("--streams", 4, "--set", "engines.first.context_tokens=700"),
            "engines.first.context_tokens: is 700, and a question of shape A takes",
        ),
    ],
)
def test_bad_input_is_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], told: str
) -> None:
    assert arena("bench", "shape", config, *arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("arena: ")
    assert told in line


def test_there_must_be_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.toml"
    agents = "".join(f'[[agents]]\nname = "{name}"\nkind = "random"\n' for name in "ab")
    path.write_text(f'name = "none"\n{agents}')
    assert arena("bench", "shape", path) == 2
    assert "add [engines.main]" in capsys.readouterr().err
