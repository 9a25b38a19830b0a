"""Saves of a trainer that go on behind its loop: what follows once a commit is durable, and how a
failure reaches the loop.

The ranks of a training act together here: what fails on one of them fails on all, so that none
waits for another that has left.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ckptstore import Ranks, Store
from ckptstore.errors import Unavailable
from ckptstore.plugin.ranks import collective_of
from ckptstore.plugin.snapshots import PendingCommit, Snapshot
from ckptstore.plugin.stores import background_of, outages_of, passed, raise_overdue

T = TypeVar("T")


class BackgroundSaves:
    """The save in flight, if any, of one trainer."""

    def __init__(self, store: Store, ranks: Ranks) -> None:
        self._store, self._ranks = store, ranks
        self._last: tuple[PendingCommit, Future[None]] | None = None
        self._skipped: Unavailable | None = None

    def follow(self, pending: PendingCommit, act: Callable[[Snapshot], object]) -> None:
        """Call `act` with the commit once it is durable, on the thread that made it."""
        followed: Future[None] = Future()

        def end(ended: PendingCommit) -> None:
            try:
                if ended.failure() is None:  # else `settle` raises it
                    act(ended.wait())
                followed.set_result(None)
            except BaseException as error:
                followed.set_exception(error)

        self._last = pending, followed
        pending.then(end)

    def make_way(self, step: int | None) -> bool:
        """Whether a save of `step` may begin, which every rank finds alike.

        Without `Async(on_error="warn")` this is `settle`. With it, a failure that passes is left to
        the counts of the store, and the save is skipped if the last one hangs.
        """
        if not background_of(self._store).goes_on:
            self.settle()
            return True
        name = "the save" if step is None else f"the save of step {step}"
        outages_of(self._store).asked(step)
        if shared(self._ranks, "save: make way", lambda: self._look(newer=True)):
            self._last = self._skipped = None
            return True
        self._skip(name, Unavailable(f"{name} was skipped: the last one hangs"))
        return False

    def attempt(self, what: str, act: Callable[[], T]) -> T | None:
        """As `together`; None if training goes on without this save, whose files or directories
        could not be written."""
        if not background_of(self._store).goes_on:
            return together(self._ranks, what, act)

        def with_own_errors() -> T:
            try:
                return act()
            except OSError as error:
                raise Unavailable(f"a save cannot write its files: {error}") from error

        try:
            return together(self._ranks, what, with_own_errors)
        except Unavailable as error:
            self._skip("the save", error)
            return None

    def _skip(self, name: str, error: Unavailable) -> None:
        self._skipped = error
        passed(self._store, name, error)

    def finish(self) -> None:
        """Wait for the save that just began, as a caller does who waits for each."""
        if background_of(self._store).goes_on:
            shared(self._ranks, "save: finish", lambda: self._look(newer=False))
        else:
            self.settle()

    def _look(self, *, newer: bool) -> bool:
        """Whether the last save and what follows it have ended. Raises what does not pass."""
        if self._last is None:
            return True
        pending, followed = self._last
        if newer:
            pending.supersede()
        try:
            left = background_of(self._store).max_wait_s - pending.age_s
            error = followed.exception(max(0.0, left))
        except TimeoutError:
            raise_overdue(self._store)
            return False
        if pending.failure() and not pending.passes:
            pending.wait()  # raises it
        if error is not None and not passed(self._store, "what follows a save", error):
            raise error
        return True

    def settle(self) -> None:
        """Wait until the last save is durable and what follows is done. Raises what failed, once,
        on every rank."""
        last, self._last = self._last, None
        skipped, self._skipped = self._skipped, None

        def wait() -> None:
            if last:
                pending, followed = last
                pending.wait()
                followed.result()
            if skipped:
                raise skipped

        together(self._ranks, "save: settle", wait)


def together(ranks: Ranks, what: str, act: Callable[[], T]) -> T:
    """The result of `act` on this rank; an error on any rank is raised on every rank. `what` has
    at most 16 characters."""
    peers = collective_of(ranks.process_group, ranks.timeout_s)
    if peers is None:
        return act()
    found: list[T] = []
    peers.share(what, lambda: found.append(act()))
    return found[0]


def shared(ranks: Ranks, what: str, look: Callable[[], bool]) -> bool:
    """Whether `look` is true on every rank; an error on any rank is raised on every rank."""
    peers = collective_of(ranks.process_group, ranks.timeout_s)
    return bool(peers.share(what, look, all)) if peers else look()


def as_first_rank(ranks: Ranks, what: str, act: Callable[[], Any]) -> Any:
    """The result of `act` on the first rank, on every rank: values that JSON has. The others do not
    call it."""
    peers = collective_of(ranks.process_group, ranks.timeout_s)
    if peers is None:
        return act()
    return peers.share(what, lambda: act() if peers.leads else None, lambda found: found[0])
