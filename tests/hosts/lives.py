"""A training on several hosts, each with a directory and an agent of its own, whose ranks are
killed, and whose hosts are lost, damaged, stay away and come back, with a mirror: what each life
resumed, and whether it could have resumed something newer.

`play` runs one scenario by its seed. Ranks and agents are real processes; hosts are directories.
"""

import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import ckptstore
from ckptstore.errors import Corrupt, NotFound
from tests.distributed.pool import IMPORTED

RUN_S = 120.0
HOSTS = 4


@dataclass(frozen=True)
class Life:
    """What the ranks of one life are told: one rank on each of `hosts`."""

    number: int
    folder: Path
    hosts: tuple[int, ...]
    steps: int
    some_lost: bool
    """Perhaps both copies of a pack were lost."""


def live(rank: int, life: Life) -> None:
    """Join, resume, check, commit; each rank tells in a file of its own."""
    host, n = life.hosts[rank], len(life.hosts)
    os.environ |= {
        "CKPTSTORE_THREADS": "2",
        "CKPTSTORE_HOST": f"host-{host}",
        "CKPTSTORE_CACHE": str(life.folder / f"cache-{host}"),
    }
    import torch
    import torch.distributed as dist

    from ckptstore.plugins.hosts import join
    from tests.distributed.layouts import full, layout, local, meet

    torch.set_num_threads(1)
    at = life.folder
    meeting = f"file://{at / f'meeting-{life.number}'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=n)
    meet(n)

    def state(salt: float, step: int) -> dict[str, Any]:
        rows = layout("rows", full() + salt + step, n)
        return {"model": {"rows": rows}, "said": {"salt": salt, "step": step}}

    storage = ckptstore.Storage(chunk_bytes=64 << 10)
    mirror = ckptstore.Mirror(at / "mirror", every_steps=2)
    with ckptstore.open(join(at / str(host)), storage=storage, mirror=mirror) as store:
        target = state(0.0, 0)
        found = store.resume(target)
        said = target["said"]
        wanted = full() + said["salt"] + said["step"] if found else full()
        assert torch.equal(local(target["model"]["rows"]), local(layout("rows", wanted, n)))
        tell(at, rank, f"resumed {found.id if found else '-'} {said['step']}")
        salt = float(1000 * life.number)
        for step in range(said["step"] + 1, said["step"] + 1 + life.steps):
            made = store.commit_async(state(salt, step), step=step).wait(RUN_S)
            tell(at, rank, f"durable {made.id} {step}")
            if rank == 0 and step % 3 == 0 and life.number % 2:
                store.forget(ckptstore.KeepLast(2))
                with suppress(Corrupt) if life.some_lost else nullcontext():
                    store.gc(grace_s=0)  # it deletes nothing where it cannot read all that is kept
        dist.barrier()
    tell(at, rank, "ended - 0")
    dist.barrier()
    os._exit(0)


def tell(at: Path, rank: int, line: str) -> None:
    with (at / f"lines-{rank}").open("a") as lines:
        lines.write(f"{line}\n")


def told(at: Path, rank: int, what: str) -> list[tuple[str, int]]:
    try:
        lines = (at / f"lines-{rank}").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    words = [line.split() for line in lines]
    return [(commit, int(step)) for kind, commit, step in words if kind == what]


def play(folder: Path, seed: int, lives: int) -> set[str]:
    """Play the scenario `seed`; returns what happened in it."""
    try:
        return _play(folder, seed, lives)
    finally:
        for host in range(HOSTS):
            lose(folder, host)  # its agent ends


def _play(folder: Path, seed: int, lives: int) -> set[str]:
    random, happened = Random(seed), set[str]()
    hosts: tuple[int, ...] = tuple(sorted(random.sample(range(HOSTS), random.choice((2, 3)))))
    least = 0  # a step that the next life must not fall behind
    damaged: int | None = None
    some_lost = False
    for number in range(1, lives + 1):
        for lines in folder.glob("lines-*"):
            lines.unlink()
        killed = random.random() < 0.7
        steps = 1000 if killed else random.randint(2, 4)
        life = Life(number, folder, hosts, steps, some_lost)
        begun = begin(life)
        aim = random.randint(1, 4)
        until = time.monotonic() + RUN_S
        try:
            while not done(folder, len(hosts), aim if killed else None):
                assert time.monotonic() < until, f"seed {seed}, life {number}: too slow"
                assert all(rank.exitcode in (None, 0) for rank in begun), (seed, number)
                time.sleep(0.01)
        finally:
            for rank in begun:
                rank.kill() if killed else rank.join(RUN_S)
                rank.join()
        resumed = [told(folder, rank, "resumed")[0] for rank in range(len(hosts))]
        assert len(set(resumed)) == 1, (seed, number, resumed)
        assert resumed[0][1] >= least, f"seed {seed}, life {number}: {least}, {resumed[0]}"
        durable = [row for rank in range(len(hosts)) for row in told(folder, rank, "durable")]
        least = max(step for _, step in durable)
        hosts, what, damaged = next_hosts(folder, hosts, damaged, random)
        if what == "partners" or (what != "damaged" and damaged in hosts):
            some_lost, least = True, newest_of_mirror(folder)  # some chunks may be nowhere else
        happened |= {what, "killed" if killed else "ended"}
    return happened


def newest_of_mirror(folder: Path) -> int:
    """The newest step that the mirror has; 0 if it has none."""
    try:
        with ckptstore.open(folder / "mirror", create=False, read_only=True) as store:
            return max((info.step or 0 for info in store.log()), default=0)
    except NotFound:
        return 0


def begin(life: Life) -> Sequence[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    ranks = [
        context.Process(target=live, args=(rank, life), daemon=True)
        for rank in range(len(life.hosts))
    ]
    for rank in ranks:
        rank.start()
    return ranks


def done(folder: Path, ranks: int, steps: int | None) -> bool:
    if steps is None:
        return all(told(folder, rank, "ended") for rank in range(ranks))
    return any(len(told(folder, rank, "durable")) >= steps for rank in range(ranks))


def next_hosts(
    folder: Path, hosts: tuple[int, ...], damaged: int | None, random: Random
) -> tuple[tuple[int, ...], str, int | None]:
    """The hosts of the next life, what happened to those of the last one, and the host that has
    damaged files. Some are lost, or stay away; others that stayed away may come back with what they
    had, and new ones come with nothing."""
    one = random.choice(hosts)
    others = [host for host in range(HOSTS) if host not in hosts]
    match random.choice(
        ("nothing", "lost", "replaced", "away", "came", "damaged", "partners", "partners")
    ):
        case "lost":
            lose(folder, one)
            return hosts, "lost", None if one == damaged else damaged
        case "replaced" if others:
            return tuple(sorted({*hosts, random.choice(others)} - {one})), "replaced", damaged
        case "away" if len(hosts) > 2:
            return tuple(sorted({*hosts} - {one})), "away", damaged
        case "came" if others:
            return tuple(sorted({*hosts, random.choice(others)})), "came", damaged
        case "partners" if newest_of_mirror(folder):  # else nothing is left, and resume says so
            gone = random.sample(hosts, 2)
            for host in gone if len(hosts) > 2 else range(HOSTS):  # else a new store begins
                lose(folder, host)
            return hosts, "partners", damaged
        case "damaged" if damaged is None:
            damage(folder / str(one), random)
            return hosts, "damaged", one
    return hosts, "nothing", damaged


def lose(folder: Path, host: int) -> None:
    for name in (f"{host}", f"{host}.hosts", f"cache-{host}"):
        shutil.rmtree(folder / name, ignore_errors=True)


def damage(root: Path, random: Random) -> None:
    """Turn a bit in each of some objects of a host: packs, entries, documents."""
    files = sorted(
        path
        for prefix in ("packs", "log", "commits")
        for path in (root / prefix).rglob("*")
        if path.is_file() and path.stat().st_size
    )
    for path in random.sample(files, min(4, len(files))):
        data = bytearray(path.read_bytes())
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        path.write_bytes(data)
