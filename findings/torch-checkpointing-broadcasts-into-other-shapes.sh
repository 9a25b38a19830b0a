#!/usr/bin/env bash
# torch_checkpointing 0.1.1: a tensor of another shape is broadcast into the target, in silence.
#
# Guess before the run: a load refuses a tensor whose shape is not the target's, as `load_state_dict`
# and `dcp.load` of the same torch do.
# Seen: what `copy_` can broadcast is loaded. A bias of [3] fills each row of a weight of [2, 3], and a
# scalar fills a vector. Only shapes that cannot be broadcast are refused.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps torch_checkpointing==0.1.1
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 safetensors==0.8.0
"$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON' 2>/dev/null
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

storage = LocalFileSystemStorageConfig(use_direct_io=False)
manager = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage).build()
saved = {"row": torch.arange(3.0), "number": torch.tensor(5.0)}
manager.save(f"{sys.argv[1]}/saved", {"model": saved})
target = {"row": torch.zeros(2, 3), "number": torch.zeros(4)}
manager.load(f"{sys.argv[1]}/saved", {"model": target})
print("torch_checkpointing:", {name: tensor.tolist() for name, tensor in target.items()})
dcp.save(saved, checkpoint_id=f"{sys.argv[1]}/dcp")
try:
    dcp.load({"row": torch.zeros(2, 3), "number": torch.zeros(4)}, checkpoint_id=f"{sys.argv[1]}/dcp")
    refused = False
except CheckpointException:
    refused = True
print("dcp.load refuses the same:", refused)
filled = target["row"].tolist() == [[0, 1, 2], [0, 1, 2]] and target["number"].tolist() == [5] * 4
sys.exit(not (filled and refused))
PYTHON
