"""How is a state received? Which chunks are wanted, which are local, and which must come from
peers.

A chunk counts as received only after its bytes have been hashed, at their destination or beside it
(`fetch.Wanted.land`), wherever they come from: the live state, a broken transfer, the local store,
a peer. Live tensors receive only verified bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptstore.errors import CkptStoreError, Corrupt, NotFound, Unavailable
from ckptstore.interop.torchft.connection import Deadline
from ckptstore.interop.torchft.fetch import Peers, Wanted
from ckptstore.interop.torchft.offer import KEY, batches, cut_state
from ckptstore.interop.torchft.targets import Target, check_claims, make_targets
from ckptstore.interop.torchft.wire import (
    SERVED_PATCH_BYTES,
    Description,
    checksum_of,
    decode_patches,
    name_of,
)
from ckptstore.plugin.encoding import Patch, apply_patches, decode_schema, join_pages
from ckptstore.plugin.leaves import NOTHING, FlatState, Source
from ckptstore.plugin.model import ChunkId, TreeRef
from ckptstore.plugin.reading import ChunkRead, ReadRequest, Tree, select
from ckptstore.plugin.tensors import Destination as TensorDestination
from ckptstore.plugin.tensors import TensorSource, tensors
from ckptstore.plugin.values import containers, inflate, refuse_pickles
from ckptstore.plugin.work import ThreadPool, uncollected
from ckptstore.plugin.writing import ChunkRun

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ckptstore.plugin.writing import ObjectStore


@dataclass(frozen=True, slots=True)
class Received:
    """The result of a transfer. Of `chunks`, of `nbytes` together, `fetched_chunks` came from peers
    and the others were local. `patched_chunks` came as patches of what was here. `retried` were
    asked for again, after a broken connection or wrong bytes.
    """

    chunks: int
    nbytes: int
    fetched_chunks: int
    fetched_bytes: int
    requests: int
    retried: int
    patched_chunks: int


_PATCH_PART = 4
"""A patch has at most such a part of its chunk's bytes: it takes memory beside the state."""


class _Patched(NamedTuple):
    """A chunk that comes as a patch of a chunk that is here, by name."""

    want: Wanted
    base: bytes
    patch: Wanted


@dataclass(slots=True)
class Transfer:
    """One state in transfer, and what this process contributes: its `live` state, which is also the
    destination if `in_place`; ids by checksum of what its store has `committed`; and chunks `left`
    from earlier.
    """

    peers: Peers
    deadline: Deadline
    threads: ThreadPool
    live: FlatState | None
    in_place: bool
    objects: "ObjectStore | None"
    committed: Mapping[bytes, ChunkId]
    meshes: "Sequence[DeviceMesh]"
    left: Mapping[bytes, memoryview]
    max_bytes: int
    chunk_bytes: int
    _wanted: Sequence[Wanted] = ()
    _patched: int = 0
    _local: dict[bytes, tuple[Source, int, int]] = field(default_factory=dict)
    _live: dict[bytes, tuple[Source, int, int]] = field(default_factory=dict)
    """Chunks of live tensors that may change while the state lands."""
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
        missing = self._land_local(self._wanted)
        if description.patches and description.patches[1] <= SERVED_PATCH_BYTES * len(sizes):
            missing = self._land_patched(missing, *description.patches)
        self.peers.fetch(missing)
        _land_inline(tree, targets)
        state = inflate(tree.schema, [target.value for target in targets])
        metadata, traffic = dict(description.metadata), self.peers.traffic
        return state, Received(
            len(sizes) + len(metadata),
            sum(sizes.values()) + sum(metadata.values()),
            traffic["chunks"],
            traffic["bytes"],
            traffic["requests"],
            traffic["retried"],
            self._patched,
        )

    def kept(self) -> dict[bytes, memoryview]:
        """The chunks for the next transfer, if this one failed: those received into new memory, and
        those `left` that this state has. Others are freed, but only when its chunks are known.
        """
        if not self._wanted:
            return dict(self.left)
        landed = {w.chunk: w.memory for w in self._wanted if w.landed and w.memory is not None}
        return {w.chunk: self.left[w.chunk] for w in self._wanted if w.chunk in self.left} | landed

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

        def task(batch: Sequence[ChunkRun]) -> None:
            self.deadline.left()
            for run in batch:
                source = cut.parts[run.part.leaf].source
                for _, start, stop, data in cut.read(run):
                    name = name_of(data)
                    if not self.in_place:
                        self._local[name] = source, start, stop
                    elif isinstance(source, TensorSource):
                        self._places[source.tensor.data_ptr(), start, stop] = name
                        self._live[name] = source, start, stop

        self.threads.spread(task, cut.batches)

    def _tree(self, description: Description) -> Tree:
        """Schema and pages, from the peers."""
        data = {chunk: bytearray(nbytes) for chunk, nbytes in description.metadata}
        self.peers.fetch(
            [Wanted(chunk, len(each), memoryview(each)) for chunk, each in data.items()]
        )
        try:
            first, *pages = [bytes(data[chunk]) for chunk, _ in description.metadata]
            schema = decode_schema(first)
            contents = join_pages(pages, len(schema))
            containers.check(schema.skeleton)
        except Corrupt as error:
            raise Corrupt(f"a peer describes a state that is none: {error}") from error
        refuse_pickles(schema)
        if not all(0 <= leaf < len(schema) for leaf in description.placed):
            raise Corrupt("a peer describes DTensors that its state does not have")
        nowhere = TreeRef(ChunkId(b""), ())  # it is in no store
        return Tree(KEY, nowhere, schema, contents, description.chunk_bytes)

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
                    want = wanted.setdefault(chunk, Wanted(chunk, nbytes, width=width))
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
        """Bring what is here to its destinations; returns the missing ones."""
        missing = list[Wanted]()

        def task(batch: Sequence[Wanted]) -> None:
            self.deadline.left()
            rest = [want for want in batch if not self._land_copy(want)]
            missing.extend(self._land_stored(self.objects, rest) if self.objects else rest)

        self.threads.spread(task, list(batches(wanted, lambda want: want.nbytes)))
        return missing

    def _land_copy(self, want: Wanted) -> bool:
        """Copy a chunk of the live state or of an earlier transfer; returns whether it is here."""
        source, start, stop = self._local.get(want.chunk, (NOTHING, 0, 0))
        if stop - start != want.nbytes:
            return False
        out = want.room()
        source.stage(start, stop, out)
        return want.land(out)

    def _land_patched(self, missing: Sequence[Wanted], name: bytes, nbytes: int) -> list[Wanted]:
        """Make chunks of patches whose bases are here; returns those that are still missing. Only
        the peer that gave the description need have the patches, and their list, which is `name`.
        """
        peer = self.peers.describer()
        patched = list[_Patched]()
        try:
            listed = Wanted(name, nbytes, _memory(nbytes))
            peer.fetch([listed])
            rows = {patch.chunk: patch for patch in decode_patches(listed.room())}
            patched += (
                _Patched(want, row.base, Wanted(row.patch, row.nbytes, _memory(row.nbytes)))
                for want in missing
                if (row := rows.get(want.chunk)) and row.nbytes * _PATCH_PART <= want.nbytes
                if self._has(row.base, want.nbytes)
            )
            peer.fetch([each.patch for each in patched])
        except (CkptStoreError, TimeoutError):
            self.deadline.left()  # chunks are fetched whole, if there is time
        finally:
            peer.close()
            self.peers.count(**peer.traffic)

        def task(batch: Sequence[_Patched]) -> None:
            self.deadline.left()
            for each in batch:
                self._make(each)

        came = [each for each in patched if each.patch.landed]
        self.threads.spread(task, list(batches(came, lambda each: each.want.nbytes)))
        self._patched = sum(each.want.landed for each in came)
        return [want for want in missing if not want.landed]

    def _has(self, base: bytes, nbytes: int) -> bool:
        """Whether a chunk is here that may be the base of a patch."""
        _, start, stop = self._local.get(base) or self._live.get(base) or (NOTHING, 0, 0)
        return stop - start == nbytes or checksum_of(base) in self.committed

    def _make(self, patched: "_Patched") -> None:
        """Land a chunk that is made of its base. It is compared with its name, so its base need not
        be, which may be a live tensor.
        """
        want, base = patched.want, patched.base
        out = want.room()
        source, start, stop = self._local.get(base) or self._live.get(base) or (NOTHING, 0, 0)
        with suppress(Corrupt, NotFound, Unavailable):
            if stop - start == want.nbytes:
                source.stage(start, stop, out)
            elif self.objects:
                self.objects.read_into(self.committed[checksum_of(base)], [out])
            apply_patches([(out, [Patch.of(patched.patch.room(), want.width)])])
            want.land(out)

    def _land_stored(self, objects: "ObjectStore", batch: Sequence[Wanted]) -> list[Wanted]:
        """Read what the local store has of these chunks; returns the missing ones."""
        ids = {w: chunk for w in batch if (chunk := self.committed.get(checksum_of(w.chunk)))}
        is_stored = objects.locate(b"".join(ids.values()))["found"].tolist()
        found = [want for want, stored in zip(ids, is_stored, strict=True) if stored]
        out = [want.room() for want in found]
        # Peers have the chunks of a store that is damaged, and fsck reports it.
        with suppress(Corrupt, NotFound, Unavailable):
            objects.read_into(b"".join(ids[want] for want in found), out)
            for want, data in zip(found, out, strict=True):
                want.land(data)
        return [want for want in batch if not want.landed]


def _memory(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def _land_inline(tree: Tree, targets: Sequence[Target]) -> None:
    """Write small leaves to live tensors: last, when all chunks are in place."""
    for i, target in enumerate(targets):
        inline = tree.content(i).inline
        if inline and target.live:
            for _, destination in target.parts:
                destination.write(0, memoryview(inline))
