"""Two ranks save a state in Megatron-Core's terms, change it, and load it again; as files, Megatron
cannot save without CUDA."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject

import ckptstore
from ckptstore.interop.dcp import redirect
from ckptstore.interop.megatron import StoreSaveStrategy
from tests.trainers.trainings import Tell, digest


def train(folder: Path, _: Tell) -> Any:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    place = folder / "iter_0000100"
    if rank == 0:
        place.mkdir(exist_ok=True)
    dist.barrier()
    saved = _state(rank, ranks, seed=3)
    with ckptstore.open(folder / "store") as store:
        if not os.listdir(place):
            dist_checkpointing.save(
                _sharded(saved, rank, ranks),
                place,
                StoreSaveStrategy(store),
                content_metadata={"v": 1},
            )
        with redirect(store):
            found = dist_checkpointing.load(
                _sharded(_state(rank, ranks, seed=4), rank, ranks), place
            )
            content = dist_checkpointing.load_content_metadata(place)
            names = sorted(dist_checkpointing.load_tensors_metadata(place))
        step = store.checkout().step
    whole = [torch.zeros_like(found["rows"]) for _ in range(ranks)]
    dist.all_gather(whole, found["rows"])
    dist.destroy_process_group()
    return {
        "same": digest(found["rows"], found["same"]) == digest(saved["rows"], saved["same"]),
        "rows": digest(torch.cat(whole)),
        "iteration": found["iteration"],
        "rng": found.get("rng"),
        "content": content,
        "names": names,
        "step": step,
        "files": sorted(os.listdir(place)),
    }


def _state(rank: int, ranks: int, seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(8, 3, generator=draw)
    return {
        "rows": rows.chunk(ranks)[rank].clone(),
        "same": torch.randn(5, generator=draw),
        "iteration": 100 * seed,
        "rng": {"rank": rank, "seed": seed},
    }


def _sharded(state: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """The rows are divided among the ranks, `same` is on all of them, the iteration is common. Only
    two ranks have objects of their own, which Megatron does not divide anew."""
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", state["rows"], (0, rank, ranks)),
        "same": ShardedTensor.from_rank_offsets("same", state["same"], replica_id=rank),
        "iteration": state["iteration"],
    } | ({"rng": ShardedObject("rng", state["rng"], (ranks,), (rank,))} if ranks == 2 else {})
