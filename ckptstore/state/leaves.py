"""Where do a leaf's raw bytes come from, and where are they restored to?"""

import torch

from ckptstore.core.model import Box
from ckptstore.state import tensors
from ckptstore.state.devices import current_stream, through


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


class BytesSource:
    """Bytes that are there."""

    __slots__ = ("data", "nbytes", "width")
    known_ids: bytes | None = None
    still = True

    def __init__(self, data: bytes, width: int = 1) -> None:
        self.data = data
        self.nbytes = len(data)
        self.width = width

    def view(self, start: int, stop: int) -> memoryview:
        return memoryview(self.data)[start:stop]

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        out[:] = memoryview(self.data)[start:stop]


NOTHING = BytesSource(b"")
"""The source of an alias: its bytes are another leaf's."""


class Destination:
    """Where the raw bytes of one leaf land: a strided tensor on any device whose elements have
    memory of their own.

    Either `memory` is filled, or every byte is handed to `write`, in any order and from any thread.
    On a device it lands ahead of what the thread that makes this launches next, and behind what it
    launched before.
    """

    __slots__ = ("nbytes", "stream", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.stream = current_stream(tensor)
        self.nbytes: int = tensor.nbytes

    def memory(self) -> memoryview | None:
        """The tensor's own memory, writable, or None if bytes must be handed to `write`."""
        return tensors.memory_of(self.tensor) if tensors.is_plain(self.tensor) else None

    def write(self, start: int, data: memoryview) -> None:
        """Land `data`, whole elements, at byte `start`."""
        with through(self.stream):
            tensors.write_range(self.tensor, start, data)

    @property
    def parts(self) -> tuple[tuple[Box | None, "Destination"], ...]:
        """The boxes of the leaf that land, and where: all of it."""
        return ((None, self),)


class HeldDestination:
    """Where the boxes of a leaf land that this rank has."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[tuple[Box | None, Destination], ...]) -> None:
        self.parts = parts
