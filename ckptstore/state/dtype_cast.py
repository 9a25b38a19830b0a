"""Which leaves may be restored in another dtype, and how? Floats as other floats, on request.

Integers, booleans, complex numbers and packed floats keep their dtype. So do the components of
quantized tensors, tensor subclasses and numpy arrays, where the dtype carries meaning.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ckptstore.core.model import Node, Schema
from ckptstore.errors import InvalidInput
from ckptstore.state import containers, tensors
from ckptstore.state.devices import current_stream, through
from ckptstore.state.leaves import Destination

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


def checked(dtype: Any) -> torch.dtype:
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
    elif containers.is_divisible(node.type) or node.type.startswith(_COMPOSITES):
        for child in node.children:
            yield from _candidates(child)


def destination(tensor: torch.Tensor, committed: str) -> "Destination | Converting":
    """Where the bytes of a leaf committed as `committed` land in `tensor`, which has that dtype or
    is converted to."""
    return (
        Destination(tensor)
        if tensors.DTYPE_NAMES[tensor.dtype] == committed
        else Converting(tensor, committed)
    )


class Converting:
    """As `leaves.Destination`, for bytes of another dtype: they become the tensor's as they are
    handed over, chunk by chunk."""

    __slots__ = ("_dtype", "_stream", "nbytes", "tensor")

    def __init__(self, tensor: torch.Tensor, committed: str) -> None:
        self.tensor = tensor
        self._stream = current_stream(tensor)
        self._dtype = tensors.dtype_of(committed)
        self.nbytes: int = tensor.numel() * self._dtype.itemsize

    @property
    def parts(self) -> tuple[tuple[None, "Converting"], ...]:
        """The boxes of the leaf that land, and where: all of it."""
        return ((None, self),)

    @property
    def address(self) -> int:
        """Where the tensor begins, equal for tied targets; 0 where that does not say all about its
        memory."""
        return self.tensor.data_ptr() if tensors.is_plain(self.tensor) else 0

    def memory(self) -> None:
        """None: every byte is handed to `write`."""

    def write(self, start: int, data: memoryview) -> None:
        """Convert `data`, whole elements, to the tensor's elements from byte `start` of the
        committed ones on."""
        with through(self._stream):
            tensors.convert_range(self.tensor, self._dtype, start, data)
