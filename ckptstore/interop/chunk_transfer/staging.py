"""Which chunks of a state are copied to which place of a staging buffer, and how are the copies
named?
"""

import ctypes
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ckptstore.commit.plan import CommitPlan, Extent, Run
from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.core.model import INLINE_BYTES
from ckptstore.core.process import uncollected
from ckptstore.interop.chunk_transfer.chunk_names import Naming
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state import tensors
from ckptstore.state.leaf_sources import FlatState, Source
from ckptstore.state.leaves import TensorSource
from ckptstore.state.staging import copy_task, devices_of, prepare
from ckptstore.state.staging_buffers import Buffer, Copy

Named: TypeAlias = tuple[int, bytes, memoryview]
"""A copied chunk: its number in the state, its name, its bytes."""

PIECE_BYTES = 512 << 10
"""Bytes copied before they are hashed: both copies fit a core's private cache. Copy and quick name
of a chunk of 1 MiB take 0.073 s per GB in two pieces, and 0.090 s in one (EPYC, 1 MiB of L2).
"""


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes of a leaf, or of one box of it, that are cut into chunks."""

    leaf: int
    source: Source
    extent: Extent


def parts_of(flat: FlatState) -> list[Part]:
    """The parts of a state that become chunks: all leaves but aliases and small ones, which are
    stored in pages.
    """
    return list(_parts(flat))


def read_chunks(source: Source, run: Run) -> Iterator[tuple[int, int, memoryview]]:
    """The chunks of a run, each by its byte range of the leaf."""
    memory, first = read_part(source, run.cuts[0], run.cuts[-1]), run.cuts[0]
    return (
        (start, stop, memory[start - first : stop - first])
        for start, stop in itertools.pairwise(run.cuts)
    )


def read_part(source: Source, start: int, stop: int) -> memoryview:
    """Bytes of a leaf, without a copy where possible."""
    view = source.view(start, stop)
    if view is None:
        view = memoryview(bytearray(stop - start))
        source.stage(start, stop, view)
    return view


class Staging:
    """The chunks to copy to a buffer of `nbytes`: all but those that are `stored`.

    `names` are the chunk names of each part: given for stored chunks, made by `naming` for copies.
    `numbers` are the numbers of each part's chunks in the state.
    """

    def __init__(
        self,
        plan: CommitPlan,
        parts: Sequence[Part],
        names: list[bytearray],
        stored: Collection[bytes],
        naming: Naming,
    ) -> None:
        self._parts, self.names, self._naming = parts, names, naming
        ends = list(itertools.accumulate(map(len, plan.parts), initial=0))
        self.numbers = list(itertools.starmap(range, itertools.pairwise(ends)))
        self._addresses = list(map(_address, parts))
        self._places: list[list[_Place]] = []
        self.nbytes = 0
        with uncollected():
            for batch in plan.batches:
                places = [
                    place
                    for run in batch
                    for place in _places(run)
                    if not stored or bytes(names[place.part][place.where]) not in stored
                ]
                if places:
                    self._places.append(list(map(self._reserved, places)))

    def copy(
        self, arena: Buffer, threads: ThreadPool, copied: Callable[[Sequence[Named]], object]
    ) -> None:
        """Copy the chunks and pass them to `copied` with their names, which `names` then
        contains.
        """
        prepare(
            devices_of(
                part.source.tensor for part in self._parts if isinstance(part.source, TensorSource)
            ),
            arena,
        )
        threads.spread(lambda places: copied(self._copy(places, arena)), self._places)

    def renamed(
        self,
        arena: Buffer | None,
        threads: ThreadPool,
        naming: Naming,
        known: Mapping[bytes, bytes],
        goes_on: Callable[[], object],
    ) -> tuple[list[bytearray], dict[bytes, memoryview]]:
        """The chunk names of each part, and the copies by name, under `naming`. Names of stored
        chunks come from `known`. Calls `goes_on` now and then, and raises its errors.
        """
        names = [
            bytearray(b"".join(known.get(name, name) for name in split_names(part)))
            for part in self.names
        ]
        chunks = dict[bytes, memoryview]()

        def rename(places: "list[_Place]") -> None:
            goes_on()
            assert arena is not None
            for place in places:
                memory = arena.memory[place.offset : place.offset + place.nbytes]
                name = names[place.part][place.where] = naming(memory)
                chunks[name] = memory

        threads.spread(rename, self._places)
        return names, chunks

    def _reserved(self, place: "_Place") -> "_Place":
        offset, self.nbytes = self.nbytes, self.nbytes + place.nbytes
        return place._replace(offset=offset)

    def _copy(self, places: "list[_Place]", arena: Buffer) -> list[Named]:
        done = []
        for place in places:
            memory = arena.memory[place.offset : place.offset + place.nbytes]
            name = self.names[place.part][place.where] = self._naming.of_pieces(
                self._copied(place, memory, arena)
            )
            done.append((self.numbers[place.part][place.number], name, memory))
        return done

    def _copied(self, place: "_Place", memory: memoryview, arena: Buffer) -> Iterator[memoryview]:
        """The pieces of a copy, each while it is still in the processor's cache, so that hashing
        hardly touches memory.
        """
        source, address = self._parts[place.part].source, self._addresses[place.part]
        if address:
            for at in range(0, place.nbytes, PIECE_BYTES):
                piece = memory[at : at + PIECE_BYTES]
                ctypes.memmove(
                    arena.address + place.offset + at, address + place.start + at, len(piece)
                )  # releases the GIL
                yield piece
            return
        if isinstance(source, TensorSource):
            copy_task((Copy(place.offset, place.nbytes, place.start, source),), arena)
        else:
            source.stage(place.start, place.stop, memory)
        yield memory


class _Place(NamedTuple):
    """A chunk: bytes `start:stop` of a part, its `number` in the part, and its place in the
    buffer.
    """

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


def _address(part: Part) -> int:
    """The address of a whole part in this host's memory, 0 if it is not contiguous there."""
    tensor = part.source.tensor if isinstance(part.source, TensorSource) else None
    return tensor.data_ptr() if tensor is not None and tensors.is_plain(tensor) else 0


def blank_names(plan: CommitPlan) -> list[bytearray]:
    """Space for the names of each part's chunks."""
    return [bytearray(len(part) * CHUNK_ID_BYTES) for part in plan.parts]


def split_names(joined: bytes | bytearray) -> Iterator[bytes]:
    """The names of a part's chunks."""
    return (bytes(joined[i : i + CHUNK_ID_BYTES]) for i in range(0, len(joined), CHUNK_ID_BYTES))


def _parts(flat: FlatState) -> Iterator[Part]:
    for leaf, (source, shape) in enumerate(zip(flat.leaves, flat.schema.shapes, strict=True)):
        if flat.schema.aliases[leaf] >= 0:
            continue
        if leaf in flat.held:
            for box, part in flat.held[leaf].parts:
                yield Part(leaf, part, Extent(shape, part.width, part.nbytes, False, box))
        elif source.nbytes > INLINE_BYTES:
            whole = shape if flat.schema.kinds[leaf] == "tensor" else (source.nbytes,)
            yield Part(leaf, source, Extent(whole, source.width, source.nbytes, False))
