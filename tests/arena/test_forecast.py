"""`arena bench forecast`: cells that calibrate, cells that are held out, and how far off it is."""

import json
from pathlib import Path

import pytest

from arena import forecast
from arena.compare_figures import Measurement
from serving.batching import Server
from serving.step_time import StepTime
from tests.arena.stepping_engine import OUTPUT, TIME, UNCACHED
from tests.arena.test_run import arena

CONFIG = """
name = "forecast"
seed = 3
[engines.main]
kind = "tests.arena.stepping_engine:SteppingEngine"
max_concurrent = 8
[engines.scripted]
kind = "scripted"
latency_seconds = 0.01
max_concurrent = 8
[engines.silent]
kind = "tests.examples.own_engine:DiceEngine"
max_concurrent = 8
[engines.narrow]
kind = "scripted"
max_concurrent = 2
[[agents]]
name = "one"
kind = "llm"
engine = "main"
[[agents]]
name = "two"
kind = "llm"
engine = "main"
[tournament]
games = ["chess"]
pairs = 4
parallel_matches = 8
max_plies = 40
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "f.toml"
    path.write_text(CONFIG)
    return path


def test_an_engine_is_forecast_from_two_loads_at_others(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--engine", "main", "--seconds", 1, "--rounds", 1, "--json")
    code = arena("bench", "forecast", config, *asked)
    result = json.loads(capsys.readouterr().out)
    assert (result["schema_version"], result["rounds"]) == (1, 1)
    seen = result["calibrated_on"]
    assert seen["cells"] == ["closed 1", "closed 8"]
    assert (seen["uncached_tokens"], seen["output_tokens"]) == (UNCACHED, OUTPUT)
    # a step is a sleep, which is never too short
    step = seen["step"]
    four = step["base_ms"] + 4 * (step["per_token_us"] + step["per_request_us"]) / 1000
    assert four >= TIME.seconds(4, 4) * 1000 * 0.9
    assert [cell["cell"] for cell in result["cells"]] == ["closed 2", "closed 4", "open"]
    for cell in result["cells"]:
        assert len(cell["rounds"]) == 1
        assert cell["answers"] > 0
        assert min(*cell["predicted"].values(), *cell["measured"].values()) > 0
        for key, error in cell["error"].items():
            assert error == pytest.approx(cell["predicted"][key] / cell["measured"][key] - 1)
        assert cell["is_within"] is all(abs(error) <= 0.3 for error in cell["error"].values())
    assert code == (0 if all(cell["is_within"] for cell in result["cells"]) else 1)


@pytest.mark.parametrize("seconds", [1.0, 4.0, 20.0])
@pytest.mark.parametrize("clients", [1, 4])
def test_a_forecast_counts_as_the_measurement_does(seconds: float, clients: int) -> None:
    """Whatever part of an answer's time a window is."""
    server = Server(8, StepTime(base_s=0.1, per_token_s=0.0, per_request_s=0.0))
    seen = forecast._Seen([], ((10, 5),), overhead_s=0.01)
    cell = forecast._Cell("closed", clients, [Measurement(0.0, seconds, (), {})])
    told = forecast._forecast(cell, seen, server, seconds)
    assert told.moves_per_s == pytest.approx(clients / 0.51)
    assert told.p95_s == pytest.approx(0.51)


def test_an_engine_that_tells_no_steps_is_not_forecast(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--engine", "silent", "--seconds", 1, "--rounds", 1)
    assert arena("bench", "forecast", config, *asked) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert "arena: the engine does not tell each step" in said.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--engine", "other"), "--engine other: no engine is named so; engines: main, scripted"),
        (("--engine", "scripted"), "--engine scripted: scripted does not tell each step; name one"),
        (("--engine", "main", "--seconds", "nan"), "--seconds: give 1 to 600"),
        (("--engine", "main", "--rounds", 0), "--rounds: give 1 to 100"),
        (("--engine", "narrow"), "engines.narrow.max_concurrent: 2 leave no room"),
        (("--engine", "main", "--set", "tournament.pairs=2"), "8 questions at once need as many"),
    ],
)
def test_bad_input_is_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], told: str
) -> None:
    assert arena("bench", "forecast", config, *arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("arena: ")
    assert told in line
