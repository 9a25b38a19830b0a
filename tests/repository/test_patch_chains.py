"""A chain of patches that is forged or cyclic is refused with bounded work, and the error says of
which chunk."""

from pathlib import Path

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.commit.transaction import Destination, Transaction
from ckptstore.core.ids import ChunkId, checksum, digest, pack_key
from ckptstore.core.model import PackEntry
from ckptstore.maintenance.mover import list_packs
from ckptstore.objects import codecs, patches
from ckptstore.objects.pack import TENSOR, encode_tail
from ckptstore.repository.pack_writer import NewPatch, new_chunk
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool

NBYTES = 1 << 14


def chunk(n: int) -> tuple[ChunkId, memoryview]:
    """Chunk `n`, of which one word in forty is its own."""
    words = np.arange(NBYTES // 2, dtype="<u2")
    words[::40] += n
    raw = memoryview(words).cast("B")
    return ChunkId(digest(raw)), raw


def patch(n: int, base: int, depth: int = 0) -> NewPatch:
    """Chunk `n` as a patch of another, after so many patches."""
    (name, raw), (of, before) = chunk(n), chunk(base)
    at = patches.changed(raw, before, 2)
    assert at is not None
    stored = patches.encode(raw, before, 2, at, [of], patches.ChainLength(depth, 10))
    assert stored is not None
    return NewPatch(name, checksum(raw), len(raw), 2, (of,), stored)


def listed(handle: StoreHandle, made: list[NewPatch], whole: int | None = None) -> None:
    """List a pack with patches, and a whole chunk if there is one."""
    with Transaction.begin(Destination(handle, ThreadPool(1))) as transaction:
        with transaction.packs.writing() as writer:
            if whole is not None:
                name, raw = chunk(whole)
                new = [new_chunk(name, raw)]
                writer.add(new, 2, TENSOR, codec=codecs.RAW, run_bytes=len(raw))
            writer.add_patches(made)
            writer.flush()
        transaction.packs.wait()
        list_packs(handle.log, transaction)


def read(handle: StoreHandle, n: int) -> bytes:
    name, raw = chunk(n)
    out = memoryview(bytearray(len(raw)))
    handle.objects.read_into(name, [out], describe=lambda _: f"chunk {n}")
    return bytes(out)


@pytest.fixture
def handle(tmp_path: Path) -> StoreHandle:
    ckptstore.open(tmp_path / "store").close()
    return StoreHandle(tmp_path / "store")


def test_a_chain_over_several_packs_is_read(handle: StoreHandle) -> None:
    listed(handle, [patch(1, 0)], whole=0)
    for n in range(2, 9):
        listed(handle, [patch(n, n - 1, n - 1)])
    for n in range(9):
        assert read(handle, n) == bytes(chunk(n)[1])


@pytest.mark.parametrize("depths", [(3, 3), (5, 2), (0, 0)], ids=str)
def test_two_chunks_that_are_patches_of_each_other_are_refused(
    handle: StoreHandle, depths: tuple[int, int]
) -> None:
    listed(handle, [patch(1, 2, depths[0]), patch(2, 1, depths[1])])
    for n in (1, 2):
        with pytest.raises(ckptstore.Corrupt, match="needs itself"):
            read(handle, n)


def test_a_base_that_is_nowhere_is_said(handle: StoreHandle) -> None:
    listed(handle, [patch(1, 0)])
    with pytest.raises(ckptstore.NotFound, match=chunk(1)[0].hex()[:12]):
        read(handle, 1)


def test_a_base_of_another_length_is_refused(handle: StoreHandle) -> None:
    listed(handle, [patch(1, 0), patch(2, 1, 1)._replace(raw_bytes=NBYTES - 2)], whole=0)
    with pytest.raises(ckptstore.Corrupt):
        handle.objects.read_into(chunk(2)[0], [memoryview(bytearray(NBYTES - 2))])


def test_a_patch_that_makes_another_chunk_is_found(handle: StoreHandle) -> None:
    """Its own checksum is right, so only what it makes tells."""
    wrong = patch(2, 0)._replace(id=chunk(1)[0], checksum=checksum(chunk(1)[1]))
    listed(handle, [wrong], whole=0)
    with pytest.raises(ckptstore.Corrupt, match="does not match"):
        read(handle, 1)


def test_a_pack_whose_footer_names_no_base_is_damaged() -> None:
    name, raw = chunk(1)
    entry = PackEntry(name, checksum(raw), 0, 100, len(raw), codecs.PATCH, 2, TENSOR, depth=1)
    with pytest.raises(ckptstore.InvalidInput, match="ids of bases"):
        encode_tail([entry], 100, metadata=False)


def test_a_chunk_that_others_stored_with_more_patches_is_taken_from_where_it_is_nearest(
    handle: StoreHandle,
) -> None:
    """Two writers store chunk 1, one whole and one as a patch; a third makes a patch of it. Each
    way round, it is read, and a gc leaves what is needed."""
    listed(handle, [], whole=1)
    listed(handle, [patch(2, 1)])
    listed(handle, [patch(3, 0), patch(1, 3, 1)], whole=0)
    assert read(handle, 2) == bytes(chunk(2)[1])
    assert int(handle.objects.located(chunk(1)[0])["depth"][0]) == 0


def test_chunks_that_are_patches_of_each_other_are_read_where_whole_copies_are(
    handle: StoreHandle,
) -> None:
    listed(handle, [patch(2, 1)], whole=1)
    listed(handle, [patch(1, 2)], whole=2)
    for n in (1, 2):
        assert read(handle, n) == bytes(chunk(n)[1])


def test_a_patch_that_no_commit_needs_may_lack_its_base(tmp_path: Path) -> None:
    """Its pack came back for a whole chunk beside it: a gc has nothing to complain of, and who
    finds the patch writes the chunk anew."""
    whole, lost = (torch.frombuffer(bytearray(chunk(n)[1]), dtype=torch.int16) for n in (5, 1))
    with ckptstore.open(tmp_path / "store") as store:
        listed(store._handle, [patch(1, 0)], whole=5)
        store.commit({"w": whole}, step=1)
        report = store.gc(max_unused=0.0, grace_s=0)
        assert not report.problems
        listed(store._handle, [patch(1, 0)], whole=6)
        store.tag("kept", 1)
        store.commit({"w": lost}, step=2)
        assert torch.equal(store.checkout(2).read("w"), lost)
        assert not store.fsck(read_data="all").findings


def test_a_pack_that_has_lost_a_patch_is_not_relied_on(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        handle = store._handle
        listed(handle, [patch(1, 0)], whole=0)
        listed(handle, [patch(2, 1, 1)])
        listed(handle, [patch(3, 2, 2)])
        second = handle.log.replay().packs[2].id
        damaged = tmp_path / "store" / pack_key(second)
        data = bytearray(damaged.read_bytes())
        data[80] ^= 1
        damaged.chmod(0o600)
        damaged.write_bytes(data)
        with pytest.raises(ckptstore.Corrupt, match="own checksum"):
            read(handle, 3)
        assert second in handle.objects.suspect_packs.packs()
        value = torch.frombuffer(bytearray(chunk(3)[1]), dtype=torch.int16)
        store.commit({"w": value}, step=1)
        assert torch.equal(store.checkout(1).read("w"), value)
