"""One chromium for each module, and visitors who note what no page may do."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MS = 20_000
TRACES = "id => document.getElementById(id).data.map(({ name, x, y }) => ({ name, x, y }))"
"""What a chart of a page from a file draws."""

expect.set_options(timeout=PATIENCE_MS)


def find_chromium() -> str:
    """The browser to drive; without one the test is skipped, or fails where CI runs it."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is not None:
        return found
    reason = "no chromium here: install it (apt-get install chromium), or name one by CHROMIUM=PATH"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=[*ARGUMENTS, *sandbox])
        yield browser
        browser.close()


class Visitor:
    """Opens pages, each in a profile of its own."""

    def __init__(self, browser: Browser) -> None:
        self.complaints: list[str] = []
        """Errors and warnings of the console (violations of the policy are among them), and
        exceptions that nothing caught."""
        self.requests: list[Request] = []
        self.pages: list[Page] = []
        self._browser = browser
        self._contexts: list[BrowserContext] = []

    def page(self, *, width: int = 1280, height: int = 900, **options: Any) -> Page:
        """An empty page."""
        viewport: Any = {"width": width, "height": height}
        context = self._browser.new_context(viewport=viewport, **options)
        self._contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.on("console", lambda said: self._note(said.type, said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request))
        self.pages.append(page)
        return page

    def open(self, url: str, **options: Any) -> Page:
        page = self.page(**options)
        page.goto(url)
        return page

    def forgive(self, pattern: str) -> None:
        """Forget complaints that the test made itself, of which there must be one."""
        kept = [text for text in self.complaints if not re.search(pattern, text)]
        assert len(kept) < len(self.complaints)
        self.complaints = kept

    def leave(self) -> None:
        """What must hold of every page at the end of every test."""
        try:
            hacked = [page.evaluate("'hacked' in window") for page in self.pages]
            origins = {_origin(page.url) for page in self.pages}
            asked = {_origin(request.url) for request in self.requests} - {"data://"}
        finally:
            for context in self._contexts:
                context.close()
        assert not any(hacked)
        assert self.complaints == []
        assert asked <= origins

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


@pytest.fixture
def visitor(browser: Browser) -> Iterator[Visitor]:
    visitor = Visitor(browser)
    yield visitor
    visitor.leave()


def picture(page: Page, name: str) -> None:
    """A screenshot for a person, in the folder that SCREENSHOTS names."""
    if folder := os.environ.get("SCREENSHOTS"):
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


@pytest.fixture
def page(address: str, visitor: Visitor) -> Iterator[Page]:
    """The page at a module's `address`, a file of which the browser asked for nothing else."""
    page = visitor.page()
    page.context.set_offline(True)
    page.goto(address)
    yield page
    asked = {request.url for request in visitor.requests}
    assert {url for url in asked if not url.startswith("data:")} == {address}
