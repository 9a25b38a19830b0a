"""A store whose texts are markup, ten megabytes long, or no numbers: the answers are bounded JSON,
and the browser tests (tests/ui/chromium) see that they stay text."""

import json
from pathlib import Path

import pytest

from ckptstore.plugins.ui.values import LABEL_CHARACTERS, TEXT_CHARACTERS, clip, encode, run_key
from tests.ui.asking import Browser, browsing

ANSWER_BYTES_MAX = 100_000


@pytest.mark.filterwarnings("default")
def test_every_view_of_a_hostile_store_is_bounded_json(hostile: Path) -> None:
    with browsing(hostile) as browser:
        found = browser.view("store.json")
        made_up, a, b = (commit["id"] for commit in found["recent"][::-1])
        addresses = [
            *("store.json", "lineage.json", "forgotten.json", "health.json"),
            f"run/{found['runs'][0]['key']}.json",
            *(f"{view}/{b}.json" for view in ("commit", "sharing")),
            *(f"{view}/{a}/{b}.json" for view in ("diff", "distances")),
            *(f"{view}/{b}/0.json" for view in ("leaves", "leaf")),
            f"commit/{a}.json",
            f"commit/{made_up}.json",
        ]
        for address in addresses:
            browser.view(address)
            answer = browser.ask(f"/data/0/{address}")
            assert answer.headers["content-type"] == "application/json"
            assert len(answer.content) < ANSWER_BYTES_MAX, address
            json.loads(answer.content, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_an_error_repeats_little_of_what_was_asked(browser: Browser) -> None:
    answer = browser.ask("/data/0/retention/" + "a" * 64 + ".json?keep-last=" + "9" * 5000)
    assert len(answer.content) < TEXT_CHARACTERS + 100


def test_floats_that_json_lacks_are_texts() -> None:
    value = {"a": [float("nan"), float("inf"), -float("inf"), 1.5], "b": "NaN", "c": None}
    wanted = {"a": ["NaN", "Infinity", "-Infinity", 1.5], "b": "NaN", "c": None}
    assert json.loads(encode(value)) == wanted


def test_texts_are_cut_and_runs_have_names_of_digits() -> None:
    assert clip("x" * LABEL_CHARACTERS) == "x" * LABEL_CHARACTERS
    assert len(clip("x" * 10_000_000)) == LABEL_CHARACTERS
    keys = {run_key(run) for run in ("a", "../../etc", "<script>", "\ud800", "")}
    assert len(keys) == 5 and all(len(key) == 16 and key.isalnum() for key in keys)
