#!/usr/bin/env bash
# numpy 2.4.6: the state of a Generator does not say how many children it has spawned.
#
# Guess before the run: `bit_generator.state` is the whole state of a Generator, as the name says;
# a generator that gets it back continues in every respect.
# Seen: numbers continue, but `spawn` counts on the seed sequence, which the state leaves out. A
# generator that was resumed by its state hands out the first children again, so workers that were
# started before and after the resume draw the same numbers. Pickle keeps the count.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import pickle
import sys

import numpy as np

running = np.random.default_rng(7)
first = running.spawn(1)[0].integers(1 << 30)
saved, pickled = running.bit_generator.state, pickle.dumps(running)

resumed = np.random.default_rng(7)
resumed.bit_generator.state = saved
unpickled = pickle.loads(pickled)
numbers = [each.integers(1 << 30) for each in (running, resumed, unpickled)]
second, again, kept = (each.spawn(1)[0].integers(1 << 30) for each in (running, resumed, unpickled))
print("numpy", np.__version__)
print("the numbers continue:", numbers)
print("first child", first, "- second child:", second)
print("next child after a resume by state:", again, "- by pickle:", kept)
sys.exit(not (len(set(numbers)) == 1 and again == first and kept == second != first))
PYTHON
