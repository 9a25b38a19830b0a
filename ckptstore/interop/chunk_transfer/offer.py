"""How can peers take a state's chunks while training goes on? It is held still: copied, except for
chunks that the store has.

Chunks found in the local store are served from there; a session protects them from gc until the
offer is closed. All others are copied to one staging buffer and hashed there, so that peers get the
hashed bytes even if tensors change. An offer is posted before it is filled: a peer that has nothing
takes copied chunks by number meanwhile.
"""

import ctypes
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ckptstore.commit.dedup_probe import GcPin
from ckptstore.core.gc_pause import uncollected
from ckptstore.core.ids import CHUNK_ID_BYTES, digest
from ckptstore.core.model import LeafContent
from ckptstore.core.text import bytes_text
from ckptstore.errors import InvalidInput
from ckptstore.interop.chunk_transfer.chunks import (
    CutState,
    Stored,
    cut_state,
    find_stored,
    read_part,
)
from ckptstore.interop.chunk_transfer.targets import placed_leaves
from ckptstore.interop.chunk_transfer.wire import (
    Description,
    Placed,
    decode_number,
    encode_description,
    encode_number,
    name_of,
    name_of_pieces,
    split_names,
)
from ckptstore.objects.pages import split_pages
from ckptstore.objects.schema import encode_schema
from ckptstore.repository.chunk_store import FileRange
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state import tensors
from ckptstore.state.devices import devices_of, prepare
from ckptstore.state.flatten import flatten
from ckptstore.state.leaf_sources import FlatState
from ckptstore.state.leaves import TensorSource
from ckptstore.state.staging import Gather, copy_task
from ckptstore.state.staging_buffers import Buffer, BufferPool

KEY = "state"
"""The only key of the application state: the value that is sent."""

PIECE_BYTES = 512 << 10
"""Bytes copied before they are hashed: both copies fit a core's private cache. Copy and name of a
chunk of 1 MiB take 0.073 s per GB in two pieces, and 0.090 s in one (EPYC, 1 MiB of L2).
"""

_ALIKE = b""
"""Replaces the name of a chunk with the same bytes as another. No chunk has this name."""


def flatten_state(state: Any) -> FlatState:
    """The leaves of any state; a DTensor is a leaf of which this rank has boxes. Raises
    `InvalidInput`, naming values that cannot travel.
    """
    return flatten({KEY: state}, ranks=True)[KEY]


class _Copy(NamedTuple):
    """A chunk to copy: its `number` in the state, bytes `start:stop` of a part, its place in the
    buffer.
    """

    number: int
    part: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Outline:
    """The description without chunk names: small leaves are in `contents`, whatever their tensors
    become.
    """

    step: int
    chunk_bytes: int
    cut: CutState
    schema: bytes
    placed: Mapping[int, Placed]
    contents: tuple[LeafContent, ...]

    def describe(
        self, names: bytes | bytearray, *, early: bool = False
    ) -> tuple[bytes, dict[bytes, memoryview]]:
        """The description with these chunk names, or numbers, and the chunks of its metadata."""
        contents = list(self.contents)
        numbers = itertools.pairwise([*(part.first for part in self.cut.parts), self.cut.count])
        of_parts = zip(self.cut.parts, numbers, strict=True)
        for leaf, group in itertools.groupby(of_parts, lambda each: each[0].leaf):
            some = list(group)
            first, last = some[0][1][0], some[-1][1][1]
            contents[leaf] = replace(
                contents[leaf],
                ids=bytes(names[first * CHUNK_ID_BYTES : last * CHUNK_ID_BYTES]),
                boxes=tuple(part.extent.box for part, _ in some if part.extent.box) or None,
            )
        metadata = [self.schema, *split_pages(self.cut.flat.schema.kinds, contents)]
        sized = [(name_of(data), len(data)) for data in metadata]
        description = Description(
            self.step, self.chunk_bytes, sized[0], tuple(sized[1:]), self.placed, early
        )
        chunks = {name: memoryview(data) for (name, _), data in zip(sized, metadata, strict=True)}
        return encode_description(description), chunks


class ServedState:
    """The chunks and the description of one state. `staged_bytes` is the size of the copies.
    Thread-safe.

    It may be served before `fill`: then an outline describes it, and requests by number wait for
    the copies.
    """

    def __init__(
        self, outline: _Outline, names: bytearray, stored: Stored | None, threads: ThreadPool
    ) -> None:
        self.step = outline.step
        self._outline, self._names, self._threads = outline, names, threads
        self._stored = stored
        self._copies, self.staged_bytes = _plan_copies(outline.cut, names, stored)
        self._buffer: Buffer | None = None
        self._taken = ExitStack()
        self._chunks: dict[bytes, memoryview] = {}
        self._numbers: dict[int, bytes] = {}
        self._description: bytes | None = None
        numbers = b"".join(map(encode_number, range(outline.cut.count)))
        self._early = self._describe(numbers, early=True)
        self._over = False
        self._changed = threading.Condition()
        seen = set[bytes]()
        for number, name in enumerate(split_names(names) if stored else ()):
            if stored and name in stored.found:
                self._numbers[number] = _ALIKE if name in seen else name
                seen.add(name)

    def take_room(self, pool: BufferPool, taken: ExitStack) -> None:
        """Take the memory for the copies; closing gives it back, and ends whatever else is `taken`.
        Raises `InvalidInput` if it is more than the pool has.
        """
        if self.staged_bytes > pool.budget_bytes:
            raise InvalidInput(
                f"to send this state, {bytes_text(self.staged_bytes)} must be copied, and staging "
                f"memory is limited to {bytes_text(pool.budget_bytes)}: give the transport more "
                "staging_bytes, or a store in which the state is committed"
            )
        if self.staged_bytes:
            self._buffer = pool.take(self.staged_bytes, wait=False)
            assert self._buffer is not None, "what was served before has been withdrawn"
            taken.callback(pool.give, self._buffer)
        self._taken = taken.pop_all()

    def fill(self) -> None:
        """Make the copies, after which the tensors may change. After an error nothing more is
        served: call `close`.
        """
        try:
            if self._buffer:
                sources = (part.source for part in self._outline.cut.parts)
                prepare(
                    devices_of(each.tensor for each in sources if isinstance(each, TensorSource)),
                    self._buffer,
                )
                self._threads.spread(self._copy, self._copies)
            self._description = self._describe(self._names)
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def describe(self, *, early: bool, wait_s: float) -> bytes | None:
        """The description once everything has been copied, or the outline at once if `early`; None
        if it is not ready within `wait_s`.
        """
        with self._changed:
            if early and not self._over:
                return self._early
            self._changed.wait_for(lambda: self._over, wait_s)
            return self._description

    def sizes(self, chunks: Sequence[bytes], wait_s: float = 0) -> list[int | None]:
        """Raw bytes of each chunk. None for a chunk of another state, for a number that has not
        been copied within `wait_s`, and for a duplicate of another chunk.
        """
        numbers = {number for chunk in chunks if (number := decode_number(chunk)) is not None}
        with self._changed:
            if numbers:
                self._changed.wait_for(
                    lambda: self._over or numbers <= self._numbers.keys(), wait_s
                )
            return [self._size(self._named(chunk)) for chunk in chunks]

    def ids(self, names: Sequence[bytes]) -> list[bytes | None]:
        """The ids of chunks, None for a chunk of another state."""
        stored = self._stored.found if self._stored else {}
        return [
            stored[name][0]
            if name in stored
            else (digest(self._chunks[name]) if name in self._chunks else None)
            for name in names
        ]

    def spans(self, chunks: Sequence[bytes], *, verified: bool) -> Iterator[memoryview | FileRange]:
        """The bytes of chunks of this state, in order. With `verified`, chunks of the store are
        compared with their names; otherwise the receiver does that. Raises `Unavailable` if the
        store has lost one.
        """
        for is_copied, some in itertools.groupby(
            map(self._named, chunks), self._chunks.__contains__
        ):
            if is_copied:
                yield from map(self._chunks.__getitem__, some)
            elif self._stored:
                yield from self._stored.spans(list(some), verified=verified)

    def close(self) -> None:
        """Free the memory and end the gc pin: no reader may be left."""
        self._chunks = {}
        self._taken.close()

    def _size(self, name: bytes) -> int | None:
        if name in self._chunks:
            return len(self._chunks[name])
        found = self._stored.found.get(name) if self._stored else None
        return found[1] if found else None

    def _named(self, chunk: bytes) -> bytes:
        """The name of a chunk asked for by number, if known, or by name."""
        number = decode_number(chunk)
        return chunk if number is None else self._numbers.get(number, chunk)

    def _describe(self, names: bytes | bytearray, *, early: bool = False) -> bytes:
        description, metadata = self._outline.describe(names, early=early)
        self._chunks |= metadata
        return description

    def _copy(self, copies: Sequence[_Copy]) -> None:
        """Copy chunks and register them by number and name. Of equal ones, peers get the first, and
        learn that the others are equal.
        """
        assert self._buffer is not None
        done = []
        for copy in copies:
            name = name_of_pieces(self._copied(copy, self._buffer))
            self._names[copy.number * CHUNK_ID_BYTES : (copy.number + 1) * CHUNK_ID_BYTES] = name
            stop = copy.offset + copy.stop - copy.start
            done.append((copy.number, name, self._buffer.memory[copy.offset : stop]))
        with self._changed:
            for number, name, memory in done:
                self._numbers[number] = _ALIKE if name in self._chunks else name
                self._chunks.setdefault(name, memory)
            self._changed.notify_all()

    def _copied(self, copy: _Copy, buffer: Buffer) -> Iterator[memoryview]:
        """The pieces of a copy, each while it is still in the processor's cache, so that hashing
        hardly touches memory.
        """
        source, nbytes = self._outline.cut.parts[copy.part].source, copy.stop - copy.start
        memory = buffer.memory[copy.offset : copy.offset + nbytes]
        if isinstance(source, TensorSource) and tensors.is_plain(source.tensor):
            address = source.tensor.data_ptr() + copy.start
            for at in range(0, nbytes, PIECE_BYTES):
                piece = memory[at : at + PIECE_BYTES]
                ctypes.memmove(
                    buffer.address + copy.offset + at, address + at, len(piece)
                )  # releases the GIL
                yield piece
            return
        if isinstance(source, TensorSource):
            copy_task((Gather(source, copy.start, copy.stop, copy.offset),), buffer)
        else:
            source.stage(copy.start, copy.stop, memory)
        yield memory


def make_offer(
    state: Any,
    step: int,
    *,
    chunk_bytes: int,
    pool: BufferPool,
    threads: ThreadPool,
    pin: GcPin | None,
) -> ServedState:
    """An offer of `state`, to be filled. `pin`, of the store that may have chunks, ends with the
    offer, or at once if there is none.

    Raises `InvalidInput` for values that cannot travel, and for a state that does not fit into the
    pool; then nothing of it stays taken.
    """
    with ExitStack() as taken:
        if pin:
            taken.callback(pin.end)
        flat = flatten_state(state)
        cut = cut_state(flat, chunk_bytes)
        chunked = {part.leaf for part in cut.parts}
        contents = tuple(
            LeafContent(None, b"", source.nbytes)
            if leaf in chunked
            else LeafContent(bytes(read_part(source, 0, source.nbytes)))
            for leaf, source in enumerate(flat.leaves)
        )
        schema = encode_schema(flat.schema)
        outline = _Outline(step, chunk_bytes, cut, schema, placed_leaves(flat), contents)
        names, stored = (
            find_stored(cut, threads, pin) if pin else (bytearray(cut.count * CHUNK_ID_BYTES), None)
        )
        offer = ServedState(outline, names, stored, threads)
        if pin and offer.staged_bytes > pool.budget_bytes:
            names, stored = find_stored(cut, threads, pin, patience=True)
            offer = ServedState(outline, names, stored, threads)
        offer.take_room(pool, taken)
        return offer


@uncollected()
def _plan_copies(
    cut: CutState, names: bytearray, stored: Stored | None
) -> tuple[list[list[_Copy]], int]:
    """The chunks to copy, in batches for one thread at a time, and their bytes: all but those that
    are `stored` under their `names`.
    """
    batches, offset = list[list[_Copy]](), 0
    for batch in cut.batches:
        copies = []
        for run in batch:
            for number, start, stop in cut.chunks(run):
                at = number * CHUNK_ID_BYTES
                if stored and bytes(names[at : at + CHUNK_ID_BYTES]) in stored.found:
                    continue
                copies.append(_Copy(number, run.part.leaf, start, stop, offset))
                offset += stop - start
        if copies:
            batches.append(copies)
    return batches, offset
