"""Which leaf of a snapshot lands in which tensor of a target: skeleton and target walked side by
side, nothing moved yet.

A leaf lands directly in a tensor of the same path, dtype and shape. Two leaves never land in one
piece of memory, in whichever trees they are, unless they are one content. What finds no tensor gets
a new one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.parameter import is_lazy
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
from ckptstore.state.tensor_subclasses import split_tensor

_MARKS = ("torch.Parameter", "torch.Tensor")
"""Wrappers that say of a tensor only whether it wants a gradient; targets decide that for
themselves."""


class Mismatch(NamedTuple):
    """A leaf whose shape, dtype or kind in the commit is not the target's."""

    path: str
    committed: str
    target: str


ContentOf: TypeAlias = Callable[[int], object]
"""What a leaf holds, as something that compares: equal for equal bytes of one shape and width; None
if only a read could tell."""


class Claim(NamedTuple):
    """A leaf that is to land somewhere, with the shape and strides of what is there."""

    pairing: "Pairing"
    leaf: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def root(self) -> tuple[int, int]:
        """The leaf that has its bytes, and its tree."""
        alias = self.pairing.schema.aliases[self.leaf]
        return id(self.pairing), alias if alias >= 0 else self.leaf

    def content(self) -> object:
        content = self.pairing.content_of(self.leaf)
        # With the dtype, from which the same bytes may be converted.
        return None if content is None else (self.pairing.schema.dtypes[self.leaf], content)


class Pairing:
    """Where the leaves of one tree go.

    After `pair` and `complete`, `objects[i]` is what stands at tensor leaf `i` once its bytes are
    there. `direct[i]` says that it is the target's own, `kept` has the target's own objects that
    stand for a node, by its id, `sharded` what takes the state of an optimizer, by the optimizer's
    id. `claims` says which memory is taken, by its address, and is shared by all trees of one
    restore. With `partial`, the skeleton has some leaves only; what the target has beside them is
    not ours. With `dtype`, floating leaves are converted where the target has a tensor of it.
    `names` are those of the parameters of all modules that are restored; with `in_order`, an
    optimizer's may be called otherwise than in the commit.
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
        """Find the tensors of `target` for the leaves below `node`. With `report`, note what does
        not fit; else that is no problem."""
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
        """As `pair`, for a module's state dict; returns `node` without the keys that the module has
        no place for."""
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
        """As `pair`, for an optimizer's state; returns `node` with the optimizer's numbers, without
        parameters that it does not have."""
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
        """What an optimizer has, and what of `node` is for it."""
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
        """The leaves that are no tensors and have a place."""
        return [
            i for i, kind in enumerate(self.schema.kinds) if kind != "tensor" and self.wanted[i]
        ]

    def complete(self, check: Callable[[int], None]) -> None:
        """Give a tensor to every wanted leaf that found none: that of the leaf it shared memory
        with, else a new one.

        `check` raises for a leaf whose shape is not to be believed, before memory is taken for it.
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
        """A new tensor for a leaf, placed on ranks as its model is, if there is one of its
        shape."""
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
        """Fill a numpy array where it stands; one of another shape is replaced, as values are.
        Other wrappers have nothing to fill."""
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
            and not _has_places(node, target)
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
        """Tensors under keys that only the target has. Other values there are content: they go, or
        stay, without a word."""
        known = {key if type(key) is str else values.decode_key(key, self._classes) for key in keys}
        for key, value in target.items() if target.keys() - known else ():
            if key not in known:
                self.missing.extend(
                    _tensor_paths(value, f"{path}/{paths.segments([values.encode_key(key)])[0]}")
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
            parts = _parts_of(target)
        except InvalidInput as error:
            if report:
                self._mismatch(path, self._describe(node), f"{_describe(target)}: {error}")
            return
        if isinstance(parts, Parts) and parts.type in _MARKS:
            self._pair_tensor(node, parts.children[0], path, report)
            self._keep(node, target)
        elif isinstance(node, int) and isinstance(parts, torch.Tensor):
            self._pair_strided(node, parts, target, report)
        elif not isinstance(node, int) and isinstance(parts, Parts):
            self._pair_composite(node, parts, target, path, report)
        elif report and parts is not None:
            self._mismatch(path, self._describe(node), _describe(target))

    def _pair_distributed(
        self, node: Node | int, target: torch.Tensor, path: str, report: bool
    ) -> None:
        """Land the boxes of a leaf that this rank has in `target`, whatever boxes the leaf was
        committed in."""
        try:
            held = held_of(target)
        except InvalidInput as error:
            if report:
                self._mismatch(path, self._describe(node), f"{_describe(target)}: {error}")
            return
        wanted = held.shape, tensors.DTYPE_NAMES[held.dtype]
        if (
            not isinstance(node, int)
            or (self.schema.shapes[node], self.schema.dtypes[node]) != wanted
        ):
            if report:
                self._mismatch(path, self._describe(node), _describe(target))
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
        """Land `leaf` in `strided`, which is `target` or stands for it."""
        if self._converts(leaf, strided):
            self._new_dtypes[leaf] = tensors.DTYPE_NAMES[strided.dtype]
        elif not self._is_like(leaf, strided):
            if report:
                self._mismatch(self.schema.paths[leaf], self._describe(leaf), _describe(target))
            return
        if not tensors.is_writable_by_range(strided):
            return
        mine = Claim(self, leaf, strided.shape, strided.stride())
        address = strided.data_ptr()
        # An address of 0 is that of an empty tensor, which shares nothing.
        first = self._claims.setdefault(address, mine) if address else mine
        if first is mine:
            self.destinations[leaf] = destination(strided, self.schema.dtypes[leaf])
        elif not self._is_one_with(first, mine, report):
            return
        self.objects[leaf] = target
        self.direct[leaf] = True

    def _is_one_with(self, first: Claim, mine: Claim, report: bool) -> bool:
        """Whether what lands for `first` is right for `mine` too. Else `mine` gets a tensor of its
        own, which is handed over after it."""
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
        if parts.type != node.type or self._is_other(node, parts):
            if report:
                self._mismatch(path, self._describe(node), _describe(target))
        elif self._fits(node, parts):
            for child, below in zip(node.children, parts.children, strict=True):
                self.pair(child, below, path, report=report)
            self._keep(node, target)

    def _is_other(self, node: Node, parts: Parts) -> bool:
        """Whether the two differ in what a restore must never change silently: shape, dtype,
        class."""
        there, here = dict(node.attrs), dict(parts.attrs)
        if any(there.get(name) != here.get(name) for name in ("shape", "dtype", "class")):
            return True
        pairs = zip(node.children, parts.children, strict=False)
        return any(
            isinstance(child, int) and self.schema.dtypes[child] != tensors.DTYPE_NAMES[below.dtype]
            for child, below in pairs
        )

    def _fits(self, node: Node, parts: Parts) -> bool:
        """Whether every tensor that the composite is made of can land where the target has it."""
        if tuple(parts.keys or ()) != (node.keys or ()) or tuple(sorted(parts.attrs)) != node.attrs:
            return False
        for child, below in zip(node.children, parts.children, strict=True):
            inner = _parts_of(below)
            if isinstance(child, int):
                if (
                    not isinstance(inner, torch.Tensor)
                    or not self._is_like(child, inner)
                    or not tensors.is_writable_by_range(inner)
                ):
                    return False
            elif (
                not isinstance(inner, Parts)
                or inner.type != child.type
                or not self._fits(child, inner)
            ):
                return False
        return True

    def _keep(self, node: Node | int, target: Any) -> None:
        """Let `target` stand for `node` if all of the node's bytes land in it."""
        if isinstance(node, int):
            self.objects[node] = target if self.direct[node] else self.objects[node]
        elif all(map(self._stands, node.children)):
            self.kept[id(node)] = target

    def _stands(self, node: Node | int) -> bool:
        return self.direct[node] if isinstance(node, int) else id(node) in self.kept

    def _is_like(self, leaf: int, tensor: torch.Tensor) -> bool:
        return (
            tensor.shape == self.schema.shapes[leaf]
            and tensors.DTYPE_NAMES[tensor.dtype] == self.schema.dtypes[leaf]
        )

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

    def _describe(self, node: Node | int) -> str:
        if isinstance(node, int):
            kind = self.schema.kinds[node]
            return (
                f"{self.schema.dtypes[node]}{list(self.schema.shapes[node])}"
                if kind == "tensor"
                else f"a {kind}"
            )
        shape = next(
            (values.decode_value(value) for name, value in node.attrs if name == "shape"), ""
        )
        inner = ", ".join(
            self._describe(child) for child in node.children if isinstance(child, int)
        )
        return f"{node.type}{shape} of {inner}"


def children_of(node: Node, target: Any, classes: Mapping[str, type]) -> list[Any]:
    """For every child of `node` what `target` has in its place, or None."""
    if node.keys is None:
        there = (
            list(target)
            if isinstance(target, list | tuple) or type(target).__name__ == "deque"
            else []
        )
        return [there[i] if i < len(there) else None for i in range(len(node.children))]
    if node.type in ("namedtuple", "dataclass"):
        return [getattr(target, key, None) for key in node.keys]
    if not isinstance(target, dict):
        return [None] * len(node.children)
    return [
        target.get(key if type(key) is str else values.decode_key(key, classes))
        for key in node.keys
    ]


def _has_places(node: Node, target: Any) -> bool:
    """Whether a sequence or record has the items of `node`, so that those that are left out stay as
    they are."""
    if node.keys is not None:
        return all(hasattr(target, key) for key in node.keys)
    return type(target).__name__ == node.type and len(target) == len(node.children)


def _parts_of(target: torch.Tensor) -> Parts | torch.Tensor | None:
    """The tensor taken apart, or the strided one that stands for it; None if its shape is still to
    come; `InvalidInput` if nothing can."""
    if type(target) in (torch.Tensor, torch.nn.Parameter) and tensors.is_strided(target):
        return target
    return None if is_lazy(target) else split_tensor(target)


def _describe(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f"{tensor.layout} of "
    return f"{layout}{tensors.DTYPE_NAMES[tensor.dtype]}{list(tensor.shape)}"


def _tensor_paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, torch.Tensor) or containers.is_stateful(value):
        yield path
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _tensor_paths(child, f"{path}/{paths.segments([values.encode_key(key)])[0]}")
    elif isinstance(value, list | tuple):
        for i, child in enumerate(value):
            yield from _tensor_paths(child, f"{path}/{i}")
