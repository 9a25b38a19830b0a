"""At the k-th storage call of one operation, another runs to its end, as from another host: what
each commit has stays what was committed."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from shutil import copytree
from tempfile import TemporaryDirectory
from threading import Lock, Thread, get_ident
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.storage.local import LocalStorage
from tests.net import registry
from tests.net.registry import Operation, World

CALLS = (
    *("read", "read_into", "read_tail", "size", "open_file", "put", "put_new", "create"),
    *("sync_dirs", "delete", "list"),
)
BLOCK = 1 << 14
PATIENCE_S = 5.0
MEMORY = Path("/dev/shm")


class Interruption:
    """Counts the storage calls of an operation; within the `at`-th runs `other`, on a thread of its
    own. If that waits for a lock of the operation, the operation goes on."""

    def __init__(self, at: int | None, other: Any) -> None:
        self.at, self.other, self.lock = at, other, Lock()
        self.count, self.where = 0, ""
        self.thread: Thread | None = None
        self.own: set[int] = set()
        self.result: Any = None
        self.error: BaseException | None = None

    def called(self, name: str, storage: Any, foreign: set[int], args: Any) -> None:
        if id(storage) in foreign:
            return
        with self.lock:
            self.count += 1
            due = self.count == self.at
        if due:
            self.where = f"{name} {args[0] if args and isinstance(args[0], str) else ''}"
            self.thread = Thread(target=self.run)
            self.thread.start()
            self.thread.join(PATIENCE_S)

    def run(self) -> None:
        try:
            self.result = self.other()
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
    foreign: set[int] = set()
    before = {name: getattr(LocalStorage, name) for name in CALLS}
    init = LocalStorage.__init__

    def opened(self: Any, *args: Any, **options: Any) -> None:
        thread = interruption.thread
        if thread is not None and get_ident() == thread.ident:
            foreign.add(id(self))
            registry_of_storages.append(self)
        init(self, *args, **options)

    registry_of_storages: list[Any] = []  # kept: an id is not given twice

    def wrapping(name: str) -> Any:
        call = before[name]

        def wrapped(self: Any, *args: Any, **options: Any) -> Any:
            interruption.called(name, self, foreign, args)
            return call(self, *args, **options)

        return wrapped

    try:
        LocalStorage.__init__ = opened  # type: ignore[method-assign]
        for name in CALLS:
            setattr(LocalStorage, name, wrapping(name))
        yield
    finally:
        LocalStorage.__init__ = init  # type: ignore[method-assign]
        for name, call in before.items():
            setattr(LocalStorage, name, call)


def contents(random: Random, blocks: list[torch.Tensor], number: int) -> dict[str, Any]:
    """Tensors of blocks that other commits have too, in other places, and now and then of one that
    nobody else has."""
    x, y = (torch.cat(random.choices(blocks, k=count)) for count in (3, 2))
    state: dict[str, Any] = {"x": x, "tie": x, "y": y, "n": number}
    if random.random() < 0.6:
        state["own"] = torch.full((BLOCK + 5,), random.random())
    return state


def made(folder: Path, random: Random) -> World:
    """Six commits, of which the newest may have no chunk of its own, and a mirror with some."""
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    blocks = [torch.rand(BLOCK, generator=generator) for _ in range(random.randint(3, 6))]
    states = {step: contents(random, blocks, step) for step in range(1, 7)}
    for step in (5, 6):
        states[step].pop("own", None)
    coming = {step: contents(random, blocks, step) for step in (100, 200)}
    storage = ckptstore.Storage(chunk_bytes=1 << 16)
    with ckptstore.open(folder / "store", storage=storage, threads=1) as store:
        for step, state in states.items():
            store.commit(state, step=step)
            if step == 3 and random.random() < 0.7:
                store.push(folder / "mirror", create=True)
        if not (folder / "mirror").exists():
            store.push(folder / "mirror", 6, create=True)
    return World(folder, states, coming)


def step_of(world: World, first: Operation, second: Operation, at: int | None) -> Interruption:
    """`first` on this host, `second` within its `at`-th call on another."""

    def other() -> None:
        with ckptstore.open(world.store, threads=1) as store:
            second.act(world, store, 200)

    interruption = Interruption(at, other)
    with ckptstore.open(world.store, threads=1) as store:
        prepared = store.checkout(6)
        prepared.leaves()
        with interrupted(interruption):
            world.prepared = prepared
            try:
                first.act(world, store, 100)
            finally:
                interruption.end()
    return interruption


def checked(world: World) -> None:
    """Both stores show what was committed, and nothing in them is damaged."""
    for place in (world.store, world.mirror):
        with ckptstore.open(place, create=False, threads=1) as store:
            for info in store.log():
                world.compare(store.checkout(info.id))
            findings = store.fsck(read_data="100%").findings
            assert not findings, f"{place.name}: {findings}"
            store.gc(grace_s=0, max_unused=0.0)
            for info in store.log():
                world.compare(store.checkout(info.id))


def draw(base: Path, seed: int, counts: Counter[str]) -> None:
    """One world, and some pairs of operations at some call in it."""
    random = Random(seed)
    world = made(base / "made", random)
    for number in range(8):
        first, second = random.choice(registry.OPERATIONS), random.choice(registry.OPERATIONS)
        calls = step_of(world.at(copied(base, f"{number}-alone")), first, second, None).count
        at = random.randint(1, max(calls, 1))
        steps = f"{first.name}, at call {at} of {calls} {second.name}"
        there = world.at(copied(base, f"{number}"))
        try:
            step_of(there, first, second, at)
            checked(there)
        except BaseException as error:
            error.add_note(f"world of seed {seed}, pair {number}: {steps}")
            raise
        counts["pairs"] += 1
        counts[f"{first.name} × {second.name}"] += 1


def copied(base: Path, name: str) -> Path:
    copytree(base / "made", base / name, symlinks=True)
    return base / name


@pytest.mark.parametrize("seconds", [12, pytest.param(1800, marks=pytest.mark.soak)])
@pytest.mark.timeout(4 * 3600)
def test_no_pair_of_operations_exchanges_or_loses_bytes(
    seed: int, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure names its world: CKPTSTORE_NET_WORLD=N makes that one alone."""
    monkeypatch.setenv("CKPTSTORE_CACHE", str(tmp_path / "cache"))
    only = os.environ.get("CKPTSTORE_NET_WORLD")
    begun, counts, number = time.monotonic(), Counter[str](), 0
    while not number or (not only and time.monotonic() - begun < seconds):
        with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
            draw(Path(folder), int(only) if only else seed + number, counts)
        number += 1
    print(f"{number} worlds from seed {seed}: {counts.most_common(5)}")
