#!/usr/bin/env bash
# torch 2.15.0: dcp.save(module.state_dict()) keeps one rank's shard of a CheckpointableTensor parameter.
#
# Guess before the run: a parameter with `global_shape` and its three companions, of which each of two
# ranks has half, is saved as one tensor of the global shape, as the same tensor outside a module is.
# Seen: `state_dict()` detaches parameters, and the attributes stay behind. DCP takes the two halves for
# replicas, keeps rank 0's, and says nothing. `get_model_state_dict` and `clone()` do the same.
# (5.4 GB are installed: this torch has no build without CUDA on the package index.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.15.0 numpy==2.4.6
cat >"$folder/save.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict


def shard(rank):
    """Two of four rows, with the numbers of the rank."""
    made = torch.nn.Parameter(torch.full((2, 3), float(rank)))
    made.global_shape, made.local_sizes = (4, 3), ((2, 3),)
    made.global_offsets, made.local_offsets = ((2 * rank, 0),), ((0, 0),)
    return made


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    module = torch.nn.Module()
    module.weight = shard(rank)
    ways = {
        "tensor": {"weight": shard(rank)},
        "state_dict": module.state_dict(),
        "get_model_state_dict": get_model_state_dict(module),
    }
    for name, state in ways.items():
        dcp.save(state, checkpoint_id=f"{folder}/{name}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, (sys.argv[1],), nprocs=2)
    found = {}
    for name in ("tensor", "state_dict", "get_model_state_dict"):
        there = dcp.FileSystemReader(f"{sys.argv[1]}/{name}")
        target = {"weight": torch.full(tuple(there.read_metadata().state_dict_metadata["weight"].size), -1.0)}
        dcp.load(target, storage_reader=there, no_dist=True)
        found[name] = target["weight"][:, 0].tolist()
        print(f"{name}: rows of {found[name]}")
    print("torch", torch.__version__.partition("+")[0])
    lost = {"tensor": [0.0, 0.0, 1.0, 1.0], "state_dict": [0.0, 0.0], "get_model_state_dict": [0.0, 0.0]}
    sys.exit(found != lost)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/save.py" "$folder"
