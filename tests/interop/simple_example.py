"""TorchSnapshot's simple example, with another import: train some epochs with a snapshot after
each, optionally starting from one.
"""

import sys

import torch

from ckptstore.interop import torchsnapshot


def main(work_dir: str, epochs: int, restore_path: str | None) -> None:
    torch.random.manual_seed(42)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optim = torch.optim.Adagrad(model.parameters(), lr=0.01)
    loss_fn = torch.nn.BCEWithLogitsLoss()
    progress = torchsnapshot.StateDict(current_epoch=0)
    app_state = {
        "rng_state": torchsnapshot.RNGState(),
        "model": model,
        "optim": optim,
        "progress": progress,
    }
    if restore_path:
        torchsnapshot.Snapshot(restore_path).restore(app_state)
    while progress["current_epoch"] < epochs:
        for _ in range(4):
            loss = loss_fn(model(torch.rand((8, 16))), torch.rand((8, 1)))
            optim.zero_grad()
            loss.backward()
            optim.step()
        progress["current_epoch"] += 1
        snapshot = torchsnapshot.Snapshot.take(
            f"{work_dir}/run/{progress['current_epoch']}-{bool(restore_path)}", app_state
        )
        print(f"{snapshot.path} {loss.item():.9f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
