"""A match pays for its players' failures and never for the infrastructure's."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from agents import Attempt, Decision, Fault, Interrupted, Turn
from arena.adjudication import AdjudicationRules
from arena.clock import ClockRules
from arena.config import parse
from arena.judging import Judge
from arena.match import MAX_TRIES, Match, MatchRules, Past, Player
from arena.pace import Pacer
from arena.progress import Progress
from arena.schedule import MatchSpec
from arena.store import MatchRow, Records, RunRow, Store, read
from arena.tournament import resumed_plan
from games import load_game
from serving import (
    EngineDead,
    EngineError,
    EngineStalled,
    EngineUnavailable,
    Finish,
    Overloaded,
    Reply,
    RequestRejected,
    Timings,
    Usage,
)
from tests.arena.random_runs import scheduled

FOOLS_MATE = ("f2f3", "e7e5", "g2g4", "d8h4")
Act = str | Exception | Fault
CONFIG = parse({"name": "r", "agents": [{"kind": "random", "name": n} for n in ("ann", "bob")]})
RUN = RunRow("r", "2026-01-01T00:00:00Z", "{}", "d", "{}")


def a_reply(text: str) -> Reply:
    return Reply(text, Finish.STOP, Usage(20, 5, 10), Timings(1.0, 1.0, None, 2.0, 0.0, 0.5, 0.5))


@dataclass
class Actor:
    """Does what it is told, in order: a move, an error to raise, a fault of its own."""

    acts: list[Act]
    evals: Mapping[str, int] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def choose(self, turn: Turn) -> Decision:
        self.turns.append(turn)
        act = self.acts.pop(0)
        tries = len(turn.made)
        request_id = f"{turn.match_id}/{turn.position.ply}/0/{tries}"
        if isinstance(act, EngineError):
            fault = Fault(act.kind)
            raise Interrupted((Attempt(0, None, fault, str(act), request_id),)) from act
        if isinstance(act, Exception):
            raise act
        if isinstance(act, Fault):
            attempt = Attempt(0, a_reply("x"), act, "no such square", request_id)
            return Decision(None, act, (attempt,))
        if act == "draw":
            return Decision(None, None, (Attempt(0, a_reply(act), None),), accepts_draw=True)
        move = act.removesuffix("(=)")
        made = (Attempt(0, a_reply(act), None, "", request_id, self.evals.get(move)),)
        return Decision(move, None, made, offers_draw=move != act)


@dataclass
class Table:
    """A match between two actors over a real store."""

    folder: Path
    first: list[Act]
    second: list[Act]
    max_plies: int | None = None
    clock: ClockRules | None = None
    adjudication: AdjudicationRules = field(default_factory=AdjudicationRules)
    draw_offers: bool = True
    judge: Judge | None = None
    evals: dict[str, int] = field(default_factory=dict)
    """Of the moves that come with a score."""
    pacer: Pacer = field(default_factory=Pacer)
    actors: tuple[Actor, Actor] = field(init=False)
    progress: Progress = field(default_factory=Progress)
    is_engine_ready: Callable[[], bool] = lambda: True

    def __post_init__(self) -> None:
        self.actors = (Actor(self.first, self.evals), Actor(self.second, self.evals))

    async def play(self, past: Past | None = None) -> MatchRow:
        game = load_game("chess")
        spec = MatchSpec(
            "m1", "p1", "chess", "standard", ("ann", "bob"), game.openings("start", "standard")[0]
        )
        if past is None:
            row = scheduled(0, spec.agents, (spec.game, spec.ruleset))
            past = Past(row._replace(id="m1", pair_id="p1", start_fen=spec.start.fen))
            store = Store.create(self.folder, RUN, [past.row])
        else:
            store = Store.resume(self.folder)
        players = (
            Player("ann", self.actors[0], "main", "free", self.is_engine_ready),
            Player("bob", self.actors[1], "main", "free", self.is_engine_ready),
        )
        rules = MatchRules(
            7, 0.0, 3, self.max_plies, self.clock, self.adjudication, self.draw_offers
        )
        match = Match(
            spec, game, players, rules, store, self.pacer, self.progress, past, self.judge
        )
        try:
            return await match.play()
        finally:
            await store.close()

    def records(self) -> Records:
        return read(self.folder)


async def test_a_game_is_played_to_its_end_and_every_ply_is_on_disk(tmp_path: Path) -> None:
    table = Table(tmp_path / "r", ["f2f3", "g2g4"], ["e7e5", "d8h4"])
    row = await table.play()
    assert (row.state, row.winner, row.termination) == ("finished", 1, "checkmate")
    held = table.records()
    assert held.matches == (row,)
    assert tuple(ply.move for ply in held.plies) == FOOLS_MATE
    assert [ply.notation for ply in held.plies] == ["f3", "e5", "g4", "Qh4#"]
    assert [ply.side for ply in held.plies] == [0, 1, 0, 1]
    assert all(ply.ready <= ply.due <= ply.done for ply in held.plies)
    assert [a.reply_text for a in held.attempts] == list(FOOLS_MATE)


@pytest.mark.parametrize(
    ("fault", "termination"),
    [
        (Fault.ILLEGAL, "forfeit"),
        (Fault.UNPARSABLE, "forfeit"),
        (Fault.TRUNCATED, "forfeit"),
        (Fault.FLAG_FALL, "flag_fall"),
        (Fault.RESIGNED, "resignation"),
    ],
)
async def test_a_player_s_failure_costs_the_game_and_is_on_record(
    tmp_path: Path, fault: Fault, termination: str
) -> None:
    table = Table(tmp_path / "r", ["e2e4"], [fault])
    row = await table.play()
    assert (row.state, row.winner, row.termination) == ("finished", 0, termination)
    assert row.detail is not None
    assert "no such square" in row.detail
    held = table.records()
    assert len(held.plies) == 1
    assert held.attempts[-1].fault == fault.value


@pytest.mark.parametrize(
    "error",
    [
        EngineDead("worker gone"),
        EngineStalled("no step"),
        EngineUnavailable("cut"),
        Overloaded("full"),
    ],
)
async def test_an_engine_s_failure_costs_nothing(tmp_path: Path, error: EngineError) -> None:
    table = Table(tmp_path / "r", ["f2f3", error, error, "g2g4"], ["e7e5", "d8h4"])
    row = await table.play()
    assert (row.winner, row.termination) == (1, "checkmate")
    held = table.records()
    assert [a.fault for a in held.attempts if a.ply == 2] == [error.kind, error.kind, None]
    assert len({a.request_id for a in held.attempts}) == len(held.attempts)
    third_try = table.actors[0].turns[-1]
    assert [a.fault for a in third_try.made] == [Fault(error.kind)] * 2
    kinds = [event.kind for event in held.events if event.kind.startswith("match_")]
    waits = isinstance(error, Overloaded)
    assert kinds == ([] if waits else ["match_suspended", "match_resumed"])
    assert (row.suspended_s > 0) is not waits


async def test_a_draw_that_is_offered_and_accepted(tmp_path: Path) -> None:
    table = Table(tmp_path / "r", ["e2e4", "d2d4(=)"], ["e7e5", "draw"])
    row = await table.play()
    assert (row.state, row.winner, row.termination) == ("finished", None, "draw_agreed")
    assert row.detail == "Black accepted the draw that was offered"
    held = table.records()
    assert [ply.offers_draw for ply in held.plies] == [0, 0, 1]
    assert held.attempts[-1].reply_text == "draw"
    assert [turn.is_draw_offered for turn in table.actors[1].turns] == [False, True]


async def test_an_offer_stands_until_the_next_move(tmp_path: Path) -> None:
    table = Table(tmp_path / "r", ["f2f3(=)", "g2g4"], ["e7e5", "d8h4"])
    assert (await table.play()).termination == "checkmate"
    assert [turn.is_draw_offered for turn in table.actors[1].turns] == [True, False]
    assert [turn.is_draw_offered for turn in table.actors[0].turns] == [False, False]


async def test_an_offer_survives_the_process(tmp_path: Path) -> None:
    pacer = Pacer()
    table = Table(tmp_path / "r", ["e2e4(=)"], [ValueError("stop here")], pacer=pacer)
    assert (await table.play()).state == "suspended"
    held = table.records()
    again = Table(tmp_path / "r", [], ["draw"])
    row = await again.play(Past(held.matches[0], held.plies, (), (None,)))
    assert (row.state, row.termination) == ("finished", "draw_agreed")
    assert [turn.is_draw_offered for turn in again.actors[1].turns] == [True]


async def test_accepting_too_late_is_a_flag_that_fell(tmp_path: Path) -> None:
    for base_s, termination, winner in ((0.5, "flag_fall", 0), (1.5, "draw_agreed", None)):
        folder = tmp_path / termination
        begun = Table(folder, ["e2e4(=)"], [ValueError("stop here")])
        await begun.play()
        held = begun.records()
        table = Table(folder, [], ["draw"], clock=ClockRules("fischer", base_s))
        row = await table.play(Past(held.matches[0], held.plies, (), (None,)))
        assert (row.termination, row.winner) == (termination, winner)


@pytest.mark.parametrize(
    ("first", "second", "draw_offers", "why"),
    [
        (["e2e4"], ["draw"], True, "it was not offered"),
        (["e2e4(=)"], ["e7e5"], False, "tournament.draw_offers is false"),
    ],
)
async def test_an_agent_s_mistake_about_draws_is_no_player_s_fault(
    tmp_path: Path, first: list[Act], second: list[Act], draw_offers: bool, why: str
) -> None:
    table = Table(tmp_path / "r", first, second, draw_offers=draw_offers)
    row = await table.play()
    assert row.state == "suspended"
    assert why in (row.detail or "")


async def test_a_clock_is_charged_what_the_engine_reports_and_stands_with_each_ply(
    tmp_path: Path,
) -> None:
    table = Table(
        tmp_path / "r", ["f2f3", "g2g4"], ["e7e5", "d8h4"], clock=ClockRules("fischer", 5.0, 0.25)
    )
    await table.play()
    assert [ply.clock_left_s for ply in table.records().plies] == [4.25, 4.25, 3.5, 3.5]
    assert [turn.clock_left_s for turn in table.actors[0].turns] == [5.0, 4.25]


async def test_a_flag_that_falls_names_its_cause_and_the_move_does_not_count(
    tmp_path: Path,
) -> None:
    table = Table(tmp_path / "r", ["f2f3", "g2g4"], ["e7e5"], clock=ClockRules("fischer", 1.5))
    row = await table.play()
    assert (row.winner, row.termination) == (1, "flag_fall")
    assert row.detail == (
        "White ran out of time: its move took 1.00 s (0.50 s prefill, 0.50 s decode), and 0.50 s "
        "were left"
    )
    held = table.records()
    assert [ply.move for ply in held.plies] == ["f2f3", "e7e5"]
    assert (held.attempts[-1].fault, held.attempts[-1].reply_text) == ("flag_fall", "g2g4")


async def test_the_infrastructures_failures_stop_the_clock(tmp_path: Path) -> None:
    table = Table(
        tmp_path / "r",
        ["f2f3", EngineUnavailable("cut"), EngineUnavailable("cut"), "g2g4"],
        ["e7e5", "d8h4"],
        clock=ClockRules("fischer", 2.0),
    )
    row = await table.play()
    assert (row.winner, row.termination) == (1, "checkmate")
    assert [ply.clock_left_s for ply in table.records().plies] == [1.0, 1.0, 0.0, 0.0]


async def test_a_resumed_match_goes_on_with_the_clock_and_the_scores_it_had(
    tmp_path: Path,
) -> None:
    evals = {"e2e4": 600, "e7e5": -700, "g1f3": 800, "b8c6": -900}
    table = Table(
        tmp_path / "r",
        ["e2e4"],
        ["e7e5"],
        clock=ClockRules("fischer", 5.0),
        adjudication=AdjudicationRules(resign_score_cp=500, resign_moves=2),
        evals=evals,
    )
    table.first.append(RequestRejected("left for resume"))
    assert (await table.play()).state == "suspended"
    again = replace(table, first=["g1f3"], second=["b8c6"])
    held = again.records()
    past = resumed_plan(CONFIG, held).pasts["m1"]
    assert past.evals == [600, -700]
    row = await again.play(past)
    assert (row.winner, row.termination) == (0, "adjudicated_win")
    assert row.detail is not None
    assert "both sides saw Black lost by 500 centipawns" in row.detail
    assert [ply.clock_left_s for ply in again.records().plies] == [4.0, 4.0, 3.0, 3.0]


async def test_a_request_that_is_never_taken_leaves_the_match_unfinished(tmp_path: Path) -> None:
    table = Table(tmp_path / "r", ["e2e4"], [RequestRejected("4000 tokens into 2048")])
    row = await table.play()
    assert (row.state, row.winner) == ("suspended", None)
    assert row.detail == "4000 tokens into 2048"


async def test_an_engine_that_is_gone_for_good_is_told_to_the_run(tmp_path: Path) -> None:
    table = Table(tmp_path / "r", ["e2e4"], [EngineDead("3 restarts", final=True)])
    row = await table.play()
    assert row.state == "suspended"
    assert table.progress.engine_failure == "3 restarts"


async def test_faults_without_end_leave_the_match_for_later(tmp_path: Path) -> None:
    errors: list[Act] = [EngineUnavailable("cut") for _ in range(MAX_TRIES)]
    table = Table(tmp_path / "r", errors, [])
    table.pacer.until = _at_once  # type: ignore[method-assign]
    row = await table.play()
    assert row.state == "suspended"
    assert row.detail is not None
    assert "8 infrastructure faults in a row" in row.detail


async def _at_once(due: float) -> bool:
    return True


@pytest.mark.parametrize("act", [RuntimeError("bug"), "a1a8"])
async def test_a_bug_in_an_agent_costs_no_player_a_game(tmp_path: Path, act: Act) -> None:
    table = Table(tmp_path / "r", ["e2e4"], [act])
    row = await table.play()
    assert (row.state, row.winner) == ("suspended", None)
    assert row.detail is not None
    assert "agent bob" in row.detail


async def test_cancellation_passes_through(tmp_path: Path) -> None:
    table = Table(tmp_path / "r", ["e2e4"], [])
    asked = asyncio.Event()

    async def choose_for_ever(turn: Turn) -> Decision:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    table.actors[1].choose = choose_for_ever  # type: ignore[method-assign]
    task = asyncio.ensure_future(table.play())
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(table.records().plies) == 1


async def test_the_ply_cap_is_the_arena_s_decision(tmp_path: Path) -> None:
    table = Table(tmp_path / "r", ["e2e4"], ["e7e5"], max_plies=2)
    row = await table.play()
    assert (row.state, row.winner, row.termination) == ("finished", None, "ply_cap")


async def test_a_stopped_run_leaves_the_match_at_its_last_ply(tmp_path: Path) -> None:
    table = Table(tmp_path / "r", ["e2e4", "g1f3"], ["e7e5"])
    choose = table.actors[1].choose

    async def choose_then_stop(turn: Turn) -> Decision:
        table.pacer.stop()
        return await choose(turn)

    table.actors[1].choose = choose_then_stop  # type: ignore[method-assign]
    row = await table.play()
    assert (row.state, row.detail) == ("suspended", "the run was stopped")
    assert [ply.move for ply in table.records().plies] == ["e2e4", "e7e5"]


def _past(records: Records) -> Past:
    return resumed_plan(CONFIG, records).pasts["m1"]


async def _resumed(folder: Path, first: Sequence[Act], second: Sequence[Act]) -> Table:
    table = Table(folder, list(first), list(second))
    await table.play(_past(read(folder)))
    return table


async def test_a_match_goes_on_mid_game_from_what_the_store_holds(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    await Table(folder, ["f2f3", RequestRejected("later")], ["e7e5"]).play()
    table = await _resumed(folder, ["g2g4"], ["d8h4"])
    (row,) = table.records().matches
    assert (row.state, row.winner, row.termination) == ("finished", 1, "checkmate")
    assert tuple(ply.move for ply in table.records().plies) == FOOLS_MATE
    first_turn = table.actors[0].turns[0]
    assert first_turn.position.moves == ("f2f3", "e7e5")
    assert [a.fault for a in first_turn.made] == [Fault.REJECTED]


async def test_time_between_processes_is_not_the_match_s(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    await Table(folder, ["f2f3", RequestRejected("later")], ["e7e5"]).play()
    for _ in range(3):
        await _resumed(folder, [RequestRejected("later again")], [])
    table = await _resumed(folder, ["g2g4"], ["d8h4"])
    (row,) = table.records().matches
    assert row.state == "finished"
    assert row.started is not None
    assert row.ended is not None
    assert row.suspended_at is None
    assert 0 < row.suspended_s < row.ended - row.started


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        (None, "no Decision"),
        ("e7e5", "no Decision"),
        (Decision(None, None, ()), "no move and no fault"),
        (Decision(None, Fault.STALLED, ()), "no move and no fault of its own"),
    ],
)
async def test_what_an_own_agent_gets_wrong_costs_no_player_a_game(
    tmp_path: Path, decision: Decision, said: str
) -> None:
    table = Table(tmp_path / "r", ["e2e4"], [])

    async def choose(turn: Turn) -> Decision:
        return decision

    table.actors[1].choose = choose  # type: ignore[method-assign]
    row = await table.play()
    assert (row.state, row.winner) == ("suspended", None)
    assert row.detail is not None
    assert said in row.detail


async def test_an_engine_error_passed_on_as_it_is_stands_in_the_records(tmp_path: Path) -> None:
    table = Table(tmp_path / "r", ["f2f3", "g2g4"], ["e7e5", "d8h4"])
    choose, raised = table.actors[1].choose, [EngineStalled("one"), Overloaded("two")]

    async def choose_after_faults(turn: Turn) -> Decision:
        if raised:
            raise raised.pop(0)
        return await choose(turn)

    table.actors[1].choose = choose_after_faults  # type: ignore[method-assign]
    row = await table.play()
    assert row.termination == "checkmate"
    faults = [a.fault for a in table.records().attempts]
    assert faults.count("stalled") == faults.count("overloaded") == 1


async def test_waiting_for_an_engine_that_is_down_is_suspension(tmp_path: Path) -> None:
    table = Table(tmp_path / "r", ["f2f3", "g2g4"], ["e7e5", "d8h4"])
    table.is_engine_ready = iter([True, True, False, True]).__next__
    row = await table.play()
    assert row.termination == "checkmate"
    kinds = [e.kind for e in table.records().events if e.kind.startswith("match_")]
    assert kinds == ["match_suspended", "match_resumed"]


async def test_text_that_sqlite_cannot_hold_leaves_the_run_readable(tmp_path: Path) -> None:
    table = Table(tmp_path / "r", ["e2e4"], [RuntimeError("\ud800 and \0")])
    await table.play()
    (row,) = table.records().matches
    assert row.state == "suspended"
