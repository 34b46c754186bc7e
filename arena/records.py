"""Game records made from the store: one file a game, written whole or not at all."""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from arena.figures import label
from arena.schedule import MatchSpec
from arena.store import AttemptRow, MatchRow, PlyRow, Records
from games import GameRecord, Start, load_game


def files(folder: Path, specs: Sequence[MatchSpec]) -> set[Path]:
    """The record files that these matches may leave in a run's folder."""
    return {folder / load_game(spec.game).record_file for spec in specs}


def write_files(folder: Path, held: Records) -> None:
    """Write each game's records of a run into its folder; games that were not begun are left out.

    `games.pgn` holds chess, `games-janggi.txt` janggi: each game names its own file and form.
    """
    texts: dict[str, list[str]] = defaultdict(list)
    plies: dict[str, list[PlyRow]] = defaultdict(list)
    attempts: dict[tuple[str, int], list[AttemptRow]] = defaultdict(list)
    for ply in held.plies:
        plies[ply.match_id].append(ply)
    for attempt in held.attempts:
        attempts[attempt.match_id, attempt.ply].append(attempt)
    for number, row in enumerate(held.matches, start=1):
        if row.state == "scheduled":
            continue
        game = load_game(row.game)
        record = _record(row, plies[row.id], attempts, number, held)
        texts[game.record_file].append(game.record(record))
    for name, records in texts.items():
        path = folder / name
        partial = path.with_name(f".{name}.partial")
        partial.write_text("\n\n".join(text.strip("\n") for text in records) + "\n", "utf-8")
        os.replace(partial, path)


def _record(
    row: MatchRow,
    plies: Sequence[PlyRow],
    attempts: dict[tuple[str, int], list[AttemptRow]],
    number: int,
    held: Records,
) -> GameRecord:
    headers = {
        "Event": held.run.id,
        "Site": "Boardfleet",
        "Date": held.run.created[:10].replace("-", "."),
        "Round": str(number),
        "First": row.agent_first,
        "Second": row.agent_second,
        "MatchId": row.id,
        "PairId": row.pair_id,
        "Game": label(row.game, row.ruleset),
        "Opening": row.opening,
        "Termination": row.termination or "unterminated",
        "Detail": row.detail or "",
    }
    if row.score_first is not None:
        headers["Points"] = f"{row.score_first:g}-{row.score_second:g}"
    return GameRecord(
        start=Start(row.start_fen, row.ruleset, row.opening),
        moves=tuple(ply.move for ply in plies),
        is_finished=row.state == "finished",
        winner=row.winner,  # type: ignore[arg-type]
        headers=headers,
        comments=tuple(_comment(ply, attempts[row.id, ply.ply]) for ply in plies),
    )


def _comment(ply: PlyRow, attempts: Sequence[AttemptRow]) -> str:
    """`[%emt]` as PGN has it, then the engine's seconds, tokens and failed tries in words."""
    seconds = ply.done - ply.due
    parts = [f"[%emt {_clock(seconds)}]"]
    if ply.clock_left_s is not None:
        parts.insert(0, f"[%clk {_clock(ply.clock_left_s)}]")
    served = [a for a in attempts if a.done is not None and a.admitted is not None]
    if served:
        engine = sum(a.done - a.admitted for a in served if a.done and a.admitted is not None)
        prompt = _total(a.prompt_tokens for a in served)
        cached = _total(a.cached_tokens for a in served)
        out = _total(a.completion_tokens for a in served)
        parts.append(f"latency {seconds:.3f}s engine {engine:.3f}s")
        parts.append(f"tokens {prompt} prompt {cached} cached {out} out")
    failed = [f"{a.fault} ({a.reply_text or a.detail})" for a in attempts if a.fault]
    if failed:
        # a model's own words must not pass for a clock
        parts.append("failed tries: " + ", ".join(failed).replace("[%", "["))
    return " ".join(parts)


def _total(counts: Iterable[int | None]) -> str:
    """Their sum; "n/a" where one is not known."""
    known = list(counts)
    return "n/a" if None in known else str(sum(filter(None, known)))


def _clock(seconds: float) -> str:
    """h:mm:ss.fff"""
    minutes, rest = divmod(max(seconds, 0.0), 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02}:{rest:06.3f}"
