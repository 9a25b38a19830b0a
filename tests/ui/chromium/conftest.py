"""The page in a real Chromium: one server and one browser for all tests, and a tab that notes every
console message and request."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.cli.running import environment
from tests.ui.stores import hostile_store, long_history, many_leaves, small_store

CHROMIUM = os.environ.get("CKPTSTORE_TEST_CHROMIUM", shutil.which("chromium") or "")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDE, NARROW = 1200, 390


@dataclass
class Tab:
    """A tab of the browser: `page`, and the problems that it must not have."""

    page: Page
    base: str
    problems: list[str] = field(default_factory=list)

    def open(self, address: str) -> None:
        """Show a view of the page, and wait for it and for its jobs."""
        self.page.goto(f"{self.base}#/{address}")
        self.page.wait_for_selector(f"main[data-view='#/{address}'] h1")
        self.settle()

    def settle(self) -> None:
        """Wait until nothing is under way."""
        expect(self.page.locator("progress")).to_have_count(0, timeout=30_000)

    def view(self, address: str) -> dict[str, object]:
        """What the page itself would get."""
        found: dict[str, object] = self.page.evaluate(
            "address => fetch(`data/0/${address}`).then((answer) => answer.json())", address
        )
        return found


@contextmanager
def serving(*places: Path, options: tuple[str, ...] = ()) -> Iterator[str]:
    """The address that `ckptstore ui` prints for these stores, while it serves them."""
    named = [word for place in places for word in ("-s", str(place))]
    words = [sys.executable, "-m", "ckptstore", "ui", *named, "--port", "0", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert re.match(r"http://127\.0\.0\.1:", url), url
            yield url
        finally:
            process.terminate()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.fail("no chromium here: apt-get install chromium, or set CKPTSTORE_TEST_CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS])
        yield browser
        browser.close()


def _made(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> Iterator[str]:
    place = factory.mktemp("chromium") / name
    make(place)
    with serving(place) as url:
        yield url


@pytest.fixture(scope="session")
def small_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from _made(tmp_path_factory, "checkpoints", small_store)


@pytest.fixture(scope="session")
def hostile_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from _made(tmp_path_factory, "hostile", hostile_store)


@pytest.fixture(scope="session")
def long_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from _made(tmp_path_factory, "long", lambda place: long_history(place, 10_000, 24))


@pytest.fixture(scope="session")
def many_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from _made(tmp_path_factory, "many", lambda place: many_leaves(place, 100_000))


@contextmanager
def tab_of(
    browser: Browser, url: str, *, width: int = WIDE, dark: bool = False, open_it: bool = True
) -> Iterator[Tab]:
    """A tab with an empty profile. At the end it must have had no problem."""
    context = browser.new_context(
        color_scheme="dark" if dark else "light",
        viewport={"width": width, "height": 850},
        accept_downloads=True,
        reduced_motion="reduce",
    )
    tab = Tab(context.new_page(), url.partition("?")[0])

    def note_request(address: str) -> None:
        if not address.startswith((tab.base, "data:")):
            tab.problems.append(f"asked for {address}")

    tab.page.on("request", lambda request: note_request(request.url))
    tab.page.on("pageerror", lambda error: tab.problems.append(f"error {error}"))
    tab.page.on(
        "console",
        lambda said: (
            said.type in ("error", "warning") and tab.problems.append(f"{said.type}: {said.text}")
        ),
    )
    tab.page.on("dialog", lambda dialog: tab.problems.append(f"dialog {dialog.message}"))
    if open_it:
        tab.page.goto(url)
        tab.page.wait_for_selector("main h1")
    try:
        yield tab
    finally:
        context.close()
    assert tab.problems == []
