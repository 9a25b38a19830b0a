"""How are the bytes of a commit read? Document, trees, pieces, then chunks into their destinations.

Every chunk is compared with its checksum, or with its id on request. A reader locks nothing in the
store; it locates chunks again if gc moved them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ckptstore.core import geometry
from ckptstore.core.config import StoreConfig
from ckptstore.core.forks import cached_property
from ckptstore.core.geometry import Grid, grid, grid_of_bytes
from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, CommitId, SessionId, document_key
from ckptstore.core.model import SHARED, Box, CommitDocument, LeafContent, Schema, Shape, TreeRef
from ckptstore.core.process import uncollected
from ckptstore.errors import Corrupt, InvalidInput, Thinned
from ckptstore.objects.documents import Layout, decode_document, decode_layout
from ckptstore.objects.pages import join_pages
from ckptstore.objects.schema import decode_schema, parts_of
from ckptstore.repository.chunk_reader import NO_BASES, located_entries
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.dedup import items_of
from ckptstore.repository.memory_budget import ReadRoom, read_room
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.restore.mmap import Unmappable, check_mapped, map_leaf
from ckptstore.restore.read_plan import ChunkTarget, select
from ckptstore.storage.local_files import write_cached

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ckptstore.state.stateful import NewStreams

SHOWN = 8

WIDER = (
    "take a dtype of a wider range, such as torch.bfloat16, or read as committed and convert then; "
    'dtype=(dtype, "unchecked") of restore and read converts them so'
)
"""The next step where a conversion loses values."""

RECENT = 16
"""Number of decoded documents and trees to cache."""


class NamedChunks(NamedTuple):
    """Concatenated chunk ids, and the name of their leaf for errors."""

    name: str
    ids: bytes


def lacks(path: str) -> Thinned:
    """The error for a leaf that is gone, for callers that do not know the commit."""
    return Thinned(f"the commit no longer has the leaf {path}: it was thinned; read another commit")


class Destination(Protocol):
    """Where a leaf's raw bytes go (`state.restore`)."""

    def memory(self) -> memoryview | None:
        """The target's memory, or None if bytes must go through `write`."""

    def write(self, start: int, data: memoryview) -> None:
        """Store `data` at byte `start` of the leaf."""


class Memory:
    """A destination in plain memory."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def memory(self) -> memoryview:
        return self._memory

    def write(self, start: int, data: memoryview) -> None:
        self._memory[start : start + len(data)] = data


class InFile:
    """A destination in a file, from an offset on."""

    def __init__(self, descriptor: int, at: int) -> None:
        self._descriptor, self._at = descriptor, at

    def memory(self) -> None:
        """Bytes are passed to `write`."""

    def write(self, start: int, data: memoryview) -> None:
        write_cached(self._descriptor, self._at + start, [data])


@dataclass(frozen=True)
class Tree:
    """One key of a commit: its leaves and the location of their content."""

    key: str
    ref: TreeRef
    schema: Schema
    contents: Sequence[LeafContent]
    chunk_bytes: int
    streams: "NewStreams | None" = None
    """Of a tree as one rank sees it, states of generators of which it has none."""
    lacks: Callable[[str], Thinned] = lacks
    """The error for a leaf that is gone, by its path."""
    uncast: Mapping[str, str] = field(default_factory=dict)
    """By path, the dtypes of leaves that were committed in lower precision."""

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Leaf numbers by path."""
        return {path: i for i, path in enumerate(self.schema.paths)}

    @cached_property
    def uncast_leaves(self) -> dict[int, str]:
        """`uncast` by the numbers of leaves. An alias was cast with the leaf that it names."""
        paths = self.schema.paths
        owners = ((i, paths[self.schema.owner(i)]) for i in range(len(paths) if self.uncast else 0))
        return {i: self.uncast[path] for i, path in owners if path in self.uncast}

    def is_gone(self, i: int) -> bool:
        """Whether a thinning took the content of leaf `i`."""
        return self.contents[self.schema.owner(i)].gone

    def content(self, i: int) -> LeafContent:
        """The content of leaf `i`; for an alias, that of the leaf it shares memory with. Raises
        `Thinned` if it is gone."""
        content = self.contents[self.schema.owner(i)]
        if content.gone:
            raise self.lacks(self.schema.paths[i])
        return content

    @cached_property
    def plain(self) -> tuple[int, ...]:
        """The leaves that have others below them, in their bytes (`restore.plain`), unless they are
        gone."""
        if "plain" not in self.schema.kinds:
            return ()
        kinds = enumerate(self.schema.kinds)
        return tuple(i for i, kind in kinds if kind == "plain" and not self.is_gone(i))

    def gone_above(self, path: str) -> str | None:
        """The path of a plain leaf that is gone, if it was above `path`."""
        for i, kind in enumerate(self.schema.kinds):
            if kind == "plain" and path.startswith(f"{self.schema.paths[i]}/") and self.is_gone(i):
                return self.schema.paths[i]
        return None

    def content_key(self, i: int) -> object:
        """A comparable stand-in for the content of leaf `i`; None for shards, whose equal content
        may be cut differently, and for leaves that are gone."""
        if self.is_gone(i):
            return None
        content = self.content(i)
        if content.inline is not None:
            return content.inline
        return content.ids if content.boxes is None else None

    def extent(self, i: int) -> tuple[Shape, int]:
        """The shape and element width that define the grid of leaf `i`."""
        if self.schema.kinds[i] == "tensor":
            return self.schema.shapes[i], geometry.width_of(self.schema.dtypes[i])
        return (self.raw_bytes(i),), 1

    def pieces(self, i: int, box: Box | None = None) -> Iterator[ChunkTarget]:
        """The chunks that a box of leaf `i` needs, by default the whole leaf."""
        content = self.content(i)
        whole = None if self.schema.kinds[i] == "tensor" else self.grid(i)
        return select(content, *self.extent(i), self.chunk_bytes, box, whole=whole)

    def grid(self, i: int) -> Grid:
        """The grid of leaf `i`, stored whole."""
        if self.schema.kinds[i] == "tensor":
            return grid(*self.extent(i), self.chunk_bytes)
        content = self.content(i)
        return grid_of_bytes(
            self.raw_bytes(i), self.chunk_bytes, len(content.ids) // CHUNK_ID_BYTES
        )

    def raw_bytes(self, i: int) -> int:
        """The size of leaf `i`; 0 if it is gone."""
        content = self.contents[self.schema.owner(i)]
        if content.gone:
            return 0
        if self.schema.kinds[i] == "tensor":
            return geometry.nbytes_of(self.schema.dtypes[i], self.schema.shapes[i])
        return content.raw_bytes if content.inline is None else len(content.inline)

    def check(self, i: int) -> None:
        """Raise `Corrupt` unless the bytes or chunks of leaf `i` match its shape."""
        self.checked(i)

    def checked(self, i: int) -> LeafContent:
        """As `content`. Raises `Corrupt` unless its bytes or chunks match the leaf's shape."""
        content = self.content(i)
        if content.inline is not None:
            wanted, got, what = self.raw_bytes(i), len(content.inline), "bytes"
        else:
            shape, width = self.extent(i)
            grids = (grid(shape, width, self.chunk_bytes, box) for box in content.boxes or ())
            wanted = sum(map(len, grids if content.boxes else (self.grid(i),)))
            got, what = len(content.ids) // CHUNK_ID_BYTES, "chunks"
        if wanted != got:
            raise Corrupt(
                f"the pages of leaf {self.schema.paths[i]} name {got} {what}; wanted {wanted}; run "
                "`ckptstore fsck`"
            )
        return content


def by_key(trees: Mapping[str, Tree], keys: Sequence[str]) -> dict[str, Tree]:
    """The tree of each of `keys`, from `trees` by name. Keys that share a tree get their parts of
    it. Raises `Corrupt` for a shared tree that lacks one."""
    found = dict(trees)
    if shared := found.pop(SHARED, None):
        found = {**_parts(shared), **found}
    if lost := [key for key in keys if key not in found]:
        raise Corrupt(
            f"the tree that keys of a commit share lacks {lost[0]!r}; run `ckptstore fsck`"
        )
    return {key: found[key] for key in keys}


@uncollected()
def _parts(shared: Tree) -> dict[str, Tree]:
    """The part of each key in a shared tree."""
    ref, chunk_bytes = shared.ref, shared.chunk_bytes
    return {
        key: Tree(key, ref, schema, shared.contents[leaves], chunk_bytes)
        for key, schema, leaves in parts_of(shared.schema)
    }


class ReadRequest(NamedTuple):
    """A box of leaf `number` of `tree` to read into `destination`; the whole leaf without `box`."""

    tree: Tree
    number: int
    destination: Destination
    box: Box | None = None

    @property
    def nbytes(self) -> int:
        """Raw bytes to deliver."""
        if self.box is None:
            return self.tree.raw_bytes(self.number)
        return self.tree.extent(self.number)[1] * prod(self.box.lengths)


class ChunkRead(NamedTuple):
    """The read of one piece, into `memory` if the destination has memory."""

    piece: ChunkTarget
    wanted: ReadRequest
    memory: memoryview | None

    @property
    def place(self) -> memoryview | None:
        """The memory to read the chunk into directly, or None if it must be copied from scratch."""
        at = self.piece.at
        return (
            None
            if self.memory is None or at is None
            else self.memory[at : at + self.piece.raw_bytes]
        )

    def land(self, data: memoryview) -> None:
        """Copy the chunk's bytes to the destination."""
        if self.memory is not None:
            self.piece.land(data, self.memory)
            return
        for start, part in self.piece.parts(data):
            self.wanted.destination.write(start, part)


@dataclass(frozen=True, slots=True)
class Reading:
    """A planned read of `commit`: the raw bytes to deliver, the leaves stored in pages with their
    bytes, the pieces of all others, and the memory to use."""

    commit: CommitId
    needed_bytes: int
    room: ReadRoom
    inline: tuple[tuple[ReadRequest, bytes], ...]
    jobs: tuple[ChunkRead, ...]


class Reader:
    """Reads commits of one store; with `verify_ids`, chunks are compared with their ids too."""

    def __init__(
        self,
        config: StoreConfig,
        objects: ObjectStore,
        threads: ThreadPool,
        *,
        verify_ids: bool = False,
    ) -> None:
        self._objects, self.threads, self.verify_ids = objects, threads, verify_ids
        self._past_cache = False
        self.chunk_bytes = config.chunk_bytes
        self.remote = objects.storage.capabilities.slow_requests
        self.url, self.storage = objects.storage.url, objects.storage
        # They never change, so what was read lately is at hand for the next look at the same
        # commit, or at another with the same schema.
        self.document = lru_cache(RECENT)(self._document)
        self.trees = lru_cache(RECENT)(self.read_trees)
        self._by_key = lru_cache(RECENT)(self._read_keys)
        self._schemas: dict[ChunkId, Schema] = {}

    def verifying_ids(self) -> "Reader":
        """This reader, but one that compares chunks with their ids too."""
        reader = copy(self)
        reader.verify_ids = True
        return reader

    def _document(self, session: SessionId, commit: CommitId) -> CommitDocument:
        """The commit's document, verified."""
        return decode_document(self._objects.storage.read(document_key(session, commit)), commit)

    def read_trees(self, refs: tuple[tuple[str, TreeRef], ...]) -> Mapping[str, Tree]:
        """Trees by their names; their schemas and pages are read in one batch."""
        known = dict(self._schemas)
        chunks = [chunk for _, ref in refs for chunk in (ref.schema, *ref.pages)]
        data = self._objects.read_metadata_many([chunk for chunk in chunks if chunk not in known])
        found: dict[str, Tree] = {}
        with uncollected():
            for key, ref in refs:
                if (schema := known.get(ref.schema)) is None:
                    schema = known[ref.schema] = decode_schema(data[ref.schema])
                contents = join_pages([data[page] for page in ref.pages], len(schema))
                found[key] = Tree(key, ref, schema, contents, self.chunk_bytes)
        self._schemas = known if len(known) <= RECENT else {}
        return found

    def by_key(
        self, document: CommitDocument, keys: Sequence[str] | None = None
    ) -> Mapping[str, Tree]:
        """The tree of each key of a commit, or of each of `keys`, in order. Keys that share a tree
        get their parts of it."""
        return self._by_key(document.trees, document.keys if keys is None else tuple(keys))

    def _read_keys(
        self, refs: tuple[tuple[str, TreeRef], ...], keys: tuple[str, ...]
    ) -> Mapping[str, Tree]:
        own = {name for name, _ in refs}
        names = {key if key in own else SHARED for key in keys}
        return by_key(self.trees(tuple(each for each in refs if each[0] in names)), keys)

    def layout(self, document: CommitDocument) -> Layout | None:
        """The layout of the leaves on the ranks of the commit; None for a single process."""
        chunk = document.layout
        return None if chunk is None else decode_layout(self._objects.read_metadata(chunk))

    def read(
        self,
        wanted: Iterable[ReadRequest],
        commit: CommitId,
        *,
        memory_budget_bytes: int | None = None,
    ) -> int:
        """Read and verify everything in `wanted` into its destination, on as many threads as the
        budget allows.

        Returns the number of raw bytes read from packs. Raises `Corrupt` naming leaf, pack and
        commit, `InvalidInput` for a budget that is too small, and for values that a destination of
        another dtype cannot hold. After an error while reading, destinations hold some new bytes
        and some old.
        """
        wanted = list(wanted)
        reading = self.reading(wanted, commit, memory_budget_bytes=memory_budget_bytes)
        read_bytes = self.carry_out(reading, reading.jobs)
        refuse_losses(wanted, commit)
        return read_bytes

    @uncollected()
    def reading(
        self,
        wanted: Iterable[ReadRequest],
        commit: CommitId,
        *,
        memory_budget_bytes: int | None = None,
    ) -> Reading:
        """Plan a `read`. Raises `Corrupt` for pages that contradict the shapes, `InvalidInput` for
        too small a budget."""
        inline: list[tuple[ReadRequest, bytes]] = []
        jobs: list[ChunkRead] = []
        needed_bytes = 0
        for want in wanted:
            data = want.tree.checked(want.number).inline
            needed_bytes += want.nbytes if data is None or want.box is not None else len(data)
            if data is not None:
                inline.append((want, data))
                continue
            memory = want.destination.memory()
            jobs += (
                ChunkRead(piece, want, memory) for piece in want.tree.pieces(want.number, want.box)
            )
        room = read_room(memory_budget_bytes, self.chunk_bytes, self.threads.count)
        return Reading(commit, needed_bytes, room, tuple(inline), tuple(jobs))

    def carry_out(self, reading: Reading, jobs: Sequence[ChunkRead]) -> int:
        """Execute a plan, or some `jobs` of it; returns the raw bytes read from packs."""
        for want, inline in reading.inline:
            _land_inline(want, memoryview(inline))
        if not jobs:
            return 0
        with uncollected():
            direct = [(job, place) for job in jobs if (place := job.place) is not None]
        if direct:
            self.fetch(direct, reading)
        # The others share scratch memory, or have one chunk's alone. It is used again for each
        # group: fresh pages would cost more than the bytes that go through them.
        groups = list(_grouped((job for job in jobs if job.place is None), reading.room))
        scratch = memoryview(bytearray(max((group.stop for group in groups), default=0)))
        bases = {job.piece.chunk: place for job, place in direct} if groups else NO_BASES
        for group in groups:
            aside = [(job, scratch[at : at + job.piece.raw_bytes]) for at, job in group.jobs]
            self.fetch(aside, reading, bases)
            for job, data in aside:
                job.land(data)
        return sum(job.piece.raw_bytes for job in jobs)

    def fetch(
        self,
        jobs: Sequence[tuple[ChunkRead, memoryview]],
        reading: Reading,
        bases: Mapping[ChunkId, memoryview] = NO_BASES,
    ) -> None:
        """Read and verify chunks, each into its memory. `bases` are chunks of which they may be
        patches; a damaged one is not used."""
        self._objects.read_into(
            b"".join(job.piece.chunk for job, _ in jobs),
            [memory for _, memory in jobs],
            threads=self.threads,
            room=reading.room,
            describe=lambda i: _describe(reading.commit, jobs[i][0]),
            verify_ids=self.verify_ids,
            past_cache=self._past_cache,
            bases=bases,
        )

    def located(self, ids: bytes) -> "NDArray[np.void]":
        """Chunks with their places, as rows of `index.chunks.LOCATED_DTYPE`."""
        return self._objects.to_read(ids)

    def read_in_turn(
        self, groups: Sequence[NamedChunks], out: Sequence[memoryview]
    ) -> Iterator[None]:
        """Read and verify `groups` of chunks one after the other into the same memory `out`, on the
        calling thread, and yield after each group. All chunks are located with one look-up. Raises
        as `read`, with the group's name, and `Corrupt` for a group of more or fewer chunks than
        `out`."""
        objects = self._objects
        where = objects.to_read(b"".join(group.ids for group in groups))
        packs = objects.listed(set(where["pack"].tolist()))
        located = {
            entry.chunk: (packs.get(number), entry)
            for entry, number in zip(located_entries(where), where["pack"].tolist(), strict=True)
        }
        for group in groups:
            chunks = items_of(group.ids)
            if len(chunks) != len(out):
                raise Corrupt(
                    f"{group.name} has {len(chunks)} chunks where others have {len(out)}; run "
                    "`ckptstore fsck`"
                )
            for i, memory in enumerate(out):
                pack, entry = located[ChunkId(chunks[i])]
                objects.read_one(pack, entry, memory, group.name, self.verify_ids)
            yield

    def map(self, tree: Tree, number: int, commit: CommitId, *, verify: bool = False) -> memoryview:
        """The bytes of a leaf, mapped into memory instead of read; verified only with `verify`.

        Raises `Unmappable` for a leaf that must be read.
        """
        content = tree.content(number)
        if content.inline is not None:
            raise Unmappable("it lies in a page")
        tree.check(number)
        pieces = list(tree.pieces(number))
        data = map_leaf(self._objects, pieces, tree.extent(number)[1])
        if verify:
            check_mapped(
                self._objects,
                data,
                pieces,
                self.threads,
                f"leaf {tree.schema.paths[number]}, commit {commit[:12]}",
                verify_ids=self.verify_ids,
            )
        return data

    def leaf_bytes(
        self, tree: Tree, number: int, commit: CommitId, *, memory_budget_bytes: int | None = None
    ) -> bytes:
        """All bytes of a leaf: for values and `bytes` leaves."""
        inline = tree.content(number).inline
        if inline is not None:
            return inline
        tree.check(number)
        buffer = bytearray(tree.raw_bytes(number))
        self.read(
            [ReadRequest(tree, number, Memory(memoryview(buffer)))],
            commit,
            memory_budget_bytes=memory_budget_bytes,
        )
        return bytes(buffer)

    def packs_of(self, document: CommitDocument) -> frozenset[int]:
        """The numbers of the packs that hold the commit's chunks and metadata now."""
        metadata = [chunk for _, ref in document.trees for chunk in (ref.schema, *ref.pages)]
        if document.layout is not None:
            metadata.append(document.layout)
        trees = self.trees(document.trees).values()
        contents = (content for tree in trees for content in tree.contents)
        return self._objects.packs_of(b"".join((*metadata, *(content.ids for content in contents))))

    def verify(self, trees: Iterable[Tree], commit: CommitId) -> None:
        """Read every chunk of `trees`, also of their metadata, from the store through scratch
        memory, and compare it with its id. Copies in this host's read cache are not consulted."""
        trees, nowhere, reader = tuple(trees), Nowhere(), self.verifying_ids()
        metadata = [chunk for tree in trees for chunk in (tree.ref.schema, *tree.ref.pages)]
        self._objects.read_metadata_many(metadata, past_cache=True)
        reader._past_cache = True
        reader.read(
            (
                ReadRequest(tree, i, nowhere)
                for tree in trees
                for i in range(len(tree.schema))
                if tree.schema.aliases[i] < 0 and not tree.is_gone(i)
            ),
            commit,
        )


def counted(wanted: Iterable[ReadRequest]) -> list[ReadRequest]:
    """The requests whose destinations convert to another dtype, and count the values that they
    cannot hold."""
    return [want for want in wanted if getattr(want.destination, "losses", None)]


def losses_in(wanted: Iterable[ReadRequest]) -> list[str]:
    """The paths of leaves that were converted to another dtype, and how many of their values it
    could not hold."""
    said = (
        (want, want.destination.losses.said(whole=want.box is None))  # type: ignore[attr-defined]
        for want in counted(wanted)
    )
    return [f"{want.tree.schema.paths[want.number]}: {lost}" for want, lost in said if lost]


def refuse_losses(wanted: Iterable[ReadRequest], commit: CommitId) -> None:
    """Raise `InvalidInput` if `losses_in` finds any."""
    if found := losses_in(wanted):
        raise InvalidInput(
            f"to convert commit {commit[:12]} would lose more than precision:\n  "
            + "\n  ".join(found[:SHOWN])
            + (f"\n  and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
            + f"\n{WIDER}"
        )


class Nowhere:
    """A destination that discards bytes, for verification."""

    def memory(self) -> None:
        return None

    def write(self, start: int, data: memoryview) -> None:
        pass


def _land_inline(want: ReadRequest, data: memoryview) -> None:
    """Copy a leaf that lies in a page, or a box of it, to its destination."""
    memory = want.destination.memory()
    if want.box is not None:
        for piece in want.tree.pieces(want.number, want.box):
            ChunkRead(piece, want, memory).land(data)
    elif memory is not None:
        memory[:] = data
    else:
        want.destination.write(0, data)


class _Group:
    """Chunks read together into scratch memory, each with its position there."""

    def __init__(self) -> None:
        self.jobs: list[tuple[int, ChunkRead]] = []
        self.stop = 0

    def add(self, job: ChunkRead) -> None:
        self.jobs.append((self.stop, job))
        self.stop += job.piece.raw_bytes


def _grouped(jobs: Iterable[ChunkRead], room: ReadRoom) -> Iterator[_Group]:
    """Consecutive groups that fit into the memory of the room; a larger chunk is a group alone."""
    group = _Group()
    for job in jobs:
        if group.jobs and group.stop + job.piece.raw_bytes > room.aside_bytes:
            yield group
            group = _Group()
        group.add(job)
    if group.jobs:
        yield group


def _describe(commit: CommitId, job: ChunkRead) -> str:
    want = job.wanted
    return f"leaf {want.tree.schema.paths[want.number]}, commit {commit[:12]}"
