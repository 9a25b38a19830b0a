"""Where do the bytes of an import come from? From ranges of files, read on demand, so that memory
stays bounded.

Some formats can only load whole tensors. Such a tensor is loaded when its first bytes are read, and
cached until a few others were.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptstore.core.geometry import byte_ranges, intersect, within
from ckptstore.core.model import Box, LeafKind, Node, Schema, Shape
from ckptstore.errors import InvalidInput, Unavailable
from ckptstore.state.leaf_sources import FlatState, Source
from ckptstore.state.paths import segment, segments

if TYPE_CHECKING:
    import torch

KEPT_TENSORS = 4
"""At least the number of threads that stage at once."""


class FileRange:
    """`nbytes` bytes of a file from `offset` on, in elements of `width` bytes."""

    known_ids = None
    still = False
    __slots__ = ("_offset", "_path", "nbytes", "width")

    def __init__(self, path: Path, offset: int, nbytes: int, width: int = 1) -> None:
        self._path, self._offset = path, offset
        self.nbytes, self.width = nbytes, width

    def view(self, start: int, stop: int) -> None:
        """None: the bytes must be read."""

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        read_range(self._path, self._offset + start, out[: stop - start])


class Held:
    """Bytes in memory."""

    known_ids = None
    still = True
    __slots__ = ("_data", "nbytes", "width")

    def __init__(self, data: bytes) -> None:
        self._data, self.nbytes, self.width = data, len(data), 1

    def view(self, start: int, stop: int) -> memoryview:
        return memoryview(self._data)[start:stop]

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        out[:] = memoryview(self._data)[start:stop]


class Joined:
    """A tensor of `shape` made of boxes that tile it; each box has its own source."""

    known_ids = None
    still = False
    __slots__ = ("_pieces", "_shape", "nbytes", "width")

    def __init__(self, shape: Shape, width: int, pieces: Sequence[tuple[Box, Source]]) -> None:
        self._shape, self._pieces = shape, pieces
        self.nbytes, self.width = width * prod(shape), width

    def view(self, start: int, stop: int) -> None:
        """None: the bytes must be joined."""

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        block, first, cut = _block_around(self._shape, self.width, start, stop)
        # the range covers the ends of two long rows, and whole rows would take more memory
        if cut:
            self.stage(start, cut, out[: cut - start])
            self.stage(cut, stop, out[cut - start :])
            return
        import numpy as np

        joined = np.empty((*block.lengths, self.width), np.uint8)
        for box, source in self._pieces:
            if shared := intersect(box, block):
                # All later dimensions are whole, so the block's overlap with a box is one range of
                # the box's bytes.
                ((begin, end),) = byte_ranges(box.lengths, within(shared, box), self.width)
                data = np.empty((*shared.lengths, self.width), np.uint8)
                source.stage(begin, end, data.reshape(-1).data)
                place = within(shared, block)
                joined[
                    tuple(
                        slice(o, o + n) for o, n in zip(place.offsets, place.lengths, strict=True)
                    )
                ] = data
        out[: stop - start] = joined.reshape(-1).data[start - first : stop - first]


def _block_around(shape: Shape, width: int, start: int, stop: int) -> tuple[Box, int, int]:
    """The least contiguous box of a tensor that contains its bytes `start:stop`; its first byte;
    where to cut the range instead, or 0.
    """
    offsets: list[int] = []
    for dim in range(len(shape)):
        suffix = width * prod(shape[dim + 1 :])
        first, last = start // suffix % shape[dim], (stop - 1) // suffix % shape[dim]
        offsets.append(first)
        if first != last or dim == len(shape) - 1:
            cut = (stop - 1) // suffix * suffix if suffix > stop - start else 0
            rest = shape[dim + 1 :]
            lengths = ((1,) * dim) + (last - first + 1, *rest)
            return (
                Box((*offsets, *(0 for _ in rest)), lengths),
                start // suffix * suffix,
                cut if first != last else 0,
            )
    return Box((), ()), 0, 0


class Loaded:
    """A tensor that `load` returns whole; `shelf` caches it while it is likely to be read again."""

    known_ids = None
    still = False
    __slots__ = ("_load", "_shelf", "nbytes", "width")

    def __init__(
        self, load: "Callable[[], torch.Tensor]", nbytes: int, width: int, shelf: "Shelf"
    ) -> None:
        self._load, self._shelf = load, shelf
        self.nbytes, self.width = nbytes, width

    def view(self, start: int, stop: int) -> None:
        """None: the tensor must be loaded."""

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        from ckptstore.state.tensors import read_range as read_tensor

        read_tensor(self._shelf.get(self, self._load), start, stop, out)


class Shelf:
    """A cache of the tensors loaded last. Thread-safe."""

    def __init__(self) -> None:
        self._tensors: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, owner: object, load: "Callable[[], torch.Tensor]") -> "torch.Tensor":
        with self._lock:
            if id(owner) not in self._tensors:
                self._tensors[id(owner)] = load()
            self._tensors.move_to_end(id(owner))
            while len(self._tensors) > KEPT_TENSORS:
                self._tensors.popitem(last=False)
            return self._tensors[id(owner)]


class Placeholders:
    """Tensors without memory, which stand for sources while a state is flattened."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[torch.Tensor, Source]] = {}

    def put(self, dtype: str, shape: Shape, source: Source) -> "torch.Tensor":
        """A placeholder of `dtype` and `shape` for the bytes of `source`."""
        from ckptstore.state.tensors import empty

        tensor = empty(dtype, ()).expand(shape)
        self._sources[id(tensor)] = tensor, source
        return tensor

    def flatten(self, app_state: Mapping[str, Any], *, allow_pickle: bool) -> dict[str, FlatState]:
        """The flattened state, with sources instead of placeholders."""
        from ckptstore.state.flatten import flatten

        flats = dict(flatten(app_state, allow_pickle=allow_pickle))
        for flat in flats.values():
            for i, leaf in enumerate(flat.leaves):
                stands = self._sources.get(id(getattr(leaf, "tensor", None)))
                if stands:
                    flat.leaves[i] = stands[1]
        return flats


def flat_dict(
    key: str,
    kind: LeafKind,
    names: Sequence[str],
    sources: Sequence[Source],
    dtypes: Sequence[str] = (),
    shapes: Sequence[Shape] = (),
) -> FlatState:
    """A key whose value is one dict of leaves of one kind."""
    paths = tuple(f"{segment(key)}/{name}" for name in segments(names))
    count = len(names)
    schema = Schema(
        Node("dict", tuple(range(count)), tuple(names)),
        paths,
        (kind,) * count,
        tuple(dtypes) or ("",) * count,
        tuple(shapes) or ((),) * count,
        (-1,) * count,
    )
    return FlatState(schema, list(sources))


def read_range(path: Path, offset: int, out: memoryview) -> None:
    """Fill `out` from byte `offset` of a file. Raises `Unavailable` if the file is shorter or
    cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            done = 0
            while done < len(out):
                n = os.preadv(file.fileno(), [out[done:]], offset + done)
                if not n:
                    raise Unavailable(
                        f"{path} ends at byte {offset + done}; wanted {len(out) - done} more: it "
                        "changed while it was read"
                    )
                done += n
    except OSError as error:
        raise Unavailable(f"cannot read {path}: {error}") from error


def inside(root: Path, name: object) -> Path:
    """The path of file `name` in a directory. Raises `InvalidInput` for names that lead elsewhere,
    or to no file.
    """
    parts = name.split("/") if isinstance(name, str) else []
    if not parts or not {"", ".", ".."}.isdisjoint(parts) or "\0" in str(name) or "\\" in str(name):
        raise InvalidInput(
            f"{str(name)[:80]!r} is no name of a file in {root}: wanted names joined by '/', "
            "without '.' and '..'"
        )
    path = root.joinpath(*parts)
    if not path.is_file() or not path.resolve().is_relative_to(root.resolve()):
        raise InvalidInput(f"{root} has no file {str(name)[:80]!r} of its own")
    return path


def check_tiling(where: str, shape: Shape, boxes: Sequence[Box]) -> None:
    """Raise `InvalidInput` unless the boxes tile a tensor of `shape` exactly once."""
    if problem := _tiling_problem(shape, boxes):
        raise InvalidInput(
            f"{where}: the stored pieces do not make up {list(shape)}, each element once: {problem}"
        )


def _tiling_problem(shape: Shape, boxes: Sequence[Box]) -> str:
    for box in boxes:
        if not len(box.offsets) == len(box.lengths) == len(shape):
            return f"{_box_text(box)} has other dimensions"
        if any(o + n > s for o, n, s in zip(box.offsets, box.lengths, shape, strict=True)):
            return f"{_box_text(box)} is not within it"
    if twice := _overlap([box for box in boxes if prod(box.lengths)]):
        return f"{_box_text(twice[0])} and {_box_text(twice[1])} overlap"
    there = sum(prod(box.lengths) for box in boxes)
    return (
        f"{prod(shape) - there} of {prod(shape)} elements are in none of {len(boxes)} pieces"
        if there < prod(shape)
        else ""
    )


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, if any. A box is compared only with boxes that it meets in
    the dimension with the most cuts.
    """
    ranks = range(len(boxes[0].lengths)) if boxes else range(0)
    dim = max(ranks, key=lambda i: len({box.offsets[i] for box in boxes}), default=None)
    if dim is None:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    near: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        near = [
            other for other in near if other.offsets[dim] + other.lengths[dim] > box.offsets[dim]
        ]
        for other in near:
            if intersect(other, box):
                return other, box
        near.append(box)
    return None


def _box_text(box: Box) -> str:
    return f"the piece of {list(box.lengths)} at {list(box.offsets)}"


def as_app_state(state: Any) -> dict[str, Any]:
    """A loaded value as an application state: a dict as it is, a plain state dict under the key
    `model`.
    """
    import torch

    named = isinstance(state, dict) and state and all(type(key) is str for key in state)
    if named and not all(isinstance(value, torch.Tensor) for value in state.values()):
        return dict(state)
    return {"model": state}
