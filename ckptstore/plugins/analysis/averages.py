"""The sum of several commits, each times a factor, as a new commit: averages, moving averages,
spherical interpolations, task vectors.

Chunks are read, added and written one after the other, so memory does not grow with the state. They
are added in the memory that the commit hashes, each commit's while it is in the CPU's cache.
Averages of weights are those of "Averaging Weights Leads to Wider Optima and Better Generalization"
(Izmailov et al., 2018), task vectors those of "Editing Models with Task Arithmetic" (Ilharco et
al., 2023).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from ckptstore import Store
from ckptstore.errors import InvalidInput
from ckptstore.plugin.handles import AnyRef
from ckptstore.plugin.leaves import BytesSource, FlatState, NotCopied, Source, StagedSource
from ckptstore.plugin.model import CHUNK_ID_BYTES, CommitId, Grid, check_run
from ckptstore.plugin.reading import CommitContents, Memory, NamedChunks, Reader, ReadRequest, Tree
from ckptstore.plugin.snapshots import Select, Snapshot, contents_of
from ckptstore.plugin.stores import commit_leaves, reader_with
from ckptstore.plugin.tensors import dtype_of
from ckptstore.plugin.text import selector
from ckptstore.plugin.work import Scratch, ThreadPool, cached_property
from ckptstore.plugin.writing import CommitMetadata, Flats, is_floating, label_of
from ckptstore.plugins.analysis.sums import add_up, flat_tensor

if TYPE_CHECKING:
    import torch

ROUNDING = 1e-12
"""Factors whose sum is this near to 1 are those of an average."""

RUN = "averages"
"""The run of the new commits, unless another is named."""

NEARLY_PARALLEL = 1e-4
"""Below this sine of the angle between two tensors, the arc is the line, and numbers are bad."""

Factors: TypeAlias = Callable[[Sequence["CommittedLeaf"]], Sequence[float]]
"""The factor of each commit for one leaf."""


@dataclass(frozen=True)
class CommittedLeaf:
    """Leaf `i` of a tree of a commit, and who reads it."""

    reader: Reader
    tree: Tree
    i: int
    commit: CommitId

    @cached_property
    def grid(self) -> Grid:
        return self.tree.grid(self.i)

    @cached_property
    def ids(self) -> bytes:
        """The chunks of its grid's cells, in order; empty if it is stored in another way."""
        content = self.tree.content(self.i)
        if content.inline is not None or content.boxes is not None:
            return b""
        self.tree.check(self.i)
        return content.ids

    def read(self, cells: range, parts: Sequence[memoryview]) -> None:
        """Read cells, each into its part of memory."""
        boxes = map(self.grid.cell, cells)
        requests = map(partial(ReadRequest, self.tree, self.i), map(Memory, parts), boxes)
        self.reader.read(requests, self.commit)

    @property
    def name(self) -> str:
        return f"leaf {self.tree.schema.paths[self.i]}, commit {self.commit[:12]}"


def read_in_turn(
    leaves: Sequence[CommittedLeaf], cells: range, memory: memoryview
) -> Iterator["torch.Tensor"]:
    """Cells, which lie together, of a leaf in each commit, as a flat tensor in `memory`. The next
    takes the place of the last."""
    first = leaves[0]
    spans = list(map(first.grid.span, cells))
    parts = [memory[start - spans[0][0] : stop - spans[0][0]] for start, stop in spans]
    numbers = flat_tensor(
        memory[: spans[-1][1] - spans[0][0]], dtype_of(first.tree.schema.dtypes[first.i])
    )
    some = slice(cells.start * CHUNK_ID_BYTES, cells.stop * CHUNK_ID_BYTES)
    groups = [NamedChunks(leaf.name, leaf.ids[some]) for leaf in leaves]
    if first.reader.remote or not all(group.ids for group in groups):
        for leaf in leaves:
            leaf.read(cells, parts)
            yield numbers
        return
    for _ in first.reader.read_in_turn(groups, parts):
        yield numbers


def combine(
    store: Store,
    refs: Sequence[AnyRef],
    factors: Sequence[float] | Factors,
    *,
    select: Select = "*",
    step: int | None = None,
    tag: str | Sequence[str] | None = (),
    message: str = "",
    metrics: Mapping[str, float] | None = None,
    run: str = RUN,
) -> Snapshot:
    """Commit the sum of commits, each times its factor. They are the parents of the new commit.

    Tensors of floats are added: those of 64 bits in 64 bits, all others in 32 bits. Everything
    else (integers, complex numbers, floats of 4 bits, values, states of random generators, and what
    `select` leaves out) is as in the last of `refs`. An average of tensors that are equal in all
    commits is that tensor. A key of which thinning left nothing in the last is left out.

    Args:
        store: The store with the commits, which must have leaves of equal names, dtypes and shapes.
        refs: Two commits or more.
        factors: One for each of them, or a function of the same leaf in all of them: `mean`,
            `moving`, `spherical` make such.
        select: Leaves to add, a glob or several, such as `"model/*"`.
        step: As in `Store.commit`, and so are `tag`, `message` and `metrics`.
        run: The run of the new commit: not that of a training, which would resume from it.

    Returns:
        The new commit.

    Raises:
        InvalidInput: A number of factors that is not that of the commits, factors that are not
            finite, a `select` that matches no leaf, or a leaf that they do not all have with one
            dtype and shape.

    Example:
        >>> combine(store, ["latest~2", "latest~1", "latest"], mean(3), tag="average")
        >>> combine(store, ["base", "tuned", "other"], [1, 0.5, -0.5])  # base + 0.5 (tuned - other)
    """
    found = [store.checkout(ref) for ref in refs]
    if len(found) < 2:
        raise InvalidInput(f"got {len(found)} commits; wanted two or more to add")
    factors_of: Factors = factors if callable(factors) else partial(_given, factors)
    if not callable(factors) and len(factors) != len(found):
        raise InvalidInput(
            f"got {len(factors)} factors for {len(found)} commits; give one for each"
        )
    if not callable(factors) and not all(map(math.isfinite, factors)):
        raise InvalidInput(f"factors are {list(factors)}; wanted finite numbers")
    is_selected = selector(select)
    _check_alike(found)
    _check_ties(found, is_selected)
    if not any(is_selected(leaf.path) for leaf in found[-1].leaves()):
        raise InvalidInput(
            f"no leaf of {found[-1].id[:12]} matches {select!r:.80}, so nothing would be added; "
            "`ckptstore ls` lists leaves"
        )
    with closing(ThreadPool(1)) as alone:  # the threads of the commit are those that read
        reader = reader_with(store, alone)
        contents = [contents_of(snapshot) for snapshot in found]

        def label() -> CommitMetadata:
            text = message or f"of {', '.join(snapshot.id[:12] for snapshot in found)}"
            made = label_of(check_run(run), step, tag, text, metrics)
            return replace(made, parents=tuple(snapshot.id for snapshot in found))

        flats = partial(_flats, contents, reader, factors_of, is_selected)
        return commit_leaves(store, flats, label, follow=False)


def mean(count: int) -> list[float]:
    """Factors for the mean of `count` commits."""
    return [1 / count] * count


def weighted(weights: Sequence[float]) -> list[float]:
    """Factors in proportion to `weights`, which add up to 1."""
    total = sum(weights)  # fsum raises where a sum is not finite
    if not math.isfinite(total) or not total:
        raise InvalidInput(
            f"weights {list(weights)} add up to {total:g}; wanted a finite sum other than 0"
        )
    return [weight / total for weight in weights]


def moving(count: int, decay: float) -> list[float]:
    """Factors for an exponential moving average, from the oldest of `count` commits to the newest:
    it begins as the oldest, and becomes `decay * average + (1 - decay) * commit` with each."""
    if not 0 <= decay < 1:
        raise InvalidInput(f"decay is {decay}; wanted a number from 0 to below 1")
    first = decay ** (count - 1)
    return [first, *((1 - decay) * decay ** (count - 1 - i) for i in range(1, count))]


def spherical(part: float) -> Factors:
    """Factors for the point that is `part` of the way from one commit to another on the arc
    between them, leaf by leaf (slerp; Shoemake, 1985). Where both point in nearly one direction,
    on the line. Raises `InvalidInput` unless `part` is finite."""
    if not math.isfinite(part):
        raise InvalidInput(f"the part of an arc is {part}; wanted a finite number, such as 0.5")

    def of(leaves: Sequence[CommittedLeaf]) -> Sequence[float]:
        if len(leaves) != 2:
            raise InvalidInput(f"an arc has two ends; got {len(leaves)} commits")
        aa = bb = ab = 0.0
        memory = memoryview(bytearray(leaves[0].reader.chunk_bytes))
        for cell in range(len(leaves[0].grid)):
            # `double` copies, unless it is double already.
            a, b = (x.double().clone() for x in read_in_turn(leaves, range(cell, cell + 1), memory))
            aa, bb, ab = aa + float(a.dot(a)), bb + float(b.dot(b)), ab + float(a.dot(b))
        cosine = ab / (math.sqrt(aa) * math.sqrt(bb)) if aa and bb else 1.0
        angle = math.acos(max(-1.0, min(1.0, cosine)))
        if (whole := math.sin(angle)) < NEARLY_PARALLEL:
            return 1 - part, part
        return math.sin((1 - part) * angle) / whole, math.sin(part * angle) / whole

    return of


def _given(factors: Sequence[float], leaves: Sequence[CommittedLeaf]) -> Sequence[float]:
    return factors


def _check_alike(found: Sequence[Snapshot]) -> None:
    """Raise `InvalidInput` for the first leaf that the commits do not all have alike."""
    first, *others = found
    wanted = {leaf.path: (leaf.kind, leaf.dtype, leaf.shape) for leaf in first.leaves()}
    for other in others:
        got = {leaf.path: (leaf.kind, leaf.dtype, leaf.shape) for leaf in other.leaves()}
        for path in [*wanted, *got]:
            if wanted.get(path) != got.get(path):
                sides = (_text(first, wanted.get(path)), _text(other, got.get(path)))
                raise InvalidInput(
                    f"{path} is {' and '.join(sides)}; commits that are added have the same leaves"
                )


def _check_ties(found: Sequence[Snapshot], is_selected: Callable[[str], bool]) -> None:
    """Raise `InvalidInput` for the first leaf of which the last commit has no sum of its own, but
    another commit a content of its own."""
    *others, last = found
    floats = (leaf for leaf in last.leaves() if is_floating(leaf.dtype))
    owners = {leaf.path: leaf.alias_of for leaf in floats if leaf.alias_of}
    for other in others:
        for leaf in other.leaves():
            owner = owners.get(leaf.path)
            if owner and leaf.alias_of != owner and is_selected(leaf.path):
                raise InvalidInput(
                    f"{leaf.path} shares the memory of {owner} in {last.id[:12]}, and not in "
                    f"{other.id[:12]}; name a commit last that has a tensor of its own there"
                )


def _text(snapshot: Snapshot, leaf: tuple[str, str, tuple[int, ...]] | None) -> str:
    what = "absent" if leaf is None else f"{leaf[1] or leaf[0]}{list(leaf[2]) or ''}"
    return f"{what} in {snapshot.id[:12]}"


def _flats(
    contents: Sequence[CommitContents],
    reader: Reader,
    factors_of: Factors,
    is_selected: Callable[[str], bool],
) -> Flats:
    """The state of the sum."""
    scratch = Scratch()
    flats: dict[str, FlatState] = {}
    for key, last in contents[-1].trees.items():
        schema, sources = last.schema, list[Source]()
        if schema.paths and all(map(last.is_gone, range(len(schema.paths)))):
            continue
        for i, path in enumerate(schema.paths):
            leaves = [
                CommittedLeaf(reader, each.trees[key], each.trees[key].numbers[path], each.commit)
                for each in contents
            ]
            dtype = schema.dtypes[i]
            added = schema.kinds[i] == "tensor" and is_floating(dtype) and "float4" not in dtype
            added = added and is_selected(path) and schema.aliases[i] < 0 and last.raw_bytes(i) > 0
            factors = factors_of(leaves) if added else ()
            if added and not _is_kept(leaves, factors):
                sources.append(_sum(leaves, factors, scratch))
            elif (inline := last.content(i).inline) is not None:
                sources.append(BytesSource(inline))
            else:
                sources.append(_same(leaves[-1]))
        flats[key] = FlatState(schema, sources)
    return flats


def _is_kept(leaves: Sequence[CommittedLeaf], factors: Sequence[float]) -> bool:
    """Whether this is an average of equal leaves, which is that leaf without rounding."""
    keys = {leaf.tree.content_key(leaf.i) for leaf in leaves}
    return len(keys) == 1 and None not in keys and abs(sum(factors) - 1) < ROUNDING


class _Made(StagedSource):
    """A source that makes cells of the grid of `leaf` when they are asked for: a commit cuts as the
    grid does. `make` writes those of a range to memory."""

    def __init__(
        self,
        leaf: CommittedLeaf,
        make: Callable[[range, memoryview], None],
        known_ids: bytes | None = None,
    ) -> None:
        super().__init__(leaf.tree.raw_bytes(leaf.i), leaf.tree.extent(leaf.i)[1], known_ids)
        self._grid, self._make = leaf.grid, make

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        self._make(range(*self._grid.covering(start, stop)), out)


def _same(leaf: CommittedLeaf) -> _Made:
    """A leaf as a commit has it. If its ids name the chunks that a commit of one process has, they
    are not read."""
    content = leaf.tree.content(leaf.i)
    known_ids = content.ids if content.boxes is None else None

    def read(cells: range, out: memoryview) -> None:
        if known_ids is not None:
            raise NotCopied
        start = leaf.grid.span(cells.start)[0]
        leaf.read(cells, [out[a - start : b - start] for a, b in map(leaf.grid.span, cells)])

    return _Made(leaf, read, known_ids)


def _sum(leaves: Sequence[CommittedLeaf], factors: Sequence[float], scratch: Scratch) -> _Made:
    """The sum of a leaf in several commits, each times a factor."""
    dtype = dtype_of(leaves[0].tree.schema.dtypes[leaves[0].i])

    def add(cells: range, out: memoryview) -> None:
        memory = scratch.take(len(out))
        add_up(read_in_turn(leaves, cells, memory), factors, flat_tensor(out, dtype))
        scratch.give(memory)

    return _Made(leaves[-1], add)
