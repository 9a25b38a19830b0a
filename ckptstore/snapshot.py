"""Read one commit: restore it, or read some of its leaves."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from ckptstore.contents import CommitContents, Leaf, Region, box_of, leaf_of
from ckptstore.core.ids import CommitId
from ckptstore.core.options import Ranks
from ckptstore.core.public_calls import public_methods
from ckptstore.core.text import bytes_text, selector
from ckptstore.errors import InvalidInput
from ckptstore.objects.documents import Layout
from ckptstore.peers import collective_of
from ckptstore.plugins.adopt.materializing import Materialized, materialize
from ckptstore.restore.mmap import Unmappable
from ckptstore.restore.reader import ReadRequest, Tree
from ckptstore.restore.restore import (
    RestoreOperation,
    RestoreOptions,
    RestoreReport,
    Select,
    assemble,
    check_keys,
    is_taken,
    keys_of,
    new_tensor,
    selected,
    whole,
)
from ckptstore.state import tensors
from ckptstore.state.flatten import check_app_state
from ckptstore.state.inflate import inflate_leaf
from ckptstore.state.optimizer_forms import unnamed
from ckptstore.state.tensors import converts, destination, wanted_dtype

if TYPE_CHECKING:
    import os

    import torch

    from ckptstore.commit.transaction import CommitStats
    from ckptstore.distributed.collective import Collective
    from ckptstore.distributed.shared_reads import Broadcast
    from ckptstore.state.renaming import Rename
    from ckptstore.state.tensors import AskedDtype


@public_methods
class Snapshot:
    """A read handle on one commit. It holds no lock or file of the store; threads may share it.

    `stats` has the cost of the commit on the snapshot that `commit` returned, else None.
    """

    def __init__(
        self,
        contents: CommitContents,
        *,
        tags: tuple[str, ...] = (),
        stats: "CommitStats | None" = None,
        restored: Callable[[CommitId], None] = lambda commit: None,
    ) -> None:
        self._contents = contents
        self._document = contents.document
        self._restored = restored
        self.id = contents.commit
        self.tags = tags
        self.stats = stats

    def __repr__(self) -> str:
        step = "" if self.step is None else f", step={self.step}"
        return f"<Snapshot {self.id[:12]} run={self.run}{step}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __str__(self) -> str:
        lines = [
            f"commit   {self.id}",
            f"run      {self.run}",
            f"step     {'-' if self.step is None else self.step}",
            f"time     {self.time:%Y-%m-%d %H:%M:%S} UTC",
            f"tags     {', '.join(self.tags) or '-'}",
            f"metrics  {', '.join(f'{k}={v:g}' for k, v in self.metrics.items()) or '-'}",
            f"keys     {', '.join(self.keys())}",
            f"size     {bytes_text(self.logical_bytes)}, {bytes_text(self.new_bytes)} new",
        ]
        lines += [f"link     {name}: {link}" for name, link in self.links.items()]
        return "\n".join(lines + [f"message  {self.message}"] * bool(self.message))

    def close(self) -> None:
        """Close the store if `ckptstore.open_pointer` opened it for this snapshot. Idempotent."""
        self._contents.on_close()

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
    def links(self) -> dict[str, str]:
        """Texts by name that were committed with it, such as the URL of a tracker's run."""
        return dict(self._document.links)

    @property
    def parents(self) -> tuple[CommitId, ...]:
        return self._document.parents

    @property
    def time(self) -> datetime:
        """When the commit was made, in UTC."""
        return datetime.fromtimestamp(self._document.time_ns / 1e9, UTC)

    @property
    def content_id(self) -> str:
        """Equal for equal states, independent of step, run and number of ranks."""
        return self._document.content

    @property
    def logical_bytes(self) -> int:
        """Raw bytes of the state."""
        return self._document.logical_bytes

    @property
    def new_bytes(self) -> int:
        """Bytes that this commit added to the packs of the store."""
        return self._document.new_bytes

    def keys(self) -> list[str]:
        """The keys of the application state, in order."""
        return self._contents.keys

    @property
    def layout(self) -> Layout | None:
        """The leaves that each committing rank held; None for a commit of one process."""
        return self._contents.layout

    def only(self, keys: Iterable[str]) -> "Snapshot":
        """This commit restricted to `keys`. Keys that it does not have are ignored."""
        if isinstance(keys, str) or not isinstance(keys, Iterable):
            raise InvalidInput(
                f"only({keys!r:.80}): wanted names of keys, such as "
                f"only([{next(iter(self.keys()), 'model')!r}])"
            )
        return self._narrowed(frozenset(keys))

    def of_rank(self, rank: int) -> "Snapshot":
        """This commit as `rank` saw it: shared leaves, and its own under their paths on that rank.
        Leaves that only other ranks have are left out."""
        from ckptstore.distributed.restore import tree_of_rank

        trees = {
            key: own
            for key, tree in self._trees.items()
            if (own := tree_of_rank(tree, rank)) is not None
        }
        return self._narrowed(frozenset(trees), trees)

    def numbered(self) -> "Snapshot":
        """This commit with optimizer states as in torch's `state_dict`: parameters by number
        instead of name. Paths for `read` and `select` stay the same."""
        trees = {
            key: replace(tree, schema=replace(tree.schema, skeleton=unnamed(tree.schema.skeleton)))
            for key, tree in self._trees.items()
        }
        return self._narrowed(frozenset(trees), trees)

    def leaves(self, select: Select = "*") -> list[Leaf]:
        """The leaves that match `select`, a glob or several, in order. A glob matches the full path
        or the part below its key."""
        is_selected = selector(select)
        numbered = ((tree, i) for tree in self._trees.values() for i in range(len(tree.schema)))
        return [leaf_of(tree, i) for tree, i in numbered if is_selected(tree.schema.paths[i])]

    def restore(
        self,
        app_state: MutableMapping[str, Any],
        *,
        strict: bool = True,
        without: str | Iterable[str] = (),
        select: Select | None = None,
        rename: "Rename | None" = None,
        dtype: "AskedDtype | None" = None,
        memory_budget_bytes: int | None = None,
        allow_pickle: bool = False,
        ranks: Ranks | None = None,
        mismatched: Literal["refuse", "skip"] = "refuse",
        atomic: bool = False,
    ) -> RestoreReport:
        """Restore `app_state` to this commit, in place: existing tensors are filled, not replaced.

        The commit may have more keys than `app_state`: `{"model": model}` takes the weights alone.
        docs/training-loop.md says what the target holds after an error. With several ranks, all of
        them call this, and an error on one raises on all (docs/distributed.md).

        Args:
            app_state: Objects with `load_state_dict()`, or plain containers, by name.
            strict: Refuse keys that only `app_state` has, and within keys leaves that only one side
                has; otherwise report them.
            without: Keys to leave as they are, one or several.
            select: Restore only leaves that match a glob, or several, or whose path a function
                accepts (docs/partial.md).
            rename: Prefixes of paths, `{"old.": "new."}`, or a function from path to path.
            dtype: Convert floating leaves where the target has a tensor of this dtype. Values that
                it cannot hold are refused, but taken with `(dtype, "unchecked")`.
            memory_budget_bytes: Limit for buffers; default: what the host can spare.
            allow_pickle: Unpickle values that were pickled; that can run any code.
            ranks: Which ranks restore together, and what each takes.
            mismatched: "skip" leaves tensors of another shape, dtype or kind as they are, and warns
                with their paths.
            atomic: Read and verify every chunk before the first byte is replaced: reads twice.

        Returns:
            Leaves that were missing, unexpected or skipped, paths at which a new object stands
            since the target's could not be filled, and the bytes read.

        Raises:
            InvalidInput: `app_state` does not fit, and nothing was changed; or an object refused
                its state, and the message says what was changed.
            Corrupt, Unavailable: A chunk is damaged or cannot be read. Tensors may hold bytes of
                both states, and damaged ones; with `atomic`, nothing was changed by damage.

        Example:
            >>> store.checkout("latest").restore({"model": model})
        """
        budget, left = memory_budget_bytes, keys_of(without)
        if mismatched not in ("refuse", "skip"):
            raise InvalidInput(f'mismatched is {mismatched!r:.80}; wanted "refuse" or "skip"')
        options = RestoreOptions(
            strict, allow_pickle, select, rename, dtype, budget, left, atomic, mismatched
        )
        ranks = ranks or Ranks()
        peers = collective_of(ranks.process_group, ranks.timeout_s)
        private = ranks.private_from or {}
        begin = partial(self._begin_restore, app_state, peers, private, options)
        if peers:
            from ckptstore.distributed.restore import restore_together

            sends = self._contents.reader.remote if ranks.broadcast is None else ranks.broadcast
            operation = restore_together(peers, self.id, begin, self._sharing if sends else None)
        else:
            operation = begin()
            operation.read()
            operation.finish()
        self._restored(self.id)
        self._contents.say_lossy()
        return operation.report

    def _begin_restore(
        self,
        app_state: MutableMapping[str, Any],
        peers: "Collective | None",
        private: Mapping[int, int],
        options: RestoreOptions,
    ) -> RestoreOperation:
        check_app_state(app_state)
        self._contents.before_write()
        check_keys(app_state, self._contents.keys, options)
        by_path = options.select is not None or options.rename is not None
        own: dict[str, Tree]
        contents, among = self._contents, bool(peers or self._document.layout)
        if by_path:
            own, shared = self._trees, None
        else:
            own, shared = contents.with_shared(
                lambda tree: not among and is_taken(tree, app_state, options)
            )
            own = contents.restored_to(app_state, own)
        lacking: list[str] = []
        if among:
            from ckptstore.distributed.restore import RankView, own_trees

            view = RankView(peers.rank if peers else 0, peers.size if peers else 1, private)
            own, lacking = own_trees(own, view, app_state, self._world, options)
        return RestoreOperation(contents.reader, self.id, own, app_state, options, lacking, shared)

    def _world(self) -> int:
        """How many ranks made this commit."""
        layout = self.layout
        return layout.world if layout else 1

    def _sharing(self, operation: RestoreOperation) -> "Broadcast":
        from ckptstore.distributed.shared_reads import Broadcast

        trees = self._contents.joined_trees.values()
        ids = b"".join(content.ids for tree in trees for content in tree.contents)
        return Broadcast(self._contents.reader, operation.reading, ids)

    def read(
        self,
        path: str,
        region: Region | None = None,
        *,
        dtype: "AskedDtype | None" = None,
        memory_budget_bytes: int | None = None,
        allow_pickle: bool = False,
    ) -> Any:
        """Read one leaf by its path.

        `region` takes part of a tensor; only the chunks it needs are read. With `dtype`, a
        floating tensor is converted chunk by chunk. Raises `NotFound` for an unknown path and
        `InvalidInput` for a region that does not fit.
        """
        tree, i = self._contents.find(path)
        if tree.schema.kinds[i] != "tensor":
            if region is not None:
                raise InvalidInput(
                    f"{path} is a {tree.schema.kinds[i]}, which has no regions; read it whole"
                )
            data = self._contents.leaf_bytes(tree, i, memory_budget_bytes=memory_budget_bytes)
            return inflate_leaf(tree.schema, i, data, allow_pickle=allow_pickle)
        box, shape = box_of(tree, i, region)
        tree.check(i)  # before memory is allocated for a shape that may be damaged
        asked, unchecked = wanted_dtype(dtype)
        converted = converts(tree.schema.dtypes[i], asked)
        out = new_tensor(tree.schema, i, asked if converted else None, shape)
        to = destination(out, tree.schema.dtypes[i], unchecked=unchecked)
        wanted = ReadRequest(tree, i, to, box)
        self._contents.read([wanted], memory_budget_bytes=memory_budget_bytes)
        return out

    def read_into(
        self,
        tensor: "torch.Tensor",
        path: str,
        region: Region | None = None,
        *,
        dtype: "AskedDtype | None" = None,
        memory_budget_bytes: int | None = None,
    ) -> None:
        """As `read`, into an existing tensor on any device, with any strides.

        No two of its elements may share memory.

        Raises `InvalidInput` if shape or dtype differ; with `dtype`, the tensor's own, floats are
        converted. After an error while reading, the tensor may hold new and old bytes.
        """
        if not tensors.is_tensor(tensor):
            raise InvalidInput(
                f"read_into got a {type(tensor).__name__} in the place of the tensor: "
                "read_into(tensor, path)"
            )
        tensors.check_surroundings()
        tree, i = self._contents.find_tensor(path)
        box, shape = box_of(tree, i, region)
        committed = tree.schema.dtypes[i]
        asked, unchecked = wanted_dtype(dtype)
        converted = tensor.dtype == asked and converts(committed, asked)
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
        to = destination(tensor, committed, unchecked=unchecked)
        request = ReadRequest(tree, i, to, box)
        self._contents.read([request], memory_budget_bytes=memory_budget_bytes)

    def open(self, path: str, *, verify: bool = False) -> "torch.Tensor":
        """Map one tensor into memory. Its pages are read from the packs on first access.

        Writes change this process's copy and no file. The tensor outlives the store object and a
        `gc`. Its bytes are not verified unless `verify` reads them all.

        Raises `InvalidInput` for a leaf that cannot be mapped (compressed, in shards that are not
        adjacent, not at page boundaries, or in a remote store): use `read`. Raises `Corrupt` if
        verification fails or a pack is too short, `NotFound` for an unknown path.
        """
        tree, i = self._contents.find_tensor(path)
        if tree.content(i).inline is not None:
            return cast("torch.Tensor", self.read(path))
        try:
            data = self._contents.reader.map(tree, i, self.id, verify=verify)
        except Unmappable as error:
            raise InvalidInput(f"{path} cannot be mapped: {error}; use read") from error
        return tensors.tensor_from(data, tree.schema.dtypes[i], tree.schema.shapes[i])

    def state_dict(
        self,
        key: str | None = None,
        *,
        select: Select | None = None,
        dtype: "AskedDtype | None" = None,
        mmap: bool = False,
        memory_budget_bytes: int | None = None,
        allow_pickle: bool = False,
    ) -> Any:
        """The nested state of one key, or of all keys by name, in new memory.

        Tensors that shared memory when they were committed share it again.

        Args:
            key: A key of the application state; default: all.
            select: Take only leaves that match a glob, or several. Empty containers are left out;
                None replaces an omitted item of a list, a tuple or a dataclass.
            dtype: Convert floating tensors, chunk by chunk.
            mmap: Map tensors as `open` does, unverified, and read those that cannot be mapped.
            memory_budget_bytes: Limit for buffers beside the result.
            allow_pickle: Unpickle values that were pickled; that can run any code.

        Raises:
            NotFound: The commit has no such key, or nothing matches `select`.
            InvalidInput: `mmap` in a store that is no local directory.

        Example:
            >>> model.load_state_dict(snap.state_dict("model", mmap=True), assign=True)
        """
        if mmap and dtype is not None:
            raise InvalidInput(
                "mmap takes tensors as they are stored, dtype converts them; give one or the other"
            )
        wanted_dtype(dtype)
        if select is not None:
            trees = self._trees if key is None else {key: self._contents.tree(key)}
        elif key is None:
            trees = self._contents.joined_trees
        else:
            trees = {key: self._contents.stored_tree(key)}
        views = whole(trees) if select is None else selected(trees, select, self.id)
        states = assemble(
            self._contents.reader,
            self.id,
            views,
            dtype=dtype,
            mmap=mmap,
            allow_pickle=allow_pickle,
            memory_budget_bytes=memory_budget_bytes,
        )
        if key is not None:
            return states[key]
        return states if select is not None else self._contents.apart(states)

    def verify(self) -> None:
        """Read every chunk from the store, past a read cache, and compare it with its id. Raises
        `Corrupt` or `NotFound` for the first that fails."""
        self._contents.reader.verify(self._contents.joined_trees.values(), self.id)

    def materialize(
        self, directory: "str | os.PathLike[str]", *, select: str = "*"
    ) -> Materialized:
        """Write the directory that `Store.adopt` committed: every byte, mode, time and link.

        `directory` is new or empty, and appears when it is complete, or is a hollow one of this
        commit, and gets its files back. `select` is a glob of names of files: `"adapter*"`. Raises
        `Conflict` if `directory` has other content, `InvalidInput` if the commit was not adopted,
        `NotFound` if nothing matches `select`, `Corrupt` if a file is not what it was.
        """
        return materialize(self._contents, self.id, directory, select)

    @property
    def _trees(self) -> dict[str, Tree]:
        return self._contents.trees

    def _narrowed(self, keys: frozenset[str], trees: dict[str, Tree] | None = None) -> "Snapshot":
        contents = self._contents.narrowed(keys, trees)
        return Snapshot(contents, tags=self.tags, stats=self.stats, restored=self._restored)


def contents_of(snapshot: Snapshot) -> CommitContents:
    """The commit contents behind `snapshot`, for other rooms of this package."""
    return snapshot._contents


def begin_restore(
    snapshot: Snapshot, app_state: MutableMapping[str, Any], options: RestoreOptions
) -> RestoreOperation:
    """A restore by this process alone that is planned and checked, and has changed nothing yet."""
    return snapshot._begin_restore(app_state, None, {}, options)
