"""What a commit of two ranks to their host's memory costs a step, and what a restart reads from
there and from the bucket behind it: `python -m benchmarks.tiers`.

Both ranks and the bucket's server (moto) share the processors of this host, so the bucket is as
fast as they let it be, and has no distance. Rates are per rank; all of a round alternate.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

import torch

import ckptstore
from ckptstore import Async, KeepLast, Mirror, Storage
from tests.distributed.layouts import meet, mesh_of
from tests.distributed.pool import Pool
from tests.support.servers.s3 import moto_server, new_url

RANKS, ROUNDS = 2, 5
ELEMENTS = 64 << 20  # 256 MiB in float32, half of it on each rank


def opened(folder: Path, url: str, options: dict[str, Any]) -> ckptstore.Store:
    mirror = Mirror(url, keep_local=KeepLast(2), storage=Storage(options=options), every_steps=1000)
    background = Async(staging_bytes=1 << 30)
    return ckptstore.open(folder / "local", mirror=mirror, background=background)


def timed(act: Callable[[], Any]) -> tuple[float, float]:
    """Seconds on the clock, and of this process's processors."""
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(rank: int, folder: Path, url: str, options: dict[str, Any]) -> dict[str, list[float]]:
    from torch.distributed.tensor import DTensor, Shard

    meet(RANKS)
    part = torch.randn(ELEMENTS // RANKS)
    into = torch.zeros_like(part)
    rows = DTensor.from_local(part, mesh_of(RANKS, False), (Shard(0),), run_check=False)
    back = DTensor.from_local(into, mesh_of(RANKS, False), (Shard(0),), run_check=False)
    found: dict[str, list[float]] = {}

    def note(name: str, act: Callable[[], Any]) -> None:
        wall, cpu = timed(act)
        found.setdefault(name, []).append(wall)
        found.setdefault(f"{name}, CPU", []).append(cpu)

    copy = torch.empty_like(part)
    for number in range(ROUNDS + 1):
        with opened(folder, url, options) as store:
            part.add_(1)
            note("memcpy of the own part", lambda: copy.copy_(part))
            pending: list[Any] = []
            for step in (2 * number, 2 * number + 1):  # the second has warm staging memory
                part.add_(1)
                pending.append(store.commit_async({"model": {"rows": rows}}, step=step))
                pending[-1].wait()
            found.setdefault("step held by a commit", []).append(pending[1].timings.held_s)
            found.setdefault("durable in memory", []).append(pending[1].timings.durable_s)
            note("resume, warm", lambda: store.resume({"model": {"rows": back}}))
            note("resume, warm", lambda: store.resume({"model": {"rows": back}}))
            assert store.flush_mirror(120)
        into.zero_()
        with opened(folder, url, options) as store:
            note("resume, own tier", lambda: store.resume({"model": {"rows": back}}))
            assert torch.equal(into, part)
        into.zero_()
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(folder / "local")
        torch.distributed.barrier()
        with opened(folder, url, options) as store:
            note("resume, bucket", lambda: store.resume({"model": {"rows": back}}))
            assert torch.equal(into, part)
    return {name: values[len(values) // (ROUNDS + 1) :] for name, values in found.items()}


def main() -> None:
    pool, folder = Pool(RANKS), Path(mkdtemp(dir="/dev/shm", prefix="tiers-"))
    try:
        with moto_server() as server:
            options = server.options()
            found = pool.run(measure, folder, new_url(), options)
    finally:
        pool.close()
        shutil.rmtree(folder)
    nbytes = ELEMENTS // RANKS * 4
    for name in found[0]:
        seconds = median(median(each[name]) for each in found)
        print(f"{name:32} {seconds * 1e3:8.0f} ms {nbytes / seconds / 1e9:6.2f} GB/s")


if __name__ == "__main__":
    main()
