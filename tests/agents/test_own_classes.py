"""The examples of a user's own game, agent and engine play a whole match together."""

from pathlib import Path

from agents import Agent, Seat, Turn, build_agent, parse_agent_config
from games import Result, load_game
from serving import ChatPrompt, build_engine, parse_engine_config
from tests.agents.fakes import OWN_GAME, context
from tests.examples.own_engine import DiceEngine

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "own-game-agent-engine.md"


async def play(agents: tuple[Agent, Agent]) -> tuple[Result, tuple[str, ...]]:
    game = load_game(OWN_GAME)
    position = game.position(game.openings("start", "standard")[0])
    while (result := position.result()) is None:
        seat = Seat("seat", position.side)
        turn = Turn("m1", OWN_GAME, position, seat, 3, None, 0.0)
        decision = await agents[position.side].choose(turn)
        assert decision.move is not None
        position = position.play(decision.move)
    return result, position.moves


async def test_own_game_agent_and_engine_play_a_match(tmp_path: Path) -> None:
    table = parse_engine_config("dice", {"kind": "own_engine:DiceEngine", "max_concurrent": 4})
    engine = build_engine("dice", table, log_dir=tmp_path, stall_seconds=30.0, restart_limit=0)
    assert engine.limits.max_concurrent == 4
    tables = (
        {
            "kind": "own_agent:FavouriteAgent",
            "name": "centre-first",
            "favourites": ["b2", "a1"],
            "engine": "dice",
        },
        {"kind": "llm", "name": "dice", "engine": "dice"},
    )
    told = context(games=((OWN_GAME, "standard"),))
    own, llm = (build_agent(parse_agent_config(t), {"dice": engine}, told) for t in tables)
    for opener in (engine, own, llm):
        await opener.open()
    result, moves = await play((own, llm))
    assert moves[0] == "b2"
    assert result.termination.value in ("checkmate", "stalemate")
    assert (result, moves) == await play((own, llm))
    for closer in (own, llm, engine):
        await closer.close()


async def test_the_own_engine_is_told_the_own_game() -> None:
    engine = DiceEngine({})
    agent = build_agent(
        parse_agent_config({"kind": "llm", "name": "x", "engine": "dice"}),
        {"dice": engine},
        context(),
    )
    await play((agent, agent))
    first, last = engine.prompts[0], engine.prompts[-1]
    assert isinstance(first, ChatPrompt)
    assert "noughts-and-crosses" in first.messages[0][1]
    assert first.messages[0] == last.messages[0]
    assert last.messages[1][1].startswith(first.messages[1][1])


def test_the_guide_shows_the_examples_as_they_are() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for kind in (OWN_GAME, "own_agent:FavouriteAgent", "own_engine:DiceEngine"):
        assert kind in text
