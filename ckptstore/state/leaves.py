"""Where do a leaf's raw bytes come from, where are they restored to, and in which dtype?

Copies that the caller waits for go through the device stream that is current when a source or
destination is made, on any copying thread: after earlier launches, before later ones.

Floats are restored as other floats on request (`destination`). Integers, booleans, complex numbers
and packed floats keep their dtype. So do the components of quantized tensors, tensor subclasses and
numpy arrays, where the dtype carries meaning.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ckptstore.core.model import Node, Schema
from ckptstore.errors import InvalidInput
from ckptstore.state import containers, tensors


def current_stream(tensor: torch.Tensor) -> Any:
    """The stream that the calling thread launches on where the tensor lies; None for one in this
    host's memory."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def through(stream: Any) -> AbstractContextManager[Any]:
    """Within it, copies go through `stream`. Each thread has a current stream of its own, which may
    be another than the caller's."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class TensorSource:
    """The raw bytes of a strided tensor on any device, as of what the thread that makes this has
    launched there. Keeps the tensor alive; threads may stage side by side."""

    __slots__ = ("nbytes", "stream", "tensor", "width")
    known_ids: bytes | None = None
    still = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.stream = current_stream(tensor)
        self.nbytes: int = tensor.nbytes
        self.width: int = tensor.itemsize

    def memory(self) -> memoryview | None:
        """The bytes where they are, or None if they must be staged (another device, not contiguous,
        a conjugate view)."""
        return tensors.memory_of(self.tensor) if tensors.is_plain(self.tensor) else None

    def view(self, start: int, stop: int) -> memoryview | None:
        """A part of `memory`."""
        memory = self.memory()
        return None if memory is None else memory[start:stop]

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        """Copy the bytes `start:stop` to `out`."""
        with through(self.stream):
            tensors.read_range(self.tensor, start, stop, out)


class KnownSource(TensorSource):
    """A tensor whose chunks' ids are known. Only where the store lacks a chunk is it read, and
    compared with its id."""

    __slots__ = ("known_ids",)

    def __init__(self, tensor: torch.Tensor, known_ids: bytes) -> None:
        super().__init__(tensor)
        self.known_ids = known_ids


class Destination:
    """Where the raw bytes of one leaf land: a strided tensor on any device whose elements have
    memory of their own.

    Either `memory` is filled, or every byte is handed to `write`, in any order and from any thread.
    On a device it lands ahead of what the thread that makes this launches next, and behind what it
    launched before. Bytes of another dtype, `committed`, are converted to the tensor's as they are
    handed over, chunk by chunk.
    """

    __slots__ = ("_committed", "nbytes", "stream", "tensor")

    def __init__(self, tensor: torch.Tensor, committed: torch.dtype | None = None) -> None:
        self.tensor = tensor
        self.stream = current_stream(tensor)
        self._committed = committed
        self.nbytes: int = (
            tensor.nbytes if committed is None else tensor.numel() * committed.itemsize
        )

    def memory(self) -> memoryview | None:
        """The tensor's own memory, writable, or None if bytes must be handed to `write`."""
        in_place = self._committed is None and tensors.is_plain(self.tensor)
        return tensors.memory_of(self.tensor) if in_place else None

    def write(self, start: int, data: memoryview) -> None:
        """Land `data`, whole elements, at byte `start` of the committed ones."""
        with through(self.stream):
            tensors.write_range(self.tensor, start, data, self._committed)


FLOATS = frozenset(
    dtype
    for dtype in tensors.DTYPES.values()
    if dtype.is_floating_point and dtype is not getattr(torch, "float4_e2m1fn_x2", None)
)
"""The dtypes that floats are converted from and to: one number to an element."""

_COMPOSITES = (
    "torch.sparse_",
    "torch.nested",
    "torch.jagged",
    "torch.Parameter",
    "torch.Tensor",
    "torch.thin_subclass",
)
"""Tensors made of others whose values are what they seem."""


def checked_dtype(dtype: Any) -> torch.dtype:
    """`dtype` if leaves can be converted to it, else `InvalidInput`."""
    if isinstance(dtype, torch.dtype) and dtype in FLOATS:
        return dtype
    known = ", ".join(sorted(str(each) for each in FLOATS))
    raise InvalidInput(
        f"dtype is {dtype!r}; wanted one of {known}: only floating leaves are converted, and only "
        "to floats"
    )


def converts(committed: str, dtype: torch.dtype | None) -> bool:
    """Whether a leaf committed as `committed` becomes another one when `dtype` is asked for."""
    return dtype is not None and tensors.DTYPES.get(committed) in FLOATS - {dtype}


def convertible(schema: Schema, dtype: torch.dtype) -> frozenset[int]:
    """The leaves of a tree that become other ones when `dtype` is asked for."""
    return frozenset(
        leaf for leaf in _candidates(schema.skeleton) if converts(schema.dtypes[leaf], dtype)
    )


def _candidates(node: Node | int) -> Iterator[int]:
    if isinstance(node, int):
        yield node
    elif node is not containers.LEFT_OUT and (
        containers.is_divisible(node.type) or node.type.startswith(_COMPOSITES)
    ):
        for child in node.children:
            yield from _candidates(child)


def destination(tensor: torch.Tensor, committed: str) -> Destination:
    """Where the bytes of a leaf committed as `committed` land in `tensor`, which has that dtype or
    is converted to."""
    same = tensors.DTYPE_NAMES[tensor.dtype] == committed
    return Destination(tensor, None if same else tensors.dtype_of(committed))
