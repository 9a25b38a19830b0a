"""Ranks that have opened different stores, or copies of one, make no commit: its packs would lie on
many disks, and its log on one."""

import shutil
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

import ckptstore
from ckptstore.errors import InvalidInput
from ckptstore.interop.dcp import StoreWriter
from tests.distributed.layouts import full, group_of, layout, meet
from tests.distributed.pool import Pool

N = 4
REFUSED = "a path on each host's own disk"


def commit_to_two_disks(rank: int, path: Path, before: int) -> None:
    meet(N)
    with ckptstore.open(path / str(rank // 2)) as store:
        with pytest.raises(InvalidInput, match=REFUSED):
            store.commit({"model": {"rows": layout("rows", full(), N)}}, step=1)
        assert len(store.log()) == before


def save_to_two_disks(rank: int, path: Path, before: int) -> None:
    meet(N)
    writer = StoreWriter(path / str(rank // 2), step=1)
    state = {"rows": layout("rows", full(), N)}
    with pytest.raises(CheckpointException, match=REFUSED):
        dcp.save(state, storage_writer=writer, process_group=group_of(N))
    with ckptstore.open(path / str(rank // 2)) as store:
        assert len(store.log()) == before


def commit_to_one(rank: int, path: Path) -> None:
    meet(N)
    with ckptstore.open(path / "0") as store:
        store.commit({"model": {"rows": layout("rows", full(), N)}}, step=0)


@pytest.mark.parametrize("save", [commit_to_two_disks, save_to_two_disks])
def test_a_commit_to_the_disks_of_two_hosts_is_refused(
    pool: Pool, tmp_path: Path, save: object
) -> None:
    pool.run(save, tmp_path, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("save", [commit_to_two_disks, save_to_two_disks])
def test_a_commit_to_two_copies_of_one_store_is_refused(
    pool: Pool, tmp_path: Path, save: object
) -> None:
    """Nothing new is written: the ranks of the copy reuse packs, which their copy has."""
    pool.run(commit_to_one, tmp_path)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    pool.run(save, tmp_path, 1)  # type: ignore[arg-type]
