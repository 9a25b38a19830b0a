#!/usr/bin/env bash
# torchmetrics 1.9.0: the first batch after `load_state_dict` replaces a state that is reduced by mean.
#
# Guess before the run: a metric whose states are persistent goes on from a checkpoint as if it had never
# stopped; `compute` right after the load gives the value of before.
# Seen: `compute` does, the next batch does not. `forward` weighs the old mean with the number of updates,
# which is no part of the state_dict and begins at 0, so that what was restored counts nothing. The number
# is wrong in silence. States that are sums go on rightly. (torch 2.13.0)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 torchmetrics==1.9.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from torchmetrics import Metric


class Average(Metric):
    full_state_update = False

    def __init__(self, reduction):
        super().__init__()
        self.add_state("value", torch.tensor(0.0), dist_reduce_fx=reduction, persistent=True)

    def update(self, values):
        self.value = values.mean()

    def compute(self):
        return self.value


found = {}
for reduction in ("mean", "sum"):
    metric, resumed = Average(reduction), Average(reduction)
    for number in range(4):
        metric(torch.tensor([float(number)]))
    resumed.load_state_dict(metric.state_dict())
    at_once = metric.compute().item() == resumed.compute().item()
    metric(torch.tensor([10.0]))
    resumed(torch.tensor([10.0]))
    found[reduction] = (at_once, round(metric.compute().item(), 4), round(resumed.compute().item(), 4))
print("equal after the load; after one more batch: never stopped, resumed:", found)
sys.exit(found != {"mean": (True, 3.2, 10.0), "sum": (True, 16.0, 16.0)})
PYTHON
