"""What the machine can do at best with the same bytes: the least work that a save or a restore must
contain, on two threads."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeAlias, TypeVar

from blake3 import blake3
from xxhash import xxh3_128_digest

from benchmarks.disk import start_write_back
from benchmarks.states import State

THREADS = 2
CHUNK_BYTES = 1 << 20
RUN_BYTES = 8 << 20
WRITE_BACK_BYTES = 64 << 20

Item = TypeVar("Item")
Hash: TypeAlias = Callable[[memoryview], bytes]


def blake3_of(data: memoryview) -> bytes:
    return blake3(data).digest()


xxh3: Hash = xxh3_128_digest


class Extent(NamedTuple):
    """Where a run of a state was written."""

    run: int
    path: Path
    offset: int


class Shared(Iterator[Item]):
    """One iterator for several threads."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = iter(items)
        self._lock = Lock()

    def __next__(self) -> Item:
        with self._lock:
            return next(self._items)


def pieces(state: State, size: int) -> list[memoryview]:
    """The state's bytes in order, cut at `size` within each tensor."""
    return [
        memory[start : start + size]
        for memory in state.memories()
        for start in range(0, len(memory), size)
    ]


def write(state: State, folder: Path) -> list[Extent]:
    """Each thread appends the next 8 MiB to its own file, asks for write-back every 64 MiB, and
    syncs at the end."""
    runs = Shared(enumerate(pieces(state, RUN_BYTES)))

    def append(path: Path) -> list[Extent]:
        extents, offset, written_back = [], 0, 0
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for number, memory in runs:
                os.pwrite(fd, memory, offset)
                extents.append(Extent(number, path, offset))
                offset += len(memory)
                if offset - written_back >= WRITE_BACK_BYTES:
                    start_write_back(fd, written_back, offset)
                    written_back = offset
            os.fsync(fd)
        finally:
            os.close(fd)
        return extents

    with ThreadPoolExecutor(THREADS) as pool:
        extents = [
            extent
            for some in pool.map(append, [folder / f"{i}" for i in range(THREADS)])
            for extent in some
        ]
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return sorted(extents)


def read(extents: list[Extent], into: State, *, hashed: Hash | None = None) -> None:
    """Each thread reads the next 8 MiB straight into place, 1 MiB at a time, each of which `hashed`
    takes while it is in the processor's cache."""
    runs = pieces(into, RUN_BYTES)
    fds = {path: os.open(path, os.O_RDONLY) for path in {extent.path for extent in extents}}
    shared = Shared(extents)

    def fill(_: int) -> None:
        for extent in shared:
            run, step = runs[extent.run], CHUNK_BYTES if hashed else RUN_BYTES
            for start in range(0, len(run), step):
                part = run[start : start + step]
                got = os.preadv(fds[extent.path], [part], extent.offset + start)
                if got != len(part):
                    raise OSError(
                        f"short read: {got} of {len(part)} bytes of {extent.path} at "
                        f"{extent.offset + start}"
                    )
                if hashed:
                    hashed(part)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fill, range(THREADS)))
    for fd in fds.values():
        os.close(fd)


def hash_chunks(memories: Iterable[memoryview], hashed: Hash) -> None:
    """`hashed` of every 1 MiB."""
    shared = Shared(memories)

    def digest(_: int) -> None:
        for memory in shared:
            hashed(memory)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(digest, range(THREADS)))


def save_changed(state: State, changed: State, folder: Path) -> None:
    """XXH3 of all of `state`, then BLAKE3 of what has `changed` in it, and a durable write of
    that."""
    hash_chunks(pieces(state, CHUNK_BYTES), xxh3)
    hash_chunks(pieces(changed, CHUNK_BYTES), blake3_of)
    write(changed, folder)


def copy(state: State, into: State) -> None:
    """Memory to warm memory, on as many threads as torch takes."""
    for path, tensor in state.tensors.items():
        into.tensors[path].copy_(tensor)
