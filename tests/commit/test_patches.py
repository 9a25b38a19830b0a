"""Where few elements change, a commit stores what changed; whatever comes of the commits before, it
restores bit for bit."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.commit import patching
from ckptstore.core.ids import ChunkId, document_key, pack_key
from ckptstore.maintenance.check import Level
from ckptstore.maintenance.check.fsck import fsck
from ckptstore.maintenance.check.offline_store import offline_store_of
from ckptstore.objects import patches
from ckptstore.objects.codecs import PATCH
from ckptstore.objects.pack import TENSOR
from ckptstore.repository.dedup import Dedup
from ckptstore.repository.footers import read_table
from ckptstore.repository.pack_writer import NewPatch
from ckptstore.storage.read_cache import ReadCache
from tests.maintenance.stores import heal
from tests.net.training import same
from tests.support.patching import nudged, small_chunks_too

SHAPE = (512, 600)
LARGER = (600, 600, 2)
"""Of several chunks."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WHOLE = (torch.float8_e4m3fn, torch.int64, torch.uint8, torch.int16)


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with small_chunks_too():
        yield


def new_bytes(store: ckptstore.Store, step: int) -> int:
    (info,) = [info for info in store.log() if info.step == step]
    return info.new_bytes


def chunks_by_codec(store: ckptstore.Store, *, patched: bool) -> set[ChunkId]:
    """The chunks of tensors in packs that are live, patches or whole ones."""
    handle = store._handle
    found = set[ChunkId]()
    for pack in handle.log.replay().packs.values():
        table = read_table(handle.storage, pack)
        rows = table[((table["codec"] == PATCH) == patched) & (table["kind"] == TENSOR)]
        if pack.live:
            found |= set(map(ChunkId, rows["chunk"].tolist()))
    return found


def changed(value: torch.Tensor, step: int) -> torch.Tensor:
    """`value` with a hundredth of its elements written anew."""
    generator = torch.Generator().manual_seed(step)
    found = value.clone().view(-1)
    at = torch.randperm(len(found), generator=generator)[: len(found) // 100]
    found[at] = torch.randint(0, 100, (len(at),), generator=generator).to(value.dtype)
    return found.view(value.shape)


@pytest.mark.parametrize("dtype", DTYPES + WHOLE, ids=str)
def test_a_hundredth_that_changes_is_what_is_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    states = [torch.randint(0, 100, SHAPE).to(dtype)]
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(5):
            store.commit({"model": {"w": states[-1]}}, step=step)
            states.append(changed(states[-1], step))
        nbytes = states[0].nbytes
        assert new_bytes(store, 0) > nbytes * 0.99
        for step in range(1, 5):
            assert new_bytes(store, step) < nbytes * 0.04 + 6000
        for step in range(5):
            assert same(store.checkout(step).read("model/w"), states[step])
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(5):
            target = {"model": {"w": torch.zeros_like(states[0])}}
            store.checkout(step).restore(target)
            assert same(target["model"]["w"], states[step])
        assert not store.fsck(read_data="all").findings


def test_rows_of_a_table_are_stored_as_such(tmp_path: Path) -> None:
    table = torch.randn(20_000, 64)
    with ckptstore.open(tmp_path / "store") as store:
        store.commit({"table": table}, step=0)
        for step in range(1, 4):
            rows = torch.randperm(len(table))[: len(table) // 200]
            table[rows] += torch.randn(len(rows), 64) * 1e-2
            store.commit({"table": table}, step=step)
            assert new_bytes(store, step) < 0.01 * table.nbytes
        assert same(store.checkout(3).read("table"), table)


def test_dense_training_makes_no_patch_and_looks_ever_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[int]()
    make = patching.Patcher.make

    def counted(self: Any, *args: Any) -> Any:
        looks.append(step)
        return make(self, *args)

    monkeypatch.setattr(patching.Patcher, "make", counted)
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(20):
            store.commit({"w": torch.randn(SHAPE)}, step=step)
        assert not chunks_by_codec(store, patched=True)
    assert sorted(set(looks)) == [1, 3, 7, 15]


def test_a_chain_ends_in_a_whole_chunk_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "DEPTH_MAX", 5)
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(13):
            store.commit({"w": nudged(SHAPE, step)}, step=step)
        nbytes = nudged(SHAPE, 0).nbytes
        whole = [step for step in range(13) if new_bytes(store, step) > nbytes // 2]
        assert whole == [0, 6, 12]
        for step in range(13):
            assert same(store.checkout(step).read("w"), nudged(SHAPE, step))


def test_what_commits_need_outlives_the_commits_that_wrote_it(tmp_path: Path) -> None:
    """The bases of the last commit belong to commits that are forgotten; when it goes, they go."""
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(6):
            store.commit({"w": nudged(SHAPE, step)}, step=step)
        store.forget(ckptstore.KeepLast(2))
        for _ in range(2):
            assert not store.gc(max_unused=0.0, grace_s=0).problems
            assert same(store.checkout(5).read("w"), nudged(SHAPE, 5))
            assert not store.fsck(read_data="all").findings
        for step in (6, 7):
            store.commit({"w": torch.full(SHAPE, float(step))}, step=step)
        store.forget(ckptstore.KeepLast(2))
        store.gc(max_unused=0.0, grace_s=0)
        assert not chunks_by_codec(store, patched=True)
        assert len(chunks_by_codec(store, patched=False)) == 2


def test_a_commit_refers_to_the_packs_of_all_bases(tmp_path: Path) -> None:
    """What another process finds as a patch lies in the packs of its whole chain."""
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(4):
            store.commit({"w": nudged(SHAPE, step)}, step=step)
    with ckptstore.open(tmp_path / "store", run="other") as store:
        store.commit({"w": nudged(SHAPE, 3)}, step=0)
        log = store._handle.log.replay()
        tensors = {n for n, pack in log.packs.items() if not pack.metadata}
        assert len(tensors) == 4
        assert {log.packs[n].stamp for n in tensors} == {log.n}


def test_a_commit_refers_to_the_bases_of_patches_found_late_in_a_pack(tmp_path: Path) -> None:
    """Another process finds whole chunks of a pack first, and only then a patch in it."""

    def state(step: int) -> dict[str, torch.Tensor]:
        dense = torch.randn(1 << 20, generator=torch.Generator().manual_seed(step))
        return {"dense": dense, "sparse": nudged((1 << 20,), step)}

    with ckptstore.open(tmp_path / "store") as store:
        for step in range(2):
            store.commit(state(step), step=step)
    with ckptstore.open(tmp_path / "store", run="other") as store:
        store.commit(state(1), step=0)
        log = store._handle.log.replay()
        tensors = {n for n, pack in log.packs.items() if not pack.metadata}
        assert len(tensors) == 2
        assert {log.packs[n].stamp for n in tensors} == {log.n}


def test_a_bit_that_flips_in_a_base_in_memory_costs_bytes_alone(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(2):
            store.commit({"w": nudged(SHAPE, step)}, step=step)
        held = store._internals.committer._whole._whole.hints.held
        for old in held._olds.values():
            old.raw[len(old.raw) // 2] ^= 1
        for step in range(2, 6):
            store.commit({"w": nudged(SHAPE, step)}, step=step)
            assert chunks_by_codec(store, patched=True)
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(6):
            assert same(store.checkout(step).read("w"), nudged(SHAPE, step))


def test_a_budget_makes_no_patches(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(3):
            store.commit({"w": nudged(SHAPE, step)}, step=step, memory_budget_bytes=64 << 20)
        assert not chunks_by_codec(store, patched=True)


def test_memory_beyond_its_share_is_not_taken_and_chains_stay_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patching, "DEPTH_READ_MAX", 2)
    little = ckptstore.Storage(patch_memory_bytes=1000)
    with ckptstore.open(tmp_path / "store", storage=little) as store:
        for step in range(8):
            store.commit({"w": nudged(SHAPE, step)}, step=step)
        whole = [step for step in range(8) if new_bytes(store, step) > 500_000]
        assert whole == [0, 4]
        for step in range(8):
            assert same(store.checkout(step).read("w"), nudged(SHAPE, step))


def test_without_memory_for_them_there_are_no_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTSTORE_PATCH_MEMORY_BYTES", "0")
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(3):
            store.commit({"w": nudged(SHAPE, step)}, step=step)
        assert not chunks_by_codec(store, patched=True)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_process_that_goes_on_makes_patches_at_once(codec: str, tmp_path: Path) -> None:
    nbytes = nudged(SHAPE, 0).nbytes
    for step in range(4):  # each in a process of its own
        with ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(codec=codec)) as store:
            store.commit({"model": {"w": nudged(SHAPE, step)}, "step": step}, step=step)
            assert step == 0 or new_bytes(store, step) < nbytes * 0.05
            for each in range(step + 1):
                assert same(store.checkout(each).read("model/w"), nudged(SHAPE, each))
    with ckptstore.open(tmp_path / "store") as store:
        assert not store.fsck(read_data="all").findings


@pytest.mark.parametrize(("memory", "is_whole"), [(1000, True), (None, False)])
def test_a_chain_goes_on_in_the_next_process_where_memory_admits_it(
    memory: int | None, is_whole: bool, tmp_path: Path
) -> None:
    deep = patching.DEPTH_READ_MAX + 2
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(deep):
            store.commit({"w": nudged(LARGER, step)}, step=step)
    storage = ckptstore.Storage(patch_memory_bytes=memory)
    with ckptstore.open(tmp_path / "store", storage=storage) as store:
        for step in range(deep, deep + 2):
            store.commit({"w": nudged(LARGER, step)}, step=step)
            assert same(store.checkout("latest").read("w"), nudged(LARGER, step))
        assert (new_bytes(store, deep) > 500_000) == is_whole


def test_a_training_that_resumes_an_older_commit_makes_patches_of_that(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        first = store.commit({"w": nudged(SHAPE, 0)}, step=0).id
        store.commit({"w": torch.randn(SHAPE)}, step=1)
    with ckptstore.open(tmp_path / "store", run="branch") as store:
        store.checkout(first).restore({"w": torch.zeros(SHAPE)})
        store.commit({"w": nudged(SHAPE, 1)}, step=7)
        assert new_bytes(store, 7) < 60_000
        assert same(store.checkout("latest").read("w"), nudged(SHAPE, 1))


def test_a_state_that_gains_tensors_keeps_its_bases(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(1, 4):
            state = {f"w{i}": nudged(SHAPE, step + i) for i in range(step)}
            store.commit({"model": state}, step=step)
            assert new_bytes(store, step) < nudged(SHAPE, 0).nbytes + 70_000 * step


def test_what_changed_its_shape_or_dtype_or_kind_is_whole(tmp_path: Path) -> None:
    states: list[Any] = [nudged(SHAPE, 0), nudged(SHAPE, 0).view(torch.int32) + 1]
    states += [torch.ones(600, 700), b"abc" * 100_000, torch.ones(500, 3), b"abd" * 90_000]
    states += [torch.ones(420_000), torch.ones(60, 70, 100), torch.ones(600, 700)]
    for step, value in enumerate(states):
        with ckptstore.open(tmp_path / "store") as store:
            store.commit({"w": value}, step=step)
            found = store.checkout(step).read("w")
            assert found == value if isinstance(value, bytes) else same(found, value)


def test_a_first_commit_that_is_dense_reads_a_sample_of_each_leaf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state() -> dict[str, torch.Tensor]:
        return {f"w{i}": torch.randn(SHAPE) for i in range(12)}

    reads = list[int]()
    read = patching.Patcher._read

    def counted(self: Any, part: Any, olds: dict[int, ChunkId]) -> Any:
        reads.extend(olds)
        return read(self, part, olds)

    monkeypatch.setattr(patching.Patcher, "_read", counted)
    monkeypatch.setattr(patching, "_VAIN_BYTES", 2 << 20)
    for codec, most in (("raw", 0), ("zstd", 5)):
        for step in range(2):
            storage = ckptstore.Storage(codec=codec)
            with ckptstore.open(tmp_path / codec, storage=storage, threads=2) as store:
                store.commit(state(), step=step)
        assert len(reads) <= most
        reads.clear()


def test_bytes_that_grow_are_read_alone_where_their_ends_differ(tmp_path: Path) -> None:
    value = bytearray(torch.randint(0, 256, (500_000,), dtype=torch.uint8).numpy().tobytes())
    for step in range(4):
        value[step * 1000] ^= 1
        value += bytes(40_000)
        storage = ckptstore.Storage(chunk_bytes=1 << 16)
        with ckptstore.open(tmp_path / "store", storage=storage) as store:
            store.commit({"log": bytes(value)}, step=step)
            assert store.checkout("latest").read("log") == value
            assert step == 0 or new_bytes(store, step) < 2 << 16


def test_a_commit_before_that_cannot_be_read_costs_bytes_alone(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        store.commit({"w": nudged(SHAPE, 0)}, step=0)
        pack = tmp_path / "store" / pack_of(store, first_chunk(store, 0))
        info = store.log()[0]
        document = tmp_path / "store" / document_key(info.session, info.id)
    for path in (pack, document):
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        path.chmod(0o600)
        path.write_bytes(data)
        with ckptstore.open(tmp_path / "store") as store:
            store.commit({"w": nudged(SHAPE, 1)}, step=1)
            assert same(store.checkout("latest").read("w"), nudged(SHAPE, 1))


@pytest.mark.parametrize("cached", [False, True])
def test_a_first_commit_reads_nothing_back_from_slow_storage(cached: bool, tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        store.commit({"w": nudged(SHAPE, 0)}, step=0)
    with ckptstore.open(tmp_path / "store") as store:
        objects = store._handle.objects
        objects._remote = True
        objects._cache = ReadCache(tmp_path / "cache", 1 << 30) if cached else None
        store.checkout(0).restore({"w": torch.zeros(SHAPE)})
        store.commit({"w": nudged(SHAPE, 1)}, step=1)
        assert (new_bytes(store, 1) < 60_000) == cached
        assert same(store.checkout(1).read("w"), nudged(SHAPE, 1))


def test_a_background_commit_makes_patches_of_what_it_staged(tmp_path: Path) -> None:
    value = nudged(SHAPE, 0)
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(4):
            value.copy_(nudged(SHAPE, step))
            pending = store.commit_async({"w": value}, step=step)
            value.fill_(-1.0)
            pending.wait()
        for step in range(4):
            assert same(store.checkout(step).read("w"), nudged(SHAPE, step))
            assert step == 0 or new_bytes(store, step) < 60_000


def test_a_compaction_leaves_patches_and_codes_their_bases(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(8):
            store.commit({"w": nudged(SHAPE, step)}, step=step)
        store.compact(ckptstore.CompactPolicy(newest=0, every=4))
        store.gc(max_unused=0.0, grace_s=0)
        for step in range(8):
            assert same(store.checkout(step).read("w"), nudged(SHAPE, step))
        assert not store.fsck(read_data="all").findings


def pack_of(store: ckptstore.Store, chunk: ChunkId) -> str:
    where = store._handle.objects.located(chunk)
    return pack_key(store._handle.log.replay().packs[int(where["pack"][0])].id)


def first_chunk(store: ckptstore.Store, step: int) -> ChunkId:
    contents = store.checkout(step)._contents
    (tree,) = contents.reader.trees(contents.document.trees).values()
    return ChunkId(tree.contents[0].ids[:32])


def test_a_damaged_base_damages_what_needs_it_and_a_mirror_heals_it(tmp_path: Path) -> None:
    place = tmp_path / "store"
    with ckptstore.open(place) as store:
        for step in range(4):
            store.commit({"w": nudged(SHAPE, step)}, step=step)
        store.mirror(tmp_path / "mirror")
        base = place / pack_of(store, first_chunk(store, 1))
    data = bytearray(base.read_bytes())
    data[len(data) // 8] ^= 1
    base.chmod(0o600)
    base.write_bytes(data)
    with ckptstore.open(place) as store:
        assert same(store.checkout(0).read("w"), nudged(SHAPE, 0))
        for step in (1, 2, 3):
            with pytest.raises(ckptstore.Corrupt):
                store.checkout(step).read("w")
        findings = [f for f in store.fsck(read_data="all").findings if f.chunk]
        assert findings
        assert len({commit for f in findings for commit in f.commits}) == 3
    heal(place, tmp_path / "mirror")
    with ckptstore.open(place) as store:
        for step in range(4):
            assert same(store.checkout(step).read("w"), nudged(SHAPE, step))
        assert not store.fsck(read_data="all").findings


def test_a_base_that_no_mirror_has_is_replaced_by_whole_copies_of_what_needs_it(
    tmp_path: Path,
) -> None:
    """A mirror gets what commits name, so never a base whose commit was forgotten before."""
    place = tmp_path / "store"
    with ckptstore.open(place) as store:
        for step in range(5):
            store.commit({"w": nudged(SHAPE, step)}, step=step)
        base = place / pack_of(store, first_chunk(store, 1))
        store.forget(ckptstore.KeepLast(2))
        store.gc(grace_s=0)
        store.mirror(tmp_path / "mirror")
    base.unlink()
    heal(place, tmp_path / "mirror")
    with ckptstore.open(place) as store:
        for step in (3, 4):
            assert same(store.checkout(step).read("w"), nudged(SHAPE, step))
        assert not store.fsck(read_data="all").findings


def test_a_mirror_of_every_other_commit_heals_all_that_is_made_of_what_it_has(
    tmp_path: Path,
) -> None:
    """Its patches are of other bases: a chunk there is whole only once its patch was applied."""
    place = tmp_path / "store"
    with ckptstore.open(place) as store:
        ids = [store.commit({"w": nudged(SHAPE, step)}, step=step).id for step in range(6)]
        lost = place / pack_of(store, first_chunk(store, 1))
        for step in (0, 2, 4):
            store.push(tmp_path / "mirror", ids[step], create=True)
        whole = len(chunks_by_codec(store, patched=False))
    lost.unlink()
    heal(place, tmp_path / "mirror")
    with ckptstore.open(place) as store:
        for step in (0, 2, 3, 4, 5):
            assert same(store.checkout(step).read("w"), nudged(SHAPE, step))
        assert store.fsck(read_data="all").damaged_commits.keys() == {ids[1]}
        copies = len(chunks_by_codec(store, patched=False)) - whole
        assert copies == whole, "one for all that are patches of it"


def test_views_of_one_memory_are_restored_in_place(tmp_path: Path) -> None:
    """Chunks of a request may overlap: what a patch is applied to lies elsewhere."""

    def state(base: torch.Tensor) -> dict[str, Any]:
        return {"base": base, "rows": base[8:128], "turned": base.t()}

    with ckptstore.open(tmp_path / "store") as store:
        for step in range(4):
            store.commit({"views": state(nudged((300, 250), step))}, step=step)
        for step in range(4):
            target = {"views": state(torch.zeros(300, 250))}
            store.checkout(step).restore(target)
            assert same(target["views"]["base"], nudged((300, 250), step))


def test_a_slice_of_a_patched_tensor_is_read(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(3):
            store.commit({"w": nudged(SHAPE, step)}, step=step)
        part = store.checkout(2).read("w", (slice(100, 200),))
        assert same(part, nudged(SHAPE, 2)[100:200])
        with pytest.raises(ckptstore.InvalidInput, match="use read"):
            store.checkout(2).open("w")


def test_ids_do_not_tell_how_chunks_are_stored(tmp_path: Path) -> None:
    ids = []
    for name, steps in (("steps", range(4)), ("one", range(3, 4))):
        with ckptstore.open(tmp_path / name) as store:
            for step in steps:
                store.commit({"w": nudged(SHAPE, step)}, step=step)
            ids.append(first_chunk(store, 3))
            assert np.array_equal(store.checkout(3).read("w"), nudged(SHAPE, 3))
    assert ids[0] == ids[1]


def test_a_commit_that_is_alone_owns_its_bases(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(4):
            store.commit({"w": nudged(SHAPE, step)}, step=step)
        store.forget(ckptstore.KeepLast(2))
        for step in (4, 5):
            store.commit({"w": torch.full(SHAPE, float(step))}, step=step)
        store.forget([2])
        (three,) = [each for each in store.usage().commits if store.checkout(each.commit).step == 3]
        assert three.exclusive_bytes > nudged(SHAPE, 0).nbytes


def stops_when_all_is_read(phase: str, done: int, total: int) -> None:
    if phase == "data" and done == total:
        raise KeyboardInterrupt


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("found_by", ["restore", "read", "fsck", "fsck, before one is stopped"])
def test_what_a_wrong_patch_makes_is_stored_anew(
    found_by: str, reopened: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that went bad between two commits makes a patch that is sound and makes the wrong
    chunk. Whoever finds it distrusts its pack: the next commit of these bytes stores them."""
    encode, state = patches.encode, {"w": nudged(SHAPE, 1)}

    def of_other_base(raw, base, width, at, *rest):  # type: ignore[no-untyped-def]
        other = bytearray(base)
        other[int(at[0]) * width] ^= 1
        return encode(raw, memoryview(other), width, at, *rest)

    with ckptstore.open(tmp_path / "store") as store:
        store.commit({"w": nudged(SHAPE, 0)}, step=0)
        monkeypatch.setattr(patches, "encode", of_other_base)
        store.commit(state, step=1)
        monkeypatch.undo()
        find = {
            "restore": lambda: store.checkout(1).restore({"w": torch.zeros(SHAPE)}),
            "read": lambda: store.checkout(1).read("w"),
            "fsck": lambda: [found.kind for found in store.fsck(read_data="all").findings],
        }[found_by.partition(",")[0]]
        if found_by.startswith("fsck"):
            assert set(find()) == {"chunk"}
            if found_by != "fsck":
                with pytest.raises(KeyboardInterrupt):
                    fsck(
                        offline_store_of(store._handle),
                        level=Level.DATA,
                        progress=stops_when_all_is_read,
                    )
        else:
            with pytest.raises(ckptstore.errors.Corrupt):
                find()
        if not reopened:
            store.commit(state, step=2)
    with ckptstore.open(tmp_path / "store") as store:
        if reopened:
            store.commit(state, step=2)
        assert same(store.checkout(2).read("w"), state["w"])
        assert same(store.checkout(1).read("w"), state["w"])


@pytest.mark.parametrize("lost", [False, True])
def test_a_chunk_that_is_found_late_is_no_patch_of_itself(lost: bool, tmp_path: Path) -> None:
    """The pack that a commit remembers is gone, and the index does not name the other one that has
    the chunk; it does once the chunk before is read, which is the same one."""
    state = {"w": nudged(SHAPE, 0)}
    storage = ckptstore.Storage(patch_memory_bytes=1)  # so that chunks are read
    with ckptstore.open(tmp_path / "store", storage=storage) as store:
        store.commit({**state, "more": torch.rand(SHAPE)}, step=0)
        objects, packs = store._handle.objects, store._handle.log.state.packs
        for pack in packs.values():
            objects.suspect_packs.add(pack.id)
        store.commit_async(state, step=1).wait()  # a copy, as a writer makes at the same time
        for pack in packs.values():
            objects.suspect_packs.discard(pack.id)
        assert store.gc(max_unused=0.0).deleted
        if lost:  # by a `reindex` of another process
            objects.index.reset()
        assert same(store.commit_async(state, step=2).wait().read("w"), state["w"])
        assert not store.fsck(read_data="100%").findings


def test_a_chunk_that_two_writers_made_of_different_bases_is_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        ckptstore.open(tmp_path / "store", run="a") as store,
        ckptstore.open(tmp_path / "store", run="b") as other,
    ):
        store.commit({"w": nudged(SHAPE, 0)}, step=0)
        other.commit({"w": changed(nudged(SHAPE, 1), 9)}, step=0)
        allowed = Dedup.allowed

        def before_the_other(dedup: Dedup, patches: Iterable[NewPatch]) -> Any:
            found = allowed(dedup, patches)
            monkeypatch.setattr(Dedup, "allowed", allowed)
            store.commit({"w": nudged(SHAPE, 1)}, step=1)
            return found

        monkeypatch.setattr(Dedup, "allowed", before_the_other)
        other.commit({"w": nudged(SHAPE, 1)}, step=1)
        assert chunks_by_codec(store, patched=True) - chunks_by_codec(store, patched=False)
        for _ in range(20):  # the order in which footers arrive is by chance
            assert not store.fsck(read_data="100%").findings
