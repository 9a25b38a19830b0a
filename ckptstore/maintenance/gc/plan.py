"""The plan of a gc, as data: dead packs, what is freed now and later, and what is copied together.
Pure.

`--dry-run` prints it, and a real run executes it; only concurrent changes can make a difference.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from ckptstore.core.ids import CommitId, PackId, SessionId
from ckptstore.core.text import bytes_text, count_text
from ckptstore.log.state import Pack, State
from ckptstore.maintenance.gc.mark import Mark
from ckptstore.maintenance.gc.orphans import Orphan
from ckptstore.maintenance.gc.repack import Copy


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


@dataclass(frozen=True, slots=True)
class GcPlan:
    """A gc marked at log position `mark`. `fence` is the last condemning entry that it knows.

    The sources of `copies` are deleted when the sessions `copies_wait` have ended. `missing` needed
    chunks are in no live pack, and the footers of the packs `unreadable` cannot be read. Both are
    for `fsck`, and possible sources for repair are left alone. With `full` the disk is full, so gc
    waits for no session.
    """

    mark: int
    fence: int
    over: tuple[SessionId, ...]
    purge: tuple[CommitId, ...]
    doomed: tuple[DeadPack, ...]
    orphans: tuple[Orphan, ...]
    copies: tuple[Copy, ...]
    copies_wait: tuple[SessionId, ...]
    missing: int
    unreadable: tuple[PackId, ...]
    full: bool

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

    def __str__(self) -> str:
        now = [pack for pack in self.doomed if not pack.waits]
        dead_bytes = sum(pack.bytes for pack in now)
        orphan_bytes = sum(orphan.bytes for orphan in self.orphans)
        sources = sum(len(copy.sources) for copy in self.copies)
        steps = (
            (len(self.over), "declare over {}: their writers are gone", "session"),
            (len(self.purge), "purge {}: forgotten", "commit"),
            (len(self.condemn), "condemn {}: no commit needs them", "pack"),
            (len(now), f"delete {{}}, {bytes_text(dead_bytes)}", "pack"),
            (len(self.orphans), f"delete {{}}, {bytes_text(orphan_bytes)}", "orphan"),
            (sources, f"copy from {{}} to {count_text(len(self.copies), 'new pack')}", "pack"),
        )
        lines = [text.format(count_text(n, noun)) for n, text, noun in steps if n]
        freed, wrote = bytes_text(self.freed_now_bytes), bytes_text(self.copied_bytes)
        lines.append(f"frees {freed} now, writes {wrote}")
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
