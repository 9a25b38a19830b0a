"""The storage writer with which `dcp.save` and `dcp.async_save` make a commit.

DCP assigns the writers and carries messages between ranks. Through `StoreWriter`, each rank packs
its items, and the coordinator's `finish` appends the commit. DCP raises any failure on every rank,
as `CheckpointException`, and nothing is visible.

Saves through one writer may overlap. Each has its own name and session (`_Save`). The session
travels with the plans and comes back with the ranks' messages, so that parts of two saves cannot
become one commit.

Objects come from the planner's `lookup_object`, so that nothing is pickled. A planner that makes
its own bytes (`resolve_data`, `transform_object`) is asked for them: bytes of `torch.save` with
plain values become values again, others stay bytes.
"""

import io
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptstore import Store
from ckptstore.errors import Conflict, InvalidInput
from ckptstore.interop.dcp.items import (
    RankItems,
    Resolved,
    box_item,
    object_item,
    publish_items,
    read_message,
    write_items,
)
from ckptstore.interop.dcp.names import (
    DCP_VERSION,
    FLAT_KEY,
    AtPlace,
    CheckpointId,
    Name,
    keeps,
    of_rank,
)
from ckptstore.plugin.leaves import Source
from ckptstore.plugin.model import Box, CommitId, SessionId, parse_session_id
from ckptstore.plugin.pointers import Pointer, write_pointer
from ckptstore.plugin.stores import check_writable, joined, open_parts
from ckptstore.plugin.tensors import TensorSource, is_checkpointable, is_whole, shape_of, tensors
from ckptstore.plugin.writing import Session, label_of
from ckptstore.plugins.foreign.kinds import load_torch
from ckptstore.plugins.foreign.loaded import Loaded, Shelf

__all__ = ["StoreWriter"]

_received = threading.local()


class AssignedSession:
    """The session of a save, on its way from the coordinator to a rank.

    With plan caching, DCP sends this to the rank, but hands the writer the plan of an earlier save.
    So the thread on which it arrives, which is the one that writes, notes the session.
    """

    def __init__(self, session: SessionId) -> None:
        self.session = _received.session = session

    def __reduce__(self) -> tuple[type["AssignedSession"], tuple[SessionId]]:
        return AssignedSession, (self.session,)


def received_session() -> SessionId:
    """The session that the coordinator sent to this thread last. Raises `InvalidInput` if it sent
    none."""
    session = getattr(_received, "session", None)
    if session is None:
        raise InvalidInput(
            "the coordinator sent no session for this save; use a StoreWriter on all ranks, and a "
            "planner that keeps a plan's storage_data (dataclasses.replace)"
        )
    return parse_session_id(session)


class _Save:
    """One save on one rank: its name, its store, and its session if this rank opened it."""

    def __init__(
        self, store: Store, close: Callable[[], None], name: Name, rank: int, *, alone: bool
    ) -> None:
        self.store, self._close = store, close
        self.rank, self.alone = rank, alone
        self.name = name.of_rank(rank) if alone else name
        self.started = time.perf_counter()
        self.session: Session | None = None
        self.commit: CommitId | None = None

    def label(self, text: str) -> str:
        """A run or tag for this save."""
        return of_rank(text, self.rank) if self.alone else text

    def open_session(self) -> Session:
        self.end_session()
        self.session = open_parts(self.store)
        # If a rank fails, DCP does not tell the coordinator's writer.
        weakref.finalize(self, self.session.abandon)
        return self.session

    def end_session(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.abandon()

    def release(self) -> None:
        self.end_session()
        self._close()


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
        super().__init__(store, run=run, storage_options=storage_options, index=index)
        self._step, self._metrics, self._message = step, metrics, message
        self._tags = ((tag,) if isinstance(tag, str) else tuple(tag)) if tag else ()
        self._key, self._allow_pickle, self.overwrite = key, allow_pickle, overwrite
        self.commit: CommitId | None = None

    def _begin(self) -> None:
        super()._begin()
        self._saves: WeakValueDictionary[SessionId, _Save] = WeakValueDictionary()

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Forget this thread's last save; the next one is called `checkpoint_id`."""
        Name.of(checkpoint_id)  # raises before anything is forgotten
        self._drop()
        self._rename(checkpoint_id)
        self.commit = None

    @property
    def save_id(self) -> str | None:
        """`commit`, under the attribute name of DCP's own writer."""
        return self.commit

    def storage_meta(self) -> StorageMeta | None:
        """The storage metadata for planners."""
        save = self._work
        commit = save.commit if save else None
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=commit)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._drop()
        _received.session = None
        name = self._named
        rank = kwargs["rank"] if kwargs.get("rank") is not None else _own_rank()
        alone = not kwargs.get("use_collectives", True)
        save = _Save(*self._opened(create=True), Name.of(name), rank, alone=alone)
        self._start(save)
        if is_coordinator or alone:
            self._check_name(save)
        check_writable(save.store)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Open the session of this save and add it to every rank's plan."""
        save = self._in_progress()
        session = save.open_session()
        self._saves[session.id] = save
        return [replace(plan, storage_data=AssignedSession(session.id)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Hash and pack this rank's items; durable on return."""
        save = self._in_progress()
        try:
            session = save.session.id if save.session else received_session()
            resolved = _resolve(plan, planner, allow_pickle=self._allow_pickle)
            run = save.label(save.store.run)
            message = write_items(save.store, session, save.rank, resolved, run, alone=save.alone)
        except BaseException:
            save.release()
            raise
        # The message travels with the first item; a rank without items sends none.
        messages = [message, *[b""] * len(plan.items)]
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(item.index, item.tensor_storage_size() or 0, each)
                for item, each in zip(plan.items, messages, strict=False)
            ]
        )
        if save.session is None:
            # The coordinator makes the commit, and DCP does not call this rank's writer again.
            joined(save.store, session)
            save.release()
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Append the commit of what all ranks have written, and record its id in `metadata`.

        Raises `Conflict` if another save wrote some of it.
        """
        ranks = [
            read_message(rank, found[0].storage_data) for rank, found in enumerate(results) if found
        ]
        sessions = {rank.session for rank in ranks}
        save = self._saves.get(min(sessions)) if len(sessions) == 1 else self._work
        if save is None or save.session is None or not sessions <= {save.session.id}:
            raise Conflict(
                "the parts to be committed are from two saves, or from one that ended; nothing was "
                "committed: repeat the save"
            )
        try:
            self._publish(save, save.session, metadata, ranks, len(results))
        finally:
            save.release()

    def close(self) -> None:
        """Close the store, if it was opened here, and drop saves in progress. A save closes its
        store when it ends, except one that failed on another rank.
        """
        self._drop()
        for save in list(self._saves.values()):
            save.release()

    def _publish(
        self,
        save: _Save,
        session: Session,
        metadata: Metadata,
        ranks: list[RankItems],
        world: int,
    ) -> None:
        store, keys = save.store, metadata.planner_data
        tags = tuple(map(save.label, self._tags))
        snapshot = publish_items(
            store,
            session,
            ranks,
            keys if isinstance(keys, Mapping) else {},
            label_of(
                save.label(store.run),
                self._step if save.name.step is None else save.name.step,
                (*tags, save.name.tag) if save.name.tag else tags,
                self._message,
                self._metrics,
            ),
            flat_key=self._key,
            world=world,
            alone=save.rank if save.alone else None,
            started=save.started,
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
        if self.overwrite:
            return
        if pointer is not None:
            taken = os.path.lexists(pointer)
        elif name.tag is not None:
            taken = name.tag in save.store.tags()
        else:
            run = save.store.run
            infos = save.store.log(run=save.label(run) if save.alone else run)
            taken = name.step is not None and any(info.step == name.step for info in infos)
        if taken:
            raise Conflict(
                f"Checkpoint already exists: {self.checkpoint_id} names a commit, and "
                "overwrite=False; give another checkpoint_id"
            )

    def _in_progress(self) -> _Save:
        if self._work is None:
            raise InvalidInput(
                "no save is in progress on this thread; call set_up_storage_writer first"
            )
        return self._work


def _own_rank() -> int:
    """This rank's number among those that write under one session: torch 2.6 does not tell it, and
    packs of one name must not collide.
    """
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _resolve(plan: SavePlan, planner: SavePlanner, *, allow_pickle: bool) -> list[Resolved]:
    """The items of a rank's final plan, in its order, with the sources of their bytes.

    Raises `InvalidInput`, naming the item, for objects unknown to the registry unless
    `allow_pickle`, and for data that differs from the plan.
    """
    shelf = Shelf()
    return [
        _object(planner, item, allow_pickle)
        if item.type == WriteItemType.BYTE_IO
        else _tensor(planner, item, shelf, allow_pickle)
        for item in plan.items
    ]


def _tensor(planner: SavePlanner, item: WriteItem, shelf: Shelf, allow_pickle: bool) -> Resolved:
    name, data = item.index.fqn, item.tensor_data
    if data is None or data.chunk is None:
        raise InvalidInput(
            f"{name} is planned as a tensor, and the plan does not say which part of it"
        )
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    tensor = _asked(planner, item)
    if not tensors.is_strided(tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        if box.lengths != tuple(data.size):  # an object has one rank, and no box
            raise InvalidInput(
                f"{name} is a part of a tensor of shape {list(data.size)}, as a "
                f"{type(tensor).__qualname__}; ranks can divide plain tensors only: make it plain, "
                "or save it whole"
            )
        return object_item(name, tensor, allow_pickle)
    if tuple(tensor.shape) != box.lengths:
        raise InvalidInput(
            f"{name}: the planner returned shape {list(tensor.shape)}; its plan says "
            f"{list(box.lengths)}"
        )
    source: Source = TensorSource(tensor)
    if not _lends(planner):
        # The planner makes new data, so it is not all held at once.
        source = Loaded(lambda: _asked(planner, item), tensor.nbytes, tensor.itemsize, shelf)
    dtype = tensors.DTYPE_NAMES[tensor.dtype]
    return box_item(name, dtype, tuple(data.size), box), [source]


def _asked(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInput(
            f"the planner returned a {type(tensor).__qualname__} for the tensor {item.index.fqn}"
        )
    if is_checkpointable(tensor) and not is_whole(tensor):
        raise InvalidInput(
            f"{item.index.fqn} is a part of a tensor of shape {list(shape_of(tensor))}, as DCP "
            f"knows them since torch 2.14; this is {torch.__version__}, which would save a tensor "
            "of its own: commit it with store.commit"
        )
    return tensor.detach()


def _object(planner: SavePlanner, item: WriteItem, allow_pickle: bool) -> Resolved:
    name = item.index.fqn
    if _lends(planner):
        return object_item(name, planner.lookup_object(item.index), allow_pickle)  # type: ignore[attr-defined]
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise InvalidInput(
            f"the planner returned a {type(data).__qualname__} for the object {name}; wanted "
            "io.BytesIO"
        )
    try:  # without running code
        value = load_torch(io.BytesIO(data.getvalue()), name, allow_pickle=False)
        return object_item(name, value, allow_pickle)
    except InvalidInput:
        return object_item(name, data.getvalue(), allow_pickle, is_bytes=True)


def _lends(planner: SavePlanner) -> bool:
    """Whether the planner returns the state dict's own objects."""
    return keeps(planner, DefaultSavePlanner, "resolve_data", "transform_object")
