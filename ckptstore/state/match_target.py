"""Which tensor of a target does each leaf of a snapshot go to? This only matches; no bytes move.

A leaf is read directly into the tensor of the same path, dtype and shape. Two leaves share memory
only if their contents are equal, across all trees. A leaf without a match gets a new tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.optim.optimizer import Optimizer

from ckptstore.core.model import Node, Schema
from ckptstore.errors import InvalidInput
from ckptstore.state import containers, paths, tensors, values
from ckptstore.state.class_registry import TargetClasses
from ckptstore.state.containers import Parts
from ckptstore.state.dtype_cast import Converting, convertible, destination
from ckptstore.state.flatten import state_of
from ckptstore.state.fsdp1 import ShardedOptimizer, is_flat
from ckptstore.state.leaves import Destination, HeldDestination
from ckptstore.state.modules import own_loading, state_dict_of
from ckptstore.state.optimizer_ids import Numbered, ParameterNames, named, names_in, numbered
from ckptstore.state.shards import empty_like_held, held_of, is_distributed
from ckptstore.state.stateful import RNGState, StateDict
from ckptstore.state.target_fit import (
    children_of,
    describe_node,
    describe_tensor,
    fits,
    has_places,
    is_like,
    is_other,
    parts_of,
    tensor_paths,
)

_MARKS = ("torch.Parameter", "torch.Tensor")
"""Wrappers that only record whether a tensor requires grad, which the target decides."""


class Mismatch(NamedTuple):
    """A leaf whose shape, dtype or kind differs between commit and target."""

    path: str
    committed: str
    target: str


ContentOf: TypeAlias = Callable[[int], object]
"""Maps a leaf to a comparable stand-in for its content, or None if only a read could tell.

Equal for equal bytes of equal shape and width.
"""


class Claim(NamedTuple):
    """A leaf that claims memory of a target, with the shape and strides of the tensor there."""

    pairing: "Pairing"
    leaf: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def root(self) -> tuple[int, int]:
        """Identifies the leaf that stores the bytes, with its tree."""
        alias = self.pairing.schema.aliases[self.leaf]
        return id(self.pairing), alias if alias >= 0 else self.leaf

    def content(self) -> object:
        content = self.pairing.content_of(self.leaf)
        # Includes the dtype, since equal bytes may be converted from different dtypes.
        return None if content is None else (self.pairing.schema.dtypes[self.leaf], content)


class Pairing:
    """The matches of one tree.

    After `pair` and `complete`, `objects[i]` is the restored object of tensor leaf `i`, and
    `direct[i]` says whether it is the target's own. `kept` maps a node's id to the target's object
    for it, `sharded` an optimizer's id to the receiver of its state. `claims` maps addresses to
    their claims, for all trees of a restore. With `partial`, the skeleton has only selected leaves,
    and the rest of the target stays. With `dtype`, floating leaves are converted for targets of
    that dtype. `names` has the parameter names of all restored modules; with `in_order`, those of
    an optimizer may differ from the commit's.
    """

    def __init__(
        self,
        schema: Schema,
        classes: TargetClasses,
        content_of: ContentOf,
        claims: dict[int, Claim],
        *,
        names: ParameterNames,
        partial: bool = False,
        in_order: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.schema, self.content_of = schema, content_of
        self._names, self._in_order = names, in_order
        self._classes, self._claims = classes, claims
        self._partial, self._dtype = partial, dtype
        self._convertible = frozenset() if dtype is None else convertible(schema, dtype)
        count = len(schema)
        self.objects: list[Any] = [None] * count
        self.destinations: list[Destination | Converting | HeldDestination | None] = [None] * count
        self._models: dict[int, torch.Tensor] = {}
        self.direct = [False] * count
        self.wanted = [not partial] * count
        for leaf in containers.leaves_of(schema.skeleton) if partial else ():
            self.wanted[leaf] = True
        self.kept: dict[int, Any] = {}
        self.late = False
        self.narrowed: dict[int, Node | int] = {}
        self.sharded: dict[int, ShardedOptimizer] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: list[Mismatch] = []
        self._new_dtypes: dict[int, str] = {}

    def pair(self, node: Node | int, target: Any, path: str, *, report: bool) -> None:
        """Match the leaves below `node` with tensors of `target`. With `report`, record
        mismatches."""
        if node is containers.LEFT_OUT:
            return
        if isinstance(target, torch.Tensor):
            self._pair_tensor(node, target, path, report)
        elif isinstance(node, int):
            pass
        elif node.type == "stateful":
            self._pair_stateful(node.children[0], target, path)
        elif containers.is_wrapper(node.type):
            self._pair_array(node, target, path)
        else:
            self._pair_children(node, target, path, report)

    def pair_module(self, node: Node | int, module: torch.nn.Module, path: str) -> Node | int:
        """Match a module's state dict; returns `node` without the keys that the module lacks."""
        if isinstance(node, int) or node.keys is None:
            self.mismatched.append(
                Mismatch(path, "no state dict of a module", type(module).__qualname__)
            )
            return node
        state = state_dict_of(module)
        adapting = own_loading(module)
        known = set(map(str, node.keys))
        for name in state if not self._partial else ():
            if name not in known and not name.startswith(adapting):
                self.missing.append(f"{path}/{paths.segment(name)}")
        taken = []
        for encoded, child, name in zip(
            node.keys, node.children, paths.segments(node.keys), strict=True
        ):
            key = values.decode_key(encoded, self._classes)
            if key in state:
                self.pair(child, state[key], f"{path}/{name}", report=True)
            elif not str(key).startswith(adapting):
                self.unexpected.append(f"{path}/{name}")
                self._leave_out(child)
                continue
            taken.append((encoded, child))
        return Node(
            node.type,
            tuple(child for _, child in taken),
            tuple(key for key, _ in taken),
            node.attrs,
        )

    def pair_optimizer(self, node: Node | int, optimizer: Optimizer, path: str) -> Node | int:
        """Match an optimizer's state; returns `node` with the optimizer's numbers, without
        parameters it lacks."""
        state, found = self._state_and_place(node, optimizer)
        if found is not None:
            for name, child in found.unexpected:
                self.unexpected.append(f"{path}/state/{paths.segment(name)}")
                self._leave_out(child)
            self.missing.extend(
                f"{path}/state/{paths.segment(name)}" for name in found.missing if not self._partial
            )
            self._models.update(
                (leaf, model) for leaf, model in found.models.items() if is_distributed(model)
            )
            node = found.skeleton
        self.pair(node, state, path, report=False)
        return node

    def _state_and_place(
        self, node: Node | int, optimizer: Optimizer
    ) -> tuple[Any, Numbered | None]:
        """An optimizer's state, and the part of `node` that belongs to it."""
        sharded = self._names.sharded(optimizer)
        if sharded is None or not (committed := names_in(node)) or is_flat(committed):
            return optimizer.state_dict(), numbered(
                node, optimizer, self._names, in_order=self._in_order
            )
        self.sharded[id(optimizer)] = sharded
        state = sharded.state_dict()
        own = [name for group in state["param_groups"] for name in group["params"]]
        return state, named(node, own, sharded.models)

    def wanted_bytes(self) -> list[int]:
        """The wanted leaves that are not tensors."""
        return [
            i for i, kind in enumerate(self.schema.kinds) if kind != "tensor" and self.wanted[i]
        ]

    def complete(self, check: Callable[[int], None]) -> None:
        """Give each unmatched wanted leaf the tensor of the leaf it aliases, or a new one.

        `check` raises for a leaf of implausible shape before memory is allocated for it.
        """
        schema = self.schema
        for i, kind in enumerate(schema.kinds):
            if kind != "tensor" or not self.wanted[i] or self.objects[i] is not None:
                continue
            alias = schema.aliases[i]
            if alias >= 0 and self.objects[alias] is not None:
                self.objects[i] = self.objects[alias]
            else:
                check(i)
                self._make(i)

    def _make(self, leaf: int) -> None:
        """Make a new tensor for a leaf, distributed like its model if that has the same shape."""
        name, shape, model = (
            self.schema.dtypes[leaf],
            self.schema.shapes[leaf],
            self._models.get(leaf),
        )
        if model is None or tuple(model.shape) != shape:
            self.objects[leaf] = tensors.empty(self._new_dtypes.get(leaf, name), shape)
            self.destinations[leaf] = destination(self.objects[leaf], name)
        else:
            self.objects[leaf] = empty_like_held(model, tensors.dtype_of(name))
            parts = held_of(self.objects[leaf]).parts
            self.destinations[leaf] = HeldDestination(
                tuple((box, Destination(part)) for box, part in parts)
            )

    def _pair_stateful(self, node: Node | int, target: Any, path: str) -> None:
        if isinstance(target, torch.nn.Module):
            self.narrowed[id(node)] = self.pair_module(node, target, path)
        elif isinstance(target, Optimizer):
            self.narrowed[id(node)] = self.pair_optimizer(node, target, path)
        elif isinstance(target, StateDict):
            self.pair(node, target, path, report=True)
        else:
            self.late |= isinstance(target, RNGState)
            self.pair(node, state_of(target), path, report=False)

    def _pair_array(self, node: Node, target: Any, path: str) -> None:
        """Match a numpy array, to be filled in place. Other shapes and wrappers are replaced."""
        parts = (
            containers.split(target)
            if node.type == "numpy.ndarray" and type(target).__module__ == "numpy"
            else None
        )
        if not parts or parts.type != node.type:
            return
        (child,), (leaf,) = parts.children, node.children
        self.pair(leaf, child, path, report=False)
        if isinstance(child, torch.Tensor) and child.data_ptr() == target.ctypes.data:
            self._keep(node, target)

    def _pair_children(self, node: Node, target: Any, path: str, report: bool) -> None:
        if report and not self._partial and isinstance(target, dict) and node.keys is not None:
            self._note_missing(node.keys, target, path)
        if (
            self._partial
            and any(child is containers.LEFT_OUT for child in node.children)
            and not has_places(node, target)
        ):
            self._mismatch(
                path,
                f"a {node.type} of {len(node.children)}, of which some are selected",
                f"a {type(target).__qualname__} of others",
            )
        names = (
            paths.segments(node.keys)
            if node.keys is not None
            else [str(i) for i in range(len(node.children))]
        )
        for child, name, below in zip(
            node.children, names, children_of(node, target, self._classes), strict=True
        ):
            if isinstance(child, int) and type(below) is torch.Tensor and tensors.is_strided(below):
                self._pair_strided(child, below, below, report)
            elif below is not None or self._partial:
                self.pair(child, below, f"{path}/{name}", report=report)

    def _note_missing(self, keys: Sequence[Any], target: dict[Any, Any], path: str) -> None:
        """Record tensors under keys that only the target has. Other values there are not
        reported."""
        known = {key if type(key) is str else values.decode_key(key, self._classes) for key in keys}
        for key, value in target.items() if target.keys() - known else ():
            if key not in known:
                self.missing.extend(
                    tensor_paths(value, f"{path}/{paths.segments([values.encode_key(key)])[0]}")
                )

    def _pair_tensor(self, node: Node | int, target: torch.Tensor, path: str, report: bool) -> None:
        if not isinstance(node, int) and node.type in _MARKS:
            (child,) = node.children
            self._pair_tensor(child, target, path, report)
            self._keep(node, target)
            return
        if is_distributed(target):
            self._pair_distributed(node, target, path, report)
            return
        try:
            parts = parts_of(target)
        except InvalidInput as error:
            if report:
                self._mismatch(
                    path, describe_node(self.schema, node), f"{describe_tensor(target)}: {error}"
                )
            return
        if isinstance(parts, Parts) and parts.type in _MARKS:
            self._pair_tensor(node, parts.children[0], path, report)
            self._keep(node, target)
        elif isinstance(node, int) and isinstance(parts, torch.Tensor):
            self._pair_strided(node, parts, target, report)
        elif not isinstance(node, int) and isinstance(parts, Parts):
            self._pair_composite(node, parts, target, path, report)
        elif report and parts is not None:
            self._mismatch(path, describe_node(self.schema, node), describe_tensor(target))

    def _pair_distributed(
        self, node: Node | int, target: torch.Tensor, path: str, report: bool
    ) -> None:
        """Match the boxes of a leaf that this rank holds in `target`. The leaf may be committed in
        other boxes."""
        try:
            held = held_of(target)
        except InvalidInput as error:
            if report:
                self._mismatch(
                    path, describe_node(self.schema, node), f"{describe_tensor(target)}: {error}"
                )
            return
        wanted = held.shape, tensors.DTYPE_NAMES[held.dtype]
        if (
            not isinstance(node, int)
            or (self.schema.shapes[node], self.schema.dtypes[node]) != wanted
        ):
            if report:
                self._mismatch(path, describe_node(self.schema, node), describe_tensor(target))
            return
        mine = Claim(
            self, node, held.shape, tuple(n for _, part in held.parts for n in part.stride())
        )
        first = self._claims.setdefault(held.parts[0][1].data_ptr(), mine) if held.parts else mine
        if first is mine:
            self.destinations[node] = HeldDestination(
                tuple((box, Destination(part)) for box, part in held.parts)
            )
        elif not self._is_one_with(first, mine, report):
            return
        self.objects[node] = target
        self.direct[node] = True

    def _pair_strided(
        self, leaf: int, strided: torch.Tensor, target: torch.Tensor, report: bool
    ) -> None:
        """Match `leaf` with `strided`, which is `target` or its strided equivalent."""
        if self._converts(leaf, strided):
            self._new_dtypes[leaf] = tensors.DTYPE_NAMES[strided.dtype]
        elif not is_like(self.schema, leaf, strided):
            if report:
                self._mismatch(
                    self.schema.paths[leaf],
                    describe_node(self.schema, leaf),
                    describe_tensor(target),
                )
            return
        if not tensors.is_writable_by_range(strided):
            return
        mine = Claim(self, leaf, strided.shape, strided.stride())
        address = strided.data_ptr()
        # Address 0 means an empty tensor, which shares nothing.
        first = self._claims.setdefault(address, mine) if address else mine
        if first is mine:
            self.destinations[leaf] = destination(strided, self.schema.dtypes[leaf])
        elif not self._is_one_with(first, mine, report):
            return
        self.objects[leaf] = target
        self.direct[leaf] = True

    def _is_one_with(self, first: Claim, mine: Claim, report: bool) -> bool:
        """Whether both claims have equal contents. Otherwise `mine` gets a tensor of its own."""
        if first[2:] != mine[2:]:
            return False
        if first.root() == mine.root():
            return True
        there, here = first.content(), mine.content()
        if report and there is not None and here is not None and there != here:
            tied = first.pairing.schema.paths[first.leaf]
            self._mismatch(
                self.schema.paths[mine.leaf],
                "a content of its own",
                f"one tensor for it and {tied}",
            )
        return here is not None and there == here

    def _pair_composite(
        self, node: Node, parts: Parts, target: torch.Tensor, path: str, report: bool
    ) -> None:
        if parts.type != node.type or is_other(self.schema, node, parts):
            if report:
                self._mismatch(path, describe_node(self.schema, node), describe_tensor(target))
        elif fits(self.schema, node, parts):
            for child, below in zip(node.children, parts.children, strict=True):
                self.pair(child, below, path, report=report)
            self._keep(node, target)

    def _keep(self, node: Node | int, target: Any) -> None:
        """Keep `target` for `node` if all of the node's bytes go there."""
        if isinstance(node, int):
            self.objects[node] = target if self.direct[node] else self.objects[node]
        elif all(map(self._stands, node.children)):
            self.kept[id(node)] = target

    def _stands(self, node: Node | int) -> bool:
        return self.direct[node] if isinstance(node, int) else id(node) in self.kept

    def _converts(self, leaf: int, tensor: torch.Tensor) -> bool:
        return (
            leaf in self._convertible
            and tensor.dtype == self._dtype
            and tensor.shape == self.schema.shapes[leaf]
        )

    def _leave_out(self, node: Node | int) -> None:
        for leaf in containers.leaves_of(node):
            self.wanted[leaf] = False

    def _mismatch(self, path: str, committed: str, target: str) -> None:
        self.mismatched.append(Mismatch(path, committed, target))
