"""A tiny Llama, trained by Hugging Face's Trainer with DeepSpeed or FSDP under it. The folder has a
file with the options of `TrainingArguments` for it, and one with the step to go on from."""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers import Trainer

from ckptstore.interop.transformers import attach
from tests.trainers.trainings import Tell, digest
from tests.trainers.transformers_training import Telling, trainer_in

DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def train(folder: Path, tell: Tell) -> Any:
    options = json.loads((folder / "options").read_text())
    if "fsdp" in options:
        allow_fsdp_on_cpus()
    if "deepspeed" in options:
        from tests.trainers import deepspeed_parts

        deepspeed_parts.deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        options["deepspeed"] |= DEEPSPEED
    trainer = trainer_in(folder, load_best_model_at_end=False, **options)
    trainer.add_callback(Telling(tell))
    with attach(trainer, folder / "store"):
        step = folder / "resume from"
        trainer.train(resume_from_checkpoint=int(step.read_text()) if step.exists() else None)
        return outcome(trainer)


def allow_fsdp_on_cpus() -> None:
    """Accelerate starts FSDP on accelerators only; FSDP itself runs on CPUs as well."""
    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = init


def outcome(trainer: Trainer) -> dict[str, Any]:
    """This rank's part of the weights and the losses of the run, bit by bit."""
    kept = ("step", "loss", "eval_loss")
    parameters = [parameter.detach() for parameter in trainer.model.parameters()]
    if trainer.is_fsdp_enabled:
        parameters = [parameter.to_local() for parameter in parameters]
    history = trainer.state.log_history
    return {
        "weights": digest(*parameters),
        "losses": [{key: entry[key] for key in kept if key in entry} for entry in history],
        "rng": digest(torch.get_rng_state()),
    }
