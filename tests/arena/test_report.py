"""Figures from records made by hand, each worked out beside it."""

import io
import json
from typing import Any

import pytest

from arena import report
from arena.report import build
from arena.store import AttemptRow, EventRow, MatchRow, PlyRow, Records, RunRow, SampleRow
from arena.terminal import print_report

CONFIG: dict[str, Any] = {
    "name": "by-hand",
    "pace": {"move_period_seconds": 1.0},
    "slo": {"move_seconds": 1.0},
    "engines": {
        "main": {"kind": "scripted", "max_concurrent": 8, "max_queued": 8, "context_tokens": 2048}
    },
    "agents": [
        {"name": name, "kind": "llm", "engine": "main", "mode": "constrained"}
        for name in ("ann", "bob")
    ],
    "tournament": {"parallel_matches": 1, "max_plies": 40},
}


def a_match(**changes: object) -> MatchRow:
    values: dict[str, object] = {
        "id": "m1",
        "pair_id": "p1",
        "game": "chess",
        "ruleset": "standard",
        "agent_first": "ann",
        "agent_second": "bob",
        "start_fen": "fen",
        "opening": "",
        "state": "finished",
        "winner": 1,
        "termination": "checkmate",
        "detail": "mate",
        "score_first": None,
        "score_second": None,
        "started": 10.0,
        "ended": 13.0,
        "suspended_at": None,
        "suspended_s": 1.0,
        "number": 0,
    }
    return MatchRow(**{**values, **changes})  # type: ignore[arg-type]


def an_attempt(ply: int, at: float, **changes: object) -> AttemptRow:
    values: dict[str, object] = {
        "request_id": f"m1/{ply}/0/0",
        "match_id": "m1",
        "ply": ply,
        "side": ply % 2,
        "n": 0,
        "engine": "main",
        "mode": "constrained",
        "reply_text": "e2e4",
        "finish": "stop",
        "fault": None,
        "detail": "",
        "prompt_tokens": 100,
        "cached_tokens": 80,
        "completion_tokens": 5,
        "submitted": at - 0.4,
        "admitted": at - 0.3,
        "first_token": None,
        "done": at,
        "queue_s": 0.01,
        "prefill_s": 0.09,
        "decode_s": 0.2,
        "step_requests_mean": 2.0,
        "replica": None,
    }
    return AttemptRow(**{**values, **changes})  # type: ignore[arg-type]


def records() -> Records:
    """Two plies: due at 10.5 and 11.5, decided 0.45 s and 1.45 s later, committed 5 ms after."""
    plies = (
        PlyRow("m1", 0, 0, "e2e4", "e4", "fen", None, 10.0, 10.5, 10.95),
        PlyRow("m1", 1, 1, "e7e5", "e5", "fen", None, 10.955, 11.5, 12.95),
    )
    attempts = (
        an_attempt(0, 10.94),
        an_attempt(1, 11.94, request_id="m1/1/0/0", fault="illegal", cached_tokens=90),
        an_attempt(1, 12.94, request_id="m1/1/1/0", n=1, cached_tokens=100),
    )
    sample = SampleRow("main", 10.0, "per_step", 1, None, 2, 0, 2, 50, 0.1, 100, 80, 0, 1)
    later = SampleRow("main", 12.0, "per_step", 3, None, 4, 0, 4, 90, 0.2, 200, 170, 2, 1)
    after_restart = SampleRow("main", 12.5, "per_step", 1, None, 1, 0, 4, 90, 0.2, 10, 5, 1, 0)
    ready = json.dumps({"engine": "main", "kind": "scripted", "version": "1"})
    restarted = json.dumps({"engine": "main", "restarts": 1})
    return Records(
        RunRow("r", "2026-01-01T00:00:00Z", json.dumps(CONFIG), "d", "{}"),
        (a_match(),),
        plies,
        attempts,
        (sample, later, after_restart),
        (EventRow(0.0, "engine_ready", ready), EventRow(12.2, "engine_restarted", restarted)),
    )


def test_totals() -> None:
    report = build(records())
    assert report["matches"] == {"scheduled": 0, "running": 0, "suspended": 0, "finished": 1}
    assert report["plies"] == 2
    assert report["elapsed_s"] == pytest.approx(3.0)
    assert report["moves_per_s"] == pytest.approx(2 / 3)
    assert report["games_per_h"] == pytest.approx(1200)
    assert report["slo_attainment"] == pytest.approx(0.5)  # the second took 1.45 s
    # 2 seconds running (3 less 1 suspended) allow 4 plies, each seat 2
    assert report["pace_attainment"] == pytest.approx(0.5)
    assert report["min_seat_attainment"] == pytest.approx(0.5)


def test_a_move_s_latency_is_split_and_its_parts_add_up() -> None:
    ann, bob = build(records())["agents"]
    assert (ann["name"], ann["mode"], ann["moves"]) == ("ann", "constrained", 1)
    assert ann["latency_ms"]["p50"] == pytest.approx(450)
    assert ann["prefill_ms"]["p50"] == pytest.approx(90)
    # 450 less 300 in the engine, 100 in our queue, and the commit's 5
    assert ann["harness_ms"]["p50"] == pytest.approx(55)
    assert bob["decode_ms"]["p50"] == pytest.approx(400)  # both attempts
    assert bob["faults"] == {"illegal": 1}
    assert ann["faults"] == {}


def test_schedule_lag_is_from_due_to_submitted() -> None:
    lag = build(records())["schedule_lag_ms"]
    assert lag["p50"] == pytest.approx(40)  # 10.54 - 10.5, and 11.54 - 11.5


def test_engine_figures() -> None:
    (engine,) = build(records())["engines"]
    assert engine["step_requests"]["mean"] == pytest.approx((2 + 3 * 4 + 4) / 5)
    assert engine["occupancy"]["max"] == pytest.approx(0.5)
    assert engine["prefix_hit_rate"] == pytest.approx(270 / 300)
    # 20 for the first ply, 10 + 0 for the second's two attempts
    assert engine["uncached_prompt_tokens_per_move"] == {"chess": pytest.approx(15)}
    assert engine["output_tokens_per_move"] == pytest.approx(7.5)  # 15 tokens, 2 moves
    assert engine["preemptions"] == 3  # 2, then 1 of the process after the restart
    assert (engine["rejected"], engine["restarts"], engine["version"]) == (1, 1, "1")


def test_an_infrastructure_fault_is_no_part_of_the_harness_and_is_counted() -> None:
    held = records()
    cut = an_attempt(
        0,
        10.6,
        request_id="m1/0/0/x",
        fault="engine_dead",
        reply_text=None,
        finish=None,
        prompt_tokens=None,
        cached_tokens=None,
        completion_tokens=None,
        submitted=None,
        admitted=None,
        done=None,
        queue_s=None,
        prefill_s=None,
        decode_s=None,
    )
    report = build(
        Records(held.run, held.matches, held.plies, (cut, *held.attempts), held.samples, ())
    )
    assert report["infrastructure_faults"] == {"engine_dead": 1}
    assert report["agents"][0]["harness_ms"]["p50"] is None
    assert report["agents"][0]["latency_ms"]["p50"] == pytest.approx(450)


def test_a_resume_between_two_plies_is_no_harness_time() -> None:
    held = records()
    late = held.plies[1]._replace(ready=40.0, due=40.0, done=40.4)
    began = EventRow(39.0, "process_start", "{}")
    report = build(held._replace(plies=(held.plies[0], late), events=(began,)))
    assert report["agents"][0]["harness_ms"]["max"] == pytest.approx(50)


def test_a_match_that_starves_shows() -> None:
    held = records()
    starving = a_match(state="running", winner=None, termination=None, ended=None)
    sample = held.samples[0]._replace(at=40.0)
    report = build(held._replace(matches=(starving,), samples=(*held.samples, sample)))
    # 29 seconds running allow 58 plies
    assert report["pace_attainment"] == pytest.approx(2 / 58)
    assert report["min_seat_attainment"] == pytest.approx(1 / 29)


def test_standings_and_results() -> None:
    report = build(records())
    assert [(s["name"], s["points"]) for s in report["standings"]] == [("bob", 1.0), ("ann", 0.0)]
    assert report["results"][0]["winner"] == "bob"
    (pairing,) = report["pairings"]
    counts = {
        "game": "chess",
        "agent": "ann",
        "opponent": "bob",
        "wins": 0,
        "draws": 0,
        "losses": 1,
    }
    assert counts.items() <= pairing.items()
    assert pairing["pairs"] == {"ll": 0, "ld": 0, "wl": 0, "dd": 0, "wd": 0, "ww": 0}
    assert pairing["elo"]["low"] < pairing["elo"]["value"] < 0 < pairing["elo"]["high"]
    assert 0 < pairing["los"] < 0.5


def test_a_forfeit_is_a_loss_and_no_lack_of_skill() -> None:
    held = records()
    games = (
        a_match(winner=1, termination="forfeit"),
        a_match(id="m2", agent_first="bob", agent_second="ann", winner=None, number=1),
    )
    report = build(held._replace(matches=games))
    bob, ann = report["standings"]
    assert (ann["name"], ann["protocol_score"]["value"], bob["protocol_score"]["value"]) == (
        "ann",
        0.5,
        1.0,
    )
    assert ann["elo"] == pytest.approx(-bob["elo"])
    assert ann["elo"] < ann["skill_elo"] == pytest.approx(0)
    assert ann["elo_error"] > 0
    assert report["pairings"][0]["pairs"]["ld"] == 1
    assert report["ratings"][0]["groups"] == [["ann", "bob"]]
    assert report["ratings"][0]["los"][0][0] is None
    json.dumps(report, allow_nan=False)


def test_a_run_that_has_not_begun_has_unknowns_not_zeros() -> None:
    held = records()
    waiting = a_match(state="scheduled", winner=None, started=None, ended=None, termination=None)
    report = build(Records(held.run, (waiting,), (), (), (), ()))
    assert report["elapsed_s"] is None
    assert report["moves_per_s"] is None
    assert report["pace_attainment"] is None
    assert report["engines"][0]["prefix_hit_rate"] is None
    assert report["engines"][0]["preemptions"] is None
    json.dumps(report)


def test_a_forfeit_tells_the_failure_that_decided_it() -> None:
    """The last one of its own; what the infrastructure did counts for nothing."""
    faults = ("ambiguous", "illegal", "overloaded")
    attempts = tuple(an_attempt(3, 12.0, n=n, fault=fault) for n, fault in enumerate(faults))
    lost = a_match(termination="forfeit", winner=0)
    report = build(records()._replace(matches=(lost,), plies=(), attempts=attempts))
    assert [row["fault"] for row in report["results"]] == ["illegal"]
    forfeits = {row["name"]: row["forfeits"] for row in report["standings"]}
    assert forfeits == {"ann": {}, "bob": {"illegal": 1}}


@pytest.mark.parametrize(
    ("termination", "fault"),
    [("flag_fall", "flag_fall"), ("forfeit", "forfeit"), ("checkmate", None)],
)
def test_a_loss_without_recorded_tries_tells_how_it_ended(
    termination: str, fault: str | None
) -> None:
    report = build(
        records()._replace(matches=(a_match(termination=termination),), plies=(), attempts=())
    )
    assert report["results"][0]["fault"] == fault


def test_a_flag_that_fell_in_a_saturated_engine_counts_in_no_rating(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fallen = records()._replace(matches=(a_match(termination="flag_fall", winner=1),))
    (rated,) = build(fallen)["results"]
    assert rated["is_rated"]
    monkeypatch.setattr(report, "saturated_engines", lambda figures: {"main"})
    told = build(fallen)
    (row,) = told["results"]
    assert (row["is_rated"], row["fault"]) == (False, "flag_fall")
    assert [(row["games"], row["elo"]) for row in told["standings"]] == [(1, None), (1, None)]


def played(number: int, first: str, second: str, winner: int | None, **changes: object) -> MatchRow:
    """The two games of a pair have numbers 2k and 2k + 1."""
    return a_match(
        id=f"m{number}",
        pair_id=f"p{number // 2}",
        number=number,
        agent_first=first,
        agent_second=second,
        winner=winner,
        **changes,
    )


def of_config(matches: list[MatchRow], **config: Any) -> Records:
    run = records().run
    asked = CONFIG["tournament"] | config.pop("tournament", {})
    text = json.dumps({**CONFIG, "tournament": asked, **config})
    return records()._replace(
        run=run._replace(config_json=text), matches=tuple(matches), plies=(), attempts=()
    )


def text_of(told: dict[str, Any]) -> str:
    out = io.StringIO()
    print_report(told, out)
    return " ".join(out.getvalue().split())


def test_a_test_leaves_out_pairs_with_an_unrated_game_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ann wins six pairs, five of them by a flag that fell in a saturated engine."""
    matches = []
    for number in range(12):
        is_fallen = number < 10 and number % 2 == 0
        names = ("ann", "bob") if number % 2 == 0 else ("bob", "ann")
        ending = "flag_fall" if is_fallen else "checkmate"
        matches.append(played(number, *names, number % 2, termination=ending))
    held = of_config(matches, sprt={"elo0": 0, "elo1": 100, "alpha": 0.3, "beta": 0.3})
    (test,) = build(held)["sprt"]
    assert (test["decision"], test["run_decision"]) == ("accept", "accept")
    assert (test["pairs"], test["unrated_pairs"]) == (4, 0)
    assert "not rated" not in text_of(build(held))
    monkeypatch.setattr(report, "saturated_engines", lambda figures: {"main"})
    (test,) = build(held)["sprt"]
    assert (test["decision"], test["run_decision"]) == ("continue", "accept")
    assert (test["pairs"], test["unrated_pairs"]) == (1, 5)
    assert (
        "the test of ann v bob leaves out 5 pairs with a game that is not rated; the run went by "
        "all pairs, which say: H1 accepted (elo1 100)."
    ) in text_of(build(held))


def test_a_test_s_interval_may_have_no_bound() -> None:
    """-2000 was printed as one."""
    matches = [
        played(
            number,
            *(("ann", "bob") if number % 2 == 0 else ("bob", "ann")),
            None if number % 14 == 7 else 1 - number % 2,
        )
        for number in range(88)
    ]
    told = build(of_config(matches, sprt={"elo0": -400, "elo1": -300}))
    (test,) = told["sprt"]
    assert (test["pairs"], test["decision"]) == (44, "reject")
    assert test["elo"]["low"] is None
    assert test["elo"]["value"] < test["elo"]["high"] < -300
    assert "no lower bound to -3" in text_of(told)


def test_pairings_name_players_as_their_tests_do() -> None:
    """In the alphabet they once stood in the opposite order, with the opposite sign."""
    matches = [
        played(number, *(("bob", "ann") if number % 2 == 0 else ("ann", "bob")), number % 2)
        for number in range(8)
    ]
    held = of_config(
        matches,
        agents=[{"name": "bob", "kind": "random"}, {"name": "ann", "kind": "random"}],
        sprt={"elo0": 0, "elo1": 300},
    )
    told = build(held)
    (test,), (pairing,) = told["sprt"], told["pairings"]
    assert (test["agent"], test["opponent"]) == (pairing["agent"], pairing["opponent"])
    assert test["elo"]["value"] > 0
    assert pairing["elo"]["value"] > 0
    assert "free of the bias that an early stop brings" in text_of(told)


def test_an_anchor_s_rating_is_that_of_the_game() -> None:
    matches = [
        *(played(n, "ann", "bob", n % 2) for n in range(4)),
        *(played(n, "ann", "bob", n % 2, game="janggi", ruleset="standard") for n in range(4, 8)),
    ]
    anchors = {"ann": {"chess": 800, "janggi": 600}, "bob": {"chess": 750}}
    told = build(of_config(matches, tournament={"anchors": anchors}))["standings"]
    elo = {(row["game"], row["name"]): row["elo"] for row in told}
    assert (elo["chess", "ann"], elo["chess", "bob"]) == (800, 750)
    assert elo["janggi", "ann"] == 600
    assert abs(elo["janggi", "bob"] - 600) < 1


def test_a_stored_test_that_is_refused_today_does_not_break_the_report() -> None:
    held = of_config([played(0, "ann", "bob", 0)], sprt={"elo0": -1e5, "elo1": 1e5})
    assert build(held)["sprt"] == []


def between_anchors() -> list[MatchRow]:
    """Cid wins every game against ann and loses every one against bob."""
    return [
        played(number, *names, names.index(winner))
        for number, (names, winner) in enumerate(
            [(("ann", "cid"), "cid"), (("cid", "ann"), "cid")] * 6
            + [(("bob", "cid"), "bob"), (("cid", "bob"), "bob")] * 6
        )
    ]


def test_anchors_that_contradict_the_games_are_told() -> None:
    for anchors, is_credible in (({"ann": 3000, "bob": 0}, False), ({"ann": 0, "bob": 3000}, True)):
        told = build(of_config(between_anchors(), tournament={"anchors": anchors}))
        assert told["ratings"][0]["anchor_fit"]["is_credible"] == is_credible
        assert ("the anchors do not fit the games" in text_of(told)) == (not is_credible)
    assert build(records())["ratings"][0]["anchor_fit"] is None


def test_ratings_that_are_not_found_leave_the_rest_of_the_report() -> None:
    """Anchors so far apart are refused at load; runs of before hold them."""
    told = build(of_config(between_anchors(), tournament={"anchors": {"ann": 0, "bob": 1e6}}))
    (rated,) = told["ratings"]
    assert "too little" in rated["failure"]
    assert [(row["points"], row["elo"]) for row in told["standings"]] == [
        *((12, None), (12, None), (0, None))
    ]
    assert f"some or all ratings are missing: {rated['failure']}." in text_of(told)


def test_normalised_elo_is_unknown_of_few_pairs() -> None:
    matches = [
        played(number, *(("ann", "bob") if number % 2 == 0 else ("bob", "ann")), winner)
        for number, winner in enumerate([0, None, 0, 0, None, None] * 20)
    ]
    few, many = (build(of_config(matches[:end]))["pairings"][0] for end in (6, 120))
    assert few["nelo"] is None
    assert many["nelo"]["low"] < many["nelo"]["value"] < many["nelo"]["high"]
