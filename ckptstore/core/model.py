"""What are boxes, leaves, trees, locations and commits, as frozen values?

No I/O and no torch here; dtypes are torch's names without `torch.`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from ckptstore.core.ids import ChunkId, CommitId, PackId, SessionId, StoreId

Shape: TypeAlias = tuple[int, ...]
LeafKind: TypeAlias = Literal["tensor", "value", "bytes", "plain"]

INLINE_BYTES = 512
"""A leaf of at most so many bytes lies in its page instead of a chunk."""


class Box(NamedTuple):
    """A hyper-rectangle of a global tensor: `offsets[i] <= index[i] < offsets[i] + lengths[i]`."""

    offsets: Shape
    lengths: Shape

    @classmethod
    def whole(cls, shape: Shape) -> "Box":
        """All of a tensor of `shape`."""
        return cls((0,) * len(shape), shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(*self, strict=True))

    def beside(self, other: "Box") -> Iterator[tuple[int, int, int, int]]:
        """Offset and length of this box and of another of the same tensor, by dimension."""
        return zip(*self, *other, strict=True)


@dataclass(frozen=True, slots=True)
class Node:
    """A container of the skeleton. `children` are nodes or numbers of leaves; `keys` only for
    mappings."""

    type: str
    children: tuple["Node | int", ...]
    keys: tuple[Any, ...] | None = None
    attrs: tuple[tuple[str, Any], ...] = ()

    def items(self) -> "Iterator[tuple[Any, Node | int]]":
        """Each child with its encoded key; in a node without keys, with its number."""
        if self.keys is None:
            return enumerate(self.children)
        return zip(self.keys, self.children, strict=True)

    def filtered(self, keep: "Callable[[Any, Node | int], bool]") -> "Node":
        """A mapping with those items only for which `keep` holds."""
        return self.of(item for item in self.items() if keep(*item))

    def of(self, items: "Iterable[tuple[Any, Node | int]]") -> "Node":
        """A mapping like this one with other items."""
        own = list(items)
        children, keys = tuple(child for _, child in own), tuple(key for key, _ in own)
        return replace(self, children=children, keys=keys)


def leaves_of(node: Node | int) -> Iterator[int]:
    """The numbers of the leaves below `node`."""
    if isinstance(node, int):
        yield node
        return
    for child in node.children:
        if isinstance(child, int):  # by far the most
            yield child
        else:
            yield from leaves_of(child)


def nodes_of(node: Node | int) -> list[Node]:
    """`node`, unless it is a leaf, and the nodes below it, outer ones first."""
    found = [] if isinstance(node, int) else [node]
    for each in found:  # which grows meanwhile
        found += [child for child in each.children if not isinstance(child, int)]
    return found


@dataclass(frozen=True, slots=True)
class Schema:
    """The structure of the leaves of one tree, without their content: columns, one item per leaf.

    `dtypes[i]` is `""` and `shapes[i]` is `()` unless `kinds[i]` is `tensor`; `aliases[i]` is -1 or
    an earlier leaf's number.
    """

    skeleton: Node | int
    paths: tuple[str, ...]
    kinds: tuple[LeafKind, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    aliases: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def owner(self, leaf: int) -> int:
        """The leaf that has the bytes of `leaf`: itself, or the one that it is an alias of."""
        return self.aliases[leaf] if self.aliases[leaf] >= 0 else leaf

    def matching(self, is_selected: Callable[[str], bool]) -> frozenset[int]:
        """The leaves with content that are selected, if all leaves that share their memory are
        selected too."""
        stays = {self.owner(i) for i, path in enumerate(self.paths) if not is_selected(path)}
        return frozenset(i for i in map(self.owner, range(len(self))) if i not in stays)


@dataclass(frozen=True, slots=True)
class LeafContent:
    """The content of one leaf: its bytes, or the chunks that hold them.

    `ids` are 32 bytes per chunk in grid order, one behind the other; `raw_bytes` is the leaf's
    length; `boxes` is None for a leaf held whole. Of a leaf that is `gone` nothing is left.
    """

    inline: bytes | None = None
    ids: bytes = b""
    raw_bytes: int = 0
    boxes: tuple[Box, ...] | None = None
    gone: bool = False


SHARED = ""
"""The name of the tree that keys share. Every other tree has the name of its one key, so the key
`""` is always among those that share."""


@dataclass(frozen=True, slots=True)
class TreeRef:
    """A tree in a commit document: one key of the application state, or those that share one."""

    schema: ChunkId
    pages: tuple[ChunkId, ...]


@dataclass(frozen=True, slots=True)
class Thinning:
    """The leaves that a thinned commit no longer has: those that match `globs`. The commit `source`
    had more of them."""

    source: CommitId
    globs: tuple[str, ...]


class CastError(NamedTuple):
    """The loss by converting a leaf from `dtype`: the largest absolute and relative error of its
    finite elements, the number of NaN, and the number beyond the new dtype's range."""

    path: str
    dtype: str
    absolute: float
    relative: float
    nans: int
    overflows: int


@dataclass(frozen=True, slots=True)
class Cast:
    """Leaves that were converted to a dtype of lower precision: the dtype by glob, and the error of
    each leaf."""

    globs: tuple[tuple[str, str], ...]
    errors: tuple[CastError, ...]


@dataclass(frozen=True, slots=True)
class CommitDocument:
    """One version, immutable. `keys` are those of the application state, in its order; `trees` are
    in the order of their names. `thinned` and `cast` list the leaves that are gone or of lower
    precision, compared with the state that was committed."""

    store: StoreId
    session: SessionId
    run: str
    step: int | None
    message: str
    time_ns: int
    parents: tuple[CommitId, ...]
    metrics: tuple[tuple[str, float], ...]
    tags: tuple[str, ...]
    keys: tuple[str, ...]
    trees: tuple[tuple[str, TreeRef], ...]
    layout: ChunkId | None
    content: str
    logical_bytes: int
    new_bytes: int
    leaves: int
    links: tuple[tuple[str, str], ...] = ()
    thinned: Thinning | None = None
    cast: Cast | None = None

    def keys_of(self, name: str) -> tuple[str, ...]:
        """The keys that the tree `name` has."""
        return self.sharing if name == SHARED else (name,)

    @property
    def sharing(self) -> tuple[str, ...]:
        """The keys that share a tree, in the order of their names, which is theirs in the tree."""
        own = {name for name, _ in self.trees if name != SHARED}
        return tuple(sorted(key for key in self.keys if key not in own))


NO_BASE = 0xFFFFFFFF
"""The base of a chunk that is no delta."""


class PackEntry(NamedTuple):
    """One record of a pack's footer (docs/format.md §4): the chunk's id, the checksum of its raw
    bytes, and where they are stored. The chunk index does not know `kind`, `base` and `patch_of`,
    and no reader needs them: a delta says where its base lies, and a patch which chunks those are.
    `depth` counts the patches from a patch to a whole chunk, itself included."""

    chunk: ChunkId
    checksum: bytes
    offset: int
    stored_bytes: int
    raw_bytes: int
    codec: int
    width: int
    kind: int = 0
    base: int = NO_BASE
    patch_of: bytes = b""
    """The ids of a patch's bases, one behind the other; empty for any other chunk."""
    depth: int = 0


@dataclass(frozen=True, slots=True)
class PackRecord:
    """A pack as the log lists it. `number` is 0 until the log assigns one."""

    id: PackId
    bytes: int
    chunks: int
    metadata: bool
    number: int = 0

    @property
    def stored_bytes(self) -> int:
        """Its size in the store, twin included."""
        return self.bytes * (2 if self.metadata else 1)


@dataclass(frozen=True, slots=True, repr=False)
class CommitInfo:
    """One commit as queries see it: what the log says of it and the tags that point at it now.

    `logical_bytes` is the size of the state; `new_bytes` what this commit added to the store.
    `schemas` are those of the trees, by their names. `thinned` are globs of leaves that are gone,
    `cast` the dtypes of leaves of lower precision by glob.
    """

    id: CommitId
    content: str
    n: int
    session: SessionId
    run: str
    step: int | None
    message: str
    time_ns: int
    parents: tuple[CommitId, ...]
    metrics: dict[str, float]
    tags: tuple[str, ...]
    logical_bytes: int
    new_bytes: int
    leaves: int
    forgotten: bool = False
    schemas: dict[str, str] = field(default_factory=dict)
    thinned: tuple[str, ...] = ()
    cast: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        step = "" if self.step is None else f", step={self.step}"
        metrics = f", metrics={self.metrics}" if self.metrics else ""
        return f"<CommitInfo {self.id[:12]} run={self.run}{step}{metrics}>"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A commit that `resume` could not restore, with the reason."""

    commit: CommitId
    step: int | None
    reason: str
