#!/usr/bin/env bash
# pytorch_optimizer 4.1.0: checkpoints of five of its optimizers cannot be loaded by `torch.load` as it is.
#
# Guess before the run: the state of an optimizer is tensors and numbers, so that `torch.load` with its
# default, weights_only=True, reads any.
# Seen: AdaShift keeps a deque, Conda and ScalableShampoo objects of the library, SCION and SCIONLight
# members of an enum. What was saved without a word is refused when the training resumes. (torch 2.13.0)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 pytorch_optimizer==4.1.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import io
import pickle
import sys

import pytorch_optimizer
import torch


def refused(name):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = getattr(pytorch_optimizer, name)(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    try:
        torch.load(file)
    except pickle.UnpicklingError as error:
        return str(error).split("GLOBAL ", 1)[1].split(" was not", 1)[0]
    return None


found = {name: refused(name) for name in ("AdaShift", "Conda", "SCION", "SCIONLight", "ScalableShampoo", "Lion")}
for name, reason in found.items():
    print(name, "-", f"refused for {reason}" if reason else "loads")
sys.exit({name for name, reason in found.items() if reason is None} != {"Lion"})
PYTHON
