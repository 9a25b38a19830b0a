"""How do the elements of a tensor lie in a file, if not row by row? By strides, as in torch.

A strided tensor covers a *span* of bytes, from its first element to its last. The *gaps* between
its elements do not belong to it. No two elements share bytes: overlapping tensors, such as expanded
ones, are not described here.
"""

from collections.abc import Sequence
from math import prod

import numpy as np

from ckptstore.plugin.model import Shape, width_of

SPAN_BYTES_MAX = 64 << 20
"""A span is held in memory as a whole."""
RUNS_MAX = 1 << 16
"""The most gaps of a tensor: each is read from the file alone."""
_DIMENSIONS_MAX = 16


def is_row_major(shape: Shape, strides: Shape) -> bool:
    """Whether the elements follow each other in the order of their indices."""
    return all(
        n == 1 or stride == prod(shape[i + 1 :])
        for i, (n, stride) in enumerate(zip(shape, strides, strict=True))
    )


def span_bytes(dtype: str, shape: Shape, strides: Shape) -> int:
    """The bytes from the first element to the last."""
    return width_of(dtype) * _span(shape, strides) if prod(shape) else 0


def _span(shape: Shape, strides: Shape) -> int:
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def can_be_strided(dtype: str, shape: Shape, strides: Shape) -> bool:
    """Whether no two elements overlap, the span fits into memory, and the gaps are few."""
    if len(shape) > _DIMENSIONS_MAX or len(shape) != len(strides) or not prod(shape):
        return False
    if span_bytes(dtype, shape, strides) > SPAN_BYTES_MAX:
        return False
    reach, run, connected = 0, 1, True
    for stride, n in sorted((stride, n) for n, stride in zip(shape, strides, strict=True) if n > 1):
        if stride <= reach:
            return False
        connected = connected and stride == run
        run *= n if connected else 1
        reach += (n - 1) * stride
    return reach + 1 == prod(shape) or prod(shape) // run <= RUNS_MAX


def gaps(dtype: str, shape: Shape, strides: Shape) -> list[tuple[int, int]]:
    """The byte ranges within the span that the tensor leaves out, in order."""
    width = width_of(dtype)
    edges = np.flatnonzero(np.diff(_left_out(shape, strides).view(np.int8)))
    bounds = [(int(edge) + 1) * width for edge in edges]
    return list(zip(bounds[::2], bounds[1::2], strict=True))  # the ends are elements


def _left_out(shape: Shape, strides: Shape) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """For each element's place in the span, whether the tensor leaves it out."""
    left = np.ones(_span(shape, strides), np.bool_)
    np.lib.stride_tricks.as_strided(left, shape, strides)[...] = False
    return left


def gather(dtype: str, shape: Shape, strides: Shape, span: memoryview) -> memoryview:
    """The elements in a span, row by row."""
    return np.ascontiguousarray(_elements(dtype, shape, strides, span)).reshape(-1).data


def scatter(
    dtype: str,
    shape: Shape,
    strides: Shape,
    values: memoryview,
    between: memoryview,
    out: memoryview,
) -> None:
    """The inverse of `gather`: fill the span `out` with the elements, and with the bytes `between`
    them, one gap behind the other."""
    width = width_of(dtype)
    if len(between):
        places = np.frombuffer(out, np.uint8).reshape(-1, width)
        places[_left_out(shape, strides)] = np.frombuffer(between, np.uint8).reshape(-1, width)
    rows = np.frombuffer(values, np.uint8).reshape(*shape, width)
    _elements(dtype, shape, strides, out)[...] = rows


def _elements(
    dtype: str, shape: Shape, strides: Sequence[int], span: memoryview
) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    width = width_of(dtype)
    return np.lib.stride_tricks.as_strided(
        np.frombuffer(span, np.uint8),
        (*shape, width),
        (*(stride * width for stride in strides), 1),
    )
