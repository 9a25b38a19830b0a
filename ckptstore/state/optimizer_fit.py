"""How does an optimizer take a committed state: which entry for which parameter, and which group's
options for which group?

All of it is decided on skeletons, before a byte is read. What does not fit is a `Difference`, so a
restore is refused while nothing has changed. `Fitted.load` hands the filled state over.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial as partial_of
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from ckptstore.core.identity import IdentityDict
from ckptstore.core.model import Node, Schema, Shape, leaves_of
from ckptstore.errors import CkptStoreError, InvalidInput
from ckptstore.state.checkpointable import MARK
from ckptstore.state.codecs import values
from ckptstore.state.optimizer_forms import Form, Group, ValueOf, form_of, group_node
from ckptstore.state.optimizers import ParameterNames, ShardedOptimizer
from ckptstore.state.parameter_matching import (
    Pairing,
    Parameter,
    Sources,
    by_group,
    by_name,
    sources_of,
)
from ckptstore.state.shards import shape_of
from ckptstore.state.stateful import load_optimizer, optimizer_state_of, parameters_of

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
    state = optimizer_state_of(optimizer) if sharded is None else sharded.state_dict()
    if not _is_torchs(state):
        return Fitted(receiver, state, skeleton, is_own_form=True)
    if form is None or not (partial or (form.state is not None and form.groups is not None)):
        return Fitted(receiver, state, skeleton, differences=(_other_form(skeleton, optimizer),))
    target = (
        _Target.of(optimizer, state, names)
        if sharded is None
        else _Target.of_sharded(sharded, state)
    )
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
    names = [each.name for each in form.parameters]
    if form.groups is None or not form.is_named or len(names) > len({*names}):
        return False
    # Names that an optimizer was given beside its numbers may have prefixes that the target's lack.
    return not form.is_numbered or {*names} == {each.name for each in target.parameters}


class _Target(NamedTuple):
    """The parameters of a target optimizer in their order, and of each group, by its number, the
    parameters and the options. If it `goes_by_order`, one row of numbers is for all of its
    parameters."""

    parameters: tuple[Parameter, ...]
    groups: Mapping[int, Sequence[Parameter]]
    options: Mapping[int, Mapping[str, Any]]
    has_torchs_moments: bool = False
    goes_by_order: bool = False

    @classmethod
    def of_sharded(cls, sharded: ShardedOptimizer, state: Mapping[str, Any]) -> "_Target":
        options = dict(enumerate(state["param_groups"]))
        listed = [(group, name) for group, each in options.items() for name in each["params"]]
        parameters = tuple(
            Parameter(n, name, name, group, tensor=sharded.models.get(name))
            for n, (group, name) in enumerate(listed)
        )
        return cls(parameters, by_group(parameters, len(options)), options)

    @classmethod
    def of(cls, optimizer: Optimizer, state: Mapping[str, Any], names: ParameterNames) -> "_Target":
        inner = getattr(optimizer, "optimizer", None)  # as Accelerate's has one
        stepping = inner if isinstance(inner, Optimizer) else optimizer
        found = names.of(optimizer) or _given_names(optimizer)
        groups = optimizer.param_groups
        listed = [(number, each) for number, group in enumerate(groups) for each in group["params"]]
        parameters = tuple(
            Parameter(
                n,
                n,
                found.get(each, ""),
                group,
                None
                if is_lazy(each)
                else shape_of(each)
                if hasattr(each, MARK)
                else tuple(each.shape),
                tensor=each,
            )
            for n, (group, each) in enumerate(listed)
        )
        return cls(
            parameters,
            by_group(parameters, len(groups)),
            dict(enumerate(state["param_groups"])),
            has_torchs_moments=type(stepping).__module__.startswith("torch.optim."),
            goes_by_order=isinstance(stepping, torch.optim.LBFGS),
        )


def _given_names(optimizer: Optimizer) -> IdentityDict[torch.Tensor, str]:
    """The names that the optimizer was given with its parameters, if it was given all."""
    given = [(group["params"], group.get("param_names") or ()) for group in optimizer.param_groups]
    found = [
        row for group in given if len({*map(len, group)}) == 1 for row in zip(*group, strict=True)
    ]
    is_whole = len(found) == len(parameters_of(optimizer)) == len({name for _, name in found})
    return IdentityDict(found if is_whole else ())


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
        self._renames, self._new_names = renames, renames.new if renames else {}
        self._strict, self._partial = strict, partial
        self._groups: Sequence[Group] = form.groups or ()
        self._differences: list[Difference] = []
        entries = () if form.state is None else form.state.items()
        self._entries = {key: child for key, child in entries if _is_plain(key)}
        self._parameters = form.parameters

    def by_name(
        self, receiver: "Optimizer | ShardedOptimizer", state: Any, follower: Follower
    ) -> Fitted:
        """Entries and options by the names of parameters."""
        target, pairing = self._target, self._paired()
        if not pairing.contradicted:
            self._check_shapes({one.key: there for one, there in pairing.pairs})
        if target.goes_by_order and any(one.number != here.number for one, here in pairing.pairs):
            self._differences.append(
                Difference(
                    "state",
                    f"one row for the parameters {_shown(self._form.parameters)}",
                    f"them in another order ({_shown(target.parameters)}): give them in that of "
                    "the commit",
                )
            )
        groups, kept, lacking = self._arranged_groups(pairing, follower)
        inner = self._under_new_keys({one.key: there.key for one, there in pairing.pairs})
        left = [(one.key, self._entries[one.key]) for one in pairing.left if one.has_state]
        free = (f"state/{each.name or each.number}" for each in pairing.free)
        return Fitted(
            receiver,
            state,
            self._form.arranged(inner, groups),
            _models(inner, {there.key: there for _, there in pairing.pairs}),
            tuple((str(key), entry) for key, entry in left),
            (*free, *lacking),
            tuple(self._differences),
            () if self._partial else kept,
        )

    def _under_new_keys(self, key_of: Mapping[Any, int | str]) -> Node | None:
        """The state of the parameters in `key_of`, under the target's keys. What is of no parameter
        at all, as some optimizers have it, stays under its own."""
        state, gone = self._form.state, {each.key for each in self._parameters} - key_of.keys()
        if state is None:
            return None
        return Node("dict", ()).of(
            (key_of.get(key, key) if _is_plain(key) else key, child)
            for key, child in state.items()
            if not (_is_plain(key) and key in gone)
        )

    def by_position(self, receiver: "Optimizer | ShardedOptimizer", state: Any) -> Fitted:
        """Entries and options by their numbers, where groups are the same."""
        target = self._target
        is_same = len(self._groups) == len(target.groups) and all(
            group.parameters is None or len(group.parameters) == len(target.groups[group.number])
            for group in self._groups
        )
        are_known = all(group.parameters is not None for group in self._groups)
        if self._form.groups is not None and not is_same:
            self._differ("the commit has no names for its parameters, so that position decides")
        own = self._parameters if self._groups and are_known else target.parameters
        keys = {each.key for each in own}
        stranger = next(
            (key for key in self._entries if type(key) is int and key not in keys), None
        )
        if self._partial and stranger is not None:
            self._differences.append(
                Difference(
                    "state", f"state of parameter {stranger}", f"{len(keys)} parameters, from 0"
                )
            )
        numbered = {each.number: each for each in target.parameters}
        models = {each.key: numbered[each.number] for each in own if each.number in numbered}
        self._check_shapes(models)
        return Fitted(
            receiver,
            state,
            self._form.skeleton,
            _models(self._form.state, models),
            differences=tuple(self._differences),
        )

    def _new_name(self, parameter: Parameter) -> str:
        return self._new_names.get(parameter.name, parameter.name)

    def _paired(self) -> Pairing:
        here, old = self._target.parameters, self._form.parameters
        common = {*map(self._new_name, old)} & {each.name for each in here}
        in_order = (self._renames is not None or not common) and not self._is_sharded
        is_by_shape = in_order and len(common) < len(here)
        self._parameters = [self._renamed(each, is_by_shape) for each in old]
        pairing = by_name(
            self._parameters,
            here,
            in_order=in_order,
            have_equal_options=self._have_equal_options,
        )
        found = None
        if pairing.contradicted:
            one, there = pairing.contradicted
            found = (
                f"{one.name} of shape {list(one.shape or ())}",
                f"a parameter of shape {list(there.shape or ())} in its place, {_known(here)}",
            )
        elif pairing.unproven:
            names_alike = " and ".join(each.name for each in pairing.unproven)
            found = (
                f"{names_alike} among its parameters, alike in shape",
                f"parameters {_known(here)}, so that their order cannot be proven",
            )
        elif pairing.free and not any(each.name for each in here):
            found = (f"{len(old)} parameters ({_shown(old)})", f"{len(here)} without names")
        if found:
            self._differences.append(Difference("state", found[0], f"{found[1]}: {NEXT_STEP}"))
        return pairing

    def _renamed(self, parameter: Parameter, is_by_shape: bool) -> Parameter:
        """A committed parameter under the name and the key that the target has for it, with its
        shape where that decides."""
        name, key = self._new_name(parameter), parameter.key
        if self._renames and self._renames.are_in_state:
            key = name
        shape = self._shape_of(parameter.name, key) if is_by_shape else None
        has_state, is_own = key in self._entries, parameter.has_own_options
        return Parameter(parameter.number, key, name, parameter.group, shape, has_state, is_own)

    @property
    def _is_sharded(self) -> bool:
        return any(isinstance(each.key, str) for each in self._target.parameters)

    def _shape_of(self, name: str, key: int | str) -> Shape | None:
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

    def _check_shapes(self, wanted: Mapping[int | str, Parameter]) -> None:
        """Refuse moments in another shape than that of the parameter that they would go to."""
        schema = self._committed.schema
        for key, parameter in wanted.items():
            shape = parameter.shape
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
        target, pairs = self._target, pairing.pairs
        empty = [group.number for group in self._groups if not group.parameters]
        sources = sources_of(empty, target.groups, pairs, self._have_equal_options)
        # Another rank had the options of some of their parameters.
        foreign = sorted({there.group for one, there in pairs if not one.has_own_options})
        reason = self._why_groups_differ(sources, foreign, follower) if self._has_options else None
        if reason:
            self._differ(reason)
        lacking = sorted({*sources.conflicts, *foreign})
        of_group = {
            here: None if here in lacking else there for here, there in sources.of_group.items()
        }
        nodes = [
            group_node(
                Node("dict", (), ()) if there is None else self._groups[there].options,
                [each.key for each in target.groups[here]],
            )
            for here, there in of_group.items()
        ]
        kept = tuple(here for here, there in of_group.items() if there is None)
        return nodes, kept, [] if reason else [f"param_groups/{here}" for here in lacking]

    def _why_groups_differ(
        self, sources: Sources, foreign: Sequence[int], follower: Follower
    ) -> str | None:
        """Why the commit's groups do not fit the target's, with the next step; None if they do."""
        is_divided = self._form.is_divided
        moved = any(there not in (None, here) for here, there in sources.of_group.items())
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
        taken = {*sources.of_group.values()}
        return any(
            number not in taken and group and not any(each.has_state for each in group)
            for number, group in by_group(self._parameters, len(self._groups)).items()
        )

    @property
    def _has_options(self) -> bool:
        return any(group.options.children for group in self._groups)

    def _have_equal_options(self, one: int, other: int) -> bool:
        if one == other:
            return True
        found = [self._content(self._groups[number].options) for number in (one, other)]
        return bool(found[0] == found[1])

    def _content(self, node: Node | int) -> object:
        """Equal for equal options; equal to nothing where only a read could tell."""
        if isinstance(node, int):
            content = self._committed.content_of(node)
            schema = self._committed.schema
            return object() if content is None else (schema.dtypes[node], content)
        return node.type, {str(key): self._content(child) for key, child in node.items()}

    def _differ(self, reason: str) -> None:
        there = [self._described(group) for group in self._groups]
        target = self._target
        here = [
            (_shown(group), dict(target.options.get(number, {})))
            for number, group in target.groups.items()
        ]
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

    def _described(self, group: Group) -> tuple[str, dict[str, Any]]:
        """The names and the plain options of a group, as far as they can be had without tensors."""
        options = {}
        for key, leaf in group.options.items():
            if isinstance(leaf, int) and self._committed.schema.kinds[leaf] == "value":
                data = self._committed.value_of(leaf)
                if data is not None:
                    options[str(key)] = values.decode_leaf(data)
        return "? parameters" if group.parameters is None else _shown(group.parameters), options


def _listed_groups(groups: Sequence[tuple[str, Mapping[str, Any]]], shown: set[str]) -> str:
    found = []
    for number, (parameters, options) in enumerate(groups[:_SHOWN]):
        own = "".join(f", {key}={value!r:.40}" for key, value in options.items() if key in shown)
        found.append(f"{number}: {parameters}{own}")
    more = "; …" if len(groups) > _SHOWN else ""
    return f"{len(groups)} group{'s' * (len(groups) != 1)} ({'; '.join(found)}{more})"


def _shown(parameters: Sequence[Parameter]) -> str:
    """The names of the first few, or how many there are if they have none."""
    names = [each.name for each in parameters if each.name]
    if not names or len(names) < len(parameters):
        return f"{len(parameters)} parameters"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _known(parameters: Sequence[Parameter]) -> str:
    are_named = any(each.name for each in parameters)
    return f"of other names ({_shown(parameters)})" if are_named else "without names"


def _is_plain(key: Any) -> bool:
    """Whether an encoded key is a text or a number. Others are lists."""
    return isinstance(key, int | str)


def _models(state: Node | None, models: Mapping[int | str, Parameter]) -> dict[int, torch.Tensor]:
    """The parameter of each leaf."""
    return {
        leaf: models[key].tensor
        for key, child in (state.items() if state is not None else ())
        if _is_plain(key) and key in models and models[key].tensor is not None
        for leaf in leaves_of(child)
    }
