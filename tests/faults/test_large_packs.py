"""A pack that was written past the page cache is as durable as any other once its commit is
acknowledged."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.errors import CkptStoreError
from ckptstore.storage.direct_io_file import BUFFER_BYTES, DIRECT_FROM
from tests.support.mounts import PowerDisk, power_disk_problem

ELEMENTS = (DIRECT_FROM + 2 * BUFFER_BYTES) // 4 + 1234


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_power_is_cut_after_a_large_commit(kind: str, tmp_path: Path) -> None:
    if problem := power_disk_problem(kind):
        pytest.skip(problem)
    state = {
        "model": {
            "w": torch.randint(-(1 << 31), 1 << 31, (ELEMENTS,), dtype=torch.int64).to(torch.int32)
        }
    }
    disk = PowerDisk(kind, tmp_path)
    disk.mount()
    try:
        store = ckptstore.open(
            disk.mountpoint / "store", threads=1, storage=ckptstore.Storage(direct_io=True)
        )
        commit = store.commit(state, step=1).id
        disk.cut()
        with suppress(CkptStoreError):  # a disk without power takes no leave
            store.close()
        disk.unmount()
        disk.mount()
        with ckptstore.open(disk.mountpoint / "store") as store:
            assert torch.equal(store.checkout(commit).read("model/w"), state["model"]["w"])
    finally:
        disk.unmount()
