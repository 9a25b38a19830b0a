"""A commit in the background is no secret to the store object that makes it: what looks at the
history waits for it, and says if it failed. A failure costs one commit, never two."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import Async, KeepLast, Store, Unavailable
from ckptstore.commit import pending
from ckptstore.core.options import CommitProgress, Milestone


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((1000,), float(step))}}


class Held:
    """An `on_progress` that holds commits before they are durable, for as long as `holding`, and
    makes them fail if told."""

    def __init__(self) -> None:
        self.reached, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, progress: CommitProgress) -> None:
        if progress.milestone is Milestone.WRITTEN:
            self.reached.set()
            self.may_go_on.wait(30)

    @contextmanager
    def released_soon(self) -> Iterator[None]:
        self.reached.wait(30)
        timer = threading.Timer(0.2, self.may_go_on.set)
        timer.start()
        yield
        timer.join()


LOOKS: dict[str, Callable[[Store], object]] = {
    "resume": lambda store: _step(store.resume(state(0))),
    "log": lambda store: store.log()[0].step,
    "checkout": lambda store: _step(store.checkout()),
    "checkout by step": lambda store: _step(store.checkout(2)),
    "tag": lambda store: (store.tag("good"), _step(store.checkout("good")))[1],
    "tags": lambda store: _step(store.checkout(store.tags()["two"])),
    "untag": lambda store: (store.untag("two"), 2)[1],
    "diff": lambda store: 1 + len(store.diff("latest", 1).changes),
    "forget": lambda store: store.forget(KeepLast(1), dry_run=True).decisions[0].row.step,
    "history": lambda store: store.history("**")[-1].step,
    "push": lambda store: len(store.push(store.url + "-mirror", create=True).sent),
    "usage": lambda store: len(store.usage().commits),
}


def _step(snapshot: ckptstore.Snapshot | None) -> int | None:
    return None if snapshot is None else snapshot.step


@pytest.mark.timeout(60)
@pytest.mark.parametrize("look", LOOKS)
def test_what_looks_at_the_history_waits_for_the_commit_in_flight(
    look: str, tmp_path: Path
) -> None:
    held = Held()
    with ckptstore.open(tmp_path / "store") as store:
        store.commit(state(1), step=1)
        store.commit_async(state(2), step=2, tag="two", background=Async(on_progress=held))
        with held.released_soon():
            assert LOOKS[look](store) == 2


def failing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit of step 2 in the background that has failed, and nobody has asked about it."""
    with monkeypatch.context() as patch:

        def refuse(*args: object, **options: object) -> None:
            raise Unavailable("the disk had a bad moment")

        patch.setattr(store._handle.storage, "create", refuse)
        pending = store.commit_async(state(2), step=2)
        while not pending.done():
            threading.Event().wait(0.01)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("look", LOOKS)
def test_what_looks_at_the_history_says_that_the_commit_in_flight_failed(
    look: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        store.commit(state(1), step=1)
        failing(store, monkeypatch)
        with pytest.raises(Unavailable, match="a bad moment") as raised:
            LOOKS[look](store)
        assert any("step 2" in note for note in raised.value.__notes__)
        assert any("repeat it" in note for note in raised.value.__notes__)
        assert [info.step for info in store.log()] == [1] and not store.tags()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("way", ["commit", "commit_async", "adopt"])
def test_a_failure_in_the_background_costs_one_commit(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "directory").mkdir()
    ways: dict[str, Callable[[Store], object]] = {
        "commit": lambda store: store.commit(state(3), step=3),
        "commit_async": lambda store: store.commit_async(state(3), step=3),
        "adopt": lambda store: store.adopt(tmp_path / "directory", step=3),
    }
    with ckptstore.open(tmp_path / "store") as store:
        store.commit(state(1), step=1)
        failing(store, monkeypatch)
        with pytest.raises(Unavailable, match="a bad moment") as raised:
            ways[way](store)
        assert any("all the same" in note for note in raised.value.__notes__)
        assert [info.step for info in store.log()] == [3, 1]


def commit_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "ckptstore-commits"]


def test_commits_share_a_thread_that_ends_with_the_store(tmp_path: Path) -> None:
    before = commit_threads()
    with ckptstore.open(tmp_path / "store") as store:
        found = []
        for step in range(3):
            store.commit_async(state(step), step=step).wait()
            found.append([each for each in commit_threads() if each not in before])
    assert found[0] == found[1] == found[2] and len(found[0]) == 1
    found[0][0].join(30)
    assert not found[0][0].is_alive()


def test_the_thread_ends_when_no_commit_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "LINGER_S", 0.01)
    before = commit_threads()
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(3):
            store.commit_async(state(step), step=step).wait()
            for each in commit_threads():
                if each not in before:
                    each.join(30)
                    assert not each.is_alive()
        assert [info.step for info in store.log()] == [2, 1, 0]
