#!/usr/bin/env bash
# lightning 2.6.6, torch 2.13.0: a training resumed within an epoch skips batches of another order.
#
# Guess before the run: Lightning either begins the epoch anew, or, as it keeps the number of the
# batch and both processes call seed_everything with one seed, goes on with the samples that are
# left.
# Seen: it skips as many batches as there were, of an order that is drawn anew. With the same seed
# that order differs, too (why was not looked into).
# Of 64 samples 20 came twice and 20 never, without a warning. A StatefulDataLoader goes on exactly.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "$@"; }
pip torch==2.13.0 numpy==2.4.6
pip lightning==2.6.6 torchdata==0.11.0
cat > "$folder/train.py" <<'PYTHON'
import json
import logging
import sys
import warnings

import lightning.pytorch as pl
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
folder, kind, part = sys.argv[1:]
seen = []


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        seen.extend(int(each) for each in batch[:, 0])
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Stop(pl.Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 5:
            trainer.save_checkpoint(f"{folder}/{kind}.ckpt")
            raise KeyboardInterrupt


pl.seed_everything(1)
options = dict(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
loader = StatefulDataLoader if kind == "stateful" else torch.utils.data.DataLoader
numbers = [torch.tensor([float(i)]) for i in range(64)]
data = loader(numbers, batch_size=4, shuffle=True)
if part == "first":
    try:
        pl.Trainer(callbacks=[Stop()], **options).fit(Model(), data)
    except BaseException as error:  # Lightning ends the process after an interrupt
        assert isinstance(error, (KeyboardInterrupt, SystemExit)), error
else:
    pl.Trainer(**options).fit(Model(), data, ckpt_path=f"{folder}/{kind}.ckpt")
json.dump(seen, open(f"{folder}/{kind}-{part}.json", "w"))
PYTHON
for kind in plain stateful; do
  for part in first rest; do
    "$folder/venv/bin/python" "$folder/train.py" "$folder" $kind $part > "$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
  done
done
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from importlib.metadata import version

twice = {}
for kind in ("plain", "stateful"):
    first, rest = (json.load(open(f"{sys.argv[1]}/{kind}-{part}.json")) for part in ("first", "rest"))
    twice[kind] = len(first + rest) - len({*first, *rest})
    print(f"{kind} loader: {len(first)} samples, then {len(rest)} after the resume;", end=" ")
    print(f"{twice[kind]} came twice, {64 - len({*first, *rest})} never")
print("lightning", version("lightning"), "torch", version("torch").partition("+")[0])
sys.exit(not (twice["plain"] > 0 and twice["stateful"] == 0))
PYTHON
