"""A training with Accelerate that saves within its epochs and goes on by `resume`.

A file `epochs` in the folder says how long it trains, `failing` which rank's disk is full."""

import random
from pathlib import Path
from typing import Any

import torch

from ckptstore.interop.accelerate import attach
from tests.trainers.accelerate_parts import Training, new_accelerator
from tests.trainers.trainings import Tell, digest

EVERY = 2


def train(folder: Path, tell: Tell) -> Any:
    torch.set_num_threads(1)
    accelerator = new_accelerator(folder, limit=3)
    attached = attach(accelerator, folder / "store")
    training = Training(accelerator, width=256)
    progress = training.progress
    if attached.resume():
        tell("resumed", progress.step)
    epochs = folder / "epochs"
    last = int(epochs.read_text()) if epochs.exists() else 4
    saved = None
    while progress.epoch < last:
        training.loader.set_epoch(progress.epoch)
        for batch in accelerator.skip_first_batches(training.loader, progress.batch):
            training.learn(batch)
            if progress.step % EVERY == 0:
                tell("saving", progress.step)
                accelerator.save_state()
                if saved is not None:
                    tell("saved", saved)  # the next save waits for the one before
                saved = progress.step
        progress.epoch, progress.batch = progress.epoch + 1, 0
    result = digest(*training.state(), random.random(), torch.rand(2))
    accelerator.end_training()
    return [result, accelerator.num_processes, len(progress.losses)]
