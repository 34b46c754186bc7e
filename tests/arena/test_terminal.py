"""What a person sees: whole at any size, hostile names as text, nothing faked.

`SCREENS=write pytest tests/arena/test_terminal.py` draws the golden screens anew, to be looked at.
"""

import asyncio
import fcntl
import io
import json
import os
import pty
import re
import struct
import termios
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from arena import report as report_module
from arena import standings_text
from arena.report import build
from arena.store import AttemptRow, MatchRow
from arena.terminal import (
    PlainView,
    RichView,
    _print_table,
    panel,
    plain_line,
    print_report,
    print_tree,
)
from serving.telemetry import Bucket
from tests.arena.test_report import a_match, an_attempt, records

Frame = dict[str, Any]

SCREENS = Path(__file__).parent / "screens"
SIZES = ((80, 24), (120, 40), (60, 20))

UNKNOWN = dict.fromkeys(("mean", "p50", "p95", "p99", "max"))
MARKUP = "[red]x[/red][/]"
HOSTILE = (
    MARKUP,
    "\x1b[2J\x1b]0;owned\x07\x1b[31mred\nsecond line\r\t\b",
    "漢" * 500,
    "שלום\u202eevil\u2066 مرحبا",
    "z" + "\u0301" * 200,
    "❤️👍🏽👩‍👩‍👧🇰🇷" * 10,
)


def spread(p50: float, p95: float) -> dict[str, float | None]:
    return {"mean": p50, "p50": p50, "p95": p95, "p99": p95, "max": p95}


def bucket(at: float, requests: float | None, **changes: object) -> Frame:
    known: Frame = dict.fromkeys(Bucket._fields)
    del known["engine"]
    known |= {"span_s": 1.0, "at": at, "requests_mean": requests, "tokens_mean": 412.0}
    known |= {"waiting_mean": 0.0, "ttft_p50_s": 0.12, "kv_usage": 0.25}
    return known | changes


def an_engine(name: str, now: Frame | None, **changes: object) -> Frame:
    measured = ("step_requests", "step_tokens", "occupancy", "kv_usage")
    engine: Frame = {"name": name, "kind": "vllm", "version": "0.32.0", "now": now}
    engine |= dict.fromkeys(measured, UNKNOWN)
    engine |= {"prefix_hit_rate": 0.953, "uncached_prompt_tokens_per_move": {"chess": 14.5}}
    engine |= {"output_tokens_per_move": 3.1, "preemptions": 0, "rejected": 0, "restarts": 0}
    engine["replicas"] = None
    return engine | changes


def an_agent(name: str, p95: float | None, **changes: object) -> Frame:
    latency = UNKNOWN if p95 is None else spread(p95 / 2, p95)
    agent: Frame = {"name": name, "game": "chess", "mode": "constrained", "engine": "main"}
    agent |= {"moves": 40, "latency_ms": latency, "faults": {}}
    return agent | changes


def a_result(first: str, second: str, winner: str | None, **changes: object) -> Frame:
    result: Frame = {"match": "m1", "pair": "p1", "game": "chess", "first": first}
    result |= {"second": second, "winner": winner, "termination": "checkmate", "detail": ""}
    return result | {"plies": 57, "opening": "", "scores": None} | changes


def nothing_yet() -> Frame:
    fleet: Frame = {
        "elapsed_s": None,
        "matches": {"scheduled": 8, "running": 0, "suspended": 0, "finished": 0},
        "plies": 0,
        "moves_per_s": None,
        "recent_moves_per_s": None,
        "games_per_h": None,
        "slo_attainment": None,
        "pace_attainment": None,
        "min_seat_attainment": None,
        "schedule_lag_ms": UNKNOWN,
        "infrastructure_faults": {},
    }
    run: Frame = {"name": "quickstart", "id": "r", "created": "", "slo_ms": 1000.0}
    run["engines"] = {"main": {"kind": "vllm", "version": None, "batch_limit": 16}}
    return {
        "schema_version": 1,
        "seq": 0,
        "full": True,
        "ended": False,
        "run": run,
        "fleet": fleet,
        "verdict": None,
        "engines": [an_engine("main", None, prefix_hit_rate=None, version=None)],
        "agents": [],
        "results": [],
        "telemetry": {},
    }


def healthy() -> Frame:
    """Two engines. The first was idle for ten seconds, the second says little of itself."""
    frame = nothing_yet()
    frame["fleet"] |= {
        "elapsed_s": 61.2,
        "matches": {"scheduled": 1, "running": 4, "suspended": 1, "finished": 2},
        "plies": 345,
        "recent_moves_per_s": 7.5,
        "games_per_h": 117.6,
        "slo_attainment": 0.992,
        "pace_attainment": 0.98,
        "min_seat_attainment": 0.91,
        "schedule_lag_ms": spread(0.8, 2.6),
    }
    frame["run"]["engines"]["small"] = {"kind": "ollama", "version": None, "batch_limit": 4}
    main = [bucket(at, 16.0 * at / 60) for at in range(61) if not 20 <= at < 30]
    small = [
        bucket(at, 1.0 + at % 4, tokens_mean=None, waiting_mean=None, ttft_p50_s=None)
        for at in range(61)
    ]
    frame["telemetry"] = {"main": main, "small": small}
    frame["engines"] = [
        an_engine("main", main[-1]),
        an_engine("small", small[-1], prefix_hit_rate=None, restarts=1),
    ]
    frame["agents"] = [
        an_agent("smol-warm", 290.0, faults={"illegal": 2, "unparsable": 1}),
        an_agent("smol-cold", 310.4, mode="free", game="janggi/janggimodern"),
        an_agent("greedy", 3.2, mode=None, engine=None, moves=88),
        an_agent("late-comer", None, moves=0),
    ]
    frame["results"] = [
        a_result("smol-warm", "greedy", "greedy"),
        a_result("greedy", "smol-cold", None, termination="fifty_moves", plies=201),
    ]
    return frame


def saturated() -> Frame:
    frame = healthy()
    now = bucket(60, 16.0, waiting_mean=31.25, ttft_p50_s=2.4, kv_usage=0.99)
    frame["telemetry"]["main"][-1] = now
    frame["engines"][0] |= {"now": now, "preemptions": 12, "rejected": 3}
    frame["fleet"]["infrastructure_faults"] = {"overloaded": 3}
    frame["agents"][1]["faults"] = {"overloaded": 3}
    frame["verdict"] = {
        "engine": "main",
        "signal": "queueing",
        "pattern": "steady",
        "detail": "requests waited in 96 % of the last 10 s, 31.3 on average and 40 at most, while "
        "the batch held 16.0 of 16",
        "since_s": 41.0,
        "remedies": [
            {"action": "constrain the output", "effect": "180 → 5 tokens a move: about 7× moves/s"},
            {"action": "add a GPU", "effect": "about 2× moves/s"},
        ],
    }
    return frame


def hostile() -> Frame:
    frame = saturated()
    frame["run"]["name"] = HOSTILE[1]
    frame["fleet"]["infrastructure_faults"] = {}
    frame["agents"] = [
        an_agent(name, 100.0 + place, mode=name, game=name) for place, name in enumerate(HOSTILE)
    ]
    frame["results"] = [a_result(name, name[::-1], name) for name in HOSTILE]
    frame["engines"] = [an_engine(name, bucket(60, 3.0)) for name in HOSTILE]
    frame["verdict"] |= {"engine": HOSTILE[2], "detail": "".join(HOSTILE)}
    return frame


def a_replica(name: str, **changes: object) -> Frame:
    row: Frame = {"replica": name, "matches": 5, "share": 0.25, "moves": 120}
    row |= {"prefix_hit_rate": 0.91, "step_requests": spread(3.0, 4.0), "faults": {}}
    row |= {"engine_ms": spread(110.0, 190.0), "median_ratio": 0.9, "is_straggler": False}
    row["is_silent"] = False
    return row | changes


def with_replicas(*names: str) -> Frame:
    """One engine, of which the replica named last lags behind."""
    frame = saturated()
    slow: Frame = {"median_ratio": 2.14, "is_straggler": True, "engine_ms": spread(235.0, 400.0)}
    slow |= {"faults": {"illegal": 2}}
    told: Frame = {"matches_moved": 3, "straggler_ratio": 1.5, "straggler_moves": 30}
    told["rows"] = [*map(a_replica, names[:-1]), a_replica(names[-1], **slow)]
    told["count"] = len(names)
    frame["engines"][0]["replicas"] = told
    return frame


def replicated() -> Frame:
    """Four replicas, one of which has an address for a name."""
    return with_replicas("k3v9x2ab", "q7m1z0cd", "p5n8w4ef", "gpu-host-17.example.net:8000")


def two_hundred() -> Frame:
    frame = healthy()
    frame["fleet"] |= {"elapsed_s": 45_296.0, "plies": 1_234_567, "recent_moves_per_s": 128.3}
    frame["agents"] = [an_agent(f"agent-{n:03}", 100.0 + n * 7 % 200) for n in range(200)]
    frame["results"] = [a_result(f"agent-{n:03}", "agent-199", None) for n in range(10)]
    names = [f"gpu-{n}" for n in range(9)]
    frame["run"]["engines"] = {name: {"batch_limit": 256} for name in names}
    frame["telemetry"] = {
        name: [bucket(at, (at * place) % 257.0) for at in range(1000, 1060)]
        for place, name in enumerate(names, 30)
    }
    frame["engines"] = [an_engine(name, frame["telemetry"][name][-1]) for name in names]
    return frame


FRAMES = {
    frame.__name__: frame
    for frame in (nothing_yet, healthy, saturated, hostile, two_hundred, replicated)
}


def shown(frame: Mapping[str, Any], width: int = 80, height: int = 24) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(panel(frame, width, height))
    return out.getvalue()


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("name", FRAMES)
def test_the_screens_are_as_they_were_looked_at(name: str, width: int, height: int) -> None:
    golden = SCREENS / f"{name}-{width}x{height}.txt"
    text = shown(FRAMES[name](), width, height)
    if os.environ.get("SCREENS") == "write":
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def assert_fits(text: str, width: int, height: int) -> None:
    lines = text.removesuffix("\n").split("\n")
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    assert text.replace("\n", "").isprintable()


@given(
    name=st.sampled_from(sorted(FRAMES)),
    width=st.integers(40, 250),
    height=st.integers(10, 100),
)
def test_whatever_the_size_the_screen_fits_and_names_what_matters(
    name: str, width: int, height: int
) -> None:
    frame = FRAMES[name]()
    text = shown(frame, width, height)
    assert_fits(text, width, height)
    assert "matches" in text
    assert ("saturated: " in text) == (frame["verdict"] is not None)
    assert ("try first: " in text) == (frame["verdict"] is not None)


@given(name=st.text(max_size=600), width=st.integers(40, 130))
def test_whatever_the_names_the_screen_fits(name: str, width: int) -> None:
    frame = healthy()
    frame["engines"][0]["name"] = name
    frame["agents"] = [an_agent(name, 1.0)]
    frame["results"] = [a_result(name, name, name)]
    assert_fits(shown(frame, width), width, 24)
    assert_fits(plain_line(frame), 10_000, 1)


@given(name=st.sampled_from(sorted(FRAMES)), size=st.tuples(st.integers(1, 39), st.integers(1, 9)))
def test_a_tiny_terminal_is_filled_no_further(name: str, size: tuple[int, int]) -> None:
    text = shown(FRAMES[name](), *size)
    assert len(text.removesuffix("\n").split("\n")) <= size[1]
    assert max(map(cell_len, text.split("\n"))) <= size[0]


def test_the_live_view_names_what_matters() -> None:
    text = shown(healthy())
    for part in ("2/8 matches", "4 running", "7.5", "98.0%", "illegal 2", "16.0/16", "95.3%"):
        assert part in text


def test_a_run_that_has_shown_nothing_yet_shows_no_figures() -> None:
    text = shown(nothing_yet())
    assert "0 ms" not in text.replace("1,000 ms", "")
    assert "no moves yet" in text
    assert "no sign of saturation" in text


def test_seconds_without_a_step_are_blank() -> None:
    frame = nothing_yet()
    steps = [bucket(at, requests) for at, requests in ((0, 16.0), (1, None), (59, 0.0))]
    frame["telemetry"] = {"main": steps}
    assert f"█{' ' * 58}▁" in shown(frame, 120)


def test_an_engine_that_stopped_falls_behind_the_others() -> None:
    frame = healthy()
    frame["telemetry"]["small"] = [bucket(at, 4.0) for at in range(31)]
    line = next(line for line in shown(frame, 120).splitlines() if line.startswith("small"))
    assert line.endswith(f" {'█' * 30}{' ' * 30} 60 s")


def test_a_column_of_two_seconds_keeps_them_as_it_moves() -> None:
    frame = nothing_yet()
    steps = [bucket(at, 16.0 * (at % 2)) for at in range(62)]
    for end in (61, 62):
        frame["telemetry"] = {"main": steps[:end]}
        assert "▄" * 29 in shown(frame)


def test_an_engine_s_faults_are_not_laid_to_the_agents() -> None:
    text = shown(saturated())
    assert "agents' faults: illegal 2, unparsable 1\n" in text
    assert "engine faults: overloaded 3\n" in text


def test_only_engines_that_fit_are_shown() -> None:
    assert "+6 more engines" in shown(two_hundred())
    assert "more engine" not in shown(two_hundred(), 80, 60)


def test_the_slowest_agents_come_first_and_unknown_ones_last() -> None:
    lines = shown(healthy()).splitlines()
    places = [
        next(place for place, line in enumerate(lines) if line.startswith(name))
        for name in ("smol-cold", "smol-warm", "greedy", "late-comer")
    ]
    assert places == sorted(places)
    assert "n/a" in lines[places[-1]]
    assert "slowest of 200" in shown(two_hundred())


def test_where_only_ascii_can_be_shown_nothing_else_is() -> None:
    for make in FRAMES.values():
        raw = io.BytesIO()
        out = io.TextIOWrapper(raw, encoding="ascii")
        Console(file=out, width=80, force_terminal=False).print(panel(make(), 80, 24))
        out.flush()
        assert_fits(raw.getvalue().decode("ascii"), 80, 24)
    assert b"#" in raw.getvalue()


def test_without_colour_no_word_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=True).print(panel(saturated(), 80, 24))
    assert "\x1b[3" not in out.getvalue()
    assert "saturated: main, queueing" in out.getvalue()


def test_the_plain_line_is_one_line() -> None:
    line = plain_line(healthy())
    assert "\n" not in line
    assert "2 finished, 4 running, 1 suspended, 1 to come" in line
    assert "slowest smol-cold p50 155 p95 310 ms" in line
    assert "main: 16.0 requests a step" in line
    assert "illegal 2" in line
    assert "saturated" not in line


def test_before_play_begins_the_plain_line_holds_no_figures() -> None:
    """It began with `n/a s · 0 finished`."""
    frame = nothing_yet()
    assert plain_line(frame) == "starting · 8 to come"
    assert plain_line({**frame, "ended": True}) == "not begun · 8 to come"


def test_the_plain_line_names_the_verdict_and_every_fault() -> None:
    line = plain_line(saturated())
    assert "overloaded 3" in line
    assert line.endswith("saturated: main, queueing, a steady rise (capacity is short)")


async def watched(view: PlainView | RichView, read: Callable[[int], Frame]) -> int:
    """Watch until three frames have been drawn, then stop. `read` is given the number of the frame,
    from 0; returns how many there were."""
    count = 0
    drawn = asyncio.Event()

    def counted() -> Frame:
        nonlocal count
        count += 1
        if count > 3:
            drawn.set()
        return read(count - 1)

    task = asyncio.create_task(view.watch(counted))
    waiting = asyncio.create_task(drawn.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return count


@pytest.fixture
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arena.terminal.REFRESH_S", 0.0)
    monkeypatch.setattr("arena.terminal.PLAIN_REFRESH_S", 0.0)


@pytest.mark.usefixtures("_no_pauses")
async def test_the_plain_view_draws_once_more_when_it_ends() -> None:
    out = io.StringIO()

    def read(number: int) -> Frame:
        frame = healthy()
        frame["fleet"]["plies"] = 100 + number
        return frame

    count = await watched(PlainView(out), read)
    assert re.findall(r"(\d+) plies", out.getvalue()) == [str(100 + n) for n in range(count)]


@contextmanager
def a_terminal(width: int, height: int) -> Iterator[tuple[int, TextIO]]:
    """The descriptor of a new terminal and what writes to it."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    resize(ours, width, height)
    try:
        with suppress(OSError), os.fdopen(theirs, "w", encoding="utf-8") as out:
            yield ours, out
    finally:
        os.close(ours)


def resize(terminal: int, width: int, height: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


def lose(out: TextIO) -> None:
    """Every write fails from now on."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, out.fileno())
    os.close(full)


def drain(terminal: int) -> str:
    """All that was written to the terminal."""
    data = b""
    with suppress(BlockingIOError, OSError):
        while more := os.read(terminal, 65536):
            data += more
    return data.decode()


@pytest.fixture
def _a_real_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("_no_pauses", "_a_real_terminal")
async def test_the_panel_follows_the_size_of_the_terminal() -> None:
    with a_terminal(80, 24) as (terminal, out):
        before: list[str] = []

        def read(number: int) -> Frame:
            before.append(drain(terminal))
            if number == 1:
                resize(terminal, 120, 40)
            return two_hundred()

        await watched(RichView(out), read)
    small, first_large, second_large = before[1:4]
    assert "+6 more engines" in small
    assert "+3 more engines" in first_large
    assert "+3 more engines" in second_large
    assert ["\x1b[2J" in drawn for drawn in before[1:4]] == [False, True, False]


@pytest.mark.usefixtures("_no_pauses", "_a_real_terminal")
async def test_a_lost_terminal_ends_the_view_and_nothing_else() -> None:
    with a_terminal(80, 24) as (_, out):
        rich, plain = RichView(out), PlainView(out)

        def read(number: int) -> Frame:
            if number == 1:
                lose(out)
            return healthy()

        assert await watched(rich, read) > 3
        rich.announce("nobody reads this")
        assert await watched(plain, read) > 3
        plain.announce("nor this")


def test_names_are_text_whatever_they_hold() -> None:
    held = records()
    row = a_match(agent_first=MARKUP, winner=0)
    report = build(held.__class__(held.run, (row,), *[getattr(held, n) for n in REST]))
    out = io.StringIO()
    print_report(report, out)
    assert MARKUP in out.getvalue()
    frame = healthy()
    frame["results"] = [a_result(MARKUP, "bob", MARKUP)]
    assert f"{MARKUP} 1-0 bob" in shown(frame)


REST = ("plies", "attempts", "samples", "events")


def test_no_name_in_a_report_reaches_the_terminal_as_a_command() -> None:
    held = records()
    report = build(held)
    for rows in (report["results"], report["pairings"], report["agents"], report["engines"]):
        for row in rows:
            row |= {key: HOSTILE[1] for key in ("first", "agent", "name", "game") if key in row}
    out = io.StringIO()
    print_report(report, out)
    assert out.getvalue().replace("\n", "").isprintable()
    assert "owned" in out.getvalue()


def printed(*matches: MatchRow, attempts: tuple[AttemptRow, ...] = ()) -> list[str]:
    """The report of these matches, its lines with single spaces."""
    out = io.StringIO()
    held = records()._replace(matches=matches, plies=(), attempts=attempts)
    print_report(build(held), out)
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_a_report_has_a_cross_table() -> None:
    agents = ("ann", "bob", "eve")
    pairs = [(one, two) for one in agents for two in agents if one < two]
    lines = printed(
        *(
            a_match(id=f"m{n}", pair_id=f"p{n}", agent_first=one, agent_second=two, winner=None)
            for n, (one, two) in enumerate(pairs)
        ),
        a_match(id="m9", pair_id="p0", agent_first="bob", agent_second="ann", winner=1),
    )
    at = lines.index("chess: points/games")
    assert lines[at + 2] == "agent 1 2 3"
    assert lines[at + 4 : at + 7] == ["1 ann 1.5/2 0.5/1", "2 bob 0.5/2 0.5/1", "3 eve 0.5/1 0.5/1"]


@pytest.mark.parametrize("players", [2, 13])
def test_a_cross_table_that_says_nothing_or_is_too_wide_is_left_out(players: int) -> None:
    lines = printed(
        *(
            a_match(id=f"m{n}", pair_id=f"p{n}", agent_second=f"player {n}")
            for n in range(players - 1)
        )
    )
    assert not any("points/games" in line for line in lines)
    assert "Pairings" in lines
    assert any("13 players make it too wide" in line for line in lines) == (players > 2)


def test_forfeits_are_told_with_their_reason_and_the_illegal_move() -> None:
    detail = "Black gave no legal move (illegal): e2e5 is illegal: the pawn cannot reach e5"
    lines = printed(
        a_match(termination="forfeit", winner=0, detail=detail),
        attempts=(an_attempt(3, 12.0, fault="illegal"),),
    )
    said = " ".join(lines)
    assert "Black gave no legal move (illegal): e2e5" in said
    assert "chess bob 1 illegal 1" in lines[lines.index("Games lost by a failure") :]
    assert "Games lost by a failure" not in printed(a_match())
    assert not any("failure" in line for line in printed(a_match())[:8])


def between(one: str, two: str, *winners: int | None) -> tuple[MatchRow, ...]:
    return tuple(
        a_match(
            **{"id": f"{one}{two}{n}", "pair_id": f"{one}{two}{n // 2}", "number": n},
            **{"agent_first": one, "agent_second": two, "winner": winner},
        )
        for n, winner in enumerate(winners)
    )


def test_what_qualifies_the_ratings_is_said() -> None:
    parted = printed(*between("a", "b", 0, None), *between("c", "d", 0, 1))
    at = parted.index("What to know of the standings")
    assert parted[at + 1].startswith("chess: no games link these 2 groups, so ratings compare")
    assert parted[at + 1].endswith("within a group only: 1. a, b; 2. c, d.")
    assert any(line.startswith("game # agent") and line.endswith("group") for line in parted)
    assert any(line.startswith("chess 2 c ") and line.endswith(" 2") for line in parted)
    swept = printed(*between("a", "b", 0, 0))
    assert any("a penalty keeps them finite" in line for line in swept)
    assert not any(line.endswith("group") for line in swept)
    turned = [row for pair in (between("a", "b", 0, 0), between("b", "a", 0, 0)) for row in pair]
    (worth,) = (line for line in printed(*turned) if "moving first" in line)
    assert re.fullmatch(r"chess: moving first is worth \+\d+ ± \d+ Elo \(95 %\)\.", worth)


def test_skill_and_elo_of_different_zeros_say_so() -> None:
    """A player that forfeited every game has no skill rating, and the others' mean moved."""
    forfeits = tuple(
        row._replace(termination="forfeit")
        for row in between("a", "c", 0, 0) + between("b", "c", 0)
    )
    told = " ".join(printed(*between("a", "b", 0, None), *forfeits))
    assert "no skill rating, for want of a game without a forfeit: c." in told
    assert "Skill is 0 at the mean of the others" in told
    assert "no skill rating" not in " ".join(printed(*between("a", "b", 0, None)))


def test_a_game_that_is_not_rated_says_so_wherever_it_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report_module, "saturated_engines", lambda figures: {"main"})
    fallen = a_match(termination="flag_fall", winner=1)
    lines = printed(fallen, *between("a", "b", 0, None))
    assert any("flag fall (not rated)" in line for line in lines)
    told = " ".join(lines)
    assert "chess: 1 game is not rated, for the engine was saturated when the flag fell" in told
    assert "counted in points alone, not in the cross-table, pairings" in told
    frame = healthy()
    frame["results"] = [a_result("a", "b", "a", termination="flag_fall", is_rated=False)]
    assert "flag fall (not rated)" in shown(frame)


@pytest.mark.parametrize(
    ("chance", "said"),
    [
        *((1.0, ">99.9%"), (0.9998, ">99.9%"), (0.9994, "99.9%"), (0.5, "50.0%")),
        *((0.0006, "0.1%"), (0.0002, "<0.1%"), (0.0, "<0.1%")),
    ],
)
def test_a_likelihood_is_never_shown_as_certain(chance: float, said: str) -> None:
    assert standings_text.likelihood(chance) == said


def test_a_test_that_ran_out_of_pairs_is_undecided_not_open() -> None:
    test = {"elo0": 0.0, "elo1": 10.0, "decision": "continue", "is_exhausted": True}
    assert standings_text.decision(test) == "undecided: max_pairs reached"
    assert standings_text.decision({**test, "is_exhausted": False}) == "open"
    assert standings_text.decision({**test, "decision": "accept"}) == "H1 accepted (elo1 10)"
    assert standings_text.decision({**test, "decision": "reject"}) == "H0 accepted (elo0 0)"


def test_an_end_that_is_no_bound_is_told_in_words() -> None:
    assert standings_text.interval({"low": -21.4, "high": 262.0}) == "-21 to +262"
    assert standings_text.interval({"low": None, "high": 127.0}) == "no lower bound to +127"
    assert standings_text.interval({"low": 9.0, "high": None}) == "+9 to no upper bound"


@pytest.mark.parametrize("width", [80, 120])
def test_a_report_of_long_names_fits_and_no_number_is_cut(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = records()
    names = ("a-model-with-a-long-name", "another-model-of-27b", "c")
    config = json.loads(held.run.config_json)
    config["tournament"]["format"] = "swiss"
    config["sprt"] = {"elo0": 0, "elo1": 10, "max_pairs": 2}
    run = held.run._replace(config_json=json.dumps(config))
    matches = (*between(*names[:2], 0, None, 1, 0), *between(names[2], names[0], None, 1))
    monkeypatch.setattr("arena.terminal._WIDTH", width)
    out = io.StringIO()
    print_report(build(held._replace(run=run, matches=matches, plies=(), attempts=())), out)
    lines = out.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= width
    assert any("undecided:" in line and "max_pairs" in line for line in lines)
    for heading in ("Buchholz", "S-B", "skill", "protocol", "LOS", "bounds"):
        assert any(heading in line.split() for line in lines)


def test_a_straggler_is_named_before_other_replicas() -> None:
    lines = shown(replicated(), 100, 40).splitlines()
    (heading,) = (place for place, line in enumerate(lines) if "replicas of main" in line)
    assert "SLOW 2.1×" in lines[heading + 1]
    assert "gpu-host-17" in lines[heading + 1]
    assert [line.split()[0] for line in lines[heading + 2 : heading + 5]] == [
        "k3v9x2ab",
        "q7m1z0cd",
        "p5n8w4ef",
    ]
    assert plain_line(replicated()).count("slow replica: gpu-host-17.example.net:8000") == 1
    assert "slow replica" not in plain_line(saturated())


def test_replicas_that_do_not_fit_are_counted() -> None:
    text = shown(with_replicas(*(f"r{n:07}" for n in range(64))), 100, 24)
    assert re.search(r"^\d+ of 64 replicas of main ", text, re.MULTILINE)
    assert_fits(text, 100, 24)


def test_a_frame_of_an_arena_that_knew_no_replicas_is_shown() -> None:
    frame = saturated()
    for engine in frame["engines"]:
        del engine["replicas"]
    assert shown(frame) == shown(saturated())
    assert plain_line(frame) == plain_line(saturated())


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_replicas_are_text_whatever_they_hold(name: str) -> None:
    frame = with_replicas(name, name + "2")
    for width, height in SIZES:
        assert_fits(shown(frame, width, height), width, height)
    report = build(records())
    report["engines"][0]["replicas"] = frame["engines"][0]["replicas"]
    out = io.StringIO()
    print_report(report, out)
    assert "\x1b" not in plain_line(frame) + out.getvalue()
    assert "Replicas of main" in out.getvalue()


def test_the_report_ends_with_the_verdict_and_its_remedies() -> None:
    report = build(records())
    out = io.StringIO()
    print_report(report | {"verdict": saturated()["verdict"]}, out)
    lines = out.getvalue().splitlines()
    assert any(line.startswith("Saturated: main, queueing") for line in lines)
    assert lines[-2].startswith("1. constrain the output: 180")
    assert lines[-1] == "2. add a GPU: about 2× moves/s"
    out = io.StringIO()
    print_report(report | {"verdict": None}, out)
    assert "Saturated" not in out.getvalue()


def test_unknown_figures_are_said_to_be_unknown() -> None:
    held = records()
    waiting = a_match(state="scheduled", winner=None, started=None, ended=None, termination=None)
    out = io.StringIO()
    print_report(build(held.__class__(held.run, (waiting,), (), (), (), ())), out)
    assert "n/a" in out.getvalue()
    assert "0 matches finished" in out.getvalue()


def test_a_tree_of_figures_names_every_leaf() -> None:
    out = io.StringIO()
    print_tree({"a": {"b": 1.5, "c": None}, "cells": [{"seats": 2}]}, out)
    assert out.getvalue().splitlines() == ["a:", "  b: 1.500", "  c: n/a", "cells 1:", "  seats: 2"]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_figure_of_a_wide_table_is_cut(width: int) -> None:
    for seed in range(40):
        dice = Random(f"{width}/{seed}")
        columns = [f"c{at}{'x' * dice.randint(0, 12)}" for at in range(dice.randint(2, 12))]
        rows = [[f"{n}.{'7' * dice.randint(0, 12)}" for _ in columns] for n in range(3)]
        out = io.StringIO()
        _print_table(Console(file=out, width=width), "wide", columns, rows)
        told = out.getvalue()
        assert all(cell in told for row in rows for cell in row)
        assert max(map(len, told.splitlines())) <= width
        # each part says whose its figures are
        assert told.count(rows[0][0]) >= told.count(columns[0])
