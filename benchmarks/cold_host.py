"""How long a host without a cache needs to open a store with a long history in a bucket: `python -m
benchmarks.cold_host`.

The store is made in memory and copied into the bucket: `--commits` real commits of two packs each,
and so many entries of the log that refer to them that it has `--entries`. A host without a cache
opens it, then once more with the cache that it has by then; at last a host without a cache opens it
after the log's segments were deleted.
"""

import argparse
import os
import secrets
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

import ckptstore
from benchmarks.bucket import Bucket, bucket, requests_counted
from ckptstore.core.ids import CommitId, new_session_id
from ckptstore.core.text import count_text, seconds_text
from ckptstore.log.entries import Commit
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.storage import open_storage

CHUNK_BYTES = 1 << 16
COPIERS = 32
REUSED = 100
"""So many packs hold what a made-up commit has in common with those before it."""


def make_store(place: str, *, commits: int, entries: int) -> None:
    """A store of `commits` commits and, made up, as many entries more as it takes to have
    `entries`."""
    with ckptstore.open(place, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)) as store:
        for step in range(commits):
            store.commit(
                {"model": {"w": torch.randn(256 << 10 >> 2), "step": step}},
                step=step,
                metrics={"loss": 1.0 / (step + 1)},
            )
    handle = StoreHandle(place)
    *_, last = (entry.body for entry in handle.log.read_entries())
    assert isinstance(last, Commit)
    reused = frozenset(sorted(handle.log.replay().packs)[-REUSED:])
    for n in range(handle.log.replay().n, entries):
        commit = CommitId(secrets.token_hex(32))
        handle.log.append(
            replace(last, session=new_session_id(), commit=commit, step=n, packs=(), reused=reused)
        )
    handle.close()


def copy(source: str, to: str, there: Bucket) -> None:
    """Every object of one place to another."""
    origin, target = open_storage(source), open_storage(to, storage_options=there.storage_options)
    with ThreadPoolExecutor(COPIERS) as pool:
        list(
            pool.map(lambda item: target.put(item[0], origin.read(item[0])), list(origin.list("")))
        )


def open_cold(place: str, there: Bucket, what: str) -> None:
    """Open the store and read one tensor, and print what that took."""
    with requests_counted() as requested:
        started, started_cpu = time.perf_counter(), time.process_time()
        with ckptstore.open(
            place, storage=ckptstore.Storage(options=there.storage_options)
        ) as store:
            opened, opened_cpu, opened_requests = (
                time.perf_counter(),
                time.process_time(),
                requested.count,
            )
            store.checkout(f"{store.run}@3").read("model/w")
            read, read_requests = time.perf_counter(), requested.count
    print(
        f"{what}: open {seconds_text(opened - started)}, {count_text(opened_requests, 'request')}, "
        f"{seconds_text(opened_cpu - started_cpu)} of processor time; one tensor "
        f"{seconds_text(read - opened)}, "
        f"{count_text(read_requests - opened_requests, 'request')}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.cold_host", description=__doc__)
    parser.add_argument("--commits", type=int, default=500)
    parser.add_argument("--entries", type=int, default=10_000)
    chosen = parser.parse_args(argv)
    made = f"memory://{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory() as folder, bucket() as there:
        os.environ["CKPTSTORE_CACHE"] = f"{folder}/maker"
        make_store(made, commits=chosen.commits, entries=chosen.entries)
        place = there.new_url()
        copy(made, place, there)
        os.environ["CKPTSTORE_CACHE"] = f"{folder}/cold"
        open_cold(place, there, "without a cache")
        open_cold(place, there, "with it")
        target = open_storage(place, storage_options=there.storage_options)
        for key, _ in list(target.list("log/segment-")):
            target.delete(key)
        os.environ["CKPTSTORE_CACHE"] = f"{folder}/colder"
        open_cold(place, there, "without a cache and without segments")
    return 0


if __name__ == "__main__":
    sys.exit(main())
