"""Where do staged states lie? In reusable buffers from a pool with a memory budget.

Fresh memory costs as much as a copy into it (page faults), so a returned buffer is kept for reuse,
and freed only to make room for a larger one. `CopyProgress` records which bytes have been copied: a
reader waits for those it needs. A buffer still has the state that was staged there before, so bytes
that did not change are compared, and neither copied nor hashed again (`Hashed`).
"""

import ctypes
import mmap
import os
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

from ckptstore.core.config import MIN_STAGING_BYTES
from ckptstore.core.forks import Condition, cached_property
from ckptstore.core.process import free_bytes
from ckptstore.errors import Unavailable
from ckptstore.state.leaf_sources import NotCopied, StillSource


class Copy(NamedTuple):
    """A copy of `nbytes` to `offset` of a buffer: from an address, or of a tensor that does not lie
    in one piece of this host's memory, from byte `start` on."""

    offset: int
    nbytes: int
    start: int
    source: Any = None


class CopyProgress:
    """Which of `tasks`, each some copies into one buffer that do not overlap, have been carried
    out. Threads may share it."""

    def __init__(self, tasks: Sequence[Sequence[Copy]]) -> None:
        self._places = sorted(
            (copy.offset, copy.offset + copy.nbytes, number)
            for number, task in enumerate(tasks)
            for copy in task
        )
        self._missing = set(range(len(tasks)))
        self._failed: dict[int, BaseException] = {}
        self._changed = Condition()

    def arrived(self, task: int, error: BaseException | None = None) -> bool:
        """Record the end or failure of a task. True if it was the last one."""
        with self._changed:
            if error is not None:
                self._failed[task] = error  # first: `wait` looks without the lock
            self._missing.discard(task)
            self._changed.notify_all()
            return not self._missing

    def wait(self, start: int, stop: int) -> None:
        """Return when nothing that is to be copied to `start:stop` of the arena is missing; raises
        what its copy failed with."""
        if not self._missing and not self._failed:
            return
        first = bisect_right(self._places, start, key=lambda place: place[1])
        last = bisect_left(self._places, stop, key=lambda place: place[0])
        wanted = {number for _, _, number in self._places[first:last]}
        with self._changed:
            self._changed.wait_for(lambda: self._missing.isdisjoint(wanted))
            for task in wanted & self._failed.keys():
                raise self._failed[task]


_memcmp = ctypes.CDLL(None).memcmp  # without the GIL
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

COMPARED_BYTES = 256 << 10
"""Compared at a time; behind the first difference, bytes are copied unseen."""


class Hashed:
    """Which bytes of a buffer are still those that `by` has hashed there: the chunk table of the
    last commit from this buffer. Threads may note ranges, until the first question."""

    def __init__(self, by: object) -> None:
        self.by = by
        self._noted: list[tuple[int, int]] = []

    def note_same(self, buffer: "Buffer", offset: int, nbytes: int, address: int) -> int:
        """Note how many bytes at `address`, from the first on, the buffer has at `offset`; returns
        their number, rounded down unless it is all."""
        same = 0
        while same < nbytes:
            part = min(COMPARED_BYTES, nbytes - same)
            if _memcmp(buffer.address + offset + same, address + same, part):
                break
            same += part
        if same:
            self._noted.append((offset, offset + same))
        return same

    @cached_property
    def _ranges(self) -> tuple[list[int], list[int]]:
        """The starts and the stops of the ranges, in order; those that touch are one."""
        starts, stops = list[int](), list[int]()
        for start, stop in sorted(self._noted):
            if stops and stops[-1] == start:
                stops[-1] = stop
            else:
                starts.append(start)
                stops.append(stop)
        return starts, stops

    def covers(self, start: int, stop: int) -> bool:
        """Whether all bytes of a range are as they were."""
        starts, stops = self._ranges
        i = bisect_right(starts, start) - 1
        return i >= 0 and stop <= stops[i]


_SHARE_OF_FREE = 0.5


class Buffer:
    """Memory for one staged state, owned by its pool."""

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        self.nbytes = nbytes
        self.fd = _shared_memory(nbytes) if shared else -1
        """File descriptor for sharing the memory with another process; -1 if it is not shared."""
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._map = mmap.mmap(self.fd, nbytes, flags=flags)
        except OSError as error:
            if shared:
                _close(self.fd)
            raise _no_memory(nbytes, error) from error
        if shared:
            finalize(self, _close, self.fd)
        # Without these hints it works as well, only slower. A forked child would make every page of
        # it a copy-on-write fault for us.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with suppress(AttributeError, OSError):
                self._map.madvise(getattr(mmap, advice))
        self.memory = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.pinned = False
        """Whether the memory is pinned for devices (`state.staging`)."""
        self.hashed_by: object = None
        """The chunk table of a commit that has hashed all leaves here; None before it has."""
        self._offsets: Mapping[int, int] = {}

    def refill(self, offsets: Mapping[int, int]) -> Hashed | None:
        """Another state comes here, its leaves at `offsets`. If they lay there before and were
        hashed, the bytes that are the same can be noted."""
        by, same_places = self.hashed_by, offsets == self._offsets
        self.hashed_by, self._offsets = None, offsets
        return Hashed(by) if by is not None and same_places else None


class BufferSource(StillSource):
    """A leaf that lies in `memory` from `offset` on, or will: who asks for bytes waits for their
    arrival. Valid until the arena is given back."""

    __slots__ = ("arrivals", "hashed", "memory", "nbytes", "offset", "width")

    def __init__(
        self,
        memory: memoryview,
        offset: int,
        nbytes: int,
        width: int,
        arrivals: CopyProgress | None = None,
        hashed: Hashed | None = None,
    ) -> None:
        self.memory, self.offset, self.nbytes, self.width = memory, offset, nbytes, width
        self.arrivals, self.hashed = arrivals, hashed

    def view(self, start: int, stop: int) -> memoryview:
        if self.arrivals:
            self.arrivals.wait(self.offset + start, self.offset + stop)
        return self.memory[self.offset + start : self.offset + stop]

    def is_as_hashed(self, by: object, start: int, stop: int) -> bool:
        """Whether the bytes `start:stop` are known to be those that `by` has hashed here."""
        hashed = self.hashed
        return (
            hashed is not None
            and hashed.by is by
            and hashed.covers(self.offset + start, self.offset + stop)
        )


class ElsewhereSource(StillSource):
    """A leaf whose chunks' ids are known, and whose bytes this process does not have: they are read
    from the store if it must write them again."""

    __slots__ = ("known_ids", "nbytes", "width")

    def __init__(self, known_ids: bytes, nbytes: int, width: int) -> None:
        self.known_ids, self.nbytes, self.width = known_ids, nbytes, width

    def view(self, start: int, stop: int) -> memoryview:
        raise NotCopied(f"bytes {start}:{stop} of a leaf of {self.nbytes} were left to the store")


class BufferPool:
    """Arenas of at most `budget_bytes` together, taken and free ones; of `shared` memory if another
    process is to see them. Threads may share it."""

    def __init__(self, budget_bytes: int, *, shared: bool = False) -> None:
        self._shared = shared
        self.budget_bytes = max(budget_bytes // MIN_STAGING_BYTES, 1) * MIN_STAGING_BYTES
        self._free: list[Buffer] = []
        self._taken_bytes = 0
        self._changed = Condition()

    @property
    def held_bytes(self) -> int:
        """The bytes the pool occupies now."""
        with self._changed:
            return self._taken_bytes + sum(arena.nbytes for arena in self._free)

    def take(
        self,
        nbytes: int,
        *,
        wait: bool = True,
        timeout_s: float | None = None,
        into: list[Buffer] | None = None,
    ) -> Buffer | None:
        """An arena of at least `nbytes`, which must be within the budget; waits until there is
        room, or returns None without `wait` or after `timeout_s`. It is in the list `into` when it
        is taken, whatever interrupts this call."""
        size = -(-max(nbytes, 1) // MIN_STAGING_BYTES) * MIN_STAGING_BYTES
        assert size <= self.budget_bytes

        def has_room() -> bool:
            return self._taken_bytes + size <= self.budget_bytes

        with self._changed:
            if not (has_room() or (wait and self._changed.wait_for(has_room, timeout_s))):
                return None
            arena = self._best(size)
            self._taken_bytes += arena.nbytes
            if into is not None:
                into.append(arena)
            return arena

    def give(self, arena: Buffer) -> None:
        """Return a buffer for reuse. Nothing may refer to its memory any more."""
        with self._changed:
            self._taken_bytes -= arena.nbytes
            self._free.append(arena)
            self._changed.notify_all()

    def _best(self, size: int) -> Buffer:
        """The smallest free arena that is large enough and within the budget, else a new one in the
        place of free ones."""
        room = self.budget_bytes - self._taken_bytes
        fitting = [arena for arena in self._free if size <= arena.nbytes <= room]
        if fitting:
            best = min(fitting, key=lambda arena: arena.nbytes)
            self._free.remove(best)
            return best
        self._free.clear()
        return Buffer(size, shared=self._shared)


def _shared_memory(nbytes: int) -> int:
    try:
        fd = os.memfd_create("ckptstore-staging", os.MFD_CLOEXEC)
    except OSError as error:
        raise _no_memory(nbytes, error) from error
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        _close(fd)
        raise _no_memory(nbytes, error) from error
    return fd


def _close(fd: int) -> None:
    with suppress(OSError):  # nothing but memory is behind it
        os.close(fd)


def _no_memory(nbytes: int, error: OSError) -> Unavailable:
    return Unavailable(
        f"cannot have {nbytes} bytes of memory to stage a state in: {error.strerror}; raise the "
        "limit of open files (`ulimit -n`) or of "
        "memory, or commit with less memory, then repeat"
    )


def default_budget(root: Path = Path("/")) -> int:
    """Half of the host memory that is free now, by the probe of `core.process`."""
    free = free_bytes(root)
    if free is None:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(int(_SHARE_OF_FREE * free), MIN_STAGING_BYTES)
