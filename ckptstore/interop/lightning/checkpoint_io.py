"""The plugins through which Lightning and Fabric save, load and remove checkpoints.

At the path or URL of a checkpoint lies a pointer, so that Lightning finds it, counts its versions
and links to it as it does with files. Only rank 0 saves, so a commit is that of one process,
whatever ranks there are.

A commit whose path was removed or taken by another is forgotten when its step is none of the two
newest. So `ckpt_path="last"` has an earlier step to fall back to, also with `save_top_k=1`.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ckptstore import Async, Ranks, Storage, Store, open
from ckptstore.errors import (
    CkptStoreError,
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    Unavailable,
)
from ckptstore.interop.leaving import read_leaving, write_leaving
from ckptstore.interop.lightning.packages import (
    checkpoint_of,
    fabrics,
    storable,
    torch_io,
)
from ckptstore.interop.lightning.pointers import (
    files_in,
    is_pointer_file,
    is_url,
    place_of,
    pointer_at,
    pointer_of,
    publish,
    remove,
    resolved,
)
from ckptstore.plugin import stores
from ckptstore.plugin.files import sync_path
from ckptstore.plugin.handles import is_path
from ckptstore.plugin.model import CommitId, CommitInfo, digest, parse_ref
from ckptstore.plugin.pointers import Pointer
from ckptstore.plugin.policies import Policy
from ckptstore.plugin.ranks import ALONE, collective_of
from ckptstore.plugin.snapshots import PendingCommit, Snapshot
from ckptstore.plugin.stores import background_of, open_commit, outcome, passed
from ckptstore.plugin.text import count_text

logger = logging.getLogger("ckptstore")

SUFFIX = ".ckpt"

_SCRATCH = re.compile(r"\.(temp|lr_find_.*|scale_batch_size_.*)\.ckpt")
"""Files that Lightning writes for itself, and removes."""

_RESUMES = re.compile(r"(last|hpc_ckpt)([-_].*)?\.ckpt")
"""Names of what Lightning resumes from, whichever commit that is."""

_LABELS = frozenset({"step", "tag", "metrics", "message"})
ALONE_RANKS = Ranks(process_group=ALONE)
_RECENT = 32
"""Newest commits of a run among which those of its last two steps are."""


class StoreCheckpointIO:
    """A `CheckpointIO` that saves to a store: `Trainer(plugins=[StoreCheckpointIO("checkpoints")])`
    or `Fabric(plugins=[…])`. A save is durable when it returns.

    The step of a commit is `global_step`. Its metric is what `ModelCheckpoint` monitors, if the
    path is one of its best. `trainer.save_checkpoint(path, storage_options={"tag": …, "metrics":
    …})` and `labels` say more.

    A path that is given to load is that of a pointer, of a file of `torch.save`, or a ref of the
    store (`"best:val_loss"`). If what Lightning resumes from (`last.ckpt`) is damaged, the newest
    earlier checkpoint of its directory that verifies is loaded, on all ranks the same, and a
    warning says so.

    Args:
        store: Directory or URL of the store, opened at the first use and closed by `teardown`.
        run: The run of the commits.
        allow_pickle: Pickle values that have no safe encoding, and read such.
        storage: Where and how a store keeps objects; default: `Storage(on_full="gc")`.
        background: How asynchronous commits run.
        threads: As for `ckptstore.open`.

    Raises:
        ImportError: No supported release of Lightning is installed.
        InvalidInput: `store` is no directory or URL.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        run: str | None = None,
        allow_pickle: bool = False,
        storage: Storage | None = None,
        background: Async | None = None,
        threads: int | None = None,
    ) -> None:
        fabrics()
        if isinstance(store, Store):
            raise InvalidInput(
                "a plugin opens its store itself, in each process: pass store.url, and run="
            )
        self._place = os.fspath(store)
        self._options: dict[str, Any] = {
            "run": run,
            "storage": storage or Storage(on_full="gc"),
            "background": background,
            "threads": threads,
        }
        self._allow_pickle = allow_pickle
        self._begin()

    def _begin(self) -> None:
        self._opened: tuple[int, Store] | None = None
        self._labels: dict[str, Any] = {}
        self._leaving: list[CommitId] = []
        self._warned_of_order = False
        self._lacking: BaseException | None = None
        """What the last save failed with, where training goes on without it."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: self.__dict__[key] for key in ("_place", "_options", "_allow_pickle")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @property
    def store(self) -> Store:
        """The store, opened in this process when it is first needed. `teardown` closes it."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), open(self._place, **self._options)
        return self._opened[1]

    @contextmanager
    def labels(self, **labels: Any) -> Iterator[None]:
        """What is saved within the block gets this `step`, `tag`, `message` and these `metrics`,
        as in `Store.commit`. For Fabric, whose `save` has no place for them."""
        _check_labels(labels)
        before, self._labels = self._labels, {**self._labels, **labels}
        try:
            yield
        finally:
            self._labels = before

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Commit `checkpoint`, and write the pointer at `path`."""
        if _SCRATCH.fullmatch(os.path.basename(path)):
            torch_io().save_checkpoint(checkpoint, path, storage_options)
            return
        place = place_of(path)
        self._warn_of_order(checkpoint)
        label = self._label(checkpoint, place, storage_options)
        self._save(storable(checkpoint), place, label)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """The checkpoint at `path`, or that of a ref.

        Raises `FileNotFoundError` if nothing is at `path`, `NotFound` for an unknown ref, `Corrupt`
        for a damaged commit, and for `last.ckpt` if no earlier one verifies.
        """
        self._settle()
        allow_pickle = self._allow_pickle if weights_only is None else not weights_only
        read = partial(checkpoint_of, map_location=map_location, allow_pickle=allow_pickle)
        is_file = is_url(path) or os.path.isfile(path)
        if is_file and not is_pointer_file(path):
            checkpoint: dict[str, Any] = torch_io().load_checkpoint(
                path, map_location, weights_only
            )
            return checkpoint
        if path == "latest" or (
            is_file
            and _RESUMES.fullmatch(os.path.basename(path))
            and self._may_be_ours(pointer_at(resolved(path)))
        ):
            return self._resumed(path, read)
        snapshot, is_own = self._found(path)
        with snapshot:
            checkpoint = read(snapshot)
        if is_own:
            stores.follow(self.store, snapshot)
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the pointer at `path`, and forget its commit when its step is none of the two
        newest. A tagged commit stays. Nothing happens if nothing is there."""
        if self._lacking is None:  # else what was to take its place is not there
            self._remove(path)

    def teardown(self) -> None:
        """Close the store. Lightning calls this at the end of each fit; the next call of the plugin
        opens it again. Raises what the last save failed with, if training went on without it."""
        opened, self._opened = self._opened, None
        if opened is not None and opened[0] == os.getpid():
            opened[1].close()
        lacking, self._lacking = self._lacking, None
        if lacking is not None:
            raise lacking

    def link(self, path: str | os.PathLike[str], link: str | os.PathLike[str]) -> None:
        """Make the file at `link` a symbolic link to `path`, at once, whatever it was."""
        place = Path(os.path.abspath(link))
        fresh = place.with_name(f".{place.name}.link")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(os.path.relpath(path, place.parent))
        fresh.replace(place)
        sync_path(place.parent)

    def retain(self, policies: Sequence[Policy], directory: str | os.PathLike[str]) -> None:
        """Forget the commits of this run that no policy keeps, and remove their pointers in
        `directory`. What prevents that, such as a policy about a metric that no commit has yet, is
        logged as a warning, and all commits stay until the next save."""
        try:
            plan = self.store.forget(list(policies))
        except CkptStoreError as error:
            logger.warning("the checkpoint is durable; room was not made: %s", error)
            return
        gone = {decision.commit for decision in plan.forgotten}
        for path in files_in(directory, SUFFIX) if gone else ():
            pointer = pointer_at(path)
            if pointer is not None and pointer.id in gone:
                with suppress(FileNotFoundError):
                    remove(path)

    def _warn_of_order(self, checkpoint: Mapping[str, Any]) -> None:
        """Warn once of a save within an epoch whose order Lightning does not keep: a resumed epoch
        skips as many batches of another order."""
        if not self._warned_of_order and (batches := _batches_without_order(checkpoint)):
            self._warned_of_order = True
            logger.warning(
                "this checkpoint is within an epoch, after %s: a resume skips as many, and where "
                "the loader shuffles it draws another order, so some samples come twice and others "
                "never; use torchdata's StatefulDataLoader, or save at the ends of epochs "
                "(docs/lightning.md)",
                count_text(batches, "batch", "batches"),
            )

    def _save(self, state: dict[str, Any], place: str, label: dict[str, Any]) -> None:
        options = {**label, "allow_pickle": self._allow_pickle, "ranks": ALONE_RANKS}
        if not background_of(self.store).goes_on:
            self._publish(place, self.store.commit(state, **options))
            return
        self._publish_or_go_on(place, self.store.commit_async(state, **options), bounded=True)

    def _publish_or_go_on(self, place: str, pending: PendingCommit, *, bounded: bool) -> bool:
        """Publish the commit once it is durable. False if training goes on without it."""
        self._lacking = Unavailable(f"{pending.name} was not durable in time")
        try:
            if (snapshot := outcome(self.store, pending, bounded=bounded)) is None:
                self._lacking = pending.failure() or self._lacking
                return False
            self._publish(place, snapshot)
        except (CkptStoreError, OSError) as error:
            if not (pending.done() and not pending.failure()):
                raise
            self._lacking = error
            if not passed(self.store, f"the pointer at {place}", error):
                raise
            return False
        self._lacking = None
        return True

    def _settle(self) -> None:
        """Wait for what is in flight, and raise what failed."""

    def _label(
        self, checkpoint: Mapping[str, Any], place: str, storage_options: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        _check_labels(storage_options or {})
        step = checkpoint.get("global_step", checkpoint.get("step"))
        label = {
            "step": step if type(step) is int else None,
            "metrics": _scores(checkpoint, place),
        }
        label |= {**self._labels, **(storage_options or {})}
        message = label.get("message") or ""
        return {**label, "message": f"{message}\n{place}" if message else place}

    def _publish(self, place: str, snapshot: Snapshot) -> None:
        """Make the file at `place` a pointer to the commit, whatever it was."""
        before = pointer_at(place)
        publish(place, Pointer(self.store.url, snapshot.id))
        self._drop(before, place)

    def _remove(self, path: str | os.PathLike[str]) -> None:
        if os.path.islink(path):
            os.unlink(path)
        elif (pointer := pointer_at(path)) is None:
            torch_io().remove_checkpoint(path)
        else:
            remove(path)
            self._drop(pointer, path)

    def _drop(self, pointer: Pointer | None, path: str | os.PathLike[str]) -> None:
        """Note that a commit has lost its path, and forget those whose turn it is: in this process,
        or in a later one, which finds the others listed beside the path. Those of URLs are listed
        in memory."""
        file = None if is_url(path) else self._leaving_file(Path(path))
        listed = self._leaving if file is None else read_leaving(file)
        leaving = dict.fromkeys(listed)
        if pointer is not None and pointer.is_in(self.store.url):
            leaving[pointer.id] = None
        if not leaving:
            return
        recent = _of_two_steps(self.store.log(_RECENT, run=self.store.run))
        for commit in [commit for commit in leaving if commit not in recent]:
            del leaving[commit]
            with suppress(Conflict, NotFound):  # tagged, or forgotten by somebody else
                self.store.forget(commit)
        if file is None:
            self._leaving = list(leaving)
        else:
            write_leaving(file, list(leaving))

    def _leaving_file(self, path: Path) -> Path:
        """The list of the commits of this run that have lost their paths in a directory."""
        run = digest(self.store.run.encode()).hex()[:16]
        return path.absolute().with_name(f".ckptstore-{run}.leaving")

    def _found(self, path: str | os.PathLike[str]) -> tuple[Snapshot, bool]:
        """The commit at `path`, or of a ref, and whether it is one of this store."""
        if is_url(path) or os.path.isfile(path) or pointer_at(path):
            place = resolved(path)
            pointer = pointer_of(place)
            if pointer.is_in(self.store.url):
                return self.store.checkout(pointer.id), True
            return open_commit(pointer, place), False
        if not _may_be_ref(path):
            raise FileNotFoundError(
                f"Checkpoint file not found: {path}; `ckptstore -s {self._place} log` lists the "
                "commits, whose ids and steps can be loaded as well"
            )
        return self.store.checkout(path), True

    def _may_be_ours(self, pointer: Pointer | None) -> bool:
        """Whether a pointer is one to this store, or too damaged to say."""
        return pointer is None or pointer.is_in(self.store.url)

    def _resumed(
        self, path: str | os.PathLike[str], read: Callable[[Snapshot], dict[str, Any]]
    ) -> dict[str, Any]:
        """The checkpoint at `path`, or the newest before it that verifies on every rank."""
        peers = collective_of()
        commits = self._candidates(path)
        if peers:
            commits = peers.agreed(commits)
        skipped: list[str] = []

        def attempt(commit: CommitId) -> tuple[Snapshot, dict[str, Any]]:
            snapshot = self.store.checkout(commit)
            return snapshot, read(snapshot)

        for commit in commits:
            act = partial(attempt, commit)
            try:
                snapshot, checkpoint = peers.on_all(act) if peers else act()
            except (Corrupt, NotFound) as error:
                skipped.append(str(error))
                logger.warning("%s: skipped commit %s: %s", path, commit[:12], error)
                continue
            if commit != commits[0] and "loops" not in checkpoint:
                continue  # weights alone: nothing to resume from
            if skipped:
                logger.warning("%s: resumed step %s instead", path, snapshot.step)
            stores.follow(self.store, snapshot)
            return checkpoint
        if not skipped:
            raise NotFound(f"{self.store.url} has no checkpoint for {path}")
        raise Corrupt(
            f"none of the {len(skipped)} checkpoints for {path} in {self.store.url} can be "
            f"loaded; the newest: {skipped[0]}"
        )

    def _candidates(self, path: str | os.PathLike[str]) -> list[CommitId]:
        """The commit at `path` and the earlier ones of its run that were saved in its directory,
        newest first; all of them if the pointer cannot be read. For `latest`, those of the run."""
        rows = self.store.log()
        ours = [row for row in rows if row.run == self.store.run]
        if path == "latest":
            return [row.id for row in ours]
        place = resolved(path)
        try:
            first = pointer_of(place).id
        except CkptStoreError as error:
            logger.warning("%s cannot be read: %s", place, error)
            return [row.id for row in ours if _lay_in(row, place)]
        own = next((row for row in rows if row.id == first), None)
        earlier = [
            row.id
            for row in rows
            if own and row.run == own.run and row.n < own.n and _lay_in(row, place)
        ]
        return [first, *earlier]


def _check_labels(labels: Mapping[str, Any]) -> None:
    if not isinstance(labels, Mapping) or not labels.keys() <= _LABELS:
        raise InvalidInput(
            f"storage_options are {labels!r:.80}; wanted a dict with some of "
            f"{', '.join(sorted(_LABELS))}"
        )


def _may_be_ref(path: str | os.PathLike[str]) -> bool:
    if is_path(path) or str(path).endswith(SUFFIX):
        return False
    with suppress(InvalidInput):
        return bool(parse_ref(str(path)))
    return False


def _scores(checkpoint: Mapping[str, Any], place: str) -> dict[str, float]:
    """What each `ModelCheckpoint` monitors, if it saved this path for its score."""
    states = checkpoint.get("callbacks")
    return {
        state["monitor"]: float(state["best_k_models"][place])
        for state in (states.values() if isinstance(states, Mapping) else ())
        if isinstance(state, Mapping)
        and state.get("monitor")
        and place in state.get("best_k_models", {})
    }


def _batches_without_order(checkpoint: Mapping[str, Any]) -> int:
    """The batches of the epoch that a checkpoint of Lightning is within, if no loader gave its
    state; 0 between epochs, and for Fabric, which has no loops."""
    loop = (checkpoint.get("loops") or {}).get("fit_loop") or {}
    progress = loop.get("epoch_loop.batch_progress") or {}
    loaders = (loop.get("state_dict") or {}).get("combined_loader")
    if loaders or progress.get("is_last_batch", True):
        return 0
    return int(progress["current"]["ready"])


def _of_two_steps(rows: Sequence[CommitInfo]) -> frozenset[CommitId]:
    """Of commits, newest first, those of the two newest steps; one without a step is its own."""
    steps = list(dict.fromkeys(row.id if row.step is None else row.step for row in rows))[:2]
    return frozenset(row.id for row in rows if (row.id if row.step is None else row.step) in steps)


def _lay_in(row: CommitInfo, place: str) -> bool:
    """Whether a commit was saved in the directory of `place`: its message ends with its path."""
    return _directory_of(row.message.rpartition("\n")[2]) == _directory_of(place)


def _directory_of(place: str) -> str:
    directory = os.path.dirname(place)
    return directory if is_url(place) else os.path.realpath(directory)
