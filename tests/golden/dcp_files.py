"""The directories of `tests/golden/dcp`, made by torch 2.15.0 on Linux, Python 3.11.7, x86_64.

`by-torch-2.15` is what its own `dcp.save` writes on two ranks; torch before 2.15 cannot read its
`.metadata`, where the properties of a tensor have six fields. `exported-on-2.15` is the export of
a commit with the same tensors, which every torch from 2.6 on reads. `python -m
tests.golden.dcp_files` writes both anew, with the torch that runs it.
"""

import tempfile
import warnings
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptstore
from ckptstore.interop.dcp import store_to_dcp

PLACE = Path(__file__).parent / "dcp"
BY_TORCH, EXPORTED = PLACE / "by-torch-2.15", PLACE / "exported-on-2.15"


def wanted() -> dict[str, Any]:
    """What both directories have, all of it whole."""
    rows = torch.arange(35.0).reshape(7, 5)
    return {
        "model": {"rows": rows, "columns": rows.to(torch.bfloat16), "part": rows.double()},
        "plain": rows.t().contiguous().long(),
        "same": rows * 2,
        "epoch": 3,
        "name": "run",
    }


def save_by_torch(rank: int, folder: str, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    mesh, state = init_device_mesh("cpu", (2,)), wanted()
    model = state["model"]
    for name, placement in (("rows", Shard(0)), ("columns", Shard(1))):
        model[name] = distribute_tensor(model[name], mesh, [placement])
    state["same"] = distribute_tensor(state["same"], mesh, [Replicate()])
    part: Any = model["part"][rank * 3 : rank * 4 + 3].clone()
    part.global_shape, part.local_sizes = (7, 5), (tuple(part.shape),)
    part.global_offsets, part.local_offsets = ((rank * 3, 0),), ((0, 0),)
    model["part"] = part
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


def main() -> None:
    warnings.simplefilter("ignore")
    rmtree(PLACE, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        args = (str(BY_TORCH), f"{folder}/meeting")
        torch.multiprocessing.spawn(save_by_torch, args, nprocs=2)  # type: ignore[no-untyped-call]
        with ckptstore.open(f"{folder}/store") as store:
            store_to_dcp(store.commit(wanted()), EXPORTED)


if __name__ == "__main__":
    main()
