"""A tournament of models, baselines and chess engines: it ends, and ranks the anchors."""

import os
import tomllib
from pathlib import Path

import pytest
import tomli_w

from arena.report import build
from arena.store import read
from serving import find_program
from tests.arena.test_run import arena

MIXED = Path(__file__).parents[2] / "configs/mixed.toml"


def the_config(folder: Path, engine: str) -> Path:
    """configs/mixed.toml at once and short, on another engine."""
    config = tomllib.loads(MIXED.read_text(encoding="utf-8"))
    config["engines"]["main"]["kind"] = engine
    for agent in config["agents"]:
        if agent["kind"] == "uci":
            # nodes enough to beat the weak one, few enough for a test
            agent["nodes"] = {20_000: 2000, 2000: 300}[agent["nodes"]]
    folder.mkdir(exist_ok=True)
    path = folder / "mixed.toml"
    path.write_text(tomli_w.dumps(config), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_mixed_tournament_of_both_games_ranks_the_anchors(tmp_path: Path) -> None:
    missing = [name for name in ("stockfish", "fairy-stockfish") if find_program(name) is None]
    if missing and os.environ.get("CI") == "true":
        pytest.fail(f"install {missing}")
    if missing:
        pytest.skip(f"no {missing} here (apt-get install stockfish fairy-stockfish)")
    config = the_config(tmp_path, "scripted")
    assert arena("run", config, "--out", tmp_path / "run", "--view", "none") == 0
    report = build(read(tmp_path / "run"))
    assert report["matches"] == {"scheduled": 0, "running": 0, "suspended": 0, "finished": 72}
    elo = {(row["game"], row["name"]): row["elo"] for row in report["standings"]}
    for game in ("chess", "janggi"):
        assert elo[game, "fairy"] > elo[game, "fairy-weak"] > elo[game, "random"]
    assert elo["chess", "stockfish"] > elo["chess", "fairy-weak"]
    assert ("janggi", "stockfish") not in elo
    assert report["infrastructure_faults"] == {}
