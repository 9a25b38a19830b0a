"""How does an optimizer take a committed state: which entry for which parameter, and which group's
options for which group?

All of it is decided on skeletons, before a byte is read. What does not fit is a `Difference`, so a
restore is refused while nothing has changed. `Fitted.load` hands the filled state over.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial as partial_of
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from ckptstore.core.model import Node, Schema, Shape, leaves_of
from ckptstore.errors import CkptStoreError, InvalidInput
from ckptstore.state import values
from ckptstore.state.optimizer_forms import Form, Group, ValueOf, form_of, group_node
from ckptstore.state.optimizers import ParameterNames, ShardedOptimizer
from ckptstore.state.parameter_matching import Pairing, Parameter, Sources, by_name, sources_of
from ckptstore.state.stateful import load_optimizer, parameters_of

_OF_PARAMETERS_SHAPE = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "grad_avg"),
        *("square_avg", "acc_delta", "sum", "ax", "prev", "step_size"),
    }
)
"""What torch's own optimizers have in the shape of the parameter."""

_SHOWN = 4

NEXT_STEP = (
    'give their module beside the optimizer, restore({"model": model, "optimizer": optimizer}); '
    'without=["model"] leaves the module as it is'
)

ShapeOf: TypeAlias = Callable[[str], Shape | None]

Follower: TypeAlias = Callable[[], str | None]
"""The class of an object that goes by the order of the optimizer's groups, if there is one."""


class Renames(NamedTuple):
    """The new names of parameters. With `are_in_state`, the keys of the state are new already."""

    new: Mapping[str, str]
    are_in_state: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """What may be asked of a commit before its tensors are read: the bytes of a value, a stand-in
    for the content of a leaf, and the shape of a parameter by its name, where it is known."""

    schema: Schema
    value_of: ValueOf
    content_of: Callable[[int], object]
    shape_of: ShapeOf


class Difference(NamedTuple):
    """What does not fit: the part of the state, or the leaf, what the commit has, and what the
    target has."""

    part: str
    committed: str
    target: str
    leaf: int | None = None


@dataclass(frozen=True, slots=True)
class Fitted:
    """A committed state as a target optimizer takes it.

    `receiver` is what loads it, and `state` what that has now. `models` are the parameters of the
    skeleton's leaves. `unexpected` are the names and nodes of what the target has no parameter for,
    `missing` the parts that the commit does not have. Groups numbered in `kept_groups` keep the
    options that they have. With `is_own_form`, only the optimizer's own `load_state_dict` knows
    what the state means. `path` is that of the optimizer.
    """

    receiver: "Optimizer | ShardedOptimizer"
    state: Any
    skeleton: Node | int
    models: Mapping[int, torch.Tensor] = field(default_factory=dict)
    unexpected: tuple[tuple[str, Node | int], ...] = ()
    missing: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    kept_groups: tuple[int, ...] = ()
    is_own_form: bool = False
    path: str = ""

    def load(self, state: Any, *, strict: bool) -> None:
        """Load `state`, which the skeleton describes. Without `strict`, what it lacks stays.

        Raises `InvalidInput`, naming the path, for whatever the optimizer raises."""
        try:
            self._load(state, strict)
        except CkptStoreError:
            raise
        except Exception as error:
            kind = type(self.receiver).__qualname__
            raise InvalidInput(
                f"{self.path}: {kind} refuses the committed state: {type(error).__name__}: "
                f"{error}; tensors of the target may have the commit's values already: restore "
                f'again with without=["{self.path.partition("/")[0]}"], or with an optimizer that '
                "takes it"
            ) from error

    def _load(self, state: Any, strict: bool) -> None:
        if self.is_own_form:
            self.receiver.load_state_dict(state)
            return
        if self.kept_groups or not strict:
            own = self.receiver.state_dict()
            kept = {number: own["param_groups"][number] for number in self.kept_groups}
            groups = [kept.get(n, group) for n, group in enumerate(state["param_groups"])]
            entries = state["state"] if strict else {**own["state"], **state["state"]}
            state = {**state, "state": entries, "param_groups": groups}
        if isinstance(self.receiver, Optimizer):
            load_optimizer(self.receiver, state)
        else:
            self.receiver.load_state_dict(state)


def fit(
    skeleton: Node | int,
    optimizer: Optimizer,
    names: ParameterNames,
    committed: Committed,
    renames: Renames | None = None,
    *,
    strict: bool = True,
    partial: bool = False,
) -> Fitted:
    """A committed state for `optimizer`, with what does not fit.

    Parameters are found by name, by that of `renames` if it has one, and groups by their
    parameters. With `renames`, or if no name is known, those without a counterpart are matched in
    their order, if shapes prove it. Numbers go by position, as in torch. With `partial`, only some
    leaves are selected, and what is not stays as it is.
    """
    form, sharded = form_of(skeleton, committed.value_of), names.sharded(optimizer)
    if form is None or form.is_numbered or form.is_flat_memory():
        sharded = None
    receiver = sharded or optimizer
    state = receiver.state_dict()
    if not _is_torchs(state):
        return Fitted(receiver, state, skeleton, is_own_form=True)
    if form is None or not (partial or (form.state is not None and form.groups is not None)):
        return Fitted(receiver, state, skeleton, differences=(_other_form(skeleton, optimizer),))
    target = _Target.of(optimizer, sharded, state, names)
    fitting = _Fitting(form, target, committed, renames, strict, partial)
    if _goes_by_name(form, target):
        return fitting.by_name(receiver, state, partial_of(names.follower, optimizer))
    return fitting.by_position(receiver, state)


def scaler_difference(skeleton: Node | int, target: Any) -> Difference | None:
    """What a `GradScaler` refuses: the empty state of a disabled one, if it is enabled."""
    is_empty = isinstance(skeleton, Node) and not skeleton.children
    if not is_empty or not isinstance(target, torch.amp.GradScaler) or not target.is_enabled():
        return None
    return Difference(
        "",
        "the empty state of a disabled GradScaler",
        "an enabled one: pass without=[…] to begin with the scale that it has",
    )


def _is_torchs(state: Any) -> bool:
    """Whether this is of the form that torch gives an optimizer's state."""
    return (
        isinstance(state, Mapping)
        and isinstance(state.get("state"), Mapping)
        and isinstance(state.get("param_groups"), list)
    )


def _other_form(skeleton: Node | int, optimizer: Optimizer) -> Difference:
    keys = skeleton.keys if isinstance(skeleton, Node) else None
    shown = ", ".join(map(str, (keys or ())[:_SHOWN])) or "no keys"
    return Difference(
        "",
        f"another form of state ({shown})",
        f"{type(optimizer).__qualname__}, which takes a dict of state and param_groups: pass "
        "without=[…] to leave it as it is, or read the state with state_dict() and convert it",
    )


def _goes_by_name(form: Form, target: "_Target") -> bool:
    names = form.names()
    if form.groups is None or not form.is_named or len(names) > len({*names}):
        return False
    # Names that an optimizer was given beside its numbers may have prefixes that the target's lack.
    return not form.is_numbered or {*names} == {*target.names}


class _Target(NamedTuple):
    """The parameters of a target optimizer in their order: their names ("" if not known), the keys
    that its state has for them, the tensors, their shapes, and the groups by their numbers. If it
    `goes_by_order`, one row of numbers is for all of its parameters."""

    names: tuple[str, ...]
    keys: tuple[int | str, ...]
    tensors: tuple[torch.Tensor | None, ...]
    shapes: tuple[Shape | None, ...]
    groups: tuple[tuple[int, ...], ...]
    options: tuple[Mapping[str, Any], ...]
    has_torchs_moments: bool
    goes_by_order: bool

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        sharded: ShardedOptimizer | None,
        state: Mapping[str, Any],
        names: ParameterNames,
    ) -> "_Target":
        options = tuple(state["param_groups"])
        if sharded is not None:
            listed = [list(group["params"]) for group in options]
            own = tuple(chain.from_iterable(listed))
            tensors = tuple(sharded.models.get(name) for name in own)
            return cls(
                own,
                own,
                tensors,
                (None,) * len(own),
                _divided(map(len, listed)),
                options,
                has_torchs_moments=False,
                goes_by_order=False,
            )
        parameters = parameters_of(optimizer)
        inner = getattr(optimizer, "optimizer", None)  # as Accelerate's has one
        stepping = inner if isinstance(inner, Optimizer) else optimizer
        found = names.of(optimizer) or _given_names(optimizer)
        return cls(
            tuple(chain.from_iterable(found)) if found else ("",) * len(parameters),
            tuple(range(len(parameters))),
            tuple(parameters),
            tuple(None if is_lazy(each) else tuple(each.shape) for each in parameters),
            _divided(len(group["params"]) for group in optimizer.param_groups),
            options,
            has_torchs_moments=type(stepping).__module__.startswith("torch.optim."),
            goes_by_order=isinstance(stepping, torch.optim.LBFGS),
        )


def _given_names(optimizer: Optimizer) -> list[list[str]] | None:
    """The names that the optimizer was given with its parameters, if it was given all."""
    found = [list(group.get("param_names") or ()) for group in optimizer.param_groups]
    flat = list(chain.from_iterable(found))
    is_whole = [len(group["params"]) for group in optimizer.param_groups] == list(map(len, found))
    return found if is_whole and len(flat) == len(set(flat)) else None


def _divided(counts: Any) -> tuple[tuple[int, ...], ...]:
    found: list[tuple[int, ...]] = []
    first = 0
    for count in counts:
        found.append(tuple(range(first, first + count)))
        first += count
    return tuple(found)


class _Fitting:
    """A committed state and a target on their way to one another."""

    def __init__(
        self,
        form: Form,
        target: _Target,
        committed: Committed,
        renames: Renames | None,
        strict: bool,
        partial: bool,
    ) -> None:
        self._form, self._target, self._committed = form, target, committed
        self._renames, self._strict, self._partial = renames, strict, partial
        self._groups: Sequence[Group] = form.groups or ()
        self._differences: list[Difference] = []
        entries = () if form.state is None else form.state.items()
        self._entries = {key: child for key, child in entries if _is_plain(key)}
        self._keys: list[Any] = [key for group in self._groups for key in group.params or ()]

    def by_name(
        self, receiver: "Optimizer | ShardedOptimizer", state: Any, follower: Follower
    ) -> Fitted:
        """Entries and options by the names of parameters."""
        new = self._renames.new if self._renames else {}
        names = self._form.names()
        renamed = [new.get(name, name) for name in names]
        keys = self._keys
        if self._renames and self._renames.are_in_state:
            keys = self._keys = renamed
        pairing = self._paired(names, renamed)
        target = self._target
        key_of = {keys[there]: target.keys[here] for here, there in pairing.committed.items()}
        models = {target.keys[here]: target.tensors[here] for here in pairing.committed}
        if not pairing.contradicted:
            shapes = {keys[there]: target.shapes[n] for n, there in pairing.committed.items()}
            self._check_shapes(shapes)
        if target.goes_by_order and any(a != b for a, b in pairing.committed.items()):
            self._differences.append(
                Difference(
                    "state",
                    f"one row for the parameters {_shown(names)}",
                    f"them in another order ({_shown(target.names)}): give them in that of the "
                    "commit",
                )
            )
        groups, kept, lacking = self._arranged_groups(pairing, follower)
        inner = self._under_new_keys(key_of)
        left = [keys[n] for n in pairing.left]
        free = (f"state/{target.names[n] or n}" for n in pairing.free)
        return Fitted(
            receiver,
            state,
            self._form.arranged(inner, groups),
            _models(inner, models),
            tuple((str(key), self._entries[key]) for key in left if key in self._entries),
            (*free, *lacking),
            tuple(self._differences),
            () if self._partial else kept,
        )

    def _under_new_keys(self, key_of: Mapping[Any, int | str]) -> Node | None:
        """The state of the parameters in `key_of`, under the target's keys. What is of no parameter
        at all, as some optimizers have it, stays under its own."""
        state, gone = self._form.state, frozenset(self._keys) - key_of.keys()
        if state is None:
            return None
        taken = state.filtered(lambda key, child: not (_is_plain(key) and key in gone))
        own = (key_of.get(key, key) if _is_plain(key) else key for key in taken.keys or ())
        return Node("dict", taken.children, tuple(own))

    def by_position(self, receiver: "Optimizer | ShardedOptimizer", state: Any) -> Fitted:
        """Entries and options by their numbers, where groups are the same."""
        target = self._target
        counts = [None if g.params is None else len(g.params) for g in self._groups]
        sizes = [len(group) for group in target.groups]
        if self._form.groups is not None and (
            len(counts) != len(sizes)
            or any(n not in (None, m) for n, m in zip(counts, sizes, strict=True))
        ):
            self._differ("the commit has no names for its parameters, so that position decides")
        keys = list(target.keys) if None in counts or not counts else self._keys
        stranger = next(
            (key for key in self._entries if type(key) is int and key not in keys), None
        )
        if self._partial and stranger is not None:
            self._differences.append(
                Difference(
                    "state", f"state of parameter {stranger}", f"{len(keys)} parameters, from 0"
                )
            )
        self._check_shapes(dict(zip(keys, target.shapes, strict=False)))
        models = dict(zip(keys, target.tensors, strict=False))
        return Fitted(
            receiver,
            state,
            self._form.skeleton,
            _models(self._form.state, models),
            differences=tuple(self._differences),
        )

    def _paired(self, names: Sequence[str], renamed: Sequence[str]) -> Pairing:
        target, common = self._target, {*renamed} & {*self._target.names}
        in_order = (self._renames is not None or not common) and not self._is_sharded
        is_by_shape = in_order and len(common) < len(target.names)
        groups = [number for number, group in enumerate(self._groups) for _ in group.params or ()]
        shape_of = self._shape_of if is_by_shape else lambda name, key: None
        committed = [
            Parameter(new, group, shape_of(name, key), key in self._entries)
            for name, new, key, group in zip(names, renamed, self._keys, groups, strict=True)
        ]
        here = [
            Parameter(name, shape=shape)
            for name, shape in zip(target.names, target.shapes, strict=True)
        ]
        pairing = by_name(
            committed, here, in_order=in_order, have_equal_options=self._have_equal_options
        )
        if pairing.contradicted:
            one, there = pairing.contradicted
            self._differences.append(
                Difference(
                    "state",
                    f"{one.name} of shape {list(one.shape or ())}",
                    f"a parameter of shape {list(there.shape or ())} in its place, "
                    f"{_known(target.names)}: {NEXT_STEP}",
                )
            )
        elif pairing.unproven:
            names_alike = " and ".join(each.name for each in pairing.unproven)
            self._differences.append(
                Difference(
                    "state",
                    f"{names_alike} among its parameters, alike in shape",
                    f"parameters {_known(target.names)}, so that their order cannot be proven: "
                    f"{NEXT_STEP}",
                )
            )
        elif pairing.free and not any(target.names):
            self._differences.append(
                Difference(
                    "state",
                    f"{len(committed)} parameters ({_shown(names)})",
                    f"{len(here)} without names: {NEXT_STEP}",
                )
            )
        return pairing

    @property
    def _is_sharded(self) -> bool:
        return any(isinstance(key, str) for key in self._target.keys)

    def _shape_of(self, name: str, key: Any) -> Shape | None:
        """The shape of a committed parameter: as its module was committed, or as that of its
        moments."""
        shape = self._committed.shape_of(name)
        moments = (self._committed.schema.shapes[leaf] for leaf in self._moments(key))
        return next(moments, None) if shape is None else shape

    def _moments(self, key: Any) -> list[int]:
        """The leaves that one of torch's optimizers has in the shape of the parameter."""
        entry = self._entries.get(key)
        if not self._target.has_torchs_moments or not isinstance(entry, Node):
            return []
        kinds = self._committed.schema.kinds
        return [
            leaf
            for name, leaf in entry.items()
            if name in _OF_PARAMETERS_SHAPE and isinstance(leaf, int) and kinds[leaf] == "tensor"
        ]

    def _check_shapes(self, wanted: Mapping[Any, Shape | None]) -> None:
        """Refuse moments in another shape than that of the parameter that they would go to."""
        schema = self._committed.schema
        for key, shape in wanted.items():
            for leaf in self._moments(key):
                if shape is not None and schema.shapes[leaf] != shape:
                    there = f"{schema.dtypes[leaf]}{list(schema.shapes[leaf])}"
                    self._differences.append(
                        Difference("", there, f"a parameter of shape {list(shape)}", leaf)
                    )

    def _arranged_groups(
        self, pairing: Pairing, follower: Follower
    ) -> tuple[list[Node], tuple[int, ...], list[str]]:
        """A node for each group of the target, the groups that keep their options, and parts that
        the commit has no options for."""
        target, numbers = self._target, iter(range(len(self._form.names())))
        committed = [[next(numbers) for _ in group.params or ()] for group in self._groups]
        sources = sources_of(committed, target.groups, pairing.committed, self._have_equal_options)
        foreign = self._foreign_groups(pairing)
        reason = self._why_groups_differ(sources, foreign, follower) if self._has_options else None
        if reason:
            self._differ(reason)
        lacking = sorted({*sources.conflicts, *foreign})
        of_group = [
            None if here in lacking else there for here, there in enumerate(sources.of_group)
        ]
        nodes = [
            group_node(
                Node("dict", (), ()) if there is None else self._groups[there].options,
                [target.keys[n] for n in group],
            )
            for group, there in zip(target.groups, of_group, strict=True)
        ]
        kept = tuple(here for here, there in enumerate(of_group) if there is None)
        return nodes, kept, [] if reason else [f"param_groups/{here}" for here in lacking]

    def _why_groups_differ(
        self, sources: Sources, foreign: Sequence[int], follower: Follower
    ) -> str | None:
        """Why the commit's groups do not fit the target's, with the next step; None if they do."""
        is_divided = self._form.is_divided
        moved = any(there not in (None, here) for here, there in enumerate(sources.of_group))
        if moved and is_divided and (kind := follower()):
            return f"{kind} goes by the order of groups: give them in the order of the commit"
        if not self._strict:
            return None
        if foreign:
            return (
                "ranks had other options under one number, and not all of these parameters were "
                "on this rank; strict=False leaves the options of such a group as they are"
            )
        is_same = sources.is_same and not self._loses_options(sources)
        if sources.conflicts or (is_divided and not is_same and not self._partial):
            return (
                "strict=False brings the state over by the names of parameters, and options where "
                "all parameters of a group had the same"
            )
        return None

    def _loses_options(self, sources: Sources) -> bool:
        """Whether nobody takes the options of a group, and it has no state that would be missed."""
        keys = iter(self._keys)
        own = [[next(keys) for _ in group.params or ()] for group in self._groups]
        return any(
            number not in sources.of_group and group and self._entries.keys().isdisjoint(group)
            for number, group in enumerate(own)
        )

    def _foreign_groups(self, pairing: Pairing) -> list[int]:
        """The target's groups with parameters whose options another rank had."""
        is_known = [
            group.own_names is None or name in group.own_names
            for group in self._groups
            for name in group.names or ()
        ]
        pairs = pairing.committed
        return [
            number
            for number, group in enumerate(self._target.groups)
            if not all(is_known[pairs[n]] for n in group if n in pairs)
        ]

    @property
    def _has_options(self) -> bool:
        return any(group.options.children for group in self._groups)

    def _have_equal_options(self, one: int | None, other: int | None) -> bool:
        if one == other:
            return True
        if one is None or other is None:
            return False
        found = [self._content(self._groups[number].options) for number in (one, other)]
        return bool(found[0] == found[1])

    def _content(self, node: Node | int) -> object:
        """Equal for equal options; equal to nothing where only a read could tell."""
        if isinstance(node, int):
            content = self._committed.content_of(node)
            schema = self._committed.schema
            return object() if content is None else (schema.dtypes[node], content)
        children = tuple(map(self._content, node.children))
        if node.keys is None:
            return node.type, children
        return node.type, dict(zip(map(str, node.keys), children, strict=True))

    def _differ(self, reason: str) -> None:
        there = [self._described(group) for group in self._groups]
        names = iter(self._target.names)
        here = []
        for group, options in zip(self._target.groups, self._target.options, strict=True):
            own = [next(names) for _ in group]
            here.append((own if all(own) else [f"{len(own)} parameters"], dict(options)))
        shown = {
            key
            for sides in (there, here)
            for _, options in sides
            for key in options
            if len({repr(each.get(key, "")) for _, each in sides}) > 1
        } - {"params", "param_names"}
        self._differences.append(
            Difference(
                "param_groups",
                _listed_groups(there, shown),
                f"{_listed_groups(here, shown)}: groups differ: {reason}",
            )
        )

    def _described(self, group: Group) -> tuple[list[str], dict[str, Any]]:
        """The names and the plain options of a group, as far as they can be had without tensors."""
        options = {}
        for key, leaf in group.options.items():
            if isinstance(leaf, int) and self._committed.schema.kinds[leaf] == "value":
                data = self._committed.value_of(leaf)
                if data is not None:
                    options[str(key)] = values.decode_leaf(data)
        count = "?" if group.params is None else len(group.params)
        return list(group.names or [f"{count} parameters"]), options


def _listed_groups(
    groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]], shown: set[str]
) -> str:
    found = []
    for number, (names, options) in enumerate(groups[:_SHOWN]):
        own = "".join(f", {key}={value!r:.40}" for key, value in options.items() if key in shown)
        found.append(f"{number}: {_shown(names)}{own}")
    more = "; …" if len(groups) > _SHOWN else ""
    return f"{len(groups)} group{'s' * (len(groups) != 1)} ({'; '.join(found)}{more})"


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _known(names: Sequence[str]) -> str:
    return f"of other names ({_shown(names)})" if any(names) else "without names"


def _is_plain(key: Any) -> bool:
    """Whether an encoded key is a text or a number. Others are lists."""
    return isinstance(key, int | str)


def _models(
    state: Node | None, models: Mapping[Any, torch.Tensor | None]
) -> dict[int, torch.Tensor]:
    """The parameter of each leaf."""
    return {
        leaf: model
        for key, child in (state.items() if state is not None else ())
        if _is_plain(key) and (model := models.get(key)) is not None
        for leaf in leaves_of(child)
    }
