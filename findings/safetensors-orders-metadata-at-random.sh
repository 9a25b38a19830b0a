#!/usr/bin/env bash
# safetensors 0.8.0: equal tensors with equal metadata make different files.
#
# Guess before the run: the bytes depend on tensors and metadata alone; the format asks for tensors in a
# fixed order, and Python's dicts keep theirs.
# Seen: entries of `metadata` are written in an order that changes from call to call in one process, so
# twenty saves make up to twenty files. With one entry, or none, all are equal. Whoever compares or
# deduplicates files by a hash finds a new file in each.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
from safetensors.numpy import save

tensors = {"weight": np.zeros(3, np.float32)}
metadata = {f"key {number}": str(number) for number in range(10)}
several = {save(tensors, metadata=metadata) for _ in range(20)}
one = {save(tensors, metadata={"format": "np"}) for _ in range(20)}
print("20 saves with ten entries:", len(several), "files; with one entry:", len(one))
sys.exit(not (len(several) > 1 and len(one) == 1))
PYTHON
