#!/usr/bin/env bash
# transformers 5.23.0: a Trainer resumes from a checkpoint that has no optimizer, and begins its
# schedule anew, in silence.
#
# Guess before the run: refused. The documentation of `save_only_model` says that such a checkpoint
# cannot be resumed from.
# Seen: the training goes on at the right step and the right batch, with moments of zero and with the
# learning rate of step 1: warm-up and decay are those of the first steps. Nothing is raised or warned.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 accelerate==1.15.0
"$folder/venv/bin/python" - "$folder" 2> "$folder/log" <<'PYTHON'
import sys

import torch
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments


class Model(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(2, 1)
        self.post_init()

    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).pow(2).mean()}


def train(name, resume=None, **options):
    torch.manual_seed(0)
    data = [{"x": torch.randn(2), "labels": torch.randn(1)} for _ in range(64)]
    arguments = TrainingArguments(
        f"{sys.argv[1]}/{name}",
        max_steps=10,
        save_steps=5,
        logging_steps=1,
        learning_rate=0.1,
        per_device_train_batch_size=4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        log_level="warning",
        **options,
    )
    trainer = Trainer(Model(PretrainedConfig()), arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume and f"{sys.argv[1]}/{name}/{resume}")
    rates = {
        log["step"]: round(log["learning_rate"], 3)
        for log in trainer.state.log_history
        if "learning_rate" in log
    }
    return trainer.model.layer.weight.detach(), rates


whole, rates = train("whole")
resumed, _ = train("whole", "checkpoint-5")
train("model", save_only_model=True)
bare, bare_rates = train("model", "checkpoint-5", save_only_model=True)
print("learning rate of steps 5 and 6, unbroken:", rates[5], rates[6])
print("the same, resumed without an optimizer:", bare_rates[5], bare_rates[6])
print("weights are those of the unbroken training:", torch.equal(whole, resumed), torch.equal(whole, bare))
expected = (0.06, 0.05, 0.06, 0.1, True, False)
seen = (rates[5], rates[6], bare_rates[5], bare_rates[6], torch.equal(whole, resumed), torch.equal(whole, bare))
sys.exit(seen != expected)
PYTHON
grep -i -E "optimi|resum|schedul" "$folder/log" || echo "no warning"
