"""Which chunks stood at the places of a plan in the commit before, whoever made that?

By the paths of its leaves: for the first commit of a plan in a process, which remembers none.
Whatever is found is a base of a patch at most, and compared byte by byte. A wrong one, or none,
costs bytes alone.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ckptstore.commit.plan import PlanPart
from ckptstore.core import forks
from ckptstore.core.geometry import Grid, grid, grid_of_bytes, intersect
from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, CommitId, SessionId, document_key
from ckptstore.core.model import Box, LeafContent, Schema
from ckptstore.core.process import uncollected
from ckptstore.errors import CkptStoreError
from ckptstore.objects.documents import decode_document
from ckptstore.objects.pages import join_pages
from ckptstore.objects.schema import decode_schema
from ckptstore.repository.chunk_store import ObjectStore


class _Place(NamedTuple):
    """Where the bytes of a leaf are described: the tree's schema, its contents, and a number."""

    schema: Schema
    contents: list[LeafContent]
    leaf: int


class Predecessors:
    """The chunks of `commit` by leaf and place. `paths` has those of the leaves of a plan, by their
    numbers; DCP's names, with dots, do as well. Threads may share it. The commit is read when the
    first chunk is asked for, and one that cannot be read has none."""

    def __init__(
        self,
        objects: ObjectStore,
        session: SessionId,
        commit: CommitId,
        paths: Mapping[int, str],
        chunk_bytes: int,
    ) -> None:
        self._objects, self._session, self._commit = objects, session, commit
        self._paths, self._chunk_bytes = paths, chunk_bytes
        self._places: dict[str, _Place] | None = None
        self._by_name: dict[str, _Place] | None = None
        self._leaves: dict[int, _LeafChunks | None] = {}
        self._lock = forks.lock()

    def near_chunk(self, part: PlanPart, number: int) -> ChunkId | None:
        """As `chunk`, if it can be read without a request to a bucket."""
        chunk = self.chunk(part, number)
        return chunk if chunk and self._objects.is_near(chunk) else None

    def chunk(self, part: PlanPart, number: int) -> ChunkId | None:
        """The chunk that stood at the place of a part's chunk `number`, if there was one of the
        same dtype."""
        with self._lock:
            if part.leaf not in self._leaves:
                self._leaves[part.leaf] = self._leaf(part)
            leaf = self._leaves[part.leaf]
            return leaf.chunk(part.grid, number) if leaf else None

    def _leaf(self, part: PlanPart) -> "_LeafChunks | None":
        if self._places is None:
            try:
                self._places = self._read()
            except CkptStoreError:
                self._places = {}  # a restore says what is wrong with it
        path = self._paths.get(part.leaf, "")
        place = self._places.get(path) or self._named().get(_dotted(path))
        if place is None:
            return None
        schema, contents, i = place
        content = contents[schema.owner(i)]
        if content.gone or content.inline is not None or schema.dtypes[i] != part.dtype:
            return None
        if schema.kinds[i] == "tensor" and len(schema.shapes[i]) != len(part.grid.box.lengths):
            return None
        grids = grids_of(schema, content, i, part.width, self._chunk_bytes)
        return _LeafChunks(grids, part.width, content.ids)

    def _read(self) -> dict[str, _Place]:
        """The leaves of the commit by path."""
        objects = self._objects
        document = objects.storage.read(document_key(self._session, self._commit))
        refs = [ref for _, ref in decode_document(document, self._commit).trees]
        data = objects.read_metadata_many(
            chunk for ref in refs for chunk in (ref.schema, *ref.pages)
        )
        found = dict[str, _Place]()
        with uncollected():
            for ref in refs:
                schema = decode_schema(data[ref.schema])
                contents = join_pages([data[page] for page in ref.pages], len(schema))
                for i, path in enumerate(schema.paths):
                    found[path] = _Place(schema, contents, i)
        return found

    def _named(self) -> dict[str, _Place]:
        """The leaves of the commit by DCP's names, which may lack the first key."""
        if self._by_name is None:
            self._by_name = {}
            for path, place in (self._places or {}).items():
                for name in (_dotted(path), _dotted(path.partition("/")[2])):
                    self._by_name.setdefault(name, place)
        return self._by_name


def grids_of(
    schema: Schema, content: LeafContent, i: int, width: int, chunk_bytes: int
) -> list[Grid]:
    """How the chunks of leaf `i` were cut, which has elements of `width` bytes, box by box."""
    if schema.kinds[i] != "tensor":
        chunks = len(content.ids) // CHUNK_ID_BYTES
        return [grid_of_bytes(content.raw_bytes, chunk_bytes, chunks)]
    shape = schema.shapes[i]
    boxes = content.boxes or (Box.whole(shape),)
    return [grid(shape, width, chunk_bytes, box) for box in boxes]


class _LeafChunks:
    """The chunks of a leaf, box by box."""

    def __init__(self, grids: list[Grid], width: int, ids: bytes) -> None:
        self._width, self._ids = width, ids
        self._firsts = dict[Box, tuple[Grid, int]]()
        first = 0
        for cells in grids:
            self._firsts[cells.box] = cells, first
            first += len(cells)

    def chunk(self, wanted: Grid, number: int) -> ChunkId | None:
        """The chunk in cell `number` of a grid, if one of this leaf has the same cell."""
        cells, first = self._firsts.get(wanted.box, (None, 0))
        at = first + number if cells == wanted else self._at(wanted.cell(number))
        found = b"" if at is None else self._ids[at * CHUNK_ID_BYTES : (at + 1) * CHUNK_ID_BYTES]
        return ChunkId(found) if len(found) == CHUNK_ID_BYTES else None

    def _at(self, cell: Box) -> int | None:
        """The number of the chunk in a cell of a leaf that was held in other boxes."""
        for cells, first in self._firsts.values():
            if intersect(cells.box, cell) != cell:
                continue
            element = 0
            for begin, length, offset, _ in cells.box.beside(cell):
                element = element * length + offset - begin
            at, _ = cells.covering(element * self._width, element * self._width + 1)
            if cells.cell(at) == cell:
                return first + at
        return None


def _dotted(path: str) -> str:
    return path.replace("/", ".")
