"""A training with DeepSpeed's ZeRO 3 that can be stopped anywhere and started again: run it twice
on the same folder and it goes on where it was. `torchrun --nproc-per-node 2` runs it on two ranks.
"""

import os
import sys
import tempfile

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch

import ckptstore
from ckptstore.interop.deepspeed import StoreCheckpointEngine, fp32_weights

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes a compiler
ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 1_000,
}


def train(folder: str, steps: int = 12) -> dict[str, torch.Tensor]:
    """Train to the end of so many steps, from wherever the store stands; the weights."""
    if "RANK" not in os.environ:  # which torchrun sets
        os.environ.update(ONE_RANK)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    with ckptstore.open(f"{folder}/store") as store:
        saves = StoreCheckpointEngine.install(engine, store)
        engine.load_checkpoint(f"{folder}/out")
        print(f"starting at step {engine.global_steps}")

        for step in range(engine.global_steps, steps):
            draw = torch.Generator().manual_seed(1_000 * step + engine.global_rank)
            x = torch.randn(8, 8, generator=draw)
            loss = torch.nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
            engine.backward(loss)
            engine.step()
            if step % 3 == 2:
                engine.save_checkpoint(f"{folder}/out", client_state={"loss": loss.item()})
        saves.wait()
        engine.destroy()
        return fp32_weights(store.checkout(f"{folder}/out/global_step{steps}"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            train(f"{folder}/interrupted", steps=6)
            interrupted = train(f"{folder}/interrupted")
            whole = train(f"{folder}/whole")
            same = all(torch.equal(interrupted[name], whole[name]) for name in whole)
            assert same, "the interruption changed the result"
            print("the interruption changed nothing")
