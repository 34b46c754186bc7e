"""What must hold for every game, on random play."""

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from games import GAMES, GameError, NotationStyle, Position, Start, load_game

RULES = [(name, ruleset) for name, game in GAMES.items() for ruleset in game.rulesets]
STYLES: dict[str, tuple[NotationStyle, ...]] = {
    "chess": ("uci", "san"),
    "janggi": ("uci", "san", "korean"),
}


def random_game(name: str, ruleset: str, seed: int, max_plies: int) -> list[Position]:
    """Every position of a random game, from a random start of the built-in book."""
    game, random = load_game(name), Random(seed)
    position = game.position(random.choice(game.openings("builtin", ruleset)))
    positions = [position]
    while position.result() is None and position.ply < max_plies:
        position = position.play(random.choice(position.legal_moves()))
        positions.append(position)
    return positions


thrifty = settings(
    max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
seeds = st.integers(min_value=0, max_value=2**32 - 1)


@pytest.mark.parametrize(("name", "ruleset"), RULES)
@given(seed=seeds)
@thrifty
def test_a_random_game_replays_to_the_same_positions(name: str, ruleset: str, seed: int) -> None:
    positions = random_game(name, ruleset, seed, 120)
    replayed = load_game(name).position(positions[0].start)
    for number, position in enumerate(positions):
        if number:
            replayed = replayed.play(positions[-1].moves[number - 1])
        assert replayed == position
        assert hash(replayed) == hash(position)
        assert replayed.fen == position.fen
        assert replayed.ply == number
        assert replayed.legal_moves() == position.legal_moves()
        assert replayed.result() == position.result()


@pytest.mark.parametrize(("name", "ruleset"), RULES)
@given(seed=seeds)
@thrifty
def test_every_legal_move_parses_to_itself_in_every_notation(
    name: str, ruleset: str, seed: int
) -> None:
    positions = random_game(name, ruleset, seed, 80)
    for position in Random(seed).sample(positions, min(8, len(positions))):
        legal = position.legal_moves()
        assert len(set(legal)) == len(legal)
        for move in legal:
            assert position.parse(move) == move
            assert position.parse(f" {move}! ") == move
            for style in STYLES[name]:
                assert position.parse(position.notation(move, style)) == move


@pytest.mark.parametrize(("name", "ruleset"), RULES)
@given(seed=seeds)
@thrifty
def test_a_position_rebuilt_from_its_fen_has_the_same_moves(
    name: str, ruleset: str, seed: int
) -> None:
    game = load_game(name)
    for position in random_game(name, ruleset, seed, 60)[::7]:
        start = Start(position.fen, ruleset)
        rebuilt = game.position(start)
        assert rebuilt.fen == position.fen
        assert rebuilt.side == position.side
        assert rebuilt.in_check == position.in_check
        if position.legal_moves():
            assert rebuilt.legal_moves() == position.legal_moves()


@pytest.mark.parametrize(("name", "ruleset"), RULES)
@given(text=st.text(max_size=12))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_door_raises_its_own_errors_alone(name: str, ruleset: str, text: str) -> None:
    game = load_game(name)
    position = game.position(game.openings("start", ruleset)[0])
    try:
        assert position.parse(text) in position.legal_moves()
    except GameError:
        return


@pytest.mark.parametrize("name", GAMES)
@given(text=st.text(alphabet="abcdefghi12345890KQRBNPxX-=+#Oo. 차마졸궁HECA", max_size=9))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_door_on_text_that_looks_like_moves(name: str, text: str) -> None:
    game = load_game(name)
    position = game.position(game.openings("start", game.rulesets[0])[0])
    try:
        assert position.parse(text) in position.legal_moves()
    except GameError:
        return


@pytest.mark.parametrize("name", GAMES)
@given(text=st.text(alphabet="KQRBNPkqrbnpACEH123456789/ wb-", max_size=90))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_random_fen_is_a_value_error_at_worst(name: str, text: str) -> None:
    game = load_game(name)
    start = Start(text, game.rulesets[0])
    try:
        game.position(start).legal_moves()
    except ValueError:
        return
