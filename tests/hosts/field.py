"""Hosts to train on, each with a disk and an agent of its own, and a mirror; what can happen to
them.

A disk is a small one in memory where there may be one, so that it can fill up. The mirror is a
directory, or a bucket behind a proxy.
"""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from secrets import token_hex
from typing import Any

import ckptstore
from ckptstore.core.ids import CONFIG_KEY
from ckptstore.distributed.addresses import listen, own_addresses
from ckptstore.errors import NotFound
from ckptstore.interop.torchft.invitation import Invitation
from ckptstore.plugins.hosts.members import AGENT_NAME, beside, write_agent
from tests.distributed.pool import IMPORTED
from tests.support.mounts import free_bytes, leave_free, small_disk_problem
from tests.support.servers.proxy import Proxy, proxy_to
from tests.support.servers.s3 import S3Server, new_url

DISK_BYTES = 24 << 20
START_S = 60.0
RANKS_IMPORT = [
    "ckptstore.plugins.hosts.agent",
    "ckptstore.plugins.tiers.tiers",
    "tests.hosts.lives",
]


@dataclass(frozen=True)
class Place:
    """Where the mirror is, as a rank comes to it."""

    url: str
    options: Mapping[str, Any] | None = None

    def mirror(self) -> ckptstore.Mirror:
        storage = ckptstore.Storage(options=self.options)
        return ckptstore.Mirror(self.url, every_steps=2, storage=storage)


def disk_of(folder: Path, host: int) -> Path:
    return folder / f"disk-{host}"


def root_of(folder: Path, host: int) -> Path:
    """The directory that the host joins."""
    return disk_of(folder, host) / "run"


@dataclass
class Field:
    """The hosts of one scenario, by number."""

    folder: Path
    mirror: Place
    direct: Place
    """The mirror, also while it is away for ranks."""
    proxy: Proxy | None
    agents: dict[int, Any] = field(default_factory=dict)
    away: bool = False

    def start(self, hosts: tuple[int, ...]) -> None:
        """Give each host a disk and an agent, unless it has them. An agent is forked from a process
        that has imported what it needs; `join` starts one only where this one does not answer."""
        for host in hosts:
            root, disk = root_of(self.folder, host), disk_of(self.folder, host)
            if host in self.agents:
                continue
            if not disk.exists():
                disk.mkdir()
                if not small_disk_problem():
                    size = f"size={DISK_BYTES}"
                    _run("mount", "-t", "tmpfs", "-o", size, "ckptstore-test", str(disk))
            root.mkdir(mode=0o700, exist_ok=True)
            self.agents[host] = forked(serve, root)
        until = time.monotonic() + START_S
        while not all(beside(root_of(self.folder, host), AGENT_NAME).exists() for host in hosts):
            assert time.monotonic() < until, "no agent came up"
            time.sleep(0.005)

    def signal(self, host: int, what: signal.Signals) -> None:
        """To all agents of a host: `join` has started one where the first did not answer."""
        if agent := self.agents.get(host):
            os.kill(agent.pid, what)
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has ended
                if f"\0{root_of(self.folder, host)}\0".encode() in line.read_bytes():
                    os.kill(int(line.parent.name), what)

    def lose(self, host: int) -> None:
        """With its disk, its agent and its caches."""
        self.signal(host, signal.SIGKILL)
        if agent := self.agents.pop(host, None):
            agent.join()
        disk = disk_of(self.folder, host)
        if disk.is_mount():
            _run("umount", "--lazy", str(disk))
        shutil.rmtree(disk, ignore_errors=True)
        shutil.rmtree(self.folder / f"cache-{host}", ignore_errors=True)

    def silence(self, host: int) -> None:
        """Its agent accepts connections, and answers nothing."""
        self.signal(host, signal.SIGSTOP)

    def answer(self, host: int) -> None:
        self.signal(host, signal.SIGCONT)

    def fill(self, host: int) -> None:
        disk = disk_of(self.folder, host)
        while free_bytes(disk):
            with suppress(OSError):  # somebody else took some of it meanwhile
                leave_free(disk, 0)

    def empty(self, host: int) -> None:
        (disk_of(self.folder, host) / "ballast").unlink()

    def damage(self, host: int, random: Random) -> None:
        """Turn a bit in each of some objects of a host: packs, entries, documents."""
        root = root_of(self.folder, host)
        files = sorted(
            path
            for prefix in ("packs", "log", "commits")
            for path in (root / prefix).rglob("*")
            if path.is_file() and path.stat().st_size
        )
        for path in random.sample(files, min(4, len(files))):
            with path.open("r+b") as file:
                file.seek(at := random.randrange(path.stat().st_size))
                byte = file.read(1)[0] ^ 1 << random.randrange(8)
                file.seek(at)
                file.write(bytes([byte]))

    def part(self) -> bool:
        """The mirror does not answer, or is a mount that is gone; False if there is none yet."""
        directory = self.folder / "mirror"
        if self.proxy:
            self.proxy.break_by("refusal")
        elif (directory / CONFIG_KEY).exists():
            directory.rename(self.folder / "mirror-away")
        else:
            return False
        self.away = True
        return True

    def meet(self) -> None:
        """The mirror is back."""
        self.away = False
        if self.proxy:
            self.proxy.heal()
            return
        directory = self.folder / "mirror"
        assert not (directory / CONFIG_KEY).exists(), "a store was made in the mirror's place"
        shutil.rmtree(directory, ignore_errors=True)  # what was on its way
        (self.folder / "mirror-away").rename(directory)

    def newest_of_mirror(self) -> int:
        """The newest step that the mirror has; 0 if it has none."""
        place = self.direct
        url = str(self.folder / "mirror-away") if self.away and not self.proxy else place.url
        storage = ckptstore.Storage(options=place.options)
        try:
            with ckptstore.open(url, create=False, read_only=True, storage=storage) as store:
                return max((info.step or 0 for info in store.log()), default=0)
        except NotFound:
            return 0


@contextmanager
def field_of(folder: Path, bucket: S3Server | None) -> Iterator[Field]:
    """A field without hosts; its mirror is in the bucket if there is one."""
    if bucket is None:
        place = Place(str(folder / "mirror"))
        found = Field(folder, place, place, None)
        yield from _ending(found)
        return
    with proxy_to(bucket.address) as proxy:
        url, there = new_url(), bucket.behind(proxy.endpoint)
        found = Field(
            folder, Place(url, there.options(deadline_s=3)), Place(url, bucket.options()), proxy
        )
        yield from _ending(found)


def _ending(found: Field) -> Iterator[Field]:
    try:
        yield found
    finally:
        for disk in found.folder.glob("disk-*"):
            found.lose(int(disk.name.removeprefix("disk-")))


def serve(root: Path) -> None:
    """The agent of a host."""
    from ckptstore.plugins.hosts.agent import main

    listening = listen()
    addresses = own_addresses(listening.getsockname()[1])
    write_agent(root, Invitation(token_hex(16), token_hex(32), addresses))
    sys.argv = ["agent", str(root), str(listening.detach())]
    main()


def forked(target: Any, *args: Any) -> Any:
    """A process that has imported what ranks and agents need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, *RANKS_IMPORT])
    process = context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
