#!/usr/bin/env bash
# torch 2.13.0: `Module.load_state_dict` takes a time that is quadratic in the number of siblings.
#
# Guess before the run: loading is linear in the number of tensors, so a model of four times as many
# layers, experts or adapters takes four times as long, and copying its bytes takes most of that.
# Seen: each child goes through all keys of its parent to find its own. A ModuleList of 4,000 small
# layers takes some fifteen times as long as one of 1,000; the same 4,000 layers in two levels of lists
# load in a small part of that. So a restore of a wide model ends in a second or more of one thread.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from time import process_time

from torch import nn


def layers(count):
    return nn.ModuleList(nn.Linear(2, 2) for _ in range(count))


def seconds(model):
    state, found = model.state_dict(), []
    for _ in range(3):
        started = process_time()
        model.load_state_dict(state)
        found.append(process_time() - started)
    return min(found)


small, large = seconds(layers(1_000)), seconds(layers(4_000))
nested = seconds(nn.ModuleList(layers(63) for _ in range(64)))
print(f"1,000 siblings: {small:.3f} s; 4,000: {large:.3f} s, {large / small:.1f} times as long")
print(f"4,032 in lists of 63: {nested:.3f} s, {large / nested:.1f} times as quick")
sys.exit(not (large / small > 8 and large / nested > 4))
PYTHON
