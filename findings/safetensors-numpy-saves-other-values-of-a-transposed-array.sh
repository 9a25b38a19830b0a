#!/usr/bin/env bash
# safetensors 0.8.0: `safetensors.numpy.save` writes the memory of an array, and not its values.
#
# Guess before the run: an array that is not contiguous is saved by its values, row by row, or is
# refused, as safetensors.torch refuses such a tensor.
# Seen: its first bytes in memory are written under its shape. A transposed or a sliced array comes
# back with other values. No error, no warning; `save_file` does the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys

import numpy as np
from safetensors.numpy import load, load_file, save, save_file

turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
sliced = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
wrong = []
for name, array in {"turned": turned, "sliced": sliced}.items():
    save_file({name: array}, f"{sys.argv[1]}/{name}")
    for found in (load(save({name: array}))[name], load_file(f"{sys.argv[1]}/{name}")[name]):
        print(name, "saved", array.tolist(), "loaded", found.tolist())
        wrong.append(found.shape == array.shape and not np.array_equal(found, array))
sys.exit(not all(wrong))
PYTHON
