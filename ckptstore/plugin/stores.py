"""Steps that a plugin takes with an open `Store` beyond the store's own methods."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.commit.outages import Outages, passes
from ckptstore.commit.parts import GivenPart, PartsWritten
from ckptstore.commit.plan import Flats
from ckptstore.commit.transaction import TreeContent
from ckptstore.contents import nearest_with
from ckptstore.core.ids import ChunkId, CommitId, SessionId
from ckptstore.core.model import CommitInfo
from ckptstore.core.options import Async, Ranks, Storage
from ckptstore.internals import MakeMetadata, PendingCommit
from ckptstore.log.resolve import Resolved
from ckptstore.log.sessions import Session
from ckptstore.maintenance import forget
from ckptstore.maintenance.retention import Policy
from ckptstore.open_store import open_commit
from ckptstore.plugins.adopt import adoption
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.dedup import GcPin
from ckptstore.repository.resolve_ref import find_commit
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.restore.reader import Reader
from ckptstore.snapshot import Snapshot
from ckptstore.store import Store, internals_of

if TYPE_CHECKING:
    from ckptstore.distributed.collective import Collective


@dataclass(frozen=True, slots=True)
class Candidate:
    """A commit that a training could go on from; `snapshot` reads its document."""

    id: CommitId
    step: int | None
    snapshot: Callable[[], Snapshot]


def commit_leaves(
    store: Store, leaves: Callable[[], Flats], metadata: MakeMetadata, *, follow: bool = True
) -> Snapshot:
    """Commit leaves whose bytes may come from anywhere, as `Store.commit` does those of a state.

    Args:
        store: The store.
        leaves: Returns them; called once, after commits in flight have ended.
        metadata: Returns what the commit is called; called before `leaves`.
        follow: It becomes the parent of the next commit of `store`.

    Raises:
        ReadOnly: The store is open for reading alone.
        CkptStoreError: The unseen failure of an earlier commit in the background. This one was
            made all the same.

    Example:
        >>> commit_leaves(store, lambda: {"model": flat}, lambda: label_of("main", 7, (), "", None))
    """
    internals = internals_of(store)
    return internals.after_failure(internals.commit(leaves, metadata, Ranks(), follow=follow))


def candidates(store: Store, peers: "Collective | None" = None) -> Iterator[Candidate]:
    """Commits of the store's run, newest first; with `peers`, as the coordinator lists them."""
    internals = internals_of(store)
    for reader, info in internals.candidates(peers):
        yield Candidate(info.id, info.step, partial(internals.snapshot, info, reader))


def follow(store: Store, snapshot: Snapshot) -> None:
    """Make `snapshot` the parent of the next commit of `store`."""
    internals_of(store).parent_tracker.now(snapshot.id)


def joined(store: Store, session: SessionId) -> None:
    """Make the commit of `session`, which another rank makes of parts written here, the parent of
    the next commit of `store`."""
    internals_of(store).parent_tracker.joined(session)


def commit_in_any_run(store: Store, ref: str) -> Resolved:
    """The commit that `ref` names by the log, in whichever run. Raises `NotFound`."""
    return find_commit(internals_of(store).handle, ref, None)


def log_with_forgotten(store: Store) -> Sequence[CommitInfo]:
    """Commits of all runs, newest first, the forgotten ones that are still there among them."""
    return internals_of(store).handle.queries().log(forgotten=True)


def nearest_whole(store: Store, commit: CommitId, path: str) -> Resolved | None:
    """The commit nearest to `commit` in its run that has the leaf `path`; None without one."""
    internals = internals_of(store)
    return nearest_with(internals.handle, internals.reader, commit, path)


def forget_by_policy(
    store: Store, policies: Sequence[Policy], pinned: Mapping[CommitId, str]
) -> bool:
    """Forget what no policy keeps of the store's run; see `Store.forget`. Commits in `pinned` stay,
    for the reason there. Returns whether any was forgotten."""
    internals = internals_of(store)
    plan = forget.forget_by_policy(
        internals.handle, policies, internals.reader, run=store.run, pinned=pinned
    )
    internals.handle.follow()
    return bool(plan.forgotten)


def make_hollow(store: Store, place: str | os.PathLike[str], snapshot: Snapshot) -> None:
    """Make the directory that `snapshot` was adopted from small; see `adoption.make_hollow`."""
    adoption.make_hollow(internals_of(store), Path(place), snapshot)


def threads_of(store: Store) -> ThreadPool:
    """The threads that the commits of `store` hash and write with."""
    return internals_of(store).threads


def reader_with(store: Store, threads: ThreadPool) -> Reader:
    """A reader of `store` that decodes by `threads`."""
    handle = internals_of(store).handle
    return Reader(handle.config, handle.objects, threads)


def chunks_of(store: Store) -> ObjectStore:
    """The chunks of `store`, by id."""
    return internals_of(store).chunks()


def committed_chunks(store: Store) -> Mapping[bytes, ChunkId]:
    """The chunks of the newest commit and of the one that training went on from, by checksum."""
    return internals_of(store).committed_chunks()


def gc_pin(store: Store, purpose: str) -> GcPin | None:
    """What keeps chunks of `store` from gc while they are relied on; None where it cannot be."""
    return internals_of(store).gc_pin(purpose)


# -- a commit whose parts another library's ranks write --


def open_parts(store: Store) -> Session:
    """Open the session under which all ranks write the parts of one commit; for its publisher."""
    return internals_of(store).parts_committer.open()


def write_parts(
    store: Store, session: SessionId, rank: int, parts: Sequence[GivenPart], run: str
) -> PartsWritten:
    """Hash `parts` and pack the chunks that `store` lacks, durable on return; see
    `PartsCommitter.write`."""
    return internals_of(store).parts_committer.write(session, rank, parts, run)


def publish_parts(
    store: Store,
    session: Session,
    label: CommitMetadata,
    trees: Sequence[TreeContent],
    layout: bytes | None,
    receipts: Sequence[Any],
    *,
    started: float,
    follow: bool,
) -> Snapshot:
    """The commit of what all ranks have written under `session`; see `PartsCommitter.publish`.

    With `follow`, it follows the last commit of `store`, and the next one follows it.
    """
    internals = internals_of(store)
    return internals.commit_external(
        lambda metadata, asked: internals.parts_committer.publish(
            session, metadata, trees, layout, receipts, started, asked
        ),
        label,
        follow=follow,
    )


def check_writable(store: Store) -> None:
    """Raise `ReadOnly` if `store` is open for reading alone."""
    internals_of(store).handle.check_writable()


def address_of(store: Store) -> tuple[str, Storage]:
    """With what another process opens `store`: its place, and how its objects are reached."""
    internals = internals_of(store)
    settings = internals.settings
    return internals.handle.place, Storage(options=settings.storage_options, index=settings.index)


# -- does a training go on although a save failed? --


def background_of(store: Store) -> Async:
    """How commits of `store` run in the background, unless the call says otherwise."""
    return store._background


def outages_of(store: Store) -> Outages:
    """What counts the failures of the commits of `store`, and says them once."""
    return internals_of(store).async_commits.outages


def outcome(store: Store, pending: PendingCommit, *, bounded: bool = True) -> Snapshot | None:
    """The commit once it is durable; None if training goes on without it.

    With `bounded`, it is waited for no longer than `max_wait_s`. Raises what training may not go on
    after.
    """
    background = background_of(store)
    if not background.goes_on:
        return pending.wait()
    while not pending.ended(background.max_wait_s):
        if bounded:
            return None
    return None if pending.passes and pending.failure() else pending.wait()


def passed(store: Store, name: str, error: BaseException) -> bool:
    """Whether training goes on although `name`, which `store` was to get, failed with `error`; then
    it is counted and said. An `OSError` is of files that a trainer has beside its store."""
    if not (background_of(store).goes_on and (passes(error) or isinstance(error, OSError))):
        return False
    outages_of(store).missed(name, error, tell=True)
    return True


def raise_overdue(store: Store) -> None:
    """Raise `Unavailable` if nothing was durable for longer than `max_unsaved_steps`."""
    if overdue := outages_of(store).overdue(background_of(store).max_unsaved_steps):
        raise overdue
