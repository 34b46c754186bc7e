"""Schedules: ids by content, pairs that share the opening, sides in balance."""

from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from arena.config import RunConfig, parse
from arena.schedule import MatchSpec, matches


def config(agents: int, pairs: int, seed: int = 1) -> RunConfig:
    return parse(
        {
            "name": "s",
            "seed": seed,
            "agents": [{"name": f"a{n}", "kind": "random"} for n in range(agents)],
            "tournament": {"games": ["chess", "janggi"], "pairs": pairs},
        }
    )


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 5), st.integers(1, 20), st.integers(0, 100))
def test_a_round_robin_is_whole_and_balanced(agents: int, pairs: int, seed: int) -> None:
    specs = matches(config(agents, pairs, seed))
    assert len(specs) == agents * (agents - 1) * pairs * 2
    assert len({spec.id for spec in specs}) == len(specs)
    sides: Counter[tuple[str, int]] = Counter()
    for spec in specs:
        sides[spec.agents[0], 0] += 1
        sides[spec.agents[1], 1] += 1
    assert len(set(sides.values())) == 1


def test_a_pair_is_one_opening_with_the_sides_swapped_side_by_side() -> None:
    specs = matches(config(3, 4))
    by_pair: dict[str, list[MatchSpec]] = defaultdict(list)
    for spec in specs:
        by_pair[spec.pair_id].append(spec)
    for one, two in by_pair.values():
        assert one.start == two.start
        assert one.agents == two.agents[::-1]
        assert one.id != two.id
        assert specs.index(two) == specs.index(one) + 1


def test_games_and_pairings_are_interleaved() -> None:
    specs = matches(config(3, 2))
    first_round = specs[: len(specs) // 2]
    assert {spec.game for spec in first_round[:4]} == {"chess", "janggi"}
    assert len({frozenset(spec.agents) for spec in first_round}) == 3


def test_ids_follow_from_the_content_and_the_seed() -> None:
    assert matches(config(3, 2)) == matches(config(3, 2))
    few, many = matches(config(2, 2)), matches(config(2, 5))
    assert [spec.id for spec in few] == [spec.id for spec in many[: len(few)]]
    assert {s.id for s in few}.isdisjoint({s.id for s in matches(config(2, 2, seed=2))})


def test_one_pairing_meets_different_openings_before_any_comes_again() -> None:
    specs = [spec for spec in matches(config(2, 16)) if spec.game == "janggi"]
    assert len({spec.start.fen for spec in specs}) == 16
