"""The page of `arena plan --html`, opened from the disk with no network."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import TRACES, picture
from tests.browser.process import IMAGE, run_arena

pytestmark = pytest.mark.browser

SHAPE = ("--layers", "32", "--kv-heads", "8", "--head-size", "128", "--parameters", "8e9")


@pytest.fixture(scope="module")
def address(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a plan whose model's name is markup."""
    path: Path = tmp_path_factory.mktemp("planned") / "page.html"
    work = ("--shared-tokens", "300", "--model", IMAGE)
    run_arena("plan", *SHAPE, "--device", "h100", *work, "--html", path)
    return path.as_uri()


def test_every_chart_is_drawn(page: Page) -> None:
    for chart in ("agents", "memory", "roofline"):
        plot = page.locator(f"#{chart}")
        plot.scroll_into_view_if_needed()
        expect(plot.locator("svg.main-svg").first).to_be_visible()
        for trace in page.evaluate(TRACES, chart):
            assert len(trace["x"]) == len(trace["y"]) > 0
    split = page.evaluate(TRACES, "memory")
    assert sum(trace["x"][0] for trace in split) == pytest.approx(80, abs=0.01)
    picture(page, "plan")


def test_the_table_holds_what_the_chart_draws(page: Page) -> None:
    table = page.locator("section", has=page.get_by_text("Agents by the tokens that each holds"))
    shown = [row.split("\t") for row in table.locator("tbody tr").all_inner_texts()]
    shared, *_ = page.evaluate(TRACES, "agents")
    assert [int(cells[1].replace(",", "")) for cells in shown if cells[1] != "0"] == shared["y"]


def test_markup_in_names_is_text(page: Page) -> None:
    expect(page.locator("h1")).to_contain_text(IMAGE)
    expect(page.locator("#memory .yaxislayer-above text")).to_have_text(IMAGE)


def test_long_facts_wrap_on_a_narrow_window(page: Page) -> None:
    page.set_viewport_size({"width": 700, "height": 800})
    table = page.locator(".facts")
    expect(table.get_by_text("TFLOPS")).to_be_visible()
    assert table.evaluate("one => one.parentElement.scrollWidth <= one.parentElement.clientWidth")
