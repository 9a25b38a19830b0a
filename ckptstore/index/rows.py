"""Rows of catalog queries: what each query returns, and the check of each column's type."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from ckptstore.core.ids import CommitId, PackId
from ckptstore.core.model import LeafKind, Shape
from ckptstore.errors import Corrupt

KINDS: tuple[LeafKind, ...] = ("tensor", "value", "bytes")

Rows: TypeAlias = Sequence[Any]
"""Rows, each indexed and unpacked as a tuple is."""

Column: TypeAlias = "type | tuple[type, ...] | Callable[[Any], Any]"
"""A column's values: of a type, of one of several, or converted by a function."""

Types: TypeAlias = tuple[Column, ...]


class TagInfo(NamedTuple):
    name: str
    commit: CommitId
    run: str
    step: int | None


class RunInfo(NamedTuple):
    """A run with its newest commit."""

    run: str
    commits: int
    latest: CommitId
    step: int | None
    time_ns: int


class LeafInfo(NamedTuple):
    """One leaf of a schema; `alias` is -1 or the number of an earlier leaf."""

    path: str
    kind: LeafKind
    dtype: str
    shape: Shape
    alias: int


class ShardInfo(NamedTuple):
    """One box of a leaf and the rank that wrote it."""

    path: str
    rank: int
    offsets: Shape
    lengths: Shape


class PackInfo(NamedTuple):
    number: int
    id: PackId
    bytes: int
    chunks: int
    metadata: bool
    condemned: bool


class Totals(NamedTuple):
    """Sums over the store; `logical_bytes` and `commits` leave out forgotten commits."""

    commits: int
    forgotten: int
    logical_bytes: int
    runs: int
    tags: int
    packs: int
    pack_bytes: int
    chunks: int
    condemned_packs: int
    condemned_bytes: int


def typed(types: Types, rows: Rows, *, one: bool) -> list[tuple[Any, ...]]:
    """Check each column of `rows` against its type. A value of another type is damage."""
    try:
        found = [
            tuple(_cell(type_, value) for type_, value in zip(types, row, strict=True))
            for row in rows
        ]
    except (TypeError, ValueError, LookupError) as error:
        raise Corrupt(
            f"the catalog has an invalid row: {error}; run `ckptstore reindex`"
        ) from error
    if one and len(found) != 1:
        raise Corrupt(f"the catalog has {len(found)} rows instead of one; run `ckptstore reindex`")
    return found


def _cell(type_: Column, value: Any) -> Any:
    if not isinstance(type_, type | tuple):
        return type_(value)
    if not isinstance(value, type_):
        raise TypeError(f"{value!r:.60} has the wrong type")
    return value


def kind_of(number: int) -> LeafKind:
    if number < 0:
        raise ValueError(f"{number} is no kind of leaf")
    return KINDS[number]


def shape_of(text: str) -> Shape:
    return tuple(map(int, text.split(","))) if text else ()
