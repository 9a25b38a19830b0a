#!/usr/bin/env bash
# torch 2.13.0: Optimizer.load_state_dict pairs by position, also where both sides have names.
#
# Guess before the run: since an optimizer made of `named_parameters()` stores `param_names` in its
# state dict, and the new one has them too, state goes to the parameter of its name, or a difference
# in order is refused.
# Seen: the names are stored and not looked at. With the parameters in another order, each takes the
# moments of the other, if the shapes allow it: no error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys
import warnings

import torch


def made(reverse):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in ("first", "second")})
    named = list(model.named_parameters())
    return model, torch.optim.AdamW(named[::-1] if reverse else named)


model, optimizer = made(reverse=False)
model["second"](model["first"](torch.ones(1, 4))).sum().backward()
optimizer.step()
saved = optimizer.state_dict()
again, resumed = made(reverse=True)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    resumed.load_state_dict(saved)
moments = {name: optimizer.state[each]["exp_avg"] for name, each in model.named_parameters()}
after = {name: resumed.state[each]["exp_avg"] for name, each in again.named_parameters()}
exchanged = torch.equal(after["first.weight"], moments["second.weight"]) and torch.equal(
    after["second.weight"], moments["first.weight"]
)
print("torch", torch.__version__.partition("+")[0])
print("names in the state dict:", saved["param_groups"][0]["param_names"])
print("names of the optimizer that loads:", made(reverse=True)[1].param_groups[0]["param_names"])
print("each has the other's moments:", exchanged, "- warnings:", len(said))
sys.exit(not (exchanged and not said and not torch.equal(*moments.values())))
PYTHON
