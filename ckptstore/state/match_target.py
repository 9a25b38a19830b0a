"""Which tensor of a target does each leaf of a snapshot go to? This only matches; no bytes move.

A leaf is read directly into the tensor of the same path, dtype and shape. Two leaves share memory
only if their contents are equal, across all trees. A leaf without a match gets a new tensor.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from ckptstore.core.identity import IdentityDict
from ckptstore.core.model import Box, Node, Schema, leaves_of
from ckptstore.errors import InvalidInput
from ckptstore.state import tensors
from ckptstore.state.codecs import values
from ckptstore.state.composites import split_tensor
from ckptstore.state.containers import SplitObject
from ckptstore.state.inflate import convertible
from ckptstore.state.leaf_sources import ATTRIBUTES
from ckptstore.state.optimizer_fit import Renames, ShapeOf
from ckptstore.state.optimizers import ParameterNames
from ckptstore.state.shards import Held, held_of, is_distributed, shape_of, with_local
from ckptstore.state.shared_memory import LeafTarget
from ckptstore.state.stateful import parameters_of
from ckptstore.state.tensors import Destination, destination

_MARKS = ("torch.Parameter", "torch.Tensor")
"""Wrappers that only record whether a tensor requires grad, which the target decides."""


Landing: TypeAlias = tuple[tuple[Box | None, Destination], ...]
"""Where the bytes of a leaf land: the boxes of it that this rank has, or all of it."""


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

    match: "TensorMatch"
    leaf: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def root(self) -> tuple["TensorMatch", int]:
        """Identifies the leaf that stores the bytes, with its tree."""
        return self.match, self.match.schema.owner(self.leaf)

    def content(self) -> object:
        content = self.match.content_of(self.leaf)
        # Includes the dtype, since equal bytes may be converted from different dtypes.
        return None if content is None else (self.match.schema.dtypes[self.leaf], content)


@dataclass(frozen=True, slots=True)
class Matching:
    """How the keys of one restore are matched, and what they share.

    With `strict`, a plain container becomes what was committed; without it, entries that only the
    target has stay. With `partial`, skeletons have some leaves only: the target is to keep
    everything else, and lacks nothing. With `dtype`, floating leaves are converted where the target
    has a tensor of that dtype, if `unchecked` also where it cannot hold all values. Where it
    `skips`, tensors that do not fit stay as they are, and `left` has their addresses. By `names` an
    optimizer's parameters are found, under the new ones that `renames` has of the commit's; with
    `renames`, the rest is matched in order, where `shape_of`, the shapes of the commit's parameters
    by name, proves it. `claims` maps addresses to their claims, so that tensors which are tied
    across keys get one content, or are mismatched; `held` does so for objects, by their ids, with a
    path and a content. `places` are those of all leaves that get memory of the target, ties once:
    others may overlap (`shared_memory`).
    """

    names: ParameterNames
    strict: bool = True
    allow_pickle: bool = False
    partial: bool = False
    renames: Renames | None = None
    shape_of: ShapeOf = lambda name: None
    dtype: torch.dtype | None = None
    unchecked: bool = False
    skips: bool = False
    left: set[int] = field(default_factory=set)
    held: IdentityDict[Any, tuple[str, Callable[[], object]]] = field(default_factory=IdentityDict)
    claims: dict[int, Claim] = field(default_factory=dict)
    places: list[LeafTarget] = field(default_factory=list)

    def stepped_without_weights(
        self, app_state: Mapping[str, Any], keys: Iterable[str]
    ) -> list[str]:
        """The optimizers under `keys` that step tensors which were left as they are: the state that
        was committed for them is that of other weights."""
        optimizers = ((key, app_state[key]) for key in keys if self.left)
        return [
            f'{key}: its state is that of weights which mismatched="skip" leaves as they are; '
            f"without=[{key!r}] leaves it as it is, too"
            for key, optimizer in optimizers
            if isinstance(optimizer, Optimizer)
            and self.left & {each.data_ptr() for each in parameters_of(optimizer)} - {0}
        ]


class _Differs(Exception):
    """A node does not fit a tensor: both, in words other than those of `describe_node` and
    `describe_tensor`."""

    def __init__(self, committed: str = "", target: str = "", *, is_tied: bool = False) -> None:
        self.committed, self.target, self.is_tied = committed, target, is_tied


class TensorMatch:
    """The matched tensors of one tree.

    After `pair` and `complete`, `objects[i]` is the restored object of tensor leaf `i`, and
    `direct[i]` says whether it is the target's own; `destinations[i]` is where its bytes land, an
    alias' where those of the leaf do that it shares memory with, if any. Nothing is read of those
    that are `unread`: what `skipped` describes stays as it is. `kept` maps a node
    to the target's object for it. A leaf of `models` that has no match is placed as that tensor is.
    """

    def __init__(
        self,
        schema: Schema,
        matching: Matching,
        content_of: ContentOf,
        uncast: Mapping[int, str],
    ) -> None:
        self.schema, self.content_of = schema, content_of
        self._matching = matching
        self._claims, self._taken, count = matching.claims, matching.places, len(schema)
        self._converted = {i: tensors.dtype_of(name) for i, name in uncast.items()}
        if matching.dtype is not None:
            leaves = convertible(schema, matching.dtype)
            self._converted |= dict.fromkeys(leaves, matching.dtype)
        self.objects: list[Any] = [None] * count
        self.destinations: list[Landing] = [()] * count
        self.direct = [False] * count
        self.kept: IdentityDict[Node, Any] = IdentityDict()
        self.models: dict[int, torch.Tensor] = {}
        self.mismatched: list[Mismatch] = []
        self.skipped: list[Mismatch] = []
        self.unread: set[int] = set()
        self._new_dtypes = dict(uncast)

    def pair(self, node: Node | int, target: torch.Tensor, path: str, *, report: bool) -> None:
        """Match the leaves of `node` with the memory of `target`. With `report`, record what does
        not fit."""
        try:
            if (
                isinstance(node, int)
                and type(target) is torch.Tensor
                and not vars(target)
                and tensors.is_strided(target)
            ):
                self._pair_strided(node, target, target, report)
            else:
                self._pair_tensor(node, target, path, report)
        except _Differs as found:
            if report:
                self._differs(node, target, path, found)
        except InvalidInput as error:
            if report:
                described = f"{describe_tensor(target)}: {error}"
                self.mismatch(path, describe_node(self.schema, node), described)

    def _differs(self, node: Node | int, target: torch.Tensor, path: str, found: _Differs) -> None:
        """Record what does not fit, or leave it as it is where that was asked for."""
        at = path if isinstance(node, Node) else self.schema.paths[node]
        mismatch = Mismatch(
            at,
            found.committed or describe_node(self.schema, node),
            found.target or describe_tensor(target),
        )
        if not self._matching.skips or found.is_tied:
            self.mismatched.append(mismatch)
            return
        self.skipped.append(mismatch)
        self._matching.left.add(target.data_ptr() if tensors.is_strided(target) else 0)
        self.unread.update(leaves_of(node))
        if isinstance(node, int):
            self.objects[node], self.direct[node] = target, True
        else:
            self.kept[node] = target

    def mismatch(self, path: str, committed: str, target: str) -> None:
        """Record what does not fit."""
        self.mismatched.append(Mismatch(path, committed, target))

    def keep(self, node: Node | int, target: Any) -> None:
        """Keep `target` for `node` if all of the node's bytes go there."""
        if isinstance(node, int):
            self.objects[node] = target if self.direct[node] else self.objects[node]
        elif all(self.direct[leaf] for leaf in leaves_of(node)):
            self.kept[node] = target

    def complete(self, leaf: int, check: Callable[[int], None]) -> None:
        """Give an unmatched tensor leaf the tensor of the leaf it aliases, or a new one.

        `check` raises for a leaf of implausible shape before memory is allocated for it.
        """
        if self.objects[leaf] is not None or leaf in self.unread:
            return
        alias = self.schema.aliases[leaf]
        if alias >= 0 and self.objects[alias] is not None and alias not in self.unread:
            self.objects[leaf] = self.objects[alias]
            return
        check(leaf)
        name, shape = self.schema.dtypes[leaf], self.schema.shapes[leaf]
        model = self.models.get(leaf)
        if model is not None and is_distributed(model) and shape_of(model) == shape:
            dtype = tensors.dtype_of(name)
            empty = partial(torch.empty_like, dtype=dtype)
            self.objects[leaf] = with_local(model, empty, dtype)
            self.destinations[leaf] = _landing(held_of(self.objects[leaf]))
        else:
            self.objects[leaf] = tensors.empty(self._new_dtypes.get(leaf, name), shape)
            self.destinations[leaf] = ((None, destination(self.objects[leaf], name)),)

    def _pair_tensor(self, node: Node | int, target: torch.Tensor, path: str, report: bool) -> None:
        if not isinstance(node, int) and node.type in _MARKS:
            self.pair(node.children[0], target, path, report=report)
            self.keep(node, target)
            return
        if is_distributed(target):
            self._pair_distributed(node, target)
            return
        parts = parts_of(target)
        if isinstance(parts, SplitObject) and parts.type in _MARKS:
            self.pair(node, parts.children[0], path, report=report)
            self.keep(node, target)
        elif isinstance(node, int) and isinstance(parts, torch.Tensor):
            self._pair_strided(node, parts, target, report)
        elif not isinstance(node, int) and isinstance(parts, SplitObject):
            self._pair_composite(node, parts, target, report)
        elif parts is not None:
            raise _Differs

    def _pair_distributed(self, node: Node | int, target: torch.Tensor) -> None:
        """Match the boxes of a leaf that this rank holds in `target`. The leaf may be committed in
        other boxes."""
        held = held_of(target)
        if not isinstance(node, int) or not self._is_like(node, held.shape, held.dtype):
            raise _Differs
        strides = tuple(n for _, part in held.parts for n in part.stride())
        address = held.parts[0][1].data_ptr() if held.parts else 0
        self._claim(Claim(self, node, held.shape, strides), address, _landing(held), target)

    def _pair_strided(
        self, leaf: int, strided: torch.Tensor, target: torch.Tensor, report: bool
    ) -> None:
        """Match `leaf` with `strided`, which is `target` or its strided equivalent. With `report`,
        the target keeps that memory even if the bytes do not land there."""
        dtype, shape = self._converted.get(leaf), strided.shape
        if dtype is not None and strided.dtype == dtype and shape == self.schema.shapes[leaf]:
            self._new_dtypes[leaf] = tensors.DTYPE_NAMES[dtype]
        elif self._is_like(leaf, shape, strided.dtype):
            self._new_dtypes.pop(leaf, None)
        else:
            raise _Differs
        if not tensors.is_writable_by_range(strided):
            return
        unchecked = self._matching.unchecked
        to = destination(strided, self.schema.dtypes[leaf], unchecked=unchecked)
        landing = ((None, to),)
        mine = Claim(self, leaf, shape, strided.stride())
        address = strided.data_ptr()
        is_first = self._claim(mine, address, landing, target)
        if address and (is_first or (report and not self.direct[leaf])):
            self._taken.append(LeafTarget(self.schema, leaf, strided))

    def hold(self, node: Node | int, target: Any, path: str) -> None:
        """Record what does not fit since the target holds an object, which is filled in place,
        under two paths that the commit has two contents for."""
        content = partial(self._content, node)  # asked for if the object comes again
        at, known = self._matching.held.setdefault(target, (path, content))
        if known is not content and known() != content():
            kind = type(target).__qualname__
            self.mismatch(path, "a content of its own", f"one {kind} for it and {at}")

    def _content(self, node: Node | int) -> object:
        """Equal for nodes that become equal objects; of a leaf that only a read could compare, what
        is equal to nothing else."""
        if isinstance(node, int):
            found = self.content_of(node)
            shape, dtype = self.schema.shapes[node], self.schema.dtypes[node]
            return (self, node) if found is None else (self.schema.kinds[node], dtype, shape, found)
        children = tuple(map(self._content, node.children))
        return node.type, repr(node.keys), repr(node.attrs), children

    def _claim(self, mine: Claim, address: int, landing: Landing, target: torch.Tensor) -> bool:
        """Let the bytes of a leaf land in `target`, unless other contents have its memory. True for
        the first leaf at this address."""
        # Address 0 means an empty tensor, which shares nothing.
        first = self._claims.setdefault(address, mine) if address else mine
        if first is mine:
            self.destinations[mine.leaf] = landing
        elif not _are_one(first, mine):
            return False
        self.objects[mine.leaf], self.direct[mine.leaf] = target, True
        return first is mine

    def _pair_composite(
        self, node: Node, parts: SplitObject, target: torch.Tensor, report: bool
    ) -> None:
        if parts.type != node.type or is_other(self.schema, node, parts):
            raise _Differs
        places = list(self._places(node, parts))
        if None in places:
            return
        for leaf, component in filter(None, places):
            self._pair_strided(leaf, component, component, report)
        self.keep(node, target)

    def _places(self, node: Node, parts: SplitObject) -> Iterator[tuple[int, torch.Tensor] | None]:
        """Where each leaf of a composite tensor can be restored in place; None for what cannot."""
        if (parts.type, *(parts.keys or ())) != (node.type, *(node.keys or ())) or (
            _form(parts.attrs) != _form(node.attrs)
        ):
            yield None
            return
        there = dict(parts.items())
        for key, child in node.items():
            inner = parts_of(there[key])
            if isinstance(child, Node):
                yield from self._places(child, inner) if isinstance(inner, SplitObject) else (None,)
            elif (
                isinstance(inner, torch.Tensor)
                and self._is_like(child, inner.shape, inner.dtype)
                and tensors.is_writable_by_range(inner)
            ):
                yield child, inner
            else:
                yield None

    def _is_like(self, leaf: int, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        schema = self.schema
        return shape == schema.shapes[leaf] and tensors.DTYPE_NAMES[dtype] == schema.dtypes[leaf]


def _form(attrs: tuple[tuple[str, Any], ...]) -> list[tuple[str, Any]]:
    """The attributes that tell how bytes become a tensor; those beside them can be set."""
    return sorted((name, value) for name, value in attrs if name != ATTRIBUTES)


def _landing(held: Held) -> Landing:
    return tuple((box, Destination(part)) for box, part in held.parts)


def _are_one(first: Claim, mine: Claim) -> bool:
    """Whether both claims have equal contents. Otherwise `mine` gets a tensor of its own, or is
    mismatched."""
    if first[2:] != mine[2:]:
        return False
    if first.root() == mine.root():
        return True
    there, here = first.content(), mine.content()
    if there is not None and here is not None and there != here:
        tied = first.match.schema.paths[first.leaf]
        raise _Differs("a content of its own", f"one tensor for it and {tied}", is_tied=True)
    return here is not None and there == here


def parts_of(target: torch.Tensor) -> SplitObject | torch.Tensor | None:
    """The components of a tensor, or the strided tensor equal to it; None for a lazy parameter.

    Raises `InvalidInput` for an unsupported tensor.
    """
    if type(target) in (torch.Tensor, torch.nn.Parameter) and tensors.is_strided(target):
        return target
    return None if is_lazy(target) else split_tensor(target)


def describe_tensor(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f"{tensor.layout} of "
    return f"{layout}{tensors.DTYPE_NAMES[tensor.dtype]}{list(shape_of(tensor))}"


def describe_node(schema: Schema, node: Node | int) -> str:
    if isinstance(node, int):
        kind = schema.kinds[node]
        return (
            f"{schema.dtypes[node]}{list(schema.shapes[node])}" if kind == "tensor" else f"a {kind}"
        )
    shape = next((values.decode_value(value) for name, value in node.attrs if name == "shape"), "")
    inner = ", ".join(
        describe_node(schema, child) for child in node.children if isinstance(child, int)
    )
    return f"{node.type}{shape} of {inner}"


def is_other(schema: Schema, node: Node, parts: SplitObject) -> bool:
    """Whether shape, dtype or class differ, which a restore must not change silently."""
    there, here = dict(node.attrs), dict(parts.attrs)
    if any(there.get(name) != here.get(name) for name in ("shape", "dtype", "class")):
        return True
    components = dict(parts.items())
    return any(
        isinstance(child, int)
        and key in components
        and schema.dtypes[child] != tensors.DTYPE_NAMES[components[key].dtype]
        for key, child in node.items()
    )
