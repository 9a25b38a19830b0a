"""How do `dcp.save` and `dcp.async_save` make a commit?

DCP assigns the writers and carries messages between ranks. Through `StoreWriter`, each rank packs
its items, and the coordinator's `finish` appends the commit. DCP raises any failure on every rank,
as `CheckpointException`, and nothing is visible.

Saves through one writer may overlap. Each has its own name and session (`_Save`). The session
travels in plans and receipts, so that parts of two saves cannot become one commit.
"""

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptstore.commit.commit_metadata import label_of
from ckptstore.core.ids import CommitId, SessionId, parse_session_id
from ckptstore.distributed import framing
from ckptstore.errors import Conflict, InvalidInput
from ckptstore.interop.dcp.items import decode_message, messages_of, parts_of, resolve
from ckptstore.interop.dcp.locator import (
    AtPlace,
    CheckpointId,
    Name,
    StorePlace,
    assign,
    name_of,
    name_of_rank,
    of_rank,
    session_of,
)
from ckptstore.interop.dcp.names import DCP_VERSION, FLAT_KEY
from ckptstore.interop.dcp.state_tree import plant
from ckptstore.log.sessions import Session
from ckptstore.objects.pointer_files import Pointer, write_pointer
from ckptstore.store import Store, internals_of

__all__ = ["StoreWriter"]


class _Save:
    """One save on one rank: its name, and its session if this rank opened it."""

    def __init__(self, place: StorePlace, name: Name, rank: int, *, alone: bool) -> None:
        self.place, self.name, self.rank, self.alone = place, name, rank, alone
        self.started = time.perf_counter()
        self.session: Session | None = None
        self.commit: CommitId | None = None

    def open_session(self) -> Session:
        self.end_session()
        self.session = internals_of(self.place.store(create=True)).runtime.parts_committer.open()
        weakref.finalize(
            self, self.session.abandon
        )  # if a rank fails, DCP does not tell the coordinator's writer
        return self.session

    def end_session(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.abandon()

    def release(self) -> None:
        self.end_session()
        self.place.close()


class StoreWriter(AtPlace[_Save], StorageWriter):
    """Saves to a store: `dcp.save(state_dict, storage_writer=StoreWriter("checkpoints",
    step=100))`.

    `store` is an open store, or a path or URL as for `ckptstore.open`, opened for each save with
    the options `run`, `storage_options` and `index`. `step`, `tag`, `message` and `metrics` are
    those of the commit. A `checkpoint_id` names it too: digits are its step, a path (`/…`, `./…`,
    `../…`, a `Path`) becomes a directory with a pointer file as `.metadata`, other text is a tag.
    An earlier commit of that name stays in the store. With `overwrite=False` an existing name is a
    `Conflict`.

    A state dict without nesting becomes the key `key` of the application state. With
    `allow_pickle`, objects unknown to the registry are pickled and marked as such; without it they
    are refused, by name.

    After a save, `commit` is the commit's id on the coordinator; on every rank, `dcp.save` returns
    it as `storage_meta.save_id`. Saves may overlap, as with `dcp.async_save` (with a process group
    each, on several ranks); then `commit` is that of the last save to end.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        step: int | None = None,
        tag: str | Sequence[str] = (),
        metrics: Mapping[str, float] | None = None,
        message: str = "",
        run: str | None = None,
        key: str = FLAT_KEY,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        index: str | None = None,
        overwrite: bool = True,
    ) -> None:
        super().__init__(StorePlace(store, run=run, storage_options=storage_options, index=index))
        self._step, self._metrics, self._message = step, metrics, message
        self._tags = ((tag,) if isinstance(tag, str) else tuple(tag)) if tag else ()
        self._key, self._allow_pickle, self.overwrite = key, allow_pickle, overwrite
        self.commit: CommitId | None = None

    def _begin(self) -> None:
        super()._begin()
        self._saves: WeakValueDictionary[SessionId, _Save] = WeakValueDictionary()

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Forget this thread's last save; the next one is called `checkpoint_id`."""
        name_of(checkpoint_id)  # raises before anything is forgotten
        self._name_it(checkpoint_id)
        self._forget()
        if self._is_home:
            self.commit = None

    @property
    def save_id(self) -> str | None:
        """`commit`, under the attribute name of DCP's own writer."""
        return self.commit

    def storage_meta(self) -> StorageMeta | None:
        """The storage metadata for planners."""
        return StorageMeta(
            checkpoint_id=self.checkpoint_id,
            save_id=self._current.commit if self._current else None,
        )

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._forget()
        rank = kwargs["rank"] if kwargs.get("rank") is not None else _own_rank()
        alone = not kwargs.get("use_collectives", True)
        name = name_of(self._checkpoint_id)
        save = _Save(
            self._place.another(), name_of_rank(name, rank) if alone else name, rank, alone=alone
        )
        self._begin_with(save)
        if is_coordinator or alone:
            self._check_name(save)
        internals_of(save.place.store(create=True)).handle.check_writable()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Open the session of this save and add it to every rank's plan."""
        save = self._in_progress()
        session = save.open_session()
        self._saves[session.id] = save
        assigned = assign(session.id, str(self.checkpoint_id))
        return [replace(plan, storage_data=assigned) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Hash and pack this rank's items; durable on return."""
        save = self._in_progress()
        try:
            # The coordinator knows its session; a cached plan carries that of an earlier save.
            session = (
                save.session.id
                if save.session
                else session_of(plan.storage_data, save.rank, str(self.checkpoint_id))
            )
            resolved = resolve(plan, planner, allow_pickle=self._allow_pickle)
            committer = internals_of(save.place.store(create=True)).runtime.parts_committer
            written = committer.write(session, save.rank, parts_of(resolved, alone=save.alone))
            messages = messages_of(resolved, written.contents)
        except BaseException:
            save.release()
            raise
        # Session and receipt travel with the first item; a rank without items sends none.
        receipt = [session, written.receipt]
        texts = [
            framing.pack([message, *(["", None] if i else receipt)])
            for i, message in enumerate(messages)
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result([_result(item, text) for item, text in zip(plan.items, texts, strict=True)])
        if save.session is None:
            save.place.close()
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Append the commit of what all ranks have written, and record its id in `metadata`.

        Raises `Conflict` if another save wrote some of it.
        """
        told = _told(results)
        save = self._saves.get(min(told.sessions)) if len(told.sessions) == 1 else self._current
        if save is None or save.session is None or not told.sessions <= {save.session.id}:
            raise Conflict(
                "what is to be finished was written by two saves, or by one that ended: nothing "
                "was committed; repeat the save"
            )
        try:
            self._publish(save, save.session, metadata, told)
        finally:
            save.release()

    def close(self) -> None:
        """Close the store, if it was opened here, and drop saves in progress. A save closes its
        store when it ends, except one that failed on another rank.
        """
        self._forget()
        for save in list(self._saves.values()):
            save.release()

    def _publish(self, save: _Save, session: Session, metadata: Metadata, told: "_Told") -> None:
        store = save.place.store()
        planted = plant(
            [
                decode_message(name, save.rank if save.alone else number, message)
                for name, number, message in told.messages
            ],
            metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {},
            flat_key=self._key,
            chunk_bytes=store.chunk_bytes,
            world=told.world,
            rank=save.rank if save.alone else None,
        )
        internals = internals_of(store)
        snapshot = internals.commit_external(
            lambda metadata: internals.runtime.parts_committer.publish(
                session, metadata, planted.trees, planted.layout, told.receipts, save.started
            ),
            label_of(
                of_rank(store.run, save.rank) if save.alone else store.run,
                self._step if save.name.step is None else save.name.step,
                self._labels(save),
                self._message,
                self._metrics,
            ),
            follow=not save.alone,
        )
        self.commit = save.commit = snapshot.id
        if (pointer := save.name.pointer) is not None:
            write_pointer(pointer, Pointer(store.url, snapshot.id))
        metadata.version = DCP_VERSION
        metadata.storage_data = {"store": store.url, "commit": snapshot.id}
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=snapshot.id)

    def _check_name(self, save: _Save) -> None:
        """Raise `Conflict` if another file than a pointer has the path, or if the name exists and
        may not be moved.
        """
        pointer, name = save.name.pointer, save.name
        if self.overwrite or name == Name():
            return
        store = save.place.store(create=True)
        run = of_rank(store.run, save.rank) if save.alone else None
        if pointer is not None:
            taken = os.path.lexists(pointer)
        elif name.tag is not None:
            taken = name.tag in store.tags()
        else:
            taken = any(info.step == name.step for info in store.log(None, run=run))
        if taken:
            raise Conflict(
                f"Checkpoint already exists: {self.checkpoint_id} names a commit, and "
                "overwrite=False; give another checkpoint_id"
            )

    def _labels(self, save: _Save) -> tuple[str, ...]:
        tags = tuple(of_rank(tag, save.rank) for tag in self._tags) if save.alone else self._tags
        return (*tags, save.name.tag) if save.name.tag else tags

    def _in_progress(self) -> _Save:
        if self._current is None:
            raise InvalidInput(
                "no save is in progress on this thread; call set_up_storage_writer first"
            )
        return self._current

    def _forget(self) -> None:
        """Drop this thread's save."""
        if (save := self._begin_with(None)) is not None:
            save.release()


class _Told(NamedTuple):
    """The ranks' results: the name, rank and message of each item; the receipts and their
    sessions.
    """

    messages: list[tuple[str, int, bytes]]
    receipts: list[Any]
    sessions: set[SessionId]
    world: int


def _told(results: Sequence[Sequence[WriteResult]]) -> _Told:
    told = _Told([], [], set(), len(results))
    for rank, found in enumerate(results):
        for result in found:
            message, session, receipt = framing.unpack(result.storage_data)
            told.messages.append((result.index.fqn, rank, message))
            if session:
                told.sessions.add(parse_session_id(session))
                told.receipts.append(receipt)
    return told


def _own_rank() -> int:
    """This rank's number among those that write under one session: torch 2.6 does not tell it, and
    packs of one name must not collide.
    """
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _result(item: Any, message: bytes) -> WriteResult:
    return WriteResult(item.index, item.tensor_storage_size() or len(message), message)
