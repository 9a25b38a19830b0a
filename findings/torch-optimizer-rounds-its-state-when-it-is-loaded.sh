#!/usr/bin/env bash
# torch 2.13.0: Optimizer.load_state_dict casts floating-point state to the dtype of the parameter.
#
# Guess before the run: an optimizer that keeps float32 moments for bfloat16 parameters (as many
# memory-saving ones do) saves float32, and gets float32 back.
# Seen: it saves float32, and gets bfloat16 back, rounded, without a word. Only the key `step` is left
# alone. So the first resume changes the training, and each later one does nothing more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys
import warnings

import torch


class Precise(torch.optim.Optimizer):
    """Momentum in float32, whatever the parameters are."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                moment = self.state[each].setdefault("moment", torch.zeros(each.shape))
                moment.mul_(0.9).add_(each.grad.float())
                each.sub_(group["lr"] * moment)


def made():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    return weight, Precise([weight])


weight, optimizer = made()
for _ in range(3):
    weight.grad = torch.full((3,), 1 / 3, dtype=torch.bfloat16)
    optimizer.step()
again, resumed = made()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    resumed.load_state_dict(optimizer.state_dict())
saved, loaded = optimizer.state[weight]["moment"], resumed.state[again]["moment"]
print("saved:", saved.dtype, saved.tolist())
print("loaded:", loaded.dtype, loaded.tolist(), "- warnings:", len(said))
changed = not torch.equal(saved, loaded.float())
sys.exit(not (saved.dtype == torch.float32 and loaded.dtype == torch.bfloat16 and changed and not said))
PYTHON
