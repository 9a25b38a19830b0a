"""Lower precision on request: float tensors are converted while they are read for a commit, and the
cost is measured."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any, NamedTuple, TypeAlias

import torch

from ckptstore.core.model import Cast, CastError, Schema
from ckptstore.core.text import selector
from ckptstore.errors import InvalidInput
from ckptstore.state import tensors
from ckptstore.state.leaf_sources import FlatState, Source, StagedSource, memory_of
from ckptstore.state.shared_memory import is_shared, overlapping
from ckptstore.state.tensors import DTYPE_NAMES, dtype_of

SLICE_ELEMENTS = 1 << 18
"""Elements that are converted at a time: in double precision, 2 MiB."""


SHOWN = 8


class CastGlobs(NamedTuple):
    """The dtype's name by glob, and the globs whose losses are accepted."""

    dtypes: tuple[tuple[str, str], ...]
    unchecked: tuple[str, ...]


def cast_globs(cast: object) -> CastGlobs:
    """What `cast` asks for. Raises `InvalidInput`."""
    if not isinstance(cast, Mapping) or not cast:
        raise InvalidInput(
            f"cast is {cast!r:.80}; wanted dtypes by glob: {{'optimizer/**': torch.bfloat16}}"
        )
    dtypes, unchecked = [], []
    for glob, given in cast.items():
        selector(glob)
        dtype, accepts = tensors.with_consent(given)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InvalidInput(
                f"cast[{glob!r}] is {given!r:.80}; wanted a dtype of floats, or "
                '(dtype, "unchecked")'
            )
        dtypes.append((glob, DTYPE_NAMES[dtype]))
        unchecked += [glob] * accepts
    return CastGlobs(tuple(dtypes), tuple(unchecked))


class _Converted(NamedTuple):
    """A leaf's tensor, or one of them, and the dtype that it is converted to, if it is."""

    path: str
    to: str | None
    tensor: torch.Tensor


def refuse_divided_ties(flats: Mapping[str, FlatState], globs: Sequence[tuple[str, str]]) -> None:
    """Raise `InvalidInput` if `globs` convert one of two leaves that share memory, in whole or in
    part, also in two keys. No state with that memory for both could be restored to that commit."""
    converted = [each for flat in flats.values() for each in _converted(flat, globs)]
    for group in overlapping(converted):
        for one, other in combinations(group, 2):
            if one.to != other.to and is_shared(one.tensor, other.tensor):
                raise _divided(other.path, one.path)


def _converted(flat: FlatState, globs: Sequence[tuple[str, str]]) -> Iterator[_Converted]:
    dtypes = {i: dtype for i, dtype, _ in _wanted(flat.schema, globs)}
    for i, path in enumerate(flat.schema.paths):
        sources = [of for _, of in flat.held[i].parts] if i in flat.held else [flat.leaves[i]]
        to = dtypes.get(i)
        for source in sources:
            tensor = getattr(source, "tensor", None)
            if tensor is not None and tensor.nbytes:
                yield _Converted(path, to if to != flat.schema.dtypes[i] else None, tensor)


def _divided(path: str, other: str) -> InvalidInput:
    return InvalidInput(
        f"{path} and {other} share memory, and cast names one of them; name both or none"
    )


class Casting:
    """The conversions of one commit. `flats` is the state whose sources convert as they are
    read."""

    def __init__(
        self,
        flats: Mapping[str, FlatState],
        globs: Sequence[tuple[str, str]],
        unchecked: Sequence[str] = (),
    ) -> None:
        self._globs, self._unchecked = tuple(globs), unchecked
        self._sources: list[tuple[str, object, CastSource]] = []
        unused = dict.fromkeys(glob for glob, _ in globs)
        self.flats = {key: self._cast(flat, unused) for key, flat in flats.items()}
        if unused:
            raise InvalidInput(
                f"cast names {next(iter(unused))!r}, and no float tensor with dimensions matches "
                "it; nothing was committed"
            )

    def errors(self, rank: int = 0) -> list[list[Any]]:
        """The errors of what was read, as `merged` takes them from `rank`: path, dtype, what the
        rank holds of the leaf, and the bytes that it read of that, with the figures."""
        return [
            [path, DTYPE_NAMES[source.old], rank if part == "private" else part, source.measured()]
            for path, part, source in self._sources
        ]

    def report(self) -> Cast:
        """The errors of all leaves, which must have been read. Raises as `merged`."""
        return merged(self._globs, [self.errors()], self._unchecked)

    def _cast(self, flat: FlatState, unused: dict[str, None]) -> FlatState:
        schema, dtypes = flat.schema, list(flat.schema.dtypes)
        leaves, held = list(flat.leaves), dict(flat.held)
        for i, dtype, glob in _wanted(schema, self._globs):
            unused.pop(glob, None)
            if dtype == schema.dtypes[i]:
                continue
            dtypes[i] = dtype
            if schema.aliases[i] >= 0:
                continue

            def source(part: object, of: Source, i: int = i, dtype: str = dtype) -> CastSource:
                made = CastSource(of, dtype_of(schema.dtypes[i]), dtype_of(dtype))
                self._sources.append((schema.paths[i], part, made))
                return made

            if i in held:
                parts = tuple((box, source([*box.offsets], of)) for box, of in held[i].parts)
                held[i] = held[i]._replace(parts=parts)
            else:
                leaves[i] = source(flat.marks.get(i, "whole"), leaves[i])
        for i, alias in enumerate(schema.aliases):
            if alias >= 0 and dtypes[i] != dtypes[alias]:
                raise _divided(schema.paths[i], schema.paths[alias])
        return replace(flat, schema=replace(schema, dtypes=tuple(dtypes)), leaves=leaves, held=held)


def _wanted(schema: Schema, globs: Sequence[tuple[str, str]]) -> Iterator[tuple[int, str, str]]:
    """The tensors with dimensions that a glob matches, each with the dtype and the glob; the first
    glob that matches counts. Raises `InvalidInput` for one that cannot get it."""
    tests = [(glob, name, selector(glob)) for glob, name in globs]
    for i, path in enumerate(schema.paths):
        found = next(((glob, name) for glob, name, test in tests if test(path)), None)
        if found is None or schema.kinds[i] != "tensor" or not schema.shapes[i]:
            continue
        glob, name = found
        old, new = dtype_of(schema.dtypes[i]), dtype_of(name)
        if not old.is_floating_point or "float4" in schema.dtypes[i]:
            raise InvalidInput(
                f"cast[{glob!r}] matches {path}, whose dtype is {schema.dtypes[i]}; only floats "
                "can lose precision: give a glob that leaves it out; nothing was committed"
            )
        if new.itemsize > old.itemsize:
            raise InvalidInput(
                f"cast[{glob!r}] is {name}, and {path} is {schema.dtypes[i]}, which is smaller; "
                "cast is for lower precision; nothing was committed"
            )
        yield i, name, glob


class CastSource(StagedSource):
    """The bytes of a leaf in another dtype. Threads may stage side by side; bytes that are staged
    again are measured once."""

    def __init__(self, source: Source, old: torch.dtype, new: torch.dtype) -> None:
        super().__init__(source.nbytes // old.itemsize * new.itemsize, new.itemsize)
        self._source, self.old, self._new = source, old, new
        self._covered: list[tuple[int, int]] = []
        self._measured: list[list[Any]] = []
        self._lock = threading.Lock()

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        """Convert the elements in the bytes `start:stop` to `out`."""
        step = SLICE_ELEMENTS * self.width
        for at in range(start, stop, step):
            end = min(at + step, stop)
            self._convert(at, end, out[at - start : end - start])

    def _convert(self, start: int, stop: int, out: memoryview) -> None:
        size = self.old.itemsize
        first, last = start // self.width, stop // self.width
        memory = memory_of(self._source, first * size, last * size)
        before = tensors.tensor_from(memory, DTYPE_NAMES[self.old], (last - first,)).double()
        after = before.to(self._new)
        out[:] = tensors.memory_of(after)
        back = after.double()
        for begin, end in self._uncovered(start, stop):
            part = slice((begin - start) // self.width, (end - start) // self.width)
            figures = _measured(before[part], back[part], self._new)
            with self._lock:
                self._measured.append([begin, end, *figures])

    def _uncovered(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of `start:stop` that were not staged before; from now on they were."""
        with self._lock:
            gaps, at = [], start
            for begin, end in self._covered:
                if at < stop and end > at:
                    if begin > at:
                        gaps.append((at, min(begin, stop)))
                    at = end
            if at < stop:
                gaps.append((at, stop))
            joined: list[tuple[int, int]] = []
            for begin, end in sorted([*self._covered, *gaps]):
                if joined and joined[-1][1] == begin:
                    joined[-1] = joined[-1][0], end
                else:
                    joined.append((begin, end))
            self._covered = joined
            return gaps

    def measured(self) -> list[list[Any]]:
        """The ranges of bytes that were staged, each with its figures."""
        with self._lock:
            return list(self._measured)


Figures: TypeAlias = tuple[float, float, int, int, int, int]
"""The largest absolute and relative error, NaN, overflows, and how many elements were finite and
not zero, before and after."""


def merged(
    globs: Sequence[tuple[str, str]],
    told: Sequence[list[list[Any]]],
    unchecked: Sequence[str] = (),
) -> Cast:
    """The errors that ranks tell of their parts, leaf by leaf. What several of them read of one
    part counts once.

    Raises `InvalidInput` where elements lie beyond the dtype's range, or all of a leaf becomes
    zero, unless the leaf's glob is in `unchecked`.
    """
    problems = []
    parts: dict[tuple[str, str], dict[str, list[list[Any]]]] = {}
    for path, dtype, holds, ranges in chain.from_iterable(told):
        parts.setdefault((path, dtype), {}).setdefault(repr(holds), []).extend(ranges)
    errors = []
    for (path, dtype), of in parts.items():
        total: Figures = (0.0, 0.0, 0, 0, 0, 0)
        for ranges in of.values():
            at = 0
            for _, stop, *figures in sorted(ranges, key=lambda each: (each[0], -each[1])):
                if stop > at:
                    total, at = _added(total, figures), stop
        errors.append(CastError(path, dtype, *total[:4]))
        glob, name = next((glob, name) for glob, name in globs if selector(glob)(path))
        lost = tensors.lost_values(name, *total[3:])
        if lost and glob not in unchecked:
            problems.append(f"{path}: {lost}")
    if problems:
        raise InvalidInput(
            "cast would lose more than precision; nothing was committed:\n  "
            + "\n  ".join(problems[:SHOWN])
            + (f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else "")
            + "\ngive a dtype of a wider range, such as torch.bfloat16, a glob that leaves them "
            'out, or cast={glob: (dtype, "unchecked")} to commit them so'
        )
    return Cast(tuple(sorted(globs)), tuple(errors))


def _added(a: Figures, b: Sequence[Any]) -> Figures:
    return max(a[0], b[0]), max(a[1], b[1]), a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5]


def _measured(before: torch.Tensor, after: torch.Tensor, dtype: torch.dtype) -> Figures:
    """The figures of elements that are `before`, and became `after` in `dtype`."""
    finite = before.isfinite()
    kept = finite & after.isfinite()
    gap = (after - before).abs().where(kept, 0.0)
    relative = (gap / before.abs()).where(kept & (before != 0), 0.0)
    losses = tensors.losses(before, after, dtype)
    return float(gap.max()), float(relative.max()), int(before.isnan().sum()), *losses
