"""How are chunks read? Neighbors share one read, and every chunk is verified.

A chunk's checksum detects damage. Callers to whom identity matters compare the id as well, which
takes eight times as long: maintenance, mirrors, metadata, and whoever asks for it.

All chunks are read here: for restores, mapped tensors, mirrors, gc's copies, fsck and repair.
Chunks that a pack has lost are read from its twin. `chunk_store` adds the index for callers that
know chunks by their ids.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import (
    CHUNK_ID_BYTES,
    ChunkId,
    PackId,
    checksum,
    digest,
    pack_key,
    twin_key,
)
from ckptstore.core.model import PackEntry
from ckptstore.errors import CkptStoreError, Corrupt, NotFound, Unavailable
from ckptstore.objects import codecs
from ckptstore.objects.pack import FooterTable, entries
from ckptstore.storage.contract import OpenFile, Storage

if TYPE_CHECKING:
    from numpy.typing import NDArray

GAP_BYTES = 64 << 10
"""Reading on across this many unwanted bytes of a pack costs less than another read."""

METADATA_BYTES_MAX = 256 << 20
"""No chunk is larger that is read into new memory. A forged footer must not cost more."""

Problem: TypeAlias = Corrupt | NotFound | Unavailable


class StoredChunk(NamedTuple):
    """A verified chunk: its stored and its raw bytes, which may be the same memory."""

    entry: PackEntry
    stored: memoryview
    raw: memoryview


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks of one pack that one read fetches, in order of offset; bytes between them are
    discarded.

    `positions` are their places in the request. Raw bytes go to `out`, or to new memory.
    """

    entries: Sequence[PackEntry]
    positions: Sequence[int]
    out: Sequence[memoryview] | None = None

    @property
    def offset(self) -> int:
        return self.entries[0].offset

    @property
    def stored_bytes(self) -> int:
        return self.entries[-1].offset + self.entries[-1].stored_bytes - self.offset

    def alone(self, i: int) -> "Run":
        """Chunk `i` as a run of its own."""
        one = slice(i, i + 1)
        return Run(self.entries[one], self.positions[one], self.out and self.out[one])

    def buffers(self) -> list[memoryview]:
        """`out` with scratch memory for the gaps."""
        found, at = [], self.offset
        for entry, memory in zip(self.entries, self.out or (), strict=True):
            if entry.offset > at:
                found.append(memoryview(bytearray(entry.offset - at)))
            found.append(memory)
            at = entry.offset + memory.nbytes
        return found


@dataclass(frozen=True, slots=True)
class FileRange:
    """Stored bytes of chunks in a local file, which stays open while this object lives."""

    key: str
    file: OpenFile
    offset: int
    nbytes: int

    def fileno(self) -> int:
        return self.file.fd


@dataclass(frozen=True, slots=True)
class Request:
    """The chunks of one call of `read_into`: chunk `i` of `ids` goes to `out[i]`. With
    `verify_ids`, not only its checksum is compared."""

    ids: bytes
    out: Sequence[memoryview]
    describe: Callable[[int], str]
    verify_ids: bool

    def ids_of(self, positions: Sequence[int]) -> bytes:
        if len(positions) == len(self.out):
            return self.ids
        return b"".join(self.id(i) for i in positions)

    def id(self, i: int) -> ChunkId:
        return ChunkId(self.ids[i * CHUNK_ID_BYTES : (i + 1) * CHUNK_ID_BYTES])

    def name(self, i: int) -> str:
        return f"{self.id(i).hex()[:12]} ({self.describe(i)})"


def coalesce(
    starts: Sequence[int],
    stops: Sequence[int],
    *,
    objects: Sequence[object] | None = None,
    limit_bytes: int | None = None,
    gap_bytes: int = 0,
) -> Iterator[slice]:
    """Group ordered byte ranges, which lie in `objects` if given, that are at most `gap_bytes`
    apart. A group spans at most `limit_bytes`, or is one range."""
    first = 0
    for i in range(1, len(starts) + 1):
        if (
            i == len(starts)
            or not 0 <= starts[i] - stops[i - 1] <= gap_bytes
            or (limit_bytes is not None and stops[i] - starts[first] > limit_bytes)
            or (objects is not None and objects[i] != objects[first])
        ):
            yield slice(first, i)
            first = i


def cut(sizes: Sequence[int], limit_bytes: int) -> Iterator[slice]:
    """Ranges of items of at most `limit_bytes` together, or of one item."""
    ends = list(accumulate(sizes, initial=0))
    return coalesce(ends[:-1], ends[1:], limit_bytes=limit_bytes)


def plan_runs(
    request: Request,
    where: "NDArray[np.void]",
    positions: Sequence[int],
    *,
    limit_bytes: int,
    gap_bytes: int = 0,
) -> Iterator[tuple[int, Run]]:
    """The runs that fetch the chunks `positions` of a request from `where` they lie, each with the
    number of its pack. Pure."""
    order = np.lexsort((where["offset"], where["pack"]))
    rows = where[order]
    at = [positions[i] for i in order.tolist()]
    found = located_entries(map(request.id, at), rows)
    numbers = rows["pack"].tolist()
    for some in coalesce(
        rows["offset"].tolist(),
        (rows["offset"] + rows["stored"]).tolist(),
        objects=numbers,
        limit_bytes=limit_bytes,
        gap_bytes=gap_bytes,
    ):
        yield numbers[some.start], Run(found[some], at[some], [request.out[i] for i in at[some]])


def located_entries(ids: Iterable[ChunkId], where: "NDArray[np.void]") -> list[PackEntry]:
    """The chunk index's rows as entries of packs."""
    columns = (
        where[name].tolist() for name in ("checksum", "offset", "stored", "raw", "codec", "width")
    )
    return list(map(PackEntry, ids, *columns))


def keys_of(name: PackId, *, metadata: bool) -> tuple[str, ...]:
    """The object keys of a pack: its own, and its twin's if it holds metadata."""
    return (pack_key(name), twin_key(name)) if metadata else (pack_key(name),)


class Buffer:
    """Memory into which one thread reads run after run: fresh memory costs as much as a copy."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def of(self, nbytes: int) -> memoryview:
        """`nbytes` of it; what it held before is gone."""
        if len(self._memory) < nbytes:
            self._memory = memoryview(bytearray(nbytes))
        return self._memory[:nbytes]


class DecodedBases:
    """The raw bytes of chunks that one thread decoded last and that are no deltas, for the deltas
    that it reads next."""

    def __init__(self) -> None:
        self._raws: dict[tuple[str, codecs.Base], memoryview] = {}
        self._nbytes = 0

    def get(self, key: str, base: codecs.Base) -> memoryview | None:
        return self._raws.get((key, base))

    def put(self, key: str, base: codecs.Base, raw: memoryview) -> None:
        """Keep `raw`, and of those before as many as fit into two runs."""
        if (key, base) not in self._raws:
            self._nbytes += raw.nbytes
        self._raws[key, base] = raw
        while self._nbytes > 2 * RUN_BYTES and len(self._raws) > 1:
            self._nbytes -= self._raws.pop(next(iter(self._raws))).nbytes


def read_run(
    storage: Storage,
    keys: Sequence[str],
    run: Run,
    *,
    verify_ids: bool = True,
    bases: DecodedBases | None = None,
    buffer: Buffer | None = None,
) -> list[StoredChunk | Problem]:
    """Read, decode and verify the chunks of a run: each chunk, or why it cannot be read.

    `keys` are objects with the same bytes; the later ones supply what the first lacks. A damaged
    range is read again chunk by chunk. `bases`, if given, is for further runs as well. The stored
    bytes lie in `buffer`, if that is given.
    """
    decoded = DecodedBases() if bases is None else bases

    def one(keys: Sequence[str], i: int) -> StoredChunk | Problem:
        return read_run(storage, keys, run.alone(i), verify_ids=verify_ids)[0]

    first, others = keys[0], keys[1:]
    direct = run.out is not None and all(entry.codec == codecs.RAW for entry in run.entries)
    whole = None if direct else (buffer or Buffer()).of(run.stored_bytes)
    each = range(len(run.entries))
    found: list[StoredChunk | Problem]
    try:
        storage.read_into(first, run.offset, run.buffers() if whole is None else [whole])
        chunks = _decoded(storage, first, run, whole, decoded)
        found = [
            _mismatch(first, chunk, verify_ids) or chunk
            if isinstance(chunk, StoredChunk)
            else chunk
            for chunk in chunks
        ]
    except (NotFound, Unavailable) as error:
        found = [error for _ in each]
    except Corrupt as error:
        found = [error]
        if len(each) > 1:
            found = [one(keys[:1], i) for i in each]
    for i in each if others else ():
        if isinstance(found[i], CkptStoreError):
            copy = one(others, i)
            if isinstance(copy, StoredChunk | Unavailable):
                found[i] = copy
    return found


def _mismatch(key: str, chunk: StoredChunk, verify_ids: bool) -> Corrupt | None:
    """What is wrong with the bytes of a chunk of the object `key`, if anything."""
    entry = chunk.entry
    if (got := checksum(chunk.raw)) != entry.checksum:
        what = f"checksum {entry.checksum.hex()[:12]}: got {got.hex()[:12]}"
    elif verify_ids and (got := digest(chunk.raw)) != entry.chunk:
        what = f"id: got {got.hex()[:12]}"
    else:
        return None
    return Corrupt(f"chunk {entry.chunk.hex()[:12]} in {key} does not match its {what}")


def _decoded(
    storage: Storage, key: str, run: Run, whole: memoryview | None, decoded: DecodedBases
) -> Iterator[StoredChunk | Problem]:
    """The chunks of a run that was read into `whole`, or else straight into its memory."""
    if whole is None:
        yield from map(StoredChunk, run.entries, run.out or (), run.out or ())
        return
    for some in cut([entry.raw_bytes for entry in run.entries], RUN_BYTES):
        parts = [
            whole[entry.offset - run.offset :][: entry.stored_bytes] for entry in run.entries[some]
        ]
        out = run.out[some] if run.out else [None] * len(parts)
        bases = _Bases(storage, key, run.entries[some], parts, decoded)
        for entry, stored, memory in zip(run.entries[some], parts, out, strict=True):
            try:
                raw = _raw(entry, stored, memory, bases)
            except Corrupt as error:
                yield error
                continue
            if entry.codec not in (codecs.RAW, codecs.DELTA) and memory is None:
                at = codecs.Base(entry.offset, entry.stored_bytes, entry.codec)
                decoded.put(key, at, raw)
            yield StoredChunk(entry, stored, raw)


def _raw(
    entry: PackEntry, stored: memoryview, out: memoryview | None, bases: "_Bases"
) -> memoryview:
    """The raw bytes, in `out` if given; those of a chunk that was stored raw are `stored`."""
    if out is None:
        if entry.codec == codecs.RAW and len(stored) == entry.raw_bytes:
            return stored
        if entry.raw_bytes > METADATA_BYTES_MAX:
            raise Corrupt(
                f"chunk {entry.chunk.hex()[:12]} claims {entry.raw_bytes} bytes; wanted at most "
                f"{METADATA_BYTES_MAX}"
            )
        out = memoryview(bytearray(entry.raw_bytes))
    if entry.codec == codecs.DELTA:
        codecs.decode_delta(stored, bases.raw(entry, stored), out, entry.width)
    else:
        codecs.decode_into(entry.codec, stored, out, entry.width)
    return out


class _Bases:
    """The bases of the deltas among some chunks of the object `key`, whose stored bytes are
    `parts`. They are read together, and each is decoded when it is needed."""

    def __init__(
        self,
        storage: Storage,
        key: str,
        entries: Sequence[PackEntry],
        parts: Sequence[memoryview],
        decoded: DecodedBases,
    ) -> None:
        self._key, self._decoded = key, decoded
        # Held here, because others may take their places in `decoded`.
        self._known: dict[codecs.Base, memoryview] = {}
        self._stored: dict[codecs.Base, memoryview] = {}
        bases = set[codecs.Base]()
        for entry, stored in zip(entries, parts, strict=True):
            if entry.codec == codecs.DELTA:
                with suppress(Corrupt):
                    base = codecs.base_of(stored)
                    if (known := decoded.get(key, base)) is not None:
                        self._known[base] = known
                    elif base.stored_bytes <= entry.raw_bytes:
                        bases.add(base)
        ordered = sorted(bases)
        starts = [base.offset for base in ordered]
        stops = [base.offset + base.stored_bytes for base in ordered]
        for some in coalesce(starts, stops, limit_bytes=RUN_BYTES, gap_bytes=GAP_BYTES):
            first = starts[some.start]
            memory = memoryview(bytearray(stops[some.stop - 1] - first))
            with suppress(Corrupt):  # beyond the end: these bases are missing
                storage.read_into(key, first, [memory])
                self._stored.update(
                    (base, memory[base.offset - first :][: base.stored_bytes])
                    for base in ordered[some]
                )

    def raw(self, entry: PackEntry, stored: memoryview) -> memoryview:
        """The raw bytes of the base of a delta, which are as many as its own; raises `Corrupt`."""
        base = codecs.base_of(stored)
        known = self._known.get(base) or self._decoded.get(self._key, base)
        if known is not None and known.nbytes == entry.raw_bytes:
            return known
        if base not in self._stored:
            raise Corrupt(
                f"the base of chunk {entry.chunk.hex()[:12]} cannot be read at offset {base.offset}"
            )
        raw = memoryview(bytearray(entry.raw_bytes))
        codecs.decode_into(base.codec, self._stored[base], raw, entry.width)
        self._decoded.put(self._key, base, raw)
        self._known[base] = raw
        return raw


def runs_of(table: FooterTable) -> list[Run]:
    """The runs that fetch the chunks of a footer, or some of its rows, into new memory."""
    found, raw_bytes = entries(table), table["raw"].tolist()
    return [
        Run(found[part], range(part.start, part.stop))
        for some in coalesce(
            table["offset"].tolist(),
            (table["offset"] + table["stored"]).tolist(),
            limit_bytes=RUN_BYTES,
            gap_bytes=GAP_BYTES,
        )
        for part in _within(some, raw_bytes)
    ]


def _within(some: slice, raw_bytes: Sequence[int]) -> Iterator[slice]:
    """A slice in parts that need at most `RUN_BYTES` of memory each."""
    for part in cut(raw_bytes[some], RUN_BYTES):
        yield slice(some.start + part.start, some.start + part.stop)


def read_chunks(
    storage: Storage, pack: PackId, rows: FooterTable, *, metadata: bool
) -> Iterator[StoredChunk]:
    """The chunks of `rows` of a pack's footer, in order, compared with their ids. A pack with
    `metadata` has a twin. Raises `Corrupt` for a chunk that does not match, `NotFound` for an
    absent pack."""
    keys, bases = keys_of(pack, metadata=metadata), DecodedBases()
    for run in runs_of(rows):
        for chunk in read_run(storage, keys, run, bases=bases):
            if isinstance(chunk, Corrupt):
                raise Corrupt(
                    f"{chunk}, in {storage.url}; run `ckptstore fsck --read-data`, or heal it with "
                    "`ckptstore repair`"
                ) from chunk
            if isinstance(chunk, CkptStoreError):
                raise chunk
            yield chunk


def read_chunk_at(storage: Storage, keys: Sequence[str], entry: PackEntry) -> memoryview:
    """The verified raw bytes of the chunk at `entry` of one of the objects `keys`. Raises
    `Corrupt`, `NotFound` or `Unavailable`."""
    (chunk,) = read_run(storage, keys, Run((entry,), (0,)))
    if isinstance(chunk, CkptStoreError):
        raise chunk
    return chunk.raw
