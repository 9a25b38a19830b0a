"""Storage use per commit: logical, new, exclusive and shared bytes.

*Logical* is the size of the state. *New* is the growth of the store when it was committed, a fact
of the past. *Exclusive* bytes would be freed if only this commit were removed; *shared* bytes are
also needed by other commits. Both change as commits come and go.

Every page is read once. Chunks are identified by the first 8 bytes of their ids, which suffices for
sums: among a million chunks, the probability of one collision is one in thirty million.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, CommitId, document_key
from ckptstore.core.model import CommitDocument
from ckptstore.objects.documents import decode_document
from ckptstore.objects.pages import decode_page
from ckptstore.repository import footers
from ckptstore.repository.store_handle import StoreHandle

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Keys = NDArray[np.uint64]

SHARED = -1
MERGE_KEYS = 1 << 20


@dataclass(frozen=True, slots=True)
class CommitUsage:
    """Bytes of one commit; the module explains the four terms. `shared_bytes` is None unless
    requested."""

    commit: CommitId
    logical_bytes: int
    new_bytes: int
    exclusive_bytes: int
    shared_bytes: int | None


@dataclass(frozen=True, slots=True)
class Usage:
    """All commits that are not forgotten, newest first. `stored_bytes` is the size of the packs,
    `unreferenced_bytes` the part that no such commit needs."""

    commits: tuple[CommitUsage, ...]
    packs: int
    chunks: int
    stored_bytes: int
    unreferenced_bytes: int

    @property
    def logical_bytes(self) -> int:
        return sum(commit.logical_bytes for commit in self.commits)


def usage(handle: StoreHandle, *, detail: Iterable[CommitId] = ()) -> Usage:
    """Compute the storage use; `shared_bytes` only for the commits of `detail`."""
    state = handle.log.replay()
    handle.objects.sync(state)
    rows = sorted(
        ((row.n, commit, row) for commit, row in state.commits.items() if not row.soft),
        reverse=True,
    )
    documents = [
        decode_document(handle.storage.read(document_key(row.session, commit)), commit)
        for _, commit, row in rows
    ]
    owners = _page_owners(documents)
    keys, owner = _owned_keys(handle, owners)
    packed_keys, sizes, stored_bytes = _packed(handle)
    size_of = _sizes(keys, packed_keys, sizes)
    exclusive = np.bincount(
        owner[owner >= 0], weights=size_of[owner >= 0], minlength=len(documents)
    )
    wanted = frozenset(detail)
    commits = []
    for i, ((_, commit, _), document) in enumerate(zip(rows, documents, strict=True)):
        shared = (
            _referenced(handle, document, keys, size_of) - int(exclusive[i])
            if commit in wanted
            else None
        )
        commits.append(
            CommitUsage(
                commit, document.logical_bytes, document.new_bytes, int(exclusive[i]), shared
            )
        )
    return Usage(
        tuple(commits),
        len(state.packs),
        len(packed_keys),
        stored_bytes,
        stored_bytes - int(size_of.sum()),
    )


def _page_owners(documents: list[CommitDocument]) -> dict[ChunkId, tuple[int, bool]]:
    """Metadata chunk → (the one document that names it, or SHARED; whether it is a page)."""
    owners: dict[ChunkId, tuple[int, bool]] = {}
    for i, document in enumerate(documents):
        for chunk, is_page in _metadata(document):
            known = owners.get(chunk)
            owners[chunk] = (i if known is None or known[0] == i else SHARED, is_page)
    return owners


def _metadata(document: CommitDocument) -> Iterator[tuple[ChunkId, bool]]:
    for _, tree in document.trees:
        yield tree.schema, False
        yield from ((page, True) for page in tree.pages)
    if document.layout is not None:
        yield document.layout, False


def _owned_keys(
    handle: StoreHandle, owners: Mapping[ChunkId, tuple[int, bool]]
) -> tuple["Keys", "NDArray[np.int64]"]:
    """Every chunk's key, sorted, and the one commit that needs it, or SHARED."""
    table: list[tuple[Keys, NDArray[np.int64]]] = []
    pending = 0
    for chunk, (owner, is_page) in owners.items():
        keys = _page_keys(handle, chunk) if is_page else _keys(chunk)
        table.append((keys, np.full(len(keys), owner, np.int64)))
        pending += len(keys)
        if pending > MERGE_KEYS:
            table, pending = [_merge(table)], 0
    return _merge(table)


def _page_keys(handle: StoreHandle, page: ChunkId) -> "Keys":
    """The keys of a page and of the chunks that it names."""
    contents = decode_page(handle.objects.read_metadata(page)).leaves
    return np.unique(_keys(page + b"".join(content.ids for content in contents)))


def _keys(ids: bytes) -> "Keys":
    return np.frombuffer(ids, "<u8").reshape(-1, CHUNK_ID_BYTES // 8)[:, 0]


def _merge(table: list[tuple["Keys", "NDArray[np.int64]"]]) -> tuple["Keys", "NDArray[np.int64]"]:
    if not table:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    keys, owner = np.concatenate([k for k, _ in table]), np.concatenate([o for _, o in table])
    order = np.argsort(keys, kind="stable")
    keys, owner = keys[order], owner[order]
    first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    least, most = np.minimum.reduceat(owner, first), np.maximum.reduceat(owner, first)
    return keys[first], np.where(least == most, least, SHARED)


def _packed(handle: StoreHandle) -> tuple["Keys", "NDArray[np.int64]", int]:
    """Key and stored bytes of every chunk in a listed pack, sorted by key, and the total bytes
    of the packs, twins included."""
    keys, sizes, total = [], [], 0
    for pack in handle.log.state.packs.values():
        table = footers.read_table(handle.storage, pack.id, metadata=pack.metadata)
        copies = 2 if pack.metadata else 1
        keys.append(_keys(table["chunk"].tobytes()))
        sizes.append(table["stored"].astype(np.int64) * copies)
        total += pack.bytes * copies
    if not keys:
        return np.empty(0, np.uint64), np.empty(0, np.int64), total
    all_keys, all_sizes = np.concatenate(keys), np.concatenate(sizes)
    order = np.argsort(all_keys, kind="stable")
    return all_keys[order], all_sizes[order], total


def _sizes(keys: "Keys", packed: "Keys", sizes: "NDArray[np.int64]") -> "NDArray[np.int64]":
    if not len(packed):
        return np.zeros(len(keys), np.int64)
    at = np.minimum(np.searchsorted(packed, keys), len(packed) - 1)
    return np.where(packed[at] == keys, sizes[at], 0)


def _referenced(
    handle: StoreHandle, document: CommitDocument, keys: "Keys", size_of: "NDArray[np.int64]"
) -> int:
    named = [
        _page_keys(handle, chunk) if is_page else _keys(chunk)
        for chunk, is_page in _metadata(document)
    ]
    if not named:
        return 0
    return int(size_of[np.searchsorted(keys, np.unique(np.concatenate(named)))].sum())
