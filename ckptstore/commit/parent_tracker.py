"""Which commit the next one descends from, also while one is in flight."""

import threading
from typing import Any

from ckptstore.commit.pending import Pending
from ckptstore.core.ids import CommitId


class ParentTracker:
    """Which commit the next one descends from: the one committed, put in flight or restored
    last."""

    def __init__(self) -> None:
        self._tip: CommitId | Pending[Any] | None = None
        self._lock = threading.Lock()

    def now(self, commit: CommitId) -> None:
        """The next commit descends from `commit`."""
        with self._lock:
            self._tip = commit

    def then(self, pending: Pending[Any]) -> CommitId | Pending[Any] | None:
        """The next commit descends from `pending`; gives what `pending` itself descends from."""
        with self._lock:
            before, self._tip = self._tip, pending
            return before

    def parents(self) -> tuple[CommitId, ...]:
        """The parents of a commit made now, with nothing in flight."""
        with self._lock:
            return parents_of(self._tip)


def parents_of(tip: CommitId | Pending[Any] | None) -> tuple[CommitId, ...]:
    """The parents that `tip` stands for; none means the run's newest commit. A pending commit must
    have ended."""
    commit = tip.tip if isinstance(tip, Pending) else tip
    return (commit,) if commit else ()
