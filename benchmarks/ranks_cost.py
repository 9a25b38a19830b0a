"""The cases of what many ranks cost beside moving bytes: a commit's fixed cost, bytes written,
bytes read by others.

Ranks are processes of this host and share its processors.
"""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ckptstore
from benchmarks import states
from benchmarks.context import Context
from benchmarks.measure import Entrant, Result, Series, alternate
from benchmarks.ranks import SIZE, close_store, commit, cpu_of, open_store, pool_of, prepare
from benchmarks.targets import ABOVE_ONE
from ckptstore.core.ids import parse_pack_id

_here: dict[str, Any] = {}
"""This rank's state and store, in its own process."""


def open_small(rank: int, folder: Path) -> None:
    _here["state"] = {
        "model": {path: tensor.clone() for path, tensor in states.small().tensors.items()}
    }
    _here["store"] = ckptstore.open(folder)


def commit_here(rank: int) -> None:
    _here["store"].commit(_here["state"])


def close_here(rank: int) -> None:
    _here.pop("store").close()


def fixed(context: Context) -> Result:
    """Eight tensors of 1 KiB that stay as they are, equal on all ranks, committed again and again
    to one store; against one process."""
    state = states.small()
    with pool_of(SIZE) as pool, closing(ckptstore.open(context.folder())) as alone:
        pool.run(open_small, context.folder())
        entrants = [
            Entrant(
                f"{SIZE} ranks", partial(pool.run, commit_here), cpu_seconds=partial(cpu_of, pool)
            ),
            Entrant("one rank", lambda: alone.commit(state.app)),
        ]
        series = alternate("ranks-fixed", entrants, 10 * context.rounds)
        pool.run(close_here)
    pairs = zip(series[f"{SIZE} ranks"].values, series["one rank"].values, strict=True)
    series[ABOVE_ONE] = Series([many - one for many, one in pairs])
    return Result(
        "ranks-fixed",
        f"commit of 8 KiB that have not changed, {SIZE} ranks of this host",
        "s",
        0,
        series,
    )


def written(context: Context) -> Result:
    """A state under DistributedDataParallel, committed once: the bytes of packs, in all and by
    rank."""
    folder = context.folder()
    with pool_of(SIZE) as pool:
        nbytes = pool.run(prepare, context.scale)[0]
        for task, *args in ((open_store, folder), (commit,), (close_store,)):
            pool.run(task, *args)
    by_rank = [0] * SIZE
    for pack in (folder / "packs").glob("*/*"):
        by_rank[int(parse_pack_id(pack.name.partition(".")[0]).split("-")[1])] += (
            pack.stat().st_size
        )
    least, most = min(by_rank), max(by_rank)
    found = {
        "one copy": nbytes,
        "ckptstore": sum(by_rank),
        "a quarter": nbytes / SIZE,
        "most of a rank": most,
        "least of a rank": least,
    }
    series = {name: _once(value) for name, value in found.items()}
    return Result(
        "ranks-written",
        f"bytes written by {SIZE} ranks that hold one state under DDP",
        "B",
        0,
        series,
    )


def _once(value: float) -> Series:
    return Series([float(value)], [0.0])


def resharded(context: Context) -> Result:
    """A state that 4 ranks held by rows, restored by 3."""
    folder = context.folder()
    with pool_of(SIZE) as pool:
        pool.run(commit_rows, folder, context.scale)
        costs = pool.run(restore_rows, folder, context.scale, SIZE - 1)
    totals = {"needed": sum(needed for needed, _ in costs), "read": sum(read for _, read in costs)}
    series = {name: _once(value) for name, value in totals.items()}
    return Result(
        "ranks-resharded",
        f"bytes read by {SIZE - 1} ranks of what {SIZE} committed, all of it divided by rows",
        "B",
        0,
        series,
    )


def _rows(mesh: DeviceMesh, rank: int, scale: float) -> dict[str, Any]:
    """This rank's part of a GPT's parameters, the same whole on any number of ranks."""
    state = {}
    for number, (name, shape) in enumerate(states.gpt_shapes(scale).items()):
        torch.manual_seed(number)
        whole = torch.rand(shape)
        parts = whole.chunk(mesh.size())
        local = parts[rank] if rank < len(parts) else whole[:0]
        state[name] = DTensor.from_local(
            local.clone(),
            mesh,
            (Shard(0),),
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    return {"model": state}


def commit_rows(rank: int, folder: Path, scale: float) -> None:
    with ckptstore.open(folder) as store:
        store.commit(_rows(DeviceMesh("cpu", list(range(SIZE))), rank, scale), step=0)


def restore_rows(rank: int, folder: Path, scale: float, ranks: int) -> tuple[int, int]:
    """Restore on the first `ranks` ranks, into wiped memory that is compared; the bytes that this
    rank needed and read."""
    group, mesh = dist.new_group(list(range(ranks))), DeviceMesh("cpu", list(range(ranks)))
    if rank >= ranks:
        return 0, 0
    wanted, state = _rows(mesh, rank, scale), _rows(mesh, rank, scale)
    for tensor in state["model"].values():
        tensor.to_local().zero_()
    with ckptstore.open(folder) as store:
        report = store.checkout(0).restore(state, ranks=ckptstore.Ranks(process_group=group))
    wrong = [
        name
        for name, tensor in state["model"].items()
        if not torch.equal(wanted["model"][name].to_local(), tensor.to_local())
    ]
    if wrong:
        raise RuntimeError(
            f"{len(wrong)} tensors came back wrong on rank {rank}, the first of them {wrong[0]}"
        )
    return report.needed_bytes, report.read_bytes
