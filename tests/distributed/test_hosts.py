"""Ranks on two hosts share a directory and have separate caches: they commit and restore, and one
host survives the other.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import ckptstore
from tests.distributed.layouts import full
from tests.support import mounts
from tests.support.mounts import shared_directory
from tests.support.servers import hosts
from tests.support.servers.hosts import CABLE, Host, hosts_joined

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

PER_HOST = 2


class _Job:
    """Four ranks, two on each host."""

    def __init__(self, stack: ExitStack, tmp_path: Path) -> None:
        self._folder = tmp_path
        site = stack.enter_context(hosts_joined(2))
        self.hosts, self._meeting = site.hosts, site.server
        self._places = stack.enter_context(shared_directory(tmp_path / "shared", 2))
        self.ranks: list[subprocess.Popen[str]] = []
        self._meeting_point: subprocess.Popen[str] | None = None
        stack.callback(self._end)

    def start(self, lost: list[int]) -> None:
        address = self._meeting.address
        self._meeting_point = self._run(self._meeting, address)
        assert self._meeting_point.stdout and self._meeting_point.stdout.readline() == "ready\n"
        for rank in range(2 * PER_HOST):
            host, place = self.hosts[rank // PER_HOST], self._places[rank // PER_HOST]
            self.ranks.append(
                self._run(host, str(rank), address, str(place / "store"), *map(str, lost))
            )

    def _run(self, host: Host, *words: str) -> "subprocess.Popen[str]":
        command = host.command(sys.executable, "-m", "tests.distributed.rank_of_host", *words)
        environment = {
            **os.environ,
            "CKPTSTORE_CACHE": str(self._folder / host.name),
            "GLOO_SOCKET_IFNAME": CABLE,
        }
        return subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def said(self, rank: int) -> list[str]:
        """The words of a rank's next line."""
        out = self.ranks[rank].stdout
        assert out
        return str(out.readline()).split()

    def lose(self, host: Host) -> None:
        """Stop a host's processes without closing their connections."""
        host.unplug()
        first = self.hosts.index(host) * PER_HOST
        for rank in self.ranks[first : first + PER_HOST]:
            rank.kill()
            rank.wait()

    def go_on(self, rank: int) -> None:
        into = self.ranks[rank].stdin
        assert into
        into.write("\n")
        into.flush()

    def _end(self) -> None:
        for process in (*self.ranks, *([self._meeting_point] if self._meeting_point else ())):
            process.kill()
            process.communicate()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[_Job]:
    if reason := hosts.problem() or mounts.shared_directory_problem():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield _Job(stack, tmp_path)


@pytest.mark.parametrize(
    ("lost", "left", "blamed"),
    [([2, 3], [0, 1], ["2", "3"]), ([0, 1], [2, 3], ["0"])],
    ids=["a host", "the coordinator's"],
)
def test_when_a_host_is_lost_the_ranks_of_the_other_go_on(
    job: _Job, tmp_path: Path, lost: list[int], left: list[int], blamed: list[str]
) -> None:
    """The survivors know only of the coordinator's silence: it alone listens to all ranks."""
    job.start(lost)
    committed = [job.said(rank) for rank in range(4)]
    assert len({commit for _, commit in committed}) == 1
    caches = [
        sorted(path.name for path in (tmp_path / host.name).rglob("chunks")) for host in job.hosts
    ]
    assert all(caches), "each host keeps an index of its own"
    job.lose(job.hosts[lost[0] // PER_HOST])
    for rank in left:
        job.go_on(rank)
    for rank in left:
        assert job.said(rank) == ["raised", *blamed]
    went_on = [job.said(rank) for rank in left]
    assert went_on[0][:2] == ["went", "on"] and went_on[0] == went_on[1]
    assert [job.ranks[rank].wait() for rank in left] == [0, 0]
    with ckptstore.open(tmp_path / "shared" / "store") as store:
        assert [info.step for info in store.log()] == [2, 1]
        assert torch.equal(store.checkout(2).read("model/rows"), full())
        assert not store.fsck(read_data="100%").findings
