"""How does an application state become leaves? A schema per key, and a byte source per leaf
(docs/format.md §5).

Nothing is copied: the result of `flatten` refers to tensors and keeps them alive. Only small values
are encoded immediately.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import GeneratorType, ModuleType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ckptstore.core.model import SHARED, LeafKind, Node, Shape
from ckptstore.core.process import uncollected
from ckptstore.errors import CkptStoreError, InvalidInput
from ckptstore.objects.schema import Columns, parts_of
from ckptstore.state import tensors
from ckptstore.state.codecs import containers, values
from ckptstore.state.composites import split_distributed, split_tensor
from ckptstore.state.containers import SplitObject
from ckptstore.state.inflate import pickled
from ckptstore.state.leaf_sources import (
    ITSELF,
    NOTHING,
    BytesSource,
    FlatState,
    HeldLeaf,
    Row,
    Source,
    is_plain_node,
    rows,
    segment,
)
from ckptstore.state.optimizers import ParameterNames, named_state
from ckptstore.state.shards import Held, held_of, is_distributed, without_attributes
from ckptstore.state.stateful import (
    class_name,
    is_plain,
    registered,
    state_of,
    tell_of_unknown_classes,
)
from ckptstore.state.tensors import DTYPE_NAMES, TensorSource

MAX_NESTING = 80
"""Containers within containers; each takes two of canonical JSON's 200 levels, and its keys and
attributes some more."""


PLAIN_ITEMS = 1024
"""A list or dict of more items, all of them plain values, is one leaf where that is asked for."""


def flatten(
    app_state: Mapping[str, Any],
    *,
    allow_pickle: bool = False,
    ranks: bool = False,
    plain: bool = False,
    shared: bool = False,
) -> dict[str, FlatState]:
    """Every key of `app_state`, in its order. Objects with `state_dict()` and `load_state_dict()`
    give their state dict; that of an optimizer has the names of its parameters, if the modules in
    `app_state` have them all.

    Raises `InvalidInput`, naming the path and the way out, for what cannot be stored. With
    `allow_pickle`, objects of unknown types are pickled and marked as such. With `ranks`, a
    distributed tensor is one leaf, of which this rank holds boxes. With `plain`, large lists and
    dicts of plain values are one leaf each, of kind `plain`. With `shared`, keys that are one leaf
    are in one flat state, as they are in the store (docs/format.md §7).
    """
    check_app_state(app_state)
    tensors.check_surroundings()
    names = ParameterNames(app_state)
    walk = partial(_Walk, app_state, names, allow_pickle, ranks, plain)
    alone = {key: value for key, value in app_state.items() if is_plain(value)}
    own = {key: walk().flatten(key, app_state[key]) for key in app_state if key not in alone}
    if not shared:
        own |= _taken_apart(walk().flatten_plain(alone, {}))
        return {key: own[key] for key in app_state}
    sharing = {
        key: own.pop(key)
        for key in [*own]
        if key == SHARED or is_plain_node(own[key].schema.skeleton)
    }
    if alone or sharing:
        own[SHARED] = walk().flatten_plain(alone, sharing)
    return own


def _taken_apart(flat: FlatState) -> dict[str, FlatState]:
    """Each key of a shared tree by itself."""
    return {
        part.key: FlatState(part.schema, flat.leaves[part.leaves]) for part in parts_of(flat.schema)
    }


def flatten_value(value: Any, path: str) -> FlatState:
    """The leaves of a plain value at `path`, one by one."""
    return _Walk({}, ParameterNames({}), False, False, False).flatten_at(path, value)


def check_app_state(app_state: object) -> None:
    """Raise `InvalidInput` for what is no mapping of names to objects."""
    if not isinstance(app_state, Mapping):
        kind = type(app_state).__name__
        raise InvalidInput(
            f"the application state is a {kind}; wanted a dict of names to objects, such as "
            f'{{"model": model}}'
        )
    for key in app_state:
        if type(key) is not str:  # a str of numpy or of an Enum would come back as another key
            raise InvalidInput(
                f"the application state has the key {key!r}, a {type(key).__name__}; its keys must "
                f"be plain strings, such as {str(key)!r}"
            )


class _Walk:
    """A flat state on its way."""

    def __init__(
        self,
        app_state: Mapping[str, Any],
        names: ParameterNames,
        allow_pickle: bool,
        ranks: bool,
        plain: bool,
    ) -> None:
        self._app_state, self._plain = app_state, plain
        self._names, self._allow_pickle, self._ranks = names, allow_pickle, ranks
        self._columns = Columns()
        self._leaves: list[Source] = []
        self._held: dict[int, HeldLeaf] = {}
        self._by_memory: dict[tuple[Any, ...], int] = {}
        self._open: list[tuple[Any, str]] = []

    def flatten(self, key: str, value: Any) -> FlatState:
        path = segment(values.encode_key(key))
        is_optimizer = isinstance(value, Optimizer)
        with _noted(path):
            state = self._state_of_optimizer(value, path) if is_optimizer else state_of(value)
        return self.flatten_at(path, state)

    @uncollected()
    def flatten_at(self, path: str, value: Any) -> FlatState:
        skeleton = self._visit(value, path)
        return FlatState(self._columns.schema(skeleton), self._leaves, self._held)

    @uncollected()
    def flatten_plain(
        self, alone: Mapping[str, Any], flattened: Mapping[str, FlatState]
    ) -> FlatState:
        """One state of plain values by their keys, and of others that are flattened."""
        keys, children = sorted([*alone, *flattened]), []
        for key in keys:
            self._by_memory.clear()  # keys are not tied to each other
            if key in alone:
                children.append(self._visit(alone[key], segment(values.encode_key(key))))
            else:
                children.append(self._columns.take(flattened[key].schema))
                self._leaves += flattened[key].leaves
        schema = self._columns.schema(Node("dict", tuple(children), tuple(keys)))
        return FlatState(schema, self._leaves, keys=tuple(self._app_state))

    def _visit(self, value: Any, path: str) -> Node | int:
        try:
            is_bare = type(value) is torch.Tensor and not value.requires_grad and not vars(value)
            if is_bare and tensors.is_strided(value):  # by far the most
                return self._tensor(value, path)
            found = self._leaf_or_parts(value, path)
            if isinstance(found, int):
                return found
            below = rows(found, path)
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {error}") from error
        except Exception as error:
            _note(error, path)
            raise
        return self._container(value, found, below, path)

    def _leaf_or_parts(self, value: Any, path: str) -> int | SplitObject:
        if self._ranks and isinstance(value, torch.Tensor) and is_distributed(value):
            return split_distributed(value, without_attributes) or self._distributed(value, path)
        if type(value) is bytes:
            return self._leaf(path, "bytes", BytesSource(value))
        if type(value) is not dict:  # which none of these looks into
            parts = self._split(value, path)
            if parts is not None:
                return parts
            encoded = values.encode_value(value)
            if encoded is not values.NOT_A_VALUE:
                return self._leaf(path, "value", BytesSource(values.encode_leaf(encoded)))
        if self._plain and type(value) in (dict, list) and len(value) > PLAIN_ITEMS:
            encoded = values.encode_plain(value)
            if encoded is not values.NOT_A_VALUE:
                return self._leaf(path, "plain", BytesSource(values.encode_leaf(encoded)))
        return containers.split(value) or self._pickle(value)

    def _split(self, value: Any, path: str) -> SplitObject | None:
        """The parts of what is neither a value nor a container that a target fills: the caller's
        types, tensors, wrapped modules."""
        known = registered(type(value))
        if known:
            return SplitObject(
                "registered", [known.content_of(value)], attrs=(("name", known.name),)
            )
        if isinstance(value, torch.nn.Module):
            return SplitObject("stateful", [state_of(value)])
        if isinstance(value, Optimizer):
            return SplitObject("stateful", [self._state_of_optimizer(value, path)])
        if isinstance(value, torch.Tensor):
            parts = split_tensor(value)
            return parts if isinstance(parts, SplitObject) else SplitObject(ITSELF, [parts])
        return None

    def _state_of_optimizer(self, optimizer: Optimizer, path: str) -> Any:
        tell_of_unknown_classes(optimizer, path, self._app_state)
        return named_state(optimizer, self._names, ranks=self._ranks)

    def _pickle(self, value: Any) -> SplitObject:
        if self._allow_pickle:
            return SplitObject("pickle", [pickled(value)])
        if isinstance(value, set | frozenset):
            raise InvalidInput(
                "a set whose items are not plain values has no order to restore; use a list, or a "
                "dict"
            )
        local = getattr(value, "__qualname__", type(value).__qualname__)
        if "<" in local or isinstance(value, ModuleType | GeneratorType):  # pickle refuses it too
            raise InvalidInput(
                f"{value!r:.80} can be neither stored nor pickled; leave it out of the state, or "
                "put plain values in its place"
            )
        name = class_name(type(value))
        raise InvalidInput(
            f"a {name} cannot be stored; ckptstore.register_value(…, {name}, encode, decode), or "
            "pass allow_pickle=True"
        )

    def _container(
        self, value: Any, parts: SplitObject, below: Iterable[Row[Any]], path: str
    ) -> Node | int:
        for other, place in self._open:
            if other is value:
                raise InvalidInput(
                    f"{path} is {place} again, which holds it: a cycle cannot be stored; break it "
                    "first"
                )
        if len(self._open) == MAX_NESTING:
            raise InvalidInput(
                f"{path} is nested more than {MAX_NESTING} containers deep; use flatter containers"
            )
        self._open.append((value, path))
        try:
            children = tuple([self._visit(child, place) for child, place, _ in below])
        finally:
            self._open.pop()
        if parts.type == ITSELF:
            return children[0]
        return Node(
            parts.type,
            children,
            None if parts.keys is None else tuple(parts.keys),
            tuple(sorted(parts.attrs)),
        )

    def _tensor(self, tensor: torch.Tensor, path: str) -> int:
        address = tensors.checked_address(tensor)
        shape, dtype = tuple(tensor.shape), tensor.dtype
        number = len(self._leaves)
        # An address of 0 is that of an empty tensor, which shares nothing.
        first = (
            self._by_memory.setdefault((address, shape, tensor.stride(), dtype), number)
            if address
            else number
        )
        if first != number and self._same_values(first, tensor):
            return self._leaf(path, "tensor", NOTHING, DTYPE_NAMES[dtype], shape, first)
        return self._leaf(path, "tensor", TensorSource(tensor), DTYPE_NAMES[dtype], shape)

    def _distributed(self, tensor: torch.Tensor, path: str) -> int:
        held = held_of(tensor)
        for _, local in held.parts:
            tensors.checked_address(local)
        number = len(self._leaves)
        parts = tuple([(box, TensorSource(part)) for box, part in held.parts])
        self._held[number] = HeldLeaf(held.holding, parts, tensor)
        # Boxes without elements are none, so that every address is one.
        first = self._by_memory.setdefault(_memory_of(held), number) if parts else number
        return self._leaf(
            path,
            "tensor",
            NOTHING,
            DTYPE_NAMES[held.dtype],
            held.shape,
            first if first != number else -1,
        )

    def _same_values(self, leaf: int, tensor: torch.Tensor) -> bool:
        """Whether the tensor of an earlier leaf, at the same address, reads that memory as `tensor`
        does."""
        source = self._leaves[leaf]
        assert isinstance(source, TensorSource)
        other = source.tensor
        return (
            other.device == tensor.device
            and other.is_conj() == tensor.is_conj()
            and other.is_neg() == tensor.is_neg()
        )

    def _leaf(
        self,
        path: str,
        kind: LeafKind,
        source: Source,
        dtype: str = "",
        shape: Shape = (),
        alias: int = -1,
    ) -> int:
        columns = self._columns
        columns.paths.append(path)
        columns.kinds.append(kind)
        columns.dtypes.append(dtype)
        columns.shapes.append(shape)
        columns.aliases.append(alias)
        self._leaves.append(source)
        return len(self._leaves) - 1


@contextmanager
def _noted(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _note(error, path)
        raise


def _note(error: Exception, path: str) -> None:
    """Say in the traceback of what an object's own code raised where in the state that object is.
    The error stays what it is, since the caller may know it."""
    if not isinstance(error, CkptStoreError):
        error.add_note(
            f"raised when the state of {path} was asked for, for a commit: bring that object to "
            "where it can give its state (run it once, set what it misses), or leave it out"
        )


def _memory_of(held: Held) -> tuple[Any, ...]:
    """Equal for distributed tensors that are the same boxes of the same memory."""
    memory = tuple([(part.data_ptr(), part.stride()) for _, part in held.parts])
    return memory, held.holding.boxes, held.shape, held.dtype
