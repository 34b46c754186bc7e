"""Statistics of tournaments: upstream's vectors, symmetries, and what upstream leaves infinite."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import chess.pgn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena.bradley_terry import MISFIT, anchor_fit, logistic
from arena.field import Design, Field, Game
from arena.pairwise import (
    ELO_PER_LOGIT,
    Z95,
    PairCounts,
    Pairwise,
    chance_above,
    decisive_los,
    elo,
    exact_los,
    expected_score,
    pair_counts,
    pairwise,
)
from arena.rao_kupper import rao_kupper
from arena.sprt import LEAST_GAP, Model, Sprt, furthest
from arena.standings import Outcome, pairings, protocol_scores, standings

FOLDER = Path(__file__).parents[1] / "vectors"
VECTORS: dict[str, Any] = json.loads((FOLDER / "rating_vectors.json").read_text())
FOUR = VECTORS["bradley_terry_4_players"]
POINTS = {"1-0": 1.0, "1/2-1/2": 0.5, "0-1": 0.0}
SCORE = {"win": 1.0, "draw": 0.5, "loss": 0.0}
MODELS: dict[str, Model] = {
    "logistic": "logistic",
    "normalized": "normalized",
    "bayesian": "bayes_elo",
}


def near(value: float, rel: float = 1e-6) -> Any:
    return pytest.approx(value, rel=rel, abs=1e-9)


def bins_of(case: dict[str, Any]) -> tuple[int, ...]:
    if "wins" in case:
        return case["losses"], case["draws"], case["wins"]
    names = ("LL", "LD", "WL", "DD", "WD", "WW")
    return PairCounts(*(case.get(name, 0) for name in names)).bins


def four_players() -> list[Game]:
    return [
        Game(row["white"], row["black"], score, f"{n}{key}{i}")
        for n, row in enumerate(FOUR["games"])
        for key, score in (("W", 1.0), ("D", 0.5), ("L", 0.0))
        for i in range(row[key])
    ]


def errors(field: Field, covariance: Any) -> dict[str, float]:
    spread = Z95 * np.sqrt(np.diag(covariance))
    return dict(zip(field.ratings, spread.tolist(), strict=False))


# Vectors: two players.


@pytest.mark.parametrize("case", [*VECTORS["elo_trinomial"], *VECTORS["elo_pentanomial"]])
def test_elo_is_fastchess_s(case: dict[str, Any]) -> None:
    found, want = pairwise(bins_of(case)), case["exact"]
    assert found.is_normal
    assert found.nelo is not None
    assert {
        "score": found.score,
        "elo": found.elo.value,
        "elo_err95": found.elo.error,
        "elo_lo": found.elo.low,
        "elo_hi": found.elo.high,
        "nelo": found.nelo.value,
        "nelo_err95": found.nelo.error,
        "los": found.los,
    } == {key: near(value) for key, value in want.items()}
    if "los_percent" in case["doc"]:
        assert 100 * found.los == pytest.approx(float(case["doc"]["los_percent"]), abs=0.006)


@pytest.mark.parametrize("case", VECTORS["elo_trinomial"])
def test_los_of_decisive_games_is_cutechess_s(case: dict[str, Any]) -> None:
    assert decisive_los(case["wins"], case["losses"]) == near(case["los_cutechess"])


def test_pairs_may_widen_the_error() -> None:
    (case,) = VECTORS["same_games_two_ways"]
    games = pairwise(bins_of(case))
    pairs = pairwise(bins_of(VECTORS["elo_pentanomial"][0]))
    assert games.elo.value == near(case["elo"])
    assert pairs.elo.value == near(case["elo"])
    assert games.elo.error == near(case["trinomial_error95"])
    assert pairs.elo.error == near(case["pentanomial_error95"])
    assert games.nelo is not None
    assert games.nelo.value == near(case["trinomial_nelo"])
    assert pairs.nelo is not None
    assert pairs.nelo.value == near(case["pentanomial_nelo"])


def test_exact_los_of_three_wins() -> None:
    (case,) = VECTORS["los_small_n"]
    assert exact_los(case["wins"], case["losses"]) == near(case["exact_beta"])
    assert decisive_los(case["wins"], case["losses"]) == near(case["normal_cutechess"])


@pytest.mark.parametrize("case", VECTORS["pair_classification"])
def test_a_pair_falls_into_its_bin(case: dict[str, Any]) -> None:
    one, two = SCORE[case["first_player_game1"]], SCORE[case["first_player_game2"]]
    for pair in ((one, two), (two, one)):
        assert pair_counts([pair])._asdict()[case["bin"].lower()] == 1


# Vectors: SPRT.


@pytest.mark.parametrize("case", VECTORS["sprt_gsprt"])
def test_llr_is_fishtest_s_and_near_fastchess_s(case: dict[str, Any]) -> None:
    test = Sprt(case["elo0"], case["elo1"], case["alpha"], case["beta"], MODELS[case["model"]])
    llr = test.llr(bins_of(case))
    assert llr == near(case["exact_llr"], 1e-7)
    assert llr == near(case["fastchess_llr"], 1.5e-3)
    assert llr == pytest.approx(case["doc_llr"], rel=0.01, abs=0.006)


@pytest.mark.parametrize("case", VECTORS["sprt_cutechess"])
def test_llr_is_cutechess_s(case: dict[str, Any]) -> None:
    test = Sprt(case["elo0"], case["elo1"], case["alpha"], case["beta"], "cutechess")
    llr = test.llr(bins_of(case))
    assert llr == near(case["exact_llr"])
    assert llr == pytest.approx(case["doc_llr"], abs=0.01)


def test_llr_is_openbench_s() -> None:
    case = VECTORS["sprt_openbench"][0]
    test = Sprt(case["elo0"], case["elo1"], model="normalized")
    assert test.llr(case["counts"]) == near(case["llr"], 1e-5)


def test_llr_of_single_games_is_openbench_s_but_for_the_likelihood() -> None:
    """OpenBench takes the chances at both bounds as they are; ours are, as fastchess has them, the
    likeliest ones with that score. On 90,000 games that is 1.5 in 100,000."""
    case = VECTORS["sprt_openbench"][1]
    losses, draws, wins = case["counts_LDW"]
    test = Sprt(case["elo0"], case["elo1"], model="bayes_elo")
    assert test.llr((losses, draws, wins)) == near(case["llr"], 1e-4)


@pytest.mark.parametrize("case", VECTORS["sprt_bounds"])
def test_bounds_are_wald_s(case: dict[str, Any]) -> None:
    bounds = Sprt(0, 5, case["alpha"], case["beta"]).bounds
    assert bounds == (near(case["lower"]), near(case["upper"]))


@pytest.mark.parametrize("case", VECTORS["sprt_median_unbiased_elo"])
def test_the_estimate_after_a_stop_is_fishtest_s(case: dict[str, Any]) -> None:
    test = Sprt(case["elo0"], case["elo1"], case["alpha"], case["beta"], MODELS[case["model"]])
    found, want = test.estimate(case["pentanomial"]), case["out"]
    assert test.bounds == (near(want["a"]), near(want["b"]))
    assert found.elo.value == near(want["elo"], case["rel_tol"])
    assert [found.elo.low, found.elo.high] == [near(end, case["rel_tol"]) for end in want["ci"]]
    assert found.los == near(want["LOS"], case["rel_tol"])
    assert test.llr(case["pentanomial"]) == near(want["LLR"], case["rel_tol"])


# Vectors: a whole field.


@pytest.mark.parametrize(
    ("key", "ordo"),
    [("logistic", "ratings_exact"), ("logistic_white_advantage", "ratings_white")],
)
def test_the_field_is_rated_as_by_ordo(key: str, ordo: str) -> None:
    field, want = logistic(four_players(), has_advantage=key != "logistic"), FOUR[key]
    assert field.ratings == {name: near(value) for name, value in want["ratings"].items()}
    for name, value in FOUR["ordo"][ordo].items():
        assert field.ratings[name] == pytest.approx(value, abs=FOUR["ordo"]["abs_tol_ratings"])
    for covariance, error in ((field.fisher, "err95_fisher"), (field.sandwich, "err95_sandwich")):
        found = errors(field, covariance)
        assert found == {name: near(value) for name, value in want[error].items()}
    for names, pair in want["pairs"].items():
        one, two = names.split("-")
        difference = field.difference(one, two)
        assert difference is not None
        assert difference.value == near(pair["diff"])
        assert difference.error == near(pair["err95_sandwich"])
        assert field.los(one, two) == near(pair["los_sandwich"])
    if key != "logistic":
        assert field.advantage == near(want["white_advantage"])
        assert field.advantage == pytest.approx(FOUR["ordo"]["white_advantage"], abs=0.01)
    assert not field.is_penalised
    assert field.error("A") == errors(field, field.sandwich)["A"]


def test_the_pgn_holds_the_games_of_the_vector() -> None:
    games: list[Game] = []
    with (FOLDER / "bt_4players.pgn").open() as file:
        while (headers := chess.pgn.read_headers(file)) is not None:
            score = POINTS[headers["Result"]]
            games.append(Game(headers["White"], headers["Black"], score, str(len(games))))
    assert len(games) == 240
    assert logistic(games).ratings == logistic(four_players()).ratings


def test_rao_and_kupper_s_field_is_bayes_elo_s() -> None:
    field, want = rao_kupper(four_players()), FOUR["rao_kupper"]
    printed = want["bayeselo"]
    assert field.ratings == {name: near(value, 1e-5) for name, value in want["ratings"].items()}
    for name, value in printed["printed"].items():
        assert field.ratings[name] * want["display_scale"] == pytest.approx(value, abs=0.51)
    assert field.draw_elo is not None
    y = 10 ** (-field.draw_elo / 400)
    assert 4 * y / (1 + y) ** 2 == near(want["display_scale"])
    assert field.advantage == pytest.approx(printed["advantage"], abs=0.01)
    assert field.draw_elo == pytest.approx(printed["drawelo"], abs=0.01)
    # BayesElo holds the advantage and the draws fixed
    held = np.linalg.pinv(np.linalg.pinv(field.fisher)[:4, :4])
    for name, value in errors(field, held).items():
        assert value == near(want["err95_thetas_fixed"][name], 1e-5)
    for names, los in printed["los_permille"].items():
        i, j = ("ABCD".index(name) for name in names.split(">"))
        error = math.sqrt(held[i, i] + held[j, j] - 2 * held[i, j])
        difference = field.ratings["ABCD"[i]] - field.ratings["ABCD"[j]]
        chance = 0.5 * (1 + math.erf(difference / error / math.sqrt(2)))
        assert chance == near(want["los_thetas_fixed"][names], 1e-5)
        assert 1000 * chance == pytest.approx(los, abs=1.01)


@pytest.mark.parametrize("case", VECTORS["anchored_mle"])
def test_anchors_hold_the_scale(case: dict[str, Any]) -> None:
    games = []
    for anchor, points in case["points_by_anchor"].items():
        scores = [1.0] * int(points) + [0.5] * (points != int(points))
        scores += [0.0] * (case["games"][anchor] - len(scores))
        games += [Game("x", anchor, score, f"{anchor}{n}") for n, score in enumerate(scores)]
    field = logistic(games, case["anchors"])
    assert field.ratings == {**case["anchors"], "x": near(case["rating"])}
    assert errors(field, field.fisher)["x"] == near(case["err95_fisher"])
    assert [field.error(name) for name in case["anchors"]] == [0] * len(case["anchors"])


@pytest.mark.parametrize("case", VECTORS["two_player_closed_form"])
def test_two_players_in_closed_form(case: dict[str, Any]) -> None:
    scores = [1.0] * case["wins"] + [0.0] * case["losses"]
    games = [Game("a", "b", score, str(n)) for n, score in enumerate(scores)]
    field = logistic(games)
    assert field.ratings["a"] - field.ratings["b"] == near(case["diff"])
    assert 2 * errors(field, field.fisher)["a"] == near(case["err95_fisher"])


def test_open_spiel_s_fields_come_out_in_its_order() -> None:
    """With its smoothing of 0.01 win each way left out; the first case is then log₁₀ 2."""
    first, second, third = VECTORS["openspiel_elo"]

    def ratings(case: dict[str, Any]) -> list[float]:
        games = [
            Game(str(i), str(j), 1.0, f"{i}{j}{n}")
            for i, row in enumerate(case["win_matrix"])
            for j, wins in enumerate(row)
            for n in range(wins)
        ]
        return list(logistic(games, has_advantage=False).ratings.values())

    r = ratings(first)
    assert r[0] - r[1] == near(400 * math.log10(2))
    r = ratings(second)
    assert r[0] == near(r[2])
    assert r[0] > r[1]
    r = ratings(third)
    assert r[0] > r[2] > r[1]


# What upstream leaves infinite or undefined.

EDGES = [case for case in VECTORS["edge_cases"] if "elo" in case and any(bins_of(case))]


def is_finite(found: Pairwise) -> bool:
    values = [found.score, found.los]
    for estimate in (found.elo, found.nelo or found.elo):
        values += [estimate.low, estimate.value, estimate.high]
    return all(map(math.isfinite, values))


@pytest.mark.parametrize("bins", [*map(bins_of, EDGES), (0, 0, 0, 0, 7), (0, 0, 9, 0, 0)])
def test_clean_sweeps_and_draws_alone_have_finite_intervals(bins: tuple[int, ...]) -> None:
    found = pairwise(bins)
    assert is_finite(found)
    assert found.elo.low < found.elo.value < found.elo.high
    assert not found.is_normal
    assert found.nelo is None


def test_no_games_say_nothing() -> None:
    with pytest.raises(ValueError, match="not all zero"):
        pairwise((0, 0, 0))
    with pytest.raises(ValueError, match="three bins"):
        pairwise((1, 2))
    assert Sprt(0, 10).llr((0, 0, 0)) == 0
    assert logistic([]).ratings == {}
    assert standings([]).pairings == ()


def test_llr_of_edge_cases_is_near_fastchess_s() -> None:
    """Whose solver stops early."""
    for case in VECTORS["edge_cases"]:
        if "llr" in case and any(bins_of(case)):
            model: Model = "normalized" if "normalized" in case["source"] else "logistic"
            assert Sprt(0, 10, model=model).llr(bins_of(case)) == near(case["llr"], 5e-3)


@pytest.mark.parametrize("bins", [(0, 10, 0), (0, 0, 6), (2, 1, 9), (0, 0, 3, 1, 4), (1, 0, 1)])
def test_the_posterior_is_that_of_drawn_shares(bins: tuple[int, ...]) -> None:
    shares = np.random.default_rng(1).dirichlet(np.array(bins) + 0.5, 200_000)
    scores = shares @ np.linspace(0, 1, len(bins))
    assert chance_above(0.5, bins) == pytest.approx((scores > 0.5).mean(), abs=0.005)
    found = pairwise(bins)
    low, high = np.quantile(scores, [0.025, 0.975])
    assert expected_score(found.elo.low) == pytest.approx(low, abs=0.005)
    assert expected_score(found.elo.high) == pytest.approx(high, abs=0.005)


def test_a_sweep_is_rated_as_half_a_game_short_of_one() -> None:
    field = logistic([Game("a", "b", 1.0, str(n)) for n in range(10)])
    assert field.is_penalised
    assert field.ratings["a"] - field.ratings["b"] == near(elo(10.5 / 11))
    difference = field.difference("a", "b")
    assert difference is not None
    assert 0 < difference.error < 1000


def test_one_that_lost_every_game_leaves_the_others_rated_finitely() -> None:
    games = four_players()
    for n in range(5):
        games += [Game("A", "new", 1.0, f"x{n}"), Game("new", "A", 0.0, f"x{n}")]
    for field in (logistic(games), rao_kupper(games)):
        assert field.is_penalised
        assert min(field.ratings, key=lambda name: field.ratings[name]) == "new"
        assert all(0 < field.error(name) < 2000 for name in field.ratings)


def test_a_ladder_of_clean_sweeps_is_rated_in_its_order() -> None:
    games = [Game(f"{i:02}", f"{i + 1:02}", 1.0, f"{n},{i}") for n in range(300) for i in range(12)]
    for field in (logistic(games), rao_kupper(games)):
        assert list(field.ratings.values()) == sorted(field.ratings.values(), reverse=True)
        assert field.advantage is None
        assert field.los("00", "01") != 1


def test_draws_alone_are_no_certainty() -> None:
    field = logistic([Game("a", "b", 0.5, str(n)) for n in range(40)])
    assert field.ratings == {"a": 0, "b": 0}
    assert field.error("a") > 10
    assert rao_kupper([Game("a", "b", 0.5, str(n)) for n in range(40)]).is_penalised


def split(one: str, two: str, number: int) -> list[Game]:
    """Pairs of one win each, by the first mover and by the second in turn."""
    return [
        Game(*names, score, f"{one}{two}{n}")
        for n in range(number)
        for names, score in (((one, two), n % 2), ((two, one), n % 2))
    ]


def noisy(one: str, two: str, number: int) -> list[Game]:
    return [
        Game(one, two, score, f"{one}{two}{n}")
        for n in range(number)
        for score in (n % 2, (n + n // 2) % 3 / 2)
    ]


DRAWN = [Game("a", "b", 0.5, "x"), Game("b", "a", 0.5, "x")]


@pytest.mark.parametrize(
    "games",
    [
        split("a", "b", 48),
        [*split("a", "b", 49), *DRAWN],
        [*noisy("c", "a", 60), *split("a", "b", 60), *noisy("b", "d", 60)],
    ],
)
@pytest.mark.parametrize("rate", [logistic, rao_kupper])
def test_pairs_that_all_split_are_no_certainty(rate: "Rate", games: list[Game]) -> None:
    """The sum of each pair is the same, so that the sandwich is 0 for a player or a difference."""
    field = rate(games)
    between = field.difference("a", "b")
    assert between is not None
    assert between.error > 10
    assert field.los("a", "b") == pytest.approx(0.5, abs=1e-4)
    assert all(field.error(name) > 5 for name in field.ratings)


def test_groups_that_never_met_are_not_compared() -> None:
    apart = [Game("a", "b", 1.0, "1"), Game("b", "a", 1.0, "1")]
    apart += [Game("c", "d", 0.5, "2"), Game("d", "c", 0.0, "2")]
    field = logistic(apart)
    assert field.groups == (("a", "b"), ("c", "d"))
    assert field.difference("a", "c") is None
    assert field.los("a", "c") is None
    assert field.los("a", "b") == near(0.5)
    assert field.ratings["c"] == near(-field.ratings["d"])
    anchored = logistic(apart, {"b": 100.0, "d": 0.0})
    assert anchored.groups == (("a", "b", "c", "d"),)
    assert anchored.difference("a", "c") is not None
    assert anchored.los("b", "d") is None


def test_an_advantage_that_games_cannot_tell_is_left_out() -> None:
    assert (
        logistic([Game("a", "b", score, str(n)) for n, score in enumerate((1, 0, 1))]).advantage
        is None
    )
    both = [Game("a", "b", 1, "1"), Game("b", "a", 1, "1"), Game("a", "b", 0, "2")]
    assert logistic(both).advantage is not None


def test_an_advantage_has_an_interval_even_where_each_pair_has_one_winner() -> None:
    """There first players make a point of every pair, and the sandwich says ± 0."""
    names = ("a", "b") * 20
    games = [
        game
        for n, winner in enumerate(names)
        for game in (
            Game("a", "b", float(winner == "a"), str(n)),
            Game("b", "a", float(winner == "b"), str(n)),
        )
    ]
    field = logistic(games)
    assert field.advantage == near(0)
    assert field.advantage_error is not None
    assert field.advantage_error > 50
    assert logistic(games, has_advantage=False).advantage_error is None


def test_an_advantage_s_interval_holds_it_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(200):
        games = [
            Game(*seats, score, str(n))
            for n in range(30)
            for seats, expected in ((("a", "b"), 0.65), (("b", "a"), 0.5))
            for score in [float(rng.choice((0, 0.5, 1), p=(0.7 - expected, 0.6, expected - 0.3)))]
        ]
        field = logistic(games)
        assert field.advantage is not None
        assert field.advantage_error is not None
        truth = np.log(0.65 / 0.35) / 2 * ELO_PER_LOGIT
        held += abs(field.advantage - truth) <= field.advantage_error
    assert 0.91 <= held / 200 <= 0.99


def test_errors_count_pairs_once() -> None:
    """Games of a pair that end alike are worth one game."""
    rng = np.random.default_rng(3)
    scores = rng.integers(0, 2, 60).tolist()
    single = [Game("a", "b", score, str(n)) for n, score in enumerate(scores)]
    double = [game for game in single for _ in range(2)]
    assert logistic(double).error("a") == near(logistic(single).error("a"))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0, 0.5 or 1"):
        logistic([Game("a", "b", 0.7, "1")])
    with pytest.raises(ValueError, match="two players"):
        logistic([Game("a", "a", 1, "1")])
    with pytest.raises(ValueError, match="each, not"):
        pair_counts([(0.25, 1)])
    with pytest.raises(ValueError, match="below elo1"):
        Sprt(5, 5)
    with pytest.raises(ValueError, match="below elo1"):
        Sprt(5, math.nan)
    far: dict[Model, float] = {"logistic": 1e5, "normalized": 231, "bayes_elo": 2001}
    for model, bound in far.items():
        with pytest.raises(ValueError, match=f"{model} bounds lie within"):
            Sprt(-bound, bound, model=model)
    with pytest.raises(ValueError, match="less than 1"):
        Sprt(0, 5, 0.6, 0.5)
    with pytest.raises(ValueError, match="1e-06 or more"):
        Sprt(0, 5, 1e-300)
    with pytest.raises(ValueError, match="no chances"):
        Sprt(-5, 5, model="cutechess").llr((0, 60_000, 0))
    with pytest.raises(ValueError, match="three bins"):
        Sprt(0, 5, model="bayes_elo").llr((1, 1, 1, 1, 1))
    with pytest.raises(ValueError, match="no estimate"):
        Sprt(0, 5, model="cutechess").estimate((1, 1, 1))
    with pytest.raises(ValueError, match="no finite Elo"):
        elo(1.0)
    with pytest.raises(ValueError, match="has a loser"):
        standings([Outcome("a", "b", 0.5, "1", is_forfeit=True)])
    with pytest.raises(KeyError):
        logistic([Game("a", "b", 1, "1")]).error("c")


# SPRT as it runs.


def test_a_test_says_where_it_stands() -> None:
    test = Sprt(0, 50)
    assert test.state((10, 10, 10)) == "continue"
    assert test.state((20, 20, 60)) == "accept"
    assert test.state((60, 20, 20)) == "reject"


@pytest.mark.parametrize("bins", [(0, 0, 1), (0, 0, 20), (0, 20, 0), (20, 0, 0), (0, 0, 0, 0, 9)])
@pytest.mark.parametrize("model", ["logistic", "normalized"])
def test_a_stop_after_few_results_is_estimated_finitely(
    bins: tuple[int, ...], model: Model
) -> None:
    found = Sprt(0, 50, model=model).estimate(bins)
    assert -2000 <= found.elo.low < found.elo.value < found.elo.high <= 2000
    assert 0 <= found.los <= 1


def test_a_sweep_is_what_the_guide_says_of_it() -> None:
    """It told of 10½-½, which is so without an advantage to be found."""
    games = [
        game
        for n in range(5)
        for game in (Game("a", "b", 1.0, str(n)), Game("b", "a", 0.0, str(n)))
    ]
    field, alone = logistic(games), logistic(games, has_advantage=False)
    gap = field.ratings["a"] - field.ratings["b"]
    assert gap == pytest.approx(elo(5.5 / 6), abs=0.01)
    assert alone.ratings["a"] - alone.ratings["b"] == pytest.approx(elo(10.5 / 11), abs=0.01)
    met = pairwise((0, 0, 0, 0, 5)).elo
    told = (Path(__file__).parents[2] / "docs/guides/ratings.md").read_text()
    assert f"+{met.value:.0f}, from +{met.low:.0f} to +{met.high:.0f}" in told
    assert f"a gap of {gap:.0f} ± {2 * field.error('a'):.0f}" in told


@pytest.mark.parametrize("pairs", [5, 6, 12])
def test_a_test_that_stopped_at_draws_alone_is_estimated_level(pairs: int) -> None:
    """It once said +29, however many they were."""
    test, bins = Sprt(0, 200), (0, 0, pairs, 0, 0)
    assert test.state(bins) == "reject"
    found = test.estimate(bins)
    assert found.elo.value == pytest.approx(0, abs=1e-6)
    assert found.elo == pairwise(bins).elo
    assert found.los == pytest.approx(0.5)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(["logistic", "normalized", "bayes_elo"]))
def test_every_test_that_can_be_made_has_an_answer(data: st.DataObject, model: Model) -> None:
    size = 3 if model == "bayes_elo" else data.draw(st.sampled_from([3, 5]))
    count = st.sampled_from([0, 0, 1, 2, 50, 100_000])
    bins = data.draw(st.lists(count, min_size=size, max_size=size).filter(any))
    most = furthest(model)
    bounds = [(-most, most), (0, most), (most - 2 * LEAST_GAP, most), (0, LEAST_GAP)]
    rates = data.draw(st.sampled_from([(0.05, 0.05), (1e-6, 1e-6), (0.98, 0.01), (1e-6, 0.99)]))
    test = Sprt(*data.draw(st.sampled_from(bounds)), *rates, model)
    assert math.isfinite(test.llr(bins))
    if model != "bayes_elo":
        assert math.isfinite(test.estimate(bins).elo.value)


# Symmetries.

COUNTS = st.lists(st.integers(0, 200), min_size=3, max_size=3) | st.lists(
    st.integers(0, 60), min_size=5, max_size=5
)


@settings(deadline=None, max_examples=60)
@given(COUNTS.filter(any))
def test_the_other_player_s_figures_are_the_mirror(bins: list[int]) -> None:
    one, two = pairwise(bins), pairwise(bins[::-1])
    assert is_finite(one)
    assert one.elo.low <= one.elo.value <= one.elo.high
    assert (one.nelo is None) == (two.nelo is None) == (not one.is_normal)
    for here, there in ((one.elo, two.elo), (one.nelo or one.elo, two.nelo or two.elo)):
        assert here.value == pytest.approx(-there.value, rel=1e-5, abs=1e-4)
        assert here.low == pytest.approx(-there.high, rel=1e-5, abs=1e-4)
    assert one.los == pytest.approx(1 - two.los, abs=1e-7)


@settings(deadline=None, max_examples=40)
@given(COUNTS.filter(any), st.sampled_from(["logistic", "normalized"]))
def test_a_test_is_the_mirror_of_the_other_player_s(bins: list[int], model: Model) -> None:
    one, two = Sprt(-5, 20, model=model), Sprt(-20, 5, model=model)
    assert one.llr(bins) == pytest.approx(-two.llr(bins[::-1]), rel=1e-6, abs=1e-7)
    here, there = one.estimate(bins).elo, two.estimate(bins[::-1]).elo
    assert here.value == pytest.approx(-there.value, rel=1e-5, abs=1e-4)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(40, 90), min_size=3, max_size=3), st.integers(2, 9))
def test_more_of_the_same_narrows_by_the_root(bins: list[int], times: int) -> None:
    one, many = pairwise(bins), pairwise([count * times for count in bins])
    assert many.elo.value == near(one.elo.value)
    assert one.nelo is not None
    assert many.nelo is not None
    assert many.nelo.error == near(one.nelo.error / math.sqrt(times))


@st.composite
def fields(draw: st.DrawFn) -> list[Game]:
    """Pairs among two to five players, with any results."""
    names = "abcde"[: draw(st.integers(2, 5))]
    pair = st.tuples(
        st.permutations(names), st.sampled_from([0, 0.5, 1]), st.sampled_from([0, 0.5, 1])
    )
    games = []
    for n, ((one, two, *_), there, back) in enumerate(
        draw(st.lists(pair, min_size=1, max_size=25))
    ):
        games += [Game(one, two, there, str(n)), Game(two, one, back, str(n))]
    return games


Rate = Callable[[Sequence[Game]], Field]


@pytest.mark.parametrize("rate", [logistic, rao_kupper])
@settings(deadline=None, max_examples=40)
@given(games=fields())
def test_a_field_is_finite_and_does_not_hang_on_names_or_order(
    rate: Rate, games: list[Game]
) -> None:
    field = rate(games)
    assert all(map(math.isfinite, field.ratings.values()))
    assert all(0 < field.error(name) < 10_000 for name in field.ratings)
    for group in field.groups:
        assert sum(field.ratings[name] for name in group) == pytest.approx(0, abs=1e-6)
    renamed = {name: chr(ord("z") - ord(name) + ord("a")) for name in field.ratings}
    others = [Game(renamed[g.first], renamed[g.second], g.score, g.cluster) for g in games[::-1]]
    other = rate(others)
    for name, rating in field.ratings.items():
        assert other.ratings[renamed[name]] == pytest.approx(rating, rel=1e-6, abs=1e-4)
        assert other.error(renamed[name]) == pytest.approx(field.error(name), rel=1e-4)


@settings(deadline=None, max_examples=40)
@given(fields())
def test_the_field_turned_round_is_the_mirror(games: list[Game]) -> None:
    field = logistic(games)
    turned = logistic([game._replace(score=1 - game.score) for game in games])
    for name, rating in field.ratings.items():
        assert turned.ratings[name] == pytest.approx(-rating, rel=1e-6, abs=1e-4)
        assert turned.error(name) == pytest.approx(field.error(name), rel=1e-4)


@settings(deadline=None, max_examples=30)
@given(fields(), st.floats(-3000, 3000))
def test_anchors_move_the_scale_and_nothing_else(games: list[Game], at: float) -> None:
    field = logistic(games)
    name = field.groups[0][0]
    anchored = logistic(games, {name: at, "who did not play": 7.0})
    assert anchored.ratings[name] == at
    for other in field.groups[0]:
        difference = field.ratings[other] - field.ratings[name]
        assert anchored.ratings[other] - at == pytest.approx(difference, rel=1e-6, abs=1e-4)
    assert anchored.groups == field.groups


@settings(deadline=None, max_examples=60)
@given(fields(), st.booleans())
def test_an_advantage_is_told_where_it_raises_the_rank(
    games: list[Game], is_one_sided: bool
) -> None:
    if is_one_sided:
        games = [game for game in games if game.first < game.second] or games[:1]
    design = Design.of(games, {}, has_advantage=True)
    ranks = [np.linalg.matrix_rank(design.rows[:, :end]) for end in (-1, None)]
    assert design.has_advantage == (ranks[0] < ranks[1])


# Anchors.


def against(anchor: str, score: float, pairs: int = 6) -> list[Game]:
    """`score` of x in each game."""
    return [
        Game(*names, points, f"{anchor}{n}")
        for n in range(pairs)
        for names, points in ((("x", anchor), score), ((anchor, "x"), 1 - score))
    ]


def test_anchors_that_the_games_contradict_are_found() -> None:
    games = [*against("a", 1.0), *against("b", 0.0)]
    for anchors, fits in (
        ({"a": 3000.0, "b": 0.0}, False),
        ({"a": 0.0, "b": 3000.0}, True),
        ({"a": 0.0, "b": 100.0}, False),
    ):
        chance = anchor_fit(games, anchors)
        assert chance is not None
        assert (chance >= MISFIT) == fits
    assert anchor_fit(games, {"a": 0.0, "who did not play": 9.0}) is None
    assert anchor_fit(games, {"a": 0.0}) is None
    apart = [*against("a", 1.0), *split("b", "c", 3)]
    assert anchor_fit(apart, {"a": 0.0, "b": 3000.0}) is None


def test_true_anchors_are_seldom_accused() -> None:
    anchors = {"a": 0.0, "b": 400.0, "c": 800.0}
    low = 0
    for dice in trials(8, 100):
        games = []
        for n in range(24):
            anchor = "abc"[n % 3]
            chance = expected_score(300 - anchors[anchor])
            games += [
                Game("x", anchor, int(dice.random() < chance), str(n)),
                Game(anchor, "x", 1 - int(dice.random() < chance), str(n)),
            ]
        fit = anchor_fit(games, anchors)
        low += fit is not None and fit < 0.05
    assert low <= 8


def test_ratings_that_cannot_be_found_are_left_out_with_the_reason() -> None:
    outcomes = [Outcome(*game) for game in (*against("a", 1.0), *against("b", 0.0))]
    found = standings(outcomes, {"a": 0.0, "b": 1e6})
    assert found.results.ratings == {}
    assert found.results.failure is not None
    assert len(found.pairings) == 2


@settings(deadline=None, max_examples=60)
@given(fields(), st.lists(st.sampled_from([-4000.0, 0.0, 4000.0]), min_size=5, max_size=5))
def test_the_furthest_anchors_break_nothing(games: list[Game], at: list[float]) -> None:
    anchors = dict(zip("ace", at, strict=False))
    field = standings([Outcome(*game) for game in games], anchors).results
    assert (field.failure is None) == bool(field.ratings)
    assert all(math.isfinite(field.ratings[name] + field.error(name)) for name in field.ratings)


# Tournaments.


def test_forfeits_are_apart_and_unrated_games_left_out() -> None:
    outcomes = [
        Outcome("a", "b", 1.0, "1"),
        Outcome("b", "a", 0.0, "1", is_forfeit=True),
        Outcome("a", "b", 0.0, "2", is_forfeit=True),
        Outcome("b", "a", 0.5, "2"),
        Outcome("a", "b", 1.0, "3"),
        Outcome("b", "a", 1.0, "3", is_rated=False),
    ]
    found = standings(outcomes)
    assert [found.protocol[name].value for name in "ab"] == [0.8, 0.8]
    (pairing,) = found.pairings
    assert (pairing.wins, pairing.draws, pairing.losses) == (3, 1, 1)
    assert pairing.pairs == PairCounts(ld=1, ww=1)
    assert pairing.best == pairing.by_games
    assert found.skill.is_penalised
    assert not found.results.is_penalised


def test_a_protocol_score_has_jeffreys_interval() -> None:
    """Brown, Cai and DasGupta's closed ends, and 9 of 10 by their table's formula."""
    games = [Outcome("a", "b", 1.0, str(n)) for n in range(10)]
    assert protocol_scores(games)["a"].high == 1
    games[0] = games[0]._replace(score=0.0, is_forfeit=True)
    kept = protocol_scores(games)
    assert (kept["a"].value, kept["b"].value) == (0.9, 1)
    assert kept["a"].low == pytest.approx(0.6188, abs=1e-3)
    assert kept["a"].high == pytest.approx(0.9890, abs=1e-3)


def test_one_who_did_not_play_changes_nothing() -> None:
    outcomes = [Outcome("a", "b", 1.0, "1"), Outcome("b", "a", 0.5, "1")]
    unrated = Outcome("c", "a", 1.0, "2", is_rated=False)
    assert standings([*outcomes, unrated]).results.ratings == standings(outcomes).results.ratings
    assert "c" not in standings([*outcomes, unrated]).protocol


@settings(deadline=None, max_examples=30)
@given(fields())
def test_pairings_add_up(games: list[Game]) -> None:
    found = list(pairings([Outcome(*game) for game in games]))
    assert sum(p.wins + p.draws + p.losses for p in found) == len(games)
    assert sum(sum(p.pairs) for p in found) == len({game.cluster for game in games})
    for pairing in found:
        assert pairing.by_pairs is not None
        assert pairing.by_pairs.score == pytest.approx(pairing.by_games.score)
        assert pairing.best == pairing.by_pairs


# Coverage, on seeded dice.


def trials(seed: int, number: int) -> Iterator[np.random.Generator]:
    return map(np.random.default_rng, np.random.SeedSequence(seed).generate_state(number).tolist())


@pytest.mark.parametrize("shares", [(0.3, 0.2, 0.5), (0.02, 0.03, 0.95), (0.1, 0.8, 0.1)])
def test_jeffreys_intervals_hold_the_truth(shares: tuple[float, ...]) -> None:
    """Of eight games, with every count that they can give."""
    truth, held = elo(shares[2] + shares[1] / 2), 0.0
    for wins in range(9):
        for draws in range(9 - wins):
            counts = (8 - wins - draws, draws, wins)
            found = pairwise(counts).elo
            ways = math.comb(8, wins) * math.comb(8 - wins, draws)
            chance = ways * math.prod(p**n for p, n in zip(shares, counts, strict=True))
            held += chance * (found.low <= truth <= found.high)
    assert held > 0.93


def test_normal_intervals_hold_the_truth() -> None:
    shares = (0.1, 0.15, 0.3, 0.25, 0.2)
    truth = elo(float(np.dot(shares, np.linspace(0, 1, 5))))
    held = 0
    for dice in trials(5, 300):
        found = pairwise(dice.multinomial(60, shares).tolist())
        assert found.is_normal
        held += found.elo.low <= truth <= found.elo.high
    assert 0.92 < held / 300 < 0.98


def test_errors_of_a_field_by_pair_hold_the_truth() -> None:
    """Where a pair's games end alike more often than not, errors of single games would not."""
    strengths = {"a": 120.0, "b": 0.0, "c": -120.0}
    held = naive = 0
    for dice in trials(6, 100):
        games = []
        for n in range(90):
            one, two = ("ab", "bc", "ac")[n % 3]
            chance = expected_score(strengths[one] - strengths[two])
            score = int(dice.random() < chance)
            back = 1 - score if dice.random() < 0.8 else int(dice.random() < 1 - chance)
            games += [Game(one, two, score, str(n)), Game(two, one, back, str(n))]
        field = logistic(games)
        held += abs(field.ratings["a"] - strengths["a"]) < field.error("a")
        naive += abs(field.ratings["a"] - strengths["a"]) < errors(field, field.fisher)["a"]
    assert held > 90
    assert naive < 90


def test_a_test_keeps_its_error_rates() -> None:
    """Under elo0 it accepts about α of the time, and the estimate after the stop is not biased."""
    test, accepted, above = Sprt(0, 80), 0, 0
    for dice in trials(7, 100):
        counts, state = np.zeros(3), test.state((0, 0, 0))
        while state == "continue":
            counts += dice.multinomial(10, (0.35, 0.3, 0.35))
            state = test.state(counts.tolist())
        accepted += state == "accept"
        above += test.estimate(counts.tolist()).elo.value > 0
    assert accepted <= 10
    assert 35 <= above <= 65


def test_a_quick_stop_is_estimated_without_bias() -> None:
    """Of level players the estimate lay above 0 in four tests of five."""
    test, above, below, held = Sprt(0, 200), 0, 0, 0
    for dice in trials(8, 150):
        counts, state = np.zeros(5), test.state((0, 0, 0, 0, 0))
        while state == "continue":
            counts[dice.choice(3, 2, p=(0.2, 0.6, 0.2)).sum()] += 1
            state = test.state(counts.tolist())
        elo = test.estimate(counts.tolist()).elo
        above += elo.value > 1e-6
        below += elo.value < -1e-6
        held += elo.low < 0 < elo.high
    assert abs(above - below) <= 40
    assert held >= 140


@given(st.lists(st.integers(0, 5), min_size=5, max_size=5), st.integers(0, 3))
def test_a_better_pair_never_rates_lower(counts: list[int], bin_: int) -> None:
    """A sweep's estimate once lay below that of a win and a draw."""
    worse, better = list(counts), list(counts)
    worse[bin_] += 1
    better[bin_ + 1] += 1
    assert pairwise(better).elo.value >= pairwise(worse).elo.value - 1e-6
