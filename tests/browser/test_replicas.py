"""An engine's replicas in the dashboard, and in the page of a run that is over."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.arena.replicated_engine import CONFIG
from tests.browser.conftest import Visitor, picture
from tests.browser.process import IMAGE, SCRIPT, Arena, playing, run_arena

pytestmark = pytest.mark.browser

SLOW = "10.0.0.7:8000"
NAMES = f"replicas = ['''{SCRIPT}''', '''{IMAGE}''', \"{SLOW}\"]"


@pytest.fixture(scope="module")
def arena(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """A run that goes on for as long as these tests take."""
    folder = tmp_path_factory.mktemp("replicas")
    with playing(folder, CONFIG.format(engine=NAMES, max_plies=450, period=0.2)) as arena:
        yield arena


def assert_replicas_are_told(page: Page) -> None:
    table = page.get_by_test_id("replicas")
    expect(table).to_be_visible()
    rows = table.get_by_test_id("replica")
    expect(rows).to_have_count(3)
    expect(rows.locator(".name")).to_have_text([IMAGE, SLOW, SCRIPT])
    slow = rows.filter(has_text=SLOW)
    expect(slow).to_contain_text("⚠ slow, 3.0×")
    expect(rows.filter(has_text="⚠ slow")).to_have_count(1)
    expect(table).to_contain_text("1 match was answered by more than one.")


def test_a_dashboard_shows_replicas_and_the_straggler(arena: Arena, visitor: Visitor) -> None:
    page = visitor.open(f"{arena.url}#fleet")
    assert_replicas_are_told(page)
    picture(page, "replicas-light")


def test_the_table_of_replicas_scrolls_by_itself_where_it_is_too_wide(
    arena: Arena, visitor: Visitor
) -> None:
    page = visitor.open(f"{arena.url}#fleet", width=390, height=800)
    expect(page.get_by_test_id("replicas")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    picture(page, "replicas-narrow")


def test_the_page_of_a_run_shows_replicas(
    browser: Browser, visitor: Visitor, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text(CONFIG.format(engine=NAMES, max_plies=30, period=0))
    shown = ("--view", "none", "--dashboard", "off")
    run_arena("run", tmp_path / "config.toml", "--out", tmp_path / "run", *shown)
    run_arena("report", tmp_path / "run", "--html", tmp_path / "page.html")
    page = visitor.page(color_scheme="dark")
    page.context.set_offline(True)
    page.goto((tmp_path / "page.html").as_uri())
    assert_replicas_are_told(page)
    picture(page, "replicas-page-dark")


def test_an_engine_without_replicas_has_no_table(visitor: Visitor, tmp_path: Path) -> None:
    config = CONFIG.format(engine=NAMES, max_plies=8, period=0).replace(
        'kind = "tests.arena.replicated_engine:ReplicatedEngine"', 'kind = "scripted"'
    )
    lines = [line for line in config.splitlines() if not line.startswith("replicas")]
    (tmp_path / "config.toml").write_text("\n".join(lines))
    shown = ("--view", "none", "--dashboard", "off")
    run_arena("run", tmp_path / "config.toml", "--out", tmp_path / "run", *shown)
    run_arena("report", tmp_path / "run", "--html", tmp_path / "page.html")
    page = visitor.open((tmp_path / "page.html").as_uri())
    expect(page.get_by_test_id("engine-figures")).to_be_visible()
    expect(page.get_by_test_id("replicas")).to_be_hidden()
