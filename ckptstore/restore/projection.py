"""A commit's trees as a caller wants them: some leaves only, or under other names, without a byte
being read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptstore.core.globs import selector
from ckptstore.core.ids import CommitId
from ckptstore.core.model import Schema
from ckptstore.core.suggestions import near
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.restore.reader import Tree
from ckptstore.state.renaming import Renamer, rename_tree
from ckptstore.state.subtree import narrow

if TYPE_CHECKING:
    from ckptstore.state.renaming import Rename

Select = str | Sequence[str]
"""A glob for paths, in full or below their key, or several (`core.globs`)."""


@dataclass(frozen=True, slots=True)
class View:
    """A tree and the schema that is wanted of it, whose leaves have the tree's numbers."""

    tree: Tree
    schema: Schema


def whole(trees: Mapping[str, Tree]) -> dict[str, View]:
    return {key: View(tree, tree.schema) for key, tree in trees.items()}


def selected(trees: Mapping[str, Tree], select: Select, commit: CommitId) -> dict[str, View]:
    """The trees that have selected leaves, with these only. Raises `NotFound` if there are none."""
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
    """The trees under the names that `rename` gives to leaves and keys.

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
