"""A LoRA adapter on a tiny Llama, trained by Hugging Face's Trainer."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments, set_seed

from tests.trainers.trainings import Tell
from tests.trainers.transformers_training import Numbers, arguments, attached_and_trained, llama


def train(folder: Path, tell: Tell) -> Any:
    torch.set_num_threads(1)
    set_seed(3)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    trainer = Trainer(
        model=get_peft_model(llama(), lora),
        args=TrainingArguments(**arguments(folder)),
        train_dataset=Numbers(100, 1),
        eval_dataset=Numbers(8, 2),
    )
    return attached_and_trained(trainer, folder, tell)
