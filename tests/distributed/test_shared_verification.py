"""One rank verifies a shared chunk by its id, the others by its digest: no damage passes."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.core.ids import digest
from ckptstore.distributed import shared_reads as reading
from ckptstore.distributed.collective import Collective, Part
from ckptstore.repository import chunk_reader
from ckptstore.storage.local import LocalStorage
from tests.distributed.layouts import LAYOUTS, full, group_of, layout, meet
from tests.distributed.pool import Pool
from tests.distributed.test_broadcast import (
    CHUNK_BYTES,
    ELEMENTS,
    assert_death_is_known_to_all,
    commit_damaged,
    die_in_the_exchange,
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
def verified_from(least_bytes: int = 0) -> Iterator[list[int]]:
    """Share verification from `least_bytes` on; yields the bytes that this process compares with
    ids.
    """
    found: list[int] = []

    def counted(data: memoryview) -> bytes:
        found.append(len(data))
        return digest(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "LEAST_BYTES", least_bytes)
        patch.setattr(reading, "digest", counted)
        patch.setattr(chunk_reader, "digest", counted)
        yield found


@contextmanager
def spoilt(rank: int, which: int, *, again: bool = False) -> Iterator[None]:
    """Flip a bit in everything that rank `which` reads: in shared chunks, or also in the second
    read (`again`).
    """
    read_into, verified_for_others, flips = (
        LocalStorage.read_into,
        reading.SharedVerification._read,
        again,
    )

    def flipping(self: LocalStorage, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        read_into(self, key, offset, buffers)
        if flips and key.startswith("packs/") and len(buffers[0]) == CHUNK_BYTES:
            buffers[0][7] ^= 1

    def read(self: reading.SharedVerification, *args: Any) -> None:
        nonlocal flips
        flips = True
        try:
            verified_for_others(self, *args)
        finally:
            flips = again

    with pytest.MonkeyPatch.context() as patch:
        if rank == which:
            patch.setattr(LocalStorage, "read_into", flipping)
            patch.setattr(reading.SharedVerification, "_read", read)
        yield


def restore(rank: int, path: Path, least_bytes: int = 0, **options: Any) -> int:
    """Restore the newest commit; returns the bytes that this rank compared with ids."""
    meet(4)
    with ckptstore.open(path, threads=2) as store, verified_from(least_bytes) as compared:
        targets = empty_like(state_of(0))
        report = store.checkout().restore({"model": targets}, ranks=ckptstore.Ranks(**options))
        assert all(torch.equal(targets[name], value) for name, value in state_of(0).items())
        assert report.received_bytes == 0 and report.read_bytes >= COPY_BYTES
        return sum(compared)


def test_four_ranks_compare_one_copy_with_its_ids_instead_of_four(
    pool: Pool, committed: Path
) -> None:
    compared = pool.run(restore, committed)
    aside = state_of(0)["halves"].nbytes
    assert COPY_BYTES <= sum(compared) <= 1.1 * COPY_BYTES + 4 * aside
    assert max(compared) <= 1.2 * COPY_BYTES / 4 + aside + 2 * CHUNK_BYTES


def test_a_rank_alone_and_a_small_commit_are_compared_with_ids_as_ever(
    pool: Pool, committed: Path
) -> None:
    assert min(pool.run(restore_alone, committed)) >= COPY_BYTES
    assert COPY_BYTES < reading.LEAST_BYTES
    assert min(pool.run(restore, committed, reading.LEAST_BYTES)) >= COPY_BYTES


def restore_alone(rank: int, path: Path) -> int:
    return restore(rank, path, process_group="alone")


def restore_at_odds(rank: int, path: Path) -> int:
    return restore(rank, path, broadcast=rank == 1 or None)


def test_ranks_that_say_different_things_compare_all_with_ids(pool: Pool, committed: Path) -> None:
    assert min(pool.run(restore_at_odds, committed)) >= COPY_BYTES


def restore_spoilt(rank: int, path: Path, which: int) -> int:
    with spoilt(rank, which):
        return restore(rank, path)


@pytest.mark.parametrize("which", [0, 2])
def test_what_one_rank_reads_wrongly_is_read_again(pool: Pool, committed: Path, which: int) -> None:
    compared = pool.run(restore_spoilt, committed, which)
    assert compared[which] >= COPY_BYTES / 4


def restore_what_stays_spoilt(rank: int, path: Path, which: int) -> None:
    meet(4)
    with ckptstore.open(path, threads=2) as store, verified_from():
        targets = {"model": empty_like(state_of(0))}
        with (
            spoilt(rank, which, again=True),
            pytest.raises(ckptstore.Corrupt, match=r"leaf model/\w+, commit") as caught,
        ):
            store.checkout().restore(targets)
        assert list(caught.value.causes) == [which]
    restore(rank, path)


@pytest.mark.parametrize("which", [0, 3])
def test_what_one_rank_cannot_read_fails_on_all(pool: Pool, committed: Path, which: int) -> None:
    pool.run(restore_what_stays_spoilt, committed, which)


def restore_damaged_together(rank: int, path: Path) -> str:
    with verified_from():
        return restore_damaged(rank, path, False)


def test_a_damaged_chunk_fails_on_all_and_resume_takes_the_commit_before(
    pool: Pool, tmp_path: Path
) -> None:
    commit_damaged(tmp_path / "store")
    assert len(set(pool.run(restore_damaged_together, tmp_path / "store"))) == 1


def restore_while_words_flip(rank: int, path: Path) -> int:
    """Rank 1 sends wrong digests."""
    exchange = Collective.exchange

    def flipping(self: Collective, outgoing: Sequence[Part], incoming: Sequence[Part]) -> None:
        exchange(
            self,
            [Part(part.rank, memoryview(bytes(len(part.memory)))) for part in outgoing]
            if rank == 1
            else outgoing,
            incoming,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collective, "exchange", flipping)
        return restore(rank, path)


def test_what_does_not_fit_the_words_of_another_is_compared_with_its_id(
    pool: Pool, committed: Path
) -> None:
    compared = pool.run(restore_while_words_flip, committed)
    assert min(compared[0], compared[2], compared[3]) >= 1.8 * compared[1]


def restore_layouts(rank: int, path: Path, n: int) -> int:
    meet(n)
    if rank >= n:
        return 0
    with ckptstore.open(path) as store, verified_from() as compared:
        state = {"x": {name: layout(name, torch.zeros_like(full()), n) for name in LAYOUTS}}
        store.checkout("layouts").restore(state, ranks=ckptstore.Ranks(process_group=group_of(n)))
        assert all(
            torch.equal(state["x"][name].to_local(), layout(name, full(), n).to_local())
            for name in LAYOUTS
        )
        return sum(compared)


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
        assert sum(pool.run(restore_layouts, tmp_path / "store", n)) > 0


def restore_own_part(rank: int, path: Path) -> int:
    """Each rank has its own chunks and shares none."""
    meet(4)
    with ckptstore.open(path) as store, verified_from() as compared:
        targets = {f"part{rank}": torch.zeros(4 * CHUNK_BYTES)}
        store.checkout().restore({"parts": targets}, strict=False)
        assert torch.equal(targets[f"part{rank}"], part_of(rank))
        return sum(compared)


def part_of(rank: int) -> torch.Tensor:
    return torch.arange(4 * CHUNK_BYTES, dtype=torch.float32) + rank / 8


def test_ranks_that_have_nothing_in_common_compare_their_own(pool: Pool, tmp_path: Path) -> None:
    with ckptstore.open(
        tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
    ) as store:
        store.commit(
            {"parts": {f"part{rank}": part_of(rank) for rank in range(4)}},
            ranks=ckptstore.Ranks(process_group="alone"),
        )
    assert min(pool.run(restore_own_part, tmp_path / "store")) >= part_of(0).nbytes


@contextmanager
def interrupted() -> Iterator[None]:
    """Ctrl-C at the first read."""
    fetch = reading.SharedVerification._read

    def read(self: reading.SharedVerification, *args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        fetch(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading.SharedVerification, "_read", read)
        yield


def restore_while_one_is_interrupted(rank: int, path: Path) -> None:
    meet(4)
    with ckptstore.open(path, threads=2) as store, verified_from():
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


def die_while_verifying(rank: int, path: Path) -> None:
    with verified_from():
        die_in_the_exchange(rank, path, {})


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_rank_that_dies_before_it_has_verified_is_known_to_all_at_once(committed: Path) -> None:
    assert_death_is_known_to_all(die_while_verifying, committed)
