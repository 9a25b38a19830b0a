"""A state held still, so that peers can take its chunks while training goes on: what is hashed, what is copied, what need not be.

A chunk that the local store has is served from there, and not copied: a session guards it from gc until the offer is closed. All others are
copied to one arena, and hashed there: what is served is what was hashed, whatever is done to the tensors meanwhile. Where there is no store
to ask, an offer can be posted before it is filled: a peer that has nothing takes what has been copied, by number, while the rest is.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import CHUNK_ID_BYTES, digest
from ckptstore.core.model import INLINE_BYTES, LeafContent
from ckptstore.engine.look_up import Guard
from ckptstore.engine.plan import CommitPlan, Extent, Run, plan_chunks
from ckptstore.engine.transfer import Threads
from ckptstore.errors import Corrupt, InvalidInput, NotFound, Unavailable
from ckptstore.interop.exchange.meshes import placed_leaves
from ckptstore.interop.exchange.protocol import Description, Placed, decode_number, encode_description, encode_number
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


Copied: TypeAlias = Callable[[Sequence[tuple[int, bytes, memoryview]]], object]
"""Is told of chunks that have been copied: number, id, bytes."""

_ALIKE = b""
"""In the place of the id of a chunk that has the bytes of another. No chunk is called that."""


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
    """The chunks of one state, and its description. `staged_bytes` are those that are copied. Threads may share it.

    It may be served before `fill`, if `early`: then an outline describes it, and who asks for chunks by number waits until they are copied.
    """

    def __init__(self, step: int, staging: "_Staging", outline: "_Outline", arena: Arena | None, taken: ExitStack) -> None:
        """The arena is memory that `taken` gives back, and what it ends keeps what is held in the store."""
        self.step, self.early, self.staged_bytes = step, staging.guard is None, staging.nbytes
        self._staging, self._outline, self._arena, self._taken = staging, outline, arena, taken
        self._stored, self._guard = staging.stored, staging.guard
        self._chunks: dict[bytes, memoryview] = {}
        self._numbers: dict[int, bytes] = {}
        self._description: bytes | None = None
        self._early_description = (
            self._described([b"".join(map(encode_number, part)) for part in staging.numbers], early=True) if self.early else None
        )
        self._over = False
        self._changed = threading.Condition()

    def fill(self, threads: Threads) -> None:
        """Copy what must be, after which the tensors may change. Whatever it raises, nothing more comes: `close` it."""
        try:
            if self._arena:
                self._staging.copy(self._arena, threads, self._copied)
            self._description = self._described(self._staging.ids, early=False)
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def describe(self, *, early: bool, wait_s: float) -> bytes | None:
        """The description, once everything has been copied, or the outline at once if `early`; None if neither is there within `wait_s`."""
        with self._changed:
            if not (early and self._early_description):
                self._changed.wait_for(lambda: self._over, wait_s)
            return self._description or (self._early_description if early else None)

    def sizes(self, ids: Sequence[bytes], wait_s: float = 0) -> list[int | None]:
        """Raw bytes of each chunk, None for one that is not part of this state, and for a number that has not been copied within `wait_s`
        or is the same chunk as another."""
        numbers = {number for chunk in ids if (number := decode_number(chunk)) is not None}
        with self._changed:
            if numbers:
                self._changed.wait_for(lambda: self._over or numbers <= self._numbers.keys(), wait_s)
            return [self._size(self._named(chunk)) for chunk in ids]

    def _size(self, chunk: bytes) -> int | None:
        return len(self._chunks[chunk]) if chunk in self._chunks else self._stored.get(chunk)

    def _named(self, chunk: bytes) -> bytes:
        """The id of a chunk that is asked for by number, if that is known, or by id."""
        number = decode_number(chunk)
        return chunk if number is None else self._numbers.get(number, chunk)

    def _copied(self, some: "Sequence[tuple[int, bytes, memoryview]]") -> None:
        """Chunks are there, by number and id. Of those that are alike, the first is what peers get: they know then what the others are."""
        with self._changed:
            for number, chunk, memory in some:
                self._numbers[number] = chunk if chunk not in self._chunks else _ALIKE
                self._chunks.setdefault(chunk, memory)
            self._changed.notify_all()

    def _described(self, ids: Sequence[bytes | bytearray], *, early: bool) -> bytes:
        """A description with these ids of the parts; its schema and pages can be asked for."""
        description, metadata = self._outline.describe(self.step, ids, early=early)
        self._chunks |= metadata
        return description

    def spans(self, ids: Sequence[bytes], *, verified: bool) -> Iterator[memoryview | FileRange]:
        """The bytes of chunks that are part of this state, one after the other; what the store has is compared with its ids if `verified`,
        and need not be otherwise, since who receives it does that. Raises `Unavailable` if the store has lost one."""
        for in_store, some in itertools.groupby(map(self._named, ids), lambda chunk: chunk not in self._chunks):
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


def make_offer(state: Any, step: int, *, chunk_bytes: int, pool: ArenaPool, threads: Threads, guard: Guard | None) -> Offer:
    """An offer of `state`, which is to be filled; `guard`, of the store that may have it, is ended with it, or if there will be none.

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
        staging = _Staging(plan, parts, ids, stored, guard)
        outline = _Outline(flat, parts, chunk_bytes)
        arena = _room(staging.nbytes, pool, taken) if staging.nbytes else None
        return Offer(step, staging, outline, arena, taken.pop_all())


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
    """Which chunks are copied to which place of an arena of `nbytes`: those that are not `stored`, by id and raw bytes, thanks to `guard`.

    `ids` are those of each part, as far as they are known; `numbers` those that each part's chunks have in the state.
    """

    def __init__(
        self, plan: CommitPlan, parts: Sequence[Part], ids: list[bytearray], stored: dict[bytes, int], guard: Guard | None
    ) -> None:
        self._parts, self.ids, self.stored, self.guard = parts, ids, stored, guard
        ends = list(itertools.accumulate(map(len, plan.parts), initial=0))
        self.numbers = list(itertools.starmap(range, itertools.pairwise(ends)))
        self._places: list[list[_Place]] = []
        self.nbytes = 0
        for batch in plan.batches:
            places = [place for run in batch for place in _places(run) if bytes(ids[place.part][place.where]) not in stored]
            if places:
                self._places.append([replace(place, offset=self._reserve(place.nbytes)) for place in places])

    def copy(self, arena: Arena, threads: Threads, copied: "Copied") -> None:
        """Copy the chunks, and hand them to `copied` by the ids of the copies, which `ids` has afterwards."""
        prepare(devices_of(part.source.tensor for part in self._parts if isinstance(part.source, TensorSource)), arena)
        threads.spread(lambda places: copied(self._copy(places, arena)), self._places)

    def _reserve(self, nbytes: int) -> int:
        offset, self.nbytes = self.nbytes, self.nbytes + nbytes
        return offset

    def _copy(self, places: "list[_Place]", arena: Arena) -> list[tuple[int, bytes, memoryview]]:
        done = []
        for place in places:
            memory = arena.memory[place.offset : place.offset + place.nbytes]
            source = self._parts[place.part].source
            if isinstance(source, TensorSource):
                copy_task((_copy_of(source, place),), arena)
            else:
                source.stage(place.start, place.stop, memory)
            # Still in the processor's cache, so that hashing hardly touches memory.
            chunk = self.ids[place.part][place.where] = digest(memory)
            done.append((self.numbers[place.part][place.number], chunk, memory))
        return done


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


class _Outline:
    """What a description says but for the ids of chunks. Small leaves are read when it is made."""

    def __init__(self, flat: Flat, parts: Sequence[Part], chunk_bytes: int) -> None:
        self._chunk_bytes, self._parts = chunk_bytes, parts
        self._kinds, self._schema = flat.schema.kinds, encode_schema(flat.schema)
        self._placed: dict[int, Placed] = placed_leaves(flat)
        chunked = {part.leaf for part in parts}
        self._contents = [
            LeafContent(None, b"", source.nbytes) if leaf in chunked else LeafContent(bytes(read_part(source, 0, source.nbytes)))
            for leaf, source in enumerate(flat.leaves)
        ]

    def describe(self, step: int, ids: "Sequence[bytes | bytearray]", *, early: bool) -> tuple[bytes, dict[bytes, memoryview]]:
        """The description with these ids of the parts, and the chunks that it names itself."""
        pages = split_pages(self._kinds, self._with(ids))
        metadata = [(digest(data), data) for data in (self._schema, *pages)]
        sized = [(chunk, len(data)) for chunk, data in metadata]
        description = Description(step, self._chunk_bytes, sized[0], tuple(sized[1:]), self._placed, early)
        return encode_description(description), {chunk: memoryview(data) for chunk, data in metadata}

    def _with(self, ids: "Sequence[bytes | bytearray]") -> list[LeafContent]:
        contents = list(self._contents)
        for leaf, group in itertools.groupby(zip(self._parts, ids, strict=True), lambda pair: pair[0].leaf):
            some = list(group)
            boxes = tuple(part.extent.box for part, _ in some if part.extent.box is not None)
            contents[leaf] = replace(contents[leaf], ids=b"".join(its for _, its in some), boxes=boxes or None)
        return contents


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
