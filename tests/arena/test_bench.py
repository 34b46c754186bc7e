"""The benches run through the product's own path and print what was promised of them."""

import json

import pytest

from arena import bench, cli

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert cli.main(["bench", *arguments, "--json"]) == 0
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def test_games(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "NUM_GAMES", 2)
    games = printed(capsys, "games")["games"]
    assert isinstance(games, dict)
    assert games.keys() == {"chess", "janggi"}
    for figures in games.values():
        assert 0 < figures["legal_moves_us"] < 10_000
        assert 0 < figures["play_us"] < 10_000


def test_overhead(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "GAMES", ("janggi",))
    result = printed(capsys, "overhead")
    games = result["games"]
    assert isinstance(games, dict)
    assert games["janggi"]["plies"] > 5000
    assert games["janggi"]["plies_per_s"] > 0
    assert games["janggi"]["cpu_ms_per_ply"] > 0


def test_pace(capsys: pytest.CaptureFixture[str]) -> None:
    cells = printed(capsys, "pace", "--seats", "20", "--seconds", "4")["cells"]
    assert isinstance(cells, list)
    (cell,) = cells
    assert cell["seats"] == 20
    assert 0.5 < cell["pace_attainment"] < 1.5
    for name in ("schedule_lag_ms", "harness_ms", "loop_lag_ms"):
        assert cell[name].keys() == {"mean", "p50", "p95", "p99", "max"}


@pytest.mark.parametrize("seats", ["3", "0"])
def test_seats_come_in_pairs(capsys: pytest.CaptureFixture[str], seats: str) -> None:
    assert cli.main(["bench", "pace", "--seats", seats]) == 2
    assert "give even numbers" in capsys.readouterr().err
