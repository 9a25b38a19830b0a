"""Each page in a real Chromium: it loads without a console message and asks no other host, wide and
narrow, light and dark, by keyboard, live, read-only and not, exported, and with hostile texts."""

import functools
import http.server
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Route

import ckptstore
from ckptstore.plugins.ui.values import run_key
from tests.cli.running import call
from tests.ui.chromium.conftest import NARROW, WIDE, Tab, serving, tab_of
from tests.ui.stores import EVIL, small_store

VIEWS = ("store", "run", "lineage", "commit", "tensor", "diff")
FIRST_PAGE_MS = 1_000


def address_of(tab: Tab, view: str) -> str:
    store = tab.view("store.json")
    newest, before = (commit["id"] for commit in store["recent"][:2])  # type: ignore[index]
    run = store["runs"][0]["key"]  # type: ignore[index]
    return {
        "run": f"0/run/{run}",
        "commit": f"0/commit/{newest}",
        "tensor": f"0/tensor/{newest}/0",
        "diff": f"0/diff/{before}/{newest}",
    }.get(view, f"0/{view}")


WANTED = {
    "store": ("Size over time", "Health", "baseline", "release-1"),
    "run": ("Metrics", "What a policy would keep", "Commits"),
    "lineage": ("3 runs", "baseline"),
    "commit": ("Load it", "Copy", "model/embedding.weight", "Download as safetensors"),
    "tensor": ("Histogram", "Norm", "Means of blocks"),
    "diff": ("Over depth", "Beside each other", "changed bytes"),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("width", "dark"), [(WIDE, False), (NARROW, True)])
def test_a_page_loads(chromium: Browser, small_url: str, view: str, width: int, dark: bool) -> None:
    with tab_of(chromium, small_url, width=width, dark=dark) as tab:
        tab.open(address_of(tab, view))
        for text in WANTED[view]:
            tab.page.get_by_text(text).first.wait_for()
        drawn = tab.page.locator("main canvas")
        drawn.first.wait_for()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        background = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(20, 25, 27)" if dark else "rgb(246, 247, 248)")
        assert "token" not in tab.page.url
        frame = "getComputedStyle(document.activeElement).outlineStyle"
        assert tab.page.evaluate(frame) == "none"


def test_a_tensor_shows_how_it_moved_over_the_run(chromium: Browser, small_url: str) -> None:
    with tab_of(chromium, small_url) as tab:
        tab.open(address_of(tab, "tensor"))
        tab.page.get_by_role("button", name="Read its history").click()
        tab.page.locator("[aria-label^='Norm and drift of model/embedding.weight over']").wait_for()
        tab.page.get_by_text("5 of 5 commits").wait_for()


def test_everything_is_reached_by_keyboard(chromium: Browser, small_url: str) -> None:
    with tab_of(chromium, small_url) as tab:
        keyboard = tab.page.keyboard
        keyboard.press("l")
        tab.page.wait_for_selector("h1:has-text('Lineage')")
        table = tab.page.get_by_role("grid")
        table.focus()
        for key in ("End", "Home", "ArrowDown", "Enter"):
            keyboard.press(key)
        tab.page.get_by_text("Load it").wait_for()
        keyboard.press("/")
        keyboard.type("release-1")
        keyboard.press("Enter")
        tab.page.wait_for_selector("h1:has-text('baseline, step 1000')")
        keyboard.press("/")
        keyboard.type("higher-rate@600")
        keyboard.press("Enter")
        tab.page.wait_for_selector("h1:has-text('higher-rate, step 600')")
        focused = set()
        for _ in range(15):
            keyboard.press("Tab")
            focused.add(tab.page.evaluate("document.activeElement.textContent.slice(0, 40)"))
        assert len(focused) > 8


def test_a_run_is_laid_over_smoothed_and_previewed(chromium: Browser, small_url: str) -> None:
    with tab_of(chromium, small_url) as tab:
        tab.open(address_of(tab, "run"))
        tab.page.get_by_label("baseline").check()
        tab.page.get_by_label("log scale").check()
        tab.page.get_by_label("Smoothing").fill("0.5")
        tab.page.get_by_label("Metric").select_option("accuracy")
        tab.page.get_by_label("Keep last").fill("2")
        tab.page.get_by_role("button", name="Preview").click()
        tab.page.get_by_text("a gc would then free").wait_for()
        tab.page.get_by_text("would be forgotten").first.wait_for()
        assert tab.page.get_by_role("button", name="Forget").count() == 0


def test_the_form_of_a_policy_takes_what_the_command_line_takes(
    chromium: Browser, small_url: str
) -> None:
    with tab_of(chromium, small_url) as tab:
        tab.open(address_of(tab, "run"))
        tab.page.get_by_label("Keep last").fill("")
        tab.page.get_by_label("Keep best by").select_option("accuracy")
        tab.page.get_by_label("Keep best: N").fill("3")
        tab.page.get_by_label("Keep every steps").fill("400")
        tab.page.get_by_label("Keep within").fill("7")
        tab.page.get_by_role("button", name="Preview").click()
        assert tab.page.locator("input:invalid").count() == 1  # it wants a unit
        with tab.page.expect_request("**/retention/**") as asked:
            tab.page.get_by_label("Keep within").fill("7d")
            tab.page.get_by_role("button", name="Preview").click()
        words = "keep-every-steps=400&keep-best=accuracy%3Amax&keep-best=3&keep-within=7d"
        assert asked.value.url.partition("?")[2] == words
        tab.page.get_by_text("a gc would then free").wait_for()


def test_a_run_is_shown_without_the_runs_that_were_laid_over_another_store(
    chromium: Browser, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        for run in (name, f"{name}-other"):
            with ckptstore.open(tmp_path / name, run=run) as store:
                store.commit({"w": torch.ones(3)}, step=1, metrics={"loss": 1.0})
    with serving(tmp_path / "first", tmp_path / "second") as url, tab_of(chromium, url) as tab:
        tab.open(f"0/run/{run_key('first')}")
        tab.page.get_by_label("first-other").check()
        tab.page.get_by_label("loss of 2 runs").wait_for()
        tab.page.get_by_label("Store", exact=True).select_option("1")
        tab.page.get_by_role("link", name="second", exact=True).first.click()
        tab.page.get_by_label("loss of 1 runs").wait_for()


def test_large_numbers_and_long_names_fit_the_page(chromium: Browser, tmp_path: Path) -> None:
    for run in ("main", "m" * 200):
        with ckptstore.open(tmp_path / "s", run=run) as store:
            commit = store.commit({"w": torch.ones(3)}, step=1_000, metrics={"loss": 3e38})
    with serving(tmp_path / "s") as url, tab_of(chromium, url) as tab:
        tab.open(f"0/run/{run_key('main')}")
        tab.page.get_by_label("m" * 200).wait_for()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= WIDE
        tab.open(f"0/commit/{commit.id}")
        tab.page.get_by_text("3.000e+38").wait_for()
        tab.page.get_by_text("step 1000").first.wait_for()


def test_leaves_are_filtered_and_downloaded(
    chromium: Browser, small_url: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    with tab_of(chromium, small_url) as tab:
        tab.open(address_of(tab, "commit"))
        tab.page.get_by_label("Filter leaves").fill("layers.*.norm.weight")
        tab.page.get_by_text("4 leaves").wait_for()
        with tab.page.expect_download() as download:
            tab.page.get_by_text("Download as safetensors").click()
        download.value.save_as(tmp_path / "some.safetensors")
        assert len(load_file(tmp_path / "some.safetensors")) == 4
        tab.page.get_by_role("button", name="Find shared leaves").click()
        tab.page.get_by_text("compared with").wait_for()


def test_relative_change_is_measured_on_demand(chromium: Browser, small_url: str) -> None:
    with tab_of(chromium, small_url) as tab:
        tab.open(address_of(tab, "diff"))
        tab.page.get_by_role("button", name="Measure relative change").click()
        tab.page.get_by_text("norm of the difference").wait_for()


def test_tensors_whose_change_has_no_bar_are_counted(chromium: Browser, tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "s") as store:
        for step, number in enumerate((1.0, math.nan)):
            tensors = {"w": torch.full((9,), number), "b": torch.full((3,), number)}
            store.commit({**tensors, "n": torch.tensor(step)}, step=step)
    with serving(tmp_path / "s") as url, tab_of(chromium, url) as tab:
        tab.open(address_of(tab, "diff"))
        tab.page.get_by_role("button", name="Measure relative change").click()
        tab.page.get_by_text("2 tensors without a bar").wait_for()


HAS_MARKS = """(quiet) => {
  const [red, green, blue] = quiet.match(/\\w\\w/g).map((part) => parseInt(part, 16));
  const canvas = document.querySelector("main canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, 40, canvas.height);
  const near = (at, part) => Math.abs(data[at] - part) < 8;
  let count = 0;
  for (let at = 0; at < data.length; at += 4)
    if (near(at, red) && near(at + 1, green) && near(at + 2, blue)) count += 1;
  return count > 10;
}"""
"""Whether the labels on the left of a chart have a color."""


def test_the_percentages_of_a_difference_are_as_bright_as_other_labels(
    chromium: Browser, small_url: str
) -> None:
    with tab_of(chromium, small_url, dark=True) as tab:
        tab.open(address_of(tab, "diff"))
        tab.page.locator("main canvas").first.wait_for()
        root = "getComputedStyle(document.documentElement)"
        quiet = tab.page.evaluate(f"{root}.getPropertyValue('--quiet')")
        tab.page.wait_for_function(HAS_MARKS, arg=quiet)


def test_a_commit_appears_while_the_page_is_open_and_changes_are_made(
    chromium: Browser, tmp_path: Path
) -> None:
    small_store(tmp_path / "s")
    with (
        serving(tmp_path / "s", options=("--allow-changes",)) as url,
        tab_of(chromium, url) as tab,
        ckptstore.open(tmp_path / "s", run="live") as store,
    ):
        made = store.commit({"x": torch.ones(3)}, step=77_777, metrics={"loss": 1.0})
        tab.page.get_by_text("77,777").first.wait_for(timeout=15_000)
        tab.open(f"0/commit/{made.id}")
        tab.page.get_by_label("New tag").fill("tagged-here")
        tab.page.get_by_role("button", name="Tag", exact=True).click()
        tab.page.locator("h1 .chip", has_text="tagged-here").wait_for()
        assert store.tags()["tagged-here"] == made.id
        tab.open("0/store")
        run = next(r for r in tab.view("store.json")["runs"] if r["run"] == "baseline")  # type: ignore[attr-defined,index]
        tab.open(f"0/run/{run['key']}")
        tab.page.get_by_label("Keep last").fill("12")
        tab.page.get_by_role("button", name="Preview").click()
        tab.page.get_by_role("button", name="Forget 1 commit").click()
        tab.page.get_by_role("dialog").get_by_role("button", name="Forget them").click()
        tab.page.get_by_text("forgot 1").wait_for()
        assert len(store.log(run="baseline")) == 12


def test_a_commit_appears_that_was_made_while_the_page_was_on_its_way(
    chromium: Browser, tmp_path: Path
) -> None:
    small_store(tmp_path / "s")
    with (
        serving(tmp_path / "s") as url,
        tab_of(chromium, url, open_it=False) as tab,
        ckptstore.open(tmp_path / "s", run="live") as store,
    ):

        def answer(route: Route) -> None:
            found = route.fetch()
            if not store.log(run="live"):
                store.commit({"x": torch.ones(3)}, step=77_777)
            route.fulfill(response=found)

        tab.page.route("**/data/0/store.json", answer)
        tab.page.goto(url)
        tab.page.get_by_text("77,777").first.wait_for(timeout=15_000)


def test_without_the_token_nothing_is_shown(chromium: Browser, small_url: str) -> None:
    context = chromium.new_context()
    page = context.new_page()
    answer = page.goto(small_url.partition("?")[0])
    assert answer is not None and answer.status == 403
    page.goto(small_url)
    page.wait_for_selector("main h1")
    # the cookie is there now, and no script can read it
    assert page.evaluate("document.cookie") == ""
    other = context.new_page()
    other.goto("about:blank")
    blocked = "url => fetch(url).then(() => 'read', () => 'refused')"
    url = f"{small_url.partition('?')[0]}data/site.json"
    assert other.evaluate(blocked, url) == "refused"
    context.close()


@pytest.mark.parametrize("view", VIEWS)
def test_a_hostile_store_shows_nothing_but_text(
    chromium: Browser, hostile_url: str, view: str
) -> None:
    with tab_of(chromium, hostile_url) as tab:
        tab.open(address_of(tab, view))
        _check_inert(tab)


@pytest.mark.parametrize("view", VIEWS)
def test_even_texts_that_no_store_can_have_stay_text(
    chromium: Browser, small_url: str, view: str
) -> None:
    """Every text of every answer, runs and tags too, becomes markup on its way."""

    def poison(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, body=json.dumps(_poisoned(answer.json())))

    with tab_of(chromium, small_url) as tab:
        address = address_of(tab, view)
        tab.page.route("**/data/0/**", poison)
        tab.open(address)
        tab.page.get_by_text(EVIL[:20]).first.wait_for()
        tab.page.mouse.move(600, 400)
        _check_inert(tab)
        tab.page.unroute_all(behavior="ignoreErrors")  # the page asks for news at any time


KEPT = ("id", "key", "run_key", "change", "schema", "type", "dtype", "kind")


def _poisoned(value: object, name: str = "") -> object:
    if isinstance(value, dict):
        return {key: _poisoned(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_poisoned(item, name) for item in value]
    return EVIL if isinstance(value, str) and name not in KEPT else value


def _check_inert(tab: Tab) -> None:
    assert tab.page.evaluate("window.evil") is None
    assert tab.page.locator("main img, main script, main style, main iframe").count() == 0
    links = tab.page.eval_on_selector_all("a", "all => all.map((a) => a.protocol)")
    assert set(links) <= {"http:", "https:"}


def test_ten_thousand_commits_are_shown_within_a_second(chromium: Browser, long_url: str) -> None:
    with tab_of(chromium, long_url, open_it=False) as tab:
        _first_page(tab, long_url, "10,000 commits")
        tab.open("0/lineage")
        tab.page.get_by_text("10,001 commits").wait_for()
        tab.page.locator("canvas").first.wait_for()
        tab.page.mouse.move(600, 350)
        frames = tab.page.evaluate(FRAMES)
        print(f"zooming the graph of 10,001 commits: {frames:.0f} ms a frame (median)")
        assert frames < 250


FRAMES = """async () => {
  const canvas = document.querySelector("canvas");
  const times = [];
  for (let i = 0; i < 20; i += 1) {
    const begun = performance.now();
    canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: i < 10 ? -100 : 100, bubbles: true,
      cancelable: true, clientX: 600, clientY: 350 }));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    times.push(performance.now() - begun);
  }
  return times.sort((a, b) => a - b)[10];
}"""


def test_a_hundred_thousand_leaves_are_shown_within_a_second(
    chromium: Browser, many_url: str
) -> None:
    with tab_of(chromium, many_url, open_it=False) as tab:
        _first_page(tab, many_url, "100,000 leaves")
        address = address_of(tab, "commit")
        begun = tab.page.evaluate("performance.now()")
        tab.open(address)
        tab.page.get_by_text("100,000 leaves").first.wait_for()
        took = tab.page.evaluate("performance.now()") - begun
        print(f"the commit with its 100,000 leaves: {took:.0f} ms")
        tab.page.get_by_label("Filter leaves").fill("layers.77.")
        tab.page.get_by_text("20 leaves").wait_for()
        rows = tab.page.locator(".vtable .rows .row").count()
        assert rows < 80


def _first_page(tab: Tab, url: str, what: str) -> None:
    """The first page is there within a second, the best of three: other work shares the machine."""
    times = []
    for _ in range(3):
        tab.page.goto("about:blank")
        tab.page.goto(url)
        tab.page.wait_for_selector("main h1")
        times.append(tab.page.evaluate("performance.now()"))
    print(f"first page of {what}: {', '.join(f'{time:.0f}' for time in times)} ms")
    assert min(times) <= FIRST_PAGE_MS


@pytest.fixture(scope="module")
def static_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An export, served by Python's file server."""
    folder = tmp_path_factory.mktemp("export")
    small_store(folder / "s")
    assert call("-s", str(folder / "s"), "ui", "--export", str(folder / "site")).code == 0

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder / "site"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("view", VIEWS)
def test_an_exported_page_works_without_our_server(
    chromium: Browser, static_url: str, view: str
) -> None:
    with tab_of(chromium, static_url) as tab:
        tab.open(address_of(tab, view))
        if view != "tensor":
            tab.page.locator("main canvas").first.wait_for()
        else:
            tab.page.get_by_text("An export has no numbers").wait_for()
        assert tab.page.get_by_text("This cannot be shown").count() == 0
