"""Which new chunks of a commit are stored as patches of those that they replace?

Only where a sample of a leaf says that few words changed, so that dense training pays next to
nothing. The bytes of the chunk that is replaced are those that the commit before kept in memory,
within a budget, or else come from the store, verified.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import numpy as np

from ckptstore.commit.hints import HeldChunks, LeafChunk, Old
from ckptstore.commit.plan import Cut, PlanPart
from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import ChunkId
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.objects import codecs, patches
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.dedup import ChunkTable
from ckptstore.repository.memory_budget import PatchMemory
from ckptstore.repository.pack_writer import NewPatch

LEAF_BYTES_MIN = 128 << 10
"""Smaller leaves are stored whole: the search would cost as much as the write."""

CHUNK_BYTES_MIN = 4 << 10

DEPTH_READ_MAX = 8
"""A chunk that must be read from the store is a base only if so few patches make it, or if its
successor stays in memory, so that the next commit need not read again."""

_SAMPLES, _SAMPLE_BYTES = 4, 2 << 10
"""Stretches of a chunk that are compared first. Two would take a table for dense of which every
third row changed."""

_VAIN_BYTES, _VAIN_PART, _LOOK_BYTES = 256 << 10, 256, 256 << 10
"""A commit looks into the store in vain for so many bytes, and one in so many of those that may
become patches: then at no leaf of which it knows nothing. A sample takes the time of so many."""

Replaced: TypeAlias = Callable[[PlanPart, int], ChunkId | None]
"""The chunk that stood at the place of a part's chunk, by its number, in the commit before."""


def in_table(last: ChunkTable) -> Replaced:
    """The chunks of the last commit of the same plan, or of one before leaves have grown."""

    def replaced(part: PlanPart, number: int) -> ChunkId | None:
        found = last.known(part.leaf, number).id
        return found if any(found) else None

    return replaced


class _Ahead(threading.local):
    """Chunks of the store that a thread has read and not used yet, and how many it had read."""

    def __init__(self) -> None:
        self.olds: dict[LeafChunk, Old] = {}
        self.count = 0


class Patcher:
    """Makes patches for one commit. Threads may share it."""

    def __init__(
        self, objects: ObjectStore, held: HeldChunks, memory: PatchMemory, replaced: Replaced
    ) -> None:
        self._objects, self._held, self._memory = objects, held, memory
        self.replaced = replaced
        self._ahead = _Ahead()
        # Threads that count at once may lose a chunk, which matters nothing.
        self._offered_bytes = self._vain_bytes = 0
        held.begin()

    def begin(self, part: PlanPart, nbytes: int) -> bool:
        """Whether any of the new chunks of a run, so many bytes, may become a patch."""
        if part.raw_bytes < LEAF_BYTES_MIN:
            return False
        self._offered_bytes += nbytes
        return not self._held.is_dense(part.leaf)

    def is_candidate(self, part: PlanPart, cut: Cut) -> bool:
        """Whether a new chunk of such a run may become a patch."""
        if cut.stop - cut.start < CHUNK_BYTES_MIN or self._held.is_dense(part.leaf):
            return False
        return self._held.has((part.leaf, cut.number)) or not self._is_vain(part.leaf)

    def make(
        self, part: PlanPart, cut: Cut, old: ChunkId, new: ChunkId, summed: bytes, raw: memoryview
    ) -> NewPatch | None:
        """The patch that makes the chunk `new` of the chunk `old`, which was at its place; None if
        it is to be stored whole."""
        here, width = (part.leaf, cut.number), part.width
        taken = self._held.take(here, old)
        before: Old | None = taken
        try:
            if before is None and not self._is_other(old, raw, width):
                before = self._stored(part, cut.number, old)
                if before is None:
                    return None  # too far from a whole chunk to be read at every commit
        except (Corrupt, NotFound, Unavailable):
            return None  # what cannot be read is no base
        at = before and patches.changed(raw, before.raw, width)
        self._held.found(part.leaf, dense=at is None)
        if taken is None:
            read = len(raw) if before else min(len(raw), _LOOK_BYTES)
            self._vain_bytes += read if at is None else -4 * read
        if before is None or at is None:
            self._held.give_up(taken)
            return None
        stored = patches.encode(raw, before.raw, width, at, [old], before.chain)
        if stored and not before.is_sound():
            stored = None
        chain = patches.head_of(stored).chain if stored else patches.WHOLE
        self._held.keep(here, taken, Old(new, raw, chain, summed), self._memory)
        return NewPatch(new, summed, len(raw), width, (old,), stored) if stored else None

    def _is_other(self, old: ChunkId, raw: memoryview, width: int) -> bool:
        """Whether a sample of a chunk in the store differs in most words from `raw`. Unverified: it
        only says whether a closer look pays."""
        samples = self._objects.peek(old, _stretches(len(raw)))
        return samples is not None and _are_other(raw, samples, width)

    def _is_vain(self, leaf: int) -> bool:
        """Whether nothing is known of a leaf, and enough looks were in vain."""
        allowed = _VAIN_BYTES + self._offered_bytes // _VAIN_PART
        return self._vain_bytes > allowed and not self._held.is_sparse(leaf)

    def _stored(self, part: PlanPart, number: int, old: ChunkId) -> Old | None:
        """A chunk from the store, verified; None if too many patches make it."""
        found = self._ahead.olds.pop((part.leaf, number), None)
        if found is not None and found.id == old:
            return found
        if ahead := self._next(part, number):
            try:
                read = self._read(part, {number: old} | ahead)
            except (Corrupt, NotFound, Unavailable):
                ahead = {}
        if not ahead:
            read = self._read(part, {number: old})
        found = read.pop(number, None)
        self._ahead.olds = {(part.leaf, n): each for n, each in read.items()}
        self._ahead.count = len(read)
        return found

    def _next(self, part: PlanPart, number: int) -> dict[int, ChunkId]:
        """The chunks that stood at the next places of a run, by number, if few words of the leaf
        change, and this thread used most of what it read ahead before: patches of many chunks are
        read in a fraction of the time."""
        if not self._held.is_sparse(part.leaf) or 2 * len(self._ahead.olds) > self._ahead.count:
            return {}
        count = max(RUN_BYTES // _nbytes(part, number), 1)
        stop = min(number + count - (number - part.first) % count, part.stop)
        numbers = [n for n in range(number + 1, stop) if not self._held.has((part.leaf, n))]
        return {n: old for n in numbers if (old := self.replaced(part, n))}

    def _read(self, part: PlanPart, olds: Mapping[int, ChunkId]) -> dict[int, Old]:
        """Those of `olds`, by the numbers of their places, that few enough patches make."""
        chains = self._objects.chains_of(b"".join(set(olds.values())))
        sizes = {number: _nbytes(part, number) for number in olds}
        room = self._memory.admits(self._held, sum(sizes.values()))
        most = patches.DEPTH_MAX - 1 if room else DEPTH_READ_MAX
        found = {
            number: Old(old, memoryview(bytearray(sizes[number])), chains[old])
            for number, old in olds.items()
            if chains[old].depth <= most
        }
        ids = b"".join(each.id for each in found.values())
        out = [each.raw for each in found.values()]
        self._objects.read_into(ids, out, describe=lambda _: "being patched")
        return found


def _nbytes(part: PlanPart, number: int) -> int:
    """The bytes of a chunk of a part."""
    start, stop = part.grid.span(number)
    return stop - start


def _stretches(nbytes: int) -> list[slice]:
    """The sampled stretches of a chunk."""
    step = nbytes // _SAMPLES // 16 * 16
    return [slice(i * step, min(i * step + _SAMPLE_BYTES, nbytes)) for i in range(_SAMPLES)]


def _are_other(raw: memoryview, samples: Iterable[tuple[slice, memoryview]], width: int) -> bool:
    changed = words = 0
    for at, old in samples:
        new, before = codecs.words_of(raw[at], width), codecs.words_of(old, width)
        if len(new) != len(before):
            return True
        changed += int(np.count_nonzero(new != before))
        words += len(new)
    return changed * patches.CHANGED_PART > 2 * words
