#!/usr/bin/env bash
# tensordict 0.15.3, torch 2.13.0: `memmap` saves float8 tensors, and `load_memmap` cannot read them.
#
# Guess before the run: what `memmap(path)` has written without an error, `load_memmap(path)` brings
# back, for every dtype.
# Seen: float8_e4m3fn and float8_e5m2 are written, and reading them is a KeyError; unsigned 16 to 64
# bits, bfloat16 and complex come back.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tensordict==0.15.3 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON'
import sys

import torch
from tensordict import TensorDict

seen = {}
for name in ("float8_e4m3fn", "float8_e5m2", "uint16", "uint64", "bfloat16", "complex64"):
    path, dtype = f"{sys.argv[1]}/{name}", getattr(torch, name)
    TensorDict({"weight": torch.ones(3).to(dtype)}).memmap(path)
    try:
        seen[name] = str(TensorDict.load_memmap(path)["weight"].dtype)
    except KeyError as error:
        seen[name] = repr(error)
    print(name, "saved, loaded as:", seen[name])
lost = [name for name, loaded in seen.items() if loaded != f"torch.{name}"]
sys.exit(lost != ["float8_e4m3fn", "float8_e5m2"])
PYTHON
