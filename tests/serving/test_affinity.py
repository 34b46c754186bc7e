"""Where matches are placed: spread evenly, kept where they are, and moved no more than must be."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.affinity import LIVE_S, MOST_PLACES, Affinity

REPLICAS = st.sets(st.sampled_from("abcdefghij"), min_size=1, max_size=8)
MATCHES = st.lists(st.uuids().map(str), unique=True, max_size=60)


def placed(affinity: Affinity, matches: list[str], now: float = 0.0) -> dict[str, str | None]:
    """Each match's replica; its request ends at once."""
    places = {}
    for match in matches:
        places[match] = affinity.begin(match, now)
        affinity.end(match, now)
    return places


def bound(matches: int, replicas: int) -> int:
    return math.ceil(matches / replicas)


def test_without_replicas_there_is_no_place() -> None:
    affinity = Affinity()
    assert affinity.begin("m", 0.0) is None
    assert affinity.begin("", 0.0) is None
    assert (affinity.replicas, affinity.load(2.0)) == (frozenset(), {})
    affinity.update(["a"])
    assert affinity.begin("m", 0.0) == "a"
    affinity.update([])
    assert affinity.begin("m", 1.0) is None
    affinity.end("m", 1.0)
    assert affinity.load(2.0) == {}


@given(REPLICAS, MATCHES)
def test_no_replica_holds_more_than_its_bound(replicas: set[str], matches: list[str]) -> None:
    affinity = Affinity(replicas)
    for count, match in enumerate(matches, 1):
        affinity.begin(match, 0.0)
        load = affinity.load(2.0)
        assert sum(load.values()) == count
        assert max(load.values()) <= bound(count, len(replicas))


@given(REPLICAS, MATCHES, st.data())
def test_a_match_stays_where_it_is_whoever_asks_next(
    replicas: set[str], matches: list[str], data: st.DataObject
) -> None:
    affinity = Affinity(replicas)
    first = placed(affinity, matches)
    assert placed(affinity, data.draw(st.permutations(matches)), 1.0) == first
    assert affinity.load(2.0) == {name: Counter(first.values())[name] for name in replicas}


@given(REPLICAS, MATCHES, st.data())
def test_one_that_leaves_gives_up_its_own_matches_alone(
    replicas: set[str], matches: list[str], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(replicas)))
    affinity = Affinity(replicas)
    before = placed(affinity, matches)
    affinity.update(replicas - {gone})
    after = placed(affinity, matches, 1.0)
    assert {match for match in matches if after[match] != before[match]} == {
        match for match in matches if before[match] == gone
    }
    if left := replicas - {gone}:
        assert sum(affinity.load(2.0).values()) == len(matches)
        assert affinity.load(2.0).keys() == left


@given(REPLICAS, MATCHES)
def test_one_that_comes_takes_those_that_prefer_it_and_moves_no_other(
    replicas: set[str], matches: list[str]
) -> None:
    affinity = Affinity(replicas)
    before = placed(affinity, matches)
    affinity.update(replicas | {"new"})
    assert sum(affinity.load(2.0).values()) <= len(matches)
    after = placed(affinity, matches, 1.0)
    prefer_it = {
        match for match in matches if Affinity([*replicas, "new"]).begin(match, 0) == "new"
    }
    assert {match for match in matches if after[match] != before[match]} <= prefer_it
    assert affinity.load(2.0)["new"] <= bound(len(matches), len(replicas) + 1)


def test_a_new_one_takes_about_its_share() -> None:
    """Of 400 matches on three replicas about a quarter prefers the fourth; others stay."""
    matches = [f"match-{number}" for number in range(400)]
    affinity = Affinity("abc")
    before = placed(affinity, matches)
    affinity.update("abcd")
    after = placed(affinity, matches, 1.0)
    moved = [match for match in matches if after[match] != before[match]]
    assert 70 <= len(moved) <= bound(400, 4)
    assert {after[match] for match in moved} == {"d"}
    assert affinity.load(2.0)["d"] == len(moved)


def test_those_that_went_elsewhere_return_with_their_replica() -> None:
    matches = [f"match-{number}" for number in range(60)]
    affinity = Affinity("abc")
    first_choice = {match: Affinity("abc").begin(match, 0.0) for match in matches}
    before = placed(affinity, matches)
    affinity.update("ab")
    placed(affinity, matches, 1.0)
    affinity.update("abc")
    after = placed(affinity, matches, 2.0)
    home = [match for match in matches if before[match] == first_choice[match] == "c"]
    assert home
    back = [match for match in home if after[match] == "c"]
    assert len(back) >= 0.8 * len(home), "its share may be full when the last of them asks"


def test_the_same_in_every_process() -> None:
    """No hash of Python's own, which differs from one process to the next."""
    matches = [f"match-{number}" for number in range(12)]
    assert "".join(str(Affinity("abc").begin(match, 0.0)) for match in matches) == "caccbabacccc"


def test_a_match_that_is_silent_counts_in_no_share_but_keeps_its_place() -> None:
    affinity = Affinity("ab")
    waiting = affinity.begin("waits", 0.0)
    silent = placed(affinity, ["silent"])["silent"]
    assert sum(affinity.load(LIVE_S - 0.1).values()) == 2
    assert affinity.load(LIVE_S)[str(waiting)] == sum(affinity.load(LIVE_S).values()) == 1
    affinity.end("waits", LIVE_S)
    assert sum(affinity.load(2 * LIVE_S).values()) == 0
    assert affinity.begin("silent", 100 * LIVE_S) == silent


def test_of_more_matches_than_are_remembered_the_oldest_is_forgotten() -> None:
    affinity = Affinity("ab")
    placed(affinity, [f"m{number}" for number in range(MOST_PLACES + 5)])
    assert sum(affinity.load(0.0).values()) == MOST_PLACES


def test_requests_of_no_match_go_where_the_fewest_matches_are_and_are_not_counted() -> None:
    affinity = Affinity("ab")
    busy = affinity.begin("m", 0.0)
    assert affinity.begin("", 0.0) == ("b" if busy == "a" else "a")
    affinity.end("", 0.0)
    assert sum(affinity.load(2.0).values()) == 1


def test_an_answer_that_comes_after_its_match_moved_ends_nothing_else() -> None:
    affinity = Affinity("ab")
    old = affinity.begin("m", 0.0)
    affinity.update({"a", "b"} - {str(old)})
    affinity.end("m", 0.0)
    new = affinity.begin("m", 0.0)
    assert new not in (old, None)
    affinity.end("m", 1.0)
    affinity.end("m", 1.0)
    assert affinity.load(2.0) == {new: 1}


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_many_matches_are_spread_evenly(replicas: int) -> None:
    affinity = Affinity("abcde"[:replicas])
    placed(affinity, [f"match-{number}" for number in range(300)])
    assert max(affinity.load(2.0).values()) <= bound(300, replicas)
    assert min(affinity.load(2.0).values()) >= 0.9 * 300 / replicas
