"""Finished games by player, result, ending and game, in any order."""

import pytest

from arena.dashboard.browse import ORDERS, SORTS, WINNERS, Wish, browse, catalogue
from arena.figures import MatchFigures
from tests.arena.random_runs import scheduled

CHESS, JANGGI = ("chess", "standard"), ("janggi", "janggi")


def ended(
    number: int,
    names: tuple[str, str],
    winner: int | None,
    how: str,
    plies: int,
    game: tuple[str, str] = CHESS,
) -> MatchFigures:
    row = scheduled(number, names, game)._replace(
        id=f"m{number}", state="finished", winner=winner, termination=how
    )
    match = MatchFigures(row)
    match.made = [plies, 0]
    return match


def games() -> list[MatchFigures]:
    forfeited = ended(3, ("Cy", "ann"), 1, "forfeit", 5)
    forfeited.fault = "illegal"
    return [
        ended(0, ("ann", "bob"), 0, "checkmate", 40),
        ended(1, ("bob", "ann"), 0, "checkmate", 12),
        ended(2, ("ann", "Cy"), None, "ply_cap", 80, JANGGI),
        forfeited,
    ]


@pytest.mark.parametrize(
    ("wish", "found"),
    [
        (Wish(), "3210"),
        (Wish(order="ascending"), "0123"),
        (Wish(player="Cy"), "32"),
        (Wish(player="C"), ""),
        (Wish(game="janggi"), "2"),
        (Wish(how="illegal"), "3"),
        (Wish(how="forfeit"), ""),
        (Wish(result="first"), "10"),
        (Wish(result="second"), "3"),
        (Wish(result="draw"), "2"),
        (Wish(player="ann", result="won"), "30"),
        (Wish(player="ann", result="lost"), "1"),
        (Wish(player="ann", result="first"), "10"),
        (Wish(result="won"), ""),
        (Wish(sort="plies"), "2013"),
        (Wish(sort="plies", order="ascending"), "3102"),
        (Wish(sort="players", order="ascending"), "0213"),
        (Wish(sort="result"), "1023"),
        (Wish(sort="how", order="ascending"), "0132"),
        (Wish(sort="game"), "2310"),
    ],
)
def test_a_wish_is_met(wish: Wish, found: str) -> None:
    told = browse(games(), (), wish, 0, 50)
    assert "".join(row["match"][1:] for row in told["results"]) == found
    assert told["total"] == len(found)


@pytest.mark.parametrize("sort", SORTS)
def test_every_order_is_the_other_one_turned_but_for_games_alike(sort: str) -> None:
    rows = [
        browse(games(), (), Wish(sort=sort, order=order), 0, 50)["results"]
        for order in ("ascending", "descending")
    ]
    assert sorted(row["match"] for row in rows[0]) == sorted(row["match"] for row in rows[1])
    assert (rows[0][0]["match"], rows[0][-1]["match"]) != (
        rows[1][0]["match"],
        rows[1][-1]["match"],
    )


def test_a_page_tells_what_there_is_to_wish_for_whatever_is_wished() -> None:
    told = browse(games(), (), Wish(player="Cy"), 1, 1)
    assert (told["total"], [row["match"] for row in told["results"]]) == (2, ["m2"])
    assert told["players"] == ["Cy", "ann", "bob"]
    assert told["games"] == ["chess", "janggi"]
    assert told["hows"] == ["checkmate", "illegal", "ply_cap"]


def test_games_that_are_not_rated_say_so() -> None:
    told = browse(games(), {"m1"}, Wish(), 0, 50)
    assert [row["match"] for row in told["results"] if not row["is_rated"]] == ["m1"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("won", WINNERS)
@pytest.mark.parametrize("player", ["", "ann", "Cy"])
def test_who_has_the_catalogue_finds_what_the_arena_would(
    player: str, won: str, sort: str, order: str
) -> None:
    """As a report's page does it, by the facets and values beside each game."""
    wish = Wish(player=player, result=won, sort=sort, order=order)
    told = catalogue(games(), ())
    rows = [row for row in told["results"] if set(wish.facets) <= set(row["facets"])]
    if order == "descending":
        rows.reverse()
    rows.sort(key=lambda row: row["sort"][sort], reverse=order == "descending")
    asked = browse(games(), (), wish, 0, 50)
    assert [row["match"] for row in rows] == [row["match"] for row in asked["results"]]
    for key in ("players", "games", "hows"):
        assert told[key] == asked[key]
