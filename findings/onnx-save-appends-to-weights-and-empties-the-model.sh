#!/usr/bin/env bash
# onnx 1.23.2: saving over a model with external weights keeps the old ones, and empties the model.
#
# Guess before the run: `onnx.save(model, path, save_as_external_data=True, location="w.data")`
# replaces `path` and `w.data`, and the model in memory stays what it was.
# Seen: the weights are appended to `w.data`; after ten saves it has ten times the size. The model in
# memory has lost its weights: saved elsewhere without an error, it cannot be loaded from there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.2 numpy==2.4.6
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper


def model_of(value):
    weights = numpy_helper.from_array(np.full(4096, value, np.float32), "w")
    output = helper.make_tensor_value_info("out", 1, [4096])
    node = helper.make_node("Identity", ["w"], ["out"])
    return helper.make_model(helper.make_graph([node], "g", [], [output], [weights]))


folder = Path(sys.argv[1])
sizes = []
for step in range(3):
    model = model_of(float(step))
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="w.data")
    sizes.append((folder / "w.data").stat().st_size)
left = len(model.graph.initializer[0].raw_data)
(folder / "elsewhere").mkdir()
onnx.save(model, folder / "elsewhere" / "m.onnx")
try:
    onnx.load(folder / "elsewhere" / "m.onnx")
    said = "loaded"
except onnx.checker.ValidationError as error:
    said = f"{type(error).__name__}: {error}"
print("bytes of w.data after each save:", sizes, "- weights left in memory:", left, "-", said)
sys.exit(not (sizes == [16384, 32768, 49152] and left == 0 and said != "loaded"))
PYTHON
