"""A state held still, so that peers can take its chunks while training goes on: what is hashed, what is copied, what need not be.

A chunk that the local store has is served from there, and not copied: a session guards it from gc until the offer is closed. All others are
copied to one arena, and hashed there: what is served is what was hashed, whatever is done to the tensors meanwhile.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import CHUNK_ID_BYTES, digest
from ckptstore.core.model import INLINE_BYTES, LeafContent
from ckptstore.engine.look_up import Guard
from ckptstore.engine.plan import CommitPlan, Extent, Run, plan_chunks
from ckptstore.engine.transfer import Threads
from ckptstore.errors import Corrupt, InvalidInput, NotFound, Unavailable
from ckptstore.interop.exchange.meshes import placed_leaves
from ckptstore.interop.exchange.protocol import Description, encode_description
from ckptstore.objects.pages import split_pages
from ckptstore.objects.schema import encode_schema
from ckptstore.objects.store import FileRange
from ckptstore.state import tensors
from ckptstore.state.arenas import Arena, ArenaPool
from ckptstore.state.devices import devices_of, prepare
from ckptstore.state.flat import Flat, Source
from ckptstore.state.flatten import flatten
from ckptstore.state.leaves import TensorSource
from ckptstore.state.staging import Copy, Gather, Move, copy_task
from ckptstore.text import bytes_text

KEY = "state"
"""What is sent is one value of any kind: the only key of an application state."""


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes of a leaf, or of one box of it, that are cut into chunks."""

    leaf: int
    source: Source
    extent: Extent


def flatten_state(state: Any) -> Flat:
    """The leaves of any state; a DTensor is a leaf that this rank has boxes of. Raises `InvalidInput`, naming what cannot travel."""
    return flatten({KEY: state}, ranks=True)[KEY]


def parts_of(flat: Flat) -> list[Part]:
    """What of a state is chunks: all but aliases and small leaves, which lie in pages."""
    return list(_parts(flat))


def read_part(source: Source, start: int, stop: int) -> memoryview:
    """Bytes of a leaf, where they are if they can be read there."""
    view = source.view(start, stop)
    if view is None:
        view = memoryview(bytearray(stop - start))
        source.stage(start, stop, view)
    return view


class Offer:
    """The chunks of one state, and its description. `staged_bytes` are those that were copied."""

    def __init__(self, step: int, description: bytes, chunks: dict[bytes, memoryview], held: "_Held", taken: ExitStack) -> None:
        """`chunks` lie in memory that `taken` gives back, and what it ends keeps what is `held` in the store."""
        self.step, self.description, self.staged_bytes = step, description, held.staged_bytes
        self._chunks, self._stored, self._guard, self._taken = chunks, held.stored, held.guard, taken

    def sizes(self, ids: Sequence[bytes]) -> list[int | None]:
        """Raw bytes of each chunk, None for one that is not part of this state."""
        return [len(self._chunks[chunk]) if chunk in self._chunks else self._stored.get(chunk) for chunk in ids]

    def spans(self, ids: Sequence[bytes], *, verified: bool) -> Iterator[memoryview | FileRange]:
        """The bytes of chunks that are part of this state, one after the other; what the store has is compared with its ids if `verified`,
        and need not be otherwise, since who receives it does that. Raises `Unavailable` if the store has lost one."""
        for in_store, some in itertools.groupby(ids, lambda chunk: chunk not in self._chunks):
            if in_store:
                yield from self._stored_spans(list(some), verified=verified)
            else:
                yield from map(self._chunks.__getitem__, some)

    def close(self) -> None:
        """Give the memory back and let gc go on: nobody may read any more."""
        self._chunks = {}
        self._taken.close()

    def _stored_spans(self, ids: list[bytes], *, verified: bool) -> Iterator[memoryview | FileRange]:
        assert self._guard is not None
        objects = self._guard.objects
        for some in _batches(ids, self._stored):
            joined = b"".join(some)
            if not verified and (ranges := objects.file_ranges(joined)):
                yield from ranges
                continue
            out = [memoryview(bytearray(self._stored[chunk])) for chunk in some]
            try:
                objects.read_into(joined, out)
            except (Corrupt, NotFound) as error:
                raise Unavailable(f"the store no longer gives what was to be served from it: {error}") from error
            yield from out


@dataclass(frozen=True, slots=True)
class _Held:
    """What of a state need not be copied, by id and raw bytes, thanks to `guard`, and how much was."""

    stored: dict[bytes, int]
    guard: Guard | None
    staged_bytes: int


def make_offer(state: Any, step: int, *, chunk_bytes: int, pool: ArenaPool, threads: Threads, guard: Guard | None) -> Offer:
    """Hold `state` still; `guard`, of the store that may have it, is ended with the offer, or if there will be none.

    Raises `InvalidInput` for what cannot travel or does not fit into the pool, of which nothing may be taken.
    """
    with ExitStack() as taken:
        if guard:
            taken.callback(guard.end)
        flat = flatten_state(state)
        parts = parts_of(flat)
        plan = plan_chunks([part.extent for part in parts], chunk_bytes)
        ids = [bytearray(len(part) * CHUNK_ID_BYTES) for part in plan.parts]
        stored: dict[bytes, int] = {}
        if guard:
            threads.spread(lambda batch: _hash_batch(batch, parts, ids), plan.batches)
            stored = guard.held(b"".join(ids))
        staging = _Staging(plan, parts, ids, stored)
        chunks = staging.copy(_room(staging.nbytes, pool, taken), threads) if staging.nbytes else {}
        description = _describe(flat, parts, ids, step, chunk_bytes, chunks)
        return Offer(step, description, chunks, _Held(stored, guard, staging.nbytes), taken.pop_all())


def _room(nbytes: int, pool: ArenaPool, taken: ExitStack) -> Arena:
    if nbytes > pool.budget_bytes:
        raise InvalidInput(
            f"to send this state, {bytes_text(nbytes)} must be copied, and staging memory is limited to "
            f"{bytes_text(pool.budget_bytes)}: give the transport more staging_bytes, or a store in which the state is committed"
        )
    arena = pool.take(nbytes, wait=False)
    assert arena is not None, "what was served before has been withdrawn"
    taken.callback(pool.give, arena)
    return arena


class _Staging:
    """Which chunks are copied to which place of an arena of `nbytes`: those that are not `stored`."""

    def __init__(self, plan: CommitPlan, parts: Sequence[Part], ids: list[bytearray], stored: dict[bytes, int]) -> None:
        self._parts, self._ids = parts, ids
        self._places: list[list[_Place]] = []
        self.nbytes = 0
        for batch in plan.batches:
            places = [place for run in batch for place in _places(run) if bytes(ids[place.part][place.where]) not in stored]
            if places:
                self._places.append([replace(place, offset=self._reserve(place.nbytes)) for place in places])

    def copy(self, arena: Arena, threads: Threads) -> dict[bytes, memoryview]:
        """The chunks that were copied, by the ids of the copies, which `ids` has afterwards."""
        prepare(devices_of(part.source.tensor for part in self._parts if isinstance(part.source, TensorSource)), arena)
        threads.spread(lambda places: self._copy(places, arena), self._places)
        return {
            bytes(self._ids[place.part][place.where]): arena.memory[place.offset : place.offset + place.nbytes]
            for places in self._places
            for place in places
        }

    def _reserve(self, nbytes: int) -> int:
        offset, self.nbytes = self.nbytes, self.nbytes + nbytes
        return offset

    def _copy(self, places: "list[_Place]", arena: Arena) -> None:
        for place in places:
            source = self._parts[place.part].source
            if isinstance(source, TensorSource):
                copy_task((_copy_of(source, place),), arena)
            else:
                source.stage(place.start, place.stop, arena.memory[place.offset : place.offset + place.nbytes])
            # Still in the processor's cache, so that hashing hardly touches memory.
            self._ids[place.part][place.where] = digest(arena.memory[place.offset : place.offset + place.nbytes])


@dataclass(frozen=True, slots=True)
class _Place:
    """A chunk: bytes `start:stop` of a part, number `number` of its chunks, and where in the arena it is copied to."""

    part: int
    number: int
    start: int
    stop: int
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def where(self) -> slice:
        return slice(self.number * CHUNK_ID_BYTES, (self.number + 1) * CHUNK_ID_BYTES)


def _places(run: Run) -> Iterator[_Place]:
    for i, (start, stop) in enumerate(itertools.pairwise(run.cuts)):
        yield _Place(run.part.leaf, run.first + i, start, stop)


def _copy_of(source: TensorSource, place: _Place) -> Copy:
    if tensors.is_plain(source.tensor):
        return Move(source.tensor.data_ptr() + place.start, place.offset, place.nbytes)
    return Gather(source, place.start, place.stop, place.offset)


def _hash_batch(batch: Iterable[Run], parts: Sequence[Part], ids: list[bytearray]) -> None:
    for place in itertools.chain.from_iterable(map(_places, batch)):
        ids[place.part][place.where] = digest(read_part(parts[place.part].source, place.start, place.stop))


def _describe(
    flat: Flat, parts: Sequence[Part], ids: list[bytearray], step: int, chunk_bytes: int, chunks: dict[bytes, memoryview]
) -> bytes:
    """The description of the state; its schema and pages join `chunks`."""
    schema = encode_schema(flat.schema)
    pages = split_pages(flat.schema.kinds, _contents(flat, parts, ids))
    metadata = [(digest(data), data) for data in (schema, *pages)]
    chunks.update((chunk, memoryview(data)) for chunk, data in metadata)
    sized = [(chunk, len(data)) for chunk, data in metadata]
    return encode_description(Description(step, chunk_bytes, sized[0], tuple(sized[1:]), placed_leaves(flat)))


def _contents(flat: Flat, parts: Sequence[Part], ids: list[bytearray]) -> list[LeafContent]:
    contents: dict[int, LeafContent] = {}
    for leaf, group in itertools.groupby(zip(parts, ids, strict=True), lambda pair: pair[0].leaf):
        some = list(group)
        boxes = tuple(part.extent.box for part, _ in some if part.extent.box is not None)
        joined = b"".join(its for _, its in some)
        contents[leaf] = LeafContent(None, joined, flat.leaves[leaf].nbytes, boxes or None)
    return [contents.get(leaf) or LeafContent(bytes(read_part(source, 0, source.nbytes))) for leaf, source in enumerate(flat.leaves)]


def _parts(flat: Flat) -> Iterator[Part]:
    for leaf, (source, shape) in enumerate(zip(flat.leaves, flat.schema.shapes, strict=True)):
        if flat.schema.aliases[leaf] >= 0:
            continue
        if leaf in flat.held:
            for box, part in flat.held[leaf].parts:
                yield Part(leaf, part, Extent(shape, part.width, part.nbytes, False, box))
        elif source.nbytes > INLINE_BYTES:
            whole = shape if flat.schema.kinds[leaf] == "tensor" else (source.nbytes,)
            yield Part(leaf, source, Extent(whole, source.width, source.nbytes, False))


def _batches(ids: Sequence[bytes], sizes: dict[bytes, int]) -> Iterator[list[bytes]]:
    """Chunks that are read together: up to a run, so that memory stays bounded."""
    batch: list[bytes] = []
    size = 0
    for chunk in ids:
        if batch and size + sizes[chunk] > RUN_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(chunk)
        size += sizes[chunk]
    if batch:
        yield batch
