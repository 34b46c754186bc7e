"""The page of `arena bench shape --html`, opened from the disk with no network."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from arena.shapes import SHAPES
from tests.browser.conftest import TRACES, picture
from tests.browser.process import run_arena

pytestmark = pytest.mark.browser

CONFIG = """
name = "shapes"
[engines.main]
kind = "scripted"
latency_seconds = 0.002
max_concurrent = 2
[[agents]]
name = "a"
kind = "llm"
engine = "main"
[[agents]]
name = "b"
kind = "llm"
engine = "main"
[tournament]
games = ["chess"]
pairs = 1
parallel_matches = 2
max_plies = 24
"""


@pytest.fixture(scope="module")
def address(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("shapes")
    config, path = folder / "s.toml", folder / "page.html"
    config.write_text(CONFIG)
    short = ("--streams", 2, "--seconds", 1, "--repeats", 2)
    run_arena("bench", "shape", config, *short, "--html", path)
    return path.as_uri()


def test_every_chart_is_drawn(page: Page) -> None:
    for chart in ("shapes", "cost", "latency", "waves"):
        plot = page.locator(f"#{chart}")
        plot.scroll_into_view_if_needed()
        expect(plot.locator("svg.main-svg").first).to_be_visible()
        for trace in page.evaluate(TRACES, chart):
            assert len(trace["x"]) == len(trace["y"]) > 0
            assert all(value is not None for value in trace["y"])
    picture(page, "shapes")


def test_the_table_holds_what_the_chart_draws(page: Page) -> None:
    table = page.locator("section", has=page.get_by_text("A move, by how it is asked for"))
    shown = [row.split("\t") for row in table.locator("tbody tr").all_inner_texts()]
    assert len(shown) == len(SHAPES) + 4
    full, alone = page.evaluate(TRACES, "shapes")
    assert [cells[0] for cells in shown[: len(SHAPES)]] == full["x"]
    for cells, value in zip(shown, full["y"], strict=False):
        assert float(cells[2].split()[0].replace(",", "")) == pytest.approx(value, rel=0.01)
    assert alone["x"] == ["default", "A"]
