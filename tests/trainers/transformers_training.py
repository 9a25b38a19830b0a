"""A tiny Llama, trained by Hugging Face's Trainer, with dropout, evaluation and a best model."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from ckptstore.interop.transformers import Attached, attach
from tests.trainers.trainings import Tell, digest

STEPS, EVERY = 12, 2
"""Steps of a training, unless its folder has a file that says how many, and steps per save."""


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up, from a start that a generator draws."""

    def __init__(self, count: int, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        starts = torch.randint(100, (count, 1), generator=draws)
        self._rows = (starts + torch.arange(12)) % 100

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[at], "labels": self._rows[at]}


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=128,
        attention_dropout=0.1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def arguments(folder: Path, **options: Any) -> dict[str, Any]:
    told = folder / "steps"
    return {
        "output_dir": str(folder / "out"),
        "max_steps": int(told.read_text()) if told.exists() else STEPS,
        "save_steps": EVERY,
        "eval_steps": EVERY,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        **options,
    }


def trainer_in(folder: Path, **options: Any) -> Trainer:
    torch.set_num_threads(1)
    set_seed(3)
    return Trainer(
        model=llama(),
        args=TrainingArguments(**arguments(folder, **options)),
        train_dataset=Numbers(100, 1),
        eval_dataset=Numbers(8, 2),
    )


class Telling(TrainerCallback):
    """Tells of saves: the Trainer evaluates just before, and a save is durable when the next one
    begins."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._last = tell, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._tell("resumed", state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._tell("saving", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._last:
            self._tell("saved", self._last)
        self._last = state.global_step


def outcome(trainer: Trainer) -> dict[str, Any]:
    """All that a training is to end with, bit by bit."""
    kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    losses = [{k: entry[k] for k in kept if k in entry} for entry in trainer.state.log_history]
    return {
        "weights": digest(trainer.model.state_dict()),
        "optimizer": digest(trainer.optimizer.state_dict()["state"]),
        "losses": [entry for entry in losses if "loss" in entry or "eval_loss" in entry],
        "best": trainer.state.best_global_step,
        "rng": digest(torch.get_rng_state()),
    }


def attached_and_trained(trainer: Trainer, folder: Path, tell: Tell) -> Any:
    trainer.add_callback(Telling(tell))
    with attach(trainer, folder / "store") as attached:
        trainer.train(resume_from_checkpoint=attached.can_resume)
        return outcome(trainer) | stored(attached)


def stored(attached: Attached) -> dict[str, Any]:
    if attached.store is None:
        return {}
    best = attached.store.checkout("best:eval_loss")
    return {"commit": best.step, "eval_loss": best.metrics["eval_loss"]}


def train(folder: Path, tell: Tell) -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return attached_and_trained(trainer_in(folder), folder, tell)
