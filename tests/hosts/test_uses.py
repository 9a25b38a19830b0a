"""What else a store does, on the disks of two hosts: each with what the other wrote."""

import os
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch

import ckptstore
from tests.distributed.layouts import full, layout, local, meet
from tests.distributed.pool import Pool
from tests.support.servers.postgres import PostgresServer

N = 2


def joined(rank: int, folder: Path) -> str:
    from ckptstore.plugins.hosts import join

    meet(N)
    os.environ["CKPTSTORE_CACHE"] = str(folder / f"cache-{rank}")
    return join(folder / str(rank), host=f"host-{rank}", timeout_s=60)


def state(step: int) -> dict[str, Any]:
    return {"model": {"rows": layout("rows", full() + step, N)}, "step": step}


def resumed(store: ckptstore.Store, step: int) -> None:
    target = state(0)
    found = store.resume(target)
    assert found and found.step == target["step"] == step
    assert torch.equal(local(target["model"]["rows"]), local(layout("rows", full() + step, N)))


def by_a_process(rank: int, folder: Path) -> None:
    background = ckptstore.Async(executor="process")
    with ckptstore.open(joined(rank, folder), background=background) as store:
        for step in (1, 2):
            store.commit_async(state(step), step=step).wait(60)
        resumed(store, 2)


def by_dcp(rank: int, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from ckptstore.interop.dcp import StoreReader, StoreWriter

    place = joined(rank, folder)
    dcp.save({"model": state(1)["model"]}, storage_writer=StoreWriter(place, step=1))
    found = {"model": state(0)["model"]}
    dcp.load(found, storage_reader=StoreReader(place, 1))
    assert torch.equal(local(found["model"]["rows"]), local(layout("rows", full() + 1, N)))


def with_a_database(rank: int, folder: Path, url: str, step: int) -> None:
    with ckptstore.open(joined(rank, folder), storage=ckptstore.Storage(index=url)) as store:
        if step > 1:
            resumed(store, step - 1)
        store.commit(state(step), step=step)


@pytest.mark.soak
def test_a_worker_process_commits(pool: Pool, folder: Path) -> None:
    pool.run(by_a_process, folder)


def test_dcp_saves_and_loads(pool: Pool, folder: Path) -> None:
    pool.run(by_dcp, folder)


def test_a_log_in_a_database_outlives_a_host(
    pool: Pool, folder: Path, postgres: PostgresServer
) -> None:
    url = postgres.new_url()
    for step in (1, 2, 3):
        pool.run(with_a_database, folder, url, step)
        for name in ("0", "0.hosts", "cache-0"):
            rmtree(folder / name)
