"""The page of `arena report --html`, opened from the disk with no network."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from arena import page as pages
from arena.store import MatchRow, Records, read
from tests.browser.boards import picture_of, pieces_of
from tests.browser.conftest import Visitor, picture
from tests.browser.process import HOSTILE, IMAGE, SCRIPT, run_arena
from tests.browser.test_dashboard import HAS_DATA
from tests.browser.tournaments import tournament

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def folder(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is over, with its page."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "config.toml").write_text(HOSTILE.format(max_plies=30, period=0))
    shown = ("--view", "none", "--dashboard", "off")
    run_arena("run", folder / "config.toml", "--out", folder / "run", *shown)
    run_arena("report", folder / "run", "--html", folder / "page.html")
    return folder


@pytest.fixture
def records(folder: Path) -> Records:
    return read(folder / "run")


@pytest.fixture
def page(folder: Path, visitor: Visitor) -> Iterator[Page]:
    """The report, of which the browser asked for nothing but the file."""
    address = (folder / "page.html").as_uri()
    page = visitor.page()
    page.context.set_offline(True)
    page.goto(address)
    yield page
    asked = {request.url.partition("#")[0] for request in visitor.requests}
    assert {url for url in asked if not url.startswith("data:")} == {address}


def test_the_charts_have_data(page: Page) -> None:
    expect(page.locator("#status")).to_have_text("report")
    for chart in ("chart-queue", "chart-prefix", "chart-stream"):
        page.get_by_test_id(chart).scroll_into_view_if_needed()
        page.wait_for_function(HAS_DATA, arg=chart)
    expect(page.get_by_test_id("total-finished")).to_have_text("12 of 12")
    picture(page, "report-fleet")
    page.get_by_role("link", name="Agents").click()
    page.wait_for_function(HAS_DATA, arg="chart-histogram")
    picture(page, "report-agents")


def longest(records: Records, game: str) -> MatchRow:
    made = [ply.match_id for ply in records.plies]
    return max((m for m in records.matches if m.game == game), key=lambda m: made.count(m.id))


@pytest.mark.parametrize("game", ["chess", "janggi"])
def test_a_game_can_be_stepped_through(game: str, page: Page, records: Records) -> None:
    match = longest(records, game)
    plies = [ply for ply in records.plies if ply.match_id == match.id]
    page.get_by_role("link", name="Matches", exact=True).click()
    page.get_by_test_id("grid").locator(f'a[href="#match={match.id}"]').click()
    board = page.locator("#view-match svg.board-picture")
    position = page.get_by_test_id("position")
    expect(position).to_contain_text("Position 0 of 30")
    assert picture_of(board, game).pieces == pieces_of(match.start_fen)
    assert picture_of(board, game).marks == ()
    for ply in plies:
        page.get_by_test_id("step-next").click()
        expect(position).to_contain_text(f"Position {ply.ply + 1} of 30")
        assert picture_of(board, game).pieces == pieces_of(ply.fen_after)
    expect(page.get_by_test_id("step-next")).to_be_disabled()
    expect(page.get_by_test_id("match-state")).to_contain_text("ply cap")
    expect(page.get_by_test_id("move")).to_have_count(30)
    picture(page, f"report-{game}")


def test_markup_in_names_and_answers_is_text(page: Page, records: Records) -> None:
    page.get_by_role("link", name="Matches", exact=True).click()
    for name in (SCRIPT, IMAGE):
        expect(page.get_by_test_id("results").get_by_text(name, exact=True).first).to_be_visible()
    lost = next(match for match in records.matches if IMAGE in match.agents)
    page.goto(f"{page.url.partition('#')[0]}#match={lost.id}")
    page.get_by_test_id("step-last").click()
    expect(page.get_by_test_id("attempts").locator("pre").last).to_contain_text(SCRIPT)


def test_its_policy_lets_no_other_script_run(page: Page, visitor: Visitor) -> None:
    policy = page.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content")
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "unsafe" not in re.findall(r"script-src [^;]+", policy)[0]
    page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.hacked = 1";
          document.body.append(script);
        }"""
    )
    assert page.evaluate("'hacked' in window") is False
    visitor.forgive("Content Security Policy")


def test_it_holds_the_details_of_every_match(page: Page, records: Records) -> None:
    text = page.locator("#embedded").text_content()
    assert text is not None
    held: dict[str, Any] = json.loads(text)["details"]
    assert held == json.loads(json.dumps(pages.embedded(records)["details"]))
    for match in records.matches:
        plies = [(ply.move, ply.fen_after) for ply in records.plies if ply.match_id == match.id]
        assert [(ply["move"], ply["fen"]) for ply in held[match.id]["plies"]] == plies


def test_what_it_leaves_out_is_said_at_the_top(
    records: Records, visitor: Visitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MOST_PLIES", 40)
    pages.write(tmp_path / "page.html", records)
    page = visitor.open((tmp_path / "page.html").as_uri())
    note = page.locator("#notes li")
    expect(note).to_contain_text("games can be stepped through here")
    totals = page.get_by_test_id("totals").bounding_box()
    box = note.bounding_box()
    assert box is not None
    assert totals is not None
    assert 0 < box["y"] < totals["y"]


def test_a_game_whose_moves_it_leaves_out_is_no_link(
    records: Records, visitor: Visitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MOST_PLIES", 40)
    pages.write(tmp_path / "page.html", records)
    held = pages.embedded(records)["details"]
    page = visitor.open(f"{(tmp_path / 'page.html').as_uri()}#matches")
    names = page.get_by_test_id("result").locator("th a")
    expect(names).to_have_count(len(records.matches))
    links = names.locator("xpath=self::*[@href]")
    hrefs = links.evaluate_all("links => links.map((link) => link.getAttribute('href'))")
    assert sorted(hrefs) == sorted(f"#match={match}" for match in held)


def test_it_says_which_of_many_boards_are_shown(visitor: Visitor, tmp_path: Path) -> None:
    """64 of 196 boards, read as all games there were."""
    pages.write(tmp_path / "page.html", tournament(("a", "b", "c"), 12))
    page = visitor.open(f"{(tmp_path / 'page.html').as_uri()}#matches")
    count = page.get_by_test_id("board-count")
    expect(count).to_have_text("1–64 of 72")
    turn = page.get_by_role("group", name="Pages of boards").get_by_role("button", name="Next")
    turn.click()
    expect(count).to_have_text("65–72 of 72")
    page.locator("#board-filter").fill("nobody")
    expect(count).to_have_text("0 of the 8 on this page")
