"""A UCI engine is a player: what it does wrong is its own, and leaves no process."""

import asyncio
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from pydantic import ValidationError

from agents import (
    AgentContext,
    Decision,
    Fault,
    Interrupted,
    Seat,
    Turn,
    UciAgent,
    UciConfig,
    build_agent,
    check_agent,
    parse_agent_config,
)
from agents.uci import (
    MATE_CP,
    TEXT_LIMIT,
    UciCrashed,
    UciIdentity,
    UciLate,
    UciProcess,
    identify,
)
from agents.uci_agent import from_uci, rules_of, to_uci
from games import Position, Start, load_game
from serving import find_program
from serving.process import __file__ as guard_file

FAKE = Path(__file__).with_name("fake_uci.py")

Runner = Callable[[Coroutine[Any, Any, Any]], Any]


LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
"""The arena runs on uvloop, `identify` on asyncio's own: they start processes differently."""


def config(behaviour: str, *moves: str, **values: Any) -> UciConfig:
    command = [sys.executable, str(FAKE), behaviour, *moves]
    parsed = parse_agent_config({"kind": "uci", "name": "fake", "command": command, **values})
    assert isinstance(parsed, UciConfig)
    return parsed


@asynccontextmanager
async def playing(
    behaviour: str, *moves: str, limit_s: float = 20.0, **values: Any
) -> AsyncIterator[UciAgent]:
    context = AgentContext(7, limit_s)
    agent = build_agent(config(behaviour, *moves, **values), {}, context)
    assert isinstance(agent, UciAgent)
    await agent.open()
    try:
        yield agent
    finally:
        await agent.close()


def position(game: str = "chess", ruleset: str = "standard", *moves: str) -> Position:
    found = load_game(game)
    reached = found.position(found.openings("start", ruleset)[0])
    for move in moves:
        reached = reached.play(move)
    return reached


def turn(reached: Position, game: str = "chess", **values: Any) -> Turn:
    seat = Seat("fake", reached.side)
    return Turn("m1", game, reached, seat, 3, values.pop("clock_left_s", None), 0.0, **values)


def engines() -> set[int]:
    """The fake's live processes."""
    found = set()
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if str(FAKE) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.add(process.pid)
    return found


@pytest.fixture(autouse=True)
def _leaves_no_process() -> Iterator[None]:
    before = engines()
    yield
    limit = time.monotonic() + 5
    while engines() - before and time.monotonic() < limit:
        time.sleep(0.05)
    assert engines() <= before


async def choose(behaviour: str, *moves: str, **values: Any) -> Decision:
    async with playing(behaviour, *moves, **values) as agent:
        return await agent.choose(turn(position("chess", "standard", "e2e4")))


@LOOPS
@pytest.mark.parametrize("behaviour", ["plain", "crlf", "flood", "fairy"])
def test_a_legal_move_is_played_with_its_score(run: Runner, behaviour: str) -> None:
    decision = run(choose(behaviour, "e7e5"))
    (attempt,) = decision.attempts
    assert (decision.move, decision.fault) == ("e7e5", None)
    assert attempt.eval_cp == -31
    assert attempt.detail == "depth 7 nodes 1234"
    assert attempt.reply is not None
    assert attempt.reply.text == "e7e5"
    times = attempt.reply.timings
    assert times.submitted <= times.admitted <= times.done


async def test_the_last_score_counts_and_a_mate_is_far_away() -> None:
    decision = await choose("mate", "e7e5")
    assert decision.attempts[0].eval_cp == MATE_CP - 3


@pytest.mark.parametrize(
    ("move", "told"),
    [("e7e4", "'e7e4'"), ("0000", "'0000'"), ("(none)", "'(none)'"), ("rubbish", "'rubbish'")],
)
async def test_an_illegal_move_is_its_own_and_stands_in_the_record(move: str, told: str) -> None:
    decision = await choose("plain", move)
    assert (decision.move, decision.fault) == (None, Fault.ENGINE_ILLEGAL)
    (attempt,) = decision.attempts
    assert told in attempt.detail
    assert attempt.reply is not None
    assert attempt.reply.text == move


async def test_no_move_at_all_is_illegal() -> None:
    decision = await choose("bare")
    assert decision.fault is Fault.ENGINE_ILLEGAL
    assert decision.attempts[0].detail == 'its "bestmove" named no move'


@pytest.mark.parametrize(
    ("game", "move", "told"),
    [
        ("chess", "E7E5", "it answered 'E7E5': UCI writes e7e5"),
        ("chess", "Nf6", "it answered 'Nf6': UCI writes g8f6"),
        ("chess", "a8a8", "a piece must leave its square"),
        ("janggi", "a1a9", "it answered 'a1a9': illegal move 'a1a9'"),
    ],
)
async def test_an_illegal_move_says_why(game: str, move: str, told: str) -> None:
    ruleset = "standard" if game == "chess" else "janggi"
    first = ("e2e4",) if game == "chess" else ()
    async with playing("fairy", move) as agent:
        decision = await agent.choose(turn(position(game, ruleset, *first), game))
    assert decision.fault is Fault.ENGINE_ILLEGAL
    assert told in decision.attempts[0].detail


async def test_what_an_engine_writes_is_stored_in_bounds() -> None:
    decision = await choose("huge_move")
    (attempt,) = decision.attempts
    assert decision.fault is Fault.ENGINE_ILLEGAL
    assert attempt.reply is not None
    assert attempt.reply.text == "e" * TEXT_LIMIT
    assert len(attempt.detail) < 1000
    decision = await choose("huge_numbers", "e7e5")
    assert decision.attempts[0].eval_cp is None
    assert len(decision.attempts[0].detail) < 100


async def test_of_several_lines_the_score_is_the_best_ones() -> None:
    decision = await choose("multipv", "e7e5")
    (attempt,) = decision.attempts
    assert (attempt.eval_cp, attempt.detail) == (12, "depth 8 nodes 60")


async def test_a_crash_tells_the_last_that_the_engine_wrote() -> None:
    decision = await choose("complain")
    assert decision.fault is Fault.ENGINE_CRASH
    detail = decision.attempts[0].detail
    assert detail.endswith("| loading net | no such net: a.nnue")
    assert len(detail) < 400


async def test_getting_ready_is_not_charged_and_has_a_limit_of_its_own() -> None:
    async with playing("slow_ready", "e7e5") as agent:
        asked = turn(position("chess", "standard", "e2e4"), clock_left_s=0.4)
        decision = await agent.choose(asked)
        (attempt,) = decision.attempts
        assert (decision.move, decision.fault) == ("e7e5", None)
        assert attempt.reply is not None
        times = attempt.reply.timings
        assert times.done - times.admitted < 0.4
        assert times.admitted - times.submitted > 0.4
    async with playing("never_ready", "e7e5", start_seconds=1.0) as agent:
        decision = await agent.choose(asked)
        assert decision.fault is Fault.ENGINE_CRASH
        assert 'did not answer "isready" within 1 s' in decision.attempts[0].detail


@LOOPS
@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ("crash", "signal 9"),
        ("exit", "code 3"),
        ("long_line", "a line of over"),
        ("close_output", "it closed its output"),
    ],
)
def test_a_crash_is_its_own_and_the_next_game_has_a_new_process(
    run: Runner, behaviour: str, told: str
) -> None:
    async def play_twice() -> list[Decision]:
        asked = turn(position("chess", "standard", "e2e4"))
        async with playing(behaviour, "e7e5") as agent:
            return [await agent.choose(asked) for _ in range(2)]

    for decision in run(play_twice()):
        assert (decision.move, decision.fault) == (None, Fault.ENGINE_CRASH)
        assert told in decision.attempts[0].detail


@LOOPS
@pytest.mark.parametrize("clock_left_s", [None, 0.3])
def test_silence_is_a_flag_that_fell(run: Runner, clock_left_s: float | None) -> None:
    limit_s = 0.3 if clock_left_s is None else 20.0

    async def play() -> tuple[Decision, float]:
        async with playing("hang", limit_s=limit_s) as agent:
            asked = time.monotonic()
            decision = await agent.choose(turn(position(), clock_left_s=clock_left_s))
            return decision, time.monotonic() - asked

    decision, took_s = run(play())
    assert decision.fault is Fault.FLAG_FALL
    assert "no move within 0.3 s" in decision.attempts[0].detail
    assert took_s < 10


@LOOPS
def test_a_process_that_left_the_group_keeps_nobody_waiting(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds its engine's output for ten minutes."""
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_UCI_LOG", str(log))
    try:
        assert run(choose("child_apart", "e7e5")).move == "e7e5"
    finally:
        children = re.findall(r"^child (\d+)$", log.read_text(), re.MULTILINE)
        assert len(children) == 1
        os.kill(int(children[0]), signal.SIGKILL)


async def test_a_cancelled_search_ends_its_process() -> None:
    async with playing("hang") as agent:
        asked = asyncio.create_task(agent.choose(turn(position())))
        await asyncio.sleep(0.3)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked


async def test_a_process_that_cannot_be_started_again_is_the_infrastructures(
    tmp_path: Path,
) -> None:
    link = tmp_path / "engine.py"
    link.symlink_to(FAKE)
    settings = config("exit").model_copy(
        update={"command": (sys.executable, str(link), "exit", "e7e5")}
    )
    agent = build_agent(settings, {}, AgentContext(7, 20.0))
    await agent.open()
    asked = turn(position("chess", "standard", "e2e4"))
    assert (await agent.choose(asked)).fault is Fault.ENGINE_CRASH
    link.unlink()
    with pytest.raises(Interrupted) as seen:
        await agent.choose(asked)
    assert seen.value.attempts[-1].fault is Fault.TRANSPORT
    await agent.close()


async def test_searches_beyond_the_processes_wait_and_are_not_charged() -> None:
    async with playing("plain", "e7e5", "e7e5", "e7e5", processes=1) as agent:
        asked = turn(position("chess", "standard", "e2e4"))
        decisions = await asyncio.gather(*(agent.choose(asked) for _ in range(3)))
        times = sorted(
            (reply.timings.admitted, reply.timings.done)
            for reply in (decision.attempts[0].reply for decision in decisions)
            if reply is not None
        )
        assert all(done <= begun for (_, done), (begun, _) in itertools.pairwise(times))
        assert len(times) == 3


async def test_every_search_begins_clean_and_a_pass_is_told_as_a_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_UCI_LOG", str(log))
    options: dict[str, Any] = {"options": {"Contempt": 5}, "hash_mib": 4, "depth": 2}
    async with playing("fairy", "e9e9", **options) as agent:
        reached = position("janggi", "janggi", "e2d2", "a7a6", "pass")
        decision = await agent.choose(turn(reached, "janggi"))
    assert decision.move == "pass"
    told = log.read_text().splitlines()
    start = reached.start.fen
    assert told == [
        "uci",
        "setoption name Threads value 1",
        "setoption name Hash value 4",
        "setoption name Contempt value 5",
        "isready",
        "setoption name UCI_Variant value janggi",
        "ucinewgame",
        "isready",
        f"position fen {start} moves e2d2 a7a6 d2d2",
        "go depth 2",
    ]


async def test_random_moves_follow_the_seed_and_their_share() -> None:
    reached = position()
    async with playing("plain", *["e2e4"] * 400, random_moves=0.5) as agent:
        both = []
        for _ in range(2):
            moves = []
            for index in range(100):
                asked = Turn(f"m{index}", "chess", reached, Seat("fake", 0), 3, None, 0.0)
                decision = await agent.choose(asked)
                assert decision.move in reached.legal_moves()
                moves.append((decision.move, bool(decision.attempts)))
            both.append(moves)
    assert both[0] == both[1]
    asked_engine = sum(was_asked for _, was_asked in both[0])
    assert 30 < asked_engine < 70
    assert len({move for move, was_asked in both[0] if not was_asked}) > 10


async def test_the_engine_goes_with_the_arena(tmp_path: Path) -> None:
    """`kill -9` of the process that started it leaves nothing, though the engine reads nothing."""
    script = tmp_path / "arena.py"
    script.write_text(
        "import asyncio, sys\n"
        "from agents.uci import UciProcess\n"
        "async def main():\n"
        f"    one = await UciProcess.start({[sys.executable, str(FAKE), 'hang']!r}, {{}})\n"
        "    print('ready', flush=True)\n"
        "    await one.prepare({}, 'x', ())\n"
        "    await one.search('go nodes 1', 600)\n"
        "asyncio.run(main())\n"
    )
    arena = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert arena.stdout is not None
    assert (await arena.stdout.readline()).strip() == b"ready"
    assert engines()
    arena.kill()
    await arena.wait()
    arena._transport.close()  # type: ignore[attr-defined]
    async with asyncio.timeout(20):
        while engines():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


# what is known before a run


def test_an_engine_says_what_it_is() -> None:
    identity = identify([sys.executable, str(FAKE), "fairy"])
    assert identity.name == "Fake 1"
    assert identity.options["hash"].high == 1024
    assert identity.variants == ("chess", "janggi")
    assert rules_of("janggi", "janggi", identity) == {"UCI_Variant": "janggi"}
    assert rules_of("chess", "standard", identity) == {"UCI_Variant": "chess"}
    with pytest.raises(ValueError, match="does not play chess960"):
        rules_of("chess", "chess960", identity)


@pytest.mark.parametrize("behaviour", ["child", "stubborn"])
def test_an_engine_that_is_only_asked_who_it_is_leaves_nothing(behaviour: str) -> None:
    """A child that keeps its output was waited for, and so was an engine that does not quit."""
    assert identify([sys.executable, str(FAKE), behaviour], 20).name == "Fake 1"


def test_a_greeting_without_end_is_no_engine_s() -> None:
    with pytest.raises(UciCrashed, match="over 1,048,576 bytes of something else"):
        identify([sys.executable, str(FAKE), "endless"])


async def test_a_guard_is_light() -> None:
    """It was all of `serving`, with aiohttp: 41 MiB and a second for each process."""
    async with playing("plain"):
        (guard,) = (
            process
            for process in psutil.process_iter(["cmdline"])
            if {str(FAKE), guard_file} <= set(process.info["cmdline"] or [])
        )
        used = guard.memory_full_info().uss
    assert used < 20 << 20


def test_stockfish_is_told_by_its_own_option_of_chess960() -> None:
    identity = UciIdentity.read(
        ["id name SF", "option name UCI_Chess960 type check default false", "noise"]
    )
    assert rules_of("chess", "chess960", identity) == {"UCI_Chess960": "true"}
    assert rules_of("chess", "standard", identity) == {"UCI_Chess960": "false"}
    with pytest.raises(ValueError, match="SF does not play janggi"):
        rules_of("janggi", "janggi", identity)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"skill_level": 21}, "skill_level: is 21; write a whole number from 0 to 20"),
        ({"uci_elo": 1500}, 'uci_elo: Fake 1 has no option "UCI_LimitStrength"'),
        ({"hash_mib": 2048}, "hash_mib: is 2048; write a whole number from 1 to 1024"),
        ({"options": {"Skil Levels": 3}}, 'did you mean "Skill Level"?'),
    ],
)
def test_an_option_that_the_engine_lacks_is_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=r"\w+") as seen:
        check_agent(config("plain", **values))
    assert told in str(seen.value)


def test_a_game_that_the_engine_does_not_play_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r'does not play janggi; write games = \["chess"\], or'):
        check_agent(config("plain"), [("chess", "standard"), ("janggi", "janggi")])
    check_agent(config("fairy"), [("chess", "standard"), ("janggi", "janggi")])


def test_a_program_with_a_slash_is_a_file_beside_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`./engine` was looked for on PATH."""
    here, on_path = tmp_path / "here", tmp_path / "on_path"
    for folder in (here, on_path):
        folder.mkdir()
        (folder / "engine").write_text("#!/bin/sh\n")
        (folder / "engine").chmod(0o755)
    monkeypatch.setenv("PATH", str(on_path))
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.chdir(here)
    assert find_program("engine") == str(on_path / "engine")
    assert find_program("./engine") == find_program("~/engine") == str(here / "engine")
    (here / "engine").unlink()
    assert find_program("./engine") is None
    for command, found in (
        ("engine", "engine"),
        ("./engine", f"{on_path}/engine"),
        ("../on_path/engine", f"{on_path}/../on_path/engine"),
        ("~/engine", f"{here}/engine"),
        (["./engine", "./net"], (f"{on_path}/engine", "./net")),
    ):
        table = {"kind": "uci", "name": "x", "command": command}
        anchored = parse_agent_config(table).anchored(on_path)
        assert isinstance(anchored, UciConfig)
        assert anchored.command == found


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["/no/such/engine"], "no such program"),
        (["no-such-engine"], "no such program"),
        (["true"], 'did not answer "uci" with "uciok"'),
        ([sys.executable, str(FAKE), "crash_at_start"], "uciok"),
    ],
)
def test_what_is_no_engine_is_refused(command: list[str], told: str) -> None:
    parsed = parse_agent_config({"kind": "uci", "name": "x", "command": command})
    with pytest.raises(ValueError, match=r"^command: ") as seen:
        check_agent(parsed)
    assert told in str(seen.value)


async def test_a_start_without_uciok_is_given_up() -> None:
    with pytest.raises(UciCrashed, match="code 9"):
        await UciProcess.start([sys.executable, str(FAKE), "crash_at_start"], {})
    with pytest.raises(UciLate, match=r'did not answer "uci" with "uciok" within 1 s'):
        await UciProcess.start([sys.executable, str(FAKE), "no_uciok"], {}, 1.0)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"nodes": 5, "depth": 3}, "a search has one limit"),
        ({"nodes": 0}, "greater than or equal to 1"),
        ({"random_moves": 1.5}, "less than or equal to 1"),
        ({"command": ""}, "write a program"),
        ({"command": []}, "write a program"),
        ({"options": {"Hash": 3}}, "set by hash_mib"),
        ({"options": {"A\nquit": 3}}, "cannot be told"),
        ({"threads": 0}, "greater than or equal to 1"),
        ({"games": []}, "at least 1"),
        ({"start_seconds": 0}, "greater than 0"),
    ],
)
def test_a_wrong_table_is_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        parse_agent_config({"kind": "uci", "name": "x", "command": "stockfish", **values})


@pytest.mark.parametrize(
    ("fen", "moves", "told"),
    [
        (None, ("pass", "pass"), ("e2e2", "e9e9")),
        (None, ("e2e3", "e9f9", "pass", "pass"), ("e2e3", "e9f9", "e3e3", "f9f9")),
        ("3k5/9/9/9/9/9/9/9/9/4K4 b - - 0 1", ("pass",), ("d10d10",)),
    ],
)
def test_a_pass_is_the_generals_own_square(
    fen: str | None, moves: tuple[str, ...], told: tuple[str, ...]
) -> None:
    game = load_game("janggi")
    start = game.openings("start", "janggi")[0] if fen is None else Start(fen, "janggi", "x")

    class Played:
        def __init__(self) -> None:
            self.start, self.moves = start, moves

    assert to_uci(Played()) == told  # type: ignore[arg-type]
    reached = game.position(start)
    for uci, move in zip(told, moves, strict=True):
        assert from_uci(uci, reached) == move
        reached = reached.play(move)


@pytest.mark.parametrize("move", ["a1a1", "e9e9", "c4c4", "e3e3"])
async def test_no_other_piece_passes_by_its_own_square(move: str) -> None:
    """An engine's `a1a1`, of a chariot, counted as a pass."""
    start = position("janggi", "janggi")
    assert from_uci(move, start) == move
    async with playing("fairy", move) as agent:
        decision = await agent.choose(turn(start, "janggi"))
    assert decision.fault is Fault.ENGINE_ILLEGAL
