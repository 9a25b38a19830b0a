"""gc's mark: the chunks of each pack that commits need, at one position of the log.

It reads the footers of live packs, the documents of commits that are not forgotten, and each of
their pages once; every hash is verified. An unreadable page ends the mark, because the chunks it
keeps are unknown. A pack with an unreadable footer counts as empty, and is left alone. If several
packs hold a chunk, the copy to keep is read: a sound copy must not be deleted in favor of a damaged
one.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from ckptstore.core.ids import ChunkId, CommitId, document_key
from ckptstore.errors import Corrupt, NotFound
from ckptstore.log.state import Pack, State
from ckptstore.maintenance.gc.liveness import Holdings, Keys, keys_of
from ckptstore.maintenance.progress import Counter, Progress, silent
from ckptstore.objects.documents import decode_document
from ckptstore.objects.pack import PAGE, FooterTable
from ckptstore.objects.pages import decode_page
from ckptstore.repository import footers
from ckptstore.repository.chunk_reader import read_chunks
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.storage.contract import Storage

BATCH_KEYS = 1 << 19


@dataclass(frozen=True, slots=True)
class PackUse:
    """The live content of a listed pack; bytes are those in one file, and a metadata pack has two
    files.

    `readable` is False if its footer is not: its live chunks are unknown then, so it must be left
    alone.
    """

    number: int
    pack: Pack
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


class Mark:
    """The live chunks at log position `n`: `uses` of all live packs, by number. `missing` needed
    chunks are in no live pack."""

    def __init__(
        self,
        state: State,
        uses: Sequence[PackUse],
        missing: int,
        holdings: Holdings,
        assigned: npt.NDArray[np.bool_],
    ) -> None:
        self.n, self.fence = state.n, state.fence
        self.uses = tuple(uses)
        self.missing = missing
        self._holdings, self._assigned = holdings, assigned
        self._positions = {use.number: i for i, use in enumerate(uses)}

    def live_rows(self, number: int) -> npt.NDArray[np.bool_]:
        """The live chunks assigned to a pack, in order of offset."""
        return self._holdings.of_pack(self._positions[number], self._assigned)


def mark(storage: Storage, state: State, threads: ThreadPool, report: Progress = silent) -> Mark:
    """Mark at `state`. Raises `Corrupt` if a document or page of a commit that is not forgotten
    cannot be read."""
    packs = [
        (number, state.packs[number]) for number in sorted(state.packs) if state.packs[number].live
    ]
    holdings = Holdings([pack.chunks for _, pack in packs])
    readable, metadata = _read_footers(
        storage, [pack for _, pack in packs], holdings, threads, report
    )
    holdings.sort()
    needs = _Needs(holdings)
    pages = _read_documents(storage, state, needs, report)
    _read_pages(storage, metadata, pages, needs, threads, report)
    needs.flush()
    assigned = _assign(storage, [pack for _, pack in packs], holdings, threads, report)
    chunks, nbytes = holdings.live_chunks(assigned).tolist(), holdings.live_bytes(assigned).tolist()
    uses = [
        PackUse(number, pack, chunks[i], nbytes[i], i in readable)
        for i, (number, pack) in enumerate(packs)
    ]
    return Mark(state, uses, len(needs.missing), holdings, assigned)


class _Needs:
    """Collects needed keys and passes them on in large batches. Threads share it."""

    def __init__(self, holdings: Holdings) -> None:
        self.missing: set[int] = set()
        self._holdings = holdings
        self._batch: list[Keys] = []
        self._size = 0
        self._lock = threading.Lock()

    def add(self, ids: bytes) -> None:
        with self._lock:
            self._batch.append(keys_of(ids))
            self._size += len(self._batch[-1])
            if self._size >= BATCH_KEYS:
                self.flush()

    def flush(self) -> None:
        if self._batch:
            self.missing.update(self._holdings.need(np.concatenate(self._batch)).tolist())
        self._batch, self._size = [], 0


def _read_footers(
    storage: Storage,
    packs: Sequence[Pack],
    holdings: Holdings,
    threads: ThreadPool,
    report: Progress,
) -> tuple[set[int], list[tuple[Pack, FooterTable]]]:
    """Put every footer into `holdings`. Returns the positions of the readable ones, and the
    metadata packs with their footers."""
    readable: set[int] = set()
    metadata: list[tuple[Pack, FooterTable]] = []
    counter = Counter(report, "read footers", len(packs))

    def read(i: int) -> None:
        pack = packs[i]
        try:
            table = footers.read_table(storage, pack.id, metadata=pack.metadata)
        except (Corrupt, NotFound):
            table = None
        if table is not None and len(table) == pack.chunks:
            holdings.put(i, table)
            readable.add(i)
            if pack.metadata:
                metadata.append((pack, table))
        counter.add()

    threads.spread(read, range(len(packs)))
    return readable, metadata


def _read_documents(
    storage: Storage, state: State, needs: _Needs, report: Progress
) -> dict[ChunkId, CommitId]:
    """Every page that a commit needs, and one of those commits."""
    roots = [(commit, row) for commit, row in state.commits.items() if not row.soft]
    counter = Counter(report, "read commits", len(roots))
    pages: dict[ChunkId, CommitId] = {}
    for commit, row in roots:
        try:
            document = decode_document(storage.read(document_key(row.session, commit)), commit)
        except (Corrupt, NotFound) as error:
            raise _unmarkable(commit, error) from error
        others = [tree.schema for _, tree in document.trees]
        if document.layout is not None:
            others.append(document.layout)
        if others:
            needs.add(b"".join(others))
        for _, tree in document.trees:
            pages.update(dict.fromkeys(tree.pages, commit))
        counter.add()
    return pages


def _read_pages(
    storage: Storage,
    metadata: Sequence[tuple[Pack, FooterTable]],
    pages: dict[ChunkId, CommitId],
    needs: _Needs,
    threads: ThreadPool,
    report: Progress,
) -> None:
    counter = Counter(report, "read pages", len(pages))
    unread = dict(pages)

    def read(item: tuple[Pack, FooterTable]) -> None:
        pack, rows = item
        try:
            for chunk in read_chunks(storage, pack.id, rows, metadata=True):
                leaves = decode_page(chunk.raw).leaves
                needs.add(b"".join((chunk.entry.chunk, *(leaf.ids for leaf in leaves))))
                counter.add()
        except (Corrupt, NotFound) as error:
            raise _unmarkable(pages[ChunkId(rows["chunk"][0].tobytes())], error) from error

    threads.spread(read, list(_wanted(metadata, unread)))
    if unread:
        page, commit = next(iter(unread.items()))
        raise _unmarkable(
            commit, NotFound(f"page {page.hex()[:12]} lies in no live pack that can be read")
        )


def _wanted(
    metadata: Sequence[tuple[Pack, FooterTable]], unread: dict[ChunkId, CommitId]
) -> Iterator[tuple[Pack, FooterTable]]:
    """The rows of each pack to read, each page in one pack only; found pages are removed from
    `unread`."""
    for pack, table in metadata:
        rows = [
            i
            for i, (chunk, kind) in enumerate(
                zip(table["chunk"].tolist(), table["kind"].tolist(), strict=True)
            )
            if kind == PAGE and unread.pop(ChunkId(chunk), None) is not None
        ]
        if rows:
            yield pack, table[rows]


def _assign(
    storage: Storage,
    packs: Sequence[Pack],
    holdings: Holdings,
    threads: ThreadPool,
    report: Progress,
) -> npt.NDArray[np.bool_]:
    """Assign live chunks to packs, each to a copy that is unique or sound."""
    assigned = holdings.assign()
    while contested := holdings.contested():
        counter = Counter(report, "compare copies", sum(map(len, contested.values())))
        threads.spread(
            partial(_reject_damaged, storage, packs, holdings, counter), list(contested.items())
        )
        assigned = holdings.assign()
    return assigned


def _reject_damaged(
    storage: Storage,
    packs: Sequence[Pack],
    holdings: Holdings,
    counter: Counter,
    contested: tuple[int, npt.NDArray[np.int64]],
) -> None:
    i, rows = contested
    holdings.reject(i, _damaged(storage, packs[i], rows))
    counter.add(len(rows))


def _damaged(storage: Storage, pack: Pack, rows: npt.NDArray[np.int64]) -> list[int]:
    """The chunks `rows` of a pack that cannot be read and verified."""
    try:
        table = footers.read_table(storage, pack.id, metadata=pack.metadata)
    except (Corrupt, NotFound):
        return rows.tolist()  # type: ignore[no-any-return]  # numpy's tolist is untyped
    if _all_sound(storage, pack, table[rows]):
        return []
    return [row for row in rows.tolist() if not _all_sound(storage, pack, table[[row]])]


def _all_sound(storage: Storage, pack: Pack, table: FooterTable) -> bool:
    try:
        return all(True for _ in read_chunks(storage, pack.id, table, metadata=pack.metadata))
    except (Corrupt, NotFound):
        return False


def _unmarkable(commit: CommitId, error: Exception) -> Corrupt:
    return Corrupt(
        f"commit {commit[:12]} cannot be marked, so nothing may be deleted: {error}; heal it with "
        "`ckptstore repair`, or forget that commit"
    )
