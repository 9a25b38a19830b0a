"""Chunks by id: which the store has, where they lie, and their verified bytes.

What is read is always compared with its id. A chunk that the index does not know, or whose pack is gone, is looked for again after a
replay of the log and a look into the footers of packs that are new; it is missing only when no pack that the log lists holds it.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ckptstore.core.config import MIB, RUN_BYTES
from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, PackId, digest, pack_key, twin_key
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.history.fold import State
from ckptstore.history.log import Log
from ckptstore.index.chunks import ChunkIndex
from ckptstore.objects import codecs, footers
from ckptstore.objects.backend import Backend
from ckptstore.objects.metadata_cache import MetadataCache

if TYPE_CHECKING:
    from numpy.typing import NDArray

READ_AHEAD = 4
"""So many reads the disk is told of in advance, so that it works while chunks are hashed."""

Spread: TypeAlias = Callable[[Callable[[int], None], Sequence[int]], object]

METADATA_CACHE_BYTES = 64 * MIB
METADATA_BYTES_MAX = 256 * MIB
"""What claims to be larger is no schema, page or layout: a footer that was made up must not cost memory."""


@dataclass(frozen=True, slots=True)
class Read:
    """Chunks that lie one behind the other in a pack: `which` are their positions in the request, in order of offset."""

    pack: PackId
    offset: int
    stored_bytes: int
    which: tuple[int, ...]
    encoded: bool


class ObjectStore:
    """The chunks of one store. Threads may share it."""

    def __init__(self, backend: Backend, index: ChunkIndex, log: Log) -> None:
        self.backend = backend
        self.index = index
        self._log = log
        self._metadata = MetadataCache(METADATA_CACHE_BYTES)
        self._names: dict[int, PackId] = {}
        self._indexed_below = 0
        self._lock = threading.Lock()

    def sync(self, state: State, *, thorough: bool = False) -> None:
        """Bring the index up to `state`: read the footers of listed packs that it lacks, forget packs that are not listed any more.

        Costs what is new since the last call; the first call, and a `thorough` one, compare all packs.
        """
        with self._lock:
            if thorough or not self._indexed_below:
                have = self.index.indexed()
                wanted: Iterable[int] = sorted(n for n in state.packs if n not in have)
                if gone := [n for n in have if n not in state.packs]:
                    self.index.drop_packs(gone)
            else:
                wanted = (n for n in range(self._indexed_below, state.next_pack) if n in state.packs)
            for number in wanted:
                pack = state.packs[number]
                # A pack that cannot be read holds nothing that can be reused or restored from it; `fsck` reports it.
                with suppress(NotFound, Corrupt):
                    self.index.add_pack(number, pack.id, footers.read_table(self.backend, pack.id, metadata=pack.metadata))
            self._indexed_below = state.next_pack

    def registered(self, number: int, pack: PackId, table: "NDArray[np.void]") -> None:
        """Index a pack of our own that a log entry has just registered."""
        with self._lock:
            self.index.add_pack(number, pack, table)
            if number == self._indexed_below:
                self._indexed_below += 1

    def locate(self, ids: bytes) -> "NDArray[np.void]":
        """Where each of `ids` (32 bytes each) lies, as LOCATION_DTYPE rows; `found` is 0 where the index does not know."""
        return self.index.get_many(ids)

    def packs_of(self, ids: bytes) -> frozenset[int]:
        """The numbers of the packs that hold `ids`."""
        return frozenset(np.unique(self._located(ids)["pack"]).tolist())

    def read_metadata(self, chunk: ChunkId) -> bytes:
        """A schema, page or layout, verified, from memory where it was read before."""
        return self.read_metadata_many([chunk])[0]

    def read_metadata_many(self, chunks: Sequence[ChunkId]) -> list[bytes]:
        """Several metadata chunks, in order."""
        found = {chunk: data for chunk in chunks if (data := self._metadata.get(chunk)) is not None}
        missing = list(dict.fromkeys(chunk for chunk in chunks if chunk not in found))
        if missing:
            ids = b"".join(missing)
            where = self._located(ids)
            _check_sizes(missing, where)
            buffers = [bytearray(int(n)) for n in where["raw"]]
            self.read_into(ids, [memoryview(b) for b in buffers], where=where)
            for chunk, buffer in zip(missing, buffers, strict=True):
                found[chunk] = bytes(buffer)
                self._metadata.put(chunk, found[chunk])
        return [found[chunk] for chunk in chunks]

    def remember_metadata(self, chunk: ChunkId, data: bytes) -> None:
        """Keep metadata that was just written: the next reader is likely to be this process."""
        self._metadata.put(chunk, data)

    def read_into(
        self,
        ids: bytes,
        out: Sequence[memoryview],
        *,
        where: "NDArray[np.void] | None" = None,
        run: Spread | None = None,
        describe: Callable[[int], str] = lambda i: "metadata",
        threads: int = 1,
    ) -> None:
        """Read each chunk of `ids` into the memory of `out`, whose lengths are the chunks' raw bytes, and verify it.

        `run(task, numbers)` spreads the reads over `threads` threads; without it they run here. `describe(i)` says what chunk `i` is part
        of, for errors. Raises `Corrupt` for a chunk whose bytes do not match its id or whose length is not that of `out`, `NotFound` for
        one that no listed pack holds.
        """
        request = _Request(ids, out, where if where is not None else self._located(ids), range(len(out)), describe)
        moved = self._read_all(request, run, threads)
        if moved:
            self._look_again()
            ids = b"".join(request.id(i) for i in moved)
            again = _Request(ids, [out[i] for i in moved], self._located(ids), moved, describe)
            if gone := self._read_all(again, run, threads):
                raise NotFound(
                    f"the pack of chunk {again.short(gone[0])} ({again.name(gone[0])}) is listed, but not there; run `ckptstore fsck`"
                )

    def _read_all(self, request: "_Request", run: Spread | None, threads: int) -> list[int]:
        """Read what the request wants; returns the positions whose pack is not there."""
        missing: list[int] = []

        limit = max(MIB, min(RUN_BYTES, int(request.where["stored"].sum()) // threads))
        reads = self._plan(request.where, limit)

        def will_need(i: int) -> None:
            if i < len(reads):
                self.backend.will_need(pack_key(reads[i].pack), reads[i].offset, reads[i].stored_bytes)

        def task(i: int) -> None:
            will_need(i + READ_AHEAD)
            try:
                self._read(reads[i], request)
            except NotFound:
                missing.extend(reads[i].which)

        for i in range(min(READ_AHEAD, len(reads))):
            will_need(i)
        if run:
            run(task, range(len(reads)))
        else:
            for i in range(len(reads)):
                task(i)
        return missing

    def close(self) -> None:
        self.index.close()

    def _located(self, ids: bytes) -> "NDArray[np.void]":
        for look_again in (None, self._look_again, self._index_anew):
            if look_again:
                look_again()
            where = self.locate(ids)
            if where["found"].all():
                return where
        first = int(np.flatnonzero(where["found"] == 0)[0])
        chunk = ids[first * CHUNK_ID_BYTES : (first + 1) * CHUNK_ID_BYTES]
        raise NotFound(
            f"chunk {chunk.hex()[:12]} and {int((where['found'] == 0).sum()) - 1} more lie in no pack that the log lists; "
            f"run `ckptstore fsck`, or `ckptstore repair` with a mirror"
        )

    def _index_anew(self) -> None:
        """A damaged key of the index is a chunk that it does not find: before a chunk counts as lost, every footer is read again."""
        self.index.reset()
        self._look_again()

    def _look_again(self) -> None:
        self.sync(self._log.replay(refresh=True), thorough=True)

    def _plan(self, where: "NDArray[np.void]", limit_bytes: int) -> list[Read]:
        """Coalesce chunks that lie one behind the other in a pack, up to `limit_bytes` a read."""
        order = np.lexsort((where["offset"], where["pack"]))
        rows = where[order]
        ends = rows["offset"] + rows["stored"]
        packs, starts, codecs_ = rows["pack"].tolist(), rows["offset"].tolist(), rows["codec"].tolist()
        stops, positions = ends.tolist(), order.tolist()
        names = self._pack_names(set(packs))
        reads: list[Read] = []
        i = 0
        while i < len(positions):
            j = i + 1
            while (
                j < len(positions)
                and packs[j] == packs[i]
                and codecs_[j] == codecs_[i]
                and starts[j] == stops[j - 1]
                and stops[j] - starts[i] <= limit_bytes
            ):
                j += 1
            reads.append(Read(names[packs[i]], starts[i], stops[j - 1] - starts[i], tuple(positions[i:j]), codecs_[i] != codecs.RAW))
            i = j
        return reads

    def _pack_names(self, numbers: set[int]) -> dict[int, PackId]:
        if unknown := numbers - self._names.keys():
            self._names.update(self.index.pack_ids(unknown))
        if unknown := numbers - self._names.keys():
            # The index was lost since it gave the locations; the log knows the names as well.
            packs = self._log.replay().packs
            self._names.update((n, packs[n].id) for n in unknown if n in packs)
        if unknown := numbers - self._names.keys():
            raise NotFound(f"packs {sorted(unknown)[:4]} are not listed any more; repeat the call, or run `ckptstore reindex`")
        return {n: self._names[n] for n in numbers}

    def _read(self, read: Read, request: "_Request") -> None:
        for i in read.which:
            if len(request.out[i]) != int(request.where["raw"][i]):
                raise Corrupt(
                    f"chunk {request.short(i)} ({request.name(i)}) in pack {read.pack} has {int(request.where['raw'][i])} bytes; "
                    f"wanted {len(request.out[i])}; run `ckptstore fsck`"
                )
        problem = self._try_read(pack_key(read.pack), read, request)
        if problem and self.backend.size(twin_key(read.pack)) is not None:
            problem = self._try_read(twin_key(read.pack), read, request)
        if problem:
            raise problem

    def _try_read(self, key: str, read: Read, request: "_Request") -> Exception | None:
        try:
            if read.encoded:
                self._read_encoded(key, read, request)
            else:
                self.backend.read_into(key, read.offset, [request.out[i] for i in read.which])
        except (Corrupt, NotFound, Unavailable) as error:
            error.add_note(f"while reading {request.name(read.which[0])}")
            return error
        for i in read.which:
            if (got := digest(request.out[i])) != request.id(i):
                return Corrupt(
                    f"chunk {request.short(i)} in pack {read.pack} ({request.name(i)}) does not match its id: got {got.hex()[:12]}; "
                    f"run `ckptstore fsck --read-data`, restore another commit, or heal it with `ckptstore repair`"
                )
        return None

    def _read_encoded(self, key: str, read: Read, request: "_Request") -> None:
        stored = bytearray(read.stored_bytes)
        self.backend.read_into(key, read.offset, [memoryview(stored)])
        for i in read.which:
            row = request.where[i]
            start = int(row["offset"]) - read.offset
            codecs.decode_into(int(row["codec"]), memoryview(stored)[start : start + int(row["stored"])], request.out[i], int(row["width"]))


def _check_sizes(chunks: Sequence[ChunkId], where: "NDArray[np.void]") -> None:
    if (largest := int(where["raw"].max())) > METADATA_BYTES_MAX:
        chunk = chunks[int(where["raw"].argmax())]
        what = f"chunk {chunk.hex()[:12]} claims {largest} bytes of metadata"
        raise Corrupt(f"{what}; wanted at most {METADATA_BYTES_MAX}; run `ckptstore fsck`")


@dataclass(frozen=True, slots=True)
class _Request:
    """What one call of `read_into` wants: chunk `i` of `ids` into `out[i]`; for its caller it is number `positions[i]`."""

    ids: bytes
    out: Sequence[memoryview]
    where: "NDArray[np.void]"
    positions: Sequence[int]
    describe: Callable[[int], str]

    def id(self, i: int) -> bytes:
        return self.ids[i * CHUNK_ID_BYTES : (i + 1) * CHUNK_ID_BYTES]

    def short(self, i: int) -> str:
        return self.id(i).hex()[:12]

    def name(self, i: int) -> str:
        return self.describe(self.positions[i])
