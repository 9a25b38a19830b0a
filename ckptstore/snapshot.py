"""What `checkout` returns: a read handle on one commit."""

import fnmatch
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckptstore.core.geometry import box_of_region
from ckptstore.core.ids import CommitId
from ckptstore.core.model import CommitDocument, Shape
from ckptstore.engine.checkout import Memory, Reader, Tree, Wanted
from ckptstore.engine.near import near
from ckptstore.engine.restore import RestoreReport, restore
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.state import tensors
from ckptstore.state.inflate import inflate, inflate_leaf

if TYPE_CHECKING:
    import torch

    from ckptstore.engine.commit import CommitStats


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of a commit: `kind` is `tensor`, `value` or `bytes`; `dtype` and `shape` are of tensors; `nbytes` its raw bytes."""

    path: str
    kind: str
    dtype: str
    shape: Shape
    nbytes: int
    alias_of: str | None


class Snapshot:
    """A read handle on one commit. Holds nothing in the store; threads may share it.

    `stats` says what the commit cost, on the snapshot that `commit` returned; None on one from `checkout`.
    """

    def __init__(
        self,
        reader: Reader,
        commit: CommitId,
        document: CommitDocument,
        *,
        tags: tuple[str, ...] = (),
        stats: "CommitStats | None" = None,
        restored: Callable[[CommitId], None] = lambda commit: None,
    ) -> None:
        self._reader = reader
        self._document = document
        self._restored = restored
        self.id = commit
        self.tags = tags
        self.stats = stats

    def __repr__(self) -> str:
        step = "" if self.step is None else f", step={self.step}"
        return f"<Snapshot {self.id[:12]} run={self.run}{step}>"

    @property
    def run(self) -> str:
        return self._document.run

    @property
    def step(self) -> int | None:
        return self._document.step

    @property
    def message(self) -> str:
        return self._document.message

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self._document.metrics)

    @property
    def parents(self) -> tuple[CommitId, ...]:
        return self._document.parents

    @property
    def time(self) -> datetime:
        """When the commit was made, in UTC."""
        return datetime.fromtimestamp(self._document.time_ns / 1e9, UTC)

    @property
    def content_id(self) -> str:
        """Equal for equal states, whatever their step, run or number of ranks."""
        return self._document.content

    @property
    def logical_bytes(self) -> int:
        """Raw bytes of the state."""
        return self._document.logical_bytes

    @property
    def new_bytes(self) -> int:
        """What the store's packs grew by when this was committed."""
        return self._document.new_bytes

    def keys(self) -> list[str]:
        """The keys of the application state, in order."""
        return [key for key, _ in self._document.trees]

    def leaves(self, select: str = "*") -> list[Leaf]:
        """The leaves whose path matches the glob `select`, in order."""
        numbered = ((tree, i) for tree in self.trees.values() for i in range(len(tree.schema)))
        return [_leaf(tree, i) for tree, i in numbered if fnmatch.fnmatchcase(tree.schema.paths[i], select)]

    def restore(self, app_state: MutableMapping[str, Any], *, strict: bool = True, allow_pickle: bool = False) -> RestoreReport:
        """Bring `app_state` to what was committed, in place: no tensor is allocated that the target already has.

        Objects with `load_state_dict` are handed their state; in plain containers tensors are filled where they stand, other values are
        replaced, and what only the commit has is added. With `strict`, a key or a module's leaf that only one side has, or a tensor that
        the commit lacks, raises `InvalidInput` before anything is touched; without it, the report lists both. A shape or dtype that differs
        always raises. After an error while reading (`Corrupt`, `Unavailable`), the target's tensors may hold bytes of both states.
        """
        report = restore(self._reader, self.id, self.trees, app_state, strict=strict, allow_pickle=allow_pickle)
        self._restored(self.id)
        return report

    def read(self, path: str, region: tuple[slice | int, ...] | slice | int | None = None, *, allow_pickle: bool = False) -> Any:
        """One leaf by its path. `region` takes a part of a tensor (slices of step 1 and integers), and only the chunks it needs are read.

        Raises `NotFound` for a path that the commit does not have and `InvalidInput` for a region that does not fit.
        """
        tree, i = self._find(path)
        if tree.schema.kinds[i] != "tensor":
            if region is not None:
                raise InvalidInput(f"{path} is a {tree.schema.kinds[i]}, which has no regions; read it whole")
            return inflate_leaf(tree.schema, i, self._reader.leaf_bytes(tree, i, self.id), allow_pickle=allow_pickle)
        return self._read_tensor(tree, i, region)

    def state_dict(self, key: str | None = None, *, allow_pickle: bool = False) -> Any:
        """The nested state of one key of the application state (of all keys without `key`), freshly allocated.

        Tensors that shared memory when they were committed share it again.
        """
        if key is None:
            return {name: self.state_dict(name, allow_pickle=allow_pickle) for name in self.keys()}
        if key not in self.trees:
            raise NotFound(f"commit {self.id[:12]} has no key {key!r}; it has {', '.join(self.keys())}")
        tree = self.trees[key]
        schema = tree.schema
        values: list[Any] = [None] * len(schema)
        wanted = []
        for i, kind in enumerate(schema.kinds):
            if kind == "tensor" and schema.aliases[i] < 0:
                tree.check(i)
                values[i] = tensors.empty(schema.dtypes[i], schema.shapes[i])
                wanted.append(Wanted(tree, i, Memory(tensors.memory_of(values[i]))))
        self._reader.read(wanted, self.id)
        for i, kind in enumerate(schema.kinds):
            if kind != "tensor":
                values[i] = self._reader.leaf_bytes(tree, i, self.id)
            elif schema.aliases[i] >= 0:
                values[i] = values[schema.aliases[i]]
        return inflate(schema, values, allow_pickle=allow_pickle)

    def verify(self) -> None:
        """Read every chunk of the commit and compare it with its id; raises `Corrupt` or `NotFound` for the first that fails."""
        for tree in self.trees.values():
            self._reader.verify(tree, self.id)

    @cached_property
    def trees(self) -> dict[str, Tree]:
        """Schema and content of each key: what the commit consists of, without its bytes."""
        return {key: self._reader.tree(key, ref) for key, ref in self._document.trees}

    def _find(self, path: str) -> tuple[Tree, int]:
        for tree in self.trees.values():
            if path in tree.numbers:
                return tree, tree.numbers[path]
        paths = [p for tree in self.trees.values() for p in tree.schema.paths]
        raise NotFound(f"commit {self.id[:12]} has no leaf {path!r}{near(path, paths)}; `ckptstore ls {self.id[:12]}` lists them")

    def _read_tensor(self, tree: Tree, i: int, region: tuple[slice | int, ...] | slice | int | None) -> "torch.Tensor":
        shape, dtype, path = tree.schema.shapes[i], tree.schema.dtypes[i], tree.schema.paths[i]
        box, result_shape = None, shape
        if region is not None:
            try:
                box, result_shape = box_of_region(shape, region if isinstance(region, tuple) else (region,))
            except (ValueError, IndexError) as error:
                raise InvalidInput(f"region of {path}: {error}; the leaf's shape is {tuple(shape)}") from error
        tree.check(i)
        out = tensors.empty(dtype, result_shape)
        self._reader.read([Wanted(tree, i, Memory(tensors.memory_of(out)), box)], self.id)
        return out


def _leaf(tree: Tree, i: int) -> Leaf:
    schema = tree.schema
    alias = schema.aliases[i]
    nbytes = 0 if alias >= 0 else tree.raw_bytes(i)
    return Leaf(schema.paths[i], schema.kinds[i], schema.dtypes[i], schema.shapes[i], nbytes, schema.paths[alias] if alias >= 0 else None)
