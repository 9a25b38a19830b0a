#!/usr/bin/env bash
# torch_checkpointing 0.1.1: the default manager cannot save to a local ext4 or xfs.
#
# Guess before the run: its files are opened with O_DIRECT and it falls back where that is not
# supported (the reader says so at length), so the default configuration saves anywhere.
# Seen: the writer falls back only if the *open* is refused. ext4 and xfs allow the open and refuse a
# write whose length is no multiple of the block, which a torch.save file's end never is: every save
# ends in `OSError: [Errno 22] Invalid argument`. With LocalFileSystemStorageConfig(use_direct_io=False)
# it works.
# Needs a temporary folder on ext4 or xfs (TMPDIR=… chooses one); elsewhere it says so and exits 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
kind=$(stat --file-system --format %T "$folder")
case "$kind" in
  ext2/ext3 | xfs) ;;
  *) echo "the temporary folder is on $kind; set TMPDIR to a folder on ext4 or xfs"; exit 2 ;;
esac
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps torch_checkpointing==0.1.1
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 safetensors==0.8.0
"$folder/venv/bin/python" -W ignore - "$folder" "$kind" <<'PYTHON'
import logging
import sys

import torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

logging.disable(logging.CRITICAL)
state = {"model": {"weight": torch.ones(1000)}}
seen = {}
for is_direct in (True, False):
    storage = LocalFileSystemStorageConfig(use_direct_io=is_direct)
    manager = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage).build()
    try:
        manager.save(f"{sys.argv[1]}/direct-{is_direct}", state)
        seen[is_direct] = "saved"
    except OSError as error:
        seen[is_direct] = f"{type(error).__name__} {error.errno}"
print("default of use_direct_io:", LocalFileSystemStorageConfig().use_direct_io, "- on", sys.argv[2])
print("use_direct_io=True:", seen[True], "- use_direct_io=False:", seen[False])
sys.exit(not (LocalFileSystemStorageConfig().use_direct_io and seen == {True: "OSError 22", False: "saved"}))
PYTHON
