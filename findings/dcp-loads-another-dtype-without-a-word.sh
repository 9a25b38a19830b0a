#!/usr/bin/env bash
# torch 2.13.0: dcp.load casts to the dtype of the target without a word, also where that is lossy.
#
# Guess before the run: a checkpoint of float32 loaded into a bfloat16 tensor, or of float into an
# integer, is refused or warned of, as a wrong shape is.
# Seen: the shape is checked; the dtype is not. 1.2345678 becomes 1.234375, and 2.75 becomes 2 in an
# int64 tensor, without an error and without a warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
FOLDER="$folder/checkpoint" "$folder/venv/bin/python" - <<'PYTHON'
import logging
import os
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp

logging.disable(logging.CRITICAL)  # its logger prints what is raised
place = os.environ["FOLDER"]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    dcp.save({"a": torch.tensor([1.2345678]), "b": torch.tensor([2.75])}, checkpoint_id=place, no_dist=True)
target = {"a": torch.zeros(1, dtype=torch.bfloat16), "b": torch.zeros(1, dtype=torch.int64)}
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    dcp.load(target, checkpoint_id=place, no_dist=True)
about = [str(each.message) for each in said if "dtype" in str(each.message).lower()]
try:
    dcp.load({"a": torch.zeros(2)}, checkpoint_id=place, no_dist=True)
    shape = "taken"
except BaseException as error:  # its exception is none: see dcp-errors-are-no-exceptions.sh
    shape = f"refused ({type(error).__name__})"
print("torch", torch.__version__.partition("+")[0])
print("float32 1.2345678 into bfloat16:", target["a"].item(), "- 2.75 into int64:", target["b"].item())
print("warnings about a dtype:", about, "- another shape is", shape)
sys.exit(not (target["a"].item() == 1.234375 and target["b"].item() == 2 and not about and "refused" in shape))
PYTHON
