"""How is a target restored in place? `bind` finds destinations; `finish` loads what was read.

Modules and other objects with `load_state_dict` get a state dict of their own tensors, already
filled. In plain containers, tensors are filled in place and other values replaced.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from types import MappingProxyType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ckptstore.core.identity import IdentityDict
from ckptstore.core.model import Node, Schema, leaves_of, nodes_of
from ckptstore.core.process import uncollected
from ckptstore.errors import CkptStoreError, InvalidInput
from ckptstore.state import tensors
from ckptstore.state.codecs import containers, values
from ckptstore.state.containers import LEFT_OUT
from ckptstore.state.inflate import (
    Inflater,
    children_of,
    counterparts,
    decode_leaf,
    refuse_pickles,
)
from ckptstore.state.leaf_sources import rows, segment, segments, walk
from ckptstore.state.match_target import ContentOf, Landing, Matching, Mismatch, TensorMatch
from ckptstore.state.optimizer_fit import Committed, Difference, Fitted, fit, scaler_difference
from ckptstore.state.optimizer_forms import ValueOf
from ckptstore.state.optimizers import ParameterNames
from ckptstore.state.stateful import (
    NewStreams,
    RNGState,
    StateDict,
    classes_in,
    extra_states,
    found_in,
    is_stateful,
    own_loading,
    reseeded,
    state_now,
    state_of,
    with_wrappers,
)

_FILLED = (dict, list, deque, set, bytearray)
"""Plain objects that may be filled in place."""


def bind(
    target: Any,
    key: str,
    schema: Schema,
    matching: Matching | None = None,
    *,
    content_of: ContentOf = lambda leaf: leaf,
    value_of: ValueOf = lambda leaf: None,
    check: Callable[[int], None] = lambda leaf: None,
    streams: NewStreams | None = None,
    uncast: Mapping[int, str] = MappingProxyType({}),
) -> "Binding":
    """Find the place of every leaf of `schema` in `target`, the object under `key` of an
    application state. Changes nothing. Bindings of one restore share `matching`.

    `value_of` reads small values that decide what fits. `check` raises for a leaf of implausible
    shape before memory is allocated for it. `streams` are
    the states of generators that this rank begins anew. `uncast` has, by number, the dtypes of
    leaves that were committed in lower precision: they come back in these.
    """
    tensors.check_surroundings()
    containers.check(schema.skeleton)
    matching = matching or Matching(ParameterNames({key: target}))
    if not matching.allow_pickle:
        refuse_pickles(schema)
    tensor_match = TensorMatch(schema, matching, content_of, uncast)
    committed = Committed(schema, value_of, content_of, matching.shape_of)
    binding = Binding(target, committed, matching, tensor_match, streams)
    binding.pair(segment(key), check)
    return binding


class Binding(Inflater):
    """One key of an application state, ready to take the bytes of a commit.

    `destinations` has, per leaf, where its bytes land, if anywhere (an alias' bytes are those of
    the leaf it shares memory with). `wanted_bytes` are the leaves whose bytes `finish` wants
    instead, which `receive` takes. `missing`, `unexpected` and `mismatched` say what does not fit;
    as long as `mismatched` is not empty, no bytes may land. `skipped` stays as it is. `late`
    bindings are to be finished after all others: they set random number generators.
    """

    def __init__(
        self,
        target: Any,
        committed: Committed,
        matching: Matching,
        tensor_match: TensorMatch,
        streams: NewStreams | None,
    ) -> None:
        schema = committed.schema
        super().__init__(
            schema,
            tensor_match.objects,
            allow_pickle=matching.allow_pickle,
            classes=classes_in(target),
            kept=tensor_match.kept,
            clears=matching.strict and not matching.partial,
        )
        self._target, self._matching, self._tensors = target, matching, tensor_match
        self._streams, self._committed = streams, committed
        self._wanted = [not matching.partial] * len(schema)
        for leaf in leaves_of(schema.skeleton) if matching.partial else ():
            self._wanted[leaf] = True
        self._narrowed: IdentityDict[Node | int, Node | int] = IdentityDict()
        self._receivers: IdentityDict[Any, Any] = IdentityDict()
        self._objects: IdentityDict[Node, Any] = IdentityDict()
        self._handed_over: IdentityDict[torch.nn.Module, list[str]] = IdentityDict()
        self._places: IdentityDict[Any, str] = IdentityDict()
        self.destinations: Sequence[Landing] = tensor_match.destinations
        self.mismatched: list[Mismatch] = tensor_match.mismatched
        self.skipped: list[Mismatch] = tensor_match.skipped
        self.wanted_bytes: list[int] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.late = False

    def pair(self, path: str, check: Callable[[int], None]) -> None:
        """Match the target under `path`, and make tensors for the leaves that it has none for."""
        self._pair_state(self._schema.skeleton, self._target, path, report=True)
        within = is_stateful(self._target) and not isinstance(self._target, StateDict)
        self._check_objects(self._schema.skeleton, path, within_state=within)
        for leaf, kind in enumerate(self._schema.kinds):
            if not self._wanted[leaf] or leaf in self._tensors.unread:
                continue
            if kind == "tensor":
                self._tensors.complete(leaf, check)
            else:
                self.wanted_bytes.append(leaf)

    def _pair_state(self, node: Node | int, target: Any, path: str, *, report: bool) -> None:
        """Match the state of an object. What does not fit is recorded for modules, dicts restored
        in place and, with `report`, plain containers."""
        self._places[target] = path
        # A module's tensors are asked one by one.
        if not isinstance(target, torch.nn.Module) and (
            isinstance(target, _FILLED) or is_stateful(target)
        ):
            self._tensors.hold(node, target, path)
        if isinstance(target, torch.nn.Module):
            self._narrowed[node] = self._pair_module(node, target, path)
        elif isinstance(target, Optimizer):
            self._narrowed[node] = self._pair_optimizer(node, target, path)
        elif isinstance(target, StateDict):
            self._pair(node, target, path, report=True)
        else:
            self.late |= isinstance(target, RNGState)
            self._differ(path, scaler_difference(node, target))
            report = report and not is_stateful(target)
            self._pair(node, state_now(target), path, report=report)

    def _pair(self, node: Node | int, target: Any, path: str, *, report: bool) -> None:
        """Match the leaves below `node` with tensors of `target`."""
        if node is LEFT_OUT:
            return
        if isinstance(target, torch.Tensor):
            self._tensors.pair(node, target, path, report=report)
        elif isinstance(node, int):
            return
        elif node.type == "stateful":
            if is_stateful(target):
                self._objects[node] = target
            self._pair_state(node.children[0], target, path, report=False)
        elif containers.is_wrapper(node.type):
            self._pair_array(node, target, path)
        else:
            self._pair_children(node, target, path, report)

    def _pair_module(self, node: Node | int, module: torch.nn.Module, path: str) -> Node | int:
        """Match a module's state dict; returns `node` without the keys that the module lacks."""
        if isinstance(node, int) or node.keys is None:
            kind = type(module).__qualname__
            self._tensors.mismatch(path, "no state dict of a module", kind)
            return node
        state, adapting = state_now(module), own_loading(module)
        if state is None:
            return node
        keys = children_of(node, self._classes)
        lacking, taken = state.keys() - keys.keys(), keys.keys() & state.keys()
        for name in state if lacking and not self._matching.partial else ():
            if name in lacking and not name.startswith(adapting):
                self.missing.append(f"{path}/{segment(name)}")
        if len(taken) < len(keys):
            taken |= {key for key in keys if str(key).startswith(adapting)}
            for key, child in keys.items():
                if key not in taken:
                    self._leave_out(child, _below(path, key))
            node = node.filtered(lambda key, child: values.decode_key(key, self._classes) in taken)
        for name in extra_states(module, taken & state.keys()):
            # Its class alone decides what fits; objects in it are the target's own.
            if self._is_whole(node, name, path) and not _has_objects(keys[name]):
                self._handed_over.setdefault(module, []).append(name)
                del state[name]
        self._pair_items(node, state, path, report=True)
        return node

    def _is_whole(self, node: Node | int, name: str, path: str) -> bool:
        """Whether all leaves of the commit under `name` are in `node`."""
        if not self._matching.partial or not isinstance(node, Node):
            return True
        children = children_of(node, self._classes)
        below = f"{path}/{segment(name)}"
        every = [each for each in self._schema.paths if f"{each}/".startswith(f"{below}/")]
        return len(every) == len([*leaves_of(children[name])])

    def _pair_optimizer(self, node: Node | int, optimizer: Optimizer, path: str) -> Node | int:
        """Match an optimizer's state; returns `node` as the optimizer takes it, without parameters
        it lacks."""
        matching = self._matching
        fitted = fit(
            node,
            optimizer,
            matching.names,
            self._committed,
            matching.renames,
            strict=matching.strict,
            partial=matching.partial,
        )
        self._differ(path, *fitted.differences)
        fitted = replace(fitted, path=path)
        for name, child in fitted.unexpected:
            self._leave_out(child, f"{path}/state/{segment(name)}")
        if not matching.partial:
            self.missing.extend(_parts_below(path, fitted.missing))
        self._tensors.models.update(fitted.models)
        self._receivers[optimizer] = fitted
        self._pair(fitted.skeleton, fitted.state, path, report=False)
        return fitted.skeleton

    def _differ(self, path: str, *differences: Difference | None) -> None:
        """Record what an object of the target would refuse."""
        for part, committed, there, leaf in filter(None, differences):
            below = f"{path}/{part}" if part else path
            place = below if leaf is None else self._schema.paths[leaf]
            self._tensors.mismatch(place, committed, there)

    def _check_objects(self, node: Node | int, path: str, *, within_state: bool) -> None:
        """Record objects in the state of another for which the target's state has none: it would be
        handed a dict in place of its object."""
        node = self._narrowed.get(node, node)
        if isinstance(node, int) or node is LEFT_OUT or not _has_objects(node):
            return
        if node.type == "stateful":
            receiver = self._objects.get(node, None)
            if receiver is None and within_state:
                self._tensors.mismatch(
                    path,
                    "the state of an object, in the state of another",
                    "no object with load_state_dict there; make it before the restore",
                )
            within_state |= receiver is not None and not isinstance(receiver, StateDict)
        for child, below, _ in rows(node, path):
            self._check_objects(child, below, within_state=within_state)

    def _leave_out(self, node: Node | int, path: str) -> None:
        self.unexpected.append(path)
        for leaf in leaves_of(node):
            self._wanted[leaf] = False

    def _pair_array(self, node: Node, target: Any, path: str) -> None:
        """Match a numpy array, to be filled in place. Other shapes and wrappers are replaced, or
        filled later (`in_place`)."""
        if node.type != "numpy.ndarray" or type(target).__module__ != "numpy":
            return
        parts = containers.split(target)
        if not parts or parts.type != node.type:
            return
        (child,), (leaf,) = parts.children, node.children
        self._pair(leaf, child, path, report=False)
        if isinstance(child, torch.Tensor) and child.data_ptr() == target.ctypes.data:
            self._tensors.keep(node, target)

    def _pair_children(self, node: Node, target: Any, path: str, report: bool) -> None:
        partial = self._matching.partial
        if report and not partial and isinstance(target, dict) and node.keys is not None:
            known = children_of(node, self._classes)
            # Values that are no tensors are not reported.
            for key, value in target.items() if target.keys() - known.keys() else ():
                if key not in known:
                    found = found_in(value, _is_reported, (key,))
                    self.missing.extend(reduce(_below, keys, path) for keys, _ in found)
        if partial and LEFT_OUT in node.children and not _has_places(node, target):
            self._tensors.mismatch(
                path,
                f"a {node.type} of {len(node.children)}, of which some are selected",
                f"a {type(target).__qualname__} of others",
            )
        self._pair_items(node, target, path, report=report)

    @uncollected()
    def _pair_items(self, node: Node, target: Any, path: str, *, report: bool) -> None:
        there = counterparts(node, target, self._classes)
        paths = self._schema.paths
        if node.keys is None or set(map(type, node.children)) != {int}:
            items = [(child, at, there(key)) for child, at, key in rows(node, path)]
        else:  # by far the most: leaves, which have their paths
            own: Any = zip(node.keys, node.children, strict=True)
            items = [(leaf, paths[leaf], there(key)) for key, leaf in own]
        if report:
            self._hold_items(items)
        for child, at, below in items:
            if isinstance(child, int):  # by far the most
                if isinstance(below, torch.Tensor):
                    self._tensors.pair(child, below, self._schema.paths[child], report=report)
            elif below is not None or self._matching.partial:
                self._pair(child, below, at, report=report)

    def _hold_items(self, items: Sequence[tuple[Node | int, str, Any]]) -> None:
        """Look at the items of a plain container that are filled in place."""
        kinds = {type(below) for _, _, below in items}
        for child, at, below in items if any(issubclass(kind, _FILLED) for kind in kinds) else ():
            if isinstance(below, _FILLED) and not is_stateful(below):
                self._tensors.hold(child, below, at)

    def receive(self, content: Mapping[int, bytes]) -> None:
        """Take the bytes of `wanted_bytes`. Changes nothing of the target. Raises `InvalidInput`
        for a class or codec that is not known here, with the path."""
        for leaf, data in content.items():
            try:
                made = decode_leaf(self._schema, leaf, data, self._classes)
            except InvalidInput as error:
                raise InvalidInput(f"{self._schema.paths[leaf]}: {error}") from error
            self._tensors.objects[leaf] = made
        self._check_known(self._schema.skeleton)

    def _check_known(self, node: Node | int) -> None:
        """Raise `InvalidInput` for a class or a codec below `node` that is not known here."""
        if isinstance(node, int) or node is LEFT_OUT or node in self._kept:
            return
        leaves = [*leaves_of(node)] if node.attrs else []
        if node.attrs and (not leaves or any(self._wanted[leaf] for leaf in leaves)):
            try:
                containers.check_known(node, self._classes)
            except InvalidInput as error:
                place = self._schema.paths[leaves[0]] if leaves else node.type
                raise InvalidInput(f"{place}: {error}") from error
        for child in node.children:
            if not isinstance(child, int):
                self._check_known(child)

    def finish(self) -> Any:
        """Hand over: every destination is filled, and `receive` was called. To be called once.

        Returns the target, or what replaces it where it cannot be changed (a number, a tuple).
        Raises `InvalidInput`, with the path, if an object refuses its state.
        """
        return self._fill_state(self._schema.skeleton, self._target)

    def replaced_paths(self, key: str) -> list[str]:
        """The paths whose objects could not be filled by `finish`: new ones stand there now."""
        below = [reduce(_below, keys, self._schema.paths[i]) for i, keys in self.replaced_below]
        if not self.replaced:
            return below
        leaves = {node for node in self.replaced if isinstance(node, int)}
        nodes = IdentityDict((node, True) for node in self.replaced if isinstance(node, Node))
        found = [self._schema.paths[leaf] for leaf in sorted(leaves)]
        inner = walk(self._schema.skeleton, segment(key)) if len(nodes) else ()
        return [*found, *below, *(path for node, path in inner if node in nodes)]

    def _receiver(self, node: Node, target: Any) -> Any:
        return self._objects.get(node, target)

    def _fill_state(self, node: Node | int, target: Any) -> Any:
        """Hand the state at `node` to an object with `load_state_dict`; a part of a state within
        the object's own state. Containers are filled."""
        if isinstance(target, StateDict) or not is_stateful(target):
            return self.inflate(node, target)
        node = self._narrowed.get(node, node)
        receiver = self._receivers.get(target, target)
        if not self._matching.partial:
            state = self.inflate(node)
        else:
            own: Any = receiver.receiver if isinstance(receiver, Fitted) else receiver
            noted, state = len(self.replaced), state_of(own)
            for name in self._handed_over.get(own, []):
                del state[name]
            state = self._within(node, state)
            del self.replaced[noted:]  # what is in a state, its object takes from there
        if self._streams and isinstance(target, RNGState) and isinstance(node, Node):
            children = children_of(node, self._classes).items()
            new = [key for key, child in children if self._streams.leaves & {*leaves_of(child)}]
            state = reseeded(state, new, self._streams.seed)
        try:
            _load(receiver, state, strict=self._matching.strict)
        except CkptStoreError:
            raise
        except Exception as error:
            place = self._places.get(target, "the target")
            kind = type(target).__qualname__
            raise InvalidInput(
                f"{place}: {kind} refuses the committed state: {type(error).__name__}: {error}"
            ) from error
        return target

    def _fill_leaf(self, leaf: int, target: Any) -> Any:
        is_there = self._tensors.direct[leaf]
        return self._leaves[leaf] if is_there else super()._fill_leaf(leaf, target)

    def _within(self, node: Node | int, state: Any) -> Any:
        filled = self.inflate(node, state)
        versions = getattr(state, "_metadata", None)
        if versions is not None and isinstance(node, Node):
            # A module goes by these to bring what an older one committed up to date.
            encoded = dict(node.attrs).get("metadata")
            committed = {} if encoded is None else values.decode_value(encoded, self._classes)
            modules = {str(key).rpartition(".")[0] for key in node.keys or ()}
            versions.update((name, entry) for name, entry in committed.items() if name in modules)
        return filled


def places_in(
    app_state: Mapping[str, Any], is_wanted: Callable[[Any], bool]
) -> Iterator[tuple[str, Any]]:
    """The wanted objects in an application state by their paths, outermost only."""
    for key, value in app_state.items():
        for keys, found in found_in(value, is_wanted):
            yield reduce(_below, keys, segment(key)), found


def _has_objects(node: Node | int) -> bool:
    return any(each.type == "stateful" for each in nodes_of(node))


def _has_places(node: Node, target: Any) -> bool:
    """Whether a sequence or record has all items of `node`, so that unselected items can stay."""
    if node.keys is not None:
        return all(hasattr(target, key) for key in node.keys)
    return type(target).__name__ == node.type and len(target) == len(node.children)


def _is_reported(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or is_stateful(value)


def _parts_below(path: str, parts: Sequence[str]) -> Iterator[str]:
    """The paths of parts of an optimizer's state, such as that of a parameter."""
    for part in parts:
        kind, _, name = part.partition("/")
        yield f"{path}/{kind}/{segment(name)}"


def _below(path: str, key: Any) -> str:
    return f"{path}/{segments([values.encode_key(key)])[0]}"


def _load(target: Any, state: Any, *, strict: bool) -> None:
    """`target.load_state_dict(state)`, by torch's function without its side effects."""
    if isinstance(target, Fitted):
        target.load(state, strict=strict)
    elif isinstance(target, torch.nn.Module):
        target.load_state_dict(with_wrappers(target, state), strict=strict)
    else:
        target.load_state_dict(state)
