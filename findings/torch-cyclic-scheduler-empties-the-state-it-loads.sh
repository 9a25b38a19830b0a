#!/usr/bin/env bash
# torch 2.13.0: CyclicLR takes a key out of the state that it is given to load, so that the same
# state cannot be loaded again.
#
# Guess before the run: `load_state_dict` reads its argument and leaves it as it was, as those of
# modules, optimizers and the other schedulers do.
# Seen: after the first load the dict lacks '_scale_fn_custom', and the second load raises KeyError:
# a state that is kept in memory to go back to after a loss spike works once. Each other scheduler
# that was tried takes the same dict twice.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - 2>/dev/null <<'PYTHON'
import sys

import torch
from torch.optim import lr_scheduler as schedulers


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


BUILD = {
    "CyclicLR": lambda: schedulers.CyclicLR(optimizer(), 0.01, 0.1),
    "OneCycleLR": lambda: schedulers.OneCycleLR(optimizer(), 0.1, total_steps=100),
    "CosineAnnealingWarmRestarts": lambda: schedulers.CosineAnnealingWarmRestarts(optimizer(), 9),
    "ReduceLROnPlateau": lambda: schedulers.ReduceLROnPlateau(optimizer()),
    "LambdaLR": lambda: schedulers.LambdaLR(optimizer(), lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda: schedulers.MultiplicativeLR(optimizer(), lambda epoch: 0.9),
    "SequentialLR": lambda: schedulers.SequentialLR(
        only := optimizer(), [schedulers.ConstantLR(only), schedulers.ExponentialLR(only, 0.9)], [5]
    ),
}
seen = {}
for name, build in BUILD.items():
    state = build().state_dict()
    keys = set(state)
    build().load_state_dict(state)
    lost = keys - set(state)
    try:
        build().load_state_dict(state)
        again = "loaded"
    except KeyError as error:
        again = repr(error)
    print(f"{name}: lost {sorted(lost)}, the second time {again}")
    seen[name] = (lost, again)
wanted = dict.fromkeys(BUILD, (set(), "loaded"))
wanted["CyclicLR"] = ({"_scale_fn_custom"}, "KeyError('_scale_fn_custom')")
sys.exit(seen != wanted)
PYTHON
