"""How is a target restored in place? `bind` finds destinations; `finish` loads what was read.

Modules and other objects with `load_state_dict` get a state dict of their own tensors, already
filled. In plain containers, tensors are filled in place and other values replaced.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ckptstore.core.model import Node, Schema
from ckptstore.state import containers, paths, tensors, values
from ckptstore.state.class_registry import TargetClasses
from ckptstore.state.dtype_cast import Converting
from ckptstore.state.flatten import state_of
from ckptstore.state.fsdp1 import ShardedOptimizer
from ckptstore.state.inflate import Inflater, decode_leaf, refuse_pickles
from ckptstore.state.leaves import Destination, HeldDestination
from ckptstore.state.loading import load
from ckptstore.state.match_target import Claim, ContentOf, Mismatch, Pairing
from ckptstore.state.optimizer_ids import ParameterNames
from ckptstore.state.stateful import RNGState, StateDict
from ckptstore.state.target_fit import children_of

__all__ = ["Binding", "Mismatch", "bind"]


def bind(
    target: Any,
    key: str,
    schema: Schema,
    *,
    strict: bool = True,
    allow_pickle: bool = False,
    content_of: ContentOf = lambda leaf: leaf,
    check: Callable[[int], None] = lambda leaf: None,
    claims: dict[int, Claim] | None = None,
    names: ParameterNames | None = None,
    partial: bool = False,
    in_order: bool = False,
    dtype: torch.dtype | None = None,
) -> "Binding":
    """Find the place of every leaf of `schema` in `target`, the object under `key` of an
    application state. Changes nothing.

    With `strict`, a plain container becomes what was committed; without it, entries that only the
    target has stay. Bindings of one restore share `claims`, so that tensors which are tied across
    keys get one content, by `content_of`, or are mismatched, and `names`, by which an optimizer's
    parameters are found; with `in_order`, what is called otherwise is matched in its order. With
    `partial`, `schema` has some leaves only: the target is to keep everything else, and lacks
    nothing. With `dtype`, floating leaves are converted where the target has a tensor of that
    dtype.
    """
    containers.check(schema.skeleton)
    if not allow_pickle:
        refuse_pickles(schema)
    classes = TargetClasses(target)
    pairing = Pairing(
        schema,
        classes,
        content_of,
        {} if claims is None else claims,
        names=names or ParameterNames({key: target}),
        partial=partial,
        in_order=in_order,
        dtype=dtype,
    )
    skeleton = schema.skeleton
    path = paths.segment(key)
    if isinstance(target, torch.nn.Module):
        skeleton = pairing.pair_module(skeleton, target, path)
    elif isinstance(target, Optimizer):
        skeleton = pairing.pair_optimizer(skeleton, target, path)
    elif isinstance(target, StateDict) or not containers.is_stateful(target):
        pairing.pair(skeleton, target, path, report=True)
    else:
        pairing.pair(skeleton, target.state_dict(), path, report=False)
    pairing.complete(check)
    return Binding(
        target, skeleton, pairing, _Settler(schema, pairing, classes, strict, allow_pickle, partial)
    )


class Binding:
    """One key of an application state, ready to take the bytes of a commit.

    `destinations` has, per leaf, where its bytes land (an alias' bytes are those of the leaf it
    shares memory with), or None. `wanted_bytes` are the leaves whose bytes `finish` wants instead.
    `missing`, `unexpected` and `mismatched` say what does not fit; as long as `mismatched` is not
    empty, no bytes may land. `late` bindings are to be finished after all others: they set random
    number generators.
    """

    def __init__(
        self, target: Any, skeleton: Node | int, pairing: Pairing, settler: "_Settler"
    ) -> None:
        self._target, self._skeleton, self._settler = target, skeleton, settler
        self.destinations: list[Destination | Converting | HeldDestination | None] = (
            pairing.destinations
        )
        self.wanted_bytes: list[int] = pairing.wanted_bytes()
        self.missing: list[str] = pairing.missing
        self.unexpected: list[str] = pairing.unexpected
        self.mismatched: list[Mismatch] = pairing.mismatched
        self.late = pairing.late or isinstance(target, RNGState)

    def finish(self, content: Mapping[int, bytes]) -> Any:
        """Hand over: `content` has the bytes of `wanted_bytes`, and every destination is filled. To
        be called once.

        Returns the target, or what replaces it where it cannot be changed (a number, a tuple).
        """
        self._settler.decode(content)
        if containers.is_stateful(self._target) and not isinstance(self._target, StateDict):
            self._settler.load(self._skeleton, self._target)
            return self._target
        return self._settler.settle(self._skeleton, self._target)


class _Settler:
    """Makes objects of leaves and puts them where the target has such: containers keep their
    identity wherever they can."""

    def __init__(
        self,
        schema: Schema,
        pairing: Pairing,
        classes: TargetClasses,
        strict: bool,
        allow_pickle: bool,
        partial: bool,
    ) -> None:
        self._schema, self._pairing, self._classes, self._strict, self._partial = (
            schema,
            pairing,
            classes,
            strict,
            partial,
        )
        self._inflater = Inflater(
            schema, pairing.objects, pairing.kept, classes, allow_pickle=allow_pickle
        )

    def decode(self, content: Mapping[int, bytes]) -> None:
        for i, data in content.items():
            self._pairing.objects[i] = decode_leaf(self._schema, i, data, self._classes)

    def load(self, node: Node | int, target: Any) -> None:
        """Hand the state at `node` to an object with `load_state_dict`; a part of a state within
        the object's own state."""
        target = self._pairing.sharded.get(id(target), target)
        state = (
            self._inflater.inflate(node)
            if not self._partial
            else self._within(
                node,
                target.state_dict() if isinstance(target, ShardedOptimizer) else state_of(target),
            )
        )
        load(target, state, strict=self._strict)

    def _within(self, node: Node | int, state: Any) -> Any:
        filled = self.settle(node, state)
        versions = getattr(state, "_metadata", None)
        if versions is not None and not isinstance(node, int):
            # A module goes by these to bring what an older one committed up to date.
            committed = getattr(self._inflater.inflate(node), "_metadata", {})
            modules = {str(key).rpartition(".")[0] for key in node.keys or ()}
            versions.update((name, entry) for name, entry in committed.items() if name in modules)
        return filled

    def settle(self, node: Node | int, target: Any) -> Any:
        """The object for `node`: `target`, updated if possible, otherwise a new one."""
        if isinstance(node, int):
            return self._settle_leaf(node, target)
        if node is containers.LEFT_OUT:
            return target
        if id(node) in self._pairing.kept:
            return self._pairing.kept[id(node)]
        if node.type == "stateful":
            return self._settle_stateful(node.children[0], target)
        if (
            node.type == "pickle"
            or isinstance(target, torch.Tensor)
            or containers.copies(node.type)
        ):
            return _overwrite(target, self._inflater.inflate(node))
        children = [
            self.settle(child, below)
            for child, below in zip(
                node.children, children_of(node, target, self._classes), strict=True
            )
        ]
        if node.type in containers.MAPPINGS and isinstance(target, dict):
            return self._fill_mapping(target, node, children)
        if node.type == "list" and type(target) is list:
            target[:] = children
            return target
        if containers.refill(target, node, children, self._classes):
            return target
        return containers.join(node, children, self._classes)

    def _settle_leaf(self, leaf: int, target: Any) -> Any:
        made = self._pairing.objects[leaf]
        if type(made) is list and type(target) is list:
            target[:] = made
            return target
        return made if self._pairing.direct[leaf] else _overwrite(target, made)

    def _settle_stateful(self, node: Node | int, target: Any) -> Any:
        if isinstance(target, StateDict) or not containers.is_stateful(target):
            return self.settle(node, target)
        self.load(self._pairing.narrowed.get(id(node), node), target)
        return target

    def _fill_mapping(
        self, target: dict[Any, Any], node: Node, children: list[Any]
    ) -> dict[Any, Any]:
        keys = [values.decode_key(key, self._classes) for key in node.keys or ()]
        if self._strict and not self._partial:
            target.clear()
        for key, child in zip(keys, children, strict=True):
            target[key] = child
        return target


def _overwrite(target: Any, made: Any) -> Any:
    """`target` with the values of `made` where one tensor takes them from another as they are, else
    `made`."""
    if (
        not _is_block(target)
        or not _is_block(made)
        or target.dtype != made.dtype
        or target.shape != made.shape
    ):
        return made
    if tensors.is_writable_by_range(target):
        tensors.write_range(target, 0, tensors.memory_of(made))
    elif target.is_conj() or target.is_neg():
        with torch.no_grad():
            target.copy_(made)
    else:
        return made
    return target


def _is_block(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and tensors.is_strided(value)
