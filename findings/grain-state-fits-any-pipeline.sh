#!/usr/bin/env bash
# grain 0.2.18: the state of a data pipeline is one number, and any other pipeline takes it.
#
# Guess before the run: the state knows seed, length and batch size, or a digest of them, and a pipeline
# that differs refuses it, since it would go on with other samples.
# Seen: the state is {'next_index': 5}. Pipelines of another seed, another data set, another batch size,
# or without the shuffle take it in silence; with twice the batch size they pass over samples.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check grain==0.2.18 numpy==2.4.6
"$folder/venv/bin/python" - 2>/dev/null <<'PYTHON'
import sys

import grain


def pipeline(seed=1, length=100, batch=4, shuffled=True):
    data = grain.MapDataset.range(length)
    if shuffled:
        data = data.shuffle(seed=seed)
    return iter(data.repeat().batch(batch).to_iter_dataset())


first = pipeline()
for _ in range(5):
    next(first)
state = first.get_state()
following = next(first).tolist()
print("state", state, "then", following)
others = {"seed": {"seed": 2}, "length": {"length": 50}, "batch": {"batch": 8}, "order": {"shuffled": False}}
differ = []
for name, changed in others.items():
    other = pipeline(**changed)
    other.set_state(state)
    samples = next(other).tolist()
    print("another", name, "goes on with", samples)
    differ.append(samples != following)
sys.exit(not (state == {"next_index": 5} and all(differ)))
PYTHON
