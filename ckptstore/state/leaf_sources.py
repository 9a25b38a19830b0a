"""How do the other rooms see a key of the application state? As a schema whose leaves have paths,
and byte sources, without torch.

A path is made of the keys of all levels, escaped and joined by `/` (docs/format.md §5). Keys are
*encoded*: a string, an integer within 2^53, or a value array `[tag, payload…]` (docs/values.md).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from ckptstore.core import geometry
from ckptstore.core.model import Box, Node, Schema, Shape, nodes_of
from ckptstore.errors import InvalidInput
from ckptstore.objects import canonical

_Child = TypeVar("_Child", covariant=True)

RANKS = "ranks"
"""The node type whose children are keyed by rank number."""

NAMES = "names"
"""The type of the node that lists the names of an optimizer's parameters."""

ATTRIBUTES = "attributes"
"""The attribute of a node that has what an instance holds beside its content, by name."""


class NotCopied(Exception):
    """Bytes of a source with known ids that it does not have: they were left to the store. It is
    for the engine, and reaches no caller."""


class Source(Protocol):
    """The raw bytes of one leaf: `nbytes` of them, in elements of `width` bytes. Threads may stage
    side by side.

    A source with known ids may raise `NotCopied` when it is asked for bytes, chunk by chunk.
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def known_ids(self) -> bytes | None:
        """The ids of its chunks, 32 bytes each, if they need not be hashed; None if they must."""

    @property
    def still(self) -> bool:
        """Whether `view` gives every range, of memory that nobody writes to as long as the source
        is in use. If not, a reader that needs the same bytes twice copies them first."""

    def view(self, start: int, stop: int) -> memoryview | None:
        """The bytes `start:stop` where they are, or None if they must be staged."""

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        """Copy the bytes `start:stop` to `out`."""

    def read_all(self) -> bytes:
        """A copy of all bytes, which must be few."""


class StillSource:
    """A source whose bytes are in memory and stay as they are."""

    __slots__ = ()
    known_ids: bytes | None = None
    still = True

    def view(self, start: int, stop: int) -> memoryview:
        raise NotImplementedError

    def stage(self, start: int, stop: int, out: memoryview) -> None:
        out[:] = self.view(start, stop)

    def read_all(self: Source) -> bytes:
        return bytes(memory_of(self, 0, self.nbytes))


class StagedSource:
    """A source whose bytes are nowhere before they are staged."""

    __slots__ = ("known_ids", "nbytes", "width")
    still = False

    def __init__(self, nbytes: int, width: int, known_ids: bytes | None = None) -> None:
        self.nbytes, self.width, self.known_ids = nbytes, width, known_ids

    def view(self, start: int, stop: int) -> memoryview | None:
        return None

    def read_all(self: Source) -> bytes:
        return bytes(memory_of(self, 0, self.nbytes))


class BytesSource(StillSource):
    """Bytes that are there."""

    __slots__ = ("data", "nbytes", "width")

    def __init__(self, data: bytes | bytearray, width: int = 1) -> None:
        self.data = data
        self.nbytes = len(data)
        self.width = width

    def view(self, start: int, stop: int) -> memoryview:
        return memoryview(self.data)[start:stop]


NOTHING = BytesSource(b"")
"""The source of an alias: its bytes are another leaf's."""


def memory_of(source: Source, start: int, stop: int) -> memoryview:
    """The bytes `start:stop` of `source`: its own memory, or a copy if it shows none."""
    memory = source.view(start, stop)
    if memory is None:
        memory = memoryview(bytearray(stop - start))
        source.stage(start, stop, memory)
    return memory


class Mesh(NamedTuple):
    """Ranks in a grid of `shape`, row by row: those of the default process group."""

    shape: Shape
    ranks: tuple[int, ...]


class Holding(NamedTuple):
    """How a rank holds a leaf: which boxes of it, none perhaps. Leaves that are placed alike mostly
    have one and the same."""

    mesh: Mesh | None
    placements: tuple[str, ...]
    boxes: tuple[Box, ...]


class HeldLeaf(NamedTuple):
    """A leaf of which this rank holds boxes: the leaf's global shape is in the schema. Sources are
    of one box each, in the order of the holding's; `origin` is the distributed tensor itself."""

    holding: Holding
    parts: tuple[tuple[Box, Source], ...]
    origin: Any = None


Mark: TypeAlias = Literal["replica", "lead", "private", "numbered"]
"""What is known of a leaf that ranks hold whole: the same on all of them; the first rank's counts;
each rank's is its own. *numbered* is one that ranks divide and that an optimizer's number names,
which may be another parameter's on another mesh."""


@dataclass(frozen=True, slots=True)
class FlatState:
    """One key of the state, or the tree that plain ones share: what its leaves are, and the source
    of each. An alias has no bytes of its own. A shared tree has the `keys` of the whole state, in
    their order, and the name `SHARED` among the others.

    Where many ranks commit, `held` has the leaves that they divide among them, by number, in place
    of a source, and `marks` what is known of others.
    """

    schema: Schema
    leaves: list[Source]
    held: Mapping[int, HeldLeaf] = field(default_factory=dict)
    marks: Mapping[int, Mark] = field(default_factory=dict)
    keys: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Raw bytes of all leaves, of those that ranks divide all of it."""
        kinds = Counter(
            (self.schema.dtypes[i], self.schema.shapes[i])
            for i in self.held
            if self.schema.aliases[i] < 0
        )
        divided = sum(
            count * geometry.nbytes_of(dtype, shape) for (dtype, shape), count in kinds.items()
        )
        return divided + sum(
            source.nbytes for i, source in enumerate(self.leaves) if i not in self.held
        )


def numbered(flats: Mapping[str, FlatState]) -> Iterator[tuple[str, FlatState, int]]:
    """Each key with its state and the number of its first source. Sources are numbered through all
    keys: of each the leaves, then the boxes that this rank holds of others."""
    first = 0
    for key, flat in flats.items():
        yield key, flat, first
        first += len(flat.leaves) + sum(len(held.parts) for held in flat.held.values())


def leaves_of(flats: Mapping[str, FlatState]) -> list[Source]:
    """The sources of all keys, by number."""
    return [
        source
        for flat in flats.values()
        for source in (
            *flat.leaves,
            *(part for held in flat.held.values() for _, part in held.parts),
        )
    ]


_ESCAPED = re.compile(r"%([0-9A-F]{2})")
_UNSAFE = re.compile(r"[%/\x00-\x1f\x7f]")


def escape(text: str) -> str:
    """`text` without `/` and control characters; two texts never become one."""
    return _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", text)


def segment(name: str) -> str:
    """The segment of a string key."""
    return escape(name) or "%empty"


def segments(keys: Sequence[Any]) -> list[str]:
    """The segments of the encoded keys of one mapping, in order; `InvalidInput` if two of them
    cannot be told apart."""
    if set(map(type, keys)) <= {str}:
        # Most keys are their own segments; one look at all of them is cheaper than one at each.
        plain = all(keys) and not _UNSAFE.search("".join(keys))
        return list(keys) if plain else list(map(segment, keys))
    names = {segment(key) for key in keys if type(key) is str}
    found = [segment(key) if type(key) is str else _typed_segment(key, names) for key in keys]
    if len(set(found)) != len(found):
        twice = next(name for name in found if found.count(name) > 1)
        raise InvalidInput(
            f"two keys of one mapping are both called {twice!r}; use keys that differ in more than "
            "their bits"
        )
    return found


def shown(name: str) -> str:
    """The string key of the segment `name`, or the segment of another kind of key for people."""
    return "" if name == "%empty" else _ESCAPED.sub(lambda found: chr(int(found[1], 16)), name)


def unescape(name: str) -> str:
    """The string key that `segment` made `name` of; `InvalidInput` for the segment of another kind
    of key."""
    text = shown(name)
    if segment(text) != name:
        raise InvalidInput(
            f"{name!r} is no segment of a string key; write '%25' for '%', and '%2F' for '/' in a "
            "key"
        )
    return text


ITSELF = ""
"""The type of what is no node: its one child stands for it."""

WRAPPERS = frozenset(
    (
        ITSELF,
        *("stateful", "pickle", "registered", "bytearray", "BytesIO", "Random"),
        *("torch.Parameter", "torch.Tensor", "torch.thin_subclass", "torch.Generator"),
        *("numpy.ndarray", "numpy.Generator", "numpy.RandomState"),
    )
)
"""Node types whose one child has the node's own path."""


def is_plain_node(node: Node | int) -> bool:
    """Whether a value is no container: a leaf, perhaps in wrappers, or such a value of each
    rank."""
    if isinstance(node, int):
        return True
    return (node.type in WRAPPERS or node.type == RANKS) and all(map(is_plain_node, node.children))


def attributes_in(node: Node | int) -> dict[str, Any]:
    """What an instance held beside its content, by name, encoded."""
    attrs = () if isinstance(node, int) else node.attrs
    _, *found = next((value for name, value in attrs if name == ATTRIBUTES), ("dict",))
    return dict(found)


class Branch(Protocol[_Child]):
    """A node, or what an object was split into: its children, and their encoded keys, if it is a
    mapping."""

    @property
    def type(self) -> str: ...

    @property
    def children(self) -> Sequence[_Child]: ...

    @property
    def keys(self) -> Sequence[Any] | None: ...


Row: TypeAlias = tuple[_Child, str, Any]
"""A child, its path, and its encoded key; its number in what has no keys."""


def rows(node: Branch[_Child], path: str) -> Iterable[Row[_Child]]:
    """The children of `node`, which is at `path`: the one rule that makes paths of a tree. Raises
    `InvalidInput` for two keys of one path."""
    if node.keys is not None:
        below = [f"{path}/{name}" for name in segments(node.keys)]
        return zip(node.children, below, node.keys, strict=True)
    if node.type in WRAPPERS:
        return [(node.children[0], path, 0)]
    return [(child, f"{path}/{n}", n) for n, child in enumerate(node.children)]


def walk(node: Node | int, path: str) -> Iterator[tuple[Node | int, str]]:
    """`node`, which is at `path`, and all below it, each with its path: outer ones first."""
    yield node, path
    if not isinstance(node, int):
        for child, below, _ in rows(node, path):
            yield from walk(child, below)


def paths_of_leaves(node: Node | int, path: str) -> Iterator[tuple[int, str]]:
    """The leaves of the tree of `node`, which is at `path`, each with its path."""
    return ((leaf, at) for leaf, at in walk(node, path) if isinstance(leaf, int))


def pickled_paths(schema: Schema) -> list[str]:
    """The paths of the leaves that are pickles."""
    pickles = [node for node in nodes_of(schema.skeleton) if node.type == "pickle"]
    leaves = (child for node in pickles for child in node.children if isinstance(child, int))
    return [schema.paths[leaf] for leaf in sorted(leaves)]


def _typed_segment(key: Any, names: set[str]) -> str:
    if type(key) is int or key[0] == "int":
        decimal = str(key if type(key) is int else key[1])
        return f"%int:{decimal}" if decimal in names else decimal
    tag, *payload = key
    return f"%{tag}:{escape(_key_text(tag, payload))}"


def _key_text(tag: str, payload: list[Any]) -> str:
    match tag:
        case "none":
            return ""
        case "bool":
            return "true" if payload[0] else "false"
        case "float":
            return repr(canonical.bits_float(payload[0]))
    return canonical.encode(payload).decode()
