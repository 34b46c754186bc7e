"""Players without a model."""

import pytest

from agents import GreedyAgent, RandomAgent
from games import load_game
from tests.agents.fakes import context, grid, turn


@pytest.mark.parametrize("kind", [RandomAgent, GreedyAgent])
async def test_the_same_seed_plays_the_same_game(kind: type[RandomAgent | GreedyAgent]) -> None:
    games = []
    for seed in (7, 7, 8, 9, 10):
        agent, position = kind(context(run_seed=seed)), grid()
        while position.result() is None:
            decision = await agent.choose(turn(position))
            assert decision.move in position.legal_moves()
            assert decision.attempts == ()
            position = position.play(decision.move)
        games.append(position.moves)
    assert games[0] == games[1]
    assert len(set(games)) > 2


async def test_random_plays_every_move_sometime() -> None:
    agent = RandomAgent(context())
    played = {(await agent.choose(turn(match_id=f"m{n}"))).move for n in range(200)}
    assert played == set(grid().legal_moves())


async def test_greedy_wins_at_once_where_it_can() -> None:
    position = grid("a1", "b1", "a2", "b2")
    for seed in range(10):
        assert (await GreedyAgent(context(run_seed=seed)).choose(turn(position))).move == "a3"


async def test_greedy_breaks_ties_by_dice() -> None:
    agent = GreedyAgent(context())
    played = {(await agent.choose(turn(match_id=f"m{n}"))).move for n in range(200)}
    assert played == set(grid().legal_moves())


async def test_greedy_takes_the_queen_in_chess() -> None:
    game = load_game("chess")
    position = game.position(game.openings("start", "standard")[0])
    for move in ("e2e4", "d7d5", "e4d5", "d8d5", "b1c3", "g8f6"):
        position = position.play(move)
    decision = await GreedyAgent(context()).choose(turn(position, game="chess"))
    assert decision.move == "c3d5"


async def test_greedy_mates_rather_than_takes() -> None:
    game = load_game("chess")
    position = game.position(game.openings("start", "standard")[0])
    for move in ("f2f3", "e7e5", "g2g4"):
        position = position.play(move)
    decision = await GreedyAgent(context()).choose(turn(position, game="chess"))
    assert decision.move == "d8h4"


async def test_greedy_does_not_pass_into_a_loss_on_points_in_janggi() -> None:
    game = load_game("janggi")
    start = game.openings("start", "janggi")[0]
    position = game.position(start).play("a4b4").play("pass")
    for seed in range(10):
        decision = await GreedyAgent(context(run_seed=seed)).choose(turn(position, game="janggi"))
        assert decision.move != "pass"


async def test_greedy_passes_into_a_win_on_points_in_janggi() -> None:
    game = load_game("janggi")
    position = game.position(game.openings("start", "janggi")[0]).play("pass")
    decision = await GreedyAgent(context()).choose(turn(position, game="janggi"))
    assert decision.move == "pass"
