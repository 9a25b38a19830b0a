"""How is a TorchSnapshot directory read? It has a manifest in JSON, and the tensors' raw bytes in
files beside it. The package itself is not needed.

Replicated and sharded tensors of several ranks are joined. State of a single rank is refused: it
cannot be told apart from private state.
"""

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ckptstore.core.geometry import WIDTHS, nbytes_of, width_of
from ckptstore.core.model import Box, Shape
from ckptstore.errors import InvalidInput
from ckptstore.interop.formats.pickles import load_torch
from ckptstore.interop.formats.sources import (
    FileRange,
    Loaded,
    Placeholders,
    Shelf,
    check_tiling,
    inside,
    read_range,
)
from ckptstore.interop.torchsnapshot.manifest import primitive
from ckptstore.state.leaf_sources import FlatState

if TYPE_CHECKING:
    import torch

METADATA = ".snapshot_metadata"
METADATA_BYTES_MAX = 1 << 30
_DICTS = ("dict", "OrderedDict")


def read_directory(root: Path, *, allow_pickle: bool = False) -> dict[str, FlatState]:
    """The state in a TorchSnapshot directory; raw tensors are read when they are stored, piece by
    piece.

    Raises `InvalidInput` for any other directory, for names that leave it, for incomplete tensors,
    and, unless `allow_pickle`, for objects that need unpickling.
    """
    manifest, world_size = _manifest(root / METADATA)
    try:
        return _Snapshot(root, manifest, world_size, allow_pickle=allow_pickle).flatten()
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, struct.error) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(
            f"{root / METADATA} is no manifest of TorchSnapshot that this version reads: "
            f"{error!r:.200}"
        ) from error


def _manifest(path: Path) -> tuple[dict[str, Any], int]:
    try:
        if path.stat().st_size > METADATA_BYTES_MAX:
            raise InvalidInput(f"{path} has more than {METADATA_BYTES_MAX} bytes")
        document = json.loads(path.read_bytes())
        return dict(document["manifest"]), int(document["world_size"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidInput(
            f"{path} is no manifest that TorchSnapshot 0.1 wrote: {error!r:.200}"
        ) from error


class _Snapshot:
    """One reading of a manifest."""

    def __init__(
        self, root: Path, manifest: dict[str, Any], world_size: int, *, allow_pickle: bool
    ) -> None:
        self._root, self._allow_pickle = root, allow_pickle
        self._entries = _merged(root, manifest, world_size)
        self._places, self._shelf = Placeholders(), Shelf()
        self._below: dict[str, list[str]] = {}
        for path in self._entries:
            if "/" in path:
                self._below.setdefault(path.rpartition("/")[0], []).append(path)

    def flatten(self) -> dict[str, FlatState]:
        state = {unquote(path): self._value(path) for path in self._entries if "/" not in path}
        return self._places.flatten(state, allow_pickle=self._allow_pickle)

    def _value(self, path: str) -> Any:
        entry = self._entries[path]
        kind = entry["type"]
        if kind in _DICTS:
            children = {
                unquote(child.rpartition("/")[2]): child for child in self._below.get(path, ())
            }
            return {
                key: self._value(children[str(key)])
                for key in entry["keys"]
                if str(key) in children
            }
        if kind == "list":
            order = sorted(
                self._below.get(path, ()), key=lambda child: int(child.rpartition("/")[2])
            )
            return [self._value(child) for child in order]
        if kind == "Tensor":
            return self._tensor(path, entry)
        if kind in ("ChunkedTensor", "ShardedTensor"):
            return self._pieces(
                path,
                entry["chunks"] if kind == "ChunkedTensor" else entry["shards"],
                entry.get("shape"),
            )
        if kind == "object":
            return self._object(entry)
        return primitive(kind, entry["serialized_value"])

    def _tensor(self, path: str, entry: dict[str, Any]) -> "torch.Tensor":
        dtype, shape = _dtype(path, entry), _shape(entry["shape"])
        nbytes = nbytes_of(dtype, shape)
        if entry["serializer"] == "buffer_protocol":
            file, start = self._range(path, entry, nbytes)
            return self._places.put(dtype, shape, FileRange(file, start, nbytes, width_of(dtype)))
        return self._places.put(
            dtype,
            shape,
            Loaded(lambda: self._piece(path, entry), nbytes, width_of(dtype), self._shelf),
        )

    def _pieces(self, path: str, pieces: list[dict[str, Any]], whole: Any) -> "torch.Tensor":
        dtype = _dtype(path, pieces[0]["tensor"])
        boxes = [
            (_shape(piece["offsets"]), _shape(piece["sizes"]), piece["tensor"]) for piece in pieces
        ]
        ends = [
            tuple(start + n for start, n in zip(offsets, sizes, strict=True))
            for offsets, sizes, _ in boxes
        ]
        shape = (
            _shape(whole)
            if whole is not None
            else tuple(max(column) for column in zip(*ends, strict=True))
        )
        check_tiling(
            f"{path} in {self._root}", shape, [Box(offsets, sizes) for offsets, sizes, _ in boxes]
        )
        join = self._joiner(path, dtype, shape, boxes)
        return self._places.put(
            dtype, shape, Loaded(join, nbytes_of(dtype, shape), width_of(dtype), self._shelf)
        )

    def _joiner(
        self, path: str, dtype: str, shape: Shape, boxes: list[tuple[Shape, Shape, dict[str, Any]]]
    ) -> "Callable[[], torch.Tensor]":
        def load() -> "torch.Tensor":
            from ckptstore.state.tensors import empty

            joined = empty(dtype, shape)
            for offsets, sizes, entry in boxes:
                joined[
                    tuple(slice(start, start + n) for start, n in zip(offsets, sizes, strict=True))
                ] = self._piece(path, entry)
            return joined

        return load

    def _piece(self, path: str, entry: dict[str, Any]) -> "torch.Tensor":
        """One stored tensor, read whole."""
        import torch

        from ckptstore.state.tensors import DTYPES, empty, memory_of

        dtype, shape = _dtype(path, entry), _shape(entry["shape"])
        if entry["serializer"] == "buffer_protocol":
            file, start = self._range(path, entry, nbytes_of(dtype, shape))
            tensor = empty(dtype, shape)
            FileRange(file, start, tensor.nbytes).stage(0, tensor.nbytes, memory_of(tensor))
            return tensor
        loaded = self._object(entry)
        if (
            not isinstance(loaded, torch.Tensor)
            or loaded.dtype != DTYPES[dtype]
            or tuple(loaded.shape) != shape
        ):
            raise InvalidInput(
                f"{self._root}: {path} is not what the manifest says: wanted {dtype}{list(shape)}"
            )
        return loaded

    def _range(self, path: str, entry: dict[str, Any], nbytes: int) -> tuple[Path, int]:
        file = inside(self._root, entry["location"])
        start, stop = entry.get("byte_range") or (0, nbytes)
        if (
            type(start) is not int
            or type(stop) is not int
            or start < 0
            or stop - start != nbytes
            or stop > file.stat().st_size
        ):
            raise InvalidInput(
                f"{self._root}: {path} should be {nbytes} bytes of {file.name}, which are not there"
            )
        return file, start

    def _object(self, entry: dict[str, Any]) -> Any:
        if entry["serializer"] != "torch_save":
            raise InvalidInput(
                f"{self._root}: {entry['location']} is serialized as {entry['serializer']!r}; "
                "wanted torch_save"
            )
        file = inside(self._root, entry["location"])
        if not entry.get("byte_range"):
            return load_torch(file, str(file), allow_pickle=self._allow_pickle)
        start, stop = entry["byte_range"]
        if (
            type(start) is not int
            or type(stop) is not int
            or not 0 <= start <= stop <= file.stat().st_size
        ):
            raise InvalidInput(f"{self._root}: the place of {entry['location']!r:.80} is no place")
        data = bytearray(stop - start)
        read_range(file, start, memoryview(data))
        return load_torch(io.BytesIO(data), f"a part of {file}", allow_pickle=self._allow_pickle)


def _merged(root: Path, manifest: dict[str, Any], world_size: int) -> dict[str, Any]:
    """The entries of all ranks as one state: shards joined, replicas and containers once."""
    merged: dict[str, Any] = {}
    for ranked, entry in manifest.items():
        rank, _, path = ranked.partition("/")
        known = merged.get(path)
        if known is None:
            merged[path] = dict(entry)
        elif entry["type"] == known["type"] == "ShardedTensor":
            seen = [piece["offsets"] for piece in known["shards"]]
            known["shards"] = known["shards"] + [
                piece for piece in entry["shards"] if piece["offsets"] not in seen
            ]
        elif entry["type"] in _DICTS and known["type"] == entry["type"]:
            known["keys"] = known["keys"] + [
                key for key in entry["keys"] if key not in known["keys"]
            ]
        elif entry["type"] != "list" and entry != known:
            raise InvalidInput(
                f"{root}: each of {world_size} ranks has {path} for itself (rank {rank}); load it "
                "with TorchSnapshot"
            )
    return merged


def _dtype(path: str, entry: dict[str, Any]) -> str:
    name = str(entry["dtype"]).removeprefix("torch.")
    if name not in WIDTHS:
        raise InvalidInput(
            f"{path} is of dtype {name[:40]!r}, which cannot be imported; load it with "
            "TorchSnapshot itself"
        )
    return name


def _shape(sizes: Any) -> Shape:
    if not isinstance(sizes, list) or not all(type(n) is int and n >= 0 for n in sizes):
        raise InvalidInput(f"{str(sizes)[:80]} is no shape")
    return tuple(sizes)
