"""A training on several hosts whose ranks are killed, and whose hosts are lost, cut off, full,
damaged, stay away and come back, with a mirror that is away at times: what each life resumed, and
whether it could have resumed something newer.

`play` runs one scenario by its seed: some lives, in each of which there may be one trouble, and
after each of which something may happen to the hosts. Ranks and agents are real processes.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import ckptstore
from ckptstore.errors import CkptStoreError
from tests.hosts.field import Field, Place, field_of, forked, root_of
from tests.support.mounts import small_disk_problem
from tests.support.servers.s3 import S3Server

RUN_S = 120.0
HOSTS = 4
STEP_S = 0.05
ANSWER_S = 1.0
"""How long a rank waits for an agent that does not answer."""


@dataclass(frozen=True)
class Life:
    """What the ranks of one life are told: one rank on each of `hosts`."""

    number: int
    folder: Path
    hosts: tuple[int, ...]
    mirror: Place
    attempt: int = 0

    def lines(self, rank: int) -> Path:
        return self.folder / f"lines-{self.number}-{self.attempt}-{rank}"

    @property
    def stop(self) -> Path:
        """Ranks end when it is there."""
        return self.folder / f"stop-{self.number}"


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

    from ckptstore.plugins.hosts import join, peer
    from tests.distributed.layouts import meet

    torch.set_num_threads(1)
    peer.ANSWER_S = peer.CONNECT_S = ANSWER_S
    meeting = f"file://{life.folder / f'meeting-{life.number}-{life.attempt}'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=n)
    meet(n)
    storage = ckptstore.Storage(chunk_bytes=64 << 10)
    warn = ckptstore.Async(on_error="warn")
    try:
        place = join(root_of(life.folder, host))
        with ckptstore.open(
            place, storage=storage, mirror=life.mirror.mirror(), background=warn
        ) as store:
            _train(store, life, rank)
    except CkptStoreError as error:
        tell(life, rank, f"refused {type(error).__name__} 0", str(error))
    else:
        tell(life, rank, "ended - 0")
    dist.barrier()
    os._exit(0)


def _train(store: ckptstore.Store, life: Life, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from tests.distributed.layouts import full, layout, local

    n = len(life.hosts)

    def state(salt: float, step: int) -> dict[str, Any]:
        rows = layout("rows", full() + salt + step, n)
        return {"model": {"rows": rows}, "said": {"salt": salt, "step": step}}

    def goes_on() -> bool:
        flag = torch.tensor([not life.stop.exists()], dtype=torch.int32)
        dist.broadcast(flag, 0)
        return bool(flag)

    target = state(0.0, 0)
    found = store.resume(target)
    said = target["said"]
    wanted = full() + said["salt"] + said["step"] if found else full()
    assert torch.equal(local(target["model"]["rows"]), local(layout("rows", wanted, n)))
    tell(life, rank, f"resumed {found.id if found else '-'} {said['step']}")
    salt = float(1000 * life.number)
    for step in count(said["step"] + 1):
        if not goes_on():
            break
        time.sleep(STEP_S)
        try:
            made = store.commit_async(state(salt, step), step=step).wait(RUN_S)
        except CkptStoreError as error:
            tell(life, rank, f"failed {type(error).__name__} {step}", str(error))
            continue
        tell(life, rank, f"durable {made.id} {step}")
        if rank == 0 and step % 3 == 0 and life.number % 2:
            with suppress(CkptStoreError):  # it deletes nothing where it cannot read all
                store.forget(ckptstore.KeepLast(2))
                store.gc(grace_s=0)


def tell(life: Life, rank: int, line: str, why: str = "") -> None:
    with life.lines(rank).open("a") as lines:
        lines.write(f"{line} {' '.join(why.split())}\n")


def told(life: Life, rank: int, what: str) -> list[tuple[str, int]]:
    try:
        lines = life.lines(rank).read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    words = [line.split(" ", 3) for line in lines]
    return [(said, int(step)) for kind, said, step, _ in words if kind == what]


class Ranks:
    """The processes of a life."""

    def __init__(self, life: Life, where: str) -> None:
        self.life, self._where = life, where
        self.processes = [forked(live, rank, life) for rank in range(len(life.hosts))]

    def all_told(self, *what: str) -> bool:
        ranks = range(len(self.processes))
        return all(any(told(self.life, rank, each) for each in what) for rank in ranks)

    def rows(self, what: str) -> list[tuple[str, int]]:
        return [row for rank in range(len(self.processes)) for row in told(self.life, rank, what)]

    def most(self, what: str) -> int:
        return max(len(told(self.life, rank, what)) for rank in range(len(self.processes)))

    def wait(self, until: Callable[[], bool]) -> None:
        late = time.monotonic() + RUN_S
        while not until():
            assert time.monotonic() < late, f"{self._where}: too slow\n{self.said()}"
            dead = [rank.exitcode for rank in self.processes if rank.exitcode]
            assert not dead, f"{self._where}: {dead}\n{self.said()}"
            time.sleep(0.01)

    def said(self) -> str:
        ranks = range(len(self.processes))
        return "\n".join(
            f"rank {rank}: {line}"
            for rank in ranks
            if self.life.lines(rank).exists()
            for line in self.life.lines(rank).read_text().splitlines()
        )

    def more(self, what: str, count: int) -> None:
        """Wait for so many more."""
        before = self.most(what)
        self.wait(lambda: self.most(what) >= before + count)

    def kill(self) -> None:
        for rank in self.processes:
            rank.kill()
            rank.join()

    def end(self) -> None:
        self.life.stop.touch()
        self.wait(lambda: self.all_told("ended"))
        for rank in self.processes:
            rank.join(RUN_S)


@dataclass(frozen=True)
class Trouble:
    """What may come over a host, or over the mirror, while a life lasts."""

    name: str
    begin: Callable[[Field, int, Random], object]
    """False if it cannot come yet."""
    heal: Callable[[Field, int], None]


TROUBLES = (
    Trouble("silent", lambda at, host, _: at.silence(host), Field.answer),
    Trouble("full", lambda at, host, _: at.fill(host), Field.empty),
    Trouble("damaged", Field.damage, lambda _, __: None),
    Trouble("mirror away", lambda at, _, __: at.part(), lambda at, _: at.meet()),
)


def play(folder: Path, seed: int, lives: int, bucket: S3Server | None = None) -> set[str]:
    """Play the scenario `seed`; returns what happened in it."""
    with field_of(folder, bucket) as field:
        return Scenario(field, seed).play(lives)


class Scenario:
    """The state between lives."""

    def __init__(self, field: Field, seed: int) -> None:
        self.field, self.seed, self.random = field, seed, Random(seed)
        self.hosts = tuple(sorted(self.random.sample(range(HOSTS), self.random.choice((2, 3)))))
        self.least = 0
        """A step that the next life must not fall behind."""
        self.damaged: int | None = None
        """A host with damaged files."""
        self.some_lost = False
        """Perhaps both copies of a pack were lost."""
        self.trouble: tuple[Trouble, int] | None = None
        """What has come over which host, and was not healed."""
        self.stale: Stale | None = None
        """Of the life before."""
        self.happened = set[str]()

    def play(self, lives: int) -> set[str]:
        try:
            for number in range(1, lives + 1):
                self.live(number)
                self.between()
        finally:
            self.end_stale()
        return self.happened

    def live(self, number: int) -> None:
        random, where = self.random, f"seed {self.seed}, life {number}"
        drawn = random.choice((None, *TROUBLES)) if self.trouble is None else None
        if drawn and drawn.name == "full" and small_disk_problem():
            drawn = None
        early = False
        if drawn and random.random() < 0.3:
            early = drawn.name != "damaged"  # the other host may be a new one, which has nothing
        if drawn and early:
            self.field.start(self.hosts)
            self.begin_trouble(drawn)
        if self.field.away and not self.field.proxy:
            self.heal()  # a job that begins cannot tell a mount that is gone from no store yet
            early = False
        ranks = self.begin(number, where)
        try:
            resumed = self.resumed(ranks, where)
            if self.stale:
                self.let_go(resumed)
            if not self.trouble:
                ranks.more("durable", random.randint(1, 2))
            if drawn and not early:
                self.begin_trouble(drawn)
            self.withstand(ranks, fails=drawn is not None and not early)
            if not self.trouble:
                ranks.more("durable", 1)
        finally:
            self.end(ranks)
        durable = ranks.rows("durable")
        self.least = max([resumed, *(step for _, step in durable)])

    def begin_trouble(self, trouble: Trouble) -> None:
        host = self.random.choice(self.hosts)
        if trouble.name == "damaged":
            if self.damaged is not None or self.stale:  # one host at a time
                return
            self.damaged = host
        if trouble.begin(self.field, host, self.random) is not False:
            self.trouble = trouble, host
            self.happened.add(trouble.name)

    def begin(self, number: int, where: str, attempt: int = 0) -> Ranks:
        self.field.start(self.hosts)
        life = Life(number, self.field.folder, self.hosts, self.field.mirror, attempt)
        return Ranks(life, where)

    def resumed(self, ranks: Ranks, where: str) -> int:
        """The step that all ranks resumed. They may be refused where something is wrong, all of
        them, and not once it is right again."""
        ranks.wait(lambda: ranks.all_told("resumed", "refused"))
        if refused := ranks.rows("refused"):
            assert self.trouble, f"{where}: {ranks.said()}"
            assert len({kind for kind, _ in refused}) == 1, f"{where}: {ranks.said()}"
            assert {kind for kind, _ in refused} <= {"Unavailable", "NoSpace"}, ranks.said()
            self.happened.add("refused")
            ranks.kill()
            self.heal()
            again = self.begin(ranks.life.number, where, ranks.life.attempt + 1)
            ranks.life, ranks.processes = again.life, again.processes
            ranks.wait(lambda: ranks.all_told("resumed"))
        found = ranks.rows("resumed")
        assert len(set(found)) == 1, f"{where}: {ranks.said()}"
        step = found[0][1]
        assert step >= self.least, f"{where}: {self.least} could have been\n{ranks.said()}"
        return step

    def withstand(self, ranks: Ranks, *, fails: bool) -> None:
        """Train on while something is wrong, and perhaps until it is right. A join gives a host
        whose agent is silent another one."""
        if self.trouble is None:
            return
        trouble, host = self.trouble
        failed, durable = ranks.most("failed"), ranks.most("durable")
        if trouble.name == "silent" and fails:
            ranks.more("failed", 1)
        elif trouble.name == "full":  # a gc may make room
            ranks.wait(lambda: ranks.most("failed") > failed or ranks.most("durable") > durable + 3)
        else:
            ranks.more("durable", 2)
            assert ranks.most("failed") == failed, f"{trouble.name} {host}: {ranks.said()}"
        if self.random.random() < 0.6:
            self.heal()

    def heal(self) -> None:
        assert self.trouble
        trouble, host = self.trouble
        trouble.heal(self.field, host)
        self.trouble = None

    def end(self, ranks: Ranks) -> None:
        self.end_stale()
        if not self.trouble and self.random.random() < 0.3:
            self.happened.add("ended")
            ranks.end()
            return
        self.happened.add("killed")
        if not self.trouble and len(self.hosts) > 2 and self.random.random() < 0.4:
            self.cut(ranks)
        else:
            ranks.kill()

    def cut(self, ranks: Ranks) -> None:
        """A host and its rank stand still, and the others are given up: the next life begins
        without them."""
        self.happened.add("cut off")
        rank = self.random.randrange(len(self.hosts))
        host = self.hosts[rank]
        os.kill(ranks.processes[rank].pid, signal.SIGSTOP)
        self.field.silence(host)
        for other, process in enumerate(ranks.processes):
            if other != rank:
                process.kill()
                process.join()
        self.stale = Stale(ranks, rank, len(told(ranks.life, rank, "durable")))
        self.hosts = tuple(sorted({*self.hosts} - {host}))

    def let_go(self, resumed: int) -> None:
        """The rank that was cut off goes on, in a job that was given up."""
        assert self.stale
        self.stale = replace(self.stale, next_resumed=None if self.some_lost else resumed)
        self.stale.go_on(self.field)

    def end_stale(self) -> None:
        if self.stale:
            self.stale.end(self.field)
            self.stale = None

    def between(self) -> None:
        """Some hosts are lost, or stay away; others that stayed away may come back with what they
        had, and new ones come with nothing."""
        field, random, one = self.field, self.random, self.random.choice(self.hosts)
        others = [host for host in range(HOSTS) if host not in self.hosts]
        intact, loses = {*self.hosts} - {self.damaged}, True
        leaves_a_log = bool(intact - {one})  # else no host may have all entries intact
        match random.choice(
            ("nothing", "lost", "replaced", "away", "came", "damaged", "partners", "partners")
        ):
            case "lost" as what if leaves_a_log:
                self.lose(one)
            case "replaced" as what if others and leaves_a_log:
                self.hosts = tuple(sorted({*self.hosts, random.choice(others)} - {one}))
            case "away" as what if len(self.hosts) > 2 and leaves_a_log:
                self.hosts = tuple(sorted({*self.hosts} - {one}))
            case "partners" as what if field.newest_of_mirror():  # else nothing is left, and
                gone = {*random.sample(self.hosts, 2)}  # resume says so
                for host in gone if intact - gone else range(HOSTS):  # else a new store begins
                    self.lose(host)
                self.some_lost = True
            case "came" as what if others:
                self.hosts = tuple(sorted({*self.hosts, random.choice(others)}))
                loses = False
            case "damaged" as what if self.damaged is None and not self.stale:
                field.damage(one, random)
                self.damaged, loses = one, False
            case _:
                what, loses = "nothing", False
        if loses and (self.some_lost or self.damaged is not None or self.stale):
            self.some_lost, self.least = True, field.newest_of_mirror()
        self.happened.add(what)

    def lose(self, host: int) -> None:
        if self.trouble and self.trouble[1] == host and self.trouble[0].name != "mirror away":
            self.trouble = None
        if self.stale and self.stale.host == host:
            self.end_stale()
        self.damaged = None if self.damaged == host else self.damaged
        self.field.lose(host)


@dataclass(frozen=True)
class Stale:
    """A rank that was cut off with its host, while the others of its life were given up."""

    ranks: Ranks
    rank: int
    told_before: int
    """So many commits it had acknowledged when it was cut off."""
    next_resumed: int | None = None

    @property
    def host(self) -> int:
        return self.ranks.life.hosts[self.rank]

    def go_on(self, field: Field) -> None:
        field.answer(self.host)
        os.kill(self.ranks.processes[self.rank].pid, signal.SIGCONT)

    def end(self, field: Field) -> None:
        """Nothing that it acknowledged late is lost."""
        self.ranks.kill()
        if self.host in field.agents:
            field.answer(self.host)
        late = told(self.ranks.life, self.rank, "durable")[self.told_before :]
        if self.next_resumed is not None:
            assert all(step <= self.next_resumed for _, step in late), self.ranks.said()
