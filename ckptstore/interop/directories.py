"""How do the checkpoint directories of a trainer and their commits stay together?

The commit of a directory has a tag, its *hold*, while the directory exists. Trainers delete
directories on their own; the next adoption removes the hold of one that is gone, and its commit is
forgotten as soon as a policy says so.

One process of a training has such an object, and uses it from one thread.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from ckptstore.adopt.hashed_files import FileChanged
from ckptstore.adopt.materializing import is_adopted, manifest_of, refill
from ckptstore.adoption import Holds, make_hollow
from ckptstore.core.model import Skipped
from ckptstore.errors import CkptStoreError, Corrupt, NotFound
from ckptstore.maintenance.retention import Policy
from ckptstore.objects.pointer_files import HOLLOW_POINTER, is_pointer
from ckptstore.open_store import open_pointer
from ckptstore.snapshot import Snapshot, contents_of
from ckptstore.store import Store, internals_of

logger = logging.getLogger("ckptstore")


class CheckpointDirectories:
    """Directories that lie beside each other, and their commits in `store`.

    Args:
        store: The store; its run has the commits.
        whole: Directories of the newest commits that keep all files; None: all of them.
        keep: Policies; after each adoption, what none of them keeps is forgotten and collected.
            Commits whose directory exists stay.
    """

    def __init__(self, store: Store, *, whole: int | None = 1, keep: Sequence[Policy] = ()) -> None:
        self.store, self._whole, self._keep = store, whole, list(keep)
        self.skipped: tuple[Skipped, ...] = ()
        self._thread = ThreadPoolExecutor(1, "ckptstore-adopt")
        self._pending: Future[Snapshot] | None = None

    def start(
        self,
        place: Path,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """Adopt the complete directory `place` in the background, after what is under way.

        While `busy()`, no directory becomes hollow: something else reads them.
        """
        self.settle()
        self._pending = self._thread.submit(
            partial(self._adopt, place, step=step, metrics=metrics, busy=busy)
        )

    def settle(self) -> Snapshot | None:
        """Wait until the adoption under way is durable, and return its commit. Raises its error,
        once."""
        pending, self._pending = self._pending, None
        return pending.result() if pending else None

    def drain(self) -> None:
        """As `settle`, but log the error: another one is on its way to the caller."""
        try:
            self.settle()
        except CkptStoreError as error:
            logger.error("the last save was not committed: %s", error)

    def close(self) -> None:
        """Wait, raise the error that nobody has seen, and end the thread."""
        try:
            self.settle()
        finally:
            self._thread.shutdown()

    def _adopt(
        self,
        place: Path,
        *,
        step: int | None,
        metrics: Mapping[str, float] | None,
        busy: Callable[[], bool],
    ) -> Snapshot:
        holds = self._holds_of(place)
        made = self.store.adopt(place, step=step, metrics=metrics, tag=holds.tag(place))
        try:
            holds.renew()
            if self._whole is not None and not busy():
                self._make_hollow(place.parent, self._whole, holds)
            if self._keep and self.store.forget(self._keep).forgotten:
                self.store.gc()
        except CkptStoreError as error:
            logger.warning("commit %s is durable; room was not made: %s", made.id[:12], error)
        return made

    def _holds_of(self, place: Path) -> Holds:
        """The holds of the directories beside `place`."""
        return Holds(internals_of(self.store), Path(os.path.realpath(place)).parent)

    def _make_hollow(self, parent: Path, whole: int, holds: Holds) -> None:
        """Make all but the directories of the newest `whole` commits hollow."""
        internals, tags = internals_of(self.store), self.store.tags()
        held = {
            commit: place
            for place in parent.iterdir()
            if place.is_dir() and (commit := tags.get(holds.tag(place)))
        }
        newest_first = [info.id for info in self.store.log() if info.id in held]
        for commit in newest_first[whole:]:
            place = held[commit]
            if not os.path.lexists(place / HOLLOW_POINTER):
                try:
                    make_hollow(internals, place, self.store.checkout(commit), holds)
                except FileChanged as error:
                    logger.info("%s stays as it is: %s", place, error)
                except Corrupt as error:
                    logger.warning("%s stays whole, its commit is damaged: %s", place, error)

    def held(self, place: Path) -> Snapshot | None:
        """The commit of the directory `place`; None if it has none. A hollow one may have been
        moved, or be of another store."""
        if is_pointer(place / HOLLOW_POINTER):
            try:
                return self.store.checkout(place)
            except NotFound:
                return open_pointer(place)
        commit = self.store.tags().get(self._holds_of(place).tag(place))
        return self.store.checkout(commit) if commit else None

    def fill(self, place: Path, snapshot: Snapshot) -> None:
        """Make the directory `place` what `snapshot` has; what differs is named and written again.

        Raises `Corrupt` or `NotFound` if the commit is damaged.
        """
        if place.exists():
            contents = contents_of(snapshot)
            for name in refill(contents, place, manifest_of(contents, snapshot.id)):
                logger.warning(
                    "%s was not as it was saved: written again from commit %s",
                    place / name,
                    snapshot.id[:12],
                )
        else:
            snapshot.materialize(place)
        if self.store.tags().get(hold := self._holds_of(place).tag(place)) != snapshot.id:
            with suppress(NotFound):  # a commit of another store
                self.store.tag(hold, snapshot)

    def newest(self, place_of: Callable[[Snapshot], Path], *, required: str) -> Path | None:
        """Fill the directory of the newest commit of this run that verifies; None if the run has
        none with the file `required`.

        Damaged commits are passed over with a warning, and listed by `skipped`. Raises `Corrupt`
        if all are.
        """
        skipped: list[Skipped] = []
        internals = internals_of(self.store)
        for reader, info in internals.candidates(None):
            try:
                snapshot = internals.snapshot(info, reader)
                if required not in files_of(snapshot):
                    continue
                place = place_of(snapshot)
                self.fill(place, snapshot)
            except (Corrupt, NotFound) as error:
                skipped.append(Skipped(info.id, info.step, str(error)))
                logger.warning("skipped commit %s (step %s): %s", info.id[:12], info.step, error)
                continue
            internals.parent_tracker.now(snapshot.id)
            self.skipped = tuple(skipped)
            return place
        self.skipped = tuple(skipped)
        if skipped:
            raise Corrupt(
                f"none of the {len(skipped)} commits of run {self.store.run} can be restored; the "
                f"newest: {skipped[0].reason}"
            )
        return None


def files_of(snapshot: Snapshot) -> list[str]:
    """The names of the files in an adopted directory; none for any other commit."""
    contents = contents_of(snapshot)
    return list(manifest_of(contents, snapshot.id).files) if is_adopted(contents) else []
