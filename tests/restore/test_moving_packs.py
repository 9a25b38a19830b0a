"""A reader beside gc: chunks that moved are located again."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.core.ids import digest, pack_key
from ckptstore.errors import NotFound
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.restore.mmap import MemoryMap
from tests.maintenance.collecting import collected, make, opened, state_of

NAMES = "abc"
KEEP = torch.arange(8192, dtype=torch.float32)
CHUNK = digest(KEEP.numpy().tobytes())


def make_shrinking(place: Path) -> None:
    """Commits of ever less: as each of the first is forgotten and collected, the pack that holds
    `keep` is copied once more."""
    tensors = {name: torch.randn(8192) for name in NAMES}
    with ckptstore.open(place, storage=ckptstore.Storage(chunk_bytes=1 << 16)) as store:
        for step in range(len(NAMES) + 2):
            store.commit(
                {"m": {"keep": KEEP, **{name: tensors[name] for name in NAMES[step:]}}}, step=step
            )


def collect_again(place: Path) -> None:
    """Forget the oldest commit and collect: the pack moves."""
    with ckptstore.open(place) as store:
        store.forget(store.log()[-1].id)
    assert collected(place).copied_bytes


def read_chunk(handle: StoreHandle, where: object) -> None:
    out = bytearray(KEEP.nbytes)
    # numpy's array
    handle.objects.read_into(CHUNK, [memoryview(out)], where=where)  # type: ignore[arg-type]
    assert digest(out) == CHUNK


def test_a_pack_that_was_collected_between_looking_up_and_reading_is_looked_up_again(
    tmp_path: Path,
) -> None:
    """The chunk index is shared: another process may have dropped the pack's name from it as
    well."""
    make_shrinking(tmp_path)
    with opened(tmp_path) as handle:
        handle.objects.sync(handle.log.replay())
        where = handle.objects.locate(CHUNK)
        collect_again(tmp_path)
        with ckptstore.open(tmp_path):
            pass
        assert not handle.objects.index.pack_ids({int(where["pack"][0])})
        read_chunk(handle, where)


def test_a_pack_that_moves_again_and_again_while_it_is_looked_for_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_shrinking(tmp_path)
    with opened(tmp_path) as handle:
        handle.objects.sync(handle.log.replay())
        where = handle.objects.locate(CHUNK)
        collect_again(tmp_path)
        located, moves = handle.objects.locate, [1, 2]

        def locate_and_let_others_collect(ids: bytes) -> object:
            found = located(ids)
            if moves and found["found"].all():
                moves.pop()
                collect_again(tmp_path)
            return found

        monkeypatch.setattr(handle.objects, "locate", locate_and_let_others_collect)
        read_chunk(handle, where)
        assert not moves


def test_an_index_that_is_behind_keeps_what_others_have_indexed_since(tmp_path: Path) -> None:
    make(tmp_path, 2)
    with opened(tmp_path) as handle:
        behind = handle.log.replay()
        with ckptstore.open(tmp_path) as other:
            other.commit(state_of(7), step=7)
            newest = set(handle.objects.index.indexed())
            assert max(newest) >= behind.next_pack
            handle.objects.sync(behind, thorough=True)
            assert set(handle.objects.index.indexed()) == newest


def test_a_listed_pack_that_is_not_there_is_missing(tmp_path: Path) -> None:
    make_shrinking(tmp_path)
    with opened(tmp_path) as handle:
        handle.objects.sync(handle.log.replay())
        for pack in handle.log.state.packs.values():
            if not pack.metadata:
                (tmp_path / pack_key(pack.id)).unlink()
        with pytest.raises(NotFound, match=r"is listed but absent; run `ckptstore fsck"):
            read_chunk(handle, None)


def test_chunks_that_all_moved_come_back_in_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second chunk of `x` lies in an older pack than the first, and a gc of another host has
    copied both."""
    size = 1 << 14
    old, new = torch.full((size,), 1.0), torch.full((size,), 2.0)
    second, gone = torch.full((size,), 3.0), torch.randn(8 * size)
    states = [
        {"x": torch.cat((old, second)), "gone": gone[:size], "more": gone[size : 3 * size]},
        {"x": torch.cat((new, second)), "gone": gone[3 * size :]},
        {"x": torch.cat((new, second))},
        {"x": torch.cat((new, second))},
    ]
    with ckptstore.open(tmp_path, storage=ckptstore.Storage(chunk_bytes=1 << 16)) as store:
        for step, state in enumerate(states):
            store.commit(state, step=step)
        snapshot = store.checkout(3)
        assert [leaf.path for leaf in snapshot.leaves()] == ["x"]
        monkeypatch.setenv("CKPTSTORE_CACHE", str(tmp_path / "another host"))
        with ckptstore.open(tmp_path) as other:
            other.forget(ckptstore.KeepLast(2))
            assert other.gc(grace_s=0, max_unused=0.0).copied_bytes
        assert torch.equal(snapshot.read("x"), states[3]["x"])


def test_a_pack_that_is_collected_while_a_leaf_is_mapped_is_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the leaf lies behind another in its pack, and is copied after the rest was
    mapped."""
    leaf = torch.arange((8 << 20) // 4 + 1000, dtype=torch.float32)
    with ckptstore.open(tmp_path, threads=1) as store:
        store.commit({"m": {"leaf": leaf}}, step=0)
        leaf[-1] = 0
        store.commit({"m": {"before": torch.randn(1000), "leaf": leaf}}, step=1)
        for step in (2, 3):
            store.commit({"m": {"leaf": leaf}}, step=step)
    put, moves = MemoryMap.put, [1]

    def put_and_let_others_collect(self: MemoryMap, *args: Any) -> None:
        put(self, *args)
        if moves:
            moves.pop()
            with ckptstore.open(tmp_path) as store:
                for info in store.log()[-2:]:
                    store.forget(info.id)
            assert collected(tmp_path).copied_bytes > leaf.nbytes

    monkeypatch.setattr(MemoryMap, "put", put_and_let_others_collect)
    with ckptstore.open(tmp_path) as store:
        found = store.checkout(3).state_dict(mmap=True)["m"]["leaf"]
    assert not moves
    assert torch.equal(found, leaf)
