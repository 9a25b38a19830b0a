"""How does `dcp.load` read a commit of any origin?

`StoreReader` makes DCP's metadata from the commit's schemas and pages; nothing is unpickled. Boxes
are read straight into the planner's tensors, every chunk verified; objects come from the registry.
"""

import io
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptstore.core.config import MIB
from ckptstore.core.model import Box
from ckptstore.errors import Conflict, InvalidInput, NotFound
from ckptstore.interop.dcp.items import dumped, marks_of, objects_of
from ckptstore.interop.dcp.locator import AtPlace, CheckpointId, StorePlace, of_rank, ref_of_rank
from ckptstore.interop.dcp.names import DCP_VERSION, Marks, Named, named
from ckptstore.repository.resolve_ref import AnyRef
from ckptstore.restore.reader import ReadRequest
from ckptstore.snapshot import Snapshot, contents_of
from ckptstore.state import tensors
from ckptstore.state.leaves import FLOATS, converts, destination
from ckptstore.store import Store

__all__ = ["StoreReader"]

BATCH_BYTES = 256 * MIB
"""Bytes read at a time into tensors that a planner allocates for this purpose."""


@dataclass(slots=True)
class _Load:
    """One load: the commit, and its items for DCP."""

    place: StorePlace
    snapshot: Snapshot
    marks: Marks
    items: dict[str, Named]
    id: str


class StoreReader(AtPlace[_Load], StorageReader):
    """Loads from a store: `dcp.load(state_dict, storage_reader=StoreReader("checkpoints",
    "latest"))`.

    `store` is an open store, or a path or URL as for `ckptstore.open` with the options `run`,
    `storage_options` and `index`. `ref` is any ref of the store; a `checkpoint_id` given to
    `dcp.load` replaces it. Every rank must find the same commit.

    Any commit can be loaded: a native commit of `{"model": …}` has the names `model.…`;
    `key="model"` selects that key, without its name. A tensor of another dtype than the commit's
    raises, unless `cast` allows float conversion. Pickled objects are read with `allow_pickle`
    only. Threads may load different commits through one reader at once.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        ref: AnyRef = "latest",
        *,
        run: str | None = None,
        key: str | None = None,
        cast: bool = False,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        index: str | None = None,
    ) -> None:
        super().__init__(StorePlace(store, run=run, storage_options=storage_options, index=index))
        self._first_ref = ref
        self._key, self._cast, self._allow_pickle = key, cast, allow_pickle

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Forget this thread's load; the next one is of `checkpoint_id`, or of this reader's own
        `ref`.
        """
        self._name_it(checkpoint_id)
        self.close()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata of the commit; with `rank`, of that rank's save without coordination.

        Raises `NotFound` if there is no such commit.
        """
        self.close()
        place = self._place.another()
        store = place.store(read_only=True)
        rank: int | None = kwargs.get("rank")
        try:
            ref = self._ref if rank is None else ref_of_rank(self._ref, store.run, rank)
            snapshot = self._whole(store, ref) if rank is None else store.checkout(ref)
            marks = marks_of(snapshot)
            if rank is None and marks.rank is not None:
                raise NotFound(
                    f"commit {snapshot.id[:12]} is what rank {marks.rank} saved by itself, not the "
                    "whole"
                )
            if self._key is not None and self._key not in contents_of(snapshot).trees:
                keys = ", ".join(contents_of(snapshot).trees)
                raise NotFound(
                    f"commit {snapshot.id[:12]} has no key {self._key!r}; it has {keys}; without "
                    "key=, it is loaded whole"
                )
            load = _Load(
                place,
                snapshot,
                marks,
                named(contents_of(snapshot).trees, marks, self._key),
                str(uuid.uuid4()),
            )
            self._begin_with(load)
        except BaseException:
            place.close()
            raise
        metadata = Metadata(
            state_dict_metadata={name: _metadata(item) for name, item in load.items.items()},
            planner_data={name: item.keys for name, item in load.items.items()},
            storage_data={"store": store.url, "commit": snapshot.id},
            storage_meta=StorageMeta(
                checkpoint_id=self.checkpoint_id, save_id=snapshot.id, load_id=load.id
            ),
        )
        metadata.version = DCP_VERSION
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if (
            self._current is None
            or (metadata.storage_data or {}).get("commit") != self._current.snapshot.id
        ):
            raise InvalidInput(
                "the metadata is not what this reader read last; call read_metadata first"
            )

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        load = self._read()
        plan.storage_data = load.snapshot.id if load.marks.rank is None else None
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises `Conflict` unless every rank has found the same commit. Ranks that saved without
        coordination have one each.
        """
        found = {plan.storage_data for plan in plans} - {None}
        if len(found) > 1:
            ids = ", ".join(sorted(commit[:12] for commit in found))
            raise Conflict(
                f"ranks found different commits ({ids}): {self._ref!r} moved meanwhile; load "
                "again, or by a step or an id"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what was planned; verified and in place on return."""
        load = self._read()
        try:
            self._load_objects(
                [item for item in plan.items if item.type == LoadItemType.BYTE_IO], planner, load
            )
            for batch in _batches(
                [item for item in plan.items if item.type == LoadItemType.TENSOR], planner
            ):
                self._load_tensors(batch, planner, load)
        finally:
            load.place.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Close the store, if it was opened here. Every load closes its own, except one that fails
        before it reads.
        """
        if (load := self._begin_with(None)) is not None:
            load.place.close()

    @property
    def load_id(self) -> str:
        """Identifies this thread's load; empty before `read_metadata`."""
        return self._current.id if self._current else ""

    @property
    def _ref(self) -> AnyRef:
        return self._first_ref if self._checkpoint_id is None else self._checkpoint_id

    def _read(self) -> _Load:
        if self._current is None:
            raise InvalidInput("nothing to load from; call read_metadata first")
        return self._current

    def _whole(self, store: Store, ref: AnyRef) -> Snapshot:
        """The commit `ref`. `latest` finds nothing if ranks have saved without coordination
        since.
        """
        snapshot = store.checkout(ref)
        if ref == "latest" and any(
            info.time_ns > snapshot.time.timestamp() * 1e9
            for info in store.log(1, run=of_rank(store.run, 0))
        ):
            raise NotFound(
                f"the newest of run {store.run} is what ranks saved by themselves; step "
                f"{snapshot.step} is the newest whole one"
            )
        return snapshot

    def _load_objects(self, requests: list[ReadItem], planner: LoadPlanner, load: _Load) -> None:
        items = {request.storage_index.fqn: _item(load, request) for request in requests}
        values = objects_of(load.snapshot, items, allow_pickle=self._allow_pickle)
        for request in requests:
            name = request.storage_index.fqn
            if items[name].path in load.marks.raw:
                planner.load_bytes(request, io.BytesIO(values[name]))
            else:
                _hand_over(planner, request, values[name])

    def _load_tensors(
        self, requests: Iterable[ReadItem], planner: LoadPlanner, load: _Load
    ) -> None:
        targets, wanted, copied = [], [], []
        for request in requests:
            item = _item(load, request)
            target = planner.resolve_tensor(request)
            number, box = _where(item, request)
            committed = item.tree.schema.dtypes[number]
            self._check(item, request, target, committed)
            landing = target.detach()
            if not tensors.is_strided(landing) or not tensors.is_writable_by_range(landing):
                landing = torch.empty(landing.shape, dtype=landing.dtype)
                copied.append((target, landing))
            wanted.append(ReadRequest(item.tree, number, destination(landing, committed), box))
            targets.append((request, target))
        contents_of(load.snapshot).read(wanted)
        for target, landing in copied:
            target.detach().copy_(landing)
        for request, target in targets:
            planner.commit_tensor(request, target)

    def _check(self, item: Named, request: ReadItem, target: torch.Tensor, committed: str) -> None:
        if tuple(target.shape) != tuple(request.lengths):
            raise InvalidInput(
                f"{item.name}: the planner gives {list(target.shape)} for a part of shape "
                f"{list(request.lengths)}"
            )
        own = tensors.DTYPE_NAMES[target.dtype]
        may = target.dtype in FLOATS and converts(committed, target.dtype)
        if own != committed and not (may and self._cast):
            way = "StoreReader(…, cast=True) converts" if may else "make a tensor of that dtype"
            raise InvalidInput(
                f"{item.name} was saved as {committed}, and the state dict has {own} for it; {way}"
            )


def _item(load: _Load, request: ReadItem) -> Named:
    name = request.storage_index.fqn
    if name not in load.items:
        raise NotFound(f"commit {load.snapshot.id[:12]} has nothing called {name!r}")
    return load.items[name]


def _metadata(item: Named) -> STORAGE_TYPES:
    schema = item.tree.schema
    if item.parts:
        first = item.parts[0][1]
        chunks = [_chunk(box) for box, _ in item.parts]
        shape = item.shape
        return TensorStorageMetadata(
            TensorProperties(dtype=tensors.dtype_of(schema.dtypes[first])),
            torch.Size(shape),
            chunks,
        )
    if item.tensor is None:
        return BytesStorageMetadata()
    shape = schema.shapes[item.tensor]
    boxes = item.tree.content(item.tensor).boxes or (Box((0,) * len(shape), shape),)
    properties = TensorProperties(dtype=tensors.dtype_of(schema.dtypes[item.tensor]))
    return TensorStorageMetadata(properties, torch.Size(shape), [_chunk(box) for box in boxes])


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))


def _where(item: Named, request: ReadItem) -> tuple[int, Box]:
    """The leaf and the box of a request."""
    start = tuple(request.storage_index.offset or (0,) * len(request.lengths))
    offsets, lengths = tuple(request.storage_offsets), tuple(request.lengths)
    if item.tensor is not None:
        return item.tensor, Box(tuple(a + b for a, b in zip(start, offsets, strict=True)), lengths)
    for box, number in item.parts:
        if box.offsets == start:
            return number, Box(offsets, lengths)
    raise InvalidInput(f"{item.name} is no tensor, or has no part at {list(start)}")


def _batches(requests: list[ReadItem], planner: LoadPlanner) -> Iterator[list[ReadItem]]:
    """One batch if the tensors exist; several if the planner allocates them."""
    cls: Any = type(planner)
    default = DefaultLoadPlanner
    if (
        isinstance(planner, default)
        and cls.resolve_tensor is default.resolve_tensor
        and cls.transform_tensor is default.transform_tensor
    ):
        yield requests
        return
    batch: list[ReadItem] = []
    size = 0
    for request in requests:
        batch.append(request)
        size += 8 * request.lengths.numel()
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def _hand_over(planner: LoadPlanner, request: ReadItem, value: Any) -> None:
    """Put an object where the planner would. A planner that reads bytes itself gets them as
    torch.save writes them.
    """
    if (
        isinstance(planner, DefaultLoadPlanner)
        and type(planner).load_bytes is DefaultLoadPlanner.load_bytes
    ):
        name = request.dest_index.fqn
        if planner.flatten_state_dict:
            set_element(planner.original_state_dict, planner.mappings[name], value)
        else:
            planner.state_dict[name] = value
        return
    planner.load_bytes(request, dumped(value))
