"""How is a memory budget divided among threads and buffers?

Without a budget, the free memory of the host bounds the buffers. The budget covers memory beside
the state: staging of tensors that cannot be hashed in place, chunks being encoded or decoded,
and chunks read into separate buffers. Schemas and pages do not count; they take 32 bytes per
chunk.
"""

from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

from ckptstore.core import forks
from ckptstore.core.config import MIB, RUN_BYTES
from ckptstore.core.process import free_bytes
from ckptstore.errors import InvalidInput
from ckptstore.storage.direct_io_file import BUFFER_BYTES

ASIDE_BYTES = 32 * MIB
"""More chunks than this at a time make nothing faster."""

SHARED_BYTES = 64 * MIB
"""So that each of several ranks has some requests under way at once."""

PACK_BUFFERS_BYTES = 2 * BUFFER_BYTES
"""A thread fills one pack while another of its packs is being closed."""

WINDOW_BYTES = 64 * MIB
"""Pieces of chunks that the ranks of a commit have on their way at a time."""

CELLS_BYTES = 128 * MIB
"""Chunks that a rank has put together and not written yet."""

FREE_SHARE = 8
"""Without a budget, an eighth of what is free, where that is less than would be of use."""


PATCH_SHARE, PATCH_BYTES_MAX = 16, 4096 * MIB
"""Without a limit, chunks that are kept for patches take at most this share of the memory that is
free when the first is kept, and so many bytes."""


class Keeper(Protocol):
    """Keeps chunks in memory."""

    @property
    def kept_bytes(self) -> int: ...


class PatchMemory:
    """The memory in which a store keeps chunks of last commits, all `keepers` together. One that
    is gone counts no more. Thread-safe."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._keepers: WeakSet[Keeper] = WeakSet()
        self._lock = forks.lock()

    @property
    def is_used(self) -> bool:
        """Whether patches are made at all."""
        return self._limit_bytes != 0

    def admits(self, keeper: Keeper, nbytes: int) -> bool:
        """Whether a keeper may keep so many bytes more."""
        with self._lock:
            if self._limit_bytes is None:
                free = free_bytes()
                share = PATCH_BYTES_MAX if free is None else free // PATCH_SHARE
                self._limit_bytes = min(share, PATCH_BYTES_MAX)
            self._keepers.add(keeper)
            kept = sum(each.kept_bytes for each in self._keepers)
            return kept + nbytes <= self._limit_bytes


@dataclass(frozen=True, slots=True)
class ReadRoom:
    """Each of `threads` reads up to `read_bytes` of encoded chunks, as much again of the bases of
    differences among them, and decodes one chunk and its base.
    `aside_bytes` of chunks wait in buffers to be copied.

    When ranks send each other chunks, at most `shared_bytes` are in flight to and from a rank, and
    as many more are being read.
    """

    threads: int
    read_bytes: int
    aside_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class WriteRoom:
    """`threads` stage runs of up to `run_bytes` each; if `unbuffered`, packs are written without a
    buffer of their own."""

    threads: int
    run_bytes: int
    unbuffered: bool = False


@dataclass(frozen=True, slots=True)
class RankRoom:
    """The budget of one rank of a collective commit.

    Beside `write`, at most `window_bytes` of pieces are in flight. Assembled chunks are written
    once they reach `cells_bytes`.
    """

    write: WriteRoom
    window_bytes: int
    cells_bytes: int


def read_room(budget_bytes: int | None, chunk_bytes: int, threads: int) -> ReadRoom:
    """How to read within `budget_bytes` from a store of this chunk size. Raises `InvalidInput`,
    naming the least that works."""
    longest, decoded = max(RUN_BYTES, chunk_bytes), 2 * chunk_bytes
    most = threads * (2 * longest + decoded) + max(ASIDE_BYTES, chunk_bytes)
    budget = _budget(budget_bytes, 3 * chunk_bytes, most)
    threads = _within(1, budget // (5 * chunk_bytes), threads)
    most_read = max((budget // threads - decoded) // 2, 1)
    # A power of two, as the memory that threads take.
    read_bytes = _within(chunk_bytes, 1 << (most_read.bit_length() - 1), longest)
    aside_bytes = _within(
        chunk_bytes,
        budget - threads * (2 * read_bytes + decoded),
        max(ASIDE_BYTES, chunk_bytes),
    )
    shared_bytes = SHARED_BYTES if budget_bytes is None and budget == most else aside_bytes // 2
    return ReadRoom(threads, read_bytes, aside_bytes, max(shared_bytes, chunk_bytes))


def write_room(
    budget_bytes: int | None, chunk_bytes: int, threads: int, *, encoding: bool
) -> WriteRoom:
    """How to commit within `budget_bytes`. With `encoding`, each thread needs as much memory again
    for its run, and two more chunks. The rest buffers packs."""
    share, at_work = (2, 2 * chunk_bytes) if encoding else (1, 0)
    longest = max(RUN_BYTES, chunk_bytes)
    least = share * chunk_bytes + at_work
    budget = _budget(
        budget_bytes, least, threads * (share * longest + at_work + PACK_BUFFERS_BYTES)
    )
    threads = _within(1, budget // least, threads)
    # A power of two, so that a commit's plan does not change with every page that the host has more
    # or less.
    run_bytes = _within(
        chunk_bytes, 1 << ((budget // threads - at_work) // share).bit_length() - 1, longest
    )
    return WriteRoom(
        threads, run_bytes, budget < threads * (share * run_bytes + at_work + PACK_BUFFERS_BYTES)
    )


def rank_room(
    budget_bytes: int | None, chunk_bytes: int, threads: int, *, encoding: bool
) -> RankRoom:
    """How a rank commits within `budget_bytes`: half of it for what one process would need. Raises
    `InvalidInput`, naming the least that works."""
    writing = (4 if encoding else 1) * chunk_bytes
    if budget_bytes is None:
        return RankRoom(
            write_room(None, chunk_bytes, threads, encoding=encoding), WINDOW_BYTES, CELLS_BYTES
        )
    # Two chunks more: the one that is put together, and a part of it that lies apart.
    budget = _budget(budget_bytes, writing + 4 * chunk_bytes, budget_bytes)
    write_bytes = max(writing, budget // 2)
    left = max(budget - write_bytes, 4 * chunk_bytes) - 2 * chunk_bytes
    window_bytes = _within(chunk_bytes, left // 2, WINDOW_BYTES)
    cells_bytes = _within(chunk_bytes, left - window_bytes, CELLS_BYTES)
    taken = window_bytes + cells_bytes + 2 * chunk_bytes
    return RankRoom(
        write_room(budget - taken, chunk_bytes, threads, encoding=encoding),
        window_bytes,
        cells_bytes,
    )


def _budget(given: int | None, least: int, most: int) -> int:
    if given is None:
        free = free_bytes()
        return most if free is None else _within(least, free // FREE_SHARE, most)
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        raise InvalidInput(
            f"memory_budget_bytes is {given!r}; wanted at least {least} for this store's chunks"
        )
    return given


def _within(least: int, wanted: int, most: int) -> int:
    return min(max(wanted, least), most)
