#!/usr/bin/env bash
# torch 2.13.0: load_state_dict(assign=True) makes two parameters of one that is tied.
#
# Guess before the run: the tie holds. The file has the tensor once, both names of the state dict that
# is loaded share its memory, and the module was tied before.
# Seen: each name gets a Parameter of its own, and both share their memory. `parameters()` has one more,
# each has a part of the gradient, and the optimizer steps the same numbers twice.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import io
import sys

import torch


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.tokens(x))


def moved(model):
    """How far one step of SGD moves the weights."""
    before = model.tokens.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1.0)
    model(torch.arange(5)).pow(2).sum().backward()
    for parameter in model.parameters():
        parameter.grad.zero_()
    optimizer.step()
    return (model.tokens.weight / before).mean().item()


torch.manual_seed(0)
tied, loaded = Tied(), Tied()
file = io.BytesIO()
torch.save(tied.state_dict(), file)
file.seek(0)
loaded.load_state_dict(torch.load(file), assign=True)
counts = len(list(tied.parameters())), len(list(loaded.parameters()))
shared = loaded.head.weight.data_ptr() == loaded.tokens.weight.data_ptr()
decays = round(moved(tied), 3), round(moved(loaded), 3)
print(f"parameters before and after: {counts}, memory shared: {shared}")
print(f"a step whose weight decay is 0.1 leaves of the weights: {decays}")
sys.exit((counts, shared, decays) != ((1, 2), True, (0.9, 0.81)))
PYTHON
