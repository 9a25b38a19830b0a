"""`dcp.async_save` over ranks, saves that overlap, and saves with cached plans."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import Shard

import ckptstore
from ckptstore.interop.dcp import StoreWriter
from tests.distributed.layouts import full, group_of, meet, mesh_of, placed, quietly
from tests.distributed.pool import Pool
from tests.interop.dcp_states import OLD_TORCH


def save_cached(rank: int, path: Path) -> None:
    for name in (
        "_cached_save_plan",
        "_cached_all_plans",
        "_cached_global_plan",
        "_cached_metadata",
        "_cached_final_save_plan",
    ):
        getattr(DefaultSavePlanner, name).clear()
    meet(4)
    for step in range(4):
        values = {"w": placed(full() + step, mesh_of(4, False), (Shard(0),)), "step": step}
        dcp.save(
            values,
            storage_writer=StoreWriter(path, step=step),
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.6 does not cache plans")
def test_cached_plans_save_under_sessions_of_their_own(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "store"
    pool.run(quietly, save_cached, path)
    with ckptstore.open(path) as store:
        for step in range(4):
            snapshot = store.checkout(step)
            assert (
                torch.equal(snapshot.read("model/w"), full() + step)
                and snapshot.read("model/step") == step
            )
        assert store.sessions() == ()
        assert not store.fsck(read_data="100%").findings


def save_async(rank: int, path: Path, kind: str, n: int) -> None:
    meet(n)
    if rank >= n:
        return
    values = {"w": placed(full(), mesh_of(n, False), (Shard(0),)), "plain": full()}
    with checkpointing(kind) as options:
        future = dcp.async_save(
            values,
            checkpoint_id=kind,
            storage_writer=StoreWriter(path),
            process_group=group_of(n),
            **options,
        )
        values["w"].to_local().zero_()
        values["plain"].zero_()
        assert future.result().storage_meta.save_id
        failing = dcp.async_save(
            {"x": object()}, storage_writer=StoreWriter(path), process_group=group_of(n), **options
        )
        with pytest.raises(BaseException, match=r"x.*register_value"):
            failing.result()


@contextmanager
def checkpointing(kind: str) -> Iterator[dict[str, Any]]:
    """Options of `async_save`; DCP's process ends with the block."""
    import torch.distributed.checkpoint._async_process_executor as executor
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    multiprocessing.current_process()._config["daemon"] = (
        False  # a daemon, as a rank of the pool is, may have no children
    )
    try:
        yield {"async_checkpointer_type": AsyncCheckpointerType(kind)}
    finally:
        if (process := executor._CHECKPOINT_PROCESS) is not None:
            process._send(executor._CheckpointSaveProcessControlOpts.TERMINATE)
            process._save_process.join()
            executor._CHECKPOINT_PROCESS = None
        multiprocessing.current_process()._config["daemon"] = True


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.6 knows no ways to save asynchronously but a thread")
@pytest.mark.parametrize(("kind", "n"), [("thread", 4), ("process", 2)])
def test_async_save_over_ranks(pool: Pool, tmp_path: Path, kind: str, n: int) -> None:
    path = tmp_path / "store"
    pool.run(quietly, save_async, path, kind, n)
    with ckptstore.open(path) as store:
        snapshot = store.checkout(kind)
        assert torch.equal(snapshot.read("model/w"), full()) and torch.equal(
            snapshot.read("model/plain"), full()
        )
        assert len(store.log()) == 1


class _FirstPlanner(DefaultSavePlanner):
    """DCP caches plans by class name."""


class _SecondPlanner(DefaultSavePlanner):
    """For the saves that overlap with those of `_FirstPlanner`."""


def save_overlapping(rank: int, path: Path, rounds: int, *, cached: bool) -> dict[int, str]:
    meet(4)
    groups = [
        dist.new_group(),
        dist.new_group(),
    ]  # with separate collectives
    mesh, writer, commits = mesh_of(4, False), StoreWriter(path), {}
    if cached:
        for name in (
            "_cached_save_plan",
            "_cached_all_plans",
            "_cached_global_plan",
            "_cached_metadata",
            "_cached_final_save_plan",
        ):
            getattr(DefaultSavePlanner, name).clear()
    for first in range(0, 2 * rounds, 2):
        saving = {}
        for step, group, planner in zip(
            (first, first + 1), groups, (_FirstPlanner, _SecondPlanner), strict=True
        ):
            values = {"w": placed(full() + step, mesh, (Shard(0),)), "step": step}
            options = {"planner": planner(enable_plan_caching=True)} if cached else {}
            saving[step] = dcp.async_save(
                values,
                checkpoint_id=str(step),
                storage_writer=writer,
                process_group=group,
                **options,
            )
            values["w"].to_local().zero_()
        for step, each in saving.items():
            commits[step] = str(each.result().storage_meta.save_id)
    for group in groups:
        dist.destroy_process_group(group)
    return commits


def _save_overlapping(rank: int, path: Path, rounds: int) -> dict[int, str]:
    return save_overlapping(rank, path, rounds, cached=False)


def _save_overlapping_cached(rank: int, path: Path, rounds: int) -> dict[int, str]:
    return save_overlapping(rank, path, rounds, cached=True)


def _check_overlapping(pool: Pool, path: Path, task: Any, rounds: int) -> None:
    ckptstore.open(path).close()
    told = pool.run(quietly, task, path, rounds)
    assert all(commits == told[0] for commits in told)
    with ckptstore.open(path) as store:
        assert {info.step: info.id for info in store.log(None)} == told[0]
        for step, commit in told[0].items():
            snapshot = store.checkout(commit)
            assert (
                torch.equal(snapshot.read("model/w"), full() + step)
                and snapshot.read("model/step") == step
            )
        assert store.sessions() == ()
        assert not store.fsck(read_data="100%").findings


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.6 does not cache plans")
@pytest.mark.parametrize("task", [_save_overlapping, _save_overlapping_cached])
def test_saves_over_ranks_overlap_through_one_writer(pool: Pool, tmp_path: Path, task: Any) -> None:
    _check_overlapping(pool, tmp_path / "store", task, 3)


@pytest.mark.soak
@pytest.mark.skipif(OLD_TORCH, reason="torch 2.6 does not cache plans")
@pytest.mark.parametrize("task", [_save_overlapping, _save_overlapping_cached])
def test_200_saves_over_ranks_overlap_through_one_writer(
    pool: Pool, tmp_path: Path, task: Any
) -> None:
    _check_overlapping(pool, tmp_path / "store", task, 100)
    print("200 saves of four ranks, two at a time through one writer: every one restored bit-equal")
