"""Catalog and chunk index made anew from log and footers: what they said before does not count."""

from dataclasses import dataclass

from ckptstore.maintenance.progress import Progress, silent
from ckptstore.repository.store_handle import StoreHandle


@dataclass(frozen=True, slots=True)
class Reindexed:
    """What the new indexes hold. `unreadable` packs are listed by the log, but no footer of them
    can be read."""

    entries: int
    commits: int
    packs: int
    unreadable: int


def reindex(handle: StoreHandle, *, progress: Progress = silent) -> Reindexed:
    """Throw this host's catalog and chunk index away and build them from the store. Readers and
    writers may go on meanwhile.

    Raises `Corrupt` for a broken log: `repair` it first.
    """
    progress("log", 0, 0)
    state = handle.log.replay()
    progress("catalog", 0, state.n)
    handle.catalog.reset()
    handle.follow()
    progress("chunk index", 0, len(state.packs))
    handle.objects.index.reset()
    handle.objects.sync(state, thorough=True)
    indexed = len(handle.objects.index.indexed() & set(state.packs))
    return Reindexed(state.n, len(state.commits), indexed, len(state.packs) - indexed)
