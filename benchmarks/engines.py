"""`python -m benchmarks.engines` checks stores in a bucket (`fsck --read-data`), compacts them, and
pushes them to another, on Ray clusters of 1, 2, 4 and 8 workers, in the environment of the
trainers' libraries.

The bucket is moto behind a proxy that limits each connection: latency and rate. So waiting is what
takes time, and two processors suffice for all workers and the server. Clusters, and the workers'
imports, are started before the clock. A worker's task reads a pack of 1 MiB with one request, or
codes, or sends, two chunks of 1 MiB.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import torch

import ckptstore
from benchmarks.bucket import Bucket, bucket
from benchmarks.rated_link import rated_link
from ckptstore.core.config import MIB
from ckptstore.maintenance import compact as compaction
from ckptstore.maintenance.mirror import Mirrored
from ckptstore.objects import codecs
from ckptstore.plugins.buckets.bucket import BucketStorage
from ckptstore.plugins.engine.ray_executor import RayExecutor
from ckptstore.storage.contract import Capabilities

WORKERS = (1, 2, 4, 8)
POLICY = ckptstore.CompactPolicy(newest=0, every=2)


@contextmanager
def small_packs() -> Iterator[None]:
    """Packs of 1 MiB, and tasks of as much of two commits."""
    usual = BucketStorage.capabilities
    BucketStorage.capabilities = Capabilities(pack_bytes=MIB)
    vars(compaction).update(RUN_BYTES=MIB, ENTRY_BYTES=1)
    try:
        yield
    finally:
        BucketStorage.capabilities = usual


def made(there: Bucket, mib: int) -> str:
    """A store of two commits, in packs of 1 MiB."""
    url = there.new_url()
    weights = torch.randn(mib // 2, MIB // 4, generator=torch.Generator().manual_seed(0))
    storage = ckptstore.Storage(options=there.storage_options, chunk_bytes=MIB)
    with ckptstore.open(url, storage=storage) as store:
        for step in range(2):
            state = {str(i): row * (1 + step * 1e-4) for i, row in enumerate(weights)}
            store.commit({"model": state}, step=step)
    return url


def warm(url: str) -> int:
    """Import what a worker needs, and ask the bucket once; long enough that each worker has one of
    these."""
    import ckptstore.maintenance.check.fsck
    import ckptstore.maintenance.mirror
    import ckptstore.plugins.engine.work  # noqa: F401
    from ckptstore.repository.store_handle import StoreHandle

    with closing(StoreHandle(url, read_only=True)) as store:
        store.objects.sync(store.log.replay())
    codecs.encode(codecs.SPLIT_ZSTD, memoryview(bytes(MIB)), 4)
    time.sleep(2.0)
    return os.getpid()


@contextmanager
def cluster(workers: int, url: str) -> Iterator[Executor]:
    """So many workers of Ray, which have imported what they need."""
    import ray

    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        with RayExecutor() as executor:
            found = set[int]()
            while len(found) < workers:
                found |= set(executor.map(warm, [url] * workers))
            yield executor
    finally:
        ray.shutdown()


def check(store: ckptstore.Store, there: str) -> Any:
    report = store.fsck(read_data="all")
    assert not report.findings
    assert report.looked.data_bytes == report.looked.stored_bytes
    return report.looked.data_bytes


def compact(store: ckptstore.Store, there: str) -> Any:
    report = store.compact(POLICY)
    assert report.chunks and report.freed_bytes > 0 and not report.problems
    return replace(report, groups=(), packed_bytes=0, collected=())


def push(store: ckptstore.Store, there: str) -> Any:
    done: Mirrored = store.push(there, create=True)
    assert len(done.sent) == 2 and not done.problems
    return done.chunks, done.raw_bytes


JOBS: dict[str, Callable[[Any, str], Any]] = {
    "fsck --read-data": check,
    "compact": compact,
    "push": push,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", default=list(JOBS), help="some of the jobs")
    parser.add_argument("--mib", type=int, default=64, help="the size of the store")
    parser.add_argument("--rate", type=float, default=0.9, help="MB a second of a connection")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds before an answer")
    parser.add_argument("--workers", type=int, nargs="*", default=WORKERS)
    asked = parser.parse_args()
    with bucket() as there, small_packs():
        stores = {(job, n): made(there, asked.mib) for job in asked.jobs for n in asked.workers}
        address = urlsplit(there.endpoint)
        where: tuple[Any, Any] = address.hostname, address.port
        with rated_link(where, asked.rate * 1e6, asked.latency) as endpoint:
            os.environ.update(
                AWS_ENDPOINT_URL=endpoint,
                AWS_ACCESS_KEY_ID=there.key,
                AWS_SECRET_ACCESS_KEY=there.secret,
                AWS_DEFAULT_REGION="us-east-1",
            )
            first = dict[str, tuple[float, Any]]()
            for workers in asked.workers:
                with cluster(workers, next(iter(stores.values()))) as executor:
                    for job in asked.jobs:
                        with ckptstore.open(stores[job, workers]) as store:
                            began, on = time.perf_counter(), store.on(executor)
                            said = JOBS[job](on, there.new_url())
                            seconds = time.perf_counter() - began
                        alone, wanted = first.setdefault(job, (seconds, said))
                        assert said == wanted, f"the reports differ: {said} and {wanted}"
                        print(
                            f"{job}, {workers} workers: {seconds:.1f} s, "
                            f"{alone / seconds:.2f} times as fast, "
                            f"{alone / seconds / workers:.2f} a worker",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
