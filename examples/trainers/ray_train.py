"""Ray Train with two workers keeps its checkpoints in a store; a worker that fails is started again
and goes on from the last one.

    python examples/trainers/ray_train.py
"""

import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func(config: dict[str, str]) -> None:
    from ckptstore.interop import ray as store

    rank = ray.train.get_context().get_world_rank()
    model, first = torch.nn.Linear(4, 4), 0
    optimizer = torch.optim.AdamW(model.parameters())
    if checkpoint := ray.train.get_checkpoint():
        with store.open(checkpoint) as directory:
            state = torch.load(f"{directory}/rank-{rank}.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    for epoch in range(first, 4):
        if epoch == 2 and not checkpoint:
            raise RuntimeError("a worker fails, on purpose")
        loss = model(torch.ones(4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with tempfile.TemporaryDirectory() as directory:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"epoch": epoch}, f"{directory}/rank-{rank}.pt")
            ray.train.report(
                {"loss": loss.item(), "first": first},
                checkpoint=Checkpoint.from_directory(directory),
                checkpoint_upload_fn=store.upload(
                    config["store"], step=epoch, metrics={"loss": loss.item()}
                ),
            )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = TorchTrainer(
            train_func,
            train_loop_config={"store": f"{folder}/store"},
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            run_config=RunConfig(
                name="example",
                storage_path=f"{folder}/ray",
                checkpoint_config=CheckpointConfig(num_to_keep=2),
                failure_config=FailureConfig(max_failures=1),
            ),
        ).fit()
        assert result.checkpoint is not None and result.metrics is not None
        print(f"went on from epoch {result.metrics['first']}")
        print(*sorted(path.name for path in Path(result.checkpoint.path).iterdir()))
