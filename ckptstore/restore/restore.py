"""How is a state restored, into existing objects or as a new nested state?

Views narrow or rename a commit's trees first, without reading tensors.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptstore.core.forks import cached_property
from ckptstore.core.identity import IdentityDict
from ckptstore.core.ids import CommitId
from ckptstore.core.model import SHARED, Node, Schema, Shape, leaves_of, nodes_of
from ckptstore.core.process import uncollected
from ckptstore.core.text import near, selector
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.objects.schema import join_schemas
from ckptstore.restore.mmap import Unmappable
from ckptstore.restore.reader import (
    ChunkRead,
    Nowhere,
    Reader,
    Reading,
    ReadRequest,
    Tree,
    counted,
    refuse_losses,
)
from ckptstore.state import tensors
from ckptstore.state.flatten import check_app_state
from ckptstore.state.inflate import convertible, inflate
from ckptstore.state.leaf_sources import segment
from ckptstore.state.match_target import Matching
from ckptstore.state.optimizer_fit import Renames
from ckptstore.state.optimizer_forms import ShapesByName, new_names, own_new_names
from ckptstore.state.optimizers import ParameterNames
from ckptstore.state.renaming import Renamer, narrow, rename_tree
from ckptstore.state.restore import bind
from ckptstore.state.shared_memory import LeafTarget, overlapping, overwritten
from ckptstore.state.stateful import is_plain
from ckptstore.state.suggested_names import renaming_hint
from ckptstore.state.tensors import destination, wanted_dtype

if TYPE_CHECKING:
    import torch

    from ckptstore.state.match_target import Mismatch
    from ckptstore.state.renaming import Rename
    from ckptstore.state.restore import Binding
    from ckptstore.state.tensors import AskedDtype

logger = logging.getLogger("ckptstore")

SHOWN = 8

Select = str | Sequence[str] | Callable[[str], bool]
"""A glob for paths, in full or below their key, or several, or a function that says of a path
whether it is wanted (`core.text.selector`)."""


@dataclass(frozen=True, slots=True)
class View:
    """A tree and a narrowed or renamed schema, whose leaves keep the tree's numbers."""

    tree: Tree
    schema: Schema

    @property
    def is_in_place(self) -> bool:
        """Whether no leaf was renamed."""
        return self.schema.paths == self.tree.schema.paths


def whole(trees: Mapping[str, Tree]) -> dict[str, View]:
    return {key: View(tree, tree.schema) for key, tree in trees.items()}


def selected(
    trees: Mapping[str, Tree], select: Select, commit: CommitId, *, keeps_names: bool = False
) -> dict[str, View]:
    """The trees narrowed to selected leaves. Raises `NotFound` if nothing is selected."""
    is_selected = selector(select)
    narrowed = (
        (key, tree, narrow(key, tree.schema, is_selected, keeps_names=keeps_names))
        for key, tree in trees.items()
    )
    found = {key: View(tree, schema) for key, tree, schema in narrowed if schema is not None}
    if found:
        return found
    if callable(select):
        raise NotFound(f"select wants no leaf of commit {commit[:12]}")
    paths = [path for tree in trees.values() for path in tree.schema.paths]
    globs = [select] if isinstance(select, str) else list(select)
    hint = near(globs[0], [*paths, *(path.partition("/")[2] for path in paths)])
    raise NotFound(
        f"no leaf of commit {commit[:12]} matches {' or '.join(map(repr, globs))}{hint}; "
        f"`ckptstore ls {commit[:12]}` lists them"
    )


def renamed(views: Mapping[str, View], rename: "Rename") -> dict[str, View]:
    """The trees with leaves and keys renamed by `rename`.

    Raises `InvalidInput` where two leaves or two keys would get one name, and for a prefix that no
    path has.
    """
    renamer = Renamer(rename)
    found: dict[str, View] = {}
    for key, view in views.items():
        new_key, schema = rename_tree(key, view.schema, renamer)
        if new_key in found:
            raise InvalidInput(
                f"rename brings two keys of the commit to {new_key}, {key} among them; leave one "
                "out with select"
            )
        found[new_key] = View(view.tree, schema)
    renamer.check_used()
    return found


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """Paths that a restore skipped: those that the commit lacks, those that the target lacks, and
    those `mismatched` that have another shape, dtype or kind there, which stay as they were.

    `replaced` are paths at which a new object stands, since the target's could not be filled: an
    array of another shape, a deque of another length, an object without a state to set. Other
    references to the target's object still see its old content. `needed_bytes` are those of the
    tensors that this process restored, `read_bytes` the raw bytes of the chunks that it read for
    them: chunks are read whole. `received_bytes` are those of chunks that another rank read and
    sent.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    needed_bytes: int = 0
    read_bytes: int = 0
    received_bytes: int = 0
    mismatched: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()


class Brought(NamedTuple):
    """The result of a shared read by ranks: the pieces left for this rank, and the raw bytes of
    chunks it read and received."""

    left: Sequence[ChunkRead]
    read_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """The options of a restore; `Snapshot.restore` documents them."""

    strict: bool = True
    allow_pickle: bool = False
    select: Select | None = None
    rename: "Rename | None" = None
    dtype: "AskedDtype | None" = None
    memory_budget_bytes: int | None = None
    without: frozenset[str] = frozenset()
    atomic: bool = False
    mismatched: str = "refuse"
    rehearse: bool = True
    """Otherwise the caller finds out what conversions lose, before it writes."""


def keys_of(without: str | Iterable[str]) -> frozenset[str]:
    """One key or several. Raises `InvalidInput` for anything else."""
    keys = [without] if isinstance(without, str) else without
    if isinstance(keys, Iterable):
        keys = list(keys)
        if all(isinstance(key, str) for key in keys):
            return frozenset(keys)
    raise InvalidInput(
        f"without is {without!r:.80}; wanted keys of the state, such as without=['optimizer']"
    )


def check_keys(
    app_state: Mapping[str, Any], committed: Iterable[str], options: RestoreOptions
) -> None:
    """Raise `InvalidInput` for a state without keys, and for a key in `without` that nobody has."""
    if not app_state:
        raise InvalidInput(
            f"the state to restore is empty; the commit has {', '.join(committed)}: give a dict of "
            'what to restore, such as {"model": model}, or read it anew with state_dict()'
        )
    known = {*app_state, *committed}
    for key in options.without - known:
        raise InvalidInput(
            f"without names {key!r}, a key of neither the state nor the commit{near(key, known)}"
        )


def targets(app_state: Mapping[str, Any], options: RestoreOptions) -> Callable[[str], str | None]:
    """A function from a path of a commit to the path in `app_state` that it is restored to; None
    for paths that are not restored."""
    is_selected = selector("*" if options.select is None else options.select)
    rename = (lambda path: path) if options.rename is None else Renamer(options.rename)
    keys = {segment(key) for key in app_state.keys() - options.without}

    def target(path: str) -> str | None:
        new = rename(path) if is_selected(path) else ""
        return new if new.partition("/")[0] in keys else None

    return target


def check_whole(
    commit: CommitId, keys: Sequence[str], app_state: Mapping[str, Any], without: frozenset[str]
) -> None:
    """Raise `InvalidInput` if `app_state` lacks a key of the commit, unless `without` names it."""
    check_app_state(app_state)
    forgotten = [key for key in keys if key not in app_state and key not in without]
    if forgotten and app_state:
        raise InvalidInput(
            f"commit {commit[:12]} has {', '.join(forgotten)}, and the state to resume does not; "
            f"nothing was changed: without={json.dumps(forgotten)} resumes without, and "
            f"checkout({commit[:12]!r}).restore({{{json.dumps(next(iter(app_state)))}: …}}) takes "
            "just the keys that it is given"
        )


@dataclass(frozen=True, slots=True)
class Bound:
    """The target of one binding: the object of one key, or all `plain` values of the target, one
    leaf each, by key. A binding for each plain value would cost as much as one for a module."""

    keys: tuple[str, ...]
    view: View
    binding: "Binding"
    plain: bool = False

    def restored(self) -> Mapping[str, Any]:
        """The objects by their keys, filled or new."""
        made = self.binding.finish()
        return made if self.plain else {self.keys[0]: made}


def is_taken(shared: Tree, app_state: Mapping[str, Any], options: RestoreOptions) -> bool:
    """Whether each key that shares a tree is one leaf, and goes to a plain value of the target. The
    tree is then bound as it is, and need not be taken apart."""
    node = shared.schema.skeleton
    if isinstance(node, int) or set(map(type, node.children)) != {int}:
        return False
    keys = {*(node.keys or ())}
    return (
        keys <= app_state.keys()
        and keys.isdisjoint(options.without)
        and all(is_plain(app_state[key]) for key in keys)
    )


class RestoreOperation:
    """A restore: bind targets, then `read`, then `finish`. `lacking` are paths for which the commit
    has nothing on this rank. A `shared` tree, which `is_taken`, has the keys that `trees` lack.

    The constructor changes no target. It checks that all objects accept their states, as far as
    that can be checked without loading them. It reads and decodes values, and rehearses conversions
    that may lose some; with `atomic`, it also reads and verifies every chunk. Raises `InvalidInput`
    and `Corrupt`.
    """

    def __init__(
        self,
        reader: Reader,
        commit: CommitId,
        trees: Mapping[str, Tree],
        app_state: MutableMapping[str, Any],
        options: RestoreOptions,
        lacking: Sequence[str] = (),
        shared: Tree | None = None,
    ) -> None:
        self._reader, self._commit, self._app_state = reader, commit, app_state
        self._budget_bytes = options.memory_budget_bytes
        self._views = views = _views(commit, trees, app_state, options)
        sharing = () if shared is None else (shared,)
        dtype, unchecked = wanted_dtype(options.dtype)
        matching = Matching(
            ParameterNames(app_state),
            strict=options.strict,
            allow_pickle=options.allow_pickle,
            partial=options.select is not None,
            dtype=dtype,
            unchecked=unchecked,
            skips=options.mismatched == "skip",
            shape_of=ShapesByName(tree.schema for tree in (*trees.values(), *sharing)),
        )
        names: Mapping[str, str] | None = None
        if options.rename is not None:
            names = new_names(chain.from_iterable(map(_moved, views.values())))
        present = [key for key in views if key in app_state]
        self._bound = bound = [self._bind_shared(tree, matching) for tree in sharing]
        for plain, keys in groupby(present, self._is_plain):
            if plain and names is None:
                with uncollected():
                    bound.append(self._bind_plain(list(keys), matching))
            else:
                bound += [self._bind(key, matching, names) for key in keys]
        bindings = [each.binding for each in bound]
        here = [key for key in app_state if key not in options.without and options.select is None]
        committed = views.keys() | {key for each in bound if each.plain for key in each.keys}
        missing = {**dict.fromkeys(lacking), **{key: None for key in here if key not in committed}}
        spare = [key for key in views if key not in app_state]
        unexpected: list[str] = []
        for binding in bindings:
            missing.update(dict.fromkeys(binding.missing))
            unexpected += binding.unexpected
        self._skipped = [each for binding in bindings for each in binding.skipped]
        paths = tuple(each.path for each in self._skipped)
        self.report = RestoreReport(tuple(missing), (*spare, *unexpected), mismatched=paths)
        problems, hint = [], ""
        if options.strict:
            problems = [_lacked(path, committed | trees.keys()) for path in missing]
            problems += [f"{path}: in the commit, not wanted by the target" for path in unexpected]
            hint = renaming_hint(
                [path for path in missing if "/" in path],
                [path for each in bound for path in each.view.schema.paths],
            )
        # First: that an optimizer's moments do not fit follows from the weights that were skipped.
        _refuse(commit, (), matching.stepped_without_weights(app_state, present))
        _refuse(commit, bindings, problems, hint)
        _refuse(commit, (), self._overwritten(matching.places))
        for each in bound:
            each.binding.receive(self._values_of(each))
        if options.rehearse:
            self._rehearse(atomic=options.atomic)

    def _is_plain(self, key: str) -> bool:
        """Whether a leaf of the commit goes to a plain value of the target."""
        is_leaf = isinstance(self._views[key].schema.skeleton, int)
        return is_leaf and is_plain(self._app_state[key])

    def _bind(self, key: str, matching: Matching, names: Mapping[str, str] | None) -> "Bound":
        view = self._views[key]
        if names is not None:
            matching = replace(matching, renames=_renames(names, view))
        return Bound((key,), view, self._binding(self._app_state[key], key, view, matching))

    def _bind_plain(self, keys: Sequence[str], matching: Matching) -> "Bound":
        """One binding for keys of one leaf each."""
        views = [self._views[key] for key in keys]
        schema = join_schemas([(key, self._views[key].schema) for key in keys])
        contents = [content for view in views for content in view.tree.contents]
        return self._bind_shared(replace(views[0].tree, schema=schema, contents=contents), matching)

    def _bind_shared(self, tree: Tree, matching: Matching) -> "Bound":
        """One binding for the keys of one leaf each that share a tree."""
        view, keys = View(tree, tree.schema), tuple(nodes_of(tree.schema.skeleton)[0].keys or ())
        target = {key: self._app_state[key] for key in keys}
        return Bound(keys, view, self._binding(target, SHARED, view, matching), plain=True)

    def _binding(self, target: Any, key: str, view: View, matching: Matching) -> "Binding":
        return bind(
            target,
            key,
            view.schema,
            matching,
            content_of=view.tree.content_key,
            value_of=partial(self._value_of, view.tree),
            check=view.tree.check,
            streams=view.tree.streams,
            uncast=view.tree.uncast_leaves,
        )

    def _value_of(self, tree: Tree, leaf: int) -> bytes | None:
        """A small value that the matching depends on; None if it was thinned away."""
        if tree.is_gone(leaf):
            return None
        return self._reader.leaf_bytes(
            tree, leaf, self._commit, memory_budget_bytes=self._budget_bytes
        )

    def _overwritten(self, places: Sequence[LeafTarget]) -> list[str]:
        """The leaves that do not fit because different contents would go to the same memory of the
        target. To compare them, reads leaves with possibly shared memory into separate memory."""
        trees = IdentityDict[Schema, Tree]()
        for each in self._bound:
            trees[each.view.schema] = each.view.tree
        found = []
        for group in overlapping(places):
            made = [
                (place, new_tensor(schema, leaf, tensor.dtype, tuple(tensor.shape)))
                for place in group
                for schema, leaf, tensor in [place]
            ]
            wanted = [
                ReadRequest(trees[schema], leaf, destination(content, schema.dtypes[leaf]))
                for (schema, leaf, _), content in made
            ]
            self._reader.read(wanted, self._commit, memory_budget_bytes=self._budget_bytes)
            found += [
                f"{schema.paths[leaf]}: the commit has values of its own, the target has memory "
                "for it in which others would land: give it a clone()"
                for schema, leaf, _ in overwritten(made)
            ]
        return found

    def _values_of(self, bound: "Bound") -> dict[int, bytes]:
        """The bytes of the leaves that are no tensors."""
        tree, budget_bytes = bound.view.tree, self._budget_bytes
        return {
            i: self._reader.leaf_bytes(tree, i, self._commit, memory_budget_bytes=budget_bytes)
            for i in bound.binding.wanted_bytes
        }

    def _rehearse(self, *, atomic: bool) -> None:
        """Read and discard the leaves that are converted to a dtype of smaller range; with
        `atomic`, all leaves. Raises `InvalidInput` and `Corrupt`."""
        nowhere = Nowhere()
        wanted = []
        for want in self.wanted if atomic else self._counted:
            losses = getattr(want.destination, "losses", None)
            if atomic or (losses and losses.is_likely):
                wanted.append(want._replace(destination=losses.again() if losses else nowhere))
        if wanted:
            self._reader.read(wanted, self._commit, memory_budget_bytes=self._budget_bytes)

    @cached_property
    def wanted(self) -> list[ReadRequest]:
        """The tensors of the commit, each with its destination."""
        with uncollected():
            return [
                ReadRequest(each.view.tree, i, part, box)
                for each in self._bound
                for i, parts in enumerate(each.binding.destinations)
                for box, part in parts
            ]

    @cached_property
    def _counted(self) -> list[ReadRequest]:
        return counted(self.wanted)

    @cached_property
    def reading(self) -> Reading:
        """The plan of `read`. Raises `Corrupt` for pages that contradict the shapes,
        `InvalidInput` for too small a budget."""
        return self._reader.reading(
            self.wanted, self._commit, memory_budget_bytes=self._budget_bytes
        )

    def read(self, brought: Brought | None = None) -> None:
        """Read all tensors into place, except those `brought` already. After an error, each tensor
        has its old bytes, those of the commit, or some of both, and a damaged chunk may have left
        its bytes."""
        left, read_bytes, received_bytes = brought or Brought(self.reading.jobs, 0, 0)
        read_bytes += self._reader.carry_out(self.reading, left)
        refuse_losses(self._counted, self._commit)
        self.report = replace(
            self.report,
            needed_bytes=self.reading.needed_bytes,
            read_bytes=read_bytes,
            received_bytes=received_bytes,
        )

    def finish(self) -> None:
        """Set values that are not tensors, and load states into stateful objects.

        Raises `InvalidInput` if an object refuses its state. By then all tensors, and perhaps the
        objects of other keys, have theirs.
        """
        replaced: list[str] = []
        todo = sorted(self._bound, key=lambda each: each.binding.late)
        for n, each in enumerate(todo):
            try:
                restored = each.restored()
            except InvalidInput as error:
                raise InvalidInput(f"{error}; {_left_by(todo[:n], todo[n:])}") from error
            replaced += each.binding.replaced_paths(each.keys[0])
            for key, made in restored.items():
                if made is not self._app_state[key]:
                    self._app_state[key] = made
        self.report = replace(self.report, replaced=tuple(replaced))
        if replaced:
            more = f" and {len(replaced) - SHOWN} more" if len(replaced) > SHOWN else ""
            logger.warning(
                "restored commit %s with new objects for %s%s: the target's could not be filled; "
                "what else holds one of them still has its old content",
                self._commit[:12],
                ", ".join(replaced[:SHOWN]),
                more,
            )
        if self._skipped:
            logger.warning(
                "mismatched='skip': these stay as they were: %s",
                "; ".join(f"{m.path} ({_described(m)})" for m in self._skipped),
            )


def _moved(view: View) -> Iterable[tuple[str, str]]:
    """The old and new paths of leaves."""
    return zip(view.tree.schema.paths, view.schema.paths, strict=True)


def _renames(names: Mapping[str, str], view: View) -> Renames:
    """The new names of parameters; the caller may rename an optimizer's own leaves."""
    if view.is_in_place:
        return Renames(names)
    return Renames({**names, **own_new_names(_moved(view))}, are_in_state=True)


def _views(
    commit: CommitId,
    trees: Mapping[str, Tree],
    app_state: Mapping[str, Any],
    options: RestoreOptions,
) -> dict[str, View]:
    """A view of each tree to restore, by key of the target state."""
    views = whole(trees)
    if options.select is not None:
        views = selected(trees, options.select, commit, keeps_names=True)
    if options.rename is not None:
        views = renamed(views, options.rename)
    views = {key: view for key, view in views.items() if key not in options.without}
    if options.select is None:
        return views
    if not views.keys() & app_state.keys():
        raise InvalidInput(
            f"what was selected belongs to {', '.join(views)}; the state that is to be restored "
            f"has {', '.join(app_state)}"
        )
    return {key: view for key, view in views.items() if key in app_state}


def _left_by(finished: Sequence[Bound], unfinished: Sequence[Bound]) -> str:
    """Text for the error: the content of the target after an object refused its state."""
    done, open_ = ([key for each in some for key in each.keys] for some in (finished, unfinished))
    given = f"{', '.join(done)} and " if done else ""
    return (
        f"the target mixes two states now: {given}all tensors are as committed, what else "
        f"{', '.join(open_)} hold{'s' * (len(open_) == 1)} is as it was, or half loaded; restore "
        "what fits it, or begin anew"
    )


def _described(mismatch: "Mismatch") -> str:
    return f"the commit has {mismatch.committed}, the target has {mismatch.target}"


def _lacked(path: str, keys: Iterable[str]) -> str:
    hint = "" if "/" in path else near(path, keys)
    return f"{path}: wanted by the target, not in the commit{hint}"


def _refuse(
    commit: CommitId,
    bindings: Iterable["Binding"],
    problems: Sequence[str],
    hint: str = "",
) -> None:
    problems = [f"{m.path}: {_described(m)}" for b in bindings for m in b.mismatched] + [*problems]
    if problems:
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise InvalidInput(
            f"commit {commit[:12]} does not fit the state that it was to be restored into; nothing "
            "was changed:\n  "
            + "\n  ".join(problems[:SHOWN])
            + more
            + hint
            + "\npass without=[…] to leave keys as they are, strict=False to leave out what only "
            "one side has, select= to restore some leaves, rename= where names differ, dtype= to "
            'convert floats, mismatched="skip" to leave tensors of another shape as they are; what '
            "is tied must be one content"
        )


def assemble(
    reader: Reader,
    commit: CommitId,
    views: Mapping[str, View],
    *,
    dtype: "AskedDtype | None" = None,
    mmap: bool = False,
    allow_pickle: bool = False,
    memory_budget_bytes: int | None = None,
) -> dict[str, Any]:
    """Build the states of `views` in new memory, of all of them with one read. Tensors that shared
    memory when committed share it again.

    With `mmap`, tensors are mapped without verification where possible, and read otherwise.
    """
    wanted: list[ReadRequest] = []
    found: dict[str, list[Any]] = {}
    asked, unchecked = wanted_dtype(dtype)
    for key, view in views.items():
        schema, tree = view.schema, view.tree
        values = found[key] = [None] * len(schema)
        for i in leaves_of(schema.skeleton):
            if schema.kinds[i] != "tensor":
                values[i] = reader.leaf_bytes(
                    tree, i, commit, memory_budget_bytes=memory_budget_bytes
                )
            elif mmap and schema.aliases[i] < 0:
                values[i] = _mapped(reader, commit, view, i)
        wanted += _in_new_memory(view, values, asked, unchecked=unchecked)
    reader.read(wanted, commit, memory_budget_bytes=memory_budget_bytes)
    return {
        key: _inflated(views[key].schema, values, allow_pickle) for key, values in found.items()
    }


@uncollected()
def _in_new_memory(
    view: View, values: list[Any], asked: "torch.dtype | None", *, unchecked: bool
) -> list[ReadRequest]:
    """Give each leaf that has no tensor yet a new one in `values`; returns what fills them."""
    schema, tree = view.schema, view.tree
    converted = frozenset() if asked is None else convertible(schema, asked)
    wanted = []
    for i in leaves_of(schema.skeleton):
        if schema.kinds[i] == "tensor" and schema.aliases[i] < 0 and values[i] is None:
            tree.check(i)
            values[i] = new_tensor(schema, i, asked if i in converted else None)
            to = destination(values[i], schema.dtypes[i], unchecked=unchecked)
            wanted.append(ReadRequest(tree, i, to))
    return wanted


def _inflated(schema: Schema, values: list[Any], allow_pickle: bool) -> Any:
    """The state whose leaves have `values`; aliases get those of their owners."""
    for i in leaves_of(schema.skeleton):
        if schema.aliases[i] >= 0:
            values[i] = values[schema.aliases[i]]
    return inflate(schema, values, allow_pickle=allow_pickle)


def assemble_nodes(
    reader: Reader,
    commit: CommitId,
    tree: Tree,
    nodes: Sequence[Node | int],
    *,
    allow_pickle: bool = False,
    memory_budget_bytes: int | None = None,
) -> list[Any]:
    """Build the objects at `nodes` of a tree's skeleton. Their tensors are read together."""
    aliases = tree.schema.aliases
    leaves = {leaf for node in nodes for leaf in leaves_of(node)}
    owners = {aliases[leaf] for leaf in leaves if aliases[leaf] >= 0} - leaves
    skeleton = Node("list", (*nodes, *sorted(owners)))
    made = assemble(
        reader,
        commit,
        {tree.key: View(tree, replace(tree.schema, skeleton=skeleton))},
        allow_pickle=allow_pickle,
        memory_budget_bytes=memory_budget_bytes,
    )
    return list(made[tree.key][: len(nodes)])


def new_tensor(
    schema: Schema, leaf: int, dtype: "torch.dtype | None", shape: Shape | None = None
) -> "torch.Tensor":
    """An uninitialized tensor for a leaf, or for `shape` of it, in `dtype` if given."""
    name = schema.dtypes[leaf] if dtype is None else tensors.DTYPE_NAMES[dtype]
    return tensors.empty(name, schema.shapes[leaf] if shape is None else shape)


def _mapped(reader: Reader, commit: CommitId, view: View, leaf: int) -> "torch.Tensor | None":
    """A leaf's tensor over mapped memory, or None if the leaf must be read."""
    try:
        data = reader.map(view.tree, leaf, commit)
    except Unmappable:
        return None
    return tensors.tensor_from(data, view.schema.dtypes[leaf], view.schema.shapes[leaf])
