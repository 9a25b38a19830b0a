"""A training with Accelerate that can be stopped anywhere and started again: run it twice on the
same folder and it goes on where it was. `torchrun --nproc-per-node 2` runs it on two ranks."""

import sys
import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

from ckptstore.interop.accelerate import attach

EPOCHS = 4


class Progress:
    """Where the training is."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def train(folder: str, epochs: int = EPOCHS) -> dict[str, Any]:
    """Train to the end of so many epochs, from wherever the store stands; the weights."""
    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            folder, automatic_checkpoint_naming=True, total_limit=2
        ),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    attached = attach(accelerator, f"{folder}/store")
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    x = torch.randn(64, 8)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), data
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    attached.resume()
    accelerator.print(f"starting in epoch {progress.epoch}, at batch {progress.batch}")

    while progress.epoch < epochs:
        loader.set_epoch(progress.epoch)
        for inputs, wanted in accelerator.skip_first_batches(loader, progress.batch):
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.batch += 1
            if progress.batch % 3 == 0:
                accelerator.save_state(metrics={"loss": loss.item()})
        progress.epoch, progress.batch = progress.epoch + 1, 0
    weights = accelerator.get_state_dict(model)
    accelerator.end_training()
    accelerator.free_memory()
    return weights


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            train(f"{folder}/interrupted", epochs=2)
            interrupted = train(f"{folder}/interrupted")
            whole = train(f"{folder}/whole")
            same = all(torch.equal(interrupted[name], whole[name]) for name in whole)
            assert same, "the interruption changed the result"
