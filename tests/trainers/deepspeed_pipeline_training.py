"""A pipeline of two stages is saved, trained on, and loaded into another one that began with other
weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckptstore
from ckptstore.interop.deepspeed import StoreCheckpointEngine
from tests.trainers import deepspeed_parts  # sets what DeepSpeed reads when it is imported
from tests.trainers.trainings import Tell, digest

LAYERS = 4


def train(folder: Path, _: Tell) -> Any:
    torch.set_num_threads(1)
    with ckptstore.open(folder / "store") as store:
        engine, out = _engine(seed=3), str(folder / "out")
        saves = StoreCheckpointEngine.install(engine, store)
        batches = _batches()
        for _step in range(2):
            engine.train_batch(batches)
        engine.save_checkpoint(out)
        saved = digest(engine.module.state_dict())
        loss = float(engine.train_batch(batches))
        saves.wait()
        other = _engine(seed=4)
        StoreCheckpointEngine.install(other, store)
        other.load_checkpoint(out)
        loaded = digest(other.module.state_dict())
        batches = _batches()
        for _step in range(2):
            next(batches)
        again = float(other.train_batch(batches))
        files = sorted(store.checkout().keys())
        other.destroy()
    return {"saved": saved, "loaded": loaded, "losses": [loss, again], "files": files}


def _engine(seed: int) -> Any:
    deepspeed = deepspeed_parts.deepspeed
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(seed)
    layers = [deepspeed.pipe.LayerSpec(nn.Linear, 8, 8) for _ in range(LAYERS)]
    net = deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    return deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2),
        config={"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True},
    )[0]


def _batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(7)
    while True:
        x = torch.randn(4, 8, generator=draw)
        yield x, x.flip(1)
