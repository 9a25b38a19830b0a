"""How can peers take a state's chunks while training goes on? It is held still: copied, except for
chunks that the store has.

Chunks found in the local store are served from there; a session protects them from gc until the
offer is closed. All others are copied to one staging buffer and hashed there, so that peers get the
hashed bytes even if tensors change. Chunks get quick names, and ids when a peer first asks for
them. An offer is posted before it is filled: a peer that has nothing takes copied chunks by number
meanwhile.
"""

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from ckptstore.commit.plan import plan_chunks
from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import digest
from ckptstore.core.model import LeafContent
from ckptstore.core.text import bytes_text
from ckptstore.core.threads import behind
from ckptstore.errors import Corrupt, InvalidInput, NotFound, Unavailable
from ckptstore.interop.chunk_transfer.chunk_names import BLAKE3, NAMINGS, XXH3, quick_name
from ckptstore.interop.chunk_transfer.meshes import placed_leaves
from ckptstore.interop.chunk_transfer.process_vm import address_of
from ckptstore.interop.chunk_transfer.protocol import (
    Description,
    Placed,
    decode_number,
    encode_description,
    encode_number,
)
from ckptstore.interop.chunk_transfer.staging import (
    Named,
    Part,
    Staging,
    blank_names,
    parts_of,
    read_part,
    split_names,
)
from ckptstore.interop.chunk_transfer.store_lookup import Stored, find_stored
from ckptstore.objects.pages import split_pages
from ckptstore.objects.schema import encode_schema
from ckptstore.repository.chunk_store import FileRange
from ckptstore.repository.gc_pin import GcPin
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state.flatten import flatten
from ckptstore.state.leaf_sources import FlatState
from ckptstore.state.staging_buffers import Buffer, BufferPool

KEY = "state"
"""The only key of the application state: the value that is sent."""


_ALIKE = b""
"""Replaces the name of a chunk with the same bytes as another. No chunk has this name."""


def flatten_state(state: Any) -> FlatState:
    """The leaves of any state; a DTensor is a leaf of which this rank has boxes. Raises
    `InvalidInput`, naming values that cannot travel.
    """
    return flatten({KEY: state}, ranks=True)[KEY]


class ServedState:
    """The chunks and the description of one state. `staged_bytes` is the size of the copies.
    Thread-safe.

    It may be served before `fill`: then an outline describes it, and requests by number wait for
    the copies.
    """

    def __init__(
        self,
        step: int,
        staging: Staging,
        outline: "_Outline",
        stored: Stored | None,
        arena: Buffer | None,
        threads: ThreadPool,
        taken: ExitStack,
    ) -> None:
        """`taken` frees the staging buffer; closing ends the guard of `stored`."""
        self.step, self.staged_bytes = step, staging.nbytes
        self._staging, self._outline, self._stored = staging, outline, stored
        self._arena, self._threads, self._taken = arena, threads, taken
        self._chunks: dict[bytes, memoryview] = {}
        self._numbers: dict[int, bytes] = {}
        self._descriptions: dict[str, bytes] = {}
        numbers = [b"".join(map(encode_number, part)) for part in staging.numbers]
        self._early_description = self._described(numbers, early=True)
        self._over = self._closed = False
        self._renaming: threading.Thread | None = None
        lock = threading.RLock()
        self._changed, self._ended = threading.Condition(lock), threading.Condition(lock)
        if stored:
            self._number_stored(stored)

    def fill(self) -> None:
        """Make the copies, after which the tensors may change. After an error nothing more is
        served: call `close`.
        """
        try:
            if self._arena:
                self._staging.copy(self._arena, self._threads, self._copied)
            self._descriptions[XXH3] = self._described(self._staging.names, XXH3)
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
                self._ended.notify_all()

    def describe(self, names: str, *, early: bool, wait_s: float) -> bytes | None:
        """The description once everything has been copied, or the outline at once if `early`; None
        if neither is ready within `wait_s`.

        Chunks are called by `names` if possible, else by their ids.
        """
        until = time.monotonic() + wait_s
        with self._changed:
            if early and not self._over:
                return self._early_description
            self._ended.wait_for(lambda: self._over, wait_s)  # copied batches do not wake this wait
            if not self._descriptions:
                return None
            names = names if names in self._descriptions else BLAKE3
            if names not in self._descriptions and not self._renaming:
                self._renaming = behind(self._rename, "ckptstore-transport-ids")
            self._ended.wait_for(lambda: names in self._descriptions, until - time.monotonic())
            return self._descriptions.get(names)

    def sizes(self, ids: Sequence[bytes], wait_s: float = 0) -> list[int | None]:
        """Raw bytes of each chunk. None for a chunk of another state, for a number that has not
        been copied within `wait_s`, and for a duplicate of another chunk.
        """
        numbers = {number for chunk in ids if (number := decode_number(chunk)) is not None}
        with self._changed:
            if numbers:
                self._changed.wait_for(
                    lambda: self._over or numbers <= self._numbers.keys(), wait_s
                )
            return [self._size(self._named(chunk)) for chunk in ids]

    def ids(self, names: Sequence[bytes]) -> list[bytes | None]:
        """The ids of chunks given by quick names, None for a chunk of another state."""
        stored = self._stored.ids if self._stored else {}
        return [
            stored.get(name) or (digest(self._chunks[name]) if name in self._chunks else None)
            for name in names
        ]

    def places(self, ids: Sequence[bytes]) -> list[int | None]:
        """Addresses of chunks in this process until the offer is closed, None for those that were
        not copied.
        """
        return [
            address_of(self._chunks[name]) if (name := self._named(chunk)) in self._chunks else None
            for chunk in ids
        ]

    def _size(self, chunk: bytes) -> int | None:
        return (
            len(self._chunks[chunk])
            if chunk in self._chunks
            else self._stored.sizes.get(chunk)
            if self._stored
            else None
        )

    def _named(self, chunk: bytes) -> bytes:
        """The name of a chunk asked for by number, if known, or by name."""
        number = decode_number(chunk)
        return chunk if number is None else self._numbers.get(number, chunk)

    def _number_stored(self, stored: Stored) -> None:
        """Register the chunks that are not copied, which are available at once. Of equal ones, the
        first counts.
        """
        names = (name for part in self._staging.names for name in split_names(part))
        seen = set[bytes]()
        for number, name in enumerate(names):
            if name in stored.ids:
                self._numbers[number] = _ALIKE if name in seen else name
                seen.add(name)

    def _copied(self, some: Sequence[Named]) -> None:
        """Register copied chunks by number and name. Of equal ones, peers get the first, and learn
        that the others are equal.
        """
        with self._changed:
            for number, chunk, memory in some:
                self._numbers[number] = chunk if chunk not in self._chunks else _ALIKE
                self._chunks.setdefault(chunk, memory)
            self._changed.notify_all()

    def _described(
        self, parts: Sequence[bytes | bytearray], names: str = BLAKE3, *, early: bool = False
    ) -> bytes:
        """A description with these chunk names; its schema and pages become available."""
        description, metadata = self._outline.describe(self.step, parts, names, early=early)
        self._chunks |= metadata
        return description

    def _rename(self) -> None:
        """Give ids to chunks with quick names."""

        def goes_on() -> None:
            if self._closed:
                raise Unavailable("the state has been withdrawn")

        with suppress(Unavailable):
            known = self._stored.ids if self._stored else {}
            ids, chunks = self._staging.renamed(
                self._arena, self._threads, NAMINGS[BLAKE3], known, goes_on
            )
            description, metadata = self._outline.describe(self.step, ids, BLAKE3, early=False)
            with self._changed:
                self._chunks |= metadata | chunks
                self._descriptions[BLAKE3] = description
                self._ended.notify_all()

    def spans(self, ids: Sequence[bytes], *, verified: bool) -> Iterator[memoryview | FileRange]:
        """The bytes of chunks of this state, in order. With `verified`, chunks of the store are
        compared with their ids; otherwise the receiver does that. Raises `Unavailable` if the store
        has lost one.
        """
        for in_store, some in itertools.groupby(
            map(self._named, ids), lambda chunk: chunk not in self._chunks
        ):
            if in_store:
                yield from self._stored_spans(list(some), verified=verified)
            else:
                yield from map(self._chunks.__getitem__, some)

    def close(self) -> None:
        """Free the memory and end the gc guard: no reader may be left."""
        self._closed = True
        if self._renaming:
            self._renaming.join()
        self._chunks = {}
        self._taken.close()

    def _stored_spans(
        self, ids: list[bytes], *, verified: bool
    ) -> Iterator[memoryview | FileRange]:
        assert self._stored is not None
        objects, sizes = self._stored.guard.objects, self._stored.sizes
        for some in _batches(ids, sizes):
            joined = b"".join(self._stored.ids.get(name, name) for name in some)
            if not verified and (ranges := objects.file_ranges(joined)):
                yield from ranges
                continue
            out = [memoryview(bytearray(sizes[chunk])) for chunk in some]
            try:
                objects.read_into(joined, out)
            except (Corrupt, NotFound) as error:
                raise Unavailable(
                    f"the store no longer gives what was to be served from it: {error}"
                ) from error
            if verified:
                self._stored.check(some, out)
            yield from out


def make_offer(
    state: Any,
    step: int,
    *,
    chunk_bytes: int,
    pool: BufferPool,
    threads: ThreadPool,
    guard: GcPin | None,
) -> ServedState:
    """An offer of `state`, to be filled. `guard`, of the store that may have chunks, ends with the
    offer, or at once if there is none.

    Raises `InvalidInput` for values that cannot travel, and for a state that does not fit into the
    pool; then nothing of it stays taken.
    """
    with ExitStack() as taken:
        if guard:
            taken.callback(guard.end)
        flat = flatten_state(state)
        parts = parts_of(flat)
        plan = plan_chunks([part.extent for part in parts], chunk_bytes)
        names, stored = (
            find_stored(plan, parts, threads, guard) if guard else (blank_names(plan), None)
        )
        staging = Staging(plan, parts, names, stored.ids if stored else (), quick_name)
        if guard and staging.nbytes > pool.budget_bytes:
            names, stored = find_stored(plan, parts, threads, guard, patience=True)
            staging = Staging(plan, parts, names, stored.ids, quick_name)
        outline = _Outline(flat, parts, chunk_bytes)
        arena = _room(staging.nbytes, pool, taken) if staging.nbytes else None
        return ServedState(step, staging, outline, stored, arena, threads, taken.pop_all())


def _room(nbytes: int, pool: BufferPool, taken: ExitStack) -> Buffer:
    if nbytes > pool.budget_bytes:
        raise InvalidInput(
            f"to send this state, {bytes_text(nbytes)} must be copied, and staging memory is "
            "limited to "
            f"{bytes_text(pool.budget_bytes)}: give the transport more staging_bytes, or a store "
            "in which the state is committed"
        )
    arena = pool.take(nbytes, wait=False)
    assert arena is not None, "what was served before has been withdrawn"
    taken.callback(pool.give, arena)
    return arena


class _Outline:
    """The description without chunk names. Small leaves are read when it is made."""

    def __init__(self, flat: FlatState, parts: Sequence[Part], chunk_bytes: int) -> None:
        self._chunk_bytes, self._parts = chunk_bytes, parts
        self._kinds, self._schema = flat.schema.kinds, encode_schema(flat.schema)
        self._placed: dict[int, Placed] = placed_leaves(flat)
        chunked = {part.leaf for part in parts}
        self._contents = [
            LeafContent(None, b"", source.nbytes)
            if leaf in chunked
            else LeafContent(bytes(read_part(source, 0, source.nbytes)))
            for leaf, source in enumerate(flat.leaves)
        ]

    def describe(
        self, step: int, parts: "Sequence[bytes | bytearray]", names: str, *, early: bool
    ) -> tuple[bytes, dict[bytes, memoryview]]:
        """The description with these chunk names, and its own chunks by id."""
        pages = split_pages(self._kinds, self._with(parts))
        metadata = [(digest(data), data) for data in (self._schema, *pages)]
        sized = [(chunk, len(data)) for chunk, data in metadata]
        description = Description(
            step, self._chunk_bytes, sized[0], tuple(sized[1:]), self._placed, early, names
        )
        return encode_description(description), {
            chunk: memoryview(data) for chunk, data in metadata
        }

    def _with(self, ids: "Sequence[bytes | bytearray]") -> list[LeafContent]:
        contents = list(self._contents)
        for leaf, group in itertools.groupby(
            zip(self._parts, ids, strict=True), lambda pair: pair[0].leaf
        ):
            some = list(group)
            boxes = tuple(part.extent.box for part, _ in some if part.extent.box is not None)
            contents[leaf] = replace(
                contents[leaf], ids=b"".join(its for _, its in some), boxes=boxes or None
            )
        return contents


def _batches(ids: Sequence[bytes], sizes: dict[bytes, int]) -> Iterator[list[bytes]]:
    """Chunks that are read together, up to a run, so that memory stays bounded."""
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
