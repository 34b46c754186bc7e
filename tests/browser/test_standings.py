"""Standings and the browser of finished games, in reports and in a dashboard."""

import json
import socket
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from arena import page as pages
from arena import report
from arena.report import build
from arena.store import EventRow, Records, read
from tests.browser.conftest import Visitor, picture
from tests.browser.process import HELD, HOSTILE, IMAGE, SCRIPT, playing
from tests.browser.test_dashboard import contrast, gate, luminance
from tests.browser.tournaments import tournament

pytestmark = pytest.mark.browser

__all__ = ["gate"]
"""A fixture of the dashboard's tests."""

RTL = "שחקן/لاعب"
LONG = "a name that has as many letters as the config lets a name have.."
FEW = ("ann", SCRIPT, LONG, RTL, IMAGE, "zoe")
MANY = tuple(f"player-{number:02}" for number in range(64))
TEXTS = "cells => cells.map((cell) => cell.textContent)"

Opened = Callable[..., Page]


@pytest.fixture
def opened(tmp_path: Path, visitor: Visitor) -> Opened:
    """Opens the report of records at a view."""

    def opened(records: Records, view: str = "standings", **options: Any) -> Page:
        pages.write(tmp_path / "page.html", records)
        page = visitor.open(f"{(tmp_path / 'page.html').as_uri()}#{view}", **options)
        expect(page.locator(f"#view-{view} h2").first).to_be_visible()
        return page

    return opened


def rows(page: Page) -> Locator:
    return page.get_by_test_id("standing")


def signed(value: float) -> str:
    return f"{'−' if round(value) < 0 else '+'}{abs(round(value)):,}" if round(value) else "0"


def test_the_table_shows_what_the_report_says(opened: Opened) -> None:
    records = tournament(FEW, 6)
    page = opened(records)
    expect(page.get_by_test_id("standings-count")).to_have_text("180 finished games")
    for number, row in enumerate(build(records)["standings"]):
        cells = rows(page).nth(number).locator("th, td").evaluate_all(TEXTS)
        points = str(row["points"]).removesuffix(".0").replace(".5", "½")
        assert cells[:7] == [
            str(row["place"]),
            row["name"],
            *(str(row[key]) for key in ("games", "wins", "draws", "losses")),
            points,
        ]
        assert cells[7] == f"{signed(row['elo'])} ±{round(row['elo_error'])}"
        assert cells[8] == f"{signed(row['skill_elo'])} ±{round(row['skill_elo_error'])}"
        lost = row["forfeits"].get("illegal", 0)
        assert cells[10] == (f"illegal {lost}" if lost else "none")
    picture(page, "standings-light")


def test_the_plot_has_a_whisker_from_low_to_high_for_each_rating(opened: Opened) -> None:
    records = tournament(FEW, 6)
    page = opened(records)
    by_name = {row["name"]: row for row in build(records)["standings"]}
    for kind, key in (("All games", "elo"), ("Without forfeits", "skill_elo")):
        page.get_by_role("button", name=kind).click()
        ratings = page.get_by_test_id("rating")
        names = ratings.locator("th").all_inner_texts()
        shown_values = [by_name[name][key] for name in names]
        assert shown_values == pytest.approx(sorted(shown_values, reverse=True), abs=1e-3)
        assert sorted(names) == sorted(by_name)
        boxes: list[Any] = [
            ratings.nth(place).locator(mark).bounding_box()
            for place in range(len(names))
            for mark in (".whisker", ".dot")
        ]
        whiskers, dots = boxes[::2], boxes[1::2]
        first = by_name[names[0]]
        scale = whiskers[0]["width"] / (2 * first[f"{key}_error"])
        zero = dots[0]["x"] + 4 - scale * first[key]
        for name, whisker, dot in zip(names, whiskers, dots, strict=True):
            value, error = by_name[name][key], by_name[name][f"{key}_error"]
            assert dot["x"] + 4 == pytest.approx(zero + scale * value, abs=2)
            assert whisker["x"] == pytest.approx(zero + scale * (value - error), abs=2)
            assert whisker["width"] == pytest.approx(scale * 2 * error, abs=2)


def test_each_pairing_has_its_points_and_says_more_when_pointed_at(opened: Opened) -> None:
    records = tournament(FEW, 6)
    page = opened(records)
    names = [row["name"] for row in build(records)["standings"]]
    pairing = build(records)["pairings"][0]
    one, two = pairing["agent"], pairing["opponent"]
    table = page.get_by_test_id("cross-table").locator("tbody tr")
    got = pairing["wins"] + pairing["draws"] / 2
    for row, column, points in ((one, two, got), (two, one, 12 - got)):
        cell = table.nth(names.index(row)).locator("td").nth(names.index(column) + 1)
        text = "½" if points == 0.5 else f"{points:g}".replace(".5", "½")
        expect(cell).to_have_text(f"{text}/12")
        kind = "below" if points < 6 else "above"
        expect(cell).to_have_class(kind)
    cell.hover()
    said = page.locator(".matrix .readout").first
    expect(said).to_contain_text(f"{two} v {one}: ")
    record = f"{pairing['losses']} won, {pairing['draws']} drawn, {pairing['wins']} lost"
    expect(said).to_contain_text(f"{record}) · Elo {signed(-pairing['elo']['value'])},")


def test_the_heat_map_shows_the_report_s_likelihoods(opened: Opened) -> None:
    records = tournament(FEW, 6)
    page = opened(records)
    figures = build(records)
    names, (rated,) = [row["name"] for row in figures["standings"]], figures["ratings"]
    for place, name in enumerate(names):
        cells = page.get_by_test_id("los").locator("tbody tr").nth(place).locator("td")
        shown = cells.evaluate_all(TEXTS)[1:]
        los = rated["los"][rated["names"].index(name)]
        for other, text in zip(names, shown, strict=True):
            value = los[rated["names"].index(other)]
            if value is None:
                assert text == ""
            else:
                low, high = {"<1": (0, 0.501), ">99": (99.499, 100)}.get(text) or (
                    int(text) - 0.501,
                    int(text) + 0.501,
                )
                assert low <= value * 100 <= high
                assert text not in ("0", "100")  # nothing is as sure as that


def test_what_cannot_be_compared_is_said(opened: Opened) -> None:
    page = opened(tournament(("a", "b", "c", "d"), 4, links=(("a", "b"), ("c", "d"))))
    notes = page.get_by_test_id("standing-notes")
    expect(notes).to_contain_text(
        "No games link these 2 groups, so ratings compare within a group only: 1. a, b; 2. c, d."
    )
    expect(page.get_by_test_id("ratings")).to_contain_text("Group 2")
    assert page.get_by_test_id("standings").locator("thead th").last.text_content() == "Group"
    expect(page.get_by_test_id("cross-table").locator("td.unknown")).to_have_count(8)
    expect(page.get_by_test_id("los").locator("td.unknown")).to_have_count(8)
    picture(page, "standings-groups")


def test_how_much_the_numbers_rest_on_is_said(opened: Opened) -> None:
    links = (("a", "b"), ("a", "c"), ("b", "c"), ("c", "d"))
    records = tournament(("a", "b", "c", "d"), 3, links=links)
    page = opened(records)
    by_error = sorted(build(records)["standings"], key=lambda row: row["elo_error"])
    pairs = {"a": 6, "b": 6, "c": 9, "d": 3}
    sure, unsure = (
        f"{row['name']} ({pairs[row['name']]} pairs: error ±{round(row['elo_error'])})"
        for row in (by_error[0], by_error[-1])
    )
    notes = page.get_by_test_id("standing-notes")
    expect(notes).to_contain_text(f"Surest: {sure}; least sure: {unsure}.")
    (rated,) = build(records)["ratings"]
    worth = f"{signed(rated['advantage_elo'])} ±{round(rated['advantage_error'])}"
    expect(notes).to_contain_text(f"Moving first is worth {worth} Elo here (95 %).")


def test_games_that_are_not_rated_are_named(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tournament(("a", "b"), 2)
    fallen = records.matches[0]._replace(termination="flag_fall", winner=1)
    monkeypatch.setattr(report, "saturated_engines", lambda figures: {"main"})
    page = opened(records._replace(matches=(fallen, *records.matches[1:])))
    notes = page.get_by_test_id("standing-notes")
    expect(notes).to_contain_text("1 game not rated")
    notes.get_by_role("link", name="#0 a v b").click()
    expect(page.get_by_test_id("match-state")).to_contain_text("flag fall")
    page.get_by_role("link", name="← Matches").click()
    expect(page.get_by_test_id("results")).to_contain_text("flag fall (not rated)")


def test_skill_and_elo_of_different_zeros_say_so(opened: Opened) -> None:
    records = tournament(("a", "b", "c"), 4)
    matches = tuple(
        row._replace(termination="forfeit", winner=1 - row.agents.index("c"))
        if "c" in row.agents
        else row._replace(termination="checkmate")
        for row in records.matches
    )
    notes = opened(records._replace(matches=matches)).get_by_test_id("standing-notes")
    expect(notes).to_contain_text("No skill rating, for want of a game without a forfeit: c.")


def test_what_a_format_says_beside_the_ratings_has_tables(opened: Opened) -> None:
    """A test by SPRT of each pairing, and an agent that met itself."""
    names = ("a", "b", "b (null)")
    records = tournament(names, 30, links=(("a", "b"), ("b", "b (null)")))
    config = json.loads(records.run.config_json)
    config["tournament"]["null_pairing"] = "b"
    config["sprt"] = {"elo0": 0, "elo1": 200}
    records = records._replace(run=records.run._replace(config_json=json.dumps(config)))
    figures = build(records)
    page = opened(records)
    expect(rows(page)).to_have_count(2)
    tests, nulls = page.get_by_test_id("extra").all()
    (test,), (null,) = figures["sprt"], figures["null_pairings"]
    assert test["decision"] != "continue"
    shown = tests.locator("td").evaluate_all(TEXTS)
    assert shown[:4] == ["a", "b", str(test["pairs"]), f"{test['llr']:.2f}"]
    side = "H1 accepted (elo1 200)" if test["decision"] == "accept" else "H0 accepted (elo0 0)"
    assert shown[-1] == side
    expect(tests).to_contain_text("free of the bias that an early stop brings")
    counts = [str(null[key]) for key in ("wins", "draws", "losses")]
    met = [null["agent"], null["opponent"]]
    assert nulls.locator("td").evaluate_all(TEXTS)[:5] == [*met, *counts]
    picture(page, "standings-extras")


def test_byes_and_ties_of_a_knock_out_are_told(opened: Opened) -> None:
    bye = {"game": "chess", "round": 1, "agent": "c", "points": 0.0}
    tie = {
        **{"game": "chess", "round": 1, "tie": 1, "agents": ["a", "b"], "points": [2.5, 1.5]},
        **{"winner": "a", "by": "sudden_death"},
    }
    told = [
        EventRow(0.5, kind, json.dumps(detail))
        for kind, detail in (("bye", bye), ("tie_decided", tie))
    ]
    records = tournament(("a", "b"), 2)._replace(events=tuple(told))
    byes, ties = opened(records).get_by_test_id("extra").all()
    assert byes.locator("td").evaluate_all(TEXTS) == ["c", "1", "0"]
    assert ties.locator("td").evaluate_all(TEXTS) == [
        *("a", "b", "1", "2½ : 1½", "a", "sudden death")
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_swiss_tournament_s_table_has_byes_and_tie_breaks(opened: Opened, scheme: str) -> None:
    records = tournament(("a", "b", "c", "d", "e"), 1)
    config = json.loads(records.run.config_json)
    config["tournament"] |= {"format": "swiss", "pairs": 1}
    byes = [
        {"game": "chess", "round": round_, "agent": name, "points": 2.0}
        for round_, name in enumerate("abcde", 1)
    ]
    records = records._replace(
        run=records.run._replace(config_json=json.dumps(config)),
        events=tuple(EventRow(0.5, "bye", json.dumps(bye)) for bye in byes),
    )
    page = opened(records, width=390, height=844, color_scheme=scheme)
    table = page.get_by_test_id("standings")
    headings = table.locator("thead th").evaluate_all(TEXTS)
    assert headings[6:10] == ["Points", "Of byes", "Buchholz", "S-B"]
    for number, row in enumerate(build(records)["standings"]):
        cells = rows(page).nth(number).locator("th, td").evaluate_all(TEXTS)
        assert cells[0] == str(row["place"])
        assert cells[7] == "2"
        assert float(cells[8]) == pytest.approx(row["buchholz"], abs=0.006)
        assert float(cells[9]) == pytest.approx(row["sonneborn_berger"], abs=0.006)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    picture(page, f"standings-swiss-narrow-{scheme}")


def test_a_knock_out_names_its_winner(opened: Opened) -> None:
    tie = {"game": "chess", "round": 1, "tie": 1, "agents": ["a", "b"], "points": [1.5, 2.5]}
    records = tournament(("a", "b"), 2)
    config = json.loads(records.run.config_json)
    config["tournament"] |= {"format": "knockout"}
    page = opened(
        records._replace(
            run=records.run._replace(config_json=json.dumps(config)),
            events=(
                EventRow(0.5, "tie_decided", json.dumps({**tie, "winner": "b", "by": "score"})),
            ),
        )
    )
    expect(page.get_by_test_id("standing-notes")).to_contain_text("b won the knock-out.")
    assert rows(page).first.locator("th").text_content() == "b"
    picture(page, "standings-knock-out")


def test_a_run_that_may_grow_does_not_say_of_how_many(opened: Opened) -> None:
    records = tournament(("a", "b"), 2)
    config = json.loads(records.run.config_json)
    config["tournament"] |= {"format": "swiss"}
    run = records.run._replace(config_json=json.dumps(config))
    page = opened(records._replace(run=run), "fleet")
    expect(page.get_by_test_id("total-finished")).to_have_text("4")
    expect(page.get_by_test_id("total-states")).to_contain_text(", more may come")
    expect(page.locator("progress")).to_be_hidden()
    picture(page, "fleet-may-grow")


def test_two_players(opened: Opened) -> None:
    page = opened(tournament(("a", "b"), 1))
    expect(rows(page)).to_have_count(2)
    expect(page.get_by_test_id("los").locator("tbody td.self")).to_have_count(2)
    picture(page, "standings-two")


def test_sixty_four_players(opened: Opened) -> None:
    page = opened(tournament(MANY))
    expect(rows(page)).to_have_count(64)
    los = page.get_by_test_id("los")
    cells = los.locator("tbody td:is(.below, .above)")
    assert cells.count() == 64 * 63
    assert los.evaluate("node => node.getBoundingClientRect().width") < 1240
    first = cells.nth(40)
    assert first.evaluate("node => getComputedStyle(node).fontSize") == "0px"
    first.scroll_into_view_if_needed()
    first.hover()
    said = page.locator(".matrix .readout").nth(1)
    expect(said).to_contain_text("better with a likelihood of")
    head = page.locator(".matrix .scroll").first
    assert head.evaluate("node => node.scrollWidth > node.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    picture(page, "standings-64")


@pytest.mark.parametrize(("view", "testid"), [("standings", "standing"), ("matches", "result")])
def test_nothing_is_wider_than_a_telephone(opened: Opened, view: str, testid: str) -> None:
    page = opened(tournament(FEW, 2), view, width=390, height=844, color_scheme="dark")
    expect(page.get_by_test_id(testid).first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    picture(page, f"standings-{view}-narrow-dark")


@pytest.mark.parametrize("is_sweep", [False, True])
def test_texts_of_a_telephone_s_axis_and_header_have_room(opened: Opened, is_sweep: bool) -> None:
    """The texts of ticks overlapped, and the theme stood in a row of its own."""
    records = tournament(FEW, 2)
    if is_sweep:
        sweep = [m._replace(winner=m.agents.index(min(m.agents))) for m in records.matches]
        records = records._replace(matches=tuple(sweep))
    page = opened(records, width=390, height=844)
    boxes = [text.bounding_box() for text in page.locator(".tick-text:visible").all()]
    spans = sorted((box["x"], box["x"] + box["width"]) for box in boxes if box is not None)
    assert len(spans) > 1
    assert all(one[1] < two[0] for one, two in pairwise(spans))
    tops = [page.locator(part).bounding_box() for part in (".brand", "#theme", "nav", "#status")]
    middles = [round(box["y"] + box["height"] / 2) for box in tops if box is not None]
    assert middles[0] == pytest.approx(middles[1], abs=4)
    assert middles[2] == pytest.approx(middles[3], abs=4)
    assert middles[1] < middles[2]


def test_a_cell_that_is_tapped_says_more(opened: Opened) -> None:
    page = opened(tournament(FEW, 2), width=390, height=844, has_touch=True)
    page.get_by_test_id("cross-table").locator("td.above").first.tap()
    expect(page.locator(".matrix .readout").first).to_contain_text(" points (")


def test_a_matrix_with_columns_out_of_sight_says_so(opened: Opened) -> None:
    page = opened(tournament(MANY[:40]))
    matrix = page.locator(".matrix").first
    hint = matrix.get_by_test_id("scroll-hint")
    expect(hint).to_be_visible()
    matrix.locator(".scroll").evaluate("node => node.scrollTo(node.scrollWidth, 0)")
    expect(hint).to_be_hidden()
    expect(page.locator(".matrix").nth(1).get_by_test_id("scroll-hint")).to_be_hidden()


GROUNDS = """
cells => cells.map((cell) => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const read = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return `rgb(${[...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)].join(", ")})`;
  };
  const { color, backgroundColor } = getComputedStyle(cell);
  return [read(color), read(backgroundColor), cell.className];
})
"""
"""Text and ground of cells in plain RGB, with the side that they are of."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_cell_can_be_read(opened: Opened, scheme: str) -> None:
    page = opened(tournament(FEW, 6), color_scheme=scheme)
    for table in ("cross-table", "los"):
        cells = page.get_by_test_id(table).locator("tbody td:is(.below, .above)")
        found = cells.evaluate_all(GROUNDS)
        assert {kind for *_, kind in found} == {"below", "above"}
        for text, ground, _ in found:
            assert contrast([text, ground]) >= 4.5, (table, text, ground)
            assert luminance(text) != luminance(ground)


def shown(page: Page) -> list[list[str]]:
    """Cells of the finished games."""
    texts: list[list[str]] = page.get_by_test_id("result").evaluate_all(
        "rows => rows.map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    return texts


def test_finished_games_are_found_by_player_result_ending_and_game(opened: Opened) -> None:
    records = tournament(FEW, 2)
    page = opened(records, "matches")
    count = page.get_by_test_id("result-count")
    expect(count).to_have_text("60")
    won = page.get_by_test_id("results-result").locator("option[value=won]")
    expect(won).to_be_disabled()
    page.get_by_test_id("results-player").select_option(SCRIPT)
    mine = [match for match in records.matches if SCRIPT in match.agents]
    expect(count).to_have_text(str(len(mine)))
    page.get_by_test_id("results-result").select_option("won")
    wins = [m for m in mine if m.winner is not None and m.agents[m.winner] == SCRIPT]
    expect(count).to_have_text(str(len(wins)))
    page.get_by_test_id("results-player").select_option("")
    expect(count).to_have_text("60")
    page.get_by_test_id("results-how").select_option("illegal")
    forfeits = [match for match in records.matches if match.termination == "forfeit"]
    expect(count).to_have_text(str(len(forfeits)))
    for row in shown(page):
        assert row[2] == "forfeit: illegalWhite played e2e5, illegal"
    picture(page, "finished-illegal")
    page.get_by_test_id("results-result").select_option("draw")
    expect(page.get_by_test_id("no-results")).to_have_text("No finished match fits the filter.")
    expect(count).to_have_text("0")


def test_finished_games_are_sorted_both_ways_and_back(opened: Opened) -> None:
    page = opened(tournament(("a", "b", "c"), 3), "matches")
    newest = shown(page)
    heading = page.get_by_test_id("results-by-players")
    for order in ("ascending", "descending"):
        heading.get_by_role("button").click()
        expect(heading).to_have_attribute("aria-sort", order)
        names = [row[0] for row in shown(page)]
        assert names == sorted(names, reverse=order == "descending")
    heading.get_by_role("button").click()
    expect(heading).to_have_attribute("aria-sort", "none")
    assert shown(page) == newest


def test_games_of_a_run_under_way_are_rated_and_found(tmp_path: Path, visitor: Visitor) -> None:
    with playing(tmp_path, HOSTILE.format(max_plies=40, period=0.5)) as arena:
        page = visitor.open(f"{arena.url}#standings")
        expect(rows(page)).to_have_count(3)
        expect(page.get_by_test_id("standing-notes")).to_contain_text("error ±")
        picture(page, "standings-live")
        page.goto(f"{arena.url}#matches")
        page.get_by_test_id("results-player").select_option(IMAGE)
        page.get_by_test_id("results-result").select_option("lost")
        expect(page.get_by_test_id("result").first).to_contain_text("forfeit")
        found = [row[0] for row in shown(page)]
        ended = [match for match in read(arena.folder).matches if match.winner is not None]
        lost = [" v ".join(m.agents) for m in ended if m.agents[1 - (m.winner or 0)] == IMAGE]
        assert found
        assert set(found) <= set(lost)


def test_standings_come_when_games_end(
    tmp_path: Path, gate: socket.socket, visitor: Visitor
) -> None:
    with playing(tmp_path, HELD.format(gate=gate.getsockname()[1])) as arena:
        page = visitor.open(f"{arena.url}#standings")
        expect(page.get_by_test_id("no-standings")).to_have_text("No match has finished yet.")
        gate.close()
        assert arena.process.wait(timeout=30) == 0
        expect(page.get_by_test_id("standings-count")).to_have_text("2 finished games")
        expect(rows(page)).to_have_count(2)


def test_anchors_that_the_games_contradict_are_told(opened: Opened) -> None:
    records = tournament(("a", "b"), 12)
    config = json.loads(records.run.config_json)
    config["tournament"]["anchors"] = {"a": -3000, "b": 0}
    records = records._replace(run=records.run._replace(config_json=json.dumps(config)))
    notes = opened(records).get_by_test_id("standing-notes")
    expect(notes).to_contain_text("The anchors do not fit the games")


def test_a_test_says_which_pairs_it_leaves_out(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tournament(("a", "b"), 8)
    config = json.loads(records.run.config_json)
    config["sprt"] = {"elo0": 0, "elo1": 200}
    fallen = records.matches[0]._replace(termination="flag_fall", winner=1)
    records = records._replace(
        run=records.run._replace(config_json=json.dumps(config)),
        matches=(fallen, *records.matches[1:]),
    )
    monkeypatch.setattr(report, "saturated_engines", lambda figures: {"main"})
    notes = opened(records).get_by_test_id("standing-notes")
    expect(notes).to_contain_text(
        "The test of a v b leaves out 1 pair with a game that is not rated"
    )
