"""A crash after any change: the old state or the new one, everything acknowledged restores, gc
leaves nothing behind."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest

from ckptstore.errors import CkptStoreError
from ckptstore.storage.local import LocalStorage
from ckptstore.storage.local_files import Directories, LocalWriter
from tests.support.checker import (
    View,
    assert_no_garbage_after_gc,
    assert_same,
    assert_sound,
    view_of,
)
from tests.support.fixtures import in_memory
from tests.support.recording import Recording, Wreck, record
from tests.support.workloads import STORE, WORKS, Work, contents_of, is_store, open_small, small

OUTCOMES = 20
"""So many outcomes of a power cut are drawn at each point. Many are the same; those are looked at
once."""


class Crashes:
    """The work done once, and what must be seen of it after a crash."""

    def __init__(self, work: Work, scratch: Path) -> None:
        self.scratch = scratch
        base = work.base(scratch / "base")
        self.recording, _ = record(base, scratch, work)
        self.contents = contents_of(base / STORE, scratch / "recorded" / STORE)
        self.old = view_of(base / STORE) if work.commits else View()
        self.new = view_of(scratch / "recorded" / STORE)
        self.seen: dict[tuple[bytes, bool], View] = {}

    def check(self, wrecks: Iterable[tuple[str, Wreck]]) -> None:
        """Look at each wreck that differs from all before, and let gc clean up wherever the names
        differ from the one before."""
        before: Wreck | None = None
        seen = self.old
        for where, wreck in wrecks:
            if wreck != before:
                gc = before is None or wreck.left.nodes.keys() != before.left.nodes.keys()
                try:
                    now = self.look_at(wreck, gc=gc)
                    assert now == self.new or seen == self.old, "it was there, and is gone again"
                except (AssertionError, CkptStoreError) as error:
                    error.add_note(where)
                    raise
                seen = now
            before = wreck
        assert seen == self.new, "acknowledged, and lost"

    def look_at(self, wreck: Wreck, *, gc: bool) -> View:
        """What is seen of it: once for all that are equal, and once more where gc is to clean
        up."""
        left = wreck.fingerprint()
        known = self.seen.get((left, True)) or (not gc and self.seen.get((left, False)))
        if not known:
            known = self.seen[left, gc] = self._look_at(wreck, gc=gc)
        return known

    def _look_at(self, wreck: Wreck, *, gc: bool) -> View:
        disk = wreck.lay_out(self.scratch / "crashed")
        try:
            seen = View()
            if is_store(disk / STORE):
                seen = assert_sound(disk / STORE, self.contents)
                if gc:
                    assert_no_garbage_after_gc(disk / STORE, self.contents)
            else:
                with open_small(disk) as store:
                    assert_same(
                        store.commit(small(0)).state_dict(), small(0), "a commit after the crash"
                    )
            assert seen in (self.old, self.new), "neither the old state nor the new one"
        finally:
            rmtree(disk)
        return seen

    def every(self, crash: Callable[[int], Wreck]) -> Iterator[tuple[str, Wreck]]:
        for n in self.recording.points:
            yield self.recording.name(n), crash(n)


@pytest.fixture(scope="module")
def crashes_of() -> Iterator[Callable[[str], Crashes]]:
    """Crashes of a work, recorded by the first test that looks at them."""
    with in_memory() as place:
        yield cache(lambda name: Crashes(WORKS[name], Path(mkdtemp(dir=place))))


@pytest.mark.parametrize("crash", [Recording.kill, Recording.cut], ids=["kill", "power cut"])
@pytest.mark.parametrize("name", WORKS)
def test_after_a_crash_there_is_the_old_state_or_the_new(
    name: str, crash: Callable[[Recording, int], Wreck], crashes_of: Callable[[str], Crashes]
) -> None:
    crashes = crashes_of(name)
    crashes.check(crashes.every(lambda n: crash(crashes.recording, n)))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", WORKS)
def test_whatever_a_power_cut_leaves_of_what_was_not_durable(
    name: str, crashes_of: Callable[[str], Crashes], seed: int
) -> None:
    crashes, random = crashes_of(name), Random(seed)
    for n in crashes.recording.points:
        for _ in range(OUTCOMES):
            wreck = crashes.recording.cut(n, random)
            try:
                seen = crashes.look_at(wreck, gc=True)
                assert seen == crashes.new or n < crashes.recording.points[-1], (
                    "acknowledged, and lost"
                )
            except (AssertionError, CkptStoreError) as error:
                error.add_note(f"seed {seed}, {crashes.recording.name(n)}")
                raise
    cuts = len(crashes.recording.points) * OUTCOMES
    print(f"{cuts} power cuts, {len(crashes.seen)} different outcomes")


@pytest.mark.parametrize(
    ("who", "method"),
    [(LocalStorage, "sync_dirs"), (Directories, "_anchor"), (LocalWriter, "_seal")],
    ids=["of new names", "of new directories", "of bytes"],
)
def test_a_missing_fsync_is_noticed(
    who: type, method: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(self: Any, *_: Any) -> None:
        if isinstance(self, LocalWriter):
            self._close()

    monkeypatch.setattr(who, method, forgetful)
    crashes = Crashes(
        WORKS["a new store and its first commit"], scratch
    )  # a later one may find the directory of its pack there
    monkeypatch.undo()
    with pytest.raises((AssertionError, CkptStoreError)):
        crashes.check(crashes.every(crashes.recording.cut))
