"""A tiny Llama, trained by TRL's SFTTrainer on tokens."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from tests.trainers.trainings import Tell
from tests.trainers.transformers_training import Numbers, arguments, attached_and_trained, llama


def rows(count: int, seed: int) -> Dataset:
    return Dataset.from_dict(
        {"input_ids": [row["input_ids"].tolist() for row in Numbers(count, seed)]}
    )


def train(folder: Path, tell: Tell) -> Any:
    torch.set_num_threads(1)
    set_seed(3)
    words = Tokenizer(WordLevel({str(number): number for number in range(128)}, unk_token="0"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    trainer = SFTTrainer(
        model=llama(),
        args=SFTConfig(**arguments(folder), max_length=12),
        train_dataset=rows(100, 1),
        eval_dataset=rows(8, 2),
        processing_class=tokenizer,
    )
    return attached_and_trained(trainer, folder, tell)
