"""How is a tree narrowed to selected leaves, or renamed for a target? Leaves keep their numbers.

Renaming applies to keys of mappings at any depth; a list, a record or a tensor of several leaves
moves as a whole. A container under a new name keeps the type of the one its leaves come from.

Selecting one leaf of a composite tensor or array selects all of them. In a sequence or record,
`LEFT_OUT` stands for an unselected item, so that the others keep their positions.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from ckptstore.core.model import Node, Schema, leaves_of
from ckptstore.errors import InvalidInput
from ckptstore.state.codecs import containers, values
from ckptstore.state.containers import LEFT_OUT
from ckptstore.state.leaf_sources import rows, segment, unescape
from ckptstore.state.optimizer_forms import with_names

Rename: TypeAlias = "Mapping[str, str] | Callable[[str], str]"
"""Old prefixes to new ones, or a function from path to path."""

Selected: TypeAlias = Callable[[str], bool]


class Renamer:
    """The new path of every path. A prefix is looked for in the path below the key, or in all of
    it; the longest that fits is replaced."""

    def __init__(self, rename: Rename) -> None:
        self._rename = rename
        self._unused: list[str] = []
        if callable(rename):
            return
        texts = (*rename, *rename.values()) if isinstance(rename, Mapping) else ()
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidInput(
                f"rename is {rename!r:.80}; wanted prefixes such as {{'old.': 'new.'}}, or a "
                "function from path to path"
            )
        self._longest_first = sorted(rename, key=len, reverse=True)
        self._unused = list(self._longest_first)

    def __call__(self, path: str) -> str:
        new = self._rename(path) if callable(self._rename) else self._by_prefix(path)
        if not isinstance(new, str) or not all(new.split("/")):
            raise InvalidInput(
                f"rename makes {new!r} of {path}; wanted a path: names joined by '/', the first "
                "one a key of the state"
            )
        return new

    def check_used(self) -> None:
        """Raise `InvalidInput` for a prefix that fitted nothing."""
        if self._unused:
            raise InvalidInput(
                f"rename: no path begins with {' or '.join(map(repr, self._unused))}; `ckptstore "
                "ls` lists the paths"
            )

    def _by_prefix(self, path: str) -> str:
        assert isinstance(self._rename, Mapping)
        below = path.find("/") + 1
        for prefix in self._longest_first:
            for at in (below, 0):
                if path.startswith(prefix, at) and (at or prefix):
                    if prefix in self._unused:
                        self._unused.remove(prefix)
                    return path[:at] + self._rename[prefix] + path[at + len(prefix) :]
        return path


class _Above(NamedTuple):
    """A mapping on the way to a unit: its node, the wrappers around it, and the encoded key of what
    is below it."""

    node: Node
    wrappers: tuple[Node, ...]
    key: Any


class _Unit(NamedTuple):
    """What moves as a whole: where it was and where it goes, segment by segment, and the mappings
    that it was in."""

    node: Node | int
    old: tuple[str, ...]
    new: tuple[str, ...]
    above: tuple[_Above, ...]

    def origin(self, depth: int) -> _Above | None:
        """The old mapping that becomes the one at `depth` of the new path: counted from the unit,
        but the outermost stays outermost."""
        i = len(self.above) - (len(self.new) - 1 - depth)
        return self.above[0] if depth == 0 else self.above[i] if i > 0 else None

    def key(self, depth: int) -> Any:
        """The encoded key under the mapping at `depth`: as it was if it keeps its name, and of an
        integer an integer."""
        name, i = self.new[depth + 1], depth + len(self.old) - len(self.new)
        if i >= 0 and self.old[i + 1] == name:
            return self.above[i].key
        if i >= 0 and type(self.above[i].key) is int and name.isdecimal():
            return int(name)
        return values.encode_key(unescape(name))


def rename_tree(key: str, schema: Schema, rename: Callable[[str], str]) -> tuple[str, Schema]:
    """The key and the schema of a tree under the paths that `rename` gives. Leaves keep their
    numbers.

    Raises `InvalidInput` where two leaves would get one path, where one would lie within another,
    for a tree that would go to several keys, and for a list or a tensor of several leaves that
    would be taken apart.
    """
    containers.check(schema.skeleton)
    units = list(_units(schema, schema.skeleton, segment(key), (), rename))
    heads = sorted({unit.new[0] for unit in units}) or [segment(key)]
    if len(heads) > 1:
        raise InvalidInput(
            f"rename takes {key} apart, to {', '.join(heads)}; the leaves of one key can only go "
            "to one key"
        )
    new_paths = list(schema.paths)
    for unit in units:
        for leaf in leaves_of(unit.node):
            new_paths[leaf] = "/".join(unit.new) + new_paths[leaf][len("/".join(unit.old)) :]
    skeleton = _mapping(units, 0) if units and units[0].above else schema.skeleton
    return unescape(heads[0]), replace(schema, skeleton=skeleton, paths=tuple(new_paths))


def _units(
    schema: Schema,
    node: Node | int,
    path: str,
    above: tuple[_Above, ...],
    rename: Callable[[str], str],
) -> Iterator[_Unit]:
    wrappers: tuple[Node, ...] = ()
    inner = node
    while isinstance(inner, Node) and inner.type == "stateful":
        wrappers, inner = (*wrappers, inner), inner.children[0]
    if isinstance(inner, int) or not inner.children or not containers.is_mapping(inner.type):
        yield _Unit(
            node, tuple(path.split("/")), _renamed(schema, node, path, above, rename), above
        )
        return
    for child, below, key in rows(inner, path):
        yield from _units(schema, child, below, (*above, _Above(inner, wrappers, key)), rename)


def _renamed(
    schema: Schema,
    node: Node | int,
    path: str,
    above: tuple[_Above, ...],
    rename: Callable[[str], str],
) -> tuple[str, ...]:
    suffixes = [schema.paths[leaf][len(path) :] for leaf in leaves_of(node)] or [""]
    found = {(suffix, rename(path + suffix)) for suffix in suffixes}
    new = {there.removesuffix(suffix) if there.endswith(suffix) else "" for suffix, there in found}
    if len(new) > 1 or new == {""}:
        raise InvalidInput(
            f"rename takes {path} apart: a list, a record or a tensor of several leaves is renamed "
            "as a whole"
        )
    now = tuple(new.pop().split("/"))
    if (len(now) > 1) != bool(above):
        raise InvalidInput(
            f"rename brings {path} to {'/'.join(now)}: what is below a key stays below one, and "
            "what is all of a key stays so"
        )
    return now


def _mapping(units: Sequence[_Unit], depth: int) -> Node:
    """The mapping at `depth` of the new paths of `units`, with what is below it."""
    groups: dict[str, list[_Unit]] = {}
    for unit in units:
        groups.setdefault(unit.new[depth + 1], []).append(unit)
    children: list[Node | int] = []
    moved: dict[str, str] = {}
    for name, group in groups.items():
        ends = [unit for unit in group if len(unit.new) == depth + 2]
        if ends and len(group) > 1:
            old = [f"{'/'.join(unit.old)} to {'/'.join(unit.new)}" for unit in group[:2]]
            raise InvalidInput(
                f"rename brings {' and '.join(old)}; both cannot be there: give them different "
                "names, or leave one out with select"
            )
        moved.update({unit.old[-1]: name for unit in ends})
        children.append(ends[0].node if ends else _mapping(group, depth + 1))
    keys = tuple(group[0].key(depth) for group in groups.values())
    origin = units[0].origin(depth)
    if origin is None:
        return Node("dict", tuple(children), keys)
    node = replace(
        origin.node, children=tuple(children), keys=keys, attrs=_attrs(origin.node, moved)
    )
    for wrapper in reversed(origin.wrappers):
        node = replace(wrapper, children=(node,))
    return node


def _attrs(node: Node, moved: Mapping[str, str]) -> tuple[tuple[str, Any], ...]:
    """A mapping's attributes; the `metadata` of a module's state dict, named by modules, follows
    the first leaf of each module."""
    attrs = dict(node.attrs)
    metadata = values.decode_value(attrs.get("metadata"))
    if not isinstance(metadata, Mapping) or all(old == new for old, new in moved.items()):
        return node.attrs
    modules: dict[str, str] = {}
    for old, new in moved.items():
        for at in (i for i, character in enumerate(old) if character == "."):
            if new.endswith(old[at:]):
                modules.setdefault(old[:at], new.removesuffix(old[at:]))
    renamed = OrderedDict((modules.get(name, name), entry) for name, entry in metadata.items())
    attrs["metadata"] = containers.attribute(renamed, "metadata")
    return tuple(attrs.items())


def narrow(
    key: str, schema: Schema, is_selected: Selected, *, keeps_names: bool = False
) -> Schema | None:
    """`schema`, that of `key`, with the containers that hold selected leaves, and what is in them
    of these; None if nothing is selected. With `keeps_names`, an optimizer's state of which some is
    selected has the names of all of its parameters.

    Of selected leaves that share memory the first is the one that the others are aliases of.
    """
    containers.check(schema.skeleton)
    above = with_names if keeps_names else _as_narrowed
    skeleton = _narrow(schema, schema.skeleton, segment(key), is_selected, above)
    if skeleton is LEFT_OUT:
        return None
    aliases = list(schema.aliases)
    first: dict[int, int] = {}
    for leaf in sorted(leaves_of(skeleton)):
        owner = schema.owner(leaf)
        aliases[leaf] = first.get(owner, -1)
        first.setdefault(owner, leaf)
    return replace(schema, skeleton=skeleton, aliases=tuple(aliases))


def _as_narrowed(node: Node, narrowed: Node) -> Node:
    return narrowed


def _narrow(
    schema: Schema,
    node: Node | int,
    path: str,
    is_selected: Selected,
    completed: Callable[[Node, Node], Node],
) -> Node | int:
    if isinstance(node, int):
        return node if is_selected(schema.paths[node]) else LEFT_OUT
    if not containers.is_divisible(node.type):
        found = (path, *(schema.paths[leaf] for leaf in leaves_of(node)))
        return node if any(map(is_selected, found)) else LEFT_OUT
    children = tuple(
        _narrow(schema, child, below, is_selected, completed)
        for child, below, _ in rows(node, path)
    )
    if all(child is LEFT_OUT for child in children):
        return node if not children and is_selected(path) else LEFT_OUT
    if not containers.is_mapping(node.type):
        return replace(node, children=children)
    there = replace(node, children=children).filtered(lambda key, child: child is not LEFT_OUT)
    return completed(node, there)
