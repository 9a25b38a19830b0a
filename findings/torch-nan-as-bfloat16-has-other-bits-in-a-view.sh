#!/usr/bin/env bash
# torch 2.13.0: equal tensors, cast to bfloat16, have other bytes where one of them is a view.
#
# Guess before the run: a cast goes element by element, so the same float32 gives the same bfloat16
# wherever it stands, and the hash of a cast tensor is that of its values.
# Seen: a NaN becomes ffff where torch casts vectors, and 7fc0 where it casts one by one: in a view
# with steps, in a scalar, and on a processor without AVX2. Torch 2.6 does the like for float16,
# within one tensor: 7e00 in each whole vector of eight, 7fff in the rest.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch

whole = torch.full((64,), float("nan"))
ways = {"whole": whole, "every second": whole[::2], "one": whole[0]}
found = {}
for name, tensor in ways.items():
    bits = tensor.bfloat16().reshape(-1).view(torch.int16)
    found[name] = sorted({f"{number & 0xFFFF:04x}" for number in bits.tolist()})
capability = torch.backends.cpu.get_cpu_capability()
print("torch", torch.__version__.partition("+")[0], "on", capability, found)
if capability == "DEFAULT":
    sys.exit("this processor has no AVX2: nothing to see")
sys.exit(found != {"whole": ["ffff"], "every second": ["7fc0"], "one": ["7fc0"]})
PYTHON
