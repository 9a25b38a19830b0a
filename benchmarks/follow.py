"""`python -m benchmarks.follow` measures a follower over a bucket: from the return of `commit` to
weights in place, beside the time that the patch alone takes on the link.

The trainer, the server (moto, or `$CKPTSTORE_TEST_S3`), the link and the follower are processes of
their own. The follower has a cache directory of its own, as another host has, and reaches the
bucket by a link of `--rate` bytes a second. The next commit is made when the last one is in place,
after a pause. `requests` are those of the follower.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ckptstore
from benchmarks.bucket import Bucket, bucket, requests_counted
from benchmarks.patches import State, dense, rows, sparse
from benchmarks.rated_link import GIGABIT, rated_link

RUN = "rl"
TENSORS = 16
PAUSE_S = 0.2
ALLOWED = 1.3
ALLOWED_S = 0.05
"""The target: so many times the patch's own time on the link, and so much more."""

CHANGES = {"sparse": sparse, "rows": rows, "dense": dense}


class Seen(NamedTuple):
    """A commit in the target of the follower, when it was there, and what it took."""

    step: int
    at_s: float
    read_s: float
    written_s: float
    requests: int
    digest: int


def weights(megabytes: int) -> State:
    elements = (megabytes << 20) // 2 // TENSORS
    return {f"layers.{n}": torch.randn(elements).to(torch.bfloat16) for n in range(TENSORS)}


def change(state: State, share: float) -> None:
    """A share of the elements of every tensor moves by one in the last place."""
    for tensor in state.values():
        sparse({"w": tensor}, share)


def digest(state: State) -> int:
    """A number that differs where any bit does, almost surely."""
    return sum(
        (n + 1) * int(tensor.view(torch.int16).to(torch.int64).mul_(_WEIGHTS[: len(tensor)]).sum())
        for n, tensor in enumerate(state.values())
    ) % (1 << 61)


_WEIGHTS = torch.randint(1 << 40, (1 << 20,), generator=torch.Generator().manual_seed(1))


def follow(url: str, options: dict[str, Any], cache: str, megabytes: int, to: Connection) -> None:
    """The follower's process: says what is in place, until it is killed."""
    os.environ["CKPTSTORE_CACHE"] = cache
    torch.set_num_threads(1)
    target = {name: torch.zeros_like(tensor) for name, tensor in weights(megabytes).items()}
    with (
        ckptstore.open(url, read_only=True, storage=ckptstore.Storage(options=options)) as store,
        store.follow(RUN, {"model": target}) as follower,
        requests_counted() as requests,
    ):
        while True:
            commit = follower.wait()
            at_s, applied = time.monotonic(), follower.applied
            assert commit is not None
            assert applied is not None
            with follower.frozen():
                seen = digest(target)
            count, requests.count = requests.count, 0
            to.send(Seen(commit.step or 0, at_s, applied.read_s, applied.written_s, count, seen))


class Measured(NamedTuple):
    """A commit: its step, seconds of the commit and until it was in place, what it stored."""

    step: int
    commit_s: float
    seconds: float
    read_s: float
    written_s: float
    stored_bytes: int
    requests: int

    def allowed_s(self, bytes_per_s: float) -> float:
        return ALLOWED * self.stored_bytes / bytes_per_s + ALLOWED_S


def measured(there: Bucket, endpoint: str, asked: argparse.Namespace) -> list[Measured]:
    """Commit, wait until the follower has it, compare, and so on."""
    url, options = there.new_url(), there.storage_options
    state = weights(asked.megabytes)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CKPTSTORE_CACHE"] = f"{folder}/trainer"
        storage = ckptstore.Storage(options=options)
        with ckptstore.open(url, run=RUN, storage=storage) as store:
            its = {**options, "endpoint_url": endpoint}
            given = (url, its, f"{folder}/follower", asked.megabytes, theirs)
            follower = context.Process(target=follow, args=given, daemon=True)
            follower.start()
            try:
                for step in range(asked.commits):
                    if step:
                        change(state, asked.changed)
                    began_s = time.monotonic()
                    info = store.commit({"model": state}, step=step)
                    done_s = time.monotonic()
                    seen: Seen = ours.recv()
                    if (seen.step, seen.digest) != (step, digest(state)):
                        raise RuntimeError(f"step {step}: the follower has {seen.step}, or others")
                    found.append(
                        Measured(
                            step,
                            done_s - began_s,
                            seen.at_s - done_s,
                            seen.read_s,
                            seen.written_s,
                            info.new_bytes,
                            seen.requests,
                        )
                    )
                    time.sleep(asked.pause)
            finally:
                follower.kill()
                follower.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--commits", type=int, default=40)
    parser.add_argument("--pause", type=float, default=PAUSE_S)
    parser.add_argument("--rate", type=float, default=GIGABIT)
    parser.add_argument("--raw", type=Path, help="keep each commit's figures in this file")
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with bucket() as there:
        host, _, port = there.endpoint.rpartition("/")[2].rpartition(":")
        with rated_link((host, int(port)), asked.rate) as endpoint:
            found = measured(there, endpoint, asked)
    if asked.raw:
        asked.raw.write_text(json.dumps([each._asdict() for each in found]))
    print(f"{asked.megabytes} MiB of bf16, {asked.changed:.1%} changed, {there.server}")
    for some in (found[:1], *(found[at : at + 8] for at in range(1, len(found), 8))):
        median = {
            name: statistics.median(getattr(each, name) for each in some)
            for name in Measured._fields
        }
        allowed_s = statistics.median(each.allowed_s(asked.rate) for each in some)
        print(
            f"steps {some[0].step:3} to {some[-1].step:3}: {median['seconds'] * 1e3:6.0f} ms, "
            f"allowed {allowed_s * 1e3:4.0f}; read {median['read_s'] * 1e3:5.0f}, written "
            f"{median['written_s'] * 1e3:3.0f}; {median['stored_bytes'] / 1e6:6.3f} MB in "
            f"{median['requests']:.0f} requests; commit {median['commit_s'] * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    main()
