#!/usr/bin/env bash
# torch 2.13.0: a cast to float8_e4m3fn makes a finite number of infinity.
#
# Guess before the run: float8_e4m3fn has no infinity, so infinity and what is too large become NaN,
# and a check for NaN and infinity after the cast finds an overflow.
# Seen: the cast saturates: infinity, and 1e6, become 448, its largest number, while NaN stays NaN.
# float8_e5m2 keeps infinity and makes 1e6 infinite; float8_e8m0fnu loses the sign of -1. A check of
# the result alone cannot see what was lost.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import math
import sys

import torch

values = torch.tensor([math.inf, 1e6, math.nan, -1.0])
kinds = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float16")
found = {name: values.to(getattr(torch, name)).float().tolist() for name in kinds}
print("torch", torch.__version__.partition("+")[0])
for name, cast in found.items():
    print(f"{values.tolist()} as {name}: {cast}")
small, wide, scale = (found[name] for name in kinds[:3])
saturates = small[:2] == [448.0, 448.0] and math.isnan(small[2])
sys.exit(not (saturates and wide[:2] == [math.inf, math.inf] and scale[3] == 1.0))
PYTHON
