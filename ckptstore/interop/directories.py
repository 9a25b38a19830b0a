"""How do the checkpoint directories of a trainer and their commits stay together?

A whole directory needs no commit, and which one it has is what this process remembers. A hollow one
has a pointer, and a hold in the store, which stays when a trainer deletes the directory: a copy may
lie anywhere (`plugins.adopt.adoption`). Somebody who makes no copies says so with `release`.

One process of a training has such an object, and uses it from one thread.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ckptstore import Store, open_pointer
from ckptstore.errors import CkptStoreError, Corrupt, NotFound, Unavailable
from ckptstore.plugin import stores
from ckptstore.plugin.model import CommitId, HoldId, Skipped, hold_tag
from ckptstore.plugin.pointers import HOLLOW_POINTER, Pointer, is_pointer, read_pointer
from ckptstore.plugin.policies import Policy
from ckptstore.plugin.snapshots import Snapshot, contents_of
from ckptstore.plugin.stores import background_of, outages_of, passed, raise_overdue
from ckptstore.plugins.adopt.commit_directory import message_of
from ckptstore.plugins.adopt.hashed_files import FileChanged
from ckptstore.plugins.adopt.materializing import differing, is_adopted, manifest_of, refill

logger = logging.getLogger("ckptstore")


class CheckpointDirectories:
    """Directories that lie beside each other, and their commits in `store`.

    Args:
        store: The store; its run has the commits.
        whole: Directories of the newest commits that keep all files; None: all of them.
        keep: Policies; after each adoption, what none of them keeps is forgotten and collected.
            Commits whose directory exists stay, and those of hollow directories until they are
            released.
        release: Release the holds of hollow directories that are deleted from their place, which
            nobody moves or copies elsewhere.
    """

    def __init__(
        self,
        store: Store,
        *,
        whole: int | None = 1,
        keep: Sequence[Policy] = (),
        release: bool = False,
    ) -> None:
        self.store, self._whole, self._keep = store, whole, list(keep)
        self._let_go, self._told = release, False
        self._commits: dict[str, CommitId] = {}
        self._seen: dict[HoldId, str] = {}
        self._adopting = ""
        self.skipped: tuple[Skipped, ...] = ()
        self._thread = ThreadPoolExecutor(1, "ckptstore-adopt")
        self._pending: Future[Snapshot | None] | None = None

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
        if self._makes_way(step):
            self._adopting = _real(place)
            self._pending = self._thread.submit(
                partial(self._adopt_or_go_on, place, step=step, metrics=metrics, busy=busy)
            )

    def _makes_way(self, step: int | None) -> bool:
        """Wait for the adoption under way; False if it hangs, and training goes on without
        another."""
        outages_of(self.store).asked(step)
        if error := self._hangs():
            name = f"the commit of step {step}"
            late = Unavailable(f"{name} was skipped: an earlier one hangs")
            late.__cause__ = error
            passed(self.store, name, late)
        else:
            self.settle()
        raise_overdue(self.store)
        return not error

    def _hangs(self) -> TimeoutError | None:
        """Where training goes on without a commit, wait up to `max_wait_s` for the adoption under
        way; why it is waited for no longer."""
        background = background_of(self.store)
        if background.goes_on and self._pending:
            try:
                self._pending.exception(background.max_wait_s)
            except TimeoutError as error:
                return error
        return None

    def _adopt_or_go_on(self, place: Path, *, step: int | None, **options: Any) -> Snapshot | None:
        try:
            return self._adopt(place, step=step, **options)
        except (CkptStoreError, OSError) as error:
            if passed(self.store, f"the commit of step {step}", error):
                return None
            raise

    def settle(self) -> Snapshot | None:
        """Wait until the adoption under way is durable, and return its commit. Raises its error,
        once."""
        pending, self._pending = self._pending, None
        return pending.result() if pending else None

    def finish(self) -> None:
        """As `settle`, for a caller who waits for each save; but where training goes on without
        one, no longer than `max_wait_s`."""
        if not self._hangs():
            self.settle()

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

    def forget(self, place: Path) -> None:
        """Prepare for a program that writes all files of the directory `place` again: its commit
        is none of the directory any more."""
        if not background_of(self.store).goes_on or self._adopting == _real(place):
            self.settle()
        self._commits.pop(_real(place), None)
        (place / HOLLOW_POINTER).unlink(missing_ok=True)

    def _adopt(
        self,
        place: Path,
        *,
        step: int | None,
        metrics: Mapping[str, float] | None,
        busy: Callable[[], bool],
    ) -> Snapshot:
        made = self.store.adopt(place, step=step, metrics=metrics)
        self._commits[_real(place)] = made.id
        try:
            if self._whole is not None and not busy():
                self._make_hollow(place.parent, self._whole)
            self._release(place.parent)
            if self._keep:
                self._forget(place.parent)
        except CkptStoreError as error:
            logger.warning("commit %s is durable; room was not made: %s", made.id[:12], error)
        return made

    def _make_hollow(self, parent: Path, whole: int) -> None:
        """Make all but the directories of the newest `whole` commits hollow."""
        places = self._probable(parent)
        newest_first = [info.id for info in self.store.log() if info.id in places]
        for commit in newest_first[whole:]:
            place = places[commit]
            if not os.path.lexists(place / HOLLOW_POINTER):
                try:
                    stores.make_hollow(self.store, place, self.store.checkout(commit))
                except FileChanged as error:
                    logger.info("%s stays as it is: %s", place, error)
                except (Corrupt, NotFound) as error:
                    logger.warning("%s stays whole, its commit is damaged: %s", place, error)

    def _forget(self, parent: Path) -> None:
        """Forget and collect what no policy keeps. The commits of directories that exist stay."""
        pinned = {commit: f"of {place.name}" for commit, place in self._probable(parent).items()}
        if stores.forget_by_policy(self.store, self._keep, pinned):
            self.store.gc()

    def _release(self, parent: Path) -> None:
        """Release the holds of directories that were in `parent` at the last save, and are gone; or
        say how to, once."""
        here = {
            pointer.hold: place.name
            for place in _directories(parent)
            if (pointer := _pointer_in(place)) and pointer.hold
        }
        gone = {hold: name for hold, name in self._seen.items() if hold not in here}
        self._seen = here
        if gone and self._let_go:
            tags = self.store.tags()
            holds = [tag for hold in gone if (tag := hold_tag(hold)) in tags]
            if holds:
                self.store.release(*holds)
        elif gone and self._keep and not self._told:
            self._told = True
            logger.warning(
                "%s is gone from %s, and its commit is kept, since copies of a hollow directory "
                "need it: `ckptstore release --except-in %s` lets such commits go, and "
                "release=True does so after each save",
                ", ".join(sorted(gone.values())),
                parent,
                parent,
            )

    def _probable(self, parent: Path) -> dict[CommitId, Path]:
        """The directories in `parent`, by what is probably their commit: that of the pointer, the
        one that this process knows, or the newest that was adopted under this name. It serves to
        keep a commit, or to look for one; nothing is removed before the contents were compared."""
        adopted: dict[str, CommitId] = {}
        for info in self.store.log(run=self.store.run):
            adopted.setdefault(info.message, info.id)
        found: dict[CommitId, Path] = {}
        for place in _directories(parent):
            pointer = _pointer_in(place)
            known = self._commits.get(_real(place)) or adopted.get(message_of(place))
            if commit := pointer.id if pointer else known:
                found[commit] = place
        return found

    def held(self, place: Path) -> Snapshot | None:
        """The commit of the directory `place`; None if it has none, or is whole and of an earlier
        process, which cannot be told from one with other bytes but by reading it. A hollow one may
        have been moved, or be of another store."""
        if is_pointer(place / HOLLOW_POINTER):
            try:
                return self.store.checkout(place)
            except NotFound:
                return open_pointer(place)
        commit = self._commits.get(_real(place))
        return self.store.checkout(commit) if commit else None

    def is_saved(self, place: Path) -> bool:
        """Whether the directory `place` has a commit. One that this process has not made is read
        and compared."""
        if is_pointer(place / HOLLOW_POINTER) or _real(place) in self._commits:
            return True
        commits = {path: commit for commit, path in self._probable(place.parent).items()}
        if place not in commits:
            return False
        snapshot = self.store.checkout(commits[place])
        contents = contents_of(snapshot)
        return is_adopted(contents) and not differing(place, manifest_of(contents, snapshot.id))

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
        self._commits.pop(_real(place), None)
        with suppress(NotFound):  # a commit of another store
            self._commits[_real(place)] = self.store.checkout(snapshot.id).id

    def newest(self, place_of: Callable[[Snapshot], Path], *, required: str) -> Path | None:
        """Fill the directory of the newest commit of this run that verifies; None if the run has
        none with the file `required`.

        Damaged commits are passed over with a warning, and listed by `skipped`. Raises `Corrupt`
        if all are.
        """
        skipped: list[Skipped] = []
        for commit in stores.candidates(self.store):
            try:
                snapshot = commit.snapshot()
                if required not in files_of(snapshot):
                    continue
                place = place_of(snapshot)
                self.fill(place, snapshot)
            except (Corrupt, NotFound) as error:
                skipped.append(Skipped(commit.id, commit.step, str(error)))
                logger.warning(
                    "skipped commit %s (step %s): %s", commit.id[:12], commit.step, error
                )
                continue
            stores.follow(self.store, snapshot)
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


def _directories(parent: Path) -> list[Path]:
    """The directories in `parent`."""
    return [path for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []


def _pointer_in(place: Path) -> Pointer | None:
    pointer = place / HOLLOW_POINTER
    return read_pointer(pointer) if is_pointer(pointer) else None


def _real(place: Path) -> str:
    return os.path.realpath(place)
