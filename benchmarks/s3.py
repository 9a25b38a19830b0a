"""Commits to a bucket and restores from it against the raw client, DCP and TorchSnapshot: `python -m benchmarks.s3`.

The bucket is moto's in a process of its own, or that of the server which `$CKPTSTORE_TEST_S3` names. The raw client is boto3's, with parts
and ranges of 8 MiB, eight on their way. Contestants take turns within a round; quotients are the medians of the rounds' own.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch

import ckptstore
from benchmarks.bucket import Bucket, bucket
from ckptstore.core.config import MIB
from ckptstore.objects.s3_upload import PART_BYTES, PARTS_IN_FLIGHT
from ckptstore.text import bytes_text, seconds_text

TENSOR_BYTES = 16 * MIB

State = dict[str, dict[str, torch.Tensor]]
Deed = Callable[[State, str], None]


@dataclass(frozen=True, slots=True)
class Contestant:
    """Writes a state to a place of its own in the bucket, and fills a state from there."""

    name: str
    write: Deed
    read: Deed
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"write": [], "read": []})
    cpu_seconds: dict[str, list[float]] = field(default_factory=lambda: {"write": [], "read": []})


def contestants(there: Bucket) -> tuple[Contestant, ...]:
    """The raw client first."""
    return (
        Contestant("raw client", partial(_raw_write, there), partial(_raw_read, there)),
        Contestant("ckptstore", partial(_write, there), partial(_read, there)),
        Contestant("DCP, fsspec", _dcp_write, _dcp_read),
        Contestant("TorchSnapshot", _snapshot_write, _snapshot_read),
    )


def _raw_write(there: Bucket, state: State, url: str) -> None:
    from boto3.s3.transfer import TransferConfig

    name, _, key = url.removeprefix("s3://").partition("/")
    config = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=PARTS_IN_FLIGHT)
    client = there.client()
    for path, tensor in state["model"].items():
        client.upload_fileobj(_File(tensor), name, f"{key}/{path}", Config=config)


class _File:
    """A tensor's bytes as a file, without a copy of all of them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._rest = tensor.numpy().data.cast("B")

    def read(self, nbytes: int = -1) -> bytes:
        data = bytes(self._rest[:nbytes] if nbytes >= 0 else self._rest)
        self._rest = self._rest[len(data) :]
        return data


def _raw_read(there: Bucket, state: State, url: str) -> None:
    name, _, key = url.removeprefix("s3://").partition("/")
    client = there.client()

    def get(part: tuple[str, int]) -> None:
        path, start = part
        out = state["model"][path].numpy().data.cast("B")[start : start + PART_BYTES]
        answer = client.get_object(Bucket=name, Key=f"{key}/{path}", Range=f"bytes={start}-{start + len(out) - 1}")
        while data := answer["Body"].read(MIB):
            out[: len(data)] = data
            out = out[len(data) :]

    parts = [(path, start) for path, tensor in state["model"].items() for start in range(0, tensor.nbytes, PART_BYTES)]
    with ThreadPoolExecutor(PARTS_IN_FLIGHT) as pool:
        list(pool.map(get, parts))


def _write(there: Bucket, state: State, url: str) -> None:
    with ckptstore.open(url, storage_options=there.storage_options) as store:
        store.commit(state, step=0)


def _read(there: Bucket, state: State, url: str) -> None:
    with ckptstore.open(url, storage_options=there.storage_options, create=False) as store:
        store.checkout(0).restore(state)


def _dcp_write(state: State, url: str) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save(state, storage_writer=FsspecWriter(url, thread_count=2), no_dist=True)


def _dcp_read(state: State, url: str) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(state, storage_reader=FsspecReader(url), no_dist=True)


def _snapshot_write(state: State, url: str) -> None:
    from torchsnapshot import Snapshot, StateDict

    Snapshot.take(url, {"model": StateDict(**state["model"])})


def _snapshot_read(state: State, url: str) -> None:
    from torchsnapshot import Snapshot, StateDict

    Snapshot(url).restore({"model": StateDict(**state["model"])})


def race(there: Bucket, nbytes: int, rounds: int) -> tuple[Contestant, ...]:
    """Every contestant once a round; each restored state is compared with what was written. The first round loads libraries and is not
    counted."""
    entered = contestants(there)
    for number in range(rounds + 1):
        state = {"model": {f"w{i}": torch.randn(TENSOR_BYTES // 4) for i in range(nbytes // TENSOR_BYTES)}}
        for contestant in entered[number % len(entered) :] + entered[: number % len(entered)]:
            url = there.new_url()
            _timed(contestant, "write", contestant.write, state, url)
            empty = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}}
            _timed(contestant, "read", contestant.read, empty, url)
            assert all(torch.equal(empty["model"][name], tensor) for name, tensor in state["model"].items()), contestant.name
    for contestant in entered:
        for values in (*contestant.seconds.values(), *contestant.cpu_seconds.values()):
            del values[0]
    return entered


def _timed(contestant: Contestant, what: str, deed: Deed, state: State, url: str) -> None:
    started, started_cpu = time.perf_counter(), time.process_time()
    deed(state, url)
    contestant.seconds[what].append(time.perf_counter() - started)
    contestant.cpu_seconds[what].append(time.process_time() - started_cpu)


def show(entered: tuple[Contestant, ...], nbytes: int) -> None:
    """A line for each contestant and direction; rates relative to the raw client's."""
    raw = entered[0]
    for what in ("write", "read"):
        for contestant in entered:
            pairs = zip(raw.seconds[what], contestant.seconds[what], strict=True)
            rate = bytes_text(nbytes / median(contestant.seconds[what]))
            relative = median(ours / theirs for ours, theirs in pairs)
            cpu = seconds_text(median(contestant.cpu_seconds[what]) / nbytes * 1e9)
            print(f"{what:5}  {contestant.name:13}  {rate}/s  {relative:.2f} of the raw client's rate, {cpu} of processor time a GB")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.s3", description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="the size of the state, a multiple of 16 (default 256)")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, bucket() as there:
        secret = {"AWS_ACCESS_KEY_ID": there.key, "AWS_SECRET_ACCESS_KEY": there.secret}
        # The peers take where and who from the environment.
        os.environ.update(AWS_ENDPOINT_URL=there.endpoint, AWS_DEFAULT_REGION="us-east-1", CKPTSTORE_CACHE=folder, **secret)
        show(race(there, chosen.mib * MIB, chosen.rounds), chosen.mib * MIB)
    return 0


if __name__ == "__main__":
    sys.exit(main())
