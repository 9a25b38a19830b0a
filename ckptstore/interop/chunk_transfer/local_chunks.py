"""Which chunks does this process already have? By name: in its live state, in its store, and from a
broken transfer.

A local chunk is hashed at its destination. One that does not match its name counts as missing.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from ckptstore.commit.plan import Run, plan_chunks
from ckptstore.core.config import RUN_BYTES
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.interop.chunk_transfer.chunk_names import Naming, is_named
from ckptstore.interop.chunk_transfer.connection import Deadline
from ckptstore.interop.chunk_transfer.scheduler import Wanted
from ckptstore.interop.chunk_transfer.staging import parts_of, read_chunks
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.state.leaf_sources import FlatState, Source
from ckptstore.state.leaves import TensorSource

if TYPE_CHECKING:
    import torch

    from ckptstore.repository.chunk_store import ObjectStore


Bring: TypeAlias = Callable[[Sequence[Wanted]], Iterable[Wanted]]
"""Copies local chunks to their destinations and returns those that are missing."""


class LocalChunks:
    """The local chunks of one transfer. `objects` is the local store, if any."""

    def __init__(
        self, threads: ThreadPool, deadline: Deadline, objects: "ObjectStore | None" = None
    ) -> None:
        self._threads, self._deadline, self._objects = threads, deadline, objects
        self._live: dict[bytes, tuple[Source, int, int]] = {}
        self._at: dict[tuple[int, int, int], bytes] = {}
        self._left: Mapping[bytes, memoryview] = {}

    def add_live(
        self, live: FlatState, chunk_bytes: int, naming: Naming, *, without: Collection[Source] = ()
    ) -> None:
        """Hash a live state with the sender's chunk boundaries, except for the leaves of
        `without`.
        """
        parts = [part for part in parts_of(live) if part.source not in without]

        def index(batch: Sequence[Run]) -> None:
            self._deadline.left()
            for run in batch:
                source = parts[run.part.leaf].source
                for start, stop, data in read_chunks(source, run):
                    chunk = naming(data)
                    self._live[chunk] = source, start, stop
                    if isinstance(source, TensorSource):
                        self.note(source.tensor, start, stop, chunk)

        self._threads.spread(
            index, plan_chunks([part.extent for part in parts], chunk_bytes).batches
        )

    def note(self, tensor: "torch.Tensor", start: int, stop: int, chunk: bytes) -> None:
        """Record that these bytes of a tensor were hashed in place."""
        self._at[tensor.data_ptr(), start, stop] = chunk

    def forget_places(self) -> None:
        """Drop the records of tensors that are freed: their memory may be reused."""
        self._at = {}

    def chunk_at(self, tensor: "torch.Tensor", start: int, stop: int) -> bytes | None:
        """The recorded chunk of these bytes of a tensor."""
        return self._at.get((tensor.data_ptr(), start, stop))

    def add_left(self, left: Mapping[bytes, memoryview]) -> None:
        """Add the chunks of an earlier transfer."""
        self._left = left

    def land_alike(
        self, wanted: Sequence[Wanted], alike: Mapping[bytes, tuple[Source, int]], naming: Naming
    ) -> list[Wanted]:
        """Copy the live state's bytes at the chunks' positions (leaf and first byte) to their
        destinations and hash them there; returns the chunks that did not match.

        Bytes that are another chunk are recorded under that name: the live state is read once.
        """

        def bring(batch: Sequence[Wanted]) -> Iterator[Wanted]:
            for each in batch:
                assert each.memory is not None
                source, start = alike[each.chunk]
                source.stage(start, start + each.nbytes, each.memory)
                if (found := naming(each.memory)) == each.chunk:
                    each.land(each.memory)
                else:
                    self._live[found] = source, start, start + each.nbytes
                    yield each

        return self._land(wanted, [each.chunk in alike for each in wanted], bring)

    def land(self, wanted: Sequence[Wanted], *, without_live: bool = False) -> list[Wanted]:
        """Copy local chunks to their destinations; returns the missing ones. Use `without_live` if
        the live state is the destination.
        """
        if without_live:
            self._live = {}
        missing = self._land(
            wanted,
            [each.chunk in self._live or each.chunk in self._left for each in wanted],
            self._copy,
        )
        return self._land_stored(missing, [each.chunk for each in missing])

    def land_stored(self, wanted: Sequence[Wanted], ids: Sequence[bytes | None]) -> list[Wanted]:
        """Read chunks with quick names from the store to their destinations; returns the missing
        ones. A peer supplied `ids`, so each chunk is compared with its name as well.
        """
        told = [(each, chunk) for each, chunk in zip(wanted, ids, strict=True) if chunk]
        untold = [each for each, chunk in zip(wanted, ids, strict=True) if not chunk]
        return untold + self._land_stored([each for each, _ in told], [chunk for _, chunk in told])

    def _land_stored(self, wanted: list[Wanted], ids: Sequence[bytes]) -> list[Wanted]:
        if self._objects is None or not wanted:
            return wanted
        found = self._objects.locate(b"".join(ids))["found"]
        known = {each.chunk: chunk for each, chunk in zip(wanted, ids, strict=True)}
        return self._land(wanted, found.tolist(), lambda batch: self._read(batch, known))

    def _land(
        self, wanted: Sequence[Wanted], is_here: Sequence[object], bring: Bring
    ) -> list[Wanted]:
        here = [each for each, there in zip(wanted, is_here, strict=True) if there]
        missing: list[Wanted] = [
            each for each, there in zip(wanted, is_here, strict=True) if not there
        ]

        def task(batch: Sequence[Wanted]) -> None:
            self._deadline.left()
            missing.extend(bring(batch))

        self._threads.spread(task, list(batches(here)))
        return missing

    def _copy(self, batch: Sequence[Wanted]) -> Iterator[Wanted]:
        for each in batch:
            out = _room(each)
            if self._take(each.chunk, out) and is_named(out, each.chunk):
                each.land(out)
            else:
                yield each

    def _take(self, chunk: bytes, out: memoryview) -> bool:
        found, left = self._live.get(chunk), self._left.get(chunk)
        if found:
            source, start, stop = found
            if stop - start == len(out):
                source.stage(start, stop, out)
                return True
        if left is not None and len(left) == len(out):
            out[:] = left
            return True
        return False

    def _read(self, batch: Sequence[Wanted], ids: Mapping[bytes, bytes]) -> Iterator[Wanted]:
        assert self._objects is not None
        out = [_room(each) for each in batch]
        try:
            self._objects.read_into(b"".join(ids[each.chunk] for each in batch), out)
        except (Corrupt, NotFound, Unavailable):
            yield from batch  # peers have the chunk, and fsck reports a damaged store
            return
        for each, data in zip(batch, out, strict=True):
            if ids[each.chunk] == each.chunk or is_named(data, each.chunk):
                each.land(data)
            else:
                yield each


def batches(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Batches for one thread at a time, so that extra memory stays bounded."""
    batch: list[Wanted] = []
    size = 0
    for each in wanted:
        batch.append(each)
        size += each.nbytes
        if size >= RUN_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _room(wanted: Wanted) -> memoryview:
    return wanted.memory if wanted.memory is not None else memoryview(bytearray(wanted.nbytes))
