"""How does a DCP directory become a commit, and a commit a DCP directory? With a few tensors in
memory at a time.
"""

import io
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from ckptstore.commit.commit_metadata import label_of
from ckptstore.core.model import Box
from ckptstore.core.text import unicode_text
from ckptstore.errors import Conflict, InvalidInput, Unavailable
from ckptstore.interop.dcp.directory import Found, found_in
from ckptstore.interop.dcp.items import (
    BoxItem,
    Resolved,
    decode_message,
    dumped,
    flattened,
    marks_of,
    messages_of,
    objects_of,
    parts_of,
)
from ckptstore.interop.dcp.names import FLAT_KEY, Named, named
from ckptstore.interop.dcp.state_tree import plant
from ckptstore.restore.reader import ReadRequest
from ckptstore.snapshot import Snapshot, contents_of
from ckptstore.state import tensors
from ckptstore.state.leaves import Destination
from ckptstore.store import Store, internals_of


def dcp_to_store(
    path: str | os.PathLike[str],
    store: Store,
    *,
    step: int | None = None,
    tag: str | Sequence[str] = (),
    metrics: Mapping[str, float] | None = None,
    message: str = "",
    key: str = FLAT_KEY,
    allow_pickle: bool = False,
) -> Snapshot:
    """Commit a DCP directory, under DCP's names: the same commit as `dcp.save` with a `StoreWriter`
    makes.

    Raises `InvalidInput` for any other directory, for names that leave it, for pieces that do not
    tile a tensor, and, unless `allow_pickle`, for objects that need unpickling.
    """
    root = Path(path)
    internals = internals_of(store)
    internals.handle.check_writable()
    committer = internals.runtime.parts_committer
    started = time.perf_counter()
    found = found_in(root, allow_pickle=allow_pickle)
    resolved = [_resolved(each, allow_pickle) for each in found]
    session = committer.open()
    try:
        written = committer.write(session.id, 0, parts_of(resolved, alone=False))
        messages = messages_of(resolved, written.contents)
        stored = [
            decode_message(each.name, 0, text) for each, text in zip(found, messages, strict=True)
        ]
        keys = {each.name: each.keys for each in found}
        planted = plant(stored, keys, flat_key=key, chunk_bytes=store.chunk_bytes, world=1)
        text = message or f"imported from {unicode_text(root.name)}"
        return internals.commit_external(
            lambda metadata: committer.publish(
                session, metadata, planted.trees, planted.layout, [written.receipt], started
            ),
            label_of(store.run, step, tag, text, metrics),
        )
    finally:
        session.abandon()


def store_to_dcp(
    snapshot: Snapshot,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    allow_pickle: bool = False,
) -> Metadata:
    """Write a commit as a directory that `dcp.load` reads without ckptstore; with `key`, only that
    key, without its name.

    Objects in it are pickles, as DCP writes them. Raises `Conflict` if there is a checkpoint at
    `path`, `InvalidInput` if two leaves would have one name, `Unavailable` if `path` cannot be
    written, `Corrupt` for damaged chunks.
    """
    root = Path(path)
    if root.is_file() or (root / ".metadata").exists():
        raise Conflict(
            f"{root} is {'a file' if root.is_file() else 'a checkpoint'} already; choose another "
            "path"
        )
    planner = _CommitPlanner(snapshot, key, allow_pickle=allow_pickle)
    with errors_of_dcp(root):
        return _save_state_dict(
            {}, FileSystemWriter(root, overwrite=False), no_dist=True, planner=planner
        )


@contextmanager
def errors_of_dcp(root: Path) -> Iterator[None]:
    """Unwrap this process' error from DCP's `CheckpointException`, which is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        failure = next(iter(error.failures.values()))[0]
        if isinstance(failure, OSError):
            raise Unavailable(f"cannot write {root}: {failure}") from failure
        raise failure from error


class _CommitPlanner(SavePlanner):
    """Plans the items of a commit, and reads each when it is written."""

    def __init__(self, snapshot: Snapshot, key: str | None, *, allow_pickle: bool) -> None:
        self._snapshot, self._allow_pickle = snapshot, allow_pickle
        self._marks = marks_of(snapshot)
        self._items = named(contents_of(snapshot).trees, self._marks, key)
        if torn := [item.path for item in self._items.values() if item.parts]:
            raise InvalidInput(
                f"{torn[0]} is a part that one rank saved by itself; there is no whole of it to "
                "write"
            )

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Does nothing: the state is the commit."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_planned(item) for item in self._items.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, replace(
            metadata, planner_data={name: item.keys for name, item in self._items.items()}
        )

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = write_item.index.fqn
        item = self._items[name]
        if item.tensor is None:
            value = objects_of(self._snapshot, {name: item}, allow_pickle=self._allow_pickle)[name]
            return io.BytesIO(value) if item.path in self._marks.raw else dumped(value)
        schema = item.tree.schema
        item.tree.check(item.tensor)  # before memory is allocated for a shape that may be damaged
        tensor = tensors.empty(schema.dtypes[item.tensor], schema.shapes[item.tensor])
        contents_of(self._snapshot).read([ReadRequest(item.tree, item.tensor, Destination(tensor))])
        return tensor


def _planned(item: Named) -> WriteItem:
    if item.tensor is None:
        return WriteItem(MetadataIndex(item.name), WriteItemType.BYTE_IO)
    schema = item.tree.schema
    size = torch.Size(schema.shapes[item.tensor])
    offsets = torch.Size([0] * len(size))
    properties = TensorProperties(dtype=tensors.dtype_of(schema.dtypes[item.tensor]))
    data = TensorWriteData(ChunkStorageMetadata(offsets, size), properties, size)
    return WriteItem(MetadataIndex(item.name, offsets), WriteItemType.TENSOR, tensor_data=data)


def _resolved(found: Found, allow_pickle: bool) -> Resolved:
    if found.source is None:
        return flattened(found.name, found.value, allow_pickle, is_bytes=False)
    return BoxItem(found.dtype, found.shape, Box((0,) * len(found.shape), found.shape)), [
        found.source
    ]
