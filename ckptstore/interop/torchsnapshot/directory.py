"""Read a directory that TorchSnapshot wrote: a manifest in JSON, and files with the tensors' raw
bytes. The package itself is not needed.

Replicated and sharded tensors of several ranks are joined. State of a single rank is refused: it
cannot be told apart from private state.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ckptstore.core.geometry import nbytes_of
from ckptstore.core.model import Box
from ckptstore.errors import InvalidInput
from ckptstore.interop.formats.sources import (
    SNAPSHOT_METADATA,
    Piece,
    Placeholders,
    dtype_from,
    foreign_metadata,
    inside,
    located,
    read_json,
    shape_of,
)
from ckptstore.interop.torchsnapshot.manifest import primitive
from ckptstore.state.leaf_sources import FlatState

if TYPE_CHECKING:
    import torch

_DICTS = ("dict", "OrderedDict")


def read_directory(root: Path, *, allow_pickle: bool = False) -> dict[str, FlatState]:
    """The state in a TorchSnapshot directory; raw tensors are read when they are stored, piece by
    piece.

    Raises `InvalidInput` for any other directory, for names that leave it, for incomplete tensors,
    and, unless `allow_pickle`, for objects that need unpickling.
    """
    path = root / SNAPSHOT_METADATA
    with foreign_metadata(path, "a manifest of TorchSnapshot"):
        document = read_json(path)
        entries = _merged(root, document["manifest"], int(document["world_size"]))
        return _Snapshot(root, entries, allow_pickle=allow_pickle).flatten()


class _Snapshot:
    """One reading of a manifest."""

    def __init__(self, root: Path, entries: dict[str, Any], *, allow_pickle: bool) -> None:
        self._root, self._entries, self._allow_pickle = root, entries, allow_pickle
        self._places = Placeholders()
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
        below = {child.rpartition("/")[2]: child for child in self._below.get(path, ())}
        if kind in _DICTS:
            children = {unquote(name): child for name, child in below.items()}
            return {
                key: self._value(children[str(key)])
                for key in entry["keys"]
                if str(key) in children
            }
        if kind == "list":
            return [self._value(below[name]) for name in sorted(below, key=int)]
        if kind == "Tensor":
            origin = [0] * len(entry["shape"])
            piece = {"offsets": origin, "sizes": entry["shape"], "tensor": entry}
            return self._tensor(path, [piece], None)
        if kind in ("ChunkedTensor", "ShardedTensor"):
            pieces = entry["chunks" if kind == "ChunkedTensor" else "shards"]
            return self._tensor(path, pieces, entry.get("shape"))
        if kind == "object":
            where = f"{path} in {self._root}"
            return self._piece(path, entry, None).load(where, allow_pickle=self._allow_pickle)
        return primitive(kind, entry["serialized_value"])

    def _tensor(self, path: str, pieces: list[dict[str, Any]], whole: Any) -> "torch.Tensor":
        """A placeholder for a tensor of shape `whole`; None if only its pieces say it."""
        where = f"{path} in {self._root}"
        dtype = dtype_from(where, pieces[0]["tensor"]["dtype"])
        boxed = []
        for each in pieces:
            box = Box(shape_of(each["offsets"]), shape_of(each["sizes"]))
            boxed.append((box, self._piece(path, each["tensor"], nbytes_of(dtype, box.lengths))))
        shape = None if whole is None else shape_of(whole)
        return self._places.put(where, dtype, shape, boxed)

    def _piece(self, path: str, entry: dict[str, Any], nbytes: int | None) -> Piece:
        """Where an entry's bytes are. `nbytes` is the size of a tensor, which may be raw."""
        file, serializer = entry["location"], entry["serializer"]
        raw = nbytes is not None and serializer == "buffer_protocol"
        if not raw and serializer != "torch_save":
            raise InvalidInput(
                f"{self._root}: {file} is serialized as {serializer!r}; wanted torch_save"
            )
        size: Any = nbytes if raw else inside(self._root, file).stat().st_size
        start, stop = entry.get("byte_range") or (0, size)
        if raw and stop - start != nbytes:
            raise InvalidInput(
                f"{self._root}: {path} has {nbytes} bytes, and {stop - start} are stored"
            )
        return located(path, self._root, file, start, stop - start, raw=raw)


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
