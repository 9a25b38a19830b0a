"""One rank of `test_torch_checkpointing_manager`: RANK WORLD RENDEZVOUS STORE."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig

from ckptstore.plugins.torch_checkpointing import CheckpointManager, StoreStorageConfig

WHOLE = torch.arange(6000.0).reshape(60, 100)


def main(rank: int, world: int, rendezvous: str, place: str) -> None:
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))

    def state(factor: float) -> dict[str, object]:
        return {
            "model": {"w": distribute_tensor(WHOLE * factor, mesh, [Shard(0)])},
            "rng": {"own": torch.full((4,), float(rank) * factor)},
            "step": 3,
        }

    for name, save in (
        ("sync", SyncCheckpointSaverConfig()),
        ("async", AsyncCheckpointSaverConfig()),
    ):
        config = CheckpointManager.Config(save=save, storage_config=StoreStorageConfig(place))
        manager = config.build()
        future = manager.save(f"/ck/{name}_1", state(1.0))
        if future is not None:
            future.result()
        try:
            manager.save(f"/ck/{name}_1", state(2.0))
        except FileExistsError:
            pass
        else:
            raise AssertionError("a checkpoint was replaced")
        into = state(0.0)
        manager.load(f"/ck/{name}_1", into)
        assert isinstance(into["model"], dict)
        loaded = into["model"]["w"]
        assert isinstance(loaded, DTensor)
        assert torch.equal(loaded.full_tensor(), WHOLE)
        assert isinstance(into["rng"], dict)
        assert torch.equal(into["rng"]["own"], torch.full((4,), float(rank)))
        columns = {"w": distribute_tensor(torch.zeros(60, 100), mesh, [Shard(1)])}
        if rank == 1:  # no rank waits for another
            alone = {"model": {"w": torch.zeros(60, 100)}}
            manager.load(f"/ck/{name}_1", alone)
            assert torch.equal(alone["model"]["w"], WHOLE)
        manager.load(f"/ck/{name}_1", {"model": columns})
        assert torch.equal(columns["w"].redistribute(mesh, [Replicate()]).to_local(), WHOLE)
        manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
