"""What a call holds beside the state stays within its budget, however large the tensor is; a part
of a tensor costs a part of the reads."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptstore
from ckptstore import InvalidInput
from ckptstore.core.config import RUN_BYTES
from ckptstore.core.process import free_bytes
from ckptstore.repository import memory_budget
from ckptstore.repository.memory_budget import (
    PACK_BUFFERS_BYTES,
    WINDOW_BYTES,
    WriteRoom,
    rank_room,
    read_room,
    write_room,
)
from ckptstore.snapshot import contents_of
from tests.restore.counting import (
    bytes_read,
    least_bytes_read,
    peak_buffers,
    peak_resident,
    peak_scratch,
)

MIB = 1 << 20
GIB = 1 << 30
SLACK_BYTES = MIB
"""For what is not a buffer: the plan, the schema, the log."""

ACCOUNT_BYTES = 4096
"""The kernel's accounts of reads and of free memory are files that are read."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path / "store") as opened:
        yield opened


# -- reads that are counted --


def test_rows_touch_only_the_chunks_that_cover_them(store: ckptstore.Store) -> None:
    whole = torch.randn(4096, 1024)  # 16 MiB in chunks of 256 rows
    snap = store.checkout(store.commit({"w": whole}).id)
    assert contents_of(snap).trees
    for start, stop in ((256, 512), (0, 1), (255, 257), (1000, 3000)):
        chunks = -(-stop // 256) - start // 256
        with peak_buffers() as peak:
            nbytes, rows = least_bytes_read(
                lambda start=start, stop=stop: snap.read("w", slice(start, stop))
            )
        assert torch.equal(rows, whole[start:stop])
        assert nbytes <= chunks * MIB + ACCOUNT_BYTES
        assert peak.bytes <= 2 * MIB + SLACK_BYTES  # the first and the last chunk


def test_columns_are_read_within_the_budget(store: ckptstore.Store) -> None:
    whole = torch.randn(65536, 64)  # 16 MiB; a move for each of 65,536 rows
    snap = store.commit({"w": whole})
    with peak_buffers() as peak:
        columns = snap.read("w", (slice(None), slice(3, 5)), memory_budget_bytes=4 * MIB)
    assert torch.equal(columns, whole[:, 3:5])
    assert peak.bytes <= 4 * MIB + SLACK_BYTES


def _read(snap: Any, whole: torch.Tensor, budget_bytes: int) -> torch.Tensor:
    return snap.read("w", memory_budget_bytes=budget_bytes)  # type: ignore[no-any-return]


def _read_into(snap: Any, whole: torch.Tensor, budget_bytes: int) -> torch.Tensor:
    target = torch.empty(whole.shape[::-1]).t()
    snap.read_into(target, "w", memory_budget_bytes=budget_bytes)
    return target


def _restore(snap: Any, whole: torch.Tensor, budget_bytes: int) -> torch.Tensor:
    target = {"w": torch.empty(whole.shape[::-1]).t()}
    there = target["w"]
    snap.restore(target, memory_budget_bytes=budget_bytes)
    return there


def _state_dict(snap: Any, whole: torch.Tensor, budget_bytes: int) -> torch.Tensor:
    return snap.state_dict(memory_budget_bytes=budget_bytes)["w"]  # type: ignore[no-any-return]


READS: list[Callable[[Any, torch.Tensor, int], torch.Tensor]] = [
    _read,
    _read_into,
    _restore,
    _state_dict,
]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_every_read_stays_within_its_budget(
    tmp_path: Path, codec: str, read: Callable[[Any, torch.Tensor, int], torch.Tensor]
) -> None:
    whole = torch.randn(2048, 1024).bfloat16().float()  # 8 MiB that compress
    with ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(codec=codec)) as store:
        snap = store.commit({"w": whole})
        with peak_buffers() as peak:
            got = read(snap, whole, 3 * MIB)
        assert torch.equal(got, whole)
        assert peak.bytes <= 3 * MIB + SLACK_BYTES


@pytest.mark.parametrize("budget_bytes", [4 * MIB, 6 * MIB, 12 * MIB, 24 * MIB])
@pytest.mark.parametrize("in_place", [True, False])
def test_differences_and_their_bases_are_read_within_the_budget(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch, budget_bytes: int, in_place: bool
) -> None:
    whole = torch.randn(4096, 1024)
    for step in range(3):
        store.commit({"w": whole + step * 1e-3 * torch.randn(4096, 1024)}, step=step)
    assert store.compact(ckptstore.CompactPolicy(newest=0)).deltas == 32
    target = torch.empty(4096, 1024) if in_place else torch.empty(1024, 4096).t()
    with peak_buffers() as peak, peak_scratch(monkeypatch) as scratch:
        store.checkout(0).restore({"w": target}, memory_budget_bytes=budget_bytes)
    assert scratch.bytes
    # Beside a chunk's planes, some of their words are joined at a time.
    assert peak.bytes + scratch.bytes <= budget_bytes + SLACK_BYTES + MIB


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_commit_stays_within_its_budget(tmp_path: Path, codec: str) -> None:
    whole = torch.randn(1024, 3072).bfloat16().float().t()  # 12 MiB that must be staged
    small = {str(i): torch.randn(100, 100).t() for i in range(100)}
    with ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(codec=codec)) as store:
        for budget_bytes in (4 * MIB, 8 * MIB):
            with peak_buffers() as peak:
                snap = store.commit(
                    {"w": whole + budget_bytes, "small": small}, memory_budget_bytes=budget_bytes
                )
            assert torch.equal(snap.read("w"), whole + budget_bytes)
            assert peak.bytes <= budget_bytes + SLACK_BYTES
        snap.verify()


def test_a_commit_without_a_budget_has_the_same_chunks(store: ckptstore.Store) -> None:
    whole = torch.randn(1024, 4096).t()
    first = store.commit({"w": whole}, memory_budget_bytes=MIB)
    again = store.commit({"w": whole})
    assert again.content_id == first.content_id
    assert again.stats is not None and again.stats.new_chunks == 0


def test_a_budget_that_is_too_small_is_refused_and_the_least_is_named(tmp_path: Path) -> None:
    whole = torch.randn(300_000)
    for codec, commit_bytes in (("raw", 256 << 10), ("zstd", 1 << 20)):
        with ckptstore.open(
            tmp_path / codec, storage=ckptstore.Storage(codec=codec, chunk_bytes=256 << 10)
        ) as store:
            with pytest.raises(InvalidInput, match=f"at least {commit_bytes} "):
                store.commit({"w": whole}, memory_budget_bytes=commit_bytes - 1)
            assert not store.log()
            snap = store.commit({"w": whole}, memory_budget_bytes=commit_bytes)
            calls: list[Callable[[int], object]] = [
                lambda n, snap=snap: snap.read("w", memory_budget_bytes=n),
                lambda n, snap=snap: snap.state_dict(memory_budget_bytes=n),
                lambda n, snap=snap: snap.restore(
                    {"w": torch.zeros(300_000)}, memory_budget_bytes=n
                ),
                lambda n, store=store: store.resume(
                    {"w": torch.zeros(300_000)}, memory_budget_bytes=n
                ),
            ]
            for call in calls:
                for wrong in (3 * (256 << 10) - 1, 0, -1, True, 0.5, "64M"):
                    with pytest.raises(
                        InvalidInput, match=r"memory_budget_bytes is .* at least 786432 "
                    ):
                        call(wrong)  # type: ignore[arg-type]
                call(3 * (256 << 10))


# -- the division --

chunk_sizes = st.sampled_from([64 << 10, MIB, 8 * MIB, 64 * MIB])


@given(st.integers(0, 2 * GIB), chunk_sizes, st.integers(1, 64))
def test_reading_is_divided_within_the_budget(extra: int, chunk_bytes: int, threads: int) -> None:
    given_bytes = 3 * chunk_bytes + extra
    room = read_room(given_bytes, chunk_bytes, threads)
    assert 1 <= room.threads <= threads
    assert min(room.read_bytes, room.aside_bytes) >= chunk_bytes
    most = room.threads * (2 * room.read_bytes + chunk_bytes) + room.aside_bytes
    assert most <= given_bytes + chunk_bytes


@given(st.integers(0, 2 * GIB), chunk_sizes, st.integers(1, 64), st.booleans())
def test_committing_is_divided_within_the_budget(
    extra: int, chunk_bytes: int, threads: int, encoding: bool
) -> None:
    given_bytes = (4 if encoding else 1) * chunk_bytes + extra
    room = write_room(given_bytes, chunk_bytes, threads, encoding=encoding)
    assert 1 <= room.threads <= threads
    assert chunk_bytes <= room.run_bytes <= max(RUN_BYTES, chunk_bytes)
    each = 2 * (room.run_bytes + chunk_bytes) if encoding else room.run_bytes
    assert room.threads * (each if room.unbuffered else each + PACK_BUFFERS_BYTES) <= given_bytes


@given(st.integers(0, 2 * GIB), chunk_sizes, st.integers(1, 64), st.booleans())
def test_the_memory_of_a_ranks_commit_is_divided_within_the_budget(
    extra: int, chunk_bytes: int, threads: int, encoding: bool
) -> None:
    given_bytes = (8 if encoding else 5) * chunk_bytes + extra
    room = rank_room(given_bytes, chunk_bytes, threads, encoding=encoding)
    assert chunk_bytes <= room.window_bytes <= WINDOW_BYTES or room.window_bytes == chunk_bytes
    each = 2 * (room.write.run_bytes + chunk_bytes) if encoding else room.write.run_bytes
    writing = room.write.threads * (each if room.write.unbuffered else each + PACK_BUFFERS_BYTES)
    assert room.window_bytes + room.cells_bytes + 2 * chunk_bytes + writing <= given_bytes
    with pytest.raises(InvalidInput, match=f"at least {given_bytes - extra} "):
        rank_room(given_bytes - extra - 1, chunk_bytes, threads, encoding=encoding)


ROOMS: list[tuple[int | None, WriteRoom]] = [
    (None, WriteRoom(3, RUN_BYTES, unbuffered=False)),
    (GIB, WriteRoom(3, RUN_BYTES, unbuffered=False)),
    (256 * MIB, WriteRoom(3, RUN_BYTES, unbuffered=True)),
    (64 * MIB, WriteRoom(3, 2 * MIB, unbuffered=True)),
    (0, WriteRoom(1, MIB, unbuffered=True)),
]


@pytest.mark.parametrize(("free", "room"), ROOMS)
def test_without_a_budget_a_commit_uses_the_hosts_spare_memory(
    monkeypatch: pytest.MonkeyPatch, free: int | None, room: WriteRoom
) -> None:
    monkeypatch.setattr(memory_budget, "free_bytes", lambda: free)
    assert write_room(None, MIB, 3, encoding=False) == room


def test_the_free_memory_of_a_host_is_reported() -> None:
    free = free_bytes()
    assert free is not None and 0 < free < 1 << 50


# -- the issue's own figures --


def test_a_restore_in_place_takes_next_to_nothing(store: ckptstore.Store) -> None:
    state = {"w": torch.randn(12 * MIB), "parts": [torch.randn(MIB) for _ in range(8)]}
    snap = store.commit(state)
    target = {"w": torch.full((12 * MIB,), 1.0), "parts": [torch.ones(MIB) for _ in range(8)]}
    addresses = [target["w"].data_ptr(), *(part.data_ptr() for part in target["parts"])]
    with peak_resident() as peak:
        snap.restore(target)
    assert addresses == [target["w"].data_ptr(), *(part.data_ptr() for part in target["parts"])]
    assert torch.equal(target["w"], state["w"])
    assert peak.bytes <= 16 * MIB


@pytest.mark.soak
def test_a_gibibyte_is_read_and_cut_within_the_issues_figures(store: ckptstore.Store) -> None:
    snap = store.commit({"w": torch.randn(262_144, 1024)})
    with peak_resident() as peak, bytes_read() as count:
        rows = snap.read("w", slice(100_000, 102_000))
    chunks = -(-102_000 // 256) - 100_000 // 256
    print(
        f"rows: {count.bytes / MIB:.1f} MiB read of {chunks} chunks, "
        f"{(peak.bytes - rows.nbytes) / MIB:.1f} MiB beside the result"
    )
    assert count.bytes <= chunks * MIB + ACCOUNT_BYTES
    assert peak.bytes - rows.nbytes <= 32 * MIB
    for name, read in (("read", _read), ("transposed", _read_into), ("restore", _restore)):
        with peak_resident() as peak:
            whole = read(snap, torch.empty(262_144, 1024, device="meta"), 64 * MIB)
        print(f"{name}: {(peak.bytes - whole.nbytes) / MIB:.1f} MiB beside the result of 1 GiB")
        assert peak.bytes - whole.nbytes <= 80 * MIB
        del whole
