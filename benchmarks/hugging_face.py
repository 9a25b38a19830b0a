"""`python -m benchmarks.hugging_face` compares ten checkpoints of Hugging Face's Trainer with and
without a store: bytes on disk, and seconds that each save holds training.

Two trainings of a Llama of 5 million parameters: LoRA adapters on a frozen base, and all weights
but the embeddings. The store's bytes include the directories beside it.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from benchmarks.growth import allocated_bytes
from ckptstore.core.text import bytes_text
from ckptstore.interop.transformers import attach

SAVES, STEPS_PER_SAVE = 10, 4


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of numbers that count up."""

    def __len__(self) -> int:
        return SAVES * STEPS_PER_SAVE

    def __getitem__(self, start: int) -> dict[str, torch.Tensor]:
        row = torch.arange(start, start + 16)
        return {"input_ids": row, "labels": row}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=16_000,
    )
    model = LlamaForCausalLM(config)
    if kind == "adapters":
        return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
        embedding.requires_grad_(False)
    return model


def trainer_of(kind: str, folder: Path) -> Trainer:
    args = TrainingArguments(
        str(folder / "out"),
        max_steps=SAVES * STEPS_PER_SAVE,
        save_steps=STEPS_PER_SAVE,
        per_device_train_batch_size=1,
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        report_to=[],
    )
    return Trainer(model_of(kind), args, train_dataset=Counting())


def timed(trainer: Trainer) -> list[float]:
    """The seconds of each save, once the trainer has trained."""
    held: list[float] = []
    save = trainer._save_checkpoint

    def saving(*given: Any) -> None:
        began = time.perf_counter()
        save(*given)
        held.append(time.perf_counter() - began)

    trainer._save_checkpoint = saving
    return held


def measure(kind: str, folder: Path) -> None:
    plain = trainer_of(kind, folder / "plain")
    held = timed(plain)
    plain.train()
    own = allocated_bytes(folder / "plain")
    print(f"{kind}: the Trainer's own: {bytes_text(own)}, held {statistics.median(held):.3f} s")
    for whole in (1, 0):
        place = folder / f"whole-{whole}"
        trainer = trainer_of(kind, place)
        with attach(trainer, place / "store", whole=whole):
            held = timed(trainer)
            trainer.train()
        ours = allocated_bytes(place)
        print(
            f"{kind}: attached, whole={whole}: {bytes_text(ours)} ({ours / own:.2f}), held "
            f"{statistics.median(held):.3f} s"
        )


if __name__ == "__main__":
    for name in ("adapters", "frozen embeddings"):
        with tempfile.TemporaryDirectory() as scratch:
            measure(name, Path(scratch))
