"""How is a DCP directory read? `.metadata` locates the pieces of every tensor in the `.distcp`
files.

`.metadata` is a pickle. It is read without running any of it: an unpickler knows the dozen names
that DCP writes and makes an inert record for each. Any other name is refused.
"""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptstore.core.geometry import WIDTHS, nbytes_of, width_of
from ckptstore.core.model import Box, Shape
from ckptstore.errors import InvalidInput
from ckptstore.interop.formats.pickles import load_inert, load_torch
from ckptstore.interop.formats.sources import Loaded, Shelf, check_tiling, inside, read_range
from ckptstore.objects.pointer_files import is_pointer, read_pointer

if TYPE_CHECKING:
    import torch

METADATA = ".metadata"
METADATA_BYTES_MAX = 1 << 30


@dataclass(frozen=True, slots=True)
class Part:
    """One stored item, a file of torch.save: a box of a tensor, or an object if `offsets` is
    None.
    """

    path: Path
    start: int
    nbytes: int
    offsets: Shape | None
    lengths: Shape


@dataclass(frozen=True, slots=True)
class Found:
    """An item: its name, the keys that lead to it, and the source of its bytes. An object has no
    source but a `value`.
    """

    name: str
    keys: tuple[str | int, ...]
    dtype: str = ""
    shape: Shape = ()
    source: Loaded | None = None
    value: Any = None


def found_in(root: Path, *, allow_pickle: bool = False) -> list[Found]:
    """The items of a DCP directory. Tensors are read when they are stored, a few at a time.

    Raises `InvalidInput` for any other directory, for names that leave it, for pieces that do not
    tile a tensor, and, unless `allow_pickle`, for objects that need unpickling.
    """
    if is_pointer(root):
        pointer = read_pointer(root)
        raise InvalidInput(
            f"{root} points to commit {pointer.id[:12]} of the store {pointer.store}; bring that "
            "into another by `ckptstore push`"
        )
    found = load_inert(root / METADATA, METADATA_BYTES_MAX)
    shelf = Shelf()
    try:
        parts = dict(_parts(root, found))
        nesting = getattr(found, "planner_data", None) or {}
        return [
            _found(
                root,
                name,
                tuple(nesting.get(name) or (name,)),
                item,
                parts.get(name, []),
                shelf,
                allow_pickle,
            )
            for name, item in found.state_dict_metadata.items()
        ]
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(
            f"{root / METADATA} is no metadata of DCP that this version reads: {error!r:.200}"
        ) from error


def _parts(root: Path, found: Any) -> Iterable[tuple[str, list[Part]]]:
    parts: dict[str, list[Part]] = {}
    for index, info in found.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise InvalidInput(
                f"{root}: {index.fqn} was stored through an extension; load it with DCP itself, "
                "and commit the state"
            )
        path = inside(root, info.relative_path)
        if (
            type(info.offset) is not int
            or type(info.length) is not int
            or not 0 <= info.offset <= info.offset + info.length
        ):
            raise InvalidInput(f"{root}: the place of {index.fqn} is no place")
        if info.offset + info.length > path.stat().st_size:
            raise InvalidInput(f"{root}: {index.fqn} lies beyond the end of {path.name}")
        offset = getattr(index, "offset", None)
        parts.setdefault(index.fqn, []).append(
            Part(path, info.offset, info.length, None if offset is None else tuple(offset), ())
        )
    return parts.items()


def _found(
    root: Path,
    name: str,
    keys: tuple[Any, ...],
    item: Any,
    parts: list[Part],
    shelf: Shelf,
    allow_pickle: bool,
) -> Found:
    if not all(type(key) in (str, int) for key in keys):
        raise InvalidInput(
            f"{root}: the keys that lead to {name} are {str(keys)[:80]}; wanted texts and numbers"
        )
    if type(item).__name__ == "BytesStorageMetadata":
        if len(parts) != 1:
            raise InvalidInput(f"{root}: {name} is stored in {len(parts)} places; wanted one")
        return Found(name, keys, value=_load(parts[0], name, allow_pickle=allow_pickle))
    dtype, shape = _dtype(name, item.properties), _shape(item.size)
    boxes = {_shape(chunk.offsets): _shape(chunk.sizes) for chunk in item.chunks}
    chunks = [
        Part(p.path, p.start, p.nbytes, p.offsets, boxes[p.offsets])
        for p in parts
        if p.offsets in boxes and p.offsets is not None
    ]
    check_tiling(
        f"{name} in {root}", shape, [Box(chunk.offsets or (), chunk.lengths) for chunk in chunks]
    )
    source = Loaded(
        _loader(name, dtype, shape, chunks), nbytes_of(dtype, shape), width_of(dtype), shelf
    )
    return Found(name, keys, dtype, shape, source)


def _loader(
    name: str, dtype: str, shape: Shape, chunks: list[Part]
) -> "Callable[[], torch.Tensor]":
    def load() -> "torch.Tensor":
        from ckptstore.state.tensors import DTYPES, empty

        if len(chunks) == 1 and chunks[0].lengths == shape:
            return _checked(_load(chunks[0], name, allow_pickle=False), name, DTYPES[dtype], shape)
        whole = empty(dtype, shape)
        for chunk in chunks:
            assert chunk.offsets is not None
            box = tuple(
                slice(start, start + n)
                for start, n in zip(chunk.offsets, chunk.lengths, strict=True)
            )
            whole[box] = _checked(
                _load(chunk, name, allow_pickle=False), name, DTYPES[dtype], chunk.lengths
            )
        return whole

    return load


def _load(part: Part, name: str, *, allow_pickle: bool) -> Any:
    data = bytearray(part.nbytes)
    read_range(part.path, part.start, memoryview(data))
    return load_torch(io.BytesIO(data), f"{name} in {part.path}", allow_pickle=allow_pickle)


def _checked(tensor: Any, name: str, dtype: "torch.dtype", shape: Shape) -> "torch.Tensor":
    import torch

    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.dtype != dtype
        or tuple(tensor.shape) != shape
    ):
        raise InvalidInput(
            f"a piece of {name} is not what the metadata says: wanted {dtype}{list(shape)}"
        )
    return tensor


def _dtype(name: str, properties: Any) -> str:
    dtype = properties.columns[0] if properties.columns else properties.dtype
    if dtype not in WIDTHS:
        raise InvalidInput(f"{name} is of dtype {str(dtype)[:40]!r}, which cannot be imported")
    return str(dtype)


def _shape(sizes: Any) -> Shape:
    shape = tuple(sizes)
    if not all(type(n) is int and n >= 0 for n in shape):
        raise InvalidInput(f"{str(shape)[:80]} is no shape")
    return shape
