"""How is a state received? Which chunks are wanted, which are local, and which must come from
peers.

A chunk counts as received only after its bytes have been hashed, at their destination or beside it
(`fetch.Wanted.land`), wherever they come from: the live state, a broken transfer, the local store,
a peer. Live tensors receive only verified bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptstore.commit.plan import Run
from ckptstore.core.gc_pause import uncollected
from ckptstore.core.ids import ChunkId
from ckptstore.core.model import TreeRef
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.interop.chunk_transfer.chunks import AdaptiveProbe, batches, cut_state
from ckptstore.interop.chunk_transfer.connection import Deadline
from ckptstore.interop.chunk_transfer.fetch import Peers, Wanted
from ckptstore.interop.chunk_transfer.offer import KEY
from ckptstore.interop.chunk_transfer.targets import Target, check_claims, make_targets
from ckptstore.interop.chunk_transfer.wire import Description, name_of
from ckptstore.objects.pages import join_pages
from ckptstore.objects.schema import decode_schema
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.restore.read_plan import select
from ckptstore.restore.reader import ChunkRead, ReadRequest, Tree
from ckptstore.state import containers, tensors
from ckptstore.state.inflate import inflate, refuse_pickles
from ckptstore.state.leaf_sources import FlatState, Source
from ckptstore.state.leaves import Destination as TensorDestination
from ckptstore.state.leaves import TensorSource

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ckptstore.repository.chunk_store import ObjectStore


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
class Transfer:
    """One state in transfer, and what this process contributes: its `live` state, which is also the
    destination if `in_place`; its store; and chunks `left` from earlier.
    """

    peers: Peers
    deadline: Deadline
    threads: ThreadPool
    live: FlatState | None
    in_place: bool
    objects: "ObjectStore | None"
    meshes: "Sequence[DeviceMesh]"
    left: Mapping[bytes, memoryview]
    max_bytes: int
    chunk_bytes: int
    _wanted: Sequence[Wanted] = ()
    _local: dict[bytes, tuple[Source, int, int]] = field(default_factory=dict)
    _places: dict[tuple[int, int, int], bytes] = field(default_factory=dict)

    def run(self) -> tuple[Any, Received]:
        """Receive the state. Raises `Corrupt`, `InvalidInput`, `Conflict` or `Unavailable` for
        peers' errors, TimeoutError when time is up.
        """
        described = self.threads.submit(self.peers.describe)
        self._hash_live(self.chunk_bytes)  # meanwhile
        description = described.result()
        if description.chunk_bytes != self.chunk_bytes:
            self._hash_live(description.chunk_bytes)
        for name, memory in self.left.items():
            source = TensorSource(tensors.tensor_from(memory, "uint8", (len(memory),)))
            self._local[name] = source, 0, len(memory)
        tree = self._tree(description)
        check_claims(tree, description.placed, self.max_bytes)
        live = self.live if self.in_place else None
        targets = make_targets(tree, description.placed, live, self._all_meshes())
        sizes, self._wanted = self._plan(tree, targets)
        self.peers.fetch(self._land_stored(self._land_local(self._wanted)))
        _land_inline(tree, targets)
        state = inflate(tree.schema, [target.content for target in targets])
        metadata, traffic = dict(description.metadata), self.peers.traffic
        return state, Received(
            len(sizes) + len(metadata),
            sum(sizes.values()) + sum(metadata.values()),
            traffic["chunks"],
            traffic["bytes"],
            traffic["requests"],
            traffic["retried"],
        )

    def landed(self) -> dict[bytes, memoryview]:
        """The chunks received into new memory so far, also if the transfer failed."""
        return {w.chunk: w.memory for w in self._wanted if w.landed and w.memory is not None}

    def _all_meshes(self) -> "Iterator[DeviceMesh]":
        yield from self.meshes
        for held in self.live.held.values() if self.live else ():
            if hasattr(held.origin, "device_mesh"):
                yield held.origin.device_mesh

    def _hash_live(self, chunk_bytes: int) -> None:
        """Find the chunks of the live state, with these chunk boundaries: where they may be copied
        from, or in place where they may stay.
        """
        if not self.live:
            return
        cut = cut_state(self.live, chunk_bytes)

        def task(batch: Sequence[Run]) -> None:
            self.deadline.left()
            for run in batch:
                source = cut.parts[run.part.leaf].source
                for _, start, stop, data in cut.read(run):
                    name = name_of(data)
                    if not self.in_place:
                        self._local[name] = source, start, stop
                    elif isinstance(source, TensorSource):
                        self._places[source.tensor.data_ptr(), start, stop] = name

        self.threads.spread(task, cut.batches)

    def _tree(self, description: Description) -> Tree:
        """Schema and pages, from the peers."""
        data = {chunk: bytearray(nbytes) for chunk, nbytes in description.metadata}
        self.peers.fetch(
            [Wanted(chunk, len(each), memoryview(each)) for chunk, each in data.items()]
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

    @uncollected()
    def _plan(self, tree: Tree, targets: Sequence[Target]) -> tuple[dict[bytes, int], list[Wanted]]:
        """The raw bytes of every chunk of a state, and the wanted chunks without those in place,
        each once, with all destinations.
        """
        sizes, wanted = dict[bytes, int](), dict[bytes, Wanted]()
        for i, target in enumerate(targets):
            content = tree.content(i)
            if content.inline is not None:
                continue
            shape, width = tree.extent(i)
            for box, destination in target.parts:
                request, memory = ReadRequest(tree, i, destination, box), destination.memory()
                for piece in select(content, shape, width, tree.chunk_bytes, box):
                    chunk, nbytes = piece.chunk, piece.raw_bytes
                    if (known := sizes.setdefault(chunk, nbytes)) != nbytes:
                        raise Corrupt(
                            f"a peer names one chunk for parts of {known} and of {nbytes} bytes; "
                            "one of them is wrong"
                        )
                    read = ChunkRead(piece, request, memory)
                    if target.live and self._is_in_place(read):
                        continue
                    want = wanted.setdefault(chunk, Wanted(chunk, nbytes))
                    if target.live or want.memory is not None or read.place is None:
                        want.reads.append(read)
                    else:
                        want.memory = read.place
        return sizes, list(wanted.values())

    def _is_in_place(self, read: ChunkRead) -> bool:
        """Whether a chunk lies in the live tensor where it should."""
        at, destination = read.piece.at, read.wanted.destination
        if at is None or not isinstance(destination, TensorDestination):
            return False
        place = destination.tensor.data_ptr(), at, at + read.piece.raw_bytes
        return self._places.get(place) == read.piece.chunk

    def _land_local(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Copy chunks of the live state or of an earlier transfer to their destinations; returns
        the missing ones.
        """

        def is_here(want: Wanted) -> bool:
            _, start, stop = self._local.get(want.chunk, (None, 0, -1))
            return stop - start == want.nbytes

        def copy(batch: Sequence[Wanted]) -> Iterator[Wanted]:
            for want in batch:
                source, start, stop = self._local[want.chunk]
                out = want.room()
                source.stage(start, stop, out)
                if not want.land(out):
                    yield want

        return self._land(wanted, is_here, copy)

    def _land_stored(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Read chunks of the local store to their destinations, by ids that peers tell, as long as
        it has enough of them; returns the missing ones. They are compared with id and name.
        """
        objects, probe = self.objects, AdaptiveProbe()
        if objects is None:
            return list(wanted)

        def read(batch: Sequence[Wanted]) -> Sequence[Wanted]:
            told = zip(
                batch, self.peers.ids([w.chunk for w in batch]) if probe else (), strict=False
            )
            ids = {w: chunk for w, chunk in told if chunk}
            is_stored = objects.locate(b"".join(ids.values()))["found"].tolist() if ids else []
            found = [w for w, stored in zip(ids, is_stored, strict=True) if stored]
            probe.add(len(batch), len(found))
            out, landed = [w.room() for w in found], set[Wanted]()
            # Peers have the chunks of a store that is damaged, and fsck reports it.
            with suppress(Corrupt, NotFound, Unavailable):
                if found:
                    objects.read_into(b"".join(ids[w] for w in found), out)
                landed.update(w for w, data in zip(found, out, strict=True) if w.land(data))
            return [w for w in batch if w not in landed]

        return self._land(wanted, lambda _: True, read)

    def _land(
        self,
        wanted: Sequence[Wanted],
        is_here: Callable[[Wanted], bool],
        bring: Callable[[Sequence[Wanted]], Iterable[Wanted]],
    ) -> list[Wanted]:
        """Let threads `bring` those that may be here; returns the missing ones."""
        missing = [want for want in wanted if not is_here(want)]

        def task(batch: Sequence[Wanted]) -> None:
            self.deadline.left()
            missing.extend(bring(batch))

        here = list(filter(is_here, wanted))
        self.threads.spread(task, list(batches(here, lambda want: want.nbytes)))
        return missing


def _land_inline(tree: Tree, targets: Sequence[Target]) -> None:
    """Write small leaves to live tensors: last, when all chunks are in place."""
    for i, target in enumerate(targets):
        inline = tree.content(i).inline
        if inline and target.live:
            for _, destination in target.parts:
                destination.write(0, memoryview(inline))
