"""What DCP's names mean: a commit, its store, and the leaves of it.

A `checkpoint_id` that is a path (absolute, or beginning with `./` or `../`, or a `Path`) is a
directory with a pointer file instead of DCP's `.metadata`; digits are a step; other text is a tag.
All three are refs, so `dcp.load` finds what `dcp.save` was given.

As DCP's planner does, every mapping is taken apart, and every list with a tensor or a mapping in
it; what remains are tensors and objects. Dots join the keys of all levels. Details of DCP's names
that a commit's trees do not contain are *marks* in its layout (docs/format.md §7).
"""

import io
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError

from ckptstore import Snapshot, Storage, Store, open
from ckptstore.errors import Conflict, Corrupt, InvalidInput
from ckptstore.plugin.handles import AnyRef, is_path
from ckptstore.plugin.leaves import rows, segment
from ckptstore.plugin.model import CONFIG_KEY, Box, Node, Schema, Shape, check_tag
from ckptstore.plugin.pointers import is_pointer
from ckptstore.plugin.reading import Tree
from ckptstore.plugin.snapshots import assemble_nodes, contents_of
from ckptstore.plugin.stores import address_of
from ckptstore.plugin.text import redact
from ckptstore.plugin.values import containers, values
from ckptstore.plugins.foreign.loaded import DCP_METADATA
from ckptstore.plugins.foreign.plain_pickles import save

CheckpointId: TypeAlias = str | os.PathLike[str]


class Releasable(Protocol):
    def release(self) -> None: ...


Work = TypeVar("Work", bound=Releasable)
"""A save or a load."""


class AtPlace(Generic[Work]):
    """Shared by `StoreWriter` and `StoreReader`: the location of a checkpoint, and each thread's
    save or load in progress.

    The store is open, or is opened for each save or load. DCP makes all calls of a save or load on
    one thread, and those of `async_save` on another. It sends this object to another process,
    where its store is opened again. A name given on the thread that made this object holds on every
    thread that gives none.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        run: str | None,
        storage_options: Mapping[str, Any] | None,
        index: str | None,
    ) -> None:
        super().__init__()
        self._store = store if isinstance(store, Store) else None
        place: str | os.PathLike[str]
        if isinstance(store, Store):
            if run is not None or storage_options is not None or index is not None:
                raise InvalidInput(
                    "run, storage_options and index are those of the open store; leave them out, "
                    "or pass its path"
                )
            (place, storage), run = address_of(store), store.run
        else:
            place, storage = os.fspath(store), Storage(options=storage_options, index=index)
        self._arguments: dict[str, Any] = {"place": place, "run": run, "storage": storage}
        self._name: CheckpointId | None = None
        self._begin()

    def _begin(self) -> None:
        self._thread = threading.local()
        self._maker = threading.get_ident()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_thread", "_saves")
        state = {key: value for key, value in self.__dict__.items() if key not in own}
        return {**state, "_store": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _opened(
        self, *, create: bool = False, read_only: bool = False
    ) -> tuple[Store, Callable[[], None]]:
        """The store, and a function that closes it if it was opened here. Idempotent."""
        if self._store is not None:
            return self._store, lambda: None
        store = open(**self._arguments, create=create, read_only=read_only)
        return store, store.close

    @property
    def checkpoint_id(self) -> CheckpointId:
        """The name of this thread's next save or load; by default the store's location."""
        return redact(str(self._arguments["place"])) if self._named is None else self._named

    @property
    def _named(self) -> CheckpointId | None:
        name: CheckpointId | None = getattr(self._thread, "name", self._name)
        return name

    @property
    def _work(self) -> Work | None:
        """This thread's save or load in progress."""
        return getattr(self._thread, "work", None)

    def _rename(self, name: CheckpointId | None) -> None:
        if threading.get_ident() == self._maker:
            self._name = name
        self._thread.name = name

    def _start(self, work: Work) -> None:
        """Begin this thread's save or load, whose name stays as it is."""
        self._thread.name, self._thread.work = self._named, work

    def _drop(self) -> None:
        """End this thread's save or load."""
        work, self._thread.work = self._work, None
        if work is not None:
            work.release()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether `checkpoint_id` can name a commit."""
        try:
            Name.of(checkpoint_id)
        except InvalidInput:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a save: a tag, a step, or a directory with the pointer file in it; possibly
    none.
    """

    tag: str | None = None
    step: int | None = None
    directory: Path | None = None
    file: str = DCP_METADATA

    @classmethod
    def of(cls, checkpoint_id: CheckpointId | None) -> "Name":
        """Parse a `checkpoint_id`. Raises `InvalidInput` for text that cannot be a tag."""
        if checkpoint_id is None or checkpoint_id == "":
            return cls()
        if is_path(checkpoint_id):
            return cls(directory=Path(checkpoint_id))
        text = os.fspath(checkpoint_id)
        return cls(step=int(text)) if text.isdecimal() else cls(tag=check_tag(text))

    def of_rank(self, rank: int) -> "Name":
        """The name of rank `rank`'s part, if ranks save without coordination."""
        tag = self.tag and of_rank(self.tag, rank)
        return Name(tag, self.step, self.directory, f"__{rank}{DCP_METADATA}")

    @property
    def pointer(self) -> Path | None:
        """The path of the pointer file; an earlier version's pointer at the path itself counts.
        Raises `Conflict` for any other file there.
        """
        if self.directory is None:
            return None
        is_file = os.path.lexists(self.directory) and not self.directory.is_dir()
        pointer = self.directory if is_file else self.directory / self.file
        if (os.path.lexists(pointer) and not is_pointer(pointer)) or (
            self.directory / CONFIG_KEY
        ).exists():
            raise Conflict(
                f"{self.directory} exists and is not a checkpoint of ckptstore; give another "
                "checkpoint_id, or remove it"
            )
        return pointer


def of_rank(label: str, rank: int) -> str:
    """The run or tag of one rank's save without coordination."""
    return f"{label}/rank-{rank}"


def ref_of_rank(ref: AnyRef, run: str, rank: int) -> AnyRef:
    """The ref of rank `rank`'s save without coordination, given the whole's `ref`. A commit id has
    no such ref.
    """
    if is_path(ref):
        # a path (`is_path`)
        return Path(os.fspath(ref)) / Name().of_rank(rank).file  # type: ignore[arg-type]
    if isinstance(ref, int):
        return f"{of_rank(run, rank)}@{ref}"
    if not isinstance(ref, str):
        return ref
    named, at, base = ref.rpartition("@")
    if base == "latest" or base.isdecimal() or base.startswith(("latest~", "best:")):
        return f"{of_rank(named if at else run, rank)}@{base}"
    return of_rank(ref, rank)


_TENSORS = ("torch.Parameter", "torch.Tensor", "torch.thin_subclass")
"""Node types that are one plain tensor with an attribute."""

_COMPOSITES = (
    "torch.sparse_",
    "torch.quantized",
    "torch.nested",
    "torch.jagged",
    "torch.subclass",
    *_TENSORS,
)

Keys: TypeAlias = tuple[str | int, ...]
"""The keys that lead to an item: text for mappings, numbers for lists."""

DCP_VERSION = "1.0.0"
"""The version in DCP's metadata; torch before 2.8 has none."""

FLAT_KEY = "model"
"""The key for a state dict without nesting."""


@dataclass(slots=True)
class Marks:
    """Details of DCP's names: `flat` is a key that is not part of them; `items` are paths of
    containers that are one item each; `raw` are paths of bytes that the planner made; `rank` marks
    one rank's part, and `parts` has the shapes of tensors of which that rank held boxes only.
    """

    flat: str | None = None
    items: list[str] = field(default_factory=list)
    raw: list[str] = field(default_factory=list)
    rank: int | None = None
    parts: dict[str, Shape] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, snapshot: Snapshot) -> "Marks":
        """The marks in a commit's layout. Raises `Corrupt`."""
        document = snapshot.layout.dcp if snapshot.layout else None
        if document is None:
            return cls()
        try:
            return _MARKS.validate_python(document)
        except ValidationError as error:
            raise Corrupt(
                f"the layout of commit {snapshot.id[:12]} is damaged: {error!r:.200}; run "
                "`ckptstore fsck`"
            ) from error


_MARKS = TypeAdapter(Marks)


@dataclass(frozen=True, slots=True)
class Named:
    """An item and its place in its tree. An object has no `parts`. A tensor of `shape` has one, the
    whole, or the boxes of it that one rank saved alone, each with its leaf.
    """

    name: str
    keys: Keys
    tree: Tree
    node: Node | int
    path: str
    parts: tuple[tuple[Box, int], ...] = ()
    shape: Shape = ()

    @property
    def is_whole(self) -> bool:
        """Whether this is a tensor in one leaf."""
        return len(self.parts) == 1 and self.parts[0][0].lengths == self.shape


class CommitItems:
    """The items of a commit by name, in the order of its trees; with `key`, those of that key,
    without its name.

    Raises `InvalidInput` if two items would have one name, `Corrupt` for a damaged layout.
    """

    def __init__(self, snapshot: Snapshot, key: str | None, *, allow_pickle: bool) -> None:
        self.snapshot, self.marks = snapshot, Marks.of(snapshot)
        self.allow_pickle = allow_pickle
        self._whole = frozenset(self.marks.items)
        self.by_name: dict[str, Named] = {}
        unnamed = self.marks.flat if key is None else key
        for own, tree in contents_of(snapshot).trees.items():
            if key is not None and own != key:
                continue
            containers.check(tree.schema.skeleton)
            keys: Keys = () if own == unnamed else (own,)
            for item in self._below(tree, tree.schema.skeleton, keys, segment(own)):
                other = self.by_name.setdefault(item.name, item)
                if other is not item:
                    raise InvalidInput(
                        f"{other.path} and {item.path} are both {item.name!r} for DCP; read them "
                        "natively, or one key (key=…)"
                    )

    def objects(self, items: Iterable[Named]) -> dict[str, Any]:
        """The objects of `items`, by name. The tensors in them are read together."""
        wanted, contents = list(items), contents_of(self.snapshot)
        found: dict[str, Any] = {}
        for tree in contents.trees.values():
            if not (own := [item for item in wanted if item.tree is tree]):
                continue
            made = assemble_nodes(
                contents.reader,
                contents.commit,
                tree,
                [item.node for item in own],
                allow_pickle=self.allow_pickle,
            )
            found.update(zip((item.name for item in own), made, strict=True))
        return found

    def _below(self, tree: Tree, node: Node | int, keys: Keys, path: str) -> Iterator[Named]:
        if isinstance(node, Node) and node.type == "stateful":
            yield from self._below(tree, node.children[0], keys, path)
        elif (
            isinstance(node, Node)
            and path not in self._whole
            and path not in self.marks.parts
            and is_divided(node, tree.schema)
        ):
            for child, own, key in rows(node, path):
                name = key if node.keys is None else _text(key)
                yield from self._below(tree, child, (*keys, name), own)
        elif not keys:
            raise InvalidInput(
                f"{path} is one item and has no name without its key; leave key= out"
            )
        else:
            parts, shape = self._parts(tree.schema, node, path)
            yield Named(".".join(map(str, keys)), keys, tree, node, path, parts, shape)

    def _parts(
        self, schema: Schema, node: Node | int, path: str
    ) -> tuple[tuple[tuple[Box, int], ...], Shape]:
        """The boxes and the shape of the tensor at `node`; none for an object."""
        if isinstance(node, Node) and path in self.marks.parts:
            return tuple(_boxes(schema, node, path)), self.marks.parts[path]
        while isinstance(node, Node) and node.type in _TENSORS:
            node = node.children[0]
        if isinstance(node, Node) or schema.kinds[node] != "tensor":
            return (), ()
        shape = schema.shapes[node]
        return ((Box.whole(shape), node),), shape


def is_divided(node: Node | int, schema: Schema) -> bool:
    """Whether DCP takes the object at `node` apart."""
    if isinstance(node, int):
        return False
    if containers.is_mapping(node.type):
        return True
    return node.type == "list" and any(
        _is_tensor(child, schema) or is_divided(child, schema) for child in node.children
    )


def _is_tensor(node: Node | int, schema: Schema) -> bool:
    if isinstance(node, int):
        return schema.kinds[node] == "tensor"
    return node.type.startswith(_COMPOSITES)


def _boxes(schema: Schema, node: Node, path: str) -> Iterator[tuple[Box, int]]:
    """The boxes that one rank saved, which are leaves named by their offsets."""
    for key, child in node.items():
        if not isinstance(child, int):
            raise Corrupt(
                f"{path} is marked as boxes of a tensor, but holds other values; run `ckptstore "
                "fsck`"
            )
        offsets = tuple(int(n) for n in key.split(",")) if key else ()
        yield Box(offsets, schema.shapes[child]), child


def _text(key: Any) -> str:
    return str(values.decode_key(key))


def dumped(value: Any, name: str) -> io.BytesIO:
    """The object `name` in the bytes of DCP's own planner, for planners that read bytes."""
    data = io.BytesIO()
    save(value, data, name)
    data.seek(0)
    return data


def keeps(planner: Any, base: type, *methods: str) -> bool:
    """Whether a planner is DCP's own, as far as `methods` go."""
    return isinstance(planner, base) and all(
        getattr(type(planner), method) is getattr(base, method) for method in methods
    )
