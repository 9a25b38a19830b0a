"""Import a DCP directory as a commit, and export a commit as a DCP directory, with a few tensors in
memory at a time.

`.metadata` locates the pieces of every tensor in the `.distcp` files. It is a pickle, and is read
without running any of it: an unpickler knows the dozen names that DCP writes and makes an inert
record for each. Any other name is refused.
"""

import io
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from ckptstore import Snapshot, Store
from ckptstore.errors import CkptStoreError, Conflict, InvalidInput, Unavailable
from ckptstore.interop.dcp.items import (
    Resolved,
    box_item,
    object_item,
    publish_items,
    read_message,
    write_items,
)
from ckptstore.interop.dcp.names import FLAT_KEY, CommitItems, Keys, Named, dumped
from ckptstore.plugin.model import Box, Shape
from ckptstore.plugin.pointers import is_pointer, read_pointer
from ckptstore.plugin.stores import check_writable, open_parts
from ckptstore.plugin.tensors import tensors
from ckptstore.plugin.text import unicode_text
from ckptstore.plugin.writing import label_of
from ckptstore.plugins.foreign.inert_pickles import load_inert
from ckptstore.plugins.foreign.kinds import check_comes_back
from ckptstore.plugins.foreign.loaded import (
    DCP_METADATA,
    FileBytes,
    Shelf,
    dtype_from,
    foreign_metadata,
    located,
    shape_of,
    stored_tensor,
)


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
    check_writable(store)
    started = time.perf_counter()
    label = label_of(
        store.run, step, tag, message or f"imported from {unicode_text(root.name)}", metrics
    )
    keys, resolved = _read_directory(root, allow_pickle)
    session = open_parts(store)
    try:
        written = read_message(
            0, write_items(store, session.id, 0, resolved, store.run, alone=False)
        )
        return publish_items(
            store, session, [written], keys, label, flat_key=key, world=1, started=started
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
    if root.is_file() or (root / DCP_METADATA).exists():
        raise Conflict(
            f"{root} is {'a file' if root.is_file() else 'a checkpoint'} already; choose another "
            "path"
        )
    planner = _CommitPlanner(CommitItems(snapshot, key, allow_pickle=allow_pickle))
    return write_directory(root, {}, planner)


def write_directory(root: Path, state: dict[str, Any], planner: SavePlanner) -> Metadata:
    """Write what `planner` plans of `state` as DCP's own files, with this process' error in place
    of DCP's `CheckpointException`, which is not an `Exception`."""
    try:
        return _save_state_dict(
            state, _DirectoryWriter(root, overwrite=False), no_dist=True, planner=planner
        )
    except CheckpointException as error:
        failure = next(iter(error.failures.values()))[0]
        if isinstance(failure, OSError):
            raise Unavailable(f"cannot write {root}: {failure}") from failure
        if isinstance(failure, CkptStoreError):
            raise failure from error
        raise InvalidInput(
            f"DCP cannot write this state ({failure!s:.200}); choose what it can with --select "
            "(select=…), or export it as torch"
        ) from failure


class _Properties(TensorProperties):
    """Pickled as torch before 2.15 pickles them, which all later ones read: torch 2.15 adds the
    strides, and older ones refuse a state of six fields."""

    def __reduce__(self) -> tuple[type, tuple[()], tuple[Any, ...]]:
        state: Any = self.__getstate__()  # type: ignore[no-untyped-call]
        return TensorProperties, (), state[:5]


class _DirectoryWriter(FileSystemWriter):
    """DCP's own writer, which `redirect` leaves alone. What it writes is read by every torch from
    2.6 on."""

    def finish(self, metadata: Metadata, results: Any) -> None:
        for each in metadata.state_dict_metadata.values():
            if isinstance(each, TensorStorageMetadata):
                own = each.properties
                each.properties = _Properties(
                    own.dtype, own.layout, own.requires_grad, own.memory_format, own.pin_memory
                )
        super().finish(metadata, results)


class _CommitPlanner(DefaultSavePlanner):
    """Plans the items of a commit, and reads each when it is written."""

    def __init__(self, items: CommitItems) -> None:
        super().__init__()
        self._items = items

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Plan tensors without memory, and objects that are not read yet."""
        self.is_coordinator = is_coordinator
        self.mappings = {name: item.keys for name, item in self._items.by_name.items()}
        self.state_dict = {name: _planned(item) for name, item in self._items.by_name.items()}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = write_item.index.fqn
        item = self._items.by_name[name]
        if not item.parts:
            value = self._items.objects([item])[name]
            if item.path in self._items.marks.raw:
                return io.BytesIO(value)
            return _exported(value, name, self._items.allow_pickle)
        tensor: torch.Tensor = self._items.snapshot.read(item.tree.schema.paths[item.parts[0][1]])
        return tensor


class PlainPlanner(DefaultSavePlanner):
    """DCP's own planner, whose objects an import reads without trust, unless `allow_pickle`."""

    def __init__(self, allow_pickle: bool) -> None:
        super().__init__()
        self._allow_pickle = allow_pickle

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type is WriteItemType.BYTE_IO:
            return _exported(object, write_item.index.fqn, self._allow_pickle)
        return object


def _exported(value: Any, name: str, allow_pickle: bool) -> io.BytesIO:
    """The bytes of an object. Raises `InvalidInput` for one that an import would not read, unless
    `allow_pickle`."""
    data = dumped(value, name)
    if not allow_pickle:
        check_comes_back(data, value, name)
        data.seek(0)
    return data


def _planned(item: Named) -> torch.Tensor | None:
    if not item.parts:
        return None
    if not item.is_whole:
        raise InvalidInput(
            f"{item.path} is the part of a tensor that one rank saved alone; the commit does not "
            "have the whole"
        )
    dtype = tensors.dtype_of(item.tree.schema.dtypes[item.parts[0][1]])
    if not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
        try:
            torch.iinfo(dtype)  # as DCP does for the size of an element
        except TypeError as error:
            raise InvalidInput(
                f"{item.path} is {dtype}, which DCP cannot write; leave it out with --select "
                "(select=…), or export it as torch"
            ) from error
    return torch.empty(item.shape, dtype=dtype, device="meta")


def _read_directory(root: Path, allow_pickle: bool) -> tuple[dict[str, Keys], list[Resolved]]:
    """The keys that lead to each item of a DCP directory, and the items. Tensors are read when they
    are stored, a few at a time.
    """
    if is_pointer(root):
        pointer = read_pointer(root)
        raise InvalidInput(
            f"{root} points to commit {pointer.id[:12]} of the store {pointer.store}; bring that "
            "into another by `ckptstore push`"
        )
    found = load_inert(root / DCP_METADATA)
    shelf = Shelf()
    with foreign_metadata(root / DCP_METADATA, "DCP metadata"):
        pieces = _pieces(root, found)
        nesting = getattr(found, "planner_data", None) or {}
        keys = {name: tuple(nesting.get(name) or (name,)) for name in found.state_dict_metadata}
        for name, own in keys.items():
            if not all(type(key) in (str, int) for key in own):
                raise InvalidInput(
                    f"{root}: the keys that lead to {name} are {str(own)[:80]}; wanted strings and "
                    "integers"
                )
        return keys, [
            _item(f"{name} in {root}", name, item, pieces.get(name, []), shelf, allow_pickle)
            for name, item in found.state_dict_metadata.items()
        ]


def _pieces(root: Path, found: Any) -> dict[str, list[tuple[Shape | None, FileBytes]]]:
    """The stored pieces of each item, with the offsets that tensors have."""
    pieces: dict[str, list[tuple[Shape | None, FileBytes]]] = {}
    for index, info in found.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise InvalidInput(
                f"{root}: {index.fqn} was stored through an extension; load it with DCP itself, "
                "and commit the state"
            )
        piece = located(index.fqn, root, info.relative_path, info.offset, info.length)
        offset = getattr(index, "offset", None)
        at = None if offset is None else tuple(offset)
        pieces.setdefault(index.fqn, []).append((at, piece))
    return pieces


def _item(
    where: str,
    name: str,
    item: Any,
    pieces: list[tuple[Shape | None, FileBytes]],
    shelf: Shelf,
    allow_pickle: bool,
) -> Resolved:
    if type(item).__name__ == "BytesStorageMetadata":
        if len(pieces) != 1:
            raise InvalidInput(f"{where} is stored in {len(pieces)} places; wanted one")
        return object_item(name, pieces[0][1].load(where, allow_pickle=allow_pickle), allow_pickle)
    columns = item.properties.columns
    dtype = dtype_from(where, columns[0] if columns else item.properties.dtype)
    boxes = {shape_of(chunk.offsets): shape_of(chunk.sizes) for chunk in item.chunks}
    boxed = [(Box(at, boxes[at]), piece) for at, piece in pieces if at in boxes and at is not None]
    source, shape = stored_tensor(where, dtype, shape_of(item.size), boxed, shelf)
    return box_item(name, dtype, shape, Box.whole(shape)), [source]
