"""gc's mark: the chunks of each pack that commits need, at one position of the log.

A chunk is *live* if a commit needs it. Needed chunks are identified by the first 8 bytes of their
ids, so a collision keeps a chunk too many and never one too few. A live chunk in several packs is
*assigned* to one of them, so that the duplicates can be deleted; here whole ids are compared,
because a collision would lose a chunk. A chunk that is the base of a live delta is live in that
delta's pack, whoever else needs it; a pack never needs the base of a delta of another pack.

The base of a patch may lie in any pack. It is live if the patch lies in a pack that stays, whether
a commit needs the patch or not: a commit in flight may have found it there.

It reads the footers of live packs, the documents of commits that are not forgotten, and each of
their pages once; every hash is verified. An unreadable page ends the mark, because the chunks it
keeps are unknown. A pack with an unreadable footer counts as empty, and is left alone. If several
packs hold a chunk, the copy to keep is read: a sound copy must not be deleted in favor of a damaged
one.
"""

import threading
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, CommitId, PackId, checksum
from ckptstore.core.model import NO_BASE
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.log.state import CommitRow, Pack, State
from ckptstore.maintenance import Counter, Progress, silent
from ckptstore.maintenance.check.trees import metadata_of, read_document
from ckptstore.objects.pack import PAGE, PATCHED_DTYPE, FooterTable, bases_of
from ckptstore.objects.pages import decode_page
from ckptstore.objects.patches import BASES_MAX
from ckptstore.repository import footers
from ckptstore.repository.chunk_reader import (
    StoredChunk,
    Unread,
    keys_of,
    read_chunks,
    read_rows,
)
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.storage.contract import Storage

SPREAD_COMMITS = 32
"""Documents of fewer commits are read by the calling thread alone."""

BATCH_KEYS = 1 << 19


Keys = npt.NDArray[np.uint64]

_ID_WORDS = CHUNK_ID_BYTES // 8


def short_keys(ids: bytes | memoryview) -> Keys:
    """The first 8 bytes of each of `ids`, which are 32 bytes each."""
    return np.ascontiguousarray(np.frombuffer(ids, "<u8").reshape(-1, _ID_WORDS)[:, 0])


def ids_checksum(table: FooterTable) -> bytes:
    """The checksum of the ids of a footer's chunks, in order of offset."""
    return checksum(table["chunk"].tobytes())


class Holdings:
    """The chunks of packs that have `counts` chunks each: 19 bytes per chunk, and at most 26 while
    they are sorted; 4 more from 2^32 chunks on. Several threads may call `put` and `tell`.

    A *row* is a chunk's position in all packs. Whole ids are kept of the rows alone whose key
    another row has too.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self._starts = np.concatenate(([0], np.cumsum(np.array(counts, np.int64))))
        chunks = int(self._starts[-1])
        self._keys: Keys = np.zeros(chunks, np.uint64)
        """In order of rows until they are sorted."""
        self._order = np.empty(0, np.promote_types(np.uint32, np.min_scalar_type(chunks)))
        self._stored = np.zeros(chunks, np.uint32)
        self._live = np.empty(0, np.bool_)
        self.checksums = [b""] * len(counts)
        """Of the ids of each pack, in order of offset; empty for one that was not put."""
        self._shared: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """The places among the sorted keys of those that several rows have."""
        self._shared_ids = np.empty((0, _ID_WORDS), np.uint64)
        self._shared_by_row: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._contested: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._told: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._rejected = np.zeros(chunks, np.bool_)
        self._bases: dict[int, npt.NDArray[np.uint32]] = {}
        self._is_base = np.zeros(chunks, np.bool_)
        self._depths: dict[int, npt.NDArray[np.uint8]] = {}
        """By pack with patches, how many patches it takes to make each of its chunks."""
        self.bases_of_patches: dict[int, Keys] = {}
        """By pack with patches, the keys of the bases of each of its chunks that is one."""

    def put(self, pack: int, table: FooterTable) -> None:
        """Add the footer of the pack at position `pack`. Chunks of a pack that is never put
        count as absent."""
        rows = slice(int(self._starts[pack]), int(self._starts[pack + 1]))
        words = table.dtype.itemsize // 8
        self._keys[rows] = np.frombuffer(table, "<u8").reshape(-1, words)[:, 0]
        self._stored[rows] = table["stored"]
        if (is_delta := table["base"] != NO_BASE).any():
            self._bases[pack] = table["base"].copy()
            self._is_base[rows][table["base"][is_delta]] = True
        if table.dtype == PATCHED_DTYPE:
            self._depths[pack] = table["depth"].copy()
            keys = short_keys(bases_of(table).tobytes())
            self.bases_of_patches[pack] = keys.reshape(len(table), BASES_MAX)
        self.checksums[pack] = ids_checksum(table)

    def sort(self) -> list[int]:
        """Prepare for `need`, once every footer has been put. Returns the packs to `tell` of: those
        that share keys."""
        keys, self._keys = self._keys, np.empty(0, np.uint64)
        order = np.argsort(keys)
        if b"" in self.checksums:
            is_put = np.repeat([check != b"" for check in self.checksums], np.diff(self._starts))
            order = order[is_put[order]]
        self._order = order.astype(self._order.dtype)
        del order
        self._keys = keys[self._order]
        del keys
        self._live = np.zeros(len(self._keys), np.bool_)
        first = _first_of_each(self._keys)
        self._shared = np.flatnonzero(~(first & np.append(first[1:], True)))
        self._shared_ids = np.empty((len(self._shared), _ID_WORDS), np.uint64)
        rows = self._order[self._shared]
        self._shared_by_row = np.argsort(rows)
        packs: list[int] = np.unique(self._pack_of(rows)).tolist()
        return packs

    def tell(self, pack: int, table: FooterTable) -> None:
        """Note the whole ids of those chunks of the pack at position `pack` that share their keys.
        Raises `Corrupt` for another footer than was put."""
        if ids_checksum(table) != self.checksums[pack]:
            raise Corrupt("its footer has changed since it was read first; run `ckptstore fsck`")
        rows = self._order[self._shared[self._shared_by_row]]
        start, stop = np.searchsorted(rows, self._starts[pack : pack + 2])
        own = rows[start:stop] - self._starts[pack]
        words = np.frombuffer(table[own], "<u8").reshape(len(own), -1)[:, :_ID_WORDS]
        self._shared_ids[self._shared_by_row[start:stop]] = words

    def need(self, keys: Keys) -> Keys:
        """Mark chunks with these keys as live: the first of those with one key stands for all.
        Returns the keys that no pack holds."""
        # Sorted here: np.unique hashes, which takes four times as long, and a sorted search is
        # cache-friendly.
        keys = np.sort(keys)
        keys = keys[_first_of_each(keys)]
        if not len(self._keys):
            return keys
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        held = self._keys[at] == keys
        self._live[at[held]] = True
        missing: Keys = keys[~held]
        return missing

    def live_keys(self) -> int:
        """How many different keys are live. They only become more."""
        return int(np.count_nonzero(self._live))

    def assign(self) -> npt.NDArray[np.bool_]:
        """For each chunk of each pack, whether it is live and assigned to that pack.

        A chunk in several packs is assigned to the copy that the fewest patches make: each is then
        nearer to a whole chunk than its patches are, so that no two copies need each other. Of
        these to a base, which stays for its differences, then to the smallest, of equal ones to
        that in the pack with the most bytes of other live chunks, so that the others empty, unless
        rejected there; if all copies were rejected, it stays in each.
        """
        assigned = np.zeros(len(self._stored), np.bool_)
        assigned[self._order[self._live]] = True
        rows = self._order[self._shared].astype(np.int64)
        assigned[rows] = False
        live = self._live[np.searchsorted(self._keys, self._keys[self._shared])]
        several, words = rows[live], self._shared_ids[live]
        if len(several):
            rank = self._preference(assigned)[self._pack_of(several)]
            stored, no_base = self._stored[several], ~self._is_base[several]
            rejected = self._rejected[several]
            by_id = (words[:, i] for i in range(_ID_WORDS))
            keys = (rank, stored, no_base, self._depths_of(several), rejected)
            order = np.lexsort(tuple[npt.NDArray[np.generic], ...]((*keys, *by_id)))
            several, words, rejected = several[order], words[order], rejected[order]
            first = np.concatenate(([True], (words[1:] != words[:-1]).any(axis=1)))
            all_rejected = rejected[first][np.cumsum(first) - 1]
            assigned[several[first | all_rejected]] = True
            alone = np.append(first[1:], True)
            self._contested = several[first & ~alone & ~rejected]
        for pack, bases in self._bases.items():
            own = self.of_pack(pack, assigned)
            needed = bases[own]
            own[needed[needed != NO_BASE]] = True
        return assigned

    def patch_bases(self, assigned: npt.NDArray[np.bool_]) -> tuple[Keys, Keys]:
        """The keys of the bases of assigned patches, and of all patches in packs that have an
        assigned chunk."""
        needed, kept = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
        for pack, bases in self.bases_of_patches.items():
            own, is_patch = self.of_pack(pack, assigned), self._depths[pack] > 0
            needed.append(bases[own & is_patch].ravel())
            kept.append(bases[is_patch & own.any()].ravel())
        return np.concatenate(needed), np.unique(np.concatenate(kept))

    def contested(self) -> dict[int, npt.NDArray[np.int64]]:
        """The assigned chunks that other packs hold too, by pack and in order of offset, each
        reported once."""
        rows = np.setdiff1d(self._contested, self._told)
        self._told = np.concatenate((self._told, rows))
        packs = self._pack_of(rows)
        return {int(pack): rows[packs == pack] - self._starts[pack] for pack in np.unique(packs)}

    def reject(self, pack: int, rows: Sequence[int]) -> None:
        """Mark these chunks of the pack at position `pack` as damaged. Several threads may call
        it."""
        self._rejected[self._starts[pack] + np.array(rows, np.int64)] = True

    def live_chunks(self, assigned: npt.NDArray[np.bool_]) -> list[int]:
        """The number of chunks assigned to each pack."""
        bounds = pairwise(self._starts.tolist())
        return [int(np.count_nonzero(assigned[start:stop])) for start, stop in bounds]

    def live_bytes(self, assigned: npt.NDArray[np.bool_]) -> list[int]:
        """Stored bytes of the chunks assigned to each pack."""
        bounds, stored = pairwise(self._starts.tolist()), self._stored
        return [
            int(stored[start:stop].sum(dtype=np.int64, where=assigned[start:stop]))
            for start, stop in bounds
        ]

    def of_pack(self, pack: int, assigned: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """The part of `assigned` for the pack at position `pack`, in order of offset; a view."""
        return assigned[self._starts[pack] : self._starts[pack + 1]]

    def _depths_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """How many patches it takes to make each of the chunks `rows`."""
        found, packs = np.zeros(len(rows), np.uint8), self._pack_of(rows)
        for pack in self._depths.keys() & set(np.unique(packs).tolist()):
            own = packs == pack
            found[own] = self._depths[pack][rows[own] - self._starts[pack]]
        return found

    def _pack_of(self, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        return np.searchsorted(self._starts, rows, side="right") - 1

    def _preference(self, assigned: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """The rank of each pack: lower is better."""
        rank = np.empty(len(self._starts) - 1, np.int64)
        live_bytes = np.array(self.live_bytes(assigned), np.int64)
        rank[np.argsort(-live_bytes, kind="stable")] = np.arange(len(rank))
        return rank


def _first_of_each(keys: Keys) -> npt.NDArray[np.bool_]:
    """Flags the first of each run of equal sorted `keys`."""
    first = np.ones(len(keys), np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    return first


@dataclass(frozen=True, slots=True)
class PackUse:
    """The live content of a listed pack: `live` flags the chunks assigned to it, in order of
    offset. `ids_checksum` tells whether a footer that is read later lists these chunks. Bytes are
    those in one file, and a metadata pack has two files.

    `readable` is False if its footer is not: its live chunks are unknown then, so it must be left
    alone.
    """

    number: int
    pack: Pack
    live: npt.NDArray[np.bool_] = field(compare=False, repr=False)
    ids_checksum: bytes
    live_chunks: int
    live_bytes: int
    readable: bool

    @property
    def files(self) -> int:
        return 2 if self.pack.metadata else 1

    @property
    def dead(self) -> bool:
        return self.readable and not self.live_chunks

    @property
    def sparse(self) -> bool:
        return 0 < self.live_chunks < self.pack.chunks


@dataclass(frozen=True, slots=True)
class Mark:
    """The live chunks at log position `n`: `uses` of all live packs, by number. `missing` needed
    chunks are in no live pack."""

    n: int
    fence: int
    uses: tuple[PackUse, ...]
    missing: int


def mark(
    storage: Storage,
    state: State,
    threads: ThreadPool,
    report: Progress = silent,
    verified: AbstractSet[PackId] = frozenset(),
) -> Mark:
    """Mark at `state`; the packs `verified` are known to be sound. Raises `Corrupt` if a document
    or page of a commit that is not forgotten cannot be read."""
    numbers = [number for number in sorted(state.packs) if state.packs[number].live]
    packs = [state.packs[number] for number in numbers]
    marking = _Marking(storage, packs, threads, report, verified)
    marking.read_footers()
    marking.read_pages(marking.read_documents(state))
    assigned, holdings = marking.assign(), marking.holdings
    chunks, nbytes = holdings.live_chunks(assigned), holdings.live_bytes(assigned)
    uses = tuple(
        PackUse(
            number,
            packs[i],
            holdings.of_pack(i, assigned),
            holdings.checksums[i],
            chunks[i],
            nbytes[i],
            i in marking.tables,
        )
        for i, number in enumerate(numbers)
    )
    return Mark(state.n, state.fence, uses, len(marking.missing))


class _Marking:
    """One mark. `tables` are the readable footers, by the position of their packs; None for packs
    of tensors, whose footers are not needed again. `missing` are needed keys that no pack holds."""

    def __init__(
        self,
        storage: Storage,
        packs: Sequence[Pack],
        threads: ThreadPool,
        report: Progress,
        verified: AbstractSet[PackId],
    ) -> None:
        self.holdings = Holdings([pack.chunks for pack in packs])
        self.tables: dict[int, FooterTable | None] = {}
        self.missing: set[int] = set()
        self._storage, self._packs, self._threads, self._report = storage, packs, threads, report
        self._verified = verified
        self._batch: list[Keys] = []
        self._batch_keys = 0
        self._lock = threading.Lock()

    def read_footers(self) -> None:
        """Put every readable footer into `holdings`."""
        counter = Counter(self._report, "read footers", len(self._packs))

        def read(i: int) -> None:
            pack, table = self._packs[i], self._table(i)
            if table is not None and len(table) == pack.chunks:
                self.holdings.put(i, table)
                self.tables[i] = table if pack.metadata else None
            counter.add()

        self._threads.spread(read, range(len(self._packs)))
        self._threads.spread(self._tell, self.holdings.sort())

    def _tell(self, i: int) -> None:
        """Read a footer again, for its whole ids: few packs share chunks with others."""
        known = self.tables[i]
        self.holdings.tell(
            i, footers.read_table(self._storage, self._packs[i]) if known is None else known
        )

    def read_documents(self, state: State) -> dict[ChunkId, CommitId]:
        """Every page that a commit needs, and one of those commits."""
        roots = [(commit, row) for commit, row in state.commits.items() if not row.soft]
        counter = Counter(self._report, "read commits", len(roots))
        pages: dict[ChunkId, CommitId] = {}

        def read(root: tuple[CommitId, CommitRow]) -> None:
            commit, row = root
            try:
                kinds = metadata_of(read_document(self._storage, row.session, commit))
            except (Corrupt, NotFound) as error:
                raise _unmarkable(commit, error) from error
            if others := [chunk for chunk, kind in kinds.items() if kind != PAGE]:
                self._need(b"".join(others))
            for chunk, kind in kinds.items():
                if kind == PAGE:
                    pages[chunk] = commit
            counter.add()

        few = len(roots) < SPREAD_COMMITS
        self._threads.spread(read, roots, max_workers=1 if few else None)
        return pages

    def read_pages(self, pages: dict[ChunkId, CommitId]) -> None:
        """Mark the pages, and the chunks that they name, as needed."""
        counter, unread = Counter(self._report, "read pages", len(pages)), dict(pages)

        def read(item: tuple[int, FooterTable]) -> None:
            i, rows = item
            try:
                for chunk in read_chunks(self._storage, self._packs[i], rows):
                    assert isinstance(chunk, StoredChunk)  # no metadata is a patch
                    named = (leaf.ids for leaf in decode_page(chunk.raw).leaves)
                    self._need(b"".join((chunk.entry.chunk, *named)))
                    counter.add()
            except (Corrupt, NotFound) as error:
                raise _unmarkable(pages[ChunkId(rows["chunk"][0].tobytes())], error) from error

        self._threads.spread(read, list(self._wanted(unread)))
        if unread:
            page, commit = next(iter(unread.items()))
            raise _unmarkable(
                commit, NotFound(f"page {page.hex()[:12]} lies in no live pack that can be read")
            )
        with self._lock:
            self._flush()

    def assign(self) -> npt.NDArray[np.bool_]:
        """Assign live chunks to packs, and with them the bases of the patches there."""
        assigned = self._assign()
        while self.holdings.bases_of_patches:
            live, (needed, kept) = self.holdings.live_keys(), self.holdings.patch_bases(assigned)
            self.holdings.need(kept)  # that of a patch which no commit needs may be gone
            self.missing.update(self.holdings.need(needed).tolist())
            if self.holdings.live_keys() == live:
                break  # then the bases of exactly what is assigned are live
            assigned = self._assign()
        return assigned

    def _assign(self) -> npt.NDArray[np.bool_]:
        """Assign live chunks to packs, each to a copy that is unique or sound."""
        assigned = self.holdings.assign()
        while contested := self.holdings.contested():
            counter = Counter(self._report, "compare copies", sum(map(len, contested.values())))
            self._threads.spread(partial(self._compare, counter), list(contested.items()))
            assigned = self.holdings.assign()
        return assigned

    def _compare(self, counter: Counter, contested: tuple[int, npt.NDArray[np.int64]]) -> None:
        i, rows = contested
        if self._packs[i].id not in self._verified:
            self.holdings.reject(i, self._damaged(i, rows.tolist()))
        counter.add(len(rows))

    def _table(self, i: int) -> FooterTable | None:
        pack = self._packs[i]
        try:
            return footers.read_table(self._storage, pack)
        except (Corrupt, NotFound):
            return None

    def _need(self, ids: bytes) -> None:
        """Collect needed keys, which are looked up in large batches."""
        with self._lock:
            self._batch.append(short_keys(ids))
            self._batch_keys += len(self._batch[-1])
            if self._batch_keys >= BATCH_KEYS:
                self._flush()

    def _flush(self) -> None:
        if self._batch:
            self.missing.update(self.holdings.need(np.concatenate(self._batch)).tolist())
        self._batch, self._batch_keys = [], 0

    def _wanted(self, unread: dict[ChunkId, CommitId]) -> Iterator[tuple[int, FooterTable]]:
        """The rows of each pack to read, each page in one pack only; found pages are removed from
        `unread`."""
        for i, table in self.tables.items():
            if table is None:
                continue
            rows = [
                row
                for row, (chunk, kind) in enumerate(table[["chunk", "kind"]].tolist())
                if kind == PAGE and unread.pop(ChunkId(chunk), None) is not None
            ]
            if rows:
                yield i, table[rows]

    def _damaged(self, i: int, rows: list[int]) -> list[int]:
        """The chunks `rows` of a pack that cannot be read and verified."""
        pack, table = self._packs[i], self._table(i)
        if table is None or ids_checksum(table) != self.holdings.checksums[i]:
            return rows
        damaged = set[int]()
        for chunk in read_rows(self._storage, keys_of(pack), table[rows]):
            if isinstance(chunk, Unread):
                if isinstance(chunk.problem, Unavailable):
                    raise chunk.problem
                damaged.add(chunk.read.entry.offset)
        return [row for row in rows if int(table["offset"][row]) in damaged]


def _unmarkable(commit: CommitId, error: Exception) -> Corrupt:
    return Corrupt(
        f"commit {commit[:12]} cannot be marked, so nothing may be deleted: {error}; heal it with "
        "`ckptstore repair`, or forget that commit and run `ckptstore gc --now`"
    )
