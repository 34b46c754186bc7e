"""Who stands where: by the format, with what parts equal points, each worked out beside it."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from arena.placing import GameScore, knockout_winner, order_of, placed, tie_breaks
from arena.report import build
from arena.store import EventRow, Records
from tests.arena.test_report import a_match, records


def run_of(format_: str, games: Sequence[tuple[str, str, int | None]], **changes: Any) -> Records:
    """A finished run of these games (names, winner's side), two a pair."""
    held = records()
    config = json.loads(held.run.config_json)
    config["tournament"] |= {"format": format_, "pairs": 1, **changes.get("tournament", {})}
    if "sprt" in changes:
        config["sprt"] = changes["sprt"]
    matches = tuple(
        a_match(
            **{"id": f"m{n}", "pair_id": f"p{n // 2}", "number": n, "winner": winner},
            **{"agent_first": one, "agent_second": two},
        )
        for n, (one, two, winner) in enumerate(games)
    )
    events = tuple(
        EventRow(0.0, kind, json.dumps(told)) for kind, told in changes.get("events", ())
    )
    run = held.run._replace(config_json=json.dumps(config))
    return held._replace(run=run, matches=matches, plies=(), attempts=(), events=events)


def order(run: Records) -> list[tuple[str, int | None]]:
    return [(row["name"], row["place"]) for row in build(run)["standings"]]


def tie(round_: int, number: int, winner: str, loser: str) -> tuple[str, dict[str, Any]]:
    told = {"game": "chess", "round": round_, "tie": number, "agents": [loser, winner]}
    return "tie_decided", {**told, "points": [0.0, 2.0], "winner": winner, "by": "score"}


def bye(name: str, round_: int = 1, points: float = 0.0) -> tuple[str, dict[str, Any]]:
    return "bye", {"game": "chess", "round": round_, "agent": name, "points": points}


def test_a_gauntlet_and_a_ladder_are_ordered_by_elo_not_by_points() -> None:
    """Who plays all others has the most games, and so the most points."""
    games = [
        ("busy", other, side)
        for other in ("a", "b", "c")
        for side in ((1, 1, 0, 1) if other == "a" else (0, 1, 0, 1))
    ]
    for format_ in ("gauntlet", "ladder"):
        (first, second, *_) = order(run_of(format_, games))
        assert (first, second) == (("a", 1), ("busy", 2))
    assert order(run_of("round_robin", games))[0] == ("busy", 1)


def test_a_round_robin_that_stops_early_is_ordered_by_elo() -> None:
    config = {"tournament": {"format": "round_robin"}}
    assert order_of(config) == "points"
    assert order_of({**config, "sprt": {"elo0": 0}}) == "elo"
    assert order_of({}) == "points"


def test_players_whom_nothing_tells_apart_share_a_place() -> None:
    assert order(run_of("round_robin", [("ann", "bob", None)] * 2)) == [("ann", 1), ("bob", 1)]
    games = [("a", "b", 0), ("a", "b", 0), ("c", "d", 0), ("c", "d", 0)]
    # no game links the two groups, so each has a first and a second
    assert order(run_of("gauntlet", games)) == [("a", 1), ("b", 2), ("c", 1), ("d", 2)]


def test_a_knock_out_is_ordered_by_rounds_and_names_its_winner() -> None:
    """The winner has fewer points than the one who lost the final."""
    games: list[tuple[str, str, int | None]] = [("b", "c", 0)] * 2
    games += [("a", "b", 0), ("a", "b", None)]
    games += [("b", "c", 0)] * 4
    events = [bye("a"), tie(1, 2, "b", "c"), tie(2, 1, "a", "b")]
    run = run_of("knockout", games, events=events)
    assert order(run) == [("a", 1), ("b", 2), ("c", 3)]
    report = build(run)
    assert [row["rounds_won"] for row in report["standings"]] == [2, 1, 0]
    assert report["tournament"]["winners"] == [{"game": "chess", "agent": "a"}]
    under_way = run_of("knockout", games, events=events[:2])
    assert build(under_way)["tournament"]["winners"] == []
    # who is still in stands before who went out in that round
    assert [name for name, _ in order(under_way)][-1] == "c"


def test_a_knock_out_is_won_when_all_but_one_are_out() -> None:
    ties = [tie(1, n, f"w{n}", f"l{n}")[1] for n in (1, 2)]
    assert knockout_winner(["w1", "l1", "w2", "l2"], ties) is None
    assert knockout_winner(["w1", "l1", "w2", "l2"], [*ties, tie(2, 1, "w2", "w1")[1]]) == "w2"
    assert knockout_winner([], []) is None


def test_tie_breaks_are_those_worked_out_by_hand() -> None:
    """Rounds of two games: a beat b by 2:0 and drew with c 1:1; b beat c by 1½:½."""
    games = [
        *(GameScore(("a", "b"), 1.0), GameScore(("b", "a"), 0.0)),
        *(GameScore(("a", "c"), 0.5), GameScore(("c", "a"), 0.5)),
        *(GameScore(("b", "c"), 1.0), GameScore(("c", "b"), 0.5)),
    ]
    found = tie_breaks({"a": 3.0, "b": 1.5, "c": 1.5}, games, [], 2)
    assert found["a"] == (1.5 + 1.5, 1.5 + 1.5 / 2)
    assert found["b"] == (3.0 + 1.5, 0.75 * 1.5)
    assert found["c"] == (3.0 + 1.5, 3.0 / 2 + 0.25 * 1.5)


def test_a_bye_counts_as_a_round_won_against_an_equal() -> None:
    games = [GameScore(("a", "b"), 1.0), GameScore(("b", "a"), 0.0)]
    found = tie_breaks({"a": 2.0, "b": 0.0, "c": 2.0}, games, ["c"], 2)
    assert found["c"] == (2.0, 2.0)
    assert found["a"] == (0.0, 0.0)


def test_a_swiss_tournament_counts_byes_and_parts_equals_by_their_opponents() -> None:
    games = [
        *(("a", "b", 0), ("b", "a", 1)),  # 2:0, c sits out
        *(("c", "a", None), ("a", "c", None)),  # 1:1, b sits out
    ]
    events = [bye("c", 1, 2.0), bye("b", 2, 2.0)]
    report = build(run_of("swiss", games, events=events))
    rows = {row["name"]: row for row in report["standings"]}
    # a and c have 3 points, b 2; c had its bye against an equal: 3 + 3, a met b and c: 2 + 3
    assert [(row["name"], row["place"]) for row in report["standings"]] == [
        *(("c", 1), ("a", 2), ("b", 3))
    ]
    assert [rows[name]["buchholz"] for name in "abc"] == [5.0, 5.0, 6.0]
    assert [rows[name]["sonneborn_berger"] for name in "abc"] == [3.5, 2.0, 4.5]
    assert [rows[name]["bye_points"] for name in "abc"] == [0, 2.0, 2.0]
    assert [rows[name]["points"] for name in "abc"] == [3.0, 0.0, 1.0]
    assert report["tournament"]["order"] == "swiss"


@pytest.mark.parametrize("format_", ["round_robin", "gauntlet"])
def test_other_formats_have_no_tie_breaks(format_: str) -> None:
    (row, _) = build(run_of(format_, [("ann", "bob", 0)]))["standings"]
    assert (row["buchholz"], row["sonneborn_berger"], row["rounds_won"]) == (None, None, None)


def test_a_player_without_a_rating_has_no_place_by_elo() -> None:
    rows = [
        {"name": name, "points": points, "bye_points": 0.0, "elo": elo}
        for name, points, elo in (("a", 3.0, None), ("b", 1.0, -5.0), ("c", 2.0, 5.0))
    ]
    found = placed(rows, "elo", [], [], [["b", "c"]])
    assert [(row["name"], row["place"]) for row in found] == [("c", 1), ("b", 2), ("a", None)]


@pytest.mark.parametrize(("most", "is_exhausted"), [(2, True), (3, False)])
def test_a_test_is_exhausted_once_all_its_pairs_are_in(most: int, is_exhausted: bool) -> None:
    sprt = {"elo0": 0, "elo1": 10, "max_pairs": most}
    games: list[tuple[str, str, int | None]] = [("ann", "bob", None), ("bob", "ann", None)] * 2
    (row,) = build(run_of("sprt", games, sprt=sprt))["sprt"]
    assert (row["decision"], row["is_exhausted"]) == ("continue", is_exhausted)
