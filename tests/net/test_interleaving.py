"""At the k-th storage call of one operation, another runs to its end, as from another process or
host: what each commit has stays what was committed."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory, mkdtemp
from threading import Lock, Thread, get_ident
from typing import Any

import pytest

from ckptstore.plugins.buckets.bucket import BucketStorage
from ckptstore.plugins.postgres.log import PostgresLog
from ckptstore.storage.local import LocalStorage
from tests.net import registry
from tests.net.places import PACK_BYTES, Ground, packs_of, shared_directories
from tests.net.registry import Operation, World
from tests.net.upkeep import alarms, collected
from tests.shared.sites import on

OBJECTS = (
    *("read", "read_into", "read_tail", "size", "open_file", "put", "put_new", "create"),
    *("sync_dirs", "delete", "list"),
)
CALLS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (LocalStorage, OBJECTS),
    (BucketStorage, OBJECTS),
    (PostgresLog, ("read", "behind", "create")),
)
"""What is interrupted: the calls of each storage, and those of a log that is in a database."""

MOVING = ("gc", "compact", "thin", "forget")
"""Operations that take away what another has looked up: each runs within another at three moments
for one of the others."""

WORLDS = 4
"""Of each round, which share what it costs to make them."""

PATIENCE_S = 5.0
MEMORY = Path("/dev/shm")


class Interruption:
    """Counts the storage calls of an operation; within the `at`-th runs `other`, on a thread of its
    own. If that waits for a lock of the operation, the operation goes on."""

    def __init__(self, at: int | None, other: Any) -> None:
        self.at, self.other, self.lock = at, other, Lock()
        self.calls: list[str] = []
        self.thread: Thread | None = None
        self.error: BaseException | None = None

    def called(self, name: str, args: Any) -> None:
        folder = args[0].partition("/")[0] if args and isinstance(args[0], str) else ""
        with self.lock:
            self.calls.append(f"{name} {folder}")
            due = len(self.calls) == self.at
        if due:
            self.thread = Thread(target=self.run)
            self.thread.start()
            self.thread.join(PATIENCE_S)

    def run(self) -> None:
        try:
            self.other()
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        if self.thread:
            self.thread.join(60)
            assert not self.thread.is_alive(), "the second operation hangs"
        if self.error:
            raise self.error


@contextmanager
def interrupted(interruption: Interruption) -> Iterator[None]:
    """Storage objects that the watched thread's operation opened count; those of the other do
    not."""
    foreign: dict[int, Any] = {}  # kept: an id is not given twice

    def opening(init: Any) -> Any:
        def opened(self: Any, *args: Any, **options: Any) -> None:
            thread = interruption.thread
            if thread is not None and get_ident() == thread.ident:
                foreign[id(self)] = self
            init(self, *args, **options)

        return opened

    def wrapping(name: str, call: Any) -> Any:
        def wrapped(self: Any, *args: Any, **options: Any) -> Any:
            if id(self) not in foreign:
                interruption.called(name, args)
            return call(self, *args, **options)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for kind, names in CALLS:
            patch.setattr(kind, "__init__", opening(kind.__init__))
            for name in names:
                patch.setattr(kind, name, wrapping(name, getattr(kind, name)))
        yield


def meet(
    world: World, first: Operation, second: Operation, at: int | None, hosts: tuple[Path, Path]
) -> Interruption:
    """`first` on one host, within its `at`-th call `second` on the other."""
    here, there = hosts

    def other() -> None:
        with on(there), world.store.open(threads=1) as store:
            second.act(world, store, 200)

    interruption = Interruption(at, other)
    with on(here), world.store.open(threads=1) as store:
        world.prepared = world.look(store)
        world.prepared.leaves()
        with interrupted(interruption):
            try:
                first.act(world, store, 100)
            finally:
                interruption.end()
    return interruption


def checked(world: World, host: Path, random: Random) -> None:
    """The stores show what was committed, some before a gc and others after it, and nothing in them
    is damaged."""
    for site in [world.store, *([world.mirror] if world.is_mirror_changed() else [])]:
        with site.open(host, create=False, threads=1) as store:
            is_clean = random.random() < 0.5
            collected(store, dry_run=not is_clean)
            for info in store.log():
                world.compare(store.checkout(info.id))
            report = store.fsck(read_data="100%" if random.random() < 0.3 else None)
            found = report.findings if is_clean else alarms(report)
            assert not found, f"{site.place}: {found}"
    for name, tensor in world.held:
        world.compare_state({name: tensor}, 6)


def moment(random: Random, calls: list[str]) -> int:
    """Number of the call within which the other operation runs: in a quarter of the cases the
    first, for which all was looked up before; else one of a kind that is drawn first, since most
    calls of a long operation are of few kinds."""
    if not calls or random.random() < 0.25:
        return 1
    kind = random.choice(sorted(set(calls)))
    return random.choice([at for at, call in enumerate(calls, 1) if call == kind])


class Round:
    """Every ordered pair of operations, those first that take away what another has looked up.

    What is drawn for a pair depends on the seed and on the names alone.
    """

    def __init__(self, seed: int, ground: Ground, folder: Path) -> None:
        self.seed, self.ground, self.folder = seed, ground, folder
        self.worlds: dict[int, World] = {}
        self.calls: dict[tuple[int, str], list[str]] = {}
        self.pack_bytes: dict[int, int | None] = {}
        self.counts = Counter[str]()

    def run(self, until: float, only: str | None = None) -> None:
        pairs = [
            (first, second, draw)
            for first, second in product(registry.OPERATIONS, repeat=2)
            for draw in range(3 if second.name in MOVING else 1)
        ]
        Random(self.seed).shuffle(pairs)
        pairs.sort(key=lambda pair: pair[1].name not in MOVING)
        for first, second, draw in pairs:
            name = f"{first.name} × {second.name}"
            if only in (None, name) and time.monotonic() < until:
                self.pair(name, first, second, Random(f"{self.seed} {name} {draw}"))
        for world in self.worlds.values():
            world.remove()

    def world(self, number: int) -> World:
        if number not in self.worlds:
            random, base = Random(f"{self.seed} {number}"), self.folder / f"{number}"
            self.pack_bytes[number] = random.choice(PACK_BYTES)
            base.mkdir()
            sites = self.ground.drawn(random, base), self.ground.drawn(random, base)
            with on(base / "host"), packs_of(self.pack_bytes[number]):
                self.worlds[number] = World(sites, base, random)
        return self.worlds[number]

    def calls_of(self, number: int, first: Operation) -> list[str]:
        """The storage calls of the operation alone."""
        if (number, first.name) not in self.calls:
            alone, host = self.world(number).copied(), self.folder / f"{number}" / "alone"
            with packs_of(self.pack_bytes[number]):
                self.calls[number, first.name] = meet(alone, first, first, None, (host, host)).calls
            alone.remove()
        return self.calls[number, first.name]

    def pair(self, name: str, first: Operation, second: Operation, random: Random) -> None:
        number = random.randrange(WORLDS)
        world, calls = self.world(number).copied(), self.calls_of(number, first)
        at, one = moment(random, calls), random.random() < 0.4
        hosts = Path(mkdtemp(dir=world.folder))
        here, there = hosts / "here", hosts / ("here" if one else "there")
        kinds = [sites.kind for sites in world.sites]
        try:
            with packs_of(self.pack_bytes[number]):
                meet(world, first, second, at, (here, there))
                checked(world, random.choice((here, there)), random)
        except BaseException as error:
            error.add_note(
                f"{second.name} within call {at} of {len(calls)} of {first.name}, by "
                f"{'the same' if one else 'another'} host; store and mirror: {kinds}, packs of "
                f"{self.pack_bytes[number]} bytes; repeat with "
                f"CKPTSTORE_NET_WORLD={self.seed} CKPTSTORE_NET_PAIR={name!r}"
            )
            raise
        world.remove()
        self.counts["pairs"] += 1
        self.counts[kinds[0]] += 1


@pytest.mark.parametrize("seconds", [18, pytest.param(1800, marks=pytest.mark.soak)])
@pytest.mark.timeout(4 * 3600)
def test_no_pair_of_operations_exchanges_or_loses_bytes(
    seed: int, seconds: float, request: pytest.FixtureRequest
) -> None:
    """A failure names its pair, which runs alone with the variables that it prints."""
    only, pair = os.environ.get("CKPTSTORE_NET_WORLD"), os.environ.get("CKPTSTORE_NET_PAIR")
    until, rounds, counts = time.monotonic() + seconds, 0, Counter[str]()
    ground = Ground(request, with_servers=seconds > 60)
    with shared_directories():
        while time.monotonic() < until and not (only and rounds):
            with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
                one = Round(int(only) if only else seed + rounds, ground, Path(folder))
                one.run(until, pair)
            counts += one.counts
            rounds += 1
    assert counts["pairs"]
    print(f"{rounds} rounds of {len(registry.OPERATIONS)}² pairs from seed {seed}: {dict(counts)}")
