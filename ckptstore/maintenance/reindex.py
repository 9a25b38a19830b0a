"""Rebuilding the catalog and chunk index from log and footers, without using their old content."""

from dataclasses import dataclass

from ckptstore.maintenance.progress import Progress, silent
from ckptstore.repository.store_handle import StoreHandle


@dataclass(frozen=True, slots=True)
class Reindexed:
    """The content of the new indexes. The log lists the `unreadable` packs, but neither of their
    footers can be read."""

    entries: int
    commits: int
    packs: int
    unreadable: int


def reindex(handle: StoreHandle, *, progress: Progress = silent) -> Reindexed:
    """Discard this host's catalog and chunk index and rebuild them. Readers and writers may
    continue meanwhile.

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
