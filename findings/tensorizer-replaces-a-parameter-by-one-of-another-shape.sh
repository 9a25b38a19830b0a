#!/usr/bin/env bash
# tensorizer 2.12.1: `load_into_module` gives a module parameters of any shape and dtype.
#
# Guess before the run: a shape that is not the module's raises, as `load_state_dict` does, and
# values are cast to the module's dtype.
# Seen: the parameter is replaced by what the file has. A Linear(5, 3) has a weight of (3, 4)
# afterwards, a module in float64 parameters in float32. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 tensorizer==2.12.1 \
  numpy==2.4.6
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
import warnings

import torch
from tensorizer import TensorDeserializer, TensorSerializer

path = f"{sys.argv[1]}/m.tensors"
serializer = TensorSerializer(path)
serializer.write_module(torch.nn.Linear(4, 3))
serializer.close()
wider, double = torch.nn.Linear(5, 3), torch.nn.Linear(4, 3).double()
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    for module in (wider, double):
        TensorDeserializer(path, device="cpu").load_into_module(module)
told = [str(each.message) for each in warned if "shape" in str(each.message)]
print("Linear(5, 3):", tuple(wider.weight.shape), "- float64:", double.weight.dtype, "- told:", told)
sys.exit(not (wider.weight.shape == (3, 4) and double.weight.dtype == torch.float32 and not told))
PYTHON
