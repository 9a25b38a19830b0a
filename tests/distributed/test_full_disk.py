"""A disk that is full for one rank fails all: one error names it, nothing is left behind, and
`on_full="gc"` frees space.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.maintenance.retention import KeepLast
from tests.distributed.layouts import full, layout, meet
from tests.distributed.pool import Pool
from tests.shared.sites import Site
from tests.support import mounts, strace
from tests.support.mounts import leave_free, small_disk
from tests.support.servers.s3 import S3Server, new_url

DISK_BYTES = 64 << 20
STATE_BYTES = 12 << 20
CHUNK_BYTES = 1 << 16


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    if reason := mounts.small_disk_problem():
        pytest.skip(reason)
    with small_disk(tmp_path / "disk", size_bytes=DISK_BYTES) as place:
        yield place


def allow_tracing(rank: int) -> None:
    strace.allow_tracing()


def commit_without_room(rank: int, path: Path, full_for: int) -> None:
    meet(4)
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)) as store:
        with pytest.raises(
            ckptstore.NoSpace, match=rf"rank {full_for}: NoSpace: (?s:.*); .* free"
        ) as caught:
            store.commit(
                {"model": {"w": layout("rows", full() + 1, 4)}}, ranks=ckptstore.Ranks(timeout_s=60)
            )
        assert list(caught.value.causes) == [full_for]
        assert len(store.log()) == 1


def commit(rank: int, path: Path, number: int) -> str:
    meet(4)
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)) as store:
        return store.commit({"model": {"w": layout("rows", full() + number, 4)}}).id


def files(path: Path) -> set[str]:
    found = (
        file
        for folder in ("packs", "commits", "log", "sessions")
        for file in (path / folder).rglob("*")
    )
    return {str(file.relative_to(path)) for file in found if file.is_file()}


WRITE, LINK = "pwritev,pwritev2", "link,linkat"
"""The calls that write packs and create log entries."""


@pytest.mark.parametrize(
    ("rank", "calls"),
    [(1, WRITE), (0, WRITE), (0, LINK)],
    ids=["a pack", "a pack of the coordinator", "the log"],
)
def test_what_ranks_wrote_is_gone_when_the_disk_was_full_for_one(
    pool: Pool, tmp_path: Path, rank: int, calls: str
) -> None:
    if reason := strace.problem():
        pytest.skip(reason)
    path = tmp_path / "store"
    pool.run(allow_tracing)
    pool.run(commit, path, 0)
    before = files(path)
    with strace.failing(pool.processes[rank].pid, calls, "ENOSPC"):
        pool.run(commit_without_room, path, rank)
    assert files(path) == before
    ids = pool.run(commit, path, 1)
    with ckptstore.open(path) as store:
        assert torch.equal(store.checkout(ids[0]).read("model/w"), full() + 1)
        assert not store.fsck(read_data="100%").findings


def state_of(number: int) -> dict[str, dict[str, torch.Tensor]]:
    """Equal on every rank, so that it is stored once."""
    return {
        "model": {
            "w": torch.randn(STATE_BYTES // 4, generator=torch.Generator().manual_seed(number))
        }
    }


def commit_until_full(
    rank: int, path: Path, on_full: str, background: bool
) -> tuple[str, list[str]]:
    """Commit until it fails, forget, and commit again; returns the error and the log records."""
    records: list[str] = []
    handler = logging.Handler()
    # the shortest handler
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ckptstore")
    logger.addHandler(handler)
    try:
        with ckptstore.open(
            path, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES, on_full=on_full)
        ) as store:
            error = ""
            for number in range(DISK_BYTES // STATE_BYTES + 1):
                try:
                    store.commit(state_of(number), step=number)
                except ckptstore.NoSpace as full_disk:
                    error = str(full_disk)
                    break
            if rank == 0:
                store.forget(KeepLast(2))
            if background:
                store.commit_async(state_of(99), step=99).wait()
            else:
                store.commit(state_of(99), step=99)
            return error, records
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("background", [False, True], ids=["waited for", "in the background"])
def test_a_commit_of_ranks_on_a_full_disk_collects_what_was_forgotten_and_is_made(
    pool: Pool, disk: Path, background: bool
) -> None:
    results = pool.run(commit_until_full, disk / "store", "gc", background)
    assert len({error for error, _ in results}) == 1
    assert "after `ckptstore forget --keep-last 2` it frees" in results[0][0]
    said = [[line for line in records if "full: gc freed" in line] for _, records in results]
    assert [len(lines) for lines in said] == [2, 0, 0, 0], "the coordinator collects"
    warned = [sum("next commit takes" in line for line in records) for _, records in results]
    assert warned[0] >= 1
    with ckptstore.open(disk / "store") as store:
        assert torch.equal(store.checkout(99).read("model/w"), state_of(99)["model"]["w"])
        assert not store.fsck(read_data="100%").findings


def work_with_caches(rank: int, place: str, options: dict[str, Any], caches: list[Path]) -> None:
    meet(4)
    with Site(place, options).open(caches[rank]) as store:
        for number in (3, 4):
            store.commit({"model": {"w": layout("rows", full() + number, 4)}}, step=number)
        target = {"w": layout("rows", torch.zeros_like(full()), 4)}
        store.checkout(3).restore({"model": target})
        assert torch.equal(target["w"].to_local(), layout("rows", full() + 3, 4).to_local())


def test_a_rank_whose_cache_directory_is_full_works_without_it(
    pool: Pool, disk: Path, tmp_path: Path, s3: S3Server
) -> None:
    leave_free(disk, 0)
    place = new_url()
    pool.run(work_with_caches, place, s3.options(), [tmp_path, tmp_path, disk, tmp_path])
    with Site(place, s3.options()).open(tmp_path) as store:
        assert [info.step for info in store.log()] == [4, 3]
