"""`StoreWriter`: `dcp.save` and `dcp.async_save` make a commit.

DCP plans who writes what, and carries messages from rank to rank; each rank packs its items, and the coordinator's `finish` appends the
commit. What fails anywhere is raised on every rank by DCP, as `CheckpointException`, and nothing is visible.
"""

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptstore.core.ids import CommitId
from ckptstore.engine.ranks import frames
from ckptstore.errors import Conflict
from ckptstore.history.sessions import Session
from ckptstore.interop.dcp.items import decode_message, messages_of, parts_of, resolve
from ckptstore.interop.dcp.meeting import assign, session_of
from ckptstore.interop.dcp.names import DCP_VERSION, FLAT_KEY
from ckptstore.interop.dcp.places import AtPlace, CheckpointId, Name, StorePlace, name_of, name_of_rank, of_rank
from ckptstore.interop.dcp.trees import plant
from ckptstore.objects.pointers import Pointer, is_pointer, write_pointer
from ckptstore.store import Store

__all__ = ["StoreWriter"]


class StoreWriter(AtPlace, StorageWriter):
    """Saves to a store: `dcp.save(state_dict, storage_writer=StoreWriter("checkpoints", step=100))`.

    `store` is an open store, or a place as for `ckptstore.open`, which is then opened for each save (`run`, `storage_options` and `index`
    are its options). `step`, `tag`, `message` and `metrics` are those of the commit. A `checkpoint_id` names it too: digits are its step, a
    path (`/…`, `./…`, `../…`, a `Path`) gets a pointer file, other text is a tag; what had that name before stays in the store.

    A state dict without anything nested becomes the key `key` of the application state. With `allow_pickle`, objects that the registry does
    not know are pickled and marked as such; without it they are refused, by name.

    After a save, `commit` is the commit's id on the coordinator; on every rank, `storage_meta.save_id` of what `dcp.save` returns is.
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
    ) -> None:
        super().__init__()
        self._place = StorePlace(store, run=run, storage_options=storage_options, index=index)
        self._step, self._metrics, self._message = step, metrics, message
        self._tags = ((tag,) if isinstance(tag, str) else tuple(tag)) if tag else ()
        self._key, self._allow_pickle = key, allow_pickle
        self._name = Name()
        self._rank, self._alone = 0, False
        self._started = 0.0
        self._session: Session | None = None
        self.commit: CommitId | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Forget the last save; the next one is called `checkpoint_id`."""
        name_of(checkpoint_id)  # which raises, before anything is forgotten
        self._checkpoint_id = checkpoint_id
        self._let_go()
        self.commit = None

    def storage_meta(self) -> StorageMeta | None:
        """What planners get to know of the storage."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.commit)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._let_go()
        self._started = time.perf_counter()
        self._rank = kwargs["rank"] if kwargs.get("rank") is not None else _own_rank()
        self._alone = not kwargs.get("use_collectives", True)
        name = name_of(self._checkpoint_id)
        self._name = name_of_rank(name, self._rank) if self._alone else name
        pointer = self._name.pointer
        if pointer is not None and (is_coordinator or self._alone) and os.path.lexists(pointer) and not is_pointer(pointer):
            raise Conflict(f"{pointer} is there and is no pointer file; give another checkpoint_id, or remove it")
        self._place.store(create=True).check_writable()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Open the session of this save, and let every rank know it."""
        self._end_session()
        self._session = self._place.store(create=True).parts.open()
        weakref.finalize(self, self._session.abandon)  # where a rank fails, DCP does not tell the coordinator's writer
        assigned = assign(self._session.id)
        return [replace(plan, storage_data=assigned) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Hash and pack this rank's items; durable when this returns."""
        try:
            session = session_of(plan.storage_data)
            resolved = resolve(plan, planner, allow_pickle=self._allow_pickle)
            written = self._place.store(create=True).parts.write(session, self._rank, parts_of(resolved, alone=self._alone))
            messages = messages_of(resolved, written.contents)
        except BaseException:
            self._let_go()
            raise
        # The receipt travels with the first item; a rank without items has nothing to say.
        texts = [frames.join([message, b"" if i else written.receipt]) for i, message in enumerate(messages)]
        done: Future[list[WriteResult]] = Future()
        done.set_result([_result(item, text) for item, text in zip(plan.items, texts, strict=True)])
        if self._session is None:
            self._place.close()
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Append the commit of what all ranks have written, and say in `metadata` which it is."""
        assert self._session is not None, "prepare_global_plan comes before finish"
        store, session = self._place.store(), self._session
        try:
            stored, receipts = [], []
            for number, found in enumerate(results):
                for result in found:
                    message, receipt = frames.split(result.storage_data, 2)
                    stored.append(decode_message(result.index.fqn, self._rank if self._alone else number, message))
                    receipts += [receipt] if receipt else []
            planted = plant(
                stored,
                metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {},
                flat_key=self._key,
                chunk_bytes=store.chunk_bytes,
                world=len(results),
                rank=self._rank if self._alone else None,
            )
            snapshot = store.commit_parts(
                lambda label: store.parts.publish(session, label, planted.trees, planted.layout, receipts, self._started),
                step=self._step if self._name.step is None else self._name.step,
                tag=self._labels(),
                message=self._message,
                metrics=self._metrics,
                run=of_rank(store.run, self._rank) if self._alone else None,
            )
            self.commit = snapshot.id
            if self._name.pointer is not None:
                write_pointer(self._name.pointer, Pointer(store.url, snapshot.id))
            metadata.version = DCP_VERSION
            metadata.storage_data = {"store": store.url, "commit": snapshot.id}
            metadata.storage_meta = self.storage_meta()
        finally:
            self._let_go()

    def close(self) -> None:
        """Let go of the store, if it was opened here. Every save does so itself; a save that failed on another rank does not."""
        self._let_go()

    def _labels(self) -> tuple[str, ...]:
        tags = tuple(of_rank(tag, self._rank) for tag in self._tags) if self._alone else self._tags
        return (*tags, self._name.tag) if self._name.tag else tags

    def _let_go(self) -> None:
        self._end_session()
        self._place.close()

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.abandon()


def _own_rank() -> int:
    """Which of the ranks that write under one session this is: the DCP of torch 2.6 does not say, and packs of one name are one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _result(item: Any, message: bytes) -> WriteResult:
    return WriteResult(item.index, item.tensor_storage_size() or len(message), message)
