"""Metadata is there twice: a chunk is lost only if it is damaged in both places, whatever else is
damaged beside it."""

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from ckptstore.core.ids import ChunkId, digest, new_session_id, pack_key, twin_key
from ckptstore.errors import Corrupt
from ckptstore.index.chunks import ChunkIndex
from ckptstore.index.suspect_packs import SuspectPacks
from ckptstore.log.entries import Register
from ckptstore.objects import codecs
from ckptstore.objects.pack import PAGE
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.init_store import init_store
from ckptstore.repository.pack_writer import ClosedPack, PackSet, new_chunk
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool
from tests.maintenance.stores import flip

CHUNKS = 4
CHUNK_BYTES = 4096


@pytest.fixture(params=[codecs.RAW, codecs.ZSTD], ids=["raw", "zstd"])
def pack(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[StoreHandle, ClosedPack]]:
    """A metadata pack whose chunks lie one behind the other, so that one read fetches them all."""
    init_store(tmp_path / "store")
    handle = StoreHandle(tmp_path / "store")
    values = range(4) if request.param == codecs.ZSTD else range(256)
    chunks = [bytes(random.choices(values, k=CHUNK_BYTES)) for _ in range(CHUNKS)]
    new = [new_chunk(ChunkId(digest(chunk)), memoryview(chunk)) for chunk in chunks]
    packs = PackSet(handle.storage, new_session_id(), ThreadPool(1), codec=request.param)
    with packs.writing(metadata=True) as pack_writer:
        pack_writer.add(new, 1, PAGE, codec=request.param, run_bytes=CHUNKS * CHUNK_BYTES)
    packs.wait()
    handle.log.append(Register(packs.session, 0, 0, (packs.closed[0].record,), frozenset()))
    yield handle, packs.closed[0]
    handle.close()


def _fresh(handle: StoreHandle, closed: ClosedPack) -> ObjectStore:
    """The store's chunks as somebody sees them who has read nothing yet."""
    nowhere = Path(handle.url) / "nowhere"
    index = ChunkIndex.open(nowhere / "index", handle.config.store)
    objects = ObjectStore(handle.storage, index, handle.log, SuspectPacks(nowhere / "distrusted"))
    objects.registered(1, closed.record.id, closed.table)
    return objects


def _ids(pack: ClosedPack) -> list[ChunkId]:
    return [ChunkId(row["chunk"].tobytes()) for row in pack.table]


def test_a_chunk_is_read_from_whichever_twin_has_it(pack: tuple[StoreHandle, ClosedPack]) -> None:
    handle, closed = pack
    root, starts = Path(handle.url), closed.table["offset"].tolist()
    files = [
        (root / key, (root / key).read_bytes())
        for key in (pack_key(closed.record.id), twin_key(closed.record.id))
    ]
    for places in product(starts, repeat=2):
        for (file, whole), at in zip(files, places, strict=True):
            file.write_bytes(whole)
            flip(file, at + 20)
        objects = _fresh(handle, closed)
        if len(set(places)) == 1:
            with pytest.raises(Corrupt, match=r"`ckptstore fsck"):
                objects.read_metadata_many(_ids(closed))
        else:
            read = objects.read_metadata_many(_ids(closed))
            assert {chunk: digest(data) for chunk, data in read.items()} == {
                chunk: chunk for chunk in _ids(closed)
            }


def test_a_pack_that_was_cut_and_a_twin_that_is_damaged_make_one_whole(
    pack: tuple[StoreHandle, ClosedPack],
) -> None:
    handle, closed = pack
    root = Path(handle.url)
    with (root / pack_key(closed.record.id)).open("r+b") as file:
        file.truncate(int(closed.table["offset"][2]) + 1)
    flip(root / twin_key(closed.record.id), int(closed.table["offset"][0]))
    got = _fresh(handle, closed).read_metadata_many(_ids(closed))
    assert [digest(got[chunk]) for chunk in _ids(closed)] == _ids(closed)
