"""TorchSnapshot 0.1.0's `Snapshot` and `PendingSnapshot` on a store."""

import logging
import os
import threading
from typing import Any

from ckptstore import Ranks, Store
from ckptstore.errors import CkptStoreError, InvalidInput
from ckptstore.interop.torchsnapshot.locator import find_snapshot, store_at
from ckptstore.interop.torchsnapshot.manifest import (
    INTERFACE_VERSION,
    Manifest,
    SnapshotMetadata,
    manifest_of,
)
from ckptstore.interop.torchsnapshot.reading import Index, NoSuchObject, split_rank
from ckptstore.interop.torchsnapshot.stateful import (
    AppState,
    Prepare,
    Taking,
    budget_of,
    check_stateful,
    collected,
)
from ckptstore.plugin.model import CommitId
from ckptstore.plugin.ranks import collective_of
from ckptstore.plugin.snapshots import Snapshot as Commit
from ckptstore.plugin.writing import Pending

logger = logging.getLogger("ckptstore")


class SnapshotFailed(CkptStoreError, RuntimeError):
    """A background snapshot failed; `__cause__` has the reason."""


class NoSuchKey(NoSuchObject, AssertionError):
    """A snapshot has no state under a key: `metadata` lists its keys."""


class MissingKeys(InvalidInput, AssertionError):
    """The target of a restore has keys that the snapshot lacks: leave them out, or pass
    `strict=False`."""


class Snapshot:
    """A snapshot by its path. Nothing is looked up before the first use.

    `path` may be a path given to `take`, the path of any pointer file, or `STORE/REF` for any other
    commit. `pg` are the ranks that restore together, by default the default group.
    `storage_options` are those of `ckptstore.open`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        pg: Any = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.pg = pg
        self._storage_options = storage_options
        self._found: tuple[str, CommitId] | None = None
        self._indexes: dict[int, tuple[Store, Index]] = {}

    @classmethod
    def take(
        cls,
        path: str | os.PathLike[str],
        app_state: AppState,
        pg: Any = None,
        replicated: list[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        _custom_tensor_prepare_func: Prepare | None = None,
        *,
        step: int | None = None,
        metrics: dict[str, float] | None = None,
        allow_pickle: bool = False,
    ) -> "Snapshot":
        """Commit `app_state`, tag it with the snapshot's name, and point the file at `path` to it;
        durable on return.

        With several ranks, all of `pg` call this together. `replicated` are globs of paths
        (`"model/*"`, `"**"`) that are equal on all ranks. DistributedDataParallel's replicas and
        divided tensors are recognized; everything else is private to its rank. A path that was
        taken before then means the new commit; the old one stays in the store's log.

        `step` and `metrics` are kept with the commit; objects that could only be pickled need
        `allow_pickle`.

        Raises `TypeError` for values that are not stateful, `Conflict` if another file is at the
        path or replicas differ, and otherwise like `Store.commit`: on all ranks, with nothing
        changed.
        """
        prepare = _custom_tensor_prepare_func
        taking = Taking.of(path, app_state, pg, replicated, storage_options, prepare)
        with collected(app_state, prepare) as state:
            commit = taking.store.commit(
                state,
                step=step,
                tag=taking.place.tag,
                metrics=metrics,
                memory_budget_bytes=budget_of(taking.store, None),
                allow_pickle=allow_pickle,
                ranks=taking.ranks,
            )
        # The commit waited for those in the background, with what they call at their ends: no
        # older pointer is written after this one.
        taking.point_together(commit)
        snapshot = cls(taking.path, pg, storage_options)
        snapshot._found = taking.place.store, commit.id
        return snapshot

    @classmethod
    def async_take(
        cls,
        path: str | os.PathLike[str],
        app_state: AppState,
        pg: Any = None,
        replicated: list[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        _custom_tensor_prepare_func: Prepare | None = None,
        *,
        step: int | None = None,
        metrics: dict[str, float] | None = None,
        allow_pickle: bool = False,
    ) -> "PendingSnapshot":
        """Like `take`, in the background: the snapshot is the state at the time of this call.

        The state is copied to staging memory, which is kept for the next call. `wait` raises a
        later failure, or the next `take` does.
        """
        prepare = _custom_tensor_prepare_func
        taking = Taking.of(path, app_state, pg, replicated, storage_options, prepare)
        with collected(app_state, prepare) as state:
            pending = taking.store.commit_async(
                state,
                step=step,
                tag=taking.place.tag,
                metrics=metrics,
                allow_pickle=allow_pickle,
                ranks=taking.ranks,
            )
        return PendingSnapshot(cls(taking.path, pg, storage_options), pending, taking)

    def restore(
        self,
        app_state: AppState,
        strict: bool = True,
        *,
        memory_budget_bytes: int | None = None,
        allow_pickle: bool = False,
    ) -> None:
        """Restore `app_state`, which has all or some of the snapshot's keys, in place where
        possible.

        The number of ranks may differ: all ranks get replicas and divided tensors, and a rank gets
        private state of the same rank number only. A rank without private state raises, unless
        `strict=False`: then it keeps its own, and modules keep what the snapshot lacks. A random
        generator is restored last; a rank that had none begins a new stream. Raises like
        `ckptstore.Snapshot.restore`, and `MissingKeys`, an `InvalidInput`, for keys that the
        snapshot lacks.
        """
        check_stateful(app_state)
        peers = collective_of(self.pg)
        commit = peers.on_all(self._commit) if peers else self._commit()
        try:
            commit.only(app_state).restore(
                app_state,
                strict=strict,
                memory_budget_bytes=budget_of(self._store(), memory_budget_bytes),
                allow_pickle=allow_pickle,
                ranks=Ranks(process_group=self.pg),
            )
        except InvalidInput as error:
            note = (
                f"the snapshot has the keys {', '.join(commit.keys())}; select=, rename= and "
                "dtype= are for snapshot.commit.restore"
            )
            if set(app_state) <= set(commit.keys()):
                error.add_note(note)
                raise
            missing = MissingKeys(str(error))
            missing.causes = error.causes
            missing.add_note(note)
            raise missing from error

    def read_object(
        self,
        path: str,
        obj_out: Any = None,
        memory_budget_bytes: int | None = None,
        *,
        allow_pickle: bool = False,
    ) -> Any:
        """One object by its path in the manifest (`"0/model/weight"`), without reading others.

        A tensor is read into `obj_out` if shape and dtype match; of a DTensor or ShardedTensor,
        this rank's part. Otherwise `obj_out` is ignored and a new object returned; a divided tensor
        comes whole. Temporary buffers stay within `memory_budget_bytes`, but may take three chunks.
        Raises `NoSuchObject`.
        """
        rank, rest = split_rank(path)
        return self._index(rank).read(
            rest, obj_out, memory_budget_bytes=memory_budget_bytes, allow_pickle=allow_pickle
        )

    def get_manifest(self) -> Manifest:
        """The snapshot's entries by path, of all ranks; replicas stand under rank 0."""
        return manifest_of(self._commit())

    def get_state_dict_for_key(
        self, key: str, replicate_from_rank0: bool = False, *, allow_pickle: bool = False
    ) -> Any:
        """The state of this rank under one key, freshly allocated; with `replicate_from_rank0`,
        that of the first rank. Divided tensors are whole. Raises `NoSuchKey`.
        """
        peers, commit = collective_of(self.pg), self._commit()
        if key not in commit.keys():  # noqa: SIM118  # a commit is no mapping
            raise NoSuchKey(
                f"{key!r} is absent in both manifest and flattened: the snapshot has the keys "
                f"{', '.join(commit.keys())}"
            )
        rank = peers.rank if peers and not replicate_from_rank0 else 0
        own = commit.only([key]).of_rank(rank).numbered()
        return own.state_dict(key, allow_pickle=allow_pickle)

    @property
    def metadata(self) -> SnapshotMetadata:
        """The manifest, and the number of ranks that took the snapshot."""
        layout = self._commit().layout
        return SnapshotMetadata(
            INTERFACE_VERSION, layout.world if layout else 1, self.get_manifest()
        )

    @property
    def commit(self) -> Commit:
        """The commit behind this snapshot, with its id, history, metrics and ckptstore's other
        features.
        """
        return self._commit()

    def _commit(self) -> Commit:
        if self._found is None:
            self._found = find_snapshot(self.path, self._storage_options)
        return self._store().checkout(self._found[1])

    def _store(self) -> Store:
        assert self._found is not None
        return store_at(self._found[0], self._storage_options)

    def _index(self, rank: int) -> Index:
        commit = self._commit()
        store, index = self._indexes.get(rank, (None, None))
        if index is None or store is not self._store():
            index = Index(commit, rank)
            self._indexes[rank] = self._store(), index
        return index


class PendingSnapshot:
    """A snapshot being taken in the background. The interpreter does not exit before it is done."""

    def __init__(self, snapshot: Snapshot, pending: Pending[Commit], taking: Taking) -> None:
        self.path, self.pg = snapshot.path, snapshot.pg
        self._snapshot, self._pending, self._taking = snapshot, pending, taking
        self._ended = threading.Event()
        self._failed: BaseException | None = None
        pending.then(self._finish)

    def wait(self) -> Snapshot:
        """The snapshot, once it is durable and its path points to it. Raises `SnapshotFailed` from
        the failure.
        """
        self._ended.wait()
        failed = self._failed or self._pending.exception()
        if failed:
            raise SnapshotFailed(f"the snapshot {self.path} was not taken: {failed}") from failed
        return self._snapshot

    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._ended.is_set()

    def _finish(self, pending: Pending[Commit]) -> None:
        try:
            if pending.failure() is None:
                commit = pending.wait()
                self._snapshot._found = self._taking.place.store, commit.id
                self._taking.point(commit)
        except CkptStoreError as error:
            self._failed = error
            logger.error(
                "the snapshot %s is in its store, but its pointer file could not be written: %s",
                self.path,
                error,
            )
        finally:
            self._ended.set()
