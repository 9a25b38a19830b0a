"""The bytes of an import: ranges of files, read on demand, so that memory stays bounded.

Some formats can only load whole tensors. Such a tensor is loaded when its first bytes are read, and
cached until a few others were.
"""

import io
import json
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptstore.errors import InvalidInput, Unavailable
from ckptstore.plugin.leaves import FlatState, Source, StagedSource
from ckptstore.plugin.model import WIDTHS, Box, Shape, nbytes_of, width_of
from ckptstore.plugin.pointers import DIRECTORY_POINTERS
from ckptstore.plugin.values import IdentityDict
from ckptstore.plugins.foreign.inert_pickles import METADATA_BYTES_MAX
from ckptstore.plugins.foreign.kinds import load_torch
from ckptstore.plugins.foreign.sources import (
    FileRange,
    Joined,
    check_tiling,
    read_range,
    shape_around,
)

if TYPE_CHECKING:
    import torch

DCP_METADATA, SNAPSHOT_METADATA = DIRECTORY_POINTERS
"""The files by which a directory of DCP, and one of TorchSnapshot, is recognized."""

KEPT_TENSORS = 4
"""At least the number of threads that stage at once."""


class Loaded(StagedSource):
    """A tensor that `load` returns whole; `shelf` caches it while it is likely to be read again."""

    __slots__ = ("_load", "_shelf")

    def __init__(
        self, load: "Callable[[], torch.Tensor]", nbytes: int, width: int, shelf: "Shelf"
    ) -> None:
        super().__init__(nbytes, width)
        self._load, self._shelf = load, shelf

    def load(self) -> "torch.Tensor":
        return self._load()

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        from ckptstore.plugin.tensors import read_range as read_tensor

        read_tensor(self._shelf.get(self), start, stop, out)


class Shelf:
    """A cache of the tensors loaded last. Thread-safe; a tensor is loaded by one thread."""

    def __init__(self) -> None:
        self._load = lru_cache(KEPT_TENSORS)(Loaded.load)
        self._lock = threading.Lock()

    def get(self, source: Loaded) -> "torch.Tensor":
        with self._lock:
            return self._load(source)


@dataclass(frozen=True, slots=True)
class FileBytes:
    """Bytes `start:start + nbytes` of a file: a tensor's own, or, unless `raw`, a file of
    torch.save.
    """

    path: Path
    start: int
    nbytes: int
    raw: bool = False

    def load(self, name: str, *, allow_pickle: bool) -> Any:
        """The object in a file of torch.save; `name` is for errors."""
        data = bytearray(self.nbytes)
        read_range(self.path, self.start, memoryview(data))
        return load_torch(
            io.BytesIO(data), f"{name}, in {self.path.name}", allow_pickle=allow_pickle
        )


def located(
    what: str, root: Path, name: object, start: Any, nbytes: Any, *, raw: bool = False
) -> FileBytes:
    """The piece that holds `what` in file `name` of the directory `root`. Raises `InvalidInput` if
    the file does not hold it."""
    path = inside(root, name)
    size = path.stat().st_size
    if type(start) is not int or type(nbytes) is not int or min(start, nbytes) < 0:
        raise InvalidInput(
            f"{root}: the metadata places {what} at {start!r:.40}, with {nbytes!r:.40} bytes; "
            "wanted whole numbers"
        )
    if start + nbytes > size:
        raise InvalidInput(
            f"{root}: {what} ends at byte {start + nbytes} of {path.name}, which has {size} bytes"
        )
    return FileBytes(path, start, nbytes, raw)


def stored_tensor(
    where: str,
    dtype: str,
    shape: Shape | None,
    pieces: Sequence[tuple[Box, FileBytes]],
    shelf: "Shelf",
) -> tuple[Source, Shape]:
    """The source and the shape of a tensor, from its pieces. Without `shape`, the shape is derived
    from the pieces.

    Raises `InvalidInput` unless the pieces make up the tensor, each element once; later, when it is
    read, if a piece is another tensor than its box says.
    """
    boxes = [box for box, _ in pieces]
    shape = shape_around(boxes) if shape is None else shape
    check_tiling(where, shape, boxes)
    width = width_of(dtype)
    if not all(piece.raw for _, piece in pieces):
        return Loaded(
            lambda: _load_pieces(where, dtype, shape, pieces), nbytes_of(dtype, shape), width, shelf
        ), shape
    ranges = [(box, FileRange(each.path, each.start, each.nbytes, width)) for box, each in pieces]
    return ranges[0][1] if len(ranges) == 1 else Joined(shape, width, ranges), shape


def _load_pieces(
    where: str, dtype: str, shape: Shape, pieces: Sequence[tuple[Box, FileBytes]]
) -> "torch.Tensor":
    import torch

    from ckptstore.plugin.tensors import DTYPES, empty

    whole = empty(dtype, shape) if len(pieces) != 1 else None
    for box, piece in pieces:
        part = piece.load(where, allow_pickle=False)
        if (
            not isinstance(part, torch.Tensor)
            or part.dtype != DTYPES[dtype]
            or tuple(part.shape) != box.lengths
        ):
            raise InvalidInput(
                f"a piece of {where} is not what the metadata says: wanted "
                f"{dtype}{list(box.lengths)}"
            )
        if whole is None:
            return part
        whole[box.slices] = part
    assert whole is not None
    return whole


class Placeholders:
    """Tensors without memory, which stand for sources while a state is flattened."""

    def __init__(self) -> None:
        self._sources: IdentityDict[torch.Tensor, Source] = IdentityDict()
        self._shelf = Shelf()

    def put(
        self, where: str, dtype: str, shape: Shape | None, pieces: Sequence[tuple[Box, FileBytes]]
    ) -> "torch.Tensor":
        """A placeholder for a tensor (`stored_tensor`)."""
        from ckptstore.plugin.tensors import empty

        source, shape = stored_tensor(where, dtype, shape, pieces, self._shelf)
        tensor = empty(dtype, ()).expand(shape)
        self._sources[tensor] = source
        return tensor

    def flatten(
        self, app_state: Mapping[str, Any], *, allow_pickle: bool = False
    ) -> dict[str, FlatState]:
        """The flattened state, with sources instead of placeholders."""
        from ckptstore.plugin.tensors import TensorSource
        from ckptstore.plugin.values import flatten

        flats = flatten(app_state, allow_pickle=allow_pickle, shared=True)
        for flat in flats.values():
            for i, leaf in enumerate(flat.leaves):
                if isinstance(leaf, TensorSource):
                    flat.leaves[i] = self._sources.get(leaf.tensor, leaf)
        return flats


@contextmanager
def foreign_metadata(path: Path, what: str) -> Iterator[None]:
    """Name `path` in the `InvalidInput` for metadata that cannot be parsed as `what`, and in the
    `Unavailable` for a file that cannot be read."""
    try:
        yield
    except InvalidInput:
        raise
    except OSError as error:
        raise Unavailable(
            f"cannot read {error.filename or path}: {error}; see that it is there and may be read, "
            "then repeat"
        ) from error
    except (
        AttributeError,
        IndexError,
        KeyError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        raise InvalidInput(
            f"{path} is not {what} that this version reads: {error!r:.200}"
        ) from error


def read_json(path: Path) -> Any:
    """The JSON document in a file, of which nothing is known yet."""
    if path.stat().st_size > METADATA_BYTES_MAX:
        raise InvalidInput(f"{path} has more than {METADATA_BYTES_MAX} bytes")
    return json.loads(path.read_bytes())


def inside(root: Path, name: object) -> Path:
    """The path of file `name` in a directory. Raises `InvalidInput` for names that lead elsewhere,
    or to no file.
    """
    path = root.joinpath(*check_name(name, root))
    if not path.is_file() or not path.resolve().is_relative_to(root.resolve()):
        raise InvalidInput(f"{root} has no file {str(name)[:80]!r} of its own")
    return path


def check_name(name: object, where: object) -> list[str]:
    """The parts of a relative name. Raises `InvalidInput` for one that leads out of its
    directory."""
    parts = name.split("/") if isinstance(name, str) else [""]
    if not {"", ".", ".."}.isdisjoint(parts) or "\0" in str(name) or "\\" in str(name):
        raise InvalidInput(
            f"{str(name)[:80]!r} is not the name of a file in {where}: wanted names joined by '/', "
            "without '.' and '..'"
        )
    return parts


def shape_of(sizes: Any) -> Shape:
    """A shape or offsets from foreign metadata. Raises `InvalidInput` unless they are counts."""
    shape = tuple(sizes)
    if not all(type(n) is int and n >= 0 for n in shape):
        raise InvalidInput(f"{str(shape)[:80]} is not a shape: wanted whole numbers from 0 on")
    return shape


def dtype_from(where: str, dtype: object) -> str:
    """A dtype from foreign metadata. Raises `InvalidInput` for one that torch does not have."""
    name = str(dtype).removeprefix("torch.")
    if name not in WIDTHS:
        raise InvalidInput(
            f"{where} is of dtype {name[:40]!r}, which cannot be imported; load it with the "
            "library that wrote it"
        )
    return name


def as_app_state(state: Any) -> dict[str, Any]:
    """A loaded value as an application state: a dict as it is, a plain state dict under the key
    `model`.
    """
    import torch

    named = isinstance(state, dict) and state and all(type(key) is str for key in state)
    if named and not all(isinstance(value, torch.Tensor) for value in state.values()):
        return dict(state)
    return {"model": state}
