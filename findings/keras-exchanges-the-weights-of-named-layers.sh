#!/usr/bin/env bash
# keras 3.15.1: a `.weights.h5` file knows the order of layers, and not the names they were given.
#
# Guess before the run: a layer named "query" gets the weights of the layer "query". Layers made in another
# order are found all the same, or the file is refused.
# Seen: groups in the file are numbered by class (dense, dense_1). With the same two layers listed the other
# way round each has the weights of the other, as shapes are equal. No error. (torch 2.13.0 as backend)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 keras==3.15.1 h5py==3.16.0 numpy==2.4.6
KERAS_BACKEND=torch "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys

import keras
import numpy as np

path = f"{sys.argv[1]}/model.weights.h5"


def model(*names):
    seen = keras.Input((4,))
    return keras.Model(seen, [keras.layers.Dense(4, name=name)(seen) for name in names])


def kernel(of, name):
    return of.get_layer(name).get_weights()[0]


saved, loaded = model("query", "key"), model("key", "query")
saved.save_weights(path)
loaded.load_weights(path)
same = np.array_equal(kernel(saved, "query"), kernel(loaded, "query"))
exchanged = np.array_equal(kernel(saved, "query"), kernel(loaded, "key"))
print("query in query:", same, "- query in key:", exchanged)
sys.exit(not (exchanged and not same))
PYTHON
