"""What a commit of two ranks to their host's memory costs a step, and what a restart reads from
there and from the bucket behind it: `python -m benchmarks.tiers`.

Both ranks and the bucket's server (moto) share the processors of this host, so the bucket is as
fast as they let it be, and has no distance. Rates are per rank; all of a round alternate.
"""

import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

import ckptstore
from benchmarks.notes import COPY, Notes, show
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


def measure(rank: int, folder: Path, url: str, options: dict[str, Any]) -> dict[str, list[float]]:
    from torch.distributed.tensor import DTensor, Shard

    meet(RANKS)
    part = torch.randn(ELEMENTS // RANKS)
    into = torch.zeros_like(part)
    rows = DTensor.from_local(part, mesh_of(RANKS, False), (Shard(0),), run_check=False)
    back = DTensor.from_local(into, mesh_of(RANKS, False), (Shard(0),), run_check=False)
    notes, copy, state = Notes(), torch.empty_like(part), {"model": {"rows": rows}}

    def resumed(store: ckptstore.Store, where: str) -> None:
        notes.time(f"resume, {where}", lambda: store.resume({"model": {"rows": back}}))
        assert torch.equal(into, part)

    for number in range(ROUNDS + 1):
        with opened(folder, url, options) as store:
            part.add_(1)
            notes.time(COPY, lambda: copy.copy_(part))
            store.commit_async(state, step=2 * number).wait()  # the next has warm staging memory
            part.add_(1)
            notes.commit(store, state, 2 * number + 1, "durable in memory")
            store.resume({"model": {"rows": back}})
            resumed(store, "warm")
            assert store.flush_mirror(120)
        into.zero_()
        with opened(folder, url, options) as store:
            resumed(store, "own tier")
        into.zero_()
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(folder / "local")
        torch.distributed.barrier()
        with opened(folder, url, options) as store:
            resumed(store, "bucket")
    return {name: values[1:] for name, values in notes.found.items()}


def main() -> None:
    pool, folder = Pool(RANKS), Path(mkdtemp(dir="/dev/shm", prefix="tiers-"))
    try:
        with moto_server() as server:
            options = server.options()
            found = pool.run(measure, folder, new_url(), options)
    finally:
        pool.close()
        shutil.rmtree(folder)
    pooled = {name: [value for rank in found for value in rank[name]] for name in found[0]}
    show(pooled, ELEMENTS // RANKS * 4)


if __name__ == "__main__":
    main()
