"""Saves of a trainer that go on behind its loop: what follows once a commit is durable, and how a
failure reaches the loop.

The ranks of a training act together here: what fails on one of them fails on all, so that none
waits for another that has left.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ckptstore import Ranks
from ckptstore.plugin.ranks import collective_of
from ckptstore.plugin.snapshots import PendingCommit, Snapshot

T = TypeVar("T")


class BackgroundSaves:
    """The save in flight, if any, of one trainer."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._last: tuple[PendingCommit, Future[None]] | None = None

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

    def settle(self) -> None:
        """Wait until the last save is durable and what follows is done. Raises what failed, once,
        on every rank."""
        last, self._last = self._last, None

        def wait() -> None:
            if last:
                pending, followed = last
                pending.wait()
                followed.result()

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


def as_first_rank(ranks: Ranks, what: str, act: Callable[[], Any]) -> Any:
    """The result of `act` on the first rank, on every rank: values that JSON has. The others do not
    call it."""
    peers = collective_of(ranks.process_group, ranks.timeout_s)
    if peers is None:
        return act()
    return peers.share(what, lambda: act() if peers.leads else None, lambda found: found[0])
