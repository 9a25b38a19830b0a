"""Each rank verifies what it reads from a local disk, and one that cannot read tells the others."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.storage.local import LocalStorage
from tests.distributed.layouts import LAYOUTS, full, group_of, layout, meet
from tests.distributed.pool import Pool
from tests.distributed.test_broadcast import (
    CHUNK_BYTES,
    ELEMENTS,
    commit_damaged,
    empty_like,
    restore_damaged,
    state_of,
)

COPY_BYTES = ELEMENTS * 4


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verification") / "store"
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)) as store:
        store.commit({"model": state_of(0)}, ranks=ckptstore.Ranks(process_group="alone"))
    return path


@contextmanager
def spoilt() -> Iterator[None]:
    """Flip a bit of each chunk that this rank reads."""
    read_into = LocalStorage.read_into

    def flipping(self: LocalStorage, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        read_into(self, key, offset, buffers)
        if key.startswith("packs/") and len(buffers[0]) == CHUNK_BYTES:
            buffers[0][7] ^= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "read_into", flipping)
        yield


def restore(rank: int, path: Path, broadcast: bool | None = None) -> None:
    """Restore the newest commit, of which each rank reads all, unless one reads for all."""
    meet(4)
    with ckptstore.open(path, threads=2) as store:
        targets = empty_like(state_of(0))
        ranks = ckptstore.Ranks(broadcast=broadcast)
        report = store.checkout().restore({"model": targets}, ranks=ranks)
        assert all(torch.equal(targets[name], value) for name, value in state_of(0).items())
        assert report.received_bytes == 0 and report.read_bytes >= COPY_BYTES


def restore_at_odds(rank: int, path: Path) -> None:
    restore(rank, path, broadcast=rank == 1 or None)


def test_ranks_that_say_different_things_read_for_themselves(pool: Pool, committed: Path) -> None:
    pool.run(restore_at_odds, committed)


def restore_what_is_spoilt(rank: int, path: Path, which: int) -> None:
    meet(4)
    with ckptstore.open(path, threads=2) as store:
        targets = {"model": empty_like(state_of(0))}
        reading = spoilt() if rank == which else nullcontext()
        with reading, pytest.raises(ckptstore.Corrupt, match=r"leaf model/\w+, commit") as caught:
            store.checkout().restore(targets)
        assert list(caught.value.causes) == [which]
    restore(rank, path)


@pytest.mark.parametrize("which", [0, 3])
def test_what_one_rank_cannot_read_fails_on_all(pool: Pool, committed: Path, which: int) -> None:
    pool.run(restore_what_is_spoilt, committed, which)


def restore_damaged_together(rank: int, path: Path) -> str:
    return restore_damaged(rank, path, False)


def test_a_damaged_chunk_fails_on_all_and_resume_takes_the_commit_before(
    pool: Pool, tmp_path: Path
) -> None:
    commit_damaged(tmp_path / "store")
    assert len(set(pool.run(restore_damaged_together, tmp_path / "store"))) == 1


def restore_layouts(rank: int, path: Path, n: int) -> None:
    meet(n)
    if rank >= n:
        return
    with ckptstore.open(path) as store:
        state = {"x": {name: layout(name, torch.zeros_like(full()), n) for name in LAYOUTS}}
        store.checkout("layouts").restore(state, ranks=ckptstore.Ranks(process_group=group_of(n)))
        assert all(
            torch.equal(state["x"][name].to_local(), layout(name, full(), n).to_local())
            for name in LAYOUTS
        )


def test_shards_of_any_layout_are_right(pool: Pool, tmp_path: Path) -> None:
    with ckptstore.open(
        tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
    ) as store:
        store.commit(
            {"x": {name: full() for name in LAYOUTS}},
            tag="layouts",
            ranks=ckptstore.Ranks(process_group="alone"),
        )
    for n in (3, 4):
        pool.run(restore_layouts, tmp_path / "store", n)


@contextmanager
def interrupted() -> Iterator[None]:
    """Ctrl-C at the first read of a tensor."""
    read_into = LocalStorage.read_into

    def read(self: LocalStorage, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        if len(buffers[0]) >= CHUNK_BYTES:
            signal.raise_signal(signal.SIGINT)
        read_into(self, key, offset, buffers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "read_into", read)
        yield


def restore_while_one_is_interrupted(rank: int, path: Path) -> None:
    meet(4)
    with ckptstore.open(path, threads=1) as store:
        targets = {"model": empty_like(state_of(0))}
        if rank == 2:
            with interrupted(), pytest.raises(KeyboardInterrupt):
                store.checkout().restore(targets, ranks=ckptstore.Ranks(timeout_s=30))
        else:
            with pytest.raises(ckptstore.CkptStoreError) as caught:
                store.checkout().restore(targets, ranks=ckptstore.Ranks(timeout_s=30))
            assert caught.value.causes == {2: "KeyboardInterrupt"}
    restore(rank, path)


def test_who_is_interrupted_says_what_others_wait_for_and_all_are_told(
    pool: Pool, committed: Path
) -> None:
    pool.run(restore_while_one_is_interrupted, committed)
