"""Which chunks does a mirror send as patches, and of what?

Those that the source stores as patches, so that dense training pays nothing. A patch is made anew,
of the chunk at the same place in a commit that the target has: the source's own base may have
never been there. Both chunks are compared with their ids, and the chains of the target are as
bounded as those of a commit.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

from ckptstore.commit.plan import PlanPart
from ckptstore.commit.predecessors import Predecessors, grids_of
from ckptstore.core.ids import ChunkId, checksum
from ckptstore.errors import Corrupt, NotFound
from ckptstore.maintenance.mirror_plan import CommitTransfer
from ckptstore.maintenance.mover import fill, memory_for
from ckptstore.objects import codecs, patches
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.dedup import Dedup, items_of
from ckptstore.repository.pack_writer import NewPatch
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import Scratch
from ckptstore.restore.reader import Tree


class LackedChunk(NamedTuple):
    """A chunk that the target lacks, and how the source stores it."""

    id: ChunkId
    raw_bytes: int
    width: int
    codec: int


class _Base(NamedTuple):
    """A chunk that the target has."""

    id: ChunkId
    raw_bytes: int


class MirrorPatcher:
    """Makes patches for one commit that is sent. Threads may share it.

    What both ends have is read from the `near` one, which needs no requests if either is a local
    disk: a pull from a bucket asks it for patches alone.
    """

    def __init__(
        self,
        source: StoreHandle,
        target: StoreHandle,
        dedup: Dedup,
        bases: Mapping[ChunkId, ChunkId],
    ) -> None:
        self.dedup = dedup
        self._bases, self._there = bases, target.objects
        slow = source.storage.capabilities.slow_requests
        self._near: ObjectStore = target.objects if slow else source.objects

    @contextmanager
    def olds(
        self, chunks: Iterable[LackedChunk], scratch: Scratch
    ) -> Iterator[dict[ChunkId, memoryview]]:
        """The verified bytes of those bases of chunks that the target has, for the duration of a
        block; none if one cannot be read: then the chunks are sent whole."""
        named = {base: c.raw_bytes for c in chunks if (base := self._bases.get(c.id))}
        held = self.dedup.held(b"".join(named))
        wanted = b"".join(base for base in named if held.get(base) == named[base])
        there = self._near.locate(wanted)
        found = map(ChunkId, there[there["found"] == 1]["chunk"].tolist())
        olds = [_Base(base, named[base]) for base in found]
        if not olds:
            yield {}
            return
        with memory_for(olds, scratch) as rows:
            try:
                fill(self._near, rows, "the base of a chunk that is sent", verify_ids=True)
            except (Corrupt, NotFound):
                rows = []
            yield {base.id: raw for base, raw in rows}

    def make(
        self,
        rows: Iterable[tuple[LackedChunk, memoryview]],
        olds: Mapping[ChunkId, memoryview],
    ) -> dict[ChunkId, NewPatch]:
        """Patches that make chunks, given with their bytes, of `olds`: of those that differ in few
        words. The target's packs of the bases are reused then, as by a commit."""
        return self.dedup.allowed(self._tried(rows, olds))

    def _tried(
        self,
        rows: Iterable[tuple[LackedChunk, memoryview]],
        olds: Mapping[ChunkId, memoryview],
    ) -> Iterator[NewPatch]:
        lengths = self._lengths(olds)
        for chunk, raw in rows:
            base = self._bases.get(chunk.id)
            if base is None or base not in olds or base not in lengths:
                continue
            old, width = olds[base], chunk.width
            if (at := patches.changed(raw, old, width)) is None:
                continue
            if stored := patches.encode(raw, old, width, at, [base], lengths[base]):
                yield NewPatch(chunk.id, checksum(raw), len(raw), width, (base,), stored)

    def _lengths(self, bases: Iterable[ChunkId]) -> dict[ChunkId, patches.ChainLength]:
        """How far bases are from chunks that the target stores whole. Where both ends have one in
        as many steps, the near end says how many bytes these take."""
        ids, asked = b"".join(bases), dict[ObjectStore, list[ChunkId]]()
        depths = dict(self._near.locate(ids)[["chunk", "depth"]].tolist())
        for chunk, depth in self._there.locate(ids)[["chunk", "depth"]].tolist():
            end = self._near if depths[chunk] == depth else self._there
            asked.setdefault(end, []).append(chunk)
        found = dict[ChunkId, patches.ChainLength]()
        for end, chunks in asked.items():
            with suppress(Corrupt, NotFound):
                found |= end.chains_of(b"".join(chunks))
        return found


def find_bases(
    source: StoreHandle,
    transfer: CommitTransfer,
    trees: Iterable[Tree],
    missing: Iterable[Sequence[LackedChunk]],
) -> dict[ChunkId, ChunkId]:
    """For the chunks of a commit that the source stores as patches, those at their places in the
    commit that the target has (`CommitTransfer.like`)."""
    patched = {c.id for batch in missing for c in batch if c.codec == codecs.PATCH}
    like = transfer.like and source.log.state.commits.get(transfer.like)
    if not patched or not transfer.like or not like:
        return {}
    parts = [part for tree in trees for part in _parts_with(tree, patched)]
    paths = {leaf: each.path for leaf, each in enumerate(parts)}
    objects, chunk_bytes = source.objects, source.config.chunk_bytes
    before = Predecessors(objects, like.session, transfer.like, paths, chunk_bytes)
    return {
        chunk: base
        for leaf, each in enumerate(parts)
        for number, chunk in each.chunks
        if (base := before.chunk(replace(each.part, leaf=leaf), number))
    }


class _PartWith(NamedTuple):
    """A part of a leaf, its path, and those of its chunks that are looked for, with their
    numbers."""

    path: str
    part: PlanPart
    chunks: Sequence[tuple[int, ChunkId]]


def _parts_with(tree: Tree, wanted: Set[ChunkId]) -> Iterator[_PartWith]:
    """The parts of a tree's leaves that have chunks of `wanted`."""
    schema = tree.schema
    for i, content in enumerate(tree.contents):
        ids = [ChunkId(chunk) for chunk in items_of(content.ids)]
        if wanted.isdisjoint(ids):
            continue
        first, (_, width) = 0, tree.extent(i)
        for cells in grids_of(schema, content, i, width, tree.chunk_bytes):
            numbered = enumerate(ids[first : first + len(cells)])
            chunks = [(number, chunk) for number, chunk in numbered if chunk in wanted]
            part = PlanPart(i, cells, width, content.raw_bytes, schema.dtypes[i], 0, len(cells))
            yield _PartWith(schema.paths[i], part, chunks)
            first += len(cells)
