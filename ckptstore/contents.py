"""The contents of one commit: its document, its schemas, and its leaves by path.

`ckptstore.snapshot.contents_of` returns them to other rooms of this package.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from ckptstore.core.forks import cached_property
from ckptstore.core.geometry import box_of_region
from ckptstore.core.ids import CommitId
from ckptstore.core.model import SHARED, Box, CommitDocument, CommitInfo, Node, Shape
from ckptstore.core.text import near
from ckptstore.errors import InvalidInput, NotFound, Thinned
from ckptstore.log.resolve import Resolved, nearest_first
from ckptstore.objects.documents import Layout
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.restore.reader import Reader, ReadRequest, Tree
from ckptstore.state.leaf_sources import segment

logger = logging.getLogger("ckptstore")

Trees: TypeAlias = dict[str, Tree]
"""Schema and content of each key."""


Nearest: TypeAlias = Callable[[CommitId, str], Resolved | None]
"""Of a commit's run, the commit with the nearest step that has a leaf which it lacks."""

Region = tuple[slice | int, ...] | slice | int
"""Part of a tensor: slices of step 1 and integers, as in an index."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of a commit.

    `kind` is `tensor`, `value` or `bytes`; `plain` for a large list or dict of values that is gone,
    since others are listed value by value. Only tensors have `dtype` and `shape`. `nbytes` counts
    raw bytes, and is 0 for an alias: a leaf that shares the memory of `alias_of`. The content of a
    leaf that is `gone` was thinned away.
    """

    path: str
    kind: str
    dtype: str
    shape: Shape
    nbytes: int
    alias_of: str | None
    gone: bool = False


class CommitContents:
    """Schemas are read when they are first needed. Threads may share it.

    `before_write` is called before bytes are read into memory of the caller.
    """

    def __init__(
        self,
        reader: Reader,
        commit: CommitId,
        document: CommitDocument,
        before_write: Callable[[], None] = lambda: None,
        trees: Trees | None = None,
        nearest: "Nearest | None" = None,
    ) -> None:
        self.reader, self.commit, self.document = reader, commit, document
        self.before_write, self._nearest = before_write, nearest
        self.on_close: Callable[[], None] = lambda: None
        self._trees: Trees = trees or {}
        self._is_part = trees is not None
        self._expanded: Trees = {}
        self._some_plain = any("plain" in tree.schema.kinds for tree in self._trees.values())
        self._told = False

    @property
    def keys(self) -> list[str]:
        return list(self.document.keys)

    @property
    def trees(self) -> Trees:
        """Schema and content of each key, without the bytes of leaves, but with all that is below
        plain ones."""
        stored = self.stored_trees
        return {key: self._below(stored[key]) for key in stored} if self._some_plain else stored

    @property
    def stored_trees(self) -> Trees:
        """As `trees`, as they are stored: plain leaves are one leaf each."""
        if len(self._trees) < len(self.document.keys):
            self._read_trees(self.document.keys)
        return {key: self._trees[key] for key in self.document.keys}

    @property
    def joined_trees(self) -> Trees:
        """As `stored_trees`, but keys that share a tree are in that one, under its name, unless
        some of the keys were taken."""
        joined = self._joined()
        return self.stored_trees if joined is None else joined

    def apart(self, states: dict[str, Any]) -> dict[str, Any]:
        """The state of each key, in order, from those of `joined_trees`."""
        if self._joined() is None:
            return states
        found = {**states, **states.get(SHARED, {})}
        return {key: found[key] for key in self.keys}

    def _joined(self) -> Trees | None:
        """The trees by their names; None if each key has its own. So it has where leaves are tied,
        and in a tree that is not of its keys: whether that is sound is seen key by key."""
        if self._is_part:
            return None
        read = self.reader.trees(self.document.trees)
        if SHARED in read and not _is_shared_by(read[SHARED], self.document.sharing):
            return None
        return {name: self._own(tree) for name, tree in read.items()}

    def tree(self, key: str) -> Tree:
        """Schema and content of one key, as in `trees`. Raises `NotFound`."""
        return self._below(self.stored_tree(key))

    def stored_tree(self, key: str) -> Tree:
        """Schema and content of one key, as in `stored_trees`. Raises `NotFound`."""
        if key not in self._trees:
            if key not in self.document.keys:
                raise NotFound(
                    f"commit {self.commit[:12]} has no key {key!r}; it has {', '.join(self.keys)}"
                )
            sharing = self.document.sharing
            self._read_trees(sharing if key in sharing else (key,))
        return self._trees[key]

    def _below(self, tree: Tree) -> Tree:
        """`tree` with what is below its plain leaves."""
        if tree.plain and tree.key not in self._expanded:
            self._expanded[tree.key] = self._with_values(tree, tree.plain)
        return self._expanded[tree.key] if tree.plain else tree

    def below_all_but(self, whole: Collection[str], trees: Trees) -> Trees:
        """`trees` of this commit with what is below plain leaves, but for those of these paths."""
        return {
            key: self._with_values(
                tree, [i for i in tree.plain if tree.schema.paths[i] not in whole]
            )
            for key, tree in trees.items()
        }

    def restored_to(self, app_state: Mapping[str, Any], trees: Trees) -> Trees:
        """`trees` with what is below plain leaves, but those that `app_state` takes in one pass
        stay one leaf each."""
        if not any("plain" in tree.schema.kinds for tree in trees.values()):
            return trees
        from ckptstore.restore.plain import whole_in

        return self.below_all_but(whole_in(trees, app_state), trees)

    def with_shared(self, is_taken: Callable[[Tree], bool]) -> tuple[Trees, Tree | None]:
        """As `stored_trees`, but without the keys that share a tree, and that one, if it `is_taken`
        as it is."""
        joined = self._joined() or {}
        if SHARED not in joined or not is_taken(joined[SHARED]):
            return self.stored_trees, None
        return {name: tree for name, tree in joined.items() if name != SHARED}, joined[SHARED]

    def _with_values(self, tree: Tree, leaves: Sequence[int]) -> Tree:
        if not leaves:
            return tree
        from ckptstore.restore.plain import expanded

        return expanded(tree, leaves, self.leaf_bytes)

    def _read_trees(self, keys: Sequence[str]) -> None:
        read = self.reader.by_key(self.document, keys)
        self._trees.update({key: self._own(tree) for key, tree in read.items()})
        self._some_plain = any("plain" in tree.schema.kinds for tree in self._trees.values())

    @cached_property
    def _by_segment(self) -> dict[str, str]:
        """Each key by the first segment of its paths."""
        return {segment(key): key for key in self.keys}

    @property
    def layout(self) -> Layout | None:
        return self.reader.layout(self.document)

    def narrowed(self, keys: frozenset[str], trees: Trees | None = None) -> "CommitContents":
        """These contents restricted to `keys`; `trees`, if given, replace their trees."""
        kept = tuple(key for key in self.keys if key in keys)
        known = self._trees if trees is None else trees
        return CommitContents(
            self.reader,
            self.commit,
            replace(self.document, keys=kept),
            self.before_write,
            {key: tree for key, tree in known.items() if key in keys},
            self._nearest,
        )

    def _own(self, tree: Tree) -> Tree:
        """`tree`, with errors that name this commit if some of its leaves were thinned or cast."""
        if not (self.document.thinned or self.document.cast):
            return tree
        return replace(tree, lacks=self._lacks, uncast=self._uncast)

    @cached_property
    def _uncast(self) -> dict[str, str]:
        """By path, the dtypes of leaves that were cast."""
        errors = self.document.cast.errors if self.document.cast else ()
        return {error.path: error.dtype for error in errors}

    def _lacks(self, path: str) -> Thinned:
        """The error for a leaf that is gone."""
        there = "another commit of its run may have it"
        if self._nearest:
            there = "no other commit of its run has it"
            if found := self._nearest(self.commit, path):
                where = _named(found.id, found.step)
                there = f"the nearest commit of its run that has it is {where}"
        globs = ", ".join(self.document.thinned.globs) if self.document.thinned else ""
        key = json.dumps(path.partition("/")[0])
        return Thinned(
            f"commit {_named(self.commit, self.document.step)} no longer has {path}: it was "
            f"thinned by {globs}; {there}; restore(…, without=[{key}]) "
            "takes the other keys, and so does --select of a command"
        )

    def say_lossy(self) -> None:
        """Warn, once, that what was restored had lost precision when it was committed."""
        cast = self.document.cast
        if cast and not self._told:
            self._told = True
            worst = max((error.relative for error in cast.errors), default=0.0)
            logger.warning(
                "commit %s is lossy: %s; the largest relative error is %.2g, `ckptstore show %s` "
                "has all",
                _named(self.commit, self.document.step),
                ", ".join(f"{glob} as {dtype}" for glob, dtype in cast.globs),
                worst,
                self.commit[:12],
            )

    def find(self, path: str) -> tuple[Tree, int]:
        """The tree of a leaf and its number there. Reads no other tree. Raises `NotFound`."""
        if not isinstance(path, str):
            raise InvalidInput(
                f"{type(path).__name__} {path!r:.80} is no path of a leaf; wanted a string such as "
                f"{self._example()!r}"
            )
        key = self._by_segment.get(path.partition("/")[0])
        tree = None if key is None else self.stored_tree(key)
        if tree is not None and tree.numbers.get(path) in (None, *tree.plain):
            tree = self._below(tree)
        if tree is not None and path in tree.numbers:
            return tree, tree.numbers[path]
        if tree is not None and (gone := tree.gone_above(path)):
            raise tree.lacks(gone)
        paths = [p for tree in self.trees.values() for p in tree.schema.paths]
        raise NotFound(
            f"commit {self.commit[:12]} has no leaf {path!r}{near(path, paths)}; `ckptstore ls "
            f"{self.commit[:12]}` lists them"
        )

    def find_tensor(self, path: str) -> tuple[Tree, int]:
        """As `find`. Raises `InvalidInput` unless the leaf is a tensor."""
        tree, i = self.find(path)
        if tree.schema.kinds[i] != "tensor":
            raise InvalidInput(f"{path} is a {tree.schema.kinds[i]}, no tensor; use read")
        return tree, i

    def read(
        self, requests: Sequence[ReadRequest], *, memory_budget_bytes: int | None = None
    ) -> None:
        """Read and verify leaves, or boxes of them, into their destinations, in any order."""
        self.before_write()
        self.reader.read(requests, self.commit, memory_budget_bytes=memory_budget_bytes)

    def leaf_bytes(
        self, tree: Tree, number: int, *, memory_budget_bytes: int | None = None
    ) -> bytes:
        """All verified bytes of a leaf that is no tensor."""
        return self.reader.leaf_bytes(
            tree, number, self.commit, memory_budget_bytes=memory_budget_bytes
        )

    def _example(self) -> str:
        return next(
            (path for tree in self.trees.values() for path in tree.schema.paths), "model/weight"
        )


def _is_shared_by(shared: Tree, keys: Sequence[str]) -> bool:
    """Whether a tree is a dict of `keys`, and ties no leaves."""
    node = shared.schema.skeleton
    if (
        not isinstance(node, Node)
        or node.type != "dict"
        or max(shared.schema.aliases, default=-1) >= 0
    ):
        return False
    return {*keys} == {*(node.keys or ())}


def contents_at(
    handle: StoreHandle, reader: Reader, found: Resolved | CommitInfo
) -> CommitContents:
    """The contents of a commit of `handle`, for commands that have no open `Store`."""
    document = reader.document(found.session, found.id)
    near = partial(nearest_with, handle, reader)
    return CommitContents(reader, found.id, document, nearest=near)


def nearest_with(
    handle: StoreHandle, reader: Reader, commit: CommitId, path: str
) -> Resolved | None:
    """Of the commits in the run of `commit` that have the leaf `path`, the one with the nearest
    step."""
    for other in nearest_first(handle.log.replay(), commit, path):
        document = reader.document(other.session, other.id)
        for tree in reader.trees(document.trees).values():
            if (i := tree.numbers.get(path)) is not None and not tree.is_gone(i):
                return other
    return None


def _named(commit: CommitId, step: int | None) -> str:
    return commit[:12] if step is None else f"{commit[:12]} (step {step})"


def box_of(tree: Tree, i: int, region: Region | None) -> tuple[Box | None, Shape]:
    """The box of `region`, None for the whole leaf, and the shape of the result."""
    shape, path = tree.schema.shapes[i], tree.schema.paths[i]
    if region is None:
        return None, shape
    try:
        return box_of_region(shape, region if isinstance(region, tuple) else (region,))
    except (ValueError, IndexError, TypeError) as error:
        raise InvalidInput(
            f"region of {path}: {error}; the leaf's shape is {tuple(shape)}"
        ) from error


def leaf_of(tree: Tree, i: int) -> Leaf:
    """The public description of a leaf."""
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
        tree.is_gone(i),
    )
