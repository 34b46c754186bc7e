"""A UCI engine is a player: what it does wrong is its own, and leaves no process."""

import asyncio
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
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
from agents.uci import MATE_CP, UciCrashed, UciIdentity, UciLate, UciProcess, identify
from agents.uci_agent import from_uci, rules_of, to_uci
from games import Position, Start, load_game

FAKE = Path(__file__).with_name("fake_uci.py")


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


@pytest.mark.parametrize("behaviour", ["plain", "crlf", "flood", "fairy"])
async def test_a_legal_move_is_played_with_its_score(behaviour: str) -> None:
    decision = await choose(behaviour, "e7e5")
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
    decision = await choose("plain")  # "bestmove ponder a7a6"
    assert decision.fault is Fault.ENGINE_ILLEGAL


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [("crash", "signal 9"), ("exit", "code 3"), ("long_line", "a line of over")],
)
async def test_a_crash_is_its_own_and_the_next_game_has_a_new_process(
    behaviour: str, told: str
) -> None:
    async with playing(behaviour, "e7e5") as agent:
        for _ in range(2):
            decision = await agent.choose(turn(position("chess", "standard", "e2e4")))
            assert (decision.move, decision.fault) == (None, Fault.ENGINE_CRASH)
            assert told in decision.attempts[0].detail


@pytest.mark.parametrize("clock_left_s", [None, 0.3])
async def test_silence_is_a_flag_that_fell(clock_left_s: float | None) -> None:
    limit_s = 0.3 if clock_left_s is None else 20.0
    async with playing("hang", limit_s=limit_s) as agent:
        asked = time.monotonic()
        decision = await agent.choose(turn(position(), clock_left_s=clock_left_s))
        assert decision.fault is Fault.FLAG_FALL
        assert "no move within 0.3 s" in decision.attempts[0].detail
        assert time.monotonic() - asked < 10


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
        "    await one.search({}, 'x', (), 'go nodes 1', 600)\n"
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


async def test_a_start_without_uciok_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UciCrashed, match="code 9"):
        await UciProcess.start([sys.executable, str(FAKE), "crash_at_start"], {})
    monkeypatch.setattr("agents.uci.START_LIMIT_S", 1.0)
    with pytest.raises(UciLate, match="not ready within"):
        await UciProcess.start([sys.executable, str(FAKE), "no_uciok"], {})


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
    assert [from_uci(move) for move in told] == list(moves)
