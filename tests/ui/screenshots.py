"""Write the pictures of docs/ui.md and docs/stories.md: `python -m tests.ui.screenshots`, in the
environment of `make test-ui`."""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import ckptstore
from demo import bugs
from tests.ui.chromium.conftest import CHROMIUM, FLAGS, serving, tab_of
from tests.ui.chromium.test_pages import VIEWS, address_of
from tests.ui.stores import small_store

DOCS = Path(__file__).parents[2] / "docs" / "ui"
COLORS = 64
SETTLED_MS = 800
WIDTH, HEIGHT = 1160, 900
TALL = {"commit": 1200}
DARK = ("lineage", "tensor")


def main() -> int:
    DOCS.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as directory,
        sync_playwright() as playwright,
    ):
        place = Path(directory) / "checkpoints"
        small_store(place)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS])
        with serving(place) as url:
            for view in VIEWS:
                with tab_of(browser, url, width=WIDTH, dark=view in DARK) as tab:
                    height = TALL.get(view, HEIGHT)
                    tab.page.set_viewport_size({"width": WIDTH, "height": height})
                    tab.open(address_of(tab, view))
                    if view == "run":
                        tab.page.get_by_label("baseline").check()
                        tab.page.locator("[aria-label='loss of 2 runs']").wait_for()
                        tab.page.get_by_label("Keep last").fill("3")
                        tab.page.get_by_role("button", name="Preview").click()
                        tab.page.get_by_text("a gc would then free").wait_for()
                    if view == "diff":
                        tab.page.get_by_role("button", name="Measure relative change").click()
                    tab.settle()
                    tab.page.wait_for_timeout(SETTLED_MS)
                    tab.page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
                    write(DOCS / f"{view}.png", tab.page.screenshot())
        stories(browser, Path(directory) / "stories")
        browser.close()
    return 0


def stories(browser: Browser, place: Path) -> None:
    """Where two runs part, and a run whose loss ends."""
    bugs.main(str(place), lambda line: None)
    with ckptstore.open(place) as store:
        before, after = (store.checkout(ref).id for ref in ("baseline@40", "upgrade@40"))
    with serving(place) as url, tab_of(browser, url, width=WIDTH) as tab:
        tab.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        tab.open(f"0/diff/{before}/{after}")
        tab.page.get_by_role("button", name="Measure relative change").click()
        tab.settle()
        tab.page.wait_for_timeout(SETTLED_MS)
        write(DOCS / "story-parted.png", tab.page.screenshot())
        keys = {run["run"]: run["key"] for run in tab.view("store.json")["runs"]}  # type: ignore[index]
        tab.open(f"0/run/{keys['broken']}")
        tab.page.get_by_label("baseline").check()
        tab.settle()
        tab.page.wait_for_timeout(SETTLED_MS)
        write(DOCS / "story-nan.png", tab.page.screenshot())


def write(path: Path, png: bytes) -> None:
    """The picture with few colors."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(DOCS.parents[1])}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
