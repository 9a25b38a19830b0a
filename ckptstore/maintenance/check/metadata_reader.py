"""Reading documents, schemas and pages of commits from packs by their footers, and finding the
users of a chunk."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from ckptstore.core import geometry
from ckptstore.core.geometry import grid
from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, CommitId, document_key
from ckptstore.core.model import CommitDocument, LeafContent, Schema, Shape, TreeRef
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.log.fold import CommitRow, State
from ckptstore.objects.documents import decode_document
from ckptstore.objects.pages import decode_page, join_pages
from ckptstore.objects.schema import decode_schema
from ckptstore.repository.footers import Inventory, read_chunk
from ckptstore.storage.contract import Storage

_CACHED = 1024

_Hits: TypeAlias = Callable[[ChunkId, frozenset[ChunkId]], tuple[tuple[int, ChunkId], ...]]


@dataclass(frozen=True, slots=True)
class Referrer:
    """The users of a chunk: commits, oldest first, and one of their leaves (or a description,
    for metadata)."""

    commits: tuple[CommitId, ...]
    leaf: str


class Trees:
    """The trees of a store's commits. Schemas and pages are cached while they are likely to be
    needed again."""

    def __init__(self, storage: Storage, inventory: Inventory) -> None:
        self._storage, self._inventory = storage, inventory
        self.schema = lru_cache(_CACHED)(self._schema)
        self._page = lru_cache(_CACHED)(self.read)

    def document(self, commit: CommitId, row: CommitRow) -> CommitDocument:
        """The document of a commit; raises `Corrupt`, `NotFound` or `Unavailable`."""
        document = decode_document(self._storage.read(document_key(row.session, commit)), commit)
        wanted = (row.run, row.step, row.content)
        # Store and session are where it was first committed: it may be mirrored.
        if (
            document.run,
            document.step,
            document.content,
        ) != wanted:
            raise Corrupt(
                f"the document of commit {commit[:12]} is not the one that the log tells of: "
                f"wanted {wanted}"
            )
        return document

    def documents(self, state: State) -> Iterator[tuple[CommitId, CommitRow, CommitDocument]]:
        """The commits whose documents can be read, oldest first."""
        for commit, row in in_order(state):
            try:
                yield commit, row, self.document(commit, row)
            except (Corrupt, NotFound, Unavailable):
                continue

    def read(self, chunk: ChunkId) -> bytes:
        """The bytes of a chunk from any location that matches its id; raises `Corrupt`,
        `NotFound` or `Unavailable`."""
        return bytes(read_chunk(self._storage, self._inventory.places(chunk)))

    def page_ids(self, page: ChunkId) -> bytes:
        """The ids of the chunks that a page names."""
        return b"".join(content.ids for content in decode_page(self._page(page)).leaves)

    def contents(self, ref: TreeRef) -> tuple[Schema, list[LeafContent]]:
        """Schema and complete content of one tree."""
        schema = self.schema(ref.schema)
        return schema, join_pages([self._page(page) for page in ref.pages], len(schema))

    def referrers(self, state: State, chunks: Collection[ChunkId]) -> Mapping[ChunkId, Referrer]:
        """The users of `chunks`. Reads every document, and every page once."""
        wanted = frozenset(chunks)
        found: dict[ChunkId, Referrer] = {}
        hits = lru_cache(None)(self._hits)
        for commit, _, document in self.documents(state) if wanted else ():
            for chunk, leaf in self._needed(document, wanted, hits):
                known = found.get(chunk, Referrer((), leaf))
                if known.commits[-1:] != (commit,):
                    found[chunk] = Referrer((*known.commits, commit), known.leaf)
        return found

    def _needed(
        self, document: CommitDocument, wanted: frozenset[ChunkId], hits: _Hits
    ) -> Iterator[tuple[ChunkId, str]]:
        if document.layout in wanted and document.layout is not None:
            yield document.layout, "its layout"
        for key, ref in document.trees:
            if ref.schema in wanted:
                yield ref.schema, f"the schema of {key}"
            for number, page in enumerate(ref.pages):
                if page in wanted:
                    yield page, f"page {number} of {key}"
                for leaf, chunk in hits(page, wanted):
                    yield chunk, self._path(key, ref, leaf)

    def _hits(self, page: ChunkId, wanted: frozenset[ChunkId]) -> tuple[tuple[int, ChunkId], ...]:
        """The leaves of a page that need one of `wanted`; none if the page cannot be read."""
        try:
            decoded = decode_page(self._page(page))
        except (Corrupt, NotFound, Unavailable):
            return ()
        return tuple(
            (decoded.first_leaf + i, chunk)
            for i, content in enumerate(decoded.leaves)
            for chunk in split_ids(content.ids)
            if chunk in wanted
        )

    def _path(self, key: str, ref: TreeRef, leaf: int) -> str:
        try:
            return self.schema(ref.schema).paths[leaf]
        except (Corrupt, NotFound, Unavailable, IndexError):
            return f"leaf {leaf} of {key}"

    def _schema(self, chunk: ChunkId) -> Schema:
        return decode_schema(self.read(chunk))


def in_order(state: State) -> list[tuple[CommitId, CommitRow]]:
    """The commits of `state`, oldest first."""
    return sorted(state.commits.items(), key=lambda item: item[1].n)


def split_ids(ids: bytes) -> Iterator[ChunkId]:
    return (ChunkId(ids[i : i + CHUNK_ID_BYTES]) for i in range(0, len(ids), CHUNK_ID_BYTES))


def metadata_of(document: CommitDocument) -> Iterator[ChunkId]:
    """Schemas, pages and layout of a commit."""
    for _, ref in document.trees:
        yield ref.schema
        yield from ref.pages
    if document.layout is not None:
        yield document.layout


def misfits(schema: Schema, contents: Iterable[LeafContent], chunk_bytes: int) -> Iterator[str]:
    """Leaves whose content does not match their shape: path and problem."""
    for i, content in enumerate(contents):
        if schema.aliases[i] >= 0:
            continue
        tensor = schema.kinds[i] == "tensor"
        try:
            nbytes = (
                geometry.nbytes_of(schema.dtypes[i], schema.shapes[i])
                if tensor
                else content.raw_bytes
            )
            cells = cells_of(schema, i, content, chunk_bytes)
        except (KeyError, ValueError) as error:
            yield f"{schema.paths[i]}: {error}"
            continue
        if content.inline is not None and len(content.inline) != nbytes:
            yield f"{schema.paths[i]} has {len(content.inline)} bytes; wanted {nbytes}"
        elif content.inline is None and len(content.ids) != cells * CHUNK_ID_BYTES:
            yield (
                f"{schema.paths[i]} names {len(content.ids) // CHUNK_ID_BYTES} chunks; wanted "
                f"{cells}"
            )


def cells_of(schema: Schema, i: int, content: LeafContent, chunk_bytes: int) -> int:
    """The number of chunks of leaf `i` with chunk size `chunk_bytes`."""
    if schema.kinds[i] != "tensor":
        return _cells((content.raw_bytes,), 1, chunk_bytes)
    shape, width = schema.shapes[i], geometry.width_of(schema.dtypes[i])
    if content.boxes is None:
        return _cells(shape, width, chunk_bytes)
    return sum(len(grid(shape, width, chunk_bytes, box)) for box in content.boxes)


@lru_cache(1 << 16)
def _cells(shape: Shape, width: int, chunk_bytes: int) -> int:
    return len(grid(shape, width, chunk_bytes))
