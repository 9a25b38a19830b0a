"""Is a store sound? Every commit it shows restores bit for bit, its indexes say what its log says,
and gc leaves no garbage in it."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import ckptstore
from ckptstore.core.ids import CommitId
from ckptstore.maintenance.gc.session_monitor import STALE_S
from tests.maintenance.collecting import ALL, collected, garbage, opened
from tests.support.fork_server import Child

Contents = Mapping[CommitId, Mapping[str, Any]]
"""What was committed, by commit."""


@dataclass(frozen=True, slots=True)
class View:
    """What users can see of a store, as the log says it. `forgotten` commits can still be brought
    back."""

    live: frozenset[CommitId] = field(default_factory=frozenset)
    forgotten: frozenset[CommitId] = field(default_factory=frozenset)
    tags: frozenset[tuple[str, CommitId]] = field(default_factory=frozenset)

    @property
    def commits(self) -> frozenset[CommitId]:
        return self.live | self.forgotten


def view_of(place: Path) -> View:
    with opened(place) as handle:
        state = handle.log.replay()
    forgotten = frozenset(commit for commit, row in state.commits.items() if row.soft)
    return View(frozenset(state.commits) - forgotten, forgotten, frozenset(state.tags.items()))


def assert_sound(place: Path, contents: Contents) -> View:
    """What the store shows, all of it restored and compared."""
    view = view_of(place)
    with ckptstore.open(place, create=False) as store:
        for commit in view.commits:
            snapshot = store.checkout(commit)
            there = {leaf.path for leaf in snapshot.leaves() if not leaf.gone}
            state = snapshot.state_dict(select=there.__contains__)
            assert_same(state, contents[commit], f"commit {commit}")
        assert {info.id for info in store.log()} == view.live
        assert frozenset(store.tags().items()) == view.tags
    return view


def assert_no_garbage_after_gc(place: Path, contents: Contents) -> None:
    """Twice gc, twenty minutes apart by its own clock: whoever wrote here is gone, and so is what
    they left."""
    now_s = time.monotonic()
    before = view_of(place)
    collected(place, ALL, clock=lambda: now_s)
    collected(place, ALL, clock=lambda: now_s + 2 * STALE_S)
    left = garbage(place)
    assert not left, f"garbage after gc: {sorted(left)}"
    after = assert_sound(place, contents)
    assert (after.live, after.tags, after.forgotten) == (before.live, before.tags, frozenset())


def assert_acknowledged(place: Path, child: Child, where: str) -> int:
    """Everything that a child of the scenario `change_on` was told is done is so; returns the
    number of its commits."""
    committed, tagged = child.reports("committed"), child.reports("tagged")
    view, (doubtful, away) = view_of(place), _forgotten(child)
    assert {commit for _, commit in committed} - doubtful - away <= view.live, (
        f"acknowledged, and lost: {where}"
    )
    assert not away & view.live, f"forgotten, and there again: {where}"
    assert {name for (name,) in tagged} <= {name for name, _ in view.tags}, where
    return len(committed)


def _forgotten(child: Child) -> tuple[set[str], set[str]]:
    """The commits that may be forgotten or not, since the child ended in between, and those that
    are, for certain."""
    times = {
        kind: Counter(commit for (commit,) in child.reports(kind))
        for kind in ("forgetting", "forgotten", "returning", "returned")
    }
    begun, done = times["forgetting"] + times["returning"], times["forgotten"] + times["returned"]
    doubtful = {commit for commit in begun if begun[commit] != done[commit]}
    return doubtful, {
        commit for commit in begun if times["forgotten"][commit] > times["returned"][commit]
    } - doubtful


def assert_same(got: Any, wanted: Any, where: str) -> None:
    if isinstance(wanted, Mapping):
        assert got.keys() == wanted.keys(), where
        for key, value in wanted.items():
            assert_same(got[key], value, f"{where}, {key}")
    elif isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted), where
    else:
        assert got == wanted, where
