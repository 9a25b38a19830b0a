"""How is a state rebuilt from its schema and leaves? As new containers of the flattened types.

Only this file pickles and unpickles, and only with `allow_pickle=True`.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptstore.core.model import Node, Schema, leaves_of
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.state import containers, paths, values
from ckptstore.state.registry import Classes, no_classes

_PROTOCOL = 4
"""Fixed, so that equal objects keep giving equal bytes when Python's default moves on."""


def inflate(schema: Schema, content: Sequence[Any], *, allow_pickle: bool = False) -> Any:
    """The nested state that `schema` describes. `content` has, per leaf, a tensor, or the bytes of
    a `value` or `bytes` leaf; None for one that the skeleton leaves out.

    Leaves that shared memory get the tensor of the leaf they shared it with, whatever `content` has
    for them. Raises `InvalidInput` for a pickled leaf without `allow_pickle`, and for a class or
    codec that is not known here; `Corrupt` for a schema that `flatten` did not make.
    """
    containers.check(schema.skeleton)
    leaves: list[Any] = []
    for i, alias in enumerate(schema.aliases):
        made = None if content[i] is None else decode_leaf(schema, i, content[i])
        leaves.append(leaves[alias] if alias >= 0 else made)
    return Inflater(schema, leaves, allow_pickle=allow_pickle).inflate(schema.skeleton)


def inflate_leaf(schema: Schema, leaf: int, content: Any, *, allow_pickle: bool = False) -> Any:
    """The object under the path of one leaf: a tensor, a value, or what is made of this leaf alone,
    such as a numpy array."""
    containers.check(schema.skeleton)
    leaves: list[Any] = [None] * len(schema)
    leaves[leaf] = decode_leaf(schema, leaf, content)
    node = schema.skeleton
    while not isinstance(node, int) and not _wraps(node):
        node = next(child for child in node.children if leaf in leaves_of(child))
    return Inflater(schema, leaves, allow_pickle=allow_pickle).inflate(node)


def decode_leaf(schema: Schema, leaf: int, content: Any, classes: Classes = no_classes) -> Any:
    """The object that stands at `leaf` in its container, from its tensor or bytes."""
    match schema.kinds[leaf]:
        case "value":
            return values.decode_leaf(content, classes)
        case "bytes":
            return bytes(content)
        case _:
            return content


def refuse_pickles(schema: Schema) -> None:
    """Raise `InvalidInput` naming a pickled leaf, if there is one."""
    for path in paths.pickled(schema):
        raise _refusal(path)


def _refusal(path: str) -> InvalidInput:
    return InvalidInput(
        f"{path} is a pickle, which may run any code when read; pass allow_pickle=True if you "
        "trust its writer"
    )


@dataclass(frozen=True, slots=True)
class Inflater:
    """Makes the containers of one schema. `leaves` may be filled until `inflate` is called; `kept`
    has what stands for a node, by its id. `classes` are those that documents may refer to besides
    the registered ones."""

    schema: Schema
    leaves: Sequence[Any]
    allow_pickle: bool = False
    classes: Classes = no_classes
    kept: Mapping[int, Any] = field(default_factory=dict)
    _tied: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def inflate(self, node: Node | int) -> Any:
        """The object at `node`."""
        if isinstance(node, int):
            return self.leaves[node]
        if node is containers.LEFT_OUT:
            return None
        if id(node) in self.kept:
            return self.kept[id(node)]
        if node.type == "pickle":
            return self._unpickle(node)
        return self._join_once(node) if containers.copies(node.type) else self._join(node)

    def _join(self, node: Node) -> Any:
        return containers.join(node, list(map(self.inflate, node.children)), self.classes)

    def _join_once(self, node: Node) -> Any:
        """One object for all nodes that are made of the same tensors in the same way."""
        aliases, leaves = self.schema.aliases, leaves_of(node)
        tensors = tuple(aliases[leaf] if aliases[leaf] >= 0 else leaf for leaf in leaves)
        made_of = (node.type, repr(node.attrs), tensors)
        if made_of not in self._tied:
            self._tied[made_of] = self._join(node)
        return self._tied[made_of]

    def _unpickle(self, node: Node) -> Any:
        (leaf,) = node.children
        if not isinstance(leaf, int) or self.schema.kinds[leaf] != "bytes":
            raise Corrupt("a pickle in the schema is no leaf of bytes; run `ckptstore fsck`")
        if not self.allow_pickle:
            raise _refusal(self.schema.paths[leaf])
        return unpickled(self.leaves[leaf])


def pickled(value: Any) -> bytes:
    """`value` pickled; `InvalidInput` if it cannot be."""
    try:
        return pickle.dumps(value, protocol=_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(
            f"a {type(value).__qualname__} cannot be pickled: {error}; register it with "
            "ckptstore.register_value"
        ) from error


def unpickled(data: bytes | memoryview) -> Any:
    """The object pickled in `data`. Runs whatever code `data` says: only for stores that the caller
    trusts."""
    return pickle.loads(data)


def _wraps(node: Node | int) -> bool:
    """Whether all below `node` is under its own path: a leaf, or wrappers around one."""
    return isinstance(node, int) or (
        containers.is_wrapper(node.type) and all(map(_wraps, node.children))
    )
