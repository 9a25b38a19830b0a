"""A chunk that the source stores as a patch is sent as one wherever the target has its base: what
travels is about what the source stores, and what arrives is equal bit for bit."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.maintenance import mirror as module
from ckptstore.objects import patches
from ckptstore.objects.pack import TENSOR
from ckptstore.plugins.buckets.bucket import BucketStorage
from ckptstore.repository.footers import read_table
from ckptstore.repository.store_handle import StoreHandle
from tests.maintenance.mirror.test_push import _fail_at, in_batches
from tests.maintenance.stores import CHUNK_BYTES
from tests.net.training import same
from tests.support.patching import nudged, small_chunks_too

SHAPE = (300, 400)
RAW_BYTES = 4 * 300 * 400
OVERHEAD_BYTES = 8_000
"""Of a commit: its document, schema and pages, each twice, and footers."""


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with small_chunks_too():
        yield


def packs_bytes(place: Path | str) -> int:
    with closing(StoreHandle(place, read_only=True)) as handle:
        return sum(pack.stored_bytes for pack in handle.log.replay().packs.values())


def depths(place: Path | str) -> list[int]:
    """How many patches make each tensor chunk in the packs of a store."""
    found = list[int]()
    with closing(StoreHandle(place, read_only=True)) as handle:
        for pack in handle.log.replay().packs.values():
            table = read_table(handle.storage, pack)
            found += table["depth"][table["kind"] == TENSOR].tolist()
    return sorted(found)


def assert_arrived(place: Path | str, steps: dict[int, torch.Tensor]) -> None:
    with ckptstore.open(place) as store:
        for step, wanted in steps.items():
            assert same(store.checkout(step).read("w"), wanted)
        assert not store.fsck(read_data="all").findings


def commit(store: ckptstore.Store, *steps: int) -> dict[int, torch.Tensor]:
    for step in steps:
        store.commit({"w": nudged(SHAPE, step), "x": nudged((9, 5), step)}, step=step)
    return {step: nudged(SHAPE, step) for step in steps}


@pytest.mark.parametrize("target", ["target", "memory://twenty-commits"])
def test_twenty_commits_of_patches_travel_as_patches(target: str, tmp_path: Path) -> None:
    target = target if "://" in target else str(tmp_path / target)
    with ckptstore.open(tmp_path / "source") as store:
        states = commit(store, *range(20))
        done = store.push(target, create=True)
    assert packs_bytes(target) == packs_bytes(tmp_path / "source")
    assert done.stored_bytes < packs_bytes(target) + 20 * OVERHEAD_BYTES < 3 * RAW_BYTES
    assert depths(target) == depths(tmp_path / "source")
    assert_arrived(target, states)


def test_each_commit_of_a_fast_tier_travels_as_patches(tmp_path: Path) -> None:
    mirror = ckptstore.Mirror("memory://behind")
    with ckptstore.open(tmp_path / "source", mirror=mirror) as store:
        states = dict[int, torch.Tensor]()
        for step in range(6):
            states |= commit(store, step)
            assert store.flush_mirror()
    assert packs_bytes("memory://behind") == packs_bytes(tmp_path / "source")
    assert_arrived("memory://behind", states)


def test_what_is_pulled_from_a_bucket_are_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without this host's read cache: the base is read where it arrived before."""
    monkeypatch.setenv("CKPTSTORE_READ_CACHE_BYTES", "0")
    with ckptstore.open("memory://pulled-from") as store:
        states = commit(store, *range(8))
    read_bytes = list[int]()
    read_into = BucketStorage.read_into

    def counted(self: BucketStorage, key: str, offset: int, out: Any) -> None:
        read_bytes.extend(len(each) for each in out if key.startswith("packs/"))
        read_into(self, key, offset, out)

    monkeypatch.setattr(BucketStorage, "read_into", counted)
    with ckptstore.open(tmp_path / "target") as store:
        store.pull("memory://pulled-from")
    assert sum(read_bytes) < packs_bytes("memory://pulled-from") + 8 * OVERHEAD_BYTES
    monkeypatch.undo()
    assert_arrived(tmp_path / "target", states)


def test_a_chain_in_the_target_is_bounded_whatever_that_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source stores steps 0, 5 and 10 whole, of which the target gets none."""
    monkeypatch.setattr(patches, "DEPTH_MAX", 4)
    sent = (2, 3, 4, 6, 7, 8, 9)
    with ckptstore.open(tmp_path / "source") as store:
        states = commit(store, *range(12))
        store.push(tmp_path / "target", *sent, create=True)
    assert depths(tmp_path / "source") == sorted([0, 1, 2, 3, 4] * 2 + [0, 1])
    assert depths(tmp_path / "target") == sorted([0, 1, 2, 3, 4, 0, 1])
    assert_arrived(tmp_path / "target", {step: states[step] for step in sent})


@pytest.mark.parametrize("force", [False, True])
def test_a_gc_of_the_target_beside_a_push_takes_no_base_that_it_needs(
    force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target forgets the commit of the base while the patch is on its way. A gc that waits for
    nobody deletes the base: then the chunk is sent again, whole."""
    target = tmp_path / "target"
    with ckptstore.open(tmp_path / "source") as store:
        states = commit(store, 0, 1)
        for step in (2, 3):
            store.commit({"w": torch.full(SHAPE, float(step))}, step=step)
        store.push(target, 0, 2, 3, create=True)
        copy = module.copy_chunks

        def copy_and_collect(*args: Any) -> Any:
            copy(*args)
            with ckptstore.open(target) as there:
                if any(info.step == 0 for info in there.log()):
                    there.forget(0)
                    there.gc(max_unused=0.0, grace_s=0, force=force)

        monkeypatch.setattr(module, "copy_chunks", copy_and_collect)
        assert len(store.push(target, 1).sent) == 1
    assert max(depths(target)) == (0 if force else 1)
    assert_arrived(target, {1: states[1]})
    with ckptstore.open(target) as there:
        there.gc(max_unused=0.0, grace_s=0)
    assert_arrived(target, {1: states[1]})


@pytest.mark.parametrize("gc", [False, True])
def test_a_push_that_broke_off_between_batches_of_patches_goes_on(gc: bool, tmp_path: Path) -> None:
    """A gc between takes batches that nothing needs yet, or leaves patches without their bases."""
    shape, storage = (400, 500), ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
    with ckptstore.open(tmp_path / "source", storage=storage) as store:
        for step in range(4):
            store.commit({"w": nudged(shape, step)}, step=step)
    for n in (6, 10, 14, 22):
        target = tmp_path / f"target-{n}"
        ckptstore.open(target, storage=storage).close()
        with pytest.MonkeyPatch.context() as patch:
            _fail_at(n, patch)
            with pytest.raises(ckptstore.NoSpace):
                in_batches(tmp_path / "source", target, 8 * CHUNK_BYTES)
        with ckptstore.open(target) as there:
            if gc:
                there.gc(force=True, max_unused=0.0, grace_s=0)
        in_batches(tmp_path / "source", target, 8 * CHUNK_BYTES)
        assert_arrived(target, {step: nudged(shape, step) for step in range(4)})
        assert max(depths(target)) == 3


class Walk:
    """A training whose commits go to a mirror in whatever order, while both stores forget, thin,
    compact and collect. Both keep all patches that may be bases."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = Random(seed)
        self.source, self.target = folder / "source", folder / "target"
        self.sent_bytes = self.peak_bytes = self.forgotten_there = 0
        self.store = ckptstore.open(self.source)
        self.states = commit(self.store, 0)
        self.store.push(self.target, create=True)

    def commit(self) -> None:
        step = max(self.states) + 1
        run = self.random.choice(["main", "main", "other"])
        with ckptstore.open(self.source, run=run) as store:
            self.states |= commit(store, step)

    def push(self) -> None:
        there = self.store.log()
        some = self.random.sample(there, self.random.randint(1, min(3, len(there))))
        refs = [info.id for info in some] if self.random.random() < 0.8 else []
        before = packs_bytes(self.target)
        done = self.store.push(self.target, *refs)
        assert not done.problems or done.plan.forgotten or done.plan.pinned
        self.sent_bytes += packs_bytes(self.target) - before

    def lessen(self) -> None:
        place = self.random.choice([self.source, self.target])
        with ckptstore.open(place) as store:
            infos = store.log()
            match self.random.choice(["forget", "thin", "compact", "gc"]):
                case "forget" if len(infos) > 4:
                    runs = Counter(info.run for info in infos)
                    old = [info for info in infos[3:] if runs[info.run] > 1]
                    store.forget(self.random.choice(old).id)
                    self.forgotten_there += place == self.target
                case "thin":
                    store.forget(ckptstore.KeepLast(3).thin("x"))
                case "compact" if place == self.target:
                    store.compact(ckptstore.CompactPolicy(newest=0, every=3))
            store.gc(max_unused=0.0, grace_s=0)

    def run(self) -> None:
        for _ in range(12):
            self.random.choice([self.commit, self.commit, self.push, self.lessen])()
            self.peak_bytes = max(self.peak_bytes, packs_bytes(self.source))
        self.store.push(self.target)
        for place in (self.source, self.target):
            with ckptstore.open(place) as store:
                for info in store.log():
                    assert info.step is not None
                    assert same(store.checkout(info.id).read("w"), self.states[info.step])
                assert not store.fsck(read_data="all").findings
        self.store.close()


@pytest.mark.parametrize("count", [2, pytest.param(150, marks=pytest.mark.soak)])
def test_whatever_stores_do_what_travels_is_about_what_the_source_stores(
    count: int, seed: int, tmp_path: Path
) -> None:
    for n in range(count):
        walk = Walk(tmp_path / str(n), seed + n)
        try:
            walk.run()
            # Of a run that the target has forgotten, the next commit is sent whole again.
            again = walk.forgotten_there * RAW_BYTES + len(walk.states) * OVERHEAD_BYTES
            assert walk.sent_bytes <= walk.peak_bytes + again
        except BaseException as error:
            error.add_note(f"walk of seed {seed + n}")
            raise
