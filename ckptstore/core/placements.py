"""Which boxes of a global tensor does one rank hold, given its placement on a mesh? No torch.

Placements apply from the first mesh dimension to the last, each to the indices left by the
previous ones (`torch.distributed.tensor`). A strided shard cuts these into `split_factor`
stretches and each stretch into one part per rank. A rank gets its part of every stretch, so its
indices are several runs, and its shard several boxes.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from typing import NamedTuple, TypeAlias

from ckptstore.core.model import Box, Shape

Run: TypeAlias = tuple[int, int]
"""Consecutive indices: the first, and how many."""


class Cut(NamedTuple):
    """One mesh dimension that divides tensor dimension `dim` among `parts` ranks, of which this one
    is number `number`."""

    dim: int
    parts: int
    number: int
    split_factor: int = 1


class HeldBox(NamedTuple):
    """`box` in global indices; `local` is where it lies in the rank's own tensor."""

    box: Box
    local: Box


def held_boxes(shape: Shape, cuts: Sequence[Cut]) -> tuple[HeldBox, ...]:
    """The boxes of a tensor of `shape` that a rank holds after `cuts`, in the order of their
    offsets; none if it holds no element.

    Mesh dimensions that replicate cut nothing and are left out of `cuts`.
    """
    runs: list[list[Run]] = [[(0, n)] if n else [] for n in shape]
    for cut in cuts:
        runs[cut.dim] = _cut(runs[cut.dim], cut)
    starts = [list(accumulate((length for _, length in found), initial=0)) for found in runs]
    return tuple(_boxes(runs, starts))


def local_shape(shape: Shape, cuts: Sequence[Cut]) -> Shape:
    """The shape of a rank's own tensor after `cuts`."""
    sizes = list(shape)
    for dim in {cut.dim for cut in cuts}:
        left: list[Run] = [(0, shape[dim])]
        for cut in cuts:
            if cut.dim == dim:
                left = _cut(left, cut)
        sizes[dim] = sum(length for _, length in left)
    return tuple(sizes)


def _boxes(runs: Sequence[Sequence[Run]], starts: Sequence[Sequence[int]]) -> Iterator[HeldBox]:
    for which in product(*(range(len(found)) for found in runs)):
        chosen = [runs[dim][i] for dim, i in enumerate(which)]
        lengths = tuple(length for _, length in chosen)
        local = tuple(starts[dim][i] for dim, i in enumerate(which))
        yield HeldBox(Box(tuple(first for first, _ in chosen), lengths), Box(local, lengths))


def _cut(runs: Sequence[Run], cut: Cut) -> list[Run]:
    """The part of `runs`, taken as one list of indices, that `cut` leaves to its rank."""
    size = sum(length for _, length in runs)
    left: list[Run] = []
    for start, stop in _chunks(size, cut.split_factor):
        first, last = _chunk(stop - start, cut.parts, cut.number)
        for run in _slice(runs, start + first, start + last):
            if left and sum(left[-1]) == run[0]:
                left[-1] = (left[-1][0], left[-1][1] + run[1])
            else:
                left.append(run)
    return left


def _chunks(size: int, parts: int) -> Iterator[tuple[int, int]]:
    return (_chunk(size, parts, i) for i in range(parts))


def _chunk(size: int, parts: int, i: int) -> tuple[int, int]:
    """The half-open range of part `i` as `torch.chunk` cuts: all parts as large as the first, as
    long as indices last."""
    each = -(-size // parts)
    return min(i * each, size), min((i + 1) * each, size)


def _slice(runs: Sequence[Run], start: int, stop: int) -> Iterator[Run]:
    """Indices number `start` to `stop` of the list that `runs` are."""
    at = 0
    for first, length in runs:
        low, high = max(start - at, 0), min(stop - at, length)
        if low < high:
            yield first + low, high - low
        at += length
