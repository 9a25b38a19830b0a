"""Which tensors share memory, and would contents that a restore puts there overwrite each other?

Tensors of a target may overlap each other (`base[:60]` beside `base[40:]`) or themselves
(`as_strided`). Contents that were committed from such tensors agree where they overlap; others
would be lost in part. So they are tried out beside the target, before anything is changed. Tensors
that are one (address, shape, strides) are compared by their chunks' ids instead (`match_target`).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch

from ckptstore.core.model import Schema
from ckptstore.core.process import uncollected
from ckptstore.state import tensors

_ALIGNMENT = 16
"""A multiple of every element width."""


class HasTensor(Protocol):
    """Anything that is about one strided tensor."""

    @property
    def tensor(self) -> torch.Tensor: ...


P = TypeVar("P", bound=HasTensor)


class LeafTarget(NamedTuple):
    """A leaf and the strided tensor of a target that its bytes go to."""

    schema: Schema
    leaf: int
    tensor: torch.Tensor


def overlapping(places: Iterable[P]) -> Iterator[list[P]]:
    """Groups of places that may share memory with each other, or a place whose elements may."""
    places = list(places)
    with uncollected():
        spans = sorted((*_span(place.tensor), n) for n, place in enumerate(places))
    group: list[P] = []
    end = 0
    for start, stop, n in spans:
        if start >= end and group:
            if _may_share(group):
                yield group
            group = []
        group.append(places[n])
        end = max(end, stop)
    if _may_share(group):
        yield group


def is_shared(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a byte of memory belongs to both, tensors of one group of `overlapping`. Tensors that
    are not contiguous are tried out, in memory for the bytes that lie between their ends."""
    (start_a, stop_a), (start_b, stop_b) = _span(a), _span(b)
    if start_a >= stop_b or start_b >= stop_a:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    first = min(start_a, start_b)
    scratch = tensors.new((max(stop_a, stop_b) - first,), torch.uint8).zero_()
    one, other = (
        tensors.over(
            scratch.untyped_storage(),
            torch.uint8,
            start - first,
            (*tensor.shape, tensor.itemsize),
            (*(stride * tensor.itemsize for stride in tensor.stride()), 1),
        )
        for tensor, start in ((a, start_a), (b, start_b))
    )
    one.fill_(1)
    return bool(other.any())


def overwritten(group: Sequence[tuple[LeafTarget, torch.Tensor]]) -> list[LeafTarget]:
    """The places that would not have their content, a contiguous tensor on the CPU, after all
    contents were written to memory that is shared as that of the places is."""
    spans = [_span(place.tensor) for place, _ in group]
    first = min(start for start, _ in spans) // _ALIGNMENT * _ALIGNMENT
    scratch = tensors.new((max(stop for _, stop in spans) - first,), torch.uint8)

    def view_of(tensor: torch.Tensor) -> torch.Tensor:
        start, _ = _span(tensor)
        return tensors.over(
            scratch.untyped_storage(),
            tensor.dtype,
            (start - first) // tensor.itemsize,
            tuple(tensor.shape),
            tensor.stride(),
        )

    for place, content in group:
        tensors.write_range(view_of(place.tensor), 0, tensors.memory_of(content))
    found = []
    for place, content in group:
        there = bytearray(content.nbytes)
        tensors.read_range(view_of(place.tensor), 0, len(there), memoryview(there))
        if there != tensors.memory_of(content):
            found.append(place)
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the first element begins, and where the last one ends."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((n - 1) * stride for n, stride in steps)
    return start, start + count * tensor.itemsize


def _may_share(group: Sequence[HasTensor]) -> bool:
    return len(group) > 1 or (len(group) == 1 and _may_overlap_itself(group[0].tensor))


def _may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Whether some dimension steps by less than what the faster ones span."""
    if tensor.is_contiguous():
        return False
    span = 1
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1 and stride < span:
            return True
        span += stride * (n - 1)
    return False
