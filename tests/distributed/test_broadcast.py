"""Chunks that several ranks need are read once and sent: verified on arrival, with errors raised on
all ranks.
"""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.distributed.collective import Collective, RankBytes
from ckptstore.restore.restore import RestoreReport
from ckptstore.storage.local import LocalStorage
from tests.distributed.layouts import (
    LAYOUTS,
    full,
    group_of,
    layout,
    meet,
    mesh_of,
    placed,
)
from tests.distributed.pool import Pool
from tests.shared.sites import Site
from tests.support.grouped import grouped
from tests.support.servers.s3 import S3Server, new_url

CHUNK_BYTES = 1 << 16
ELEMENTS = 1_500_000


def state_of(seed: int) -> dict[str, Any]:
    """Large and small leaves, equal chunks within one leaf, a leaf in a page."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        str(i): torch.randn(size, generator=generator)
        for i, size in enumerate((ELEMENTS, 20_000, 3))
    }
    return {
        **weights,
        "zeros": torch.zeros(100_000),
        "halves": torch.randn(300, 200, generator=generator),
    }


def empty_like(state: dict[str, Any]) -> dict[str, Any]:
    """Targets, one of which is not contiguous."""
    targets = {name: torch.full_like(value, -1) for name, value in state.items()}
    targets["halves"] = torch.full((200, 300), -1.0).T
    return targets


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of packs that this process reads."""
    found: list[int] = []
    read_into = LocalStorage.read_into

    def counting(self: LocalStorage, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        if key.startswith("packs/"):
            found.append(sum(map(len, buffers)))
        read_into(self, key, offset, buffers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "read_into", counting)
        yield found


def restore(
    rank: int, path: Path, broadcast: bool | None, **more: Any
) -> tuple[int, RestoreReport]:
    """Restore the newest commit; the bytes read from packs, and the report."""
    meet(4)
    with ckptstore.open(path, threads=2) as store, counted() as found:
        snapshot = store.checkout()
        targets = empty_like(state_of(0))
        report = snapshot.restore(
            {"model": targets}, ranks=ckptstore.Ranks(broadcast=broadcast), **more
        )
        assert all(torch.equal(targets[name], value) for name, value in state_of(0).items())
        return sum(found), report


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("broadcast") / "store"
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)) as store:
        store.commit({"model": state_of(0)}, ranks=ckptstore.Ranks(process_group="alone"))
    return path


def test_four_ranks_read_one_copy_in_all_instead_of_four(pool: Pool, committed: Path) -> None:
    one_copy = sum(value.nbytes for value in state_of(0).values()) - 100_000 * 4 + CHUNK_BYTES * 2
    alone = pool.run(restore, committed, False)
    together = pool.run(restore, committed, True)
    assert sum(read for read, _ in alone) >= 4 * ELEMENTS * 4
    assert sum(read for read, _ in together) <= 1.05 * one_copy
    assert max(report.read_bytes for _, report in together) <= 1.1 * one_copy / 4
    assert all(report.received_bytes == 0 for _, report in alone)
    assert all(report.received_bytes >= 0.7 * one_copy for _, report in together)
    assert pool.run(restore, committed, None)[0][1].received_bytes == 0, (
        "a local disk is not slower than the network"
    )


def test_what_is_on_its_way_stays_within_the_budget(pool: Pool, committed: Path) -> None:
    for read, report in pool.run(restore_lean, committed):
        assert 0 < read < report.received_bytes


def restore_lean(rank: int, path: Path) -> tuple[int, RestoreReport]:
    largest = 0
    exchange = Collective.exchange

    def watched(
        self: Collective, outgoing: Sequence[RankBytes], incoming: Sequence[RankBytes]
    ) -> None:
        nonlocal largest
        largest = max(largest, sum(len(part.memory) for part in incoming))
        exchange(self, outgoing, incoming)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collective, "exchange", watched)
        found = restore(rank, path, True, memory_budget_bytes=8 * CHUNK_BYTES)
    assert 0 < largest <= 4 * CHUNK_BYTES
    return found


def restore_layouts(rank: int, path: Path, n: int) -> list[RestoreReport] | None:
    meet(n)
    if rank >= n:
        return None
    reports = []
    with ckptstore.open(path) as store:
        for broadcast in (False, True):
            state = {"x": {name: layout(name, torch.zeros_like(full()), n) for name in LAYOUTS}}
            reports.append(
                store.checkout("layouts").restore(
                    state, ranks=ckptstore.Ranks(process_group=group_of(n), broadcast=broadcast)
                )
            )
            assert all(
                torch.equal(state["x"][name].to_local(), layout(name, full(), n).to_local())
                for name in LAYOUTS
            )
    return reports


def test_shards_of_any_layout_get_what_they_share_from_each_other(
    pool: Pool, tmp_path: Path
) -> None:
    with ckptstore.open(
        tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
    ) as store:
        store.commit(
            {"x": {name: full() for name in LAYOUTS}},
            tag="layouts",
            ranks=ckptstore.Ranks(process_group="alone"),
        )
    for n in (3, 4):
        alone, together = zip(*pool.run(restore_layouts, tmp_path / "store", n)[:n], strict=True)
        assert sum(report.read_bytes for report in together) <= full().nbytes, (
            "the leaves are equal: one is read"
        )
        assert sum(report.read_bytes for report in alone) >= 7 * full().nbytes


def commit_damaged(path: Path) -> None:
    """Two commits; the second, `damaged`, has lost a chunk."""
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)) as store:
        store.commit({"model": state_of(0)}, ranks=ckptstore.Ranks(process_group="alone"))
        before = set(path.glob("packs/*/*"))
        store.commit(
            {"model": state_of(1)}, tag="damaged", ranks=ckptstore.Ranks(process_group="alone")
        )
    pack = max(set(path.glob("packs/*/*")) - before, key=lambda file: file.stat().st_size)
    with pack.open("r+b") as file:
        file.seek(CHUNK_BYTES * 2)
        file.write(b"damage")


def restore_damaged(rank: int, path: Path, broadcast: bool) -> str:
    meet(4)
    with ckptstore.open(path) as store:
        with pytest.raises(ckptstore.Corrupt, match=r"leaf model/0, commit") as caught:
            store.checkout("damaged").restore(
                {"model": empty_like(state_of(1))}, ranks=ckptstore.Ranks(broadcast=broadcast)
            )
        targets = empty_like(state_of(0))
        assert (
            store.resume({"model": targets}, ranks=ckptstore.Ranks(broadcast=broadcast)) is not None
        )
        assert all(torch.equal(targets[name], value) for name, value in state_of(0).items())
        assert len(store.skipped) == 1
    return str(caught.value)


def test_a_chunk_that_one_rank_cannot_read_fails_on_all_and_resume_takes_the_commit_before(
    pool: Pool, tmp_path: Path
) -> None:
    commit_damaged(tmp_path / "store")
    assert len(set(pool.run(restore_damaged, tmp_path / "store", True))) == 1


def restore_while_bytes_flip(rank: int, path: Path) -> tuple[int, RestoreReport]:
    exchange = Collective.exchange

    def flipping(
        self: Collective, outgoing: Sequence[RankBytes], incoming: Sequence[RankBytes]
    ) -> None:
        spoilt = [RankBytes(part.rank, memoryview(bytearray(part.memory))) for part in outgoing]
        for part in spoilt:
            part.memory[0] ^= 1
        exchange(self, spoilt if rank == 1 else outgoing, incoming)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collective, "exchange", flipping)
        return restore(rank, path, True)


def test_what_arrives_damaged_is_read_from_the_store(pool: Pool, committed: Path) -> None:
    results = pool.run(restore_while_bytes_flip, committed)
    read = [report.read_bytes for _, report in results]
    assert min(read[0], read[2], read[3]) >= 1.5 * read[1], (
        "the others read what rank 1 should have sent them"
    )


@contextmanager
def interrupted() -> Iterator[None]:
    """Ctrl-C whenever bytes of an exchange arrive."""
    waited = Collective._wait

    def wait(self: Collective, work: Any, timeout_s: float | None = None) -> None:
        waited(self, work, timeout_s)
        if sys._getframe(1).f_code is Collective._exchange.__code__:
            signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collective, "_wait", wait)
        yield


def restore_while_one_is_interrupted(rank: int, path: Path) -> tuple[int, RestoreReport]:
    meet(4)
    with ckptstore.open(path, threads=2) as store:
        targets = {"model": empty_like(state_of(0))}
        options: dict[str, Any] = {
            "memory_budget_bytes": 8 * CHUNK_BYTES,
            "ranks": ckptstore.Ranks(broadcast=True, timeout_s=30),
        }
        if rank == 2:
            with interrupted(), pytest.raises(KeyboardInterrupt):
                store.checkout().restore(targets, **options)
        else:
            with pytest.raises(ckptstore.CkptStoreError) as caught:
                store.checkout().restore(targets, **options)
            assert caught.value.causes == {2: "KeyboardInterrupt"}
    return restore(rank, path, True)


def test_who_is_interrupted_sends_what_others_wait_for_and_all_are_told(
    pool: Pool, committed: Path
) -> None:
    assert all(
        report.received_bytes for _, report in pool.run(restore_while_one_is_interrupted, committed)
    )


def restore_from_bucket(rank: int, place: str, options: dict[str, Any], cache: Path) -> int:
    meet(4)
    with Site(place, options).open(cache / str(rank)) as store:
        targets = empty_like(state_of(0))
        report = store.checkout().restore({"model": targets})
        assert all(torch.equal(targets[name], value) for name, value in state_of(0).items())
        return report.read_bytes


def test_from_a_bucket_that_is_the_rule(pool: Pool, tmp_path: Path, s3: S3Server) -> None:
    place = new_url()
    with Site(place, s3.options()).open(tmp_path / "own") as store:
        store.commit({"model": state_of(0)}, ranks=ckptstore.Ranks(process_group="alone"))
    read = pool.run(restore_from_bucket, place, s3.options(), tmp_path)
    assert sum(read) <= 1.05 * sum(value.nbytes for value in state_of(0).values())


def kill(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_exchange(rank: int, path: Path, options: dict[str, Any]) -> None:
    meet(4)
    if rank == 2:
        Collective.exchange = kill  # type: ignore[method-assign]  # this process dies of it
    with ckptstore.open(path) as store, pytest.raises(ckptstore.Unavailable) as caught:
        store.checkout().restore({"model": empty_like(state_of(0))}, **grouped("ranks", **options))
    assert 2 in caught.value.causes


def assert_death_is_known_to_all(task: Callable[..., None], *args: Any) -> None:
    """`task` kills the third of four ranks, and the others are told."""
    pool = Pool(4)
    try:
        results = pool.run(task, *args)
    finally:
        pool.close()
    assert [isinstance(result, EOFError) for result in results] == [False, False, True, False]


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_rank_that_dies_while_it_sends_is_known_to_all_at_once(committed: Path) -> None:
    assert_death_is_known_to_all(
        die_in_the_exchange, committed, {"broadcast": True, "memory_budget_bytes": 8 * CHUNK_BYTES}
    )


def restore_apart(rank: int, path: Path) -> tuple[int, int]:
    """A tensor of which each rank has one chunk; returns what the rank read and received."""
    meet(4)
    whole = torch.arange(4 * CHUNK_BYTES // 4, dtype=torch.float32)
    mesh, rows = mesh_of(4, False), (torch.distributed.tensor.Shard(0),)
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)) as store:
        store.commit({"x": {"w": placed(whole, mesh, rows)}}, step=1)
        state = {"x": {"w": placed(torch.zeros_like(whole), mesh, rows)}}
        report = store.checkout(1).restore(state, ranks=ckptstore.Ranks(broadcast=True))
    wanted = whole[rank * len(whole) // 4 : (rank + 1) * len(whole) // 4]
    assert torch.equal(state["x"]["w"].to_local(), wanted)
    return report.read_bytes, report.received_bytes


def test_a_broadcast_restore_sends_nothing_where_no_chunk_is_shared(
    pool: Pool, tmp_path: Path
) -> None:
    assert pool.run(restore_apart, tmp_path / "store") == [(CHUNK_BYTES, 0)] * 4


def restore_few_rows(rank: int, path: Path) -> None:
    meet(4)
    whole = torch.arange(CHUNK_BYTES // 4, dtype=torch.float32).reshape(2, -1)
    mesh, rows = mesh_of(4, False), (torch.distributed.tensor.Shard(0),)
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)) as store:
        store.commit({"x": {"w": placed(whole, mesh, rows), "step": 7}}, step=1)
        state = {"x": {"w": placed(torch.zeros_like(whole), mesh, rows), "step": 0}}
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # numpy's, of a division by zero
            store.checkout(1).restore(state, ranks=ckptstore.Ranks(broadcast=True))
    assert state["x"]["step"] == 7
    assert torch.equal(state["x"]["w"].full_tensor(), whole)


def test_a_rank_that_needs_no_chunk_limits_nobody(pool: Pool, tmp_path: Path) -> None:
    """Two of four ranks have no row of the tensor, whose one chunk the others share."""
    pool.run(restore_few_rows, tmp_path / "store")
