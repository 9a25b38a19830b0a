"""How is a state rebuilt from its schema and leaves? As new containers of the flattened types."""

from collections.abc import Mapping, Sequence
from typing import Any

from ckptstore.core.model import Node, Schema
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.state import containers, paths, pickles, values
from ckptstore.state.values import Classes


def inflate(
    schema: Schema,
    content: Sequence[Any],
    *,
    allow_pickle: bool = False,
    classes: Classes = values.NO_CLASSES,
) -> Any:
    """The nested state that `schema` describes. `content` has, per leaf, a tensor, or the bytes of
    a `value` or `bytes` leaf; None for one that the skeleton leaves out.

    Leaves that shared memory get the tensor of the leaf they shared it with, whatever `content` has
    for them. `classes` are those that documents may refer to besides the registered ones. Raises
    `InvalidInput` for a pickled leaf without `allow_pickle`, and for a class or codec that is not
    known here; `Corrupt` for a schema that `flatten` did not make.
    """
    containers.check(schema.skeleton)
    leaves = _decode(schema, content, classes)
    return Inflater(schema, leaves, {}, classes, allow_pickle=allow_pickle).inflate(schema.skeleton)


def inflate_leaf(
    schema: Schema,
    leaf: int,
    content: Any,
    *,
    allow_pickle: bool = False,
    classes: Classes = values.NO_CLASSES,
) -> Any:
    """The object under the path of one leaf: a tensor, a value, or what is made of this leaf alone,
    such as a numpy array."""
    containers.check(schema.skeleton)
    leaves: list[Any] = [None] * len(schema)
    leaves[leaf] = decode_leaf(schema, leaf, content, classes)
    return Inflater(schema, leaves, {}, classes, allow_pickle=allow_pickle).inflate(
        _outermost(schema.skeleton, leaf)
    )


def decode_leaf(schema: Schema, leaf: int, content: Any, classes: Classes) -> Any:
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


class Inflater:
    """Makes the containers of one schema. `leaves` may be filled until `inflate` is called; `kept`
    has what stands for a node."""

    def __init__(
        self,
        schema: Schema,
        leaves: Sequence[Any],
        kept: Mapping[int, Any],
        classes: Classes,
        *,
        allow_pickle: bool,
    ) -> None:
        self._schema, self._leaves, self._kept, self._classes, self._allow_pickle = (
            schema,
            leaves,
            kept,
            classes,
            allow_pickle,
        )
        self._tied: dict[tuple[Any, ...], Any] = {}

    def inflate(self, node: Node | int) -> Any:
        """The object at `node`."""
        if isinstance(node, int):
            return self._leaves[node]
        if node is containers.LEFT_OUT:
            return None
        if id(node) in self._kept:
            return self._kept[id(node)]
        if node.type == "pickle":
            return self._unpickle(node)
        return self._join_once(node) if containers.copies(node.type) else self._join(node)

    def _join(self, node: Node) -> Any:
        return containers.join(
            node, [self.inflate(child) for child in node.children], self._classes
        )

    def _join_once(self, node: Node) -> Any:
        """One object for all nodes that are made of the same tensors in the same way."""
        aliases = self._schema.aliases
        tensors = tuple(
            aliases[leaf] if aliases[leaf] >= 0 else leaf for leaf in containers.leaves_of(node)
        )
        made_of = (node.type, repr(node.attrs), tensors)
        if made_of not in self._tied:
            self._tied[made_of] = self._join(node)
        return self._tied[made_of]

    def _unpickle(self, node: Node) -> Any:
        (leaf,) = node.children
        if not isinstance(leaf, int) or self._schema.kinds[leaf] != "bytes":
            raise Corrupt("a pickle in the schema is no leaf of bytes; run `ckptstore fsck`")
        if not self._allow_pickle:
            raise _refusal(self._schema.paths[leaf])
        return pickles.load(self._leaves[leaf])


def _decode(schema: Schema, content: Sequence[Any], classes: Classes) -> list[Any]:
    made: list[Any] = []
    for i, alias in enumerate(schema.aliases):
        made.append(
            made[alias]
            if alias >= 0
            else None
            if content[i] is None
            else decode_leaf(schema, i, content[i], classes)
        )
    return made


def _outermost(node: Node | int, leaf: int) -> Node | int:
    """The outermost node that has `leaf`'s path: the leaf, or the wrappers around it."""
    while not isinstance(node, int) and not _wraps(node):
        node = next(child for child in node.children if leaf in containers.leaves_of(child))
    return node


def _wraps(node: Node | int) -> bool:
    return isinstance(node, int) or (
        containers.is_wrapper(node.type) and all(map(_wraps, node.children))
    )
