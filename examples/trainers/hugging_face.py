"""Hugging Face's Trainer with a store: train, be interrupted, go on from the newest checkpoint."""

import logging
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ckptstore.interop.transformers import attach

logging.getLogger("transformers").setLevel(logging.ERROR)


class Counting(torch.utils.data.Dataset):
    """Sequences of numbers that count up."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, start: int) -> dict[str, torch.Tensor]:
        row = torch.arange(start, start + 12)
        return {"input_ids": row, "labels": row}


def new_trainer(folder: Path, steps: int) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=128,
    )
    args = TrainingArguments(
        str(folder / "out"),
        max_steps=steps,
        save_steps=5,
        eval_strategy="steps",
        eval_steps=5,
        save_total_limit=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        report_to=[],
    )
    return Trainer(
        LlamaForCausalLM(config), args, train_dataset=Counting(), eval_dataset=Counting()
    )


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    for steps in (10, 20):  # the second start goes on where the first one ended
        trainer = new_trainer(folder, steps)
        with attach(trainer, folder / "checkpoints") as attached:
            trainer.train(resume_from_checkpoint=attached.can_resume)
            assert attached.store is not None
            for info in attached.store.log():
                print(f"step {info.step}: eval_loss {dict(info.metrics)['eval_loss']:.3f}")
            print("the best step:", attached.store.checkout("best:eval_loss").step)
    for place in sorted((folder / "out").iterdir()):
        print(place.name, "has", ", ".join(sorted(path.name for path in place.iterdir())))
