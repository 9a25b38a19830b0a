"""May training go on although a commit failed, and how long has nothing been durable?

`Async(on_error="warn")` asks this. The answer depends on the class of the error alone, so that all
ranks of a commit, which raise one error, find the same.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ckptstore import errors
from ckptstore.core import forks
from ckptstore.core.ids import CommitId
from ckptstore.core.text import seconds_text
from ckptstore.errors import CkptStoreError, Unavailable

logger = logging.getLogger("ckptstore")

PASSES: Mapping[type[CkptStoreError], bool] = {
    errors.Unavailable: True,  # storage did not answer, refused, or failed
    errors.NoSpace: True,
    errors.Busy: True,
    errors.ReadOnly: True,  # of a background commit: a mount or a token lost its right to write
    errors.Cancelled: False,
    errors.Conflict: False,  # somebody must decide
    errors.Corrupt: False,
    errors.Untrusted: False,
    errors.InvalidInput: False,
    errors.NotFound: False,
    errors.Thinned: False,
    CkptStoreError: False,
}
"""Whether training may go on after an error of the class. What is not here (`TypeError`,
`KeyboardInterrupt`, …) is a mistake or a wish to end, and does not pass."""


def passes(error: BaseException) -> bool:
    """Whether training may go on after `error`."""
    return next((PASSES[kind] for kind in type(error).__mro__ if kind in PASSES), False)


@dataclass(frozen=True, slots=True)
class Health:
    """How the commits of one store object fare.

    Attributes:
        last_durable: The newest commit that this object made; None before the first.
        last_step: Its step.
        unsaved_steps: Steps that training would lose: from `last_step`, or else from the first step
            that was to be saved, to the last one. Commits are counted where they have no step.
        failures: Commits that failed or were skipped, in a row.
        failing_since: When the first of them failed, in seconds since 1970; None while all is well.
        last_error: What the last failure said.
    """

    last_durable: CommitId | None = None
    last_step: int | None = None
    unsaved_steps: int = 0
    failures: int = 0
    failing_since: float | None = None
    last_error: str | None = None


class Outages:
    """Counts the commits of one store object that fail, and says once that they do. An outage lasts
    from a failure to the next commit that is durable."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._lock = forks.lock()
        self.durable: tuple[CommitId, int | None] | None = None
        self.failing_since: float | None = None
        self.level = logging.WARNING
        """How loud it is said: of several ranks, one warns."""
        self._first: int | None = None  # step to be saved, as long as nothing is durable
        self._asked: int | None = None  # the last one
        self._told = False
        self._error = ""
        self._missed: list[str] = []

    def health(self) -> Health:
        with self._lock:
            commit, step = self.durable or (None, None)
            return Health(
                commit,
                step,
                self._unsaved(),
                len(self._missed),
                self.failing_since,
                self._error if self.failing_since else None,
            )

    def asked(self, step: int | None) -> None:
        """A commit of `step` was asked for."""
        if self._first is None:
            self._first = step
        self._asked = step

    def failing(self, name: str, error: BaseException, *, tell: bool) -> None:
        """An attempt at the commit `name` failed. With `tell`, training goes on."""
        with self._lock:
            self.failing_since = self.failing_since or time.time()
            self._error = str(error)
            told, self._told = self._told, self._told or tell
        if tell and not told:
            logger.log(
                self.level,
                "%s to %s is not durable, and training goes on without it; this is said once until "
                "a commit is durable again: %s",
                name,
                self._place,
                error,
            )

    def missed(self, name: str, error: BaseException, *, tell: bool) -> None:
        """The commit `name` will not be made."""
        self.failing(name, error, tell=tell)
        with self._lock:
            self._missed.append(name)

    def recovered(self, name: str) -> None:
        """The commit `name` is durable; ends the outage."""
        with self._lock:
            since, self.failing_since = self.failing_since, None
            missed, self._missed = self._missed, []
            told, self._told = self._told, False
        if told and since is not None:
            logger.log(
                self.level,
                "%s to %s is durable, after %s without one; %s",
                name,
                self._place,
                seconds_text(time.time() - since),
                f"not made: {_listed(missed)}" if missed else "none is missing",
            )

    def overdue(self, limit: int | None) -> Unavailable | None:
        """The error that ends training if more than `limit` steps are not durable."""
        with self._lock:
            unsaved, since = self._unsaved(), self.failing_since
            if limit is None or since is None or unsaved <= limit:
                return None
            return Unavailable(
                f"nothing was durable in {self._place} for {unsaved} steps and "
                f"{seconds_text(time.time() - since)}, and max_unsaved_steps is {limit}; "
                f"{_listed(self._missed)} failed, the last one because: {self._error}"
            )

    def _unsaved(self) -> int:
        begun = self.durable[1] if self.durable else self._first
        steps = self._asked - begun if None not in (self._asked, begun) else 0  # type: ignore[operator]
        return max(steps, len(self._missed))


def _listed(names: list[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names) or "a commit"
    return f"{names[0]}, {len(names) - 2} more, {names[-1]}"
