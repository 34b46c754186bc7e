"""Games by name, and a user's own."""

import sys
from types import ModuleType

import pytest

from games import GAMES, Start, load_game, split_game
from games.chess import Chess


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("my_games")
    monkeypatch.setitem(sys.modules, "my_games", module)
    return module


def test_the_games_of_the_package() -> None:
    assert list(GAMES) == ["chess", "janggi"]
    for name, game in GAMES.items():
        assert load_game(name) is game
        assert game.name == name
        start = game.openings("start", game.rulesets[0])[0]
        assert game.position(start).legal_moves()
        assert len(game.longest_move) >= max(map(len, game.position(start).legal_moves()))


def test_a_game_of_the_users_own(own_module: ModuleType) -> None:
    own_module.Mine = Chess  # type: ignore[attr-defined]
    assert isinstance(load_game("my_games:Mine"), Chess)


def test_a_class_that_is_no_game(own_module: ModuleType) -> None:
    own_module.Empty = type("Empty", (), {"name": "empty"})  # type: ignore[attr-defined]
    own_module.Picky = type("Picky", (), {"__init__": lambda self, x: None})  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="Empty lacks rulesets"):
        load_game("my_games:Empty")
    with pytest.raises(ValueError, match=r"Picky\(\) failed"):
        load_game("my_games:Picky")
    with pytest.raises(ValueError, match="module my_games has no class Gone"):
        load_game("my_games:Gone")


@pytest.mark.parametrize("kind", ["shogi", "", ":Class", "module:"])
def test_an_unknown_game(kind: str) -> None:
    with pytest.raises(ValueError, match=r"unknown game .*known: chess, janggi") as caught:
        load_game(kind)
    assert "\n" not in str(caught.value)


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="No module named 'no_such_module'"):
        load_game("no_such_module:Game")


def test_a_game_text_is_split() -> None:
    assert split_game("janggi") == ("janggi", None)
    assert split_game("janggi/janggimodern") == ("janggi", "janggimodern")
    assert split_game("a.b:Class/rules") == ("a.b:Class", "rules")
    for text in ("", "/", "janggi/", "/janggi", "a/b/c"):
        with pytest.raises(ValueError, match="is no game"):
            split_game(text)


@pytest.mark.parametrize("name", GAMES)
def test_an_unknown_rule_set(name: str) -> None:
    game = load_game(name)
    start = game.openings("start", game.rulesets[0])[0]
    with pytest.raises(ValueError, match="has no rule set 'house'"):
        game.position(Start(start.fen, "house"))
    with pytest.raises(ValueError, match="has no rule set 'house'"):
        game.openings("builtin", "house")
