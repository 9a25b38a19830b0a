"""Two hosts commit and collect in one store while network links fail in mid commit: nothing is
lost or torn."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.servers import hosts
from tests.support.servers.hosts import Host, hosts_joined, within
from tests.support.servers.postgres import postgres_server
from tests.support.servers.s3 import moto_server, new_url

SECONDS = float(os.environ.get("CKPTSTORE_TEST_TWO_HOSTS_S", "60"))
DEADLINE_S = 4
END_S = 600.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


class _Campaign:
    """Servers in a namespace of theirs, the store there, and two hosts. Everything else is done by
    processes in these namespaces."""

    def __init__(self, stack: ExitStack, tmp_path: Path, *, database: bool) -> None:
        self.tmp_path, self.place = tmp_path, new_url()
        self.joined = stack.enter_context(hosts_joined(2))
        stack.enter_context(within(self.joined.server.name))
        self._s3 = stack.enter_context(moto_server("0.0.0.0"))
        self._postgres = stack.enter_context(postgres_server(hosts.NETWORK)) if database else None
        self._name = self._postgres.new_database() if self._postgres else ""
        assert self.checked() == set()

    def start(self, host: Host, scenario: str, *given: str) -> "subprocess.Popen[str]":
        """A process on that host, whose lines go to a file."""
        endpoint = f"http://{host.server_address}:{self._s3.address[1]}"
        index = (
            {"index": self._postgres.url(self._name, host=host.server_address)}
            if self._postgres
            else {}
        )
        way = json.dumps(
            {
                "storage_options": replace(self._s3, endpoint=endpoint).options(
                    deadline_s=DEADLINE_S
                ),
                **index,
            }
        )
        environment = {**os.environ, "CKPTSTORE_CACHE": str(self.tmp_path / host.name)}
        with open(self.tmp_path / f"lines-{host.name}", "w", encoding="utf-8") as lines:
            command = host.command(
                sys.executable, "-m", "tests.shared.worker", scenario, self.place, way, *given
            )
            return subprocess.Popen(
                command, stdout=lines, stderr=subprocess.STDOUT, env=environment, text=True
            )

    def said(self, host: Host) -> list[str]:
        return (self.tmp_path / f"lines-{host.name}").read_text(encoding="utf-8").splitlines()

    def run(self, seed: int, *, unplug: bool) -> list[str]:
        """Let both hosts work; what they said."""
        both = self.joined.hosts
        workers = [
            self.start(host, "work", f"host-{number}", str(SECONDS), str(seed))
            for number, host in enumerate(both)
        ]
        try:
            ends = time.monotonic() + SECONDS + END_S
            while any(worker.poll() is None for worker in workers):
                assert time.monotonic() < ends, "a host does not come to its end"
                if unplug:
                    self._unplug_once()
                else:
                    time.sleep(0.2)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        assert [worker.returncode for worker in workers] == [0, 0], [
            self.said(host)[-15:] for host in both
        ]
        return [line for host in both for line in self.said(host)]

    def _unplug_once(self) -> None:
        host = random.choice(self.joined.hosts)
        time.sleep(random.uniform(1.0, 4.0))
        host.unplug()
        time.sleep(random.uniform(0.5, 3.0 * DEADLINE_S))
        host.plug()

    def check(self, said: list[str]) -> None:
        """What was acknowledged and kept is there, and whatever is there is whole."""
        kept = {int(line.split()[1]) for line in said if line.startswith("kept ")}
        assert (
            kept
            and any(line == "collected" for line in said)
            and any(line == "restored" for line in said)
        )
        assert kept <= self.checked()
        counts = {
            word: sum(line.startswith(word) for line in said)
            for word in ("committed", "kept", "restored", "collected", "away")
        }
        print(counts)

    def checked(self) -> set[int]:
        """The steps that are kept, once all that is there was found whole."""
        checker = self.start(self.joined.server, "check")
        try:
            assert checker.wait(END_S) == 0, self.said(self.joined.server)[-15:]
        finally:
            checker.kill()
            checker.wait()
        return {int(line.split()[1]) for line in self.said(self.joined.server)}


@pytest.fixture(params=["bucket", "bucket and PostgreSQL"])
def campaign(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[_Campaign]:
    if reason := hosts.problem():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield _Campaign(stack, tmp_path, database=request.param != "bucket")


def test_two_hosts_commit_and_collect_in_one_store(campaign: _Campaign, seed: int) -> None:
    campaign.check(campaign.run(seed, unplug=False))


def test_a_host_whose_cable_is_unplugged_in_mid_commit_commits_whole_or_not_at_all(
    campaign: _Campaign, seed: int
) -> None:
    said = campaign.run(seed, unplug=True)
    assert any(line.startswith("away ") for line in said)
    campaign.check(said)
