"""Two stores that commit, thin, forget, collect, tag and send each other named commits or all, at
random: no listing lacks a commit, no push takes a leaf away, no tag moves that was not named."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.core.ids import CommitId
from ckptstore.errors import Conflict
from ckptstore.maintenance.retention import KeepLast
from ckptstore.store import Store
from tests.support.checker import assert_same

TAGS = ("best", "prod")
GLOBS = ("model/e", "model/tie", "optimizer/**", "optimizer/m", "model/*")
ACTIONS = 40
MEMORY = Path("/dev/shm")

Leaves = frozenset[str]


def content(step: int) -> dict[str, Any]:
    e = torch.full((400,), float(step))
    model = {"e": e, "tie": e, "w": torch.arange(300.0) + step}
    return {"model": model, "optimizer": {"m": -e, "v": e * e}, "step": step}


class Seen:
    """What a store shows: by step its commit and the leaves that this has, and its tags by step."""

    def __init__(self, store: Store, leaves: dict[CommitId, Leaves]) -> None:
        state = store._handle.log.replay(refresh=True)
        live = {commit: row for commit, row in state.commits.items() if not row.soft}
        infos = store.log()
        assert {info.id for info in infos} == set(live), "a listing lacks commits"
        assert store.tags() == dict(state.tags), "a listing lacks tags"
        self.ids: dict[int, CommitId] = {}
        for info in infos:
            assert info.step is not None and info.step not in self.ids, "two commits in one place"
            self.ids[info.step] = info.id
            if info.id not in leaves:
                there = store.checkout(info.id).leaves()
                leaves[info.id] = frozenset(leaf.path for leaf in there if not leaf.gone)
        self.leaves = {step: leaves[commit] for step, commit in self.ids.items()}
        self.forgotten = {row.step for row in state.commits.values() if row.soft} - set(self.ids)
        steps = {commit: step for step, commit in self.ids.items()}
        self.tags = {name: steps[commit] for name, commit in state.tags.items()}


class TwoStores:
    """A commit is known by its step, which both stores number on. Each action says what may have
    changed since; the rest must be as it was."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, Random(seed)
        self.leaves: dict[CommitId, Leaves] = {}
        self.counts = Counter[str]()
        self.done: list[str] = []
        self.step = 0
        self.stores = [ckptstore.open(self.place(who), threads=1) for who in (0, 1)]
        for _ in range(5):
            self.commit(0)

    def act(self, actions: int) -> None:
        """Do so many random actions; listings are complete after each."""
        weights: dict[Callable[[int], None], int] = {
            self.commit: 3,
            self.tag: 1,
            self.untag: 1,
            self.thin: 4,
            self.forget: 1,
            self.purge: 2,
            self.undelete: 1,
            self.collect: 1,
            self.send: 5,
            self.reopen: 1,
        }
        drawn = self.random.choices(list(weights), list(weights.values()), k=actions)
        for action in drawn:
            who = int(self.random.random() < 0.3)
            self.done.append(f"{action.__name__} {who}")
            action(who)
            for each in (0, 1):
                self.see(each)

    def place(self, who: int) -> Path:
        return self.folder / "ab"[who]

    def see(self, who: int) -> Seen:
        return Seen(self.stores[who], self.leaves)

    def commit(self, who: int) -> None:
        for _ in range(self.random.randint(1, 2)):
            self.step += 1
            tag = self.random.choice((*TAGS, (), (), ()))
            self.stores[who].commit(content(self.step), step=self.step, tag=tag)
            self.counts["commits"] += 1

    def tag(self, who: int) -> None:
        if ids := sorted(self.see(who).ids.values()):
            self.stores[who].tag(self.random.choice(TAGS), self.random.choice(ids))

    def untag(self, who: int) -> None:
        for tag in self.stores[who].tags():
            self.stores[who].untag(tag)

    def thin(self, who: int) -> None:
        before = self.see(who)
        if not before.ids:
            return
        glob = self.random.choice(GLOBS)
        plan = self.stores[who].forget(KeepLast(self.random.randint(1, 3)).thin(glob))
        after = self.see(who)
        assert set(after.ids) == set(before.ids)
        assert after.tags == before.tags
        for step, had in before.leaves.items():
            assert after.leaves[step] <= had
            if step not in {decision.row.step for decision in plan.thinned}:
                assert after.ids[step] == before.ids[step]
        self.counts["thinned"] += len(plan.thinned)

    def forget(self, who: int) -> None:
        before = self.see(who)
        if not before.ids:
            return
        step = self.random.choice(sorted(before.ids))
        try:
            self.stores[who].forget(before.ids[step])
        except Conflict:
            self.counts["refused"] += 1
            assert self.see(who).leaves == before.leaves
        else:
            self.counts["forgotten"] += 1
            assert set(self.see(who).ids) == set(before.ids) - {step}

    def purge(self, who: int) -> None:
        self.forget(who)
        self.collect(who)

    def undelete(self, who: int) -> None:
        forgotten = sorted(info.id for info in self.stores[who].forgotten())
        if not forgotten:
            return
        before = self.see(who)
        try:
            self.stores[who].undelete(self.random.choice(forgotten))
        except Conflict:
            assert self.see(who).leaves == before.leaves
        else:
            self.counts["undeleted"] += 1
            assert set(self.see(who).ids) >= set(before.ids)

    def collect(self, who: int) -> None:
        before = self.see(who)
        self.stores[who].gc(grace_s=0, max_unused=0.0)
        after = self.see(who)
        assert (after.ids, after.leaves, after.tags) == (before.ids, before.leaves, before.tags)
        self.counts["gcs"] += 1

    def send(self, who: int) -> None:
        """Send one commit, or all, from one store to the other, by a push or a pull."""
        here, before = self.see(who), self.see(1 - who)
        force, pull, everything = (self.random.random() < p for p in (0.7, 0.5, 0.4))
        if not here.ids:
            return
        named = set(here.ids) if everything else {self.random.choice(sorted(here.ids))}
        refs = [] if everything else [here.ids[step] for step in named]
        try:
            if pull:
                self.stores[1 - who].pull(self.place(who), *refs, force=force)
            else:
                self.stores[who].push(self.place(1 - who), *refs, force=force)
        except Conflict:
            assert not force
            assert any_moves(here, before, named)
            after = self.see(1 - who)
            assert (after.ids, after.tags) == (before.ids, before.tags)
            self.counts["refused"] += 1
            return
        after = self.see(1 - who)
        assert (self.see(who).ids, self.see(who).tags) == (here.ids, here.tags)
        assert set(after.ids) == set(before.ids) | named - before.forgotten
        for each, had in before.leaves.items():
            assert after.leaves[each] >= had, f"step {each} lost {had - after.leaves[each]}"
            assert each in named or after.ids[each] == before.ids[each]
        for each in named - set(before.ids) - before.forgotten:
            assert after.leaves[each] == here.leaves[each]
        moved = {tag: each for tag, each in here.tags.items() if each in named & set(after.ids)}
        assert after.tags == before.tags | moved, "other tags than those of what was named"
        self.counts["sent"] += len(set(after.ids.values()) - set(before.ids.values()))

    def reopen(self, who: int) -> None:
        self.stores[who].close()
        if self.random.random() < 0.5:
            rmtree(self.place(who) / "index")
        self.stores[who] = ckptstore.open(self.place(who), threads=1)

    def end(self) -> None:
        """Every byte of every leaf is what was committed."""
        for store in self.stores:
            store.gc(grace_s=0, max_unused=0.0)
            for info in store.log():
                assert info.step is not None
                there = self.leaves[info.id]
                state = store.checkout(info.id).state_dict(select=there.__contains__)
                assert_same(state, only(content(info.step), there), f"commit {info.id}")
            assert not store.fsck(read_data="100%").findings
            store.close()


def any_moves(here: Seen, there: Seen, named: set[int]) -> bool:
    """Whether a tag of `named` names another commit there."""
    return any(
        step in named and there.tags.get(tag, step) != step for tag, step in here.tags.items()
    )


def only(state: dict[str, Any], there: Leaves) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            value = {name: each for name, each in value.items() if f"{key}/{name}" in there}
        if value if isinstance(value, dict) else key in there:
            found[key] = value
    return found


@pytest.mark.parametrize("walks", [6, pytest.param(500, marks=pytest.mark.soak)])
@pytest.mark.timeout(4 * 3600)
def test_two_stores_keep_what_each_has(seed: int, walks: int) -> None:
    counts = Counter[str]()
    for walk in range(walks):
        with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
            stores = TwoStores(Path(folder), seed + walk)
            try:
                stores.act(ACTIONS)
                stores.end()
            except BaseException as error:
                error.add_note(f"walk {walk} of seed {seed}: {', '.join(stores.done)}")
                raise
            counts += stores.counts
    print(counts)
    for what in ("thinned", "sent", "forgotten", "gcs", "refused"):
        assert counts[what], what
