"""Game records made from the store: one file a game, written whole or not at all."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from agents import Fault
from arena import output
from arena.config import ClockSection
from arena.figures import label
from arena.output import Kind
from arena.schedule import MatchSpec
from arena.store import AttemptRow, MatchRow, PlyRow, Records, StoreError
from arena.wall_time import WallTime
from games import GameRecord, Start, Termination, load_game

SITE = "Boardfleet"
PGN = Kind("PGN file of ours", b'[event "', f'[site "{SITE}"]'.lower().encode())
MATE_CP = 100_000
"""A mate in n is so many centipawns less n (agents.Attempt)."""
_LONGEST_MATE = 10_000
_STANDARD_WORDS: dict[str, str] = {
    Termination.FLAG_FALL: "time forfeit",
    Termination.FORFEIT: "rules infraction",
    Termination.PLY_CAP: "adjudication",
    Termination.ADJUDICATED_DRAW: "adjudication",
    Termination.ADJUDICATED_WIN: "adjudication",
}
"""Endings that PGN does not call normal."""


def files(folder: Path, specs: Sequence[MatchSpec]) -> set[Path]:
    """The record files that these matches may leave in a run's folder."""
    return {folder / load_game(spec.game).record_file for spec in specs}


def write_files(folder: Path, held: Records) -> None:
    """Write each game's records of a run into its folder; games that were not begun are left out.

    `games.pgn` holds chess, `games-janggi.txt` janggi: each game names its own file and form.
    """
    for name, texts in _texts(held).items():
        path = folder / name
        partial = path.with_name(f".{name}.partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(_joined(texts))
        os.replace(partial, path)


def write_pgn(path: Path, held: Records) -> None:
    """Write a run's games that have PGN, as `output.write` does; StoreError where it has none."""
    texts = [
        text for name, found in _texts(held).items() if name.endswith(".pgn") for text in found
    ]
    if not texts:
        raise StoreError(f"--pgn: run {held.run.id} has begun no game that is written as PGN")
    output.write(path, PGN, _joined(texts))


def _joined(texts: Iterable[str]) -> Iterator[str]:
    """Games with an empty line between."""
    for number, text in enumerate(texts):
        yield ("\n" if number else "") + text.strip("\n") + "\n"


def _texts(held: Records) -> dict[str, list[str]]:
    """The records of games that were begun, by file; the games of a pair next to each other."""
    run = _Run(held)
    texts: dict[str, list[str]] = defaultdict(list)
    for row, place in _places(held.matches):
        if row.state != "scheduled":
            game = load_game(row.game)
            texts[game.record_file].append(game.record(run.record(row, place)))
    return texts


def _places(matches: Sequence[MatchRow]) -> Iterator[tuple[MatchRow, str]]:
    """Matches with their round, `pair.game`, in that order; pairs in the order of the schedule."""
    pairs: dict[str, list[MatchRow]] = {}
    for row in matches:
        pairs.setdefault(row.pair_id, []).append(row)
    for pair, rows in enumerate(pairs.values(), 1):
        for game, row in enumerate(rows, 1):
            yield row, f"{pair}.{game}"


class _Run:
    """What the records of a run's games are made of."""

    def __init__(self, held: Records) -> None:
        config = json.loads(held.run.config_json)
        clock = ClockSection(**config.get("clock", {})).rules
        self._shared = {"Event": config["name"], "Site": SITE}
        self._run_id = held.run.id
        self._time_control = {} if clock is None else {"TimeControl": clock.in_words()}
        self._wall = WallTime(held.run.created)
        self._plies: dict[str, list[PlyRow]] = defaultdict(list)
        self._attempts: dict[tuple[str, int], list[AttemptRow]] = defaultdict(list)
        for event in held.events:
            if event.kind == "process_start":
                self._wall.note_start(event)
        for ply in held.plies:
            self._plies[ply.match_id].append(ply)
        for attempt in held.attempts:
            self._attempts[attempt.match_id, attempt.ply].append(attempt)

    def record(self, row: MatchRow, place: str) -> GameRecord:
        """A game with headers and comments."""
        plies = self._plies[row.id]
        last = self._attempts[row.id, len(plies)]
        started = datetime.fromtimestamp(self._wall.seconds(row.started or 0.0), UTC)
        headers = {
            **self._shared,
            "Date": f"{started:%Y.%m.%d}",
            "Round": place,
            "First": row.agent_first,
            "Second": row.agent_second,
            "UTCDate": f"{started:%Y.%m.%d}",
            "UTCTime": f"{started:%H:%M:%S}",
            **self._time_control,
            "Termination": _standard_words(row, last),
            "Ending": row.termination or row.state,
            "Detail": row.detail or "",
            "MatchId": row.id,
            "PairId": row.pair_id,
            "RunId": self._run_id,
            "Game": label(row.game, row.ruleset),
            "Opening": row.opening,
            "PlyCount": str(len(plies)),
        }
        if row.score_first is not None:
            headers["Points"] = f"{row.score_first:g}-{row.score_second:g}"
        return GameRecord(
            start=Start(row.start_fen, row.ruleset, row.opening),
            moves=tuple(ply.move for ply in plies),
            is_finished=row.state == "finished",
            winner=row.winner,  # type: ignore[arg-type]
            headers=headers,
            comments=tuple(_comment(ply, self._attempts[row.id, ply.ply]) for ply in plies),
            closing="; ".join(filter(None, (_spoken(row.detail or ""), _failed(last)))),
        )


def _standard_words(row: MatchRow, last: Sequence[AttemptRow]) -> str:
    """The ending by the words that PGN has for it (standard, 9.8.1); `last` are the attempts after
    the last move."""
    if row.state != "finished":
        return "unterminated"
    if row.termination == Termination.FORFEIT and last and last[-1].fault == Fault.ENGINE_CRASH:
        return "abandoned"
    return _STANDARD_WORDS.get(row.termination or "", "normal")


def _comment(ply: PlyRow, attempts: Sequence[AttemptRow]) -> str:
    """Clock, time taken and score as PGN has them, then the engine's seconds, tokens and failed
    tries in words."""
    seconds = ply.done - ply.due
    parts = [f"[%emt {_clock(seconds)}]"]
    if ply.clock_left_s is not None:
        parts.insert(0, f"[%clk {_clock(ply.clock_left_s)}]")
    own_cp = attempts[-1].eval_cp if attempts else None
    score_cp = own_cp if ply.judge_cp is None else ply.judge_cp
    if score_cp is not None:
        parts.append(f"[%eval {_eval(score_cp, ply.side)}]")
    words = ["draw offered"] if ply.offers_draw else []
    served = [a for a in attempts if a.done is not None and a.admitted is not None]
    if served:
        engine = sum(a.done - a.admitted for a in served if a.done and a.admitted is not None)
        words.append(f"latency {seconds:.3f}s, engine {engine:.3f}s")
    if any(a.mode is not None for a in served):  # a language model
        prompt = _total(a.prompt_tokens for a in served)
        cached = _total(a.cached_tokens for a in served)
        out = _total(a.completion_tokens for a in served)
        words.append(f"tokens {prompt} prompt, {cached} cached, {out} out")
    told = "; ".join(filter(None, (*words, _failed(attempts))))
    return " ".join(filter(None, (*parts, told)))


def _failed(attempts: Sequence[AttemptRow]) -> str:
    failed = [f"{a.fault} ({a.reply_text or a.detail})" for a in attempts if a.fault]
    return _spoken("failed tries: " + ", ".join(failed)) if failed else ""


def _spoken(text: str) -> str:
    """A player's own words, which must not pass for a clock."""
    return text.replace("[%", "[")


def _eval(centipawns: int, side: int) -> str:
    """A mover's score as PGN has it: pawns from the first side's view, `#3` for mates."""
    own = centipawns if side == 0 else -centipawns
    if abs(own) > MATE_CP - _LONGEST_MATE:
        moves = MATE_CP - abs(own)
        return f"#{moves if own > 0 else -moves}"
    return f"{own / 100:.2f}"


def _total(counts: Iterable[int | None]) -> str:
    """Their sum; "n/a" where one is not known."""
    known = list(counts)
    return "n/a" if None in known else str(sum(filter(None, known)))


def _clock(seconds: float) -> str:
    """h:mm:ss.fff"""
    minutes, milliseconds = divmod(round(max(seconds, 0.0) * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{milliseconds / 1000:06.3f}"
