"""The dashboard of runs that are being played, in a real browser."""

import json
import re
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, ElementHandle, Locator, Page, expect

from tests.browser.boards import drawing, picture_of
from tests.browser.conftest import Visitor, picture
from tests.browser.process import HELD, HOSTILE, IMAGE, SCRIPT, Arena, playing
from tests.browser.relay import Relay

pytestmark = pytest.mark.browser

VIEWS = ("fleet", "standings", "agents", "matches")
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
TOKEN = "a-token-of-a-test-0123456789"
HAS_DATA = """
id => {
  const plot = document.querySelector(`[data-testid=${id}] .plot`);
  return plot?.data?.some((trace) => trace.x.length > 0);
}
"""
STREAMS = """
window.streams = [];
window.EventSource = class extends EventSource {
  constructor(...given) {
    super(...given);
    window.streams.push(this);
  }
};
"""
"""Notes every event stream that a page opens."""


@pytest.fixture(scope="module")
def arena(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """A run that goes on for as long as these tests take: its games last minutes."""
    folder = tmp_path_factory.mktemp("arena")
    with playing(folder, HOSTILE.format(max_plies=450, period=1.2)) as arena:
        yield arena


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def cards(page: Page, game: str = "") -> Locator:
    """Boards of the grid, without the games that end at once."""
    link = page.locator(f'a[aria-label*=" {game}"]:not([aria-label*="img"])')
    return page.get_by_test_id("card").filter(has=link)


def live(page: Page) -> None:
    expect(page.locator("#status")).to_have_attribute("data-kind", "live")


# Boards.


def test_boards_appear_and_move(arena: Arena, visitor: Visitor) -> None:
    page = visitor.open(f"{arena.url}#matches")
    for game in ("chess", "janggi"):
        card = cards(page, game).first
        board = card.locator("svg.board-picture")
        expect(board.locator(".mark.to")).to_be_visible()
        before = picture_of(board, game)
        assert {"K", "k"} <= set(before.pieces.values())
        start, end = before.marks
        assert end in before.pieces
        assert start not in before.pieces
        moved = card.locator(".card-move")
        expect(moved).not_to_have_text(moved.inner_text())
        after = picture_of(board, game)
        assert after.pieces != before.pieces
        assert after.marks != before.marks
    picture(page, "matches-light")


def test_boards_can_be_filtered_down_to_none(arena: Arena, visitor: Visitor) -> None:
    page = visitor.open(f"{arena.url}#matches")
    expect(cards(page, "janggi").first).to_be_visible()
    page.locator("#game-filter").select_option("chess")
    expect(cards(page, "janggi").first).to_be_hidden()
    expect(cards(page, "chess").first).to_be_visible()
    page.get_by_label("Agent", exact=True).fill("nobody")
    expect(page.get_by_test_id("no-boards")).to_have_text("No board here fits the filter.")


def outlines(page: Page) -> list[str]:
    """How Cho's general is drawn now."""
    shapes = page.locator(f'svg.symbols [id$="-{ord("K")}"] path')
    found: list[str] = shapes.evaluate_all("nodes => nodes.map((node) => node.getAttribute('d'))")
    return found


def test_janggi_has_three_labels_and_keeps_the_chosen_one(arena: Arena, visitor: Visitor) -> None:
    page = visitor.open(f"{arena.url}#matches")
    plan = drawing("janggi")
    assert plan.labels == ("hanja", "hangul", "letters")
    drawn = {}
    for label in plan.labels:
        choice = page.get_by_role("button", name=label.capitalize())
        choice.click()
        expect(choice).to_have_attribute("aria-pressed", "true")
        markup = plan.pieces[label]["K"]
        drawn[label] = outlines(page)
        assert set(re.findall(r'\bd="([^"]+)"', markup)) <= set(drawn[label])
    assert len({str(shape) for shape in drawn.values()}) == 3
    page.reload()
    choice = page.get_by_role("button", name="Letters")
    expect(choice).to_have_attribute("aria-pressed", "true")
    assert outlines(page) == drawn["letters"]


# Figures.


def handle(locator: Locator) -> ElementHandle:
    found = locator.element_handle()
    assert found is not None
    return found


def test_charts_have_data_and_go_on(arena: Arena, visitor: Visitor) -> None:
    page = visitor.open(f"{arena.url}#fleet")
    for chart in ("chart-queue", "chart-ttft", "chart-prefix", "chart-stream"):
        page.get_by_test_id(chart).scroll_into_view_if_needed()
        page.wait_for_function(HAS_DATA, arg=chart)
    expect(page.get_by_test_id("chart-ttft").locator(".scatterlayer path").first).to_be_visible()
    page.get_by_test_id("chart-prefix").scroll_into_view_if_needed()
    plot = page.get_by_test_id("chart-prefix").locator(".plot")
    end = plot.evaluate("({ data }) => data[0].x.at(-2)")
    page.wait_for_function("([plot, end]) => plot.data[0].x.at(-2) > end", arg=[handle(plot), end])
    expect(page.get_by_test_id("total-finished")).to_have_text(re.compile(r"^\d+ of 12$"))
    expect(page.get_by_test_id("verdict-title")).to_have_text(re.compile(r"^[✓⚠] \w"))
    picture(page, "fleet-light")


def test_the_whole_run_is_shown_from_its_first_figure_on(arena: Arena, visitor: Visitor) -> None:
    page = visitor.open(f"{arena.url}#fleet")
    page.wait_for_function(HAS_DATA, arg="chart-prefix")
    page.get_by_role("button", name="All").click()
    plot = handle(page.get_by_test_id("chart-prefix").locator(".plot"))
    first = get(f"{arena.url}api/telemetry?engine=main&span=1")["buckets"][0]["at"]
    assert first > 0
    page.wait_for_function(
        "([plot, first]) => plot.layout.xaxis.range[0] === first", arg=[plot, first]
    )


def rows(page: Page) -> Locator:
    return page.get_by_test_id("agent")


SORT = """
button => {
  button.click();
  const rows = [...document.querySelectorAll("[data-testid=agent]")];
  return rows.map((row) => Number(row.children[3].textContent));
}
"""
"""Sorts the agents; returns their moves before a frame can change them."""


def test_agents_can_be_sorted_and_filtered(arena: Arena, visitor: Visitor) -> None:
    page = visitor.open(f"{arena.url}#agents")
    expect(rows(page)).to_have_count(6)
    heading = page.get_by_test_id("sort-moves")
    for order in ("descending", "ascending"):
        moves = heading.get_by_role("button").evaluate(SORT)
        expect(heading).to_have_attribute("aria-sort", order)
        assert len(set(moves)) > 1
        assert moves == sorted(moves, reverse=order == "descending")
    page.get_by_label("Filter", exact=True).fill("dice")
    expect(rows(page)).to_have_count(2)
    expect(page.get_by_test_id("agent-count")).to_have_text("2 of 6")
    assert rows(page).get_by_role("button").all_inner_texts() == ["dice", "dice"]
    picture(page, "agents-light")


def test_a_selected_agent_has_its_latencies_as_a_histogram(arena: Arena, visitor: Visitor) -> None:
    page = visitor.open(f"{arena.url}#agents")
    row = rows(page).filter(has_text="constrained").first
    row.get_by_role("button").click()
    expect(row).to_have_attribute("aria-current", "true")
    expect(page.get_by_test_id("selected-agent")).to_have_text(SCRIPT)
    page.wait_for_function(HAS_DATA, arg="chart-histogram")
    bars = page.locator("[data-testid=chart-histogram] .plot").evaluate("({ data }) => data[0].y")
    assert sum(bars) > 0
    expect(page.get_by_test_id("chart-histogram").locator(".bars path").first).to_be_visible()


# Hostile text.


def test_markup_in_names_and_answers_is_text(arena: Arena, visitor: Visitor) -> None:
    page = visitor.open(f"{arena.url}#agents")
    for name in (SCRIPT, IMAGE):
        expect(rows(page).filter(has_text=name)).to_have_count(2)
    page.goto(f"{arena.url}#matches")
    grid = page.get_by_test_id("grid")
    expect(grid.get_by_text(SCRIPT, exact=True).first).to_be_visible()
    lost = page.get_by_test_id("results").get_by_role("row").filter(has_text=IMAGE)
    lost.filter(has_text="chess").filter(has_text=SCRIPT).first.get_by_role("link").click()
    title = page.locator("#view-match h2")
    expect(title).to_contain_text(SCRIPT)
    expect(title).to_contain_text(IMAGE)
    expect(page.get_by_test_id("match-state")).to_contain_text(f"{SCRIPT} won, forfeit")
    answers = page.get_by_test_id("attempts").locator("pre")
    expect(answers).to_have_count(3)
    for text in answers.all_inner_texts():
        assert SCRIPT in text
    picture(page, "forfeit-light")
    assert page.locator("script").count() == 2
    assert page.locator("main img").count() == 0


# The connection.


@pytest.fixture
def relay() -> Iterator[Relay]:
    relay = Relay()
    yield relay
    relay.cut()


def test_a_lost_connection_is_told_and_taken_up_where_it_was(
    tmp_path: Path, relay: Relay, visitor: Visitor
) -> None:
    with playing(
        tmp_path, HOSTILE.format(max_plies=300, period=0.6), f"127.0.0.2:{relay.port}"
    ) as arena:
        page = visitor.open(f"http://127.0.0.1:{relay.port}/#matches")
        live(page)
        expect(cards(page, "chess").first).to_be_visible()
        banner = page.locator("#connection")
        expect(banner).to_be_hidden()
        relay.cut()
        expect(banner).to_contain_text("Connection lost.")
        expect(page.locator("#status")).to_have_attribute("data-kind", "lost")
        picture(page, "lost-light")
        relay.asked.clear()
        relay.mend()
        live(page)
        expect(banner).to_be_hidden()
        expect(page.get_by_test_id("results").get_by_role("link").first).to_be_visible()
        moved = cards(page, "chess").first.locator(".card-move")
        expect(moved).not_to_have_text(moved.inner_text())
        assert re.search(rb"^Last-Event-ID: [0-9a-f]+-\d+\r$", relay.asked, re.M | re.I)
        names = (
            page.get_by_test_id("card")
            .locator("a")
            .evaluate_all("links => links.map((link) => link.hash)")
        )
        assert len(names) == len(set(names)) > 1
        assert arena.process.poll() is None
        visitor.forgive("net::ERR_")


@pytest.fixture
def gate() -> Iterator[socket.socket]:
    """While this listens, the games of HELD stand still."""
    with socket.create_server(("127.0.0.1", 0)) as gate:
        yield gate


def held(gate: socket.socket) -> str:
    return HELD.format(gate=gate.getsockname()[1])


def test_a_run_that_ends_is_over_and_not_asked_for_again(
    tmp_path: Path, gate: socket.socket, visitor: Visitor
) -> None:
    with playing(tmp_path, held(gate)) as arena:
        page = visitor.page()
        page.add_init_script(STREAMS)
        page.goto(f"{arena.url}#matches")
        live(page)
        expect(cards(page)).to_have_count(2)
        gate.close()
        expect(page.locator("#status")).to_have_text("the run is over")
        assert arena.process.wait(timeout=30) == 0
        expect(page.locator("#connection")).to_be_hidden()
        assert page.evaluate("streams.map((stream) => stream.readyState)") == [2], "one, closed"
        page.get_by_role("link", name="Fleet").click()
        expect(page.get_by_test_id("total-finished")).to_have_text("2 of 2")
        picture(page, "over-light")


def test_a_token_lets_in_and_an_interrupted_run_says_how_to_go_on(
    tmp_path: Path, gate: socket.socket, visitor: Visitor
) -> None:
    environ = {"ARENA_DASHBOARD_TOKEN": TOKEN}
    with playing(tmp_path, held(gate), environ=environ) as arena:
        address, _, query = arena.url.partition("?")
        assert query == f"token={TOKEN}"
        page = visitor.page()
        page.add_init_script(STREAMS)
        refused = page.goto(address)
        assert refused is not None
        assert refused.status == 401
        expect(page.locator("body")).to_contain_text("a token is needed")
        page.goto(f"{arena.url}#matches")
        live(page)
        expect(cards(page)).to_have_count(2)
        assert TOKEN not in page.url
        assert TOKEN not in page.content()
        assert page.evaluate("document.cookie") == ""
        visitor.forgive("401")
        arena.process.send_signal(signal.SIGINT)
        gate.close()
        banner = page.locator("#connection")
        expect(banner).to_contain_text("Nobody plays this run now: 2 matches are left.")
        expect(banner).to_contain_text("arena resume")
        expect(page.locator("#status")).to_have_text("not played now")
        assert page.evaluate("streams.map((stream) => stream.readyState)") == [2]
        picture(page, "left-light")


# For everybody.


def test_a_match_is_opened_stepped_through_and_left_by_keys_alone(
    arena: Arena, visitor: Visitor
) -> None:
    page = visitor.open(arena.url)
    live(page)
    focused = page.locator(":focus")
    for name in ("Skip to the content", "Fleet", "Standings", "Agents", "Matches"):
        page.keyboard.press("Tab")
        expect(focused).to_have_text(name)
    page.keyboard.press("Enter")
    card = cards(page, "chess").first.get_by_role("link")
    expect(card).to_be_visible()
    label = card.get_attribute("aria-label")
    for _ in range(20):
        page.keyboard.press("Tab")
        if focused.get_attribute("aria-label") == label:
            break
    page.keyboard.press("Enter")
    position = page.get_by_test_id("position")
    expect(position).to_be_visible()
    for key, ply in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        page.keyboard.press(key)
        expect(position).to_contain_text(f"Position {ply} of")
    page.keyboard.press("End")
    expect(page.get_by_test_id("follow")).to_have_attribute("aria-pressed", "true")
    picture(page, "match-light")
    page.go_back()
    expect(focused).to_have_attribute("aria-label", str(label))


def test_nothing_is_wider_than_a_telephone(arena: Arena, visitor: Visitor) -> None:
    page = visitor.page(width=390, height=844, color_scheme="dark")
    for view in (*VIEWS, "match"):
        if view == "match":
            page.get_by_test_id("results").get_by_role("link").first.click()
        else:
            page.goto(f"{arena.url}#{view}")
        expect(page.locator(f"#view-{view} h2").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        picture(page, f"{view}-narrow-dark")


LOOK = """
selector => {
  const node = [...document.querySelectorAll(selector)].find((one) => one.offsetParent !== null);
  const groundOf = (one) => getComputedStyle(one).backgroundColor;
  let ground = node;
  while (groundOf(ground) === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
  return [getComputedStyle(node).color, groundOf(ground)];
}
"""
"""Colour of an element's text, and of what is behind it."""


def contrast(colours: list[str]) -> float:
    """As WCAG 2 defines it, from two opaque colours."""
    light, dark = sorted(map(luminance, colours), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    found = re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", colour)
    assert found, colour
    shares = [int(text) / 255 for text in found.groups()]
    red, green, blue = (
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_light_and_dark_differ_and_can_be_read(arena: Arena, visitor: Visitor) -> None:
    page = visitor.open(f"{arena.url}#fleet")
    live(page)
    expect(page.get_by_test_id("engine")).to_be_visible()
    grounds = {}
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        for selector in (
            ".total-value",
            ".total-note",
            "nav a",
            "h2",
            ".choices button",
            "#status",
        ):
            assert contrast(page.evaluate(LOOK, selector)) >= 4.5, (scheme, selector)
        grounds[scheme] = page.evaluate(LOOK, ".total-value")[1]
    assert luminance(grounds["light"]) > luminance(grounds["dark"])
    page.get_by_role("button", name="Light").click()
    assert page.evaluate(LOOK, ".total-value")[1] == grounds["light"]


def test_pieces_glide_unless_less_motion_is_asked_for(arena: Arena, visitor: Visitor) -> None:
    page = visitor.open(f"{arena.url}#matches")
    cards(page, "chess").first.get_by_role("link").click()
    page.get_by_test_id("step-first").click()
    page.get_by_test_id("step-next").click()
    expect(page.get_by_test_id("position")).to_contain_text("Position 1 of")
    piece = page.locator("#view-match svg.board-picture > g > use").first
    duration = "node => getComputedStyle(node).transitionDuration"
    assert piece.evaluate(duration) == "0.14s"
    page.emulate_media(reduced_motion="reduce")
    assert piece.evaluate(duration) == "0s"
