#!/usr/bin/env bash
# torch_checkpointing 0.1.1: a parameter that the checkpoint lacks stays as it was, in silence.
#
# Guess before the run: a key of the target that the checkpoint lacks is an error, as `dcp.load` and a
# strict `load_state_dict` have it; so a renamed or an added layer is noticed at the first resume.
# Seen: it keeps the values that the script made. No error, no warning, and the result of `load` lists
# it like the others. A whole item that is missing is an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps torch_checkpointing==0.1.1
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 safetensors==0.8.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import logging
import sys
import warnings

import torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

said = []
logging.lastResort = logging.Handler(logging.WARNING)
logging.lastResort.emit = lambda record: said.append(record.getMessage())
storage = LocalFileSystemStorageConfig(use_direct_io=False)
manager = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage).build()
manager.save(f"{sys.argv[1]}/saved", {"model": {"weight": torch.ones(2)}})
said.clear()
target = {"weight": torch.zeros(2), "renamed.weight": torch.full((2,), 7.0)}
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    loaded = manager.load(f"{sys.argv[1]}/saved", {"model": target})["model"]
about = [text for text in [*said, *(str(each.message) for each in warned)] if "renamed" in text]
print("loaded:", {name: tensor.tolist() for name, tensor in loaded.items()}, "- told of it:", about)
sys.exit(not (loaded["renamed.weight"].tolist() == [7, 7] and not about))
PYTHON
