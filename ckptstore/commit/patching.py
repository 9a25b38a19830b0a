"""Which new chunks of a commit are stored as patches of those that they replace?

Only where a sample of a leaf says that few words changed, so that dense training pays next to
nothing. The bytes of the chunk that is replaced are those that the commit before kept in memory,
within a budget, or else come from the store, verified.
"""

from collections.abc import Iterable

import numpy as np

from ckptstore.commit.hints import HeldChunks, Old
from ckptstore.commit.plan import Cut, PlanPart
from ckptstore.core.ids import ChunkId
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.objects import codecs, patches
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.memory_budget import PatchMemory
from ckptstore.repository.pack_writer import NewPatch

LEAF_BYTES_MIN = 128 << 10
"""Smaller leaves are stored whole: the search would cost as much as the write."""

CHUNK_BYTES_MIN = 4 << 10

DEPTH_READ_MAX = 8
"""A chunk that must be read from the store is a base only if so few patches make it."""

_SAMPLES, _SAMPLE_BYTES = 4, 2 << 10
"""Stretches of a chunk that are compared first."""


class Patcher:
    """Makes patches for one commit. Threads may share it."""

    def __init__(self, objects: ObjectStore, held: HeldChunks, memory: PatchMemory) -> None:
        self._objects, self._held, self._memory = objects, held, memory
        held.begin()

    def is_candidate(self, part: PlanPart, cut: Cut) -> bool:
        """Whether a new chunk may become a patch at all."""
        return (
            part.raw_bytes >= LEAF_BYTES_MIN
            and cut.stop - cut.start >= CHUNK_BYTES_MIN
            and not self._held.is_dense(part.leaf)
        )

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
                before = self._read(old, len(raw))
                if before is None:
                    return None  # too far from a whole chunk to be read at every commit
        except (Corrupt, NotFound, Unavailable):
            return None  # what cannot be read is no base
        at = before and patches.changed(raw, before.raw, width)
        self._held.found(part.leaf, dense=at is None)
        if before is None or at is None:
            self._held.give_up(taken)
            return None
        stored = patches.encode(raw, before.raw, width, at, old, before.chain)
        chain = patches.head_of(stored).chain if stored else patches.WHOLE
        self._held.keep(here, taken, Old(new, raw, chain), self._memory)
        return NewPatch(new, summed, len(raw), width, old, stored) if stored else None

    def _is_other(self, old: ChunkId, raw: memoryview, width: int) -> bool:
        """Whether a sample of a chunk in the store differs in most words from `raw`. Unverified: it
        only says whether a closer look pays."""
        samples = self._objects.peek(old, _stretches(len(raw)))
        return samples is not None and _are_other(raw, samples, width)

    def _read(self, old: ChunkId, nbytes: int) -> Old | None:
        """A chunk from the store, verified; None if it has another size or too many patches make
        it."""
        chain = self._objects.chain_of(old)
        if chain.depth > DEPTH_READ_MAX:
            return None
        raw = memoryview(bytearray(nbytes))
        self._objects.read_into(old, [raw], describe=lambda _: "being patched")
        return Old(old, raw, chain)


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
