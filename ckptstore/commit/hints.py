"""What does a commit leave in memory for the next one of the same plan?

The ids and checksums of its chunks, by which unchanged ones are found; and, within a budget, the
bytes of those that changed little, as bases of patches. Losing any of it costs time alone.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from ckptstore.core import forks
from ckptstore.core.ids import ChunkId, checksum
from ckptstore.objects import patches
from ckptstore.repository.dedup import ChunkTable
from ckptstore.repository.memory_budget import PatchMemory

WAIT_MAX = 128
"""A leaf that changes in most words is looked at again after so many commits at most."""

LeafChunk: TypeAlias = tuple[int, int]
"""A leaf of a plan, and the number of a chunk in it."""


class Old(NamedTuple):
    """The chunk that was at a place in the last commit: its raw bytes, how far it is from one that
    is stored whole, and the checksum of the bytes, or nothing if they were verified just now."""

    id: ChunkId
    raw: memoryview
    chain: patches.ChainLength
    checksum: bytes = b""

    def is_sound(self) -> bool:
        """Whether memory has kept the bytes. A patch of others would make no chunk, nor would any
        that comes after it."""
        return not self.checksum or checksum(self.raw) == self.checksum


@dataclass(slots=True)
class _Leaf:
    """How a leaf changes: while it is `dense`, no chunk of it becomes a patch; it is looked at
    again in `wait` commits."""

    dense: bool = False
    wait: int = 0
    waited: int = 1


class HeldChunks:
    """What the commits of one plan remember for the next: chunks in memory, and which leaves
    change in few words. Threads may share it, and saves that overlap: memory that one has taken,
    no other finds."""

    def __init__(self) -> None:
        self.kept_bytes = 0
        self._olds: dict[LeafChunk, Old] = {}
        self._leaves: dict[int, _Leaf] = {}
        self._lock = forks.lock()

    def take(self, at: LeafChunk, chunk: ChunkId) -> Old | None:
        """The chunk that was kept at a place, if it is `chunk`. It is the caller's alone until
        `keep` gives it back."""
        old = self._olds.pop(at, None)
        if old is not None and old.id != chunk:
            self.give_up(old)
            return None
        return old

    def has(self, at: LeafChunk) -> bool:
        """Whether a chunk is kept at a place."""
        return at in self._olds

    def keep(self, at: LeafChunk, old: Old | None, now: Old, memory: PatchMemory) -> None:
        """Keep a copy of what is now at a place, in the memory of the `old` chunk that was taken
        there; nothing if `memory` does not admit it."""
        copy = old.raw if old and len(old.raw) == len(now.raw) else None
        if copy is None:
            self.give_up(old)
            if not memory.admits(self, len(now.raw)):
                return
            copy = memoryview(bytearray(len(now.raw)))
            self._count(len(copy))
        np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(now.raw, np.uint8))
        self.give_up(self._olds.pop(at, None))  # of a save that overlaps with this one
        self._olds[at] = now._replace(raw=copy)

    def give_up(self, old: Old | None) -> None:
        """Keep nothing in the memory of a chunk that was taken."""
        if old is not None:
            self._count(-len(old.raw))

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.kept_bytes += nbytes

    def begin(self) -> None:
        """A commit begins: leaves that changed in most words are one commit nearer to the next
        look."""
        for leaf in list(self._leaves.values()):  # saves that overlap may add some
            leaf.wait -= 1

    def is_dense(self, leaf: int) -> bool:
        """Whether a leaf need not be looked at in this commit."""
        known = self._leaves.get(leaf)
        return known is not None and known.dense and known.wait > 0

    def is_sparse(self, leaf: int) -> bool:
        """Whether the last look at a leaf has shown that few words change."""
        known = self._leaves.get(leaf)
        return known is not None and not known.dense

    def found(self, leaf: int, *, dense: bool) -> None:
        """What a look at a leaf has shown."""
        known = self._leaves.setdefault(leaf, _Leaf())
        known.dense = dense
        if dense:
            known.waited = min(2 * known.waited, WAIT_MAX)
            known.wait = known.waited
        else:
            known.waited = 1


@dataclass(slots=True)
class DedupHints:
    """What the last commit of a plan leaves for the next: its chunk table, which saves work, and
    chunks as bases of patches."""

    last: ChunkTable | None = None
    held: HeldChunks = field(default_factory=HeldChunks)
