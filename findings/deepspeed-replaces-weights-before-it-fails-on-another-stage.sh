#!/usr/bin/env bash
# DeepSpeed 0.19.8: a checkpoint of another ZeRO stage fails after the weights were replaced.
#
# Guess before the run: an engine of stage 1 either loads what stage 0 saved, or refuses it before it
# changes anything; so `except FileNotFoundError: pass`, for a first start, begins from the weights that
# the script made.
# Seen: FileNotFoundError names a file that no save ever wrote. By then the module has the committed
# weights and the engine the committed number of steps, while the optimizer has no moments.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "$@"; }
pip torch==2.13.0 setuptools wheel numpy==2.4.6
DS_BUILD_OPS=0 pip --no-build-isolation deepspeed==0.19.8
export DS_ACCELERATOR=cpu MASTER_ADDR=127.0.0.1 MASTER_PORT=29541 RANK=0 WORLD_SIZE=1 LOCAL_RANK=0
"$folder/venv/bin/python" - "$folder" <<'PYTHON' 2>"$folder/log" || { tail -n 20 "$folder/log"; exit 1; }
import logging
import sys

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
logging.disable(logging.WARNING)


def new_engine(stage, seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


deepspeed.init_distributed(dist_backend="gloo", verbose=False)
saved = new_engine(0, seed=1)
for _ in range(3):
    saved.backward(saved(torch.ones(4, 8)).sum())
    saved.step()
saved.save_checkpoint(sys.argv[1], tag="three")
other, error = new_engine(1, seed=2), None
try:
    other.load_checkpoint(sys.argv[1], tag="three")
except FileNotFoundError as raised:
    error = raised
replaced = torch.equal(other.module.weight, saved.module.weight)
print(f"{type(error).__name__}; weights replaced: {replaced}; steps: {other.global_steps}")
sys.exit(not (error and replaced and other.global_steps == 3))
PYTHON
