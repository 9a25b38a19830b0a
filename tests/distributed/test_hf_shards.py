"""Shards of DCP's own Hugging Face writer become one state when imported, in any sharding."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard

import ckptstore
from ckptstore.interop.formats import export, import_path
from tests.distributed.layouts import meet, mesh_of, placed, quietly
from tests.distributed.pool import Pool
from tests.interop.test_directories import contents
from tests.support.torch_release import OLD_TORCH

LAYOUTS = {
    "rows": (False, (Shard(0),)),
    "columns": (False, (Shard(1),)),
    "copies": (False, (Replicate(),)),
    "both": (True, (Shard(0), Shard(1))),
    "one": (True, (Shard(1), Shard(1))),
    "hybrid": (True, (Replicate(), Shard(0))),
}
"""Whether the mesh has two dimensions, and how a tensor is placed on it."""

SHAPES = ((10, 6), (2, 3), (1, 1), (64, 129), (7, 5, 3))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def wholes() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(7)
    names = [
        f"{layout}.{i}.{dtype}".replace("torch.", "")
        for layout in LAYOUTS
        for i in range(len(SHAPES))
        for dtype in DTYPES
    ]
    state = {}
    for name in names:
        _, i, dtype = name.split(".")
        state[name] = torch.randint(0, 100, SHAPES[int(i)], generator=made).to(
            getattr(torch, dtype)
        )
    return {**state, "scalar": torch.tensor(0.25), "plain": torch.arange(5)}


def write(rank: int, path: Path, files: int) -> None:
    meet(4)
    state: dict[str, Any] = wholes()
    for name, tensor in state.items():
        if layout := LAYOUTS.get(name.split(".")[0]):
            state[name] = placed(tensor, mesh_of(4, layout[0]), layout[1])
    numbers = {name: 1 + i % files for i, name in enumerate(state)} if files > 1 else None
    writer = dcp.HuggingFaceStorageWriter(str(path), numbers, save_distributed=True)
    dcp.save(state, storage_writer=writer)


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.6 has no writer of Hugging Face's shards")
@pytest.mark.parametrize("files", [1, 3])
def test_shards_of_the_real_writer_are_one_state_again(
    pool: Pool, tmp_path: Path, files: int
) -> None:
    pool.run(quietly, write, tmp_path / "hf", files)
    with ckptstore.open(tmp_path / "store") as store:
        made = import_path(store, tmp_path / "hf")
        assert made.keys() == ["model", "files", "manifest"]
        got, wanted = made.state_dict("model"), wholes()
        assert got.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
        export(made, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "hf")
