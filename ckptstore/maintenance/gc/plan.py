"""The plan of a gc, as data: dead packs, orphans, what is freed now and later, and the sparse and
small packs that are copied together. Reads the listing, and the footers of the packs to copy.

`--dry-run` prints it, and a real run executes it; only concurrent changes can make a difference.
The layout of a copy is computed before anything is copied, so a plan states the exact size of the
new files.

Orphans are objects that no log entry lists and whose session is over. The order is the proof:
objects are listed first and the log is replayed afterwards. An object that is unlisted in that
state and belongs to a closed session can never be listed later.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.core.ids import (
    CommitId,
    PackId,
    SessionId,
    document_key,
    pack_key,
    parse_signature_key,
    twin_key,
)
from ckptstore.core.text import bytes_text, count_text
from ckptstore.errors import Corrupt
from ckptstore.log.log_snapshots import CHECKPOINTS_KEPT
from ckptstore.log.state import Pack, State
from ckptstore.maintenance.gc.costs import Rewrite
from ckptstore.maintenance.gc.mark import Mark, PackUse, ids_checksum
from ckptstore.objects.codecs import RAW
from ckptstore.objects.pack import (
    FOOTER_DTYPE,
    PATCHED_DTYPE,
    TRAILER_BYTES,
    FooterTable,
    align,
    bases_named,
)
from ckptstore.repository import footers
from ckptstore.repository.chunk_reader import coalesce
from ckptstore.storage.contract import Storage

_WHY = {
    "packs": "no log entry lists it",
    "commits": "its commit was purged, or never came to be",
    "signatures": "its commit was purged",
    "tmp": "left behind while it was written",
    "sessions": "its session is over",
}
_OWNED = re.compile(
    r"packs/([0-9a-f]{2})/(?P<pack>(?=\1)[0-9a-f]{24})(?:-(?:0|[1-9][0-9]{0,6})){2}(?:\.2)?"
    r"|commits/(?P<commit>[0-9a-f]{24})-[0-9a-f]{64}"
    r"|tmp/(?P<temporary>[0-9a-f]{24})-[0-9a-z]+"
    r"|sessions/(?P<session>[0-9a-f]{24})"
)
_CHECKPOINT = re.compile(r"log/checkpoint-[0-9]{12}")
_SCRATCH = re.compile(r"log/scratch-[0-9a-f]{24}")


class Orphan(NamedTuple):
    """An object to delete."""

    key: str
    bytes: int
    why: str


Listing: TypeAlias = Mapping[str, int]
"""Objects and their sizes, listed before the replay of the state that they are compared with."""


Owned: TypeAlias = Mapping[str, tuple[SessionId, int]]
"""Objects with the sessions in their names, and their sizes."""


def list_objects(storage: Storage) -> Listing:
    """List everything but the log's entries."""
    prefixes = (*(f"{folder}/" for folder in _WHY), "log/checkpoint-", "log/scratch-")
    return {key: size for prefix in prefixes for key, size in storage.list(prefix)}


def owner(key: str) -> SessionId | None:
    """The session in the name of an object; None for a name that no session gives."""
    found = _OWNED.fullmatch(key)
    return SessionId(found[str(found.lastgroup)]) if found else None


def owned(listing: Listing) -> Owned:
    """The objects of `listing` that sessions named."""
    return {key: (by, size) for key, size in listing.items() if (by := owner(key))}


def unlisted(
    listing: Listing, state: State, purged: Set[CommitId] = frozenset()
) -> Iterator[tuple[str, int]]:
    """The keys and sizes of packs and documents that `state` does not list, once `purged` commits
    are gone."""
    listed = {
        key for pack in state.packs.values() for key in (pack_key(pack.id), twin_key(pack.id))
    }
    listed.update(
        document_key(row.session, commit)
        for commit, row in state.commits.items()
        if commit not in purged
    )
    for key, size in listing.items():
        if key.startswith(("packs/", "commits/")) and key not in listed:
            yield key, size


def orphans(
    listing: Listing,
    state: State,
    *,
    over: Set[SessionId] = frozenset(),
    purged: Set[CommitId] = frozenset(),
    stale: Set[str] = frozenset(),
) -> tuple[Orphan, ...]:
    """The objects of `listing` that may be deleted at `state`, which was replayed after it.

    In a plan, `over` are sessions that will have been declared over, and `purged` commits that will
    have been purged. `stale` are names in `tmp/` without a writer.
    """
    unnamed = dict(unlisted(listing, state, purged))
    old = frozenset(sorted(filter(_CHECKPOINT.fullmatch, listing))[:-CHECKPOINTS_KEPT])

    def why(key: str) -> str | None:
        """Why an object may be deleted; None for one that stays."""
        folder, _, name = key.partition("/")
        if key in old:
            return "there are newer checkpoints"
        if _SCRATCH.fullmatch(key):
            return "it was made to be deleted"
        if folder == "signatures" and (signed := parse_signature_key(key)):
            gone = signed[0] not in state.commits or signed[0] in purged
        elif (key in unnamed or folder in ("tmp", "sessions")) and (session := owner(key)):
            gone = session in over or state.closed(session) or name in stale
        else:
            gone = False
        return _WHY[folder] if gone else None

    reasons = ((key, size, why(key)) for key, size in sorted(listing.items()))
    return tuple(Orphan(key, size, reason) for key, size, reason in reasons if reason)


@dataclass(frozen=True, slots=True)
class Copy:
    """One new pack, and the packs whose live chunks it will hold. `bytes` is its size, twin
    included."""

    sources: tuple[PackUse, ...]
    bytes: int

    @property
    def freed_bytes(self) -> int:
        return sum(source.pack.stored_bytes for source in self.sources)


@dataclass(frozen=True, slots=True)
class DeadPack:
    """A pack without live chunks; `condemned` if an earlier gc appended that to the log. `bytes`
    includes its twin.

    It is deleted once the sessions `waits` have ended, so that commits in flight which reuse it
    need not write its chunks again.
    """

    number: int
    id: PackId
    bytes: int
    condemned: bool
    waits: tuple[SessionId, ...]


@dataclass(frozen=True, slots=True, repr=False)
class GcPlan:
    """A gc marked at log position `mark`. `fence` is the last condemning entry that it knows.

    The sources of `copies` are deleted when the sessions `copies_wait` have ended. `missing` needed
    chunks are in no live pack, and the footers of the packs `unreadable` cannot be read. Both are
    for `fsck`, and possible sources for repair are left alone. The commits `recent` were forgotten
    within the grace and stay. With `full` the disk is full, so gc waits for no session. The bytes
    `left_bytes` stay dead in packs that are neither deleted nor copied from. `rewrites` are the
    reasons for the copies, and against others.
    """

    mark: int = 0
    fence: int = 0
    over: tuple[SessionId, ...] = ()
    purge: tuple[CommitId, ...] = ()
    recent: tuple[CommitId, ...] = ()
    doomed: tuple[DeadPack, ...] = ()
    orphans: tuple[Orphan, ...] = ()
    copies: tuple[Copy, ...] = ()
    copies_wait: tuple[SessionId, ...] = ()
    missing: int = 0
    unreadable: tuple[PackId, ...] = ()
    full: bool = False
    left_bytes: int = 0
    rewrites: tuple[Rewrite, ...] = ()

    @property
    def condemn(self) -> frozenset[int]:
        """The packs to condemn now."""
        return frozenset(pack.number for pack in self.doomed if not pack.condemned)

    @property
    def freed_now_bytes(self) -> int:
        """Bytes of all objects that this run deletes."""
        now = sum(pack.bytes for pack in self.doomed if not pack.waits) + sum(
            orphan.bytes for orphan in self.orphans
        )
        return now + (0 if self.copies_wait else sum(copy.freed_bytes for copy in self.copies))

    @property
    def freed_later_bytes(self) -> dict[tuple[SessionId, ...], int]:
        """Bytes that a later run can delete, by the sessions that must end first."""
        later: dict[tuple[SessionId, ...], int] = defaultdict(int)
        for pack in self.doomed:
            if pack.waits:
                later[pack.waits] += pack.bytes
        if self.copies and self.copies_wait:
            later[self.copies_wait] += sum(copy.freed_bytes for copy in self.copies)
        return dict(later)

    @property
    def copied_bytes(self) -> int:
        """The size of the new packs."""
        return sum(copy.bytes for copy in self.copies)

    @property
    def gained_bytes(self) -> int:
        """What the disk gains by this run."""
        return max(self.freed_now_bytes - self.copied_bytes, 0)

    @property
    def result(self) -> str:
        """What this run frees and writes."""
        freed, wrote = bytes_text(self.freed_now_bytes), bytes_text(self.copied_bytes)
        return f"frees {freed} now, writes {wrote}"

    def __repr__(self) -> str:
        return f"<gc plan: {self.result}>"

    def __str__(self) -> str:
        return self.page(self.result, self.rewrites)

    def page(self, result: str, rewrites: Iterable[Rewrite] = ()) -> str:
        """What is done, why packs are rewritten, the `result`, and what a later gc can free."""
        now = [pack.bytes for pack in self.doomed if not pack.waits]
        orphan_bytes = sum(orphan.bytes for orphan in self.orphans)
        sources = sum(len(copy.sources) for copy in self.copies)
        steps = (
            (len(self.over), "declare over {}: their writers are gone", "session"),
            (len(self.purge), "purge {}: forgotten", "commit"),
            (len(now), f"delete {{}}, {bytes_text(sum(now))}: no commit needs them", "pack"),
            (len(self.orphans), f"delete {{}}, {bytes_text(orphan_bytes)}", "orphan"),
            (sources, f"copy from {{}} to {count_text(len(self.copies), 'new pack')}", "pack"),
        )
        lines = [text.format(count_text(n, noun)) for n, text, noun in steps if n]
        lines += map(str, rewrites)
        if self.recent:
            stay = count_text(len(self.recent), "commit")
            lines.append(f"keep {stay}: just forgotten; `ckptstore gc --now` deletes them, too")
        lines.append(result)
        if self.left_bytes:
            lines.append(
                f"left {bytes_text(self.left_bytes)} that no commit needs in packs that hold more "
                "than that: within --max-unused, or beyond --max-repack"
            )
        for sessions, size in self.freed_later_bytes.items():
            which = ", ".join(sessions)
            lines.append(f"frees {bytes_text(size)} when these sessions have ended: {which}")
        if self.full:
            lines.append("the disk is full, so commits in flight are not waited for")
        return "\n".join(lines)

    @property
    def problems(self) -> tuple[str, ...]:
        """What somebody must look at."""
        unreadable = (
            f"the footer of pack {pack} cannot be read; it stays as it is, run `ckptstore fsck`"
            for pack in self.unreadable
        )
        if not self.missing:
            return tuple(unreadable)
        missing = (
            f"{count_text(self.missing, 'needed chunk')} in no live pack; condemned packs stay"
        )
        return (f"{missing}, run `ckptstore fsck`", *unreadable)

    @property
    def empty(self) -> bool:
        return not (self.over or self.purge or self.doomed or self.orphans or self.copies)


def doomed_packs(
    state: State, marked: Mark, waits: Mapping[PackId, frozenset[SessionId]], active: Set[SessionId]
) -> Iterator[DeadPack]:
    """The packs without live chunks, including those condemned before. `waits` has the sessions
    in flight when a pack was condemned."""
    for use in marked.uses:
        if use.dead:
            yield _doomed(use.number, use.pack, active)
    if marked.missing:
        # A condemned pack may hold missing chunks: fsck first.
        return
    for number, pack in sorted(state.packs.items()):
        if not pack.live:
            yield _doomed(number, pack, waits.get(pack.id, active) & active)


def _doomed(number: int, pack: Pack, waits: Iterable[SessionId]) -> DeadPack:
    return DeadPack(number, pack.id, pack.stored_bytes, not pack.live, tuple(sorted(waits)))


def plan_copies(storage: Storage, groups: Iterable[Sequence[PackUse]]) -> Iterator[Copy]:
    """The new packs, with their exact sizes. Reads footers."""
    for uses in groups:
        end, records, record_bytes = 0, 0, FOOTER_DTYPE.itemsize
        for use in uses:
            rows = live_rows(storage, use)
            records += len(rows)
            if len(bases_named(rows)):
                record_bytes = PATCHED_DTYPE.itemsize
            _, end = place(rows, end)
        yield Copy(tuple(uses), (end + records * record_bytes + TRAILER_BYTES) * uses[0].files)


def live_rows(storage: Storage, use: PackUse) -> FooterTable:
    """The footer's records of the chunks to copy. Raises `Corrupt`, also for a footer of other
    chunks than those that were marked, and `NotFound`."""
    table = footers.read_table(storage, use.pack)
    if ids_checksum(table) != use.ids_checksum:
        raise Corrupt(
            f"pack {use.pack.id} has {len(table)} chunks now, which are not the {len(use.live)} "
            "that were marked; run `ckptstore fsck`"
        )
    return table[use.live]


_MOVE_DTYPE = np.dtype([("offset", "<i8"), ("to", "<i8")])


def place(rows: FooterTable, end: int) -> tuple[npt.NDArray[np.void], int]:
    """The offset of each chunk in its pack and its offset after `end` in a new one, and the new
    end. Adjacent chunks stay adjacent, and are aligned as a run if they are not all coded."""
    starts, stored = rows["offset"].astype(np.int64), rows["stored"].astype(np.int64)
    moves = np.empty(len(rows), _MOVE_DTYPE)
    moves["offset"] = starts
    for run in coalesce(starts.tolist(), (starts + stored).tolist()):
        run_bytes = int(stored[run].sum())
        start = align(end, run_bytes) if (rows["codec"][run] == RAW).any() else end
        moves["to"][run] = start + starts[run] - starts[run.start]
        end = start + run_bytes
    return moves, end
