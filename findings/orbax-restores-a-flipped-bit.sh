#!/usr/bin/env bash
# orbax-checkpoint 0.12.8, tensorstore 0.1.86: a flipped bit of a weight is restored in silence.
#
# Guess before the run: it is noticed. Manifest and nodes of OCDBT end in a CRC-32C, and what Orbax
# writes is compressed by zstd, which can have a checksum too.
# Seen: the values have neither. One bit that flips in a data file is one other weight, without an
# error or a warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check orbax-checkpoint==0.12.8 \
  tensorstore==0.1.86 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

weights = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
place = Path(sys.argv[1], "saved")
saver = ocp.StandardCheckpointer()
saver.save(place, {"w": jnp.asarray(weights)})
saver.wait_until_finished()
data = max(place.rglob("d/*"), key=lambda path: path.stat().st_size)
found = bytearray(data.read_bytes())
found[len(found) // 2] ^= 1
data.write_bytes(found)
restored = saver.restore(place, {"w": jax.ShapeDtypeStruct((50_000,), jnp.float32)})["w"]
differing = int((np.asarray(restored) != weights).sum())
print("restored without an error; weights that differ:", differing)
sys.exit(not differing)
PYTHON
