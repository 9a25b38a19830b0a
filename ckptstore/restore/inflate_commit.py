"""How is a commit, or a part of it, rebuilt as a new nested state: read, converted or mapped?

Views narrow or rename a commit's trees first, without reading tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptstore.core.ids import CommitId
from ckptstore.core.model import Schema, leaves_of
from ckptstore.core.text import near, selector
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.restore.mmap import Unmappable
from ckptstore.restore.reader import Reader, ReadRequest, Tree
from ckptstore.state import tensors
from ckptstore.state.inflate import inflate
from ckptstore.state.leaves import convertible, destination
from ckptstore.state.renaming import Renamer, narrow, rename_tree

if TYPE_CHECKING:
    import torch

    from ckptstore.state.renaming import Rename


Select = str | Sequence[str]
"""A glob for paths, in full or below their key, or several (`core.text`)."""


@dataclass(frozen=True, slots=True)
class View:
    """A tree and a narrowed or renamed schema, whose leaves keep the tree's numbers."""

    tree: Tree
    schema: Schema


def whole(trees: Mapping[str, Tree]) -> dict[str, View]:
    return {key: View(tree, tree.schema) for key, tree in trees.items()}


def selected(trees: Mapping[str, Tree], select: Select, commit: CommitId) -> dict[str, View]:
    """The trees narrowed to selected leaves. Raises `NotFound` if nothing is selected."""
    is_selected = selector(select)
    narrowed = ((key, tree, narrow(key, tree.schema, is_selected)) for key, tree in trees.items())
    found = {key: View(tree, schema) for key, tree, schema in narrowed if schema is not None}
    if found:
        return found
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


def assemble(
    reader: Reader,
    commit: CommitId,
    view: View,
    *,
    dtype: "torch.dtype | None" = None,
    mmap: bool = False,
    allow_pickle: bool = False,
    memory_budget_bytes: int | None = None,
) -> Any:
    """Build the state of `view`. Tensors that shared memory when committed share it again.

    With `mmap`, tensors are mapped without verification where possible, and read otherwise.
    """
    schema = view.schema
    values: list[Any] = [None] * len(schema)
    leaves = list(leaves_of(schema.skeleton))
    owners = [i for i in leaves if schema.kinds[i] == "tensor" and schema.aliases[i] < 0]
    converted = frozenset() if dtype is None else convertible(schema, dtype)
    wanted = []
    for i in owners:
        values[i] = mapped(reader, commit, view, i) if mmap else None
        if values[i] is None:
            view.tree.check(i)
            name = (
                tensors.DTYPE_NAMES[dtype]
                if dtype is not None and i in converted
                else schema.dtypes[i]
            )
            values[i] = tensors.empty(name, schema.shapes[i])
            wanted.append(ReadRequest(view.tree, i, destination(values[i], schema.dtypes[i])))
    reader.read(wanted, commit, memory_budget_bytes=memory_budget_bytes)
    for i in leaves:
        if schema.kinds[i] != "tensor":
            values[i] = reader.leaf_bytes(
                view.tree, i, commit, memory_budget_bytes=memory_budget_bytes
            )
        elif schema.aliases[i] >= 0:
            values[i] = values[schema.aliases[i]]
    return inflate(schema, values, allow_pickle=allow_pickle)


def mapped(reader: Reader, commit: CommitId, view: View, leaf: int) -> "torch.Tensor | None":
    """A leaf's tensor over mapped memory, or None if the leaf must be read."""
    try:
        return tensors.tensor_from(
            reader.map(view.tree, leaf, commit), view.schema.dtypes[leaf], view.schema.shapes[leaf]
        )
    except Unmappable:
        return None
