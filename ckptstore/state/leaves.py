"""Where a leaf's raw bytes come from, and where they go: the two sides that the engine moves bytes between."""

from typing import TypeAlias

import torch

from ckptstore.state import tensors


class TensorSource:
    """The raw bytes of a strided tensor on any device. Keeps the tensor alive; threads may stage side by side."""

    __slots__ = ("nbytes", "tensor", "width")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.nbytes: int = tensor.nbytes
        self.width: int = tensor.itemsize

    def memory(self) -> memoryview | None:
        """The bytes where they are, or None if they must be staged (another device, not contiguous, a conjugate view)."""
        return tensors.memory_of(self.tensor) if tensors.is_plain(self.tensor) else None

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        """Copy the bytes `start:stop` to `out`."""
        tensors.read_range(self.tensor, start, stop, out)


class BytesSource:
    """Bytes that are there."""

    __slots__ = ("data", "nbytes", "width")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.nbytes = len(data)
        self.width = 1

    def memory(self) -> memoryview:
        return memoryview(self.data)

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        out[:] = memoryview(self.data)[start:stop]


Source: TypeAlias = TensorSource | BytesSource

NOTHING = BytesSource(b"")
"""The source of an alias: its bytes are another leaf's."""


class Destination:
    """Where the raw bytes of one leaf land: a strided tensor on any device whose elements have memory of their own.

    Either `memory` is filled, or every byte is handed to `write`, in any order and from any thread.
    """

    __slots__ = ("nbytes", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.nbytes: int = tensor.nbytes

    @property
    def address(self) -> int:
        """Where `memory` begins, equal for tied targets; 0 without it."""
        return self.tensor.data_ptr() if tensors.is_plain(self.tensor) else 0

    def memory(self) -> memoryview | None:
        """The tensor's own memory, writable, or None if bytes must be handed to `write`."""
        return tensors.memory_of(self.tensor) if tensors.is_plain(self.tensor) else None

    def write(self, start: int, data: memoryview) -> None:
        """Land `data`, whole elements, at byte `start`."""
        tensors.write_range(self.tensor, start, data)
