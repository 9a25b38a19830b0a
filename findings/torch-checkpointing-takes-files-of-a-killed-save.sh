#!/usr/bin/env bash
# torch_checkpointing 0.1.1: what a killed save left becomes part of the next checkpoint of that name.
#
# Guess before the run: a save writes to a temporary directory and renames it, so what a killed save
# left there is removed, or at least never part of a checkpoint.
# Seen: the directory has a fixed name, `tmp_` and the checkpoint's, and is not emptied. A rerun with
# other items (or fewer ranks) renames its files together with the old ones, and a load returns an item
# that this run never saved, in silence.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps torch_checkpointing==0.1.1
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 safetensors==0.8.0
cat >"$folder/save.py" <<'PYTHON'
import os
import signal
import sys

import torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


def die(args):
    os.kill(os.getpid(), signal.SIGKILL)


place, phase = sys.argv[1:]
storage = LocalFileSystemStorageConfig(use_direct_io=False)
config = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage)
if phase == "killed":
    config.pre_finalize_callback = die
    state = {"model": {"weight": torch.full((2,), 1.0)}, "ema": {"weight": torch.full((2,), 1.0)}}
    config.build().save(place, state)
else:
    manager = config.build()
    manager.save(place, {"model": {"weight": torch.full((2,), 2.0)}})
    target = {"model": {"weight": torch.zeros(2)}, "ema": {"weight": torch.zeros(2)}}
    manager.load(place, target)
    print({item: value["weight"].tolist() for item, value in target.items()}, sorted(os.listdir(place)))
    sys.exit(not (target["model"]["weight"][0] == 2 and target["ema"]["weight"][0] == 1))
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/save.py" "$folder/step_1" killed 2>/dev/null || true
"$folder/venv/bin/python" -W ignore "$folder/save.py" "$folder/step_1" again 2>/dev/null
