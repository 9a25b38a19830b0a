"""What a commit to the memory of several hosts costs a step, and what a restart reads from its own
host, from a partner and from the bucket behind: `python -m benchmarks.hosts`.

Each host is a network namespace with one rank, a directory in memory and an agent. All have a cable
of 10 Gbit/s to one switch; the bucket (moto) is a host with a cable of 1 Gbit/s. Without root, `ip`
or `tc` the hosts are directories, and no link is slower than memory. All share the processors of
this machine, so what plain TCP carries is measured, too. Each start of the training is made of new
processes, which are killed. Times are those of the slowest rank; all of a round alternate.
"""

import argparse
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist

import ckptstore
from benchmarks.links import NoLink, network
from benchmarks.notes import COPY, HELD, Notes, show, slowest
from ckptstore import Async, KeepLast, Mirror, Storage
from ckptstore.plugins.hosts import join
from tests.distributed.layouts import mesh_of
from tests.distributed.pool import IMPORTED
from tests.support.servers.hosts import CABLE, Host, within
from tests.support.servers.s3 import S3Server, moto_server, new_url

FAST, SLOW = "10gbit", "1gbit"
ANSWER_S = 120
ALONE, AT_ONCE, DURABLE = (
    "plain TCP to one host",
    "plain TCP, all hosts at once",
    "durable on two hosts",
)
OWN, REPLACED, BUCKET = "own host", "one host is new", "all hosts are new"


@dataclass(frozen=True, slots=True)
class Life:
    """What the ranks of one start are told."""

    number: int
    folder: Path
    hosts: tuple[Host, ...]
    """Empty if hosts are directories."""
    ranks: int
    nbytes: int
    """Of the part of a rank."""
    url: str
    options: dict[str, Any]
    resumes: str
    """What it resumes; it trains if that is nothing."""


class Rank:
    """One rank of a life, alone on its host."""

    def __init__(self, rank: int, life: Life) -> None:
        from torch.distributed.tensor import DTensor, Shard

        self.rank, self.life, self.notes = rank, life, Notes()
        self.own = life.folder / str(rank)
        torch.manual_seed(1000 * life.number + rank)
        self.part = torch.randn(life.nbytes // 4)
        self.into = torch.ones_like(self.part)  # memory that was touched
        mesh = mesh_of(life.ranks, False)
        rows, back = (
            DTensor.from_local(each, mesh, (Shard(0),), run_check=False)
            for each in (self.part, self.into)
        )
        self._state, self._target = {"model": {"rows": rows}}, {"model": {"rows": back}}

    def opened(self, name: str = "") -> ckptstore.Store:
        dist.barrier()
        place = self.notes.time(f"join, {name}", lambda: join(self.own)) if name else join(self.own)
        storage = Storage(options=self.life.options)
        mirror = Mirror(self.life.url, keep_local=KeepLast(2), storage=storage, every_steps=1000)
        background = Async(staging_bytes=4 * self.life.nbytes)
        return ckptstore.open(place, mirror=mirror, background=background)

    def resumed(self, store: ckptstore.Store, name: str) -> None:
        dist.barrier()
        self.notes.time(f"resume, {name}", lambda: store.resume(self._target))
        assert torch.equal(self.into, self.part)

    def train(self) -> None:
        random = self.part.clone()
        with self.opened() as store:
            self.part.zero_()
            store.commit_async(self._state, step=0).wait()  # makes staging memory, and few bytes
            for step in (1, 2, 3):
                dist.barrier()
                self.notes.time(COPY, lambda: self.into.copy_(self.part))
                dist.barrier()
                self.notes.commit(store, self._state, step)
            self.part.copy_(random)
            del random
            before, began = pss_bytes(os.getpid()), agent_cpu_s(self.own)
            for name, senders in ((ALONE, range(1)), (AT_ONCE, range(self.life.ranks))):
                self.send_plainly(name, senders)
            dist.barrier()
            self.notes.commit(store, self._state, 4, DURABLE)
            self.notes.add(f"{DURABLE}, CPU of the agent", agent_cpu_s(self.own) - began)
            tier = sum(path.stat().st_blocks for path in self.own.rglob("*")) * 512
            self.notes.add("bytes, tier", tier)
            self.notes.add("bytes, agent", pss_bytes(agent_of(self.own)))
            self.notes.add("bytes, rank", pss_bytes(os.getpid()) - before)
            store.resume(self._target)
            self.into.zero_()
            self.resumed(store, "warm")
            assert store.flush_mirror(ANSWER_S)
        if nvrx := self.nvrx():
            for name, act in (
                ("NVRx, step held by replicate", nvrx.replicate),
                ("NVRx, saved on two hosts", partial(nvrx.save, step=1)),
            ):
                dist.barrier()
                self.notes.time(name, partial(act, self.part))

    def resume(self) -> None:
        with self.opened(self.life.resumes) as store:
            self.resumed(store, self.life.resumes)
        if self.life.resumes == OWN and (nvrx := self.nvrx()):
            self.into.zero_()
            dist.barrier()
            self.notes.time(f"NVRx, {self.life.resumes}", lambda: nvrx.load(self.into))
            assert torch.equal(self.into, self.part)

    def nvrx(self) -> Any:
        """NVRx's manager, if it is installed and has a partner for each host."""
        if not find_spec("nvidia_resiliency_ext") or self.life.ranks % 2:
            return None
        from benchmarks.nvrx import Manager

        return Manager(self.life.folder / f"nvrx-{self.rank}")

    def send_plainly(self, name: str, senders: Sequence[int]) -> None:
        """Send the part to the next host over TCP, as the ranks `senders` do."""
        after, before = ((self.rank + each) % self.life.ranks for each in (1, -1))
        listening = socket.create_server(("", 0))
        address = self.life.hosts[self.rank].address if self.life.hosts else "127.0.0.1"
        places: list[Any] = [None] * self.life.ranks
        dist.all_gather_object(places, (address, listening.getsockname()[1]))
        receiver = threading.Thread(target=receive, args=(listening, self.into))
        if before in senders:
            receiver.start()

        def send() -> None:
            if self.rank in senders:
                with socket.create_connection(places[after]) as connection:
                    connection.sendall(bytes_of(self.part))
            if before in senders:
                receiver.join()

        dist.barrier()
        self.notes.time(name, send)
        listening.close()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    memory: Any = tensor.numpy()
    return memoryview(memory).cast("B")


def receive(listening: socket.socket, into: torch.Tensor) -> None:
    with listening.accept()[0] as connection:
        view = bytes_of(into)
        while view.nbytes:
            view = view[connection.recv_into(view, min(view.nbytes, 1 << 20)) :]


def agent_of(root: Path) -> int:
    """The process of a host's agent."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"ckptstore.plugins.hosts" in words and str(root).encode() in words:
                return int(process.name)
    raise LookupError(f"{root} has no agent")


def agent_cpu_s(root: Path) -> float:
    user, system = (
        Path(f"/proc/{agent_of(root)}/stat").read_text().rpartition(")")[2].split()[11:13]
    )
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def pss_bytes(process: int) -> int:
    """The memory of a process, with its share of what it shares, but without mapped files."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:")) << 10


def live(rank: int, life: Life, pipe: Connection) -> None:
    """Be a rank until killed."""
    with within(life.hosts[rank].name) if life.hosts else nullcontext():
        os.environ |= {
            "CKPTSTORE_THREADS": "2",
            "CKPTSTORE_HOST": f"host-{rank}",
            "CKPTSTORE_CACHE": str(life.folder / f"cache-{rank}"),
            **({"GLOO_SOCKET_IFNAME": CABLE} if life.hosts else {}),
        }
        torch.set_num_threads(1)
        meeting = f"file://{life.folder / f'meeting-{life.number}-{life.resumes}'}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=life.ranks)
        one = Rank(rank, life)
        one.resume() if life.resumes else one.train()
        pipe.send(one.notes.found)
        signal.pause()


def lived(life: Life) -> dict[str, list[float]]:
    """What the ranks of a life measured. All are killed at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    ranks, pipes = [], []
    try:
        for rank in range(life.ranks):
            ours, theirs = context.Pipe()
            process: Any = context.Process(target=live, args=(rank, life, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.append(process)
            pipes.append(ours)
        if not all(pipe.poll(ANSWER_S) for pipe in pipes):
            raise TimeoutError(f"a rank did not answer within {ANSWER_S} s")
        return slowest([pipe.recv() for pipe in pipes])
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()


def lose(folder: Path, hosts: Sequence[int]) -> None:
    """Each agent ends with its directory."""
    for host in hosts:
        for name in (f"{host}", f"{host}.hosts", f"cache-{host}", f"nvrx-{host}"):
            shutil.rmtree(folder / name, ignore_errors=True)


@contextmanager
def bucket(hosts: Sequence[Host]) -> Iterator[S3Server]:
    """A bucket on the last host, if there is one."""
    with ExitStack() as stack:
        if not hosts:
            yield stack.enter_context(moto_server())
            return
        with within(hosts[-1].name):
            server = stack.enter_context(moto_server("0.0.0.0"))
        yield server.behind(f"http://{hosts[-1].address}:{server.address[1]}")


@contextmanager
def site(count: int) -> Iterator[tuple[Host, ...]]:
    """So many hosts, and one for the bucket; none, where there is no way to make them."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(network(*[FAST] * count, SLOW))
        except NoLink as error:
            print(f"hosts are directories: {error}")
            hosts = ()
        yield hosts


def report(found: dict[str, list[float]], ranks: int, nbytes: int) -> None:
    show({name: values for name, values in found.items() if "bytes" not in name}, nbytes)
    of = {name: median(values) for name, values in found.items()}
    tier, agent, rank = (of[f"bytes, {name}"] for name in ("tier", "agent", "rank"))
    alone, replaced = of[ALONE], of[f"join, {REPLACED}"] + of[f"resume, {REPLACED}"]
    away = of[f"join, {BUCKET}"] + of[f"resume, {BUCKET}"]
    print(
        f"held / memcpy {of[HELD] / of[COPY]:.2f}; durable / plain TCP, all at once "
        f"{of[DURABLE] / of[AT_ONCE]:.2f}; warm / own host "
        f"{of['resume, warm'] / of[f'resume, {OWN}']:.2f}; two parts over plain TCP / join of a "
        f"new host {2 * alone / of[f'join, {REPLACED}']:.2f}; bucket / one new host "
        f"{away / replaced:.1f}\n"
        f"memory of a host: tier {tier / nbytes / 2:.3f} of own and copy, agent "
        f"{agent / 1e6:.0f} MB, rank {rank / 1e6:+.0f} MB while {ranks} ranks of "
        f"{nbytes / 1e6:.0f} MB commit"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=64, help="of each host")
    parser.add_argument("--rounds", type=int, default=3, help="after one that does not count")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began, count = time.monotonic(), asked.hosts
    nbytes, found = asked.megabytes << 20, dict[str, list[float]]()
    folder = Path(mkdtemp(dir="/dev/shm", prefix="hosts-"))
    try:
        with site(count) as hosts, bucket(hosts) as server:
            for number in range(asked.rounds + 1):
                url = new_url()
                for name, lost in (("", ()), (OWN, ()), (REPLACED, (1,)), (BUCKET, range(count))):
                    lose(folder, lost)
                    life = Life(
                        *(number, folder, hosts[:count], count, nbytes, url, server.options(), name)
                    )
                    for what, values in lived(life).items():
                        found.setdefault(what, []).extend(values if number else [])
                lose(folder, range(count))
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(found, count, nbytes)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
