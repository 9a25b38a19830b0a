"""Does a training go on although a save failed? What its `Async(on_error=…)` says, for plugins."""

from ckptstore.commit.outages import Outages, passes
from ckptstore.core.options import Async
from ckptstore.internals import PendingCommit
from ckptstore.snapshot import Snapshot
from ckptstore.store import Store, internals_of


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
