"""The LLM agent at chess and janggi, from first move to last."""

from itertools import pairwise

import pytest

from agents import Fault, LlmAgent, LlmSettings
from games import Position, Start, load_game
from serving import Request
from tests.agents.fakes import CharTemplate, ScriptEngine, context, turn

GAMES = [("chess", ruleset) for ruleset in load_game("chess").rulesets]
GAMES += [("janggi", ruleset) for ruleset in load_game("janggi").rulesets]


def usual(game: str, ruleset: str | None = None, *moves: str) -> Position:
    rules = load_game(game)
    position = rules.position(rules.openings("start", ruleset or rules.rulesets[0])[0])
    for move in moves:
        position = position.play(move)
    return position


def seeded(request: Request) -> str:
    assert request.choices is not None
    assert request.sampling.seed is not None
    return request.choices[request.sampling.seed % len(request.choices)]


@pytest.mark.parametrize(("game", "ruleset"), GAMES)
async def test_a_whole_constrained_game(game: str, ruleset: str) -> None:
    engine = ScriptEngine([seeded] * 120, context_tokens=20_000)
    agent = LlmAgent("tester", engine, context(games=((game, ruleset),)), LlmSettings())
    await agent.open()
    position = usual(game, ruleset)
    while position.result() is None and position.ply < 120:
        decision = await agent.choose(turn(position, game=game))
        assert decision.move in position.legal_moves()
        position = position.play(decision.move)
    primed, *texts = [CharTemplate.text(parts) for parts in engine.template.rendered]
    assert len(engine.primed) == 1
    assert texts[0] == primed, "what was computed at the start is what the first turn asks"
    for at, (before, after) in enumerate(pairwise(texts)):
        assert after == f"{before.removesuffix('|')} {position.moves[at]}|"
    for request in engine.requests:
        assert request.choices
        assert request.max_tokens == max(len(choice) for choice in request.choices) + 1
    assert len(engine.requests) == position.ply


@pytest.mark.parametrize("game", ["chess", "janggi"])
async def test_the_usual_start_is_not_told_and_the_others_are(game: str) -> None:
    rules = load_game(game)
    engine = ScriptEngine([seeded] * 40)
    agent = LlmAgent("tester", engine, context(), LlmSettings())
    usual_fen = usual(game).start.fen
    for start in rules.openings("builtin", rules.rulesets[0]):
        await agent.choose(turn(rules.position(start), game=game))
        lead = engine.template.rendered[-1].lead
        assert (start.fen in lead) == (start.fen != usual_fen)


async def test_janggi_may_be_passed() -> None:
    engine = ScriptEngine([lambda request: "pass"])
    agent = LlmAgent("tester", engine, context(), LlmSettings())
    decision = await agent.choose(turn(usual("janggi"), game="janggi"))
    assert decision.move == "pass"
    free = LlmAgent("t", ScriptEngine(["MOVE: **Pass**."]), context(), LlmSettings("free"))
    assert (await free.choose(turn(usual("janggi"), game="janggi"))).move == "pass"


@pytest.mark.parametrize(
    ("game", "moves", "said", "fault", "told"),
    [
        ("chess", (), "e2e5", Fault.ILLEGAL, "pawn"),
        ("chess", (), "Ke5", Fault.ILLEGAL, "king"),
        ("chess", ("g1f3", "d7d5", "d2d3", "e7e5"), "Nd2", Fault.AMBIGUOUS, "b1d2"),
        ("chess", (), "castle", Fault.UNPARSABLE, "castle"),
        ("janggi", (), "b3b5", Fault.ILLEGAL, "screen"),
        ("janggi", (), "a4a3", Fault.ILLEGAL, "soldier"),
        ("janggi", (), "b1d2", Fault.ILLEGAL, "b1d2"),
    ],
)
async def test_a_retry_is_told_the_rule(
    game: str, moves: tuple[str, ...], said: str, fault: Fault, told: str
) -> None:
    position = usual(game, None, *moves)
    legal = position.legal_moves()[0]
    engine = ScriptEngine([f"I play this.\nMOVE: {said}", f"MOVE: {legal}"])
    agent = LlmAgent("tester", engine, context(), LlmSettings("free"))
    decision = await agent.choose(turn(position, game=game))
    assert decision.move == legal
    assert decision.attempts[0].fault is fault
    assert told in decision.attempts[0].detail
    note = engine.template.rendered[-1].tail_note
    assert told in note
    assert note.endswith("MOVE: <move>")


@pytest.mark.parametrize("game", ["chess", "janggi"])
async def test_a_long_game_is_rebased_on_the_real_position(game: str) -> None:
    probe = LlmAgent("p", ScriptEngine(), context(), LlmSettings())
    need = probe.context_need(game, load_game(game).rulesets[0])
    engine = ScriptEngine([seeded] * 60, context_tokens=need.tokens(16))
    agent = LlmAgent("tester", engine, context(), LlmSettings())
    position = usual(game)
    while position.result() is None and position.ply < 60:
        decision = await agent.choose(turn(position, game=game))
        parts = engine.template.rendered[-1]
        answer = engine.requests[-1].max_tokens
        assert engine.template.count_tokens(parts) + answer <= engine.limits.context_tokens
        base = position.ply - len(parts.moves)
        shown = usual(game, None, *position.moves[:base])
        assert (shown.fen in parts.lead) == (base > 0)
        if base:
            replayed = load_game(game).position(Start(shown.fen, position.start.ruleset))
            for move in parts.moves:
                replayed = replayed.play(move)
            assert replayed.fen.split()[0] == position.fen.split()[0]
        assert decision.move is not None
        position = position.play(decision.move)
    assert engine.template.rendered[-1].lead.count("FEN") == 1
