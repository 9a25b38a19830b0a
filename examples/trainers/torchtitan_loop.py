"""torchtitan's optimizers, schedulers and data loader train a model on a CPU; the manager of its
checkpoints keeps them in a store. torchtitan's Trainer does the same with the one line of
docs/torchtitan.md, on GPUs.

    python examples/trainers/torchtitan_loop.py
"""

import tempfile
from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

import ckptstore
from ckptstore.interop.torchtitan import StoreCheckpointManager


class Numbers(IterableDataset):
    """Its state is its place."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.sin(torch.arange(8.0) * self.at)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def train(folder: str, steps: int) -> torch.nn.Module:
    """What torchtitan's Trainer does, in small."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizers = default_adamw(lr=1e-2, fused=False).build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=optimizers, training_steps=steps
    )
    loader = ParallelAwareDataloader(Numbers(), 0, 1)
    progress = ckptstore.StateDict(step=0)
    manager = StoreCheckpointManager.Config(
        enable=True, interval=5, keep_latest_k=1, keep_best="loss", last_save_model_only=False
    ).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=folder,
    )
    manager.load()
    print(f"goes on from step {progress['step']}")
    batches = iter(loader)
    while progress["step"] < steps:
        progress["step"] += 1
        batch = next(batches)
        loss = (model(batch) - batch).square().mean()
        optimizers.zero_grad()
        loss.backward()
        manager.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        manager.record(progress["step"], loss=loss.item())
        manager.save(progress["step"], last_step=progress["step"] == steps)
    manager.close()
    return model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(folder, steps=12)
        model = train(folder, steps=20)  # as a job that is started again with more steps
        with ckptstore.open(f"{folder}/checkpoint/store", read_only=True) as store:
            for info in store.log():
                print(f"step {info.step}: loss {info.metrics['loss']:.4f}")
            assert torch.equal(store.checkout(20).read("model/weight"), model.weight)
