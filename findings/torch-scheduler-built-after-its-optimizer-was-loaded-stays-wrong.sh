#!/usr/bin/env bash
# torch 2.13.0: a warmup schedule that is built after the optimizer was loaded trains at a tenth of
# the rate until the end, although both states were loaded.
#
# Guess before the run: optimizer and scheduler each restore all that they saved, so the order in
# which objects are built and loaded does not matter.
# Seen: LinearLR, ConstantLR and what contains them (SequentialLR, ChainedScheduler) multiply the
# rate of the optimizer when they are built, whatever step it has come to, and their states do not
# hold the rate. Later steps multiply what they find, so the rate stays at 0.1 or 0.11 of what it
# was. Cosine, exponential, polynomial and multi-step schedules go on right in either order; one
# that is built before the optimizer is loaded is right as well.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - 2>/dev/null <<'PYTHON'
import sys
from copy import deepcopy

import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    PolynomialLR,
    SequentialLR,
)

STEPS, STOP = 60, 30
WARM = {"start_factor": 0.1, "total_iters": 10}
WRONG = {
    "LinearLR": lambda o: LinearLR(o, **WARM),
    "ConstantLR": lambda o: ConstantLR(o, 0.1, total_iters=10),
    "SequentialLR": lambda o: SequentialLR(o, [LinearLR(o, **WARM), CosineAnnealingLR(o, 90)], [10]),
    "ChainedScheduler": lambda o: ChainedScheduler([LinearLR(o, **WARM), CosineAnnealingLR(o, 100)]),
}
RIGHT = {
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 100),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.97),
    "PolynomialLR": lambda o: PolynomialLR(o, 100),
    "MultiStepLR": lambda o: MultiStepLR(o, [20, 40]),
}


def new_optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def rates(optimizer, scheduler, steps):
    for _ in range(steps):
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()


def last_rate(build, built_first):
    """The last rate of a training that was resumed, as a part of that of one that was not."""
    optimizer = new_optimizer()
    scheduler = build(optimizer)
    list(rates(optimizer, scheduler, STOP))
    saved = deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    *_, wanted = rates(optimizer, scheduler, STEPS - STOP)
    optimizer = new_optimizer()
    if built_first:
        scheduler = build(optimizer)
    optimizer.load_state_dict(saved[0])
    if not built_first:
        scheduler = build(optimizer)
    scheduler.load_state_dict(saved[1])
    *_, found = rates(optimizer, scheduler, STEPS - STOP)
    return round(found / wanted, 2)


seen = {name: (last_rate(b, True), last_rate(b, False)) for name, b in (WRONG | RIGHT).items()}
for name, (first, after) in seen.items():
    print(f"{name}: built first {first}, built after the optimizer was loaded {after}")
expected = dict.fromkeys(WRONG, (1.0, 0.1)) | dict.fromkeys(RIGHT, (1.0, 1.0))
sys.exit(seen != expected | {"SequentialLR": (1.0, 0.11)})
PYTHON
