"""How is a state cut into chunks, and which of them does the store of its sender already have?

Chunks are looked up by names where this process has hashed them both ways, as its commits do beside
a transport (docs/decisions/040-committed-chunks-have-fast-checksums.md), and by ids while that
pays. A failed lookup costs more than a copy, so lookups stop when most of them fail.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

from ckptstore.commit.dedup_probe import GcPin
from ckptstore.commit.plan import Extent, Run, plan_chunks
from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.core.model import INLINE_BYTES
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.interop.chunk_transfer.wire import CHUNKS_PER_REQUEST, name_of
from ckptstore.repository.chunk_store import FileRange
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state.leaf_sources import FlatState, Source

T = TypeVar("T")

PROBE_CHUNKS = 64
"""Failed lookups before giving up; each success adds two."""

_STRIDE = 8
"""Batches are spread over the state, so that early results represent the rest."""


@dataclass(frozen=True, slots=True)
class Part:
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
    parts: tuple[Part, ...]
    batches: tuple[tuple[Run, ...], ...]
    count: int

    def chunks(self, run: Run) -> Iterator[tuple[int, int, int]]:
        """The chunks of a run: number in the state, first and last byte in the part."""
        first = self.parts[run.part.leaf].first + run.first
        for i, (start, stop) in enumerate(itertools.pairwise(run.cuts)):
            yield first + i, start, stop

    def read(self, run: Run) -> Iterator[tuple[int, int, int, memoryview]]:
        """The chunks of a run with their bytes, without a copy where possible."""
        memory = read_part(self.parts[run.part.leaf].source, run.cuts[0], run.cuts[-1])
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


def read_part(source: Source, start: int, stop: int) -> memoryview:
    """Bytes of a leaf, without a copy where possible."""
    view = source.view(start, stop)
    if view is None:
        view = memoryview(bytearray(stop - start))
        source.stage(start, stop, view)
    return view


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


class AdaptiveProbe:
    """Whether further lookups pay: not after `left` failed ones. Thread-safe."""

    def __init__(self, left: float = PROBE_CHUNKS) -> None:
        self._left, self._lock = left, threading.Lock()

    def add(self, looked: int, found: int) -> None:
        with self._lock:
            self._left += 3 * found - looked

    def __bool__(self) -> bool:
        return self._left > 0


class Stored:
    """Chunks that the store keeps until `pin` ends: id and raw bytes by name."""

    def __init__(self, pin: GcPin) -> None:
        assert pin.objects.second_names is not None, "a transport has asked for them"
        self._pin, self.second_names = pin, pin.objects.second_names
        self.found: dict[bytes, tuple[bytes, int]] = {}

    def add(self, ids: Mapping[bytes, bytes]) -> int:
        """Add those of the chunks, given by names, that live packs hold; returns their number."""
        held = self._pin.held(b"".join(ids.values()))
        found = {name: (chunk, held[chunk]) for name, chunk in ids.items() if chunk in held}
        self.found.update(found)
        return len(found)

    def spans(self, names: Sequence[bytes], *, verified: bool) -> Iterator[memoryview | FileRange]:
        """The bytes of chunks, in order. With `verified` they are compared with their names, and a
        wrong name is forgotten. Raises `Unavailable` if the store has lost a chunk.
        """
        objects = self._pin.objects
        for some in batches(names, lambda name: self.found[name][1]):
            ids = b"".join(self.found[name][0] for name in some)
            if not verified and (ranges := objects.file_ranges(ids)):
                yield from ranges
                continue
            out = [memoryview(bytearray(self.found[name][1])) for name in some]
            try:
                objects.read_into(ids, out)
            except (Corrupt, NotFound) as error:
                raise Unavailable(
                    f"the store no longer gives what was to be served from it: {error}"
                ) from error
            if verified:
                self._check(some, out)
            yield from out

    def _check(self, names: Sequence[bytes], data: Sequence[memoryview]) -> None:
        for name, each in zip(names, data, strict=True):
            if name_of(each) != name:
                self.second_names.forget(name)
                raise Unavailable(
                    f"chunk {self.found[name][0].hex()[:12]} of the store is not the one that "
                    f"{name.hex()[:12]} is; send it again"
                )


def find_stored(
    cut: CutState, threads: ThreadPool, pin: GcPin, *, patience: bool = False
) -> tuple[bytearray, Stored]:
    """The names of a state's chunks as far as they were looked up, with `patience` all, and those
    that the store has.
    """
    names, stored, known = bytearray(cut.count * CHUNK_ID_BYTES), Stored(pin), dict[bytes, bytes]()
    probe, scratches = AdaptiveProbe(inf if patience else PROBE_CHUNKS), threading.local()

    def learn(data: memoryview) -> tuple[bytes, bytes]:
        """Record id and name of a chunk, from one copy: they name the same bytes even if the tensor
        changes.
        """
        if len(getattr(scratches, "memory", b"")) < len(data):
            scratches.memory = memoryview(bytearray(len(data)))
        copy = scratches.memory[: len(data)]
        copy[:] = data
        return stored.second_names.learn(copy)

    def task(batch: Sequence[Run]) -> None:
        if not probe:
            return
        learned, looked, found = dict[bytes, bytes](), 0, 0
        for number, _, _, data in itertools.chain.from_iterable(map(cut.read, batch)):
            name, looked = name_of(data), looked + 1
            if (chunk := stored.second_names.id_of(name)) is not None:
                known[name], found = chunk, found + 1
            else:
                made, name = learn(data)
                learned[name] = made
            names[number * CHUNK_ID_BYTES : (number + 1) * CHUNK_ID_BYTES] = name
        probe.add(looked, found + stored.add(learned))

    in_strides = (cut.batches[first::_STRIDE] for first in range(_STRIDE))
    threads.spread(task, list(itertools.chain.from_iterable(in_strides)))
    stored.add(known)
    return names, stored


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
