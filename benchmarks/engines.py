"""`python -m benchmarks.engines` checks a store in a bucket (`fsck --read-data`) on Ray clusters of
1, 2, 4 and 8 workers, in the environment of the trainers' libraries.

The bucket is moto behind a proxy that limits each connection: latency and rate. So waiting is what
takes time, and two processors suffice for all workers and the server. Clusters, and the workers'
imports, are started before the clock. A worker's task reads a pack of 1 MiB with one request.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import torch

import ckptstore
from benchmarks.bucket import Bucket, bucket
from benchmarks.rated_link import rated_link
from ckptstore.core.config import MIB
from ckptstore.core.ids import CONFIG_KEY
from ckptstore.maintenance.check import Report, Share
from ckptstore.maintenance.check.fsck import fsck
from ckptstore.maintenance.check.offline_store import open_offline_store
from ckptstore.plugins.buckets.bucket import BucketStorage
from ckptstore.plugins.engine.ray_executor import RayExecutor
from ckptstore.plugins.engine.work import Place, spread_on
from ckptstore.storage import open_storage
from ckptstore.storage.contract import Capabilities

WORKERS = (1, 2, 4, 8)


def made(there: Bucket, mib: int) -> str:
    """A store of one commit, in packs of 1 MiB."""
    url, usual = there.new_url(), BucketStorage.capabilities
    BucketStorage.capabilities = Capabilities(pack_bytes=MIB)
    try:
        with ckptstore.open(url, storage=ckptstore.Storage(options=there.storage_options)) as store:
            weights = torch.randn(mib, MIB // 4)
            store.commit({"model": {str(i): row for i, row in enumerate(weights)}}, step=0)
    finally:
        BucketStorage.capabilities = usual
    return url


def warm(url: str) -> int:
    """Import what a worker needs, and ask the bucket once; long enough that each worker has one of
    these."""
    import ckptstore.maintenance.check.fsck
    import ckptstore.plugins.engine.work  # noqa: F401

    storage = open_storage(url, read_only=True)
    storage.read(CONFIG_KEY)
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


def timed(url: str, executor: Executor) -> tuple[float, Report]:
    with open_offline_store(url) as store:
        spread = spread_on(executor, Place.of(store))
        began = time.perf_counter()
        report = fsck(store, share=Share(), spread=spread)
        return time.perf_counter() - began, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="the size of the store")
    parser.add_argument("--rate", type=float, default=0.9, help="MB a second of a connection")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds before an answer")
    parser.add_argument("--repeats", type=int, default=1)
    asked = parser.parse_args()
    with bucket() as there:
        url = made(there, asked.mib)
        address = urlsplit(there.endpoint)
        where: tuple[Any, Any] = address.hostname, address.port
        with rated_link(where, asked.rate * 1e6, asked.latency) as endpoint:
            os.environ.update(
                AWS_ENDPOINT_URL=endpoint,
                AWS_ACCESS_KEY_ID=there.key,
                AWS_SECRET_ACCESS_KEY=there.secret,
                AWS_DEFAULT_REGION="us-east-1",
            )
            alone, first = 0.0, None
            for workers in WORKERS:
                with cluster(workers, url) as executor:
                    runs = [timed(url, executor) for _ in range(asked.repeats)]
                seconds = statistics.median(run[0] for run in runs)
                alone, first = alone or seconds, first or runs[0][1]
                assert all(report == first for _, report in runs), "the reports differ"
                assert not first.findings
                assert first.looked.data_bytes == first.looked.stored_bytes
                print(
                    f"{workers} workers: {seconds:.1f} s, {alone / seconds:.2f} times as fast, "
                    f"{alone / seconds / workers:.2f} a worker",
                    flush=True,
                )


if __name__ == "__main__":
    main()
