"""Storage use per commit: logical, new, exclusive and shared bytes.

*Logical* is the size of the state. *New* is the growth of the store when it was committed, a fact
of the past. *Exclusive* bytes would be freed if only this commit were removed; *shared* bytes are
also needed by other commits. Both change as commits come and go.

A commit needs the bases of its chunks that are stored as differences. Every page is read once.
Chunks are identified by the first 8 bytes of their ids, which suffices for sums: among a million
chunks, the probability of one collision is one in thirty million.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ckptstore.errors import NotFound
from ckptstore.plugin.checks import metadata_of, read_document
from ckptstore.plugin.encoding import (
    BASES_MAX,
    DEPTH_MAX,
    PAGE,
    PATCH,
    PATCHED_DTYPE,
    bases_of,
    decode_page,
)
from ckptstore.plugin.handles import StoreHandle
from ckptstore.plugin.model import NO_BASE, ChunkId, CommitId
from ckptstore.plugin.progress import Progress, silent
from ckptstore.plugin.reading import read_table
from ckptstore.plugin.text import bytes_text
from ckptstore.plugin.upkeep import short_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Keys = NDArray[np.uint64]
    Counts = NDArray[np.int64]

SHARED = -1

PAGES_AT_ONCE = 512
"""Pages that are read together and held in memory."""

LOOKS = 5
"""How often the store is looked at again while a gc changes it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CommitUsage:
    """Bytes of one commit; the module explains the four terms. `shared_bytes` is None unless
    requested."""

    commit: CommitId
    logical_bytes: int
    new_bytes: int
    exclusive_bytes: int
    shared_bytes: int | None

    def __str__(self) -> str:
        logical, own = bytes_text(self.logical_bytes), bytes_text(self.exclusive_bytes)
        return f"{self.commit[:12]}: {logical}, {own} of it exclusive"


@dataclass(frozen=True, slots=True, repr=False)
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

    def __repr__(self) -> str:
        return f"<usage: {str(self).splitlines()[-1]}>"

    def __str__(self) -> str:
        stored, free = bytes_text(self.stored_bytes), bytes_text(self.unreferenced_bytes)
        total = f"{len(self.commits)} commits in {stored}, of which no commit needs {free}"
        return "\n".join((*map(str, self.commits), total))


def usage(
    handle: StoreHandle, *, detail: Iterable[CommitId] = (), progress: Progress = silent
) -> Usage:
    """Compute the storage use; `shared_bytes` only for the commits of `detail`. A gc may run
    meanwhile."""
    wanted = frozenset(detail)
    return beside_gc(handle, lambda: _usage(handle, wanted, progress))


def beside_gc(handle: StoreHandle, look: Callable[[], T]) -> T:
    """What `look` finds in the store; it looks again if a gc takes something away meanwhile."""
    for _ in range(LOOKS - 1):
        n = handle.log.replay().n
        try:
            return look()
        except NotFound:
            # Objects go after the entry that says so.
            if handle.log.replay(refresh=True).n == n:
                raise
    return look()


def _usage(handle: StoreHandle, wanted: frozenset[CommitId], progress: Progress) -> Usage:
    state = handle.log.replay()
    handle.objects.sync(state)
    rows = [(row.age, commit, row) for commit, row in state.commits.items() if not row.soft]
    owners: dict[ChunkId, int] = {}
    kinds: dict[ChunkId, int] = {}
    told: list[tuple[CommitId, int, int]] = []
    detailed: dict[CommitId, dict[ChunkId, int]] = {}
    for number, (_, commit, row) in enumerate(sorted(rows, reverse=True)):
        progress("reading commits", number, len(rows))
        document = read_document(handle.storage, row.session, commit)
        metadata = metadata_of(document)
        kinds |= metadata
        for chunk in metadata:
            owners[chunk] = SHARED if chunk in owners else number
        told.append((commit, document.logical_bytes, document.new_bytes))
        if commit in wanted:
            detailed[commit] = metadata
    footers_read = Footers(handle)
    keys, owner = _owned_keys(handle, footers_read, kinds, owners)
    size_of = footers_read.sizes_of(keys)
    owned = owner != SHARED
    exclusive = np.bincount(owner[owned], size_of[owned], len(told)).astype(np.int64).tolist()
    commits = []
    for number, (commit, logical_bytes, new_bytes) in enumerate(told):
        own_bytes, shared = exclusive[number], None
        if commit in detailed:
            named = np.concatenate(list(_named_keys(handle, detailed[commit])))
            at = np.searchsorted(keys, np.unique(footers_read.with_bases(named)))
            shared = int(size_of[at].sum()) - own_bytes
        commits.append(CommitUsage(commit, logical_bytes, new_bytes, own_bytes, shared))
    packs = state.packs.values()
    stored_bytes = sum(pack.stored_bytes for pack in packs)
    return Usage(
        tuple(commits),
        len(packs),
        sum(pack.chunks for pack in packs),
        stored_bytes,
        stored_bytes - int(size_of.sum()),
    )


def _owned_keys(
    handle: StoreHandle,
    footers_read: "Footers",
    kinds: Mapping[ChunkId, int],
    owners: Mapping[ChunkId, int],
) -> tuple["Keys", "Counts"]:
    """Every chunk's key, sorted, and the number of the one commit that needs it, or SHARED. `kinds`
    are those of all metadata, and `owners` has the commit of each likewise."""
    keys = list(map(footers_read.with_bases, _named_keys(handle, kinds)))
    if not keys:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    counts = [len(part) for part in keys]
    owner = np.repeat([owners[chunk] for chunk in kinds], counts)
    found, first, group = np.unique(np.concatenate(keys), return_index=True, return_inverse=True)
    single = owner[first]
    shared = np.zeros(len(found), np.bool_)
    shared[group[owner != single[group]]] = True
    return found, np.where(shared, SHARED, single)


def _named_keys(handle: StoreHandle, metadata: Mapping[ChunkId, int]) -> Iterator["Keys"]:
    """For each schema, page and layout, its key and those of the chunks that it names."""
    ids = list(metadata)
    for start in range(0, len(ids), PAGES_AT_ONCE):
        some = ids[start : start + PAGES_AT_ONCE]
        pages = [chunk for chunk in some if metadata[chunk] == PAGE]
        read = handle.objects.read_metadata_many(pages)
        for chunk in some:
            leaves = decode_page(read[chunk]).leaves if chunk in read else ()
            yield short_keys(b"".join((chunk, *(content.ids for content in leaves))))


class Footers:
    """The footers of all listed packs, each read once: how large is a chunk as it is stored, and
    which bases does it need if it is a difference or a patch?"""

    def __init__(self, handle: StoreHandle) -> None:
        keys, stored = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        made, bases = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
        for pack in handle.log.state.packs.values():
            table = read_table(handle.storage, pack)
            own, base = short_keys(table["chunk"].tobytes()), table["base"]
            keys.append(own)
            stored.append(table["stored"].astype(np.int64) * (2 if pack.metadata else 1))
            made.append(own[base != NO_BASE])
            bases.append(own[base[base != NO_BASE]])
            if table.dtype == PATCHED_DTYPE:
                is_patch = table["codec"] == PATCH
                made.append(np.repeat(own[is_patch], BASES_MAX))
                bases.append(short_keys(bases_of(table[is_patch]).tobytes()))
        self._keys, self._stored = np.concatenate(keys), np.concatenate(stored)
        pairs = np.stack((np.concatenate(made), np.concatenate(bases)))
        self._made, self._bases = pairs[:, np.argsort(pairs[0], kind="stable")]

    def sizes_of(self, keys: "Keys") -> "Counts":
        """The stored bytes of the chunk of each of `keys`, which are sorted, twins included."""
        sizes = np.zeros(len(keys) + 1, np.int64)
        at = np.searchsorted(keys, self._keys)
        known = np.append(keys, np.uint64(0))[at] == self._keys
        sizes[at[known]] = self._stored[known]
        return sizes[:-1]

    def with_bases(self, keys: "Keys") -> "Keys":
        """`keys`, then those of the bases of their chunks, and of theirs."""
        found, new = [keys], keys
        while len(new := self._of(new)) and len(found) <= DEPTH_MAX + 1:
            found.append(new)
        return np.concatenate(found)

    def _of(self, keys: "Keys") -> "Keys":
        """The keys of the bases of chunks."""
        keys = np.unique(keys)
        first, last = (np.searchsorted(self._made, keys, side) for side in ("left", "right"))
        counts = last - first
        rows = np.repeat(last - np.cumsum(counts), counts) + np.arange(counts.sum())
        found: Keys = np.unique(self._bases[rows])
        return found
