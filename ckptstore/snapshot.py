"""What `checkout` returns: a read handle on one commit."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from ckptstore.core.geometry import box_of_region
from ckptstore.core.globs import selector
from ckptstore.core.ids import CommitId
from ckptstore.core.model import Box, CommitDocument, Shape
from ckptstore.core.text import near
from ckptstore.distributed.broadcast import Broadcast
from ckptstore.distributed.collective import TIMEOUT_S
from ckptstore.distributed.gloo import collective_of
from ckptstore.distributed.rank_view import RankView, own_trees, tree_of_rank
from ckptstore.distributed.restore import Common, check_loaders, restore_together
from ckptstore.distributed.shared_verification import SharedVerification
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.objects.documents import Layout
from ckptstore.restore.inflate_commit import Select, assemble, selected, whole
from ckptstore.restore.mmap import Unmappable
from ckptstore.restore.reader import Destination, Reader, ReadRequest, Tree
from ckptstore.restore.restore import RestoreOperation, RestoreOptions, RestoreReport
from ckptstore.state import dtype_cast, tensors
from ckptstore.state.flatten import check_app_state
from ckptstore.state.inflate import inflate_leaf
from ckptstore.state.optimizer_ids import unnamed
from ckptstore.state.paths import segment

if TYPE_CHECKING:
    import torch

    from ckptstore.commit.commit import CommitStats
    from ckptstore.state.renaming import Rename


Region = tuple[slice | int, ...] | slice | int
"""A part of a tensor: slices of step 1 and integers, as in an index."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of a commit: `kind` is `tensor`, `value` or `bytes`; `dtype` and `shape` are of
    tensors; `nbytes` its raw bytes."""

    path: str
    kind: str
    dtype: str
    shape: Shape
    nbytes: int
    alias_of: str | None


class Snapshot:
    """A read handle on one commit. Holds nothing in the store; threads may share it.

    `stats` says what the commit cost, on the snapshot that `commit` returned; None on one from
    `checkout`.
    """

    def __init__(
        self,
        reader: Reader,
        commit: CommitId,
        document: CommitDocument,
        *,
        tags: tuple[str, ...] = (),
        stats: "CommitStats | None" = None,
        restoring: Callable[[], None] = lambda: None,
        restored: Callable[[CommitId], None] = lambda commit: None,
    ) -> None:
        self._reader = reader
        self._document = document
        self._restoring, self._restored = restoring, restored
        self._closing: Callable[[], None] = lambda: None
        self._read_trees: dict[str, Tree] = {}
        self.id = commit
        self.tags = tags
        self.stats = stats

    def __repr__(self) -> str:
        step = "" if self.step is None else f", step={self.step}"
        return f"<Snapshot {self.id[:12]} run={self.run}{step}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the store if it was opened for this snapshot alone (`ckptstore.open_pointer`);
        nothing else is held. Idempotent."""
        self._closing()

    def close_with(self, closing: Callable[[], None]) -> None:
        """Have `close` call `closing`, which may be called again."""
        self._closing = closing

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

    @property
    def layout(self) -> Layout | None:
        """How the ranks that made the commit held its leaves; None for a commit of one."""
        return self._reader.layout(self._document)

    def only(self, keys: Iterable[str]) -> "Snapshot":
        """This commit as if it had no keys but `keys`; those that it does not have are ignored."""
        if isinstance(keys, str) or not isinstance(keys, Iterable):
            raise InvalidInput(
                f"only({keys!r:.80}): wanted names of keys, such as "
                f"only([{next(iter(self.keys()), 'model')!r}])"
            )
        kept = frozenset(keys)
        return self._narrowed(
            {key: tree for key, tree in self._read_trees.items() if key in kept}, kept
        )

    def of_rank(self, rank: int) -> "Snapshot":
        """This commit as `rank` had it: what is each rank's own is that rank's, under the path it
        had there; what only others have of their own is left out."""
        trees = {
            key: own
            for key, tree in self.trees.items()
            if (own := tree_of_rank(tree, rank)) is not None
        }
        return self._narrowed(trees, frozenset(trees))

    def numbered(self) -> "Snapshot":
        """This commit with the states of optimizers as torch's `state_dict` gives them: parameters
        by number, not by name. Paths, with which `read` and `select` are told what is meant, stay
        what they are."""
        schemas = {
            key: replace(tree.schema, skeleton=unnamed(tree.schema.skeleton))
            for key, tree in self.trees.items()
        }
        trees = {key: replace(self.trees[key], schema=schema) for key, schema in schemas.items()}
        return self._narrowed(trees, frozenset(trees))

    def leaves(self, select: Select = "*") -> list[Leaf]:
        """The leaves that the glob `select` (or one of several) matches, in order: by their path,
        in full or below their key."""
        is_selected = selector(select)
        numbered = ((tree, i) for tree in self.trees.values() for i in range(len(tree.schema)))
        return [_leaf(tree, i) for tree, i in numbered if is_selected(tree.schema.paths[i])]

    def restore(
        self,
        app_state: MutableMapping[str, Any],
        *,
        strict: bool = True,
        select: Select | None = None,
        rename: "Rename | None" = None,
        dtype: "torch.dtype | None" = None,
        memory_budget_bytes: int | None = None,
        allow_pickle: bool = False,
        process_group: Any = None,
        private: Mapping[int, int] | None = None,
        broadcast: bool | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> RestoreReport:
        """Bring `app_state` to what was committed, in place: no tensor is allocated that the target
        already has.

        Objects with `load_state_dict` are handed their state; in plain containers tensors are
        filled where they stand, other values are replaced, and what only the commit has is added.
        With `strict`, a key or a module's leaf that only one side has, or a tensor that the commit
        lacks, raises `InvalidInput` before anything is touched; without it, the report lists both.
        A shape or dtype that differs always raises. After an error while reading (`Corrupt`,
        `Unavailable`), the target's tensors may hold bytes of both states.

        `select`, a glob or several, restores the leaves that match (their path in the commit, in
        full or below its key) and leaves everything else in `app_state` as it is. `rename` maps
        prefixes of paths to others, `{"old.": "new."}`, or is a function from path to path; two
        leaves for one target, and a prefix that no path has, are `InvalidInput`. With `dtype`,
        floating leaves are converted where the target has a tensor of that dtype; what has no
        target, or one of its own dtype, stays as it was committed. Buffers beside `app_state` stay
        within `memory_budget_bytes`; without it, within what the host can spare. docs/partial.md
        has examples.

        Where torch.distributed is initialized with several ranks, all of them (of `process_group`,
        if given) restore together, however many committed: each reads the boxes that its own
        tensors have, and what fails on one rank raises on all. `process_group="alone"` restores
        this process by itself. What was private to a rank goes to the rank of that number;
        `private` maps other ranks to those whose they take. With `broadcast`, a chunk that several
        ranks need is read by one of them, which sends it to the others; without a word, where the
        store is in a bucket. All ranks must say the same, else each reads what it needs.
        """
        options = RestoreOptions(strict, allow_pickle, select, rename, dtype, memory_budget_bytes)
        peers = collective_of(process_group, timeout_s)
        viewer = RankView(peers.rank if peers else 0, peers.size if peers else 1, private or {})

        def begin() -> RestoreOperation:
            check_app_state(app_state)
            self._restoring()
            check_loaders(self.trees, app_state, viewer)
            own = own_trees(self.trees, viewer, strict=strict)
            return RestoreOperation(self._reader, self.id, own, app_state, options)

        def common_of(restoring: RestoreOperation) -> Common:
            common = (
                Broadcast
                if (self._reader.remote if broadcast is None else broadcast)
                else SharedVerification
            )
            return common(
                self._reader,
                restoring.reading,
                b"".join(c.ids for tree in self.trees.values() for c in tree.contents),
            )

        if peers:
            restoring = restore_together(peers, self.id, begin, common_of)
        else:
            restoring = begin()
            restoring.read()
            restoring.finish()
        self._restored(self.id)
        return restoring.report

    def read(
        self,
        path: str,
        region: Region | None = None,
        *,
        dtype: "torch.dtype | None" = None,
        memory_budget_bytes: int | None = None,
        allow_pickle: bool = False,
    ) -> Any:
        """One leaf by its path. `region` takes a part of a tensor (slices of step 1 and integers),
        and only the chunks it needs are read.

        With `dtype`, a floating tensor comes back converted, chunk by chunk; others are left alone.
        Buffers beside the result stay within `memory_budget_bytes`. Raises `NotFound` for a path
        that the commit does not have and `InvalidInput` for a region that does not fit.
        """
        tree, i = self._find(path)
        if tree.schema.kinds[i] != "tensor":
            if region is not None:
                raise InvalidInput(
                    f"{path} is a {tree.schema.kinds[i]}, which has no regions; read it whole"
                )
            data = self._reader.leaf_bytes(
                tree, i, self.id, memory_budget_bytes=memory_budget_bytes
            )
            return inflate_leaf(tree.schema, i, data, allow_pickle=allow_pickle)
        box, shape = _box(tree, i, region)
        tree.check(i)  # before memory is taken for a shape that may be damaged
        committed = tree.schema.dtypes[i]
        converted = dtype is not None and dtype_cast.converts(committed, dtype_cast.checked(dtype))
        out = tensors.empty(
            tensors.DTYPE_NAMES[dtype] if dtype is not None and converted else committed, shape
        )
        self._land(tree, i, box, out, memory_budget_bytes)
        return out

    def read_into(
        self,
        tensor: "torch.Tensor",
        path: str,
        region: Region | None = None,
        *,
        dtype: "torch.dtype | None" = None,
        memory_budget_bytes: int | None = None,
    ) -> None:
        """As `read`, into a tensor that is there: on any device, with any strides, as long as no
        two elements share memory.

        Raises `InvalidInput` unless the tensor has the shape and the dtype of what is read; with
        `dtype`, the tensor's own, floats are converted to it. After an error while reading, the
        tensor may hold some new bytes and some old.
        """
        if not tensors.is_tensor(tensor):
            raise InvalidInput(
                f"read_into got a {type(tensor).__name__} in the place of the tensor: "
                "read_into(tensor, path)"
            )
        tree, i = self._find(path)
        if tree.schema.kinds[i] != "tensor":
            raise InvalidInput(f"{path} is a {tree.schema.kinds[i]}, no tensor; use read")
        box, shape = _box(tree, i, region)
        committed = tree.schema.dtypes[i]
        converted = (
            dtype is not None
            and tensor.dtype == dtype
            and dtype_cast.converts(committed, dtype_cast.checked(dtype))
        )
        if tuple(tensor.shape) != shape or not (
            converted or tensors.DTYPE_NAMES[tensor.dtype] == committed
        ):
            wanted, got = (
                f"{committed}{list(shape)}",
                f"{tensors.DTYPE_NAMES[tensor.dtype]}{list(tensor.shape)}",
            )
            raise InvalidInput(
                f"{path} needs a tensor {wanted}; got {got}; dtype=tensor.dtype converts floats, "
                "shapes must agree"
            )
        if not tensors.is_strided(tensor) or not tensors.is_writable_by_range(tensor):
            raise InvalidInput(
                f"{path} cannot be read into a tensor without memory of its own for each element; "
                "use read, and copy"
            )
        self._restoring()
        self._land(tree, i, box, tensor, memory_budget_bytes)

    def send(
        self, destinations: Mapping[str, Destination], *, memory_budget_bytes: int | None = None
    ) -> None:
        """Bring the raw bytes of leaves, by their paths, to where they go: verified, and in no
        order.

        Raises `NotFound` for a path that the commit does not have.
        """
        found = {path: self._find(path) for path in destinations}
        self._restoring()
        wanted = [
            ReadRequest(*found[path], destination) for path, destination in destinations.items()
        ]
        self._reader.read(wanted, self.id, memory_budget_bytes=memory_budget_bytes)

    def land(self, wanted: "Iterable[tuple[Tree, int, Destination, Box | None]]") -> None:
        """Bring leaves of `trees` by their numbers, or boxes of them, to where they go: verified,
        and in no order."""
        self._restoring()
        self._reader.read([ReadRequest(*each) for each in wanted], self.id)

    def leaf_bytes(self, tree: Tree, number: int) -> bytes:
        """All bytes of a leaf of `trees`, verified: of a value or of bytes."""
        return self._reader.leaf_bytes(tree, number, self.id)

    def open(self, path: str, *, verify: bool = False) -> "torch.Tensor":
        """One tensor, mapped into memory instead of read: its pages come from the packs when they
        are touched.

        Writing to it changes this process's copy of the page and no file (torch has no read-only
        tensors). The tensor outlives the store object and a `gc` that deletes its packs. This is
        the one read that is not verified; `verify=True` reads it all and is.

        Raises `InvalidInput`, and `read` is the way, for a leaf that is stored compressed, that was
        committed in shards which do not lie one behind the other, or whose parts do not meet at
        page boundaries, and where the store is no local directory; `Corrupt` if verification fails
        or a pack is too short; `NotFound` for a path that the commit does not have.
        """
        tree, i = self._find(path)
        if tree.schema.kinds[i] != "tensor":
            raise InvalidInput(f"{path} is a {tree.schema.kinds[i]}, no tensor; use read")
        if tree.content(i).inline is not None:
            return cast("torch.Tensor", self.read(path))
        try:
            data = self._reader.map(tree, i, self.id, verify=verify)
        except Unmappable as error:
            raise InvalidInput(f"{path} cannot be mapped: {error}; use read") from error
        return tensors.tensor_from(data, tree.schema.dtypes[i], tree.schema.shapes[i])

    def state_dict(
        self,
        key: str | None = None,
        *,
        select: Select | None = None,
        dtype: "torch.dtype | None" = None,
        mmap: bool = False,
        memory_budget_bytes: int | None = None,
        allow_pickle: bool = False,
    ) -> Any:
        """The nested state of one key of the application state (of all keys without `key`), freshly
        allocated.

        Tensors that shared memory when they were committed share it again. `select`, a glob or
        several, takes only the leaves that match, and only they are read; containers that hold none
        are left out, and in a list, a tuple, a namedtuple or a dataclass None stands for what is.
        With `dtype`, floating tensors come back converted, chunk by chunk. With `mmap`, tensors are
        mapped as by `open`, not verified, and those that cannot be mapped are read:
        `model.load_state_dict(snap.state_dict("model", mmap=True), assign=True)`. Buffers beside
        the result stay within `memory_budget_bytes`.

        Raises `NotFound` for a key that the commit does not have and for a selection that nothing
        matches.
        """
        if mmap and dtype is not None:
            raise InvalidInput(
                "mmap takes tensors as they are stored, dtype converts them; give one or the other"
            )
        if dtype is not None:
            dtype_cast.checked(dtype)
        trees = self.trees if key is None else {key: self._tree(key)}
        views = whole(trees) if select is None else selected(trees, select, self.id)
        states = {
            name: assemble(
                self._reader,
                self.id,
                view,
                dtype=dtype,
                mmap=mmap,
                allow_pickle=allow_pickle,
                memory_budget_bytes=memory_budget_bytes,
            )
            for name, view in views.items()
        }
        return states if key is None else states[key]

    def verify(self) -> None:
        """Read every chunk of the commit and compare it with its id; raises `Corrupt` or `NotFound`
        for the first that fails."""
        for tree in self.trees.values():
            self._reader.verify(tree, self.id)

    @property
    def trees(self) -> dict[str, Tree]:
        """Schema and content of each key: what the commit consists of, without its bytes."""
        if len(self._read_trees) < len(self._document.trees):
            self._read_trees.update(self._reader.trees(self._document.trees))
        return {key: self._read_trees[key] for key in self.keys()}

    def _narrowed(self, trees: dict[str, Tree], keys: frozenset[str]) -> "Snapshot":
        document = replace(
            self._document, trees=tuple(each for each in self._document.trees if each[0] in keys)
        )
        narrowed = Snapshot(
            self._reader,
            self.id,
            document,
            tags=self.tags,
            stats=self.stats,
            restoring=self._restoring,
            restored=self._restored,
        )
        narrowed._read_trees = trees
        return narrowed

    def _tree(self, key: str) -> Tree:
        if key not in self._read_trees:
            ref = dict(self._document.trees).get(key)
            if ref is None:
                raise NotFound(
                    f"commit {self.id[:12]} has no key {key!r}; it has {', '.join(self.keys())}"
                )
            self._read_trees[key] = self._reader.tree(key, ref)
        return self._read_trees[key]

    def _find(self, path: str) -> tuple[Tree, int]:
        """The leaf's tree, the only one that is looked at, and its number there."""
        if not isinstance(path, str):
            raise InvalidInput(
                f"{type(path).__name__} {path!r:.80} is no path of a leaf; wanted a string such as "
                f"{self._example()!r}"
            )
        key = next((key for key in self.keys() if segment(key) == path.partition("/")[0]), None)
        tree = None if key is None else self._tree(key)
        if tree is not None and path in tree.numbers:
            return tree, tree.numbers[path]
        paths = [p for tree in self.trees.values() for p in tree.schema.paths]
        raise NotFound(
            f"commit {self.id[:12]} has no leaf {path!r}{near(path, paths)}; `ckptstore ls "
            f"{self.id[:12]}` lists them"
        )

    def _example(self) -> str:
        return next(
            (path for tree in self.trees.values() for path in tree.schema.paths), "model/weight"
        )

    def _land(
        self,
        tree: Tree,
        i: int,
        box: Box | None,
        tensor: "torch.Tensor",
        memory_budget_bytes: int | None,
    ) -> None:
        wanted = ReadRequest(tree, i, dtype_cast.destination(tensor, tree.schema.dtypes[i]), box)
        self._reader.read([wanted], self.id, memory_budget_bytes=memory_budget_bytes)


def _box(tree: Tree, i: int, region: Region | None) -> tuple[Box | None, Shape]:
    """The box that a region names, None for the whole leaf, and the shape of the result."""
    shape, path = tree.schema.shapes[i], tree.schema.paths[i]
    if region is None:
        return None, shape
    try:
        return box_of_region(shape, region if isinstance(region, tuple) else (region,))
    except (ValueError, IndexError, TypeError) as error:
        raise InvalidInput(
            f"region of {path}: {error}; the leaf's shape is {tuple(shape)}"
        ) from error


def _leaf(tree: Tree, i: int) -> Leaf:
    schema = tree.schema
    alias = schema.aliases[i]
    nbytes = 0 if alias >= 0 else tree.raw_bytes(i)
    return Leaf(
        schema.paths[i],
        schema.kinds[i],
        schema.dtypes[i],
        schema.shapes[i],
        nbytes,
        schema.paths[alias] if alias >= 0 else None,
    )
