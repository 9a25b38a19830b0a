"""Orphans: objects that no log entry lists and whose session is over. Pure, except for the listing.

The order is the proof: objects are listed first and the log is replayed afterwards. An object that
is unlisted in that state and belongs to a closed session can never be listed later.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from ckptstore.core.ids import CommitId, PackId, SessionId, document_key
from ckptstore.log.log_snapshots import CHECKPOINTS_KEPT
from ckptstore.log.state import State
from ckptstore.storage.contract import Storage

_PACK = re.compile(r"packs/[0-9a-f]{2}/(?P<name>(?P<session>[0-9a-f]{24})-[0-9]+-[0-9]+)(?:\.2)?")
_DOCUMENT = re.compile(r"commits/(?P<session>[0-9a-f]{24})-[0-9a-f]{64}")
_TEMPORARY = re.compile(r"tmp/(?P<name>(?P<session>[0-9a-f]{24})-[0-9a-z]+)")
_SESSION = re.compile(r"sessions/(?P<session>[0-9a-f]{24})")
_CHECKPOINT = re.compile(r"log/checkpoint-[0-9]{12}")
_SCRATCH = re.compile(r"log/scratch-[0-9a-f]{24}")


class Orphan(NamedTuple):
    """An object to delete."""

    key: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Listing:
    """Objects and their sizes, listed before the replay of the state that they are compared
    with."""

    packs: Mapping[str, int]
    documents: Mapping[str, int]
    temporaries: Mapping[str, int]
    sessions: Mapping[str, int]
    checkpoints: tuple[tuple[str, int], ...]
    scratches: Mapping[str, int]

    def unaccounted(self, state: State) -> frozenset[SessionId]:
        """The sessions named by objects that `state` does not list."""
        listed = {pack.id for pack in state.packs.values()}
        packs = (
            match["session"]
            for key in self.packs
            if (match := _PACK.fullmatch(key)) and match["name"] not in listed
        )
        documents = (
            match["session"]
            for key in self.documents.keys() - _documents(state)
            if (match := _DOCUMENT.fullmatch(key))
        )
        return frozenset(SessionId(session) for group in (packs, documents) for session in group)


def list_objects(storage: Storage) -> Listing:
    """List everything but the log's entries."""
    checkpoints = tuple(
        (key, size) for key, size in storage.list("log/checkpoint-") if _CHECKPOINT.fullmatch(key)
    )
    scratches = {key: size for key, size in storage.list("log/scratch-") if _SCRATCH.fullmatch(key)}
    packs, documents, temporaries, sessions = (
        dict(storage.list(prefix)) for prefix in ("packs/", "commits/", "tmp/", "sessions/")
    )
    return Listing(packs, documents, temporaries, sessions, checkpoints, scratches)


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

    def closed(session: str) -> bool:
        return SessionId(session) in over or state.closed(SessionId(session))

    return tuple(
        sorted(
            (
                *_unlisted_packs(listing, {pack.id for pack in state.packs.values()}, closed),
                *_unlisted_documents(listing, _documents(state, purged), closed),
                *(
                    Orphan(key, size, "left behind while it was written")
                    for key, size in listing.temporaries.items()
                    if (match := _TEMPORARY.fullmatch(key))
                    and (match["name"] in stale or closed(match["session"]))
                ),
                *(
                    Orphan(key, size, "its session is over")
                    for key, size in listing.sessions.items()
                    if (match := _SESSION.fullmatch(key)) and closed(match["session"])
                ),
                *(
                    Orphan(key, size, "it was made to be deleted")
                    for key, size in listing.scratches.items()
                ),
                *(
                    Orphan(key, size, "there are newer checkpoints")
                    for key, size in listing.checkpoints[:-CHECKPOINTS_KEPT]
                ),
            )
        )
    )


def _unlisted_packs(
    listing: Listing, listed: Set[PackId], closed: Callable[[str], bool]
) -> Iterator[Orphan]:
    for key, size in listing.packs.items():
        if (
            (match := _PACK.fullmatch(key))
            and match["name"] not in listed
            and closed(match["session"])
        ):
            yield Orphan(key, size, "no log entry lists it")


def _unlisted_documents(
    listing: Listing, listed: Set[str], closed: Callable[[str], bool]
) -> Iterator[Orphan]:
    for key, size in listing.documents.items():
        if (match := _DOCUMENT.fullmatch(key)) and key not in listed and closed(match["session"]):
            yield Orphan(key, size, "its commit was purged, or never came to be")


def _documents(state: State, purged: Set[CommitId] = frozenset()) -> frozenset[str]:
    return frozenset(
        document_key(row.session, commit)
        for commit, row in state.commits.items()
        if commit not in purged
    )
