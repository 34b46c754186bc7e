"""The games by name, and a user's own by "module:Class"."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from games.base import Game
from games.chess import Chess
from games.janggi import Janggi

GAMES: Mapping[str, Game] = MappingProxyType({"chess": Chess(), "janggi": Janggi()})


def load_game(kind: str) -> Game:
    """The game named `kind`, or `Class()` of "module:Class".

    Raises ValueError, one line: an unknown name, a module that is not there, a class that is not
    in it or that lacks a member of `Game`.
    """
    if kind in GAMES:
        return GAMES[kind]
    module_name, colon, class_name = kind.partition(":")
    if not colon or not module_name or not class_name:
        known = ", ".join(GAMES)
        raise ValueError(f'unknown game {kind!r}; known: {known}, or your own as "module:Class"')
    try:
        module = importlib.import_module(module_name)
    # a user's own module raises what it likes
    except Exception as error:
        raise ValueError(
            f"game {kind!r}: cannot be imported ({_one_line(error)}); is its folder on PYTHONPATH?"
        ) from error
    factory = getattr(module, class_name, None)
    if not callable(factory):
        raise ValueError(f"game {kind!r}: module {module_name} has no class {class_name}")
    try:
        game = factory()
    except Exception as error:
        raise ValueError(f"game {kind!r}: {class_name}() failed: {_one_line(error)}") from error
    missing = [name for name in _MEMBERS if not hasattr(game, name)]
    if missing:
        raise ValueError(f"game {kind!r}: {class_name} lacks {', '.join(missing)}")
    return cast(Game, game)


_MEMBERS = (
    "name",
    "rulesets",
    "side_names",
    "longest_move",
    "record_notation",
    "position",
    "openings",
    "adjudicate_ply_cap",
    "record_file",
    "record",
)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def split_game(text: str) -> tuple[str, str | None]:
    """Name and rule set of "janggi/janggimodern" or "module:Class/ruleset"; None is the default."""
    name, slash, ruleset = text.partition("/")
    if not name or (slash and not ruleset) or "/" in ruleset:
        raise ValueError(f'{text!r} is no game: write "game" or "game/ruleset"')
    return name, ruleset or None
