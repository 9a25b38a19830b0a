#!/usr/bin/env bash
# flax 0.12.8: `flax.serialization.from_bytes` puts an array of any shape into the target.
#
# Guess before the run: the target says the structure, so an array of another shape raises ValueError,
# as a key that is missing does.
# Seen: shape and dtype of the target are not looked at; the parameters have those of the file. A table
# of another vocabulary is noticed by whatever uses it, or by nobody, since JAX clamps indexes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check flax==0.12.8 jax==0.10.2 \
  jaxlib==0.10.2 msgpack==1.2.4 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import sys
import warnings

import jax.numpy as jnp
import numpy as np
from flax import serialization

data = serialization.to_bytes({"embedding": np.ones((3, 2), np.float16)})
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    found = serialization.from_bytes({"embedding": jnp.zeros((5, 2), jnp.float32)}, data)
table = jnp.asarray(found["embedding"])
print("target (5, 2) float32, got", table.shape, table.dtype, "- row 4:", table[4], "- warned:", warned)
sys.exit(not (table.shape == (3, 2) and table.dtype == jnp.float16 and not warned))
PYTHON
