"""The page of `arena compare --html`, opened from the disk with no network."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import TRACES, picture
from tests.browser.process import IMAGE, SCRIPT, run_arena

pytestmark = pytest.mark.browser

CONFIG = f"""
name = "compared"
seed = 5
[engines.{json.dumps(SCRIPT)}]
kind = "scripted"
max_concurrent = 4
latency_seconds = 0.005
[engines.{json.dumps(IMAGE)}]
kind = "scripted"
max_concurrent = 4
latency_seconds = 0.01
[[agents]]
kind = "llm"
name = "a"
engine = "{SCRIPT}"
[[agents]]
kind = "llm"
name = "b"
engine = "{SCRIPT}"
[tournament]
games = ["chess", "janggi"]
parallel_matches = 2
max_plies = 12
[pace]
move_period_seconds = 0.1
"""
"""Two engines whose names are markup."""

CHARTS = ("throughput", "latency", "occupancy", "attainment")


@pytest.fixture(scope="module")
def address(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a comparison's page."""
    folder: Path = tmp_path_factory.mktemp("compared")
    (folder / "c.toml").write_text(CONFIG)
    cells = ("--seconds", "0.2", "--repeats", "2", "--concurrency", "1", "2")
    run_arena("compare", folder / "c.toml", *cells, "--html", folder / "page.html")
    return (folder / "page.html").as_uri()


def test_every_chart_is_drawn(page: Page) -> None:
    for chart in CHARTS:
        plot = page.locator(f"#{chart}")
        plot.scroll_into_view_if_needed()
        expect(plot.locator("svg.main-svg").first).to_be_visible()
    asked = {"throughput": ["1", "2"]}
    for chart in ("throughput", "latency", "attainment"):
        traces = page.evaluate(TRACES, chart)
        # latency's p95 are traces of their own
        assert len(traces) == (4 if chart == "latency" else 2)
        for trace in traces:
            assert trace["x"] == asked.get(chart, ["open", "closed 1", "closed 2"])
            assert all(value > 0 for value in trace["y"])
        expect(page.locator(f"#{chart} .scatterlayer .point").first).to_be_visible()
    picture(page, "compare")


def test_what_an_engine_does_not_tell_is_said(page: Page) -> None:
    """The scripted engine has no steps."""
    assert all(set(trace["y"]) == {None} for trace in page.evaluate(TRACES, "occupancy"))
    figure = page.locator("figure", has=page.locator("#occupancy"))
    expect(figure.locator("p")).to_contain_text("Not told by")


def test_markup_in_names_is_text(page: Page) -> None:
    for name in (SCRIPT, IMAGE):
        expect(page.locator("table.cells").get_by_text(name, exact=True).first).to_be_visible()
        legend = page.locator("#throughput .legendtext", has_text=name)
        expect(legend).to_have_text(name)


def test_the_tables_hold_what_the_charts_draw(page: Page) -> None:
    rows = page.locator("table.cells tbody tr")
    expect(rows).to_have_count(6)
    names = [rows.nth(place).locator("td").nth(1).inner_text() for place in range(6)]
    assert names == [SCRIPT, IMAGE] * 3
    closed = [rows.nth(place).locator("td").nth(2).inner_text() for place in (2, 4)]
    (trace, _) = page.evaluate(TRACES, "throughput")
    assert [told.partition(" ")[0] for told in closed] == [f"{rate:.1f}" for rate in trace["y"]]


def test_it_is_drawn_again_when_the_light_changes(page: Page) -> None:
    colour = "() => document.getElementById('throughput').layout.font.color"
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"light => ({colour})() !== light", arg=light)
    picture(page, "compare-dark")
