"""`make docs` builds a site without a warning, whose links lead somewhere and which needs no
network to be read."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import ckptstore

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.docs,
    pytest.mark.skipif(
        not find_spec("mkdocs"), reason="mkdocs is not installed: pip install -e '.[docs]'"
    ),
]


class Page(HTMLParser):
    """The links of a page, what it loads when it is shown, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        if tag == "link" and "href" in values:
            self.loads.add(values["href"])
        if "src" in values:
            self.loads.add(values["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        # Not --quiet: mkdocs would neither print warnings nor count them as errors.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_the_links_of_the_site_lead_somewhere(pages: dict[Path, Page]) -> None:
    lost = []
    for path, page in pages.items():
        for link in page.links | page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                lost.append(f"{path.name}: {link}")
            elif target in pages and unquote(parts.fragment) not in {"", *pages[target].anchors}:
                lost.append(f"{path.name}: no anchor {link}")
    assert len(pages) > 60
    assert not lost, "\n".join(lost)


def test_a_page_loads_nothing_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    foreign = {
        f"{path.name}: {load}"
        for path, page in pages.items()
        for load in page.loads
        if urlsplit(load).netloc
    }
    foreign |= {
        f"{path.name}: a font or style from elsewhere"
        for path in site.rglob("*.css")
        if "url(http" in path.read_text(encoding="utf-8")
    }
    assert not foreign, foreign


def test_the_reference_has_every_public_name(site: Path) -> None:
    anchors = Page(site / "api.html").anchors
    errors = {name for name in ckptstore.__all__ if f"ckptstore.errors.{name}" in anchors}
    missing = {
        name
        for name in ckptstore.__all__
        if name != "__version__" and f"ckptstore.{name}" not in anchors
    } - errors
    assert not missing and "Corrupt" in errors
