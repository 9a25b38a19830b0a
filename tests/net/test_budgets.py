"""P8: no operation needs more memory than its budget, whatever the store holds, and none leaves a
thread, a file descriptor, a mapping, a temporary file or memory behind when it is repeated."""

import ctypes
import gc
import os
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.core.config import default_threads
from tests.net import registry
from tests.net.registry import Operation, World
from tests.shared.sites import Site

MIB = 1 << 20
MEMORY = Path("/dev/shm")
FIRST, READ = 3, 6
"""The first step of a history, and the one that operations of the registry read."""

NAMES = ("x", "y", "n")
"""What operations of the registry read and compare; there are small tensors beside."""

STEP = 300
"""Between two steps of the training: operations of the registry commit at the two behind one."""

LAST = ("thin", "forget")
"""Operations that take away what others need."""

COPIES = {
    "commit": 1.5,
    "commit_async": 2.5,
    "restore": 1.5,
    "read": 1.5,
    "mmap": 1.5,
    "average": 3.0,
}
"""States in memory by design: what was read for the comparison, staged, mapped, or averaged."""

LEAF_BYTES = 512
PATIENCE_S = 2.0

WARM_UP, REPEATS = 2, 3
GROWTH_BYTES = 4 * MIB
"""Memory of `REPEATS` more commits: 45 bytes a chunk of an index, and an allocator's moods."""

ROUNDS = 6
"""What is lost is lost in each round of `REPEATS`. What an allocator keeps or gives back, and what
is opened once, when it is first needed, makes some rounds differ from others."""

_M_MMAP_THRESHOLD = -3
"""Of mallopt(3). Larger buffers go back to the system when they are freed; else the allocator keeps
some for each thread that there ever was."""


@dataclass(frozen=True)
class Shape:
    """What a store holds: `small` tensors of `small_bytes` beside `x` and `y` of `large_chunks`
    chunks each, in so many `commits`."""

    name: str
    chunk_bytes: int
    small: int
    small_bytes: int
    large_chunks: int
    commits: int

    @property
    def state_bytes(self) -> int:
        return self.small * self.small_bytes + 2 * self.large_chunks * self.chunk_bytes


def drawn(random: Random) -> Shape:
    """Many small tensors, a few of huge chunks, large packs, or many commits."""
    return random.choice(
        (
            Shape("many small", 64 << 10, random.randint(1000, 3000), 2048, 2, 8),
            Shape("huge chunks", 4 * MIB, 3, 4096, random.randint(2, 3), 6),
            Shape("large packs", 1 * MIB, 3, 4096, random.randint(40, 60), 4),
            Shape("many commits", 64 << 10, 4, 4096, 3, random.randint(40, 80)),
        )
    )


def budget_bytes(operation: Operation, shape: Shape) -> int:
    """What an operation may need above what the process has: 16 MiB (48 for compact, which has the
    versions of a group's chunks at hand), four chunks for each thread, half a kilobyte for each
    leaf of the history, and the copies of the state that it or the registry's comparison makes."""
    each = 4 * max(shape.chunk_bytes, MIB)
    copies = COPIES.get(operation.name, 0) * shape.state_bytes
    leaves = LEAF_BYTES * shape.small * shape.commits
    base = 48 * MIB if operation.name == "compact" else 16 * MIB
    return base + default_threads() * each + leaves + int(copies)


class LargeWorld(World):
    """One with a state of another size; what its operations commit is at every `STEP`."""

    def __init__(self, folder: Path, states: Mapping[int, Any], two: Sequence[Any]) -> None:
        self.folder = folder
        self.store, self.mirror = (Site(str(folder / name)) for name in ("store", "mirror"))
        steps = range(STEP, 1000 * STEP, STEP)
        mean, files = middle(states[READ - 1], states[READ]), {"notes.txt": b"0", "x": bytes(MIB)}
        self.states = dict(states) | dict.fromkeys((step + 1 for step in steps), mean)
        self.states |= {step: two[step // STEP % 2] for step in steps}
        self.files = dict.fromkeys((step + 2 for step in steps), files)
        self.held = deque(maxlen=2)  # type: ignore[assignment]  # so that what is mapped is let go
        self.prepared = None

    def compare(self, snapshot: ckptstore.Snapshot) -> None:
        assert snapshot.step is not None
        if snapshot.step in self.files:
            self.compare_files(snapshot)
            return
        wanted = self.states[snapshot.step]
        state = snapshot.state_dict()
        assert torch.equal(state["x"], wanted["x"])
        assert len(state["small"]) == len(wanted.get("small", state["small"]))

    def look(self, store: ckptstore.Store) -> ckptstore.Snapshot:
        return super().look(store).only(NAMES)


def middle(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """What is compared of the mean of two states."""
    return {"x": 0.5 * first["x"] + 0.5 * second["x"]}


def contents(shape: Shape, random: Random, number: int, last: dict[str, Any]) -> dict[str, Any]:
    """A state of which half of the tensors are those of the last one, and the others change a
    little."""
    generator = torch.Generator().manual_seed(random.getrandbits(32))

    def changed(old: torch.Tensor | None, count: int) -> torch.Tensor:
        if old is None:
            return torch.rand(count, generator=generator)
        return old if random.random() < 0.5 else old * (1 + 1e-4 * random.random())

    count = shape.large_chunks * shape.chunk_bytes // 4
    small = last.get("small", [None] * shape.small)
    return {
        "n": number,
        "x": changed(last.get("x"), count),
        "y": changed(last.get("y"), count),
        "small": [changed(old, shape.small_bytes // 4) for old in small],
    }


def made(folder: Path, shape: Shape, random: Random) -> World:
    states: dict[int, Any] = {}
    storage, last = ckptstore.Storage(chunk_bytes=shape.chunk_bytes), dict[str, Any]()
    with ckptstore.open(folder / "store", storage=storage, threads=1) as store:
        for step in range(FIRST, FIRST + shape.commits):
            last = contents(shape, random, step, last)
            store.commit(last, step=step)
            if step in (READ - 1, READ):
                states[step] = {name: last[name] for name in NAMES}
        store.push(folder / "mirror", READ, create=True)
        store.forget(list(range(FIRST, READ - 1)))  # so that packs are sparse
    return LargeWorld(folder, states, [contents(shape, random, step, last) for step in (1, 2)])


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


def settled() -> int:
    """Memory of this process without what its allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes("VmRSS")


def peak_bytes(act: Callable[[], object]) -> int:
    """By how much this process's memory grew at most while `act` ran."""
    before = settled()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (proc(5))
    act()
    return resident_bytes("VmHWM") - before


def left(folder: Path) -> Counter[str]:
    """What an operation may leave behind in this process and on disks."""
    settled()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return Counter(
        {
            "threads": threading.active_count(),
            "file descriptors": len(os.listdir("/proc/self/fd")),
            "mappings of files": sum("/" in line for line in maps),
            "temporary files": sum(len(list(folder.glob(at))) for at in ("*/tmp/*", "temp/*")),
        }
    )


class Trial:
    """Operations of the registry on one world, in a drawn order; what each may take and leave."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random, self.folder = Random(seed), folder
        self.shape = drawn(self.random)
        self.world = made(folder, self.shape, self.random)
        self.step = 0
        table = {each.name: each for each in registry.OPERATIONS}
        last = [table.pop(name) for name in LAST]
        self.operations = [*self.random.sample(list(table.values()), len(table)), *last]

    def next_step(self) -> int:
        self.step += STEP
        return self.step

    def run(self, operation: Operation) -> int:
        """Raises `AssertionError`; returns the share of the budget that was needed, in percent."""
        with ckptstore.open(self.world.store.place, threads=1) as store:
            peak = peak_bytes(lambda: operation.act(self.world, store, self.next_step()))
            budget = budget_bytes(operation, self.shape)
            assert peak <= budget, (
                f"{operation.name} needed {peak / MIB:.1f} MiB, more than {budget / MIB:.1f}"
            )
            self.repeat(operation, store)
        return 100 * peak // budget

    def repeat(self, operation: Operation, store: ckptstore.Store) -> None:
        """Each time after a commit, so that there is something to do."""
        self.act(operation, store, WARM_UP)
        seen = []
        for _ in range(ROUNDS):
            before, memory = left(self.folder), settled()
            self.act(operation, store, REPEATS)
            deadline = time.monotonic() + PATIENCE_S
            while (more := left(self.folder) - before) and time.monotonic() < deadline:
                time.sleep(0.05)  # a thread that was told to end may still be ending
            grown = settled() - memory
            if not more and grown <= GROWTH_BYTES:
                return
            seen.append(f"{grown / MIB:.1f} MiB and {dict(more)}")
        raise AssertionError(
            f"{operation.name} left behind in rounds of {REPEATS} repeats: {', '.join(seen)}"
        )

    def act(self, operation: Operation, store: ckptstore.Store, times: int) -> None:
        for _ in range(times):
            step = self.next_step()
            store.commit(self.world.states[step], step=step)
            operation.act(self.world, store, self.next_step())


@pytest.mark.parametrize("seconds", [7, pytest.param(1800, marks=pytest.mark.soak)])
@pytest.mark.timeout(2 * 3600)
def test_each_operation_keeps_its_budget_and_leaves_nothing_behind(
    seed: int, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure names its world: CKPTSTORE_NET_WORLD=N tries all operations in that one alone."""
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 256 << 10)
    monkeypatch.setenv("CKPTSTORE_CACHE", str(tmp_path / "cache"))
    only = os.environ.get("CKPTSTORE_NET_WORLD")
    begun, counts, number = time.monotonic(), Counter[str](), 0
    most: dict[str, int] = {}
    while not number or (not only and time.monotonic() - begun < seconds):
        with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
            folder = Path(name)
            (folder / "temp").mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(folder / "temp"))
            world = int(only) if only else seed + number
            trial = Trial(folder, world)
            for operation in trial.operations:
                if not only and counts and time.monotonic() - begun > seconds:
                    break
                try:
                    share = trial.run(operation)
                except BaseException as error:
                    error.add_note(f"world of seed {world}: {trial.shape}, {operation.name}")
                    raise
                counts[f"{trial.shape.name}: {operation.name}"] += 1
                most[operation.name] = max(share, most.get(operation.name, 0))
        number += 1
    print(
        f"{number} worlds from seed {seed}, {counts.total()} operations; most of the budget: {most}"
    )
