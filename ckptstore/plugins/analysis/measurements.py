"""What is known of the numbers in tensors of commits? Measures each chunk once.

Statistics are kept in the catalog by the chunk's id, distances by the ids of two chunks. Leaves in
pages are at hand with these, and small: all of them are measured again at once, in less time than
it takes to look them up.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ckptstore.errors import CkptStoreError
from ckptstore.plugin.handles import StoreHandle
from ckptstore.plugin.model import CHUNK_ID_BYTES, Box, CommitId, LeafContent, digest, grid
from ckptstore.plugin.progress import Counter, Progress, silent
from ckptstore.plugin.reading import Memory, Reader, ReadRequest, Tree
from ckptstore.plugin.statistics import (
    Moments,
    Statistics,
    added,
    added_moments,
    decode_distance,
    decode_moments,
    decode_statistics,
    encode_distance,
    has_statistics,
    is_measured,
    key_of,
)
from ckptstore.plugin.work import ThreadPool
from ckptstore.plugin.writing import Committed

if TYPE_CHECKING:
    from ckptstore.plugin.ranks import Collective

READ_BYTES = 8 << 20
"""A thread reads about this much before it measures it, """
BATCH = 4096
"""or so many chunks: of small ones, many of each commit, which lie together in its pack."""


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor leaf of a commit. `chunks` are the ids of its chunks; a leaf in a page has none."""

    commit: CommitId
    tree: Tree
    i: int
    dtype: str
    content: LeafContent
    chunks: tuple[bytes, ...]

    @classmethod
    def of(cls, commit: CommitId, tree: Tree, i: int) -> "Tensor":
        content = tree.content(i)
        ids, starts = content.ids, range(0, len(content.ids), CHUNK_ID_BYTES)
        chunks = tuple([ids[at : at + CHUNK_ID_BYTES] for at in starts])
        return cls(commit, tree, i, tree.schema.dtypes[i], content, chunks)

    @property
    def in_page(self) -> memoryview | None:
        """Its bytes, if they lie in a page."""
        return None if self.content.inline is None else memoryview(self.content.inline)

    def is_as_in(self, tree: Tree, i: int) -> bool:
        """Whether leaf `i` of another tree is this one, chunk by chunk."""
        mine, other = self.content, tree.content(i)
        return (
            (mine.ids, mine.inline, mine.boxes) == (other.ids, other.inline, other.boxes)
            and self.dtype == tree.schema.dtypes[i]
            and self.tree.schema.shapes[self.i] == tree.schema.shapes[i]
        )

    def cell(self, chunk: int, boxes: tuple[Box, ...] | None) -> Box | None:
        """The box of chunk number `chunk`, counted as if the tensor was held in `boxes`; None for
        the whole leaf."""
        if self.content.inline is not None or (boxes is None and len(self.chunks) == 1):
            return None
        for box in boxes or (None,):
            cells = grid(*self.tree.extent(self.i), self.tree.chunk_bytes, box)
            if chunk < len(cells):
                return cells.cell(chunk)
            chunk -= len(cells)
        raise IndexError(chunk)

    def fits(self, other: "Tensor") -> bool:
        shapes = (each.tree.schema.shapes[each.i] for each in (self, other))
        return self.dtype == other.dtype and len(set(shapes)) == 1


Pair: TypeAlias = tuple[Tensor, Tensor]
"""Two tensors of one shape and dtype."""


class _Measure(NamedTuple):
    """A chunk to measure, or two of which to measure the distance: number `chunk` of `tensors`, and
    the key for the result. With `whole`, cells of tensors that are held in different boxes."""

    key: bytes
    tensors: tuple[Tensor, ...]
    chunk: int
    whole: bool = False

    def boxes(self) -> list[Box | None]:
        boxes = None if self.whole else self.tensors[0].content.boxes
        return [each.cell(self.chunk, boxes) for each in self.tensors]


class Measurements:
    """Statistics of chunks, from the catalog or measured now, by the threads of a store."""

    def __init__(
        self,
        handle: StoreHandle,
        threads: ThreadPool,
        known: Mapping[bytes, bytes] | None = None,
        *,
        progress: Progress = silent,
    ) -> None:
        self._handle, self._threads, self._progress = handle, threads, progress
        self._known = dict(known or {})
        self._in_pages: dict[Tensor, Statistics] = {}
        self._between: dict[Pair, float] = {}

    def statistics(self, tensor: Tensor) -> Statistics:
        """What is known of a tensor that was among those last to `look_up`."""
        return self._in_pages.get(tensor) or added(map(decode_statistics, self._of(tensor)))

    def moments(self, tensor: Tensor) -> Moments:
        """What is known of a tensor of which moments, or more, were looked up last."""
        return self._in_pages.get(tensor) or added_moments(map(decode_moments, self._of(tensor)))

    def _of(self, tensor: Tensor) -> list[bytes]:
        return [self._known[key_of(tensor.dtype, chunk)] for chunk in tensor.chunks]

    def distance(self, a: Tensor, b: Tensor) -> float:
        """The Euclidean distance of two tensors that were among the pairs last to `look_up`."""
        if (squares := self._between.get((a, b))) is not None:
            return math.sqrt(squares)
        parts = (self._known[each.key] for each in _of_pair(a, b))
        return math.sqrt(math.fsum(map(decode_distance, parts)))

    def _has(self, key: bytes, only_moments: bool) -> bool:
        data = self._known.get(key)
        return data is not None and (only_moments or has_statistics(data))

    def look_up(
        self,
        tensors: Iterable[Tensor],
        pairs: Iterable[tuple[Tensor, Tensor]] = (),
        *,
        only_moments: bool = False,
    ) -> None:
        """Know everything about these, or their moments at least, by reading what the catalog has
        not; it then has it."""
        tensors, pairs = self._measured_in_pages(tensors, pairs)
        wanted = {each.key: each for tensor in tensors for each in _of_one(tensor)}
        wanted |= {each.key: each for pair in pairs for each in _of_pair(*pair)}
        unknown = [key for key in wanted if not self._has(key, only_moments)]
        if unknown:
            self._known |= self._handle.queries().statistics(unknown)
        missing = [wanted[key] for key in unknown if not self._has(key, only_moments)]
        if not missing:
            return
        found: dict[bytes, bytes] = {}
        with closing(ThreadPool(1)) as alone:  # what a thread reads, it measures
            reader = Reader(self._handle.config, self._handle.objects, alone)
            counter = Counter(self._progress, "measure tensors", len(missing))

            def measure(batch: Batch) -> None:
                _measure(reader, found, batch)
                counter.add(len(batch))

            self._threads.spread(measure, list(_batches(_by_place(missing))))
        self._known |= found
        self._handle.keep_statistics(found)

    def _measured_in_pages(
        self, tensors: Iterable[Tensor], pairs: Iterable[Pair]
    ) -> tuple[list[Tensor], list[Pair]]:
        """Measure what lies in pages; returns the other tensors and pairs."""
        from ckptstore.plugins.analysis.measure import squared_distances, statistics_of_many

        chunks: dict[str, dict[Tensor, memoryview]] = {}
        gaps: dict[str, dict[Pair, tuple[memoryview, memoryview]]] = {}
        left, apart = list[Tensor](), list[Pair]()
        for tensor in tensors:
            if (data := tensor.in_page) is None:
                left.append(tensor)
            else:
                chunks.setdefault(tensor.dtype, {})[tensor] = data
        for a, b in pairs:
            if (x := a.in_page) is None or (y := b.in_page) is None:
                apart.append((a, b))
            else:
                gaps.setdefault(a.dtype, {})[a, b] = x, y
        self._in_pages, self._between = {}, {}
        for dtype, of_dtype in chunks.items():
            self._in_pages |= statistics_of_many(of_dtype, dtype)
        for dtype, of_pairs in gaps.items():
            self._between |= squared_distances(of_pairs, dtype)
        return left, apart


def with_tensors(
    handle: StoreHandle,
    threads: ThreadPool,
    reader: Reader,
    committed: Committed,
    measured: Mapping[bytes, bytes],
    peers: "Collective | None",
) -> Committed:
    """A new commit with the moments of its tensors by path. `measured` are those of the chunks that
    this rank hashed; others are looked up, or read."""
    if peers:
        found = peers.share("commit: measure", lambda: list(measured.items()), _joined)
        measured = dict(found)
    handle.keep_statistics(measured)
    tensors = {
        path: Tensor.of(committed.id, tree, i)
        for tree in reader.trees(committed.document.trees).values()
        for i, path in enumerate(tree.schema.paths)
        if tree.schema.kinds[i] == "tensor" and is_measured(tree.schema.dtypes[i])
    }
    known = Measurements(handle, threads, measured)
    known.look_up(tensors.values(), only_moments=True)
    by_path = {path: known.moments(tensor) for path, tensor in tensors.items()}
    return replace(committed, stats=replace(committed.stats, tensors=by_path))


def _joined(found: list[list[tuple[bytes, bytes]]]) -> list[tuple[bytes, bytes]]:
    """What all ranks measured."""
    return [pair for each in found for pair in each]


def _of_one(tensor: Tensor) -> Iterator[_Measure]:
    for number, chunk in enumerate(tensor.chunks):
        yield _Measure(key_of(tensor.dtype, chunk), (tensor,), number)


def _of_pair(a: Tensor, b: Tensor) -> Iterator[_Measure]:
    """The chunks that differ; if the two are held in different boxes, the cells of all."""
    mine, other = a.content, b.content
    if mine.boxes == other.boxes and (mine.inline is None) == (other.inline is None):
        for number, (x, y) in enumerate(zip(a.chunks, b.chunks, strict=True)):
            if x != y:
                yield _Measure(key_of(a.dtype, x, y), (a, b), number)
        return
    names = [digest(repr((each.inline, each.ids, each.boxes)).encode()) for each in (mine, other)]
    for number in range(len(grid(*a.tree.extent(a.i), a.tree.chunk_bytes))):
        yield _Measure(key_of(f"{a.dtype}/{number}", *names), (a, b), number, whole=True)


def _by_place(wanted: Sequence[_Measure]) -> list[_Measure]:
    """In an order in which all that is measured of a place in a leaf, in any of its commits, comes
    together: its chunk is then read once, and not anew for each distance."""
    leaves: dict[str, int] = {}

    def place(each: _Measure) -> tuple[int, int]:
        tensor = each.tensors[-1]
        path = tensor.tree.schema.paths[tensor.i]
        return leaves.setdefault(path, len(leaves)), each.chunk

    return sorted(wanted, key=place)


Part: TypeAlias = tuple[Tensor, Box | None]
Batch: TypeAlias = list[tuple[_Measure, list[Box | None]]]


def _batches(wanted: Iterable[_Measure]) -> Iterator[Batch]:
    """Consecutive groups that are read together."""
    batch: Batch = []
    parts: set[Part] = set()
    nbytes = 0
    for each in wanted:
        boxes = each.boxes()
        more = set(zip(each.tensors, boxes, strict=True)) - parts
        size = sum(_nbytes(*part) for part in more)
        if batch and (nbytes + size > READ_BYTES or len(parts) >= BATCH):
            yield batch
            batch, parts, nbytes = [], set(), 0
            more = set(zip(each.tensors, boxes, strict=True))
            size = sum(_nbytes(*part) for part in more)
        batch.append((each, boxes))
        parts |= more
        nbytes += size
    if batch:
        yield batch


def _nbytes(tensor: Tensor, box: Box | None) -> int:
    width = tensor.tree.extent(tensor.i)[1]
    return tensor.tree.raw_bytes(tensor.i) if box is None else math.prod(box.lengths) * width


def _measure(reader: Reader, found: dict[bytes, bytes], batch: Batch) -> None:
    """Read and measure a batch; the results go to `found`."""
    from ckptstore.plugins.analysis.measure import squared_distances, statistics_of_many

    parts = dict.fromkeys(
        part for each, boxes in batch for part in zip(each.tensors, boxes, strict=True)
    )
    memories = dict(zip(parts, _read(reader, list(parts)), strict=True))
    chunks: dict[str, dict[bytes, memoryview]] = {}
    gaps: dict[str, dict[bytes, tuple[memoryview, memoryview]]] = {}
    for each, boxes in batch:
        first, *second = (memories[part] for part in zip(each.tensors, boxes, strict=True))
        if second:
            gaps.setdefault(each.tensors[0].dtype, {})[each.key] = first, second[0]
        else:
            chunks.setdefault(each.tensors[0].dtype, {})[each.key] = first
    for dtype, of_dtype in chunks.items():
        statistics = statistics_of_many(of_dtype, dtype)
        found.update((key, each.encode()) for key, each in statistics.items())
    for dtype, of_pairs in gaps.items():
        squares = squared_distances(of_pairs, dtype)
        found.update((key, encode_distance(distance)) for key, distance in squares.items())


def _read(reader: Reader, parts: Sequence[Part]) -> list[memoryview]:
    """The bytes of parts of tensors of any commits."""
    memories = [memoryview(bytearray(_nbytes(*part))) for part in parts]
    requests = [
        ReadRequest(tensor.tree, tensor.i, Memory(memory), box)
        for (tensor, box), memory in zip(parts, memories, strict=True)
    ]
    try:
        reader.read(requests, parts[0][0].commit)
    except CkptStoreError:
        for (tensor, _), request in zip(parts, requests, strict=True):
            reader.read([request], tensor.commit)  # so that the error names the right commit
        raise
    return memories
