"""What a commit to the memory of two hosts costs a step, and what a restart reads from its own
host, from the partner, and from the bucket behind both: `python -m benchmarks.hosts`.

The hosts are two directories and two agents; ranks, agents and the bucket's server (moto) share the
processors of this host, and no link is slower than its memory. Rates are per rank; all of a round
alternate.
"""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

import torch

import ckptstore
from benchmarks.tiers import timed
from ckptstore import Async, KeepLast, Mirror, Storage
from ckptstore.plugins.hosts import join
from tests.distributed.layouts import meet, mesh_of
from tests.distributed.pool import Pool
from tests.support.servers.s3 import moto_server, new_url

RANKS, ROUNDS = 2, 3
ELEMENTS = 32 << 20  # 128 MiB in float32, half of it on each host


def measure(rank: int, folder: Path, url: str, options: dict[str, Any]) -> dict[str, list[float]]:
    from torch.distributed.tensor import DTensor, Shard

    meet(RANKS)
    own = folder / str(rank)
    os.environ |= {"CKPTSTORE_HOST": f"host-{rank}", "CKPTSTORE_CACHE": str(own / "../cache")}
    part = torch.randn(ELEMENTS // RANKS)
    into, copy = torch.zeros_like(part), torch.empty_like(part)
    rows = DTensor.from_local(part, mesh_of(RANKS, False), (Shard(0),), run_check=False)
    back = DTensor.from_local(into, mesh_of(RANKS, False), (Shard(0),), run_check=False)
    found: dict[str, list[float]] = {}

    def note(name: str, act: Callable[[], Any]) -> Any:
        done: list[Any] = []
        wall, cpu = timed(lambda: done.append(act()))
        found.setdefault(name, []).append(wall)
        found.setdefault(f"{name}, CPU", []).append(cpu)
        return done[0]

    def opened(place: str) -> ckptstore.Store:
        storage = Storage(options=options)
        mirror = Mirror(url, keep_local=KeepLast(2), storage=storage, every_steps=1000)
        return ckptstore.open(place, mirror=mirror, background=Async(staging_bytes=1 << 29))

    def lose(*hosts: int) -> None:
        torch.distributed.barrier()
        if rank in hosts:
            shutil.rmtree(own)
            shutil.rmtree(f"{own}.hosts")
        into.zero_()
        torch.distributed.barrier()

    def resumed(name: str) -> None:
        place = note(f"join, {name}", lambda: join(own))
        with opened(place) as store:
            note(f"resume, {name}", lambda: store.resume({"model": {"rows": back}}))
            assert torch.equal(into, part)

    for number in range(ROUNDS + 1):
        with opened(join(own)) as store:
            part.add_(1)
            note("memcpy of the own part", lambda: copy.copy_(part))
            pending: list[Any] = []
            for step in (2 * number, 2 * number + 1):  # the second has warm staging memory
                part.add_(1)
                pending.append(store.commit_async({"model": {"rows": rows}}, step=step))
                pending[-1].wait()
            found.setdefault("step held by a commit", []).append(pending[1].timings.held_s)
            found.setdefault("durable on two hosts", []).append(pending[1].timings.durable_s)
            assert store.flush_mirror(120)
        lose()
        resumed("own host")
        lose(1)
        resumed("partner")
        lose(0, 1)
        resumed("bucket")
    return {name: values[len(values) // (ROUNDS + 1) :] for name, values in found.items()}


def main() -> None:
    began = time.monotonic()
    pool, folder = Pool(RANKS), Path(mkdtemp(dir="/dev/shm", prefix="hosts-"))
    try:
        with moto_server() as server:
            found = pool.run(measure, folder, new_url(), server.options())
    finally:
        pool.close()
        shutil.rmtree(folder)
    nbytes = ELEMENTS // RANKS * 4
    for name in found[0]:
        seconds = median(median(each[name]) for each in found)
        print(f"{name:32} {seconds * 1e3:8.0f} ms {nbytes / seconds / 1e9:6.2f} GB/s")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
