"""How many requests does a restart of ranks on a bucket take, counted on the wire?

Buckets throttle lists first (mlcommons/storage#667 has 512 ranks), so a restart lists nothing, with
any number of ranks: not to open the store on hosts without a cache, and not to restore. A rank
reads the log and the metadata itself. The ranks read each chunk of a tensor once in all.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptstore import Ranks
from tests.distributed.layouts import group_of, meet
from tests.distributed.pool import Pool
from tests.shared.sites import Site
from tests.support.servers.proxy import Proxy, proxy_to
from tests.support.servers.s3 import S3Server, new_url

COMMITS = 7
LISTS = re.compile(rb"GET [^ ]*list-type=2")
OF_A_RANK = 45
"""Reads that one more rank adds, on a host of its own. 37 were measured. A rank that reads all
tensors itself adds as many again."""


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    with proxy_to(s3.address) as proxy:
        yield proxy


@pytest.fixture
def asked(proxy: Proxy) -> list[bytes]:
    """The first line of each request that reads, since the list was emptied."""
    found: list[bytes] = []

    def note(data: bytes) -> bytes:
        if data.startswith((b"GET ", b"HEAD ")):
            found.append(data.partition(b"\r\n")[0])
        return data

    proxy.faults.rewrite = note
    return found


def state_of(step: int) -> dict[str, Any]:
    return {"model": {str(i): torch.full((40_000,), float(step + i)) for i in range(24)}}


def restart(rank: int, site: Site, ranks: int, folder: Path) -> bool:
    """Whether the newest commit came back, on a host of its own that has no cache."""
    meet(ranks)
    if rank >= ranks:
        return True
    state = state_of(-100)
    with site.open(folder / str(rank)) as store:
        found = store.resume(state, ranks=Ranks(process_group=group_of(ranks)))
        assert found is not None and found.step == COMMITS - 1
    wanted = state_of(COMMITS - 1)["model"]
    return all(torch.equal(value, wanted[name]) for name, value in state["model"].items())


def test_ranks_that_restart_list_nothing(
    pool: Pool, s3: S3Server, proxy: Proxy, asked: list[bytes], tmp_path: Path
) -> None:
    site = Site(new_url(), s3.behind(proxy.endpoint).options())
    with site.open(tmp_path / "writer") as store:
        for step in range(COMMITS):
            store.commit(state_of(step), step=step)
    assert any(map(LISTS.match, asked)), "the writer lists, so lists are seen here"
    gets: dict[int, int] = {}
    for ranks in (1, 2, 4):
        asked.clear()
        assert all(pool.run(restart, site, ranks, tmp_path / f"of {ranks}"))
        lists = [line for line in asked if LISTS.match(line)]
        assert not lists, f"{ranks} ranks listed: {lists}"
        gets[ranks] = sum(line.startswith(b"GET ") for line in asked)
    assert gets[4] - gets[2] <= 2 * OF_A_RANK, gets
