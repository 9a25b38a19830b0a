"""How is a state rebuilt from its schema and leaves? As containers of the flattened types: a
target's own where it has them, else new ones.

Only this file pickles and unpickles, and only with `allow_pickle=True`.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ckptstore.core.identity import IdentityDict
from ckptstore.core.model import Node, Schema, leaves_of
from ckptstore.core.process import uncollected
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.state import tensors
from ckptstore.state.codecs import containers, values
from ckptstore.state.containers import LEFT_OUT
from ckptstore.state.in_place import Fillings, PlainFilling, can_change
from ckptstore.state.leaf_sources import pickled_paths
from ckptstore.state.stateful import Classes, no_classes

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
        case "plain":
            with uncollected():
                return values.decode_leaf(content, classes)
        case "bytes":
            return bytes(content)
        case _:
            return content


def refuse_pickles(schema: Schema) -> None:
    """Raise `InvalidInput` naming a pickled leaf, if there is one."""
    for path in pickled_paths(schema):
        raise _refusal(path)


def _refusal(path: str) -> InvalidInput:
    return InvalidInput(
        f"{path} is a pickle, which may run any code when read; pass allow_pickle=True if you "
        "trust its writer"
    )


class Inflater:
    """Makes the objects of one schema, in place where a target has them.

    `leaves` may be filled until `inflate` is called; `kept` has what stands for a node.
    `classes` are those that documents may refer to besides the registered ones. With `clears`, a
    target's mapping becomes what was committed; without it, entries that only it has stay.
    `replaced` are the nodes and leaves for which the target's object could not be filled;
    `replaced_below` has those below plain leaves, by the keys that lead there.
    """

    def __init__(
        self,
        schema: Schema,
        leaves: Sequence[Any],
        *,
        allow_pickle: bool,
        classes: Classes = no_classes,
        kept: IdentityDict[Node, Any] | None = None,
        clears: bool = True,
    ) -> None:
        self._schema, self._leaves, self._allow_pickle = schema, leaves, allow_pickle
        self._classes, self._clears = classes, clears
        self._kept: IdentityDict[Node, Any] = IdentityDict() if kept is None else kept
        self._tied: dict[tuple[Any, ...], Any] = {}
        self._fillings = Fillings()
        self.replaced: list[Node | int] = []
        self.replaced_below: list[tuple[int, tuple[Any, ...]]] = []

    def inflate(self, node: Node | int, target: Any = None) -> Any:
        """The object at `node`: `target`, filled, if it can be, otherwise a new one."""
        if isinstance(node, int):
            return self._leaves[node] if target is None else self._fill_leaf(node, target)
        if node is LEFT_OUT:
            return target
        made = self._inflate_node(node, target)
        containers.set_attributes(node, made, self._classes)
        return made

    def _inflate_node(self, node: Node, target: Any) -> Any:
        if node in self._kept:
            return self._kept[node]
        if node.type == "stateful":
            return self._fill_state(node.children[0], self._receiver(node, target))
        if node.type == "pickle":
            return self._fill(target, self._unpickle(node), node)
        if containers.copies(node.type):
            return self._fill(target, self._join_once(node), node)
        if isinstance(target, torch.Tensor):
            return self._fill(target, self.inflate(node), node)
        made = self._join(node, target)
        if containers.is_wrapper(node.type):
            return self._fill(target, made, node)
        # Its children are filled already.
        if made is not target and target is not None and can_change(target):
            self.replaced.append(node)
        return made

    def _fill_state(self, node: Node | int, target: Any) -> Any:
        """The object at `node`, the state of another: for `target`, which takes it or is none."""
        return self.inflate(node, target)

    def _receiver(self, node: Node, target: Any) -> Any:
        """What takes the state below `node`."""
        return target

    def _fill_leaf(self, leaf: int, target: Any) -> Any:
        if self._schema.kinds[leaf] != "plain":
            return self._fill(target, self._leaves[leaf], leaf)
        filling = PlainFilling(self._fillings, clears=self._clears)
        with uncollected():
            filled = filling.fill(target, self._leaves[leaf])
        self.replaced_below += [(leaf, keys) for keys in filling.left]
        return filled

    def _fill(self, target: Any, made: Any, node: Node | int) -> Any:
        """`target` with the content of `made`, or `made`, which replaces it; noted, unless nobody
        who holds the target's can expect it to change."""
        filled, is_whole = self._fillings.fill(target, made)
        if not is_whole:
            self.replaced.append(node)
        return filled

    def _join(self, node: Node, target: Any = None) -> Any:
        there = counterparts(node, target, self._classes)
        made, pairs = self._leaves, ((child, there(key)) for key, child in node.items())
        children = [
            made[each] if below is None and isinstance(each, int) else self.inflate(each, below)
            for each, below in pairs
        ]
        return containers.join(node, children, self._classes, target, clears=self._clears)

    def _join_once(self, node: Node) -> Any:
        """One object for all nodes that are made of the same tensors in the same way."""
        tensors = tuple(map(self._schema.owner, leaves_of(node)))
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
        return unpickled(self._leaves[leaf])


def pickled(value: Any) -> bytes:
    """`value` pickled; `InvalidInput` if it cannot be."""
    try:
        return pickle.dumps(value, protocol=_PROTOCOL)
    except Exception as error:  # the class's own code may raise anything
        raise InvalidInput(
            f"a {type(value).__qualname__} cannot be pickled: {error or type(error).__name__}; "
            "register it with ckptstore.register_value"
        ) from error


def unpickled(data: bytes | memoryview) -> Any:
    """The object pickled in `data`. Runs whatever code `data` says: only for stores that the caller
    trusts. Raises `InvalidInput` if a class cannot be imported here, or its code raises."""
    try:
        return pickle.loads(data)
    except Exception as error:
        of = getattr(error, "obj", None)  # Python 3.14 says no more that pickle looked for it
        gone = str(error).startswith("Can't get attribute") or isinstance(of, ModuleType)
        if gone or isinstance(error, ImportError):
            raise InvalidInput(
                f"a pickled object's class cannot be imported here ({error}); install its package "
                "or put its folder on PYTHONPATH"
            ) from error
        raise InvalidInput(
            f"a pickled object cannot be made again: {type(error).__name__}: {error}; restore with "
            "the code that wrote it"
        ) from error


def _wraps(node: Node | int) -> bool:
    """Whether all below `node` is under its own path: a leaf, or wrappers around one."""
    return isinstance(node, int) or (
        containers.is_wrapper(node.type) and all(map(_wraps, node.children))
    )


def counterparts(node: Node, target: Any, classes: Classes) -> Callable[[Any], Any]:
    """What `target` has for the child of `node` under an encoded key or a number, or None."""
    if containers.is_wrapper(node.type):
        return _nothing
    if node.keys is None:
        is_sequence = isinstance(target, list | tuple) or type(target).__name__ == "deque"
        return dict(enumerate(target)).get if is_sequence else _nothing
    if node.type == "namedtuple":
        return lambda key: getattr(target, key, None)
    if node.type == "dataclass":
        return partial(containers.field_of, target)
    if not isinstance(target, dict):
        return _nothing
    if set(map(type, node.keys)) <= {str}:  # by far the most
        return target.get
    return lambda key: target.get(values.decode_key(key, classes))


def _nothing(key: Any) -> None:
    """No counterpart."""


def children_of(node: Node, classes: Classes) -> dict[Any, Node | int]:
    """The children of a mapping by their decoded keys; none of any other node."""
    items = () if node.keys is None else node.items()
    return {values.decode_key(key, classes): child for key, child in items}


_COMPOSITES = (
    "torch.sparse_",
    "torch.nested",
    "torch.jagged",
    "torch.Parameter",
    "torch.Tensor",
    "torch.thin_subclass",
)
"""Tensors made of others whose values are what they seem."""


def convertible(schema: Schema, dtype: torch.dtype) -> frozenset[int]:
    """The leaves of a tree that become other ones when `dtype` is asked for: not the components of
    quantized tensors, tensor subclasses and numpy arrays, whose dtype carries meaning."""
    return frozenset(
        leaf
        for leaf in _candidates(schema.skeleton)
        if tensors.converts(schema.dtypes[leaf], dtype)
    )


def _candidates(node: Node | int) -> Iterator[int]:
    if isinstance(node, int):
        yield node
    elif node is not LEFT_OUT and (
        containers.is_divisible(node.type) or node.type.startswith(_COMPOSITES)
    ):
        for child in node.children:
            yield from _candidates(child)
