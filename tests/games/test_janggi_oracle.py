"""Our janggi against pyffish over seeded random games: legal moves, check, result and notations.

Bare generals are left out: pyffish flags them without ending the game.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from games import Start, Termination
from games.janggi import RULESETS, SETUPS, Janggi, JanggiPosition, setup_fen
from games.janggi_board import MOVE_SQUARES, MOVE_TEXTS, PALACES, placement, read_fen
from games.janggi_notation import PASS

Ask = Callable[[str, str, str, Sequence[str]], Any]

SETUP_GAMES = [(rules, cho, han) for rules in RULESETS for cho in SETUPS for han in SETUPS]
LETTER_OF = dict(zip("궁사마상차포졸병", "KAHERCPP", strict=True))


def expected_winner(value: int, side: int) -> int | None:
    return None if value == 0 else side if value > 0 else 1 - side


def difference(position: JanggiPosition, moves: list[str], ask: Ask) -> str | None:
    """What pyffish sees otherwise; `moves` is the game in its spelling."""
    rules = position.start.ruleset
    theirs = ask("look", rules, position.start.fen, moves)
    legal = {position.notation(move, "uci") for move in position.legal_moves()}
    if legal != set(theirs["legal"]) or len(legal) != len(position.legal_moves()):
        return f"legal moves {sorted(legal ^ set(theirs['legal']))}"
    if position.in_check != theirs["check"]:
        return f"check {position.in_check}"
    result = position.result()
    if result is not None and result.termination is Termination.BARE_GENERALS:
        result = None
    value = theirs["value"]
    if (result is None) != (value is None):
        return f"result {result}, pyffish {value}"
    if result is not None and result.winner != expected_winner(value, position.side):
        return f"winner {result}, pyffish {value}"
    return None


def describe_difference(position: JanggiPosition, moves: list[str], ask: Ask) -> str | None:
    rules, fen = position.start.ruleset, position.start.fen
    theirs = ask("describe", rules, fen, moves)
    result = position.result()
    is_bare = result is not None and result.termination is Termination.BARE_GENERALS
    if position.fen != theirs["fen"]:
        return f"FEN {position.fen}, pyffish {theirs['fen']}"
    if result is not None and is_bare != theirs["is_bare"] and is_bare:
        return f"bare generals {is_bare}"
    if result is None and theirs["is_bare"]:
        return "bare generals missed"
    for text, (short, letters) in ask("notations", rules, fen, moves).items():
        move = position.parse(text)
        if move != PASS and position.notation(move, "san") != short:
            return f"{move}: {position.notation(move, 'san')}, pyffish {short}"
        korean = position.notation(move, "korean")
        lettered = f"{LETTER_OF[korean[2]]}{korean[:2]}-{korean[3:]}"
        if lettered != letters.replace("x", "-").rstrip("+#"):
            return f"{move}: {lettered}, pyffish {letters}"
        if move not in (position.parse(letters), position.parse(korean)):
            return f"{move} is not read back from {letters} or {korean}"
    return None


def choose(position: JanggiPosition, random: Random, back: float, passing: float) -> str:
    """A legal move: often a step back (to meet the repetition rules), else anything."""
    legal = position.legal_moves()
    own = position.moves[-2::-2]
    if own and own[0] == PASS:
        own = own[1:]
    if own and own[0] != PASS and random.random() < back:
        origin, target = MOVE_SQUARES[own[0]]
        if MOVE_TEXTS[target][origin] in legal:
            return MOVE_TEXTS[target][origin]
    if PASS in legal and random.random() < passing:
        return PASS
    checks = [move for move in legal if back and position.play(move).in_check]
    if checks and random.random() < 0.5:
        return random.choice(checks)
    return random.choice([move for move in legal if move != PASS] or legal)


def play_and_compare(
    start: Start, seed: int, plies: int, share: float, ask: Ask, ends: Counter[str]
) -> None:
    """Play one game and compare this share of its positions, every end among them."""
    random = Random(seed)
    back, passing = random.choice((0.0, 0.0, 0.6, 0.9)), random.choice((0.0, 0.03, 0.1))
    position = Janggi().position(start)
    moves: list[str] = []
    for _ in range(plies):
        result = position.result()
        if result is not None or random.random() < share:
            ends["compared"] += 1
            found = difference(position, moves, ask)
            if found is None and random.random() < 0.04:
                found = describe_difference(position, moves, ask)
            assert found is None, f"seed {seed}: {found} in {start} after {moves}"
        if result is not None:
            ends[result.termination] += 1
            if result.termination is not Termination.BARE_GENERALS:
                return
        move = choose(position, random, back, passing)
        moves.append(position.notation(move, "uci"))
        position = position.play(move)


def sparse_start(random: Random) -> Start:
    """Few pieces, many of them in the palaces, with some of the clocks near their limits."""
    while True:
        board = bytearray(90)
        for side in (0, 1):
            board[random.choice(sorted(PALACES[side]))] = 1 + 8 * side
            for kind in random.choices(range(2, 8), k=random.randint(1, 6)):
                anywhere = kind != 2 and random.random() < 0.5
                palace = PALACES[side if kind == 2 else random.randint(0, 1)]
                square = random.randrange(90) if anywhere else random.choice(sorted(palace))
                if not board[square]:
                    board[square] = kind + 8 * side
        clock = random.choice((0, 0, 0, 85, 93, 188))
        fen = f"{placement(bytes(board))} {random.choice('wb')} - - {clock} 90"
        try:
            read_fen(fen)
        except ValueError:
            continue
        return Start(fen, random.choice(tuple(RULESETS)))


@pytest.mark.timeout(120)
def test_games_of_all_setups_and_rule_sets(ask_pyffish: Ask) -> None:
    ends: Counter[str] = Counter()
    for seed, (rules, cho, han) in enumerate(SETUP_GAMES):
        start = Start(setup_fen(cho, han), rules)
        play_and_compare(start, seed, 48, 0.5, ask_pyffish, ends)
    assert ends["compared"] > 500


@pytest.mark.timeout(120)
def test_sparse_positions(ask_pyffish: Ask) -> None:
    ends: Counter[str] = Counter()
    for seed in range(60):
        play_and_compare(sparse_start(Random(seed)), seed, 24, 0.5, ask_pyffish, ends)
    assert ends["compared"] > 300


@pytest.mark.perft
@pytest.mark.timeout(1200)
def test_many_games(ask_pyffish: Ask) -> None:
    ends: Counter[str] = Counter()
    for seed, (rules, cho, han) in enumerate(SETUP_GAMES * 2):
        start = Start(setup_fen(cho, han), rules)
        play_and_compare(start, 1000 + seed, 150, 1.0, ask_pyffish, ends)
    for seed in range(1500):
        play_and_compare(sparse_start(Random(seed)), 5000 + seed, 50, 1.0, ask_pyffish, ends)
    assert {
        Termination.BIKJANG,
        Termination.CHECKMATE,
        Termination.DOUBLE_PASS,
        Termination.MOVE_REPETITION,
        Termination.NO_CAPTURE,
        Termination.PERPETUAL_CHECK,
        Termination.REPETITION,
    } <= ends.keys()
