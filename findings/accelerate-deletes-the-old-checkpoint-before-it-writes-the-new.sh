#!/usr/bin/env bash
# accelerate 1.15.0: with `total_limit`, save_state deletes old checkpoints before it writes the new one.
#
# Guess before the run: rotation comes last, as in Hugging Face's Trainer: the old checkpoint goes
# when the new one is complete, so a save that fails leaves the one before.
# Seen: the old one is deleted first. With total_limit=1 and a full disk (or a kill) in the second
# save, no complete checkpoint is left.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check accelerate==1.15.0
"$folder/venv/bin/python" - "$folder/run" <<'PYTHON'
import errno
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration


class Full:
    """Part of the training whose state finds no room on the disk."""

    is_full = False

    def state_dict(self):
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return {}

    def load_state_dict(self, state):
        pass


run = Path(sys.argv[1])
project = ProjectConfiguration(project_dir=run, automatic_checkpoint_naming=True, total_limit=1)
accelerator = Accelerator(cpu=True, project_config=project)
accelerator.prepare(torch.nn.Linear(2, 2))
part = Full()
accelerator.register_for_checkpointing(part)
accelerator.save_state()
before = sorted(path.name for path in (run / "checkpoints").iterdir())
part.is_full = True
try:
    accelerator.save_state()
except OSError as error:
    print("second save:", error.strerror)
after = {path.name: sorted(file.name for file in path.iterdir()) for path in (run / "checkpoints").iterdir()}
print("before:", before)
print("after:", after)
sys.exit(not (before == ["checkpoint_0"] and list(after) == ["checkpoint_1"]))
PYTHON
