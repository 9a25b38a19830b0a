"""Chunks that this process has already, by name: in its live state, in its store, in what a broken
transfer left behind.

What is taken from here is hashed where it lands. A chunk that turned out to be another is simply
not here.
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
"""Lands chunks that should be here, and gives those that are not."""


class LocalChunks:
    """What is here, for one transfer. `objects` is the local store, if there is one."""

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
        """Hash a live state, cut as the sender cuts its own, but for the leaves of `without`."""
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
        """These bytes of a tensor were hashed where they lie."""
        self._at[tensor.data_ptr(), start, stop] = chunk

    def forget_places(self) -> None:
        """Tensors of which something was noted are given up: others may come to lie in their
        memory."""
        self._at = {}

    def chunk_at(self, tensor: "torch.Tensor", start: int, stop: int) -> bytes | None:
        """The chunk that these bytes of a tensor were when they were hashed."""
        return self._at.get((tensor.data_ptr(), start, stop))

    def add_left(self, left: Mapping[bytes, memoryview]) -> None:
        """Count what an earlier transfer brought."""
        self._left = left

    def land_alike(
        self, wanted: Sequence[Wanted], alike: Mapping[bytes, tuple[Source, int]], naming: Naming
    ) -> list[Wanted]:
        """Bring to the memory of chunks what the live state has in their places, by leaf and first
        byte, and hash it there; what it is not.

        What turned out to be another chunk is known as that: the live state is read once.
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
        """Bring what is here to where it belongs; what is not. `without_live` if the live state is
        what is written to."""
        if without_live:
            self._live = {}
        missing = self._land(
            wanted,
            [each.chunk in self._live or each.chunk in self._left for each in wanted],
            self._copy,
        )
        return self._land_stored(missing, [each.chunk for each in missing])

    def land_stored(self, wanted: Sequence[Wanted], ids: Sequence[bytes | None]) -> list[Wanted]:
        """Bring what the store has of chunks that have quick names to where it belongs; what it has
        not. `ids` is what a peer says that theirs are: each chunk is compared with its name,
        too."""
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
            yield from batch  # peers have it, and a damaged store is fsck's to tell of
            return
        for each, data in zip(batch, out, strict=True):
            if ids[each.chunk] == each.chunk or is_named(data, each.chunk):
                each.land(data)
            else:
                yield each


def batches(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """What one thread does at a time, so that memory beside the state stays bounded."""
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
