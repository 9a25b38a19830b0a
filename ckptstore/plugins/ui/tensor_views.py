"""Views of one tensor as JSON: what its numbers are like; and how far tensors of two commits are
apart. They read tensors a slice at a time, as jobs with progress, and torch is imported for them.
"""

import glob
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptstore.errors import InvalidInput
from ckptstore.plugin.model import CHUNK_ID_BYTES, CommitInfo, Shape, width_of
from ckptstore.plugin.reading import Tree
from ckptstore.plugins.reports.difference import LeafAt, compare
from ckptstore.plugins.ui.commit_views import leaf_at
from ckptstore.plugins.ui.history_views import brief
from ckptstore.plugins.ui.jobs import Job
from ckptstore.plugins.ui.opened import OpenStore
from ckptstore.plugins.ui.values import TEXT_CHARACTERS, Json, clip

if TYPE_CHECKING:
    import torch

    from ckptstore.plugin.snapshots import Snapshot

SLICE_ELEMENTS = 1 << 21
"""Elements that are looked at together, in double precision."""
BINS = 64
FINE_BINS = 1024
HEAT_ROWS = 64
HEAT_COLUMNS = 96
MEASURED = 2_000
"""Tensors whose distance is measured; the first in the order of the state."""
MOVES, MOVES_AT_ONCE = 500, 20
"""Commits of a tensor's history, and those that are read between two looks at who asks."""
SMALLER = 2.0**-64
"""Sums are of numbers times this, which is exact: they would overflow with the largest floats."""
_PACKED = "float4"

Numbers = npt.NDArray[np.float64]
Region = tuple[slice | int, ...]


def is_number(tree: Tree, i: int) -> bool:
    """Whether a leaf is a tensor whose elements can be looked at as numbers."""
    return tree.schema.kinds[i] == "tensor" and _PACKED not in tree.schema.dtypes[i]


def regions(shape: Shape, elements: int = SLICE_ELEMENTS) -> Iterator[tuple[int, Region]]:
    """Regions that cover a tensor in the order of its elements, each of about `elements` or of one
    row, with the number of the first element."""
    if 0 in shape:
        return
    lead = 0
    while lead < len(shape) and math.prod(shape[lead + 1 :]) > elements:
        lead += 1
    inner = math.prod(shape[lead + 1 :])
    rows = max(1, elements // max(inner, 1))
    for prefix in np.ndindex(*shape[:lead]):
        offset = int(np.ravel_multi_index(prefix, shape[:lead])) if lead else 0
        if lead == len(shape):
            yield offset, tuple(map(int, prefix))
            continue
        for start in range(0, shape[lead], rows):
            at = (offset * shape[lead] + start) * inner
            stop = min(start + rows, shape[lead])
            yield at, (*map(int, prefix), slice(start, stop))


@dataclass
class Histogram:
    """Counts of numbers whose range is not known before: bins of one width, of which two become
    one whenever a number lies outside. Its `low` and `width` are those of numbers `SMALLER`."""

    low: float = 0.0
    width: float = 0.0
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(FINE_BINS, np.int64))

    def add(self, numbers: Numbers) -> None:
        """Count finite numbers."""
        if not numbers.size:
            return
        numbers = numbers * SMALLER
        least, most = float(numbers.min()), float(numbers.max())
        if not self.width:
            scale = max(most - least, abs(most) * 1e-6, 1e-300)
            self.low, self.width = least, scale / FINE_BINS * (1 + 1e-9)
        while least < self.low or most >= self.low + self.width * FINE_BINS:
            self._widen(down=least < self.low)
        places = ((numbers - self.low) / self.width).astype(np.int64)
        self.counts += np.bincount(np.clip(places, 0, FINE_BINS - 1), minlength=FINE_BINS)

    def _widen(self, *, down: bool) -> None:
        halves, empty = self.counts.reshape(-1, 2).sum(1), np.zeros(FINE_BINS // 2, np.int64)
        if down:
            self.low -= self.width * FINE_BINS
        self.counts = np.concatenate([empty, halves] if down else [halves, empty])
        self.width *= 2

    def bins(self, least: float, most: float) -> Json:
        """At most `BINS` bins from `least` to `most`, as the edge of the first, their width, and
        the counts."""
        if not self.width:
            return {"low": 0.0, "width": 0.0, "counts": []}
        filled = np.flatnonzero(self.counts)
        first, last = int(filled[0]), int(filled[-1]) + 1
        step = -(-(last - first) // BINS)
        counts = np.add.reduceat(self.counts[first:last], np.arange(0, last - first, step))
        low = max((self.low + first * self.width) / SMALLER, -sys.float_info.max)
        low = min(low, least)  # rounding may put the edge behind it
        return {"low": low, "width": step * self.width / SMALLER, "counts": counts.tolist()}


def numpy_dtype(dtype: str) -> "np.dtype[Any] | None":
    """NumPy's dtype of that name; None for those that NumPy lacks, such as bfloat16."""
    try:
        return np.dtype(dtype).newbyteorder("<")
    except TypeError:
        return None


class HeatMap:
    """Means of blocks of a tensor as a matrix: its first dimension by all others."""

    def __init__(self, shape: Shape) -> None:
        self.rows = shape[0] if len(shape) > 1 else 1
        self.columns = math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)
        self.height, self.width = min(self.rows, HEAT_ROWS), min(self.columns, HEAT_COLUMNS)
        self._sums = np.zeros(self.height * self.width)
        self._counts = np.zeros(self.height * self.width, np.int64)
        self._bad = np.zeros(self.height * self.width, np.int64)

    def add(self, start: int, numbers: Numbers) -> None:
        """Add the elements from `start` on."""
        place = np.arange(start, start + numbers.size)
        row, column = np.divmod(place, self.columns)
        cell = row * self.height // self.rows * self.width + column * self.width // self.columns
        finite, size = np.isfinite(numbers), len(self._sums)
        self._sums += np.bincount(cell, np.where(finite, numbers, 0.0) * SMALLER, size)
        self._counts += np.bincount(cell[finite], minlength=size)
        self._bad += np.bincount(cell[~finite], minlength=size)

    def cells(self) -> Json:
        """Means by row, None where a block has a NaN or an infinity."""
        means = (self._sums / np.maximum(self._counts, 1)).tolist()
        bad = self._bad.tolist()
        return [None if b else mean / SMALLER for mean, b in zip(means, bad, strict=True)]


def leaf(store: OpenStore, id_: str, number: str) -> Json:
    """What a leaf is, from metadata alone."""
    info = store.commit(id_)
    tree, i = leaf_at(store, info, number)
    at, schema = LeafAt(tree, i), tree.schema
    content = None if tree.is_gone(i) else tree.content(i)
    alias = schema.aliases[i]
    return {
        **brief(info),
        "number": int(number),
        "path": clip(schema.paths[i], TEXT_CHARACTERS),
        "kind": schema.kinds[i],
        "dtype": schema.dtypes[i],
        "shape": list(schema.shapes[i]),
        "bytes": tree.raw_bytes(i),
        "value": at.text.value,
        "alias": clip(schema.paths[alias]) if alias >= 0 else None,
        "gone": content is None,
        "chunks": len(content.ids) // CHUNK_ID_BYTES if content else None,
        "boxes": len(content.boxes) if content and content.boxes else 1,
        "numbers": content is not None and is_number(tree, i),
        "npy": schema.kinds[i] == "tensor" and numpy_dtype(schema.dtypes[i]) is not None,
    }


def tensor(store: OpenStore, id_: str, number: str, job: Job) -> Json:
    """Statistics, a histogram and a heat map of a tensor. Reads it once."""
    info = store.commit(id_)
    tree, i = leaf_at(store, info, number)
    if not is_number(tree, i):
        raise InvalidInput(f"{clip(tree.schema.paths[i])} has no numbers to look at")
    job.progress("loading torch", 0, 1)
    shape, path = tree.schema.shapes[i], tree.schema.paths[i]
    snapshot = _snapshot(store, info)
    histogram, heat = Histogram(), HeatMap(shape)
    sums = {"zeros": 0, "nan": 0, "inf": 0, "finite": 0, "sum": 0.0, "norm": 0.0}
    least, most, total = math.inf, -math.inf, math.prod(shape)
    for start, region in regions(shape):
        job.progress("reading", start, total)
        numbers = _doubles(snapshot.read(path, region if shape else None))
        finite = numbers[np.isfinite(numbers)]
        sums["zeros"] += int((numbers == 0).sum())
        sums["nan"] += int(np.isnan(numbers).sum())
        sums["inf"] += int(np.isinf(numbers).sum())
        sums["finite"] += finite.size
        sums["sum"] += float((finite * SMALLER).sum())
        if finite.size:
            least, most = min(least, float(finite.min())), max(most, float(finite.max()))
            sums["norm"] = math.hypot(sums["norm"], _norm(finite * SMALLER))
        histogram.add(finite)
        heat.add(start, numbers)
    count = max(sums["finite"], 1)
    mean, root = sums["sum"] / count / SMALLER, sums["norm"] / math.sqrt(count) / SMALLER
    std = root * math.sqrt(max(1 - (mean / root) ** 2, 0.0)) if root else 0.0
    seen = sums["finite"] > 0
    return {
        "elements": total,
        "nbytes": total * width_of(tree.schema.dtypes[i]),
        **{name: sums[name] for name in ("zeros", "nan", "inf")},
        "norm": sums["norm"] / SMALLER,
        "mean": mean if seen else None,
        "std": std if seen else None,
        "min": least if seen else None,
        "max": most if seen else None,
        "histogram": histogram.bins(least, most) if seen else None,
        "heat": {
            "rows": heat.height,
            "columns": heat.width,
            "cells": heat.cells(),
            "of": [heat.rows, heat.columns],
        },
    }


def _norm(numbers: Numbers) -> float:
    """The norm of some numbers, whose squares may be too large for a float."""
    largest = float(np.abs(numbers).max())
    return largest * math.sqrt(float(np.square(numbers / largest).sum())) if largest else 0.0


def _snapshot(store: OpenStore, info: CommitInfo) -> "Snapshot":
    from ckptstore.plugin.snapshots import Snapshot

    return Snapshot(store.contents(info))


def _doubles(tensor: "torch.Tensor") -> Numbers:
    """The elements in double precision; of complex ones, their absolute values."""
    if tensor.is_complex():
        tensor = tensor.abs()
    numbers: Numbers = tensor.double().reshape(-1).numpy()
    return numbers


def moves(store: OpenStore, id_: str, number: str, job: Job) -> Json:
    """Norm, drift and zeros of a tensor in the newest commits of its run, from old to new. What is
    known so far is the partial value."""
    from ckptstore.plugins.analysis.history import history

    info = store.commit(id_)
    tree, i = leaf_at(store, info, number)
    path = tree.schema.paths[i]
    run = [other for other in store.history().commits if other.run == info.run]
    commits = run[:MOVES][::-1]
    found: Json = {"rows": [], "total": len(run)}
    for stop in range(MOVES_AT_ONCE, len(commits) + MOVES_AT_ONCE, MOVES_AT_ONCE):
        job.progress("reading commits", stop - MOVES_AT_ONCE, len(commits))
        rows = [
            [row.commit, row.step, row.norm, row.drift, row.drift_first, row.zeros, row.nan]
            for row in history(store.handle, store.threads, commits[:stop], glob.escape(path))
            if row.leaf == path
        ]
        found = job.partial = {"rows": rows, "total": len(run)}
    return found


def distances(store: OpenStore, a: str, b: str, job: Job) -> Json:
    """The relative change of every changed tensor of floats, in the order of the state: the norm of
    the difference by that of the older tensor. What is known so far is the partial value."""
    from ckptstore.plugins.analysis.runs import distance

    ends = [store.commit(end) for end in (a, b)]
    job.progress("comparing", 0, 1)
    before, after = (store.contents(info).trees for info in ends)
    paths = [c.path for c in compare(before, after).changes if c.change == "changed"][:MEASURED]
    snapshots = [_snapshot(store, info) for info in ends]
    found: list[Json] = []
    for done, path in enumerate(paths):
        job.progress("reading tensors", done, len(paths))
        if far := distance(snapshots[0], snapshots[1], path):
            found.append([clip(path), far.relative, far.largest])
            job.partial = found[:]
    return found
