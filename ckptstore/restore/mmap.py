"""How is a leaf mapped into memory instead of read? The pages of its packs are mapped in sequence.

A leaf's runs of up to 8 MiB lie in the packs of several threads and commits, at page boundaries
(docs/format.md §4). Runs can be mapped in sequence only if they also meet at page boundaries in
memory. A small run that does not, such as a leaf's short last one, is copied; otherwise the leaf
must be read.

Mapped pages are private: loaded on access, copied on write. Python's `mmap` chooses addresses
itself, so an anonymous mapping first reserves the range, and each file is mapped over a part of it
(mmap(2), MAP_FIXED). Nothing else can be in the reserved range, so MAP_FIXED is safe, also between
threads. A mapping stays readable after its file is deleted, and is freed with its last view.
"""

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ckptstore.core.ids import checksum, digest
from ckptstore.errors import Corrupt, InvalidInput, Unavailable
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.restore.read_plan import ChunkTarget
from ckptstore.storage.contract import FileRange
from ckptstore.storage.local_files import transfer, unreadable

PAGE_BYTES = mmap.ALLOCATIONGRANULARITY
"""Addresses and file offsets of mappings are multiples of this."""

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
# Do not reserve swap, since a model may be larger than free memory.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_FAILED = ctypes.c_void_p(-1).value


class MemoryMap:
    """`nbytes` of memory, zeros until files are mapped over it."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = max(nbytes, 1)
        self._start = _map(None, self._nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        weakref.finalize(self, _libc().munmap, self._start, self._nbytes).atexit = False

    def put(self, at: int, fd: int, offset: int, nbytes: int, what: str) -> None:
        """Map the open file from `offset` on at `at`; both are multiples of `PAGE_BYTES`, `nbytes`
        need not be. The file may be closed afterwards.

        Raises `Corrupt`, naming `what`, if the file is too short, since access beyond its end would
        kill the process.
        """
        if at % PAGE_BYTES or offset % PAGE_BYTES or at < 0 or at + nbytes > self._nbytes:
            raise ValueError(
                f"cannot map {nbytes} bytes from {offset} on to {at} of {self._nbytes}"
            )
        if (size := os.fstat(fd).st_size) < offset + nbytes:
            raise Corrupt(
                f"{what} ends after {size} bytes; wanted {offset + nbytes}; run `ckptstore fsck`"
            )
        _map(self._start + at, nbytes, mmap.MAP_PRIVATE | _MAP_FIXED, fd, offset)

    def view(self, start: int, stop: int) -> memoryview:
        """The bytes `start:stop`, writable: a write changes this process's copy of the page and no
        file. The view keeps the memory."""
        array = (ctypes.c_ubyte * (stop - start)).from_address(self._start + start)
        # whoever holds the view holds the array, and so the mapping
        array.owner = self  # type: ignore[attr-defined]
        return memoryview(array).cast("B")


def _map(address: int | None, nbytes: int, flags: int, fd: int, offset: int) -> int:
    start: int | None = _libc().mmap(
        address, nbytes, _READ_WRITE, flags | _MAP_NORESERVE, fd, offset
    )
    if start is None or start == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise Unavailable(
            f"cannot map {nbytes} bytes: {reason}; raise `ulimit -v` or vm.max_map_count, or read "
            "the leaf instead"
        )
    return start


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    )
    library.mmap.restype = ctypes.c_void_p
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library


COPIED_BYTES = 64 << 10
"""So much of a leaf is copied where it cannot be mapped: runs shorter than this do not begin at a
page boundary."""


class Unmappable(InvalidInput):
    """The leaf is stored in a form that cannot be mapped; read it instead."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of the leaf that are contiguous in one pack: `nbytes` from byte `start` of the leaf, at
    `offset` in the pack `key`."""

    start: int
    key: str
    offset: int
    nbytes: int

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


@dataclass(frozen=True, slots=True)
class MapPlan:
    """Where a leaf's bytes come from. Byte `i` of the leaf is at `skew + i` of the memory. A mapped
    stretch starts at a page of the memory, a copied one at a byte of the leaf."""

    skew: int
    nbytes: int
    mapped: tuple[Stretch, ...]
    copied: tuple[Stretch, ...]


def plan_map(parts: Sequence[Stretch], width: int, page: int = PAGE_BYTES) -> MapPlan:
    """How to lay the stretches of a leaf of elements of `width` bytes into memory. Raises
    `Unmappable` where too much must be copied."""
    longest = max(parts, key=lambda part: part.nbytes)
    skew, nbytes = (longest.offset - longest.start) % page, parts[-1].stop
    if skew % width:
        raise Unmappable(
            f"its elements of {width} bytes do not begin at multiples of {width} in its pack"
        )
    mapped: list[Stretch] = []
    copied: list[Stretch] = []
    for part in parts:
        first, last = skew + part.start, skew + part.stop
        # The outermost pages are nobody else's; one where two stretches meet belongs to neither
        # file.
        low = first - first % page if part is parts[0] else first + -first % page
        high = last if part is parts[-1] else last - last % page
        if (part.offset - first) % page or low >= high:
            copied.append(part)
            continue
        mapped.append(Stretch(low, part.key, part.offset + low - first, high - low))
        if first < low:
            copied.append(Stretch(part.start, part.key, part.offset, low - first))
        if high < last:
            copied.append(Stretch(high - skew, part.key, part.offset + high - first, last - high))
    if (total := sum(part.nbytes for part in copied)) > COPIED_BYTES:
        raise Unmappable(
            f"{total} of its {nbytes} bytes lie where pages of {page} bytes cannot be laid side by "
            "side"
        )
    return MapPlan(skew, nbytes, tuple(mapped), tuple(copied))


def map_leaf(objects: ObjectStore, pieces: Sequence[ChunkTarget], width: int) -> memoryview:
    """The bytes of a whole leaf that is not empty, writable and private to this process; nearly
    nothing is read, and nothing verified.

    Raises `Unmappable` for a leaf that must be read, `InvalidInput` where the store is no local
    directory, `Corrupt` for a pack that is too short, `NotFound` for chunks that no pack holds.
    """
    landing = sorted((piece.at, piece.chunk) for piece in pieces if piece.at is not None)
    if len(landing) < len(pieces):
        raise Unmappable("it was committed in shards whose rows do not lie together")
    ranges = objects.open_ranges(b"".join(chunk for _, chunk in landing))
    if ranges is None:
        raise Unmappable("it is stored compressed")
    parts: list[Stretch] = []
    for each in ranges:
        start = parts[-1].stop if parts else 0
        parts.append(Stretch(start, each.key, each.offset, each.nbytes))
    plan = plan_map(parts, width)
    files = {each.key: each for each in ranges}
    memory = MemoryMap(plan.skew + plan.nbytes)
    for part in plan.mapped:
        memory.put(part.start, files[part.key].fileno(), part.offset, part.nbytes, part.key)
    data = memory.view(plan.skew, plan.skew + plan.nbytes)
    for part in plan.copied:
        _copy(files[part.key], part.offset, data[part.start : part.stop], objects.storage.url)
    return data


def _copy(file: FileRange, offset: int, memory: memoryview, root: str) -> None:
    """Read from the open file, because gc may have deleted its name meanwhile. Raises `Corrupt` or
    `Unavailable`."""
    try:
        missing = transfer(os.preadv, file.fileno(), offset, [memory])
    except OSError as error:
        raise unreadable(error, file.key, root) from error
    if missing:
        raise Corrupt(
            f"{file.key} in {root} ends {missing} bytes before it should; run `ckptstore fsck`"
        )


def check_mapped(
    objects: ObjectStore,
    data: memoryview,
    pieces: Sequence[ChunkTarget],
    threads: ThreadPool,
    what: str,
    *,
    verify_ids: bool,
) -> None:
    """Compare every chunk of a mapped leaf with its checksum, which reads them all, and with
    `verify_ids` with its id.

    A chunk that does not match is read again, into the mapping. Raises `Corrupt`, naming `what`,
    where no copy of it is left.
    """

    checksums = objects.located(b"".join(piece.chunk for piece in pieces))["checksum"].tolist()

    def check(i: int) -> None:
        piece = pieces[i]
        start = piece.at or 0
        part = data[start : start + piece.raw_bytes]
        if checksum(part) != checksums[i] or (verify_ids and digest(part) != piece.chunk):
            objects.read_into(piece.chunk, [part], describe=lambda _: what, verify_ids=verify_ids)

    threads.spread(check, range(len(pieces)))
