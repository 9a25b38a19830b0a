"""Does another training commit to the same run?

Nothing is lost by that, but `resume` takes the newest commit of a run, whoever made it. A job that
was requeued while it still ran elsewhere is how it comes about.
"""

import logging
from collections.abc import Sequence

from ckptstore.core.ids import CommitId

logger = logging.getLogger("ckptstore")


class RunWatch:
    """Looks at each commit of one open store, and warns once."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._made: CommitId | None = None
        self._told = False

    def after(
        self, commit: CommitId, parents: Sequence[CommitId], newest: Sequence[CommitId]
    ) -> None:
        """After `commit`, of which `newest` are the newest of its run, in order: warn if it follows
        the one made before it, and somebody else has committed between the two.

        A commit after a restore has another parent: to go back, and on from there, is no sign of
        others.
        """
        before, self._made = self._made, commit
        between = newest[-2] if len(newest) > 1 and newest[-1] == commit else before
        if self._told or before is None or tuple(parents) != (before,) or between == before:
            return
        self._told = True
        logger.warning(
            "run %s: somebody else made commit %s between two of this training; `resume` "
            "takes the newest, whoever made it: end the other training, or give each a run of its "
            "own (run=…)",
            self._run,
            str(between)[:12],
        )
