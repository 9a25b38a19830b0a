#!/usr/bin/env bash
# Ray Train 2.60.0: a checkpoint that is reported without the metric by which checkpoints are kept
# counts as better than all that have one.
#
# Guess before the run: with `num_to_keep=1` and `checkpoint_score_attribute="loss"`, the checkpoint of
# the lowest loss stays, whatever is reported without a loss (a last one at the end of training, one
# before a preemption): such a one has no score, so it is the worst, or is refused.
# Seen: it is appended behind the best. The checkpoint of loss 0.1 is deleted, and the one without a
# loss is all that is left. A loss of NaN, in contrast, counts as the worst.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'ray[train]==2.60.0' numpy==2.4.6
RAY_USAGE_STATS_ENABLED=0 "$folder/venv/bin/python" - "$folder" <<'PYTHON' 2>"$folder/log" || { tail -n 20 "$folder/log"; exit 1; }
import sys
import tempfile
from pathlib import Path

import ray
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(reports):
    for metrics in reports:
        with tempfile.TemporaryDirectory() as new:
            Path(new, "metrics").write_text(str(metrics))
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(new))


def kept(name, last):
    config = CheckpointConfig(
        num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min"
    )
    trainer = TorchTrainer(
        train,
        train_loop_config=[{"loss": 0.1}, {"loss": 0.9}, last, {"loss": 0.5}],
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name=name, storage_path=sys.argv[1], checkpoint_config=config),
    )
    trainer.fit()
    found = sorted(each.read_text() for each in Path(sys.argv[1], name).glob("checkpoint_*/metrics"))
    print(f"a report of {last} among losses of 0.1, 0.9 and 0.5 leaves on disk:", found)
    return found


ray.init(num_cpus=2, logging_level="ERROR", log_to_driver=False)
without, nan = kept("without", {"step": 3}), kept("nan", {"loss": float("nan")})
sys.exit(not (str({"loss": 0.1}) not in without and str({"loss": 0.1}) in nan))
PYTHON
