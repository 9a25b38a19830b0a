"""How can peers take a state's chunks while training goes on? It is held still: copied, except for
chunks that the store has.

Chunks of the store's last commits are served from there; a session protects them from gc until the
offer is closed. They are found by their checksums, which the chunk index has
(docs/decisions/045-checksums-name-chunks-between-replicas.md).

All other chunks are copied to one staging buffer and hashed there, so that peers get the hashed
bytes even if tensors change.

Chunks that the store has as patches are offered as these, too, for peers that have the base.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from ckptstore.errors import Corrupt, InvalidInput, NotFound, Unavailable
from ckptstore.interop.torchft.targets import placed_leaves
from ckptstore.interop.torchft.wire import (
    CHUNKS_PER_REQUEST,
    Description,
    ServedPatch,
    checksum_of,
    encode_description,
    encode_patches,
    name_of,
    name_of_pieces,
    name_with,
)
from ckptstore.plugin.encoding import encode_schema, split_pages
from ckptstore.plugin.leaves import FlatState, Source, memory_of
from ckptstore.plugin.model import INLINE_BYTES, RUN_BYTES, ChunkId, LeafContent
from ckptstore.plugin.storage import FileRange
from ckptstore.plugin.tensors import (
    Buffer,
    BufferPool,
    Copy,
    TensorSource,
    copy_task,
    prepare,
    tensors,
)
from ckptstore.plugin.text import bytes_text
from ckptstore.plugin.values import flatten
from ckptstore.plugin.work import ThreadPool
from ckptstore.plugin.writing import ChunkRun, Extent, GcPin, plan_chunks

T = TypeVar("T")

KEY = "state"
"""The only key of the application state: the value that is sent."""

PIECE_BYTES = 512 << 10
"""Bytes copied before they are hashed: both copies fit a core's private cache. Copy and name of a
chunk of 1 MiB take 0.073 s per GB in two pieces, and 0.090 s in one (EPYC, 1 MiB of L2).
"""

SAMPLE_BATCHES = 16
"""Batches, spread over the state, in which chunks of the store are looked for first."""


@dataclass(frozen=True, slots=True)
class ServedExtent:
    """The bytes of a leaf, or of one box of it, that are cut into the chunks `first:stop` of the
    state.
    """

    leaf: int
    source: Source
    extent: Extent
    first: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True)
class CutState:
    """A state cut into `count` chunks, numbered in order. Small leaves are stored in pages instead,
    and aliases not at all.
    """

    flat: FlatState
    parts: tuple[ServedExtent, ...]
    batches: tuple[tuple[ChunkRun, ...], ...]
    count: int

    def chunks(self, run: ChunkRun) -> Iterator[tuple[int, int, int]]:
        """The chunks of a run: number in the state, first and last byte in the part."""
        first = self.parts[run.part.leaf].first + run.first
        for i, (start, stop) in enumerate(itertools.pairwise(run.cuts)):
            yield first + i, start, stop

    def read(self, run: ChunkRun) -> Iterator[tuple[int, int, int, memoryview]]:
        """The chunks of a run with their bytes, without a copy where possible."""
        memory = memory_of(self.parts[run.part.leaf].source, run.cuts[0], run.cuts[-1])
        for number, start, stop in self.chunks(run):
            yield number, start, stop, memory[start - run.cuts[0] : stop - run.cuts[0]]


def cut_state(flat: FlatState, chunk_bytes: int) -> CutState:
    parts = list(_parts(flat))
    plan = plan_chunks([part.extent for part in parts], chunk_bytes)
    ends = list(itertools.accumulate(map(len, plan.parts), initial=0))
    numbered = tuple(
        replace(part, first=first, stop=stop)
        for part, (first, stop) in zip(parts, itertools.pairwise(ends), strict=True)
    )
    return CutState(flat, numbered, plan.batches, ends[-1])


def batches(items: Sequence[T], nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Items that a thread handles together, up to a run, so that extra memory stays bounded, and up
    to a request.
    """
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and (size + nbytes(item) > RUN_BYTES or len(batch) == CHUNKS_PER_REQUEST):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += nbytes(item)
    if batch:
        yield batch


class StoredChunk(NamedTuple):
    """A chunk of the store: its id and raw bytes."""

    id: ChunkId
    nbytes: int


class Stored:
    """The chunks of a state that the store keeps until `pin` ends, by name. `committed` are the
    candidates: ids by checksum.
    """

    def __init__(self, pin: GcPin, committed: Mapping[bytes, ChunkId]) -> None:
        self._pin, self._committed = pin, committed
        self.found: dict[bytes, StoredChunk] = {}
        self.end = pin.end

    def find(
        self, cut: CutState, names: list[bytes], threads: ThreadPool, *, thorough: bool
    ) -> None:
        """Hash a live state where it lies, set the `names` of its chunks, and find those that live
        packs hold.

        Unless `thorough`, the search ends with a sample that has no committed chunk, as in dense
        training: hashing all of it in vain adds a fifth to the time of the copy.
        """
        ids = dict[bytes, ChunkId]()

        def look(batch: Sequence[ChunkRun]) -> None:
            for number, _, _, data in itertools.chain.from_iterable(map(cut.read, batch)):
                name = names[number] = name_of(data)
                if chunk := self._committed.get(checksum_of(name)):
                    ids[name] = chunk

        stride = len(cut.batches) // SAMPLE_BATCHES or 1
        rest = [batch for i, batch in enumerate(cut.batches) if i % stride]
        if self._committed:
            threads.spread(look, cut.batches[::stride])
            if ids or thorough:
                threads.spread(look, rest)
        held = self._pin.held(b"".join(ids.values()))
        self.found = {
            name: StoredChunk(chunk, held[chunk]) for name, chunk in ids.items() if chunk in held
        }

    def patches(self) -> Iterator[tuple[ServedPatch, memoryview]]:
        """Those chunks of the state that the store has as patches, and the bytes of these."""
        objects, names = self._pin.objects, {each.id: name for name, each in self.found.items()}
        with suppress(NotFound, Unavailable):  # then chunks are served whole
            found = objects.patches_of(b"".join(names))
            bases = objects.locate(b"".join(patch.head.bases[0] for patch in found.values()))
            known = bases[bases["found"] == 1]
            summed = dict(known[["chunk", "checksum"]].tolist())
            for chunk, patch in found.items():
                if base := summed.get(patch.head.bases[0]):
                    name, nbytes = name_of(patch.stored), len(patch.stored)
                    yield ServedPatch(names[chunk], name_with(base), name, nbytes), patch.stored

    def spans(self, names: Sequence[bytes], *, verified: bool) -> Iterator[memoryview | FileRange]:
        """The bytes of chunks, in order; with `verified`, compared with their checksums. Raises
        `Unavailable` if the store has lost a chunk.
        """
        objects = self._pin.objects
        for some in batches(names, lambda name: self.found[name].nbytes):
            ids = b"".join(self.found[name].id for name in some)
            if not verified and (ranges := objects.file_ranges(ids)):
                yield from ranges
                continue
            out = [memoryview(bytearray(self.found[name].nbytes)) for name in some]
            try:
                objects.read_into(ids, out)
            except (Corrupt, NotFound) as error:
                raise Unavailable(
                    f"the store no longer gives what was to be served from it: {error}"
                ) from error
            yield from out


def _parts(flat: FlatState) -> Iterator[ServedExtent]:
    for leaf, (source, shape) in enumerate(zip(flat.leaves, flat.schema.shapes, strict=True)):
        if flat.schema.aliases[leaf] >= 0:
            continue
        if leaf in flat.held:
            for box, part in flat.held[leaf].parts:
                yield ServedExtent(leaf, part, Extent(shape, part.width, part.nbytes, "", box))
        elif source.nbytes > INLINE_BYTES:
            whole = shape if flat.schema.kinds[leaf] == "tensor" else (source.nbytes,)
            yield ServedExtent(leaf, source, Extent(whole, source.width, source.nbytes, ""))


def flatten_state(state: Any) -> FlatState:
    """The leaves of any state; a DTensor is a leaf of which this rank has boxes. Raises
    `InvalidInput`, naming values that cannot travel.
    """
    return flatten({KEY: state}, ranks=True)[KEY]


@dataclass(frozen=True, slots=True)
class ServedState:
    """The description and the chunks of one state: copies of `staged_bytes`, and what the store
    has. Does not change until `close`, which frees all that is `taken` for it.
    """

    step: int
    description: bytes
    staged_bytes: int
    chunks: dict[bytes, memoryview]
    stored: Stored | None
    taken: ExitStack

    def find(self, name: bytes) -> memoryview | StoredChunk | None:
        """A chunk of this state; None for another."""
        return self.chunks.get(name) or (self.stored.found.get(name) if self.stored else None)

    def spans(self, names: Sequence[bytes], *, verified: bool) -> Iterator[memoryview | FileRange]:
        """The bytes of chunks of this state, in order. With `verified`, chunks of the store are
        compared with their names; otherwise the receiver does that. Raises `Unavailable` if the
        store has lost one.
        """
        for is_copied, some in itertools.groupby(names, self.chunks.__contains__):
            if is_copied:
                yield from map(self.chunks.__getitem__, some)
            elif self.stored:
                yield from self.stored.spans(list(some), verified=verified)

    def close(self) -> None:
        """Free the memory and end the gc pin: no reader may be left."""
        self.chunks.clear()
        self.taken.close()


def make_offer(
    state: Any,
    step: int,
    *,
    chunk_bytes: int,
    pool: BufferPool,
    threads: ThreadPool,
    stored: Stored | None,
) -> ServedState:
    """An offer of `state`, whose tensors may change afterwards. `stored`, of the store that may
    have chunks, ends with the offer, or at once if there is none.

    Raises `InvalidInput` for values that cannot travel, and for a state that does not fit into the
    pool; then nothing of it stays taken.
    """
    with ExitStack() as taken:
        if stored:
            taken.callback(stored.end)
        cut = cut_state(flatten_state(state), chunk_bytes)
        names, chunks = [b""] * cut.count, dict[bytes, memoryview]()
        if stored:
            nbytes = sum(part.source.nbytes for part in cut.parts)
            stored.find(cut, names, threads, thorough=nbytes > pool.budget_bytes)

        def missing(batch: Sequence[ChunkRun]) -> Iterator[tuple[Source, int, int, int]]:
            """The chunks of a batch that the store lacks: source, number, first and last byte."""
            for run in batch:
                for number, start, stop in cut.chunks(run):
                    if not stored or names[number] not in stored.found:
                        yield cut.parts[run.part.leaf].source, number, start, stop

        sizes = (sum(stop - start for _, _, start, stop in missing(batch)) for batch in cut.batches)
        *offsets, nbytes = itertools.accumulate(sizes, initial=0)
        if nbytes:
            buffer = _take_room(nbytes, pool, taken)
            prepare((part.source for part in cut.parts), buffer)

            def copy(place: tuple[int, Sequence[ChunkRun]]) -> None:
                offset, batch = place
                for source, number, start, stop in missing(batch):
                    pieces = _copied(source, start, stop, buffer, offset)
                    name = names[number] = name_of_pieces(pieces)
                    chunks[name] = buffer.memory[offset : (offset := offset + stop - start)]

            threads.spread(copy, list(zip(offsets, cut.batches, strict=True)))
        patches = list(stored.patches()) if stored and stored.found else []
        description = _describe(step, chunk_bytes, cut, names, chunks, patches)
        return ServedState(step, description, nbytes, chunks, stored, taken.pop_all())


def _take_room(nbytes: int, pool: BufferPool, taken: ExitStack) -> Buffer:
    if nbytes > pool.budget_bytes:
        raise InvalidInput(
            f"to send this state, {bytes_text(nbytes)} must be copied, and staging memory is "
            f"limited to {bytes_text(pool.budget_bytes)}: give the transport more staging_bytes, "
            "or a store in which the state is committed"
        )
    buffer = pool.take(nbytes, wait=False)
    assert buffer is not None, "what was served before has been withdrawn"
    taken.callback(pool.give, buffer)
    return buffer


def _copied(
    source: Source, start: int, stop: int, buffer: Buffer, offset: int
) -> Iterator[memoryview]:
    """The pieces of a chunk, copied to `offset`, each while it is still in the processor's cache,
    so that hashing hardly touches memory.
    """
    memory = buffer.memory[offset : offset + stop - start]
    if isinstance(source, TensorSource) and tensors.is_plain(source.tensor):
        address = source.tensor.data_ptr() + start
        for at in range(0, stop - start, PIECE_BYTES):
            piece = memory[at : at + PIECE_BYTES]
            ctypes.memmove(
                buffer.address + offset + at, address + at, len(piece)
            )  # releases the GIL
            yield piece
        return
    if isinstance(source, TensorSource):
        copy_task((Copy(offset, stop - start, start, source),), buffer)
    else:
        source.stage(start, stop, memory)
    yield memory


def _describe(
    step: int,
    chunk_bytes: int,
    cut: CutState,
    names: Sequence[bytes],
    chunks: dict[bytes, memoryview],
    patches: Sequence[tuple[ServedPatch, memoryview]],
) -> bytes:
    """The description of a state with these chunk names; the chunks of its metadata, the patches
    and their list are added to `chunks`.
    """
    schema = cut.flat.schema
    by_leaf = {leaf: list(some) for leaf, some in itertools.groupby(cut.parts, lambda p: p.leaf)}
    contents = [
        LeafContent(
            None,
            b"".join(names[parts[0].first : parts[-1].stop]),
            source.nbytes,
            tuple(part.extent.box for part in parts if part.extent.box) or None,
        )
        if (parts := by_leaf.get(leaf))
        else LeafContent(bytes(memory_of(source, 0, source.nbytes)))
        for leaf, source in enumerate(cut.flat.leaves)
    ]
    metadata = [encode_schema(schema), *split_pages(schema.kinds, contents)]
    sized = [(name_of(data), len(data)) for data in metadata]
    chunks |= {name: memoryview(data) for (name, _), data in zip(sized, metadata, strict=True)}
    listed = None
    if patches:
        data = encode_patches(patch for patch, _ in patches)
        listed = name_of(data), len(data)
        chunks |= {patch.patch: stored for patch, stored in patches}
        chunks[listed[0]] = memoryview(data)
    placed = placed_leaves(cut.flat)
    return encode_description(Description(step, chunk_bytes, tuple(sized), placed, listed))
