"""Training on several ranks of a host that is killed, and goes on with another number of ranks;
then the host loses its memory, and training goes on from the mirror.

Run as it is, it shows that with FSDP2 (`python many_ranks.py ddp`: with DistributedDataParallel).
Elsewhere torchrun starts it:
`torchrun --nproc-per-node 4 many_ranks.py fsdp /dev/shm/run s3://bucket/run`.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist

import ckptstore

STEPS = 6
BATCH = 12
"""Rows of a step, divided among however many ranks there are."""


def wrapped(model: torch.nn.Module, kind: str) -> torch.nn.Module:
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def train(kind: str, memory: str, mirror: str, steps: int, killed_at: int) -> None:
    """Train from wherever the store stands to `steps`; the last rank is killed in step `killed_at`,
    unless that is 0."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = wrapped(
        torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)), kind
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    app_state = {"model": model, "optimizer": optimizer, "progress": {"step": 0}}

    behind = ckptstore.Mirror(mirror, every_steps=2, keep_local=ckptstore.KeepLast(2))
    with ckptstore.open(memory, mirror=behind) as store:
        store.resume(app_state)
        start = app_state["progress"]["step"]
        for step in range(start + 1, steps + 1):
            x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))[rank::ranks]
            loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            app_state["progress"]["step"] = step
            if step == killed_at and rank == ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            snapshot = store.commit(app_state, step=step)
            if rank == 0:
                print(f"{ranks} ranks, step {step}: commit {snapshot.id[:12]}", flush=True)
    dist.destroy_process_group()


def launch(ranks: int, *arguments: str) -> bool:
    """Run this file on so many ranks of this machine; whether all of them came through."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        __file__,
        *arguments,
    ]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


def show(kind: str) -> None:
    """Two ranks until one is killed, then three, then two on a host with empty memory."""
    with tempfile.TemporaryDirectory() as folder:
        memory, mirror = f"{folder}/memory", f"{folder}/mirror"
        assert not launch(2, kind, memory, mirror, str(STEPS), "3"), "a rank was killed"
        with ckptstore.open(memory) as store:
            assert [info.step for info in store.log()] == [2, 1], (
                "what was under way left nothing behind"
            )
        assert launch(3, kind, memory, mirror, str(STEPS))
        with ckptstore.open(memory) as store:
            commits = store.log()
            assert [info.step for info in commits] == [6, 5], "memory holds the newest"
            assert commits[0].parents == (commits[1].id,)
        shutil.rmtree(memory)
        assert launch(2, kind, memory, mirror, str(STEPS + 2))
        with ckptstore.open(mirror) as store:
            assert [info.step for info in store.log()][:2] == [8, 6], (
                "training went on where it stood, from the mirror"
            )


if __name__ == "__main__":
    if "RANK" in os.environ:
        kind, memory, mirror, *numbers = sys.argv[1:]
        steps, killed_at = (*map(int, numbers), *(STEPS, 0)[len(numbers) :])
        train(kind, memory, mirror, steps, killed_at)
    else:
        show(sys.argv[1] if len(sys.argv) > 1 else "fsdp")
