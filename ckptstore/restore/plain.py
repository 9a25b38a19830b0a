"""What is below a leaf of kind `plain`? Its values as leaves of their own, so that all other code
has paths, kinds and contents for them. A restore needs none where a target takes the leaf whole.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from typing import Any

from ckptstore.core.identity import IdentitySet
from ckptstore.core.model import LeafContent, Node
from ckptstore.core.process import uncollected
from ckptstore.objects.schema import Columns
from ckptstore.restore.reader import Tree
from ckptstore.state.flatten import flatten_value
from ckptstore.state.in_place import containers_in
from ckptstore.state.inflate import counterparts, decode_leaf
from ckptstore.state.stateful import is_matched, is_stateful, no_classes


@uncollected()
def expanded(tree: Tree, leaves: Collection[int], read: Callable[[Tree, int], bytes]) -> Tree:
    """`tree` with what is in `leaves`, which are plain and not gone, as leaves; `read` gives the
    bytes of one."""
    walk = _Expansion(tree, leaves, read)
    skeleton = walk.visit(tree.schema.skeleton)
    return replace(tree, schema=walk.columns.schema(skeleton), contents=walk.contents)


class _Expansion:
    """A tree on its way. The numbers of before lead to those of now."""

    def __init__(
        self, tree: Tree, leaves: Collection[int], read: Callable[[Tree, int], bytes]
    ) -> None:
        self._tree, self._leaves, self._read = tree, leaves, read
        self._numbers: dict[int, int] = {}
        self.columns = Columns()
        self.contents: list[LeafContent] = []

    def visit(self, node: Node | int) -> Node | int:
        if not isinstance(node, int):
            return replace(node, children=tuple([self.visit(child) for child in node.children]))
        schema = self._tree.schema
        if node in self._leaves:
            value = decode_leaf(schema, node, self._read(self._tree, node))
            below = flatten_value(value, schema.paths[node])
            self.contents += [_inline(each.read_all()) for each in below.leaves]
            return self.columns.take(below.schema)
        columns, number = self.columns, len(self.contents)
        columns.paths.append(schema.paths[node])
        columns.kinds.append(schema.kinds[node])
        columns.dtypes.append(schema.dtypes[node])
        columns.shapes.append(schema.shapes[node])
        # A leaf is tied to an earlier one, and never to a plain one.
        alias = schema.aliases[node]
        columns.aliases.append(alias if alias < 0 else self._numbers[alias])
        self.contents.append(self._tree.contents[node])
        self._numbers[node] = number
        return number


def _inline(data: bytes) -> LeafContent:
    return LeafContent(data, b"", len(data))


@uncollected()
def whole_in(trees: Mapping[str, Tree], app_state: Mapping[str, Any]) -> frozenset[str]:
    """The paths of plain leaves that a restore of `app_state` takes in one pass: where the target
    has nothing, or lists and dicts of numbers, strings and the like, each in one place only. What
    else a target has there is matched leaf by leaf."""
    places: dict[str, Any] = {}
    for key, tree in trees.items():
        if tree.plain:
            places.update(_places(tree, tree.schema.skeleton, app_state.get(key)))
    inside = {
        path: IdentitySet[Any]() if target is None else containers_in(target)
        for path, target in places.items()
    }
    taken = {path: found for path, found in inside.items() if found is not None}
    twice = IdentitySet[Any]()
    if any(map(len, taken.values())):
        twice = _twice(app_state, taken.values(), IdentitySet(places.values()))
    return frozenset(path for path, found in taken.items() if twice.isdisjoint(found))


def _places(tree: Tree, node: Node | int, target: Any) -> Iterator[tuple[str, Any]]:
    """The paths of plain leaves at `node`, each with what stands there in the target."""
    if isinstance(node, int):
        if node in tree.plain:
            yield tree.schema.paths[node], target
        return
    if is_stateful(target):
        if is_matched(target):
            return
        target = None  # it is handed its state
    if node.type == "stateful":
        yield from _places(tree, node.children[0], target)
    elif node.keys is None or set(map(type, node.keys)) <= {str, int}:
        there = counterparts(node, target, no_classes)
        for key, child in node.items():
            yield from _places(tree, child, there(key))


def _twice(
    app_state: Any, inside: Iterable[IdentitySet[Any]], tops: IdentitySet[Any]
) -> IdentitySet[Any]:
    """What `app_state` has in several places and can be filled. `inside` are the containers at and
    below `tops`, which need not be looked into."""
    seen, twice = IdentitySet[Any](), IdentitySet[Any]()
    for found in inside:
        twice.update(seen.update(found))
    seen.remove(tops)
    level = [app_state]
    while level:
        new = []
        for each in level:
            if seen.add(each) or type(each) is tuple:
                new.append(each)
            else:
                twice.add(each)
        below = list(chain.from_iterable(_items_of(each) for each in new if each not in tops))
        kinds = set(filter(_has_items, set(map(type, below))))
        level = [each for each in below if type(each) in kinds] if kinds else []
    return twice


def _has_items(kind: type) -> bool:
    return issubclass(kind, dict | list | tuple | deque) or is_dataclass(kind)


def _items_of(container: Any) -> Iterator[Any]:
    if isinstance(container, dict):
        return iter(container.values())
    if is_dataclass(container):
        return (getattr(container, field.name, None) for field in fields(container))
    return iter(container)
