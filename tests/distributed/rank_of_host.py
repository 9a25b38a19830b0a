"""One rank on a host, in its own process: `python -m tests.distributed.rank_of_host RANK ADDRESS
STORE LOST…`. LOST are ranks that will be lost. Ranks meet at ADDRESS, which `python -m
tests.distributed.rank_of_host ADDRESS` serves until its input ends.

It commits with all ranks, prints `committed ID`, and waits for a line. By then the lost ranks are
gone: it commits again, prints `raised RANKS` with the ranks to blame, continues with the others
from the last commit, and prints `went on ID`.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import ckptstore
from tests.distributed.layouts import full, placed

SIZE = 4
PORT = 29_500
TIMEOUT_S = 10.0


def main(rank: int, address: str, place: str, lost: list[int]) -> None:
    dist.init_process_group("gloo", store=dist.TCPStore(address, PORT), rank=rank, world_size=SIZE)
    with ckptstore.open(place, storage=ckptstore.Storage(chunk_bytes=1 << 16)) as store:
        print(
            "committed", store.commit(state_of(list(range(SIZE)), rank, 1), step=1).id, flush=True
        )
        sys.stdin.readline()
        try:
            store.commit(
                state_of(list(range(SIZE)), rank, 2),
                step=2,
                ranks=ckptstore.Ranks(timeout_s=TIMEOUT_S),
            )
        except ckptstore.Unavailable as error:
            print("raised", *sorted(error.causes), flush=True)
        left = [each for each in range(SIZE) if each not in lost]
        group = dist.new_group(left, use_local_synchronization=True)
        state = state_of(left, rank, 0)
        own = dict(enumerate(left))  # private leaves, by rank number in the new group
        resumed = store.resume(
            state, ranks=ckptstore.Ranks(process_group=group, broadcast=True, private_from=own)
        )
        assert resumed is not None and resumed.step == 1
        wanted = state_of(left, rank, 1)
        assert torch.equal(state["model"]["rows"].to_local(), wanted["model"]["rows"].to_local())
        assert (
            torch.equal(state["model"]["whole"], wanted["model"]["whole"])
            and state["own"]["at"] == rank
        )
        print(
            "went on",
            store.commit(state, step=2, ranks=ckptstore.Ranks(process_group=group)).id,
            flush=True,
        )


def state_of(ranks: list[int], rank: int, number: int) -> dict[str, Any]:
    """A tensor divided over `ranks`, a replicated one, and a private one."""
    mesh = DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False)
    model = {
        "rows": placed(full() * number, mesh, (Shard(0),)),
        "whole": torch.arange(100_000.0) * number,
    }
    return {"model": model, "own": {"at": rank if number else -1}}


def introduce(address: str) -> None:
    store = dist.TCPStore(address, PORT, is_master=True, wait_for_workers=False)
    print("ready", flush=True)
    sys.stdin.read()
    del store


if __name__ == "__main__" and len(sys.argv) == 2:
    introduce(sys.argv[1])
elif __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], [int(each) for each in sys.argv[4:]])
