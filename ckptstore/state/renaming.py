"""How is a tree narrowed to selected leaves, or renamed for a target? Leaves keep their numbers.

Renaming applies to keys of mappings at any depth; a list, a record or a tensor of several leaves
moves as a whole. A container under a new name keeps the type of the one its leaves come from.

Selecting one leaf of a composite tensor or array selects all of them. In a sequence or record,
`LEFT_OUT` stands for an unselected item, so that the others keep their positions.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ckptstore.core.model import Node, Schema
from ckptstore.errors import InvalidInput
from ckptstore.state import containers, paths, values
from ckptstore.state.containers import LEFT_OUT

Rename: TypeAlias = "Mapping[str, str] | Callable[[str], str]"
"""Old prefixes to new ones, or a function from path to path."""


class Renamer:
    """The new path of every path. A prefix is looked for in the path below the key, or in all of
    it; the longest that fits is replaced."""

    def __init__(self, rename: Rename) -> None:
        self._function = rename if callable(rename) else self._by_prefix
        self._prefixes = {} if callable(rename) else _checked(rename)
        self._longest_first = sorted(self._prefixes, key=len, reverse=True)
        self._used: set[str] = set()

    def __call__(self, path: str) -> str:
        new = self._function(path)
        if not isinstance(new, str) or not all(new.split("/")):
            raise InvalidInput(
                f"rename makes {new!r} of {path}; wanted a path: names joined by '/', the first "
                "one a key of the state"
            )
        return new

    def check_used(self) -> None:
        """Raise `InvalidInput` for a prefix that fitted nothing."""
        if unused := [prefix for prefix in self._longest_first if prefix not in self._used]:
            raise InvalidInput(
                f"rename: no path begins with {' or '.join(map(repr, unused))}; `ckptstore ls` "
                "lists the paths"
            )

    def _by_prefix(self, path: str) -> str:
        key, slash, below = path.partition("/")
        for prefix in self._longest_first:
            if slash and below.startswith(prefix):
                self._used.add(prefix)
                return f"{key}{slash}{self._prefixes[prefix]}{below[len(prefix) :]}"
            if prefix and path.startswith(prefix):
                self._used.add(prefix)
                return self._prefixes[prefix] + path[len(prefix) :]
        return path


def rename_tree(key: str, schema: Schema, rename: Callable[[str], str]) -> tuple[str, Schema]:
    """The key and the schema of a tree under the paths that `rename` gives. Leaves keep their
    numbers.

    Raises `InvalidInput` where two leaves would get one path, where one would lie within another,
    for a tree that would go to several keys, and for a list or a tensor of several leaves that
    would be taken apart.
    """
    containers.check(schema.skeleton)
    places = list(_places(schema, schema.skeleton, paths.segment(key), (), rename))
    heads = sorted({place.new[0] for place in places}) or [paths.segment(key)]
    if len(heads) > 1:
        raise InvalidInput(
            f"rename takes {key} apart, to {', '.join(heads)}; the leaves of one key can only go "
            "to one key"
        )
    return paths.unescape(heads[0]), replace(
        schema, skeleton=_skeleton(schema.skeleton, places), paths=_paths(schema, places)
    )


@dataclass(frozen=True, slots=True)
class _Above:
    """A mapping on the way to a unit: its node, the wrappers around it, and the encoded key of what
    is below it."""

    node: Node
    wrappers: tuple[Node, ...]
    key: Any


@dataclass(frozen=True, slots=True)
class _Place:
    """A unit, what moves as a whole: where it was and where it goes, segment by segment, and the
    mappings that it was in."""

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
        name = self.new[depth + 1]
        i = depth + len(self.old) - len(self.new)
        origin = self.above[i] if i >= 0 else None
        if origin and self.old[i + 1] == name:
            return origin.key
        if origin and type(origin.key) is int and name.isdecimal():
            return int(name)
        return values.encode_key(paths.unescape(name))


def _places(
    schema: Schema,
    node: Node | int,
    path: str,
    above: tuple[_Above, ...],
    rename: Callable[[str], str],
) -> Iterator[_Place]:
    wrappers, inner = _unwrapped(node)
    if isinstance(inner, int) or not inner.children or not containers.is_mapping(inner.type):
        yield _place(schema, node, path, above, rename)
        return
    for key, child, name in zip(
        inner.keys or (), inner.children, paths.below(inner, path), strict=True
    ):
        yield from _places(schema, child, name, (*above, _Above(inner, wrappers, key)), rename)


def _place(
    schema: Schema,
    node: Node | int,
    path: str,
    above: tuple[_Above, ...],
    rename: Callable[[str], str],
) -> _Place:
    suffixes = [schema.paths[leaf][len(path) :] for leaf in containers.leaves_of(node)] or [""]
    found = {(suffix, rename(path + suffix)) for suffix in suffixes}
    new = {
        there[: len(there) - len(suffix)] if there.endswith(suffix) else ""
        for suffix, there in found
    }
    if len(new) > 1 or new == {""}:
        raise InvalidInput(
            f"rename takes {path} apart: a list, a record or a tensor of several leaves is renamed "
            "as a whole"
        )
    old, now = tuple(path.split("/")), tuple(new.pop().split("/"))
    if (len(now) > 1) != bool(above):
        raise InvalidInput(
            f"rename brings {path} to {'/'.join(now)}: what is below a key stays below one, and "
            "what is all of a key stays so"
        )
    return _Place(node, old, now, above)


def _unwrapped(node: Node | int) -> tuple[tuple[Node, ...], Node | int]:
    wrappers: list[Node] = []
    while isinstance(node, Node) and node.type == "stateful":
        wrappers.append(node)
        node = node.children[0]
    return tuple(wrappers), node


def _paths(schema: Schema, places: Sequence[_Place]) -> tuple[str, ...]:
    found = list(schema.paths)
    for place in places:
        old, new = "/".join(place.old), "/".join(place.new)
        for leaf in containers.leaves_of(place.node):
            found[leaf] = new + found[leaf][len(old) :]
    return tuple(found)


def _skeleton(skeleton: Node | int, places: Sequence[_Place]) -> Node | int:
    if not places or not places[0].above:
        return skeleton
    top = _Branch(places[0].above[0])
    for place in places:
        _insert(top, place)
    return top.build()


@dataclass(slots=True)
class _Branch:
    """A mapping of the new skeleton on its way: the old one that it comes from, and by segment the
    key and what is below it."""

    origin: _Above | None
    below: "dict[str, tuple[Any, _Branch | _Place]]" = field(default_factory=dict)

    def build(self) -> Node:
        keys = tuple(key for key, _ in self.below.values())
        children = tuple(
            item.build() if isinstance(item, _Branch) else item.node
            for _, item in self.below.values()
        )
        if self.origin is None:
            return Node("dict", children, keys)
        moved = {
            item.old[-1]: name for name, (_, item) in self.below.items() if isinstance(item, _Place)
        }
        node = replace(
            self.origin.node, children=children, keys=keys, attrs=_attrs(self.origin.node, moved)
        )
        for wrapper in reversed(self.origin.wrappers):
            node = replace(wrapper, children=(node,))
        return node

    def any_place(self) -> _Place:
        _, item = next(iter(self.below.values()))
        return item.any_place() if isinstance(item, _Branch) else item


def _insert(top: _Branch, place: _Place) -> None:
    branch = top
    for depth, name in enumerate(place.new[1:-1]):
        _, there = branch.below.setdefault(
            name, (place.key(depth), _Branch(place.origin(depth + 1)))
        )
        if isinstance(there, _Place):
            raise _clash(there, place)
        branch = there
    depth, name = len(place.new) - 2, place.new[-1]
    _, there = branch.below.setdefault(name, (place.key(depth), place))
    if there is not place:
        raise _clash(there.any_place() if isinstance(there, _Branch) else there, place)


def _clash(one: _Place, other: _Place) -> InvalidInput:
    old = [f"{'/'.join(place.old)} to {'/'.join(place.new)}" for place in (one, other)]
    return InvalidInput(
        f"rename brings {' and '.join(old)}; both cannot be there: give them different names, or "
        "leave one out with select"
    )


def _attrs(node: Node, moved: Mapping[str, str]) -> tuple[tuple[str, Any], ...]:
    """A mapping's attributes; the `metadata` of a module's state dict, named by modules, follows
    the modules' leaves."""
    encoded = dict(node.attrs).get("metadata")
    metadata = values.decode_value(encoded) if encoded is not None else None
    if not isinstance(metadata, Mapping) or all(old == new for old, new in moved.items()):
        return node.attrs
    modules = _modules(moved)
    renamed = OrderedDict((modules.get(name, name), entry) for name, entry in metadata.items())
    return tuple(
        (name, containers.attribute(renamed, name) if name == "metadata" else value)
        for name, value in node.attrs
    )


def _modules(moved: Mapping[str, str]) -> dict[str, str]:
    """Old names of modules to new ones, by the first leaf of each."""
    found: dict[str, str] = {}
    for old, new in moved.items():
        for at in (
            i for i, character in enumerate(old) if character == "." and old[:i] not in found
        ):
            if new.endswith(old[at:]):
                found[old[:at]] = new[: len(new) - len(old) + at]
    return found


def _checked(rename: Mapping[str, str]) -> dict[str, str]:
    if (
        not isinstance(rename, Mapping)
        or not rename
        or not all(isinstance(text, str) for text in (*rename, *rename.values()))
    ):
        raise InvalidInput(
            f"rename is {rename!r:.80}; wanted prefixes such as {{'old.': 'new.'}}, or a function "
            "from path to path"
        )
    return dict(rename)


Selected = Callable[[str], bool]


def narrow(key: str, schema: Schema, is_selected: Selected) -> Schema | None:
    """`schema`, that of `key`, with the containers that hold selected leaves, and what is in them
    of these; None if nothing is selected.

    Of selected leaves that share memory the first is the one that the others are aliases of.
    """
    containers.check(schema.skeleton)
    skeleton = _narrow(schema, schema.skeleton, paths.segment(key), is_selected)
    return (
        None
        if skeleton is LEFT_OUT
        else replace(schema, skeleton=skeleton, aliases=_aliases(schema, skeleton))
    )


def _narrow(schema: Schema, node: Node | int, path: str, is_selected: Selected) -> Node | int:
    if isinstance(node, int):
        return node if is_selected(schema.paths[node]) else LEFT_OUT
    if not containers.is_divisible(node.type):
        leaves = containers.leaves_of(node)
        return (
            node
            if is_selected(path) or any(is_selected(schema.paths[leaf]) for leaf in leaves)
            else LEFT_OUT
        )
    below = paths.below(node, path)
    children = [
        _narrow(schema, child, name, is_selected)
        for child, name in zip(node.children, below, strict=True)
    ]
    if all(child is LEFT_OUT for child in children):
        return node if not children and is_selected(path) else LEFT_OUT
    if not containers.is_mapping(node.type):
        return replace(node, children=tuple(children))
    assert node.keys is not None
    kept = [
        (key, child)
        for key, child in zip(node.keys, children, strict=True)
        if child is not LEFT_OUT
    ]
    return replace(
        node, keys=tuple(key for key, _ in kept), children=tuple(child for _, child in kept)
    )


def _aliases(schema: Schema, skeleton: Node | int) -> tuple[int, ...]:
    aliases = list(schema.aliases)
    first: dict[int, int] = {}
    for leaf in sorted(containers.leaves_of(skeleton)):
        owner = schema.aliases[leaf] if schema.aliases[leaf] >= 0 else leaf
        aliases[leaf] = first.get(owner, -1)
        first.setdefault(owner, leaf)
    return tuple(aliases)
