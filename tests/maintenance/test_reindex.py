"""reindex rebuilds both indexes from log and footers, with the same content."""

from pathlib import Path

import ckptstore
from ckptstore.core.ids import pack_key
from ckptstore.index.catalog_sqlite import open_catalog
from ckptstore.index.chunks import ChunkIndex
from ckptstore.maintenance.check.indexes import reindex
from ckptstore.repository.store_handle import CATALOG_NAME, CHUNKS_NAME, StoreHandle
from tests.maintenance.stores import assert_restores, check


def contents(store: Path) -> tuple[object, ...]:
    """Everything that catalog and chunk index hold."""
    handle = StoreHandle(store)
    state = handle.log.replay()
    catalog = open_catalog(store / "index" / CATALOG_NAME, state.store)
    assert catalog is not None
    index = ChunkIndex.open(store / "index" / CHUNKS_NAME, state.store)
    commits = catalog.log(forgotten=True)
    schemas = sorted({schema for info in commits for schema in info.schemas.values()})
    held = (
        catalog.position(),
        commits,
        catalog.tags(),
        catalog.runs(),
        catalog.packs(),
        [catalog.schema(schema) for schema in schemas],
        [catalog.entry(n) for n in range(1, state.n + 1)],
        index.pack_ids(index.indexed()),
    )
    catalog.close()
    index.close()
    handle.close()
    return held


def test_the_new_indexes_hold_what_the_old_ones_held(store: Path) -> None:
    before = contents(store)
    handle = StoreHandle(store)
    done = reindex(handle)
    handle.close()
    assert (done.entries, done.commits, done.packs, done.unreadable) == (5, 4, 8, 0)
    assert contents(store) == before
    assert check(store).findings == ()


def test_a_pack_that_cannot_be_read_is_counted_and_hinders_nothing(store: Path) -> None:
    handle = StoreHandle(store)
    _, pack = min(
        (number, pack) for number, pack in handle.log.replay().packs.items() if not pack.metadata
    )
    (store / pack_key(pack.id)).write_bytes(b"no pack")
    done = reindex(handle)
    handle.close()
    assert (done.packs, done.unreadable) == (7, 1)
    with ckptstore.open(store) as opened:
        assert opened.checkout("first").read("model/bias").tolist() == [0.0] * 3
        assert len(opened.log()) == 4


def test_a_running_store_goes_on(store: Path) -> None:
    with ckptstore.open(store) as opened:
        snapshot = opened.checkout(1)
        opened.reindex()
        assert snapshot.read("model/bias").tolist() == [1.0] * 3
        for step in range(3):
            assert_restores(opened, step, step)


def test_a_pack_that_a_gc_deletes_meanwhile_is_not_counted_as_unreadable(store: Path) -> None:
    handle = StoreHandle(store)

    def collect_before(phase: str, done: int, total: int) -> None:
        if phase == "chunk index":
            with ckptstore.open(store) as other:
                for name in other.tags():
                    other.untag(name)
                other.forget([info.id for info in other.log(run="main")[1:]])
                assert other.gc(grace_s=0, max_unused=0.0).deleted

    done = reindex(handle, progress=collect_before)
    handle.close()
    assert done.unreadable == 0
    assert check(store).findings == ()
