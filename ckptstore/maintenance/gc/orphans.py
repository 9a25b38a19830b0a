"""Orphans: objects that no log entry lists and whose session is over. Pure, except for the listing.

The order is the proof: objects are listed first and the log is replayed afterwards. An object that
is unlisted in that state and belongs to a closed session can never be listed later.
"""

import re
from collections.abc import Iterator, Mapping, Set
from typing import NamedTuple, TypeAlias

from ckptstore.core.ids import CommitId, SessionId, document_key, pack_key, twin_key
from ckptstore.log.log_snapshots import CHECKPOINTS_KEPT
from ckptstore.log.state import State
from ckptstore.storage.contract import Storage

_WHY = {
    "packs": "no log entry lists it",
    "commits": "its commit was purged, or never came to be",
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


def list_objects(storage: Storage) -> Listing:
    """List everything but the log's entries."""
    prefixes = (*(f"{folder}/" for folder in _WHY), "log/checkpoint-", "log/scratch-")
    return {key: size for prefix in prefixes for key, size in storage.list(prefix)}


def owner(key: str) -> SessionId | None:
    """The session in the name of an object; None for a name that no session gives."""
    found = _OWNED.fullmatch(key)
    return SessionId(found[str(found.lastgroup)]) if found else None


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
    there = {key: size for key, size in listing.items() if key.startswith(("tmp/", "sessions/"))}
    found: list[Orphan] = []
    for key, size in (there | dict(unlisted(listing, state, purged))).items():
        folder, _, name = key.partition("/")
        session = owner(key)
        if session and (session in over or state.closed(session) or name in stale):
            found.append(Orphan(key, size, _WHY[folder]))
    checkpoints = [key for key in sorted(listing) if _CHECKPOINT.fullmatch(key)]
    found += (
        Orphan(key, listing[key], "there are newer checkpoints")
        for key in checkpoints[:-CHECKPOINTS_KEPT]
    )
    found += (
        Orphan(key, size, "it was made to be deleted")
        for key, size in listing.items()
        if _SCRATCH.fullmatch(key)
    )
    return tuple(sorted(found))
