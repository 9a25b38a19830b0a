"""How can peers take a state's chunks while training goes on? It is held still: copied, except for
chunks that the store has.

Chunks found in the local store are served from there; a session protects them from gc until the
offer is closed. All others are copied to one staging buffer and hashed there, so that peers get the
hashed bytes even if tensors change.
"""

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
    encode_description,
    name_of,
    name_of_pieces,
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

    def sizes(self, names: Sequence[bytes]) -> list[int | None]:
        """Raw bytes of each chunk, None for a chunk of another state."""
        stored = self.stored.found if self.stored else {}
        return [
            len(self.chunks[name])
            if name in self.chunks
            else (stored[name][1] if name in stored else None)
            for name in names
        ]

    def ids(self, names: Sequence[bytes]) -> list[bytes | None]:
        """The ids of chunks, None for a chunk of another state."""
        stored = self.stored.found if self.stored else {}
        return [
            stored[name][0]
            if name in stored
            else (digest(self.chunks[name]) if name in self.chunks else None)
            for name in names
        ]

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
    pin: GcPin | None,
) -> ServedState:
    """An offer of `state`, whose tensors may change afterwards. `pin`, of the store that may have
    chunks, ends with the offer, or at once if there is none.

    Raises `InvalidInput` for values that cannot travel, and for a state that does not fit into the
    pool; then nothing of it stays taken.
    """
    with ExitStack() as taken:
        if pin:
            taken.callback(pin.end)
        cut = cut_state(flatten_state(state), chunk_bytes)
        names, stored = (
            find_stored(cut, threads, pin) if pin else (bytearray(cut.count * CHUNK_ID_BYTES), None)
        )
        copies, nbytes = _plan_copies(cut, names, stored)
        if pin and nbytes > pool.budget_bytes:
            names, stored = find_stored(cut, threads, pin, patience=True)
            copies, nbytes = _plan_copies(cut, names, stored)
        chunks = dict[bytes, memoryview]()
        if nbytes:
            buffer = _take_room(nbytes, pool, taken)
            sources = (part.source for part in cut.parts)
            prepare(
                devices_of(each.tensor for each in sources if isinstance(each, TensorSource)),
                buffer,
            )

            def copy(batch: Sequence[_Copy]) -> None:
                for each in batch:
                    name = name_of_pieces(_copied(cut, each, buffer))
                    names[each.number * CHUNK_ID_BYTES : (each.number + 1) * CHUNK_ID_BYTES] = name
                    stop = each.offset + each.stop - each.start
                    chunks[name] = buffer.memory[each.offset : stop]

            threads.spread(copy, copies)
        description = _describe(step, chunk_bytes, cut, names, chunks)
        return ServedState(step, description, nbytes, chunks, stored, taken.pop_all())


class _Copy(NamedTuple):
    """A chunk to copy: its `number` in the state, bytes `start:stop` of a part, its place in the
    buffer.
    """

    number: int
    part: int
    start: int
    stop: int
    offset: int


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


def _copied(cut: CutState, copy: _Copy, buffer: Buffer) -> Iterator[memoryview]:
    """The pieces of a copy, each while it is still in the processor's cache, so that hashing hardly
    touches memory.
    """
    source, nbytes = cut.parts[copy.part].source, copy.stop - copy.start
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


def _describe(
    step: int, chunk_bytes: int, cut: CutState, names: bytearray, chunks: dict[bytes, memoryview]
) -> bytes:
    """The description of a state with these chunk names; the chunks of its metadata are added to
    `chunks`.
    """
    schema = cut.flat.schema
    by_leaf = {leaf: list(some) for leaf, some in itertools.groupby(cut.parts, lambda p: p.leaf)}
    contents = [
        LeafContent(
            None,
            bytes(names[parts[0].first * CHUNK_ID_BYTES : parts[-1].stop * CHUNK_ID_BYTES]),
            source.nbytes,
            tuple(part.extent.box for part in parts if part.extent.box) or None,
        )
        if (parts := by_leaf.get(leaf))
        else LeafContent(bytes(read_part(source, 0, source.nbytes)))
        for leaf, source in enumerate(cut.flat.leaves)
    ]
    metadata = [encode_schema(schema), *split_pages(schema.kinds, contents)]
    sized = [(name_of(data), len(data)) for data in metadata]
    chunks |= {name: memoryview(data) for (name, _), data in zip(sized, metadata, strict=True)}
    placed = placed_leaves(cut.flat)
    return encode_description(Description(step, chunk_bytes, sized[0], tuple(sized[1:]), placed))
