"""The storage reader with which `dcp.load` reads a commit of any origin.

`StoreReader` makes DCP's metadata from the commit's schemas and pages; nothing is unpickled. Boxes
are read straight into the planner's tensors, every chunk verified; objects come from the registry.
"""

import io
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

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

from ckptstore import Snapshot, Store
from ckptstore.errors import Conflict, InvalidInput, NotFound
from ckptstore.interop.dcp.names import (
    DCP_VERSION,
    AtPlace,
    CheckpointId,
    CommitItems,
    Named,
    dumped,
    keeps,
    of_rank,
    ref_of_rank,
)
from ckptstore.plugin.handles import AnyRef
from ckptstore.plugin.model import MIB, Box, within
from ckptstore.plugin.reading import ReadRequest
from ckptstore.plugin.snapshots import contents_of
from ckptstore.plugin.tensors import FLOATS, converts, destination, tensors

__all__ = ["StoreReader"]

BATCH_BYTES = 256 * MIB
"""Bytes read at a time into tensors that a planner allocates for this purpose."""


@dataclass(slots=True)
class _Load:
    """One load: the commit's items, a function that closes their store, and DCP's id."""

    items: CommitItems
    release: Callable[[], None]
    id: str

    @property
    def snapshot(self) -> Snapshot:
        return self.items.snapshot

    def item(self, request: ReadItem) -> Named:
        name = request.storage_index.fqn
        if name not in self.items.by_name:
            raise NotFound(f"commit {self.snapshot.id[:12]} has nothing called {name!r}")
        return self.items.by_name[name]


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
        super().__init__(store, run=run, storage_options=storage_options, index=index)
        self._first_ref = ref
        self._key, self._cast, self._allow_pickle = key, cast, allow_pickle

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Forget this thread's load; the next one is of `checkpoint_id`, or of this reader's own
        `ref`.
        """
        self._drop()
        self._rename(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata of the commit; with `rank`, of that rank's save without coordination.

        Raises `NotFound` if there is no such commit.
        """
        self._drop()
        store, close = self._opened(read_only=True)
        try:
            items = self._items(store, kwargs.get("rank"))
        except BaseException:
            close()
            raise
        load = _Load(items, close, str(uuid.uuid4()))
        commit = items.snapshot.id
        self._start(load)
        metadata = Metadata(
            state_dict_metadata={name: _metadata(item) for name, item in items.by_name.items()},
            planner_data={name: item.keys for name, item in items.by_name.items()},
            storage_data={"store": store.url, "commit": commit},
            storage_meta=StorageMeta(
                checkpoint_id=self.checkpoint_id, save_id=commit, load_id=load.id
            ),
        )
        metadata.version = DCP_VERSION
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        load = self._work
        if load is None or (metadata.storage_data or {}).get("commit") != load.snapshot.id:
            raise InvalidInput(
                "the metadata is not what this reader read last; call read_metadata first"
            )

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        load = self._in_progress()
        plan.storage_data = load.snapshot.id if load.items.marks.rank is None else None
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises `Conflict` unless every rank has found the same commit. Ranks that saved without
        coordination have one each.
        """
        found = {plan.storage_data for plan in plans} - {None}
        if len(found) > 1:
            ids = ", ".join(sorted(commit[:12] for commit in found))
            raise Conflict(
                f"ranks found different commits ({ids}): {self._ref!r} moved in between; load "
                "again, or by a step or an id"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what was planned; verified and in place on return."""
        load = self._in_progress()
        try:
            objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
            self._load_objects(objects, planner, load)
            boxes = [item for item in plan.items if item.type == LoadItemType.TENSOR]
            for batch in _batches(boxes, planner):
                self._load_tensors(batch, planner, load)
        finally:
            load.release()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Close the store, if it was opened here. Every load closes its own, except one that fails
        before it reads.
        """
        self._drop()

    @property
    def load_id(self) -> str:
        """Identifies this thread's load; empty before `read_metadata`."""
        return self._work.id if self._work else ""

    @property
    def _ref(self) -> AnyRef:
        return self._first_ref if self._named is None else self._named

    def _in_progress(self) -> _Load:
        if self._work is None:
            raise InvalidInput("no load is in progress on this thread; call read_metadata first")
        return self._work

    def _items(self, store: Store, rank: int | None) -> CommitItems:
        """The items of this reader's commit, or of what `rank` saved alone. Raises `NotFound`."""
        if rank is None:
            snapshot = self._whole(store, self._ref)
        else:
            snapshot = store.checkout(ref_of_rank(self._ref, store.run, rank))
        if self._key is not None and self._key not in snapshot.keys():  # noqa: SIM118  # no mapping
            raise NotFound(
                f"commit {snapshot.id[:12]} has no key {self._key!r}; it has "
                f"{', '.join(snapshot.keys())}; without key=, it is loaded whole"
            )
        items = CommitItems(snapshot, self._key, allow_pickle=self._allow_pickle)
        if rank is None and items.marks.rank is not None:
            raise NotFound(
                f"commit {snapshot.id[:12]} is the part that rank {items.marks.rank} saved alone, "
                "not the whole"
            )
        return items

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
                f"the ranks of run {store.run} saved their parts alone since; step "
                f"{snapshot.step} is the newest whole commit"
            )
        return snapshot

    def _load_objects(self, requests: list[ReadItem], planner: LoadPlanner, load: _Load) -> None:
        items = {request.storage_index.fqn: load.item(request) for request in requests}
        values = load.items.objects(items.values())
        for request in requests:
            name = request.storage_index.fqn
            if items[name].path in load.items.marks.raw:
                planner.load_bytes(request, io.BytesIO(values[name]))
            else:
                _hand_over(planner, request, values[name])

    def _load_tensors(
        self, requests: Iterable[ReadItem], planner: LoadPlanner, load: _Load
    ) -> None:
        targets, wanted, copied = [], [], []
        tensors.check_surroundings()
        for request in requests:
            item = load.item(request)
            target = planner.resolve_tensor(request)
            number, box = _where(item, request)
            committed = item.tree.schema.dtypes[number]
            self._check(item, request, target, committed)
            landing = target.detach()
            if not tensors.is_strided(landing) or not tensors.is_writable_by_range(landing):
                landing = tensors.new(landing.shape, landing.dtype)
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
                f"{item.name}: the planner returned shape {list(target.shape)} for a part of shape "
                f"{list(request.lengths)}"
            )
        own = tensors.DTYPE_NAMES[target.dtype]
        may = target.dtype in FLOATS and converts(committed, target.dtype)
        if own != committed and not (may and self._cast):
            way = "StoreReader(…, cast=True) converts" if may else "make a tensor of that dtype"
            raise InvalidInput(
                f"{item.name} was saved as {committed}, and the state dict has {own} for it; {way}"
            )


def _metadata(item: Named) -> STORAGE_TYPES:
    if not item.parts:
        return BytesStorageMetadata()
    leaf = item.parts[0][1]
    committed = item.tree.content(leaf).boxes if item.is_whole else None
    boxes = committed or [box for box, _ in item.parts]
    chunks = [
        ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths)) for box in boxes
    ]
    properties = TensorProperties(dtype=tensors.dtype_of(item.tree.schema.dtypes[leaf]))
    return TensorStorageMetadata(properties, torch.Size(item.shape), chunks)


def _where(item: Named, request: ReadItem) -> tuple[int, Box]:
    """The leaf and the box of a request."""
    lengths = tuple(request.lengths)
    start = tuple(request.storage_index.offset or (0,) * len(lengths))
    offsets = tuple(a + b for a, b in zip(start, request.storage_offsets, strict=True))
    for box, leaf in item.parts:
        if item.is_whole or box.offsets == start:
            return leaf, within(Box(offsets, lengths), box)
    raise InvalidInput(f"{item.name} is not a tensor, or has no part at {list(start)}")


def _batches(requests: list[ReadItem], planner: LoadPlanner) -> Iterator[list[ReadItem]]:
    """One batch if the tensors exist; several if the planner allocates them."""
    lends = keeps(planner, DefaultLoadPlanner, "resolve_tensor", "transform_tensor")
    batch: list[ReadItem] = []
    size = 0
    for request in requests:
        batch.append(request)
        size += 8 * request.lengths.numel()
        if size >= BATCH_BYTES and not lends:
            yield batch
            batch, size = [], 0
    yield batch


def _hand_over(planner: LoadPlanner, request: ReadItem, value: Any) -> None:
    """Put an object where the planner would. A planner that reads bytes itself gets them as
    torch.save writes them.
    """
    name, own = request.dest_index.fqn, cast(DefaultLoadPlanner, planner)
    if not keeps(planner, DefaultLoadPlanner, "load_bytes"):
        planner.load_bytes(request, dumped(value, name))
    elif own.flatten_state_dict:
        set_element(own.original_state_dict, own.mappings[name], value)
    else:
        own.state_dict[name] = value
