"""The lineage that the page draws: the same joins and branches as `log --graph`."""

from pathlib import Path

import torch

import ckptstore
from ckptstore.core.ids import CommitId
from tests.ui.asking import Browser, browsing

State = dict[str, dict[str, torch.Tensor]]


def _state(step: int) -> State:
    return {"model": {"w": torch.full((4,), float(step))}}


def _drawn(browser: Browser) -> tuple[list[int], list[list[int]]]:
    found = browser.view("lineage.json")
    return found["lane"], found["tracks"]


def _rewound(place: Path, *starts: str) -> list[CommitId]:
    """Three commits of a run, and two after it went back to each of `starts`."""
    made = []
    with ckptstore.open(place) as store:
        made += [store.commit(_state(step), step=step).id for step in range(3)]
    for start in starts:
        with ckptstore.open(place) as store:
            store.checkout(start).restore(_state(0))
            made += [store.commit(_state(9), step=9).id for _ in range(2)]
    return made


def test_a_run_that_never_went_back_is_one_line(tmp_path: Path) -> None:
    _rewound(tmp_path / "s")
    with browsing(tmp_path / "s") as browser:
        assert _drawn(browser) == ([0, 0, 0], [[0, 2, True]])


def test_a_run_that_went_back_has_a_second_lane(tmp_path: Path) -> None:
    _rewound(tmp_path / "s", "1")
    with browsing(tmp_path / "s") as browser:
        assert browser.view("lineage.json")["parents"][3] == [1]
        assert _drawn(browser) == ([0, 0, 0, 1, 1], [[0, 2, True], [3, 4, True]])


def test_a_branch_takes_a_lane_that_has_ended(tmp_path: Path) -> None:
    """From step 1 to a second lane, and from the first commit there back to the first lane."""
    made = _rewound(tmp_path / "s", "1")
    with ckptstore.open(tmp_path / "s") as store:
        store.checkout(made[3]).restore(_state(0))
        store.commit(_state(3), step=3)
    with browsing(tmp_path / "s") as browser:
        assert _drawn(browser)[0] == [0, 0, 0, 1, 1, 0]


def test_no_lane_is_taken_from_a_branch_that_goes_on_later(tmp_path: Path) -> None:
    made = _rewound(tmp_path / "s", "1")
    with ckptstore.open(tmp_path / "s") as store:
        store.checkout(made[3]).restore(_state(0))
        store.commit(_state(3), step=3)
    with ckptstore.open(tmp_path / "s") as store:
        store.checkout(made[2]).restore(_state(0))
        store.commit(_state(4), step=4)
    with browsing(tmp_path / "s") as browser:
        lane, tracks = _drawn(browser)
        assert lane == [0, 0, 0, 1, 1, 2, 0] and tracks[0] == [0, 6, True]


def test_a_line_over_a_forgotten_commit_is_not_said_to_be_known(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "s") as store:
        for step in range(6):
            store.commit(_state(step), step=step)
        store.forget(["1", "2"])
    with browsing(tmp_path / "s") as browser:
        lane, tracks = _drawn(browser)
        assert lane == [0, 0, 0, 0]
        assert tracks == [[0, 0, True], [0, 1, False], [1, 3, True]]


def test_runs_without_a_common_commit_are_not_joined(tmp_path: Path) -> None:
    place = tmp_path / "s"
    for run in ("a", "b"):
        with ckptstore.open(place, run=run) as store:
            store.commit(_state(0), step=0)
    with browsing(place) as browser:
        lane, tracks = _drawn(browser)
        assert lane == [0, 0] and sorted(tracks) == [[0, 0, True], [1, 1, True]]
