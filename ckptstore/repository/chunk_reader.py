"""How are chunks read? Neighbors share one read, and every chunk is verified.

A chunk's checksum detects damage. Callers that need proof of identity compare the id as well, which
takes eight times as long: maintenance, mirrors, metadata, and calls that request it.

All chunks are read here: for restores, mapped tensors, mirrors, gc's copies, fsck and repair.
Chunks that a pack has lost are read from its twin. `chunk_store` adds the index for callers that
know chunks by their ids.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, checksum, digest, pack_key, twin_key
from ckptstore.core.model import PackEntry, PackRecord
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.log.state import Pack
from ckptstore.objects import codecs, patches
from ckptstore.objects.pack import FooterTable, entries
from ckptstore.repository.thread_pool import Scratch
from ckptstore.storage.contract import COPY, Storage

if TYPE_CHECKING:
    from numpy.typing import NDArray

GAP_BYTES = 64 << 10
"""Reading on across this many unwanted bytes of a pack costs less than another read."""

CHECKED_BYTES = 2 << 20
"""Bytes that maintenance reads at once from a local disk. Each of its threads needs so much memory
for what is stored, as much again for what is decoded, and `BASES_BYTES`."""

BASES_BYTES = RUN_BYTES
"""Bases that a thread keeps for the differences that follow: as many as a strip of `compact`
has."""

METADATA_BYTES_MAX = 256 << 20
"""No chunk is larger that is read into new memory. A forged footer must not cost more."""

NO_BASES: Mapping[ChunkId, memoryview] = {}

Problem: TypeAlias = Corrupt | NotFound | Unavailable

T = TypeVar("T")


class PackRead(NamedTuple):
    """A chunk to read from a pack: its record there, the memory for its raw bytes (None: new
    memory), and its number in the request."""

    entry: PackEntry
    out: memoryview | None = None
    number: int = 0

    def decoded_bytes(self) -> int:
        """The raw bytes, which are as many as those of a base; a patch is not applied here."""
        entry = self.entry
        return entry.stored_bytes if entry.codec == codecs.PATCH else entry.raw_bytes


class StoredChunk(NamedTuple):
    """A verified chunk: its stored and its raw bytes, which may be the same memory. If the chunk
    was decoded into `PackRead.out`, its stored bytes are not kept: their memory is reused."""

    read: PackRead
    stored: memoryview
    raw: memoryview

    @property
    def entry(self) -> PackEntry:
        return self.read.entry


class StoredPatch(NamedTuple):
    """A chunk that is stored as a patch: its stored bytes, verified, and what they say. Its raw
    bytes are made of those of its base, which may lie in any pack (`ObjectStore`)."""

    read: PackRead
    stored: memoryview
    head: patches.Head

    @property
    def entry(self) -> PackEntry:
        return self.read.entry


class Unread(NamedTuple):
    """A chunk that could not be read. Its `problem` is the reason. `Corrupt`: it is damaged there.
    `NotFound`: the object is absent. `Unavailable`: storage did not answer, and the chunk may be
    sound."""

    read: PackRead
    problem: Problem


Found: TypeAlias = StoredChunk | StoredPatch | Unread
"""A chunk that was read from a pack, or could not be."""


class MergedRead(NamedTuple):
    """Chunks of one pack that one read fetches, in order of offset; bytes between them are
    discarded. All have memory for their raw bytes, or none has."""

    reads: Sequence[PackRead]

    @property
    def offset(self) -> int:
        return self.reads[0].entry.offset

    @property
    def stored_bytes(self) -> int:
        last = self.reads[-1].entry
        return last.offset + last.stored_bytes - self.offset

    def buffers(self) -> list[memoryview] | None:
        """The memory of raw chunks, with scratch memory for the gaps; None if one is coded, or has
        no memory."""
        found, at = [], self.offset
        for entry, out, _ in self.reads:
            if out is None or entry.codec != codecs.RAW:
                return None
            if entry.offset > at:
                found.append(_fresh(entry.offset - at))
            found.append(out)
            at = entry.offset + out.nbytes
        return found


@dataclass(frozen=True, slots=True)
class Request:
    """The chunks of one call of `read_into`, which says what the fields mean: chunk `i` of `ids`
    goes to `out[i]`. With `verify_ids`, not only its checksum is compared. With `is_base`, others
    are made of their rounding, and so they are made of none."""

    ids: bytes
    out: Sequence[memoryview]
    describe: Callable[[int], str]
    verify_ids: bool
    past_cache: bool = False
    bases: Mapping[ChunkId, memoryview] = field(default_factory=lambda: NO_BASES)
    is_base: bool = False

    def ids_of(self, positions: Sequence[int]) -> bytes:
        """The ids of the chunks `positions`, in the order of `positions`."""
        if positions == range(len(self.out)):
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
    """Group ordered byte ranges that are at most `gap_bytes` apart; if `objects` names the object
    of each, only ranges of one object. A group spans at most `limit_bytes`, or is one range."""
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


def cut(items: Sequence[T], nbytes: Callable[[T], int], limit_bytes: int) -> Iterator[Sequence[T]]:
    """Consecutive groups of items of at most `limit_bytes` together; a larger item is a group
    alone."""
    ends = list(accumulate(map(nbytes, items), initial=0))
    for some in coalesce(ends[:-1], ends[1:], limit_bytes=limit_bytes):
        yield items[some]


def plan_runs(
    request: Request,
    where: "NDArray[np.void]",
    positions: Sequence[int],
    *,
    limit_bytes: int,
    gap_bytes: int = 0,
) -> Iterator[tuple[int, MergedRead]]:
    """The runs that fetch the chunks `positions` of a request from `where` they lie, each with the
    number of its pack. Raises `Corrupt` if the places are those of other chunks. Pure."""
    if where["chunk"].tobytes() != request.ids_of(positions):
        raise Corrupt(
            f"a look-up of {len(positions)} chunks found the places of {len(where)}, or of others; "
            "nothing was read; run `ckptstore reindex`"
        )
    order = np.lexsort((where["offset"], where["pack"]))
    found, rows = located_entries(where), where[order]
    reads = [PackRead(found[i], request.out[positions[i]], positions[i]) for i in order.tolist()]
    numbers = rows["pack"].tolist()
    for some in coalesce(
        rows["offset"].tolist(),
        (rows["offset"] + rows["stored"]).tolist(),
        objects=numbers,
        limit_bytes=limit_bytes,
        gap_bytes=gap_bytes,
    ):
        yield numbers[some.start], MergedRead(reads[some])


_LOCATED_ENTRY = ["chunk", "checksum", "offset", "stored", "raw", "codec", "width", "depth"]
"""The fields of a `PackEntry` that the chunk index knows, in its order."""


def located_entries(where: "NDArray[np.void]") -> list[PackEntry]:
    """Rows of `LOCATED_DTYPE` as entries of packs."""
    rows = where[_LOCATED_ENTRY].tolist()
    return [PackEntry(*row)._replace(depth=depth) for *row, depth in rows]


AnyPack: TypeAlias = Pack | PackRecord


def keys_of(pack: AnyPack) -> tuple[str, ...]:
    """The object keys of a pack: its own, and its twin's if it holds metadata."""
    return (pack_key(pack.id), twin_key(pack.id)) if pack.metadata else (pack_key(pack.id),)


def with_copies(keys: Sequence[str]) -> Sequence[str]:
    """`keys`, and behind them those of their copies on other hosts."""
    return keys if keys[-1].endswith(COPY) else (*keys, *(key + COPY for key in keys))


class DecodedBases:
    """A thread's cache of the raw bytes of recently decoded chunks. A delta that the thread reads
    next may have one of them as its base. Deltas are never bases, so they are not cached."""

    def __init__(self) -> None:
        self._raws: dict[tuple[str, codecs.Base], memoryview] = {}
        self._nbytes = 0

    def get(self, key: str, base: codecs.Base) -> memoryview | None:
        return self._raws.get((key, base))

    def put(self, key: str, base: codecs.Base, raw: memoryview) -> None:
        """Keep `raw`, and as many earlier chunks as fit into `BASES_BYTES`."""
        if (key, base) not in self._raws:
            self._nbytes += raw.nbytes
        self._raws[key, base] = raw
        while self._nbytes > BASES_BYTES and len(self._raws) > 1:
            self._nbytes -= self._raws.pop(next(iter(self._raws))).nbytes


def read_run(
    storage: Storage,
    keys: Sequence[str],
    run: MergedRead,
    *,
    verify_ids: bool = True,
    bases: DecodedBases | None = None,
    scratch: Scratch | None = None,
) -> list[Found]:
    """Read, decode and verify the chunks of a run: each chunk, or why it cannot be read. A patch is
    verified, not applied.

    `keys` are objects with the same bytes; the later ones supply what the first lacks. A damaged
    range is read again chunk by chunk. `bases` and `scratch`, if given, are for further runs as
    well.
    """
    memory = scratch or Scratch()
    if storage.capabilities.copies:
        keys = with_copies(keys)

    def alone(read: PackRead, keys: Sequence[str]) -> Found:
        return read_run(storage, keys, MergedRead((read,)), verify_ids=verify_ids, scratch=memory)[
            0
        ]

    def copied(found: Found) -> Found:
        """What was read, or a copy of it; an absent or damaged copy explains nothing."""
        if not isinstance(found, Unread):
            return found
        copy = alone(found.read, keys[1:])
        failed = isinstance(copy, Unread) and not isinstance(copy.problem, Unavailable)
        return found if failed else copy

    first = keys[0]
    found: Iterable[Found]
    try:
        if (buffers := run.buffers()) is not None:
            storage.read_into(first, run.offset, buffers)
            found = (
                StoredChunk(read, read.out, read.out) for read in run.reads if read.out is not None
            )
        else:
            found = _read_coded(storage, first, run, bases, memory)
        found = [_verified(first, each, verify_ids) for each in found]
    except (NotFound, Unavailable) as error:
        found = [Unread(read, error) for read in run.reads]
    except Corrupt as error:
        if len(run.reads) > 1:
            found = [alone(read, keys[:1]) for read in run.reads]
        else:
            found = [Unread(run.reads[0], error)]
    return list(map(copied, found)) if keys[1:] else found


def _fresh(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def _verified(key: str, found: Found, verify_ids: bool) -> Found:
    """A chunk of the object `key`, or what is wrong with its bytes."""
    if not isinstance(found, StoredChunk):
        return found
    entry = found.entry
    if (got := checksum(found.raw)) != entry.checksum:
        what = f"checksum {entry.checksum.hex()[:12]}: got {got.hex()[:12]}"
    elif verify_ids and (got := digest(found.raw)) != entry.chunk:
        what = f"id: got {got.hex()[:12]}"
    else:
        return found
    problem = Corrupt(f"chunk {entry.chunk.hex()[:12]} in {key} does not match its {what}")
    return Unread(found.read, problem)


def _read_coded(
    storage: Storage, key: str, run: MergedRead, kept: DecodedBases | None, scratch: Scratch
) -> Iterator[Found]:
    """Read a run's stored bytes into separate memory, and decode its chunks."""
    aside = run.reads[0].out is not None
    with scratch.lend(run.stored_bytes if aside else 0) as lent:
        whole = lent if aside else _fresh(run.stored_bytes)
        storage.read_into(key, run.offset, [whole])
        # A base takes no more than its chunk's raw bytes, so the bases of some take no more than
        # the run.
        for some in cut(run.reads, PackRead.decoded_bytes, min(run.stored_bytes, RUN_BYTES)):
            rows = [
                (read, whole[read.entry.offset - run.offset :][: read.entry.stored_bytes])
                for read in some
            ]
            bases = _Bases(storage, key, kept, scratch)
            with scratch.lend(bases.plan(rows)) as memory:
                bases.read(memory)
                for read, stored in rows:
                    try:
                        if read.entry.codec == codecs.PATCH:
                            kept_bytes = memoryview(bytes(stored)) if aside else stored
                            yield StoredPatch(read, kept_bytes, patches.head_of(stored))
                            continue
                        raw = _raw(read.entry, stored, read.out, bases)
                    except Corrupt as error:
                        yield Unread(read, error)
                        continue
                    bases.keep(read, raw)
                    yield StoredChunk(read, stored, raw)


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
        out = _fresh(entry.raw_bytes)
    if entry.codec == codecs.DELTA:
        bases.decode(entry, stored, out)
    else:
        codecs.decode_into(entry.codec, stored, out, entry.width)
    return out


class _Bases:
    """The bases of the deltas among some chunks of the object `key`. They are read together, and
    each is decoded when it is needed."""

    def __init__(
        self, storage: Storage, key: str, kept: DecodedBases | None, scratch: Scratch
    ) -> None:
        self._storage, self._key, self._kept, self._scratch = storage, key, kept, scratch
        # Held here, because others may take their places in `kept`.
        self._known: dict[codecs.Base, memoryview] = {}
        self._reads: list[Sequence[codecs.Base]] = []
        self._stored: dict[codecs.Base, memoryview] = {}

    def plan(self, chunks: Iterable[tuple[PackRead, memoryview]]) -> int:
        """Find the bases of the deltas among `chunks`, whose stored bytes are given. Returns how
        many bytes of memory `read` needs."""
        wanted = set[codecs.Base]()
        for (entry, _, _), stored in chunks:
            if entry.codec == codecs.DELTA:
                with suppress(Corrupt):
                    base = codecs.base_of(stored)
                    if self._kept and (known := self._kept.get(self._key, base)) is not None:
                        self._known[base] = known
                    elif base.stored_bytes <= entry.raw_bytes <= METADATA_BYTES_MAX:
                        wanted.add(base)
        bases = sorted(wanted)
        starts = [base.offset for base in bases]
        stops = [base.offset + base.stored_bytes for base in bases]
        spans = coalesce(starts, stops, limit_bytes=RUN_BYTES, gap_bytes=GAP_BYTES)
        self._reads = [bases[some] for some in spans]
        return sum(map(_span, self._reads))

    def read(self, memory: memoryview) -> None:
        """Read the stored bytes of the bases into `memory`."""
        for bases in self._reads:
            stored, memory = memory[: _span(bases)], memory[_span(bases) :]
            with suppress(Corrupt):  # beyond the end: these bases are missing
                self._storage.read_into(self._key, bases[0].offset, [stored])
                for base in bases:
                    start = base.offset - bases[0].offset
                    self._stored[base] = stored[start : start + base.stored_bytes]

    def keep(self, read: PackRead, raw: memoryview) -> None:
        """Keep a decoded chunk in memory of its own for the deltas that are read next."""
        entry = read.entry
        if self._kept and read.out is None and entry.codec not in (codecs.RAW, codecs.DELTA):
            at = codecs.Base(entry.offset, entry.stored_bytes, entry.codec)
            self._kept.put(self._key, at, raw)

    def decode(self, entry: PackEntry, stored: memoryview, out: memoryview) -> None:
        """Fill `out` with the raw bytes of a delta; raises `Corrupt`. Its base has as many."""
        base = codecs.base_of(stored)
        raw = self._known.get(base)
        with self._scratch.lend(0 if self._kept else out.nbytes) as lent:
            if raw is None or raw.nbytes != out.nbytes:
                raw = _fresh(out.nbytes) if self._kept else lent
                if base not in self._stored:
                    raise Corrupt(
                        f"the base of chunk {entry.chunk.hex()[:12]} cannot be read at offset "
                        f"{base.offset}"
                    )
                codecs.decode_into(base.codec, self._stored[base], raw, entry.width)
                if self._kept:
                    self._known[base] = raw
                    self._kept.put(self._key, base, raw)
            codecs.decode_delta(stored, raw, out, entry.width)


def _span(bases: Sequence[codecs.Base]) -> int:
    """The bytes from the first of some bases to the end of the last."""
    return bases[-1].offset + bases[-1].stored_bytes - bases[0].offset


def runs_of(storage: Storage, table: FooterTable) -> Iterator[MergedRead]:
    """The runs that fetch the chunks of a footer, or some of its rows, into new memory."""
    limit_bytes = RUN_BYTES if storage.capabilities.slow_requests else CHECKED_BYTES
    for some in coalesce(
        table["offset"].tolist(),
        (table["offset"] + table["stored"]).tolist(),
        limit_bytes=limit_bytes,
        gap_bytes=GAP_BYTES,
    ):
        reads = list(map(PackRead, entries(table[some])))
        # Each part needs at most so much memory, too.
        yield from map(MergedRead, cut(reads, PackRead.decoded_bytes, limit_bytes))


def read_rows(storage: Storage, keys: Sequence[str], rows: FooterTable) -> Iterator[Found]:
    """Read the chunks listed in `rows`, rows of a footer, from the objects `keys`. Yields each in
    order, compared with its id."""
    bases = DecodedBases()
    for run in runs_of(storage, rows):
        yield from read_run(storage, keys, run, bases=bases)


def read_chunks(
    storage: Storage, pack: AnyPack, rows: FooterTable
) -> Iterator[StoredChunk | StoredPatch]:
    """As `read_rows` of a pack. Raises `Corrupt` for a chunk that does not match, `NotFound` for an
    absent pack."""
    for chunk in read_rows(storage, keys_of(pack), rows):
        if not isinstance(chunk, Unread):
            yield chunk
        elif isinstance(chunk.problem, Corrupt):
            raise Corrupt(
                f"{chunk.problem}, in {storage.url}; run `ckptstore fsck --read-data`, or heal it "
                "with `ckptstore repair`"
            ) from chunk.problem
        else:
            raise chunk.problem


def stored_patch_at(storage: Storage, keys: Sequence[str], entry: PackEntry) -> StoredPatch:
    """The verified patch at `entry` of one of the objects `keys`. Raises `Corrupt`, `NotFound` or
    `Unavailable`."""
    chunk = _read_at(storage, keys, entry)
    assert isinstance(chunk, StoredPatch)  # by the codec of `entry`
    return chunk


def verify_at(storage: Storage, keys: Sequence[str], entry: PackEntry) -> None:
    """Verify the chunk at `entry` of one of the objects `keys`, a patch by its own bytes alone.
    Raises `Corrupt`, `NotFound` or `Unavailable`."""
    _read_at(storage, keys, entry)


def read_chunk_at(
    storage: Storage, keys: Sequence[str], entry: PackEntry, out: memoryview | None = None
) -> memoryview:
    """The verified raw bytes of the chunk at `entry` of one of the objects `keys`, which is no
    patch. Raises `Corrupt`, `NotFound` or `Unavailable`."""
    chunk = _read_at(storage, keys, entry, out)
    if isinstance(chunk, StoredPatch):
        raise Corrupt(
            f"chunk {entry.chunk.hex()[:12]} is stored as a patch of another one; wanted a chunk "
            "that needs none"
        )
    return chunk.raw


def _read_at(
    storage: Storage, keys: Sequence[str], entry: PackEntry, out: memoryview | None = None
) -> StoredChunk | StoredPatch:
    (chunk,) = read_run(storage, keys, MergedRead((PackRead(entry, out),)))
    if isinstance(chunk, Unread):
        raise chunk.problem
    return chunk
