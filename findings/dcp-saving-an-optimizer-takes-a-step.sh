#!/usr/bin/env bash
# torch 2.13.0: get_optimizer_state_dict takes a step, if the optimizer has taken none.
#
# Guess before the run: asking for the state changes nothing. Before the first step it is empty, or made
# as the optimizer makes it: step 0, moments 0.
# Seen: `optimizer.step()` is called with gradients of zero and a rate of zero. AdamW's `step` is 1
# afterwards, so the correction of its bias is that of the step after: a training that saves before its
# first step has other weights than one that does not. Hooks on steps run once more, too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def train(saves):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(None))
    count = 0
    if saves:
        count = get_optimizer_state_dict(model, optimizer)["state"]["weight"]["step"].item()
    hooks = len(steps)
    for factor in (1, 2, 3):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(factor))).pow(2).sum().backward()
        optimizer.step()
    return model.weight.detach(), count, hooks


plain, _, _ = train(saves=False)
saved, count, hooks = train(saves=True)
apart = (plain - saved).abs().max().item()
print(f"step in the state that was asked for: {count:.0f}, hooks that ran: {hooks}")
print(f"weights after three steps differ by up to {apart:.3f}")
sys.exit((count, hooks, apart > 0.01) != (1, 1, True))
PYTHON
