"""A tree with only those leaves that were asked for: its skeleton without the others. Leaves keep
their numbers.

What is one object stays one: of a tensor or array that several leaves make up, all are taken when
one is selected. In a sequence or a record `LEFT_OUT` stands for an item without selected leaves, so
that the others keep their places.
"""

from collections.abc import Callable
from dataclasses import replace

from ckptstore.core.model import Node, Schema
from ckptstore.state import containers, paths
from ckptstore.state.containers import LEFT_OUT

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
