"""Rules of games: no I/O but opening books, no clock, no model."""

from games.base import (
    AmbiguousMove,
    Drawn,
    Game,
    GameError,
    GameRecord,
    IllegalMove,
    NotationError,
    NotationStyle,
    Position,
    Result,
    Side,
    Start,
    Termination,
)
from games.drawing import Drawing
from games.registry import GAMES, load_game, split_game

__all__ = [
    "GAMES",
    "AmbiguousMove",
    "Drawing",
    "Drawn",
    "Game",
    "GameError",
    "GameRecord",
    "IllegalMove",
    "NotationError",
    "NotationStyle",
    "Position",
    "Result",
    "Side",
    "Start",
    "Termination",
    "load_game",
    "split_game",
]
