"""Stockfish and Fairy-Stockfish as players: they know our rules, and play the same twice."""

import asyncio
import os
import random

import pytest

from agents import AgentContext, Seat, Turn, UciConfig, build_agent, check_agent, parse_agent_config
from games import Position, load_game
from serving import find_program

RULES = (
    ("fairy-stockfish", "chess", "standard"),
    ("fairy-stockfish", "chess", "chess960"),
    ("fairy-stockfish", "janggi", "janggi"),
    ("fairy-stockfish", "janggi", "janggimodern"),
    ("fairy-stockfish", "janggi", "janggicasual"),
    ("fairy-stockfish", "janggi", "janggitraditional"),
    ("stockfish", "chess", "standard"),
    ("stockfish", "chess", "chess960"),
)


def engine(name: str, **values: object) -> UciConfig:
    """The engine's table; without its program the test is skipped, or fails where CI runs it."""
    if find_program(name) is None:
        reason = f"no {name} here: install it (apt-get install {name})"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    parsed = parse_agent_config({"kind": "uci", "name": name, "command": name, **values})
    assert isinstance(parsed, UciConfig)
    return parsed


async def play(config: UciConfig, game: str, ruleset: str, seed: int, plies: int) -> list[str]:
    """A game of the engine against itself with random moves between; all its moves are legal."""
    agent = build_agent(config, {}, AgentContext(seed, 60.0))
    await agent.open()
    try:
        found = load_game(game)
        starts = found.openings("builtin", ruleset)
        position: Position = found.position(starts[seed % len(starts)])
        dice = random.Random(seed)
        while position.result() is None and position.ply < plies:
            move = dice.choice(position.legal_moves())
            if dice.random() < 0.6:
                turn = Turn("m", game, position, Seat("x", position.side), 3, None, 0.0)
                decision = await agent.choose(turn)
                assert decision.fault is None, decision
                assert decision.move is not None
                assert decision.attempts[0].eval_cp is not None
                move = decision.move
            position = position.play(move)
        return list(position.moves)
    finally:
        await agent.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "game", "ruleset"), RULES)
def test_every_move_of_an_engine_is_legal_by_our_rules(name: str, game: str, ruleset: str) -> None:
    config = engine(name, nodes=200, processes=1)
    check_agent(config, [(game, ruleset)])

    async def at_once() -> list[list[str]]:
        return await asyncio.gather(*(play(config, game, ruleset, n, 160) for n in range(4)))

    games = asyncio.run(at_once())
    assert sum(map(len, games)) > 150


@pytest.mark.slow
@pytest.mark.parametrize(("name", "game"), [("fairy-stockfish", "janggi"), ("stockfish", "chess")])
def test_the_same_game_twice(name: str, game: str) -> None:
    config = engine(name, nodes=2000, processes=1)
    ruleset = load_game(game).rulesets[0]
    first, again = (asyncio.run(play(config, game, ruleset, 5, 30)) for _ in range(2))
    assert first == again


def test_stockfish_plays_no_janggi() -> None:
    config = engine("stockfish")
    with pytest.raises(ValueError, match=r"Stockfish \S+ does not play janggi; name another"):
        check_agent(config, [("janggi", "janggi")])
    with pytest.raises(ValueError, match="skill_level: is 30; write a whole number from 0 to 20"):
        check_agent(engine("stockfish", skill_level=30))
    check_agent(engine("stockfish", skill_level=3))
    check_agent(engine("stockfish", uci_elo=1500))
