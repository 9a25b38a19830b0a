"""How is a state received? Which chunks are wanted, which are local, and which must come from
peers.

A chunk counts as received only after its bytes have been hashed, at their destination or beside it.
Live tensors receive only verified bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptstore.core.ids import ChunkId
from ckptstore.core.model import TreeRef
from ckptstore.core.process import uncollected
from ckptstore.errors import Corrupt
from ckptstore.interop.chunk_transfer.chunk_names import BLAKE3, NAMINGS, Naming
from ckptstore.interop.chunk_transfer.connection import Deadline
from ckptstore.interop.chunk_transfer.fetch import Peers
from ckptstore.interop.chunk_transfer.local_chunks import LocalChunks, batches
from ckptstore.interop.chunk_transfer.protocol import Description
from ckptstore.interop.chunk_transfer.scheduler import Wanted
from ckptstore.interop.chunk_transfer.served_state import KEY
from ckptstore.interop.chunk_transfer.store_lookup import AdaptiveProbe
from ckptstore.interop.chunk_transfer.targets import Target, check_claims, make_targets
from ckptstore.objects.pages import join_pages
from ckptstore.objects.schema import decode_schema
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.restore.read_plan import Piece, select
from ckptstore.restore.reader import Destination, Tree
from ckptstore.state import containers
from ckptstore.state.inflate import inflate, refuse_pickles
from ckptstore.state.leaf_sources import FlatState, Source
from ckptstore.state.leaves import Destination as TensorDestination

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ckptstore.repository.chunk_store import ObjectStore


@dataclass(frozen=True, slots=True)
class LocalState:
    """What this process contributes: its live state, which is also the destination if `in_place`;
    its store; and chunks `left` from earlier. Peers are asked for chunks by `names`.
    """

    threads: ThreadPool
    live: FlatState | None
    in_place: bool
    objects: "ObjectStore | None"
    meshes: "Sequence[DeviceMesh]"
    left: Mapping[bytes, memoryview]
    max_bytes: int
    chunk_bytes: int
    names: str


@dataclass(frozen=True, slots=True)
class Received:
    """The result of a transfer. Of `chunks`, of `nbytes` together, `fetched_chunks` came from peers
    and the others were local. `retried` were asked for again, after a broken connection or wrong
    bytes.
    """

    chunks: int
    nbytes: int
    fetched_chunks: int
    fetched_bytes: int
    requests: int
    retried: int


@dataclass(slots=True)
class _Want:
    """A chunk and all its destinations."""

    nbytes: int
    landings: "list[_Landing]"

    @property
    def first(self) -> "_Landing | None":
        """The destination that receives the chunk; the others are copied from it."""
        return next((landing for landing in self.landings if landing.direct is not None), None)

    def alike(self) -> tuple[Source, int] | None:
        """The position of this chunk in the live state, if it has the leaf: the leaf and its first
        byte.
        """
        first = self.first
        return (
            (first.alike, first.piece.at)
            if first and first.alike is not None and first.piece.at is not None
            else None
        )


@dataclass(frozen=True, slots=True)
class _Landing:
    """One destination: `memory` is its own writable memory, if any; `alike` is the leaf of the live
    state with the same path and size.
    """

    piece: Piece
    destination: Destination
    memory: memoryview | None
    live: bool
    alike: Source | None

    @property
    def direct(self) -> memoryview | None:
        """Memory that may receive the chunk directly: new and contiguous."""
        at = self.piece.at
        return (
            self.memory[at : at + self.piece.raw_bytes]
            if self.memory is not None and at is not None and not self.live
            else None
        )

    def land(self, data: memoryview) -> None:
        if self.memory is not None:
            self.piece.land(data, self.memory)
            return
        for source, target, n in self.piece.moves:
            self.destination.write(target, data[source : source + n])

    def is_spoiled(self, holdings: LocalChunks) -> bool:
        """Whether a chunk taken by number has overwritten this destination."""
        return _chunk_at(self.piece, self.destination, holdings) not in (None, self.piece.chunk)

    def note(self, holdings: LocalChunks, chunk: bytes) -> None:
        """Record that the memory was hashed and is this chunk."""
        at, destination = self.piece.at, self.destination
        if at is not None and isinstance(destination, TensorDestination):
            holdings.note(destination.tensor, at, at + self.piece.raw_bytes, chunk)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The raw bytes of every chunk of a state, and the wanted chunks, each once, with all
    destinations.
    """

    sizes: dict[bytes, int]
    wants: dict[bytes, _Want]


@dataclass(frozen=True, slots=True)
class _Bound:
    """A validated description, and the destinations of its leaves."""

    description: Description
    tree: Tree
    targets: list[Target]

    def fits(self, description: Description, tree: Tree) -> bool:
        """Whether this is the outline of `that`: everything is equal except for the ids."""
        if (self.description.chunk_bytes, self.description.placed) != (
            description.chunk_bytes,
            description.placed,
        ):
            return False
        return self.tree.ref.schema == tree.ref.schema and all(
            replace(mine, ids=b"") == replace(its, ids=b"")
            for mine, its in zip(self.tree.contents, tree.contents, strict=True)
        )


@dataclass(slots=True)
class Transfer:
    """One state in transfer. `landed` are the chunks received into new memory, also if the transfer
    fails.
    """

    peers: Peers
    here: LocalState
    deadline: Deadline
    landed: dict[bytes, memoryview] = field(default_factory=dict)

    def run(self) -> tuple[Any, Received]:
        """Receive the state. Raises `Corrupt`, `InvalidInput`, `Conflict` or `Unavailable` for
        peers' errors, TimeoutError when time is up.
        """
        nothing = self.here.live is None and self.here.objects is None and not self.here.left
        described = self.here.threads.submit(
            lambda: self.peers.describe(self.here.names, early=nothing)
        )
        holdings = self._holdings(described)
        description, early = described.result(), None
        if description.early:
            early = self._outlined(description)
            self._take_early(early, holdings)
            description = self.peers.describe(self.here.names)
        bound = self._bound(description, early)
        tree, targets = bound.tree, bound.targets
        if early and targets is not early.targets:
            holdings.forget_places()
        plan = _plan(tree, targets, _sources(self.here.live), holdings)
        if early:
            spoiled = sum(
                any(landing.is_spoiled(holdings) for landing in want.landings)
                for want in plan.wants.values()
            )
            self.peers.traffic.add(retried=spoiled)
        self._bring(plan.wants, holdings, description)
        _land_inline(tree, targets)
        state = inflate(tree.schema, [_content(target) for target in targets])
        traffic = self.peers.traffic
        metadata = dict(description.metadata)
        nbytes = sum(plan.sizes.values()) + sum(metadata.values())
        chunks = len(plan.sizes) + len(metadata)
        return state, Received(
            chunks, nbytes, traffic.chunks, traffic.bytes, traffic.requests, traffic.retried
        )

    def _bound(self, description: Description, early: "_Bound | None" = None) -> "_Bound":
        """Validate a description. Its leaves keep the outline's destinations if only the ids
        differ.
        """
        tree = self._tree(description)
        check_claims(tree, description.placed, self.here.max_bytes)
        if early and early.fits(description, tree):
            return _Bound(description, tree, early.targets)
        live = self.here.live if self.here.in_place else None
        return _Bound(
            description, tree, make_targets(tree, description.placed, live, self._meshes())
        )

    def _outlined(self, outline: Description) -> "_Bound":
        bound = self._bound(outline)
        self.peers.traffic.forget_chunks()
        return bound

    def _take_early(self, early: "_Bound", holdings: LocalChunks) -> None:
        """Take chunks by number while the peer copies others. They count once the description is
        complete and their hashes match.
        """

        naming = NAMINGS[self.here.names]

        def numbered(chunk: bytes, nbytes: int, landing: _Landing) -> Wanted:
            def land(data: memoryview) -> None:
                found = naming(data)
                self.landed[found] = data
                landing.note(holdings, found)

            return Wanted(chunk, nbytes, landing.direct, land, numbered=True)

        wants = _plan(early.tree, early.targets, {}, holdings).wants
        self.peers.fetch(
            [
                numbered(chunk, want.nbytes, want.first)
                for chunk, want in wants.items()
                if want.first
            ]
        )
        holdings.add_left(dict(self.landed))

    def _tree(self, description: Description) -> Tree:
        """Schema and pages, from the store or the peers."""
        data = {chunk: bytearray(nbytes) for chunk, nbytes in description.metadata}
        wanted = [
            Wanted(chunk, len(each), memoryview(each), _nothing) for chunk, each in data.items()
        ]
        self.peers.fetch(
            LocalChunks(self.here.threads, self.deadline, self.here.objects).land(wanted)
        )
        try:
            schema = decode_schema(bytes(data[description.schema[0]]))
            contents = join_pages([bytes(data[page]) for page, _ in description.pages], len(schema))
            containers.check(schema.skeleton)
        except Corrupt as error:
            raise Corrupt(f"a peer describes a state that is none: {error}") from error
        refuse_pickles(schema)
        if not all(0 <= leaf < len(schema) for leaf in description.placed):
            raise Corrupt("a peer describes DTensors that its state does not have")
        ref = TreeRef(
            ChunkId(description.schema[0]), tuple(ChunkId(page) for page, _ in description.pages)
        )
        return Tree(KEY, ref, schema, contents, description.chunk_bytes)

    def _holdings(self, described: "Future[Description]") -> LocalChunks:
        """The local chunks. A live state that will be overwritten is hashed while the peer hashes
        its own, and again if chunk boundaries differ; any other live state is hashed where its copy
        lands.
        """
        holdings = LocalChunks(self.here.threads, self.deadline, self.here.objects)
        holdings.add_left(self.here.left)
        if self.here.live and self.here.in_place:
            expected = self.here.chunk_bytes, self.here.names
            holdings.add_live(self.here.live, expected[0], NAMINGS[expected[1]])
            if (said := (described.result().chunk_bytes, described.result().names)) != expected:
                holdings.add_live(self.here.live, said[0], NAMINGS[said[1]])
        return holdings

    def _bring(
        self, wants: dict[bytes, _Want], holdings: LocalChunks, description: Description
    ) -> None:
        naming: Naming = NAMINGS[description.names]
        wanted = [self._wanted(chunk, want) for chunk, want in wants.items()]
        if self.here.live and not self.here.in_place:
            alike = {chunk: found for chunk, want in wants.items() if (found := want.alike())}
            wanted = holdings.land_alike(wanted, alike, naming)
            if wanted:  # they may be at any other position
                holdings.add_live(
                    self.here.live,
                    description.chunk_bytes,
                    naming,
                    without={source for source, _ in alike.values()},
                )
        missing = holdings.land(wanted, without_live=self.here.in_place)
        if self.here.objects and description.names != BLAKE3:
            missing = self._from_store(missing, holdings)
        self.peers.fetch(missing)

    def _from_store(self, missing: list[Wanted], holdings: LocalChunks) -> list[Wanted]:
        """Read chunks from the local store, by ids from the peers, as long as it has enough of
        them; returns the missing chunks.
        """
        probe, left = AdaptiveProbe(), list[Wanted]()
        for batch in batches(missing):
            if not probe:
                left += batch
                continue
            lacked = holdings.land_stored(batch, self.peers.ids([each.chunk for each in batch]))
            probe.add(len(batch), len(batch) - len(lacked))
            left += lacked
        return left

    def _wanted(self, chunk: bytes, want: _Want) -> Wanted:
        first = want.first
        memory = first.direct if first else None

        def land(data: memoryview) -> None:
            for landing in want.landings:
                if landing is not first:
                    landing.land(data)
            if memory is not None:
                self.landed[chunk] = memory

        return Wanted(chunk, want.nbytes, memory, land)

    def _meshes(self) -> "Iterator[DeviceMesh]":
        yield from self.here.meshes
        for held in self.here.live.held.values() if self.here.live else ():
            if hasattr(held.origin, "device_mesh"):
                yield held.origin.device_mesh


def _sources(live: FlatState | None) -> dict[str, Source]:
    """The leaves of a live state that are whole here, by path."""
    return (
        {live.schema.paths[i]: source for i, source in enumerate(live.leaves) if i not in live.held}
        if live
        else {}
    )


@uncollected()
def _plan(
    tree: Tree, targets: Sequence[Target], sources: Mapping[str, Source], holdings: LocalChunks
) -> _Plan:
    """The wanted chunks without those in place, with equal leaves in `sources`."""
    sizes, wants = dict[bytes, int](), dict[bytes, _Want]()
    for i, target in enumerate(targets):
        content = tree.content(i)
        if content.inline is not None:
            continue
        shape, width = tree.extent(i)
        source = sources.get(tree.schema.paths[i])
        for box, destination in target.parts:
            memory = destination.memory()
            fits = (
                source
                and box is None
                and memory is not None
                and (source.nbytes, source.width) == (len(memory), width)
            )
            alike = source if fits else None
            for piece in select(content, shape, width, tree.chunk_bytes, box):
                chunk, nbytes = piece.chunk, piece.raw_bytes
                if (known := sizes.setdefault(chunk, nbytes)) != nbytes:
                    raise Corrupt(
                        f"a peer names one chunk for parts of {known} and of {nbytes} bytes; one "
                        "of them is wrong"
                    )
                if _chunk_at(piece, destination, holdings) != chunk:
                    wants.setdefault(chunk, _Want(nbytes, [])).landings.append(
                        _Landing(piece, destination, memory, target.live, alike)
                    )
    return _Plan(sizes, wants)


def _chunk_at(piece: Piece, destination: Destination, holdings: LocalChunks) -> bytes | None:
    """The recorded chunk at this position: in live memory, or taken by number."""
    if piece.at is None or not isinstance(destination, TensorDestination):
        return None
    return holdings.chunk_at(destination.tensor, piece.at, piece.at + piece.raw_bytes)


def _land_inline(tree: Tree, targets: Sequence[Target]) -> None:
    """Write small leaves to live tensors: last, when all chunks are in place."""
    for i, target in enumerate(targets):
        inline = tree.content(i).inline
        if inline and target.live:
            for _, destination in target.parts:
                destination.write(0, memoryview(inline))


def _content(target: Target) -> Any:
    return bytes(target.value) if isinstance(target.value, bytearray) else target.value


def _nothing(data: memoryview) -> None:
    """Does nothing: the bytes are in place."""
