"""Training on several ranks that is killed, and goes on with another number of ranks.

Run as it is, it shows that with FSDP2 (`python many_ranks.py ddp`: with DistributedDataParallel).
Elsewhere torchrun starts it: `torchrun --nproc-per-node 4 many_ranks.py fsdp checkpoints`.
"""

import os
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


def train(kind: str, place: str, killed_at: int | None) -> None:
    """Train from wherever the store stands; the last rank is killed in step `killed_at`, if
    given."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = wrapped(
        torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)), kind
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    app_state = {"model": model, "optimizer": optimizer, "progress": {"step": 0}}

    with ckptstore.open(place) as store:
        store.resume(app_state)
        start = app_state["progress"]["step"]
        for step in range(start + 1, STEPS + 1):
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
    """Two ranks until one is killed, then three."""
    with tempfile.TemporaryDirectory() as folder:
        place = f"{folder}/checkpoints"
        assert not launch(2, kind, place, str(STEPS // 2)), "a rank was killed"
        with ckptstore.open(place) as store:
            assert [info.step for info in store.log()] == [2, 1], (
                "what was under way left nothing behind"
            )
        assert launch(3, kind, place)
        with ckptstore.open(place) as store:
            commits = store.log()
            assert [info.step for info in commits] == [6, 5, 4, 3, 2, 1], (
                "training went on where it stood"
            )
            assert all(
                newer.parents == (older.id,)
                for newer, older in zip(commits, commits[1:], strict=False)
            )


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None)
    else:
        show(sys.argv[1] if len(sys.argv) > 1 else "fsdp")
