"""Repacking: choose sparse and small packs, lay out the copies of their live chunks, and copy them.

Stored bytes are copied as they are, each chunk verified against its id. The layout is computed
before anything is copied, so a plan states the exact size of the new files.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptstore.core.ids import PackId, SessionId, pack_id, pack_key
from ckptstore.core.model import PackRecord
from ckptstore.errors import Corrupt, NotFound
from ckptstore.maintenance.gc.mark import PackUse
from ckptstore.objects import pack
from ckptstore.objects.pack import FOOTER_DTYPE, TRAILER_BYTES, FooterTable
from ckptstore.repository import footers
from ckptstore.repository.chunk_reader import coalesce, read_chunks
from ckptstore.repository.pack_writer import OpenPack
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.storage.contract import Storage

MERGE_PACKS = 8
"""This many small packs of similar size are merged. The copy is of the next larger size class,
so no chunk is copied again and again."""

_SIZE_STEP_BITS = 3
_SMALL_SHARE = 4


@dataclass(frozen=True, slots=True)
class Source:
    """A pack to copy from: byte `i` of `live` tells whether to copy chunk `i`."""

    number: int
    id: PackId
    stored_bytes: int
    metadata: bool
    live: bytes


@dataclass(frozen=True, slots=True)
class Copy:
    """One new pack, and the packs whose live chunks it will hold. `bytes` is its size, twin
    included."""

    sources: tuple[Source, ...]
    bytes: int

    @property
    def metadata(self) -> bool:
        return self.sources[0].metadata

    @property
    def freed_bytes(self) -> int:
        return sum(source.stored_bytes for source in self.sources)


class DamagedSource(Exception):
    """A pack whose live chunks cannot be copied; `__cause__` has the reason."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.id)
        self.source = source


def choose(
    uses: Iterable[PackUse], *, max_unused: float, max_repack_bytes: int | None, pack_bytes: int
) -> list[PackUse]:
    """Choose the packs to copy from: the sparsest first, until at most the share `max_unused` of
    the remaining bytes is unused; then small packs, if enough of one size class exist. At most
    `max_repack_bytes` are copied."""
    kept = [use for use in uses if not use.dead]
    allowance = max_unused * sum(use.pack.bytes * use.files for use in kept)
    unused = sum(_unused_bytes(use) for use in kept)
    budget = _Budget(max_repack_bytes)
    chosen: list[PackUse] = []
    for use in sorted(
        (use for use in kept if use.sparse),
        key=lambda use: (-_unused_bytes(use) / use.files / use.pack.bytes, use.number),
    ):
        if unused <= allowance:
            break
        if budget.take(use):
            unused -= _unused_bytes(use)
            chosen.append(use)
    taken = {use.number for use in chosen}
    for group in _same_size(
        use for use in kept if use.readable and use.live_bytes < pack_bytes // _SMALL_SHARE
    ):
        chosen.extend(use for use in group if use.number not in taken and budget.take(use))
    return sorted(chosen, key=lambda use: (use.pack.metadata, use.number))


def plan_copies(storage: Storage, chosen: Sequence[PackUse], pack_bytes: int) -> Iterator[Copy]:
    """Group the chosen packs into new packs, in order, each in one copy only. Reads footers."""
    sources: list[Source] = []
    end = chunks = 0
    for use in chosen:
        listed, live = use.pack, use.live.tobytes()
        source = Source(use.number, listed.id, listed.stored_bytes, listed.metadata, live)
        rows = live_rows(storage, source)
        if sources and (
            source.metadata != sources[0].metadata or end + use.live_bytes > pack_bytes
        ):
            yield _copy(sources, end, chunks)
            sources, end, chunks = [], 0, 0
        sources.append(source)
        chunks += len(rows)
        _, end = place(rows, end)
    if sources:
        yield _copy(sources, end, chunks)


def live_rows(storage: Storage, source: Source) -> FooterTable:
    """The footer's records of the chunks to copy. Raises `Corrupt`, `NotFound`."""
    table = footers.read_table(storage, source.id, metadata=source.metadata)
    if len(table) != len(source.live):
        raise Corrupt(f"pack {source.id} has {len(table)} chunks; wanted {len(source.live)}")
    return table[np.frombuffer(source.live, np.bool_)]


def place(rows: FooterTable, end: int) -> tuple[npt.NDArray[np.int64], int]:
    """The offset of each chunk after `end` in a new pack, and the new end. Adjacent chunks stay
    adjacent, and are aligned as a run."""
    starts, stored = rows["offset"].astype(np.int64), rows["stored"].astype(np.int64)
    offsets = np.empty(len(rows), np.int64)
    for run in coalesce(starts.tolist(), (starts + stored).tolist()):
        run_bytes = int(stored[run].sum())
        start = pack.align(end, run_bytes)
        offsets[run] = start + starts[run] - starts[run.start]
        end = start + run_bytes
    return offsets, end


def _copy(sources: Sequence[Source], end: int, chunks: int) -> Copy:
    size = end + chunks * FOOTER_DTYPE.itemsize + TRAILER_BYTES
    return Copy(tuple(sources), size * (2 if sources[0].metadata else 1))


def _unused_bytes(use: PackUse) -> int:
    """The gain: dead chunks and their footers."""
    if not use.readable or not use.sparse:
        return 0
    live = use.live_bytes + use.live_chunks * FOOTER_DTYPE.itemsize + TRAILER_BYTES
    return max(use.pack.bytes - live, 0) * use.files


def _same_size(uses: Iterable[PackUse]) -> list[list[PackUse]]:
    groups: dict[tuple[bool, int], list[PackUse]] = defaultdict(list)
    for use in uses:
        groups[use.pack.metadata, use.live_bytes.bit_length() // _SIZE_STEP_BITS].append(use)
    return [group for _, group in sorted(groups.items()) if len(group) >= MERGE_PACKS]


class _Budget:
    """Bytes that may still be copied; None for no limit."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._left = limit_bytes

    def take(self, use: PackUse) -> bool:
        if self._left is None:
            return True
        cost = use.live_bytes * use.files
        if cost > self._left:
            return False
        self._left -= cost
        return True


def write_copy(
    storage: Storage,
    session: SessionId,
    copy: Copy,
    threads: ThreadPool,
    copied: Callable[[int], None],
) -> PackRecord:
    """Write the new pack of `copy` durably; the log does not list it yet. `copied` is called with
    the bytes copied so far.

    Raises `DamagedSource` for an unreadable source pack. After any failure, nothing of the copy is
    left.
    """
    target = OpenPack(storage, pack_id(session, 0, 0), metadata=copy.metadata)
    try:
        for source in copy.sources:
            try:
                rows = live_rows(storage, source)
                _append(storage, source, rows, target, copied)
            except (Corrupt, NotFound) as error:
                raise DamagedSource(source) from error
    except BaseException:
        target.discard()
        raise
    closed = target.close(threads.spread)
    storage.sync_dirs([pack_key(target.name)])
    return closed.record


def _append(
    storage: Storage,
    source: Source,
    rows: FooterTable,
    target: OpenPack,
    copied: Callable[[int], None],
) -> None:
    offsets, _ = place(rows, target.offset)
    chunks = read_chunks(storage, source.id, rows, metadata=source.metadata)
    for offset, chunk in zip(offsets.tolist(), chunks, strict=True):
        target.pad_to(offset)
        target.entries.append(chunk.entry._replace(offset=target.append(chunk.stored)))
        copied(len(chunk.stored))
    target.flush()
