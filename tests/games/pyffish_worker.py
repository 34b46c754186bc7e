"""Answers questions about positions with pyffish, one JSON line in, one out.

Run as its own process: pyffish ends the process on some bad input. Only the four janggi variants
and lists of strings are let through.
"""

import json
import sys
from typing import Any

import pyffish

VARIANTS = ("janggi", "janggitraditional", "janggimodern", "janggicasual")


def look(variant: str, fen: str, moves: list[str]) -> dict[str, Any]:
    """Legal moves, check, and the end's value for the side to move, None while the game goes on."""
    legal = pyffish.legal_moves(variant, fen, moves)
    if legal:
        is_end, value = pyffish.is_optional_game_end(variant, fen, moves)
    else:
        is_end, value = pyffish.is_immediate_game_end(variant, fen, moves)
        if not is_end:
            is_end, value = True, pyffish.game_result(variant, fen, moves)
    return {
        "legal": legal,
        "check": bool(pyffish.gives_check(variant, fen, moves)),
        "value": value if is_end else None,
    }


def describe(variant: str, fen: str, moves: list[str]) -> dict[str, Any]:
    """The FEN, and whether neither side can give mate."""
    return {
        "fen": pyffish.get_fen(variant, fen, moves),
        "is_bare": all(pyffish.has_insufficient_material(variant, fen, moves)),
    }


def notations(variant: str, fen: str, moves: list[str]) -> dict[str, Any]:
    """The short algebraic and the Korean letter form of every legal move."""
    legal = pyffish.legal_moves(variant, fen, moves)
    here = pyffish.get_fen(variant, fen, moves)
    return {
        move: [
            pyffish.get_san(variant, here, move, False, style)
            for style in (pyffish.NOTATION_SAN, pyffish.NOTATION_JANGGI)
        ]
        for move in legal
    }


def main() -> None:
    questions = {"look": look, "describe": describe, "notations": notations}
    for line in sys.stdin:
        asked = json.loads(line)
        variant, fen, moves = asked["variant"], asked["fen"], asked["moves"]
        if variant not in VARIANTS or not all(isinstance(move, str) for move in moves):
            raise SystemExit(f"refused: {line[:200]}")
        sys.stdout.write(json.dumps(questions[asked["question"]](variant, fen, moves)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
